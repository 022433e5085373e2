package heap

import (
	"math/bits"
	"slices"
)

const (
	colBits = 5
	cols    = 1 << colBits
	rows    = 18 - colBits + 2 // the last holds a whole extent
)

// children of a node of a bin's heap.
const children = 8

const _ = uint(1<<18-ExtentUnits) + uint(ExtentUnits-1<<18)

// bins holds the free blocks of own memory, by size. Row 0 has a bin for each size
// below cols; row r > 0 divides the sizes from cols<<(r-1) to twice that evenly, so
// that the least size of some bin is met by all its blocks. Every size that a slot
// word can express is the least of its bin.
//
// A bin hands out its lowest block first. TLSF's stacks would be a little faster,
// but address order leaves five times fewer large requests unmet at three quarters
// full (Johnstone and Wilson, "The Memory Fragmentation Problem: Solved?", ISMM
// 1998), and a run that is refused costs a call to the directory.
//
// A bin's heap has many children to a node, since to compare them takes no cache miss. A block that is no
// more, because it was merged with another, stays in the heap until it comes to the top: to know
// where in the heap each block is costs a cache miss for each level that another one moves.
// Whether an entry is a block of the bin, the tiles know.
type bins struct {
	rowMap uint32       // rows with a block
	colMap [rows]uint32 // bins with a block
	all    [rows * cols]bin
}

type bin struct {
	blocks int      // free ones
	heap   []uint32 // the first units of those, and of others
}

// maxOld is how many entries a heap may have, beyond twice its blocks, that are none.
const maxOld = 64

func binOf(size uint32) (row, col uint32) {
	if size < cols {
		return 0, size
	}
	shift := uint32(bits.Len32(size)) - 1 - colBits
	return shift + 1, size>>shift - cols
}

// freeSize is the length of the free block of own memory that starts at unit, 0 if none does.
func (s *space) freeSize(unit uint32) uint32 {
	num, off := split(unit)
	if e := s.extents[num]; e != nil && e.tiles != nil && e.tiles.isFree(off) {
		return e.tiles.end(off) - off
	}
	return 0
}

// sizeIn is freeSize of a block of the bin, 0 if none starts at unit.
func (s *space) sizeIn(unit, row, col uint32) uint32 {
	size := s.freeSize(unit)
	if r, c := binOf(size); size == 0 || r != row || c != col {
		return 0
	}
	return size
}

// insert enters a block that has become free, which the tiles know.
func (s *space) insert(unit, size uint32) {
	row, col := binOf(size)
	b := &s.bins.all[row*cols+col]
	if len(b.heap) >= 2*b.blocks+maxOld {
		b.heap = slices.DeleteFunc(b.heap, func(u uint32) bool { return u == unit || s.sizeIn(u, row, col) == 0 })
		slices.Sort(b.heap) // which makes it a heap
		b.heap = slices.Compact(b.heap)
	}
	b.push(unit)
	b.blocks++
	s.bins.colMap[row] |= 1 << col
	s.bins.rowMap |= 1 << row
}

// remove takes out a block that was inserted with that size.
func (s *space) remove(unit, size uint32) {
	row, col := binOf(size)
	b := &s.bins.all[row*cols+col]
	if b.blocks--; b.blocks > 0 {
		if b.heap[0] == unit {
			b.pop()
		}
		return
	}
	b.heap = b.heap[:0]
	if s.bins.colMap[row] &^= 1 << col; s.bins.colMap[row] == 0 {
		s.bins.rowMap &^= 1 << row
	}
}

// find returns a block of at least so many units, if there is one, and its size.
func (s *space) find(units uint32) (unit, size uint32, ok bool) {
	// The first bin in which every block is large enough.
	row, col := binOf(units)
	up, upCol := row, col
	if row > 0 {
		up, upCol = binOf(units + 1<<(row-1) - 1)
	}
	m := s.bins.colMap[up] >> upCol << upCol
	if m == 0 {
		if r := s.bins.rowMap >> (up + 1) << (up + 1); r != 0 {
			up = uint32(bits.TrailingZeros32(r))
			m = s.bins.colMap[up]
		}
	}
	if m != 0 {
		upCol = uint32(bits.TrailingZeros32(m))
		b := &s.bins.all[up*cols+upCol]
		for size == 0 {
			if unit, size = b.heap[0], s.sizeIn(b.heap[0], up, upCol); size == 0 {
				b.pop()
			}
		}
		return unit, size, true
	}
	// Nothing left but the bin that units itself falls in. The search is linear,
	// but only when memory is nearly out and units is not its bin's least.
	for _, unit := range s.bins.all[row*cols+col].heap {
		if size := s.sizeIn(unit, row, col); size >= units {
			return unit, size, true
		}
	}
	return 0, 0, false
}

// push adds unit to the heap.
func (b *bin) push(unit uint32) {
	b.heap = append(b.heap, unit)
	h, i := b.heap, len(b.heap)-1
	for i > 0 {
		up := (i - 1) / children
		if h[up] <= unit {
			break
		}
		h[i] = h[up]
		i = up
	}
	h[i] = unit
}

// pop removes the least unit, of a heap that has one.
func (b *bin) pop() {
	n := len(b.heap) - 1
	unit := b.heap[n]
	h := b.heap[:n]
	b.heap = h
	if n == 0 {
		return
	}
	i := 0
	for children*i+1 < n {
		down := children*i + 1
		for k := down + 1; k < min(children*i+children+1, n); k++ {
			if h[k] < h[down] {
				down = k
			}
		}
		if unit <= h[down] {
			break
		}
		h[i] = h[down]
		i = down
	}
	h[i] = unit
}
