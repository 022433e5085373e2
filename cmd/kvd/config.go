package main

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/internal/config"
)

// configCommand has a subcommand for each role, with that role's flags.
func (a *app) configCommand(roles ...role) *cobra.Command {
	var names []string
	for _, r := range roles {
		names = append(names, r.name)
	}
	top := &cobra.Command{
		Use:   "config ROLE",
		Short: "Print a role's effective settings",
		Long: `Print the settings that file, environment and flags give a role, as a file that
--config takes. Without any of them it prints the defaults, which is a start for a
file of one's own. Secrets are printed as REDACTED unless --show-secrets asks for
them; that word is refused where a secret is wanted.

Settings that the role would refuse are printed too; the exit status is 2 then.`,
		Example: `  kvd config memnode > memnode.yaml
  kvd config directory --config directory.yaml`,
		Args: usageArgs(func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				return fmt.Errorf("no role %q", args[0])
			}
			return fmt.Errorf("want a role: %s", strings.Join(names, ", "))
		}),
		RunE: func(*cobra.Command, []string) error { return nil }, // Args refuses
	}
	var secrets bool
	top.PersistentFlags().BoolVar(&secrets, "show-secrets", false, "print secrets too, which are otherwise "+
		config.Redacted)
	for _, r := range roles {
		s, _ := r.defaults()
		cmd := &cobra.Command{Use: r.name, Short: "Print the effective settings of kvd " + r.name,
			Args: usageArgs(cobra.NoArgs)}
		file := settingFlags(cmd, s)
		cmd.RunE = func(cmd *cobra.Command, _ []string) error {
			problem := config.Load(s, *file, cmd.Flags())
			if problem != nil && !config.IsInvalid(problem) {
				return usageError{problem}
			}
			problem = errors.Join(problem, adapterProblem(s))
			out, err := config.YAML(s, secrets)
			if err != nil {
				return err
			}
			if _, err := a.stdout.Write(out); err != nil {
				return err
			}
			wrong := a.misspeltFor(s)
			for _, name := range slices.Sorted(maps.Keys(wrong)) {
				fmt.Fprintf(a.stderr, "kvd: warning: %s is no setting and is not read; did you mean %s?\n", name,
					wrong[name])
			}
			if problem != nil {
				return usageError{problem}
			}
			return nil
		}
		top.AddCommand(cmd)
	}
	return top
}

// adapterProblem says what is wrong with settings of an RDMA adapter, which package config knows as values alone.
func adapterProblem(s config.Settings) (err error) {
	switch s := s.(type) {
	case *config.MemNode:
		_, err = verbsOptions(s.RDMADevice, s.RDMA, nil)
	case *config.Janitor:
		_, err = verbsOptions(s.RDMADevice, s.RDMA, nil)
	case *config.Gateway:
		_, err = verbsOptions(s.RDMADevice, s.RDMA, nil)
	case *config.Archive:
		_, err = verbsOptions(s.RDMADevice, s.RDMA, nil)
	case *config.Broker:
		_, err = verbsOptions(s.RDMADevice, s.RDMA, nil)
	}
	return err
}
