package inside

import (
	"context"
	"fmt"

	"github.com/kvd-project/kvd/internal/units"
)

// OnWait makes a context that tells of waiting. An operation calls f, perhaps several times, before it waits for
// the network, for other goroutines or for time. If all memory is reached by providers that execute in the caller
// (shm), most operations never wait. A goroutine that serves many callers learns here that the others need another.
// Several goroutines of one operation may call f at a time; the operation goes on when it returns.
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

// WillWait is for implementations of client.API: an operation calls it before it waits, for what
// OnWait put into its context.
func WillWait(ctx context.Context) {
	if w, ok := ctx.Value(waitKey{}).(*waitContext); ok {
		w.f()
	}
}

// LimitMemory makes a context in which an operation on a key takes at most n bytes of memory for the records that
// it reads. The limit is beside some KiB that the operation has in any case. An operation that needs more for those
// records ends with a *TooLargeError and has neither read the value nor changed anything. The limit is for each
// operation of a Do alone; what is written does not count.
func LimitMemory(ctx context.Context, n int) context.Context { return &limitContext{ctx, n} }

type limitContext struct {
	context.Context
	n int
}

type limitKey struct{}

func (l *limitContext) Value(key any) any {
	if key == (limitKey{}) {
		return l
	}
	return l.Context.Value(key)
}

// MemoryLimit is for implementations of client.API: the limit in bytes that LimitMemory set, or 0.
func MemoryLimit(ctx context.Context) int {
	if l, ok := ctx.Value(limitKey{}).(*limitContext); ok {
		return l.n
	}
	return 0
}

// TooLargeError ends an operation that needed more memory than LimitMemory allowed. It did
// not happen.
type TooLargeError struct {
	// Want is how many bytes of buffers it was found to need: at least those of the value. The
	// next attempt may need more, if the value is another one by then.
	Want int
}

func (e *TooLargeError) Error() string {
	return fmt.Sprintf("value too large for the memory allowed: %s of buffers are needed", units.Bytes(e.Want))
}
