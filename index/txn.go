package index

import (
	"errors"
	"fmt"

	"github.com/kvd-project/kvd/internal/layout"
)

// Answers of a Prepare besides those of a Put. Nothing happened.
var (
	// ErrMoving: the key's group is on its way elsewhere. A transaction that has placed intents must not wait for that:
	// the mover waits for the intents.
	ErrMoving = errors.New("the key's group moves")
	// ErrStatusLost: the placement group of the status word has lost its memory; intents that name the word count as
	// aborted.
	ErrStatusLost = errors.New("status word lost")
)

// Effect is what a transaction does to a key. The zero value is invalid.
type Effect uint8

const (
	PutKey    Effect = 1 + iota // the Op's Value, Flags and Expiry
	DeleteKey                   // or, if there is no such key, see to it that there is none
	KeepKey                     // see to it that the key stays as it is
)

// StatusAt is where a transaction's status word is, and which transaction of that word it is.
type StatusAt struct {
	PG, Generation uint32
	Off            uint64 // bytes from the start of the region
	Seq            uint64 // from 1 on, never used twice
}

// Txn is the request of a Prepare, a Settle or a Decide.
//
// A transaction places an intent at each of its keys (Prepare, with a Cond). It decides when all of them have ended
// without error (Decide). It takes its intents away once Decide has ended (Settle). Its owner uses the status word
// for another Seq only when every Settle has ended without error. Every Prepare that did not end so must also be
// known to have changed nothing.
type Txn struct {
	Status StatusAt
	// Prepare: the age of the transaction, which is that of its first attempt, and how many attempts there were before.
	Effect    Effect
	TS, Coord uint64
	Try       uint8

	// Placed is the answer of a Prepare, and what a Settle takes away.
	Placed Placed

	// Verdict is what Decide is to say, and what Settle goes by. With Undecided, Decide changes nothing and leaves
	// in Found what the status word holds. Then Settle finds the verdict like a writer that meets the intent: it
	// waits by Patience, then aborts.
	Verdict layout.Verdict
	// Found, of Decide: the word that the status word is expected to hold, then the one that it holds, at the tail.
	Found layout.Status
}

// Placed is an intent in its slot.
type Placed struct {
	Shard      uint32 // id of the array
	Generation uint32 // of the placement group
	Slot       uint8  // as in Hint
	Word       layout.Word
	Intent     layout.Intent
	Version    uint64 // of the new record
	Flags      HintFlags
}

func (k Kind) isTxn() bool { return k == Prepare || k == Settle || k == Decide }

// final is a place for the record that an intent leads to.
type final struct {
	word layout.Word
	own  []byte // encoded
	have bool
}

// beginTxn chooses the first round trip of a transaction's kinds; hinted says that h leads to the key.
func (o *Op) beginTxn(h Hint, hinted bool) Action {
	switch t := o.Txn; o.Kind {
	case Decide:
		if t.Status.Generation != o.Route.PG.Generation {
			return o.finish(ErrStatusLost)
		}
		if end := statusEnd(o.Route.PG); !layout.StatusOff(t.Status.Off, end) {
			return o.finish(fmt.Errorf("pg %d: no status word at offset %#x of an index of %#x bytes", o.Route.PG.ID,
				t.Status.Off, end))
		}
		o.need().fixed = t.Status.Off
		if t.Verdict == layout.Undecided {
			return o.readDecided()
		}
		if v, over := t.Found.Of(t.Status.Seq); over || v != layout.Undecided {
			return o.answerAfterSync(nil) // decided before another view came
		}
		o.x, o.n = layout.Word(t.Found), layout.Word(t.Found.With(t.Status.Seq, t.Verdict))
		o.begin()
		return o.casSlot()
	case Settle:
		return o.beginSettle()
	default:
		if o.Txn.Effect != KeepKey && hinted && h.Word.State() == layout.Live && h.Flags == 0 &&
			(o.Cond == Always || o.Cond == IfVersion && h.Version == o.IfVersion) {
			o.take(h)
			return o.place(nil)
		}
		if hinted {
			return o.getCached(h)
		}
		return o.readGroup()
	}
}

// place writes the intent, and the record that it leads to, on every replica, and swings what the slot holds to the
// intent. r is the key's record, nil if there is none, or if it is not needed.
func (o *Op) place(r *layout.Record) Action {
	t, pg := o.Txn, o.Route.PG
	if o.x.State() == layout.Frozen && !o.isSettled() {
		return o.finish(ErrMoving)
	}
	if t.Effect == PutKey && o.inChunks() {
		if a := o.prepareChunks(); a != 0 {
			return a
		}
	}
	in := layout.Intent{PG: t.Status.PG, Generation: t.Status.Generation, Off: t.Status.Off, Seq: t.Status.Seq,
		TS: t.TS, Coord: t.Coord, Try: t.Try, Parent: o.x}
	if o.isSettled() {
		// The intent under change goes: the new one names what that stands for.
		if in.Parent = o.met.stands; in.Parent == 0 {
			in.Parent = o.x.Delete(o.env.Session())
		}
	}
	live := in.Parent.State() == layout.Live
	switch {
	case t.Effect == PutKey && live:
		in.Kind = layout.IntentPut
	case t.Effect == PutKey:
		in.Kind = layout.IntentInsert
	case !live:
		in.Kind = layout.IntentGuardAbsent
	case t.Effect == DeleteKey:
		in.Kind = layout.IntentDelete
	default:
		in.Kind = layout.IntentGuard
	}
	h, value := layout.RecordHeader{Flags: o.Flags & layout.FlagsOfValue, Expiry: o.Expiry, Pinned: o.Pinned,
		Writer: o.env.Session()}, o.Value
	o.Record = layout.Record{}
	if in.Kind == layout.IntentGuard {
		o.Record = *r
		h, value = r.RecordHeader, r.Value
		o.version = h.Version
	} else {
		o.version = o.env.Version(o.xVersion)
		h.Version = o.version
	}
	if t.Effect == PutKey && o.inChunks() {
		h.Flags |= layout.FlagManifest
		value = o.manifest()
	}
	if live && o.xFlags&HintManifest != 0 {
		in.Long |= layout.LongParent
	}
	n := layout.RecordLen(len(o.Key), len(value))
	if !o.allocFor(&o.need().intent, layout.RecordLen(len(o.Key), layout.IntentLen)) {
		return Alloc
	}
	if in.Kind == layout.IntentDelete || in.Kind == layout.IntentGuardAbsent {
		o.dropFinal(&o.final, o.env.Unuse)
	} else {
		if !o.allocFor(&o.final, n) {
			return Alloc
		}
		layout.EncodeRecord(o.final.own, h, o.Key, value)
		in.Final = o.final.word
		if h.Flags&layout.FlagManifest != 0 {
			in.Long |= layout.LongFinal
		}
	}
	var v [layout.IntentLen]byte
	layout.EncodeIntent(v[:], &in)
	layout.EncodeRecord(o.intent.own, layout.RecordHeader{Version: o.version, Flags: layout.FlagIntent,
		Writer: o.env.Session()}, o.Key, v[:])
	o.n = o.intent.word.WithState(layout.Frozen)
	o.flags = h.Flags
	t.Placed = Placed{Shard: o.Route.Shard, Generation: pg.Generation, Slot: o.slot, Word: o.n, Intent: in,
		Version: o.version,
		Flags:   HintFlagsOf(h.Flags, h.Expiry)}
	o.begin()
	if o.final.have {
		way := Hinted{PG: pg, N: o.final.word}
		o.Accesses = way.Write(o.Accesses, o.final.own, 0, pg.Replicas)
	}
	way := o.hinted()
	o.Accesses = way.Write(o.Accesses, o.intent.own, 0, pg.Replicas)
	return o.casSlot()
}

// reserve takes the places that an insert will need, and writes its chunks, before it takes the lock. It returns 0 when
// they are there.
func (o *Op) reserve() Action {
	put, n := o.Txn.Effect == PutKey, layout.RecordLen(len(o.Key), len(o.Value))
	if put && o.inChunks() {
		if a := o.prepareChunks(); a != 0 {
			return a
		}
		n = layout.RecordLen(len(o.Key), layout.ManifestLen(len(o.chunks)))
	}
	if !o.allocFor(&o.need().intent, layout.RecordLen(len(o.Key), layout.IntentLen)) || put &&
		!o.allocFor(&o.final, n) {
		return Alloc
	}
	return 0
}

// allocFor takes a place for a record of n bytes, unless f has one that fits; false: there is none now.
func (o *Op) allocFor(f *final, n int) bool {
	code, _ := layout.CodeFor(n)
	if f.have && (f.word.ReadLen() < n || f.word.Units() > layout.UnitsOf(code)+layout.UnitsOf(code)/2) {
		o.dropFinal(f, o.env.Unuse)
	}
	if !f.have {
		o.wantCode = code
		unit, ver, size, ok := o.env.Alloc(o.Route.PG, code)
		if !ok {
			return false
		}
		f.word, f.have = layout.MakeLive(ver, layout.FP(o.Hash), size, unit), true
	}
	if cap(f.own) < n {
		f.own = o.env.Buf(o, n)
	}
	f.own = f.own[:n]
	return true
}

func (o *Op) dropFinal(f *final, by func(*PG, layout.Word)) {
	if f.have {
		by(o.Route.PG, f.word)
		f.have = false
	}
}

// dropTxn gives the places of a Prepare, and of a Settle, to by.
func (o *Op) dropTxn(by func(*PG, layout.Word)) {
	if o.far != nil {
		o.dropFinal(&o.intent, by)
		o.dropFinal(&o.final, by)
	}
}

// beginSettle takes the intent away if it still stands in its slot: by what it leads to after a COMMIT; after an ABORT
// by a fresh copy of the record before, since that one's word may be the expectation of a CAS that is late. A guard
// leads to such a copy in any case. A copy of a manifest names the same chunks.
func (o *Op) beginSettle() Action {
	p := &o.Txn.Placed
	if c := o.Route.Child; c != nil && c.PG != nil && c.Shard == p.Shard {
		o.Route = *c
	}
	if p.Shard != o.Route.Shard || p.Generation != o.Route.PG.Generation {
		return o.finish(nil) // no intent goes with a move, or survives its memory
	}
	o.take(Hint{Word: p.Word, Slot: p.Slot})
	m := &o.need().met
	m.word, m.in, m.settled, m.stands = p.Word, p.Intent, p.Word, 0
	if o.Txn.Verdict == layout.Undecided {
		m.atA = true
		return o.readStatus()
	}
	return o.settleBy()
}

// settleBy takes the intent away by the transaction's verdict, which every replica of the status word shows.
func (o *Op) settleBy() Action {
	p, m := &o.Txn.Placed, &o.met
	if o.Txn.Verdict == layout.Commit || p.Intent.Kind == layout.IntentGuard {
		if m.stands = p.Intent.Final; m.stands == 0 {
			return o.settleEmpty()
		}
		o.n, o.version, o.flags = m.stands, p.Version, 0
		o.begin()
		return o.casSlot()
	}
	if p.Intent.Parent.State() == layout.Empty {
		return o.settleEmpty()
	}
	o.begin()
	o.readNamed(0, p.Intent.Parent)
	return o.post(stepReadIntent)
}

// readDecided reads what the status word holds where it is decided.
func (o *Op) readDecided() Action {
	o.begin()
	o.add(Access{Verb: Read, Space: Index, Off: o.fixed, Buf: o.word(0)})
	return o.post(stepReadStatus)
}

// gotDecided answers with s, which the status word holds, once every replica shows it.
func (o *Op) gotDecided(s layout.Status) Action {
	if err := s.Check(o.fixed); err != nil {
		return o.finish(fmt.Errorf("pg %d: %w", o.Route.PG.ID, err))
	}
	o.Txn.Found = s
	return o.answerAfterSync(nil)
}

// settleEmpty leaves nothing in place of an intent.
func (o *Op) settleEmpty() Action {
	o.n = o.Txn.Placed.Word.Delete(o.env.Session())
	o.begin()
	return o.casSlot()
}

// settleCopy puts the record before, just read, in place of an aborted intent.
func (o *Op) settleCopy() Action {
	r, err := layout.ParseLinked(o.met.recs[0])
	if err == nil {
		return o.settleBytes(o.met.recs[0][:layout.RecordLen(len(r.Key), len(r.Value))], r.Version)
	}
	return o.mendStands(o.met.in.Parent, func(gone bool) Action {
		if !gone {
			return o.settleCopy()
		}
		return o.settleBytes(o.met.recs[0], 0) // as damaged as it was
	})
}

// settleBytes puts a copy of b, which is what the record before holds, in place of an aborted intent.
func (o *Op) settleBytes(b []byte, version uint64) Action {
	if !o.allocFor(&o.final, len(b)) {
		return Alloc
	}
	copy(o.final.own, b)
	o.n, o.version = o.final.word, version
	o.met.stands = o.met.in.Parent // whose chunks the copy names
	o.begin()
	way := o.hinted()
	o.Accesses = way.Write(o.Accesses, o.final.own, 0, o.Route.PG.Replicas)
	return o.casSlot()
}

// publishedTxn: what the Op decided shows at the tail.
func (o *Op) publishedTxn() Action {
	switch o.Kind {
	case Decide:
		o.Txn.Found = layout.Status(o.n)
		return o.finish(nil)
	case Prepare:
		o.env.Forget(o) // an intent is no hint
		o.Version = o.version
		o.intent.have, o.final.have, o.chunks = false, false, o.chunks[:0]
		if o.isSettled() {
			return o.endUnlinked()
		}
		return o.finish(nil)
	}
	o.final.have = false
	if p := &o.Txn.Placed; o.n.State() == layout.Live && o.Txn.Verdict == layout.Commit {
		o.env.Remember(o, Hint{Word: o.n, Version: p.Version, Shard: o.Route.Shard, Slot: o.slot, Flags: p.Flags})
	} else {
		o.env.Forget(o)
	}
	return o.endUnlinked()
}

// lostTxn acts on a CAS of a Settle or a Decide that found c: somebody else has settled, or decided. The caller may act
// on that once every replica shows it.
func (o *Op) lostTxn(c layout.Word) Action {
	if o.Kind == Decide {
		o.Txn.Found = layout.Status(c)
		if v, over := o.Txn.Found.Of(o.Txn.Status.Seq); v == layout.Undecided && !over {
			return o.again(0) // the caller did not know the word before
		}
	}
	return o.answerAfterSync(nil)
}

// resolvedTxn acts on s, which the head holds after a CAS of unknown outcome, and which is neither what that expected
// nor what it was to leave. It is false if the outcome stays unknown.
func (o *Op) resolvedTxn(s layout.Word) (a Action, known bool) {
	switch o.Kind {
	case Decide:
		if v, over := layout.Status(s).Of(o.Txn.Status.Seq); over || v == layout.Undecided {
			return 0, false
		}
		o.deciding = false
		return o.lostTxn(s), true
	case Settle: // the intent is gone, whoever took it away
		o.leak()
		return o.answerAfterSync(nil), true
	}
	return 0, false
}

func (o *Op) hasTxnPlace() bool { return o.far != nil && (o.intent.have || o.final.have) }

func (o *Op) txnError(err error) error {
	o.toParent()
	return fmt.Errorf("pg %d: intent at slot %#x: %w", o.Route.PG.ID, o.slotOff(o.slot), err)
}
