package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/rights"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
	"github.com/kvd-project/kvd/server/lead"
)

// RegisterNode admits a process of a memory node.
func (n *Node) RegisterNode(ctx context.Context, q *dirpb.RegisterNodeRequest) (*dirpb.RegisterNodeReply, error) {
	l, err := n.verified(ctx)
	if err != nil {
		return nil, err
	}
	caller := rights.Caller(ctx).String()
	if err := n.ask(l, func(_ *lead.Leader, s *fsm.State, _ time.Duration) error {
		// The state machine refuses another owner as well, but that of an earlier version does not.
		return cmp.Or(fsm.CheckRegistration(q), s.CheckNodeOwner(q.Name, caller))
	}); err != nil {
		return nil, err
	}
	known, _ := n.nodeNamed(q.Name)
	if err := n.vouch(l, label(q.Name), known, q.Position); err != nil {
		return nil, err
	}
	if of := n.recoveredSince(q.Position); of != 0 {
		reply := &dirpb.RegisterNodeReply{Recovered: of}
		n.machine.view(func(s *fsm.State) { reply.ClusterId = s.Meta().ClusterId })
		return reply, nil
	}
	recoveries := q.Position.GetRecoveries()
	q.Position = nil // no part of the state
	c := &fsmpb.Command{Op: &fsmpb.Command_RegisterNode{RegisterNode: &fsmpb.RegisterNode{
		Node: q, UnixMillis: time.Now().UnixMilli(), Identity: caller, ReclaimEpoch: n.reclaimEpoch(l),
		Recoveries: recoveries,
	}}}
	if _, err := n.nodeNamed(q.Name); err != nil { // its first time; restarts are no change that somebody made
		audited(ctx, c, actRegisterNode, q.Name, "capacity-bytes", q.CapacityBytes, "domain", q.Domain)
	}
	arrived, err := n.arrives(l, q)
	if err != nil {
		return nil, err
	}
	defer arrived()
	res, err := n.do(ctx, l, c)
	if err != nil {
		return nil, err
	}
	switch res.Arrival {
	case fsm.ArrivalNew:
		n.log.Info("directory: a memory node is new", "node", q.Name, "capacity_bytes", q.CapacityBytes)
	case fsm.ArrivalRestarted:
		n.log.Warn("directory: a memory node was restarted, and what it held is gone", "node", q.Name, "capacity_bytes",
			q.CapacityBytes)
	case fsm.ArrivalKept:
		n.log.Info("directory: a memory node was restarted with its memory", "node", q.Name, "boot", q.Boot)
	case fsm.ArrivalBack:
		n.log.Info("directory: a memory node that was down is back", "node", q.Name, "capacity_bytes", q.CapacityBytes,
			"retained_regions", len(q.Retained))
	case fsm.ArrivalStale:
		n.log.Error("directory: a memory node came with memory of an earlier time than that of the process that "+
			"registered last: it is refused", "node", q.Name, "boot", q.Boot)
	}
	stale := res.Arrival == fsm.ArrivalStale
	reply := &dirpb.RegisterNodeReply{NodeId: res.NodeID, HeartbeatMillis: n.heartbeatMillis(), Stale: stale}
	n.withState(l, func(x *lead.Leader, s *fsm.State, now time.Duration) {
		reply.Keys, reply.ClusterId, reply.Sessions = s.Keys(), s.Meta().ClusterId, s.Admitted()
		if !stale {
			x.Heartbeat(s, now, res.NodeID, q.Incarnation, nil)
		}
	})
	reply.Position = n.machine.position()
	return reply, nil
}

// reclaimEpoch is E.
func (n *Node) reclaimEpoch(l *leadership) (epoch uint64) {
	n.withState(l, func(x *lead.Leader, _ *fsm.State, _ time.Duration) { epoch, _ = x.Epochs() })
	return epoch
}

// Heartbeat extends a memory node's lease and tells it what to do. Its lists of
// regions and sessions are obeyed, so they must not come from a leader that was deposed.
func (n *Node) Heartbeat(ctx context.Context, q *dirpb.HeartbeatRequest) (*dirpb.HeartbeatReply, error) {
	l, err := n.verified(ctx)
	if err != nil {
		return nil, err
	}
	name := ""
	n.machine.view(func(s *fsm.State) { name = s.Node(q.NodeId).GetName() })
	if err := n.vouch(l, cmp.Or(name, fmt.Sprintf("memory node %d", q.NodeId)), q.NodeId, q.Position); err != nil {
		return nil, err
	}
	if len(q.FencedSessions) > fsm.MaxSessions {
		return nil, status.Errorf(codes.InvalidArgument, "%d fenced sessions, want at most %d", len(q.FencedSessions),
			fsm.MaxSessions)
	}
	var up bool
	var beat uint64
	owed := make(map[uint32]bool)
	n.withState(l, func(x *lead.Leader, s *fsm.State, now time.Duration) {
		if otherBoot(s.Node(q.NodeId), q) {
			return
		}
		if up = x.Heartbeat(s, now, q.NodeId, q.Incarnation, cleanStats(q.Stats)); up &&
			x.TakesKey(s, q.NodeId, q.Incarnation, q.KeyGeneration) {
			l.wake() // sessions are to have tokens of it
		}
		beat = x.Beat(q.NodeId)
		for _, id := range s.FenceWork(q.NodeId, q.Incarnation) {
			owed[id] = true
		}
	})
	if !up {
		return n.unknown(q), nil
	}
	if of := n.recoveredSince(q.Position); of != 0 {
		return &dirpb.HeartbeatReply{Recovered: of}, nil
	}
	confirm := &fsmpb.ConfirmFence{NodeId: q.NodeId, Incarnation: q.Incarnation}
	for _, id := range q.FencedSessions {
		if owed[id] {
			confirm.SessionIds = append(confirm.SessionIds, id)
		}
	}
	if len(confirm.SessionIds) > 0 {
		_, err := n.do(ctx, l, &fsmpb.Command{Op: &fsmpb.Command_ConfirmFence{ConfirmFence: confirm}})
		if status.Code(err) == codes.NotFound {
			return n.unknown(q), nil
		}
		if err != nil {
			return nil, err
		}
	}
	reply := &dirpb.HeartbeatReply{}
	waited, epoch := false, n.reclaimEpoch(l) // it may be more by then: a memory node retains something for longer
	n.await(ctx, l, q.WaitMillis, n.machine.news, func() bool {
		n.machine.view(func(s *fsm.State) {
			reply.Regions = s.WantRegions(q.NodeId, q.Incarnation)
			reply.RetainPgs = s.RetainedBy(q.NodeId, epoch)
			reply.FenceSessions, reply.Sessions, reply.Keys = s.FenceWork(q.NodeId, q.Incarnation), s.Admitted(),
				s.Keys()
			reply.Quotas = quotasOf(s, reply.Regions)
			m := s.Node(q.NodeId)
			reply.Restart = m.GetPauseMillis() > 0 && !m.GetLeaving()
			reply.RegisterAgain = q.Boot != 0 && m.GetBoot() == 0 && s.KnowsBoots() || m.GetSilent()
			reply.UnknownNode = m.GetIncarnation() != q.Incarnation || m.GetState() != dirpb.NodeState_NODE_UP ||
				otherBoot(m, q)
		})
		reply.News = newsOf(reply)
		if reply.UnknownNode || reply.News != q.News {
			return true
		}
		waited = true
		return false
	})
	if errors.Is(ctx.Err(), context.Canceled) {
		n.withState(l, func(x *lead.Leader, _ *fsm.State, now time.Duration) {
			x.Broke(q.NodeId, q.Incarnation, beat, now)
		})
	}
	if waited {
		if n.ctx.Err() != nil || n.leading.Load() != l {
			return nil, n.notLeader()
		}
		now, err := n.confirmed(ctx)
		if err != nil {
			return nil, err
		}
		if now != l {
			return nil, n.notLeader()
		}
	}
	if reply.UnknownNode {
		return n.unknown(q), nil
	}
	reply.Position = n.machine.position()
	return reply, nil
}

// unknown answers the heartbeat of a process that is not registered, or no more.
func (n *Node) unknown(q *dirpb.HeartbeatRequest) *dirpb.HeartbeatReply {
	reply := &dirpb.HeartbeatReply{UnknownNode: true}
	n.machine.view(func(s *fsm.State) {
		m := s.Node(q.NodeId)
		reply.Restart = m.GetIncarnation() == q.Incarnation && !otherBoot(m, q) &&
			m.GetState() == dirpb.NodeState_NODE_DOWN && m.GetPauseMillis() > 0
	})
	return reply
}

// otherBoot reports whether a heartbeat is of a process of m that is not the one which is registered. Where one of the
// two is not said, it is of an earlier version.
func otherBoot(m *dirpb.Node, q *dirpb.HeartbeatRequest) bool {
	return q.Boot != 0 && m.GetBoot() != 0 && m.Boot != q.Boot
}

// LeaveNode takes the memory of a process that is about to stop out of use, and waits until
// nobody uses it.
func (n *Node) LeaveNode(ctx context.Context, q *dirpb.LeaveNodeRequest) (*dirpb.LeaveNodeReply, error) {
	l, err := n.leader()
	if err != nil {
		return nil, err
	}
	c := &fsmpb.Command{Op: &fsmpb.Command_LeaveNode{LeaveNode: q}}
	if !n.awaitIdle(ctx, l, q.NodeId) {
		c = &fsmpb.Command{
			Op: &fsmpb.Command_NodeDown{
				NodeDown: &fsmpb.NodeDown{NodeId: q.NodeId, Incarnation: q.Incarnation,
					UnixMillis: time.Now().UnixMilli(), ReclaimEpoch: n.reclaimEpoch(l)}}}
	}
	_, err = n.do(ctx, l, c)
	if err != nil && status.Code(err) != codes.NotFound { // it may be down already
		return nil, err
	}
	for {
		changed := n.machine.move()
		var used bool
		n.machine.view(func(s *fsm.State) {
			m := s.Node(q.NodeId)
			used = m.GetIncarnation() == q.Incarnation && m.GetState() == dirpb.NodeState_NODE_UP ||
				slices.ContainsFunc(s.PGs(0), func(pg *dirpb.PlacementGroup) bool {
					return pg.State == dirpb.PGState_PG_FROZEN
				})
		})
		if !used {
			return &dirpb.LeaveNodeReply{}, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, status.FromContextError(ctx.Err()).Err()
		case <-n.ctx.Done():
			return nil, n.notLeader()
		}
		if n.raft.CurrentTerm() != l.term {
			return nil, n.notLeader()
		}
	}
}

// awaitIdle waits until a memory node may leave its placement groups; false: they are busy
// for too long.
func (n *Node) awaitIdle(ctx context.Context, l *leadership, node uint32) bool {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for began := time.Now(); ; {
		var idle, late bool
		n.withState(l, func(x *lead.Leader, s *fsm.State, now time.Duration) {
			idle, late = x.MayLeave(s, now, node), time.Since(began) > x.Patience()
		})
		if idle || late || ctx.Err() != nil || n.ctx.Err() != nil {
			return idle
		}
		<-tick.C
	}
}

// PublishRegion makes a region's keys part of the map.
func (n *Node) PublishRegion(ctx context.Context, q *dirpb.PublishRegionRequest) (*dirpb.PublishRegionReply, error) {
	_, err := n.asked(ctx, &fsmpb.Command{Op: &fsmpb.Command_PublishRegion{PublishRegion: q}})
	return &dirpb.PublishRegionReply{}, err
}
