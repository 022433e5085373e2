package operate

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/overview"
	"github.com/kvd-project/kvd/internal/units"
)

type topOptions struct {
	interval time.Duration
	count    int
	sessions int
}

func (a *commands) topCommand() *cobra.Command {
	var o topOptions
	c := &cobra.Command{
		Use:   "top",
		Short: "Show memory nodes, namespaces and sessions, again and again",
		Long: "Show the verdict on the store, its memory nodes, the memory of its namespaces and its\n" +
			"sessions, the youngest first, every --interval. On a terminal each view takes the place\n" +
			"of the one before; elsewhere they follow each other, by default one alone. CPU % is of\n" +
			"one CPU, what a memory node spends on the data path since the view before. It is 0\n" +
			"over RDMA, and - where it is not known. With -o json a view is one line.\n\n" + memoryHelp,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch {
			case o.interval < 10*time.Millisecond:
				return ctl.Usagef("--interval %v: want at least 10ms", o.interval)
			case o.count < 0:
				return ctl.Usagef("--count %d: want >= 0", o.count)
			}
			if err := ctl.CheckTop(o.sessions); err != nil {
				return err
			}
			if !cmd.Flags().Changed("count") && !ctl.IsTerminal(a.Stdout) {
				o.count = 1
			}
			return a.WithBackend(func(b ctl.Backend) error { return a.top(cmd.Context(), b, o) })
		},
	}
	f := c.Flags()
	f.DurationVar(&o.interval, "interval", 2*time.Second, "time between two views")
	f.IntVar(&o.count, "count", 0,
		"how many views to show; 0: until interrupted, or one if stdout is no terminal")
	ctl.TopFlag(c, &o.sessions)
	f.Lookup("top").Usage = "how many sessions to list"
	return c
}

// nodeLine is what top shows of a memory node.
type nodeLine struct {
	Name    string   `json:"name"`
	State   string   `json:"state"`
	Regions int      `json:"regions"`
	Lent    uint64   `json:"lent_bytes"`
	Used    uint64   `json:"used_bytes"`
	Conns   uint64   `json:"connections"`
	CPU     *float64 `json:"cpu_percent"` // nil: not known yet
}

// nodeLines tells of the memory nodes of st; before and since are of the view before, if there was one.
func nodeLines(before, st *dirpb.StatusReply, since time.Duration) []nodeLine {
	nodes := slices.Clone(st.GetMap().GetNodes())
	slices.SortFunc(nodes, func(x, y *dirpb.Node) int { return int(x.GetId()) - int(y.GetId()) })
	return ctl.MapTo(nodes, func(n *dirpb.Node) nodeLine {
		l := nodeLine{Name: n.GetName(), State: overview.NodeState(n), Regions: overview.RegionsOn(st.GetMap(),
			n.GetId()),
			Lent: n.GetCapacityBytes(),
			Used: n.GetUsedBytes(), Conns: st.GetNodeStats()[n.GetId()].GetConnections()}
		was, is := before.GetNodeStats()[n.GetId()], st.GetNodeStats()[n.GetId()]
		// A process that was started anew counts from 0.
		if was != nil && is != nil && since > 0 && is.GetDataPathCpuNanos() >= was.GetDataPathCpuNanos() {
			cpu := float64(is.GetDataPathCpuNanos()-was.GetDataPathCpuNanos()) / float64(since) * 100
			l.CPU = &cpu
		}
		return l
	})
}

func (a *commands) top(ctx context.Context, b ctl.Backend, o topOptions) error {
	var before *dirpb.StatusReply
	var asked time.Time
	for n := 0; o.count == 0 || n < o.count; n++ {
		if n > 0 && !ctl.Pause(ctx, o.interval) {
			return nil
		}
		st, err := ctl.ClusterView(ctx, b)
		if n > 0 && ctx.Err() != nil {
			return nil
		} else if err != nil {
			return err
		}
		now := a.Now()
		if err := a.printTop(st, nodeLines(before, st, now.Sub(asked)), n, o.sessions); err != nil {
			return err
		}
		if err := a.Flush(); err != nil {
			return err
		}
		before, asked = st, now
	}
	return nil
}

// printTop prints the view with number n, over the one before on a terminal.
func (a *commands) printTop(st *dirpb.StatusReply, nodes []nodeLine, n, most int) error {
	var sessions []*dirpb.SessionInfo
	for _, s := range st.GetSessions() {
		if s.GetLife() == dirpb.SessionLife_SESSION_LIVE {
			sessions = append(sessions, s)
		}
	}
	slices.SortFunc(sessions, func(x, y *dirpb.SessionInfo) int { return int(int64(y.GetId()) - int64(x.GetId())) })
	live := len(sessions)
	sessions = sessions[:min(live, most)]
	sums := overview.Sums(overview.Memories(st))
	at := a.Now().UTC().Format(time.RFC3339)
	if a.JSON() {
		listed := ctl.MapTo(sessions, func(s *dirpb.SessionInfo) map[string]any {
			return map[string]any{"id": s.GetId(), "client": s.GetClient(), "namespace": s.GetNamespace(),
				"age_seconds": float64(s.GetAgeMillis()) / 1000}
		})
		namespaces, err := overview.MemoryColumns.Objects(sums)
		if err != nil {
			return err
		}
		return a.PrintJSON(map[string]any{"time": at, "verdict": overview.VerdictOf(st), "nodes": nodes,
			"namespaces": namespaces,
			"sessions":   live, "youngest_sessions": listed})
	}
	switch {
	case ctl.IsTerminal(a.Stdout):
		fmt.Fprint(a.Stdout, "\x1b[H\x1b[J") // to the corner, and clear the rest
	case n > 0:
		fmt.Fprintln(a.Stdout)
	}
	why := at
	if p := overview.Problems(st); len(p) > 0 {
		why += fmt.Sprintf("; problems: %d, the first: %s", len(p), p[0].What)
	}
	fmt.Fprintf(a.Stdout, "%s\n\n", a.verdictText(overview.VerdictOf(st), why))
	a.PrintTable(ctl.Row{"Memory node", "State", "Regions", "Lent", "In regions", "Connections", "CPU %"},
		ctl.MapTo(nodes, func(l nodeLine) ctl.Row {
			cpu := "-"
			if l.CPU != nil {
				cpu = fmt.Sprintf("%.1f", *l.CPU)
			}
			return ctl.Row{l.Name, l.State, l.Regions, units.Rounded(l.Lent), units.Rounded(l.Used), l.Conns, cpu}
		}))
	if len(sums) > 0 {
		fmt.Fprintln(a.Stdout)
		ctl.PrintColumns(a.App, overview.MemoryColumns.Without("PG"), sums)
	}
	if live == 0 {
		return nil
	}
	fmt.Fprintln(a.Stdout)
	ctl.PrintColumns(a.App, overview.SessionColumns.Only("Session", "Client", "Namespace", "Age"), sessions)
	if live > len(sessions) {
		fmt.Fprintf(a.Stdout, " and %d more\n", live-len(sessions))
	}
	return nil
}
