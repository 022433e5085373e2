package fsm

import (
	"cmp"
	"slices"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

const _ = uint(layout.MaxDepth - MaxShardDepth) // a group's header can tell every depth

func arrayBytes(segments uint32) uint64 { return uint64(segments) * layout.SegmentSize }

// takeArray gives out zeroed segments of a placement group's index: an array of just as
// many that came back and may be given again, else the next that was never given.
// It returns the array's offset and the heap without it; no heap: there is no room.
func takeArray(pg *dirpb.PlacementGroup, h *fsmpb.Heap, segments uint32) (uint64, *fsmpb.Heap) {
	i := slices.IndexFunc(h.IndexFree, func(a *fsmpb.Array) bool { return a.Segments == segments && a.Returned == 0 })
	at := h.IndexNext
	switch {
	case i >= 0:
		at = h.IndexFree[i].Offset
		h = copyHeap(h)
		h.IndexFree = slices.Delete(slices.Clone(h.IndexFree), i, i+1)
	case at <= pg.IndexBytes && arrayBytes(segments) <= pg.IndexBytes-at:
		h = copyHeap(h)
		h.IndexNext += arrayBytes(segments)
	default:
		return 0, nil
	}
	return at, h
}

// freeArray gives zeroed segments back to a placement group's index; see fsmpb.Array for
// returned.
func (s *State) freeArray(pg uint32, offset uint64, segments uint32, returned uint64) {
	h := s.editHeap(pg)
	a := &fsmpb.Array{Offset: offset, Segments: segments, Returned: returned}
	i, _ := slices.BinarySearchFunc(h.IndexFree, a, func(a, b *fsmpb.Array) int {
		return cmp.Compare(a.Offset, b.Offset)
	})
	h.IndexFree = slices.Insert(slices.Clone(h.IndexFree), i, a)
}

// matured is free with those arrays ready that have waited long enough at the reclaim epoch.
func matured(free []*fsmpb.Array, epoch uint64) []*fsmpb.Array {
	out := slices.Clone(free)
	for i, a := range out {
		if a.Returned != 0 && epoch > a.Returned+ReuseEpochs {
			out[i] = &fsmpb.Array{Offset: a.Offset, Segments: a.Segments}
		}
	}
	return out
}
