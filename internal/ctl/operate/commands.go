// Package operate has the commands of kvctl that show a cluster and change its parts: status, nodes, drain, rebalance,
// gateways, brokers, directory and others.
//
// It leaves the meaning of a status to internal/overview, and decisions to the directory. Read [Commands] first, then
// the printers of the status. Several processes are asked at once, each by a goroutine that owns its answer until all
// are there. A command that waits may be interrupted; the cluster goes on by itself. The commands are shaped after
// etcdctl's and CockroachDB's.
package operate

import (
	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/internal/ctl"
)

// commands are those of one invocation.
type commands struct{ *ctl.App }

// Commands are those that show the cluster and change its parts.
func Commands(app *ctl.App) []*cobra.Command {
	a := &commands{app}
	return []*cobra.Command{a.drainCommand(), a.rebalanceCommand(), a.gatewaysCommand(), a.brokersCommand(),
		a.ViewCommand("jobs", "List background jobs: new copies, moves of shards, recalls, scrubs", a.printJobs),
		a.statusCommand(), a.nodesCommand(), a.shardsCommand(),
		ctl.Explained(a.ViewCommand("stats", "Show what the directory counts: memory, sessions, memory nodes",
			a.printStats),
			"Show what the directory counts: the memory of each placement group, sessions, memory nodes.\n\n"+
				memoryHelp),
		a.topCommand(), a.tierCommand(), a.directoryCommand(), a.auditCommand(), a.supportCommand()}
}
