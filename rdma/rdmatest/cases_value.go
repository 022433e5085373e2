package rdmatest

import (
	"bytes"
	"fmt"
	"hash/crc32"
	"math"
	"runtime"
	"testing"

	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/driver"
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func crcOf(b []byte) uint32 { return crc32.Checksum(b, castagnoli) }

const (
	canary = 0xc5
	fresh  = 0x3a // what nobody has written to yet
)

// guarded is memory with canaries around n bytes that begin at an address of that remainder by 64.
type guarded struct {
	all []byte
	at  int
	n   int
}

const guard = 128

// guarded is memory for a Value: in no MR, or in an Arena of the lane's PD if the case says so.
func (l *Lane) guarded(n, skew int) *guarded {
	g := &guarded{all: make([]byte, n+2*guard), at: guard/2 + skew%64, n: n}
	if l.E.arenas {
		a, err := l.PD.RegArena(g.all)
		l.E.Must(err)
		l.E.Undo("deregister arena", a.Deregister)
	}
	Fill(g.all, canary)
	Fill(g.bytes(), fresh)
	return g
}

func (g *guarded) bytes() []byte { return g.all[g.at : g.at+g.n : g.at+g.n] }

// intact says what of the canaries is not.
func (g *guarded) intact() error {
	for i := range g.all[:2*guard] { // the bytes of the Value are in the middle
		if i >= g.at {
			i += g.n
		}
		if g.all[i] != canary {
			return fmt.Errorf("byte %d of a Value of %d bytes was changed", i-g.at, g.n)
		}
	}
	return nil
}

func fill(b []byte, v byte) []byte { Fill(b, v); return b }

// valueMax is the most bytes that a WR has in these cases: more than two of the blocks in which providers move.
func valueMax(e *Env) int { return min(e.H.Active.Caps().MaxMsg, 5<<19) }

// whole is a Start with which all n bytes count.
func whole(n int) func([]byte) (int, uint32) {
	return func([]byte) (int, uint32) { return n, 0 }
}

// valueAlignments moves Values of all alignments there and back, with canaries on both sides.
func valueAlignments(t *testing.T, e *Env) {
	mr := e.Memory(256<<10, All)
	l := e.Dial()
	head, got := l.Buf(64), l.Buf(64)
	far := mr.Bytes()
	i := 0
	for _, n := range []int{1, 7, 8, 9, 63, 64, 65, 1000, 4097, 60001} {
		for skew := range 17 {
			local, addr := 1+(i*5)%47, 64+(i*3)%17
			i++
			src, dst := l.guarded(n, skew), l.guarded(n, skew*7)
			Pattern(src.bytes(), byte(i))
			Pattern(head, byte(i+1))
			Fill(far, canary)
			before := crcOf(head[:local])
			w := l.Write(mr, uint64(addr), head[:local])
			w.Value = &rdma.Value{Bytes: src.bytes(), CRC: before}
			var sum uint32
			w.Value.Seal = func(local []byte, crc uint32) { sum = crc; local[0] ^= 0xff }
			e.Must(l.OK(w))
			want := append(bytes.Clone(head[:local]), src.bytes()...)
			end := addr + len(want)
			if !bytes.Equal(far[addr:end], want) {
				t.Fatalf("WRITE of %d+%d bytes at %d, skew %d: memory differs", local, n, addr, skew)
			}
			for j, b := range far {
				if (j < addr || j >= end) && b != canary {
					t.Fatalf("WRITE of %d+%d bytes at %d changed byte %d", local, n, addr, j)
				}
			}
			if want := crc32.Update(before, castagnoli, src.bytes()); sum != want {
				t.Fatalf("Seal had CRC %#x, want %#x", sum, want)
			}

			Fill(got, fresh)
			r := l.Read(mr, uint64(addr), got[:local])
			v := &rdma.Value{Bytes: dst.bytes()}
			v.Start = func(local []byte) (int, uint32) { return n, crcOf(local) }
			r.Value = v
			e.Must(l.OK(r))
			if !bytes.Equal(got[:local], want[:local]) || !bytes.Equal(dst.bytes(), want[local:]) || v.N != n ||
				v.CRC != crcOf(want) {
				t.Fatalf("READ of %d+%d bytes at %d, skew %d: N %d, CRC %#x, want %#x; or bytes differ", local, n, addr,
					skew, v.N, v.CRC, crcOf(want))
			}
			if bytes.Count(got[local:], []byte{fresh}) != len(got)-local {
				t.Fatalf("READ of %d+%d bytes changed what is behind Local", local, n)
			}
			e.Must(src.intact())
			e.Must(dst.intact())
		}
	}
}

// valueLong is of several blocks.
func valueLong(t *testing.T, e *Env) {
	n := valueMax(e) - 40
	mr := e.Memory(int64(n+40), All)
	l := e.Dial()
	head, got := l.Buf(40), l.Buf(40)
	src, dst := l.guarded(n, 3), l.guarded(n, 21)
	Pattern(src.bytes(), 9)
	w := l.Write(mr, 0, head)
	w.Value = &rdma.Value{Bytes: src.bytes(), Seal: func(local []byte, crc uint32) { PutLe(local, uint64(crc)) }}
	r := l.Read(mr, 0, got)
	v := &rdma.Value{Bytes: dst.bytes(), Start: whole(n)}
	r.Value = v
	e.Must(l.OK(w, r))
	if want := crcOf(src.bytes()); Le(got) != uint64(want) || v.CRC != want || v.N != n ||
		!bytes.Equal(dst.bytes(), src.bytes()) {
		t.Fatalf("%d bytes: CRC of WRITE %#x, of READ %#x, want %#x; N %d; or bytes differ", n, Le(got), v.CRC, want,
			v.N)
	}
	e.Must(dst.intact())
}

func valueWithoutSum(t *testing.T, e *Env) {
	const n = 3000
	mr := e.Memory(4096, All)
	l := e.Dial()
	src, dst := l.guarded(n, 1), l.guarded(n, 2)
	Pattern(src.bytes(), 77)
	w := l.Write(mr, 8, fill(l.Word(), 1))
	w.Value = &rdma.Value{Bytes: src.bytes(), CRC: 5}
	r := l.Read(mr, 8, l.Word())
	r.Value = &rdma.Value{Bytes: dst.bytes()}
	e.Must(l.OK(w, r))
	if r.Value.N != n || !bytes.Equal(dst.bytes(), src.bytes()) || r.Value.CRC != 0 {
		t.Fatalf("N %d, want %d; CRC %#x; or bytes differ", r.Value.N, n, r.Value.CRC)
	}
}

// valueUnsignaled has one WC say that three READs are over.
func valueUnsignaled(t *testing.T, e *Env) {
	const n = 2000
	mr := e.Memory(8192, All)
	Pattern(mr.Bytes(), 6)
	l := e.Dial()
	for range 3 {
		var wrs []rdma.WR
		var dst []*guarded
		for i := range 3 {
			g := l.guarded(n, i)
			dst = append(dst, g)
			r := l.Read(mr, uint64(8*i), l.Word())
			r.Value = &rdma.Value{Bytes: g.bytes(), Start: whole(n)}
			if i < 2 {
				r.Flags &^= rdma.Signaled
			}
			wrs = append(wrs, r)
		}
		wcs, err := l.Do(wrs...)
		e.Must(err)
		if len(wcs) != 1 || wcs[0].Status != driver.Success {
			t.Fatalf("WCs %+v, want that of the last READ", wcs)
		}
		for i, g := range dst {
			far := mr.Bytes()[8*i : 8*i+8+n]
			if v := wrs[i].Value; !bytes.Equal(wrs[i].Local, far[:8]) || !bytes.Equal(g.bytes(), far[8:]) || v.N != n ||
				v.CRC != crcOf(far[8:]) {
				t.Fatalf("READ %d: N %d, CRC %#x; or bytes differ", i, v.N, v.CRC)
			}
			e.Must(g.intact())
		}
	}
}

func valueSlack(t *testing.T, e *Env) {
	const n = 5000
	mr := e.Memory(64<<10, All)
	size := len(mr.Bytes())
	Pattern(mr.Bytes(), 3)
	l := e.Dial()
	for _, slack := range []int{1, 64, 40000, size - n - 8} {
		dst := l.guarded(n, slack)
		r := l.Read(mr, uint64(size-8-n-slack), l.Word())
		r.Value = &rdma.Value{Bytes: dst.bytes(), Slack: slack, Start: whole(n)}
		e.Must(l.OK(r))
		if !bytes.Equal(dst.bytes(), mr.Bytes()[size-n-slack:size-slack]) || r.Value.CRC != crcOf(dst.bytes()) {
			t.Fatalf("slack %d: bytes or CRC differ", slack)
		}
		e.Must(dst.intact())
	}
	dst := l.guarded(n, 0)
	r := l.Read(mr, uint64(size-8-n), l.Word())
	r.Value = &rdma.Value{Bytes: dst.bytes(), Slack: 1}
	mustFail(e, l, r, driver.RemAccessErr)
	e.Must(dst.intact())
}

// silently tells whether s is all that a refusal tells.
func silently(e *Env, s rdma.Status) bool {
	return e.H.Active.Caps().SilentRefusals && s == driver.RetryExcErr
}

// mustFail checks that w, posted alone, completes with s.
func mustFail(e *Env, l *Lane, w rdma.WR, s rdma.Status) {
	e.T.Helper()
	wcs, err := l.Do(w)
	e.Must(err)
	if got := wcs[len(wcs)-1].Status; got != s && !silently(e, got) {
		e.T.Fatalf("%v completed with %v, want %v", w.Op, got, s)
	}
}

func valueStartTakesLess(t *testing.T, e *Env) {
	const n = 10000
	mr := e.Memory(16<<10, All)
	Pattern(mr.Bytes(), 4)
	l := e.Dial()
	for _, want := range []int{0, 1, 9, 4096, n - 1, n} {
		dst := l.guarded(n, want)
		r := l.Read(mr, 16, l.Word())
		r.Value = &rdma.Value{Bytes: dst.bytes(), Start: func(local []byte) (int, uint32) {
			if !bytes.Equal(local, mr.Bytes()[16:24]) {
				t.Errorf("Start saw %x, want %x", local, mr.Bytes()[16:24])
			}
			return want, 7
		}}
		e.Must(l.OK(r))
		bytesOf := mr.Bytes()[24 : 24+want]
		if v := r.Value; v.N != want || v.CRC != crc32.Update(7, castagnoli, bytesOf) ||
			!bytes.Equal(dst.bytes()[:want], bytesOf) {
			t.Fatalf("%d of %d bytes count: N %d, CRC %#x; or bytes differ", want, n, v.N, v.CRC)
		}
		e.Must(dst.intact())
	}
}

func valueHeadWantsMore(t *testing.T, e *Env) {
	const n = 3000
	mr := e.Memory(64<<10, All)
	Pattern(mr.Bytes(), 5)
	l := e.Dial()
	for _, want := range []int{n + 1, n + 4096, math.MaxInt32, math.MaxInt, -1, math.MinInt} {
		dst := l.guarded(n, 11)
		r := l.Read(mr, 0, l.Word())
		r.Value = &rdma.Value{Bytes: dst.bytes(), Slack: 8192, Start: whole(want)}
		e.Must(l.OK(r))
		if r.Value.N != -1 {
			t.Fatalf("Start wants %d of %d bytes: N %d, want -1", want, n, r.Value.N)
		}
		e.Must(dst.intact())
		e.Must(l.OK(l.Read(mr, 0, l.Word())))
	}
}

// valueSumOfStored reads what others write: the CRC is that of the bytes that have come, whatever they are.
func valueSumOfStored(t *testing.T, e *Env) {
	const n, rounds = 48 << 10, 40
	mr := e.Memory(n+64, All)
	writer, reader := e.DialWith(n+4096, nil), e.Dial()
	src, dst := writer.Buf(n+64), reader.guarded(n, 5)
	e.Must(Each(2, func(i int) error {
		for r := range rounds {
			if i == 0 {
				Fill(src, byte(r))
				if err := writer.OK(writer.Write(mr, 0, src)); err != nil {
					return err
				}
				continue
			}
			w := reader.Read(mr, 0, reader.Word())
			w.Value = &rdma.Value{Bytes: dst.bytes(), Start: whole(n)}
			if err := reader.OK(w); err != nil {
				return err
			}
			if got := crcOf(dst.bytes()); w.Value.CRC != got {
				return fmt.Errorf("READ has CRC %#x, and bytes of CRC %#x", w.Value.CRC, got)
			}
		}
		return nil
	}))
}

// valueLocalLast looks at each WRITE from another queue pair while it is under way.
func valueLocalLast(t *testing.T, e *Env) {
	n := min(valueMax(e)-8, 1<<20)
	mr := e.Memory(int64(n+8), All)
	writer, reader := e.Dial(), e.Dial()
	head := writer.Word()
	last, first, mid := reader.Word(), reader.Word(), reader.Word()
	stop := make(chan struct{})
	e.Must(Each(2, func(i int) error {
		if i == 0 {
			defer close(stop)
			src := make([]byte, n)
			for r := range 30 {
				was := uint64(r)
				PutLe(head, was+1)
				Fill(src, byte(r+1))
				w := writer.Write(mr, 0, head)
				var early error
				w.Value = &rdma.Value{Bytes: src, Seal: func([]byte, uint32) {
					if got := mr.Bytes()[0]; got != byte(was) {
						early = fmt.Errorf("Local is there when it is sealed: %d, want %d", got, was)
					}
				}}
				if err := writer.OK(w); err != nil || early != nil {
					return fmt.Errorf("%v %w", err, early)
				}
			}
			return nil
		}
		for {
			select {
			case <-stop:
				return nil
			default:
			}
			at := uint64(8 + n/2&^7)
			if err := reader.OK(reader.Read(mr, 0, first), reader.Read(mr, at, mid),
				reader.Read(mr, uint64(n)&^7, last)); err != nil {
				return err
			}
			if want := first[0]; mid[0] < want || last[0] < want {
				return fmt.Errorf("Local of WRITE %d is there, and of its Value bytes of WRITEs %d and %d", want,
					mid[0], last[0])
			}
		}
	}))
}

func valueBadWR(t *testing.T, e *Env) {
	mr := e.Memory(4096, All)
	l := e.Dial()
	m := e.H.Active.Caps().MaxMsg
	some := make([]byte, 64)
	for _, c := range []struct {
		what string
		w    rdma.WR
		v    *rdma.Value
	}{
		{"READ with an empty Value", l.Read(mr, 0, l.Word()), &rdma.Value{}},
		{"WRITE with an empty Value", l.Write(mr, 0, l.Word()), &rdma.Value{}},
		{"READ of nothing before a Value", l.Read(mr, 0, nil), &rdma.Value{Bytes: some}},
		{"WRITE of nothing before a Value", l.Write(mr, 0, nil), &rdma.Value{Bytes: some}},
		{"slack below 0", l.Read(mr, 0, l.Word()), &rdma.Value{Bytes: some, Slack: -1}},
		{"WRITE with slack", l.Write(mr, 0, l.Word()), &rdma.Value{Bytes: some, Slack: 8}},
		{"slack beyond MaxMsg", l.Read(mr, 0, l.Word()), &rdma.Value{Bytes: some, Slack: m - 64 - 7}},
		{"slack that overflows", l.Read(mr, 0, l.Word()), &rdma.Value{Bytes: some, Slack: math.MaxInt}},
		{"CAS with a Value", l.CAS(mr, 0, l.Word(), 0, 1), &rdma.Value{Bytes: some}},
		{"FETCH_ADD with a Value", l.Add(mr, 0, l.Word(), 1), &rdma.Value{Bytes: some}},
	} {
		c.w.Value = c.v
		badWR(e, l, mr, c.what, c.w)
	}
	in := l.Write(mr, 0, l.Word())
	in.Flags |= rdma.Inline
	in.Value = &rdma.Value{Bytes: some}
	badWR(e, l, mr, "inline WRITE with a Value", in)
}

func valueDetachedBefore(t *testing.T, e *Env) {
	const n = 9000
	mr := e.Memory(16<<10, All)
	l := e.Dial()
	src, dst := l.guarded(n, 0), l.guarded(n, 0)
	Pattern(src.bytes(), 6)
	want := bytes.Clone(src.bytes())
	w, r := l.Write(mr, 0, l.Word()), l.Read(mr, 0, l.Word())
	var sum uint32
	w.Value = &rdma.Value{Bytes: src.bytes(), Seal: func(_ []byte, crc uint32) { sum = crc }}
	r.Value = &rdma.Value{Bytes: dst.bytes(), Start: whole(n)}
	for range 2 { // it is idempotent
		w.Value.Detach()
		r.Value.Detach()
	}
	Fill(src.bytes(), canary)
	e.Must(l.OK(w, r))
	if !bytes.Equal(mr.Bytes()[8:8+n], want) || sum != crcOf(want) {
		t.Fatal("WRITE of a Value that was detached stored other bytes")
	}
	if bytes.Count(dst.bytes(), []byte{fresh}) != n || r.Value.N != n || r.Value.CRC != sum {
		t.Fatalf("READ into a Value that was detached: N %d, CRC %#x, want %d, %#x; or it was filled", r.Value.N,
			r.Value.CRC, n, sum)
	}
}

// moments runs f again and again while a WR with a Value of n bytes is under way, each time somewhat later in its
// course. A READ begins when Start is called, and a WRITE with its post.
func moments(e *Env, l *Lane, w func() rdma.WR, f func(round int) error, after func(round int, wc rdma.WC) error) {
	e.T.Helper()
	for round := range 12 {
		wr := w()
		begun, done := make(chan struct{}), make(chan error, 1)
		if start := wr.Value.Start; start != nil {
			wr.Value.Start = func(local []byte) (int, uint32) {
				close(begun)
				return start(local)
			}
		} else {
			close(begun)
		}
		over := make(chan struct{})
		go func() {
			select {
			case <-begun:
			case <-over:
			}
			for range 4 * round * round {
				runtime.Gosched()
			}
			done <- f(round)
		}()
		id, err := l.Post(wr)
		var wcs []rdma.WC
		if err == nil {
			wcs, err = l.Wait(id)
		}
		close(over)
		e.Must(<-done)
		e.Must(err)
		e.Must(after(round, wcs[len(wcs)-1]))
	}
}

func valueDetachedMeanwhile(t *testing.T, e *Env) {
	n := valueMax(e) - 8
	mr := e.Memory(int64(n+8), All)
	l := e.Dial()
	local := l.Word()
	far := mr.Bytes()[8 : 8+n]
	Pattern(far, 1)
	var g *guarded
	var v *rdma.Value
	moments(e, l, func() rdma.WR {
		g = l.guarded(n, 8)
		r := l.Read(mr, 0, local)
		v = &rdma.Value{Bytes: g.bytes(), Start: whole(n)}
		r.Value = v
		return r
	}, func(int) error {
		v.Detach()
		Fill(g.bytes(), canary)
		return nil
	}, func(round int, wc rdma.WC) error {
		if wc.Status != driver.Success || v.N != n || v.CRC != crcOf(far) || bytes.Count(g.bytes(), []byte{canary}) !=
			n {
			return fmt.Errorf("round %d: READ %v, N %d; or CRC differs, or bytes came after Detach", round, wc.Status,
				v.N)
		}
		return g.intact()
	})
	var sum uint32
	want := bytes.Clone(far)
	moments(e, l, func() rdma.WR {
		g = l.guarded(n, 8)
		copy(g.bytes(), want)
		PutLe(g.bytes(), l.nextID)
		PutLe(want, l.nextID)
		w := l.Write(mr, 0, local)
		v = &rdma.Value{Bytes: g.bytes(), Seal: func(_ []byte, crc uint32) { sum = crc }}
		w.Value = v
		return w
	}, func(int) error {
		v.Detach()
		Fill(g.bytes(), canary)
		return nil
	}, func(round int, wc rdma.WC) error {
		if wc.Status != driver.Success || !bytes.Equal(far, want) || sum != crcOf(want) {
			return fmt.Errorf("round %d: WRITE %v; or it stored bytes of after Detach", round, wc.Status)
		}
		return nil
	})
}

// ended is how a WR may complete whose connection or region is taken away.
func ended(s rdma.Status) bool {
	return s == driver.Success || s == driver.WRFlushErr || s == driver.RetryExcErr || s == driver.RemOpErr ||
		s == driver.RemAccessErr
}

// valueEnds has stop, which ends what a lane may do, interrupt READs and WRITEs. The region and the Value are
// somebody else's afterwards.
func valueEnds(t *testing.T, e *Env, stop func(l *Lane, revoke func() error) error) {
	n := valueMax(e) - 8
	for _, op := range []rdma.Opcode{rdma.OpRead, rdma.OpWrite} {
		for round := range 6 {
			mr, revoke := e.Region(e.PD, int64(n+8), All)
			l := e.Unconnected(LaneBytes)
			qp, err := e.H.Active.Dial(e.Ctx(), l.PD, l.CQ, e.Listener().Addr(), nil)
			e.Must(err)
			l.QP = qp
			end := e.Undo("close qp", func() error {
				_ = qp.Close() // who is interrupted may not be told so
				return nil
			})
			g := l.guarded(n, 8)
			w := l.wr(op, mr, 0, l.Word(), 0, 0)
			w.Value = &rdma.Value{Bytes: g.bytes()}
			begun := make(chan struct{})
			if op == rdma.OpRead {
				w.Value.Start = func([]byte) (int, uint32) {
					close(begun)
					return n, 0
				}
			} else {
				close(begun)
			}
			over, done := make(chan struct{}), make(chan error, 1)
			go func() {
				select {
				case <-begun:
				case <-over:
				}
				for range 12 * round * round {
					runtime.Gosched()
				}
				err := stop(l, revoke)
				Fill(mr.Bytes(), canary)
				done <- err
			}()
			id, err := l.Post(w)
			if err == nil {
				wcs, werr := l.Wait(id)
				e.Must(werr)
				if wc := wcs[len(wcs)-1]; !ended(wc.Status) {
					t.Fatalf("%v: status %v", op, wc.Status)
				}
			}
			close(over)
			e.Must(<-done)
			e.Must(g.intact())
			Fill(g.bytes(), canary)
			_, _ = l.Post(l.Write(mr, 0, l.Word())) // refused, or flushed, or it fails
			e.Must(end())
			for _, b := range [][]byte{g.bytes(), mr.Bytes()} {
				if bytes.Count(b, []byte{canary}) != len(b) {
					t.Fatalf("round %d: a %v with a Value changed memory after its end", round, op)
				}
			}
		}
	}
}

func valueFence(t *testing.T, e *Env) {
	valueEnds(t, e, func(*Lane, func() error) error {
		peers := e.Peers()
		return peers[len(peers)-1].Fence(e.Ctx())
	})
}

func valueDeregister(t *testing.T, e *Env) {
	valueEnds(t, e, func(_ *Lane, revoke func() error) error { return revoke() })
}

func valueClose(t *testing.T, e *Env) {
	n := min(valueMax(e)-8, 256<<10)
	mr := e.Memory(int64(n+8), All)
	for range 8 {
		l := e.Dial()
		src, dst := l.guarded(n, 1), l.guarded(n, 2)
		w, r := l.Write(mr, 0, l.Word()), l.Read(mr, 0, l.Word())
		w.Value, r.Value = &rdma.Value{Bytes: src.bytes()}, &rdma.Value{Bytes: dst.bytes(), Start: whole(n)}
		_, err := l.Post(w, r)
		e.Must(err)
		e.Must(l.Close())
		Fill(dst.bytes(), canary)
		var wcs [4]rdma.WC
		l.CQ.Poll(wcs[:])
		if bytes.Count(dst.bytes(), []byte{canary}) != n {
			t.Fatal("a READ changed its Value after Close")
		}
		w.Value.Detach() // at once: nobody has it
		r.Value.Detach()
	}
}

func valueOfFailedWR(t *testing.T, e *Env) {
	const n = 5000
	mr := e.Memory(8192, All)
	Pattern(mr.Bytes(), 8)
	readOnly := e.Memory(8192, rdma.AccessRemoteRead)
	for _, op := range []rdma.Opcode{rdma.OpRead, rdma.OpWrite} {
		l, other := e.Dial(), e.Dial()
		dst, behind := l.guarded(n, 3), l.guarded(n, 4)
		bad := l.wr(op, readOnly, 0, l.Word(), 0, 0)
		if op == rdma.OpRead {
			bad.RemoteAddr += uint64(len(readOnly.Bytes()) - n) // Local and all but the end of Value would fit
		}
		bad.Value = &rdma.Value{Bytes: dst.bytes()}
		flushed := l.Read(mr, 0, l.Word())
		flushed.Value = &rdma.Value{Bytes: behind.bytes(), Start: whole(n)}
		wcs, err := l.Do(bad, flushed)
		e.Must(err)
		if s := wcs[0].Status; len(wcs) != 2 || s != driver.RemAccessErr && !silently(e, s) ||
			wcs[1].Status != driver.WRFlushErr {
			t.Fatalf("%v and what is behind it: %+v", op, wcs)
		}
		e.Must(dst.intact())
		e.Must(behind.intact())
		for _, b := range readOnly.Bytes() {
			if b != 0 {
				t.Fatal("a WRITE that was refused has stored something")
			}
		}
		// The Values are the caller's again, for another queue pair.
		r := other.Read(mr, 0, other.Word())
		r.Value = flushed.Value
		r.Value.Start = whole(n)
		e.Must(other.OK(r))
		if !bytes.Equal(behind.bytes(), mr.Bytes()[8:8+n]) {
			t.Fatal("a Value used again has other bytes")
		}
	}
}

// wordsWhole looks for words of two WRITEs in messages as long as words are whole in.
func wordsWhole(t *testing.T, e *Env) {
	size := min(e.H.Active.Caps().WholeBytes, e.H.Passive.Caps().WholeBytes)
	mr := e.Memory(int64(size+64), All)
	lanes := []*Lane{e.Dial(), e.Dial(), e.Dial()}
	e.Must(Each(len(lanes), func(i int) error {
		l := lanes[i]
		buf := l.Buf(size + 8)
		for r := range 60 {
			off := 8 * (r % 3)
			at := 8 - r%2*3 // local alignment does not matter
			b := buf[at%8 : at%8+size]
			if i == 0 {
				Fill(b, byte(r))
				if err := l.OK(l.Write(mr, uint64(off), b)); err != nil {
					return err
				}
				continue
			}
			if err := l.OK(l.Read(mr, uint64(off), b)); err != nil {
				return err
			}
			for w := 0; w < size; w += 8 {
				if u := b[w : w+8]; bytes.Count(u, u[:1]) != 8 {
					return fmt.Errorf("word at %d of a READ of %d bytes is torn: %x", w, size, u)
				}
			}
		}
		return nil
	}))
}
