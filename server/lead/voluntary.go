package lead

import (
	"cmp"
	"fmt"
	"math/bits"
	"slices"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// free reports whether a voluntary change of pg may begin: none does before a member that is
// about to stop has left.
func (p *plan) free(pg *dirpb.PlacementGroup) bool {
	return !p.taken[pg.Id] && p.l.paused[pg.Id] == 0 && p.busy(pg) == "" && !slices.ContainsFunc(pg.Members, p.stops)
}

// remake gives pg other members if it holds nothing, or may be empty, and all it waits for is down or silent: its
// memory nodes died while it was made, were removed, or have all copies of a cache. If no other memory node has room it
// waits: nothing would be gained. A placement group that is lost waits for its memory node, whose operator may be about
// to start it again, until that is removed.
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
	p.add(&fsmpb.Command{
		Op: &fsmpb.Command_RemakePg{RemakePg: &fsmpb.RemakePG{PgId: pg.Id, Epoch: pg.Epoch, NodeIds: chain}}},
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
		p.add(&fsmpb.Command{
			Op: &fsmpb.Command_PlanJoin{
				PlanJoin: &fsmpb.PlanJoin{PgId: pg.Id, Epoch: pg.Epoch, NodeId: n.Id, Retain: retain,
					ReclaimEpoch: p.l.epoch}}},
			"placement group %d: memory node %q is to join: %s", pg.Id, n.Name, why)
		return
	}
	if drains {
		p.evacuate(pg)
	}
}

// former is a memory node that has been a member of pg and has what it held, not long ago, or nil: that spares copying
// what has not changed.
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
	return n.State == dirpb.NodeState_NODE_UP && !n.Draining && lease != nil && !n.Leaving && !n.Silent &&
		p.now <= lease.expires &&
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
		if n != nil && (out == nil || cmp.Or(cmp.Compare(rank(n), rank(out)), fullerBy(n, used(n), out, used(out))) >=
			0) {
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
	p.add(&fsmpb.Command{
		Op: &fsmpb.Command_StartLeave{StartLeave: &fsmpb.StartLeave{PgId: pg.Id, Epoch: pg.Epoch, NodeId: out.Id,
			ReclaimEpoch: p.l.epoch}}},
		"placement group %d: memory node %q leaves: %s", pg.Id, out.Name, why)
}

// evacuate moves a shard of pg, whose member has nowhere to go, to a placement group that
// stays and has as many copies. A placement group that holds nothing any more gives the member up without a
// replacement.
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
		if to.Id == pg.Id || to.NamespaceId != pg.NamespaceId || p.draining(to) || !p.free(to) ||
			len(to.Members) < len(pg.Members) ||
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
	p.add(&fsmpb.Command{Op: &fsmpb.Command_StartJob{StartJob: q}}, "placement groups %d: %s begins: %s", pgs, q.Kind,
		q.Reason)
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
		if slices.ContainsFunc(pgs, func(id uint32) bool {
			return s.PG(id) == nil || p.taken[id] || p.busy(s.PG(id)) != ""
		}) {
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
		return o.Kind == q.Kind && o.PgId == q.PgId && o.ShardId == q.ShardId && o.TargetPgId == q.TargetPgId &&
			slices.Equal(o.Extents, q.Extents)
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
		if q.Kind == dirpb.JobKind_JOB_MOVE && p.s.Shard(q.ShardId).GetMove() != nil {
			return true
		}
		pgs := p.occupies(q)
		for _, id := range pgs {
			pg := p.s.PG(id)
			if pg == nil || pg.State == dirpb.PGState_PG_LOST || q.Kind == dirpb.JobKind_JOB_RECALL &&
				p.outlived(pg, q.Extents) {
				return true
			}
			if !p.free(pg) {
				return false
			}
		}
		if _, stuck := unmovable(p.s, q); stuck {
			q.InPlace = true // others took the room: what is nobody's comes back at least
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
		return slices.Contains(pg.Recalled, x) || uint64(x)*layout.ExtentUnits >= h.GetWatermark() ||
			h.GetWatermark() == h.GetStart()
	})
}
