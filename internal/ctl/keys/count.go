package keys

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/patient"
)

func (a *commands) countCommand() *cobra.Command {
	var prefix, pattern string
	c := &cobra.Command{
		Use:   "count",
		Short: "Count the keys of the namespace, or some of them",
		Long: "Print how many keys there are. Without --prefix and --pattern that is from the index\n" +
			"alone: expired keys count until their memory is taken back. With one of them every key\n" +
			"is looked at, as scan does, and expired keys do not count. Keys that change meanwhile\n" +
			"may count twice or not at all.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			p, err := a.Prefix(prefix)
			if err != nil {
				return ctl.Usagef("--prefix: %w", err)
			}
			ctx := cmd.Context()
			return a.With(ctx, ctl.SessionOptions{Lanes: 1, ReadOnly: true}, func(s ctl.Store) error {
				var n uint64
				var damaged error
				if match := ctl.Matcher(p, pattern); match != nil {
					damaged = patient.Keys(ctx, s, client.ScanOptions{KeysOnly: true, Match: match},
						func(client.KV) (bool, error) {
							n++
							return true, nil
						})
					if damaged != nil && !errors.Is(damaged, client.ErrCorrupt) {
						return damaged
					}
				} else if err := patient.Do(ctx, func() (err error) {
					n, err = s.Count(ctx)
					return err
				}); err != nil {
					return fmt.Errorf("count: %w", err)
				}
				if a.JSON() {
					err = a.PrintJSON(map[string]any{"keys": n})
				} else {
					_, err = fmt.Fprintln(a.Stdout, n)
				}
				return errors.Join(err, damaged)
			})
		},
	}
	c.Flags().StringVar(&prefix, "prefix", "", "only keys that begin with this")
	c.Flags().StringVar(&pattern, "pattern", "", `only keys that match this as Redis has it: * ? [a-z] [^a] \x`)
	return c
}
