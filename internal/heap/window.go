package heap

// Owns reports whether unit is own memory, granted to this session.
func (h *Heap) Owns(unit uint32) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	num, off := split(unit)
	if int(num) >= len(h.mu.extents) || h.mu.extents[num] == nil || h.mu.extents[num].tiles == nil {
		return false
	}
	t := h.mu.extents[num].tiles
	return t.isOwn(t.starts.prev(off))
}

// Window is the stretch of so many units of own memory of which most is free: what else
// lies there stands in the way of one place as large. It looks at every block.
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

// AllocForeign returns the smallest foreign place of least to most units.
func (h *Heap) AllocForeign(least, most uint32) (Place, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.mu.foreignFree == 0 {
		return Place{}, false
	}
	best := uint32(0)
	if most-least < uint32(len(h.mu.foreign)) {
		for u := least; u <= most && best == 0; u++ {
			if len(h.mu.foreign[u]) > 0 {
				best = u
			}
		}
	} else {
		for u := range h.mu.foreign {
			if u >= least && u <= most && (best == 0 || u < best) {
				best = u
			}
		}
	}
	if best == 0 {
		return Place{}, false
	}
	return h.mu.alloc(best)
}
