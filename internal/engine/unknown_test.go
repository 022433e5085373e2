package engine_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/engine"
)

// After a lost connection a write looks up what became of its CAS.
func TestResolve(t *testing.T) {
	for _, landed := range []bool{false, true} {
		t.Run(fmt.Sprintf("landed %v", landed), func(t *testing.T) {
			r := newRig(t, 1, false)
			r.put("a", "1")
			_, w := r.slot(1, "a")
			x := r.request(index.Put, "a", "2")
			r.l.Start(x)
			r.l.Pump()
			if err := r.fab.Kill(r.qp(1)); err != nil {
				t.Fatal(err)
			}
			if landed {
				fire(r.fab)
			}
			r.l.Pump()
			if x.Waiting() != index.Reconnect || !slices.Equal(r.wantConn, []uint32{1}) {
				t.Fatalf("waits for %v, wants connections %v", x.Waiting(), r.wantConn)
			}
			_, now := r.slot(1, "a")
			if (now != w) != landed {
				t.Fatalf("the slot holds %v, before %v", now, w)
			}
			r.connect(1)
			r.settleLane()
			if _, err := r.answer(x); err != nil {
				t.Fatal(err)
			}
			r.get("a", "2")
			// A word that may have been seen is not posted again.
			if _, last := r.slot(1, "a"); landed != (last == now) {
				t.Fatalf("the slot holds %v, then %v", now, last)
			}
		})
	}
}

// A caller that goes leaves what is under way to end, and hears no more than that; what
// only waits ends at once.
func TestOrphan(t *testing.T) {
	r := newRig(t, 1, false)
	r.put("a", "1")
	x := r.request(index.Put, "a", "2")
	done := 0
	x.Done = func(*engine.Task) { done++ }
	x.Deadline = r.now + second/4
	r.l.Start(x)
	r.l.Pump()
	if r.l.Overdue() != nil || r.l.NextWake() != x.Deadline {
		t.Fatalf("overdue %v, next wake at %d, want %d", r.l.Overdue(), r.l.NextWake(), x.Deadline)
	}
	if r.now = x.Deadline; r.l.Overdue() != x {
		t.Fatal("nothing is overdue at its deadline")
	}
	r.l.Orphan(x, errGone)
	r.l.Pump()
	if x.IsDone() || r.l.Active() != 1 || r.l.Overdue() != nil || r.l.NextWake() != 0 {
		t.Fatalf("done %v, %d under way, overdue %v, next wake at %d", x.IsDone(), r.l.Active(), r.l.Overdue(),
			r.l.NextWake())
	}
	r.settleLane()
	if _, err := r.answer(x); done != 1 || !errors.Is(err, errGone) || !errors.Is(err, index.ErrUnknown) {
		t.Fatalf("ended with %v, told %d times", err, done)
	}
	r.get("a", "2") // it did happen

	r.disconnect(1)
	x = r.request(index.Get, "a", "")
	r.l.Start(x)
	r.settleLane()
	if x.Waiting() != index.Post {
		t.Fatalf("waits for %v", x.Waiting())
	}
	r.l.Orphan(x, errGone)
	if _, err := r.answer(x); !errors.Is(err, errGone) || errors.Is(err, index.ErrUnknown) || r.l.Active() != 0 {
		t.Fatalf("ended with %v, %d under way", err, r.l.Active())
	}
}
