// Package rdb is the serialized form of one value, as DUMP returns it and RESTORE takes it, and that of libraries of
// functions. The form is that of Redis 7.0's RDB files (rdb.c; version 10), with its version and a CRC-64 behind it.
//
// Values are written in the encodings that every version of Redis reads, but for streams, which are 7.0's. They are
// read in all that versions up to 7.0 write, but for modules and the zipmaps of versions before 2.6. It is pure. A
// payload is hostile until checked. Memory for what it holds is bounded by the caller's limit, and bytes that are no
// value are ErrFormat, never a panic.
package rdb

import (
	"encoding/binary"
	"errors"
	"hash/crc64"
	"math"
	"strconv"

	"github.com/kvd-project/kvd/internal/redis/collection"
)

// Kind is what a value is.
type Kind uint8

const (
	String Kind = iota
	List
	Set
	Hash
	SortedSet
	Stream
)

// Value is a value in parts, which alias the payload where they can.
type Value struct {
	Kind Kind
	// Parts are the string; the elements; fields and values by turns; or members.
	Parts [][]byte
	// Scores are those of the members of a SortedSet.
	Scores []float64
	// Stream is a Stream, which has no Parts. Its entries can be read without an error.
	Stream *collection.Stream
}

var (
	// ErrChecksum: the payload is of a later version, or damaged.
	ErrChecksum = errors.New("DUMP payload version or checksum are wrong")
	// ErrFormat: there is no such value, or it is longer than the limit.
	ErrFormat = errors.New("bad data format")
)

const version = 10

// Types of RDB files.
const (
	typeString        = 0
	typeList          = 1
	typeSet           = 2
	typeZSet          = 3
	typeHash          = 4
	typeZSet2         = 5
	typeListZiplist   = 10
	typeSetIntset     = 11
	typeZSetZiplist   = 12
	typeHashZiplist   = 13
	typeListQuicklist = 14
	typeStream        = 15
	typeHashListpack  = 16
	typeZSetListpack  = 17
	typeQuicklist2    = 18
	typeStream2       = 19
)

// Jones's polynomial, reflected, as Redis has it.
var crcTable = crc64.MakeTable(0x95ac9329ac4bc9b5)

// checksum starts from 0 and is not inverted, unlike those of package crc64.
func checksum(b []byte) uint64 { return ^crc64.Update(^uint64(0), crcTable, b) }

// Append appends the payload of v to b.
func Append(b []byte, v Value) []byte {
	at := len(b)
	switch v.Kind {
	case String:
		b = appendString(append(b, typeString), v.Parts[0])
	case List:
		b = appendStrings(append(b, typeList), len(v.Parts), v.Parts)
	case Set:
		b = appendStrings(append(b, typeSet), len(v.Parts), v.Parts)
	case Hash:
		b = appendStrings(append(b, typeHash), len(v.Parts)/2, v.Parts)
	case SortedSet:
		b = appendLen(append(b, typeZSet2), len(v.Parts))
		for i, m := range v.Parts {
			b = appendString(b, m)
			b = binary.LittleEndian.AppendUint64(b, math.Float64bits(v.Scores[i]))
		}
	case Stream:
		b = appendStream(b, v.Stream)
	}
	return seal(b, at)
}

// seal puts version and checksum behind what begins at at.
func seal(b []byte, at int) []byte {
	b = binary.LittleEndian.AppendUint16(b, version)
	return binary.LittleEndian.AppendUint64(b, checksum(b[at:]))
}

// unseal is what a payload has before its version and checksum, if these are right.
func unseal(b []byte) ([]byte, error) {
	if len(b) < 10 {
		return nil, ErrChecksum
	}
	end := len(b) - 8
	if binary.LittleEndian.Uint16(b[end-2:]) > version || checksum(b[:end]) != binary.LittleEndian.Uint64(b[end:]) {
		return nil, ErrChecksum
	}
	return b[:end-2], nil
}

func appendStrings(b []byte, n int, parts [][]byte) []byte {
	b = appendLen(b, n)
	for _, p := range parts {
		b = appendString(b, p)
	}
	return b
}

func appendLen(b []byte, n int) []byte {
	switch {
	case n < 1<<6:
		return append(b, byte(n))
	case n < 1<<14:
		return append(b, 0x40|byte(n>>8), byte(n))
	case n <= math.MaxUint32:
		return binary.BigEndian.AppendUint32(append(b, 0x80), uint32(n))
	}
	return binary.BigEndian.AppendUint64(append(b, 0x81), uint64(n))
}

// appendString writes short integers as such, as Redis does. It does not compress.
func appendString(b, s []byte) []byte {
	if len(s) <= 11 {
		if n, err := strconv.ParseInt(string(s), 10, 32); err == nil && strconv.FormatInt(n, 10) == string(s) {
			switch {
			case n == int64(int8(n)):
				return append(b, 0xc0, byte(n))
			case n == int64(int16(n)):
				return binary.LittleEndian.AppendUint16(append(b, 0xc1), uint16(n))
			}
			return binary.LittleEndian.AppendUint32(append(b, 0xc2), uint32(n))
		}
	}
	return append(appendLen(b, len(s)), s...)
}

// Parse reads a payload. limit bounds what the value takes in memory, in bytes: its parts, and 24 for each of them. For
// a stream, it bounds the stream, and its entries of one listpack.
func Parse(b []byte, limit int) (Value, error) {
	b, err := unseal(b)
	if err != nil {
		return Value{}, err
	}
	r := &reader{b: b, left: limit}
	v := r.value()
	if r.bad { // bytes behind the value are no matter, as in Redis
		return Value{}, ErrFormat
	}
	return v, nil
}

// reader reads what is left of a payload. Once something is wrong everything is empty, and bad is set.
type reader struct {
	b    []byte
	left int // of the limit
	bad  bool
}

func (r *reader) fail() { r.bad, r.b = true, nil }

// take is the next n bytes.
func (r *reader) take(n int) []byte {
	if n < 0 || n > len(r.b) {
		r.fail()
		return nil
	}
	t := r.b[:n:n]
	r.b = r.b[n:]
	return t
}

func (r *reader) byte() byte {
	if t := r.take(1); t != nil {
		return t[0]
	}
	return 0
}

// uint is an integer of n bytes, the least significant one first.
func (r *reader) uint(n int) (u uint64) {
	for i, c := range r.take(n) {
		u |= uint64(c) << (8 * i)
	}
	return u
}

// int is the same, signed.
func (r *reader) int(n int) int64 {
	shift := 64 - 8*n
	return int64(r.uint(n)<<shift) >> shift
}

// length reads a length, or says that a string in an encoding follows.
func (r *reader) length() (n int, encoding byte, encoded bool) {
	c := r.byte()
	switch c >> 6 {
	case 0:
		return int(c), 0, false
	case 1:
		return int(c&63)<<8 | int(r.byte()), 0, false
	case 3:
		return 0, c & 63, true
	}
	size := 4
	if c == 0x81 {
		size = 8
	} else if c != 0x80 {
		r.fail()
	}
	u := uint64(0)
	for _, c := range r.take(size) {
		u = u<<8 | uint64(c)
	}
	if u > math.MaxInt32 {
		r.fail()
		return 0, 0, false
	}
	return int(u), 0, false
}

// count is a number of things, each of which takes at least one byte of the payload.
func (r *reader) count() int {
	n, _, encoded := r.length()
	if encoded || n > len(r.b) {
		r.fail()
		return 0
	}
	return n
}

func (r *reader) string() []byte {
	n, encoding, encoded := r.length()
	if !encoded {
		return r.take(n)
	}
	switch encoding {
	case 0, 1, 2:
		return strconv.AppendInt(nil, r.int(1<<encoding), 10)
	case 3:
		from, _, e1 := r.length()
		to, _, e2 := r.length()
		if e1 || e2 || to > r.left {
			r.fail()
			return nil
		}
		r.left -= to
		out, ok := decompress(r.take(from), to)
		if !ok {
			r.fail()
		}
		return out
	}
	r.fail()
	return nil
}

// decompress is LZF's: literal runs, and references to what is there already.
func decompress(b []byte, n int) ([]byte, bool) {
	out := make([]byte, 0, n)
	for len(b) > 0 {
		c := int(b[0])
		b = b[1:]
		if c < 32 {
			if c++; c > len(b) || len(out)+c > n {
				return nil, false
			}
			out, b = append(out, b[:c]...), b[c:]
			continue
		}
		size := c >> 5
		if size == 7 {
			if len(b) == 0 {
				return nil, false
			}
			size += int(b[0])
			b = b[1:]
		}
		if size += 2; len(b) == 0 || len(out)+size > n {
			return nil, false
		}
		from := len(out) - (c&31)<<8 - int(b[0]) - 1
		b = b[1:]
		if from < 0 {
			return nil, false
		}
		for i := range size { // it may overlap what it makes
			out = append(out, out[from+i])
		}
	}
	return out, len(out) == n
}

// add gives a part to v, if the limit allows.
func (r *reader) add(v *Value, part []byte) {
	if r.bad {
		return
	}
	if r.left -= 24 + len(part); r.left < 0 {
		r.fail()
		return
	}
	v.Parts = append(v.Parts, part)
}

func (r *reader) value() (v Value) {
	switch t := r.byte(); t {
	case typeString:
		r.add(&v, r.string())
	case typeList, typeSet, typeHash:
		v.Kind = map[byte]Kind{typeList: List, typeSet: Set, typeHash: Hash}[t]
		n := r.count()
		if t == typeHash {
			n *= 2
		}
		for i := 0; i < n && !r.bad; i++ {
			r.add(&v, r.string())
		}
	case typeZSet, typeZSet2:
		v.Kind = SortedSet
		for i, n := 0, r.count(); i < n && !r.bad; i++ {
			r.add(&v, r.string())
			if t == typeZSet2 {
				v.Scores = append(v.Scores, math.Float64frombits(r.uint(8)))
			} else {
				v.Scores = append(v.Scores, r.oldDouble())
			}
		}
	case typeListZiplist, typeHashZiplist, typeZSetZiplist:
		v.Kind = map[byte]Kind{typeListZiplist: List, typeHashZiplist: Hash, typeZSetZiplist: SortedSet}[t]
		r.inside(r.string(), &v, (*reader).ziplist)
	case typeHashListpack, typeZSetListpack:
		v.Kind = map[byte]Kind{typeHashListpack: Hash, typeZSetListpack: SortedSet}[t]
		r.inside(r.string(), &v, (*reader).listpack)
	case typeStream, typeStream2:
		return Value{Kind: Stream, Stream: r.stream(t == typeStream)}
	case typeSetIntset:
		v.Kind = Set
		r.inside(r.string(), &v, (*reader).intset)
	case typeListQuicklist:
		v.Kind = List
		for i, n := 0, r.count(); i < n && !r.bad; i++ {
			r.inside(r.string(), &v, (*reader).ziplist)
		}
	case typeQuicklist2:
		v.Kind = List
		for i, n := 0, r.count(); i < n && !r.bad; i++ {
			switch kind, _, _ := r.length(); kind {
			case 1:
				r.add(&v, r.string())
			case 2:
				r.inside(r.string(), &v, (*reader).listpack)
			default:
				r.fail()
			}
		}
	default:
		r.fail()
	}
	return r.checked(v, v.Kind == SortedSet && v.Scores == nil)
}

// checked refuses what no Redis has written: collections without anything in them, or with something twice. Of those
// in one string, scores are among the parts.
func (r *reader) checked(v Value, together bool) Value {
	if r.bad {
		return v
	}
	step := 1
	if v.Kind == Hash || together {
		step = 2
	}
	if len(v.Parts) == 0 || len(v.Parts)%step != 0 {
		r.fail()
		return v
	}
	if together {
		members := v.Parts[:0]
		for i := 0; i < len(v.Parts); i += 2 {
			s, err := strconv.ParseFloat(string(v.Parts[i+1]), 64)
			if err != nil {
				r.fail()
				return v
			}
			members, v.Scores = append(members, v.Parts[i]), append(v.Scores, s)
		}
		v.Parts, step = members, 1
	}
	for _, s := range v.Scores {
		if math.IsNaN(s) {
			r.fail()
		}
	}
	if v.Kind == String || v.Kind == List {
		return v
	}
	seen := make(map[string]struct{}, len(v.Parts)/step)
	for i := 0; i < len(v.Parts); i += step {
		seen[string(v.Parts[i])] = struct{}{}
	}
	if len(seen) != len(v.Parts)/step {
		r.fail()
	}
	return v
}

// oldDouble is a score as text.
func (r *reader) oldDouble() float64 {
	switch n := r.byte(); n {
	case 253:
		return math.NaN()
	case 254:
		return math.Inf(1)
	case 255:
		return math.Inf(-1)
	default:
		f, err := strconv.ParseFloat(string(r.take(int(n))), 64)
		if err != nil {
			r.fail()
		}
		return f
	}
}

// inside reads a string that holds many parts.
func (r *reader) inside(s []byte, v *Value, read func(*reader, *Value)) {
	in := &reader{b: s, left: r.left, bad: r.bad}
	read(in, v)
	if r.left = in.left; in.bad || len(in.b) > 0 {
		r.fail()
	}
}

func (r *reader) intset(v *Value) {
	size, n := int(r.uint(4)), int(r.uint(4))
	if size != 2 && size != 4 && size != 8 || n*size != len(r.b) {
		r.fail()
	}
	for len(r.b) > 0 {
		r.add(v, strconv.AppendInt(nil, r.int(size), 10))
	}
}

func (r *reader) ziplist(v *Value) {
	if int(r.uint(4)) != len(r.b)+4 {
		r.fail()
	}
	r.take(6) // where the last entry is, and how many there are
	for !r.bad {
		switch c := r.byte(); c { // length of the entry before
		case 0xff:
			return
		case 0xfe:
			r.take(4)
		}
		c := r.byte()
		switch {
		case c>>6 == 0:
			r.add(v, r.take(int(c)))
		case c>>6 == 1:
			r.add(v, r.take(int(c&63)<<8|int(r.byte())))
		case c == 0x80:
			if t := r.take(4); t != nil {
				r.add(v, r.take(int(binary.BigEndian.Uint32(t))))
			}
		case c == 0xc0, c == 0xd0, c == 0xe0, c == 0xf0, c == 0xfe:
			size := map[byte]int{0xc0: 2, 0xd0: 4, 0xe0: 8, 0xf0: 3, 0xfe: 1}[c]
			r.add(v, strconv.AppendInt(nil, r.int(size), 10))
		case c > 0xf0 && c < 0xfe:
			r.add(v, strconv.AppendInt(nil, int64(c&15)-1, 10))
		default:
			r.fail()
		}
	}
}

func (r *reader) listpack(v *Value) {
	if int(r.uint(4)) != len(r.b)+4 {
		r.fail()
	}
	r.take(2) // how many entries there are
	for !r.bad {
		had := len(r.b)
		c := r.byte()
		switch {
		case c == 0xff:
			return
		case c>>7 == 0:
			r.add(v, strconv.AppendInt(nil, int64(c), 10))
		case c>>6 == 2:
			r.add(v, r.take(int(c&63)))
		case c>>5 == 6:
			n := int64(c&31)<<8 | int64(r.byte())
			r.add(v, strconv.AppendInt(nil, n<<51>>51, 10))
		case c>>4 == 14:
			r.add(v, r.take(int(c&15)<<8|int(r.byte())))
		case c == 0xf0:
			r.add(v, r.take(int(r.uint(4))))
		case c >= 0xf1 && c <= 0xf4:
			r.add(v, strconv.AppendInt(nil, r.int([]int{2, 3, 4, 8}[c-0xf1]), 10))
		default:
			r.fail()
		}
		r.take(backLen(had - len(r.b)))
	}
}
