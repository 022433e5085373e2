package heap

import (
	"math"
	"sort"

	"github.com/kvd-project/kvd/internal/invariants"
)

// Limbo holds places whose life has ended until no operation can meet them: a
// queue of places, each with a tag (the reclaim epoch that has to pass, say) that
// is no less than its predecessor's. It belongs to one goroutine. The zero value
// is empty and ready.
type Limbo struct {
	ring  []waiting // a power of two
	head  uint64    // counts since the ring was last empty and dropped
	tail  uint64
	units uint64
}

type waiting struct {
	place Place
	tag   uint64
}

const (
	limboMin  = 64
	limboKeep = 16 << 10 // a larger ring is dropped when it runs empty
)

// Add appends p.
func (l *Limbo) Add(p Place, tag uint64) {
	if l.Len() == len(l.ring) {
		ring := make([]waiting, max(limboMin, 2*len(l.ring)))
		if len(l.ring) > 0 {
			at := int(l.head) & (len(l.ring) - 1)
			copy(ring[copy(ring, l.ring[at:]):], l.ring[:at])
		}
		l.tail -= l.head
		l.head = 0
		l.ring = ring
	}
	if invariants.On && l.Len() > 0 && l.ring[int(l.tail-1)&(len(l.ring)-1)].tag > tag {
		invariants.Assert(false, "limbo: %v with tag %d behind a later one", p, tag)
	}
	l.ring[int(l.tail)&(len(l.ring)-1)] = waiting{p, tag}
	l.tail++
	l.units += uint64(p.Units)
}

// Release removes places from the front as long as their tag is below before,
// hands each to f and returns their number. f may call Add.
func (l *Limbo) Release(before uint64, f func(Place)) int {
	return l.ReleaseSome(before, math.MaxInt, f)
}

// Ripe returns how many places have a tag below before.
func (l *Limbo) Ripe(before uint64) int {
	return sort.Search(l.Len(), func(i int) bool { return l.ring[int(l.head+uint64(i))&(len(l.ring)-1)].tag >= before })
}

// ReleaseSome is Release of at most so many places.
func (l *Limbo) ReleaseSome(before uint64, most int, f func(Place)) int {
	n := 0
	for n < most {
		p, ok := l.take(before)
		if !ok {
			break
		}
		n++
		f(p)
	}
	if l.head != l.tail {
		return n
	}
	if len(l.ring) > limboKeep {
		*l = Limbo{}
	}
	return n
}

// take removes the place at the front if its tag is below before.
func (l *Limbo) take(before uint64) (Place, bool) {
	if l.head == l.tail {
		return Place{}, false
	}
	w := l.ring[int(l.head)&(len(l.ring)-1)]
	if w.tag >= before {
		return Place{}, false
	}
	l.head++
	if invariants.On && uint64(w.place.Units) > l.units {
		invariants.Assert(false, "limbo: %v leaves, and there are %d units", w.place, l.units)
	}
	l.units -= uint64(w.place.Units)
	return w.place, true
}

// Forget removes the places of an extent that is being recalled, and returns their units.
func (l *Limbo) Forget(extent uint32) (units uint64) {
	var keep Limbo
	units = l.units
	for ; l.head != l.tail; l.head++ {
		if w := l.ring[int(l.head)&(len(l.ring)-1)]; w.place.Unit/ExtentUnits != extent {
			keep.Add(w.place, w.tag)
		}
	}
	*l = keep
	return units - l.units
}

// Len returns how many places wait.
func (l *Limbo) Len() int { return int(l.tail - l.head) }

// Units returns how many units wait.
func (l *Limbo) Units() uint64 { return l.units }
