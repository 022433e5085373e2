package keys

import (
	"cmp"
	"context"
	"errors"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/patient"
)

// wouldErase counts the keys that erase would delete.
func (a *commands) wouldErase(ctx context.Context, match func([]byte) bool) error {
	return a.With(ctx, ctl.SessionOptions{ReadOnly: true}, func(s ctl.Store) error {
		n := 0
		err := patient.Keys(ctx, s, client.ScanOptions{KeysOnly: true, Match: match}, func(client.KV) (bool, error) {
			n++
			return true, nil
		})
		if err != nil {
			return err
		}
		return a.printWouldDelete(n, 0)
	})
}

// wouldDelete looks at keys as del is given them.
func (a *commands) wouldDelete(ctx context.Context, ks [][]byte, byVersion bool, version uint64) error {
	return a.With(ctx, ctl.SessionOptions{Lanes: 1, ReadOnly: true}, func(s ctl.Store) error {
		found, missing := 0, 0
		var failed error
		for i, r := range s.MultiGet(ctx, ks) {
			err := r.Err
			if err == nil && byVersion && r.Item.Version != version {
				err = client.ErrConflict
			}
			switch {
			case err == nil:
				found++
				continue
			case errors.Is(err, client.ErrNotFound):
				missing++
			}
			if failed == nil {
				failed = a.About(ks[i], err)
			}
		}
		if failed != nil && found == 0 {
			return failed
		}
		return cmp.Or(a.printWouldDelete(found, missing), failed)
	})
}

func (a *commands) printWouldDelete(n, missing int) error {
	if a.JSON() {
		return a.PrintJSON(map[string]any{"dry_run": true, "would_delete": n, "not_found": missing})
	}
	a.Unchanged()
	a.PrintTable(ctl.Row{"Would delete", "Missing"}, []ctl.Row{{n, missing}})
	return nil
}
