package index

import (
	"bytes"
	"fmt"
	"slices"

	"github.com/kvd-project/kvd/internal/layout"
)

// mending is a record, or a chunk of one, that is not whole where the Op has read it: another replica may have it.
//
// The word is read on every replica before the copies are. If all show it, or the head does and others show a child of
// it, each has had the record since. Then what is not whole is damaged: nobody writes to a place that is linked, and
// none is reused while the Op is in flight (I4). So the Op goes by the good copy, and may write it over the bad ones.
type mending struct {
	slot uint8
	word layout.Word            // that slot has to hold, so that the bytes are linked
	off  uint64                 // of the bytes in the region
	into []byte                 // the Op's own copy, which becomes the good one
	mine []byte                 // of a sync: what R[k] has
	good func(b []byte) []byte  // the good bytes at the start of a copy, nil: it is damaged
	then func(gone bool) Action // gone: there is no good copy
	bufs [MaxChain][]byte       // of every replica
	look int                    // words that differed
}

// ruin is a record of which no replica has a good copy.
type ruin struct {
	word    layout.Word
	version uint64 // as far as it can be believed
	mine    bool   // a copy has the bytes of the Op's key
	other   bool   // it is another key's
	err     error
}

// maxMendLooks is how often an Op looks again at once at a damaged record whose word differs between replicas.
const maxMendLooks = 8

// mend looks for a good copy of what m says.
func (o *Op) mend(m mending) Action {
	m.bufs, m.look = o.need().mending.bufs, o.mending.look
	o.mending, o.noting = m, false
	o.begin()
	for k := range o.Route.PG.Replicas {
		o.add(Access{Verb: Read, Space: Index, Replica: k, Off: o.slotOff(m.slot), Buf: o.mendBuf(k, 8)})
	}
	return o.post(stepMendWords)
}

func (o *Op) mendBuf(k uint8, n int) []byte {
	b := &o.mending.bufs[k]
	if cap(*b) < n {
		*b = o.env.Buf(o, n)
	}
	*b = (*b)[:n]
	return *b
}

func (o *Op) gotMendWords() Action {
	m := &o.mending
	decided := wordAt(m.bufs[0]) == m.word
	var children [MaxChain]layout.Word
	for k := range o.Route.PG.Replicas {
		switch x := wordAt(m.bufs[k]); {
		case x == m.word:
		case decided && o.Route.PG.MayBeTentative(k, x):
			children[k] = x
		default:
			return o.mendBehind(k)
		}
	}
	o.begin()
	for k, x := range children {
		if x != 0 {
			o.add(Access{Verb: Read, Space: Heap, Replica: uint8(k), Off: x.Off(),
				Buf: o.mendBuf(uint8(k), x.ReadLen())})
		}
	}
	if len(o.Accesses) == 0 {
		return o.mendCopies()
	}
	return o.post(stepMendChildren)
}

// gotMendChildren goes on if the replicas that show another word are past the one that is mended: each has had its
// record, too.
func (o *Op) gotMendChildren() Action {
	for i := range o.Accesses {
		a := &o.Accesses[i]
		if h := layout.HeadOf(a.Buf); !h.IsChildOf(o.mending.word) {
			return o.mendBehind(a.Replica)
		}
	}
	return o.mendCopies()
}

// mendBehind goes on if the k-th replica may not have had the record.
func (o *Op) mendBehind(k uint8) Action {
	m := &o.mending
	if k == 0 && o.Kind == Settle {
		return o.answerAfterSync(nil) // the intent has gone, and the place of the record before with it
	}
	m.look++
	undecided := o.isSpeculative() && m.word.State() == layout.Live && m.off == m.word.Off() &&
		wordAt(m.bufs[0]) != m.word
	switch {
	case o.env.ReadOnly() || m.look%maxMendLooks == 0:
		return o.again(Backoff) // its writer is at work, or somebody else goes on for it
	case o.Kind == Scan && undecided && m.look > 1 && o.Route.PG.MayBeTentative(0, wordAt(m.bufs[0])):
		return o.mendDecided(m.word, wordAt(m.bufs[0]))
	case o.Kind == Scan:
		return o.sync(m.slot, 1, stepReadSegment)
	case undecided && o.lock == 0:
		return o.confirmDamaged(m.slot, m.word)
	}
	return o.sync(m.slot, 1, stepStart)
}

func (o *Op) mendCopies() Action {
	m := &o.mending
	o.begin()
	for k := range o.Route.PG.Replicas {
		o.add(Access{Verb: Read, Space: Heap, Replica: k, Off: m.off, Buf: o.mendBuf(k, len(m.into))})
	}
	return o.post(stepMendCopies)
}

func (o *Op) gotMendCopies() Action {
	m := &o.mending
	var good []byte
	for k := range o.Route.PG.Replicas {
		if good = m.good(m.bufs[k]); good != nil {
			break
		}
	}
	if good == nil {
		return m.then(true)
	}
	copy(m.into, good)
	good = m.into[:len(good)]
	o.begin()
	for k := range o.Route.PG.Replicas {
		if !bytes.Equal(m.bufs[k][:len(good)], good) && !o.env.ReadOnly() {
			o.add(Access{Verb: Write, Space: Heap, Replica: k, Off: m.off, Buf: good})
		}
	}
	if len(o.Accesses) == 0 {
		return m.then(false)
	}
	o.Mended += int32(len(o.Accesses))
	return o.post(stepMendWrite)
}

// goodRecord judges copies of the record that w names in slot: whole, and of a key that belongs there, since the place
// has had other records before. If nothing but the bytes of the Op's own key is damaged, the key itself is what is
// lacking.
func (o *Op) goodRecord(w layout.Word, slot uint8) func(b []byte) []byte {
	return func(b []byte) []byte {
		r, err := layout.ParseLinked(b)
		if err != nil && o.Key != nil {
			if b = slices.Clone(b); layout.MendKey(b, o.Key) {
				r, err = layout.ParseLinked(b)
			}
		}
		if err != nil || r.Flags&layout.FlagChunk != 0 || !o.belongs(r.Key, w, slot) {
			return nil
		}
		return b[:layout.RecordLen(len(r.Key), len(r.Value))]
	}
}

// belongs reports whether a lookup of key would come to slot, which holds w.
func (o *Op) belongs(key []byte, w layout.Word, slot uint8) bool {
	hash := o.env.HashOf(key)
	home, stash := layout.GroupOff(hash, o.Route.Segments)
	base := o.slotOff(slot) - layout.SlotOff(int(slot%StashSlot))
	return layout.FP(hash) == w.FP() && (base == o.Route.ShardOff+home || base == o.Route.ShardOff+stash)
}

// mendCandidate looks for a good copy of the i-th candidate's record, then goes on.
func (o *Op) mendCandidate(i int, then func() Action) Action {
	slot := o.cand[i]
	w := o.wordOf(slot, 0)
	return o.mend(mending{slot: slot, word: w, off: w.Off(), into: o.recAt(i), good: o.goodRecord(w, slot),
		then: func(gone bool) Action {
			if gone {
				_, err := layout.ParseLinked(o.recAt(i))
				o.ruins = append(o.ruins, o.ruinOf(w, err))
			}
			return then()
		}})
}

// ruinOf is the record under w, of which mend has found no good copy.
func (o *Op) ruinOf(w layout.Word, err error) ruin {
	if err == nil {
		err = &layout.CorruptError{What: "record", Check: "no key of this slot"}
	}
	x := ruin{word: w, err: fmt.Errorf("pg %d: record at %#x: no whole copy on %d replicas: %w", o.Route.PG.ID, w.Off(),
		o.Route.PG.Replicas, err)}
	most := o.lastVersion()
	for k := range o.Route.PG.Replicas {
		b := o.mending.bufs[k]
		x.mine = x.mine || layout.HasKey(b, o.Key)
		if len(b) >= layout.RecordHeaderSize {
			if v := layout.HeadOf(b).Version; v < most {
				x.version = max(x.version, v)
			}
		}
	}
	return x
}

// lastVersion bounds versions of records whose CRC was not looked at, or is wrong. A version far ahead would take the
// clock of versions with it.
func (o *Op) lastVersion() uint64 { return layout.VersionAt((o.env.NowMillis() + 600_000) * 1e6) }

// ruinUnder is what is known of the record under w, nil if that is not known to be ruined.
func (o *Op) ruinUnder(w layout.Word) *ruin {
	for i := range o.ruins {
		if o.ruins[i].word == w {
			return &o.ruins[i]
		}
	}
	return nil
}

// ruined finds a ruined record among the candidates: that of the Op's key, if one of them is.
func (o *Op) ruined() (slot uint8, x *ruin) {
	for _, s := range o.cand {
		if y := o.ruinUnder(o.wordOf(s, 0)); y != nil && !y.other && (x == nil || y.mine) {
			slot, x = s, y
		}
	}
	return slot, x
}

// overRuin acts on the ruined record of the Op's key. A write that does not ask what it says takes its word away; to
// all else the key is damaged.
func (o *Op) overRuin(slot uint8, x *ruin) Action {
	blind := o.Kind == Put || o.Kind == Delete || o.Kind == Prepare && o.Txn.Effect != KeepKey
	if !blind || o.Cond != Always || x.word.State() != layout.Live {
		return o.finish(x.err)
	}
	o.env.Forget(o)
	o.take(Hint{Word: x.word, Version: x.version, Slot: slot})
	switch o.Kind {
	case Delete:
		return o.casDelete()
	case Prepare:
		return o.place(nil)
	}
	return o.update()
}

// mendChunk looks for a good copy of the i-th chunk of the value that is being read, in buffer 1+k, then goes on.
func (o *Op) mendChunk(k, i int, off uint64, err error) Action {
	good := func(b []byte) []byte {
		r, err := o.chunkAt(b, i)
		if err != nil {
			return nil
		}
		return b[:layout.RecordLen(0, len(r.Value))]
	}
	return o.mend(mending{slot: o.slot, word: o.x, off: off, into: o.recAt(1 + k), good: good,
		then: func(gone bool) Action {
			if gone {
				o.parts = nil
				return o.finish(fmt.Errorf("pg %d: chunk %d at %#x: no whole copy on %d replicas: %w", o.Route.PG.ID, i,
					off, o.Route.PG.Replicas, err))
			}
			return o.gotChunks()
		}})
}

// mendStands looks for a good copy of the record that an intent stands for, then goes on with then.
func (o *Op) mendStands(named layout.Word, then func(gone bool) Action) Action {
	m := &o.met
	return o.mend(mending{slot: o.slot, word: m.word, off: named.Off(), into: m.recs[0],
		good: o.goodRecord(m.word, o.slot), then: then})
}

// mendSync looks for a good copy of what a sync has found damaged at R[k-1], though that names it: every replica before
// has had it, and R[k], of which mine are the bytes, if they are those of the same record and not of the place's life
// before. It goes on with the good one in prev. If it is ruined R[k] gets the word all the same, and what R[k-1] has
// unless its own bytes are as bad: whoever looks there learns that the record is damaged, and not that there is no such
// key.
func (o *Op) mendSync(off uint64, mine, prev []byte, then func(ruined bool) Action) Action {
	m := &o.need().mending
	m.off, m.mine, m.into, m.then = off, mine, prev, then
	o.begin()
	for k := range o.syncK {
		o.add(Access{Verb: Read, Space: Heap, Replica: k, Off: off, Buf: o.mendBuf(k, len(prev))})
	}
	return o.post(stepMendSync)
}

// isWhole reports whether a record is at the start of b, whosever it is.
func isWhole(b []byte) bool {
	_, err := layout.ParseLinked(b)
	return err == nil
}

func (o *Op) gotMendSync() Action {
	m := &o.mending
	var good []byte
	whole := func(b []byte) []byte {
		r, err := layout.ParseLinked(b)
		if err != nil {
			return nil
		}
		return b[:layout.RecordLen(len(r.Key), len(r.Value))]
	}
	for k := range o.syncK {
		if good = whole(m.bufs[k]); good != nil && (k == 0 || !o.isSpeculative() || layout.SameRecord(good, m.into)) {
			break
		}
		good = nil
	}
	if good == nil && len(m.mine) >= layout.RecordHeaderSize {
		if good = whole(m.mine); good != nil && !layout.SameRecord(good, m.into) {
			good = nil
		}
	}
	if good == nil {
		return m.then(true)
	}
	copy(m.into, good)
	good = m.into[:len(good)]
	o.begin()
	for k := range o.syncK {
		if !bytes.Equal(m.bufs[k][:len(good)], good) {
			o.add(Access{Verb: Write, Space: Heap, Replica: k, Off: m.off, Buf: good})
		}
	}
	if len(o.Accesses) == 0 {
		return m.then(false)
	}
	o.Mended += int32(len(o.Accesses))
	return o.post(stepMendWrite)
}
