package gateway

import (
	"slices"
	"time"

	"github.com/kvd-project/kvd/internal/redis/acl"
	"github.com/kvd-project/kvd/internal/redis/resp"
	"github.com/kvd-project/kvd/internal/redis/values"
)

// auth makes the connection a user's if the password is right. Success lifts the tight limits that a
// stranger's commands have. name is the command's, as the client wrote it.
// Wrong guesses delay later ones from the same address (netsrv.Guesses),
// and each is in ACL LOG.
func (c *conn) auth(name, user, password []byte) error {
	if d := c.g.guesses.Delay(c.remote); d > 0 {
		// Before the password is looked at, right or wrong: a client that hangs up instead of waiting has learnt
		// nothing.
		c.link.Waits()
		select {
		case <-time.After(d):
		case <-c.ctx.Done():
		}
	}
	u, ok := c.g.users.Authenticate(user, password)
	if !ok {
		n := c.g.m.authFails.Add(1)
		c.g.guesses.Wrong(c.remote)
		c.recordDenial(acl.DeniedAuth, "toplevel", string(name), string(user))
		c.g.o.Logger.Warn("wrong password", "peer", c.remote, "failures", n)
		return refusal("WRONGPASS invalid username-password pair or user is disabled.")
	}
	c.become(u)
	if t := c.listener.Tracking(); t != nil {
		if why, _ := c.mayTrack(t); why != acl.Allowed {
			c.closing = true // as if the rights had been taken away
		}
	}
	return nil
}

// cmdAuth takes a password, or a user and a password; while default needs none the second
// form succeeds for it, as in Redis, since clients send it unasked.
func cmdAuth(c *conn, w *resp.Writer, args [][]byte) error {
	user, password := []byte(acl.DefaultUser), args[1]
	switch {
	case len(args) > 3:
		return values.ErrSyntax
	case len(args) == 3:
		user, password = args[1], args[2]
	case c.g.users.Default().Rights().Open():
		return refusal("ERR AUTH <password> called without any password configured for the default user. Are you " +
			"sure your " +
			"configuration is correct?")
	}
	if err := c.auth(args[0], user, password); err != nil {
		return err
	}
	w.OK()
	return nil
}

// cmdHello changes nothing unless all of its arguments are good, AUTH apart. The protocol
// changes with this very reply, which is why the writer is told before it is written.
// The reply has the fields of Redis 7 in its order. version is that of the Redis whose commands these are, since
// clients decide by it what they may send.
func cmdHello(c *conn, w *resp.Writer, args [][]byte) error {
	proto := c.proto
	if len(args) > 1 {
		v, ok := resp.ParseInt(args[1])
		if !ok {
			return refusal("ERR Protocol version is not an integer or out of range")
		}
		if v < 2 || v > 3 {
			return refusal("NOPROTO unsupported protocol version")
		}
		proto = int(v)
	}
	var name []byte
	p := values.OptionsOf(args[min(2, len(args)):])
	for p.More() {
		switch {
		case p.Option("auth", 2):
			p.Fail(c.auth(args[0], p.Str(), p.Str()))
		case p.Option("setname", 1):
			if name = p.Str(); !validName(name) {
				p.Refuse(errClientName)
			}
		default:
			p.Refuse(refusal("ERR Syntax error in HELLO option '" + string(p.Str()) + "'"))
		}
	}
	if err := p.End(); err != nil {
		return err
	}
	if !c.authed && !c.admitted() {
		return refusal("NOAUTH HELLO must be called with the client already authenticated, otherwise the HELLO " +
			"<proto> AUTH " +
			"<user> <pass> option can be used to authenticate the client and select the RESP protocol version at the " +
			"same time")
	}
	if name != nil {
		c.setName(name)
	}
	c.proto = proto
	c.seenP3.Store(proto == 3)
	w.Proto = proto
	w.Map(7)
	w.BulkString("server")
	w.BulkString("redis")
	w.BulkString("version")
	w.BulkString(redisVersion)
	w.BulkString("proto")
	w.Int(int64(proto))
	w.BulkString("id")
	w.Int(c.id)
	w.BulkString("mode")
	w.BulkString(c.g.mode())
	w.BulkString("role")
	w.BulkString("master")
	w.BulkString("modules")
	w.Array(0)
	return nil
}

// protocolBehind is the protocol behind a HELLO in a transaction, whose turn comes when the replies behind it have been
// made. A password counts as right.
func protocolBehind(args [][]byte, proto int) int {
	if len(args) < 2 {
		return proto
	}
	v, ok := resp.ParseInt(args[1])
	if !ok || v < 2 || v > 3 {
		return proto
	}
	p := values.OptionsOf(args[2:])
	for p.More() {
		switch {
		case p.Option("auth", 2):
			p.Str()
			p.Str()
		case p.Option("setname", 1) && validName(p.Str()):
		default:
			return proto
		}
	}
	return int(v)
}

// cmdReset leaves the connection as a new one is, the limits of a stranger included. Proxies
// send it between two users of one connection.
func cmdReset(c *conn, w *resp.Writer, _ [][]byte) error {
	c.stopListening()
	c.stopTracking()
	c.stopMonitoring()
	c.fresh()
	c.setName(nil)
	c.becomeNew()
	w.Simple("RESET")
	return nil
}

// cmdQuit answers first; what was pipelined behind it is not performed.
func cmdQuit(c *conn, w *resp.Writer, _ [][]byte) error {
	c.closing = true
	w.OK()
	return nil
}

// cmdPing never asks the store: it tells that the gateway is alive. That the store can be
// reached is for the health endpoint.
func cmdPing(c *conn, w *resp.Writer, args [][]byte) error {
	switch {
	case len(args) <= 2 && c.proto == 2 && c.listener.Listens():
		// In the form of a message, since the client reads nothing else now.
		w.Array(2)
		w.BulkString("pong")
		w.Bulk(slices.Concat(args[1:]...))
		return nil
	}
	switch len(args) {
	case 1:
		w.Simple("PONG")
	case 2:
		w.Bulk(args[1])
	default:
		return refusal("ERR wrong number of arguments for 'ping' command")
	}
	return nil
}

func cmdEcho(_ *conn, w *resp.Writer, args [][]byte) error { w.Bulk(args[1]); return nil }

// dbIndex reads the number of a database.
// Databases are numbered from 0, as in Options.Databases.
func (c *conn) dbIndex(b []byte) (db int, err error) {
	n, ok := resp.ParseInt(b)
	switch {
	case !ok:
		return 0, values.ErrNotInt
	case n != int64(int32(n)):
		return 0, refusal("ERR value is out of range, value must between -2147483648 and 2147483647")
	case n < 0 || n >= int64(len(c.g.o.Databases)):
		return 0, refusal("ERR DB index is out of range")
	}
	return int(n), nil
}

// cmdSelect costs nothing: the clients of all databases are open from the start.
func cmdSelect(c *conn, w *resp.Writer, args [][]byte) error {
	db, err := c.dbIndex(args[1])
	if err != nil {
		return err
	}
	c.use(db)
	w.OK()
	return nil
}
