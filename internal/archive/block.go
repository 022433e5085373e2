package archive

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"sync"

	"github.com/klauspost/compress/zstd"

	"github.com/kvd-project/kvd/internal/layout"
)

// A segment is blocks, one after the other. A block is a header and a payload of records:
//
//	 0       4      8      12        16      17      21
//	+--------+------+------+---------+-------+-------+---------+
//	| "kvb1" | ulen | clen | records | codec | CRC   | payload |
//	+--------+------+------+---------+-------+-------+---------+
//
// Numbers are little-endian. The payload has clen bytes, and ulen without compression. The CRC-32C is of the header
// before it and of the payload as it is written. A record stands in one block, but for a value that is too long: it
// goes on in the next ones, of the same segment. uvarints are as in package encoding/binary.
//
//	put (1):       kind u8 | value flags u8 | klen uvarint | vlen uvarint | part uvarint | version u64 | expiry u64 |
//	               key | part bytes of the value
//	continued (3): kind u8 | part uvarint | part bytes of the value
//
// Kind 2 is for tombstones of increments. A reader of this version refuses them.
const (
	headerSize = 21
	codecNone  = 0
	codecZstd  = 1

	kindPut       = 1
	kindContinued = 3
	// leastRecord is the shortest record, in bytes.
	leastRecord = 3
	// mostHead is the longest that a put has before its key, in bytes.
	mostHead = 2 + 3*binary.MaxVarintLen64 + 16
)

const magic = "kvb1"

var le = binary.LittleEndian

// The encoder and the decoder are made once for all: each has tables and a window.
var (
	encoder = sync.OnceValues(func() (*zstd.Encoder, error) {
		return zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderCRC(false),
			zstd.WithWindowSize(MaxBlock), zstd.WithLowerEncoderMem(true))
	})
	decoder = sync.OnceValues(func() (*zstd.Decoder, error) {
		return zstd.NewReader(nil, zstd.WithDecoderMaxMemory(MaxBlock), zstd.WithDecodeAllCapLimit(true),
			zstd.WithDecoderLowmem(true))
	})
)

// appendBlock appends a block whose payload is p, with so many records.
func appendBlock(b, p []byte, records int) ([]byte, error) {
	enc, err := encoder()
	if err != nil {
		return b, err
	}
	at := len(b)
	b = append(b, make([]byte, headerSize)...)
	codec := byte(codecZstd)
	if b = enc.EncodeAll(p, b); len(b)-at-headerSize >= len(p) {
		b, codec = append(b[:at+headerSize], p...), codecNone
	}
	h := b[at:]
	copy(h, magic)
	le.PutUint32(h[4:], uint32(len(p)))
	le.PutUint32(h[8:], uint32(len(h)-headerSize))
	le.PutUint32(h[12:], uint32(records))
	h[16] = codec
	le.PutUint32(h[17:], blockCRC(h))
	return b, nil
}

// blockCRC is the CRC of all of a block but the CRC in it.
func blockCRC(b []byte) uint32 {
	return crc32.Update(crc32.Update(0, castagnoli, b[:17]), castagnoli, b[headerSize:])
}

// block is what is read of one.
type block struct {
	raw     []byte // header and payload as in the file
	plain   []byte // the payload's records; aliases raw, or memory of its own
	records int
	unzip   []byte // memory for plain
}

// read reads the next block of r; io.EOF says that there is none.
func (b *block) read(r io.Reader) error {
	b.raw = append(b.raw[:0], make([]byte, headerSize)...)
	n, err := io.ReadFull(r, b.raw)
	switch {
	case errors.Is(err, io.EOF):
		return io.EOF
	case err != nil:
		return fmt.Errorf("the header of a block ends after %d of %d bytes: %w", n, headerSize, err)
	case string(b.raw[:4]) != magic:
		return fmt.Errorf("no block begins here: %q", b.raw[:4])
	}
	uncompressed, compressed := le.Uint32(b.raw[4:]), le.Uint32(b.raw[8:])
	records, codec := le.Uint32(b.raw[12:]), b.raw[16]
	switch {
	case uncompressed == 0 || uncompressed > MaxBlock:
		return fmt.Errorf("block of %d bytes, want 1..%d", uncompressed, MaxBlock)
	case codec > codecZstd:
		return fmt.Errorf("codec %d, want 0 or 1", codec)
	case codec == codecNone && compressed != uncompressed, compressed == 0, compressed > uncompressed:
		return fmt.Errorf("block of %d bytes has %d, with codec %d", uncompressed, compressed, codec)
	case records == 0 || records > uncompressed/leastRecord:
		return fmt.Errorf("%d records in a block of %d bytes", records, uncompressed)
	}
	b.raw = append(b.raw, make([]byte, compressed)...)
	if n, err := io.ReadFull(r, b.raw[headerSize:]); err != nil {
		return fmt.Errorf("a block ends after %d of %d bytes: %w", n, compressed, noEOF(err))
	}
	if got, want := blockCRC(b.raw), le.Uint32(b.raw[17:]); got != want {
		return fmt.Errorf("a block has the CRC %08x, and should have %08x", got, want)
	}
	b.records = int(records)
	if b.plain = b.raw[headerSize:]; codec == codecNone {
		return nil
	}
	dec, err := decoder()
	if err != nil {
		return err
	}
	if b.unzip == nil {
		b.unzip = make([]byte, MaxBlock)
	}
	b.plain, err = dec.DecodeAll(b.plain, b.unzip[:0:uncompressed])
	switch {
	case err != nil:
		return fmt.Errorf("a block of %d bytes: %w", uncompressed, err)
	case len(b.plain) != int(uncompressed):
		return fmt.Errorf("a block has %d bytes, and should have %d", len(b.plain), uncompressed)
	}
	return nil
}

// noEOF has a file end too early where io.EOF would say that it is over.
func noEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// appendPut appends a put of r, whose value has size bytes, with room for the first part of it.
func appendPut(b []byte, r *Record, size, part int) []byte {
	b = append(b, kindPut, byte(r.Flags))
	b = binary.AppendUvarint(b, uint64(len(r.Key)))
	b = binary.AppendUvarint(b, uint64(size))
	b = binary.AppendUvarint(b, uint64(part))
	b = le.AppendUint64(b, r.Version)
	b = le.AppendUint64(b, r.Expiry)
	return append(append(b, r.Key...), make([]byte, part)...)
}

// appendContinued appends room for a further part of a value.
func appendContinued(b []byte, part int) []byte {
	return append(binary.AppendUvarint(append(b, kindContinued), uint64(part)), make([]byte, part)...)
}

// fields takes a record apart.
type fields struct{ b []byte }

var errShort = errors.New("a record goes beyond its block")

func (f *fields) uvarint(what string, most uint64) (int, error) {
	v, n := binary.Uvarint(f.b)
	switch {
	case n == 0:
		return 0, errShort
	case n < 0 || v > most:
		return 0, fmt.Errorf("%s of a record is out of range: at most %d", what, most)
	}
	f.b = f.b[n:]
	return int(v), nil
}

func (f *fields) bytes(n int) ([]byte, error) {
	if n > len(f.b) {
		return nil, errShort
	}
	p := f.b[:n]
	f.b = f.b[n:]
	return p, nil
}

// parseRecord reads the record that b begins with, to r: its Value is what b has of it. A continued one gives its part
// alone. n is how many bytes the record has.
func parseRecord(b []byte, r *Record) (kind byte, n int, err error) {
	f := fields{b}
	if len(b) < leastRecord {
		return 0, 0, errShort
	}
	*r = Record{}
	switch kind = b[0]; kind {
	case kindPut:
		f.b, r.Flags = b[2:], layout.RecordFlags(b[1])
	case kindContinued:
		f.b = b[1:]
		part, err := f.uvarint("the length of a part", maxValue)
		if err != nil {
			return 0, 0, err
		}
		if part == 0 {
			return 0, 0, errors.New("an empty part of a value")
		}
		r.Value, err = f.bytes(part)
		return kind, len(b) - len(f.b), err
	default:
		return 0, 0, fmt.Errorf("a record of kind %d, which this version does not read", kind)
	}
	key, err := f.uvarint("the length of a key", layout.MaxKeyLen)
	if err != nil {
		return 0, 0, err
	}
	if r.Len, err = f.uvarint("the length of a value", maxValue); err != nil {
		return 0, 0, err
	}
	part, err := f.uvarint("the length of a part", uint64(r.Len))
	if err != nil {
		return 0, 0, err
	}
	head, err := f.bytes(16)
	if err != nil {
		return 0, 0, err
	}
	r.Version, r.Expiry = le.Uint64(head), le.Uint64(head[8:])
	if r.Key, err = f.bytes(key); err != nil {
		return 0, 0, err
	}
	if r.Value, err = f.bytes(part); err != nil {
		return 0, 0, err
	}
	return kind, len(b) - len(f.b), r.check()
}
