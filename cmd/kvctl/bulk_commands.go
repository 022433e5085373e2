package main

import "github.com/spf13/cobra"

// bulkCommands are those that move many keys in and out.
func bulkCommands(x *app) []*cobra.Command {
	a := x
	return []*cobra.Command{changes(a.pipeCommand()), a.importCommand(), a.exportCommand(), a.mirrorCommand(),
		a.snapshotCommand()}
}
