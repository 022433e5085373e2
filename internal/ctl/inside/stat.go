package inside

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/overview"
	"github.com/kvd-project/kvd/internal/units"
)

func (a *commands) statCommand() *cobra.Command {
	var every time.Duration
	var count int
	c := &cobra.Command{
		Use:   "stat",
		Short: "Print a line about the namespace every second",
		Long: "Print, for every interval, what the namespace holds:\n\n" +
			"  Keys      slots of the index that hold one\n" +
			"  Change    how many more these are than in the line before\n" +
			"  Live      memory of their records; values beyond 3.9 MiB count only with their lists of chunks\n" +
			"  Held      memory that sessions have and no such record is in: free, on its way home,\n" +
			"            or waiting until nobody can look at it any more\n" +
			"  Lost      memory that nobody holds, such as a killed client's, until it is recalled;\n" +
			"            - if no leader answered: then it is part of Held\n" +
			"  Free      memory that is granted to nobody, within the namespace's limit; some of it may\n" +
			"            wait for reclaim epochs (kvctl stats)\n" +
			"  Used %    of the memory for records, by Live, Held and Lost\n" +
			"  Short     yes: a session found too little memory lately; - if no leader answered\n" +
			"  Sessions  of the namespace, this one included\n" +
			"  Conns     connections of memory nodes, for any namespace\n" +
			"  CPU %     of one CPU, what memory nodes spend on the data path: 0 over RDMA\n\n" +
			"Memory is that of one copy. Nobody counts operations: clients perform them alone.\n" +
			"Keys are counted in the index; if that takes long, not for every line.",
		Args:    cobra.NoArgs,
		GroupID: "cluster",
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch {
			case every < 10*time.Millisecond:
				return ctl.Usagef("--interval %v: want at least 10ms", every)
			case count < 0:
				return ctl.Usagef("--count %d: want >= 0", count)
			}
			return a.WithBackend(func(b ctl.Backend) error {
				s, err := b.Open(cmd.Context(), ctl.SessionOptions{Lanes: 1, ReadOnly: true})
				if err != nil {
					return err
				}
				defer a.Closed("session", s.Close)
				return a.stat(cmd.Context(), b, s, every, count)
			})
		},
	}
	c.Flags().DurationVar(&every, "interval", time.Second, "time between two lines")
	c.Flags().IntVar(&count, "count", 0, "how many lines to print; 0: until interrupted")
	return c
}

// StatLine is one line of stat; memory is in bytes.
type StatLine struct {
	Time     string  `json:"time"`
	Keys     uint64  `json:"keys"`
	Change   int64   `json:"change"`
	Live     uint64  `json:"live_bytes"`
	Held     uint64  `json:"held_bytes"`
	Lost     *uint64 `json:"lost_bytes"` // nil: not known
	Free     uint64  `json:"free_bytes"`
	Short    *bool   `json:"short"` // nil: not known
	Sessions int     `json:"sessions"`
	Conns    uint64  `json:"connections"`
	CPU      float64 `json:"cpu_percent"`
	// Counted is how long ago keys were counted.
	Counted float64 `json:"counted_seconds_ago"`
}

func (a *commands) stat(ctx context.Context, b ctl.Backend, s ctl.Store, every time.Duration, count int) error {
	const layoutText = "%12s %10s %11s %11s %11s %11s %7s %5s %8s %6s %6s\n"
	var l StatLine
	var counted, asked time.Time
	var cost time.Duration // of the last count
	var cpu uint64
	for n := 0; count == 0 || n < count; n++ {
		if n > 0 && !ctl.Pause(ctx, every) {
			return nil
		}
		st, err := ctl.ClusterStatus(ctx, b)
		if ctx.Err() != nil {
			return nil
		} else if err != nil {
			return err
		}
		now := time.Now()
		ns, err := a.OwnNamespace(st.GetMap())
		if err != nil {
			return err
		}
		before := l.Keys
		// At most a tenth of the time goes into counting.
		if n == 0 || now.Sub(counted) >= 10*cost {
			l.Keys, l.Live, err = countKeys(&walker{raw: raw{b, s}, ctx: ctx, m: st.GetMap(), ns: ns})
			if ctx.Err() != nil {
				return nil
			} else if err != nil {
				return err
			}
			counted = time.Now()
			cost = counted.Sub(now)
		}
		if l.Change = int64(l.Keys - before); n == 0 {
			l.Change = 0
		}
		l.Counted = time.Since(counted).Seconds()
		l.usage(st, ns)
		spent := uint64(0)
		l.Conns = 0
		for _, node := range st.GetNodeStats() {
			l.Conns += node.GetConnections()
			spent += node.GetDataPathCpuNanos()
		}
		if l.CPU = 0; n > 0 && spent > cpu {
			l.CPU = float64(spent-cpu) / float64(now.Sub(asked)) * 100
		}
		cpu, asked = spent, now
		l.Time = a.Now().UTC().Format(time.RFC3339)
		if a.JSON() {
			err = a.PrintJSON(l)
		} else {
			if n%20 == 0 && (n == 0 || ctl.IsTerminal(a.Stdout)) {
				fmt.Fprintf(a.Stdout, layoutText, "Keys", "Change", "Live", "Held", "Lost", "Free", "Used %", "Short",
					"Sessions", "Conns", "CPU %")
			}
			used, lost, short := l.Live+l.Held, "-", "-"
			if l.Lost != nil {
				used, lost, short = used+*l.Lost, units.Rounded(*l.Lost), overview.YesNo(*l.Short)
			}
			_, err = fmt.Fprintf(a.Stdout, layoutText, fmt.Sprint(l.Keys), fmt.Sprintf("%+d", l.Change),
				units.Rounded(l.Live), units.Rounded(l.Held), lost, units.Rounded(l.Free),
				overview.Percent(used, used+l.Free), short, fmt.Sprint(l.Sessions), fmt.Sprint(l.Conns),
				fmt.Sprintf("%.1f", l.CPU))
		}
		if err != nil {
			return err
		}
		if err := a.Flush(); err != nil {
			return err
		}
	}
	return nil
}

// usage fills in what the directory says of ns.
func (l *StatLine) usage(st *dirpb.StatusReply, ns *dirpb.Namespace) {
	l.Sessions = 0
	for _, s := range st.GetSessions() {
		if s.GetNamespace() == ns.GetName() && s.GetLife() == dirpb.SessionLife_SESSION_LIVE {
			l.Sessions++
		}
	}
	var m overview.Memory // of the namespace
	for _, x := range overview.Sums(overview.Memories(st)) {
		if x.Namespace == ns.GetName() {
			m = *x
		}
	}
	l.Held, l.Lost, l.Short = m.Granted-min(m.Granted, l.Live), nil, nil
	if m.Known {
		lost := min(m.Lost, l.Held) // Live is counted at another moment
		l.Held -= lost
		l.Lost, l.Short = &lost, &m.Short
	}
	heap := m.Heap
	if limit := ns.GetLimitBytes(); limit > 0 {
		heap = min(heap, limit)
	}
	l.Free = heap - min(heap, m.Granted)
}

// countKeys counts the slots that name records, and their places' bytes.
func countKeys(w *walker) (keys, bytes uint64, err error) {
	err = w.each(func(p *part) error {
		for _, s := range p.slots() {
			keys++
			bytes += uint64(s.Word.Units()) * layout.UnitSize
		}
		return nil
	})
	return keys, bytes, err
}
