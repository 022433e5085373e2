package main

import (
	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/internal/ctl"
)

// keysCommands are those that read and change single keys.
func keysCommands(x *ctl.App) []*cobra.Command {
	a := &commands{x}
	return []*cobra.Command{ctl.Changes(a.putCommand()), a.getCommand(), ctl.Changes(a.delCommand()),
		ctl.Changes(a.casCommand()),
		ctl.Changes(a.txnCommand()), ctl.Changes(a.incrCommand()), ctl.Changes(a.ttlCommand()), a.mgetCommand(),
		a.existsCommand(),
		a.scanCommand(), ctl.Changes(a.pinCommand()), ctl.Changes(a.unpinCommand()), a.countCommand(), a.watchCommand(),
		a.flushCommand()}
}
