package engine

import (
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/shm"
)

// sets is how many sets the tables have, and how many they may have.
func (c *wordCache) sets() (now, most int) {
	for i := range c.tables {
		if t := c.tables[i].Load(); t != nil {
			now += len(t.sets)
			most += c.parts[i].max
		}
	}
	return now, most
}

func (m *mappedTables) count() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.all)
}

// Large tables are mapped outside the Go heap, and given back when nobody can reach them any more, or when all are
// closed.
func TestWordCacheMapped(t *testing.T) {
	d, err := shm.Open(shm.Options{})
	if err != nil {
		t.Fatal(err)
	}
	dev := rdma.NewDevice("shm", d)
	maps := newMappedTables(dev)
	c := newWordCache(4*cacheParts*mappedTable, maps)
	_, most := c.sets()
	word := func(i int) layout.Word { return layout.MakeLive(0, uint16(i&0xfff), 0, uint32(i)+1) }
	check := func(i int) uint64 { return uint64(i+1) * 0x9E3779B97F4A7C15 }
	n := most * cacheWays / 2
	for i := range n {
		c.put(check(i), index.Hint{Word: word(i)}, 7)
	}
	if now, _ := c.sets(); now != most {
		t.Fatalf("%d sets, at most %d", now, most)
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
	for deadline := time.Now().Add(time.Minute); maps.count() != cacheParts; runtime.GC() {
		if time.Now().After(deadline) {
			t.Fatalf("%d tables are mapped, want %d: those that larger ones have replaced are not given back",
				maps.count(), cacheParts)
		}
	}
	if k := known(); k < n*95/100 {
		t.Errorf("%d of %d keys are known", k, n)
	}
	maps.close()
	if maps.sets(nil, 1<<20) != nil {
		t.Error("a table was mapped after the end")
	}
	if err := dev.Close(); err != nil {
		t.Error(err)
	}
}

// Tables at their bound that are half full remember nearly all: of keys whose set is full, most find room in another
// one. With one set a key they had forgotten a twentieth.
func TestWordCacheHoldsHalf(t *testing.T) {
	for _, bytes := range []int{1 << 10, 1 << 20, 4 << 20} {
		c := newWordCache(bytes, nil)
		now, most := c.sets()
		if most*cacheSetLen > bytes || most*cacheSetLen*2 <= bytes || now > most {
			t.Errorf("%d bytes: %d sets, at most %d", bytes, now, most)
		}
		rng := rand.New(rand.NewPCG(1, 2))
		keys := make([]uint64, most*cacheWays/2)
		word := func(i int) layout.Word { return layout.MakeLive(0, uint16(keys[i]>>20&0xfff), 0, uint32(i)+1) }
		hint := func(i int) index.Hint {
			return index.Hint{Word: word(i), Version: uint64(i), Shard: uint32(i & 0xffff), Slot: uint8(i % 62),
				Flags: index.HintFlags(i & 3)}
		}
		put := func(i int) { c.put(keys[i], hint(i), 7) }
		for i := range keys {
			keys[i] = rng.Uint64()
			put(i)
		}
		for i := range keys { // those that had to go come again
			put(i)
		}
		if now, _ = c.sets(); now != most {
			t.Fatalf("%d sets, at most %d", now, most)
		}
		known := func() (n int) {
			for i := range keys {
				h, ok := c.get(keys[i], word(i).FP(), 8, 2)
				if ok && h != hint(i) {
					t.Fatalf("key %d: %+v, want %+v", i, h, hint(i))
				}
				if ok {
					n++
				}
			}
			return n
		}
		if n := known(); n < len(keys)*99/100 {
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
		if n := known(); n != 0 || c.len() != 0 {
			t.Errorf("%d keys are known, %d entries in use", n, c.len())
		}
	}
}

// A lane that has looked at an entry changes nothing of it if another lane has changed it since.
func TestWordCacheChanged(t *testing.T) {
	c := newWordCache(1<<16, nil)
	const check, fp = 99 << 32, 5
	word := func(unit uint32) layout.Word { return layout.MakeLive(1, fp, 0, unit) }
	get := func() (h index.Hint, seen uint32) {
		var x cached
		if !c.find(&x, check, fp) {
			t.Fatal("the key is not known")
		}
		x.read(&h)
		return h, x.seen()
	}
	c.put(check, index.Hint{Word: word(1), Version: 1, Shard: 3, Slot: 61, Flags: 1}, 7)
	var a, b cached
	if !c.find(&a, check, fp) || !c.find(&b, check, fp) || c.find(&cached{}, check, fp+1) ||
		c.find(&cached{}, check+1<<40, fp) {
		t.Fatal("the key is not found, or others are")
	}
	a.replace(word(2), 2, 2, 8)
	if h, seen := get(); h != (index.Hint{Word: word(2), Version: 2, Shard: 3, Slot: 61, Flags: 2}) || seen != 8 {
		t.Errorf("replaced: %+v, seen %d", h, seen)
	}
	b.saw(100)
	b.replace(word(3), 3, 0, 101)
	if h, seen := get(); h.Word != word(2) || h.Version != 2 || seen != 8 {
		t.Errorf("an entry that had changed became %+v, seen %d", h, seen)
	}
	c.find(&b, check, fp)
	b.saw(3) // another lane has seen it later
	if _, seen := get(); seen != 8 {
		t.Errorf("seen %d, want 8", seen)
	}
	b.saw(9)
	if _, seen := get(); seen != 9 {
		t.Errorf("seen %d, want 9", seen)
	}
	b.e.meta.Or(metaBusy) // another lane is about to change it, and has the processor no more
	if c.find(&a, check, fp) || b.e.set(b.word, check, &index.Hint{Word: word(4)}, 9) {
		t.Error("an entry that is being changed is found, or set")
	}
}

// A hint that is found is one that was put, while all lanes change the entries at once.
func TestWordCacheShared(t *testing.T) {
	c := newWordCache(4<<10, nil)
	const keys = 256 // twice as many as there is room for
	check := func(k int) uint64 { return uint64(k+1) * 0x9E3779B97F4A7C15 }
	// Of a key, all hints have a version and a place that follow from the word.
	hint := func(k int, n uint32) index.Hint {
		return index.Hint{Word: layout.MakeLive(uint16(n&7), uint16(k), 0, n+1), Version: uint64(n)<<32 | uint64(k),
			Shard: uint32(k) << 3 & 0xffff, Slot: uint8(k % 62)}
	}
	var lanes sync.WaitGroup
	for lane := range 4 {
		lanes.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(lane), 1))
			for n := range uint32(100_000) {
				k := rng.IntN(keys)
				var x cached
				found := c.find(&x, check(k), uint16(k))
				if found {
					var h index.Hint
					x.read(&h)
					if h != hint(k, h.Word.Unit()-1) {
						t.Errorf("key %d: %+v", k, h)
						return
					}
				}
				switch r := rng.IntN(8); {
				case r == 0:
					c.drop(check(k), uint16(k))
				case found && r < 4:
					h := hint(k, n)
					x.replace(h.Word, h.Version, 0, n)
				case found:
					x.saw(n)
				default:
					c.put(check(k), hint(k, n), n)
				}
			}
		})
	}
	lanes.Wait()
	if n := c.len(); n < 0 || n > keys {
		t.Errorf("%d entries in use", n)
	}
}

// Tables that may still grow remember all, whatever their load is just now. When a key had a second set only in tables
// at their bound, one in a hundred was forgotten for another one, again and again.
func TestWordCacheGrows(t *testing.T) {
	for _, n := range []int{100, 6_000, 25_000, 50_000, 100_000, 150_000} {
		c := newWordCache(64<<20, nil)
		rng := rand.New(rand.NewPCG(uint64(n), 1))
		keys := make([]uint64, n)
		for i := range keys {
			keys[i] = rng.Uint64()
			c.put(keys[i], index.Hint{Word: layout.MakeLive(0, uint16(i&0xfff), 0, uint32(i)+1)}, 7)
		}
		known := 0
		for i := range keys {
			if _, ok := c.get(keys[i], uint16(i&0xfff), 8, 2); ok {
				known++
			}
		}
		now, most := c.sets()
		if known < n-n/1000 {
			t.Errorf("%d of %d keys are known, in %d sets of at most %d", known, n, now, most)
		}
		if now*cacheWays > 8*n+16*16*cacheWays {
			t.Errorf("%d sets for %d keys", now, n)
		}
	}
}

// A hint's age goes on when the low bits of the reclaim epoch, which are all that an entry has
// room for, begin anew.
func TestWordCacheAgeGoesRound(t *testing.T) {
	c := newWordCache(1<<10, nil)
	w := layout.MakeLive(0, 5, 0, 1)
	const check = 77
	var epoch uint32
	epoch -= 3
	c.put(check, index.Hint{Word: w}, epoch)
	for range 20 {
		var x cached
		if !c.find(&x, check, w.FP()) {
			t.Fatal("it is forgotten")
		}
		x.saw(epoch)
		x.saw(epoch - 1) // later, by one who began earlier
		epoch++
		if _, ok := c.get(check, w.FP(), epoch, 2); !ok {
			t.Fatalf("the hint, last seen in reclaim epoch %d, is too old in %d", epoch-1, epoch)
		}
	}
	if _, ok := c.get(check, w.FP(), epoch+1, 2); ok {
		t.Error("a hint that is too old is used")
	}
}
