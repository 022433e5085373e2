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

// If adapters have no atomics (iWARP), or the memory's atomic domain is the
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
	// word is for the READ that confirms, at either end; nil but for iWARP.
	word driver.MR
}

const messagesSize = 2 * recvBuffers * msgStride

// newMessages makes them; a is what word is good for.
func newMessages(p *pd, a driver.Access) (ms messages, err error) {
	if ms.m, err = mem.Alloc(messagesSize+msgStride, driver.AllocOptions{Name: "verbs-messages"}); err != nil {
		return ms, err
	}
	if ms.r, err = p.register(ms.m, 0, messagesSize, driver.AccessLocal,
		accessFlags(driver.AccessLocal, false)); err != nil {
		return ms, errors.Join(err, ms.m.Free())
	}
	if p.d.iwarp() {
		if ms.word, err = p.RegMR(ms.m, messagesSize, 8, a); err != nil {
			return ms, errors.Join(err, ms.free())
		}
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

func (ms *messages) free() error {
	var err error
	if ms.word != nil {
		err = ms.word.Deregister()
	}
	return errors.Join(err, ms.r.Deregister(), ms.m.Free())
}

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
	if a.ms, err = newMessages(p.pd, driver.AccessRemoteRead); err != nil {
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
					// adapter, with the reason, and must not hear it from us first. Of iWARP
					// it hears no reason, and siw may forget to tell.
					if a.p.l.d.iwarp() {
						a.p.wake()
					}
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
	if rc := C.kvd_post(a.qp, a.wr, nil, 1, a.scratch, &done); rc != 0 {
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
	if m.dead.Load() || m.access&driver.AccessRemoteAtomic == 0 || off > uint64(len(m.bytes)) ||
		uint64(len(m.bytes))-off < 8 {
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
