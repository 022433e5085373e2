package server

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/hashicorp/raft"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/rights"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
	"github.com/kvd-project/kvd/server/lead"
)

const (
	// maxLanes is the number of lanes that a session may number.
	maxLanes = 256
	// activationWait is how long OpenSession waits at most for memory nodes to make the
	// first of the namespace's regions, and othersWait for the others once one is made.
	activationWait = 5 * time.Second
	othersWait     = time.Second
	// renewsPerLease is how often a session or memory node should be heard within
	// one lease.
	renewsPerLease = 4
)

var errorCodes = []struct {
	err  error
	code codes.Code
}{
	{fsm.ErrInvalid, codes.InvalidArgument},
	{fsm.ErrNotFound, codes.NotFound},
	{fsm.ErrExists, codes.AlreadyExists},
	{fsm.ErrRefused, codes.FailedPrecondition},
	{fsm.ErrFull, codes.ResourceExhausted},
	{fsm.ErrForeign, codes.PermissionDenied},
	{fsm.ErrUnavailable, codes.Unavailable},
}

// do proposes c and turns a refusal into a status.
func (n *Node) do(ctx context.Context, l *leadership, c *fsmpb.Command) (fsm.Result, error) {
	res, err := n.propose(ctx, l, c)
	if err != nil || res.Err == nil {
		return res, err
	}
	return res, refusal(res.Err)
}

// nothingDone is the status of a call that is unavailable now and took no effect.
func nothingDone(text string) error {
	s := status.New(codes.Unavailable, text)
	if d, err := s.WithDetails(&dirpb.NothingDone{}); err == nil {
		s = d
	}
	return s.Err()
}

// refusal is the status of an error of package fsm's kinds, which changed nothing.
func refusal(err error) error {
	for _, e := range errorCodes {
		if errors.Is(err, e.err) {
			if e.code == codes.Unavailable {
				return nothingDone(err.Error() + "; nothing was done")
			}
			return status.Error(e.code, err.Error())
		}
	}
	return status.Error(codes.Internal, err.Error())
}

func (n *Node) renewMillis() uint64 {
	return uint64(max(n.opts.Lease/renewsPerLease, time.Millisecond).Milliseconds())
}

// heartbeatMillis is how long a heartbeat waits for news.
func (n *Node) heartbeatMillis() uint64 {
	return uint64(max(min(n.opts.Lease/3, waitMost), time.Millisecond).Milliseconds())
}

// label makes s fit for the state: short, and UTF-8 after the cut.
func label(s string) string {
	if len(s) > fsm.MaxLabelLen {
		s = strings.ToValidUTF8(s[:fsm.MaxLabelLen], "")
	}
	return s
}

// ---- sessions --------------------------------------------------------------

// OpenSession begins a session in a namespace.
func (n *Node) OpenSession(ctx context.Context, q *dirpb.OpenSessionRequest) (*dirpb.OpenSessionReply, error) {
	l, err := n.leader()
	if err != nil {
		return nil, err
	}
	name := q.Namespace
	if name == "" {
		name = n.opts.DefaultNamespace
	}
	w, err := n.namespace(ctx, l, name, q.WasNamespaceId != 0)
	if err != nil {
		return nil, err
	}
	if err := checkBackground(ctx, q.Background); err != nil {
		return nil, err
	}
	caller := callerOf(ctx, q.Background)
	c := &fsmpb.OpenSession{
		NamespaceId: w.Id, Client: label(q.Client), HostId: label(q.HostId), ReadOnly: q.ReadOnly, Background: q.Background,
		Identity: caller.Identity, Groups: caller.Groups, Everywhere: caller.Everywhere,
	}
	// The state machine refuses it as well; who may not come in waits for nothing, and makes no entry in the log.
	n.machine.view(func(s *fsm.State) { err = s.CheckOpen(c) })
	if err != nil {
		return nil, refusal(err)
	}
	if err := n.awaitActive(ctx, w); err != nil {
		return nil, err
	}
	c.Epoch, _ = l.epochs()
	c.Lanes = lanesOf(w)
	c.OpenedUnixMillis = time.Now().UnixMilli()
	res, err := n.do(ctx, l, &fsmpb.Command{Op: &fsmpb.Command_OpenSession{OpenSession: c}})
	if err != nil {
		return nil, err
	}
	x := res.Session
	reply := &dirpb.OpenSessionReply{
		SessionId: x.Id, Discriminator: x.Discriminator, NamespaceId: w.Id,
		LeaseMillis: uint64(n.opts.Lease.Milliseconds()), RenewMillis: n.renewMillis(), MaxLanes: x.Lanes, Term: l.term,
	}
	n.withState(l, func(j *lead.Leader, s *fsm.State, now time.Duration) {
		reply.MapVersion = s.MapVersion()
		if reply.Epoch, reply.MinEpoch, err = j.Opened(s, x.Id, now); err != nil {
			return
		}
		if reply.Token, reply.TokenNumber, err = n.sign(s, j.Signs(s), x); err == nil {
			j.Holds(x.Id, reply.TokenNumber)
		}
	})
	if err != nil {
		return nil, status.Error(codes.Unavailable, err.Error())
	}
	return reply, nil
}

// namespace finds a namespace, and creates the default one on first use; again is a use
// that is not the first.
func (n *Node) namespace(ctx context.Context, l *leadership, name string, again bool) (*dirpb.Namespace, error) {
	var w *dirpb.Namespace
	find := func() { n.machine.view(func(s *fsm.State) { w = s.NamespaceNamed(name) }) }
	switch find(); {
	case w.GetDeleting():
		return nil, status.Errorf(codes.NotFound, "namespace %q is being deleted", name)
	case w != nil:
		return w, nil
	case again:
		return nil, status.Errorf(codes.NotFound, "namespace %.64q was deleted", name)
	case name != n.opts.DefaultNamespace:
		return nil, status.Errorf(codes.NotFound, "namespace %.64q does not exist", name)
	}
	caller := callerOf(ctx, false)
	if !caller.Everywhere {
		return nil, status.Errorf(codes.NotFound, "namespace %.64q does not exist; an operator makes it: kvctl namespace create %s --owner WHO", name, name)
	}
	_, err := n.do(ctx, l, audited(ctx, createNamespace(&dirpb.CreateNamespaceRequest{Name: name, Owner: caller.Identity}), actCreateNamespace, name, "first-use", true))
	if err != nil && status.Code(err) != codes.AlreadyExists {
		return nil, err
	}
	if find(); w == nil {
		return nil, status.Errorf(codes.Internal, "namespace %q vanished", name)
	}
	return w, nil
}

func createNamespace(q *dirpb.CreateNamespaceRequest) *fsmpb.Command {
	var seed [8]byte
	rand.Read(seed[:]) // crypto/rand: never fails
	return &fsmpb.Command{Op: &fsmpb.Command_CreateNamespace{CreateNamespace: &fsmpb.CreateNamespace{
		Namespace: q, HashSeed: binary.LittleEndian.Uint64(seed[:]),
	}}}
}

// awaitActive waits until no placement group of w is being created. When that
// takes too long, one active placement group is enough to begin. It ends before ctx does, so
// that the caller hears why.
func (n *Node) awaitActive(ctx context.Context, w *dirpb.Namespace) error {
	patience := activationWait
	if end, ok := ctx.Deadline(); ok {
		patience = min(patience, time.Until(end)*3/4)
	}
	timer := time.NewTimer(patience)
	defer timer.Stop()
	others := time.NewTimer(min(othersWait, patience))
	defer others.Stop()
	enough := false // waited for the others
	for {
		changed := n.machine.move()
		var creating, usable, all int
		gone := false
		n.machine.view(func(s *fsm.State) {
			gone = s.Namespace(w.Id) == nil
			for _, pg := range s.PGs(w.Id) {
				all++
				switch pg.State {
				case dirpb.PGState_PG_CREATING:
					creating++
				case dirpb.PGState_PG_LOST:
				default:
					usable++
				}
			}
		})
		switch {
		case gone:
			return status.Errorf(codes.NotFound, "namespace %q was deleted", w.Name)
		case usable > 0 && (creating == 0 || enough):
			return nil
		}
		late := nothingDone(fmt.Sprintf("namespace %q: %d of %d placement groups are active; no session was opened", w.Name, usable, all))
		if creating == 0 {
			return late
		}
		select {
		case <-changed:
		case <-others.C:
			enough = true
		case <-timer.C:
			if usable > 0 {
				return nil
			}
			return late
		case <-ctx.Done():
			return late
		case <-n.ctx.Done():
			return n.stopping()
		}
	}
}

func (n *Node) stopping() error {
	return nothingDone("this directory node is stopping; nothing was done")
}

func sessionGone(id uint32) error {
	return status.Errorf(codes.NotFound, "session %d is fenced, being fenced, or was never opened", id)
}

// Renew extends a session's lease and exchanges reclaim epochs.
func (n *Node) Renew(ctx context.Context, q *dirpb.RenewRequest) (*dirpb.RenewReply, error) {
	l, err := n.confirmed(ctx)
	if err != nil {
		return nil, err
	}
	if err := n.takeStatus(ctx, l, q); err != nil {
		return nil, err
	}
	reply := &dirpb.RenewReply{LeaseMillis: uint64(n.opts.Lease.Milliseconds()), Term: l.term}
	var a lead.Answer
	n.withState(l, func(x *lead.Leader, s *fsm.State, now time.Duration) {
		x.Advance(s, now)
		reply.MapVersion = s.MapVersion()
		a, err = x.Renew(s, now, lead.Renewal{
			Session: q.SessionId, Report: q.ReportEpoch, Acked: q.AckedMapVersion, Quiesced: q.QuiescedMapVersion,
			Number: q.Number, Term: q.Term, HandBacks: q.HandBacks, Returns: q.Returns, Held: q.Held,
			InLimbo: q.InLimbo, Callable: len(l.mu.watches[q.SessionId]) > 0, Token: q.TokenNumber,
		})
		if err == nil {
			reply.Token, reply.TokenNumber, err = n.signAgain(x, s, q.SessionId, q.TokenNumber)
		}
	})
	if err != nil {
		return nil, refusal(err)
	}
	n.renewals.Add(1)
	reply.QuietMillis = uint64(a.Quiet.Milliseconds())
	reply.Epoch, reply.MinEpoch, reply.Deliveries, reply.Supply = a.Epoch, a.Least, a.Deliveries, a.Supply
	if a.Moved {
		l.wake()
	} else if a.Returned || q.InLimbo {
		l.rouse()
	}
	return reply, nil
}

// Renewals is how many renewals of sessions this process has answered, as the leader.
func (n *Node) Renewals() uint64 { return n.renewals.Load() }

// CloseSession ends a session whose client has stopped.
func (n *Node) CloseSession(ctx context.Context, q *dirpb.CloseSessionRequest) (*dirpb.CloseSessionReply, error) {
	l, err := n.leader()
	if err != nil {
		return nil, err
	}
	epoch, _ := l.epochs()
	_, err = n.do(ctx, l, &fsmpb.Command{Op: &fsmpb.Command_CloseSession{CloseSession: &fsmpb.CloseSession{
		SessionId: q.SessionId, Runs: q.Runs, Epoch: epoch, Leaked: q.Leaked, Settled: q.Settled,
	}}})
	if err != nil {
		return nil, err
	}
	n.withState(l, func(x *lead.Leader, s *fsm.State, now time.Duration) {
		x.Closed(s, now, q.SessionId, q.HandBacks, q.Held)
	})
	return &dirpb.CloseSessionReply{}, nil
}

// GrantExtent gives a session memory, or tells how much is on its way.
func (n *Node) GrantExtent(ctx context.Context, q *dirpb.GrantExtentRequest) (*dirpb.GrantExtentReply, error) {
	l, err := n.leader()
	if err != nil {
		return nil, err
	}
	c := &fsmpb.GrantExtent{SessionId: q.SessionId, PgId: q.PgId, WantUnits: q.WantUnits, PlaceUnits: q.PlaceUnits}
	var reply *dirpb.GrantExtentReply
	for again := true; again; {
		// Most that find nothing, of which there may be many, need no entry in the log.
		n.withState(l, func(x *lead.Leader, s *fsm.State, _ time.Duration) {
			_, c.MinEpoch = x.Epochs()
			c.PlaceUnits = q.PlaceUnits
			reply, err = s.FitGrant(c)
		})
		if err != nil {
			return nil, refusal(err)
		}
		if len(reply.Runs) == 0 {
			break
		}
		res, err := n.do(ctx, l, &fsmpb.Command{Op: &fsmpb.Command_GrantExtent{GrantExtent: c}})
		if err != nil {
			return nil, err
		}
		reply = res.Grant
		n.withState(l, func(x *lead.Leader, s *fsm.State, _ time.Duration) { x.Granted(s, q.PgId) })
		// Others may have been granted the longer runs meanwhile, and there are shorter ones.
		again = len(reply.Runs) == 0 && c.PlaceUnits > q.PlaceUnits
	}
	reply.Term = l.term
	if len(reply.Runs) == 0 {
		n.withState(l, func(x *lead.Leader, s *fsm.State, now time.Duration) {
			x.Short(s, q.PgId, q.PlaceUnits, now)
			reply.ComingUnits = x.Coming(s, s.PG(q.PgId).GetNamespaceId(), q.PgId, q.PlaceUnits, now)
		})
		l.rouse()
	}
	return reply, nil
}

// SessionState tells whether a session is fenced. Breaking the locks of a session that lives would be wrong.
// So an id that is unknown here counts as fenced only once a quorum confirms that this node leads.
func (n *Node) SessionState(ctx context.Context, q *dirpb.SessionStateRequest) (*dirpb.SessionStateReply, error) {
	if _, err := n.confirmed(ctx); err != nil {
		return nil, err
	}
	reply := &dirpb.SessionStateReply{}
	n.machine.view(func(s *fsm.State) { reply.Life = s.Life(q.SessionId) })
	return reply, nil
}

// WatchMap streams the map as it changes. A watcher that falls behind skips to
// the newest version. The leader calls sessions through it, too.
func (n *Node) WatchMap(q *dirpb.WatchMapRequest, stream grpc.ServerStreamingServer[dirpb.Map]) error {
	sent := q.AfterVersion
	if q.SessionId == 0 {
		if err := mayWatchAll(stream.Context()); err != nil {
			return err
		}
	}
	if err := n.awaitSession(stream.Context(), q.SessionId); err != nil {
		return err
	}
	var under *leadership
	call, leave := (<-chan struct{})(nil), func() {}
	defer func() { leave() }()
	for {
		reigns, moved := n.reigns.next(), n.machine.move()
		if l := n.leading.Load(); l != under && q.SessionId != 0 {
			leave()
			call, leave, under = nil, func() {}, l
			if l != nil {
				call, leave = l.callable(q.SessionId)
			}
		}
		var m *sharedMap
		var ended <-chan struct{}
		var err error
		n.machine.view(func(s *fsm.State) {
			x := s.Session(q.SessionId)
			switch {
			case q.SessionId == 0:
			case x == nil || x.Life != dirpb.SessionLife_SESSION_LIVE:
				err = sessionGone(q.SessionId)
			default:
				err = ownedBy(stream.Context(), fmt.Sprintf("session %d", q.SessionId), x.Identity)
				ended = n.machine.end(x.Id)
			}
			if err == nil && s.MapVersion() > sent {
				m = n.machine.maps.show(s, x)
			}
		})
		if err != nil {
			return err
		}
		if m != nil {
			sent = m.version
			b, err := m.encode()
			if err != nil {
				return status.Errorf(codes.Internal, "the map: %v", err)
			}
			if err := stream.SendMsg(b); err != nil {
				return err
			}
		}
		select {
		case <-moved:
		case <-ended:
		case <-reigns:
		case <-call:
			if err := stream.Send(&dirpb.Map{Version: sent, Renew: proto.Bool(true)}); err != nil {
				return err
			}
		case <-stream.Context().Done():
			return status.FromContextError(stream.Context().Err()).Err()
		case <-n.ctx.Done():
			return n.stopping()
		}
	}
}

// awaitSession refuses an id that this node may be too far behind to know: only
// a confirmed leader can say that it was never given out.
func (n *Node) awaitSession(ctx context.Context, id uint32) error {
	var last uint32
	n.machine.view(func(s *fsm.State) { last = s.Meta().SessionId })
	if id <= last {
		return nil
	}
	if _, err := n.confirmed(ctx); err != nil {
		return status.Errorf(codes.Unavailable, "session %d is not known here yet; nothing was done", id)
	}
	return nil
}

// ---- memory nodes ----------------------------------------------------------

// RegisterNode admits a process of a memory node.
func (n *Node) RegisterNode(ctx context.Context, q *dirpb.RegisterNodeRequest) (*dirpb.RegisterNodeReply, error) {
	l, err := n.verified(ctx)
	if err != nil {
		return nil, err
	}
	if err := fsm.CheckRegistration(q); err != nil {
		return nil, refusal(err)
	}
	caller := rights.Caller(ctx).String()
	// The state machine refuses it as well, but that of an earlier version does not.
	n.machine.view(func(s *fsm.State) { err = s.CheckNodeOwner(q.Name, caller) })
	if err != nil {
		return nil, refusal(err)
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
		Node: q, UnixMillis: time.Now().UnixMilli(), Identity: caller, ReclaimEpoch: n.reclaimEpoch(l), Recoveries: recoveries,
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
		n.log.Warn("directory: a memory node was restarted, and what it held is gone", "node", q.Name, "capacity_bytes", q.CapacityBytes)
	case fsm.ArrivalKept:
		n.log.Info("directory: a memory node was restarted with its memory", "node", q.Name, "boot", q.Boot)
	case fsm.ArrivalBack:
		n.log.Info("directory: a memory node that was down is back", "node", q.Name, "capacity_bytes", q.CapacityBytes, "retained_regions", len(q.Retained))
	case fsm.ArrivalStale:
		n.log.Error("directory: a memory node came with memory of an earlier time than that of the process that registered last: it is refused", "node", q.Name, "boot", q.Boot)
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
		return nil, status.Errorf(codes.InvalidArgument, "%d fenced sessions, want at most %d", len(q.FencedSessions), fsm.MaxSessions)
	}
	var up bool
	var beat uint64
	owed := make(map[uint32]bool)
	n.withState(l, func(x *lead.Leader, s *fsm.State, now time.Duration) {
		if otherBoot(s.Node(q.NodeId), q) {
			return
		}
		if up = x.Heartbeat(s, now, q.NodeId, q.Incarnation, q.Stats); up && x.TakesKey(s, q.NodeId, q.Incarnation, q.KeyGeneration) {
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
			reply.FenceSessions, reply.Sessions, reply.Keys = s.FenceWork(q.NodeId, q.Incarnation), s.Admitted(), s.Keys()
			reply.Quotas = quotasOf(s, reply.Regions)
			m := s.Node(q.NodeId)
			reply.Restart = m.GetPauseMillis() > 0 && !m.GetLeaving()
			reply.RegisterAgain = q.Boot != 0 && m.GetBoot() == 0 && s.KnowsBoots() || m.GetSilent()
			reply.UnknownNode = m.GetIncarnation() != q.Incarnation || m.GetState() != dirpb.NodeState_NODE_UP || otherBoot(m, q)
		})
		reply.News = newsOf(reply)
		if reply.UnknownNode || reply.News != q.News {
			return true
		}
		waited = true
		return false
	})
	if errors.Is(ctx.Err(), context.Canceled) {
		n.withState(l, func(x *lead.Leader, _ *fsm.State, now time.Duration) { x.Broke(q.NodeId, q.Incarnation, beat, now) })
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
		reply.Restart = m.GetIncarnation() == q.Incarnation && !otherBoot(m, q) && m.GetState() == dirpb.NodeState_NODE_DOWN && m.GetPauseMillis() > 0
	})
	return reply
}

// otherBoot reports whether a heartbeat is of a process of m that is not the one which is registered. Where one of the two is not said, it is
// of an earlier version.
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
		c = &fsmpb.Command{Op: &fsmpb.Command_NodeDown{NodeDown: &fsmpb.NodeDown{
			NodeId: q.NodeId, Incarnation: q.Incarnation, UnixMillis: time.Now().UnixMilli(), ReclaimEpoch: n.reclaimEpoch(l),
		}}}
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
				slices.ContainsFunc(s.PGs(0), func(pg *dirpb.PlacementGroup) bool { return pg.State == dirpb.PGState_PG_FROZEN })
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
	l, err := n.leader()
	if err != nil {
		return nil, err
	}
	if _, err := n.do(ctx, l, &fsmpb.Command{Op: &fsmpb.Command_PublishRegion{PublishRegion: q}}); err != nil {
		return nil, err
	}
	return &dirpb.PublishRegionReply{}, nil
}

// ---- operators -------------------------------------------------------------

// CreateNamespace lays out a namespace over the memory nodes that are up, for its owner. The owner is the
// caller unless another one is named. CreateNamespace refuses more copies than there are failure domains. If
// there are too few memory nodes it is unavailable, as more may be about to come.
func (n *Node) CreateNamespace(ctx context.Context, q *dirpb.CreateNamespaceRequest) (*dirpb.CreateNamespaceReply, error) {
	l, err := n.leader()
	if err != nil {
		return nil, err
	}
	// Not by the state machine, which would refuse what earlier versions have committed.
	n.machine.view(func(s *fsm.State) {
		if s.NamespaceNamed(q.Name) == nil {
			err = s.CheckDomains(q.Name, q.Replicas)
		}
	})
	if err != nil {
		return nil, refusal(err)
	}
	if q.Owner == "" {
		q.Owner = rights.Caller(ctx).String()
	}
	details := append([]any{"mode", enumText(cmp.Or(q.Mode, dirpb.NamespaceMode_NAMESPACE_STORE), "NAMESPACE_"), "replicas", q.Replicas, "bytes-per-node", q.BytesPerNode, "limit-bytes", q.LimitBytes, "owner", q.Owner},
		quotaDetails(q.Quota)...)
	if q.Nodes != 0 {
		details = append(details, "nodes", q.Nodes)
	}
	res, err := n.do(ctx, l, audited(ctx, createNamespace(q), actCreateNamespace, q.Name, details...))
	if err != nil {
		return nil, err
	}
	return &dirpb.CreateNamespaceReply{Namespace: res.Namespace}, nil
}

// SetNamespace changes a namespace's limit, number of copies, owner and quotas. The reply does not wait for
// copies that are made, or given up, from then on. Nor does it wait for sessions of the former owner that are
// fenced.
func (n *Node) SetNamespace(ctx context.Context, q *dirpb.SetNamespaceRequest) (*dirpb.SetNamespaceReply, error) {
	l, err := n.leader()
	if err != nil {
		return nil, err
	}
	details := []any{"replicas", q.Replicas}
	switch {
	case q.KeepLimit:
	case q.LimitBytes == 0:
		details = append(details, "limit-bytes", "none")
	default:
		details = append(details, "limit-bytes", q.LimitBytes)
	}
	if q.Nodes != 0 {
		details = append(details, "nodes", q.Nodes)
	}
	details = append(append(details, "owner", q.Owner), quotaDetails(q.Quota)...)
	res, err := n.do(ctx, l, audited(ctx, &fsmpb.Command{Op: &fsmpb.Command_SetNamespace{SetNamespace: q}}, actSetNamespace, q.Name, details...))
	if err != nil {
		return nil, err
	}
	return &dirpb.SetNamespaceReply{Namespace: res.Namespace}, nil
}

// DeleteNamespace takes a namespace away with all its keys. The reply does not wait for
// the sessions that are fenced, with the last of which it goes.
func (n *Node) DeleteNamespace(ctx context.Context, q *dirpb.DeleteNamespaceRequest) (*dirpb.DeleteNamespaceReply, error) {
	l, err := n.leader()
	if err != nil {
		return nil, err
	}
	res, err := n.do(ctx, l, audited(ctx, &fsmpb.Command{Op: &fsmpb.Command_DeleteNamespace{DeleteNamespace: q}}, actDeleteNamespace, q.Name,
		"id", q.Id, "end-sessions", q.EndSessions))
	if err != nil {
		return nil, err
	}
	if len(res.Changes) > 0 {
		n.log.Info("directory: namespace deleted", "namespace", q.Name, "id", res.Deleted.Id, "sessions_to_fence", res.Deleted.Fencing)
	}
	return res.Deleted, nil
}

// AcceptLoss notes that an operator knows what a namespace lost. It may be repeated.
func (n *Node) AcceptLoss(ctx context.Context, q *dirpb.AcceptLossRequest) (*dirpb.AcceptLossReply, error) {
	l, err := n.leader()
	if err != nil {
		return nil, err
	}
	res, err := n.do(ctx, l, audited(ctx, &fsmpb.Command{Op: &fsmpb.Command_AcceptLoss{AcceptLoss: q}}, actAcceptLoss, q.Name, "times", q.Lost))
	if err != nil {
		return nil, err
	}
	n.log.Info("directory: a loss was accepted", "namespace", q.Name, "times", q.Lost)
	return &dirpb.AcceptLossReply{Namespace: res.Namespace}, nil
}

// leaderStatusTimeout bounds how long ClusterStatus waits for the leader.
const leaderStatusTimeout = 2 * time.Second

// ClusterStatus is Status as the leader answers it, asked over the network if need be. If no leader answers,
// it is this node's own answer, which says how old it is.
func (n *Node) ClusterStatus(ctx context.Context, q *dirpb.StatusRequest) (*dirpb.StatusReply, error) {
	own, err := n.Status(ctx, q)
	addr := n.leaderGRPC()
	if err != nil || own.Leads || addr == "" {
		return own, err
	}
	ctx, cancel := context.WithTimeout(ctx, leaderStatusTimeout)
	defer cancel()
	var reply *dirpb.StatusReply
	err = n.call(ctx, addr, func(c dirpb.DirectoryClient) (err error) {
		reply, err = c.Status(ctx, q)
		return err
	})
	if err != nil || !reply.GetLeads() {
		return own, nil
	}
	return reply, nil
}

// Status shows what this node knows, and how old that is. Reclaim epochs, reports, node statistics, the
// progress of jobs and which directory nodes answer are the leader's alone.
func (n *Node) Status(context.Context, *dirpb.StatusRequest) (*dirpb.StatusReply, error) {
	reply := &dirpb.StatusReply{RaftApplied: n.machine.appliedIndex(), AnsweredBy: n.opts.ID, Identifies: n.opts.TLS != nil,
		KnowsLevel: fsm.Level, Version: n.opts.Version}
	l, err := n.leader()
	if reply.Leads = err == nil; !reply.Leads {
		reply.AgeMillis = -1
		if heard := n.raft.LastContact(); !heard.IsZero() {
			reply.AgeMillis = max(0, time.Since(heard).Milliseconds())
		}
	}
	reply.Position = n.machine.position()
	members := n.members()
	_, leader := n.raft.LeaderWithID()
	now := time.Now().UnixMilli()
	show := func(x *lead.Leader, s *fsm.State, uptime time.Duration) {
		reply.ClusterId, reply.Level = s.Meta().ClusterId, s.Level()
		reply.Map = s.Map(nil)
		reply.Usage = s.Usage()
		reply.Jobs = s.Jobs()
		reply.KeyUse = &dirpb.KeyUse{Generation: s.KeyGeneration(), MadeUnixMillis: s.Meta().KeyUnixMillis}
		if x != nil {
			reply.KeyUse = x.KeyUse(s)
			reply.Epoch, reply.MinEpoch = x.Epochs()
			reply.Ahead = x.Ahead()
			showNodes(reply.Map.Nodes, x, s, uptime)
			reply.NodeStats = x.Stats()
			reply.Gateways = l.meeting.show(s)
			reply.Jobs = x.Jobs(s, uptime)
			for _, u := range reply.Usage {
				a := x.Account(s, u.PgId, uptime)
				u.LiveUnits, u.FreeUnits, u.ForeignUnits, u.LimboUnits = a.Live, a.Free, a.Foreign, a.Limbo
				u.WaitingUnits, u.ComingUnits, u.LostUnits, u.Short, u.Estimated = a.Waiting, a.Coming, a.Lost, a.Short, true
			}
		}
		for _, d := range s.Directory() {
			if m, ok := members[d.Id]; ok {
				row := &dirpb.DirectoryNode{
					Id: d.Id, RaftAddr: d.RaftAddr, GrpcAddr: d.GrpcAddr,
					Leader: m.ID == leader, Voter: m.Suffrage == raft.Voter, Incarnation: diskOf(m.ID).incarnation,
				}
				if reply.Leads {
					row.SilentMillis = uint64(n.peers.silence(m.ID, l.term, n.opts.ElectionTimeout).Milliseconds())
				}
				reply.Directory = append(reply.Directory, row)
			}
		}
		for _, y := range s.Sessions() {
			info := &dirpb.SessionInfo{
				Id: y.Id, Client: y.Client, Life: y.Life, Namespace: s.Namespace(y.NamespaceId).GetName(),
				AgeMillis: uint64(max(0, now-y.OpenedUnixMillis)), ReportEpoch: y.Epoch, Identity: y.Identity,
			}
			if x != nil {
				if epoch, ok := x.Report(y.Id); ok {
					info.ReportEpoch = epoch
				}
			}
			reply.Sessions = append(reply.Sessions, info)
		}
	}
	if reply.Leads {
		n.withState(l, show)
	} else {
		n.machine.view(func(s *fsm.State) { show(nil, s, 0) })
	}
	return reply, nil
}

var _ dirpb.DirectoryServer = (*Node)(nil)
