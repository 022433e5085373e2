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
	if m.Len > MaxValueLen+MaxTailLen || uint64(n) != uint64(ChunkCount(int(m.Len))) || len(b) != ManifestLen(int(n)) ||
		binary.LittleEndian.Uint32(b[12:]) != 0 {
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
		if need := RecordLen(0, min(int(m.Len)-i*ChunkSize, ChunkSize)); SizeOf(c.Code) < need {
			return Manifest{}, corrupt("manifest", uint64(manifestHeaderSize+8*i), "chunk's place, bytes",
				uint64(SizeOf(c.Code)), uint64(need), b)
		}
		m.Chunks[i] = c
	}
	return m, nil
}
