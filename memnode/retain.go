package memnode

import (
	"fmt"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
)

// InitRegion makes memory a region of an incarnation as the directory wants it, before anybody is given its keys: memory that is zero, or,
// if the directory wants it retained, what the memory node had of the placement group before. An error leaves it as it was.
func InitRegion(mem []byte, w *dirpb.WantRegion, incarnation uint64) error {
	if w.GetRetain() != nil {
		var arrays []layout.Array
		for _, a := range w.Retain.Arrays {
			arrays = append(arrays, layout.Array{Off: a.GetOffset(), Segments: a.GetSegments()})
		}
		if err := layout.RetainIndex(mem[:w.GetIndexBytes()], arrays); err != nil {
			return fmt.Errorf("retained index: %w", err)
		}
	}
	layout.InitRegion(mem, layout.RegionHeader{
		PG:          w.GetPgId(),
		Namespace:   w.GetNamespaceId(),
		Epoch:       w.GetEpoch(),
		RegionBytes: w.GetRegionBytes(),
		IndexBytes:  w.GetIndexBytes(),
		Incarnation: incarnation,
	})
	return nil
}
