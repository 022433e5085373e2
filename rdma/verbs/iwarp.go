//go:build verbs && cgo && linux

package verbs

// #include "shim.h"
import "C"

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvd-project/kvd/internal/netsrv"
	"github.com/kvd-project/kvd/rdma/driver"
)

// On iWARP a WRITE or a SEND is complete when the TCP stream has it, not when the target has (RFC 5040, 5.5), and what
// the target refuses ends the stream. A READ's answer is proof for all in front of it: the target begins with it when
// that is placed. So each chain ends in a READ, of a word that the target has for this if need be, and READs alone are
// reported. A READ is executed beside what is behind it, so anything but another READ waits for its answer.

// confirm has the adapter report the chain of n WRs, the last of which is WR number last, by a READ.
func (h *holdQueue) confirm(n int, last uint64) int {
	q := h.q
	for i := range n {
		if q.wrs[i].op != C.IBV_WR_RDMA_READ {
			q.wrs[i].flags &^= C.IBV_SEND_SIGNALED
		}
	}
	q.reported = last + 1
	if x := &q.wrs[n-1]; x.op == C.IBV_WR_RDMA_READ {
		x.flags |= C.IBV_SEND_SIGNALED
		return n
	}
	id := q.id
	id.seq = uint32(last)
	q.wrs[n] = C.struct_kvd_wr{id: C.uint64_t(id.pack()), op: C.IBV_WR_RDMA_READ, flags: C.IBV_SEND_SIGNALED,
		local: C.uint64_t(h.ms.word.Base()), len: 8, lkey: C.uint32_t(h.ms.word.LKey()),
		remote: C.uint64_t(h.meet.word), rkey: C.uint32_t(h.meet.wordRKey)}
	return n + 1
}

// waitsFor tells whether w may be issued only when all in front of it has completed.
func (h *holdQueue) waitsFor(w *driver.WR, foul bool) bool {
	return h.q.d.iwarp() && (foul || w.Op != driver.OpRead && h.reads > h.q.retired)
}

// lost takes an error of WR at. The WRs in front of it were not confirmed. The first of all tells that the connection
// is gone, unless we have closed it.
func (q *qp) lost(at uint64, s driver.Status) driver.Status {
	if q.broken {
		return s
	}
	switch {
	case q.State() == driver.StateClosed:
		s = driver.WRFlushErr
	case s != driver.RemAccessErr && s != driver.RemInvReqErr && s != driver.RemOpErr:
		s = driver.RetryExcErr
	}
	if at > q.retired {
		q.complete(q.retired, s)
		return driver.WRFlushErr
	}
	return s
}

// drainLocked destroys a queue pair whose connection has ended and that nobody closes, if the adapter does not flush
// it: siw forgets READs under way when the peer closes the stream.
func (q *qp) drainLocked() {
	open := func() bool { return q.State() != driver.StateClosed }
	q.awaitFlushLocked(open)
	if q.posted == q.retired || !open() {
		return
	}
	if err := q.destroyLocked(); err != nil {
		q.d.o.Logger.Error("QP not destroyed", "qp", q.num, "err", err)
		return
	}
	// Nothing touches the buffers any more.
	if !q.broken && q.posted > q.retired {
		q.complete(q.retired, driver.RetryExcErr)
	}
	if q.posted > q.retired {
		q.complete(q.posted-1, driver.WRFlushErr)
	}
}

// connectionEndedLocked takes the end of the connection, of which receives that are flushed tell.
func (q *qp) connectionEndedLocked() {
	if q.State() != driver.StateRTS {
		return // it is known, or its peer's end of the control channel will tell
	}
	q.failLocked()
	q.draining.Go(func() {
		q.cq.mu.Lock()
		defer q.cq.mu.Unlock()
		q.drainLocked()
		q.cq.signal()
	})
}

// watchProgress sees to it that verbs under way make progress. An adapter of iWARP tells of a path that has failed when
// TCP gives it up, after minutes, and takes no limit from us.
func (h *holdQueue) watchProgress() {
	if h.stalled == nil {
		h.seen, h.since = h.q.retired, time.Now()
		h.stalled = time.AfterFunc(h.q.d.o.PeerTimeout/4, h.checkProgress)
		h.watched = true
	} else if !h.watched {
		h.seen, h.since, h.watched = h.q.retired, time.Now(), true
		h.stalled.Reset(h.q.d.o.PeerTimeout / 4)
	}
}

// slowest is how fast a connection is, at least, in bytes a second.
const slowest = 16 << 20

func (h *holdQueue) checkProgress() {
	q := h.q
	q.cq.mu.Lock()
	defer q.cq.mu.Unlock()
	if h.watched = q.State() == driver.StateRTS && q.posted > q.retired; !h.watched {
		return
	}
	for q.cq.takeLocked(pollBatch, 0) > 0 { // it may be their owner that is slow
		q.cq.signal()
	}
	if h.seen != q.retired {
		h.seen, h.since = q.retired, time.Now()
	}
	limit := q.d.o.PeerTimeout
	for at := q.retired; at < q.posted; at++ {
		limit += time.Duration(h.wrs[at&uint64(len(h.wrs)-1)].Len()) * time.Second / slowest
	}
	if time.Since(h.since) > limit {
		q.d.o.Logger.Debug("no progress of a connection", "device", q.d.info.Name, "qp", q.num, "limit", limit)
		h.watched = false
		q.connectionEndedLocked()
		return
	}
	h.stalled.Reset(q.d.o.PeerTimeout / 4)
}

// isFoul tells whether all in front of the next WR has completed and it is foul. The target must not be asked to refuse
// it: that says nothing of what is in front.
func (h *holdQueue) isFoul() bool {
	q := h.q
	return q.d.iwarp() && h.issued == q.retired && q.ring[h.issued&uint64(len(q.ring)-1)].foul
}

// dial connects the self-test by the manager: a QP of iWARP cannot be connected to itself.
func (t *selfTest) dial(p driver.PD, rights driver.Access) (*qp, error) {
	if t.l == nil {
		d, o := t.d, t.d.o
		door, err := NewDoor(netsrv.Limits{Logger: o.Logger})
		if err != nil {
			return nil, err
		}
		d.o.TLSServer, d.o.TLSClient, d.o.Socket, d.o.Door = nil, nil, nil, door
		t.undo = append(t.undo, func() error {
			d.o = o
			return nil
		})
		if t.l, err = d.Listen("127.0.0.1:0", driver.ListenOptions{
			Accept: func(driver.ConnRequest) (driver.PD, driver.Access, error) { return p, t.rights, nil },
		}); err != nil {
			return nil, err
		}
		t.undo = append(t.undo, t.l.Close)
	}
	t.rights = rights
	q, err := t.d.Dial(context.Background(), driver.DialRequest{PD: p, CQ: t.cq, Addr: t.l.Addr()})
	if err != nil {
		return nil, err
	}
	t.undo = append(t.undo, q.(*qp).Abort)
	return q.(*qp), nil
}

// limits tells whether a connection that may only READ cannot WRITE. It leaves something else in the target.
func (t *selfTest) limits(p driver.PD) (bool, error) {
	var err error
	if t.q, err = t.dial(p, driver.AccessRemoteRead); err != nil {
		return false, err
	}
	before := getWord(t.m.Bytes[selfTestTarget:])
	putWord(t.word(0), before+1)
	err = t.run(driver.WR{Op: driver.OpWrite, Local: t.word(0)})
	return err != nil && getWord(t.m.Bytes[selfTestTarget:]) == before, nil
}

// limitable refuses a connection with fewer rights than an adapter can withhold from it.
func (d *device) limitable(a driver.Access) error {
	const all = driver.AccessRemoteRead | driver.AccessRemoteWrite
	if !d.allRights || a&all == all {
		return nil
	}
	return fmt.Errorf("%w: the memory node's adapter (%s) cannot limit what a connection may do", errLimits,
		d.info.Name)
}

var errLimits = errors.New("a session with fewer rights than READ and WRITE is not possible here")
