package lead

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

func TestClaim(t *testing.T) {
	w := newWorld(t)
	w.nodes(3, 8)
	ns, other := w.create("n", 2, 4), w.create("other", 1, 4)
	a, b, c := w.open(ns), w.open(ns), w.open(other)
	ro := w.apply(&fsmpb.Command{
		Op: &fsmpb.Command_OpenSession{OpenSession: &fsmpb.OpenSession{NamespaceId: ns, ReadOnly: true}}}).Session.Id
	if _, _, err := w.l.Opened(w.s, ro, w.now); err != nil {
		t.Fatal(err)
	}
	scrub := func(pg uint32) uint32 {
		return w.start(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_SCRUB, PgId: pg})
	}
	first, second := scrub(1), scrub(2)
	if j := w.l.Claimable(w.s, c, w.now); j != nil {
		t.Fatalf("a session of another namespace is offered %v", j)
	}
	if j := w.l.Claimable(w.s, ro, w.now); j != nil {
		t.Fatalf("a read-only session is offered %v", j)
	}
	if j := w.claim(a); j.Id != first {
		t.Fatalf("claimed %v, want the first", j)
	}
	if j := w.l.Claimable(w.s, a, w.now); j.GetId() != first || j.Owner != a {
		t.Fatalf("asked again, a session is offered %v", j)
	}
	// Urgent ones first, and what they park is not handed out.
	w.apply(&fsmpb.Command{
		Op: &fsmpb.Command_PlanJoin{PlanJoin: &fsmpb.PlanJoin{PgId: 3, Epoch: w.pg(3).Epoch, NodeId: 2}}})
	w.publish()
	w.ack()
	w.quiet[ro] = true
	if j := w.l.Claimable(w.s, b, w.now); j.Kind != dirpb.JobKind_JOB_JOIN {
		t.Fatalf("offered %v, want the join", j)
	}
	w.down(3)
	w.on(2, dirpb.PGState_PG_FROZEN, 2)
	w.on(3, dirpb.PGState_PG_FROZEN, 1, 2)
	if j := w.l.Claimable(w.s, b, w.now); j != nil {
		t.Fatalf("offered %v of a frozen placement group", j)
	}
	w.renew(ro, 0, w.s.MapVersion())
	w.ack()
	w.step()
	if j := w.l.Claimable(w.s, b, w.now); j.GetId() != second {
		t.Fatalf("offered %v, want the scrub; the join's barrier has not passed", j)
	}
	w.renew(ro, w.s.MapVersion(), 0)
	w.ack()
	w.do(b, dirpb.JobKind_JOB_JOIN)

	// Trouble: a lease of rest, then twice as long each time.
	pause := lease
	for range 6 {
		w.l.Progress(first, 3, 9, "it hurts", w.now)
		w.apply(&fsmpb.Command{
			Op: &fsmpb.Command_EndJob{EndJob: &fsmpb.EndJob{SessionId: a, JobId: first, GiveBack: true}}})
		i := slices.IndexFunc(w.l.Jobs(w.s, w.now), func(j *dirpb.Job) bool { return j.Id == first })
		if j := w.l.Jobs(w.s, w.now)[i]; j.Done != 3 || j.Total != 9 || j.Trouble != "it hurts" || j.Owner != 0 {
			t.Fatalf("shown %v", j)
		}
		if j := w.s.Job(first); j.Trouble != "" {
			t.Fatalf("the state's own message was changed: %v", j)
		}
		if j := w.l.Claimable(w.s, a, w.now); j.GetId() != second { // the next one meanwhile
			t.Fatalf("offered %v", j)
		}
		w.pass(pause - 1)
		offered := func() *dirpb.Job { // to a session that is still there, whatever the time
			return w.l.Claimable(w.s, a, w.now)
		}
		for x := range w.l.sessions.all() {
			w.l.sessions.of(x).expires = w.now + lease
		}
		if j := offered(); j.GetId() != second {
			t.Fatalf("offered %v before its time", j)
		}
		w.now++
		if j := w.claim(a); j.GetId() != first {
			t.Fatalf("offered %v after a rest of %v", j, pause)
		}
		pause = min(2*pause, 10*lease)
	}

	// An owner that dies keeps its job until it is fenced.
	for x := range w.l.sessions.all() {
		w.l.sessions.of(x).expires = w.now + 10*lease
	}
	w.apply(&fsmpb.Command{
		Op: &fsmpb.Command_ExpireSessions{ExpireSessions: &fsmpb.ExpireSessions{SessionIds: []uint32{a}}}})
	if j := w.l.Claimable(w.s, b, w.now); j.GetId() != second {
		t.Fatalf("offered %v while its owner is being fenced", j)
	}
	w.fence()
	if j := w.l.Claimable(w.s, b, w.now); j.GetId() != first {
		t.Fatalf("offered %v after the fence, want the first", j)
	}
}

// Every voluntary change waits until all have acknowledged the last one, and nothing else
// of the placement group is under way.
func TestVoluntary(t *testing.T) {
	for name, tc := range map[string]struct {
		provoke func(w *world)
		want    string
	}{
		"join": {func(w *world) { w.node("m3", "d3", 8); w.drain(2) }, `group 1: memory node "m3" is to join`},
		"move": {func(w *world) { w.drain(2) }, "JOB_MOVE begins: its memory node drains"},
		"asked": {func(w *world) {
			w.l.enqueue(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_SCRUB, PgId: 1, Reason: "asked"})
		}, "JOB_SCRUB begins: asked"},
		"dirty": {func(w *world) {
			y := w.open(1)
			w.grant(y, 1, 100)
			w.leak(y)
			w.l.began, w.l.memory(w.s, 1).counted = w.now-time.Hour, w.now-time.Hour
		}, "JOB_SCRUB begins"},
	} {
		t.Run(name, func(t *testing.T) {
			replicas := uint32(2)
			if name == "move" {
				replicas = 1
			}
			w := newWorld(t)
			w.nodes(2, uint64(replicas))
			ns := w.create("n", replicas, 2)
			x := w.open(ns)
			w.quiet[x] = true
			w.l.acknowledged(w.l.sessions.of(x), w.s.PG(1).ChangedVersion-1, w.l.sessions.of(x).quiesced)
			tc.provoke(w)
			w.want()
			w.quiet[x] = false
			w.ack()
			// A job on it is in the way as well.
			for pg := range uint32(2) {
				w.start(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_SCRUB, PgId: pg + 1})
			}
			w.want()
			w.do(x, dirpb.JobKind_JOB_SCRUB)
			w.do(x, dirpb.JobKind_JOB_SCRUB)
			if name == "dirty" {
				w.leak(w.open(ns))
				w.l.memory(w.s, 1).counted = w.now - time.Hour
			}
			if got := w.plan(); len(got) == 0 || !strings.Contains(got[0].Why, tc.want) {
				t.Fatalf("due are %v, want %q", got, tc.want)
			}
		})
	}
}

// Jobs that an operator asks for and that cannot begin yet are kept, and begin later; a job that was
// refused is left alone for a while.
func TestOffer(t *testing.T) {
	w := newWorld(t)
	w.nodes(2, 8)
	ns := w.create("n", 1, 4)
	x := w.open(ns)
	split := func(id uint32) *fsmpb.StartJob {
		return &fsmpb.StartJob{Kind: dirpb.JobKind_JOB_MOVE, ShardId: id, Split: true, Reason: fmt.Sprint("shard ", id)}
	}
	var all []*fsmpb.StartJob
	for _, sh := range w.s.Shards(ns) { // 1 and 3 in the first placement group, 2 and 4 in the second
		all = append(all, split(sh.Id))
	}
	if why := w.l.Busy(w.s, all[0], w.now); why != "" {
		t.Fatal(why)
	}
	ready := w.l.Offer(w.s, append(all, split(3)), w.now)
	if len(ready) != 2 || ready[0].ShardId != 1 || ready[1].ShardId != 2 || len(w.l.queue) != 2 {
		t.Fatalf("ready are %v, kept %v", ready, w.l.queue)
	}
	for _, q := range ready {
		w.start(q)
	}
	if why := w.l.Busy(w.s, all[2], w.now); !strings.Contains(why, "placement group 1 has job 1") {
		t.Fatal(why)
	}
	w.want()
	w.pass(maxPause)
	w.beat()
	w.ack()
	for range 2 { // both were begun
		w.do(x, dirpb.JobKind_JOB_MOVE)
	}
	w.ack()
	w.do(x, dirpb.JobKind_JOB_CLEAN)
	steps := w.plan()
	if len(steps) != 1 || !strings.Contains(steps[0].Why, "shard 3") || len(w.l.queue) != 1 {
		t.Fatalf("due are %v, kept %v", steps, w.l.queue)
	}
	// Something else was faster: it goes on waiting.
	w.start(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_SCRUB, PgId: 1})
	w.l.Refused(w.s, steps[0], w.now)
	if len(w.l.queue) != 2 {
		t.Fatalf("kept %v", w.l.queue)
	}
	w.pass(maxPause)
	w.beat()
	w.settleJobs(x)
	if got := w.s.Shards(ns); len(got) != 8 || len(w.l.queue) != 0 {
		t.Fatalf("%d shards after four splits, kept %v", len(got), w.l.queue)
	}

	// A job that has no object any more is dropped.
	w.l.enqueue(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_MOVE, ShardId: 99, Split: true})
	w.l.enqueue(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_SCRUB, PgId: 99})
	w.want()
	if len(w.l.queue) != 0 {
		t.Fatalf("kept %v", w.l.queue)
	}

	w.drain(2)
	if steps = w.plan(); len(steps) != 1 {
		t.Fatalf("due are %v", steps)
	}
	w.l.Refused(w.s, steps[0], w.now)
	w.want()
	w.pass(maxPause)
	w.beat()
	w.ack()
	if again := w.plan(); len(again) != 1 || again[0].Why != steps[0].Why {
		t.Fatalf("due are %v, want %v again", again, steps)
	}
}

func TestGrow(t *testing.T) {
	w := newWorld(t)
	w.nodes(3, 8)
	ns := w.create("n", 1, 4)
	x := w.open(ns)
	sh := w.s.Shard(1)
	fill := func(pg uint32) { // its index
		w.s.Heap(pg).IndexNext = w.pg(pg).IndexBytes
	}
	grow := func(target uint32, growing bool, why string) {
		t.Helper()
		q, g, y := w.l.Grow(w.s, w.s.Shard(sh.Id), w.now)
		if growing != g || !strings.Contains(y, why) || (q == nil) != (why != "") || q != nil &&
			(q.TargetPgId != target || !q.Split || q.ShardId != sh.Id) {
			t.Fatalf("to grow: %v, %v, %q; want placement group %d, %v, %q", q, g, y, target, growing, why)
		}
	}
	grow(0, true, "")
	w.start(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_SCRUB, PgId: 1})
	grow(0, true, "placement group 1 has job 1")
	w.do(x, dirpb.JobKind_JOB_SCRUB)
	fill(1)
	w.s.Heap(2).IndexNext += 1 << 20
	grow(3, true, "")
	w.start(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_SCRUB, PgId: 3})
	grow(2, true, "")
	w.start(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_SCRUB, PgId: 2})
	grow(0, true, "placement group 3 has job")
	w.do(x, dirpb.JobKind_JOB_SCRUB)
	w.do(x, dirpb.JobKind_JOB_SCRUB)
	w.drain(3)
	grow(2, true, "")
	q, _, _ := w.l.Grow(w.s, sh, w.now)
	fill(2)
	grow(0, false, "no index")
	w.s.Heap(2).IndexNext = layout.RegionPageSize
	w.start(q)
	grow(0, true, "moves already")
}

// A shard that is small beside what is left of the index gets a larger array, until it has about a
// quarter of its share; then it splits.
func TestGrowLarger(t *testing.T) {
	w := newWorld(t)
	w.nodes(1, 8)
	ns := w.apply(&fsmpb.Command{Op: &fsmpb.Command_CreateNamespace{CreateNamespace: &fsmpb.CreateNamespace{
		Namespace: &dirpb.CreateNamespaceRequest{Name: "n", Replicas: 1, BytesPerNode: region, Shards: 2, Segments: 1,
			IndexPercent: 50}}}}).Namespace.Id
	w.publish()
	x := w.open(ns)
	share := uint32(w.pg(1).IndexBytes/layout.SegmentSize) / 2
	var last []uint32
	for range 2 { // the shards
		sh, moves := w.s.Shards(ns)[0], 0
		for ; ; moves++ {
			q, growing, why := w.l.Grow(w.s, sh, w.now)
			if q == nil || !growing || q.TargetPgId != 0 || q.Split != (q.Segments == 0) {
				t.Fatalf("shard %d of %d segments: %v, %v, %q", sh.Id, sh.Segments, q, growing, why)
			}
			if q.Split {
				break
			}
			if q.Segments < 4*sh.Segments || q.Segments > layout.MaxGrowth*sh.Segments || q.Segments > share/4 {
				t.Fatalf("shard %d grows from %d to %d segments; its share is %d", sh.Id, sh.Segments, q.Segments,
					share)
			}
			w.start(q)
			w.do(x, dirpb.JobKind_JOB_MOVE)
			w.ack()
			w.do(x, dirpb.JobKind_JOB_CLEAN)
			w.ack()
			sh = w.s.Shards(ns)[1] // its new one
		}
		if last = append(last, sh.Segments); sh.Segments < share/16 || moves > 3 {
			t.Fatalf("shard %d has %d segments after %d moves; its share is %d", sh.Id, sh.Segments, moves, share)
		}
	}
	t.Logf("of %d segments each, shards take %d before they split", share, last)
}

// Shards of a busy placement group that are full split one after the other, without being asked for again.
func TestGrowWaits(t *testing.T) {
	w := newWorld(t)
	w.nodes(1, 8)
	ns := w.create("n", 1, 4)
	x := w.open(ns)
	grow := func(shard uint32, begins bool) *fsmpb.StartJob {
		t.Helper()
		q, growing, why := w.l.Grow(w.s, w.s.Shard(shard), w.now)
		if !growing || (q != nil) != begins {
			t.Fatalf("shard %d: %v, %v, %q", shard, q, growing, why)
		}
		return q
	}
	w.start(grow(1, true))
	for range 2 {
		grow(2, false)
		grow(3, false)
	}
	const begins = "placement groups [1]: JOB_MOVE begins: it is full"
	for _, shard := range []uint32{2, 3} {
		w.do(x, dirpb.JobKind_JOB_MOVE)
		w.ack()
		w.want()
		w.do(x, dirpb.JobKind_JOB_CLEAN)
		w.ack()
		w.want(begins)
		if w.s.Shard(shard).Move == nil {
			t.Fatalf("shard %d does not split", shard)
		}
	}
	grow(4, false)
	w.do(x, dirpb.JobKind_JOB_MOVE)
	w.ack()
	w.s.Heap(1).IndexNext = w.pg(1).IndexBytes // others took what was left
	w.do(x, dirpb.JobKind_JOB_CLEAN)
	w.ack()
	w.want()
}

func TestRebalance(t *testing.T) {
	w := newWorld(t)
	w.nodes(2, 4)
	ns := w.create("n", 2, 8)
	x := w.open(ns)
	if steps := w.rebalance(ns); len(steps) != 0 {
		t.Fatalf("nothing has changed, but %q", steps)
	}
	w.node("m3", "d3", 8)
	w.node("full", "d4", 0)
	steps := w.rebalance(ns)
	if len(steps) != 4 || steps[0] != `create a placement group on memory nodes ["m3" "m1"]` ||
		steps[1] != `replace memory node "m1" of placement group 2 by "m3"` ||
		steps[2] != `move a shard from placement group 1 to the new placement group of memory node "m3"` {
		t.Fatalf("steps %q", steps)
	}
	w.want(`a placement group on memory nodes ["m3" "m1"]`)
	w.want() // until its regions are made
	w.publish()
	w.ack()
	w.want(`placement group 2: memory node "m3" is to join: it is to take the place of "m1"`)
	w.settleJobs(x)
	w.on(2, dirpb.PGState_PG_ACTIVE, 2, 3)
	for _, pg := range w.s.PGs(ns) {
		n := 0
		for _, sh := range w.s.Shards(ns) {
			if sh.PgId == pg.Id {
				n++
			}
		}
		if n < 2 || n > 3 {
			t.Fatalf("placement group %d has %d shards of 8", pg.Id, n)
		}
	}
	if len(w.s.Rebalancing()) != 0 {
		t.Fatal("it has no end")
	}

	// A step that is refused ends it.
	w.node("m5", "d5", 8)
	if steps := w.rebalance(ns); len(steps) == 0 {
		t.Fatal("nothing to do")
	}
	due := w.plan()
	if len(due) != 1 {
		t.Fatalf("due are %v", due)
	}
	w.l.Refused(w.s, due[0], w.now)
	w.pass(2 * maxPause)
	w.beat()
	w.ack()
	w.want("its rebalance ends: a step of it was refused")
	w.want()
	if len(w.rebalance(ns)) == 0 {
		t.Fatal("nothing to do")
	}
	w.want("a placement group on memory nodes")
}

// A rebalance that is taken back begins no other step.
func TestRebalanceCancelled(t *testing.T) {
	w := newWorld(t)
	w.nodes(2, 8)
	ns := w.create("n", 2, 8)
	x := w.open(ns)
	w.node("m3", "d3", 8)
	if steps := w.rebalance(ns); len(steps) < 2 {
		t.Fatalf("steps %q", steps)
	}
	w.want("a placement group on memory nodes")
	w.apply(&fsmpb.Command{
		Op: &fsmpb.Command_Rebalance{
			Rebalance: &fsmpb.Rebalance{NamespaceId: ns, To: dirpb.Rebalancing_REBALANCING_CANCELLED}}})
	w.settleJobs(x)
	if steps := w.l.Rebalance(w.s, ns, w.now); len(steps) == 0 || !strings.HasPrefix(steps[0], "replace") {
		t.Fatalf("left are %q, want all but the first", steps)
	}
}
