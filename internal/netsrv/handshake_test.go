package netsrv

import (
	"crypto/tls"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// TestTurns: of many handshakes at once a few compute at a time, those that wait for their peers are not among them, and a client that
// comes beside those is served.
func TestTurns(t *testing.T) {
	var now, most atomic.Int64
	conf := serverTLS(t)
	conf.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) {
		n := now.Add(1)
		defer now.Add(-1)
		for was := most.Load(); n > was && !most.CompareAndSwap(was, n); was = most.Load() {
		}
		time.Sleep(time.Millisecond) // as long as a handshake computes; the more, the likelier they meet
		return nil, nil
	}
	s, err := New(Options{Handle: echo})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	l := listen(t, "tcp", "127.0.0.1:0")
	go s.Serve(TLSListener(l, conf)) //nolint:errcheck // Close ends it
	for i := range 10 * cap(turns) {
		if _, err := io.WriteString(from(t, "127.0.0.1", l), beginnings[i%3]); err != nil {
			t.Fatal(err)
		}
	}
	var wg sync.WaitGroup
	for range 10 * cap(turns) {
		c := from(t, "127.0.0.1", l)
		wg.Go(func() {
			if _, err := greetTLS(c); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if n := most.Load(); n > int64(cap(turns)) {
		t.Errorf("%d handshakes compute at a time, want at most %d", n, cap(turns))
	}
	if n := len(turns); n != 0 {
		t.Errorf("%d turns are taken by nobody", n)
	}
}

// TestRawConn: limits are those of the connection at the bottom.
func TestRawConn(t *testing.T) {
	l := listen(t, "tcp", "127.0.0.1:0")
	c := from(t, "127.0.0.1", l)
	raw, isTLS := rawConn(TLSServer(c, &tls.Config{}))
	if _, ok := raw.(*net.TCPConn); !ok || !isTLS {
		t.Errorf("%T, TLS %v", raw, isTLS)
	}
	if raw, isTLS := rawConn(c); raw != c || isTLS {
		t.Errorf("%T, TLS %v", raw, isTLS)
	}
}
