package verbperf

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvd-project/kvd/internal/loopback"
	"github.com/kvd-project/kvd/internal/providers"
	"github.com/kvd-project/kvd/rdma"
)

// pair is a passive side in this process and a connection to it.
func pair(t *testing.T, provider string, limit time.Duration) (*Passive, *Conn, <-chan error) {
	t.Helper()
	open := func() *rdma.Device {
		d, err := providers.Open(provider, providers.Options{})
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	s, err := Listen(open(), map[string]string{"shm": "@kvctl-perf-test-" + t.Name()}[provider])
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("close passive side: %v", err)
		}
	})
	failed := make(chan error, 1)
	s.Limit, s.Failed = limit, func(err error) { failed <- err }
	dev := open()
	p, err := Dial(t.Context(), dev, s.To())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(p.Close(), dev.Close()); err != nil {
			t.Errorf("close active side: %v", err)
		}
	})
	return s, p, failed
}

func TestParsePing(t *testing.T) {
	const rest = "0x1 0x10 secret"
	for _, c := range []struct{ provider, remote, private, want string }{
		{"shm", "pid 1 uid 0", "64 @kvctl-perf-x " + rest, ""},
		{"tcp", "10.0.0.1:7", "8 10.0.0.1:9 " + rest, ""},
		{"tcp", "[::ffff:10.0.0.1]:7", "4194304 10.0.0.1:9 " + rest, ""},
		{"verbs", "[fd00::1]:7", "8 [fd00::1]:9 " + rest, ""},
		{"shm", "", "64 /run/other.sock " + rest, "@kvctl-perf-"},
		{"tcp", "10.0.0.1:7", "8 10.0.0.2:9 " + rest, "is not of 10.0.0.1:7"},
		{"tcp", "pid 1 uid 0", "8 10.0.0.2:9 " + rest, "is not of pid 1"},
		{"tcp", "10.0.0.1:7", "8 localhost:9 " + rest, "IP:PORT"},
		{"shm", "", "7 @kvctl-perf-x " + rest, "8 to 4194304"},
		{"shm", "", "4194305 @kvctl-perf-x " + rest, "8 to 4194304"},
		{"shm", "", "-8 @kvctl-perf-x " + rest, "8 to 4194304"},
		{"shm", "", "x @kvctl-perf-x " + rest, "8 to 4194304"},
		{"shm", "", "8 @kvctl-perf-x y 0 secret", "rkey"},
		{"shm", "", "8 @kvctl-perf-x 0 0x10000000000000000 secret", "base"},
		{"shm", "", "8 @kvctl-perf-x 0 0 ", "want BYTES"},
		{"shm", "", "8 @kvctl-perf-x 0 0", "want BYTES"},
		{"shm", "", "8 @kvctl-perf-x 0 0 secret more", "want BYTES"},
		{"shm", "", "", "want BYTES"},
	} {
		g, err := parsePing(pingPrefix+c.private, c.provider, c.remote)
		switch {
		case c.want == "" && (err != nil || g.String() != ping{g.bytes, g.addr, 1, 16, "secret"}.String()):
			t.Errorf("%q: %+v, %v", c.private, g, err)
		case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)):
			t.Errorf("%q: %v, want %q in it", c.private, err, c.want)
		}
	}
}

// A passive side says what it cannot do, and which versions it knows.
func TestRefuses(t *testing.T) {
	_, p, _ := pair(t, "shm", 10*time.Second)
	for private, want := range map[string]string{
		"":                       "not kvctl perf",
		"GET / HTTP/1.1":         "not kvctl perf",
		"kvctl perf 3 ping":      "versions 1 and 2",
		"kvctl perf 1 more":      "versions 1 and 2",
		pingPrefix + "nonsense":  "want BYTES",
		pongPrefix + "AAAAAAAAA": "versions 1 and 2",
	} {
		_, err := p.dev.Dial(t.Context(), p.pd, p.cq, p.addr, []byte(private))
		if !errors.Is(err, rdma.ErrRefused) || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want it refused with %q", private, err, want)
		}
	}
}

// dialBack listens for the passive side of a ping-pong, lets it in and is then
// silent. It returns what to ask the passive side for.
func dialBack(t *testing.T, p *Conn) ping {
	t.Helper()
	l, err := p.dev.Listen(shmPingpong+t.Name(),
		rdma.ListenOptions{Accept: func(rdma.ConnRequest) (*rdma.PD, rdma.Access, error) {
			return p.pd, rdma.AccessRemoteWrite, nil
		}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return ping{64, l.Addr(), 1, 0, "secret"}
}

func TestPingpongAlone(t *testing.T) {
	s, p, failed := pair(t, "shm", time.Minute)
	g := dialBack(t, p)
	qp, err := p.dev.Dial(t.Context(), p.pd, p.cq, p.addr, []byte(g.String()))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.dev.Dial(t.Context(), p.pd, p.cq, p.addr, []byte(g.String())); !errors.Is(err, rdma.ErrRefused) ||
		!strings.Contains(err.Error(), "under way") {
		t.Errorf("a second one: %v", err)
	}
	// The passive side stops when the connection does, long before its limit.
	if err := qp.Close(); err != nil {
		t.Fatal(err)
	}
	s.echoes.Wait()
	select {
	case err := <-failed:
		t.Errorf("an end like any other is reported: %v", err)
	default:
	}
}

// An active side that falls silent does not keep a processor busy for ever, nor
// one that cannot be reached.
func TestPingpongGivesUp(t *testing.T) {
	_, p, failed := pair(t, "shm", 50*time.Millisecond)
	g := dialBack(t, p)
	for addr, want := range map[string]string{g.addr: "message 1", shmPingpong + "nobody": "connect back"} {
		g.addr = addr
		qp, err := p.dev.Dial(t.Context(), p.pd, p.cq, p.addr, []byte(g.String()))
		if err != nil {
			t.Fatal(err)
		}
		select {
		case err := <-failed:
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %v, want %q in it", addr, err, want)
			}
		case <-time.After(30 * time.Second):
			t.Fatalf("%s: the passive side goes on", addr)
		}
		if err := qp.Close(); err != nil {
			t.Error(err)
		}
	}
}

// Nobody but the passive side that was asked is let in, and the wait for it ends.
func TestPingpongNobodyComes(t *testing.T) {
	_, p, _ := pair(t, "tcp", 10*time.Second)
	var err error
	if p.Home, err = loopback.Free(); err != nil {
		t.Fatal(err)
	}
	// A passive side that accepts everything and never connects back.
	refused := make(chan error, 1)
	mute, err := p.dev.Listen("127.0.0.1:0",
		rdma.ListenOptions{Accept: func(r rdma.ConnRequest) (*rdma.PD, rdma.Access, error) {
			go func() {
				_, err := p.dev.Dial(t.Context(), p.pd, p.cq, p.Home, []byte(pongPrefix+"guess"))
				refused <- err
			}()
			return p.pd, 0, nil
		}})
	if err != nil {
		t.Fatal(err)
	}
	p.addr = mute.Addr()
	_, err = p.pingpong(t.Context(), Case{Op: rdma.OpWrite, PingPong: true, Bytes: 8, Iters: 10, Depth: 1},
		300*time.Millisecond)
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "did not connect back") {
		t.Errorf("%v, want that it did not connect back", err)
	}
	if err := <-refused; !errors.Is(err, rdma.ErrRefused) {
		t.Errorf("a stranger: %v, want it refused", err)
	}
	if err := mute.Close(); err != nil {
		t.Error(err)
	}
}

func TestLatency(t *testing.T) {
	_, p, _ := pair(t, "shm", 10*time.Second)
	for _, iters := range []int{1, 10, len(p.stamps), 10_001} {
		n := 0
		h, err := p.latency(iters, func() error { n++; return nil })
		if err != nil || n != iters+iters/10 || h.TotalCount() != int64(iters) {
			t.Errorf("%d iterations: %d runs, %d recorded, %v", iters, n, h.TotalCount(), err)
		}
	}
	if p.used.cpu <= 0 {
		t.Errorf("10,001 runs used %+v", p.used)
	}
	want := errors.New("broken")
	if _, err := p.latency(5, func() error { return want }); !errors.Is(err, want) {
		t.Errorf("got %v", err)
	}
	one := p.chain(Case{Op: rdma.OpRead, Bytes: 64}, 1, 0)
	if n := testing.AllocsPerRun(100, func() {
		if _, err := p.qp.PostSend(one); err != nil {
			t.Error(err)
		}
		if err := p.wait(t.Context(), time.Minute); err != nil {
			t.Error(err)
		}
	}); n != 0 {
		t.Errorf("%v allocations a verb", n)
	}
}

// A wait for what never comes ends, both while it polls and while it sleeps.
func TestWaitEnds(t *testing.T) {
	_, p, _ := pair(t, "shm", 10*time.Second)
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	for _, spin := range []time.Duration{0, time.Millisecond} {
		p.spin = spin
		if err := p.wait(t.Context(), time.Millisecond); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("spin %v: %v, want the deadline", spin, err)
		}
		if err := p.wait(gone, time.Minute); !errors.Is(err, context.Canceled) {
			t.Errorf("spin %v: %v, want canceled", spin, err)
		}
	}
}

func TestHome(t *testing.T) {
	for _, c := range []struct{ provider, addr, want string }{ // want "": an error
		{"shm", "@x", shmPingpong}, {"tcp", "127.0.0.1:1", "127.0.0.1:0"}, {"verbs", "[::1]:1", "[::1]:0"},
		{"tcp", "127.0.0.1", ""},
	} {
		home, local, err := Home(c.provider, c.addr)
		if (c.want == "") != (err != nil) || !strings.HasPrefix(home, c.want) || local != (err == nil) {
			t.Errorf("%s %s: %q, local %v, %v; want %q", c.provider, c.addr, home, local, err, c.want)
		}
	}
}

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }
