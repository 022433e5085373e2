package engine_test

import (
	"testing"

	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/internal/heap"
	"github.com/kvd-project/kvd/internal/layout"
)

// A place that is longer than asked for is as long as its slot word will tell.
func TestFitExpressible(t *testing.T) {
	for size := uint32(1); size < 3000; size++ {
		for _, share := range []uint32{2, 3, 5, 9, 17, 33} {
			code, _ := layout.CodeFor(int(size-size/share) * layout.UnitSize)
			h := heap.New()
			if err := h.AddRun(0, size); err != nil {
				t.Fatal(err)
			}
			p, ok := engine.Fit(h, layout.UnitsOf(code))
			if told, _ := layout.CodeFor(int(p.Units) * layout.UnitSize); ok && layout.UnitsOf(told) != p.Units {
				t.Fatalf("%v of %d units, for %d: the slot word says %d", p, size, layout.UnitsOf(code),
					layout.UnitsOf(told))
			}
		}
	}
}
