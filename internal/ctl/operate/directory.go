package operate

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/overview"
)

func (a *commands) directoryCommand() *cobra.Command {
	c := &cobra.Command{Use: "directory", Short: "List, remove and recover directory nodes", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() }}
	c.AddCommand(a.ViewCommand("list", "List directory nodes", func(st *dirpb.StatusReply) error {
		if a.JSON() {
			return ctl.PrintProtos(a.App, st.GetDirectory())
		}
		ctl.PrintColumns(a.App, overview.DirectoryColumns(st).Without("Answers"), st.GetDirectory())
		return nil
	}), a.ViewCommand("join-info", "Print what another directory node needs to join this store",
		func(st *dirpb.StatusReply) error {
			addrs := ctl.MapTo(st.GetDirectory(), (*dirpb.DirectoryNode).GetGrpcAddr)
			if a.JSON() {
				return a.PrintJSON(map[string]any{"cluster_id": st.GetClusterId(), "join": addrs})
			}
			fmt.Fprintf(a.Stdout, "cluster  %s\njoin     %s\n", ctl.Visible(st.GetClusterId()),
				ctl.Visible(strings.Join(addrs, ",")))
			return nil
		}), a.removeDirectoryCommand(), a.recoverCommand())
	return c
}

func (a *commands) removeDirectoryCommand() *cobra.Command {
	var force bool
	c := ctl.Changes(&cobra.Command{
		Use:   "remove ID",
		Short: "Remove a directory node, which should be stopped",
		Long: "Remove a directory node from the store; if it runs, it stops. It is refused if those that are left\n" +
			"and answer would be no majority, since nothing could be decided any more. " +
			"--force removes it all the same.",
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.WithBackend(func(b ctl.Backend) error {
				err := b.Directory(cmd.Context(), false, func(ctx context.Context, d dirpb.DirectoryClient) error {
					_, err := d.RemoveDirectory(ctx, &dirpb.RemoveDirectoryRequest{Id: args[0], Force: force})
					return err
				})
				if err != nil {
					return fmt.Errorf("%q: %w", args[0], err)
				}
				return nil
			})
		},
	})
	c.Flags().BoolVar(&force, "force", false, "also if those that are left and answer are no majority")
	return c
}
