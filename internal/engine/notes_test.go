package engine

import (
	"math/rand/v2"
	"testing"
)

// A table of notes has few cells while there are few keys, and counts all the same: a key is noted once in an interval. It grows
// to its bound, and stays there however many keys come.
func TestNoteTableGrows(t *testing.T) {
	const interval = 100
	check := func(i int) uint64 { return rand.New(rand.NewPCG(1, uint64(i))).Uint64() }
	n := newNoteTable(1 << 20)
	most := 1 << n.max
	// round has so many keys accessed at tick now, and returns how often that is noted.
	round := func(keys int, now uint32) (noted int) {
		for i := range keys {
			if n.hit(check(i), now, interval) {
				noted++
				n.noted(check(i), now)
			}
		}
		return noted
	}
	if round(100, 1); len(n.cells) != 1<<leastNotes {
		t.Errorf("%d cells for 100 keys", len(n.cells))
	}
	const keys = 10_000
	if k := round(keys, 2); k < keys*9/10 {
		t.Errorf("%d of %d keys were noted that were new, or that a table forgot which grew", k, keys)
	}
	for range 3 { // until it grows no more
		round(keys, 2)
	}
	if c := len(n.cells); c < keys*noteRoom*8/10 || c > keys*noteRoom*2 {
		t.Errorf("%d cells for %d keys", c, keys)
	}
	round(keys, 3)
	if k := round(keys, 4); k > keys/3 { // those that share a cell
		t.Errorf("%d of %d keys were noted again at once", k, keys)
	}
	if k := round(keys, 4+interval); k < keys*9/10 {
		t.Errorf("%d of %d keys were noted after an interval", k, keys)
	}
	round(10*most, 5)
	if len(n.cells) != most || most*4 != 1<<20 {
		t.Errorf("%d cells for very many keys, want %d, which are 1 MiB", len(n.cells), most)
	}
	hits := uint32(0)
	for range 5 {
		n.hit(check(1), 6, interval)
	}
	if hits = n.noted(check(1), 6); hits < 5 || hits > 6 {
		t.Errorf("%d accesses of a key were counted, want 5", hits)
	}
}
