package main

import (
	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/internal/ctl"
)

// operateCommands are those that show the cluster and change its parts.
func operateCommands(x *ctl.App) []*cobra.Command {
	a := &commands{x}
	return []*cobra.Command{a.drainCommand(), a.rebalanceCommand(), a.gatewaysCommand(), a.brokersCommand(),
		a.ViewCommand("jobs", "List background jobs: new copies, moves of shards, recalls, scrubs", a.printJobs),
		a.statusCommand(), a.nodesCommand(), a.shardsCommand(),
		ctl.Explained(a.ViewCommand("stats", "Show what the directory counts: memory, sessions, memory nodes",
			a.printStats),
			"Show what the directory counts: the memory of each placement group, sessions, memory nodes.\n\n"+
				memoryHelp),
		a.topCommand(), a.directoryCommand(), a.auditCommand(), a.supportCommand()}
}
