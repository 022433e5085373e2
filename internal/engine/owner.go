package engine

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvd-project/kvd/index"
)

// ownership is what makes a lane blocking: one goroutine at a time owns it and does its work. A caller that
// needs the lane and finds it free becomes the owner; others queue. An owner whose own operations are over
// hands the lane to somebody who still waits.
type ownership struct {
	// owned is 0 while nobody owns the lane and nothing is under way; else 1 + a lower
	// bound of the reclaim epoch at the start of every operation under way.
	owned atomic.Uint64
	// queuedN is len(queued.ws), readable without the lock.
	queuedN atomic.Int32
	queued  struct {
		sync.Mutex
		ws []*waiter
	}

	// The owner's:
	waiting []*waiter // others whose operations are under way
	told    int       // how many of those heard in this turn that they are done
	timer   *time.Timer
	self    waiter // the owner's own, so that it allocates nothing
	spins   int    // see tryOwnSoon
}

// waiter is a goroutine that waits for one or more Ops on one lane.
type waiter struct {
	ch       chan signal
	ops      []*Op
	left     int   // ops that are not finished; the owner's
	owns     bool  // its goroutine owns the lane: nobody need tell it
	tried    bool  // without Tasks, on another lane
	deadline int64 // Options.Nanos, 0: not set yet
	limit    int   // see Task.Limit
}

func (l *Lane) newWaiter(ctx context.Context, ops []*Op) *waiter {
	return &waiter{ch: make(chan signal, 1), ops: ops, left: len(ops), deadline: l.core.opts.Nanos() +
		l.core.opts.OpTimeout, limit: l.core.limit(ctx)}
}

type signal uint8

const (
	sigDone signal = 1 + iota
	sigOwn         // the receiver owns the lane from now on
)

// TryOwn makes the caller the lane's owner if it has none. [Lane.HandOver] ends that.
func (l *Lane) TryOwn() bool {
	return l.owned.CompareAndSwap(0, l.core.epoch.Load()+1)
}

// tryOwnSoon is TryOwn, for a moment again and again: if every provider
// executes within PostSend, an owner is done sooner than another goroutine is
// woken.
func (l *Lane) tryOwnSoon() bool {
	for i := 0; !l.TryOwn(); i++ {
		for l.owned.Load() != 0 {
			if i++; i >= l.spins || !l.Synchronous() {
				return false
			}
		}
	}
	return true
}

// Under is the least reclaim epoch at the start of any operation in flight on the lane that its owner has published.
// Any goroutine may call it.
func (l *Lane) Under() (epoch uint64, ok bool) {
	if o := l.owned.Load(); o != 0 {
		return o - 1, true
	}
	return 0, false
}

// begin starts the Ops of w that are not finished: in flights, or each in a Task.
func (l *Lane) begin(w *waiter) {
	l.refreshView()
	fly := !l.Synchronous()
	if fly && len(w.ops) > 1 {
		l.touchHints(w.ops)
	}
	for _, op := range w.ops {
		switch {
		case op.over:
		case op.task != nil: // Hinted has begun it
			op.w = w
			op.task.expireAt(w.deadline)
		case !fly || !l.board(op, w):
			l.start(op, w)
		}
	}
}

// start gives op a Task. w is told when op is over.
func (l *Lane) start(op *Op, w *waiter) {
	op.w = w
	if op.cancel != nil {
		op.Err = op.cancel
		l.finished(op)
		return
	}
	t, err := l.NewTask()
	if err != nil {
		op.Err = fmt.Errorf("%w: %w", ErrBuffer, err)
		l.finished(op)
		return
	}
	t.Deadline = w.deadline
	if op.Key != nil {
		t.Limit = w.limit
	}
	t.learnt = op.learnt
	l.startFor(op, t)
}

func (l *Lane) startFor(op *Op, t *Task) {
	o := &t.Op
	o.Kind, o.Cond, o.Flags, o.Key, o.Value, o.Hash, o.Check = op.Kind, op.Cond, op.Flags, op.Key, op.Value, op.Hash,
		op.Check
	o.Keeps = op.Keeps
	o.IfVersion, o.Expiry, o.Modify, o.Scan, o.Raw, o.Machine, o.Txn = op.IfVersion, op.Expiry, op.Modify, op.Scan,
		op.Raw, op.Machine, op.Txn
	o.Part, o.Pinned = op.Part, op.Pinned
	t.Filler, _ = op.Asker.(Filler)
	t.asked, t.Done = op, answer
	op.task = t
	l.Start(t)
}

// answer ends the Op that a task was for, if its caller still waits.
func answer(t *Task) {
	l, o := t.lane, &t.Op
	if op := t.asked; op != nil {
		op.Err, op.Version, op.Rounds = o.Err, o.Version, op.flown+o.Rounds
		if op.Err == nil && o.InPlace() {
			op.Err = l.keep(op, t)
		}
		if op.Err == nil && op.Asker != nil {
			op.Asker.Take(&o.Record, o.Parts())
		}
		if o.Kind == index.Put || o.Kind == index.Modify || o.Kind == index.Prepare {
			if op.Err == nil || errors.Is(op.Err, index.ErrUnknown) {
				l.expires(o.Expiry, o.Hash)
			}
		}
		if x, ok := o.Machine.(*index.Transaction); ok {
			for i := range x.Legs {
				l.expires(x.Legs[i].Expiry, x.Legs[i].Hash)
			}
		}
		l.finished(op)
	}
	l.Recycle(t)
}

// expires tells of a record that was written and expires.
func (l *Lane) expires(expiry, hash uint64) {
	if expiry != 0 && l.core.opts.Expiring != nil {
		l.core.opts.Expiring(l, expiry, hash)
	}
}

// finished ends an Op towards its waiter, if it has one yet.
func (l *Lane) finished(op *Op) {
	w := op.w
	op.over, op.task, op.w = true, nil, nil
	if w == nil {
		return
	}
	if w.left--; w.left == 0 && !w.owns {
		for i, x := range l.waiting {
			if x == w {
				l.waiting = append(l.waiting[:i], l.waiting[i+1:]...)
				break
			}
		}
		l.told++
		w.ch <- sigDone
	}
}

func (l *Lane) takeQueued() {
	if l.queuedN.Load() == 0 {
		return
	}
	l.queued.Lock()
	ws := l.queued.ws
	l.queued.ws = nil
	l.queuedN.Store(0)
	l.queued.Unlock()
	for _, w := range ws {
		l.waiting = append(l.waiting, w)
		if !l.hintQueued(w) {
			l.begin(w)
		}
	}
}

// hintQueued performs what it can of w's operations at once, as their caller would have if it had owned the lane, and
// reports whether that was all: then the caller may have them back already.
func (l *Lane) hintQueued(w *waiter) (all bool) {
	if w.tried || !l.Synchronous() || slices.ContainsFunc(w.ops, func(op *Op) bool { return op.cancel != nil }) {
		return false
	}
	l.refreshView()
	for _, op := range w.ops {
		op.w = w
	}
	return l.Hinted(w.ops) == 0
}

// enqueue leaves w to the lane's owner, or to the next one.
func (l *Lane) enqueue(w *waiter) {
	l.queued.Lock()
	l.queued.ws = append(l.queued.ws, w)
	l.queuedN.Store(int32(len(l.queued.ws)))
	l.queued.Unlock()
}

// abandon gives up an Op whose caller goes. A task that has verbs under way stays in flight in the lane.
func (l *Lane) abandon(op *Op, err error) {
	if op.over {
		return
	}
	t := op.task
	if t.flight != nil {
		t.flight.leaveFlight(t, op)
		op.Err = err
		l.finished(op)
		return
	}
	posted := t.Op.Posted()
	l.Orphan(t, err)
	if t.asked != op {
		return // nothing was under way: it ended at once, with its own verdict, and is its caller's again
	}
	t.asked = nil
	op.Err = err
	if posted {
		op.Err = fmt.Errorf("%w: %w", index.ErrUnknown, err)
	}
	l.finished(op)
}

// Turn moves the lane, and what others have queued, until it would have to wait. The owner calls it.
func (l *Lane) Turn() {
	for {
		l.takeQueued()
		l.Pump()
		if l.told > 1 && !l.Synchronous() {
			runtime.Gosched() // what they ask next shares a doorbell
		}
		l.told = 0
		if l.queuedN.Load() == 0 {
			break
		}
	}
}

func (l *Lane) endOverdue() {
	for {
		t := l.Overdue()
		if t == nil {
			return
		}
		switch {
		case t.flight != nil:
			l.endOverdueGets(t)
		case t.asked != nil:
			l.abandon(t.asked, ErrTimeout)
		default:
			l.Orphan(t, ErrTimeout)
		}
	}
}

// work does the lane's work until w is done, or, w nil, until nothing is under way or somebody
// else could own the lane.
func (l *Lane) work(ctx context.Context, w *waiter) {
	l.Turn()
	if w != nil && w.left > 0 && w.deadline == 0 {
		w.deadline = l.core.opts.Nanos() + l.core.opts.OpTimeout
		for _, op := range w.ops {
			if op.task != nil {
				op.task.expireAt(w.deadline)
			}
		}
	}
	for w == nil && l.Active() > 0 && len(l.waiting) == 0 || w != nil && w.left > 0 {
		if l.core.dead.Load() {
			l.abandonAll()
			return
		}
		l.publishOldest()
		if !l.sleep(ctx) {
			for _, op := range w.ops {
				l.abandon(op, context.Cause(ctx))
			}
		}
		l.Turn()
		l.endOverdue()
	}
}

// abandonAll ends every Op of a session that is over.
func (l *Lane) abandonAll() {
	for _, t := range l.Tasks() {
		if t.asked != nil {
			l.abandon(t.asked, ErrLease)
		}
		if f := t.flight; f != nil {
			for i := range f.gets[:f.n] {
				if op := f.gets[i].op; op != nil {
					l.abandon(op, ErrLease)
				}
			}
		}
	}
}

func (l *Lane) drive(ctx context.Context, w *waiter) {
	l.work(ctx, w)
	l.HandOver()
}

// publishOldest keeps the session's renewals from waiting for an owner that sleeps.
func (l *Lane) publishOldest() {
	if e, ok := l.Oldest(); ok {
		l.owned.Store(e + 1)
	} else {
		l.owned.Store(l.core.epoch.Load() + 1)
	}
}

// sleep waits for completions, mail, time or the context; false for the last.
func (l *Lane) sleep(ctx context.Context) bool {
	var left time.Duration
	if at := l.NextWake(); at != 0 {
		left = time.Duration(at - l.core.opts.Nanos())
		if left <= 20*time.Microsecond {
			runtime.Gosched()
			return ctx.Err() == nil
		}
	}
	l.core.willWait(ctx)
	if l.waitOnCQ(ctx, left) {
		return ctx.Err() == nil
	}
	var wake <-chan time.Time
	if left != 0 {
		if l.timer == nil {
			l.timer = time.NewTimer(left)
		} else {
			l.timer.Reset(left)
		}
		wake = l.timer.C
	}
	var ready [3]<-chan struct{}
	for i := range min(len(l.cqs), len(ready)) {
		ready[i] = l.cqs[i].Ready()
	}
	ok := true
	select {
	case <-ready[0]:
	case <-ready[1]:
	case <-ready[2]:
	case <-l.Kicked():
	case <-wake:
	case <-l.core.over:
	case <-ctx.Done():
		ok = false
	}
	if wake != nil {
		l.timer.Stop()
	}
	return ok
}

// waitOnCQ is sleep if all that can be under way completes on one CQ, whose connections this goroutine then reads
// itself: it returns after a completion, a Kick, or left if that is not 0, perhaps earlier. It is false, at once, if
// there is no such CQ, or if that has nothing to read. The end of ctx or of the session ends it by a Kick.
func (l *Lane) waitOnCQ(ctx context.Context, left time.Duration) bool {
	cq := l.waitOn
	if cq == nil || l.core.dead.Load() {
		return false
	}
	if ctx.Done() != nil {
		defer context.AfterFunc(ctx, l.Kick)()
	}
	l.asleep.Store(cq)
	defer l.asleep.Store(nil)
	select {
	case <-l.kick: // it came before asleep was set, and woke nobody
		return true
	default:
	}
	if !cq.Wait(left) {
		return false
	}
	select {
	case <-l.kick:
	default:
	}
	return true
}

// HandOver ends the caller's ownership. A waiter owns the lane next, or a goroutine of its own while operations are
// under way; else it is free.
func (l *Lane) HandOver() {
	for {
		if len(l.waiting) > 0 {
			l.publishOldest()
			w := l.waiting[0]
			l.waiting = append(l.waiting[:0], l.waiting[1:]...)
			w.owns = true
			w.ch <- sigOwn
			return
		}
		if l.core.dead.Load() {
			l.abandonAll() // nobody drives what is left: its verbs end with the queue pairs
		} else if l.Active() > 0 {
			l.publishOldest()
			l.core.drivers.Go(func() { l.drive(context.Background(), nil) })
			return
		}
		l.owned.Store(0)
		if l.queuedN.Load() == 0 || !l.TryOwn() {
			return
		}
		l.takeQueued()
		l.Pump()
	}
}

// join owns the lane or waits for its owner, until w, which is queued, is done.
func (l *Lane) join(ctx context.Context, w *waiter) {
	if l.TryOwn() {
		// Takes w among the queued; it owns the lane itself unless it is done by then.
		l.Turn()
		l.HandOver()
	} else {
		l.Kick()
	}
	l.await(ctx, w)
}

// await blocks until w is done, owning the lane if asked to.
func (l *Lane) await(ctx context.Context, w *waiter) {
	l.core.willWait(ctx)
	select {
	case s := <-w.ch:
		if s == sigOwn {
			l.drive(ctx, w)
		}
		return
	case <-l.core.over:
		if l.withdraw(w, ErrLease) {
			return
		}
		l.Kick()
	case <-ctx.Done():
		// The owner ends the Ops; until it has, this waiter may be made the owner.
		err := context.Cause(ctx)
		if l.withdraw(w, err) {
			return
		}
		l.Deliver(func(*Lane) {
			for i := range w.ops {
				if w.left == 0 {
					return // they are over, and somebody else's by now
				}
				op := w.ops[i]
				if op.task != nil {
					l.abandon(op, err)
				} else if !op.over {
					op.cancel = err
				}
			}
		})
	}
	if s := <-w.ch; s == sigOwn {
		l.drive(ctx, w)
	}
}

// withdraw takes w back if no owner has seen it: nothing of it happened.
func (l *Lane) withdraw(w *waiter, err error) bool {
	l.queued.Lock()
	defer l.queued.Unlock()
	for i, x := range l.queued.ws {
		if x == w {
			l.queued.ws = append(l.queued.ws[:i], l.queued.ws[i+1:]...)
			l.queuedN.Store(int32(len(l.queued.ws)))
			for _, op := range w.ops {
				op.Err = err
			}
			return true
		}
	}
	return false
}

// Visit has the lane look at what is new for it: by the caller if nobody owns it, else by its owner.
func (l *Lane) Visit() {
	if l.TryOwn() {
		l.Turn()
		l.HandOver()
	} else {
		l.Kick()
	}
}

// isOver reports whether no operation begins any more.
func (c *Core) isOver() bool { return c.shut.Load() || c.dead.Load() }

// Shut lets no operation begin any more; those under way go on.
func (c *Core) Shut() { c.shut.Store(true) }

// End ends every operation: callers that wait give up, with ErrLease. It reports whether it is the first to do so.
func (c *Core) End() bool {
	if c.dead.Swap(true) {
		return false
	}
	close(c.over)
	c.holds.Lock()
	c.endHoldsLocked(func(*Hold) bool { return true })
	c.holds.Unlock()
	for _, l := range c.lanes {
		l.Kick() // see waitOnCQ
	}
	return true
}

// Dead reports whether End was called.
func (c *Core) Dead() bool { return c.dead.Load() }

// Wait returns when no lane is driven on behalf of callers that have gone; after End.
func (c *Core) Wait() { c.drivers.Wait() }

func (c *Core) limit(ctx context.Context) int {
	if c.opts.Limit == nil {
		return 0
	}
	return c.opts.Limit(ctx)
}

func (c *Core) willWait(ctx context.Context) {
	if c.opts.WillWait != nil {
		c.opts.WillWait(ctx)
	}
}
