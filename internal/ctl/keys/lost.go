package keys

import (
	"context"
	"errors"
	"fmt"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/index/repair"
	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/layout"
)

// freeKeys frees the records of which no copy is good, and which may be those of keys.
func (a *commands) freeKeys(ctx context.Context, s ctl.Store, keys [][]byte) error {
	works := make([]*repair.Work, len(keys))
	for i, k := range keys {
		loc, err := s.Locate(k)
		if err != nil {
			return a.About(k, err)
		}
		works[i] = &repair.Work{PG: loc.PG, Off: loc.Stash - layout.StashGroup*layout.GroupSize, FreeLost: true,
			Only: [][]uint16{{layout.FP(loc.Hash)}}, More: []uint64{loc.Home, loc.Stash}}
	}
	freed, vain := uint64(0), 0
	var first error
	for i, err := range s.Work(ctx, index.Scrub, works) {
		freed += works[i].Freed
		if err == nil && works[i].Freed == 0 {
			vain++
			err = fmt.Errorf("%w: nothing that is lost may be its record", client.ErrNotFound)
		}
		if err != nil && (first == nil || errors.Is(first, client.ErrNotFound) && !errors.Is(err, client.ErrNotFound)) {
			first = a.About(keys[i], err)
		}
	}
	if a.JSON() {
		if err := a.PrintJSON(map[string]any{"freed": freed, "not_found": vain}); err != nil {
			return err
		}
	}
	if first == nil {
		return nil
	}
	return ctl.Partly(freed > 0, first, "after %d records were freed", freed)
}
