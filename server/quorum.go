package server

import (
	"context"
	"sync"
	"time"
)

// quorum asks a majority of the directory whether this node leads, for many callers at a time: at thousands of renewals
// a second a question for each would be most of their work. A question counts for those who came before it was sent.
type quorum struct {
	verify func() error // asks, and returns when that is known
	ended  <-chan struct{}
	began  func() (done func()) // notes a goroutine

	mu struct {
		sync.Mutex
		next   *question // for those who come now; nil: none of them waits
		asking int       // goroutines
		sent   time.Time // the last question
	}
}

type question struct {
	done chan struct{} // closed behind err
	err  error
}

const (
	// gatherFor is the least time between two questions if others wait for the second.
	gatherFor = time.Millisecond
	// gatherMost is how long others wait at most for the answer to a question before they have one of their own.
	gatherMost = 5 * time.Millisecond
)

// leads returns nil if a majority agreed, after the call began, that this node leads.
func (q *quorum) leads(ctx context.Context) error {
	mine := q.join()
	select {
	case <-mine.done:
		return mine.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// join gives the question that is sent next, which counts for the caller.
func (q *quorum) join() *question {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.mu.next == nil {
		q.mu.next = &question{done: make(chan struct{})}
	}
	mine := q.mu.next
	if q.mu.asking == 0 || time.Since(q.mu.sent) >= gatherMost {
		first := q.takeLocked()
		q.mu.asking++
		done := q.began()
		go func() {
			defer done()
			q.ask(first)
		}()
	}
	return mine
}

// takeLocked gives the question of those who wait, to be sent now; nil: another goroutine has it.
func (q *quorum) takeLocked() *question {
	x := q.mu.next
	q.mu.next, q.mu.sent = nil, time.Now()
	return x
}

// ask asks until nobody waits.
func (q *quorum) ask(x *question) {
	for x != nil {
		x.err = q.verify()
		close(x.done)
		q.mu.Lock()
		others, pause := q.mu.next != nil, gatherFor-time.Since(q.mu.sent)
		q.mu.Unlock()
		if others && pause > 0 {
			t := time.NewTimer(pause)
			select {
			case <-t.C:
			case <-q.ended:
			}
			t.Stop()
		}
		q.mu.Lock()
		if x = q.mu.next; x != nil {
			x = q.takeLocked()
		} else {
			q.mu.asking--
		}
		q.mu.Unlock()
	}
}
