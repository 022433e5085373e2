package loop

import (
	"crypto/tls"
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvd-project/kvd/internal/identity/identitytest"
	"github.com/kvd-project/kvd/internal/testutil"
)

// wrapped is a connection that knows of the one below.
type wrapped struct{ net.Conn }

func (w wrapped) NetConn() net.Conn { return w.Conn }

// A connection that is told to read no more gives all that has been received, and can be written to.
func TestCloseRead(t *testing.T) {
	a := identitytest.New(t)
	conf := a.Config(a.Leaf())
	conf.ServerName = "localhost"
	for name, wrap := range map[string]func(server, client net.Conn) (net.Conn, net.Conn){
		"in clear": func(s, c net.Conn) (net.Conn, net.Conn) { return s, c },
		"TLS": func(s, c net.Conn) (net.Conn, net.Conn) {
			return tls.Server(s, conf), tls.Client(c, conf)
		},
		"TLS over something": func(s, c net.Conn) (net.Conn, net.Conn) {
			return tls.Server(wrapped{s}, conf), tls.Client(c, conf)
		},
	} {
		t.Run(name, func(t *testing.T) {
			l := testutil.Listen(t)
			far, err := net.Dial("tcp", l.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			defer far.Close()
			near, err := l.Accept()
			if err != nil {
				t.Fatal(err)
			}
			defer near.Close()
			end := time.Now().Add(testutil.Limit)
			if err := errors.Join(near.SetDeadline(end), far.SetDeadline(end)); err != nil {
				t.Fatal(err)
			}
			near, far = wrap(near, far)
			said := make(chan error, 1)
			go func() {
				_, err := far.Write([]byte("1"))
				said <- err
			}()
			b := make([]byte, 10)
			if n, err := near.Read(b); err != nil || string(b[:n]) != "1" {
				t.Fatalf("%q, %v", b[:n], err)
			}
			if err := <-said; err != nil {
				t.Fatal(err)
			}
			if _, err := far.Write([]byte("2")); err != nil { // loopback: it has been received
				t.Fatal(err)
			}
			var k Link
			k.Init(nil, nil, near, 0)
			k.CloseRead()
			if n, err := near.Read(b); err != nil || string(b[:n]) != "2" {
				t.Errorf("%q, %v, want what was received before", b[:n], err)
			}
			if n, err := near.Read(b); err == nil || errors.Is(err, net.ErrClosed) {
				t.Errorf("%q, %v, want an end", b[:n], err)
			}
			if _, err := near.Write([]byte("3")); err != nil {
				t.Error(err)
			}
			if _, err := io.ReadFull(far, b[:1]); err != nil || b[0] != '3' {
				t.Errorf("the reply: %q, %v", b[:1], err)
			}
		})
	}
}

// A connection that is watched tells when its peer sends no more, behind data that nobody has read too, and can be read
// afterwards as before.
func TestWatchPeer(t *testing.T) {
	l := testutil.Listen(t)
	open := func() (near, far net.Conn) {
		far, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		if near, err = l.Accept(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { far.Close(); near.Close() })
		return near, far
	}
	near, far := open()
	var k Link
	k.Init(nil, nil, wrapped{near}, 0)
	b := make([]byte, 10)
	for _, text := range []string{"1", "2"} {
		gone, stop := k.WatchPeer()
		if _, err := far.Write([]byte(text)); err != nil {
			t.Fatal(err)
		}
		stop()
		select {
		case <-gone:
			t.Error("it is gone, and only stopped")
		default:
		}
		if n, err := near.Read(b); err != nil || string(b[:n]) != text {
			t.Errorf("%q, %v", b[:n], err)
		}
	}
	gone, stop := k.WatchPeer()
	if _, err := far.Write([]byte("unread")); err != nil {
		t.Fatal(err)
	}
	if k.PeerGone() {
		t.Error("it is gone, and has only written")
	}
	far.Close()
	<-gone
	if !k.PeerGone() {
		t.Error("it is gone, and is not seen to be")
	}
	stop()
	if n, err := near.Read(b); err != nil || string(b[:n]) != "unread" {
		t.Errorf("%q, %v", b[:n], err)
	}
	near, _ = open()
	k = Link{}
	k.Init(nil, nil, near, 0)
	gone, stop = k.WatchPeer()
	k.Kill()
	<-gone
	stop()
	if !k.PeerGone() {
		t.Error("a connection that was killed has a peer")
	}
	// No socket: there is nothing to watch.
	p, q := net.Pipe()
	defer q.Close()
	k = Link{}
	k.Init(nil, nil, p, 0)
	if gone, stop := k.WatchPeer(); gone != nil || k.PeerGone() {
		t.Error("a pipe is watched")
	} else {
		stop()
	}
}

// A socket is read and written without waiting: there is something, nothing, no room, or an end.
func TestReadNow(t *testing.T) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	near, far := uintptr(fds[0]), uintptr(fds[1])
	defer unix.Close(fds[0])
	b := make([]byte, 64<<10)
	read := func(what string, want int, wantErr error) {
		t.Helper()
		if n, err := ReadNow(near, b); n != want || err != wantErr {
			t.Errorf("%s: %d, %v, want %d, %v", what, n, err, want, wantErr)
		}
	}
	read("nothing has come", 0, ErrNothing)
	if n, err := WriteNow(far, []byte("abc")); n != 3 || err != nil {
		t.Errorf("written %d, %v", n, err)
	}
	read("three bytes", 3, nil)
	n, sent := 0, 0
	for err = nil; err == nil && sent < 64<<20; sent += n {
		n, err = WriteNow(far, b)
	}
	if err != ErrNothing || sent == 0 {
		t.Errorf("%d bytes written to nobody, %v", sent, err)
	}
	for got := 0; got < sent; got += n {
		if n, err = ReadNow(near, b); err != nil {
			t.Fatalf("after %d of %d bytes: %v", got, sent, err)
		}
	}
	unix.Close(fds[1])
	read("the end", 0, io.EOF)
	if _, err := WriteNow(near, b); err != unix.EPIPE {
		t.Errorf("written to nobody: %v", err)
	}
}
