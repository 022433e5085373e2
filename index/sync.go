package index

import (
	"bytes"
	"fmt"

	"github.com/kvd-project/kvd/internal/layout"
)

// publish carries x→n from A down the chain. A stage may swing x→n blindly only
// while every earlier one took exactly that; from the first other finding on,
// sync takes over. A replica that lacks n's record gets it in the same chain, before the CAS: if the WRITE fails the
// CAS does not happen.
func (o *Op) publish() Action {
	if o.Route.PG.Replicas == 1 {
		return o.published()
	}
	o.pubK = 1
	return o.publishStage()
}

func (o *Op) publishStage() Action {
	o.begin()
	way := o.hinted()
	if o.havePlace {
		o.addRecord(o.pubK + 1)
	}
	o.Accesses = way.Publish(o.Accesses, o.pubK)
	if o.noting && o.noteRead && o.pubK == o.Route.PG.Reader() {
		o.Accesses = way.Note(o.Accesses, o.word(2))
	}
	return o.post(stepPublish)
}

func (o *Op) gotPublish() Action {
	if f := layout.Word(o.theCAS(o.pubK).Found); f != o.x {
		return o.sync(o.slot, o.pubK, stepPublish)
	}
	if o.havePlace {
		o.written = max(o.written, o.pubK+1)
	}
	if o.pubK++; o.pubK < o.Route.PG.Replicas {
		return o.publishStage()
	}
	return o.published()
}

// published: n is visible at P. The replaced record's place is ours.
func (o *Op) published() Action {
	o.spread = false
	if o.Kind.isTxn() {
		return o.publishedTxn()
	}
	if o.deletes() {
		o.env.Forget(o)
	} else {
		o.Version = o.version
		o.env.Remember(o, Hint{Word: o.n, Version: o.version, Shard: o.Route.Shard, Slot: o.slot,
			Flags: HintFlagsOf(o.flags, o.Expiry)})
	}
	o.havePlace = false
	if o.far != nil {
		o.chunks = o.chunks[:0]
	}
	return o.endUnlinked()
}

func (o *Op) decided() Action {
	if o.deletes() && o.Kind != Delete && o.Kind != Drop {
		o.won = false
		return o.dropped()
	}
	if o.Kind == Delete && o.expired {
		return o.finish(ErrNotFound)
	}
	return o.finish(nil)
}

func (o *Op) unlink() {
	if o.x.Readable() && !o.unlinked {
		o.unlinked = true
		o.env.Unlinked(o.Route.PG, o.x)
		if o.isSettled() {
			o.unlinkMet()
		}
	}
}

// sync brings slot on every replica from the k-th on up to its predecessor,
// never past it. Then it goes on where then says.
func (o *Op) sync(slot uint8, k uint8, then Step) Action {
	o.need().syncThen = then
	o.syncSlot, o.syncK = slot, k
	return o.syncRead()
}

func (o *Op) syncRead() Action {
	if o.syncK >= o.Route.PG.Replicas {
		switch o.syncThen {
		case stepPublish:
			return o.published()
		case stepSyncGroup:
			return o.syncGroup()
		case stepReadStash:
			return o.syncStash()
		case stepStart:
			return o.again(0)
		case stepSplitSeen:
			return o.splitSeen()
		case stepSyncStatus:
			return o.statusKnown()
		case stepReadSegment:
			return o.readSegment()
		case stepCASSlot:
			return o.strayGone()
		case stepConfirm:
			return o.confirmed()
		case StepPublishWords:
			o.syncBase = 0
			return o.Machine.Next()
		}
		return o.finish(o.answer)
	}
	o.begin()
	o.add(Access{Verb: Read, Space: Index, Replica: o.syncK, Off: o.slotOff(o.syncSlot), Buf: o.word(0)})
	return o.post(stepSyncRead)
}

// syncPrev reads the predecessor's word, after q was read: the other order
// could move R[k] backward.
func (o *Op) syncPrev() Action {
	o.begin()
	o.add(Access{Verb: Read, Space: Index, Replica: o.syncFrom(), Off: o.slotOff(o.syncSlot), Buf: o.word(1)})
	o.readParent()
	return o.post(stepSyncPrev)
}

func (o *Op) syncNext() Action {
	switch o.step {
	case stepSyncRead:
		o.syncQ = wordAt(o.word(0))
		return o.syncPrev()
	case stepSyncPrev:
		b := wordAt(o.word(1))
		o.syncB = b
		if o.syncK == 1 && o.isSpeculative() {
			o.needRare().spec.b = b
		}
		if o.syncSlot == HeaderSlot {
			// Headers grow; an OVF that only a later replica has yet must stay.
			o.syncB = layout.Word(layout.Header(o.syncQ).Merge(layout.Header(b)))
			if o.syncB != o.syncQ {
				return o.syncCAS(false)
			}
			b = o.syncQ
		}
		switch {
		case b == o.syncQ, o.isTentative(b):
			o.syncK++
			return o.syncRead()
		case o.isSpeculative() && o.env.ReadOnly():
			return o.again(Backoff) // somebody else will
		case !b.Readable():
			return o.syncCAS(false)
		case !layout.InHeap(b, o.Route.PG.HeapLo, o.Route.PG.HeapHi):
			return o.syncBroken(&layout.CorruptError{What: "slot", Off: o.slotOff(o.syncSlot),
				Check: "outside the heap", Got: uint64(b)})
		}
		o.syncRaw = false
		// b's record must be complete on R[k]. A good CRC alone proves nothing:
		// the place's previous life had one too.
		o.begin()
		for i, k := range [2]uint8{o.syncK, o.syncFrom()} {
			o.add(Access{Verb: Read, Space: Heap, Replica: k, Off: b.Off(), Buf: o.syncBuf(uint8(i), b.ReadLen())})
		}
		return o.post(stepSyncVerify)
	case stepSyncVerify:
		if _, err := layout.ParseLinked(o.syncRecs[1]); err != nil {
			return o.mendSync(o.syncB.Off(), o.syncRecs[0], o.syncRecs[1], func(ruined bool) Action {
				if o.syncRaw = ruined; ruined {
					return o.syncCAS(isWhole(o.syncRecs[0])) // else it is as bad already
				}
				return o.syncVerified()
			})
		}
		return o.syncVerified()
	default: // stepSyncCAS
		a := &o.Accesses[len(o.Accesses)-1]
		if layout.Word(a.Found) == o.syncQ {
			o.syncK++
			return o.syncRead()
		}
		o.syncQ = layout.Word(a.Found)
		return o.syncPrev()
	}
}

// syncVerified goes on with R[k]'s record and that of the replica before it, which is whole.
func (o *Op) syncVerified() Action {
	mine, prev := o.syncRecs[0], o.syncRecs[1]
	h := layout.HeadOf(prev)
	n := h.EncodedLen()
	same := bytes.Equal(mine[:n], prev[:n])
	o.syncNamed, o.chunk = 0, 0
	if o.lacksChunks(prev, same) {
		return o.syncChunks()
	}
	if layout.RecordFlags(prev[10])&layout.FlagIntent != 0 {
		return o.syncIntent()
	}
	return o.syncCAS(!same)
}

// lacksChunks reports whether chunks of the record rec of R[k-1] may be missing on R[k]; same: R[k] has the record
// itself. The chunks are written before a manifest is, unless that is a copy that shares them with another one: whoever
// writes such a copy writes it to a joiner, too, which has the chunks only once it has the other one.
func (o *Op) lacksChunks(rec []byte, same bool) bool {
	return layout.RecordFlags(rec[10])&layout.FlagManifest != 0 &&
		(!same || o.Route.PG.Joining && o.syncK == o.Route.PG.tail())
}

// syncChunks copies the chunks of the manifest under way before the manifest
// itself: one by one, READ from the predecessor and WRITE.
func (o *Op) syncChunks() Action {
	pg := o.Route.PG
	rec := o.syncRecs[1]
	if o.syncNamed != 0 {
		rec = o.met.copies[1]
	}
	r, err := layout.ParseRecord(rec)
	if err != nil {
		return o.syncRead()
	}
	m, err := layout.ParseManifest(r.Value, pg.HeapLo, pg.HeapHi)
	if err != nil {
		return o.syncBroken(fmt.Errorf("pg %d replica %d: %w", pg.ID, o.syncFrom(), err))
	}
	if o.chunk >= len(m.Chunks) {
		if o.syncNamed != 0 {
			return o.copyNamed()
		}
		return o.syncCAS(true)
	}
	c := m.Chunks[o.chunk]
	buf := o.syncBuf
	if o.syncNamed != 0 {
		buf = o.copyBuf
	}
	o.begin()
	o.add(Access{Verb: Read, Space: Heap, Replica: o.syncFrom(), Off: uint64(c.Unit) * layout.UnitSize,
		Buf: buf(0, layout.SizeOf(c.Code))})
	return o.post(stepSyncChunk)
}

func (o *Op) gotSyncChunk() Action {
	if a := &o.Accesses[0]; a.Verb == Read {
		off, b := a.Off, a.Buf
		r, err := layout.ParseRecord(b)
		if err != nil {
			return o.mendSync(off, nil, b, func(bool) Action { return o.copyChunk(off, b) })
		}
		return o.copyChunk(off, b[:layout.RecordLen(0, len(r.Value))])
	}
	o.chunk++
	return o.syncChunks()
}

func (o *Op) copyChunk(off uint64, b []byte) Action {
	o.begin()
	o.add(Access{Verb: Write, Space: Heap, Replica: o.syncK, Off: off, Buf: b})
	return o.post(stepSyncChunk)
}

// syncBroken ends an Op that cannot bring the chain up. A change that A decided may yet be seen.
func (o *Op) syncBroken(err error) Action {
	if o.Machine != nil && o.Machine.Unsynced(err) {
		return o.Machine.Next()
	}
	if o.won || o.spread {
		o.leak()
		err = fmt.Errorf("%w: %w", ErrUnknown, err)
	}
	return o.finish(err)
}

func (o *Op) syncBuf(i uint8, n int) []byte {
	if cap(o.syncRecs[i]) < n {
		o.syncRecs[i] = o.env.Buf(o, n)
	}
	o.syncRecs[i] = o.syncRecs[i][:n]
	return o.syncRecs[i]
}

func (o *Op) syncCAS(copyRecord bool) Action {
	o.begin()
	if copyRecord {
		prev := o.syncRecs[1]
		n := len(prev)
		if !o.syncRaw {
			h := layout.HeadOf(prev)
			n = h.EncodedLen()
		}
		o.add(Access{Verb: Write, Space: Heap, Replica: o.syncK, Off: o.syncB.Off(), Buf: prev[:n]})
	}
	o.add(Access{Verb: CAS, Space: Index, Replica: o.syncK, Off: o.slotOff(o.syncSlot),
		Expect: uint64(o.syncQ), New: uint64(o.syncB)})
	return o.post(stepSyncCAS)
}
