package server

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"google.golang.org/grpc/codes"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/testutil"
	"github.com/kvd-project/kvd/server/fsm"
)

// store is a directory of one with memory nodes m1, m2, … and a namespace.
func store(t *testing.T, lease time.Duration, nodes int, q *dirpb.CreateNamespaceRequest) (*Node, dirpb.DirectoryClient,
	[]*memnode) {
	t.Helper()
	n := single(t, vfs.NewMem(), lease)
	c := dial(t, n)
	var ms []*memnode
	for i := range nodes {
		ms = append(ms, newMemnode(t, fmt.Sprint("m", i+1), 1, just(n)))
	}
	if _, err := c.CreateNamespace(testCtx(t), q); err != nil {
		t.Fatal(err)
	}
	return n, c, ms
}

func openIn(t testing.TB, c dirpb.DirectoryClient, namespace string) *dirpb.OpenSessionReply {
	t.Helper()
	r, err := c.OpenSession(testCtx(t), &dirpb.OpenSessionRequest{Namespace: namespace})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// ack acknowledges the newest map.
func ack(t testing.TB, c dirpb.DirectoryClient, id uint32) {
	t.Helper()
	r := renew(t, c, id, 0)
	if _, err := c.Renew(testCtx(t), &dirpb.RenewRequest{SessionId: id, ReportEpoch: r.Epoch,
		AckedMapVersion: r.MapVersion, QuiescedMapVersion: r.MapVersion, Number: numbers.Add(1)}); err != nil {
		t.Fatal(err)
	}
}

func claim(t testing.TB, c dirpb.DirectoryClient, id uint32) *dirpb.Job {
	t.Helper()
	r, err := c.ClaimJob(testCtx(t), &dirpb.ClaimJobRequest{SessionId: id})
	if err != nil {
		t.Fatal(err)
	}
	return r.Job
}

// awaitJob acknowledges and claims until there is a job.
func awaitJob(t testing.TB, c dirpb.DirectoryClient, id uint32, kind dirpb.JobKind) (j *dirpb.Job) {
	t.Helper()
	testutil.Until(t, kind.String(), func() bool {
		ack(t, c, id)
		j = claim(t, c, id)
		return j != nil
	})
	if j.Kind != kind || j.Owner != id {
		t.Fatalf("claimed %v, want %v", j, kind)
	}
	return j
}

func report(t testing.TB, c dirpb.DirectoryClient, q *dirpb.ReportJobRequest) *dirpb.ReportJobReply {
	t.Helper()
	r, err := c.ReportJob(testCtx(t), q)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func finish(t testing.TB, c dirpb.DirectoryClient, id uint32, j *dirpb.Job) {
	t.Helper()
	q := &dirpb.ReportJobRequest{SessionId: id, JobId: j.Id, Finished: true, Report: &dirpb.JobReport{Groups: 1}}
	if report(t, c, q).Gone {
		t.Fatalf("%v is gone", j)
	}
	if !report(t, c, q).Gone {
		t.Fatalf("%v ended twice", j)
	}
}

// A shard splits: it is asked for, claimed, reported on, and ends in the map.
func TestSplit(t *testing.T) {
	_, c, _ := store(t, forever, 2, &dirpb.CreateNamespaceRequest{Name: "n", Replicas: 2, Shards: 4})
	ctx := testCtx(t)
	x := openIn(t, c, "n").SessionId
	m := statusOf(t, c).Map
	if r, err := c.FindWork(ctx, &dirpb.FindWorkRequest{}); err != nil || len(r.Namespaces) != 0 {
		t.Fatalf("work %v, %v", r, err)
	}
	if j := claim(t, c, x); j != nil {
		t.Fatalf("claimed %v", j)
	}
	sh := m.Shards[0]
	ask := func() *dirpb.RequestSplitReply {
		t.Helper()
		r, err := c.RequestSplit(ctx, &dirpb.RequestSplitRequest{SessionId: x, ShardId: sh.Id})
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	var r *dirpb.RequestSplitReply
	testutil.Until(t, "the split", func() bool {
		ack(t, c, x)
		r = ask()
		return r.Growing && r.Why == ""
	})
	if r = ask(); !r.Growing || r.Why != "it moves already" {
		t.Fatalf("asked again: %v", r)
	}
	if r, err := c.FindWork(ctx, &dirpb.FindWorkRequest{}); err != nil || !slices.Equal(r.Namespaces, []string{"n"}) {
		t.Fatalf("work %v, %v", r, err)
	}
	y := openIn(t, c, "n").SessionId
	j := awaitJob(t, c, x, dirpb.JobKind_JOB_MOVE)
	if j.ShardId != sh.Id || j.PgId != sh.PgId {
		t.Fatalf("claimed %v for %v", j, sh)
	}
	if k := claim(t, c, x); k.GetId() != j.Id {
		t.Fatalf("asked again, claimed %v, want %v", k, j)
	}
	if k := claim(t, c, y); k != nil {
		t.Fatalf("two work on %v", k)
	}
	if !report(t, c, &dirpb.ReportJobRequest{SessionId: y, JobId: j.Id, Finished: true}).Gone {
		t.Fatal("a stranger's report counts")
	}
	report(t, c, &dirpb.ReportJobRequest{SessionId: x, JobId: j.Id, Done: 3, Total: 9})
	if got := statusOf(t, c).Jobs; len(got) != 1 || got[0].Done != 3 || got[0].Total != 9 || got[0].Owner != x {
		t.Fatalf("shown %v", got)
	}
	_, err := c.ReportJob(ctx, &dirpb.ReportJobRequest{SessionId: x, JobId: j.Id, Finished: true, Trouble: "both"})
	wantCode(t, err, codes.InvalidArgument, "finished, and in trouble")
	finish(t, c, x, j)
	if got := statusOf(t, c); len(got.Map.Shards) != 5 || !got.Jobs[0].Waiting ||
		got.Jobs[0].Kind != dirpb.JobKind_JOB_CLEAN {
		t.Fatalf("after the move: %v, %v", got.Map.Shards, got.Jobs)
	}
	ack(t, c, y)
	finish(t, c, x, awaitJob(t, c, x, dirpb.JobKind_JOB_CLEAN))
	if got := statusOf(t, c).Jobs; len(got) != 0 {
		t.Fatalf("left over: %v", got)
	}

	_, err = c.RequestSplit(ctx, &dirpb.RequestSplitRequest{SessionId: x, ShardId: 99})
	wantCode(t, err, codes.NotFound, "shard 99")
	for _, err := range []error{
		func() error {
			_, err := c.RequestSplit(ctx, &dirpb.RequestSplitRequest{SessionId: 99, ShardId: 1})
			return err
		}(),
		func() error { _, err := c.ClaimJob(ctx, &dirpb.ClaimJobRequest{SessionId: 99}); return err }(),
		func() error { _, err := c.ReportJob(ctx, &dirpb.ReportJobRequest{SessionId: 99}); return err }(),
	} {
		wantCode(t, err, codes.NotFound, "session 99")
	}
	ro, err := c.OpenSession(ctx, &dirpb.OpenSessionRequest{Namespace: "n", ReadOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	_, err = c.ClaimJob(ctx, &dirpb.ClaimJobRequest{SessionId: ro.SessionId, Working: make([]uint32, maxWorking+1)})
	wantCode(t, err, codes.InvalidArgument, "at most 1024")
	_, err = c.ClaimJob(ctx, &dirpb.ClaimJobRequest{SessionId: ro.SessionId})
	wantCode(t, err, codes.FailedPrecondition, "read-only")
}

// A shard of a full index splits into the placement group with the most room; when none has
// any it cannot grow.
func TestSplitWhenFull(t *testing.T) {
	_, c, _ := store(t, forever, 2, &dirpb.CreateNamespaceRequest{Name: "n", Replicas: 1, Shards: 1, Segments: 400,
		BytesPerNode: 40 << 20})
	ctx := testCtx(t)
	x := openIn(t, c, "n").SessionId
	split := func() (*dirpb.RequestSplitReply, *dirpb.Job) {
		t.Helper()
		var r *dirpb.RequestSplitReply
		testutil.Until(t, "an answer", func() bool {
			ack(t, c, x)
			var err error
			if r, err = c.RequestSplit(ctx, &dirpb.RequestSplitRequest{SessionId: x, ShardId: 1}); err != nil {
				t.Fatal(err)
			}
			return !r.Growing || r.Why == ""
		})
		if !r.Growing {
			return r, nil
		}
		j := awaitJob(t, c, x, dirpb.JobKind_JOB_MOVE)
		finish(t, c, x, j)
		finish(t, c, x, awaitJob(t, c, x, dirpb.JobKind_JOB_CLEAN))
		return r, j
	}
	var into []uint32
	for range 20 {
		r, j := split()
		if j == nil {
			if r.Why == "" {
				t.Fatal("it cannot grow, and nobody says why")
			}
			break
		}
		into = append(into, j.TargetPgId)
	}
	m := statusOf(t, c).Map
	// An index of 4 MiB has room for two arrays of 400 segments.
	want := int(m.Pgs[0].IndexBytes-layout.RegionPageSize)/(400*layout.SegmentSize) - 1
	for i, pg := range into {
		if (pg == 1) != (i < want) {
			t.Fatalf("split into placement groups %d; the first has room for %d", into, want)
		}
	}
	if len(into) != 2*want+1 || want < 1 {
		t.Fatalf("split into placement groups %d, want %d of 1 and one more of 2", into, want)
	}
}

// A janitor that dies in the middle keeps its job until it is fenced; then another goes on.
func TestJanitorDies(t *testing.T) {
	n, c, ms := store(t, time.Second, 1, &dirpb.CreateNamespaceRequest{Name: "n", Replicas: 1})
	ms[0].hold.Store(true)
	a, b := openIn(t, c, "n").SessionId, openIn(t, c, "n").SessionId
	defer keepAlive(t, n, b)()
	r, err := c.StartJob(testCtx(t), &dirpb.StartJobRequest{Kind: dirpb.JobKind_JOB_SCRUB, Namespace: "n", PgId: 1})
	if err != nil || len(r.JobIds) != 1 {
		t.Fatalf("started %v, %v", r, err)
	}
	j := awaitJob(t, c, a, dirpb.JobKind_JOB_SCRUB)
	testutil.Until(t, "its lease to run out", func() bool { return life(t, c, a) == dirpb.SessionLife_SESSION_FENCING })
	if k := claim(t, c, b); k != nil {
		t.Fatalf("claimed %v before its owner was fenced", k)
	}
	_, err = c.ReportJob(testCtx(t), &dirpb.ReportJobRequest{SessionId: a, JobId: j.Id})
	wantCode(t, err, codes.NotFound, "fenced")
	ms[0].hold.Store(false)
	k := awaitJob(t, c, b, dirpb.JobKind_JOB_SCRUB)
	if k.Id != j.Id {
		t.Fatalf("claimed %v, want %v", k, j)
	}
	// In trouble it gives the job back, which then rests for a lease.
	if report(t, c, &dirpb.ReportJobRequest{SessionId: b, JobId: k.Id, Done: 1, Total: 2,
		Trouble: "a record is odd"}).Gone {
		t.Fatal("it is gone")
	}
	if j := claim(t, c, b); j != nil {
		t.Fatalf("claimed %v at once", j)
	}
	if j := statusOf(t, c).Jobs[0]; j.Trouble != "a record is odd" || j.Owner != 0 || j.Done != 1 {
		t.Fatalf("shown %v", j)
	}
	awaitJob(t, c, b, dirpb.JobKind_JOB_SCRUB)
}

// A memory node drains: replacements join, are made copies, and it is let go; then it can be
// removed.
func TestDrain(t *testing.T) {
	n, c, ms := store(t, forever, 3, &dirpb.CreateNamespaceRequest{Name: "n", Replicas: 2, BytesPerNode: 32 << 20})
	ctx := testCtx(t)
	x := openIn(t, c, "n").SessionId
	_, err := c.DrainNode(ctx, &dirpb.DrainNodeRequest{Node: "m9"})
	wantCode(t, err, codes.NotFound, `"m9"`)
	_, err = c.RemoveNode(ctx, &dirpb.RemoveNodeRequest{Node: "m2"})
	wantCode(t, err, codes.FailedPrecondition, "m2")
	r, err := c.DrainNode(ctx, &dirpb.DrainNodeRequest{Node: "m2"})
	if err != nil || r.Regions < 2 {
		t.Fatalf("draining %v, %v", r, err)
	}
	testutil.Until(t, "the drain", func() bool {
		ack(t, c, x)
		if j := claim(t, c, x); j != nil {
			if j.Kind != dirpb.JobKind_JOB_JOIN && j.Kind != dirpb.JobKind_JOB_RECOVER {
				t.Fatalf("claimed %v", j)
			}
			finish(t, c, x, j)
		}
		r, err := c.DrainNode(ctx, &dirpb.DrainNodeRequest{Node: "m2"})
		if err != nil {
			t.Fatal(err)
		}
		return r.Regions == 0
	})
	for _, pg := range statusOf(t, c).Map.Pgs {
		if len(pg.Members) != 2 || slices.ContainsFunc(pg.Members, func(m *dirpb.Member) bool {
			return m.NodeId == ms[1].id
		}) {
			t.Fatalf("drained: %v", pg)
		}
	}
	if _, err := c.RemoveNode(ctx, &dirpb.RemoveNodeRequest{Node: "m2"}); err != nil {
		t.Fatal(err)
	}
	n.machine.view(func(s *fsm.State) {
		if s.Node(ms[1].id) != nil {
			t.Error("a removed node is still known")
		}
	})
	testutil.Until(t, "its process to be told", ms[1].told)
}

// A freeze ends when every session has quiesced, at once and not with the next tick; that
// operations are still in flight is no matter.
func TestFreezeWaitsForQuiesced(t *testing.T) {
	n, c, ms := store(t, forever, 2, &dirpb.CreateNamespaceRequest{Name: "n", Replicas: 2})
	a, b := openIn(t, c, "n").SessionId, openIn(t, c, "n").SessionId
	ms[1].mute.Store(true)
	if _, err := c.RemoveNode(testCtx(t), &dirpb.RemoveNodeRequest{Node: "m2", Force: true}); err != nil {
		t.Fatal(err)
	}
	v := statusOf(t, c).Map.Version
	state := func() dirpb.PGState { return statusOf(t, c).Map.Pgs[0].State }
	quiesce := func(id uint32, v uint64) {
		t.Helper()
		if _, err := c.Renew(testCtx(t), &dirpb.RenewRequest{SessionId: id, QuiescedMapVersion: v,
			Number: numbers.Add(1)}); err != nil {
			t.Fatal(err)
		}
	}
	quiesce(a, v)
	quiesce(b, v-1)
	for range 3 {
		n.plan(testCtx(t), n.leading.Load())
		if state() != dirpb.PGState_PG_FROZEN {
			t.Fatalf("%v before b quiesced", state())
		}
	}
	quiesce(b, v)
	testutil.Until(t, "the thaw", func() bool { return state() == dirpb.PGState_PG_ACTIVE })
}

// Operators start jobs, of one placement group or of all.
func TestStartJob(t *testing.T) {
	_, c, _ := store(t, forever, 2, &dirpb.CreateNamespaceRequest{Name: "n", Replicas: 1, Shards: 4})
	ctx := testCtx(t)
	x := openIn(t, c, "n").SessionId
	const move, recall, scrub = dirpb.JobKind_JOB_MOVE, dirpb.JobKind_JOB_RECALL, dirpb.JobKind_JOB_SCRUB
	for _, tc := range []struct {
		q    *dirpb.StartJobRequest
		code codes.Code
		word string
	}{
		{&dirpb.StartJobRequest{Kind: scrub, Namespace: "m"}, codes.NotFound, `"m"`},
		{&dirpb.StartJobRequest{Kind: dirpb.JobKind_JOB_JOIN, Namespace: "n"}, codes.InvalidArgument, "JOB_JOIN"},
		{&dirpb.StartJobRequest{Namespace: "n"}, codes.InvalidArgument, "UNSPECIFIED"},
		{&dirpb.StartJobRequest{Kind: scrub, Namespace: "n", PgId: 9}, codes.NotFound, "placement group 9"},
		{&dirpb.StartJobRequest{Kind: move, Namespace: "n", ShardId: 9}, codes.NotFound, "shard 9"},
		{&dirpb.StartJobRequest{Kind: move, Namespace: "n", TargetPgId: 1}, codes.InvalidArgument, "every shard"},
		{&dirpb.StartJobRequest{Kind: move, Namespace: "n", ShardId: 1, TargetPgId: 9}, codes.FailedPrecondition,
			"placement group 9"},
		{&dirpb.StartJobRequest{Kind: move, Namespace: "n", ShardId: 1, TargetPgId: 1}, codes.InvalidArgument,
			"already"},
		{&dirpb.StartJobRequest{Kind: recall, Namespace: "n", PgId: 1, Extent: 77}, codes.InvalidArgument, "extent 77"},
		{&dirpb.StartJobRequest{Kind: recall, Namespace: "n", Extent: 77}, codes.FailedPrecondition, "extent 77"},
	} {
		_, err := c.StartJob(ctx, tc.q)
		wantCode(t, err, tc.code, tc.word)
	}
	r, err := c.StartJob(ctx, &dirpb.StartJobRequest{Kind: move, Namespace: "n"})
	if err != nil || len(r.JobIds) != 2 {
		t.Fatalf("started %v, %v; want one for each placement group", r, err)
	}
	_, err = c.StartJob(ctx, &dirpb.StartJobRequest{Kind: scrub, Namespace: "n", PgId: 1})
	wantCode(t, err, codes.FailedPrecondition, "placement group 1 has job")
	testutil.Until(t, "every shard to be split", func() bool {
		ack(t, c, x)
		if j := claim(t, c, x); j != nil {
			finish(t, c, x, j)
		}
		s := statusOf(t, c)
		return len(s.Map.Shards) == 8 && len(s.Jobs) == 0
	})
}

// A new memory node is given its share.
func TestRebalance(t *testing.T) {
	n, c, _ := store(t, forever, 2, &dirpb.CreateNamespaceRequest{Name: "n", Replicas: 2, Shards: 4,
		BytesPerNode: 64 << 20})
	ctx := testCtx(t)
	x := openIn(t, c, "n").SessionId
	_, err := c.Rebalance(ctx, &dirpb.RebalanceRequest{Namespace: "m"})
	wantCode(t, err, codes.NotFound, `"m"`)
	m3 := newMemnode(t, "m3", 1, just(n))
	const none, on, cancelled = dirpb.Rebalancing_REBALANCING_NONE, dirpb.Rebalancing_REBALANCING_ON,
		dirpb.Rebalancing_REBALANCING_CANCELLED
	is := func() dirpb.Rebalancing { return statusOf(t, c).Map.Namespaces[0].Rebalancing }
	ask := func(q *dirpb.RebalanceRequest, least int, want dirpb.Rebalancing) {
		t.Helper()
		q.Namespace = "n"
		r, err := c.Rebalance(ctx, q)
		if err != nil || len(r.Steps) < least || len(r.Steps) > 3 || is() != want {
			t.Fatalf("steps %v, want %d to 3; %v, %v, want %v", r.GetSteps(), least, err, is(), want)
		}
	}
	ask(&dirpb.RebalanceRequest{DryRun: true}, 3, none)
	ask(&dirpb.RebalanceRequest{DryRun: true, Cancel: true}, 3, none)
	ask(&dirpb.RebalanceRequest{}, 3, on)
	testutil.Until(t, "the third placement group", func() bool { return len(statusOf(t, c).Map.Pgs) == 3 })
	// The second step may have begun, and not the third: nobody works on the second.
	ask(&dirpb.RebalanceRequest{Cancel: true}, 1, cancelled)
	ask(&dirpb.RebalanceRequest{Cancel: true}, 1, cancelled)
	ask(&dirpb.RebalanceRequest{DryRun: true}, 1, cancelled)
	ask(&dirpb.RebalanceRequest{}, 1, on)
	testutil.Until(t, "the third placement group to have a shard", func() bool {
		work(t, c, x)
		s := statusOf(t, c)
		return len(s.Map.Pgs) == 3 && s.Map.Pgs[2].Members[0].NodeId == m3.id && len(s.Jobs) == 0 &&
			slices.ContainsFunc(s.Map.Shards, func(sh *dirpb.Shard) bool { return sh.PgId == s.Map.Pgs[2].Id })
	})
	testutil.Until(t, "its end", func() bool {
		work(t, c, x)
		return is() == none
	})
	got := auditOf(t, c, actRebalance)
	if len(got) != 3 || got[0] != "steps=3" || !strings.HasSuffix(got[1], " cancel=true") ||
		strings.Contains(got[2], "cancel") {
		t.Fatalf("audited are %q", got)
	}
}

// work acknowledges the newest map and does a job, if there is one.
func work(t testing.TB, c dirpb.DirectoryClient, x uint32) {
	t.Helper()
	ack(t, c, x)
	if j := claim(t, c, x); j != nil {
		finish(t, c, x, j)
	}
}

func auditOf(t testing.TB, c dirpb.DirectoryClient, action string) (details []string) {
	t.Helper()
	r, err := c.Audit(testCtx(t), &dirpb.AuditRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range r.Entries {
		if e.Action == action {
			details = append(details, e.Detail)
		}
	}
	return details
}

// A rebalance goes on where another directory node leads.
func TestRebalanceSurvivesItsLeader(t *testing.T) {
	// Nobody is elected but the one that takes over.
	nodes := newClusterWith(t, 3, forever, func(_ int, o *Options) { o.ElectionTimeout = time.Second })
	newMemnode(t, "m1", 1, nodes.all)
	newMemnode(t, "m2", 1, nodes.all)
	ctx := testCtx(t)
	leads := func() dirpb.DirectoryClient { return dial(t, leaderOf(t, nodes.all()...)) }
	c := leads()
	if _, err := c.CreateNamespace(ctx, &dirpb.CreateNamespaceRequest{Name: "n", Replicas: 2, Shards: 4,
		BytesPerNode: 64 << 20}); err != nil {
		t.Fatal(err)
	}
	x := openIn(t, c, "n").SessionId
	newMemnode(t, "m3", 1, nodes.all)
	if r, err := c.Rebalance(ctx, &dirpb.RebalanceRequest{Namespace: "n"}); err != nil || len(r.Steps) != 3 {
		t.Fatalf("steps %v, %v", r, err)
	}
	if err := leaderOf(t, nodes.all()...).raft.LeadershipTransfer().Error(); err != nil {
		t.Fatal(err)
	}
	c = leads()
	// A directory node that was elected just now knows what is left, too.
	if r, err := c.Rebalance(ctx, &dirpb.RebalanceRequest{Namespace: "n", DryRun: true}); err != nil ||
		len(r.Steps) == 0 {
		t.Fatalf("steps %v, %v", r, err)
	}
	testutil.Until(t, "its end", func() bool {
		work(t, c, x)
		return statusOf(t, c).Map.Namespaces[0].Rebalancing == dirpb.Rebalancing_REBALANCING_NONE
	})
	if r, err := c.Rebalance(ctx, &dirpb.RebalanceRequest{Namespace: "n"}); err != nil || len(r.Steps) != 0 {
		t.Fatalf("steps %v, %v", r, err)
	}
}
