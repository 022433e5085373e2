package fsm

import (
	"cmp"
	"fmt"
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/ordered"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// RetainEpochs is for how many reclaim epochs the memory of a member that has left may become a member's
// again. A slot of the chain may hold a word that it held then, of another record, when layout.WordLifeEpochs
// have passed. Every session has to hear of the member between the two.
const RetainEpochs = 900

const _ = uint(layout.WordLifeEpochs - RetainEpochs - 1)

// depart notes that a copy, m, has left pg, which goes on without it. A joiner is no copy: its words are of two times.
func (s *State) depart(pg *dirpb.PlacementGroup, m *dirpb.Member, epoch uint64) {
	if !s.KnowsBoots() {
		return
	}
	h := s.editHeap(pg.Id)
	list := slices.DeleteFunc(slices.Clone(h.Departed), func(d *fsmpb.Departed) bool { return d.NodeId == m.NodeId })
	list = append(list, &fsmpb.Departed{NodeId: m.NodeId, Incarnation: m.Incarnation, Since: m.Since, Epoch: epoch,
		LastShard: s.meta.ShardId})
	h.Departed = list[max(0, len(list)-MaxReplicas):]
}

// setDeparted takes the departed members for which keep gives nil out of every placement group's list, and puts what it
// gives in place of the others.
func (s *State) setDeparted(node uint32, keep func(pg uint32, d *fsmpb.Departed) *fsmpb.Departed) {
	for _, h := range ordered.Values(s.heaps) {
		i := slices.IndexFunc(h.Departed, func(d *fsmpb.Departed) bool { return d.NodeId == node })
		if i < 0 {
			continue
		}
		d := keep(h.PgId, h.Departed[i])
		if d == h.Departed[i] {
			continue
		}
		h = s.editHeap(h.PgId)
		h.Departed = slices.Clone(h.Departed)
		if h.Departed[i] = d; d == nil {
			h.Departed = slices.Delete(h.Departed, i, i+1)
		}
	}
}

// takeOffers notes what a process of a memory node retains. It has nothing else of what an earlier one held.
func (s *State) takeOffers(node uint32, c *dirpb.RegisterNodeRequest) {
	has := make(map[uint32]*dirpb.RetainedRegion, len(c.Retained))
	for _, r := range c.Retained {
		has[r.PgId] = r
	}
	s.setDeparted(node, func(pg uint32, d *fsmpb.Departed) *fsmpb.Departed {
		if has[pg] == nil && s.nodes[node].Silent && d.Incarnation == c.Incarnation {
			return d // a region of its still
		}
		if r := has[pg]; r.GetIncarnation() != d.Incarnation || r.GetSince() != d.Since {
			return nil
		}
		if d.Offered != c.Incarnation {
			d = proto.CloneOf(d)
			d.Offered = c.Incarnation
		}
		return d
	})
}

// departed is what a memory node that is up offers to bring back into a placement group at a reclaim epoch, or nil.
func (s *State) departed(pg, node uint32, epoch uint64) *fsmpb.Departed {
	for _, d := range s.heaps[pg].GetDeparted() {
		if d.NodeId == node && d.Offered != 0 && d.Offered == s.nodes[node].GetIncarnation() && epoch >= d.Epoch &&
			epoch-d.Epoch <= RetainEpochs {
			return d
		}
	}
	return nil
}

// Retains reports whether a memory node may join a placement group with what it retains of it.
func (s *State) Retains(pg, node uint32, epoch uint64) bool {
	return s.departed(pg, node, epoch) != nil
}

// RetainedBy are the placement groups, by id, that lack a copy, if a memory node retains memory of them that
// may become one. A memory node that leaves its placement groups to be replaced is to retain them for its
// next process, which offers them. A memory node that was silent is to offer them itself.
func (s *State) RetainedBy(node uint32, epoch uint64) (pgs []uint32) {
	n := s.nodes[node]
	parts := func(d *fsmpb.Departed) bool {
		// epoch may be of a moment before
		return d.NodeId == node && d.Incarnation == n.GetIncarnation() && epoch <= d.Epoch+RetainEpochs
	}
	for _, h := range ordered.Values(s.heaps) {
		pg := s.pgs[h.PgId]
		copies := len(pg.Members)
		if pg.Joining {
			copies--
		}
		if copies < int(s.namespaces[pg.NamespaceId].GetReplicas()) &&
			(s.departed(pg.Id, node, epoch) != nil || (n.GetLeaving() || n.GetSilent()) &&
				slices.ContainsFunc(h.Departed, parts)) {
			pgs = append(pgs, pg.Id)
		}
	}
	return pgs
}

// retain takes what a memory node is to bring back of pg out of the list of what departed.
func (s *State) retain(pg *dirpb.PlacementGroup, node uint32, epoch uint64) (*dirpb.Retained, error) {
	d := s.departed(pg.Id, node, epoch)
	if d == nil {
		return nil, fmt.Errorf("%w: memory node %d retains nothing of placement group %d that left it in the last %d "+
			"reclaim epochs", ErrRefused, node, pg.Id, RetainEpochs)
	}
	r := &dirpb.Retained{Incarnation: d.Incarnation, Since: d.Since, Epoch: d.Epoch}
	for _, a := range s.arraysOf(pg.Id) {
		if a.ShardId <= d.LastShard {
			r.Arrays = append(r.Arrays, a)
		}
	}
	slices.SortFunc(r.Arrays, func(a, b *dirpb.RetainedArray) int { return cmp.Compare(a.Offset, b.Offset) })
	s.setDeparted(node, func(id uint32, o *fsmpb.Departed) *fsmpb.Departed {
		if id == pg.Id {
			return nil
		}
		return o
	})
	return r, nil
}

// arraysOf are the arrays that shards and children have in a placement group, by shard.
func (s *State) arraysOf(pg uint32) (list []*dirpb.RetainedArray) {
	for _, sh := range ordered.Values(s.shards) {
		if sh.PgId == pg {
			list = append(list, &dirpb.RetainedArray{ShardId: sh.Id, Offset: sh.Offset, Segments: sh.Segments})
		}
		if mv := sh.Move; mv != nil && !mv.Abandoned && mv.PgId == pg {
			list = append(list, &dirpb.RetainedArray{ShardId: mv.ChildId, Offset: mv.Offset,
				Segments: sh.ChildSegments()})
		}
	}
	return list
}

// stillThere reports whether all arrays that were named for r are those of the same shards: one that is not is zeroes
// in the chain.
func (s *State) stillThere(pg uint32, r *dirpb.Retained) bool {
	now := s.arraysOf(pg)
	return !slices.ContainsFunc(r.GetArrays(), func(a *dirpb.RetainedArray) bool {
		return !slices.ContainsFunc(now, func(b *dirpb.RetainedArray) bool { return proto.Equal(a, b) })
	})
}

// rejoin makes pg's planned member, which begins with what it retained, a joiner. The placement group is frozen until
// every session knows: one that does not would leave the member's words as they are, where another one believes them.
func (s *State) rejoin(pg *dirpb.PlacementGroup) {
	pg.State = dirpb.PGState_PG_FROZEN
	s.newEpoch(pg)
	s.editHeap(pg.Id).FrozenVersion = pg.ChangedVersion
}

// admit ends the freeze for pg's joiner, if that began with what it retained, at a reclaim epoch: everybody writes to
// it from now on, so nothing of it grows old any more. If some word of it may be older than I5 bears, it does not join.
func (s *State) admit(pg *dirpb.PlacementGroup, epoch uint64) {
	if !pg.Joining {
		return
	}
	last := len(pg.Members) - 1
	m := pg.Members[last]
	if m.Retained == nil {
		return
	}
	if epoch < m.Retained.Epoch || epoch-m.Retained.Epoch >= layout.WordLifeEpochs {
		pg.Members, pg.Joining = pg.Members[:last], false
		return
	}
	m.Retained, m.Rejoins = nil, true
}
