package ring

import (
	"errors"
	"math"
	"slices"
	"testing"
)

// Parts come as they were put, and parts that are not those of a View are refused.
func TestParts(t *testing.T) {
	for _, n := range []int{1, 2, MaxParts} {
		var parts []Part
		sum := uint64(0)
		for i := range n {
			parts = append(parts, Part{uint64(i) << 40, uint64(i + 2)})
			sum += uint64(i + 2)
		}
		slot := make([]byte, SlotSize)
		PutParts(slot, parts)
		if got, err := ParseParts(slot, sum); err != nil || !slices.Equal(got, parts) {
			t.Errorf("%d parts: %v, %v", n, got, err)
		}
		for _, wrong := range []uint64{sum - 1, sum + 1, math.MaxUint64} {
			if got, err := ParseParts(slot, wrong); !errors.Is(err, ErrProtocol) || got != nil {
				t.Errorf("%d parts of %d bytes, in a View of %d: %v, %v", n, sum, wrong, got, err)
			}
		}
	}
}
