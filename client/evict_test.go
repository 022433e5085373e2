package client_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/dirpb"
)

const cacheMode = dirpb.NamespaceMode_NAMESPACE_CACHE

// A cache takes many times what it holds, without an error, and keeps what is used.
func TestCacheTakesMore(t *testing.T) {
	for _, p := range []string{"shm", "tcp"} {
		for _, copies := range []int{1, 2} {
			t.Run(fmt.Sprintf("%s/r=%d", p, copies), func(t *testing.T) {
				t.Parallel()
				r := newRig(t, p, copies, 5*time.Second)
				r.create(&dirpb.CreateNamespaceRequest{Name: "default", Mode: cacheMode, Replicas: uint32(copies),
					BytesPerNode: uint64(copies) * 4 << 20, Shards: 2})
				c := r.client(r.options())
				ctx := t.Context()
				rng := rand.New(rand.NewPCG(1, 2))
				value := make([]byte, 2600)
				key := func(i int) []byte { return fmt.Appendf(nil, "key%d", i) }
				keys := 8000 * copies // more than fits
				hot := 0
				for i := range keys {
					n := 200 + rng.IntN(len(value)-200)
					if _, err := c.Put(ctx, key(i), value[:n], client.PutOptions{}); err != nil {
						t.Fatalf("put %d: %v", i, err)
					}
					// Some keys are used all the time.
					h := key(rng.IntN(50))
					switch _, err := c.Get(ctx, h); {
					case err == nil:
						hot++
					case errors.Is(err, client.ErrNotFound):
						if _, err := c.Put(ctx, h, value[:500], client.PutOptions{}); err != nil {
							t.Fatal(err)
						}
					default:
						t.Fatal(err)
					}
				}
				var n uint64
				var st client.Stats
				eventually(t, func() string { // an eviction counts when it is over
					var err error
					if n, err = c.Count(ctx); err != nil {
						t.Fatal(err)
					}
					if st = c.Stats(); n+st.Evicted < uint64(keys) {
						return fmt.Sprintf("%d keys and %d evicted of %d", n, st.Evicted, keys)
					}
					return ""
				})
				t.Logf("%d keys of %d, %d evicted, %d notes; %d bytes granted, %d live, %d limbo; hot keys hit %.1f %%",
					n, keys, st.Evicted, st.Notes,
					st.GrantedUnits*64, st.LiveUnits*64, st.LimboUnits*64, 100*float64(hot)/float64(keys))
				if n < 1000 || st.GrantedUnits*64 > uint64(copies)*4<<20 {
					t.Errorf("%d keys and %d evicted of %d, %d bytes granted", n, st.Evicted, keys, st.GrantedUnits*64)
				}
				if hot < keys*9/10 {
					t.Errorf("keys in constant use hit %d times of %d", hot, keys)
				}
				if st.Unknown != 0 || st.RefusedPlaces != 0 {
					t.Errorf("%d unknown outcomes, %d refused places", st.Unknown, st.RefusedPlaces)
				}
			})
		}
	}
}

// Two sessions share a full cache; the second finds no memory granted to it.
func TestCacheTwoSessions(t *testing.T) {
	t.Parallel()
	r := newRig(t, "shm", 1, 5*time.Second)
	r.create(&dirpb.CreateNamespaceRequest{Name: "default", Mode: cacheMode, Replicas: 1, BytesPerNode: 4 << 20})
	ctx := t.Context()
	a, b := r.client(r.options()), r.client(r.options())
	value := make([]byte, 300)
	for i := range 12000 {
		c := a
		if i > 9000 {
			c = b
		}
		n := 100 + i%200
		if _, err := c.Put(ctx, fmt.Appendf(nil, "key%d", i), value[:n], client.PutOptions{}); err != nil {
			t.Fatalf("put %d: %v", i, err)
		}
	}
	if b.Stats().Evicted == 0 {
		t.Error("the second session evicted nothing")
	}
	// A large value needs a place that no eviction of small ones leaves by itself.
	for i := range 4 {
		k := fmt.Appendf(nil, "large%d", i)
		if _, err := a.Put(ctx, k, make([]byte, 300<<10), client.PutOptions{}); err != nil {
			t.Fatalf("put of 300 KiB: %v", err)
		}
		if it, err := b.Get(ctx, k); err != nil || len(it.Value) != 300<<10 {
			t.Fatalf("get: %d bytes, %v", len(it.Value), err)
		}
	}
}

// A key whose groups have no slot left takes another's.
func TestCacheFullIndex(t *testing.T) {
	r := newRig(t, "shm", 1, 5*time.Second)
	r.create(&dirpb.CreateNamespaceRequest{Name: "default", Mode: cacheMode, Replicas: 1, BytesPerNode: 8 << 20,
		Shards: 1, Segments: 1, IndexPercent: 1})
	c := r.client(r.options())
	for i := range 5000 {
		if _, err := c.Put(t.Context(), fmt.Appendf(nil, "key%d", i), nil, client.PutOptions{}); err != nil {
			t.Fatalf("put %d: %v", i, err)
		}
	}
	n, err := c.Count(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d keys, %d evicted", n, c.Stats().Evicted)
}

// The memory of what has expired comes back though nobody asks for it, in a cache and in a store.
func TestExpiredMemoryComesBack(t *testing.T) {
	for _, mode := range []dirpb.NamespaceMode{cacheMode, dirpb.NamespaceMode_NAMESPACE_STORE} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			r := newRig(t, "shm", 2, 5*time.Second)
			r.create(&dirpb.CreateNamespaceRequest{Name: "default", Mode: mode, Replicas: 2, BytesPerNode: 8 << 20})
			c := r.client(r.options())
			ctx := t.Context()
			const keys = 2000
			for i := range keys {
				o := client.PutOptions{TTL: 500 * time.Millisecond}
				if i%10 == 0 {
					o.TTL = time.Hour
				}
				if _, err := c.Put(ctx, fmt.Appendf(nil, "key%d", i), []byte("v"), o); err != nil {
					t.Fatal(err)
				}
			}
			eventually(t, func() string {
				n, err := c.Count(ctx)
				if err != nil {
					t.Fatal(err)
				}
				if n != keys/10 {
					return fmt.Sprintf("%d keys are there", n)
				}
				if st := c.Stats(); st.LiveUnits != keys/10 || st.LimboUnits != 0 {
					return fmt.Sprintf("%d units live, %d in limbo", st.LiveUnits, st.LimboUnits)
				}
				return ""
			})
			for i := 0; i < keys; i += 10 {
				if _, err := c.Get(ctx, fmt.Appendf(nil, "key%d", i)); err != nil {
					t.Fatalf("key %d, which has not expired: %v", i, err)
				}
			}
			if st := c.Stats(); st.Expired != keys*9/10 || st.Evicted != 0 {
				t.Errorf("%d expired, %d evicted", st.Expired, st.Evicted)
			}
		})
	}
}

// A limit keeps a namespace below what its memory nodes lend.
func TestLimit(t *testing.T) {
	for _, mode := range []dirpb.NamespaceMode{cacheMode, dirpb.NamespaceMode_NAMESPACE_STORE} {
		r := newRig(t, "shm", 1, 5*time.Second)
		r.create(&dirpb.CreateNamespaceRequest{Name: "default", Mode: mode, Replicas: 1, BytesPerNode: 32 << 20,
			LimitBytes: 2 << 20})
		c := r.client(r.options())
		var err error
		for i := range 8000 {
			if _, err = c.Put(t.Context(), fmt.Appendf(nil, "key%d", i), make([]byte, 1000),
				client.PutOptions{}); err != nil {
				break
			}
		}
		if mode == cacheMode && err != nil || mode != cacheMode && !errors.Is(err, client.ErrFull) {
			t.Errorf("%v: %v", mode, err)
		}
		if st := c.Stats(); st.GrantedUnits*64 > 2<<20 {
			t.Errorf("%v: %d bytes granted", mode, st.GrantedUnits*64)
		}
	}
}
