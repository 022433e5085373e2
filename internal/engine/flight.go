package engine

import (
	"encoding/binary"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/invariants"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/rdma"
)

// flight is a chain of GETs and Exists of remembered keys, all of one memory node, on a provider that does not execute
// within PostSend; where it does, hintedChain performs them. index.Hinted says there and here what is posted and how
// that is judged. A GET of any Op on the lane may come aboard until the doorbell rings. Only the chain's last WR is
// signaled.
//
// A flight stands in a Task of its own, so that the lane's accounts (reclaim epoch, map, deadline, queue pair) know it
// like an operation under way. It changes nothing at the memory node: a GET that it does not decide, whatever the
// reason, begins anew in a Task.
type flight struct {
	c      *conn
	gets   [hintedOps]hinted // op nil: its caller has gone
	n      int               // of gets
	used   int               // of the Task's registered slot, bytes
	last   int               // index of its last WR in c.wrs, before the doorbell
	failed bool
}

// board puts op, whose waiter is w, aboard a flight, if op can be performed by one. The lane has the newest map.
func (l *Lane) board(op *Op, w *waiter) bool {
	if !op.Kind.Reads() || op.cancel != nil || l.view == nil {
		return false
	}
	var x hinted
	c := l.hintOf(&x, op, l.view, uint32(l.core.epoch.Load()))
	if c == nil || c.caps.Synchronous {
		return false
	}
	x.hint = l.hint
	n := x.readLen()
	t := c.boarding
	if t != nil && (t.flight.n == hintedOps || n > taskSlot-t.flight.used || t.postView != l.view.Version) {
		c.depart()
		t = nil
	}
	if t == nil {
		if t = l.newFlight(c, n); t == nil {
			return false
		}
	}
	f := t.flight
	x.cell = f.n
	x.rec = t.buf[f.used:][:n:n]
	f.used += (n + 63) &^ 63
	x.noting = op.Kind != index.Exists && x.pg.Notes() && !l.core.opts.ReadOnly && l.noteDue(op.Check)
	cells := f.cells(t, &x)
	accs := x.addReads(l.hintAccesses[:0], cells[:8:8])
	if x.noting {
		accs = x.way.Note(accs, cells[8:])
	}
	k := l.keysOf(c, x.pg, x.pg.Replicas-1)
	for i := range accs {
		wr := c.next(l)
		wr.ID, wr.LKey = t.id(), t.lkeys[c.dev]
		c.request(wr, k, x.pg.IndexBytes, &accs[i], nil)
		c.seq++
	}
	t.seqs[0] = c.seq
	f.last = len(c.wrs) - 1
	f.gets[f.n] = x
	f.n++
	op.w, op.task = w, t
	t.expireAt(w.deadline)
	return true
}

// newFlight is an empty flight over c with room for a record of n bytes; nil if there can be none now.
func (l *Lane) newFlight(c *conn, n int) *Task {
	if n > taskSlot-hintedRecords || !l.valid() {
		return nil
	}
	t, err := l.NewTask()
	if err != nil {
		return nil
	}
	if len(l.flights) == 0 {
		l.flights = append(l.flights, &flight{})
	}
	k := len(l.flights) - 1
	f := l.flights[k]
	l.flights = l.flights[:k]
	f.c, f.used = c, hintedRecords
	t.flight, t.epoch, t.postView = f, l.core.epoch.Load(), l.view.Version
	t.state, t.pending = taskPosted, 1
	l.activate(t)
	c.boarding = t
	return t
}

// cells is what x's slot held, and behind it what its access word was.
func (f *flight) cells(t *Task, x *hinted) []byte {
	return t.buf[x.cell*hintedCell:][:hintedCell]
}

// depart ends the boarding of a flight over c, whose doorbell is about to ring.
func (c *conn) depart() {
	c.wrs[c.boarding.flight.last].Flags |= rdma.Signaled
	c.boarding = nil
}

// leaveFlight takes op, whose caller goes, off its flight t. Nothing of a GET has happened.
func (f *flight) leaveFlight(t *Task, op *Op) {
	left := false
	for i := range f.gets[:f.n] {
		if f.gets[i].op == op {
			f.gets[i].op = nil
		}
		left = left || f.gets[i].op != nil
	}
	if !left {
		t.Deadline = 0 // nobody waits any more
	}
}

// endOverdueGets ends the GETs of flight t whose time is over, and sets the deadline to that of the next.
func (l *Lane) endOverdueGets(t *Task) {
	now := l.core.opts.Nanos()
	t.Deadline = 0
	for i := range t.flight.gets[:t.flight.n] {
		op := t.flight.gets[i].op
		switch {
		case op == nil:
		case op.w.deadline != 0 && now >= op.w.deadline:
			l.abandon(op, ErrTimeout)
		default:
			t.expireAt(op.w.deadline)
		}
	}
}

// land ends a flight whose chain is over: its GETs have their answers or begin anew.
func (l *Lane) land(t *Task) {
	f := t.flight
	if invariants.On {
		invariants.Assert(f.c.boarding != t, "engine: a flight lands that has not left")
	}
	whole := !f.failed && l.valid()
	t.state = taskDone
	l.deactivate(t)
	for i := range f.gets[:f.n] {
		x := &f.gets[i]
		if op := x.op; op != nil && !(whole && l.arrived(t, x)) {
			op.flown++
			l.Stats.Rounds[op.Kind]++
			l.start(op, op.w)
		}
	}
	clear(f.gets[:f.n])
	f.c, f.n, f.failed = nil, 0, false
	l.flights = append(l.flights, f)
	l.Recycle(t)
}

// arrived judges one GET of a flight whose chain was executed whole, with a lease that is valid, and answers it; false:
// it is not decided.
func (l *Lane) arrived(t *Task, x *hinted) bool {
	op := x.op
	if pg := l.view.PG(x.pg.ID); pg == nil || pg.Epoch != x.pg.Epoch || !pg.Active {
		return false // no answer of an epoch is carried into the next
	}
	cells := t.flight.cells(t, x)
	r := &l.found // off the stack, from where it would have to be copied
	if !x.seen(cells, r) {
		l.learnWord(x, layout.Word(binary.LittleEndian.Uint64(cells)))
		return false
	}
	if !l.answers(op, r) {
		return false
	}
	h := x.hint
	if op.Kind != index.Exists { // which has looked at no CRC
		h.Version, h.Flags = r.Version, index.HintFlagsOf(r.Flags, r.Expiry)
	}
	l.cache.put(op.Check, h, uint32(t.epoch))
	l.performed(x, cells, h.Word, r.Expiry, true)
	l.answerGet(op, r)
	return true
}

// learnWord keeps w, which the slot of a hint that did not hold has now, as a hint for this one GET if it can be the
// key's. Otherwise the lane forgets the hint.
func (l *Lane) learnWord(x *hinted, w layout.Word) {
	op := x.op
	if w != x.way.X && w.Readable() && w.FP() == layout.FP(op.Hash) && layout.InHeap(w, x.pg.HeapLo, x.pg.HeapHi) {
		op.learnt = index.Hint{Word: w, Shard: x.hint.Shard, Slot: x.hint.Slot}
		return
	}
	if at := (cached{}); l.cache.find(&at, op.Check, layout.FP(op.Hash)) && at.word == uint64(x.way.X) {
		l.cache.drop(op.Check, layout.FP(op.Hash))
	}
}
