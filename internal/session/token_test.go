package session_test

import (
	"testing"

	"github.com/kvd-project/kvd/internal/dirpb"
)

// A session shows the token that the directory gave it last, and says so at once.
func TestAgendaToken(t *testing.T) {
	a := newAgenda(t)
	shows := func(want string) {
		t.Helper()
		if got := string(a.Token()); got != want {
			t.Fatalf("shows %q, want %q", got, want)
		}
	}
	says := func(number uint64) {
		t.Helper()
		q := a.renewal()
		if q.Renew.TokenNumber != number {
			t.Fatalf("says token %d, want %d", q.Renew.TokenNumber, number)
		}
		a.answer(q, &dirpb.RenewReply{})
	}
	shows("first")
	a.now += renewEvery
	q := a.renewal()
	if q.Renew.TokenNumber != 1 {
		t.Fatalf("says token %d, want 1", q.Renew.TokenNumber)
	}
	a.answer(q, &dirpb.RenewReply{Token: []byte("second"), TokenNumber: 2})
	shows("second")
	says(2) // though none is due yet
	a.idle()

	// The reply to an earlier renewal is late: the next one brings the token again.
	a.now += renewEvery
	old := a.renewal()
	again := a.Again(old)
	if again.Renew.TokenNumber != 2 {
		t.Fatalf("another try says token %d, want 2", again.Renew.TokenNumber)
	}
	a.answer(old, &dirpb.RenewReply{Token: []byte("late"), TokenNumber: 9})
	shows("second")
	a.answer(again, &dirpb.RenewReply{Token: []byte("third"), TokenNumber: 3})
	shows("third")
	says(3)
	// A leadership that has ended brings none.
	a.now += renewEvery
	a.answer(a.renewal(), &dirpb.RenewReply{Token: []byte("deposed"), TokenNumber: 8, Term: 3})
	shows("third")
}
