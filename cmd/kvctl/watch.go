package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/overview"
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

// statLine is one line of stat; memory is in bytes.
type statLine struct {
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
	var l statLine
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
				used, lost, short = used+*l.Lost, ctl.BytesText(*l.Lost), ctl.YesNo(*l.Short)
			}
			_, err = fmt.Fprintf(a.Stdout, layoutText, fmt.Sprint(l.Keys), fmt.Sprintf("%+d", l.Change),
				ctl.BytesText(l.Live), ctl.BytesText(l.Held), lost, ctl.BytesText(l.Free),
				ctl.Percent(used, used+l.Free), short, fmt.Sprint(l.Sessions), fmt.Sprint(l.Conns),
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
func (l *statLine) usage(st *dirpb.StatusReply, ns *dirpb.Namespace) {
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

type latencyOptions struct {
	pause    time.Duration
	interval time.Duration
	history  bool
	duration time.Duration
	count    int
}

func (a *commands) latencyCommand() *cobra.Command {
	var o latencyOptions
	c := &cobra.Command{
		Use:   "latency [KEY]",
		Short: "Measure how long it takes to get a key, again and again",
		Long: "Get one key in a loop and print how long that took: from the first GET on, or with\n" +
			"--history a line for every interval. A key that is there is one round trip of two\n" +
			"READs, a missing one a round trip of one. It ends after --duration, after --count\n" +
			"GETs, or when it is interrupted; if stdout is no terminal, by default after 1s.",
		Args:              cobra.MaximumNArgs(1),
		ValidArgsFunction: a.CompleteKey(false),
		RunE: func(cmd *cobra.Command, args []string) error {
			switch {
			case o.pause < 0:
				return ctl.Usagef("--pause %v: want >= 0", o.pause)
			case o.interval < 10*time.Millisecond:
				return ctl.Usagef("--interval %v: want at least 10ms", o.interval)
			case o.duration < 0:
				return ctl.Usagef("--duration %v: want > 0", o.duration)
			case o.count < 0:
				return ctl.Usagef("--count %d: want > 0", o.count)
			}
			k := []byte("kvctl latency")
			if len(args) > 0 {
				var err error
				if k, err = a.Key(args[0]); err != nil {
					return err
				}
			}
			if o.duration == 0 && o.count == 0 && !ctl.IsTerminal(a.Stdout) {
				o.duration = time.Second
			}
			return a.With(cmd.Context(), ctl.SessionOptions{Lanes: 1, ReadOnly: true}, func(s ctl.Store) error {
				return a.latency(cmd.Context(), s, k, o)
			})
		},
	}
	f := c.Flags()
	f.DurationVar(&o.interval, "interval", 15*time.Second, "with --history: time that one line is about")
	f.BoolVar(&o.history, "history", false, "a line for every interval")
	f.DurationVar(&o.pause, "pause", 10*time.Millisecond, "time between two GETs")
	f.DurationVar(&o.duration, "duration", 0, "end after so long")
	f.IntVar(&o.count, "count", 0, "how many GETs to perform")
	return c
}

// latencyLine is what was measured in one interval; times are nanoseconds.
type latencyLine struct {
	Gets     int64   `json:"gets"`
	NotFound int64   `json:"not_found"` // of gets
	Errors   int64   `json:"errors"`    // not among gets
	Seconds  float64 `json:"seconds"`
	Min      int64   `json:"min_ns"`
	Avg      float64 `json:"avg_ns"`
	P50      int64   `json:"p50_ns"`
	P99      int64   `json:"p99_ns"`
	Max      int64   `json:"max_ns"`
}

// latencyMax is the longest time that is told apart.
const latencyMax = 10 * time.Minute

func (a *commands) latency(ctx context.Context, s ctl.Store, key []byte, o latencyOptions) error {
	tty := ctl.IsTerminal(a.Stdout) && !a.JSON()
	hist := hdrhistogram.New(1, int64(latencyMax), 3)
	var l latencyLine
	var failed error
	begin := time.Now()
	since, shown := begin, begin
	if !a.JSON() {
		fmt.Fprintf(a.Stdout, latencyText, "GETs", "Min", "Avg", "P50", "P99", "Max", "Missing", "Errors")
	}
	end := time.Time{}
	if o.duration > 0 {
		end = begin.Add(o.duration)
	}
	for n := 0; o.count == 0 || n < o.count; n++ {
		if n > 0 && !ctl.Pause(ctx, o.pause) {
			break
		}
		start := time.Now()
		if !end.IsZero() && !start.Before(end) {
			break
		}
		_, err := s.Get(ctx, key)
		now := time.Now()
		missing := errors.Is(err, client.ErrNotFound)
		switch {
		case ctx.Err() != nil:
		case err != nil && !missing:
			l.Errors++
			failed = err
		default:
			l.Gets++
			if missing {
				l.NotFound++
			}
			_ = hist.RecordValue(min(int64(now.Sub(start)), int64(latencyMax)))
		}
		if ctx.Err() != nil {
			break
		}
		l.Seconds = now.Sub(since).Seconds()
		switch {
		case o.history && now.Sub(since) >= o.interval:
			if err := a.printLatency(&l, hist, "\n"); err != nil {
				return err
			}
			hist.Reset()
			l, since, shown = latencyLine{}, now, now
		case tty && now.Sub(shown) >= 100*time.Millisecond:
			shown = now
			if err := a.printLatency(&l, hist, ""); err != nil {
				return err
			}
		}
	}
	if l.Gets+l.Errors > 0 {
		if err := a.printLatency(&l, hist, "\n"); err != nil {
			return err
		}
	}
	if failed != nil {
		return a.About(key, failed)
	}
	return nil
}

const latencyText = "%10s %10s %10s %10s %10s %10s %8s %7s\n"

// printLatency prints l over what a terminal shows of it; end is empty if it is to
// be printed over, too.
func (a *commands) printLatency(l *latencyLine, h *hdrhistogram.Histogram, end string) error {
	if l.Gets > 0 {
		l.Min, l.Avg, l.P50, l.P99, l.Max = h.Min(), h.Mean(), h.ValueAtQuantile(50), h.ValueAtQuantile(99), h.Max()
	}
	if a.JSON() {
		if err := a.PrintJSON(l); err != nil {
			return err
		}
		return a.Flush()
	}
	if ctl.IsTerminal(a.Stdout) {
		fmt.Fprint(a.Stdout, "\r\x1b[K")
	}
	us := func(ns float64) string { return fmt.Sprintf("%.1f µs", math.Round(ns/100)/10) }
	line := fmt.Sprintf(latencyText, fmt.Sprint(l.Gets), us(float64(l.Min)), us(l.Avg), us(float64(l.P50)),
		us(float64(l.P99)), us(float64(l.Max)),
		fmt.Sprint(l.NotFound), fmt.Sprint(l.Errors))
	fmt.Fprint(a.Stdout, line[:len(line)-1]+end)
	return a.Flush()
}
