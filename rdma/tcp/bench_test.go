package tcp

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"runtime"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/internal/testutil"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/driver"
	"github.com/kvd-project/kvd/rdma/rdmatest"
)

// get posts {READ 8 B; READ 128 B}, a cached GET, and waits for the second.
func get(tb testing.TB, l *rdmatest.Lane, wrs []rdma.WR, wcs []rdma.WC) {
	if _, err := l.QP.PostSend(wrs); err != nil {
		tb.Fatal(err)
	}
	for l.CQ.Poll(wcs) == 0 {
		if !(l.E.H.Wait && l.CQ.Wait(rdmatest.Patience)) {
			<-l.CQ.Ready()
		}
	}
	if wcs[0].Status != 1 {
		tb.Fatal(wcs[0])
	}
}

func cachedGet(e *rdmatest.Env) (*rdmatest.Lane, []rdma.WR) {
	mr := e.Memory(4096, rdmatest.All)
	l := e.Dial()
	wrs := []rdma.WR{l.Read(mr, 0, l.Word()), l.Read(mr, 64, l.Buf(128))}
	wrs[0].Flags = 0
	return l, wrs
}

// BenchmarkDoorbell is a cached GET's round trip; compare BenchmarkEcho.
func BenchmarkDoorbell(b *testing.B) {
	for _, mode := range []string{"clear", "tls", "clear-waiting"} {
		b.Run(mode, func(b *testing.B) {
			var passive, active Options
			if strings.HasPrefix(mode, "tls") {
				passive, active = tlsOptions(b)
			}
			h := harness(b, passive, active)
			h.Wait = strings.HasSuffix(mode, "waiting")
			e := rdmatest.NewEnv(b, h)
			l, wrs := cachedGet(e)
			wcs := make([]rdma.WC, 4)
			b.ReportAllocs()
			before := e.Listener().CPUNanos()
			for b.Loop() {
				get(b, l, wrs, wcs)
			}
			b.ReportMetric(float64(e.Listener().CPUNanos()-before)/float64(b.N), "agent-ns/op")
		})
	}
}

// BenchmarkEcho is the floor: a bare request and reply of the doorbell's sizes
// over a TCP connection between two goroutines.
func BenchmarkEcho(b *testing.B) {
	const ask, answer = frameSize + 2*requestSize, 2*replySize + 8 + 128
	ln := testutil.Listen(b)
	done := make(chan struct{})
	go func() {
		defer close(done)
		c, err := ln.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		buf := make([]byte, answer)
		for {
			if _, err := io.ReadFull(c, buf[:ask]); err != nil {
				return
			}
			if _, err := c.Write(buf); err != nil {
				return
			}
		}
	}()
	c, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		b.Fatal(err)
	}
	buf := make([]byte, answer)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := c.Write(buf[:ask]); err != nil {
			b.Fatal(err)
		}
		if _, err := io.ReadFull(c, buf); err != nil {
			b.Fatal(err)
		}
	}
	c.Close()
	ln.Close()
	<-done
}

// BenchmarkBulk moves 1 MiB messages, 8 outstanding.
func BenchmarkBulk(b *testing.B) {
	const size, depth = 1 << 20, 8
	for _, op := range []rdma.Opcode{rdma.OpRead, rdma.OpWrite} {
		b.Run(op.String(), func(b *testing.B) {
			e := rdmatest.NewEnv(b, harness(b, Options{}, Options{}))
			mr := e.Memory(size*depth, rdmatest.All)
			l := e.DialWith(size*depth, nil)
			wrs := make([]rdma.WR, depth)
			for i := range wrs {
				wrs[i] = l.Read(mr, uint64(i*size), l.Buf(size))
				wrs[i].Op = op
			}
			wcs := make([]rdma.WC, depth)
			b.SetBytes(size * depth)
			for b.Loop() {
				if _, err := l.QP.PostSend(wrs); err != nil {
					b.Fatal(err)
				}
				for n := 0; n < depth; {
					k := l.CQ.Poll(wcs)
					if n += k; k == 0 {
						<-l.CQ.Ready()
					}
				}
			}
		})
	}
}

// BenchmarkWords is the copy between region and buffer.
func BenchmarkWords(b *testing.B) {
	for _, size := range []int{128, 4096, 256 << 10} {
		region, buf := make([]byte, size), make([]byte, size)
		for name, f := range map[string]func(){
			"load":  func() { loadWords(buf, region) },
			"store": func() { storeWords(region, buf) },
			"copy":  func() { copy(region, buf) },
		} {
			b.Run(fmt.Sprint(name, "/", size), func(b *testing.B) {
				b.SetBytes(int64(size))
				for b.Loop() {
					f()
				}
			})
		}
		runtime.KeepAlive(region)
	}
}

// endless is a stream whose peer says the same over and over.
type endless struct {
	script
	again []byte
}

func (s *endless) Read(p []byte) (int, error) {
	if len(s.in) == 0 {
		s.in = s.again
	}
	return s.script.Read(p)
}

func (s *endless) Write(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, io.ErrClosedPipe
	}
	return len(p), nil
}

// BenchmarkExecute is what an agent needs to execute cached GETs, without sockets:
// of one place and of places all over a region that no cache holds.
func BenchmarkExecute(b *testing.B) {
	for _, gets := range []int{1, 64} {
		for name, size := range map[string]int64{"warm": 4 << 10, "cold": 256 << 20} {
			b.Run(fmt.Sprintf("%s/%d", name, gets), func(b *testing.B) {
				d := open(b, Options{})
				p, err := d.AllocPD()
				if err != nil {
					b.Fatal(err)
				}
				m, err := d.Alloc(size, driver.AllocOptions{Name: "execute"})
				if err != nil {
					b.Fatal(err)
				}
				defer m.Free()
				for i := 0; i < len(m.Bytes); i += 4096 {
					m.Bytes[i] = 1
				}
				r, err := p.RegMR(m, 0, size, driver.AccessRemoteRead)
				if err != nil {
					b.Fatal(err)
				}
				rng := rand.New(rand.NewPCG(1, 2))
				s := &endless{script: script{step: 1 << 20}}
				const frames = 1000
				for range frames {
					var reqs [][]byte
					for range gets {
						reqs = append(reqs, requestOf(driver.OpRead, r.RKey(), rng.Uint64N(uint64(size)-8)&^7, 8),
							requestOf(driver.OpRead, r.RKey(), rng.Uint64N(uint64(size)-128)&^63, 128))
					}
					s.again = append(s.again, doorbellOf(reqs...)...)
				}
				a := newAgent(&listener{d: d.(*device)}, s, "execute")
				a.pd, a.access = p.(*pd), driver.AccessRemoteRead
				a.exec.Lock()
				for b.Loop() {
					h, err := a.need(frameSize)
					if err != nil {
						b.Fatal(err)
					}
					f, err := parseFrame(h)
					if err != nil {
						b.Fatal(err)
					}
					if err := a.await(f.length); err != nil {
						b.Fatal(err)
					}
					a.frame = f
					a.survey(agentOut)
					if err := a.perform(f.count); err != nil {
						b.Fatal(err)
					}
				}
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*gets), "ns/get")
			})
		}
	}
}
