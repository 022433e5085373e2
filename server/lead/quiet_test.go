package lead

import (
	"slices"
	"testing"
	"time"

	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// Sessions for which nobody waits may be silent for a third of a lease, if they can be called,
// and are called, each once, when somebody waits for what they report.
func TestQuiet(t *testing.T) {
	w := newWorld(t)
	w.nodes(1, 4)
	ns := w.create("n", 1, 1)
	a, b := w.open(ns), w.open(ns)
	w.want() // reserves reclaim epochs
	w.wait(lease)
	epoch := func() uint64 { e, _ := w.l.Epochs(); return e }
	tell := func(r Renewal, want time.Duration) Answer {
		t.Helper()
		x, err := w.tell(r)
		if err != nil || (x.Quiet > 0) != (want > 0) || x.Quiet > want {
			t.Fatalf("%+v is answered by %+v, %v; want quiet up to %v", r, x, err, want)
		}
		return x
	}
	calls := func(want ...uint32) {
		t.Helper()
		if got := w.l.Calls(w.now); !slices.Equal(got, want) {
			t.Fatalf("called are %d, want %d", got, want)
		}
	}
	next := func() {
		w.pass(100 * time.Millisecond)
		w.beat()
		w.l.Advance(w.s, w.now)
	}
	tell(Renewal{Session: a, Report: epoch()}, 0) // it cannot be called
	old := epoch()
	tell(Renewal{Session: a, Report: old, Callable: true}, lease/3)
	tell(Renewal{Session: b, Report: old, Callable: true}, lease/3)
	calls()
	if w.step(); !w.l.Calm(w.s, w.now) {
		t.Fatal("no calm where nothing happens")
	}
	if at, ok := w.l.Lapse(w.now); !ok || at != w.now+lease {
		t.Fatalf("leases lapse at %v, %v, want %v", at, ok, w.now+lease)
	}
	if at, ok := w.l.Lapse(w.now + lease + 1); ok {
		t.Fatalf("leases that have ended lapse at %v", at)
	}

	// a has places in limbo: it and b are waited for until both report more than E is now.
	e := epoch()
	tell(Renewal{Session: a, Report: e, Callable: true, InLimbo: true}, 0)
	calls() // b would learn no other E yet
	if w.l.Calm(w.s, w.now) {
		t.Fatal("calm, though a waits")
	}
	next()
	calls(b)
	calls()
	tell(Renewal{Session: b, Report: e, Callable: true}, 0)
	tell(Renewal{Session: b, Report: e + 1, Callable: true}, lease/3)
	if x := tell(Renewal{Session: a, Report: e + 1, Callable: true}, lease/3); x.Least <= e {
		t.Fatalf("the minimum is %d, want more than %d", x.Least, e)
	}
	next()
	calls()

	// A session that others' free places wait for is called, too, and all sessions while memory is short.
	w.l.sessions.of(b).queue, w.l.routed = []place{{pg: 1}}, true
	calls(b)
	w.l.sessions.of(b).queue = nil
	tell(Renewal{Session: b, Report: epoch(), Callable: true}, lease/3)
	w.l.Short(w.s, 1, 1, w.now)
	calls(a, b)
	tell(Renewal{Session: b, Report: epoch(), Callable: true}, 0)
	w.wait(shortFor)
	tell(Renewal{Session: b, Report: epoch(), Callable: true}, lease/3)

	// The places that a closes with are in limbo until b reports a greater reclaim epoch.
	w.l.Closing(a, freePlaces(1<<18, 4, 1), nil)
	w.apply(&fsmpb.Command{Op: &fsmpb.Command_CloseSession{CloseSession: &fsmpb.CloseSession{SessionId: a}}})
	w.l.Closed(w.s, w.now, a)
	calls()
	next()
	calls(b)
}

// Sessions that a map has brought in step renew at different times from then on, each three times in a lease, and at no
// time many of them.
func TestQuietSpreads(t *testing.T) {
	const n = 1000
	w := crowd(t, n)
	w.l.Run(w.s, 1)
	v, epoch := w.s.MapVersion(), func() uint64 { e, _ := w.l.Epochs(); return e }
	due := make(map[time.Duration][]uint32) // by tenths of a turn
	const tenth = lease / 3 / 10
	renew := func(id uint32, at time.Duration) {
		t.Helper()
		a, err := w.tell(Renewal{Session: id, Report: epoch(), Acked: v, Quiesced: v, Callable: true})
		if err != nil || a.Quiet <= 0 || a.Quiet > lease/3 {
			t.Fatalf("session %d: %+v, %v", id, a, err)
		}
		due[(at+a.Quiet)/tenth] = append(due[(at+a.Quiet)/tenth], id)
	}
	ids := w.s.Admitted().Live
	for _, id := range ids {
		renew(id, 0)
	}
	for k := range time.Duration(40) {
		if most := len(due[k]); most > 2*n/10 {
			t.Fatalf("%d of %d sessions renew in the tenth %d of a turn", most, n, k)
		}
		w.now += tenth
		w.beat()
		for _, id := range due[k] {
			renew(id, k*tenth+tenth/2)
		}
	}
}
