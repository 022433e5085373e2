package main

import (
	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/internal/ctl"
)

// bulkCommands are those that move many keys in and out.
func bulkCommands(x *ctl.App) []*cobra.Command {
	a := &commands{x}
	return []*cobra.Command{ctl.Changes(a.pipeCommand()), a.importCommand(), a.exportCommand(), a.mirrorCommand(),
		a.snapshotCommand()}
}
