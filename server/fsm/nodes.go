package fsm

import (
	"errors"
	"fmt"
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/ordered"
	"github.com/kvd-project/kvd/internal/units"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// CheckRegistration refuses what no memory node may say of itself, with ErrInvalid.
func CheckRegistration(c *dirpb.RegisterNodeRequest) error {
	if err := checkName("memory node", c.GetName()); err != nil {
		return err
	}
	if c.Incarnation == 0 {
		return fmt.Errorf("%w: memory node %q: incarnation 0", ErrInvalid, c.Name)
	}
	if c.Keeps && c.Boot == 0 {
		return fmt.Errorf("%w: memory node %q keeps its memory, and its process has boot 0", ErrInvalid, c.Name)
	}
	if c.CapacityBytes > MaxCapacityBytes {
		return fmt.Errorf("%w: memory node %q lends %s, want at most 1024 TiB", ErrInvalid, c.Name,
			units.Bytes(c.CapacityBytes))
	}
	if len(c.Retained) > MaxPGID {
		return fmt.Errorf("%w: memory node %q retains memory of %d placement groups, want at most %d", ErrInvalid,
			c.Name, len(c.Retained), MaxPGID)
	}
	if len(c.After) > MaxAfter || c.Nonce == 0 && len(c.After) > 0 {
		return fmt.Errorf("%w: memory node %q: nonce %d after %d others, want at most %d, and a nonce", ErrInvalid,
			c.Name, c.Nonce, len(c.After), MaxAfter)
	}
	for _, text := range [][2]string{{"host id", c.HostId}, {"domain", c.Domain}, {"version", c.Version},
		{"control socket", c.Control}} {
		if err := CheckText(text[0], text[1]); err != nil {
			return fmt.Errorf("memory node %q: %w", c.Name, err)
		}
	}
	return checkEndpoints("memory node", c)
}

func checkEndpoints(what string, c interface {
	GetName() string
	GetEndpoints() []*dirpb.Endpoint
}) error {
	name, list := c.GetName(), c.GetEndpoints()
	if len(list) == 0 || len(list) > MaxEndpoints {
		return fmt.Errorf("%w: %s %q: %d endpoints, want 1..%d", ErrInvalid, what, name, len(list), MaxEndpoints)
	}
	for _, e := range list {
		if e.GetProvider() == "" || len(e.Provider) > MaxNameLen || len(e.Addr) > MaxLabelLen {
			return fmt.Errorf("%w: %s %q: endpoint %.64q at %.64q", ErrInvalid, what, name, e.GetProvider(),
				e.GetAddr())
		}
		if err := errors.Join(CheckText("provider", e.Provider), CheckText("address", e.Addr)); err != nil {
			return fmt.Errorf("%s %q: %w", what, name, err)
		}
		// Memory nodes that do not say are of a version that knew CPU alone.
		if _, ok := dirpb.AtomicsBy_name[int32(e.Atomics)]; !ok {
			return fmt.Errorf("%w: %s %q: endpoint %q: atomics by %d, which is unknown", ErrInvalid, what, name,
				e.Provider, e.Atomics)
		}
	}
	return nil
}

// NodeNamed gives a memory node's row by its name, which is shared: nil if there is none.
func (s *State) NodeNamed(name string) *dirpb.Node {
	for _, n := range s.nodes {
		if n.Name == name {
			return n
		}
	}
	return nil
}

// CheckNodeOwner refuses an identity that is to register a memory node whose name another one has
// registered, with ErrForeign. The name is free when the memory node has been removed. An empty identity is that of
// a caller without TLS, which may do everything.
func (s *State) CheckNodeOwner(name, identity string) error {
	if old := s.NodeNamed(name).GetIdentity(); old != "" && identity != "" && old != identity {
		return fmt.Errorf("%w: memory node %q belongs to %s, not to %s; remove the memory node first if it is to "+
			"change hands", ErrForeign, name, old, identity)
	}
	return nil
}

// registerNode admits a process of a memory node. A new incarnation says that
// what the old process lent is gone; a greater boot of the same one that all of it is there, at other endpoints
// perhaps, and that nothing which was posted to the old process lands any more, so the fences that it owed are
// confirmed. The order of boots tells a registration that was overtaken: it must not confirm what the later process has
// yet to fence. Memory that another process than the one that registered last has left is none of these.
func (s *State) registerNode(r *fsmpb.RegisterNode) (uint32, Arrival, error) {
	c := s.asOfLevel(r.GetNode())
	if err := errors.Join(CheckRegistration(c), CheckText("identity", r.Identity),
		s.CheckNodeOwner(c.GetName(), r.GetIdentity())); err != nil {
		return 0, 0, err
	}
	if err := checkHeld(c); err != nil {
		return 0, 0, err
	}
	if r.Recoveries != s.meta.Recoveries {
		return 0, 0, fmt.Errorf("%w: the cluster was recovered %d times, and memory node %q has heard of %d",
			ErrRefused, s.meta.Recoveries, c.Name, r.Recoveries)
	}
	old := s.NodeNamed(c.Name)
	n := &dirpb.Node{
		Name: c.Name, Incarnation: c.Incarnation, HostId: c.HostId, Endpoints: c.Endpoints,
		State: dirpb.NodeState_NODE_UP, CapacityBytes: c.CapacityBytes, Domain: c.Domain, Identity: r.Identity,
		Boot: c.Boot, Keeps: c.Keeps, Version: c.Version, Control: c.Control, Nonce: c.Nonce,
		Recoveries: s.meta.Recoveries,
	}
	if old == nil {
		m := s.editMeta()
		m.NodeId++
		n.Id = m.NodeId
		s.putNode(n)
		return n.Id, ArrivalNew, nil
	}
	// A state that was recovered may not know of the process that registered last; then its copies are judged one by
	// one.
	if old.Recoveries == s.meta.Recoveries && isStale(old, c) {
		return old.Id, ArrivalStale, nil
	}
	n.Id, n.UsedBytes, n.Draining = old.Id, old.UsedBytes, old.Draining
	if n.Identity == "" {
		n.Identity = old.Identity
	}
	if old.Incarnation == c.Incarnation && old.State == dirpb.NodeState_NODE_DOWN {
		return 0, 0, fmt.Errorf("%w: incarnation %d of memory node %q was declared lost; drop its regions and "+
			"register a new incarnation",
			ErrRefused, c.Incarnation, c.Name)
	}
	if old.Incarnation == c.Incarnation && c.Boot < old.Boot {
		return 0, 0, fmt.Errorf("%w: boot %d of memory node %q, incarnation %d, has ended: boot %d has registered",
			ErrRefused, c.Boot, c.Name, c.Incarnation, old.Boot)
	}
	if c.CapacityBytes < n.UsedBytes {
		// It is of another kind than the refusals that mean the end of kept memory.
		return 0, 0, fmt.Errorf("%w: memory node %q lends %s, and its regions need %s", ErrFull, c.Name,
			units.Bytes(c.CapacityBytes), units.Bytes(n.UsedBytes))
	}
	how := ArrivalKnown
	switch {
	case old.Incarnation == c.Incarnation && old.Boot == c.Boot:
		n.PauseMillis, n.Leaving, n.LostVersion = old.PauseMillis, old.Leaving, old.LostVersion
	case old.Incarnation == c.Incarnation && old.Boot != 0:
		how = ArrivalKept
		n.Silent, n.LostVersion = old.Silent, old.LostVersion // it has yet to drop what it was taken out of
		s.confirmAll(old)
	case old.Incarnation != c.Incarnation:
		how = ArrivalRestarted
		if old.State == dirpb.NodeState_NODE_DOWN {
			how = ArrivalBack
		}
		s.loseMemory(old, c.Incarnation, r.UnixMillis, r.ReclaimEpoch)
	}
	n.UsedBytes = s.nodes[n.Id].UsedBytes // less if memory was lost, or a deletion was waiting for a fence
	if !proto.Equal(s.nodes[n.Id], n) {
		s.putNode(n)
	}
	s.takeOffers(n.Id, c)
	if old.Recoveries != n.Recoveries {
		if how == ArrivalKnown || how == ArrivalKept {
			s.confirmAll(old)
			s.believe(n, c, r.UnixMillis)
		}
		s.endRecovery(r.UnixMillis)
	}
	return n.Id, how, nil
}

// isStale reports whether a process comes with memory of an earlier time than that of the process that registered last:
// somebody has put it back. Boots would not tell, since the processes that follow such memory count on from its boot.
func isStale(last *dirpb.Node, c *dirpb.RegisterNodeRequest) bool {
	return last.Nonce != 0 && last.Nonce != c.Nonce && len(c.After) > 0 && !slices.Contains(c.After, last.Nonce)
}

func (s *State) nodeDown(c *fsmpb.NodeDown) error {
	n, boot := s.nodes[c.GetNodeId()], s.bootAsOfLevel(c.GetBoot())
	if n == nil || n.Incarnation != c.Incarnation || n.State != dirpb.NodeState_NODE_UP || boot != 0 && n.Boot != boot {
		return fmt.Errorf("memory node %d, incarnation %d, boot %d, up: %w", c.GetNodeId(), c.GetIncarnation(),
			c.GetBoot(), ErrNotFound)
	}
	s.takeDown(n, c.UnixMillis, c.ReclaimEpoch)
	return nil
}

func (s *State) takeDown(n *dirpb.Node, unixMillis int64, epoch uint64) {
	down := proto.CloneOf(n)
	if !n.Leaving {
		down.PauseMillis = 0
	}
	down.State, down.Leaving, down.Silent = dirpb.NodeState_NODE_DOWN, false, false
	s.putNode(down)
	s.loseMemory(down, 0, unixMillis, epoch)
}

// loseMemory takes away everything that n's current incarnation lent. next is
// the incarnation that follows at once, 0 for none. Nothing of any session can
// land in lost memory, so the fences it owed are confirmed. The reclaim epoch, epoch, may be a lesser one, or 0 if
// nothing is to come back.
func (s *State) loseMemory(n *dirpb.Node, next uint64, unixMillis int64, epoch uint64) {
	for _, pg := range ordered.Values(s.pgs) {
		if regionOn(pg, n.Id) != nil {
			s.loseMember(pg.Id, n, next, unixMillis, epoch)
			s.settlePG(pg.Id)
		}
	}
	s.settlePGs()
	s.confirmAll(n)
	s.endRecovery(unixMillis)
}

func (s *State) confirmAll(n *dirpb.Node) {
	for _, x := range ordered.Values(s.roster.fencing) {
		s.confirm(x, n.Id, n.Incarnation)
	}
}

// checkPause refuses a pause of n that is too long, or that has no end.
func checkPause(n *dirpb.Node, millis uint32) error {
	switch {
	case millis > MaxPauseMillis:
		return fmt.Errorf("%w: a pause of %d ms of memory node %q, want at most %d", ErrInvalid, millis, n.Name,
			MaxPauseMillis)
	case millis > 0 && !n.Keeps:
		return fmt.Errorf("%w: memory node %q does not keep its memory, so it has nothing to come back with",
			ErrRefused, n.Name)
	}
	return nil
}

// pauseNode says for how long a process of a memory node that keeps its memory is not expected to be
// heard, since another one takes over. It holds until that one registers, or the leader ends it. The end of the pause
// of one that has not left its placement groups yet is the end of that.
func (s *State) pauseNode(c *dirpb.PauseNodeRequest) error {
	n := s.nodes[c.GetNodeId()]
	switch {
	case !s.KnowsBoots():
		return fmt.Errorf("%w: pauses begin with level %d, and the directory is at level %d until all of its nodes "+
			"run a version that knows level %[2]d",
			ErrRefused, levelBoots, s.Level())
	case n == nil || n.Incarnation != c.Incarnation || n.State != dirpb.NodeState_NODE_UP && c.Millis > 0:
		return fmt.Errorf("memory node %d, incarnation %d, up: %w", c.GetNodeId(), c.GetIncarnation(), ErrNotFound)
	}
	if err := checkPause(n, c.Millis); err != nil {
		return err
	}
	if n.PauseMillis != c.Millis {
		n = proto.CloneOf(n)
		n.PauseMillis = c.Millis
		n.Leaving = n.Leaving && c.Millis > 0
		s.putNode(n)
	}
	return nil
}

// leaveNode says that a process of a memory node is about to stop, or with a pause that it is to be replaced when it
// has left. It holds for this incarnation; a process that stops is not replaced.
func (s *State) leaveNode(c *dirpb.LeaveNodeRequest) error {
	n := s.nodes[c.GetNodeId()]
	if n == nil || n.Incarnation != c.Incarnation || n.State != dirpb.NodeState_NODE_UP {
		return fmt.Errorf("memory node %d, incarnation %d, up: %w", c.GetNodeId(), c.GetIncarnation(), ErrNotFound)
	}
	if err := checkPause(n, c.PauseMillis); err != nil {
		return err
	}
	if c.PauseMillis > 0 && (n.Leaving || n.PauseMillis > 0) {
		return fmt.Errorf("%w: memory node %q is stopping or being replaced already", ErrRefused, n.Name)
	}
	if n.Leaving && n.PauseMillis == 0 {
		return nil
	}
	n = proto.CloneOf(n)
	n.Leaving, n.PauseMillis = true, c.PauseMillis
	s.putNode(n)
	return nil
}

// drainNode says that a memory node is to lose its regions and takes no new one, or that it
// is to stay after all. A region that is only planned there is not made. A placement group that is empty
// and on draining nodes alone goes away.
func (s *State) drainNode(c *fsmpb.DrainNode) error {
	n := s.nodes[c.GetNodeId()]
	if n == nil {
		return fmt.Errorf("memory node %d: %w", c.GetNodeId(), ErrNotFound)
	}
	if n.Draining == !c.Cancel {
		return nil
	}
	n = proto.CloneOf(n)
	n.Draining = !c.Cancel
	s.putNode(n)
	for _, pg := range ordered.Values(s.pgs) {
		if n.Draining && pg.Planned.GetNodeId() == n.Id {
			s.editPG(pg.Id).Planned = nil
		}
		s.settlePG(pg.Id)
	}
	s.settlePGs()
	return nil
}

// removeNode forgets a memory node without regions; with force any, as if it went
// down first. A placement group that had its only copy there is lost for good.
func (s *State) removeNode(c *fsmpb.RemoveNode) error {
	n := s.nodes[c.GetNodeId()]
	if n == nil {
		return fmt.Errorf("memory node %d: %w", c.GetNodeId(), ErrNotFound)
	}
	regions := 0
	for _, pg := range s.pgs {
		if regionOn(pg, n.Id) != nil {
			regions++
		}
	}
	if regions > 0 && !c.Force {
		return fmt.Errorf("%w: memory node %q has regions of %d placement groups; drain it first, or force it and "+
			"lose them", ErrRefused, n.Name, regions)
	}
	if n.State == dirpb.NodeState_NODE_UP {
		s.takeDown(n, c.UnixMillis, 0)
	}
	s.setDeparted(n.Id, func(uint32, *fsmpb.Departed) *fsmpb.Departed { return nil })
	nodeRows.drop(s, n.Id)
	for _, pg := range ordered.Values(s.pgs) {
		if regionOn(pg, n.Id) != nil {
			s.forgetMember(pg.Id, n.Id)
		}
		s.settlePG(pg.Id)
	}
	s.settlePGs()
	return nil
}

// refreshUsed recomputes what regions take of each memory node.
func (s *State) refreshUsed() {
	used := make(map[uint32]uint64)
	for _, pg := range s.pgs {
		for _, m := range regions(pg) {
			used[m.NodeId] += pg.RegionBytes
		}
	}
	for _, n := range ordered.Values(s.nodes) {
		if n.UsedBytes != used[n.Id] {
			n = proto.CloneOf(n)
			n.UsedBytes = used[n.Id]
			s.putNode(n)
		}
	}
}
