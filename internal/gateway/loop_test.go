package gateway

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math"
	"net"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/client/clienttest"
	"github.com/kvd-project/kvd/internal/inside"
	"github.com/kvd-project/kvd/internal/loop/looptest"
	"github.com/kvd-project/kvd/internal/testutil"
)

// testCalm is Gateway.calm in these tests, where connections are in loops as soon as they can be.
var testCalm = 1

// TestWithoutLoops: connections that stay with their goroutines do the same.
func TestWithoutLoops(t *testing.T) {
	testCalm = math.MaxInt
	defer func() { testCalm = 1 }()
	for name, f := range map[string]func(*testing.T){
		"commands": TestCommands, "every command": TestEveryCommand, "pipelines": TestPipelines,
		"incr":         TestIncrFromMany,
		"transactions": TestTransactions, "auth": TestAuth, "kill": TestClientKillAndList,
		"close":  TestCloseAnswersNobody,
		"floods": TestFloods, "reader stops": TestReaderStops, "write before read": TestWriteBeforeRead,
		"idle":        TestIdleTimeout,
		"allocations": TestAllocations,
	} {
		t.Run(name, f)
	}
}

// twoProcessors: on one there are no loops.
func twoProcessors(t *testing.T) {
	if n := runtime.GOMAXPROCS(0); n < 2 {
		runtime.GOMAXPROCS(2)
		t.Cleanup(func() { runtime.GOMAXPROCS(n) })
	}
}

// looped makes n connections that are in loops.
func looped(t *testing.T, g *Gateway, network, addr string, n int) (ps []*peer) {
	t.Helper()
	before := g.loops.Conns()
	for range n {
		p := dial(t, network, addr)
		p.want(t, "+PONG\r\n", "PING")
		ps = append(ps, p)
	}
	testutil.Until(t, "the connections are in loops", func() bool { return g.loops.Conns() == before+n })
	return ps
}

// TestLoopGoesOn: an operation that waits keeps no other connection from being served.
func TestLoopGoesOn(t *testing.T) {
	twoProcessors(t)
	s := clienttest.New(clienttest.Options{})
	release, waits := make(chan struct{}), make(chan struct{}, 100)
	s.Fail(func(ctx context.Context, o *client.Op) clienttest.Fault {
		if bytes.HasPrefix(o.Key, []byte("slow")) {
			inside.WillWait(ctx)
			inside.WillWait(ctx) // again changes nothing
			waits <- struct{}{}
			<-release
		}
		return clienttest.Fault{}
	})
	addr, g := start(t, Options{Databases: []Database{{"default", s}}})
	ps := looped(t, g, "tcp", addr, 10)
	for i, p := range ps[:5] {
		p.send(t, []string{"SET", fmt.Sprint("slow", i), "1"})
		<-waits
		for j, q := range ps[5:] {
			q.want(t, "+OK\r\n", "SET", fmt.Sprint("k", j), fmt.Sprint(i))
			q.want(t, bulk(fmt.Sprint(i)), "GET", fmt.Sprint("k", j))
		}
	}
	// Two of those that wait go away, one is ended.
	ps[0].Close()
	ps[1].Close()
	ps[5].want(t, ":1\r\n", "CLIENT", "KILL", "ADDR", ps[2].LocalAddr().String())
	close(release)
	ps[2].closed(t)
	for i, p := range ps[3:5] {
		if got := string(p.reply(t)); got != "+OK\r\n" {
			t.Errorf("%q", got)
		}
		p.want(t, bulk("1"), "GET", fmt.Sprint("slow", 3+i))
	}
	testutil.Until(t, "the others are in loops again", func() bool {
		for _, p := range ps[3:] {
			p.want(t, "+PONG\r\n", "PING")
		}
		return g.loops.Conns() == 7 && g.srv.Conns() == 7
	})
}

// TestLoopLeft: what does not fit a loop leaves it, and comes back.
func TestLoopLeft(t *testing.T) {
	twoProcessors(t)
	addr, g := start(t, Options{Databases: fake(), Debug: true})
	for name, f := range map[string]func(p *peer){
		"a pipeline": func(p *peer) {
			p.Write(bytes.Repeat(encode("PING"), 20))
			for range 20 {
				p.reply(t)
			}
		},
		"a command that takes its time": func(p *peer) { p.do(t, "DEBUG", "SLEEP", "0.01") },
		"many keys": func(p *peer) {
			p.do(t, append([]string{"DEL"}, strings.Fields(strings.Repeat("a b c d ", 20))...)...)
		},
		"more replies than the socket takes": func(p *peer) {
			v := strings.Repeat("x", 1_000_000)
			p.want(t, "+OK\r\n", "SET", "big", v)
			for range 20 {
				before := g.m.read.Load()
				p.send(t, []string{"GET", "big"})
				testutil.Until(t, "it is read by itself", func() bool { return g.m.read.Load() > before })
			}
			for range 20 {
				if got := string(p.reply(t)); got != bulk(v) {
					t.Fatalf("%d bytes", len(got))
				}
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := looped(t, g, "tcp", addr, 1)[0]
			f(p)
			testutil.Until(t, "it comes back", func() bool {
				p.want(t, "+PONG\r\n", "PING")
				return g.loops.Conns() == 1
			})
			p.Close()
			testutil.Until(t, "it is forgotten", func() bool { return g.loops.Conns() == 0 && g.srv.Conns() == 0 })
		})
	}
}

// TestLoopEnds: however a connection in a loop ends, it gets what it is due, and is forgotten.
func TestLoopEnds(t *testing.T) {
	twoProcessors(t)
	s := clienttest.New(clienttest.Options{})
	s.Fail(func(ctx context.Context, o *client.Op) clienttest.Fault {
		switch string(o.Key) {
		case "panic":
			panic("of a test")
		case "late":
			inside.WillWait(ctx)
			panic("of a test, late")
		}
		return clienttest.Fault{}
	})
	addr, g := start(t, Options{Databases: []Database{{"default", s}}})
	other := looped(t, g, "tcp", addr, 1)[0]
	for name, f := range map[string]func(p *peer){
		"half closed": func(p *peer) {
			p.Write(bytes.Repeat(encode("PING"), 3))
			p.Conn.(*net.TCPConn).CloseWrite()
			if b, err := io.ReadAll(p.r); string(b) != "+PONG\r\n+PONG\r\n+PONG\r\n" || err != nil {
				t.Errorf("%q, %v", b, err)
			}
		},
		"in the middle of a command": func(p *peer) { p.Write([]byte("*2\r\n$3\r\nGE")); p.Close() },
		"reset":                      func(p *peer) { p.Conn.(*net.TCPConn).SetLinger(0); p.Close() },
		"reset before the reply": func(p *peer) {
			p.Write(bytes.Repeat(encode("ECHO", strings.Repeat("x", 10_000)), 3))
			p.Conn.(*net.TCPConn).SetLinger(0)
			p.Close()
		},
		"QUIT":           func(p *peer) { p.want(t, "+OK\r\n", "QUIT"); p.closed(t) },
		"protocol error": func(p *peer) { p.Write([]byte("*1\r\n:1\r\n")); p.reply(t); p.closed(t) },
		"killed": func(p *peer) {
			other.want(t, ":1\r\n", "CLIENT", "KILL", "ADDR", p.LocalAddr().String())
			p.closed(t)
		},
		"idle": func(p *peer) {
			other.want(t, "+OK\r\n", "CONFIG", "SET", "timeout", "1")
			p.closed(t)
			other.closed(t)
			// Not by the next one, which may be silent for a second until it is in a loop.
			q := dial(t, "tcp", addr)
			q.want(t, "+OK\r\n", "CONFIG", "SET", "timeout", "0")
			q.Close()
			testutil.Until(t, "they are forgotten", func() bool { return g.loops.Conns() == 0 && g.srv.Conns() == 0 })
			other = looped(t, g, "tcp", addr, 1)[0]
		},
		"panic":      func(p *peer) { p.send(t, []string{"GET", "panic"}); p.closed(t) },
		"late panic": func(p *peer) { p.send(t, []string{"GET", "late"}); p.closed(t) },
	} {
		t.Run(name, func(t *testing.T) {
			f(looped(t, g, "tcp", addr, 1)[0])
			testutil.Until(t, "it is forgotten", func() bool { return g.srv.Conns() == 1 })
			testutil.Until(t, "the other is served", func() bool {
				other.want(t, "+PONG\r\n", "PING")
				return g.loops.Conns() == 1
			})
		})
	}
}

// TestLoopClose: a Gateway ends though connections enter and leave loops.
func TestLoopClose(t *testing.T) {
	twoProcessors(t)
	for round := range 20 {
		g, err := New(Options{Databases: fake()})
		if err != nil {
			t.Fatal(err)
		}
		g.calm = 1
		l := testutil.Listen(t)
		done := make(chan error, 1)
		go func() { done <- g.Serve(l) }()
		var wg sync.WaitGroup
		for i := range 20 {
			c, err := net.Dial("tcp", l.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			wg.Go(func() {
				defer c.Close()
				b := make([]byte, 1000)
				for n := 0; ; n++ {
					if _, err := c.Write(bytes.Repeat(encode("PING"), 1+n%3*i)); err != nil {
						return
					}
					if _, err := c.Read(b); err != nil {
						return
					}
				}
			})
		}
		testutil.Until(t, "they have said something", func() bool { return g.m.read.Load() >= uint64(round)*2000 })
		g.Close()
		if err := <-done; err != nil {
			t.Error(err)
		}
		wg.Wait()
		if n := g.srv.Conns(); n != 0 {
			t.Errorf("%d connections are left", n)
		}
	}
}

// shared counts the operations that go to a store together.
type shared struct {
	*clienttest.Store
	most atomic.Int64 // in one Do
}

func (s *shared) Do(ctx context.Context, ops []client.Op) {
	s.most.Store(max(s.most.Load(), int64(len(ops))))
	s.Store.Do(ctx, ops)
}

// TestTurn: a turn of a loop looks up what all of its connections ask for at once, and whatever becomes of
// one of them, the others are answered.
func TestTurn(t *testing.T) {
	if n := runtime.GOMAXPROCS(2); n != 2 { // few connections stay in the first loop
		t.Cleanup(func() { runtime.GOMAXPROCS(n) })
	}
	for name, c := range map[string]struct{ ask, answer string }{
		"a lookup": {"*2\r\n$3\r\nGET\r\n$2\r\nk0\r\n", bulk("0")},
		"several": {"*2\r\n$3\r\nGET\r\n$2\r\nk0\r\n*3\r\n$4\r\nMGET\r\n$2\r\nk1\r\n$2\r\nno\r\n",
			bulk("0") + "*2\r\n" + bulk("1") + "$-1\r\n"},
		"many": {
			string(encode(append([]string{"EXISTS"}, strings.Fields(strings.Repeat("k0 k1 k2 k3 k4 ", 4))...)...)),
			":20\r\n"},
		"a long value": {"*2\r\n$3\r\nGET\r\n$4\r\nlong\r\n", bulk(looptest.Long)},
		"a lookup and a write": {
			"*2\r\n$3\r\nGET\r\n$2\r\nk0\r\n*3\r\n$3\r\nSET\r\n$1\r\nw\r\n$1\r\n1\r\n*2\r\n$3\r\nGET\r\n$1\r\nw\r\n",
			bulk("0") + "+OK\r\n" + bulk("1")},
		"a lookup that waits":  {"*2\r\n$3\r\nGET\r\n$4\r\nslow\r\n", ""},
		"a write that waits":   {"*3\r\n$3\r\nSET\r\n$4\r\nslow\r\n$1\r\n1\r\n", ""},
		"a lookup that panics": {"*2\r\n$3\r\nGET\r\n$5\r\npanic\r\n", ""},
		"a lookup in another place": {"*2\r\n$6\r\nSELECT\r\n$1\r\n1\r\n*2\r\n$3\r\nGET\r\n$2\r\nk0\r\n",
			"+OK\r\n$-1\r\n"},
		"half a command":            {"*2\r\n$3\r\nGET\r\n$2\r\nk0\r\n*2\r\n$3\r\nGE", bulk("0")},
		"no command":                {"*1\r\n:1\r\n", "-ERR Protocol error: expected '$', got ':'\r\n"},
		"a lookup and then no more": {"*2\r\n$3\r\nGET\r\n$2\r\nk0\r\n*1\r\n$4\r\nQUIT\r\n", bulk("0") + "+OK\r\n"},
		"a command that takes longer": {
			"*2\r\n$3\r\nGET\r\n$2\r\nk0\r\n*3\r\n$5\r\nDEBUG\r\n$5\r\nSLEEP\r\n$1\r\n0\r\n", bulk("0") + "+OK\r\n"},
	} {
		t.Run(name, func(t *testing.T) {
			stage := looptest.New(t.Context())
			s := &shared{Store: stage.Store}
			other := clienttest.New(clienttest.Options{})
			addr, g := start(t, Options{Databases: []Database{{"default", s}, {"other", other}}, Debug: true})
			// Bytes written to such a socket have arrived.
			sock := filepath.Join(t.TempDir(), "s")
			l, err := net.Listen("unix", sock)
			if err != nil {
				t.Fatal(err)
			}
			go g.Serve(l) //nolint:errcheck // Close ends it
			ps := looped(t, g, "unix", sock, 10)
			holder, odd, others := ps[0], ps[4], append(append([]*peer{}, ps[1:4]...), ps[5:]...)
			holder.send(t, []string{"GET", "hold"})
			<-stage.Held
			for i, p := range others {
				p.send(t, []string{"GET", fmt.Sprint("k", i)})
				if i == 3 {
					io.WriteString(odd, c.ask)
				}
			}
			s.most.Store(0)
			close(stage.Hold)
			for i, p := range others {
				if got := string(p.reply(t)); got != bulk(fmt.Sprint(i)) {
					t.Errorf("%d: %q", i, got)
				}
			}
			if n := s.most.Load(); n < int64(len(others)) {
				t.Errorf("%d operations at once, want %d", n, len(others))
			}
			if got := string(holder.reply(t)); got != "$-1\r\n" {
				t.Errorf("%q", got)
			}
			b := make([]byte, len(c.answer))
			if _, err := io.ReadFull(odd.r, b); err != nil || string(b) != c.answer {
				t.Errorf("%.100q, %v, want %.100q", b, err, c.answer)
			}
			if strings.Contains(name, "waits") {
				<-stage.Waiting
				close(stage.Release)
				if got := string(odd.reply(t)); got != "+OK\r\n" && got != "$-1\r\n" {
					t.Errorf("%q", got)
				}
			}
			if strings.Contains(name, "panics") {
				odd.closed(t)
			}
			for i, p := range others {
				p.want(t, bulk(fmt.Sprint(i)), "GET", fmt.Sprint("k", i))
			}
			dial(t, "tcp", addr).want(t, "+PONG\r\n", "PING")
		})
	}
}
