package server

import (
	"fmt"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/testutil"
	"github.com/kvd-project/kvd/server/fsm"
)

// gone reports whether nothing is left of a namespace at one directory node.
func gone(n *Node, id uint32) (gone bool) {
	n.machine.view(func(s *fsm.State) {
		gone = s.Namespace(id) == nil && len(s.PGs(id)) == 0 && len(s.Shards(id)) == 0
		for _, j := range s.Jobs() {
			gone = gone && j.NamespaceId != id
		}
		for _, x := range s.Sessions() {
			gone = gone && x.NamespaceId != id
		}
	})
	return gone
}

// createOn makes a namespace, whoever leads.
func createOn(t *testing.T, c *cluster, q *dirpb.CreateNamespaceRequest) {
	t.Helper()
	retry(t, "create", c.all(), func(d dirpb.DirectoryClient) error {
		_, err := d.CreateNamespace(testCtx(t), q)
		if status.Code(err) == codes.AlreadyExists {
			return nil
		}
		return err
	})
}

// More copies than there are failure domains are refused from the beginning, in the words of a
// change to so many; a default is not.
func TestCopiesNeedDomains(t *testing.T) {
	n := single(t, vfs.NewMem(), forever)
	c := dial(t, n)
	for i := range 2 {
		if _, err := c.RegisterNode(testCtx(t), &dirpb.RegisterNodeRequest{Name: fmt.Sprint("m", i), Incarnation: 1,
			CapacityBytes: 1 << 28, Domain: "rack",
			Endpoints: []*dirpb.Endpoint{{Provider: "tcp", Addr: "h:1"}}}); err != nil {
			t.Fatal(err)
		}
	}
	create := func(name string, replicas uint32) error {
		_, err := c.CreateNamespace(testCtx(t), &dirpb.CreateNamespaceRequest{Name: name, Replicas: replicas,
			BytesPerNode: 8 << 20})
		return err
	}
	if err := create("n", 1); err != nil {
		t.Fatal(err)
	}
	_, set := c.SetNamespace(testCtx(t), &dirpb.SetNamespaceRequest{Name: "n", Replicas: 2})
	wantCode(t, set, codes.FailedPrecondition, "as many failure domains", "in 1")
	got, want := status.Convert(create("o", 2)), status.Convert(set)
	if got.Code() != want.Code() || got.Message() != strings.ReplaceAll(want.Message(), `"n"`, `"o"`) {
		t.Errorf("created: %v\nset: %v", got, want)
	}
	wantCode(t, create("n", 2), codes.AlreadyExists)
	wantCode(t, create("o", 3), codes.Unavailable, `3 copies of namespace "o" need as many memory nodes; 2 are up and not draining`)
	if err := create("o", 0); err != nil {
		t.Error(err)
	}
}

// A deletion that has begun goes on under another leader, may be asked for again there, and
// survives a restart, from the log and from a snapshot.
func TestDeleteNamespace(t *testing.T) {
	for _, snapshot := range []bool{false, true} {
		t.Run(fmt.Sprintf("snapshot=%v", snapshot), func(t *testing.T) {
			c := newCluster(t, 3, forever)
			ctx := testCtx(t)
			m := newMemnode(t, "m1", 1, c.all)
			m.hold.Store(true)
			const id = 1
			createOn(t, c, &dirpb.CreateNamespaceRequest{Name: "n", BytesPerNode: 8 << 20})
			var x *dirpb.OpenSessionReply
			retry(t, "open", c.all(), func(d dirpb.DirectoryClient) (err error) {
				x, err = d.OpenSession(ctx, &dirpb.OpenSessionRequest{Namespace: "n", Client: "user"})
				return err
			})
			retry(t, "start a job", c.all(), func(d dirpb.DirectoryClient) error {
				_, err := d.StartJob(ctx, &dirpb.StartJobRequest{Kind: dirpb.JobKind_JOB_SCRUB, Namespace: "n"})
				return err
			})
			_, err := dial(t, leaderOf(t, c.all()...)).DeleteNamespace(ctx, &dirpb.DeleteNamespaceRequest{
				Name: "n", Id: id})
			wantCode(t, err, codes.FailedPrecondition, "1 sessions that live", `"user"`)
			remove := func() (r *dirpb.DeleteNamespaceReply) {
				t.Helper()
				retry(t, "delete", c.all(), func(d dirpb.DirectoryClient) (err error) {
					r, err = d.DeleteNamespace(ctx, &dirpb.DeleteNamespaceRequest{Name: "n", Id: id, EndSessions: true})
					return err
				})
				return r
			}
			if r := remove(); r.Id != id || r.Fencing != 1 {
				t.Fatalf("deleted: %v", r)
			}
			leader := leaderOf(t, c.all()...)
			d := dial(t, leader)
			_, err = d.Renew(ctx, &dirpb.RenewRequest{SessionId: x.SessionId, Number: 1})
			wantCode(t, err, codes.NotFound)
			_, err = d.OpenSession(ctx, &dirpb.OpenSessionRequest{Namespace: "n"})
			wantCode(t, err, codes.NotFound, "being deleted")
			if w := statusOf(t, d).Map.Namespaces; len(w) != 1 || !w[0].Deleting {
				t.Fatalf("namespaces %v", w)
			}

			if snapshot {
				if err := leader.raft.Snapshot().Error(); err != nil {
					t.Fatal(err)
				}
			}
			i, at := c.index(leader), string(leader.transport.LocalAddr())
			if err := leader.Close(); err != nil {
				t.Fatal(err)
			}
			if r := remove(); r.Fencing != 1 {
				t.Fatalf("deleted again, under another leader: %v", r)
			}
			_, err = dial(t, leaderOf(t, c.all()...)).OpenSession(ctx, &dirpb.OpenSessionRequest{Namespace: "n"})
			wantCode(t, err, codes.NotFound, "being deleted")
			m.hold.Store(false)
			testutil.Until(t, "the namespace to go", func() bool { return gone(leaderOf(t, c.all()...), id) })
			ready(t, c.restart(i, at))
			for _, n := range c.all() {
				testutil.Until(t, "the namespace to go everywhere", func() bool { return gone(n, id) })
			}
			if r := remove(); r.Id != id || r.Fencing != 0 {
				t.Fatalf("deleted when it was gone: %v", r)
			}
			st := statusOf(t, dial(t, leaderOf(t, c.all()...)))
			if len(st.Map.Pgs)+len(st.Usage)+len(st.Sessions)+len(st.Jobs)+len(st.Map.Namespaces) != 0 ||
				st.Map.Nodes[0].UsedBytes != 0 {
				t.Fatalf("left are %v", st)
			}
		})
	}
}

// A client that had a session in the default namespace does not bring it back; the first client after that
// does, with another id.
func TestDeleteDefaultNamespace(t *testing.T) {
	n := single(t, vfs.NewMem(), forever)
	c, ctx := dial(t, n), testCtx(t)
	newMemnode(t, "m1", 1, just(n))
	x := open(t, c)
	w, err := c.WatchMap(ctx, &dirpb.WatchMapRequest{SessionId: x.SessionId})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.DeleteNamespace(ctx, &dirpb.DeleteNamespaceRequest{Name: "default", EndSessions: true}); err != nil {
		t.Fatal(err)
	}
	for err == nil {
		_, err = w.Recv()
	}
	wantCode(t, err, codes.NotFound)
	testutil.Until(t, "the namespace to go", func() bool { return gone(n, x.NamespaceId) })
	_, err = c.OpenSession(ctx, &dirpb.OpenSessionRequest{WasNamespaceId: x.NamespaceId})
	wantCode(t, err, codes.NotFound, `"default" was deleted`)
	y := open(t, c)
	if y.NamespaceId <= x.NamespaceId || y.SessionId <= x.SessionId {
		t.Fatalf("session %v after %v", y, x)
	}
	z, err := c.OpenSession(ctx, &dirpb.OpenSessionRequest{WasNamespaceId: x.NamespaceId})
	if err != nil || z.NamespaceId != y.NamespaceId {
		t.Fatalf("session %v, %v in the namespace of the name", z, err)
	}
	// A janitor's session is no reason to keep it, and ends with it.
	for _, s := range []uint32{y.SessionId, z.SessionId} {
		if _, err := c.CloseSession(ctx, &dirpb.CloseSessionRequest{SessionId: s}); err != nil {
			t.Fatal(err)
		}
	}
	j, err := c.OpenSession(ctx, &dirpb.OpenSessionRequest{Background: true})
	if err != nil {
		t.Fatal(err)
	}
	if r, err := c.DeleteNamespace(ctx, &dirpb.DeleteNamespaceRequest{Name: "default"}); err != nil || r.Fencing != 1 {
		t.Fatalf("%v, %v", r, err)
	}
	testutil.Until(t, "the namespace to go", func() bool { return gone(n, y.NamespaceId) })
	if l := life(t, c, j.SessionId); l != dirpb.SessionLife_SESSION_FENCED {
		t.Fatalf("the janitor's session is %v", l)
	}
}

// A number of copies that was asked for is there under the next leader, and asking again
// changes nothing.
func TestSetReplicas(t *testing.T) {
	c := newCluster(t, 3, forever)
	ctx := testCtx(t)
	newMemnode(t, "m1", 1, c.all)
	m2 := newMemnode(t, "m2", 1, c.all)
	createOn(t, c, &dirpb.CreateNamespaceRequest{Name: "n", Replicas: 1, BytesPerNode: 8 << 20, LimitBytes: 1 << 20})
	d := dial(t, leaderOf(t, c.all()...))
	_, err := d.SetNamespace(ctx, &dirpb.SetNamespaceRequest{Name: "n", Replicas: 3, KeepLimit: true})
	wantCode(t, err, codes.FailedPrecondition, "2 are up")
	set := func() (w *dirpb.Namespace) {
		t.Helper()
		retry(t, "set", c.all(), func(d dirpb.DirectoryClient) error {
			r, err := d.SetNamespace(ctx, &dirpb.SetNamespaceRequest{Name: "n", Replicas: 2, KeepLimit: true})
			w = r.GetNamespace()
			return err
		})
		return w
	}
	if w := set(); w.Replicas != 2 || w.LimitBytes != 1<<20 {
		t.Fatalf("%v", w)
	}
	if err := leaderOf(t, c.all()...).Close(); err != nil {
		t.Fatal(err)
	}
	w := set()
	st := statusOf(t, dial(t, leaderOf(t, c.all()...)))
	if !proto.Equal(st.Map.Namespaces[0], w) || w.Replicas != 2 {
		t.Fatalf("namespaces %v, want %v", st.Map.Namespaces, w)
	}
	var x *dirpb.OpenSessionReply
	retry(t, "open", c.all(), func(d dirpb.DirectoryClient) (err error) {
		x, err = d.OpenSession(ctx, &dirpb.OpenSessionRequest{Namespace: "n"})
		return err
	})
	whole := func() bool {
		st := statusOf(t, dial(t, leaderOf(t, c.all()...)))
		for _, pg := range st.Map.Pgs {
			if len(pg.Members) != 2 || pg.Joining || pg.State != dirpb.PGState_PG_ACTIVE {
				return false
			}
		}
		return true
	}
	testutil.Until(t, "two copies of everything", func() bool {
		d := dial(t, leaderOf(t, c.all()...))
		r, err := d.Renew(ctx, &dirpb.RenewRequest{SessionId: x.SessionId, Number: numbers.Add(1)})
		if err == nil {
			_, _ = d.Renew(ctx, &dirpb.RenewRequest{SessionId: x.SessionId, ReportEpoch: r.Epoch,
				AckedMapVersion: r.MapVersion, QuiescedMapVersion: r.MapVersion, Number: numbers.Add(1)})
		}
		if j, err := d.ClaimJob(ctx, &dirpb.ClaimJobRequest{SessionId: x.SessionId}); err == nil && j.Job != nil {
			_, _ = d.ReportJob(ctx, &dirpb.ReportJobRequest{SessionId: x.SessionId, JobId: j.Job.Id, Finished: true,
				Report: &dirpb.JobReport{}})
		}
		return whole()
	})
	if got := statusOf(t, dial(t, leaderOf(t, c.all()...))); got.Map.Nodes[1].Id != m2.id ||
		got.Map.Nodes[1].UsedBytes != 16<<20 {
		t.Fatalf("memory nodes %v", got.Map.Nodes)
	}
}
