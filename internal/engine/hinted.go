package engine

import (
	"encoding/binary"
	"fmt"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/layout"
)

// hinted is an Op that is being performed as an index.Hinted, without a Task.
type hinted struct {
	op     *Op
	way    index.Hinted
	hint   index.Hint
	e      *cacheEntry
	pg     *PG
	ver    uint64 // of a PUT's record
	rec    []byte // registered
	noting bool
	cell   int // number in its chain
}

const (
	// hintedOps is how many of them make a chain.
	hintedOps = 16
	// The contents of slots and access words lie at the start of the registered memory, the records behind them.
	hintedCell    = 16
	hintedRecords = hintedOps * hintedCell
)

// Hinted performs those of ops that it can at once: on a provider that executes within
// PostSend and fences by itself, with nothing else under way on the lane, GETs and PUTs without
// condition of keys that the lane remembers; a PUT if there is one copy. index.Hinted says what they
// post and judges the answers, as for a Task; those of several ops are one chain. Two of one key are in
// any order. It returns how many are left, of which nothing has happened: they are for Tasks.
//
// The lane's owner calls it, and has published the reclaim epoch of this moment for the lane before
// the call, as for Start.
func (l *Lane) Hinted(ops []*Op) (left int) {
	for len(ops) > 0 {
		n, done := l.hintedChain(ops)
		left += n - done
		ops = ops[n:]
	}
	return left
}

// hintedChain deals with the first n of ops.
func (l *Lane) hintedChain(ops []*Op) (n, done int) {
	v := l.core.view.Load()
	if !l.someSynchronous {
		return len(ops), 0
	}
	if v == nil || v != l.view || len(l.active) > 0 || len(l.dirty) > 0 || l.mailN.Load() != 0 ||
		l.core.releasable.Load() != l.released {
		return len(ops), 0
	}
	l.touchHints(ops[:min(len(ops), hintedOps)])
	ch := hintedChain{l: l, epoch: uint32(l.core.epoch.Load()), used: hintedRecords}
	for ; n < len(ops) && ch.n < hintedOps; n++ {
		h := &l.hints[ch.n]
		if c := l.hintOf(h, ops[n], v, ch.epoch); c != nil && c.caps.Synchronous && c.caps.SelfFencing && !ch.add(h, c) {
			break
		}
	}
	done = ch.post()
	if len(l.dirty) > 0 { // with notes
		l.flush()
		l.poll()
	}
	return n, done
}

// touchHints loads what hintOf will look at, their cache misses side by side.
func (l *Lane) touchHints(ops []*Op) {
	if len(ops) > 1 {
		for _, op := range ops {
			l.touched += l.cache.touch(op.Check) + uint64(l.notes.touch(op.Check))
		}
	}
}

// hintOf finds where op's key is and the connection that reaches it, or nil.
func (l *Lane) hintOf(x *hinted, op *Op, v *View, epoch uint32) *conn {
	put := op.Kind == index.Put
	if op.Cond != index.Always || !put && op.Kind != index.Get {
		return nil
	}
	e := l.cache.find(op.Check, layout.FP(op.Hash))
	if e == nil || epoch-e.seen >= layout.WordLifeEpochs {
		return nil
	}
	s := v.ShardOf(op.Hash)
	if s == nil || !s.PG.Active {
		return nil
	}
	h, pg := &l.hint, s.PG
	e.read(h)
	if !h.Fits(&s.route, put) {
		return nil
	}
	m := &pg.Members[pg.Replicas-1] // the tail
	if int(m.Node) >= len(l.conns) {
		return nil
	}
	c := l.conns[m.Node]
	if c == nil || !c.up || c.incarnation != m.Incarnation {
		return nil
	}
	x.op, x.e, x.pg = op, e, pg
	x.way.PG, x.way.Off, x.way.X, x.way.N = &pg.PG, s.route.SlotOff(op.Hash, h.Slot), h.Word, 0
	return c
}

// hintedChain is a chain under construction, all for one connection.
type hintedChain struct {
	l     *Lane
	c     *conn
	epoch uint32
	lease bool // one of the ops needs it
	n     int  // ops
	wrs   int
	used  int // of the registered memory
}

// add adds x's verbs, if it can; false: they have to wait for another chain.
func (ch *hintedChain) add(x *hinted, c *conn) bool {
	l, op, pg := ch.l, x.op, x.pg
	put := op.Kind == index.Put
	var n int
	if put {
		if n = layout.RecordLen(len(op.Key), len(op.Value)); n > layout.MaxRecordSize {
			return true // in chunks
		}
	} else {
		n = x.way.X.ReadLen()
	}
	switch {
	case n > taskSlot-hintedRecords:
		return true
	case ch.n > 0 && (c != ch.c || n > taskSlot-ch.used):
		return false
	}
	if put || pg.Replicas > 1 {
		// For reading one copy of a provider that fences by itself needs no lease: a memory
		// node that was declared lost while it lived on fences nobody, but then there is no
		// other copy.
		if !ch.lease && !l.valid() {
			return true
		}
		ch.lease = true
	}
	if put && !ch.place(x, n) {
		return true
	}
	x.cell = ch.n
	ch.c = c
	ch.n++
	t := l.hintTask
	x.rec = t.buf[ch.used:][:n:n]
	ch.used += (n + 63) &^ 63
	cells := t.buf[x.cell*hintedCell:][:hintedCell]
	x.noting = pg.Notes() && !l.core.opts.ReadOnly && l.noteDue(op.Check)
	accs := l.hintAccesses[:0]
	if put {
		layout.EncodeRecord(x.rec, layout.RecordHeader{Version: x.ver, Flags: op.Flags, Expiry: op.Expiry, Writer: l.core.opts.Session}, op.Key, op.Value)
		accs = x.way.Swing(x.way.Write(accs, x.rec))
		binary.LittleEndian.PutUint64(cells, ^uint64(x.way.X)) // a CAS that is not executed leaves it
		x.noting = x.noting || index.HintFlags(x.e.flags).NotesExpiry(&pg.PG, op.Expiry)
	} else {
		accs = x.way.Look(accs, cells[:8:8], x.rec)
	}
	if x.noting {
		accs = x.way.Note(accs, cells[8:])
	}
	k, lkey := l.keysOf(c, pg, pg.Replicas-1), t.lkeys[c.dev]
	for i := range accs {
		wr := &l.hintWRs[ch.wrs]
		wr.Flags = 0
		c.request(wr, k, pg.IndexBytes, &accs[i], cells[:8:8])
		wr.LKey = lkey
		ch.wrs++
	}
	return true
}

// place takes a place for a PUT's record of n bytes.
func (ch *hintedChain) place(x *hinted, n int) bool {
	code, ok := layout.CodeFor(n)
	if !ok {
		return false
	}
	unit, ver, code, ok := ch.l.hintTask.Alloc(&x.pg.PG, code)
	if !ok {
		return false
	}
	x.way.N = layout.MakeLive(ver, layout.FP(x.op.Hash), code, unit)
	x.ver = ch.l.hintTask.Version(x.e.version)
	return true
}

// post executes the chain and judges the ops in it; it returns how many are done.
func (ch *hintedChain) post() (done int) {
	if ch.n == 0 {
		return 0
	}
	l := ch.l
	ch.c.seq += uint64(ch.wrs)
	n, _ := ch.c.qp.PostSend(l.hintWRs[:ch.wrs]) // unsignaled: only a failure has a WC
	whole := n == ch.wrs && !l.poll()
	valid := !ch.lease || l.valid()
	for i := range l.hints[:ch.n] {
		x := &l.hints[i]
		ok := false
		if x.op.Kind == index.Put {
			ok = ch.judgePut(x, whole, valid)
		} else if whole && (valid || x.pg.Replicas == 1) {
			ok = ch.judgeGet(x)
		}
		if ok {
			done++
		}
	}
	return done
}

// cells is what the slot held, and behind it what the access word was.
func (ch *hintedChain) cells(x *hinted) []byte {
	return ch.l.hintTask.buf[x.cell*hintedCell:][:hintedCell]
}

func (ch *hintedChain) judgeGet(x *hinted) bool {
	r := &ch.l.found // off the stack, from where it would have to be copied
	if !x.way.Seen(ch.cells(x), x.rec, x.op.Key, r) || !ch.l.answers(r) {
		return false
	}
	x.e.seen = ch.epoch
	ch.l.performed(x, ch.cells(x), x.way.X, r.Expiry)
	ch.l.answerGet(x.op, r)
	return true
}

// answers reports whether r alone is the answer to a GET of its key.
func (l *Lane) answers(r *layout.Record) bool {
	return r.Flags&layout.FlagManifest == 0 && (r.Expiry == 0 || !r.Expired(l.core.opts.Millis()))
}

// answerGet ends a GET that has found r.
func (l *Lane) answerGet(op *Op, r *layout.Record) {
	op.Version = r.Version
	if op.Asker != nil {
		op.Asker.Take(r, nil)
	}
	l.finished(op)
}

func (ch *hintedChain) judgePut(x *hinted, whole, valid bool) bool {
	l, t, op := ch.l, ch.l.hintTask, x.op
	if binary.LittleEndian.Uint64(ch.cells(x)) != uint64(x.way.X) {
		// The slot holds another word by now, or the chain broke before the CAS. Such a
		// provider leaves nothing under way.
		if whole {
			l.Stats.CASLosses++
		}
		t.Unuse(&x.pg.PG, x.way.N)
		return false
	}
	x.e.word, x.e.version, x.e.flags = uint64(x.way.N), x.ver, uint8(index.HintFlagsOf(op.Flags, op.Expiry))
	t.Unlinked(&x.pg.PG, x.way.X)
	op.Version = x.ver
	if !valid {
		l.Stats.Unknown++
		op.Err = fmt.Errorf("%w: %w", index.ErrUnknown, ErrLease)
	}
	x.e.seen = ch.epoch
	l.performed(x, ch.cells(x), x.way.N, op.Expiry)
	l.expires(op.Expiry, op.Hash)
	l.finished(op)
	return true
}

// performed counts an op that is over, and notes the access if that is due; w is its record's word, and cells what was read of the slot.
func (l *Lane) performed(x *hinted, cells []byte, w layout.Word, expiry uint64) {
	op := x.op
	op.Rounds = 1
	l.Stats.Ops[op.Kind]++
	l.Stats.Rounds[op.Kind]++
	l.Stats.CacheHits++
	if x.noting {
		old := layout.AccessWord(binary.LittleEndian.Uint64(cells[8:]))
		l.noteAccess(&x.pg.PG, x.way.Off, op.Hash, op.Check, w, old, expiry, false)
	}
}
