package bulk

import (
	"hash/crc32"
	"unsafe"

	"golang.org/x/sys/cpu"
)

func has(f form) bool { return f == portable || f == words && cpu.ARM64.HasCRC32 }

// copyWords copies n bytes. Its crc is inverted, before and after.
//
//go:noescape
func copyWords(crc uint32, dst, src *byte, n int) uint32

func copyBy(f form, crc uint32, dst, src []byte) uint32 {
	if f == portable {
		return copyPortable(crc, dst, src)
	}
	for len(src) > piece {
		crc = ^copyWords(^crc, &dst[0], &src[0], piece)
		dst, src = dst[piece:], src[piece:]
	}
	return ^copyWords(^crc, unsafe.SliceData(dst), unsafe.SliceData(src), len(src))
}

// crcBy leaves it to hash/crc32, which has the same instructions.
func crcBy(_ form, crc uint32, b []byte) uint32 { return crc32.Update(crc, castagnoli, b) }
