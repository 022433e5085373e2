package tcp

import (
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/kvd-project/kvd/rdma/driver"
)

// cq is a ring of WCs that the readers of several QPs, see wait.go, fill and one lane
// drains.
// A WR's place in its send queue is free again once its WC has been polled, so
// the ring never holds more than the send queues together.
type cq struct {
	d     *device
	qps   int // guarded by d.mu
	ready chan struct{}
	n     atomic.Int64 // mirrors mu.n: an empty Poll takes no lock
	mu    struct {
		sync.Mutex
		ring []completion // length a power of two
		head uint64
		n    uint64
	}
	reading
}

// completion is a WC and what its polling frees.
type completion struct {
	wc driver.WC
	q  *qp
	// retired is how many WRs of q were posted up to and including this one.
	retired uint64
}

var _ driver.CQ = (*cq)(nil)

func newCQ(d *device, depth int) *cq {
	c := &cq{d: d, ready: make(chan struct{}, 1)}
	c.able = runtime.GOMAXPROCS(0) > 1 && d.o.TLSClient == nil
	c.looks = runtime.GOMAXPROCS(0) > 2
	size := 16
	for size < min(depth, 256) { // push makes room
		size *= 2
	}
	c.mu.ring = make([]completion, size)
	return c
}

func (c *cq) push(batch []completion) {
	if len(batch) == 0 {
		return
	}
	c.mu.Lock()
	for c.mu.n+uint64(len(batch)) > uint64(len(c.mu.ring)) {
		c.growLocked()
	}
	mask := uint64(len(c.mu.ring) - 1)
	for i := range batch {
		c.mu.ring[(c.mu.head+c.mu.n)&mask] = batch[i]
		c.mu.n++
	}
	c.n.Store(int64(c.mu.n))
	c.mu.Unlock()
	c.signal()
}

func (c *cq) growLocked() {
	old := c.mu.ring
	grown := make([]completion, 2*len(old))
	for i := range c.mu.n {
		grown[i] = old[(c.mu.head+i)&uint64(len(old)-1)]
	}
	c.mu.ring, c.mu.head = grown, 0
}

func (c *cq) signal() {
	select {
	case c.ready <- struct{}{}:
	default:
	}
	c.wakeParked()
}

func (c *cq) Poll(wcs []driver.WC) int {
	if c.n.Load() == 0 || len(wcs) == 0 {
		return 0
	}
	c.mu.Lock()
	n := min(int(c.mu.n), len(wcs))
	mask := uint64(len(c.mu.ring) - 1)
	for i := range n {
		e := &c.mu.ring[c.mu.head&mask]
		wcs[i] = e.wc
		e.q.polled = e.retired
		e.q = nil
		c.mu.head++
	}
	c.mu.n -= uint64(n)
	c.n.Store(int64(c.mu.n))
	more := c.mu.n > 0
	c.mu.Unlock()
	if more {
		c.signal()
	}
	return n
}

// Close fails while QPs are attached.
func (c *cq) Close() error {
	c.d.mu.Lock()
	defer c.d.mu.Unlock()
	if c.qps > 0 {
		return fmt.Errorf("tcp: close cq: %d QPs attached", c.qps)
	}
	delete(c.d.mu.cqs, c)
	c.wake.Lock()
	if c.wake.alarm != nil {
		c.wake.alarm.Stop()
	}
	c.wake.Unlock()
	c.own.Lock()
	defer c.own.Unlock()
	if p := c.own.poller; p != nil {
		c.dismissLocked()
		p.Close()
		c.own.poller = nil
	}
	return nil
}
