package layout

import (
	"encoding/binary"
)

// Group is a view of the 256 bytes one READ fetches.
//
//	0        8        16                                     256
//	+--------+--------+--------+--------+---- … ----+--------+
//	| header | lock   | slot 0 | slot 1 |           | slot 29|
//	+--------+--------+--------+--------+---- … ----+--------+
//
// A concurrent reader sees each word whole but not the group as a snapshot.
type Group []byte

// Header is a group's first word. It changes by CAS only.
//
//	63                            32 31          10  9   8  7      0
//	+-------------------------------+--------------+---+---+--------+
//	| placement group epoch (32)    | zero         |SPL|OVF| depth  |
//	+-------------------------------+--------------+---+---+--------+
type Header uint64

const (
	// FlagOVF: keys of this group overflowed to the segment's stash group.
	FlagOVF Header = 1 << 8
	// FlagSplit: the group's move to a shard of its depth is complete. Keys of the moved set live in the child, and
	// MOVED words are left over from the move.
	FlagSplit Header = 1 << 9
	headerRsv Header = 0xffffffff &^ (0xff | FlagOVF | FlagSplit)
)

// MigratedDepth is the depth of a group all of whose keys have moved.
const MigratedDepth = 255

// WithSplit is h after a move to the depth given.
func (h Header) WithSplit(depth uint8) Header { return h&^0xff | FlagSplit | Header(depth) }

// Merge adds to h what o knows: OVF, and the latest move.
func (h Header) Merge(o Header) Header {
	h |= o & FlagOVF
	if o.Depth() > h.Depth() {
		return h&^(0xff|FlagSplit) | o&(0xff|FlagSplit)
	}
	if o.Depth() == h.Depth() {
		h |= o & FlagSplit
	}
	return h
}

// Depth is the depth of the shard that the group was last moved for, or 0.
func (h Header) Depth() uint8  { return uint8(h) }
func (h Header) OVF() bool     { return h&FlagOVF != 0 }
func (h Header) Split() bool   { return h&FlagSplit != 0 }
func (h Header) Epoch() uint32 { return uint32(h >> 32) }

// Lock is a group's insert lock: 0 when free.
//
//	63                            32 31                            0
//	+-------------------------------+-------------------------------+
//	| stamp: differs per operation  | session                       |
//	+-------------------------------+-------------------------------+
type Lock uint64

// MakeLock is the lock word that session writes; stamp differs per lane and
// operation.
func MakeLock(session, stamp uint32) Lock { return Lock(stamp)<<32 | Lock(session) }

func (l Lock) Session() uint32 { return uint32(l) }
func (l Lock) Stamp() uint32   { return uint32(l >> 32) }

func (g Group) Header() Header  { return Header(binary.LittleEndian.Uint64(g)) }
func (g Group) Lock() Lock      { return Lock(binary.LittleEndian.Uint64(g[GroupLockOff:])) }
func (g Group) Slot(i int) Word { return Word(binary.LittleEndian.Uint64(g[GroupSlotsOff+8*i:])) }

// Check reports reserved bits that are set and words that point outside the
// heap [heapLo, heapHi) in units.
func (g Group) Check(heapLo, heapHi uint32) error {
	if len(g) != GroupSize {
		return corrupt("group", 0, "length", uint64(len(g)), GroupSize, g)
	}
	if err := g.CheckHeader(); err != nil {
		return err
	}
	for i := range GroupSlots {
		if w := g.Slot(i); w.Readable() && !InHeap(w, heapLo, heapHi) {
			return corrupt("group", SlotOff(i), "slot names units outside the heap", uint64(w), uint64(heapHi), g)
		}
	}
	return nil
}

// CheckHeader reports a header that nobody writes. A header that passes says what moved and where else to look. So
// an operation that went by a damaged header would wait for a map that never comes.
func (g Group) CheckHeader() error {
	h := g.Header()
	if h&headerRsv != 0 {
		return corrupt("group", 0, "reserved header bits", uint64(h&headerRsv), 0, g)
	}
	if d := h.Depth(); d > MaxDepth && d != MigratedDepth {
		return corrupt("group", 0, "depth", uint64(d), MaxDepth, g)
	}
	return nil
}

// MoveError says of a group that tells of a move that there was none, and which word does.
func (g Group) MoveError() error {
	for i := range GroupSlots {
		if w := g.Slot(i); w.State() == Moved || w.State() == Frozen {
			return corrupt("group", SlotOff(i), "slot is "+w.State().String()+", but nothing moves", uint64(w), 0, g)
		}
	}
	return corrupt("group", 0, "header tells of a move that is none", uint64(g.Header()), 0, g)
}

// InHeap reports whether w's place lies inside [lo, hi) units.
func InHeap(w Word, lo, hi uint32) bool {
	u := w.Unit()
	return u >= lo && u < hi && w.Units() <= hi-u
}
