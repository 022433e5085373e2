package main

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"regexp"
	"testing"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/devstore"
)

// between changes the store before the second and each later look, and fails the looks after the last change.
type between struct {
	ctl.Store
	looks int
	steps []func()
}

func (b *between) lookAgain() error {
	b.looks++
	if b.looks == 1 {
		return nil
	}
	if b.looks-2 >= len(b.steps) {
		return errors.New("nothing changes any more")
	}
	b.steps[b.looks-2]()
	return nil
}

func (b *between) Get(ctx context.Context, k []byte) (client.Item, error) {
	if err := b.lookAgain(); err != nil {
		return client.Item{}, err
	}
	return b.Store.Get(ctx, k)
}

func (b *between) Scan(ctx context.Context, o client.ScanOptions) iter.Seq2[client.KV, error] {
	if *o.Cursor == (client.Cursor{}) { // else a later page
		if err := b.lookAgain(); err != nil {
			return func(yield func(client.KV, error) bool) { yield(client.KV{}, err) }
		}
	}
	return b.Store.Scan(ctx, o)
}

// A watch prints the changes from one look to the next, several of a key as one, and nothing else.
func TestWatchKeys(t *testing.T) {
	e := newEnv(t, devstore.Options{CapacityBytes: 256 << 20, Providers: []string{"shm"}})
	other := *e
	put := func(keys ...string) func() {
		return func() {
			for _, k := range keys {
				other.must("", "put", k, "v")
			}
		}
	}
	del := func(k string) func() { return func() { other.must("", "del", k) } }
	still := func() {}
	at := regexp.MustCompile(`(?m)^\S+T\S+Z (\w+ \S+).*$`)
	for _, c := range []struct {
		name  string
		args  []string
		first []string
		steps []func()
		want  string
	}{
		{"a key", []string{"a", "--count", "3"}, []string{"a"},
			[]func(){still, put("a", "a", "b"), del("a"), put("a")}, "put a\ndel a\nput a\n"},
		{"a key that is missing", []string{"x", "--count", "1"}, nil, []func(){put("y"), put("x")}, "put x\n"},
		{"a prefix", []string{"--prefix", "p:", "--count", "4"}, []string{"p:1", "q:1"},
			[]func(){put("q:1", "p:2", "p:1"), still, del("p:1"), put("p:3")}, "put p:1\nput p:2\ndel p:1\nput p:3\n"},
	} {
		other.must("", "flush", "--yes")
		for _, k := range c.first {
			other.must("", "put", k, "v")
		}
		e.wrap(func(s ctl.Store) ctl.Store { return &between{Store: s, steps: c.steps} })
		got := e.must("", append([]string{"watch", "--interval", "10ms"}, c.args...)...)
		if got = at.ReplaceAllString(got, "$1"); got != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}

// A watch ends with an error where there are more keys than it may remember, and well when it is interrupted.
func TestWatchEnds(t *testing.T) {
	e := newEnv(t, devstore.Options{CapacityBytes: 256 << 20, Providers: []string{"shm"}})
	for i := range 3 {
		e.must("", "put", fmt.Sprintf("k%d", i), "v")
	}
	if r := e.run("", "watch", "--prefix", "k", "--limit", "2"); r.code != ctl.ExitUsage || r.stdout != "" {
		t.Errorf("more keys than the limit: %+v", r)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	e.wrap(func(s ctl.Store) ctl.Store { return &between{Store: s, steps: []func(){cancel}} })
	if r := e.runContext(ctx, "", "watch", "k0", "--interval", "10ms"); r.code != ctl.ExitOK || r.stdout != "" {
		t.Errorf("interrupted: %+v", r)
	}
}
