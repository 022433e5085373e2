package layout

import (
	"encoding/binary"
)

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
//	| length | n  | pay| id     | chunk 0               | …
//	+--------+----+----+--------+-----------------------+----
//	chunk:  unit u32 | code u8 | zero u8 | ver u16
//
//	pay  bytes of the value in every chunk but the last; 0: ChunkSize. With a record's header they are whole units,
//	     ChunkSize at most
//	id   the Version field of every chunk record, unique to this manifest
type Manifest struct {
	Len     uint64
	Payload uint32 // as pay, but for 0
	ID      uint64
	Chunks  []Chunk
}

// IsPayload reports whether n bytes, other than ChunkSize, may be what each chunk of a value holds.
func IsPayload(n uint32) bool {
	return n > 0 && n <= ChunkPayload && (n+RecordHeaderSize)%UnitSize == 0
}

const manifestHeaderSize = 24

// ManifestLen is the encoded length for n chunks.
func ManifestLen(n int) int { return manifestHeaderSize + 8*n }

// ChunkCount is the number of chunks, of payload bytes each, of a value of n bytes.
func ChunkCount(n, payload int) int { return (n + payload - 1) / payload }

// EncodeManifest writes m to b and returns its length.
func EncodeManifest(b []byte, m Manifest) int {
	n := ManifestLen(len(m.Chunks))
	_ = b[n-1]
	binary.LittleEndian.PutUint64(b, m.Len)
	binary.LittleEndian.PutUint32(b[8:], uint32(len(m.Chunks)))
	binary.LittleEndian.PutUint32(b[12:], m.Payload%ChunkSize)
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
	if m.Payload = binary.LittleEndian.Uint32(b[12:]); m.Payload == 0 {
		m.Payload = ChunkSize
	} else if !IsPayload(m.Payload) {
		return Manifest{}, corrupt("manifest", 12, "bytes in a chunk", uint64(m.Payload), ChunkPayload, b)
	}
	if m.Len > MaxValueLen+MaxTailLen || n > MaxChunks || int(n) != ChunkCount(int(m.Len), int(m.Payload)) ||
		len(b) != ManifestLen(int(n)) {
		return Manifest{}, corrupt("manifest", 8, "chunk count", uint64(n), m.Len, b)
	}
	m.Chunks = make([]Chunk, n)
	for i := range m.Chunks {
		p := b[manifestHeaderSize+8*i:]
		c := Chunk{Unit: binary.LittleEndian.Uint32(p), Code: p[4], Ver: binary.LittleEndian.Uint16(p[6:])}
		if p[5] != 0 || c.Ver >= VerMod || !InHeap(MakeLive(0, 0, c.Code, c.Unit), lo, hi) {
			return Manifest{}, corrupt("manifest", uint64(manifestHeaderSize+8*i), "chunk", uint64(c.Unit), uint64(hi),
				b)
		}
		if need := RecordLen(0, min(int(m.Len)-i*int(m.Payload), int(m.Payload))); SizeOf(c.Code) < need {
			return Manifest{}, corrupt("manifest", uint64(manifestHeaderSize+8*i), "chunk's place, bytes",
				uint64(SizeOf(c.Code)), uint64(need), b)
		}
		m.Chunks[i] = c
	}
	return m, nil
}
