package fsm

import (
	"fmt"
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

func checkRegistration(c *dirpb.RegisterNodeRequest) error {
	if err := checkName("memory node", c.GetName()); err != nil {
		return err
	}
	if c.Incarnation == 0 {
		return fmt.Errorf("%w: memory node %q: incarnation 0", ErrInvalid, c.Name)
	}
	if len(c.HostId) > MaxLabelLen || len(c.Domain) > MaxLabelLen {
		return fmt.Errorf("%w: memory node %q: host id or domain is longer than %d bytes", ErrInvalid, c.Name, MaxLabelLen)
	}
	if len(c.Endpoints) == 0 || len(c.Endpoints) > MaxEndpoints {
		return fmt.Errorf("%w: memory node %q: %d endpoints, want 1..%d", ErrInvalid, c.Name, len(c.Endpoints), MaxEndpoints)
	}
	for _, e := range c.Endpoints {
		if e.Provider == "" || len(e.Provider) > MaxNameLen || len(e.Addr) > MaxLabelLen {
			return fmt.Errorf("%w: memory node %q: endpoint %.64q at %.64q", ErrInvalid, c.Name, e.Provider, e.Addr)
		}
	}
	return nil
}

// registerNode admits a process of a memory node. A new incarnation says that
// what the old process lent is gone.
func (s *State) registerNode(c *dirpb.RegisterNodeRequest) (uint32, error) {
	if err := checkRegistration(c); err != nil {
		return 0, err
	}
	var old *dirpb.Node
	for _, n := range s.nodes {
		if n.Name == c.Name {
			old = n
		}
	}
	n := &dirpb.Node{
		Name: c.Name, Incarnation: c.Incarnation, HostId: c.HostId, Endpoints: c.Endpoints,
		State: dirpb.NodeState_NODE_UP, CapacityBytes: c.CapacityBytes, Domain: c.Domain,
	}
	if old == nil {
		m := s.editMeta()
		m.NodeId++
		n.Id = m.NodeId
		s.putNode(n)
		return n.Id, nil
	}
	n.Id, n.UsedBytes = old.Id, old.UsedBytes
	if old.Incarnation == c.Incarnation && old.State == dirpb.NodeState_NODE_DOWN {
		return 0, fmt.Errorf("%w: incarnation %d of memory node %q was declared lost; drop its regions and register a new incarnation",
			ErrRefused, c.Incarnation, c.Name)
	}
	if c.CapacityBytes < n.UsedBytes {
		return 0, fmt.Errorf("%w: memory node %q lends %d bytes but its regions take %d", ErrRefused, c.Name, c.CapacityBytes, n.UsedBytes)
	}
	if old.Incarnation != c.Incarnation {
		s.loseMemory(old, c.Incarnation)
		n.UsedBytes = s.nodes[n.Id].UsedBytes
	}
	if !proto.Equal(s.nodes[n.Id], n) {
		s.putNode(n)
	}
	return n.Id, nil
}

func (s *State) nodeDown(c *fsmpb.NodeDown) error {
	n := s.nodes[c.GetNodeId()]
	if n == nil || n.Incarnation != c.Incarnation || n.State != dirpb.NodeState_NODE_UP {
		return fmt.Errorf("memory node %d, incarnation %d, up: %w", c.GetNodeId(), c.GetIncarnation(), ErrNotFound)
	}
	down := proto.CloneOf(n)
	down.State = dirpb.NodeState_NODE_DOWN
	s.putNode(down)
	s.loseMemory(down, 0)
	return nil
}

// loseMemory takes away everything that n's current incarnation lent. next is
// the incarnation that follows at once, 0 for none. Nothing of any session can
// land in lost memory, so the fences it owed are confirmed.
func (s *State) loseMemory(n *dirpb.Node, next uint64) {
	for _, pg := range byID(s.pgs) {
		if slices.ContainsFunc(pg.Members, func(m *dirpb.Member) bool { return m.NodeId == n.Id }) {
			s.loseMember(pg, n.Id, next)
		}
	}
	s.refreshUsed()
	for _, x := range byID(s.sessions) {
		s.confirm(x, n.Id, n.Incarnation)
	}
}

// loseMember moves pg to its next epoch without the memory of one member.
//
// A copy that others hold survives in the chain's first survivor, which is never
// behind a later one (I2): the chain shrinks to it and is frozen until every session has
// acknowledged. A placement group that was never active, or has no survivor, starts over
// empty.
func (s *State) loseMember(pg *dirpb.PlacementGroup, node uint32, next uint64) {
	pg = proto.CloneOf(pg)
	pg.Epoch++
	had := pg.State == dirpb.PGState_PG_ACTIVE || pg.State == dirpb.PGState_PG_FROZEN
	if had && len(pg.Members) > 1 {
		rest := slices.DeleteFunc(pg.Members, func(m *dirpb.Member) bool { return m.NodeId == node })
		pg.Members = rest[:1:1]
		pg.State = dirpb.PGState_PG_FROZEN
		s.putPG(pg)
		h := proto.CloneOf(s.heaps[pg.Id])
		h.FrozenVersion = s.meta.MapVersion + 1 // the version that this command makes
		s.putHeap(h)
		return
	}
	for _, m := range pg.Members {
		m.Keys = nil
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
	s.putPG(pg)
	h := s.heaps[pg.Id]
	s.putHeap(&fsmpb.Heap{PgId: h.PgId, Start: h.Start, Watermark: h.Start, End: h.End, FirstSession: s.meta.SessionId + 1})
}

func (s *State) activatePG(c *fsmpb.ActivatePG) error {
	pg := s.pgs[c.GetPgId()]
	if pg == nil || pg.State != dirpb.PGState_PG_FROZEN || pg.Epoch != c.Epoch {
		return fmt.Errorf("placement group %d frozen in epoch %d: %w", c.GetPgId(), c.GetEpoch(), ErrNotFound)
	}
	pg = proto.CloneOf(pg)
	pg.Epoch++
	pg.State = dirpb.PGState_PG_ACTIVE
	s.putPG(pg)
	h := proto.CloneOf(s.heaps[pg.Id])
	h.FrozenVersion = 0
	s.putHeap(h)
	return nil
}

func (s *State) publishRegion(c *dirpb.PublishRegionRequest) error {
	if len(c.GetKeys()) == 0 || len(c.Keys) > MaxEndpoints {
		return fmt.Errorf("%w: region keys of %d providers, want 1..%d", ErrInvalid, len(c.GetKeys()), MaxEndpoints)
	}
	for _, k := range c.Keys {
		if k.Provider == "" || len(k.Provider) > MaxNameLen {
			return fmt.Errorf("%w: region keys of provider %.64q", ErrInvalid, k.Provider)
		}
	}
	n := s.nodes[c.NodeId]
	if n == nil || n.Incarnation != c.Incarnation || n.State != dirpb.NodeState_NODE_UP {
		return fmt.Errorf("memory node %d, incarnation %d, up: %w", c.NodeId, c.Incarnation, ErrNotFound)
	}
	pg := s.pgs[c.PgId]
	i := -1
	if pg != nil {
		i = slices.IndexFunc(pg.Members, func(m *dirpb.Member) bool {
			return m.NodeId == c.NodeId && m.Incarnation == c.Incarnation
		})
	}
	if i < 0 {
		return fmt.Errorf("placement group %d on memory node %q: %w", c.PgId, n.Name, ErrNotFound)
	}
	if slices.EqualFunc(pg.Members[i].Keys, c.Keys, func(a, b *dirpb.RegionKeys) bool { return proto.Equal(a, b) }) {
		return nil // told twice
	}
	if pg.State != dirpb.PGState_PG_CREATING {
		return fmt.Errorf("%w: placement group %d is in use; its region on memory node %q cannot change", ErrRefused, pg.Id, n.Name)
	}
	pg = proto.CloneOf(pg)
	pg.Members[i].Keys = c.Keys
	if !slices.ContainsFunc(pg.Members, func(m *dirpb.Member) bool { return len(m.Keys) == 0 }) {
		pg.State = dirpb.PGState_PG_ACTIVE
	}
	s.putPG(pg)
	return nil
}

// refreshUsed recomputes what regions take of each memory node.
func (s *State) refreshUsed() {
	used := make(map[uint32]uint64)
	for _, pg := range s.pgs {
		for _, m := range pg.Members {
			used[m.NodeId] += pg.RegionBytes
		}
	}
	for _, n := range byID(s.nodes) {
		if n.UsedBytes != used[n.Id] {
			n = proto.CloneOf(n)
			n.UsedBytes = used[n.Id]
			s.putNode(n)
		}
	}
}
