package server

import (
	"bytes"
	"context"
	"crypto/tls"
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
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/identity/identitytest"
	"github.com/kvd-project/kvd/internal/loopback"
	"github.com/kvd-project/kvd/internal/token"
	"github.com/kvd-project/kvd/internal/waiting"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
	"github.com/kvd-project/kvd/server/lead"
	"github.com/kvd-project/kvd/server/raftstore"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds every wait of a test.
const patience = waiting.Limit

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
	return ready(t, start(t, Options{ID: "d1", DataDir: "d1", fs: fs, Bootstrap: true, Lease: lease, LastCopyLeases: 2, EpochInterval: 10 * time.Millisecond}))
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

// until polls cond.
func until(t testing.TB, what string, cond func() bool) {
	t.Helper()
	waiting.Until(t, what, cond)
}

func leaderOf(t testing.TB, nodes ...*Node) (leader *Node) {
	t.Helper()
	until(t, "a leader", func() bool {
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
	var err error
	deadline := time.Now().Add(patience)
	conns := make(map[*Node]dirpb.DirectoryClient)
	for time.Now().Before(deadline) {
		n := leaderOf(t, nodes...)
		if conns[n] == nil {
			conns[n] = dial(t, n)
		}
		if err = fn(conns[n]); err == nil {
			return
		}
		time.Sleep(2 * time.Millisecond)
	}
	t.Fatalf("%s: %v", what, err)
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
		q := &dirpb.HeartbeatRequest{NodeId: m.id, Incarnation: m.q.Incarnation, Boot: m.q.Boot, Stats: &dirpb.NodeStats{Connections: 3}}
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

// ---- start -----------------------------------------------------------------

func TestOptions(t *testing.T) {
	for _, tc := range []struct {
		opts Options
		want []string
	}{
		{Options{}, []string{"ID", "DataDir"}},
		{Options{ID: strings.Repeat("d", 65), InMemory: true}, []string{"ID"}},
		{Options{ID: "d", InMemory: true, GRPCAddr: "10.0.0.1:1"}, []string{"GRPCAddr", "Insecure"}},
		{Options{ID: "d", InMemory: true, RaftAddr: ":1"}, []string{"RaftAddr", "TLS", "RaftAdvertise"}},
		{Options{ID: "d", InMemory: true, GRPCAddr: "0.0.0.0:1", Insecure: true}, []string{"GRPCAdvertise"}},
		{Options{ID: "d", InMemory: true, GRPCAdvertise: "0.0.0.0:1"}, []string{"GRPCAdvertise"}},
		{Options{ID: "d", InMemory: true, RaftAdvertise: "host"}, []string{"RaftAdvertise", "host:port"}},
		{Options{ID: "d", InMemory: true, GRPCAddr: "127.0.0.1:x"}, []string{"GRPCAddr", "port"}},
		{Options{ID: "d", InMemory: true, Bootstrap: true, Join: []string{"nohost"}}, []string{"own address", "nohost"}},
		{Options{ID: "d", InMemory: true, Lease: 1, EpochInterval: 1, ElectionTimeout: 1}, []string{"Lease", "EpochInterval", "ElectionTimeout", "50ms", "10ms"}},
		{Options{ID: "d", InMemory: true, ScrubInterval: 1}, []string{"ScrubInterval", "10ms"}},
		{Options{ID: "d", InMemory: true, TLS: &tls.Config{}}, []string{"certificate", "RootCAs"}},
	} {
		_, err := Open(context.Background(), tc.opts)
		if err == nil {
			t.Fatalf("%+v opened", tc.opts)
		}
		for _, w := range tc.want {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("error %q does not say %q", err, w)
			}
		}
	}
	o := Options{ID: "d", InMemory: true, GRPCAddr: "0.0.0.0:1", GRPCAdvertise: "host:1", Insecure: true}
	o.ensureDefaults()
	if err := o.Validate(); err != nil || o.Lease != time.Second || o.EpochInterval != 100*time.Millisecond || o.DefaultNamespace != "default" {
		t.Fatalf("%+v: %v", o, err)
	}
}

func TestCannotStart(t *testing.T) {
	dir := t.TempDir()
	n := ready(t, start(t, Options{ID: "d1", DataDir: dir, Bootstrap: true}))
	ctx := testCtx(t)
	_, err := Open(ctx, Options{ID: "d1", DataDir: dir, Bootstrap: true})
	if !errors.Is(err, raftstore.ErrLocked) || !strings.Contains(err.Error(), dir) {
		t.Errorf("second node on one folder: %v", err)
	}
	_, err = Open(ctx, Options{ID: "d2", InMemory: true, Bootstrap: true, GRPCAddr: n.Addr()})
	if err == nil || !strings.Contains(err.Error(), "GRPCAddr "+n.Addr()) {
		t.Errorf("port in use: %v", err)
	}
	raftAddr := string(n.transport.LocalAddr())
	_, err = Open(ctx, Options{ID: "d2", InMemory: true, Bootstrap: true, RaftAddr: raftAddr})
	if err == nil || !strings.Contains(err.Error(), "RaftAddr "+raftAddr) {
		t.Errorf("raft port in use: %v", err)
	}
	if _, err = Open(ctx, Options{ID: "d2", InMemory: true}); !errors.Is(err, ErrNoState) {
		t.Errorf("nothing to start from: %v", err)
	}
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}
	if err := n.Ready(ctx); err == nil {
		t.Error("ready after Close")
	}
	// With state on disk neither Bootstrap nor Join is needed.
	ready(t, start(t, Options{ID: "d1", DataDir: dir}))
}

// The health service says whether this node can be of use.
func TestHealth(t *testing.T) {
	n := single(t, vfs.NewMem(), forever)
	check := func(n *Node, service string, want healthpb.HealthCheckResponse_ServingStatus) {
		t.Helper()
		r, err := health{n: n}.Check(testCtx(t), &healthpb.HealthCheckRequest{Service: service})
		if err != nil || r.Status != want {
			t.Fatalf("%q is %v, %v; want %v", service, r.GetStatus(), err, want)
		}
	}
	check(n, "", healthpb.HealthCheckResponse_SERVING)
	check(n, "kvd.directory.v1.Directory", healthpb.HealthCheckResponse_SERVING)
	_, err := health{n: n}.Check(testCtx(t), &healthpb.HealthCheckRequest{Service: "other"})
	wantCode(t, err, codes.NotFound, "other")
	// A node whose cluster cannot be reached is up, but of no use.
	lost := start(t, Options{ID: "d2", InMemory: true, Join: []string{"127.0.0.1:1"}})
	check(lost, "", healthpb.HealthCheckResponse_NOT_SERVING)
}

// ---- sessions --------------------------------------------------------------

func TestSessions(t *testing.T) {
	n := single(t, vfs.NewMem(), forever)
	c := dial(t, n)
	ctx := testCtx(t)
	_, err := c.OpenSession(ctx, &dirpb.OpenSessionRequest{})
	wantCode(t, err, codes.Unavailable, "no memory node is up", "nothing was done")
	_, err = c.OpenSession(ctx, &dirpb.OpenSessionRequest{Namespace: "nope"})
	wantCode(t, err, codes.NotFound, `"nope"`)

	m1, m2 := newMemnode(t, "m1", 1, just(n)), newMemnode(t, "m2", 1, just(n))
	if m1.id == 0 || m1.id == m2.id {
		t.Fatalf("ids %d and %d", m1.id, m2.id)
	}
	// The default namespace is made by the session that needs it.
	a, b := open(t, c), open(t, c)
	if a.SessionId == b.SessionId || a.SessionId == 0 || a.Discriminator == b.Discriminator || a.NamespaceId != b.NamespaceId ||
		a.LeaseMillis != uint64(forever.Milliseconds()) || a.RenewMillis == 0 || a.MapVersion == 0 || a.MaxLanes == 0 {
		t.Fatalf("opened %v and %v", a, b)
	}
	r, err := c.RegisterNode(ctx, m1.q)
	if err != nil || len(r.Keys) != 1 || r.Keys[0].Generation != 1 || len(r.Keys[0].Key) != token.KeySize || r.ClusterId == "" || r.HeartbeatMillis == 0 {
		t.Fatalf("registered %v, %v", r, err)
	}
	if g := verified(t, r.Keys, a.Token); g != (token.Grant{Session: a.SessionId, Namespace: a.NamespaceId, Generation: 1, Lanes: maxLanes, Expires: g.Expires}) ||
		lead.TokenNumber(1, g.Expires) != a.TokenNumber || a.MaxLanes != maxLanes {
		t.Fatalf("token %v of %v", g, a)
	}
	ro, err := c.OpenSession(ctx, &dirpb.OpenSessionRequest{Namespace: "default", ReadOnly: true, Client: strings.Repeat("é", 300)})
	if err != nil {
		t.Fatal(err)
	}
	if g := verified(t, r.Keys, ro.Token); !g.ReadOnly {
		t.Fatalf("read-only token %v", g)
	}

	s := statusOf(t, c)
	if len(s.Map.Pgs) != 2 || len(s.Map.Shards) != 8 || len(s.Sessions) != 3 || len(s.Usage) != 2 || s.RaftApplied == 0 ||
		len(s.Directory) != 1 || !s.Directory[0].Leader || !s.Directory[0].Voter || s.Directory[0].GrpcAddr != n.Addr() {
		t.Fatalf("status %v", s)
	}
	if s.Sessions[0].Client != "test" || s.Sessions[0].Namespace != "default" || s.Sessions[0].Life != dirpb.SessionLife_SESSION_LIVE {
		t.Fatalf("session info %v", s.Sessions[0])
	}
	until(t, "node statistics", func() bool { return statusOf(t, c).NodeStats[m1.id].GetConnections() == 3 })

	pg := s.Map.Pgs[0].Id
	g, err := c.GrantExtent(ctx, &dirpb.GrantExtentRequest{SessionId: a.SessionId, PgId: pg, WantUnits: 1000, PlaceUnits: 10})
	if err != nil || len(g.Runs) != 1 || g.Runs[0].Units != 1000 {
		t.Fatalf("granted %v, %v", g, err)
	}
	_, err = c.GrantExtent(ctx, &dirpb.GrantExtentRequest{SessionId: ro.SessionId, PgId: pg, WantUnits: 1})
	wantCode(t, err, codes.FailedPrecondition, "read-only")
	if u := statusOf(t, c).Usage[0]; u.GrantedUnits != 1000 {
		t.Fatalf("usage %v", u)
	}
	_, err = c.CloseSession(ctx, &dirpb.CloseSessionRequest{SessionId: a.SessionId, Runs: []*dirpb.ReturnedRun{{PgId: pg, Unit: 1 << 31, Units: 1, Generation: 1}}})
	wantCode(t, err, codes.InvalidArgument, "returned run")
	if _, err = c.CloseSession(ctx, &dirpb.CloseSessionRequest{SessionId: a.SessionId, Runs: g.Runs}); err != nil {
		t.Fatal(err)
	}
	if u := statusOf(t, c).Usage[0]; u.GrantedUnits != 0 || u.ReturnedUnits != 1000 {
		t.Fatalf("usage %v", u)
	}
	_, err = c.CloseSession(ctx, &dirpb.CloseSessionRequest{SessionId: a.SessionId})
	wantCode(t, err, codes.NotFound)
	_, err = c.Renew(ctx, &dirpb.RenewRequest{SessionId: a.SessionId})
	wantCode(t, err, codes.NotFound, "fenced")
	for id, want := range map[uint32]dirpb.SessionLife{
		a.SessionId: dirpb.SessionLife_SESSION_FENCED, b.SessionId: dirpb.SessionLife_SESSION_LIVE, 1 << 30: dirpb.SessionLife_SESSION_FENCED,
	} {
		if got := life(t, c, id); got != want {
			t.Errorf("session %d is %v, want %v", id, got, want)
		}
	}

	w, err := c.CreateNamespace(ctx, &dirpb.CreateNamespaceRequest{Name: "cache", Mode: dirpb.NamespaceMode_NAMESPACE_CACHE, BytesPerNode: 8 << 20})
	if err != nil || w.Namespace.Name != "cache" || w.Namespace.Mode != dirpb.NamespaceMode_NAMESPACE_CACHE {
		t.Fatalf("created %v, %v", w, err)
	}
	_, err = c.CreateNamespace(ctx, &dirpb.CreateNamespaceRequest{Name: "cache"})
	wantCode(t, err, codes.AlreadyExists, "cache")
	_, err = c.CreateNamespace(ctx, &dirpb.CreateNamespaceRequest{Name: "Bad Name"})
	wantCode(t, err, codes.InvalidArgument, "Bad Name")
	if x, err := c.OpenSession(ctx, &dirpb.OpenSessionRequest{Namespace: "cache"}); err != nil || x.NamespaceId != w.Namespace.Id {
		t.Fatalf("opened %v, %v", x, err)
	}
	// Two namespaces' seeds are drawn apart.
	if seeds := statusOf(t, c).Map.Namespaces; seeds[0].HashSeed == seeds[1].HashSeed {
		t.Error("two namespaces share a hash seed")
	}
}

// A session needs active regions: without a publishing memory node the call
// ends with its context.
func TestOpenSessionWaits(t *testing.T) {
	n := single(t, vfs.NewMem(), forever)
	c := dial(t, n)
	m := newMemnode(t, "m1", 1, just(n))
	m.silence()
	if _, err := c.CreateNamespace(testCtx(t), &dirpb.CreateNamespaceRequest{Name: "default"}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Millisecond)
	defer cancel()
	_, err := n.OpenSession(ctx, &dirpb.OpenSessionRequest{})
	wantCode(t, err, codes.Unavailable, "0 of 1")
	m.mute.Store(false)
	open(t, c)
}

func TestLeaseExpiry(t *testing.T) {
	n := single(t, vfs.NewMem(), time.Second)
	c := dial(t, n)
	m1, m2 := newMemnode(t, "m1", 1, just(n)), newMemnode(t, "m2", 1, just(n))
	m2.hold.Store(true)
	if _, err := c.CreateNamespace(testCtx(t), &dirpb.CreateNamespaceRequest{Name: "default", Replicas: 1}); err != nil {
		t.Fatal(err)
	}
	a := open(t, c)
	watch, err := c.WatchMap(testCtx(t), &dirpb.WatchMapRequest{SessionId: a.SessionId})
	if err != nil {
		t.Fatal(err)
	}
	// The lease is the memory nodes' too: one so long that a busy machine does not
	// cost m2 its own, which would count as its confirmation. Renewed, it lives longer than its lease.
	for end := time.Now().Add(1500 * time.Millisecond); time.Now().Before(end); {
		renew(t, c, a.SessionId, a.Epoch)
		if life(t, c, a.SessionId) != dirpb.SessionLife_SESSION_LIVE {
			t.Fatal("fenced while it renewed")
		}
	}
	until(t, "the lease to run out", func() bool { return life(t, c, a.SessionId) == dirpb.SessionLife_SESSION_FENCING })
	_, err = c.Renew(testCtx(t), &dirpb.RenewRequest{SessionId: a.SessionId})
	wantCode(t, err, codes.NotFound)
	for err == nil || status.Code(err) == codes.NotFound {
		if _, err = watch.Recv(); err != nil {
			wantCode(t, err, codes.NotFound, "fenced") // the stream of a fenced session ends
			break
		}
	}
	until(t, "m1's confirmation", func() bool {
		var left []uint32
		n.machine.view(func(s *fsm.State) { left = s.FenceWork(m1.id, 1) })
		return len(left) == 0
	})
	if got := life(t, c, a.SessionId); got != dirpb.SessionLife_SESSION_FENCING {
		t.Fatalf("%v though m2 has not confirmed", got)
	}
	m2.hold.Store(false)
	until(t, "the fence", func() bool { return life(t, c, a.SessionId) == dirpb.SessionLife_SESSION_FENCED })

	// A memory node that falls silent is down, and its process stays lost.
	b := open(t, c)
	stop := keepAlive(t, n, b.SessionId)
	m2.mute.Store(true)
	down := func() bool { return statusOf(t, c).Map.Nodes[m2.id-1].State == dirpb.NodeState_NODE_DOWN }
	until(t, "m2 to be down", down)
	if pg := statusOf(t, c).Map.Pgs[1]; len(pg.Members) != 1 || pg.Members[0].NodeId != m1.id {
		t.Fatalf("placement group of a lost node, which was empty and is to start over on m1: %v", pg)
	}
	m2.mute.Store(false)
	until(t, "m2 to be told", m2.told)
	_, err = c.RegisterNode(testCtx(t), m2.q)
	wantCode(t, err, codes.FailedPrecondition, "declared lost")
	// With m2 down, m1's confirmation alone fences.
	stop()
	until(t, "the second fence", func() bool { return life(t, c, b.SessionId) == dirpb.SessionLife_SESSION_FENCED })
	m2.mute.Store(true)
	m3 := newMemnode(t, "m2", 2, just(n))
	if m3.id != m2.id {
		t.Fatalf("m2 came back as node %d, was %d", m3.id, m2.id)
	}
	until(t, "the placement group to be back", func() bool {
		pg := statusOf(t, c).Map.Pgs[1]
		return pg.State == dirpb.PGState_PG_ACTIVE && pg.Members[0].NodeId == m1.id
	})
}

// keepAlive renews a session until the returned function, or the test, ends.
func keepAlive(t testing.TB, n *Node, id uint32) func() {
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(5 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-stop:
				return
			case <-tick.C:
				_, _ = n.Renew(context.Background(), &dirpb.RenewRequest{SessionId: id})
			}
		}
	}()
	end := sync.OnceFunc(func() { close(stop); <-done })
	t.Cleanup(end)
	return end
}

// A session whose OpenSession was never answered must not live for ever.
func TestUnansweredSessionExpires(t *testing.T) {
	n := single(t, vfs.NewMem(), 100*time.Millisecond)
	newMemnode(t, "m1", 1, just(n))
	x := open(t, dial(t, n))
	l := n.leading.Load()
	res, err := n.propose(testCtx(t), l, &fsmpb.Command{Op: &fsmpb.Command_OpenSession{OpenSession: &fsmpb.OpenSession{NamespaceId: x.NamespaceId}}})
	if err != nil || res.Err != nil {
		t.Fatal(err, res.Err)
	}
	until(t, "it to be fenced", func() bool { return life(t, dial(t, n), res.Session.Id) == dirpb.SessionLife_SESSION_FENCED })
}

// ---- reclaim epochs --------------------------------------------------------

func TestEpochs(t *testing.T) {
	fs := vfs.NewMem()
	n := single(t, fs, forever)
	c := dial(t, n)
	var now atomic.Pointer[Node]
	now.Store(n)
	newMemnode(t, "m1", 1, func() []*Node { return []*Node{now.Load()} })
	a, b := open(t, c), open(t, c)
	if a.MinEpoch > a.Epoch || b.MinEpoch > a.Epoch {
		t.Fatalf("minimum above a session's epoch: %v, %v", a, b)
	}
	// E moves while sessions are open, and the minimum waits for the slower one.
	var e uint64
	until(t, "E to move", func() bool { e = renew(t, c, a.SessionId, 0).Epoch; return e > b.Epoch+3 })
	if r := renew(t, c, a.SessionId, e); r.MinEpoch != b.Epoch {
		t.Fatalf("minimum %d, want %d: b has not reported", r.MinEpoch, b.Epoch)
	}
	if r := renew(t, c, b.SessionId, e-1); r.MinEpoch != e-1 {
		t.Fatalf("minimum %d, want %d", r.MinEpoch, e-1)
	}
	// A late, older report takes nothing back.
	if r := renew(t, c, b.SessionId, e-2); r.MinEpoch != e-1 {
		t.Fatalf("minimum %d after an older report, want %d", r.MinEpoch, e-1)
	}
	_, err := c.Renew(testCtx(t), &dirpb.RenewRequest{SessionId: a.SessionId, ReportEpoch: 1 << 40})
	wantCode(t, err, codes.InvalidArgument, "reports reclaim epoch")
	if r := renew(t, c, a.SessionId, e); r.MinEpoch != e-1 {
		t.Fatalf("minimum %d after a refused report, want %d", r.MinEpoch, e-1)
	}

	// The next leader knows no reports: E goes on from the reserved ceiling, the
	// minimum from what each session had at its open.
	last := renew(t, c, a.SessionId, e).Epoch
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}
	n = single(t, fs, forever)
	now.Store(n)
	c = dial(t, n)
	r := renew(t, c, a.SessionId, last)
	if r.Epoch < last || r.MinEpoch > b.Epoch {
		t.Fatalf("after a leader change E is %d, was %d; minimum %d, want at most %d", r.Epoch, last, r.MinEpoch, b.Epoch)
	}
	d := open(t, c)
	if d.Epoch < r.Epoch || d.MinEpoch > b.Epoch {
		t.Fatalf("a new session lifts the minimum: %v", d)
	}
	e = renew(t, c, d.SessionId, d.Epoch).Epoch
	if r := renew(t, c, b.SessionId, e-1); r.MinEpoch != min(last, d.Epoch, e-1) {
		t.Fatalf("minimum %d once all have reported, want %d", r.MinEpoch, min(last, d.Epoch, e-1))
	}
	// A session that ends holds nothing back.
	for _, id := range []uint32{a.SessionId, b.SessionId} {
		if _, err := c.CloseSession(testCtx(t), &dirpb.CloseSessionRequest{SessionId: id}); err != nil {
			t.Fatal(err)
		}
	}
	e = renew(t, c, d.SessionId, d.Epoch).Epoch
	if r := renew(t, c, d.SessionId, e); r.MinEpoch != e {
		t.Fatalf("minimum %d, want %d: one session is left", r.MinEpoch, e)
	}
	// E stands still while nobody is there, and never passes what is reserved.
	if _, err := c.CloseSession(testCtx(t), &dirpb.CloseSessionRequest{SessionId: d.SessionId}); err != nil {
		t.Fatal(err)
	}
	s := statusOf(t, c)
	var ceiling uint64
	n.machine.view(func(st *fsm.State) { ceiling = st.Meta().EpochCeiling })
	if s.Epoch > ceiling || s.MinEpoch != s.Epoch {
		t.Fatalf("E %d, minimum %d, ceiling %d", s.Epoch, s.MinEpoch, ceiling)
	}
	l := n.leading.Load()
	n.plan(testCtx(t), l)
	if got, _ := l.epochs(); got != s.Epoch {
		t.Fatalf("E went from %d to %d without sessions", s.Epoch, got)
	}
}

// A session being fenced still counts for the minimum.
func TestFencingHoldsMinimum(t *testing.T) {
	n := single(t, vfs.NewMem(), 150*time.Millisecond)
	c := dial(t, n)
	m := newMemnode(t, "m1", 1, just(n))
	m.hold.Store(true)
	a, b := open(t, c), open(t, c)
	least := func() uint64 {
		e := renew(t, c, b.SessionId, 0).Epoch
		return renew(t, c, b.SessionId, max(e, 1)-1).MinEpoch
	}
	until(t, "a's lease to run out", func() bool { least(); return life(t, c, a.SessionId) == dirpb.SessionLife_SESSION_FENCING })
	until(t, "E to move on", func() bool {
		if got := least(); got > a.Epoch {
			t.Fatalf("minimum %d passed session %d, being fenced, with %d", got, a.SessionId, a.Epoch)
		}
		return renew(t, c, b.SessionId, 0).Epoch > a.Epoch+20
	})
	m.hold.Store(false)
	until(t, "the minimum to move on", func() bool { return least() > a.Epoch })
}

// ---- watch -----------------------------------------------------------------

func TestWatchMap(t *testing.T) {
	n := single(t, vfs.NewMem(), forever)
	c := dial(t, n)
	newMemnode(t, "m1", 1, just(n))
	x := open(t, c)
	ctx := testCtx(t)
	watch := func(q *dirpb.WatchMapRequest) func() *dirpb.Map {
		w, err := c.WatchMap(ctx, q)
		if err != nil {
			t.Fatal(err)
		}
		return func() *dirpb.Map {
			t.Helper()
			m, err := w.Recv()
			if err != nil {
				t.Fatal(err)
			}
			return m
		}
	}
	mine, all := watch(&dirpb.WatchMapRequest{SessionId: x.SessionId}), watch(&dirpb.WatchMapRequest{})
	m := mine()
	if m.Version < x.MapVersion || len(m.Pgs) != 1 || len(m.Pgs[0].Members[0].Keys) != 1 || len(m.Shards) != 4 || m.ClusterId == "" {
		t.Fatalf("a session's map %v", m)
	}
	o := all()
	if o.Version != m.Version || len(o.Pgs) != 1 || len(o.Pgs[0].Members[0].Keys) != 0 {
		t.Fatalf("an operator's map %v", o)
	}
	later := watch(&dirpb.WatchMapRequest{SessionId: x.SessionId, AfterVersion: m.Version})
	if _, err := c.CreateNamespace(ctx, &dirpb.CreateNamespaceRequest{Name: "other", BytesPerNode: 8 << 20}); err != nil {
		t.Fatal(err)
	}
	for name, next := range map[string]func() *dirpb.Map{"session": mine, "later": later, "operator": all} {
		got, last := next(), m.Version
		for ; name == "operator" && got.Pgs[len(got.Pgs)-1].State != dirpb.PGState_PG_ACTIVE; got = next() {
			if got.Version <= last {
				t.Fatalf("version %d after %d", got.Version, last)
			}
			last = got.Version
		}
		if want := map[string]int{"session": 1, "later": 1, "operator": 2}[name]; got.Version <= m.Version || len(got.Namespaces) != want || len(got.Pgs) != want {
			t.Fatalf("%s sees %v after %d", name, got, m.Version)
		}
	}
	w, err := c.WatchMap(ctx, &dirpb.WatchMapRequest{SessionId: 99})
	if err == nil {
		_, err = w.Recv()
	}
	wantCode(t, err, codes.NotFound, "99")

	// A watcher that reads nothing neither stops the state machine nor falls
	// behind for ever: it gets the newest version at last.
	slow := watch(&dirpb.WatchMapRequest{})
	for i := range uint64(200) {
		if _, err := c.RegisterNode(ctx, &dirpb.RegisterNodeRequest{
			Name: "flapping", Incarnation: 1, Boot: i + 1, Keeps: true, Endpoints: []*dirpb.Endpoint{{Provider: "tcp", Addr: strings.Repeat("x", 256)}},
		}); err != nil {
			t.Fatal(err)
		}
	}
	var newest uint64
	n.machine.view(func(s *fsm.State) { newest = s.MapVersion() })
	until(t, "the newest map", func() bool { return slow().Version >= newest })

	streams := make(chan error, 1)
	stay, err := c.WatchMap(ctx, &dirpb.WatchMapRequest{AfterVersion: 1 << 60})
	if err != nil {
		t.Fatal(err)
	}
	go func() { _, err := stay.Recv(); streams <- err }()
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}
	wantCode(t, <-streams, codes.Unavailable)
}

// ---- clusters --------------------------------------------------------------

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
		o := Options{ID: fmt.Sprint("d", i+1), DataDir: "data", fs: c.fs[i], Lease: lease, EpochInterval: 10 * time.Millisecond}
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
	until(c.t, fmt.Sprintf("%d voters", size), func() bool {
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
		"LeaveNode":       func() error { _, err := fc.LeaveNode(ctx, &dirpb.LeaveNodeRequest{}); return err },
		"ReportNode":      func() error { _, err := fc.ReportNode(ctx, &dirpb.ReportNodeRequest{}); return err },
		"GiveUpNode":      func() error { _, err := fc.GiveUpNode(ctx, &dirpb.GiveUpNodeRequest{}); return err },
		"RestartNode":     func() error { _, err := fc.RestartNode(ctx, &dirpb.RestartNodeRequest{}); return err },
		"RequestSplit":    func() error { _, err := fc.RequestSplit(ctx, &dirpb.RequestSplitRequest{}); return err },
		"Meet":            func() error { _, err := fc.Meet(ctx, &dirpb.MeetRequest{}); return err },
		"Pages":           func() error { _, err := fc.Pages(ctx, &dirpb.PagesRequest{}); return err },
		"FindWork":        func() error { _, err := fc.FindWork(ctx, &dirpb.FindWorkRequest{}); return err },
		"ClaimJob":        func() error { _, err := fc.ClaimJob(ctx, &dirpb.ClaimJobRequest{}); return err },
		"ReportJob":       func() error { _, err := fc.ReportJob(ctx, &dirpb.ReportJobRequest{}); return err },
		"StartJob":        func() error { _, err := fc.StartJob(ctx, &dirpb.StartJobRequest{}); return err },
		"DrainNode":       func() error { _, err := fc.DrainNode(ctx, &dirpb.DrainNodeRequest{}); return err },
		"RemoveNode":      func() error { _, err := fc.RemoveNode(ctx, &dirpb.RemoveNodeRequest{}); return err },
		"Rebalance":       func() error { _, err := fc.Rebalance(ctx, &dirpb.RebalanceRequest{}); return err },
		"CreateNamespace": func() error { _, err := fc.CreateNamespace(ctx, &dirpb.CreateNamespaceRequest{}); return err },
		"AcceptLoss":      func() error { _, err := fc.AcceptLoss(ctx, &dirpb.AcceptLossRequest{}); return err },
		"JoinDirectory":   func() error { _, err := fc.JoinDirectory(ctx, &dirpb.JoinDirectoryRequest{}); return err },
		"RemoveDirectory": func() error { _, err := fc.RemoveDirectory(ctx, &dirpb.RemoveDirectoryRequest{}); return err },
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
		before, err = d.Renew(ctx, &dirpb.RenewRequest{SessionId: x.SessionId, ReportEpoch: x.Epoch, Number: numbers.Add(1)})
		return err
	})
	began := time.Now()
	if err := leader.Close(); err != nil {
		t.Fatal(err)
	}
	rest := append(c.all()[:i:i], c.all()[i+1:]...)
	var after *dirpb.RenewReply
	retry(t, "renew", rest, func(d dirpb.DirectoryClient) (err error) {
		after, err = d.Renew(ctx, &dirpb.RenewRequest{SessionId: x.SessionId, ReportEpoch: x.Epoch, Number: numbers.Add(1)})
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
	until(t, "the restarted node to catch up", func() bool {
		var ok bool
		back.machine.view(func(s *fsm.State) { ok = s.Session(y.SessionId) != nil })
		return ok
	})
	until(t, "its addresses to be known", func() bool {
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
					_, err := d.SetNamespace(testCtx(t), &dirpb.SetNamespaceRequest{Name: "n", LimitBytes: uint64(k+1) << 20})
					if status.Code(err) == codes.FailedPrecondition || err != nil && strings.Contains(err.Error(), "connection refused") {
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
		q := &dirpb.RenewRequest{SessionId: x.SessionId, AckedMapVersion: statusOf(t, c).Map.Version, Number: numbers.Add(1)}
		if _, err := c.Renew(ctx, q); err != nil {
			t.Fatal(err)
		}
	}
	until(t, "sessions to be told", func() bool { return statusOf(t, c).Map.Nodes[1].Leaving })
	if state := statusOf(t, c).Map.Pgs[0].State; state != dirpb.PGState_PG_ACTIVE {
		t.Errorf("%v, though operations may be under way", state)
	}
	acknowledge()
	until(t, "the freeze", func() bool { return statusOf(t, c).Map.Pgs[0].State == dirpb.PGState_PG_FROZEN })
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
	if st.Pgs[0].State != dirpb.PGState_PG_ACTIVE || len(st.Pgs[0].Members) != 1 || st.Pgs[0].Members[0].NodeId != nodes[0].id {
		t.Errorf("placement group %v", st.Pgs[0])
	}
	if _, err := c.LeaveNode(ctx, q); err != nil {
		t.Errorf("a goodbye that is repeated: %v", err)
	}
}

// A node that was removed while it was down has never been told, and nobody calls it: it asks. With another address it asks to be
// called there, and is not taken in again for that.
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
	for i, step := range []struct{ gone, believed bool }{{false, false}, {true, false}, {false, false}, {true, false}, {true, true}} {
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
		if e := rep.GetEntries(); err == nil && (len(e) != 1 || e[0].Action != actRemoveDirectory || e[0].Object != gone.opts.ID) {
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
	until(t, "one entry", func() bool {
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
		{&dirpb.JoinDirectoryRequest{Id: "d2", RaftAddr: "h:1", GrpcAddr: "0.0.0.0:1"}, codes.InvalidArgument, "0.0.0.0"},
		{&dirpb.JoinDirectoryRequest{Id: "d2", RaftAddr: string(n.transport.LocalAddr()), GrpcAddr: "h:1"}, codes.AlreadyExists, "d1"},
		{&dirpb.JoinDirectoryRequest{Id: "d2", RaftAddr: dead, GrpcAddr: "h:1"}, codes.FailedPrecondition, "runs a version of kvd that knows no levels"},
		{&dirpb.JoinDirectoryRequest{Id: "d2", RaftAddr: dead, GrpcAddr: "h:1", Level: fsm.Level}, codes.Unavailable, "does not answer"},
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

// ---- disks -----------------------------------------------------------------

// A process killed at any moment, on a machine that loses what was not synced,
// comes back with everything it acknowledged.
func TestCrash(t *testing.T) {
	fs := vfs.NewCrashableMem()
	n := single(t, fs, forever)
	var now atomic.Pointer[Node]
	now.Store(n)
	newMemnode(t, "m1", 1, func() []*Node { return []*Node{now.Load()} })
	var last *dirpb.OpenSessionReply
	for round := range 4 {
		c := dial(t, n)
		for range 5 {
			last = open(t, c)
			if _, err := c.GrantExtent(testCtx(t), &dirpb.GrantExtentRequest{SessionId: last.SessionId, PgId: 1, WantUnits: 10}); err != nil {
				t.Fatal(err)
			}
		}
		if round == 2 {
			if err := n.raft.Snapshot().Error(); err != nil {
				t.Fatal(err)
			}
		}
		r := renew(t, c, last.SessionId, last.Epoch)
		before := statusOf(t, c)
		crashed := fs.CrashClone(vfs.CrashCloneCfg{})
		if err := n.Close(); err != nil {
			t.Fatal(err)
		}
		fs = crashed
		n = single(t, fs, forever)
		now.Store(n)
		c = dial(t, n)
		after := statusOf(t, c)
		if after.ClusterId != before.ClusterId || len(after.Sessions) != len(before.Sessions) || !proto.Equal(lasting(after.Usage[0]), lasting(before.Usage[0])) ||
			after.Map.Version != before.Map.Version || after.Epoch < r.Epoch {
			t.Fatalf("round %d: after the crash %v, before %v", round, after, before)
		}
		if x := open(t, c); x.SessionId != last.SessionId+1 {
			t.Fatalf("round %d: session %d after %d", round, x.SessionId, last.SessionId)
		}
	}
}

// A node that joins late gets a snapshot, and starts again from it.
func TestSnapshotInstall(t *testing.T) {
	c := &cluster{t: t, fs: []vfs.FS{vfs.NewMem(), vfs.NewMem()}}
	c.opts = func(i int) Options {
		return Options{ID: fmt.Sprint("d", i+1), DataDir: "data", fs: c.fs[i], Lease: forever, snapshotLogs: 4}
	}
	o := c.opts(0)
	o.Bootstrap = true
	n := ready(t, start(t, o))
	c.nodes = []*Node{n}
	newMemnode(t, "m1", 1, c.all)
	d := dial(t, n)
	for range 20 {
		open(t, d)
	}
	if err := n.raft.Snapshot().Error(); err != nil {
		t.Fatal(err)
	}
	if first, err := n.store.FirstIndex(); err != nil || first < 10 {
		t.Fatalf("the log begins at %d, %v; the snapshot did not shorten it", first, err)
	}
	o = c.opts(1)
	o.Join = []string{n.Addr()}
	late := ready(t, start(t, o))
	c.mu.Lock()
	c.nodes = append(c.nodes, late)
	c.mu.Unlock()
	c.awaitVoters(2)
	same := func() {
		t.Helper()
		until(t, "equal states", func() bool {
			rows := func(n *Node) (b bytes.Buffer) {
				n.machine.view(func(s *fsm.State) {
					for _, r := range s.Rows() {
						fmt.Fprintf(&b, "%q=%q\n", r.Key, r.Value)
					}
				})
				return b
			}
			a, b := rows(c.all()[0]), rows(c.all()[1])
			return bytes.Equal(a.Bytes(), b.Bytes())
		})
	}
	same()
	if list, err := late.store.Snapshots().List(); err != nil || len(list) == 0 {
		t.Fatalf("no snapshot arrived: %v", err)
	}
	if err := late.Close(); err != nil {
		t.Fatal(err)
	}
	// Of two nodes, neither can elect itself or learn a new address of the other.
	at := string(late.transport.LocalAddr())
	late = ready(t, c.restart(1, at))
	same()

	// A crash between a snapshot's arrival and its restore leaves rows behind the
	// snapshot; the next start takes the snapshot.
	if err := late.Close(); err != nil {
		t.Fatal(err)
	}
	s, err := raftstore.Open(t.Context(), raftstore.Options{Dir: "data", FS: c.fs[1]})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.ReplaceRows(1, nil); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	ready(t, c.restart(1, at))
	same()
}

// A leader whose disk hangs must give way although its heartbeats would go on.
func TestStalledLeaderGivesWay(t *testing.T) {
	c := newCluster(t, 3, forever)
	i := c.index(leaderOf(t, c.all()...))
	if err := c.all()[i].Close(); err != nil {
		t.Fatal(err)
	}
	var stuck atomic.Bool
	release := make(chan struct{})
	c.fs[i] = errorfs.Wrap(c.fs[i], errorfs.InjectorFunc(func(op errorfs.Op) error {
		if stuck.Load() && (op.Kind == errorfs.OpFileSync || op.Kind == errorfs.OpFileSyncData || op.Kind == errorfs.OpFileSyncTo) {
			<-release
		}
		return nil
	}))
	inner := c.opts
	c.opts = func(i int) Options {
		o := inner(i)
		o.stallTimeout = 300 * time.Millisecond
		return o
	}
	n := ready(t, c.restart(i, ""))
	until(t, "it to lead again", func() bool {
		l := leaderOf(t, c.all()...)
		if l != n {
			_ = l.raft.LeadershipTransferToServer(n.disk.server(), n.transport.LocalAddr()).Error()
		}
		return l == n
	})
	stuck.Store(true)
	ctx := testCtx(t)
	_, err := dial(t, n).CreateNamespace(ctx, &dirpb.CreateNamespaceRequest{Name: "x"})
	wantCode(t, err, codes.Unavailable, "outcome unknown")
	select {
	case <-n.Done():
	case <-ctx.Done():
		t.Fatal("the stalled node goes on")
	}
	if !errors.Is(n.Err(), raftstore.ErrStalled) || !strings.Contains(n.Err().Error(), "data") {
		t.Fatalf("stopped because of %v", n.Err())
	}
	rest := append(c.all()[:i:i], c.all()[i+1:]...)
	retry(t, "register", rest, func(d dirpb.DirectoryClient) error {
		_, err := d.RegisterNode(ctx, &dirpb.RegisterNodeRequest{Name: "m", Incarnation: 1, Endpoints: []*dirpb.Endpoint{{Provider: "tcp"}}})
		return err
	})
	stuck.Store(false)
	close(release)
}

// ---- pieces ----------------------------------------------------------------

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
		return &fsmpb.Command{Term: term, Op: &fsmpb.Command_PutDirectory{PutDirectory: &fsmpb.PutDirectory{Directory: &fsmpb.Directory{Id: id}}}}
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
	_, err = n.propose(ctx, l, &fsmpb.Command{Op: &fsmpb.Command_ReserveEpoch{ReserveEpoch: &fsmpb.ReserveEpoch{Ceiling: 5000}}})
	if err != nil {
		wantCode(t, err, codes.Unavailable, "outcome unknown")
	}
	until(t, "the abandoned command to apply", func() bool {
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
	if res, err := n.propose(ctx, n.leading.Load(), &fsmpb.Command{Op: &fsmpb.Command_NodeDown{NodeDown: &fsmpb.NodeDown{NodeId: nodes[1].id, Incarnation: 1}}}); err != nil || res.Err != nil {
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
	if _, err := c.Renew(ctx, &dirpb.RenewRequest{SessionId: x.SessionId, AckedMapVersion: version, Number: numbers.Add(1)}); err != nil {
		t.Fatal(err)
	}
	until(t, "the thaw", func() bool {
		pg := statusOf(t, c).Map.Pgs[0]
		return pg.State == dirpb.PGState_PG_ACTIVE && pg.Epoch == 3
	})
}

// ---- TLS -------------------------------------------------------------------

// testTLS is a directory node's.
func testTLS(t *testing.T) *tls.Config {
	t.Helper()
	a := identitytest.New(t)
	return a.Config(a.Role("directory", "d"))
}

func TestTLS(t *testing.T) {
	conf := testTLS(t)
	a := ready(t, start(t, Options{ID: "d1", InMemory: true, Bootstrap: true, TLS: conf}))
	b := ready(t, start(t, Options{ID: "d2", InMemory: true, Join: []string{a.Addr()}, TLS: conf}))
	until(t, "two voters", func() bool { return len(b.members()) == 2 && b.appliedBy(a) })

	// Without a certificate neither listener talks.
	bare := conf.Clone()
	bare.Certificates = nil
	ctx := testCtx(t)
	conn, err := grpc.NewClient("passthrough:///"+a.Addr(), grpc.WithTransportCredentials(credentials.NewTLS(bare)))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_, err = dirpb.NewDirectoryClient(conn).Status(ctx, &dirpb.StatusRequest{})
	wantCode(t, err, codes.Unavailable)
	raw, err := tls.Dial("tcp", string(a.transport.LocalAddr()), bare)
	if err == nil {
		_ = raw.SetReadDeadline(time.Now().Add(patience))
		_, err = raw.Read(make([]byte, 1)) // TLS 1.3 tells a client of its refusal on the first read
		raw.Close()
	}
	if err == nil || errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("raft talks to a stranger: %v", err)
	}
}

// appliedBy reports whether n has applied what leader has.
func (n *Node) appliedBy(leader *Node) bool {
	return n.machine.appliedIndex() >= leader.machine.appliedIndex()
}
