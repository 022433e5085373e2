package lead

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

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
		b.create(p.first(namespace), next, fmt.Sprintf("the new placement group of memory node %q",
			s.Node(chain[0]).GetName()), len(chain))
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

// Untold is how long it will take until every session that lives has told this leader what it holds. Until then it does
// not know how full placement groups are.
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
		p.add(&fsmpb.Command{
			Op: &fsmpb.Command_PlanJoin{PlanJoin: &fsmpb.PlanJoin{PgId: pg.Id, Epoch: pg.Epoch, NodeId: w.in.Id}}},
			"placement group %d: memory node %q is to join: it is to take the place of %q", pg.Id, w.in.Name,
			w.out.Name)
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
			return pg.NamespaceId != sh.NamespaceId || pg.Id == own.Id || pg.State == dirpb.PGState_PG_LOST ||
				v.draining(pg) ||
				len(pg.Members) < len(own.Members) || !fits(s.Heap(pg.Id), pg, sh.Segments)
		})
		slices.SortStableFunc(to, func(a, b *dirpb.PlacementGroup) int {
			return cmp.Compare(v.indexRoom(b), v.indexRoom(a))
		})
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
