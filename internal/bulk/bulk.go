// Package bulk copies bytes and takes their CRC-32C in the same pass, so that memory is read once for both.
//
// CRCs are those of package hash/crc32 with its table Castagnoli. Functions may be used concurrently and allocate
// nothing. There are forms for several kinds of processors. The best one that runs is chosen when the program
// starts.
package bulk

import (
	"hash/crc32"
	"unsafe"
)

// StreamFrom is the length, in bytes, from which stores of [Copy] go past the caches where that is faster. For a
// copy that is read at once, shorter parts are better.
const StreamFrom = 256 << 10

const (
	// block is how much the portable form copies before it takes the CRC, bytes: what stays in a processor's cache.
	block = 64 << 10
	// piece is how much one call of assembly does, bytes. A goroutine is not preempted there.
	piece = 1 << 20
)

// form is a way of doing it. Which ones there are is the processor's matter.
type form uint8

const (
	portable form = iota
	words         // instructions for CRC-32C, a word at a time
	fold128       // carry-less multiplication, in registers of so many bits
	fold256
	fold512
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

var best = bestForm()

func bestForm() form {
	if raced {
		return portable // the detector does not see what assembly does
	}
	f := fold512
	for !has(f) {
		f--
	}
	return f
}

// Copy copies src to the start of dst, and gives crc updated with the bytes of src. It panics if dst is shorter
// than src, or shares bytes with it. It does not notice memory that is mapped at two addresses: dst holds anything
// then.
//
// The source may change meanwhile, as remote memory does. Each of its bytes is loaded once, and the CRC is that of
// what was stored. Nobody else may store to dst. Nothing outside dst is written, and nothing outside src is read.
// Other processors see the stores before any later ones of the caller. Where memory turns out to be missing, as
// behind a file's end, a part of dst may have been written.
func Copy(crc uint32, dst, src []byte) uint32 {
	n := uintptr(len(src))
	d, s := uintptr(unsafe.Pointer(unsafe.SliceData(dst))), uintptr(unsafe.Pointer(unsafe.SliceData(src)))
	if len(dst) < len(src) || d-s < n || s-d < n {
		panic("bulk: the destination is shorter than the source, or overlaps it")
	}
	return copyBy(best, crc, dst[:n], src)
}

// CRC gives crc updated with the bytes of b. Bytes that change meanwhile count as they were at some time of the call.
func CRC(crc uint32, b []byte) uint32 { return crcBy(best, crc, b) }

// copyPortable takes the CRC of the copy, which nobody else changes.
func copyPortable(crc uint32, dst, src []byte) uint32 {
	for len(src) > 0 {
		n := copy(dst[:min(len(dst), block)], src)
		crc = crc32.Update(crc, castagnoli, dst[:n])
		dst, src = dst[n:], src[n:]
	}
	return crc
}
