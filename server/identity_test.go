package server

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"io"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/identity"
	"github.com/kvd-project/kvd/internal/identity/identitytest"
	"github.com/kvd-project/kvd/internal/testutil"
	"github.com/kvd-project/kvd/server/fsm"
)

// directoryNode starts a cluster of one with TLS.
func directoryNode(t *testing.T, a *identitytest.Authority, opts Options) *Node {
	t.Helper()
	opts.ID, opts.InMemory, opts.Bootstrap, opts.Lease = "d1", true, true, forever
	opts.TLS = a.Config(a.Role("directory", "d1"))
	n := ready(t, start(t, opts))
	return leaderOf(t, n)
}

func dialTLS(t *testing.T, n *Node, conf *tls.Config) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient("passthrough:///"+n.Addr(), grpc.WithTransportCredentials(credentials.NewTLS(conf)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

// harmless are requests that a directory without memory nodes answers at once; nil: an empty one.
var harmless = map[string]proto.Message{
	dirpb.Directory_OpenSession_FullMethodName:     &dirpb.OpenSessionRequest{Namespace: "nowhere"},
	dirpb.Directory_WatchMap_FullMethodName:        &dirpb.WatchMapRequest{SessionId: 99},
	dirpb.Directory_CreateNamespace_FullMethodName: &dirpb.CreateNamespaceRequest{Name: "of\x00nobody"},
}

// callEmpty calls any RPC.
func callEmpty(ctx context.Context, conn *grpc.ClientConn, method string, streams bool) error {
	q := harmless[method]
	if q == nil {
		q = &emptypb.Empty{}
	}
	if !streams {
		return conn.Invoke(ctx, method, q, &emptypb.Empty{})
	}
	s, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true}, method)
	if err != nil {
		return err
	}
	if err := errors.Join(s.SendMsg(q), s.CloseSend()); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	return s.RecvMsg(&emptypb.Empty{}) // has the status
}

// firstRead gives the error of a connection on which nothing is said. TLS 1.3 tells a client of its refusal there.
func firstRead(addr string, conf *tls.Config) error {
	conf = conf.Clone()
	conf.NextProtos = []string{"h2"}
	conn, err := tls.Dial("tcp", addr, conf)
	if err != nil {
		return err
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(patience))
	_, err = conn.Read(make([]byte, 1))
	return err
}

// TestRights calls every RPC of every service that a directory node has, as every role and as those who
// have none.
func TestRights(t *testing.T) {
	a, other := identitytest.New(t), identitytest.New(t)
	n := directoryNode(t, a, Options{})
	type caller struct {
		name  string
		conf  *tls.Config
		role  identity.Role // 0: none
		code  codes.Code    // without a role
		words string
	}
	var callers []caller
	for _, r := range identity.Every.All() {
		callers = append(callers, caller{name: r.String(), conf: a.Config(a.Role(r.String(), "it")), role: r})
	}
	stranger := other.Config(other.Role("operator", "eve"))
	stranger.RootCAs = a.Pool
	nobody := a.Config(tls.Certificate{})
	nobody.Certificates = nil
	expired := func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Minute) }
	callers = append(callers,
		caller{"no certificate", nobody, 0, codes.Unavailable, "certificate required"},
		caller{"another authority", stranger, 0, codes.Unavailable, "unknown certificate authority"},
		caller{"expired", a.Config(a.Role("operator", "late", expired)), 0, codes.Unavailable, "expired certificate"},
		caller{"no identity", a.Config(a.Leaf()), 0, codes.Unauthenticated,
			"want the URI spiffe://TRUST-DOMAIN/kvd/ROLE/NAME"},
		caller{"units without a mapping", a.Config(a.Leaf(func(c *x509.Certificate) {
			c.Subject = pkix.Name{CommonName: "ann", OrganizationalUnit: []string{"operator"}}
		})), 0, codes.Unauthenticated, "no SPIFFE id"},
		caller{"unknown role", a.Config(a.Role("root", "it")), 0, codes.Unauthenticated, `role "root"`},
	)
	cells := 0
	for _, c := range callers {
		t.Run(c.name, func(t *testing.T) {
			if c.code == codes.Unavailable { // gRPC may lose the reason: the write that comes too late fails, too
				if err := firstRead(n.Addr(), c.conf); err == nil || !strings.Contains(err.Error(), c.words) {
					t.Errorf("the handshake: %v, want %q", err, c.words)
				}
			}
			conn := dialTLS(t, n, c.conf)
			for service, info := range n.grpc.GetServiceInfo() {
				for _, m := range info.Methods {
					cells++
					full := "/" + service + "/" + m.Name
					err := callEmpty(testCtx(t), conn, full, m.IsServerStream)
					code, want := status.Code(err), allowed[full]
					switch {
					case c.role == 0 && (code != c.code || code != codes.Unavailable &&
						!strings.Contains(err.Error(), c.words)):
						t.Errorf("%s: %v, want %v and %q", full, err, c.code, c.words)
					case c.role == 0:
					case want.Has(c.role):
						if slices.Contains([]codes.Code{codes.PermissionDenied, codes.Unauthenticated,
							codes.Unavailable, codes.DeadlineExceeded}, code) {
							t.Errorf("%s is for %v: %v", full, want, err)
						}
					default:
						text := "spiffe://test.example/kvd/" + c.name + "/it has the role " + c.name + ", and " +
							m.Name + " is for " + want.String()
						if code != codes.PermissionDenied || !strings.Contains(err.Error(), text) {
							t.Errorf("%s is not for %v: %v, want %q", full, c.role, err, text)
						}
					}
				}
			}
		})
	}
	t.Logf("%d cells", cells)
}

// TestRightsTable: each RPC has a row, and each row an RPC.
func TestRightsTable(t *testing.T) {
	n := directoryNode(t, identitytest.New(t), Options{})
	served := make(map[string]bool)
	for service, info := range n.grpc.GetServiceInfo() {
		for _, m := range info.Methods {
			full := "/" + service + "/" + m.Name
			if served[full] = true; allowed[full] == 0 {
				t.Errorf("%s is for nobody: give it a row in internal/dirpb/rights.go", full)
			}
		}
	}
	for full := range allowed {
		if !served[full] {
			t.Errorf("%s has a row, but is not served", full)
		}
	}
	key := []string{dirpb.Directory_RegisterNode_FullMethodName, dirpb.Directory_Heartbeat_FullMethodName}
	for _, full := range key {
		if allowed[full] != identity.RolesOf(identity.MemNode) {
			t.Errorf("%s is for %v, want memory nodes alone", full, allowed[full])
		}
	}
}

// Without TLS everybody may do everything, and the status says so.
func TestRightsWithoutTLS(t *testing.T) {
	n := single(t, vfs.NewMem(), forever)
	c := dial(t, n)
	if statusOf(t, c).Identifies {
		t.Error("the status says that callers are identified")
	}
	if _, err := c.RegisterNode(testCtx(t), registration("m1", 1)); err != nil {
		t.Error(err)
	}
}

func registration(name string, incarnation uint64) *dirpb.RegisterNodeRequest {
	return &dirpb.RegisterNodeRequest{Name: name, Incarnation: incarnation, CapacityBytes: 256 << 20,
		Endpoints: []*dirpb.Endpoint{{Provider: "tcp", Addr: "127.0.0.1:9"}}}
}

// TestNodeOwners: the name of a memory node is of the identity that had it first.
func TestNodeOwners(t *testing.T) {
	a := identitytest.New(t)
	n := directoryNode(t, a, Options{})
	as := func(role, name string) dirpb.DirectoryClient {
		return dirpb.NewDirectoryClient(dialTLS(t, n, a.Config(a.Role(role, name))))
	}
	ctx := testCtx(t)
	m1, m2, ann, ops := as("memnode", "m1"), as("memnode", "m2"), as("client", "ann"), as("operator", "ops")
	const denied = codes.PermissionDenied

	// A client learns no key, and becomes no memory node.
	reply, err := ann.RegisterNode(ctx, registration("mine", 1))
	wantCode(t, err, denied, "RegisterNode is for memnode")
	if len(reply.GetKeys()) > 0 {
		t.Error("a client has the key that signs tokens")
	}
	if nodes := statusOf(t, ops).Map.Nodes; len(nodes) != 0 {
		t.Errorf("a client registered %v", nodes)
	}

	own, err := m1.RegisterNode(ctx, registration("m1", 1))
	if err != nil || len(own.Keys) == 0 {
		t.Fatalf("a memory node is not registered: %v, %v", own, err)
	}
	reply, err = m2.RegisterNode(ctx, registration("m1", 2))
	wantCode(t, err, denied, `"m1" belongs to spiffe://test.example/kvd/memnode/m1`,
		"not to spiffe://test.example/kvd/memnode/m2")
	if len(reply.GetKeys()) > 0 {
		t.Error("the key goes to a memory node that is refused")
	}
	if _, err := m1.LeaveNode(ctx, &dirpb.LeaveNodeRequest{NodeId: own.NodeId, Incarnation: 1}); err != nil {
		t.Fatal(err)
	}
	if own, err = m1.RegisterNode(ctx, registration("m1", 3)); err != nil {
		t.Fatalf("a memory node cannot be started again: %v", err)
	}
	foreign := "memory node 1 belongs to"
	_, err = m2.Heartbeat(ctx, &dirpb.HeartbeatRequest{NodeId: own.NodeId, Incarnation: 3})
	wantCode(t, err, denied, foreign)
	_, err = m2.LeaveNode(ctx, &dirpb.LeaveNodeRequest{NodeId: own.NodeId, Incarnation: 3})
	wantCode(t, err, denied, foreign)
	_, err = m2.PublishRegion(ctx, &dirpb.PublishRegionRequest{NodeId: own.NodeId, Incarnation: 3})
	wantCode(t, err, denied, foreign)
	if _, err = m1.Heartbeat(ctx, &dirpb.HeartbeatRequest{NodeId: own.NodeId, Incarnation: 3}); err != nil {
		t.Fatal(err)
	}
	if st := statusOf(t, ops); !st.Identifies || st.Map.Nodes[0].Identity != "spiffe://test.example/kvd/memnode/m1" {
		t.Errorf("the status has %v", st.Map.Nodes)
	}

	// An operator hands a name over.
	if _, err := ops.RemoveNode(ctx, &dirpb.RemoveNodeRequest{Node: "m1", Force: true}); err != nil {
		t.Fatal(err)
	}
	if _, err := m2.RegisterNode(ctx, registration("m1", 4)); err != nil {
		t.Errorf("a name that was given up: %v", err)
	}
}

// TestSessionOwners: a session is of the client that opened it.
func TestSessionOwners(t *testing.T) {
	a := identitytest.New(t)
	n := directoryNode(t, a, Options{})
	as := func(role, name string) dirpb.DirectoryClient {
		return dirpb.NewDirectoryClient(dialTLS(t, n, a.Config(a.Role(role, name))))
	}
	ctx := testCtx(t)
	ann, bob, ops := as("client", "ann"), as("client", "bob"), as("operator", "ops")
	const denied = codes.PermissionDenied
	own, err := as("memnode", "m1").RegisterNode(ctx, registration("m1", 3))
	if err != nil {
		t.Fatal(err)
	}
	node := &memnode{t: t, nodes: just(n), fenced: make(map[uint32]bool), q: registration("m1", 3), id: own.NodeId}
	if _, err := ops.CreateNamespace(ctx, &dirpb.CreateNamespaceRequest{
		Name: "default", Owner: "spiffe://test.example/kvd/client/ann"}); err != nil {
		t.Fatal(err)
	}
	opened := make(chan *dirpb.OpenSessionReply, 1)
	go func() {
		r, err := ann.OpenSession(ctx, &dirpb.OpenSessionRequest{Client: "ann"})
		if err != nil {
			t.Error(err)
		}
		opened <- r
	}()
	var x *dirpb.OpenSessionReply
	testutil.Until(t, "a session", func() bool {
		node.beat(ctx)
		select {
		case x = <-opened:
			return true
		default:
			return false
		}
	})
	id := x.GetSessionId()
	for name, call := range map[string]func(c dirpb.DirectoryClient) error{
		"Renew": func(c dirpb.DirectoryClient) error {
			_, err := c.Renew(ctx, &dirpb.RenewRequest{SessionId: id, Number: numbers.Add(1)})
			return err
		},
		"GrantExtent": func(c dirpb.DirectoryClient) error {
			_, err := c.GrantExtent(ctx, &dirpb.GrantExtentRequest{SessionId: id, PgId: 1, WantUnits: 1, PlaceUnits: 1})
			return err
		},
		"GrantStatus": func(c dirpb.DirectoryClient) error {
			_, err := c.GrantStatus(ctx, &dirpb.GrantStatusRequest{SessionId: id, PgId: 1})
			return err
		},
		"RequestSplit": func(c dirpb.DirectoryClient) error {
			_, err := c.RequestSplit(ctx, &dirpb.RequestSplitRequest{SessionId: id, ShardId: 1})
			return err
		},
		"WatchMap": func(c dirpb.DirectoryClient) error {
			ctx, cancel := context.WithCancel(ctx)
			defer cancel()
			w, err := c.WatchMap(ctx, &dirpb.WatchMapRequest{SessionId: id})
			if err == nil {
				_, err = w.Recv()
			}
			return err
		},
	} {
		if err := call(bob); status.Code(err) != denied ||
			!strings.Contains(err.Error(), "belongs to spiffe://test.example/kvd/client/ann") {
			t.Errorf("%s with another's session: %v", name, err)
		}
		if err := call(ann); status.Code(err) == denied {
			t.Errorf("%s with one's own session: %v", name, err)
		}
	}
	for name, call := range map[string]func(c dirpb.DirectoryClient) error{
		"ClaimJob": func(c dirpb.DirectoryClient) error {
			_, err := c.ClaimJob(ctx, &dirpb.ClaimJobRequest{SessionId: id})
			return err
		},
		"ReportJob": func(c dirpb.DirectoryClient) error {
			_, err := c.ReportJob(ctx, &dirpb.ReportJobRequest{SessionId: id})
			return err
		},
	} {
		if err := call(as("janitor", "j")); status.Code(err) != denied || !strings.Contains(err.Error(), "belongs to") {
			t.Errorf("%s with another's session: %v", name, err)
		}
	}
	w, err := ann.WatchMap(ctx, &dirpb.WatchMapRequest{})
	if err == nil {
		_, err = w.Recv()
	}
	wantCode(t, err, denied, "without a session is for")
	_, err = bob.CloseSession(ctx, &dirpb.CloseSessionRequest{SessionId: id})
	wantCode(t, err, denied, "belongs to")
	if got := statusOf(t, ops).Sessions; len(got) != 1 || got[0].Identity != "spiffe://test.example/kvd/client/ann" {
		t.Errorf("the status has the sessions %v", got)
	}
	if _, err := ann.CloseSession(ctx, &dirpb.CloseSessionRequest{SessionId: id}); err != nil {
		t.Error(err)
	}
}

// Organizational units are roles if settings say so.
func TestRightsByUnit(t *testing.T) {
	a := identitytest.New(t)
	n := directoryNode(
		t, a, Options{Identities: identity.Mapping{Units: map[string]identity.Role{"sre": identity.Operator}}})
	of := func(unit string) dirpb.DirectoryClient {
		return dirpb.NewDirectoryClient(dialTLS(t, n, a.Config(a.Leaf(func(c *x509.Certificate) {
			c.Subject = pkix.Name{CommonName: "ann", OrganizationalUnit: []string{unit}}
		}))))
	}
	if _, err := of("sre").Status(testCtx(t), &dirpb.StatusRequest{}); err != nil {
		t.Error(err)
	}
	_, err := of("sales").Status(testCtx(t), &dirpb.StatusRequest{})
	wantCode(t, err, codes.Unauthenticated, "one of the organizational units sre")
	_, err = of("sre").RegisterNode(testCtx(t), registration("m", 1))
	wantCode(t, err, codes.PermissionDenied, "operator/ann has the role operator")
}

// TestRaftPortRoles: raft hears directory nodes alone, and talks to them alone.
func TestRaftPortRoles(t *testing.T) {
	a, other := identitytest.New(t), identitytest.New(t)
	var log lockedBuffer
	n := directoryNode(t, a, Options{Logger: slog.New(slog.NewTextHandler(&log, nil))})
	addr := string(n.transport.LocalAddr())
	as := func(certs ...tls.Certificate) *tls.Config {
		conf := a.Config(tls.Certificate{})
		conf.Certificates = certs
		return conf
	}
	// says sends what raft does not know, on which it hangs up.
	says := func(r identity.Role) error {
		d, err := tls.Dial("tcp", addr, as(a.Role(r.String(), "it")))
		if err != nil {
			t.Fatal(err)
		}
		defer d.Close()
		_ = d.SetDeadline(time.Now().Add(patience))
		if _, err = d.Write([]byte{0xff}); err == nil {
			_, err = d.Read(make([]byte, 1))
		}
		return err
	}
	if err := says(identity.Directory); !errors.Is(err, io.EOF) {
		t.Errorf("directory: %v, want raft to hang up", err)
	}
	for _, r := range (identity.Every &^ identity.RolesOf(identity.Directory)).All() {
		// Its refusal is lost if the bytes come after it; the log has it in any case.
		if err := says(r); err == nil || errors.Is(err, io.EOF) {
			t.Fatalf("%v: %v, want a refusal", r, err)
		}
		text := "kvd/" + r.String() + "/it has the role " + r.String() + ", and Raft is for directory"
		testutil.Until(t, "a line of the log", func() bool { return strings.Contains(log.String(), text) })
	}
	for name, conf := range map[string]*tls.Config{"no certificate": as(), "no identity": as(a.Leaf()),
		"another authority": as(other.Role("directory", "d2"))} {
		if err := firstRead(addr, conf); err == nil || !strings.Contains(err.Error(), "tls: ") {
			t.Errorf("%s: %v, want a refusal", name, err)
		}
	}

	// A memory node's listener passes for no directory node's.
	lis, err := tls.Listen("tcp", "127.0.0.1:0", a.Config(a.Role("memnode", "m1")))
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := lis.Accept()
			if err != nil {
				return
			}
			_ = c.(*tls.Conn).HandshakeContext(testCtx(t))
			_ = c.Close()
		}
	}()
	defer func() { _ = lis.Close(); <-done }()
	d2 := dirpb.NewDirectoryClient(dialTLS(t, n, a.Config(a.Role("directory", "d2"))))
	_, err = d2.JoinDirectory(testCtx(t), &dirpb.JoinDirectoryRequest{Id: "d2", RaftAddr: lis.Addr().String(),
		GrpcAddr: "127.0.0.1:1", Level: fsm.Level})
	wantCode(t, err, codes.Unavailable, "nothing was done", "has the role memnode")
	if len(n.members()) != 1 {
		t.Errorf("the members are %v", n.members())
	}
}

// A directory node whose certificate is of another role joins no cluster.
func TestJoinNeedsDirectory(t *testing.T) {
	a := identitytest.New(t)
	n := directoryNode(t, a, Options{})
	var log lockedBuffer
	start(t, Options{ID: "d2", InMemory: true, Join: []string{n.Addr()}, TLS: a.Config(a.Role("operator", "d2")),
		Logger: slog.New(slog.NewTextHandler(&log, nil))})
	testutil.Until(t, "a refusal", func() bool {
		return strings.Contains(log.String(), "JoinDirectory is for directory")
	})
	if len(n.members()) != 1 {
		t.Errorf("the members are %v", n.members())
	}
}

// Health is for every identity, and for nobody else.
func TestHealthNeedsIdentity(t *testing.T) {
	a := identitytest.New(t)
	n := directoryNode(t, a, Options{})
	r, err := healthpb.NewHealthClient(dialTLS(t, n, a.Config(a.Role("client", "app")))).Check(testCtx(t),
		&healthpb.HealthCheckRequest{})
	if err != nil || r.Status != healthpb.HealthCheckResponse_SERVING {
		t.Errorf("%v, %v", r, err)
	}
	_, err = healthpb.NewHealthClient(dialTLS(t, n, a.Config(a.Leaf()))).Check(testCtx(t),
		&healthpb.HealthCheckRequest{})
	wantCode(t, err, codes.Unauthenticated)
}

// TestDirectoryOwners: the id of a directory node is of the identity that had it first, until the node is removed.
func TestDirectoryOwners(t *testing.T) {
	a := identitytest.New(t)
	one := directoryNode(t, a, Options{})
	two := ready(t, start(t, Options{ID: "d2", InMemory: true, Lease: forever, Join: []string{one.Addr()},
		TLS: a.Config(a.Role("directory", "d2"))}))
	ctx := testCtx(t)
	as := func(role, name string) dirpb.DirectoryClient {
		return dirpb.NewDirectoryClient(dialTLS(t, one, a.Config(a.Role(role, name))))
	}
	d2, eve, ops := as("directory", "d2"), as("directory", "eve"), as("operator", "ops")
	known := func() map[string]*dirpb.DirectoryNode {
		all := make(map[string]*dirpb.DirectoryNode)
		for _, d := range statusOf(t, ops).Directory {
			all[d.Id] = d
		}
		return all
	}
	before := known()
	for id, n := range map[string]*Node{"d1": one, "d2": two} { // d1 began the cluster and never joined
		_, err := eve.JoinDirectory(ctx, &dirpb.JoinDirectoryRequest{Id: id, RaftAddr: n.streams.Addr().String(),
			GrpcAddr: "127.0.0.1:1"})
		wantCode(t, err, codes.PermissionDenied, `directory node "`+id+
			`" belongs to spiffe://test.example/kvd/directory/`+id+", not to spiffe://test.example/kvd/directory/eve")
	}
	if after := known(); !proto.Equal(before["d1"], after["d1"]) || after["d2"].GrpcAddr != two.Addr() {
		t.Errorf("a refusal changed the members: %v, before %v", after, before)
	}
	again := &dirpb.JoinDirectoryRequest{Id: "d2", RaftAddr: two.streams.Addr().String(), GrpcAddr: two.Addr(),
		Level: fsm.Level, Incarnation: two.disk.incarnation}
	if _, err := d2.JoinDirectory(ctx, again); err != nil {
		t.Errorf("the owner: %v", err)
	}
	// An operator hands an id over; then nothing but the address is in eve's way.
	if _, err := ops.RemoveDirectory(ctx, &dirpb.RemoveDirectoryRequest{Id: "d2"}); err != nil {
		t.Fatal(err)
	}
	_, err := eve.JoinDirectory(ctx, &dirpb.JoinDirectoryRequest{Id: "d2", RaftAddr: "127.0.0.1:1",
		GrpcAddr: "127.0.0.1:1", Level: fsm.Level})
	wantCode(t, err, codes.Unavailable, "does not answer at 127.0.0.1:1")
}
