package client_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/devstore"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/testutil"
	"github.com/kvd-project/kvd/rdma"
)

// sizeOf draws a value's size: mostly small, some of 8 KiB, few of 64 KiB.
func sizeOf(rng *rand.Rand) int {
	switch n := rng.IntN(1000); {
	case n < 900:
		return rng.IntN(512)
	case n < 995:
		return rng.IntN(8 << 10)
	default:
		return 64 << 10
	}
}

// stamp fills b with a pattern that a mix-up of values would break.
func stamp(b []byte, key, round uint64) {
	var w [8]byte
	binary.LittleEndian.PutUint64(w[:], key<<32|round)
	for i := 0; i < len(b); i += copy(b[i:], w[:]) {
	}
}

// eventually waits until cond answers "" and fails with what it said last.
func eventually(t testing.TB, cond func() string) {
	t.Helper()
	testutil.UntilNone(t, "still so", cond)
}

// TestNoLeak churns a small region: every place that is unlinked comes back, so
// the region never fills, and the session's accounts add up to what it was given.
func TestNoLeak(t *testing.T) {
	_, c := open(t, "shm", devstore.Options{CapacityBytes: 512 << 20}, client.Options{})
	ctx := t.Context()
	ops, workers, keys := 1_000_000, 4, 2_000
	if testing.Short() {
		ops = 60_000
	}
	live := make([]map[uint64]uint64, workers) // key → round
	sizes := make([]map[uint64]int, workers)
	var wg sync.WaitGroup
	begin := time.Now()
	for w := range workers {
		live[w], sizes[w] = map[uint64]uint64{}, map[uint64]int{}
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(5, uint64(w)))
			buf, want := make([]byte, 64<<10), make([]byte, 64<<10)
			for i := range ops / workers {
				k := uint64(w*keys + rng.IntN(keys))
				key := fmt.Appendf(nil, "k%d", k)
				if round, ok := live[w][k]; ok && i%64 == 0 {
					n, err := c.GetInto(ctx, key, buf)
					stamp(want[:sizes[w][k]], k, round)
					if err != nil || !bytes.Equal(buf[:n], want[:sizes[w][k]]) {
						t.Errorf("get %s: %d bytes, %v", key, n, err)
						return
					}
				}
				if _, ok := live[w][k]; ok && rng.IntN(3) == 0 {
					if err := c.Delete(ctx, key); err != nil {
						t.Errorf("op %d: delete %s: %v", i, key, err)
						return
					}
					delete(live[w], k)
					continue
				}
				n := sizeOf(rng)
				stamp(buf[:n], k, uint64(i))
				if _, err := c.Put(ctx, key, buf[:n], client.PutOptions{}); err != nil {
					t.Errorf("op %d: put %s of %d bytes: %v", i, key, n, err)
					return
				}
				live[w][k], sizes[w][k] = uint64(i), n
			}
		})
	}
	wg.Wait()
	if t.Failed() {
		t.Fatalf("%+v", c.Stats())
	}
	t.Logf("%d operations in %v, memory waits %d", ops, time.Since(begin), c.Stats().MemoryWaits)

	var want uint64
	for w := range live {
		for k := range live[w] {
			code, _ := layout.CodeFor(layout.RecordLen(len(fmt.Sprintf("k%d", k)), sizes[w][k]))
			want += uint64(layout.UnitsOf(code))
		}
	}
	// Stats look at the lanes and at the heaps one after the other, and limbo empties meanwhile.
	check := func(live uint64) {
		t.Helper()
		eventually(t, func() string {
			s := c.Stats()
			switch {
			case s.FreeUnits+s.LiveUnits+s.LimboUnits != s.GrantedUnits || s.Unknown != 0:
				return fmt.Sprintf("free %d + live %d + limbo %d is not granted %d; %d unknown outcomes",
					s.FreeUnits, s.LiveUnits, s.LimboUnits, s.GrantedUnits, s.Unknown)
			case s.LiveUnits != live:
				return fmt.Sprintf("%d units are live, want %d: %+v", s.LiveUnits, live, s)
			}
			return ""
		})
	}
	check(want)
	// An idle client's limbo empties by itself.
	eventually(t, func() string {
		if s := c.Stats(); s.LimboUnits != 0 {
			return fmt.Sprintf("%d units in limbo, epoch %d, minimum %d", s.LimboUnits, s.Epoch, s.MinEpoch)
		}
		return ""
	})
	check(want)
	var all [][]byte
	for w := range live {
		for k := range live[w] {
			all = append(all, fmt.Appendf(nil, "k%d", k))
		}
	}
	for i, r := range c.MultiDelete(ctx, all) {
		if r.Err != nil {
			t.Fatalf("multi-delete %s: %v", all[i], r.Err)
		}
	}
	check(0)
}

// TestMemoryComesBack closes clients that hold all of a small region: what they
// never used is granted again at once.
func TestMemoryComesBack(t *testing.T) {
	st, first := open(t, "shm", devstore.Options{CapacityBytes: 24 << 20}, client.Options{})
	ctx := t.Context()
	value := make([]byte, 256<<10)
	fill := func(c *client.Client, prefix string) (n int) {
		for ; ; n++ {
			_, err := c.Put(ctx, fmt.Appendf(nil, "%s%d", prefix, n), value, client.PutOptions{})
			if errors.Is(err, client.ErrFull) {
				return n
			}
			if err != nil {
				t.Fatal(err)
			}
			if n > 1000 {
				t.Fatal("never full")
			}
		}
	}
	if _, err := first.Put(ctx, []byte("k"), value, client.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	if s := first.Stats(); s.GrantedUnits == 0 || s.FreeUnits == 0 {
		t.Fatalf("a client that wrote one value: %+v", s)
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	second, err := client.Open(ctx, client.Options{Directory: st.Directory(), Devices: st.Devices(), Provider: "shm"})
	if err != nil {
		t.Fatal(err)
	}
	n := fill(second, "a")
	s := second.Stats()
	if want := uint64(n) * uint64(unitsFor(t, 2, len(value))); s.LiveUnits < want || s.GrantedUnits < s.LiveUnits {
		t.Fatalf("%d values, %+v", n, s)
	}
	if it, err := second.Get(ctx, []byte("k")); err != nil || !bytes.Equal(it.Value, value) {
		t.Fatalf("the first client's value: %d bytes, %v", len(it.Value), err)
	}
	if err := second.Close(); err != nil {
		t.Fatal(err)
	}
}

func unitsFor(t testing.TB, key, value int) uint32 {
	t.Helper()
	code, ok := layout.CodeFor(layout.RecordLen(key, value))
	if !ok {
		t.Fatalf("no size code for %d + %d bytes", key, value)
	}
	return layout.UnitsOf(code)
}

// TestFull fills a tiny region: the put that does not fit says so, every value
// that was acknowledged stays, and deletes make room again.
func TestFull(t *testing.T) {
	each(t, func(t *testing.T, p string) {
		_, c := open(t, p, devstore.Options{CapacityBytes: 16 << 20, EpochInterval: 10 * time.Millisecond},
			client.Options{})
		ctx := t.Context()
		key := func(i int) []byte { return fmt.Appendf(nil, "k%d", i) }
		value := func(i int) []byte {
			b := make([]byte, 100<<10)
			stamp(b, uint64(i), 1)
			return b
		}
		n := 0
		for {
			_, err := c.Put(ctx, key(n), value(n), client.PutOptions{})
			if err == nil {
				n++
				continue
			}
			if !errors.Is(err, client.ErrFull) || client.Outcome(err) != rdma.No {
				t.Fatalf("put %d: %v, outcome %v", n, err, client.Outcome(err))
			}
			break
		}
		if n < 10 {
			t.Fatalf("full after %d values", n)
		}
		// An update needs a place too. It is refused the same way and changes nothing.
		if _, err := c.Put(ctx, key(0), value(1), client.PutOptions{}); !errors.Is(err, client.ErrFull) ||
			client.Outcome(err) != rdma.No {
			t.Fatalf("update in a full region: %v", err)
		}
		if _, err := c.Get(ctx, key(n)); !errors.Is(err, client.ErrNotFound) {
			t.Fatalf("the refused key: %v", err)
		}
		for i := range n {
			if it, err := c.Get(ctx, key(i)); err != nil || !bytes.Equal(it.Value, value(i)) {
				t.Fatalf("value %d of %d: %d bytes, %v", i, n, len(it.Value), err)
			}
		}
		for i := range n / 2 {
			if err := c.Delete(ctx, key(i)); err != nil {
				t.Fatal(err)
			}
		}
		for i := range n / 2 {
			if _, err := c.Put(ctx, key(i), value(i+n), client.PutOptions{}); err != nil {
				t.Fatalf("put %d after deletes: %v", i, err)
			}
		}
		for i := range n {
			want := value(i)
			if i < n/2 {
				want = value(i + n)
			}
			if it, err := c.Get(ctx, key(i)); err != nil || !bytes.Equal(it.Value, want) {
				t.Fatalf("value %d after deletes: %d bytes, %v", i, len(it.Value), err)
			}
		}
	})
}
