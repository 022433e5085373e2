package operate

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/overview"
)

func (a *commands) auditCommand() *cobra.Command {
	req := &dirpb.AuditRequest{}
	c := &cobra.Command{
		Use:   "audit",
		Short: "Show who changed what in the store",
		Long: "Show who changed what: namespaces, rights, memory nodes and directory nodes, keys, jobs.\n\n" +
			"The directory keeps the latest 4,096 changes; every directory node also writes each to its log, as a\n" +
			"line \"audit\". Without TLS nobody is known, and the column Identity has a dash.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.WithBackend(func(b ctl.Backend) error { return a.printAudit(cmd.Context(), b, req) })
		},
	}
	c.Flags().Uint32VarP(&req.Limit, "last", "n", 100, "how many to show, the latest; 0: all that are kept")
	c.Flags().Uint64Var(&req.After, "after", 0, "show those with greater numbers")
	return c
}

func (a *commands) printAudit(ctx context.Context, b ctl.Backend, req *dirpb.AuditRequest) error {
	var rep *dirpb.AuditReply
	err := b.Directory(ctx, true, func(ctx context.Context, d dirpb.DirectoryClient) (err error) {
		rep, err = d.Audit(ctx, req)
		return err
	})
	if err != nil {
		return err
	}
	if a.JSON() {
		return ctl.PrintProtos(a.App, rep.GetEntries())
	}
	ctl.PrintColumns(a.App, overview.AuditColumns, rep.GetEntries())
	return nil
}
