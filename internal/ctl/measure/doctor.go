package measure

import (
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/doctor"
)

func (a *commands) doctorCommand() *cobra.Command {
	var serve bool
	var listen, against string
	c := &cobra.Command{
		Use:   "doctor",
		Short: "Tell how well this machine can do RDMA, and what to do about it",
		Long: "Look at this machine's RDMA adapters, kernel modules, limits, huge pages and\n" +
			"network settings, and say for each what was found and what to do. Nothing is changed,\n" +
			"and no store is needed.\n\n" +
			"  ok    as it should be\n" +
			"  note  works; there is something to know or to gain\n" +
			"  warn  something that is there does not work, or not well\n" +
			"  FAIL  a provider that must work does not: shm and tcp, or the one that\n" +
			"        --provider names\n\n" +
			"Exit status 1 if something is FAIL. A machine without an adapter fails with\n" +
			"--provider verbs only.\n\n" +
			"--against HOST measures the way to another machine, on which kvctl doctor --serve\nruns: " +
			"a ping-pong and each verb's bandwidth. It tells what was lost\nmeanwhile, and compares MTUs and " +
			"versions of RoCE. It works over tcp too, without an\nadapter.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if a.Provider != "" && !slices.Contains(doctor.Providers, a.Provider) {
				return ctl.Usagef("--provider %q: want one of %s", a.Provider, strings.Join(doctor.Providers, ", "))
			}
			switch {
			case serve && against != "":
				return ctl.Usagef("--serve, --against: want one of them on either machine")
			case listen != "" && !serve:
				return ctl.Usagef("--listen: is for --serve")
			case a.Provider == "shm" && (serve || against != ""):
				return ctl.Usagef("--provider shm: ends within one machine; want tcp or verbs")
			case serve:
				return a.doctorServe(cmd.Context(), doctorListen(listen))
			}
			findings := doctor.Examine(a.local(), a.Provider)
			if against == "" {
				return a.doctor(findings, nil)
			}
			more, results, err := a.against(cmd.Context(), against)
			if err != nil {
				return err
			}
			return a.doctor(append(findings, more...), results)
		},
	}
	f := c.Flags()
	f.StringVar(&against, "against", "", "measure the way to HOST[:PORT] too, where kvctl doctor --serve runs")
	f.BoolVar(&serve, "serve", false, "be the other machine of --against, until interrupted")
	f.StringVar(&listen, "listen", "", "address of --serve (default "+doctorListen("")+")")
	return c
}

func (a *commands) doctor(findings []doctor.Finding, results []Measured) error {
	count := map[doctor.Level]int{}
	for _, f := range findings {
		count[f.Level]++
	}
	if a.JSON() {
		out := map[string]any{"findings": findings}
		if len(results) > 0 {
			out["results"] = results
		}
		if err := a.PrintJSON(out); err != nil {
			return err
		}
	} else {
		a.printFindings(findings)
		fmt.Fprintf(a.Stdout, "\n%d ok, %d note, %d warn, %d FAIL\n", count[doctor.OK], count[doctor.Note],
			count[doctor.Warn], count[doctor.Fail])
	}
	if count[doctor.Fail] > 0 {
		return ctl.Fail(ctl.ExitNo)
	}
	return nil
}

// printFindings prints a line a finding, below the name of its group, and its
// advice on another.
func (a *commands) printFindings(findings []doctor.Finding) {
	width := 0
	for _, f := range findings {
		width = max(width, utf8.RuneCountInString(f.Check))
	}
	group := ""
	for i, f := range findings {
		if f.Group != group || i == 0 {
			group = f.Group
			if i > 0 {
				fmt.Fprintln(a.Stdout)
			}
			fmt.Fprintln(a.Stdout, group)
		}
		mark := f.Level.String()
		if f.Level == doctor.Fail {
			mark = "FAIL"
		}
		fmt.Fprintf(a.Stdout, "  %-4s  %-*s  %s\n", mark, width, f.Check, f.Found)
		if f.Advice != "" {
			fmt.Fprintf(a.Stdout, "        %-*s  -> %s\n", width, "", f.Advice)
		}
	}
}
