package engine

import (
	"math/rand/v2"
	"testing"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/shm"
)

// A large table is mapped outside the Go heap, and given back when the cache grows or is closed.
func TestWordCacheMapped(t *testing.T) {
	d, err := shm.Open(shm.Options{})
	if err != nil {
		t.Fatal(err)
	}
	dev := rdma.NewDevice("shm", d)
	c := newWordCache(4*mappedTable, dev)
	word := func(i int) layout.Word { return layout.MakeLive(0, uint16(i&0xfff), 0, uint32(i)+1) }
	check := func(i int) uint64 { return uint64(i+1) * 0x9E3779B97F4A7C15 }
	n := c.max * cacheWays / 2
	for i := range n {
		c.put(check(i), index.Hint{Word: word(i)}, 7)
	}
	if c.mem == nil || len(c.mem.Bytes) <= mappedTable || len(c.mem.Bytes) != len(c.sets)*cacheSetLen {
		t.Fatalf("%d sets, at most %d; mapped: %t", len(c.sets), c.max, c.mem != nil)
	}
	known := func() (k int) {
		for i := range n {
			if _, ok := c.get(check(i), word(i).FP(), 8, 2); ok {
				k++
			}
		}
		return k
	}
	if k := known(); k < n*95/100 { // growing keeps what was known
		t.Errorf("%d of %d keys are known", k, n)
	}
	c.close()
	if c.mem != nil || known() != 0 {
		t.Error("a closed cache remembers")
	}
	c.put(1, index.Hint{Word: word(1)}, 7) // and is still one
	c.clear()
	if err := dev.Close(); err != nil {
		t.Error(err)
	}
}

// A table at its bound that is half full remembers nearly all: of keys whose set is full, most find room in another
// one. With one set a key it had forgotten a twentieth.
func TestWordCacheHoldsHalf(t *testing.T) {
	c := newWordCache(1<<20, nil)
	rng := rand.New(rand.NewPCG(1, 2))
	keys := make([]uint64, c.max*cacheWays/2)
	word := func(i int) layout.Word { return layout.MakeLive(0, uint16(keys[i]>>20&0xfff), 0, uint32(i)+1) }
	put := func(i int) { c.put(keys[i], index.Hint{Word: word(i), Version: uint64(i), Slot: uint8(i % 30)}, 7) }
	for i := range keys {
		keys[i] = rng.Uint64()
		put(i)
	}
	for i := range keys { // those that had to go come again
		put(i)
	}
	if len(c.sets) != c.max {
		t.Fatalf("%d sets, at most %d", len(c.sets), c.max)
	}
	known := func() (n int) {
		for i := range keys {
			h, ok := c.get(keys[i], word(i).FP(), 8, 2)
			if ok && (h.Word != word(i) || h.Version != uint64(i)) {
				t.Fatalf("key %d: %+v, want %v", i, h, word(i))
			}
			if ok {
				n++
			}
		}
		return n
	}
	if n := known(); n < len(keys)*995/1000 {
		t.Errorf("%d of %d keys are known", n, len(keys))
	}
	// A key that is forgotten has no hint, wherever it was.
	for i := range keys {
		put(i)
		c.drop(keys[i], word(i).FP())
		if _, ok := c.get(keys[i], word(i).FP(), 8, 2); ok {
			t.Fatalf("key %d is known", i)
		}
	}
	if n := known(); n != 0 || c.used != 0 {
		t.Errorf("%d keys are known, %d entries in use", n, c.used)
	}
}
