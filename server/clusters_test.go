package server

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/hashicorp/raft"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/loopback"
	"github.com/kvd-project/kvd/internal/testutil"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

type cluster struct {
	t     testing.TB
	fs    []vfs.FS
	mu    sync.Mutex
	nodes []*Node
	opts  func(i int) Options
}

func newCluster(t testing.TB, size int, lease time.Duration) *cluster {
	t.Helper()
	return newClusterWith(t, size, lease, func(int, *Options) {})
}

// newClusterWith has more to say about the options of each node.
func newClusterWith(t testing.TB, size int, lease time.Duration, more func(i int, o *Options)) *cluster {
	t.Helper()
	c := &cluster{t: t}
	c.opts = func(i int) Options {
		o := Options{ID: fmt.Sprint("d", i+1), DataDir: "data", fs: c.fs[i], Lease: lease,
			EpochInterval: 10 * time.Millisecond}
		if i == 0 {
			o.Bootstrap = true
		} else {
			o.Join = []string{c.nodes[0].Addr()}
		}
		more(i, &o)
		return o
	}
	for i := range size {
		c.fs = append(c.fs, vfs.NewMem())
		n := ready(t, start(t, c.opts(i)))
		c.mu.Lock()
		c.nodes = append(c.nodes, n)
		c.mu.Unlock()
	}
	c.awaitVoters(size)
	return c
}

func (c *cluster) all() []*Node {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]*Node(nil), c.nodes...)
}

// awaitVoters waits until the leader counts size voters and all of them caught up.
func (c *cluster) awaitVoters(size int) {
	c.t.Helper()
	testutil.Until(c.t, fmt.Sprintf("%d voters", size), func() bool {
		l := leaderOf(c.t, c.all()...)
		s, err := l.Status(context.Background(), nil)
		if err != nil || len(s.Directory) != size {
			return false
		}
		for _, n := range c.all() {
			_, member := l.members()[n.opts.ID]
			if member && n.ctx.Err() == nil && n.machine.appliedIndex() < s.RaftApplied {
				return false
			}
		}
		return true
	})
}

func (c *cluster) index(n *Node) int {
	for i, o := range c.all() {
		if o == n {
			return i
		}
	}
	c.t.Fatal("no such node")
	return 0
}

// restart starts node i again on its filesystem, at raftAddr if it is not empty.
func (c *cluster) restart(i int, raftAddr string) *Node {
	c.t.Helper()
	o := c.opts(i)
	o.Bootstrap, o.Join, o.RaftAddr = false, nil, raftAddr
	n := start(c.t, o)
	c.mu.Lock()
	c.nodes[i] = n
	c.mu.Unlock()
	return n
}

func TestClusterSurvivesItsLeader(t *testing.T) {
	c := newCluster(t, 3, forever)
	newMemnode(t, "m1", 1, c.all)
	var x *dirpb.OpenSessionReply
	retry(t, "open", c.all(), func(d dirpb.DirectoryClient) (err error) {
		x, err = d.OpenSession(testCtx(t), &dirpb.OpenSessionRequest{})
		return err
	})
	leader := leaderOf(t, c.all()...)
	i := c.index(leader)
	follower := c.all()[(i+1)%3]

	// Only the leader answers, and the others say who that is.
	fc := dial(t, follower)
	ctx := testCtx(t)
	for name, call := range map[string]func() error{
		"OpenSession":  func() error { _, err := fc.OpenSession(ctx, &dirpb.OpenSessionRequest{}); return err },
		"Renew":        func() error { _, err := fc.Renew(ctx, &dirpb.RenewRequest{}); return err },
		"CloseSession": func() error { _, err := fc.CloseSession(ctx, &dirpb.CloseSessionRequest{}); return err },
		"GrantExtent":  func() error { _, err := fc.GrantExtent(ctx, &dirpb.GrantExtentRequest{}); return err },
		"GrantStatus":  func() error { _, err := fc.GrantStatus(ctx, &dirpb.GrantStatusRequest{}); return err },
		"SessionState": func() error { _, err := fc.SessionState(ctx, &dirpb.SessionStateRequest{}); return err },
		"RegisterNode": func() error { _, err := fc.RegisterNode(ctx, &dirpb.RegisterNodeRequest{}); return err },
		"Heartbeat":    func() error { _, err := fc.Heartbeat(ctx, &dirpb.HeartbeatRequest{}); return err },
		"PublishRegion": func() error {
			_, err := fc.PublishRegion(ctx, &dirpb.PublishRegionRequest{})
			return err
		},
		"LeaveNode":    func() error { _, err := fc.LeaveNode(ctx, &dirpb.LeaveNodeRequest{}); return err },
		"ReportNode":   func() error { _, err := fc.ReportNode(ctx, &dirpb.ReportNodeRequest{}); return err },
		"GiveUpNode":   func() error { _, err := fc.GiveUpNode(ctx, &dirpb.GiveUpNodeRequest{}); return err },
		"RestartNode":  func() error { _, err := fc.RestartNode(ctx, &dirpb.RestartNodeRequest{}); return err },
		"RequestSplit": func() error { _, err := fc.RequestSplit(ctx, &dirpb.RequestSplitRequest{}); return err },
		"Meet":         func() error { _, err := fc.Meet(ctx, &dirpb.MeetRequest{}); return err },
		"Pages":        func() error { _, err := fc.Pages(ctx, &dirpb.PagesRequest{}); return err },
		"FindWork":     func() error { _, err := fc.FindWork(ctx, &dirpb.FindWorkRequest{}); return err },
		"ClaimJob":     func() error { _, err := fc.ClaimJob(ctx, &dirpb.ClaimJobRequest{}); return err },
		"ReportJob":    func() error { _, err := fc.ReportJob(ctx, &dirpb.ReportJobRequest{}); return err },
		"StartJob":     func() error { _, err := fc.StartJob(ctx, &dirpb.StartJobRequest{}); return err },
		"DrainNode":    func() error { _, err := fc.DrainNode(ctx, &dirpb.DrainNodeRequest{}); return err },
		"RemoveNode":   func() error { _, err := fc.RemoveNode(ctx, &dirpb.RemoveNodeRequest{}); return err },
		"Rebalance":    func() error { _, err := fc.Rebalance(ctx, &dirpb.RebalanceRequest{}); return err },
		"CreateNamespace": func() error {
			_, err := fc.CreateNamespace(ctx, &dirpb.CreateNamespaceRequest{})
			return err
		},
		"AcceptLoss":    func() error { _, err := fc.AcceptLoss(ctx, &dirpb.AcceptLossRequest{}); return err },
		"JoinDirectory": func() error { _, err := fc.JoinDirectory(ctx, &dirpb.JoinDirectoryRequest{}); return err },
		"RemoveDirectory": func() error {
			_, err := fc.RemoveDirectory(ctx, &dirpb.RemoveDirectoryRequest{})
			return err
		},
	} {
		err := call()
		wantCode(t, err, codes.FailedPrecondition, "nothing was done")
		d := status.Convert(err).Details()
		if nl, ok := d[0].(*dirpb.NotLeader); !ok || nl.Leader != leader.Addr() {
			t.Fatalf("%s on a follower: details %v, want the leader at %s", name, d, leader.Addr())
		}
	}
	// Anyone shows status and map.
	c.awaitVoters(3)
	if s := statusOf(t, fc); len(s.Directory) != 3 || len(s.Map.Pgs) != 1 {
		t.Fatalf("a follower's status %v", s)
	}
	w, err := fc.WatchMap(ctx, &dirpb.WatchMapRequest{SessionId: x.SessionId})
	if err != nil {
		t.Fatal(err)
	}
	if m, err := w.Recv(); err != nil || len(m.Pgs) != 1 {
		t.Fatalf("a follower's map %v, %v", m, err)
	}
	w, err = fc.WatchMap(ctx, &dirpb.WatchMapRequest{SessionId: x.SessionId + 1})
	if err == nil {
		_, err = w.Recv()
	}
	wantCode(t, err, codes.Unavailable, "not known here yet")

	var before *dirpb.RenewReply
	retry(t, "renew", c.all(), func(d dirpb.DirectoryClient) (err error) {
		before, err = d.Renew(ctx, &dirpb.RenewRequest{SessionId: x.SessionId, ReportEpoch: x.Epoch,
			Number: numbers.Add(1)})
		return err
	})
	began := time.Now()
	if err := leader.Close(); err != nil {
		t.Fatal(err)
	}
	rest := append(c.all()[:i:i], c.all()[i+1:]...)
	var after *dirpb.RenewReply
	retry(t, "renew", rest, func(d dirpb.DirectoryClient) (err error) {
		after, err = d.Renew(ctx, &dirpb.RenewRequest{SessionId: x.SessionId, ReportEpoch: x.Epoch,
			Number: numbers.Add(1)})
		return err
	})
	t.Logf("renewed %v after the leader stopped", time.Since(began))
	if after.Epoch < before.Epoch || after.MinEpoch > x.Epoch {
		t.Fatalf("renewed %v, before %v", after, before)
	}
	var y *dirpb.OpenSessionReply
	retry(t, "open", rest, func(d dirpb.DirectoryClient) (err error) {
		y, err = d.OpenSession(testCtx(t), &dirpb.OpenSessionRequest{})
		return err
	})
	if y.SessionId <= x.SessionId || y.Discriminator == x.Discriminator || y.Epoch < after.Epoch {
		t.Fatalf("opened %v after %v", y, x)
	}

	// The old leader comes back from its disk, at other ports, and catches up.
	back := ready(t, c.restart(i, ""))
	testutil.Until(t, "the restarted node to catch up", func() bool {
		var ok bool
		back.machine.view(func(s *fsm.State) { ok = s.Session(y.SessionId) != nil })
		return ok
	})
	testutil.Until(t, "its addresses to be known", func() bool {
		s := statusOf(t, dial(t, leaderOf(t, c.all()...)))
		for _, d := range s.Directory {
			if d.Id == back.opts.ID {
				return d.GrpcAddr == back.Addr() && d.RaftAddr == string(back.transport.LocalAddr())
			}
		}
		return false
	})
}

// A leader that is closed makes another one first, while it still tells callers that it does
// not lead, and no command of that time has an unknown outcome.
func TestLeaderHandsOver(t *testing.T) {
	c := newCluster(t, 3, forever)
	newMemnode(t, "m1", 1, c.all)
	retry(t, "create", c.all(), func(d dirpb.DirectoryClient) error {
		_, err := d.CreateNamespace(testCtx(t), &dirpb.CreateNamespaceRequest{Name: "n"})
		return err
	})
	for len(c.all()) > 1 {
		leader := leaderOf(t, c.all()...)
		i := c.index(leader)
		var wg sync.WaitGroup
		began := make(chan struct{}, 100)
		for k := range 4 {
			d := dial(t, leader)
			wg.Go(func() {
				for {
					_, err := d.SetNamespace(testCtx(t), &dirpb.SetNamespaceRequest{
						Name: "n", LimitBytes: uint64(k+1) << 20})
					if status.Code(err) == codes.FailedPrecondition || err != nil &&
						strings.Contains(err.Error(), "connection refused") {
						return // told that another one leads, or too late
					}
					if err != nil {
						t.Errorf("a command while the leadership is handed over: %v", err)
						return
					}
					select {
					case began <- struct{}{}:
					default:
					}
				}
			})
		}
		for range 20 {
			<-began
		}
		if err := leader.Close(); err != nil {
			t.Fatal(err)
		}
		wg.Wait()
		rest := append(c.all()[:i:i], c.all()[i+1:]...)
		if len(rest) == 2 && rest[0].raft.State() != raft.Leader && rest[1].raft.State() != raft.Leader {
			t.Errorf("%s stopped, and nobody leads", leader.opts.ID)
		}
		if len(rest) < 2 {
			return // one of two has no majority
		}
		c.mu.Lock()
		c.nodes = rest
		c.mu.Unlock()
	}
}

// Raft does not pipeline what it replicates: a leader that lost its leadership with a pipeline
// under way could hang when it was closed.
func TestNoPipelines(t *testing.T) {
	c := newCluster(t, 2, forever)
	nodes := c.all()
	_, err := nodes[0].transport.AppendEntriesPipeline(nodes[1].disk.server(), nodes[1].transport.LocalAddr())
	if !errors.Is(err, raft.ErrPipelineReplicationNotSupported) {
		t.Errorf("a pipeline: %v, want %v", err, raft.ErrPipelineReplicationNotSupported)
	}
}

// A leader whose followers are all dead does not wait for ever.
func TestNobodyToHandOverTo(t *testing.T) {
	c := newCluster(t, 3, forever)
	leader := leaderOf(t, c.all()...)
	for _, n := range c.all() {
		if n != leader {
			n.fail(errors.New("killed"))
			<-n.Done()
		}
	}
	if err := leader.Close(); err != nil {
		t.Fatal(err)
	}
}

// A memory node that says goodbye is out of use at once, and hears when nobody needs its
// memory any more.
func TestLeaveNode(t *testing.T) {
	n := single(t, vfs.NewMem(), forever)
	c := dial(t, n)
	ctx := testCtx(t)
	var nodes []*memnode
	for i := range 2 {
		nodes = append(nodes, newMemnode(t, fmt.Sprint("m", i), 1, just(n)))
	}
	if _, err := c.CreateNamespace(ctx, &dirpb.CreateNamespaceRequest{Name: "r2", Replicas: 2}); err != nil {
		t.Fatal(err)
	}
	x, err := c.OpenSession(ctx, &dirpb.OpenSessionRequest{Namespace: "r2"})
	if err != nil {
		t.Fatal(err)
	}
	nodes[1].mute.Store(true)
	q := &dirpb.LeaveNodeRequest{NodeId: nodes[1].id, Incarnation: 1}
	left := make(chan error, 1)
	go func() { _, err := c.LeaveNode(ctx, q); left <- err }()
	acknowledge := func() {
		t.Helper()
		q := &dirpb.RenewRequest{SessionId: x.SessionId, AckedMapVersion: statusOf(t, c).Map.Version,
			Number: numbers.Add(1)}
		if _, err := c.Renew(ctx, q); err != nil {
			t.Fatal(err)
		}
	}
	testutil.Until(t, "sessions to be told", func() bool { return statusOf(t, c).Map.Nodes[1].Leaving })
	if state := statusOf(t, c).Map.Pgs[0].State; state != dirpb.PGState_PG_ACTIVE {
		t.Errorf("%v, though operations may be under way", state)
	}
	acknowledge()
	testutil.Until(t, "the freeze", func() bool { return statusOf(t, c).Map.Pgs[0].State == dirpb.PGState_PG_FROZEN })
	select {
	case err := <-left:
		t.Fatalf("told that nobody uses the memory: %v; a session does", err)
	default:
	}
	// A goodbye that took a second is a death, of which sessions have to be told, too.
	for waits := true; waits; {
		acknowledge()
		select {
		case err := <-left:
			if waits = false; err != nil {
				t.Fatal(err)
			}
		case <-time.After(20 * time.Millisecond):
		}
	}
	st := statusOf(t, c).Map
	if st.Pgs[0].State != dirpb.PGState_PG_ACTIVE || len(st.Pgs[0].Members) != 1 ||
		st.Pgs[0].Members[0].NodeId != nodes[0].id {
		t.Errorf("placement group %v", st.Pgs[0])
	}
	if _, err := c.LeaveNode(ctx, q); err != nil {
		t.Errorf("a goodbye that is repeated: %v", err)
	}
}

// A node that was removed while it was down has never been told, and nobody calls it: it asks. With another address it
// asks to be called there, and is not taken in again for that.
func TestRemovedWhileDown(t *testing.T) {
	c := newCluster(t, 3, forever)
	ctx := testCtx(t)
	i := c.index(leaderOf(t, c.all()...))
	down := (i + 1) % 3
	gone := c.all()[down]
	if err := gone.Close(); err != nil {
		t.Fatal(err)
	}
	others := []*Node{c.all()[i], c.all()[(i+2)%3]}
	retry(t, "remove", others, func(d dirpb.DirectoryClient) error {
		_, err := d.RemoveDirectory(ctx, &dirpb.RemoveDirectoryRequest{Id: gone.opts.ID})
		if status.Code(err) == codes.NotFound {
			return nil // an answer that was lost
		}
		return err
	})
	for _, addr := range []string{string(gone.transport.LocalAddr()), ""} {
		again := c.restart(down, addr)
		select {
		case <-again.Done():
		case <-ctx.Done():
			t.Fatalf("address %q: a node that was removed while it was down goes on", addr)
		}
		if !errors.Is(again.Err(), ErrRemoved) {
			t.Fatalf("address %q: stopped because of %v", addr, again.Err())
		}
		again.Close()
	}
}

// Of two answers that say so the second counts, if none between them says otherwise.
func TestDismissal(t *testing.T) {
	var d dismissal
	now := time.Now()
	const patience = time.Second
	for i, step := range []struct{ gone, believed bool }{{false, false}, {true, false}, {false, false}, {true, false},
		{true, true}} {
		if !d.due(now, patience) {
			t.Fatalf("step %d: it is not time to ask", i)
		}
		if got := d.noteAnswer(step.gone, now); got != step.believed {
			t.Errorf("step %d: believed %v", i, got)
		}
		if d.due(now.Add(patience/2), patience) {
			t.Errorf("step %d: it asks again before it may believe", i)
		}
		now = now.Add(patience)
	}
}

func TestRemove(t *testing.T) {
	c := newCluster(t, 3, forever)
	ctx := testCtx(t)
	leader := leaderOf(t, c.all()...)
	i := c.index(leader)
	gone := c.all()[(i+1)%3]
	_, err := dial(t, leader).RemoveDirectory(ctx, &dirpb.RemoveDirectoryRequest{Id: "nobody"})
	if status.Code(err) != codes.NotFound && status.Code(err) != codes.FailedPrecondition {
		t.Fatal(err)
	}
	retry(t, "remove", c.all(), func(d dirpb.DirectoryClient) error {
		_, err := d.RemoveDirectory(ctx, &dirpb.RemoveDirectoryRequest{Id: gone.opts.ID})
		if status.Code(err) == codes.NotFound {
			return nil // an answer that was lost
		}
		return err
	})
	select {
	case <-gone.Done():
	case <-ctx.Done():
		t.Fatal("a removed node goes on")
	}
	if !errors.Is(gone.Err(), ErrRemoved) || !errors.Is(gone.Close(), ErrRemoved) {
		t.Fatalf("stopped because of %v", gone.Err())
	}
	var others []*Node
	for _, n := range c.all() {
		if n != gone {
			others = append(others, n)
		}
	}
	retry(t, "the audit trail", others, func(d dirpb.DirectoryClient) error {
		rep, err := d.Audit(ctx, &dirpb.AuditRequest{Limit: 1})
		if e := rep.GetEntries(); err == nil && (len(e) != 1 || e[0].Action != actRemoveDirectory ||
			e[0].Object != gone.opts.ID) {
			t.Errorf("the last audit entry is %v", e)
		}
		return err
	})
	// Started again, it understands the same.
	again := c.restart((i+1)%3, "")
	select {
	case <-again.Done():
	case <-ctx.Done():
		t.Fatal("a removed node goes on after a restart")
	}
	if !errors.Is(again.Err(), ErrRemoved) {
		t.Fatalf("stopped because of %v", again.Err())
	}

	// A leader may be told to go; the last one may not.
	rest := []*Node{c.all()[i], c.all()[(i+2)%3]}
	leader = leaderOf(t, rest...)
	if _, err := dial(t, leader).RemoveDirectory(ctx, &dirpb.RemoveDirectoryRequest{Id: leader.opts.ID}); err != nil {
		t.Fatal(err)
	}
	select {
	case <-leader.Done():
	case <-ctx.Done():
		t.Fatal("a removed leader goes on")
	}
	last := rest[0]
	if last == leader {
		last = rest[1]
	}
	leaderOf(t, last)
	testutil.Until(t, "one entry", func() bool {
		var left []*fsmpb.Directory
		last.machine.view(func(s *fsm.State) { left = s.Directory() })
		return len(left) == 1
	})
	_, err = dial(t, last).RemoveDirectory(ctx, &dirpb.RemoveDirectoryRequest{Id: last.opts.ID})
	wantCode(t, err, codes.FailedPrecondition, "only one left")
}

func TestJoinRefused(t *testing.T) {
	n := single(t, vfs.NewMem(), forever)
	c := dial(t, n)
	ctx := testCtx(t)
	dead, err := loopback.Free()
	if err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		q    *dirpb.JoinDirectoryRequest
		code codes.Code
		word string
	}{
		{&dirpb.JoinDirectoryRequest{RaftAddr: "h:1", GrpcAddr: "h:1"}, codes.InvalidArgument, "id"},
		{&dirpb.JoinDirectoryRequest{Id: "d2", RaftAddr: "h", GrpcAddr: "h:1"}, codes.InvalidArgument, "host:port"},
		{&dirpb.JoinDirectoryRequest{Id: "d2", RaftAddr: "h:1", GrpcAddr: "0.0.0.0:1"}, codes.InvalidArgument,
			"0.0.0.0"},
		{&dirpb.JoinDirectoryRequest{Id: "d2", RaftAddr: string(n.transport.LocalAddr()), GrpcAddr: "h:1"},
			codes.AlreadyExists, "d1"},
		{&dirpb.JoinDirectoryRequest{Id: "d2", RaftAddr: dead, GrpcAddr: "h:1"}, codes.FailedPrecondition,
			"runs a version of kvd that knows no levels"},
		{&dirpb.JoinDirectoryRequest{Id: "d2", RaftAddr: dead, GrpcAddr: "h:1", Level: fsm.Level}, codes.Unavailable,
			"does not answer"},
	} {
		_, err := c.JoinDirectory(ctx, tc.q)
		wantCode(t, err, tc.code, tc.word)
	}
	if s := statusOf(t, c); len(s.Directory) != 1 {
		t.Fatalf("members %v", s.Directory)
	}
}

// A leader that has lost its quorum must not answer what a newer leader might
// contradict, even before it notices: its E lags, and its list of regions.
func TestNoQuorumNoAnswer(t *testing.T) {
	c := newCluster(t, 2, forever)
	ctx := testCtx(t)
	m := newMemnode(t, "m1", 1, c.all)
	var x *dirpb.OpenSessionReply
	retry(t, "open", c.all(), func(d dirpb.DirectoryClient) (err error) {
		x, err = d.OpenSession(ctx, &dirpb.OpenSessionRequest{})
		return err
	})
	leader := leaderOf(t, c.all()...)
	// Messages that the other node agreed to before it stopped may arrive after that: begin when it is seen
	// not to answer.
	m.mute.Store(true)
	silent := make(chan raft.Observation, 1)
	watch := raft.NewObserver(silent, false, func(o *raft.Observation) bool {
		_, ok := o.Data.(raft.FailedHeartbeatObservation)
		return ok
	})
	leader.raft.RegisterObserver(watch)
	defer leader.raft.DeregisterObserver(watch)
	if err := c.all()[1-c.index(leader)].Close(); err != nil {
		t.Fatal(err)
	}
	select {
	case <-silent:
	case <-ctx.Done():
		t.Fatal("the leader reaches a node that stopped")
	}
	for name, call := range map[string]func() error{
		"Renew": func() error { _, err := leader.Renew(ctx, &dirpb.RenewRequest{SessionId: x.SessionId}); return err },
		"SessionState": func() error {
			_, err := leader.SessionState(ctx, &dirpb.SessionStateRequest{SessionId: 99})
			return err
		},
		"ClaimJob": func() error {
			_, err := leader.ClaimJob(ctx, &dirpb.ClaimJobRequest{SessionId: x.SessionId})
			return err
		},
		"ReportJob": func() error {
			_, err := leader.ReportJob(ctx, &dirpb.ReportJobRequest{SessionId: x.SessionId, JobId: 1})
			return err
		},
		"Heartbeat": func() error {
			_, err := leader.Heartbeat(ctx, &dirpb.HeartbeatRequest{NodeId: m.id, Incarnation: 1})
			return err
		},
	} {
		if err := call(); status.Code(err) != codes.FailedPrecondition {
			t.Errorf("%s without a quorum: %v", name, err)
		}
	}
	_, err := leader.RegisterNode(ctx, m.q)
	if code := status.Code(err); code != codes.Unavailable && code != codes.FailedPrecondition {
		t.Errorf("RegisterNode without a quorum: %v", err)
	}
}
