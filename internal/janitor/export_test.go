package janitor

import "github.com/kvd-project/kvd/internal/dirpb"

// Order is how jobs of a Run with these options go before each other: recovering begins something that goes first, until end, and counts are
// how many did, and how often other jobs waited.
func (o *Options) Order() (recovering func() (end func()), counts func() (begun, held uint64)) {
	x := &order{}
	o.order = x
	return func() func() { return x.begin(dirpb.JobKind_JOB_RECOVER) }, func() (uint64, uint64) {
		x.mu.Lock()
		defer x.mu.Unlock()
		return x.mu.begun, x.mu.held
	}
}
