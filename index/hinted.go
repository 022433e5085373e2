package index

import (
	"bytes"
	"encoding/binary"
	"slices"

	"github.com/kvd-project/kvd/internal/layout"
)

// Hinted is a GET, or a PUT without condition, by what is remembered of its key. It is what the operation posts and
// how the results are judged, in one round trip. A PUT takes one more for each further copy, which brings record
// and word there. An Op whose key has a hint begins with one. If nothing else can come of it, a caller whose
// provider executes within PostSend may perform one without an Op (see Fits). If the hint does not hold, nothing
// has happened, and the Op begins anew. If something else is in the way after the head has decided a PUT, an Op
// goes on with it (see Op.GoOn).
type Hinted struct {
	PG   *PG
	Off  uint64      // of the slot in the region
	X, N layout.Word // the word that the slot is to hold, and of a PUT the one to take its place
}

// Leads reports whether h names a record of the shard that r leads to.
func (h *Hint) Leads(r *Route) bool {
	return uint16(h.Shard) == uint16(r.Shard) && layout.InHeap(h.Word, r.PG.HeapLo, r.PG.HeapHi)
}

// Fits reports whether an operation by h along r is over as Hinted says if the hint holds. It is of kind k, which reads
// or is Put.
func (h *Hint) Fits(r *Route, k Kind) bool {
	if r.PG.Joining || h.Flags&HintManifest != 0 && !k.asks() || !h.Leads(r) {
		return false
	}
	return k.Reads() || h.Word.State() == layout.Live && !r.PG.Speculative
}

// SlotTells reports whether the key is there, as h says, while its slot holds the hint's word. So it is if h was learnt
// of a record of the key that does not expire. No slot repeats a word while a session remembers it.
func (h *Hint) SlotTells() bool { return h.Version != 0 && h.Flags&HintExpires == 0 }

// SlotOff is where slot, numbered as in Hint, of the key with the hash given is in the region.
func (r *Route) SlotOff(hash uint64, slot uint8) uint64 {
	home, stash := layout.GroupOff(hash, r.Segments)
	if slot >= StashSlot {
		return r.ShardOff + stash + layout.SlotOff(int(slot-StashSlot))
	}
	return r.ShardOff + home + layout.SlotOff(int(slot))
}

// Look adds the READs of a GET, slot first. The record read behind an unchanged slot is of the word's life,
// wherever the word was learnt. The slot's word comes to word, of 8 bytes.
func (h *Hinted) Look(a []Access, word, rec []byte) []Access {
	p := h.PG.Reader()
	a = more(a, 2)
	x := a[len(a)-2:]
	x[0].set(Read, Index, p, h.Off, word, 0, 0)
	x[1].set(Read, Heap, p, h.X.Off(), rec, 0, 0)
	return a
}

// HeadLen is how many bytes of the record an Exists of key by h READs, behind the slot: none if that tells.
func (h *Hint) HeadLen(key []byte) int {
	if h.SlotTells() {
		return 0
	}
	return min(layout.RecordLen(len(key), 0), h.Word.ReadLen())
}

// Ask adds the READs of an Exists: of the slot, and of the record's start if head is not empty. It has HeadLen bytes.
func (h *Hinted) Ask(a []Access, word, head []byte) []Access {
	if len(head) > 0 {
		return h.Look(a, word, head)
	}
	a = more(a, 1)
	a[len(a)-1].set(Read, Index, h.PG.Reader(), h.Off, word, 0, 0)
	return a
}

// Told judges what Ask has brought: the key is there, and r has what is known of its record besides the value. hint is
// that by which Ask went. A record that expires is for the caller to judge.
func (h *Hinted) Told(hint *Hint, word, head, key []byte, r *layout.Record) bool {
	if wordAt(word) != h.X || !h.X.Readable() {
		return false
	}
	if len(head) == 0 {
		*r = layout.Record{RecordHeader: layout.RecordHeader{Version: hint.Version}, Key: key}
		return true
	}
	return seenHead(head, h.X, key, r)
}

// seenHead judges the start of the record under w: it is key's, and no intent.
func seenHead(head []byte, w layout.Word, key []byte, r *layout.Record) bool {
	return r.ParseHead(head, w.ReadLen()) == nil && r.Flags&layout.FlagIntent == 0 && bytes.Equal(r.Key, key)
}

// more is a with n Accesses behind it, which are to be set.
func more(a []Access, n int) []Access { return slices.Grow(a, n)[:len(a)+n] }

// set makes x an access of which nothing is known yet, field by field: a processor that copies, in pieces of 16 bytes,
// a struct that it wrote in smaller ones a moment ago waits until all of them have left its store buffer.
func (x *Access) set(v Verb, s Space, replica uint8, off uint64, buf []byte, expect, word uint64) {
	x.Verb, x.Space, x.Replica, x.Off, x.Buf = v, s, replica, off, buf
	x.NoWait, x.Failed, x.Refused, x.IfHit, x.Apart = false, false, false, false, 0
	x.Expect, x.New, x.Found = expect, word, 0
}

// Seen judges what Look has brought: the record answers for key if the slot still held X and the
// record is whole and no stub. r, which means nothing else, aliases rec.
func (h *Hinted) Seen(word, rec, key []byte, r *layout.Record) bool {
	return wordAt(word) == h.X && h.X.Readable() && r.Parse(rec) == nil && bytes.Equal(r.Key, key)
}

// names is Seen of a record or of the stub of one. An Op knows what to do with a stub.
func (h *Hinted) names(word, rec, key []byte, r *layout.Record) bool {
	return wordAt(word) == h.X && h.X.Readable() && r.ParseLinked(rec) == nil && bytes.Equal(r.Key, key)
}

// Write adds the WRITEs of N's record on the replicas from one on that are before to.
func (h *Hinted) Write(a []Access, rec []byte, from, to uint8) []Access {
	n := len(a)
	a = more(a, int(to-from))
	for r := range a[n:] {
		a[n+r].set(Write, Heap, from+uint8(r), h.N.Off(), rec, 0, 0)
	}
	return a
}

// Swing adds the CAS at the head that decides, behind the WRITEs.
func (h *Hinted) Swing(a []Access) []Access {
	a = more(a, 1)
	a[len(a)-1].set(CAS, Index, 0, h.Off, nil, uint64(h.X), uint64(h.N))
	return a
}

// Publish adds the CAS that carries N on to replica k. It may be posted only once every earlier replica has been
// seen to take X→N. It goes behind the WRITE of N's record there: that is over without a failure, or the access
// before this one.
func (h *Hinted) Publish(a []Access, k uint8) []Access {
	a = more(a, 1)
	a[len(a)-1].set(CAS, Index, k, h.Off, nil, uint64(h.X), uint64(h.N))
	return a
}

// Note adds a READ of the slot's access word, for what Env.Note is to know.
func (h *Hinted) Note(a []Access, word []byte) []Access {
	a = more(a, 1)
	a[len(a)-1].set(Read, Heap, h.PG.Reader(), h.PG.AccessOff+h.Off, word, 0, 0)
	return a
}

// Notes reports whether accesses to records of p are noted.
func (p *PG) Notes() bool { return p.AccessOff != 0 && !p.Joining }

// NotesExpiry reports whether a PUT over what h names has to be noted, due or not: its expiry is
// part of the access word.
func (h HintFlags) NotesExpiry(p *PG, expiry uint64) bool {
	return p.Notes() && (expiry != 0 || h&HintExpires != 0)
}

// Decided is a PUT that the head has decided, as a Hinted, and that other replicas may not show yet.
type Decided struct {
	Hinted
	Route   Route
	Slot    uint8
	Flags   HintFlags // of X's record
	Version uint64    // of N's record
}

// GoOn makes of o, which has not started, the rest of a PUT that its caller began without it. The Op's sync brings
// the chain up to the head. The record is whole there, and nothing is under way. The places of d.X and d.N are o's
// from now on.
func (o *Op) GoOn(d *Decided) {
	o.Route, o.slot, o.x, o.xFlags, o.n = d.Route, d.Slot, d.X, d.Flags, d.N
	o.version, o.flags = d.Version, o.Flags&layout.FlagsOfValue
	o.havePlace, o.written, o.won = true, 1, true
	o.after = stepPublish
}

// HintFlagsOf are those of the hint of a record.
func HintFlagsOf(flags layout.RecordFlags, expiry uint64) (f HintFlags) {
	if flags&layout.FlagManifest != 0 {
		f |= HintManifest
	}
	if expiry != 0 {
		f |= HintExpires
	}
	return f
}

func wordAt(b []byte) layout.Word { return layout.Word(binary.LittleEndian.Uint64(b)) }
