//go:build verbs && cgo && linux

package verbs

// #cgo noescape kvd_post
// #cgo nocallback kvd_post
// #include <stdlib.h>
// #include "shim_cm.h"
import "C"

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"github.com/kvd-project/kvd/rdma/driver"
)

// ErrUnconfirmed means that a QP is closed on this side but its peer did not say that it has destroyed its
// own. Posted verbs may still land there.
var ErrUnconfirmed = errors.New("the peer did not confirm")

// qp is the initiator's side of a connection. Everything below mu is guarded by
// the CQ's lock.
type qp struct {
	d      *device
	pd     *pd
	cq     *cq
	num    uint32
	id     wrID
	inline int
	c      *C.struct_ibv_qp // nil: destroyed
	// destroying: destroyLocked is at it, with the lock open, and c must not be used.
	destroying bool
	state      atomic.Uint32 // driver.QPState
	failed     atomic.Bool   // it was in error before it was closed

	// posted WRs are numbered from 0; those below retired have left the queue.
	ring            []entry // length a power of two, at least depth
	depth           int
	posted, retired uint64
	wrs             []C.struct_kvd_wr  // in C's memory, depth of them and one for confirm
	more            []C.struct_kvd_sge // in C's memory, moreSGEs for each of wrs
	local           *mr                // the MR of the last LKey
	scratch         unsafe.Pointer
	reported        uint64 // WRs below it that the adapter will report, or a later one
	secret          uint64 // see mark
	broken          bool   // a WR failed: what is behind it is flushed
	hold            *holdQueue
	cmID            *C.struct_rdma_cm_id // of the connection manager, if that has connected q

	ctl     net.Conn
	ctlDone chan struct{} // closed when nobody reads ctl any more
	goodbye chan struct{} // closed when the peer has said so
	closing struct {
		sync.Once
		err error
	}
	aborted  atomic.Bool
	draining sync.WaitGroup // of connectionEndedLocked
}

type entry struct {
	id     uint64
	op     driver.Opcode
	signal bool
	// foul: Local, or another SGE, lies outside the MR of its LKey. The adapter has got a WR instead
	// that the target refuses.
	foul bool
	// word is where the last 8 bytes of an answer go that are not slack; it holds the WR's mark until
	// then. Nil: there is no answer, or its last piece is shorter.
	word *uint64
}

var (
	_ driver.QP           = (*qp)(nil)
	_ driver.Aborter      = (*qp)(nil)
	_ driver.AgentAtomics = (*qp)(nil)
)

// recvBuffers is how many messages a peer may send us unasked: one reply to an
// atomic, as only one is under way, and some to spare.
const recvBuffers = 4

// moreSGEs is how many pieces of memory a WR may have beside Local.
const moreSGEs = C.KVD_MORE_SGES

// newQP makes a queue pair in state INIT.
func newQP(d *device, p *pd, c *cq, rights driver.Access) (*qp, error) {
	q := &qp{d: d, pd: p, cq: c, depth: d.caps.MaxSendWR, secret: random64()}
	d.mu.Lock()
	closed := d.mu.closed
	if !closed {
		d.mu.qps++
	}
	d.mu.Unlock()
	if closed {
		return nil, driver.ErrClosed
	}
	if err := p.addQP(); err != nil {
		d.releaseQP()
		return nil, err
	}
	if err := c.attach(q); err != nil {
		p.removeQP()
		d.releaseQP()
		return nil, err
	}
	// Adapters differ in how much they take inline, and say so by refusing.
	var got, rc C.int
	room := q.depth + 1
	if d.iwarp() {
		room += q.depth // see confirm
	}
	for want := wantInline; ; want /= 2 {
		if want < 32 {
			want = 0
		}
		if rc = C.kvd_create_qp(p.c, c.c, C.int(min(room, d.info.MaxQPWR)), recvBuffers, C.int(d.caps.MaxSGE),
			C.int(want), &q.c, &got); rc == 0 || want == 0 {
			q.inline = min(int(got), want)
			break
		}
	}
	if rc == 0 {
		q.num = uint32(q.c.qp_num)
		if rc = d.initQP(q.c, accessFlags(rights, true)); rc != 0 {
			_ = C.kvd_destroy_qp(q.c)
		}
	}
	if rc != 0 {
		c.mu.Lock()
		c.detachLocked(q)
		c.mu.Unlock()
		p.removeQP()
		d.releaseQP()
		return nil, limited("create QP", int64(q.depth)*256, rc)
	}
	size := 1
	for size < q.depth {
		size *= 2
	}
	q.ring = make([]entry, size)
	q.wrs = unsafe.Slice((*C.struct_kvd_wr)(C.calloc(C.size_t(q.depth+1), C.sizeof_struct_kvd_wr)),
		q.depth+1)
	q.more = unsafe.Slice((*C.struct_kvd_sge)(C.calloc(C.size_t((q.depth+1)*moreSGEs),
		C.sizeof_struct_kvd_sge)), (q.depth+1)*moreSGEs)
	q.scratch = C.calloc(1, C.kvd_scratch_size(C.int(q.depth+1)))
	q.state.Store(uint32(driver.StateRTS))
	return q, nil
}

func (d *device) releaseQP() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.mu.qps--
}

// path is how our queue pair, local, reaches remote.
func (d *device) path(local, remote *endpoint) (C.struct_kvd_path, error) {
	var p C.struct_kvd_path
	if d.global != remote.global {
		return p, fmt.Errorf("ours is %v, the peer's %v: one is addressed by GID and the other is not", local, remote)
	}
	for i, b := range remote.gid {
		p.gid[i] = C.uint8_t(b)
	}
	p.qpn, p.send_psn, p.recv_psn = C.uint32_t(remote.qpn), C.uint32_t(local.psn), C.uint32_t(remote.psn)
	p.flow_label, p.lid, p.port = C.uint32_t(local.flow), C.uint16_t(remote.lid), C.uint8_t(d.port.Number)
	p.gid_index = C.uint8_t(max(d.choice.GID, 0))
	p.global = C.uint8_t(byte01(remote.global))
	p.mtu = C.uint8_t(min(d.mtu, remote.mtu))
	p.initiator_depth = C.uint8_t(min(d.initDepth, remote.rdAtomic))
	p.responder_depth = C.uint8_t(d.destDepth)
	f := &d.o.Fabric
	p.timeout, p.retry, p.rnr_retry = C.uint8_t(d.timeout), C.uint8_t(f.RetryCount), C.uint8_t(f.RNRRetry)
	p.traffic_class, p.hop_limit, p.sl = C.uint8_t(f.TrafficClass), C.uint8_t(f.HopLimit), C.uint8_t(f.ServiceLevel)
	return p, nil
}

// initQP moves a new queue pair to INIT.
func (d *device) initQP(qp *C.struct_ibv_qp, access C.int) C.int {
	return C.kvd_init_qp(qp, C.int(d.port.Number), C.int(d.o.Fabric.PKeyIndex), access)
}

// connect moves q from INIT to RTS.
func (q *qp) connect(local, remote endpoint) error {
	p, err := q.d.path(&local, &remote)
	if err != nil {
		return err
	}
	if rc := C.kvd_rtr(q.c, &p); rc != 0 {
		return fmt.Errorf("QP to RTR, towards %v: %w", &remote, syscall.Errno(rc))
	}
	if rc := C.kvd_rts(q.c, &p); rc != 0 {
		return fmt.Errorf("QP to RTS: %w", syscall.Errno(rc))
	}
	return nil
}

func (q *qp) Num() uint32           { return q.num }
func (q *qp) State() driver.QPState { return driver.QPState(q.state.Load()) }
func (q *qp) AtomicsByAgent() bool  { return q.hold != nil && q.hold.byAgent }

// PostSend hands a chain to the adapter with one call.
func (q *qp) PostSend(wrs []driver.WR) (int, error) {
	c := q.cq
	c.mu.Lock()
	defer c.mu.Unlock()
	switch q.State() {
	case driver.StateClosed:
		return 0, driver.ErrClosed
	case driver.StateErr:
		return 0, driver.ErrQPError
	}
	n := min(len(wrs), q.depth-int(q.posted-q.retired), c.roomLocked())
	var err error
	if n < len(wrs) {
		err = driver.ErrQueueFull
	}
	if n == 0 {
		return 0, err
	}
	if q.hold == nil && fenced(wrs[:n]) {
		q.hold = newHoldQueue(q)
	}
	if q.hold != nil {
		return q.hold.post(wrs[:n], err)
	}
	done, perr := q.postLocked(wrs[:n])
	if perr != nil {
		return done, perr
	}
	return done, err
}

func fenced(wrs []driver.WR) bool {
	return slices.ContainsFunc(wrs, func(w driver.WR) bool { return w.Flags&driver.Fence != 0 })
}

// postLocked posts wrs, for which there is room.
func (q *qp) postLocked(wrs []driver.WR) (int, error) {
	for i := range wrs {
		q.fill(i, &wrs[i], q.noteWR(&wrs[i]))
	}
	var done C.int
	rc := C.kvd_post(q.c, &q.wrs[0], &q.more[0], C.int(len(wrs)), q.scratch, &done)
	if rc == 0 {
		return int(done), nil
	}
	q.posted -= uint64(len(wrs) - int(done))
	q.cq.outstanding -= len(wrs) - int(done)
	if syscall.Errno(rc) == syscall.ENOMEM {
		return int(done), driver.ErrQueueFull
	}
	q.d.o.Logger.Error("the adapter refused a work request", "device", q.d.info.Name, "qp", q.num, "op", wrs[done].Op,
		"bytes", wrs[done].Len(), "err", syscall.Errno(rc))
	q.failLocked()
	return int(done), driver.ErrQPError
}

// noteWR counts a WR that the adapter, or the agent's queue, takes, and returns its
// number.
func (q *qp) noteWR(w *driver.WR) uint64 {
	n := q.posted
	e := entry{id: w.ID, op: w.Op, signal: w.Flags&driver.Signaled != 0, foul: !q.covers(w)}
	if b := answer(w); len(b) >= 8 && !e.foul {
		e.word = (*uint64)(unsafe.Pointer(&b[len(b)-8]))
		*e.word = q.mark(n)
	}
	q.ring[n&uint64(len(q.ring)-1)] = e
	q.posted++
	q.cq.outstanding++
	return n
}

// answer is the last piece of memory that the answer to w fills and somebody reads; nil if there is none.
func answer(w *driver.WR) []byte {
	if w.Op == driver.OpWrite {
		return nil
	}
	if w.Value == nil {
		return w.Local
	}
	s := w.Value.SGEs
	if w.Value.Slack > 0 {
		s = s[:len(s)-1] // others throw theirs away there, too
	}
	if len(s) == 0 {
		return w.Local
	}
	return s[len(s)-1].Bytes
}

// mark is what the end of WR n's buffer holds until the answer comes. That the
// answer is the same is as likely as any other 64 bits.
func (q *qp) mark(n uint64) uint64 { return q.secret + n*0x9e3779b97f4a7c15 }

// unanswered tells whether the adapter calls WR n done without having brought its
// answer. Soft-RoCE does: if packets are lost, the target acknowledges a repeated
// WRITE with the number of the last request that it has executed, which the
// initiator takes for the answer to an atomic with that number. The memory behind e.word is as it was, and
// would be taken for the word that was found.
func (q *qp) unanswered(n uint64, e *entry) bool { return e.word != nil && *e.word == q.mark(n) }

// covers tells whether w's pieces of memory lie inside the MRs of their LKeys. Adapters check
// that too, but while they execute: what is in front may be flushed and what is
// behind may happen.
func (q *qp) covers(w *driver.WR) bool {
	m := q.local
	if m == nil || uint64(m.lkey) != w.LKey || m.dead.Load() {
		if m = q.pd.localMR(w.LKey); m == nil {
			return false
		}
		q.local = m
	}
	if !m.has(w.Local) {
		return false
	}
	if w.Value == nil {
		return true
	}
	for _, s := range w.Value.SGEs {
		if m := q.pd.localMR(s.LKey); m == nil || !m.has(s.Bytes) {
			return false
		}
	}
	return true
}

var opcodes = [driver.NumOpcodes]C.uint8_t{
	driver.OpRead:      C.IBV_WR_RDMA_READ,
	driver.OpWrite:     C.IBV_WR_RDMA_WRITE,
	driver.OpCmpAndSwp: C.IBV_WR_ATOMIC_CMP_AND_SWP,
	driver.OpFetchAdd:  C.IBV_WR_ATOMIC_FETCH_AND_ADD,
}

// fill describes WR number, the i-th of a chain, to the shim.
func (q *qp) fill(i int, w *driver.WR, number uint64) {
	x := &q.wrs[i]
	id := q.id
	id.seq = uint32(number)
	x.id = C.uint64_t(id.pack())
	x.op = opcodes[w.Op]
	x.flags = 0
	if w.Flags&driver.Signaled != 0 {
		x.flags |= C.IBV_SEND_SIGNALED
		q.reported = number + 1
	}
	if w.Flags&driver.Inline != 0 {
		x.flags |= C.IBV_SEND_INLINE
	}
	x.local = C.uint64_t(addressOf(w.Local))
	x.len = C.uint32_t(len(w.Local))
	x.remote, x.compare, x.swap = C.uint64_t(w.RemoteAddr), C.uint64_t(w.Compare), C.uint64_t(w.Swap)
	x.lkey, x.rkey = C.uint32_t(w.LKey), C.uint32_t(w.RKey)
	x.more = 0
	if w.Value != nil {
		for k, s := range w.Value.SGEs {
			q.more[i*moreSGEs+k] = C.struct_kvd_sge{addr: C.uint64_t(addressOf(s.Bytes)), len: C.uint32_t(len(s.Bytes)),
				lkey: C.uint32_t(s.LKey)}
		}
		x.more = C.uint8_t(len(w.Value.SGEs))
	}
	// Keys have 32 bits. A longer key names nothing, and the target shall say so in its turn: no region
	// reaches to the last word.
	if w.RKey>>32 != 0 {
		x.rkey, x.remote = 0, ^C.uint64_t(7)
	}
	if q.ring[number&uint64(len(q.ring)-1)].foul {
		x.more = 0
		if q.inline == 0 {
			x.lkey = 0
			return
		}
		x.op, x.flags, x.len = C.IBV_WR_RDMA_WRITE, C.IBV_SEND_INLINE, 1
		x.local = C.uint64_t(uintptr(q.scratch))
		x.rkey, x.remote = 0, ^C.uint64_t(7)
	}
}

// sent takes the completion of WR seq.
func (q *qp) sent(seq, status, vendor uint32) {
	at := q.retired + uint64(seq-uint32(q.retired))
	if at >= q.posted {
		return // it is over: what was in front of it failed
	}
	s := q.statusOf(status, vendor)
	if q.hold != nil {
		q.hold.sent(at, s)
		return
	}
	q.complete(at, s)
}

func (q *qp) received(seq, status uint32) {
	if q.hold != nil && q.hold.byAgent && q.c != nil && !q.destroying {
		q.hold.received(seq, status)
		if status != C.IBV_WC_SUCCESS && q.d.iwarp() {
			q.connectionEndedLocked()
		}
	}
}

// complete retires the WRs up to number at, which ended with s; those before it
// succeeded, unless they have no answer.
func (q *qp) complete(at uint64, s driver.Status) {
	for n := q.retired; n <= at; n++ {
		e := &q.ring[n&uint64(len(q.ring)-1)]
		st := driver.Success
		if n == at {
			st = s
		}
		switch {
		case q.broken && st == driver.Success:
			st = driver.WRFlushErr
		case st == driver.Success && q.unanswered(n, e):
			q.d.o.Logger.Warn("the adapter completed a work request without its answer", "device", q.d.info.Name, "qp",
				q.num, "op", e.op)
			st = driver.GeneralErr
		case e.foul && st == driver.RemAccessErr:
			st = driver.LocProtErr
		}
		if st != driver.Success {
			q.broken = true
			q.failLocked()
		}
		if st != driver.Success || e.signal {
			q.cq.soft = append(q.cq.soft, driver.WC{ID: e.id, QPNum: q.num, Op: e.op, Status: st})
		}
		e.word = nil
	}
	q.cq.outstanding -= int(at + 1 - q.retired)
	q.retired = at + 1
}

// failLocked moves a working queue pair to the error state, on both sides of the
// shim.
func (q *qp) failLocked() {
	if q.state.CompareAndSwap(uint32(driver.StateRTS), uint32(driver.StateErr)) {
		q.failed.Store(true)
		_ = C.kvd_err(q.c)
	}
}

func (q *qp) statusOf(s, vendor uint32) driver.Status {
	switch s {
	case C.IBV_WC_SUCCESS:
		return driver.Success
	case C.IBV_WC_WR_FLUSH_ERR:
		return driver.WRFlushErr
	}
	if q.State() == driver.StateRTS {
		q.d.o.Logger.Debug("work completion with error", "qp", q.num, "status", s, "vendor", vendor)
	}
	switch s {
	case C.IBV_WC_LOC_LEN_ERR:
		return driver.LocLenErr
	case C.IBV_WC_LOC_QP_OP_ERR:
		return driver.LocQPOpErr
	case C.IBV_WC_LOC_PROT_ERR:
		return driver.LocProtErr
	case C.IBV_WC_REM_INV_REQ_ERR:
		return driver.RemInvReqErr
	case C.IBV_WC_REM_ACCESS_ERR:
		return driver.RemAccessErr
	case C.IBV_WC_REM_OP_ERR:
		return driver.RemOpErr
	case C.IBV_WC_RETRY_EXC_ERR, C.IBV_WC_RNR_RETRY_EXC_ERR, C.IBV_WC_RESP_TIMEOUT_ERR:
		return driver.RetryExcErr
	}
	return driver.GeneralErr
}

// watchPeer reads the control channel until it ends or the peer says goodbye:
// either way the peer's queue pair is gone.
func (q *qp) watchPeer() {
	defer close(q.ctlDone)
	var b [1]byte
	if n, _ := q.ctl.Read(b[:]); n == 1 && b[0] == wireGoodbye {
		close(q.goodbye)
	}
	q.cq.mu.Lock()
	defer q.cq.mu.Unlock()
	q.failLocked()
	if q.d.iwarp() {
		q.drainLocked()
	}
	q.cq.signal()
}

// Close waits for the adapter to flush the queue, so that it touches no buffer any more. It also waits for
// the peer to confirm that nothing of what was posted can land any more, unless all of it has completed.
func (q *qp) Close() error {
	q.closing.Do(func() { q.closing.err = q.end() })
	return q.closing.err
}

// Abort is Close without the peer.
func (q *qp) Abort() error {
	q.aborted.Store(true)
	if q.ctl != nil {
		_ = q.ctl.Close()
	}
	_ = q.Close()
	return nil
}

func (q *qp) end() error {
	c := q.cq
	c.mu.Lock()
	clean := q.posted == q.retired && !q.failed.Load()
	q.state.Store(uint32(driver.StateClosed))
	if q.c != nil && !q.destroying { // or drainLocked is here, or was
		if rc := C.kvd_err(q.c); rc == 0 {
			q.awaitFlushLocked(func() bool { return true })
		}
	}
	later := q.failed.Load() && q.posted == q.retired
	if len(c.soft) > 0 {
		c.signal()
	}
	c.mu.Unlock()
	var err error
	if later {
		q.d.departing.start(func() {
			if err := q.destroy(); err != nil {
				q.d.o.Logger.Error("QP not destroyed", "device", q.d.info.Name, "err", err)
			}
		})
	} else {
		err = q.destroy()
	}
	if q.ctl != nil {
		err = errors.Join(err, q.part(clean))
	}
	return err
}

// destroy ends what is left of a queue pair that is closed. If it had failed, and all that was posted has completed, no
// buffer is touched any more and nobody waits for this but who closes the device or what the queue pair uses: while a
// packet of it waits for a neighbour's address, Soft-RoCE needs seconds for it.
func (q *qp) destroy() error {
	c := q.cq
	c.mu.Lock()
	err := q.destroyLocked()
	c.mu.Unlock()
	if q.cmID != nil {
		q.d.cm.manager.drop(q.cmID)
	}
	c.mu.Lock()
	// A queue pair that is gone touches nothing: whatever the adapter has not
	// reported was flushed.
	for q.posted > q.retired {
		q.complete(q.retired, driver.WRFlushErr)
	}
	c.detachLocked(q)
	if len(c.soft) > 0 {
		c.signal()
	}
	c.mu.Unlock()
	q.draining.Wait()
	C.free(unsafe.Pointer(&q.wrs[0]))
	C.free(unsafe.Pointer(&q.more[0]))
	C.free(q.scratch)
	if q.hold != nil {
		err = errors.Join(err, q.hold.free())
	}
	q.pd.removeQP()
	q.d.releaseQP()
	return err
}

// departing are goroutines that destroy queue pairs.
type departing struct {
	mu   sync.Mutex
	n    int
	none chan struct{} // closed when n is 0 again
}

func (d *departing) start(f func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.n == 0 {
		d.none = make(chan struct{})
	}
	d.n++
	go func() {
		f()
		d.mu.Lock()
		defer d.mu.Unlock()
		if d.n--; d.n == 0 {
			close(d.none)
		}
	}()
}

// wait returns when there are none.
func (d *departing) wait() {
	d.mu.Lock()
	n, none := d.n, d.none
	d.mu.Unlock()
	if n > 0 {
		<-none
	}
}

// destroyLocked destroys the queue pair, with the CQ's lock open: others poll the CQ. If another goroutine is about to,
// it waits for that.
func (q *qp) destroyLocked() error {
	c := q.cq
	for q.destroying {
		c.mu.Unlock()
		time.Sleep(50 * time.Microsecond)
		c.mu.Lock()
	}
	if q.c == nil {
		return nil
	}
	q.destroying = true
	dying := q.c
	c.mu.Unlock()
	rc := C.kvd_destroy_qp(dying)
	c.mu.Lock()
	if q.destroying = false; rc != 0 {
		return fmt.Errorf("verbs: destroy QP %d: %w", q.num, syscall.Errno(rc))
	}
	q.c = nil
	return nil
}

// awaitFlushLocked waits, with the CQ's lock open, until the adapter has flushed the queue, for at most drainBudget and
// while wanted says so.
func (q *qp) awaitFlushLocked(wanted func() bool) {
	c := q.cq
	for deadline := time.Now().Add(drainBudget); ; {
		for q.posted > q.retired && c.takeLocked(pollBatch, 0) > 0 {
		}
		if q.posted == q.retired || !wanted() || time.Now().After(deadline) {
			return
		}
		c.mu.Unlock()
		time.Sleep(50 * time.Microsecond)
		c.mu.Lock()
	}
}

// part takes leave of the peer.
func (q *qp) part(clean bool) (err error) {
	defer func() {
		_ = q.ctl.Close()
		<-q.ctlDone
	}()
	if q.aborted.Load() {
		return nil
	}
	_ = q.ctl.SetWriteDeadline(time.Now().Add(partBudget))
	if _, werr := q.ctl.Write([]byte{wireBye}); werr != nil || clean {
		if clean {
			return nil
		}
		// The channel may have broken because the peer is done with us, or not.
		select {
		case <-q.goodbye:
			return nil
		default:
		}
		return fmt.Errorf("verbs: close QP %d: %w: %w", q.num, ErrUnconfirmed, werr)
	}
	t := time.NewTimer(partBudget)
	defer t.Stop()
	select {
	case <-q.goodbye:
		return nil
	case <-q.ctlDone:
		select {
		case <-q.goodbye:
			return nil
		default:
		}
	case <-t.C:
	}
	return fmt.Errorf("verbs: close QP %d: %w", q.num, ErrUnconfirmed)
}

// partBudget is how long a peer may take to confirm.
const partBudget = 2 * time.Second
