package layout

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/kvd-project/kvd/internal/bulk"
)

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
		if n := uint64(len(index)); a.Off < end || a.Off > n || a.Off%GroupSize != 0 ||
			uint64(a.Segments) > (n-a.Off)/SegmentSize {
			return fmt.Errorf("array of %d segments at %#x: want one behind %#x in an index of %d bytes", a.Segments,
				a.Off, end, n)
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
