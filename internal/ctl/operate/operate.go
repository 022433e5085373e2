package operate

import (
	"context"
	"fmt"
	"slices"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/dirpb"
)

func nodeNamed(m *dirpb.Map, name string) *dirpb.Node {
	i := slices.IndexFunc(m.GetNodes(), func(n *dirpb.Node) bool { return n.GetName() == name })
	if i < 0 {
		return nil
	}
	return m.GetNodes()[i]
}

// node finds a memory node that the user named, and the map that it is in.
func (a *commands) node(ctx context.Context, b ctl.Backend, name string) (*dirpb.Map, *dirpb.Node, error) {
	st, err := ctl.ClusterStatus(ctx, b)
	if err != nil {
		return nil, nil, err
	}
	n, err := nodeIn(st.GetMap(), name)
	return st.GetMap(), n, err
}

func nodeIn(m *dirpb.Map, name string) (*dirpb.Node, error) {
	n := nodeNamed(m, name)
	if n == nil {
		return nil, ctl.ExitWith(ctl.ExitNo, fmt.Errorf("unknown memory node %q (kvctl nodes lists them)", name))
	}
	return n, nil
}

func (a *commands) completeNode() cobra.CompletionFunc {
	return a.Complete(func(st *dirpb.StatusReply) []string {
		return ctl.MapTo(st.GetMap().GetNodes(), (*dirpb.Node).GetName)
	})
}

func (a *commands) shardsCommand() *cobra.Command {
	c := a.ViewCommand("shards", "List the namespace's placement groups and shards, and split shards", a.printShards)
	var all bool
	split := ctl.Changes(&cobra.Command{
		Use:   "split [ID]",
		Short: "Split a shard of the namespace, or all of them, in two",
		Long: "Split a shard, so that twice as many keys find a slot. Shards split by themselves\n" +
			"when they are full; this does it ahead of time. kvctl jobs shows how far it is.",
		Args: cobra.MaximumNArgs(1),
		ValidArgsFunction: a.Complete(func(st *dirpb.StatusReply) (ids []string) {
			ns, err := a.OwnNamespace(st.GetMap())
			if err != nil {
				return nil
			}
			for _, s := range st.GetMap().GetShards() {
				if s.GetNamespaceId() == ns.GetId() {
					ids = append(ids, strconv.FormatUint(uint64(s.GetId()), 10))
				}
			}
			return ids
		}),
		RunE: func(cmd *cobra.Command, args []string) error {
			if all == (len(args) == 1) {
				return ctl.Usagef("want either a shard's ID or --all")
			}
			var id uint64
			if len(args) == 1 {
				var err error
				if id, err = strconv.ParseUint(args[0], 10, 32); err != nil || id == 0 {
					return ctl.Usagef("shard %q: want a number (kvctl shards lists them)", args[0])
				}
			}
			return a.WithBackend(func(b ctl.Backend) error { return a.split(cmd.Context(), b, uint32(id)) })
		},
	})
	split.Flags().BoolVar(&all, "all", false, "every shard of the namespace")
	c.AddCommand(split)
	return c
}

// split starts the split of a shard, or of all if id is 0.
func (a *commands) split(ctx context.Context, b ctl.Backend, id uint32) error {
	st, err := ctl.ClusterStatus(ctx, b)
	if err != nil {
		return err
	}
	ns, err := a.OwnNamespace(st.GetMap())
	if err != nil {
		return err
	}
	if id != 0 && !slices.ContainsFunc(st.GetMap().GetShards(), func(s *dirpb.Shard) bool {
		return s.GetId() == id && s.GetNamespaceId() == ns.GetId()
	}) {
		return ctl.ExitWith(ctl.ExitNo, fmt.Errorf("unknown shard %d in namespace %q (kvctl shards lists them)", id,
			a.Namespace))
	}
	rep, err := ctl.Call(ctx, b, false, func(ctx context.Context, d dirpb.DirectoryClient) (*dirpb.StartJobReply,
		error) {
		return d.StartJob(ctx, &dirpb.StartJobRequest{Kind: dirpb.JobKind_JOB_MOVE, Namespace: a.Namespace,
			ShardId: id})
	})
	if err != nil {
		return fmt.Errorf("%q: %w", a.Namespace, err)
	}
	if a.JSON() {
		return a.PrintProto(rep)
	}
	a.PrintTable(ctl.Row{"Job"}, ctl.MapTo(rep.GetJobIds(), func(id uint32) ctl.Row { return ctl.Row{id} }))
	return nil
}
