//go:build verbs && cgo && linux

package verbs

// #include "shim.h"
import "C"

import (
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/kvd-project/kvd/rdma/driver"
)

// holdQueue is the part of a send queue that the adapter has not seen yet: what is
// behind an atomic that an agent executes, until its reply is here, and what is
// behind a fence, until all in front of it is complete. A queue pair gets one when it
// needs one. The adapter could fence by itself, but Soft-RoCE, told to wait for an
// earlier WR, now and then forgets to go on. It is guarded by the CQ's lock.
type holdQueue struct {
	q *qp
	// wrs are the WRs from number issued to q.posted, by the low bits of their
	// number; those below issued are with the adapter.
	wrs    []driver.WR
	issued uint64
	chain  []driver.WR

	// The fields below are used if an agent executes atomics.
	byAgent bool
	meet    rendezvous // of iWARP: the target's word
	reads   uint64     // of iWARP: READs below it are issued
	ms      messages
	// atomic is the number of the atomic under way, if waiting; it is over when
	// its SEND has completed, so that all in front of it has, and its reply is here.
	atomic   uint64
	waiting  bool
	sendOver bool
	replied  bool
	reply    atomicReply
	// doubts fires while a reply is overdue; nil: no atomic was asked for yet. See doubt.
	doubts *time.Timer

	// Of iWARP: stalled fires while watched, and finds that no WR below seen was retired since then. See watchProgress.
	stalled *time.Timer
	watched bool
	seen    uint64
	since   time.Time
}

func newHoldQueue(q *qp) *holdQueue {
	return &holdQueue{q: q, issued: q.posted, wrs: make([]driver.WR, len(q.ring)), chain: make([]driver.WR, 0, q.depth)}
}

// newAgentQueue makes one for a queue pair whose atomics an agent executes.
func newAgentQueue(q *qp) (*holdQueue, error) {
	h := newHoldQueue(q)
	h.byAgent = true
	var err error
	if h.ms, err = newMessages(q.pd, driver.AccessLocal); err != nil {
		return nil, err
	}
	for i := range recvBuffers {
		id := q.id
		id.recv, id.seq = true, uint32(i)
		if err := h.ms.receive(q.c, id.pack(), i); err != nil {
			return nil, errors.Join(err, h.ms.free())
		}
	}
	return h, nil
}

func (h *holdQueue) free() error {
	if !h.byAgent {
		return nil
	}
	if h.doubts != nil {
		h.doubts.Stop()
	}
	if h.stalled != nil {
		h.stalled.Stop()
	}
	return h.ms.free()
}

// post takes wrs, for which there is room; full is returned with them.
func (h *holdQueue) post(wrs []driver.WR, full error) (int, error) {
	q := h.q
	if !h.byAgent && h.issued == q.posted && !fenced(wrs) { // nothing to hold back
		done, err := q.postLocked(wrs)
		h.issued = q.posted
		if err != nil {
			return done, err
		}
		return done, full
	}
	for i := range wrs {
		h.wrs[q.noteWR(&wrs[i])&uint64(len(h.wrs)-1)] = wrs[i]
	}
	h.pump()
	return len(wrs), full
}

// pump issues WRs up to the next atomic of an agent's or the next fence. A WR that the adapter has no room for waits.
func (h *holdQueue) pump() {
	q := h.q
	for !h.waiting && h.issued < q.posted && q.State() == driver.StateRTS {
		if h.isFoul() {
			h.issued++
			h.end(h.issued-1, driver.LocProtErr)
			q.cq.signal()
			return
		}
		h.chain = h.chain[:0]
		request, fence := false, false
		for at := h.issued; at < q.posted && !request && !fence; at++ {
			w := &h.wrs[at&uint64(len(h.wrs)-1)]
			foul := q.ring[at&uint64(len(q.ring)-1)].foul
			if fence = (w.Flags&driver.Fence != 0 || h.waitsFor(w, foul)) && at > q.retired; !fence {
				if w.Op == driver.OpRead {
					h.reads = at + 1
				}
				request = h.byAgent && w.Op.IsAtomic() && !foul
				h.chain = append(h.chain, *w)
			}
		}
		n := len(h.chain)
		first := h.issued
		for i := range h.chain {
			q.fill(i, &h.chain[i], first+uint64(i))
		}
		switch {
		case n == 0 && q.reported >= h.issued:
			return // a completion will come, and tell when the fence is over
		case n == 0:
			n = h.marker()
		case fence:
			q.wrs[n-1].flags |= C.IBV_SEND_SIGNALED
			q.reported = first + uint64(n)
		}
		if request {
			h.request(n-1, first+uint64(n)-1)
		}
		if q.d.iwarp() {
			n = h.confirm(n, first+uint64(n)-1)
			h.watchProgress()
		}
		var done C.int
		rc := C.kvd_post(q.c, &q.wrs[0], &q.more[0], C.int(n), q.scratch, &done)
		if len(h.chain) > 0 {
			h.issued += uint64(min(int(done), len(h.chain)))
		}
		if rc != 0 {
			h.waiting = false
			if syscall.Errno(rc) != syscall.ENOMEM {
				if syscall.Errno(rc) != syscall.ENOTCONN { // so siw says that the connection has ended
					q.d.o.Logger.Error("the adapter refused a work request", "device", q.d.info.Name, "qp", q.num,
						"err", syscall.Errno(rc))
				}
				q.failLocked()
				h.giveUp()
			}
			return
		}
	}
}

// marker makes a WRITE of nothing whose completion stands for that of the last WR
// issued, which the adapter would not report.
func (h *holdQueue) marker() int {
	q := h.q
	id := q.id
	id.seq = uint32(h.issued - 1)
	q.wrs[0] = C.struct_kvd_wr{id: C.uint64_t(id.pack()), op: C.IBV_WR_RDMA_WRITE, flags: C.IBV_SEND_SIGNALED}
	q.reported = h.issued
	return 1
}

// request makes a SEND of the i-th WR of the chain, an atomic.
func (h *holdQueue) request(i int, number uint64) {
	q := h.q
	w := &h.wrs[number&uint64(len(h.wrs)-1)]
	r := atomicRequest{seq: uint32(number), op: w.Op, rkey: w.RKey, addr: w.RemoteAddr, compare: w.Compare,
		swap: w.Swap}
	r.put(h.ms.buf(recvBuffers))
	x := &q.wrs[i]
	x.op, x.flags = C.IBV_WR_SEND, C.IBV_SEND_SIGNALED
	x.local, x.len, x.lkey = h.ms.addr(recvBuffers), requestSize, C.uint32_t(h.ms.r.LKey())
	q.reported = number + 1
	h.atomic, h.waiting, h.sendOver, h.replied = number, true, false, false
	if d := q.d.o.PeerTimeout / 2; h.doubts == nil {
		h.doubts = time.AfterFunc(d, h.doubt)
	} else {
		h.doubts.Reset(d)
	}
}

// doubt asks whether the peer is there, while an agent's reply is overdue. The request has been acknowledged, so that
// the adapter has nothing under way, and would never say that replies cannot come any more.
func (h *holdQueue) doubt() {
	q := h.q
	q.cq.mu.Lock()
	defer q.cq.mu.Unlock()
	if !h.waiting || h.replied || q.State() != driver.StateRTS {
		return
	}
	h.doubts.Reset(q.d.o.PeerTimeout / 2)
	if !h.sendOver {
		return
	}
	var done C.int
	if C.kvd_post(q.c, &q.wrs[0], &q.more[0], C.int(h.marker()), q.scratch, &done) != 0 {
		q.failLocked()
	}
	q.cq.signal() // whoever waits looks, and arms it
}

// sent takes the completion of WR at.
func (h *holdQueue) sent(at uint64, s driver.Status) {
	if s == driver.Success && h.waiting && at == h.atomic {
		if at > h.q.retired {
			h.q.complete(at-1, driver.Success)
		}
		if h.q.broken {
			h.end(at, driver.WRFlushErr)
			return
		}
		h.sendOver = true
		h.finish()
		return
	}
	if s != driver.Success && h.q.d.iwarp() {
		s = h.q.lost(at, s)
	}
	h.end(at, s)
}

// end completes the WRs up to at, and goes on; behind a failure, with flushing what
// the adapter has never seen, in its turn.
func (h *holdQueue) end(at uint64, s driver.Status) {
	q := h.q
	q.complete(at, s)
	if !q.broken {
		h.pump()
		return
	}
	h.giveUp()
}

// giveUp completes what the adapter has never seen, if no completion is to come that would.
func (h *holdQueue) giveUp() {
	q := h.q
	if q.retired < h.issued || q.posted == q.retired {
		return
	}
	if !q.broken {
		q.complete(q.retired, driver.RetryExcErr)
	}
	if q.posted > q.retired {
		q.complete(q.posted-1, driver.WRFlushErr)
	}
	h.issued, h.waiting = q.posted, false
	q.cq.signal()
}

// received takes an agent's reply.
func (h *holdQueue) received(i, status uint32) {
	q := h.q
	if status != C.IBV_WC_SUCCESS || i >= recvBuffers {
		// The queue pair is in error: no reply comes any more.
		h.reply, h.replied = atomicReply{status: driver.WRFlushErr}, true
		h.finish()
		return
	}
	r, err := parseReply(h.ms.buf(int(i)))
	id := q.id
	id.recv, id.seq = true, i
	if err == nil {
		err = h.ms.receive(q.c, id.pack(), int(i))
	}
	if err == nil && (!h.waiting || r.seq != uint32(h.atomic) || h.replied) {
		err = fmt.Errorf("reply to atomic %d, which was not asked", r.seq)
	}
	if err != nil {
		q.d.o.Logger.Error("bad reply of the memory node's agent", "qp", q.num, "err", err)
		q.failLocked()
		return
	}
	h.reply, h.replied = r, true
	h.finish()
}

// finish ends the atomic under way when both halves are there.
func (h *holdQueue) finish() {
	if !h.waiting || !h.sendOver || !h.replied {
		return
	}
	h.waiting = false
	if h.reply.status == driver.Success {
		putWord(h.wrs[h.atomic&uint64(len(h.wrs)-1)].Local, h.reply.found)
	}
	h.end(h.atomic, h.reply.status)
}
