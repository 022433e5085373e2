package fsm

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

func recallOf(h *fsmpb.Heap, extent uint32) *fsmpb.Recall {
	for _, r := range h.Recalls {
		if r.Extent == extent {
			return r
		}
	}
	return nil
}

func markAt(h *fsmpb.Heap, extent uint32) (int, bool) {
	return slices.BinarySearchFunc(h.RecallMarks, extent, func(m *fsmpb.RecallMark, x uint32) int {
		return cmp.Compare(m.Extent, x)
	})
}

// recalledSince reports whether a recall of an extent began after the heap's RecallSeq
// was mark.
func recalledSince(h *fsmpb.Heap, extent uint32, mark uint64) bool {
	i, ok := markAt(h, extent)
	return ok && h.RecallMarks[i].Seq > mark
}

// extentBounds are the units of an extent that lie in the heap.
func extentBounds(h *fsmpb.Heap, extent uint32) (from, to uint64) {
	from = max(uint64(extent)*extentUnits, h.Start)
	return from, max(from, min(uint64(extent+1)*extentUnits, h.End))
}

// beginRecall takes an extent out of use: nothing of it is granted until
// finishRecall.
func (s *State) beginRecall(pg, extent uint32) {
	p := s.editPG(pg)
	p.Recalled = append(p.Recalled, extent)
	slices.Sort(p.Recalled)
	h := s.editHeap(pg)
	r := &fsmpb.Recall{Extent: extent}
	i, _ := slices.BinarySearchFunc(h.Recalls, r, func(a, b *fsmpb.Recall) int {
		return cmp.Compare(a.Extent, b.Extent)
	})
	h.Recalls = slices.Insert(slices.Clone(h.Recalls), i, r)
	h.Free = slices.DeleteFunc(slices.Clone(h.Free), func(r *fsmpb.Run) bool { return r.Unit/extentUnits == extent })
	_, to := extentBounds(h, extent)
	h.Watermark = max(h.Watermark, to)
	h.RecallSeq++
	mark := &fsmpb.RecallMark{Extent: extent, Seq: h.RecallSeq}
	h.RecallMarks = slices.Clone(h.RecallMarks)
	if i, ok := markAt(h, extent); ok {
		h.RecallMarks[i] = mark
	} else {
		h.RecallMarks = slices.Insert(h.RecallMarks, i, mark)
	}
}

// CanRecall reports whether what an extent holds, by the last scrub, fits into memory that may be granted
// elsewhere in the placement group. It is true before the first scrub. Without room a recall that moves
// records would take memory away and never end.
func (s *State) CanRecall(pg, extent uint32) bool {
	h := s.heaps[pg]
	if h == nil || h.LastScrub == nil {
		return h != nil
	}
	from, to := extentBounds(h, extent)
	need := uint64(0)
	if l := h.LastScrub.LinkedUnits; int(extent) < len(l) {
		need = uint64(l[extent])
	}
	room := h.End - max(h.Watermark, to)
	if h.Watermark < from {
		room = h.End - h.Watermark - (to - from)
	}
	for _, r := range h.Free {
		if r.Returned == 0 && r.Unit/extentUnits != extent {
			room += uint64(r.Units)
		}
	}
	return room >= need
}

// endScan notes that no slot names the extents any more, or, of a recall in place, what
// in them is named.
func (s *State) endScan(j *dirpb.Job, c *fsmpb.EndJob) {
	h := s.editHeap(j.PgId)
	h.Recalls = slices.Clone(h.Recalls)
	for i, r := range h.Recalls {
		if !slices.Contains(j.Extents, r.Extent) {
			continue
		}
		r = &fsmpb.Recall{Extent: r.Extent, Scanned: true, Epoch: c.Epoch}
		for _, k := range c.Report.GetKept() {
			if j.InPlace && k.Extent == r.Extent {
				r.Kept = k
			}
		}
		h.Recalls[i] = r
	}
}

// checkKept checks what a scan in place reports: for each extent, runs that ascend inside
// it, none of them empty, which bounds how many there are.
func checkKept(j *dirpb.Job, report *dirpb.JobReport) error {
	if report == nil {
		return fmt.Errorf("%w: recall %d in place without a report", ErrInvalid, j.Id)
	}
	for _, x := range j.Extents {
		n := 0
		for _, k := range report.Kept {
			if k.Extent != x {
				continue
			}
			n++
			if sum := total(k.SkipTake); len(k.SkipTake)%2 != 0 || sum > extentUnits {
				return fmt.Errorf("%w: recall %d in place reports %d numbers and %d units of extent %d, want pairs "+
					"and at most %d",
					ErrInvalid, j.Id, len(k.SkipTake), sum, x, extentUnits)
			}
			for i := 1; i < len(k.SkipTake); i += 2 {
				if k.SkipTake[i] == 0 {
					return fmt.Errorf("%w: recall %d in place reports an empty run of extent %d", ErrInvalid, j.Id, x)
				}
			}
		}
		if n != 1 {
			return fmt.Errorf("%w: recall %d in place reports extent %d %d times, want once", ErrInvalid, j.Id, x, n)
		}
	}
	return nil
}

func total(list []uint32) (n uint64) {
	for _, x := range list {
		n += uint64(x)
	}
	return n
}

// between are the runs of an extent that lie between those kept.
func between(h *fsmpb.Heap, extent uint32, kept *dirpb.UnitRuns, returned uint64) (runs []*fsmpb.Run) {
	from, to := extentBounds(h, extent)
	add := func(lo, hi uint64) {
		if lo, hi = max(lo, from), min(hi, to); lo < hi {
			runs = append(runs, &fsmpb.Run{Unit: uint32(lo), Units: uint32(hi - lo), Returned: returned})
		}
	}
	at := uint64(extent) * extentUnits
	for i := 0; i+1 < len(kept.GetSkipTake()); i += 2 {
		skip, take := uint64(kept.SkipTake[i]), uint64(kept.SkipTake[i+1])
		add(at, at+skip)
		at += skip + take
	}
	add(at, to)
	return runs
}

// finishRecall frees an extent, once no operation is left that began before its scan was
// done: as a whole, or what lies between the records that stay in it. Those have no home
// from now on.
func (s *State) finishRecall(c *fsmpb.FinishRecall) error {
	h := s.heaps[c.GetPgId()]
	if h == nil {
		return fmt.Errorf("placement group %d: %w", c.GetPgId(), ErrNotFound)
	}
	r := recallOf(h, c.Extent)
	switch {
	case r == nil:
		return fmt.Errorf("recall of extent %d of placement group %d: %w", c.Extent, c.PgId, ErrNotFound)
	case !r.Scanned:
		return fmt.Errorf("%w: extent %d of placement group %d is not scanned", ErrRefused, c.Extent, c.PgId)
	case c.MinEpoch <= r.Epoch:
		return fmt.Errorf("%w: extent %d of placement group %d was scanned in reclaim epoch %d, the least in use is %d",
			ErrRefused, c.Extent, c.PgId, r.Epoch, c.MinEpoch)
	}
	pg := s.editPG(c.PgId)
	pg.Recalled = slices.DeleteFunc(pg.Recalled, func(x uint32) bool { return x == c.Extent })
	free := slices.Concat(h.Free, between(h, c.Extent, r.Kept, c.Epoch+1))
	slices.SortFunc(free, func(a, b *fsmpb.Run) int { return cmp.Compare(a.Unit, b.Unit) })
	h = withFree(h, free)
	h.Recalls = slices.DeleteFunc(slices.Clone(h.Recalls), func(r *fsmpb.Recall) bool { return r.Extent == c.Extent })
	h.Homes = slices.DeleteFunc(slices.Clone(h.Homes), func(x *fsmpb.Home) bool {
		return x.Unit/extentUnits == c.Extent
	})
	h.IndexFree = matured(h.IndexFree, c.MinEpoch)
	s.putHeap(h)
	return nil
}

// Extent is what the directory knows of one extent of a heap, in units.
type Extent struct {
	Number  uint32
	Units   uint64 // in the heap
	Granted uint64 // ever, and not handed back
	Linked  uint64 // by the last scrub
	// Homes is how much of it each session was granted that lives or is being fenced.
	Homes    map[uint32]uint64
	Recalled bool
}

// Extents describes a placement group's extents, without those that were never granted in any part.
func (s *State) Extents(pg uint32) []Extent {
	h := s.heaps[pg]
	if h == nil {
		return nil
	}
	first := uint32(h.Start / extentUnits)
	var out []Extent
	for x := first; uint64(x)*extentUnits < h.Watermark; x++ {
		from, to := extentBounds(h, x)
		e := Extent{Number: x, Units: to - from, Granted: max(from, min(to, h.Watermark)) - from,
			Recalled: recallOf(h, x) != nil}
		if l := h.LastScrub.GetLinkedUnits(); int(x) < len(l) {
			e.Linked = uint64(l[x])
		}
		out = append(out, e)
	}
	for _, r := range h.Free {
		e := &out[r.Unit/extentUnits-first]
		e.Granted -= min(e.Granted, uint64(r.Units))
	}
	for _, x := range h.Homes {
		e := &out[x.Unit/extentUnits-first]
		if e.Homes == nil {
			e.Homes = make(map[uint32]uint64)
		}
		e.Homes[x.SessionId] += uint64(x.Units)
	}
	return out
}

// Leaks are the extents of a placement group, ascending, that hold leaked memory by its last scrub, and how
// many units of it. Leaked memory is granted, not linked, and without a home. Memory linked since that scrub
// by sessions that have ended counts as leaked.
func (s *State) Leaks(pg uint32) (units uint64, extents []uint32) {
	if s.heaps[pg].GetLastScrub() == nil {
		return 0, nil
	}
	for _, e := range s.Extents(pg) {
		if n := e.Leaked(); n > 0 {
			units += n
			extents = append(extents, e.Number)
		}
	}
	return units, extents
}

// Leaked is how much of the extent is granted, not linked, and without a home; 0 while
// it is being recalled.
func (e *Extent) Leaked() uint64 {
	n := e.Granted
	for _, held := range e.Homes {
		n -= min(n, held)
	}
	if e.Recalled || n == 0 {
		return 0
	}
	// Linked places may lie where there are homes.
	return n - min(n, e.Linked)
}
