package heap

import (
	"fmt"
	"math/bits"
)

func (s *space) check() error {
	var granted, free uint64
	blocks := 0
	for num, e := range s.extents {
		if e == nil || e.tiles == nil {
			continue
		}
		t, base := e.tiles, uint32(num)*ExtentUnits
		if err := t.check(); err != nil {
			return fmt.Errorf("extent %d: %w", num, err)
		}
		if !t.isStart(0) {
			return fmt.Errorf("extent %d: unit 0 starts no block", num)
		}
		wasFree, wasStrange := false, false
		for off := uint32(0); off < ExtentUnits; off = t.end(off) {
			size := t.end(off) - off
			isFree, isStrange := t.isFree(off), !t.isOwn(off)
			if isFree && wasFree || isStrange && wasStrange {
				return fmt.Errorf("block %d is not merged with the one before", base+off)
			}
			wasFree, wasStrange = isFree, isStrange
			if isStrange {
				continue
			}
			if e.anyAway(off, off+size) {
				return fmt.Errorf("block %d+%d is own and holds a foreign place", base+off, size)
			}
			granted += uint64(size)
			for i := off; i < off+size; i++ {
				if v := t.ver(i); v > verMask || v != 0 && !t.isLinked(i) {
					return fmt.Errorf("unit %d: ver %d, linked %v", base+i, v, t.isLinked(i))
				}
			}
			if isFree {
				free += uint64(size)
				blocks++
			}
		}
	}
	if granted != s.granted || free != s.free {
		return fmt.Errorf("granted %d, free %d; counted %d, %d", s.granted, s.free, granted, free)
	}
	if err := s.checkBins(blocks); err != nil {
		return err
	}
	return s.checkForeign()
}

// checkBins verifies that the bins hold the free blocks, of which there are n.
func (s *space) checkBins(n int) error {
	inBins := 0
	for row, m := range s.bins.colMap {
		if got := s.bins.rowMap>>row&1 != 0; got != (m != 0) {
			return fmt.Errorf("row %d: marked %v, bins %#x", row, got, m)
		}
		for col := range cols {
			b := &s.bins.all[row*cols+col]
			if got := m>>col&1 != 0; got != (b.blocks > 0) {
				return fmt.Errorf("bin %d.%d: marked %v, holds %d", row, col, got, b.blocks)
			}
			if len(b.heap) == 0 {
				continue
			}
			blocks := map[uint32]bool{}
			for i, unit := range b.heap {
				if i > 0 && b.heap[(i-1)/children] > unit {
					return fmt.Errorf("bin %d.%d: %d is out of order", row, col, unit)
				}
				if s.sizeIn(unit, uint32(row), uint32(col)) != 0 {
					blocks[unit] = true
				}
			}
			if len(blocks) != b.blocks {
				return fmt.Errorf("bin %d.%d: %d blocks are %d of %d entries", row, col, b.blocks, len(blocks),
					len(b.heap))
			}
			inBins += b.blocks
		}
	}
	if inBins != n {
		return fmt.Errorf("%d free blocks, %d in bins", n, inBins)
	}
	return nil
}

func (s *space) checkForeign() error {
	var places, marked uint64 // a unit that two places hold is marked once
	for units, f := range s.foreign {
		if len(f) == 0 {
			return fmt.Errorf("no foreign places of %d units are kept", units)
		}
		for _, p := range f {
			num, off := split(p.Unit)
			if p.Units != units || p.Ver > verMask || uint64(off)+uint64(units) > ExtentUnits {
				return fmt.Errorf("bad foreign place %v among those of %d units", p, units)
			}
			for i := off; i < off+units; i++ {
				m := s.extents[num].away[i/pageUnits]
				if m == nil || !hasBit(m[:], i%pageUnits) {
					return fmt.Errorf("foreign place %v: unit %d is not marked", p, num*ExtentUnits+i)
				}
			}
			places += uint64(units)
		}
	}
	for _, e := range s.extents {
		if e == nil {
			continue
		}
		for _, m := range e.away {
			if m == nil {
				continue
			}
			for _, x := range m {
				marked += uint64(bits.OnesCount64(x))
			}
		}
	}
	if places != s.foreignFree || marked != s.foreignFree {
		return fmt.Errorf("foreign free %d; in places %d, marked %d", s.foreignFree, places, marked)
	}
	return nil
}

func (t *tiles) check() error {
	for v, p := range t.page {
		if got := t.l2>>v&1 != 0; got != (t.l1[v] != 0) {
			return fmt.Errorf("summary %d is %#x, marked %v", v, t.l1[v], got)
		}
		if p == nil {
			if t.l1[v] != 0 {
				return fmt.Errorf("summary %d is %#x, and there is no page", v, t.l1[v])
			}
			continue
		}
		for w, x := range p.starts {
			if got := t.l1[v]>>w&1 != 0; got != (x != 0) {
				return fmt.Errorf("page %d: word %d of starts is %#x, its summary says %v", v, w, x, got)
			}
			if x := (p.own[w] | p.free[w]) &^ x; x != 0 {
				return fmt.Errorf("page %d: word %d has kinds %#x without a start", v, w, x)
			}
			if x := p.free[w] &^ p.own[w]; x != 0 {
				return fmt.Errorf("page %d: word %d has %#x free but not own", v, w, x)
			}
		}
	}
	return nil
}
