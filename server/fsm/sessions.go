package fsm

import (
	"errors"
	"fmt"
	"math"
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/identity"
	"github.com/kvd-project/kvd/internal/ordered"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

func (s *State) openSession(c *fsmpb.OpenSession) (*fsmpb.Session, error) {
	if err := s.CheckOpen(c); err != nil {
		return nil, err
	}
	if err := errors.Join(CheckText("client name", c.Client), CheckText("host id", c.HostId),
		CheckText("identity", c.Identity)); err != nil {
		return nil, err
	}
	if len(c.Groups) > identity.MaxGroups {
		return nil, fmt.Errorf("%w: %d groups, want at most %d", ErrInvalid, len(c.Groups), identity.MaxGroups)
	}
	for _, g := range c.Groups {
		if err := CheckText("group", g); err != nil {
			return nil, err
		}
	}
	if len(s.sessions) >= s.mostSessions() {
		return nil, fmt.Errorf("%w: %d sessions are open or being fenced", ErrFull, len(s.sessions))
	}
	if n := len(s.roster.discriminators); !c.ReadOnly && n >= MaxWriters {
		return nil, fmt.Errorf("%w: %d sessions that may write are open or being fenced", ErrFull, n)
	}
	if s.meta.SessionId == math.MaxUint32 {
		return nil, fmt.Errorf("%w: every session id has been used", ErrFull)
	}
	m := s.editMeta()
	m.SessionId++
	d := uint32(0) // for a session that writes nothing
	if !c.ReadOnly || s.roster.readersToo {
		// Taking the next free one after the id keeps a discriminator unused for long.
		for d = m.SessionId % MaxWriters; s.roster.discriminators[d]; {
			d = (d + 1) % MaxWriters
		}
	}
	x := &fsmpb.Session{
		Id: m.SessionId, Discriminator: d, NamespaceId: c.NamespaceId, Client: c.Client, HostId: c.HostId,
		ReadOnly: c.ReadOnly, Background: c.Background, Life: dirpb.SessionLife_SESSION_LIVE, Epoch: c.Epoch,
		OpenedUnixMillis: c.OpenedUnixMillis,
		Identity:         c.Identity, Groups: c.Groups, Everywhere: c.Everywhere, Lanes: c.Lanes,
		KnowsStubs: c.KnowsStubs && s.KnowsTiers(),
	}
	s.putSession(x)
	return x, nil
}

// closeSession ends a session whose client has stopped: it drained its
// operations and closed its QPs, so there is nothing to fence. The client may
// say so also after its lease ran out.
func (s *State) closeSession(c *fsmpb.CloseSession) error {
	x := s.sessions[c.GetSessionId()]
	if x == nil {
		return fmt.Errorf("session %d: %w", c.GetSessionId(), ErrNotFound)
	}
	runs, err := s.closedRuns(x, c.Runs)
	if err != nil {
		return err
	}
	s.takeBack(runs, c.Epoch)
	s.dropSession(x, c.Leaked, c.Settled)
	return nil
}

// dropSession ends a session that is closed or fenced: it owns no job and holds no
// memory any more. When it leaked, memory that nobody accounts for may be left in
// the placement groups of its namespace; when it was settled, no intent names its status words. A namespace that is
// being deleted goes with the last one.
func (s *State) dropSession(x *fsmpb.Session, leaked, settled bool) {
	sessionRows.drop(s, x.Id)
	for _, j := range ordered.Values(s.jobs) {
		if j.Job.Owner == x.Id {
			s.setOwner(j.Job.Id, 0)
		}
	}
	s.endStatus(x, settled)
	leaked = leaked && !x.ReadOnly
	holds := func(h *fsmpb.Home) bool { return h.SessionId == x.Id }
	for _, pg := range s.PGs(x.NamespaceId) {
		h := s.heaps[pg.Id]
		held := slices.ContainsFunc(h.Homes, holds)
		if !held && (h.Dirty || !leaked) {
			continue
		}
		h = s.editHeap(pg.Id)
		h.Dirty = h.Dirty || leaked
		if held {
			h.Homes = slices.DeleteFunc(slices.Clone(h.Homes), holds)
		}
	}
	s.endNamespace(x.NamespaceId)
}

// fence begins to fence sessions. Ids that are not live are skipped.
func (s *State) fence(ids []uint32) {
	fencers := make(map[uint32][]*fsmpb.Incarnation) // by namespace
	for _, id := range ids {
		x := s.sessions[id]
		if x == nil || x.Life != dirpb.SessionLife_SESSION_LIVE {
			continue
		}
		pending, ok := fencers[x.NamespaceId]
		if !ok {
			pending = s.fencers(x.NamespaceId)
			fencers[x.NamespaceId] = pending
		}
		if len(pending) == 0 {
			s.dropSession(x, true, false)
			continue
		}
		x = proto.CloneOf(x)
		x.Life = dirpb.SessionLife_SESSION_FENCING
		x.Pending = pending
		s.putSession(x)
	}
}

func (s *State) confirmFence(c *fsmpb.ConfirmFence) error {
	n := s.nodes[c.GetNodeId()]
	if n == nil || n.Incarnation != c.Incarnation || n.State != dirpb.NodeState_NODE_UP {
		return fmt.Errorf("memory node %d, incarnation %d, up: %w", c.GetNodeId(), c.GetIncarnation(), ErrNotFound)
	}
	for _, id := range c.SessionIds {
		if x := s.sessions[id]; x != nil {
			s.confirm(x, c.NodeId, c.Incarnation)
		}
	}
	return nil
}

// confirm notes that nothing of x can land any more in what one process of a
// memory node lends.
func (s *State) confirm(x *fsmpb.Session, node uint32, incarnation uint64) {
	i := slices.IndexFunc(x.Pending, func(p *fsmpb.Incarnation) bool {
		return p.NodeId == node && p.Incarnation == incarnation
	})
	if i < 0 {
		return
	}
	if len(x.Pending) == 1 {
		s.dropSession(x, true, false)
		return
	}
	x = proto.CloneOf(x)
	x.Pending = slices.Delete(x.Pending, i, i+1)
	s.putSession(x)
}
