package client

import (
	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/session"
	"github.com/kvd-project/kvd/rdma"
)

// Stats returns a snapshot of this Client's counters since it was opened, and of what its
// present session holds.
func (c *Client) Stats() Stats {
	s := c.sess.Load()
	st := Stats{Ops: map[string]uint64{}, Rounds: map[string]uint64{}, Session: s.id,
		Epoch: s.core.Epoch(), MinEpoch: s.core.MinEpoch(), Evicted: c.stats.evicted.Load(),
		PinsPassed: c.stats.pinsPassed.Load(), PinsBroken: c.stats.pinsBroken.Load(),
		PinsOver: c.stats.pinsOver.Load(),
		Expired:  c.stats.expired.Load(), EvictedBytes: c.stats.evictedUnits.Load() * layout.UnitSize,
		SweepBytes: c.stats.sweepBytes.Load(), SweepForgotten: c.stats.sweepForgotten.Load()}
	c.mu.Lock()
	// past has the sessions that have ended; counted says that this one is among them already.
	total, counted := c.mu.past, s.counted
	c.mu.Unlock()
	if !counted {
		total.wentBy(s.agenda.Counts(), session.Counts{})
	}
	var cached, inUse uint64
	for _, l := range s.core.Lanes() {
		if counted {
			break
		}
		x := new(struct { // its own: the session may end, and the lane come to it later
			laneTotals
			limbo, cached uint64
		})
		if !s.onLane(l, func(l *engine.Lane) {
			x.laneTotals.add(l)
			x.limbo, x.cached = l.LimboUnits(), l.CachedUnits()
		}) {
			c.mu.Lock()
			total = c.mu.last
			c.mu.Unlock()
			counted = true
			break
		}
		total.sum(&x.laneTotals)
		st.LimboUnits += x.limbo
		cached += x.cached
	}
	total.into(&st)
	if counted {
		return st
	}
	c.mu.Lock()
	c.mu.last = total
	c.mu.Unlock()
	st.MirrorBytes = s.core.MirrorBytes()
	for _, h := range s.core.Heaps() {
		hs := h.Heap.Stats()
		st.GrantedUnits += uint64(hs.Granted)
		st.FreeUnits += uint64(hs.Free)
		st.ForeignUnits += hs.ForeignFree
		inUse += uint64(hs.InUse)
		st.RefusedPlaces += hs.RefusedPlaces
	}
	st.FreeUnits += cached
	st.LiveUnits = inUse - min(inUse, st.LimboUnits+cached)
	st.Connections = map[string]string{}
	s.mu.Lock()
	for id, p := range s.mu.provider {
		if n := s.mu.nodes[id]; n != nil {
			st.Connections[n.GetName()] = p
		}
	}
	st.Paths = s.pathsLocked()
	s.mu.Unlock()
	st.Routes = s.routeStats()
	return st
}

// laneTotals sums what lanes counted, and the agendas of their sessions.
type laneTotals struct {
	ops, rounds                                  [index.NumKinds]uint64
	verbs                                        rdma.Counters
	absent, cacheHits, casLosses, unknown, notes uint64
	mirrorHits, mirrorStale                      uint64
	pins                                         uint64
	mended                                       uint64
	memoryWaits, leaked                          uint64
	went                                         session.Counts
}

// wentBy adds what an agenda counted since it had counted before.
func (t *laneTotals) wentBy(n, before session.Counts) {
	t.went.HandedBack += n.HandedBack - before.HandedBack
	t.went.Returned += n.Returned - before.Returned
	t.went.Received += n.Received - before.Received
	t.went.Refused += n.Refused - before.Refused
}

// add is called by the lane's owner, or while the lane has none.
func (t *laneTotals) add(l *engine.Lane) {
	for k := range t.ops {
		t.ops[k] += l.Stats.Ops[k]
		t.rounds[k] += l.Stats.Rounds[k]
	}
	n := l.Counters()
	t.verbs.Add(&n)
	t.cacheHits += l.Stats.CacheHits
	t.mirrorHits += l.Stats.MirrorHits
	t.mirrorStale += l.Stats.MirrorStale
	t.absent += l.Stats.Absent
	t.casLosses += l.Stats.CASLosses
	t.unknown += l.Stats.Unknown
	t.notes += l.Stats.Notes
	t.pins += l.Stats.Pins
	t.mended += l.Stats.Mended
	t.memoryWaits += l.Stats.MemoryWaits
	t.leaked += l.Stats.Leaked
}

// sum adds up the lanes of a session, each of them read by its owner or in between.
func (t *laneTotals) sum(x *laneTotals) {
	for k := range t.ops {
		t.ops[k] += x.ops[k]
		t.rounds[k] += x.rounds[k]
	}
	t.verbs.Add(&x.verbs)
	t.cacheHits += x.cacheHits
	t.mirrorHits += x.mirrorHits
	t.mirrorStale += x.mirrorStale
	t.absent += x.absent
	t.casLosses += x.casLosses
	t.unknown += x.unknown
	t.notes += x.notes
	t.pins += x.pins
	t.mended += x.mended
	t.memoryWaits += x.memoryWaits
	t.leaked += x.leaked
	t.wentBy(x.went, session.Counts{})
}

func (t *laneTotals) into(st *Stats) {
	for k := index.Get; k < index.NumKinds; k++ {
		st.Ops[k.String()], st.Rounds[k.String()] = t.ops[k], t.rounds[k]
	}
	st.Verbs, st.CacheHits, st.CASLosses, st.Unknown, st.Notes, st.Mended = t.verbs, t.cacheHits, t.casLosses,
		t.unknown, t.notes, t.mended
	st.HandedBackUnits, st.ReturnedUnits, st.ReceivedUnits, st.RefusedUnits = t.went.HandedBack, t.went.Returned,
		t.went.Received, t.went.Refused
	st.Absent, st.MirrorHits, st.MirrorStale = t.absent, t.mirrorHits, t.mirrorStale
	st.LostUnits, st.MemoryWaits, st.Pins = t.leaked, t.memoryWaits, t.pins
}
