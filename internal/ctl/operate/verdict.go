package operate

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/overview"
)

// colored reports whether stdout takes colours and symbols: a terminal that is not dumb, and whose user did not
// set NO_COLOR (https://no-color.org).
func (a *commands) colored() bool {
	return ctl.IsTerminal(a.Stdout) && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"
}

// verdictText is v and its reason as one line; on a terminal with a symbol, coloured.
func (a *commands) verdictText(v overview.Verdict, why string) string {
	text := ctl.Visible(fmt.Sprintf("%s: %s", v, why))
	if !a.colored() {
		return text
	}
	color, symbol := 31, "✗"
	switch v {
	case overview.Healthy:
		color, symbol = 32, "✓"
	case overview.Degraded:
		color, symbol = 33, "!"
	}
	return fmt.Sprintf("\x1b[1;%dm%s %s\x1b[0m", color, symbol, text)
}

// printVerdict prints how the store is, and what is wrong with it.
func (a *commands) printVerdict(st *dirpb.StatusReply) {
	problems := overview.Problems(st)
	why := "no problem is known"
	switch n := len(problems); {
	case n == 1:
		why = "1 problem"
	case n > 1:
		why = fmt.Sprintf("%d problems", n)
	}
	fmt.Fprintln(a.Stdout, a.verdictText(overview.VerdictOf(st), why))
	for _, p := range problems {
		fmt.Fprintf(a.Stdout, "\n problem: %s\n    -> %s\n", ctl.Visible(p.What), ctl.Visible(p.Mend))
	}
	fmt.Fprintln(a.Stdout)
}

const statusHelp = `Show how the store is, what is wrong and what mends it, and its state: its parts, the
memory of each namespace, placement groups, jobs. The first line is the verdict:

  healthy      no problem is known
  degraded     every key is served, and something is wrong, such as a missing copy
  unavailable  some keys, or new sessions, are not served until processes are back
  lost         keys are gone, which nobody has accepted (kvctl namespace accept-loss)

With --check the exit status is 1 unless it is healthy; without, 0 whatever the
verdict. It is 3 if no directory node answers. On a terminal the verdict has a
color, unless NO_COLOR is set.

`

func (a *commands) statusCommand() *cobra.Command {
	var check, all bool
	c := ctl.Explained(a.ViewCommand("status", "Show the state of the store at a glance",
		func(st *dirpb.StatusReply) error {
			if err := a.printStatus(st, all); err != nil || !check || overview.VerdictOf(st) == overview.Healthy {
				return err
			}
			return ctl.Fail(ctl.ExitNo)
		}), statusHelp+memoryHelp)
	c.Flags().BoolVar(&check, "check", false, "exit status 1 unless the verdict is healthy")
	c.Flags().BoolVar(&all, "all", false, "every placement group, namespace and job, also where there are more than "+
		"32 of them")
	return c
}
