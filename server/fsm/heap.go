package fsm

import (
	"cmp"
	"fmt"
	"slices"
	"sort"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/ordered"
	"github.com/kvd-project/kvd/internal/units"
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
		StatusHeld: h.StatusHeld, StatusDead: h.StatusDead, Settled: h.Settled, Departed: h.Departed, Recovered: h.Recovered,
	}
}

// ---- memory that comes back --------------------------------------------------

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
			return nil, fmt.Errorf("returned run: placement group %d of the session's namespace: %w", r.PgId, ErrNotFound)
		}
		if r.Generation != s.pgs[r.PgId].Generation {
			continue // of regions that are gone
		}
		if !granted(h, r.Unit, r.Units) {
			return nil, fmt.Errorf("%w: returned run %d+%d of placement group %d, want a run of granted units inside one extent",
				ErrInvalid, r.Unit, r.Units, r.PgId)
		}
		out = append(out, back{pg: r.PgId, generation: r.Generation, unit: r.Unit, units: r.Units, home: x.Id, fresh: r.Fresh, mark: h.RecallSeq})
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
			if !s.qualifies(h, r) || end > uint64(r.unit) || at < len(h.Free) && uint64(h.Free[at].Unit) < uint64(r.unit)+uint64(r.units) {
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

// ---- homes -------------------------------------------------------------------

// homeAt is the position of the home that holds unit, or of the next one, and whether
// it holds it.
func homeAt(h *fsmpb.Heap, unit uint32) (int, bool) {
	i := sort.Search(len(h.Homes), func(i int) bool { return uint64(h.Homes[i].Unit)+uint64(h.Homes[i].Units) > uint64(unit) })
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

// ---- grants ------------------------------------------------------------------

// granter works out one grant on a private copy of a heap.
type granter struct {
	h     *fsmpb.Heap
	free  []*fsmpb.Run // of h, in a list of its own; matured ones have become fresh, and nil are those that were granted
	least uint32       // the shortest of free that is granted
	left  uint64       // units still wanted
	grant []*fsmpb.Run
	// fresh are the runs of free that may be granted and are not yet, the shortest first: length<<32 + index in free.
	// It is worked out by order, once nothing is put into free any more.
	fresh   []uint64
	ordered bool
}

// grantExtent gives a session memory for its own use: one run of at least
// place_units, then more up to want_units. Units never granted go first, then
// returned ones that are fresh or have waited long enough to count as fresh.
func (s *State) grantExtent(c *fsmpb.GrantExtent) (*dirpb.GrantExtentReply, error) {
	g, reply, err := s.beginGrant(c)
	if err != nil || g == nil || !g.fill() {
		return reply, err
	}
	h := withFree(g.h, slices.DeleteFunc(g.free, func(r *fsmpb.Run) bool { return r == nil }))
	h.IndexFree = matured(h.IndexFree, c.MinEpoch)
	h.Homes = withHomes(h.Homes, g.grant, c.SessionId)
	s.putHeap(h)
	s.tellGrant(g, reply)
	return reply, nil
}

// FitGrant is what a grant would give now; the state does not change. A grant takes the shortest runs first,
// and no more than MaxGrantRuns. FitGrant therefore raises the command's PlaceUnits before. It raises it to
// the least length for which the runs are enough for what is wanted, or the most that can be.
func (s *State) FitGrant(c *fsmpb.GrantExtent) (*dirpb.GrantExtentReply, error) {
	g, reply, err := s.beginGrant(c)
	if err != nil || g == nil {
		return reply, err
	}
	if g.fit() {
		c.PlaceUnits = g.least
	}
	if g.fill() {
		s.tellGrant(g, reply)
	}
	return reply, nil
}

func (s *State) tellGrant(g *granter, reply *dirpb.GrantExtentReply) {
	for _, r := range g.grant {
		reply.Runs = append(reply.Runs, &dirpb.ReturnedRun{PgId: g.h.PgId, Unit: r.Unit, Units: r.Units, Fresh: true, Generation: s.pgs[g.h.PgId].Generation})
	}
}

// beginGrant works out how much is granted, if there are such runs; no granter: nothing is.
func (s *State) beginGrant(c *fsmpb.GrantExtent) (*granter, *dirpb.GrantExtentReply, error) {
	x := s.sessions[c.GetSessionId()]
	if x == nil || x.Life != dirpb.SessionLife_SESSION_LIVE {
		return nil, nil, fmt.Errorf("session %d, live: %w", c.GetSessionId(), ErrNotFound)
	}
	if x.ReadOnly {
		return nil, nil, fmt.Errorf("%w: session %d is read-only", ErrRefused, x.Id)
	}
	pg := s.pgs[c.PgId]
	if pg == nil || pg.NamespaceId != x.NamespaceId {
		return nil, nil, fmt.Errorf("placement group %d of the session's namespace: %w", c.PgId, ErrNotFound)
	}
	if pg.State != dirpb.PGState_PG_ACTIVE && pg.State != dirpb.PGState_PG_FROZEN {
		return nil, nil, fmt.Errorf("%w: placement group %d is %s", ErrUnavailable, pg.Id, pg.State)
	}
	if c.WantUnits == 0 && c.PlaceUnits == 0 {
		return nil, nil, fmt.Errorf("%w: no units wanted", ErrInvalid)
	}

	h := s.heaps[pg.Id]
	reply := &dirpb.GrantExtentReply{MapVersion: s.meta.MapVersion}
	free := make([]*fsmpb.Run, 0, len(h.Free))
	room := h.End - h.Watermark
	merges := false // there are runs in free that may adjoin and be alike
	for _, r := range h.Free {
		if r.Returned != 0 && c.MinEpoch > r.Returned-1+ReuseEpochs {
			r, merges = &fsmpb.Run{Unit: r.Unit, Units: r.Units}, true
		}
		if r.Returned != 0 {
			reply.WaitingUnits += uint64(r.Units)
		} else {
			room += uint64(r.Units)
		}
		free = append(free, r)
	}
	if c.PlaceUnits > extentUnits || len(h.Homes) >= MaxHomes {
		return nil, reply, nil // no run can hold it; or too many pieces, until some extents are recalled
	}
	reserve := uint64(0)
	moves := s.recalls(x.Id, pg.Id)
	if !moves {
		reserve = MoveReserve(h.End - h.Start)
	}
	room -= min(room, reserve)
	want := uint64(max(c.WantUnits, c.PlaceUnits))
	// The rest has to go round: no session takes more than a part of it at a time.
	if want = max(min(want, room/grantShare), uint64(c.PlaceUnits), 1); moves {
		want = max(uint64(c.PlaceUnits), min(want, moveGrant)) // it clears room, and takes no more than it needs
	}
	g := &granter{h: copyHeap(h), free: free, least: max(c.PlaceUnits, 1), left: min(want, extentUnits, room)}
	if merges {
		g.free = withFree(h, free).Free
	}
	// A session that moves records gives back as much, but only later.
	n := uint64(g.least)
	if w := s.namespaces[x.NamespaceId]; w.LimitBytes/layout.UnitSize != 0 && !moves && g.left >= n {
		limit, granted := w.LimitBytes/layout.UnitSize, s.grantedUnits(w.Id)
		if g.left = min(g.left, limit-min(limit, granted)); g.left < n {
			reply.Quota = fmt.Sprintf("quota bytes: namespace %q has %s, of %s", w.Name, units.Bytes(granted*layout.UnitSize), units.Bytes(w.LimitBytes))
		}
	}
	if g.left < n {
		return nil, reply, nil
	}
	return g, reply, nil
}

// fill grants runs, and reports whether there are any.
func (g *granter) fill() bool {
	if !g.place(uint64(g.least)) {
		return false
	}
	// More, but nothing shorter than was asked for, which would be of no use.
	for g.left > 0 && len(g.grant) < MaxGrantRuns && (g.bump(1) || g.reuse()) {
	}
	return true
}

// grantShare is the part of what may be granted that one grant takes at most.
const grantShare = 4

// moveGrant is how many units one who moves records is granted at a time, or one place.
const moveGrant = 1 << 10

// MoveReserve is how much of a heap of so many units is granted to those alone who move
// records out of an extent.
func MoveReserve(units uint64) uint64 { return min(units/64, extentUnits) }

// recalls reports whether a session works on a recall, or another job, of a placement group.
func (s *State) recalls(session, pg uint32) bool {
	for _, j := range s.jobs {
		if j.Job.Owner == session && (j.Job.PgId == pg || j.Job.TargetPgId == pg) {
			return true
		}
	}
	return false
}

// place grants a first run of at least n units.
func (g *granter) place(n uint64) bool {
	if g.bump(n) {
		return true
	}
	// The rest of the extent at the watermark is too short; a whole one after it
	// may do.
	next := extentEnd(g.h.Watermark)
	if g.h.Watermark < g.h.End && next+n <= g.h.End {
		g.free = insertRun(g.free, &fsmpb.Run{Unit: uint32(g.h.Watermark), Units: uint32(next - g.h.Watermark)})
		g.h.Watermark = next
		return g.bump(n)
	}
	return g.reuse()
}

// bump grants from the watermark a run of at least n units and at most what is
// wanted.
func (g *granter) bump(n uint64) bool {
	room := min(extentEnd(g.h.Watermark), g.h.End) - g.h.Watermark
	take := min(room, g.left)
	if take < n {
		return false
	}
	g.add(g.h.Watermark, take)
	g.h.Watermark += take
	return true
}

// reuse grants from the shortest fresh free run of at least the least length: long ones are for
// places that need them.
func (g *granter) reuse() bool {
	g.order()
	if len(g.fresh) == 0 {
		return false
	}
	i := uint32(g.fresh[0])
	g.fresh = g.fresh[1:]
	r := g.free[i]
	take := min(uint64(r.Units), g.left)
	g.add(uint64(r.Unit), take)
	if g.free[i] = nil; take < uint64(r.Units) { // and nothing is wanted any more
		g.free[i] = &fsmpb.Run{Unit: r.Unit + uint32(take), Units: r.Units - uint32(take)}
	}
	return true
}

// order works out fresh, once.
func (g *granter) order() {
	if g.ordered {
		return
	}
	g.ordered = true
	for i, r := range g.free {
		if r.Returned == 0 && r.Units >= g.least {
			g.fresh = append(g.fresh, uint64(r.Units)<<32|uint64(i))
		}
	}
	slices.Sort(g.fresh)
}

// fit raises least as FitGrant says, and reports whether it did. Units that were never granted go first, whatever least is.
func (g *granter) fit() bool {
	if g.h.Watermark < g.h.End {
		return false
	}
	g.order()
	sum, best, to := uint64(0), uint64(0), 0
	least := uint64(g.least)
	for from, x := range g.fresh { // as many runs from this one on as a grant may have, which end before to
		for ; to < len(g.fresh) && to-from < MaxGrantRuns; to++ {
			sum += g.fresh[to] >> 32
		}
		// A run that is as long as the one before is not granted without it.
		if sum > best && (from == 0 || x>>32 > g.fresh[from-1]>>32) {
			if best = sum; from > 0 {
				least = min(x>>32, g.left)
			}
			if best >= g.left {
				break
			}
		}
		sum -= x >> 32
	}
	raised := least > uint64(g.least)
	g.least, g.ordered, g.fresh = uint32(least), false, nil
	return raised
}

func (g *granter) add(unit, n uint64) {
	g.left -= n
	g.grant = append(g.grant, &fsmpb.Run{Unit: uint32(unit), Units: uint32(n)})
}

// GrantedBytes is what the sessions of a namespace hold or have linked, or lost.
func (s *State) GrantedBytes(namespace uint32) uint64 {
	return s.grantedUnits(namespace) * layout.UnitSize
}

// grantedUnits is what the sessions of a namespace hold or have linked, or lost.
func (s *State) grantedUnits(namespace uint32) (units uint64) {
	for _, pg := range s.PGs(namespace) {
		h := s.heaps[pg.Id]
		if h == nil {
			continue
		}
		units += h.Watermark - h.Start
		for _, r := range h.Free {
			units -= uint64(r.Units)
		}
	}
	return units
}

func insertRun(free []*fsmpb.Run, r *fsmpb.Run) []*fsmpb.Run {
	i, _ := slices.BinarySearchFunc(free, r, func(a, b *fsmpb.Run) int { return int(int64(a.Unit) - int64(b.Unit)) })
	return slices.Insert(slices.Clone(free), i, r)
}

// ---- the index -------------------------------------------------------------

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
	i, _ := slices.BinarySearchFunc(h.IndexFree, a, func(a, b *fsmpb.Array) int { return cmp.Compare(a.Offset, b.Offset) })
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

// ---- recall and leaks ------------------------------------------------------

func recallOf(h *fsmpb.Heap, extent uint32) *fsmpb.Recall {
	for _, r := range h.Recalls {
		if r.Extent == extent {
			return r
		}
	}
	return nil
}

func markAt(h *fsmpb.Heap, extent uint32) (int, bool) {
	return slices.BinarySearchFunc(h.RecallMarks, extent, func(m *fsmpb.RecallMark, x uint32) int { return cmp.Compare(m.Extent, x) })
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
	i, _ := slices.BinarySearchFunc(h.Recalls, r, func(a, b *fsmpb.Recall) int { return cmp.Compare(a.Extent, b.Extent) })
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
				return fmt.Errorf("%w: recall %d in place reports %d numbers and %d units of extent %d, want pairs and at most %d",
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
	h.Homes = slices.DeleteFunc(slices.Clone(h.Homes), func(x *fsmpb.Home) bool { return x.Unit/extentUnits == c.Extent })
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

// Extents describes a placement group's extents of which anything was ever granted.
func (s *State) Extents(pg uint32) []Extent {
	h := s.heaps[pg]
	if h == nil {
		return nil
	}
	first := uint32(h.Start / extentUnits)
	var out []Extent
	for x := first; uint64(x)*extentUnits < h.Watermark; x++ {
		from, to := extentBounds(h, x)
		e := Extent{Number: x, Units: to - from, Granted: max(from, min(to, h.Watermark)) - from, Recalled: recallOf(h, x) != nil}
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
