package gateway

import (
	"fmt"
	"net"
	"strconv"
	"sync"
	"time"

	"github.com/kvd-project/kvd/internal/redis/acl"
	"github.com/kvd-project/kvd/internal/redis/resp"
	"github.com/kvd-project/kvd/internal/redis/spec"
	"github.com/kvd-project/kvd/internal/redis/values"
)

const (
	// maxShown bounds the line that MONITOR has of a command: what is longer is cut, as in the slow log.
	maxShown = 1 << 20
	// maxShownTogether bounds the lines of a transaction or a script, which are kept until it has taken effect; the
	// rest of them is left out.
	maxShownTogether = 8 << 20
)

// monitors are the connections that MONITOR. Their unread lines are bounded as messages of publish/subscribe are.
// Lock order: monitors before an output.
type monitors struct {
	sync.Mutex
	conns map[*conn]struct{} // that MONITOR
	line  []byte             // of one command at a time, so that the lines of many long ones take no memory
}

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
	m := &c.g.monitors
	m.Lock()
	defer m.Unlock()
	if m.conns == nil {
		m.conns = make(map[*conn]struct{})
	}
	m.conns[c] = struct{}{}
	c.monitors.Store(true)
	c.g.heed.Or(heedMonitor)
	return nil
}

// stopMonitoring ends that.
// It may be called for any connection that ends, and costs the others nothing.
func (c *conn) stopMonitoring() {
	if !c.monitors.Load() {
		return
	}
	m := &c.g.monitors
	m.Lock()
	defer m.Unlock()
	delete(m.conns, c)
	c.monitors.Store(false)
	if len(m.conns) == 0 {
		c.g.heed.And(^uint32(heedMonitor))
	}
}

func (m *monitors) count() int {
	m.Lock()
	defer m.Unlock()
	return len(m.conns)
}

// dismissMonitors closes those whose users may not MONITOR any more; self is closed behind its reply.
func (g *Gateway) dismissMonitors(self *conn) {
	cmd := commandsByID[spec.CmdMonitor]
	g.monitors.Lock()
	defer g.monitors.Unlock()
	for c := range g.monitors.conns {
		r := c.user.Load().Rights()
		if why, _ := r.Check(&acl.Access{Command: int(cmd.ID)}); r.Unlimited() || why == acl.Allowed {
			continue
		}
		if c == self {
			c.closing = true
		} else {
			c.link.Kill()
		}
	}
}

// show gives the monitors what lines appends to a buffer, which is theirs then. They go out with the connection's box.
// lines is called with the lock held, and must not wait. Lines of several connections are in the order in which they
// came here, which is about that in which the commands took effect, and need not be it.
func (c *conn) show(lines func(b []byte) []byte) {
	if c.monitors.Load() {
		c.out.cork() // behind the reply to the command
	}
	m := &c.g.monitors
	m.Lock()
	defer m.Unlock()
	all := lines(m.line[:0])
	for x := range m.conns {
		x.out.Push(&c.box, all)
	}
	if cap(all) <= keepReply {
		m.line = all
	}
}

// showCommand shows a command that has been performed in a database, or is about to wait.
// n is how many arguments the command has, its name counted, of which args are the first.
func (c *conn) showCommand(cmd *command, args [][]byte, n, db int) {
	c.show(func(b []byte) []byte { return appendShown(b, c.monitoredAs(), cmd, args, n, db) })
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

// appendShown appends the line for a command of n arguments, the first of which are given; passwords are left out.
// The form is Redis's: +<seconds>.<microseconds> [<database> <address>] "<argument>" ... It is a simple string of RESP,
// so no byte of an argument may be a line's end: appendRepr sees to that.
func appendShown(b []byte, from string, cmd *command, args [][]byte, n, db int) []byte {
	if !cmd.isShown() {
		return b
	}
	now := time.Now()
	b = fmt.Appendf(b, "+%d.%06d [%d %s]", now.Unix(), now.Nanosecond()/1000, db, from)
	room := maxShown
	for i, a := range args {
		if room <= 0 {
			b = fmt.Appendf(b, ` "... (%d more arguments)"`, n-i)
			break
		}
		b = append(b, ' ')
		switch rest := len(a) - room; {
		case cmd.Secret.Hides(args, i, values.Fold):
			b = append(b, `"(redacted)"`...)
		case rest > 0:
			b = appendRepr(b, a[:room])
			b = append(strconv.AppendInt(append(b[:len(b)-1], "... ("...), int64(rest), 10), ` more bytes)"`...)
		default:
			b = appendRepr(b, a)
		}
		room -= len(a) + len(` ""`)
	}
	return append(b, "\r\n"...)
}

// appendRepr appends a string as Redis's sdscatrepr has it.
// A byte becomes four at most.
func appendRepr(b, s []byte) []byte {
	const hex = "0123456789abcdef"
	b = append(b, '"')
	for _, c := range s {
		switch {
		case c == '\\' || c == '"':
			b = append(b, '\\', c)
		case c == '\n':
			b = append(b, `\n`...)
		case c == '\r':
			b = append(b, `\r`...)
		case c == '\t':
			b = append(b, `\t`...)
		case c == '\a':
			b = append(b, `\a`...)
		case c == '\b':
			b = append(b, `\b`...)
		case c < ' ' || c > '~':
			b = append(b, '\\', 'x', hex[c>>4], hex[c&15])
		default:
			b = append(b, c)
		}
	}
	return append(b, '"')
}

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
		most += len(`\xff`)*min(len(a), maxShown) + len(`"(redacted)" `)
	}
	if n := len(s.lines) + min(most, len(`\xff`)*maxShown) + 512; n > cap(s.lines) {
		n = max(n, min(2*cap(s.lines), maxShownTogether))
		if n > smallOutput {
			if s.full = n > maxShownTogether || !c.share.Try(int64(n)-s.held); s.full {
				return
			}
			s.held = int64(n)
		}
		s.lines = append(make([]byte, 0, n), s.lines...)
	}
	s.lines = appendShown(s.lines, from, cmd, args, len(args), t.DB)
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
