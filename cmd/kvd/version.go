package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/internal/buildinfo"
)

// version is set when a release is linked.
var version = ""

func (a *app) versionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version",
		Args:  usageArgs(cobra.NoArgs),
		RunE:  func(*cobra.Command, []string) error { return a.printVersion() },
	}
}

func (a *app) printVersion() error {
	_, err := fmt.Fprintln(a.stdout, buildinfo.Line("kvd", version))
	return err
}

func versionText() string { return buildinfo.Version(version) }
