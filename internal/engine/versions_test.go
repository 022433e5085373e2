package engine_test

import (
	"testing"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/engine"
)

// A version is greater than any before on its lane and than what it replaces, whatever the
// clock does, and no other lane's.
func TestVersions(t *testing.T) {
	r := newRig(t, 1, false)
	x := r.request(index.Get, "a", "")
	last, lanes := uint64(0), x.Version(0)&(1<<16-1)
	next := func(what string, after uint64) {
		t.Helper()
		v := x.Version(after)
		if v <= last || v <= after || v&(1<<16-1) != lanes {
			t.Fatalf("%s: version %#x after %#x and %#x", what, v, last, after)
		}
		last = v
	}
	next("first", 0)
	next("again", 0)
	r.millis = 1 << 40
	r.core.Tick()
	next("the clock goes on", 0)
	if low := r.millis * 1_000_000 >> 14 << 16; last < low {
		t.Fatalf("version %#x is behind the clock's %#x", last, low)
	}
	r.millis = 1
	r.core.Tick()
	next("the clock goes back", 0)
	next("over a greater one", last+1<<40)
	next("and on", 0)
	r.l.Recycle(r.started(x))
	if lanes != 1<<4 {
		t.Fatalf("discriminator %#x of session 1, lane 0", lanes)
	}
}

// started performs a request, so that it can be recycled.
func (r *rig) started(x *engine.Task) *engine.Task {
	r.t.Helper()
	r.l.Start(x)
	r.settleLane()
	if !x.IsDone() {
		r.t.Fatalf("waits for %v", x.Waiting())
	}
	return x
}

// The oldest operation under way holds the reclaim epoch back, but for one that waits for
// memory and has seen nothing.
func TestOldest(t *testing.T) {
	r := newRig(t, 1, false)
	r.put("a", "1")
	oldest := func(what string, want uint64, some bool) {
		t.Helper()
		if e, ok := r.l.Oldest(); e != want || ok != some {
			t.Fatalf("%s: %d, %v; want %d, %v", what, e, ok, want, some)
		}
	}
	oldest("idle", 0, false)
	var xs []*engine.Task
	for e := uint64(100); e < 103; e++ {
		r.core.SetEpoch(e)
		x := r.request(index.Get, "a", "")
		xs = append(xs, x)
		r.l.Start(x)
		r.l.Pump()
	}
	oldest("three", 100, true)
	r.l.Orphan(xs[0], errGone) // what it posted is under way all the same
	oldest("answered", 100, true)
	r.settleLane()
	oldest("over", 0, false)
	for _, x := range xs {
		r.l.Recycle(x)
	}
	r.startOver()
	x := r.request(index.Put, "a", "1")
	r.l.Start(x)
	oldest("begun", 102, true)
	r.settleLane()
	if x.Waiting() != index.Alloc {
		t.Fatalf("waits for %v", x.Waiting())
	}
	oldest("waits for memory", 0, false)
	r.core.SetEpoch(200)
	r.grant(rigLo, 100)
	r.l.Deliver(func(*engine.Lane) {})
	r.l.Pump()
	oldest("has memory", 200, true)
	r.settleLane()
	if _, err := r.answer(x); err != nil {
		t.Fatal(err)
	}
}
