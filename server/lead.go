package server

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
	"github.com/kvd-project/kvd/server/lead"
)

const (
	// enqueueTimeout bounds how long a command waits to enter raft's queue; what
	// follows is bounded by the caller's context alone.
	enqueueTimeout = 5 * time.Second
	// epochBlock is how many reclaim epochs a leader reserves at once.
	epochBlock = 600
)

// leadership hosts the judgement of one term that this node leads, package server/lead's,
// which does not see raft, clocks or locks. A new one begins with every term.
//
// The answers of a leader that was deposed without noticing are dangerous: its E lags, and memory reclaimed
// against it may still be read. So Renew, Heartbeat,
// SessionState, and what janitors ask, confirm the leadership with a quorum after the
// request came, and check that the term is still this one.
type leadership struct {
	term  uint64
	began time.Time
	// kick has room for one word that there may be something to plan: a command
	// changed the state, or a session acknowledged.
	kick    chan struct{}
	calm    atomic.Bool // the planner rests, since nothing happens
	trusted atomic.Bool // memory nodes have vouched for the state; see trust.go

	// work happens when there is some for janitors.
	work event
	// meeting is of gateways.
	meeting meeting
	pages   pages

	mu struct {
		sync.Mutex
		*lead.Leader
		watches map[uint32]map[chan struct{}]bool // through which sessions are called
	}
}

// wake has the planner look again soon.
func (l *leadership) wake() {
	select {
	case l.kick <- struct{}{}:
	default:
	}
}

// rouse is wake for what the planner, unless it rests, would see soon enough by itself.
func (l *leadership) rouse() {
	if l.calm.CompareAndSwap(true, false) {
		l.wake()
	}
}

// withState calls fn with both what l knows and the state locked.
func (n *Node) withState(l *leadership, fn func(x *lead.Leader, s *fsm.State, now time.Duration)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	n.machine.view(func(s *fsm.State) { fn(l.mu.Leader, s, time.Since(l.began)) })
}

// epochs returns the reclaim epoch E and the minimum.
func (l *leadership) epochs() (epoch, least uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.mu.Epochs()
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
	n.reigns.happens()
	defer func() {
		n.leading.Store(nil)
		n.reigns.happens()
		if n.ctx.Err() == nil {
			n.log.Warn("directory: leadership lost", "id", n.opts.ID, "term", l.term, "led",
				time.Since(l.began).Round(time.Millisecond))
		}
	}()
	n.machine.view(func(s *fsm.State) {
		for _, w := range s.Map(nil).Namespaces {
			if len(w.Losses) > 0 {
				n.log.Warn("directory: data was lost, and nobody has accepted it", "namespace", w.Name,
					"losses", len(w.Losses),
					"accept", "kvctl namespace accept-loss "+w.Name)
			}
		}
	})

	raising, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() { defer close(done); n.raiseLevel(raising, l) }()
	defer func() { cancel(); <-done }()
	tick := time.NewTimer(0)
	defer tick.Stop()
	for {
		tick.Reset(n.plan(ctx, l))
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-l.kick:
		}
		if n.raft.CurrentTerm() != l.term {
			return
		}
	}
}

// accede catches up with everything committed before this term, and makes the
// cluster's identity and this node's addresses part of the state.
func (n *Node) accede(ctx context.Context) (*leadership, error) {
	l := &leadership{term: n.raft.CurrentTerm(), kick: make(chan struct{}, 1)}
	if err := n.wait(ctx, n.raft.Barrier(enqueueTimeout)); err != nil {
		return nil, fmt.Errorf("barrier: %w", err)
	}
	var known bool
	var me *fsmpb.Directory
	var foreign error
	want := n.self()
	var stale []string
	members := n.members()
	n.machine.view(func(s *fsm.State) {
		known = s.Meta().ClusterId != ""
		me = s.DirectoryNode(n.opts.ID)
		if foreign = claimID(s, want, n.identity()); foreign != nil {
			want.Identity = me.GetIdentity()
		}
		for _, d := range s.Directory() {
			if _, ok := members[d.Id]; !ok {
				stale = append(stale, d.Id)
			}
		}
	})
	var todo []*fsmpb.Command
	if !known {
		id := make([]byte, 8)
		rand.Read(id) // crypto/rand: never fails
		todo = append(todo, &fsmpb.Command{Op: &fsmpb.Command_Init{Init: &fsmpb.Init{
			ClusterId: hex.EncodeToString(id), ClusterKey: newKey(), Level: n.latestLevel(),
		}}})
	}
	if foreign != nil {
		n.log.Warn("directory: leading by a certificate of another identity", "id", n.opts.ID, "err", foreign)
	}
	if !proto.Equal(me, want) {
		todo = append(todo,
			&fsmpb.Command{Op: &fsmpb.Command_PutDirectory{PutDirectory: &fsmpb.PutDirectory{Directory: want}}})
	}
	for _, id := range stale {
		todo = append(todo,
			&fsmpb.Command{Op: &fsmpb.Command_DropDirectory{DropDirectory: &fsmpb.DropDirectory{Id: id}}})
	}
	for _, c := range todo {
		if _, err := n.propose(ctx, l, c); err != nil {
			return nil, err
		}
	}

	knows := false
	n.machine.view(func(s *fsm.State) { knows = s.KnowsBoots() })
	if knows {
		if err := n.beginReign(ctx, l); err != nil {
			return nil, err
		}
	}
	l.began = time.Now()
	n.machine.view(func(s *fsm.State) {
		l.mu.Leader = lead.New(lead.Options{
			Lease: n.opts.Lease, LastCopyLeases: n.opts.LastCopyLeases, LastCopyWait: n.opts.LastCopyWait,
			EpochInterval: n.opts.EpochInterval,
			EpochBlock:    epochBlock, ScrubInterval: max(n.opts.ScrubInterval, 0), Term: l.term,
		}, s, 0)
		l.trusted.Store(l.mu.Trusted(s, 0)) // without memory nodes that are up there is nobody to wait for
	})
	return l, nil
}

// plan proposes what time and state have brought about, and tells how long that may wait
// next if nothing happens. A proposal that fails is made again by a later call.
func (n *Node) plan(ctx context.Context, l *leadership) (pause time.Duration) {
	if !l.trusted.Load() && !n.trusted(l) {
		return trustPause
	}
	if n.behind(l) != nil {
		return n.opts.Lease
	}
	var steps []lead.Step
	work := false
	n.withState(l, func(x *lead.Leader, s *fsm.State, now time.Duration) {
		x.Advance(s, now)
		steps = x.Plan(s, now)
		if c := x.TakeBack(s, now); c != nil {
			steps = append(steps,
				lead.Step{Do: c, Why: fmt.Sprintf("%d runs of memory that came back are free",
					len(c.GetTakeBack().Runs))})
		}
		l.callLocked(now)
		work = len(s.Jobs()) > 0 && len(x.Work(s, now)) > 0
		pause = n.next(l, x, s, now)
	})
	if work {
		l.work.happens()
	}
	for _, step := range steps {
		level := slog.LevelInfo
		switch op := step.Do.Op.(type) {
		case *fsmpb.Command_NodeDown:
			level = slog.LevelWarn
			op.NodeDown.UnixMillis = time.Now().UnixMilli()
		case *fsmpb.Command_LoseMembers:
			level = slog.LevelWarn
			op.LoseMembers.UnixMillis = time.Now().UnixMilli()
		case *fsmpb.Command_RemakePg:
			op.RemakePg.UnixMillis = time.Now().UnixMilli()
		case *fsmpb.Command_ReserveEpoch, *fsmpb.Command_TakeBack:
			level = slog.LevelDebug
		}
		n.log.Log(ctx, level, "directory: "+label(step.Why)) // which may name every session
		res, err := n.propose(ctx, l, step.Do)
		if ctx.Err() != nil {
			return pause
		}
		if res.Err != nil {
			n.withState(l, func(x *lead.Leader, s *fsm.State, now time.Duration) { x.Refused(s, step, now) })
		}
		if err = errors.Join(err, res.Err); err != nil {
			n.log.Info("directory: proposal failed and is repeated if need be", "err", err)
			pause = min(pause, n.opts.EpochInterval)
		}
	}
	return pause
}

// handOver makes another node the leader before this one stops, and returns when that is
// known, for which callers need this node's answers: until then they are told that it does
// not lead. It gives up after a few elections' time, when those who are left elect a leader
// by themselves.
func (n *Node) handOver() {
	if n.raft.State() != raft.Leader {
		return
	}
	var others []raft.Server
	for id, m := range n.members() {
		if id != n.opts.ID && m.Suffrage == raft.Voter {
			others = append(others, m)
		}
	}
	if len(others) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), handOverElections*n.opts.ElectionTimeout)
	defer cancel()
	// The node's context has ended, so nothing is proposed any more. A step down would give
	// unknown outcomes to what was proposed and is not committed.
	err := n.wait(ctx, n.raft.Barrier(enqueueTimeout))
	// Raft prefers the node that has most of the log, which may be dead.
	if err == nil {
		err = n.wait(ctx, n.raft.LeadershipTransfer())
	}
	for _, m := range others {
		if ctx.Err() != nil || n.raft.State() != raft.Leader {
			break
		}
		err = n.wait(ctx, n.raft.LeadershipTransferToServer(m.ID, m.Address))
	}
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for n.leaderGRPC() == "" {
		select {
		case <-tick.C:
		case <-ctx.Done():
			n.log.Warn("directory: stopping, but no other node leads yet", "id", n.opts.ID, "err",
				errors.Join(err, ctx.Err()))
			return
		}
	}
	n.log.Info("directory: handed over", "id", n.opts.ID, "leader", n.leaderGRPC())
}

// handOverElections is how many election timeouts a hand-over may take.
const handOverElections = 5

// wait returns f's error, or ctx's while f goes on by itself. Raft settles every
// future when it loses its leadership, and most when it shuts down; see settled.
func (n *Node) wait(ctx context.Context, f raft.Future) error {
	done := make(chan error, 1)
	n.futures.Add(1)
	go func() {
		defer n.futures.Add(-1)
		done <- f.Error()
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// settled waits, for a moment at most, until raft has answered what it was asked: of what is committed as it shuts down
// and waits for the state machine it forgets the futures, and a goroutine would wait for each for ever.
func (n *Node) settled() {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(settleLimit); n.futures.Load() > 0 && time.Now().Before(end); {
		<-tick.C
	}
}

// settleLimit bounds how long a node that stops waits for what is not committed, and without a majority will not be.
const settleLimit = 200 * time.Millisecond

// propose logs c in l's term and returns what applying it did. An error is a
// status: not the leader and Unavailable with "nothing was done" mean that it did not
// happen, any other that the outcome is unknown. The Result has the state machine's refusal.
func (n *Node) propose(ctx context.Context, l *leadership, c *fsmpb.Command) (fsm.Result, error) {
	if n.raft.CurrentTerm() != l.term || n.ctx.Err() != nil {
		return fsm.Result{}, n.notLeader()
	}
	if err := n.awaitTrust(ctx, l, c); err != nil {
		return fsm.Result{}, err
	}
	c.Term = l.term
	b, err := proto.Marshal(c)
	if err != nil {
		return fsm.Result{}, status.Errorf(codes.InvalidArgument, "command: %v", err)
	}
	f := n.raft.Apply(b, enqueueTimeout)
	if err := n.wait(ctx, f); err != nil {
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
	if len(res.Changes) > 0 {
		l.wake()
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

// confirmed is verified but for a leader that lacks what memory nodes were told: it knows less than it may say.
func (n *Node) confirmed(ctx context.Context) (*leadership, error) {
	l, err := n.verified(ctx)
	if err == nil {
		err = n.behind(l)
	}
	return l, err
}

// verified returns the current leadership after a quorum agreed that no other
// one existed when the call began.
func (n *Node) verified(ctx context.Context) (*leadership, error) {
	l, err := n.leader()
	if err != nil {
		return nil, err
	}
	if err := n.quorum.leads(ctx); err != nil {
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
