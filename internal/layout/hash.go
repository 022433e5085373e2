package layout

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
