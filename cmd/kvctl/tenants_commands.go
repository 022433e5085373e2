package main

import "github.com/spf13/cobra"

// tenantsCommands are those about namespaces, who may use them, and certificates.
func tenantsCommands(x *app) []*cobra.Command {
	a := x
	return []*cobra.Command{a.namespaceCommand(), a.whoAmICommand(), a.certsCommand(), a.tokenKeysCommand()}
}
