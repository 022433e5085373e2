package main

import "github.com/spf13/cobra"

// insideCommands are those that look into remote memory.
func insideCommands(x *app) []*cobra.Command {
	a := x
	return []*cobra.Command{a.statCommand(), a.bigkeysCommand(), a.duCommand(), a.hotkeysCommand(), a.dumpCommand(),
		a.checkCommand()}
}
