// Package measure has the commands of kvctl that measure. bench and latency measure a store, and cost counts the verbs
// of its operations. perf and doctor look at a machine, or at the way between two.
//
// It leaves loads to internal/ycsb, verbs to internal/verbperf, and advice to internal/doctor. Read [Commands] first.
// The threads of bench share a session, and each owns its histograms until all have ended. A measurement removes the
// keys that it made, and leaves those of others alone. The models are YCSB and perftest.
package measure

import (
	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/internal/ctl"
)

// commands are those of one invocation.
type commands struct{ *ctl.App }

// Commands are those that measure the store and the machine.
func Commands(app *ctl.App) []*cobra.Command {
	a := &commands{app}
	return []*cobra.Command{a.costCommand(), a.perfCommand(), a.benchCommand(), a.latencyCommand(), a.doctorCommand()}
}
