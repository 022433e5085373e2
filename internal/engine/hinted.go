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
	at     cached // where hint was found
	pg     *PG
	shard  *Shard
	ver    uint64 // of a PUT's record
	rec    []byte // registered
	noting bool
	put    bool  // the chain writes it; else it reads it
	cell   int   // number in its chain
	shown  uint8 // replicas, from the head on, that hold a PUT's word for certain
}

const (
	// hintedOps is how many of them make a chain.
	hintedOps = 16
	// hintedCopies is the longest placement group whose PUTs are performed so.
	hintedCopies = 3
	// The words that are read lie at the start of the registered memory, the records behind them. An op has three: what
	// the slot held, what its access word was, and what a slot behind the head held.
	hintedCell    = 24
	hintedRecords = hintedOps * hintedCell
)

// Hinted performs those of ops that it can at once. It needs providers that execute within PostSend and fence by
// themselves, and nothing else under way on the lane. It performs GETs, Exists, PUTs without condition or of a
// version, and Modifies, all of keys that the lane remembers. A PUT of a version and a Modify are two chains. The
// first chain reads the record that is changed, and the next writes if the slot still holds its word. index.Hinted
// says what they post and judges the answers, as for a Task; those of several ops are one chain. Two of one key are
// in any order. It returns how many are left: they are for Tasks. Nothing has happened of them, with one exception.
// A PUT that the head has decided and that met something else on its way to the tail has a Task already.
//
// The lane's owner calls it, and has published the reclaim epoch of this moment for the lane before
// the call, as for Start.
func (l *Lane) Hinted(ops []*Op) (left int) {
	for len(ops) > 0 {
		n, done := l.hintedChain(ops)
		left += n - done
		ops = ops[n:]
		for again := l.looked; len(again) > 0; {
			n, done := l.hintedChain(again)
			left -= done
			again = again[n:]
		}
		clear(l.looked) // those that are over are their callers' again
		l.looked = l.looked[:0]
	}
	return left
}

// hintedChain deals with the first n of ops.
func (l *Lane) hintedChain(ops []*Op) (n, done int) {
	v := l.core.View()
	if !l.someSynchronous {
		return len(ops), 0
	}
	if v == nil || len(l.active) > 0 || len(l.dirty) > 0 || !l.caughtUp() {
		return len(ops), 0
	}
	if len(ops) > 1 {
		l.touchHints(ops[:min(len(ops), hintedOps)])
	}
	ch := hintedChain{l: l, began: l.core.epoch.Load(), used: hintedRecords}
	ch.epoch = uint32(ch.began)
	for ; n < len(ops) && ch.n < hintedOps; n++ {
		h := &l.hints[ch.n]
		if c := l.hintOf(h, ops[n], v, ch.epoch); c != nil && c.immediate() && !ch.add(h, c) {
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

// caughtUp reports whether nothing is new for the lane since it was pumped.
func (l *Lane) caughtUp() bool {
	return l.core.View() == l.view && l.mailN.Load() == 0 && l.core.releasable.Load() == l.released
}

// touchHints loads what hintOf will look at, their cache misses side by side.
func (l *Lane) touchHints(ops []*Op) {
	for _, op := range ops {
		l.touched += l.cache.touch(op.Check) + uint64(l.notes.touch(op.Check))
	}
}

// hintOf finds where op's key is and the connection that reaches it, or nil.
func (l *Lane) hintOf(x *hinted, op *Op, v *View, epoch uint32) *conn {
	looks := op.Kind == index.Modify || op.Kind == index.Put && op.Cond == index.IfVersion
	if op.Kind == index.Put && op.Part != nil || op.Kind == index.Pin || !looks &&
		(op.Cond != index.Always || op.Kind != index.Put && !op.Kind.Reads()) {
		return nil
	}
	if !l.cache.find(&x.at, op.Check, layout.FP(op.Hash)) || epoch-x.at.seen() >= layout.WordLifeEpochs {
		return nil
	}
	s := v.ShardOf(op.Hash)
	if s == nil || !s.PG.Active {
		return nil
	}
	h, pg := &l.hint, s.PG
	x.at.read(h)
	if !h.Fits(&s.route, op.Kind) || op.found != 0 && h.Word != op.found {
		return nil
	}
	c := l.memberConn(pg, pg.Replicas-1) // the tail; a Task asks for one that is lacking
	if c == nil {
		return nil
	}
	x.op, x.pg, x.shard = op, pg, s
	x.way.PG, x.way.Off, x.way.X, x.way.N = &pg.PG, s.route.SlotOff(op.Hash, h.Slot), h.Word, 0
	if x.hint.Slot, x.shown = h.Slot, 0; op.Kind == index.Exists {
		x.hint = *h
	}
	x.put = op.Kind == index.Put && !looks || op.found != 0
	return c
}

// readLen is how many bytes x's op, which reads, READs of its record.
func (x *hinted) readLen() int {
	if x.op.Kind == index.Exists {
		return x.hint.HeadLen(x.op.Key)
	}
	return x.way.X.ReadLen()
}

// addReads adds the READs of x's op, slot first; the record comes to x.rec, of readLen.
func (x *hinted) addReads(a []index.Access, word []byte) []index.Access {
	if x.op.Kind == index.Exists {
		return x.way.Ask(a, word, x.rec)
	}
	return x.way.Look(a, word, x.rec)
}

// seen judges what addReads has brought, but for the expiry.
func (x *hinted) seen(word []byte, r *layout.Record) bool {
	if x.op.Kind == index.Exists {
		return x.way.Told(&x.hint, word, x.rec, x.op.Key, r)
	}
	return x.way.Seen(word, x.rec, x.op.Key, r)
}

// memberConn is the connection to the k-th replica of pg, nil if that is not up.
func (l *Lane) memberConn(pg *PG, k uint8) *conn {
	m := &pg.Members[k]
	if int(m.Node) >= len(l.conns) {
		return nil
	}
	if c := l.conns[m.Node]; c != nil && c.up && !c.leaving && c.incarnation == m.Incarnation {
		return c
	}
	return nil
}

// immediate reports whether what is posted on c is over, or will never happen, when PostSend returns.
func (c *conn) immediate() bool { return c.caps.Synchronous && c.caps.SelfFencing }

// hintedChain is a chain under construction, for one connection; or several, if PUTs in it have copies: one for each
// replica, which they all have at the same memory nodes. Replicas are counted from the tail, d: where GETs read is 0
// for all ops.
type hintedChain struct {
	l     *Lane
	conns [hintedCopies]*conn // by d
	wrs   [hintedCopies]int   // by d
	began uint64              // the reclaim epoch at its start
	epoch uint32              // its low bits
	lease bool                // one of the ops needs it
	notes bool                // the access of one of them is to be noted
	n     int                 // ops
	used  int                 // of the registered memory
	most  uint8               // replicas of any PUT; 0: there is none
}

// add adds x's verbs, if it can; false: they have to wait for another chain.
func (ch *hintedChain) add(x *hinted, c *conn) bool {
	l, op, pg, put := ch.l, x.op, x.pg, x.put
	var n int
	if put {
		if n = layout.RecordLen(len(op.Key), len(op.Value)); n > layout.MaxRecordSize {
			return true // in chunks
		}
	} else {
		n = x.readLen()
	}
	switch {
	case n > taskSlot-hintedRecords:
		return true
	case ch.n > 0 && (c != ch.conns[0] || n > taskSlot-ch.used):
		return false
	}
	if put && pg.Replicas > 1 {
		if pg.Replicas > hintedCopies {
			return true
		}
		for d := range pg.Replicas {
			up := l.memberConn(pg, pg.Replicas-1-d)
			switch {
			case up == nil || !up.immediate():
				return true
			case ch.conns[d] != nil && ch.conns[d] != up:
				return false
			}
		}
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
	ch.conns[0] = c
	ch.n++
	t := l.hintTask
	x.rec = t.buf[ch.used:][:n:n]
	ch.used += (n + 63) &^ 63
	cells := ch.cells(x)
	x.noting = op.Kind != index.Exists && pg.Notes() && !l.core.opts.ReadOnly && l.noteDue(op.Check)
	accs := l.hintAccesses[:0]
	if put {
		layout.EncodeRecord(x.rec, layout.RecordHeader{Version: x.ver, Flags: op.Flags, Expiry: op.Expiry,
			Pinned: op.Pinned, Writer: l.core.opts.Session}, op.Key, op.Value)
		accs = x.way.Swing(x.way.Write(accs, x.rec, 0, 1))
		binary.LittleEndian.PutUint64(cells, ^uint64(x.way.X)) // a CAS that is not executed leaves it
		ch.most = max(ch.most, pg.Replicas)
		for d := uint8(1); d < pg.Replicas; d++ {
			ch.conns[d] = l.memberConn(pg, pg.Replicas-1-d)
		}
		x.noting = x.noting || x.at.flags().NotesExpiry(&pg.PG, op.Expiry)
	} else {
		accs = x.addReads(accs, cells[:8:8])
	}
	ch.notes = ch.notes || x.noting
	if x.noting && (!put || pg.Replicas == 1) { // a PUT with copies READs the word where it is published
		accs = x.way.Note(accs, cells[8:])
	}
	for i := range accs {
		ch.addWR(x, &accs[i], cells[:8:8])
	}
	return true
}

func (ch *hintedChain) addWR(x *hinted, a *index.Access, cell []byte) {
	l, d := ch.l, x.pg.Replicas-1-a.Replica
	c := ch.conns[d]
	wr := &l.hintWRs[d][ch.wrs[d]]
	wr.Flags = 0
	c.request(wr, l.keysOf(c, x.pg, a.Replica), x.pg.IndexBytes, a, cell)
	wr.LKey = l.hintTask.lkeys[c.dev]
	ch.wrs[d]++
}

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
	x.ver = ch.l.hintTask.Version(x.at.version)
	return true
}

// post executes the chain and judges the ops in it; it returns how many are done.
func (ch *hintedChain) post() (done int) {
	if ch.n == 0 {
		return 0
	}
	l := ch.l
	// Where GETs read; then the heads of PUTs with copies, which decide.
	whole := ch.postTo(0)
	read := whole
	for d := uint8(1); d < ch.most && whole; d++ {
		whole = ch.postTo(d)
	}
	if ch.most > 1 {
		ch.publish(whole)
	}
	valid := !ch.lease && !ch.notes || l.valid() // one look at the clock for all of them
	for i := range l.hints[:ch.n] {
		x := &l.hints[i]
		ok := false
		if x.put {
			ok = ch.judgePut(x, whole, valid)
		} else if read && (valid || x.pg.Replicas == 1) {
			ok = ch.judgeRead(x, valid)
		}
		if ok {
			done++
		}
	}
	for i := range l.hints[:ch.n] {
		if x := &l.hints[i]; x.shown > 0 && x.shown < x.pg.Replicas && !l.goOn(x, ch.began) {
			done++
		}
	}
	return done
}

// postTo posts what there is for the replicas at d, and reports whether all of it has been executed.
func (ch *hintedChain) postTo(d uint8) bool {
	n := ch.wrs[d]
	if n == 0 {
		return true
	}
	ch.wrs[d] = 0
	c := ch.conns[d]
	c.seq += uint64(n)
	sent, _ := c.qp.PostSend(ch.l.hintWRs[d][:n]) // unsignaled: only a failure has a WC
	return sent == n && !ch.l.poll()
}

// publish notes which PUTs the head has decided, and carries their records and words down the chain, replica by
// replica. After a failure, or without the lease, it leaves that to goOn.
func (ch *hintedChain) publish(whole bool) {
	l := ch.l
	puts := func(k uint8, f func(*hinted, []byte)) {
		for i := range l.hints[:ch.n] {
			if x := &l.hints[i]; x.put && x.pg.Replicas > 1 && x.pg.Replicas > k && x.shown == k {
				f(x, ch.cells(x)[16:])
			}
		}
	}
	puts(0, func(x *hinted, _ []byte) {
		if binary.LittleEndian.Uint64(ch.cells(x)) == uint64(x.way.X) {
			x.shown = 1
		}
	})
	for k := uint8(1); k < ch.most && whole && l.valid(); k++ {
		puts(k, func(x *hinted, cell []byte) {
			binary.LittleEndian.PutUint64(cell, ^uint64(x.way.X))
			accs := x.way.Publish(x.way.Write(l.hintAccesses[:0], x.rec, k, k+1), k)
			if x.noting && k == x.pg.Reader() {
				accs = x.way.Note(accs, ch.cells(x)[8:16])
			}
			for i := range accs {
				ch.addWR(x, &accs[i], cell[:8:8])
			}
		})
		for d := range ch.most {
			whole = ch.postTo(d) && whole
		}
		puts(k, func(x *hinted, cell []byte) {
			if binary.LittleEndian.Uint64(cell) == uint64(x.way.X) {
				x.shown = k + 1
			}
		})
	}
}

// goOn gives x's op, which the head has decided, a Task for the rest of its way; false: there is none, and the op is
// over. The op began in the reclaim epoch given, and keeps it.
func (l *Lane) goOn(x *hinted, began uint64) bool {
	op := x.op
	op.flown += int32(x.shown)
	l.Stats.Rounds[op.Kind] += uint64(x.shown)
	t, err := l.NewTask()
	if err != nil {
		l.hintTask.Leak(&x.pg.PG, x.way.N)
		l.hintTask.Leak(&x.pg.PG, x.way.X)
		l.Stats.Unknown++
		op.Err = fmt.Errorf("%w: %w: %w", index.ErrUnknown, ErrBuffer, err)
		l.finished(op)
		return false
	}
	t.Op.GoOn(&index.Decided{Hinted: x.way, Route: x.shard.route, Slot: x.hint.Slot, Flags: x.at.flags(),
		Version: x.ver})
	l.startFor(op, t)
	t.epoch = began
	return true
}

// cells is what x's slot held; what its access word was; what its slot held at another replica.
func (ch *hintedChain) cells(x *hinted) []byte {
	return ch.l.hintTask.buf[x.cell*hintedCell:][:hintedCell]
}

func (ch *hintedChain) judgeRead(x *hinted, valid bool) bool {
	op, r := x.op, &ch.l.found // off the stack, from where it would have to be copied
	if !x.seen(ch.cells(x), r) || !ch.l.answers(op, r) || !op.Kind.Reads() && ch.change(x, r) {
		return false
	}
	x.at.saw(ch.epoch)
	ch.l.performed(x, ch.cells(x), x.way.X, r.Expiry, valid)
	if op.Err != nil {
		op.Version = r.Version
		ch.l.finished(op)
	} else {
		ch.l.answerGet(op, r)
	}
	return true
}

// change reports whether x's op goes on: another chain writes it if the slot holds the word of r then, or a Task begins
// anew.
func (ch *hintedChain) change(x *hinted, r *layout.Record) bool {
	op, l := x.op, ch.l
	if op.Kind == index.Modify {
		if op.Value, op.Flags, op.Expiry, op.Err = op.Modify(r); op.Err != nil {
			return false
		}
	} else if r.Version != op.IfVersion {
		return true
	}
	op.found = x.way.X
	op.flown++
	l.Stats.Rounds[op.Kind]++
	l.looked = append(l.looked, op)
	return true
}

// answers reports whether r alone is the answer to op, which reads its key.
func (l *Lane) answers(op *Op, r *layout.Record) bool {
	return (r.Flags&layout.FlagManifest == 0 || op.Kind == index.Exists) &&
		(r.Expiry == 0 || !r.Expired(l.core.opts.Millis()))
}

func (l *Lane) answerGet(op *Op, r *layout.Record) {
	op.Version = r.Version
	if op.Part != nil && op.Part.InPlace {
		op.Part.Shown = false
		if op.Err = l.keep(op, nil); op.Err != nil {
			l.finished(op)
			return
		}
	}
	if op.Asker != nil {
		op.Asker.Take(r, nil)
	}
	l.finished(op)
}

func (ch *hintedChain) judgePut(x *hinted, whole, valid bool) bool {
	l, t, op := ch.l, ch.l.hintTask, x.op
	if x.shown > 0 && x.shown < x.pg.Replicas {
		return false // decided, and not over
	}
	if binary.LittleEndian.Uint64(ch.cells(x)) != uint64(x.way.X) {
		// The slot holds another word by now, or the chain broke before the CAS. Such a
		// provider leaves nothing under way.
		if whole {
			l.Stats.CASLosses++
		}
		t.Unuse(&x.pg.PG, x.way.N)
		return false
	}
	x.at.replace(x.way.N, x.ver, index.HintFlagsOf(op.Flags, op.Expiry), ch.epoch)
	t.Unlinked(&x.pg.PG, x.way.X)
	op.Version = x.ver
	if !valid {
		l.Stats.Unknown++
		op.Err = fmt.Errorf("%w: %w", index.ErrUnknown, ErrLease)
	}
	l.performed(x, ch.cells(x), x.way.N, op.Expiry, valid)
	l.expires(op.Expiry, op.Hash)
	l.finished(op)
	return true
}

// performed counts an op that is over, and notes the access if that is due and the lease is valid; w is its record's
// word, and cells what was read of the slot.
func (l *Lane) performed(x *hinted, cells []byte, w layout.Word, expiry uint64, valid bool) {
	op := x.op
	rounds := max(1, int32(x.shown))
	op.Rounds = op.flown + rounds
	l.Stats.Ops[op.Kind]++
	l.Stats.Rounds[op.Kind] += uint64(rounds)
	l.Stats.CacheHits++
	if x.noting && valid {
		old := layout.AccessWord(binary.LittleEndian.Uint64(cells[8:]))
		l.noteAccess(&x.pg.PG, x.way.Off, op.Hash, op.Check, w, old, expiry, false)
	}
}
