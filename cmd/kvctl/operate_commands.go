package main

import "github.com/spf13/cobra"

// operateCommands are those that show the cluster and change its parts.
func operateCommands(x *app) []*cobra.Command {
	a := x
	return []*cobra.Command{a.drainCommand(), a.rebalanceCommand(), a.gatewaysCommand(), a.brokersCommand(),
		a.viewCommand("jobs", "List background jobs: new copies, moves of shards, recalls, scrubs", a.printJobs),
		a.statusCommand(), a.nodesCommand(), a.shardsCommand(),
		explained(a.viewCommand("stats", "Show what the directory counts: memory, sessions, memory nodes",
			a.printStats),
			"Show what the directory counts: the memory of each placement group, sessions, memory nodes.\n\n"+
				memoryHelp),
		a.topCommand(), a.directoryCommand(), a.auditCommand(), a.supportCommand()}
}
