// Package bulk copies long runs of bytes and takes their CRC-32C in one pass.
package bulk

import "hash/crc32"

// block is what stays in a processor's cache between the copy and the CRC, bytes.
const block = 64 << 10

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Copy copies src to dst, which is as long and does not overlap it, and returns CRC(crc, dst).
func Copy(crc uint32, dst, src []byte) uint32 {
	for len(src) > 0 {
		n := copy(dst, src[:min(block, len(src))])
		crc = crc32.Update(crc, castagnoli, dst[:n])
		dst, src = dst[n:], src[n:]
	}
	return crc
}

// CRC continues the CRC-32C crc with b, as [crc32.Update] does.
func CRC(crc uint32, b []byte) uint32 { return crc32.Update(crc, castagnoli, b) }
