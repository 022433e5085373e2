package main

import "github.com/spf13/cobra"

// measureCommands are those that measure the store and the machine.
func measureCommands(x *app) []*cobra.Command {
	a := x
	return []*cobra.Command{a.costCommand(), a.perfCommand(), a.benchCommand(), a.latencyCommand(), a.doctorCommand()}
}
