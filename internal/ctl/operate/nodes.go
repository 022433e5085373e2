package operate

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/overview"
)

func (a *commands) nodesCommand() *cobra.Command {
	c := a.ViewCommand("nodes", "List, add and remove memory nodes", a.printNodes)
	c.Long = "List memory nodes: state, regions that they hold or are about to, what they lend.\n\n" +
		"A memory node adds itself when it is started, and removes itself from nothing: one\n" +
		"that stops counts as lost, and its copies are made anew elsewhere. To take one away\n" +
		"without losing a copy, drain it first."
	var wait bool
	var patient time.Duration
	add := ctl.Changes(&cobra.Command{
		Use:   "add NODE",
		Short: "Take a memory node into use: undo its drain, wait until it is up, rebalance",
		Long: "A memory node adds itself when `kvd memnode --name NODE` is started, and takes new\n" +
			"namespaces and lost copies from then on. add undoes a drain of it, if there is\n" +
			"one, waits until it is up, and rebalances every namespace. So it gets its\n" +
			"share of the keys that are there already. A node that was never started is\n" +
			"refused, unless --for says how long to wait for it.",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completeNode(),
		RunE: func(cmd *cobra.Command, args []string) error {
			if patient <= 0 {
				return ctl.Usagef("--for %v: want > 0", patient)
			}
			known := !cmd.Flags().Changed("for")
			return a.WithBackend(func(b ctl.Backend) error {
				return a.addNode(cmd.Context(), b, args[0], known, patient, wait)
			})
		},
	})
	add.Flags().BoolVar(&wait, "wait", false, "wait until everything is where it should be")
	add.Flags().DurationVar(&patient, "for", 30*time.Second, "how long to wait for the node to be up")
	var force, dry bool
	remove := ctl.Changes(&cobra.Command{
		Use:   "remove NODE",
		Short: "Forget a memory node that holds nothing",
		Long: "Forget a memory node, which should be stopped and hold nothing any more (kvctl\n" +
			"drain). With --force what it still holds counts as lost at once: other copies take\n" +
			"over, and keys without one are gone.",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completeNode(),
		RunE: func(cmd *cobra.Command, args []string) error {
			if dry {
				return a.WithBackend(func(b ctl.Backend) error {
					return a.wouldForget(cmd.Context(), b, args[0],
						force)
				})
			}
			return onNode(a, cmd, args[0], "removed", func(ctx context.Context, d dirpb.DirectoryClient) (
				*dirpb.RemoveNodeReply, error) {
				return d.RemoveNode(ctx, &dirpb.RemoveNodeRequest{Node: args[0], Force: force})
			})
		},
	})
	remove.Flags().BoolVar(&force, "force", false, "even if it holds something, which counts as lost then")
	ctl.DryFlag(remove, &dry)
	c.AddCommand(add, remove, a.giveUpCommand(), a.restartCommand())
	return c
}

// onNode has the directory do something with a memory node that there is, by which that is done, and says what became
// of what it held.
func onNode[R any](a *commands, cmd *cobra.Command, name, done string, f func(context.Context, dirpb.DirectoryClient) (
	R, error)) error {
	return a.WithBackend(func(b ctl.Backend) error {
		m, n, err := a.node(cmd.Context(), b, name)
		if err != nil {
			return err
		}
		if _, err := ctl.Call(cmd.Context(), b, false, f); err != nil {
			return fmt.Errorf("%q: %w", name, err)
		}
		held, last := 0, 0 // as it was just before
		for _, p := range m.GetPgs() {
			if slices.ContainsFunc(p.GetMembers(), func(mb *dirpb.Member) bool { return mb.GetNodeId() == n.GetId() }) {
				if held++; overview.Copies(p) == 1 {
					last++
				}
			}
		}
		if a.JSON() {
			return a.PrintJSON(map[string]any{"node": name, "done": done, "placement_groups": held,
				"last_copies": last})
		}
		text := fmt.Sprintf("%s: %s; it held nothing", name, done)
		if held > 0 {
			text = fmt.Sprintf("%s: %s; regions that it held: %d, of these without another copy, so that their keys "+
				"are gone: %d", name, done, held, last)
		}
		_, err = fmt.Fprintln(a.Stdout, text)
		return err
	})
}

func (a *commands) giveUpCommand() *cobra.Command {
	var dry bool
	c := ctl.Changes(&cobra.Command{
		Use:   "give-up NODE",
		Short: "Stop waiting for a silent memory node: what it holds counts as lost",
		Long: "Declare a memory node lost that has not been heard for a lease. The store does that\n" +
			"by itself if others have copies of all that it holds. If it keeps its memory and has\n" +
			"the only copy of something, the store waits until it is back (kvctl status says so).\n" +
			"It waits without end unless last-copy-wait says how long. If its memory is gone, give\n" +
			"it up: keys without another copy are gone then. A node that is heard is refused.",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completeNode(),
		RunE: func(cmd *cobra.Command, args []string) error {
			if dry {
				return a.WithBackend(func(b ctl.Backend) error { return a.wouldGiveUp(cmd.Context(), b, args[0]) })
			}
			return onNode(a, cmd, args[0], "given up", func(ctx context.Context, d dirpb.DirectoryClient) (
				*dirpb.GiveUpNodeReply, error) {
				return d.GiveUpNode(ctx, &dirpb.GiveUpNodeRequest{Node: args[0]})
			})
		},
	})
	ctl.DryFlag(c, &dry)
	return c
}

// addNode takes a memory node into use; known refuses a name that the directory has never
// heard.
func (a *commands) addNode(ctx context.Context, b ctl.Backend, name string, known bool, patient time.Duration,
	wait bool) error {
	var node *dirpb.Node
	var namespaces []string
	look := func(st *dirpb.StatusReply) (ctl.Progress, bool, error) {
		node = nodeNamed(st.GetMap(), name)
		namespaces = ctl.MapTo(st.GetMap().GetNamespaces(), (*dirpb.Namespace).GetName)
		return ctl.Progress{Left: fmt.Sprintf("%s is not up yet", name)}, node.GetState() == dirpb.NodeState_NODE_UP,
			nil
	}
	st, err := ctl.ClusterStatus(ctx, b)
	if err != nil {
		return err
	}
	look(st)
	if _, err := nodeIn(st.GetMap(), name); err != nil && known {
		return ctl.ExitWith(ctl.ExitNo,
			fmt.Errorf("%w; it adds itself when `kvd memnode --name %s` is started, and --for "+
				"%v waits for that", err, name, patient))
	}
	if node.GetDraining() {
		if _, err := a.setDrain(ctx, b, name, true); err != nil {
			return err
		}
	}
	late := errors.New("not up in time")
	up, cancel := context.WithTimeoutCause(ctx, patient, late)
	err = a.Await(up, b, "nodes add", 0, look)
	cancel()
	switch {
	case errors.Is(err, late) && node == nil:
		return ctl.ExitWith(ctl.ExitNo,
			fmt.Errorf("unknown memory node %q: it adds itself when `kvd memnode --name %s` is "+
				"started", name, name))
	case errors.Is(err, late):
		return ctl.ExitWith(ctl.ExitUnavailable,
			fmt.Errorf("memory node %q is down; is `kvd memnode --name %s` running?",
				name, name))
	case err != nil:
		return ctl.ExitWith(ctl.ExitCode(err), fmt.Errorf("while waiting for %q to be up, nothing was rebalanced: %w",
			name,
			err))
	}
	for _, ns := range namespaces {
		if err := a.rebalance(ctx, b, ns, rebalancing{wait: wait}); err != nil {
			return err
		}
	}
	return nil
}

func (a *commands) drainCommand() *cobra.Command {
	var cancel, wait, dry bool
	c := ctl.Changes(&cobra.Command{
		Use:   "drain NODE",
		Short: "Move everything away from a memory node",
		Long: "Tell the store to move everything away from a memory node, one region at a time,\n" +
			"and to put nothing new there. No copy is given up before its replacement is whole;\n" +
			"if no other node has room for one, the keys move to other placement groups. It is\n" +
			"refused if fewer memory nodes would be left than a namespace keeps copies.\n" +
			"Afterwards the node can be stopped, and forgotten with kvctl nodes remove.",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completeNode(),
		RunE: func(cmd *cobra.Command, args []string) error {
			if cancel && wait {
				return ctl.Usagef("--cancel and --wait: want one of them")
			}
			if dry {
				return a.WithBackend(func(b ctl.Backend) error {
					return a.wouldDrain(cmd.Context(), b, args[0],
						cancel)
				})
			}
			return a.WithBackend(func(b ctl.Backend) error { return a.drain(cmd.Context(), b, args[0], cancel, wait) })
		},
	})
	c.Flags().BoolVar(&cancel, "cancel", false, "take a drain back; what has moved stays where it is")
	c.Flags().BoolVar(&wait, "wait", false, "wait until the node holds nothing, and show how far it is")
	ctl.DryFlag(c, &dry)
	return c
}

func (a *commands) setDrain(ctx context.Context, b ctl.Backend, name string, cancel bool) (regions uint32, err error) {
	rep, err := ctl.Call(ctx, b, true, func(ctx context.Context, d dirpb.DirectoryClient) (*dirpb.DrainNodeReply,
		error) {
		return d.DrainNode(ctx, &dirpb.DrainNodeRequest{Node: name, Cancel: cancel})
	})
	if err != nil {
		return 0, fmt.Errorf("%q: %w", name, err)
	}
	return rep.GetRegions(), nil
}

// nowhere says why what a memory node holds can go nowhere, or "": a namespace needs as many
// memory nodes as it keeps copies, whatever room they have.
func nowhere(m *dirpb.Map, n *dirpb.Node) string {
	var left []string
	for _, o := range m.GetNodes() {
		if o.GetId() != n.GetId() && o.GetState() == dirpb.NodeState_NODE_UP && !o.GetDraining() {
			left = append(left, o.GetName())
		}
	}
	slices.Sort(left)
	for _, ns := range m.GetNamespaces() {
		copies := int(ns.GetReplicas())
		if copies <= len(left) || !slices.ContainsFunc(overview.Groups(m, ns.GetId()),
			func(p *dirpb.PlacementGroup) bool {
				return overview.IsOn(p, n.GetId())
			}) {
			continue
		}
		others := "no other is up and stays"
		if len(left) > 0 {
			others = fmt.Sprintf("without it only %s would be left", strings.Join(left, ", "))
		}
		return fmt.Sprintf("namespace %q (replicas %d) has copies there, and %s: start another first (kvd memnode)",
			ns.GetName(), copies, others)
	}
	return ""
}

func (a *commands) drain(ctx context.Context, b ctl.Backend, name string, cancel, wait bool) error {
	m, n, err := a.node(ctx, b, name)
	if err != nil {
		return err
	}
	if why := nowhere(m, n); why != "" && !cancel {
		return ctl.ExitWith(ctl.ExitNo, fmt.Errorf("%q is not drained: %s", name, why))
	}
	regions, err := a.setDrain(ctx, b, name, cancel)
	if err != nil {
		return err
	}
	if wait {
		var total int
		seen, changed := "", time.Now()
		err := a.Await(ctx, b, "drain", ctl.Stuck, func(st *dirpb.StatusReply) (ctl.Progress, bool, error) {
			now := nodeNamed(st.GetMap(), name)
			if now == nil {
				return ctl.Progress{}, true, nil // somebody removed it
			}
			if !now.GetDraining() {
				return ctl.Progress{}, false,
					ctl.ExitWith(ctl.ExitNo, fmt.Errorf("memory node %q: the drain was taken back", name))
			}
			left := overview.RegionsOn(st.GetMap(), n.GetId())
			regions, total = uint32(left), max(total, left)
			p := ctl.Progress{Done: uint64(total - left), Total: uint64(total), Detail: ctl.JobsText(st),
				Left: fmt.Sprintf("%d of %d regions left on %s%s", left, total, name, ctl.Troubles(st))}
			if now := ctl.Activity(st); now != seen {
				seen, changed = now, time.Now()
			} else if time.Since(changed) > wonders {
				p.Left += "; nothing moves: no other memory node may have room"
			}
			return p, left == 0, nil
		})
		if err != nil {
			return ctl.Waited(err)
		}
	}
	if a.JSON() {
		return a.PrintJSON(map[string]any{"node": name, "draining": !cancel, "regions": regions})
	}
	a.PrintTable(ctl.Row{"Node", "Draining", "Regions"}, []ctl.Row{{name, overview.YesNo(!cancel), regions}})
	return nil
}
