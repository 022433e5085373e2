package lead

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

const (
	lease  = time.Second
	mib    = 1 << 20
	region = 64 * mib // of a namespace made by world.create, at any number of replicas
)

// world is a state and its leader, under virtual time, with the memory nodes, sessions and
// janitors that a test plays.
type world struct {
	t     testing.TB
	s     *fsm.State
	l     *Leader
	now   time.Duration
	mute  map[uint32]bool // memory nodes, sessions that are not heard
	quiet map[uint32]bool
	log   []string

	numbers map[uint32]uint64 // of the latest renewal, by session
}

var testOptions = Options{
	Lease: lease, LastCopyLeases: 10, EpochInterval: 100 * time.Millisecond, EpochBlock: 600, ScrubInterval: 30 * time.Second,
}

func newWorld(t *testing.T) *world {
	w := &world{t: t, s: fsm.New(), mute: make(map[uint32]bool), quiet: make(map[uint32]bool), numbers: make(map[uint32]uint64)}
	w.elect()
	return w
}

// elect begins another leadership.
func (w *world) elect() {
	o := testOptions
	if w.l != nil {
		o.Term = w.l.opts.Term
	}
	o.Term++
	w.l = New(o, w.s, w.now)
}

func (w *world) try(c *fsmpb.Command) fsm.Result { return fsm.Apply(w.s, c) }

func (w *world) apply(c *fsmpb.Command) fsm.Result {
	w.t.Helper()
	r := w.try(c)
	if r.Err != nil {
		w.t.Fatalf("%v: %v", c, r.Err)
	}
	return r
}

// node registers a memory node with room for so many regions.
func (w *world) node(name, domain string, regions uint64) uint32 {
	w.t.Helper()
	return w.boot(name, domain, regions, 1)
}

func (w *world) boot(name, domain string, regions, incarnation uint64) uint32 {
	w.t.Helper()
	r := w.apply(&fsmpb.Command{Op: &fsmpb.Command_RegisterNode{RegisterNode: &fsmpb.RegisterNode{Node: &dirpb.RegisterNodeRequest{
		Name: name, Incarnation: incarnation, CapacityBytes: regions * region, Domain: domain,
		Endpoints: []*dirpb.Endpoint{{Provider: "tcp", Addr: "h:1"}},
	}}}})
	w.l.Heartbeat(w.s, w.now, r.NodeID, incarnation, nil)
	return r.NodeID
}

// nodes registers m1, m2, … each in a domain of its own.
func (w *world) nodes(n int, regions uint64) {
	w.t.Helper()
	for i := range n {
		w.node(fmt.Sprint("m", i+1), fmt.Sprint("d", i+1), regions)
	}
}

// create lays out a namespace whose placement groups have regions of region bytes.
func (w *world) create(name string, replicas, shards uint32) uint32 {
	w.t.Helper()
	q := &dirpb.CreateNamespaceRequest{Name: name, Replicas: replicas, BytesPerNode: uint64(replicas) * region, Shards: shards}
	if n := len(w.s.Nodes()); n > fsm.FirstNodes {
		q.Nodes = uint32(n)
	}
	r := w.apply(&fsmpb.Command{Op: &fsmpb.Command_CreateNamespace{CreateNamespace: &fsmpb.CreateNamespace{Namespace: q}}})
	w.publish()
	return r.Namespace.Id
}

// publish has the memory nodes make every region that they are to have.
func (w *world) publish() {
	w.t.Helper()
	for _, n := range w.s.Nodes() {
		if n.State != dirpb.NodeState_NODE_UP || w.mute[n.Id] {
			continue
		}
		for _, want := range w.s.WantRegions(n.Id, n.Incarnation) {
			if !want.Published {
				w.apply(&fsmpb.Command{Op: &fsmpb.Command_PublishRegion{PublishRegion: &dirpb.PublishRegionRequest{
					NodeId: n.Id, Incarnation: n.Incarnation, Boot: n.Boot, PgId: want.PgId, Keys: []*dirpb.RegionKeys{{Provider: "tcp", IndexRkey: 1}},
				}}})
			}
		}
	}
}

func (w *world) open(ns uint32) uint32 {
	w.t.Helper()
	epoch, _ := w.l.Epochs()
	r := w.apply(&fsmpb.Command{Op: &fsmpb.Command_OpenSession{OpenSession: &fsmpb.OpenSession{NamespaceId: ns, Epoch: epoch}}})
	if _, _, err := w.l.Opened(w.s, r.Session.Id, w.now); err != nil {
		w.t.Fatal(err)
	}
	return r.Session.Id
}

func (w *world) renew(x uint32, acked, quiesced uint64) {
	w.t.Helper()
	epoch, _ := w.l.Epochs()
	if _, err := w.tell(Renewal{Session: x, Report: epoch, Acked: acked, Quiesced: quiesced}); err != nil {
		w.t.Fatal(err)
	}
}

// tell sends a session's next renewal, of this term.
func (w *world) tell(r Renewal) (Answer, error) {
	w.numbers[r.Session]++
	r.Number, r.Term = w.numbers[r.Session], w.l.opts.Term
	return w.l.Renew(w.s, w.now, r)
}

// ack has every session acknowledge the newest map.
func (w *world) ack() {
	w.t.Helper()
	for _, x := range w.s.Sessions() {
		if x.Life == dirpb.SessionLife_SESSION_LIVE && !w.quiet[x.Id] {
			w.renew(x.Id, w.s.MapVersion(), 0)
		}
	}
}

func (w *world) beat() {
	for _, n := range w.s.Nodes() {
		if !w.mute[n.Id] {
			w.l.Heartbeat(w.s, w.now, n.Id, n.Incarnation, nil)
		}
	}
}

// fence has memory nodes confirm what they are asked to.
func (w *world) fence() {
	w.t.Helper()
	for _, n := range w.s.Nodes() {
		if ids := w.s.FenceWork(n.Id, n.Incarnation); len(ids) > 0 && !w.mute[n.Id] {
			w.apply(&fsmpb.Command{Op: &fsmpb.Command_ConfirmFence{ConfirmFence: &fsmpb.ConfirmFence{
				NodeId: n.Id, Incarnation: n.Incarnation, SessionIds: ids,
			}}})
		}
	}
}

// plan gives what is due, without the reclaim epochs' blocks.
func (w *world) plan() []Step {
	w.l.Advance(w.s, w.now)
	return slices.DeleteFunc(w.l.Plan(w.s, w.now), func(s Step) bool {
		if _, ok := s.Do.Op.(*fsmpb.Command_ReserveEpoch); ok {
			w.apply(s.Do)
			return true
		}
		return false
	})
}

// step plans once and applies that. Only a step that an earlier one of the same plan has
// overtaken may be refused.
func (w *world) step() int {
	w.t.Helper()
	steps := w.plan()
	for i, s := range steps {
		w.log = append(w.log, s.Why)
		if r := w.try(s.Do); r.Err != nil {
			if i == 0 {
				w.t.Fatalf("at %v: %s: refused: %v", w.now, s.Why, r.Err)
			}
			w.l.Refused(w.s, s, w.now)
		}
	}
	return len(steps)
}

// want fails unless the due steps' reasons contain want, in order, and nothing else is
// due; then it applies them.
func (w *world) want(want ...string) {
	w.t.Helper()
	steps := w.plan()
	var got []string
	for _, s := range steps {
		got = append(got, s.Why)
	}
	ok := len(got) == len(want)
	for i := range got {
		ok = ok && strings.Contains(got[i], want[i])
	}
	if !ok {
		w.t.Fatalf("due are\n  %s\nwant\n  %s", strings.Join(got, "\n  "), strings.Join(want, "\n  "))
	}
	for _, s := range steps {
		w.apply(s.Do)
	}
}

// pass lets time pass in which nobody is heard, but the leader runs.
func (w *world) pass(d time.Duration) {
	for end := w.now + d; w.now < end; {
		w.now += min(lease/4, end-w.now)
		w.l.awake(w.now)
	}
}

// wait lets time pass in which everybody is heard.
func (w *world) wait(d time.Duration) {
	w.t.Helper()
	for end := w.now + d; w.now < end; {
		w.pass(min(lease/4, end-w.now))
		w.beat()
		for _, x := range w.s.Sessions() {
			if x.Life == dirpb.SessionLife_SESSION_LIVE && !w.quiet[x.Id] {
				w.renew(x.Id, 0, 0)
			}
		}
		w.l.Advance(w.s, w.now)
	}
}

// passing lets time pass in which everybody is heard and the leader plans, as it does, until
// so many jobs have begun; it fails if they have not by then, or if more have.
func (w *world) passing(d time.Duration, jobs int) {
	w.t.Helper()
	for end := w.now + d; w.now < end && (jobs == 0 || len(w.s.Jobs()) < jobs); {
		w.wait(100 * time.Millisecond)
		w.step()
	}
	if len(w.s.Jobs()) != jobs {
		w.t.Fatalf("jobs are %v, want %d of them", w.s.Jobs(), jobs)
	}
}

func (w *world) pg(id uint32) *dirpb.PlacementGroup { return w.s.PG(id) }

// on fails unless a placement group has these members.
func (w *world) on(pg uint32, state dirpb.PGState, nodes ...uint32) {
	w.t.Helper()
	var got []uint32
	for _, m := range w.pg(pg).GetMembers() {
		got = append(got, m.NodeId)
	}
	if w.pg(pg).GetState() != state || !slices.Equal(got, nodes) {
		w.t.Fatalf("placement group %d is %v on %d, want %v on %d", pg, w.pg(pg).GetState(), got, state, nodes)
	}
}

func (w *world) claim(x uint32) *dirpb.Job {
	w.t.Helper()
	j := w.l.Claimable(w.s, x, w.now)
	if j == nil {
		return nil
	}
	w.apply(&fsmpb.Command{Op: &fsmpb.Command_ClaimJob{ClaimJob: &fsmpb.ClaimJob{SessionId: x, JobId: j.Id}}})
	return j
}

// finish ends a job as its owner does.
func (w *world) finish(x uint32, j *dirpb.Job, linked ...uint32) {
	w.t.Helper()
	j = w.s.Job(j.Id)
	epoch, least := w.l.Epochs()
	report := &dirpb.JobReport{LinkedUnits: linked}
	if j.InPlace { // nothing stays
		for _, e := range j.Extents {
			report.Kept = append(report.Kept, &dirpb.UnitRuns{Extent: e})
		}
	}
	w.apply(&fsmpb.Command{Op: &fsmpb.Command_EndJob{EndJob: &fsmpb.EndJob{
		SessionId: x, JobId: j.Id, Epoch: epoch, MinEpoch: least, UnixMillis: 1, Report: report,
	}}})
	w.l.Scrubbed(w.s, j, w.now)
}

// do claims the only job, of the given kind, and finishes it.
func (w *world) do(x uint32, kind dirpb.JobKind) {
	w.t.Helper()
	j := w.claim(x)
	if j == nil || j.Kind != kind {
		w.t.Fatalf("claimed %v of %v, want %v", j, w.l.Jobs(w.s, w.now), kind)
	}
	w.finish(x, j)
}

func (w *world) start(q *fsmpb.StartJob) uint32 {
	w.t.Helper()
	return w.apply(&fsmpb.Command{Op: &fsmpb.Command_StartJob{StartJob: q}}).Job.Id
}

// rebalance asks for it, once the leader can tell what is to be done.
func (w *world) rebalance(ns uint32) []string {
	w.t.Helper()
	w.wait(w.l.Untold(w.now))
	steps := w.l.Rebalance(w.s, ns, w.now)
	if len(steps) > 0 {
		w.apply(&fsmpb.Command{Op: &fsmpb.Command_Rebalance{Rebalance: &fsmpb.Rebalance{NamespaceId: ns, To: dirpb.Rebalancing_REBALANCING_ON}}})
	}
	return steps
}

func (w *world) drain(node uint32) {
	w.t.Helper()
	w.apply(&fsmpb.Command{Op: &fsmpb.Command_DrainNode{DrainNode: &fsmpb.DrainNode{NodeId: node}}})
}

// stay takes a drain back.
func (w *world) stay(node uint32) {
	w.t.Helper()
	w.apply(&fsmpb.Command{Op: &fsmpb.Command_DrainNode{DrainNode: &fsmpb.DrainNode{NodeId: node, Cancel: true}}})
}

func (w *world) down(node uint32) {
	w.t.Helper()
	w.mute[node] = true
	w.apply(&fsmpb.Command{Op: &fsmpb.Command_NodeDown{NodeDown: &fsmpb.NodeDown{NodeId: node, Incarnation: w.s.Node(node).Incarnation}}})
}

// grant gives a session so many units, or fewer, and tells which.
func (w *world) grant(x, pg, units uint32) []*dirpb.ReturnedRun {
	w.t.Helper()
	r := w.apply(&fsmpb.Command{Op: &fsmpb.Command_GrantExtent{GrantExtent: &fsmpb.GrantExtent{SessionId: x, PgId: pg, WantUnits: units, PlaceUnits: 1}}})
	if len(r.Grant.Runs) == 0 {
		w.t.Fatalf("nothing granted of placement group %d", pg)
	}
	return r.Grant.Runs
}

// fill gives a session all that is granted of a placement group, and tells how much.
func (w *world) fill(x, pg uint32) (units uint64) {
	w.t.Helper()
	for {
		r := w.apply(&fsmpb.Command{Op: &fsmpb.Command_GrantExtent{GrantExtent: &fsmpb.GrantExtent{SessionId: x, PgId: pg, WantUnits: 1 << 31}}})
		if len(r.Grant.Runs) == 0 {
			return units
		}
		for _, g := range r.Grant.Runs {
			units += uint64(g.Units)
		}
	}
}

// leak ends a session that lost track of its memory.
func (w *world) leak(x uint32) {
	w.t.Helper()
	w.apply(&fsmpb.Command{Op: &fsmpb.Command_CloseSession{CloseSession: &fsmpb.CloseSession{SessionId: x, Leaked: true}}})
	w.l.Closed(w.s, w.now, x, nil, nil)
}

// ---- reclaim epochs and leases ---------------------------------------------

func TestEpochs(t *testing.T) {
	w := newWorld(t)
	w.nodes(1, 4)
	ns := w.create("n", 1, 1)
	w.wait(10 * lease)
	w.want()
	if e, least := w.l.Epochs(); e != 0 || least != 0 {
		t.Fatalf("E is %d, the minimum %d, without sessions", e, least)
	}
	a, b := w.open(ns), w.open(ns)
	// Nothing is told before it is reserved.
	w.wait(lease)
	if e, _ := w.l.Epochs(); e != 0 {
		t.Fatalf("E is %d beyond its ceiling", e)
	}
	w.want()
	if c := w.s.Meta().EpochCeiling; c != 600 {
		t.Fatalf("ceiling %d, want a block of 600", c)
	}
	for range 350 {
		w.pass(100 * time.Millisecond)
		w.beat()
		w.l.Advance(w.s, w.now)
		w.l.Advance(w.s, w.now) // no sooner than the interval
		e, _ := w.l.Epochs()
		if _, err := w.tell(Renewal{Session: a, Report: e}); err != nil {
			t.Fatal(err)
		}
		if _, err := w.tell(Renewal{Session: b, Report: e / 2}); err != nil {
			t.Fatal(err)
		}
	}
	if e, least := w.l.Epochs(); e != 350 || least != 175 {
		t.Fatalf("E is %d, the minimum %d, want 350 and 175", e, least)
	}
	w.want() // with half of the block left the next one is due
	if c := w.s.Meta().EpochCeiling; c != 950 {
		t.Fatalf("ceiling %d, want 950", c)
	}
	_, err := w.tell(Renewal{Session: a, Report: 351})
	if !errors.Is(err, fsm.ErrInvalid) {
		t.Fatalf("a report from the future: %v", err)
	}
	// The next leader starts at the ceiling, and knows no report.
	w.elect()
	if e, least := w.l.Epochs(); e != 950 || least != 0 {
		t.Fatalf("the next leader has E %d, minimum %d", e, least)
	}
	// An extent that waits for a reclaim epoch keeps E going when all sessions are gone.
	w.grant(a, 1, 100)
	j := w.start(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_RECALL, PgId: 1, Extents: []uint32{0}})
	w.ack()
	if got := w.claim(a); got == nil || got.Id != j {
		t.Fatalf("claimed %v", got)
	}
	w.finish(a, w.s.Job(j))
	for _, x := range []uint32{a, b} {
		w.leak(x)
	}
	w.want()
	w.wait(lease)
	w.want("extent 0 is free")
	w.wait(lease)
	w.want()
}

func TestSessionLeases(t *testing.T) {
	w := newWorld(t)
	w.nodes(2, 4)
	ns := w.create("n", 2, 4)
	a, b := w.open(ns), w.open(ns)
	// A session that was opened and never answered gets a lease too.
	c := w.apply(&fsmpb.Command{Op: &fsmpb.Command_OpenSession{OpenSession: &fsmpb.OpenSession{NamespaceId: ns}}}).Session.Id
	w.want()
	w.pass(lease)
	w.beat()
	w.want() // the end of a lease is in time
	w.renew(a, 0, 0)
	w.now++
	w.want(fmt.Sprintf("fencing sessions %d", []uint32{b, c}))
	for _, x := range []uint32{b, c, 99} {
		if _, err := w.tell(Renewal{Session: x}); !errors.Is(err, fsm.ErrNotFound) {
			t.Fatalf("renewing session %d: %v", x, err)
		}
	}
	if _, _, err := w.l.Opened(w.s, c, w.now); !errors.Is(err, fsm.ErrUnavailable) {
		t.Fatalf("answering an expired session: %v", err)
	}
	// A session being fenced holds the minimum back until it is fenced.
	w.wait(2 * lease)
	w.ack()
	if e, least := w.l.Epochs(); e == 0 || least != 0 {
		t.Fatalf("E %d, minimum %d", e, least)
	}
	w.fence()
	w.want()
	if e, least := w.l.Epochs(); least != e {
		t.Fatalf("E %d, minimum %d after the fences", e, least)
	}
	if _, ok := w.l.Report(b); ok {
		t.Fatal("a fenced session is still known")
	}
	// A new leader gives everyone a full lease.
	w.pass(100 * lease)
	w.elect()
	w.pass(lease)
	w.want()
	w.now++
	w.want(`"m1" is down`, `"m2" is waited for`, fmt.Sprintf("fencing sessions %d", []uint32{a})) // m2 has the last copy
}

// A silent memory node is down after a lease; one that holds the only copy of something,
// after ten.
func TestNodeLeases(t *testing.T) {
	w := newWorld(t)
	w.nodes(3, 4)
	w.made("n", 2, asStore, false) // placement groups on 1 2, 2 3 and 3 1
	if w.l.Heartbeat(w.s, w.now, 1, 7, nil) || w.l.Heartbeat(w.s, w.now, 9, 1, nil) {
		t.Fatal("a stranger was heard")
	}
	w.mute[1] = true
	w.pass(lease)
	w.beat()
	w.want()
	w.now++
	w.want(`"m1" is down`)
	w.on(1, dirpb.PGState_PG_FROZEN, 2)
	w.on(3, dirpb.PGState_PG_FROZEN, 3)
	w.mute[2] = true
	w.pass(10*lease - 1)
	w.l.Heartbeat(w.s, w.now, 3, 1, nil)
	w.want(`"m2" is waited for, since it is silent and has the last copy of something; placement groups [2] go on without it`,
		"1: every session has quiesced", "3: every session has quiesced")
	w.on(2, dirpb.PGState_PG_FROZEN, 3)
	w.want("2: every session has quiesced", `group 1: memory node "m3" is to join`) // a silent one is no candidate for 3
	w.now++
	w.want(`"m2" is down`)
	w.on(1, dirpb.PGState_PG_LOST, 2)
}

// A placement group whose memory nodes die while it is made is made by others, or goes on
// with those that are left; if there are none it waits. A placement group that is lost waits for its memory
// node until that is removed.
func TestRemake(t *testing.T) {
	w := newWorld(t)
	w.nodes(3, 4)
	w.mute[2] = true
	w.create("n", 1, 4) // placement groups on 1, 2 and 3
	w.on(2, dirpb.PGState_PG_CREATING, 2)
	w.pass(lease)
	w.beat()
	w.now++
	w.want(`"m2" is down`)
	w.want(`placement group 2: it is made anew on memory nodes ["m1"]`)
	w.publish()
	w.on(2, dirpb.PGState_PG_ACTIVE, 1)
	w.want()

	w.down(3)
	w.on(3, dirpb.PGState_PG_LOST, 3)
	w.want()
	w.apply(&fsmpb.Command{Op: &fsmpb.Command_RemoveNode{RemoveNode: &fsmpb.RemoveNode{NodeId: 3, Force: true}}})
	w.on(3, dirpb.PGState_PG_LOST)
	w.want(`placement group 3: it is made anew on memory nodes ["m1"]`)
	w.publish()
	w.on(3, dirpb.PGState_PG_ACTIVE, 1)

	// Of two, one may die; the group gets a second copy when there is room again.
	w = newWorld(t)
	w.nodes(2, 4)
	w.mute[1] = true
	w.create("n", 2, 4) // placement groups on 1 2 and 2 1
	w.down(1)
	w.publish()
	w.on(1, dirpb.PGState_PG_ACTIVE, 2)
	w.on(2, dirpb.PGState_PG_ACTIVE, 2)
	w.want()
	w.mute[1] = false
	w.boot("m1", "d1", 4, 2)
	w.want(`group 1: memory node "m1" is to join`, `group 2: memory node "m1" is to join`)

	// Both die: whichever is back first makes it.
	w = newWorld(t)
	w.nodes(2, 4)
	w.mute[1], w.mute[2] = true, true
	w.create("n", 2, 4)
	w.down(1)
	w.down(2)
	w.want()
	w.mute[1] = false
	w.boot("m1", "d1", 4, 2)
	w.want(`placement group 1: it is made anew on memory nodes ["m1"]`, `placement group 2: it is made anew on memory nodes ["m1"]`)
	w.publish()
	w.on(1, dirpb.PGState_PG_ACTIVE, 1)
	w.on(2, dirpb.PGState_PG_ACTIVE, 1)
}

// ---- freezes ---------------------------------------------------------------

// A freeze ends when every session has quiesced, or is fenced, and nothing is left to
// recover.
func TestThaw(t *testing.T) {
	w := newWorld(t)
	w.nodes(3, 4)
	ns, other := w.create("n", 2, 4), w.create("other", 1, 4)
	a, b := w.open(ns), w.open(ns)
	w.quiet[w.open(other)] = true // of no concern
	w.down(2)
	w.on(1, dirpb.PGState_PG_FROZEN, 1)
	v := w.s.FrozenVersion(1)
	w.want()
	w.renew(a, 0, v)
	w.want()
	w.renew(b, 0, v-1)
	w.want()
	w.renew(b, v, 0) // the stricter word implies the other
	w.want("group 1: every session has quiesced", "group 2: every session has quiesced")

	// A session that quiesced and then fell silent still holds a freeze up, until it is fenced.
	w.ack()
	w.boot("m2", "d2", 4, 2)
	w.mute[2] = false
	w.want(`group 1: memory node "m2" is to join`, `group 2: memory node "m2" is to join`)
	w.down(3)
	w.on(3, dirpb.PGState_PG_FROZEN, 1)
	v = w.s.FrozenVersion(3)
	w.renew(a, 0, v)
	w.pass(lease / 2)
	w.renew(b, 0, v)
	w.pass(lease/2 + 1)
	w.beat()
	w.quiet[a] = true
	steps := w.plan()
	if len(steps) != 1 || !strings.HasPrefix(steps[0].Why, "fencing sessions") {
		t.Fatalf("due are %v, want a fence", steps)
	}
	w.apply(steps[0].Do)
	w.want()
	w.fence()
	w.want("group 3: every session has quiesced")
}

// A map that does not exist yet is not acknowledged, whatever a session says: when it does
// exist, everybody waits for the session as for any other.
func TestAcksOfTheFuture(t *testing.T) {
	w := newWorld(t)
	w.nodes(3, 4)
	x := w.open(w.create("n", 2, 4))
	v := w.s.MapVersion()
	w.renew(x, v+100, v+200)
	if acked, quiesced, ok := w.l.Acknowledged(x); acked != v || quiesced != v || !ok {
		t.Fatalf("acknowledged %d, quiesced %d, of maps up to %d", acked, quiesced, v)
	}
	w.down(2)
	w.on(1, dirpb.PGState_PG_FROZEN, 1)
	w.want() // not before it has quiesced
	w.renew(x, 0, w.s.FrozenVersion(1))
	w.want("group 1: every session has quiesced", "group 2: every session has quiesced")
}

// Of three copies one is lost: the others are brought in step before anyone goes on.
func TestRecover(t *testing.T) {
	w := newWorld(t)
	w.nodes(3, 4)
	ns := w.create("n", 3, 1)
	x := w.open(ns)
	w.down(1)
	for pg := range uint32(3) {
		if w.pg(pg+1).State != dirpb.PGState_PG_FROZEN {
			t.Fatalf("%v", w.pg(pg+1))
		}
	}
	if j := w.claim(x); j != nil {
		t.Fatalf("claimed %v before anyone quiesced", j)
	}
	if names := w.l.Work(w.s, w.now); len(names) != 0 || !w.l.Jobs(w.s, w.now)[0].Waiting {
		t.Fatalf("work in %q, jobs %v", names, w.l.Jobs(w.s, w.now))
	}
	w.renew(x, 0, w.s.MapVersion()) // acknowledging can wait
	w.want()
	if names := w.l.Work(w.s, w.now); !slices.Equal(names, []string{"n"}) || w.l.Jobs(w.s, w.now)[0].Waiting {
		t.Fatalf("work in %q", names)
	}
	for pg := range uint32(3) {
		w.do(x, dirpb.JobKind_JOB_RECOVER)
		w.want(fmt.Sprintf("group %d: every session has quiesced", pg+1))
	}
	w.ack()
	w.want() // nobody is left to join
}

// ---- members ---------------------------------------------------------------

// The node that joins is up, heard, not draining, with room, best in a domain of its own, then the least
// used, then the lowest id.
func TestCandidate(t *testing.T) {
	type n struct {
		name, domain  string
		regions, used uint64 // used: placement groups that it has already
	}
	for _, tc := range []struct {
		name  string
		nodes []n
		spoil func(w *world, id func(string) uint32)
		want  string
	}{
		{"lowest id", []n{{"c", "x", 8, 0}, {"d", "x", 8, 0}}, nil, "c"},
		{"domain before use", []n{{"c", "a", 8, 0}, {"d", "x", 2, 1}}, nil, "d"},
		{"any domain before none", []n{{"c", "a", 8, 0}}, nil, "c"},
		{"least used share", []n{{"c", "x", 4, 1}, {"d", "x", 8, 1}}, nil, "d"},
		{"room", []n{{"c", "x", 1, 1}, {"d", "a", 8, 0}}, nil, "d"},
		{"nobody has room", []n{{"c", "x", 1, 1}}, nil, ""},
		{"draining", []n{{"c", "x", 8, 0}, {"d", "a", 8, 0}}, func(w *world, id func(string) uint32) { w.drain(id("c")) }, "d"},
		{"down", []n{{"c", "x", 8, 0}, {"d", "a", 8, 0}}, func(w *world, id func(string) uint32) { w.down(id("c")) }, "d"},
		{"silent", []n{{"c", "x", 8, 0}, {"d", "a", 8, 0}}, func(w *world, id func(string) uint32) {
			w.mute[id("c")] = true
			w.pass(lease + 1)
			w.beat()
		}, "d"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := newWorld(t)
			_, b := w.node("a", "a", 8), w.node("b", "b", 8)
			w.create("n", 2, 2)
			ids := map[string]uint32{}
			for _, n := range tc.nodes {
				ids[n.name] = w.node(n.name, n.domain, n.regions)
			}
			// Regions of no concern, to use room up.
			for _, n := range tc.nodes {
				for i := range n.used {
					for _, o := range w.s.Nodes() {
						if o.Name != n.name {
							w.drain(o.Id)
						}
					}
					w.create(fmt.Sprint("fill-", n.name, i), 1, 1)
					for _, o := range w.s.Nodes() {
						w.stay(o.Id)
					}
				}
			}
			w.down(b)
			if tc.spoil != nil {
				tc.spoil(w, func(name string) uint32 { return ids[name] })
			}
			w.step() // what is frozen thaws
			var got []string
			for _, s := range w.plan() {
				if _, ok := s.Do.Op.(*fsmpb.Command_PlanJoin); ok {
					got = append(got, s.Why)
				}
			}
			want := 2 // both placement groups were on a and b
			if tc.want == "" {
				want = 0
			}
			if len(got) != want || want > 0 && !strings.Contains(got[0], fmt.Sprintf("group 1: memory node %q is to join", tc.want)) {
				t.Fatalf("joins %q, want %q", got, tc.want)
			}
		})
	}
}

// A memory node that drains: each of its placement groups gets a replacement first, and lets
// it go when that is a copy. Every change waits for all to have acknowledged the one
// before.
func TestDrain(t *testing.T) {
	w := newWorld(t)
	w.nodes(3, 8)
	ns := w.create("n", 2, 4)
	x := w.open(ns)
	w.drain(2)
	w.want(`group 1: memory node "m3" is to join: a member drains`) // the other one waits
	w.want()
	w.publish()
	w.on(1, dirpb.PGState_PG_ACTIVE, 1, 2, 3)
	if j := w.claim(x); j != nil {
		t.Fatalf("claimed %v before its barrier", j)
	}
	w.ack()
	j := w.claim(x)
	if j.GetKind() != dirpb.JobKind_JOB_JOIN || !j.Calm {
		t.Fatalf("claimed %v, want a join for which nobody waits", j)
	}
	w.finish(x, j)
	w.want() // not acknowledged
	w.ack()
	w.want(`group 1: memory node "m2" leaves: it drains`)
	w.on(1, dirpb.PGState_PG_FROZEN, 1, 3)
	w.settleJobs(x)
	w.on(1, dirpb.PGState_PG_ACTIVE, 1, 3)
	w.on(2, dirpb.PGState_PG_ACTIVE, 3, 1)
	w.on(3, dirpb.PGState_PG_ACTIVE, 3, 1)
	if used := w.s.Node(2).UsedBytes; used != 0 {
		t.Fatalf("%d bytes are left on the drained node", used)
	}
	w.want()
}

// An eighth of a namespace's placement groups, and at least one, swap members at a time; one that cannot go on holds no other up.
func TestDrainsByParts(t *testing.T) {
	for nodes, atOnce := range map[int]int{3: 1, 15: 1, 16: 2} {
		w := newWorld(t)
		w.nodes(nodes, 8)
		x := w.open(w.create("n", 2, 1))
		w.drain(1) // it is in two placement groups
		if n := w.step(); n != atOnce {
			t.Fatalf("%d memory nodes: %d begin to swap members, want %d", nodes, n, atOnce)
		}
		w.publish()
		w.ack()
		if w.want(); atOnce == 2 {
			continue
		}
		w.l.Progress(w.claim(x).Id, 0, 1, "stuck", w.now)
		w.want("is to join: a member drains")
	}
}

// After a freeze the next placement group rests before it swaps members.
func TestRestsAfterFreeze(t *testing.T) {
	for freeze, rests := range map[time.Duration]time.Duration{0: 0, 5 * time.Millisecond: 1280 * time.Millisecond, time.Second / 2: restMost} {
		w := newWorld(t)
		w.nodes(3, 8)
		x := w.open(w.create("n", 2, 1))
		w.drain(2)
		w.want("group 1: memory node \"m3\" is to join")
		w.publish()
		w.ack()
		w.do(x, dirpb.JobKind_JOB_JOIN)
		w.ack()
		w.want("group 1: memory node \"m2\" leaves")
		w.on(1, dirpb.PGState_PG_FROZEN, 1, 3)
		w.want() // no session has quiesced
		w.now += freeze
		w.ack()
		w.do(x, dirpb.JobKind_JOB_RECOVER)
		w.ack()
		w.want("every session has quiesced")
		w.ack()
		thawed := w.now
		for len(w.plan()) == 0 && w.now < thawed+time.Minute {
			w.now += 5 * time.Millisecond
			w.beat()
			w.ack()
		}
		if took := w.now - thawed; took < rests || took > rests+10*time.Millisecond {
			t.Errorf("after a freeze of %v the next one rests %v, want %v", freeze, took, rests)
		}
	}
}

// settleJobs lets everyone acknowledge and every job be done until nothing more is due.
func (w *world) settleJobs(x uint32) {
	w.t.Helper()
	for range 1000 {
		w.publish()
		w.ack()
		j := w.claim(x)
		if j != nil {
			w.finish(x, j)
		}
		if w.step() == 0 && j == nil {
			return
		}
	}
	w.t.Fatalf("no end: %q", w.log[len(w.log)-20:])
}

// A drain that is taken back after the join leaves one member too many: the one on the
// memory node that is fullest goes, of a failure domain that has two if there is one.
func TestSurplus(t *testing.T) {
	for _, tc := range []struct {
		name   string
		domain [3]string
		room   [3]uint64
		gone   uint32
	}{
		{"fullest", [3]string{"a", "b", "c"}, [3]uint64{4, 8, 8}, 1},
		{"last of equals", [3]string{"a", "b", "c"}, [3]uint64{8, 8, 8}, 3},
		{"doubled domain", [3]string{"a", "b", "b"}, [3]uint64{4, 5, 8}, 2},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := newWorld(t)
			w.node("m1", tc.domain[0], tc.room[0])
			w.node("m2", tc.domain[1], tc.room[1])
			ns := w.create("n", 2, 1)
			// Of the two placement groups only the first is of concern.
			w.drain(1)
			w.drain(2)
			w.stay(1)
			w.node("m3", tc.domain[2], tc.room[2])
			x := w.open(ns)
			w.want(`group 1: memory node "m3" is to join: a member drains`)
			w.stay(2)
			w.publish()
			w.ack()
			w.do(x, dirpb.JobKind_JOB_JOIN)
			w.ack()
			w.want(fmt.Sprintf(`group 1: memory node "m%d" leaves: it has more members than it needs`, tc.gone))
			w.settleJobs(x)
			if pg := w.pg(1); len(pg.Members) != 2 || pg.State != dirpb.PGState_PG_ACTIVE {
				t.Fatalf("%v", pg)
			}
		})
	}
}

// With no room for the regions of a memory node that drains its shards migrate, one
// at a time, and the placement groups that hold nothing any more go away.
func TestEvacuate(t *testing.T) {
	w := newWorld(t)
	w.nodes(3, 1)
	ns := w.create("n", 1, 4) // shards 1 and 4 in placement group 1
	x := w.open(ns)
	w.grant(x, 2, 1000) // so 3 has the most room
	w.drain(1)
	w.want("groups [1 3]: JOB_MOVE begins: its memory node drains")
	w.want() // one at a time
	if j := w.claim(x); j.TargetPgId != 3 || j.ShardId != 1 {
		t.Fatalf("claimed %v", j)
	}
	w.finish(x, w.s.Jobs()[0])
	w.settleJobs(x)
	if w.pg(1) != nil || w.s.Node(1).UsedBytes != 0 {
		t.Fatalf("left over: %v on %v", w.pg(1), w.s.Node(1))
	}
	// Nowhere to go: a heap with too little room is no place.
	w.fill(x, 2)
	w.fill(x, 3)
	w.drain(3)
	w.want()
}

// Of a placement group that cannot be replaced whole, the empty shell gives a member up.
func TestEvacuateReplicated(t *testing.T) {
	w := newWorld(t)
	w.nodes(4, 2)
	ns := w.create("n", 2, 4)
	x := w.open(ns)
	w.drain(1) // of placement groups 1 and 4; no memory node has room
	w.settleJobs(x)
	for _, sh := range w.s.Shards(ns) {
		for _, m := range w.pg(sh.PgId).Members {
			if m.NodeId == 1 {
				t.Fatalf("shard %v is still on a node that drains", sh)
			}
		}
	}
	for _, pg := range w.s.PGs(ns) {
		if slices.ContainsFunc(pg.Members, func(m *dirpb.Member) bool { return m.NodeId == 1 }) {
			t.Fatalf("left over: %v", pg)
		}
	}
	// Such a shell, which has the most room, is no place for the shards of another memory node: they would have fewer copies there.
	w.grant(x, 3, 1000)
	w.drain(2)
	w.settleJobs(x)
	for _, sh := range w.s.Shards(ns) {
		if pg := w.pg(sh.PgId); sh.PgId == 2 || len(pg.Members) != 2 {
			t.Fatalf("shard %v is on %v", sh, pg.Members)
		}
	}
}

// A shard that is full, and has no room in its own index, is not split into a placement group with fewer copies.
func TestGrowKeepsCopies(t *testing.T) {
	w := newWorld(t)
	w.nodes(4, 2)
	ns := w.create("n", 2, 4)
	x := w.open(ns)
	w.drain(1)
	w.settleJobs(x)
	w.stay(1)
	for _, sh := range w.s.Shards(ns) {
		own := w.pg(sh.PgId)
		own.IndexBytes = w.s.Heap(own.Id).IndexNext
		if q, _, why := w.l.Grow(w.s, sh, w.now); q != nil && len(w.pg(q.TargetPgId).Members) < len(own.Members) {
			t.Errorf("shard %d goes from %v to %v (%s)", sh.Id, own.Members, w.pg(q.TargetPgId).Members, why)
		}
	}
}

// ---- memory ----------------------------------------------------------------

func TestFinishRecall(t *testing.T) {
	w := newWorld(t)
	w.nodes(1, 2)
	ns := w.create("n", 1, 1)
	x, slow := w.open(ns), w.open(ns)
	w.want()
	w.grant(x, 1, 1000)
	w.start(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_RECALL, PgId: 1, Extents: []uint32{0}})
	w.want()
	w.ack()
	w.do(x, dirpb.JobKind_JOB_RECALL)
	scanned := w.s.Heap(1).Recalls[0].Epoch
	w.quiet[slow] = true
	for range 3 {
		w.pass(lease / 4)
		w.beat()
		w.renew(x, 0, 0)
		w.l.Advance(w.s, w.now)
		w.want() // one session may be at it still
	}
	if e, least := w.l.Epochs(); e <= scanned || least > scanned {
		t.Fatalf("E %d, minimum %d, scanned in %d: the test proves nothing", e, least, scanned)
	}
	w.renew(slow, 0, 0)
	w.want("extent 0 is free")
	if got := w.pg(1).Recalled; len(got) != 0 {
		t.Fatalf("recalled %v", got)
	}
}

func TestScrub(t *testing.T) {
	w := newWorld(t)
	w.nodes(1, 2)
	ns := w.create("n", 1, 1)
	x := w.open(ns)
	dirty := func(units uint32) {
		t.Helper()
		y := w.open(ns)
		for units > 0 {
			for _, r := range w.grant(y, 1, min(units, layout.ExtentUnits/4)) {
				units -= r.Units
			}
		}
		w.leak(y)
	}
	w.wait(40 * time.Second)
	w.want() // clean
	dirty(100)
	w.want("JOB_SCRUB begins: " + ReasonDirty)
	if j := w.s.Jobs()[0]; j.Kind != dirpb.JobKind_JOB_SCRUB || j.Reason != ReasonDirty || !j.Count {
		t.Fatalf("began %v", j)
	}
	// A hundred units in one extent are not worth a recall.
	w.finish(x, w.claim(x), 0, 0, 0, 0)
	w.want()
	dirty(1000)
	w.wait(29 * time.Second)
	w.want() // not twice in half a minute
	w.wait(time.Second)
	w.want("JOB_SCRUB begins: " + ReasonDirty)
	w.finish(x, w.claim(x), 0, 0, 0, 0)
	w.want()
	// Of more than a twentieth it is known in seconds, but not before it was so for a while.
	dirty(layout.ExtentUnits - uint32(w.s.Heap(1).Watermark) + 1000) // the rest of the first extent, and into the second
	if lost := w.s.Usage()[0]; lost.GrantedUnits < lost.HeapUnits/20 {
		t.Fatalf("the test proves nothing: %v", lost)
	}
	w.passing(lostWindow-lease, 0)
	w.passing(3*lostWindow, 1)
	w.finish(x, w.claim(x), 0, 0, 0, 0)
	w.want("JOB_RECALL begins")
	w.want() // one at a time
	if j := w.s.Jobs()[0]; !slices.Equal(j.Extents, []uint32{0}) || j.InPlace {
		t.Fatalf("began %v", j)
	}
	w.ack()
	w.do(x, dirpb.JobKind_JOB_RECALL)
	w.want() // of the second extent less than an eighth leaked

	// An operator who asks for repair gets all of it, one who does not, nothing.
	w.wait(lease)
	w.want("extent 0 is free")
	w.start(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_SCRUB, PgId: 1, Reason: ReasonLook})
	w.finish(x, w.claim(x), 0, 0, 0, 0)
	w.want()
	w.start(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_SCRUB, PgId: 1, Reason: ReasonRepair, Repair: true})
	w.finish(x, w.claim(x), 0, 0, 0, 0)
	w.want("JOB_RECALL begins")
	if j := w.s.Jobs()[0]; !slices.Equal(j.Extents, []uint32{1}) {
		t.Fatalf("began %v", j)
	}

	// Without an interval nothing is scrubbed unasked.
	w.ack()
	w.do(x, dirpb.JobKind_JOB_RECALL)
	dirty(100)
	w.l.opts.ScrubInterval = 0
	w.wait(100 * time.Second)
	w.want("extent 1 is free")
	if !w.s.Heap(1).Dirty {
		t.Fatal("the test proves nothing")
	}
}

// ---- jobs ------------------------------------------------------------------

func TestClaim(t *testing.T) {
	w := newWorld(t)
	w.nodes(3, 8)
	ns, other := w.create("n", 2, 4), w.create("other", 1, 4)
	a, b, c := w.open(ns), w.open(ns), w.open(other)
	ro := w.apply(&fsmpb.Command{Op: &fsmpb.Command_OpenSession{OpenSession: &fsmpb.OpenSession{NamespaceId: ns, ReadOnly: true}}}).Session.Id
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
	w.apply(&fsmpb.Command{Op: &fsmpb.Command_PlanJoin{PlanJoin: &fsmpb.PlanJoin{PgId: 3, Epoch: w.pg(3).Epoch, NodeId: 2}}})
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
		w.apply(&fsmpb.Command{Op: &fsmpb.Command_EndJob{EndJob: &fsmpb.EndJob{SessionId: a, JobId: first, GiveBack: true}}})
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
	w.apply(&fsmpb.Command{Op: &fsmpb.Command_ExpireSessions{ExpireSessions: &fsmpb.ExpireSessions{SessionIds: []uint32{a}}}})
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
		"join":  {func(w *world) { w.node("m3", "d3", 8); w.drain(2) }, `group 1: memory node "m3" is to join`},
		"move":  {func(w *world) { w.drain(2) }, "JOB_MOVE begins: its memory node drains"},
		"asked": {func(w *world) { w.l.enqueue(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_SCRUB, PgId: 1, Reason: "asked"}) }, "JOB_SCRUB begins: asked"},
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
		if growing != g || !strings.Contains(y, why) || (q == nil) != (why != "") || q != nil && (q.TargetPgId != target || !q.Split || q.ShardId != sh.Id) {
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
		Namespace: &dirpb.CreateNamespaceRequest{Name: "n", Replicas: 1, BytesPerNode: region, Shards: 2, Segments: 1, IndexPercent: 50}}}}).Namespace.Id
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
				t.Fatalf("shard %d grows from %d to %d segments; its share is %d", sh.Id, sh.Segments, q.Segments, share)
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
	w.apply(&fsmpb.Command{Op: &fsmpb.Command_Rebalance{Rebalance: &fsmpb.Rebalance{NamespaceId: ns, To: dirpb.Rebalancing_REBALANCING_CANCELLED}}})
	w.settleJobs(x)
	if steps := w.l.Rebalance(w.s, ns, w.now); len(steps) == 0 || !strings.HasPrefix(steps[0], "replace") {
		t.Fatalf("left are %q, want all but the first", steps)
	}
}

// ---- everything at once ----------------------------------------------------

// chaos plays memory nodes, sessions and janitors that come, go, fall silent and lag, then
// lets them all be well, and wants the store idle and, if there is room enough, whole and
// off the node that drains.
func chaos(t *testing.T, seed uint64) []string {
	rng := rand.New(rand.NewPCG(seed, 1))
	w := newWorld(t)
	roomy := seed%2 == 0
	room := uint64(6)
	if roomy {
		room = 40
	}
	w.nodes(5, room)
	ns := w.create("n", 1+uint32(seed%3), 8)
	boots, passing := uint64(1), uint32(0) // the id of a namespace that comes and goes
	open := func() {
		if r := w.try(&fsmpb.Command{Op: &fsmpb.Command_OpenSession{OpenSession: &fsmpb.OpenSession{NamespaceId: ns}}}); r.Err == nil {
			if _, _, err := w.l.Opened(w.s, r.Session.Id, w.now); err != nil {
				t.Fatal(err)
			}
		}
	}
	open()
	live := func() (ids []uint32) {
		for _, x := range w.s.Sessions() {
			if x.Life == dirpb.SessionLife_SESSION_LIVE && !w.quiet[x.Id] {
				ids = append(ids, x.Id)
			}
		}
		return ids
	}
	well := false
	work := func(x uint32) {
		j := w.l.Claimable(w.s, x, w.now)
		if j == nil {
			return
		}
		if j.Owner != x {
			if r := w.try(&fsmpb.Command{Op: &fsmpb.Command_ClaimJob{ClaimJob: &fsmpb.ClaimJob{SessionId: x, JobId: j.Id}}}); r.Err != nil {
				return
			}
		}
		kind := rng.IntN(6)
		if well {
			kind = 2
		}
		switch kind {
		case 0:
			w.l.Progress(j.Id, 1, 2, "", w.now)
		case 1:
			w.l.Progress(j.Id, 1, 2, "trouble", w.now)
			w.apply(&fsmpb.Command{Op: &fsmpb.Command_EndJob{EndJob: &fsmpb.EndJob{SessionId: x, JobId: j.Id, GiveBack: true}}})
		default:
			w.finish(x, j, 0, 0, 0, 0)
		}
	}
	for range 400 {
		w.pass(time.Duration(rng.IntN(100)) * time.Millisecond)
		node := 1 + uint32(rng.IntN(5))
		switch rng.IntN(27) {
		case 0:
			w.mute[node] = true
		case 1, 2:
			n := w.s.Node(node)
			w.mute[node] = false
			if n.State == dirpb.NodeState_NODE_DOWN || rng.IntN(4) == 0 {
				boots++
				w.boot(n.Name, n.Domain, room, boots)
			}
		case 3:
			w.drain(node)
		case 4:
			w.stay(node)
		case 5:
			open()
		case 6:
			if ids := live(); len(ids) > 1 {
				w.quiet[ids[rng.IntN(len(ids))]] = true
			}
		case 7:
			if ids := live(); len(ids) > 0 {
				x := ids[rng.IntN(len(ids))]
				for _, pg := range w.s.PGs(ns) {
					w.try(&fsmpb.Command{Op: &fsmpb.Command_GrantExtent{GrantExtent: &fsmpb.GrantExtent{
						SessionId: x, PgId: pg.Id, WantUnits: 50_000, PlaceUnits: 1}}})
					w.try(&fsmpb.Command{Op: &fsmpb.Command_GrantStatus{GrantStatus: &fsmpb.GrantStatus{SessionId: x, PgId: pg.Id}}})
				}
			}
		case 8:
			w.try(&fsmpb.Command{Op: &fsmpb.Command_Rebalance{Rebalance: &fsmpb.Rebalance{NamespaceId: ns, To: dirpb.Rebalancing_REBALANCING_ON}}})
		case 9:
			shards := w.s.Shards(ns)
			if q, _, _ := w.l.Grow(w.s, shards[rng.IntN(len(shards))], w.now); q != nil {
				w.start(q)
			}
		case 10:
			if rng.IntN(4) == 0 {
				w.elect()
			}
		case 11, 12, 13:
			w.publish()
		case 14, 15:
			w.fence()
		case 24:
			w.replicas("n", 1+uint32(rng.IntN(3)))
		case 25:
			if r := w.try(&fsmpb.Command{Op: &fsmpb.Command_CreateNamespace{CreateNamespace: &fsmpb.CreateNamespace{
				Namespace: &dirpb.CreateNamespaceRequest{Name: "m", Replicas: 1, BytesPerNode: region, Shards: 8},
			}}}); r.Err == nil {
				passing = r.Namespace.Id
			}
			if passing != 0 {
				w.try(&fsmpb.Command{Op: &fsmpb.Command_OpenSession{OpenSession: &fsmpb.OpenSession{NamespaceId: passing}}})
			}
		case 26:
			w.remove("m")
		case 16, 17, 18:
			if ids := live(); len(ids) > 0 {
				work(ids[rng.IntN(len(ids))])
			}
		default:
			if ids := live(); len(ids) > 0 {
				x := ids[rng.IntN(len(ids))]
				v := w.s.MapVersion()
				e, _ := w.l.Epochs()
				// It may have run out; then the next plan fences it.
				_, _ = w.tell(Renewal{Session: x, Report: e, Acked: v - min(v, uint64(rng.IntN(3))), Quiesced: v})
			}
		}
		w.beat()
		w.step()
	}

	well = true
	w.remove("m")
	clear(w.mute)
	clear(w.quiet)
	for _, n := range w.s.Nodes() {
		if n.State == dirpb.NodeState_NODE_DOWN {
			boots++
			w.boot(n.Name, n.Domain, room, boots)
		}
		if n.Id > 1 {
			w.stay(n.Id)
		}
	}
	w.l.opts.ScrubInterval = 0
	w.drain(1)
	w.returnWords()
	dead := func() bool {
		return slices.ContainsFunc(w.s.PGs(ns), func(pg *dirpb.PlacementGroup) bool { return len(w.s.Heap(pg.Id).StatusDead) > 0 })
	}
	calm := 0 // rounds in which nothing happened
	for i := 0; calm < 3; i++ {
		if i == 10_000 {
			t.Fatalf("seed %d: no end: jobs %v, groups %v, lately\n%s", seed, w.l.Jobs(w.s, w.now), w.s.PGs(ns), strings.Join(w.log[max(0, len(w.log)-10):], "\n"))
		}
		w.pass(10 * time.Millisecond)
		w.beat()
		w.publish()
		w.fence()
		if len(live()) == 0 {
			open()
		}
		for _, x := range live() {
			v := w.s.MapVersion()
			e, _ := w.l.Epochs()
			_, _ = w.tell(Renewal{Session: x, Report: e, Acked: v, Quiesced: v})
		}
		for _, x := range live() {
			work(x)
		}
		recalling := slices.ContainsFunc(w.s.PGs(ns), func(pg *dirpb.PlacementGroup) bool { return len(pg.Recalled) > 0 })
		if w.step() == 0 && len(w.s.Jobs()) == 0 && !recalling && !dead() && w.now > 2*lease && len(w.l.paused) == 0 && len(w.l.rests) == 0 &&
			!slices.ContainsFunc(w.s.PGs(ns), func(pg *dirpb.PlacementGroup) bool { return pg.Planned != nil || pg.State != dirpb.PGState_PG_ACTIVE }) {
			calm++
		} else {
			calm = 0
		}
	}
	if len(w.s.PGs(0)) != len(w.s.PGs(ns)) {
		t.Fatalf("seed %d: in the end %v", seed, w.s.PGs(0))
	}
	for _, pg := range w.s.PGs(ns) {
		if !roomy {
			continue
		}
		if len(pg.Members) != int(w.s.Namespace(ns).Replicas) || pg.State != dirpb.PGState_PG_ACTIVE || pg.Joining {
			t.Fatalf("seed %d: in the end %v", seed, pg)
		}
		for _, m := range pg.Members {
			if m.NodeId == 1 {
				t.Fatalf("seed %d: left on the node that drains: %v", seed, pg)
			}
		}
	}
	return w.log
}

func TestChaos(t *testing.T) {
	for seed := range uint64(200) {
		log := chaos(t, seed)
		if seed < 5 && !slices.Equal(log, chaos(t, seed)) {
			t.Fatalf("seed %d: the same calls gave other answers", seed)
		}
	}
}

// TestStandstill: a leader that did not run for a while blames nobody for it.
func TestStandstill(t *testing.T) {
	w := newWorld(t)
	w.nodes(2, 4)
	w.now += 20 * lease
	for _, s := range w.l.Plan(w.s, w.now) {
		if s.Do.GetNodeDown() != nil || s.Do.GetExpireSessions() != nil {
			t.Fatalf("after a standstill: %s", s.Why)
		}
	}
	w.pass(lease + 1)
	down := 0
	for _, s := range w.l.Plan(w.s, w.now) {
		if s.Do.GetNodeDown() != nil {
			down++
		}
	}
	if down != 2 {
		t.Fatalf("%d memory nodes are down a lease later, want 2", down)
	}
}

// TestLastCopiesTogether: two memory nodes that fall silent together are not both
// declared lost at once while one of them holds the last copy.
func TestLastCopiesTogether(t *testing.T) {
	w := newWorld(t)
	w.nodes(2, 4)
	w.create("twice", 2, 2)
	w.publish()
	downs := func() (n int) {
		for _, s := range w.l.Plan(w.s, w.now) {
			if s.Do.GetNodeDown() != nil {
				n++
			}
		}
		return n
	}
	w.pass(lease + 1)
	if n := downs(); n != 1 {
		t.Fatalf("%d memory nodes are down after a lease, want 1", n)
	}
	w.step()
	w.pass(5 * lease)
	if n := downs(); n != 0 {
		t.Fatalf("%d more are down after six leases, want none", n)
	}
	w.pass(5 * lease)
	if n := downs(); n != 1 {
		t.Fatalf("%d are down after eleven leases, want the last copy's", n)
	}
}
