package gateway

import (
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kvd-project/kvd/internal/number"
	"github.com/kvd-project/kvd/internal/redis/args"
	"github.com/kvd-project/kvd/internal/redis/resp"
	"github.com/kvd-project/kvd/internal/redis/spec"
	"github.com/kvd-project/kvd/internal/redis/values"
)

// redisVersion is the one whose strings these are; clients choose commands by it.
const redisVersion = "7.0.15"

// cmdTime tells this machine's time. The store needs no clock that gateways share: expiry alone
// depends on it.
func cmdTime(_ *conn, w *resp.Writer, _ [][]byte) error { writeTime(w, time.Now()); return nil }

// writeTime is the reply to TIME: seconds, and microseconds of the second.
func writeTime(w *resp.Writer, now time.Time) {
	w.Array(2)
	w.BulkString(strconv.FormatInt(now.Unix(), 10))
	w.BulkString(strconv.Itoa(now.Nanosecond() / 1000))
}

// cmdWait returns 0 replicas, which is what a Redis without replicas says; that a write is on
// all copies when it is answered is the store's promise, and needs no waiting.
// The arguments are checked all the same, in Redis's order.
func cmdWait(_ *conn, w *resp.Writer, args [][]byte) error {
	_, ok1 := resp.ParseInt(args[1])
	ms, ok2 := resp.ParseInt(args[2])
	switch {
	case !ok1:
		return values.ErrNotInt
	case !ok2:
		return refusal("ERR timeout is not an integer or out of range")
	case ms < 0:
		return refusal("ERR timeout is negative")
	default:
		w.Int(0)
	}
	return nil
}

// cmdLolwut names the version, and that this is no Redis, for those who look.
func cmdLolwut(c *conn, w *resp.Writer, args [][]byte) error {
	if p := values.OptionsOf(args[1:]); p.Option("version", 1) {
		if p.Int(); p.Err() != nil {
			return p.Err()
		}
	}
	w.Verbatim("txt", "kvd "+c.g.o.Version+", speaks as Redis ver. "+redisVersion+"\n")
	return nil
}

// cmdDebug is one command, as in Redis: rules of users name DEBUG, or DEBUG with a first argument.
func cmdDebug(c *conn, w *resp.Writer, args [][]byte) error {
	switch p := values.OptionsOf(args[1:]); {
	case p.Left() == 1 && p.Flag("help"):
		writeHelp(w, commandsByID[spec.CmdDebug].Name, "SLEEP <seconds>", "    Stop this connection for <seconds>.")
	case p.Left() == 2 && p.Flag("sleep"):
		return cmdDebugSleep(c, w, args)
	default:
		return refusal("ERR unknown subcommand or wrong number of arguments for '" + values.Clip(args[1], 128) +
			"'. Try DEBUG HELP.")
	}
	return nil
}

// cmdDebugSleep holds up only its connection, not the gateway as in Redis. It is for tests of
// clients, so Options.Debug must allow it.
// The time is in seconds, and may be a fraction. It ends early if the gateway closes.
func cmdDebugSleep(c *conn, w *resp.Writer, args [][]byte) error {
	if !c.g.o.Debug {
		return refusal("ERR DEBUG command not allowed.")
	}
	s, _, _ := number.Double(args[2]) // what is no number is 0, as in Redis
	if !(s >= 0 && s <= 1e6) {
		return values.ErrNotFloat
	}
	select {
	case <-time.After(time.Duration(s * float64(time.Second))):
	case <-c.ctx.Done():
	}
	w.OK()
	return nil
}

const errClientName = "ERR Client names cannot contain spaces, newlines or special characters."

// validName refuses what would break the lines of CLIENT LIST: names are printed there as they
// are, to whoever asks.
// The empty name is good, and means none.
func validName(b []byte) bool {
	for _, c := range b {
		if c < '!' || c > '~' {
			return false
		}
	}
	return true
}

// setName is locked, since CLIENT LIST of other connections reads the name.
// Only the connection's own goroutine writes it, so it alone may read it without the lock.
func (c *conn) setName(b []byte) {
	c.mu.Lock()
	c.mu.name = string(b)
	c.mu.Unlock()
}

// clientCommands are about connections.
func clientCommands() performers {
	return performers{
		spec.CmdClientId: func(c *conn, w *resp.Writer, _ [][]byte) error {
			w.Int(c.id)
			return nil
		},
		spec.CmdClientInfo: func(c *conn, w *resp.Writer, _ [][]byte) error {
			w.Verbatim("txt", c.line()+"\n")
			return nil
		},
		spec.CmdClientList: cmdClientList,
		spec.CmdClientSetname: func(c *conn, w *resp.Writer, args [][]byte) error {
			if !validName(args[2]) {
				return refusal(errClientName)
			}
			c.setName(args[2])
			w.OK()
			return nil
		},
		spec.CmdClientGetname: func(c *conn, w *resp.Writer, _ [][]byte) error {
			if c.mu.name == "" {
				w.Null()
			} else {
				w.BulkString(c.mu.name)
			}
			return nil
		},
		spec.CmdClientSetinfo:      cmdClientSetInfo,
		spec.CmdClientNoEvict:      onOff,
		spec.CmdClientNoTouch:      onOff,
		spec.CmdClientReply:        cmdClientReply,
		spec.CmdClientKill:         cmdClientKill,
		spec.CmdClientPause:        cmdClientPause,
		spec.CmdClientUnpause:      cmdClientUnpause,
		spec.CmdClientUnblock:      cmdClientUnblock,
		spec.CmdClientGetredir:     cmdClientGetRedir,
		spec.CmdClientTracking:     cmdClientTracking,
		spec.CmdClientCaching:      cmdClientCaching,
		spec.CmdClientTrackinginfo: cmdClientTrackingInfo,
	}
}

// onOff accepts what would change how Redis evicts: here the client library decides that, for
// all alike.
func onOff(_ *conn, w *resp.Writer, args [][]byte) error {
	p := values.OptionsOf(args[2:])
	if p.Choice("on", "off"); p.End() != nil {
		return p.End()
	}
	w.OK()
	return nil
}

// cmdClientSetInfo is what client libraries say of themselves as they connect; CLIENT LIST shows
// it.
// Values are bounded, since each connection keeps them.
func cmdClientSetInfo(c *conn, w *resp.Writer, args [][]byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	p := values.OptionsOf(args[2:])
	switch v := args[3]; {
	case len(v) > 256 || !validName(v):
		return refusal("ERR " + strings.ToLower(values.Clip(args[2], 32)) +
			" cannot contain spaces, newlines or special characters.")
	case p.Flag("lib-name"):
		c.mu.libName = string(v)
	case p.Flag("lib-ver"):
		c.mu.libVer = string(v)
	default:
		return refusal("ERR Unrecognized option '" + values.Clip(args[2], 128) + "'")
	}
	w.OK()
	return nil
}

// cmdClientReply replies to ON alone. SKIP concerns the next command, so it must not touch a
// mode that is OFF; conn.replied moves the mode on.
func cmdClientReply(c *conn, w *resp.Writer, args [][]byte) error {
	switch p := values.OptionsOf(args[2:]); {
	case p.Flag("on"):
		c.reply = replyOn
		w.OK()
	case p.Flag("off"):
		c.reply = replyOff
	case p.Flag("skip"):
		if c.reply != replyOff {
			c.reply = replySkipNext
		}
	default:
		return values.ErrSyntax
	}
	return nil
}

// each calls f for the connections in the order of their numbers.
// f is called without the lock, so that it may take its time or end connections; some may have
// gone by then.
// A connection that comes while it runs is left out.
func (g *Gateway) each(f func(c *conn)) {
	g.mu.Lock()
	all := make([]*conn, 0, len(g.mu.conns))
	for _, c := range g.mu.conns {
		all = append(all, c)
	}
	g.mu.Unlock()
	slices.SortFunc(all, func(a, b *conn) int { return int(a.id - b.id) })
	for _, c := range all {
		f(c)
	}
}

// eachClient is each without the connections that were killed. To clients they have ended, though what serves
// them may not have seen it yet.
func (g *Gateway) eachClient(f func(c *conn)) {
	g.each(func(c *conn) {
		if !c.link.Killed() {
			f(c)
		}
	})
}

// readClientType reads a type of connections as CLIENT LIST and KILL name it, and returns what finds them. There are no
// replicas. A connection is of type pubsub while it has subscriptions.
func readClientType(p *args.Parser) func(x *conn) bool {
	switch {
	case p.Flag("normal"):
		return func(x *conn) bool { return !x.listener.Listens() }
	case p.Flag("pubsub"):
		return func(x *conn) bool { return x.listener.Listens() }
	case p.Flag("master"), p.Flag("replica"), p.Flag("slave"):
	default:
		p.Refuse(refusal("ERR Unknown client type '" + values.Clip(p.Str(), 128) + "'"))
	}
	return func(*conn) bool { return false }
}

// cmdClientList shows the connections to this gateway.
// Other gateways have clients of their own; kvctl shows those of all of them.
func cmdClientList(c *conn, w *resp.Writer, args [][]byte) error {
	want := func(*conn) bool { return true }
	p := values.OptionsOf(args[2:])
	switch {
	case len(args) == 4 && p.Flag("type"):
		want = readClientType(&p)
	case p.Option("id", 1):
		ids := make(map[int64]bool)
		for p.More() {
			ids[p.IntFrom(math.MinInt64, "ERR Invalid client ID")] = true
		}
		want = func(c *conn) bool { return ids[c.id] }
	}
	if err := p.End(); err != nil {
		return err
	}
	var s strings.Builder
	c.g.eachClient(func(c *conn) {
		if want(c) {
			s.WriteString(c.line() + "\n")
		}
	})
	w.Verbatim("txt", s.String())
	return nil
}

func remoteIs(addr []byte) func(x *conn) bool {
	s := string(addr)
	return func(x *conn) bool { return x.remote.String() == s }
}

// parseKill reads the filters of CLIENT KILL, pairs of a name and a value.
func (g *Gateway) parseKill(filters [][]byte) (tests []func(x *conn) bool, skipMe bool, err error) {
	if len(filters)%2 != 0 {
		return nil, false, values.ErrSyntax
	}
	skipMe = true
	p := values.OptionsOf(filters)
	for p.More() {
		switch {
		case p.Flag("id"):
			id := p.IntFrom(1, "ERR client-id should be greater than 0")
			tests = append(tests, func(x *conn) bool { return x.id == id })
		case p.Flag("addr"):
			tests = append(tests, remoteIs(p.Str()))
		case p.Flag("laddr"):
			s := string(p.Str())
			tests = append(tests, func(x *conn) bool { return x.local.String() == s })
		case p.Flag("user"):
			// The connections of a user that was deleted have been closed, so the name finds all that there are.
			name := p.Str()
			u := g.users.Find(string(name))
			if u == nil {
				p.Refuse(refusal("ERR No such user '" + values.Clip(name, 128) + "'"))
			}
			tests = append(tests, func(x *conn) bool { return x.user.Load() == u })
		case p.Flag("type"):
			tests = append(tests, readClientType(&p))
		case p.Flag("skipme"):
			skipMe = p.Choice("yes", "no") == 0
		default:
			p.Wrong()
		}
	}
	return tests, skipMe, p.End()
}

// cmdClientKill ends connections of this gateway only: others have numbers of their own. The old
// form names one address and fails if there is none; the new one combines filters, all of which
// must match, spares the caller unless told otherwise, and counts. Only Kill is called, which
// may be called from any goroutine; what serves the connection then sees the end.
func cmdClientKill(c *conn, w *resp.Writer, args [][]byte) error {
	// CLIENT KILL ADDR has four words, so three of them are the form of before Redis 2.8.12.
	old := len(args) == 3
	tests, skipMe := []func(x *conn) bool{remoteIs(args[2])}, false
	if !old {
		var err error
		if tests, skipMe, err = c.g.parseKill(args[2:]); err != nil {
			return err
		}
	}
	n := 0
	c.g.eachClient(func(x *conn) {
		for _, t := range tests {
			if !t(x) {
				return
			}
		}
		if x == c && skipMe {
			return
		}
		n++
		if x == c {
			c.closing = true // after the reply, which says that it was ended
		} else {
			x.link.Kill()
		}
	})
	switch {
	case !old:
		w.Int(int64(n))
	case n == 0:
		return refusal("ERR No such client")
	default:
		w.OK()
	}
	return nil
}
