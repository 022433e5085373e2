package main

import "github.com/spf13/cobra"

// keysCommands are those that read and change single keys.
func keysCommands(x *app) []*cobra.Command {
	a := x
	return []*cobra.Command{changes(a.putCommand()), a.getCommand(), changes(a.delCommand()), changes(a.casCommand()),
		changes(a.txnCommand()), changes(a.incrCommand()), changes(a.ttlCommand()), a.mgetCommand(), a.existsCommand(),
		a.scanCommand(), changes(a.pinCommand()), changes(a.unpinCommand()), a.countCommand(), a.watchCommand(),
		a.flushCommand()}
}
