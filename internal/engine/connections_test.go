package engine_test

import (
	"errors"
	"slices"
	"testing"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/driver"
)

// A connection to memory that is given up is closed as the lane sees the map, and asked for
// once.
func TestConnGivenUp(t *testing.T) {
	r := newRig(t, 2, false)
	r.put("a", "1")
	r.nodes[1].incarnation++
	r.epoch++
	r.install(nil)
	if !slices.Equal(r.wantConn, []uint32{2}) {
		t.Fatalf("wants connections %v", r.wantConn)
	}
	x := r.request(index.Get, "a", "")
	r.l.Start(x)
	r.settleLane()
	if x.Waiting() != index.Post || !slices.Equal(r.wantConn, []uint32{2}) {
		t.Fatalf("waits for %v, wants connections %v", x.Waiting(), r.wantConn)
	}
	r.l.ConnFailed(2, false, false, engine.ErrNoConn) // it may be had later
	r.settleLane()
	if x.Waiting() != index.Post || !slices.Equal(r.wantConn, []uint32{2, 2}) {
		t.Fatalf("waits for %v, wants connections %v", x.Waiting(), r.wantConn)
	}
	r.connect(2)
	r.settleLane()
	if v, err := r.answer(x); v != "1" || err != nil {
		t.Fatalf("%q, %v", v, err)
	}
}

// A send queue that is full takes the rest later, in order.
func TestQueueFull(t *testing.T) {
	r := newRig(t, 1, false)
	r.put("a", "1")
	r.put("b", "1")
	r.wire.post = func(q driver.QP, wrs []driver.WR) (int, error) {
		n, err := q.PostSend(wrs[:1])
		if err == nil && len(wrs) > 1 {
			err = driver.ErrQueueFull
		}
		return n, err
	}
	a, b := r.request(index.Put, "a", "2"), r.request(index.Put, "b", "2")
	r.l.Start(a)
	r.l.Start(b)
	r.settleLane()
	for _, x := range []*engine.Task{a, b} {
		if _, err := r.answer(x); err != nil {
			t.Fatal(err)
		}
	}
	if len(r.wantConn) > 0 {
		t.Fatalf("wants connections %v", r.wantConn)
	}
	r.get("a", "2")
	r.get("b", "2")
}

// Where a READ could miss what an atomic in front of it did, it is fenced.
func TestFencedReads(t *testing.T) {
	for _, sees := range []bool{false, true} {
		r := newRigOf(t, 1, func(c *driver.Caps) { c.AtomicThenRead = sees })
		atomics, reads := 0, 0
		r.wire.post = func(q driver.QP, wrs []driver.WR) (int, error) {
			for i := range wrs {
				switch w := &wrs[i]; {
				case w.Op.IsAtomic():
					atomics++
				case w.Op == rdma.OpRead && atomics > 0:
					if reads++; (w.Flags&rdma.Fence != 0) == sees {
						t.Errorf("READ behind an atomic with flags %v, on a device where it sees that: %v", w.Flags,
							sees)
					}
				}
			}
			return q.PostSend(wrs)
		}
		r.put("a", "1")
		r.get("a", "1")
		if reads == 0 {
			t.Error("no READ behind an atomic")
		}
	}
}

// A region that was made anew has other keys, which a lane takes from the next map.
func TestNewKeys(t *testing.T) {
	r := newRig(t, 1, false)
	r.put("a", "1")
	n := r.nodes[0]
	if err := errors.Join(n.mrs[0].Deregister(), n.mrs[1].Deregister()); err != nil {
		t.Fatal(err)
	}
	n.register(n.region)
	r.epoch++
	r.install(nil)
	r.get("a", "1")
	r.put("a", "2")
	r.get("a", "2")
}

// An older map does not replace a newer one, however late it comes.
func TestOlderMap(t *testing.T) {
	r := newRig(t, 1, false)
	old := r.core.View()
	r.install(nil)
	r.core.InstallView(old)
	r.l.Pump()
	if v := r.core.View().Version; v != r.version {
		t.Fatalf("map %d is in force, after %d", v, r.version)
	}
}
