// Package keys has the commands of kvctl that read and change keys by name, or all with a prefix. Among them are put,
// get, del, scan and watch.
//
// It leaves moving many keys in and out to package bulk, and what remote memory holds to package inside. Read
// [Commands] first; each file has a command or two. A command uses the session of its [ctl.App] alone, with the
// goroutine that runs it. Keys and values belong to whoever has read them. Names and answers are close to redis-cli's.
package keys

import (
	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/internal/ctl"
)

// commands are those of one invocation.
type commands struct{ *ctl.App }

// Commands are those that read and change single keys.
func Commands(app *ctl.App) []*cobra.Command {
	a := &commands{app}
	return []*cobra.Command{ctl.Changes(a.putCommand()), a.getCommand(), ctl.Changes(a.delCommand()),
		ctl.Changes(a.casCommand()),
		ctl.Changes(a.txnCommand()), ctl.Changes(a.incrCommand()), ctl.Changes(a.ttlCommand()), a.mgetCommand(),
		a.existsCommand(), a.scanCommand(), ctl.Changes(a.pinCommand()), ctl.Changes(a.unpinCommand()),
		a.countCommand(), a.watchCommand(), a.flushCommand()}
}
