package heap

import "math/bits"

// Plain bitmaps, with ranges [lo, hi). A bitmap's length is a whole number of
// words and hi is within it.

func hasBit(m []uint64, i uint32) bool { return m[i>>6]>>(i&63)&1 != 0 }
func setBit(m []uint64, i uint32)      { m[i>>6] |= 1 << (i & 63) }
func clearBit(m []uint64, i uint32)    { m[i>>6] &^= 1 << (i & 63) }

// eachWord calls f with the words that [lo, hi) touches and the bits in each.
func eachWord(m []uint64, lo, hi uint32, f func(w *uint64, mask uint64)) {
	for lo < hi {
		end := min(hi, (lo|63)+1)
		f(&m[lo>>6], ^uint64(0)>>(64-(end-lo))<<(lo&63))
		lo = end
	}
}

func setRange(m []uint64, lo, hi uint32) {
	eachWord(m, lo, hi, func(w *uint64, mask uint64) { *w |= mask })
}

func clearRange(m []uint64, lo, hi uint32) {
	eachWord(m, lo, hi, func(w *uint64, mask uint64) { *w &^= mask })
}

func anyInRange(m []uint64, lo, hi uint32) bool {
	found := false
	eachWord(m, lo, hi, func(w *uint64, mask uint64) { found = found || *w&mask != 0 })
	return found
}

// sameUntil returns the end of the stretch of bits that starts at lo and equals
// the bit there, at most hi.
func sameUntil(m []uint64, lo, hi uint32) uint32 {
	var flip uint64
	if hasBit(m, lo) {
		flip = ^uint64(0)
	}
	for i := lo; i < hi; i = i&^63 + 64 {
		if x := (m[i>>6] ^ flip) >> (i & 63); x != 0 {
			return min(hi, i+uint32(bits.TrailingZeros64(x)))
		}
	}
	return hi
}
