package shm

import (
	"bytes"
	"runtime"
	"testing"

	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/driver"
	"github.com/kvd-project/kvd/rdma/rdmatest"
)

// atBlock has f run in the middle of a WR's Value, before block n of it.
func atBlock(t *testing.T, n int, f func()) {
	t.Helper()
	seen := 0
	between = func() {
		if seen == n {
			f()
		}
		seen++
	}
	t.Cleanup(func() { between = nil })
}

// valueWRs are a READ and a WRITE of several blocks, and what of the Value and of the region they have filled.
func valueWRs(l *rdmatest.Lane, mr *rdma.MR, n int) map[string]rdma.WR {
	r, w := l.Read(mr, 0, l.Word()), l.Write(mr, 0, l.Word())
	for _, x := range []*rdma.WR{&r, &w} {
		x.Value = &rdma.Value{Bytes: make([]byte, n)}
	}
	w.Value.Seal = func([]byte, uint32) {}
	r.Value.Start = func([]byte) (int, uint32) { return n, 0 }
	return map[string]rdma.WR{"READ": r, "WRITE": w}
}

// TestValueAtEveryBlock bars the connection, or detaches the Value, before each block: nothing is moved from there on.
func TestValueAtEveryBlock(t *testing.T) {
	const blocks, n = 4, 3*blockBytes + 4096
	for block := range blocks {
		for _, op := range []string{"READ", "WRITE"} {
			e := rdmatest.NewEnv(t, rdmatest.Harness{Passive: open(t), Active: open(t), Addr: "@kvd-" + t.TempDir()})
			l, mr := e.Dial(), e.Memory(n+8, rdmatest.All)
			wr := valueWRs(l, mr, n)[op]
			to, from := wr.Value.Bytes, mr.Bytes()[8:8+n]
			if op == "WRITE" {
				to, from = from, to
			}
			rdmatest.Fill(from, 1)
			var done chan error
			atBlock(t, block, func() {
				// The fence is over when PostSend is, but the bar is there at once.
				done = make(chan error, 1)
				go func() { done <- e.Peers()[0].Fence(e.Ctx()) }()
				for l.QP.State() == driver.StateRTS {
					runtime.Gosched()
				}
			})
			wcs, err := l.Do(wr)
			e.Must(err)
			e.Must(<-done)
			if wcs[0].Status != driver.WRFlushErr {
				t.Fatalf("%s fenced before block %d: %v", op, block, wcs[0].Status)
			}
			if got := bytes.Count(to, []byte{1}); got != block*blockBytes {
				t.Fatalf("%s fenced before block %d has moved %d bytes", op, block, got)
			}
			if op == "WRITE" && mr.Bytes()[0] != 0 {
				t.Fatal("Local of a WRITE that was fenced has landed")
			}

			atBlock(t, block, func() {
				wr.Value.Detach()
				if op == "WRITE" {
					rdmatest.Fill(from, 3)
				}
			})
			l = e.Dial()
			wr = valueWRs(l, mr, n)[op]
			to, from = wr.Value.Bytes, mr.Bytes()[8:8+n]
			if op == "WRITE" {
				to, from = from, to
			}
			rdmatest.Fill(from, 2)
			e.Must(l.OK(wr))
			want := block * blockBytes
			if op == "WRITE" {
				want = n
			}
			if got := bytes.Count(to, []byte{2}); got != want {
				t.Fatalf("%s detached before block %d has moved %d bytes, want %d", op, block, got, want)
			}
		}
	}
}

// TestPostAllocatesNothing posts READs and WRITEs, without Values and with them.
func TestPostAllocatesNothing(t *testing.T) {
	e := rdmatest.NewEnv(t, rdmatest.Harness{Passive: open(t), Active: open(t), Addr: "@kvd-" + t.TempDir()})
	l, mr := e.Dial(), e.Memory(1<<20, rdmatest.All)
	chain := []rdma.WR{l.Read(mr, 0, l.Buf(64)), l.Write(mr, 64, l.Buf(64))}
	for _, x := range valueWRs(l, mr, 100_000) {
		chain = append(chain, x)
	}
	for i := range chain {
		one := chain[i : i+1]
		var wcs [1]rdma.WC
		if got := testing.AllocsPerRun(100, func() {
			if n, err := l.QP.PostSend(one); n != 1 || err != nil {
				t.Fatal(n, err)
			}
			if l.CQ.Poll(wcs[:]) != 1 || wcs[0].Status != driver.Success {
				t.Fatal(wcs[0])
			}
		}); got != 0 {
			t.Errorf("WR %d: %v allocations", i, got)
		}
	}
}
