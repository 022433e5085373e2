package client

import (
	"context"
	"errors"
	"time"

	"github.com/kvd-project/kvd/index"
)

// Events are called as operations begin and end, for tracing; package client/otelkvd, a module of its own, makes spans
// and metrics of OpenTelemetry of them. Both functions may be called concurrently and must not block, nor use the
// Client. Without Events nothing is measured.
type Events struct {
	// Begin is called before an operation. The context that it returns is the operation's from then on, and
	// End's; operations that it leads to begin with it. nil: nothing is called.
	Begin func(ctx context.Context, op OpEvent) context.Context
	// End is called after the operation. nil: nothing is called.
	End func(ctx context.Context, op OpEvent)
}

// OpEvent is one operation on one key, a Do of several, one Scan, or one transaction. It is valid during the call only.
type OpEvent struct {
	// Kind is get, exists, pin, put, delete, update, scan or transaction; of a Do of several operations of different
	// kinds: batch.
	Kind string
	Key  []byte // nil for several operations, a scan or a transaction
	Ops  []Op   // of several operations, or of a transaction
	// The rest is for End.
	Rounds int           // round trips
	Took   time.Duration // without that of a Scan's loop
	Err    error         // as the caller gets it; each of several operations has its own in Ops
}

// opKinds are OpEvent.Kind by OpKind.
var opKinds = [...]string{OpGet: "get", OpPut: "put", OpDelete: "delete", OpUpdate: "update", OpKeep: "keep",
	OpExists: "exists", OpPin: "pin"}

// eventOf is the event of a Do, which has one operation at least.
func eventOf(ops []Op) OpEvent {
	ev := OpEvent{Kind: "batch"}
	if k := ops[0].Kind; k > 0 && int(k) < len(opKinds) {
		ev.Kind = opKinds[k]
	}
	if len(ops) == 1 {
		ev.Key = ops[0].Key
		return ev
	}
	ev.Ops = ops
	for i := range ops {
		if ops[i].Kind != ops[0].Kind {
			ev.Kind = "batch"
		}
	}
	return ev
}

// begin tells of an operation that begins, and returns what is to be called when it ends.
func (c *Client) begin(ctx context.Context, q *call) (context.Context, func()) {
	ctx, end := c.beginEvent(ctx, OpEvent{Kind: q.Kind.String(), Key: q.Key})
	return ctx, func() {
		err := q.Err
		if errors.Is(err, index.ErrUnchanged) {
			err = nil // an answer of GetIfChanged
		}
		end(int(q.Rounds), 0, err)
	}
}

// beginEvent tells of ev, which begins, and returns what is to be called when it ends. outside is the time that is not
// its own.
func (c *Client) beginEvent(ctx context.Context, ev OpEvent) (context.Context,
	func(rounds int, outside time.Duration, err error)) {
	e := c.o.Events
	at := time.Now()
	if e.Begin != nil {
		ctx = e.Begin(ctx, ev)
	}
	return ctx, func(rounds int, outside time.Duration, err error) {
		if e.End != nil {
			ev.Rounds, ev.Took, ev.Err = rounds, time.Since(at)-outside, err
			e.End(ctx, ev)
		}
	}
}
