package client_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/devstore"
	"github.com/kvd-project/kvd/rdma"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// open starts a store and a client on the provider, or on shm and tcp if that is empty.
func open(t testing.TB, provider string, so devstore.Options, co client.Options) (*devstore.Store, *client.Client) {
	t.Helper()
	if provider != "" {
		so.Providers = []string{provider}
	}
	st, err := devstore.Start(t.Context(), so)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := st.Close(); err != nil {
			t.Error(err)
		}
	})
	co.Directory, co.Devices, co.Provider = st.Directory(), st.Devices(), provider
	c, err := client.Open(t.Context(), co)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return st, c
}

// A client that names no device opens what this machine has, and closes it again.
func TestConnect(t *testing.T) {
	st, first := open(t, "", devstore.Options{CapacityBytes: 64 << 20, NoJanitor: true}, client.Options{})
	if _, err := first.Put(t.Context(), []byte("k"), nil, client.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	use := func(what, provider string, c *client.Client, err error) {
		t.Helper()
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		if _, err := c.Put(t.Context(), []byte("k"), []byte(what), client.PutOptions{}); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		if it, err := c.Get(t.Context(), []byte("k")); err != nil || string(it.Value) != what {
			t.Errorf("%s: got %q, %v", what, it.Value, err)
		}
		if got := c.Stats().Connections["m1"]; got != provider {
			t.Errorf("%s: connected by %q, want %s", what, got, provider)
		}
		devices := c.Opened()
		if err := c.Close(); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		for _, d := range devices {
			if _, err := d.AllocPD(); err == nil {
				t.Errorf("%s: device %s is still open", what, d.Name())
			}
		}
		if len(devices) == 0 {
			t.Errorf("%s: no device was opened", what)
		}
	}
	c, err := client.Connect(t.Context(), st.Directory()...)
	use("Connect", "shm", c, err)
	c, err = client.Open(t.Context(), client.Options{Directory: st.Directory(), Provider: "tcp"})
	use("one provider", "tcp", c, err)

	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := client.Connect(ctx, "127.0.0.1:1"); !errors.Is(err, client.ErrUnavailable) {
		t.Errorf("nobody listens: %v", err)
	}
	_, err = client.Open(t.Context(), client.Options{Directory: st.Directory(), Namespace: "none"})
	if !errors.Is(err, client.ErrNoNamespace) {
		t.Errorf("unknown namespace: %v", err)
	}
	for what, o := range map[string]client.Options{
		`Provider: "rocket", want one of verbs, shm, tcp`: {Directory: st.Directory(), Provider: "rocket"},
		`Provider: "tcp" is not among Devices`: {Directory: st.Directory(), Provider: "tcp",
			Devices: st.Devices()[:1]},
		"Directory: no address": {},
	} {
		if _, err := client.Open(t.Context(), o); !errors.Is(err, client.ErrInvalid) ||
			!strings.Contains(err.Error(), what) {
			t.Errorf("got %v, want ErrInvalid and %q", err, what)
		}
	}
}

var providers = []string{"shm", "tcp", "sim"}

func each(t *testing.T, f func(t *testing.T, provider string)) {
	for _, p := range providers {
		t.Run(p, func(t *testing.T) { f(t, p) })
	}
}

func TestOperations(t *testing.T) {
	each(t, func(t *testing.T, p string) {
		_, c := open(t, p, devstore.Options{Nodes: 2, CapacityBytes: 64 << 20}, client.Options{})
		ctx := t.Context()
		k := []byte("k\x00\xff")
		if _, err := c.Get(ctx, k); !errors.Is(err, client.ErrNotFound) {
			t.Fatalf("get of nothing: %v", err)
		}
		v1, err := c.Put(ctx, k, []byte("one"), client.PutOptions{})
		if err != nil {
			t.Fatal(err)
		}
		it, err := c.Get(ctx, k)
		if err != nil || string(it.Value) != "one" || it.Version != v1 || !it.Expires.IsZero() {
			t.Fatalf("get: %+v, %v; version %d", it, err, v1)
		}
		if _, err := c.PutIfAbsent(ctx, k, []byte("x"), client.PutOptions{}); !errors.Is(err, client.ErrExists) {
			t.Fatalf("add of a key that exists: %v", err)
		}
		v2, err := c.Put(ctx, k, nil, client.PutOptions{})
		if err != nil || v2 <= v1 {
			t.Fatalf("put: version %d after %d, %v", v2, v1, err)
		}
		if it, err := c.Get(ctx, k); err != nil || len(it.Value) != 0 {
			t.Fatalf("empty value: %q, %v", it.Value, err)
		}
		if _, err := c.CompareAndSwap(ctx, k, v1, []byte("no"), client.PutOptions{}); !errors.Is(
			err, client.ErrConflict) {
			t.Fatalf("cas with an old version: %v", err)
		}
		v3, err := c.CompareAndSwap(ctx, k, v2, []byte("three"), client.PutOptions{})
		if err != nil || v3 <= v2 {
			t.Fatalf("cas: %d, %v", v3, err)
		}
		if err := c.DeleteVersion(ctx, k, v2); !errors.Is(err, client.ErrConflict) {
			t.Fatalf("conditional delete with an old version: %v", err)
		}
		dst := make([]byte, 4)
		if n, err := c.GetInto(ctx, k, dst); n != 5 || !errors.Is(err, io.ErrShortBuffer) {
			t.Fatalf("short buffer: %d, %v", n, err)
		}
		dst = make([]byte, 5)
		if n, err := c.GetInto(ctx, k, dst); n != 5 || err != nil || string(dst) != "three" {
			t.Fatalf("get into: %d, %v, %q", n, err, dst)
		}
		if err := c.DeleteVersion(ctx, k, v3); err != nil {
			t.Fatal(err)
		}
		if err := c.Delete(ctx, k); !errors.Is(err, client.ErrNotFound) {
			t.Fatalf("delete of nothing: %v", err)
		}
		if _, err := c.CompareAndSwap(ctx, k, v3, nil, client.PutOptions{}); !errors.Is(err, client.ErrNotFound) {
			t.Fatalf("cas of nothing: %v", err)
		}
		for i := range 10 {
			if n, err := c.Incr(ctx, []byte("n"), int64(i)); err != nil || n != int64(i*(i+1)/2) {
				t.Fatalf("incr: %d, %v", n, err)
			}
		}
		if _, err := c.Put(ctx, []byte("text"), []byte("abc"), client.PutOptions{}); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Incr(ctx, []byte("text"), 1); !errors.Is(err, client.ErrNotInteger) {
			t.Fatalf("incr of text: %v", err)
		}
		// A second client sees the same.
	})
}

func TestSizes(t *testing.T) {
	each(t, func(t *testing.T, p string) {
		_, c := open(t, p, devstore.Options{CapacityBytes: 1 << 30}, client.Options{})
		ctx := t.Context()
		rng := rand.New(rand.NewPCG(1, 2))
		sizes := []int{0, 1, 31, 32, 33, 100, 1000, 4096, 65535, 1 << 20, 3_900_000, 4 << 20, 10<<20 + 1}
		if !testing.Short() {
			sizes = append(sizes, client.DefaultMaxValueLen)
		}
		for i, n := range sizes {
			key := bytes.Repeat([]byte{byte(i)}, []int{1, 16, 255, 4000, client.MaxKeyLen}[i%5])
			for round := range 2 { // insert, then update
				val := make([]byte, n)
				for j := 0; j < len(val); j += 1 + j/1000 {
					val[j] = byte(rng.Uint32())
				}
				if _, err := c.Put(ctx, key, val, client.PutOptions{}); err != nil {
					t.Fatalf("put of %d bytes, round %d: %v", n, round, err)
				}
				it, err := c.Get(ctx, key)
				if err != nil || !bytes.Equal(it.Value, val) {
					t.Fatalf("get of %d bytes: %d bytes, %v", n, len(it.Value), err)
				}
			}
			if err := c.Delete(ctx, key); err != nil {
				t.Fatal(err)
			}
		}
		for _, bad := range []struct{ k, v int }{{0, 1}, {client.MaxKeyLen + 1, 1}, {1,
			client.DefaultMaxValueLen + 1}} {
			if _, err := c.Put(ctx, make([]byte, bad.k), make([]byte, bad.v), client.PutOptions{}); !errors.Is(
				err, client.ErrInvalid) {
				t.Errorf("key of %d, value of %d bytes: %v", bad.k, bad.v, err)
			}
		}
	})
}

func TestManyKeysAndScan(t *testing.T) {
	each(t, func(t *testing.T, p string) {
		_, c := open(t, p, devstore.Options{Nodes: 2, CapacityBytes: 64 << 20}, client.Options{})
		_ = rdma.Yes
		n := 20_000
		if p == "sim" {
			n = 2_000
		}
		ctx := t.Context()
		var kvs []client.KV
		for i := range n {
			kvs = append(kvs, client.KV{Key: fmt.Appendf(nil, "key-%d", i), Value: fmt.Appendf(nil, "value-%d", i)})
		}
		for i, r := range c.MultiPut(ctx, kvs) {
			if r.Err != nil {
				t.Fatalf("multi-put %s: %v", kvs[i].Key, r.Err)
			}
		}
		var keys [][]byte
		for _, kv := range kvs {
			keys = append(keys, kv.Key)
		}
		keys = append(keys, []byte("absent"))
		for i, r := range c.MultiGet(ctx, keys) {
			if i == n {
				if !errors.Is(r.Err, client.ErrNotFound) {
					t.Fatalf("absent key: %v", r.Err)
				}
			} else if r.Err != nil || !bytes.Equal(r.Value, kvs[i].Value) {
				t.Fatalf("multi-get %s: %q, %v", keys[i], r.Value, r.Err)
			}
		}
		seen := map[string]int{}
		for kv, err := range c.Scan(ctx, client.ScanOptions{}) {
			if err != nil {
				t.Fatal(err)
			}
			seen[string(kv.Key)]++
		}
		// A scan that is left goes on from its cursor, and leaves out nothing.
		var cur client.Cursor
		resumed := map[string]bool{}
		for loops := 0; !cur.Done; loops++ {
			at, left := cur, len(resumed)
			for kv, err := range c.Scan(ctx, client.ScanOptions{Cursor: &cur, KeysOnly: true}) {
				if err != nil {
					t.Fatal(err)
				}
				if cur != at && len(resumed) > left {
					break // behind the first page that has any
				}
				resumed[string(kv.Key)] = true
			}
			if loops > n {
				t.Fatalf("a scan does not get on from %+v", cur)
			}
		}
		if len(resumed) != n {
			t.Fatalf("a scan that was left again and again gave %d keys, want %d", len(resumed), n)
		}
		for _, kv := range kvs {
			if seen[string(kv.Key)] != 1 {
				t.Fatalf("scan returned %s %d times", kv.Key, seen[string(kv.Key)])
			}
		}
		if len(seen) != n {
			t.Fatalf("scan returned %d keys, want %d", len(seen), n)
		}
		for i, r := range c.MultiDelete(ctx, keys[:n]) {
			if r.Err != nil {
				t.Fatalf("multi-delete %s: %v", keys[i], r.Err)
			}
		}
		cur = client.Cursor{}
		for kv, err := range c.Scan(ctx, client.ScanOptions{Cursor: &cur, Count: 10}) {
			t.Fatalf("scan of nothing: %+v, %v", kv, err)
		}
		if !cur.Done {
			t.Fatalf("scan of nothing ends at %+v", cur)
		}
	})
}

func TestTTL(t *testing.T) {
	_, c := open(t, "shm", devstore.Options{CapacityBytes: 64 << 20}, client.Options{})
	ctx := t.Context()
	k := []byte("k")
	const ttl = 30 * time.Millisecond
	var it client.Item
	for {
		begin := time.Now()
		if _, err := c.Put(ctx, k, []byte("v"), client.PutOptions{TTL: ttl}); err != nil {
			t.Fatal(err)
		}
		var err error
		if it, err = c.Get(ctx, k); err == nil && !it.Expires.IsZero() {
			break
		}
		if time.Since(begin) < ttl || !errors.Is(err, client.ErrNotFound) { // else it was over before the Get
			t.Fatalf("%+v, %v", it, err)
		}
	}
	time.Sleep(time.Until(it.Expires) + time.Millisecond) // the TTL itself, not a race
	if _, err := c.Get(ctx, k); !errors.Is(err, client.ErrNotFound) {
		t.Fatalf("expired key: %v", err)
	}
	if err := c.Delete(ctx, k); !errors.Is(err, client.ErrNotFound) {
		t.Fatalf("delete of an expired key: %v", err)
	}
	if _, err := c.PutIfAbsent(ctx, k, []byte("w"), client.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := c.Touch(ctx, k, time.Hour); err != nil {
		t.Fatal(err)
	}
	if it, err := c.Get(ctx, k); err != nil || string(it.Value) != "w" || time.Until(it.Expires) < 59*time.Minute {
		t.Fatalf("touched: %+v, %v", it, err)
	}
}

// TestConcurrent lets goroutines of several clients increment shared counters.
func TestConcurrent(t *testing.T) {
	each(t, func(t *testing.T, p string) {
		st, c := open(t, p, devstore.Options{Nodes: 2, CapacityBytes: 64 << 20}, client.Options{Lanes: 2})
		c2, err := client.Open(t.Context(), client.Options{Directory: st.Directory(), Devices: st.Devices(),
			Provider: p, Lanes: 2})
		if err != nil {
			t.Fatal(err)
		}
		defer c2.Close()
		const goroutines, counters = 4, 3
		rounds := 300
		if p == "sim" {
			rounds = 20
		}
		var wg sync.WaitGroup
		for g := range goroutines {
			for _, c := range []*client.Client{c, c2} {
				wg.Add(1)
				go func() {
					defer wg.Done()
					for i := range rounds {
						if _, err := c.Incr(t.Context(), fmt.Appendf(nil, "n%d", (i+g)%counters), 1); err != nil {
							t.Error(err)
							return
						}
					}
				}()
			}
		}
		wg.Wait()
		sum := int64(0)
		for i := range counters {
			n, err := c.Incr(t.Context(), fmt.Appendf(nil, "n%d", i), 0)
			if err != nil {
				t.Fatal(err)
			}
			sum += n
		}
		if want := int64(2 * goroutines * rounds); sum != want {
			t.Fatalf("counters sum to %d, want %d", sum, want)
		}
	})
}

func TestContext(t *testing.T) {
	_, c := open(t, "tcp", devstore.Options{CapacityBytes: 64 << 20}, client.Options{})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := c.Get(ctx, []byte("k")); !errors.Is(err, context.Canceled) || client.Outcome(err) != rdma.No {
		t.Fatalf("cancelled: %v", err)
	}
}
