package lead

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// copies counts the copies of each placement group that has any, and gives the placement groups of which each memory
// node has one.
func (v *view) copies() (count map[uint32]int, holds map[uint32][]uint32) {
	count, holds = make(map[uint32]int), make(map[uint32][]uint32)
	for _, pg := range v.pgs {
		if pg.State != dirpb.PGState_PG_ACTIVE && pg.State != dirpb.PGState_PG_FROZEN {
			continue
		}
		chain := fsm.Copies(pg)
		count[pg.Id] = len(chain)
		for _, m := range chain {
			holds[m.NodeId] = append(holds[m.NodeId], pg.Id)
		}
	}
	return count, holds
}

// expireNodes declares memory nodes lost that were silent for a lease, the longest
// silent first. If some placement group would have no copy left without it, it is lost to the others alone, until
// nobody waits for it any more.
func (p *plan) expireNodes() {
	copies, holds := p.copies()
	var silent []*dirpb.Node
	for _, m := range p.s.Nodes() {
		lease := p.l.nodes[m.Id]
		if lease == nil || lease.incarnation != m.Incarnation {
			// Registered, but not answered yet.
			lease = &node{incarnation: m.Incarnation, expires: p.now + p.l.opts.Lease}
			p.l.nodes[m.Id] = lease
		}
		if p.l.Silent(m, p.now) {
			silent = append(silent, m)
		}
	}
	slices.SortStableFunc(silent, func(a, b *dirpb.Node) int {
		return cmp.Compare(p.l.nodes[a.Id].due(), p.l.nodes[b.Id].due())
	})
	for _, m := range silent {
		last := func(pg uint32) bool { return copies[pg] == 1 && slices.Contains(holds[m.Id], pg) }
		waits := p.l.awaits(m, p.now) && slices.ContainsFunc(holds[m.Id], last)
		if waits {
			p.loseMembers(m, last)
		} else {
			p.add(p.l.downOf(m), "memory node %q is down: its lease ran out", m.Name)
		}
		for _, pg := range holds[m.Id] {
			if !waits || !last(pg) {
				copies[pg]--
			}
		}
	}
	for _, m := range p.s.Nodes() {
		if p.gone(m) && !slices.Contains(silent, m) {
			why := "it said goodbye"
			if m.PauseMillis > 0 {
				why = "it has left, and is replaced"
			}
			p.add(p.l.downOf(m), "memory node %q is down: %s", m.Name, why)
		}
	}
	for id := range p.l.nodes {
		if p.s.Node(id) == nil {
			delete(p.l.nodes, id)
		}
	}
}

// loseMembers has every placement group go on without a silent memory node, but for those of which it has the last
// copy.
func (p *plan) loseMembers(m *dirpb.Node, last func(pg uint32) bool) {
	others := slices.DeleteFunc(p.s.Losable(m.Id), last)
	if !p.s.KnowsBoots() || m.Silent && len(others) == 0 {
		return
	}
	why := "is waited for, since it is silent and has the last copy of something"
	if len(others) > 0 {
		why += fmt.Sprintf("; placement groups %d go on without it", others)
	}
	p.add(&fsmpb.Command{Op: &fsmpb.Command_LoseMembers{LoseMembers: &fsmpb.LoseMembers{
		NodeId: m.Id, Incarnation: m.Incarnation, Boot: m.Boot, ReclaimEpoch: p.l.epoch,
	}}}, "memory node %q %s", m.Name, why)
}
