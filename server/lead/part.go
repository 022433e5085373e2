package lead

import (
	"fmt"
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

// MayLeave reports whether the placement groups that could go on without a memory node have nothing else to
// do. Operations that wait until it has left then do not wait for that.
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

// BeginPause starts the time of a memory node whose process is to be replaced, from now on.
func (l *Leader) BeginPause(s *fsm.State, id uint32, now time.Duration) {
	if x := l.nodes[id]; x != nil {
		x.pause = 0
	}
	l.notePauses(s, now)
}

// AskToLeave forgets what Stays noted of a memory node that is asked once more to be replaced. It comes before the
// command that asks: the answer may be there before that returns.
func (l *Leader) AskToLeave(id uint32) { delete(l.stays, id) }

// Stays notes why the process of a memory node that was to be replaced stays. It gives the command by which
// the process is not expected to end any more, or nil if it is not.
func (l *Leader) Stays(s *fsm.State, id uint32, why string) *fsmpb.Command {
	n := s.Node(id)
	if n.GetState() != dirpb.NodeState_NODE_UP || n.PauseMillis == 0 || n.Leaving {
		return nil
	}
	l.stays[id] = why
	return &fsmpb.Command{
		Op: &fsmpb.Command_PauseNode{PauseNode: &dirpb.PauseNodeRequest{NodeId: n.Id, Incarnation: n.Incarnation}}}
}

// WhyStays is what Stays noted since AskToLeave, "" for nothing.
func (l *Leader) WhyStays(id uint32) string { return l.stays[id] }

// notePauses starts the time of memory nodes of whose pause another leader has known.
func (l *Leader) notePauses(s *fsm.State, now time.Duration) {
	for _, n := range s.Nodes() {
		x := l.nodes[n.Id]
		if x == nil || x.incarnation != n.Incarnation {
			continue
		}
		if x.pause == 0 {
			x.paused = now
		}
		x.pause = time.Duration(n.PauseMillis) * time.Millisecond
	}
}

// maxParting is how long a memory node that is to be replaced may take to leave its placement groups: operations wait
// meanwhile for those where it arbitrates.
const maxParting = 3 * time.Second

// resume expects heartbeats again of memory nodes that were to be replaced by now, and lets those stay that could not
// leave.
func (p *plan) resume() {
	for _, n := range p.s.Nodes() {
		x := p.l.nodes[n.Id]
		if x == nil || x.incarnation != n.Incarnation || x.pause == 0 {
			continue
		}
		limit, why := x.pause, "was not replaced in time"
		if n.Leaving {
			limit, why = min(limit, maxParting), "could not leave its placement groups in time, and stays"
		}
		if p.now > x.paused+limit {
			p.add(&fsmpb.Command{
				Op: &fsmpb.Command_PauseNode{
					PauseNode: &dirpb.PauseNodeRequest{NodeId: n.Id, Incarnation: n.Incarnation}}},
				"memory node %q %s", n.Name, why)
		}
	}
}

// expected reports whether a memory node leaves or has left to be replaced: what lacks one copy waits for it, as it
// will have room.
func (v *view) expected() bool {
	return slices.ContainsFunc(v.s.Nodes(), func(n *dirpb.Node) bool {
		return n.PauseMillis > 0 && (n.Leaving || n.State == dirpb.NodeState_NODE_DOWN)
	})
}

// MayPart refuses that a memory node leaves its placement groups to be replaced, if some would have no other copy then.
func (l *Leader) MayPart(s *fsm.State, id uint32, now time.Duration) error {
	_, holds := l.newView(s, now).copies()
	others := make(map[uint32]bool) // placement groups with a copy that stays
	for _, n := range s.Nodes() {
		if n.Id == id || n.State != dirpb.NodeState_NODE_UP || n.Leaving || l.Silent(n, now) {
			continue
		}
		for _, pg := range holds[n.Id] {
			others[pg] = true
		}
	}
	for _, pg := range holds[id] {
		if !others[pg] {
			return fmt.Errorf("%w: memory node %q has the only copy of placement group %d of namespace %q, and would "+
				"have to drop it; nothing was done. "+
				"Wait until there is another copy, or restart it in place", fsm.ErrRefused, s.Node(id).GetName(), pg,
				s.Namespace(s.PG(pg).NamespaceId).GetName())
		}
	}
	return nil
}

// Silent reports whether a memory node that is up has not been heard when it should have been.
func (l *Leader) Silent(n *dirpb.Node, now time.Duration) bool {
	x := l.nodes[n.GetId()]
	return n.GetState() == dirpb.NodeState_NODE_UP && x != nil && x.incarnation == n.Incarnation && now > x.due()
}

// awaits reports whether a silent memory node that holds the only copy of something is waited for.
func (l *Leader) awaits(n *dirpb.Node, now time.Duration) bool {
	patience := time.Duration(l.opts.LastCopyLeases-1) * l.opts.Lease
	if n.Keeps {
		if l.opts.LastCopyWait == 0 {
			return true
		}
		patience = l.opts.LastCopyWait - l.opts.Lease
	}
	return now <= l.nodes[n.Id].due()+patience
}

// Waiting are the silent memory nodes without which some placement group has no copy, so that operations there wait for
// them, by id.
func (l *Leader) Waiting(s *fsm.State, now time.Duration) (ids []uint32) {
	copies, holds := l.newView(s, now).copies()
	for _, n := range s.Nodes() {
		if l.Silent(n, now) && slices.ContainsFunc(holds[n.Id], func(pg uint32) bool { return copies[pg] == 1 }) {
			ids = append(ids, n.Id)
		}
	}
	return ids
}

// downOf declares the process of a memory node that is registered now lost, and what it holds.
func (l *Leader) downOf(n *dirpb.Node) *fsmpb.Command {
	return &fsmpb.Command{
		Op: &fsmpb.Command_NodeDown{NodeDown: &fsmpb.NodeDown{NodeId: n.Id, Incarnation: n.Incarnation, Boot: n.Boot,
			ReclaimEpoch: l.epoch}}}
}

// GiveUp declares a silent memory node lost, whatever it holds, since an operator says so.
func (l *Leader) GiveUp(s *fsm.State, id uint32, now time.Duration) (*fsmpb.Command, error) {
	n := s.Node(id)
	switch {
	case n.GetState() != dirpb.NodeState_NODE_UP:
		return nil, fmt.Errorf("%w: memory node %q counts as lost already", fsm.ErrRefused, n.GetName())
	case !l.Silent(n, now):
		return nil, fmt.Errorf("%w: memory node %q was heard within its lease, or is being replaced; drain it, or "+
			"stop it first", fsm.ErrRefused, n.Name)
	}
	return l.downOf(n), nil
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
		p.add(&fsmpb.Command{
			Op: &fsmpb.Command_StartLeave{StartLeave: &fsmpb.StartLeave{PgId: pg.Id, Epoch: pg.Epoch, NodeId: m.NodeId,
				ReclaimEpoch: p.l.epoch}}},
			"placement group %d: memory node %q leaves: it is about to stop", pg.Id, n.Name)
		return
	}
}

// gone reports whether a memory node that is about to stop is out of every chain in which
// another has a copy, or has waited for that long enough; one that is to be replaced leaves nothing behind, or does not
// leave.
func (p *plan) gone(n *dirpb.Node) bool {
	x := p.l.nodes[n.Id]
	if !n.Leaving || x == nil || x.leavesV == 0 {
		return false
	}
	stops := n.PauseMillis == 0
	if stops && p.now-x.leaves > p.l.Patience() {
		return true
	}
	return !slices.ContainsFunc(p.pgs, func(pg *dirpb.PlacementGroup) bool {
		on := func(m *dirpb.Member) bool { return m.NodeId == n.Id }
		return pg.Leaving != nil && on(pg.Leaving) || slices.ContainsFunc(pg.Members, on) &&
			(len(pg.Members) > 1 || !stops)
	})
}
