package engine_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/internal/layout"
)

// disk is the tier of a rig: what it was asked for waits for the test's answer.
type disk struct {
	objects map[layout.ObjectAt][]byte
	fetches []func(got []byte)
	asked   []layout.ObjectAt
	stores  []func(at []layout.ObjectAt, err error)
	stored  [][]byte
}

func (d *disk) Volume(uint32) index.VolumeState { return index.VolumeUp }

func (d *disk) Fetch(at layout.ObjectAt, _ int, answer func(got []byte)) {
	d.asked, d.fetches = append(d.asked, at), append(d.fetches, answer)
}

func (d *disk) Store(object []byte, answer func(at []layout.ObjectAt, err error)) {
	d.stored, d.stores = append(d.stored, object), append(d.stores, answer)
}

// demote puts a stub in place of key's record.
func (r *rig) demote(key string) {
	r.t.Helper()
	d := &r.disk
	t := r.request(index.Demote, key, "")
	t.Op.Value, t.Op.Tiered = nil, &index.Tiered{}
	r.l.Start(t)
	r.settleLane()
	if t.Waiting() != index.Store || len(d.stores) == 0 {
		r.t.Fatalf("demote %q waits for %v", key, t.Waiting())
	}
	at := layout.ObjectAt{Volume: 1, At: uint64(len(d.objects)+1) << 20}
	if d.objects == nil {
		d.objects = map[layout.ObjectAt][]byte{}
	}
	d.objects[at] = d.stored[len(d.stored)-1]
	d.stores[len(d.stores)-1]([]layout.ObjectAt{at}, nil)
	r.settleLane()
	if _, err := r.answer(t); err != nil {
		r.t.Fatalf("demote %q: %v", key, err)
	}
}

// fetch answers the i-th fetch with the object that it asked for.
func (r *rig) fetch(i int) {
	r.disk.fetches[i](r.disk.objects[r.disk.asked[i]])
	r.settleLane()
}

// A GET that waits for a disk counts as not begun: it does not hold the reclaim epoch back. Nothing but the answer
// wakes it.
func TestDiskHoldsNothingBack(t *testing.T) {
	for _, kind := range []index.Kind{index.Get, index.Promote, index.Demote} {
		r := newRig(t, 2, false)
		r.put("a", "some value")
		if kind != index.Demote {
			r.demote("a")
		}
		x := r.request(kind, "a", "")
		x.Op.Value = nil
		if x.Op.Kind != index.Get {
			x.Op.Tiered = &index.Tiered{}
		}
		r.l.Start(x)
		r.settleLane()
		if _, ok := r.l.Oldest(); ok {
			t.Errorf("%v holds the reclaim epoch back while it waits", kind)
		}
		if _, bound := x.Op.MapVersion(); bound {
			t.Errorf("%v holds a map back while it waits", kind)
		}
		for range 3 {
			r.l.Deliver(func(*engine.Lane) {})
			r.settleLane()
		}
		if x.IsDone() {
			t.Fatalf("%v is done without its disk: %v", kind, x.Op.Err)
		}
		if kind == index.Demote {
			r.disk.stores[0]([]layout.ObjectAt{{Volume: 1, At: 1 << 20}}, nil)
			r.settleLane()
		} else {
			r.fetch(0)
		}
		if v, err := r.answer(x); err != nil || kind == index.Get && v != "some value" {
			t.Errorf("%v: %q, %v", kind, v, err)
		}
	}
}

// An answer of a disk that comes when its operation is over belongs to nobody, also if another operation has its Task.
func TestLateDisk(t *testing.T) {
	r := newRig(t, 1, false)
	for _, key := range []string{"a", "b"} {
		r.put(key, "value of "+key)
		r.demote(key)
	}
	x := r.request(index.Get, "a", "")
	x.Deadline = r.now + second
	r.l.Start(x)
	r.settleFor(second / 2)
	r.now += second
	r.l.Deliver(func(*engine.Lane) {})
	r.settleFor(0)
	if _, err := r.answer(x); !errors.Is(err, engine.ErrTimeout) || !errors.Is(err, index.ErrTier) {
		t.Fatalf("at its deadline: %v", err)
	}
	r.renew(rigLease)
	y := r.request(index.Get, "b", "")
	if y != x {
		t.Fatal("another Task is used: the test shows nothing")
	}
	r.l.Start(y)
	r.settleLane()
	r.fetch(0) // a's
	if y.IsDone() {
		t.Fatalf("the answer to another operation ends it: %q, %v", y.Op.Record.Value, y.Op.Err)
	}
	r.fetch(1)
	if v, err := r.answer(y); err != nil || v != "value of b" {
		t.Fatalf("%q, %v", v, err)
	}
}

// A disk that refuses an object leaves the record where it is, and the answer says so.
func TestDiskRefuses(t *testing.T) {
	r := newRig(t, 2, false)
	r.put("a", "1")
	full := errors.New("the disk is full")
	x := r.request(index.Demote, "a", "")
	x.Op.Value, x.Op.Tiered = nil, &index.Tiered{}
	r.l.Start(x)
	r.settleLane()
	r.disk.stores[0](nil, full)
	r.settleLane()
	if _, err := r.answer(x); !errors.Is(err, full) || errors.Is(err, index.ErrUnknown) {
		t.Fatalf("%v, want %v", err, full)
	}
	r.get("a", "1")
}

// An object that cannot be read, and a session without a tier, are told from a key that is not there.
func TestObjectOutOfReach(t *testing.T) {
	r := newRig(t, 1, false)
	r.put("a", "1")
	r.demote("a")
	x := r.request(index.Get, "a", "")
	r.l.Start(x)
	r.settleLane()
	r.disk.fetches[0](nil)
	r.settleLane()
	if _, err := r.answer(x); !errors.Is(err, index.ErrTier) || !strings.Contains(err.Error(), "tier") {
		t.Fatalf("%v, want %v", err, index.ErrTier)
	}
}

// A hint of a stub does not answer without a Task, and what is there afterwards does.
func TestHintedDeclinesStub(t *testing.T) {
	r := newRig(t, 1, true)
	r.put("a", "value")
	r.demote("a")
	if q := r.hinted(false, "a", ""); q.OK {
		t.Fatalf("a stub answered with %q, %v", q.value, q.Err)
	}
	if q := r.hinted(true, "a", "2"); !q.OK || q.Err != nil {
		t.Fatalf("a PUT over a stub: %v, %v", q.OK, q.Err)
	}
	if q := r.hinted(false, "a", ""); !q.OK || q.value != "2" {
		t.Fatalf("%v %q", q.OK, q.value)
	}
}
