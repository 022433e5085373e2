package ctl

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/overview"
)

// Annotations of commands.
const (
	// Writes marks those whose errors must tell whether they happened.
	Writes = "writes"
	// Brief marks those that read a key or a few, and so are over soon.
	Brief = "brief"
)

// ViewCommand is a command that shows one Status reply.
func (a *App) ViewCommand(name, short string, print func(*dirpb.StatusReply) error) *cobra.Command {
	return &cobra.Command{
		Use: name, Short: short, Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.WithBackend(func(b Backend) error {
				st, err := ClusterView(cmd.Context(), b)
				if err != nil {
					return err
				}
				if answer := overview.Answer(st); answer != "" && name != "status" { // status lists it
					a.Say("kvctl: warning: %s", answer)
				}
				return print(st)
			})
		},
	}
}

// Explained is c with a long description.
func Explained(c *cobra.Command, long string) *cobra.Command {
	c.Long = long
	return c
}

// DryFlag has a command say what it would do, by what it reads before it does it. Between the two others may
// change that.
func DryFlag(c *cobra.Command, dry *bool) {
	c.Flags().BoolVar(dry, "dry-run", false, "change nothing: say what would happen as the store is now")
}

// Unchanged says that nothing happened, on stderr.
func (a *App) Unchanged() { a.Say("kvctl %s: dry run, nothing was changed", a.Verb) }

// Changes marks a command whose errors must tell whether it happened.
func Changes(c *cobra.Command) *cobra.Command {
	c.Annotations = map[string]string{Writes: ""}
	return c
}

// ParseBytes reads "4096", "64KiB", "1.5GiB"; KB, MB and GB mean the same.
func ParseBytes(s string) (uint64, error) {
	num := strings.TrimRight(strings.TrimSpace(s), "KMGTiBkmgtb ")
	unit := strings.ToUpper(strings.TrimSpace(s)[len(num):])
	unit = strings.TrimSuffix(strings.TrimSuffix(strings.TrimSpace(unit), "B"), "I")
	shift, ok := map[string]uint{"": 0, "K": 10, "M": 20, "G": 30, "T": 40}[unit]
	v, err := strconv.ParseFloat(num, 64)
	if err != nil || !ok || !(v >= 0) || v*float64(uint64(1)<<shift) >= 1<<62 {
		return 0, fmt.Errorf("%q: want a number of bytes, such as 4096, 512MiB or 4GiB", s)
	}
	return uint64(v * float64(uint64(1)<<shift)), nil
}

// Complete suggests names that the directory knows.
func (a *App) Complete(names func(*dirpb.StatusReply) []string) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 || a.Ready(cmd) != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		ctx, cancel := context.WithTimeout(cmd.Context(), time.Second)
		defer cancel()
		var out []string
		_ = a.WithBackend(func(b Backend) error {
			st, err := ClusterStatus(ctx, b)
			out = names(st)
			return err
		})
		return out, cobra.ShellCompDirectiveNoFileComp
	}
}

// maxTop bounds what bigkeys, hotkeys and top list.
const maxTop = 10_000

// TopFlag is how many keys a command lists; CheckTop judges it.
func TopFlag(c *cobra.Command, n *int) { c.Flags().IntVar(n, "top", 10, "how many keys to list") }

// CheckTop refuses a number of keys that is none, or too large to keep in memory.
func CheckTop(n int) error {
	if n < 1 || n > maxTop {
		return Usagef("--top %d: want 1 to %d", n, maxTop)
	}
	return nil
}
