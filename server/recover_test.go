package server

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"google.golang.org/grpc/codes"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/server/fsm"
)

// A folder is recovered as often as one likes, also before the node has started, and also with nothing but its
// snapshot; nothing is changed before it is confirmed, or while another directory node answers, or for an id that it
// does not know.
func TestRecover(t *testing.T) {
	dirs := []string{t.TempDir(), t.TempDir()}
	c := newClusterWith(t, 2, time.Second, func(i int, o *Options) { o.fs, o.DataDir = nil, dirs[i] })
	cluster := statusOf(t, dial(t, leaderOf(t, c.all()...))).ClusterId
	dir, id, incarnation := dirs[0], "d1", c.nodes[0].disk.incarnation
	confirmed := 0
	confirm := func(f Folder) error {
		confirmed++
		if f.ClusterID != cluster || f.Last == 0 || f.Term == 0 {
			t.Errorf("the folder is said to hold %+v", f)
		}
		return nil
	}
	if err := c.nodes[0].Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := Recover(testCtx(t), RecoverOptions{DataDir: dir, ID: id, Confirm: confirm}); !errors.Is(
		err, ErrOthersRun) || confirmed > 0 {
		t.Fatalf("recovered beside another directory node: %v", err)
	}
	if err := c.nodes[1].Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := Recover(testCtx(t), RecoverOptions{DataDir: dir, ID: "stranger", Confirm: confirm}); err == nil ||
		confirmed > 0 {
		t.Fatalf("recovered as a stranger: %v", err)
	}
	no := errors.New("no")
	if _, err := Recover(testCtx(t), RecoverOptions{DataDir: dir, ID: id, Confirm: func(Folder) error {
		return no
	}}); !errors.Is(err, no) {
		t.Fatal(err)
	}
	for k := range 3 {
		f, err := Recover(testCtx(t), RecoverOptions{DataDir: dir, ID: id, Confirm: confirm})
		if err != nil || f.Recoveries != uint64(k) {
			t.Fatalf("recovery %d: %+v, %v", k+1, f, err)
		}
	}
	n := ready(t, c.restart(0, ""))
	leaderOf(t, n)
	st := statusOf(t, dial(t, n))
	if st.ClusterId != cluster || len(st.Directory) != 1 || st.Directory[0].Incarnation != incarnation ||
		st.Position.GetRecoveries() != 3 {
		t.Errorf("recovered: %v", st)
	}
	entries, err := dial(t, n).Audit(testCtx(t), &dirpb.AuditRequest{})
	if err != nil || !slices.ContainsFunc(entries.Entries, func(e *dirpb.AuditEntry) bool {
		return e.Action == actRecoverDirectory
	}) {
		t.Errorf("audit %v, %v", entries, err)
	}
}

// A leader that memory nodes were told more than refuses everything but to say so, and names them.
func TestMemoryNodesAhead(t *testing.T) {
	n := ready(t, single(t, vfs.NewMem(), time.Second))
	api := dial(t, n)
	told := statusOf(t, api).Position
	if told.GetReign() == 0 || told.Index == 0 {
		t.Fatalf("position %v", told)
	}
	_, err := api.Heartbeat(testCtx(t), &dirpb.HeartbeatRequest{NodeId: 7, Incarnation: 1, Position: &dirpb.Position{
		ClusterId: told.ClusterId, Reign: told.Reign + 1, Term: told.Term, Index: 1}})
	wantCode(t, err, codes.DataLoss, "older than what memory nodes were told", "nothing was done")
	_, err = api.CreateNamespace(testCtx(t), &dirpb.CreateNamespaceRequest{Name: "n"})
	wantCode(t, err, codes.DataLoss, "memory node 7", "nothing was done")
	_, err = api.Renew(testCtx(t), &dirpb.RenewRequest{SessionId: 1})
	wantCode(t, err, codes.DataLoss, "nothing was done")
	_, err = api.SessionState(testCtx(t), &dirpb.SessionStateRequest{SessionId: 1})
	wantCode(t, err, codes.DataLoss, "nothing was done")
	_, err = api.RegisterNode(testCtx(t), &dirpb.RegisterNodeRequest{Name: "m1", Incarnation: 1, CapacityBytes: 1 << 20,
		Endpoints: []*dirpb.Endpoint{{Provider: "tcp", Addr: "h:1"}}})
	wantCode(t, err, codes.DataLoss, "nothing was done")
	st := statusOf(t, api)
	if len(st.Ahead) != 1 || st.Ahead[0].Name != "memory node 7" {
		t.Errorf("ahead: %v", st.Ahead)
	}
	n.machine.view(func(s *fsm.State) {
		if len(s.Nodes())+len(s.PGs(0)) > 0 {
			t.Error("something was done")
		}
	})
}
