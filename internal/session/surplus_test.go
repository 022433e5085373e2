package session_test

import (
	"testing"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/heap"
	"github.com/kvd-project/kvd/internal/session"
)

// surplus is a session that has blocks of so many units free, apart from each other, of which none has been used, and
// that the directory has told nothing.
func surplus(t *testing.T, blocks ...uint32) *agenda {
	a := newAgenda(t)
	a.view(3, 1)
	a.answer(a.renewal(), &dirpb.RenewReply{})
	a.have(blocks...)
	return a
}

// have grants blocks.
func (a *agenda) have(blocks ...uint32) {
	a.t.Helper()
	unit := uint32(heapLo)
	var runs []*dirpb.ReturnedRun
	for _, n := range blocks {
		runs = append(runs, fresh(1, unit, n))
		unit += n + 1
	}
	a.grant(a.wants(10), 4, 3, runs...)
}

func told(s *dirpb.Supply) *dirpb.RenewReply {
	s.PgId = 1
	return &dirpb.RenewReply{Supply: []*dirpb.Supply{s}}
}

// returns has a renewal sent some time later, which returns so many units.
func (a *agenda) returns(what string, after int64, reply *dirpb.RenewReply, want uint64) {
	a.t.Helper()
	a.now += after
	q := a.hurried(0)
	a.answer(q, reply)
	got := uint64(0)
	for _, x := range q.Renew.Returns {
		got += uint64(x.Units)
	}
	if got != want {
		a.t.Fatalf("%s: returned %d units, want %d", what, got, want)
	}
}

func repeat(n int, units uint32) (list []uint32) {
	for range n {
		list = append(list, units)
	}
	return list
}

// Where memory is short, a session that lacks some returns what is too short for its record, the longest of the last
// seconds, and nothing else.
func TestAgendaReturnsWhatIsTooShort(t *testing.T) {
	short := func() *dirpb.RenewReply { return told(&dirpb.Supply{Short: true}) }
	blocks := []uint32{19, 20, 49, 50, 100_000}
	lack := func(a *agenda, units uint32) {
		a.t.Helper()
		a.grant(a.wants(units), 4, 3)
	}

	a := surplus(t, blocks...)
	a.answer(a.hurried(0), short())
	lack(a, 50)
	a.returns("it lacks 50", ms, short(), 19+20+49)
	a.returns("it lacked 50", 3*second-2*ms, short(), 0)
	a.returns("it lacked 50 three seconds ago", ms, short(), 50+100_000)

	a = surplus(t, blocks...)
	a.answer(a.hurried(0), short())
	lack(a, 50)
	a.now += 2 * second
	lack(a, 20)
	a.returns("it lacks 20, and lacked 50", 2*second, short(), 19+20+49)

	a = surplus(t, blocks...)
	a.answer(a.hurried(0), short())
	lack(a, 50)
	a.now += 3 * second
	lack(a, 20)
	a.returns("it lacks 20, and lacked 50 long ago", ms, short(), 19)

	a = surplus(t, blocks...)
	a.answer(a.hurried(0), short())
	a.returns("it lacks nothing", ms, short(), 19+20+49+50+100_000)

	// Where others lack none it returns what is long.
	a = surplus(t, blocks...)
	lack(a, 50)
	a.answer(a.hurried(0), told(&dirpb.Supply{}))
	a.returns("it lacks 50, and memory is not short", ms, told(&dirpb.Supply{}), 100_000)
}

// A session keeps what it used in the last three seconds, or in the last one where others lack memory and it does not;
// of what it has free no more than half then.
func TestAgendaKeepsWhatItUsedLately(t *testing.T) {
	for name, tc := range map[string]struct {
		short, lacks bool
		kept         []uint64 // so many seconds later, of 200,000 free units
	}{
		"enough":          {false, false, []uint64{90_000, 90_000, 90_000, 0}},
		"short":           {true, false, []uint64{90_000, 0, 0, 0}},
		"short, it lacks": {true, true, []uint64{90_000, 90_000, 90_000, 0}},
	} {
		for i, kept := range tc.kept {
			a := surplus(t, repeat(200, 1000)...)
			for range 8 { // more often than it is looked at
				a.renew(&dirpb.RenewReply{})
			}
			a.core.Flow(1, 1).Add(0, 90_000, 90_000)
			for range 4*(i+1) - 1 {
				a.renew(&dirpb.RenewReply{})
			}
			a.answer(a.hurried(0), told(&dirpb.Supply{Short: tc.short}))
			if tc.lacks {
				a.grant(a.wants(1001), 4, 3)
			}
			if a.renew(&dirpb.RenewReply{}); a.heap().Stats().Free != kept {
				t.Errorf("%s, %d seconds later: kept %d units, want %d", name, i+1, a.heap().Stats().Free, kept)
			}
		}
	}

	a := surplus(t, 60_000)
	a.answer(a.hurried(0), told(&dirpb.Supply{Short: true}))
	a.core.Flow(1, 1).Add(0, 90_000, 90_000)
	a.returns("half of what it has free", ms, told(&dirpb.Supply{Short: true}), 30_000)

	// Nothing that was taken before the first look is known to be of the last seconds.
	a = newAgenda(t)
	a.view(3, 1)
	a.grant(a.wants(10), 4, 3, fresh(1, heapLo, 200_000))
	a.core.Flow(1, 1).Add(0, 90_000, 90_000)
	a.answer(a.renewal(), told(&dirpb.Supply{}))
	a.returns("in its first second", second/2, told(&dirpb.Supply{}), 200_000)

	// A placement group that began anew has used nothing, though its account is less than it was.
	a = surplus(t, 10)
	a.core.Flow(1, 1).Add(0, 90_000, 90_000)
	a.renew(told(&dirpb.Supply{}))
	a.view(4, 2)
	a.grant(a.wants(10), 4, 4, fresh(2, heapLo, 200_000))
	a.returns("of another generation", ms, told(&dirpb.Supply{}), 200_000)
}

// Foreign places are kept by the same rule.
func TestAgendaKeepsForeignPlacesUsedLately(t *testing.T) {
	for name, tc := range map[string]struct {
		short bool
		kept  []uint64 // at each renewal, a second apart, of 100,000
	}{
		"enough": {false, []uint64{90_000, 90_000, 90_000, 0}},
		"short":  {true, []uint64{90_000, 0}},
	} {
		t.Run(name, func(t *testing.T) {
			a := surplus(t, 10)
			reply := func() *dirpb.RenewReply { return told(&dirpb.Supply{Short: tc.short, FloorUnits: 10}) }
			a.renew(&dirpb.RenewReply{})
			a.now += second
			a.answer(a.hurried(0), reply())
			for i := range uint32(100) {
				a.heap().Free(heap.Place{Unit: 3<<18 + 1000*i, Units: 1000})
			}
			a.core.Flow(1, 1).Add(100_000, 90_000, 90_000)
			for i, kept := range tc.kept {
				a.now += second
				a.answer(a.hurried(0), reply())
				if free := a.heap().Stats().ForeignFree; free != kept {
					t.Fatalf("%d seconds later: kept %d units, want %d", i+1, free, kept)
				}
			}
		})
	}
}

// Where nobody lacks memory surplus goes back: nothing while the session wants some of the same placement group, no
// short runs, once a second at most, and nothing before it is half as much again as the session keeps.
func TestAgendaSurplusRules(t *testing.T) {
	enough := func(floor uint64) *dirpb.RenewReply { return told(&dirpb.Supply{FloorUnits: floor}) }
	a := surplus(t, 200_000)
	a.grant(a.wants(300_000), 4, 3)
	a.answer(a.hurried(0), enough(0))
	a.WantMemory(1, 300_000)
	a.returns("it wants some", ms, enough(0), 0)
	a.returns("it wants some still", second, enough(0), 0)
	a.now += pause
	a.grant(a.due(session.AskGrant), 4, 3)
	a.WantMemory(9, 10)
	a.returns("of another placement group", ms, enough(0), 200_000)

	a = surplus(t, 149_999)
	a.answer(a.hurried(0), enough(100_000))
	a.returns("less than half too much", second, enough(100_000), 0)
	a = surplus(t, 150_000)
	a.answer(a.hurried(0), enough(100_000))
	a.returns("half too much", second, enough(100_000), 50_000)

	a = surplus(t, append(repeat(300, 63), 64)...)
	a.answer(a.hurried(0), enough(0))
	a.returns("short runs", second, enough(0), 64)
	a = surplus(t, append(repeat(300, 63), 64)...)
	a.answer(a.hurried(0), told(&dirpb.Supply{Short: true, FloorUnits: 0}))
	a.returns("short runs where memory is short", second, enough(0), 300*63+64)

	a = surplus(t, 200_000)
	a.answer(a.hurried(0), enough(0))
	a.returns("all", ms, enough(0), 200_000)
	a.have(200_000)
	a.returns("a moment before a second is over", second-1, enough(0), 0)
	a.returns("a second later", 1, enough(0), 200_000)

	// Others are to have no more than what there is.
	a = surplus(t, 1000)
	a.answer(a.hurried(0), told(&dirpb.Supply{Short: true, FloorUnits: 100, GiveUnits: 400}))
	a.returns("more than it keeps", ms, told(&dirpb.Supply{}), 1000)

	// And it is not asked for again where the directory does not say so.
	a.have(1000)
	a.answer(a.hurried(0), told(&dirpb.Supply{Short: true, FloorUnits: 1000, GiveUnits: 400}))
	a.answer(a.hurried(0), &dirpb.RenewReply{})
	if a.core.Give(1) != 0 || a.core.Short(1) {
		t.Fatalf("give %d units, short %v: nothing was said of it", a.core.Give(1), a.core.Short(1))
	}
}

// The bounds of a renewal are for all placement groups together; what did not fit goes with the next one.
func TestAgendaRenewalBounds(t *testing.T) {
	a := newAgenda(t)
	a.install(3, group(1, 1), group(2, 1))
	a.answer(a.renewal(), &dirpb.RenewReply{})
	var supply []*dirpb.Supply
	for pg := range uint32(2) {
		pg++
		var runs []*dirpb.ReturnedRun
		for i := range uint32(700) {
			r := fresh(1, heapLo+101*i, 100)
			r.PgId = pg
			runs = append(runs, r)
		}
		a.WantMemory(pg, 10)
		a.grant(a.due(session.AskGrant), 4, 3, runs...)
		supply = append(supply, &dirpb.Supply{PgId: pg})
	}
	a.answer(a.hurried(0), &dirpb.RenewReply{Supply: supply})
	for i, want := range []int{1024, 0, 376} {
		q := a.hurried(0)
		a.answer(q, &dirpb.RenewReply{Supply: supply})
		if got := len(q.Renew.Returns); got != want {
			t.Fatalf("renewal %d returned %d runs, want %d", i, got, want)
		}
		a.now += second / 2
	}

	// A placement group that nothing was left for is looked at with the next renewal.
	b := newAgenda(t)
	b.install(3, group(1, 1), group(2, 1))
	b.answer(b.renewal(), &dirpb.RenewReply{})
	for pg, n := range map[uint32]uint32{1: 1024, 2: 300} {
		var runs []*dirpb.ReturnedRun
		for i := range n {
			r := fresh(1, heapLo+101*i, 100)
			r.PgId = pg
			runs = append(runs, r)
		}
		b.WantMemory(pg, 10)
		b.grant(b.due(session.AskGrant), 4, 3, runs...)
	}
	b.answer(b.hurried(0), &dirpb.RenewReply{Supply: supply})
	for i, want := range []int{1024, 300} {
		q := b.hurried(0)
		b.answer(q, &dirpb.RenewReply{Supply: supply})
		if got := len(q.Renew.Returns); got != want {
			t.Fatalf("renewal %d returned %d runs, want %d", i, got, want)
		}
	}

	// Places of others: more where memory is short, and as many in all.
	for i := range supply {
		supply[i].Short, supply[i].FloorUnits = true, 1<<20
	}
	b.answer(b.hurried(0), &dirpb.RenewReply{Supply: supply})
	for pg := uint32(1); pg <= 2; pg++ {
		h := b.core.HeapOf(&b.core.View().PGs[pg].PG)
		for i := range uint32(30_000) {
			h.Free(heap.Place{Unit: 3<<18 + 2*i, Units: 1})
		}
		b.core.Settle(pg, 1, 0)
	}
	for i, want := range []int{1 << 15, 60_000 - 1<<15} {
		q, got := b.hurried(0), 0
		for _, f := range q.Renew.HandBacks {
			got += len(f.Places)
		}
		if got != want {
			t.Fatalf("renewal %d handed back %d places, want %d", i, got, want)
		}
		b.answer(q, &dirpb.RenewReply{Supply: supply})
	}
}

// The holdings that a session tells of add up, however much its account has drifted, and are told again if one part has
// changed, or all is of another generation.
func TestAgendaHoldings(t *testing.T) {
	a := surplus(t, 100)
	a.now += second
	said := func(what string, free, foreign uint64) {
		t.Helper()
		a.now += second
		q := a.hurried(0)
		a.answer(q, &dirpb.RenewReply{})
		if len(q.Renew.Held) != 1 {
			t.Fatalf("%s: nothing said", what)
		}
		if h := q.Renew.Held[0]; h.FreeUnits != free || h.ForeignUnits != foreign || h.LimboUnits != 0 {
			t.Fatalf("%s: said %v, want %d free and %d foreign", what, h, free, foreign)
		}
	}
	f := a.core.Flow(1, 1)
	said("first", 100, 0)
	f.Add(-150, 50, 50) // so that foreign places are kept
	said("an account below zero", 0, 0)
	f.Add(52, 50, 50)
	a.heap().Free(heap.Place{Unit: 2 << 18, Units: 4})
	said("less than the foreign places", 0, 2)
	f.Add(108, 50, 50)
	a.heap().TakeForeign(1, 4)
	said("more", 110, 0)
	a.heap().Free(heap.Place{Unit: 3 << 18, Units: 4})
	said("foreign places that the account does not have yet", 106, 4)
	f.Add(4, 0, 0)
	said("it has", 110, 4)
	a.heap().Free(heap.Place{Unit: 3<<18 + 8, Units: 6})
	f.Add(6, 0, 0)
	f.Add(0, 50, 50)
	said("foreign places alone", 110, 10)
	a.grant(a.wants(10), 4, 3, fresh(1, heapHi-7, 7))
	f.Add(-7, 0, 0)
	said("own memory alone", 110, 10)

	b := surplus(t, 100)
	b.renew(&dirpb.RenewReply{})
	b.now += second
	b.view(4, 2)
	b.grant(b.wants(10), 4, 4, fresh(2, heapLo, 100))
	if q := b.renewal(); len(q.Renew.Held) != 1 || q.Renew.Held[0].Generation != 2 {
		t.Fatalf("said %v, want what it holds of another generation", q.Renew.Held)
	}

	// A session that only reads hands nothing back.
	c := newAgenda(t)
	c.view(3, 1)
	c.heap().Free(heap.Place{Unit: 5000, Units: 4})
	c.Agenda = session.NewAgenda(c.core, session.AgendaOptions{Renew: renewEvery, Term: 4, ReadOnly: true})
	if q := c.renewal().Renew; len(q.HandBacks)+len(q.Held) > 0 {
		t.Fatalf("asked %v", q)
	}
}
