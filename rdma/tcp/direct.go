package tcp

import (
	"io"
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// Long READs and WRITEs pass between region and socket without a buffer in between. Words of so long a transfer need
// not be whole (driver.Caps.WholeBytes). Each system call moves at most directMost bytes and does not wait, and the
// agent holds exec during it alone: so Deregister waits for a single call.

const (
	// readDirectFrom is the length, in bytes, from which that pays for READs: a piece may take a system call more than
	// with buffers.
	readDirectFrom = 512 << 10
	// writeDirectFrom is that of WRITEs, bytes. The kernel's copy to memory that no cache holds takes nearly twice as
	// long as one to the input buffer and one from there. The pieces of longer values make up for it: the next one is
	// under way meanwhile.
	writeDirectFrom = 1536 << 10
	directMost      = 256 << 10
)

// isDirect reports whether nothing is between the agent and its TCP connection.
func (a *agent) isDirect() bool { return a.conn == net.Conn(a.nc) && a.metered() != nil }

// metered is the agent's TCP connection; nil for an imitation.
func (a *agent) metered() *meteredConn {
	m, _ := a.nc.(*meteredConn)
	return m
}

// readDirect sends what is in the output and then region memory.
func (a *agent) readDirect(m *mr, r request) error {
	c := a.metered()
	for at, end := r.addr, r.addr+uint64(r.length); at < end; {
		n, err := c.writevNow(a.out, m.bytes[at:min(end, at+directMost)])
		k := min(n, len(a.out))
		a.out = a.out[:copy(a.out, a.out[k:])]
		at += uint64(n - k)
		a.exec.Unlock()
		if err == syscall.EAGAIN {
			err = c.awaitRoom()
		}
		a.resume()
		if err != nil {
			a.werr = err // part, too, sends nothing more
			return err
		}
		if m.dead.Load() {
			return errRevoked
		}
	}
	return nil
}

// writeDirect has input go to b, of region m, as far as there is some; it waits for the first byte. The input buffer is
// empty. The region may be deregistered when it returns.
func (a *agent) writeDirect(m *mr, b []byte) (n int, err error) {
	if len(a.out) > 0 {
		if err := a.flush(); err != nil {
			return 0, err
		}
	}
	c := a.metered()
	for !m.dead.Load() {
		n, err = c.readvNow(b)
		a.exec.Unlock() // a Deregister that waits goes first
		if err == syscall.EAGAIN {
			err = c.awaitInput()
		}
		a.resume()
		if n > 0 || err != nil {
			break
		}
	}
	return n, err
}

// writevNow writes what there is room for, head first; EAGAIN if it is nothing. It fails once the deadline is over.
func (m *meteredConn) writevNow(head, b []byte) (n int, err error) {
	cerr := m.raw.Write(func(fd uintptr) bool {
		m.begin()
		for {
			if n, err = unix.Writev(int(fd), [][]byte{head, b}); err != syscall.EINTR {
				return true
			}
		}
	})
	return m.ended("writev", n, err, cerr)
}

// readvNow reads what is there into b; EAGAIN if it is nothing. It fails once the deadline is over.
func (m *meteredConn) readvNow(b []byte) (n int, err error) {
	cerr := m.raw.Read(func(fd uintptr) bool {
		m.begin()
		for {
			if n, err = syscall.Read(int(fd), b); err != syscall.EINTR {
				return true
			}
		}
	})
	if cerr == nil && err == nil && n == 0 {
		err = io.EOF
	}
	return m.ended("read", n, err, cerr)
}

func (m *meteredConn) begin() {
	if m.since == 0 {
		m.since = now()
	}
}

func (m *meteredConn) ended(call string, n int, err, cerr error) (int, error) {
	switch {
	case cerr != nil:
		return 0, cerr
	case err == nil:
		m.book()
	case err != io.EOF && err != syscall.EAGAIN:
		err = os.NewSyscallError(call, err)
	}
	return max(n, 0), err
}

// awaitRoom and awaitInput return when the next call may not give EAGAIN. The runtime tells of changes alone, so these
// look by themselves first.
func (m *meteredConn) awaitRoom() error {
	m.pause()
	err := m.raw.Write(func(fd uintptr) bool { return isReady(fd, unix.POLLOUT) })
	m.begin()
	return err
}

func (m *meteredConn) awaitInput() error {
	m.pause()
	err := m.raw.Read(func(fd uintptr) bool { return isReady(fd, unix.POLLIN) })
	m.begin()
	return err
}

// isReady says whether a socket is ready for what events say, or has ended.
func isReady(fd uintptr, events int16) bool {
	p := []unix.PollFd{{Fd: int32(fd), Events: events}}
	for {
		n, err := unix.Poll(p, 0)
		if err != unix.EINTR {
			return n > 0 || err != nil
		}
	}
}
