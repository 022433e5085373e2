package tcp

import (
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvd-project/kvd/rdma/driver"
)

// A QP's replies are read by a goroutine of its own or, from the first Wait on,
// by whoever waits for its CQ: that saves waking another goroutine for each burst
// of replies. A QP whose CQ nobody has waited for from one tick of the watch timer to
// the next goes back to a goroutine, so that a peer's end is noticed, and replies to
// what is unsignaled are taken in, while nobody waits.

// readBy says who reads a QP's replies. The zero value is invalid.
type readBy uint8

const (
	byGoroutine readBy = 1 + iota
	byWaiter
	// byCloser: a goroutine, until the end; Close waits for it.
	byCloser
	// byNobody: the connection has ended.
	byNobody
)

// reading is the part of a CQ that decides who reads. Lock order: device.mu, own,
// wake.
type reading struct {
	// able is false if one processor runs all goroutines, since a switch is cheap there, and over TLS, with which
	// a Wait took several times as long in some runs.
	able bool
	own  struct {
		sync.Mutex // held by a Wait except while it is parked
		qps        []*qp
		goroutines int  // how many of qps are byGoroutine
		inside     bool // a Wait is under way
		waited     bool // one was, since the last tick
		several    *several
	}
	owns   atomic.Bool          // some of own.qps are byWaiter
	slept  bool                 // the Wait under way has let go of own; its goroutine's
	parked atomic.Pointer[park] // what it waits for meanwhile
	wake   struct {
		sync.Mutex
		woken bool
		left  sync.Cond // a park has ended
		// alarm is a Wake at the time at: one that comes early does no harm, and setting it
		// anew for every wait costs more.
		alarm *time.Timer
		at    time.Time
	}
}

// past is a deadline that interrupts.
var past = time.Unix(1, 0)

// park is what a Wait blocks on: one connection, or several.
type park struct {
	raw   syscall.RawConn
	f     interface{ SetReadDeadline(time.Time) error }
	ready func(fd uintptr) bool // for RawConn.Read: takes in what is there; false to wait for more
	cut   bool                  // f's read deadline is past; guarded by wake
}

// mend takes back what has cut p, or is said to have.
func (p *park) mend() {
	if p.cut {
		p.cut = false
		_ = p.f.SetReadDeadline(time.Time{})
	}
}

// sock is the connection below TLS. Its reader may ask it not to wait.
type sock struct {
	*net.TCPConn
	park
	// nowait makes Read return os.ErrDeadlineExceeded where it would wait.
	nowait atomic.Bool
	// The reader's:
	drained bool // the last read left nothing
	got     bool // some read gave something
	buf     []byte
	n       int
	err     error
	read    func(fd uintptr)
}

func newSock(c *net.TCPConn) (*sock, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, err
	}
	s := &sock{TCPConn: c, park: park{raw: raw, f: c}}
	// Made once: a closure made per call would be an allocation per call.
	s.read = func(fd uintptr) {
		for {
			if s.n, s.err = syscall.Read(int(fd), s.buf); s.err != syscall.EINTR {
				return
			}
		}
	}
	return s, nil
}

func (s *sock) Read(p []byte) (int, error) {
	if !s.nowait.Load() {
		return s.TCPConn.Read(p)
	}
	if s.drained {
		return 0, os.ErrDeadlineExceeded
	}
	s.buf = p
	err := s.raw.Control(s.read)
	s.buf = nil
	switch {
	case err != nil:
		return 0, err
	case s.err == syscall.EAGAIN:
		s.drained = true
		return 0, os.ErrDeadlineExceeded
	case s.err != nil:
		return 0, os.NewSyscallError("read", s.err)
	case s.n == 0 && len(p) > 0:
		return 0, io.EOF
	}
	s.drained, s.got = s.n < len(p), true
	return s.n, nil
}

// several is an epoll descriptor over connections, itself in the runtime's poller.
type several struct {
	park
	file   *os.File
	events [16]unix.EpollEvent
	n      int
}

func newSeveral(c *cq) (*several, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("epoll_create1", err)
	}
	if err := unix.SetNonblock(fd, true); err != nil { // or NewFile would not poll it
		_ = unix.Close(fd)
		return nil, os.NewSyscallError("fcntl", err)
	}
	f := os.NewFile(uintptr(fd), "epoll")
	raw, err := f.SyscallConn()
	if err = errors.Join(err, f.SetReadDeadline(time.Time{})); err != nil { // the poller does not watch it
		_ = f.Close()
		return nil, err
	}
	e := &several{park: park{raw: raw, f: f}, file: f}
	e.ready = func(fd uintptr) bool {
		if c.slept {
			return true
		}
		n, err := unix.EpollWait(int(fd), e.events[:], 0)
		e.n = max(n, 0)
		return n > 0 || err != nil || !c.fallAsleep(&e.park)
	}
	return e, nil
}

// ctl adds q's connection to e or takes it away.
func (e *several) ctl(op int, q *qp) error {
	var err error
	cerr := e.raw.Control(func(efd uintptr) {
		cerr := q.sock.raw.Control(func(fd uintptr) {
			err = unix.EpollCtl(int(efd), op, int(fd), &unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLRDHUP, Fd: int32(q.num)})
		})
		err = errors.Join(cerr, err)
	})
	return errors.Join(cerr, err)
}

var _ driver.Waiter = (*cq)(nil)

// attach makes q one of the CQ's and starts its reader.
func (c *cq) attach(q *qp) {
	o := &c.own
	o.Lock()
	defer o.Unlock()
	o.qps = append(o.qps, q)
	// The poller forgets what came before it is asked: so a read that finds nothing, and
	// not one that found a little, precedes the wait.
	q.sock.ready = func(uintptr) bool {
		if c.slept {
			return true
		}
		over := c.take(q)
		return over || c.n.Load() > 0 || q.sock.got || !c.fallAsleep(&q.sock.park)
	}
	c.giveLocked(q, byGoroutine)
}

// giveLocked has a goroutine read q.
func (c *cq) giveLocked(q *qp, by readBy) {
	if q.by == byWaiter {
		if q.listed {
			_ = c.own.several.ctl(unix.EPOLL_CTL_DEL, q)
			q.listed = false
		}
		c.wake.Lock()
		q.sock.mend()
		c.wake.Unlock()
		q.sock.nowait.Store(false)
	}
	if q.by = by; by == byGoroutine {
		c.own.goroutines++
	}
	q.stopped = make(chan struct{})
	go func() {
		defer close(q.stopped)
		q.readReplies()
	}()
}

// giveBackLocked ends the waiting goroutines' reading.
func (c *cq) giveBackLocked() {
	for _, q := range c.own.qps {
		if q.by == byWaiter {
			c.giveLocked(q, byGoroutine)
		}
	}
	c.owns.Store(false)
}

// takeLocked makes this goroutine the reader of every QP.
func (c *cq) takeLocked() {
	for _, q := range c.own.qps {
		if q.by != byGoroutine {
			continue
		}
		q.sock.nowait.Store(true)
		_ = q.sock.SetReadDeadline(past)
		<-q.stopped
		c.own.goroutines--
		select {
		case <-q.gone:
			q.by = byNobody
			continue
		default:
		}
		_ = q.sock.SetReadDeadline(time.Time{})
		q.by = byWaiter
		c.owns.Store(true)
	}
}

// detach leaves q to its closer: a goroutine reads what is left, and no Wait has to do
// with it any more.
func (c *cq) detach(q *qp) {
	o := &c.own
	o.Lock()
	defer o.Unlock()
	for i, x := range o.qps {
		if x == q {
			o.qps = append(o.qps[:i:i], o.qps[i+1:]...)
			break
		}
	}
	switch q.by {
	case byGoroutine:
		o.goroutines--
		q.by = byCloser
	case byWaiter:
		w := &c.wake
		w.Lock()
		for c.parked.Load() == &q.sock.park {
			c.wakeLocked()
			w.left.Wait()
		}
		w.Unlock()
		c.giveLocked(q, byCloser)
	}
}

// tick gives the QPs of a CQ that nobody waits for to goroutines, and looks whether idle ones have ended.
func (c *cq) tick() {
	o := &c.own
	o.Lock()
	defer o.Unlock()
	if !o.inside && !o.waited && c.owns.Load() {
		c.giveBackLocked()
	}
	o.waited = false
	for _, q := range o.qps {
		// A Wait reads the connections with something outstanding: the end of an idle one shows here.
		if q.by == byWaiter && !q.due() && c.parked.Load() != &q.sock.park {
			c.advance(q)
		}
	}
}

// Ready gives the QPs with something outstanding to goroutines if a Wait has taken
// them.
func (c *cq) Ready() <-chan struct{} {
	if c.owns.Load() {
		o := &c.own
		o.Lock()
		defer o.Unlock()
		if !o.inside {
			for _, q := range o.qps {
				if q.by == byWaiter && q.due() {
					c.giveBackLocked()
					break
				}
			}
		}
	}
	return c.ready
}

func (c *cq) Wake() {
	c.wake.Lock()
	defer c.wake.Unlock()
	c.wakeLocked()
}

func (c *cq) wakeLocked() {
	w := &c.wake
	if p := c.parked.Load(); p != nil && !w.woken {
		p.cut = true
		_ = p.f.SetReadDeadline(past)
	}
	w.woken = true
}

// wakeParked is Wake, if a Wait is parked.
func (c *cq) wakeParked() {
	if c.parked.Load() != nil {
		c.Wake()
	}
}

func (c *cq) Wait(d time.Duration) bool {
	if c.n.Load() > 0 {
		return true
	}
	if !c.able {
		return false
	}
	now := time.Now()
	var until time.Time
	if d > 0 {
		until = now.Add(d)
	}
	o := &c.own
	o.Lock()
	defer o.Unlock()
	o.inside, o.waited = true, true
	defer func() { o.inside = false }()
	if o.goroutines > 0 {
		c.takeLocked()
	}
	for {
		c.finishOver()
		if c.n.Load() > 0 {
			return true
		}
		p := c.choose()
		if p == nil {
			return false
		}
		if !c.park(p, until, now) {
			c.finishOver()
			return true
		}
		if e := o.several; e != nil && p == &e.park {
			for _, ev := range e.events[:e.n] {
				for _, q := range o.qps {
					if q.num == uint32(ev.Fd) {
						c.advance(q)
					}
				}
			}
			e.n = 0
		}
	}
}

// finishOver does what advance does at the end for QPs that have come to it otherwise: in a
// park, or because this side closed the connection, which wakes nobody.
func (c *cq) finishOver() {
	for _, q := range c.own.qps {
		if q.broken.Load() || q.status != 0 {
			c.advance(q)
		}
	}
}

// choose says what to park on: the connection of the only QP with something
// outstanding, or several; nil if there is none.
func (c *cq) choose() *park {
	o := &c.own
	var one *qp
	n := 0
	for _, q := range o.qps {
		if q.by == byWaiter && q.due() {
			one = q
			n++
		}
	}
	switch n {
	case 0:
		return nil
	case 1:
		return &one.sock.park
	}
	if o.several == nil {
		e, err := newSeveral(c)
		if err != nil {
			return c.decline()
		}
		o.several = e
	}
	for _, q := range o.qps {
		if q.by == byWaiter && !q.listed && q.due() {
			if err := o.several.ctl(unix.EPOLL_CTL_ADD, q); err != nil {
				if q.broken.Load() {
					continue // closed since; breakConn wakes the park
				}
				return c.decline()
			}
			q.listed = true
		}
	}
	return &o.several.park
}

// decline is choose where the kernel has no descriptor or memory left.
func (c *cq) decline() *park {
	c.giveBackLocked()
	return nil
}

// park takes in what p has, or else blocks until it may have something; false if woken, as
// it is at the time until.
func (c *cq) park(p *park, until, now time.Time) bool {
	w := &c.wake
	w.Lock()
	woken := w.woken
	if w.woken = false; !woken {
		p.mend()
		c.setAlarmLocked(until, now)
	}
	w.Unlock()
	if woken {
		return false
	}
	c.slept = false
	err := p.raw.Read(p.ready)
	cut := errors.Is(err, os.ErrDeadlineExceeded) // by a Wake, or by an Abort under way
	if c.slept || cut {
		w.Lock()
		c.parked.Store(nil)
		woken = w.woken
		w.woken = false
		p.cut = p.cut || cut
		w.left.Broadcast()
		w.Unlock()
	}
	if c.slept {
		c.own.Lock()
	}
	return !woken
}

// setAlarmLocked arranges a Wake at the time until, or before; zero is none.
func (c *cq) setAlarmLocked(until, now time.Time) {
	w := &c.wake
	switch {
	case until.IsZero() || w.at.After(now) && !w.at.After(until):
		return
	case w.alarm == nil:
		w.alarm = time.AfterFunc(until.Sub(now), c.Wake)
	default:
		w.alarm.Reset(until.Sub(now))
	}
	w.at = until
}

// fallAsleep lets go of own for a wait; false if there is something to do already.
func (c *cq) fallAsleep(p *park) bool {
	w := &c.wake
	w.Lock()
	defer w.Unlock()
	if w.woken {
		return false
	}
	c.parked.Store(p)
	// A completion that another goroutine pushed before parked was set woke nobody.
	if c.n.Load() > 0 {
		c.parked.Store(nil)
		return false
	}
	c.slept = true
	c.own.Unlock()
	return true
}

// take reads what q's connection has brought, and says whether that was the last.
func (c *cq) take(q *qp) (over bool) {
	if q.by != byWaiter {
		return true
	}
	q.sock.drained, q.sock.got = false, false
	q.status = q.read()
	return q.status != 0
}

// advance is take, and what has to be done at the end. Not for a park: closing a connection
// waits for whoever uses it.
func (c *cq) advance(q *qp) {
	if q.by == byWaiter && (q.status != 0 || c.take(q)) {
		q.by = byNobody
		q.finish(q.status)
	}
}
