package tcp

import (
	"bytes"
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvd-project/kvd/internal/testutil"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/driver"
	"github.com/kvd-project/kvd/rdma/rdmatest"
)

// funcRegion registers f in e's PD.
func funcRegion(e *rdmatest.Env, n int64, workers int, f driver.ReadFunc) (mr *rdma.MR, revoke func() error) {
	e.T.Helper()
	mr, err := e.PD.RegFunc(n, workers, f)
	e.Must(err)
	return mr, e.Undo("deregister", mr.Deregister)
}

// byteAt is what the byte at off of a function region is.
func byteAt(off uint64) byte { return byte(off) ^ byte(off>>8)*31 ^ byte(off>>16)*7 }

func readPattern(_ context.Context, off uint64, b []byte) driver.Status {
	for i := range b {
		b[i] = byteAt(off + uint64(i))
	}
	return driver.Success
}

// TestFunction reads function regions at all lengths. Other verbs, and what is out of bounds, are refused.
func TestFunction(t *testing.T) { bothWays(t, functions) }

func functions(t *testing.T) {
	e := rdmatest.NewEnv(t, harness(t, Options{}, Options{}))
	const size = 8 << 30 // more than there is memory for
	mr, _ := funcRegion(e, size, 4, readPattern)
	own := e.Memory(64, rdmatest.All)
	l := e.DialWith(12<<20, nil)
	expect := func(b []byte, off uint64) {
		t.Helper()
		for i := range b {
			if b[i] != byteAt(off+uint64(i)) {
				t.Fatalf("byte %d of %d at %#x is wrong", i, len(b), off)
			}
		}
	}
	buf := l.Buf(8 << 20)
	for _, n := range []int{1, 8, 4 << 10, funcPiece - 1, funcPiece + 1, funcWindow, funcWindow + 1, 1 << 20, 8 << 20} {
		clear(buf[:n])
		off := uint64(size - n)
		e.Must(l.OK(l.Read(mr, off, buf[:n])))
		expect(buf[:n], off)
	}
	// A chain of all kinds.
	var wrs []rdma.WR
	var bufs [][]byte
	for i := range 200 {
		b := l.Buf(8 + i%5*3000)
		bufs = append(bufs, b)
		wrs = append(wrs, l.Read(mr, uint64(i)<<20, b))
		if i%7 == 0 {
			wrs = append(wrs, l.Add(own, 0, l.Word(), 1), l.Write(own, 8, l.Word()))
		}
	}
	e.Must(l.OK(wrs...))
	for i, b := range bufs {
		expect(b, uint64(i)<<20)
	}
	if n := rdmatest.Le(own.Bytes()); n != 29 {
		t.Errorf("%d FETCH_ADDs, want 29", n)
	}
	for name, wr := range map[string]func(l *rdmatest.Lane) rdma.WR{
		"past the end": func(l *rdmatest.Lane) rdma.WR { return l.Read(mr, size-7, l.Buf(8)) },
		"WRITE":        func(l *rdmatest.Lane) rdma.WR { return l.Write(mr, 0, l.Buf(8)) },
		"CMP_AND_SWP":  func(l *rdmatest.Lane) rdma.WR { return l.CAS(mr, 0, l.Word(), 0, 1) },
		"FETCH_ADD":    func(l *rdmatest.Lane) rdma.WR { return l.Add(mr, 0, l.Word(), 1) },
	} {
		l := e.Dial()
		wcs, err := l.Do(wr(l))
		if err != nil || wcs[len(wcs)-1].Status != driver.RemAccessErr {
			t.Errorf("%s: %v, %v, want %v", name, wcs, err, driver.RemAccessErr)
		}
	}
}

// TestFunctionFails passes on what a function says.
func TestFunctionFails(t *testing.T) {
	e := rdmatest.NewEnv(t, harness(t, Options{}, Options{}))
	for said, want := range map[driver.Status]driver.Status{driver.RemOpErr: driver.RemOpErr, 0: driver.RemOpErr,
		driver.RemAccessErr: driver.RemAccessErr} {
		mr, _ := funcRegion(e, 64, 1, func(context.Context, uint64, []byte) driver.Status { return said })
		l := e.Dial()
		wcs, err := l.Do(l.Read(mr, 0, l.Word()))
		if err != nil || wcs[0].Status != want {
			t.Errorf("%v: %v, %v", said, wcs, err)
		}
	}
	if _, err := e.PD.RegFunc(64, 0, readPattern); err == nil {
		t.Error("a region without workers is registered")
	}
}

// TestFunctionsAtOnce has workers perform the READs of a chain at once, and answers them in their order, whichever is
// ready first. A region never has more calls than workers.
func TestFunctionsAtOnce(t *testing.T) { bothWays(t, functionsAtOnce) }

func functionsAtOnce(t *testing.T) {
	e := rdmatest.NewEnv(t, harness(t, Options{}, Options{}))
	const workers = 8
	var all sync.WaitGroup
	all.Add(workers)
	var now, most atomic.Int64
	mr, _ := funcRegion(e, 1<<20, workers, func(ctx context.Context, off uint64, b []byte) driver.Status {
		n := now.Add(1)
		for m := most.Load(); n > m && !most.CompareAndSwap(m, n); m = most.Load() {
		}
		if off < workers<<10 { // all of the first have to be there
			all.Done()
			all.Wait()
		}
		now.Add(-1)
		return readPattern(ctx, off, b)
	})
	l := e.Dial()
	var wrs []rdma.WR
	for i := range uint64(3 * workers) {
		wrs = append(wrs, l.Read(mr, i<<10, l.Word()))
	}
	e.Must(l.OK(wrs...))
	for i := range wrs {
		if wrs[i].Local[1] != byteAt(uint64(i)<<10+1) {
			t.Errorf("READ %d has another's bytes", i)
		}
	}
	if n := most.Load(); n != workers {
		t.Errorf("%d calls at once, want %d", n, workers)
	}
}

// TestFunctionStalls has a function wait for longer than a peer has patience. Nobody else waits, its peer does not
// give up, and what is behind it on its QP comes when it has ended.
func TestFunctionStalls(t *testing.T) { bothWays(t, functionStalls) }

func functionStalls(t *testing.T) {
	o := Options{PeerTimeout: 300 * time.Millisecond}
	e := rdmatest.NewEnv(t, harness(t, o, o))
	entered, leave := make(chan struct{}), make(chan struct{})
	mr, _ := funcRegion(e, 1<<20, 1, func(ctx context.Context, off uint64, b []byte) driver.Status {
		close(entered)
		<-leave
		return readPattern(ctx, off, b)
	})
	own := e.Memory(4<<10, rdmatest.All)
	rdmatest.Pattern(own.Bytes(), 3)
	l, other := e.Dial(), e.Dial()
	before, stalled, behind := l.Buf(64), l.Buf(64), l.Buf(64)
	id, err := l.Post(l.Read(own, 0, before), l.Read(mr, 64, stalled), l.Read(own, 64, behind))
	e.Must(err)
	if _, err := l.Wait(id); err != nil || !bytes.Equal(before, own.Bytes()[:64]) {
		t.Fatalf("what is in front of the READ that stalls: %v", err)
	}
	receive(t, entered, "the function")
	began, word := time.Now(), other.Word()
	testutil.Until(t, "the peer's patience is over", func() bool {
		e.Must(other.OK(other.Read(own, 0, word)))
		return time.Since(began) > 2*o.PeerTimeout
	})
	close(leave)
	wcs, err := l.Wait(id + 2)
	if err != nil || len(wcs) != 2 || wcs[0].ID != id+1 || wcs[0].Status != driver.Success ||
		wcs[1].Status != driver.Success || stalled[1] != byteAt(65) || !bytes.Equal(behind, own.Bytes()[64:128]) {
		t.Fatal(wcs, err)
	}
}

// TestFunctionFencedWithin fences a connection within an answer, of which the last 8 bytes are late: a fence's farewell
// must not be taken for them.
func TestFunctionFencedWithin(t *testing.T) { bothWays(t, functionFencedWithin) }

func functionFencedWithin(t *testing.T) {
	e := rdmatest.NewEnv(t, harness(t, Options{}, Options{}))
	const size = funcWindow + 8 // more than is waited for before an answer begins
	late := make(chan struct{}, 1)
	mr, revoke := funcRegion(e, size, 8, func(ctx context.Context, off uint64, b []byte) driver.Status {
		if off < funcWindow {
			return readPattern(ctx, off, b)
		}
		late <- struct{}{}
		<-ctx.Done()
		return driver.RemOpErr
	})
	l := e.Unconnected(1 << 20)
	var err error
	l.QP, err = e.H.Active.Dial(e.Ctx(), l.PD, l.CQ, e.Listener().Addr(), nil)
	e.Must(err)
	e.Undo("abort qp", func() error {
		_ = l.QP.Abort() // its peer has taken no leave
		return nil
	})
	id, err := l.Post(l.Read(mr, 0, l.Buf(size)))
	e.Must(err)
	receive(t, late, "the last call")
	e.Must(e.Peers()[0].Fence(e.Ctx()))
	if wcs, err := l.Wait(id); err != nil || len(wcs) != 1 || wcs[0].Status == driver.Success {
		t.Errorf("%v, %v", wcs, err)
	}
	e.WaitClosed(e.Peers()[0])
	e.Must(revoke())
}

// TestFunctionLeft ends a connection, by its peer or by a fence, while a function stalls. Neither waits for it. The
// calls that wait for a worker end, and Deregister waits for the one that has one.
func TestFunctionLeft(t *testing.T) { bothWays(t, functionLeft) }

func functionLeft(t *testing.T) {
	for _, fence := range []bool{false, true} {
		e := rdmatest.NewEnv(t, harness(t, Options{}, Options{}))
		var calls atomic.Int64
		entered := make(chan struct{}, 1)
		mr, revoke := funcRegion(e, 1<<20, 1, func(ctx context.Context, _ uint64, _ []byte) driver.Status {
			calls.Add(1)
			entered <- struct{}{}
			<-ctx.Done()
			return driver.RemOpErr
		})
		l := e.Dial()
		_, err := l.Post(l.Read(mr, 0, l.Word()), l.Read(mr, 8, l.Word()), l.Read(mr, 16, l.Word()))
		e.Must(err)
		receive(t, entered, "the function")
		if fence {
			e.Must(e.Peers()[0].Fence(e.Ctx()))
		} else {
			e.Must(l.Close())
		}
		e.WaitClosed(e.Peers()[0])
		e.Must(revoke())
		if n := calls.Load(); n != 1 {
			t.Errorf("%d calls, want 1: the others had no worker", n)
		}
	}
}
