package memnode

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/kvd-project/kvd/internal/admit"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/identity"
	"github.com/kvd-project/kvd/internal/token"
	"github.com/kvd-project/kvd/rdma"
)

// A connection's private data is a session's token, which internal/token draws, and behind it the
// number of the lane; see admit.LaneSize.

// peer is one connection. A session has at most one per lane, and a second one beside it.
type peer struct {
	session, lane, namespace uint32
	p                        rdma.Peer
}

// fence is a session whose connections are being fenced. Guarded by Node.mu.
type fence struct {
	asked     bool // the directory waits for the confirmation; else the session has closed
	confirmed bool // nothing of the session can land here
}

// accept decides on a connection from its private data. A connection of a lane
// that has one already replaces it: the old one is fenced first, so a client
// that is accepted knows that nothing it posted before can land any more. That of a lane's second connection is fenced
// before either is replaced.
func (n *Node) accept(d *device, r rdma.ConnRequest) (*rdma.PD, rdma.Access, error) {
	pd, access, err := n.admit(d, r)
	if err != nil {
		n.log.Debug("connection refused", "provider", d.name, "remote", r.Remote, "err", err)
	}
	return pd, access, err
}

func (n *Node) admit(d *device, r rdma.ConnRequest) (*rdma.PD, rdma.Access, error) {
	var who identity.Identity
	if r.TLS != nil {
		var err error
		if who, err = n.o.Identities.Admit(r.TLS, "a connection to a memory node", admit.Connects); err != nil {
			return nil, 0, err
		}
	}
	if d == n.hca && len(r.Private) == loopPrivateSize {
		return n.admitLoop(r)
	}
	if len(r.Private) < admit.LaneSize {
		return nil, 0, fmt.Errorf("private data of %d bytes, want a session token and a lane", len(r.Private))
	}
	n.mu.Lock()
	reg := n.mu.reg
	n.mu.Unlock()
	if reg == nil {
		return nil, 0, ErrNotRegistered
	}
	tok := r.Private[:len(r.Private)-admit.LaneSize]
	g, err := n.verify(tok, r.TLS != nil, who)
	if err != nil {
		return nil, 0, err
	}
	lane := binary.LittleEndian.Uint32(r.Private[len(tok):])
	probe := lane >= token.ProbeLane && lane < token.ProbeLane+token.ProbeLanes
	if lane&^token.BulkLane >= uint32(g.Lanes) && !probe {
		return nil, 0, fmt.Errorf("%w: lane %d of session %d, want below %d", ErrLanes, lane, g.Session, g.Lanes)
	}
	access := rdma.AccessRemoteRead
	if !g.ReadOnly {
		access |= rdma.AccessRemoteWrite | rdma.AccessRemoteAtomic
	}
	for range 4 {
		pd, old, err := n.recordPeer(d, reg, g, lane, r.Peer)
		if err != nil {
			return nil, 0, err
		}
		if old == nil {
			return pd, access, nil
		}
		if err := n.fencePeer(old); err != nil {
			return nil, 0, fmt.Errorf("lane %d of session %d has a connection that cannot be fenced: %w", lane,
				g.Session, err)
		}
	}
	return nil, 0, fmt.Errorf("lane %d of session %d is being connected by others", lane, g.Session)
}

// recordPeer records the connection, unless the lane has one, which it returns.
func (n *Node) recordPeer(d *device, reg *registration, g token.Grant, lane uint32, p rdma.Peer) (*rdma.PD, *peer,
	error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.mu.reg != reg {
		return nil, nil, ErrNotRegistered
	}
	if n.endedLocked(g.Session) {
		return nil, nil, fmt.Errorf("session %d: %w", g.Session, ErrEnded)
	}
	if !n.hasRegionLocked(g.Namespace) {
		return nil, nil, fmt.Errorf("%w: namespace %d of session %d", ErrNoRegion, g.Namespace, g.Session)
	}
	for _, l := range [...]uint32{lane, lane | token.BulkLane} {
		if old := n.mu.peers[g.Session][l]; old != nil {
			return nil, old, nil
		}
	}
	pd, err := d.pdLocked(g.Namespace)
	if err != nil {
		return nil, nil, err
	}
	lanes := n.mu.peers[g.Session]
	if lanes == nil {
		lanes = map[uint32]*peer{}
		n.mu.peers[g.Session] = lanes
	}
	c := &peer{session: g.Session, lane: lane, namespace: g.Namespace, p: p}
	lanes[lane], n.mu.byPeer[p] = c, c
	return pd, nil, nil
}

// pdLocked gives the namespace's PD. Only namespaces with a region here have one,
// and forgetNamespaces releases those of deleted ones.
func (d *device) pdLocked(namespace uint32) (*rdma.PD, error) {
	if pd := d.pds[namespace]; pd != nil {
		return pd, nil
	}
	pd, err := d.dev.AllocPD()
	if err != nil {
		return nil, err
	}
	d.pds[namespace] = pd
	d.holdToQuotaLocked(namespace)
	return pd, nil
}

// holdToQuotasLocked has namespaces held to these quotas, and others to none.
func (n *Node) holdToQuotasLocked(quotas []*dirpb.NamespaceQuota) {
	by := make(map[uint32]*dirpb.NamespaceQuota, len(quotas))
	for _, q := range quotas {
		by[q.GetNamespaceId()] = q
	}
	for _, d := range n.devices {
		d.quotas = by
		for ns := range d.pds {
			d.holdToQuotaLocked(ns)
		}
	}
}

func (d *device) holdToQuotaLocked(namespace uint32) {
	// It fails if an adapter or the clients execute verbs, whom nobody here can make wait.
	_ = d.pds[namespace].LimitRate(d.quotas[namespace].GetTcpOpsPerSecond())
}

// gone forgets a connection of which nothing can land any more.
func (n *Node) gone(p rdma.Peer) {
	n.mu.Lock()
	defer n.mu.Unlock()
	c := n.mu.byPeer[p]
	if c == nil {
		return
	}
	delete(n.mu.byPeer, p)
	lanes := n.mu.peers[c.session]
	delete(lanes, c.lane)
	if len(lanes) == 0 {
		delete(n.mu.peers, c.session)
	}
}

// fencePeer fences one connection and forgets it.
func (n *Node) fencePeer(c *peer) error {
	ctx, cancel := context.WithTimeout(n.ctx, n.o.FenceTimeout)
	defer cancel()
	if err := c.p.Fence(ctx); err != nil {
		return fmt.Errorf("fence %s (session %d lane %d): %w", c.p.Remote(), c.session, c.lane, err)
	}
	n.gone(c.p)
	return nil
}

// endedLocked reports whether a session may not connect: it has closed, is being fenced or
// was.
func (n *Node) endedLocked(session uint32) bool {
	return n.mu.sessions.Ended(session)
}

// learnLocked takes in which sessions live, and begins to fence the connections of those
// that have ended. Those in asked are fenced for the directory, which waits until that is
// confirmed.
func (n *Node) learnLocked(s *dirpb.Sessions, asked []uint32) {
	n.mu.sessions.Learn(s)
	for _, id := range asked {
		n.fenceLocked(id, true)
	}
	for id := range n.mu.peers {
		if n.endedLocked(id) {
			n.fenceLocked(id, false)
		}
	}
}

// fenceLocked sees to it that the connections of a session, which has ended, are fenced.
func (n *Node) fenceLocked(session uint32, asked bool) {
	if f := n.mu.fencing[session]; f != nil {
		f.asked = f.asked || asked
		return
	}
	f := &fence{asked: asked}
	n.mu.fencing[session] = f
	if len(n.mu.peers[session]) == 0 {
		f.confirmed = true
		n.kickHeartbeat()
		return
	}
	n.wg.Go(func() {
		ok := n.fencePeers(fmt.Sprintf("session %d", session), func() []*peer {
			var peers []*peer
			for _, p := range n.mu.peers[session] {
				peers = append(peers, p)
			}
			return peers
		})
		if !ok {
			return
		}
		n.mu.Lock()
		if f.confirmed = true; !f.asked && n.mu.fencing[session] == f {
			delete(n.mu.fencing, session)
		}
		n.mu.Unlock()
		n.log.Info("session fenced", "session", session)
		n.kickHeartbeat()
	})
}

// endLeftovers ends the connections of a namespace's sessions that do not live any more. The directory waits for no
// fence of a memory node that lends the namespace nothing, so none may be left when it does.
func (n *Node) endLeftovers(namespace uint32) error {
	n.mu.Lock()
	var left []*peer
	for _, p := range n.mu.byPeer {
		if p.namespace == namespace && n.endedLocked(p.session) {
			left = append(left, p)
		}
	}
	n.mu.Unlock()
	for _, p := range left {
		if err := n.fencePeer(p); err != nil {
			return fmt.Errorf("a session that has ended is connected still: %w", err)
		}
	}
	return nil
}

// fencePeers fences the connections that list, called with the lock held, names
// until it names none; it keeps trying those that do not confirm. False: the
// node is closed.
func (n *Node) fencePeers(who string, list func() []*peer) bool {
	warned := false
	for pause := 10 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		n.mu.Lock()
		peers := list()
		n.mu.Unlock()
		if len(peers) == 0 {
			return true
		}
		results := make(chan error, len(peers))
		for _, p := range peers {
			go func() { results <- n.fencePeer(p) }()
		}
		var errs []error
		for range peers {
			if err := <-results; err != nil {
				errs = append(errs, err)
			}
		}
		if len(errs) == 0 {
			continue
		}
		if n.ctx.Err() != nil {
			return false
		}
		if !warned {
			warned = true
			n.log.Error("cannot confirm a fence; trying on, and nothing of it is reused before", "who", who, "err",
				errors.Join(errs...))
		}
		if !n.wait(pause, nil) {
			return false
		}
	}
}
