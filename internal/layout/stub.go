package layout

import (
	"bytes"
	"encoding/binary"
)

// MaxStubCopies bounds the copies of an object that a stub names.
const MaxStubCopies = 8

// MaxObjectSize bounds an object, in bytes: a long value with the headers of its records.
const MaxObjectSize = MaxValueLen + 16<<20

// Stub is the value of a record with FormatStub. Such a record stands in place of one whose value lies in the tier, as
// an object. The object is a record of the same key as it was in memory once.
//
//	0        8      12       16    20  21   22   24
//	+--------+------+--------+-----+---+----+----+------------------------+------+
//	|version | len  | vlen   | CRC | n |long| 0  | n × {volume u32, at u64}| tail |
//	+--------+------+--------+-----+---+----+----+------------------------+------+
//
//	version  the object's own
//	len      of the object, in bytes
//	vlen     of the user's value, in bytes: what the stub alone tells of its length
//	CRC      the one in the header of the object's record
//	n        how many copies there are, 1 to MaxStubCopies
//	long     1: the object is a manifest's record and the records of its chunks behind it
//	at       the object's address in that volume, not 0
//	tail     as in a record, with the user's flags and note
//
// The key's version, expiry, type, flags and note are those of the stub. They may have changed since.
type Stub struct {
	Version  uint64
	Len      uint32
	ValueLen uint32
	Sum      uint32
	Long     bool
	Copies   uint8                   // how many of At there are
	At       [MaxStubCopies]ObjectAt // the others are zero
}

// ObjectAt is where a copy of an object is.
type ObjectAt struct {
	Volume uint32 // the life of a tier node's folder
	At     uint64 // the address in it
}

const (
	stubHeadSize = 24
	objectAtSize = 12
)

// StubLen is the encoded length of a Stub that names that number of copies, in bytes, without its tail.
func StubLen(copies int) int { return stubHeadSize + objectAtSize*copies }

// StubOf is what names the object, at places at, that is record r. n is the length of the object in bytes, and sum the
// CRC in its header.
func StubOf(r *Record, n int, sum uint32, at ...ObjectAt) Stub {
	s := Stub{Version: r.Version, Len: uint32(n), ValueLen: uint32(max(len(r.Value)-r.Flags.TailLen(), 0)), Sum: sum,
		Copies: uint8(len(at))}
	copy(s.At[:], at)
	return s
}

// AppendStub appends the value of a stub's record to b: s, and the tail, of h.Flags.TailLen() bytes.
func AppendStub(b []byte, s *Stub, tail []byte) []byte {
	b = binary.LittleEndian.AppendUint64(b, s.Version)
	b = binary.LittleEndian.AppendUint32(b, s.Len)
	b = binary.LittleEndian.AppendUint32(b, s.ValueLen)
	b = binary.LittleEndian.AppendUint32(b, s.Sum)
	long := byte(0)
	if s.Long {
		long = 1
	}
	b = append(b, s.Copies, long, 0, 0)
	for _, c := range s.At[:s.Copies] {
		b = binary.LittleEndian.AppendUint32(b, c.Volume)
		b = binary.LittleEndian.AppendUint64(b, c.At)
	}
	return append(b, tail...)
}

// Tail is what stands behind the user's value, or behind the Stub: flags and note.
func (r *Record) Tail() []byte { return r.Value[max(len(r.Value)-r.Flags.TailLen(), 0):] }

// ParseLinked is [ParseRecord] for what the word of a slot, or an intent, may name: a record, or a stub of one.
// Record.Stub tells them apart, and [Record.Object] what a stub says. The Value of a stub is no user's value.
func ParseLinked(b []byte) (Record, error) {
	var r Record
	if err := r.ParseLinked(b); err != nil {
		return Record{}, err
	}
	return r, nil
}

// ParseLinked is the function of that name where r is already. After an error r means nothing.
func (r *Record) ParseLinked(b []byte) error {
	if err := r.parse(b); err != nil {
		return err
	}
	if r.Stub {
		_, err := r.Object()
		return err
	}
	return nil
}

// Object is what r, a stub, says of its object. Errors are *CorruptError.
func (r *Record) Object() (s Stub, err error) {
	b := r.Value
	if !r.Stub || len(b) < stubHeadSize {
		return s, corrupt("stub", 0, "length", uint64(len(b)), stubHeadSize, b)
	}
	s = Stub{Version: binary.LittleEndian.Uint64(b), Len: binary.LittleEndian.Uint32(b[8:]),
		ValueLen: binary.LittleEndian.Uint32(b[12:]), Sum: binary.LittleEndian.Uint32(b[16:]), Copies: b[20],
		Long: b[21] == 1}
	least := uint64(RecordHeaderSize) + uint64(r.KeyLen) + uint64(s.ValueLen)
	switch {
	case s.Version == 0:
		return s, corrupt("stub", 0, "version", 0, 1, b)
	case b[21] > 1:
		return s, corrupt("stub", 21, "kind of object", uint64(b[21]), 1, b)
	case binary.LittleEndian.Uint16(b[22:]) != 0:
		return s, corrupt("stub", 22, "reserved bytes", uint64(binary.LittleEndian.Uint16(b[22:])), 0, b)
	case s.Copies == 0 || s.Copies > MaxStubCopies:
		return s, corrupt("stub", 20, "number of copies", uint64(s.Copies), MaxStubCopies, b)
	case len(b) != StubLen(int(s.Copies))+r.Flags.TailLen():
		return s, corrupt("stub", 20, "length for its copies and tail", uint64(len(b)),
			uint64(StubLen(int(s.Copies))+r.Flags.TailLen()), b)
	case uint64(s.Len) < least || !s.Long && uint64(s.Len) > least+MaxTailLen:
		return s, corrupt("stub", 8, "length of the object", uint64(s.Len), least, b)
	case s.Len > MaxObjectSize || !s.Long && s.Len > MaxRecordSize:
		return s, corrupt("stub", 8, "length of the object", uint64(s.Len), MaxObjectSize, b)
	}
	for i := range s.At[:s.Copies] {
		p := b[StubLen(i):]
		s.At[i] = ObjectAt{Volume: binary.LittleEndian.Uint32(p), At: binary.LittleEndian.Uint64(p[4:])}
		switch {
		case s.At[i].Volume == 0:
			return s, corrupt("stub", uint64(StubLen(i)), "volume of the object", 0, 1, b)
		case s.At[i].At == 0:
			return s, corrupt("stub", uint64(StubLen(i)+4), "address of the object", 0, 1, b)
		}
	}
	return s, nil
}

// Names reports whether the object at at is one of those that s names.
func (s *Stub) Names(at ObjectAt) bool {
	for _, x := range s.At[:s.Copies] {
		if x == at {
			return true
		}
	}
	return false
}

// Fill makes of r, a stub that says s, the record that it stands for. b is what was read of the object, hostile until
// it is checked: it must be a record of that version, key, length and CRC. The value that r then has aliases b, or lies
// in new memory if the tail has changed since. Errors are *CorruptError; r is as it was then.
func (s *Stub) Fill(r *Record, b []byte) error {
	if s.Long || uint64(len(b)) < uint64(s.Len) {
		return corrupt("object", 0, "length", uint64(len(b)), uint64(s.Len), b)
	}
	x, err := ParseRecord(b[:s.Len])
	switch {
	case err != nil:
		return err
	case x.EncodedLen() != int(s.Len):
		return corrupt("object", 8, "length", uint64(x.EncodedLen()), uint64(s.Len), b)
	case HeadSum(b) != s.Sum:
		return corrupt("object", 24, "CRC of another object", uint64(HeadSum(b)), uint64(s.Sum), b)
	case x.Version != s.Version:
		return corrupt("object", 0, "version", x.Version, s.Version, b)
	case x.Flags&^FlagsOfValue != 0:
		return corrupt("object", 10, "flags", uint64(x.Flags), 0, b)
	case !bytes.Equal(x.Key, r.Key):
		return corrupt("object", RecordHeaderSize, "another key, of bytes", uint64(x.KeyLen), uint64(r.KeyLen), b)
	case len(x.Value) != int(s.ValueLen)+x.Flags.TailLen():
		return corrupt("object", 12, "length of the value", uint64(len(x.Value)), uint64(s.ValueLen), b)
	}
	value := x.Value
	if tail := r.Tail(); !bytes.Equal(tail, x.Tail()) {
		value = append(value[:s.ValueLen:s.ValueLen], tail...)
	}
	r.Stub, r.Value, r.ValueLen = false, value, uint32(len(value))
	return nil
}
