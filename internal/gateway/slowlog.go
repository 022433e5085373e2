package gateway

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
	// As in Redis, an entry has so many arguments at most, and each of them so many bytes.
	maxSlowArgs, maxSlowArg = 32, 128
	// maxSlowBytes bounds the entries together, by what they take about; the oldest go. It is beside Options.Budget,
	// since the log is wanted when that is used up.
	maxSlowBytes = 4 << 20
	// slowOverhead is about what an entry takes besides its arguments, and each of them besides its bytes.
	slowOverhead, slowArgOverhead = 256, 16
)

// slowLog is what SLOWLOG tells: the last commands that took long. Its time is that of the metric
// kvd_gateway_command_seconds, which has been taken anyway, so a command that is none of them costs a comparison.
// Commands that were refused, or queued by MULTI, are none, nor are those that scripts call. Its methods may be called
// concurrently. Times are compared in ns, as atomics, so that a command which is not slow takes no lock.
type slowLog struct {
	// ns that a command takes at least, for the log or for LATENCY; math.MaxInt64: there is no such time
	from atomic.Int64
	// logFrom is from for the log alone, and latency is latency-monitor-threshold in ms, 0: it is off.
	logFrom, latency atomic.Int64

	mu struct {
		sync.Mutex
		micros  int64        // slowlog-log-slower-than, -1: log none
		maxLen  int64        // slowlog-max-len
		entries []*slowEntry // the oldest first
		bytes   int          // of entries
		nextID  int64        // of SLOWLOG GET; it never goes back
	}
}

// slowEntry is a command as SLOWLOG GET shows it.
type slowEntry struct {
	id         int64
	at         time.Time // when the command was over
	took       time.Duration
	args       []string // cut, and without secrets
	peer, name string   // of the connection
	bytes      int      // what it counts for maxSlowBytes
}

// setTime is CONFIG SET slowlog-log-slower-than.
// A time that does not fit in ns is never reached; 0 logs every command.
func (l *slowLog) setTime(micros int64) {
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

// setLatency is CONFIG SET latency-monitor-threshold.
// 0 turns the latency monitor off; negative values do not come here.
func (l *slowLog) setLatency(ms int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.latency.Store(ms)
	l.setFromLocked()
}

// setFromLocked makes from the lesser of the two times.
func (l *slowLog) setFromLocked() {
	from := l.logFrom.Load()
	if ms := l.latency.Load(); ms > 0 && ms <= math.MaxInt64/int64(time.Millisecond) {
		from = min(from, ms*int64(time.Millisecond))
	}
	l.from.Store(from)
}

// latencyFrom is latency-monitor-threshold.
func (l *slowLog) latencyFrom() int64 { return l.latency.Load() }

// setLen is CONFIG SET slowlog-max-len; what is too much goes at once.
func (l *slowLog) setLen(n int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.maxLen = n
	l.trimLocked()
}

func (l *slowLog) settings() (micros, maxLen int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.mu.micros, l.mu.maxLen
}

// notes reports whether a command that took so long belongs into the log, or concerns LATENCY.
func (l *slowLog) notes(took time.Duration) bool { return int64(took) >= l.from.Load() }

func (l *slowLog) logs(took time.Duration) bool { return int64(took) >= l.logFrom.Load() }

// add logs a command, and gives it its number.
// e is the log's from here on, and does not change any more.
func (l *slowLog) add(e *slowEntry) {
	e.bytes = slowOverhead + len(e.peer) + len(e.name)
	for _, a := range e.args {
		e.bytes += slowArgOverhead + len(a)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	e.id = l.mu.nextID
	l.mu.nextID++
	l.mu.entries = append(l.mu.entries, e)
	l.mu.bytes += e.bytes
	l.trimLocked()
}

// trimLocked lets the oldest entries go until both bounds hold. The array moves on with its start, and append makes a
// new one in time.
func (l *slowLog) trimLocked() {
	all := l.mu.entries
	for len(all) > 0 && (int64(len(all)) > l.mu.maxLen || l.mu.bytes > maxSlowBytes) {
		l.mu.bytes -= all[0].bytes
		all[0] = nil
		all = all[1:]
	}
	l.mu.entries = all
}

// newest are the last n entries, the newest first; -1: all. They do not change.
func (l *slowLog) newest(n int64) []*slowEntry {
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

// SlowCommand is an entry of the slow log.
type SlowCommand struct {
	At         time.Time // when it was over
	Took       time.Duration
	Args       []string // the command and its arguments, cut as in SLOWLOG GET, without secrets
	Peer, Name string   // of its connection: its address, and the name it gave itself
}

// Slowest are the n entries of the slow log that took longest, the slowest first. It may be called concurrently.
func (g *Gateway) Slowest(n int) []SlowCommand {
	all := g.slow.newest(-1)
	slices.SortStableFunc(all, func(a, b *slowEntry) int { return cmp.Compare(b.took, a.took) })
	var out []SlowCommand
	for _, e := range all[:min(n, len(all))] {
		out = append(out, SlowCommand{e.at, e.took, e.args, e.peer, e.name})
	}
	return out
}

// size is how many entries there are, and what they take.
// bytes is what maxSlowBytes bounds.
func (l *slowLog) size() (n, bytes int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.mu.entries), l.mu.bytes
}

// logged is how many commands have been entries.
func (l *slowLog) logged() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.mu.nextID
}

// reset forgets the entries. Numbers go on.
func (l *slowLog) reset() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.entries, l.mu.bytes = nil, 0
}

// logSlow logs a command of which the first of n arguments are given, all or more than an entry has.
// The arguments are copied, cut and without secrets. It is called after the command, by its connection's goroutine or
// loop.
func (c *conn) logSlow(cmd *command, args [][]byte, n int, took time.Duration) {
	c.g.noteLatency(cmd, took)
	if !c.g.slow.logs(took) {
		return
	}
	c.mu.Lock()
	name := c.mu.name
	c.mu.Unlock()
	c.g.slow.add(&slowEntry{at: time.Now(), took: took, args: slowArgs(cmd, args, n), peer: c.remote.String(),
		name: name})
}

// tookFrom is the time of the command whose replies are being written: that of the others, unless a part of it was read
// meanwhile.
func (b *batch) tookFrom(took time.Duration) time.Duration {
	if b.cur.late {
		return time.Since(b.start)
	}
	return took
}

// slowArgs are copies of a command's n arguments as Redis cuts them, without what is secret.
// args may be fewer than n if that is more than an entry has.
func slowArgs(cmd *command, args [][]byte, n int) []string {
	out := make([]string, 0, min(len(args), maxSlowArgs))
	for i, a := range args {
		switch {
		case n > maxSlowArgs && i == maxSlowArgs-1:
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

// cmdSlowLogGet shows the newest entries, ten of them unless told otherwise.
func cmdSlowLogGet(c *conn, w *resp.Writer, args [][]byte) error {
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
	all := c.g.slow.newest(n)
	w.Array(len(all))
	for _, e := range all {
		w.Array(6)
		w.Int(e.id)
		w.Int(e.at.Unix())
		w.Int(e.took.Microseconds())
		w.Array(len(e.args))
		for _, a := range e.args {
			w.BulkString(a)
		}
		w.BulkString(e.peer)
		w.BulkString(e.name)
	}
	return nil
}

// cmdSlowLogLen may be below slowlog-max-len even if more commands were slow: maxSlowBytes bounds the entries, too.
func cmdSlowLogLen(c *conn, w *resp.Writer, _ [][]byte) error {
	n, _ := c.g.slow.size()
	w.Int(int64(n))
	return nil
}

func cmdSlowLogReset(c *conn, w *resp.Writer, _ [][]byte) error {
	c.g.slow.reset()
	w.OK()
	return nil
}

// slowLogCommands tell what took long: SLOWLOG which commands, LATENCY how often.
func slowLogCommands() performers {
	return performers{
		spec.CmdSlowlogGet:       cmdSlowLogGet,
		spec.CmdSlowlogLen:       cmdSlowLogLen,
		spec.CmdSlowlogReset:     cmdSlowLogReset,
		spec.CmdLatencyLatest:    cmdLatencyLatest,
		spec.CmdLatencyHistory:   cmdLatencyHistory,
		spec.CmdLatencyReset:     cmdLatencyReset,
		spec.CmdLatencyGraph:     cmdLatencyGraph,
		spec.CmdLatencyDoctor:    cmdLatencyDoctor,
		spec.CmdLatencyHistogram: cmdLatencyHistogram,
	}
}

// cmdLatencyHistogram shows the buckets of the metrics, those that count anything, and leaves out commands that
// were never called or are none. Failed calls are counted, too. The last bucket is of all that took more than the one
// before. Buckets are cumulative, as in Redis, whose own are powers of two as well.
func cmdLatencyHistogram(c *conn, w *resp.Writer, args [][]byte) error {
	list := commandsByID
	if len(args) > 2 {
		list = nil
		for _, a := range args[2:] {
			if cmd := named(a); cmd != nil {
				list = append(append(list, cmd), sortedSubs(cmd)...)
			}
		}
	}
	type row struct {
		name    string
		buckets [][2]int64 // µs, and calls that took no longer
	}
	var rows []row
	for _, cmd := range list {
		s := &c.g.m.commands[cmd.ID]
		r, n := row{name: cmd.Name}, int64(0)
		for i := range s.buckets {
			if k := int64(s.buckets[i].Load()); k > 0 {
				n += k
				r.buckets = append(r.buckets, [2]int64{1 << i, n})
			}
		}
		if n > 0 {
			rows = append(rows, r)
		}
	}
	w.Map(len(rows))
	for _, r := range rows {
		w.BulkString(r.name)
		w.Map(2)
		w.BulkString("calls")
		w.Int(r.buckets[len(r.buckets)-1][1])
		w.BulkString("histogram_usec")
		w.Map(len(r.buckets))
		for _, b := range r.buckets {
			w.Int(b[0])
			w.Int(b[1])
		}
	}
	return nil
}
