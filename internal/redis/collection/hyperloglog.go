package collection

import (
	"encoding/binary"
	"math"
)

// A HyperLogLog is Redis's, byte for byte (hyperloglog.c of Redis 7.0): a string, which clients may GET in one store
// and SET in another.
//
//	0      4     5      8          16
//	+------+-----+------+----------+-----------
//	| HYLL | enc | 0    | count    | registers
//	+------+-----+------+----------+-----------
//
//	enc    0 dense: 16384 registers of 6 bits, from the least significant bit on; 1 sparse: runs of registers
//	count  the estimate, if the most significant bit of the last byte is 0. Nobody here writes one.
//
// Sparse runs are 00xxxxxx, x+1 zeros; 01xxxxxx yyyyyyyy, as many as both make, plus 1; 1vvvvvxx, x+1 registers of v+1.
const (
	hllHeader    = 16
	hllP         = 14
	hllRegisters = 1 << hllP
	hllQ         = 64 - hllP
	hllDenseLen  = hllHeader + hllRegisters*6/8
	hllSparseMax = 3000 // bytes with the header; beyond it is dense
	hllSparseVal = 32   // the greatest value that a run can have
	hllZeroMax   = 64   // registers in a run of each kind
	hllXZeroMax  = 16384
	hllValMax    = 4
)

// NewHyperLogLog is one that has counted nothing.
func NewHyperLogLog() []byte {
	b := make([]byte, hllHeader, hllHeader+2+16)
	copy(b, "HYLL")
	b[4], b[15] = 1, 0x80
	return appendHLLZeros(b, hllRegisters)
}

// IsHyperLogLog reports whether the header is that of one.
func IsHyperLogLog(b []byte) bool {
	return len(b) >= hllHeader && string(b[:4]) == "HYLL" && b[4] <= 1 && (b[4] == 1 || len(b) == hllDenseLen)
}

// IsDenseHyperLogLog tells the encoding of one.
func IsDenseHyperLogLog(b []byte) bool { return b[4] == 0 }

// hllPlace is the register of an element, and what it says of that register.
func hllPlace(element []byte) (register int, rank uint8) {
	h := murmur64A(element, 0xadc83b19)
	register = int(h & (hllRegisters - 1))
	h = h>>hllP | 1<<hllQ
	for rank = 1; h&1 == 0; rank++ {
		h >>= 1
	}
	return register, rank
}

// murmur64A is MurmurHash64A with bytes in little-endian order, as Redis hashes elements.
func murmur64A(b []byte, seed uint64) uint64 {
	const m, r = 0xc6a4a7935bd1e995, 47
	h := seed ^ uint64(len(b))*m
	for ; len(b) >= 8; b = b[8:] {
		k := binary.LittleEndian.Uint64(b) * m
		k = (k ^ k>>r) * m
		h = (h ^ k) * m
	}
	if len(b) > 0 {
		for i := len(b) - 1; i >= 0; i-- {
			h ^= uint64(b[i]) << (8 * i)
		}
		h *= m
	}
	h = (h ^ h>>r) * m
	return h ^ h>>r
}

// AddHyperLogLog counts an element in b, which may be written to, and returns it, longer or another one, with whether
// it has changed.
func AddHyperLogLog(b, element []byte) (_ []byte, changed bool, err error) {
	register, rank := hllPlace(element)
	if b, changed, err = setHLL(b, register, rank); changed {
		b[15] |= 0x80
	}
	return b, changed, err
}

// setHLL makes a register at least rank.
func setHLL(b []byte, register int, rank uint8) (_ []byte, changed bool, err error) {
	if b[4] == 0 {
		return b, setHLLDense(b[hllHeader:], register, rank), nil
	}
	return setHLLSparse(b, register, rank)
}

func setHLLDense(regs []byte, register int, rank uint8) bool {
	if hllDense(regs, register) >= rank {
		return false
	}
	at, shift := register*6/8, register*6&7
	regs[at] = regs[at]&^(63<<shift) | rank<<shift
	if shift > 2 {
		regs[at+1] = regs[at+1]&^(63>>(8-shift)) | rank>>(8-shift)
	}
	return true
}

func hllDense(regs []byte, register int) uint8 {
	at, shift := register*6/8, register*6&7
	v := regs[at] >> shift
	if shift > 2 {
		v |= regs[at+1] << (8 - shift)
	}
	return v & 63
}

// hllRun is the run at the start of p: so many registers of a value, in size bytes. size 0: there is none.
func hllRun(p []byte) (n int, v uint8, size int) {
	switch {
	case p[0]&0x80 != 0:
		return int(p[0]&3) + 1, p[0]>>2&31 + 1, 1
	case p[0]&0x40 == 0:
		return int(p[0]&63) + 1, 0, 1
	case len(p) > 1:
		return int(p[0]&63)<<8 + int(p[1]) + 1, 0, 2
	}
	return 0, 0, 0
}

func appendHLLZeros(b []byte, n int) []byte {
	if n > hllZeroMax {
		return append(b, 0x40|byte((n-1)>>8), byte(n-1))
	}
	return append(b, byte(n-1))
}

func hllVal(n int, v uint8) byte { return 0x80 | (v-1)<<2 | byte(n-1) }

// setHLLSparse splits the run that the register is in, and joins runs around it that are alike, just as Redis does: the
// bytes are to be the same.
func setHLLSparse(b []byte, register int, rank uint8) (_ []byte, changed bool, err error) {
	if rank > hllSparseVal {
		return promoteHLL(b, register, rank)
	}
	prev, at, first := -1, hllHeader, 0
	var n, size int
	var v uint8
	for {
		if at >= len(b) {
			return b, false, ErrCorrupt
		}
		if n, v, size = hllRun(b[at:]); size == 0 {
			return b, false, ErrCorrupt
		}
		if register < first+n {
			break
		}
		prev, first = at, first+n
		at += size
	}
	switch {
	case v >= rank:
		return b, false, nil
	case n == 1 && size == 1:
		b[at] = hllVal(1, rank)
	default:
		var seq [5]byte
		s := seq[:0]
		part := func(n int) {
			switch {
			case n == 0:
			case v == 0:
				s = appendHLLZeros(s, n)
			default:
				s = append(s, hllVal(n, v))
			}
		}
		part(register - first)
		s = append(s, hllVal(1, rank))
		part(first + n - 1 - register)
		if len(s) > size && len(b)+len(s)-size > hllSparseMax {
			return promoteHLL(b, register, rank)
		}
		b = replaceHLL(b, at, size, s)
	}
	if prev < 0 {
		prev = hllHeader
	}
	return joinHLL(b, prev), true, nil
}

// replaceHLL puts seq in the place of size bytes.
func replaceHLL(b []byte, at, size int, seq []byte) []byte {
	for i := size; i < len(seq); i++ {
		b = append(b, 0)
	}
	tail := at + size
	copy(b[at+len(seq):], b[tail:len(b)-max(0, len(seq)-size)])
	copy(b[at:], seq)
	return b[:len(b)-max(0, size-len(seq))]
}

// joinHLL joins runs of the same value among the five that begin at p.
func joinHLL(b []byte, p int) []byte {
	for scan := 5; p < len(b) && scan > 0; scan-- {
		if b[p]&0x80 == 0 {
			if p++; b[p-1]&0x40 != 0 {
				p++
			}
			continue
		}
		if p+1 < len(b) && b[p+1]&0x80 != 0 && b[p]>>2 == b[p+1]>>2 {
			if n := int(b[p]&3) + int(b[p+1]&3) + 2; n <= hllValMax {
				b[p+1] = b[p+1]&^3 | byte(n-1)
				b = append(b[:p], b[p+1:]...)
				continue
			}
		}
		p++
	}
	return b
}

// promoteHLL makes a sparse one dense, and sets a register that had a lesser value.
func promoteHLL(b []byte, register int, rank uint8) ([]byte, bool, error) {
	d, err := DenseHyperLogLog(b)
	if err != nil {
		return b, false, err
	}
	return d, setHLLDense(d[hllHeader:], register, rank), nil
}

// DenseHyperLogLog is b in the dense encoding.
func DenseHyperLogLog(b []byte) ([]byte, error) {
	if b[4] == 0 {
		return b, nil
	}
	d := make([]byte, hllDenseLen)
	copy(d, b[:hllHeader])
	d[4] = 0
	err := eachHLLRun(b, func(first, n int, v uint8) {
		for i := range n {
			if v > 0 {
				setHLLDense(d[hllHeader:], first+i, v)
			}
		}
	})
	return d, err
}

// eachHLLRun gives the runs of a sparse one, which together are all registers.
func eachHLLRun(b []byte, f func(first, n int, v uint8)) error {
	first := 0
	for p := b[hllHeader:]; len(p) > 0; {
		n, v, size := hllRun(p)
		if size == 0 || first+n > hllRegisters {
			return ErrCorrupt
		}
		f(first, n, v)
		first += n
		p = p[size:]
	}
	if first != hllRegisters {
		return ErrCorrupt
	}
	return nil
}

// EachHyperLogLogRun gives the runs of a sparse one that Merge has found sound; long is the kind of two bytes.
func EachHyperLogLogRun(b []byte, f func(n int, v uint8, long bool)) {
	for p := b[hllHeader:]; len(p) > 0; {
		n, v, size := hllRun(p)
		if size == 0 {
			return
		}
		f(n, v, size == 2)
		p = p[size:]
	}
}

// HyperLogLogRegisters are the registers of one, or of several: the greatest of each.
type HyperLogLogRegisters [hllRegisters]uint8

// Merge takes the registers of b where they are greater.
func (r *HyperLogLogRegisters) Merge(b []byte) error {
	if b[4] == 0 {
		for i := range r {
			r[i] = max(r[i], hllDense(b[hllHeader:], i))
		}
		return nil
	}
	return eachHLLRun(b, func(first, n int, v uint8) {
		for i := first; v > 0 && i < first+n; i++ {
			r[i] = max(r[i], v)
		}
	})
}

// AddTo makes each register of b, which may be written to, at least that of r.
func (r *HyperLogLogRegisters) AddTo(b []byte) (_ []byte, err error) {
	for i, v := range r {
		if v == 0 {
			continue
		}
		if b, _, err = setHLL(b, i, v); err != nil {
			return b, err
		}
	}
	b[15] |= 0x80
	return b, nil
}

// Count estimates how many different elements there were (Otmar Ertl, arXiv:1702.01284).
func (r *HyperLogLogRegisters) Count() uint64 {
	var histogram [64]int
	for _, v := range r {
		histogram[v&63]++
	}
	const m = float64(hllRegisters)
	z := m * hllTau((m-float64(histogram[hllQ+1]))/m)
	for j := hllQ; j >= 1; j-- {
		z = (z + float64(histogram[j])) * 0.5
	}
	z += m * hllSigma(float64(histogram[0])/m)
	return uint64(math.Round(0.721347520444481703680 * m * m / z))
}

func hllTau(x float64) float64 {
	if x == 0 || x == 1 {
		return 0
	}
	y, z := 1.0, 1-x
	for {
		x = math.Sqrt(x)
		was := z
		y *= 0.5
		z -= (1 - x) * (1 - x) * y
		if was == z {
			return z / 3
		}
	}
}

func hllSigma(x float64) float64 {
	if x == 1 {
		return math.Inf(1)
	}
	y, z := 1.0, x
	for {
		x *= x
		was := z
		z += x * y
		y += y
		if was == z {
			return z
		}
	}
}
