package archive

import (
	"context"
	"time"
)

// Keep says which snapshots of a namespace stay: the Last newest, and the newest of each of some hours and days. Those
// are the last Hourly and Daily ones that have any, of UTC.
type Keep struct{ Last, Hourly, Daily int }

// leftoverAge is how old the newest file of a snapshot without a manifest is at least before it is taken away: somebody
// may be writing it.
const leftoverAge = 24 * time.Hour

// Prune divides the snapshots of one namespace, newest first as List gives them, into those that stay and those that
// go. The newest that is complete stays in any case.
func (k Keep) Prune(all []Entry, now time.Time) (stay, away []Entry) {
	hours, days, complete := make(map[string]bool), make(map[string]bool), 0
	for _, e := range all {
		if !e.Complete {
			if now.Sub(e.Changed) < leftoverAge {
				stay = append(stay, e)
			} else {
				away = append(away, e)
			}
			continue
		}
		keep := complete == 0 || complete < k.Last
		complete++
		for _, by := range []struct {
			seen map[string]bool
			form string
			n    int
		}{{hours, "2006010215", k.Hourly}, {days, "20060102", k.Daily}} {
			if at := e.Begun.UTC().Format(by.form); !by.seen[at] && len(by.seen) < by.n {
				by.seen[at], keep = true, true
			}
		}
		if keep {
			stay = append(stay, e)
		} else {
			away = append(away, e)
		}
	}
	return stay, away
}

// Remove takes a snapshot away, its manifest first.
func Remove(ctx context.Context, d Destination, e Entry) error {
	return removeSnapshot(ctx, d, e.Namespace+"/"+e.ID+"/")
}
