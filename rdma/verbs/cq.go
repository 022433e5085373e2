//go:build verbs && cgo && linux

package verbs

// #cgo noescape kvd_poll
// #cgo nocallback kvd_poll
// #cgo noescape kvd_arm
// #cgo nocallback kvd_arm
// #include <stdlib.h>
// #include "shim.h"
import "C"

import (
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"github.com/kvd-project/kvd/rdma/driver"
)

// A Poll that finds nothing while work is outstanding spins before it gives up,
// and asks the adapter for an event only then: on an RNIC a verb takes a few
// microseconds, less than going to sleep. A spin that was in vain makes the next
// one shorter, one that was not makes it long again, so that waiting for a slow
// peer burns no core.
const (
	maxSpin = 50 * time.Microsecond
	minSpin = time.Microsecond
)

// pollBatch is how many completions one call into C takes.
const pollBatch = 16

// cq is a completion queue of the adapter with the queue pairs attached to it.
// Its lock is the lane's: nobody contends for it but a Close from elsewhere.
type cq struct {
	d     *device
	c     *C.struct_ibv_cq
	ch    *C.struct_ibv_comp_channel
	event *os.File
	done  chan struct{} // closed when waitEvents has ended
	depth int
	ready chan struct{}
	armed atomic.Bool

	mu    sync.Mutex
	batch *[pollBatch]C.struct_kvd_wc // in C's memory
	slots []slot
	qps   int
	// outstanding WRs may still complete.
	outstanding int
	soft        []driver.WC // what Poll has not given out yet
	spin        int64
	dead        bool
}

// slot is a place for a queue pair; gen tells its users apart.
type slot struct {
	q   *qp
	gen uint32
}

var _ driver.CQ = (*cq)(nil)

func (d *device) CreateCQ(depth int) (driver.CQ, error) {
	if depth <= 0 || depth > d.info.MaxCQE {
		return nil, fmt.Errorf("depth %d, want 1..%d", depth, d.info.MaxCQE)
	}
	// Replies to atomics take some of it.
	depth = min(depth+16*recvBuffers, d.info.MaxCQE)
	c := &cq{d: d, depth: depth, ready: make(chan struct{}, 1), done: make(chan struct{}), spin: d.spin}
	entries := depth
	if d.iwarp() { // each chain has a READ of nothing
		entries = min(2*depth, d.info.MaxCQE)
	}
	if rc := C.kvd_create_cq(d.ctx, C.int(entries), &c.c, &c.ch); rc != 0 {
		return nil, limited("create CQ", int64(depth)*64, rc)
	}
	var err error
	if c.event, err = pollable(int(c.ch.fd), "verbs-cq"); err != nil {
		_ = C.kvd_destroy_cq(c.c, c.ch)
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.mu.closed {
		_ = c.event.Close()
		_ = C.kvd_destroy_cq(c.c, c.ch)
		return nil, driver.ErrClosed
	}
	d.mu.cqs++
	c.batch = (*[pollBatch]C.struct_kvd_wc)(C.calloc(pollBatch, C.sizeof_struct_kvd_wc))
	go c.waitEvents()
	return c, nil
}

// waitEvents passes completion events on to the goroutine that waits for Ready.
func (c *cq) waitEvents() {
	defer close(c.done)
	waitReadable(c.event, func() bool {
		n := C.kvd_events(c.ch)
		if n > 0 {
			c.armed.Store(false)
			c.signal()
		}
		return n >= 0
	})
}

func (c *cq) signal() {
	select {
	case c.ready <- struct{}{}:
	default:
	}
}

func (c *cq) Ready() <-chan struct{} { return c.ready }

// Poll spins for at most maxSpin.
func (c *cq) Poll(wcs []driver.WC) int {
	if len(wcs) == 0 {
		return 0
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	// With nothing outstanding there is nothing to wait for.
	for len(c.soft) == 0 && c.outstanding > 0 {
		if c.takeLocked(min(len(wcs), pollBatch), c.spin) > 0 {
			c.spin = c.d.spin
			continue
		}
		c.spin = max(c.spin/2, min(int64(minSpin), c.d.spin))
		if c.armed.Swap(true) {
			return 0
		}
		if rc := C.kvd_arm(c.c); rc != 0 {
			c.armed.Store(false)
			c.signal() // poll again, since no event will say when
			return 0
		}
		// A completion between the last look and the arming raises no event.
		if c.takeLocked(min(len(wcs), pollBatch), 0) == 0 {
			return 0
		}
	}
	n := copy(wcs, c.soft)
	if c.soft = c.soft[:copy(c.soft, c.soft[n:])]; len(c.soft) > 0 {
		c.signal()
	}
	return n
}

// roomLocked is how many more WRs can be posted so that the adapter's queue cannot
// overflow.
func (c *cq) roomLocked() int { return c.depth - recvBuffers*c.qps - c.outstanding }

// takeLocked moves at most n completions from the adapter's queue to soft, as far
// as somebody waits for them, spinning for at most spin nanoseconds, and
// returns how many there were.
func (c *cq) takeLocked(n int, spin int64) int {
	got := int(C.kvd_poll(c.c, &c.batch[0], C.int(n), C.int64_t(spin)))
	for i := range max(got, 0) {
		w := &c.batch[i]
		s := slotOf(uint64(w.id))
		if s.index >= len(c.slots) || c.slots[s.index].gen != s.gen || c.slots[s.index].q == nil {
			continue // of a queue pair that is gone
		}
		q := c.slots[s.index].q
		if s.recv {
			q.received(s.seq, uint32(w.status))
		} else {
			q.sent(s.seq, uint32(w.status), uint32(w.vendor))
		}
	}
	if got < 0 {
		c.d.o.Logger.Error("CQ cannot be polled", "device", c.d.info.Name, "err", syscall.Errno(-got))
		return 0
	}
	return got
}

// wrID is what a WR's completion brings back.
//
//	63     62..44   43..32   31..0
//	recv   gen      slot     number of the WR on its QP, or of the receive buffer
type wrID struct {
	recv  bool
	gen   uint32
	index int
	seq   uint32
}

const (
	slotBits = 12
	genMask  = 1<<19 - 1
)

func (s wrID) pack() uint64 {
	v := uint64(s.gen&genMask)<<44 | uint64(s.index)<<32 | uint64(s.seq)
	if s.recv {
		v |= 1 << 63
	}
	return v
}

func slotOf(id uint64) wrID {
	return wrID{recv: id>>63 != 0, gen: uint32(id>>44) & genMask, index: int(id>>32) & (1<<slotBits - 1),
		seq: uint32(id)}
}

// attach gives q a slot.
func (c *cq) attach(q *qp) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.dead {
		return fmt.Errorf("CQ: %w", driver.ErrClosed)
	}
	i := 0
	for i < len(c.slots) && c.slots[i].q != nil {
		i++
	}
	if i == 1<<slotBits {
		return fmt.Errorf("the CQ has %d QPs already", i)
	}
	if i == len(c.slots) {
		c.slots = append(c.slots, slot{})
	}
	c.slots[i].q = q
	q.id = wrID{gen: c.slots[i].gen, index: i}
	c.qps++
	return nil
}

func (c *cq) detachLocked(q *qp) {
	c.slots[q.id.index] = slot{gen: (q.id.gen + 1) & genMask}
	c.qps--
}

// Close fails while QPs are attached.
func (c *cq) Close() error {
	c.d.departing.wait()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.dead {
		return fmt.Errorf("verbs: close cq: %w", driver.ErrClosed)
	}
	if c.qps > 0 {
		return fmt.Errorf("verbs: close cq: %d QPs attached", c.qps)
	}
	_ = c.event.Close()
	<-c.done
	if rc := C.kvd_destroy_cq(c.c, c.ch); rc != 0 {
		return fmt.Errorf("verbs: close cq: %w", syscall.Errno(rc))
	}
	C.free(unsafe.Pointer(c.batch))
	c.dead = true
	c.d.mu.Lock()
	c.d.mu.cqs--
	c.d.mu.Unlock()
	return nil
}
