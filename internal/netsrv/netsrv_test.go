package netsrv

import (
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvd-project/kvd/internal/testutil"
)

const patience = testutil.Limit

func dial(t *testing.T, l net.Listener) net.Conn {
	t.Helper()
	c, err := net.Dial(l.Addr().Network(), l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	c.SetDeadline(time.Now().Add(patience))
	t.Cleanup(func() { c.Close() })
	return c
}

func echo(c net.Conn) { io.Copy(c, c) }

func TestServeSeveral(t *testing.T) {
	s, err := New(Options{Handle: echo})
	if err != nil {
		t.Fatal(err)
	}
	unix, err := net.Listen("unix", t.TempDir()+"/s")
	if err != nil {
		t.Fatal(err)
	}
	ls := []net.Listener{testutil.Listen(t), unix}
	errs := make(chan error, len(ls))
	for _, l := range ls {
		go func() { errs <- s.Serve(l) }()
	}
	var conns []net.Conn
	for _, l := range ls {
		c := dial(t, l)
		conns = append(conns, c)
		if _, err := c.Write([]byte("hello")); err != nil {
			t.Fatal(err)
		}
		b := make([]byte, 5)
		if _, err := io.ReadFull(c, b); err != nil || string(b) != "hello" {
			t.Fatalf("%s: %q, %v", l.Addr(), b, err)
		}
	}
	if s.Conns() != 2 || s.Accepted() != 2 || s.Refused() != 0 {
		t.Errorf("%d connections, %d accepted, %d refused", s.Conns(), s.Accepted(), s.Refused())
	}
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() { s.Close() })
	}
	wg.Wait()
	for range ls {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	for _, c := range conns {
		if _, err := c.Read(make([]byte, 1)); err == nil {
			t.Error("a connection outlives the server")
		}
	}
	if n := s.Conns(); n != 0 {
		t.Errorf("%d connections after Close", n)
	}
	l := testutil.Listen(t)
	if err := s.Serve(l); err != nil {
		t.Errorf("Serve after Close: %v", err)
	}
	if _, err := net.Dial("tcp", l.Addr().String()); err == nil {
		t.Error("Serve after Close leaves the listener open")
	}
}

func TestMaxConns(t *testing.T) {
	s, err := New(Options{Handle: echo, Limits: Limits{MaxConns: 2, Refuse: func(c net.Conn) {
		c.Write([]byte("full"))
	}}})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	l := testutil.Listen(t)
	go s.Serve(l)
	a := dial(t, l)
	dial(t, l)
	testutil.Until(t, "two connections", func() bool { return s.Conns() == 2 })
	got, _ := io.ReadAll(dial(t, l))
	if string(got) != "full" {
		t.Errorf("the third connection hears %q", got)
	}
	if s.Refused() != 1 {
		t.Errorf("%d refused", s.Refused())
	}
	a.Close()
	testutil.Until(t, "one connection", func() bool { return s.Conns() == 1 })
	c := dial(t, l)
	c.Write([]byte("x"))
	if _, err := c.Read(make([]byte, 1)); err != nil {
		t.Errorf("there is room again: %v", err)
	}
}

// TestPanic: a bug in one connection's handler is not the others' end.
func TestPanic(t *testing.T) {
	s, err := New(Options{Handle: func(c net.Conn) {
		b := make([]byte, 1)
		c.Read(b)
		if b[0] == '!' {
			panic("bug")
		}
		c.Write(b)
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	l := testutil.Listen(t)
	go s.Serve(l)
	bad, good := dial(t, l), dial(t, l)
	bad.Write([]byte("!"))
	if n, _ := bad.Read(make([]byte, 1)); n != 0 {
		t.Error("an answer after a panic")
	}
	good.Write([]byte("x"))
	if _, err := good.Read(make([]byte, 1)); err != nil {
		t.Error(err)
	}
}

// flaky fails some accepts as a system out of file descriptors does.
type flaky struct {
	net.Listener
	fails atomic.Int32
}

func (f *flaky) Accept() (net.Conn, error) {
	if f.fails.Add(-1) >= 0 {
		return nil, errors.New("too many open files")
	}
	return f.Listener.Accept()
}

func TestBackoff(t *testing.T) {
	s, err := New(Options{Handle: echo})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	f := &flaky{Listener: testutil.Listen(t)}
	f.fails.Store(3)
	go s.Serve(f)
	c := dial(t, f)
	c.Write([]byte("x"))
	if _, err := c.Read(make([]byte, 1)); err != nil {
		t.Error(err)
	}
}

func TestOptions(t *testing.T) {
	for _, o := range []Options{{}, {Handle: echo, Limits: Limits{MaxConns: -1}},
		{Handle: echo, Limits: Limits{HandshakeTimeout: -1}}} {
		if _, err := New(o); err == nil {
			t.Errorf("%+v is fine", o)
		}
	}
}
