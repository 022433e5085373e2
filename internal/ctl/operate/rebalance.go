package operate

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/overview"
)

// rebalancing is how a namespace is rebalanced.
type rebalancing struct{ wait, cancel, dry bool }

func (a *commands) rebalanceCommand() *cobra.Command {
	var how rebalancing
	var all bool
	c := ctl.Changes(&cobra.Command{
		Use:   "rebalance [NAMESPACE]",
		Short: "Spread a namespace evenly over the memory nodes",
		Long: "Make placement groups on memory nodes that have none of the namespace, and move\n" +
			"shards until every placement group has its share. The steps are printed, and done\n" +
			"one after the other while the store is in use, whichever directory node leads.\n" +
			"Without NAMESPACE it is the one of --namespace; with --all it is every namespace, one\n" +
			"after the other.",
		Args: cobra.MaximumNArgs(1),
		ValidArgsFunction: a.Complete(func(st *dirpb.StatusReply) []string {
			return ctl.MapTo(st.GetMap().GetNamespaces(), (*dirpb.Namespace).GetName)
		}),
		RunE: func(cmd *cobra.Command, args []string) error {
			if all && len(args) > 0 {
				return ctl.Usagef("--all and namespace %q: want one of them; nothing was done", args[0])
			}
			return a.WithBackend(func(b ctl.Backend) error { return a.rebalanceSome(cmd.Context(), b, args, all, how) })
		},
	})
	c.Flags().BoolVar(&all, "all", false, "every namespace, one after the other")
	c.Flags().BoolVar(&how.wait, "wait", false, "wait until it is done, and show how far it is")
	c.Flags().BoolVar(&how.cancel, "cancel", false, "begin no other step, and print those that are left")
	ctl.DryFlag(c, &how.dry)
	c.MarkFlagsMutuallyExclusive("wait", "cancel", "dry-run")
	return c
}

// askAgain is how long nothing may happen before a wait for a rebalance asks again what is left.
const askAgain = 5 * time.Second

// wonders is how long nothing may happen before a wait for a drain wonders why: it rests, and not for so long.
const wonders = 15 * time.Second

// rebalanceSome rebalances a namespace that is named, all of them, or the one of --namespace.
func (a *commands) rebalanceSome(ctx context.Context, b ctl.Backend, named []string, all bool, how rebalancing) error {
	if len(named) > 0 {
		return a.rebalance(ctx, b, named[0], how)
	}
	st, err := ctl.ClusterStatus(ctx, b)
	if err != nil {
		return err
	}
	var names []string
	for _, ns := range st.GetMap().GetNamespaces() {
		if !ns.GetDeleting() {
			names = append(names, ns.GetName())
		}
	}
	if !all {
		if _, err := ctl.NamespaceOf(st.GetMap(), a.Namespace); err != nil && len(names) > 0 {
			return fmt.Errorf("%w: nothing was rebalanced. Name the one that is meant: kvctl rebalance %s; or take "+
				"every one: kvctl rebalance --all",
				err, strings.Join(names, ", or kvctl rebalance "))
		}
		names = []string{a.Namespace}
	}
	for _, name := range names {
		if err := a.rebalance(ctx, b, name, how); err != nil {
			return err
		}
	}
	return nil
}

// rebalance asks for it, prints the steps and waits, if it is to.
func (a *commands) rebalance(ctx context.Context, b ctl.Backend, name string, how rebalancing) error {
	st, err := ctl.ClusterStatus(ctx, b)
	if err != nil {
		return err
	}
	ns, err := ctl.NamespaceOf(st.GetMap(), name)
	if err != nil {
		return err
	}
	ask := func(dry bool) (steps []string, err error) {
		// It may be asked twice: whoever leads says what is left to do.
		if err := b.Directory(ctx, true, func(ctx context.Context, d dirpb.DirectoryClient) error {
			rep, err := d.Rebalance(ctx, &dirpb.RebalanceRequest{Namespace: name, Cancel: how.cancel, DryRun: dry})
			steps = rep.GetSteps()
			return err
		}); err != nil {
			return nil, fmt.Errorf("%q: %w", name, err)
		}
		return steps, nil
	}
	steps, err := ask(how.dry)
	if err != nil {
		return err
	}
	if err := a.printSteps(name, steps, how.cancel); err != nil || !how.wait {
		if how.dry && err == nil {
			a.Unchanged()
		}
		return err
	}
	total, begun := len(steps), false
	version, asked := st.GetMap().GetVersion(), time.Now()
	err = a.Await(ctx, b, "rebalance", ctl.Stuck, func(st *dirpb.StatusReply) (ctl.Progress, bool, error) {
		v := st.GetMap().GetVersion()
		now, err := ctl.NamespaceOf(st.GetMap(), name)
		if err != nil {
			return ctl.Progress{}, false, err
		}
		const none, on = dirpb.Rebalancing_REBALANCING_NONE, dirpb.Rebalancing_REBALANCING_ON
		is := now.GetRebalancing()
		// It may have begun and been refused before anybody looked; other directory nodes than the leader may be
		// behind.
		ended := is != on && (begun || is != none && st.GetLeads())
		begun = is == on
		if ended && is == none {
			return ctl.Progress{}, true, nil
		}
		if ended || !unsettled(st, ns.GetId()) && len(steps) > 0 && (v != version || time.Since(asked) >= askAgain) {
			if steps, err = ask(true); err != nil {
				return ctl.Progress{}, false, err
			}
			if ended && len(steps) > 0 {
				why := "it was cancelled"
				if is == dirpb.Rebalancing_REBALANCING_REFUSED {
					why = "a step was refused, since something else has changed; ask again"
				}
				return ctl.Progress{}, false, ctl.ExitWith(ctl.ExitNo,
					fmt.Errorf("namespace %q: its rebalance has ended, with "+
						"%d steps left: %s", name, len(steps), why))
			}
			version, asked = v, time.Now()
			total = max(total, len(steps))
		}
		return ctl.Progress{Done: uint64(total - len(steps)), Total: uint64(total),
			Left:   fmt.Sprintf("%d of %d steps left in %s%s", len(steps), total, name, ctl.Troubles(st)),
			Detail: ctl.JobsText(st)}, len(steps) == 0, nil
	})
	return ctl.Waited(err)
}

// printSteps prints what is done, or what is left.
func (a *commands) printSteps(namespace string, steps []string, left bool) error {
	if a.JSON() {
		if steps == nil {
			steps = []string{}
		}
		if err := a.PrintJSON(map[string]any{"namespace": namespace, "steps": steps}); err != nil {
			return err
		}
		return a.Flush()
	}
	if len(steps) == 0 {
		steps, left = []string{"nothing to do"}, false
	}
	for _, s := range steps {
		if left {
			s = "not done: " + s
		}
		fmt.Fprintln(a.Stdout, ctl.Visible(namespace+": "+s))
	}
	return a.Flush()
}

// unsettled reports whether a placement group of ns is changing, or something of it
// moves.
func unsettled(st *dirpb.StatusReply, ns uint32) bool {
	return slices.ContainsFunc(overview.Groups(st.GetMap(), ns), func(p *dirpb.PlacementGroup) bool {
		return p.GetState() == dirpb.PGState_PG_CREATING || p.GetState() == dirpb.PGState_PG_FROZEN ||
			p.GetJoining() || p.GetPlanned() != nil || p.GetLeaving() != nil
	}) || slices.ContainsFunc(st.GetJobs(), func(j *dirpb.Job) bool {
		return j.GetNamespaceId() == ns && j.GetKind() != dirpb.JobKind_JOB_SCRUB &&
			j.GetKind() != dirpb.JobKind_JOB_RECALL &&
			j.GetKind() != dirpb.JobKind_JOB_SETTLE
	})
}
