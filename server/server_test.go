package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
	"github.com/hashicorp/raft"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/testutil"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
	"github.com/kvd-project/kvd/server/lead"
	"github.com/kvd-project/kvd/server/raftstore"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds every wait of a test.
const patience = testutil.Limit

// forever is a lease that no test outlives.
const forever = time.Hour

func testCtx(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

func start(t testing.TB, opts Options) *Node {
	t.Helper()
	n, err := Open(testCtx(t), opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { n.Close() })
	return n
}

func ready(t testing.TB, n *Node) *Node {
	t.Helper()
	if err := n.Ready(testCtx(t)); err != nil {
		t.Fatal(err)
	}
	return n
}

// single starts a cluster of one on a filesystem that outlives it.
func single(t testing.TB, fs vfs.FS, lease time.Duration) *Node {
	t.Helper()
	return ready(t, start(t, Options{ID: "d1", DataDir: "d1", fs: fs, Bootstrap: true, Lease: lease, LastCopyLeases: 2,
		EpochInterval: 10 * time.Millisecond}))
}

func dial(t testing.TB, n *Node) dirpb.DirectoryClient {
	t.Helper()
	conn, err := grpc.NewClient("passthrough:///"+n.Addr(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return dirpb.NewDirectoryClient(conn)
}

func leaderOf(t testing.TB, nodes ...*Node) (leader *Node) {
	t.Helper()
	testutil.Until(t, "a leader", func() bool {
		for _, n := range nodes {
			if n.ctx.Err() == nil && n.leading.Load() != nil && n.raft.VerifyLeader().Error() == nil {
				leader = n
				return true
			}
		}
		return false
	})
	return leader
}

// retry calls fn on the leader until it succeeds: leaders may change at any
// time on a busy machine.
func retry(t testing.TB, what string, nodes []*Node, fn func(c dirpb.DirectoryClient) error) {
	t.Helper()
	conns := make(map[*Node]dirpb.DirectoryClient)
	testutil.UntilNone(t, what, func() error {
		n := leaderOf(t, nodes...)
		if conns[n] == nil {
			conns[n] = dial(t, n)
		}
		return fn(conns[n])
	})
}

func wantCode(t testing.TB, err error, code codes.Code, words ...string) {
	t.Helper()
	if status.Code(err) != code {
		t.Fatalf("error %v, want %v", err, code)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Fatalf("error %q does not say %q", err, w)
		}
	}
}

// memnode plays a memory node: it heartbeats, publishes what it is asked for and
// confirms fences.
type memnode struct {
	t     testing.TB
	nodes func() []*Node // of the directory
	q     *dirpb.RegisterNodeRequest
	id    uint32

	mute    atomic.Bool // do not heartbeat
	hold    atomic.Bool // do not confirm fences
	mu      sync.Mutex
	beating sync.Mutex // held while it heartbeats
	fenced  map[uint32]bool
	lost    bool // told to register again
	at      *dirpb.Position
	died    *leadership // to this one
}

func newMemnode(t testing.TB, name string, incarnation uint64, nodes func() []*Node) *memnode {
	return followed(t, nil, name, incarnation, nodes)
}

// followed is newMemnode for another process with the name of one that dies, which each leader has to hear of.
func followed(t testing.TB, before *memnode, name string, incarnation uint64, nodes func() []*Node) *memnode {
	m := &memnode{t: t, nodes: nodes, fenced: make(map[uint32]bool), q: &dirpb.RegisterNodeRequest{
		Name: name, Incarnation: incarnation, HostId: "host", CapacityBytes: 256 << 20,
		Endpoints: []*dirpb.Endpoint{{Provider: "tcp", Addr: "127.0.0.1:9"}},
	}}
	ctx := testCtx(t)
	retry(t, "register "+name, nodes(), func(c dirpb.DirectoryClient) error {
		ctx := ctx
		if before != nil {
			before.dies()
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, 5*time.Second)
			defer cancel()
		}
		r, err := c.RegisterNode(ctx, m.q)
		m.id, m.at = r.GetNodeId(), r.GetPosition()
		return err
	})
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(10 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-stop:
				return
			case <-tick.C:
			}
			m.beat(ctx)
		}
	}()
	t.Cleanup(func() { close(stop); <-done })
	return m
}

// dies ends the heartbeats, and breaks off the last one.
func (m *memnode) dies() {
	m.mute.Store(true)
	m.beating.Lock() // none is under way
	defer m.beating.Unlock()
	n := leaderOf(m.t, m.nodes()...)
	l, err := n.leader()
	if err != nil {
		m.t.Fatal(err)
	}
	if m.died == l {
		return
	}
	m.died = l
	n.withState(l, func(x *lead.Leader, _ *fsm.State, now time.Duration) {
		x.Broke(m.id, m.q.Incarnation, x.Beat(m.id), now)
	})
}

// beat calls the nodes' methods directly, without the network.
func (m *memnode) beat(ctx context.Context) {
	m.beating.Lock()
	defer m.beating.Unlock()
	if m.mute.Load() {
		return
	}
	for _, n := range m.nodes() {
		if n.leading.Load() == nil {
			continue
		}
		q := &dirpb.HeartbeatRequest{NodeId: m.id, Incarnation: m.q.Incarnation, Boot: m.q.Boot,
			Stats: &dirpb.NodeStats{Connections: 3}}
		m.mu.Lock()
		for id := range m.fenced {
			q.FencedSessions = append(q.FencedSessions, id)
		}
		q.Position = m.at
		m.mu.Unlock()
		r, err := n.Heartbeat(ctx, q)
		if err != nil {
			continue
		}
		m.mu.Lock()
		if m.lost = r.UnknownNode; r.Position != nil {
			m.at = r.Position
		}
		clear(m.fenced)
		if !m.hold.Load() {
			for _, id := range r.FenceSessions {
				m.fenced[id] = true
			}
		}
		m.mu.Unlock()
		for _, w := range r.Regions {
			if !w.Published {
				_, _ = n.PublishRegion(ctx, &dirpb.PublishRegionRequest{ // the next beat tries again
					NodeId: m.id, Incarnation: m.q.Incarnation, Boot: m.q.Boot, PgId: w.PgId,
					Keys: []*dirpb.RegionKeys{{Provider: "tcp", IndexRkey: uint64(w.PgId)<<32 | uint64(w.Epoch)}},
				})
			}
		}
	}
}

// silence returns when no heartbeat is under way, nor will be.
func (m *memnode) silence() {
	m.mute.Store(true)
	m.beating.Lock()
	defer m.beating.Unlock()
}

func (m *memnode) told() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.lost
}

func just(n *Node) func() []*Node { return func() []*Node { return []*Node{n} } }

func open(t testing.TB, c dirpb.DirectoryClient) *dirpb.OpenSessionReply {
	t.Helper()
	r, err := c.OpenSession(testCtx(t), &dirpb.OpenSessionRequest{Client: "test", HostId: "host"})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// numbers are those of renewals, which are to rise.
var numbers atomic.Uint64

// lasting is a placement group's usage without what only one leader estimates.
func lasting(u *dirpb.PGUsage) *dirpb.PGUsage {
	u = proto.CloneOf(u)
	u.LiveUnits, u.FreeUnits, u.ForeignUnits, u.LimboUnits, u.ComingUnits, u.LostUnits = 0, 0, 0, 0, 0, 0
	u.Short, u.Estimated = false, false
	return u
}

func renew(t testing.TB, c dirpb.DirectoryClient, id uint32, report uint64) *dirpb.RenewReply {
	t.Helper()
	r, err := c.Renew(testCtx(t), &dirpb.RenewRequest{SessionId: id, ReportEpoch: report, Number: numbers.Add(1)})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func life(t testing.TB, c dirpb.DirectoryClient, id uint32) dirpb.SessionLife {
	t.Helper()
	r, err := c.SessionState(testCtx(t), &dirpb.SessionStateRequest{SessionId: id})
	if err != nil {
		t.Fatal(err)
	}
	return r.Life
}

func statusOf(t testing.TB, c dirpb.DirectoryClient) *dirpb.StatusReply {
	t.Helper()
	r, err := c.Status(testCtx(t), &dirpb.StatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func newTestMachine(t *testing.T, fs vfs.FS) (*machine, *raftstore.Store) {
	t.Helper()
	s, err := raftstore.Open(t.Context(), raftstore.Options{Dir: "data", FS: fs})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	m, err := newMachine(s, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	return m, s
}

func logOf(t *testing.T, index, term uint64, c *fsmpb.Command) *raft.Log {
	t.Helper()
	b, err := proto.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	return &raft.Log{Index: index, Term: term, Type: raft.LogCommand, Data: b}
}

// Failures of the state machine come back as a Result; entries apply once; an
// entry of another term than its command's is dropped.
func TestMachine(t *testing.T) {
	fs := vfs.NewMem()
	m, store := newTestMachine(t, fs)
	put := func(term uint64, id string) *fsmpb.Command {
		return &fsmpb.Command{
			Term: term, Op: &fsmpb.Command_PutDirectory{
				PutDirectory: &fsmpb.PutDirectory{Directory: &fsmpb.Directory{Id: id}}}}
	}
	out := m.ApplyBatch([]*raft.Log{
		logOf(t, 3, 2, put(2, "a")),
		logOf(t, 4, 2, put(2, "")),
		{Index: 5, Term: 2, Type: raft.LogConfiguration, Data: []byte("not a command")},
		logOf(t, 6, 3, put(2, "late")),
		{Index: 7, Term: 3, Type: raft.LogCommand, Data: []byte{0xff}},
		logOf(t, 3, 2, put(2, "twice")),
	})
	errs := make([]error, len(out))
	for i, o := range out {
		if r, ok := o.(fsm.Result); ok {
			errs[i] = r.Err
		} else if i != 2 {
			t.Fatalf("entry %d answered %T", i, o)
		}
	}
	for i, want := range []error{nil, fsm.ErrInvalid, nil, errDeposed, fsm.ErrInvalid, fsm.ErrExists} {
		if !errors.Is(errs[i], want) {
			t.Errorf("entry %d: %v, want %v", i, errs[i], want)
		}
	}
	ids := func(m *machine) (out []string) {
		m.view(func(s *fsm.State) {
			for _, d := range s.Directory() {
				out = append(out, d.Id)
			}
		})
		return out
	}
	if got := fmt.Sprint(ids(m), m.appliedIndex()); got != "[a] 7" {
		t.Fatalf("state %s", got)
	}

	// A snapshot labelled with an older index than it reflects must not let entries
	// apply twice.
	snap, err := m.Snapshot()
	if err != nil {
		t.Fatal(err)
	}
	sink, err := store.Snapshots().Create(1, 5, 2, raft.Configuration{}, 1, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(snap.Persist(sink), sink.Close()); err != nil {
		t.Fatal(err)
	}
	other, _ := newTestMachine(t, vfs.NewMem())
	_, r, err := store.Snapshots().Open(sink.ID())
	if err != nil {
		t.Fatal(err)
	}
	if err := other.Restore(r); err != nil {
		t.Fatal(err)
	}
	other.ApplyBatch([]*raft.Log{logOf(t, 6, 2, put(2, "twice")), logOf(t, 8, 3, put(3, "b"))})
	if got := fmt.Sprint(ids(other), other.appliedIndex()); got != "[a b] 8" {
		t.Fatalf("restored state %s", got)
	}

	// The rows alone bring the state back.
	if err := store.Close(); err != nil {
		t.Fatal(err)
	}
	again, _ := newTestMachine(t, fs)
	if got := fmt.Sprint(ids(again), again.appliedIndex()); got != "[a] 7" {
		t.Fatalf("state from rows %s", got)
	}
}

// raft panics when it cannot store its term, so on a failed disk it is told that it
// did; a vote, which must never be lost, still fails.
func TestFailedStableStore(t *testing.T) {
	var broken atomic.Bool
	_, store := newTestMachine(t, errorfs.Wrap(vfs.NewMem(), errorfs.InjectorFunc(func(op errorfs.Op) error {
		if broken.Load() && op.Kind.ReadOrWrite() == errorfs.OpIsWrite {
			return errorfs.ErrInjected
		}
		return nil
	})))
	s := stable{store}
	if err := s.SetUint64([]byte("CurrentTerm"), 3); err != nil {
		t.Fatal(err)
	}
	broken.Store(true)
	for range 2 {
		if err := s.SetUint64([]byte("CurrentTerm"), 4); err != nil {
			t.Fatalf("term on a failed disk: %v", err)
		}
		if err := s.SetUint64([]byte("LastVoteTerm"), 4); !errors.Is(err, raftstore.ErrBroken) {
			t.Fatalf("vote on a failed disk: %v", err)
		}
	}
	// A leader may still call a node whose store is closed, for as long as its connections last.
	_, store = newTestMachine(t, vfs.NewMem())
	if err := store.Close(); err != nil {
		t.Fatal(err)
	}
	if err := (stable{store}).SetUint64([]byte("CurrentTerm"), 4); err != nil {
		t.Fatalf("term on a closed store: %v", err)
	}
	if err := (stable{store}).SetUint64([]byte("LastVoteTerm"), 4); !errors.Is(err, raftstore.ErrClosed) {
		t.Fatalf("vote on a closed store: %v", err)
	}
}

// Apply's future decides whether a caller may try again.
func TestApplyErrors(t *testing.T) {
	n := single(t, vfs.NewMem(), forever)
	for err, want := range map[error]struct {
		code codes.Code
		word string
	}{
		raft.ErrNotLeader:                    {codes.FailedPrecondition, "nothing was done"},
		raft.ErrLeadershipTransferInProgress: {codes.FailedPrecondition, "nothing was done"},
		raft.ErrEnqueueTimeout:               {codes.Unavailable, "nothing was done"},
		raft.ErrLeadershipLost:               {codes.Unavailable, "outcome unknown"},
		raft.ErrRaftShutdown:                 {codes.Unavailable, "outcome unknown"},
		context.DeadlineExceeded:             {codes.Unavailable, "outcome unknown"},
	} {
		wantCode(t, n.applyError(err), want.code, want.word)
	}
	// A leadership of another term proposes nothing.
	_, err := n.propose(testCtx(t), &leadership{term: 99}, &fsmpb.Command{})
	wantCode(t, err, codes.FailedPrecondition)
	// Nor does it answer: this node may have led, lost and won again unnoticed, and
	// others may have led in between.
	now := n.leading.Swap(&leadership{term: n.raft.CurrentTerm() - 1})
	_, err = n.SessionState(testCtx(t), &dirpb.SessionStateRequest{SessionId: 1})
	wantCode(t, err, codes.FailedPrecondition)
	n.leading.Store(now)
	// The term is checked once more when the entry is applied.
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	l := n.leading.Load()
	_, err = n.propose(
		ctx, l, &fsmpb.Command{Op: &fsmpb.Command_ReserveEpoch{ReserveEpoch: &fsmpb.ReserveEpoch{Ceiling: 5000}}})
	if err != nil {
		wantCode(t, err, codes.Unavailable, "outcome unknown")
	}
	testutil.Until(t, "the abandoned command to apply", func() bool {
		var c uint64
		n.machine.view(func(s *fsm.State) { c = s.Meta().EpochCeiling })
		return c == 5000
	})
}

// A frozen placement group waits for every session's acknowledgement.
func TestFreezeBarrier(t *testing.T) {
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
	if res, err := n.propose(ctx, n.leading.Load(),
		&fsmpb.Command{Op: &fsmpb.Command_NodeDown{
			NodeDown: &fsmpb.NodeDown{NodeId: nodes[1].id, Incarnation: 1}}}); err != nil || res.Err != nil {
		t.Fatal(err, res.Err)
	}
	frozen := func() bool { return statusOf(t, c).Map.Pgs[0].State == dirpb.PGState_PG_FROZEN }
	version := statusOf(t, c).Map.Version
	for range 5 {
		n.plan(ctx, n.leading.Load())
		if !frozen() {
			t.Fatal("thawed before the session acknowledged")
		}
	}
	if _, err := c.Renew(ctx, &dirpb.RenewRequest{SessionId: x.SessionId, AckedMapVersion: version,
		Number: numbers.Add(1)}); err != nil {
		t.Fatal(err)
	}
	testutil.Until(t, "the thaw", func() bool {
		pg := statusOf(t, c).Map.Pgs[0]
		return pg.State == dirpb.PGState_PG_ACTIVE && pg.Epoch == 3
	})
}
