package memcached_test

import (
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/client/clienttest"
	"github.com/kvd-project/kvd/internal/inside"
	"github.com/kvd-project/kvd/internal/memcached"
)

// evicting is a store that counts, as a client.Client does.
type evicting struct{ *clienttest.Store }

func (evicting) Stats() client.Stats { return client.Stats{Evicted: 7} }

// TestItemStats: `stats` tells how many keys there are, as of some seconds ago, what was stored and what was evicted.
func TestItemStats(t *testing.T) {
	var clock atomic.Int64
	addr, _ := serve(t, memcached.Options{Client: evicting{clienttest.New(clienttest.Options{})}, Now: func() time.Time { return time.Unix(1_000_000_000+clock.Load(), 0) }})
	c := dial(t, addr)
	want := func(lines ...string) {
		t.Helper()
		got := c.ask(t, "stats\r\n")
		for _, l := range lines {
			if !strings.Contains(got, "STAT "+l+"\r\n") {
				t.Errorf("stats lack %s: %q", l, got)
			}
		}
	}
	c.ask(t, "set a 0 0 1\r\nx\r\nset b 0 0 1\r\nx\r\nadd b 0 0 1\r\nx\r\n")
	want("curr_items 2", "total_items 2", "evictions 7", "cmd_set 3")
	c.ask(t, "set c 0 0 1\r\nx\r\n")
	want("curr_items 2", "total_items 3")
	clock.Add(11)
	want("curr_items 3")
	c.ask(t, "stats reset\r\n")
	want("curr_items 3", "total_items 0")
}

// TestFlushSparesLibraries: flush_all deletes what clients can see, and no client can name the key of libraries.
func TestFlushSparesLibraries(t *testing.T) {
	if n := len(inside.FunctionsKey); n <= 250 || n > client.MaxKeyLen {
		t.Fatalf("the key of libraries has %d bytes; memcached's have up to 250", n)
	}
	store := clienttest.New(clienttest.Options{})
	if _, err := store.Put(t.Context(), []byte(inside.FunctionsKey), []byte("x"), client.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	addr, _ := serve(t, memcached.Options{Client: store})
	c := dial(t, addr)
	c.ask(t, "set a 0 0 1\r\nx\r\n")
	if got := c.ask(t, "flush_all\r\n"); got != "OK\r\n" {
		t.Fatal(got)
	}
	if got := c.ask(t, "get a\r\n"); got != "END\r\n" {
		t.Error(got)
	}
	if _, err := store.Get(t.Context(), []byte(inside.FunctionsKey)); err != nil {
		t.Error(err)
	}
}
