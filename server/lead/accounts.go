package lead

import (
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/ordered"
	"github.com/kvd-project/kvd/server/fsm"
)

// hold notes what session x, whose id is from and which may write, says that it holds, of its own namespace and not
// more than there is.
func (l *Leader) hold(s *fsm.State, from uint32, x *session, held []*dirpb.Held) {
	for i, h := range held {
		pg := s.PG(h.PgId)
		if i == maxReturns {
			return
		}
		if pg == nil || pg.Generation != h.Generation || pg.NamespaceId != x.namespace || x.readOnly {
			continue
		}
		if heap := s.Heap(h.PgId); max(h.OwnUnits, h.FreeUnits, h.ForeignUnits, h.LimboUnits) > heap.End-heap.Start ||
			h.NetUnits > maxNet || h.NetUnits < -maxNet {
			continue
		}
		if x.held == nil {
			x.held = make(map[uint32]*dirpb.Held)
		}
		x.held[h.PgId] = h
		if m := l.memories[h.PgId]; m != nil {
			m.heardSince(from, h.NetUnits)
		}
	}
}

// countBegins notes what sessions have said until now that they have linked.
func (l *Leader) countBegins(s *fsm.State, pg uint32) {
	m := l.memory(s, pg)
	m.began = make(map[uint32]int64)
	for id, x := range l.writers {
		m.began[id] = x.held[pg].GetNetUnits()
	}
}

// countEnds notes the units that are linked, by a count that has just ended.
func (l *Leader) countEnds(s *fsm.State, pg uint32, linked int64) {
	m := l.memory(s, pg)
	if m.began == nil { // another leader's count
		l.countBegins(s, pg)
	}
	m.base, m.known, m.low = linked, true, [2]uint64{}
	m.doubt, m.unsaid, m.began = 0, m.began, nil
	for id, x := range l.writers {
		net := x.held[pg].GetNetUnits()
		m.base -= net
		if _, ok := m.unsaid[id]; !ok {
			m.unsaid[id] = net
		}
	}
}

// heardSince notes the first word of a session after a count.
func (m *memory) heardSince(session uint32, net int64) {
	if before, ok := m.unsaid[session]; ok {
		m.doubt += uint64(max(net, before) - min(net, before))
		delete(m.unsaid, session)
	}
}

// doubted reports whether the last count may be wrong by so much that memory is lost which passes for
// linked.
func (m *memory) doubted(heap uint64) bool { return m.doubt > heap/32 }

// Short notes that a grant of a place of that number of units found too little.
func (l *Leader) Short(s *fsm.State, pg, units uint32, now time.Duration) {
	if s.PG(pg) == nil {
		return
	}
	m := l.memory(s, pg)
	if !m.short(now) {
		m.need, m.retry, m.shortSince = 0, retryShort, now
	}
	m.shortAt, m.need = max(now, 1), max(m.need, units)
	l.shortUntil = max(l.shortUntil, m.shortAt+shortFor)
}

// Granted notes that a grant was made.
func (l *Leader) Granted(s *fsm.State, pg uint32) {
	if s.PG(pg) != nil {
		l.memory(s, pg).window = 0
	}
}

// live is how many units of a placement group hold records, by the last account.
func (l *Leader) live(s *fsm.State, pg uint32) (units uint64) {
	if m := l.memories[pg]; m != nil && m.generation == s.PG(pg).GetGeneration() {
		units = m.account.Live
	}
	return units
}

func (m *memory) short(now time.Duration) bool { return m.shortAt != 0 && now-m.shortAt < shortFor }

// Account is how a placement group's memory is used, as of a moment ago.
func (l *Leader) Account(s *fsm.State, pg uint32, now time.Duration) Account {
	if m := l.memories[pg]; m != nil && now-l.accounted >= accountEvery {
		l.plan(s, now).account()
	}
	a := l.memory(s, pg).account
	a.Short = l.memory(s, pg).short(now)
	return a
}

// account works out all accounts, unless that was just done.
func (p *plan) account() {
	l := p.l
	if l.opts.EpochInterval == 0 && l.opts.ScrubInterval == 0 {
		return // nothing would follow
	}
	if l.accounted != 0 && p.now-l.accounted < accountEvery && l.opts.EpochInterval > 0 {
		return
	}
	l.accounted = max(p.now, 1)
	l.hasty = false
	sums := make(map[uint32]*Account)
	net := make(map[uint32]int64)
	used := make(map[uint32]uint64) // granted, by namespace
	for _, pg := range p.pgs {
		used[pg.NamespaceId] += p.usage(pg.Id).GetGrantedUnits()
	}
	for _, pg := range p.pgs {
		u := p.usage(pg.Id)
		x := p.supply(p.s.Heap(pg.Id))
		if limit := p.s.Namespace(pg.NamespaceId).GetLimitBytes() / layout.UnitSize; limit != 0 {
			x.room = min(x.room, limit-min(limit, used[pg.NamespaceId]))
		}
		sums[pg.Id] = &Account{Heap: u.GetHeapUnits(), Granted: u.GetGrantedUnits(), Room: x.room, Waiting: x.waits,
			Recalled: u.GetRecalledUnits()}
	}
	for _, x := range l.writers {
		for pg, h := range x.held {
			if a := sums[pg]; a != nil && h.Generation == p.s.PG(pg).Generation {
				a.Free += h.FreeUnits
				a.Foreign += h.ForeignUnits
				a.Limbo += h.LimboUnits
				net[pg] += h.NetUnits
			}
		}
		for _, q := range x.queue {
			if a := sums[q.pg]; a != nil {
				a.Coming += uint64(q.units)
			}
		}
	}
	for id := range l.memories {
		if sums[id] == nil {
			delete(l.memories, id)
		}
	}
	for id, a := range ordered.All(sums) {
		m := l.memory(p.s, id)
		// Memory of sessions that have not said yet how they use it is in use.
		unsaid := int64(0)
		for _, h := range p.s.Heap(id).GetHomes() {
			if x := l.sessions.of(h.SessionId); x == nil || x.held[id] == nil {
				unsaid += int64(h.Units)
			}
		}
		for _, b := range m.backs {
			a.Coming += uint64(b.Units)
		}
		named := a.Free + a.Foreign + a.Limbo + a.Coming
		if m.known {
			a.Live = uint64(min(max(m.base+net[id]+unsaid, 0), int64(a.Granted)))
		} else {
			a.Live = a.Granted - min(a.Granted, named)
		}
		a.Lost = a.Granted - min(a.Granted, named+a.Live)
		if a.Recalled > 0 {
			a.Lost = min(a.Lost, m.account.Lost) // what sessions have forgotten is not lost
		}
		a.Short = m.short(p.now)
		m.account = *a
		m.notePieces(p.now)
		if p.now-m.lowAt >= lostWindow {
			m.low[1], m.low[0], m.lowAt = m.low[0], a.Lost, p.now
		}
		m.low[0] = min(m.low[0], a.Lost)
		l.hasty = l.hasty || l.hastens(p.s, id, a)
	}
	l.share(p)
}

// hastens reports whether memory of a placement group that waits for reclaim epochs is waited for: by writers of a
// store, which have no other, by sessions that are poor, and where so much waits that what can be evicted is little.
func (l *Leader) hastens(s *fsm.State, pg uint32, a *Account) bool {
	return a.Short && a.Waiting > 0 && (!evicts(s, pg) || a.Waiting > a.Heap/8 || l.anyPoor(s, pg))
}

// evicts reports whether a placement group is one of a cache.
func evicts(s *fsm.State, pg uint32) bool {
	return s.Namespace(s.PG(pg).GetNamespaceId()).GetMode() == dirpb.NamespaceMode_NAMESPACE_CACHE
}

// missed reports whether so much of a placement group that is short seems lost that a count is worth it. Writers of a
// store have no other memory, so what is lost at the moment is enough. Sessions of a cache evict; between two words of
// theirs they link and unlink much of it, and a recall by such a mistake takes from them what they hold. There it has
// to be lost for a while.
func (l *Leader) missed(s *fsm.State, pg uint32, m *memory) bool {
	heap := m.account.Heap
	least := max(uint64(m.need), heap/32)
	if evicts(s, pg) {
		return m.lost() > least
	}
	return m.account.Lost > least || m.doubted(heap)
}

// lost is how much counts as lost for some time now.
func (m *memory) lost() uint64 { return min(m.low[0], m.low[1]) }

// supply is what a session is told of its namespace's placement groups: of all, or of
// those where something is to be done.
func (l *Leader) supply(s *fsm.State, now time.Duration, x *session, namespace uint32, all bool) (out []*dirpb.Supply) {
	if !all && now >= l.shortUntil && len(x.give) == 0 {
		return nil // as nearly always
	}
	sessions := uint64(s.SessionsIn(namespace))
	for _, pg := range s.PGs(namespace) {
		m := l.memory(s, pg.Id)
		short := m.short(now)
		if !all && !short && x.give[pg.Id] == 0 {
			continue
		}
		units := shareable(s, pg)
		q := &dirpb.Supply{PgId: pg.Id, Short: short, ShareUnits: units / max(1, sessions), GiveUnits: x.give[pg.Id]}
		if q.FloorUnits = min(floorUnits, units/(4*max(1, sessions))); short {
			q.FloorUnits = min(floorShort, units/(32*max(1, sessions)))
		}
		if all { // who has something to report hears what became of it
			q.LiveUnits = l.Account(s, pg.Id, now).Live
		}
		out = append(out, q)
	}
	return out
}

// Coming is about how much memory is on its way when a grant of a place of these units found too little. It
// is 0 if all of it is in use. A session that has said nothing since memory became short may have any amount.
func (l *Leader) Coming(s *fsm.State, namespace, pg, units uint32, now time.Duration) (coming uint64) {
	pgs := []uint32{pg}
	if w := s.Namespace(namespace); w.GetLimitBytes() != 0 {
		pgs = pgs[:0]
		for _, o := range s.PGs(namespace) {
			pgs = append(pgs, o.Id)
		}
	}
	least := uint64(units)
	for _, id := range pgs {
		a := l.Account(s, id, now)
		coming += a.Waiting + a.Recalled + a.Free + a.Foreign + a.Limbo + a.Coming + a.Lost
		least = max(least, a.Heap/256)
		h := s.Heap(id)
		m := l.memory(s, id)
		if l.opts.ScrubInterval > 0 && (h.GetDirty() || !m.known || m.doubted(a.Heap) && m.retry <= retryDoubted ||
			l.silent(s, namespace, m.shortSince, now)) {
			coming += least // perhaps
		}
		if m.reliefAt == 0 || now-m.reliefAt >= reliefEvery {
			m.relief, m.reliefAt = l.relief(s, id), max(now, 1)
		}
		if coming += m.relief * least; a.inPieces(units) {
			coming += least
		}
	}
	if coming < least {
		return 0
	}
	return coming
}

// relief is how many things are under way that may give a placement group memory back.
func (l *Leader) relief(s *fsm.State, pg uint32) (n uint64) {
	for _, j := range s.Jobs() {
		if (j.PgId == pg || j.TargetPgId == pg) && j.Kind != dirpb.JobKind_JOB_JOIN {
			n++
		}
	}
	if l.relieving(s, pg) {
		n++
	}
	return n
}

// reliefEvery is the least time between two looks at what relieves a placement group: every
// writer that starves asks several times a second, and a heap may be in many pieces.
const reliefEvery = 50 * time.Millisecond

// silent reports whether a session of a namespace that may hold memory is being fenced,
// has not been heard for so long that it may be, or has not said since a moment what it
// holds.
func (l *Leader) silent(s *fsm.State, namespace uint32, since, now time.Duration) bool {
	for id, x := range l.writers {
		y := s.Session(id)
		if y == nil || y.NamespaceId != namespace {
			continue
		}
		if y.Life != dirpb.SessionLife_SESSION_LIVE || now-x.heard > min(l.opts.Lease/2, silentAfter) ||
			len(x.held) > 0 && x.told <= since {
			return true
		}
	}
	return false
}

// silentAfter is several times as long as sessions are silent between two renewals.
const silentAfter = 500 * time.Millisecond
