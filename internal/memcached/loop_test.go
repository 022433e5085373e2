package memcached_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"math"
	"net"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/client/clienttest"
	"github.com/kvd-project/kvd/internal/loop/looptest"
	"github.com/kvd-project/kvd/internal/memcached"
	"github.com/kvd-project/kvd/internal/testutil"
)

// testCalm is Server.SetCalm's in these tests: connections are in loops as soon as they can be.
var testCalm = 1

// TestWithoutLoops: connections that stay with their goroutines do the same.
func TestWithoutLoops(t *testing.T) {
	testCalm = math.MaxInt
	defer func() { testCalm = 1 }()
	for name, f := range map[string]func(*testing.T){
		"transcripts": TestTranscripts, "repeated keys": TestRepeatedKeys, "pipelining": TestPipelining,
		"half commands": TestAnswersBeforeWaiting,
		"hostile":       TestHostile, "metrics": TestMetrics, "a client": TestGomemcache,
		"same": TestSame, "binary pipelining": TestBinaryPipelining, "binary limits": TestBinaryLimits,
		"sasl": TestSASL,
	} {
		t.Run(name, f)
	}
}

// peer is a client that sees bytes.
type peer struct {
	net.Conn
	r *bufio.Reader
}

func (p *peer) want(t *testing.T, answer, say string) {
	t.Helper()
	io.WriteString(p, say)
	p.answer(t, answer)
}

func (p *peer) answer(t *testing.T, want string) {
	t.Helper()
	b := make([]byte, len(want))
	if n, err := io.ReadFull(p.r, b); err != nil || string(b) != want {
		t.Fatalf("answered %.200q, %v, want %.200q", b[:n], err, want)
	}
}

// oneLoop serves a store from one loop, and returns n connections that are in it. Bytes written to them have arrived.
func oneLoop(t *testing.T, o memcached.Options, n int) (s *memcached.Server, ps []*peer) {
	t.Helper()
	if was := runtime.GOMAXPROCS(2); was != 2 {
		t.Cleanup(func() { runtime.GOMAXPROCS(was) })
	}
	_, s = serve(t, o)
	sock := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", sock)
	if err != nil {
		t.Fatal(err)
	}
	go s.Serve(l) //nolint:errcheck // Close ends it
	for range n {
		c, err := net.Dial("unix", sock)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		c.SetDeadline(time.Now().Add(testutil.Limit))
		p := &peer{c, bufio.NewReader(c)}
		p.want(t, "MN\r\n", "mn\r\n")
		ps = append(ps, p)
	}
	testutil.Until(t, "all are in the loop", func() bool { return s.Looped() == n })
	return s, ps
}

// TestTurn: a turn of a loop looks up what all of its connections ask for at once, and whatever becomes of
// one of them, the others are answered.
func TestTurn(t *testing.T) {
	var many strings.Builder
	for i := range 40 {
		fmt.Fprintf(&many, " no%d", i)
	}
	for name, c := range map[string]struct{ say, answer string }{
		"a lookup":      {"get k0\r\n", "VALUE k0 0 1\r\n0\r\nEND\r\n"},
		"a meta lookup": {"mg k0 v k\r\n", "VA 1 kk0\r\n0\r\n"},
		"several": {"get k0 k1\r\nget no k2\r\n",
			"VALUE k0 0 1\r\n0\r\nVALUE k1 0 1\r\n1\r\nEND\r\nVALUE k2 0 1\r\n2\r\nEND\r\n"},
		"one key twice":        {"get k0 k0\r\n", strings.Repeat("VALUE k0 0 1\r\n0\r\n", 2) + "END\r\n"},
		"many":                 {"get" + many.String() + "\r\n", "END\r\n"},
		"more than a batch":    {"get" + strings.Repeat(many.String(), 3) + "\r\n", "END\r\n"},
		"a long value":         {"get long\r\n", "VALUE long 0 200000\r\n" + looptest.Long + "\r\nEND\r\n"},
		"a write":              {"set w 0 0 1\r\n1\r\nget w\r\n", "STORED\r\nVALUE w 0 1\r\n1\r\nEND\r\n"},
		"a lookup that waits":  {"get slow\r\n", ""},
		"a write that waits":   {"set slow 0 0 1\r\n1\r\n", ""},
		"a lookup that panics": {"get panic\r\n", ""},
		"half a line":          {"get k0\r\nge", "VALUE k0 0 1\r\n0\r\nEND\r\n"},
		"half a value":         {"get k0\r\nset w 0 0 10\r\n123", "VALUE k0 0 1\r\n0\r\nEND\r\n"},
		"bad commands":         {"get k0\r\nnonsense\r\nget\r\n", "VALUE k0 0 1\r\n0\r\nEND\r\nERROR\r\nERROR\r\n"},
		"the end":              {"get k0\r\nquit\r\n", "VALUE k0 0 1\r\n0\r\nEND\r\n"},
		"what takes its time":  {"flush_all 0\r\n", "OK\r\n"},
		"more than a loop does": {strings.Repeat("get k0\r\n", 100),
			strings.Repeat("VALUE k0 0 1\r\n0\r\nEND\r\n", 100)},
	} {
		t.Run(name, func(t *testing.T) {
			stage := looptest.New(t.Context())
			s := &counting{API: stage.Store}
			server, ps := oneLoop(t, memcached.Options{Client: s}, 10)
			holder, odd, others := ps[0], ps[4], append(append([]*peer{}, ps[1:4]...), ps[5:]...)
			fmt.Fprint(holder, "get hold\r\n")
			<-stage.Held
			for i, p := range others {
				fmt.Fprintf(p, "get kept%d\r\n", i)
				if i == 3 {
					fmt.Fprint(odd, c.say)
				}
			}
			close(stage.Hold)
			for _, p := range others {
				p.answer(t, "END\r\n")
			}
			most := 0
			s.mu.Lock()
			for _, n := range s.batches {
				most = max(most, n)
			}
			s.mu.Unlock()
			if most < len(others) {
				t.Errorf("%d operations at once, want %d", most, len(others))
			}
			holder.answer(t, "END\r\n")
			odd.answer(t, c.answer)
			switch name {
			case "a lookup that waits", "a write that waits":
				<-stage.Waiting
				if n := server.Looped(); n != 9 {
					t.Errorf("%d connections are in the loop, want 9", n)
				}
				close(stage.Release)
				odd.answer(t, map[string]string{"a lookup that waits": "END\r\n",
					"a write that waits": "STORED\r\n"}[name])
			case "a lookup that panics", "the end":
				if b, err := io.ReadAll(odd.r); len(b) > 0 || err != nil {
					t.Errorf("%q, %v", b, err)
				}
				testutil.Until(t, "it is gone", func() bool { return server.Looped() == 9 })
				return
			case "half a line":
				odd.want(t, "END\r\n", "t no\r\n")
			case "half a value":
				odd.want(t, "STORED\r\n", "4567890\r\n")
			}
			testutil.Until(t, "all are in the loop", func() bool {
				odd.want(t, "MN\r\n", "mn\r\n")
				return server.Looped() == 10
			})
		})
	}
}

// TestLoopReaderStops: a client that reads nothing keeps nobody from being served, and is disconnected.
func TestLoopReaderStops(t *testing.T) {
	fake := clienttest.New(clienttest.Options{})
	fake.Put(t.Context(), []byte("k"), make([]byte, 60_000), client.PutOptions{})
	server, ps := oneLoop(t, memcached.Options{Client: fake, IOTimeout: 200 * time.Millisecond}, 5)
	gone := make(chan struct{})
	go func() { // reads nothing
		defer close(gone)
		for {
			if _, err := io.WriteString(ps[0], "get k\r\n"); err != nil {
				return
			}
		}
	}()
	for ended := false; !ended; {
		select {
		case <-gone:
			ended = true
		default:
		}
		for _, p := range ps[1:] {
			p.want(t, "END\r\n", "get no\r\n")
		}
	}
	testutil.Until(t, "it is gone", func() bool { return server.Looped() == 4 })
}

// TestLoopClose: a Server ends though connections enter and leave loops.
func TestLoopClose(t *testing.T) {
	for range 10 {
		addr, s := serve(t, memcached.Options{Client: clienttest.New(clienttest.Options{})})
		var wg sync.WaitGroup
		for i := range 20 {
			c, err := net.Dial("tcp", addr)
			if err != nil {
				t.Fatal(err)
			}
			said := make(chan struct{})
			wg.Go(func() {
				defer c.Close()
				b := make([]byte, 1000)
				for n := 0; ; n++ {
					if n == 20 {
						close(said)
					}
					if _, err := io.WriteString(c, strings.Repeat("mn\r\n", 1+n%3*i)); err != nil {
						return
					}
					if _, err := c.Read(b); err != nil {
						return
					}
				}
			})
			<-said
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		wg.Wait()
		if n := s.Looped(); n != 0 {
			t.Errorf("%d connections are left", n)
		}
	}
}

// TestLoopDrain: silent connections in a loop end, others are answered first.
func TestLoopDrain(t *testing.T) {
	s, ps := oneLoop(t, memcached.Options{Client: clienttest.New(clienttest.Options{})}, 3)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	s.Drain(ctx)
	if ctx.Err() != nil {
		t.Error("silent connections were waited for")
	}
	for _, p := range ps {
		if b, err := io.ReadAll(p.r); len(b) > 0 || err != nil {
			t.Errorf("%q, %v", b, err)
		}
	}
}
