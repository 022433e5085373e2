package tenants

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/units"
)

func (a *commands) namespaceCommand() *cobra.Command {
	c := &cobra.Command{Use: "namespace", Short: "Create, change, share, delete and list namespaces",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() }}
	req := &dirpb.CreateNamespaceRequest{}
	var mode, size, limit, maxValue, maxPinned string
	var ifNotExists bool
	var quota quotaFlags
	create := ctl.Changes(&cobra.Command{
		Use:   "create NAME",
		Short: "Create a namespace",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			req.Name = args[0]
			switch mode {
			case "store":
				req.Mode = dirpb.NamespaceMode_NAMESPACE_STORE
			case "cache":
				req.Mode = dirpb.NamespaceMode_NAMESPACE_CACHE
			default:
				return ctl.Usagef("--mode %q: want store or cache", mode)
			}
			var err error
			if req.BytesPerNode, err = ctl.ParseBytes(size); err != nil {
				return ctl.Usagef("--bytes: %w", err)
			}
			if req.LimitBytes, err = ctl.ParseBytes(limit); err != nil {
				return ctl.Usagef("--limit: %w", err)
			}
			if req.MaxValueBytes, err = parseMaxValue(maxValue); err != nil {
				return err
			}
			if req.MaxPinnedPercent, err = parseMaxPinned(maxPinned); err != nil {
				return err
			}
			if err := quota.check(); err != nil {
				return err
			}
			req.Owner = quota.owner
			if req.Quota, err = quota.quota(nil); err != nil {
				return err
			}
			return a.WithBackend(func(b ctl.Backend) error {
				var rep *dirpb.CreateNamespaceReply
				err := b.Directory(cmd.Context(), ifNotExists, func(ctx context.Context, d dirpb.DirectoryClient) (
					err error) {
					rep, err = d.CreateNamespace(ctx, req)
					return err
				})
				if ifNotExists && status.Code(err) == codes.AlreadyExists {
					ns, err := existing(cmd.Context(), b, req)
					if err != nil {
						return err
					}
					return a.printNamespaces([]*dirpb.Namespace{ns})
				}
				if err != nil {
					return fmt.Errorf("%q: %w", req.Name, err)
				}
				a.warnOfLimit(cmd.Context(), b, rep.GetNamespace())
				return a.printNamespaces([]*dirpb.Namespace{rep.GetNamespace()})
			})
		},
	})
	f := create.Flags()
	f.BoolVar(&ifNotExists, "if-not-exists", false, "leave a namespace as it is that exists with this mode, and this "+
		"number of copies if one is given")
	f.Uint32Var(&req.Replicas, "replicas", 0, "copies of every record; 0: 2 if two memory nodes exist, else 1")
	f.StringVar(&mode, "mode", "store", "store (full is an error) or cache (full evicts)")
	f.Uint32Var(&req.Nodes, "nodes", 0, "memory nodes to be on, for good; 0: those that its limit needs, or "+
		"8 without one, and others as it fills. All, if there are 8 at most")
	f.StringVar(&size, "bytes", "0", "memory on each node, such as 512MiB or 4GiB; 0 for half of what is free")
	quota.add(f)
	f.StringVar(&limit, "limit", "0", "memory that all keys together may take, each copy counted once; 0: all there is")
	f.StringVar(&maxValue, "max-value", "", maxValueUsage)
	f.StringVar(&maxPinned, "max-pinned", "", maxPinnedUsage)
	f.Uint32Var(&req.Shards, "shards", 0, "shards to begin with, a power of two; 0: chosen")
	f.Uint32Var(&req.Segments, "segments", 0, "segments that each shard begins with; 0: an eighth of the index in all")
	f.Uint32Var(&req.IndexPercent, "index-percent", 0, "share of the memory for the index, in which shards grow and "+
		"split as they fill; 0: chosen")
	_ = create.RegisterFlagCompletionFunc("mode", cobra.FixedCompletions([]string{"store", "cache"},
		cobra.ShellCompDirectiveNoFileComp))
	c.AddCommand(create, a.namespaceSetCommand(), a.namespaceGrantCommand(), a.namespaceRevokeCommand(),
		a.namespaceShowCommand(), a.namespaceDeleteCommand(), a.acceptLossCommand(),
		a.ViewCommand("list", "List namespaces", func(st *dirpb.StatusReply) error {
			return a.printNamespaces(st.GetMap().GetNamespaces())
		}))
	return c
}

func (a *commands) acceptLossCommand() *cobra.Command {
	return ctl.Changes(&cobra.Command{
		Use:   "accept-loss NAME",
		Short: "Say that you know what a namespace lost",
		Long: "A placement group that lost all its copies is empty once its memory node is back, and\n" +
			"looks like any other. kvctl status, the page and an alert (KvdDataLost) say what was lost until this\n" +
			"command accepts it. It prints what it accepts. kvd_directory_lost_total goes on counting.",
		Args: cobra.ExactArgs(1),
		ValidArgsFunction: a.Complete(func(st *dirpb.StatusReply) []string {
			return ctl.MapTo(st.GetMap().GetNamespaces(), (*dirpb.Namespace).GetName)
		}),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.WithBackend(func(b ctl.Backend) error { return a.acceptLoss(cmd.Context(), b, args[0]) })
		},
	})
}

func (a *commands) acceptLoss(ctx context.Context, b ctl.Backend, name string) error {
	st, err := ctl.ClusterStatus(ctx, b)
	if err != nil {
		return err
	}
	ns, err := ctl.NamespaceOf(st.GetMap(), name)
	if err != nil {
		return err
	}
	// It names the count that is shown here, so it may be repeated.
	err = b.Directory(ctx, true, func(ctx context.Context, d dirpb.DirectoryClient) error {
		_, err := d.AcceptLoss(ctx, &dirpb.AcceptLossRequest{Name: name, Lost: ns.GetLost()})
		return err
	})
	if err != nil {
		return fmt.Errorf("%q: %w", name, err)
	}
	if a.JSON() {
		return ctl.PrintProtos(a.App, ns.GetLosses())
	}
	a.PrintTable(ctl.Row{"PG", "Times", "Last", "Node", "Held"}, ctl.MapTo(ns.GetLosses(),
		func(l *dirpb.Loss) ctl.Row {
			var what any = l.GetPgId()
			if id := l.GetVolumeId(); id != 0 {
				what = fmt.Sprintf("volume %d", id)
			}
			return ctl.Row{what, l.GetTimes(), time.UnixMilli(l.GetUnixMillis()).UTC().Format(time.RFC3339),
				l.GetNode(),
				units.Rounded(l.GetHeldBytes())}
		}))
	return nil
}

// existing gives the namespace that req asks for, if it is of the kind that req asks for:
// what cannot be changed later.
func existing(ctx context.Context, b ctl.Backend, req *dirpb.CreateNamespaceRequest) (*dirpb.Namespace, error) {
	st, err := ctl.ClusterStatus(ctx, b)
	if err != nil {
		return nil, err
	}
	ns, err := ctl.NamespaceOf(st.GetMap(), req.GetName())
	if err != nil {
		return nil, err
	}
	if ns.GetMode() != req.GetMode() || req.GetReplicas() != 0 && ns.GetReplicas() != req.GetReplicas() {
		want := fmt.Sprintf("mode %s", ctl.Short(req.GetMode()))
		if req.GetReplicas() != 0 {
			want += fmt.Sprintf(" and %d copies", req.GetReplicas())
		}
		return nil, ctl.ExitWith(ctl.ExitNo, fmt.Errorf("%q exists with mode %s and %d copies, want %s", ns.GetName(),
			ctl.Short(ns.GetMode()), ns.GetReplicas(), want))
	}
	if req.GetMaxValueBytes() != 0 && maxValueOf(ns) != req.GetMaxValueBytes() {
		return nil, ctl.ExitWith(ctl.ExitNo, fmt.Errorf("%q exists with values of at most %s, want %s", ns.GetName(),
			units.Rounded(maxValueOf(ns)), units.Rounded(req.GetMaxValueBytes())))
	}
	if req.GetMaxPinnedPercent() != 0 && ns.GetMaxPinnedPercent() != req.GetMaxPinnedPercent() {
		return nil, ctl.ExitWith(ctl.ExitNo, fmt.Errorf("%q exists with %d%% of it pinned at most, want %d%%",
			ns.GetName(),
			ns.GetMaxPinnedPercent(), req.GetMaxPinnedPercent()))
	}
	if req.GetOwner() != "" && ns.GetOwner() != req.GetOwner() {
		return nil, ctl.ExitWith(ctl.ExitNo, fmt.Errorf("%q exists and belongs to %q, want %q", ns.GetName(),
			ns.GetOwner(),
			req.GetOwner()))
	}
	return ns, nil
}

func (a *commands) printNamespaces(ns []*dirpb.Namespace) error {
	if a.JSON() {
		return ctl.PrintProtos(a.App, ns)
	}
	header := ctl.Row{"ID", "Name", "Mode", "Replicas", "Bytes a node", "Limit", "Format", "Owner"}
	some := slices.ContainsFunc(ns, func(n *dirpb.Namespace) bool { return n.GetNodes() != 0 })
	if some {
		header = append(header, "Nodes")
	}
	long := slices.ContainsFunc(ns, func(n *dirpb.Namespace) bool { return n.GetMaxValueBytes() != 0 })
	if long {
		header = append(header, "Max value")
	}
	pins := slices.ContainsFunc(ns, func(n *dirpb.Namespace) bool { return n.GetMaxPinnedPercent() != 0 })
	if pins {
		header = append(header, "Max pinned")
	}
	a.PrintTable(header, ctl.MapTo(ns, func(n *dirpb.Namespace) ctl.Row {
		limit := "-"
		if n.GetLimitBytes() != 0 {
			limit = units.Rounded(n.GetLimitBytes())
		}
		name := n.GetName()
		if n.GetDeleting() {
			name += " (being deleted)"
		}
		if n.GetRebalancing() == dirpb.Rebalancing_REBALANCING_ON {
			name += " (being rebalanced)"
		}
		nodes := "all"
		if n.GetNodes() != 0 {
			nodes = strconv.FormatUint(uint64(n.GetNodes()), 10)
			if n.GetGrows() {
				nodes += ", grows"
			}
		}
		r := ctl.Row{n.GetId(), name, ctl.Short(n.GetMode()), n.GetReplicas(), units.Rounded(n.GetBytesPerNode()),
			limit,
			n.GetFormat(), cmp.Or(n.GetOwner(), "-")}
		if some {
			r = append(r, nodes)
		}
		if long {
			r = append(r, units.Rounded(maxValueOf(n)))
		}
		if pins {
			r = append(r, fmt.Sprintf("%d%%", n.GetMaxPinnedPercent()))
		}
		return r
	}))
	return nil
}

// maxValueUsage is the help of --max-value.
var maxValueUsage = fmt.Sprintf("longest value that may be put, %s at most; %s unless it is set",
	units.Rounded(client.MaxValueLen), units.Rounded(client.DefaultMaxValueLen))

// parseMaxValue reads --max-value; 0: it is not given.
func parseMaxValue(s string) (uint64, error) {
	if s == "" {
		return 0, nil
	}
	n, err := ctl.ParseBytes(s)
	switch {
	case err != nil:
		return 0, ctl.Usagef("--max-value: %w", err)
	case n == 0 || n > client.MaxValueLen:
		return 0, ctl.Usagef("--max-value %s: want 1 to %s", s, units.Rounded(client.MaxValueLen))
	}
	return n, nil
}

// maxPinnedUsage is the help of --max-pinned.
const maxPinnedUsage = "how much of a cache may be pinned, such as 30%, 90% at most; 0% unless it is set"

// parseMaxPinned reads --max-pinned; empty is 0.
func parseMaxPinned(s string) (uint32, error) {
	if s == "" {
		return 0, nil
	}
	n, err := strconv.ParseUint(strings.TrimSuffix(s, "%"), 10, 32)
	if err != nil || n > 90 {
		return 0, ctl.Usagef("--max-pinned %q: want 0%% to 90%%", s)
	}
	return uint32(n), nil
}

// maxValueOf is the longest value that ns allows, bytes.
func maxValueOf(ns *dirpb.Namespace) uint64 {
	return cmp.Or(ns.GetMaxValueBytes(), client.DefaultMaxValueLen)
}
