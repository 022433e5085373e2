package engine

import (
	"math/rand/v2"
	"sync"
	"testing"
)

// A table of notes has few cells while there are few keys, and counts all the same: a key is noted once in an interval.
// It grows to its bound, and stays there however many keys come.
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
	if round(100, 1); n.len() != 1<<leastNotes {
		t.Errorf("%d cells for 100 keys", n.len())
	}
	const keys = 10_000
	if k := round(keys, 2); k < keys*9/10 {
		t.Errorf("%d of %d keys were noted that were new, or that a table forgot which grew", k, keys)
	}
	for range 3 { // until it grows no more
		round(keys, 2)
	}
	if c := n.len(); c < keys*noteRoom*8/10 || c > keys*noteRoom*2 {
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
	if n.len() != most || most*4 != 1<<20 {
		t.Errorf("%d cells for very many keys, want %d, which are 1 MiB", n.len(), most)
	}
	hits := uint32(0)
	for range 5 {
		n.hit(check(1), 6, interval)
	}
	if hits = n.noted(check(1), 6); hits < 5 || hits > 6 {
		t.Errorf("%d accesses of a key were counted, want 5", hits)
	}
}

// len is how many cells there are now.
func (t *noteTable) len() int { return len(t.cells.Load().cells) }

// Lanes that share a table, and double it, do not disturb each other beyond lost accesses.
func TestNotesShared(t *testing.T) {
	n := newNoteTable(1 << 20)
	var lanes sync.WaitGroup
	for lane := range 4 {
		lanes.Go(func() {
			rng := rand.New(rand.NewPCG(2, uint64(lane)))
			for range 50_000 {
				if check := rng.Uint64(); n.hit(check, 100, 10) {
					if hits := n.noted(check, 100); hits < 1 || hits > maxNoteHits {
						t.Errorf("%d hits are noted", hits)
						return
					}
				}
			}
		})
	}
	lanes.Wait()
	if n.len() != 1<<18 {
		t.Errorf("%d cells, want all of %d", n.len(), 1<<18)
	}
}
