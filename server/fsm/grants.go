package fsm

import (
	"fmt"
	"slices"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/units"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// granter works out one grant on a private copy of a heap.
type granter struct {
	h *fsmpb.Heap
	// of h, in a list of its own; matured ones have become fresh, and nil are those that were granted
	free  []*fsmpb.Run
	least uint32 // the shortest of free that is granted
	left  uint64 // units still wanted
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
		reply.Runs = append(reply.Runs, &dirpb.ReturnedRun{PgId: g.h.PgId, Unit: r.Unit, Units: r.Units, Fresh: true,
			Generation: s.pgs[g.h.PgId].Generation})
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
			reply.Quota = fmt.Sprintf("quota bytes: namespace %q has %s, of %s", w.Name,
				units.Bytes(granted*layout.UnitSize), units.Bytes(w.LimitBytes))
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

// MoveReserve is how many of a heap's units are granted to those alone who move records
// out of an extent.
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

// fit raises least as FitGrant says, and reports whether it did. Units that were never granted go first, whatever least
// is.
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
