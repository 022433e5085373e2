package check

import (
	"cmp"
	"slices"
	"sort"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/overview"
)

// Geometry is a region's division into index, access words and heap.
type Geometry struct {
	RegionBytes, IndexBytes uint64
	HeapLo, HeapHi          uint32 // units; the heap is [HeapLo, HeapHi)
}

// GeometryOf divides a region of regionBytes.
func GeometryOf(regionBytes, indexBytes, accessBytes uint64) Geometry {
	return Geometry{regionBytes, indexBytes, uint32((indexBytes + accessBytes + layout.UnitSize - 1) / layout.UnitSize),
		uint32(min(regionBytes/layout.UnitSize, 1<<32-1))}
}

// Array is one shard's segments in a placement group, or those that it moves to.
type Array struct {
	Shard    uint32
	Off      uint64 // in the region, in bytes
	Segments uint32
	Prefix   uint32
	Depth    uint8
	// Moving: words may be FROZEN or MOVED, since it is the parent of a move.
	// Child: a FROZEN word of the parent may name the same place.
	Moving, Child bool
}

func (r Array) end() uint64 { return r.Off + uint64(r.Segments)*layout.SegmentSize }

// Arrays lists the arrays of a placement group that clients look into.
func Arrays(m *dirpb.Map, pg uint32) (out []Array) {
	for _, s := range m.GetShards() {
		mv := s.GetMove()
		if s.GetPgId() == pg {
			out = append(out, Array{Shard: s.GetId(), Off: s.GetOffset(), Segments: s.GetSegments(),
				Prefix: s.GetPrefix(),
				Depth:  uint8(s.GetDepth()), Moving: mv != nil})
		}
		if mv != nil && mv.GetPgId() == pg && !mv.GetAbandoned() {
			c := Array{Shard: mv.GetChildId(), Off: mv.GetOffset(), Segments: s.ChildSegments(), Prefix: s.GetPrefix(),
				Depth: uint8(s.GetDepth()), Child: true}
			if mv.GetSplit() {
				c.Prefix, c.Depth = c.Prefix<<1|1, c.Depth+1
			}
			out = append(out, c)
		}
	}
	slices.SortFunc(out, func(x, y Array) int { return cmp.Compare(x.Off, y.Off) })
	return out
}

// Segments counts those of all arrays of a namespace.
func Segments(m *dirpb.Map, ns uint32) (n int64) {
	for _, p := range overview.Groups(m, ns) {
		for _, r := range Arrays(m, p.GetId()) {
			n += int64(r.Segments)
		}
	}
	return n
}

// Part is some segments of an array, as some copies of a placement group have them.
type Part struct {
	Array
	Off    uint64   // of the segments, in the region
	Copies [][]byte // of the same length each; the callee's until it returns
}

// partBytes bounds a part.
const partBytes = 256 << 10

// Walk calls fn with every part of the arrays, of each of the copies side by side. read reads n bytes
// at off of a copy.
func Walk(arrays []Array, copies []int, read func(copy int, off uint64, n int) ([]byte, error),
	fn func(*Part) error) error {
	const most = partBytes / layout.SegmentSize
	for _, r := range arrays {
		for c := uint32(0); c < r.Segments; c += most {
			p := &Part{Array: r, Off: r.Off + uint64(c)*layout.SegmentSize}
			for _, i := range copies {
				b, err := read(i, p.Off, int(min(most, r.Segments-c))*layout.SegmentSize)
				if err != nil {
					return err
				}
				p.Copies = append(p.Copies, b)
			}
			if err := fn(p); err != nil {
				return err
			}
		}
	}
	return nil
}

// Slot is a LIVE or FROZEN word and what it names.
type Slot struct {
	Off  uint64 // of the word, in the region
	Word layout.Word
	Rec  []byte // of the word's length, or what Fetch read of it
}

// Slots lists the words of the groups in b, which stand at off, that name records in the heap. While a
// shard moves, its FROZEN words are copied to the child, where they are LIVE.
func (g Geometry) Slots(off uint64, b []byte) (out []Slot) {
	for at := 0; at < len(b); at += layout.GroupSize {
		group := layout.Group(b[at:][:layout.GroupSize])
		for j := range layout.GroupSlots {
			if w := group.Slot(j); g.names(w) {
				out = append(out, Slot{Off: off + uint64(at) + layout.SlotOff(j), Word: w})
			}
		}
	}
	return out
}

// names reports whether w names a record in the heap.
func (g Geometry) names(w layout.Word) bool {
	return w.Readable() && layout.InHeap(w, g.HeapLo, g.HeapHi)
}

// Records that stand near each other are read together.
const (
	spanBytes = 1 << 20
	spanGap   = 16 << 10
)

// Fetch reads the records of slots, at most `most` bytes of each, with read.
func Fetch(slots []Slot, most int, read func(off uint64, n int) ([]byte, error)) error {
	order := make([]int, len(slots))
	for i := range order {
		order[i] = i
	}
	span := func(i int) (lo, hi uint64) {
		w := slots[order[i]].Word
		return w.Off(), w.Off() + uint64(min(w.ReadLen(), most))
	}
	sort.Slice(order, func(i, j int) bool { return slots[order[i]].Word.Unit() < slots[order[j]].Word.Unit() })
	for i := 0; i < len(order); {
		lo, hi := span(i)
		j := i + 1
		for ; j < len(order); j++ {
			off, end := span(j)
			end = max(hi, end)
			if off > hi+spanGap || end-lo > spanBytes {
				break
			}
			hi = end
		}
		b, err := read(lo, int(hi-lo))
		if err != nil {
			return err
		}
		for ; i < j; i++ {
			off, end := span(i)
			slots[order[i]].Rec = b[off-lo : end-lo]
		}
	}
	return nil
}

// RecordSpan is how many bytes the record that begins with head says it has, at
// most what a record can have.
func RecordSpan(head []byte) int {
	if len(head) < layout.RecordHeaderSize {
		return len(head)
	}
	h := layout.HeadOf(head)
	return min(h.EncodedLen(), layout.MaxRecordSize)
}
