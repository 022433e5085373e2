package heap

import "math/bits"

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
// A heap has many children to a node: to move a block is a cache miss, in blocks, where to compare with
// it is none, in the heap's own array.
type bins struct {
	rowMap uint32       // rows with a block
	colMap [rows]uint32 // bins with a block
	heaps  [rows * cols][]uint32
	blocks blocks
}

func binOf(size uint32) (row, col uint32) {
	if size < cols {
		return 0, size
	}
	shift := uint32(bits.Len32(size)) - 1 - colBits
	return shift + 1, size>>shift - cols
}

func (b *bins) insert(unit, size uint32) {
	row, col := binOf(size)
	h := &b.heaps[row*cols+col]
	*h = append(*h, unit)
	b.blocks.put(block{unit: unit, size: size})
	b.rise(*h, uint32(len(*h)-1), unit)
	b.colMap[row] |= 1 << col
	b.rowMap |= 1 << row
}

// remove takes out the block at unit and returns its size.
func (b *bins) remove(unit uint32) uint32 {
	gone := b.blocks.take(unit)
	row, col := binOf(gone.size)
	h := &b.heaps[row*cols+col]
	n := len(*h) - 1
	last := (*h)[n]
	*h = (*h)[:n]
	if last != unit {
		if i := gone.pos; i > 0 && last < (*h)[(i-1)/children] {
			b.rise(*h, i, last)
		} else {
			b.sink(*h, i, last)
		}
	}
	if n == 0 {
		if b.colMap[row] &^= 1 << col; b.colMap[row] == 0 {
			b.rowMap &^= 1 << row
		}
	}
	return gone.size
}

// rise puts unit into the heap h at i, or above.
func (b *bins) rise(h []uint32, i, unit uint32) {
	for i > 0 {
		up := (i - 1) / children
		if h[up] < unit {
			break
		}
		h[i] = h[up]
		b.blocks.get(h[i]).pos = i
		i = up
	}
	h[i] = unit
	b.blocks.get(unit).pos = i
}

// sink puts unit into the heap h at i, or below.
func (b *bins) sink(h []uint32, i, unit uint32) {
	n := uint32(len(h))
	for children*i+1 < n {
		down := children*i + 1
		for k := down + 1; k < min(children*i+children+1, n); k++ {
			if h[k] < h[down] {
				down = k
			}
		}
		if unit < h[down] {
			break
		}
		h[i] = h[down]
		b.blocks.get(h[i]).pos = i
		i = down
	}
	h[i] = unit
	b.blocks.get(unit).pos = i
}

// find returns a block of at least size units, if there is one.
func (b *bins) find(size uint32) (unit uint32, ok bool) {
	// The first bin in which every block is large enough.
	row, col := binOf(size)
	up, upCol := row, col
	if row > 0 {
		up, upCol = binOf(size + 1<<(row-1) - 1)
	}
	m := b.colMap[up] >> upCol << upCol
	if m == 0 {
		if r := b.rowMap >> (up + 1) << (up + 1); r != 0 {
			up = uint32(bits.TrailingZeros32(r))
			m = b.colMap[up]
		}
	}
	if m != 0 {
		return b.heaps[up*cols+uint32(bits.TrailingZeros32(m))][0], true
	}
	// Nothing left but the bin that size itself falls in. The search is linear,
	// but only when memory is nearly out and size is not its bin's least.
	for _, unit := range b.heaps[row*cols+col] {
		if b.blocks.get(unit).size >= size {
			return unit, true
		}
	}
	return 0, false
}

// blocks finds a free block by its first unit: open addressing with linear
// probing, at a fraction of a Go map's cost.
type blocks struct {
	slots []block // a power of two, at most 3/4 full
	n     int
	shift uint32 // 32 - log2(len(slots))
}

type block struct {
	unit uint32
	size uint32 // 0 in an empty slot
	pos  uint32 // in its bin's heap
}

func (t *blocks) home(unit uint32) uint32 { return unit * 0x9E3779B1 >> t.shift }

// get returns the block at unit, which must be there. The result is valid until
// the next put or take.
func (t *blocks) get(unit uint32) *block {
	mask := uint32(len(t.slots) - 1)
	for i := t.home(unit); ; i = (i + 1) & mask {
		if b := &t.slots[i]; b.unit == unit && b.size != 0 {
			return b
		}
	}
}

func (t *blocks) put(b block) {
	if 4*(t.n+1) > 3*len(t.slots) {
		t.grow()
	}
	mask := uint32(len(t.slots) - 1)
	i := t.home(b.unit)
	for t.slots[i].size != 0 {
		i = (i + 1) & mask
	}
	t.slots[i] = b
	t.n++
}

func (t *blocks) grow() {
	old := t.slots
	t.slots = make([]block, max(64, 2*len(old)))
	t.shift = 32 - uint32(bits.Len(uint(len(t.slots)-1)))
	t.n = 0
	for _, b := range old {
		if b.size != 0 {
			t.put(b)
		}
	}
}

// take removes the block at unit, which must be there, and moves later ones of
// the same probe sequence up, so that no sequence has a hole.
func (t *blocks) take(unit uint32) block {
	mask := uint32(len(t.slots) - 1)
	i := t.home(unit)
	for t.slots[i].unit != unit || t.slots[i].size == 0 {
		i = (i + 1) & mask
	}
	b := t.slots[i]
	for j := (i + 1) & mask; t.slots[j].size != 0; j = (j + 1) & mask {
		if (j-t.home(t.slots[j].unit))&mask >= (j-i)&mask {
			t.slots[i] = t.slots[j]
			i = j
		}
	}
	t.slots[i] = block{}
	t.n--
	return b
}
