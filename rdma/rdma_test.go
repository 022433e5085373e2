package rdma_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/driver"
	"github.com/kvd-project/kvd/rdma/sim"
)

type pair struct {
	dev *rdma.Device
	pd  *rdma.PD
	cq  *rdma.CQ
	qp  *rdma.QP
	mr  *rdma.MR // remote and local
	fab *sim.Fabric
}

func newPair(t *testing.T, o sim.Options) *pair {
	t.Helper()
	p := &pair{fab: sim.New(o)}
	p.dev = rdma.NewDevice("sim", p.fab.Device("d"))
	var err error
	check := func() {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	p.pd, err = p.dev.AllocPD()
	check()
	m, err := p.dev.Alloc(1<<16, rdma.AllocOptions{Name: "test"})
	check()
	p.mr, err = p.pd.RegMR(m, 0, 1<<16, rdma.AccessRemoteRead|rdma.AccessRemoteWrite|rdma.AccessRemoteAtomic)
	check()
	p.cq, err = p.dev.CreateCQ(16)
	check()
	_, err = p.dev.Listen("d", rdma.ListenOptions{
		Accept: func(rdma.ConnRequest) (*rdma.PD, rdma.Access, error) {
			return p.pd, rdma.AccessRemoteRead | rdma.AccessRemoteWrite | rdma.AccessRemoteAtomic, nil
		},
	})
	check()
	p.qp, err = p.dev.Dial(context.Background(), p.pd, p.cq, "d", nil)
	check()
	return p
}

func (p *pair) wr(op rdma.Opcode, n int) rdma.WR {
	return rdma.WR{Op: op, Local: p.mr.Bytes()[4096 : 4096+n], LKey: p.mr.LKey(), RemoteAddr: p.mr.Base(),
		RKey: p.mr.RKey()}
}

func TestPostSendRefusesMalformedWRs(t *testing.T) {
	p := newPair(t, sim.Options{Manual: true, MaxMsg: 1024, MaxInline: 64})
	bad := map[string]func() rdma.WR{
		"no opcode":             func() rdma.WR { return p.wr(0, 8) },
		"opcode out of range":   func() rdma.WR { return p.wr(99, 8) },
		"READ of nothing":       func() rdma.WR { return p.wr(rdma.OpRead, 0) },
		"WRITE of nothing":      func() rdma.WR { return p.wr(rdma.OpWrite, 0) },
		"READ over MaxMsg":      func() rdma.WR { return p.wr(rdma.OpRead, 1025) },
		"WRITE over MaxMsg":     func() rdma.WR { return p.wr(rdma.OpWrite, 1025) },
		"inline READ":           func() rdma.WR { w := p.wr(rdma.OpRead, 8); w.Flags = rdma.Inline; return w },
		"inline over MaxInline": func() rdma.WR { w := p.wr(rdma.OpWrite, 65); w.Flags = rdma.Inline; return w },
		"inline CAS":            func() rdma.WR { w := p.wr(rdma.OpCmpAndSwp, 8); w.Flags = rdma.Inline; return w },
		"CAS of 4 bytes":        func() rdma.WR { return p.wr(rdma.OpCmpAndSwp, 4) },
		"CAS of 16 bytes":       func() rdma.WR { return p.wr(rdma.OpCmpAndSwp, 16) },
		"FETCH_ADD of 0 bytes":  func() rdma.WR { return p.wr(rdma.OpFetchAdd, 0) },
		"CAS at a misaligned word": func() rdma.WR {
			w := p.wr(rdma.OpCmpAndSwp, 8)
			w.RemoteAddr += 4
			return w
		},
		"FETCH_ADD into a misaligned buffer": func() rdma.WR {
			w := p.wr(rdma.OpFetchAdd, 8)
			w.Local = p.mr.Bytes()[4097:4105]
			return w
		},
	}
	for name, make := range bad {
		for _, wrs := range [][]rdma.WR{{make()}, {p.wr(rdma.OpWrite, 8), make()}, {make(), p.wr(rdma.OpWrite, 8)}} {
			n, err := p.qp.PostSend(wrs)
			if n != 0 || !errors.Is(err, rdma.ErrBadWR) {
				t.Errorf("%s: PostSend gave %d, %v; want 0, ErrBadWR", name, n, err)
			}
		}
	}
	if evs := p.fab.Events(); len(evs) != 0 {
		t.Errorf("refused WRs were posted: %v", evs)
	}
	if c := p.qp.Counters(); c != (rdma.Counters{}) {
		t.Errorf("refused WRs were counted: %+v", c)
	}
	if s := p.qp.State(); s != driver.StateRTS {
		t.Errorf("state %d after refused WRs", s)
	}
	in := p.wr(rdma.OpWrite, 64)
	in.Flags = rdma.Inline
	good := []rdma.WR{p.wr(rdma.OpRead, 1), p.wr(rdma.OpRead, 1024), p.wr(rdma.OpWrite, 1024), in,
		p.wr(rdma.OpCmpAndSwp, 8), p.wr(rdma.OpFetchAdd, 8)}
	if n, err := p.qp.PostSend(good); n != len(good) || err != nil {
		t.Errorf("PostSend at the limits gave %d, %v", n, err)
	}
}

func TestCountersCountWhatWasTaken(t *testing.T) {
	p := newPair(t, sim.Options{Manual: true, MaxSendWR: 4})
	if n, err := p.qp.PostSend([]rdma.WR{p.wr(rdma.OpWrite, 100), p.wr(rdma.OpCmpAndSwp, 8)}); n != 2 || err != nil {
		t.Fatal(n, err)
	}
	if n, err := p.qp.PostSend([]rdma.WR{p.wr(rdma.OpRead, 10), p.wr(rdma.OpRead, 20), p.wr(rdma.OpRead, 40),
		p.wr(rdma.OpFetchAdd, 8)}); n != 2 || !errors.Is(err, rdma.ErrQueueFull) {
		t.Fatalf("PostSend gave %d, %v; want 2, ErrQueueFull", n, err)
	}
	if n, err := p.qp.PostSend([]rdma.WR{p.wr(rdma.OpRead, 10)}); n != 0 || !errors.Is(err, rdma.ErrQueueFull) {
		t.Fatalf("PostSend gave %d, %v; want 0, ErrQueueFull", n, err)
	}
	want := rdma.Counters{Doorbells: 2, ReadBytes: 30, WriteBytes: 100}
	want.Verbs[rdma.OpWrite], want.Verbs[rdma.OpCmpAndSwp], want.Verbs[rdma.OpRead] = 1, 1, 2
	got := p.qp.Counters()
	if got != want || got.Total() != 4 {
		t.Fatalf("counters %+v total %d, want %+v", got, got.Total(), want)
	}
	if s := p.fab.Stats().Total; s.Doorbells != got.Doorbells || s.Verbs != got.Verbs || s.ReadBytes != got.ReadBytes ||
		s.WriteBytes != got.WriteBytes {
		t.Fatalf("the provider counts %+v", s)
	}
	sum := want
	sum.Add(&got)
	if sum.Doorbells != 4 || sum.Total() != 8 || sum.ReadBytes != 60 || sum.WriteBytes != 200 ||
		sum.Verbs[rdma.OpRead] != 4 {
		t.Fatalf("sum %+v", sum)
	}
}

func TestCountersCountValues(t *testing.T) {
	for _, without := range []bool{false, true} {
		p := newPair(t, sim.Options{MaxSendWR: 2, NoValues: without})
		w, r := p.wr(rdma.OpWrite, 8), p.wr(rdma.OpRead, 8)
		w.Value, r.Value = &rdma.Value{Bytes: make([]byte, 1000)}, &rdma.Value{Bytes: make([]byte, 500), Slack: 30}
		if n, err := p.qp.PostSend([]rdma.WR{w, r, r, w}); n != 2 || !errors.Is(err, rdma.ErrQueueFull) {
			t.Fatalf("PostSend gave %d, %v; want 2, ErrQueueFull", n, err)
		}
		if got := p.qp.Counters(); got.WriteBytes != 1008 || got.ReadBytes != 538 || got.Total() != 2 {
			t.Errorf("counters %+v, want 1,008 bytes written and 538 read", got)
		}
		if err := p.qp.Close(); err != nil {
			t.Error(err)
		}
	}
}

func TestWCErrorSaysWhetherItHappened(t *testing.T) {
	for s, want := range map[rdma.Status]rdma.Outcome{
		driver.Success:      rdma.Yes,
		driver.LocLenErr:    rdma.No,
		driver.LocQPOpErr:   rdma.No,
		driver.LocProtErr:   rdma.No,
		driver.RemInvReqErr: rdma.No,
		driver.RemAccessErr: rdma.No,
		driver.WRFlushErr:   rdma.Unknown,
		driver.RemOpErr:     rdma.Unknown,
		driver.RetryExcErr:  rdma.Unknown,
		driver.GeneralErr:   rdma.Unknown,
		0:                   rdma.Unknown,
		200:                 rdma.Unknown,
	} {
		e := &rdma.WCError{WC: rdma.WC{ID: 7, QPNum: 3, Op: rdma.OpCmpAndSwp, Status: s}}
		if got := e.Applied(); got != want {
			t.Errorf("%v: %v, want %v", s, got, want)
		}
	}
	var err error = &rdma.WCError{WC: rdma.WC{ID: 7, QPNum: 3, Op: rdma.OpCmpAndSwp, Status: driver.RetryExcErr}}
	if got, want := err.Error(), "CMP_AND_SWP wr=7 qp=3: RETRY_EXC_ERR"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	for o, want := range map[rdma.Outcome]string{0: "invalid", rdma.Yes: "happened", rdma.No: "did not happen",
		rdma.Unknown: "unknown", 77: "unknown"} {
		if o.String() != want {
			t.Errorf("Outcome(%d) is %q, want %q", o, o, want)
		}
	}
}

func TestNamesOfValuesOutOfRange(t *testing.T) {
	for got, want := range map[string]string{
		rdma.Opcode(0).String():    "INVALID",
		rdma.OpFetchAdd.String():   "FETCH_ADD",
		rdma.Opcode(9).String():    "Opcode(9)",
		rdma.Status(0).String():    "INVALID",
		driver.GeneralErr.String(): "GENERAL_ERR",
		rdma.Status(99).String():   "Status(99)",
		driver.AtomicCPU.String():  "cpu",
	} {
		if got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

func TestControlCallsCheckTheirArguments(t *testing.T) {
	p := newPair(t, sim.Options{})
	m, err := p.dev.Alloc(4096, rdma.AllocOptions{})
	if err != nil {
		t.Fatal(err)
	}
	const big = 1<<63 - 1
	for _, c := range [][2]int64{{-8, 16}, {0, 0}, {0, -1}, {4, 8}, {0, 4097}, {4096, 1}, {4096 + 8, 8}, {8, big},
		{big &^ 7, 8}, {-big - 1, 8}} {
		if _, err := p.pd.RegMR(m, c[0], c[1], rdma.AccessRemoteRead); err == nil {
			t.Errorf("RegMR took bytes [%d,+%d) of 4096", c[0], c[1])
		}
	}
	r, err := p.pd.RegMR(m, 4088, 8, rdma.AccessRemoteRead)
	if err != nil || len(r.Bytes()) != 8 || cap(r.Bytes()) != 8 {
		t.Errorf("RegMR of the last word: %v", err)
	}
	for _, n := range []int64{0, -1} {
		if _, err := p.dev.Alloc(n, rdma.AllocOptions{}); err == nil {
			t.Errorf("Alloc took %d bytes", n)
		}
		if _, err := p.dev.CreateCQ(int(n)); err == nil {
			t.Errorf("CreateCQ took depth %d", n)
		}
	}
	if _, err := p.dev.Dial(context.Background(), p.pd, p.cq, "d", make([]byte, driver.MaxPrivate+1)); err == nil ||
		!strings.Contains(err.Error(), "513 bytes") {
		t.Errorf("Dial with too much private data gave %v", err)
	}
}
