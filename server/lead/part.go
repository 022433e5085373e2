package lead

import (
	"slices"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// maxLeaving is how long a memory node that is about to stop waits at most for its placement
// groups to have time to let it go, and then for sessions; beyond it they lose it.
const maxLeaving = time.Second

// Patience is how long a goodbye may wait for [Leader.MayLeave].
func (l *Leader) Patience() time.Duration { return min(l.opts.Lease, maxLeaving) }

// MayLeave reports whether the placement groups that could go on without a memory node have
// nothing else to do, so that operations that wait until it has left do not wait for that.
func (l *Leader) MayLeave(s *fsm.State, now time.Duration, id uint32) bool {
	v := l.newView(s, now)
	return !slices.ContainsFunc(v.pgs, func(pg *dirpb.PlacementGroup) bool {
		on := slices.ContainsFunc(pg.Members, func(m *dirpb.Member) bool { return m.NodeId == id })
		return on && len(pg.Members) > 1 && v.busy(pg) != ""
	})
}

// noteLeaving starts the time of memory nodes that are about to stop.
func (l *Leader) noteLeaving(s *fsm.State, now time.Duration) {
	for _, n := range s.Nodes() {
		x := l.nodes[n.Id]
		if x == nil || x.incarnation != n.Incarnation {
			continue
		}
		switch {
		case !n.Leaving:
			x.leaves, x.leavesV = 0, 0
		case x.leavesV == 0:
			x.leaves, x.leavesV = now, s.MapVersion()
		}
	}
}

// stops reports whether a member is about to stop.
func (v *view) stops(m *dirpb.Member) bool { return v.s.Node(m.NodeId).GetLeaving() }

// part takes a member that is about to stop out of pg, if others have copies, when no
// operation is under way that began before sessions knew: since then those that begin wait
// where the member arbitrates, so it has decided no word that others do not know of.
func (p *plan) part(pg *dirpb.PlacementGroup) {
	if len(pg.Members) < 2 || p.taken[pg.Id] || p.l.paused[pg.Id] != 0 || p.busy(pg) != "" {
		return
	}
	for _, m := range pg.Members {
		n, x := p.s.Node(m.NodeId), p.l.nodes[m.NodeId]
		if !n.GetLeaving() || x == nil || x.leavesV == 0 || p.floor(pg.NamespaceId).acked < x.leavesV {
			continue
		}
		p.taken[pg.Id] = true
		p.add(&fsmpb.Command{Op: &fsmpb.Command_StartLeave{StartLeave: &fsmpb.StartLeave{PgId: pg.Id, Epoch: pg.Epoch, NodeId: m.NodeId}}},
			"placement group %d: memory node %q leaves: it is about to stop", pg.Id, n.Name)
		return
	}
}

// gone reports whether a memory node that is about to stop is out of every chain in which
// another has a copy, or has waited for that long enough.
func (p *plan) gone(n *dirpb.Node) bool {
	x := p.l.nodes[n.Id]
	if !n.Leaving || x == nil || x.leavesV == 0 {
		return false
	}
	if p.now-x.leaves > p.l.Patience() {
		return true
	}
	return !slices.ContainsFunc(p.pgs, func(pg *dirpb.PlacementGroup) bool {
		on := func(m *dirpb.Member) bool { return m.NodeId == n.Id }
		return pg.Leaving != nil && on(pg.Leaving) || len(pg.Members) > 1 && slices.ContainsFunc(pg.Members, on)
	})
}
