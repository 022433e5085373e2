package session_test

import (
	"testing"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/session"
)

// A session with much in limbo says so, and renews every five milliseconds until its limbo is short, whoever tells it
// so how often.
func TestAgendaCrowded(t *testing.T) {
	const soon = 5 * ms
	a := newAgenda(t)
	a.view(3, 1)
	a.answer(a.renewal(), &dirpb.RenewReply{})
	a.grant(a.wants(10), 4, 3, fresh(1, heapLo, 100))
	x, err := a.core.Lanes()[0].NewTask()
	if err != nil {
		t.Fatal(err)
	}
	code, _ := layout.CodeFor(1 << 20)
	pg := &a.core.View().PG(1).PG
	unlink := func(n int) {
		for range n {
			x.Unlinked(pg, layout.MakeLive(1, 1, code, heapLo))
		}
	}
	next := func(what string, want int64) {
		t.Helper()
		if at := a.Next(); at != want {
			t.Fatalf("%s: next in %d ms, want %d", what, (at-a.now)/ms, (want-a.now)/ms)
		}
	}
	var epoch uint64
	renew := func(crowded bool, least uint64) {
		t.Helper()
		a.idle() // not before its time
		a.now = a.Next()
		q := a.renewal()
		if q.Renew.Crowded != crowded {
			t.Fatalf("asked %v, want it crowded: %v", q.Renew, crowded)
		}
		if a.Crowd() {
			t.Fatal("another renewal is due sooner, with one under way")
		}
		epoch++
		a.answer(q, &dirpb.RenewReply{Epoch: epoch, MinEpoch: least})
		a.core.Lanes()[0].Pump()
	}
	renew(false, 0)
	sent := a.now
	next("nothing is in limbo", sent+renewEvery)
	unlink(4)
	if a.core.Crowded() {
		t.Fatal("crowded, with 4 MiB in limbo")
	}
	a.now += ms
	unlink(4)
	if !a.Crowd() {
		t.Fatal("no renewal is due sooner, though the session is crowded")
	}
	next("crowded", sent+soon)
	if a.Crowd() {
		t.Fatal("told again, a renewal is due sooner still")
	}
	for range 4 { // nobody else reports
		renew(true, 0)
		sent = a.now
		next("still crowded", sent+soon)
		a.now += ms
		if unlink(4); a.Crowd() {
			t.Fatal("a renewal is due sooner than five milliseconds after the last one")
		}
	}
	a.now = a.Next()
	again := a.Again(a.renewal())
	if !again.Renew.Crowded {
		t.Fatalf("asked again %v, want it crowded", again.Renew)
	}
	a.Answer(again, session.Reply{Err: errLost})
	a.answer(a.renewal(), &dirpb.RenewReply{Epoch: epoch})
	renew(true, 0)

	// The places that came into limbo before a renewal that is answered leave it with a later one.
	for range 3 {
		renew(a.core.Crowded(), epoch)
	}
	if a.core.Crowded() {
		t.Fatalf("crowded with %d units in limbo", a.core.Lanes()[0].LimboUnits())
	}
	next("no more crowded", a.now+renewEvery)

	// A session that was silent for long renews at once.
	a.now += renewEvery / 2
	unlink(12)
	if !a.Crowd() {
		t.Fatal("no renewal is due sooner, though the session is crowded")
	}
	next("crowded after a silence", a.now)
}
