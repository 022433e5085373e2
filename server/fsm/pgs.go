package fsm

import (
	"cmp"
	"fmt"
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/units"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// A placement group's life:
//
//	CREATING  every region published        → ACTIVE
//	ACTIVE    a member is lost or leaves, or one joins that
//	          begins with what it retained  → FROZEN
//	FROZEN    every session has quiesced and the
//	          survivors are in step         → ACTIVE
//	ACTIVE, FROZEN   the last copy is lost  → LOST; CREATING if the node is back
//	LOST      its node's next process       → CREATING
//	CREATING  a member is lost and others are not: it goes on without
//	CREATING, LOST   no member is up, others can be → CREATING
//
// An ACTIVE or FROZEN one may have a joiner: its last member, no copy yet.

// nextVersion is the map version that the command being applied makes, if it
// changes the map.
func (s *State) nextVersion() uint64 { return s.meta.MapVersion + 1 }

// newEpoch moves pg, a private copy, to its next placement group epoch.
func (s *State) newEpoch(pg *dirpb.PlacementGroup) {
	pg.Epoch++
	pg.ChangedVersion = s.nextVersion()
}

// regions are the members, and those that are not yet or no longer members but
// have a region.
func regions(pg *dirpb.PlacementGroup) []*dirpb.Member {
	all := slices.Clone(pg.Members)
	if pg.Planned != nil {
		all = append(all, pg.Planned)
	}
	if pg.Leaving != nil {
		all = append(all, pg.Leaving)
	}
	return all
}

// regionOn returns a memory node's part in pg or nil; there is at most one.
func regionOn(pg *dirpb.PlacementGroup, node uint32) *dirpb.Member {
	for _, m := range regions(pg) {
		if m.NodeId == node {
			return m
		}
	}
	return nil
}

// without is members, in order, but for one memory node.
func without(members []*dirpb.Member, node uint32) []*dirpb.Member {
	return slices.DeleteFunc(slices.Clone(members), func(m *dirpb.Member) bool { return m.NodeId == node })
}

func published(members []*dirpb.Member) bool {
	return !slices.ContainsFunc(members, func(m *dirpb.Member) bool { return len(m.Keys) == 0 })
}

// placeable reports whether a memory node takes new regions.
func placeable(n *dirpb.Node) bool {
	return n != nil && n.State == dirpb.NodeState_NODE_UP && !n.Draining && !n.Leaving && !n.Silent
}

func (s *State) checkPlace(node uint32, bytes uint64) error {
	n := s.nodes[node]
	switch {
	case n == nil:
		return fmt.Errorf("memory node %d: %w", node, ErrNotFound)
	case n.Silent:
		return fmt.Errorf("%w: memory node %q is silent", ErrUnavailable, n.Name)
	case !placeable(n):
		return fmt.Errorf("%w: memory node %q is down or draining", ErrUnavailable, n.Name)
	case n.CapacityBytes-min(n.UsedBytes, n.CapacityBytes) < bytes:
		return fmt.Errorf("%w: memory node %q has no room for a region of %s", ErrFull, n.Name, units.Bytes(bytes))
	}
	return nil
}

func (s *State) checkPGs(n int) error {
	if uint64(s.meta.PgId)+uint64(n) > MaxPGID {
		return fmt.Errorf("%w: %d placement groups were made, those of deleted namespaces included, and there are "+
			"ids for %d", ErrFull, s.meta.PgId, MaxPGID)
	}
	return nil
}

// addPG puts pg, which has members and sizes, into the state.
func (s *State) addPG(pg *dirpb.PlacementGroup, namespace uint32) {
	m := s.editMeta()
	m.PgId++
	pg.Id, pg.NamespaceId = m.PgId, namespace
	pg.State = dirpb.PGState_PG_CREATING
	s.newEpoch(pg)
	pg.Generation = pg.Epoch
	for _, mem := range pg.Members {
		mem.Since = s.nextVersion()
	}
	s.putPG(pg)
	start := (pg.IndexBytes + pg.AccessBytes) / layout.UnitSize
	s.putHeap(&fsmpb.Heap{
		PgId: pg.Id, Start: start, Watermark: start, End: pg.RegionBytes / layout.UnitSize,
		IndexNext: layout.RegionPageSize,
	})
}

// createPG adds an empty placement group, as large as the namespace's first, over
// the named memory nodes.
func (s *State) createPG(c *fsmpb.CreatePG) (*dirpb.PlacementGroup, error) {
	w := s.namespaces[c.GetNamespaceId()]
	if w == nil {
		return nil, fmt.Errorf("namespace %d: %w", c.GetNamespaceId(), ErrNotFound)
	}
	if err := s.checkStays(w.Id); err != nil {
		return nil, err
	}
	if err := s.checkPGs(1); err != nil {
		return nil, err
	}
	if len(c.NodeIds) != int(w.Replicas) {
		return nil, fmt.Errorf("%w: a chain of %d memory nodes, want %d", ErrInvalid, len(c.NodeIds), w.Replicas)
	}
	like := s.PGs(w.Id)[0] // one has the namespace's shards, so it is never empty
	pg := &dirpb.PlacementGroup{RegionBytes: like.RegionBytes, IndexBytes: like.IndexBytes,
		AccessBytes: like.AccessBytes}
	for i, id := range c.NodeIds {
		if err := s.checkPlace(id, pg.RegionBytes); err != nil {
			return nil, err
		}
		if slices.Contains(c.NodeIds[:i], id) {
			return nil, fmt.Errorf("%w: memory node %d is in the chain twice", ErrInvalid, id)
		}
		pg.Members = append(pg.Members, &dirpb.Member{NodeId: id, Incarnation: s.nodes[id].Incarnation})
	}
	s.addPG(pg, w.Id)
	s.refreshUsed()
	return pg, nil
}

// loseMember takes away what one memory node had of a placement group.
//
// Copies that others hold survive: the chain goes on with all survivors in order and is
// frozen until every session has quiesced. The first survivor is never behind a
// later one (I2), so if there are several a RECOVER job brings the others up to it.
// A joiner is no copy and is never promoted; a member that was leaving when the
// freeze began still is one. A placement group that was never active, or of which no copy
// is left, starts over empty. The former goes on without a member that is not back already, as long as there is
// another.
func (s *State) loseMember(id uint32, n *dirpb.Node, next uint64, unixMillis int64, epoch uint64) {
	pg := s.editPG(id)
	node := n.Id
	switch {
	case pg.Planned.GetNodeId() == node:
		pg.Planned = nil
		return
	case pg.Leaving.GetNodeId() == node:
		pg.Leaving = nil
		return
	}
	chain := pg.Members
	var joiner []*dirpb.Member
	if pg.Joining {
		chain, joiner = chain[:len(chain)-1], chain[len(chain)-1:]
		if joiner[0].NodeId == node {
			pg.Members, pg.Joining = chain, false
			s.newEpoch(pg)
			s.endJobs(id, dirpb.JobKind_JOB_JOIN)
			return
		}
	}
	had := pg.State == dirpb.PGState_PG_ACTIVE || pg.State == dirpb.PGState_PG_FROZEN
	rest := without(chain, node)
	if len(rest) == 0 && pg.Leaving != nil {
		rest = []*dirpb.Member{pg.Leaving}
		pg.Leaving = nil
	}
	if pg.State == dirpb.PGState_PG_CREATING && next == 0 && len(rest) > 0 {
		s.forgetMember(id, node)
		return
	}
	if !had || len(rest) == 0 {
		if had {
			s.noteLoss(pg, n, unixMillis)
		}
		if s.startOver(pg, chain, node, next, had); had && s.caches(pg) {
			pg.State = dirpb.PGState_PG_CREATING // anywhere, it does not wait for the memory node
		}
		return
	}
	if i := slices.IndexFunc(chain, func(m *dirpb.Member) bool { return m.NodeId == node }); i >= 0 {
		s.depart(pg, chain[i], epoch)
	}
	pg.Members = append(rest, joiner...)
	s.freeze(pg, len(rest))
}

// freeze begins the next placement group epoch of pg, a private copy in place, whose chain has so
// many copies, with nobody posting verbs. A join begins again when it is over.
func (s *State) freeze(pg *dirpb.PlacementGroup, copies int) {
	pg.State = dirpb.PGState_PG_FROZEN
	s.newEpoch(pg)
	s.editHeap(pg.Id).FrozenVersion = pg.ChangedVersion
	s.endJobs(pg.Id, dirpb.JobKind_JOB_RECOVER, dirpb.JobKind_JOB_JOIN)
	if copies > 1 {
		s.addJob(&dirpb.Job{
			Kind: dirpb.JobKind_JOB_RECOVER, NamespaceId: pg.NamespaceId, PgId: pg.Id, Barrier: pg.ChangedVersion,
			Reason: "the chain lost a member",
		})
	}
}

// startOver makes pg, a private copy in place, empty: all that it held is lost, and so
// is every job on it. chain are its members without a joiner. Shards and status words keep their
// arrays, which are zero again; all blocks are free, since intents that name them are of another generation.
func (s *State) startOver(pg *dirpb.PlacementGroup, chain []*dirpb.Member, node uint32, next uint64, had bool) {
	s.newEpoch(pg)
	pg.Generation = pg.Epoch
	pg.Members, pg.Joining, pg.Planned, pg.Leaving, pg.Recalled = chain, false, nil, nil, nil
	for _, m := range pg.Members {
		m.Keys, m.Boot, m.Since = nil, 0, s.nextVersion()
		if m.NodeId == node && next != 0 {
			m.Incarnation = next
		}
	}
	switch {
	case next != 0:
		pg.State = dirpb.PGState_PG_CREATING
	case had:
		pg.State = dirpb.PGState_PG_LOST
	}
	old := s.heaps[pg.Id]
	h := &fsmpb.Heap{
		PgId: old.PgId, Start: old.Start, Watermark: old.Start, End: old.End,
		IndexNext: old.IndexNext,
	}
	if old.Recovered != nil {
		h.IndexNext = old.Recovered.IndexNext
	}
	for _, a := range old.IndexFree {
		h.IndexFree = append(h.IndexFree, &fsmpb.Array{Offset: a.Offset, Segments: a.Segments})
	}
	s.putHeap(h)
	for _, j := range s.JobsOf(pg.Id) {
		s.loseJob(j, pg.Id)
	}
}

// noteLoss notes that pg, which had its last copy on n, lost it, unless no session has been
// granted memory there, so that there was no record to lose.
func (s *State) noteLoss(pg *dirpb.PlacementGroup, n *dirpb.Node, unixMillis int64) {
	if held := heldBytes(s.heaps[pg.Id]); held > 0 {
		s.addLoss(pg.NamespaceId, &dirpb.Loss{PgId: pg.Id, UnixMillis: unixMillis, Node: n.Name, HeldBytes: held})
	}
}

// addLoss notes that a namespace lost what a placement group or a volume held.
func (s *State) addLoss(namespace uint32, x *dirpb.Loss) {
	w := s.namespaces[namespace]
	if w == nil {
		return
	}
	w = proto.CloneOf(w)
	w.Lost++
	i, found := slices.BinarySearchFunc(w.Losses, x, func(l, x *dirpb.Loss) int {
		return cmp.Or(cmp.Compare(l.PgId, x.PgId), cmp.Compare(l.VolumeId, x.VolumeId))
	})
	if !found {
		w.Losses = slices.Insert(w.Losses, i, &dirpb.Loss{PgId: x.PgId, VolumeId: x.VolumeId})
	}
	l := w.Losses[i]
	l.Times++
	l.UnixMillis, l.Node, l.HeldBytes, l.Recovered = x.UnixMillis, x.Node, l.HeldBytes+x.HeldBytes, x.Recovered &&
		(l.Recovered || l.Times == 1)
	s.putNamespace(w)
	s.lost = append(s.lost, Lost{Namespace: w.Name, PG: x.PgId, Volume: x.VolumeId, Node: x.Node,
		HeldBytes: x.HeldBytes})
}

// remakePG gives a placement group that holds nothing, or may be empty, and waits for memory nodes that are
// not heard, other members.
func (s *State) remakePG(c *fsmpb.RemakePG) error {
	pg, err := s.pgIn(c.GetPgId(), c.GetEpoch())
	if err != nil {
		return err
	}
	had := pg.State == dirpb.PGState_PG_ACTIVE || pg.State == dirpb.PGState_PG_FROZEN
	if had && !s.Spares(pg.Id) {
		return fmt.Errorf("%w: placement group %d is %s", ErrRefused, pg.Id, pg.State)
	}
	for _, m := range Copies(pg) {
		switch n := s.nodes[m.NodeId]; {
		case away(n):
		case had:
			return fmt.Errorf("%w: placement group %d is %s, and memory node %q has a copy", ErrRefused, pg.Id,
				pg.State, n.Name)
		default:
			return fmt.Errorf("%w: placement group %d has a member on memory node %q, which is up", ErrRefused, pg.Id,
				n.Name)
		}
	}
	if want := int(s.namespaces[pg.NamespaceId].GetReplicas()); len(c.NodeIds) == 0 || len(c.NodeIds) > want {
		return fmt.Errorf("%w: a chain of %d memory nodes, want 1..%d", ErrInvalid, len(c.NodeIds), want)
	}
	var members []*dirpb.Member
	for i, id := range c.NodeIds {
		if err := s.checkPlace(id, pg.RegionBytes); err != nil {
			return err
		}
		if slices.Contains(c.NodeIds[:i], id) {
			return fmt.Errorf("%w: memory node %d is in the chain twice", ErrInvalid, id)
		}
		members = append(members, &dirpb.Member{NodeId: id, Incarnation: s.nodes[id].Incarnation})
	}
	pg = s.editPG(pg.Id)
	if had {
		s.noteLoss(pg, s.nodes[pg.Members[0].NodeId], c.UnixMillis)
	}
	s.startOver(pg, members, 0, 0, false)
	pg.State = dirpb.PGState_PG_CREATING
	if s.refreshUsed(); had {
		s.settlePGs()
	}
	return nil
}

// forgetMember takes a memory node that is removed, or lost before anything was there, out
// of a placement group that waits for it.
func (s *State) forgetMember(id, node uint32) {
	pg := s.editPG(id)
	pg.Members = without(pg.Members, node)
	s.newEpoch(pg)
	switch {
	case len(pg.Members) == 0:
		pg.State = dirpb.PGState_PG_LOST
	case published(pg.Members):
		s.opens(pg)
	}
}

func (s *State) activatePG(c *fsmpb.ActivatePG) error {
	pg := s.pgs[c.GetPgId()]
	if pg == nil || pg.State != dirpb.PGState_PG_FROZEN || pg.Epoch != c.Epoch {
		return fmt.Errorf("placement group %d frozen in its epoch %d: %w", c.GetPgId(), c.GetEpoch(), ErrNotFound)
	}
	for _, j := range s.JobsOf(pg.Id) {
		if j.Kind == dirpb.JobKind_JOB_RECOVER {
			return fmt.Errorf("%w: job %d has yet to recover placement group %d", ErrRefused, j.Id, pg.Id)
		}
	}
	pg = s.editPG(pg.Id)
	pg.State = dirpb.PGState_PG_ACTIVE
	pg.Leaving = nil
	s.admit(pg, c.ReclaimEpoch)
	s.newEpoch(pg)
	s.editHeap(pg.Id).FrozenVersion = 0
	if pg.Joining {
		s.addJoin(pg)
	}
	s.settlePGs(pg.Id)
	return nil
}

// publishRegion takes the rkeys of a region. The keys of a member in use are one process's, and never
// change but for those of a later one that has the same memory: verbs under the former keys fail, and the placement
// group epoch stays.
func (s *State) publishRegion(c *dirpb.PublishRegionRequest) error {
	if len(c.GetKeys()) == 0 || len(c.Keys) > MaxEndpoints {
		return fmt.Errorf("%w: region keys of %d providers, want 1..%d", ErrInvalid, len(c.GetKeys()), MaxEndpoints)
	}
	for _, k := range c.Keys {
		if k.Provider == "" || len(k.Provider) > MaxNameLen {
			return fmt.Errorf("%w: region keys of provider %.64q", ErrInvalid, k.Provider)
		}
	}
	n, boot := s.nodes[c.NodeId], s.bootAsOfLevel(c.Boot)
	if n == nil || n.Incarnation != c.Incarnation || n.State != dirpb.NodeState_NODE_UP || n.Boot != 0 &&
		n.Boot != boot {
		return fmt.Errorf("memory node %d, incarnation %d, boot %d, up: %w", c.NodeId, c.Incarnation, c.Boot,
			ErrNotFound)
	}
	if n.Recoveries != s.meta.Recoveries {
		return fmt.Errorf("%w: memory node %q has not registered since the directory was recovered", ErrRefused, n.Name)
	}
	pg := s.pgs[c.PgId]
	var m *dirpb.Member
	if pg != nil {
		m = regionOn(pg, c.NodeId)
	}
	if m == nil || m.Incarnation != c.Incarnation || c.Since != 0 && m.Since != c.Since {
		return fmt.Errorf("placement group %d on memory node %q: %w", c.PgId, n.Name, ErrNotFound)
	}
	same := slices.EqualFunc(m.Keys, c.Keys, func(a, b *dirpb.RegionKeys) bool { return proto.Equal(a, b) })
	if same && m.Boot == boot {
		return nil // told twice
	}
	planned := m == pg.Planned
	if pg.State != dirpb.PGState_PG_CREATING && !planned && boot <= m.Boot {
		return fmt.Errorf("%w: placement group %d is in use; its region on memory node %q cannot change", ErrRefused,
			pg.Id, n.Name)
	}
	pg = s.editPG(pg.Id)
	m = regionOn(pg, c.NodeId)
	m.Keys, m.Boot = c.Keys, boot
	if planned {
		s.settlePGs(pg.Id)
	} else if pg.State == dirpb.PGState_PG_CREATING && published(pg.Members) {
		s.opens(pg)
	}
	return nil
}

// planJoin has a memory node make a region, so that it may join a chain.
func (s *State) planJoin(c *fsmpb.PlanJoin) error {
	pg, err := s.pgIn(c.GetPgId(), c.GetEpoch())
	if err != nil {
		return err
	}
	switch {
	case pg.State != dirpb.PGState_PG_ACTIVE:
		return fmt.Errorf("%w: placement group %d is %s", ErrRefused, pg.Id, pg.State)
	case pg.Joining || pg.Planned != nil || pg.Leaving != nil:
		return fmt.Errorf("%w: placement group %d is changing already", ErrRefused, pg.Id)
	case len(pg.Members) > MaxReplicas:
		return fmt.Errorf("%w: placement group %d has %d members", ErrRefused, pg.Id, len(pg.Members))
	case regionOn(pg, c.NodeId) != nil:
		return fmt.Errorf("%w: memory node %d is a member of placement group %d", ErrRefused, c.NodeId, pg.Id)
	}
	if err := s.checkStays(pg.NamespaceId); err != nil {
		return err
	}
	if err := s.checkPlace(c.NodeId, pg.RegionBytes); err != nil {
		return err
	}
	var old *dirpb.Retained
	if c.Retain {
		if old, err = s.retain(pg, c.NodeId, c.ReclaimEpoch); err != nil {
			return err
		}
	}
	s.editPG(pg.Id).Planned = &dirpb.Member{NodeId: c.NodeId, Incarnation: s.nodes[c.NodeId].Incarnation,
		Since: s.nextVersion(), Retained: old}
	s.refreshUsed()
	return nil
}

// startLeave takes a member out of a chain. Its region outlives the freeze, in
// which verbs may still be under way to it.
func (s *State) startLeave(c *fsmpb.StartLeave) error {
	pg, err := s.pgIn(c.GetPgId(), c.GetEpoch())
	if err != nil {
		return err
	}
	if err := s.checkIdle(pg); err != nil {
		return err
	}
	i := slices.IndexFunc(pg.Members, func(m *dirpb.Member) bool { return m.NodeId == c.NodeId })
	switch {
	case i < 0:
		return fmt.Errorf("memory node %d in placement group %d: %w", c.NodeId, pg.Id, ErrNotFound)
	case pg.Planned != nil:
		return fmt.Errorf("%w: memory node %d is about to join placement group %d", ErrRefused, pg.Planned.NodeId,
			pg.Id)
	case len(pg.Members) < 2:
		return fmt.Errorf("%w: memory node %d is the last member of placement group %d", ErrRefused, c.NodeId, pg.Id)
	}
	pg = s.editPG(pg.Id)
	pg.Leaving = pg.Members[i]
	s.depart(pg, pg.Leaving, c.ReclaimEpoch)
	pg.Members = without(pg.Members, c.NodeId)
	s.freeze(pg, len(pg.Members))
	return nil
}

// pgIn returns a placement group that is in the given placement group epoch.
func (s *State) pgIn(id, epoch uint32) (*dirpb.PlacementGroup, error) {
	pg := s.pgs[id]
	if pg == nil || pg.Epoch != epoch {
		return nil, fmt.Errorf("placement group %d in its epoch %d: %w", id, epoch, ErrNotFound)
	}
	return pg, nil
}

// checkIdle returns why pg cannot begin a change of its own accord.
func (s *State) checkIdle(pg *dirpb.PlacementGroup) error {
	if err := s.checkWhole(pg); err != nil {
		return err
	}
	if jobs := s.changesOf(pg.Id); len(jobs) > 0 {
		return fmt.Errorf("%w: placement group %d has job %d, %s", ErrRefused, pg.Id, jobs[0].Id, jobs[0].Kind)
	}
	return nil
}

// checkWhole returns why pg does not stay as it is.
func (s *State) checkWhole(pg *dirpb.PlacementGroup) error {
	if pg.State != dirpb.PGState_PG_ACTIVE {
		return fmt.Errorf("%w: placement group %d is %s", ErrRefused, pg.Id, pg.State)
	}
	if pg.Joining {
		return fmt.Errorf("%w: placement group %d has a joiner", ErrRefused, pg.Id)
	}
	return s.checkStays(pg.NamespaceId)
}

// settlePGs settles placement groups, makes dead blocks of status words free for which no placement group is to be gone
// through any more, and recomputes what regions take.
func (s *State) settlePGs(ids ...uint32) {
	for _, id := range ids {
		s.settlePG(id)
	}
	for freed := s.freeDead(); len(freed) > 0; freed = s.freeDead() { // if one goes away, others' blocks may be free
		for _, id := range freed {
			s.settlePG(id)
		}
	}
	s.refreshUsed()
	s.excuse()
}

// settlePG does what waits for a placement group to be idle: a planned member whose region is
// made joins; a placement group without shards on draining memory nodes alone goes away.
// The caller calls settlePGs at its end.
func (s *State) settlePG(id uint32) {
	pg := s.pgs[id]
	if pg == nil || len(s.changesOf(id)) > 0 {
		return
	}
	if s.spent(pg) {
		s.endJobs(id, dirpb.JobKind_JOB_SETTLE)
		s.dropPG(id)
		return
	}
	if pg.State == dirpb.PGState_PG_ACTIVE && len(pg.Planned.GetKeys()) > 0 {
		pg = s.editPG(id)
		old := pg.Planned.Retained
		if old != nil && !s.stillThere(id, old) {
			pg.Planned = nil
			return
		}
		pg.Members = append(pg.Members, pg.Planned)
		pg.Planned, pg.Joining = nil, true
		if old != nil {
			s.rejoin(pg)
			return
		}
		s.newEpoch(pg)
		s.addJoin(pg)
	}
}

func (s *State) dropPG(id uint32) {
	pgRows.drop(s, id)
	heapRows.drop(s, id)
}

// spent reports whether nothing is left of pg that anybody could want.
func (s *State) spent(pg *dirpb.PlacementGroup) bool {
	h := s.heaps[pg.Id]
	return len(h.StatusHeld)+len(h.StatusDead) == 0 && s.emptied(pg)
}

// emptied reports whether pg has no shard, and nobody is to move one to it: its memory nodes drain.
func (s *State) emptied(pg *dirpb.PlacementGroup) bool {
	for _, m := range regions(pg) {
		if n := s.nodes[m.NodeId]; n != nil && !n.Draining {
			return false
		}
	}
	for _, sh := range s.shards {
		if sh.PgId == pg.Id || sh.Move.GetPgId() == pg.Id {
			return false
		}
	}
	return true
}

func (s *State) addJoin(pg *dirpb.PlacementGroup) {
	s.addJob(&dirpb.Job{
		Kind: dirpb.JobKind_JOB_JOIN, NamespaceId: pg.NamespaceId, PgId: pg.Id, Barrier: pg.ChangedVersion,
		Reason: "a member joins the chain", Rejoin: pg.Members[len(pg.Members)-1].GetRejoins(),
	})
}
