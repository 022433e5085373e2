package index

import (
	"bytes"

	"github.com/kvd-project/kvd/internal/layout"
)

// A placement group may publish speculatively (PG.Speculative). An UPDATE then posts its CAS at every replica in the
// round that decides it, on the guess that the head says yes. The head alone decides. If it says no, what the other
// replicas took is a stray, and its writer takes it away before anything else.
//
// A word is decided when the head took it. It is confirmed to an Op that saw it decided, and every replica at or past
// it. R[k] is at or past b when it shows b, or a LIVE word whose record names b as its parent. Such a word is
// tentative: its writer's CAS at the head may yet be on its way, so nobody undoes it. Readers take a word at the tail
// for what it says only if it is confirmed. Every hint of such a placement group is.

// speculating is what an Op knows of words in a placement group that publishes speculatively.
type speculating struct {
	sure   layout.Word // confirmed; 0: none is
	parent layout.Word // that the record in own names, as layout.Word.AsParent has it; 0: none
	lost   bool        // the Op has lost a CAS at A, so it publishes in sequence
	late   bool        // casEverywhere's round is over, and another one decides on the same word
	lostTo layout.Word // what the head held instead of x, while strays are taken away
	b      layout.Word // of a sync: the head's word when the replica behind it was at or past that
	rec    []byte      // the record of syncQ at R[k]
	words  []byte      // of the other replicas, in confirm

	// The word that confirm asks about, where it is, and its record at the reader.
	slot   uint8
	word   layout.Word
	record layout.Record
	bad    layout.Word // the reader's, whose record is damaged; word is 0 then, and 0: none is
}

func (o *Op) isSpeculative() bool { return o.Route.PG.Speculative && o.Route.PG.Replicas > 1 }

// speculates reports whether the change of x is published in the round that decides it. Only LIVE words have
// children, only confirmed ones are expected so, and an Op that has lost once goes on in sequence.
func (o *Op) speculates() bool {
	return o.isSpeculative() && !o.Route.PG.Joining && (o.Kind == Put || o.Kind == Modify) && !o.needRare().spec.lost &&
		o.Pinned == 0 && !o.stub && !o.inChunks() && o.x.State() == layout.Live && o.needRare().spec.sure == o.x
}

// trust takes the word of a hint for confirmed. Beside a joiner, whose kept memory may show an old word again, every
// word is confirmed anew.
func (o *Op) trust(h Hint, hinted bool) {
	if o.isSpeculative() {
		if o.needRare().spec.sure = h.Word; !hinted || o.Route.PG.Joining {
			o.spec.sure = 0
		}
	}
}

// asksJoiner reports whether confirm asks the joiner about w, which the reader shows. Then the two are not compared: a
// sync does not make them equal while the joiner's word is tentative.
func (o *Op) asksJoiner(w layout.Word) bool { return o.isSpeculative() && w.State() == layout.Live }

// parentOf is what the record under w is to say of its parent: x, or nothing.
func (o *Op) parentOf() layout.Word {
	if o.speculates() {
		return o.x.AsParent()
	}
	return 0
}

// casEverywhere writes the record and swings x to it at every replica, in one round.
func (o *Op) casEverywhere() Action {
	way := o.hinted()
	o.written = 0
	o.addRecord(o.Route.PG.Replicas)
	o.Accesses = way.Swing(o.Accesses)
	for k := uint8(1); k < o.Route.PG.Replicas; k++ {
		o.Accesses = way.Publish(o.Accesses, k)
	}
	o.noteAccess(o.slot, o.noteDue() || o.xFlags.NotesExpiry(o.Route.PG, o.Expiry))
	if o.locked {
		o.addUnlock()
	}
	o.deciding, o.spread, o.spec.late = true, true, false
	return o.post(stepCASSlot)
}

// spreadDone goes on when the head has found what it found. The round was casEverywhere's, or one that resumed it.
func (o *Op) spreadDone(found layout.Word) Action {
	took, all := uint8(0), uint8(0)
	for i := range o.Accesses {
		if a := &o.Accesses[i]; a.Verb == CAS && a.Space == Index && a.Replica > 0 && a.Off == o.slotOff(o.slot) {
			if all++; layout.Word(a.Found) == o.x {
				took++
			}
		}
	}
	every := all == o.Route.PG.Replicas-1
	if found == o.x {
		if o.won = true; every && took == all {
			return o.published()
		}
		return o.sync(o.slot, 1, stepPublish)
	}
	o.needRare().spec.lostTo = found
	if every && took == 0 {
		return o.strayGone()
	}
	return o.sync(o.slot, 1, stepCASSlot)
}

// strayGone goes on after a loss, for good: no replica shows n, or ever will. Readers may have seen it.
func (o *Op) strayGone() Action {
	o.spread, o.spec.lost = false, true
	c := o.spec.lostTo
	o.retire()
	return o.lost(c)
}

// respread decides again on x→n. The head shows x, and nothing of the first CAS there can land any more. Other
// replicas may show n, so this is as if that CAS were late.
func (o *Op) respread() Action {
	o.written, o.won, o.spec.late = 0, false, true
	o.begin()
	o.addRecord(o.Route.PG.Replicas)
	return o.casSlot()
}

// isUnsure reports whether w, which the reader shows, has to be confirmed first.
func (o *Op) isUnsure(w layout.Word) bool {
	return o.isSpeculative() && w.State() == layout.Live && o.needRare().spec.sure != w
}

// confirm asks every other replica whether it shows w too, which the reader has shown with its record r.
func (o *Op) confirm(slot uint8, w layout.Word, r *layout.Record) Action {
	g := &o.needRare().spec
	g.slot, g.word, g.record, g.bad = slot, w, *r, 0
	if g.words == nil {
		g.words = o.env.Buf(o, 8*MaxChain)
	}
	o.begin()
	for k := range o.Route.PG.Replicas {
		if k != o.Route.PG.Reader() {
			o.add(Access{Verb: Read, Space: Index, Replica: k, Off: o.slotOff(slot), Buf: g.words[8*k:][:8:8]})
		}
	}
	return o.post(stepConfirm)
}

func (o *Op) gotConfirm() Action {
	g := &o.spec
	for i := range o.Accesses {
		if wordAt(o.Accesses[i].Buf) != g.word {
			return o.sync(g.slot, 1, stepConfirm)
		}
	}
	g.sure = g.word
	return o.present(g.slot, g.word, g.record)
}

// confirmDamaged is confirm for w, which the head does not show, and whose record the reader cannot read.
func (o *Op) confirmDamaged(slot uint8, w layout.Word) Action {
	g := &o.needRare().spec
	g.slot, g.word, g.bad = slot, 0, w
	return o.sync(slot, 1, stepConfirm)
}

// confirmed goes on with what the head held when the sync looked, which every replica is at or past.
func (o *Op) confirmed() Action {
	g := &o.spec
	switch b := g.b; {
	case b == g.word && g.bad == 0:
		g.sure = b
		return o.present(g.slot, b, g.record)
	case b.State() == layout.Live && b.FP() == layout.FP(o.Hash) && layout.InHeap(b, o.Route.PG.HeapLo,
		o.Route.PG.HeapHi):
		g.word = b
		o.need().inOne = true
		o.begin()
		o.add(Access{Verb: Read, Space: Heap, Replica: 0, Off: b.Off(), Buf: o.recBuf(0, b.ReadLen())})
		return o.post(stepReadDecided)
	}
	return o.again(0) // the tail shows it too
}

func (o *Op) decidedRead() Action {
	g := &o.spec
	r, err := layout.ParseLinked(o.rec)
	switch {
	case err != nil:
		return o.mend(mending{slot: g.slot, word: g.word, off: g.word.Off(), into: o.rec,
			good: o.goodRecord(g.word, g.slot), then: func(gone bool) Action {
				if gone {
					return o.decidedRuined(err)
				}
				return o.decidedRead()
			}})
	case !bytes.Equal(r.Key, o.Key):
		if g.bad != 0 { // a child is of the same key
			o.ruins = append(o.ruins, ruin{word: g.bad, other: true})
		}
		return o.again(0)
	}
	g.sure = g.word
	return o.present(g.slot, g.word, r)
}

// decidedRuined acts on what the head has decided if no replica has a whole copy of that, but for err.
func (o *Op) decidedRuined(err error) Action {
	x := o.ruinOf(o.spec.word, err)
	if o.atA = true; !x.mine {
		return o.finish(x.err)
	}
	return o.overRuin(o.spec.slot, &x)
}

// MayBeTentative reports whether x, which R[k] shows and the head does not, may be tentative. At a joiner no word is:
// nobody publishes speculatively beside one, and what it has retained may name any word as its parent.
func (pg *PG) MayBeTentative(k uint8, x layout.Word) bool {
	return pg.Speculative && !(pg.Joining && k == pg.tail()) && x.State() == layout.Live &&
		layout.InHeap(x, pg.HeapLo, pg.HeapHi)
}

// syncFrom is the replica by which sync brings R[k] up: the head, where any replica may be ahead of the one before.
func (o *Op) syncFrom() uint8 {
	if o.isSpeculative() {
		return 0
	}
	return o.syncK - 1
}

// readParent adds a READ of the record of R[k]'s word, which may name the head's as its parent.
func (o *Op) readParent() {
	if !o.isSpeculative() {
		return
	}
	g, q := &o.needRare().spec, o.syncQ
	g.rec = g.rec[:0]
	if o.syncSlot == HeaderSlot || o.fixed != 0 || !o.Route.PG.MayBeTentative(o.syncK, q) {
		return
	}
	n := q.ReadLen()
	if cap(g.rec) < n {
		g.rec = o.env.Buf(o, n)
	}
	g.rec = g.rec[:n]
	o.add(Access{Verb: Read, Space: Heap, Replica: o.syncK, Off: q.Off(), Buf: g.rec})
}

// isTentative reports whether R[k], which does not show b, is at or past it.
func (o *Op) isTentative(b layout.Word) bool {
	if !o.isSpeculative() || len(o.spec.rec) == 0 {
		return false
	}
	h := layout.HeadOf(o.spec.rec) // R[k] shows syncQ, so these are its bytes, if damaged ones
	return h.IsChildOf(b)
}
