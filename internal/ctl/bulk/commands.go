// Package bulk has the commands of kvctl that move many keys: pipe, import and export, mirror between stores, and
// snapshots.
//
// It leaves single keys to package keys, and the form of snapshots to internal/archive. Read [Commands] first, then the
// loader of pipe. Several workers share the session of a command; each owns the batch that it has in hand, which bounds
// the memory that is used. A run that ends early says how far it came, and the next one does the rest. The ideas are
// rsync's and redis-cli --pipe's.
package bulk

import (
	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/internal/ctl"
)

// commands are those of one invocation.
type commands struct{ *ctl.App }

// Commands are those that move many keys in and out.
func Commands(app *ctl.App) []*cobra.Command {
	a := &commands{app}
	return []*cobra.Command{ctl.Changes(a.pipeCommand()), a.importCommand(), a.exportCommand(), a.mirrorCommand(),
		a.snapshotCommand()}
}
