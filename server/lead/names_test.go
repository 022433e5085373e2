package lead

import (
	"errors"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/internal/dirpb"
)

// asks has a process of an incarnation ask for a name, and gives the refusal.
func (w *world) asks(name string, incarnation uint64) *TakenError {
	w.t.Helper()
	q := &dirpb.RegisterNodeRequest{Name: name, Incarnation: incarnation, Boot: 1, CapacityBytes: 4 * region,
		Endpoints: []*dirpb.Endpoint{{Provider: "tcp", Addr: "other:1"}}}
	err := w.l.BeginArrival(w.s, w.now, q)
	if err == nil {
		w.l.EndArrival(q)
		return nil
	}
	e := (*TakenError)(nil)
	if !errors.As(err, &e) || !strings.Contains(err.Error(), "nothing was done") {
		w.t.Fatalf("refused with %v", err)
	}
	return e
}

// TestNameOfOneWhoLives: nobody else gets the name of a memory node that was heard within its lease; the same memory's
// next process does.
func TestNameOfOneWhoLives(t *testing.T) {
	w := newWorld(t)
	m1 := w.keeper("m1", 1)
	if e := w.asks("m1", 1); e != nil {
		t.Errorf("a process with the same memory: %v", e)
	}
	if e := w.asks("m2", 2); e != nil {
		t.Errorf("a new name: %v", e)
	}
	e := w.asks("m1", 2)
	if e == nil || e.Clash || e.Owner != "tcp h:1" || e.Rival != "tcp other:1" || w.l.Rival(m1, w.now) != "" {
		t.Fatalf("at the first question: %+v, rival %q", e, w.l.Rival(m1, w.now))
	}
	w.pass(lease / 2)
	w.l.Heartbeat(w.s, w.now, m1, 1, nil)
	if e := w.asks("m1", 2); e == nil || !e.Clash || !e.New || !strings.Contains(e.Error(), "both processes live") ||
		w.l.Rival(m1, w.now) != "tcp other:1" {
		t.Fatalf("both live: %+v, rival %q", e, w.l.Rival(m1, w.now))
	}
	if e := w.asks("m1", 2); e == nil || e.New {
		t.Errorf("the clash is said again: %+v", e)
	}
	if r := w.l.Rival(m1, w.now+rivalTime); r != "" {
		t.Errorf("a rival that asks no more: %q", r)
	}
	w.l.forgetRivals(w.s, w.now+rivalTime)
	if n := len(w.l.rivals); n != 0 {
		t.Errorf("%d rivals are remembered", n)
	}
	w.now += lease
	if e := w.asks("m1", 2); e == nil {
		t.Error("the name is given away within the lease")
	}
	w.now++
	if e := w.asks("m1", 2); e != nil {
		t.Errorf("after the lease: %v", e)
	}
	w.elect() // who was heard by no leader yet may live
	if e := w.asks("m1", 2); e == nil {
		t.Error("a new leader gives a name away that it knows nothing of")
	}
	w.now += lease + 1
	if e := w.asks("m1", 2); e != nil {
		t.Errorf("a lease after the election: %v", e)
	}
}

// TestNameOfOneThatDied: a heartbeat that breaks off, and is followed by none, ends the wait.
func TestNameOfOneThatDied(t *testing.T) {
	w := newWorld(t)
	m1 := w.keeper("m1", 1)
	early := w.l.Beat(m1)
	w.l.Heartbeat(w.s, w.now, m1, 1, nil)
	w.l.Broke(m1, 1, early, w.now) // one before the latest, which waits
	w.l.Broke(m1, 9, w.l.Beat(m1), w.now)
	w.now += lease / 2
	if e := w.asks("m1", 2); e == nil {
		t.Error("an earlier heartbeat that ended gives the name away")
	}
	w.l.Broke(m1, 1, w.l.Beat(m1), w.now)
	w.now += lease / 4
	if e := w.asks("m1", 2); e == nil {
		t.Error("it has no time to connect again")
	}
	w.l.Heartbeat(w.s, w.now, m1, 1, nil)
	if w.now++; w.asks("m1", 2) == nil {
		t.Error("it has connected again, and its name is given away")
	}
	w.l.Broke(m1, 1, w.l.Beat(m1), w.now)
	if w.now += lease/4 + 1; w.asks("m1", 2) != nil {
		t.Error("a dead process is waited for")
	}
}

// TestNameOfKeptMemory: a stranger that asked while the owner of the name lived does not end the wait for the only copy
// of something; an operator does.
func TestNameOfKeptMemory(t *testing.T) {
	w := newWorld(t)
	m1 := w.keeper("m1", 1)
	w.create("n", 1, 1)
	w.on(1, dirpb.PGState_PG_ACTIVE, m1)
	w.asks("m1", 2)
	w.l.Heartbeat(w.s, w.now, m1, 1, nil)
	for range 10 {
		w.now += lease + 1
		if e := w.asks("m1", 2); e == nil || !strings.Contains(e.Error(), "kvctl nodes give-up m1") {
			t.Fatalf("a stranger takes the name of kept memory: %v", e)
		}
	}
	if e := w.asks("m1", 3); e != nil {
		t.Errorf("a process that begins after the end of the owner: %v", e)
	}
	w.asks("m1", 2)
	down, err := w.l.GiveUp(w.s, m1, w.now)
	if err != nil {
		t.Fatal(err)
	}
	w.apply(down)
	if e := w.asks("m1", 2); e != nil {
		t.Errorf("after it was given up: %v", e)
	}
}

// TestArrivalsOfOneName: of two processes that register at the same time one waits for the other's outcome.
func TestArrivalsOfOneName(t *testing.T) {
	w := newWorld(t)
	first := &dirpb.RegisterNodeRequest{Name: "m1", Incarnation: 1, Endpoints: []*dirpb.Endpoint{
		{Provider: "tcp", Addr: "h:1"}}}
	for range 2 { // its caller tries again
		if err := w.l.BeginArrival(w.s, w.now, first); err != nil {
			t.Fatal(err)
		}
	}
	w.l.EndArrival(first)
	if w.asks("m1", 2) == nil {
		t.Error("two processes register one name at a time")
	}
	w.l.EndArrival(first)
	w.l.EndArrival(first)
	if e := w.asks("m1", 2); e != nil || len(w.l.arrivals) != 0 {
		t.Errorf("when the first has failed: %v, %d arrivals are remembered", e, len(w.l.arrivals))
	}
}
