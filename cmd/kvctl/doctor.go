package main

import (
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/internal/doctor"
	"github.com/kvd-project/kvd/rdma/verbs"
)

func (a *app) doctorCommand() *cobra.Command {
	return &cobra.Command{
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
			"Exit status 1 if something is FAIL. A machine without an adapter fails with\n--provider verbs only.",
		Args:    cobra.NoArgs,
		GroupID: "tools",
		RunE: func(*cobra.Command, []string) error {
			if a.provider != "" && !slices.Contains(doctor.Providers, a.provider) {
				return usagef("--provider %q: want one of %s", a.provider, strings.Join(doctor.Providers, ", "))
			}
			return a.doctor(doctor.Examine(doctor.Local(verbs.Options{Device: a.rdmaDevice}), a.provider))
		},
	}
}

func (a *app) doctor(findings []doctor.Finding) error {
	count := map[doctor.Level]int{}
	for _, f := range findings {
		count[f.Level]++
	}
	if a.json() {
		if err := a.printJSON(map[string]any{"findings": findings}); err != nil {
			return err
		}
	} else {
		a.printFindings(findings)
		fmt.Fprintf(a.stdout, "\n%d ok, %d note, %d warn, %d FAIL\n", count[doctor.OK], count[doctor.Note],
			count[doctor.Warn], count[doctor.Fail])
	}
	if count[doctor.Fail] > 0 {
		return fail(exitNo)
	}
	return nil
}

// printFindings prints a line a finding, below the name of its group, and its
// advice on another.
func (a *app) printFindings(findings []doctor.Finding) {
	width := 0
	for _, f := range findings {
		width = max(width, utf8.RuneCountInString(f.Check))
	}
	group := ""
	for i, f := range findings {
		if f.Group != group || i == 0 {
			group = f.Group
			if i > 0 {
				fmt.Fprintln(a.stdout)
			}
			fmt.Fprintln(a.stdout, group)
		}
		mark := f.Level.String()
		if f.Level == doctor.Fail {
			mark = "FAIL"
		}
		fmt.Fprintf(a.stdout, "  %-4s  %-*s  %s\n", mark, width, f.Check, f.Found)
		if f.Advice != "" {
			fmt.Fprintf(a.stdout, "        %-*s  -> %s\n", width, "", f.Advice)
		}
	}
}
