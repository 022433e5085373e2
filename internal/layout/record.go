package layout

import (
	"bytes"
	"encoding/binary"

	"github.com/kvd-project/kvd/internal/bulk"
)

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

// Type is what a value is, three bits of RecordFlags: 0 is any bytes, all else a collection in some encoding. The store
// itself treats all alike; client.Type has the names.
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
//	fmt      FormatVersion, FormatPinned, FormatStub or FormatChild
//	expiry   Unix milliseconds; 0 = none
//	CRC      CRC-32C of bytes [0,24), [28,32) and key and value
//	writer   session that wrote it
//
// With FormatPinned the upper 10 bits of vlen and the upper 22 of expiry are Pinned's lower and upper bits. It is not
// 0. No other byte has another meaning. Chunks and intents have FormatVersion. With FormatStub the value is a Stub.
//
// With FormatChild, writer is Parent's unit. The upper 20 bits of expiry are Parent's ver, its size code and two bits
// that are zero. Such a record is not pinned, and the session that wrote it is not in it.
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
	// Pinned, if not 0, is until when eviction passes over the record, in Unix seconds.
	Pinned uint32
	// Stub: the value is a Stub. A stub is not pinned.
	Stub bool
	// Parent, if not 0, is the word that the record's own word replaces, as [Word.AsParent] has it.
	Parent Word
}

// AsParent is what a record says of its parent w: unit, ver and size. State and fp are LIVE and the key's.
func (w Word) AsParent() Word { return w & parentMask }

// IsChildOf reports whether the record says that its word replaces w, and nothing else. Only LIVE words have children.
func (r *RecordHeader) IsChildOf(w Word) bool {
	return r.Parent != 0 && w.State() == Live && r.Parent == w.AsParent()
}

const (
	parentMask = Word(VerMod-1)<<wordVerShift | 0xff<<wordSizeShift | (1<<wordUnitBits - 1)

	// childExpiryBits are what expiry keeps of its own beside Parent.
	childExpiryBits = 44
	childVerShift   = 64 - 10
	childSizeShift  = childVerShift - 8
	childRsv        = 3 << childExpiryBits

	// MaxChildExpiry bounds the expiry of a record that names its parent, Unix ms: it is in the year 2527.
	MaxChildExpiry = 1<<childExpiryBits - 1
)

const _ = uint(childSizeShift - childExpiryBits - 2)

const (
	// pinnedLenBits and pinnedExpiryBits are what vlen and expiry keep of theirs beside Pinned.
	pinnedLenBits    = 22
	pinnedExpiryBits = 42

	// MaxPinnedExpiry bounds the expiry of a pinned record, Unix ms: it is in the year 2109. MaxPinned is the last time
	// until which a record may be pinned, Unix seconds.
	MaxPinnedExpiry = 1<<pinnedExpiryBits - 1
	MaxPinned       = 1<<32 - 1
)

const _ = uint(1<<pinnedLenBits - 1 - MaxRecordSize)
const _ = uint(pinnedLenBits + pinnedExpiryBits - 64)

// Record is a parsed record; Key and Value alias the buffer.
type Record struct {
	RecordHeader
	Key, Value []byte
}

// IsPinned reports whether eviction is to pass over the record at nowMillis (Unix ms).
func (r *RecordHeader) IsPinned(nowMillis uint64) bool { return r.PinnedMillis() > nowMillis }

// PinnedMillis is Pinned in Unix ms.
func (r *RecordHeader) PinnedMillis() uint64 { return uint64(r.Pinned) * 1000 }

// Expired reports whether the record's time has come at nowMillis (Unix ms).
func (r *RecordHeader) Expired(nowMillis uint64) bool { return r.Expiry != 0 && r.Expiry <= nowMillis }

// RecordLen is the encoded length of a record in bytes.
func RecordLen(keyLen, valueLen int) int { return RecordHeaderSize + keyLen + valueLen }

// EncodeRecord writes the record to b, which must hold RecordLen bytes, and
// returns its length. h's KeyLen and ValueLen are taken from key and value, which share no
// bytes with b.
func EncodeRecord(b []byte, h RecordHeader, key, value []byte) int {
	n := RecordLen(len(key), len(value))
	_ = b[n-1]
	EncodeHead(b, h, key, len(value))
	at := RecordLen(len(key), 0)
	// The CRC of a short value is taken with the key's. A long one is copied in parts that stay in the caches, since b
	// is read next.
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
	SealHead(b, crc)
	return n
}

// EncodeHead writes a record's header, without its CRC, and its key to b, which must hold RecordLen(len(key), 0) bytes.
// The value, of valueLen bytes, is written behind it by somebody else. See [HeadCRC]. A pinned record expires at
// MaxPinnedExpiry at the latest and names no parent. MaxChildExpiry bounds that of
// a record that names its parent.
func EncodeHead(b []byte, h RecordHeader, key []byte, valueLen int) {
	binary.LittleEndian.PutUint64(b[0:], h.Version)
	binary.LittleEndian.PutUint16(b[8:], uint16(len(key)))
	b[10] = byte(h.Flags)
	b[11] = FormatVersion
	n, expiry, writer := uint32(valueLen), h.Expiry, h.Writer
	switch {
	case h.Stub:
		b[11] = FormatStub
	case h.Parent != 0 && h.Pinned == 0:
		b[11] = FormatChild
		writer = h.Parent.Unit()
		expiry = min(expiry, MaxChildExpiry) | uint64(h.Parent.Ver())<<childVerShift |
			uint64(h.Parent.Code())<<childSizeShift
	case h.Pinned != 0:
		b[11] = FormatPinned
		n |= h.Pinned << pinnedLenBits
		expiry = min(expiry, MaxPinnedExpiry) | uint64(h.Pinned>>(32-pinnedLenBits))<<pinnedExpiryBits
	}
	binary.LittleEndian.PutUint32(b[12:], n)
	binary.LittleEndian.PutUint64(b[16:], expiry)
	binary.LittleEndian.PutUint32(b[28:], writer)
	copy(b[32:], key)
}

// HeadCRC is what the CRC of a record's value goes on from: head is its header and its key.
func HeadCRC(head []byte) uint32 { return recordCRC(head) }

// ValueCRC is crc, which HeadCRC or an earlier part has brought, gone on over a part of the record's value.
func ValueCRC(crc uint32, part []byte) uint32 { return bulk.CRC(crc, part) }

// HeadSum is the CRC of the whole record that its header says.
func HeadSum(head []byte) uint32 { return binary.LittleEndian.Uint32(head[24:]) }

// SealHead completes a header with the CRC of the whole record.
func SealHead(head []byte, crc uint32) { binary.LittleEndian.PutUint32(head[24:], crc) }

// VersionStep is the distance of two versions of one writer. Versions are a hybrid logical clock: a multiple of this
// that follows the wall clock, above 16 bits that tell writers apart.
const VersionStep = 1 << 16

// VersionAt is the least version of what is written at a time of the wall clock. For a duration it is the distance
// of versions that are that far apart.
func VersionAt(unixNanos uint64) uint64 { return unixNanos >> 14 * VersionStep }

// SetHeadVersion changes an encoded header's version in place. Its CRC is to be taken anew.
func SetHeadVersion(head []byte, version uint64) { binary.LittleEndian.PutUint64(head, version) }

// SetVersion changes an encoded record's version and CRC in place.
func SetVersion(b []byte, version uint64) {
	SetHeadVersion(b, version)
	binary.LittleEndian.PutUint32(b[24:], recordCRC(b))
}

// DropParent changes an encoded record so that it names no parent, and takes its CRC anew.
func DropParent(b []byte) {
	h := HeadOf(b)
	h.Parent = 0
	k := RecordLen(int(h.KeyLen), 0)
	EncodeHead(b, h, b[RecordHeaderSize:k], int(h.ValueLen))
	SealHead(b, recordCRC(b))
}

// recordCRC is the CRC of all of b but the CRC in it.
func recordCRC(b []byte) uint32 { return bulk.CRC(bulk.CRC(0, b[:24]), b[28:]) }

// HeadOf is the header at the start of b, unchecked: a hint while the record may change. b has RecordHeaderSize bytes
// at least.
func HeadOf(b []byte) (h RecordHeader) {
	h.Version, h.KeyLen = binary.LittleEndian.Uint64(b), binary.LittleEndian.Uint16(b[8:])
	h.Flags, h.Writer = RecordFlags(b[10]), binary.LittleEndian.Uint32(b[28:])
	h.ValueLen, h.Expiry = binary.LittleEndian.Uint32(b[12:]), binary.LittleEndian.Uint64(b[16:])
	switch b[11] {
	case FormatStub:
		h.Stub = true
	case FormatChild:
		h.Parent = Word(h.Expiry>>childVerShift)<<wordVerShift |
			Word(uint8(h.Expiry>>childSizeShift))<<wordSizeShift | Word(h.Writer)
		h.Expiry &= MaxChildExpiry
		h.Writer = 0
	case FormatPinned:
		h.Pinned = h.ValueLen>>pinnedLenBits | uint32(h.Expiry>>pinnedExpiryBits)<<(32-pinnedLenBits)
		h.ValueLen &= 1<<pinnedLenBits - 1
		h.Expiry &= 1<<pinnedExpiryBits - 1
	}
	return h
}

// EncodedLen is the encoded length of r's record in bytes.
func (r *RecordHeader) EncodedLen() int { return RecordLen(int(r.KeyLen), int(r.ValueLen)) }

// ParseRecord checks and parses the record at the start of b. b may be longer
// than the record. A stub is refused: see [ParseLinked]. Errors are *CorruptError; they are ordinary while the bytes
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
	if err := r.parse(b); err != nil || !r.Stub {
		return err
	}
	return refuseStub(b)
}

// refuseStub is for who asks for a record, and has no use for a stub.
func refuseStub(b []byte) error {
	return corrupt("record", 11, "format version", uint64(b[11]), FormatVersion, b)
}

func (r *Record) parse(b []byte) error {
	if len(b) < RecordHeaderSize {
		return corrupt("record", 0, "length", uint64(len(b)), RecordHeaderSize, b)
	}
	r.RecordHeader = HeadOf(b)
	n := uint64(RecordHeaderSize) + uint64(r.KeyLen) + uint64(r.ValueLen)
	if n > uint64(len(b)) {
		return corrupt("record", 8, "key and value longer than the place", n, uint64(len(b)), b)
	}
	if got, want := recordCRC(b[:n]), binary.LittleEndian.Uint32(b[24:]); got != want {
		return corrupt("record", 24, "CRC-32C", uint64(got), uint64(want), b)
	}
	k := RecordHeaderSize + int(r.KeyLen)
	r.Key = b[RecordHeaderSize:k:k]
	r.Value = b[k:n:n]
	return r.checkHead(b)
}

// ParseApart is [Record.Parse] for a record whose value is apart from head, its header and its key. crc is the CRC of
// value that goes on from [HeadCRC] of head.
func (r *Record) ParseApart(head, value []byte, crc uint32) error {
	if len(head) < RecordHeaderSize {
		return corrupt("record", 0, "length", uint64(len(head)), RecordHeaderSize, head)
	}
	r.RecordHeader = HeadOf(head)
	if k := RecordHeaderSize + int(r.KeyLen); k != len(head) || uint64(r.ValueLen) != uint64(len(value)) {
		return corrupt("record", 8, "key and value of other lengths", uint64(k)+uint64(r.ValueLen),
			uint64(len(head)+len(value)), head)
	}
	if want := binary.LittleEndian.Uint32(head[24:]); crc != want {
		return corrupt("record", 24, "CRC-32C", uint64(crc), uint64(want), head)
	}
	if r.Stub {
		return refuseStub(head)
	}
	r.Key, r.Value = head[RecordHeaderSize:len(head):len(head)], value
	return r.checkHead(head)
}

// ParseHead is [Record.Parse] for the start of a record in a place of n bytes: b has the header and the key at least.
// Value is nil. It may be a stub, whose head tells as much. The CRC is not looked at, since it covers the value.
func (r *Record) ParseHead(b []byte, n int) error {
	if len(b) < RecordHeaderSize {
		return corrupt("record", 0, "length", uint64(len(b)), RecordHeaderSize, b)
	}
	r.RecordHeader = HeadOf(b)
	k := RecordHeaderSize + int(r.KeyLen)
	if uint64(k)+uint64(r.ValueLen) > uint64(n) || k > len(b) {
		return corrupt("record", 8, "key and value longer than the place", uint64(k)+uint64(r.ValueLen), uint64(n), b)
	}
	r.Key, r.Value = b[RecordHeaderSize:k:k], nil
	return r.checkHead(b)
}

// checkHead checks what HeadOf has made of the header at the start of b.
func (r *Record) checkHead(b []byte) error {
	switch {
	case b[11] < FormatVersion || b[11] > FormatChild:
		return corrupt("record", 11, "format version", uint64(b[11]), FormatVersion, b)
	case b[11] == FormatPinned && (r.Pinned == 0 || r.Flags&(FlagIntent|FlagChunk) != 0):
		return corrupt("record", 11, "pinned until, of flags", uint64(r.Pinned), uint64(r.Flags), b)
	case b[11] == FormatChild && (r.Parent.Unit() == 0 || r.Flags&(FlagIntent|FlagChunk) != 0):
		return corrupt("record", 11, "child of the unit, of flags", uint64(r.Parent.Unit()), uint64(r.Flags), b)
	case b[11] == FormatChild && binary.LittleEndian.Uint64(b[16:])&childRsv != 0:
		return corrupt("record", 16, "reserved bits of a child's expiry", binary.LittleEndian.Uint64(b[16:]), 0, b)
	case r.Stub && r.Flags&^FlagsOfValue != 0:
		return corrupt("record", 10, "flags of a stub", uint64(r.Flags), 0, b)
	case r.Flags&recordFlagsRsv != 0:
		return corrupt("record", 10, "reserved flags", uint64(r.Flags), 0, b)
	case r.Flags&FlagIntent != 0 && (r.Flags != FlagIntent || r.Expiry != 0):
		return corrupt("record", 10, "flags of an intent", uint64(r.Flags), uint64(FlagIntent), b)
	case r.Flags&FlagChunk != 0 && r.Flags.TypeOf() != 0:
		return corrupt("record", 10, "chunk with a type", uint64(r.Flags), 0, b)
	case (r.KeyLen == 0) != (r.Flags&FlagChunk != 0):
		return corrupt("record", 8, "key length", uint64(r.KeyLen), MinKeyLen, b)
	}
	return nil
}

// HasKey reports whether the record at the start of b, which may be damaged elsewhere, has the bytes of key for its
// key.
func HasKey(b, key []byte) bool {
	return len(b) >= RecordHeaderSize+len(key) && int(binary.LittleEndian.Uint16(b[8:])) == len(key) &&
		string(b[RecordHeaderSize:][:len(key)]) == string(key)
}

// SameRecord reports whether whole, a good record, is what is in damaged, by what the two have in common. No two
// records share a CRC by chance, nor all of a header before it and a key.
func SameRecord(whole, damaged []byte) bool {
	k := RecordHeaderSize + int(HeadOf(whole).KeyLen)
	return bytes.Equal(whole[24:28], damaged[24:28]) || bytes.Equal(whole[:24], damaged[:24]) &&
		bytes.Equal(whole[28:k], damaged[28:min(k, len(damaged))])
}

// MendKey makes the record at the start of b whole if all that is damaged is what its key tells. That is the key's
// bytes, their number and the format's version. The CRC proves it. If it is not so, b stays as it is.
func MendKey(b, key []byte) bool {
	if len(b) < RecordHeaderSize+len(key) {
		return false
	}
	old := append([]byte(nil), b[:RecordHeaderSize+len(key)]...)
	binary.LittleEndian.PutUint16(b[8:], uint16(len(key)))
	copy(b[RecordHeaderSize:], key)
	for _, b[11] = range []byte{FormatVersion, FormatPinned, FormatStub, FormatChild} {
		if _, err := ParseLinked(b); err == nil {
			return true
		}
	}
	copy(b, old)
	return false
}
