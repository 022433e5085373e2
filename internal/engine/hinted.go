package engine

import (
	"encoding/binary"
	"fmt"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/layout"
)

// Quick is a cached GET, or a cached PUT without condition, that needs no Task; see
// [Lane.Quick]. The caller fills in the request.
type Quick struct {
	Put    bool
	Key    []byte
	Value  []byte             // Put
	Flags  layout.RecordFlags // Put: layout.FlagUser or none
	Expiry uint64             // Put: Unix ms, 0 = none
	Hash   uint64
	Check  uint64

	// OK: it is done. Else nothing happened and it is for a Task.
	OK  bool
	Err error // of a Put that is done: it may have happened
	// Record is what a GET found, whole and not expired. It aliases the lane's memory
	// until the next call.
	Record  layout.Record
	Version uint64 // Put

	way    index.Hinted
	e      *cacheEntry
	pg     *PG
	rec    []byte // registered
	noting bool
	cell   int // number in its chain
}

const (
	// quickOps is how many of them make a chain.
	quickOps = 16
	// What a slot and an access word held lies at the start of the registered memory, the
	// records behind that.
	quickCell    = 16
	quickRecords = quickOps * quickCell
)

// Quick performs those of ops that it can at once: on a provider that executes within
// PostSend and fences by itself, with nothing else under way on the lane, for keys that
// the lane remembers; a PUT where there is one copy. What they post and how that is judged is
// index.Hinted's, as for an Op; those of several ops are one chain. Two of one key are in
// any order. It returns how many it has dealt with; the others are for another call, at
// which the records of these are void.
//
// The caller has published the reclaim epoch of this moment for the lane before
// the call, as for Start.
func (l *Lane) Quick(ops []Quick) int {
	v := l.core.view.Load()
	if v == nil || v != l.view || len(l.active) > 0 || len(l.dirty) > 0 || l.mailN.Load() != 0 ||
		l.core.releasable.Load() != l.released {
		for i := range ops {
			ops[i].OK = false
		}
		return len(ops)
	}
	if len(ops) > 1 {
		for i := range ops[:min(len(ops), quickOps)] { // their cache misses side by side
			l.touched += l.cache.touch(ops[i].Check) + uint64(l.notes.touch(ops[i].Check))
		}
	}
	ch := quickChain{l: l, epoch: uint32(l.core.epoch.Load()), used: quickRecords}
	n := 0
	for ; n < len(ops); n++ {
		q := &ops[n]
		q.OK, q.Err, q.rec = false, nil, nil
		if c := l.quickly(q, v, ch.epoch); c != nil && !ch.add(q, c) {
			break
		}
	}
	ch.post(ops[:n])
	if len(l.dirty) > 0 { // with notes
		l.flush()
		l.poll()
	}
	return n
}

// quickly finds where the key is and the connection that reaches it, or nil.
func (l *Lane) quickly(q *Quick, v *View, epoch uint32) *conn {
	e := l.cache.find(q.Check, layout.FP(q.Hash))
	if e == nil || epoch-e.seen >= layout.WordLifeEpochs {
		return nil
	}
	s := v.ShardOf(q.Hash)
	if s == nil || !s.PG.Active {
		return nil
	}
	h, pg := e.hint(), s.PG
	if !h.Fits(&s.route, q.Put) {
		return nil
	}
	m := &pg.Members[pg.Replicas-1] // the publisher
	if int(m.Node) >= len(l.conns) {
		return nil
	}
	c := l.conns[m.Node]
	if c == nil || !c.up || c.incarnation != m.Incarnation || !c.caps.Synchronous || !c.caps.SelfFencing {
		return nil
	}
	q.e, q.pg = e, pg
	q.way = index.Hinted{PG: &pg.PG, Off: s.route.SlotOff(q.Hash, h.Slot), X: h.Word}
	return c
}

// quickChain is a chain under construction, all for one connection.
type quickChain struct {
	l     *Lane
	c     *conn
	epoch uint32
	lease bool // one of the ops needs it
	n     int  // ops
	wrs   int
	used  int // of the registered memory
}

// add adds q's verbs, if it can; false: they have to wait for another chain.
func (ch *quickChain) add(q *Quick, c *conn) bool {
	l, pg := ch.l, q.pg
	var n int
	if q.Put {
		if n = layout.RecordLen(len(q.Key), len(q.Value)); n > layout.MaxRecordSize {
			return true // in chunks
		}
	} else {
		n = q.way.X.ReadLen()
	}
	switch {
	case n > taskSlot-quickRecords:
		return true
	case ch.n > 0 && (c != ch.c || ch.n == quickOps || n > taskSlot-ch.used):
		return false
	}
	if q.Put || pg.Replicas > 1 {
		// For reading one copy of a provider that fences by itself needs no lease: a memory
		// node that was declared lost while it lived on fences nobody, but then there is no
		// other copy.
		if !ch.lease && !l.valid() {
			return true
		}
		ch.lease = true
	}
	if q.Put && !ch.place(q, n) {
		return true
	}
	q.cell = ch.n
	ch.c = c
	ch.n++
	t := l.quick
	q.rec = t.stash[ch.used:][:n:n]
	ch.used += (n + 63) &^ 63
	cells := t.stash[q.cell*quickCell:][:quickCell]
	k := l.keysOf(c, pg, pg.Replicas-1)
	lkey := t.lkeys[c.dev]

	q.noting = pg.Notes() && !l.core.opts.ReadOnly && l.noteDue(q.Check)
	accs := l.quickAccesses[:0]
	if q.Put {
		layout.EncodeRecord(q.rec, layout.RecordHeader{Version: q.Version, Flags: q.Flags, Expiry: q.Expiry, Writer: l.core.opts.Session}, q.Key, q.Value)
		accs = q.way.Swing(q.way.Write(accs, q.rec))
		binary.LittleEndian.PutUint64(cells, ^uint64(q.way.X)) // a CAS that is not executed leaves it
		q.noting = q.noting || index.HintFlags(q.e.flags).NotesExpiry(&pg.PG, q.Expiry)
	} else {
		accs = q.way.Look(accs, cells[:8:8], q.rec)
	}
	if q.noting {
		accs = q.way.Note(accs, cells[8:])
	}
	for i := range accs {
		wr := &l.quickWRs[ch.wrs]
		wr.Flags = 0
		c.request(wr, k, pg.IndexBytes, &accs[i], cells[:8:8])
		wr.LKey = lkey
		ch.wrs++
	}
	return true
}

// place takes a place for a PUT's record of n bytes.
func (ch *quickChain) place(q *Quick, n int) bool {
	code, ok := layout.CodeFor(n)
	if !ok {
		return false
	}
	unit, ver, code, ok := ch.l.quick.Alloc(&q.pg.PG, code)
	if !ok {
		return false
	}
	q.way.N = layout.MakeLive(ver, layout.FP(q.Hash), code, unit)
	q.Version = ch.l.quick.Version(q.e.version)
	return true
}

// post executes the chain and judges the ops in it, which are among these.
func (ch *quickChain) post(ops []Quick) {
	if ch.n == 0 {
		return
	}
	l := ch.l
	ch.c.seq += uint64(ch.wrs)
	n, _ := ch.c.qp.PostSend(l.quickWRs[:ch.wrs]) // unsignaled: only a failure has a WC
	whole := n == ch.wrs && !l.poll()
	valid := !ch.lease || l.valid()
	for i := range ops {
		if q := &ops[i]; q.rec == nil {
			continue
		} else if q.Put {
			ch.judgePut(q, whole, valid)
		} else if whole && (valid || q.pg.Replicas == 1) {
			ch.judgeGet(q)
		}
	}
}

// cell is what the slot held, and behind it what the access word was.
func (ch *quickChain) cell(q *Quick) []byte { return ch.l.quick.stash[q.cell*quickCell:][:quickCell] }

func (ch *quickChain) judgeGet(q *Quick) {
	r, ok := q.way.Seen(ch.cell(q), q.rec, q.Key)
	if !ok || r.Flags&layout.FlagManifest != 0 || r.Expiry != 0 && r.Expired(ch.l.core.opts.Millis()) {
		return
	}
	q.OK, q.Record = true, r
	ch.done(q, index.Get, q.way.X, r.Expiry)
}

func (ch *quickChain) judgePut(q *Quick, whole, valid bool) {
	l, t := ch.l, ch.l.quick
	if binary.LittleEndian.Uint64(ch.cell(q)) != uint64(q.way.X) {
		// The slot holds another word by now, or the chain broke before the CAS. Such a
		// provider leaves nothing under way.
		if whole {
			l.Stats.CASLosses++
		}
		t.Unuse(&q.pg.PG, q.way.N)
		return
	}
	q.OK = true
	q.e.word, q.e.version, q.e.flags = uint64(q.way.N), q.Version, uint8(index.HintFlagsOf(q.Flags, q.Expiry))
	t.Unlinked(&q.pg.PG, q.way.X)
	if !valid {
		l.Stats.Unknown++
		q.Err = fmt.Errorf("%w: %w", index.ErrUnknown, ErrLease)
	}
	ch.done(q, index.Put, q.way.N, q.Expiry)
}

// done notes an op that has been performed; w is its record's word.
func (ch *quickChain) done(q *Quick, kind index.Kind, w layout.Word, expiry uint64) {
	l := ch.l
	q.e.seen = ch.epoch
	l.Stats.Ops[kind]++
	l.Stats.Rounds[kind]++
	l.Stats.CacheHits++
	if q.noting {
		old := layout.AccessWord(binary.LittleEndian.Uint64(ch.cell(q)[8:]))
		l.noteAccess(&q.pg.PG, q.way.Off, q.Hash, q.Check, w, old, expiry, false)
	}
}
