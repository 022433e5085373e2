package session_test

import (
	"testing"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/session"
)

// ahead is the grant that is due though no operation misses memory; false: there is none.
func (a *agenda) ahead() (q session.Ask, due bool) {
	a.t.Helper()
	asks := a.DueWants()
	if len(asks) == 0 {
		return q, false
	}
	if len(asks) != 1 || asks[0].Kind != session.AskGrant || !asks[0].Ahead {
		a.t.Fatalf("due is %v, want a grant ahead", asks)
	}
	return asks[0], true
}

// A session that takes much between two renewals asks for memory before an operation misses some, until it has as much
// free, or there is no more. A session that takes little, or has enough, does not.
func TestAgendaAsksAhead(t *testing.T) {
	a := newAgenda(t)
	a.view(3, 1)
	a.answer(a.renewal(), &dirpb.RenewReply{})
	q := a.wants(10)
	if q.Ahead {
		t.Error("a grant that an operation waits for is ahead")
	}
	a.grant(q, 4, 3, fresh(1, heapLo, 30_000))
	f := a.core.Flow(1, 1)
	take := func(units int64) {
		a.t.Helper()
		f.Add(0, units, units)
		a.renew(&dirpb.RenewReply{})
	}
	take(0)
	take(16_000)
	if _, due := a.ahead(); due {
		t.Error("asked ahead for little")
	}
	take(28_000)
	if _, due := a.ahead(); due {
		t.Error("asked ahead with enough free")
	}

	// As long as there is too little free each grant is followed by another.
	take(60_000)
	granted := uint64(30_000)
	for granted < 60_000 {
		q, due := a.ahead()
		if !due {
			t.Fatalf("not asked ahead with %d units free, and 60,000 taken", granted)
		}
		a.grant(q, 4, 3, fresh(1, heapLo+uint32(granted), 20_000))
		granted += 20_000
		a.granted(granted)
	}
	if _, due := a.ahead(); due {
		t.Error("asked ahead with enough free")
	}

	// However much it takes, it wants no more than an eighth of the heap, less than 131,072 units.
	take(500_000)
	for {
		q, due := a.ahead()
		if !due {
			break
		}
		a.grant(q, 4, 3, fresh(1, heapLo+uint32(granted), 20_000))
		granted += 20_000
	}
	if granted < 120_000 || granted >= 131_072+20_000 {
		t.Errorf("asked ahead until %d units were free", granted)
	}
	a.heap().AllocFit(30_000, 30_000, 30_000)

	// That there is nothing ahead is no reason for an operation to fail, or to evict.
	take(500_000)
	q, due := a.ahead()
	if !due {
		t.Fatal("not asked ahead")
	}
	a.grant(q, 4, 3)
	if a.core.Exhausted(1) {
		t.Error("a grant ahead that found nothing counts as one that was needed")
	}
	take(500_000)
	if _, due := a.ahead(); due {
		t.Error("asked ahead again at once")
	}
	a.grant(a.wants(10), 4, 3, fresh(1, heapLo+uint32(granted), 10)) // an operation need not wait for that
	a.now += second
	take(0)
	take(500_000)
	if q, due = a.ahead(); !due {
		t.Error("not asked ahead a second later")
	}

	// Nothing is asked ahead while others lack memory.
	a.grant(q, 4, 3)
	a.now += second
	short := &dirpb.RenewReply{Supply: []*dirpb.Supply{{PgId: 1, Short: true, FloorUnits: 1 << 20}}}
	a.renew(short)
	f.Add(0, 500_000, 500_000)
	a.renew(short)
	if _, due := a.ahead(); due {
		t.Error("asked ahead while memory is short")
	}
	take(500_000) // its reply says that there is enough again
	take(500_000)
	if _, due = a.ahead(); !due {
		t.Error("not asked ahead when memory is not short any more")
	}
}
