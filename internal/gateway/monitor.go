package gateway

import (
	"net"

	"github.com/kvd-project/kvd/internal/redis/acl"
	"github.com/kvd-project/kvd/internal/redis/live"
	"github.com/kvd-project/kvd/internal/redis/resp"
	"github.com/kvd-project/kvd/internal/redis/spec"
)

// maxShownTogether bounds the lines of a transaction or a script, which are kept until it has taken effect; the rest of
// them is left out.
const maxShownTogether = 8 << 20

// cmdMonitor shows the connection the commands of this gateway's clients from now on.
// A command that is being performed by another connection at this moment may not be shown: batches look at heed when
// they begin.
func cmdMonitor(c *conn, w *resp.Writer, _ [][]byte) error {
	switch {
	case c.inTx.Load() >= 0:
		return refusal("ERR MONITOR isn't allowed for DENY BLOCKING client")
	case c.monitors.Load():
		return nil // without a reply, as in Redis
	}
	w.OK()
	c.out.cork() // the reply comes first
	c.g.monitors.Add(&c.listener, func() {
		c.monitors.Store(true)
		c.g.heed.Or(heedMonitor)
	})
	return nil
}

// stopMonitoring ends that.
// It may be called for any connection that ends, and costs the others nothing.
func (c *conn) stopMonitoring() {
	if !c.monitors.Load() {
		return
	}
	c.monitors.Store(false)
	c.g.monitors.Remove(&c.listener, func() { c.g.heed.And(^uint32(heedMonitor)) })
}

// dismissMonitors closes those whose users may not MONITOR any more; self is closed behind its reply.
func (g *Gateway) dismissMonitors(self *conn) {
	cmd := commandsByID[spec.CmdMonitor]
	g.monitors.Each(func(l *live.Listener) {
		c := l.Client.(ear).c
		r := c.user.Load().Rights()
		if why, _ := r.Check(&acl.Access{Command: int(cmd.ID)}); r.Unlimited() || why == acl.Allowed {
			return
		}
		if c == self {
			c.closing = true
		} else {
			c.link.Kill()
		}
	})
}

// show gives the monitors what lines appends to a buffer; see live.Monitors. It goes out with the connection's box.
func (c *conn) show(lines func(b []byte) []byte) {
	if c.monitors.Load() {
		c.out.cork() // behind the reply to the command
	}
	c.g.monitors.Show(&c.box, lines)
}

// showCommand shows a command that has been performed in a database, or is about to wait.
// n is how many arguments the command has, its name counted, of which args are the first.
func (c *conn) showCommand(cmd *command, args [][]byte, n, db int) {
	c.show(func(b []byte) []byte { return live.AppendCommand(b, c.monitoredAs(), &cmd.Command, args, n, db) })
}

// monitoredAs is where a connection comes from, in a line of MONITOR.
func (c *conn) monitoredAs() string {
	if a, ok := c.local.(*net.UnixAddr); ok {
		return "unix:" + a.Name
	}
	return c.remote.String()
}

// isShown reports whether MONITOR has a command at all: as in Redis, not those that administrate.
// AUTH is shown, without its password.
func (cmd *command) isShown() bool { return !cmd.Has(spec.FlagAdmin) }

// shows reports whether somebody is to be shown a command of the connection.
func (c *conn) shows(cmd *command) bool { return c.g.heed.Load()&heedMonitor != 0 && cmd.isShown() }

// shownLines are the lines of what is staged, as far as it has run. They are kept until it has taken effect, since it
// may run several times.
type shownLines struct {
	lines []byte // in MONITOR's form, one behind the other
	held  int64  // bytes of the share that stand for them
	full  bool   // there was no more memory for them
}

// add adds the line of a command of a client, or of a script: from is lua then.
// most is an upper bound of the line, so that it is written without growing. The lines of what never takes effect are
// shown, too: the commands were given.
func (s *shownLines) add(t *staged, from string, cmd *command, args [][]byte) {
	c := t.c
	if s.full || !c.shows(cmd) {
		return
	}
	most := 0
	for _, a := range args {
		most += len(`\xff`)*min(len(a), live.MaxShown) + len(`"(redacted)" `)
	}
	if n := len(s.lines) + min(most, len(`\xff`)*live.MaxShown) + 512; n > cap(s.lines) {
		n = max(n, min(2*cap(s.lines), maxShownTogether))
		if n > smallOutput {
			if s.full = n > maxShownTogether || !c.share.Try(int64(n)-s.held); s.full {
				return
			}
			s.held = int64(n)
		}
		s.lines = append(make([]byte, 0, n), s.lines...)
	}
	s.lines = live.AppendCommand(s.lines, from, &cmd.Command, args, len(args), t.DB)
}

// again forgets the lines: what is staged begins anew.
func (s *shownLines) again() { s.lines, s.full = s.lines[:0], false }

// tellMonitors shows what has been staged.
// It is called once, however it ended.
func (t *staged) tellMonitors() {
	if lines := t.shown.lines; len(lines) > 0 {
		t.c.show(func([]byte) []byte { return lines })
	}
	t.c.share.Drop(t.shown.held)
	t.shown = shownLines{}
}
