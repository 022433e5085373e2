package index

import (
	"bytes"
	"fmt"

	"github.com/kvd-project/kvd/internal/layout"
)

// prepare takes a place and encodes the record, with a version above least. It
// returns 0 when the record is ready to be written.
func (o *Op) prepare(least uint64) Action {
	if o.prepared && o.version > least {
		return 0
	}
	if o.version = o.IfVersion; o.Cond != IfOlder || o.version <= least {
		o.version = o.env.Version(least)
	}
	if o.prepared {
		o.setVersion()
		o.written = 0
		return 0
	}
	value, flags := o.Value, o.Flags&layout.FlagsOfValue
	if o.inChunks() && !o.stub {
		if a := o.prepareChunks(); a != 0 {
			return a
		}
		flags |= layout.FlagManifest
		value = o.manifest()
	}
	n := layout.RecordLen(len(o.Key), len(value))
	code, ok := layout.CodeFor(n)
	if !ok {
		return o.finish(fmt.Errorf("%w: record of %d bytes, at most %d", ErrFull, n, layout.MaxRecordSize))
	}
	if !o.havePlace {
		o.wantCode = code
		unit, ver, code, ok := o.env.Alloc(o.Route.PG, code)
		if !ok {
			return Alloc
		}
		o.n = layout.MakeLive(ver, layout.FP(o.Hash), code, unit)
		o.havePlace = true
	}
	o.flags = flags
	parent := o.parentOf()
	if parent != 0 || o.isSpeculative() {
		o.needRare().spec.parent = parent
	}
	o.encode(layout.RecordHeader{Version: o.version, Flags: flags, Expiry: o.Expiry, Pinned: o.Pinned,
		Writer: o.env.Session(), Stub: o.stub, Parent: parent}, value,
		flags&layout.FlagManifest == 0 && !o.stub && o.isApart(n))
	o.prepared, o.written = true, 0
	return 0
}

// outdone reports whether the key's record r has the version that is to be given, or a later one.
func (o *Op) outdone(r *layout.Record) bool { return o.Cond == IfOlder && r.Version >= o.IfVersion }

// dropPlace gives back the place of a record that no word ever named.
func (o *Op) dropPlace() {
	if o.havePlace {
		o.env.Unuse(o.Route.PG, o.n)
		o.havePlace = false
	}
	o.prepared, o.written = false, 0
	o.dropTxn(o.env.Unuse)
	o.dropChunks(o.env.Unuse)
}

// maxBehind is the longest record, in bytes, that a replica behind the head gets with the word that names it. The bytes
// of a longer one take longer than a doorbell.
const maxBehind = 16 << 10

// withDecision is how many replicas, from the head on, have the record when the head decides. Those behind it get a
// short one with the word; a long one goes to all at once, so that its bytes travel side by side, and so does a
// manifest: who syncs its word copies the chunks, too, where it is not there.
func (o *Op) withDecision() uint8 {
	if o.ownLen() > maxBehind || o.flags&layout.FlagManifest != 0 {
		return o.Route.PG.Replicas
	}
	return 1
}

// addRecord adds the WRITEs of the record on the replicas before to that lack it.
func (o *Op) addRecord(to uint8) {
	if o.written < to {
		way := o.hinted()
		n := len(o.Accesses)
		if o.Accesses = way.Write(o.Accesses, o.own, o.written, to); o.isApartWrite() {
			o.sum()
			for i := range o.Accesses[n:] {
				o.Accesses[n+i].Apart = 1
			}
		}
	}
}

// update writes the record at A, or everywhere if it is long, and swings x to it at A, in one round.
func (o *Op) update() Action {
	if o.x.State() == layout.Frozen && !o.isSettled() {
		return o.isFrozen()
	}
	if o.speculates() && o.prepared && o.spec.parent != o.x.AsParent() {
		o.prepared, o.written = false, 0
	}
	if a := o.prepare(o.xVersion); a != 0 {
		return a
	}
	o.begin()
	if o.speculates() {
		return o.casEverywhere()
	}
	o.addRecord(o.withDecision())
	return o.casSlot()
}

// isFrozen waits where the key's word may be read but not written: it is on its
// way elsewhere.
func (o *Op) isFrozen() Action {
	o.env.Forget(o)
	return o.again(Backoff)
}

// casSlot adds the deciding CAS and, while the lock is held, its release where
// that cannot be seen too early.
func (o *Op) casSlot() Action {
	way := o.hinted()
	o.Accesses = way.Swing(o.Accesses)
	switch {
	case o.deletes(), o.Kind.isTxn(), o.Kind.isTiered():
		o.noting = false
	case o.x.State() == layout.Empty:
		o.noting, o.noteRead = o.Route.PG.Notes(), false
	default:
		o.noteUpdate(o.noteDue() || o.xFlags.NotesExpiry(o.Route.PG, o.Expiry))
	}
	if o.locked && (o.Route.PG.Replicas == 1 || o.x.State() != layout.Empty) {
		o.addUnlock()
	}
	o.deciding = true
	return o.post(stepCASSlot)
}

// theCAS is this round's CAS of the slot at replica k: at the head it decides.
func (o *Op) theCAS(k uint8) *Access {
	off := o.slotOff(o.slot)
	for i := range o.Accesses {
		if a := &o.Accesses[i]; a.Verb == CAS && a.Replica == k && a.Off == off {
			return a
		}
	}
	panic("index: no CAS of the slot")
}

func (o *Op) casDone() Action {
	found := layout.Word(o.theCAS(0).Found)
	o.deciding = false
	if o.havePlace { // the WRITEs of this round completed
		o.written = max(o.written, o.withDecision())
	}
	if o.spread {
		return o.spreadDone(found)
	}
	if found == o.x {
		o.won = true
		return o.publish()
	}
	if o.Kind == Settle || o.Kind == Decide {
		return o.lostTxn(found)
	}
	if o.Kind.isTiered() || o.deletes() && o.Kind != Delete {
		return o.lostTiered()
	}
	return o.lost(found)
}

// lost acts on a CAS at A that found c instead of x.
func (o *Op) lost(c layout.Word) Action {
	if o.Kind == Prepare && o.Txn.Effect != KeepKey && o.isSettled() && c == o.met.stands {
		return o.settledMeanwhile(c)
	}
	o.env.Forget(o)
	switch c.State() {
	case layout.Frozen:
		if o.x.State() != layout.Empty && c.FP() == layout.FP(o.Hash) &&
			layout.InHeap(c, o.Route.PG.HeapLo, o.Route.PG.HeapHi) {
			return o.readLost(c) // an intent, or on its way elsewhere
		}
		return o.again(Backoff)
	case layout.Moved:
		// Nobody follows it before the tail shows it.
		return o.sync(o.slot, 1, stepStart)
	case layout.Empty:
		// Gone from this slot; whether the key is elsewhere, a lookup tells.
		return o.lookAgain()
	}
	if c.FP() != layout.FP(o.Hash) || !layout.InHeap(c, o.Route.PG.HeapLo, o.Route.PG.HeapHi) ||
		o.x.State() == layout.Empty {
		return o.lookAgain()
	}
	return o.readLost(c)
}

// readLost reads the record of c at the head. Perhaps it is the same key: its record is at A for certain, at P perhaps
// not yet.
func (o *Op) readLost(c layout.Word) Action {
	o.x = c
	o.begin()
	o.add(Access{Verb: Read, Space: Heap, Replica: 0, Off: c.Off(), Buf: o.recBuf(0, c.ReadLen())})
	return o.post(stepReadLost)
}

// lookAgain starts over without a hint. A Put keeps its place and record.
func (o *Op) lookAgain() Action {
	o.env.Forget(o)
	if o.Kind == Put && (o.Cond == Always || o.Cond == IfAbsent) {
		return o.lockGroup()
	}
	// A lookup reads the tail, which may still show what is gone at A. If
	// the client that replaced it died before its publish, it would do so for ever.
	return o.sync(o.slot, 1, stepStart)
}

func (o *Op) gotLost() Action {
	r, err := layout.ParseLinked(o.rec)
	if err != nil || !bytes.Equal(r.Key, o.Key) {
		return o.lookAgain()
	}
	if r.Flags&layout.FlagIntent != 0 {
		return o.meetAtA(&r)
	}
	if o.x.State() == layout.Frozen && o.Kind != Prepare {
		return o.again(Backoff)
	}
	o.takeRecord(o.slot, o.x, &r)
	o.Version, o.atA = r.Version, true
	// Nobody learns of a state that the tail does not show.
	switch {
	case o.Kind == Put && o.expired && (o.Cond == IfVersion || o.Cond == IfPresent):
		return o.answerAfterSync(ErrNotFound)
	case o.Cond == IfVersion && !o.expired && r.Version != o.IfVersion:
		return o.answerAfterSync(ErrConflict)
	case o.Cond == IfAbsent && !o.expired:
		return o.answerAfterSync(ErrExists)
	case o.outdone(&r):
		return o.answerAfterSync(ErrConflict)
	}
	switch o.Kind {
	case Delete:
		return o.casDelete()
	case Modify:
		return o.modify(&r)
	case Prepare:
		return o.changeAtA(&r)
	}
	return o.update()
}
