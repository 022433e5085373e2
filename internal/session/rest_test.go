package session_test

import (
	"runtime"
	"sync/atomic"
	"testing"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/internal/heap"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/session"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/sim"
)

// hurried is a renewal that was made due, with the least epoch of an operation under way.
func (a *agenda) hurried(oldest uint64) session.Ask {
	a.t.Helper()
	a.Hurry()
	q, ok := a.DueRenewal(func() (uint64, bool) { return oldest, oldest != 0 })
	if !ok {
		a.t.Fatal("no renewal is due")
	}
	return q
}

// Another try of a renewal says no more than the first one: neither of operations that are
// under way, nor of limbo. The first one's reply counts for it alone.
func TestAgendaAgain(t *testing.T) {
	a := newAgenda(t)
	a.view(3, 1)
	a.answer(a.renewal(), &dirpb.RenewReply{Epoch: 9})
	a.grant(a.wants(10), 4, 3, fresh(1, heapLo, 100))
	a.core.Unlinks()
	first := a.hurried(6)
	if r := first.Renew; r.ReportEpoch != 6 || !r.InLimbo || len(r.Held) != 1 {
		t.Fatalf("asked %v", r)
	}
	tag := a.core.Unlinks() // between the two
	again := a.Again(first)
	if r := again.Renew; r.ReportEpoch != 6 || !r.InLimbo || len(r.Held) != 0 || r.QuiescedMapVersion != 3 ||
		again.Within != first.Within {
		t.Fatalf("asked again %v, first %v", r, first.Renew)
	}
	a.answer(first, &dirpb.RenewReply{Epoch: 20, MinEpoch: 19})
	a.Answer(again, session.Reply{Err: errLost})
	q := a.hurried(0)
	a.answer(q, &dirpb.RenewReply{Epoch: 22, MinEpoch: 21})
	if a.core.Released(tag) {
		t.Fatal("a place is out of limbo by the reply to a renewal that was sent before it came in")
	}
	if len(q.Renew.Held) != 1 {
		t.Fatalf("asked %v: the directory does not know what the session holds", q.Renew)
	}
	a.answer(a.hurried(0), &dirpb.RenewReply{Epoch: 24, MinEpoch: 23})
	if !a.core.Released(tag) {
		t.Fatal("a place stays in limbo")
	}

	// The reply to another try says no more than that it came.
	a.grant(a.wants(10), 4, 3, fresh(1, heapLo+100, 100))
	a.now += second
	first = a.hurried(0)
	if len(first.Renew.Held) != 1 || first.Renew.InLimbo {
		t.Fatalf("asked %v", first.Renew)
	}
	a.core.Unlinks()
	again = a.Again(first)
	a.answer(again, &dirpb.RenewReply{Epoch: 30, MinEpoch: 24})
	if q = a.hurried(0); len(q.Renew.Held) != 1 || !q.Renew.InLimbo {
		t.Fatalf("asked %v: the directory does not know what the session holds, and that it has something in limbo",
			q.Renew)
	}
	// A place that comes into limbo behind a renewal that told of limbo is told again.
	a.core.Unlinks()
	a.answer(q, &dirpb.RenewReply{Epoch: 31, MinEpoch: 24})
	if q = a.hurried(0); !q.Renew.InLimbo {
		t.Fatalf("asked %v: something is in limbo since the last one", q.Renew)
	}
	a.answer(q, &dirpb.RenewReply{Epoch: 32, MinEpoch: 24})
	if q = a.hurried(0); q.Renew.InLimbo {
		t.Fatalf("asked %v, though nothing is new", q.Renew)
	}
}

// A renewal that is lost may not have told the directory anything: the next one tells what
// the session holds, however soon. Without a map it is not sent before its time.
func TestAgendaLost(t *testing.T) {
	a := newAgenda(t)
	a.now += renewEvery
	a.Answer(a.renewal(), session.Reply{Err: errLost})
	a.idle()
	if at := a.Next(); at != a.now+renewEvery {
		t.Fatalf("next at %d, want %d", at, a.now+renewEvery)
	}
	a.view(3, 1)
	a.answer(a.renewal(), &dirpb.RenewReply{})
	a.grant(a.wants(10), 4, 3, fresh(1, heapLo, 100))
	a.now += second
	q := a.renewal()
	if len(q.Renew.Held) != 1 {
		t.Fatalf("asked %v", q.Renew)
	}
	if next := a.Next(); next <= a.now {
		t.Fatalf("next at %d, with a renewal under way at %d", next, a.now)
	}
	a.Answer(q, session.Reply{Err: errLost})
	a.now += pause
	if q = a.hurried(0); len(q.Renew.Held) != 1 {
		t.Fatalf("asked %v: what the session holds was told by a renewal that is lost", q.Renew)
	}
	a.answer(q, &dirpb.RenewReply{})
	a.now += pause
	if q = a.hurried(0); len(q.Renew.Held) != 0 {
		t.Fatalf("asked %v, though the directory knows", q.Renew)
	}
}

// A session does not become quiet if something happened while its renewal was under way
// that another one has to tell or to bring.
func TestAgendaNotQuiet(t *testing.T) {
	for name, f := range map[string]func(a *agenda){
		"":                       func(*agenda) {},
		"an operation":           func(a *agenda) { a.Busy() },
		"a hurry":                func(a *agenda) { a.Hurry() },
		"a place in limbo":       func(a *agenda) { a.core.Unlinks() },
		"a want":                 func(a *agenda) { a.WantMemory(1, 10) },
		"a grant under way":      func(a *agenda) { a.wants(10) },
		"a grant of a later map": func(a *agenda) { a.grant(a.wants(10), 4, 9, fresh(2, heapLo, 100)) },
		"memory that is missed":  func(a *agenda) { a.grant(a.wants(10), 4, 3) },
		"another's place":        func(a *agenda) { a.heap().Free(heap.Place{Unit: 5000, Units: 4}) },
		"another's place, again": func(a *agenda) {
			a.heap().Free(heap.Place{Unit: 5000, Units: 4})
			a.core.Settle(1, 1, 0)
		},
		"memory that is used":   func(a *agenda) { a.core.Flow(1, 1).Add(0, 10, 10) },
		"memory that has come":  func(a *agenda) { a.core.Flow(1, 1).Add(10, 0, 0) },
		"memory that is linked": func(a *agenda) { a.core.Flow(1, 1).Add(0, 0, 10) },
		"a map that lanes see not": func(a *agenda) {
			v, err := engine.ViewOf(&dirpb.Map{Version: 4, Pgs: []*dirpb.PlacementGroup{{
				Id: 1, NamespaceId: 1, Epoch: 1, State: dirpb.PGState_PG_ACTIVE, Members: []*dirpb.Member{
					{NodeId: 1, Incarnation: 1}},
				RegionBytes: 64 << 20, IndexBytes: layout.RegionPageSize, Generation: 1}}}, 1)
			if err != nil {
				t.Fatal(err)
			}
			a.core.InstallView(v)
		},
	} {
		t.Run(name, func(t *testing.T) {
			a := newAgenda(t)
			a.view(3, 1)
			a.answer(a.renewal(), &dirpb.RenewReply{})
			a.grant(a.wants(10), 4, 3, fresh(1, heapLo, 100))
			for range 10 {
				a.now += second
				a.answer(a.hurried(0), &dirpb.RenewReply{Epoch: 3, MinEpoch: 2})
			}
			a.core.SetQuiet(true)
			q := a.hurried(0)
			if a.core.Quiet() {
				t.Fatal("quiet, with a renewal under way")
			}
			f(a)
			a.answer(q, &dirpb.RenewReply{Epoch: 3, MinEpoch: 2, QuietMillis: 3000})
			quiet := a.core.Quiet()
			if want := name == ""; quiet != want {
				t.Fatalf("quiet %v, want %v", quiet, want)
			}
			if at := a.Next(); quiet != (at > a.now+renewEvery) {
				t.Fatalf("quiet %v, next in %d ms", quiet, (at-a.now)/ms)
			}
		})
	}
}

// A session is quiet for so long as the directory allows, but not for hours, and one that is
// stirred renews its lease as soon as one that was not.
func TestAgendaQuietBounds(t *testing.T) {
	a := newAgenda(t)
	a.view(3, 1)
	for _, millis := range []uint64{10_001, 1 << 40, 1<<64 - 1} {
		a.answer(a.hurried(0), &dirpb.RenewReply{QuietMillis: millis})
		if at := a.Next(); !a.core.Quiet() || at != a.now+10*second {
			t.Fatalf("%d ms allowed: quiet %v, next in %d ms", millis, a.core.Quiet(), (at-a.now)/ms)
		}
		sent := a.now
		a.now += renewEvery / 5
		if !a.Stir() || a.Next() != sent+renewEvery {
			t.Fatalf("stirred: next in %d ms, want %d", (a.Next()-a.now)/ms, (sent+renewEvery-a.now)/ms)
		}
	}
	a.answer(a.hurried(0), &dirpb.RenewReply{QuietMillis: 3000})
	a.answer(a.hurried(0), &dirpb.RenewReply{})
	if a.core.Quiet() {
		t.Fatal("quiet, though the directory does not allow it any more")
	}
}

// An event while a session goes quiet stirs it, from whichever goroutine: it either keeps the
// session from being quiet or finds it so.
func TestAgendaStirredWhileGoingQuiet(t *testing.T) {
	d := rdma.NewDevice("sim", sim.New(sim.Options{}).Device("c"))
	defer d.Close()
	var a *session.Agenda
	core, err := engine.NewCore(engine.Options{Session: 7, Discriminator: 1, Lanes: 1, CacheBytes: 1 << 16,
		Devices: []*rdma.Device{d},
		Stirred: func() { a.Stir() }, Nanos: func() int64 { return second }, Millis: func() uint64 { return 1 }})
	if err != nil {
		t.Fatal(err)
	}
	defer core.Close()
	a = session.NewAgenda(core, session.AgendaOptions{Renew: renewEvery, Term: 4})
	const groups = 256 // it looks at them after it has looked at limbo, which takes most of its time
	m := &dirpb.Map{Version: 3}
	for id := range uint32(groups) {
		m.Pgs = append(m.Pgs, &dirpb.PlacementGroup{Id: 1 + id, NamespaceId: 1, Epoch: 1,
			State:   dirpb.PGState_PG_ACTIVE,
			Members: []*dirpb.Member{{NodeId: 1, Incarnation: 1}}, RegionBytes: 64 << 20,
			IndexBytes: layout.RegionPageSize, Generation: 1})
	}
	v, err := engine.ViewOf(m, 1)
	if err != nil {
		t.Fatal(err)
	}
	core.InstallView(v)
	core.Lanes()[0].Pump()
	for id := range uint32(groups) {
		core.HeapOf(&v.PG(1 + id).PG)
	}
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(4)) // so that they run at once whatever the machine has
	answer := func(q session.Ask, epoch, quiet uint64) {
		a.Answer(q, session.Reply{Renew: &dirpb.RenewReply{Term: 4, Epoch: epoch, MinEpoch: epoch, QuietMillis: quiet},
			Sent: second})
	}
	due := func() session.Ask {
		a.Hurry()
		q, _ := a.DueRenewal(none)
		return q
	}
	var phase atomic.Uint64 // twice the round in which Answer is under way, and then one more
	for round, during := uint64(1), 0; during < 20; round++ {
		q := due()
		event := make(chan bool)
		go func() {
			for phase.Load() < 2*round {
			}
			for range round * 7919 % 50_000 {
				phase.Load() // some time
			}
			before := phase.Load()
			core.Unlinks()
			event <- before == 2*round
		}()
		phase.Store(2 * round)
		answer(q, 3*round, 3000)
		phase.Store(2*round + 1)
		if <-event {
			during++
		}
		if core.InLimbo() && core.Quiet() {
			t.Fatalf("round %d: the session is quiet, with a place in limbo", round)
		}
		for i := range uint64(2) { // until limbo has ended
			answer(due(), 3*round+1+i, 0)
		}
		if core.InLimbo() {
			t.Fatalf("round %d: a place stays in limbo", round)
		}
	}
}

// A map that cannot be acknowledged yet is looked at again soon, and less and less often;
// the next map begins anew.
func TestAgendaAckPauses(t *testing.T) {
	a := newAgenda(t)
	a.view(3, 1)
	a.answer(a.renewal(), &dirpb.RenewReply{})
	q := a.wants(10) // a grant under way holds acknowledgements
	for version := uint64(4); version < 6; version++ {
		a.view(version, 1)
		a.answer(a.renewal(), &dirpb.RenewReply{})
		if version > 4 {
			continue // it had to be told that the lanes have seen it
		}
		for _, wait := range []int64{ms, 2 * ms, 4 * ms, 8 * ms} {
			a.idle()
			if at := a.Next(); at != a.now+wait {
				t.Fatalf("looked at again in %d µs, want %d", (at-a.now)/1000, wait/1000)
			}
			a.now += wait
		}
	}
	a.idle()
	if at := a.Next(); at != a.now+ms {
		t.Fatalf("another map: looked at again in %d µs", (at-a.now)/1000)
	}
	a.grant(q, 4, 3, fresh(1, heapLo, 100))
	if r := a.renewal(); r.Renew.AckedMapVersion != 5 {
		t.Fatalf("asked %v", r.Renew)
	}
}

// A session that may have been granted more than it has says so as it closes, and one that
// has been granted all that it asked for does not.
func TestAgendaLeaks(t *testing.T) {
	for name, f := range map[string]func(a *agenda, q session.Ask){
		"":        func(a *agenda, q session.Ask) { a.grant(q, 4, 3, fresh(1, heapLo, 100)) },
		"nothing": func(a *agenda, q session.Ask) { a.grant(q, 4, 3) },
		"lost":    func(a *agenda, q session.Ask) { a.Answer(q, session.Reply{Err: errLost}) },
		"late":    func(a *agenda, q session.Ask) { a.grant(q, 3, 3, fresh(1, heapLo, 100)) },
		"anothers": func(a *agenda, q session.Ask) {
			a.grant(q, 4, 3, &dirpb.ReturnedRun{PgId: 2, Unit: heapLo, Units: 2})
		},
	} {
		a := newAgenda(t)
		a.view(3, 1)
		f(a, a.wants(10))
		if got, want := a.Close().Leaked, name != "" && name != "nothing"; got != want {
			t.Errorf("%s: leaked %v", name, got)
		}
	}
	a := newAgenda(t)
	a.view(3, 1)
	a.answer(a.renewal(), &dirpb.RenewReply{})
	a.Ending()
	a.WantMemory(1, 10)
	a.idle()
}

// A delivery whose places go round the end of all units brings none from there on.
func TestAgendaDeliveryGoesRound(t *testing.T) {
	a := newAgenda(t)
	a.view(3, 1)
	a.answer(a.renewal(), &dirpb.RenewReply{})
	a.grant(a.wants(10), 4, 3, fresh(1, heapLo, 100))
	p, _ := a.heap().Alloc(10)
	before := a.heap().Stats().Free
	const end = 1 << 32
	a.renew(&dirpb.RenewReply{
		Deliveries: []*dirpb.FreePlaces{
			{PgId: 1, Generation: 1, Unit: end - 16,
				Places: []uint32{(16 + p.Unit) << 10, p.Units<<10 | uint32(p.Ver)}}}})
	if got := a.heap().Stats().Free; got != before {
		t.Fatalf("%d units are free, want %d: a place in use came home", got, before)
	}
}

// A session that has more to hand back than a renewal takes goes on soon, with places that no
// message has across an extent's border. It hands back nothing of a generation that has gone.
func TestAgendaBacklog(t *testing.T) {
	a := newAgenda(t)
	a.view(3, 1)
	a.answer(a.renewal(), &dirpb.RenewReply{})
	h := a.heap()
	places := func(q session.Ask) (n int) {
		for _, f := range q.Renew.HandBacks {
			unit := f.Unit
			for _, x := range f.Places {
				if unit/layout.ExtentUnits != f.Unit/layout.ExtentUnits {
					t.Fatalf("handed back unit %d in a message that begins at %d", unit, f.Unit)
				}
				unit += x >> 10
			}
			n += len(f.Places)
		}
		return n
	}
	free := func(n uint32) {
		for i := range n {
			h.Free(heap.Place{Unit: layout.ExtentUnits - 100 + i, Units: 1})
		}
	}
	free(20_000)
	a.core.Settle(1, 1, 0)
	for _, want := range []int{1 << 14, 20_000 - 1<<14} {
		q := a.hurried(0)
		if got := places(q); got != want {
			t.Fatalf("handed back %d places, want %d", got, want)
		}
		a.answer(q, &dirpb.RenewReply{QuietMillis: 3000, Epoch: 3, MinEpoch: 2})
		soon := want == 1<<14
		if at := a.Next(); soon != (at == a.now+renewEvery/4) || a.core.Quiet() && soon {
			t.Fatalf("next in %d ms, quiet %v, with %d units left", (at-a.now)/ms, a.core.Quiet(),
				h.Stats().ForeignFree)
		}
		a.now += renewEvery
	}
	// More at a time while others lack memory.
	a.answer(a.hurried(0), &dirpb.RenewReply{Supply: []*dirpb.Supply{{PgId: 1, Short: true, FloorUnits: 1 << 20}}})
	free(40_000)
	a.core.Settle(1, 1, 0)
	if got := places(a.hurried(0)); got != 1<<15 {
		t.Fatalf("handed back %d places where memory is short", got)
	}
	b := newAgenda(t)
	b.view(3, 1)
	b.answer(b.renewal(), &dirpb.RenewReply{})
	b.heap().Free(heap.Place{Unit: 5000, Units: 4})
	b.view(4, 2)
	if q := b.renewal(); len(q.Renew.HandBacks) > 0 {
		t.Fatalf("handed back %v of a generation that has gone", q.Renew.HandBacks)
	}
}

// Memory that has been used goes back as such: somebody may still read it, and the directory
// has to wait before it grants it anew.
func TestAgendaReturnsWhatWasUsed(t *testing.T) {
	for _, closes := range []bool{false, true} {
		a := newAgenda(t)
		a.view(3, 1)
		a.answer(a.renewal(), &dirpb.RenewReply{})
		a.grant(a.wants(10), 4, 3, fresh(1, heapLo, 200_000))
		h := a.heap()
		p, _ := h.Alloc(1000)
		h.Free(p)
		p.Ver++
		var runs []*dirpb.ReturnedRun
		if closes {
			runs = a.Close().Runs
		} else {
			a.renew(&dirpb.RenewReply{Supply: []*dirpb.Supply{{PgId: 1, FloorUnits: 0}}})
			before := a.core.Flow(1, 1).Supply()
			a.now += second
			r := a.renew(&dirpb.RenewReply{})
			runs = r.Returns
			if after := a.core.Flow(1, 1).Supply(); before-after != 200_000 {
				t.Errorf("the supply was %d and is %d units", before, after)
			}
		}
		units := uint32(0)
		for _, r := range runs {
			units += r.Units
			if used := r.Unit < p.Unit+p.Units && p.Unit < r.Unit+r.Units; used == r.Fresh {
				t.Errorf("closes %v: returned %v; %v was used", closes, r, p)
			}
		}
		if units != 200_000 {
			t.Errorf("closes %v: returned %d units: %v", closes, units, runs)
		}
	}
}

// The directory is told what a session holds when that has changed: once a second, at once
// the first time, and five times a second while memory is short.
func TestAgendaTells(t *testing.T) {
	a := newAgenda(t)
	a.view(3, 1)
	a.answer(a.renewal(), &dirpb.RenewReply{})
	a.now += ms
	a.grant(a.wants(10), 4, 3, fresh(1, heapLo, 100))
	f := a.core.Flow(1, 1)
	var said *dirpb.Held
	tells := func(what string, after int64, change func(), want bool) {
		t.Helper()
		a.now += after
		change()
		q := a.hurried(0)
		if got := len(q.Renew.Held) == 1; got != want {
			t.Fatalf("%s: told %v, want %v", what, q.Renew.Held, want)
		}
		if want {
			said = q.Renew.Held[0]
		}
		a.answer(q, &dirpb.RenewReply{Supply: []*dirpb.Supply{{PgId: 1, Short: what == "shorter"}}})
	}
	nothing := func() {}
	tells("the first time", ms, nothing, true)
	tells("a change at once", ms, func() { f.Add(7, 0, 0) }, false)
	tells("in a second", second, nothing, true)
	if said.FreeUnits != 107 || said.OwnUnits != 100 || said.ForeignUnits != 0 || said.LimboUnits != 0 {
		t.Fatalf("told %v", said)
	}
	tells("no change", second, nothing, false)
	tells("linked", second, func() { f.Add(0, 9, 4) }, true)
	if said.NetUnits != 5 {
		t.Fatalf("told %v", said)
	}
	tells("shorter", second, nothing, false)
	tells("shorter", second/5, func() { f.Add(1, 0, 0) }, true)
	tells("short", second/5-1, func() { f.Add(1, 0, 0) }, false)

	// A reply to what the session holds names every placement group of which it has something to say.
	a.answer(a.hurried(0), &dirpb.RenewReply{Supply: []*dirpb.Supply{{PgId: 1, ShareUnits: 5}}})
	a.answer(a.hurried(0), &dirpb.RenewReply{})
	if got := a.core.Share(1); got != 5 {
		t.Fatalf("a share of %d units: nothing was said of it", got)
	}
	a.now += second
	a.answer(a.hurried(0), &dirpb.RenewReply{})
	if got := a.core.Share(1); got != 0 {
		t.Fatalf("a share of %d units, of which the directory does not know", got)
	}
}

// Somebody who waits for what a session reports gets it with the next renewal, as soon as the
// epoch is any later.
func TestAgendaCalled(t *testing.T) {
	a := newAgenda(t)
	a.view(3, 1)
	a.answer(a.renewal(), &dirpb.RenewReply{Epoch: 9})
	a.Called()
	q := a.renewal()
	a.answer(q, &dirpb.RenewReply{Epoch: 10})
	if q = a.renewal(); q.Renew.ReportEpoch != 10 {
		t.Fatalf("asked %v", q.Renew)
	}
	a.answer(q, &dirpb.RenewReply{Epoch: 11})
	a.idle()
}

// Memory that an operation misses is not forgotten because some is wanted ahead, too.
func TestAgendaAheadAndMissed(t *testing.T) {
	a := newAgenda(t)
	a.view(3, 1)
	a.answer(a.renewal(), &dirpb.RenewReply{})
	a.grant(a.wants(10), 4, 3, fresh(1, heapLo, 30_000))
	f := a.core.Flow(1, 1)
	f.Add(0, 0, 0)
	a.renew(&dirpb.RenewReply{})
	f.Add(0, 60_000, 60_000)
	a.WantMemory(1, 20_000)
	a.renew(&dirpb.RenewReply{})
	asks := a.DueWants()
	if len(asks) != 1 || asks[0].Ahead || asks[0].Grant.PlaceUnits != 20_000 {
		t.Fatalf("due is %v, want a grant of 20,000 units that an operation waits for", asks)
	}
}
