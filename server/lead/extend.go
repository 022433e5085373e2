package lead

import (
	"maps"
	"slices"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// extendEvery is the least time between two extensions of a namespace: what the first one did is to be seen.
const extendEvery = 5 * time.Second

// extend has a namespace that is on some memory nodes, and may grow, spread over twice as many when it is nearly full:
// a rebalance makes the placement groups, as many as there is room for, and moves shards there.
func (p *plan) extend(ns uint32) {
	w := p.s.Namespace(ns)
	if !w.GetGrows() || w.Nodes == 0 || w.Rebalancing == dirpb.Rebalancing_REBALANCING_ON ||
		w.Rebalancing == dirpb.Rebalancing_REBALANCING_CANCELLED {
		return
	}
	if _, lately := p.l.extended[ns]; lately || !p.nearlyFull(ns) {
		return
	}
	arbitrates, pgs := p.heads(ns)
	if p.another(ns, arbitrates) == nil {
		return
	}
	p.l.extended[ns] = p.now
	p.add(&fsmpb.Command{
		Op: &fsmpb.Command_Rebalance{Rebalance: &fsmpb.Rebalance{NamespaceId: ns, To: dirpb.Rebalancing_REBALANCING_ON,
			Nodes: uint32(2 * pgs)}}},
		"namespace %q: it is nearly full on %d memory nodes, and is spread over as many again", w.Name, pgs)
}

// nearlyFull reports whether three quarters of a namespace's heaps or indexes are in use, or half of its heaps while
// somebody finds too little. The heaps of a cache are always full of records: what counts there is that nearly all of
// them has been granted. With a limit that its heaps have room for, heaps are never nearly full.
func (p *plan) nearlyFull(ns uint32) bool {
	w := p.s.Namespace(ns)
	var heap, live, room, index, free uint64
	short := false
	for _, g := range p.balance(ns).groups {
		heap, live, room = heap+g.whole, live+g.load, room+g.room
		index, free = index+g.pg.IndexBytes, free+g.index
		short = short || p.l.memory(p.s, g.id).short(p.now)
	}
	switch {
	case heap == 0:
		return false
	case 4*free <= index:
		return true
	case w.LimitBytes != 0 && heap*layout.UnitSize >= fsm.Roomy(w.LimitBytes):
		return false
	case w.Mode == dirpb.NamespaceMode_NAMESPACE_CACHE:
		return 8*room <= heap
	}
	return 4*live >= 3*heap || short && 2*live >= heap
}

// missing is the chain of a placement group that would give some memory node its
// first to arbitrate, or nil, also if the namespace is on as many as it may be. Memory nodes in skip have one.
func (p *plan) missing(ns uint32, skip map[uint32]bool) []uint32 {
	arbitrates, pgs := p.heads(ns)
	if most := p.s.Namespace(ns).GetNodes(); most != 0 && pgs+len(skip) >= int(most) {
		return nil
	}
	maps.Copy(arbitrates, skip)
	return p.another(ns, arbitrates)
}

// heads are the memory nodes that arbitrate a placement group of a namespace, and how many of these there are.
func (p *plan) heads(ns uint32) (arbitrates map[uint32]bool, pgs int) {
	arbitrates = make(map[uint32]bool)
	for _, pg := range p.pgs {
		if pg.NamespaceId != ns {
			continue
		}
		if pgs++; len(pg.Members) > 0 {
			arbitrates[pg.Members[0].NodeId] = true
		}
	}
	return arbitrates, pgs
}

// another is the chain of a placement group that a memory node not in the set would arbitrate, or nil: the emptiest, if
// the namespace is not on all.
func (p *plan) another(ns uint32, arbitrates map[uint32]bool) []uint32 {
	region := p.regionBytes(ns)
	if region == 0 {
		return nil
	}
	nodes := p.s.Nodes()
	if p.s.Namespace(ns).GetNodes() != 0 {
		slices.SortStableFunc(nodes, p.fuller)
	}
	want := p.s.Namespace(ns).GetReplicas()
	for _, n := range nodes {
		if arbitrates[n.Id] || !p.usable(n, region) {
			continue
		}
		if chain := p.chain(n, region, want); uint32(len(chain)) == want {
			return chain
		}
	}
	return nil
}
