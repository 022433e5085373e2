package tenants

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/overview"
	"github.com/kvd-project/kvd/internal/units"
)

func (a *commands) completeNamespace() cobra.CompletionFunc {
	return a.Complete(func(st *dirpb.StatusReply) []string {
		return ctl.MapTo(st.GetMap().GetNamespaces(), (*dirpb.Namespace).GetName)
	})
}

func (a *commands) namespaceSetCommand() *cobra.Command {
	var limit, maxValue, maxPinned string
	var replicas, nodes uint32
	var wait, dry bool
	var quota quotaFlags
	c := ctl.Changes(&cobra.Command{
		Use:   "set NAME",
		Short: "Change a namespace's limit, copies, memory nodes, longest value, pins, owner or quotas",
		Long: `Change a namespace's limit, number of copies, number of memory nodes, longest value, owner
or quotas, while it is used.

A limit below what sessions hold already takes nothing back at once: they get no
more. Copies are made, or given up, one placement group after the other; kvctl
status shows how many have theirs. Each copy needs a memory node with room for it,
in a failure domain of its own where memory nodes have such a label. More copies are
refused. The directory spreads it over --nodes memory nodes that have room, and no
more; it cannot be on fewer than it is. Values that are longer than a lower --max-value
stay readable. While more of a cache is pinned than --max-pinned says, pinned keys are
evicted first. Quotas that are not given stay as they are, and one below what is in use takes nothing back. Sessions of the former owner are ended at once, unless
the access list lets it in.`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completeNamespace(),
		RunE: func(cmd *cobra.Command, args []string) error {
			q := &dirpb.SetNamespaceRequest{Name: args[0], Replicas: replicas, Nodes: nodes,
				KeepLimit: !cmd.Flags().Changed("limit")}
			given := cmd.Flags().Changed("replicas")
			bounds, err := quota.quota(nil)
			if err = cmp.Or(err, quota.check()); err != nil {
				return err
			}
			q.Owner = quota.owner
			if q.MaxValueBytes, err = parseMaxValue(maxValue); err != nil {
				return err
			}
			if cmd.Flags().Changed("max-pinned") {
				n, err := parseMaxPinned(maxPinned)
				if err != nil {
					return err
				}
				q.MaxPinnedPercent = &n
			}
			switch {
			case q.KeepLimit && !given && q.Owner == "" && bounds == nil && nodes == 0 && q.MaxValueBytes == 0 &&
				q.MaxPinnedPercent == nil:
				return ctl.Usagef("want --limit, --replicas, --nodes, --max-value, --max-pinned, --owner or a quota")
			case given && replicas == 0:
				return ctl.Usagef("--replicas 0: want at least 1")
			case wait && !given:
				return ctl.Usagef("--wait: want --replicas, a limit needs no waiting")
			}
			if !q.KeepLimit {
				if q.LimitBytes, err = ctl.ParseBytes(limit); err != nil {
					return ctl.Usagef("--limit: %w", err)
				}
			}
			return a.WithBackend(func(b ctl.Backend) error {
				if q.Quota, err = quota.of(cmd.Context(), b, args[0]); err != nil {
					return fmt.Errorf("%q: %w", args[0], err)
				}
				if dry {
					return a.wouldSet(cmd.Context(), b, q)
				}
				var rep *dirpb.SetNamespaceReply
				// Asked again it changes nothing.
				err := b.Directory(cmd.Context(), true, func(ctx context.Context, d dirpb.DirectoryClient) (err error) {
					rep, err = d.SetNamespace(ctx, q)
					return err
				})
				if err != nil {
					return fmt.Errorf("%q: %w", args[0], err)
				}
				a.warnOfLimit(cmd.Context(), b, rep.GetNamespace())
				if wait {
					if err := a.awaitCopies(cmd.Context(), b, rep.GetNamespace()); err != nil {
						return err
					}
				}
				return a.printNamespaces([]*dirpb.Namespace{rep.GetNamespace()})
			})
		},
	})
	quota.add(c.Flags())
	c.Flags().StringVar(&limit, "limit", "", "as in namespace create")
	c.Flags().Uint32Var(&replicas, "replicas", 0, "copies of every record, 1 to 3")
	c.Flags().Uint32Var(&nodes, "nodes", 0, "memory nodes to be on, from now on; kvctl status shows when it is; 0: "+
		"as it is")
	c.Flags().StringVar(&maxValue, "max-value", "", maxValueUsage)
	c.Flags().StringVar(&maxPinned, "max-pinned", "", maxPinnedUsage)
	c.Flags().BoolVar(&wait, "wait", false, "wait until everything has that number of copies, and show how far it is")
	ctl.DryFlag(c, &dry)
	return c
}

// warnOfLimit tells of a limit that ns cannot reach, as its memory nodes, or those that there are, lend less. A store
// that grows may have it all the same.
func (a *commands) warnOfLimit(ctx context.Context, b ctl.Backend, ns *dirpb.Namespace) {
	if ns.GetLimitBytes() == 0 {
		return
	}
	st, err := ctl.ClusterStatus(ctx, b)
	if err != nil {
		return // the limit is set, and the command has succeeded
	}
	lent := uint64(0)
	for _, n := range st.GetMap().GetNodes() {
		lent += n.GetCapacityBytes()
	}
	if most := lent / uint64(max(ns.GetReplicas(), 1)); ns.GetLimitBytes() > most {
		a.Say("kvctl: warning: the limit of %q is %s, and with %d copies of everything there is room for %s in all "+
			"memory nodes (kvctl nodes)",
			ns.GetName(), units.Rounded(ns.GetLimitBytes()), ns.GetReplicas(), units.Rounded(most))
	}
}

// awaitCopies waits until every placement group of ns has as many copies as ns asks for.
func (a *commands) awaitCopies(ctx context.Context, b ctl.Backend, ns *dirpb.Namespace) error {
	err := a.Await(ctx, b, "namespace set", ctl.Stuck, func(st *dirpb.StatusReply) (ctl.Progress, bool, error) {
		i := slices.IndexFunc(st.GetMap().GetNamespaces(), func(n *dirpb.Namespace) bool {
			return n.GetId() == ns.GetId()
		})
		switch {
		case i < 0:
			return ctl.Progress{}, false, ctl.ExitWith(ctl.ExitNo, fmt.Errorf("%q: it was deleted", ns.GetName()))
		case st.GetMap().GetNamespaces()[i].GetReplicas() != ns.GetReplicas():
			return ctl.Progress{}, false,
				ctl.ExitWith(ctl.ExitNo, fmt.Errorf("%q: somebody set another number of copies, %d", ns.GetName(),
					st.GetMap().GetNamespaces()[i].GetReplicas()))
		}
		done, pgs, used := 0, overview.Groups(st.GetMap(), ns.GetId()), overview.InUse(st.GetMap())
		for _, p := range pgs {
			if !used(p) || p.GetState() == dirpb.PGState_PG_ACTIVE && !p.GetJoining() && p.GetPlanned() == nil &&
				overview.Copies(p) == int(ns.GetReplicas()) {
				done++
			}
		}
		return ctl.Progress{Done: uint64(done), Total: uint64(len(pgs)), Detail: ctl.JobsText(st),
			Left: fmt.Sprintf("%d of %d placement groups have %d copies%s", done, len(pgs), ns.GetReplicas(),
				ctl.Troubles(st))}, done == len(pgs), nil
	})
	if errors.Is(err, ctl.ErrStalled) {
		err = ctl.ExitWith(ctl.ExitUnavailable,
			fmt.Errorf("%q: not every placement group has %d copies, and %w (kvctl "+
				"status, kvctl jobs)", ns.GetName(), ns.GetReplicas(), err))
	}
	return ctl.Waited(err)
}

func (a *commands) namespaceDeleteCommand() *cobra.Command {
	var yes string
	var end, dry bool
	c := ctl.Changes(&cobra.Command{
		Use:   "delete NAME",
		Short: "Delete a namespace with all its keys",
		Long: `Delete a namespace with all its keys. Its name has to be typed, or given once more
with --yes. Sessions that live in it, a gateway's for example, are a reason to
refuse. With --end-sessions they are ended, and their operations fail from then on.
It waits until the namespace is gone. Memory nodes have its memory back at once,
one that is down when it comes back.`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completeNamespace(),
		RunE: func(cmd *cobra.Command, args []string) error {
			if yes != "" && yes != args[0] {
				return ctl.Usagef("--yes %q: want %q, the namespace's name", yes, args[0])
			}
			if dry {
				return a.WithBackend(func(b ctl.Backend) error {
					return a.wouldDeleteNamespace(cmd.Context(), b, args[0], end)
				})
			}
			return a.WithBackend(func(b ctl.Backend) error {
				return a.deleteNamespace(cmd.Context(), b, args[0], yes != "", end)
			})
		},
	})
	c.Flags().StringVar(&yes, "yes", "", "the namespace's name, instead of typing it")
	c.Flags().BoolVar(&end, "end-sessions", false, "end sessions that live in it")
	ctl.DryFlag(c, &dry)
	return c
}

func (a *commands) deleteNamespace(ctx context.Context, b ctl.Backend, name string, sure, end bool) error {
	st, err := ctl.ClusterStatus(ctx, b)
	if err != nil {
		return err
	}
	ns, err := namespaceToDelete(st, name)
	if err != nil {
		return err
	}
	if !sure {
		if err := a.confirmDelete(ctx, st, ns); err != nil {
			return err
		}
	}
	var rep *dirpb.DeleteNamespaceReply
	// Asked again, the id tells it from another one of the name.
	err = b.Directory(ctx, true, func(ctx context.Context, d dirpb.DirectoryClient) (err error) {
		rep, err = d.DeleteNamespace(ctx, &dirpb.DeleteNamespaceRequest{Name: name, Id: ns.GetId(), EndSessions: end})
		return err
	})
	switch {
	case status.Code(err) == codes.FailedPrecondition && !end:
		return fmt.Errorf("%w: --end-sessions ends them", err)
	case err != nil:
		return err
	}
	if rep.GetFencing() > 0 {
		err := a.Await(ctx, b, "namespace delete", 0, func(st *dirpb.StatusReply) (ctl.Progress, bool, error) {
			left := ctl.DeletingText(st, ns.GetId())
			return ctl.Progress{Left: left}, left == "", nil
		})
		if err != nil {
			return ctl.Waited(err)
		}
	}
	if a.JSON() {
		return a.PrintJSON(map[string]any{"namespace": name, "id": ns.GetId(), "deleted": true})
	}
	a.PrintTable(ctl.Row{"Namespace", "ID", "Deleted"}, []ctl.Row{{name, ns.GetId(), "yes"}})
	return nil
}

func namespaceToDelete(st *dirpb.StatusReply, name string) (*dirpb.Namespace, error) {
	ns, err := ctl.NamespaceOf(st.GetMap(), name)
	if err != nil {
		return nil, ctl.ExitWith(ctl.ExitNo, err)
	}
	return ns, nil
}

// confirmDelete has the user type the name of a namespace.
func (a *commands) confirmDelete(ctx context.Context, st *dirpb.StatusReply, ns *dirpb.Namespace) error {
	live, sessions := contentsOf(st, ns)
	return a.Typed(ctx, ns.GetName(), fmt.Sprintf("This deletes namespace %q with all its keys: %s of records, %d "+
		"sessions.", ns.GetName(), units.Rounded(live), sessions))
}

// contentsOf tells the bytes of the records of ns, and its live sessions.
func contentsOf(st *dirpb.StatusReply, ns *dirpb.Namespace) (live uint64, sessions int) {
	for _, m := range overview.Memories(st) {
		if m.Namespace == ns.GetName() {
			live += m.Live
		}
	}
	for _, s := range st.GetSessions() {
		if s.GetNamespace() == ns.GetName() && s.GetLife() == dirpb.SessionLife_SESSION_LIVE {
			sessions++
		}
	}
	return live, sessions
}
