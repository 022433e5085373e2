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
	ev := OpEvent{Kind: q.Kind.String(), Key: q.Key}
	at := time.Now()
	if e.Begin != nil {
		ctx = e.Begin(ctx, ev)
	}
	return ctx, func() {
		if e.End != nil {
			ev.Rounds, ev.Took, ev.Err = int(q.Rounds), time.Since(at), q.Err
			e.End(ctx, ev)
		}
	}
}
