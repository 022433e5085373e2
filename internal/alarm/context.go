package alarm

import (
	"context"
	"sync"
	"time"
)

// WithTimeout is context.WithTimeout, but for two things. Nothing wakes the process if cancel is called
// before the time is over, and Deadline does not tell of it. So gRPC does not tell a server, which
// would set a timer for each call. The server learns of the end when the call is cancelled.
func WithTimeout(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	return withTimeout(process(), ctx, d)
}

func withTimeout(q *queue, ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	t := &timeout{Context: ctx, done: make(chan struct{})}
	t.e = entry{q: q, index: -1, ring: func() {}, then: func() { t.end(context.DeadlineExceeded) }}
	q.mu.Lock()
	q.setLocked(&t.e, d)
	q.mu.Unlock()
	stop := context.AfterFunc(ctx, func() { t.end(ctx.Err()) })
	return t, func() {
		stop()
		t.end(context.Canceled)
	}
}

// timeout is a context that ends with the one that it is made from, with its alarm, or when it is cancelled.
type timeout struct {
	context.Context
	done chan struct{}
	e    entry

	mu struct {
		sync.Mutex
		err    error
		behind map[*func()]bool // to be called at the end; see AfterFunc
	}
}

func (t *timeout) Done() <-chan struct{} { return t.done }

func (t *timeout) Err() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.mu.err
}

// AfterFunc has f called when t has ended; with it package context needs no goroutine for each context that is made
// from t.
func (t *timeout) AfterFunc(f func()) (stop func() bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.err != nil {
		go f()
		return func() bool { return false }
	}
	if t.mu.behind == nil {
		t.mu.behind = make(map[*func()]bool)
	}
	t.mu.behind[&f] = true
	return func() bool {
		t.mu.Lock()
		defer t.mu.Unlock()
		set := t.mu.behind[&f]
		delete(t.mu.behind, &f)
		return set
	}
}

// end ends t with err if it has not ended.
func (t *timeout) end(err error) {
	t.mu.Lock()
	if t.mu.err != nil {
		t.mu.Unlock()
		return
	}
	t.mu.err = err
	behind := t.mu.behind
	t.mu.behind = nil
	close(t.done)
	t.mu.Unlock()
	q := t.e.q
	q.mu.Lock()
	q.clearLocked(&t.e)
	q.mu.Unlock()
	for f := range behind {
		(*f)()
	}
}
