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

// Memory goes home. A session that unlinks a record in memory that another one was granted
// hands the place back in a renewal; it waits here, in the queue of its home, for that
// one's next renewal, with the ver of its next life. The queues are the leader's alone:
// they die with its term, and what was in them is lost until it is counted. A place
// without a home, and own memory that a session gives up, become free runs by a command
// (TakeBack). docs/protocol.md, "Memory goes home", has the rules H1 to H8.

const (
	// shortFor is how long a placement group counts as short after a grant found too little.
	shortFor = 3 * time.Second
	// gather is how long what comes back is collected before a command makes it free, if
	// nobody waits for it.
	gather = 250 * time.Millisecond
	// accountEvery is the least time between two looks at all accounts.
	accountEvery = 250 * time.Millisecond
	// lostWindow is how long memory must count as lost without a break before it is
	// believed: sessions' reports are up to a second old.
	lostWindow = 4 * time.Second

	maxDelivered = 1 << 15 // places in one reply
	maxHandBacks = 1 << 16 // places taken of one renewal
	maxReturns   = 1 << 12 // runs taken of one renewal
	maxQueue     = 1 << 20 // places that wait for one home, and runs of one placement group for a TakeBack
	maxNet       = 1 << 48 // units that a session may say it has linked, net
	maxBacks     = 1 << 13 // runs in one TakeBack

	// floorUnits is what a session may always keep free of a placement group if there is
	// room (16 MiB), floorShort if there is not (1 MiB); both are cut to a part of it.
	floorUnits = 1 << 18
	floorShort = 1 << 14

	// A recall is worth it from so many units of one extent on: if nobody lacks memory,
	// and if somebody does.
	gainUnits      = layout.ExtentUnits / 8
	gainUnitsShort = layout.ExtentUnits / 64

	// retryShort is how soon a count that found nothing is repeated while memory is short,
	// at first and at last.
	retryShort, retryShortMost = time.Second, time.Minute
	// retryPieces is the most if enough is free, in pieces.
	retryPieces = 4 * time.Second
	// retryDoubted is the longest time between two counts for which writers wait because the last one is
	// in doubt: if sessions link so much that each count is, some will be told that memory is full.
	retryDoubted = 4 * time.Second
)

// place is a free place, past limbo.
type place struct {
	pg, generation, unit, units uint32
	ver                         uint16 // of its next life
	mark                        uint64 // fsm.Heap.RecallSeq when it was accepted
	after                       uint64 // it is in limbo until the least reclaim epoch in use is as great
}

// memory is what the leader knows of a placement group's memory.
type memory struct {
	generation uint32
	backs      []*fsmpb.Back // to be proposed
	since      time.Duration // of the oldest

	// Linked units are base + what the sessions that are open say they have linked, net.
	base  int64
	known bool // base is counted, not guessed
	// A count takes time, and sessions say what they have linked about once a second: base is wrong by
	// what they linked and unlinked between the last word before the count and the first one after it.
	// doubt is how much that is, by as many sessions as have spoken since; began and unsaid are what
	// sessions had said when the count began, the former while it goes on, the latter of those that have
	// not spoken since.
	doubt         uint64
	began, unsaid map[uint32]int64

	shortAt    time.Duration // 0: never
	shortSince time.Duration // when it began
	need       uint32        // the largest place that was not had while short

	window   uint64        // units of the stretch that was to be emptied last
	windowIn int64         // in this extent
	windowAt time.Duration // when
	piecesAt time.Duration // since when enough has been free, in pieces; 0: it is not
	counted  time.Duration // when a count was begun last
	claim    uint64        // what counted as lost for some time when it was begun
	retry    time.Duration // between two while memory is short
	relief   uint64        // Leader.relief, as of
	reliefAt time.Duration // 0: never looked

	account Account
	low     [2]uint64     // least lost of this window and of the one before
	lowAt   time.Duration // when this window began
}

// Account is how a placement group's memory is used, in units; see dirpb.PGUsage.
type Account struct {
	Heap, Granted, Recalled                  uint64
	Room, Waiting                            uint64 // not granted: may be now, and after some reclaim epochs
	Live, Free, Foreign, Limbo, Coming, Lost uint64
	Short                                    bool
}

// inherit notes what an earlier leader knew and this one does not.
func (l *Leader) inherit(s *fsm.State) {
	for _, u := range s.Usage() {
		if u.GrantedUnits > 0 {
			l.memory(s, u.PgId).known = false
		}
	}
}

func (l *Leader) memory(s *fsm.State, pg uint32) *memory {
	m, g := l.memories[pg], s.PG(pg).GetGeneration()
	if m == nil || m.generation != g {
		m = &memory{generation: g, known: true, retry: retryShort}
		l.memories[pg] = m
	}
	return m
}

// ---- hand-backs ------------------------------------------------------------

// handBack takes free places of its own namespace that session x, whose id is from and which
// lives or has closed in good order, hands back. Places that may still be in limbo are so until the reclaim
// epoch after has passed.
func (l *Leader) handBack(s *fsm.State, now time.Duration, from uint32, x *session, runs []*dirpb.FreePlaces, after uint64) {
	left := maxHandBacks
	for _, r := range runs {
		pg := s.PG(r.PgId)
		if pg == nil || pg.NamespaceId != x.namespace || x.readOnly {
			continue
		}
		mark := s.Heap(r.PgId).GetRecallSeq()
		unit := uint64(r.Unit)
		for _, x := range r.Places {
			p := place{pg: r.PgId, generation: r.Generation, unit: uint32(unit), units: x >> 10, ver: uint16(x & (1<<10 - 1)), mark: mark, after: after}
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
			l.memory(s, r.PgId).back(now, &fsmpb.Back{PgId: r.PgId, Generation: r.Generation, Unit: r.Unit, Units: r.Units,
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
		if len(m.backs) == 0 || now-m.since < gather && len(m.backs) < maxBacks && !m.short(now) && l.opts.EpochInterval > 0 {
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
			if a := out[n-1]; a.Unit+a.Units == b.Unit && b.Unit%layout.ExtentUnits != 0 && a.Generation == b.Generation &&
				a.SessionId == b.SessionId && a.Fresh == b.Fresh && a.Mark == b.Mark {
				out[n-1] = &fsmpb.Back{PgId: a.PgId, Generation: a.Generation, Unit: a.Unit, Units: a.Units + b.Units, SessionId: a.SessionId, Fresh: a.Fresh, Mark: a.Mark}
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
		if home, _ := s.HomeOf(p.pg, p.unit, p.units); home != id || !s.Settled(p.pg, p.generation, p.unit, p.units, p.mark) {
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
func (l *Leader) ended(s *fsm.State, id uint32) {
	x := l.sessions.of(id)
	if x == nil {
		return
	}
	l.forgetSession(id)
	for pg, h := range ordered.All(x.held) {
		if m := l.memories[pg]; m != nil && m.generation == h.Generation {
			m.base += h.NetUnits
		}
	}
	for _, p := range x.queue {
		l.route(s, l.planned, id, p)
	}
}

// ---- accounts --------------------------------------------------------------

// hold notes what session x, whose id is from and which may write, says that it holds, of its own namespace and not more than
// there is.
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

// Short notes that a grant of a place of so many units found too little.
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
		sums[pg.Id] = &Account{Heap: u.GetHeapUnits(), Granted: u.GetGrantedUnits(), Room: x.room, Waiting: x.waits, Recalled: u.GetRecalledUnits()}
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

// hastens reports whether memory of a placement group that waits for reclaim epochs is waited for: by writers of a store,
// which have no other, by sessions that are poor, and where so much waits that what can be evicted is little.
func (l *Leader) hastens(s *fsm.State, pg uint32, a *Account) bool {
	return a.Short && a.Waiting > 0 && (!evicts(s, pg) || a.Waiting > a.Heap/8 || l.anyPoor(s, pg))
}

// evicts reports whether a placement group is one of a cache.
func evicts(s *fsm.State, pg uint32) bool {
	return s.Namespace(s.PG(pg).GetNamespaceId()).GetMode() == dirpb.NamespaceMode_NAMESPACE_CACHE
}

// missed reports whether so much of a placement group that is short seems lost that a count is worth it. Writers of a store have
// no other memory, so what is lost at the moment is enough. Sessions of a cache evict; between two words of theirs they link
// and unlink much of it, and a recall by such a mistake takes from them what they hold. There it has to be lost for a while.
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
		if l.opts.ScrubInterval > 0 && (h.GetDirty() || !m.known || m.doubted(a.Heap) && m.retry <= retryDoubted || l.silent(s, namespace, m.shortSince, now)) {
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
		if y.Life != dirpb.SessionLife_SESSION_LIVE || now-x.heard > min(l.opts.Lease/2, silentAfter) || len(x.held) > 0 && x.told <= since {
			return true
		}
	}
	return false
}

// silentAfter is several times as long as sessions are silent between two renewals.
const silentAfter = 500 * time.Millisecond

// ---- shares of a cache -------------------------------------------------------

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
