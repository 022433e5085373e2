package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/internal/dirclient"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/overview"
)

func (a *app) operateCommands() []*cobra.Command {
	return []*cobra.Command{a.drainCommand(), a.rebalanceCommand(), a.gatewaysCommand(),
		a.viewCommand("jobs", "List background jobs: new copies, moves of shards, recalls, scrubs", a.printJobs)}
}

// ---- waiting ---------------------------------------------------------------

// pollEvery is how often a command that waits asks the directory.
const pollEvery = 100 * time.Millisecond

// errStalled means that nothing has changed for as long as a wait allows.
var errStalled = errors.New("nothing changes any more")

// progress is how far something has come.
type progress struct {
	done, total uint64
	// left says what is still missing. Without a terminal it is printed whenever it
	// changes, so it holds nothing that changes all the time; detail may.
	left, detail string
}

// await asks the directory until step says that it is done or fails. Silence of
// the directory is borne for as long as patience lasts. stall is how long nothing
// may change before it ends with errStalled; 0: for ever.
func (a *app) await(ctx context.Context, b backend, what string, stall time.Duration,
	step func(*dirpb.StatusReply) (p progress, done bool, err error)) error {
	bar := a.bar(what, "", func() int64 { return 1 })
	defer bar.end()
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	said, seen := "", ""
	answered, changed := time.Now(), time.Now()
	var applied uint64
	for {
		st, err := clusterStatus(ctx, b)
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case errors.Is(err, dirclient.ErrUnavailable) && time.Since(answered) < patience:
		case err != nil:
			return err
		case st.GetRaftApplied() < applied: // another directory node, which is behind
		default:
			answered, applied = time.Now(), st.GetRaftApplied()
			p, done, err := step(st)
			if done || err != nil {
				return err
			}
			if bar != nil {
				// It ends when step says so.
				bar.set(strings.TrimSpace(what+": "+p.left+" "+p.detail), int64(p.done), int64(max(p.total, p.done)+1))
			} else if p.left != said {
				said = p.left
				a.say("kvctl %s: %s", what, p.left)
			}
			if now := activity(st); now != seen {
				seen, changed = now, time.Now()
			} else if stall > 0 && time.Since(changed) >= stall {
				return errStalled
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
		}
	}
}

// activity differs between two states when anything but sessions has got on.
func activity(st *dirpb.StatusReply) string {
	var b strings.Builder
	fmt.Fprint(&b, st.GetMap().GetVersion())
	for _, j := range st.GetJobs() {
		fmt.Fprint(&b, " ", j.GetId(), ":", j.GetOwner(), ":", j.GetDone())
	}
	for _, u := range st.GetUsage() {
		fmt.Fprint(&b, " ", u.GetPgId(), ":", u.GetLastScrubUnixMillis(), ":", u.GetLeakedExtents())
	}
	return b.String()
}

// waited is the error of a wait for something that goes on without kvctl.
func waited(err error) error {
	if err == nil || errors.As(err, new(*exitError)) {
		return err
	}
	return &exitError{exitCode(err), fmt.Errorf("while waiting for it, it goes on by itself: %w", err)}
}

// call makes a request that changes something; one that may happen twice is made again if nobody knows whether it did.
func call[T any](ctx context.Context, b backend, twice bool, fn func(context.Context, dirpb.DirectoryClient) (T, error)) (rep T, err error) {
	err = b.Directory(ctx, twice, func(ctx context.Context, d dirpb.DirectoryClient) (err error) {
		rep, err = fn(ctx, d)
		return err
	})
	return rep, err
}

// ---- names -----------------------------------------------------------------

func nodeNamed(m *dirpb.Map, name string) *dirpb.Node {
	i := slices.IndexFunc(m.GetNodes(), func(n *dirpb.Node) bool { return n.GetName() == name })
	if i < 0 {
		return nil
	}
	return m.GetNodes()[i]
}

// node finds a memory node that the user named, and the map that it is in.
func (a *app) node(ctx context.Context, b backend, name string) (*dirpb.Map, *dirpb.Node, error) {
	st, err := clusterStatus(ctx, b)
	if err != nil {
		return nil, nil, err
	}
	n, err := nodeIn(st.GetMap(), name)
	return st.GetMap(), n, err
}

func nodeIn(m *dirpb.Map, name string) (*dirpb.Node, error) {
	n := nodeNamed(m, name)
	if n == nil {
		return nil, &exitError{exitNo, fmt.Errorf("unknown memory node %q (kvctl nodes lists them)", name)}
	}
	return n, nil
}

// complete suggests names that the directory knows.
func (a *app) complete(names func(*dirpb.StatusReply) []string) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 || a.start(cmd, nil) != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		ctx, cancel := context.WithTimeout(cmd.Context(), time.Second)
		defer cancel()
		var out []string
		_ = a.withBackend(func(b backend) error {
			st, err := clusterStatus(ctx, b)
			out = names(st)
			return err
		})
		return out, cobra.ShellCompDirectiveNoFileComp
	}
}

func (a *app) completeNode() cobra.CompletionFunc {
	return a.complete(func(st *dirpb.StatusReply) []string { return mapTo(st.GetMap().GetNodes(), (*dirpb.Node).GetName) })
}

// ---- memory nodes ----------------------------------------------------------

func (a *app) nodesCommand() *cobra.Command {
	c := a.viewCommand("nodes", "List, add and remove memory nodes", a.printNodes)
	c.Long = "List memory nodes: state, regions that they hold or are about to, what they lend.\n\n" +
		"A memory node adds itself when it is started, and removes itself from nothing: one\n" +
		"that stops counts as lost, and its copies are made anew elsewhere. To take one away\n" +
		"without losing a copy, drain it first."
	var wait bool
	var patient time.Duration
	add := changes(&cobra.Command{
		Use:   "add NODE",
		Short: "Take a memory node into use: undo its drain, wait until it is up, rebalance",
		Long: "A memory node adds itself when `kvd memnode --name NODE` is started, and takes new\n" +
			"namespaces and lost copies from then on. add undoes a drain of it, if there is\n" +
			"one, waits until it is up, and rebalances every namespace, so that it gets its\n" +
			"share of the keys that are there already. A node that was never started is\n" +
			"refused, unless --for says how long to wait for it.",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completeNode(),
		RunE: func(cmd *cobra.Command, args []string) error {
			if patient <= 0 {
				return usagef("--for %v: want > 0", patient)
			}
			known := !cmd.Flags().Changed("for")
			return a.withBackend(func(b backend) error { return a.addNode(cmd.Context(), b, args[0], known, patient, wait) })
		},
	})
	add.Flags().BoolVar(&wait, "wait", false, "wait until everything is where it should be")
	add.Flags().DurationVar(&patient, "for", 30*time.Second, "how long to wait for the node to be up")
	var force, dry bool
	remove := changes(&cobra.Command{
		Use:   "remove NODE",
		Short: "Forget a memory node that holds nothing",
		Long: "Forget a memory node, which should be stopped and hold nothing any more (kvctl\n" +
			"drain). With --force what it still holds counts as lost at once: other copies take\n" +
			"over, and keys without one are gone.",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completeNode(),
		RunE: func(cmd *cobra.Command, args []string) error {
			if dry {
				return a.withBackend(func(b backend) error { return a.wouldForget(cmd.Context(), b, args[0], force) })
			}
			return onNode(a, cmd, args[0], "removed", func(ctx context.Context, d dirpb.DirectoryClient) (*dirpb.RemoveNodeReply, error) {
				return d.RemoveNode(ctx, &dirpb.RemoveNodeRequest{Node: args[0], Force: force})
			})
		},
	})
	remove.Flags().BoolVar(&force, "force", false, "even if it holds something, which counts as lost then")
	dryFlag(remove, &dry)
	c.AddCommand(add, remove, a.giveUpCommand(), a.restartCommand())
	return c
}

// onNode has the directory do something with a memory node that there is, by which that is done, and says what became of what it held.
func onNode[R any](a *app, cmd *cobra.Command, name, done string, f func(context.Context, dirpb.DirectoryClient) (R, error)) error {
	return a.withBackend(func(b backend) error {
		m, n, err := a.node(cmd.Context(), b, name)
		if err != nil {
			return err
		}
		if _, err := call(cmd.Context(), b, false, f); err != nil {
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
		if a.json() {
			return a.printJSON(map[string]any{"node": name, "done": done, "placement_groups": held, "last_copies": last})
		}
		text := fmt.Sprintf("%s: %s; it held nothing", name, done)
		if held > 0 {
			text = fmt.Sprintf("%s: %s; regions that it held: %d, of these without another copy, so that their keys are gone: %d", name, done, held, last)
		}
		_, err = fmt.Fprintln(a.stdout, text)
		return err
	})
}

func (a *app) giveUpCommand() *cobra.Command {
	var dry bool
	c := changes(&cobra.Command{
		Use:   "give-up NODE",
		Short: "Stop waiting for a silent memory node: what it holds counts as lost",
		Long: "Declare a memory node lost that has not been heard for a lease. The store does that\n" +
			"by itself if others have copies of all that it holds. If it keeps its memory and has\n" +
			"the only copy of something, the store waits until it is back (kvctl status says so),\n" +
			"and for ever unless last-copy-wait ends that. If its memory is gone, give it up: keys\n" +
			"without another copy are gone then. A node that is heard is refused.",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completeNode(),
		RunE: func(cmd *cobra.Command, args []string) error {
			if dry {
				return a.withBackend(func(b backend) error { return a.wouldGiveUp(cmd.Context(), b, args[0]) })
			}
			return onNode(a, cmd, args[0], "given up", func(ctx context.Context, d dirpb.DirectoryClient) (*dirpb.GiveUpNodeReply, error) {
				return d.GiveUpNode(ctx, &dirpb.GiveUpNodeRequest{Node: args[0]})
			})
		},
	})
	dryFlag(c, &dry)
	return c
}

// addNode takes a memory node into use; known refuses a name that the directory has never
// heard.
func (a *app) addNode(ctx context.Context, b backend, name string, known bool, patient time.Duration, wait bool) error {
	var node *dirpb.Node
	var namespaces []string
	look := func(st *dirpb.StatusReply) (progress, bool, error) {
		node = nodeNamed(st.GetMap(), name)
		namespaces = mapTo(st.GetMap().GetNamespaces(), (*dirpb.Namespace).GetName)
		return progress{left: fmt.Sprintf("%s is not up yet", name)}, node.GetState() == dirpb.NodeState_NODE_UP, nil
	}
	st, err := clusterStatus(ctx, b)
	if err != nil {
		return err
	}
	look(st)
	if _, err := nodeIn(st.GetMap(), name); err != nil && known {
		return &exitError{exitNo, fmt.Errorf("%w; it adds itself when `kvd memnode --name %s` is started, and --for %v waits for that", err, name, patient)}
	}
	if node.GetDraining() {
		if _, err := a.setDrain(ctx, b, name, true); err != nil {
			return err
		}
	}
	late := errors.New("not up in time")
	up, cancel := context.WithTimeoutCause(ctx, patient, late)
	err = a.await(up, b, "nodes add", 0, look)
	cancel()
	switch {
	case errors.Is(err, late) && node == nil:
		return &exitError{exitNo, fmt.Errorf("unknown memory node %q: it adds itself when `kvd memnode --name %s` is started", name, name)}
	case errors.Is(err, late):
		return &exitError{exitUnavailable, fmt.Errorf("memory node %q is down; is `kvd memnode --name %s` running?", name, name)}
	case err != nil:
		return &exitError{exitCode(err), fmt.Errorf("while waiting for %q to be up, nothing was rebalanced: %w", name, err)}
	}
	for _, ns := range namespaces {
		if err := a.rebalance(ctx, b, ns, rebalancing{wait: wait}); err != nil {
			return err
		}
	}
	return nil
}

// regionsOn counts the placement groups that have node as a member, or soon will.
func regionsOn(m *dirpb.Map, node uint32) (n int) {
	for _, p := range m.GetPgs() {
		if isOn(p, node) {
			n++
		}
	}
	return n
}

// isOn reports whether p has node as a member, or soon will.
func isOn(p *dirpb.PlacementGroup, node uint32) bool {
	return slices.ContainsFunc(append(slices.Clone(p.GetMembers()), p.GetPlanned(), p.GetLeaving()), func(mb *dirpb.Member) bool {
		return mb.GetNodeId() == node && node != 0
	})
}

func (a *app) drainCommand() *cobra.Command {
	var cancel, wait, dry bool
	c := changes(&cobra.Command{
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
				return usagef("--cancel and --wait: want one of them")
			}
			if dry {
				return a.withBackend(func(b backend) error { return a.wouldDrain(cmd.Context(), b, args[0], cancel) })
			}
			return a.withBackend(func(b backend) error { return a.drain(cmd.Context(), b, args[0], cancel, wait) })
		},
	})
	c.Flags().BoolVar(&cancel, "cancel", false, "take a drain back; what has moved stays where it is")
	c.Flags().BoolVar(&wait, "wait", false, "wait until the node holds nothing, and show how far it is")
	dryFlag(c, &dry)
	return c
}

func (a *app) setDrain(ctx context.Context, b backend, name string, cancel bool) (regions uint32, err error) {
	rep, err := call(ctx, b, true, func(ctx context.Context, d dirpb.DirectoryClient) (*dirpb.DrainNodeReply, error) {
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
		if copies <= len(left) || !slices.ContainsFunc(overview.Groups(m, ns.GetId()), func(p *dirpb.PlacementGroup) bool { return isOn(p, n.GetId()) }) {
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

func (a *app) drain(ctx context.Context, b backend, name string, cancel, wait bool) error {
	m, n, err := a.node(ctx, b, name)
	if err != nil {
		return err
	}
	if why := nowhere(m, n); why != "" && !cancel {
		return &exitError{exitNo, fmt.Errorf("%q is not drained: %s", name, why)}
	}
	regions, err := a.setDrain(ctx, b, name, cancel)
	if err != nil {
		return err
	}
	if wait {
		var total int
		seen, changed := "", time.Now()
		err := a.await(ctx, b, "drain", stuck, func(st *dirpb.StatusReply) (progress, bool, error) {
			now := nodeNamed(st.GetMap(), name)
			if now == nil {
				return progress{}, true, nil // somebody removed it
			}
			if !now.GetDraining() {
				return progress{}, false, &exitError{exitNo, fmt.Errorf("memory node %q: the drain was taken back", name)}
			}
			left := regionsOn(st.GetMap(), n.GetId())
			regions, total = uint32(left), max(total, left)
			p := progress{done: uint64(total - left), total: uint64(total), detail: jobsText(st),
				left: fmt.Sprintf("%d of %d regions left on %s%s", left, total, name, troubles(st))}
			if now := activity(st); now != seen {
				seen, changed = now, time.Now()
			} else if time.Since(changed) > wonders {
				p.left += "; nothing moves: no other memory node may have room"
			}
			return p, left == 0, nil
		})
		if err != nil {
			return waited(err)
		}
	}
	if a.json() {
		return a.printJSON(map[string]any{"node": name, "draining": !cancel, "regions": regions})
	}
	a.printTable(row{"Node", "Draining", "Regions"}, []row{{name, yesNo(!cancel), regions}})
	return nil
}

func yesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

// ---- balance ---------------------------------------------------------------

// rebalancing is how a namespace is rebalanced.
type rebalancing struct{ wait, cancel, dry bool }

func (a *app) rebalanceCommand() *cobra.Command {
	var how rebalancing
	var all bool
	c := changes(&cobra.Command{
		Use:   "rebalance [NAMESPACE]",
		Short: "Spread a namespace evenly over the memory nodes",
		Long: "Make placement groups on memory nodes that have none of the namespace, and move\n" +
			"shards until every placement group has its share. The steps are printed, and done\n" +
			"one after the other while the store is in use, whichever directory node leads.\n" +
			"Without NAMESPACE it is the one of --namespace; with --all it is every namespace, one\n" +
			"after the other.",
		Args: cobra.MaximumNArgs(1),
		ValidArgsFunction: a.complete(func(st *dirpb.StatusReply) []string {
			return mapTo(st.GetMap().GetNamespaces(), (*dirpb.Namespace).GetName)
		}),
		RunE: func(cmd *cobra.Command, args []string) error {
			if all && len(args) > 0 {
				return usagef("--all and namespace %q: want one of them; nothing was done", args[0])
			}
			return a.withBackend(func(b backend) error { return a.rebalanceSome(cmd.Context(), b, args, all, how) })
		},
	})
	c.Flags().BoolVar(&all, "all", false, "every namespace, one after the other")
	c.Flags().BoolVar(&how.wait, "wait", false, "wait until it is done, and show how far it is")
	c.Flags().BoolVar(&how.cancel, "cancel", false, "begin no other step, and print those that are left")
	dryFlag(c, &how.dry)
	c.MarkFlagsMutuallyExclusive("wait", "cancel", "dry-run")
	return c
}

// askAgain is how long nothing may happen before a wait for a rebalance asks again what is left.
const askAgain = 5 * time.Second

// wonders is how long nothing may happen before a wait for a drain wonders why: it rests, and not for so long.
const wonders = 15 * time.Second

// stuck is how long nothing may happen before a wait for a drain or a rebalance gives up.
const stuck = time.Minute

// rebalanceSome rebalances a namespace that is named, all of them, or the one of --namespace.
func (a *app) rebalanceSome(ctx context.Context, b backend, named []string, all bool, how rebalancing) error {
	if len(named) > 0 {
		return a.rebalance(ctx, b, named[0], how)
	}
	st, err := clusterStatus(ctx, b)
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
		if _, err := namespaceOf(st.GetMap(), a.namespace); err != nil && len(names) > 0 {
			return fmt.Errorf("%w: nothing was rebalanced. Name the one that is meant: kvctl rebalance %s; or take every one: kvctl rebalance --all",
				err, strings.Join(names, ", or kvctl rebalance "))
		}
		names = []string{a.namespace}
	}
	for _, name := range names {
		if err := a.rebalance(ctx, b, name, how); err != nil {
			return err
		}
	}
	return nil
}

// rebalance asks for it, prints the steps and waits, if it is to.
func (a *app) rebalance(ctx context.Context, b backend, name string, how rebalancing) error {
	st, err := clusterStatus(ctx, b)
	if err != nil {
		return err
	}
	ns, err := namespaceOf(st.GetMap(), name)
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
			a.unchanged()
		}
		return err
	}
	total, begun := len(steps), false
	version, asked := st.GetMap().GetVersion(), time.Now()
	err = a.await(ctx, b, "rebalance", stuck, func(st *dirpb.StatusReply) (progress, bool, error) {
		v := st.GetMap().GetVersion()
		now, err := namespaceOf(st.GetMap(), name)
		if err != nil {
			return progress{}, false, err
		}
		const none, on = dirpb.Rebalancing_REBALANCING_NONE, dirpb.Rebalancing_REBALANCING_ON
		is := now.GetRebalancing()
		// It may have begun and been refused before anybody looked; other directory nodes than the leader may be behind.
		ended := is != on && (begun || is != none && st.GetLeads())
		begun = is == on
		if ended && is == none {
			return progress{}, true, nil
		}
		if ended || !unsettled(st, ns.GetId()) && len(steps) > 0 && (v != version || time.Since(asked) >= askAgain) {
			if steps, err = ask(true); err != nil {
				return progress{}, false, err
			}
			if ended && len(steps) > 0 {
				why := "it was cancelled"
				if is == dirpb.Rebalancing_REBALANCING_REFUSED {
					why = "a step was refused, since something else has changed; ask again"
				}
				return progress{}, false, &exitError{exitNo, fmt.Errorf("namespace %q: its rebalance has ended, with %d steps left: %s", name, len(steps), why)}
			}
			version, asked = v, time.Now()
			total = max(total, len(steps))
		}
		return progress{done: uint64(total - len(steps)), total: uint64(total),
			left: fmt.Sprintf("%d of %d steps left in %s%s", len(steps), total, name, troubles(st)), detail: jobsText(st)}, len(steps) == 0, nil
	})
	return waited(err)
}

// printSteps prints what is done, or what is left.
func (a *app) printSteps(namespace string, steps []string, left bool) error {
	if a.json() {
		if steps == nil {
			steps = []string{}
		}
		if err := a.printJSON(map[string]any{"namespace": namespace, "steps": steps}); err != nil {
			return err
		}
		return a.flush()
	}
	if len(steps) == 0 {
		steps, left = []string{"nothing to do"}, false
	}
	for _, s := range steps {
		if left {
			s = "not done: " + s
		}
		fmt.Fprintln(a.stdout, visible(namespace+": "+s))
	}
	return a.flush()
}

// unsettled reports whether a placement group of ns is changing, or something of it
// moves.
func unsettled(st *dirpb.StatusReply, ns uint32) bool {
	return slices.ContainsFunc(overview.Groups(st.GetMap(), ns), func(p *dirpb.PlacementGroup) bool {
		return p.GetState() == dirpb.PGState_PG_CREATING || p.GetState() == dirpb.PGState_PG_FROZEN ||
			p.GetJoining() || p.GetPlanned() != nil || p.GetLeaving() != nil
	}) || slices.ContainsFunc(st.GetJobs(), func(j *dirpb.Job) bool {
		return j.GetNamespaceId() == ns && j.GetKind() != dirpb.JobKind_JOB_SCRUB && j.GetKind() != dirpb.JobKind_JOB_RECALL &&
			j.GetKind() != dirpb.JobKind_JOB_SETTLE
	})
}

// ---- jobs ------------------------------------------------------------------

// jobName says what a job does.
func jobName(j *dirpb.Job) string {
	switch s := short(j.GetKind()); j.GetKind() {
	case dirpb.JobKind_JOB_MOVE, dirpb.JobKind_JOB_ABANDON:
		return fmt.Sprintf("%s of shard %d", s, j.GetShardId())
	case dirpb.JobKind_JOB_RECALL:
		return fmt.Sprintf("%s of extent %s of placement group %d", s, extentsText(j), j.GetPgId())
	default:
		return fmt.Sprintf("%s of placement group %d", s, j.GetPgId())
	}
}

// extentsText lists the extents that a job recalls.
func extentsText(j *dirpb.Job) string {
	return strings.Join(mapTo(j.GetExtents(), func(x uint32) string { return strconv.FormatUint(uint64(x), 10) }), ",")
}

// kindText is the kind of a job, and how it goes about it.
func kindText(j *dirpb.Job) string {
	switch s := short(j.GetKind()); {
	case j.GetInPlace():
		return s + " in place"
	case j.GetCount():
		return s + ", count only"
	default:
		return s
	}
}

// jobsText says how far the jobs are that somebody works on.
func jobsText(st *dirpb.StatusReply) string {
	var parts []string
	for _, j := range st.GetJobs() {
		if j.GetOwner() != 0 {
			parts = append(parts, fmt.Sprintf("(%s: %d/%d)", jobName(j), j.GetDone(), j.GetTotal()))
		}
	}
	return strings.Join(parts, " ")
}

// troubles says why jobs do not get on.
func troubles(st *dirpb.StatusReply) string {
	var out strings.Builder
	for _, j := range st.GetJobs() {
		if j.GetTrouble() != "" {
			fmt.Fprintf(&out, "; %s: %s", jobName(j), visible(j.GetTrouble()))
		}
	}
	return out.String()
}

func (a *app) printJobs(st *dirpb.StatusReply) error {
	jobs := st.GetJobs()
	slices.SortFunc(jobs, func(x, y *dirpb.Job) int { return int(int64(x.GetId()) - int64(y.GetId())) })
	if a.json() {
		return printProtos(a, jobs)
	}
	namespaces, owners := make(map[uint32]string), make(map[uint32]string)
	for _, ns := range st.GetMap().GetNamespaces() {
		namespaces[ns.GetId()] = ns.GetName()
	}
	for _, s := range st.GetSessions() {
		owners[s.GetId()] = s.GetClient()
	}
	number := func(n uint32) string {
		if n == 0 {
			return "-"
		}
		return strconv.FormatUint(uint64(n), 10)
	}
	a.printTable(row{"ID", "Kind", "Namespace", "PG", "Shard", "Extents", "Owner", "Done", "Total", "Because", "Trouble"},
		mapTo(jobs, func(j *dirpb.Job) row {
			pg, extent, owner, trouble := number(j.GetPgId()), "-", number(j.GetOwner()), j.GetTrouble()
			if t := j.GetTargetPgId(); t != 0 && t != j.GetPgId() {
				pg += " → " + number(t)
			}
			if j.GetKind() == dirpb.JobKind_JOB_RECALL {
				extent = extentsText(j)
			}
			if c := owners[j.GetOwner()]; c != "" {
				owner += " " + c
			}
			if trouble == "" && j.GetWaiting() {
				trouble = "waits until every session has heard of it"
			}
			return row{j.GetId(), kindText(j), namespaces[j.GetNamespaceId()], pg, number(j.GetShardId()), extent, owner,
				j.GetDone(), j.GetTotal(), j.GetReason(), trouble}
		}))
	return nil
}

// ---- shards ----------------------------------------------------------------

func (a *app) shardsCommand() *cobra.Command {
	c := a.viewCommand("shards", "List the namespace's placement groups and shards, and split shards", a.printShards)
	var all bool
	split := changes(&cobra.Command{
		Use:   "split [ID]",
		Short: "Split a shard of the namespace, or all of them, in two",
		Long: "Split a shard, so that twice as many keys find a slot. Shards split by themselves\n" +
			"when they are full; this does it ahead of time. kvctl jobs shows how far it is.",
		Args: cobra.MaximumNArgs(1),
		ValidArgsFunction: a.complete(func(st *dirpb.StatusReply) (ids []string) {
			ns, err := a.ownNamespace(st.GetMap())
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
				return usagef("want either a shard's ID or --all")
			}
			var id uint64
			if len(args) == 1 {
				var err error
				if id, err = strconv.ParseUint(args[0], 10, 32); err != nil || id == 0 {
					return usagef("shard %q: want a number (kvctl shards lists them)", args[0])
				}
			}
			return a.withBackend(func(b backend) error { return a.split(cmd.Context(), b, uint32(id)) })
		},
	})
	split.Flags().BoolVar(&all, "all", false, "every shard of the namespace")
	c.AddCommand(split)
	return c
}

// split starts the split of a shard, or of all if id is 0.
func (a *app) split(ctx context.Context, b backend, id uint32) error {
	st, err := clusterStatus(ctx, b)
	if err != nil {
		return err
	}
	ns, err := a.ownNamespace(st.GetMap())
	if err != nil {
		return err
	}
	if id != 0 && !slices.ContainsFunc(st.GetMap().GetShards(), func(s *dirpb.Shard) bool {
		return s.GetId() == id && s.GetNamespaceId() == ns.GetId()
	}) {
		return &exitError{exitNo, fmt.Errorf("unknown shard %d in namespace %q (kvctl shards lists them)", id, a.namespace)}
	}
	rep, err := call(ctx, b, false, func(ctx context.Context, d dirpb.DirectoryClient) (*dirpb.StartJobReply, error) {
		return d.StartJob(ctx, &dirpb.StartJobRequest{Kind: dirpb.JobKind_JOB_MOVE, Namespace: a.namespace, ShardId: id})
	})
	if err != nil {
		return fmt.Errorf("%q: %w", a.namespace, err)
	}
	if a.json() {
		return a.printProto(rep)
	}
	a.printTable(row{"Job"}, mapTo(rep.GetJobIds(), func(id uint32) row { return row{id} }))
	return nil
}
