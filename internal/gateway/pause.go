package gateway

import (
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvd-project/kvd/internal/luascript"
	"github.com/kvd-project/kvd/internal/redis/resp"
	"github.com/kvd-project/kvd/internal/redis/spec"
	"github.com/kvd-project/kvd/internal/redis/values"
)

// These are bits of Gateway.heed, one for each reason to do more than to perform commands. There is nearly always none,
// so that a batch looks at one word.
const (
	heedPause   = 1 << iota // CLIENT PAUSE holds up commands
	heedMonitor             // somebody MONITORs
)

// pausing is CLIENT PAUSE. It holds up the commands of this gateway's clients, in the place where they would begin, and
// each on its connection's own goroutine, which goes when its client does.
type pausing struct {
	clients atomic.Int64 // whose commands are held up

	mu struct {
		sync.Mutex
		over  chan struct{} // closed when the pause ends; nil: there is none
		all   bool          // not only writes
		until time.Time     // when timer is to end it
		timer *time.Timer   // nil before the first pause
	}
}

// begin begins a pause, or makes the one that there is longer and stricter, as Redis does.
// over is closed when the pause ends, for whatever reason. A connection that has looked at heed just before goes on
// with its batch; awaitCommands waits for that.
func (p *pausing) begin(heed *atomic.Uint32, d time.Duration, all bool) (over <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	until := time.Now().Add(d)
	if p.mu.over == nil {
		p.mu.over, p.mu.all, p.mu.until = make(chan struct{}), all, until
		heed.Or(heedPause)
	} else {
		p.mu.all = p.mu.all || all
		if until.After(p.mu.until) {
			p.mu.until = until
		}
	}
	if p.mu.timer != nil {
		p.mu.timer.Stop()
	}
	p.mu.timer = time.AfterFunc(time.Until(p.mu.until), func() { p.endIfDue(heed) })
	return p.mu.over
}

// endIfDue ends the pause whose time is over; a timer that could not be stopped may come early.
func (p *pausing) endIfDue(heed *atomic.Uint32) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mu.over != nil && !time.Now().Before(p.mu.until) {
		p.endLocked(heed)
	}
}

func (p *pausing) end(heed *atomic.Uint32) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mu.over != nil {
		p.endLocked(heed)
	}
}

// endLocked ends the pause that there is. The bit is cleared before those that wait are let go, so that none of them
// finds it set for a pause that is over.
func (p *pausing) endLocked(heed *atomic.Uint32) {
	heed.And(^uint32(heedPause))
	p.mu.timer.Stop()
	close(p.mu.over)
	p.mu.over = nil
}

// now is the channel of the pause, which is closed when it ends; nil: there is none.
// The pause may end, and another one begin, by the time that its caller looks; so those that wait ask again.
func (p *pausing) now() (over <-chan struct{}, all bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.mu.over, p.mu.all
}

// word says which commands are held up: all, write or, if there is no pause, nothing.
func (p *pausing) word() string {
	switch over, all := p.now(); {
	case over == nil:
		return ""
	case all:
		return "all"
	}
	return "write"
}

// heldUntil is closed when the pause that holds up a command ends; nil: nothing holds it up.
// Clients that MONITOR are never held up: to Redis they are replicas.
func (c *conn) heldUntil(cmd *command, args [][]byte) <-chan struct{} {
	over, all := c.g.pausing.now()
	if over == nil || c.monitors.Load() || !all && !c.pausesWith(cmd, args) {
		return nil
	}
	return over
}

// pausesWith reports whether a command is one of those that write, or EXEC of one. A script or function with flags is
// what they say, and one without is what its command is, as is one that the gateway does not know.
func (c *conn) pausesWith(cmd *command, args [][]byte) bool {
	if cmd.ID == spec.CmdExec {
		return slices.ContainsFunc(c.tx.queue, func(q queued) bool { return c.pausesWith(q.cmd, q.args) })
	}
	if noWrites, says := c.scriptFlag(cmd, args); says {
		return !noWrites
	}
	return cmd.Has(spec.FlagWrite) || cmd.Is(spec.MayReplicate)
}

// scriptFlag is whether a command's script or function has the flag no-writes; says is false for commands and scripts
// without flags.
func (c *conn) scriptFlag(cmd *command, args [][]byte) (noWrites, says bool) {
	switch cmd.ID {
	case spec.CmdFcall, spec.CmdFcallRo:
		c.link.Waits()
		set, err := c.libraries(false)
		if err != nil {
			return false, false // it meets the error again
		}
		f := set.find(args[1])
		return f.library != nil && f.NoWrites(), f.library != nil
	case spec.CmdEval, spec.CmdEvalRo:
		return luascript.Flag(args[1])
	case spec.CmdEvalsha, spec.CmdEvalshaRo:
		if prog := c.g.scripts.cache.Find(args[1]); prog != nil {
			return prog.NoWrites, prog.NoWrites || prog.MayWrite
		}
	}
	return false, false
}

// awaitUnpause waits while a pause holds up a command, behind the replies to those before it. Afterwards the command
// begins anew, with the rights that its user has then. An error ends the connection. The command has not begun, so a
// client that goes away, or a gateway that stops, leaves nothing undecided. To CLIENT LIST and Drain such a client is
// one that is blocked.
func (c *conn) awaitUnpause(b *batch, cmd *command, args [][]byte) error {
	if c.heldUntil(cmd, args) == nil {
		return nil
	}
	if err := b.run(); err != nil {
		return err
	}
	if err := c.push(&b.w, 0); err != nil {
		return err
	}
	c.box.Flush()
	c.link.Waits()
	c.asked = false // what a loop has looked up is as of now
	x := &waiter{held: true, end: make(chan ending, 1), over: make(chan struct{})}
	c.blocked.Store(x)
	c.g.pausing.clients.Add(1)
	gone, stop := c.link.WatchPeer()
	defer func() {
		c.blocked.Store(nil)
		close(x.over)
		c.g.pausing.clients.Add(-1)
		stop()
		b.tick()
	}()
	for !c.finishing.Load() { // before the client was to be seen in CLIENT LIST
		over := c.heldUntil(cmd, args)
		if over == nil {
			return nil
		}
		select {
		case <-over:
		case <-x.end: // the gateway stops: the command is refused then
			return nil
		case <-gone:
			if !c.finishing.Load() {
				return errClosing
			}
		case <-c.g.ctx.Done():
			return errClosing
		}
	}
	return nil
}

// settleTick is how often awaitCommands looks, and settleTime how long.
const settleTick, settleTime = time.Millisecond, 5 * time.Second

// awaitCommands waits until the commands that were being performed when a pause began are over, so that what it holds
// up does not happen behind the reply to CLIENT PAUSE. A client that reads its replies slowly is waited for as long as
// a command at the most. Commands that wait for keys do not count, since they ask again before they take anything
// (performBlocking), nor do other CLIENT PAUSEs, of which two would wait for each other.
func (c *conn) awaitCommands(over <-chan struct{}) {
	type busy struct {
		*conn
		since int64 // its active
	}
	var all []busy
	c.settling.Store(true)
	defer c.settling.Store(false)
	c.g.each(func(x *conn) {
		if since := x.active.Load(); x != c && since < 0 {
			all = append(all, busy{x, since})
		}
	})
	late := time.After(settleTime)
	tick := time.NewTicker(settleTick)
	defer tick.Stop()
	for {
		all = slices.DeleteFunc(all, func(x busy) bool {
			return x.active.Load() != x.since || x.blocked.Load() != nil || x.settling.Load()
		})
		if len(all) == 0 {
			return
		}
		select {
		case <-tick.C:
		case <-over:
			return
		case <-late:
			c.g.o.Logger.Warn("CLIENT PAUSE did not wait for commands that take long", "commands", len(all))
			return
		case <-c.g.ctx.Done():
			return
		}
	}
}

// cmdClientPause holds up the commands of this gateway's clients for some time, all of them or those that write.
func cmdClientPause(c *conn, w *resp.Writer, args [][]byte) error {
	all := true
	p := values.OptionsOf(args[3:])
	switch {
	case len(args) > 4:
		return refusal("ERR unknown subcommand or wrong number of arguments for '" + values.Clip(args[1], 128) +
			"'. Try CLIENT HELP.")
	case p.Flag("write"):
		all = false
	case p.More() && !p.Flag("all"):
		return refusal("ERR CLIENT PAUSE mode must be WRITE or ALL")
	}
	ms, ok := resp.ParseInt(args[2])
	switch {
	case !ok:
		return refusal("ERR timeout is not an integer or out of range")
	case ms < 0:
		return refusal("ERR timeout is negative")
	}
	ms = min(ms, math.MaxInt64/int64(2*time.Millisecond)) // a hundred years
	c.awaitCommands(c.g.pausing.begin(&c.g.heed, time.Duration(ms)*time.Millisecond, all))
	w.OK()
	return nil
}

// cmdClientUnpause ends that. A pause of all commands holds up this one, too, as in Redis.
func cmdClientUnpause(c *conn, w *resp.Writer, _ [][]byte) error {
	c.g.pausing.end(&c.g.heed)
	w.OK()
	return nil
}
