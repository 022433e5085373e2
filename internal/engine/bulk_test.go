package engine_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/driver"
	"github.com/kvd-project/kvd/rdma/sim"
)

var (
	bulky    = strings.Repeat("x", 64<<10)
	tooShort = strings.Repeat("x", 63<<10)
)

// sharedWire is a rig with memory for some long values, whose WRs wait for each other's bytes.
func sharedWire(t *testing.T) *rig {
	t.Helper()
	r := newRigOf(t, 1, func(c *driver.Caps) { c.SharedWire = true })
	r.grant(rigLo+2000, 12000)
	return r
}

// newBulkRig is a rig whose lane has a second queue pair to the one memory node, and has put "b", a long value, and
// "a".
func newBulkRig(t *testing.T) *rig {
	t.Helper()
	r := sharedWire(t)
	r.put("a", "1")
	r.put("b", tooShort)
	if len(r.wantBulk) > 0 {
		t.Fatalf("wants second queue pairs %v before there was a long value", r.wantBulk)
	}
	r.put("b", bulky)
	if !slices.Equal(r.wantBulk, []uint32{1}) || len(r.qps(1)) != 1 {
		t.Fatalf("wants second queue pairs %v, has %v", r.wantBulk, r.qps(1))
	}
	r.wantBulk = nil
	r.attach(1, true)
	return r
}

// A chain that is long goes whole by the second queue pair, any other one by the first.
func TestBulk(t *testing.T) {
	r := newBulkRig(t)
	first, second := r.qps(1)[0], r.qps(1)[1]
	var by map[uint32][]rdma.Opcode
	r.wire.post = func(q driver.QP, wrs []driver.WR) (int, error) {
		for i := range wrs {
			by[q.Num()] = append(by[q.Num()], wrs[i].Op)
		}
		return q.PostSend(wrs)
	}
	for _, c := range []struct {
		what string
		do   func()
		qp   uint32
		want []rdma.Opcode
	}{
		{"a short PUT", func() { r.put("a", "2") }, first, []rdma.Opcode{rdma.OpWrite, rdma.OpCmpAndSwp}},
		{"a PUT", func() { r.put("b", bulky) }, second, []rdma.Opcode{rdma.OpWrite, rdma.OpCmpAndSwp}},
		{"a GET", func() { r.get("b", bulky) }, second, []rdma.Opcode{rdma.OpRead, rdma.OpRead}},
		{"a short GET", func() { r.get("a", "2") }, first, []rdma.Opcode{rdma.OpRead, rdma.OpRead}},
	} {
		by = map[uint32][]rdma.Opcode{}
		if c.do(); !slices.Equal(by[c.qp], c.want) || len(by) != 1 {
			t.Errorf("%s: %v, want %v by queue pair %d", c.what, by, c.want, c.qp)
		}
	}
	if len(r.wantBulk)+len(r.wantConn) > 0 {
		t.Errorf("wants connections %v and %v", r.wantConn, r.wantBulk)
	}
}

// Where WRs do not wait for each other's bytes there is one queue pair.
func TestNoBulk(t *testing.T) {
	r := newRig(t, 1, false)
	r.put("b", bulky)
	r.get("b", bulky)
	if len(r.wantBulk) > 0 {
		t.Errorf("wants second queue pairs %v", r.wantBulk)
	}
}

// A short GET is over while all of a long one is still under way.
func TestShortBesideBulk(t *testing.T) {
	r := newBulkRig(t)
	long, short := r.request(index.Get, "b", ""), r.request(index.Get, "a", "")
	r.l.Start(long)
	r.l.Start(short)
	r.fireOn(r.qp(1))
	if long.IsDone() || !short.IsDone() {
		t.Fatalf("done: the long one %v, the short one %v", long.IsDone(), short.IsDone())
	}
	if v, err := r.answer(short); v != "1" || err != nil {
		t.Fatalf("%q, %v", v, err)
	}
	r.settleLane()
	if v, err := r.answer(long); v != bulky || err != nil {
		t.Fatalf("%d bytes, %v", len(v), err)
	}
}

// fireOn has all take effect that is under way on one queue pair.
func (r *rig) fireOn(qp uint32) {
	r.t.Helper()
	for {
		r.l.Pump()
		i := slices.IndexFunc(r.fab.Events(), func(e sim.Event) bool { return e.QP == qp })
		if i < 0 {
			return
		}
		if err := r.fab.Fire(r.fab.Events()[i]); err != nil {
			r.t.Fatal(err)
		}
	}
}

// Whichever of the two breaks, neither is used until both are closed: what failed on one may still land.
func TestBulkBreaks(t *testing.T) {
	for name, i := range map[string]int{"first": 0, "second": 1} {
		t.Run(name, func(t *testing.T) {
			r := newBulkRig(t)
			long := r.request(index.Put, "b", bulky+"2")
			r.l.Start(long)
			r.l.Pump()
			if err := r.fab.Kill(r.qps(1)[i]); err != nil {
				t.Fatal(err)
			}
			short := r.request(index.Put, "a", "2")
			if i == 0 {
				r.l.Start(short)
			}
			r.l.Pump()
			if !slices.Equal(r.wantBulk, []uint32{1}) || !slices.Equal(r.wantConn, []uint32{1}) {
				t.Fatalf("wants connections %v and %v", r.wantConn, r.wantBulk)
			}
			if i == 1 {
				if long.Waiting() != index.Reconnect {
					t.Fatalf("the long one waits for %v", long.Waiting())
				}
				r.l.Start(short)
				r.l.Pump()
			}
			if w := short.Waiting(); w != index.Post && w != index.Reconnect {
				t.Fatalf("the short one waits for %v", w)
			}
			r.hangUp(1, true)
			r.hangUp(1, false)
			r.attach(1, false)
			r.settleLane()
			for _, x := range []*engine.Task{long, short} {
				if _, err := r.answer(x); err != nil {
					t.Fatal(err)
				}
			}
			r.get("a", "2")
			r.get("b", bulky+"2")
			r.attach(1, true)
			r.get("b", bulky+"2")
		})
	}
}

// Closing the second queue pair ends what went by it, and nothing that went by the first.
func TestBulkClosed(t *testing.T) {
	r := newBulkRig(t)
	long, short := r.request(index.Get, "b", ""), r.request(index.Get, "a", "")
	r.l.Start(long)
	r.l.Start(short)
	r.l.Pump()
	r.hangUp(1, true)
	r.fireOn(r.qp(1))
	if v, err := r.answer(short); v != "1" || err != nil || long.IsDone() {
		t.Fatalf("%q, %v; the long one is done: %v", v, err, long.IsDone())
	}
	r.connect(1)
	r.settleLane()
	if v, err := r.answer(long); v != bulky || err != nil {
		t.Fatalf("%d bytes, %v", len(v), err)
	}
}

// A second queue pair that was dialed beside a first one that has gone is given up unused: as the memory node gets the
// next first one, it ends what the lane has left.
func TestBulkOutlived(t *testing.T) {
	for name, again := range map[string]bool{"down": false, "replaced": true} {
		t.Run(name, func(t *testing.T) {
			r := sharedWire(t)
			r.put("b", bulky)
			x := r.request(index.Get, "b", "")
			r.l.Start(x)
			r.l.Pump()
			if err := r.fab.Kill(r.qp(1)); err != nil {
				t.Fatal(err)
			}
			r.l.Pump()
			if again {
				r.connect(1)
			}
			r.attach(1, true) // the answer to what was asked for before
			if !slices.Equal(r.wantBulk, []uint32{1, 1}) {
				t.Fatalf("wants second queue pairs %v", r.wantBulk)
			}
			if !again {
				r.connect(1)
			}
			r.settleLane()
			if v, err := r.answer(x); v != bulky || err != nil {
				t.Fatalf("%d bytes, %v", len(v), err)
			}
		})
	}
}

// A second connection that cannot be had is asked for with the next long value; nothing waits for it.
func TestBulkFailed(t *testing.T) {
	r := sharedWire(t)
	for i := range 3 {
		for range 2 {
			r.put("b", bulky)
			r.get("b", bulky)
		}
		if len(r.wantBulk) != i+1 {
			t.Fatalf("wants second queue pairs %v, after %d failures", r.wantBulk, i)
		}
		r.l.ConnFailed(1, true, true, engine.ErrNoConn)
	}
	if len(r.wantConn) > 0 {
		t.Fatalf("wants connections %v", r.wantConn)
	}
}

// A connection that is left takes nothing new, and is given up when what was under way on either queue pair has ended:
// no outcome is unknown.
func TestLeave(t *testing.T) {
	r := newBulkRig(t)
	long, short := r.request(index.Put, "b", bulky+"2"), r.request(index.Put, "a", "2")
	r.l.Start(long)
	r.l.Pump()
	r.l.Leave(1)
	r.l.Start(short)
	r.l.Pump()
	if long.IsDone() || len(r.wantConn)+len(r.wantBulk) > 0 {
		t.Fatalf("wants connections %v and %v while a PUT is under way: %v", r.wantConn, r.wantBulk, !long.IsDone())
	}
	if w := short.Waiting(); w != index.Post {
		t.Fatalf("a PUT that comes later waits for %v", w)
	}
	r.fireOn(r.qps(1)[1])
	if !slices.Equal(r.wantBulk, []uint32{1}) || !slices.Equal(r.wantConn, []uint32{1}) {
		t.Fatalf("wants connections %v and %v", r.wantConn, r.wantBulk)
	}
	r.connect(1)
	r.settleLane()
	for _, x := range []*engine.Task{long, short} {
		if _, err := r.answer(x); err != nil {
			t.Fatal(err)
		}
	}
	if n := r.l.Stats.Unknown; n != 0 {
		t.Errorf("%d unknown outcomes", n)
	}
	r.get("a", "2")
	r.get("b", bulky+"2")
}
