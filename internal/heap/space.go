package heap

import (
	"cmp"
	"slices"
)

// space is a Heap without its lock.
type space struct {
	extents     []*extent          // by number; nil if nothing is known
	bins        bins               // free blocks of own memory
	foreign     map[uint32][]Place // by Units; Ver is the next life's. No empty slices
	granted     uint64
	free        uint64
	foreignFree uint64
	refused     uint64
}

// extent is what a session knows of one extent. Either half may be absent.
type extent struct {
	tiles *tiles
	// away marks every unit of the foreign places that are free.
	away [pages]*[pageWords]uint64
}

func split(unit uint32) (num, off uint32) { return unit / ExtentUnits, unit % ExtentUnits }

func (s *space) extent(num uint32) *extent {
	if int(num) >= len(s.extents) {
		s.extents = append(s.extents, make([]*extent, int(num)+1-len(s.extents))...)
	}
	if s.extents[num] == nil {
		s.extents[num] = &extent{}
	}
	return s.extents[num]
}

func (s *space) addRun(unit, units uint32) error {
	num, off := split(unit)
	if units == 0 || units > ExtentUnits-off {
		return ErrRunBounds
	}
	e := s.extent(num)
	if e.anyAway(off, off+units) {
		return ErrRunOverlap
	}
	if e.tiles == nil {
		e.tiles = newTiles()
	}
	t := e.tiles
	if b := t.block(off); t.isOwn(b) || t.end(b) < off+units {
		return ErrRunOverlap
	}
	t.forget(off, off+units)
	setBit(t.start(off).own[:], off%pageUnits)
	if off+units < ExtentUnits {
		t.start(off + units)
	}
	s.granted += uint64(units)
	s.release(t, num, off, off+units)
	return nil
}

// alloc returns a place of units units, 1..MaxUnits.
func (s *space) alloc(units uint32) (Place, bool) {
	if s.foreignFree > 0 {
		if f := s.foreign[units]; len(f) > 0 {
			p := f[len(f)-1]
			if len(f) == 1 {
				delete(s.foreign, units)
			} else {
				s.foreign[units] = f[:len(f)-1]
			}
			num, off := split(p.Unit)
			s.extents[num].markAway(off, off+units, false)
			s.foreignFree -= uint64(units)
			return p, true
		}
	}
	unit, size, ok := s.find(units)
	if !ok {
		return Place{}, false
	}
	s.remove(unit, size)
	num, off := split(unit)
	t := s.extents[num].tiles
	t.setFree(off, false)
	if rest := size - units; rest > 0 {
		p := t.start(off + units)
		setBit(p.own[:], (off+units)%pageUnits)
		setBit(p.free[:], (off+units)%pageUnits)
		s.insert(unit+units, rest)
	}
	s.free -= uint64(units)
	return Place{Unit: unit, Units: units, Ver: t.ver(off)}, true
}

// giveBack takes p back. Its life p.Ver counts as linked if so said; otherwise
// p.Ver is the ver of the life to come. A place that cannot be free is refused:
// p may stem from a slot word, which any client may have damaged.
func (s *space) giveBack(p Place, linked bool) {
	num, off := split(p.Unit)
	end := off + p.Units
	if p.Units-1 >= MaxUnits || end > ExtentUnits || p.Ver > verMask {
		s.refused++
		return
	}
	next := p.Ver
	if linked {
		next = (next + 1) & verMask
	}
	e := s.extent(num)
	t := e.tiles
	if t != nil {
		if b := t.block(off); t.isOwn(b) {
			if b != off || t.isFree(off) || t.end(off) != end {
				s.refused++
				return
			}
			// A Cache lets a place live several times and returns it like one
			// that was never posted; the ver tells, as it never wraps there.
			if linked || t.ver(off) != next {
				t.link(off, end, next)
			}
			s.release(t, num, off, end)
			return
		} else if t.end(b) < end {
			s.refused++
			return
		}
	}
	if e.anyAway(off, end) {
		s.refused++
		return
	}
	e.markAway(off, end, true)
	s.foreign[p.Units] = append(s.foreign[p.Units], Place{p.Unit, p.Units, next})
	s.foreignFree += uint64(p.Units)
}

// release makes the own block [off, end), which is not free, a free one.
func (s *space) release(t *tiles, num, off, end uint32) {
	s.free += uint64(end - off)
	base := num * ExtentUnits
	if end < ExtentUnits && t.isFree(end) {
		next := t.end(end)
		s.remove(base+end, next-end)
		t.drop(end)
		end = next
	}
	if off > 0 {
		if b := t.block(off - 1); t.isFree(b) {
			s.remove(base+b, off-b)
			t.drop(off)
			off = b
		}
	}
	t.setFree(off, true)
	s.insert(base+off, end-off)
}

// takeOwn removes free own blocks, see Heap.TakeOwn.
func (s *space) takeOwn(units uint64, least, under uint32, most int) []Run {
	type block struct{ num, off, size uint32 }
	var blocks []block
	for num, e := range s.extents {
		if e == nil || e.tiles == nil {
			continue
		}
		t := e.tiles
		for off := uint32(0); off < ExtentUnits; {
			end := t.end(off)
			if t.isFree(off) && end-off >= least && end-off < under {
				blocks = append(blocks, block{uint32(num), off, end - off})
			}
			off = end
		}
	}
	slices.SortStableFunc(blocks, func(a, b block) int { return cmp.Compare(b.size, a.size) })
	var runs []Run
	for _, x := range blocks {
		if units == 0 || len(runs) >= most {
			break
		}
		t, base := s.extents[x.num].tiles, x.num*ExtentUnits
		// The end of the last one is enough.
		lo, hi := x.off, x.off+x.size
		if uint64(x.size) > units {
			lo = hi - max(uint32(units), least)
		}
		var part []Run
		for at := lo; at < hi; {
			next := t.sameUntil(at, hi)
			part = append(part, Run{Unit: base + at, Units: next - at, Fresh: !t.isLinked(at)})
			at = next
		}
		if over := len(part) - (most - len(runs)); over > 0 { // the rest of it stays
			part = part[over:]
			lo = part[0].Unit - base
		}
		runs = append(runs, part...)
		s.disown(x.num, x.off, lo, hi)
		units -= min(units, uint64(hi-lo))
	}
	slices.SortFunc(runs, func(a, b Run) int { return cmp.Compare(a.Unit, b.Unit) })
	return runs
}

// disown makes [lo, hi), the end of the free own block at off, what is not own.
func (s *space) disown(num, off, lo, hi uint32) {
	e := s.extents[num]
	t, base := e.tiles, num*ExtentUnits
	s.remove(base+off, t.end(off)-off)
	if lo > off {
		t.start(lo)
		s.insert(base+off, lo-off)
	}
	t.disown(lo)
	s.granted -= uint64(hi - lo)
	s.free -= uint64(hi - lo)
	if hi < ExtentUnits && !t.isOwn(hi) {
		t.drop(hi)
	}
	if lo > 0 && !t.isOwn(t.block(lo-1)) {
		t.drop(lo)
	}
	t.forget(lo, hi)
	if !t.isOwn(0) && t.end(0) == ExtentUnits {
		e.tiles = nil
	}
}

// takeForeign removes free foreign places, see Heap.TakeForeign.
func (s *space) takeForeign(places int, units uint64) []Place {
	var out []Place
	sizes := make([]uint32, 0, len(s.foreign))
	for size := range s.foreign {
		sizes = append(sizes, size)
	}
	slices.SortFunc(sizes, func(a, b uint32) int { return cmp.Compare(b, a) })
	for _, size := range sizes {
		f := s.foreign[size]
		n := 0 // those that have been free for longest
		for n < len(f) && len(out) < places && units > 0 {
			p := f[n]
			n++
			num, off := split(p.Unit)
			s.extents[num].markAway(off, off+size, false)
			s.foreignFree -= uint64(size)
			units -= min(units, uint64(size))
			out = append(out, p)
		}
		if n == len(f) {
			delete(s.foreign, size)
		} else {
			s.foreign[size] = slices.Delete(f, 0, n)
		}
	}
	slices.SortFunc(out, func(a, b Place) int { return cmp.Compare(a.Unit, b.Unit) })
	return out
}

// receive takes in a place that comes home, see Heap.Receive.
func (s *space) receive(p Place) bool {
	num, off := split(p.Unit)
	end := off + p.Units
	if p.Units-1 >= MaxUnits || end > ExtentUnits || p.Ver > verMask || int(num) >= len(s.extents) ||
		s.extents[num] == nil || s.extents[num].tiles == nil {
		s.refused++
		return false
	}
	t := s.extents[num].tiles
	if b := t.block(off); b != off || !t.isOwn(b) || t.isFree(b) || t.end(b) != end {
		s.refused++
		return false
	}
	t.link(off, end, p.Ver)
	s.release(t, num, off, end)
	return true
}

func (s *space) forget(num uint32) {
	if int(num) >= len(s.extents) || s.extents[num] == nil {
		return
	}
	if t := s.extents[num].tiles; t != nil {
		for off := uint32(0); off < ExtentUnits; off = t.end(off) {
			size := uint64(t.end(off) - off)
			if t.isFree(off) {
				s.remove(num*ExtentUnits+off, t.end(off)-off)
				s.free -= size
			}
			if t.isOwn(off) {
				s.granted -= size
			}
		}
	}
	for units, f := range s.foreign {
		keep := slices.DeleteFunc(f, func(p Place) bool { return p.Unit/ExtentUnits == num })
		s.foreignFree -= uint64(len(f)-len(keep)) * uint64(units)
		if s.foreign[units] = keep; len(keep) == 0 {
			delete(s.foreign, units)
		}
	}
	s.extents[num] = nil
}

func (e *extent) anyAway(lo, hi uint32) bool {
	found := false
	eachPage(lo, hi, func(page, lo, hi uint32) {
		if m := e.away[page]; m != nil {
			found = found || anyInRange(m[:], lo, hi)
		}
	})
	return found
}

func (e *extent) markAway(lo, hi uint32, on bool) {
	eachPage(lo, hi, func(page, lo, hi uint32) {
		switch m := e.away[page]; {
		case !on:
			clearRange(m[:], lo, hi)
		case m == nil:
			e.away[page] = new([pageWords]uint64)
			fallthrough
		default:
			setRange(e.away[page][:], lo, hi)
		}
	})
}
