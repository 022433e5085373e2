package shm

import (
	"runtime"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/rdmatest"
)

// A long WRITE takes a fault for many pages of memory that its process has not touched, and none the second time.
func TestLongWritesPopulate(t *testing.T) {
	const n = 4<<20 + 12345
	page := unix.Getpagesize()
	b, err := unix.Mmap(-1, 0, page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	err = unix.Madvise(b, unix.MADV_POPULATE_READ)
	_ = unix.Munmap(b)
	if err != nil {
		t.Skipf("the kernel does not populate: %v", err)
	}
	e := rdmatest.NewEnv(t, rdmatest.Harness{Passive: open(t), Active: open(t), Addr: "@kvd-" + t.TempDir()})
	l, mr := e.Dial(), e.Memory(8<<20, rdmatest.All)
	rdmatest.Fill(mr.Bytes(), 1) // the memory node has all pages
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	faults := func(off uint64, v *rdma.Value) int64 {
		t.Helper()
		var before, after unix.Rusage
		e.Must(unix.Getrusage(unix.RUSAGE_THREAD, &before))
		w := l.Write(mr, off, l.Word())
		w.Value = v
		e.Must(l.OK(w))
		e.Must(unix.Getrusage(unix.RUSAGE_THREAD, &after))
		return after.Minflt - before.Minflt
	}
	v := &rdma.Value{Bytes: make([]byte, n), Seal: func([]byte, uint32) {}}
	rdmatest.Fill(v.Bytes, 7)
	first, second := faults(8, v), faults(8, v)
	if pages := int64(n / page); first > pages/2 || second > pages/16 {
		t.Errorf("a WRITE to %d pages takes %d faults, and %d the second time", pages, first, second)
	}
	rdmatest.Fill(v.Bytes, 8)
	faults(uint64(len(mr.Bytes())-n-8), v) // up to the end of the region
	for i, b := range mr.Bytes()[len(mr.Bytes())-n:] {
		if b != 8 {
			t.Fatalf("byte %d is %d", i, b)
		}
	}
}

// Each part of a mapping is populated once, whoever writes there.
func TestPopulateOnce(t *testing.T) {
	const all = 200
	m := &mapping{populated: granules(all*granuleBytes - 1)}
	var wg sync.WaitGroup
	var claimed [4][all]bool
	for g := range claimed {
		wg.Go(func() {
			for i := range uintptr(all) {
				claimed[g][i] = m.claim(i)
			}
		})
	}
	wg.Wait()
	for i := range all {
		n := 0
		for g := range claimed {
			if claimed[g][i] {
				n++
			}
		}
		if n != 1 {
			t.Fatalf("granule %d was claimed %d times", i, n)
		}
	}
}
