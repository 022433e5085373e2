package heap

import "math/bits"

const (
	pageUnits = 1 << 12
	pages     = ExtentUnits / pageUnits
	pageWords = pageUnits / 64
)

const _ = uint(64 - pages) // a word has a bit for every page

// tiles divides an extent into blocks without gaps: those of own memory that are
// free, those in use, and the stretches between that are not own. No two free
// blocks are neighbours. A page is there if a block starts in it, or if own memory in it was linked,
// and perhaps for longer: with all of them when nothing of the extent is own any more.
//
// Neighbours are found in constant time: each level has a bit for every non-zero word of the one below.
type tiles struct {
	page [pages]*tilePage
	l1   [pages]uint64 // of starts, a word for every page
	l2   uint64
}

// tilePage is a page of an extent's tiles.
type tilePage struct {
	starts [pageWords]uint64 // first units of blocks; unit 0 of the extent is always one
	// Valid at first units only:
	own  [pageWords]uint64
	free [pageWords]uint64 // implies own

	// Valid for every unit of own memory:
	linked [pageWords]uint64  // part of a linked life since the grant
	next   *[pageUnits]uint16 // ver of the next life starting here; nil: 0
}

func newTiles() *tiles {
	t := &tiles{}
	t.start(0)
	return t
}

// at is the page of off, made if it is not there.
func (t *tiles) at(off uint32) *tilePage {
	p := &t.page[off/pageUnits]
	if *p == nil {
		*p = &tilePage{}
	}
	return *p
}

func (t *tiles) isStart(off uint32) bool {
	p := t.page[off/pageUnits]
	return p != nil && hasBit(p.starts[:], off%pageUnits)
}

func (t *tiles) isFree(off uint32) bool {
	p := t.page[off/pageUnits]
	return p != nil && hasBit(p.free[:], off%pageUnits)
}

func (t *tiles) isOwn(off uint32) bool {
	p := t.page[off/pageUnits]
	return p != nil && hasBit(p.own[:], off%pageUnits)
}

// setFree says whether the own block that starts at off is free.
func (t *tiles) setFree(off uint32, free bool) {
	p := t.page[off/pageUnits]
	if free {
		setBit(p.free[:], off%pageUnits)
	} else {
		clearBit(p.free[:], off%pageUnits)
	}
}

// disown has the block that starts at off be not own.
func (t *tiles) disown(off uint32) {
	p := t.page[off/pageUnits]
	clearBit(p.own[:], off%pageUnits)
	clearBit(p.free[:], off%pageUnits)
}

// start has a block start at off, and returns its page.
func (t *tiles) start(off uint32) *tilePage {
	v, w := off/pageUnits, off%pageUnits>>6
	p := t.at(off)
	p.starts[w] |= 1 << (off & 63)
	t.l1[v] |= 1 << w
	t.l2 |= 1 << v
	return p
}

// drop merges the block at off into the one before it.
func (t *tiles) drop(off uint32) {
	v, w := off/pageUnits, off%pageUnits>>6
	p := t.page[v]
	clearBit(p.own[:], off%pageUnits)
	clearBit(p.free[:], off%pageUnits)
	if p.starts[w] &^= 1 << (off & 63); p.starts[w] != 0 {
		return
	}
	if t.l1[v] &^= 1 << w; t.l1[v] == 0 {
		t.l2 &^= 1 << v
	}
}

// end returns where the block that starts at off ends.
func (t *tiles) end(off uint32) uint32 {
	off++
	v := off / pageUnits
	if v == pages {
		return ExtentUnits
	}
	w := off % pageUnits >> 6
	if p := t.page[v]; p != nil {
		if x := p.starts[w] >> (off & 63); x != 0 {
			return off + uint32(bits.TrailingZeros64(x))
		}
		if x := t.l1[v] >> w >> 1; x != 0 {
			return t.first(v, w+1+uint32(bits.TrailingZeros64(x)))
		}
	}
	if x := t.l2 >> v >> 1; x != 0 {
		v += 1 + uint32(bits.TrailingZeros64(x))
		return t.first(v, uint32(bits.TrailingZeros64(t.l1[v])))
	}
	return ExtentUnits
}

// first is the first start in word w of page v.
func (t *tiles) first(v, w uint32) uint32 {
	return v*pageUnits + w<<6 + uint32(bits.TrailingZeros64(t.page[v].starts[w]))
}

// block returns where the block that off is in starts.
func (t *tiles) block(off uint32) uint32 {
	v, w := off/pageUnits, off%pageUnits>>6
	if p := t.page[v]; p != nil {
		if x := p.starts[w] << (63 - off&63); x != 0 {
			return off - uint32(bits.LeadingZeros64(x))
		}
		if x := t.l1[v] & (1<<w - 1); x != 0 {
			return t.last(v, 63-uint32(bits.LeadingZeros64(x)))
		}
	}
	if x := t.l2 & (1<<v - 1); x != 0 {
		v = 63 - uint32(bits.LeadingZeros64(x))
		return t.last(v, 63-uint32(bits.LeadingZeros64(t.l1[v])))
	}
	return 0
}

// last is the last start in word w of page v.
func (t *tiles) last(v, w uint32) uint32 {
	return v*pageUnits + w<<6 + 63 - uint32(bits.LeadingZeros64(t.page[v].starts[w]))
}

func (t *tiles) ver(off uint32) uint16 {
	if p := t.page[off/pageUnits]; p != nil && p.next != nil {
		return p.next[off%pageUnits]
	}
	return 0
}

// link says that a life of [lo, hi) was linked, and the ver of the next one.
func (t *tiles) link(lo, hi uint32, ver uint16) {
	eachPage(lo, hi, func(page, lo, hi uint32) { setRange(t.at(page * pageUnits).linked[:], lo, hi) })
	p := t.page[lo/pageUnits]
	if p.next == nil {
		if ver == 0 {
			return
		}
		p.next = new([pageUnits]uint16)
	}
	p.next[lo%pageUnits] = ver
}

func (t *tiles) isLinked(off uint32) bool {
	p := t.page[off/pageUnits]
	return p != nil && hasBit(p.linked[:], off%pageUnits)
}

// sameUntil returns the end of the stretch from lo on, at most hi, whose units were all linked or all not.
func (t *tiles) sameUntil(lo, hi uint32) uint32 {
	is := t.isLinked(lo)
	for lo < hi && t.isLinked(lo) == is {
		end := min(hi, lo-lo%pageUnits+pageUnits)
		if p := t.page[lo/pageUnits]; p != nil {
			end = lo - lo%pageUnits + sameUntil(p.linked[:], lo%pageUnits, lo%pageUnits+end-lo)
		}
		lo = end
	}
	return lo
}

// forget makes [lo, hi) as good as never linked. Nothing starts within but at its ends.
func (t *tiles) forget(lo, hi uint32) {
	eachPage(lo, hi, func(page, lo, hi uint32) {
		switch p := t.page[page]; {
		case p == nil:
		case t.l1[page] == 0 && hi-lo == pageUnits:
			t.page[page] = nil
		default:
			clearRange(p.linked[:], lo, hi)
			if p.next != nil && hi-lo == pageUnits {
				p.next = nil
			} else if p.next != nil {
				clear(p.next[lo:hi])
			}
		}
	})
}

// eachPage calls f with the pages that [lo, hi) touches and the range in each.
func eachPage(lo, hi uint32, f func(page, lo, hi uint32)) {
	for lo < hi {
		end := min(hi, lo-lo%pageUnits+pageUnits)
		f(lo/pageUnits, lo%pageUnits, lo%pageUnits+end-lo)
		lo = end
	}
}
