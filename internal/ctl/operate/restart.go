package operate

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/hostid"
	"github.com/kvd-project/kvd/internal/keeper"
	"github.com/kvd-project/kvd/internal/overview"
)

func (a *commands) restartCommand() *cobra.Command {
	var patient time.Duration
	var leave bool
	var program string
	c := ctl.Changes(&cobra.Command{
		Use:   "restart NODE",
		Short: "Replace the process of a memory node, to upgrade it",
		Long: "Have a memory node's keeper start another process in place of the one that serves, and\n" +
			"wait until it does. It is the program that lies now where the last one was started from,\n" +
			"so this is how one is upgraded. Nothing is lost. Operations on what it holds wait for\n" +
			"it; it may take 30 s before the directory calls it lost.\n\n" +
			"It is refused if the memory node has keep off. It is also refused if its settings file says now\n" +
			"that it lends less than its regions need, another name, or what cannot be read. The process that\n" +
			"serves goes on then.\n\n" +
			"With --leave nobody waits for the restart: the memory node leaves its placement groups first.\n" +
			"They have a copy less until it has joined again, and kvctl waits for that. It is refused if\n" +
			"it has the only copy of something.\n\n" +
			"With --binary it is another program, for this restart and those after it. kvctl has to run on the\n" +
			"memory node's machine, as root or its user. The program must be a regular file that one of them owns\n" +
			"and nobody else may write. If it does not come up, a process of the one before it serves again.",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completeNode(),
		RunE: func(cmd *cobra.Command, args []string) error {
			if patient <= 0 {
				return ctl.Usagef("--for %v: want > 0", patient)
			}
			if cmd.Flags().Changed("binary") && program == "" {
				return ctl.Usagef("--binary is empty: want the path of a program")
			}
			return a.WithBackend(func(b ctl.Backend) error {
				return a.restart(cmd.Context(), b, args[0], program, leave, patient)
			})
		},
	})
	c.Flags().DurationVar(&patient, "for", time.Minute, "how long to wait for the new process")
	c.Flags().BoolVar(&leave, "leave", false, "leave the placement groups first, and join them again")
	c.Flags().StringVar(&program, "binary", "", "path of the program that is to serve")
	return c
}

func (a *commands) restart(ctx context.Context, b ctl.Backend, name, program string, leave bool,
	patient time.Duration) error {
	st, err := ctl.ClusterStatus(ctx, b)
	if err != nil {
		return err
	}
	n, err := nodeIn(st.GetMap(), name)
	if err != nil {
		return err
	}
	lacked := lacking(st.GetMap())
	soon, cancel := context.WithTimeout(ctx, patient)
	defer cancel()
	var next *keeper.Choice
	if program != "" {
		if next, program, err = choose(soon, n, program); err != nil {
			return ctl.ExitWith(ctl.ExitNo, fmt.Errorf("%q: %w; nothing was done", name, err))
		}
		defer next.Close()
	}
	q := &dirpb.RestartNodeRequest{Node: name, Leave: leave, Program: program}
	if st.GetLeads() { // others may know of an earlier process alone, whose successor is to be replaced
		q.Boot, q.Incarnation = n.GetBoot(), n.GetIncarnation()
	}
	r, err := ctl.Call(soon, b, q.Boot != 0, func(ctx context.Context,
		d dirpb.DirectoryClient) (*dirpb.RestartNodeReply,
		error) {
		return d.RestartNode(ctx, q)
	})
	if err != nil {
		return fmt.Errorf("%q: %w", name, err)
	}
	version := r.GetVersion()
	if next != nil {
		if version, err = next.Wait(soon); err != nil {
			err = ctl.ExitWith(ctl.ExitNo, fmt.Errorf("%q: %w", name, err))
		}
	}
	if !r.GetKept() && !leave {
		return errors.Join(ctl.ExitWith(ctl.ExitNo, fmt.Errorf("%q was restarted, and began empty: its log says why",
			name)),
			err)
	}
	if err != nil {
		return err
	}
	if version != "" {
		version = ", version " + ctl.Visible(version)
	}
	if !leave {
		fmt.Fprintf(a.Stdout, "%s: restarted with its memory, boot %d%s\n", name, r.GetBoot(), version)
		return nil
	}
	err = a.Await(ctx, b, "nodes restart", ctl.Stuck, func(st *dirpb.StatusReply) (ctl.Progress, bool, error) {
		now := lacking(st.GetMap())
		p := ctl.Progress{Left: fmt.Sprintf("%s is restarted%s; %d placement groups lack a copy%s", name, version, now,
			ctl.Troubles(st)), Detail: ctl.JobsText(st)}
		return p, nodeNamed(st.GetMap(), name).GetState() == dirpb.NodeState_NODE_UP && now <= lacked, nil
	})
	if err != nil {
		return ctl.Waited(err)
	}
	fmt.Fprintf(a.Stdout, "%s: left, restarted and joined again, boot %d%s\n", name, r.GetBoot(), version)
	return nil
}

// lacking counts the placement groups that lack a copy, or have a state in which they serve nobody.
func lacking(m *dirpb.Map) (n int) {
	for _, p := range m.GetPgs() {
		if overview.Lacks(m, p) != "" {
			n++
		}
	}
	return n
}

// choose has the keeper of a memory node of this machine start the program next, and gives its absolute path.
func choose(ctx context.Context, n *dirpb.Node, program string) (*keeper.Choice, string, error) {
	switch {
	case n.GetControl() == "":
		return nil, "", errors.New("its keeper takes no programs: it has control-socket off, or is of an earlier " +
			"version")
	case !hostid.Same(n.GetHostId(), hostid.ID()):
		return nil, "", errors.New("it is on another machine, and its program is chosen there: run this on it")
	}
	path, err := filepath.Abs(program)
	if err != nil {
		return nil, "", err
	}
	next, err := keeper.Choose(ctx, n.GetControl(), path)
	return next, path, err
}
