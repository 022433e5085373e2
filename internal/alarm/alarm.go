// Package alarm has timers for processes that do nothing most of the time. They wake a
// process when they are due and at no other time.
//
// A timer of the Go runtime costs an idle process more. It is due for two threads: the
// runtime's monitor, which comes on time, and the one that polls. The kernel lets the latter
// sleep for a thousandth of the time longer. Until it comes, the monitor looks ten times in a
// millisecond. And a timer that was stopped, or reset to later, wakes the process all the same
// when it would have been due. Here one descriptor (timerfd_create(2)), which the runtime polls
// like a connection, is set to the earliest time of all. A timer may be late by a hundredth of
// its time ([slackShare]). So another one that is due by then is seen to in the same wake-up.
//
// The package leaves to its users which of their timers matter: those of a session, a watch or a renewal
// that lasts while nothing happens. It does not know synctest's clock.
//
// Start with [Timer] and [WithTimeout]. All may be called concurrently.
package alarm

import (
	"container/heap"
	"sync"
	"time"
)

// Timer is like a time.Timer: it sends on C once, when it is due.
//
// A time below [brief] is left to a timer of the runtime. While all processors are busy the runtime looks at
// its timers often, and at descriptors every ten milliseconds.
type Timer struct {
	C <-chan struct{}
	c chan struct{} // capacity 1
	e entry

	// Guarded by e.q.mu.
	short   *time.Timer // nil: none was needed yet
	shortly bool        // short is to ring at e.at
}

// brief is the least time that is left to an idle process's waker.
const brief = 50 * time.Millisecond

// NewTimer makes a timer that is due after d.
func NewTimer(d time.Duration) *Timer { return newTimer(process(), d) }

func newTimer(q *queue, d time.Duration) *Timer {
	t := &Timer{c: make(chan struct{}, 1)}
	t.C = t.c
	t.e = entry{q: q, index: -1, ring: func() { t.c <- struct{}{} }} // C is empty while it is set
	t.Reset(d)
	return t
}

// Reset makes the timer due after d, and not before; what it has sent and nobody has received is gone.
func (t *Timer) Reset(d time.Duration) {
	q := t.e.q
	q.mu.Lock()
	defer q.mu.Unlock()
	t.stopLocked()
	if d >= brief {
		q.setLocked(&t.e, d)
		return
	}
	t.e.at, t.shortly = q.now()+d, true
	if t.short == nil {
		t.short = time.AfterFunc(d, t.ringShort)
	} else {
		t.short.Reset(d)
	}
}

// ringShort is called when short has fired, perhaps for a time that is not wanted any more.
func (t *Timer) ringShort() {
	q := t.e.q
	q.mu.Lock()
	defer q.mu.Unlock()
	if t.shortly && q.now() >= t.e.at {
		t.shortly = false
		t.e.ring()
	}
}

// Stop makes the timer never due, until Reset.
func (t *Timer) Stop() {
	t.e.q.mu.Lock()
	defer t.e.q.mu.Unlock()
	t.stopLocked()
}

func (t *Timer) stopLocked() {
	if t.shortly {
		t.shortly = false
		t.short.Stop()
	}
	t.e.q.clearLocked(&t.e)
	select {
	case <-t.c:
	default:
	}
}

// entry is one thing that becomes due.
type entry struct {
	q     *queue
	at    time.Duration // by queue.now, from when it may ring
	late  time.Duration // and when it has to
	index int           // in queue.mu.entries, -1: it is not set
	ring  func()        // called with the queue locked, when it is due
	then  func()        // nil, or called behind that with nothing locked
}

// queue is what becomes due, and the one waker that is set to the first of it.
type queue struct {
	now func() time.Duration // since some moment

	mu struct {
		sync.Mutex
		waker   waker // nil: nobody needs one
		holds   int   // see Hold
		entries entries
		armed   time.Duration // for when waker is set, -1: it is not
	}
	newWaker func(*queue) waker
}

// waker calls queue.due once after the d that it was last set to; a d below 0 is never. Its methods are called with the
// queue locked.
type waker interface {
	set(d time.Duration)
	close() // it has a goroutine, which ends soon
}

// slackShare: a timer may ring late by one part in so many of its time.
const slackShare = 100

// longest is what any longer time is taken for.
const longest = 1 << 61

// process is the queue of this process.
var process = sync.OnceValue(func() *queue {
	began := time.Now()
	return newQueue(func() time.Duration { return time.Since(began) }, newWaker)
})

func newQueue(now func() time.Duration, w func(*queue) waker) *queue {
	q := &queue{now: now, newWaker: w}
	q.mu.armed = -1
	return q
}

// Hold keeps what wakes the process, a descriptor and a goroutine, until release. Otherwise they go whenever no timer
// is set, and are made again for the next one.
func Hold() (release func()) { return process().hold() }

func (q *queue) hold() (release func()) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.mu.holds++
	return sync.OnceFunc(func() {
		q.mu.Lock()
		defer q.mu.Unlock()
		q.mu.holds--
		q.armLocked(q.now())
	})
}

// setLocked sets e, which is not set.
func (q *queue) setLocked(e *entry, d time.Duration) {
	now := q.now()
	d = min(max(d, 0), longest)
	e.at, e.late = now+d, now+d+d/slackShare
	heap.Push(&q.mu.entries, e)
	q.armLocked(now)
}

func (q *queue) clearLocked(e *entry) {
	if e.index >= 0 {
		heap.Remove(&q.mu.entries, e.index)
		q.armLocked(q.now())
	}
}

// armLocked sets the waker to the first entry if it is not.
func (q *queue) armLocked(now time.Duration) {
	first := q.mu.entries
	if len(first) == 0 {
		switch {
		case q.mu.holds == 0 && q.mu.waker != nil:
			q.mu.waker.close()
			q.mu.waker = nil
		case q.mu.armed >= 0:
			q.mu.waker.set(-1)
		}
		q.mu.armed = -1
		return
	}
	if q.mu.waker == nil {
		q.mu.waker = q.newWaker(q)
	}
	if q.mu.armed != first[0].late {
		q.mu.armed = first[0].late
		q.mu.waker.set(max(first[0].late-now, 0))
	}
}

// due rings what is due.
func (q *queue) due() {
	var thens []func()
	q.mu.Lock()
	q.mu.armed = -1
	now := q.now()
	for len(q.mu.entries) > 0 && q.mu.entries[0].at <= now {
		e := heap.Pop(&q.mu.entries).(*entry)
		e.ring()
		if e.then != nil {
			thens = append(thens, e.then)
		}
	}
	q.armLocked(now)
	q.mu.Unlock()
	for _, f := range thens {
		f()
	}
}

// goTimer is a waker by a timer of the Go runtime, for systems that have no other.
type goTimer struct{ t *time.Timer }

func newGoTimer(q *queue) waker { return goTimer{time.AfterFunc(1<<63-1, q.due)} }

func (g goTimer) close() { g.t.Stop() }

func (g goTimer) set(d time.Duration) {
	if d < 0 {
		g.t.Stop()
		return
	}
	g.t.Reset(d)
}

// entries is a heap: the first is the one that has to ring first.
type entries []*entry

func (h entries) Len() int           { return len(h) }
func (h entries) Less(i, j int) bool { return h[i].late < h[j].late }
func (h entries) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].index, h[j].index = i, j
}
func (h *entries) Push(x any) {
	e := x.(*entry)
	e.index = len(*h)
	*h = append(*h, e)
}
func (h *entries) Pop() any {
	last := len(*h) - 1
	e := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	e.index = -1
	return e
}
