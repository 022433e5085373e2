package session

import (
	"math"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/internal/heap"
)

// ackPause is how soon operations of an older map are looked at again, at first.
const ackPause = int64(500 * time.Microsecond)

// acks is what a renewal says of map versions.
type acks struct{ acked, quiesced uint64 }

// Hurry makes a renewal due: what is in limbo is waited for.
func (a *Agenda) Hurry() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.mu.hurry = true
}

// Called makes a renewal due, and another one at once behind it if its reply brings a later
// epoch, for which somebody waits.
func (a *Agenda) Called() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.mu.hurry, a.mu.called = true, true
}

// Crowd makes a renewal due soon after the last one, since much of the session's memory is in limbo, and reports
// whether Next has changed. See [engine.Options].Crowded.
func (a *Agenda) Crowd() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.mu.renewing {
		return false // its answer looks at what is in limbo
	}
	return a.crowdLocked()
}

func (a *Agenda) crowdLocked() bool {
	at := max(a.mu.sent+crowdPause, a.core.Nanos())
	if at >= a.mu.next {
		return false
	}
	a.mu.next = at
	return true
}

// crowdPause is how soon a crowded session renews again.
const crowdPause = int64(5 * time.Millisecond)

// Busy notes that operations are performed: the lease of such a session is not to become
// short while no directory node leads.
func (a *Agenda) Busy() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.mu.busy = true
}

// Stir ends the quiet of a session that has something to ask for or to tell, and reports whether it was quiet. If
// it was, Next has changed. See [engine.Options].Stirred.
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

// SetPaths notes by what memory nodes are reached: the next renewal tells it. The agenda keeps p, which nobody changes.
func (a *Agenda) SetPaths(p *dirpb.ClientPaths) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !proto.Equal(a.mu.paths, p) {
		a.mu.paths = p
	}
}

// untoldPaths are those that the directory's leader does not know, or nil.
func (a *Agenda) untoldPaths() *dirpb.ClientPaths {
	if a.mu.pathsTold == a.mu.paths && a.mu.pathsTerm == a.mu.term {
		return nil
	}
	return a.mu.paths
}

// NewMap notes that a map was installed: it is to be acknowledged soon, and connections that waited for it are dialed.
func (a *Agenda) NewMap() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.mu.ackPause = ackPause
	a.awaitedLocked()
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

// acked is what may be acknowledged now: no operation of an older map is under way, nor
// a grant.
func (a *Agenda) acked() acks {
	acked, quiesced := a.core.Acked()
	for _, g := range a.mu.grants {
		acked = min(acked, g.view)
	}
	return acks{acked, quiesced}
}

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
		AckedMapVersion: k.acked, QuiescedMapVersion: k.quiesced, Term: a.mu.term, TokenNumber: a.mu.tokenNumber}
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
	q.Crowded = a.core.Crowded()
	q.Paths = a.untoldPaths()
	q.InLimbo = a.core.InLimbo() && a.core.LastUnlink() >= a.mu.awaits
	return Ask{Kind: AskRenew, Renew: q, Within: max(5*a.o.Renew, int64(time.Second))}
}

// Again makes another try of a renewal whose fate is not known. It is a renewal of its own, without what the first
// one handed back. Its reply covers what was unlinked before it is sent. It does not answer the first.
func (a *Agenda) Again(first Ask) Ask {
	a.mu.Lock()
	defer a.mu.Unlock()
	q := first.Renew
	a.untold()
	a.mu.number = a.core.BeginRenew()
	return Ask{Kind: AskRenew, Within: first.Within, Renew: &dirpb.RenewRequest{
		SessionId: q.SessionId, ReportEpoch: q.ReportEpoch,
		AckedMapVersion: q.AckedMapVersion, QuiescedMapVersion: q.QuiescedMapVersion, Term: a.mu.term,
		Number: a.mu.number, InLimbo: q.InLimbo, Crowded: q.Crowded,
		TokenNumber: a.mu.tokenNumber}}
}

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
	a.core.EndRenew(q.Renew.Number, p.GetEpoch(), p.GetMinEpoch(), r.Sent+int64(p.GetLeaseMillis())*int64(
		time.Millisecond))
	a.core.SetNewest(q.Renew.Number, p.GetMapVersion())
	if !latest || p.GetTerm() < a.mu.term {
		return // another one was sent since, or a leadership answers that has ended
	}
	a.mu.next = max(r.Sent+a.o.Renew, now)
	if a.mu.backlog {
		a.mu.next = now + a.o.Renew/4
	}
	if a.mu.sent = r.Sent; a.core.Crowded() {
		a.crowdLocked()
	}
	if len(p.GetToken()) > 0 {
		a.mu.token, a.mu.tokenNumber = p.GetToken(), p.GetTokenNumber()
		a.mu.hurry = true // the next key waits for the renewal that says so
	}
	a.mu.hurry = a.mu.hurry || a.mu.called && p.GetEpoch() > q.Renew.ReportEpoch
	a.mu.called = false
	switch {
	case p.GetTerm() != a.mu.term:
		a.mu.awaits = 0 // this leader has not heard of it
	case q.Renew.InLimbo:
		a.mu.awaits = q.Renew.Number
	}
	a.mu.term = p.GetTerm()
	if q.Renew.Paths != nil {
		a.mu.pathsTold, a.mu.pathsTerm = q.Renew.Paths, a.mu.term
	}
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
	case a.mu.wasBusy || a.mu.busy || a.mu.hurry || a.mu.backlog || v == nil || k.acked < v.Version ||
		k.quiesced < v.Version,
		a.untoldPaths() != nil, a.core.InLimbo(), len(a.mu.wants)+len(a.mu.grants)+len(a.mu.early) > 0:
		return false
	}
	for _, m := range a.core.Heaps() {
		p, f := a.pg(m.PG), a.core.Flow(m.PG, m.Generation)
		if f == nil || v.PG(m.PG) == nil || v.PG(m.PG).Generation != m.Generation {
			continue
		}
		if a.core.Exhausted(m.PG) || m.Heap.Stats().ForeignFree > 0 || p.used(now, f.Taken(), false) > 0 ||
			!sameHeld(p.told, heldOf(m, f)) {
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
		told[x.GetPgId()] = engine.Supply{Known: true, Short: x.GetShort(), Floor: x.GetFloorUnits(),
			Share: x.GetShareUnits(), Give: x.GetGiveUnits(), Live: x.GetLiveUnits()}
	}
	a.core.SetSupply(told, all)
}
