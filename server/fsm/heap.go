package fsm

import (
	"cmp"
	"fmt"
	"math"
	"slices"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
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
		FirstSession: h.FirstSession, FrozenVersion: h.FrozenVersion, IndexNext: h.IndexNext, IndexFree: h.IndexFree,
		Holders: h.Holders, Recalls: h.Recalls, Dirty: h.Dirty,
		LastScrub: h.LastScrub, LastScrubUnixMillis: h.LastScrubUnixMillis,
	}
}

// takeBack adds the runs that session x hands back to the free runs of their
// placement groups, all or none. What lies in an extent that is being recalled, or
// in a placement group that is gone, is nobody's concern any more.
func (s *State) takeBack(x *fsmpb.Session, runs []*dirpb.ReturnedRun, epoch uint64) error {
	if len(runs) > MaxRuns {
		return fmt.Errorf("%w: %d returned runs, want at most %d", ErrInvalid, len(runs), MaxRuns)
	}
	byPG := make(map[uint32][]*fsmpb.Run)
	for _, r := range runs {
		h := s.heaps[r.PgId]
		if h == nil && r.PgId != 0 && r.PgId <= s.meta.PgId {
			continue // removed
		}
		if h == nil || s.pgs[r.PgId].NamespaceId != x.NamespaceId {
			return fmt.Errorf("returned run: placement group %d of the session's namespace: %w", r.PgId, ErrNotFound)
		}
		if x.Id < h.FirstSession {
			continue // perhaps of regions that are gone
		}
		from, to := uint64(r.Unit), uint64(r.Unit)+uint64(r.Units)
		if r.Units == 0 || from < h.Start || to > h.Watermark || to > extentEnd(from) {
			return fmt.Errorf("%w: returned run %d+%d of placement group %d, want a run of granted units inside one extent",
				ErrInvalid, r.Unit, r.Units, r.PgId)
		}
		if recallOf(h, uint32(from/extentUnits)) != nil {
			continue
		}
		run := &fsmpb.Run{Unit: r.Unit, Units: r.Units}
		if !r.Fresh {
			run.Returned = epoch + 1
		}
		if r.Foreign {
			run.Until = s.meta.SessionId + 1
		}
		byPG[r.PgId] = append(byPG[r.PgId], run)
	}
	var heaps []*fsmpb.Heap
	for pg, back := range byPG {
		h := s.heaps[pg]
		all := append(slices.Clone(h.Free), back...)
		slices.SortFunc(all, func(a, b *fsmpb.Run) int { return int(int64(a.Unit) - int64(b.Unit)) })
		for i := 1; i < len(all); i++ {
			if runEnd(all[i-1]) > uint64(all[i].Unit) {
				return fmt.Errorf("%w: returned run of placement group %d overlaps free unit %d", ErrInvalid, pg, all[i].Unit)
			}
		}
		heaps = append(heaps, withFree(h, all))
	}
	for _, h := range heaps {
		s.putHeap(h)
	}
	return nil
}

// withFree is h with other free runs: merged where they adjoin inside an extent
// and wait equally long, and without the shortest ones beyond MaxFreeRuns. The
// units of a dropped run count as granted; a recall of their extent finds them.
func withFree(h *fsmpb.Heap, free []*fsmpb.Run) *fsmpb.Heap {
	var merged []*fsmpb.Run
	for _, r := range free {
		if n := len(merged); n > 0 {
			if l := merged[n-1]; runEnd(l) == uint64(r.Unit) && l.Returned == r.Returned && l.Until == r.Until && r.Unit%extentUnits != 0 {
				merged[n-1] = &fsmpb.Run{Unit: l.Unit, Units: l.Units + r.Units, Returned: l.Returned, Until: l.Until}
				continue
			}
		}
		merged = append(merged, r)
	}
	if over := len(merged) - MaxFreeRuns; over > 0 {
		byLen := slices.Clone(merged)
		slices.SortStableFunc(byLen, func(a, b *fsmpb.Run) int { return int(int64(a.Units) - int64(b.Units)) })
		drop := make(map[uint32]bool, over)
		for _, r := range byLen[:over] {
			drop[r.Unit] = true
		}
		merged = slices.DeleteFunc(merged, func(r *fsmpb.Run) bool { return drop[r.Unit] })
	}
	h = copyHeap(h)
	h.Free = merged
	return h
}

// granter works out one grant on a private copy of a heap.
type granter struct {
	h     *fsmpb.Heap
	free  []*fsmpb.Run // of h; matured ones have become fresh
	left  uint64       // units still wanted
	grant []*fsmpb.Run
}

// grantExtent gives a session memory for its own use: one run of at least
// place_units, then more up to want_units. Units never granted go first, then
// returned ones that are fresh or have waited long enough to count as fresh.
func (s *State) grantExtent(c *fsmpb.GrantExtent) (*dirpb.GrantExtentReply, error) {
	x := s.sessions[c.GetSessionId()]
	if x == nil || x.Life != dirpb.SessionLife_SESSION_LIVE {
		return nil, fmt.Errorf("session %d, live: %w", c.GetSessionId(), ErrNotFound)
	}
	if x.ReadOnly {
		return nil, fmt.Errorf("%w: session %d is read-only", ErrRefused, x.Id)
	}
	pg := s.pgs[c.PgId]
	if pg == nil || pg.NamespaceId != x.NamespaceId {
		return nil, fmt.Errorf("placement group %d of the session's namespace: %w", c.PgId, ErrNotFound)
	}
	if pg.State != dirpb.PGState_PG_ACTIVE && pg.State != dirpb.PGState_PG_FROZEN {
		return nil, fmt.Errorf("%w: placement group %d is %s", ErrUnavailable, pg.Id, pg.State)
	}
	if c.WantUnits == 0 && c.PlaceUnits == 0 {
		return nil, fmt.Errorf("%w: no units wanted", ErrInvalid)
	}

	h := s.heaps[pg.Id]
	reply := &dirpb.GrantExtentReply{}
	oldest := uint32(math.MaxUint32) // session not yet fenced
	for id := range s.sessions {
		oldest = min(oldest, id)
	}
	free := make([]*fsmpb.Run, 0, len(h.Free))
	for _, r := range h.Free {
		switch {
		case r.Returned == 0:
		case c.MinEpoch > r.Returned-1+ReuseEpochs && oldest >= r.Until:
			r = &fsmpb.Run{Unit: r.Unit, Units: r.Units}
		default:
			reply.WaitingUnits += uint64(r.Units)
		}
		free = append(free, r)
	}
	if c.PlaceUnits > extentUnits {
		return reply, nil // no run can hold it
	}
	g := granter{h: withFree(h, free), left: min(uint64(max(c.WantUnits, c.PlaceUnits)), extentUnits)}
	g.free = g.h.Free
	if limit := s.namespaces[x.NamespaceId].LimitBytes / layout.UnitSize; limit != 0 {
		g.left = min(g.left, limit-min(limit, s.grantedUnits(x.NamespaceId)))
	}
	if n := uint64(max(c.PlaceUnits, 1)); g.left < n || !g.place(n) {
		return reply, nil
	}
	for g.left > 0 && len(g.grant) < MaxGrantRuns && (g.bump(1) || g.reuse(1)) {
	}
	h = withFree(g.h, g.free)
	h.IndexFree = matured(h.IndexFree, c.MinEpoch)
	for _, r := range g.grant {
		h.Holders = withHolder(h.Holders, r.Unit/extentUnits, x.Id)
	}
	s.putHeap(h)
	for _, r := range g.grant {
		reply.Runs = append(reply.Runs, &dirpb.ReturnedRun{PgId: pg.Id, Unit: r.Unit, Units: r.Units, Fresh: true})
	}
	return reply, nil
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
	return g.reuse(n)
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

// reuse grants from the first fresh free run of at least n units.
func (g *granter) reuse(n uint64) bool {
	for i, r := range g.free {
		if r.Returned != 0 || uint64(r.Units) < n {
			continue
		}
		take := min(uint64(r.Units), g.left)
		g.add(uint64(r.Unit), take)
		g.free = slices.Clone(g.free)
		if take == uint64(r.Units) {
			g.free = slices.Delete(g.free, i, i+1)
		} else {
			g.free[i] = &fsmpb.Run{Unit: r.Unit + uint32(take), Units: r.Units - uint32(take)}
		}
		return true
	}
	return false
}

func (g *granter) add(unit, n uint64) {
	g.left -= n
	g.grant = append(g.grant, &fsmpb.Run{Unit: uint32(unit), Units: uint32(n)})
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

// withHolder is holders, ascending by extent and session, with one more.
func withHolder(holders []*fsmpb.Holder, extent, session uint32) []*fsmpb.Holder {
	x := &fsmpb.Holder{Extent: extent, SessionId: session}
	i, ok := slices.BinarySearchFunc(holders, x, func(a, b *fsmpb.Holder) int {
		return cmp.Or(cmp.Compare(a.Extent, b.Extent), cmp.Compare(a.SessionId, b.SessionId))
	})
	if ok {
		return holders
	}
	return slices.Insert(slices.Clone(holders), i, x)
}

// ---- the index -------------------------------------------------------------

func arrayBytes(clusters uint32) uint64 { return uint64(clusters) * layout.ClusterSize }

// takeArray gives out zeroed clusters of a placement group's index: an array of just as
// many that came back and may be given again, else the next that was never given.
// It returns the array's offset and the heap without it; no heap: there is no room.
func takeArray(pg *dirpb.PlacementGroup, h *fsmpb.Heap, clusters uint32) (uint64, *fsmpb.Heap) {
	i := slices.IndexFunc(h.IndexFree, func(a *fsmpb.Array) bool { return a.Clusters == clusters && a.Returned == 0 })
	at := h.IndexNext
	switch {
	case i >= 0:
		at = h.IndexFree[i].Offset
		h = copyHeap(h)
		h.IndexFree = slices.Delete(slices.Clone(h.IndexFree), i, i+1)
	case at <= pg.IndexBytes && arrayBytes(clusters) <= pg.IndexBytes-at:
		h = copyHeap(h)
		h.IndexNext += arrayBytes(clusters)
	default:
		return 0, nil
	}
	return at, h
}

// freeArray gives zeroed clusters back to a placement group's index; see fsmpb.Array for
// returned.
func (s *State) freeArray(pg uint32, offset uint64, clusters uint32, returned uint64) {
	h := s.editHeap(pg)
	a := &fsmpb.Array{Offset: offset, Clusters: clusters, Returned: returned}
	i, _ := slices.BinarySearchFunc(h.IndexFree, a, func(a, b *fsmpb.Array) int { return cmp.Compare(a.Offset, b.Offset) })
	h.IndexFree = slices.Insert(slices.Clone(h.IndexFree), i, a)
}

// matured is free with those arrays ready that have waited long enough at epoch.
func matured(free []*fsmpb.Array, epoch uint64) []*fsmpb.Array {
	out := slices.Clone(free)
	for i, a := range out {
		if a.Returned != 0 && epoch > a.Returned+ReuseEpochs {
			out[i] = &fsmpb.Array{Offset: a.Offset, Clusters: a.Clusters}
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
}

// CanRecall reports whether what an extent holds, by the last scrub, fits into memory that
// may be granted elsewhere in the placement group; true before the first scrub. Without
// room a recall would take memory away and never end.
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

// endScan notes that no slot names the extent any more.
func (s *State) endScan(pg, extent uint32, epoch uint64) {
	h := s.editHeap(pg)
	h.Recalls = slices.Clone(h.Recalls)
	for i, r := range h.Recalls {
		if r.Extent == extent {
			h.Recalls[i] = &fsmpb.Recall{Extent: extent, Scanned: true, Epoch: epoch}
		}
	}
}

// finishRecall frees an extent as a whole, once no operation is left that began
// before its scan was done.
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
		return fmt.Errorf("%w: extent %d of placement group %d was scanned in epoch %d, the least in use is %d",
			ErrRefused, c.Extent, c.PgId, r.Epoch, c.MinEpoch)
	}
	pg := s.editPG(c.PgId)
	pg.Recalled = slices.DeleteFunc(pg.Recalled, func(x uint32) bool { return x == c.Extent })
	from, to := extentBounds(h, c.Extent)
	run := &fsmpb.Run{Unit: uint32(from), Units: uint32(to - from), Returned: c.Epoch + 1}
	h = withFree(h, insertRun(h.Free, run))
	h.Recalls = slices.DeleteFunc(slices.Clone(h.Recalls), func(r *fsmpb.Recall) bool { return r.Extent == c.Extent })
	h.Holders = slices.DeleteFunc(slices.Clone(h.Holders), func(x *fsmpb.Holder) bool { return x.Extent == c.Extent })
	h.IndexFree = matured(h.IndexFree, c.MinEpoch)
	s.putHeap(h)
	return nil
}

// Leaks are the extents of a placement group, ascending, that hold leaked memory by its
// last scrub, and how many units of it: granted, not linked, and with no session
// left to which anything of the extent was granted. It is an estimate: memory
// linked since that scrub by sessions that have ended counts as leaked, and so does a
// place that another session than its grantee unlinked and holds. Recalling an extent
// that does not leak costs work, no data.
func (s *State) Leaks(pg uint32) (units uint64, extents []uint32) {
	h := s.heaps[pg]
	if h == nil {
		return 0, nil
	}
	linked := h.LastScrub.GetLinkedUnits()
	granted := make([]uint64, len(linked))
	for i := range linked {
		from, to := extentBounds(h, uint32(i))
		granted[i] = max(from, min(to, h.Watermark)) - from
	}
	for _, r := range h.Free {
		if e := r.Unit / extentUnits; int(e) < len(linked) {
			granted[e] -= min(granted[e], uint64(r.Units))
		}
	}
	for _, x := range h.Holders {
		if int(x.Extent) < len(linked) {
			granted[x.Extent] = 0
		}
	}
	for _, r := range h.Recalls {
		if int(r.Extent) < len(linked) {
			granted[r.Extent] = 0
		}
	}
	for i, n := range granted {
		if n > uint64(linked[i]) {
			units += n - uint64(linked[i])
			extents = append(extents, uint32(i))
		}
	}
	return units, extents
}
