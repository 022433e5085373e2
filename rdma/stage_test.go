package rdma_test

import (
	"bytes"
	"testing"

	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/driver"
	"github.com/kvd-project/kvd/rdma/sim"
)

// local registers words for WRs of p.
func (p *pair) local(t *testing.T) *rdma.MR {
	t.Helper()
	m, err := p.dev.Alloc(4096, rdma.AllocOptions{Name: "local"})
	if err != nil {
		t.Fatal(err)
	}
	mr, err := p.pd.RegMR(m, 0, 4096, rdma.AccessLocal)
	if err != nil {
		t.Fatal(err)
	}
	return mr
}

// far registers n bytes that verbs of p reach.
func (p *pair) far(t *testing.T, n int64) *rdma.MR {
	t.Helper()
	m, err := p.dev.Alloc(n, rdma.AllocOptions{Name: "far"})
	if err != nil {
		t.Fatal(err)
	}
	mr, err := p.pd.RegMR(m, 0, n, rdma.AccessRemoteRead|rdma.AccessRemoteWrite)
	if err != nil {
		t.Fatal(err)
	}
	return mr
}

// read posts count READs of n bytes into memory of no MR, all at once, and waits for them. It returns how often memory
// was registered meanwhile.
func (p *pair) read(t *testing.T, local, far *rdma.MR, count, n int) uint64 {
	t.Helper()
	were := p.dev.Registrations()
	wrs := make([]rdma.WR, count)
	for i := range wrs {
		wrs[i] = rdma.WR{ID: uint64(i), Op: rdma.OpRead, Flags: rdma.Signaled, Local: local.Bytes()[8*i : 8*i+8],
			LKey: local.LKey(), RemoteAddr: far.Base(), RKey: far.RKey(), Value: &rdma.Value{Bytes: make([]byte, n)}}
	}
	if k, err := p.qp.PostSend(wrs); k != count || err != nil {
		t.Fatalf("PostSend took %d of %d: %v", k, count, err)
	}
	var wcs [8]rdma.WC
	for next := uint64(0); next < uint64(count); {
		for _, wc := range wcs[:p.cq.Poll(wcs[:])] {
			if wc.ID != next || wc.Status != driver.Success {
				t.Fatalf("WC %+v, want that of WR %d", wc, next)
			}
			next++
		}
	}
	for i := range wrs {
		if v := wrs[i].Value; v.N != n || !bytes.Equal(v.Bytes, far.Bytes()[8:8+n]) {
			t.Fatalf("READ %d of %d bytes: N %d, or bytes differ", i, n, v.N)
		}
	}
	return p.dev.Registrations() - were
}

// Memory for Values of no Arena is registered in slabs, which are bounded and serve all lengths. It goes with the QPs.
func TestSlabs(t *testing.T) {
	p := newPair(t, sim.Options{SGEs: 3})
	local, far := p.local(t), p.far(t, 4<<20)
	for i := range far.Bytes() {
		far.Bytes()[i] = byte(i) ^ byte(i>>9)
	}
	const slab = 2 << 20
	for _, c := range []struct {
		what     string
		count, n int
		want     uint64
	}{
		{"as long as a slab", 3, slab, 3},
		{"the same again", 3, slab, 0},
		{"32 in a slab", 96, 64 << 10, 0},
		{"4 in a slab", 12, 65<<10 + 1, 0},
		{"longer than a slab", 1, slab + 1, 0},
		{"more than three slabs' worth", 97, 10_000, 1},
		{"all slabs, and 8 alone", 40, slab, 28 + 8},
		{"the 8 anew", 40, slab, 8},
		{"short ones in the slabs of long ones", 200, 100, 0},
	} {
		if got := p.read(t, local, far, c.count, c.n); got != c.want {
			t.Errorf("%s: %d READs of %d bytes registered memory %d times, want %d", c.what, c.count, c.n, got, c.want)
		}
	}
	if err := p.qp.Close(); err != nil {
		t.Fatal(err)
	}
	for _, mr := range []*rdma.MR{local, far, p.mr} {
		if err := mr.Deregister(); err != nil {
			t.Fatal(err)
		}
	}
	if err := p.pd.Dealloc(); err != nil {
		t.Errorf("slabs stayed: %v", err)
	}
}

// Detach of a Value that an adapter does not give back ends the queue pair, and then nothing comes.
func TestDetachEndsStuckQP(t *testing.T) {
	p := newPair(t, sim.Options{SGEs: 3, Manual: true, ReadPieces: 4})
	local, far := p.local(t), p.far(t, 4096)
	mem := make([]byte, 2048)
	a, err := p.pd.RegArena(mem)
	if err != nil {
		t.Fatal(err)
	}
	v := &rdma.Value{Bytes: mem[:1000]}
	w := rdma.WR{ID: 5, Op: rdma.OpRead, Local: local.Bytes()[:8], LKey: local.LKey(), RemoteAddr: far.Base(),
		RKey: far.RKey(), Value: v}
	if n, err := p.qp.PostSend([]rdma.WR{w}); n != 1 || err != nil {
		t.Fatal(n, err)
	}
	if err := p.fab.Fire(p.fab.Events()[0]); err != nil { // a piece of it comes, and no more
		t.Fatal(err)
	}
	v.Detach()
	if s := p.qp.State(); s != driver.StateClosed {
		t.Errorf("state %d, want closed", s)
	}
	for i := range mem {
		mem[i] = 7
	}
	for evs := p.fab.Events(); len(evs) > 0; evs = p.fab.Events() {
		if err := p.fab.Fire(evs[0]); err != nil {
			t.Fatal(err)
		}
	}
	var wcs [2]rdma.WC
	if n := p.cq.Poll(wcs[:]); n != 1 || wcs[0].ID != 5 || wcs[0].Status != driver.WRFlushErr {
		t.Errorf("WCs %+v, want that of the READ", wcs[:n])
	}
	if bytes.Count(mem, []byte{7}) != len(mem) {
		t.Error("bytes came after Detach")
	}
	if err := a.Deregister(); err != nil {
		t.Error(err)
	}
}
