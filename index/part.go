package index

import (
	"github.com/kvd-project/kvd/internal/layout"
)

// Part asks a Get for some bytes of the value. If that is in chunks, those that the Part touches are read, and no
// others. The bytes come to Env.Into's memory and are Op.Record.Value. A value in one record comes whole, as without
// a Part. Record.Flags has layout.FlagManifest in the first case.
//
// A Put with a Part is one of several that write a long value, see Draft.
type Part struct {
	Off, Len uint64 // bytes of the user's value; those behind its end are left out
	Tail     bool   // the tail behind the user's value instead
	// InPlace: instead of all that, the whole value is wanted where it is, if Env.Show shows that; see inplace.go.
	InPlace, Unchecked bool
	// Shown is an answer: the value lies in memory that Env.Show has shown. False: as without a Part.
	Shown   bool
	Version uint64 // that the record has to have, or the Get ends with ErrConflict; 0: any
	// Size is the length of the user's value, bytes: an answer, of a value in chunks.
	Size uint64
	// Known, if not nil, is what an earlier Get of the key learnt. If its record is the one still, the Part takes one
	// round trip. The Get leaves here what it has learnt itself, or nil.
	Known *Long

	// Draft is of a Put alone, and the other fields are of a Get. Value is the next bytes of the value, a whole number
	// of chunks unless they are its last. With Link there is no Value: the Put is that of all that was written.
	Draft *Draft
	Link  bool
}

// Long is a value in chunks, as some Get found it. It does not change.
type Long struct {
	layout.RecordHeader
	layout.Manifest
	word           layout.Word
	pg, generation uint32
}

// span is which bytes of l, its tail included, p asks for. It sets Size.
func (p *Part) span(l *Long) (lo, hi int) {
	size := l.Len - min(l.Len, uint64(l.Flags.TailLen()))
	if p.Size = size; p.Tail {
		return int(size), int(l.Len)
	}
	at := min(p.Off, size)
	return int(at), int(at + min(p.Len, size-at))
}

// knows reports whether what p knows of the Op's key is what h names. A word that was seen with this version so lately
// that no slot repeats it names that record wherever it stands.
func (o *Op) knows(h *Hint) bool {
	p := o.Part
	if p == nil || p.Known == nil || o.Route.PG.Joining || o.isExpired(&p.Known.RecordHeader) {
		return false
	}
	k := p.Known
	return h.Word == k.word && h.Version == k.RecordHeader.Version && k.pg == o.Route.PG.ID &&
		k.generation == o.Route.PG.Generation && (p.Version == 0 || p.Version == h.Version)
}

// getPart reads the slot, and the chunks of a manifest that is known, in one chain.
func (o *Op) getPart(h Hint) Action {
	o.take(h)
	k := o.Part.Known
	o.Record = layout.Record{RecordHeader: k.RecordHeader, Key: o.Key}
	o.Version, o.atA = k.RecordHeader.Version, false
	o.chunksOf(&k.Manifest)
	if !o.intoWhole(o.Part.span(k)) {
		return o.getCached(h) // nothing to read but the slot: rare, so as any other
	}
	o.begin()
	o.slotRead = true
	o.add(Access{Verb: Read, Space: Index, Replica: o.Route.PG.Reader(), Off: o.slotOff(h.Slot), Buf: o.word(0)})
	o.noteAccess(h.Slot, o.noteDue())
	return o.readWindow(o.lo / o.payload)
}

// stale starts over without a hint if the slot, read before the chunks, does not hold the word that leads to them.
func (o *Op) stale() bool {
	was := o.slotRead
	o.slotRead = false
	return was && wordAt(o.word(0)) != o.x
}

// gottenPart goes on with a value in chunks, whose manifest is m.
func (o *Op) gottenPart(m layout.Manifest) Action {
	pg, r := o.Route.PG, &o.Record
	k := &Long{RecordHeader: r.RecordHeader, Manifest: m, word: o.x, pg: pg.ID, generation: pg.Generation}
	o.Part.Known = k
	if !o.intoWhole(o.Part.span(k)) {
		r.Value = nil
		return o.finish(nil)
	}
	o.begin()
	return o.readWindow(o.lo / o.payload)
}

// intoWhole has the bytes [lo, hi) of the value read to memory of the caller, or into a buffer if there is none. It is
// false if these are none.
func (o *Op) intoWhole(lo, hi int) bool {
	if o.lo, o.hi = lo, hi; lo == hi {
		return false
	}
	if o.whole = o.env.Into(o, hi-lo); len(o.whole) < hi-lo {
		o.whole = o.env.Buf(o, hi-lo)
	}
	o.whole = o.whole[:hi-lo]
	return true
}
