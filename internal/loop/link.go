package loop

import (
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Calm is how often in a row a client must say no more than calmCommands, in a new Link. Its
// connection goes to a loop then.
const Calm = 16

const (
	// maxCalm is Calm for a connection that did not stay in a loop for long.
	maxCalm      = 128
	calmCommands = 4
	// deepCommands at once make a connection leave: clients that pipeline are better off with
	// goroutines of their own, on several processors.
	deepCommands = 8
)

// Link is a connection's way into a loop and out of it. Kill, Killed, CloseRead and PushWrite may be called
// concurrently, and Waits by several goroutines of one operation. All else belongs to whatever serves the
// connection at the moment.
type Link struct {
	peer net.Addr
	s    *Loops
	fd   int // in a loop; else -1

	least        int    // Calm, but for tests
	calm, calmed int    // times that the client is to say little, and did so far
	stayed       int    // reads in the loop
	window       uint32 // of its loop, when it was read last
	deposed      bool
	back         chan error // capacity 1
	waiting      sync.Mutex
	c            Conn

	mu struct {
		sync.Mutex
		nc     net.Conn
		fd     int   // in a loop, instead of nc; else -1
		loop   *Loop // in a loop
		killed bool
	}
}

// Init prepares the Link of c over nc. c may enter one of the loops once its client has been calm that number of times
// in a row; see Calm.
func (k *Link) Init(c Conn, s *Loops, nc net.Conn, calm int) {
	k.c, k.s, k.peer = c, s, nc.RemoteAddr()
	k.least, k.calm, k.fd, k.back = calm, calm, -1, make(chan error, 1)
	k.mu.nc, k.mu.fd = nc, -1
}

// Net is the connection outside of a loop.
func (k *Link) Net() net.Conn { return k.mu.nc }

// Looped reports whether the connection is in a loop.
func (k *Link) Looped() bool { return k.fd >= 0 }

// Read is net.Conn's Read without waiting, in a loop.
func (k *Link) Read(p []byte) (int, error) { return ReadNow(uintptr(k.fd), p) }

// Write writes what the socket takes without waiting, in a loop. If that is not all, an ordinary
// write of the rest meets the reason too.
func (k *Link) Write(p []byte) int {
	n, _ := WriteNow(uintptr(k.fd), p)
	return n
}

// ReadNow is net.Conn's Read of a socket that does not block, and ErrNothing if there is nothing. net.Conn tells Go's
// scheduler of the system call; ReadNow does not. The scheduler would take the processor away from a goroutine whose
// call takes longer than 20 µs, as calls that deliver to another process do. It would also look for such goroutines
// every 20 µs while it finds some.
func ReadNow(fd uintptr, p []byte) (int, error) {
	n, errno := callNow(unix.SYS_READ, fd, p)
	switch {
	case errno == unix.EAGAIN:
		return 0, ErrNothing
	case errno != 0:
		return 0, errno
	case n == 0 && len(p) > 0:
		return 0, io.EOF
	}
	return n, nil
}

// WriteNow writes what such a socket takes, likewise. ErrNothing says that it takes nothing.
func WriteNow(fd uintptr, p []byte) (int, error) {
	n, errno := callNow(unix.SYS_WRITE, fd, p)
	switch {
	case errno == unix.EAGAIN:
		return 0, ErrNothing
	case errno != 0:
		return 0, errno
	}
	return n, nil
}

// callNow makes a system call that does not block.
func callNow(call, fd uintptr, p []byte) (int, syscall.Errno) {
	for {
		n, _, errno := syscall.RawSyscall(call, fd, uintptr(unsafe.Pointer(unsafe.SliceData(p))), uintptr(len(p)))
		if errno == 0 {
			return int(n), 0
		}
		if errno != unix.EINTR {
			return 0, errno
		}
	}
}

// PushWrite is Write for goroutines that do not serve the connection, who take turns with those that do by a lock of
// their own. If the socket does not take all, rest is another connection over it; it is nil if there are no
// descriptors. It is for a goroutine that sends what is left and closes rest. ok is false if the connection is in no
// loop at the moment. Then nothing was written, and Moved has been called or is about to be.
func (k *Link) PushWrite(p []byte) (n int, rest net.Conn, ok bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.mu.fd < 0 {
		return 0, nil, false
	}
	n, err := unix.Write(k.mu.fd, p)
	if n = max(n, 0); err == nil && n == len(p) {
		return n, nil, true
	}
	fd, err := unix.FcntlInt(uintptr(k.mu.fd), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return n, nil, true
	}
	f := os.NewFile(uintptr(fd), "")
	defer f.Close()
	if rest, err = net.FileConn(f); err != nil {
		return n, nil, true
	}
	return n, rest, true
}

// Kill closes the connection. The goroutine or loop that serves it sees the end.
func (k *Link) Kill() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.mu.killed = true
	if k.mu.fd >= 0 {
		unix.Shutdown(k.mu.fd, unix.SHUT_RDWR) // its loop will see the end
	} else {
		k.mu.nc.Close()
	}
}

// Killed reports whether the connection was killed, whether or not what serves it has seen that.
func (k *Link) Killed() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.mu.killed
}

// CloseRead makes what has been received the last of the connection, below TLS if there is that. A connection that
// cannot say so ends its Read at once.
func (k *Link) CloseRead() {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.mu.fd >= 0 {
		unix.Shutdown(k.mu.fd, unix.SHUT_RD) // its loop sees the end behind the rest
		return
	}
	nc := lowest(k.mu.nc)
	if r, ok := nc.(interface{ CloseRead() error }); ok {
		r.CloseRead()
	} else {
		nc.SetReadDeadline(time.Unix(1, 0))
	}
}

// lowest is the connection below TLS and the like.
func lowest(nc net.Conn) net.Conn {
	for {
		t, ok := nc.(interface{ NetConn() net.Conn })
		if !ok {
			return nc
		}
		nc = t.NetConn()
	}
}

// WatchPeer tells, outside of a loop, when the peer sends no more, or the connection ends: gone is closed then. It
// reads nothing. Nobody else may read until stop has returned. It tells nothing about a connection that is no socket.
func (k *Link) WatchPeer() (gone <-chan struct{}, stop func()) {
	nc := lowest(k.mu.nc)
	raw := rawOf(nc)
	if raw == nil {
		return nil, func() {}
	}
	end, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		err := raw.Read(func(fd uintptr) bool {
			// The runtime calls again for whatever happens to the socket. Data that nobody has read yet hides an end
			// from a read, but not from poll.
			return hungUp(fd)
		})
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			close(end)
		}
	}()
	return end, func() {
		nc.SetReadDeadline(time.Unix(1, 0))
		<-done
		nc.SetReadDeadline(time.Time{})
	}
}

// PeerGone reports what WatchPeer tells, as it is now: a channel is closed by a goroutine that may not have run yet.
// It is for a connection that is watched, and waits for nothing.
func (k *Link) PeerGone() (gone bool) {
	raw := rawOf(lowest(k.mu.nc))
	if raw == nil {
		return false
	}
	err := raw.Control(func(fd uintptr) { gone = hungUp(fd) })
	return gone || err != nil
}

// rawOf is the socket of a connection, nil if it has none.
func rawOf(nc net.Conn) syscall.RawConn {
	sc, ok := nc.(syscall.Conn)
	if !ok {
		return nil
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return nil
	}
	return raw
}

// hungUp reports whether a socket's peer sends no more.
func hungUp(fd uintptr) bool {
	p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
	n, err := unix.Poll(p, 0)
	return n > 0 && err == nil
}

// outside is how often connections of this process said something outside of a loop: they need processors, too.
var outside atomic.Uint64

// Calmed is told how many commands the client said at once, outside of a loop. It reports
// whether it has been calm for so long that the connection should Enter.
func (k *Link) Calmed(commands int) bool {
	outside.Add(1)
	if k.calmed++; commands > calmCommands {
		k.calmed = 0
	}
	if k.calmed < k.calm {
		return false
	}
	k.calmed = 0
	return true
}

// Enter leaves the connection to a loop until there is something for its own goroutine, which
// this is, to do. It returns the error that ended the connection's time there. A connection that
// cannot be in a loop (TLS, for one) stays out. Nothing may be left to write.
func (k *Link) Enter() error {
	fd := -1
	l := k.s.loopFor(nil)
	if l == nil {
		return nil
	}
	switch nc := k.mu.nc.(type) {
	case *net.TCPConn, *net.UnixConn:
		if raw, err := nc.(syscall.Conn).SyscallConn(); err == nil {
			raw.Control(func(f uintptr) { fd, _ = unix.FcntlInt(f, unix.F_DUPFD_CLOEXEC, 3) })
		}
	}
	if fd < 0 {
		return nil
	}
	k.mu.Lock()
	if k.mu.killed || k.s.Context.Err() != nil {
		k.mu.Unlock()
		unix.Close(fd)
		return nil
	}
	// With its last other descriptor the connection leaves the runtime's poller, which would
	// wake a thread for whatever arrives.
	k.mu.nc.Close()
	k.mu.fd, k.mu.loop, k.fd = fd, l, fd
	k.mu.Unlock()
	k.stayed = 0
	k.c.Moved(fd)
	if err := l.add(fd, k.c); err != nil {
		k.leaveLoop()
		return nil
	}
	err := <-k.back
	if k.stayed < 8*k.calm {
		k.calm = min(2*k.calm, max(maxCalm, k.least))
	} else {
		k.calm = k.least
	}
	return err
}

// move gives the connection, which is not being served, to another loop. It reports whether that has it now.
func (k *Link) move(to *Loop) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	from := k.mu.loop
	k.mu.loop = to // before it serves the connection, which can be at once
	if err := to.add(k.fd, k.c); err != nil {
		to.remove(k.fd)
		k.mu.loop = from
		return false
	}
	from.remove(k.fd)
	return true
}

// leaveLoop makes a connection in a loop an ordinary one.
func (k *Link) leaveLoop() {
	k.mu.Lock()
	fd, l := k.mu.fd, k.mu.loop
	if fd < 0 {
		k.mu.Unlock()
		return
	}
	l.remove(fd)
	k.mu.fd, k.mu.loop, k.fd = -1, nil, -1
	f := os.NewFile(uintptr(fd), "")
	nc, err := net.FileConn(f)
	f.Close()
	if err != nil {
		k.s.Logger.Warn("connection lost", "peer", k.peer, "err", err)
	} else {
		if k.mu.killed {
			nc.Close()
		}
		k.mu.nc = nc
	} // else what it has is closed, and reading will say so
	k.mu.Unlock()
	k.c.Moved(-1) // without the lock: it may take one that is held around PushWrite
}

// end gives the connection back to its goroutine.
func (k *Link) end(err error) {
	k.deposed = false
	k.back <- err
}

// Waits is called before what performs a command waits, or takes long: from here on this
// goroutine serves nothing but this connection.
func (k *Link) Waits() {
	k.waiting.Lock()
	defer k.waiting.Unlock()
	if !k.Looped() {
		return
	}
	l := k.mu.loop
	k.leaveLoop()
	k.deposed = true
	go l.run()
}
