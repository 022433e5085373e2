package bulk

import (
	"hash/crc32"
	"unsafe"

	"golang.org/x/sys/cpu"
)

// foldFrom is the length, in bytes, from which folding is faster than a word at a time. The widest registers have
// as many, and so have the lines that stores past the caches fill.
const foldFrom = 64

// folds has, for a distance of 2048, 1024, 512, 256 and 128 bits each, x to that and 32 more, and to that and 32
// less, modulo the CRC's polynomial. Bits are in its order, and one place up, as a product of reflected factors
// wants it.
var folds = [...]uint64{
	0xdcb17aa4, 0xb9e02b86,
	0x6992cea2, 0x0d3b6092,
	0x740eef02, 0x9e4addf8,
	0x1384aa63a, 0xba4fc28e,
	0xf20c0dfe, 0x14cd00bd6,
}

// wide reports whether the processor multiplies without carry in registers of 256 bits, which package cpu tells
// only of those with AVX-512.
func wide() bool

func has(f form) bool {
	switch f {
	case portable:
		return true
	case words:
		return false // one word after the other is slower than the portable form, which has three at a time
	case fold128:
		return cpu.X86.HasAVX && cpu.X86.HasPCLMULQDQ && cpu.X86.HasSSE42
	case fold256:
		return cpu.X86.HasAVX2 && has(fold128) && wide()
	}
	return cpu.X86.HasAVX512F && cpu.X86.HasAVX512VPCLMULQDQ && has(fold256)
}

// Of all of these crc is inverted, before and after. copyN and crcN want N/8 bytes at least; streamN a multiple of
// 64, which is not 0, and a dst that is one.
//
//go:noescape
func copyWords(crc uint32, dst, src *byte, n int) uint32

//go:noescape
func crcWords(crc uint32, src *byte, n int) uint32

//go:noescape
func copy128(crc uint32, dst, src *byte, n int) uint32

//go:noescape
func crc128(crc uint32, src *byte, n int) uint32

//go:noescape
func copy256(crc uint32, dst, src *byte, n int) uint32

//go:noescape
func stream256(crc uint32, dst, src *byte, n int) uint32

//go:noescape
func crc256(crc uint32, src *byte, n int) uint32

//go:noescape
func copy512(crc uint32, dst, src *byte, n int) uint32

//go:noescape
func stream512(crc uint32, dst, src *byte, n int) uint32

//go:noescape
func crc512(crc uint32, src *byte, n int) uint32

// copyBy wants as many bytes of dst.
func copyBy(f form, crc uint32, dst, src []byte) uint32 {
	switch {
	case f == portable:
		return copyPortable(crc, dst, src)
	case len(src) < foldFrom:
		return ^copyWords(^crc, unsafe.SliceData(dst), unsafe.SliceData(src), len(src))
	}
	crc = ^crc
	stream := len(src) >= StreamFrom && f != fold128 // stores of 16 bytes past the caches are slower than into them
	if stream {
		head := int(-uintptr(unsafe.Pointer(&dst[0])) % foldFrom)
		crc = copyWords(crc, &dst[0], &src[0], head)
		dst, src = dst[head:], src[head:]
	}
	for len(src) > 0 {
		d, s, n := &dst[0], &src[0], min(len(src), piece)
		if stream && n >= foldFrom {
			n -= n % foldFrom
		}
		switch {
		case n < foldFrom:
			crc = copyWords(crc, d, s, n)
		case f == fold512 && stream:
			crc = stream512(crc, d, s, n)
		case f == fold512:
			crc = copy512(crc, d, s, n)
		case f == fold256 && stream:
			crc = stream256(crc, d, s, n)
		case f == fold256:
			crc = copy256(crc, d, s, n)
		default:
			crc = copy128(crc, d, s, n)
		}
		dst, src = dst[n:], src[n:]
	}
	return ^crc
}

// In caches, folding 128 bits is slower than package crc32; behind them it is faster.
func crcBy(f form, crc uint32, b []byte) uint32 {
	switch {
	case f == portable, f == fold128 && len(b) >= foldFrom && len(b) < StreamFrom:
		return crc32.Update(crc, castagnoli, b)
	case len(b) < foldFrom:
		return ^crcWords(^crc, unsafe.SliceData(b), len(b))
	}
	crc = ^crc
	for len(b) > 0 {
		p, n := &b[0], min(len(b), piece)
		switch {
		case n < foldFrom:
			crc = crcWords(crc, p, n)
		case f == fold512:
			crc = crc512(crc, p, n)
		case f == fold256:
			crc = crc256(crc, p, n)
		default:
			crc = crc128(crc, p, n)
		}
		b = b[n:]
	}
	return ^crc
}
