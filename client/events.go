package client

import (
	"context"
	"time"
)

// Events are called as operations begin and end, for tracing. Both functions may be called
// concurrently and must not block, nor use the Client. Without Events nothing is measured.
type Events struct {
	// Begin is called before an operation. What it returns is the operation's context from
	// then on, and End's. nil: none is called.
	Begin func(ctx context.Context, op OpEvent) context.Context
	// End is called after it. nil: none is called.
	End func(ctx context.Context, op OpEvent)
}

// OpEvent is one operation on one key, or one page of a scan.
type OpEvent struct {
	Kind string // get, put, delete, modify, scan
	Key  []byte // valid during the call only; nil for a scan
	// The rest is for End.
	Rounds int // round trips
	Took   time.Duration
	Err    error // as the caller gets it
}

// begin tells of an operation that begins, and returns what is to be called when it ends.
func (c *Client) begin(ctx context.Context, q *call) (context.Context, func()) {
	e := c.o.Events
	ev := OpEvent{Kind: q.kind.String(), Key: q.key}
	at := time.Now()
	if e.Begin != nil {
		ctx = e.Begin(ctx, ev)
	}
	return ctx, func() {
		if e.End != nil {
			ev.Rounds, ev.Took, ev.Err = q.rounds, time.Since(at), q.err
			e.End(ctx, ev)
		}
	}
}

// OnWait makes a context that tells of waiting: f is called by an operation, perhaps
// several times, before it waits for the network, for other goroutines or for time. Where
// all memory is reached by providers that execute in the caller (shm) most operations
// never do, and whoever serves many with one goroutine learns here that the others need
// another. Several goroutines of one operation may call f at a time; the operation goes
// on when it returns.
func OnWait(ctx context.Context, f func()) context.Context { return &waitContext{ctx, f} }

type waitContext struct {
	context.Context
	f func()
}

type waitKey struct{}

func (w *waitContext) Value(key any) any {
	if key == (waitKey{}) {
		return w
	}
	return w.Context.Value(key)
}

// WillWait is for implementations of API: an operation calls it before it waits, for what
// OnWait put into its context.
func WillWait(ctx context.Context) {
	if w, ok := ctx.Value(waitKey{}).(*waitContext); ok {
		w.f()
	}
}
