package client_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/client/clienttest"
	"github.com/kvd-project/kvd/client/near"
	"github.com/kvd-project/kvd/internal/devstore"
	"github.com/kvd-project/kvd/internal/inside"
	"github.com/kvd-project/kvd/rdma"
)

// TestExists: Exists finds what Get finds, of every length and type, alone and in a batch of all kinds.
func TestExists(t *testing.T) {
	apis := map[string]client.API{"clienttest": clienttest.New(clienttest.Options{})}
	for _, p := range []string{"shm", "tcp"} {
		_, c := open(t, p, devstore.Options{}, client.Options{})
		apis[p] = c
	}
	n, err := near.New(apis["shm"], near.Options{MaxBytes: 1 << 20, TTL: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"clienttest", "tcp", "shm", "near"} {
		c, ctx := apis[name], t.Context()
		if name == "near" {
			c = n
		}
		check := func(key string, version uint64, want error) {
			t.Helper()
			for range 2 { // without a hint, perhaps, and with one
				in, err := c.Exists(ctx, []byte(key))
				if !errors.Is(err, want) || err == nil && (in.Version != version || in.Size != -1) {
					t.Errorf("%s: %s: %+v, %v, want version %d, %v", name, key, in, err, version, want)
				}
			}
		}
		check("k", 0, client.ErrNotFound)
		check("", 0, client.ErrInvalid)
		put := func(o client.Op) uint64 {
			t.Helper()
			o.Kind = client.OpPut
			ops := []client.Op{o}
			if c.Do(ctx, ops); ops[0].Err != nil {
				t.Fatal(name, ops[0].Err)
			}
			return ops[0].Item.Version
		}
		later := time.Now().Add(time.Hour).Truncate(time.Millisecond)
		check("k", put(client.Op{Key: []byte("k"), Value: []byte("v")}), nil)
		check("k", put(client.Op{Key: []byte("k"), Value: make([]byte, 5<<20)}), nil)
		set := put(client.Op{Key: []byte("set"), Value: []byte("v"), Type: client.Set, Flags: 3, Expires: later})
		check("set", set, nil)
		if in, err := c.Exists(ctx, []byte("set")); err != nil || !in.Expires.Equal(later) {
			t.Errorf("%s: %+v, %v, want that it expires at %v", name, in, err, later)
		}
		put(client.Op{Key: []byte("gone"), Value: []byte("v"), Expires: time.UnixMilli(1)})
		check("gone", 0, client.ErrNotFound)
		v := put(client.Op{Key: []byte("k"), Value: []byte("v2")})
		ops := []client.Op{{Kind: client.OpExists, Key: []byte("k")}, {Kind: client.OpGet, Key: []byte("k")},
			{Kind: client.OpExists, Key: []byte("none")}, {Kind: client.OpExists, Key: []byte("set")},
			{Kind: client.OpPut, Key: []byte("other"), Value: []byte("x")},
			{Kind: client.OpDelete, Key: []byte("gone")}}
		c.Do(ctx, ops)
		if ops[0].Err != nil || ops[0].Item.Version != v || ops[0].Item.Value != nil ||
			string(ops[1].Item.Value) != "v2" || !errors.Is(ops[2].Err, client.ErrNotFound) || ops[3].Err != nil ||
			ops[3].Item.Version != set || ops[4].Err != nil {
			t.Errorf("%s: %+v", name, ops)
		}
		if err := c.Delete(ctx, []byte("k")); err != nil {
			t.Fatal(name, err)
		}
		check("k", 0, client.ErrNotFound)
	}
}

// TestExistsPrefix counts the keys before the first that is not there, or of which nobody knows.
func TestExistsPrefix(t *testing.T) {
	_, shm := open(t, "shm", devstore.Options{}, client.Options{})
	fake := clienttest.New(clienttest.Options{})
	n, err := near.New(fake, near.Options{MaxBytes: 1 << 20, TTL: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]client.API{"shm": shm, "clienttest": fake, "near": n} {
		for _, k := range []string{"a", "b", "d"} {
			if _, err := c.Put(t.Context(), []byte(k), []byte("v"), client.PutOptions{}); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := c.Get(t.Context(), []byte("a")); err != nil {
			t.Fatal(err)
		}
		for _, x := range []struct {
			keys []string
			n    int
			err  error
		}{
			{nil, 0, nil}, {[]string{"a", "b", "d"}, 3, nil}, {[]string{"a", "b", "c", "d"}, 2, nil},
			{[]string{"c", "a"}, 0, nil}, {[]string{"a", "", "b"}, 1, client.ErrInvalid},
			{[]string{"a", "c", "", "b"}, 1, nil}, {[]string{"a", "a", "b"}, 3, nil},
		} {
			var keys [][]byte
			for _, k := range x.keys {
				keys = append(keys, []byte(k))
			}
			if n, err := c.ExistsPrefix(t.Context(), keys); n != x.n || !errors.Is(err, x.err) {
				t.Errorf("%s: %q: %d, %v, want %d, %v", name, x.keys, n, err, x.n, x.err)
			}
		}
	}
}

// TestExistsCosts: of remembered keys a batch takes a READ of 8 bytes each, in few chains, and no use is noted.
func TestExistsCosts(t *testing.T) {
	const n = 128
	for provider, most := range map[string]uint64{"shm": n / 16, "tcp": 1} {
		s, c := open(t, provider, devstore.Options{Namespaces: []devstore.Namespace{{Name: "cache", Mode: cacheMode,
			BytesPerNode: 64 << 20}}}, client.Options{})
		cache, err := client.Open(t.Context(), client.Options{Directory: s.Directory(), Devices: s.Devices(),
			Provider: provider, Namespace: "cache", Lanes: 1})
		if err != nil {
			t.Fatal(err)
		}
		defer cache.Close()
		for name, c := range map[string]*client.Client{"store": c, "cache": cache} {
			existsCosts(t, provider+" "+name, c, n, most)
		}
	}
}

func existsCosts(t *testing.T, name string, c *client.Client, n int, most uint64) {
	t.Helper()
	// The memory of where keys are is set-associative and may have dropped one of so many. A session's background work
	// has verbs of its own.
	for attempt := range 20 {
		keys := make([][]byte, n)
		for i := range keys {
			keys[i] = fmt.Appendf(nil, "%d-%d", attempt, i)
			mustPut(t, c, keys[i], "v")
		}
		before := c.Stats()
		if k, err := c.ExistsPrefix(t.Context(), keys); k != n || err != nil {
			t.Fatalf("%s: %d, %v", name, k, err)
		}
		after := c.Stats()
		reads, rest := after.Verbs.Verbs[rdma.OpRead]-before.Verbs.Verbs[rdma.OpRead], uint64(0)
		for op, v := range after.Verbs.Verbs {
			if rdma.Opcode(op) != rdma.OpRead {
				rest += v - before.Verbs.Verbs[op]
			}
		}
		if bytes := after.Verbs.ReadBytes - before.Verbs.ReadBytes; reads == uint64(n) && rest == 0 &&
			bytes == 8*uint64(n) && after.Verbs.Doorbells-before.Verbs.Doorbells <= most &&
			after.Ops["exists"]-before.Ops["exists"] == uint64(n) && after.Rounds["exists"]-before.Rounds["exists"] ==
			uint64(n) && after.Notes == before.Notes {
			return
		}
	}
	t.Errorf("%s: of 20 batches none cost %d READs of 8 bytes in %d doorbells", name, n, most)
}

// TestExistsIsNoUse: a cache's records are as long unused as if nobody had asked.
func TestExistsIsNoUse(t *testing.T) {
	s, _ := open(t, "shm",
		devstore.Options{Namespaces: []devstore.Namespace{{Name: "cache", Mode: cacheMode, BytesPerNode: 64 << 20}}},
		client.Options{})
	cache, err := client.Open(t.Context(), client.Options{Directory: s.Directory(), Devices: s.Devices(),
		Namespace: "cache"})
	if err != nil {
		t.Fatal(err)
	}
	defer cache.Close()
	key := []byte("k")
	mustPut(t, cache, key, "v")
	until(t.Context(), t, cache, key, func(ago time.Duration) bool {
		if _, err := cache.Exists(t.Context(), key); err != nil {
			t.Fatal(err)
		}
		return ago > 500*time.Millisecond
	})
	ago, noted, err := inside.Of(cache).LastUse(t.Context(), key)
	if err != nil || !noted || ago < 500*time.Millisecond {
		t.Errorf("%v, %v, %v", ago, noted, err)
	}
}
