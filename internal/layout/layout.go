// Package layout defines every byte that lives in remote memory. There are the slot word, the group and its header
// and lock words, the segment, the record and the chunk manifest. There are also the intent and status word of a
// transaction and the region header. The package also defines the mapping from a key's hash to them.
//
// It is pure: of the project it imports only what takes CRCs, allocates nothing on the hot
// path and does no I/O. Everything it parses is hostile until checked; a failed
// check is a [*CorruptError], never a panic.
//
// Start with [Word], [ParseRecord] and [Locate]. Values and functions may be used
// concurrently; parsed views alias the caller's buffer. All integers are
// little-endian. The slot word descends from RACE (ATC'21) and FUSEE (FAST'23);
// ver, the nonce and the size code are ours (docs/protocol.md).
package layout

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"

	"github.com/kvd-project/kvd/internal/bulk"
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
	MaxValueLen      = 64 << 20
	// MaxRecordSize is the longest record one READ fetches.
	MaxRecordSize = 31 << 17
	// ChunkSize is the payload of one chunk record of a value too long for one
	// record.
	ChunkSize = 2 << 20

	VerMod = 1 << 10
	// WordLifeEpochs is how long, in reclaim epochs, no slot repeats a word (I5)
	// and so how long a cached word may serve as an expectation.
	WordLifeEpochs = 1000

	FormatVersion = 1
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

// ---- hash ------------------------------------------------------------------

// A 64-bit hash divides, from the top, into
//
//	63       44 43              16 15   12 11        0
//	+-----------+-----------------+-------+-----------+
//	| shard (20)|  segment (28)   |group 4|  fp (12)  |
//	+-----------+-----------------+-------+-----------+
//
// so the fingerprint is independent of what chooses shard and group.

// FP is the fingerprint of hash h.
func FP(h uint64) uint16 { return uint16(h & 0xfff) }

// MaxDepth bounds shard depth.
const MaxDepth = 20

// ShardPrefix is the top depth bits of h.
func ShardPrefix(h uint64, depth uint8) uint32 {
	if depth == 0 {
		return 0
	}
	return uint32(h >> (64 - depth))
}

// HashBit is the bit of h that a shard of the given depth splits by.
func HashBit(h uint64, depth uint8) bool { return h<<depth>>63 != 0 }

// GroupOff is the offset of h's home group within its shard of n segments, and
// StashOff that of its segment's stash group, in bytes.
func GroupOff(h uint64, segments uint32) (home, stash uint64) {
	c := (h >> 16 & 0xfffffff) * uint64(segments) >> 28
	base := c * SegmentSize
	return base + (h>>12&15)*GroupSize, base + StashGroup*GroupSize
}

// SlotOff is the offset of slot i within its group.
func SlotOff(i int) uint64 { return GroupSlotsOff + 8*uint64(i) }

// ---- group -----------------------------------------------------------------

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

// ---- record ----------------------------------------------------------------

// RecordFlags qualify a record.
type RecordFlags uint8

const (
	// FlagManifest: the value is a Manifest that names chunk records.
	FlagManifest RecordFlags = 1 << iota
	// FlagChunk: part of a long value; the key is empty and Expiry holds the
	// chunk's index. No slot names a chunk.
	FlagChunk
	// FlagUser: the value ends with four bytes that are the user's flags.
	FlagUser
	// FlagIntent: the value is an Intent, what a transaction is about to do to the key.
	FlagIntent
	// FlagNote: the value ends with eight bytes, before those of FlagUser, that are the user's note.
	FlagNote RecordFlags = 1 << 7

	typeShift = 4
	typeMask  = 7 << typeShift
	// FlagsOfValue are the flags that come with a value, whichever record it is in; the others say how it is kept.
	FlagsOfValue RecordFlags = FlagUser | FlagNote | typeMask

	recordFlagsRsv RecordFlags = 0xff &^ (FlagManifest | FlagChunk | FlagIntent | FlagsOfValue)
)

// TailLen is how many bytes stand behind the user's value.
func (f RecordFlags) TailLen() (n int) {
	if f&FlagUser != 0 {
		n = 4
	}
	if f&FlagNote != 0 {
		n += 8
	}
	return n
}

// Type is what a value is, three bits of RecordFlags: 0 is any bytes, all else a collection in some encoding. The store itself
// treats all alike; client.Type has the names.
type Type uint8

// TypeOf is the type of the value of a record with these flags.
func (f RecordFlags) TypeOf() Type { return Type(f&typeMask) >> typeShift }

// Flags are those of a record whose value is a t.
func (t Type) Flags() RecordFlags { return RecordFlags(t<<typeShift) & typeMask }

// RecordHeader is the fixed part of a record.
//
//	0        8    10  11  12       16       24     28       32
//	+--------+----+---+---+--------+--------+------+--------+-----+-------+
//	|version |klen|flg|fmt|  vlen  | expiry | CRC  | writer | key | value |
//	+--------+----+---+---+--------+--------+------+--------+-----+-------+
//
//	version  the user's compare-and-swap token
//	flg      RecordFlags, the value's Type among them; reserved bits are zero
//	fmt      FormatVersion
//	expiry   Unix milliseconds; 0 = none
//	CRC      CRC-32C of bytes [0,24), [28,32) and key and value
//	writer   session that wrote it
//
// A reader can see a record half written, or of the place's other life; the CRC,
// the whole key and the slot word together tell.
type RecordHeader struct {
	Version  uint64
	KeyLen   uint16
	Flags    RecordFlags
	ValueLen uint32
	Expiry   uint64
	Writer   uint32
}

// Record is a parsed record; Key and Value alias the buffer.
type Record struct {
	RecordHeader
	Key, Value []byte
}

// Expired reports whether the record's time has come at nowMillis (Unix ms).
func (r *RecordHeader) Expired(nowMillis uint64) bool { return r.Expiry != 0 && r.Expiry <= nowMillis }

// RecordLen is the encoded length of a record in bytes.
func RecordLen(keyLen, valueLen int) int { return RecordHeaderSize + keyLen + valueLen }

// EncodeRecord writes the record to b, which must hold RecordLen bytes, and
// returns its length. h's KeyLen and ValueLen are taken from key and value, which share no bytes with b.
func EncodeRecord(b []byte, h RecordHeader, key, value []byte) int {
	n := RecordLen(len(key), len(value))
	_ = b[n-1]
	binary.LittleEndian.PutUint64(b[0:], h.Version)
	binary.LittleEndian.PutUint16(b[8:], uint16(len(key)))
	b[10] = byte(h.Flags)
	b[11] = FormatVersion
	binary.LittleEndian.PutUint32(b[12:], uint32(len(value)))
	binary.LittleEndian.PutUint64(b[16:], h.Expiry)
	binary.LittleEndian.PutUint32(b[28:], h.Writer)
	at := 32 + copy(b[32:], key)
	// Of a short value the CRC is taken with the key's. A long one is copied in parts that stay in the caches,
	// since b is read next.
	if len(value) <= 4*UnitSize {
		at += copy(b[at:], value)
	}
	crc := recordCRC(b[:at])
	for at < n {
		part := value[len(value)-(n-at):]
		part = part[:min(len(part), bulk.StreamFrom/2)]
		crc = bulk.Copy(crc, b[at:], part)
		at += len(part)
	}
	binary.LittleEndian.PutUint32(b[24:], crc)
	return n
}

// VersionStep is the distance of two versions of one writer. Versions are a hybrid logical clock: a multiple of this that follows the
// wall clock, above 16 bits that tell writers apart.
const VersionStep = 1 << 16

// VersionAt is the least version of what is written at a time of the wall clock. For a duration it is the distance
// of versions that are that far apart.
func VersionAt(unixNanos uint64) uint64 { return unixNanos >> 14 * VersionStep }

// SetVersion changes an encoded record's version and CRC in place.
func SetVersion(b []byte, version uint64) {
	binary.LittleEndian.PutUint64(b, version)
	binary.LittleEndian.PutUint32(b[24:], recordCRC(b))
}

// recordCRC is the CRC of all of b but the CRC in it.
func recordCRC(b []byte) uint32 { return bulk.CRC(bulk.CRC(0, b[:24]), b[28:]) }

// HeadOf is the header at the start of b, unchecked: a hint while the record may change. b has RecordHeaderSize bytes at least.
func HeadOf(b []byte) RecordHeader {
	return RecordHeader{Version: binary.LittleEndian.Uint64(b), KeyLen: binary.LittleEndian.Uint16(b[8:]), Flags: RecordFlags(b[10]),
		ValueLen: binary.LittleEndian.Uint32(b[12:]), Expiry: binary.LittleEndian.Uint64(b[16:]), Writer: binary.LittleEndian.Uint32(b[28:])}
}

// ParseRecord checks and parses the record at the start of b. b may be longer
// than the record. Errors are *CorruptError; they are ordinary while the bytes
// race with a writer.
func ParseRecord(b []byte) (Record, error) {
	var r Record
	if err := r.Parse(b); err != nil {
		return Record{}, err
	}
	return r, nil
}

// Parse is [ParseRecord] where r is already. After an error r means nothing.
func (r *Record) Parse(b []byte) error {
	if len(b) < RecordHeaderSize {
		return corrupt("record", 0, "length", uint64(len(b)), RecordHeaderSize, b)
	}
	r.KeyLen = binary.LittleEndian.Uint16(b[8:])
	r.ValueLen = binary.LittleEndian.Uint32(b[12:])
	n := uint64(RecordHeaderSize) + uint64(r.KeyLen) + uint64(r.ValueLen)
	if n > uint64(len(b)) {
		return corrupt("record", 8, "key and value longer than the place", n, uint64(len(b)), b)
	}
	if got, want := recordCRC(b[:n]), binary.LittleEndian.Uint32(b[24:]); got != want {
		return corrupt("record", 24, "CRC-32C", uint64(got), uint64(want), b)
	}
	r.Version = binary.LittleEndian.Uint64(b)
	r.Flags = RecordFlags(b[10])
	r.Expiry = binary.LittleEndian.Uint64(b[16:])
	r.Writer = binary.LittleEndian.Uint32(b[28:])
	switch {
	case b[11] != FormatVersion:
		return corrupt("record", 11, "format version", uint64(b[11]), FormatVersion, b)
	case r.Flags&recordFlagsRsv != 0:
		return corrupt("record", 10, "reserved flags", uint64(r.Flags), 0, b)
	case r.Flags&FlagIntent != 0 && (r.Flags != FlagIntent || r.Expiry != 0):
		return corrupt("record", 10, "flags of an intent", uint64(r.Flags), uint64(FlagIntent), b)
	case r.Flags&FlagChunk != 0 && r.Flags.TypeOf() != 0:
		return corrupt("record", 10, "chunk with a type", uint64(r.Flags), 0, b)
	case (r.KeyLen == 0) != (r.Flags&FlagChunk != 0):
		return corrupt("record", 8, "key length", uint64(r.KeyLen), MinKeyLen, b)
	}
	k := RecordHeaderSize + int(r.KeyLen)
	r.Key = b[RecordHeaderSize:k:k]
	r.Value = b[k:n:n]
	return nil
}

// HasKey reports whether the record at the start of b, which may be damaged elsewhere, has the bytes of key for its key.
func HasKey(b, key []byte) bool {
	return len(b) >= RecordHeaderSize+len(key) && int(binary.LittleEndian.Uint16(b[8:])) == len(key) && string(b[RecordHeaderSize:][:len(key)]) == string(key)
}

// SameRecord reports whether whole, a good record, is what is in damaged, by what the two have in common. No two
// records share a CRC by chance, nor all of a header before it and a key.
func SameRecord(whole, damaged []byte) bool {
	k := RecordHeaderSize + int(HeadOf(whole).KeyLen)
	return bytes.Equal(whole[24:28], damaged[24:28]) || bytes.Equal(whole[:24], damaged[:24]) && bytes.Equal(whole[28:k], damaged[28:min(k, len(damaged))])
}

// MendKey makes the record at the start of b whole if all that is damaged is what its key tells. That is the key's
// bytes, their number and the format's version. The CRC proves it. If it is not so, b stays as it is.
func MendKey(b, key []byte) bool {
	if len(b) < RecordHeaderSize+len(key) {
		return false
	}
	old := append([]byte(nil), b[:RecordHeaderSize+len(key)]...)
	binary.LittleEndian.PutUint16(b[8:], uint16(len(key)))
	b[11] = FormatVersion
	copy(b[RecordHeaderSize:], key)
	if _, err := ParseRecord(b); err != nil {
		copy(b, old)
		return false
	}
	return true
}

// ---- manifest --------------------------------------------------------------

// Chunk names one chunk record of a long value.
type Chunk struct {
	Unit uint32
	Code uint8
	Ver  uint16 // the ver that the place would have carried in a slot word
}

// Manifest is the value of a FlagManifest record.
//
//	0        8    12   16       24
//	+--------+----+----+--------+-----------------------+----
//	| length | n  | 0  | id     | chunk 0               | …
//	+--------+----+----+--------+-----------------------+----
//	chunk:  unit u32 | code u8 | zero u8 | ver u16
//
//	id  the Version field of every chunk record, unique to this manifest
//
// Every chunk but the last holds ChunkSize bytes of the value.
type Manifest struct {
	Len    uint64
	ID     uint64
	Chunks []Chunk
}

const manifestHeaderSize = 24

// ManifestLen is the encoded length for n chunks.
func ManifestLen(n int) int { return manifestHeaderSize + 8*n }

// ChunkCount is the number of chunks of a value of n bytes.
func ChunkCount(n int) int { return (n + ChunkSize - 1) / ChunkSize }

// EncodeManifest writes m to b and returns its length.
func EncodeManifest(b []byte, m Manifest) int {
	n := ManifestLen(len(m.Chunks))
	_ = b[n-1]
	binary.LittleEndian.PutUint64(b, m.Len)
	binary.LittleEndian.PutUint32(b[8:], uint32(len(m.Chunks)))
	binary.LittleEndian.PutUint32(b[12:], 0)
	binary.LittleEndian.PutUint64(b[16:], m.ID)
	for i, c := range m.Chunks {
		p := b[manifestHeaderSize+8*i:]
		binary.LittleEndian.PutUint32(p, c.Unit)
		p[4], p[5] = c.Code, 0
		binary.LittleEndian.PutUint16(p[6:], c.Ver)
	}
	return n
}

// ParseManifest checks the value of a manifest record; chunks are checked
// against the heap [lo, hi) in units.
func ParseManifest(b []byte, lo, hi uint32) (Manifest, error) {
	if len(b) < manifestHeaderSize {
		return Manifest{}, corrupt("manifest", 0, "length", uint64(len(b)), manifestHeaderSize, b)
	}
	m := Manifest{Len: binary.LittleEndian.Uint64(b), ID: binary.LittleEndian.Uint64(b[16:])}
	n := binary.LittleEndian.Uint32(b[8:])
	if m.Len > MaxValueLen || uint64(n) != uint64(ChunkCount(int(m.Len))) || len(b) != ManifestLen(int(n)) ||
		binary.LittleEndian.Uint32(b[12:]) != 0 {
		return Manifest{}, corrupt("manifest", 8, "chunk count", uint64(n), m.Len, b)
	}
	m.Chunks = make([]Chunk, n)
	for i := range m.Chunks {
		p := b[manifestHeaderSize+8*i:]
		c := Chunk{Unit: binary.LittleEndian.Uint32(p), Code: p[4], Ver: binary.LittleEndian.Uint16(p[6:])}
		if p[5] != 0 || c.Ver >= VerMod || !InHeap(MakeLive(0, 0, c.Code, c.Unit), lo, hi) {
			return Manifest{}, corrupt("manifest", uint64(manifestHeaderSize+8*i), "chunk", uint64(c.Unit), uint64(hi), b)
		}
		if need := RecordLen(0, min(int(m.Len)-i*ChunkSize, ChunkSize)); SizeOf(c.Code) < need {
			return Manifest{}, corrupt("manifest", uint64(manifestHeaderSize+8*i), "chunk's place, bytes", uint64(SizeOf(c.Code)), uint64(need), b)
		}
		m.Chunks[i] = c
	}
	return m, nil
}

// ---- region ----------------------------------------------------------------

// RegionMagic opens every region: "kvdreg01".
const RegionMagic = 0x31306765_7264766b

// RegionHeader is written once, when the region is made, at its offset 0. The
// rest of the first RegionPageSize bytes is zero.
//
//	0       8      12     16     20     24        32       40        48    52
//	+-------+------+------+------+------+---------+--------+---------+-----+
//	| magic | fmt  | pg   | ns   |epoch | region  | index  | incarn. | CRC |
//	+-------+------+------+------+------+---------+--------+---------+-----+
//
//	region, index  lengths in bytes: the index area is [0, index), the heap
//	               [index, region)
//	CRC            CRC-32C of bytes [0,48)
type RegionHeader struct {
	PG, Namespace, Epoch    uint32
	RegionBytes, IndexBytes uint64
	Incarnation             uint64
}

const regionHeaderLen = 52

// InitRegion writes h at the start of b, which is otherwise zero.
func InitRegion(b []byte, h RegionHeader) {
	_ = b[RegionPageSize-1]
	binary.LittleEndian.PutUint64(b[0:], RegionMagic)
	binary.LittleEndian.PutUint32(b[8:], FormatVersion)
	binary.LittleEndian.PutUint32(b[12:], h.PG)
	binary.LittleEndian.PutUint32(b[16:], h.Namespace)
	binary.LittleEndian.PutUint32(b[20:], h.Epoch)
	binary.LittleEndian.PutUint64(b[24:], h.RegionBytes)
	binary.LittleEndian.PutUint64(b[32:], h.IndexBytes)
	binary.LittleEndian.PutUint64(b[40:], h.Incarnation)
	binary.LittleEndian.PutUint32(b[48:], bulk.CRC(0, b[:48]))
}

// Array is a part of a region's index: segments one after the other.
type Array struct {
	Off      uint64 // bytes, in the region
	Segments uint32
}

// RetainIndex makes an index that a former member held fit for a joiner. The words of slots stay in arrays, which
// are ascending, and everything else is zero. A lock there is of an operation that has ended without it, and a
// header may tell of what was taken back since.
func RetainIndex(index []byte, arrays []Array) error {
	end := uint64(RegionPageSize)
	for _, a := range arrays {
		if n := uint64(len(index)); a.Off < end || a.Off > n || a.Off%GroupSize != 0 || uint64(a.Segments) > (n-a.Off)/SegmentSize {
			return fmt.Errorf("array of %d segments at %#x: want one behind %#x in an index of %d bytes", a.Segments, a.Off, end, n)
		}
		end = a.Off + uint64(a.Segments)*SegmentSize
	}
	at := uint64(0)
	for _, a := range arrays {
		clear(index[at:a.Off])
		for at = a.Off; at < a.Off+uint64(a.Segments)*SegmentSize; at += GroupSize {
			clear(index[at:][:GroupSlotsOff])
		}
	}
	clear(index[at:])
	return nil
}

// Errors of ParseRegion, for errors.Is beside *CorruptError.
var (
	ErrMagic    = errors.New("not a kvd region")
	ErrFormat   = errors.New("unknown format version")
	ErrChecksum = errors.New("checksum mismatch")
)

// ParseRegion checks a region's header.
func ParseRegion(b []byte) (RegionHeader, error) {
	if len(b) < regionHeaderLen {
		return RegionHeader{}, corrupt("region", 0, "length", uint64(len(b)), regionHeaderLen, b)
	}
	if m := binary.LittleEndian.Uint64(b); m != RegionMagic {
		return RegionHeader{}, fmt.Errorf("%w: magic %#x, want %#x", ErrMagic, m, uint64(RegionMagic))
	}
	if f := binary.LittleEndian.Uint32(b[8:]); f != FormatVersion {
		return RegionHeader{}, fmt.Errorf("%w: %d, want %d", ErrFormat, f, FormatVersion)
	}
	if got, want := bulk.CRC(0, b[:48]), binary.LittleEndian.Uint32(b[48:]); got != want {
		return RegionHeader{}, fmt.Errorf("%w: region header CRC-32C %#x, want %#x", ErrChecksum, got, want)
	}
	h := RegionHeader{
		PG:          binary.LittleEndian.Uint32(b[12:]),
		Namespace:   binary.LittleEndian.Uint32(b[16:]),
		Epoch:       binary.LittleEndian.Uint32(b[20:]),
		RegionBytes: binary.LittleEndian.Uint64(b[24:]),
		IndexBytes:  binary.LittleEndian.Uint64(b[32:]),
		Incarnation: binary.LittleEndian.Uint64(b[40:]),
	}
	if h.IndexBytes < RegionPageSize || h.IndexBytes > h.RegionBytes {
		return RegionHeader{}, corrupt("region", 32, "index bytes", h.IndexBytes, h.RegionBytes, b)
	}
	return h, nil
}

// ---- errors ----------------------------------------------------------------

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
