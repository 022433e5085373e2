package fsm

import (
	"cmp"
	"slices"
	"sort"

	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// homeAt is the position of the home that holds unit, or of the next one, and whether
// it holds it.
func homeAt(h *fsmpb.Heap, unit uint32) (int, bool) {
	i := sort.Search(len(h.Homes), func(i int) bool {
		return uint64(h.Homes[i].Unit)+uint64(h.Homes[i].Units) > uint64(unit)
	})
	return i, i < len(h.Homes) && h.Homes[i].Unit <= unit
}

// homeOf is the session that a whole run is the own memory of, 0 if there is none.
func homeOf(h *fsmpb.Heap, unit, units uint32) uint32 {
	i, ok := homeAt(h, unit)
	if !ok || uint64(h.Homes[i].Unit)+uint64(h.Homes[i].Units) < uint64(unit)+uint64(units) {
		return 0
	}
	return h.Homes[i].SessionId
}

// anyHome reports whether any unit of a run has a home.
func anyHome(h *fsmpb.Heap, unit, units uint32) bool {
	i, ok := homeAt(h, unit)
	return ok || i < len(h.Homes) && uint64(h.Homes[i].Unit) < uint64(unit)+uint64(units)
}

// HomeOf is the session that a whole run of a placement group was granted to, 0 if there is none. The session
// lives, or is being fenced. The result any says whether a unit of the run has one.
func (s *State) HomeOf(pg, unit, units uint32) (session uint32, any bool) {
	h := s.heaps[pg]
	if h == nil {
		return 0, false
	}
	return homeOf(h, unit, units), anyHome(h, unit, units)
}

// Settled reports whether a run may still come back. It is then granted memory of this generation of its
// placement group. Its extent is not being recalled, nor was it since mark.
func (s *State) Settled(pg, generation, unit, units uint32, mark uint64) bool {
	h := s.heaps[pg]
	return h != nil && s.pgs[pg].Generation == generation && granted(h, unit, units) &&
		recallOf(h, unit/extentUnits) == nil && !recalledSince(h, unit/extentUnits, mark)
}

// withHomes adds runs, which nobody has, to a session's own.
func withHomes(homes []*fsmpb.Home, runs []*fsmpb.Run, session uint32) []*fsmpb.Home {
	all := slices.Clone(homes)
	for _, r := range runs {
		all = append(all, &fsmpb.Home{Unit: r.Unit, Units: r.Units, SessionId: session})
	}
	slices.SortFunc(all, func(a, b *fsmpb.Home) int { return cmp.Compare(a.Unit, b.Unit) })
	merged := all[:0]
	for _, x := range all {
		if n := len(merged); n > 0 {
			if l := merged[n-1]; l.Unit+l.Units == x.Unit && l.SessionId == x.SessionId && x.Unit%extentUnits != 0 {
				merged[n-1] = &fsmpb.Home{Unit: l.Unit, Units: l.Units + x.Units, SessionId: l.SessionId}
				continue
			}
		}
		merged = append(merged, x)
	}
	return merged
}

// withoutHomes takes runs, ascending and disjoint, out of the homes that hold them whole.
func withoutHomes(homes []*fsmpb.Home, runs []*fsmpb.Run) []*fsmpb.Home {
	if len(runs) == 0 {
		return homes
	}
	out := make([]*fsmpb.Home, 0, len(homes)+len(runs))
	for _, x := range homes {
		from, to := x.Unit, uint64(x.Unit)+uint64(x.Units)
		for len(runs) > 0 && uint64(runs[0].Unit) < to {
			r := runs[0]
			runs = runs[1:]
			if r.Unit > from {
				out = append(out, &fsmpb.Home{Unit: from, Units: r.Unit - from, SessionId: x.SessionId})
			}
			from = r.Unit + r.Units
		}
		switch {
		case from == x.Unit:
			out = append(out, x)
		case uint64(from) < to:
			out = append(out, &fsmpb.Home{Unit: from, Units: uint32(to - uint64(from)), SessionId: x.SessionId})
		}
	}
	return out
}
