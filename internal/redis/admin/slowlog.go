package admin

import (
	"cmp"
	"math"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvd-project/kvd/internal/redis/resp"
	"github.com/kvd-project/kvd/internal/redis/spec"
	"github.com/kvd-project/kvd/internal/redis/values"
)

const (
	// MaxSlowArgs is how many arguments an entry has at most, as in Redis.
	MaxSlowArgs = 32
	maxSlowArg  = 128 // and bytes of each
	// maxSlowBytes bounds the entries together, by what they take about; the oldest go. It is beside Options.Budget,
	// since the log is wanted when that is used up.
	maxSlowBytes = 4 << 20
	// slowOverhead is about what an entry takes besides its arguments, and each of them besides its bytes.
	slowOverhead, slowArgOverhead = 256, 16
)

// Slow is what SLOWLOG and LATENCY tell: the last commands that took long, and how often some did. A command that is
// neither costs a comparison. Its methods may be called concurrently. Times are compared in ns, as atomics, so that a
// command which is not slow takes no lock. The zero value logs every command, and keeps none.
type Slow struct {
	// ns that a command takes at least, for the log or for LATENCY; math.MaxInt64: there is no such time
	from atomic.Int64
	// logFrom is from for the log alone, and latency is latency-monitor-threshold in ms, 0: it is off.
	logFrom, latency atomic.Int64

	mu struct {
		sync.Mutex
		micros  int64          // slowlog-log-slower-than, -1: log none
		maxLen  int64          // slowlog-max-len
		entries []*SlowCommand // the oldest first
		bytes   int            // of entries
		nextID  int64          // of SLOWLOG GET; it never goes back
	}

	latencies latencies
}

// SlowCommand is a command as SLOWLOG GET shows it. It does not change.
type SlowCommand struct {
	ID         int64     // from 0 on
	At         time.Time // when it was over
	Took       time.Duration
	Args       []string // the command and its arguments, cut, without secrets
	Peer, Name string   // of its connection: its address, and the name it gave itself
	bytes      int      // what it counts for maxSlowBytes
}

// SetTime is CONFIG SET slowlog-log-slower-than.
// A time that does not fit in ns is never reached; 0 logs every command.
func (l *Slow) SetTime(micros int64) {
	from := int64(math.MaxInt64)
	if micros >= 0 && micros <= math.MaxInt64/1000 {
		from = micros * 1000
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.micros = micros
	l.logFrom.Store(from)
	l.setFromLocked()
}

// SetLatency is CONFIG SET latency-monitor-threshold.
// 0 turns the latency monitor off; negative values do not come here.
func (l *Slow) SetLatency(ms int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.latency.Store(ms)
	l.setFromLocked()
}

// setFromLocked makes from the lesser of the two times.
func (l *Slow) setFromLocked() {
	from := l.logFrom.Load()
	if ms := l.latency.Load(); ms > 0 && ms <= math.MaxInt64/int64(time.Millisecond) {
		from = min(from, ms*int64(time.Millisecond))
	}
	l.from.Store(from)
}

// LatencyFrom is latency-monitor-threshold.
func (l *Slow) LatencyFrom() int64 { return l.latency.Load() }

// SetLen is CONFIG SET slowlog-max-len; what is too much goes at once.
func (l *Slow) SetLen(n int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.maxLen = n
	l.trimLocked()
}

func (l *Slow) Settings() (micros, maxLen int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.mu.micros, l.mu.maxLen
}

// Notes reports whether a command that took so long belongs into the log, or concerns LATENCY.
func (l *Slow) Notes(took time.Duration) bool { return int64(took) >= l.from.Load() }

func (l *Slow) logs(took time.Duration) bool { return int64(took) >= l.logFrom.Load() }

// add logs a command, and gives it its number.
// e is the log's from here on, and does not change any more.
func (l *Slow) add(e *SlowCommand) {
	e.bytes = slowOverhead + len(e.Peer) + len(e.Name)
	for _, a := range e.Args {
		e.bytes += slowArgOverhead + len(a)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	e.ID = l.mu.nextID
	l.mu.nextID++
	l.mu.entries = append(l.mu.entries, e)
	l.mu.bytes += e.bytes
	l.trimLocked()
}

// trimLocked lets the oldest entries go until both bounds hold. The array moves on with its start, and append makes a
// new one in time.
func (l *Slow) trimLocked() {
	all := l.mu.entries
	for len(all) > 0 && (int64(len(all)) > l.mu.maxLen || l.mu.bytes > maxSlowBytes) {
		l.mu.bytes -= all[0].bytes
		all[0] = nil
		all = all[1:]
	}
	l.mu.entries = all
}

// Newest are the last n entries, the newest first; -1: all. They do not change.
func (l *Slow) Newest(n int64) []*SlowCommand {
	l.mu.Lock()
	defer l.mu.Unlock()
	all := l.mu.entries
	if n >= 0 {
		all = all[max(0, int64(len(all))-n):]
	}
	all = slices.Clone(all)
	slices.Reverse(all)
	return all
}

// Slowest are the n entries that took longest, the slowest first.
func (l *Slow) Slowest(n int) []*SlowCommand {
	all := l.Newest(-1)
	slices.SortStableFunc(all, func(a, b *SlowCommand) int { return cmp.Compare(b.Took, a.Took) })
	return all[:min(n, len(all))]
}

// Size is how many entries there are, and what they take.
// bytes is what maxSlowBytes bounds.
func (l *Slow) Size() (n, bytes int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.mu.entries), l.mu.bytes
}

// Logged is how many commands have been entries.
func (l *Slow) Logged() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.mu.nextID
}

// reset forgets the entries. Numbers go on.
func (l *Slow) reset() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.entries, l.mu.bytes = nil, 0
}

// Note logs a command for which Notes is true, for SLOWLOG and for LATENCY. The first of its n arguments are given, all
// or MaxSlowArgs of them. They are copied, cut and without secrets. peer and name are of its connection.
func (l *Slow) Note(cmd *spec.Command, args [][]byte, n int, took time.Duration, peer, name string) {
	l.noteLatency(cmd, took)
	if l.logs(took) {
		l.add(&SlowCommand{At: time.Now(), Took: took, Args: slowArgs(cmd, args, n), Peer: peer, Name: name})
	}
}

// slowArgs are copies of a command's n arguments as Redis cuts them, without what is secret.
// args may be fewer than n if that is more than an entry has.
func slowArgs(cmd *spec.Command, args [][]byte, n int) []string {
	out := make([]string, 0, min(len(args), MaxSlowArgs))
	for i, a := range args {
		switch {
		case n > MaxSlowArgs && i == MaxSlowArgs-1:
			return append(out, "... ("+strconv.Itoa(n-i)+" more arguments)")
		case cmd.Secret.Hides(args, i, values.Fold):
			out = append(out, "(redacted)")
		case len(a) > maxSlowArg:
			out = append(out, string(a[:maxSlowArg])+"... ("+strconv.Itoa(len(a)-maxSlowArg)+" more bytes)")
		default:
			out = append(out, string(a))
		}
	}
	return out
}

// Get is SLOWLOG GET: it shows the newest entries, ten of them unless told otherwise.
func (l *Slow) Get(w *resp.Writer, args [][]byte) error {
	n := int64(10)
	if len(args) > 3 {
		return refusal("ERR unknown subcommand or wrong number of arguments for '" + values.Clip(args[1], 128) +
			"'. Try SLOWLOG HELP.")
	}
	if len(args) == 3 {
		var ok bool
		if n, ok = resp.ParseInt(args[2]); !ok || n < -1 {
			return refusal("ERR count should be greater than or equal to -1")
		}
	}
	all := l.Newest(n)
	w.Array(len(all))
	for _, e := range all {
		w.Array(6)
		w.Int(e.ID)
		w.Int(e.At.Unix())
		w.Int(e.Took.Microseconds())
		w.Array(len(e.Args))
		for _, a := range e.Args {
			w.BulkString(a)
		}
		w.BulkString(e.Peer)
		w.BulkString(e.Name)
	}
	return nil
}

// Len is SLOWLOG LEN. It may be below slowlog-max-len even if more commands were slow: maxSlowBytes bounds the entries,
// too.
func (l *Slow) Len(w *resp.Writer, _ [][]byte) error {
	n, _ := l.Size()
	w.Int(int64(n))
	return nil
}

// Reset is SLOWLOG RESET.
func (l *Slow) Reset(w *resp.Writer, _ [][]byte) error {
	l.reset()
	w.OK()
	return nil
}
