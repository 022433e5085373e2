package rdma

import (
	"errors"
	"fmt"
	"sync"

	"github.com/kvd-project/kvd/internal/bulk"
	"github.com/kvd-project/kvd/rdma/driver"
)

// Providers that take no Values, or no memory of any kind for them, or no CRC, are given registered buffers instead. A
// WRITE is put together in one before it is posted; a READ is taken apart when its WC, or a later one, is polled. Bytes
// and CRC are one pass.

// takesValues tells whether a provider does all that package driver says of Values.
func takesValues(c *Caps) bool { return c.MaxSGE >= 2 && c.AnyMemory && c.Sums }

// stagedCQ is a provider's CQ whose QPs are stagedQPs. The lock is for QP.Close, which any goroutine may call.
type stagedCQ struct {
	driver.CQ
	sync.Mutex
	of map[uint32]*stagedQP // by number
}

// add is what a new QP is used through.
func (c *stagedCQ) add(pd *PD, q driver.QP) *stagedQP {
	c.Lock()
	defer c.Unlock()
	x := &stagedQP{QP: q, cq: c, pd: pd}
	c.of[q.Num()] = x
	return x
}

// Poll hands over READs that are over.
func (c *stagedCQ) Poll(wcs []WC) int {
	n := c.CQ.Poll(wcs)
	if n == 0 {
		return 0
	}
	c.Lock()
	defer c.Unlock()
	for i := range wcs[:n] {
		if x := c.of[wcs[i].QPNum]; x != nil {
			x.polledLocked(&wcs[i])
		}
	}
	return n
}

// stagedQP is a provider's QP that takes Values. It is guarded by its CQ's lock.
type stagedQP struct {
	driver.QP
	cq *stagedCQ
	pd *PD

	wrs     []WR     // of the post under way
	pending []staged // in posting order
	sent    uint64   // WRs that have a WC if they succeed
	seen    uint64   // WCs, all of successes
	failed  bool     // the QP may still do anything with the buffers of pending, until it is closed
	free    []*stageBuf
	kept    int // bytes of free
	closed  bool
}

// staged is a WR under way.
type staged struct {
	buf   *stageBuf
	local []byte
	value *Value // of a READ that was not delivered yet, or nil
	ends  uint64 // it is over when so many WCs were seen
}

// stageBuf is registered memory.
type stageBuf struct {
	mem *Memory
	mr  *MR
}

const (
	// stageUnit is what buffers' sizes are multiples of, bytes.
	stageUnit = 64 << 10
	// stageKept bounds what a QP keeps of buffers that are not in use, bytes.
	stageKept = 8 << 20
)

// PostSend gives the provider the same WRs without Values.
func (x *stagedQP) PostSend(wrs []WR) (int, error) {
	x.cq.Lock()
	defer x.cq.Unlock()
	if x.closed {
		return 0, ErrClosed
	}
	x.wrs = append(x.wrs[:0], wrs...)
	var bufs []*stageBuf // by Value of wrs
	give := func(from int) {
		for _, b := range bufs[from:] {
			x.giveLocked(b)
		}
	}
	for i := range x.wrs {
		w := &x.wrs[i]
		if w.Value == nil {
			continue
		}
		b, err := x.takeLocked(w.Len())
		if err != nil {
			give(0)
			return 0, fmt.Errorf("%w: %w", ErrQueueFull, err)
		}
		bufs = append(bufs, b)
		local := b.mem.Bytes[:w.Len()]
		if w.Op == OpWrite {
			stageWrite(local, w)
		}
		w.Local, w.LKey, w.Value = local, b.mr.LKey(), nil
	}
	n, err := x.QP.PostSend(x.wrs)
	k := 0
	for i := range wrs[:n] {
		if w := &wrs[i]; w.Value != nil {
			s := staged{buf: bufs[k], local: w.Local, ends: x.sent + 1}
			k++
			if w.Op == OpRead {
				s.value = w.Value
			}
			x.pending = append(x.pending, s)
		}
		if wrs[i].Flags&Signaled != 0 {
			x.sent++
		}
	}
	give(k)
	return n, err
}

// stageWrite puts a WRITE together.
func stageWrite(b []byte, w *WR) {
	v, at := w.Value, len(w.Local)
	from := v.Acquire()
	if v.Seal != nil {
		crc := bulk.Copy(v.CRC, b[at:], from)
		v.Release()
		v.Seal(w.Local, crc)
	} else {
		copy(b[at:], from)
		v.Release()
	}
	copy(b, w.Local)
}

// deliver takes a READ apart.
func (s *staged) deliver() {
	v := s.value
	if v == nil {
		return
	}
	s.value = nil
	from := s.buf.mem.Bytes
	from = from[copy(s.local, from):]
	n, crc := v.Open(s.local)
	to := v.Acquire()[:n]
	defer v.Release()
	if v.Start != nil {
		v.CRC = bulk.Copy(crc, to, from[:n])
	} else {
		copy(to, from)
	}
}

func (x *stagedQP) polledLocked(wc *WC) {
	if wc.Status != driver.Success {
		// READs in front of the one that failed may have succeeded without a WC. The others have got anything.
		x.failed = true
		for i := range x.pending {
			x.pending[i].deliver()
		}
		return
	}
	x.seen++
	done := 0
	for ; done < len(x.pending) && x.pending[done].ends <= x.seen; done++ {
		x.pending[done].deliver()
		if !x.failed {
			x.giveLocked(x.pending[done].buf)
		}
	}
	if !x.failed {
		x.pending = append(x.pending[:0], x.pending[done:]...)
	}
}

// takeLocked gives a buffer of n bytes or more.
func (x *stagedQP) takeLocked(n int) (*stageBuf, error) {
	for i, b := range x.free {
		if have := len(b.mem.Bytes); have >= n && have <= 2*n+stageUnit {
			x.free = append(x.free[:i], x.free[i+1:]...)
			x.kept -= have
			return b, nil
		}
	}
	size := int64(n+stageUnit-1) &^ (stageUnit - 1)
	m, err := x.pd.dev.Alloc(size, AllocOptions{Name: "kvd-values"})
	if err != nil {
		return nil, err
	}
	mr, err := x.pd.RegMR(m, 0, size, AccessLocal)
	if err != nil {
		return nil, errors.Join(err, m.Free())
	}
	return &stageBuf{m, mr}, nil
}

func (x *stagedQP) giveLocked(b *stageBuf) {
	x.free = append(x.free, b)
	for x.kept += len(b.mem.Bytes); x.kept > stageKept; x.free = x.free[1:] {
		x.kept -= len(x.free[0].mem.Bytes)
		_ = x.free[0].release() // it is not used any more, whatever the device says
	}
}

func (b *stageBuf) release() error {
	if err := b.mr.Deregister(); err != nil {
		return err
	}
	return b.mem.Free()
}

// Close releases the buffers. WCs of READs may still be polled.
func (x *stagedQP) Close() error { return errors.Join(x.QP.Close(), x.release()) }

// Abort is of driver.Aborter.
func (x *stagedQP) Abort() error {
	a, ok := x.QP.(driver.Aborter)
	if !ok {
		return x.Close()
	}
	return errors.Join(a.Abort(), x.release())
}

// AtomicsByAgent is of driver.AgentAtomics.
func (x *stagedQP) AtomicsByAgent() bool {
	a, ok := x.QP.(driver.AgentAtomics)
	return ok && a.AtomicsByAgent()
}

// release is called when the provider touches no buffer any more.
func (x *stagedQP) release() error {
	x.cq.Lock()
	defer x.cq.Unlock()
	if x.closed {
		return nil
	}
	x.closed = true
	if x.cq.of[x.Num()] == x {
		delete(x.cq.of, x.Num())
	}
	var errs []error
	for i := range x.pending {
		x.pending[i].deliver()
		errs = append(errs, x.pending[i].buf.release())
	}
	for _, b := range x.free {
		errs = append(errs, b.release())
	}
	x.pending, x.free = nil, nil
	return errors.Join(errs...)
}
