package fsm

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/ordered"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

const extentUnits = layout.ExtentUnits

// extentEnd is the first unit of the extent after the one that holds unit.
func extentEnd(unit uint64) uint64 { return (unit/extentUnits + 1) * extentUnits }

func runEnd(r *fsmpb.Run) uint64 { return uint64(r.Unit) + uint64(r.Units) }

// copyHeap is h in a message of its own. The lists are shared.
func copyHeap(h *fsmpb.Heap) *fsmpb.Heap {
	return &fsmpb.Heap{
		PgId: h.PgId, Start: h.Start, Watermark: h.Watermark, End: h.End, Free: h.Free,
		FrozenVersion: h.FrozenVersion, IndexNext: h.IndexNext, IndexFree: h.IndexFree,
		Homes: h.Homes, Recalls: h.Recalls, RecallSeq: h.RecallSeq, RecallMarks: h.RecallMarks, Dirty: h.Dirty,
		LastScrub: h.LastScrub, LastScrubUnixMillis: h.LastScrubUnixMillis,
		StatusHeld: h.StatusHeld, StatusDead: h.StatusDead, Settled: h.Settled, Departed: h.Departed,
		Recovered: h.Recovered,
	}
}

// back is a run that comes back: free from now on, for the reclaim epoch of its return.
type back struct {
	pg, generation, unit, units uint32
	home                        uint32 // whose own it must be; 0: nobody's
	fresh                       bool
	mark                        uint64 // Heap.RecallSeq of when it was accepted
}

// closedRuns are the runs that a closing session hands back.
func (s *State) closedRuns(x *fsmpb.Session, runs []*dirpb.ReturnedRun) ([]back, error) {
	if len(runs) > MaxRuns {
		return nil, fmt.Errorf("%w: %d returned runs, want at most %d", ErrInvalid, len(runs), MaxRuns)
	}
	out := make([]back, 0, len(runs))
	for _, r := range runs {
		h := s.heaps[r.PgId]
		if h == nil && r.PgId != 0 && r.PgId <= s.meta.PgId {
			continue // removed
		}
		if h == nil || s.pgs[r.PgId].NamespaceId != x.NamespaceId {
			return nil, fmt.Errorf("returned run: placement group %d of the session's namespace: %w", r.PgId,
				ErrNotFound)
		}
		if r.Generation != s.pgs[r.PgId].Generation {
			continue // of regions that are gone
		}
		if !granted(h, r.Unit, r.Units) {
			return nil, fmt.Errorf("%w: returned run %d+%d of placement group %d, want a run of granted units inside "+
				"one extent",
				ErrInvalid, r.Unit, r.Units, r.PgId)
		}
		out = append(out, back{pg: r.PgId, generation: r.Generation, unit: r.Unit, units: r.Units, home: x.Id,
			fresh: r.Fresh, mark: h.RecallSeq})
	}
	return out, nil
}

// granted reports whether a run lies below the watermark and inside one extent.
func granted(h *fsmpb.Heap, unit, units uint32) bool {
	from, to := uint64(unit), uint64(unit)+uint64(units)
	return units > 0 && from >= h.Start && to <= h.Watermark && to <= extentEnd(from)
}

// takeBack adds runs that come back to the free runs of their placement groups, but for
// those that do not qualify (any more): of memory that is gone or was recalled since
// they were accepted, that have another home than they say, or that are free already.
func (s *State) takeBack(runs []back, epoch uint64) {
	byPG := make(map[uint32][]back)
	for _, r := range runs {
		byPG[r.pg] = append(byPG[r.pg], r)
	}
	for _, pg := range ordered.Keys(byPG) {
		h, list := s.heaps[pg], byPG[pg]
		if h == nil {
			continue
		}
		ordered.Sort(list, func(a, b back) int { return cmp.Compare(a.unit, b.unit) })
		free := make([]*fsmpb.Run, 0, len(h.Free)+len(list))
		var given []*fsmpb.Run // own runs that have no home any more
		at, end := 0, uint64(0)
		for _, r := range list {
			for at < len(h.Free) && h.Free[at].Unit <= r.unit {
				free = append(free, h.Free[at])
				at++
			}
			if n := len(free); n > 0 {
				end = max(end, runEnd(free[n-1]))
			}
			if !s.qualifies(h, r) || end > uint64(r.unit) || at < len(h.Free) &&
				uint64(h.Free[at].Unit) < uint64(r.unit)+uint64(r.units) {
				continue
			}
			run := &fsmpb.Run{Unit: r.unit, Units: r.units}
			if r.home != 0 {
				given = append(given, run)
			}
			if !r.fresh || r.home == 0 {
				run = &fsmpb.Run{Unit: r.unit, Units: r.units, Returned: epoch + 1}
			}
			free = append(free, run)
		}
		free = append(free, h.Free[at:]...)
		h = withFree(h, free)
		h.Homes = withoutHomes(h.Homes, given)
		s.putHeap(h)
	}
}

func (s *State) qualifies(h *fsmpb.Heap, r back) bool {
	if s.pgs[r.pg].GetGeneration() != r.generation || !granted(h, r.unit, r.units) {
		return false
	}
	extent := r.unit / extentUnits
	if recallOf(h, extent) != nil || recalledSince(h, extent, r.mark) {
		return false
	}
	if r.home == 0 {
		return !anyHome(h, r.unit, r.units)
	}
	return homeOf(h, r.unit, r.units) == r.home
}

func (s *State) takeBackRuns(c *fsmpb.TakeBack) error {
	if len(c.GetRuns()) > MaxRuns {
		return fmt.Errorf("%w: %d runs, want at most %d", ErrInvalid, len(c.GetRuns()), MaxRuns)
	}
	runs := make([]back, 0, len(c.GetRuns()))
	for _, r := range c.GetRuns() {
		if r.SessionId != 0 && s.Life(r.SessionId) != dirpb.SessionLife_SESSION_LIVE {
			continue // what it owns is lost with it
		}
		runs = append(runs, back{r.PgId, r.Generation, r.Unit, r.Units, r.SessionId, r.Fresh, r.Mark})
	}
	s.takeBack(runs, c.Epoch)
	return nil
}

// withFree is h with other free runs: merged where they adjoin inside an extent
// and wait equally long, and without the shortest ones beyond MaxFreeRuns. The
// units of a dropped run count as granted; a recall of their extent finds them.
func withFree(h *fsmpb.Heap, free []*fsmpb.Run) *fsmpb.Heap {
	merged := make([]*fsmpb.Run, 0, len(free))
	for _, r := range free {
		if n := len(merged); n > 0 {
			if l := merged[n-1]; runEnd(l) == uint64(r.Unit) && l.Returned == r.Returned && r.Unit%extentUnits != 0 {
				merged[n-1] = &fsmpb.Run{Unit: l.Unit, Units: l.Units + r.Units, Returned: l.Returned}
				continue
			}
		}
		merged = append(merged, r)
	}
	if over := len(merged) - MaxFreeRuns; over > 0 {
		merged = withoutShortest(merged, over)
	}
	h = copyHeap(h)
	h.Free = merged
	return h
}

// withoutShortest is runs without so many of the shortest; of those that are equally long, the first go.
func withoutShortest(runs []*fsmpb.Run, over int) []*fsmpb.Run {
	count := make(map[uint32]int)
	for _, r := range runs {
		count[r.Units]++
	}
	for _, units := range ordered.Keys(count) {
		count[units] = min(count[units], over) // are to go
		over -= count[units]
	}
	return slices.DeleteFunc(runs, func(r *fsmpb.Run) bool {
		count[r.Units]--
		return count[r.Units] >= 0
	})
}
