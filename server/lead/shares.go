package lead

import (
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/server/fsm"
)

// poor reports whether a session that puts into a cache holds so little of a placement
// group that others are to hand some over.
func (x *session) poor(pg uint32, share uint64) bool {
	h := x.held[pg]
	return h != nil && h.OwnUnits+h.ForeignUnits < share/2 && h.NetUnits > 0
}

func (l *Leader) anyPoor(s *fsm.State, pg uint32) bool {
	share, _ := l.shareOf(s, pg)
	for _, x := range l.writers {
		if x.poor(pg, share) {
			return true
		}
	}
	return false
}

// shareOf is an equal part of a placement group for each session that holds some of it, or
// links in it.
func (l *Leader) shareOf(s *fsm.State, pg uint32) (share, sessions uint64) {
	for _, x := range l.writers {
		if h := x.held[pg]; h != nil && (h.OwnUnits > 0 || h.NetUnits > 0) {
			sessions++
		}
	}
	if g := s.PG(pg); g != nil {
		share = shareable(s, g) / max(1, sessions)
	}
	return share, sessions
}

// shareable is how much of a placement group's memory sessions may have, units: all, or its
// part of the namespace's limit.
func shareable(s *fsm.State, pg *dirpb.PlacementGroup) uint64 {
	h, w := s.Heap(pg.Id), s.Namespace(pg.NamespaceId)
	units := h.GetEnd() - h.GetStart()
	if limit := w.GetLimitBytes(); limit != 0 {
		units = min(units, limit/layout.UnitSize/uint64(max(1, len(s.PGs(w.Id)))))
	}
	return units
}

// share asks those who have much of a full cache for what those lack who have nearly
// nothing.
func (l *Leader) share(p *plan) {
	for _, x := range l.writers {
		clear(x.give)
	}
	for _, pg := range p.pgs {
		m := l.memory(p.s, pg.Id)
		if !m.short(p.now) || !evicts(p.s, pg.Id) {
			continue
		}
		share, n := l.shareOf(p.s, pg.Id)
		if n < 2 {
			continue
		}
		var need, excess uint64
		for _, x := range l.writers {
			h := x.held[pg.Id]
			if h == nil {
				continue
			}
			if x.poor(pg.Id, share) {
				need += share/2 - (h.OwnUnits + h.ForeignUnits)
			} else if h.OwnUnits > share {
				excess += h.OwnUnits - share
			}
		}
		need -= min(need, m.account.Waiting) // is on its way
		if need == 0 || excess == 0 {
			continue
		}
		for _, x := range l.writers {
			h := x.held[pg.Id]
			if h == nil || h.OwnUnits <= share {
				continue
			}
			part := h.OwnUnits - share
			if x.give == nil {
				x.give = make(map[uint32]uint64)
			}
			x.give[pg.Id] = min(uint64(float64(need)*float64(part)/float64(excess)), part/4)
		}
	}
}
