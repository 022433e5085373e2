// Package inside has the commands of kvctl that look into remote memory, past the client's API: check, dump, bigkeys,
// hotkeys, du and stat.
//
// It leaves the meaning of bytes to internal/layout, and judging them to internal/check. Read [Commands] first, then
// walker, which goes through the index of a namespace. Nothing here is called concurrently. Bytes that were read belong
// to the command, and may be of different moments. The ideas are those of redis-cli --bigkeys and of fsck.
package inside

import (
	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/internal/ctl"
)

// commands are those of one invocation.
type commands struct{ *ctl.App }

// Commands are those that look into remote memory.
func Commands(app *ctl.App) []*cobra.Command {
	a := &commands{app}
	return []*cobra.Command{a.statCommand(), a.bigkeysCommand(), a.duCommand(), a.hotkeysCommand(), a.dumpCommand(),
		a.checkCommand()}
}
