package admin

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/kvd-project/kvd/internal/redis/resp"
	"github.com/kvd-project/kvd/internal/redis/spec"
	"github.com/kvd-project/kvd/internal/redis/values"
)

// latencySamples is how many seconds of an event Redis keeps at most.
const latencySamples = 160

// The events that a gateway has: those of Redis that are about commands. It forks nothing, and does not expire or
// evict.
const (
	slowCommand = iota
	fastCommand
	numLatencies
)

var latencyNames = [numLatencies]string{"command", "fast-command"}

// latencies are what LATENCY tells: for each second in which commands took latency-monitor-threshold or longer, the
// longest of them. They are noted together with the slow log, so a command that is in neither costs one comparison. The
// methods may be called concurrently.
type latencies struct {
	mu struct {
		sync.Mutex
		events [numLatencies]latencyEvent
	}
}

// latencyEvent is one of them. max is 0 if there were none since it was reset.
type latencyEvent struct {
	samples []latencySample // the oldest first
	max     int64           // ms
}

// latencySample is the longest time of a second, which is in Unix time.
type latencySample struct{ second, ms int64 }

// add notes that something took so many milliseconds.
// The oldest sample goes when there are latencySamples.
func (l *latencies) add(event int, now time.Time, ms int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := &l.mu.events[event]
	e.max = max(e.max, ms)
	if n := len(e.samples); n > 0 && e.samples[n-1].second == now.Unix() {
		e.samples[n-1].ms = max(e.samples[n-1].ms, ms)
		return
	}
	if len(e.samples) == latencySamples {
		e.samples = slices.Delete(e.samples, 0, 1)
	}
	e.samples = append(e.samples, latencySample{now.Unix(), ms})
}

// find is a copy of an event, by its name in any case; false: there is none, or nothing of it.
func (l *latencies) find(name []byte) (e latencyEvent, ok bool) {
	for i, s := range latencyNames {
		if string(name) == s {
			e = l.event(i)
		}
	}
	return e, len(e.samples) > 0
}

// event is a copy, which does not change any more.
func (l *latencies) event(i int) latencyEvent {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.mu.events[i]
	e.samples = slices.Clone(e.samples)
	return e
}

// reset forgets the events of these names, or all, and counts them.
func (l *latencies) reset(names [][]byte) (n int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := range l.mu.events {
		e := &l.mu.events[i]
		named := len(names) == 0 || slices.ContainsFunc(names, func(b []byte) bool {
			return string(b) == latencyNames[i]
		})
		if named && len(e.samples) > 0 {
			*e = latencyEvent{}
			n++
		}
	}
	return n
}

// noteLatency notes that a command took long, if it is long enough for that.
func (l *Slow) noteLatency(cmd *spec.Command, took time.Duration) {
	from := l.LatencyFrom()
	if from == 0 || took.Milliseconds() < from {
		return
	}
	event := slowCommand
	if cmd.Has(spec.FlagFast) {
		event = fastCommand
	}
	l.latencies.add(event, time.Now(), took.Milliseconds())
}

// Latest is LATENCY LATEST. It leaves out events that have not happened, as Redis does.
func (l *Slow) Latest(w *resp.Writer, _ [][]byte) error {
	type event struct {
		name string
		latencyEvent
	}
	var all []event
	for i, name := range latencyNames {
		if e := l.latencies.event(i); len(e.samples) > 0 {
			all = append(all, event{name, e})
		}
	}
	w.Array(len(all))
	for _, e := range all {
		last := e.samples[len(e.samples)-1]
		w.Array(4)
		w.BulkString(e.name)
		w.Int(last.second)
		w.Int(last.ms)
		w.Int(e.max)
	}
	return nil
}

// History is LATENCY HISTORY. An event that does not exist has none: an empty array, and no error, as in Redis.
func (l *Slow) History(w *resp.Writer, args [][]byte) error {
	e, _ := l.latencies.find(args[2])
	w.Array(len(e.samples))
	for _, s := range e.samples {
		w.Array(2)
		w.Int(s.second)
		w.Int(s.ms)
	}
	return nil
}

// ResetLatency is LATENCY RESET.
func (l *Slow) ResetLatency(w *resp.Writer, args [][]byte) error {
	w.Int(l.latencies.reset(args[2:]))
	return nil
}

// Graph is LATENCY GRAPH.
func (l *Slow) Graph(w *resp.Writer, args [][]byte) error {
	e, ok := l.latencies.find(args[2])
	if !ok {
		return refusal("ERR No samples available for event '" + values.Clip(args[2], 128) + "'")
	}
	w.Verbatim("txt", e.graph(string(args[2]), time.Now().Unix()))
	return nil
}

// graph draws the samples as Redis does (sparkline.c): a column each, and below it how long ago that was.
// There must be samples. now is in Unix seconds.
func (e *latencyEvent) graph(name string, now int64) string {
	const columns, rows, width = 80, 4, 3 // width: the shades of a character
	low, high := e.samples[0].ms, e.samples[0].ms
	for _, s := range e.samples {
		low, high = min(low, s.ms), max(high, s.ms)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%s - high %d ms, low %d ms (all time high %d ms)\n%s\n", name, high, low, e.max,
		strings.Repeat("-", columns))
	span := max(high-low, 1)
	first := true
	// A row of text shows three heights by its characters, so a column has rows*width of them. Below it stands its
	// label, from top to bottom.
	for part := range slices.Chunk(e.samples, columns) {
		if !first {
			b.WriteByte('\n')
		}
		first = false
		labels, most := make([]string, len(part)), 0
		for i, s := range part {
			labels[i] = ago(now - s.second)
			most = max(most, len(labels[i]))
		}
		for row := range rows + 1 + most {
			line := []byte(strings.Repeat(" ", len(part)))
			for i, s := range part {
				at := int(min((s.ms-low)*rows*width/span, rows*width-1)) - (rows-row-1)*width
				switch label := row - rows - 1; {
				case row < rows && at >= width:
					line[i] = '|'
				case row < rows && at >= 0:
					line[i] = "_o#"[at]
				case label >= 0 && label < len(labels[i]):
					line[i] = labels[i][label]
				}
			}
			b.Write(append(line, '\n'))
		}
	}
	return b.String()
}

// ago is a number of seconds in the unit that makes it short.
func ago(s int64) string {
	switch {
	case s < 60:
		return fmt.Sprintf("%ds", s)
	case s < 3600:
		return fmt.Sprintf("%dm", s/60)
	case s < 24*3600:
		return fmt.Sprintf("%dh", s/3600)
	}
	return fmt.Sprintf("%dd", s/(24*3600))
}

// Doctor is LATENCY DOCTOR. It sums up the events in words.
func (l *Slow) Doctor(w *resp.Writer, _ [][]byte) error {
	var b strings.Builder
	n := 0
	for i, name := range latencyNames {
		e := l.latencies.event(i)
		if len(e.samples) == 0 {
			continue
		}
		n++
		mean, deviation, period := e.summary(time.Now().Unix())
		fmt.Fprintf(&b, "%d. %s: %d latency spikes (average %dms, mean deviation %dms, period %.2f sec). Worst all "+
			"time event %dms.\n",
			n, name, len(e.samples), mean, deviation, period, e.max)
	}
	micros, _ := l.Settings()
	switch {
	case n > 0 && micros < 0:
		b.WriteString("\nSLOWLOG is off: CONFIG SET slowlog-log-slower-than <microseconds> has it tell which " +
			"commands these are.\n")
	case n > 0:
		fmt.Fprintf(&b, "\nSLOWLOG GET tells which commands took more than %d microseconds. Commands wait for the "+
			"store: kvctl status and kvctl doctor tell how that is.\n", micros)
	case l.LatencyFrom() == 0:
		b.WriteString("The latency monitor is off: CONFIG SET latency-monitor-threshold <milliseconds> turns it " +
			"on.\nHow long all commands take is in the metric kvd_gateway_command_seconds.\n")
	default:
		b.WriteString("No command has taken so long.\n")
	}
	w.Verbatim("txt", b.String())
	return nil
}

// summary is the mean of the samples and of their distances from it, and the mean time between two of them in seconds.
// There must be samples. Times are in ms, and the mean is rounded towards 0 before the distances are taken, as Redis
// does it.
func (e *latencyEvent) summary(now int64) (mean, deviation int64, period float64) {
	n := float64(len(e.samples))
	sum, off := 0.0, 0.0
	for _, s := range e.samples {
		sum += float64(s.ms)
	}
	for _, s := range e.samples {
		off += math.Abs(float64(s.ms) - math.Trunc(sum/n))
	}
	return int64(sum / n), int64(off / n), float64(now-e.samples[0].second) / n
}
