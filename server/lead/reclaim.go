package lead

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

const (
	// rushEvery is the least time between two reclaim epochs that crowded sessions bring about. Hints live for ten
	// seconds then, since their age counts in reclaim epochs.
	rushEvery = 10 * time.Millisecond
	// rushEach is that time for each session there is: all of them are called for a reclaim epoch, and renew twice.
	rushEach = 2 * time.Millisecond
)

// rush moves E on for a session much of whose memory is in limbo, once every session has reported E. It reports whether
// others are to be called that do not know E. It does nothing where there are too many sessions to call all of them
// sooner than E moves anyway. No rule depends on how fast E moves.
func (l *Leader) rush(s *fsm.State, now time.Duration) (call bool) {
	every := max(rushEvery, time.Duration(l.sessions.n)*rushEach)
	if every >= l.opts.EpochInterval {
		return false
	}
	if epoch, least := l.Epochs(); least == epoch && now-l.advanced >= every {
		l.Run(s, 1)
		l.advanced = now
	}
	if l.epoch == l.rushed {
		return false
	}
	l.rushed, l.rushing = l.epoch, true
	return true
}

// rushCalls gives the sessions that do not know E in a rush, each once. Those that are crowded renew soon anyway.
func (l *Leader) rushCalls() (ids []uint32) {
	if !l.rushing {
		return nil
	}
	l.rushing = false
	for id, x := range l.sessions.all() {
		if x.votes && x.report < l.epoch && !x.crowded {
			l.rest(x, false)
			ids = append(ids, id)
		}
	}
	return ids
}

// reclaim begins a count of what is linked if memory is lost, or may be and somebody
// lacks it. The count tells what to recall; see Scrubbed.
func (p *plan) reclaim(pg *dirpb.PlacementGroup) {
	every := p.l.opts.ScrubInterval
	if every <= 0 || !p.free(pg) {
		return
	}
	m := p.l.memory(p.s, pg.Id)
	u := p.usage(pg.Id)
	last := max(m.counted, p.l.began)
	short, dirty := m.short(p.now), p.s.Heap(pg.Id).GetDirty()
	why := ""
	switch lost := m.lost(); {
	case u.GetGrantedUnits() == 0:
	case dirty && (short || lost > p.bearable(pg.Id) && p.now-last >= retryShort || p.now-last >= every):
		why, m.retry = ReasonDirty, retryShort
	case !m.known && (short || p.now-last >= every):
		why = ReasonTerm
	case short && p.now-last >= m.retry && p.l.missed(p.s, pg.Id, m),
		short && p.now-last >= min(m.retry, retryPieces) && p.toCompact(m):
		why = ReasonShort
		m.retry = min(2*m.retry, retryShortMost)
	case lost > p.bearable(pg.Id) && p.now-last >= every:
		why = ReasonLost
	}
	if why == "" {
		return
	}
	m.counted, m.claim = p.now, m.lost()
	p.start(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_SCRUB, PgId: pg.Id, Repair: true, Count: true, Reason: why}, pg.Id)
}

// bearable is how many units of a placement group may be lost before somebody looks for them.
func (p *plan) bearable(pg uint32) uint64 { return p.usage(pg).GetHeapUnits() / 20 }

// toCompact reports whether memory has been short for a while though enough is free, and
// nothing to speak of is on its way: compacting what waits for reclaim epochs would have it wait anew.
func (p *plan) toCompact(m *memory) bool {
	return m.piecesAt != 0 && p.now-m.piecesAt >= piecesFor
}

// notePieces notes since when every account has been one of memory in pieces.
func (m *memory) notePieces(now time.Duration) {
	a := &m.account
	switch least := max(uint64(m.need), a.Heap/16); {
	case !a.Short || !a.inPieces(m.need) || a.Limbo+a.Coming+a.Waiting >= least:
		m.piecesAt = 0
	case m.piecesAt == 0:
		m.piecesAt = max(now, 1)
	}
}

// piecesFor is longer than what a session has told is old.
const piecesFor = time.Second

// inPieces reports whether a place of so many units could be had if all that is free were
// in one piece.
func (a *Account) inPieces(need uint32) bool {
	return need > 1 && a.Room+a.Free+a.Foreign >= 4*uint64(need)+fsm.MoveReserve(a.Heap)
}

// gain is an extent, and about how much would be free after a recall of it that is not at
// anybody's hand now.
type gain struct {
	extent uint32
	units  uint64
	linked uint64
}

// gains are a placement group's extents by what recalling them in place would give, most
// first. A recall has what waits for reclaim epochs in an extent wait for them anew: if memory is short, those in which
// that is more are left out.
func (l *Leader) gains(s *fsm.State, pg uint32, short bool) (out []gain) {
	var waits map[uint32]uint64
	if short {
		_, least := l.Epochs()
		waits = make(map[uint32]uint64)
		for _, r := range s.Heap(pg).GetFree() {
			if !mature(r, least) {
				waits[r.Unit/layout.ExtentUnits] += uint64(r.Units)
			}
		}
	}
	for _, e := range s.Extents(pg) {
		if e.Recalled || e.Granted == 0 {
			continue
		}
		// Places that sessions have free, or in limbo, there are theirs to use, or to hand back.
		held := 0.0
		for id, units := range e.Homes {
			free := 1.0 // of one that has said nothing yet
			if x := l.sessions.of(id); x != nil {
				if h := x.held[pg]; h != nil && h.OwnUnits > 0 {
					free = min(1, float64(h.FreeUnits+h.LimboUnits)/float64(h.OwnUnits))
				}
			}
			held += float64(units) * free
		}
		used := e.Linked + uint64(held)
		if units := e.Granted - min(e.Granted, used); units > waits[e.Number] {
			out = append(out, gain{e.Number, units, e.Linked})
		}
	}
	slices.SortStableFunc(out, func(a, b gain) int { return cmp.Compare(b.units, a.units) })
	return out
}

// Scrubbed notes what a scrub or a count found, and queues the recalls that follow it. They are in place, of
// the extents that give most, up to the number needed. If memory is short because what is free lies in
// pieces, an extent is emptied that takes little to move. Call it once the job's end is part of the state,
// with the job as it was.
func (l *Leader) Scrubbed(s *fsm.State, j *dirpb.Job, now time.Duration) {
	if j.Kind != dirpb.JobKind_JOB_SCRUB || s.PG(j.PgId) == nil {
		return
	}
	m := l.memory(s, j.PgId)
	linked := int64(0)
	for _, n := range s.Heap(j.PgId).GetLastScrub().GetLinkedUnits() {
		linked += int64(n)
	}
	l.countEnds(s, j.PgId, linked)
	l.accounted = 0
	least := uint64(gainUnits)
	short := m.short(now)
	switch j.Reason {
	case ReasonRepair:
		least = 1
	case ReasonDirty, ReasonLost, ReasonTerm, ReasonShort:
		if short {
			least = max(gainUnitsShort, min(uint64(m.need), gainUnits))
		}
	default:
		return
	}
	need, bearable := uint64(1)<<63, uint64(1)<<63
	if j.Reason != ReasonRepair {
		p := l.plan(s, now)
		p.account()
		need = m.account.Lost
		if !evicts(s, j.PgId) {
			bearable = p.bearable(j.PgId)
		}
	}
	if evicts(s, j.PgId) && (j.Reason == ReasonShort || j.Reason == ReasonLost) {
		need = min(need, m.claim)
	}
	// In place a recall takes no room and no copy, and leaves pieces. If there is time and
	// room, an extent of which little is linked is emptied, so that it is free as a whole.
	stay := &fsmpb.StartJob{Kind: dirpb.JobKind_JOB_RECALL, PgId: j.PgId, InPlace: true}
	empty := &fsmpb.StartJob{Kind: dirpb.JobKind_JOB_RECALL, PgId: j.PgId}
	h := s.Heap(j.PgId)
	room, sum, moved := l.newView(s, now).supply(h).room, uint64(0), uint64(0)
	for _, g := range l.gains(s, j.PgId, short) {
		from := least
		if need-min(need, sum) > bearable {
			// else the same count comes again and again, and each extent gives too little
			from = min(from, gainUnitsShort)
		}
		if g.units < from || sum >= need || need < from || len(stay.Extents)+len(empty.Extents) == fsm.MaxRecalls {
			break
		}
		// Free units of an extent that is recalled take nothing in.
		room -= min(room, grantable(h, g.extent))
		q := stay
		if !short && g.linked <= layout.ExtentUnits/4 && moved+g.linked <= room/8 && s.CanRecall(j.PgId, g.extent) {
			q = empty
			moved += g.linked
		}
		q.Extents = append(q.Extents, g.extent)
		sum += g.units
	}
	for _, q := range []*fsmpb.StartJob{stay, empty} {
		if len(q.Extents) > 0 {
			slices.Sort(q.Extents)
			q.Reason = fmt.Sprintf("%d units are nobody's", sum)
			l.enqueue(q)
		}
	}
	if sum > 0 {
		m.retry = retryShort
		return
	}
	if !short || j.Reason != ReasonShort {
		return
	}
	l.compact(s, m, j.PgId)
}

// grantable is how much of an extent is granted to nobody.
func grantable(h *fsmpb.Heap, extent uint32) (units uint64) {
	if end := min((uint64(extent)+1)*layout.ExtentUnits, h.End); h.Watermark/layout.ExtentUnits == uint64(extent) {
		units = end - min(end, h.Watermark)
	}
	for _, r := range h.Free {
		if r.Unit/layout.ExtentUnits == extent {
			units += uint64(r.Units)
		}
	}
	return units
}

// compact has what lies in a stretch of an extent moved elsewhere, if most is free
// already, so that it is free in one piece: as long as the free memory elsewhere can take
// what lies there.
func (l *Leader) compact(s *fsm.State, m *memory, pg uint32) {
	h := s.Heap(pg)
	room := l.newView(s, 0).supply(h).room // anywhere
	// The last one was in vain if nothing was granted since: it may not have been emptied.
	most, last := uint64(windowMost), int64(-1)
	if m.window > 0 && l.planned-m.windowAt < shortFor+4*reuseHaste {
		most, last = max(m.window/2, uint64(m.need)), m.windowIn
	}
	for size := most; size >= uint64(m.need); size /= 2 {
		unit, free, here, ok := emptiest(h, size, last)
		if !ok || size-free == 0 || size-free > (room-min(room, here))/2 {
			continue
		}
		l.enqueue(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_RECALL, PgId: pg,
			Extents: []uint32{unit / layout.ExtentUnits}, InPlace: true,
			WindowUnit: unit, WindowUnits: uint32(size), WindowMost: m.need,
			Reason: fmt.Sprintf("no %d units in one piece are free", m.need)})
		m.retry, m.window, m.windowAt, m.windowIn = retryShort, size, l.planned, int64(unit/layout.ExtentUnits)
		return
	}
}

// windowMost is the longest stretch that is emptied at a time, units: 8 MiB.
const windowMost = layout.ExtentUnits / 2

// emptiest is the stretch of so many units, inside one extent but a certain one that is not
// being recalled, of which most is free; here is how much of that extent may be granted, which a recall
// of it takes away.
func emptiest(h *fsmpb.Heap, size uint64, not int64) (unit uint32, free, here uint64, ok bool) {
	recalled := func(x uint32) bool {
		return int64(x) == not || slices.ContainsFunc(h.Recalls, func(r *fsmpb.Recall) bool { return r.Extent == x })
	}
	hi, sum := 0, uint64(0) // the runs from lo on that lie in the stretch as a whole end before hi
	for lo, r := range h.Free {
		// Stretches begin where a run begins.
		if hi < lo {
			hi, sum = lo, 0
		}
		x, to := r.Unit/layout.ExtentUnits, uint64(r.Unit)+size
		n := uint64(0)
		for ; hi < len(h.Free) && h.Free[hi].Unit/layout.ExtentUnits == x; hi++ {
			at, units := uint64(h.Free[hi].Unit), uint64(h.Free[hi].Units)
			if at+units > to {
				n = to - min(to, at) // sticks out
				break
			}
			sum += units
		}
		n += sum
		if hi > lo {
			sum -= uint64(r.Units)
		}
		if n > free && to <= min((uint64(x)+1)*layout.ExtentUnits, h.End) && !recalled(x) {
			unit, free, ok = r.Unit, n, true
		}
	}
	for _, r := range h.Free {
		if ok && r.Unit/layout.ExtentUnits == unit/layout.ExtentUnits {
			here += uint64(r.Units)
		}
	}
	return unit, free, here, ok
}
