package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"sync"
	"time"
)

// sourceSessions bounds how many ask the source at a time, as a pool of connections does: without the cache all
// requests come to it.
const sourceSessions = 64

// table stands for a database: what a file has, held in memory, that answers slowly. Changes are gone with the process.
type table struct {
	delay    time.Duration
	sessions chan struct{}
	mu       struct {
		sync.Mutex
		products map[string]product
	}
}

func readTable(file string, delay time.Duration) (*table, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var all []product
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(&all); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	t := &table{delay: delay, sessions: make(chan struct{}, sourceSessions)}
	t.mu.products = make(map[string]product, len(all))
	for _, p := range all {
		t.mu.products[p.ID] = p
	}
	return t, nil
}

// session waits for one of the table's sessions and for its answer.
func (t *table) session(ctx context.Context, fn func()) error {
	select {
	case t.sessions <- struct{}{}:
		defer func() { <-t.sessions }()
	case <-ctx.Done():
		return ctx.Err()
	}
	select {
	case <-time.After(t.delay):
	case <-ctx.Done():
		return ctx.Err()
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	fn()
	return nil
}

func (t *table) read(ctx context.Context, id string) (p product, err error) {
	ok := false
	if err := t.session(ctx, func() { p, ok = t.mu.products[id] }); err != nil {
		return p, err
	}
	if !ok {
		return p, errNoProduct
	}
	return p, nil
}

func (t *table) write(ctx context.Context, p product) error {
	return t.session(ctx, func() { t.mu.products[p.ID] = p })
}
