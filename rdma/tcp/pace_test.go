package tcp

import (
	"net"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvd-project/kvd/rdma/rdmatest"
)

// congestionControl is that of a connection.
func congestionControl(t *testing.T, c syscall.Conn) (cc string) {
	t.Helper()
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	cerr := raw.Control(func(fd uintptr) {
		cc, err = unix.GetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION)
	})
	if cerr != nil || err != nil {
		t.Fatal(cerr, err)
	}
	return cc
}

// TestLoopbackIsNotPaced: both ends of a connection within a machine do without BBR, and control leaves to a socket what the
// machine has for connections that leave it.
func TestLoopbackIsNotPaced(t *testing.T) {
	e := rdmatest.NewEnv(t, harness(t, Options{}, Options{}))
	e.Dial()
	d := e.H.Active.Driver().(*device)
	d.mu.Lock()
	for q := range d.mu.qps {
		if cc := congestionControl(t, q.sock); strings.HasPrefix(cc, "bbr") {
			t.Errorf("the dialing end has %s", cc)
		}
	}
	d.mu.Unlock()
	p := e.H.Passive.Driver().(*device)
	p.mu.Lock()
	for l := range p.mu.listeners {
		if cc := congestionControl(t, l.ln); strings.HasPrefix(cc, "bbr") {
			t.Errorf("the listening end has %s", cc)
		}
	}
	p.mu.Unlock()

	for addr, paced := range map[string]bool{"127.0.0.1:0": false, "[::1]:0": false, "192.0.2.1:7": true, ":7": true} {
		ln, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
		if err != nil {
			t.Fatal(err)
		}
		defer ln.Close()
		raw, err := ln.SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		_ = raw.Control(func(fd uintptr) {
			_ = unix.SetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION, "bbr") // else what the machine has
		})
		before := congestionControl(t, ln)
		if err := d.control("tcp", addr, raw); err != nil {
			t.Fatal(err)
		}
		want := before
		if !paced && strings.HasPrefix(before, "bbr") {
			want = "reno"
		}
		if cc := congestionControl(t, ln); cc != want {
			t.Errorf("%s: %s, want %s (before: %s)", addr, cc, want, before)
		}
	}
}
