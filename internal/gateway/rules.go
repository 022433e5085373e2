package gateway

import (
	"time"

	"github.com/kvd-project/kvd/internal/redis/acl"
	"github.com/kvd-project/kvd/internal/redis/live"
	"github.com/kvd-project/kvd/internal/redis/resp"
	"github.com/kvd-project/kvd/internal/redis/spec"
	"github.com/kvd-project/kvd/internal/redis/values"
)

// Users, and what their commands may touch. Package acl knows rules; what follows tells it what a command is about.
//
// A connection is always some user's: user default's before AUTH. It holds a pointer to the user and asks for the
// user's rights at each command, so a change of rules holds from the next command on, wherever it came from (ACL
// SETUSER, ACL LOAD, SIGHUP), and nobody has to find the connections that it concerns. Only users that are gone are
// looked for (dismissUsers), since their connections would go on with the last rights that they had.
//
// Rights are asked when a command begins, and for one that MULTI queued again at EXEC: in between they may have been
// taken away. A user with all rights is known by a flag, so that a store without users pays one branch a command.

// catalog has the commands in the order of commandsByID, but for unknown, so that their numbers are the same.
var catalog *acl.Catalog

// newCatalog tells package acl of the commands. It must run when all of them have their numbers.
// It panics over a category that there is not, at the program's start.
func newCatalog() *acl.Catalog {
	var list []acl.Command
	for _, c := range commandsByID {
		for _, name := range c.Categories {
			set, ok := acl.ParseCategory(name)
			if !ok {
				panic(c.Name + ": no category " + name)
			}
			c.categories |= set
		}
		list = append(list, acl.Command{Name: c.Name, Categories: c.categories})
	}
	made, err := acl.NewCatalog(list)
	if err != nil {
		panic(err)
	}
	return made
}

// needOf is an access as package acl has it. A command that has none may be performed on any key of the user's
// patterns, whether they are for reading or for writing.
func needOf(a spec.Access) (n acl.Need) {
	if a&spec.Reads != 0 {
		n |= acl.NeedRead
	}
	if a&spec.Changes != 0 {
		n |= acl.NeedWrite
	}
	return n
}

// keySpans says which arguments are keys; First 0: none. The arguments are as many as the command takes, and a number
// of keys among them that is none, or too great, is the command's to refuse. A Span's Last is inclusive, and Step may
// be more than 1. Rules, COMMAND GETKEYS and preloading all go by it, so that none of them sees another key than the
// others.
func (cmd *command) keySpans(args [][]byte) (keys, also acl.Span) {
	switch cmd.Finder {
	case spec.FindStore:
		return storeSpans(args, cmd.From)
	case spec.FindSort:
		return sortSpans(args)
	case spec.FindStreams:
		return behindStreams(args, 1), also
	case spec.FindGroupStreams:
		return groupReadSpans(args)
	}
	if keys = (acl.Span{First: cmd.First, Last: cmd.Last, Step: cmd.Step}); keys.Last < 0 {
		keys.Last += len(args)
	}
	if cmd.Counted == 0 {
		return keys, also
	}
	n, ok := resp.ParseInt(args[cmd.Counted])
	if ok && n > 0 && n < int64(len(args)-cmd.Counted) {
		also = acl.Span{First: cmd.Counted + 1, Last: cmd.Counted + int(n), Step: 1}
	}
	if keys.First == 0 || keys.First > cmd.Counted {
		return also, acl.Span{}
	}
	if also.First == 0 { // the command fails, and touches none
		return also, acl.Span{}
	}
	return keys, also
}

// accessOf is what the command asks for in a database. Databases are part of it, as in no Redis: there a user who may
// touch a key may touch it in every database, and here databases may be namespaces of different services. So a command
// asks for the one that it works in, and those that name another one (SELECT, COPY, FLUSHALL) for that. A number that
// means no database is left to the command, which says so. The Access refers to args.
func (c *conn) accessOf(cmd *command, args [][]byte, db int) (a acl.Access) {
	a = acl.Access{Command: int(cmd.ID), Args: args, Open: cmd.Has(spec.FlagNoAuth),
		Needs: needOf(cmd.access(args)), NeedsLater: needOf(cmd.LaterAccess)}
	switch cmd.Channels {
	case spec.ChannelsFirst:
		a.FirstChannel, a.LastChannel = 1, 1
	case spec.ChannelsAll, spec.ChannelsPatterns:
		a.FirstChannel, a.LastChannel, a.Patterns = 1, len(args)-1, cmd.Channels == spec.ChannelsPatterns
	}
	keys, also := cmd.keySpans(args)
	a.First, a.Last, a.Step, a.Also = keys.First, keys.Last, keys.Step, also
	if cmd.inDatabase {
		a.Use(db)
	}
	if cmd.Is(spec.Libraries) {
		a.Use(librariesName.DB)
	}
	if cmd.Database > 0 {
		if n, err := c.dbIndex(args[cmd.Database]); err == nil {
			a.Use(n)
		}
	}
	if cmd.Is(spec.DatabaseOption) {
		for i := cmd.Last + 1; i+1 < len(args); i++ {
			if values.Fold(args[i], "db") {
				if n, err := c.dbIndex(args[i+1]); err == nil {
					a.Use(n)
				}
			}
		}
	}
	a.AllDatabases = cmd.Is(spec.AllDatabases)
	return a
}

// mayDoIn reports whether the connection's user may perform a command that turns out to be about what somebody does in
// a database.
func (c *conn) mayDoIn(cmd *command, args [][]byte, db int) bool {
	r := c.user.Load().Rights()
	if r.Unlimited() {
		return true
	}
	a := c.accessOf(cmd, args, c.db)
	a.Use(db)
	why, _ := r.Check(&a)
	return why == acl.Allowed
}

// mayTrack is why the connection's user may not hear of all keys that begin with the prefixes of t. Messages do not say
// of which database a key is, so he must be allowed to read them in each.
func (c *conn) mayTrack(t *live.Tracking) (why acl.Denial, prefix string) {
	r := c.user.Load().Rights()
	if r.Unlimited() {
		return acl.Allowed, ""
	}
	for _, p := range t.Prefixes {
		reads := 0
		for db := range c.g.o.Databases {
			if r.ReadsPrefix(p, db) {
				reads++
			}
		}
		switch reads {
		case len(c.g.o.Databases):
		case 0:
			return acl.DeniedKey, p
		default:
			return acl.DeniedDatabase, p
		}
	}
	return acl.Allowed, ""
}

// refusesPrefixes is the reply to a client that wants to hear of keys that its user may not read, or nil.
func (c *conn) refusesPrefixes(t *live.Tracking) error {
	why, prefix := c.mayTrack(t)
	if why != acl.Allowed {
		c.recordDenial(why, "toplevel", prefix, c.user.Load().Name)
	}
	return noPermission(why, "")
}

// dismissTrackers closes connections that hear of keys, by BCAST, which their user may not read any more; self is
// closed behind its reply. It is called as dismissListeners is.
func (g *Gateway) dismissTrackers(self *conn) {
	var gone []*conn
	g.tracked.Each(func(l *live.Listener) {
		c := l.Client.(ear).c
		if why, _ := c.mayTrack(l.Tracking()); why != acl.Allowed {
			gone = append(gone, c)
		}
	})
	for _, c := range gone {
		if c == self {
			c.closing = true
		} else {
			c.link.Kill()
		}
	}
}

// permitted reports whether the connection's user may perform a command, without telling anybody.
func (c *conn) permitted(cmd *command, args [][]byte) bool { return c.permittedIn(cmd, args, c.db) }

// permittedIn is permitted for a command in another database than the connection's.
// It is for redis.acl_check_cmd and for lookups in a loop, where a command that is not permitted goes the ordinary way,
// which records it.
func (c *conn) permittedIn(cmd *command, args [][]byte, db int) bool {
	r := c.user.Load().Rights()
	if r.Unlimited() {
		return true
	}
	a := c.accessOf(cmd, args, db)
	why, _ := r.Check(&a)
	return why == acl.Allowed
}

// denial is why the connection's user may not perform a command, which is recorded. It is for the loop that
// performs commands: nothing of the command has happened when it says no.
func (c *conn) denial(cmd *command, args [][]byte) acl.Denial {
	db := c.db
	if c.tx.queueing {
		db = c.tx.db
	}
	return c.denialIn(cmd, args, db, "toplevel")
}

// denialIn is denial for a command in another database than the connection's, and in a context that ACL LOG shows.
// context is toplevel or lua, as in Redis; recordDenial makes multi of the former within MULTI.
func (c *conn) denialIn(cmd *command, args [][]byte, db int, context string) acl.Denial {
	u := c.user.Load()
	r := u.Rights()
	if r.Unlimited() && (cmd.Channels == spec.NoChannels || r.AnyChannel()) {
		return acl.Allowed
	}
	a := c.accessOf(cmd, args, db)
	why, at := r.Check(&a)
	switch why {
	case acl.Allowed:
	case acl.DeniedKey, acl.DeniedChannel:
		c.recordDenial(why, context, string(args[at]), u.Name)
	default:
		c.recordDenial(why, context, cmd.Name, u.Name)
	}
	return why
}

// refusal is the reply to a command that the connection's user may not perform, or nil. The texts are those of
// Redis 7.0, word by word: libraries tell NOPERM errors apart by them. A refusal does not name the key, which may be
// somebody else's secret as far as the log of a program goes; ACL LOG does.
func (c *conn) refusal(cmd *command, args [][]byte) error {
	return noPermission(c.denial(cmd, args), cmd.Name)
}

// noPermission is the reply that says why a command is refused, or nil.
func noPermission(why acl.Denial, command string) error {
	switch why {
	case acl.Allowed:
		return nil
	case acl.DeniedCommand:
		return refusal("NOPERM this user has no permissions to run the '" + command + "' command")
	case acl.DeniedDatabase:
		return refusal("NOPERM this user has no permissions to access this database")
	case acl.DeniedChannel:
		return refusal("NOPERM this user has no permissions to access one of the channels used as arguments")
	}
	return refusal("NOPERM this user has no permissions to access one of the keys used as arguments")
}

// refusalAtExec is the same for a command that was allowed when MULTI queued it, in the database that it works in. The
// others of the transaction are performed, as in Redis: the reply to EXEC has this one in its place.
func (c *conn) refusalAtExec(cmd *command, args [][]byte, db int) error {
	reason := "no permission to touch the specified keys"
	switch c.denialIn(cmd, args, db, "toplevel") {
	case acl.Allowed:
		return nil
	case acl.DeniedCommand:
		reason = "no permission to execute the command or subcommand"
	case acl.DeniedDatabase:
		reason = "no permission to access this database"
	case acl.DeniedChannel:
		reason = "no permission to publish to the specified channel"
	}
	return refusal("NOPERM ACLs rules changed between the moment the transaction was accumulated and the EXEC call. " +
		"This command is no longer allowed for the following reason: " + reason)
}

// recordDenial counts what was refused and puts it in ACL LOG. It is off the path of what is allowed, and bounded:
// acl.Log keeps the last entries and counts those that are alike, so that a client that tries for ever costs one entry.
func (c *conn) recordDenial(why acl.Denial, context, object, user string) {
	c.g.m.denied[why].Add(1)
	e := acl.Event{Why: why, Context: context, Object: object, User: user, Client: c.line()}
	if c.tx.queueing && context == "toplevel" {
		e.Context = "multi"
	}
	c.g.denials.Add(e, time.Now())
}

// become makes the connection a user's, with a client's limits for its commands: strangers have smaller ones, since
// what they send has to be kept until it is whole.
// The connection's goroutine or loop calls it; user is atomic for those who list connections.
func (c *conn) become(u *acl.User) {
	c.user.Store(u)
	c.authed = true
	c.rd.Limits = c.g.limits(true)
}

// becomeNew makes the connection that of a client that has not said who it is.
// User default counts as authenticated if it needs no password and is on.
func (c *conn) becomeNew() {
	u := c.g.users.Default()
	c.become(u)
	if !u.Rights().Open() {
		c.authed = false
		c.rd.Limits = c.g.limits(false)
	}
}

// admitted reports whether the client may give commands. Since it came, user default may have been opened.
func (c *conn) admitted() bool {
	if !c.authed && c.g.users.Default().Rights().Open() {
		c.becomeNew()
	}
	return c.authed
}

// dismissUsers closes the connections of users that are gone, or off after a reload; self is closed behind
// its reply. Those of user default stay, since everybody is that before AUTH: its rights decide.
// Users are compared by their pointers: one that was deleted and made again is another user. self may be nil.
func (g *Gateway) dismissUsers(self *conn, off bool) {
	g.each(func(x *conn) {
		u := x.user.Load()
		switch {
		case u == g.users.Default(), g.users.Find(u.Name) == u && (u.Rights().Enabled() || !off):
		case x == self:
			x.closing = true
		default:
			x.link.Kill()
		}
	})
}

// ReadsEverything reports whether the connection's user may perform the command by rules that let him read every key.
// Rules cannot be asked about keys that are not known before the command runs.
func (t *staged) ReadsEverything(args [][]byte) bool {
	r := t.c.user.Load().Rights()
	if r.Unlimited() {
		return true
	}
	a := t.c.accessOf(find(args[0]), args, t.DB)
	return r.ReadsAllKeys(&a)
}
