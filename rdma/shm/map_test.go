package shm

import (
	"errors"
	"runtime/debug"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/rdmatest"
)

// mappings are how many memfds of others the device has mapped for reading alone with a descriptor.
func mappings(d *rdma.Device) (n int) {
	x := d.Driver().(*Device)
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, m := range x.mu.maps {
		if m.fd >= 0 {
			n++
		}
	}
	return n
}

// writes reports whether a byte can be written to.
func writes(b []byte) (ok bool) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() { ok = recover() == nil }()
	b[0] = 1
	return true
}

// TestMap: two connections share one mapping, which nobody can write to, nor who gets its descriptor. It goes with the
// last of those who use it.
func TestMap(t *testing.T) {
	active := open(t)
	e := rdmatest.NewEnv(t, rdmatest.Harness{Passive: open(t), Active: active, Addr: "@kvd-" + t.TempDir()})
	a, b := e.Dial(), e.Dial()
	mr, revoke := e.Region(e.PD, 8192, rdmatest.All)
	mr.Bytes()[4096] = 7
	var ms []*rdma.Mapping
	for _, l := range []*rdmatest.Lane{a, b, a, b} {
		m, err := l.QP.Map(mr.RKey(), 4096, 64)
		e.Must(err)
		ms = append(ms, m)
	}
	if n := a.QP.Counters().Mapped + b.QP.Counters().Mapped; n != 1 || mappings(active) != 1 {
		t.Fatalf("%d mappings were made, %d are there, want 1", n, mappings(active))
	}
	if writes(ms[0].Bytes) || mr.Bytes()[4096] != 7 || !writes(mr.Bytes()) {
		t.Error("a mapping can be written to")
	}
	m := ms[0]
	for _, prot := range []int{unix.PROT_READ, unix.PROT_READ | unix.PROT_WRITE} {
		v, err := unix.Mmap(m.FD, 0, 8192, prot, unix.MAP_SHARED)
		switch {
		case prot&unix.PROT_WRITE != 0 && !errors.Is(err, unix.EACCES):
			t.Errorf("mapped for writing: %v", err)
		case prot == unix.PROT_READ && (err != nil || v[m.Off] != 7):
			t.Errorf("mapped for reading: %v", err)
		}
		if err == nil {
			e.Must(unix.Munmap(v))
		}
	}
	e.Must(revoke())
	other := e.Memory(64, rdmatest.All)
	for _, l := range []*rdmatest.Lane{a, b} {
		e.Must(l.OK(l.Read(other, 0, l.Word()))) // they forget the region
	}
	for i, m := range ms {
		if mappings(active) != 1 || len(m.Bytes) != 64 || m.Bytes[0] != 7 && m.Bytes[0] != 0 {
			t.Fatalf("%d released: %d mappings", i, mappings(active))
		}
		m.Release()
	}
	if n := mappings(active); n != 0 {
		t.Errorf("%d mappings are left", n)
	}
}
