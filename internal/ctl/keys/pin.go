package keys

import (
	"time"

	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/ctl"
)

func (a *commands) pinCommand() *cobra.Command {
	var last time.Duration
	c := &cobra.Command{
		Use:   "pin KEY --for DURATION",
		Short: "Have eviction pass over a key for some time",
		Long: "Have eviction pass over a key of a cache for some time, 70 minutes at most. The longest of\n" +
			"several pins counts. A pin is a hint: it is lost if the key moves to another\n" +
			"memory node, and then the key may be evicted. While more is pinned than the namespace\n" +
			"allows, pinned keys are evicted first: kvctl namespace set --max-pinned.",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.CompleteKey(false),
		RunE: func(cmd *cobra.Command, args []string) error {
			k, err := a.Key(args[0])
			if err != nil {
				return err
			}
			if last < time.Millisecond || last > client.MaxPin {
				return ctl.Usagef("--for %v: want 1ms to %v", last, client.MaxPin)
			}
			return a.With(cmd.Context(), ctl.SessionOptions{Lanes: 1}, func(s ctl.Store) error {
				return a.About(k, s.Pin(cmd.Context(), k, a.Now().Add(last)))
			})
		},
	}
	c.Flags().DurationVar(&last, "for", 0, "how long the key stays, 70m at most")
	return c
}

func (a *commands) unpinCommand() *cobra.Command {
	return &cobra.Command{
		Use:               "unpin KEY",
		Short:             "End what pin began",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.CompleteKey(false),
		RunE: func(cmd *cobra.Command, args []string) error {
			k, err := a.Key(args[0])
			if err != nil {
				return err
			}
			return a.With(cmd.Context(), ctl.SessionOptions{Lanes: 1}, func(s ctl.Store) error {
				return a.About(k, s.Unpin(cmd.Context(), k))
			})
		},
	}
}
