package tcp

import (
	"net"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvd-project/kvd/rdma/rdmatest"
)

// congestionControl is that of a socket.
func congestionControl(t *testing.T, fd int) string {
	t.Helper()
	cc, err := unix.GetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION)
	if err != nil {
		t.Error(err)
	}
	return cc
}

// inside calls f with c's descriptor.
func inside(t *testing.T, c syscall.Conn, f func(fd int)) {
	t.Helper()
	raw, err := c.SyscallConn()
	if err == nil {
		err = raw.Control(func(fd uintptr) { f(int(fd)) })
	}
	if err != nil {
		t.Error(err)
	}
}

// TestLoopbackIsNotPaced: both ends of a connection within a machine do without BBR, and control leaves to a socket
// what the machine has for connections that leave it.
func TestLoopbackIsNotPaced(t *testing.T) {
	e := rdmatest.NewEnv(t, harness(t, Options{}, Options{}))
	e.Dial()
	d := e.H.Active.Driver().(*device)
	d.mu.Lock()
	for q := range d.mu.qps {
		if cc := congestionControl(t, q.sock.fd); strings.HasPrefix(cc, "bbr") {
			t.Errorf("the dialing end has %s", cc)
		}
	}
	d.mu.Unlock()
	p := e.H.Passive.Driver().(*device)
	p.mu.Lock()
	for l := range p.mu.listeners {
		inside(t, l.ln, func(fd int) {
			if cc := congestionControl(t, fd); strings.HasPrefix(cc, "bbr") {
				t.Errorf("the listening end has %s", cc)
			}
		})
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
		inside(t, ln, func(fd int) {
			_ = unix.SetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION, "bbr") // else what the machine has
			want := congestionControl(t, fd)
			if !paced && strings.HasPrefix(want, "bbr") {
				want = "reno"
			}
			if err := control(64<<10, 64<<10)("tcp", addr, raw); err != nil {
				t.Error(err)
			}
			if cc := congestionControl(t, fd); cc != want {
				t.Errorf("%s: %s, want %s", addr, cc, want)
			}
		})
	}
}
