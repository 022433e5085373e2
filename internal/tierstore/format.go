package tierstore

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"strconv"
	"strings"
)

// Sizes of the format, in bytes.
const (
	unit       = 64
	headerSize = 2 * unit // of a segment: two copies
	headSize   = unit     // of an object
	entrySize  = 48
	footerSize = unit
	format     = 1
)

// Magic numbers.
const (
	headerMagic = "kvdtier1"
	footerMagic = "kvdtable"
	headMagic   = 0x316a626f // "obj1"
)

// Reasons of a CorruptError.
var (
	errSum    = errors.New("its CRC is wrong")
	errHeader = errors.New("neither copy of the segment's header is whole")
	errNoHead = errors.New("no object begins here")
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func sum(salt uint32, b []byte) uint32 { return crc32.Update(salt, castagnoli, b) }

// Addr is where an object begins, in units of 64 bytes.
//
//	63                       20 19            0
//	+--------------------------+---------------+
//	| segment                  | unit          |
//	+--------------------------+---------------+
//
// Zero is no address, as a segment begins with its header.
type Addr uint64

func addrOf(number uint64, off int64) Addr { return Addr(number<<20 | uint64(off)/unit) }

func (a Addr) segment() uint64 { return uint64(a) >> 20 }
func (a Addr) off() int64      { return int64(a&(1<<20-1)) * unit }

// objectSize is what an object takes of a segment, in bytes.
func objectSize(body int64) int64 { return headSize + (body+unit-1)&^(unit-1) }

// header is the beginning of a segment. Two copies of it stand there, so that a damaged block does not take the salt,
// without which no object is believed.
//
//	0       8       12       16          24        32        40    44    48   60    64
//	| magic | format| volume | namespace | hash seed | segment | span| salt| 0  | CRC |
//
// It is synced before any address in the segment is given out. span is how many numbers the segment takes.
type header struct {
	volume     uint32
	namespace  uint64
	seed       uint64
	number     uint64
	span, salt uint32
}

func (h *header) encode() []byte {
	b := make([]byte, headerSize)
	copy(b, headerMagic)
	binary.LittleEndian.PutUint32(b[8:], format)
	binary.LittleEndian.PutUint32(b[12:], h.volume)
	binary.LittleEndian.PutUint64(b[16:], h.namespace)
	binary.LittleEndian.PutUint64(b[24:], h.seed)
	binary.LittleEndian.PutUint64(b[32:], h.number)
	binary.LittleEndian.PutUint32(b[40:], h.span)
	binary.LittleEndian.PutUint32(b[44:], h.salt)
	binary.LittleEndian.PutUint32(b[60:], sum(0, b[:60]))
	copy(b[unit:], b[:unit])
	return b
}

// errFormat says that a later version has written the file.
var errFormat = errors.New("a later version of kvd has written it")

// parseHeader reads the first copy that is whole. ok is false if neither is.
func parseHeader(b []byte) (h header, ok bool, err error) {
	for ; len(b) >= unit; b = b[unit:] {
		if string(b[:8]) != headerMagic || binary.LittleEndian.Uint32(b[60:]) != sum(0, b[:60]) {
			continue
		}
		if v := binary.LittleEndian.Uint32(b[8:]); v != format {
			return header{}, false, fmt.Errorf("format %d, want %d: %w", v, format, errFormat)
		}
		return header{
			volume: binary.LittleEndian.Uint32(b[12:]), namespace: binary.LittleEndian.Uint64(b[16:]),
			seed: binary.LittleEndian.Uint64(b[24:]), number: binary.LittleEndian.Uint64(b[32:]),
			span: binary.LittleEndian.Uint32(b[40:]), salt: binary.LittleEndian.Uint32(b[44:]),
		}, true, nil
	}
	return header{}, false, nil
}

// putHead writes the head of an object to b.
//
//	0       4     8      16        24            32       40   48  56         60     64
//	| magic | len | hash | version | incarnation | expiry | at | 0 | body CRC | CRC |
//
// Both sums begin with the segment's salt. The body follows, padded to 64 bytes with zeroes.
func putHead(b []byte, e *Entry, salt, bodySum uint32) {
	binary.LittleEndian.PutUint32(b, headMagic)
	binary.LittleEndian.PutUint32(b[4:], e.Len)
	binary.LittleEndian.PutUint64(b[8:], e.Hash)
	binary.LittleEndian.PutUint64(b[16:], e.Version)
	binary.LittleEndian.PutUint64(b[24:], e.Incarnation)
	binary.LittleEndian.PutUint64(b[32:], e.Expiry)
	binary.LittleEndian.PutUint64(b[40:], uint64(e.At))
	binary.LittleEndian.PutUint64(b[48:], 0)
	binary.LittleEndian.PutUint32(b[56:], bodySum)
	binary.LittleEndian.PutUint32(b[60:], sum(salt, b[:60]))
}

// parseHead reads the head of the object at at. bodySum is unchecked.
func parseHead(b []byte, at Addr, salt uint32) (e Entry, bodySum uint32, err error) {
	if binary.LittleEndian.Uint32(b) != headMagic {
		return Entry{}, 0, errNoHead
	}
	if binary.LittleEndian.Uint32(b[60:]) != sum(salt, b[:60]) {
		return Entry{}, 0, errSum
	}
	e = Entry{
		Ident: Ident{Hash: binary.LittleEndian.Uint64(b[8:]), Version: binary.LittleEndian.Uint64(b[16:]),
			Incarnation: binary.LittleEndian.Uint64(b[24:])},
		At: Addr(binary.LittleEndian.Uint64(b[40:])), Len: binary.LittleEndian.Uint32(b[4:]),
		Expiry: binary.LittleEndian.Uint64(b[32:]),
	}
	if e.At != at || e.Len == 0 || e.Len > MaxBody {
		return Entry{}, 0, errNoHead
	}
	return e, binary.LittleEndian.Uint32(b[56:]), nil
}

// footer is the end of a sealed segment's file. Before it stands the table, of 48 bytes for each object:
//
//	0      8         16            24       32   40    44  48
//	| hash | version | incarnation | expiry | at | len | 0 |
//
// The footer:
//
//	0       8       12     16      24    32        40     44          48     56  60    64
//	| magic | count | span | table | end | segment | salt | table CRC | live | 0 | CRC |
//
// table is the table's offset, end that of the objects' end, live the sum of their sizes, all in bytes.
type footer struct {
	count, span    uint32
	table, end     int64
	number         uint64
	salt, tableSum uint32
	live           int64
}

func (f *footer) append(b []byte) []byte {
	at := len(b)
	b = append(b, footerMagic...)
	b = binary.LittleEndian.AppendUint32(b, f.count)
	b = binary.LittleEndian.AppendUint32(b, f.span)
	b = binary.LittleEndian.AppendUint64(b, uint64(f.table))
	b = binary.LittleEndian.AppendUint64(b, uint64(f.end))
	b = binary.LittleEndian.AppendUint64(b, f.number)
	b = binary.LittleEndian.AppendUint32(b, f.salt)
	b = binary.LittleEndian.AppendUint32(b, f.tableSum)
	b = binary.LittleEndian.AppendUint64(b, uint64(f.live))
	b = binary.LittleEndian.AppendUint32(b, 0)
	return binary.LittleEndian.AppendUint32(b, sum(0, b[at:]))
}

// parseFooter reads the footer of a file of size bytes. ok is false if the segment is to be scanned.
func parseFooter(b []byte, number uint64, size int64) (f footer, ok bool) {
	if !bytes.HasPrefix(b, []byte(footerMagic)) || binary.LittleEndian.Uint32(b[60:]) != sum(0, b[:60]) {
		return footer{}, false
	}
	f = footer{
		count: binary.LittleEndian.Uint32(b[8:]), span: binary.LittleEndian.Uint32(b[12:]),
		table: int64(binary.LittleEndian.Uint64(b[16:])), end: int64(binary.LittleEndian.Uint64(b[24:])),
		number: binary.LittleEndian.Uint64(b[32:]), salt: binary.LittleEndian.Uint32(b[40:]),
		tableSum: binary.LittleEndian.Uint32(b[44:]), live: int64(binary.LittleEndian.Uint64(b[48:])),
	}
	ok = f.number == number && f.end >= headerSize && f.end <= f.table && f.table <= size-footerSize &&
		f.table+int64(f.count)*entrySize == size-footerSize && f.live >= 0 && f.live <= f.end
	return f, ok
}

func appendEntry(b []byte, e *Entry) []byte {
	b = binary.LittleEndian.AppendUint64(b, e.Hash)
	b = binary.LittleEndian.AppendUint64(b, e.Version)
	b = binary.LittleEndian.AppendUint64(b, e.Incarnation)
	b = binary.LittleEndian.AppendUint64(b, e.Expiry)
	b = binary.LittleEndian.AppendUint64(b, uint64(e.At))
	b = binary.LittleEndian.AppendUint32(b, e.Len)
	return binary.LittleEndian.AppendUint32(b, 0)
}

func parseEntry(b []byte) Entry {
	return Entry{
		Ident: Ident{Hash: binary.LittleEndian.Uint64(b), Version: binary.LittleEndian.Uint64(b[8:]),
			Incarnation: binary.LittleEndian.Uint64(b[16:])},
		Expiry: binary.LittleEndian.Uint64(b[24:]), At: Addr(binary.LittleEndian.Uint64(b[32:])),
		Len: binary.LittleEndian.Uint32(b[40:]),
	}
}

const suffix = ".seg"

func fileName(number uint64) string { return fmt.Sprintf("%011x%s", number, suffix) }

// parseName gives the number of a segment's file. ok is false for names of other files.
func parseName(name string) (number uint64, ok bool) {
	hex, ok := strings.CutSuffix(name, suffix)
	if !ok {
		return 0, false
	}
	number, err := strconv.ParseUint(hex, 16, 44)
	return number, err == nil && number != 0 && fileName(number) == name
}
