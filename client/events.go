package client

import (
	"context"
	"time"
)

// Events are called as operations begin and end, for tracing. Both functions may be called
// concurrently and must not block, nor use the Client. Without Events nothing is measured.
type Events struct {
	// Begin is called before an operation. The context that it returns is the operation's from then on, and
	// End's. nil: nothing is called.
	Begin func(ctx context.Context, op OpEvent) context.Context
	// End is called after the operation. nil: nothing is called.
	End func(ctx context.Context, op OpEvent)
}

// OpEvent is one operation on one key, one page of a scan, or one transaction.
type OpEvent struct {
	Kind string // get, put, delete, modify, scan, transaction
	Key  []byte // valid during the call only; nil for a scan or a transaction
	// The rest is for End.
	Rounds int // round trips
	Took   time.Duration
	Err    error // as the caller gets it
}

// begin tells of an operation that begins, and returns what is to be called when it ends.
func (c *Client) begin(ctx context.Context, q *call) (context.Context, func()) {
	ctx, end := c.beginEvent(ctx, OpEvent{Kind: q.Kind.String(), Key: q.Key})
	return ctx, func() { end(int(q.Rounds), q.Err) }
}

// beginEvent tells of ev, which begins, and returns what is to be called when it ends.
func (c *Client) beginEvent(ctx context.Context, ev OpEvent) (context.Context, func(rounds int, err error)) {
	e := c.o.Events
	at := time.Now()
	if e.Begin != nil {
		ctx = e.Begin(ctx, ev)
	}
	return ctx, func(rounds int, err error) {
		if e.End != nil {
			ev.Rounds, ev.Took, ev.Err = rounds, time.Since(at), err
			e.End(ctx, ev)
		}
	}
}
