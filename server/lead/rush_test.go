package lead

import (
	"slices"
	"testing"
	"time"

	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// A crowded session moves E on as soon as every session has reported it, and others are called that do not know E. Each
// is called once for a reclaim epoch.
func TestRush(t *testing.T) {
	w := newWorld(t)
	w.nodes(1, 4)
	ns := w.create("n", 1, 1)
	a, b := w.open(ns), w.open(ns)
	w.want() // reserves reclaim epochs
	w.wait(lease)
	epoch := func() uint64 { e, _ := w.l.Epochs(); return e }
	w.renew(a, w.s.MapVersion(), 0)
	w.renew(b, w.s.MapVersion(), 0)
	old := epoch()
	tell := func(r Renewal, wantEpoch uint64, wantCalls bool, wantCalled ...uint32) Answer {
		t.Helper()
		x, err := w.tell(r)
		if err != nil || x.Epoch != wantEpoch || x.Calls != wantCalls {
			t.Fatalf("%+v is answered by %+v, %v; want E %d, calls %v", r, x, err, wantEpoch, wantCalls)
		}
		if got := w.l.Calls(w.now); !slices.Equal(got, wantCalled) {
			t.Fatalf("%+v: called are %d, want %d", r, got, wantCalled)
		}
		return x
	}
	crowded := func(report uint64) Renewal {
		return Renewal{Session: a, Report: report, InLimbo: true, Crowded: true, Callable: true}
	}
	plain := func(report uint64) Renewal { return Renewal{Session: b, Report: report, Callable: true} }

	tell(plain(old), old, false)
	tell(crowded(old), old, true) // too soon after the last one, and b knows E
	w.now += rushEvery
	tell(crowded(old), old+1, true, b)
	for range 3 { // b has not reported it
		w.now += rushEvery
		tell(crowded(old+1), old+1, false)
	}
	tell(plain(old), old+1, false)
	tell(crowded(old+1), old+1, false)
	tell(plain(old+1), old+1, false) // it is not crowded, and moves nothing
	if x := tell(crowded(old+1), old+2, true, b); x.Least != old+1 {
		t.Fatalf("the minimum is %d, want %d", x.Least, old+1)
	}
	tell(plain(old+2), old+2, false)
	w.now += rushEvery - 1
	tell(crowded(old+2), old+2, false)
	w.now++
	tell(crowded(old+2), old+3, true, b)

	// If b is crowded as well it is not called: it renews soon by itself. Once it is not, it is.
	tell(Renewal{Session: b, Report: old + 3, Crowded: true, Callable: true}, old+3, false)
	w.now += rushEvery
	tell(crowded(old+3), old+4, true)
	tell(plain(old+4), old+4, false)
	w.now += rushEvery
	tell(crowded(old+4), old+5, true, b)
	if x := tell(plain(old+5), old+5, false); x.Quiet != 0 {
		t.Fatalf("b may be silent for %v, though a waits for what it reports", x.Quiet)
	}
}

// However often a session renews that says for ever that it is crowded, E moves a hundred times a second at most.
// Others are called for each reclaim epoch once, and less often if there are many. The log gets an entry for hundreds
// of them.
func TestRushIsBounded(t *testing.T) {
	for _, tc := range []struct {
		others int
		every  time.Duration // between two reclaim epochs, at least
	}{
		{0, rushEvery},
		{3, rushEvery},
		{19, 20 * rushEach},
		{60, testOptions.EpochInterval}, // as for sessions that are not crowded
	} {
		w := crowd(t, tc.others)
		hostile := w.open(1)
		w.plan()
		began, _ := w.l.Epochs()
		const long = 10 * time.Second
		calls, entries, reports := 0, 0, map[uint32]uint64{}
		for end, turn := w.now+long, 0; w.now < end; turn++ {
			w.now += 500 * time.Microsecond
			w.l.Advance(w.s, w.now)
			epoch, _ := w.l.Epochs()
			if _, err := w.tell(Renewal{Session: hostile, Report: epoch, InLimbo: true, Crowded: true}); err != nil {
				t.Fatal(err)
			}
			called := w.l.Calls(w.now)
			calls += len(called)
			if turn%200 == 0 { // each renews ten times a second, too
				called = w.s.Admitted().Live
			}
			for _, id := range called {
				if id == hostile {
					continue
				}
				for range 2 { // its second renewal reports what the first has brought
					x, err := w.tell(Renewal{Session: id, Report: max(reports[id], began), Callable: true})
					if err != nil {
						t.Fatal(err)
					}
					reports[id] = x.Epoch
				}
			}
			if turn%20 == 0 {
				w.beat()
				for _, step := range w.l.Plan(w.s, w.now) {
					if _, ok := step.Do.Op.(*fsmpb.Command_ReserveEpoch); !ok {
						t.Fatalf("the leader does %q", step.Why)
					}
					entries++
					w.apply(step.Do)
				}
			}
		}
		epoch, _ := w.l.Epochs()
		moved, most := int(epoch-began), int(long/tc.every)
		if moved < most*9/10 || moved > most {
			t.Errorf("%d others: E moved on by %d in %v, want %d", tc.others, moved, long, most)
		}
		if calls > tc.others*most || tc.others > 0 && calls == 0 && tc.every < testOptions.EpochInterval {
			t.Errorf("%d others: %d calls for %d reclaim epochs", tc.others, calls, moved)
		}
		if entries > 1+moved/int(testOptions.EpochBlock/2) {
			t.Errorf("%d others: %d entries of the log for %d reclaim epochs", tc.others, entries, moved)
		}
	}
}
