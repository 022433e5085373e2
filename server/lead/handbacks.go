package lead

import (
	"cmp"
	"slices"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/ordered"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// handBack takes free places of its own namespace that session x, whose id is from and which
// lives or has closed in good order, hands back. Places that may still be in limbo are so until the reclaim
// epoch after has passed.
func (l *Leader) handBack(s *fsm.State, now time.Duration, from uint32, x *session, runs []*dirpb.FreePlaces,
	after uint64) {
	left := maxHandBacks
	for _, r := range runs {
		pg := s.PG(r.PgId)
		if pg == nil || pg.NamespaceId != x.namespace || x.readOnly {
			continue
		}
		mark := s.Heap(r.PgId).GetRecallSeq()
		unit := uint64(r.Unit)
		for _, x := range r.Places {
			p := place{pg: r.PgId, generation: r.Generation, unit: uint32(unit), units: x >> 10,
				ver: uint16(x & (1<<10 - 1)), mark: mark, after: after}
			unit += uint64(p.units)
			if left--; left < 0 || p.units == 0 || unit > 1<<32-1 {
				break
			}
			l.route(s, now, from, p)
		}
	}
}

// route brings a place on its way: to its home, or, without one, back to all.
func (l *Leader) route(s *fsm.State, now time.Duration, from uint32, p place) {
	if !s.Settled(p.pg, p.generation, p.unit, p.units, p.mark) {
		return
	}
	m := l.memory(s, p.pg)
	home, any := s.HomeOf(p.pg, p.unit, p.units)
	switch x := l.sessions.of(home); {
	case home == 0 && !any:
		m.back(now, &fsmpb.Back{PgId: p.pg, Generation: p.generation, Unit: p.unit, Units: p.units, Mark: p.mark})
	case home == 0 || home == from || x == nil || len(x.queue) >= maxQueue || x.namespace != s.PG(p.pg).NamespaceId:
		// damaged, or too many; lost until it is counted
	default:
		x.queue = append(x.queue, p)
		l.routed = true
	}
}

// giveUp takes own memory that a session returns.
func (l *Leader) giveUp(s *fsm.State, now time.Duration, from uint32, runs []*dirpb.ReturnedRun) {
	for i, r := range runs {
		h := s.Heap(r.PgId)
		if i == maxReturns {
			return
		}
		if h == nil || !s.Settled(r.PgId, r.Generation, r.Unit, r.Units, h.RecallSeq) {
			continue
		}
		if home, _ := s.HomeOf(r.PgId, r.Unit, r.Units); home == from {
			l.memory(s, r.PgId).back(now, &fsmpb.Back{PgId: r.PgId, Generation: r.Generation, Unit: r.Unit,
				Units:     r.Units,
				SessionId: from, Fresh: r.Fresh, Mark: h.RecallSeq})
		}
	}
}

func (m *memory) back(now time.Duration, b *fsmpb.Back) {
	if len(m.backs) == maxQueue {
		return // lost until it is counted
	}
	if len(m.backs) == 0 {
		m.since = now
	}
	m.backs = append(m.backs, b)
}

// TakeBack is the command that makes free what came back, nil if there is nothing, or
// little and nobody waits. A run is in one command only: if that does not succeed the
// memory is lost until it is counted.
func (l *Leader) TakeBack(s *fsm.State, now time.Duration) *fsmpb.Command {
	c := &fsmpb.TakeBack{Epoch: l.epoch}
	for _, m := range ordered.All(l.memories) {
		if len(m.backs) == 0 || now-m.since < gather && len(m.backs) < maxBacks && !m.short(now) &&
			l.opts.EpochInterval > 0 {
			continue
		}
		n := min(len(m.backs), maxBacks-len(c.Runs))
		c.Runs = append(c.Runs, joined(m.backs[:n])...)
		m.backs = m.backs[n:]
		if len(m.backs) == 0 {
			m.backs = nil
		}
	}
	if len(c.Runs) == 0 {
		return nil
	}
	return &fsmpb.Command{Op: &fsmpb.Command_TakeBack{TakeBack: c}}
}

// Pending reports whether TakeBack has something to propose, now or soon.
func (l *Leader) Pending() bool {
	for _, m := range l.memories {
		if len(m.backs) > 0 {
			return true
		}
	}
	return false
}

// OnTheWay lists the places that wait for their home, and what is to be made free, for
// tests that add up all memory.
func (l *Leader) OnTheWay(f func(pg, unit, units uint32)) {
	for _, x := range l.writers {
		for _, p := range x.queue {
			f(p.pg, p.unit, p.units)
		}
	}
	for _, m := range l.memories {
		for _, b := range m.backs {
			f(b.PgId, b.Unit, b.Units)
		}
	}
}

// joined is list with runs made one that adjoin inside an extent and are alike.
func joined(list []*fsmpb.Back) (out []*fsmpb.Back) {
	list = slices.Clone(list)
	slices.SortStableFunc(list, func(a, b *fsmpb.Back) int { return cmp.Compare(a.Unit, b.Unit) })
	for _, b := range list {
		if n := len(out); n > 0 {
			if a := out[n-1]; a.Unit+a.Units == b.Unit && b.Unit%layout.ExtentUnits != 0 &&
				a.Generation == b.Generation &&
				a.SessionId == b.SessionId && a.Fresh == b.Fresh && a.Mark == b.Mark {
				out[n-1] = &fsmpb.Back{PgId: a.PgId, Generation: a.Generation, Unit: a.Unit, Units: a.Units + b.Units,
					SessionId: a.SessionId, Fresh: a.Fresh, Mark: a.Mark}
				continue
			}
		}
		out = append(out, b)
	}
	return out
}

// deliver pops what waits for x, as session id: each place into one reply.
func (x *session) deliver(s *fsm.State, id uint32, least uint64) (out []*dirpb.FreePlaces) {
	var list, left []place
	n := 0
	for ; n < len(x.queue) && len(list) < maxDelivered; n++ {
		if p := x.queue[n]; least >= p.after {
			list = append(list, p)
		} else {
			left = append(left, p)
		}
	}
	if x.queue = x.queue[n:]; len(left) > 0 || len(x.queue) == 0 {
		x.queue = append(left, x.queue...)
	}
	if len(list) == 0 {
		return nil
	}
	ordered.Sort(list, func(a, b place) int { return cmp.Or(cmp.Compare(a.pg, b.pg), cmp.Compare(a.unit, b.unit)) })
	end := uint32(0) // of the last place
	for _, p := range list {
		if home, _ := s.HomeOf(p.pg, p.unit, p.units); home != id || !s.Settled(p.pg, p.generation, p.unit, p.units,
			p.mark) {
			continue
		}
		k := len(out) - 1
		if k < 0 || out[k].PgId != p.pg || end != p.unit || p.unit%layout.ExtentUnits == 0 {
			out = append(out, &dirpb.FreePlaces{PgId: p.pg, Generation: p.generation, Unit: p.unit})
			k++
		}
		out[k].Places = append(out[k].Places, p.units<<10|uint32(p.ver))
		end = p.unit + p.units
	}
	return out
}

// ended forgets a session that is closed or fenced. Records that it linked stay linked, and places that
// waited for it have no home any more.
func (l *Leader) ended(s *fsm.State, now time.Duration, id uint32) {
	x := l.sessions.of(id)
	if x == nil {
		return
	}
	l.hold(s, id, x, x.last)
	l.forgetSession(id)
	for pg, h := range ordered.All(x.held) {
		if m := l.memories[pg]; m != nil && m.generation == h.Generation {
			m.base += h.NetUnits
		}
	}
	for _, p := range x.queue {
		l.route(s, now, id, p)
	}
	// It does not wait for its limbo.
	if len(x.back) > 0 {
		l.await(l.epoch)
	}
	l.handBack(s, now, id, x, x.back, l.epoch+1)
}
