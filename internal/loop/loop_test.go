package loop

import (
	"log/slog"
	"net"
	"path/filepath"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/testutil"
)

// talker reads a byte at a time until it is to end, and answers nothing.
type talker struct {
	link  Link
	ends  atomic.Bool
	reads atomic.Int64
	peer  net.Conn
	left  chan error // Enter has returned it
}

func (c *talker) Link() *Link { return &c.link }
func (c *talker) Moved(int)   {}
func (c *talker) Read(bool) error {
	n := 1
	if c.ends.Load() {
		n = 1 << 20
	}
	_, err := c.link.Read(make([]byte, n))
	if err == nil {
		c.reads.Add(1)
	}
	return err
}
func (c *talker) Lookups() (client.API, int, int) { return nil, 0, 0 }
func (c *talker) Ask([]client.Op)                 {}
func (c *talker) Found([]client.Op)               {}
func (c *talker) Finish() (int, error)            { return 1, nil }
func (c *talker) Tick(time.Time)                  {}

// twoLoops has two loops, and n connections that have entered them.
func twoLoops(t *testing.T, n int) (s *Loops, cs []*talker) {
	t.Helper()
	was := runtime.GOMAXPROCS(4)
	t.Cleanup(func() { runtime.GOMAXPROCS(was) })
	s = &Loops{Context: t.Context(), Logger: slog.New(slog.DiscardHandler)}
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for range n {
		c := &talker{left: make(chan error, 1)}
		if c.peer, err = net.Dial("unix", l.Addr().String()); err != nil {
			t.Fatal(err)
		}
		nc, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		c.link.Init(c, s, nc, 1)
		go func() { c.left <- c.link.Enter() }()
		cs = append(cs, c)
	}
	testutil.Until(t, "all are in loops", func() bool { return s.Conns() == n })
	t.Cleanup(func() {
		for _, c := range cs {
			c.ends.Store(true)
			c.link.Kill()
			if err := <-c.left; err == nil {
				t.Error("a killed connection left its loop without an error")
			}
			c.link.Kill() // outside
			c.peer.Close()
		}
		if n := s.Conns(); n != 0 {
			t.Errorf("%d connections are left in loops", n)
		}
		s.Close()
	})
	return s, cs
}

// TestLoopsByProcessors: a single processor is left to goroutines, and two may both be for loops.
func TestLoopsByProcessors(t *testing.T) {
	was := runtime.GOMAXPROCS(0)
	t.Cleanup(func() { runtime.GOMAXPROCS(was) })
	for _, c := range []struct{ processors, loops, shared int }{{1, 0, 0}, {2, 2, 1}, {3, 2, 1}, {4, 2, 2}, {9, 4, 4}} {
		runtime.GOMAXPROCS(c.processors)
		s := &Loops{Context: t.Context(), Logger: slog.New(slog.DiscardHandler)}
		s.makeLoops()
		if len(s.all) != c.loops || s.plan.shared != c.shared {
			t.Errorf("%d processors: %d loops, %d beside others, want %d and %d", c.processors, len(s.all),
				s.plan.shared, c.loops, c.shared)
		}
		s.Close()
	}
}

// TestOneLoopFirst: connections that leave a loop time to wait share it.
func TestOneLoopFirst(t *testing.T) {
	s, _ := twoLoops(t, 10)
	if n, m := s.all[0].conns(), s.all[1].conns(); n != 10 || m != 0 {
		t.Errorf("the loops have %d and %d connections, want 10 and 0", n, m)
	}
}

// TestSaturatedLoop: a loop that always has something to do gives connections to another, which serves them. Two such
// have as many as each other, until the first has time for all.
func TestSaturatedLoop(t *testing.T) {
	s, cs := twoLoops(t, 4)
	s.all[0].mu.Lock() // which the loop takes before it looks at the plan
	s.plan.gain = 0
	s.all[0].mu.Unlock()
	var few atomic.Bool
	for _, c := range cs {
		go func() {
			pace := time.NewTicker(time.Millisecond)
			defer pace.Stop()
			for b := make([]byte, 64<<10); ; { // until it is killed
				if few.Load() {
					b = b[:1]
					<-pace.C
				}
				if _, err := c.peer.Write(b); err != nil {
					return
				}
			}
		}()
	}
	testutil.Until(t, "both have as many", func() bool { return s.all[0].conns() == 2 && s.all[1].conns() == 2 })
	for _, c := range cs {
		before := c.reads.Load()
		testutil.Until(t, "every connection is served", func() bool { return c.reads.Load() > before })
	}
	few.Store(true)
	testutil.Until(t, "the first has all", func() bool { return s.all[0].conns() == 4 && s.all[1].conns() == 0 })
}
