package tcp

import (
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"
)

// sock is the dialing side's connection, below TLS if there is that. A CQ that reads by itself, see wait.go, takes it
// out of the runtime's poller, which would wake a thread for whatever arrives. From then on it is a descriptor: Read
// does not wait, Write waits in the kernel, Close shuts it down, and release, when nobody uses it any more, closes it.
type sock struct {
	*net.TCPConn     // until it is detached
	fd           int // once it is; else -1

	halted atomic.Bool // no Write waits for room any more
	life   struct {
		sync.Mutex
		over bool // fd is closed
	}
	drained bool // the last Read left nothing; the reader's
}

func newSock(c *net.TCPConn) *sock { return &sock{TCPConn: c, fd: -1} }

func (s *sock) detached() bool { return s.fd >= 0 }

// detach takes the connection, which nobody else uses yet, out of the runtime's poller. If it fails, nothing has
// changed.
func (s *sock) detach() error {
	raw, err := s.SyscallConn()
	if err != nil {
		return err
	}
	fd := -1
	cerr := raw.Control(func(f uintptr) { fd, err = unix.FcntlInt(f, unix.F_DUPFD_CLOEXEC, 0) })
	if cerr != nil {
		return cerr
	}
	if err != nil {
		return os.NewSyscallError("fcntl", err)
	}
	_ = s.TCPConn.Close() // fd stays
	s.fd = fd
	return nil
}

// Read gives os.ErrDeadlineExceeded where a detached connection has nothing.
func (s *sock) Read(p []byte) (int, error) {
	if !s.detached() {
		return s.TCPConn.Read(p)
	}
	if s.drained {
		return 0, os.ErrDeadlineExceeded
	}
	for {
		n, err := syscall.Read(s.fd, p)
		switch {
		case err == syscall.EINTR:
			continue
		case err == syscall.EAGAIN:
			s.drained = true
			return 0, os.ErrDeadlineExceeded
		case err != nil:
			return 0, os.NewSyscallError("read", err)
		case n == 0 && len(p) > 0:
			return 0, io.EOF
		}
		s.drained = n < len(p)
		return n, nil
	}
}

func (s *sock) Write(p []byte) (done int, err error) {
	if !s.detached() {
		return s.TCPConn.Write(p)
	}
	for done < len(p) {
		n, err := syscall.Write(s.fd, p[done:])
		if n > 0 {
			done += n
		}
		if err := s.mayWrite("write", err); err != nil {
			return done, err
		}
	}
	return done, nil
}

// writeAll writes pieces, which are gone afterwards, with writev(2).
func (s *sock) writeAll(pieces [][]byte) error {
	for len(pieces) > 0 {
		n, err := unix.Writev(s.fd, pieces[:min(len(pieces), maxPieces)])
		for n = max(n, 0); len(pieces) > 0 && n >= len(pieces[0]); pieces = pieces[1:] {
			n -= len(pieces[0])
		}
		if n > 0 {
			pieces[0] = pieces[0][n:]
		}
		if err := s.mayWrite("writev", err); err != nil {
			return err
		}
	}
	return nil
}

// writeSome writes of pieces what a detached connection has room for.
func (s *sock) writeSome(pieces [][]byte) (n int, err error) {
	for {
		switch n, err = unix.Writev(s.fd, pieces[:min(len(pieces), maxPieces)]); err {
		case syscall.EINTR:
			continue
		case nil, syscall.EAGAIN:
			return max(n, 0), nil
		}
		return max(n, 0), os.NewSyscallError("writev", err)
	}
}

// maxPieces is how many pieces one writev(2) takes (IOV_MAX).
const maxPieces = 1024

// roomTick is how long a Write that waits for room may not notice that it is halted, ms.
const roomTick = 10

// mayWrite returns when a write that ended with err, or nil, may go on.
func (s *sock) mayWrite(call string, err error) error {
	switch err {
	case nil, syscall.EINTR:
		return nil
	case syscall.EAGAIN:
	default:
		return os.NewSyscallError(call, err)
	}
	for !s.halted.Load() {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(s.fd), Events: unix.POLLOUT}}, roomTick)
		switch {
		case n > 0:
			return nil
		case err != nil && err != unix.EINTR:
			return os.NewSyscallError("poll", err)
		}
	}
	return os.ErrDeadlineExceeded
}

// awaitInput returns when a detached connection may have brought something, or has ended, or after ms.
func (s *sock) awaitInput(ms int) {
	_, _ = unix.Poll([]unix.PollFd{{Fd: int32(s.fd), Events: unix.POLLIN}}, ms) // whatever it says, Read says more
}

// CloseWrite sends a FIN behind what was written.
func (s *sock) CloseWrite() error {
	if !s.detached() {
		return s.TCPConn.CloseWrite()
	}
	return s.shutdown(unix.SHUT_WR)
}

// Close ends the connection. That wakes those who wait for it.
func (s *sock) Close() error {
	if !s.detached() {
		return s.TCPConn.Close()
	}
	s.halted.Store(true)
	return s.shutdown(unix.SHUT_RDWR)
}

func (s *sock) shutdown(how int) error {
	s.life.Lock()
	defer s.life.Unlock()
	if s.life.over {
		return net.ErrClosed
	}
	return os.NewSyscallError("shutdown", unix.Shutdown(s.fd, how))
}

// release closes the descriptor of a detached connection that nobody reads or writes any more.
func (s *sock) release() {
	s.life.Lock()
	defer s.life.Unlock()
	if s.detached() && !s.life.over {
		s.life.over = true
		_ = unix.Close(s.fd)
	}
}
