package gateway

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client/clienttest"
	"github.com/kvd-project/kvd/internal/identity/identitytest"
	"github.com/kvd-project/kvd/internal/netsrv"
	"github.com/kvd-project/kvd/internal/testutil"
)

// TestBrowsers: a web page that makes a browser post commands here has none of them performed.
func TestBrowsers(t *testing.T) {
	var log syncBuffer
	addr, g := start(t, Options{Databases: fake(), Logger: slog.New(slog.NewTextHandler(&log, nil))})
	honest := dial(t, "tcp", addr)
	for _, request := range []string{
		"POST / HTTP/1.1\r\nHost: 127.0.0.1:6379\r\nContent-Length: 20\r\n\r\nSET stolen 1\r\nQUIT\r\n",
		"GET / HTTP/1.1\r\nhost: 127.0.0.1:6379\r\n\r\nSET stolen 1\r\n",
		"PUT / HTTP/1.1\r\nHOST: x\r\n\r\nSET stolen 1\r\n",
		"*1\r\n$4\r\npost\r\nSET stolen 1\r\n",
	} {
		p := dial(t, "tcp", addr)
		fmt.Fprint(p, request)
		got, _ := io.ReadAll(p.r) // or it is reset: there was more to read
		if bytes.Contains(got, []byte("+OK")) {
			t.Errorf("%q: %q", request, got)
		}
		honest.want(t, "$-1\r\n", "GET", "stolen")
	}
	if n := g.m.httpRequests.Load(); n != 4 || strings.Count(log.String(), "speaks HTTP") != 4 {
		t.Errorf("%d were counted, and logged:\n%s", n, log.String())
	}
	honest.want(t, "-ERR wrong number of arguments for 'get' command\r\n", "GET", "/", "HTTP/1.1")
}

// syncBuffer may be read while others write.
type syncBuffer struct {
	sync.Mutex
	b bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.Lock()
	defer b.Unlock()
	return b.b.Write(p)
}

func (b *syncBuffer) String() string {
	b.Lock()
	defer b.Unlock()
	return b.b.String()
}

// TestGuessing: passwords are tried slowly, are counted and logged, and a client that knows it
// gets in beside those who guess; who has got in notices nothing.
func TestGuessing(t *testing.T) {
	var log syncBuffer
	addr, g := start(
		t, Options{Databases: fake(), Password: "secret", Logger: slog.New(slog.NewTextHandler(&log, nil))})
	in := dial(t, "tcp", addr)
	in.want(t, "+OK\r\n", "AUTH", "secret")
	const conns = 20
	var tried atomic.Int64
	began := time.Now()
	for range conns {
		p := dial(t, "tcp", addr)
		go func() {
			for {
				if _, err := p.Write(encode("AUTH", "default", "guess")); err != nil {
					return
				}
				if _, err := p.r.ReadSlice('\n'); err != nil {
					return
				}
				tried.Add(1)
			}
		}()
	}
	testutil.Until(t, "they must wait", func() bool { return tried.Load() > conns })
	late := dial(t, "tcp", addr)
	late.want(t, "+OK\r\n", "AUTH", "secret")
	for range 100 {
		in.want(t, "+PONG\r\n", "PING")
	}
	// Each connection has one at a time, which takes netsrv.GuessDelay once there were ten.
	seconds := int64(time.Since(began)/netsrv.GuessDelay) + 1
	if n, most := tried.Load(), (seconds+2)*conns+10; n > most {
		t.Errorf("%d passwords were tried in %d seconds, at most %d are due", n, seconds, most)
	}
	if n := g.m.authFails.Load(); n < uint64(tried.Load()) ||
		!strings.Contains(log.String(), `msg="wrong password" peer=127.0.0.1:`) {
		t.Errorf("%d were counted, and logged:\n%s", n, log.String())
	}
}

// TestSlowIsNotSilent: a client that waited for its reply has not been silent meanwhile, which
// would end its connection under its next command while the gateway stops.
func TestSlowIsNotSilent(t *testing.T) {
	g, err := New(Options{Databases: fake(), Debug: true})
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	l := testutil.Listen(t)
	go g.Serve(l) //nolint:errcheck // Close ends it
	p := dial(t, "tcp", l.Addr().String())
	began := time.Now()
	p.want(t, "+OK\r\n", "DEBUG", "SLEEP", "0.2")
	var active int64
	testutil.Until(t, "the command is over", func() bool {
		g.each(func(c *conn) { active = c.active.Load() })
		return active > 0
	})
	if since := time.UnixMilli(active).Sub(began); since < 2*quietTime-time.Millisecond { // active is in whole ones
		t.Errorf("it counts as silent since %v after it began", since)
	}
}

// TestDrain: a gateway that stops performs nothing that it does not answer, tells for certain of
// what it does not perform, ends silent connections first, and takes new ones meanwhile.
func TestDrain(t *testing.T) {
	store := clienttest.New(clienttest.Options{})
	g, err := New(Options{Databases: []Database{{"default", store}}})
	if err != nil {
		t.Fatal(err)
	}
	g.calm = testCalm
	l := testutil.Listen(t)
	served := make(chan error, 1)
	go func() { served <- g.Serve(l) }()
	addr := l.Addr().String()

	const clients = 20
	var wg sync.WaitGroup
	var acked [clients]atomic.Int64
	var refused atomic.Int64
	for i := range clients {
		p := dial(t, "tcp", addr)
		wg.Go(func() {
			for n := int64(1); ; n++ {
				k := fmt.Sprint("k", i)
				if _, err := p.Write(encode("SET", k, fmt.Sprint(n))); err != nil {
					return
				}
				reply, err := p.r.ReadString('\n')
				switch {
				case err != nil:
					return
				case reply == "+OK\r\n":
					acked[i].Store(n)
				case strings.HasPrefix(reply, "-LOADING "):
					refused.Add(1)
					time.Sleep(2 * quietTime) // as clients do
				default:
					t.Errorf("client %d: %q", i, reply)
					return
				}
			}
		})
	}
	silent := dial(t, "tcp", addr)
	silent.want(t, "+PONG\r\n", "PING")
	testutil.Until(t, "all are at it", func() bool {
		for i := range acked {
			if acked[i].Load() < 10 {
				return false
			}
		}
		return true
	})
	ctx, cancel := context.WithCancel(t.Context())
	drained := make(chan struct{})
	go func() { defer close(drained); g.Drain(ctx) }()
	silent.closed(t)
	dial(t, "tcp", addr).want(t, "+PONG\r\n", "PING")
	cancel()
	<-drained
	if n := g.srv.Conns(); n != 0 {
		t.Errorf("%d connections are left", n)
	}
	g.Close()
	if err := <-served; err != nil {
		t.Error(err)
	}
	wg.Wait()
	for i := range clients {
		it, err := store.Get(t.Context(), fmt.Append(nil, "k", i))
		if want := fmt.Sprint(acked[i].Load()); err != nil || string(it.Value) != want {
			t.Errorf("client %d: %q was performed and %s answered, %v", i, it.Value, want, err)
		}
	}
	// Not each of them: a client that stands still on a busy machine is ended as a silent one.
	if refused.Load() == 0 {
		t.Error("no client was refused anything")
	}
}

// A command that comes when the connection of a silent client ends is refused, and not performed: its client would go
// on.
func TestFinishingRefuses(t *testing.T) {
	t.Run("in clear", func(t *testing.T) { testFinishingRefuses(t, nil) })
	a := identitytest.New(t)
	t.Run("TLS", func(t *testing.T) { testFinishingRefuses(t, a.Config(a.Leaf())) })
}

func testFinishingRefuses(t *testing.T, conf *tls.Config) {
	store := clienttest.New(clienttest.Options{})
	g, err := New(Options{Databases: []Database{{"default", store}}})
	if err != nil {
		t.Fatal(err)
	}
	l := testutil.Listen(t)
	if conf != nil {
		l = tls.NewListener(l, conf)
	}
	served := make(chan error, 1)
	go func() { served <- g.Serve(l) }()
	p := dial(t, "tcp", l.Addr().String())
	if conf != nil {
		client := conf.Clone()
		client.ServerName = "localhost"
		c := tls.Client(p.Conn, client)
		p = &peer{c, bufio.NewReader(c)}
	}
	p.want(t, "+OK\r\n", "SET", "k", "1")
	g.each(func(c *conn) { c.finishing.Store(true) })
	p.want(t, "-"+string(errStopping)+"\r\n", "SET", "k", "2")
	p.want(t, "-"+string(errStopping)+"\r\n", "GET", "k")
	if it, err := store.Get(t.Context(), []byte("k")); err != nil || string(it.Value) != "1" {
		t.Errorf("k is %q, %v, want 1", it.Value, err)
	}
	g.Close()
	if err := <-served; err != nil {
		t.Error(err)
	}
}
