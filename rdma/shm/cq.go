package shm

import (
	"fmt"
	"math/bits"

	"golang.org/x/sys/cpu"

	"github.com/kvd-project/kvd/rdma/driver"
)

// CQ is a ring that PostSend fills and Poll empties, both on the goroutine that
// owns it; so it needs neither lock nor atomic. Only ready is touched by others.
type CQ struct {
	_    cpu.CacheLinePad // what an operation writes shares no cache line with what another processor uses
	ring []driver.WC      // a power of two long
	// head and tail count WCs polled and pushed; they wrap.
	head, tail uint32
	ready      chan struct{}

	d      *Device
	qps    int  // guarded by Device.mu
	closed bool // guarded by Device.mu

	_ cpu.CacheLinePad
}

func newCQ(d *Device, depth int) *CQ {
	n := 1 << bits.Len(uint(min(max(depth, 16), 256)-1))
	return &CQ{d: d, ring: make([]driver.WC, n), ready: make(chan struct{}, 1)}
}

// reserve makes room for n more WCs. The ring grows up to what its QPs may have
// outstanding, so a WC is never lost.
func (c *CQ) reserve(n int) {
	have := c.tail - c.head
	if int(have)+n <= len(c.ring) {
		return
	}
	size := len(c.ring)
	for size < int(have)+n {
		size *= 2
	}
	ring := make([]driver.WC, size)
	for i := range have {
		ring[i] = c.ring[(c.head+i)&uint32(len(c.ring)-1)]
	}
	c.ring, c.head, c.tail = ring, 0, have
}

// push appends a WC; reserve has made room.
func (c *CQ) push(wc driver.WC) {
	c.ring[c.tail&uint32(len(c.ring)-1)] = wc
	c.tail++
}

// count is how many WCs of one QP wait to be polled.
func (c *CQ) count(qpNum uint32) (n int) {
	for i := c.head; i != c.tail; i++ {
		if c.ring[i&uint32(len(c.ring)-1)].QPNum == qpNum {
			n++
		}
	}
	return n
}

// signal makes Ready receive, from any goroutine.
func (c *CQ) signal() {
	if len(c.ready) != 0 {
		return // most often nobody listens and the token is still there
	}
	select {
	case c.ready <- struct{}{}:
	default:
	}
}

// Poll implements driver.CQ.
func (c *CQ) Poll(wcs []driver.WC) int {
	ring, head := c.ring, c.head
	n := min(len(wcs), int(c.tail-head))
	for i := range n {
		wcs[i] = ring[head&uint32(len(ring)-1)]
		head++
	}
	c.head = head
	return n
}

// Ready implements driver.CQ. Verbs are finished when PostSend returns, so there is never a need to wait. It
// receives nevertheless, and also when a QP has lost its memory node.
func (c *CQ) Ready() <-chan struct{} { return c.ready }

// Close implements driver.CQ.
func (c *CQ) Close() error {
	c.d.mu.Lock()
	defer c.d.mu.Unlock()
	if c.closed {
		return nil
	}
	if c.qps > 0 {
		return fmt.Errorf("close cq: %w: %d QPs", ErrInUse, c.qps)
	}
	c.closed = true
	c.d.mu.cqs--
	return nil
}
