package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/patient"
)

// eraseKeys is how many keys are deleted in one call.
const eraseKeys = 512

func (a *app) flushCommand() *cobra.Command {
	var yes, dry bool
	c := changes(&cobra.Command{
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
			return a.with(ctx, sessionOptions{}, func(s store) error { return a.erase(ctx, s, "flush", nil) })
		},
	})
	c.Flags().BoolVar(&yes, "yes", false, "do not ask")
	dryFlag(c, &dry)
	return c
}

// confirm has the user type the namespace's name.
func (a *app) confirm(ctx context.Context) error {
	if !isTerminal(a.stdin) {
		return usagef("every key of namespace %q would be deleted: want --yes", a.namespace)
	}
	return a.typed(ctx, a.namespace, fmt.Sprintf("This deletes every key of namespace %q.", a.namespace))
}

// typed warns, and has the user type a name. Nothing has happened if it is not that one.
func (a *app) typed(ctx context.Context, name, warning string) error {
	fmt.Fprintf(a.stderr, "%s Type its name to go on: ", warning)
	sc := bufio.NewScanner(a.quiet(ctx))
	more := sc.Scan()
	if !more || !isTerminal(a.stdin) { // which shows the end of the line
		fmt.Fprintln(a.stderr)
	}
	if !more {
		if err := sc.Err(); err != nil {
			return err
		}
	}
	if got := strings.TrimSpace(sc.Text()); got != name {
		return exitWith(exitNo, fmt.Errorf("%q was typed, want %q: nothing was deleted", got, name))
	}
	return nil
}

// erase deletes the keys that match selects, nil: all, and says how many they were. Damage does not end it: what it had
// to leave is its error at the end.
func (a *app) erase(ctx context.Context, s store, verb string, match func([]byte) bool) error {
	bar := a.bar(verb, "keys", func() int64 {
		n, err := s.Count(ctx)
		if err != nil {
			return -1
		}
		return int64(n) // about: others write meanwhile
	})
	defer bar.end()
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
					left = append(left, a.about(batch[i], r.Err))
				default:
					again = append(again, batch[i])
					if first == nil {
						first = a.about(batch[i], r.Err)
					}
				}
			}
			batch = again
			return first
		})
		batch = nil
		bar.step(looked)
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
	bar.end()
	damaged := patient.LeftOut(left)
	if err != nil {
		return partly(deleted > 0, errors.Join(err, damaged), "after %d deleted keys", deleted)
	}
	seconds := time.Since(start).Seconds()
	if a.json() {
		return errors.Join(a.printJSON(map[string]any{"deleted": deleted, "seconds": seconds}), damaged)
	}
	a.printTable(row{"Deleted", "Seconds", "Keys/s"},
		[]row{{deleted, fmt.Sprintf("%.3f", seconds), fmt.Sprintf("%.0f", float64(deleted)/seconds)}})
	return damaged
}
