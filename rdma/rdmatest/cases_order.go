package rdmatest

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/driver"
)

// chainOrder posts a chain whose every WR depends on those before it. Fence stands where the
// contract lets a READ change places.
func chainOrder(t *testing.T, e *Env) {
	mr := e.Memory(64, All)
	l := e.Dial()
	a, b, r1, r2, f1, f2 := l.Word(), l.Word(), l.Word(), l.Word(), l.Word(), l.Word()
	for i := uint64(1); i <= 50; i++ {
		PutLe(a, i)
		PutLe(b, 10*i)
		fencedWrite, fencedRead := l.Write(mr, 0, b), l.Read(mr, 0, r2)
		fencedWrite.Flags |= rdma.Fence
		fencedRead.Flags |= rdma.Fence
		e.Must(l.OK(
			l.Write(mr, 0, a),
			l.Read(mr, 0, r1),
			fencedWrite,
			l.CAS(mr, 0, f1, 10*i, 10*i+1),
			l.Add(mr, 0, f2, 1),
			fencedRead,
		))
		got := [4]uint64{Le(r1), Le(f1), Le(f2), Le(r2)}
		if want := [4]uint64{i, 10 * i, 10*i + 1, 10*i + 2}; got != want {
			t.Fatalf("chain %d found %d, want %d", i, got, want)
		}
	}
}

// A CAS with IfHit takes effect if the one in front of it did, whatever else is between them, and whichever doorbell
// brought that. Else it is skipped, and so is all that follows until a CAS without the flag.
func stopsAtMiss(t *testing.T, e *Env) {
	mr := e.Memory(64, All)
	l, other := e.Dial(), e.Dial()
	var found [5][]byte
	for i := range found {
		found[i] = l.Word()
	}
	sum, zero := l.Word(), l.Buf(64)
	ifHit := func(off uint64, local []byte, compare, swap uint64) rdma.WR {
		w := l.CAS(mr, off, local, compare, swap)
		w.Flags |= rdma.IfHit
		return w
	}
	words := func(what string, got, want [5]uint64) {
		t.Helper()
		if got != want {
			t.Fatalf("%s: %#x, want %#x", what, got, want)
		}
	}
	// The first that misses is at each place of the chain in turn; len(found): none misses.
	for miss := range len(found) + 1 {
		e.Must(l.OK(l.Write(mr, 0, zero)))
		if miss < len(found) {
			e.Must(other.OK(other.Add(mr, uint64(8*miss), other.Local.Bytes()[:8], 9)))
		}
		chain := []rdma.WR{l.CAS(mr, 0, found[0], 0, 1)}
		var foundWant, want [5]uint64
		for i := range found {
			if i > 0 {
				chain = append(chain, l.Add(mr, 48, sum, 1), ifHit(uint64(8*i), found[i], 0, 1))
			}
			switch {
			case i < miss:
				want[i] = 1
			case i == miss:
				foundWant[i], want[i] = 9, 9
			default:
				foundWant[i] = ^uint64(0)
			}
		}
		if miss%2 == 0 {
			e.Must(l.OK(chain...))
		} else {
			e.Must(l.OK(chain[:3]...))
			e.Must(l.OK(chain[3:]...))
		}
		var got, stored [5]uint64
		for i := range found {
			got[i] = Le(found[i])
			stored[i] = Le(mr.Bytes()[8*i:])
		}
		words(fmt.Sprintf("miss at %d: found", miss), got, foundWant)
		words(fmt.Sprintf("miss at %d: memory", miss), stored, want)
		if n := Le(mr.Bytes()[48:]); n != 4 {
			t.Fatalf("%d of 4 other WRs took effect", n)
		}
		// A CAS without the flag begins anew.
		e.Must(l.OK(l.CAS(mr, 56, found[0], 0, 5), ifHit(56, found[1], 5, 6)))
		if n := Le(mr.Bytes()[56:]); n != 6 {
			t.Fatalf("behind a chain that stopped at %d: %d, want 6", miss, n)
		}
	}
	// Nobody else's CAS counts.
	e.Must(other.OK(other.CAS(mr, 8, other.Local.Bytes()[:8], 77, 78)))
	e.Must(l.OK(ifHit(56, found[0], 6, 7)))
	fresh := e.Dial()
	w := fresh.CAS(mr, 56, fresh.Word(), 7, 8)
	w.Flags |= rdma.IfHit
	e.Must(fresh.OK(w))
	if n := Le(mr.Bytes()[56:]); n != 7 {
		t.Fatalf("behind another connection's miss, and before any CAS: %d, want 7", n)
	}
}

// stopBadWR: the flag is for a CMP_AND_SWP, of a provider that has it.
func stopBadWR(t *testing.T, e *Env) {
	mr := e.Memory(64, All)
	l := e.Dial()
	for _, w := range []rdma.WR{l.Read(mr, 0, l.Word()), l.Write(mr, 0, l.Word()), l.Add(mr, 0, l.Word(), 1),
		l.CAS(mr, 0, l.Word(), 0, 1)} {
		if w.Op == rdma.OpCmpAndSwp && e.H.Active.Caps().StopAtMiss {
			continue
		}
		w.Flags |= rdma.IfHit
		if _, err := l.QP.PostSend([]rdma.WR{w}); !errors.Is(err, rdma.ErrBadWR) {
			t.Errorf("%v with IfHit: %v, want %v", w.Op, err, rdma.ErrBadWR)
		}
	}
}

// Each record is WRITTEN to fresh memory and then linked by a CAS, as an index
// does; a reader that finds the link must find the whole record.
func writeBeforeCAS(t *testing.T, e *Env) {
	const records, size = 100, 512
	mr := e.Memory(8+records*size, All)
	w, r := e.Dial(), e.Dial()
	record := func(b []byte, i uint64) {
		for at := 0; at < size; at += 8 {
			PutLe(b[at:], i<<32|uint64(at))
		}
	}
	e.Must(Each(2, func(i int) error {
		if i == 0 {
			buf, found := w.Buf(size), w.Word()
			for n := uint64(0); n < records; n++ {
				record(buf, n+1)
				write := w.Write(mr, 8+n*size, buf)
				write.Flags = 0
				if err := w.OK(write, w.CAS(mr, 0, found, n, n+1)); err != nil {
					return err
				}
				if Le(found) != n {
					return fmt.Errorf("CAS found %d, want %d", Le(found), n)
				}
			}
			return nil
		}
		slot, buf, want := r.Word(), r.Buf(size), make([]byte, size)
		deadline := time.Now().Add(Patience)
		for n := uint64(0); n < records; {
			if time.Now().After(deadline) {
				return errors.New("the writer does not get on")
			}
			if err := r.OK(r.Read(mr, 0, slot)); err != nil {
				return err
			}
			if Le(slot) < n {
				return fmt.Errorf("slot went back from %d to %d", n, Le(slot))
			}
			if n = Le(slot); n == 0 {
				continue
			}
			if err := r.OK(r.Read(mr, 8+(n-1)*size, buf)); err != nil {
				return err
			}
			if record(want, n); !bytes.Equal(buf, want) {
				return fmt.Errorf("record %d is linked but incomplete", n)
			}
		}
		return nil
	}))
}

// A writer sets word a and then word b; {READ b; READ a} never finds b newer.
func readsInOrder(t *testing.T, e *Env) {
	const rounds = 150
	mr := e.Memory(64, All)
	w, r := e.Dial(), e.Dial()
	e.Must(Each(2, func(i int) error {
		if i == 0 {
			v := [2][]byte{w.Word(), w.Word()}
			for n := uint64(1); n <= rounds; n++ {
				PutLe(v[0], n)
				PutLe(v[1], n)
				if err := w.OK(w.Write(mr, 0, v[0]), w.Write(mr, 32, v[1])); err != nil {
					return err
				}
			}
			return nil
		}
		a, b := r.Word(), r.Word()
		deadline := time.Now().Add(Patience)
		for Le(b) < rounds {
			if time.Now().After(deadline) {
				return errors.New("the writer does not get on")
			}
			if err := r.OK(r.Read(mr, 32, b), r.Read(mr, 0, a)); err != nil {
				return err
			}
			if Le(a) < Le(b) {
				return fmt.Errorf("read b=%d, then a=%d, which is older", Le(b), Le(a))
			}
		}
		return nil
	}))
}

// A fence waits for WRs of earlier doorbells that will never have a WC, too, and so
// does what is behind it.
func fenceBehindUnsignaled(t *testing.T, e *Env) {
	mr := e.Memory(64, All)
	l := e.Dial()
	found, word, other := l.Word(), l.Word(), l.Word()
	for i := range uint64(50) {
		cas := l.CAS(mr, 0, found, i, i+1)
		cas.Flags = 0
		_, err := l.Post(cas)
		e.Must(err)
		fenced := l.Read(mr, 0, word)
		fenced.Flags = rdma.Fence
		_, err = l.Post(fenced)
		e.Must(err)
		again := l.Read(mr, 0, other)
		again.Flags |= rdma.Fence
		e.Must(l.OK(again))
		if Le(found) != i || Le(word) != i+1 || Le(other) != i+1 {
			t.Fatalf("CAS %d found %d; fenced READs behind it gave %d and %d", i, Le(found), Le(word), Le(other))
		}
	}
}

func readAfterCAS(t *testing.T, e *Env)       { readBehindCAS(t, e, 0) }
func fencedReadAfterCAS(t *testing.T, e *Env) { readBehindCAS(t, e, rdma.Fence) }

func readBehindCAS(t *testing.T, e *Env, flag rdma.SendFlags) {
	mr := e.Memory(64, All)
	l, other := e.Dial(), e.Dial()
	e.Must(Each(2, func(i int) error {
		if i == 1 {
			for range 200 {
				if err := other.OK(other.Add(mr, 8, other.Local.Bytes()[:8], 1)); err != nil {
					return err
				}
			}
			return nil
		}
		found, read := l.Word(), l.Buf(16)
		for n := uint64(0); n < 200; n++ {
			r := l.Read(mr, 0, read)
			r.Flags |= flag
			if err := l.OK(l.CAS(mr, 0, found, n, n+1), r); err != nil {
				return err
			}
			if Le(found) != n || Le(read) != n+1 {
				return fmt.Errorf("CAS %d->%d found %d, READ behind it %d", n, n+1, Le(found), Le(read))
			}
		}
		return nil
	}))
}

func wcOrder(t *testing.T, e *Env) {
	const chains, length = 30, 5
	mr := e.Memory(LaneBytes, All)
	l := e.Dial()
	sizes := []int{8, 4096, 1, 1024, 64}
	bufs := make([][]byte, length)
	for i := range bufs {
		bufs[i] = l.Buf(sizes[i])
	}
	var next uint64
	check := func(wcs []rdma.WC) {
		t.Helper()
		for _, wc := range wcs {
			if next == 0 {
				next = wc.ID
			}
			if wc.Status != driver.Success || wc.ID != next || wc.QPNum != l.QP.Num() {
				t.Fatalf("WC %+v, want success of ID %#x on qp %d", wc, next, l.QP.Num())
			}
			next++
		}
	}
	for range chains {
		wrs := make([]rdma.WR, length)
		for i := range wrs {
			if i%2 == 0 {
				wrs[i] = l.Read(mr, uint64(i), bufs[i])
			} else {
				wrs[i] = l.Write(mr, 8192+uint64(i), bufs[i])
			}
		}
		first, err := l.Post(wrs...)
		e.Must(err)
		if first%2 == 0 { // let two chains be under way at times
			wcs, err := l.Wait(first + length - 1)
			e.Must(err)
			check(wcs)
		}
	}
	if last := l.nextID - 1; next <= last {
		wcs, err := l.Wait(last)
		e.Must(err)
		check(wcs)
	}
	if n := l.CQ.Poll(make([]rdma.WC, 1)) + l.CQ.Poll(nil); n != 0 {
		t.Fatalf("Poll gave %d more", n)
	}
}

func sharedCQ(t *testing.T, e *Env) {
	mr := e.Memory(4096, All)
	a := e.Dial()
	qp, err := e.H.Active.Dial(e.Ctx(), a.PD, a.CQ, e.Listener().Addr(), nil)
	e.Must(err)
	e.Undo("close second qp", qp.Close)
	if qp.Num() == a.QP.Num() {
		t.Fatalf("two QPs with number %d", qp.Num())
	}
	src := a.Word()
	const each = 10
	last := map[uint32]uint64{a.QP.Num(): 0, qp.Num(): 0}
	for i := range uint64(each) {
		for _, q := range []*rdma.QP{a.QP, qp} {
			w := a.Write(mr, 8*i, src)
			w.ID = i + 1
			if n, err := q.PostSend([]rdma.WR{w}); n != 1 || err != nil {
				t.Fatalf("PostSend gave %d, %v", n, err)
			}
		}
	}
	marker := a.Read(mr, 0, a.Word())
	id, err := a.Post(marker)
	e.Must(err)
	marker.ID = id + 1
	if n, err := qp.PostSend([]rdma.WR{marker}); n != 1 || err != nil {
		t.Fatalf("PostSend gave %d, %v", n, err)
	}
	wcs, err := a.Wait(id)
	e.Must(err)
	all := append([]rdma.WC(nil), wcs...)
	seen := false
	for _, wc := range all {
		seen = seen || wc.ID == id+1
	}
	if !seen {
		wcs, err = a.Wait(id + 1)
		e.Must(err)
		all = append(all, wcs...)
	}
	for _, wc := range all {
		if wc.ID >= id {
			continue
		}
		if prev, ok := last[wc.QPNum]; !ok || wc.ID != prev+1 || wc.Status != driver.Success {
			t.Fatalf("WC %+v after ID %d of its QP", wc, prev)
		}
		last[wc.QPNum]++
	}
	for num, n := range last {
		if n != each {
			t.Errorf("qp %d: %d WCs of %d", num, n, each)
		}
	}
}

func synchronousWCs(t *testing.T, e *Env) {
	mr := e.Memory(64, All)
	l := e.Dial()
	src, dst := l.Word(), l.Word()
	PutLe(src, 42)
	_, err := l.Post(l.Write(mr, 0, src), l.Read(mr, 0, dst))
	e.Must(err)
	if Le(dst) != 42 {
		t.Fatalf("READ has not happened when PostSend returns: %#x", Le(dst))
	}
	if n := l.CQ.Poll(make([]rdma.WC, 4)); n != 2 {
		t.Fatalf("%d WCs after PostSend, want 2", n)
	}
}

// A later WC also returns the buffers of the unsignaled WRs before it.
func unsignaledSuccess(t *testing.T, e *Env) {
	const before = 7
	mr := e.Memory(before*64, All)
	l := e.Dial()
	src, word := l.Buf(64), l.Word()
	for round := range byte(20) {
		Fill(src, round+1)
		var wrs []rdma.WR
		for i := range uint64(before) {
			w := l.Write(mr, 64*i, src)
			w.Flags = 0
			wrs = append(wrs, w)
		}
		wcs, err := l.Do(append(wrs, l.Read(mr, 0, word))...)
		e.Must(err)
		Fill(src, 0xee)
		if len(wcs) != 1 || wcs[0].Status != driver.Success {
			t.Fatalf("unsignaled WRITEs and a READ gave %+v", wcs)
		}
		e.Must(l.OK(l.Read(mr, 0, word)))
		if !bytes.Equal(mr.Bytes(), bytes.Repeat([]byte{round + 1}, before*64)) {
			t.Fatal("an unsignaled WRITE is missing or changed after a later WC was polled")
		}
	}
}

func unsignaledFailure(t *testing.T, e *Env) {
	mr := e.Memory(4096, rdma.AccessRemoteRead)
	l := e.Dial()
	src := l.Word()
	r, w, behind := l.Read(mr, 0, l.Word()), l.Write(mr, 0, src), l.Read(mr, 0, l.Word())
	r.Flags, w.Flags, behind.Flags = 0, 0, 0
	wcs, err := l.Do(r, w, behind)
	e.Must(err)
	if len(wcs) != 2 || wcs[0].ID != 1 || wcs[0].Status != driver.RemAccessErr || wcs[1].ID != 2 ||
		wcs[1].Status != driver.WRFlushErr {
		t.Fatalf("an unsignaled READ, a refused unsignaled WRITE and an unsignaled READ gave %+v", wcs)
	}
}

// brokeOff tells whether the WCs of a chain are those of a connection that ended amid it: the WRs in front of the first
// failure succeeded, all behind it were flushed.
func brokeOff(got []driver.Status) bool {
	i := slices.IndexFunc(got, func(s driver.Status) bool { return s != driver.Success })
	return i >= 0 && got[i] == driver.RetryExcErr && !slices.ContainsFunc(got[i+1:], func(s driver.Status) bool {
		return s != driver.WRFlushErr
	})
}

// refused posts w among good WRITEs, so many that a provider may look at the chain as a whole before it executes it,
// and checks that w fails with want, that what is before it took effect and nothing else, and that the QP is in error.
func refused(e *Env, l *Lane, what string, w rdma.WR, want driver.Status) {
	e.T.Helper()
	good := e.Memory(24, All)
	one := l.Word()
	PutLe(one, 1)
	wcs, err := l.Do(l.Write(good, 16, l.Word()), l.Write(good, 0, one), w, l.Write(good, 8, one))
	if err != nil {
		e.T.Fatalf("%s: %v", what, err)
	}
	got := make([]driver.Status, len(wcs))
	for i := range wcs {
		got[i] = wcs[i].Status
	}
	silent := e.H.Active.Caps().SilentRefusals && want != driver.LocProtErr && brokeOff(got)
	if !silent && (len(got) != 4 || got[0] != driver.Success || got[1] != driver.Success || got[2] != want ||
		got[3] != driver.WRFlushErr) {
		e.T.Fatalf("%s: two good WRITEs, it, and a WRITE behind it completed %v, want SUCCESS, SUCCESS, %v, "+
			"WR_FLUSH_ERR", what, got, want)
	}
	if o := (&rdma.WCError{WC: wcs[2]}).Applied(); o != rdma.No && !silent {
		e.T.Errorf("%s: a refused WR %v", what, o)
	}
	if a, b := Le(good.Bytes()), Le(good.Bytes()[8:]); a != 1 || b != 0 {
		e.T.Errorf("%s: WRITE before it left %d (want 1), WRITE behind it %d (want 0)", what, a, b)
	}
	if s := l.QP.State(); s != driver.StateErr {
		e.T.Errorf("%s: state %d after it, want StateErr", what, s)
	}
	noPost(e, l, what)
}

// noPost checks that the QP, which is in error, takes nothing any more.
func noPost(e *Env, l *Lane, what string) {
	e.T.Helper()
	mr := e.Memory(8, All)
	one := l.Word()
	PutLe(one, 1)
	wcs, err := l.Do(l.Write(mr, 0, one))
	switch {
	case err == nil && (len(wcs) != 1 || wcs[0].Status != driver.WRFlushErr):
		e.T.Errorf("%s: a later WRITE gave %+v, want WR_FLUSH_ERR or ErrQPError", what, wcs)
	case err != nil && !errors.Is(err, rdma.ErrQPError):
		e.T.Errorf("%s: a later WRITE gave %v, want ErrQPError or WR_FLUSH_ERR", what, err)
	}
	if Le(mr.Bytes()) != 0 {
		e.T.Errorf("%s: a later WRITE had an effect", what)
	}
}
