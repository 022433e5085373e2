package index

import (
	"bytes"
	"encoding/binary"

	"github.com/kvd-project/kvd/internal/layout"
)

// Hinted is a GET, or a PUT without condition, by what is remembered of its key: what it posts
// and how the results are judged, in one round trip. An Op whose key has a hint begins with one. If
// nothing else can come of it, a caller whose provider executes within PostSend may perform one without an Op
// (see Fits): if it does not hold, nothing has happened, and the Op begins anew.
type Hinted struct {
	PG   *PG
	Off  uint64      // of the slot in the region
	X, N layout.Word // the word that the slot is to hold, and of a PUT the one to take its place
}

// Leads reports whether h names a record of the shard that r leads to.
func (h *Hint) Leads(r *Route) bool {
	return uint16(h.Shard) == uint16(r.Shard) && layout.InHeap(h.Word, r.PG.HeapLo, r.PG.HeapHi)
}

// Fits reports whether a GET, or a PUT if put is set, by h along r is over after one round trip if the hint holds.
func (h *Hint) Fits(r *Route, put bool) bool {
	if r.PG.Joining || h.Flags&HintManifest != 0 || !h.Leads(r) {
		return false
	}
	return !put || r.PG.Replicas == 1 && h.Word.State() == layout.Live
}

// SlotOff is where slot, numbered as in Hint, of the key with the hash given is in the region.
func (r *Route) SlotOff(hash uint64, slot uint8) uint64 {
	home, stash := layout.GroupOff(hash, r.Segments)
	if slot >= StashSlot {
		return r.ShardOff + stash + layout.SlotOff(int(slot-StashSlot))
	}
	return r.ShardOff + home + layout.SlotOff(int(slot))
}

// Look adds the READs of a GET, slot first: the record read behind an unchanged slot is of the
// word's life, wherever the word was learnt. The slot's word comes to word, of 8 bytes.
func (h *Hinted) Look(a []Access, word, rec []byte) []Access {
	p := h.PG.Reader()
	return append(a, Access{Verb: Read, Space: Index, Replica: p, Off: h.Off, Buf: word},
		Access{Verb: Read, Space: Heap, Replica: p, Off: h.X.Off(), Buf: rec})
}

// Seen judges what Look has brought: the record answers for key if the slot still held X and the
// record is whole. It aliases rec.
func (h *Hinted) Seen(word, rec, key []byte) (r layout.Record, ok bool) {
	if wordAt(word) != h.X || !h.X.Readable() {
		return r, false
	}
	r, err := layout.ParseRecord(rec)
	return r, err == nil && bytes.Equal(r.Key, key)
}

// Write adds the WRITEs of N's record on every replica.
func (h *Hinted) Write(a []Access, rec []byte) []Access {
	for r := range h.PG.Replicas {
		a = append(a, Access{Verb: Write, Space: Heap, Replica: r, Off: h.N.Off(), Buf: rec})
	}
	return a
}

// Swing adds the CAS at the head that decides, behind the WRITEs.
func (h *Hinted) Swing(a []Access) []Access {
	return append(a, Access{Verb: CAS, Space: Index, Off: h.Off, Expect: uint64(h.X), New: uint64(h.N)})
}

// Note adds a READ of the slot's access word, for what Env.Note is to know.
func (h *Hinted) Note(a []Access, word []byte) []Access {
	return append(a, Access{Verb: Read, Space: Heap, Replica: h.PG.Reader(), Off: h.PG.AccessOff + h.Off, Buf: word})
}

// Notes reports whether accesses to records of p are noted.
func (p *PG) Notes() bool { return p.AccessOff != 0 && !p.Joining }

// NotesExpiry reports whether a PUT over what h names has to be noted, due or not: its expiry is
// part of the access word.
func (h HintFlags) NotesExpiry(p *PG, expiry uint64) bool {
	return p.Notes() && (expiry != 0 || h&HintExpires != 0)
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
