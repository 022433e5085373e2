package fsm

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"sort"

	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/ordered"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// A block of status words is a group of a status array, which is a part of a placement group's index that no hash leads
// to:
//
//	free    nobody's; its words keep their sequence numbers
//	held    a session's, until that gives it back, or closes and says that no intent names it: free
//	dead    of a session that was fenced, or closed without saying so: intents in any placement
//	        group of the namespace may name it
//
// A dead block is free as soon as every placement group of the namespace has been gone through by a SETTLE job that
// began after the session's death, has lost every copy since, or is gone. Nobody swings its words before: while an
// intent stands that names one, the word tells whether that is committed.

// Limits on status words.
const (
	MaxStatusBlocks   = 64      // of one session in one placement group
	MaxStatusBack     = 1 << 12 // in one TakeStatus
	maxStatusSegments = 64      // of one array
	statusPart        = 8       // of an index: the part that status arrays take at most, but for the first segment
)

const (
	firstStatusArray = 1 // segments
	statusBlocksOf   = layout.SegmentGroups + 1
	noStatus         = uint64(math.MaxUint64)
)

// statusSegments is how many segments of pg's index are for status words.
func statusSegments(pg *dirpb.PlacementGroup) (n uint64) {
	for _, a := range pg.StatusArrays {
		n += uint64(a.Segments)
	}
	return n
}

// heldStatus lists the blocks that a session has in a placement group, in the order of their grants.
func heldStatus(h *fsmpb.Heap, session uint32) (offsets []uint64) {
	for _, b := range h.StatusHeld {
		if b.SessionId == session {
			offsets = append(offsets, b.Offset)
		}
	}
	return offsets
}

// grantStatus gives a session a block of status words, or tells it of one that it has and does not know of.
func (s *State) grantStatus(c *fsmpb.GrantStatus) (*dirpb.GrantStatusReply, error) {
	g, err := s.planStatus(c)
	if err != nil {
		return nil, err
	}
	if g.array != nil {
		pg := s.editPG(c.PgId)
		pg.StatusArrays = append(pg.StatusArrays, g.array)
	}
	if g.heap != nil {
		s.putHeap(g.heap)
	}
	reply := &dirpb.GrantStatusReply{
		Block:      &dirpb.StatusBlock{PgId: c.PgId, Generation: s.pgs[c.PgId].Generation, Offset: g.block},
		MapVersion: s.meta.MapVersion,
	}
	if s.mapChanged {
		reply.MapVersion = s.nextVersion()
	}
	return reply, nil
}

// CanGrantStatus returns why a block of status words cannot be granted now; nothing changes.
func (s *State) CanGrantStatus(c *fsmpb.GrantStatus) error {
	_, err := s.planStatus(c)
	return err
}

// statusGrant is a block to be granted, and what changes with it.
type statusGrant struct {
	block uint64
	heap  *fsmpb.Heap        // nil: the session has the block
	array *dirpb.StatusArray // nil: the block is of an array that there is
}

func (s *State) planStatus(c *fsmpb.GrantStatus) (g statusGrant, err error) {
	x := s.sessions[c.GetSessionId()]
	if x == nil || x.Life != dirpb.SessionLife_SESSION_LIVE {
		return g, fmt.Errorf("session %d, live: %w", c.GetSessionId(), ErrNotFound)
	}
	if x.ReadOnly {
		return g, fmt.Errorf("%w: session %d is read-only", ErrRefused, x.Id)
	}
	pg := s.pgs[c.PgId]
	switch {
	case pg == nil || pg.NamespaceId != x.NamespaceId:
		return g, fmt.Errorf("placement group %d of the session's namespace: %w", c.PgId, ErrNotFound)
	case pg.State != dirpb.PGState_PG_ACTIVE:
		// Its words are to be read before they are used.
		return g, fmt.Errorf("%w: placement group %d is %s", ErrUnavailable, pg.Id, pg.State)
	}
	h := s.heaps[pg.Id]
	own := heldStatus(h, x.Id)
	switch {
	case uint64(c.Held) < uint64(len(own)):
		return statusGrant{block: own[c.Held]}, nil
	case len(own) >= MaxStatusBlocks:
		return g, fmt.Errorf("%w: session %d has %d blocks of status words in placement group %d, the most there are",
			ErrFull, x.Id, len(own), pg.Id)
	case s.emptied(pg):
		return g, fmt.Errorf("%w: placement group %d has no shard, and its memory nodes drain", ErrRefused, pg.Id)
	}
	g.heap = h
	if g.block = freeStatus(pg, h); g.block == noStatus {
		if g.array, g.heap, err = s.planArray(pg, h); err != nil {
			return statusGrant{}, err
		}
		g.block = g.array.Offset
	}
	g.heap = copyHeap(g.heap)
	g.heap.StatusHeld = append(slices.Clone(h.StatusHeld), &fsmpb.HeldStatus{Offset: g.block, SessionId: x.Id})
	return g, nil
}

// freeStatus is the first free block of a placement group's status arrays, noStatus if there is none.
func freeStatus(pg *dirpb.PlacementGroup, h *fsmpb.Heap) uint64 {
	if statusSegments(pg)*statusBlocksOf == uint64(len(h.StatusHeld)+len(h.StatusDead)) {
		return noStatus
	}
	taken := make(map[uint64]bool, len(h.StatusHeld)+len(h.StatusDead))
	for _, b := range h.StatusHeld {
		taken[b.Offset] = true
	}
	for _, b := range h.StatusDead {
		taken[b.Offset] = true
	}
	for _, a := range pg.StatusArrays {
		for i := range uint64(a.Segments) * statusBlocksOf {
			if at := a.Offset + i*layout.GroupSize; !taken[at] {
				return at
			}
		}
	}
	return noStatus
}

// planArray finds room for one more status array of pg: as many segments as there are for status words already, or
// fewer if that is all the room. The first, of one segment, is no matter of quotas.
func (s *State) planArray(pg *dirpb.PlacementGroup, h *fsmpb.Heap) (*dirpb.StatusArray, *fsmpb.Heap, error) {
	have := statusSegments(pg)
	segments := uint32(min(max(have, firstStatusArray), maxStatusSegments))
	if have > 0 {
		part := (pg.IndexBytes - layout.RegionPageSize) / statusPart / layout.SegmentSize
		if have >= part {
			return nil, nil, fmt.Errorf("%w: status words have %d segments of the index of placement group %d, and "+
				"an eighth of it is the most there are", ErrFull, have, pg.Id)
		}
		segments = uint32(min(uint64(segments), part-have))
	}
	var quota error
	for ; segments > 0; segments /= 2 {
		if have > 0 {
			if quota = s.CheckIndexQuota(pg.NamespaceId, segments); quota != nil {
				continue
			}
		}
		if at, next := takeArray(pg, h, segments); next != nil {
			return &dirpb.StatusArray{Offset: at, Segments: segments}, next, nil
		}
	}
	if quota != nil {
		return nil, nil, quota
	}
	return nil, nil, fmt.Errorf("%w: the index of placement group %d has no room for status words", ErrFull, pg.Id)
}

// TakesFirst reports whether an array of that many segments from pg's index would end the room for the status
// words of its first transaction.
func TakesFirst(pg *dirpb.PlacementGroup, h *fsmpb.Heap, segments uint32) bool {
	if len(pg.StatusArrays) > 0 {
		return false
	}
	if _, before := takeArray(pg, h, firstStatusArray); before == nil {
		return false // it was laid out so
	}
	_, after := takeArray(pg, h, segments)
	if after == nil {
		return false
	}
	_, after = takeArray(pg, after, firstStatusArray)
	return after == nil
}

// withoutStatus is h, or a copy, without blocks that sessions have, and these.
func withoutStatus(h *fsmpb.Heap, gone func(*fsmpb.HeldStatus) bool) (*fsmpb.Heap, []*fsmpb.HeldStatus) {
	var out, left []*fsmpb.HeldStatus
	for _, b := range h.StatusHeld {
		if gone(b) {
			out = append(out, b)
		} else {
			left = append(left, b)
		}
	}
	if len(out) > 0 {
		h = copyHeap(h)
		h.StatusHeld = left
	}
	return h, out
}

// givesStatus are the blocks of c that its session has, by placement group: none of a renewal that was overtaken by one
// that gave blocks back too.
func (s *State) givesStatus(c *fsmpb.TakeStatus) map[uint32]map[uint64]bool {
	x := s.sessions[c.GetSessionId()]
	if x == nil || x.Life != dirpb.SessionLife_SESSION_LIVE || c.Number <= x.StatusNumber {
		return nil
	}
	named := make(map[uint32]map[uint64]bool)
	for _, b := range c.Blocks {
		pg := s.pgs[b.GetPgId()]
		if pg == nil || pg.NamespaceId != x.NamespaceId || pg.Generation != b.Generation {
			continue
		}
		if named[pg.Id] == nil {
			named[pg.Id] = make(map[uint64]bool)
		}
		named[pg.Id][b.Offset] = true
	}
	for pg, offsets := range named {
		own := heldStatus(s.heaps[pg], x.Id)
		if !slices.ContainsFunc(own, func(at uint64) bool { return offsets[at] }) {
			delete(named, pg)
		}
	}
	return named
}

// GivesStatus reports whether a TakeStatus would take anything back, or why it is refused.
func (s *State) GivesStatus(c *fsmpb.TakeStatus) (bool, error) {
	if len(c.GetBlocks()) > MaxStatusBack {
		return false, fmt.Errorf("%w: %d blocks of status words, want at most %d", ErrInvalid, len(c.GetBlocks()),
			MaxStatusBack)
	}
	return len(s.givesStatus(c)) > 0, nil
}

// takeStatus makes blocks free that a session gives back. Those that it does not have (any more) are left out.
func (s *State) takeStatus(c *fsmpb.TakeStatus) error {
	if ok, err := s.GivesStatus(c); !ok {
		return err
	}
	named := s.givesStatus(c)
	x := proto.CloneOf(s.sessions[c.SessionId])
	x.StatusNumber = c.Number
	s.putSession(x)
	freed := ordered.Keys(named)
	for _, pg := range freed {
		h, _ := withoutStatus(s.heaps[pg], func(b *fsmpb.HeldStatus) bool {
			return b.SessionId == x.Id && named[pg][b.Offset]
		})
		s.putHeap(h)
	}
	s.settlePGs(freed...)
	return nil
}

// endStatus takes a session's blocks from it, which has ended: they are free if it said that no intent names them, else
// dead.
func (s *State) endStatus(x *fsmpb.Session, settled bool) {
	died := uint64(0)
	var freed []uint32
	for _, pg := range s.PGs(x.NamespaceId) {
		h, gone := withoutStatus(s.heaps[pg.Id], func(b *fsmpb.HeldStatus) bool { return b.SessionId == x.Id })
		if len(gone) == 0 {
			continue
		}
		s.putHeap(h)
		if settled {
			freed = append(freed, pg.Id)
			continue
		}
		if died == 0 {
			m := s.editMeta()
			m.StatusDeaths++
			died = m.StatusDeaths
		}
		h.StatusDead = slices.Clone(h.StatusDead) // h is a copy
		for _, b := range gone {
			h.StatusDead = append(h.StatusDead, &fsmpb.DeadStatus{Offset: b.Offset, Died: died})
		}
	}
	if len(freed) > 0 {
		s.settlePGs(freed...)
	}
}

// freeDead makes dead blocks free that no intent names any more, and lists the placement groups that had some.
func (s *State) freeDead() (freed []uint32) {
	settled := make(map[uint32]uint64) // by namespace
	for _, pg := range ordered.Values(s.pgs) {
		dead := s.heaps[pg.Id].GetStatusDead()
		if len(dead) == 0 {
			continue
		}
		if _, ok := settled[pg.NamespaceId]; !ok {
			settled[pg.NamespaceId] = s.SettledDeaths(pg.NamespaceId)
		}
		n := sort.Search(len(dead), func(i int) bool { return dead[i].Died > settled[pg.NamespaceId] })
		if n > 0 {
			s.editHeap(pg.Id).StatusDead = slices.Clone(dead[n:])
			freed = append(freed, pg.Id)
		}
	}
	return freed
}

// wordless reports whether nobody has written a word to pg in its generation: it has no intent.
func wordless(pg *dirpb.PlacementGroup) bool {
	return pg.State != dirpb.PGState_PG_ACTIVE && pg.State != dirpb.PGState_PG_FROZEN
}

// opens makes pg, a private copy in place, active for the first time in its generation: no intent is left in it of any
// session that has ended.
func (s *State) opens(pg *dirpb.PlacementGroup) {
	pg.State = dirpb.PGState_PG_ACTIVE
	if s.heaps[pg.Id].Settled != s.meta.StatusDeaths {
		s.editHeap(pg.Id).Settled = s.meta.StatusDeaths
	}
}

// Unsettled reports whether intents may be left in pg of the first (deaths) sessions that ever ended with status words.
func (s *State) Unsettled(pg *dirpb.PlacementGroup, deaths uint64) bool {
	return !wordless(pg) && s.heaps[pg.Id].GetSettled() < deaths
}

// SettledDeaths is how many sessions, the first that ever ended with status words, have no intent left in any
// placement group of a namespace.
func (s *State) SettledDeaths(namespace uint32) uint64 {
	least := s.meta.StatusDeaths
	for _, pg := range s.pgs {
		if pg.NamespaceId == namespace && !wordless(pg) {
			least = min(least, s.heaps[pg.Id].GetSettled())
		}
	}
	return least
}

// startSettle begins to go through a placement group. The barrier is the present map, which shows the janitor every
// status array; what dead sessions posted needs none, since it has landed or never will.
func (s *State) startSettle(c *fsmpb.StartJob, pg *dirpb.PlacementGroup) (*dirpb.Job, error) {
	if err := s.checkWhole(pg); err != nil {
		return nil, err
	}
	for _, j := range s.JobsOf(pg.Id) {
		if j.Kind == dirpb.JobKind_JOB_SETTLE {
			return nil, fmt.Errorf("%w: placement group %d has job %d, %s", ErrRefused, pg.Id, j.Id, j.Kind)
		}
	}
	j := &dirpb.Job{Kind: c.Kind, NamespaceId: pg.NamespaceId, PgId: pg.Id, Barrier: s.meta.MapVersion,
		Reason: c.Reason}
	s.addJob(j)
	s.putJob(&fsmpb.Job{Job: j, Deaths: s.meta.StatusDeaths})
	return j, nil
}

// endSettle notes that a placement group has been gone through.
func (s *State) endSettle(row *fsmpb.Job) {
	h := s.editHeap(row.Job.PgId)
	h.Settled = max(h.Settled, row.Deaths)
}

// checkStatus checks a placement group's status arrays, and the blocks of which they are made.
func (s *State) checkStatus(pg *dirpb.PlacementGroup, h *fsmpb.Heap) error {
	if h.Settled > s.meta.StatusDeaths {
		return fmt.Errorf("%d: settled are %d sessions, and %d have ended", pg.Id, h.Settled, s.meta.StatusDeaths)
	}
	blocks := make(map[uint64]bool)
	for _, a := range pg.StatusArrays {
		if a.Offset < layout.RegionPageSize || a.Offset > h.IndexNext ||
			arrayBytes(a.Segments) > h.IndexNext-a.Offset || a.Segments == 0 ||
			(a.Offset-layout.RegionPageSize)%layout.GroupSize != 0 {
			return fmt.Errorf("%d: status array of %d segments at %d", pg.Id, a.Segments, a.Offset)
		}
	}
	if err := s.checkApart(pg, h); err != nil {
		return err
	}
	is := func(at uint64) bool {
		if blocks[at] {
			return false
		}
		blocks[at] = true
		return slices.ContainsFunc(pg.StatusArrays, func(a *dirpb.StatusArray) bool {
			return at >= a.Offset && at-a.Offset < arrayBytes(a.Segments) && (at-a.Offset)%layout.GroupSize == 0
		})
	}
	for _, b := range h.StatusHeld {
		if x := s.sessions[b.SessionId]; !is(b.Offset) || x == nil || x.NamespaceId != pg.NamespaceId {
			return fmt.Errorf("%d: block of status words at %d, of session %d", pg.Id, b.Offset, b.SessionId)
		}
	}
	last := uint64(1)
	for _, b := range h.StatusDead {
		if !is(b.Offset) || b.Died < last || b.Died > s.meta.StatusDeaths {
			return fmt.Errorf("%d: block of status words at %d, of the session that ended as number %d of %d", pg.Id,
				b.Offset, b.Died, s.meta.StatusDeaths)
		}
		last = b.Died
	}
	return nil
}

// checkApart checks that a placement group's status arrays lie apart from each other, from shards' arrays and from free
// ones.
func (s *State) checkApart(pg *dirpb.PlacementGroup, h *fsmpb.Heap) error {
	if len(pg.StatusArrays) == 0 {
		return nil
	}
	type array struct {
		from, to uint64
		status   bool
	}
	var all []array
	add := func(at uint64, segments uint32, status bool) {
		all = append(all, array{at, at + arrayBytes(segments), status})
	}
	for _, a := range pg.StatusArrays {
		add(a.Offset, a.Segments, true)
	}
	for _, a := range h.IndexFree {
		add(a.Offset, a.Segments, false)
	}
	for _, sh := range s.shards {
		if sh.PgId == pg.Id {
			add(sh.Offset, sh.Segments, false)
		}
		if m := sh.Move; m != nil && m.PgId == pg.Id && !m.Abandoned {
			add(m.Offset, sh.ChildSegments(), false)
		}
	}
	ordered.Sort(all, func(a, b array) int { return cmp.Compare(a.from, b.from) })
	end, status := uint64(0), false // of those so far, the one that ends last
	for _, a := range all {
		if a.from < end && (a.status || status) {
			return fmt.Errorf("%d: a status array and another array meet at %d", pg.Id, a.from)
		}
		if a.to > end {
			end, status = a.to, a.status
		}
	}
	return nil
}

// checkSettle checks how many sessions had ended when a SETTLE job began.
func (s *State) checkSettle(row *fsmpb.Job) error {
	j := row.GetJob()
	if j.GetKind() != dirpb.JobKind_JOB_SETTLE {
		return nil
	}
	if row.Deaths > s.meta.StatusDeaths {
		return fmt.Errorf("%d: it began when %d sessions had ended, of %d", j.Id, row.Deaths, s.meta.StatusDeaths)
	}
	return nil
}
