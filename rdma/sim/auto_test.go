package sim_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/driver"
	"github.com/kvd-project/kvd/rdma/sim"
)

// autoRun lets two QPs contend without waiting and gives a trace of what they
// polled and read.
func autoRun(t *testing.T, seed uint64) string {
	w := newWorld(t, sim.Options{Seed: seed}, 2)
	var b strings.Builder
	for i := range 20 {
		for c := range 2 {
			setWord(w.lanes[c].local, 0, uint64(10*i+c))
			w.post(c, w.wr(c, uint64(i), rdma.OpWrite, 0, 8), w.wr(c, uint64(100+i), rdma.OpRead, 0, 64))
			fmt.Fprintf(&b, "%d %s %d\n", c, w.poll(c), word(w.mem, 0))
		}
	}
	return b.String()
}

func TestAutoRepeatsBySeed(t *testing.T) {
	a, again, other := autoRun(t, 1), autoRun(t, 1), autoRun(t, 2)
	if a != again {
		t.Errorf("one seed, two schedules:\n%s\n%s", a, again)
	}
	if a == other {
		t.Error("two seeds, one schedule")
	}
}

// drain polls until n WCs came; a Ready must be there whenever some are missing.
func (w *world) drain(c, n int) {
	w.t.Helper()
	var wc [1]rdma.WC
	for n > 0 {
		if w.lanes[c].cq.Poll(wc[:]) == 1 {
			if wc[0].Status != driver.Success {
				w.t.Fatalf("%+v", wc[0])
			}
			n--
			continue
		}
		select {
		case <-w.lanes[c].cq.Ready():
		default:
			w.t.Fatalf("qp %d: %d WCs missing and Ready not signalled", c, n)
		}
	}
}

// Over some seeds each kind of meanness must show.
func TestAutoIsMean(t *testing.T) {
	saw := map[string]int{}
	for seed := range uint64(60) {
		w := newWorld(t, sim.Options{Seed: seed}, 2)
		a, b := w.lanes[0].local, w.lanes[1].local

		// A buffer looked at before its WC.
		setWord(w.mem, 0, 1)
		w.post(0, w.wr(0, 1, rdma.OpRead, 0, 8))
		if word(a, 0) == 0xdbdbdbdbdbdbdbdb {
			saw["poison before the effect"]++
		}
		w.drain(0, 1)
		if word(a, 0) != 1 {
			t.Fatalf("seed %d: read %#x", seed, word(a, 0))
		}

		// A buffer reused before its WC, and not so if inline.
		setWord(a, 8, 2)
		w.post(0, w.wr(0, 2, rdma.OpWrite, 8, 8))
		setWord(a, 8, 3)
		setWord(a, 16, 2)
		in := w.wr(0, 3, rdma.OpWrite, 16, 8)
		in.Flags |= rdma.Inline
		w.post(0, in)
		setWord(a, 16, 3)
		w.drain(0, 2)
		w.wantWord(16, 2)
		if word(w.mem, 8) == 3 {
			saw["reuse before the WC"]++
		}

		// A long READ against a long WRITE.
		for at := 64; at < 256; at += 8 {
			setWord(a, at, 7)
		}
		w.post(1, w.wr(1, 1, rdma.OpRead, 64, 192))
		w.post(0, w.wr(0, 4, rdma.OpWrite, 64, 192))
		w.drain(0, 1)
		w.drain(1, 1)
		var fresh []bool
		for at := 64; at < 256; at += 8 {
			fresh = append(fresh, word(b, at) == 7)
		}
		if slices.Contains(fresh, true) && slices.Contains(fresh, false) {
			saw["torn READ"]++
			if n := slices.Index(fresh, !fresh[0]); slices.Contains(fresh[n:], fresh[0]) {
				saw["READ torn in several places"]++
			}
		}

		// A WC that comes later than its effect; QPs that overtake each other.
		setWord(a, 24, 5)
		setWord(b, 32, 6)
		w.post(0, w.wr(0, 5, rdma.OpWrite, 24, 8))
		w.post(1, w.wr(1, 5, rdma.OpWrite, 32, 8))
		var wc [1]rdma.WC
		for word(w.mem, 24) != 5 && word(w.mem, 32) != 6 {
			w.lanes[1].cq.Poll(nil)
		}
		if word(w.mem, 24) != 5 {
			saw["overtaking"]++
		} else if w.lanes[0].cq.Poll(wc[:]) == 0 {
			saw["late WC"]++
		}
	}
	for _, kind := range []string{"poison before the effect", "reuse before the WC", "torn READ",
		"READ torn in several places", "late WC", "overtaking"} {
		if saw[kind] == 0 {
			t.Errorf("no %s in 60 seeds", kind)
		}
	}
	t.Logf("%v", saw)
}

// A killed QP's WRs land or not; over some seeds both, and always a prefix.
func TestAutoKillLandsAPrefix(t *testing.T) {
	counts := map[int]int{}
	for seed := range uint64(40) {
		w := newWorld(t, sim.Options{Seed: seed}, 1)
		var wrs []rdma.WR
		for i := range 6 {
			setWord(w.lanes[0].local, 8*i, 1)
			wrs = append(wrs, w.wr(0, uint64(i), rdma.OpWrite, 8*i, 8))
		}
		w.post(0, wrs...)
		if err := w.fab.Kill(w.lanes[0].qp.Num()); err != nil {
			t.Fatal(err)
		}
		if err := w.peers[0].Fence(context.Background()); err != nil {
			t.Fatal(err)
		}
		n := 0
		for n < 6 && word(w.mem, 8*n) == 1 {
			n++
		}
		counts[n]++
		for i := n; i < 6; i++ {
			w.wantWord(8*i, 0)
		}
	}
	if len(counts) < 4 {
		t.Errorf("prefixes that landed: %v", counts)
	}
}

// As in hardware, an unsignaled WR's slot comes back with a later WC only.
func TestUnsignaledWRsHoldTheirSlots(t *testing.T) {
	w := newWorld(t, sim.Options{MaxSendWR: 4}, 1)
	quiet := w.wr(0, 1, rdma.OpWrite, 0, 8)
	quiet.Flags = 0
	w.post(0, quiet, quiet, quiet, w.wr(0, 2, rdma.OpWrite, 0, 8))
	for len(w.fab.Events()) > 0 && w.lanes[0].cq.Poll(nil) == 0 {
	}
	if n, err := w.lanes[0].qp.PostSend([]rdma.WR{quiet}); n != 0 || !errors.Is(err, rdma.ErrQueueFull) {
		t.Fatalf("PostSend gave %d, %v", n, err)
	}
	w.drain(0, 1)
	w.post(0, quiet, quiet, quiet, quiet)
}

// Callers of the driver alone get as WCs what package rdma refuses.
func TestMalformedWRsFailAsWCs(t *testing.T) {
	for _, c := range []struct {
		change func(*driver.WR)
		want   driver.Status
	}{
		{func(w *driver.WR) { w.Op = 0 }, driver.LocQPOpErr},
		{func(w *driver.WR) { w.Op = 77 }, driver.LocQPOpErr},
		{func(w *driver.WR) { w.Local = nil }, driver.LocQPOpErr},
		{func(w *driver.WR) { w.Op, w.RemoteAddr = driver.OpCmpAndSwp, 4 }, driver.LocQPOpErr},
		{func(w *driver.WR) { w.Op, w.Local = driver.OpFetchAdd, w.Local[:4] }, driver.LocQPOpErr},
		{func(w *driver.WR) { w.Flags |= driver.Inline; w.Op = driver.OpRead }, driver.LocQPOpErr},
		{func(w *driver.WR) { w.Local = make([]byte, 65) }, driver.LocLenErr},
		{func(w *driver.WR) { w.Op, w.Local = driver.OpRead, make([]byte, 65) }, driver.LocLenErr},
	} {
		w := newWorld(t, sim.Options{Manual: true, MaxMsg: 64}, 0)
		d := w.fab.Device("raw")
		pd, cq := must(d.AllocPD()), must(d.CreateCQ(1))
		m := must(d.Alloc(64, driver.AllocOptions{}))
		mr := must(pd.RegMR(m, 0, 64, driver.AccessLocal))
		qp := must(d.Dial(context.Background(), driver.DialRequest{PD: pd, CQ: cq, Addr: "m"}))
		wr := driver.WR{ID: 3, Op: driver.OpWrite, Local: m.Bytes[:8], LKey: mr.LKey(), RKey: w.mem.RKey()}
		c.change(&wr)
		if n, err := qp.PostSend([]driver.WR{wr}); n != 1 || err != nil {
			t.Fatalf("PostSend gave %d, %v", n, err)
		}
		w.fire("qp1")
		var wc [1]driver.WC
		if cq.Poll(wc[:]) != 1 || wc[0].Status != c.want || wc[0].ID != 3 {
			t.Errorf("%+v completed as %+v, want %v", wr, wc[0], c.want)
		}
	}
}

func TestStats(t *testing.T) {
	w := newWorld(t, sim.Options{}, 2)
	w.post(0, w.wr(0, 1, rdma.OpWrite, 0, 32), w.wr(0, 2, rdma.OpCmpAndSwp, 64, 8))
	w.post(0, w.wr(0, 3, rdma.OpRead, 0, 100))
	w.post(1, w.wr(1, 1, rdma.OpFetchAdd, 64, 8))
	w.drain(0, 3)
	w.drain(1, 1)
	s := w.fab.Stats()
	var verbs [driver.NumOpcodes]uint64
	verbs[rdma.OpWrite], verbs[rdma.OpCmpAndSwp], verbs[rdma.OpRead] = 1, 1, 1
	one := sim.Counters{Doorbells: 2, Verbs: verbs, ReadBytes: 100, WriteBytes: 32}
	verbs[rdma.OpFetchAdd] = 1
	total := sim.Counters{Doorbells: 3, Verbs: verbs, ReadBytes: 100, WriteBytes: 32}
	if len(s.QPs) != 2 || s.QPs[0] != (sim.QPCounters{Num: 1, Counters: one}) || s.Total != total {
		t.Fatalf("%+v", s)
	}
	if err := w.lanes[0].qp.Close(); err != nil {
		t.Fatal(err)
	}
	if s := w.fab.Stats(); len(s.QPs) != 1 || s.Total != total {
		t.Fatalf("after closing a QP: %+v", s)
	}
	w.fab.Reset(0)
	if s := w.fab.Stats(); s.Total != (sim.Counters{}) || s.QPs[0].Counters != (sim.Counters{}) {
		t.Fatalf("after Reset: %+v", s)
	}
}

// Reset makes every schedule start alike, whatever happened before.
func TestResetRepeats(t *testing.T) {
	w := newWorld(t, sim.Options{}, 2)
	run := func() string {
		w.fab.Reset(5)
		var b strings.Builder
		for i := range 10 {
			for c := range 2 {
				w.post(c, w.wr(c, uint64(i), rdma.OpWrite, 8*c, 64))
				b.WriteString(w.poll(c) + "\n")
			}
		}
		return b.String()
	}
	a := run()
	if err := w.peers[1].Fence(context.Background()); err != nil {
		t.Fatal(err)
	}
	extra := w.dial("extra")
	if err := extra.qp.Close(); err != nil {
		t.Fatal(err)
	}
	if b := run(); a != b {
		t.Errorf("two runs of one seed:\n%s\n%s", a, b)
	}
	if got := w.dial("another").qp.Num(); got != 3 {
		t.Errorf("new QP has number %d after Reset, want 3", got)
	}
}

func TestAddressesAreExclusive(t *testing.T) {
	w := newWorld(t, sim.Options{}, 0)
	m := w.fab.Device("m2")
	accept := func(driver.ConnRequest) (driver.PD, driver.Access, error) { return nil, 0, nil }
	if _, err := m.Listen("m", driver.ListenOptions{Accept: accept}); err == nil {
		t.Error("two listeners at one address")
	}
	if _, err := m.Listen("other", driver.ListenOptions{}); err == nil {
		t.Error("a listener without Accept")
	}
	a, b := must(m.Listen("", driver.ListenOptions{Accept: accept})),
		must(m.Listen("", driver.ListenOptions{Accept: accept}))
	if a.Addr() == b.Addr() {
		t.Error("two listeners chose one address")
	}
	pd, cq := must(m.AllocPD()), must(m.CreateCQ(1))
	if _, err := m.Dial(context.Background(), driver.DialRequest{PD: pd, CQ: cq, Addr: a.Addr()}); !errors.Is(
		err, driver.ErrRefused) {
		t.Errorf("Accept without a PD gave %v", err)
	}
	other := w.fab.Device("m3")
	if _, err := other.Dial(context.Background(), driver.DialRequest{PD: pd, CQ: cq, Addr: "m"}); err == nil {
		t.Error("dialled with another device's PD")
	}
	if w.fab.Device("m2") != m {
		t.Error("one name, two devices")
	}
}
