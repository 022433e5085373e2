package gateway

import (
	"time"

	"github.com/kvd-project/kvd/internal/redis/admin"
	"github.com/kvd-project/kvd/internal/redis/resp"
	"github.com/kvd-project/kvd/internal/redis/spec"
)

// SlowCommand is an entry of the slow log.
type SlowCommand = admin.SlowCommand

// Slowest are the n entries of the slow log that took longest, the slowest first. It may be called concurrently.
func (g *Gateway) Slowest(n int) []*SlowCommand { return g.slow.Slowest(n) }

// logSlow logs a command of which the first of n arguments are given, all or more than an entry has.
// It is called after the command, by its connection's goroutine or loop.
func (c *conn) logSlow(cmd *command, args [][]byte, n int, took time.Duration) {
	c.mu.Lock()
	name := c.mu.name
	c.mu.Unlock()
	c.g.slow.Note(&cmd.Command, args, n, took, c.remote.String(), name)
}

// tookFrom is the time of the command whose replies are being written: that of the others, unless a part of it was read
// meanwhile.
func (b *batch) tookFrom(took time.Duration) time.Duration {
	if b.cur.late {
		return time.Since(b.start)
	}
	return took
}

// slowLogCommands tell what took long: SLOWLOG which commands, LATENCY how often.
func slowLogCommands() performers {
	of := func(f func(l *admin.Slow, w *resp.Writer, args [][]byte) error) connFunc {
		return func(c *conn, w *resp.Writer, args [][]byte) error { return f(&c.g.slow, w, args) }
	}
	return performers{
		spec.CmdSlowlogGet:       of((*admin.Slow).Get),
		spec.CmdSlowlogLen:       of((*admin.Slow).Len),
		spec.CmdSlowlogReset:     of((*admin.Slow).Reset),
		spec.CmdLatencyLatest:    of((*admin.Slow).Latest),
		spec.CmdLatencyHistory:   of((*admin.Slow).History),
		spec.CmdLatencyReset:     of((*admin.Slow).ResetLatency),
		spec.CmdLatencyGraph:     of((*admin.Slow).Graph),
		spec.CmdLatencyDoctor:    of((*admin.Slow).Doctor),
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
