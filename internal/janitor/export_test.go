package janitor

import (
	"sync"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
)

// Pace is how calm jobs, and moves, of a Run with these options go on: so many operations at once at most, and for how
// long they rested.
func (o *Options) Pace() func(kind dirpb.JobKind) (most int, rested time.Duration) {
	type pace struct {
		most   int
		rested time.Duration
	}
	var mu sync.Mutex
	seen := map[dirpb.JobKind]pace{}
	o.paced = func(job *dirpb.Job, operations int, rested time.Duration) {
		if !job.GetCalm() && job.GetKind() != dirpb.JobKind_JOB_MOVE {
			return
		}
		mu.Lock()
		defer mu.Unlock()
		p := seen[job.GetKind()]
		seen[job.GetKind()] = pace{max(p.most, operations), p.rested + rested}
	}
	return func(kind dirpb.JobKind) (int, time.Duration) {
		mu.Lock()
		defer mu.Unlock()
		return seen[kind].most, seen[kind].rested
	}
}

// Order is how jobs of a Run with these options go before each other: recovering begins something that goes first,
// until end, and counts are how many did, and how often other jobs waited.
func (o *Options) Order() (recovering func() (end func()), counts func() (begun, held uint64)) {
	x := &order{}
	o.order = x
	return func() func() { return x.begin(dirpb.JobKind_JOB_RECOVER) }, func() (uint64, uint64) {
		x.mu.Lock()
		defer x.mu.Unlock()
		return x.mu.begun, x.mu.held
	}
}
