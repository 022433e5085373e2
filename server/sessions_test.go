package server

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/testutil"
	"github.com/kvd-project/kvd/internal/token"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
	"github.com/kvd-project/kvd/server/lead"
)

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
	if a.SessionId == b.SessionId || a.SessionId == 0 || a.Discriminator == b.Discriminator ||
		a.NamespaceId != b.NamespaceId ||
		a.LeaseMillis != uint64(forever.Milliseconds()) || a.RenewMillis == 0 || a.MapVersion == 0 || a.MaxLanes == 0 {
		t.Fatalf("opened %v and %v", a, b)
	}
	r, err := c.RegisterNode(ctx, m1.q)
	if err != nil || len(r.Keys) != 1 || r.Keys[0].Generation != 1 || len(r.Keys[0].Key) != token.KeySize ||
		r.ClusterId == "" || r.HeartbeatMillis == 0 {
		t.Fatalf("registered %v, %v", r, err)
	}
	if g := verified(t, r.Keys, a.Token); g != (token.Grant{Session: a.SessionId, Namespace: a.NamespaceId,
		Generation: 1, Lanes: maxLanes, Expires: g.Expires}) ||
		lead.TokenNumber(1, g.Expires) != a.TokenNumber || a.MaxLanes != maxLanes {
		t.Fatalf("token %v of %v", g, a)
	}
	ro, err := c.OpenSession(ctx, &dirpb.OpenSessionRequest{Namespace: "default", ReadOnly: true,
		Client: strings.Repeat("é", 300)})
	if err != nil {
		t.Fatal(err)
	}
	if g := verified(t, r.Keys, ro.Token); !g.ReadOnly {
		t.Fatalf("read-only token %v", g)
	}

	s := statusOf(t, c)
	if len(s.Map.Pgs) != 2 || len(s.Map.Shards) != 8 || len(s.Sessions) != 3 || len(s.Usage) != 2 ||
		s.RaftApplied == 0 ||
		len(s.Directory) != 1 || !s.Directory[0].Leader || !s.Directory[0].Voter ||
		s.Directory[0].GrpcAddr != n.Addr() {
		t.Fatalf("status %v", s)
	}
	if s.Sessions[0].Client != "test" || s.Sessions[0].Namespace != "default" ||
		s.Sessions[0].Life != dirpb.SessionLife_SESSION_LIVE {
		t.Fatalf("session info %v", s.Sessions[0])
	}
	testutil.Until(t, "node statistics", func() bool { return statusOf(t, c).NodeStats[m1.id].GetConnections() == 3 })

	pg := s.Map.Pgs[0].Id
	g, err := c.GrantExtent(ctx, &dirpb.GrantExtentRequest{SessionId: a.SessionId, PgId: pg, WantUnits: 1000,
		PlaceUnits: 10})
	if err != nil || len(g.Runs) != 1 || g.Runs[0].Units != 1000 {
		t.Fatalf("granted %v, %v", g, err)
	}
	_, err = c.GrantExtent(ctx, &dirpb.GrantExtentRequest{SessionId: ro.SessionId, PgId: pg, WantUnits: 1})
	wantCode(t, err, codes.FailedPrecondition, "read-only")
	if u := statusOf(t, c).Usage[0]; u.GrantedUnits != 1000 {
		t.Fatalf("usage %v", u)
	}
	_, err = c.CloseSession(ctx, &dirpb.CloseSessionRequest{SessionId: a.SessionId, Runs: []*dirpb.ReturnedRun{
		{PgId: pg, Unit: 1 << 31, Units: 1, Generation: 1}}})
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
		a.SessionId: dirpb.SessionLife_SESSION_FENCED, b.SessionId: dirpb.SessionLife_SESSION_LIVE,
		1 << 30: dirpb.SessionLife_SESSION_FENCED,
	} {
		if got := life(t, c, id); got != want {
			t.Errorf("session %d is %v, want %v", id, got, want)
		}
	}

	w, err := c.CreateNamespace(ctx, &dirpb.CreateNamespaceRequest{
		Name: "cache", Mode: dirpb.NamespaceMode_NAMESPACE_CACHE, BytesPerNode: 8 << 20})
	if err != nil || w.Namespace.Name != "cache" || w.Namespace.Mode != dirpb.NamespaceMode_NAMESPACE_CACHE {
		t.Fatalf("created %v, %v", w, err)
	}
	_, err = c.CreateNamespace(ctx, &dirpb.CreateNamespaceRequest{Name: "cache"})
	wantCode(t, err, codes.AlreadyExists, "cache")
	_, err = c.CreateNamespace(ctx, &dirpb.CreateNamespaceRequest{Name: "Bad Name"})
	wantCode(t, err, codes.InvalidArgument, "Bad Name")
	if x, err := c.OpenSession(ctx, &dirpb.OpenSessionRequest{Namespace: "cache"}); err != nil ||
		x.NamespaceId != w.Namespace.Id {
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
	if _, err := c.CreateNamespace(testCtx(t), &dirpb.CreateNamespaceRequest{Name: "default", Replicas: 1}); err !=
		nil {
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
	testutil.Until(t, "the lease to run out", func() bool {
		return life(t, c, a.SessionId) == dirpb.SessionLife_SESSION_FENCING
	})
	_, err = c.Renew(testCtx(t), &dirpb.RenewRequest{SessionId: a.SessionId})
	wantCode(t, err, codes.NotFound)
	for err == nil || status.Code(err) == codes.NotFound {
		if _, err = watch.Recv(); err != nil {
			wantCode(t, err, codes.NotFound, "fenced") // the stream of a fenced session ends
			break
		}
	}
	testutil.Until(t, "m1's confirmation", func() bool {
		var left []uint32
		n.machine.view(func(s *fsm.State) { left = s.FenceWork(m1.id, 1) })
		return len(left) == 0
	})
	if got := life(t, c, a.SessionId); got != dirpb.SessionLife_SESSION_FENCING {
		t.Fatalf("%v though m2 has not confirmed", got)
	}
	m2.hold.Store(false)
	testutil.Until(t, "the fence", func() bool { return life(t, c, a.SessionId) == dirpb.SessionLife_SESSION_FENCED })

	// A memory node that falls silent is down, and its process stays lost.
	b := open(t, c)
	stop := keepAlive(t, n, b.SessionId)
	m2.mute.Store(true)
	down := func() bool { return statusOf(t, c).Map.Nodes[m2.id-1].State == dirpb.NodeState_NODE_DOWN }
	testutil.Until(t, "m2 to be down", down)
	if pg := statusOf(t, c).Map.Pgs[1]; len(pg.Members) != 1 || pg.Members[0].NodeId != m1.id {
		t.Fatalf("placement group of a lost node, which was empty and is to start over on m1: %v", pg)
	}
	m2.mute.Store(false)
	testutil.Until(t, "m2 to be told", m2.told)
	_, err = c.RegisterNode(testCtx(t), m2.q)
	wantCode(t, err, codes.FailedPrecondition, "declared lost")
	// With m2 down, m1's confirmation alone fences.
	stop()
	testutil.Until(t, "the second fence", func() bool {
		return life(t, c, b.SessionId) == dirpb.SessionLife_SESSION_FENCED
	})
	m2.mute.Store(true)
	m3 := newMemnode(t, "m2", 2, just(n))
	if m3.id != m2.id {
		t.Fatalf("m2 came back as node %d, was %d", m3.id, m2.id)
	}
	testutil.Until(t, "the placement group to be back", func() bool {
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
	res, err := n.propose(testCtx(t), l,
		&fsmpb.Command{Op: &fsmpb.Command_OpenSession{OpenSession: &fsmpb.OpenSession{NamespaceId: x.NamespaceId}}})
	if err != nil || res.Err != nil {
		t.Fatal(err, res.Err)
	}
	testutil.Until(t, "it to be fenced", func() bool {
		return life(t, dial(t, n), res.Session.Id) == dirpb.SessionLife_SESSION_FENCED
	})
}
