package sim

import (
	"errors"
	"fmt"
	"strings"

	"github.com/zeebo/xxh3"

	"github.com/kvd-project/kvd/rdma/driver"
)

// Kind is what an Event does. The zero value is invalid.
type Kind uint8

const (
	// Effect executes one piece of a WR at its target, or finds that it fails.
	Effect Kind = 1 + iota
	// Deliver puts the WC of a finished WR in its CQ.
	Deliver
	// Late lets one piece of a WR land whose QP is in error and whose buffer
	// has been returned; Fence ends that.
	Late
)

// Event is one thing that may happen next.
type Event struct {
	QP    uint32
	Index uint64 // how many WRs the QP was given before this one
	ID    uint64 // WR.ID
	Op    driver.Opcode
	Kind  Kind
	// Piece counts from 0 to Pieces-1.
	Piece, Pieces int
	Status        driver.Status // of a Deliver

	RKey, Addr uint64 // target
	Len        int    // bytes of the whole WR

	q *qp
}

// String is one line for traces.
func (e Event) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "qp%d #%d %v", e.QP, e.Index, e.Op)
	if e.Kind == Deliver {
		fmt.Fprintf(&b, " WC %v", e.Status)
		return b.String()
	}
	fmt.Fprintf(&b, " %#x+%d", e.Addr, e.Len)
	if e.Pieces > 1 {
		fmt.Fprintf(&b, " piece %d/%d", e.Piece+1, e.Pieces)
	}
	if e.Kind == Late {
		b.WriteString(" late")
	}
	return b.String()
}

// Events lists everything that may happen next: by QP, then by WR, then by
// piece.
func (f *Fabric) Events() []Event { return f.AppendEvents(nil) }

// AppendEvents is Events into dst.
func (f *Fabric) AppendEvents(dst []Event) []Event {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, q := range f.mu.qps {
		dst = q.eventsLocked(dst)
	}
	return dst
}

func (q *qp) eventsLocked(dst []Event) []Event {
	if q.head < q.eff {
		w := &q.q[q.head]
		dst = append(dst, w.event(q, Deliver, 0))
		dst[len(dst)-1].Status = w.status
	}
	for at := q.eff; at < len(q.q); at++ {
		w := &q.q[at]
		if !w.over && q.startLocked(at) {
			dst = w.appendPieces(dst, q, Effect)
		}
		if !q.f.o.NoAtomicThenRead || !w.over && !w.wr.Op.IsAtomic() {
			break
		}
	}
	if len(q.net) > 0 {
		dst = q.net[0].appendPieces(dst, q, Late)
	}
	return dst
}

func (w *work) appendPieces(dst []Event, q *qp, kind Kind) []Event {
	for k := range int(w.pieces) {
		if w.pending(k) {
			dst = append(dst, w.event(q, kind, k))
		}
	}
	return dst
}

func (w *work) event(q *qp, kind Kind, k int) Event {
	return Event{QP: q.num, Index: w.index, ID: w.wr.ID, Op: w.wr.Op, Kind: kind, Piece: k, Pieces: int(w.pieces),
		RKey: w.wr.RKey, Addr: w.wr.RemoteAddr, Len: w.bytes, q: q}
}

// Fire makes ev happen. It fails, and changes nothing, if ev is not enabled.
func (f *Fabric) Fire(ev Event) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	q := ev.q
	if q == nil || q.f != f {
		var err error
		if q, err = f.qpLocked(ev.QP); err != nil {
			return err
		}
	}
	if !q.fireLocked(&ev) {
		return fmt.Errorf("sim: %v is not enabled", ev)
	}
	return nil
}

func (q *qp) fireLocked(ev *Event) bool {
	defer q.markLocked()
	if ev.Kind == Late {
		if len(q.net) == 0 || q.net[0].index != ev.Index || !q.net[0].pending(ev.Piece) {
			return false
		}
		q.landLocked(ev.Piece)
		return true
	}
	if q.head == len(q.q) || ev.Index < q.q[q.head].index || ev.Index-q.q[q.head].index >= uint64(len(q.q)-q.head) {
		return false
	}
	at := q.head + int(ev.Index-q.q[q.head].index)
	switch ev.Kind {
	case Deliver:
		if at != q.head || at >= q.eff {
			return false
		}
		q.pushLocked()
		q.retireLocked()
		return true
	case Effect:
		if at < q.eff || !q.q[at].pending(ev.Piece) || q.q[at].over || !q.startLocked(at) {
			return false
		}
		q.effectLocked(at, ev.Piece)
		return true
	}
	return false
}

// pending tells whether piece k may take effect next, as far as the others go.
func (w *work) pending(k int) bool {
	last := int(w.pieces) - 1
	return k >= 0 && k <= last && w.done&(1<<k) == 0 && (k < last || !w.localLast() || w.done == 1<<last-1)
}

// Payload is what the WRITE of ev carries, without its Value before that is read; nil for anything else. It belongs to
// the fabric and holds until the next call.
func (f *Fabric) Payload(ev Event) []byte {
	f.mu.Lock()
	defer f.mu.Unlock()
	q := ev.q
	if q == nil || q.f != f || ev.Op != driver.OpWrite || ev.Kind == Deliver {
		return nil
	}
	list := q.q[q.eff:]
	if ev.Kind == Late {
		list = q.net
	}
	for i := range list {
		if w := &list[i]; w.index == ev.Index {
			if w.data != nil {
				return w.data
			}
			return w.wr.Local
		}
	}
	return nil
}

// When says on which side of its effect an injected fault hits a WR.
type When uint8

const (
	// BeforeEffect: the WR has no effect, nor has any behind it.
	BeforeEffect When = 1 + iota
	// AfterEffect: the WR took effect but its WC says otherwise; those behind
	// it may land late.
	AfterEffect
)

// FailNext makes the next WR of the QP that takes effect complete with s.
// AfterEffect wants a status whose effect is unknown.
func (f *Fabric) FailNext(qp uint32, s driver.Status, when When) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	q, err := f.qpLocked(qp)
	if err != nil {
		return err
	}
	unknown := s == driver.WRFlushErr || s == driver.RemOpErr || s == driver.RetryExcErr || s == driver.GeneralErr
	if when == AfterEffect && f.o.Synchronous {
		return errors.New("sim: whoever executes a WR itself knows whether it took effect")
	}
	if s <= driver.Success || s > driver.GeneralErr || when != BeforeEffect && when != AfterEffect ||
		when == AfterEffect && !unknown {
		return fmt.Errorf("sim: no WR fails with %v on side %d of its effect", s, when)
	}
	q.fault, q.faultWhen = s, when
	return nil
}

// Kill moves a QP to the error state, as when its initiator is about to be fenced or has lost the connection.
// Every WR not finished is flushed. The WRITEs and atomics among them may land Late, in posting order.
func (f *Fabric) Kill(qp uint32) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	q, err := f.qpLocked(qp)
	if err == nil {
		q.killLocked()
	}
	return err
}

// Fence is Peer.Fence for a QP by number.
func (f *Fabric) Fence(qp uint32) error {
	f.mu.Lock()
	q, err := f.qpLocked(qp)
	gone := err == nil && q.peer.fenceLocked()
	f.mu.Unlock()
	if gone {
		q.peer.notify()
	}
	return err
}

// CrashDevice takes a device's memory away. WRs that target it complete with
// RetryExcErr, dials to it fail, and QPs that it dialled are killed. Its name
// stays taken; a restart is a device of another name.
func (f *Fabric) CrashDevice(name string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	d := f.deviceLocked(name)
	if d == nil {
		return fmt.Errorf("sim: no open device %q", name)
	}
	d.crashed = true
	for _, q := range f.mu.qps {
		if q.dev == d {
			q.killLocked()
		}
		if q.targetPD.dev == d {
			q.net = q.net[:0]
			q.markLocked()
		}
	}
	return nil
}

// Hash is over the bytes of every MR, in order of registration, except those of
// crashed devices.
func (f *Fabric) Hash() uint64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	h := hasher(1)
	for i, m := range f.mu.mrs {
		if m != nil && !m.pd.dev.crashed {
			h.add(uint64(i))
			h.add(xxh3.Hash(m.bytes))
		}
	}
	return uint64(h)
}

// QPHash is over the state that Hash leaves out and that decides what may happen
// next: queues, networks, completions not polled, faults to come. WR IDs and
// absolute WR indexes are not in it.
func (f *Fabric) QPHash() uint64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	h := hasher(2)
	for _, d := range f.mu.devices {
		h.addBool(d.crashed)
	}
	for _, q := range f.mu.qps {
		h.add(uint64(q.num)<<32 | uint64(q.state)<<16 | uint64(q.fault)<<8 | uint64(q.faultWhen))
		h.addBool(q.peer.gone)
		h.add(q.posted - q.reclaimed)
		h.add(uint64(len(q.q) - q.head))
		for i := q.head; i < len(q.q); i++ {
			h.addWork(f, &q.q[i])
		}
		h.add(uint64(len(q.net)))
		for i := range q.net {
			h.addWork(f, &q.net[i])
		}
		for _, e := range q.cq.q[q.cq.head:] {
			if e.q == q {
				h.add(uint64(e.wc.Op)<<8 | uint64(e.wc.Status))
				h.add(q.posted - e.index)
			}
		}
	}
	return uint64(h)
}

type hasher uint64

// add is a step of splitmix64.
func (h *hasher) add(v uint64) {
	x := uint64(*h)*0x9e3779b97f4a7c15 + v
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	*h = hasher(x ^ x>>31)
}

func (h *hasher) addBool(b bool) {
	if b {
		h.add(1)
	} else {
		h.add(0)
	}
}

func (h *hasher) addWork(f *Fabric, w *work) {
	h.add(uint64(w.wr.Op)<<56 | uint64(w.wr.Flags)<<48 | uint64(w.status)<<40 | uint64(w.pieces)<<16 | uint64(w.done))
	h.addBool(w.over)
	h.add(w.wr.RemoteAddr)
	h.add(w.wr.RKey)
	h.add(w.wr.Compare)
	h.add(w.wr.Swap)
	h.add(uint64(len(w.wr.Local)))
	if w.value {
		h.add(uint64(w.bytes)<<32 | uint64(w.slack))
		if v := w.wr.Value; w.localLast() && w.data == nil && !w.over {
			h.add(xxh3.Hash(v.Acquire()))
			v.Release()
		}
	}
	for _, x := range w.sges {
		if m := f.byIndexLocked(x.LKey); m != nil && w.data == nil {
			h.add(x.LKey)
			h.add(localOffset(m, x.Bytes))
			h.add(uint64(len(x.Bytes)))
		}
	}
	if w.data != nil {
		h.add(xxh3.Hash(w.data))
	} else if m := f.byIndexLocked(w.wr.LKey); m != nil && len(w.wr.Local) > 0 {
		h.add(w.wr.LKey)
		h.add(localOffset(m, w.wr.Local))
	}
}
