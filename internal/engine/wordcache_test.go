package engine

import (
	"math/rand/v2"
	"testing"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/layout"
)

// A table at its bound that is half full remembers nearly all: of keys whose set is full, most find room in another
// one. With one set a key it had forgotten a twentieth.
func TestWordCacheHoldsHalf(t *testing.T) {
	c := newWordCache(1 << 20)
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
