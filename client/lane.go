package client

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/internal/layout"
)

// call is one operation as its caller sees it. Its fields belong to the caller
// until it is enqueued, then to the lane's leader until it is finished.
type call struct {
	// request
	kind      index.Kind
	cond      index.Cond
	key       []byte
	value     []byte
	hash      uint64
	check     uint64
	ifVersion uint64
	expiry    uint64
	flags     layout.RecordFlags
	modify    modifyFunc
	update    UpdateFunc
	prep      func(*index.Op) // anything else
	// take extracts the answer while the Op's buffers are still its own; it is
	// not called once the caller has gone.
	take func(*call, *index.Op)
	dst  []byte
	// limit is LimitMemory's, 0 if there is none.
	limit int

	// answer
	err     error
	version uint64
	item    Item
	n       int
	rounds  int

	w        *waiter
	task     *engine.Task
	cancel   error // set when the caller went before the operation began
	finished bool
}

// waiter is a goroutine that waits for one or more calls on one lane.
type waiter struct {
	ch       chan signal
	calls    []*call
	left     int  // calls not finished; the leader's
	leading  bool // its goroutine leads: nobody need tell it
	deadline int64
}

func newWaiter(calls []*call, deadline int64) *waiter {
	w := &waiter{ch: make(chan signal, 1), calls: calls, left: len(calls), deadline: deadline}
	for _, c := range calls {
		c.w = w
	}
	return w
}

type signal uint8

const (
	sigDone signal = 1 + iota
	sigLead        // the receiver leads the lane from now on
)

// laneDriver makes a engine.Lane blocking. Whoever needs the lane and finds it
// free leads it, with its own goroutine: no switch in the common case. Others
// enqueue and wait, and their operations share the leader's doorbells. A leader
// whose own calls are done hands over to somebody who still waits. (Combining,
// after Hendler et al., "Flat Combining", SPAA 2010.)
type laneDriver struct {
	l *engine.Lane
	s *sess
	// lead is 0 while nobody leads and nothing is under way; else 1 + a lower
	// bound of the reclaim epoch at the start of every operation under way.
	lead atomic.Uint64
	// pendingN is len(pending.ws), readable without the lock.
	pendingN atomic.Int32
	pending  struct {
		sync.Mutex
		ws []*waiter
	}

	// The leader's:
	waiting []*waiter // others whose calls are under way
	timer   *time.Timer
	self    waiter // a lone caller's, so that it allocates nothing
	selfc   call
	selfcs  [1]*call
	quick   [1]engine.Quick
	ready   [3]<-chan struct{}
	done    func(*engine.Task)
	spins   int // see tryLeadSoon

	expiries expiries // what the leaders put, for the sweep
}

func newLaneDriver(s *sess, l *engine.Lane, devices int) *laneDriver {
	d := &laneDriver{l: l, s: s, timer: time.NewTimer(time.Hour)}
	d.timer.Stop()
	for i := range min(devices, len(d.ready)) {
		d.ready[i] = l.CQ(i).Ready()
	}
	if runtime.GOMAXPROCS(0) > 1 {
		d.spins = 256
	}
	d.selfcs[0] = &d.selfc
	d.done = d.taskDone
	return d
}

func (d *laneDriver) tryLead() bool {
	return d.lead.CompareAndSwap(0, d.s.core.Epoch()+1)
}

// tryLeadSoon is tryLead, for a moment again and again: where every provider
// executes within PostSend, a leader is done sooner than another goroutine is
// woken.
func (d *laneDriver) tryLeadSoon() bool {
	for i := 0; !d.tryLead(); i++ {
		for d.lead.Load() != 0 {
			if i++; i >= d.spins || !d.l.Synchronous() {
				return false
			}
		}
	}
	return true
}

// start begins a call's operation; the leader's.
func (d *laneDriver) start(c *call) {
	if c.cancel != nil {
		c.err = c.cancel
		d.callDone(c)
		return
	}
	t, err := d.l.NewTask()
	if err != nil {
		c.err = fmt.Errorf("%w: %w", engine.ErrBuffer, err)
		d.callDone(c)
		return
	}
	o := &t.Op
	o.Kind, o.Cond, o.Key, o.Value, o.Hash, o.Check = c.kind, c.cond, c.key, c.value, c.hash, c.check
	o.IfVersion, o.Expiry, o.Flags, o.Modify = c.ifVersion, c.expiry, c.flags, c.modify
	if c.update != nil {
		o.Modify = modifyOf(c, o)
	}
	if c.prep != nil {
		c.prep(o)
	}
	t.Tag, t.Done, t.Deadline, t.Limit = c, d.done, c.w.deadline, c.limit
	c.task = t
	d.l.Start(t)
}

// taskDone runs on the leader when an operation has ended.
func (d *laneDriver) taskDone(t *engine.Task) {
	c, _ := t.Tag.(*call)
	if c != nil {
		c.err, c.version, c.rounds = t.Op.Err, t.Op.Version, int(t.Op.Rounds)
		if c.take != nil && c.err == nil {
			c.take(c, &t.Op)
		}
		if c.expiry != 0 && (c.err == nil || errors.Is(c.err, index.ErrUnknown)) {
			d.expires(c.expiry, c.hash)
		}
		d.callDone(c)
	}
	d.l.Recycle(t)
}

// callDone ends a call towards its waiter.
func (d *laneDriver) callDone(c *call) {
	c.finished, c.task = true, nil
	w := c.w
	if w.left--; w.left == 0 && !w.leading {
		for i, x := range d.waiting {
			if x == w {
				d.waiting = append(d.waiting[:i], d.waiting[i+1:]...)
				break
			}
		}
		w.ch <- sigDone
	}
}

// takePending starts what others have enqueued.
func (d *laneDriver) takePending() {
	if d.pendingN.Load() == 0 {
		return
	}
	d.pending.Lock()
	ws := d.pending.ws
	d.pending.ws = nil
	d.pendingN.Store(0)
	d.pending.Unlock()
	for _, w := range ws {
		d.waiting = append(d.waiting, w)
		for _, c := range w.calls {
			d.start(c)
		}
	}
}

func (d *laneDriver) enqueue(w *waiter) {
	d.pending.Lock()
	d.pending.ws = append(d.pending.ws, w)
	d.pendingN.Store(int32(len(d.pending.ws)))
	d.pending.Unlock()
}

// abandon gives up a call whose caller goes; the leader's. What has verbs under
// way stays in flight in the lane.
func (d *laneDriver) abandon(c *call, err error) {
	if c.finished {
		return
	}
	t := c.task
	posted := t.Op.Posted()
	d.l.Orphan(t, err)
	if c.finished {
		return // nothing was under way: it ended at once, with its own verdict
	}
	t.Tag = nil
	c.err = err
	if posted {
		c.err = fmt.Errorf("%w: %w", ErrUnknownOutcome, err)
	}
	d.callDone(c)
}

// pump moves the lane and ends what is overdue.
func (d *laneDriver) pump() {
	for {
		d.takePending()
		d.l.Pump()
		if d.pendingN.Load() == 0 {
			break
		}
	}
}

func (d *laneDriver) overdue() {
	for {
		t := d.l.Overdue()
		if t == nil {
			return
		}
		if c, ok := t.Tag.(*call); ok {
			d.abandon(c, engine.ErrTimeout)
		} else {
			d.l.Orphan(t, engine.ErrTimeout)
		}
	}
}

// work leads until w is done, or, w nil, until nothing is under way or somebody
// else could lead.
func (d *laneDriver) work(ctx context.Context, w *waiter) {
	d.pump()
	if w != nil && w.left > 0 && w.deadline == 0 {
		w.deadline = engine.Nanos() + int64(d.s.c.o.OpTimeout)
		for _, c := range w.calls {
			if c.task != nil {
				c.task.Deadline = w.deadline
			}
		}
	}
	for w == nil && d.l.Active() > 0 && len(d.waiting) == 0 || w != nil && w.left > 0 {
		if d.s.dead.Load() {
			d.abandonAll()
			return
		}
		d.publishOldest()
		if !d.sleep(ctx) {
			for _, c := range w.calls {
				d.abandon(c, context.Cause(ctx))
			}
		}
		d.pump()
		d.overdue()
	}
}

// abandonAll ends every call of a session that is lost.
func (d *laneDriver) abandonAll() {
	for _, t := range d.l.Tasks() {
		if c, ok := t.Tag.(*call); ok {
			d.abandon(c, engine.ErrLease)
		}
	}
}

// drive is work, then handOver.
func (d *laneDriver) drive(ctx context.Context, w *waiter) {
	d.work(ctx, w)
	d.handOver()
}

// publishOldest keeps the renewer from waiting for a leader that sleeps.
func (d *laneDriver) publishOldest() {
	if e, ok := d.l.Oldest(); ok {
		d.lead.Store(e + 1)
	} else {
		d.lead.Store(d.s.core.Epoch() + 1)
	}
}

// sleep waits for completions, mail, time or the context; false for the last.
func (d *laneDriver) sleep(ctx context.Context) bool {
	var wake <-chan time.Time
	if at := d.l.NextWake(); at != 0 {
		left := time.Duration(at - engine.Nanos())
		if left <= 20*time.Microsecond {
			runtime.Gosched()
			return ctx.Err() == nil
		}
		d.timer.Reset(left)
		wake = d.timer.C
	}
	WillWait(ctx)
	ok := true
	select {
	case <-d.ready[0]:
	case <-d.ready[1]:
	case <-d.ready[2]:
	case <-d.l.Kicked():
	case <-wake:
	case <-d.s.ctx.Done():
	case <-ctx.Done():
		ok = false
	}
	if wake != nil {
		d.timer.Stop()
	}
	return ok
}

// handOver ends this goroutine's leadership.
func (d *laneDriver) handOver() {
	for {
		if len(d.waiting) > 0 {
			d.publishOldest()
			w := d.waiting[0]
			d.waiting = append(d.waiting[:0], d.waiting[1:]...)
			w.leading = true
			w.ch <- sigLead
			return
		}
		if d.s.dead.Load() {
			d.abandonAll() // nobody drives what is left: its verbs end with the queue pairs
		} else if d.l.Active() > 0 {
			d.publishOldest()
			d.s.wg.Add(1)
			go func() {
				defer d.s.wg.Done()
				d.drive(context.Background(), nil)
			}()
			return
		}
		d.lead.Store(0)
		if d.pendingN.Load() == 0 || !d.tryLead() {
			return
		}
		d.takePending()
		d.l.Pump()
	}
}

// exec performs req and leaves the answer in it. If the lane is free this
// goroutine leads it, without allocation or switch where the provider is
// synchronous.
func (d *laneDriver) exec(ctx context.Context, req *call) {
	if d.s.dead.Load() || d.s.shut.Load() {
		req.err = engine.ErrLease
		return
	}
	if d.tryLeadSoon() {
		c := &d.selfc
		*c = *req
		c.w = &d.self
		d.self = waiter{calls: d.selfcs[:], left: 1, leading: true}
		d.start(c)
		d.work(ctx, &d.self)
		req.err, req.version, req.item, req.n, req.rounds = c.err, c.version, c.item, c.n, c.rounds
		*c = call{}
		d.handOver()
		return
	}
	c := new(call)
	*c = *req
	w := newWaiter([]*call{c}, engine.Nanos()+int64(d.s.c.o.OpTimeout))
	d.enqueue(w)
	d.join(ctx, w)
	req.err, req.version, req.item, req.n, req.rounds = c.err, c.version, c.item, c.n, c.rounds
}

// join leads the lane or waits for whoever does, until w, which has been
// enqueued, is done.
func (d *laneDriver) join(ctx context.Context, w *waiter) {
	if d.tryLead() {
		// Takes w among the pending; it leads itself unless it is done by then.
		d.pump()
		d.handOver()
	} else {
		d.l.Kick()
	}
	d.wait(ctx, w)
}

// wait blocks until w is done, leading the lane if asked to.
func (d *laneDriver) wait(ctx context.Context, w *waiter) {
	WillWait(ctx)
	select {
	case s := <-w.ch:
		if s == sigLead {
			d.drive(ctx, w)
		}
		return
	case <-d.s.ctx.Done():
		if d.withdraw(w, engine.ErrLease) {
			return
		}
		d.l.Kick()
	case <-ctx.Done():
		// The leader ends the calls; until it has, this waiter may be made leader.
		err := context.Cause(ctx)
		if d.withdraw(w, err) {
			return
		}
		d.l.Deliver(func(*engine.Lane) {
			for _, c := range w.calls {
				if c.task != nil {
					d.abandon(c, err)
				} else if !c.finished {
					c.cancel = err
				}
			}
		})
	}
	if s := <-w.ch; s == sigLead {
		d.drive(ctx, w)
	}
}

// withdraw takes w back if no leader has seen it: nothing of it happened.
func (d *laneDriver) withdraw(w *waiter, err error) bool {
	d.pending.Lock()
	defer d.pending.Unlock()
	for i, x := range d.pending.ws {
		if x == w {
			d.pending.ws = append(d.pending.ws[:i], d.pending.ws[i+1:]...)
			d.pendingN.Store(int32(len(d.pending.ws)))
			for _, c := range w.calls {
				c.err = err
			}
			return true
		}
	}
	return false
}

var errSessionLost = errors.New("session lost")
