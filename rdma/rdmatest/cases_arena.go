package rdmatest

import (
	"bytes"
	"errors"
	"fmt"
	"runtime"
	"testing"

	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/driver"
)

// inArena has the Values of a case lie in registered memory.
func inArena(run func(*testing.T, *Env)) func(*testing.T, *Env) {
	return func(t *testing.T, e *Env) {
		e.arenas = true
		run(t, e)
	}
}

// reaches tells whether the active side's adapter has the caller's own memory, if that is in an Arena.
func reaches(e *Env) bool {
	c := e.H.Active.Caps()
	return c.MaxSGE >= 2 && !(c.AnyMemory && c.Sums)
}

// arena registers n bytes of the lane's PD.
func (l *Lane) arena(n int) (a *rdma.Arena, revoke func() error) {
	l.E.T.Helper()
	a, err := l.PD.RegArena(make([]byte, n))
	l.E.Must(err)
	return a, l.E.Undo("deregister arena", a.Deregister)
}

// there writes b to mr and reads it back into dst, and checks bytes and CRCs.
func there(l *Lane, mr *rdma.MR, b, dst []byte, slack int) error {
	var sum uint32
	w, r := l.Write(mr, 0, fill(l.head, 1)), l.Read(mr, 0, l.head)
	w.Value = &rdma.Value{Bytes: b, Seal: func(_ []byte, crc uint32) { sum = crc }}
	r.Value = &rdma.Value{Bytes: dst, Slack: slack, Start: whole(len(dst))}
	if err := errors.Join(l.OK(w), l.OK(r)); err != nil {
		return err
	}
	if want := crcOf(b); sum != want || r.Value.CRC != want || r.Value.N != len(b) || !bytes.Equal(b, dst) {
		return fmt.Errorf("%d bytes with slack %d: CRCs %#x and %#x, want %#x; N %d; or bytes differ", len(b), slack,
			sum, r.Value.CRC, want, r.Value.N)
	}
	return nil
}

// arenaSpares counts what is copied and registered.
func arenaSpares(t *testing.T, e *Env) {
	n := valueMax(e)/2 - 8
	mr := e.Memory(int64(2*n), All)
	l := e.Dial()
	l.head = l.Word()
	a, _ := l.arena(2 * n)
	b := a.Bytes()
	use := func(src, dst []byte) (copied, registered uint64) {
		was, were := l.QP.Counters().CopiedBytes, e.H.Active.Registrations()
		for i := range 4 {
			Pattern(src, byte(i))
			e.Must(there(l, mr, src, dst, 64))
		}
		return l.QP.Counters().CopiedBytes - was, e.H.Active.Registrations() - were
	}
	e.Must(there(l, mr, b[:n], b[n:], 64)) // memory for slack
	if c, r := use(b[:n], b[n:]); reaches(e) && e.H.Active.Caps().MaxSGE > 2 && c != 0 || r != 0 {
		t.Errorf("in an Arena %d bytes were copied, and memory was registered %d times", c, r)
	}
	other := make([]byte, 2*n)
	e.Must(there(l, mr, other[:n], other[n:], 64)) // slabs
	want := uint64(8 * n)
	if c := e.H.Active.Caps(); c.AnyMemory && c.Sums {
		want = 0
	}
	if c, r := use(other[:n], other[n:]); c != want || r != 0 {
		t.Errorf("in other memory %d bytes were copied, want %d, and memory was registered %d times", c, want, r)
	}
}

func arenaLongSlack(t *testing.T, e *Env) {
	const n = 5000
	mr := e.Memory(1<<20, All)
	l := e.Dial()
	l.head = l.Word()
	a, _ := l.arena(2 * n)
	for i, slack := range []int{1, 7, 8, 255 << 10, 256<<10 + 1, 600 << 10} {
		Pattern(a.Bytes()[:n], byte(i))
		e.Must(there(l, mr, a.Bytes()[:n], a.Bytes()[n:], min(slack, valueMax(e)-8-n)))
	}
}

func arenaRefuses(t *testing.T, e *Env) {
	pd := e.NewPD(e.H.Active)
	mem := make([]byte, 64<<10)
	a, err := pd.RegArena(mem[16<<10 : 32<<10])
	e.Must(err)
	for what, b := range map[string][]byte{
		"nothing": nil, "no bytes": mem[:0], "an odd beginning": mem[40<<10+1:],
		"the same": mem[16<<10 : 32<<10], "a part": mem[17<<10 : 18<<10], "its first bytes": mem[16<<10 : 17<<10],
		"its last bytes": mem[31<<10 : 32<<10], "what begins before": mem[8<<10 : 16<<10+1],
		"what ends behind": mem[32<<10-8 : 48<<10], "all around": mem, "all from its beginning": mem[16<<10:],
	} {
		if _, err := pd.RegArena(b); !errors.Is(err, rdma.ErrArena) {
			t.Errorf("%s: %v, want ErrArena", what, err)
		}
	}
	left, err := pd.RegArena(mem[:16<<10])
	e.Must(err)
	right, err := pd.RegArena(mem[32<<10:])
	e.Must(err)
	elsewhere, err := e.NewPD(e.H.Active).RegArena(mem)
	e.Must(err)
	for _, x := range []*rdma.Arena{a, elsewhere, left, right} {
		e.Must(x.Deregister())
		if err := x.Deregister(); !errors.Is(err, rdma.ErrClosed) {
			t.Errorf("deregistered twice: %v, want ErrClosed", err)
		}
	}
	again, err := pd.RegArena(mem)
	e.Must(err)
	e.Must(again.Deregister())
}

func arenaKeepsPD(t *testing.T, e *Env) {
	pd := e.NewPD(e.H.Active)
	a, err := pd.RegArena(make([]byte, 4096))
	e.Must(err)
	if pd.Dealloc() == nil {
		t.Error("a PD with an Arena was deallocated")
	}
	e.Must(a.Deregister())
}

// arenaEdges has Values at the edges of an Arena, beyond them, and in two that touch.
func arenaEdges(t *testing.T, e *Env) {
	const n = 9000
	mr := e.Memory(16<<10, All)
	l := e.Dial()
	l.head = l.Word()
	mem, dst := make([]byte, 48<<10), make([]byte, n)
	var all []*rdma.Arena
	for _, b := range [][]byte{mem[16<<10 : 32<<10], mem[32<<10 : 40<<10]} {
		a, err := l.PD.RegArena(b)
		e.Must(err)
		all = append(all, a)
		e.Undo("deregister arena", a.Deregister)
	}
	direct := reaches(e)
	for _, c := range []struct {
		at     int
		inside bool
	}{{0, false}, {16<<10 - 1, false}, {16 << 10, true}, {16<<10 + 1, true}, {20 << 10, true}, {32<<10 - n, true},
		{32<<10 - n + 1, false}, {40<<10 - n, false}, {40<<10 - n/2, false}, {48<<10 - n, false}} {
		b := mem[c.at : c.at+n]
		Pattern(b, byte(c.at))
		was := l.QP.Counters().CopiedBytes
		e.Must(there(l, mr, b, dst, 0))
		copied := l.QP.Counters().CopiedBytes - was
		if want := uint64(n); direct && c.inside && copied != want || direct && !c.inside && copied != 2*want {
			t.Errorf("WRITE from byte %d on, READ to other memory: %d bytes were copied", c.at, copied)
		}
	}
	for _, a := range all {
		if b := a.Bytes(); cap(b) < len(b) || &b[0] != &mem[16<<10] && &b[0] != &mem[32<<10] {
			t.Error("Bytes is other memory")
		}
	}
}

// arenaWaits takes memory away while WRs are under way.
func arenaWaits(t *testing.T, e *Env) {
	n := valueMax(e) - 8
	mr := e.Memory(int64(n+8), All)
	Pattern(mr.Bytes(), 3)
	want := crcOf(mr.Bytes()[8 : 8+n])
	l := e.Dial()
	head := l.Word()
	for round := range 8 {
		a, err := l.PD.RegArena(make([]byte, n))
		e.Must(err)
		r := l.Read(mr, 0, head)
		r.Value = &rdma.Value{Bytes: a.Bytes(), Start: whole(n)}
		id, err := l.Post(r)
		e.Must(err)
		done := make(chan error, 1)
		go func() {
			for range 8 * round * round {
				runtime.Gosched()
			}
			err := a.Deregister()
			if reaches(e) {
				if v := r.Value; v.N != n || v.CRC != want || crcOf(a.Bytes()) != want {
					err = errors.Join(err, errors.New("deregistered, and the READ is not over"))
				}
				Fill(a.Bytes(), canary)
			}
			done <- err
		}()
		wcs, err := l.Wait(id)
		e.Must(errors.Join(err, <-done))
		if s := wcs[len(wcs)-1].Status; s != driver.Success || r.Value.CRC != want {
			t.Fatalf("round %d: status %v, CRC %#x, want %#x", round, s, r.Value.CRC, want)
		}
		if reaches(e) && bytes.Count(a.Bytes(), []byte{canary}) != n {
			t.Fatalf("round %d: bytes came after Deregister", round)
		}
		// Memory that was an Arena is any memory.
		e.Must(l.OK(r))
		if crcOf(a.Bytes()) != want {
			t.Fatalf("round %d: a READ after Deregister has other bytes", round)
		}
	}
}

// arenaDetachAlone detaches Values by the goroutine that polls: nobody else takes the WCs, which are there afterwards.
func arenaDetachAlone(t *testing.T, e *Env) {
	n := valueMax(e) - 8
	mr := e.Memory(int64(n+8), All)
	l := e.Dial()
	a, _ := l.arena(2 * n)
	head, other := l.Word(), l.Word()
	src, dst := a.Bytes()[:n], a.Bytes()[n:]
	for round := range 3 {
		Pattern(src, byte(round))
		want := crcOf(src)
		w, r := l.Write(mr, 0, fill(head, 2)), l.Read(mr, 0, other)
		w.Flags &^= rdma.Signaled
		w.Value, r.Value = &rdma.Value{Bytes: src}, &rdma.Value{Bytes: dst, Start: whole(n)}
		first, err := l.Post(w, r)
		e.Must(err)
		stop, stopped := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(stopped)
			for e.H.Drive != nil {
				select {
				case <-stop:
					return
				default:
					e.H.Drive()
				}
			}
		}()
		r.Value.Detach()
		w.Value.Detach()
		Fill(a.Bytes(), canary)
		close(stop)
		<-stopped
		wcs, err := l.Wait(first + 1)
		e.Must(err)
		if len(wcs) != 1 || wcs[0].Status != driver.Success || r.Value.CRC != want {
			t.Fatalf("round %d: WCs %+v, CRC %#x, want %#x", round, wcs, r.Value.CRC, want)
		}
		if bytes.Count(a.Bytes(), []byte{canary}) != 2*n {
			t.Fatalf("round %d: bytes came after Detach", round)
		}
	}
}
