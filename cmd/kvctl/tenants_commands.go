package main

import (
	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/internal/ctl"
)

// tenantsCommands are those about namespaces, who may use them, and certificates.
func tenantsCommands(x *ctl.App) []*cobra.Command {
	a := &commands{x}
	return []*cobra.Command{a.namespaceCommand(), a.whoAmICommand(), a.certsCommand(), a.tokenKeysCommand()}
}
