package main

import (
	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/internal/ctl"
)

// measureCommands are those that measure the store and the machine.
func measureCommands(x *ctl.App) []*cobra.Command {
	a := &commands{x}
	return []*cobra.Command{a.costCommand(), a.perfCommand(), a.benchCommand(), a.latencyCommand(), a.doctorCommand()}
}
