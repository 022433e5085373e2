package heap

import "math/bits"

// Owns reports whether unit is own memory, granted to this session.
func (h *Heap) Owns(unit uint32) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.mu.owns(unit)
}

func (s *space) owns(unit uint32) bool {
	num, off := split(unit)
	if int(num) >= len(s.extents) || s.extents[num] == nil || s.extents[num].tiles == nil {
		return false
	}
	t := s.extents[num].tiles
	return t.isOwn(t.block(off))
}

// Welcome appends to dst the indexes of the places that are worth having back in a heap that is always nearly full.
// They are own memory, which merges with its neighbours, and foreign places of lengths with fewer than stock units
// free. More of those would lie there unused, and what others were granted of them stay in pieces.
func (h *Heap) Welcome(ps []Place, stock uint64, dst []int) []int {
	h.mu.Lock()
	defer h.mu.Unlock()
	for i, p := range ps {
		if uint64(len(h.mu.foreign[p.Units]))*uint64(p.Units) < stock || h.mu.owns(p.Unit) {
			dst = append(dst, i)
		}
	}
	return dst
}

// Window is the stretch of that many units of own memory that has the most free memory. All else that lies there
// stands in the way of one place of that size. It looks at every block.
func (h *Heap) Window(units uint32) (unit uint32, ok bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if units == 0 || units > MaxUnits {
		return 0, false
	}
	best := int64(-1)
	for num, e := range h.mu.extents {
		if e == nil || e.tiles == nil {
			continue
		}
		t := e.tiles
		// Stretches of own blocks, cut into windows from their start.
		for off := uint32(0); off < ExtentUnits; {
			if !t.isOwn(off) {
				off = t.end(off)
				continue
			}
			start, free := off, int64(0)
			for off < ExtentUnits && t.isOwn(off) {
				end := t.end(off)
				if end-start >= units {
					// The block reaches beyond the window, which takes a share of it.
					if t.isFree(off) {
						free += int64(start + units - off)
					}
					if free > best {
						best, unit = free, uint32(num)*ExtentUnits+start
					}
					start, free = end, 0
				} else if t.isFree(off) {
					free += int64(end - off)
				}
				off = end
			}
		}
	}
	return unit, best >= 0
}

// AllocFit returns a place of at least the given units, for a heap that is always nearly full. A slot word can tell
// the length of the place, and must be able to tell units. It takes a free block, or a foreign place, that is not
// longer than whole rather than a piece of a longer block. The reason is that what is left of blocks serves fewer
// and fewer. It takes a foreign place of up to most when there is nothing else. Finding none has the effect that a
// failed Alloc has.
func (h *Heap) AllocFit(units, whole, most uint32) (Place, bool) {
	if units-1 >= MaxUnits {
		return Place{}, false
	}
	h.mu.Lock()
	size := uint32(0) // of the own block that fits best
	if _, n, ok := h.mu.find(units); ok {
		size = n
	}
	take := h.mu.foreignOf(units, whole)
	switch {
	case size != 0 && size <= whole:
		take = expressible(size)
	case take != 0:
	case size != 0:
		take = units
	default:
		take = h.mu.foreignOf(units, most)
	}
	p, ok := Place{}, false
	if take != 0 {
		p, ok = h.mu.alloc(take)
	}
	h.mu.Unlock()
	if !ok {
		h.starved.Add(1)
	}
	return p, ok
}

// expressible is the longest place of at most so many units whose length a slot word can
// tell: from 16 units on there are 16 lengths an octave (layout.CodeFor). A longer one
// would be given back longer than it was taken.
func expressible(units uint32) uint32 {
	shift := max(bits.Len32(units), 5) - 5
	return units >> shift << shift
}

// foreignOf is the size of the smallest foreign place of least to most units, 0 if there
// is none.
func (s *space) foreignOf(least, most uint32) (best uint32) {
	if s.foreignFree == 0 {
		return 0
	}
	if most-least < uint32(len(s.foreign)) {
		for u := least; u <= most; u++ {
			if len(s.foreign[u]) > 0 {
				return u
			}
		}
		return 0
	}
	for u := range s.foreign {
		if u >= least && u <= most && (best == 0 || u < best) {
			best = u
		}
	}
	return best
}
