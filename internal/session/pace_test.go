package session_test

import (
	"testing"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/session"
)

// paced is a session with 5,000 units free, whose pace is known to be none.
func paced(t *testing.T) (a *agenda, take func(units, after int64)) {
	a = newAgenda(t)
	a.view(3, 1)
	a.answer(a.renewal(), &dirpb.RenewReply{})
	a.grant(a.wants(10), 4, 3, fresh(1, heapLo, 5_000))
	a.renew(&dirpb.RenewReply{})
	return a, func(units, after int64) {
		a.t.Helper()
		a.core.Flow(1, 1).Add(0, units, units)
		a.now += after
		a.answer(a.hurried(0), &dirpb.RenewReply{})
	}
}

// A session asks ahead by what it took between two renewals, about in time; ones in a hurry do not count, and what was
// taken over a longer time says nothing of its pace.
func TestAgendaPace(t *testing.T) {
	for name, tc := range map[string]struct {
		do   func(take func(units, after int64))
		want bool
	}{
		"as much as a first grant": {func(take func(units, after int64)) { take(1<<14, renewEvery) }, false},
		"one unit more":            {func(take func(units, after int64)) { take(1<<14+1, renewEvery) }, true},
		"a little late":            {func(take func(units, after int64)) { take(60_000, 2*renewEvery-1) }, true},
		"too late":                 {func(take func(units, after int64)) { take(60_000, 2*renewEvery) }, false},
		"in a hurry":               {func(take func(units, after int64)) { take(60_000, renewEvery/2-1) }, false},
		"hardly in a hurry":        {func(take func(units, after int64)) { take(60_000, renewEvery/2) }, true},
		"in a hurry and in time": {func(take func(units, after int64)) {
			take(10_000, ms)
			take(10_000, renewEvery-ms)
		}, true},
		"before, and not since": {func(take func(units, after int64)) {
			take(60_000, renewEvery)
			take(0, renewEvery)
		}, false},
		"before, and in a hurry": {func(take func(units, after int64)) {
			take(60_000, renewEvery)
			take(0, ms)
		}, true},
		"before, and soon": {func(take func(units, after int64)) {
			take(60_000, renewEvery)
			take(0, renewEvery/2)
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			a, take := paced(t)
			take(0, renewEvery)
			tc.do(func(units, after int64) {
				take(units, after)
				if q, due := a.ahead(); due {
					a.Answer(q, session.Reply{Err: errLost})
				}
			})
			// A grant asks ahead by the last pace, as renewals do.
			a.now += pause
			a.grant(a.wants(10), 4, 3, fresh(1, heapHi-10, 1))
			if _, due := a.ahead(); due != tc.want {
				t.Errorf("asked ahead: %v, want %v", due, tc.want)
			}
		})
	}
}

// A placement group that begins anew has no pace, though its account is less than it was.
func TestAgendaPaceAnew(t *testing.T) {
	a, take := paced(t)
	take(60_000, renewEvery)
	q, due := a.ahead()
	if !due {
		t.Fatal("not asked ahead")
	}
	// Of the grant of a generation that has gone nothing is kept, nor does it make another one wanted.
	a.view(4, 2)
	a.grant(q, 4, 3, fresh(1, heapLo+10_000, 10))
	if q, due := a.ahead(); due {
		t.Fatalf("asked %v for a generation that has gone", q)
	}
	a.grant(a.wants(10), 4, 4, fresh(2, heapLo, 100))
	if q, due = a.ahead(); due { // by the pace that was
		a.grant(q, 4, 4, fresh(2, heapLo+100, 60_000))
	}
	a.now += renewEvery
	a.answer(a.renewal(), &dirpb.RenewReply{})
	a.core.Flow(1, 2).Add(0, 10, 10)
	a.heap().AllocFit(30_000, 30_000, 30_000)
	a.heap().AllocFit(30_000, 30_000, 30_000)
	a.renew(&dirpb.RenewReply{})
	if q, due := a.ahead(); due {
		t.Fatalf("asked %v by the pace of another generation", q)
	}
}

// The pace of one placement group says nothing of another, and a session that was refused memory that it needs asks for
// none ahead.
func TestAgendaPaceOfAnother(t *testing.T) {
	a := newAgenda(t)
	a.install(3, group(1, 1), group(2, 1))
	a.answer(a.renewal(), &dirpb.RenewReply{})
	a.grant(a.wants(10), 4, 3, fresh(1, heapLo, 5_000))
	a.WantMemory(2, 10)
	run := fresh(1, heapLo, 100)
	run.PgId = 2
	a.grant(a.due(session.AskGrant), 4, 3, run)
	a.renew(&dirpb.RenewReply{})
	a.core.Flow(1, 1).Add(0, 60_000, 60_000)
	a.renew(&dirpb.RenewReply{})
	q, due := a.ahead()
	if !due || q.Grant.PgId != 1 {
		t.Fatalf("asked %v", q.Grant)
	}
	a.grant(q, 4, 3, fresh(1, heapLo+10_000, 10))
	if q, due = a.ahead(); !due || q.Grant.PgId != 1 {
		t.Fatalf("asked %v", q.Grant)
	}

	// Nothing is there ahead: that is over with its pause, if nobody takes any more.
	a.grant(q, 4, 3)
	a.core.Flow(1, 1).Add(0, 60_000, 60_000)
	a.renew(&dirpb.RenewReply{})
	for range 2 {
		if q, due := a.ahead(); due {
			t.Fatalf("asked %v ahead again", q)
		}
		a.now += second
	}

	a.grant(a.wants(10), 4, 3) // refused
	a.core.Flow(1, 1).Add(0, 60_000, 60_000)
	a.now += renewEvery
	a.answer(a.hurried(0), &dirpb.RenewReply{})
	a.core.Flow(1, 1).Add(0, 60_000, 60_000)
	a.now += renewEvery
	a.answer(a.hurried(0), &dirpb.RenewReply{})
	if q, due := a.ahead(); due {
		t.Fatalf("asked %v ahead where there is none", q)
	}
}
