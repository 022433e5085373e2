package keys

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/patient"
)

// eraseKeys is how many keys are deleted in one call.
const eraseKeys = 512

func (a *commands) flushCommand() *cobra.Command {
	var yes, dry bool
	c := ctl.Changes(&cobra.Command{
		Use:   "flush",
		Short: "Delete every key of the namespace",
		Long: "Delete every key of the namespace that is there when it begins, also what has expired.\n" +
			"The namespace stays, with its memory. On a terminal the namespace's name has to be\n" +
			"typed; elsewhere --yes has to be given. An interrupted run has deleted some keys.\n" +
			"Records that nobody can read stay: the exit status is 5, and the error says where they\n" +
			"are. kvctl check --repair frees them.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx := cmd.Context()
			if dry {
				return a.wouldErase(ctx, nil)
			}
			if !yes {
				if err := a.confirm(ctx); err != nil {
					return err
				}
			}
			return a.With(ctx, ctl.SessionOptions{}, func(s ctl.Store) error { return a.erase(ctx, s, "flush", nil) })
		},
	})
	c.Flags().BoolVar(&yes, "yes", false, "do not ask")
	ctl.DryFlag(c, &dry)
	return c
}

// confirm has the user type the namespace's name.
func (a *commands) confirm(ctx context.Context) error {
	if !ctl.IsTerminal(a.Stdin) {
		return ctl.Usagef("every key of namespace %q would be deleted: want --yes", a.Namespace)
	}
	return a.Typed(ctx, a.Namespace, fmt.Sprintf("This deletes every key of namespace %q.", a.Namespace))
}

// erase deletes the keys that match selects, nil: all, and says how many they were. Damage does not end it: what it had
// to leave is its error at the end.
func (a *commands) erase(ctx context.Context, s ctl.Store, verb string, match func([]byte) bool) error {
	bar := a.Bar(verb, "keys", func() int64 {
		n, err := s.Count(ctx)
		if err != nil {
			return -1
		}
		return int64(n) // about: others write meanwhile
	})
	defer bar.End()
	start := time.Now()
	deleted, looked := 0, 0
	var left []error // keys whose memory is damaged
	var batch [][]byte
	flush := func() error {
		err := patient.Do(ctx, func() error {
			var again [][]byte
			var first error
			for i, r := range s.MultiDelete(ctx, batch) {
				switch {
				case r.Err == nil:
					deleted++
				case errors.Is(r.Err, client.ErrNotFound): // expired, or somebody else's
				case errors.Is(r.Err, client.ErrCorrupt):
					left = append(left, a.About(batch[i], r.Err))
				default:
					again = append(again, batch[i])
					if first == nil {
						first = a.About(batch[i], r.Err)
					}
				}
			}
			batch = again
			return first
		})
		batch = nil
		bar.Step(looked)
		looked = 0
		return err
	}
	o := client.ScanOptions{KeysOnly: true, Expired: true, Match: func(k []byte) bool {
		looked++
		return match == nil || match(k)
	}}
	err := patient.Keys(ctx, s, o, func(kv client.KV) (bool, error) {
		if batch = append(batch, kv.Key); len(batch) == eraseKeys {
			return true, flush()
		}
		return true, nil
	})
	if errors.Is(err, client.ErrCorrupt) {
		left, err = append(left, err), nil
	}
	if err == nil && len(batch) > 0 {
		err = flush()
	}
	bar.End()
	damaged := patient.LeftOut(left)
	if err != nil {
		return ctl.Partly(deleted > 0, errors.Join(err, damaged), "after %d deleted keys", deleted)
	}
	seconds := time.Since(start).Seconds()
	if a.JSON() {
		return errors.Join(a.PrintJSON(map[string]any{"deleted": deleted, "seconds": seconds}), damaged)
	}
	a.PrintTable(ctl.Row{"Deleted", "Seconds", "Keys/s"},
		[]ctl.Row{{deleted, fmt.Sprintf("%.3f", seconds), fmt.Sprintf("%.0f", float64(deleted)/seconds)}})
	return damaged
}
