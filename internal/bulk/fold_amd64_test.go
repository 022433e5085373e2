package bulk

import (
	"hash/crc32"
	"testing"
)

// The constants are powers of x modulo the polynomial.
func TestFolds(t *testing.T) {
	power := func(n int) uint64 {
		p := uint32(1 << 31) // 1
		for range n {
			p = p>>1 ^ crc32.Castagnoli&-(p&1)
		}
		return uint64(p) << 1
	}
	for i, distance := range []int{2048, 1024, 512, 256, 128} {
		if got, want := [2]uint64(folds[2*i:]), [2]uint64{power(distance + 32), power(distance - 32)}; got != want {
			t.Errorf("distance %d: %#x, want %#x", distance, got, want)
		}
	}
}
