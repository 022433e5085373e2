package session_test

import (
	"testing"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/session"
)

// The times of a session count from when a renewal was sent, however long its reply took.
func TestAgendaTimesSince(t *testing.T) {
	a := newAgenda(t)
	a.view(3, 1)
	slow := func(quiet uint64) (sent int64) {
		q := a.hurried(0)
		sent = a.now
		a.now += renewEvery / 2
		a.Answer(q, session.Reply{Renew: &dirpb.RenewReply{Term: 4, QuietMillis: quiet}, Sent: sent})
		return sent
	}
	if sent := slow(3000); !a.core.Quiet() || a.Next() != sent+3*second {
		t.Errorf("quiet %v until %d ms after it was sent, want 3000", a.core.Quiet(), (a.Next()-sent)/ms)
	}
	if sent := slow(3000); !a.Stir() || a.Next() != sent+renewEvery {
		t.Errorf("stirred: renewed %d ms after the last one was sent, want %d", (a.Next()-sent)/ms, renewEvery/ms)
	}
	// A directory that allows less quiet than the pause between two renewals has none sent sooner.
	if sent := slow(1); a.Next() != sent+renewEvery {
		t.Errorf("renewed %d ms after the last one was sent, want %d", (a.Next()-sent)/ms, renewEvery/ms)
	}
}

// A renewal is given up after five times the pause between two, but not within a second. A map that cannot be
// acknowledged is looked at as often as renewals are sent, at least.
func TestAgendaShortPauses(t *testing.T) {
	a := newAgenda(t)
	a.Agenda = session.NewAgenda(a.core, session.AgendaOptions{Renew: second / 10, Term: 4})
	a.view(3, 1)
	q := a.renewal()
	if q.Within != second {
		t.Errorf("given up after %d ms, want 1000", q.Within/ms)
	}
	a.answer(q, &dirpb.RenewReply{})
	a.wants(10) // a grant under way holds acknowledgements
	a.view(4, 1)
	for range 20 {
		if q, due := a.DueRenewal(none); due {
			a.answer(q, &dirpb.RenewReply{})
		}
		at := a.Next()
		if at > a.now+second/10 {
			t.Fatalf("looked at again in %d ms", (at-a.now)/ms)
		}
		a.now = at
	}
	a.Agenda = session.NewAgenda(a.core, session.AgendaOptions{Renew: second, Term: 4})
	a.now += 10 * second
	a.view(5, 1)
	a.wants(10)
	a.view(6, 1)
	for range 200 {
		if q, due := a.DueRenewal(none); due {
			a.answer(q, &dirpb.RenewReply{})
			continue
		}
		at := a.Next()
		if at <= a.now || at > a.now+second {
			t.Fatalf("looked at again in %d ms", (at-a.now)/ms)
		}
		a.now = at
	}
}

// A session goes quiet though it still has memory of a generation that has gone.
func TestAgendaQuietAnew(t *testing.T) {
	a := newAgenda(t)
	a.view(3, 1)
	a.answer(a.renewal(), &dirpb.RenewReply{})
	a.grant(a.wants(10), 4, 3, fresh(1, heapLo, 100))
	a.view(4, 2)
	for range 5 {
		a.now += second
		a.answer(a.hurried(0), &dirpb.RenewReply{Epoch: 3, MinEpoch: 2, QuietMillis: 3000})
	}
	if !a.core.Quiet() {
		t.Fatal("not quiet")
	}
}
