package engine_test

import (
	"bytes"
	"errors"
	"fmt"
	"testing"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/rdma/driver"
)

// viewing is a GET in place, and its Hold once that is over.
type viewing struct {
	*engine.Task
	part index.Part
	hold engine.Hold
	seen []byte
	err  error
	over bool
}

const viewFor = second / 2

// view begins a GET of key in place.
func (r *rig) view(key string) *viewing {
	v := &viewing{Task: r.request(index.Get, key, ""), part: index.Part{InPlace: true}}
	v.hold.For = viewFor
	v.Op.Part = &v.part
	v.Done = func(t *engine.Task) {
		v.over, v.seen = true, t.Op.Record.Value
		if v.err = t.Op.Err; v.err == nil {
			v.err = r.l.Hold(t, &v.hold)
		}
		r.l.Recycle(t)
	}
	r.l.Start(v.Task)
	return v
}

// viewed is a View of key, in place.
func (r *rig) viewed(key, want string) *viewing {
	r.t.Helper()
	v := r.view(key)
	r.settleLane()
	if !v.over || v.err != nil || string(v.seen) != want || !v.part.Shown {
		r.t.Fatalf("over %v, %d bytes, in place %v, %v", v.over, len(v.seen), v.part.Shown, v.err)
	}
	return v
}

// report is what a renewal would say now.
func (r *rig) report() uint64 {
	e := r.core.Epoch()
	if o, ok := r.core.OldestHeld(); ok {
		e = min(e, o)
	}
	return e
}

// The table says of each thing that may happen whether it ends a View.
func TestWhatEndsAView(t *testing.T) {
	value := longOf('a')
	for name, tc := range map[string]struct {
		do     func(*rig)
		stands bool
	}{
		"nothing":           {func(*rig) {}, true},
		"overwritten":       {func(r *rig) { r.put("a", longOf('b')) }, true},
		"deleted":           {func(r *rig) { _, _ = r.do(index.Delete, "a", "") }, true},
		"connection lost":   {func(r *rig) { r.disconnect(1) }, true},
		"another map":       {func(r *rig) { r.offer(nil) }, true},
		"a report":          {func(r *rig) { r.report() }, true},
		"Hold over":         {func(r *rig) { r.now += viewFor }, true},
		"Hold over, report": {func(r *rig) { r.now += viewFor; r.report() }, false},
		"memory is short for a moment": {func(r *rig) {
			r.core.SetSupply(map[uint32]engine.Supply{1: {Known: true, Short: true}}, true)
			r.now += second/10 - 1
			r.report()
		}, true},
		"memory is short": {func(r *rig) {
			r.core.SetSupply(map[uint32]engine.Supply{1: {Known: true, Short: true}}, true)
			r.now += second / 10
			r.report()
		}, false},
		"no memory to grant": {func(r *rig) {
			r.core.SetExhausted(1, "")
			r.now += second / 10
			r.report()
		}, false},
		"lease over":   {func(r *rig) { r.now += rigLease }, false},
		"session over": {func(r *rig) { r.core.End() }, false},
		"frozen": {func(r *rig) {
			r.offer(func(pg *dirpb.PlacementGroup) { pg.State = dirpb.PGState_PG_FROZEN })
		}, false},
		"other copies": {func(r *rig) { r.epoch++; r.offer(nil) }, false},
		"other memory": {func(r *rig) { r.startOver() }, false},
		"frozen before, active by now": {func(r *rig) {
			r.offer(func(pg *dirpb.PlacementGroup) { pg.State = dirpb.PGState_PG_FROZEN })
			r.epoch++
			r.offer(nil)
		}, false},
	} {
		for _, synchronous := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, synchronous %v", name, synchronous), func(t *testing.T) {
				r := newRig(t, 1, synchronous)
				r.put("a", value)
				a, b := r.viewed("a", value), r.viewed("a", value)
				tc.do(r)
				if tc.stands && !bytes.Equal(a.seen, []byte(value)) {
					t.Error("the bytes are others")
				}
				if got := a.hold.Stands(); got != tc.stands {
					t.Errorf("stands: %v", got)
				}
				if got := b.hold.Release(); got != tc.stands {
					t.Errorf("released: %v", got)
				}
				if a.hold.Release(); r.core.Holds() != 0 || r.fab.Mapped() != 0 {
					t.Errorf("%d Views and %d mappings are left", r.core.Holds(), r.fab.Mapped())
				}
				if a.hold.Release() || b.hold.Release() || a.hold.Stands() {
					t.Error("stands when it is released")
				}
			})
		}
	}
}

// Until it is over a View is a GET in flight: reports say the reclaim epoch in which its GET began.
func TestViewHoldsTheEpochBack(t *testing.T) {
	r := newRig(t, 1, false)
	r.put("a", longOf('a'))
	v := r.view("a")
	r.l.Pump()
	began := r.core.Epoch()
	r.renew(rigLease) // E moves on while the GET is under way
	r.settleLane()
	if v.err != nil || !v.part.Shown {
		t.Fatalf("in place %v, %v", v.part.Shown, v.err)
	}
	r.renew(rigLease)
	if got := r.report(); got != began || r.core.Epoch() != began+2 {
		t.Errorf("epoch %d is reported, want %d; E is %d", got, began, r.core.Epoch())
	}
	v.hold.Release()
	if got := r.report(); got != r.core.Epoch() {
		t.Errorf("released: epoch %d is reported, E is %d", got, r.core.Epoch())
	}
	v = r.viewed("a", longOf('a'))
	r.renew(rigLease)
	r.now += viewFor
	if got := r.report(); got != r.core.Epoch() || v.hold.Stands() {
		t.Errorf("Hold over: epoch %d is reported, E is %d; stands %v", got, r.core.Epoch(), v.hold.Stands())
	}
	v.hold.Release()
}

// A View is over before its lease is looked at: one that ends in between is seen.
func TestViewEndsBeforeTheLeaseIsSeen(t *testing.T) {
	r := newRig(t, 1, false)
	r.put("a", longOf('a'))
	v := r.viewed("a", longOf('a'))
	var on []bool
	within := false
	r.atLook = func() {
		if !within {
			within = true
			on = append(on, v.hold.Stands())
			within = false
		}
	}
	ok := v.hold.Release()
	r.atLook = nil
	if !ok || len(on) != 1 || on[0] {
		t.Errorf("released: %v; the View stood when the clock was read: %v", ok, on)
	}
}

// leaseEndsAt has the lease end when the clock is looked at for the n-th time from now on.
func (r *rig) leaseEndsAt(n int) {
	r.atLook = func() {
		if n--; n == 0 {
			r.now += rigLease
		}
	}
}

// A View shows the value, or there is none, whatever happens while it is acquired.
func TestViewIsNobodyElses(t *testing.T) {
	value := longOf('a')
	for name, f := range map[string]func(r *rig){
		"nothing": func(*rig) {},
		"deleted": func(r *rig) {
			off, w := r.slot(1, "a")
			putWord(r.nodes[0].mem[off:], uint64(w.Delete(9)))
		},
		"other key":             func(r *rig) { r.rewrite("b", longOf('b')) },
		"longer than the place": func(r *rig) { r.record()[13] = 0xff },
		"a manifest":            func(r *rig) { r.record()[10] |= byte(layout.FlagManifest) },
		"flipped in the key":    func(r *rig) { r.record()[layout.RecordHeaderSize] ^= 1 },
		"flipped at the end":    func(r *rig) { r.record()[layout.RecordHeaderSize+longLen] ^= 1 },
		"lease over":            func(r *rig) { r.now += rigLease },
		"changed":               func(r *rig) { r.epoch++; r.offer(nil) },
		"lease over at the 1st look at the clock": func(r *rig) { r.leaseEndsAt(1) },
		"lease over at the 2nd look at the clock": func(r *rig) { r.leaseEndsAt(2) },
		"lease over at the 3rd look at the clock": func(r *rig) { r.leaseEndsAt(3) },
		"session over": func(r *rig) { r.core.End() },
	} {
		for _, hinted := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, hinted %v", name, hinted), func(t *testing.T) {
				for at := 0; ; at++ {
					r := newRig(t, 1, false)
					r.put("a", value)
					if !hinted {
						r.startAgain()
					}
					v := r.view("a")
					r.l.Pump()
					for range at {
						if !r.fireOne() {
							r.l.Pump()
						}
					}
					over := v.over
					if !over {
						f(r)
					}
					r.settleLane()
					switch {
					case !v.over:
						t.Fatalf("at %d: step %v", at, v.Op.Step())
					case name == "nothing" && (v.err != nil || !v.part.Shown):
						t.Fatalf("at %d: in place %v, %v", at, v.part.Shown, v.err)
					case v.err == nil && !v.hold.Stands():
						t.Fatalf("at %d: acquired, and over", at)
					case v.err == nil && string(v.seen) != value:
						t.Fatalf("at %d: other bytes", at)
					case (name == "lease over" || name == "session over") && !over &&
						!errors.Is(v.err, engine.ErrLease):
						t.Fatalf("at %d: ended with %v", at, v.err)
					}
					if v.hold.Release(); r.fab.Mapped() != 0 || r.core.Holds() != 0 {
						t.Fatalf("at %d: %d mappings are left", at, r.fab.Mapped())
					}
					r.close()
					r.closed = true
					if over {
						break
					}
				}
			})
		}
	}
}

// A version that was checked is not checked again for ten seconds. Another version is, and so is one whose CRC the
// caller takes never.
func TestCheckedVersions(t *testing.T) {
	r := newRig(t, 1, false)
	r.put("a", longOf('a'))
	look := func(unchecked bool) error {
		v := r.view("a")
		v.part.Unchecked = unchecked
		r.settleLane()
		if v.err == nil && !v.part.Shown {
			t.Error("not in place")
		}
		v.hold.Release()
		return v.err
	}
	r.record()[layout.RecordHeaderSize+longLen] ^= 1
	if err := look(true); err != nil {
		t.Errorf("unchecked: %v", err)
	}
	if err := look(false); !errors.As(err, new(*layout.CorruptError)) {
		t.Errorf("damaged: %v", err)
	}
	r.record()[layout.RecordHeaderSize+longLen] ^= 1
	r.now += 10 * second
	r.renew(rigLease)
	if err := look(false); err != nil {
		t.Fatal(err)
	}
	r.record()[layout.RecordHeaderSize+longLen] ^= 1
	if err := look(false); err != nil {
		t.Errorf("checked a moment ago: %v", err)
	}
	r.now += 10 * second
	r.renew(rigLease)
	if err := look(false); !errors.As(err, new(*layout.CorruptError)) {
		t.Errorf("checked long ago: %v", err)
	}
	r.rewrite("a", longOf('b'))
	r.record()[layout.RecordHeaderSize+longLen] ^= 1
	if err := look(false); !errors.As(err, new(*layout.CorruptError)) {
		t.Errorf("another version: %v", err)
	}
}

// Without mappings a View has a copy, which holds nothing back.
func TestViewOfACopy(t *testing.T) {
	r := newRigOf(t, 1, func(c *driver.Caps) { c.Maps = false })
	r.put("a", longOf('a'))
	v := r.view("a")
	r.settleLane()
	if v.err != nil || v.part.Shown {
		t.Fatalf("in place %v, %v", v.part.Shown, v.err)
	}
	r.renew(rigLease)
	if got := r.report(); got != r.core.Epoch() || !v.hold.Stands() {
		t.Errorf("epoch %d is reported, E is %d", got, r.core.Epoch())
	}
	r.now += viewFor
	if r.report(); v.hold.Release() {
		t.Error("stands beyond its Hold")
	}
}
