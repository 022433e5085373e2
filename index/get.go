package index

import (
	"github.com/kvd-project/kvd/internal/layout"
)

// getCached reads slot and record in one chain.
func (o *Op) getCached(h Hint) Action {
	o.take(h)
	way := o.hinted()
	o.begin()
	rec, apart := o.readRecord(h.Word)
	o.Accesses = way.Look(o.Accesses, o.word(0), rec)
	o.Accesses[len(o.Accesses)-1].Apart = apart
	if o.Route.PG.Joining {
		o.add(Access{Verb: Read, Space: Index, Replica: o.Route.PG.tail(), Off: o.slotOff(h.Slot), Buf: o.word(2)})
	}
	o.noteAccess(h.Slot, o.noteDue())
	return o.post(stepGetCached)
}

func (o *Op) gotCached() Action {
	w := wordAt(o.word(0))
	if o.Route.PG.Joining && wordAt(o.word(2)) != w && !o.asksJoiner(w) {
		return o.joinerBehind(o.slot)
	}
	way := o.hinted()
	var r layout.Record
	switch {
	case o.readsHeads():
		if w == o.x && w.Readable() {
			if o.gotHead(o.rec, w, &r) {
				return o.present(o.slot, w, r)
			}
			// Expired, an intent, of another key, or damaged: seen whole it tells.
			o.need().inOne = true
			return o.getCached(Hint{Word: w, Shard: o.Route.Shard, Slot: o.slot})
		}
	case !o.isApartRead():
		if way.names(o.word(0), o.rec, o.Key, &r) {
			return o.present(o.slot, w, r)
		}
	case w == o.x && w.Readable():
		if o.gotApart(&r) {
			return o.present(o.slot, w, r)
		}
		// Too long, of another kind, of another key, or damaged: seen whole it tells.
		if o.inOne = true; o.values[0].N < 0 {
			return o.getCached(Hint{Word: w, Shard: o.Route.Shard, Slot: o.slot})
		}
	}
	if w == o.x && w.Readable() {
		// Another key with this hash, or bytes that a lookup will judge.
		return o.lookUp()
	}
	// The word just read is the next hint; it proves nothing about absence.
	if w.Readable() && w.FP() == layout.FP(o.Hash) && o.retries < 2 &&
		layout.InHeap(w, o.Route.PG.HeapLo, o.Route.PG.HeapHi) {
		o.retries++
		return o.getCached(Hint{Word: w, Shard: o.Route.Shard, Slot: o.slot})
	}
	return o.lookUp()
}

// checkSlot reads the slot alone: while it holds the word of the version that is known, the record is that one.
func (o *Op) checkSlot(h Hint) Action {
	o.take(h)
	o.begin()
	o.add(Access{Verb: Read, Space: Index, Replica: o.Route.PG.Reader(), Off: o.slotOff(h.Slot), Buf: o.word(0)})
	o.noteAccess(h.Slot, o.Kind == Pin && o.noteDue())
	return o.post(stepCheckSlot)
}

func (o *Op) checkedSlot() Action {
	h := Hint{Word: wordAt(o.word(0)), Shard: o.Route.Shard, Slot: o.slot}
	switch {
	case h.Word == o.x && h.Word.Readable():
		h.Version, h.Flags = o.xVersion, o.xFlags
		o.env.Remember(o, h)
		if o.Version = o.xVersion; o.Kind.asks() {
			o.Record = layout.Record{RecordHeader: layout.RecordHeader{Version: o.xVersion}, Key: o.Key}
			return o.finish(nil)
		}
		return o.finish(ErrUnchanged)
	case h.Word.Readable() && h.Word.FP() == layout.FP(o.Hash) &&
		layout.InHeap(h.Word, o.Route.PG.HeapLo, o.Route.PG.HeapHi):
		return o.getCached(h)
	}
	o.env.Forget(o)
	return o.readGroup()
}

func (o *Op) noteDue() bool {
	return o.Kind != Exists && o.Route.PG.Notes() && !o.Kind.isTiered() && !o.env.ReadOnly() &&
		(o.Kind == Pin || o.env.NoteDue(o))
}

// noteUpdate notes the access of a PUT or a Modify that is about to be decided. The access word is read in the round
// that ends at its replica: this one if there is a single copy, else publish's.
func (o *Op) noteUpdate(due bool) {
	if o.Route.PG.Replicas == 1 {
		o.noteAccess(o.slot, due)
		return
	}
	if o.noting, o.noteRead = due, due; due {
		clear(o.word(2)) // nothing is known if publish does not come so far
	}
}

// noteAccess adds, if the access at slot is to be noted, a READ of its access word to
// the round.
func (o *Op) noteAccess(slot uint8, due bool) {
	o.noting, o.noteRead = due, due
	if due {
		way := Hinted{PG: o.Route.PG, Off: o.slotOff(slot)}
		o.Accesses = way.Note(o.Accesses, o.word(2))
	}
}

func (o *Op) writeAccess() {
	if o.far != nil {
		o.syncBase = 0
	}
	w, expiry := o.n, o.Expiry
	switch o.Kind {
	case Get, Pin:
		w, expiry = o.x, o.Record.Expiry
	case Put, Modify:
	default:
		return
	}
	var old layout.AccessWord
	if o.noteRead {
		old = layout.AccessWord(wordAt(o.word(2)))
	}
	o.env.Note(o, o.slotOff(o.slot), w, old, expiry, 0, !o.noteRead)
}
