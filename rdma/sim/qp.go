package sim

import (
	"encoding/binary"
	"math/bits"
	"slices"

	"github.com/kvd-project/kvd/internal/bulk"
	"github.com/kvd-project/kvd/rdma/driver"
)

var _ driver.QP = (*qp)(nil)

// poison fills the Local of a READ or an atomic from post to effect.
const poison = 0xdb

type work struct {
	wr     driver.WR
	bytes  int  // wr.Len()
	slack  int  // of those, to be thrown away
	value  bool // wr has a Value, which is the caller's again once w is in net
	sges   []driver.SGE
	index  uint64 // how many WRs the QP had before
	data   []byte // in buf: a WRITE's payload if it is not wr's any more, or what a READ with a Value has got
	buf    []byte // kept for reuse
	pieces uint8
	done   uint16 // a bit per piece
	stride bool   // piece k is every pieces'th unit from k on, not a range
	over   bool   // status is final
	status driver.Status
}

// qp is guarded by Fabric.mu.
type qp struct {
	f        *Fabric
	num      uint32
	dev      *device
	pd       *pd
	cq       *cq
	targetPD *pd
	limit    driver.Access
	peer     *peer
	state    driver.QPState

	// q holds the WRs whose WC is not delivered: q[head:eff] are over,
	// q[eff:] are not, except READs that overtook an atomic.
	q         []work
	head, eff int
	// net holds the WRITEs and atomics that may still land although their WRs
	// are flushed and their buffers returned.
	net       []work
	posted    uint64
	reclaimed uint64 // WRs before this one hold no send queue slot
	hit       bool   // the latest CMP_AND_SWP took effect
	fault     driver.Status
	faultWhen When
	busyAt    int // in Fabric.mu.busy, or -1
	count     Counters
}

func (q *qp) Num() uint32 { return q.num }

func (q *qp) State() driver.QPState {
	q.f.mu.Lock()
	defer q.f.mu.Unlock()
	return q.state
}

func (q *qp) PostSend(wrs []driver.WR) (n int, err error) {
	f := q.f
	f.mu.Lock()
	defer f.mu.Unlock()
	switch q.state {
	case driver.StateClosed:
		return 0, driver.ErrClosed
	case driver.StateErr:
		return 0, driver.ErrQPError
	}
	for n = range wrs {
		if q.posted-q.reclaimed >= uint64(f.o.MaxSendWR) {
			err = driver.ErrQueueFull
			break
		}
		q.addLocked(&wrs[n])
	}
	if err == nil {
		n = len(wrs)
	}
	if n > 0 {
		q.count.Doorbells++
		f.mu.total.Doorbells++
	}
	switch {
	case f.o.Synchronous:
		q.executeLocked()
	case !f.o.Manual:
		q.markLocked()
		f.advanceLocked(f.belowLocked(3))
		if q.cq.busy > 0 {
			q.cq.signal()
		}
	}
	return n, err
}

func (f *Fabric) waitLocked() {
	f.mu.Unlock()
	defer f.mu.Lock() // also if Wait never returns
	f.o.Wait()
}

// executeLocked returns when all that was posted is over; it unlocks meanwhile if the
// steps are the caller's.
func (q *qp) executeLocked() {
	f := q.f
	for q.eff < len(q.q) {
		if f.o.Manual {
			f.waitLocked()
			continue
		}
		f.mu.scratch = q.eventsLocked(f.mu.scratch[:0])
		i := slices.IndexFunc(f.mu.scratch, func(e Event) bool { return e.Kind == Effect })
		last := len(f.mu.scratch) - i // pieces in any order
		q.fireLocked(&f.mu.scratch[i+f.belowLocked(last)])
	}
	q.deliverLocked()
	q.reclaimed = q.posted
}

func (q *qp) addLocked(wr *driver.WR) {
	f := q.f
	if len(q.q) < cap(q.q) {
		q.q = q.q[:len(q.q)+1]
	} else {
		q.q = append(q.q, work{})
	}
	w := &q.q[len(q.q)-1]
	*w = work{wr: *wr, bytes: wr.Len(), value: wr.Value != nil, index: q.posted, buf: w.buf, pieces: 1}
	if w.value {
		if w.sges = wr.Value.SGEs; w.sges == nil {
			w.slack = wr.Value.Slack
		}
	}
	if cap(w.buf) > bufKept {
		w.buf = nil
	}
	q.posted++
	if !w.formed(f) {
		return // fails when its turn comes
	}
	q.count.count(wr)
	f.mu.total.count(wr)
	switch {
	case wr.Op == driver.OpWrite && wr.Flags&driver.Inline != 0:
		w.capture()
	case wr.Op != driver.OpWrite && q.piecesOKLocked(w):
		spoil(wr.Local)
		for _, s := range w.sges {
			spoil(s.Bytes)
		}
		if w.value && w.sges == nil {
			spoil(wr.Value.Acquire())
			wr.Value.Release()
		}
	}
	if wr.Op.IsAtomic() {
		return
	}
	units := w.units(f.o.TearBytes)
	n, long := min(units, MaxPieces), w.tears()
	switch {
	case units == 1:
		n = 1
	case !f.o.Manual:
		n = 2 + f.belowLocked(n-1)
		w.stride = f.belowLocked(2) == 0
	case wr.Op == driver.OpRead:
		n = min(n, f.o.ReadPieces)
	default:
		n = min(n, f.o.WritePieces)
	}
	if f.o.Manual && long && units > 1 {
		n, w.stride = max(n, 2), true // each word of the target in two
	}
	if w.localLast() {
		n++
	}
	w.pieces = uint8(n)
}

// bytewise is the longest message that is torn between any two bytes, bytes. Longer ones would take too long.
const bytewise = 64 << 10

// bufKept is the most that a WR leaves to the next one at its place in the queue, bytes.
const bufKept = 64 << 10

// spoil fills b with poison.
func spoil(b []byte) {
	b[0] = poison
	for n := 1; n < len(b); n *= 2 {
		copy(b[n:], b[:n])
	}
}

// tears tells whether the words of w are not whole.
func (w *work) tears() bool {
	return w.value || w.bytes > wholeBytes
}

// localLast tells whether the last piece is wr.Local, which lands behind the others.
func (w *work) localLast() bool { return w.value && w.sges == nil && w.wr.Op == driver.OpWrite }

// split gives the bytes of the message, from and to, that are moved in pieces of units.
func (w *work) split() (from, to int) {
	if w.localLast() {
		from = len(w.wr.Local)
	}
	return from, w.bytes - w.slack
}

// capture copies the payload, so that wr.Local and the Value are free.
func (w *work) capture() {
	if w.data != nil {
		return
	}
	local := w.wr.Local
	w.buf = append(w.buf[:0], local...)
	for _, s := range w.sges {
		w.buf = append(w.buf, s.Bytes...)
	}
	if v := w.wr.Value; v != nil && w.sges == nil {
		w.buf = append(w.buf, v.Acquire()...)
		v.Release()
		if v.Seal != nil {
			v.Seal(local, bulk.CRC(v.CRC, w.buf[len(local):]))
			copy(w.buf, local)
		}
	}
	w.data = w.buf
}

// deliver hands over what a READ with a Value has got.
func (w *work) deliver() {
	v, from := w.wr.Value, w.data
	from = from[copy(w.wr.Local, from):]
	n, crc := v.Open(w.wr.Local)
	to := v.Acquire()[:n]
	defer v.Release()
	if v.Start != nil {
		v.CRC = bulk.Copy(crc, to, from[:n])
	} else {
		copy(to, from)
	}
}

// formed repeats package rdma's checks, which a caller of the driver may skip.
func (w *work) formed(f *Fabric) bool {
	n := len(w.wr.Local)
	switch v := w.wr.Value; {
	case v == nil:
	case f.caps.AnyMemory:
		if w.sges != nil || !v.Formed(&w.wr, f.o.MaxMsg) {
			return false
		}
	case len(w.sges) == 0 || len(w.sges) >= f.caps.MaxSGE || w.bytes > f.o.MaxMsg || w.wr.Op.IsAtomic() ||
		w.wr.Flags&driver.Inline != 0:
		return false
	case slices.ContainsFunc(w.sges, func(s driver.SGE) bool { return len(s.Bytes) == 0 }):
		return false
	}
	switch w.wr.Op {
	case driver.OpRead:
		return n > 0 && n <= f.o.MaxMsg && w.wr.Flags&driver.Inline == 0
	case driver.OpWrite:
		return n > 0 && n <= f.o.MaxMsg && (w.wr.Flags&driver.Inline == 0 || n <= f.o.MaxInline)
	case driver.OpCmpAndSwp, driver.OpFetchAdd:
		return n == 8 && w.wr.RemoteAddr%8 == 0 && w.wr.Flags&driver.Inline == 0
	}
	return false
}

// grain is the unit that w moves whole, if those of tear bytes are, and how much of the first one lies in front of what
// is split.
func (w *work) grain(tear int) (unit, phase int) {
	from, _ := w.split()
	at := w.wr.RemoteAddr + uint64(from)
	switch {
	case !w.tears():
		unit = tear
	case w.bytes <= bytewise:
		unit = 1
	default:
		unit, at = 8, at+4 // halves of two words
	}
	return unit, int(at % uint64(unit))
}

// units is how many units w touches at the target.
func (w *work) units(tear int) int {
	unit, phase := w.grain(tear)
	from, to := w.split()
	return (phase + to - from + unit - 1) / unit
}

// checkLocked gives the target bytes of w, or why it fails.
func (q *qp) checkLocked(w *work) ([]byte, driver.Status) {
	switch {
	case !w.formed(q.f):
		if w.bytes > q.f.o.MaxMsg {
			return nil, driver.LocLenErr
		}
		return nil, driver.LocQPOpErr
	case (w.data == nil || w.wr.Op == driver.OpRead) && !q.piecesOKLocked(w):
		return nil, driver.LocProtErr
	case q.targetPD.dev.crashed:
		return nil, driver.RetryExcErr
	}
	b := q.remoteLocked(w)
	if b == nil {
		return nil, driver.RemAccessErr
	}
	return b, driver.Success
}

// applyLocked executes piece k of w at the target. flushed: the initiator has
// its buffer back, so nothing is returned to it.
func (q *qp) applyLocked(w *work, k int, remote []byte, flushed bool) {
	tear := q.f.o.TearBytes
	w.done |= 1 << k
	if w.wr.Op.IsAtomic() {
		found := binary.LittleEndian.Uint64(remote)
		if w.wr.Op == driver.OpFetchAdd {
			binary.LittleEndian.PutUint64(remote, found+w.wr.Swap)
		} else {
			if w.wr.Flags&driver.IfHit != 0 && !q.hit {
				found = ^w.wr.Compare
			}
			if q.hit = found == w.wr.Compare; q.hit {
				binary.LittleEndian.PutUint64(remote, w.wr.Swap)
			}
		}
		if !flushed {
			binary.LittleEndian.PutUint64(w.wr.Local, found)
		}
		return
	}
	to, from := w.wr.Local, remote
	switch {
	case w.wr.Op == driver.OpWrite:
		to, from = remote, w.wr.Local
		if w.data != nil {
			from = w.data
		}
	case w.value && w.sges == nil:
		if w.data == nil {
			_, n := w.split()
			w.buf = slices.Grow(w.buf[:0], n)[:n]
			clear(w.buf) // it is hashed
			w.data = w.buf
		}
		to = w.data
	}
	n := int(w.pieces)
	if w.localLast() {
		if n--; k == n {
			copy(to, from[:len(w.wr.Local)])
			return
		}
	}
	first, last := w.split()
	move := func(a, b int) { copy(to[first+a:first+b], from[first+a:first+b]) }
	if w.sges != nil && w.data == nil {
		move = func(a, b int) { w.moveSGEs(remote, a, b) }
	}
	unit, phase := w.grain(tear)
	units := w.units(tear)
	if !w.stride {
		move(max(k*units/n*unit-phase, 0), min((k+1)*units/n*unit-phase, last-first))
		return
	}
	for u := k; u < units; u += n {
		move(max(u*unit-phase, 0), min((u+1)*unit-phase, last-first))
	}
}

// moveSGEs moves bytes from a to b of the message between remote and the pieces of local memory.
func (w *work) moveSGEs(remote []byte, a, b int) {
	for i, at := 0, 0; at < b && i <= len(w.sges); i++ {
		local := w.wr.Local
		if i > 0 {
			local = w.sges[i-1].Bytes
		}
		if from, to := max(a, at), min(b, at+len(local)); from < to {
			if w.wr.Op == driver.OpRead {
				copy(local[from-at:to-at], remote[from:to])
			} else {
				copy(remote[from:to], local[from-at:to-at])
			}
		}
		at += len(local)
	}
}

func (w *work) whole() bool { return bits.OnesCount16(w.done) == int(w.pieces) }

// startLocked tells whether q.q[at] may take effect now; at is in [eff, len).
func (q *qp) startLocked(at int) bool {
	if q.state != driver.StateRTS {
		return false
	}
	if at == q.eff {
		return true
	}
	if !q.f.o.NoAtomicThenRead {
		return false
	}
	w := &q.q[at]
	if w.wr.Op != driver.OpRead || w.wr.Flags&driver.Fence != 0 {
		return false
	}
	for i := q.eff; i < at; i++ {
		if b := &q.q[i]; !b.over && !b.wr.Op.IsAtomic() {
			return false
		}
	}
	_, st := q.checkLocked(w) // one that fails does so in its turn
	return st == driver.Success
}

// effectLocked fires piece k of q.q[at], which startLocked allows.
func (q *qp) effectLocked(at, k int) {
	w := &q.q[at]
	inject := q.fault != 0 && at == q.eff && w.done == 0
	if inject && q.faultWhen == BeforeEffect {
		q.failLocked(at, q.takeFault(), false)
		return
	}
	remote, st := q.checkLocked(w)
	if st != driver.Success {
		q.failLocked(at, st, false)
		return
	}
	if w.localLast() {
		w.capture()
	}
	q.applyLocked(w, k, remote, false)
	if !w.whole() {
		return
	}
	if w.value && w.sges == nil && w.wr.Op == driver.OpRead {
		w.deliver()
	}
	if q.fault != 0 && q.faultWhen == AfterEffect && at == q.eff {
		q.failLocked(at, q.takeFault(), true)
		return
	}
	w.over, w.status = true, driver.Success
	for q.eff < len(q.q) && q.q[q.eff].over {
		q.eff++
	}
	q.retireLocked()
}

func (q *qp) takeFault() driver.Status {
	st := q.fault
	q.fault = 0
	return st
}

// failLocked completes q.q[at] with st and flushes what is behind it, which may
// still land if sent.
func (q *qp) failLocked(at int, st driver.Status, sent bool) {
	w := &q.q[at]
	w.over, w.status = true, st
	q.flushLocked(at+1, sent)
}

// flushLocked moves the QP to error and flushes q.q[from:], into the network if
// sent.
func (q *qp) flushLocked(from int, sent bool) {
	q.state = driver.StateErr
	sent = sent && !q.f.o.Synchronous
	for i := from; i < len(q.q); i++ {
		w := &q.q[i]
		if sent && !w.over && w.wr.Op != driver.OpRead {
			// A WR whose local side fails is not sent, nor is any behind it.
			sent = w.formed(q.f) && (w.data != nil || q.piecesOKLocked(w))
			if sent {
				if w.wr.Op == driver.OpWrite {
					w.capture()
				}
				n := *w
				w.buf, w.data = nil, nil // moved
				q.net = append(q.net, n)
			}
		}
		w.over, w.status = true, driver.WRFlushErr
	}
	q.eff = len(q.q)
	q.retireLocked()
}

// killLocked moves the QP to error with everything unfinished in the network.
func (q *qp) killLocked() {
	if q.state == driver.StateRTS {
		q.flushLocked(q.eff, true)
		q.cq.signal()
	}
	q.markLocked()
}

// settleLocked empties the network: auto mode lets some of it land.
func (q *qp) settleLocked() {
	for !q.f.o.Manual && len(q.net) > 0 && q.f.belowLocked(4) != 0 {
		w := &q.net[0]
		k := q.f.belowLocked(int(w.pieces))
		for !w.pending(k) {
			k = (k + 1) % int(w.pieces)
		}
		q.landLocked(k)
	}
	q.net = q.net[:0]
	q.markLocked()
}

// landLocked fires piece k of the first WR in the network.
func (q *qp) landLocked(k int) {
	w := &q.net[0]
	var remote []byte
	if !q.targetPD.dev.crashed {
		remote = q.remoteLocked(w)
	}
	if remote == nil { // refused, and so is what is behind
		q.net = q.net[:0]
		return
	}
	q.applyLocked(w, k, remote, true)
	if w.whole() {
		q.net = slices.Delete(q.net, 0, 1)
	}
}

// retireLocked drops finished WRs that have no WC and, if delivery is no
// event, delivers the others.
func (q *qp) retireLocked() {
	for q.head < q.eff {
		w := &q.q[q.head]
		if w.status == driver.Success && w.wr.Flags&driver.Signaled == 0 {
			q.head++
			continue
		}
		if !q.f.o.Manual || q.f.o.DeliverEvents {
			break
		}
		q.pushLocked()
	}
	q.compactLocked()
}

func (q *qp) deliverLocked() {
	for q.head < q.eff {
		if w := &q.q[q.head]; w.status == driver.Success && w.wr.Flags&driver.Signaled == 0 {
			q.head++
			continue
		}
		q.pushLocked()
	}
	q.compactLocked()
	q.markLocked()
}

// pushLocked puts the WC of q.q[head], which is over, in the CQ.
func (q *qp) pushLocked() {
	w := &q.q[q.head]
	q.head++
	q.cq.pushLocked(entry{driver.WC{ID: w.wr.ID, QPNum: q.num, Op: w.wr.Op, Status: w.status}, q, w.index})
}

func (q *qp) compactLocked() {
	switch {
	case q.head == len(q.q):
		q.q, q.head, q.eff = q.q[:0], 0, 0
	case q.head >= 64 && q.head*2 >= len(q.q):
		for i := q.head; i < len(q.q); i++ { // swap: each keeps a buf of its own
			q.q[i], q.q[i-q.head] = q.q[i-q.head], q.q[i]
		}
		q.q, q.eff, q.head = q.q[:len(q.q)-q.head], q.eff-q.head, 0
	}
}

// markLocked keeps Fabric.mu.busy in step with whether q has an enabled event.
func (q *qp) markLocked() {
	f := q.f
	if f.o.Manual {
		return
	}
	want := q.head < len(q.q) || len(q.net) > 0
	switch {
	case want && q.busyAt < 0:
		q.busyAt = len(f.mu.busy)
		f.mu.busy = append(f.mu.busy, q)
		q.cq.busy++
	case !want && q.busyAt >= 0:
		last := len(f.mu.busy) - 1
		f.mu.busy[q.busyAt] = f.mu.busy[last]
		f.mu.busy[q.busyAt].busyAt = q.busyAt
		f.mu.busy = f.mu.busy[:last]
		q.busyAt = -1
		q.cq.busy--
	}
}

// advanceLocked fires up to n random events of auto mode.
func (f *Fabric) advanceLocked(n int) {
	for ; n > 0 && len(f.mu.busy) > 0; n-- {
		q := f.mu.busy[f.belowLocked(len(f.mu.busy))]
		f.mu.scratch = q.eventsLocked(f.mu.scratch[:0])
		q.fireLocked(&f.mu.scratch[f.belowLocked(len(f.mu.scratch))])
	}
}

func (q *qp) Close() error {
	f := q.f
	f.mu.Lock()
	if q.state == driver.StateClosed {
		f.mu.Unlock()
		return nil
	}
	q.killLocked()
	q.settleLocked()
	q.deliverLocked()
	q.state = driver.StateClosed
	gone := q.peer.fenceLocked()
	if i := slices.Index(q.peer.l.peers, q.peer); i >= 0 {
		q.peer.l.peers = slices.Delete(q.peer.l.peers, i, i+1)
	}
	if i := slices.Index(f.mu.qps, q); i >= 0 {
		f.mu.qps = slices.Delete(f.mu.qps, i, i+1)
	}
	q.dev.qps--
	q.pd.qps--
	q.cq.qps--
	f.mu.Unlock()
	if gone {
		q.peer.notify()
	}
	return nil
}

func (q *qp) resetLocked() {
	q.q, q.head, q.eff, q.net = q.q[:0], 0, 0, q.net[:0]
	q.posted, q.reclaimed, q.fault, q.count = 0, 0, 0, Counters{}
	q.state = driver.StateRTS
	if q.peer.gone {
		q.peer.gone = false
		q.targetPD.qps++
	}
	q.markLocked()
}
