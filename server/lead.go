package server

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/hashicorp/raft"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/token"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

const (
	// enqueueTimeout bounds how long a command waits to enter raft's queue; what
	// follows is bounded by the caller's context alone.
	enqueueTimeout = 5 * time.Second
	// epochBlock is how many reclaim epochs a leader reserves at once. It asks for
	// the next block when half of one is left.
	epochBlock = 600
)

// leadership is what a leader knows and does not replicate: leases, reports and
// the reclaim epoch. A new one begins with every term this node leads.
//
// The reclaim epoch. E starts at the ceiling that earlier leaders reserved, so
// it never goes backward, and stays at or below what this one has reserved. A session counts with
// its last report to this leader, or its E at open until it reports; a report never
// decreases. So the minimum is at most every session's true value, and grows during a
// leadership. A session whose OpenSession has not been answered yet has begun
// nothing: it counts with E until the E of its reply takes that place.
//
// What a leader that was deposed without noticing might answer is dangerous: its
// E lags, and memory reclaimed against it may still be read. So Renew, Heartbeat
// and SessionState confirm the leadership with a quorum after the request came,
// and check that the term is still this one.
type leadership struct {
	term uint64

	mu struct {
		sync.Mutex
		epoch    uint64
		advanced time.Time // when epoch last grew
		nodes    map[uint32]*nodeLease
		sessions map[uint32]*sessionLease
	}
}

type nodeLease struct {
	incarnation uint64
	expires     time.Time
	stats       *dirpb.NodeStats
}

type sessionLease struct {
	expires time.Time
	expired bool // given up; no renewal revives it
	report  uint64
	acked   uint64 // map version
}

// reading returns E and the minimum.
func (l *leadership) reading() (epoch, least uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.readingLocked()
}

func (l *leadership) readingLocked() (epoch, least uint64) {
	least = l.mu.epoch
	for _, x := range l.mu.sessions {
		least = min(least, x.report)
	}
	return l.mu.epoch, least
}

// lead follows raft's elections until the node stops.
func (n *Node) lead() {
	stop := func() {}
	for {
		select {
		case leading := <-n.raft.LeaderCh():
			stop()
			stop = func() {}
			if leading {
				ctx, cancel := context.WithCancel(n.ctx)
				done := make(chan struct{})
				stop = func() { cancel(); <-done }
				go func() {
					defer close(done)
					n.reign(ctx)
				}()
			}
		case <-n.ctx.Done():
			stop()
			return
		}
	}
}

// reign serves as the leader of one term, until ctx ends or the term does.
func (n *Node) reign(ctx context.Context) {
	l, err := n.accede(ctx)
	for err != nil {
		if ctx.Err() != nil || n.raft.State() != raft.Leader {
			return
		}
		n.log.Warn("directory: elected, but not ready to lead", "err", err)
		select {
		case <-ctx.Done():
			return
		case <-time.After(n.opts.ElectionTimeout / 4):
		}
		l, err = n.accede(ctx)
	}
	n.log.Info("directory: leading", "id", n.opts.ID, "term", l.term)
	n.leading.Store(l)
	defer n.leading.Store(nil)

	tick := time.NewTicker(max(min(n.opts.EpochInterval, n.opts.Lease/8)/2, 2*time.Millisecond))
	defer tick.Stop()
	for {
		n.advance(l)
		n.sweep(ctx, l)
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if n.raft.CurrentTerm() != l.term {
			return
		}
	}
}

// accede catches up with everything committed before this term, and makes the
// cluster's identity and this node's addresses part of the state.
func (n *Node) accede(ctx context.Context) (*leadership, error) {
	l := &leadership{term: n.raft.CurrentTerm()}
	if err := wait(ctx, n.raft.Barrier(enqueueTimeout)); err != nil {
		return nil, fmt.Errorf("barrier: %w", err)
	}
	var known bool
	var me *fsmpb.Directory
	var stale []string
	members := n.members()
	n.machine.view(func(s *fsm.State) {
		known = s.Meta().ClusterId != ""
		me = s.DirectoryNode(n.opts.ID)
		for _, d := range s.Directory() {
			if _, ok := members[d.Id]; !ok {
				stale = append(stale, d.Id)
			}
		}
	})
	var todo []*fsmpb.Command
	if !known {
		id, key := make([]byte, 8), make([]byte, token.KeySize)
		rand.Read(id) // crypto/rand: never fails
		rand.Read(key)
		todo = append(todo, &fsmpb.Command{Op: &fsmpb.Command_Init{Init: &fsmpb.Init{ClusterId: hex.EncodeToString(id), ClusterKey: key}}})
	}
	if want := n.self(); !proto.Equal(me, want) {
		todo = append(todo, &fsmpb.Command{Op: &fsmpb.Command_PutDirectory{PutDirectory: &fsmpb.PutDirectory{Directory: want}}})
	}
	for _, id := range stale {
		todo = append(todo, &fsmpb.Command{Op: &fsmpb.Command_DropDirectory{DropDirectory: &fsmpb.DropDirectory{Id: id}}})
	}
	for _, c := range todo {
		if _, err := n.propose(ctx, l, c); err != nil {
			return nil, err
		}
	}

	// Everyone gets a full lease: nobody could be heard during the election.
	until := time.Now().Add(n.opts.Lease)
	l.mu.nodes = make(map[uint32]*nodeLease)
	l.mu.sessions = make(map[uint32]*sessionLease)
	n.machine.view(func(s *fsm.State) {
		l.mu.epoch = s.Meta().EpochCeiling
		for _, m := range s.Nodes() {
			l.mu.nodes[m.Id] = &nodeLease{incarnation: m.Incarnation, expires: until}
		}
		for _, x := range s.Sessions() {
			l.mu.sessions[x.Id] = &sessionLease{expires: until, report: x.Epoch}
		}
	})
	return l, nil
}

// advance moves the reclaim epoch on while anybody has use for it.
func (n *Node) advance(l *leadership) {
	var ceiling uint64
	n.machine.view(func(s *fsm.State) { ceiling = s.Meta().EpochCeiling })
	now := time.Now()
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.mu.sessions) > 0 && l.mu.epoch < ceiling && now.Sub(l.mu.advanced) >= n.opts.EpochInterval {
		l.mu.epoch++
		l.mu.advanced = now
	}
}

// sweep proposes what time has brought about. A proposal that fails is made
// again by the next sweep.
func (n *Node) sweep(ctx context.Context, l *leadership) {
	now := time.Now()
	var down []*fsmpb.NodeDown
	var thaw []*fsmpb.ActivatePG
	expire := &fsmpb.ExpireSessions{}
	var reserve uint64

	l.mu.Lock()
	n.machine.view(func(s *fsm.State) {
		lastCopy := make(map[uint32]bool) // memory nodes that hold one
		for _, pg := range s.PGs(0) {
			if pg.State == dirpb.PGState_PG_ACTIVE && len(pg.Members) == 1 {
				lastCopy[pg.Members[0].NodeId] = true
			}
		}
		for _, m := range s.Nodes() {
			lease := l.mu.nodes[m.Id]
			if lease == nil || lease.incarnation != m.Incarnation {
				// Registered, but not answered yet.
				lease = &nodeLease{incarnation: m.Incarnation, expires: now.Add(n.opts.Lease)}
				l.mu.nodes[m.Id] = lease
			}
			lost := lease.expires
			if lastCopy[m.Id] {
				lost = lost.Add(time.Duration(n.opts.LastCopyLeases-1) * n.opts.Lease)
			}
			if m.State == dirpb.NodeState_NODE_UP && now.After(lost) {
				down = append(down, &fsmpb.NodeDown{NodeId: m.Id, Incarnation: m.Incarnation})
			}
		}
		for _, x := range s.Sessions() {
			if l.mu.sessions[x.Id] == nil {
				// Opened, but not answered yet, perhaps never.
				l.mu.sessions[x.Id] = &sessionLease{expires: now.Add(n.opts.Lease), report: l.mu.epoch}
			}
		}
		for id, x := range l.mu.sessions {
			switch s.Life(id) {
			case dirpb.SessionLife_SESSION_FENCED:
				delete(l.mu.sessions, id)
			case dirpb.SessionLife_SESSION_LIVE:
				if x.expired = x.expired || now.After(x.expires); x.expired {
					expire.SessionIds = append(expire.SessionIds, id)
				}
			}
		}
		for _, pg := range s.PGs(0) {
			if v := s.FrozenVersion(pg.Id); v != 0 && l.acknowledgedLocked(s, pg.NamespaceId, v) {
				thaw = append(thaw, &fsmpb.ActivatePG{PgId: pg.Id, Epoch: pg.Epoch})
			}
		}
		if len(l.mu.sessions) > 0 && l.mu.epoch+epochBlock/2 > s.Meta().EpochCeiling {
			reserve = l.mu.epoch + epochBlock
		}
	})
	l.mu.Unlock()

	propose := func(c *fsmpb.Command) {
		if res, err := n.propose(ctx, l, c); ctx.Err() == nil {
			if err = errors.Join(err, res.Err); err != nil {
				n.log.Info("directory: proposal failed and is repeated if need be", "err", err)
			}
		}
	}
	if reserve > 0 {
		propose(&fsmpb.Command{Op: &fsmpb.Command_ReserveEpoch{ReserveEpoch: &fsmpb.ReserveEpoch{Ceiling: reserve}}})
	}
	for _, c := range down {
		n.log.Warn("directory: memory node is down: lease ran out", "node", c.NodeId, "incarnation", c.Incarnation)
		propose(&fsmpb.Command{Op: &fsmpb.Command_NodeDown{NodeDown: c}})
	}
	if len(expire.SessionIds) > 0 {
		n.log.Info("directory: fencing sessions: lease ran out", "sessions", expire.SessionIds)
		propose(&fsmpb.Command{Op: &fsmpb.Command_ExpireSessions{ExpireSessions: expire}})
	}
	for _, c := range thaw {
		propose(&fsmpb.Command{Op: &fsmpb.Command_ActivatePg{ActivatePg: c}})
	}
}

// acknowledgedLocked reports whether every session of a namespace acknowledged
// map version v or is fenced.
func (l *leadership) acknowledgedLocked(s *fsm.State, namespace uint32, v uint64) bool {
	for _, x := range s.Sessions() {
		if x.NamespaceId != namespace {
			continue
		}
		if lease := l.mu.sessions[x.Id]; lease == nil || lease.acked < v {
			return false
		}
	}
	return true
}

// wait returns f's error, or ctx's while f goes on by itself. Raft settles every
// future when it loses its leadership or shuts down, so the goroutine ends.
func wait(ctx context.Context, f raft.Future) error {
	done := make(chan error, 1)
	go func() { done <- f.Error() }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// propose logs c in l's term and returns what applying it did. An error is a
// status: not the leader and Unavailable with "nothing was done" mean that it did not
// happen, any other that the outcome is unknown. What the state machine refused is in the Result.
func (n *Node) propose(ctx context.Context, l *leadership, c *fsmpb.Command) (fsm.Result, error) {
	if n.raft.CurrentTerm() != l.term {
		return fsm.Result{}, n.notLeader()
	}
	c.Term = l.term
	b, err := proto.Marshal(c)
	if err != nil {
		return fsm.Result{}, status.Errorf(codes.InvalidArgument, "command: %v", err)
	}
	f := n.raft.Apply(b, enqueueTimeout)
	if err := wait(ctx, f); err != nil {
		return fsm.Result{}, n.applyError(err)
	}
	// FSM failures come through Response, never through Error.
	res, ok := f.Response().(fsm.Result)
	if !ok {
		return fsm.Result{}, status.Errorf(codes.Internal, "the state machine answered %T", f.Response())
	}
	if errors.Is(res.Err, errDeposed) {
		return fsm.Result{}, n.notLeader()
	}
	return res, nil
}

// applyError says what is known about a command whose future failed with err.
func (n *Node) applyError(err error) error {
	switch {
	case errors.Is(err, raft.ErrNotLeader), errors.Is(err, raft.ErrLeadershipTransferInProgress):
		return n.notLeader()
	case errors.Is(err, raft.ErrEnqueueTimeout):
		return status.Errorf(codes.Unavailable, "the directory's queue is full; nothing was done")
	}
	return status.Errorf(codes.Unavailable, "outcome unknown: the directory may or may not have done it: %v", err)
}

// notLeader is the answer of every call that another node must serve.
func (n *Node) notLeader() error {
	leader := n.leaderGRPC()
	text := "this directory node is not the leader; nothing was done; the leader is unknown"
	if leader != "" {
		text = "this directory node is not the leader; nothing was done; the leader is at " + leader
	}
	st := status.New(codes.FailedPrecondition, text)
	if d, err := st.WithDetails(&dirpb.NotLeader{Leader: leader}); err == nil {
		st = d
	}
	return st.Err()
}

// leader returns the current leadership, which may be lost by the time a
// command is proposed in it.
func (n *Node) leader() (*leadership, error) {
	if l := n.leading.Load(); l != nil && n.raft.State() == raft.Leader {
		return l, nil
	}
	return nil, n.notLeader()
}

// confirmed returns the current leadership after a quorum agreed that no other
// one existed when the call began.
func (n *Node) confirmed(ctx context.Context) (*leadership, error) {
	l, err := n.leader()
	if err != nil {
		return nil, err
	}
	if err := wait(ctx, n.raft.VerifyLeader()); err != nil {
		if ctx.Err() != nil {
			return nil, status.FromContextError(ctx.Err()).Err()
		}
		return nil, n.notLeader()
	}
	if n.raft.CurrentTerm() != l.term {
		return nil, n.notLeader()
	}
	return l, nil
}
