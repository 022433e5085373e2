// Package layout defines every byte that lives in remote memory. There are the slot word, the group and its header
// and lock words, the segment, the record and the chunk manifest. There are also the intent and status word of a
// transaction and the region header. The package also defines the mapping from a key's hash to them.
//
// It is pure: of the project it imports only what takes CRCs. It allocates nothing on the hot
// path and does no I/O. Everything it parses is hostile until checked; a failed
// check is a [*CorruptError], never a panic.
//
// Start with [Word], [ParseRecord] and [GroupOff]. Values and functions may be used
// concurrently; parsed views alias the caller's buffer. All integers are
// little-endian. The slot word descends from RACE (ATC'21) and FUSEE (FAST'23);
// ver, the nonce and the size code are ours (docs/protocol.md).
package layout

import (
	"fmt"
	"math/bits"
)

// Sizes in bytes unless the name says otherwise.
const (
	UnitSize    = 64
	ExtentUnits = 1 << 18
	ExtentSize  = ExtentUnits * UnitSize

	GroupSize      = 256
	GroupSlots     = 30
	GroupLockOff   = 8
	GroupSlotsOff  = 16
	SegmentGroups  = 16 // home groups; the stash group follows them
	SegmentSize    = (SegmentGroups + 1) * GroupSize
	StashGroup     = SegmentGroups
	RegionPageSize = 4096
	// MaxGrowth bounds n, where a shard's new array has n times the segments of the old one. GroupOff takes what is
	// in one segment of the old array to n segments of the new one, side by side.
	MaxGrowth = 127

	RecordHeaderSize = 32
	MaxKeyLen        = 1<<16 - 1
	MinKeyLen        = 1
	// MaxValueLen is the longest value that a namespace may allow, and DefaultMaxValue what one allows that says
	// nothing. Up to MaxTailLen bytes of a record's value are not the user's.
	MaxValueLen     = 512 << 20
	DefaultMaxValue = 64 << 20
	MaxTailLen      = 12
	// MaxRecordSize is the longest record one READ fetches.
	MaxRecordSize = 31 << 17
	// ChunkSize is what a chunk record of a value too long for one record holds, unless its manifest says less.
	ChunkSize = 2 << 20
	// ChunkPayload is what it holds if it fills a place of 2 MiB.
	ChunkPayload = ChunkSize - RecordHeaderSize
	// MaxChunks bounds the chunks of a value.
	MaxChunks = (MaxValueLen + MaxTailLen + ChunkPayload - 1) / ChunkPayload

	VerMod = 1 << 10
	// WordLifeEpochs is how long, in reclaim epochs, no slot repeats a word (I5)
	// and so how long a cached word may serve as an expectation.
	WordLifeEpochs = 1000

	FormatVersion = 1
	// FormatPinned is that of records which are pinned; see RecordHeader.
	FormatPinned = 2
	// FormatStub is that of records whose values lie in the tier; see Stub.
	FormatStub = 3
	// FormatChild is that of records which name their parent; see RecordHeader.
	FormatChild = 4
)

// State is a slot word's state. Its zero value, EMPTY, is also the state of
// memory that was never used.
type State uint8

const (
	Empty  State = 0
	Live   State = 1
	Frozen State = 2 // readable, not writable
	Moved  State = 3 // look in the child shard or target placement group
)

func (s State) String() string {
	return [...]string{"EMPTY", "LIVE", "FROZEN", "MOVED"}[s&3]
}

// Word is one slot word: what a CAS swings.
//
//	63  62 61       52 51      40 39      32 31                    0
//	+-----+-----------+----------+----------+-----------------------+
//	|state|  ver (10) | fp (12)  | size (8) |       unit (32)       |
//	+-----+-----------+----------+----------+-----------------------+
//
//	state  see State
//	ver    (ver of the place's previous linked life + 1) mod 1024
//	fp     12 hash bits; a filter, never proof of a match
//	size   code of the bytes to READ, see SizeOf
//	unit   the record's address in the placement group, in 64-byte units
//
// An EMPTY word keeps unit and ver of the record it replaced, as a nonce. It keeps the low 20 bits of the deleter's
// session id in fp and size. All zero: never used. Vectors: testdata/word.
type Word uint64

const (
	wordUnitBits  = 32
	wordSizeShift = 32
	wordFPShift   = 40
	wordVerShift  = 52
	wordStShift   = 62
)

const (
	_ = uint(64 - wordStShift - 2)
	_ = uint(wordStShift + 2 - 64)
)

// MakeLive builds the LIVE word of a record of size code at unit.
func MakeLive(ver uint16, fp uint16, code uint8, unit uint32) Word {
	return Word(Live)<<wordStShift | Word(ver&(VerMod-1))<<wordVerShift |
		Word(fp&0xfff)<<wordFPShift | Word(code)<<wordSizeShift | Word(unit)
}

func (w Word) State() State { return State(w >> wordStShift) }
func (w Word) Ver() uint16  { return uint16(w>>wordVerShift) & (VerMod - 1) }
func (w Word) FP() uint16   { return uint16(w>>wordFPShift) & 0xfff }
func (w Word) Code() uint8  { return uint8(w >> wordSizeShift) }
func (w Word) Unit() uint32 { return uint32(w) }

// Off is the record's byte offset in the region.
func (w Word) Off() uint64 { return uint64(w.Unit()) * UnitSize }

// ReadLen is the number of bytes a READ of the record fetches.
func (w Word) ReadLen() int { return SizeOf(w.Code()) }

// Units is the length of the record's place.
func (w Word) Units() uint32 { return UnitsOf(w.Code()) }

// Readable reports whether the word names a record: LIVE or FROZEN.
func (w Word) Readable() bool { s := w.State(); return s == Live || s == Frozen }

// Delete is the EMPTY word that session leaves in place of w.
func (w Word) Delete(session uint32) Word {
	return w&(Word(VerMod-1)<<wordVerShift|0xffffffff) | Word(session&0xfffff)<<wordSizeShift
}

// WithState is w in another state; LIVE, FROZEN and MOVED only.
func (w Word) WithState(s State) Word { return w&^(3<<wordStShift) | Word(s)<<wordStShift }

// Deleter is the low 20 bits of the session id that an EMPTY word carries.
func (w Word) Deleter() uint32 { return uint32(w>>wordSizeShift) & 0xfffff }

func (w Word) String() string {
	switch {
	case w == 0:
		return "zero"
	case w.State() == Empty:
		return fmt.Sprintf("EMPTY was u%d v%d by s%d", w.Unit(), w.Ver(), w.Deleter())
	default:
		return fmt.Sprintf("%v u%d v%d fp=%03x %dB", w.State(), w.Unit(), w.Ver(), w.FP(), w.ReadLen())
	}
}

// SizeOf is the number of bytes that size code c stands for:
// (16 + (c & 15)) << ((c >> 4) + 2), 64 B to 3.9 MiB.
func SizeOf(c uint8) int { return (16 + int(c&15)) << (c>>4 + 2) }

// UnitsOf is SizeOf in whole units.
func UnitsOf(c uint8) uint32 { return uint32(SizeOf(c)+UnitSize-1) / UnitSize }

// CodeFor is the least code that holds n bytes; over-read is at most 6.25 %.
// ok is false when n exceeds MaxRecordSize.
func CodeFor(n int) (c uint8, ok bool) {
	if n <= 64 {
		return 0, true
	}
	if n > MaxRecordSize {
		return 0, false
	}
	e := bits.Len(uint(n-1)) - 5 // n-1 in [16<<e, 32<<e)
	m := (n + 1<<e - 1) >> e     // 17..32
	if m == 32 {
		m, e = 16, e+1
	}
	return uint8((e-2)<<4 | (m - 16)), true
}

// CorruptError says that bytes read from remote memory fail a check.
type CorruptError struct {
	What      string // "record", "group", …
	Off       uint64 // where in it, bytes
	Check     string
	Got, Want uint64
	Bytes     []byte // a copy of at most 64 bytes around it
}

func (e *CorruptError) Error() string {
	return fmt.Sprintf("corrupt %s at +%d: %s: got %#x, want %#x", e.What, e.Off, e.Check, e.Got, e.Want)
}

// corrupt keeps errors off the heap of the success path; a failed check copies
// a few bytes for the operator.
func corrupt(what string, off uint64, check string, got, want uint64, b []byte) error {
	lo := min(int(off)&^63, len(b))
	return &CorruptError{What: what, Off: off, Check: check, Got: got, Want: want,
		Bytes: append([]byte(nil), b[lo:min(lo+64, len(b))]...)}
}
