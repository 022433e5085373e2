package server

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"strings"
	"time"

	"github.com/hashicorp/raft"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/token"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

const (
	// maxLanes is the number of lanes that a session may number.
	maxLanes = 256
	// activationWait is how long OpenSession waits for memory nodes to make the
	// namespace's regions.
	activationWait = 5 * time.Second
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
	{fsm.ErrUnavailable, codes.Unavailable},
}

// do proposes c and turns a refusal into a status.
func (n *Node) do(ctx context.Context, l *leadership, c *fsmpb.Command) (fsm.Result, error) {
	res, err := n.propose(ctx, l, c)
	if err != nil || res.Err == nil {
		return res, err
	}
	for _, e := range errorCodes {
		if errors.Is(res.Err, e.err) {
			text := res.Err.Error()
			if e.code == codes.Unavailable {
				text += "; nothing was done"
			}
			return res, status.Error(e.code, text)
		}
	}
	return res, status.Error(codes.Internal, res.Err.Error())
}

func (n *Node) renewMillis() uint64 {
	return uint64(max(n.opts.Lease/renewsPerLease, time.Millisecond).Milliseconds())
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
	w, err := n.namespace(ctx, l, name)
	if err != nil {
		return nil, err
	}
	if err := n.awaitActive(ctx, w); err != nil {
		return nil, err
	}
	epoch, _ := l.reading()
	res, err := n.do(ctx, l, &fsmpb.Command{Op: &fsmpb.Command_OpenSession{OpenSession: &fsmpb.OpenSession{
		NamespaceId: w.Id, Client: label(q.Client), HostId: label(q.HostId), ReadOnly: q.ReadOnly,
		Epoch: epoch, OpenedUnixMillis: time.Now().UnixMilli(),
	}}})
	if err != nil {
		return nil, err
	}
	x := res.Session
	reply := &dirpb.OpenSessionReply{
		SessionId: x.Id, Discriminator: x.Discriminator, NamespaceId: w.Id,
		LeaseMillis: uint64(n.opts.Lease.Milliseconds()), RenewMillis: n.renewMillis(), MaxLanes: maxLanes,
	}
	n.machine.view(func(s *fsm.State) {
		reply.MapVersion = s.MapVersion()
		reply.Token = token.Sign(s.Meta().ClusterKey, token.Grant{Session: x.Id, Namespace: w.Id, ReadOnly: x.ReadOnly})
	})
	l.mu.Lock()
	defer l.mu.Unlock()
	if old := l.mu.sessions[x.Id]; old != nil && old.expired {
		return nil, status.Errorf(codes.Unavailable, "session %d ran out before it could be answered; open another", x.Id)
	}
	l.mu.sessions[x.Id] = &sessionLease{
		expires: time.Now().Add(n.opts.Lease), report: l.mu.epoch, acked: reply.MapVersion,
	}
	reply.Epoch, reply.MinEpoch = l.readingLocked()
	return reply, nil
}

// namespace finds a namespace, and creates the default one on first use.
func (n *Node) namespace(ctx context.Context, l *leadership, name string) (*dirpb.Namespace, error) {
	var w *dirpb.Namespace
	find := func() { n.machine.view(func(s *fsm.State) { w = s.NamespaceNamed(name) }) }
	if find(); w != nil {
		return w, nil
	}
	if name != n.opts.DefaultNamespace {
		return nil, status.Errorf(codes.NotFound, "namespace %.64q does not exist", name)
	}
	_, err := n.do(ctx, l, createNamespace(&dirpb.CreateNamespaceRequest{Name: name}))
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
// takes too long, one active placement group is enough to begin.
func (n *Node) awaitActive(ctx context.Context, w *dirpb.Namespace) error {
	timer := time.NewTimer(activationWait)
	defer timer.Stop()
	for {
		changed := n.machine.change()
		var creating, usable, all int
		n.machine.view(func(s *fsm.State) {
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
		if creating == 0 && usable > 0 {
			return nil
		}
		late := status.Errorf(codes.Unavailable, "namespace %q: %d of %d placement groups are active; no session was opened", w.Name, usable, all)
		if creating == 0 {
			return late
		}
		select {
		case <-changed:
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
	return status.Error(codes.Unavailable, "this directory node is stopping; nothing was done")
}

func sessionGone(id uint32) error {
	return status.Errorf(codes.NotFound, "session %d is fenced, being fenced, or was never opened", id)
}

// Renew extends a session's lease and exchanges epochs.
func (n *Node) Renew(ctx context.Context, q *dirpb.RenewRequest) (*dirpb.RenewReply, error) {
	l, err := n.confirmed(ctx)
	if err != nil {
		return nil, err
	}
	reply := &dirpb.RenewReply{LeaseMillis: uint64(n.opts.Lease.Milliseconds())}
	var life dirpb.SessionLife
	n.machine.view(func(s *fsm.State) { life, reply.MapVersion = s.Life(q.SessionId), s.MapVersion() })
	l.mu.Lock()
	defer l.mu.Unlock()
	x := l.mu.sessions[q.SessionId]
	if x == nil || x.expired || life != dirpb.SessionLife_SESSION_LIVE {
		return nil, sessionGone(q.SessionId)
	}
	if q.ReportEpoch > l.mu.epoch {
		return nil, status.Errorf(codes.InvalidArgument, "session %d reports epoch %d, but it is %d", q.SessionId, q.ReportEpoch, l.mu.epoch)
	}
	x.expires = time.Now().Add(n.opts.Lease)
	// Renewals may arrive out of order; what a session reports never decreases.
	x.report = max(x.report, q.ReportEpoch)
	// A follower may have shown a version before this node applied it.
	x.acked = max(x.acked, min(q.AckedMapVersion, reply.MapVersion))
	reply.Epoch, reply.MinEpoch = l.readingLocked()
	return reply, nil
}

// CloseSession ends a session whose client has stopped.
func (n *Node) CloseSession(ctx context.Context, q *dirpb.CloseSessionRequest) (*dirpb.CloseSessionReply, error) {
	l, err := n.leader()
	if err != nil {
		return nil, err
	}
	epoch, _ := l.reading()
	_, err = n.do(ctx, l, &fsmpb.Command{Op: &fsmpb.Command_CloseSession{CloseSession: &fsmpb.CloseSession{
		SessionId: q.SessionId, Runs: q.Runs, Epoch: epoch,
	}}})
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	delete(l.mu.sessions, q.SessionId)
	l.mu.Unlock()
	return &dirpb.CloseSessionReply{}, nil
}

// GrantExtent gives a session memory.
func (n *Node) GrantExtent(ctx context.Context, q *dirpb.GrantExtentRequest) (*dirpb.GrantExtentReply, error) {
	l, err := n.leader()
	if err != nil {
		return nil, err
	}
	_, least := l.reading()
	res, err := n.do(ctx, l, &fsmpb.Command{Op: &fsmpb.Command_GrantExtent{GrantExtent: &fsmpb.GrantExtent{
		SessionId: q.SessionId, PgId: q.PgId, WantUnits: q.WantUnits, PlaceUnits: q.PlaceUnits, MinEpoch: least,
	}}})
	if err != nil {
		return nil, err
	}
	return res.Grant, nil
}

// SessionState tells whether a session is fenced. Breaking the locks of a session that
// lives would be wrong, so an id that is unknown here counts as fenced only once a
// quorum confirms that this node leads.
func (n *Node) SessionState(ctx context.Context, q *dirpb.SessionStateRequest) (*dirpb.SessionStateReply, error) {
	if _, err := n.confirmed(ctx); err != nil {
		return nil, err
	}
	reply := &dirpb.SessionStateReply{}
	n.machine.view(func(s *fsm.State) { reply.Life = s.Life(q.SessionId) })
	return reply, nil
}

// WatchMap streams the map as it changes. A watcher that falls behind skips to
// the newest version.
func (n *Node) WatchMap(q *dirpb.WatchMapRequest, stream grpc.ServerStreamingServer[dirpb.Map]) error {
	sent := q.AfterVersion
	if err := n.awaitSession(stream.Context(), q.SessionId); err != nil {
		return err
	}
	for {
		changed := n.machine.change()
		var m *dirpb.Map
		var err error
		n.machine.view(func(s *fsm.State) {
			x := s.Session(q.SessionId)
			switch {
			case q.SessionId == 0:
			case x == nil || x.Life != dirpb.SessionLife_SESSION_LIVE:
				err = sessionGone(q.SessionId)
			}
			if err == nil && s.MapVersion() > sent {
				m = s.Map(x)
			}
		})
		if err != nil {
			return err
		}
		if m != nil {
			sent = m.Version
			if err := stream.Send(m); err != nil {
				return err
			}
		}
		select {
		case <-changed:
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
	l, err := n.leader()
	if err != nil {
		return nil, err
	}
	res, err := n.do(ctx, l, &fsmpb.Command{Op: &fsmpb.Command_RegisterNode{RegisterNode: &fsmpb.RegisterNode{Node: q}}})
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	l.mu.nodes[res.NodeID] = &nodeLease{incarnation: q.Incarnation, expires: time.Now().Add(n.opts.Lease)}
	l.mu.Unlock()
	reply := &dirpb.RegisterNodeReply{NodeId: res.NodeID, HeartbeatMillis: min(n.renewMillis(), maxHeartbeatMillis)}
	n.machine.view(func(s *fsm.State) { reply.ClusterKey, reply.ClusterId = s.Meta().ClusterKey, s.Meta().ClusterId })
	return reply, nil
}

// Heartbeat extends a memory node's lease and tells it what to do. Its list of
// regions is obeyed, so it must not come from a leader that was deposed.
func (n *Node) Heartbeat(ctx context.Context, q *dirpb.HeartbeatRequest) (*dirpb.HeartbeatReply, error) {
	l, err := n.confirmed(ctx)
	if err != nil {
		return nil, err
	}
	if len(q.FencedSessions) > fsm.MaxSessions {
		return nil, status.Errorf(codes.InvalidArgument, "%d fenced sessions, want at most %d", len(q.FencedSessions), fsm.MaxSessions)
	}
	var up bool
	owed := make(map[uint32]bool)
	n.machine.view(func(s *fsm.State) {
		m := s.Node(q.NodeId)
		up = m != nil && m.Incarnation == q.Incarnation && m.State == dirpb.NodeState_NODE_UP
		for _, id := range s.FenceWork(q.NodeId, q.Incarnation) {
			owed[id] = true
		}
	})
	if !up {
		return &dirpb.HeartbeatReply{UnknownNode: true}, nil
	}
	l.mu.Lock()
	lease := l.mu.nodes[q.NodeId]
	if lease == nil || lease.incarnation != q.Incarnation {
		lease = &nodeLease{incarnation: q.Incarnation}
		l.mu.nodes[q.NodeId] = lease
	}
	lease.expires = time.Now().Add(n.opts.Lease)
	lease.stats = q.Stats
	l.mu.Unlock()

	confirm := &fsmpb.ConfirmFence{NodeId: q.NodeId, Incarnation: q.Incarnation}
	for _, id := range q.FencedSessions {
		if owed[id] {
			confirm.SessionIds = append(confirm.SessionIds, id)
		}
	}
	if len(confirm.SessionIds) > 0 {
		_, err := n.do(ctx, l, &fsmpb.Command{Op: &fsmpb.Command_ConfirmFence{ConfirmFence: confirm}})
		if status.Code(err) == codes.NotFound {
			return &dirpb.HeartbeatReply{UnknownNode: true}, nil
		}
		if err != nil {
			return nil, err
		}
	}
	reply := &dirpb.HeartbeatReply{}
	n.machine.view(func(s *fsm.State) {
		reply.Regions = s.WantRegions(q.NodeId, q.Incarnation)
		reply.FenceSessions = s.FenceWork(q.NodeId, q.Incarnation)
	})
	return reply, nil
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

// CreateNamespace lays out a namespace over the memory nodes that are up.
func (n *Node) CreateNamespace(ctx context.Context, q *dirpb.CreateNamespaceRequest) (*dirpb.CreateNamespaceReply, error) {
	l, err := n.leader()
	if err != nil {
		return nil, err
	}
	res, err := n.do(ctx, l, createNamespace(q))
	if err != nil {
		return nil, err
	}
	return &dirpb.CreateNamespaceReply{Namespace: res.Namespace}, nil
}

// Status shows what this node knows; epochs, reports and node statistics are the
// leader's alone.
func (n *Node) Status(context.Context, *dirpb.StatusRequest) (*dirpb.StatusReply, error) {
	reply := &dirpb.StatusReply{RaftApplied: n.machine.appliedIndex(), NodeStats: make(map[uint32]*dirpb.NodeStats)}
	members := n.members()
	_, leader := n.raft.LeaderWithID()
	now := time.Now().UnixMilli()
	l := n.leading.Load()
	if l != nil {
		l.mu.Lock()
		defer l.mu.Unlock()
		reply.Epoch, reply.MinEpoch = l.readingLocked()
		for id, lease := range l.mu.nodes {
			if lease.stats != nil {
				reply.NodeStats[id] = lease.stats
			}
		}
	}
	n.machine.view(func(s *fsm.State) {
		reply.ClusterId = s.Meta().ClusterId
		reply.Map = s.Map(nil)
		reply.Usage = s.Usage()
		for _, d := range s.Directory() {
			if m, ok := members[d.Id]; ok {
				reply.Directory = append(reply.Directory, &dirpb.DirectoryNode{
					Id: d.Id, RaftAddr: d.RaftAddr, GrpcAddr: d.GrpcAddr,
					Leader: d.Id == string(leader), Voter: m.Suffrage == raft.Voter,
				})
			}
		}
		for _, x := range s.Sessions() {
			info := &dirpb.SessionInfo{
				Id: x.Id, Client: x.Client, Life: x.Life, Namespace: s.Namespace(x.NamespaceId).GetName(),
				AgeMillis: uint64(max(0, now-x.OpenedUnixMillis)), ReportEpoch: x.Epoch,
			}
			if l != nil {
				if lease := l.mu.sessions[x.Id]; lease != nil {
					info.ReportEpoch = lease.report
				}
			}
			reply.Sessions = append(reply.Sessions, info)
		}
	})
	return reply, nil
}

var _ dirpb.DirectoryServer = (*Node)(nil)

// maxHeartbeatMillis bounds how long a memory node takes to hear of a region that
// it is to make or a session that it is to fence, however long the lease.
const maxHeartbeatMillis = 200
