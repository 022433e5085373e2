package memcached_test

import (
	"context"
	"encoding/base64"
	"fmt"
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
	addr, _ := serve(t, memcached.Options{Client: evicting{clienttest.New(clienttest.Options{})},
		Now: func() time.Time {
			return time.Unix(1_000_000_000+clock.Load(), 0)
		}})
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
	store := clienttest.New(clienttest.Options{})
	if _, err := store.Put(t.Context(), []byte(inside.FunctionsKey), []byte("x"), client.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	addr, _ := serve(t, memcached.Options{Client: store})
	c := dial(t, addr)
	c.ask(t, "set a 0 0 1\r\nx\r\n")
	name := base64.StdEncoding.EncodeToString([]byte(inside.FunctionsKey))
	for _, say := range []string{"mg " + name + " b v", "md " + name + " b", "ms " + name + " 1 b\r\nx"} {
		if got := talk(t, addr, say+"\r\nmn\r\n"); !strings.HasPrefix(got, "CLIENT_ERROR key is reserved ") ||
			!strings.HasSuffix(got, "\r\nMN\r\n") {
			t.Errorf("%q: %q", say, got)
		}
	}
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

// TestSharedNamespace: of databases that share the namespace with memcached's clients these neither see nor touch a
// key, by whatever protocol.
func TestSharedNamespace(t *testing.T) {
	store := clienttest.New(clienttest.Options{})
	others := []string{inside.DatabasePrefix(1) + "k", inside.DatabasePrefix(63) + "k", inside.OwnPrefix + "x"}
	versions := make(map[string]uint64)
	for _, k := range others {
		v, err := store.Put(t.Context(), []byte(k), []byte("7"), client.PutOptions{})
		if err != nil {
			t.Fatal(err)
		}
		versions[k] = v
	}
	addr, _ := serve(t, memcached.Options{Client: store, Count: func(context.Context) (uint64, error) {
		return 42, nil
	}})
	const why = "key is reserved for other databases of the namespace"
	for _, k := range others {
		for _, say := range []string{"get", "getq", "getk", "getkq", "set f=0 e=0 v=x", "setq f=0 e=0 v=x",
			"add f=0 e=0 v=x", "replace f=0 e=0 v=x", "append v=x", "prepend v=x", "delete", "deleteq",
			"incr d=1 i=0 e=0", "decr d=1 i=0 e=0", "touch e=0", "gat e=0", "gatq e=0"} {
			op, rest, _ := strings.Cut(say, " ")
			got := binaryTalk(t, addr, op+" k="+k+" "+rest, "set k=after f=0 e=0 v=1")
			if first, then, _ := strings.Cut(got, "\n"); !strings.Contains(
				first, fmt.Sprintf("status=0x04 type=0 cas=0 opaque=0 value=%q", why)) ||
				!strings.Contains(then, "status=0x00") {
				t.Errorf("%s %q: %s", say, k, got)
			}
		}
		key := base64.StdEncoding.EncodeToString([]byte(k))
		for _, say := range []string{"mg " + key + " b v", "mg " + key + " b k", "ms " + key + " 1 b\r\nx",
			"md " + key + " b", "ma " + key + " b", "mg " + key + " b N10 v T20"} {
			if got, want := talk(t, addr, say+"\r\nmn\r\n"), "CLIENT_ERROR "+why+"\r\nMN\r\n"; got != want {
				t.Errorf("%q: %q, want %q", say, got, want)
			}
		}
		// In text a key has no such bytes.
		if got := talk(t, addr, "get "+k+"\r\n"); got != "CLIENT_ERROR bad command line format\r\n" {
			t.Errorf("get %q: %q", k, got)
		}
	}
	c := dial(t, addr)
	if got := c.ask(t, "stats\r\n"); !strings.Contains(got, "STAT curr_items 42\r\n") {
		t.Errorf("stats are not of what is counted: %q", got)
	}
	if got := c.ask(t, "flush_all\r\n"); got != "OK\r\n" {
		t.Fatal(got)
	}
	if got := c.ask(t, "get after\r\n"); got != "END\r\n" {
		t.Error(got)
	}
	for k, version := range versions {
		if it, err := store.Get(t.Context(), []byte(k)); err != nil || it.Version != version {
			t.Errorf("%q has version %d behind all of that, want %d: %v", k, it.Version, version, err)
		}
	}
}
