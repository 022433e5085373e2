package main

import (
	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/internal/ctl"
)

// insideCommands are those that look into remote memory.
func insideCommands(x *ctl.App) []*cobra.Command {
	a := &commands{x}
	return []*cobra.Command{a.statCommand(), a.bigkeysCommand(), a.duCommand(), a.hotkeysCommand(), a.dumpCommand(),
		a.checkCommand()}
}
