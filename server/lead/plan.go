package lead

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"math/bits"
	"slices"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/invariants"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// Reasons of scrubs, part of the job. They tell what follows the scrub; see
// [Leader.Scrubbed].
const (
	ReasonDirty  = "sessions ended uncleanly"
	ReasonLost   = "memory is lost, by estimate"
	ReasonShort  = "memory is short"
	ReasonTerm   = "another directory node leads"
	ReasonRepair = "an operator asked for a scrub and repair"
	ReasonLook   = "an operator asked for a scrub"
)

// reasonBalance of a move says that it is part of a rebalance.
const reasonBalance = "an operator asked for balance"

// Step is a command that is due, and why, for the log.
type Step struct {
	Do  *fsmpb.Command
	Why string

	asked    bool // out of the queue
	balances bool // a join that is part of a rebalance
}

// plan collects steps against one view. They are all judged by the same state, so no two
// voluntary ones concern one placement group.
type plan struct {
	*view
	steps []Step
	taken map[uint32]bool   // placement groups that a step changes
	given map[uint32]uint64 // bytes that steps take, by memory node
	joins map[uint32]uint32 // memory nodes that steps have join, by placement group
}

func (l *Leader) plan(s *fsm.State, now time.Duration) *plan {
	return &plan{view: l.newView(s, now), taken: make(map[uint32]bool), given: make(map[uint32]uint64), joins: make(map[uint32]uint32)}
}

// Plan gives the commands that time and state have brought about, in the order in which
// they should be proposed. A command that fails, or is not proposed, is given again by a later call; tell
// Refused of each that the state machine refused.
//
// In this order:
//
//   - the next block of reclaim epochs;
//   - pauses of memory nodes that are over;
//   - memory nodes and sessions whose leases ran out;
//   - the end of a freeze, when every session quiesced and no survivor has to be synced;
//   - recalled extents that are scanned, when a reclaim epoch has passed;
//   - a placement group that holds nothing and waits for memory nodes that are down or
//     forgotten gets others;
//   - memory nodes that said goodbye leave their placement groups;
//   - members: a placement group with too few, or with one on a memory node that drains, gets a joiner if
//     there is room. A placement group with more than it needs loses one, best one that drains;
//   - if a memory node drains and its region has nowhere to go, the shards migrate, one
//     at a time, to placement groups that stay;
//   - placement groups that may have intents of sessions that have ended are gone through;
//   - jobs that were asked for and had to wait;
//   - rebalancing, one change of a namespace at a time, or its end;
//   - the rebalancing of a namespace on some memory nodes, which is nearly full, over more;
//   - moves from placement groups that fill up to emptier ones;
//   - if memory is lost, or short: a count of what is linked. Scrubbed queues the jobs that follow it.
//
// A change of a placement group is voluntary from the item members on. It waits until the group is active,
// whole, without a job, and every session acknowledged its last change.
func (l *Leader) Plan(s *fsm.State, now time.Duration) []Step {
	if invariants.On {
		defer l.check(s)
	}
	l.awake(now)
	l.Signs(s) // a memory node that is down holds nobody up
	l.noteLeaving(s, now)
	l.notePauses(s, now)
	p := l.plan(s, now)
	p.reserve()
	p.resume()
	p.expireNodes()
	p.expireSessions()
	for _, pg := range p.pgs {
		p.thaw(pg)
		p.finishRecalls(pg)
	}
	p.forget()
	p.noteWorkedPGs()
	p.noteFreezes()
	for _, pg := range p.pgs {
		p.remake(pg)
		p.part(pg)
		p.members(pg)
	}
	p.settleOrphans()
	p.asked()
	for _, ns := range s.Rebalancing() {
		p.level(ns)
	}
	p.account()
	p.ease()
	for _, pg := range p.pgs {
		p.reclaim(pg)
	}
	return p.steps
}

// awake gives everyone the time that this leader itself stood still: what they said
// meanwhile may wait to be heard.
func (l *Leader) awake(now time.Duration) {
	gap := now - l.planned
	l.planned = now
	if gap <= l.opts.Lease/2 {
		return
	}
	for _, n := range l.nodes {
		n.expires += gap
		n.paused += gap
	}
	for x := l.leases.first; x != nil; x = x.behind {
		x.expires = min(x.expires+gap, now+l.opts.Lease)
	}
}

func (p *plan) add(c *fsmpb.Command, format string, args ...any) {
	p.steps = append(p.steps, Step{Do: c, Why: fmt.Sprintf(format, args...)})
}

// ---- leases and reclaim epochs ---------------------------------------------

func (p *plan) reserve() {
	if p.l.epoch+p.l.opts.EpochBlock/2 > p.s.Meta().EpochCeiling && p.l.needsEpochs(p.s) {
		ceiling := p.l.epoch + p.l.opts.EpochBlock
		p.add(&fsmpb.Command{Op: &fsmpb.Command_ReserveEpoch{ReserveEpoch: &fsmpb.ReserveEpoch{Ceiling: ceiling}}},
			"reclaim epochs up to %d", ceiling)
	}
}

func (p *plan) expireSessions() {
	l := p.l
	slices.Sort(l.changed)
	changed := slices.Compact(l.changed)
	l.changed = nil
	for _, id := range changed {
		if x := p.s.Session(id); x != nil && l.sessions.of(id) == nil {
			// Opened, but not answered yet, perhaps never.
			l.enterSession(p.s, newSession(x, l.epoch), p.now)
		}
	}
	for _, id := range changed {
		if p.s.Session(id) == nil {
			l.ended(p.s, id)
		}
	}
	var ids []uint32
	for x := range l.lapsed(p.now) {
		if p.s.Life(x.id) != dirpb.SessionLife_SESSION_LIVE {
			l.leases.remove(x) // it is being fenced
			continue
		}
		x.expired = true
		ids = append(ids, x.id)
	}
	if slices.Sort(ids); len(ids) > 0 {
		p.add(&fsmpb.Command{Op: &fsmpb.Command_ExpireSessions{ExpireSessions: &fsmpb.ExpireSessions{SessionIds: ids}}},
			"fencing sessions %d: their leases ran out", ids)
	}
}

// ---- what follows by itself ------------------------------------------------

func (p *plan) thaw(pg *dirpb.PlacementGroup) {
	v := p.s.FrozenVersion(pg.Id)
	if pg.State != dirpb.PGState_PG_FROZEN || v == 0 || p.floorOf(pg).quiesced < v {
		return
	}
	if slices.ContainsFunc(p.jobs[pg.Id], func(j *dirpb.Job) bool {
		return j.Kind == dirpb.JobKind_JOB_RECOVER && j.PgId == pg.Id
	}) {
		return
	}
	p.add(&fsmpb.Command{Op: &fsmpb.Command_ActivatePg{ActivatePg: &fsmpb.ActivatePG{PgId: pg.Id, Epoch: pg.Epoch, ReclaimEpoch: p.l.epoch}}},
		"placement group %d: every session has quiesced", pg.Id)
}

// finishRecalls frees extents of pg that were scanned before every session's report.
func (p *plan) finishRecalls(pg *dirpb.PlacementGroup) {
	epoch, least := p.l.Epochs()
	for _, x := range p.s.Heap(pg.Id).GetRecalls() {
		if x.Scanned {
			p.l.await(x.Epoch)
		}
		if x.Scanned && least > x.Epoch {
			p.l.accounted = 0
			p.add(&fsmpb.Command{Op: &fsmpb.Command_FinishRecall{FinishRecall: &fsmpb.FinishRecall{
				PgId: pg.Id, Extent: x.Extent, Epoch: epoch, MinEpoch: least,
			}}}, "placement group %d: extent %d is free", pg.Id, x.Extent)
		}
	}
}

// forget drops notes about what is gone.
func (p *plan) forget() {
	for id := range p.l.jobs {
		if p.s.Job(id) == nil {
			delete(p.l.jobs, id)
		}
	}
	for id, until := range p.l.paused {
		if p.now >= until {
			delete(p.l.paused, id)
		}
	}
	maps.DeleteFunc(p.l.spent, func(id uint32, _ bool) bool {
		return p.s.Namespace(id).GetRebalancing() != dirpb.Rebalancing_REBALANCING_ON
	})
	maps.DeleteFunc(p.l.extended, func(id uint32, at time.Duration) bool { return p.now >= at+extendEvery })
	gone := func(id uint32) bool { return p.s.PG(id) == nil }
	maps.DeleteFunc(p.l.frozen, func(id uint32, _ time.Duration) bool { return gone(id) })
	maps.DeleteFunc(p.l.rests, func(_ uint32, until time.Duration) bool { return p.now >= until })
	maps.DeleteFunc(p.l.worked, func(id uint32, _ time.Duration) bool { return gone(id) })
	maps.DeleteFunc(p.l.settling, func(id uint32, at time.Duration) bool { return gone(id) || p.now >= at+p.l.pause(0) })
	maps.DeleteFunc(p.l.took, func(id uint32, _ took) bool { return gone(id) })
	p.l.forgetTroubles(p.s, p.now)
	p.l.forgetRivals(p.s, p.now)
}

// ---- voluntary changes -----------------------------------------------------

// free reports whether a voluntary change of pg may begin: none does before a member that is
// about to stop has left.
func (p *plan) free(pg *dirpb.PlacementGroup) bool {
	return !p.taken[pg.Id] && p.l.paused[pg.Id] == 0 && p.busy(pg) == "" && !slices.ContainsFunc(pg.Members, p.stops)
}

// remake gives pg other members if it holds nothing, or may be empty, and all it waits for is down or silent: its memory
// nodes died while it was made, were removed, or have all copies of a cache. If no other memory node has room it waits: nothing would be gained.
// A placement group that is lost waits for its memory node,
// whose operator may be about to start it again, until that is removed.
func (p *plan) remake(pg *dirpb.PlacementGroup) {
	waits := pg.State == dirpb.PGState_PG_CREATING || pg.State == dirpb.PGState_PG_LOST && len(pg.Members) == 0
	spares := pg.State == dirpb.PGState_PG_ACTIVE || pg.State == dirpb.PGState_PG_FROZEN
	if !waits && !(spares && p.s.Spares(pg.Id)) || p.taken[pg.Id] || p.l.paused[pg.Id] != 0 {
		return
	}
	heard := func(m *dirpb.Member) bool {
		n := p.s.Node(m.NodeId)
		return n.GetState() == dirpb.NodeState_NODE_UP && !(n.Silent && p.l.Silent(n, p.now))
	}
	if slices.ContainsFunc(fsm.Copies(pg), heard) {
		return
	}
	chain := p.chain(nil, pg.RegionBytes, p.s.Namespace(pg.NamespaceId).GetReplicas())
	if len(chain) == 0 {
		return
	}
	p.taken[pg.Id] = true
	for _, id := range chain {
		p.given[id] += pg.RegionBytes
	}
	p.add(&fsmpb.Command{Op: &fsmpb.Command_RemakePg{RemakePg: &fsmpb.RemakePG{PgId: pg.Id, Epoch: pg.Epoch, NodeIds: chain}}},
		"placement group %d: it is made anew on memory nodes %s, since no member is heard", pg.Id, p.nodeNames(chain))
}

// chain goes on with the chain that first begins, which may be none, to as many memory nodes
// as there are with room for a region each, at most want: best in failure domains of their own.
func (p *plan) chain(first *dirpb.Node, region uint64, want uint32) []uint32 {
	var chain []uint32
	has, domains := make(map[uint32]bool), make(map[string]bool)
	for next := first; uint32(len(chain)) < want; next = nil {
		if next == nil {
			next = p.roomiest(region, domains, has)
		}
		if next == nil {
			break
		}
		chain = append(chain, next.Id)
		has[next.Id], domains[next.Domain] = true, true
	}
	return chain
}

func (p *plan) members(pg *dirpb.PlacementGroup) {
	want := int(p.s.Namespace(pg.NamespaceId).GetReplicas())
	drains := p.draining(pg)
	if len(pg.Members) == want && !drains || !p.free(pg) {
		return
	}
	if len(pg.Members) > want {
		p.dropSurplus(pg)
		return
	}
	if len(pg.Members) == want && !p.maySwap(pg.NamespaceId) {
		return
	}
	n, retain := p.former(pg), true
	if n == nil && len(pg.Members) == want-1 && p.expected() {
		return
	}
	if n == nil {
		n, retain = p.candidate(pg), false
	}
	if n != nil {
		p.taken[pg.Id] = true
		p.given[n.Id] += pg.RegionBytes
		p.joins[pg.Id] = n.Id
		why := fmt.Sprintf("it has %d members of %d", len(pg.Members), want)
		if len(pg.Members) == want {
			why = "a member drains"
		}
		if retain {
			why += "; it has been one, and has what it held"
		}
		p.add(&fsmpb.Command{Op: &fsmpb.Command_PlanJoin{PlanJoin: &fsmpb.PlanJoin{PgId: pg.Id, Epoch: pg.Epoch, NodeId: n.Id, Retain: retain, ReclaimEpoch: p.l.epoch}}},
			"placement group %d: memory node %q is to join: %s", pg.Id, n.Name, why)
		return
	}
	if drains {
		p.evacuate(pg)
	}
}

// former is a memory node that has been a member of pg and has what it held, not long ago, or nil: that spares copying what has not changed.
func (p *plan) former(pg *dirpb.PlacementGroup) *dirpb.Node {
	for _, n := range p.s.Nodes() {
		if p.usable(n, pg.RegionBytes) && p.s.Retains(pg.Id, n.Id, p.l.epoch) &&
			!slices.ContainsFunc(pg.Members, func(m *dirpb.Member) bool { return m.NodeId == n.Id }) {
			return n
		}
	}
	return nil
}

// candidate is the memory node that pg should get a region on, or nil: best one in a
// failure domain of its own, then the one that is least full; but another one if that
// would take the only place from another placement group of the namespace.
func (p *plan) candidate(pg *dirpb.PlacementGroup) *dirpb.Node {
	taken := make(map[string]bool) // domains of members that stay
	has := make(map[uint32]bool)
	for _, m := range pg.Members {
		has[m.NodeId] = true
		if n := p.s.Node(m.NodeId); n != nil && !n.Draining {
			taken[n.Domain] = true
		}
	}
	n := p.roomiest(pg.RegionBytes, taken, has)
	if n == nil {
		return nil
	}
	where := p.spread(pg.NamespaceId)
	p.given[n.Id] += pg.RegionBytes
	p.joins[pg.Id] = n.Id
	with := p.spread(pg.NamespaceId)
	p.given[n.Id] -= pg.RegionBytes
	delete(p.joins, pg.Id)
	if with.Places()+1 >= where.Places() || len(where.Where[pg.Id]) == 0 {
		return n
	}
	return p.s.Node(where.Where[pg.Id][0])
}

// spread is where a namespace's copies can go that are lacking.
func (p *plan) spread(ns uint32) *fsm.Spread {
	return p.s.Spread(ns, int(p.s.Namespace(ns).GetReplicas()), fsm.SpreadOptions{
		Usable: func(n *dirpb.Node) bool { return p.usable(n, 0) }, Given: p.given, Joins: p.joins,
	})
}

// roomiest is the memory node for a region of so many bytes, or nil: up, heard of, not
// draining, with room, not in has; best in no domain of taken, then least used, then of
// the lowest id.
func (p *plan) roomiest(region uint64, taken map[string]bool, has map[uint32]bool) *dirpb.Node {
	var best *dirpb.Node
	for _, n := range p.s.Nodes() {
		if has[n.Id] || !p.usable(n, region) {
			continue
		}
		if best == nil || p.better(n, best, taken) {
			best = n
		}
	}
	return best
}

func (p *plan) better(a, b *dirpb.Node, taken map[string]bool) bool {
	if taken[a.Domain] != taken[b.Domain] {
		return !taken[a.Domain]
	}
	return p.fuller(b, a) > 0
}

// usable reports whether n can be given a region.
func (p *plan) usable(n *dirpb.Node, region uint64) bool {
	lease := p.l.nodes[n.Id]
	used := n.UsedBytes + p.given[n.Id]
	return n.State == dirpb.NodeState_NODE_UP && !n.Draining && lease != nil && !n.Leaving && !n.Silent && p.now <= lease.expires &&
		n.CapacityBytes >= used && n.CapacityBytes-used >= region
}

// fuller compares the used shares of two memory nodes, exactly.
func (p *plan) fuller(a, b *dirpb.Node) int { return fullerBy(a, p.used(a), b, p.used(b)) }

func (p *plan) used(n *dirpb.Node) uint64 { return n.UsedBytes + p.given[n.Id] }

// fullerBy compares the shares that two memory nodes have in use if that is so many bytes.
func fullerBy(a *dirpb.Node, usedA uint64, b *dirpb.Node, usedB uint64) int {
	ahi, alo := bits.Mul64(usedA, max(b.CapacityBytes, 1))
	bhi, blo := bits.Mul64(usedB, max(a.CapacityBytes, 1))
	return cmp.Or(cmp.Compare(ahi, bhi), cmp.Compare(alo, blo))
}

// surplus is the member that a chain gives up: one that drains, else one whose failure domain
// another member is in, else the one on the fullest memory node; of equals the last,
// which is the least change for writers. A nil member is none.
func surplus(chain []*dirpb.Node, used func(*dirpb.Node) uint64) (out *dirpb.Node) {
	domains := make(map[string]int)
	for _, n := range chain {
		domains[n.GetDomain()]++
	}
	rank := func(n *dirpb.Node) int {
		switch {
		case n.Draining:
			return 2
		case domains[n.Domain] > 1:
			return 1
		}
		return 0
	}
	for _, n := range chain {
		if n != nil && (out == nil || cmp.Or(cmp.Compare(rank(n), rank(out)), fullerBy(n, used(n), out, used(out))) >= 0) {
			out = n
		}
	}
	return out
}

// dropSurplus takes the member out of pg that surplus names.
func (p *plan) dropSurplus(pg *dirpb.PlacementGroup) {
	chain := make([]*dirpb.Node, len(pg.Members))
	for i, m := range pg.Members {
		chain[i] = p.s.Node(m.NodeId)
	}
	out := surplus(chain, p.used)
	if out == nil || len(pg.Members) < 2 {
		return
	}
	p.taken[pg.Id] = true
	why := "it has more members than it needs"
	if out.Draining {
		why = "it drains"
	}
	p.add(&fsmpb.Command{Op: &fsmpb.Command_StartLeave{StartLeave: &fsmpb.StartLeave{PgId: pg.Id, Epoch: pg.Epoch, NodeId: out.Id, ReclaimEpoch: p.l.epoch}}},
		"placement group %d: memory node %q leaves: %s", pg.Id, out.Name, why)
}

// evacuate moves a shard of pg, whose member has nowhere to go, to a placement group that
// stays and has as many copies. A placement group that holds nothing any more gives the member up without a replacement.
func (p *plan) evacuate(pg *dirpb.PlacementGroup) {
	var own []*dirpb.Shard
	for _, sh := range p.shards(pg.NamespaceId) {
		if sh.PgId == pg.Id {
			own = append(own, sh)
		}
	}
	if len(own) == 0 {
		if len(pg.Members) > 1 && !slices.ContainsFunc(pg.Members, func(m *dirpb.Member) bool { return !p.leaves(m) }) {
			return // it goes altogether
		}
		if len(pg.Members) > 1 {
			p.dropSurplus(pg)
		}
		return
	}
	sh := own[0]
	need := p.usage(pg.Id).GetGrantedUnits() / uint64(len(own))
	var best *dirpb.PlacementGroup
	for _, to := range p.pgs {
		if to.Id == pg.Id || to.NamespaceId != pg.NamespaceId || p.draining(to) || !p.free(to) || len(to.Members) < len(pg.Members) ||
			p.heapRoom(to.Id) < need || !fits(p.s.Heap(to.Id), to, sh.Segments) {
			continue
		}
		if best == nil || p.heapRoom(to.Id) > p.heapRoom(best.Id) {
			best = to
		}
	}
	if best != nil {
		p.start(&fsmpb.StartJob{
			Kind: dirpb.JobKind_JOB_MOVE, ShardId: sh.Id, TargetPgId: best.Id, Reason: "its memory node drains",
		}, pg.Id, best.Id)
	}
}

// start begins a job that occupies pgs.
func (p *plan) start(q *fsmpb.StartJob, pgs ...uint32) {
	for _, id := range pgs {
		p.taken[id] = true
		if q.Kind == dirpb.JobKind_JOB_SCRUB {
			p.l.countBegins(p.s, id)
		}
	}
	p.add(&fsmpb.Command{Op: &fsmpb.Command_StartJob{StartJob: q}}, "placement groups %d: %s begins: %s", pgs, q.Kind, q.Reason)
}

// Busy says why q may not begin now, "" if it may. Its placement groups are to be active, whole, without a
// job and without a change under way. Every session is to have acknowledged their last one.
func (l *Leader) Busy(s *fsm.State, q *fsmpb.StartJob, now time.Duration) string {
	if x, ok := unmovable(s, q); ok {
		return fmt.Sprintf("placement group %d has no room for what extent %d holds", q.PgId, x)
	}
	v := l.newView(s, now)
	for _, id := range v.occupies(q) {
		pg := s.PG(id)
		if pg == nil {
			return fmt.Sprintf("placement group %d does not exist", id)
		}
		if why := v.busy(pg); why != "" {
			return fmt.Sprintf("placement group %d %s", id, why)
		}
	}
	return ""
}

// Offer returns those of jobs that may all begin now; Plan leaves their placement groups
// alone for a moment. The others are kept, and Plan begins them as their placement groups
// become free; the next leader does not know of them.
func (l *Leader) Offer(s *fsm.State, jobs []*fsmpb.StartJob, now time.Duration) []*fsmpb.StartJob {
	p := l.plan(s, now)
	var ready []*fsmpb.StartJob
	for _, q := range jobs {
		pgs := p.occupies(q)
		if slices.ContainsFunc(pgs, func(id uint32) bool { return s.PG(id) == nil || p.taken[id] || p.busy(s.PG(id)) != "" }) {
			l.enqueue(q)
			continue
		}
		for _, id := range pgs {
			p.taken[id] = true
			l.paused[id] = l.pause(now)
		}
		ready = append(ready, q)
	}
	return ready
}

// unmovable is an extent that q wants emptied and whose records have nowhere to go.
func unmovable(s *fsm.State, q *fsmpb.StartJob) (extent uint32, ok bool) {
	if q.Kind != dirpb.JobKind_JOB_RECALL || q.InPlace {
		return 0, false
	}
	for _, x := range q.Extents {
		if !s.CanRecall(q.PgId, x) {
			return x, true
		}
	}
	return 0, false
}

func (l *Leader) enqueue(q *fsmpb.StartJob) {
	if !slices.ContainsFunc(l.queue, func(o *fsmpb.StartJob) bool {
		return o.Kind == q.Kind && o.PgId == q.PgId && o.ShardId == q.ShardId && o.TargetPgId == q.TargetPgId && slices.Equal(o.Extents, q.Extents)
	}) {
		l.queue = append(l.queue, q)
	}
}

// occupies are the placement groups that q needs; of a move of a shard that is gone, 0.
func (v *view) occupies(q *fsmpb.StartJob) []uint32 {
	if q.Kind == dirpb.JobKind_JOB_MOVE {
		return places(v.s.Shard(q.ShardId).GetPgId(), q.TargetPgId)
	}
	return places(q.PgId, 0)
}

// asked begins what was queued and may begin now, and drops what has no object any more.
func (p *plan) asked() {
	p.l.queue = slices.DeleteFunc(p.l.queue, func(q *fsmpb.StartJob) bool {
		if _, stuck := unmovable(p.s, q); stuck || q.Kind == dirpb.JobKind_JOB_MOVE && p.s.Shard(q.ShardId).GetMove() != nil {
			return true
		}
		pgs := p.occupies(q)
		for _, id := range pgs {
			pg := p.s.PG(id)
			if pg == nil || pg.State == dirpb.PGState_PG_LOST || q.Kind == dirpb.JobKind_JOB_RECALL && p.outlived(pg, q.Extents) {
				return true
			}
			if !p.free(pg) {
				return false
			}
		}
		if sh := p.s.Shard(q.ShardId); (q.Split || q.Segments != 0) && q.TargetPgId == 0 &&
			(!fits(p.s.Heap(sh.PgId), p.s.PG(sh.PgId), max(q.Segments, sh.Segments)) ||
				p.s.CheckIndexQuota(sh.NamespaceId, max(q.Segments, sh.Segments)) != nil) {
			return true // others took the last room while it waited
		}
		p.start(q, pgs...)
		p.steps[len(p.steps)-1].asked = true
		return true
	})
}

// outlived reports whether a recall that was queued is to be dropped: an extent of it is being
// recalled, or nothing of it was granted since its placement group began anew.
func (p *plan) outlived(pg *dirpb.PlacementGroup, extents []uint32) bool {
	h := p.s.Heap(pg.Id)
	return slices.ContainsFunc(extents, func(x uint32) bool {
		return slices.Contains(pg.Recalled, x) || uint64(x)*layout.ExtentUnits >= h.GetWatermark() || h.GetWatermark() == h.GetStart()
	})
}

// ---- rebalancing -----------------------------------------------------------

// Rebalance says how a namespace is spread, in this order. Every memory node that arbitrates no placement
// group and has room gets one. Then regions go from fuller memory nodes to emptier ones, a member of a
// placement group at a time. That lasts until none would make a difference smaller. Then memory goes from
// fuller placement groups to emptier ones, until they differ by a few percent of a heap. In a cache, and in a
// store that is nearly empty, shards of equal depth count as equal in place of their memory. Plan does it one
// step at a time while the state says that the namespace is rebalanced. Plan does what Rebalance says if
// nothing else changes. A leader can tell once it has led for the time that Untold says.
func (l *Leader) Rebalance(s *fsm.State, namespace uint32, now time.Duration) []string {
	p := l.plan(s, now)
	var out []string
	b := p.balance(namespace)
	skip := make(map[uint32]bool)
	for next := uint32(math.MaxUint32); ; next-- {
		chain := p.missing(namespace, skip)
		if chain == nil {
			break
		}
		skip[chain[0]] = true
		for _, id := range chain {
			p.given[id] += p.regionBytes(namespace)
		}
		// Ids that are not given out stand for placement groups to come.
		b.create(p.first(namespace), next, fmt.Sprintf("the new placement group of memory node %q", s.Node(chain[0]).GetName()), len(chain))
		out = append(out, fmt.Sprintf("create a placement group on memory nodes %s", p.nodeNames(chain)))
	}
	regions := p.regions(namespace)
	for w := regions.next(p); w != nil && len(out) < maxSteps; w = regions.next(p) {
		regions.apply(p, w)
		out = append(out, w.String())
	}
	for m := b.ask(); m != nil && len(out) < maxSteps; m = b.next(b.rule, nil, nil) {
		b.apply(m)
		out = append(out, m.String())
	}
	return out
}

// Untold is how long it will take until every session that lives has told this leader what it holds. Before, it does not
// know how full placement groups are.
func (l *Leader) Untold(now time.Duration) time.Duration {
	return max(0, l.began+min(l.opts.Lease, settleTime)-now)
}

// level takes a namespace's next step, or ends its rebalancing.
func (p *plan) level(ns uint32) {
	if p.l.spent[ns] {
		p.leveled(ns, dirpb.Rebalancing_REBALANCING_REFUSED, "a step of it was refused")
		return
	}
	if p.l.Untold(p.now) > 0 {
		return
	}
	replicas := p.s.Namespace(ns).GetReplicas()
	for _, pg := range p.pgs {
		if pg.NamespaceId == ns && (pg.State == dirpb.PGState_PG_CREATING || p.taken[pg.Id] ||
			pg.Planned != nil || pg.Joining || pg.Leaving != nil || uint32(len(pg.Members)) > replicas) {
			return
		}
	}
	for _, j := range p.all {
		if j.NamespaceId == ns && (j.Kind == dirpb.JobKind_JOB_MOVE || j.Kind == dirpb.JobKind_JOB_CLEAN) {
			return
		}
	}
	if chain := p.missing(ns, nil); chain != nil {
		for _, id := range chain {
			p.given[id] += p.regionBytes(ns)
		}
		p.add(&fsmpb.Command{Op: &fsmpb.Command_CreatePg{CreatePg: &fsmpb.CreatePG{NamespaceId: ns, NodeIds: chain}}},
			"namespace %q: a placement group on memory nodes %s", p.s.Namespace(ns).GetName(), p.nodeNames(chain))
		return
	}
	if w := p.regions(ns).next(p); w != nil {
		pg := p.s.PG(w.pg)
		if !p.free(pg) {
			return
		}
		p.taken[pg.Id] = true
		p.given[w.in.Id] += pg.RegionBytes
		p.add(&fsmpb.Command{Op: &fsmpb.Command_PlanJoin{PlanJoin: &fsmpb.PlanJoin{PgId: pg.Id, Epoch: pg.Epoch, NodeId: w.in.Id}}},
			"placement group %d: memory node %q is to join: it is to take the place of %q", pg.Id, w.in.Name, w.out.Name)
		p.steps[len(p.steps)-1].balances = true
		return
	}
	b := p.balance(ns)
	m := b.ask()
	if m == nil {
		p.leveled(ns, dirpb.Rebalancing_REBALANCING_NONE, "nothing is left to do")
		return
	}
	for _, g := range []*group{m.from, m.to} {
		// The account of a group is old while somebody works on it; hashes never are.
		if !p.free(g.pg) || b.rule.room && !p.settled(g.id) {
			return
		}
	}
	p.shift(b, m, reasonBalance)
}

// leveled ends a rebalance.
func (p *plan) leveled(ns uint32, to dirpb.Rebalancing, why string) {
	p.add(&fsmpb.Command{Op: &fsmpb.Command_Rebalance{Rebalance: &fsmpb.Rebalance{NamespaceId: ns, To: to}}},
		"namespace %q: its rebalance ends: %s", p.s.Namespace(ns).GetName(), why)
}

// regionBytes is the size of a namespace's regions, by its first placement group.
func (p *plan) regionBytes(ns uint32) uint64 {
	return p.first(ns).GetRegionBytes()
}

// first is a namespace's first placement group, after which others are made, or nil.
func (p *plan) first(ns uint32) *dirpb.PlacementGroup {
	for _, pg := range p.pgs {
		if pg.NamespaceId == ns {
			return pg
		}
	}
	return nil
}

func (p *plan) nodeNames(ids []uint32) string {
	names := make([]string, len(ids))
	for i, id := range ids {
		names[i] = p.s.Node(id).GetName()
	}
	return fmt.Sprintf("%q", names)
}

// Grow is the move that gives a shard, which is full, more room. The shard goes into an array of more
// segments, while its placement group's index is far from full (larger). Else it is split inside its
// placement group. When the index there is full, it is split into the placement group of its namespace whose
// index has the most room. No command: the shard moves already, or the placement group is busy and the caller
// may ask again (growing), or it cannot grow. The result why says which. A split inside a placement group
// that is busy is kept, and Plan begins it when the group is free. Shards of one group so split one after the
// other, and nobody has to ask at the right moment.
func (l *Leader) Grow(s *fsm.State, sh *dirpb.Shard, now time.Duration) (q *fsmpb.StartJob, growing bool, why string) {
	if sh.Move != nil {
		return nil, true, "it moves already"
	}
	v := l.newView(s, now)
	q = &fsmpb.StartJob{Kind: dirpb.JobKind_JOB_MOVE, ShardId: sh.Id, Split: true, Reason: "it is full"}
	own := s.PG(sh.PgId)
	to := []*dirpb.PlacementGroup{own}
	if q.Segments = v.larger(own, sh); q.Segments != 0 && s.CheckIndexQuota(sh.NamespaceId, q.Segments) == nil {
		q.Split = false
	} else if err := s.CheckIndexQuota(sh.NamespaceId, sh.Segments); err != nil {
		return nil, false, err.Error()
	} else if q.Segments = 0; !fits(s.Heap(own.Id), own, sh.Segments) {
		to = slices.DeleteFunc(slices.Clone(v.pgs), func(pg *dirpb.PlacementGroup) bool {
			return pg.NamespaceId != sh.NamespaceId || pg.Id == own.Id || pg.State == dirpb.PGState_PG_LOST || v.draining(pg) ||
				len(pg.Members) < len(own.Members) || !fits(s.Heap(pg.Id), pg, sh.Segments)
		})
		slices.SortStableFunc(to, func(a, b *dirpb.PlacementGroup) int { return cmp.Compare(v.indexRoom(b), v.indexRoom(a)) })
	}
	if len(to) == 0 {
		return nil, false, "no index of the namespace has room for another shard of its size"
	}
	if why := v.busy(own); why != "" {
		if to[0] == own {
			l.enqueue(q)
		}
		return nil, true, fmt.Sprintf("placement group %d %s", own.Id, why)
	}
	for _, pg := range to {
		if pg.Id != own.Id {
			q.TargetPgId = pg.Id
			if v.busy(pg) != "" {
				continue
			}
		}
		return q, true, ""
	}
	return nil, true, fmt.Sprintf("placement group %d %s", to[0].Id, v.busy(to[0]))
}
