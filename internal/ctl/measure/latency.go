package measure

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
)

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

// LatencyLine is what was measured in one interval; times are nanoseconds.
type LatencyLine struct {
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
	var l LatencyLine
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
			l, since, shown = LatencyLine{}, now, now
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
func (a *commands) printLatency(l *LatencyLine, h *hdrhistogram.Histogram, end string) error {
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
