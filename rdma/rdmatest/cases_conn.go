package rdmatest

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/driver"
)

func acceptSees(t *testing.T, e *Env) {
	var mu sync.Mutex
	var private [][]byte
	var remote []string
	e.Accept = func(r rdma.ConnRequest) (*rdma.PD, rdma.Access, error) {
		mu.Lock()
		defer mu.Unlock()
		private = append(private, slices.Clone(r.Private))
		remote = append(remote, r.Remote)
		if r.Peer == nil || r.Peer.Remote() == "" {
			return nil, 0, errors.New("no peer")
		}
		return e.PD, All, nil
	}
	sent := [][]byte{{}, {0}, []byte("token\x00\xff"), bytes.Repeat([]byte{0xff}, 57)}
	for _, p := range sent {
		e.DialWith(4096, p)
	}
	mu.Lock()
	defer mu.Unlock()
	if len(private) != len(sent) {
		t.Fatalf("Accept called %d times for %d dials", len(private), len(sent))
	}
	for i := range sent {
		if !bytes.Equal(private[i], sent[i]) {
			t.Errorf("Accept saw private data %x, sent %x", private[i], sent[i])
		}
		if remote[i] == "" {
			t.Error("Accept saw no Remote")
		}
	}
}

func privateLimit(t *testing.T, e *Env) {
	var mu sync.Mutex
	var seen [][]byte
	e.Accept = func(r rdma.ConnRequest) (*rdma.PD, rdma.Access, error) {
		mu.Lock()
		defer mu.Unlock()
		seen = append(seen, slices.Clone(r.Private))
		return e.PD, All, nil
	}
	long := make([]byte, driver.MaxPrivate+1)
	Pattern(long, 3)
	e.DialWith(4096, long[:driver.MaxPrivate])
	l := e.Unconnected(4096)
	if _, err := e.H.Active.Dial(e.Ctx(), l.PD, l.CQ, e.Listener().Addr(), long); err == nil {
		t.Error("a dial with more than MaxPrivate bytes succeeded")
	}
	mu.Lock()
	defer mu.Unlock()
	if len(seen) != 1 || !bytes.Equal(seen[0], long[:driver.MaxPrivate]) {
		t.Errorf("Accept saw %x", seen)
	}
}

func refusal(t *testing.T, e *Env) {
	const why = "session 42 is fenced: \"ask the directory\""
	var admit atomic.Bool
	e.Accept = func(rdma.ConnRequest) (*rdma.PD, rdma.Access, error) {
		if !admit.Load() {
			return nil, 0, errors.New(why)
		}
		return e.PD, All, nil
	}
	l := e.Unconnected(4096)
	for range 3 {
		_, err := e.H.Active.Dial(e.Ctx(), l.PD, l.CQ, e.Listener().Addr(), nil)
		if !errors.Is(err, rdma.ErrRefused) || !strings.Contains(err.Error(), why) {
			t.Fatalf("dial gave %v, want ErrRefused with %q", err, why)
		}
	}
	admit.Store(true)
	ok := e.Dial()
	e.Must(ok.OK(ok.Read(e.Memory(8, All), 0, ok.Word())))
	if n := len(e.Peers()); n != 1 {
		t.Fatalf("%d peers, want 1", n)
	}
}

func dialNobody(t *testing.T, e *Env) {
	l := e.Unconnected(4096)
	var addr string
	for range 2 { // a closed address can be had again
		listener, err := e.H.Passive.Listen(e.H.Addr, rdma.ListenOptions{
			Accept: func(rdma.ConnRequest) (*rdma.PD, rdma.Access, error) { return e.PD, All, nil },
		})
		e.Must(err)
		addr = listener.Addr()
		e.Must(listener.Close())
	}
	ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
	defer cancel()
	start := time.Now()
	qp, err := e.H.Active.Dial(ctx, l.PD, l.CQ, addr, nil)
	if err == nil {
		_ = qp.Close()
		t.Fatal("a dial to nobody succeeded")
	}
	if took := time.Since(start); took > Patience/2 {
		t.Fatalf("a dial to nobody took %v with a context of 200 ms", took)
	}
}

func dialDeadContext(t *testing.T, e *Env) {
	l := e.Unconnected(4096)
	addr := e.Listener().Addr()
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	qp, err := e.H.Active.Dial(ctx, l.PD, l.CQ, addr, nil)
	if err == nil {
		_ = qp.Close()
		t.Fatal("a dial with a cancelled context succeeded")
	}
	if !errors.Is(err, context.Canceled) {
		t.Errorf("dial gave %v, want context.Canceled", err)
	}
}

// scribble WRITEs rising numbers to every word of mr until the QP fails, after
// telling progress of each success, and returns how it failed.
func scribble(l *Lane, mr *rdma.MR, progress chan<- struct{}) error {
	buf := l.Buf(len(mr.Bytes()))
	deadline := time.Now().Add(Patience)
	for v := uint64(1); ; v++ {
		if time.Now().After(deadline) {
			return errors.New("the QP still works")
		}
		for at := 0; at < len(buf); at += 8 {
			PutLe(buf[at:], v)
		}
		if err := l.OK(l.Write(mr, 0, buf), l.Write(mr, 0, buf)); err != nil {
			return err
		}
		select {
		case progress <- struct{}{}:
		default:
		}
	}
}

// deadQP says whether err is how a QP in error answers.
func deadQP(err error) bool {
	var wc *rdma.WCError
	if errors.As(err, &wc) {
		return wc.Applied() == rdma.Unknown
	}
	return errors.Is(err, rdma.ErrQPError)
}

func fenceStops(t *testing.T, e *Env) {
	mr := e.Memory(512, All)
	witness := e.Dial()
	for round := range 5 {
		l := e.Dial()
		peer := e.Peers()[round+1]
		progress := make(chan struct{}, 1)
		var wg sync.WaitGroup
		var end error
		wg.Go(func() { end = scribble(l, mr, progress); close(progress) })
		<-progress
		<-progress
		e.Must(peer.Fence(e.Ctx()))
		after := slices.Clone(mr.Bytes())
		wg.Wait()
		if !deadQP(end) {
			t.Fatalf("the fenced dialer ended with %v; want an unknown outcome or ErrQPError", end)
		}
		if s := l.QP.State(); s != driver.StateErr {
			t.Fatalf("the fenced dialer's QP is in state %d", s)
		}
		noPost(e, l, "posting after Fence")
		for range 8 {
			e.Must(witness.OK(witness.Read(mr, 0, witness.Local.Bytes()[:8])))
		}
		if !bytes.Equal(after, mr.Bytes()) {
			t.Fatal("a WRITE landed after Fence returned")
		}
		e.WaitClosed(peer)
	}
}

func fenceOthers(t *testing.T, e *Env) {
	mr := e.Memory(64, All)
	a, b := e.Dial(), e.Dial()
	e.Must(a.OK(a.Read(mr, 0, a.Word())))
	e.Must(e.Peers()[0].Fence(e.Ctx()))
	for range 10 {
		e.Must(b.OK(b.Read(mr, 0, b.Local.Bytes()[:8])))
	}
	if s := b.QP.State(); s != driver.StateRTS {
		t.Fatalf("state %d of the other connection", s)
	}
	c := e.Dial()
	e.Must(c.OK(c.Read(mr, 0, c.Word())))
}

func fenceTwice(t *testing.T, e *Env) {
	e.Dial()
	p := e.Peers()[0]
	e.Must(Each(3, func(int) error { return p.Fence(e.Ctx()) }))
	e.Must(p.Fence(e.Ctx()))
	e.WaitClosed(p)
	e.Must(p.Fence(e.Ctx()))
	e.Must(e.Listener().Close())
	if n := e.ClosedCalls(p); n != 1 {
		t.Fatalf("Closed called %d times", n)
	}
}

func closedOnce(t *testing.T, e *Env) {
	mr := e.Memory(64, All)
	a, b, c, d := e.Dial(), e.Dial(), e.Dial(), e.Dial()
	for _, l := range []*Lane{a, b, c, d} {
		e.Must(l.OK(l.Write(mr, 0, l.Word())))
	}
	p := e.Peers()
	e.Must(a.Close()) // the dialer leaves
	e.WaitClosed(p[0])
	e.Must(p[1].Fence(e.Ctx())) // the memory node fences, then the dialer leaves
	e.WaitClosed(p[1])
	e.Must(b.Close())
	e.Must(c.Close()) // the dialer leaves, then the memory node fences
	e.Must(p[2].Fence(e.Ctx()))
	e.WaitClosed(p[2])
	if e.ClosedCalls(p[3]) != 0 {
		t.Error("Closed called for a live connection")
	}
	e.Must(e.Listener().Close()) // the listener leaves
	e.WaitClosed(p[3])
	e.Must(d.Close())
	for i := range p {
		e.Must(p[i].Fence(e.Ctx()))
		if n := e.ClosedCalls(p[i]); n != 1 {
			t.Errorf("connection %d: Closed called %d times", i, n)
		}
	}
}

func listenerClose(t *testing.T, e *Env) {
	mr := e.Memory(512, All)
	lanes := []*Lane{e.Dial(), e.Dial()}
	addr := e.Listener().Addr()
	var wg sync.WaitGroup
	ends := make([]error, len(lanes))
	for i, l := range lanes {
		progress := make(chan struct{}, 1)
		wg.Go(func() { ends[i] = scribble(l, mr, progress); close(progress) })
		<-progress
	}
	e.Must(e.Listener().Close())
	after := slices.Clone(mr.Bytes())
	wg.Wait()
	for i, l := range lanes {
		if !deadQP(ends[i]) {
			t.Errorf("dialer %d ended with %v", i, ends[i])
		}
		noPost(e, l, "posting after the listener closed")
		e.WaitClosed(e.Peers()[i])
	}
	if !bytes.Equal(after, mr.Bytes()) {
		t.Error("a WRITE landed after Listener.Close returned")
	}
	l := e.Unconnected(4096)
	ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
	defer cancel()
	if qp, err := e.H.Active.Dial(ctx, l.PD, l.CQ, addr, nil); err == nil {
		_ = qp.Close()
		t.Error("a dial after Listener.Close succeeded")
	}
	e.Must(e.Listener().Close())
}
