package server

import (
	"log/slog"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"google.golang.org/grpc/codes"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/identity/identitytest"
)

// TestAudit: changes of the cluster are recorded with who made them, in the state and in the log, and survive a
// restart.
func TestAudit(t *testing.T) {
	a := identitytest.New(t)
	var log lockedBuffer
	n := directoryNode(t, a, Options{Logger: slog.New(slog.NewTextHandler(&log, nil))})
	as := func(role, name string) dirpb.DirectoryClient {
		return dirpb.NewDirectoryClient(dialTLS(t, n, a.Config(a.Role(role, name))))
	}
	ctx := testCtx(t)
	ops, ann := as("operator", "ops"), as("operator", "ann")
	for range 2 { // the second is no change that somebody made
		if _, err := as("memnode", "m1").RegisterNode(ctx, registration("m1", 3)); err != nil {
			t.Fatal(err)
		}
	}
	do := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	_, err := ops.CreateNamespace(ctx, &dirpb.CreateNamespaceRequest{Name: "a", Replicas: 1, BytesPerNode: 16 << 20})
	do(err)
	_, err = ops.CreateNamespace(ctx, &dirpb.CreateNamespaceRequest{Name: "a", Replicas: 1})
	wantCode(t, err, codes.AlreadyExists, "already exists")
	for range 2 {
		_, err = ann.SetNamespace(ctx, &dirpb.SetNamespaceRequest{Name: "a", LimitBytes: 1 << 20})
		do(err)
	}
	_, err = ann.DrainNode(ctx, &dirpb.DrainNodeRequest{Node: "m1"})
	do(err)
	_, err = ops.DrainNode(ctx, &dirpb.DrainNodeRequest{Node: "m1", Cancel: true})
	do(err)
	_, err = ops.DeleteNamespace(ctx, &dirpb.DeleteNamespaceRequest{Name: "a", EndSessions: true})
	do(err)
	_, err = ops.RemoveNode(ctx, &dirpb.RemoveNodeRequest{Node: "m1", Force: true})
	do(err)

	want := []string{
		"memnode/m1 node.register m1 capacity-bytes=",
		"operator/ops namespace.create a mode=store replicas=1 bytes-per-node=16777216",
		"operator/ann namespace.set a limit-bytes=1048576",
		"operator/ann node.drain m1 ",
		"operator/ops node.drain m1 cancel=true",
		"operator/ops namespace.delete a end-sessions=true",
		"operator/ops node.remove m1 force=true",
	}
	rep, err := ops.Audit(ctx, &dirpb.AuditRequest{})
	do(err)
	if len(rep.Entries) != len(want) || rep.Dropped != 0 {
		t.Fatalf("%d entries, want %d: %v", len(rep.Entries), len(want), rep.Entries)
	}
	for i, e := range rep.Entries {
		text := strings.TrimPrefix(e.Identity, "spiffe://test.example/kvd/") + " " + e.Action + " " + e.Object + " " +
			e.Detail
		if !strings.HasPrefix(text, want[i]) || e.Number != uint64(i+1) || !strings.HasPrefix(e.Remote, "127.0.0.1:") ||
			e.UnixMillis == 0 {
			t.Errorf("entry %d is %v, want %s", i, e, want[i])
		}
		line := "msg=audit number=" + string(rune('1'+i)) + " at="
		if strings.Count(log.String(), line) != 1 {
			t.Errorf("the log has not once %q:\n%s", line, log.String())
		}
	}
	if rep, err := ops.Audit(ctx, &dirpb.AuditRequest{After: 2, Limit: 1}); err != nil || len(rep.Entries) != 1 ||
		rep.Entries[0].Number != 7 {
		t.Errorf("the last after 2: %v, %v", rep, err)
	}
	_, err = as("client", "eve").Audit(ctx, &dirpb.AuditRequest{})
	wantCode(t, err, codes.PermissionDenied, "Audit is for operator")
}

// TestAuditRestart: a directory node that is started again knows what was changed, and does not say it once more.
func TestAuditRestart(t *testing.T) {
	fs := vfs.NewMem()
	var log lockedBuffer
	opts := Options{ID: "d1", DataDir: "d1", fs: fs, Bootstrap: true, Lease: forever,
		Logger: slog.New(slog.NewTextHandler(&log, nil))}
	entries := func(n *Node) []*dirpb.AuditEntry {
		t.Helper()
		rep, err := leaderOf(t, n).Audit(testCtx(t), &dirpb.AuditRequest{})
		if err != nil {
			t.Fatal(err)
		}
		return rep.Entries
	}
	n := ready(t, start(t, opts))
	if _, err := leaderOf(t, n).RegisterNode(testCtx(t), registration("m1", 3)); err != nil {
		t.Fatal(err)
	}
	before := entries(n)
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}
	after := entries(ready(t, start(t, opts)))
	if len(before) != 1 || len(after) != 1 || after[0].Action != actRegisterNode || after[0].Identity != "" ||
		strings.Count(log.String(), "msg=audit") != 1 {
		t.Errorf("before %v, after %v\n%s", before, after, log.String())
	}
}
