package server

import (
	"crypto/x509"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/identity/identitytest"
	"github.com/kvd-project/kvd/internal/testutil"
)

// tenants is a directory node with TLS, and a memory node.
type tenants struct {
	t *testing.T
	a *identitytest.Authority
	n *Node
	m *memnode
}

func newTenants(t *testing.T) *tenants {
	x := &tenants{t: t, a: identitytest.New(t)}
	x.n = directoryNode(t, x.a, Options{})
	own, err := x.as("memnode", "m1").RegisterNode(testCtx(t), registration("m1", 3))
	if err != nil {
		t.Fatal(err)
	}
	x.m = &memnode{t: t, nodes: just(x.n), fenced: make(map[uint32]bool), q: registration("m1", 3), id: own.NodeId}
	ctx, stop, done := testCtx(t), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(5 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-stop:
				return
			case <-tick.C:
			}
			x.m.beat(ctx)
		}
	}()
	t.Cleanup(func() { close(stop); <-done })
	return x
}

// as is the directory for the owner of a certificate.
func (x *tenants) as(role, name string, groups ...string) dirpb.DirectoryClient {
	x.t.Helper()
	return dirpb.NewDirectoryClient(dialTLS(x.t, x.n, x.a.Config(x.a.Role(role, name, func(c *x509.Certificate) {
		c.Subject.Organization = groups
	}))))
}

func (x *tenants) create(c dirpb.DirectoryClient, q *dirpb.CreateNamespaceRequest) *dirpb.Namespace {
	x.t.Helper()
	r, err := c.CreateNamespace(testCtx(x.t), q)
	if err != nil {
		x.t.Fatal(err)
	}
	return r.Namespace
}

func (x *tenants) open(c dirpb.DirectoryClient, namespace string, readOnly bool) (uint32, error) {
	r, err := c.OpenSession(testCtx(x.t), &dirpb.OpenSessionRequest{Namespace: namespace, ReadOnly: readOnly,
		Client: "test"})
	return r.GetSessionId(), err
}

func (x *tenants) opened(c dirpb.DirectoryClient, namespace string, readOnly bool) uint32 {
	x.t.Helper()
	id, err := x.open(c, namespace, readOnly)
	if err != nil {
		x.t.Fatal(err)
	}
	return id
}

func (x *tenants) grant(c dirpb.DirectoryClient, namespace, who string, right dirpb.Right) (uint32, error) {
	r, err := c.GrantAccess(testCtx(x.t), &dirpb.GrantAccessRequest{
		Namespace: namespace, Access: &dirpb.Access{Who: who, Right: right}})
	return r.GetFencing(), err
}

func (x *tenants) revoke(c dirpb.DirectoryClient, namespace, who string) (uint32, error) {
	r, err := c.RevokeAccess(testCtx(x.t), &dirpb.RevokeAccessRequest{Namespace: namespace, Who: who})
	return r.GetFencing(), err
}

func spiffe(role, name string) string { return "spiffe://test.example/kvd/" + role + "/" + name }

// A client opens sessions where it was let in, and nowhere else.
func TestTenants(t *testing.T) {
	x := newTenants(t)
	ops, ann, bob, eve := x.as("operator", "ops"), x.as("client", "ann"), x.as("client", "bob", "team-b"),
		x.as("client", "eve")
	const denied = codes.PermissionDenied
	if w := x.create(ops, &dirpb.CreateNamespaceRequest{Name: "a", Owner: spiffe("client", "ann"),
		BytesPerNode: 16 << 20}); w.Owner != spiffe("client", "ann") {
		t.Fatalf("%v", w)
	}
	if w := x.create(ops, &dirpb.CreateNamespaceRequest{Name: "b", BytesPerNode: 16 << 20}); w.Owner != spiffe(
		"operator", "ops") {
		t.Fatalf("a namespace without --owner belongs to %q", w.Owner)
	}
	if _, err := ops.SetNamespace(testCtx(t), &dirpb.SetNamespaceRequest{Name: "b", KeepLimit: true,
		Owner: "group:team-b"}); err != nil {
		t.Fatal(err)
	}
	as := x.opened(ann, "a", false)
	bs := x.opened(bob, "b", false)
	for name, c := range map[string]dirpb.DirectoryClient{"a": bob, "b": ann} {
		_, err := x.open(c, name, true)
		wantCode(t, err, denied, "has no right in namespace \""+name+"\", and wants read", "kvctl namespace grant "+
			name+" spiffe://test.example/kvd/client/")
	}
	_, err := x.grant(eve, "a", spiffe("client", "eve"), dirpb.Right_RIGHT_ADMIN)
	wantCode(t, err, denied, "eve has no right", "wants admin")
	if _, err := x.grant(ann, "a", spiffe("client", "eve"), dirpb.Right_RIGHT_READ); err != nil {
		t.Fatal(err)
	}
	es := x.opened(eve, "a", true)
	_, err = x.open(eve, "a", false)
	wantCode(t, err, denied, "eve has read", "wants write")
	_, err = x.grant(eve, "a", spiffe("client", "bob"), dirpb.Right_RIGHT_READ)
	wantCode(t, err, denied, "eve has read", "wants admin")
	_, err = eve.ShowNamespace(testCtx(t), &dirpb.ShowNamespaceRequest{Name: "a"})
	wantCode(t, err, denied, "wants admin")
	_, err = x.revoke(ann, "a", spiffe("client", "ann"))
	wantCode(t, err, codes.FailedPrecondition, "an operator gives it to another")
	_, err = x.revoke(ann, "a", spiffe("client", "shop"))
	wantCode(t, err, codes.NotFound, "is not in the access list")
	_, err = x.grant(ann, "a", "eve", dirpb.Right_RIGHT_READ)
	wantCode(t, err, codes.InvalidArgument, `"eve" is neither an identity nor a group`)
	_, err = x.grant(ann, "a", spiffe("client", "eve"), 0)
	wantCode(t, err, codes.InvalidArgument, "want read, write or admin")
	_, err = x.grant(ann, "nowhere", spiffe("client", "eve"), dirpb.Right_RIGHT_READ)
	wantCode(t, err, codes.NotFound, `"nowhere"`)

	show, err := ann.ShowNamespace(testCtx(t), &dirpb.ShowNamespaceRequest{Name: "a"})
	if err != nil || show.Sessions != 2 || show.IndexBytes == 0 || len(show.Namespace.Access) != 1 ||
		show.Namespace.Access[0].Who != spiffe("client", "eve") {
		t.Errorf("%v, %v", show, err)
	}
	// Nothing of it in the map of a session.
	watch, err := eve.WatchMap(testCtx(t), &dirpb.WatchMapRequest{SessionId: es})
	if err != nil {
		t.Fatal(err)
	}
	if m, err := watch.Recv(); err != nil || len(m.Namespaces) != 1 || m.Namespaces[0].Owner != "" ||
		len(m.Namespaces[0].Access) != 0 {
		t.Errorf("%v, %v", m, err)
	}
	if n, err := x.revoke(ann, "a", spiffe("client", "eve")); err != nil || n != 1 {
		t.Errorf("fencing %d, %v", n, err)
	}
	testutil.Until(t, "eve's session to be fenced", func() bool {
		return life(t, ann, es) == dirpb.SessionLife_SESSION_FENCED
	})
	if life(t, ann, as) != dirpb.SessionLife_SESSION_LIVE || life(t, ann, bs) != dirpb.SessionLife_SESSION_LIVE {
		t.Error("the sessions of others were fenced, too")
	}
	_, err = x.open(eve, "a", true)
	wantCode(t, err, denied, "eve has no right")
	audit, err := ops.Audit(testCtx(t), &dirpb.AuditRequest{Limit: 2})
	if err != nil {
		t.Fatal(err)
	}
	var trail []string
	for _, e := range audit.Entries {
		trail = append(trail, fmt.Sprint(e.Identity, " ", e.Action, " ", e.Object, " ", e.Detail))
	}
	if got, want := strings.Join(trail, "\n"), spiffe("client", "ann")+" namespace.grant a who="+
		spiffe("client", "eve")+" right=read\n"+
		spiffe("client", "ann")+" namespace.revoke a who="+spiffe("client", "eve"); got != want {
		t.Errorf("the audit trail ends with\n%s\nwant\n%s", got, want)
	}
	// An operator comes everywhere, a janitor and a memory node in the background.
	x.opened(ops, "a", false)
	for _, role := range []string{"janitor", "memnode"} {
		c := x.as(role, "it")
		_, err := x.open(c, "a", true)
		wantCode(t, err, denied, "background sessions alone")
		if _, err := c.OpenSession(testCtx(t), &dirpb.OpenSessionRequest{Namespace: "a", Background: true}); err !=
			nil {
			t.Error(err)
		}
	}
	_, err = eve.OpenSession(testCtx(t), &dirpb.OpenSessionRequest{Namespace: "a", Background: true})
	wantCode(t, err, denied, "eve has no right")
}

// WhoAmI says what namespaces let a caller do.
func TestWhoAmI(t *testing.T) {
	x := newTenants(t)
	ops := x.as("operator", "ops")
	for _, name := range []string{"b", "a", "c"} {
		x.create(ops, &dirpb.CreateNamespaceRequest{Name: name, BytesPerNode: 16 << 20})
	}
	for name, right := range map[string]dirpb.Right{"a": dirpb.Right_RIGHT_READ, "b": dirpb.Right_RIGHT_WRITE} {
		if _, err := x.grant(ops, name, "group:"+name, right); err != nil {
			t.Fatal(err)
		}
	}
	for _, tc := range []struct {
		role   string
		groups []string
		want   string
	}{
		{"client", nil, ""},
		{"client", []string{"b", "a"}, "a RIGHT_READ, b RIGHT_WRITE"},
		{"gateway", []string{"b"}, "b RIGHT_WRITE"},
		{"operator", nil, "a RIGHT_ADMIN, b RIGHT_ADMIN, c RIGHT_ADMIN"},
		{"janitor", nil, "a RIGHT_WRITE, b RIGHT_WRITE, c RIGHT_WRITE"},
		{"directory", nil, ""},
	} {
		r, err := x.as(tc.role, "it", tc.groups...).WhoAmI(testCtx(t), &dirpb.WhoAmIRequest{})
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, y := range r.Namespaces {
			got = append(got, fmt.Sprint(y.Namespace, " ", y.Right))
		}
		slices.Sort(tc.groups)
		if r.Identity != spiffe(tc.role, "it") || r.Role != tc.role || !slices.Equal(r.Groups, tc.groups) ||
			strings.Join(got, ", ") != tc.want {
			t.Errorf("%s %v: %v", tc.role, tc.groups, r)
		}
	}
	many := make([]string, 17)
	for i := range many {
		many[i] = fmt.Sprint("g", i)
	}
	_, err := x.as("client", "it", many...).WhoAmI(testCtx(t), &dirpb.WhoAmIRequest{})
	wantCode(t, err, codes.Unauthenticated, "17 organizations, which are groups, want at most 16")
}

// The default namespace is made on first use for operators alone, and is theirs.
func TestDefaultNamespaceOwner(t *testing.T) {
	x := newTenants(t)
	ann, ops := x.as("client", "ann"), x.as("operator", "ops")
	_, err := x.open(ann, "", false)
	wantCode(t, err, codes.NotFound, `"default" does not exist`, "kvctl namespace create default --owner WHO")
	x.opened(ops, "", false)
	if w := statusOf(t, ops).Map.Namespaces; len(w) != 1 || w[0].Owner != spiffe("operator", "ops") {
		t.Errorf("%v", w)
	}
	_, err = x.open(ann, "", false)
	wantCode(t, err, codes.PermissionDenied, "ann has no right")
}

// A tenant has no more sessions than its quota, and hears its name.
func TestSessionQuota(t *testing.T) {
	x := newTenants(t)
	ann, ops := x.as("client", "ann"), x.as("operator", "ops")
	x.create(ops, &dirpb.CreateNamespaceRequest{Name: "a", Owner: spiffe("client", "ann"), BytesPerNode: 16 << 20,
		Quota: &dirpb.Quota{Sessions: 2}})
	first := x.opened(ann, "a", false)
	x.opened(ann, "a", true)
	_, err := x.open(ann, "a", true)
	wantCode(t, err, codes.ResourceExhausted, "quota sessions", "2 sessions open or being fenced, of 2")
	if _, err := x.as("janitor", "j").OpenSession(testCtx(t), &dirpb.OpenSessionRequest{
		Namespace: "a", Background: true}); err != nil {
		t.Error(err)
	}
	if _, err := ann.CloseSession(testCtx(t), &dirpb.CloseSessionRequest{SessionId: first}); err != nil {
		t.Fatal(err)
	}
	x.opened(ann, "a", false)
	if _, err := ann.SetNamespace(testCtx(t), &dirpb.SetNamespaceRequest{
		Name: "a", Quota: &dirpb.Quota{}}); status.Code(err) != codes.PermissionDenied {
		t.Errorf("a tenant sets its own quota: %v", err)
	}
}

// Without TLS everybody administers everything.
func TestTenantsWithoutTLS(t *testing.T) {
	c := newCluster(t, 1, forever)
	newMemnode(t, "m1", 1, c.all)
	createOn(t, c, &dirpb.CreateNamespaceRequest{Name: "n", Replicas: 1, BytesPerNode: 8 << 20})
	d := dial(t, leaderOf(t, c.all()...))
	r, err := d.WhoAmI(testCtx(t), &dirpb.WhoAmIRequest{})
	if err != nil || r.Identity != "" || r.Role != "" || len(r.Namespaces) != 1 ||
		r.Namespaces[0].Right != dirpb.Right_RIGHT_ADMIN {
		t.Errorf("%v, %v", r, err)
	}
	_, err = d.GrantAccess(testCtx(t), &dirpb.GrantAccessRequest{
		Namespace: "n", Access: &dirpb.Access{Who: "client/ann", Right: dirpb.Right_RIGHT_READ}})
	wantCode(t, err, codes.FailedPrecondition, "has no owner, so everybody may use it")
	if s, err := d.ShowNamespace(testCtx(t), &dirpb.ShowNamespaceRequest{Name: "n"}); err != nil ||
		s.Namespace.Owner != "" {
		t.Errorf("%v, %v", s, err)
	}
}
