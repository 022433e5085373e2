package lead

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
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
	Lease: lease, LastCopyLeases: 10, EpochInterval: 100 * time.Millisecond, EpochBlock: 600,
	ScrubInterval: 30 * time.Second,
}

func newWorld(t *testing.T) *world {
	w := &world{t: t, s: fsm.New(), mute: make(map[uint32]bool), quiet: make(map[uint32]bool),
		numbers: make(map[uint32]uint64)}
	w.elect()
	return w
}

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
	r := w.apply(&fsmpb.Command{
		Op: &fsmpb.Command_RegisterNode{RegisterNode: &fsmpb.RegisterNode{Node: &dirpb.RegisterNodeRequest{
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
	q := &dirpb.CreateNamespaceRequest{Name: name, Replicas: replicas, BytesPerNode: uint64(replicas) * region,
		Shards: shards}
	if n := len(w.s.Nodes()); n > fsm.FirstNodes {
		q.Nodes = uint32(n)
	}
	r := w.apply(&fsmpb.Command{
		Op: &fsmpb.Command_CreateNamespace{CreateNamespace: &fsmpb.CreateNamespace{Namespace: q}}})
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
					NodeId: n.Id, Incarnation: n.Incarnation, Boot: n.Boot, PgId: want.PgId, Keys: []*dirpb.RegionKeys{
						{Provider: "tcp", IndexRkey: 1}},
				}}})
			}
		}
	}
}

func (w *world) open(ns uint32) uint32 {
	w.t.Helper()
	epoch, _ := w.l.Epochs()
	r := w.apply(&fsmpb.Command{
		Op: &fsmpb.Command_OpenSession{OpenSession: &fsmpb.OpenSession{NamespaceId: ns, Epoch: epoch}}})
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
		w.apply(&fsmpb.Command{
			Op: &fsmpb.Command_Rebalance{
				Rebalance: &fsmpb.Rebalance{NamespaceId: ns, To: dirpb.Rebalancing_REBALANCING_ON}}})
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
	w.apply(&fsmpb.Command{
		Op: &fsmpb.Command_NodeDown{NodeDown: &fsmpb.NodeDown{NodeId: node, Incarnation: w.s.Node(node).Incarnation}}})
}

// grant gives a session so many units, or fewer, and tells which.
func (w *world) grant(x, pg, units uint32) []*dirpb.ReturnedRun {
	w.t.Helper()
	r := w.apply(&fsmpb.Command{
		Op: &fsmpb.Command_GrantExtent{
			GrantExtent: &fsmpb.GrantExtent{SessionId: x, PgId: pg, WantUnits: units, PlaceUnits: 1}}})
	if len(r.Grant.Runs) == 0 {
		w.t.Fatalf("nothing granted of placement group %d", pg)
	}
	return r.Grant.Runs
}

// fill gives a session all that is granted of a placement group, and tells how much.
func (w *world) fill(x, pg uint32) (units uint64) {
	w.t.Helper()
	for {
		r := w.apply(&fsmpb.Command{
			Op: &fsmpb.Command_GrantExtent{
				GrantExtent: &fsmpb.GrantExtent{SessionId: x, PgId: pg, WantUnits: 1 << 31}}})
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
	w.apply(&fsmpb.Command{
		Op: &fsmpb.Command_CloseSession{CloseSession: &fsmpb.CloseSession{SessionId: x, Leaked: true}}})
	w.l.Closed(w.s, w.now, x)
}
