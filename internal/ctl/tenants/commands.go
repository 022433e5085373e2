// Package tenants has the commands of kvctl about namespaces, their quotas and rights, and about certificates and keys
// of tokens.
//
// It leaves deciding to the directory, and certificates to internal/authority. Read [Commands] first. Nothing here is
// called concurrently. Files of keys are written once and never over others. A change that frees or fences something
// says how much.
package tenants

import (
	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/internal/ctl"
)

// commands are those of one invocation.
type commands struct{ *ctl.App }

// Commands are those about namespaces, who may use them, and certificates.
func Commands(app *ctl.App) []*cobra.Command {
	a := &commands{app}
	return []*cobra.Command{a.namespaceCommand(), a.whoAmICommand(), a.certsCommand(), a.tokenKeysCommand()}
}
