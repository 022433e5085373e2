package sim

import (
	"fmt"
	"slices"

	"github.com/kvd-project/kvd/rdma/driver"
)

var _ driver.CQ = (*cq)(nil)

// entry is a WC and which WR of which QP it ends.
type entry struct {
	wc    driver.WC
	q     *qp
	index uint64
}

// cq is guarded by Fabric.mu. It grows as needed.
type cq struct {
	dev    *device
	ready  chan struct{}
	q      []entry
	head   int
	qps    int // attached
	busy   int // of those, in Fabric.mu.busy
	closed bool
}

func (c *cq) Ready() <-chan struct{} { return c.ready }

func (c *cq) signal() {
	select {
	case c.ready <- struct{}{}:
	default:
	}
}

func (c *cq) pushLocked(e entry) {
	c.q = append(c.q, e)
	c.signal()
}

func (c *cq) Poll(wcs []driver.WC) (n int) {
	f := c.dev.f
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.o.Manual {
		f.advanceLocked(1 + f.belowLocked(4))
	}
	for n < len(wcs) && c.head < len(c.q) {
		e := &c.q[c.head]
		wcs[n] = e.wc
		// As with hardware, a send queue slot comes back when the WC of its WR,
		// or of a later one, is polled.
		e.q.reclaimed = max(e.q.reclaimed, e.index+1)
		c.head++
		n++
	}
	if c.head == len(c.q) {
		c.q, c.head = c.q[:0], 0
	}
	if c.head < len(c.q) || c.busy > 0 {
		c.signal()
	}
	return n
}

func (c *cq) Close() error {
	f := c.dev.f
	f.mu.Lock()
	defer f.mu.Unlock()
	if c.closed {
		return nil
	}
	if c.qps > 0 {
		return fmt.Errorf("close cq of %q: %d QPs are attached", c.dev.name, c.qps)
	}
	c.closed = true
	c.dev.cqs--
	f.mu.cqs = slices.DeleteFunc(f.mu.cqs, func(x *cq) bool { return x == c })
	return nil
}
