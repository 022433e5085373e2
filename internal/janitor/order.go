package janitor

import (
	"context"
	"sync"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
)

// order lets jobs that writers wait for go first: while a placement group is being recovered it is frozen, and all that
// other jobs do by the same lanes and processors makes that longer. The zero value is ready.
type order struct {
	mu struct {
		sync.Mutex
		urgent int           // jobs under way that go first
		none   chan struct{} // closed when there is none any more
		// begun is how many went first so far, held how often others waited for them.
		begun, held uint64
	}
}

// turnMost bounds how long others' next operations wait: a recovery may itself wait, for a memory node that is slow.
const turnMost = 50 * time.Millisecond

func urgent(kind dirpb.JobKind) bool { return kind == dirpb.JobKind_JOB_RECOVER }

// begin notes that a job of that kind begins, until end.
func (o *order) begin(kind dirpb.JobKind) (end func()) {
	if !urgent(kind) {
		return func() {}
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.mu.begun++
	if o.mu.urgent++; o.mu.urgent == 1 {
		o.mu.none = make(chan struct{})
	}
	return func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		if o.mu.urgent--; o.mu.urgent == 0 {
			close(o.mu.none)
		}
	}
}

// turn waits until a job of that kind may begin its next operations.
func (o *order) turn(ctx context.Context, kind dirpb.JobKind) {
	o.mu.Lock()
	none, wait := o.mu.none, o.mu.urgent > 0 && !urgent(kind)
	if wait {
		o.mu.held++
	}
	o.mu.Unlock()
	if !wait {
		return
	}
	t := time.NewTimer(turnMost)
	defer t.Stop()
	select {
	case <-none:
	case <-t.C:
	case <-ctx.Done():
	}
}
