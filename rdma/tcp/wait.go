package tcp

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvd-project/kvd/internal/poll"
	"github.com/kvd-project/kvd/rdma/driver"
)

// The connections of a CQ are in a poller (epoll) of its own, and whoever waits for the CQ waits in the kernel for all
// of them at once and reads what has come: no other goroutine has to be woken for a burst of replies. The thread that
// waits is held meanwhile and woken by the kernel itself; a goroutine parked by the runtime needs its poller first, a
// thread that looks for goroutines, and on the way often another one or two that find none.
//
// While nobody waits, from one tick of the watch timer to the next and before the first Wait, a goroutine of the CQ,
// its minder, does the same, so that a peer's end is noticed and replies to what is unsignaled are taken in.
//
// Where that is no gain, see reading.able, each QP has a goroutine that reads.

// readBy says who reads a QP's replies. The zero value is invalid.
type readBy uint8

const (
	// byGoroutine: one of its own.
	byGoroutine readBy = 1 + iota
	// byCQ: the Wait under way, or the minder.
	byCQ
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
	// looks: a Wait looks for a moment before it sleeps, see lookSoon. It was no gain on two processors.
	looks bool
	vain  uint // Waits since the last look that found something; the waiting goroutine's
	own   struct {
		sync.Mutex // held by a Wait and by the minder except while they are in the poller
		qps        []*qp
		poller     *poll.Poller  // of those that are byCQ; nil: there was none yet
		inside     bool          // a Wait is under way
		waited     bool          // one was, since the last tick
		minder     chan struct{} // closed when that has ended; nil: there is none
		dismissed  bool          // the minder is to end
	}
	owns   atomic.Bool // Waits read, and there is no minder
	parked atomic.Bool // a Wait is in the poller, or about to be; stored under wake
	wake   struct {
		sync.Mutex
		woken bool
		// alarm is a Wake at the time at: one that comes early does no harm, and setting it
		// anew for every wait costs more.
		alarm *time.Timer
		at    time.Time
	}
}

var _ driver.Waiter = (*cq)(nil)

// attach makes q one of the CQ's, and somebody read it. If it fails, q is of no use.
func (c *cq) attach(q *qp) error {
	o := &c.own
	o.Lock()
	defer o.Unlock()
	if !c.able {
		o.qps = append(o.qps, q)
		q.by = byGoroutine
		go q.readReplies()
		return nil
	}
	if o.poller == nil {
		p, err := poll.New()
		if err != nil {
			return err
		}
		o.poller = p
	}
	if err := q.sock.detach(); err != nil {
		return err
	}
	if err := o.poller.Add(q.sock.fd); err != nil {
		q.sock.release()
		return err
	}
	o.qps = append(o.qps, q)
	q.by = byCQ
	if !c.owns.Load() {
		c.mindLocked()
	}
	return nil
}

// mindLocked starts the minder, if there is none.
func (c *cq) mindLocked() {
	c.owns.Store(false)
	if c.own.minder == nil {
		c.own.minder = make(chan struct{})
		go c.mind(c.own.minder)
	}
}

// mind is the minder.
func (c *cq) mind(ended chan<- struct{}) {
	defer close(ended)
	o := &c.own
	for {
		ready, _ := o.poller.Wait(-1)
		o.Lock()
		if o.dismissed {
			o.Unlock()
			return // what is ready stays so
		}
		c.advanceAll(ready)
		o.Unlock()
	}
}

// dismissLocked ends the minder. It lets go of own meanwhile.
func (c *cq) dismissLocked() {
	o := &c.own
	if ended := o.minder; ended != nil {
		o.dismissed = true
		o.poller.Wake()
		o.Unlock()
		<-ended
		o.Lock()
		o.minder, o.dismissed = nil, false
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
		q.by = byCloser
	case byCQ:
		o.poller.Remove(q.sock.fd)
		q.by = byCloser
		go q.readOut()
		c.wakeParked() // a Wait for this one alone has nothing to wait for any more
	}
}

// tick has a CQ that nobody waits for minded, and looks whether idle connections have ended.
func (c *cq) tick() {
	o := &c.own
	o.Lock()
	defer o.Unlock()
	if !c.owns.Load() {
		return
	}
	if !o.inside && !o.waited {
		c.mindLocked()
		return
	}
	o.waited = false
	for _, q := range o.qps {
		if !q.due() { // else a Wait is under way, or soon is
			c.advance(q)
		}
	}
}

// Ready has the CQ minded if anything is outstanding.
func (c *cq) Ready() <-chan struct{} {
	if c.owns.Load() {
		o := &c.own
		o.Lock()
		defer o.Unlock()
		if !o.inside && c.waits() {
			c.mindLocked()
		}
	}
	return c.ready
}

func (c *cq) Wake() {
	c.wake.Lock()
	defer c.wake.Unlock()
	if c.parked.Load() && !c.wake.woken {
		c.own.poller.Wake()
	}
	c.wake.woken = true
}

func (c *cq) wakeParked() {
	if c.parked.Load() {
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
	if !c.owns.Load() {
		c.owns.Store(true)
		c.dismissLocked()
	}
	for {
		if c.n.Load() > 0 {
			return true
		}
		if !c.waits() {
			return false
		}
		if !c.park(until, now) {
			return true
		}
	}
}

// waits reports whether a connection that a Wait reads has something outstanding.
func (c *cq) waits() bool {
	for _, q := range c.own.qps {
		if q.by == byCQ && q.due() {
			return true
		}
	}
	return false
}

// park blocks until a connection has brought something, and takes that in; false if woken, as it is at the time until.
func (c *cq) park(until, now time.Time) bool {
	w := &c.wake
	w.Lock()
	if w.woken {
		w.woken = false
		w.Unlock()
		return false
	}
	c.setAlarmLocked(until, now)
	c.parked.Store(true)
	// A completion that another goroutine pushed before parked was set woke nobody.
	some := c.n.Load() > 0
	w.Unlock()
	var ready []int
	if !some {
		c.own.Unlock()
		c.lookSoon()
		ready, _ = c.own.poller.Wait(-1)
		c.own.Lock()
	}
	w.Lock()
	c.parked.Store(false)
	woken := w.woken
	w.woken = false
	w.Unlock()
	c.advanceAll(ready)
	return !woken
}

const (
	// soon is how long a Wait looks for replies before it sleeps. Most replies within a machine come earlier, and then
	// neither side pays for waking this one.
	soon = 15 * time.Microsecond
	// vainLooks in a row are a sign that replies take longer; from then on a Wait looks once in lookAgain times.
	vainLooks, lookAgain = 4, 64
)

// lookSoon looks for replies for a moment. The goroutine of a Wait alone calls it.
func (c *cq) lookSoon() {
	switch {
	case !c.looks || c.vain >= vainLooks && c.vain%lookAgain != 0:
		c.vain++
	case c.own.poller.Look(soon):
		c.vain = 0
	default:
		c.vain++
	}
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

// advanceAll is advance of the connections that are ready. If a connection has left since and another has its
// descriptor, that is read in vain.
func (c *cq) advanceAll(ready []int) {
	for _, fd := range ready {
		for _, q := range c.own.qps {
			if q.by == byCQ && q.sock.fd == fd {
				c.advance(q)
			}
		}
	}
}

// advance takes in what q's connection has brought, and does what has to be done at its end.
func (c *cq) advance(q *qp) {
	if q.by != byCQ {
		return
	}
	q.sock.drained, q.turn = false, turnMax
	if status := q.read(); status != 0 {
		c.own.poller.Remove(q.sock.fd)
		q.by = byNobody
		q.finish(status)
	}
}
