package index_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/index/repair"
	"github.com/kvd-project/kvd/internal/layout"
)

// Access words cost a READ in the chain where they are due, and no round trip.
func TestCacheCosts(t *testing.T) {
	for _, c := range []struct {
		op   string
		warm bool
		want [3][2]int // rounds, verbs; by replicas
	}{
		{"get k", true, [3][2]int{{1, 3}, {1, 3}, {1, 3}}},
		{"get k", false, [3][2]int{{2, 3}, {2, 3}, {2, 3}}},
		{"exists k", true, [3][2]int{{1, 1}, {1, 1}, {1, 1}}},
		{"exists k", false, [3][2]int{{2, 2}, {2, 2}, {2, 2}}},
		{"pin k expiry=5000", true, [3][2]int{{1, 2}, {1, 2}, {1, 2}}},
		{"pin k expiry=5000", false, [3][2]int{{2, 3}, {2, 3}, {2, 3}}},
		{"put k v2", true, [3][2]int{{1, 3}, {2, 5}, {3, 7}}},
		{"put other v2", false, [3][2]int{{2, 5}, {3, 8}, {4, 10}}},
		{"del k", true, [3][2]int{{1, 1}, {2, 2}, {3, 3}}},
		{"evict k", false, [3][2]int{{3, 4}, {4, 5}, {5, 6}}},
		{"evict k spare", false, [3][2]int{{3, 4}, {4, 5}, {5, 6}}},
		{"put k v2 pinned=9", true, [3][2]int{{1, 3}, {2, 5}, {3, 7}}},
	} {
		for r := 1; r <= 3; r++ {
			w := newWorld(uint8(r), 64).asCache()
			must(t, w.client(1).do(t, "put", "k", "v1"))
			cl := w.client(2)
			if c.warm {
				must(t, cl.do(t, "get", "k"))
			}
			must(t, cl.do(t, fields(c.op)...))
			if got := [2]int{int(cl.op.Rounds), cl.verbs}; got != c.want[r-1] {
				t.Errorf("%s r=%d: rounds, verbs %v, want %v (steps %v)", c.op, r, got, c.want[r-1], cl.steps)
			}
		}
	}
}

// slotOfK is where k is in the home group at the tail.
func slotOfK(t *testing.T, w *world) int {
	t.Helper()
	g := w.groupAt(w.pg.Replicas-1, home())
	for i := range layout.GroupSlots {
		if x := g.Slot(i); x.Readable() && x.FP() == layout.FP(hashOf("k")) {
			return i
		}
	}
	t.Fatal("k is not there")
	return 0
}

func TestAccessWords(t *testing.T) {
	for r := uint8(1); r <= 3; r++ {
		w := newWorld(r, 64).asCache()
		c := w.client(1)
		must(t, c.do(t, "put", "k", "v"))
		i := slotOfK(t, w)
		if a := w.access(i); a.Count() != 1 || a.Expired(1<<40) {
			t.Fatalf("after the insert: %x", uint64(a))
		}
		must(t, c.do(t, "get", "k"))
		must(t, w.client(2).do(t, "get", "k"))
		if a := w.access(i); a.Count() != 3 {
			t.Fatalf("after two gets: count %d", a.Count())
		}
		must(t, c.do(t, "put", "k", "v2", "expiry=5000"))
		if a := w.access(i); a.Count() != 4 || a.Expired(4000) || !a.Expired(5000) {
			t.Fatalf("after a put with expiry: %x", uint64(a))
		}
		must(t, c.do(t, "put", "k", "v3"))
		if a := w.access(i); a.Expired(1 << 40) {
			t.Fatalf("after a put without: %x", uint64(a))
		}
	}
}

// everyForm runs a test on each number of copies, with access words and without.
func everyForm(t *testing.T, run func(t *testing.T, w *world)) {
	for r := uint8(1); r <= 3; r++ {
		for _, cache := range []bool{false, true} {
			t.Run(fmt.Sprintf("r=%d cache=%v", r, cache), func(t *testing.T) {
				w := newWorld(r, 4<<20/64)
				if cache {
					w.asCache()
				}
				run(t, w)
			})
		}
	}
}

// Expired records go, with access words and without; a record that has not expired stays, whatever its access word
// says.
func TestEvictExpired(t *testing.T) {
	everyForm(t, func(t *testing.T, w *world) {
		c := w.client(1)
		must(t, c.do(t, "put", "stays", "v"))
		must(t, c.do(t, "put", "later", "v", "expiry=9000000000"))
		must(t, c.do(t, "put", "k", "v", "expiry=2000"))
		evict := func(want int) []repair.Evicted {
			must(t, w.client(3).do(t, "evict", "expired"))
			got := workOf(w.client(3).op).Evicted
			if len(got) != want {
				t.Fatalf("at %d ms: evicted %+v, want %d", w.millis, got, want)
			}
			return got
		}
		evict(0)
		w.millis = 2000
		if e := evict(1)[0]; !e.Expired || e.Hash != hashOf("k") {
			t.Fatalf("evicted %+v", e)
		}
		evict(0)
		// Beyond what an access word can say.
		w.millis = 1000 * (layout.MaxAccessExpiry + 100)
		evict(0)
		must(t, c.do(t, "get", "stays"))
		must(t, c.do(t, "get", "later"))
		if err := w.client(4).do(t, "get", "k"); !errors.Is(err, index.ErrNotFound) {
			t.Fatalf("get k: %v", err)
		}
		for w.millis < 9000000000-500000000 {
			w.millis += 500000000 // somebody looks again in time
			evict(0)
		}
		w.millis = 9000000000
		evict(1)
	})
}

// Of the records asked for those go that have expired, to the millisecond, and no others;
// and one learns if some of the group's keys are in the stash.
func TestEvictOnly(t *testing.T) {
	everyForm(t, func(t *testing.T, w *world) {
		c := w.client(1)
		must(t, c.do(t, "put", "a", "v", "expiry=2001"))
		must(t, c.do(t, "put", "b", "v", "expiry=2002"))
		must(t, c.do(t, "put", "c", "v", "expiry=2001"))
		must(t, c.do(t, "put", "d", "v"))
		evict := func(over bool, want ...string) {
			t.Helper()
			must(t, w.client(3).do(t, "evict", "only:a+b+d"))
			got := workOf(w.client(3).op)
			if len(got.Evicted) != len(want) || (len(got.Overflow) == 1) != over {
				t.Fatalf("at %d ms: evicted %+v, overflow %x", w.millis, got.Evicted, got.Overflow)
			}
			for i, e := range got.Evicted {
				if !e.Expired || e.Hash != hashOf(want[i]) {
					t.Fatalf("at %d ms: evicted %+v", w.millis, got.Evicted)
				}
			}
		}
		w.millis = 2000
		evict(false)
		w.millis = 2001
		evict(false, "a")
		for i := range layout.GroupSlots - 3 + 1 {
			must(t, c.do(t, "put", fmt.Sprintf("f%02d", i), "v"))
		}
		evict(true)
		w.millis = 2002
		evict(true, "b")
		must(t, c.do(t, "get", "d"))
		must(t, c.do(t, "get", "f00"))
		left := 0
		for i := range layout.GroupSlots {
			if w.groupAt(0, home()).Slot(i).Readable() {
				left++
			}
		}
		if left != layout.GroupSlots-1 {
			t.Errorf("%d records are left, not all but b: c was not asked for", left)
		}
	})
}

// A word that somebody changes while it is being evicted stays his.
func TestEvictLoses(t *testing.T) {
	for r := uint8(1); r <= 3; r++ {
		for n := 1; ; n++ { // from when it has seen the word
			w := newWorld(r, 64).asCache()
			must(t, w.client(2).do(t, "put", "k", "old"))
			c := w.client(1)
			must(t, c.start(fields("evict k")))
			_, done := c.advance(n, noFault)
			must(t, w.client(2).do(t, "put", "k", "new"))
			if !done {
				if _, err := c.run(300); err != nil {
					t.Fatalf("r=%d, after %d accesses: %v", r, n, err)
				}
			}
			err := w.client(3).do(t, "get", "k")
			if got := string(w.client(3).op.Record.Value); err != nil || got != "new" {
				t.Fatalf("r=%d, put after %d accesses: %q, %v", r, n, got, err)
			}
			if n > 12 {
				break
			}
		}
	}
}

// A record that is pinned stays until then, unless it expires, is replaced, or pins do not count. That takes the READ
// of its header that any eviction has, and a note, so that it is not chosen again soon.
func TestEvictPinned(t *testing.T) {
	for r := uint8(1); r <= 3; r++ {
		for _, value := range []string{"v", "long5"} {
			w := newWorld(r, 12<<20/64).asCache()
			c, e := w.client(1), w.client(2)
			put := func(words ...string) {
				t.Helper()
				must(t, c.do(t, append([]string{"put", "k", value}, words...)...))
			}
			evict := func(gone int, words ...string) {
				t.Helper()
				must(t, e.do(t, append([]string{"evict", "k"}, words...)...))
				if got := workOf(e.op).Evicted; len(got) != gone {
					t.Fatalf("r=%d, %s, at %d ms: evicted %+v, want %d", r, value, w.millis, got, gone)
				}
			}
			put("pinned=5000")
			evict(0, "spare")
			if e.op.Rounds != 2 || e.verbs != 3 {
				t.Errorf("r=%d, %s: %d rounds, %d verbs, want 2, 3", r, value, e.op.Rounds, e.verbs)
			}
			a := w.access(slotOfK(t, w))
			if ahead := a.AheadTicks(w.millis) * layout.AccessTickMillis; ahead != 10*60*1000 || a.Expires() {
				t.Errorf("r=%d, %s: %d ms ahead, expires: %v", r, value, ahead, a.Expires())
			}
			must(t, c.do(t, "get", "k"))
			w.millis = 5000*1000 - 400
			evict(0, "spare")
			if ahead := w.access(slotOfK(t, w)).AheadTicks(w.millis); ahead != 100 {
				t.Errorf("r=%d, %s: %d ticks ahead, want 100", r, value, ahead)
			}
			w.millis = 5000 * 1000
			evict(1, "spare")
			w.linkedPlaces(t, "after the pin", shardOff)
			if value != "v" {
				continue
			}
			put("pinned=6000", "expiry=5500000")
			evict(0, "spare")
			w.millis = 5500 * 1000
			evict(1, "spare")
			put("pinned=6000")
			put()
			evict(1, "spare")
			put("pinned=6000")
			evict(1)
		}
	}
}

func TestEvictLongValue(t *testing.T) {
	w := newWorld(2, 12<<20/64).asCache()
	must(t, w.client(2).do(t, "put", "k", "long5"))
	must(t, w.client(1).do(t, "evict", "k"))
	e := workOf(w.client(1).op).Evicted
	if len(e) != 1 || e[0].Units < layout.MaxRecordSize/layout.UnitSize {
		t.Fatalf("evicted %+v", e)
	}
	w.linkedPlaces(t, "after the eviction", shardOff)
}
