package fsm

import (
	"fmt"
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/ordered"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// A memory node that is silent is lost to each placement group by itself. Those that have another copy go on without
// it. Those that have none may wait for it: then it stays up, as a *silent* one, which takes no new region. When it is
// heard again it drops, or retains, what it was taken out of, says so by another registration, and is a memory node
// like any.

// Losable are the placement groups that go on without what a memory node has of them, by id.
func (s *State) Losable(node uint32) (ids []uint32) {
	for _, pg := range ordered.Values(s.pgs) {
		if s.losable(pg, node) {
			ids = append(ids, pg.Id)
		}
	}
	return ids
}

func (s *State) losable(pg *dirpb.PlacementGroup, node uint32) bool {
	m := regionOn(pg, node)
	switch {
	case m == nil || pg.State == dirpb.PGState_PG_LOST:
		return false
	case m == pg.Planned || m == pg.Leaving:
		return true
	}
	return len(without(Copies(pg), node)) > 0
}

// Copies are the members of a placement group that have what it holds: a joiner has not yet, and one that leaves has.
func Copies(pg *dirpb.PlacementGroup) []*dirpb.Member {
	list := slices.Clone(pg.GetMembers())
	if pg.GetJoining() {
		list = list[:len(list)-1]
	}
	if pg.GetLeaving() != nil {
		list = append(list, pg.Leaving)
	}
	return list
}

// loseMembers takes a memory node that is silent out of the placement groups that go on without it.
func (s *State) loseMembers(c *fsmpb.LoseMembers) error {
	if !s.KnowsBoots() {
		return fmt.Errorf("%w: memory nodes are lost to one placement group after the other from level %d on. "+
			"The directory is at level %d until all of its nodes run a version that knows level %[2]d",
			ErrRefused, levelBoots, s.Level())
	}
	n := s.nodes[c.GetNodeId()]
	if n == nil || n.Incarnation != c.Incarnation || n.State != dirpb.NodeState_NODE_UP || c.Boot != 0 &&
		n.Boot != c.Boot {
		return fmt.Errorf("memory node %d, incarnation %d, boot %d, up: %w", c.GetNodeId(), c.GetIncarnation(),
			c.GetBoot(), ErrNotFound)
	}
	lost := s.Losable(n.Id)
	if n.Silent && len(lost) == 0 {
		return fmt.Errorf("%w: memory node %q is silent, and no placement group goes on without it", ErrRefused, n.Name)
	}
	n = proto.CloneOf(n)
	n.Silent = true
	if len(lost) > 0 {
		n.LostVersion = s.nextVersion()
	}
	s.putNode(n)
	for _, id := range lost {
		s.loseMember(id, n, 0, c.UnixMillis, c.ReclaimEpoch)
		s.settlePG(id)
	}
	s.settlePGs()
	return nil
}

// away reports whether a memory node is not to be heard, by what the state knows.
func away(n *dirpb.Node) bool { return n.GetState() != dirpb.NodeState_NODE_UP || n.Silent }

// Spares reports whether a placement group may start over on other memory nodes, though its last copy may
// come back. It may if it is a cache's, whose users would rather have an empty cache than none. It also may
// if it holds nothing: no session has been granted memory there, or status words, and nothing moves.
func (s *State) Spares(id uint32) bool {
	pg := s.pgs[id]
	if !s.KnowsBoots() || pg == nil {
		return false
	}
	if s.caches(pg) {
		return true
	}
	h := s.heaps[id]
	if heldBytes(h) > 0 || len(h.StatusHeld)+len(h.StatusDead) > 0 {
		return false
	}
	for _, sh := range s.shards {
		if mv := sh.Move; mv != nil && (sh.PgId == id || mv.PgId == id) {
			return false
		}
	}
	return true
}

// caches reports whether a placement group is a cache's, so that it starts over rather than wait.
func (s *State) caches(pg *dirpb.PlacementGroup) bool {
	return s.KnowsBoots() && s.namespaces[pg.NamespaceId].GetMode() == dirpb.NamespaceMode_NAMESPACE_CACHE
}

// withRegions are the memory nodes that have a region of a namespace, or are to make one.
func (s *State) withRegions(namespace uint32) map[uint32]bool {
	nodes := make(map[uint32]bool)
	for _, pg := range s.pgs {
		if pg.NamespaceId == namespace {
			for _, m := range regions(pg) {
				nodes[m.NodeId] = true
			}
		}
	}
	return nodes
}

// fencers are the memory nodes that have to confirm that a session of a namespace is fenced: those that are up, and
// lend something to the namespace. Whichever comes to lend something later ends the connections of sessions that do not
// live any more before it makes a region.
func (s *State) fencers(namespace uint32) (list []*fsmpb.Incarnation) {
	with := s.withRegions(namespace)
	for _, n := range ordered.Values(s.nodes) {
		if n.State == dirpb.NodeState_NODE_UP && (with[n.Id] || !s.KnowsBoots()) {
			list = append(list, &fsmpb.Incarnation{NodeId: n.Id, Incarnation: n.Incarnation})
		}
	}
	return list
}

// excuse confirms the fences of memory nodes that have nothing of the namespace any more.
func (s *State) excuse() {
	if !s.KnowsBoots() || len(s.roster.fencing) == 0 {
		return
	}
	with := make(map[uint32]map[uint32]bool) // by namespace
	for _, x := range ordered.Values(s.roster.fencing) {
		if with[x.NamespaceId] == nil {
			with[x.NamespaceId] = s.withRegions(x.NamespaceId)
		}
		for _, p := range x.Pending {
			if now := s.sessions[x.Id]; now != nil && !with[x.NamespaceId][p.NodeId] {
				s.confirm(now, p.NodeId, p.Incarnation)
			}
		}
	}
}

// FencedFrom is how many sessions of a namespace are being fenced, and nothing of theirs can land in a placement group
// any more.
func (s *State) FencedFrom(pg uint32) (n uint32) {
	g := s.pgs[pg]
	if g == nil || !s.KnowsBoots() {
		return 0
	}
	for _, x := range s.roster.fencing {
		if x.NamespaceId == g.NamespaceId && !slices.ContainsFunc(x.Pending, func(p *fsmpb.Incarnation) bool {
			return regionOn(g, p.NodeId) != nil
		}) {
			n++
		}
	}
	return n
}
