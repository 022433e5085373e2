// Package session is one session's side of the control path: what it must ask of its
// directory and of memory nodes, and when. It is a pure machine, an [Agenda] above an engine.Core, which the
// client performs with goroutines and the simulator as choices; the data path is
// internal/engine.
//
// Start with [Agenda]. Its methods may be called concurrently; it owns no buffers, and a
// request that it has given belongs to whoever performs it. The form is that of server/lead: a
// machine whose time and whose answers come from outside.
package session

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/internal/heap"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/rdma"
)

// Agenda is what a session must ask, and when: of its directory renewals of its lease,
// with which it acknowledges maps and hands memory back, grants of memory, whether other
// sessions are fenced, and splits; and of memory nodes connections. It is a
// machine without I/O, clocks or goroutines, in the manner of server/lead: lanes say what
// they miss (its methods Want… are most of an engine.Control), [Agenda.Due]
// gives what is to be asked now, whoever performs it calls [Agenda.Answer] once with what
// came of it, which tells the lanes, and [Agenda.Next] is when to look again. The client
// performs it with goroutines, the simulator as choices.
//
// Memory goes home by these rules (docs/protocol.md, "Memory goes home"): what a request
// hands back is forgotten before it is sent and never put back, whatever becomes of the
// request; renewals are numbered, and only the reply to the latest one brings places, once;
// a map is acknowledged by a renewal and nowhere else, and not while a grant is under way
// that was asked for under an older one.
//
// Its methods may be called concurrently.
type Agenda struct {
	core *engine.Core
	o    AgendaOptions

	mu struct {
		sync.Mutex
		term uint64 // the greatest that the directory has shown

		renewing bool   // one is under way
		number   uint64 // of the latest renewal, also Core's count of them
		next     int64  // when one is due anyway
		sent     int64  // when the one was sent that was answered last
		busy     bool   // operations were performed since the last one
		wasBusy  bool   // and before it
		awaits   uint64 // number of the renewal that was answered and said last that places are in limbo
		hurry    bool
		called   bool // somebody waits for what the session reports
		told     acks
		ackAt    int64 // when what is not acknowledged is looked at again, 0: never
		ackPause int64
		backlog  bool // the last one could not take all that is to go

		wants  map[uint32]uint32 // units of the largest place that is missed, by placement group
		grants map[uint32]*grant // under way, by placement group
		early  []*dirpb.GrantExtentReply
		ending bool // no more grants are asked for
		unsure bool // more may have been granted than was taken in
		pgs    map[uint32]*agendaPG
		held   int64 // when it was told what the session holds

		fences map[uint32]*question // whether a session is fenced, by its id
		splits map[uint32]*question // by shard
		links  map[end]*link        // connections that are missed
	}
	handedBack, returned, received, refused atomic.Uint64
}

// AgendaOptions configure an Agenda; durations in nanoseconds.
type AgendaOptions struct {
	// Renew is the time between two renewals.
	Renew int64
	// Term is the directory's at the opening of the session.
	Term uint64
	// RefusedPause is how soon a grant is asked for again that found nothing. FencePause and
	// SplitPause are how soon it is asked again whether a session is fenced, and for a split,
	// once there was an answer.
	RefusedPause, FencePause, SplitPause int64
	// DialPause is how soon a connection is dialed again the first time; from then on the
	// pause doubles, up to DialPauseMost. DownPause is how long a lane waits for a memory node
	// that the map does not have up before it learns so.
	DialPause, DialPauseMost, DownPause int64
	// ReadOnly: it needs no memory.
	ReadOnly bool
}

// AskKind is what an Ask is about.
type AskKind uint8

const (
	AskRenew  AskKind = 1 + iota // a renewal of the lease
	AskGrant                     // memory
	AskFence                     // whether a session is fenced
	AskSplit                     // a shard to be split
	AskHangup                    // a queue pair to be closed that a lane gives up
	AskDial                      // a queue pair to be connected
)

// Ask is one request: to the directory, or, of the last two kinds, to a memory node.
type Ask struct {
	Kind  AskKind
	Renew *dirpb.RenewRequest        // AskRenew
	Grant *dirpb.GrantExtentRequest  // AskGrant
	Fence *dirpb.SessionStateRequest // AskFence
	Split *dirpb.RequestSplitRequest // AskSplit

	Lane        *engine.Lane // AskHangup, AskDial: whose connection
	Node        uint32       // AskHangup, AskDial: and to which memory node
	QP          *rdma.QP     // AskHangup: to be closed; the performer's until the answer
	Incarnation uint64       // AskHangup: of the memory node that QP reaches

	grant *grant
}

// Reply is what came of an Ask: of its kind, or Err.
type Reply struct {
	Renew *dirpb.RenewReply
	Grant *dirpb.GrantExtentReply
	Fence *dirpb.SessionStateReply
	Split *dirpb.RequestSplitReply

	QP          *rdma.QP // AskDial: connected; the lane's from now on
	Dev         int      // AskDial: the index of QP's device
	Incarnation uint64   // AskDial: of the memory node that QP reaches

	Err error
	// Lost says that Err will not be otherwise: the connection cannot be had (AskDial).
	Lost bool
	// Sent is when the request that was answered was sent (Options.Nanos).
	Sent int64
}

// acks is what a renewal says of map versions.
type acks struct{ acked, quiesced uint64 }

// grant is a call under way.
type grant struct {
	view  uint64 // map version under which it was asked for
	units uint32 // of a place
}

// agendaPG is what the Agenda knows of a placement group.
type agendaPG struct {
	grow     uint32 // units to ask for next
	notUntil int64  // no grant is asked for before
	samples  [4]sample
	own      int64  // when own memory was last looked at for what is too much
	lacked   uint32 // units of the largest place that was missed lately, and when
	lackedAt int64
	told     *dirpb.Held
}

// sample is Flow.Taken at a time.
type sample struct {
	at    int64
	taken uint64
}

const (
	firstGrant = 1 << 14 // units: 1 MiB
	maxGrant   = layout.ExtentUnits

	// A renewal hands back so many places at most, and more where memory is short.
	handBacks, handBacksShort = 1 << 14, 1 << 15
	// It returns so many own runs at most, none shorter than leastReturn units unless memory
	// is short.
	returnsMost, leastReturn = 1 << 10, 64

	// lackedFor is how long a session that missed memory keeps what it could have used.
	lackedFor = int64(3 * time.Second)

	sampleEvery = int64(time.Second)
	heldEvery   = int64(time.Second)
	heldShort   = int64(200 * time.Millisecond)
	// ackPause is how soon operations of an older map are looked at again, at first.
	ackPause = int64(500 * time.Microsecond)
)

// NewAgenda makes the agenda of a session that was just opened.
func NewAgenda(c *engine.Core, o AgendaOptions) *Agenda {
	a := &Agenda{core: c, o: o}
	a.mu.term = o.Term
	a.mu.ackPause = ackPause
	a.mu.wants, a.mu.grants, a.mu.pgs = map[uint32]uint32{}, map[uint32]*grant{}, map[uint32]*agendaPG{}
	a.mu.fences, a.mu.splits, a.mu.links = map[uint32]*question{}, map[uint32]*question{}, map[end]*link{}
	a.mu.next = c.Nanos() + o.Renew
	return a
}

// WantMemory notes that an operation misses a place of so many units.
func (a *Agenda) WantMemory(pg, units uint32) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.mu.wants[pg] = max(a.mu.wants[pg], units)
}

// Ending has no grant asked for any more, and reports whether none is under way: what
// comes of it is lost to a session that closes before.
func (a *Agenda) Ending() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.mu.ending = true
	return len(a.mu.grants) == 0
}

// Hurry makes a renewal due: what is in limbo is waited for.
func (a *Agenda) Hurry() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.mu.hurry = true
}

// Called makes a renewal due, and another one at once behind it if its reply brings a later
// epoch, which is what somebody waits to hear of.
func (a *Agenda) Called() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.mu.hurry, a.mu.called = true, true
}

// Busy notes that operations are performed: the lease of such a session is not to become
// short while no directory node leads.
func (a *Agenda) Busy() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.mu.busy = true
}

// Stir ends the quiet of a session that has something to ask for or to tell, and reports
// whether it was quiet: then Next has changed. See [engine.Options].Stirred.
func (a *Agenda) Stir() bool {
	if !a.core.Quiet() {
		return false
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.stirLocked()
}

func (a *Agenda) stirLocked() bool {
	if !a.core.SetQuiet(false) {
		return false
	}
	a.mu.next = min(a.mu.next, max(a.mu.sent+a.o.Renew, a.core.Nanos()))
	return true
}

// NewMap notes that a map was installed.
func (a *Agenda) NewMap() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.mu.ackPause = ackPause
}

// Due gives what is to be asked now, each to be answered once; see DueWants and
// DueRenewal.
func (a *Agenda) Due(oldest func() (epoch uint64, ok bool)) []Ask {
	asks := a.DueWants()
	if q, ok := a.DueRenewal(oldest); ok {
		asks = append(asks, q)
	}
	return asks
}

// DueWants gives what is to be asked now because lanes miss it, in a fixed order: one grant
// of a placement group at a time, one question about a session, one split of a shard, and one
// hang-up or dial of a lane's connection to a memory node.
func (a *Agenda) DueWants() (asks []Ask) {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := a.core.Nanos()
	a.takeEarly()
	for _, pg := range slices.Sorted(maps.Keys(a.mu.wants)) {
		if q, ok := a.grantDue(pg, now); ok {
			asks = append(asks, q)
		}
	}
	asks = append(asks, a.fencesDue(now)...)
	asks = append(asks, a.splitsDue(now)...)
	return append(asks, a.linksDue(now)...)
}

// DueRenewal gives the renewal that is to be sent now, one at a time. oldest is the least
// reclaim epoch at the start of an operation under way, if there is one; lanes have been
// pumped.
func (a *Agenda) DueRenewal(oldest func() (epoch uint64, ok bool)) (Ask, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := a.core.Nanos()
	if !a.renewalDue(now) {
		return Ask{}, false
	}
	return a.renewal(now, oldest), true
}

// Next is when something is due if nothing happens before (Options.Nanos).
func (a *Agenda) Next() int64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	next := int64(math.MaxInt64)
	if !a.mu.renewing {
		next = a.mu.next
		if at := a.mu.ackAt; at != 0 {
			next = min(next, at)
		}
	}
	for pg := range a.mu.wants {
		if p := a.mu.pgs[pg]; p != nil && a.askable(pg) {
			next = min(next, p.notUntil)
		}
	}
	return min(next, a.questionsNext(), a.linksNext())
}

// acked is what may be acknowledged now: no operation of an older map is under way, nor
// a grant.
func (a *Agenda) acked() acks {
	acked, quiesced := a.core.Acked()
	for _, g := range a.mu.grants {
		acked = min(acked, g.view)
	}
	return acks{acked, quiesced}
}

// renewalDue reports whether a renewal is to be sent now.
func (a *Agenda) renewalDue(now int64) bool {
	if a.mu.renewing {
		return false
	}
	k := a.acked()
	a.mu.ackAt = 0
	if v := a.core.View(); v != nil && (k.acked < v.Version || k.quiesced < v.Version) {
		a.mu.ackAt = now + a.mu.ackPause
		a.mu.ackPause = min(2*a.mu.ackPause, max(a.o.Renew, 1))
	}
	// A map change waits for every session, so a new map is acknowledged at once.
	return a.mu.hurry || now >= a.mu.next || k != a.mu.told
}

// renewal makes a renewal, which begins here: what it hands back is forgotten.
func (a *Agenda) renewal(now int64, oldest func() (uint64, bool)) Ask {
	k := a.acked()
	q := &dirpb.RenewRequest{SessionId: a.core.Session(), ReportEpoch: a.core.Epoch(),
		AckedMapVersion: k.acked, QuiescedMapVersion: k.quiesced, Term: a.mu.term}
	if e, ok := oldest(); ok && e < q.ReportEpoch {
		q.ReportEpoch = e
	}
	if !a.o.ReadOnly {
		a.handBack(q, now)
	}
	a.mu.told, a.mu.hurry, a.mu.renewing = k, false, true
	a.mu.wasBusy, a.mu.busy = a.mu.busy, false
	a.core.SetQuiet(false)
	a.mu.number = a.core.BeginRenew()
	q.Number = a.mu.number
	q.InLimbo = a.core.InLimbo() && a.core.LastUnlink() >= a.mu.awaits
	return Ask{Kind: AskRenew, Renew: q}
}

// Again makes another try of a renewal whose fate is not known: a renewal of its own,
// whose reply covers what was unlinked before it is sent, and without what the first one
// handed back. It does not answer the first.
func (a *Agenda) Again(first Ask) Ask {
	a.mu.Lock()
	defer a.mu.Unlock()
	q := first.Renew
	a.untold()
	a.mu.number = a.core.BeginRenew()
	return Ask{Kind: AskRenew, Renew: &dirpb.RenewRequest{SessionId: q.SessionId, ReportEpoch: q.ReportEpoch,
		AckedMapVersion: q.AckedMapVersion, QuiescedMapVersion: q.QuiescedMapVersion, Term: a.mu.term, Number: a.mu.number, InLimbo: q.InLimbo}}
}

// Answer takes what came of an Ask.
func (a *Agenda) Answer(q Ask, r Reply) {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch now := a.core.Nanos(); q.Kind {
	case AskRenew:
		a.renewed(q, r, now)
	case AskGrant:
		a.granted(q, r, now)
	case AskFence:
		a.fenceAnswered(q, r, now)
	case AskSplit:
		a.splitAnswered(q, r, now)
	case AskHangup:
		a.hungUp(q)
	case AskDial:
		a.dialed(q, r, now)
	}
}

// renewed takes what came of a renewal.
func (a *Agenda) renewed(q Ask, r Reply, now int64) {
	latest := q.Renew.Number == a.mu.number
	if latest {
		a.mu.renewing = false
		a.mu.next = now + a.o.Renew
	}
	if r.Err != nil {
		a.mu.told = acks{} // said again with the next one
		a.untold()
		return
	}
	p := r.Renew
	a.core.EndRenew(q.Renew.Number, p.GetEpoch(), p.GetMinEpoch(), r.Sent+int64(p.GetLeaseMillis())*int64(time.Millisecond))
	a.core.SetNewest(q.Renew.Number, p.GetMapVersion())
	if !latest || p.GetTerm() < a.mu.term {
		return // another one was sent since, or a leadership answers that has ended
	}
	a.mu.next = max(r.Sent+a.o.Renew, now)
	if a.mu.backlog {
		a.mu.next = now + a.o.Renew/4
	}
	a.mu.sent = r.Sent
	a.mu.hurry = a.mu.hurry || a.mu.called && p.GetEpoch() > q.Renew.ReportEpoch
	a.mu.called = false
	switch {
	case p.GetTerm() != a.mu.term:
		a.mu.awaits = 0 // this leader has not heard of it
	case q.Renew.InLimbo:
		a.mu.awaits = q.Renew.Number
	}
	a.mu.term = p.GetTerm()
	a.supplied(p.GetSupply(), len(q.Renew.Held) > 0)
	for _, f := range p.GetDeliveries() {
		unit := uint64(f.GetUnit())
		for _, x := range f.GetPlaces() {
			pl := heap.Place{Unit: uint32(unit), Units: x >> 10, Ver: uint16(x & (1<<10 - 1))}
			if unit += uint64(pl.Units); unit > math.MaxUint32 {
				break
			}
			if a.core.Receive(f.GetPgId(), f.GetGeneration(), pl) {
				a.received.Add(uint64(pl.Units))
			} else {
				a.refused.Add(uint64(pl.Units))
			}
		}
	}
	a.rest(r.Sent, p.GetQuietMillis(), now)
}

// rest lets the session be quiet until so many milliseconds after its last renewal, if the
// directory allows it and there is nothing that a renewal would bring on.
func (a *Agenda) rest(sent int64, millis uint64, now int64) {
	if millis == 0 {
		return
	}
	a.core.SetQuiet(true) // before looking: what happens from here on stirs it
	if !a.idle(now) {
		a.core.SetQuiet(false)
		return
	}
	a.mu.next = max(a.mu.next, sent+int64(min(millis, maxQuietMillis))*int64(time.Millisecond))
}

// maxQuietMillis bounds what a session takes from a directory.
const maxQuietMillis = 10_000

// idle reports whether the session waits for nothing and has nothing to tell: nobody works
// on it, the map is acknowledged, no place is in limbo or about to be handed back, no memory is asked for
// or has been used lately, and the directory knows what it holds.
func (a *Agenda) idle(now int64) bool {
	v := a.core.View()
	switch k := a.acked(); {
	case a.mu.wasBusy || a.mu.busy || a.mu.hurry || a.mu.backlog || v == nil || k.acked < v.Version || k.quiesced < v.Version,
		a.core.InLimbo(), len(a.mu.wants)+len(a.mu.grants)+len(a.mu.early) > 0:
		return false
	}
	for _, m := range a.core.Heaps() {
		p, f := a.pg(m.PG), a.core.Flow(m.PG, m.Generation)
		if f == nil || v.PG(m.PG) == nil || v.PG(m.PG).Generation != m.Generation {
			continue
		}
		if a.core.Exhausted(m.PG) || m.Heap.Stats().ForeignFree > 0 || p.used(now, f.Taken(), false) > 0 || !sameHeld(p.told, heldOf(m, f)) {
			return false
		}
	}
	return true
}

// untold makes the next renewal say what the session holds: the last one may be lost.
func (a *Agenda) untold() {
	a.mu.held = 0
	for _, p := range a.mu.pgs {
		p.told = nil
	}
}

// supplied notes how the placement groups stand; all says whether those that are not named
// are gone.
func (a *Agenda) supplied(list []*dirpb.Supply, all bool) {
	told := make(map[uint32]engine.Supply, len(list))
	for _, x := range list {
		told[x.GetPgId()] = engine.Supply{Known: true, Short: x.GetShort(), Floor: x.GetFloorUnits(), Share: x.GetShareUnits(), Give: x.GetGiveUnits()}
	}
	a.core.SetSupply(told, all)
}

// Counts are units, over the session's life.
type Counts struct {
	HandedBack uint64 // of others' memory, to go home
	Returned   uint64 // of own memory
	Received   uint64 // of own memory, come home
	Refused    uint64 // come home or granted, and not taken in
}

// Counts tells how much memory went which way.
func (a *Agenda) Counts() Counts {
	return Counts{a.handedBack.Load(), a.returned.Load(), a.received.Load(), a.refused.Load()}
}

// ---- grants ----------------------------------------------------------------

func (a *Agenda) pg(id uint32) *agendaPG {
	p := a.mu.pgs[id]
	if p == nil {
		p = &agendaPG{}
		a.mu.pgs[id] = p
	}
	return p
}

// grantDue makes a grant that is wanted, if none is under way for the placement group.
func (a *Agenda) grantDue(pg uint32, now int64) (Ask, bool) {
	p, units := a.pg(pg), a.mu.wants[pg]
	if now < p.notUntil || !a.askable(pg) {
		return Ask{}, false
	}
	delete(a.mu.wants, pg)
	g := &grant{view: a.core.View().Version, units: units}
	a.mu.grants[pg] = g
	return Ask{Kind: AskGrant, grant: g, Grant: &dirpb.GrantExtentRequest{SessionId: a.core.Session(), PgId: pg,
		WantUnits: max(p.grow, firstGrant, units), PlaceUnits: units}}, true
}

// askable reports whether a grant may be asked for: none is under way or waits for the
// session's map, the session does not end, which has the placement group. Only an answer or a map changes that.
func (a *Agenda) askable(pg uint32) bool {
	v := a.core.View()
	return !a.mu.ending && a.mu.grants[pg] == nil && v != nil && v.PG(pg) != nil && !a.isEarly(pg)
}

func (a *Agenda) granted(q Ask, r Reply, now int64) {
	pg := q.Grant.GetPgId()
	p := a.pg(pg)
	delete(a.mu.grants, pg)
	if r.Err != nil {
		a.mu.unsure = true
		p.notUntil = now + a.o.RefusedPause
		return // renewals make those who wait ask again
	}
	if r.Grant.GetTerm() < a.mu.term {
		a.mu.unsure = true
		return // of a leadership that has ended
	}
	if len(r.Grant.GetRuns()) == 0 {
		p.grow, p.notUntil = q.grant.units, now+a.o.RefusedPause
		if now-p.lackedAt >= lackedFor {
			p.lacked = 0
		}
		p.lacked, p.lackedAt = max(p.lacked, q.grant.units), max(now, 1)
		if a.core.Idle(pg, r.Grant.GetComingUnits()) {
			return // a cache waits rather than evict
		}
		a.core.SetExhausted(pg)
		a.core.SetFull(pg, r.Grant.GetComingUnits() == 0)
		return
	}
	for _, x := range r.Grant.GetRuns() {
		if x.GetPgId() != pg {
			a.mu.unsure, p.notUntil = true, now+a.o.RefusedPause
			a.refuse(x, fmt.Errorf("it is of placement group %d", x.GetPgId()), pg)
			return
		}
	}
	a.core.SetFull(pg, false)
	p.grow = min(2*q.Grant.GetWantUnits(), maxGrant)
	a.mu.early = append(a.mu.early, r.Grant)
	a.takeEarly()
}

// isEarly reports whether a grant of a placement group waits for the session's map.
func (a *Agenda) isEarly(pg uint32) bool {
	return slices.ContainsFunc(a.mu.early, func(r *dirpb.GrantExtentReply) bool { return r.Runs[0].GetPgId() == pg })
}

// isAhead reports whether a run was granted under a newer map than v, in which its
// placement group began anew or its extent is not being recalled any more.
func isAhead(v *engine.View, r *dirpb.GrantExtentReply, x *dirpb.ReturnedRun) bool {
	if v == nil || v.Version >= r.GetMapVersion() {
		return v == nil
	}
	pg := v.PG(x.GetPgId())
	return pg == nil || pg.Generation < x.GetGeneration() || pg.IsRecalled(x.GetUnit())
}

// takeEarly takes in what was granted, but for what the session's map is too old for.
func (a *Agenda) takeEarly() {
	v := a.core.View()
	a.mu.early = slices.DeleteFunc(a.mu.early, func(r *dirpb.GrantExtentReply) bool {
		if slices.ContainsFunc(r.GetRuns(), func(x *dirpb.ReturnedRun) bool { return isAhead(v, r, x) }) {
			return false
		}
		for _, x := range r.GetRuns() {
			pg := v.PG(x.GetPgId())
			if pg == nil || pg.Generation != x.GetGeneration() {
				continue
			}
			if x.GetUnit() < pg.HeapLo || uint64(x.GetUnit())+uint64(x.GetUnits()) > uint64(pg.HeapHi) {
				a.refuse(x, fmt.Errorf("it lies outside its heap [%d,%d)", pg.HeapLo, pg.HeapHi), pg.ID)
				continue
			}
			if err := a.core.AddRun(x.GetPgId(), x.GetGeneration(), x.GetUnit(), x.GetUnits()); err != nil {
				a.refuse(x, err, pg.ID)
			}
		}
		return true
	})
}

// refuse notes that a run was granted, for placement group pg, that cannot be.
func (a *Agenda) refuse(x *dirpb.ReturnedRun, why error, pg uint32) {
	a.refused.Add(uint64(x.GetUnits()))
	a.core.Broken(fmt.Errorf("grant of units [%d,+%d) of placement group %d: %w", x.GetUnit(), x.GetUnits(), pg, why))
}

// ---- what goes back ----------------------------------------------------------

// handBack puts into a renewal what the session has no use for: free places of others'
// memory, then own runs. It keeps what it used in the last seconds, and a floor.
func (a *Agenda) handBack(q *dirpb.RenewRequest, now int64) {
	v := a.core.View()
	a.mu.backlog = false
	tell, news := a.mu.held == 0 || now-a.mu.held >= heldEvery, false
	for _, m := range a.core.Heaps() {
		// Where memory is short the directory must know soon who has how much.
		if short := a.core.Supply(m.PG).Short; short && now-a.mu.held >= heldShort || a.pg(m.PG).told == nil {
			tell, news = true, true
		}
	}
	if tell {
		a.mu.held = max(now, 1)
	}
	places := handBacks
	var held []*dirpb.Held
	for _, m := range a.core.Heaps() {
		if v == nil || v.PG(m.PG) == nil || v.PG(m.PG).Generation != m.Generation {
			continue
		}
		p, f, s := a.pg(m.PG), a.core.Flow(m.PG, m.Generation), a.core.Supply(m.PG)
		if f == nil {
			continue
		}
		p.sample(now, f.Taken())
		if s.Short {
			places = max(places, handBacksShort)
		}
		a.foreign(q, m, p, f, s, &places, now)
		a.surplus(q, m, p, f, s, now)
		if tell {
			h := heldOf(m, f)
			news = news || !sameHeld(p.told, h)
			p.told = h
			held = append(held, h)
		}
	}
	if news {
		q.Held = held
	}
}

func heldOf(m engine.Memory, f *engine.Flow) *dirpb.Held {
	st := m.Heap.Stats()
	// What is free or in limbo, and what is linked, is counted by one account; how much of the
	// former is which is as of the last renewal.
	net, supply := f.Net(), uint64(max(f.Supply(), 0))
	limbo := min(f.Limbo(), supply)
	foreign := min(st.ForeignFree, supply-limbo)
	return &dirpb.Held{PgId: m.PG, Generation: m.Generation, OwnUnits: st.Granted, FreeUnits: supply - limbo - foreign,
		ForeignUnits: foreign, LimboUnits: limbo, NetUnits: net}
}

func sameHeld(a, b *dirpb.Held) bool {
	return a != nil && a.Generation == b.Generation && a.OwnUnits == b.OwnUnits && a.FreeUnits == b.FreeUnits &&
		a.ForeignUnits == b.ForeignUnits && a.LimboUnits == b.LimboUnits && a.NetUnits == b.NetUnits
}

// foreign hands back free places that others were granted, but for as many as the session
// used lately.
func (a *Agenda) foreign(q *dirpb.RenewRequest, m engine.Memory, p *agendaPG, f *engine.Flow, s engine.Supply, places *int, now int64) {
	free, keep := m.Heap.Stats().ForeignFree, p.used(now, f.Taken(), s.Short)
	if free <= keep || *places <= 0 {
		a.mu.backlog = a.mu.backlog || free > keep
		return
	}
	list := m.Heap.TakeForeign(*places, free-keep)
	*places -= len(list)
	a.mu.backlog = a.mu.backlog || *places <= 0
	q.HandBacks = append(q.HandBacks, freePlaces(m, list)...)
	n := uint64(0)
	for _, x := range list {
		n += uint64(x.Units)
	}
	a.handedBack.Add(n)
	f.Add(-int64(n), 0, 0)
}

// freePlaces makes messages of places, ascending.
func freePlaces(m engine.Memory, list []heap.Place) (out []*dirpb.FreePlaces) {
	end := uint32(0)
	for _, x := range list {
		k := len(out) - 1
		if k < 0 || x.Unit != end || x.Unit%layout.ExtentUnits == 0 {
			out = append(out, &dirpb.FreePlaces{PgId: m.PG, Generation: m.Generation, Unit: x.Unit})
			k++
		}
		out[k].Places = append(out[k].Places, x.Units<<10|uint32(x.Ver))
		end = x.Unit + x.Units
	}
	return out
}

// surplus returns own memory that the session has no use for.
func (a *Agenda) surplus(q *dirpb.RenewRequest, m engine.Memory, p *agendaPG, f *engine.Flow, s engine.Supply, now int64) {
	if !s.Known || !s.Short && (a.mu.wants[m.PG] > 0 || a.mu.grants[m.PG] != nil) {
		return // the session lacks memory itself
	}
	free := m.Heap.Stats().Free
	lacks := s.Short && p.lackedAt != 0 && now-p.lackedAt < lackedFor
	used := p.used(now, f.Taken(), s.Short && !lacks)
	keep, least := max(s.Floor, used), uint32(leastReturn)
	switch {
	case lacks:
		// What it has free and does not use is too short for its records, and has to be put
		// together with what others have.
	case s.Short:
		// Others lack memory: what is used goes round faster then.
		keep, least = max(s.Floor, min(used, free/2)), 1
	case free < keep+max(keep/2, firstGrant) || now-p.own < sampleEvery:
		return
	}
	keep -= min(keep, s.Give)
	if free <= keep || len(q.Returns) >= returnsMost {
		return
	}
	p.own = now
	n := uint64(0)
	var runs []heap.Run
	if most := returnsMost - len(q.Returns); lacks {
		runs = m.Heap.TakeShort(free-keep, p.lacked, most)
	} else {
		runs = m.Heap.TakeOwn(free-keep, least, most)
	}
	for _, r := range runs {
		q.Returns = append(q.Returns, &dirpb.ReturnedRun{PgId: m.PG, Generation: m.Generation, Unit: r.Unit, Units: r.Units, Fresh: r.Fresh})
		n += uint64(r.Units)
	}
	a.returned.Add(n)
	f.Add(-int64(n), 0, 0)
}

// sample notes what was taken, about once a second.
func (p *agendaPG) sample(now int64, taken uint64) {
	if now-p.samples[0].at < sampleEvery && p.samples[0].at != 0 {
		return
	}
	copy(p.samples[1:], p.samples[:])
	p.samples[0] = sample{max(now, 1), taken}
}

// used is how many units were taken in the last three or four seconds, or, in haste, in
// the last one or two.
func (p *agendaPG) used(now int64, taken uint64, haste bool) uint64 {
	i := len(p.samples) - 1
	if haste {
		i = 1
	}
	for i > 0 && p.samples[i].at == 0 {
		i--
	}
	return taken - min(taken, p.samples[i].taken)
}

// Close gives what a session that closes hands back, once its lanes have given back all
// that they had: the request is complete but for the session's and its leak.
func (a *Agenda) Close() *dirpb.CloseSessionRequest {
	a.mu.Lock()
	defer a.mu.Unlock()
	q := &dirpb.CloseSessionRequest{SessionId: a.core.Session(), Leaked: a.core.Leaked() || a.mu.unsure || len(a.mu.grants) > 0}
	v := a.core.View()
	a.takeEarly()
	for _, r := range a.mu.early {
		q.Runs = append(q.Runs, r.GetRuns()...) // of a map that the session has not seen
	}
	a.mu.early = nil
	for _, m := range a.core.Heaps() {
		if v == nil || v.PG(m.PG) == nil || v.PG(m.PG).Generation != m.Generation {
			continue
		}
		own, foreign := m.Heap.Drain()
		for _, r := range own {
			if len(q.Runs) < maxReturned {
				q.Runs = append(q.Runs, &dirpb.ReturnedRun{PgId: m.PG, Generation: m.Generation, Unit: r.Unit, Units: r.Units, Fresh: r.Fresh})
				a.returned.Add(uint64(r.Units))
			}
		}
		foreign = foreign[:min(len(foreign), maxReturned)]
		q.HandBacks = append(q.HandBacks, freePlaces(m, foreign)...)
		for _, x := range foreign {
			a.handedBack.Add(uint64(x.Units))
		}
		if f := a.core.Flow(m.PG, m.Generation); f != nil {
			q.Held = append(q.Held, &dirpb.Held{PgId: m.PG, Generation: m.Generation, NetUnits: f.Net()})
		}
	}
	return q
}

// maxReturned bounds what one session hands back as it closes; recall finds the rest.
const maxReturned = 1 << 16
