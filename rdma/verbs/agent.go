//go:build verbs && cgo && linux

package verbs

// #include <stdlib.h>
// #include "shim.h"
import "C"

import (
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"github.com/kvd-project/kvd/internal/mem"
	"github.com/kvd-project/kvd/rdma/driver"
)

// Where adapters have no atomics (iWARP), or the memory's atomic domain is the
// CPUs', an atomic is a SEND that an agent of the target answers with another.
// READ and WRITE stay the adapter's. The target sees a SEND after the WRITEs in
// front of it; what is behind an atomic is held back at the initiator until the
// reply is there, because no fence orders a READ behind the work of a CPU.

// msgStride separates message buffers, bytes.
const msgStride = 64

// messages is a page of registered buffers: recvBuffers to receive into, then
// as many to send from.
type messages struct {
	m *driver.Memory
	r driver.MR
}

func newMessages(p *pd) (ms messages, err error) {
	if ms.m, err = mem.Alloc(2*recvBuffers*msgStride, driver.AllocOptions{Name: "verbs-messages"}); err != nil {
		return ms, err
	}
	if ms.r, err = p.RegMR(ms.m, 0, int64(len(ms.m.Bytes)), driver.AccessLocal); err != nil {
		return ms, errors.Join(err, ms.m.Free())
	}
	return ms, nil
}

func (ms *messages) buf(i int) []byte { return ms.m.Bytes[i*msgStride : (i+1)*msgStride] }

func (ms *messages) addr(i int) C.uint64_t { return C.uint64_t(ms.r.Base()) + C.uint64_t(i*msgStride) }

func (ms *messages) receive(qp *C.struct_ibv_qp, id uint64, i int) error {
	if rc := C.kvd_post_recv(qp, C.uint64_t(id), ms.addr(i), msgStride, C.uint32_t(ms.r.LKey())); rc != 0 {
		return fmt.Errorf("post receive: %w", syscall.Errno(rc))
	}
	return nil
}

func (ms *messages) free() error { return errors.Join(ms.r.Deregister(), ms.m.Free()) }

// ---- the initiator -----------------------------------------------------------

// agentQueue is a send queue that holds back what is behind an atomic, and a fenced
// WR until all in front of it is complete: Soft-RoCE was seen to forget a fenced
// READ behind a SEND. It is guarded by the CQ's lock.
type agentQueue struct {
	q  *qp
	ms messages
	// wrs are the WRs from number q.retired to q.posted, by the low bits of their
	// number; those below issued are with the adapter.
	wrs    []driver.WR
	issued uint64
	// atomic is the number of the atomic under way, if waiting; it is over when
	// its SEND has completed, so that all in front of it has, and its reply is here.
	atomic   uint64
	waiting  bool
	sendOver bool
	replied  bool
	reply    atomicReply
	chain    []driver.WR
}

func newAgentQueue(q *qp) (*agentQueue, error) {
	ms, err := newMessages(q.pd)
	if err != nil {
		return nil, err
	}
	a := &agentQueue{q: q, ms: ms, wrs: make([]driver.WR, len(q.ring)), chain: make([]driver.WR, 0, q.depth)}
	for i := range recvBuffers {
		id := q.id
		id.recv, id.seq = true, uint32(i)
		if err := ms.receive(q.c, id.pack(), i); err != nil {
			return nil, errors.Join(err, ms.free())
		}
	}
	return a, nil
}

func (a *agentQueue) free() error { return a.ms.free() }

// post takes all of wrs, for which there is room; full is returned with them.
func (a *agentQueue) post(wrs []driver.WR, full error) (int, error) {
	q := a.q
	for i := range wrs {
		a.wrs[q.note(&wrs[i])&uint64(len(a.wrs)-1)] = wrs[i]
	}
	a.pump()
	return len(wrs), full
}

// pump issues WRs up to the next atomic. What the adapter has no room for waits.
func (a *agentQueue) pump() {
	q := a.q
	for !a.waiting && a.issued < q.posted && q.State() == driver.StateRTS {
		a.chain = a.chain[:0]
		atomics := 0
		for at := a.issued; at < q.posted && atomics == 0; at++ {
			w := &a.wrs[at&uint64(len(a.wrs)-1)]
			if w.Flags&driver.Fence != 0 && at > q.retired {
				break
			}
			if w.Op.IsAtomic() && !q.ring[at&uint64(len(q.ring)-1)].foul {
				atomics = 1
			}
			a.chain = append(a.chain, *w)
		}
		if len(a.chain) == 0 {
			return
		}
		first := a.issued
		for i := range a.chain {
			q.fill(i, &a.chain[i], first+uint64(i))
			// A completion of each tells when a fence is over.
			q.wrs[i].flags = q.wrs[i].flags&^C.IBV_SEND_FENCE | C.IBV_SEND_SIGNALED
		}
		if atomics == 1 {
			a.request(len(a.chain)-1, first+uint64(len(a.chain)-1))
		}
		var done C.int
		rc := C.kvd_post(q.c, &q.wrs[0], C.int(len(a.chain)), q.scratch, &done)
		a.issued += uint64(done)
		if rc != 0 {
			a.waiting = false
			if syscall.Errno(rc) != syscall.ENOMEM {
				q.d.o.Logger.Error("the adapter refused a work request", "device", q.d.info.Name, "qp", q.num, "err", syscall.Errno(rc))
				q.failLocked()
			}
			return
		}
	}
}

// request makes a SEND of the i-th WR of the chain, an atomic.
func (a *agentQueue) request(i int, number uint64) {
	q := a.q
	w := &a.wrs[number&uint64(len(a.wrs)-1)]
	r := atomicRequest{seq: uint32(number), op: w.Op, rkey: w.RKey, addr: w.RemoteAddr, compare: w.Compare, swap: w.Swap}
	r.put(a.ms.buf(recvBuffers))
	x := &q.wrs[i]
	x.op, x.flags = C.IBV_WR_SEND, C.IBV_SEND_SIGNALED
	x.local, x.len, x.lkey = a.ms.addr(recvBuffers), requestSize, C.uint32_t(a.ms.r.LKey())
	a.atomic, a.waiting, a.sendOver, a.replied = number, true, false, false
}

func (a *agentQueue) sent(seq, status, vendor uint32) {
	q := a.q
	at := q.retired + uint64(seq-uint32(q.retired))
	if at >= q.posted {
		return
	}
	s := q.statusOf(status, vendor)
	if s == driver.Success && a.waiting && at == a.atomic {
		a.sendOver = true
		a.finish()
		return
	}
	if s == driver.Success {
		q.complete(at, s)
		a.pump() // there may be room now
		return
	}
	a.fail(at, s)
}

// fail ends WR at, and what is behind it that the adapter has never seen, in order.
func (a *agentQueue) fail(at uint64, s driver.Status) {
	q := a.q
	q.complete(at, s)
	if q.retired >= a.issued {
		for q.posted > q.retired {
			q.complete(q.retired, driver.WRFlushErr)
		}
		a.issued, a.waiting = q.posted, false
	}
}

func (a *agentQueue) received(i, status uint32) {
	q := a.q
	if status != C.IBV_WC_SUCCESS || i >= recvBuffers {
		return // flushed with the queue pair
	}
	r, err := parseReply(a.ms.buf(int(i)))
	id := q.id
	id.recv, id.seq = true, i
	if err == nil {
		err = a.ms.receive(q.c, id.pack(), int(i))
	}
	if err == nil && (!a.waiting || r.seq != uint32(a.atomic) || a.replied) {
		err = fmt.Errorf("reply to atomic %d, which was not asked", r.seq)
	}
	if err != nil {
		q.d.o.Logger.Error("bad reply of the memory node's agent", "qp", q.num, "err", err)
		q.failLocked()
		return
	}
	a.reply, a.replied = r, true
	a.finish()
}

// finish ends the atomic under way when both halves are there.
func (a *agentQueue) finish() {
	if !a.sendOver || !a.replied {
		return
	}
	q := a.q
	a.waiting = false
	if a.reply.status != driver.Success {
		a.fail(a.atomic, a.reply.status)
		return
	}
	putWord(a.wrs[a.atomic&uint64(len(a.wrs)-1)].Local, a.reply.found)
	q.complete(a.atomic, driver.Success)
	a.pump()
}

// ---- the target --------------------------------------------------------------

// agent executes the atomics of one peer, in a goroutine that sleeps until one
// comes in.
type agent struct {
	p     *peer
	cq    *C.struct_ibv_cq
	ch    *C.struct_ibv_comp_channel
	qp    *C.struct_ibv_qp
	event *os.File
	done  chan struct{}
	ms    messages
	// The goroutine's:
	batch   *[pollBatch]C.struct_kvd_wc
	wr      *C.struct_kvd_wr
	scratch unsafe.Pointer
	sends   int // replies under way
	next    int // buffer of the next reply
}

func newAgent(p *peer) (*agent, error) {
	a := &agent{p: p, done: make(chan struct{})}
	if rc := C.kvd_create_cq(p.l.d.ctx, 4*recvBuffers, &a.cq, &a.ch); rc != 0 {
		return nil, limited("create CQ", 4096, rc)
	}
	var err error
	if a.ms, err = newMessages(p.pd); err != nil {
		_ = C.kvd_destroy_cq(a.cq, a.ch)
		return nil, err
	}
	if a.event, err = pollable(int(a.ch.fd), "verbs-agent"); err != nil {
		_ = C.kvd_destroy_cq(a.cq, a.ch)
		return nil, errors.Join(err, a.ms.free())
	}
	a.batch = (*[pollBatch]C.struct_kvd_wc)(C.calloc(pollBatch, C.sizeof_struct_kvd_wc))
	a.wr = (*C.struct_kvd_wr)(C.calloc(1, C.sizeof_struct_kvd_wr))
	a.scratch = C.calloc(1, C.kvd_scratch_size(1))
	return a, nil
}

// prepare posts the receives, before anything can come in.
func (a *agent) prepare(qp *C.struct_ibv_qp) error {
	a.qp = qp
	for i := range recvBuffers {
		if err := a.ms.receive(qp, wrID{recv: true, seq: uint32(i)}.pack(), i); err != nil {
			return err
		}
	}
	if rc := C.kvd_arm(a.cq); rc != 0 {
		return fmt.Errorf("arm CQ: %w", syscall.Errno(rc))
	}
	return nil
}

func (a *agent) start() { go a.run() }

// stop returns when the goroutine has ended; the queue pair is in error by then.
func (a *agent) stop() {
	_ = a.event.Close()
	<-a.done
}

// free comes after stop, or without start, and after the queue pair is destroyed.
func (a *agent) free() error {
	_ = a.event.Close()
	var err error
	if rc := C.kvd_destroy_cq(a.cq, a.ch); rc != 0 {
		err = fmt.Errorf("verbs: destroy CQ of an agent: %w", syscall.Errno(rc))
	}
	C.free(unsafe.Pointer(a.batch))
	C.free(unsafe.Pointer(a.wr))
	C.free(a.scratch)
	return errors.Join(err, a.ms.free())
}

func (a *agent) run() {
	defer close(a.done)
	waitReadable(a.event, func() bool {
		begin := time.Now()
		n := int(C.kvd_events(a.ch))
		if n <= 0 {
			return n == 0
		}
		ok := C.kvd_arm(a.cq) == 0
		for ok {
			got := int(C.kvd_poll(a.cq, &a.batch[0], pollBatch, 0))
			if got <= 0 {
				ok = got == 0
				break
			}
			for i := range got {
				w := &a.batch[i]
				if w.status != C.IBV_WC_SUCCESS {
					// The queue pair is in error. The initiator hears so from the
					// adapter, with the reason, and must not hear it from us first.
					return false
				}
				ok = ok && a.completed(w)
			}
		}
		a.p.l.cpu.Add(int64(time.Since(begin)))
		if !ok { // the peer breaks the protocol: serve ends
			a.p.wake()
		}
		return ok
	})
}

// completed handles one completion; false ends the agent.
func (a *agent) completed(w *C.struct_kvd_wc) bool {
	id := slotOf(uint64(w.id))
	if !id.recv {
		a.sends--
		return true
	}
	i := int(id.seq)
	r := parseRequest(a.ms.buf(i))
	// A peer that asks faster than it takes answers has no claim on them.
	if a.sends == recvBuffers || a.ms.receive(a.qp, uint64(w.id), i) != nil {
		return false
	}
	rep := atomicReply{seq: r.seq}
	rep.found, rep.status = a.execute(r)
	buf := recvBuffers + a.next
	rep.put(a.ms.buf(buf))
	*a.wr = C.struct_kvd_wr{id: C.uint64_t(wrID{}.pack()), op: C.IBV_WR_SEND, flags: C.IBV_SEND_SIGNALED,
		local: a.ms.addr(buf), len: replySize, lkey: C.uint32_t(a.ms.r.LKey())}
	var done C.int
	if rc := C.kvd_post(a.qp, a.wr, 1, a.scratch, &done); rc != 0 {
		return false
	}
	a.sends++
	a.next = (a.next + 1) % recvBuffers
	return true
}

// execute checks a request as the adapter would and does it.
func (a *agent) execute(r atomicRequest) (found uint64, s driver.Status) {
	if !r.op.IsAtomic() || r.addr%8 != 0 {
		return 0, driver.RemInvReqErr
	}
	if a.p.access&driver.AccessRemoteAtomic == 0 || r.rkey>>32 != 0 {
		return 0, driver.RemAccessErr
	}
	pd := a.p.pd
	pd.mu.Lock()
	m := pd.mu.mrs[uint32(r.rkey)]
	pd.mu.Unlock()
	if m == nil {
		return 0, driver.RemAccessErr
	}
	m.use.RLock()
	defer m.use.RUnlock()
	off := r.addr - m.Base() // wraps for what is below
	if m.dead.Load() || m.access&driver.AccessRemoteAtomic == 0 || off > uint64(len(m.bytes)) || uint64(len(m.bytes))-off < 8 {
		return 0, driver.RemAccessErr
	}
	word := (*uint64)(unsafe.Pointer(&m.bytes[off]))
	if r.op == driver.OpFetchAdd {
		return atomic.AddUint64(word, r.swap) - r.swap, driver.Success
	}
	for {
		if atomic.CompareAndSwapUint64(word, r.compare, r.swap) {
			return r.compare, driver.Success
		}
		if found := atomic.LoadUint64(word); found != r.compare {
			return found, driver.Success
		}
	}
}
