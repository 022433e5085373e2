package gateway

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"runtime/debug"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A loop serves connections whose clients say little at a time and wait for the reply, many
// of them with one goroutine: as in Redis, what epoll finds ready is read, performed and
// answered, one connection after the other. That leaves out what a goroutine for each costs
// when there is one command to a system call: the read that finds nothing, and two switches.
//
// It is for what does not wait. An operation that is about to (client.OnWait), a command that
// takes its time, or a reply that the socket does not take make the connection an ordinary
// one again, which its own goroutine serves; the loop goes on in another goroutine
// (conn.waits). Clients that pipeline are better off with goroutines of their own, on several
// processors.
type loop struct {
	g    *Gateway
	ep   int // epoll
	stop int // eventfd
	done chan struct{}

	mu struct {
		sync.Mutex
		conns map[int32]*conn // by file descriptor
	}

	// The goroutine's that runs it.
	events  [128]unix.EpollEvent
	next, n int // events[next:n] are to be served
	swept   time.Time
}

const (
	// calm is how often in a row a client has said no more than calmCommands when its
	// connection goes to a loop; maxCalm for one that did not stay there for long.
	calm, maxCalm = 16, 1024
	calmCommands  = 4
	// deepCommands at once make it leave.
	deepCommands = 8
	// calmUnits is for how many keys a loop has time.
	calmUnits = 64
	// loopTick is how often a loop looks for idle connections.
	loopTick = time.Second
)

func newLoop(g *Gateway) (*loop, error) {
	ep, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("epoll_create1: %w", err)
	}
	stop, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err == nil {
		err = unix.EpollCtl(ep, unix.EPOLL_CTL_ADD, stop, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(stop)})
	}
	if err != nil {
		unix.Close(ep)
		unix.Close(stop)
		return nil, fmt.Errorf("eventfd: %w", err)
	}
	l := &loop{g: g, ep: ep, stop: stop, done: make(chan struct{}), swept: time.Now()}
	l.mu.conns = make(map[int32]*conn)
	go l.run()
	return l, nil
}

// close ends a loop that has no connections any more.
func (l *loop) close() {
	var one [8]byte
	one[0] = 1
	unix.Write(l.stop, one[:])
	<-l.done
	unix.Close(l.ep)
	unix.Close(l.stop)
}

// run serves what is ready until the loop is closed, or until another goroutine does.
func (l *loop) run() {
	for {
		for l.next < l.n {
			fd := l.events[l.next].Fd
			l.next++
			if int(fd) == l.stop {
				close(l.done)
				return
			}
			l.mu.Lock()
			c := l.mu.conns[fd]
			l.mu.Unlock()
			if c != nil && l.serve(c) {
				return
			}
		}
		l.wait()
	}
}

// wait waits until something is ready.
func (l *loop) wait() {
	l.next = 0
	// Mostly something is, and then the processor need not be given up for the call.
	n, _, errno := syscall.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(l.ep), uintptr(unsafe.Pointer(&l.events[0])), uintptr(len(l.events)), 0, 0, 0)
	if l.n = int(n); errno != 0 {
		l.n = 0
	}
	if l.n == 0 {
		l.n, _ = unix.EpollWait(l.ep, l.events[:], int(loopTick/time.Millisecond))
		l.n = max(l.n, 0) // interrupted
	}
	if now := time.Now(); now.Sub(l.swept) >= loopTick {
		l.swept = now
		l.sweep(now)
	}
}

// sweep ends connections that have said nothing, or half of a command, for too long.
func (l *loop) sweep(now time.Time) {
	said, began := int64(0), now.Add(-l.g.o.CommandTimeout).UnixMilli()
	if idle := time.Duration(l.g.idle.Load()); idle > 0 {
		said = now.Add(-idle).UnixMilli()
	}
	var idle, late []*conn
	l.mu.Lock()
	for _, c := range l.mu.conns {
		if half := c.half.Load(); half != 0 && half < began {
			late = append(late, c)
		} else if abs(c.active.Load()) < said {
			idle = append(idle, c)
		}
	}
	l.mu.Unlock()
	for _, c := range idle {
		c.kill()
	}
	for _, c := range late {
		c.lateCommand()
		c.kill()
	}
}

// serve reads from a connection and performs what it says. It reports whether another
// goroutine runs the loop now.
func (l *loop) serve(c *conn) (deposed bool) {
	var ended loopEnd
	defer func() {
		// One connection's request must not end the process that serves the others.
		if r := recover(); r != nil {
			l.g.o.Logger.Error("bug: command panicked", "peer", c.remote, "panic", r, "stack", string(debug.Stack()))
			ended.served = errClosing
		}
		deposed = c.deposed // of this call; the next waits for the connection's goroutine
		if ended.filled == nil && ended.served == nil && c.looped() && c.said < deepCommands {
			return
		}
		c.leave()
		c.deposed = false
		c.back <- ended
	}()
	c.said = 0
	switch err := c.rd.Fill(); {
	case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EINTR):
	case err != nil:
		ended.filled = err
	default:
		c.stayed++
		ended.served = c.serve()
	}
	return
}

// loopEnd is why a connection left its loop: the errors of reading and of performing.
type loopEnd struct{ filled, served error }

// link is what other goroutines than the one that serves a connection may use of it.
type link struct {
	sync.Mutex
	nc     net.Conn
	fd     int   // in a loop, instead of nc; else -1
	loop   *loop // in a loop
	killed bool
}

// kill closes the connection. Any goroutine may call it.
func (c *conn) kill() {
	c.link.Lock()
	defer c.link.Unlock()
	c.link.killed = true
	if c.link.fd >= 0 {
		unix.Shutdown(c.link.fd, unix.SHUT_RDWR) // its loop will see the end
	} else {
		c.link.nc.Close()
	}
}

func (c *conn) looped() bool { return c.out.fd >= 0 }

// read is conn.Read without waiting.
func (c *conn) read(p []byte) (int, error) {
	n, _, errno := syscall.RawSyscall(unix.SYS_READ, uintptr(c.out.fd), uintptr(unsafe.Pointer(unsafe.SliceData(p))), uintptr(len(p)))
	switch {
	case errno != 0:
		return 0, errno
	case n == 0 && len(p) > 0:
		return 0, io.EOF
	}
	return int(n), nil
}

// enter leaves the connection to a loop until there is something for its own goroutine,
// which this is, to do. Connections that cannot be in a loop stay out.
func (c *conn) enter() loopEnd {
	l := c.g.loopOf(c.id)
	if l == nil || !c.out.idle() {
		return loopEnd{}
	}
	fd := -1
	switch nc := c.nc.(type) {
	case *net.TCPConn, *net.UnixConn:
		if raw, err := nc.(syscall.Conn).SyscallConn(); err == nil {
			raw.Control(func(f uintptr) { fd, _ = unix.FcntlInt(f, unix.F_DUPFD_CLOEXEC, 3) })
		}
	}
	if fd < 0 {
		return loopEnd{}
	}
	c.link.Lock()
	if c.link.killed || c.g.ctx.Err() != nil {
		c.link.Unlock()
		unix.Close(fd)
		return loopEnd{}
	}
	// With its last other descriptor the connection leaves the runtime's poller, which would
	// wake a thread for whatever arrives.
	c.nc.Close()
	c.link.fd, c.link.loop, c.out.fd = fd, l, fd
	c.link.Unlock()
	c.stayed = 0
	l.mu.Lock()
	l.mu.conns[int32(fd)] = c
	l.mu.Unlock()
	if err := unix.EpollCtl(l.ep, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLRDHUP, Fd: int32(fd)}); err != nil {
		c.leave()
		return loopEnd{}
	}
	end := <-c.back
	if c.stayed < 8*c.calm {
		c.calm = min(2*c.calm, maxCalm)
	} else {
		c.calm = c.g.calm
	}
	return end
}

// leave makes a connection in a loop an ordinary one.
func (c *conn) leave() {
	c.link.Lock()
	defer c.link.Unlock()
	fd, l := c.link.fd, c.link.loop
	if fd < 0 {
		return
	}
	unix.EpollCtl(l.ep, unix.EPOLL_CTL_DEL, fd, nil)
	l.mu.Lock()
	delete(l.mu.conns, int32(fd))
	l.mu.Unlock()
	c.link.fd, c.link.loop, c.out.fd = -1, nil, -1
	f := os.NewFile(uintptr(fd), "")
	nc, err := net.FileConn(f)
	f.Close()
	if err != nil {
		c.g.o.Logger.Warn("connection lost", "peer", c.remote, "err", err)
		return // what it has is closed, and reading will say so
	}
	if c.link.killed {
		nc.Close()
	}
	c.nc, c.link.nc = nc, nc
	c.out.over(nc)
}

// waits is called before what performs a command waits, or takes long: from here on this
// goroutine serves nothing but this connection. Several goroutines of one operation may
// call it.
func (c *conn) waits() {
	c.waiting.Lock()
	defer c.waiting.Unlock()
	if !c.looped() {
		return
	}
	l := c.link.loop
	c.leave()
	c.deposed = true
	go l.run()
}

// loopOf is the loop for a connection, nil if there is none.
func (g *Gateway) loopOf(id int64) *loop {
	g.loops.once.Do(func() {
		// As many processors are left to those who do not wait.
		for range runtime.GOMAXPROCS(0) / 2 {
			l, err := newLoop(g)
			if err != nil {
				g.o.Logger.Warn("connections have a goroutine each", "err", err)
				return
			}
			g.loops.all = append(g.loops.all, l)
		}
	})
	if len(g.loops.all) == 0 {
		return nil
	}
	return g.loops.all[id%int64(len(g.loops.all))]
}
