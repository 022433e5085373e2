package client_test

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/dirpb"
)

const storeMode = dirpb.NamespaceMode_NAMESPACE_STORE

// A record of sweepValue bytes takes sweepUnits with its header and key.
const (
	sweepValue = 1000
	sweepUnits = 17
)

// A store whose records live for a second stays writable for ten times its memory.
func TestStoreOfShortLives(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("it writes for 20 seconds at the pace at which records expire; run it without -short")
	}
	for _, p := range []string{"shm", "tcp"} {
		t.Run(p, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, p, 1, 5*time.Second)
			const limit = 8 << 20
			r.create(&dirpb.CreateNamespaceRequest{Name: "default", Mode: storeMode, Replicas: 1,
				BytesPerNode: 24 << 20, LimitBytes: limit})
			c := r.client(r.options())
			// Half of the memory is live: a put waits until that half a memory before it has expired.
			const half, puts = limit / (sweepUnits * 64) / 2, 11 * limit / (sweepUnits * 64)
			var ends [half]time.Time
			value, begin := make([]byte, sweepValue), time.Now()
			for i := range puts {
				end := &ends[i%half]
				if d := time.Until(*end); d > 0 {
					<-time.After(d)
				}
				*end = time.Now().Add(time.Second)
				if _, err := c.Put(t.Context(), fmt.Appendf(nil, "key%d", i), value,
					client.PutOptions{TTL: time.Second}); err != nil {
					t.Fatalf("put %d of %d: %v", i, puts, err)
				}
			}
			st := c.Stats()
			t.Logf("%d puts in %v; %d expired; %d units granted, %d live, %d free, %d limbo", puts, time.Since(begin),
				st.Expired, st.GrantedUnits, st.LiveUnits, st.FreeUnits, st.LimboUnits)
			if st.Evicted != 0 || st.EvictedBytes != st.Expired*sweepUnits*64 {
				t.Errorf("%d evicted, %d expired, together of %d bytes", st.Evicted, st.Expired, st.EvictedBytes)
			}
		})
	}
}

// Records that a client leaves in a full store go when they have expired and another client needs the
// memory, though that one puts nothing that expires.
func TestStoreOfAnothersExpired(t *testing.T) {
	t.Parallel()
	r := newRig(t, "shm", 1, 5*time.Second)
	const limit = 8 << 20
	r.create(&dirpb.CreateNamespaceRequest{Name: "default", Mode: storeMode, Replicas: 1, BytesPerNode: 24 << 20,
		LimitBytes: limit})
	o := r.options()
	o.NoEviction = true
	a := r.client(o)
	value := make([]byte, sweepValue)
	left := 0
	for ; ; left++ {
		ttl := time.Second
		if left%10 == 0 {
			ttl = time.Hour
		}
		_, err := a.Put(t.Context(), fmt.Appendf(nil, "a%d", left), value, client.PutOptions{TTL: ttl})
		if errors.Is(err, client.ErrFull) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	// Not there before: on a slow machine it would sweep while the store fills, until what
	// lives for an hour takes all of it.
	b := r.client(r.options())
	done, begin := 0, time.Now()
	eventually(t, func() string {
		for ; done < left/2; done++ {
			if _, err := b.Put(t.Context(), fmt.Appendf(nil, "b%d", done), value, client.PutOptions{}); errors.Is(
				err, client.ErrFull) {
				return fmt.Sprintf("%d of %d puts: %v", done, left/2, err)
			} else if err != nil {
				t.Fatal(err)
			}
		}
		return ""
	})
	st := b.Stats()
	t.Logf("%d records filled the store; another client wrote %d in %v, and swept %d", left, done, time.Since(begin),
		st.Expired)
	for i := 0; i < left; i += 10 {
		if _, err := b.Get(t.Context(), fmt.Appendf(nil, "a%d", i)); err != nil {
			t.Fatalf("record %d, which has not expired: %v", i, err)
		}
	}
	if st.Evicted != 0 {
		t.Errorf("%d evicted from a store", st.Evicted)
	}
}

// Records with an expiry go as fast as they come, after a put and after a touch.
func TestSweepKeepsPace(t *testing.T) {
	t.Parallel()
	r := newRig(t, "shm", 1, 5*time.Second)
	r.create(&dirpb.CreateNamespaceRequest{Name: "default", Mode: storeMode, Replicas: 1, BytesPerNode: 24 << 20})
	c := r.client(r.options())
	// On a busy machine the sweep hears of puts later than others could be put.
	heard := func() {
		t.Helper()
		if c.ExpiriesWaiting() > client.ExpiriesMost/2 {
			eventually(t, func() string {
				if n := c.ExpiriesWaiting(); n > client.ExpiriesMost/2 {
					return fmt.Sprintf("%d puts wait for the sweep", n)
				}
				return ""
			})
		}
	}
	const keys = 40000
	ops := make([]client.Op, 0, 100)
	for i := range keys {
		o := client.Op{Kind: client.OpPut, Key: fmt.Appendf(nil, "key%d", i), Value: []byte("v")}
		if i%2 == 0 {
			o.Expires = time.Now().Add(time.Second)
		}
		if ops = append(ops, o); len(ops) == cap(ops) {
			c.Do(t.Context(), ops)
			for i := range ops {
				if ops[i].Err != nil {
					t.Fatal(ops[i].Err)
				}
			}
			ops = ops[:0]
			heard()
		}
	}
	for i := 1; i < keys; i += 2 {
		heard()
		if err := c.Touch(t.Context(), fmt.Appendf(nil, "key%d", i), time.Second); err != nil {
			t.Fatal(err)
		}
	}
	begin := time.Now()
	eventually(t, func() string { // one second of these is theirs to live
		if st := c.Stats(); st.Expired < keys {
			return fmt.Sprintf("%d of %d swept", st.Expired, keys)
		}
		return ""
	})
	t.Logf("the last of %d was swept after %v", keys, time.Since(begin))
	if st := c.Stats(); st.SweepBytes == 0 || st.SweepBytes > 9<<20 || st.SweepForgotten != 0 || st.Evicted != 0 {
		t.Errorf("remembered in %d bytes, %d forgotten, %d evicted", st.SweepBytes, st.SweepForgotten, st.Evicted)
	}
	if n, err := c.Count(t.Context()); err != nil || n != 0 {
		t.Errorf("%d keys left, %v", n, err)
	}
}

// A few records that expire among many that do not are found at once, in the stash, too: the
// client knows where they are.
func TestSweepRemembers(t *testing.T) {
	for _, mode := range []dirpb.NamespaceMode{cacheMode, storeMode} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			r := newRig(t, "shm", 1, 5*time.Second)
			// 30,720 slots in home groups. At rest the way round them takes 7 s in a store.
			r.create(&dirpb.CreateNamespaceRequest{Name: "default", Mode: mode, Replicas: 1, BytesPerNode: 24 << 20,
				Shards: 1, Segments: 64})
			c := r.client(r.options())
			const keys, some = 23_000, 400 // one in 15 of the last ones is in a stash
			for i := range keys {
				var o client.PutOptions
				if i >= keys-some {
					o.TTL = 500 * time.Millisecond
				}
				if _, err := c.Put(t.Context(), fmt.Appendf(nil, "key%d", i), nil, o); err != nil {
					t.Fatal(err)
				}
			}
			end := time.Now().Add(500 * time.Millisecond)
			if st := c.Stats(); st.Evicted > 0 {
				t.Fatalf("%d evicted", st.Evicted)
			}
			eventually(t, func() string {
				if st := c.Stats(); st.Expired != some {
					return fmt.Sprintf("%d of %d swept", st.Expired, some)
				}
				return ""
			})
			t.Logf("the last one was swept %v after its end", time.Since(end))
		})
	}
}

// A second client of a full cache gets on as the first one does, soon.
func TestCacheSecondClient(t *testing.T) {
	r := newRig(t, "shm", 1, 5*time.Second)
	r.create(&dirpb.CreateNamespaceRequest{Name: "default", Mode: cacheMode, Replicas: 1, BytesPerNode: 24 << 20})
	value := make([]byte, sweepValue)
	var stop atomic.Bool
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop.Store(true)
	load := func(c *client.Client, name string, n *atomic.Int64) {
		for i := 0; !stop.Load(); i++ {
			if _, err := c.Put(t.Context(), fmt.Appendf(nil, "%s%d", name, i), value, client.PutOptions{}); err != nil {
				t.Errorf("%s: put %d: %v", name, i, err)
				return
			}
			n.Add(1)
		}
	}
	var na, nb atomic.Int64
	a, b := r.client(r.options()), r.client(r.options())
	wg.Go(func() { load(a, "a", &na) })
	eventually(t, func() string {
		if st := a.Stats(); st.Evicted < 20000 {
			return fmt.Sprintf("%d evicted", st.Evicted)
		}
		return ""
	})
	wg.Go(func() { load(b, "b", &nb) })
	// The second one gets on as well while the first makes so many puts, several times in a row.
	const window, row = 10_000, 4
	came, held := time.Now(), 0
	a0, b0 := na.Load(), nb.Load()
	eventually(t, func() string {
		da, db := na.Load()-a0, nb.Load()-b0
		if da < window {
			return fmt.Sprintf("%d puts by the first one, %d by the second, %d windows so", da, db, held)
		}
		if held++; db < da/8 {
			held = 0
		}
		a0, b0 = a0+da, b0+db
		if held < row {
			return fmt.Sprintf("%d puts by the second client to the first one's %d, %d windows so", db, da, held)
		}
		return ""
	})
	t.Logf("%v after it came the second client had its share %d times", time.Since(came).Round(time.Millisecond), row)
}
