package keys

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/patient"
)

// maxWatched bounds the keys that watch remembers.
const maxWatched = 100_000

type watchOptions struct {
	key      []byte // nil: all with prefix
	prefix   []byte
	interval time.Duration
	count    int
	limit    int
}

func (a *commands) watchCommand() *cobra.Command {
	var o watchOptions
	var prefix string
	c := &cobra.Command{
		Use:   "watch {KEY | --prefix PREFIX}",
		Short: "Print how a key, or those with a prefix, change",
		Long: "Look at a key, or at all keys with a prefix, every --interval. Print those whose\n" +
			"version is another one than at the look before. The store tells nobody of changes:\n" +
			"this polls, each time by a read that is validated. So changes between two looks are\n" +
			"seen as one, and a key that was there between them only is not seen at all. With\n" +
			"--prefix each look reads the whole namespace's keys: the more there are, the longer\n" +
			"--interval should be. Lines are put, with the version, and del; what has expired is\n" +
			"gone, too. It ends after --count lines, or when it is interrupted. It remembers up to\n" +
			"--limit keys, and ends with an error if there are more.",
		Args:              cobra.MaximumNArgs(1),
		ValidArgsFunction: a.CompleteKey(false),
		RunE: func(cmd *cobra.Command, args []string) error {
			byPrefix := cmd.Flags().Changed("prefix")
			switch {
			case byPrefix == (len(args) == 1):
				return ctl.Usagef("want either a key or --prefix; usage: %s", cmd.UseLine())
			case o.interval < 10*time.Millisecond:
				return ctl.Usagef("--interval %v: want at least 10ms", o.interval)
			case o.count < 0:
				return ctl.Usagef("--count %d: want >= 0", o.count)
			case o.limit < 1 || o.limit > maxWatched:
				return ctl.Usagef("--limit %d: want 1 to %d", o.limit, maxWatched)
			}
			var err error
			if byPrefix {
				o.prefix, err = a.Prefix(prefix)
			} else {
				o.key, err = a.Key(args[0])
			}
			if err != nil {
				return err
			}
			return a.With(cmd.Context(), ctl.SessionOptions{Lanes: 1, ReadOnly: true}, func(s ctl.Store) error {
				return a.watch(cmd.Context(), s, o)
			})
		},
	}
	f := c.Flags()
	f.StringVar(&prefix, "prefix", "", "all keys that begin with this; empty: all")
	f.DurationVar(&o.interval, "interval", time.Second, "time between two looks")
	f.IntVar(&o.count, "count", 0, "how many changes to print; 0: until interrupted")
	f.IntVar(&o.limit, "limit", 10_000, "with --prefix, keys that are remembered at most")
	return c
}

// versions gives the version of each key that o selects and that is there.
func (o *watchOptions) versions(ctx context.Context, s ctl.Store) (map[string]uint64, error) {
	seen := make(map[string]uint64)
	if o.key != nil {
		err := patient.Do(ctx, func() error {
			it, err := s.Get(ctx, o.key)
			if errors.Is(err, client.ErrNotFound) {
				return nil
			}
			if err == nil {
				seen[string(o.key)] = it.Version
			}
			return err
		})
		return seen, err
	}
	err := patient.Keys(ctx, s, client.ScanOptions{KeysOnly: true, Match: ctl.Matcher(o.prefix, "")},
		func(kv client.KV) (bool, error) {
			seen[string(kv.Key)] = kv.Version
			if len(seen) > o.limit {
				return false, ctl.Usagef("more than %d keys begin so: want a longer --prefix, or a greater --limit",
					o.limit)
			}
			return true, nil
		})
	return seen, err
}

func (a *commands) watch(ctx context.Context, s ctl.Store, o watchOptions) error {
	before, err := o.versions(ctx, s)
	if err != nil {
		return a.watchEnded(ctx, err)
	}
	a.Say("kvctl watch: %d keys are there; looking every %v, changes between two looks are seen as one", len(before),
		o.interval)
	for printed := 0; ctl.Pause(ctx, o.interval); {
		now, err := o.versions(ctx, s)
		if err != nil {
			return a.watchEnded(ctx, err)
		}
		for _, k := range slices.Sorted(maps.Keys(now)) {
			if v, ok := before[k]; ok && v == now[k] {
				continue
			}
			if err := a.printChange(k, now[k], true); err != nil {
				return err
			}
			if printed++; printed == o.count {
				return nil
			}
		}
		for _, k := range slices.Sorted(maps.Keys(before)) {
			if _, ok := now[k]; ok {
				continue
			}
			if err := a.printChange(k, 0, false); err != nil {
				return err
			}
			if printed++; printed == o.count {
				return nil
			}
		}
		before = now
		if err := a.Flush(); err != nil {
			return err
		}
	}
	return nil
}

// watchEnded is the error of a look; the user's interruption is how a watch ends.
func (a *commands) watchEnded(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return err
}

func (a *commands) printChange(key string, version uint64, there bool) error {
	at := a.Now().UTC().Format(time.RFC3339)
	if a.JSON() {
		m := map[string]any{"time": at, "change": "del"}
		if there {
			m["change"], m["version"] = "put", versionText(version)
		}
		a.SetKey(m, "key", []byte(key))
		return a.PrintJSON(m)
	}
	if there {
		_, err := fmt.Fprintf(a.Stdout, "%s put %s version %d\n", at, a.Show([]byte(key)), version)
		return err
	}
	_, err := fmt.Fprintf(a.Stdout, "%s del %s\n", at, a.Show([]byte(key)))
	return err
}
