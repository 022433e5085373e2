package gateway

import (
	"context"
	"math"
	"time"
)

const (
	// Clients try again after LOADING: by then they may find another gateway, and they know for certain that the
	// command was not performed.
	errStopping refusal = "LOADING kvd: the gateway is stopping; nothing was done"
	// A connection that has said nothing for quietTime is between two commands. While commands are
	// refused, which is for refuseTime, half of that will do.
	// drainTick is how often Drain looks.
	quietTime, refuseTime = 100 * time.Millisecond, time.Second
	drainTick             = 10 * time.Millisecond
)

// Drain lets clients finish before Close. Connections end once their clients are silent for a
// moment, between two commands; others, and new ones, are served as ever until ctx ends. Then
// every command is refused, which tells clients for certain that nothing happened, for a second
// or until nobody is left. A command that has been performed is answered in any case.
// It is called once, with Close after it. Listeners stay open meanwhile, since another gateway may not be there to be
// found; it returns once no connection is left.
func (g *Gateway) Drain(ctx context.Context) {
	tick := time.NewTicker(drainTick)
	defer tick.Stop()
	quiet := quietTime
	var refused <-chan time.Time
	done := ctx.Done()
	for g.srv.Conns() > 0 {
		g.finishQuiet(quiet)
		select {
		case <-tick.C:
		case <-done:
			done = nil
			g.stopping.Store(true)
			quiet /= 2
			refused = time.After(refuseTime)
		case <-refused:
			g.finishQuiet(-time.Hour)
			g.waitGone(refuseTime)
			return
		}
	}
}

func (g *Gateway) waitGone(patience time.Duration) {
	for until := time.Now().Add(patience); g.srv.Conns() > 0 && time.Now().Before(until); {
		time.Sleep(drainTick)
	}
}

// finishQuiet finishes the connections that have been silent for so long; negative: all.
// The swap of active is what makes it safe against a command that comes at this moment: either begin sees finished, or
// this sees that something is being performed, and leaves the connection for the next tick. Clients that wait in a
// blocking command are ended at once, since they may be silent for hours.
func (g *Gateway) finishQuiet(quiet time.Duration) {
	before := time.Now().Add(-quiet).UnixMilli()
	g.each(func(c *conn) {
		active := c.active.Load()
		silent := active > 0 && active <= before && c.half.Load() == 0
		if quiet < 0 || c.blocked.Load() != nil || silent && c.active.CompareAndSwap(active, finished) {
			c.finish()
		}
	})
}

// finish ends a connection when its client has been told of all that it has sent. A command that comes at this moment,
// or waited to be read on a busy machine so that its client only looked silent, is refused: if it were performed, the
// client would send another one, and that would meet a closed connection. Any goroutine may call it.
func (c *conn) finish() {
	c.finishing.Store(true)
	if c.finished.CompareAndSwap(false, true) {
		c.link.CloseRead()
		if x := c.blocked.Load(); x != nil {
			x.stop(endStop)
		}
	}
}

// finished is conn.active of a connection that ends because its client was silent.
const finished = math.MaxInt64

// begin says that a command is performed, which came at that time. If the client had just been found silent the command
// is refused: the client does not send another one, as it would if this were performed while Drain is about to close
// the connection.
func (c *conn) begin(came int64) {
	if c.active.Swap(-came) == finished {
		c.finishing.Store(true)
	}
}

// abs is for conn.active, whose sign says whether a command is being performed.
func abs(n int64) int64 { return max(n, -n) }
