package rdmatest

import (
	"bytes"
	"context"
	"errors"
	"os"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/driver"
)

func lastByte(t *testing.T, e *Env) {
	const size = 4099 // ends neither on a word nor on a page
	mr := e.Memory(size, All)
	mr.Bytes()[size-1] = 0xfe
	l := e.Dial()
	b := l.Buf(16)
	e.Must(l.OK(l.Read(mr, size-1, b[:1])))
	if b[0] != 0xfe {
		t.Fatalf("last byte read as %#x", b[0])
	}
	b[0] = 0xff
	e.Must(l.OK(l.Write(mr, size-1, b[:1])))
	if mr.Bytes()[size-1] != 0xff {
		t.Fatal("last byte was not written")
	}
	e.Must(l.OK(l.Read(mr, size-16, b)))
	for _, c := range []struct {
		off uint64
		n   int
	}{{size, 1}, {size - 1, 2}, {size - 15, 16}, {size + 1, 1}, {1 << 40, 8}} {
		l := e.Dial()
		refused(e, l, "READ past the end", l.Read(mr, c.off, l.Buf(c.n)), driver.RemAccessErr)
		l = e.Dial()
		refused(e, l, "WRITE past the end", l.Write(mr, c.off, l.Buf(c.n)), driver.RemAccessErr)
	}
	if mr.Bytes()[size-1] != 0xff {
		t.Fatal("a refused WRITE changed the last byte")
	}
}

func addressOverflow(t *testing.T, e *Env) {
	mr := e.Memory(4096, All)
	for _, addr := range []uint64{^uint64(0), ^uint64(7), ^uint64(15), ^uint64(4095), 1 << 63, mr.Base() - 8} {
		l := e.Dial()
		w := l.Read(mr, 0, l.Buf(16))
		w.RemoteAddr = addr
		refused(e, l, "READ near 2^64", w, driver.RemAccessErr)
		l = e.Dial()
		w = l.Write(mr, 0, l.Buf(4096))
		w.RemoteAddr = addr
		refused(e, l, "WRITE near 2^64", w, driver.RemAccessErr)
	}
	for _, b := range mr.Bytes() {
		if b != 0 {
			t.Fatal("a refused WRITE had an effect")
		}
	}
}

func unknownRKey(t *testing.T, e *Env) {
	mr := e.Memory(4096, All)
	for _, key := range []uint64{0, ^uint64(0), ^mr.RKey(), mr.RKey() ^ 1<<63, mr.RKey() ^ 1<<40} {
		l := e.Dial()
		w := l.Read(mr, 0, l.Buf(8))
		w.RKey = key
		refused(e, l, "READ under an unknown rkey", w, driver.RemAccessErr)
		l = e.Dial()
		w = l.Write(mr, 0, l.Buf(8))
		w.RKey = key
		refused(e, l, "WRITE under an unknown rkey", w, driver.RemAccessErr)
	}
}

func revokedRKey(t *testing.T, e *Env) {
	mr, revoke := e.Region(e.PD, 4096, All)
	other := e.Memory(4096, All)
	l, m := e.Dial(), e.Dial()
	e.Must(l.OK(l.Read(mr, 0, l.Buf(8))))
	e.Must(m.OK(m.Write(mr, 0, m.Buf(8))))
	bytesOf := mr.Bytes()
	e.Must(revoke())
	Fill(m.Local.Bytes(), 0xff)
	refused(e, l, "READ under a revoked rkey", l.Read(mr, 0, l.Buf(8)), driver.RemAccessErr)
	refused(e, m, "WRITE under a revoked rkey", m.Write(mr, 0, m.Buf(8)), driver.RemAccessErr)
	if Le(bytesOf) != 0 {
		t.Fatal("a WRITE under a revoked rkey had an effect")
	}
	again, _ := e.Region(e.PD, 4096, All)
	if again.RKey() == mr.RKey() {
		t.Fatal("a new MR has the revoked rkey")
	}
	n := e.Dial()
	e.Must(n.OK(n.Read(other, 0, n.Buf(8)), n.Read(again, 0, n.Buf(8))))
}

// adopted plays a process and the next one on one device: the first one's MR is gone, and its memory is mapped anew.
func adopted(t *testing.T, e *Env) {
	o := rdma.AllocOptions{Name: "rdmatest", Shared: true}
	first, err := e.H.Passive.Alloc(8192, o)
	e.Must(err)
	e.Undo("free", first.Free)
	mr, err := e.PD.RegMR(first, 4096, 4096, All)
	e.Must(err)
	rkey := mr.RKey()
	if m, err := e.PD.RegMRAs(first, 0, 4096, All, rkey); err == nil {
		t.Errorf("two MRs have the rkey %#x", m.RKey())
	}
	l := e.Dial()
	Fill(l.Local.Bytes(), 0x77)
	e.Must(l.OK(l.Write(mr, 0, l.Buf(64))))
	e.Must(mr.Deregister())

	fd, err := unix.FcntlInt(uintptr(first.FD), unix.F_DUPFD_CLOEXEC, 0)
	e.Must(err)
	o.Adopt = os.NewFile(uintptr(fd), "kept")
	defer o.Adopt.Close()
	second, err := e.H.Passive.Alloc(8192, o)
	e.Must(err)
	e.Undo("free", second.Free)
	if m, err := e.PD.RegMRAs(second, 0, 4096, All, 0); err == nil {
		t.Errorf("an MR has the rkey %#x, which was asked to be 0", m.RKey())
	}
	again, err := e.PD.RegMRAs(second, 4096, 4096, All, rkey)
	e.Must(err)
	e.Undo("deregister", again.Deregister)
	if again.RKey() != rkey {
		t.Fatalf("rkey %#x, want %#x", again.RKey(), rkey)
	}
	n := e.Dial()
	b := n.Buf(64)
	e.Must(n.OK(n.Read(mr, 0, b)))
	e.Must(n.OK(n.Write(mr, 64, b)))
	if want := bytes.Repeat([]byte{0x77}, 128); !bytes.Equal(b, want[:64]) || !bytes.Equal(again.Bytes()[:128], want) {
		t.Error("adopted memory has other bytes")
	}
}

func foreignPD(t *testing.T, e *Env) {
	mr, _ := e.Region(e.NewPD(e.H.Passive), 4096, All)
	Fill(mr.Bytes(), 0x5e)
	before := bytes.Clone(mr.Bytes())
	l := e.Dial()
	b := l.Buf(8)
	refused(e, l, "READ of another PD's MR", l.Read(mr, 0, b), driver.RemAccessErr)
	if bytes.Equal(b, before[:8]) {
		t.Fatal("a refused READ gave the bytes")
	}
	l = e.Dial()
	refused(e, l, "WRITE of another PD's MR", l.Write(mr, 0, l.Buf(8)), driver.RemAccessErr)
	if atomics.has(e.H.Active.Caps()) {
		l = e.Dial()
		refused(e, l, "CMP_AND_SWP in another PD's MR", l.CAS(mr, 0, l.Word(), Le(before), 7), driver.RemAccessErr)
		l = e.Dial()
		refused(e, l, "FETCH_ADD in another PD's MR", l.Add(mr, 0, l.Word(), 1), driver.RemAccessErr)
	}
	if !bytes.Equal(mr.Bytes(), before) {
		t.Fatal("a refused WRITE or atomic had an effect")
	}
}

func writeRight(t *testing.T, e *Env) {
	mr := e.Memory(4096, rdma.AccessRemoteRead|rdma.AccessRemoteAtomic)
	l := e.Dial()
	e.Must(l.OK(l.Read(mr, 0, l.Buf(8))))
	if atomics.has(e.H.Active.Caps()) {
		e.Must(l.OK(l.CAS(mr, 0, l.Word(), 0, 7), l.Add(mr, 0, l.Word(), 1)))
		if Le(mr.Bytes()) != 8 {
			t.Fatalf("word %d, want 8", Le(mr.Bytes()))
		}
	}
	b := l.Buf(8)
	Fill(b, 0xff)
	before := Le(mr.Bytes())
	refused(e, l, "WRITE to a READ|ATOMIC region", l.Write(mr, 0, b), driver.RemAccessErr)
	if Le(mr.Bytes()) != before {
		t.Fatal("a refused WRITE had an effect")
	}
}

func functionRegion(t *testing.T, e *Env) {
	const size = 1 << 20
	mr, err := e.PD.RegFunc(size, 2, func(_ context.Context, off uint64, b []byte) driver.Status {
		Fill(b, byte(off>>10))
		return driver.Success
	})
	e.Must(err)
	revoke := e.Undo("deregister", mr.Deregister)
	own := e.Memory(64, rdma.AccessRemoteRead|rdma.AccessRemoteWrite)
	l := e.Dial()
	var wrs []rdma.WR
	for i := range uint64(32) { // among others
		wrs = append(wrs, l.Read(mr, i<<10, l.Buf(int(i)*32+1)), l.Write(own, 0, l.Buf(8)), l.Read(own, 0, l.Buf(8)))
	}
	e.Must(l.OK(wrs...))
	for i := 0; i < len(wrs); i += 3 {
		for _, c := range wrs[i].Local {
			if c != byte(i/3) {
				t.Fatalf("READ at %d brought %d", i/3<<10, c)
			}
		}
	}
	bad := e.Dial()
	refused(e, bad, "READ past a function's end", bad.Read(mr, size-8, bad.Buf(9)), driver.RemAccessErr)
	bad = e.Dial()
	refused(e, bad, "WRITE to a function", bad.Write(mr, 0, bad.Buf(8)), driver.RemAccessErr)
	bad = e.Dial()
	refused(e, bad, "CMP_AND_SWP on a function", bad.CAS(mr, 0, bad.Word(), 0, 1), driver.RemAccessErr)
	bad = e.Dial()
	refused(e, bad, "FETCH_ADD on a function", bad.Add(mr, 0, bad.Word(), 1), driver.RemAccessErr)
	e.Must(revoke())
	refused(e, l, "READ of a revoked function", l.Read(mr, 0, l.Buf(8)), driver.RemAccessErr)
}

func readRight(t *testing.T, e *Env) {
	mr := e.Memory(4096, rdma.AccessRemoteWrite)
	Fill(mr.Bytes(), 0x5e)
	l := e.Dial()
	b := l.Buf(8)
	e.Must(l.OK(l.Write(mr, 8, b)))
	b = l.Buf(8)
	refused(e, l, "READ of a WRITE region", l.Read(mr, 0, b), driver.RemAccessErr)
	if bytes.Equal(b, mr.Bytes()[:8]) {
		t.Fatal("a refused READ gave the bytes")
	}
}

func atomicRight(t *testing.T, e *Env) {
	mr := e.Memory(4096, rdma.AccessRemoteRead|rdma.AccessRemoteWrite)
	l := e.Dial()
	e.Must(l.OK(l.Write(mr, 8, l.Word()), l.Read(mr, 0, l.Word())))
	refused(e, l, "CAS on a READ|WRITE region", l.CAS(mr, 0, l.Word(), 0, 7), driver.RemAccessErr)
	l = e.Dial()
	refused(e, l, "FETCH_ADD on a READ|WRITE region", l.Add(mr, 0, l.Word(), 7), driver.RemAccessErr)
	if Le(mr.Bytes()) != 0 {
		t.Fatal("a refused atomic had an effect")
	}
	ro := e.Memory(4096, rdma.AccessRemoteRead)
	l = e.Dial()
	refused(e, l, "CAS that would not swap, on a READ region", l.CAS(ro, 0, l.Word(), 1, 7), driver.RemAccessErr)
}

func localOnlyRegion(t *testing.T, e *Env) {
	mr := e.Memory(4096, rdma.AccessLocal)
	l := e.Dial()
	refused(e, l, "READ of a local MR", l.Read(mr, 0, l.Buf(8)), driver.RemAccessErr)
	l = e.Dial()
	refused(e, l, "WRITE of a local MR", l.Write(mr, 0, l.Buf(8)), driver.RemAccessErr)
}

func connectionReadOnly(t *testing.T, e *Env) {
	e.Accept = func(rdma.ConnRequest) (*rdma.PD, rdma.Access, error) { return e.PD, rdma.AccessRemoteRead, nil }
	mr := e.Memory(4096, All)
	Fill(mr.Bytes(), 0x42)
	for _, op := range []string{"WRITE", "CAS", "FETCH_ADD"} {
		l := e.Dial()
		b := l.Buf(8)
		e.Must(l.OK(l.Read(mr, 0, b)))
		if Le(b) != 0x4242424242424242 {
			t.Fatalf("READ gave %x", b)
		}
		w := l.Write(mr, 0, l.Word())
		switch op {
		case "CAS":
			w = l.CAS(mr, 0, l.Word(), 0x4242424242424242, 1)
		case "FETCH_ADD":
			w = l.Add(mr, 0, l.Word(), 1)
		}
		if w.Op.IsAtomic() && !atomics.has(e.H.Active.Caps()) {
			continue
		}
		// refused's own good WRITEs need more than READ, so check by hand.
		wcs, err := l.Do(l.Read(mr, 0, l.Word()), w, l.Read(mr, 0, l.Word()))
		e.Must(err)
		// Adapters call what the connection may not do an invalid request.
		if len(wcs) != 3 || wcs[0].Status != driver.Success || wcs[1].Status != driver.RemAccessErr &&
			wcs[1].Status != driver.RemInvReqErr || wcs[2].Status != driver.WRFlushErr {
			t.Fatalf("%s through a READ connection gave %+v", op, wcs)
		}
		if Le(mr.Bytes()) != 0x4242424242424242 {
			t.Fatalf("%s through a READ connection had an effect", op)
		}
	}
}

func atomicPastEnd(t *testing.T, e *Env) {
	mr := e.Memory(4096+4, All) // the last word is cut off
	l := e.Dial()
	e.Must(l.OK(l.CAS(mr, 4088, l.Word(), 0, 1)))
	for _, off := range []uint64{4096, 4104, 1 << 40} {
		l := e.Dial()
		refused(e, l, "CAS past the end", l.CAS(mr, off, l.Word(), 0, 1), driver.RemAccessErr)
		l = e.Dial()
		refused(e, l, "FETCH_ADD past the end", l.Add(mr, off, l.Word(), 1), driver.RemAccessErr)
	}
	l = e.Dial()
	w := l.CAS(mr, 0, l.Word(), 0, 1)
	w.RemoteAddr = ^uint64(7)
	refused(e, l, "CAS near 2^64", w, driver.RemAccessErr)
}

func wrongLKey(t *testing.T, e *Env) {
	mr := e.Memory(4096, All)
	Fill(mr.Bytes(), 0x42)
	for _, key := range []func(uint64) uint64{
		func(uint64) uint64 { return 0 },
		func(k uint64) uint64 { return k ^ 1<<62 },
		func(k uint64) uint64 { return ^k },
	} {
		l := e.Dial()
		r := l.Read(mr, 0, l.Buf(8))
		r.LKey = key(r.LKey)
		refused(e, l, "READ with a wrong lkey", r, driver.LocProtErr)
		if Le(r.Local) == 0x4242424242424242 {
			t.Fatal("READ with a wrong lkey filled the buffer")
		}
		l = e.Dial()
		w := l.Write(mr, 8, l.Buf(8))
		w.LKey = key(w.LKey)
		refused(e, l, "WRITE with a wrong lkey", w, driver.LocProtErr)
	}
	l := e.Dial()
	gone, revoke := e.Region(l.PD, 4096, rdma.AccessLocal)
	w := l.Write(mr, 8, gone.Bytes()[:8])
	w.LKey = gone.LKey()
	e.Must(revoke())
	refused(e, l, "WRITE with a deregistered lkey", w, driver.LocProtErr)
	if Le(mr.Bytes()[8:]) != 0x4242424242424242 {
		t.Fatal("WRITE with a wrong lkey had an effect")
	}
}

func foreignLKey(t *testing.T, e *Env) {
	mr := e.Memory(4096, All)
	l := e.Dial()
	other, _ := e.Region(e.NewPD(e.H.Active), 4096, rdma.AccessLocal)
	w := l.Write(mr, 0, other.Bytes()[:8])
	w.LKey = other.LKey()
	refused(e, l, "WRITE from an MR of another PD", w, driver.LocProtErr)
}

func localOutside(t *testing.T, e *Env) {
	mr := e.Memory(4096, All)
	for _, place := range []func(*Lane, *rdma.Memory) ([]byte, uint64){
		func(l *Lane, m *rdma.Memory) ([]byte, uint64) { return make([]byte, 8), l.Local.LKey() },
		func(l *Lane, m *rdma.Memory) ([]byte, uint64) { // begins inside
			sub, err := l.PD.RegMR(m, 64, 64, rdma.AccessLocal)
			e.Must(err)
			e.Undo("deregister", sub.Deregister)
			return m.Bytes[120:136], sub.LKey()
		},
		func(l *Lane, m *rdma.Memory) ([]byte, uint64) { // ends inside
			sub, err := l.PD.RegMR(m, 64, 64, rdma.AccessLocal)
			e.Must(err)
			e.Undo("deregister", sub.Deregister)
			return m.Bytes[56:72], sub.LKey()
		},
		func(l *Lane, m *rdma.Memory) ([]byte, uint64) { // another MR of the PD
			other, _ := e.Region(l.PD, 4096, rdma.AccessLocal)
			return other.Bytes()[:8], l.Local.LKey()
		},
	} {
		m, err := e.H.Active.Alloc(4096, rdma.AllocOptions{Name: "rdmatest"})
		e.Must(err)
		e.Undo("free", m.Free)
		for _, read := range []bool{false, true} {
			l := e.Dial()
			b, key := place(l, m)
			w := l.Write(mr, 0, b)
			if read {
				w = l.Read(mr, 0, b)
			}
			w.LKey = key
			before := slices.Clone(b)
			refused(e, l, "Local outside its MR", w, driver.LocProtErr)
			if !bytes.Equal(b, before) {
				t.Fatal("a refused WR changed Local")
			}
		}
	}
}

func flushAfterFault(t *testing.T, e *Env) {
	bad := e.Memory(64, rdma.AccessRemoteRead)
	for _, signaled := range []bool{true, false} {
		mr := e.Memory(4096, All)
		l := e.Dial()
		ones := l.Buf(64)
		Fill(ones, 0xff)
		wrs := []rdma.WR{l.Write(mr, 0, ones[:8]), l.Write(bad, 0, ones[:8])}
		for i := range uint64(6) {
			wrs = append(wrs, l.Write(mr, 64*(i+1), ones))
		}
		wrs = append(wrs, l.Read(mr, 0, l.Word()), l.Write(bad, 0, ones))
		if atomics.has(e.H.Active.Caps()) {
			wrs = append(wrs, l.CAS(mr, 2048, l.Word(), 0, 1), l.Add(mr, 2056, l.Word(), 1))
		}
		if !signaled {
			for i := range wrs {
				wrs[i].Flags = 0
			}
		}
		wcs, err := l.Do(wrs...)
		e.Must(err)
		want := []rdma.WC{}
		for i := range wrs {
			wc := rdma.WC{ID: uint64(i), QPNum: l.QP.Num(), Op: wrs[i].Op, Status: driver.WRFlushErr}
			switch i {
			case 0:
				if !signaled {
					continue
				}
				wc.Status = driver.Success
			case 1:
				wc.Status = driver.RemAccessErr
			}
			want = append(want, wc)
		}
		if !slices.Equal(wcs, want) {
			t.Fatalf("signaled=%v: WCs\n got %v\nwant %v", signaled, wcs, want)
		}
		if Le(mr.Bytes()) != ^uint64(0) {
			t.Error("the WRITE before the fault is missing")
		}
		for i, b := range mr.Bytes()[8:] {
			if b != 0 {
				t.Fatalf("a flushed WR changed byte %d", 8+i)
			}
		}
	}
}

func postAfterFault(t *testing.T, e *Env) {
	l := e.Dial()
	refused(e, l, "a WRITE without the right", l.Write(e.Memory(64, rdma.AccessRemoteRead), 0, l.Word()),
		driver.RemAccessErr)
	for range 3 {
		noPost(e, l, "posting again")
	}
	e.Must(l.Close())
	if s := l.QP.State(); s != driver.StateClosed {
		t.Fatalf("state %d after Close", s)
	}
}

func queueFull(t *testing.T, e *Env) {
	depth := e.H.Active.Caps().MaxSendWR
	const extra = 3
	mr := e.Memory(int64(8*(depth+extra)), All)
	l := e.Dial()
	one := l.Word()
	for round := uint64(1); round <= 2; round++ {
		PutLe(one, round)
		wrs := make([]rdma.WR, depth+extra)
		for i := range wrs {
			wrs[i] = l.Write(mr, uint64(8*i), one)
			wrs[i].ID = uint64(i)
		}
		n, err := l.QP.PostSend(wrs)
		if n != depth || !errors.Is(err, rdma.ErrQueueFull) {
			t.Fatalf("PostSend of %d gave %d, %v; want %d, ErrQueueFull", len(wrs), n, err, depth)
		}
		wcs, err := l.Wait(uint64(depth - 1))
		e.Must(err)
		if len(wcs) != depth {
			t.Fatalf("%d WCs, want %d", len(wcs), depth)
		}
		e.Must(l.OK(l.Read(mr, 0, l.Word())))
		for i := range wrs {
			want := round
			if i >= depth {
				want = 0
			}
			if got := Le(mr.Bytes()[8*i:]); got != want {
				t.Fatalf("word %d is %d, want %d", i, got, want)
			}
		}
	}
}

func closeOutstanding(t *testing.T, e *Env) {
	n := min(e.H.Active.Caps().MaxSendWR, 64)
	const size = 256
	mr := e.Memory(int64(n*size), All)
	witness := e.Dial()
	for range 5 {
		Fill(mr.Bytes(), 0)
		l := e.Dial()
		wrs := make([]rdma.WR, n)
		for i := range wrs {
			if i%4 == 3 {
				wrs[i] = l.Read(mr, uint64(i*size), l.Buf(size))
				continue
			}
			b := l.Buf(size)
			Fill(b, 0xff)
			wrs[i] = l.Write(mr, uint64(i*size), b)
			if i%4 == 2 {
				wrs[i].Flags = 0
			}
		}
		first, err := l.Post(wrs...)
		e.Must(err)
		e.Must(l.Close())
		if s := l.QP.State(); s != driver.StateClosed {
			t.Fatalf("state %d after Close", s)
		}
		local, remote := slices.Clone(l.Local.Bytes()), slices.Clone(mr.Bytes())
		status := make([]driver.Status, n) // 0: no WC
		var wc [3]rdma.WC
		next, flushed := uint64(0), false
		for k := l.CQ.Poll(wc[:]); k > 0; k = l.CQ.Poll(wc[:]) {
			for _, wc := range wc[:k] {
				i := wc.ID - first
				if i < next || i >= uint64(n) {
					t.Fatalf("WC %+v out of order", wc)
				}
				if wc.Status != driver.WRFlushErr && (flushed || wc.Status != driver.Success) {
					t.Fatalf("WC %+v; flushed before: %v", wc, flushed)
				}
				flushed = flushed || wc.Status == driver.WRFlushErr
				status[i], next = wc.Status, i+1
			}
		}
		landed := true // WRs land in posting order: a prefix does
		for i, s := range status {
			w := wrs[i]
			if s == 0 && (w.Flags&rdma.Signaled != 0 || slices.Contains(status[:i], driver.WRFlushErr)) {
				t.Fatalf("no WC of WR %d", i)
			}
			b := mr.Bytes()[i*size : (i+1)*size]
			if w.Op == rdma.OpRead {
				continue
			}
			whole := !bytes.Contains(b, []byte{0})
			if s != driver.WRFlushErr && !whole {
				t.Fatalf("WRITE %d succeeded but has not landed", i)
			}
			if !landed && bytes.Contains(b, []byte{0xff}) {
				t.Fatalf("WRITE %d landed although an earlier one did not", i)
			}
			landed = landed && whole
		}
		for range 16 {
			e.Must(witness.OK(witness.Read(mr, 0, witness.Local.Bytes()[:8])))
		}
		if !bytes.Equal(local, l.Local.Bytes()) {
			t.Fatal("a buffer changed after Close")
		}
		if !bytes.Equal(remote, mr.Bytes()) {
			t.Fatal("a WR landed after Close")
		}
	}
}

func closeTwice(t *testing.T, e *Env) {
	mr := e.Memory(64, All)
	l := e.Dial()
	e.Must(l.QP.Close())
	e.Must(l.QP.Close())
	one := l.Word()
	PutLe(one, 1)
	if n, err := l.QP.PostSend([]rdma.WR{l.Write(mr, 0, one)}); n != 0 || !errors.Is(err, rdma.ErrClosed) {
		t.Fatalf("PostSend after Close gave %d, %v; want 0, ErrClosed", n, err)
	}
	if n := l.CQ.Poll(make([]rdma.WC, 1)); n != 0 {
		t.Fatal("a WC of nothing")
	}
	w := e.Dial()
	e.Must(w.OK(w.Read(mr, 0, w.Word())))
	if Le(mr.Bytes()) != 0 {
		t.Fatal("a WRITE after Close had an effect")
	}
}
