package rdmatest

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/driver"
)

const maxTested = 4 << 20 // bytes of the largest READ and WRITE tried

func capsSane(t *testing.T, e *Env) {
	for _, d := range []*rdma.Device{e.H.Active, e.H.Passive} {
		c := d.Caps()
		if c.AtomicScope < driver.AtomicNone || c.AtomicScope > driver.AtomicCPU {
			t.Errorf("AtomicScope %d", c.AtomicScope)
		}
		if c.TearBytes < 8 || c.TearBytes%8 != 0 {
			t.Errorf("TearBytes %d: want a multiple of 8", c.TearBytes)
		}
		if c.WholeBytes < driver.LeastWholeBytes || c.MaxSGE < 1 || c.MaxMsg < 4096 || c.MaxSendWR < 16 ||
			c.MaxInline < 0 {
			t.Errorf("too small to work with: %+v", c)
		}
		if c != d.Driver().Caps() {
			t.Errorf("Caps changed: %+v, then %+v", c, d.Driver().Caps())
		}
	}
}

func allocZeroed(t *testing.T, e *Env) {
	for _, d := range []*rdma.Device{e.H.Active, e.H.Passive} {
		for _, n := range []int64{1, 4095, 4097, 1 << 20} {
			m, err := d.Alloc(n, rdma.AllocOptions{Name: "rdmatest"})
			e.Must(err)
			if page := os.Getpagesize(); int64(len(m.Bytes)) < n || len(m.Bytes)%page != 0 {
				t.Errorf("Alloc(%d) gave %d bytes, want whole pages of %d", n, len(m.Bytes), page)
			}
			if slices.ContainsFunc(m.Bytes, func(b byte) bool { return b != 0 }) {
				t.Errorf("Alloc(%d) is not zeroed", n)
			}
			Fill(m.Bytes, 0xff)
			e.Must(m.Free())
		}
	}
}

func pdDeallocWithMR(t *testing.T, e *Env) {
	for _, d := range []*rdma.Device{e.H.Active, e.H.Passive} {
		pd, err := d.AllocPD()
		e.Must(err)
		_, revoke := e.Region(pd, 4096, All)
		if err := pd.Dealloc(); err == nil {
			t.Fatal("Dealloc with an MR left succeeded")
		}
		e.Must(revoke())
		e.Must(pd.Dealloc())
	}
}

func pdDeallocWithQP(t *testing.T, e *Env) {
	pd, err := e.H.Active.AllocPD()
	e.Must(err)
	cq, err := e.H.Active.CreateCQ(8)
	e.Must(err)
	qp, err := e.H.Active.Dial(e.Ctx(), pd, cq, e.Listener().Addr(), nil)
	e.Must(err)
	if err := pd.Dealloc(); err == nil {
		t.Fatal("Dealloc with a QP left succeeded")
	}
	e.Must(qp.Close())
	e.Must(cq.Close())
	e.Must(pd.Dealloc())
}

// A Close that reports leaves the device open, so that the rest can be closed.
func deviceCloseReports(t *testing.T, e *Env) {
	l := e.Unconnected(4096)
	mustReport := func(what string, d *rdma.Device) {
		t.Helper()
		if err := d.Close(); err == nil {
			t.Fatalf("Device.Close with %s open reported nothing", what)
		}
	}
	mustReport("an MR and a CQ", e.H.Active)
	qp, err := e.H.Active.Dial(e.Ctx(), l.PD, l.CQ, e.Listener().Addr(), nil)
	e.Must(err)
	mustReport("a QP", e.H.Active)
	mustReport("a listener", e.H.Passive)
	e.Must(qp.Close())
	mustReport("an MR and a CQ", e.H.Active)
}

func readWriteSizes(t *testing.T, e *Env) {
	maxLen := min(e.H.Active.Caps().MaxMsg, maxTested)
	mr := e.Memory(int64(maxLen), All)
	l := e.DialWith(2*int64(maxLen), nil)
	src, dst := l.Buf(maxLen), l.Buf(maxLen)
	for _, n := range []int{1, 2, 7, 8, 9, 63, 64, 65, 255, 256, 4095, 4096, 4097, 65537, 1 << 20, maxLen - 1, maxLen} {
		if n > maxLen {
			continue
		}
		for _, fill := range []func(){
			func() { Fill(src[:n], 0xff) },
			func() { Pattern(src[:n], byte(n)) },
		} {
			fill()
			e.Must(l.OK(l.Write(mr, 0, src[:n])))
			if !bytes.Equal(mr.Bytes()[:n], src[:n]) {
				t.Fatalf("WRITE of %d bytes: memory differs", n)
			}
			Fill(dst[:n], 0x11)
			e.Must(l.OK(l.Read(mr, 0, dst[:n])))
			if !bytes.Equal(dst[:n], src[:n]) {
				t.Fatalf("READ of %d bytes: buffer differs", n)
			}
		}
	}
}

func unaligned(t *testing.T, e *Env) {
	mr := e.Memory(4096, All)
	l := e.Dial()
	src, dst := l.Buf(512), l.Buf(512)
	for _, remote := range []uint64{0, 1, 3, 7, 8, 13, 4000} {
		for _, local := range []int{0, 1, 5, 8} {
			for _, n := range []int{1, 2, 7, 8, 9, 15, 16, 17, 31, 65, 95} {
				Pattern(src, byte(int(remote)+local+n))
				Fill(dst, 0x77)
				e.Must(l.OK(l.Write(mr, remote, src[local:local+n]), l.Read(mr, remote, dst[local:local+n])))
				if !bytes.Equal(dst[local:local+n], src[local:local+n]) {
					t.Fatalf("%d bytes at remote %d local %d: wrote %x read %x", n, remote, local, src[local:local+n],
						dst[local:local+n])
				}
			}
		}
	}
}

func touchNothingElse(t *testing.T, e *Env) {
	mr := e.Memory(256, All)
	l := e.Dial()
	src, dst := l.Buf(64), l.Buf(64)
	for _, n := range []int{1, 3, 8, 13, 24} {
		for _, off := range []int{8, 9, 15, 16, 100, 256 - n} {
			Fill(mr.Bytes(), 0xaa)
			Fill(src, 0xff)
			e.Must(l.OK(l.Write(mr, uint64(off), src[:n])))
			for i, b := range mr.Bytes() {
				if want := byte(0xaa); b != want && (i < off || i >= off+n) {
					t.Fatalf("WRITE of %d at %d changed byte %d", n, off, i)
				}
			}
			Fill(dst, 0xbb)
			e.Must(l.OK(l.Read(mr, uint64(off), dst[8:8+n])))
			for i, b := range dst {
				if in := i >= 8 && i < 8+n; in && b != 0xff || !in && b != 0xbb {
					t.Fatalf("READ of %d at %d: byte %d of the buffer is %#x", n, off, i, b)
				}
			}
		}
	}
}

func inlineReuse(t *testing.T, e *Env) {
	const chains = 20
	n := min(e.H.Active.Caps().MaxInline, 64)
	mr := e.Memory(64*chains, All)
	l := e.Dial()
	src := l.Buf(n)
	var last uint64
	for i := range chains {
		Fill(src, byte(i+1))
		w := l.Write(mr, uint64(64*i), src)
		w.Flags |= rdma.Inline
		var err error
		last, err = l.Post(w)
		e.Must(err)
		Fill(src, 0xee)
		if i%8 == 7 {
			_, err := l.Wait(last)
			e.Must(err)
		}
	}
	wcs, err := l.Wait(last)
	e.Must(err)
	for _, wc := range wcs {
		if wc.Status != driver.Success {
			t.Fatalf("%+v", wc)
		}
	}
	for i := range chains {
		if got, want := mr.Bytes()[64*i:64*i+n], bytes.Repeat([]byte{byte(i + 1)}, n); !bytes.Equal(got, want) {
			t.Fatalf("inline WRITE %d landed as %x, want %x", i, got, want)
		}
	}
}

// badWR checks that w is refused by PostSend and that the QP works after it.
func badWR(e *Env, l *Lane, mr *rdma.MR, what string, w rdma.WR) {
	e.T.Helper()
	good := l.Write(mr, 0, l.Word())
	if n, err := l.QP.PostSend([]rdma.WR{good, w}); n != 0 || !errors.Is(err, rdma.ErrBadWR) {
		e.T.Fatalf("%s: PostSend gave %d, %v; want 0, ErrBadWR", what, n, err)
	}
	if err := l.OK(l.Read(mr, 0, l.Word())); err != nil {
		e.T.Fatalf("%s: the QP is not usable after it: %v", what, err)
	}
}

func inlineTooLong(t *testing.T, e *Env) {
	mr := e.Memory(1<<20, All)
	l := e.DialWith(1<<20, nil)
	w := l.Write(mr, 0, l.Buf(min(e.H.Active.Caps().MaxInline+1, 1<<19)))
	w.Flags |= rdma.Inline
	badWR(e, l, mr, "inline WRITE longer than MaxInline", w)
	r := l.Read(mr, 0, l.Word())
	r.Flags |= rdma.Inline
	badWR(e, l, mr, "inline READ", r)
}

func maxMsgLimit(t *testing.T, e *Env) {
	l := e.Dial()
	mr := e.Memory(4096, All)
	if m := e.H.Active.Caps().MaxMsg; m < math.MaxInt32 && m <= 64<<20 {
		long := make([]byte, m+1)
		badWR(e, l, mr, "READ longer than MaxMsg", l.Read(mr, 0, long))
		badWR(e, l, mr, "WRITE longer than MaxMsg", l.Write(mr, 0, long))
	}
	badWR(e, l, mr, "READ of nothing", l.Read(mr, 0, nil))
	badWR(e, l, mr, "WRITE of nothing", l.Write(mr, 0, nil))
}

// Every aligned unit is written with equal bytes, so a torn one shows.
func unitsNeverTear(t *testing.T, e *Env) {
	const rounds = 150
	unit := min(e.H.Active.Caps().TearBytes, e.H.Passive.Caps().TearBytes, 512)
	size := max(1024, 8*unit)
	mr := e.Memory(int64(size), All)
	lanes := []*Lane{e.Dial(), e.Dial(), e.Dial(), e.Dial()}
	e.Must(Each(len(lanes), func(i int) error {
		l := lanes[i]
		buf := l.Buf(size)
		for r := range rounds {
			off := unit * ((i + r) % 4)
			if i < 2 {
				Fill(buf, byte(r*2+i))
				if err := l.OK(l.Write(mr, uint64(off), buf[off:])); err != nil {
					return err
				}
				continue
			}
			if err := l.OK(l.Read(mr, uint64(off), buf[off:])); err != nil {
				return err
			}
			for at := off; at+unit <= size; at += unit {
				if u := buf[at : at+unit]; bytes.Count(u, u[:1]) != unit {
					return fmt.Errorf("unit of %d bytes at %d is torn: %x", unit, at, u)
				}
			}
		}
		return nil
	}))
}

func casBasics(t *testing.T, e *Env) {
	mr := e.Memory(64, All)
	l := e.Dial()
	found := l.Word()
	for _, off := range []uint64{0, 8, 56} {
		word := mr.Bytes()[off:]
		for _, step := range []struct{ compare, swap, before, after uint64 }{
			{0, math.MaxUint64, 0, math.MaxUint64},
			{0, 1, math.MaxUint64, math.MaxUint64},
			{math.MaxUint64, 0x0123456789abcdef, math.MaxUint64, 0x0123456789abcdef},
			{0x0123456789abcdee, 5, 0x0123456789abcdef, 0x0123456789abcdef},
			{0x8123456789abcdef, 5, 0x0123456789abcdef, 0x0123456789abcdef},
			{0x0123456789abcdef, 0x0123456789abcdef, 0x0123456789abcdef, 0x0123456789abcdef},
			{0x0123456789abcdef, 0, 0x0123456789abcdef, 0},
		} {
			Fill(found, 0x33)
			e.Must(l.OK(l.CAS(mr, off, found, step.compare, step.swap)))
			if Le(found) != step.before || Le(word) != step.after {
				t.Fatalf("CAS at %d %#x->%#x found %#x left %#x, want %#x and %#x", off, step.compare, step.swap,
					Le(found), Le(word), step.before, step.after)
			}
		}
	}
}

func fetchAddBasics(t *testing.T, e *Env) {
	mr := e.Memory(24, All)
	l := e.Dial()
	found := l.Word()
	var want uint64
	for _, n := range []uint64{1, 0, 41, math.MaxUint64, 1 << 63, 1 << 63, math.MaxUint64 - 5} {
		e.Must(l.OK(l.Add(mr, 8, found, n)))
		if Le(found) != want {
			t.Fatalf("FETCH_ADD %#x found %#x, want %#x", n, Le(found), want)
		}
		want += n
	}
	if got := [3]uint64{Le(mr.Bytes()), Le(mr.Bytes()[8:]), Le(mr.Bytes()[16:])}; got != [3]uint64{0, want, 0} {
		t.Fatalf("words %#x, want the middle one %#x", got, want)
	}
}

func misalignedAtomic(t *testing.T, e *Env) {
	mr := e.Memory(64, All)
	l := e.Dial()
	for off := uint64(1); off < 8; off++ {
		badWR(e, l, mr, "misaligned CAS", l.CAS(mr, off, l.Word(), 0, 1))
		badWR(e, l, mr, "misaligned FETCH_ADD", l.Add(mr, off, l.Word(), 1))
	}
	badWR(e, l, mr, "CAS into 7 bytes", l.CAS(mr, 0, l.Buf(7), 0, 1))
	badWR(e, l, mr, "CAS into 16 bytes", l.CAS(mr, 0, l.Buf(16), 0, 1))
	badWR(e, l, mr, "CAS into a misaligned buffer", l.CAS(mr, 0, l.Buf(16)[1:9], 0, 1))
	if slices.ContainsFunc(mr.Bytes(), func(b byte) bool { return b != 0 }) {
		t.Fatal("a malformed WR, or one in the same PostSend, had an effect")
	}
}

const (
	contenders = 4
	increments = 100
)

func contendedCAS(t *testing.T, e *Env) {
	mr := e.Memory(64, All)
	e.Must(Each(contenders, casIncrements(e, mr)))
	if got := Le(mr.Bytes()[8:]); got != contenders*increments {
		t.Fatalf("sum %d, want %d", got, contenders*increments)
	}
}

func casIncrements(e *Env, mr *rdma.MR) func(int) error {
	lanes := make([]*Lane, contenders)
	for i := range lanes {
		lanes[i] = e.Dial()
	}
	return func(i int) error {
		l := lanes[i]
		found := l.Word()
		var guess uint64
		deadline := time.Now().Add(Patience)
		for range increments {
			for {
				if err := l.OK(l.CAS(mr, 8, found, guess, guess+1)); err != nil {
					return err
				}
				was := guess
				guess = Le(found)
				if guess == was {
					guess++
					break
				}
				if time.Now().After(deadline) {
					return errors.New("no CAS wins")
				}
			}
		}
		return nil
	}
}

func contendedAdd(t *testing.T, e *Env) {
	mr := e.Memory(64, All)
	lanes := make([]*Lane, contenders)
	for i := range lanes {
		lanes[i] = e.Dial()
	}
	seen := make([][]uint64, contenders)
	e.Must(Each(contenders, func(i int) error {
		found := [2][]byte{lanes[i].Word(), lanes[i].Word()}
		for range increments / 2 {
			if err := lanes[i].OK(lanes[i].Add(mr, 0, found[0], 1), lanes[i].Add(mr, 0, found[1], 1)); err != nil {
				return err
			}
			seen[i] = append(seen[i], Le(found[0]), Le(found[1]))
		}
		return nil
	}))
	all := slices.Concat(seen...)
	slices.Sort(all)
	for i, v := range all {
		if v != uint64(i) {
			t.Fatalf("the %d words found are not 0..%d: the %dth is %d", len(all), len(all)-1, i, v)
		}
	}
	if got := Le(mr.Bytes()); got != uint64(len(all)) {
		t.Fatalf("sum %d, want %d", got, len(all))
	}
}

func mixedAtomics(t *testing.T, e *Env) {
	mr := e.Memory(64, All)
	adders := []*Lane{e.Dial(), e.Dial()}
	cas := casIncrements(e, mr)
	e.Must(Each(contenders+len(adders), func(i int) error {
		if i < contenders {
			return cas(i)
		}
		l := adders[i-contenders]
		found := l.Word()
		for range increments {
			if err := l.OK(l.Add(mr, 8, found, 1)); err != nil {
				return err
			}
		}
		return nil
	}))
	if got, want := Le(mr.Bytes()[8:]), uint64((contenders+len(adders))*increments); got != want {
		t.Fatalf("sum %d, want %d", got, want)
	}
}
