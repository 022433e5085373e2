package engine_test

import (
	"slices"
	"sync"
	"testing"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/engine"
)

// Mail runs on the lane's goroutine, at its next Pump, once and in order; whoever leaves it
// wakes who waits for the lane.
func TestMail(t *testing.T) {
	r := newRig(t, 1, false)
	var got []int
	leave := func(n int) { r.l.Deliver(func(*engine.Lane) { got = append(got, n) }) }
	leave(1)
	leave(2)
	select {
	case <-r.l.Kicked():
	default:
		t.Fatal("not kicked")
	}
	if len(got) > 0 {
		t.Fatal("run by who left it")
	}
	r.l.Deliver(func(*engine.Lane) { leave(3) }) // for the Pump after this one
	if !r.l.Pump() || !slices.Equal(got, []int{1, 2}) {
		t.Fatalf("ran %v", got)
	}
	if !r.l.Pump() || !slices.Equal(got, []int{1, 2, 3}) || r.l.Pump() {
		t.Fatalf("ran %v", got)
	}
	// From anywhere, while the lane works.
	const from, each = 4, 200
	last := make([]int, from)
	n := 0
	var wg sync.WaitGroup
	for g := range from {
		wg.Go(func() {
			for i := range each {
				r.l.Deliver(func(*engine.Lane) {
					if last[g]++; last[g] != i+1 {
						t.Errorf("mail %d of %d ran as number %d", i, g, last[g])
					}
					n++
				})
			}
		})
	}
	all := make(chan struct{})
	go func() { wg.Wait(); close(all) }()
	for n < from*each {
		select {
		case <-r.l.Kicked():
		case <-all:
		}
		r.l.Pump()
	}
	if n != from*each {
		t.Fatalf("ran %d, left %d", n, from*each)
	}
}

// An operation that waits looks again when there is mail, and not before.
func TestMailWakes(t *testing.T) {
	r := newRig(t, 1, false)
	r.startOver() // nothing is granted
	x := r.request(index.Put, "a", "1")
	r.l.Start(x)
	r.settleLane()
	if x.Waiting() != index.Alloc || r.wantMemory != 1 {
		t.Fatalf("waits for %v, asked %d times for memory", x.Waiting(), r.wantMemory)
	}
	if r.settleLane(); r.wantMemory != 1 {
		t.Fatalf("asked %d times for memory", r.wantMemory)
	}
	r.l.Deliver(func(*engine.Lane) {})
	if r.settleLane(); r.wantMemory != 2 {
		t.Fatalf("asked %d times for memory after mail", r.wantMemory)
	}
	r.grant(rigLo, 100)
	r.l.Deliver(func(*engine.Lane) {})
	r.settleLane()
	if _, err := r.answer(x); err != nil {
		t.Fatal(err)
	}
}
