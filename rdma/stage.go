package rdma

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvd-project/kvd/internal/bulk"
	"github.com/kvd-project/kvd/rdma/driver"
)

// Providers that take no Values, or no memory of any kind for them, or no CRC, get WRs whose memory is registered. A
// Value in an Arena is the second SGE of its WR, if the provider takes SGEs. The bytes of others pass through slabs,
// and are copied while their CRC is taken. A WRITE's are before it is posted, and a READ's when its WC, or a later one,
// is polled.

// takesValues tells whether a provider does all that package driver says of Values.
func takesValues(c *Caps) bool { return c.MaxSGE >= 2 && c.AnyMemory && c.Sums }

// mostSGE is how many pieces of memory a WR gets at most: Local, the Value's, and one for slack.
const mostSGE = 3

// detachPatience is how long Detach waits for an adapter that has the caller's memory, before it closes the QP.
const detachPatience = time.Second

// gatherPause is between two looks at the CQ of who waits for an adapter.
const gatherPause = 50 * time.Microsecond

// stagedCQ is a provider's CQ whose QPs are stagedQPs. The lock is for those who wait for an adapter, and for QP.Close,
// which any goroutine may call.
type stagedCQ struct {
	driver.CQ
	sync.Mutex
	of    map[uint16]*stagedQP // by the top of their WRs' numbers
	last  uint16
	stash []WC // taken from the provider by others than Poll
	batch [16]WC
	over  bool // closed
}

// add is what a new QP is used through.
func (c *stagedCQ) add(pd *PD, q driver.QP) *stagedQP {
	c.Lock()
	defer c.Unlock()
	for c.last++; c.of[c.last] != nil; c.last++ {
	}
	x := &stagedQP{QP: q, cq: c, pd: pd, first: uint64(c.last) << 48}
	c.of[c.last] = x
	pd.slabs.addUser(pd)
	return x
}

// Poll hands over READs that are over.
func (c *stagedCQ) Poll(wcs []WC) int {
	c.Lock()
	defer c.Unlock()
	n := copy(wcs, c.stash)
	c.stash = c.stash[:copy(c.stash, c.stash[n:])]
	return n + c.pollLocked(wcs[n:])
}

func (c *stagedCQ) pollLocked(wcs []WC) int {
	n := c.CQ.Poll(wcs)
	for i := range wcs[:n] {
		if x := c.of[uint16(wcs[i].ID>>48)]; x != nil {
			x.polledLocked(&wcs[i])
		}
	}
	return n
}

// gatherLocked takes what the provider has, for later Polls. Ready stays as the provider has raised it.
func (c *stagedCQ) gatherLocked() {
	for !c.over {
		n := c.pollLocked(c.batch[:])
		c.stash = append(c.stash, c.batch[:n]...)
		if n == 0 {
			return
		}
	}
}

func (c *stagedCQ) gather() {
	c.Lock()
	defer c.Unlock()
	c.gatherLocked()
}

// Close is as the provider's, and ends gathering.
func (c *stagedCQ) Close() error {
	c.Lock()
	defer c.Unlock()
	err := c.CQ.Close()
	c.over = c.over || err == nil
	return err
}

// always can be received from.
var always = func() <-chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}()

func (c *stagedCQ) Ready() <-chan struct{} {
	c.Lock()
	defer c.Unlock()
	if len(c.stash) > 0 {
		return always
	}
	return c.CQ.Ready()
}

// stagedQP is a provider's QP that takes Values. It is guarded by its CQ's lock.
type stagedQP struct {
	driver.QP
	cq *stagedCQ
	pd *PD

	// The provider has WRs with numbers for IDs, so that each WC tells which ones are over. Their upper 16 bits are the
	// QP's: those of verbs may be given again while WCs are under way.
	wrs     []WR     // of the post under way
	ids     []uint64 // those of the caller, from number first on; the first over of them are
	first   uint64
	over    int
	pending []*staged // WRs with Values, in posting order
	free    []*staged
	bounced uint64 // bytes
	closed  bool
}

// staged is a WR with a Value under way.
type staged struct {
	number uint64
	op     Opcode
	local  []byte // the caller's
	value  *Value // the caller's
	arena  *Arena // has Value.Bytes, which is lent; nil: it is copied
	slabs  []slab
	// head: Local is at the beginning of the slab, too.
	head bool
	wire Value // the provider's
	sges [mostSGE - 1]driver.SGE
}

// PostSend gives the provider the same WRs with registered memory for their Values.
func (x *stagedQP) PostSend(wrs []WR) (int, error) {
	x.cq.Lock()
	defer x.cq.Unlock()
	if x.closed {
		return 0, ErrClosed
	}
	x.wrs = append(x.wrs[:0], wrs...)
	begun, next := len(x.pending), x.first+uint64(len(x.ids))
	for i := range x.wrs {
		w := &x.wrs[i]
		w.ID = next + uint64(i)
		if w.Value == nil {
			continue
		}
		if err := x.stageLocked(w); err != nil {
			x.dropLocked(begun)
			return 0, fmt.Errorf("%w: %w", ErrQueueFull, err)
		}
	}
	n, err := x.QP.PostSend(x.wrs)
	for i := range wrs[:n] {
		x.ids = append(x.ids, wrs[i].ID)
	}
	for begun < len(x.pending) && x.pending[begun].number < next+uint64(n) {
		if s := x.pending[begun]; s.arena == nil {
			x.bounced += uint64(len(s.value.Bytes))
		}
		begun++
	}
	x.dropLocked(begun)
	return n, err
}

// stageLocked gives w memory that is registered, and appends it to pending.
func (x *stagedQP) stageLocked(w *WR) error {
	if len(x.free) == 0 {
		x.free = append(x.free, new(staged))
	}
	s := x.free[len(x.free)-1]
	s.number, s.op, s.local, s.value = w.ID, w.Op, w.Local, w.Value
	if !x.lendLocked(s) {
		if err := x.bounceLocked(s); err != nil {
			s.forget()
			return err
		}
	}
	x.free = x.free[:len(x.free)-1]
	x.pending = append(x.pending, s)
	if s.op == OpWrite {
		s.seal()
	}
	if s.head {
		b := s.slabs[0]
		w.Local, w.LKey, w.Value = b.bytes(), b.lkey, nil
		return nil
	}
	w.Value = &s.wire
	return nil
}

// lendLocked gives the adapter the caller's own memory, if that is in an Arena.
func (x *stagedQP) lendLocked(s *staged) bool {
	v, c := s.value, &x.pd.dev.caps
	if v.Slack > slackMost || v.Slack > 0 && c.MaxSGE < mostSGE {
		return false
	}
	a := x.pd.use(v.Bytes, x.cq)
	if a == nil {
		return false
	}
	s.sges[0] = driver.SGE{Bytes: v.Bytes, LKey: a.mr.LKey()}
	s.wire.SGEs, s.wire.Slack = s.sges[:1], v.Slack
	if v.Slack > 0 {
		waste, err := x.pd.slabs.waste()
		if err != nil {
			a.unuse()
			return false
		}
		s.sges[1] = driver.SGE{Bytes: waste.mem[:v.Slack], LKey: waste.lkey}
		s.wire.SGEs = s.sges[:2]
	}
	if !v.Lend(x) {
		a.unuse()
		return false
	}
	s.arena = a
	return true
}

// bounceLocked takes slabs for the Value, and for Local too if the provider takes no SGEs.
func (x *stagedQP) bounceLocked(s *staged) error {
	pieces, n := min(x.pd.dev.caps.MaxSGE, mostSGE)-1, len(s.value.Bytes)+s.value.Slack
	if s.head = pieces == 0; s.head {
		pieces, n = 1, n+len(s.local)
	}
	var err error
	if s.slabs, err = x.pd.slabs.take(s.slabs[:0], n, pieces); err != nil {
		return err
	}
	for i := range s.slabs {
		s.sges[i] = driver.SGE{Bytes: s.slabs[i].bytes(), LKey: s.slabs[i].lkey}
	}
	s.wire.SGEs, s.wire.Slack = s.sges[:len(s.slabs)], 0
	return nil
}

// seal has what a WRITE carries ready.
func (s *staged) seal() {
	v := s.value
	crc := v.CRC
	if s.arena != nil {
		if v.Seal != nil {
			v.Seal(s.local, bulk.CRC(crc, v.Bytes))
		}
		return
	}
	from := v.Acquire()
	skip := 0
	if s.head {
		skip = len(s.local)
	}
	for i := range s.slabs {
		to := s.slabs[i].bytes()[skip:]
		skip = 0
		n := min(len(to), len(from))
		if v.Seal != nil {
			crc = bulk.Copy(crc, to, from[:n])
		} else {
			copy(to, from[:n])
		}
		from = from[n:]
	}
	v.Release()
	if v.Seal != nil {
		v.Seal(s.local, crc)
	}
	if s.head {
		copy(s.slabs[0].bytes(), s.local)
	}
}

// deliver takes a READ apart that has succeeded.
func (s *staged) deliver() {
	v := s.value
	skip := 0
	if s.head {
		skip = copy(s.local, s.slabs[0].bytes())
	}
	n, crc := v.Open(s.local)
	if s.arena != nil {
		if v.Start != nil {
			v.CRC = bulk.CRC(crc, v.Bytes[:n])
		}
		return
	}
	to := v.Acquire()[:n]
	defer v.Release()
	for i := range s.slabs {
		from := s.slabs[i].bytes()[skip:]
		skip = 0
		from = from[:min(len(from), len(to))]
		if v.Start != nil {
			crc = bulk.Copy(crc, to, from)
		} else {
			copy(to, from)
		}
		to = to[len(from):]
	}
	if v.Start != nil {
		v.CRC = crc
	}
}

// forget readies s for another WR.
func (s *staged) forget() {
	clear(s.sges[:])
	clear(s.slabs)
	s.local, s.value, s.arena, s.head, s.wire.SGEs, s.slabs = nil, nil, nil, false, nil, s.slabs[:0]
}

// dropLocked gives back what pending[from:] has; the provider does not have it.
func (x *stagedQP) dropLocked(from int) {
	for _, s := range x.pending[from:] {
		x.giveLocked(s)
	}
	clear(x.pending[from:])
	x.pending = x.pending[:from]
}

func (x *stagedQP) giveLocked(s *staged) {
	for i := range s.slabs {
		x.pd.slabs.give(s.slabs[i])
	}
	if s.arena != nil {
		s.value.Return()
		s.arena.unuse()
	}
	s.forget()
	x.free = append(x.free, s)
}

// polledLocked gives a WC its caller's ID, and ends the WRs that it tells of: it, and all in front of it, which have
// succeeded if they had no WC.
func (x *stagedQP) polledLocked(wc *WC) {
	number := wc.ID
	at := number - x.first
	if at >= uint64(len(x.ids)) {
		return // no WR of this QP
	}
	wc.ID = x.ids[at]
	if x.over = int(at) + 1; 2*x.over >= len(x.ids) {
		x.ids = x.ids[:copy(x.ids, x.ids[x.over:])]
		x.first, x.over = number+1, 0
	}
	done := 0
	for ; done < len(x.pending) && x.pending[done].number <= number; done++ {
		s := x.pending[done]
		if s.op == OpRead && (s.number < number || wc.Status == driver.Success) {
			s.deliver()
		}
		x.giveLocked(s)
	}
	if done > 0 {
		kept := copy(x.pending, x.pending[done:])
		clear(x.pending[kept:])
		x.pending = x.pending[:kept]
	}
}

// Await is of driver.Lender: it returns when the adapter does not have v.Bytes any more.
func (x *stagedQP) Await(v *Value) {
	patience, pause := time.NewTimer(detachPatience), time.NewTicker(gatherPause)
	defer patience.Stop()
	defer pause.Stop()
	for {
		if x.cq.gather(); !v.IsLent() {
			return
		}
		select {
		case <-pause.C:
		case <-patience.C:
			go func() { _ = x.Close() }() // its WCs come before the peer has confirmed
		}
	}
}

// Close gives back all memory. WCs may still be polled.
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

// release is called when the provider touches no memory any more, and all WCs of the QP are on its CQ.
func (x *stagedQP) release() error {
	x.cq.Lock()
	defer x.cq.Unlock()
	if x.closed {
		return nil
	}
	x.closed = true
	x.cq.gatherLocked()
	delete(x.cq.of, uint16(x.first>>48))
	x.dropLocked(0)
	x.free = nil
	return x.pd.slabs.removeUser()
}

// copied is how many bytes of Values went through slabs.
func (x *stagedQP) copied() uint64 {
	x.cq.Lock()
	defer x.cq.Unlock()
	return x.bounced
}
