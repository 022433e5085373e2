package session

import (
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/internal/heap"
	"github.com/kvd-project/kvd/internal/layout"
)

const (
	// A renewal hands back so many places at most, of all placement groups together, and more if memory of any is
	// short.
	handBacks, handBacksShort = 1 << 14, 1 << 15
	// It returns so many own runs at most, none shorter than leastReturn units unless memory
	// is short.
	returnsMost, leastReturn = 1 << 10, 64

	// lackedFor is how long a session that missed memory keeps what it could have used.
	lackedFor = int64(3 * time.Second)

	sampleEvery = int64(time.Second)
	heldEvery   = int64(time.Second)
	heldShort   = int64(200 * time.Millisecond)
)

// sample is Flow.Taken at a time.
type sample struct {
	at    int64
	taken uint64
}

// Counts are units, over the session's life.
type Counts struct {
	HandedBack uint64 // of others' memory, to go home
	Returned   uint64 // of own memory
	Received   uint64 // of own memory, come home
	Refused    uint64 // come home or granted, and not taken in
}

// Counts tells how much memory went which way, in units, since the session was opened.
func (a *Agenda) Counts() Counts {
	return Counts{a.handedBack.Load(), a.returned.Load(), a.received.Load(), a.refused.Load()}
}

// handBack puts into a renewal what the session has no use for: free places of others'
// memory, then own runs. It keeps what it used in the last seconds, and a floor.
func (a *Agenda) handBack(q *dirpb.RenewRequest, now int64) {
	v := a.core.View()
	a.mu.backlog = false
	tell, news := a.mu.held == 0 || now-a.mu.held >= heldEvery, false
	places := handBacks
	for _, m := range a.core.Heaps() {
		short := a.core.Supply(m.PG).Short
		if short {
			places = handBacksShort
		}
		// If memory is short the directory must know soon who has how much.
		if short && now-a.mu.held >= heldShort || a.pg(m.PG).told == nil {
			tell, news = true, true
		}
	}
	if tell {
		a.mu.held = max(now, 1)
	}
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
		a.notePace(p, now, f.Taken())
		a.wantAhead(m, p)
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
	// A single account counts what is free or in limbo, and what is linked; the split of the former is as
	// of the last renewal.
	net, supply := f.Net(), uint64(max(f.Supply(), 0))
	limbo := min(f.Limbo(), supply)
	foreign := min(st.ForeignFree, supply-limbo)
	free := supply - limbo - foreign
	// Nothing has linked the places of drafts yet. So they wait, and no count of what is linked finds them lost.
	net, limbo = net-int64(m.Drafts), limbo+m.Drafts
	return &dirpb.Held{PgId: m.PG, Generation: m.Generation, OwnUnits: st.Granted, FreeUnits: free,
		ForeignUnits: foreign, LimboUnits: limbo, NetUnits: net}
}

func sameHeld(a, b *dirpb.Held) bool {
	return a != nil && a.Generation == b.Generation && a.OwnUnits == b.OwnUnits && a.FreeUnits == b.FreeUnits &&
		a.ForeignUnits == b.ForeignUnits && a.LimboUnits == b.LimboUnits && a.NetUnits == b.NetUnits
}

// foreign hands back free places that others were granted, but for as many as the session
// used lately.
func (a *Agenda) foreign(q *dirpb.RenewRequest, m engine.Memory, p *agendaPG, f *engine.Flow, s engine.Supply,
	places *int, now int64) {
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
func (a *Agenda) surplus(q *dirpb.RenewRequest, m engine.Memory, p *agendaPG, f *engine.Flow, s engine.Supply,
	now int64) {
	if !s.Known || !s.Short && (a.mu.wants[m.PG] > 0 || a.mu.grants[m.PG] != nil) {
		return // the session lacks memory itself
	}
	free := m.Heap.Stats().Free
	lacks := s.Short && p.lackedAt != 0 && now-p.lackedAt < lackedFor
	used := p.used(now, f.Taken(), s.Short && !lacks)
	keep, least := max(s.Floor, used), uint32(leastReturn)
	switch {
	case lacks:
		// Its free places that it does not use are too short for its records, and have to be put together
		// with those of others.
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
		q.Returns = append(q.Returns, &dirpb.ReturnedRun{PgId: m.PG, Generation: m.Generation, Unit: r.Unit,
			Units: r.Units, Fresh: r.Fresh})
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

// Close gives what a session that closes hands back, once its lanes have given back all that they had. The request
// is complete but for Settled.
func (a *Agenda) Close() *dirpb.CloseSessionRequest {
	a.mu.Lock()
	defer a.mu.Unlock()
	q := &dirpb.CloseSessionRequest{SessionId: a.core.Session(), Leaked: a.core.Leaked() || a.mu.unsure ||
		len(a.mu.grants) > 0}
	v, places := a.core.View(), maxReturned
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
				q.Runs = append(q.Runs, &dirpb.ReturnedRun{PgId: m.PG, Generation: m.Generation, Unit: r.Unit,
					Units: r.Units, Fresh: r.Fresh})
				a.returned.Add(uint64(r.Units))
			} else {
				q.Leaked = true
			}
		}
		if len(foreign) > places {
			foreign, q.Leaked = foreign[:places], true
		}
		places -= len(foreign)
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

// maxReturned bounds the runs, and the places, that one session hands back as it closes, since a request has a bound;
// recall finds the rest.
const maxReturned = 1 << 16
