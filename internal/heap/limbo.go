package heap

import (
	"math"
	"sort"

	"github.com/kvd-project/kvd/internal/invariants"
)

// Limbo holds places whose life has ended until no operation can meet them. It is a queue of places, each with a
// tag that is no less than its predecessor's. The tag is the reclaim epoch that has to pass, say. A Limbo belongs
// to one goroutine. The zero value is empty and ready. It grows by a chunk at a time. To move all that wait to a
// larger array would hold up whoever adds the next one for milliseconds.
type Limbo struct {
	ring       []*chunk // a power of two; the i-th chunk is ring[i%len(ring)]
	head, tail uint64   // of the places ever added, those that are here
	units      uint64
	spare      []*chunk // maxSpare at most
}

type waiting struct {
	place Place
	tag   uint64
}

const (
	chunkPlaces = 128
	maxSpare    = 32
)

type chunk [chunkPlaces]waiting

func (l *Limbo) at(i uint64) *waiting {
	return &l.ring[i/chunkPlaces&uint64(len(l.ring)-1)][i%chunkPlaces]
}

// Add appends p.
func (l *Limbo) Add(p Place, tag uint64) {
	if l.tail%chunkPlaces == 0 {
		l.addChunk()
	}
	if invariants.On && l.Len() > 0 && l.at(l.tail-1).tag > tag {
		invariants.Assert(false, "limbo: %v with tag %d behind a later one", p, tag)
	}
	*l.at(l.tail) = waiting{p, tag}
	l.tail++
	l.units += uint64(p.Units)
}

// addChunk makes room behind the last chunk, which is full.
func (l *Limbo) addChunk() {
	first, next := l.head/chunkPlaces, l.tail/chunkPlaces
	if n := uint64(len(l.ring)); next-first == n {
		ring := make([]*chunk, max(4, 2*n))
		for i := first; i < next; i++ {
			ring[i&uint64(len(ring)-1)] = l.ring[i&(n-1)]
		}
		l.ring = ring
	}
	c := &l.ring[next&uint64(len(l.ring)-1)]
	if n := len(l.spare) - 1; n >= 0 {
		*c, l.spare = l.spare[n], l.spare[:n]
	} else {
		*c = new(chunk)
	}
}

// Release removes places from the front while their tag is below before, hands each to f
// and returns their number. f may call Add.
func (l *Limbo) Release(before uint64, f func(Place)) int {
	return l.ReleaseSome(before, math.MaxInt, f)
}

// Ripe returns how many places have a tag below before.
func (l *Limbo) Ripe(before uint64) int {
	return sort.Search(l.Len(), func(i int) bool { return l.at(l.head+uint64(i)).tag >= before })
}

// ReleaseSome is Release of at most `most` places.
func (l *Limbo) ReleaseSome(before uint64, most int, f func(Place)) int {
	n := 0
	for ; n < most; n++ {
		p, ok := l.take(before)
		if !ok {
			break
		}
		f(p)
	}
	if l.head == l.tail && len(l.ring) > maxSpare {
		*l = Limbo{}
	}
	return n
}

// take removes the place at the front if its tag is below before.
func (l *Limbo) take(before uint64) (Place, bool) {
	if l.head == l.tail {
		return Place{}, false
	}
	w := *l.at(l.head)
	if w.tag >= before {
		return Place{}, false
	}
	if l.head++; l.head%chunkPlaces == 0 {
		c := &l.ring[(l.head-1)/chunkPlaces&uint64(len(l.ring)-1)]
		if len(l.spare) < maxSpare {
			l.spare = append(l.spare, *c)
		}
		*c = nil
	}
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
		if w := l.at(l.head); w.place.Unit/ExtentUnits != extent {
			keep.Add(w.place, w.tag)
		}
	}
	*l = keep
	return units - l.units
}

// Len returns how many places wait.
func (l *Limbo) Len() int { return int(l.tail - l.head) }

// Long reports whether places that wait are longer, on average, than those that a [Cache] keeps.
func (l *Limbo) Long() bool { return l.units > uint64(l.Len())*cacheUnits }

// Units returns how many units wait.
func (l *Limbo) Units() uint64 { return l.units }
