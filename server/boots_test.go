package server

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/testutil"
)

// A memory node that keeps its memory and has the only copy of something is waited for until it is back
// with that, or until an operator gives it up.
func TestWaitForKeptCopy(t *testing.T) {
	const lease = 50 * time.Millisecond
	n := single(t, vfs.NewMem(), lease)
	c, ctx := dial(t, n), testCtx(t)
	register := func(incarnation, boot uint64) (*dirpb.RegisterNodeReply, error) {
		return c.RegisterNode(ctx, &dirpb.RegisterNodeRequest{Name: "m1", Incarnation: incarnation, Boot: boot,
			Keeps: true, HostId: "host",
			CapacityBytes: 256 << 20, Endpoints: []*dirpb.Endpoint{{Provider: "tcp", Addr: "127.0.0.1:9"}}})
	}
	r, err := register(7, 1)
	if err != nil {
		t.Fatal(err)
	}
	beat := func(boot uint64) *dirpb.HeartbeatReply {
		t.Helper()
		r, err := c.Heartbeat(ctx, &dirpb.HeartbeatRequest{NodeId: r.NodeId, Incarnation: 7, Boot: boot})
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	node := func() *dirpb.Node { return statusOf(t, c).Map.Nodes[0] }
	if _, err := c.CreateNamespace(ctx, &dirpb.CreateNamespaceRequest{Name: "n", Replicas: 1}); err != nil {
		t.Fatal(err)
	}
	for _, w := range beat(1).Regions {
		if _, err := c.PublishRegion(ctx, &dirpb.PublishRegionRequest{NodeId: r.NodeId, Incarnation: 7, Boot: 1,
			PgId: w.PgId,
			Keys: []*dirpb.RegionKeys{{Provider: "tcp", IndexRkey: 1}}}); err != nil {
			t.Fatal(err)
		}
	}
	// LastCopyLeases is 2 here: any other one would be lost.
	testutil.Until(t, "the memory node to be waited for", func() bool { return node().Waiting })
	silent := time.Now()
	testutil.Until(t, "ten leases", func() bool { return time.Since(silent) > 10*lease })
	if m := node(); m.State != dirpb.NodeState_NODE_UP || m.Boot != 1 || !m.Keeps || !m.Waiting {
		t.Fatalf("the status has %v", m)
	}
	if _, err := register(7, 2); err != nil {
		t.Fatal(err)
	}
	if !beat(1).UnknownNode {
		t.Error("a process that another one has replaced is told what to do")
	}
	if w := beat(2); w.UnknownNode || len(w.Regions) == 0 || !w.Regions[0].Published {
		t.Errorf("a process that is back is told %v", w)
	}
	_, err = register(7, 1)
	wantCode(t, err, codes.FailedPrecondition, "boot 2 has registered")

	// It is silent again, and an operator gives it up.
	_, err = c.GiveUpNode(ctx, &dirpb.GiveUpNodeRequest{Node: "m9"})
	wantCode(t, err, codes.NotFound, `"m9" does not exist`)
	testutil.Until(t, "the memory node to be silent for a lease, and given up", func() bool {
		_, err := c.GiveUpNode(ctx, &dirpb.GiveUpNodeRequest{Node: "m1"})
		if err != nil {
			wantCode(t, err, codes.FailedPrecondition, "was heard within its lease")
		}
		return err == nil
	})
	st := statusOf(t, c).Map
	if st.Nodes[0].State != dirpb.NodeState_NODE_DOWN || st.Nodes[0].Waiting ||
		st.Pgs[0].State != dirpb.PGState_PG_LOST {
		t.Errorf("the map has %v and %v", st.Nodes, st.Pgs)
	}
	_, err = c.GiveUpNode(ctx, &dirpb.GiveUpNodeRequest{Node: "m1"})
	wantCode(t, err, codes.FailedPrecondition, "counts as lost already")
	_, err = register(7, 3)
	wantCode(t, err, codes.FailedPrecondition, "declared lost")
	a, err := c.Audit(ctx, &dirpb.AuditRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if last := a.Entries[len(a.Entries)-1]; last.Action != "node.give-up" || last.Object != "m1" {
		t.Errorf("the last entry is %v", last)
	}
}

// TestReportNode: the status has what a memory node's keeper said of it, until a process of it is heard.
func TestReportNode(t *testing.T) {
	n := single(t, vfs.NewMem(), time.Second)
	c, ctx := dial(t, n), testCtx(t)
	report := func(name, trouble string) error {
		_, err := c.ReportNode(ctx, &dirpb.ReportNodeRequest{Name: name, Trouble: trouble})
		return err
	}
	wantCode(t, report("m1", "workers die"), codes.NotFound, `"m1"`)
	r, err := c.RegisterNode(ctx, &dirpb.RegisterNodeRequest{Name: "m1", Incarnation: 7, Boot: 1, Keeps: true,
		CapacityBytes: 256 << 20,
		Endpoints:     []*dirpb.Endpoint{{Provider: "tcp", Addr: "127.0.0.1:9"}}})
	if err != nil {
		t.Fatal(err)
	}
	wantCode(t, report("m1", ""), codes.InvalidArgument, "empty")
	wantCode(t, report("m1", strings.Repeat("x", 257)), codes.InvalidArgument, "trouble is longer than 256 bytes")
	wantCode(t, report("m1", "a\x1b[2J"), codes.InvalidArgument, "printable")
	trouble := func() string { return statusOf(t, c).Map.Nodes[0].Trouble }
	if got := trouble(); got != "" {
		t.Errorf("the status has %q", got)
	}
	for _, text := range []string{"workers die", "workers still die"} {
		if err := report("m1", text); err != nil || trouble() != text {
			t.Errorf("the status has %q, %v; reported was %q", trouble(), err, text)
		}
	}
	if _, err := c.Heartbeat(ctx, &dirpb.HeartbeatRequest{NodeId: r.NodeId, Incarnation: 7, Boot: 1}); err != nil {
		t.Fatal(err)
	}
	if got := trouble(); got != "" {
		t.Errorf("after a heartbeat the status has %q", got)
	}
}

// TestRestartNode: the process of a memory node is told to end, which is not waited for meanwhile, and the operator
// hears of the next one and whether it has the memory.
func TestRestartNode(t *testing.T) {
	n := single(t, vfs.NewMem(), 50*time.Millisecond)
	c, ctx := dial(t, n), testCtx(t)
	register := func(name string, incarnation, boot uint64, keeps bool) *dirpb.RegisterNodeReply {
		t.Helper()
		for {
			r, err := c.RegisterNode(ctx, &dirpb.RegisterNodeRequest{Name: name, Incarnation: incarnation, Boot: boot,
				Keeps: keeps, CapacityBytes: 256 << 20,
				Endpoints: []*dirpb.Endpoint{{Provider: "tcp", Addr: "127.0.0.1:9"}}})
			switch status.Code(err) {
			case codes.OK:
				return r
			case codes.AlreadyExists: // within the lease of the process before
			default:
				t.Fatal(err)
			}
		}
	}
	id := register("m1", 7, 1, true).NodeId
	register("m2", 8, 1, false)
	for name, want := range map[string]codes.Code{"m2": codes.FailedPrecondition, "m9": codes.NotFound} {
		_, err := c.RestartNode(ctx, &dirpb.RestartNodeRequest{Node: name})
		wantCode(t, err, want, name)
	}
	boot := uint64(1)
	for _, next := range []struct {
		incarnation uint64
		kept        bool
	}{{7, true}, {9, false}} {
		type answer struct {
			r   *dirpb.RestartNodeReply
			err error
		}
		answered := make(chan answer, 1)
		go func() {
			r, err := c.RestartNode(ctx, &dirpb.RestartNodeRequest{Node: "m1"})
			answered <- answer{r, err}
		}()
		beat := &dirpb.HeartbeatRequest{NodeId: id, Incarnation: 7, Boot: boot}
		testutil.Until(t, "the process to be told", func() bool {
			r, err := c.Heartbeat(ctx, beat)
			if err != nil {
				t.Fatal(err)
			}
			return r.Restart
		})
		if boot = 2; !next.kept {
			boot = 1 // of another incarnation
		}
		register("m1", next.incarnation, boot, true)
		if a := <-answered; a.err != nil || a.r.Boot != boot || a.r.Kept != next.kept {
			t.Errorf("the operator hears %v, %v", a.r, a.err)
		}
		beat.Incarnation, beat.Boot = next.incarnation, boot
		if r, err := c.Heartbeat(ctx, beat); err != nil || r.Restart || r.UnknownNode {
			t.Errorf("the next process hears %v, %v", r, err)
		}
	}
	a, err := c.Audit(ctx, &dirpb.AuditRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if last := a.Entries[len(a.Entries)-1]; last.Action != "node.restart" || last.Object != "m1" {
		t.Errorf("the last entry is %v", last)
	}
}

// TestRestartNodeAgain: a request that names the process, made again, waits for the one that follows it, and replaces
// no other.
func TestRestartNodeAgain(t *testing.T) {
	n := single(t, vfs.NewMem(), time.Second)
	c, ctx := dial(t, n), testCtx(t)
	register := func(boot uint64) uint32 {
		t.Helper()
		r, err := c.RegisterNode(ctx, &dirpb.RegisterNodeRequest{Name: "m1", Incarnation: 7, Boot: boot, Keeps: true,
			CapacityBytes: 256 << 20,
			Endpoints:     []*dirpb.Endpoint{{Provider: "tcp", Addr: "127.0.0.1:9"}}})
		if err != nil {
			t.Fatal(err)
		}
		return r.NodeId
	}
	id := register(1)
	restart := func() error {
		r, err := c.RestartNode(ctx, &dirpb.RestartNodeRequest{Node: "m1", Boot: 1, Incarnation: 7})
		if err == nil && (r.Boot != 2 || !r.Kept) {
			err = fmt.Errorf("the next process is %v", r)
		}
		return err
	}
	told := func(boot uint64) bool {
		t.Helper()
		r, err := c.Heartbeat(ctx, &dirpb.HeartbeatRequest{NodeId: id, Incarnation: 7, Boot: boot})
		if err != nil {
			t.Fatal(err)
		}
		return r.Restart
	}
	again := &dirpb.RestartNodeRequest{Node: "m1", Boot: 2, Incarnation: 7}
	_, err := c.RestartNode(ctx, again)
	wantCode(t, err, codes.InvalidArgument, "has had no boot 2", "nothing was done")
	answered := make(chan error, 1)
	go func() { answered <- restart() }()
	testutil.Until(t, "the process to be told", func() bool { return told(1) })
	// A request without time to wait says what it would wait for.
	over, cancel := context.WithCancel(ctx)
	cancel()
	again.Boot = 1
	_, err = n.RestartNode(over, again)
	wantCode(t, err, codes.DeadlineExceeded, "no other process of it has registered yet")
	register(2)
	if err := <-answered; err != nil {
		t.Fatal(err)
	}
	if err := restart(); err != nil || told(2) || own(t, n).Map.Nodes[0].PauseMillis != 0 {
		t.Fatalf("asked again: %v, the next process is told %v", err, told(2))
	}
}

// TestRestartNodeWithLeave: a process hears that it is to end when no chain has its memory node any more, and the next
// one begins another incarnation; a memory node with the only copy of something is refused.
func TestRestartNodeWithLeave(t *testing.T) {
	n := single(t, vfs.NewMem(), 300*time.Millisecond)
	c, ctx := dial(t, n), testCtx(t)
	register := func(name string, incarnation, boot uint64) uint32 {
		t.Helper()
		r, err := c.RegisterNode(ctx, &dirpb.RegisterNodeRequest{Name: name, Incarnation: incarnation, Boot: boot,
			Keeps: true, CapacityBytes: 256 << 20, Version: "v" + name,
			Endpoints: []*dirpb.Endpoint{{Provider: "tcp", Addr: "127.0.0.1:9"}}})
		if err != nil {
			t.Fatal(err)
		}
		return r.NodeId
	}
	beat := func(id uint32, incarnation uint64) *dirpb.HeartbeatReply {
		t.Helper()
		r, err := c.Heartbeat(ctx, &dirpb.HeartbeatRequest{NodeId: id, Incarnation: incarnation, Boot: 1})
		if err != nil {
			t.Fatal(err)
		}
		for _, w := range r.Regions {
			if w.Published {
				continue
			}
			if _, err := c.PublishRegion(ctx, &dirpb.PublishRegionRequest{NodeId: id, Incarnation: incarnation, Boot: 1,
				PgId: w.PgId,
				Keys: []*dirpb.RegionKeys{{Provider: "tcp", IndexRkey: 1}}}); err != nil {
				t.Fatal(err)
			}
		}
		return r
	}
	m1, m2 := register("m1", 7, 1), register("m2", 8, 1)
	if _, err := c.CreateNamespace(ctx, &dirpb.CreateNamespaceRequest{Name: "n", Replicas: 2}); err != nil {
		t.Fatal(err)
	}
	testutil.Until(t, "both copies", func() bool {
		beat(m1, 7)
		beat(m2, 8)
		for _, pg := range statusOf(t, c).Map.Pgs {
			if pg.State != dirpb.PGState_PG_ACTIVE || len(pg.Members) != 2 {
				return false
			}
		}
		return true
	})
	type answer struct {
		r   *dirpb.RestartNodeReply
		err error
	}
	answered := make(chan answer, 1)
	go func() {
		r, err := c.RestartNode(ctx, &dirpb.RestartNodeRequest{Node: "m1", Leave: true, Program: "/opt/kvd"})
		answered <- answer{r, err}
	}()
	testutil.Until(t, "m1 to be told", func() bool {
		beat(m2, 8)
		r := beat(m1, 7)
		if r.Restart && !r.UnknownNode {
			t.Error("it is to end while placement groups have it")
		}
		return r.Restart && r.UnknownNode
	})
	for _, pg := range statusOf(t, c).Map.Pgs {
		if len(pg.Members) != 1 || pg.Members[0].NodeId != m2 || pg.State != dirpb.PGState_PG_ACTIVE {
			t.Errorf("placement group %v", pg)
		}
	}
	_, err := c.RestartNode(ctx, &dirpb.RestartNodeRequest{Node: "m2", Leave: true})
	wantCode(t, err, codes.FailedPrecondition, `"m2" has the only copy of placement group`, "nothing was done")
	register("m1", 9, 2)
	if a := <-answered; a.err != nil || a.r.Boot != 2 || a.r.Kept || a.r.Version != "vm1" {
		t.Errorf("the operator hears %v, %v", a.r, a.err)
	}
	l, err := c.Audit(ctx, &dirpb.AuditRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if last := l.Entries[len(l.Entries)-1]; last.Action != "node.restart" || last.Object != "m1" ||
		last.Detail != "leave=true program=/opt/kvd" {
		t.Errorf("the last entry is %v", last)
	}
}

// TestStaleMemory: a memory node with memory of an earlier time hears that it is, and of which cluster; the process
// that is registered is still known.
func TestStaleMemory(t *testing.T) {
	n := single(t, vfs.NewMem(), time.Hour)
	c, ctx := dial(t, n), testCtx(t)
	register := func(boot, nonce uint64, after ...uint64) *dirpb.RegisterNodeReply {
		t.Helper()
		r, err := c.RegisterNode(ctx, &dirpb.RegisterNodeRequest{Name: "m1", Incarnation: 7, Boot: boot, Keeps: true,
			CapacityBytes: 256 << 20, Nonce: nonce, After: after,
			Endpoints: []*dirpb.Endpoint{{Provider: "tcp", Addr: "127.0.0.1:9"}}})
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	first, second := register(1, 10), register(2, 20, 10, 20)
	if first.Stale || second.Stale {
		t.Errorf("%v, %v", first, second)
	}
	if r := register(2, 30, 10, 30); !r.Stale || r.ClusterId == "" || r.ClusterId != second.ClusterId ||
		r.Sessions == nil || len(r.Keys) == 0 {
		t.Errorf("put back: %v", r)
	}
	if r, err := c.Heartbeat(ctx, &dirpb.HeartbeatRequest{NodeId: second.NodeId, Incarnation: 7, Boot: 2}); err !=
		nil || r.UnknownNode {
		t.Errorf("the registered process: %v, %v", r, err)
	}
}
