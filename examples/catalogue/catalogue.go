package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/client/near"
)

// The times that make a cache a help and not a risk.
const (
	// requestTime is what a request may take, whatever becomes of the store.
	requestTime = 2 * time.Second
	// cacheTime is how much of it goes to the cache: the source needs the rest.
	cacheTime = 100 * time.Millisecond
	// pause is how long nobody asks a store that did not answer: otherwise every request would wait for cacheTime.
	pause = time.Second
	// nearTime is how long this process answers from its own memory, and so how old an answer may be when another
	// process has changed the product.
	nearTime  = time.Second
	nearBytes = 64 << 20
	// keepTime is how long the store keeps a product. It bounds how long a product is out of date if the store was away
	// when it was changed.
	keepTime = 10 * time.Minute
)

// product is a row of the source, and as JSON the value in the store.
type product struct {
	ID         string `json:"id"`
	Name       string `json:"name"`
	PriceCents int64  `json:"price_cents"`
}

const maxID = 100 // bytes

var (
	errNoProduct = errors.New("no such product")
	errInvalid   = errors.New("invalid product")
)

// source is the source of truth: a database, in earnest.
type source interface {
	read(ctx context.Context, id string) (product, error)
	write(ctx context.Context, p product) error
}

// catalogue reads products through the cache.
type catalogue struct {
	source source
	log    *slog.Logger
	now    func() time.Time
	cache  atomic.Pointer[near.Cache] // nil until the store was there
	silent atomic.Int64               // Unix nanoseconds until which the store is not asked

	fromCache, fromSource, failures, filled atomic.Uint64
}

func newCatalogue(s source, log *slog.Logger) *catalogue {
	return &catalogue{source: s, log: log, now: time.Now}
}

// use has c ask a store from now on. The near cache is in front of it.
func (c *catalogue) use(store client.API) error {
	n, err := near.New(store, near.Options{MaxBytes: nearBytes, TTL: nearTime})
	if err == nil {
		c.cache.Store(n)
	}
	return err
}

func keyOf(id string) []byte { return []byte("product:" + id) }

// ask has fn ask the cache, within its time. It reports false without one, while it is silent, and if it fails: what
// the caller does then is right without a cache. Being absent is an answer, and so is being there already.
func (c *catalogue) ask(ctx context.Context, fn func(context.Context, *near.Cache) error) bool {
	n := c.cache.Load()
	if n == nil || c.now().UnixNano() < c.silent.Load() {
		return false
	}
	within, cancel := context.WithTimeout(ctx, cacheTime)
	defer cancel()
	err := fn(within, n)
	switch {
	case err == nil:
		return true
	case errors.Is(err, client.ErrNotFound), errors.Is(err, client.ErrExists):
		return false
	case ctx.Err() != nil: // the caller of this service is gone, or out of time: that says nothing of the store
		return false
	}
	c.failures.Add(1)
	if errors.Is(err, client.ErrFull) || errors.Is(err, client.ErrWrongType) || errors.Is(err, errInvalid) {
		c.log.Warn("the cache is of no use", "err", err)
		return false // it answers, and the next key may do
	}
	until := c.now().Add(pause).UnixNano()
	if was := c.silent.Swap(until); c.now().UnixNano() >= was { // once, not by every request
		c.log.Warn("the store does not answer: products come from their source", "for", pause, "err", err)
	}
	return false
}

// product gives a product, and whether the cache or the source knew it.
func (c *catalogue) product(ctx context.Context, id string) (p product, from string, err error) {
	if len(id) > maxID {
		return p, "", errNoProduct
	}
	known := c.ask(ctx, func(ctx context.Context, n *near.Cache) error {
		it, err := n.Get(ctx, keyOf(id))
		if err != nil {
			return err
		}
		if json.Unmarshal(it.Value, &p) != nil || p.ID != id {
			return fmt.Errorf("%w in the store: %q", errInvalid, id) // another program's; it goes when it expires
		}
		return nil
	})
	if known {
		c.fromCache.Add(1)
		return p, "cache", nil
	}
	c.fromSource.Add(1)
	if p, err = c.source.read(ctx, id); err != nil {
		return product{}, "", fmt.Errorf("product %q: %w", id, err)
	}
	// If absent: whoever has changed the product since we read it has put what it is now.
	c.fill(ctx, p, func(ctx context.Context, n *near.Cache, value []byte) error {
		_, err := n.PutIfAbsent(ctx, keyOf(id), value, client.PutOptions{TTL: keepTime})
		return err
	})
	return p, "source", nil
}

// change writes to the source, which decides, and then to the cache. If that fails, others see the former product for
// keepTime at most.
func (c *catalogue) change(ctx context.Context, p product) error {
	if p.ID == "" || len(p.ID) > maxID || p.Name == "" || p.PriceCents < 0 {
		return fmt.Errorf("%w: want an id of 1 to %d bytes, a name and price_cents >= 0", errInvalid, maxID)
	}
	if err := c.source.write(ctx, p); err != nil {
		return fmt.Errorf("product %q: %w", p.ID, err)
	}
	c.fill(ctx, p, func(ctx context.Context, n *near.Cache, value []byte) error {
		_, err := n.Put(ctx, keyOf(p.ID), value, client.PutOptions{TTL: keepTime})
		return err
	})
	return nil
}

// fill has put write p to the cache, if there is one.
func (c *catalogue) fill(ctx context.Context, p product, put func(context.Context, *near.Cache, []byte) error) {
	value, err := json.Marshal(p)
	if err != nil {
		c.log.Error("product", "id", p.ID, "err", err)
		return
	}
	if c.ask(ctx, func(ctx context.Context, n *near.Cache) error { return put(ctx, n, value) }) {
		c.filled.Add(1)
	}
}

var (
	lookups = prometheus.NewDesc("catalogue_lookups_total", "Products asked for, by where they came from.",
		[]string{"from"}, nil)
	fills    = prometheus.NewDesc("catalogue_cache_fills_total", "Products written to the cache.", nil, nil)
	failed   = prometheus.NewDesc("catalogue_cache_failures_total", "Times that the store did not answer.", nil, nil)
	nearHits = prometheus.NewDesc("catalogue_near_hits_total", "Lookups answered from this process's memory.", nil, nil)
	nearSize = prometheus.NewDesc("catalogue_near_bytes", "Memory of the near cache.", nil, nil)
)

// Describe makes a catalogue a prometheus.Collector.
func (c *catalogue) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{lookups, fills, failed, nearHits, nearSize} {
		ch <- d
	}
}

// Collect gives the metrics.
func (c *catalogue) Collect(ch chan<- prometheus.Metric) {
	count := func(d *prometheus.Desc, v uint64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
	}
	count(lookups, c.fromCache.Load(), "cache")
	count(lookups, c.fromSource.Load(), "source")
	count(fills, c.filled.Load())
	count(failed, c.failures.Load())
	if n := c.cache.Load(); n != nil {
		s := n.Stats()
		count(nearHits, s.Hits)
		ch <- prometheus.MustNewConstMetric(nearSize, prometheus.GaugeValue, float64(s.Bytes))
	}
}
