package heap

import "math/bits"

// unitSet is a set of the units of one extent whose neighbours are found in
// constant time: each level has a bit for every non-zero word of the one below.
type unitSet struct {
	l0 [ExtentUnits / 64]uint64
	l1 [ExtentUnits / 64 / 64]uint64
	l2 uint64
}

const _ = uint(64 - ExtentUnits/64/64) // l2 covers l1

func (s *unitSet) has(i uint32) bool { return s.l0[i>>6]>>(i&63)&1 != 0 }

func (s *unitSet) add(i uint32) {
	s.l0[i>>6] |= 1 << (i & 63)
	s.l1[i>>12] |= 1 << (i >> 6 & 63)
	s.l2 |= 1 << (i >> 12)
}

func (s *unitSet) remove(i uint32) {
	if s.l0[i>>6] &^= 1 << (i & 63); s.l0[i>>6] != 0 {
		return
	}
	if s.l1[i>>12] &^= 1 << (i >> 6 & 63); s.l1[i>>12] == 0 {
		s.l2 &^= 1 << (i >> 12)
	}
}

// next returns the least member at or above i, or ExtentUnits.
func (s *unitSet) next(i uint32) uint32 {
	if i >= ExtentUnits {
		return ExtentUnits
	}
	if x := s.l0[i>>6] >> (i & 63); x != 0 {
		return i + uint32(bits.TrailingZeros64(x))
	}
	w := i>>6 + 1
	if w&63 != 0 {
		if x := s.l1[w>>6] >> (w & 63); x != 0 {
			w += uint32(bits.TrailingZeros64(x))
			return w<<6 + uint32(bits.TrailingZeros64(s.l0[w]))
		}
	}
	x := s.l2 &^ (1<<((w+63)>>6) - 1)
	if x == 0 {
		return ExtentUnits
	}
	v := uint32(bits.TrailingZeros64(x))
	w = v<<6 + uint32(bits.TrailingZeros64(s.l1[v]))
	return w<<6 + uint32(bits.TrailingZeros64(s.l0[w]))
}

// prev returns the greatest member at or below i, or 0.
func (s *unitSet) prev(i uint32) uint32 {
	w := i >> 6
	if x := s.l0[w] << (63 - i&63); x != 0 {
		return i - uint32(bits.LeadingZeros64(x))
	}
	v := w >> 6
	if x := s.l1[v] & (1<<(w&63) - 1); x != 0 {
		w = v<<6 + 63 - uint32(bits.LeadingZeros64(x))
		return w<<6 + 63 - uint32(bits.LeadingZeros64(s.l0[w]))
	}
	x := s.l2 & (1<<v - 1)
	if x == 0 {
		return 0
	}
	v = 63 - uint32(bits.LeadingZeros64(x))
	w = v<<6 + 63 - uint32(bits.LeadingZeros64(s.l1[v]))
	return w<<6 + 63 - uint32(bits.LeadingZeros64(s.l0[w]))
}

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
