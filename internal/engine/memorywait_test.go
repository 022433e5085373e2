package engine_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/engine"
)

// An operation waits for memory until its own deadline, for as long as the directory goes on saying that some is on its
// way; others do not wait in vain behind it.
func TestWaitsForMemoryOnItsWay(t *testing.T) {
	const wait, limit = 8 * second, 60 * second
	r := newRig(t, 1, false)
	r.startOver() // nothing is granted
	put := func(key string, limit int64) *engine.Task {
		x := r.request(index.Put, key, "1")
		if limit != 0 {
			x.Deadline = r.now + limit
		}
		r.l.Start(x)
		r.settleFor(0)
		return x
	}
	// pass is time in which the directory answers each renewal, and what lanes ask for with coming, if that is said.
	pass := func(time int64, says, coming bool) {
		for end := r.now + time; r.now < end; {
			r.now = min(r.now+second/4, end)
			r.renew(rigLease)
			if says {
				r.core.SetExhausted(1, "")
				r.core.SetFull(1, !coming)
			}
			r.l.Deliver(func(*engine.Lane) {})
			r.settleFor(0)
		}
	}
	ended := func(what string, x *engine.Task, want string) {
		t.Helper()
		if _, err := r.answer(x); !errors.Is(err, index.ErrFull) || !strings.Contains(err.Error(), want) {
			t.Fatalf("%s: %v, want %q", what, err, want)
		}
	}

	// Memory comes at last.
	x := put("a", limit)
	pass(limit-second, true, true)
	if x.IsDone() {
		t.Fatalf("ended with %v, with memory on its way and time left", x.Op.Err)
	}
	r.grant(rigLo, 1)
	r.l.Deliver(func(*engine.Lane) {})
	r.settleFor(0)
	if _, err := r.answer(x); err != nil {
		t.Fatal(err)
	}

	// It does not come: nobody else waits for it then.
	long, longer, forever := put("b", limit), put("c", 2*limit), put("d", 0)
	pass(wait-second, true, true)
	if forever.IsDone() {
		t.Fatal("ended early")
	}
	pass(2*second, true, true)
	ended("nobody says how long it may wait", forever, "did not come in 8s")
	ended("who waits beside it", long, "in vain")
	ended("who waits beside it", longer, "in vain")
	pass(3*second, true, true)
	long, longer = put("b", limit), put("c", 2*limit)
	pass(limit-1, true, true)
	if long.IsDone() || longer.IsDone() {
		t.Fatal("ended early")
	}
	pass(1, true, true)
	ended("its time is over", long, "did not come in time")
	pass(second/2, true, true)
	ended("another waited in vain", longer, "in vain")

	// The directory is silent.
	pass(3*second, true, true)
	x = put("b", limit)
	pass(2*second, true, true)
	pass(wait-second, false, false)
	if x.IsDone() {
		t.Fatalf("ended with %v", x.Op.Err)
	}
	pass(2*second, false, false)
	ended("nobody says that it is on its way", x, "did not come in 8s")

	// It is none any more.
	pass(3*second, true, true)
	x = put("b", limit)
	pass(2*second, true, true)
	if x.IsDone() {
		t.Fatalf("ended with %v", x.Op.Err)
	}
	pass(second/4, true, false)
	ended("all is in use", x, "has no memory left")
}
