package session_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/internal/heap"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/session"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/sim"
)

const (
	second     = int64(1e9)
	renewEvery = second / 4
	pause      = second / 100
	ms         = second / 1000
	heapLo     = layout.RegionPageSize / layout.UnitSize
	heapHi     = 64 << 20 / layout.UnitSize
)

var errLost = errors.New("lost")

// agenda is a session with one lane that has nothing to do, its agenda, and a clock.
type agenda struct {
	*session.Agenda
	t    *testing.T
	core *engine.Core
	now  int64
	// mode is the namespace's in maps to come.
	mode dirpb.NamespaceMode
	// broken is what the directory should not have sent.
	broken []error
	// missed counts the connections that the lane has said it misses.
	missed int
}

// lanesControl is what the lane asks: of tests of connections no more than those.
type lanesControl struct {
	engine.Control
	a *agenda
}

func (c lanesControl) WantConn(l *engine.Lane, node uint32, bulk bool) {
	c.a.missed++
	c.a.WantConn(l, node, bulk)
}

func newAgenda(t *testing.T) *agenda {
	return newAgendaOn(t, rdma.NewDevice("sim", sim.New(sim.Options{}).Device("c")))
}

func newAgendaOn(t *testing.T, d *rdma.Device) *agenda {
	a := &agenda{t: t, now: second}
	core, err := engine.NewCore(engine.Options{Session: 7, Discriminator: 1, Lanes: 1, CacheBytes: 1 << 16,
		Devices: []*rdma.Device{d},
		Control: lanesControl{a: a}, Broken: func(err error) { a.broken = append(a.broken, err) },
		Nanos: func() int64 { return a.now }, Millis: func() uint64 { return 1 }})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(core.Close(), d.Close()); err != nil {
			t.Error(err)
		}
	})
	a.core = core
	a.Agenda = session.NewAgenda(core, session.AgendaOptions{Renew: renewEvery, Term: 4, RefusedPause: pause,
		FencePause: 2 * pause, SplitPause: 3 * pause,
		DialPause: ms, DialPauseMost: 10 * ms, DownPause: 20 * ms, Token: []byte("first"), TokenNumber: 1})
	return a
}

// view installs a map with placement group 1, and its lane sees it.
func (a *agenda) view(version uint64, generation uint32, recalled ...uint32) {
	a.t.Helper()
	pg := group(1, generation)
	pg.Recalled = recalled
	a.install(version, pg)
}

// group is a placement group as the directory tells of it, whose heap is [heapLo,heapHi).
func group(id, generation uint32) *dirpb.PlacementGroup {
	return &dirpb.PlacementGroup{Id: id, NamespaceId: 1, Epoch: 1, State: dirpb.PGState_PG_ACTIVE,
		Members:     []*dirpb.Member{{NodeId: 1, Incarnation: 1}},
		RegionBytes: 64 << 20, IndexBytes: layout.RegionPageSize, Generation: generation}
}

// install installs a map with these placement groups, and its lane sees it.
func (a *agenda) install(version uint64, pgs ...*dirpb.PlacementGroup) {
	a.t.Helper()
	v, err := engine.ViewOf(&dirpb.Map{Version: version, Pgs: pgs,
		Namespaces: []*dirpb.Namespace{{Id: 1, Mode: a.mode}}}, 1)
	if err != nil {
		a.t.Fatal(err)
	}
	a.core.InstallView(v)
	a.NewMap()
	a.core.Lanes()[0].Pump()
}

func (a *agenda) heap() *heap.Heap { return a.core.HeapOf(&a.core.View().PGs[1].PG) }

func none() (uint64, bool) { return 0, false }

func (a *agenda) renewal() session.Ask {
	a.t.Helper()
	q, ok := a.DueRenewal(none)
	if !ok {
		a.t.Fatal("no renewal is due")
	}
	return q
}

func (a *agenda) idle() {
	a.t.Helper()
	if asks := a.Due(none); len(asks) > 0 {
		a.t.Fatalf("due is %v", asks)
	}
}

func (a *agenda) answer(q session.Ask, p *dirpb.RenewReply) {
	if p.Term == 0 {
		p.Term = 4
	}
	a.Answer(q, session.Reply{Renew: p, Sent: a.now})
}

// renew has one renewal sent and answered, after the time between two.
func (a *agenda) renew(p *dirpb.RenewReply) *dirpb.RenewRequest {
	a.t.Helper()
	a.now += renewEvery
	q := a.renewal()
	a.answer(q, p)
	return q.Renew
}

// wants is the grant that is due.
func (a *agenda) wants(units uint32) session.Ask {
	a.t.Helper()
	a.WantMemory(1, units)
	asks := a.DueWants()
	if len(asks) != 1 || asks[0].Kind != session.AskGrant {
		a.t.Fatalf("due is %v, want a grant", asks)
	}
	return asks[0]
}

func (a *agenda) grant(q session.Ask, term, mapVersion uint64, runs ...*dirpb.ReturnedRun) {
	a.Answer(q, session.Reply{Grant: &dirpb.GrantExtentReply{Runs: runs, Term: term, MapVersion: mapVersion},
		Sent: a.now})
}

func (a *agenda) granted(want uint64) {
	a.t.Helper()
	if got := a.heap().Stats().Granted; got != want {
		a.t.Fatalf("the session has %d units, want %d", got, want)
	}
}

func fresh(generation, unit, units uint32) *dirpb.ReturnedRun {
	return &dirpb.ReturnedRun{PgId: 1, Unit: unit, Units: units, Fresh: true, Generation: generation}
}

func delivery(ps ...heap.Place) (out []*dirpb.FreePlaces) {
	for _, p := range ps {
		out = append(out, &dirpb.FreePlaces{PgId: 1, Generation: 1, Unit: p.Unit,
			Places: []uint32{p.Units<<10 | uint32(p.Ver)}})
	}
	return out
}

// Renewals are sent one at a time, in time, at once for a new map or a hurry, with numbers
// that rise.
func TestAgendaRenews(t *testing.T) {
	a := newAgenda(t)
	a.idle()
	if at := a.Next(); at != a.now+renewEvery {
		t.Fatalf("next at %d, want %d", at, a.now+renewEvery)
	}
	a.view(3, 1)
	q := a.renewal()
	if want := (&dirpb.RenewRequest{SessionId: 7, AckedMapVersion: 3, QuiescedMapVersion: 3, Number: 1, Term: 4,
		TokenNumber: 1}); !proto.Equal(q.Renew, want) {
		t.Fatalf("asked %v, want %v", q.Renew, want)
	}
	a.view(4, 1)
	a.Hurry()
	a.now += 10 * second
	a.idle() // one at a time
	a.answer(q, &dirpb.RenewReply{Epoch: 9, MinEpoch: 8, Term: 5, LeaseMillis: 2000})
	if a.core.Epoch() != 9 || !a.core.LeaseValid() || a.Term() != 5 {
		t.Fatalf("epoch %d, lease %v, term %d", a.core.Epoch(), a.core.LeaseValid(), a.Term())
	}
	q, ok := a.DueRenewal(func() (uint64, bool) { return 6, true })
	if want := (&dirpb.RenewRequest{SessionId: 7, ReportEpoch: 6, AckedMapVersion: 4, QuiescedMapVersion: 4, Number: 2,
		Term: 5, TokenNumber: 1}); !ok || !proto.Equal(q.Renew, want) {
		t.Fatalf("asked %v, want %v", q.Renew, want)
	}
	a.answer(q, &dirpb.RenewReply{Term: 5})
	a.idle()
	a.Hurry()
	if q = a.renewal(); q.Renew.Number != 3 {
		t.Fatalf("asked %v", q.Renew)
	}
	// A renewal that is lost is followed by the next, in time, which says the same again.
	a.Answer(q, session.Reply{Err: errLost})
	if q = a.renewal(); q.Renew.Number != 4 || q.Renew.AckedMapVersion != 4 {
		t.Fatalf("asked %v", q.Renew)
	}
}

// Paths are told once to each leadership, again if that was lost, and keep a session awake until then.
func TestAgendaTellsPaths(t *testing.T) {
	a := newAgenda(t)
	a.view(3, 1)
	paths := func(n uint32) *dirpb.ClientPaths {
		return &dirpb.ClientPaths{Host: "h", Paths: []*dirpb.ClientPath{{Provider: "tcp", Connections: n}}}
	}
	told := func(what string, term uint64, want *dirpb.ClientPaths) {
		t.Helper()
		if q := a.renew(&dirpb.RenewReply{Term: term}); !proto.Equal(q.Paths, want) ||
			(q.Paths == nil) != (want == nil) {
			t.Errorf("%s: told %v, want %v", what, q.Paths, want)
		}
	}
	told("nothing is known", 4, nil)
	a.SetPaths(paths(1))
	a.now += renewEvery
	q := a.renewal()
	a.Answer(q, session.Reply{Err: errLost})
	told("it was lost", 4, paths(1))
	a.SetPaths(paths(1))
	told("nothing is new", 5, nil)
	told("there is another leader", 5, paths(1))
	told("it knows", 5, nil)
	a.SetPaths(paths(2))
	told("there are others", 5, paths(2))
	told("they are known", 5, nil)

	a.SetPaths(paths(3))
	a.now += renewEvery
	q = a.renewal()
	a.SetPaths(paths(4))
	a.answer(q, &dirpb.RenewReply{QuietMillis: 3000, LeaseMillis: 10_000, Term: 5})
	if at := a.Next(); at != a.now+renewEvery {
		t.Errorf("a session with something to tell rests for %d ms", (at-a.now)/1e6)
	}
	told("there were others meanwhile", 5, paths(4))
}

// A session that the directory lets be quiet renews its lease so rarely only while there is
// nothing to tell or to wait for, and at once as often as before when there is.
func TestAgendaQuiet(t *testing.T) {
	const quiet = 3 * second
	a := newAgenda(t)
	a.view(3, 1)
	term := uint64(4)
	reply := func(minEpoch uint64) *dirpb.RenewReply {
		return &dirpb.RenewReply{Term: term, Epoch: minEpoch + 1, MinEpoch: minEpoch, QuietMillis: uint64(quiet / 1e6),
			LeaseMillis: 10_000}
	}
	next := func(what string, want int64) {
		t.Helper()
		if at := a.Next(); at != a.now+want {
			t.Fatalf("%s: next in %d ms, want %d", what, (at-a.now)/1e6, want/1e6)
		}
	}
	epoch := uint64(0)
	var within int64 // how long the last renewal might have taken
	renew := func() *dirpb.RenewRequest {
		t.Helper()
		epoch += 2
		if a.now < a.Next() {
			a.now = a.Next()
		}
		q := a.renewal()
		within = q.Within
		a.answer(q, reply(epoch))
		return q.Renew
	}
	renew()
	next("nothing happens", quiet)
	a.Busy()
	renew()
	if within != 5*renewEvery {
		t.Errorf("a quiet session's renewal is given up after %d ms, want %d", within/1e6, 5*renewEvery/1e6)
	}
	next("operations were performed", renewEvery)
	renew()
	if within != 5*renewEvery {
		t.Errorf("another session's renewal is given up after %d ms, want %d", within/1e6, 5*renewEvery/1e6)
	}
	next("none since", quiet)

	// stirs are the events that may come while it is quiet.
	stirs := map[string]func(){
		"an operation waits": func() { a.Stir() },
		"a place comes into limbo": func() {
			a.core.Unlinks()
			a.Stir() // as Options.Stirred does
		},
	}
	for what, f := range stirs {
		a.now += 2 * renewEvery
		f()
		next(what, 0)
		if a.Stir() {
			t.Fatalf("%s: quiet again before the next renewal", what)
		}
		for range 3 { // until limbo has ended
			renew()
		}
		next("afterwards", quiet)
	}
	a.Hurry()
	renew()
	a.view(4, 1)
	if q := renew(); q.AckedMapVersion != 4 {
		t.Fatalf("a new map is not acknowledged at once: %v", q)
	}
	next("the map is acknowledged", quiet)

	// A session that is called renews at once, and again with what it learns.
	a.now += renewEvery
	a.Called()
	before := a.renewal()
	a.answer(before, reply(epoch+2))
	if q := renew(); q.ReportEpoch <= before.Renew.ReportEpoch || a.now != a.Next()-quiet {
		t.Fatalf("reported %v, then %v", before.Renew, q)
	}
	next("it has been answered twice", quiet)

	// Limbo is told, and not slept through.
	a.core.Unlinks()
	a.Stir()
	a.now += renewEvery
	q := a.renewal()
	if !q.Renew.InLimbo {
		t.Fatalf("asked %v, want it to say that a place is in limbo", q.Renew)
	}
	a.answer(q, &dirpb.RenewReply{Epoch: epoch + 10, MinEpoch: epoch, QuietMillis: 3000})
	next("in limbo", renewEvery)
	a.now += renewEvery
	if q = a.renewal(); q.Renew.InLimbo {
		t.Fatalf("asked %v, though the directory knows since when it waits", q.Renew)
	}
	a.answer(q, &dirpb.RenewReply{Epoch: epoch + 11, MinEpoch: epoch, Term: 5})
	a.now += renewEvery
	if q = a.renewal(); !q.Renew.InLimbo {
		t.Fatalf("asked %v of a leader that does not know", q.Renew)
	}
	a.answer(q, &dirpb.RenewReply{Epoch: epoch + 12, MinEpoch: epoch, Term: 5})
	next("still in limbo", renewEvery)

	// Memory that has been used lately.
	epoch, term = epoch+20, 5
	for range 2 {
		renew()
	}
	next("out of limbo", quiet)
	a.grant(a.wants(10), 5, 4, fresh(1, heapLo, 100))
	renew()
	a.core.Flow(1, 1).Add(0, 10, 10)
	renew()
	next("memory is used", renewEvery)
	for range 20 { // five seconds
		renew()
	}
	next("memory is not used any more, and all is told", quiet)
}

// A lease counts from when the renewal was sent that was answered: the directory counts from
// no earlier moment. Another try counts for itself, and the first one's answer when it comes.
func TestAgendaLease(t *testing.T) {
	a := newAgenda(t)
	a.view(3, 1)
	lease := func(end int64) {
		t.Helper()
		now := a.now
		defer func() { a.now = now }()
		if a.now = end - 1; !a.core.LeaseValid() {
			t.Fatal("the lease ends early")
		}
		if a.now = end; a.core.LeaseValid() {
			t.Fatal("the lease ends late")
		}
	}
	answer := func(q session.Ask, sent int64) {
		a.Answer(q, session.Reply{Renew: &dirpb.RenewReply{Term: 4, LeaseMillis: 2000}, Sent: sent})
	}
	first, sent := a.renewal(), a.now
	a.now += second
	answer(first, sent)
	lease(sent + 2*second)
	if at := a.Next(); at != a.now { // the next one is in time from there, too
		t.Fatalf("next at %d, want %d", at, a.now)
	}
	first, sent = a.renewal(), a.now
	a.now += second
	again, later := a.Again(first), a.now
	a.now += second / 2
	answer(again, later)
	lease(later + 2*second)
	answer(first, sent)
	lease(later + 2*second)
	a.Answer(a.renewal(), session.Reply{Err: errLost, Sent: a.now})
	lease(later + 2*second)
}

// A grant is asked for one at a time, and again at once by one who still misses memory, but
// after a pause where there was none.
func TestAgendaWantsMemory(t *testing.T) {
	a := newAgenda(t)
	a.WantMemory(1, 10)
	if len(a.DueWants()) > 0 {
		t.Fatal("a grant without a map")
	}
	a.view(3, 1)
	a.answer(a.renewal(), &dirpb.RenewReply{})
	a.WantMemory(2, 10) // not in the map
	q := a.wants(5)
	if want := (&dirpb.GrantExtentRequest{SessionId: 7, PgId: 1, WantUnits: 1 << 14, PlaceUnits: 10}); !proto.Equal(
		q.Grant, want) {
		t.Fatalf("asked %v, want %v", q.Grant, want)
	}
	a.WantMemory(1, 20000)
	a.idle()
	a.grant(q, 4, 3, fresh(1, heapLo, 1<<14))
	a.granted(1 << 14)
	if q = a.wants(1); q.Grant.WantUnits != 1<<15 || q.Grant.PlaceUnits != 20000 {
		t.Fatalf("asked %v", q.Grant)
	}
	for i, r := range []session.Reply{{Err: errLost}, {Grant: &dirpb.GrantExtentReply{Term: 4, ComingUnits: 1}},
		{Grant: &dirpb.GrantExtentReply{Term: 4}}} {
		a.Answer(q, r)
		if got := a.core.Exhausted(1); got != (i > 0) {
			t.Fatalf("%v: exhausted %v", r, got)
		}
		a.WantMemory(1, 20000)
		a.idle()
		if at := a.Next(); at != a.now+pause {
			t.Fatalf("%v: next at %d, want %d", r, at, a.now+pause)
		}
		a.now += pause
		q = a.wants(1)
	}
	// The session asks for little again where there was little.
	if q.Grant.WantUnits != 20000 {
		t.Fatalf("asked %v", q.Grant)
	}
	// Runs that cannot be memory of the placement group are not taken.
	a.grant(q, 4, 3, fresh(1, heapLo-1, 2), fresh(1, 1<<20-1, 2), fresh(1, heapLo, 5), fresh(2, heapLo+1<<14, 5),
		fresh(1, heapLo+1<<14, 5))
	a.granted(1<<14 + 5)
	if n := a.Counts().Refused; n != 2+2+5 {
		t.Fatalf("refused %d units", n)
	}
}

// Runs that lie outside the heap, or in another placement group than was asked for, are not
// taken, and are told of; the session asks again.
func TestAgendaBadGrant(t *testing.T) {
	for name, tc := range map[string]struct {
		version uint64 // of the map that it was granted under
		run     *dirpb.ReturnedRun
		want    string
	}{
		"before the heap":  {3, fresh(1, heapLo-1, 2), "outside its heap"},
		"across its end":   {3, fresh(1, heapHi-1, 2), "outside its heap"},
		"behind it":        {3, fresh(1, heapHi+1, 2), "outside its heap"},
		"at the last unit": {3, fresh(1, 1<<32-1, 2), "outside its heap"},
		"another's": {3, &dirpb.ReturnedRun{PgId: 2, Unit: heapLo, Units: 2, Generation: 1},
			"of placement group 2"},
		"a later map's": {4, &dirpb.ReturnedRun{PgId: 2, Unit: heapLo, Units: 2, Generation: 1},
			"of placement group 2"},
	} {
		t.Run(name, func(t *testing.T) {
			a := newAgenda(t)
			a.view(3, 1)
			a.grant(a.wants(10), 4, tc.version, tc.run)
			a.granted(0)
			if n := a.Counts().Refused; n != 2 || len(a.broken) != 1 ||
				!strings.Contains(a.broken[0].Error(), tc.want) {
				t.Fatalf("refused %d units: %v", n, a.broken)
			}
			a.now += pause
			a.grant(a.wants(10), 4, 3, fresh(1, heapLo, 100))
			a.granted(100)
		})
	}
}

// A grant of a leadership that has ended, as the session knows by then, is not taken.
func TestAgendaLateGrant(t *testing.T) {
	a := newAgenda(t)
	a.view(3, 1)
	q := a.wants(10)
	a.answer(a.renewal(), &dirpb.RenewReply{Term: 5})
	a.grant(q, 4, 3, fresh(1, heapLo, 100))
	a.granted(0)
	a.grant(a.wants(10), 5, 3, fresh(1, heapLo, 100))
	a.granted(100)
	if a.core.Exhausted(1) {
		t.Fatal("exhausted")
	}
}

// A map is not acknowledged while a grant is under way that was asked for under an older
// one: its runs may be of an extent that the new one recalls.
func TestAgendaGrantHoldsAcks(t *testing.T) {
	a := newAgenda(t)
	a.view(3, 1)
	a.answer(a.renewal(), &dirpb.RenewReply{})
	q := a.wants(10)
	a.view(4, 1, 0)
	if r := a.renewal(); r.Renew.AckedMapVersion != 3 || r.Renew.QuiescedMapVersion != 4 {
		t.Fatalf("asked %v, with a grant under way", r.Renew)
	} else {
		a.answer(r, &dirpb.RenewReply{})
	}
	a.grant(q, 4, 3, fresh(1, heapLo, 100), fresh(1, layout.ExtentUnits, 50))
	a.granted(50) // extent 0 is being recalled
	if r := a.renewal(); r.Renew.AckedMapVersion != 4 {
		t.Fatalf("asked %v, with none under way", r.Renew)
	}
}

// Runs that the session's map is too old for wait for the newer one.
func TestAgendaEarlyRuns(t *testing.T) {
	for name, tc := range map[string]struct {
		recalled []uint32           // in the session's map, which is 4, of generation 1
		run      *dirpb.ReturnedRun // granted under map 5
		waits    bool               // for it
		then     func(a *agenda)    // map 5
		want     uint64             // units in the end
	}{
		"same":            {nil, fresh(1, heapLo, 100), false, func(a *agenda) { a.view(5, 1) }, 100},
		"began anew":      {nil, fresh(2, heapLo, 100), true, func(a *agenda) { a.view(5, 2) }, 100},
		"twice":           {nil, fresh(2, heapLo, 100), true, func(a *agenda) { a.view(5, 3) }, 0},
		"recalled":        {[]uint32{0}, fresh(1, heapLo, 100), true, func(a *agenda) { a.view(5, 1) }, 100},
		"recalled, again": {[]uint32{0}, fresh(1, heapLo, 100), true, func(a *agenda) { a.view(6, 1, 0) }, 0},
		"another extent":  {[]uint32{1}, fresh(1, heapLo, 100), false, func(a *agenda) { a.view(5, 1) }, 100},
	} {
		t.Run(name, func(t *testing.T) {
			a := newAgenda(t)
			a.view(4, 1, tc.recalled...)
			a.answer(a.renewal(), &dirpb.RenewReply{})
			a.grant(a.wants(10), 4, 5, tc.run)
			if tc.waits {
				a.granted(0)
				a.WantMemory(1, 10)
				a.idle() // it has been granted already
			} else {
				a.granted(100)
			}
			tc.then(a)
			a.DueWants()
			a.granted(tc.want)
		})
	}
}

// Places that a renewal hands back are forgotten before it is sent, and not handed back again, whatever becomes of it.
func TestAgendaHandsBackOnce(t *testing.T) {
	a := newAgenda(t)
	a.view(3, 1)
	a.answer(a.renewal(), &dirpb.RenewReply{})
	h := a.heap()
	for _, p := range []heap.Place{{Unit: 1000, Units: 3, Ver: 1023}, {Unit: 1003, Units: 5, Ver: 7},
		{Unit: 2000, Units: 1}} {
		h.Free(p)
	}
	a.core.Settle(1, 1, 0)
	a.now += second
	q := a.renewal()
	want := []*dirpb.FreePlaces{{PgId: 1, Generation: 1, Unit: 1000, Places: []uint32{3 << 10, 5<<10 | 8}},
		{PgId: 1, Generation: 1, Unit: 2000, Places: []uint32{1<<10 | 1}}}
	if !slices.EqualFunc(q.Renew.HandBacks, want, func(x, y *dirpb.FreePlaces) bool { return proto.Equal(x, y) }) {
		t.Fatalf("handed back %v, want %v", q.Renew.HandBacks, want)
	}
	if s := h.Stats(); s.ForeignFree != 0 || a.Counts().HandedBack != 9 || a.core.Flow(1, 1).Supply() != 0 {
		t.Fatalf("%+v, counts %+v, supply %d", s, a.Counts(), a.core.Flow(1, 1).Supply())
	}
	if len(q.Renew.Held) != 1 {
		t.Fatalf("tells of %v", q.Renew.Held)
	}
	// Its fate is not known: another try, of its own number.
	h.Free(heap.Place{Unit: 3000, Units: 2})
	again := a.Again(q)
	if r := again.Renew; len(r.HandBacks)+len(r.Returns)+len(r.Held) > 0 || r.Number != q.Renew.Number+1 ||
		r.AckedMapVersion != 3 || r.SessionId != 7 || r.Term != 4 {
		t.Fatalf("asked again %v after %v", r, q.Renew)
	}
	a.Answer(again, session.Reply{Err: errLost})
	if s := h.Stats(); s.ForeignFree != 2 {
		t.Fatalf("%+v: put back", s)
	}
	// The next one hands back what was freed since, and tells what the session holds.
	r := a.renewal().Renew
	if len(r.HandBacks) != 1 || r.HandBacks[0].Unit != 3000 || len(r.Held) != 1 {
		t.Fatalf("asked %v", r)
	}
}

// Places that come home are taken in from the reply to the latest renewal, of no ended
// leadership, and once.
func TestAgendaDeliveries(t *testing.T) {
	a := newAgenda(t)
	a.view(3, 1)
	a.answer(a.renewal(), &dirpb.RenewReply{})
	a.grant(a.wants(10), 4, 3, fresh(1, heapLo, 100))
	var ps []heap.Place
	for range 10 {
		p, _ := a.heap().Alloc(10)
		p.Ver = 500
		ps = append(ps, p)
	}
	free := func(want uint64) {
		t.Helper()
		if got := a.heap().Stats().Free; got != want {
			t.Fatalf("%d units are free, want %d", got, want)
		}
	}
	a.renew(&dirpb.RenewReply{Deliveries: delivery(ps[0])})
	free(10)
	if p, _ := a.heap().Alloc(10); p != ps[0] {
		t.Fatalf("the next life is %v, want %v", p, ps[0])
	}
	// Overtaken by another try: its reply brings nothing.
	a.now += renewEvery
	first := a.renewal()
	second := a.Again(first)
	a.answer(first, &dirpb.RenewReply{Deliveries: delivery(ps[1])})
	free(0)
	a.idle() // the other is under way
	a.answer(second, &dirpb.RenewReply{Deliveries: delivery(ps[2])})
	free(10)
	// Too late after a newer one.
	a.answer(first, &dirpb.RenewReply{Deliveries: delivery(ps[3])})
	free(10)
	// A leadership that has ended.
	a.renew(&dirpb.RenewReply{Term: 6})
	a.renew(&dirpb.RenewReply{Term: 5, Deliveries: delivery(ps[4])})
	free(10)
	if a.Term() != 6 {
		t.Fatalf("term %d", a.Term())
	}
	before := a.Counts()
	a.renew(&dirpb.RenewReply{Term: 6, Deliveries: delivery(ps[2], heap.Place{Unit: ps[5].Unit, Units: 9},
		heap.Place{Unit: 1<<20 + 5, Units: 3})})
	free(10)
	a.renew(&dirpb.RenewReply{
		Term: 6, Deliveries: []*dirpb.FreePlaces{{PgId: 1, Generation: 2, Unit: ps[5].Unit, Places: []uint32{10 << 10}},
			{PgId: 9, Generation: 1, Unit: ps[5].Unit, Places: []uint32{10 << 10}}}})
	free(10)
	if n := a.Counts(); n.Refused != before.Refused+10+9+3+10+10 || n.Received != 20 {
		t.Fatalf("counts %+v, before %+v", n, before)
	}
	// Places that adjoin, and of an extent that is being recalled.
	a.renew(&dirpb.RenewReply{
		Term: 6, Deliveries: []*dirpb.FreePlaces{
			{PgId: 1, Generation: 1, Unit: ps[6].Unit, Places: []uint32{10<<10 | 3, 10<<10 | 4}}}})
	free(30)
	a.view(4, 1, 0)
	a.renew(&dirpb.RenewReply{Term: 6, Deliveries: delivery(ps[9])})
	if s := a.heap().Stats(); s.Free > 30 {
		t.Fatalf("%+v: taken in while its extent is being recalled", s)
	}
}

// A session keeps what it used lately, and a floor, which is lower where memory is short;
// own memory beyond that goes back.
func TestAgendaSurplus(t *testing.T) {
	a := newAgenda(t)
	a.view(3, 1)
	a.answer(a.renewal(), &dirpb.RenewReply{})
	a.grant(a.wants(10), 4, 3, fresh(1, heapLo, 200_000))
	free := func(want uint64) {
		t.Helper()
		if got := a.heap().Stats().Free; got != want {
			t.Fatalf("%d units are free, want %d", got, want)
		}
	}
	returned := func(r *dirpb.RenewRequest) (n uint64) {
		for _, x := range r.Returns {
			if x.PgId != 1 || x.Generation != 1 || !x.Fresh {
				t.Fatalf("returned %v", x)
			}
			n += uint64(x.Units)
		}
		return n
	}
	supply := func(s *dirpb.Supply) *dirpb.RenewReply {
		s.PgId = 1
		return &dirpb.RenewReply{Supply: []*dirpb.Supply{s}}
	}
	a.now += 10 * second
	if n := returned(a.renew(supply(&dirpb.Supply{FloorUnits: 20_000, ShareUnits: 77}))); n != 0 {
		t.Fatalf("returned %d units, with nothing said of a floor", n)
	}
	if a.core.Share(1) != 77 || a.core.Short(1) {
		t.Fatalf("share %d, short %v", a.core.Share(1), a.core.Short(1))
	}
	if n := returned(a.renew(&dirpb.RenewReply{})); n != 180_000 || a.Counts().Returned != n {
		t.Fatalf("returned %d units, counts %+v", n, a.Counts())
	}
	free(20_000)
	// Once a second at most.
	a.grant(a.wants(10), 4, 3, fresh(1, 2<<18, 100_000))
	if n := returned(a.renew(supply(&dirpb.Supply{FloorUnits: 20_000}))); n != 0 {
		t.Fatalf("returned %d units a moment later", n)
	}
	a.now += second
	if n := returned(a.renew(supply(&dirpb.Supply{FloorUnits: 20_000}))); n != 100_000 {
		t.Fatalf("returned %d units", n)
	}
	// A session that waits for more keeps all if memory is not short.
	a.now += 10 * second
	a.grant(a.wants(10), 4, 3, fresh(1, 3<<18, 90_000))
	q := a.wants(300_000)
	if n := returned(a.renew(supply(&dirpb.Supply{FloorUnits: 20_000}))); n != 0 {
		t.Fatalf("returned %d units while it asks for more", n)
	}
	a.grant(q, 4, 3)
	a.now += second
	if n := returned(a.renew(supply(&dirpb.Supply{FloorUnits: 20_000}))); n != 90_000 {
		t.Fatalf("returned %d units once it does not", n)
	}
	// A little more than the floor is left alone.
	a.grant(a.wants(10), 4, 3, fresh(1, 1<<18, 16_000))
	a.now += 10 * second
	if n := returned(a.renew(supply(&dirpb.Supply{Short: true, FloorUnits: 1_000}))); n != 0 {
		t.Fatalf("returned %d units", n)
	}
	free(36_000)
	// Where memory is short one that lacks some itself returns it all the same: what it has
	// free is too short for its record, and has to be put together.
	q = a.wants(300_000)
	if n := returned(a.renew(supply(&dirpb.Supply{Short: true, FloorUnits: 1_000, GiveUnits: 400}))); n != 35_000 {
		t.Fatalf("returned %d units where memory is short", n)
	}
	a.grant(q, 4, 3)
	free(1_000)
	if n := returned(a.renew(supply(&dirpb.Supply{Short: true, FloorUnits: 1_000}))); n != 400 {
		t.Fatalf("returned %d units that others were to have", n)
	}
	free(600)
	// Not named in a reply: it has room again, and the same floor unless all were to be named.
	a.now += second
	if r := a.renew(supply(&dirpb.Supply{Short: true, FloorUnits: 600, GiveUnits: 0, ShareUnits: 5})); len(r.Held) !=
		1 {
		t.Fatalf("asked %v", r)
	}
	a.Hurry()
	r := a.renewal()
	a.answer(r, &dirpb.RenewReply{})
	if len(r.Renew.Held) != 0 || a.core.Short(1) || a.core.Share(1) != 5 {
		t.Fatalf("asked %v, short %v, share %d", r, a.core.Short(1), a.core.Share(1))
	}
}

// Places that were used in the last seconds are kept, foreign ones too.
func TestAgendaKeepsWhatItUses(t *testing.T) {
	a := newAgenda(t)
	a.view(3, 1)
	a.answer(a.renewal(), &dirpb.RenewReply{Supply: []*dirpb.Supply{{PgId: 1, FloorUnits: 100}}})
	a.grant(a.wants(10), 4, 3, fresh(1, heapLo, 200_000))
	h, f := a.heap(), a.core.Flow(1, 1)
	a.renew(&dirpb.RenewReply{Supply: []*dirpb.Supply{{PgId: 1, FloorUnits: 100}}})
	before := h.Stats().Free
	if before == 200_000 || before > 30_000 {
		t.Fatalf("kept %d units of which none was used", before)
	}
	a.grant(a.wants(10), 4, 3, fresh(1, 1<<18, 200_000))
	// 90,000 units are taken and given back in a second, as Flow counts.
	f.Add(0, 90_000, 90_000)
	for i := range uint32(100) {
		h.Free(heap.Place{Unit: 3<<18 + 1000*i, Units: 1000})
	}
	a.now += second
	floor := &dirpb.RenewReply{Supply: []*dirpb.Supply{{PgId: 1, FloorUnits: 100}}}
	r := a.renew(floor)
	if n := h.Stats(); n.Free < 90_000 || n.Free > 91_000 || n.ForeignFree < 90_000 || n.ForeignFree > 91_000 ||
		len(r.HandBacks) == 0 {
		t.Fatalf("kept %+v of which 90,000 were used: %d returned, %d handed back, taken %d", n, len(r.Returns),
			len(r.HandBacks), f.Taken())
	}
	// A few seconds later they are not used any more.
	for range 6 {
		a.now += second
		a.renew(floor)
	}
	if n := h.Stats(); n.Free > 30_000 || n.ForeignFree != 0 {
		t.Fatalf("kept %+v", n)
	}
}

// A session that closes hands back all: own runs, others' places, and what it has linked.
func TestAgendaClose(t *testing.T) {
	a := newAgenda(t)
	a.view(3, 1)
	a.answer(a.renewal(), &dirpb.RenewReply{})
	a.grant(a.wants(10), 4, 3, fresh(1, heapLo, 100))
	p, _ := a.heap().Alloc(10)
	a.heap().Free(heap.Place{Unit: 5000, Units: 4, Ver: 9})
	want := &dirpb.CloseSessionRequest{SessionId: 7,
		Runs:      []*dirpb.ReturnedRun{fresh(1, p.Unit+10, 90)},
		HandBacks: delivery(heap.Place{Unit: 5000, Units: 4, Ver: 10}),
		Held:      []*dirpb.Held{{PgId: 1, Generation: 1}}}
	if q := a.Close(); !proto.Equal(q, want) {
		t.Fatalf("closed with %v, want %v", q, want)
	}
	// A grant under way may be lost, and so may one without an answer.
	a.WantMemory(1, 10)
	if a.now += second; len(a.DueWants()) != 1 || a.Ending() || !a.Close().Leaked {
		t.Fatal("a grant under way is forgotten")
	}
	// Of an older generation nothing.
	b := newAgenda(t)
	b.view(3, 1)
	b.grant(b.wants(10), 4, 3, fresh(1, heapLo, 100))
	b.view(4, 2)
	if q := b.Close(); len(q.Runs)+len(q.HandBacks)+len(q.Held) > 0 {
		t.Fatalf("closed with %v", q)
	}
}

// A session that ends asks for no memory any more, and hands back what it was granted under
// a map that it never saw.
func TestAgendaEnding(t *testing.T) {
	a := newAgenda(t)
	a.view(3, 1)
	a.answer(a.renewal(), &dirpb.RenewReply{})
	q := a.wants(10)
	if a.Ending() {
		t.Fatal("no grant is under way")
	}
	a.WantMemory(1, 20)
	a.grant(q, 4, 9, fresh(2, heapLo, 100))
	if !a.Ending() || a.Next() < a.now {
		t.Fatal("a grant is under way, or due")
	}
	a.idle()
	if c := a.Close(); len(c.Runs) != 1 || !proto.Equal(c.Runs[0], fresh(2, heapLo, 100)) || len(a.Close().Runs) != 0 {
		t.Fatalf("closed with %v", c)
	}
}
