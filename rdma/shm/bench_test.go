package shm

import (
	"context"
	"fmt"
	"testing"

	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/driver"
	"github.com/kvd-project/kvd/rdma/rdmatest"
)

// bench runs post, then polls one WC, b.N times on a lane.
func bench(b *testing.B, bytes int, chain func(l *rdmatest.Lane, mr *rdma.MR) []rdma.WR) {
	e := rdmatest.NewEnv(b, rdmatest.Harness{Passive: open(b), Active: open(b), Addr: "@kvd-" + b.TempDir()})
	l, mr := e.DialWith(4<<20, nil), e.Memory(4<<20, rdmatest.All)
	wrs := chain(l, mr)
	var wcs [4]rdma.WC
	b.SetBytes(int64(bytes))
	b.ReportAllocs()
	for b.Loop() {
		if n, err := l.QP.PostSend(wrs); n != len(wrs) || err != nil {
			b.Fatal(n, err)
		}
		if l.CQ.Poll(wcs[:]) != 1 || wcs[0].Status != driver.Success {
			b.Fatal(wcs[0])
		}
	}
}

// A cached GET: slot word and record, one WC.
func BenchmarkReadChain(b *testing.B) {
	bench(b, 136, func(l *rdmatest.Lane, mr *rdma.MR) []rdma.WR {
		slot := l.Read(mr, 64, l.Buf(8))
		slot.Flags = 0
		return []rdma.WR{slot, l.Read(mr, 4096, l.Buf(128))}
	})
}

// The same through driver.QP, without package rdma's checks and counters.
func BenchmarkReadChainDriver(b *testing.B) {
	d, err := Open(Options{})
	if err != nil {
		b.Fatal(err)
	}
	must := func(err error) {
		if err != nil {
			b.Fatal(err)
		}
	}
	pd, err := d.AllocPD()
	must(err)
	cq, err := d.CreateCQ(16)
	must(err)
	m, err := d.Alloc(1<<20, driver.AllocOptions{Shared: true})
	must(err)
	mr, err := pd.RegMR(m, 0, 1<<20, rdmatest.All)
	must(err)
	ln, err := d.Listen("@kvd-"+b.TempDir(), driver.ListenOptions{
		Accept: func(driver.ConnRequest) (driver.PD, driver.Access, error) { return pd, rdmatest.All, nil },
	})
	must(err)
	qp, err := d.Dial(context.Background(), driver.DialRequest{PD: pd, CQ: cq, Addr: ln.Addr()})
	must(err)
	wrs := []driver.WR{
		{Op: driver.OpRead, Local: m.Bytes[:8], LKey: mr.LKey(), RemoteAddr: 64, RKey: mr.RKey()},
		{Op: driver.OpRead, Flags: driver.Signaled, Local: m.Bytes[64:192], LKey: mr.LKey(), RemoteAddr: 4096,
			RKey: mr.RKey()},
	}
	var wcs [4]driver.WC
	b.ReportAllocs()
	for b.Loop() {
		if n, err := qp.PostSend(wrs); n != 2 || err != nil {
			b.Fatal(n, err)
		}
		if cq.Poll(wcs[:]) != 1 {
			b.Fatal("no WC")
		}
	}
	must(qp.Close())
	must(ln.Close())
	must(mr.Deregister())
	must(m.Free())
	must(cq.Close())
	must(pd.Dealloc())
	must(d.Close())
}

// The record WRITE and slot CAS of an UPDATE, unsignaled but for the CAS.
func BenchmarkWriteCASChain(b *testing.B) {
	bench(b, 136, func(l *rdmatest.Lane, mr *rdma.MR) []rdma.WR {
		record := l.Write(mr, 4096, l.Buf(128))
		record.Flags = 0
		return []rdma.WR{record, l.CAS(mr, 64, l.Word(), 0, 0)}
	})
}

func BenchmarkFetchAdd(b *testing.B) {
	bench(b, 8, func(l *rdmatest.Lane, mr *rdma.MR) []rdma.WR { return []rdma.WR{l.Add(mr, 64, l.Word(), 1)} })
}

func BenchmarkRead(b *testing.B) {
	for _, n := range []int{8, 64, 256, 512, 1024, 4096, 65536, 1 << 20} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			bench(b, n, func(l *rdmatest.Lane, mr *rdma.MR) []rdma.WR { return []rdma.WR{l.Read(mr, 0, l.Buf(n))} })
		})
	}
}

func BenchmarkWrite(b *testing.B) {
	for _, n := range []int{8, 64, 256, 512, 1024, 4096, 65536, 1 << 20} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			bench(b, n, func(l *rdmatest.Lane, mr *rdma.MR) []rdma.WR { return []rdma.WR{l.Write(mr, 0, l.Buf(n))} })
		})
	}
}

// BenchmarkReadValue has the bytes and their CRC, in memory of no MR.
func BenchmarkReadValue(b *testing.B) {
	for _, n := range []int{65536, 1 << 20, 3 << 20} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			v := &rdma.Value{Bytes: make([]byte, n), Start: func([]byte) (int, uint32) { return n, 0 }}
			bench(b, n, func(l *rdmatest.Lane, mr *rdma.MR) []rdma.WR {
				r := l.Read(mr, 0, l.Buf(32))
				r.Value = v
				return []rdma.WR{r}
			})
		})
	}
}

// BenchmarkWriteValue is the same of a WRITE.
func BenchmarkWriteValue(b *testing.B) {
	for _, n := range []int{65536, 1 << 20, 3 << 20} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			v := &rdma.Value{Bytes: make([]byte, n), Seal: func([]byte, uint32) {}}
			bench(b, n, func(l *rdmatest.Lane, mr *rdma.MR) []rdma.WR {
				w := l.Write(mr, 0, l.Buf(32))
				w.Value = v
				return []rdma.WR{w}
			})
		})
	}
}
