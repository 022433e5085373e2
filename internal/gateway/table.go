package gateway

import (
	"slices"
	"strings"

	"github.com/kvd-project/kvd/internal/redis/acl"
	"github.com/kvd-project/kvd/internal/redis/resp"
	"github.com/kvd-project/kvd/internal/redis/values"
)

// foldOf says how a command's replies for its keys make one.
// The zero value is of commands on one key.
type foldOf uint8

const (
	single foldOf = iota // one key
	list                 // an array of them
	sum                  // the sum of what was counted
	setAll               // OK
)

// specialOf are writes that most often need not see what was there: batch.admitOne makes a put
// of them if their options allow it, which costs the store one round trip instead of two.
// 0 is a command that is none of them.
type specialOf uint8

const (
	plainSet specialOf = 1 + iota // SET, whose options decide
	setNX
	setFor1    // PSETEX
	setFor1000 // SETEX
)

// A connFunc is a command that is not on keys: it appends its one reply, unless that is the error.
type connFunc func(c *conn, w *resp.Writer, args [][]byte) error

// command is what there is to know of a command, or a subcommand ("config|get").
// Commands are made at the program's start and do not change, so any goroutine may look at them. They are compared by
// their pointers.
type command struct {
	name  string // lower case
	id    int    // place in metrics.commands
	arity int    // with the name, as in COMMAND: negative is "at least"
	// first, last and step say which arguments are keys, as in COMMAND.
	first, last, step int
	// counted is the place of an argument that says how many keys follow it, 0: none. first is then the key before it,
	// if there is one.
	counted int
	// spans says which arguments are keys where that depends on others; the numbers above are then for COMMAND.
	spans func(args [][]byte) (keys, also acl.Span)

	group, summary string // of COMMAND DOCS
	instead        string // what serves its purpose, if kvd does not serve it

	// At most one of these is set, and performs the command; with none, kvd does not serve it.
	key   values.KeyFunc                               // on one key; then kind, fold and special say how to batch it
	part  partFunc                                     // beside key: which bytes of a long value it needs; nil: all
	plain bool                                         // beside key: it replies with the plain value, or that part
	conn  connFunc                                     // by itself
	batch func(c *conn, b *batch, args [][]byte) error // EXEC
	keys  values.SeveralFunc                           // on several keys at once
	// block is set beside keys if the command may wait; it reads the arguments.
	block values.WaitFunc

	kind    kind      // what one such command asks of the store
	fold    foldOf    // how the replies for several keys make one
	special specialOf // a write that may be a put
	lookup  bool      // counts as hit or miss
	write   bool      // may change a key
	steps   bool      // changes keys one after the other: not for transactions and scripts
	noQueue bool      // performed at once after MULTI too
	noAuth  bool      // allowed before AUTH
	swift   bool      // not on keys, and still done in no time
	bySHA   bool      // runs a script that the gateway has
	// listening commands are for connections of RESP2 that are subscribed, too; these may give no others.
	listening bool

	sub map[string]*command // by name without the container's

	// For the rules of users; see rules.go.
	categories        acl.Category
	needs, needsLater acl.Need    // of the first key, and of those behind it
	inDatabase        bool        // works in the database of SELECT
	libraries         bool        // works on libraries of functions, in the database where they are
	channels          channelArgs // which arguments are channels
	event             keyEvent    // of a key that it changes
}

// served reports whether kvd performs the command; others have a name so that they can be
// refused in words.
func (cmd *command) served() bool {
	return cmd.key != nil || cmd.keys != nil || cmd.conn != nil || cmd.batch != nil || cmd.sub != nil
}

// subcommand returns nil for an unknown one.
// name is in any case, and need not be one at all.
func (cmd *command) subcommand(name []byte) *command {
	var a [maxName]byte
	if len(name) > len(a) {
		return nil
	}
	return cmd.sub[string(lower(a[:0], name))]
}

// maxName bounds names that are looked up, so that they can be folded to lower case without
// allocating; none of Redis's is longer.
const maxName = 32

// lower appends b, with ASCII letters in lower case, to dst.
// Bytes that are no ASCII letters stay as they are, as in C's locale.
func lower(dst, b []byte) []byte {
	for _, c := range b {
		if c >= 'A' && c <= 'Z' {
			c += 'a' - 'A'
		}
		dst = append(dst, c)
	}
	return dst
}

var (
	commands     = make(map[string]*command) // by name; subcommands are within theirs
	commandsByID []*command                  // subcommands, too
	// unknown stands for every name that is none.
	unknown = &command{name: "unknown", noAuth: false}
)

// find returns nil for an unknown command.
// It is called for every command, and allocates nothing.
func find(name []byte) *command {
	var a [maxName]byte
	if len(name) > len(a) {
		return nil
	}
	return commands[string(lower(a[:0], name))]
}

// register numbers a command, in the order of the table.
// Numbers are this program's only: nothing stores or sends them.
func register(c *command) {
	c.id = len(commandsByID)
	commandsByID = append(commandsByID, c)
}

// keyed makes a command on the key that is its argument at.
// Its group is by its name, unless ofGroup says another one. That it writes, or counts as a lookup, follows from its
// kind.
func keyed(name string, arity, at int, k kind, summary string) *command {
	group := "string"
	switch {
	case strings.Contains(name, "expire"), strings.Contains(name, "ttl"), strings.Contains(name, "|"),
		name == "persist", name == "type", name == "dump", name == "restore":
		group = "generic"
	case name == "restore-asking":
		group = "server"
	}
	return &command{name: name, arity: arity, first: at, last: at, step: 1, group: group, summary: summary,
		key: values.OneKey[name], kind: k, lookup: k <= read, write: k > read}
}

// folded makes a command on any number of keys, every step-th argument from the first on. Each
// key is an entry of the batch, performed like a command on it alone, and how joins the replies.
func folded(name string, arity, step int, k kind, how foldOf, group, summary string) *command {
	last := -1
	return &command{name: name, arity: arity, first: 1, last: last, step: step, group: group, summary: summary,
		key: values.OneKey[name], kind: k, fold: how, lookup: k <= read, write: k > read}
}

// partFunc says which bytes of a value of n bytes a command needs, of which there may be none.
type partFunc func(args [][]byte, n int) (from, to int)

func (cmd *command) needing(f partFunc) *command {
	cmd.part = f
	return cmd
}

func (cmd *command) replyingValue() *command {
	cmd.plain = true
	return cmd
}

func (cmd *command) with(s specialOf) *command {
	cmd.special = s
	return cmd
}

// onKeys makes a command on several keys, which it reads and changes in one step.
// first, last and step are as in COMMAND; 0 for all says that other fields tell where the keys are.
func onKeys(name string, arity, first, last, step int, group, summary string) *command {
	return &command{name: name, arity: arity, first: first, last: last, step: step, group: group, summary: summary,
		keys: values.SeveralKeys[name]}
}

// by says what performs the command, if that is more than a command on keys.
func (cmd *command) by(f values.SeveralFunc) *command {
	cmd.keys = f
	return cmd
}

// countedAt says that the argument at is the number of keys that follow it.
// The number is the client's, and keySpans distrusts it.
func countedAt(at int, c *command) *command { c.counted = at; return c }

// writes marks a command that may change a key; those on one key say it by their kind.
func writes(c *command) *command { c.write = true; return c }

// onConn makes a command that is not on one key. It is performed by itself, between two batches,
// and may use the connection and its client as it likes.
func onConn(name string, arity int, group string, f connFunc, summary string) *command {
	return &command{name: name, arity: arity, group: group, summary: summary, conn: f}
}

// container is a command of subcommands; f, if not nil, serves it alone.
// The subcommands' names begin with the container's and a bar, and their arity counts both words.
func container(name, group, summary string, f connFunc, subs ...*command) *command {
	c := &command{name: name, arity: -2, group: group, summary: summary, conn: f, sub: make(map[string]*command)}
	if f != nil {
		c.arity = -1
	}
	for _, s := range subs {
		s.group = group
		c.sub[s.name[len(name)+1:]] = s
	}
	return c
}

// helpOf is the subcommand HELP, in Redis's form.
func helpOf(name string, lines ...string) *command {
	return onConn(name+"|help", 2, "", func(_ *conn, w *resp.Writer, _ [][]byte) error {
		writeHelp(w, name, lines...)
		return nil
	}, "Lists the subcommands.")
}

func writeHelp(w *resp.Writer, name string, lines ...string) {
	w.Array(len(lines) + 3)
	w.Simple(strings.ToUpper(name) + " <subcommand> [<arg> [value] [opt] ...]. Subcommands are:")
	for _, l := range lines {
		w.Simple(l)
	}
	w.Simple("HELP")
	w.Simple("    Prints this help.")
}

// refuse is for what cannot be done here at all; the text says why, since a client's user will
// read it.
func refuse(text string) connFunc {
	return func(_ *conn, w *resp.Writer, _ [][]byte) error { return refusal(text) }
}

// Commands that have nothing to do, and succeed.
// They are for what a client does when it connects or ends, and would fail over.
func replyOK(_ *conn, w *resp.Writer, _ [][]byte) error    { w.OK(); return nil }
func replyEmpty(_ *conn, w *resp.Writer, _ [][]byte) error { w.Array(0); return nil }

// valueCommands work on one key, or on several each of which is atomic alone. A batch joins them by key:
// their kind says what the store does for them, their fold how the replies for several keys make one.
func valueCommands() []*command {
	return []*command{
		keyed("get", 2, 1, readValue, "Returns the value of a key.").replyingValue(),
		keyed("set", -3, 1, update, "Sets the value of a key, its expiry with it.").with(plainSet),
		keyed("setnx", 3, 1, putIf, "Sets a key that does not exist.").with(setNX),
		keyed("setex", 4, 1, put, "Sets a value and its expiry in seconds.").with(setFor1000),
		keyed("psetex", 4, 1, put, "Sets a value and its expiry in milliseconds.").with(setFor1),
		keyed("getset", 3, 1, update, "Returns the value before setting another."),
		keyed("getdel", 2, 1, update, "Returns the value before deleting the key."),
		keyed("getex", -2, 1, update, "Returns the value and sets the expiry."),
		keyed("append", 3, 1, update, "Appends to the value."),
		keyed("strlen", 2, 1, readValue, "Returns the length of the value.").needing(values.LengthPart),
		keyed("getrange", 4, 1, readValue, "Returns a part of the value.").needing(values.RangePart).replyingValue(),
		keyed("substr", 4, 1, readValue, "Returns a part of the value.").needing(values.RangePart).replyingValue(),
		keyed("setrange", 4, 1, update, "Overwrites a part of the value."),
		keyed("incr", 2, 1, update, "Adds one to an integer."),
		keyed("decr", 2, 1, update, "Takes one from an integer."),
		keyed("incrby", 3, 1, update, "Adds to an integer."),
		keyed("decrby", 3, 1, update, "Takes from an integer."),
		keyed("incrbyfloat", 3, 1, update, "Adds to a floating-point number."),
		folded("mget", -2, 1, readValue, list, "string",
			"Returns the values of several keys; each read is atomic alone."),
		folded("mset", -3, 2, put, setAll, "string", "Sets several keys; each write is atomic alone."),
		folded("del", -2, 1, remove, sum, "generic", "Deletes keys; each alone is atomic."),
		folded("unlink", -2, 1, remove, sum, "generic", "Deletes keys; each alone is atomic."),
		folded("exists", -2, 1, presence, sum, "generic",
			"Counts the keys that exist.").needing(values.LengthPart),
		folded("touch", -2, 1, readValue, sum, "generic",
			"Counts the keys that exist, and uses them.").needing(values.LengthPart),
		keyed("type", 2, 1, read, "Returns the type of the value, or none.").needing(values.LengthPart),
		keyed("ttl", 2, 1, presence, "Returns the time to live in seconds.").needing(values.LengthPart),
		keyed("pttl", 2, 1, presence, "Returns the time to live in milliseconds.").needing(values.LengthPart),
		keyed("expiretime", 2, 1, presence, "Returns the expiry as a Unix time in seconds.").needing(values.LengthPart),
		keyed("pexpiretime", 2, 1, presence,
			"Returns the expiry as a Unix time in milliseconds.").needing(values.LengthPart),
		keyed("persist", 2, 1, update, "Removes the expiry."),
		keyed("expire", -3, 1, update, "Sets the time to live in seconds."),
		keyed("pexpire", -3, 1, update, "Sets the time to live in milliseconds."),
		keyed("expireat", -3, 1, update, "Sets the expiry as a Unix time in seconds."),
		keyed("pexpireat", -3, 1, update, "Sets the expiry as a Unix time in milliseconds."),
	}
}

// inspectionCommands tell how a value is kept, as far as that means anything here.
func inspectionCommands() []*command {
	return []*command{
		container("object", "generic", "Tells how a value is kept.", nil,
			keyed("object|encoding", 3, 2, read, "Returns the encoding that Redis would choose."),
			keyed("object|refcount", 3, 2, readValue, "Returns 1.").needing(values.LengthPart),
			keyed("object|freq", 3, 2, readValue, "Is not known: an error.").needing(values.LengthPart),
			keysOf(onConn("object|idletime", 3, "", cmdIdleTime,
				"Returns the seconds since the last use that was noted, in a cache."), 2, 2, 1),
			helpOf("object", "ENCODING <key>", "    Return the kind of internal representation used in order to "+
				"store the value",
				"IDLETIME <key>", "    Return the idle time of the key, in seconds, in a cache.", "REFCOUNT <key>",
				"    Return 1.")),
		container("memory", "server", "Memory that keys take.", nil,
			keyed("memory|usage", -3, 2, read, "Estimates the bytes that a key takes."),
			onConn("memory|doctor", 2, "", func(_ *conn, w *resp.Writer, _ [][]byte) error {
				w.Verbatim("txt", "Values are in the memory nodes: see kvctl.")
				return nil
			}, "Refers to kvctl."),
			onConn("memory|stats", 2, "", cmdMemoryStats, "Returns what records and this process take."),
			onConn("memory|malloc-stats", 2, "", func(_ *conn, w *resp.Writer, _ [][]byte) error {
				w.BulkString("Stats not supported for the current allocator")
				return nil
			}, "Is not known."),
			onConn("memory|purge", 2, "", replyOK, "Does nothing."),
			helpOf("memory", "DOCTOR", "    Return memory problems reports.", "MALLOC-STATS",
				"    Return internal statistics report from the memory allocator.",
				"PURGE", "    Attempt to purge dirty pages for reclamation by the allocator.",
				"STATS", "    Return information about the memory usage of the store and of this gateway.",
				"USAGE <key> [SAMPLES <count>]", "    Estimate the bytes that a key takes.")),
	}
}

// keyspaceCommands read the index, or are about whole keys, whatever is in them. None of them joins a batch.
func keyspaceCommands() []*command {
	return []*command{
		onConn("scan", -2, "generic", cmdScan, "Iterates over the keys."),
		onConn("keys", 2, "generic", cmdKeys, "Returns the keys that match a pattern."),
		onConn("randomkey", 1, "generic", cmdRandomKey, "Returns some key."),
		onConn("dbsize", 1, "server", cmdDBSize, "Counts the keys."),
		inSteps(onConn("flushdb", -1, "server", cmdFlushDB, "Deletes the keys of this database.")),
		inSteps(onConn("flushall", -1, "server", cmdFlushAll, "Deletes the keys of all databases.")),
		writes(onKeys("rename", 3, 1, 2, 1, "generic", "Renames a key.")),
		writes(onKeys("renamenx", 3, 1, 2, 1, "generic", "Renames a key to one that does not exist.")),
		writes(onKeys("copy", -3, 1, 2, 1, "generic", "Copies a key.")),
		writes(onKeys("move", 3, 1, 1, 1, "generic", "Moves a key to another database.")),
		onKeys("lcs", -3, 1, 2, 1, "string", "Finds the longest common subsequence of two values."),
		writes(onKeys("msetnx", -3, 1, -1, 2, "string", "Sets keys, if none of them exists.")),
		onConn("swapdb", 3, "server", cmdSwapDB, "Is refused, but for one database."),
	}
}

// connectionCommands are about a transaction or the connection itself. Those that are atOnce end or change a
// transaction, so they are not queued by one.
func connectionCommands() []*command {
	return []*command{
		atOnce(onConn("multi", 1, "transactions", cmdMulti, "Begins a transaction.")),
		atOnce(&command{name: "exec", arity: 1, group: "transactions", batch: cmdExec,
			summary: "Performs a transaction."}),
		atOnce(onConn("discard", 1, "transactions", cmdDiscard, "Ends a transaction without performing it.")),
		atOnce(keysOf(onConn("watch", -2, "transactions", cmdWatch, "Makes EXEC fail if a key changes."), 1, -1, 1)),
		onConn("unwatch", 1, "transactions", cmdUnwatch, "Forgets the watched keys."),

		whileListening(swiftly(onConn("ping", -1, "connection", cmdPing, "Returns PONG or its argument."))),
		swiftly(onConn("echo", 2, "connection", cmdEcho, "Returns its argument.")),
		whileListening(beforeAuth(atOnce(onConn("quit", -1, "connection", cmdQuit, "Closes the connection.")))),
		whileListening(beforeAuth(
			atOnce(onConn("reset", 1, "connection", cmdReset, "Makes the connection like new.")))),
		beforeAuth(onConn("auth", -2, "connection", cmdAuth, "Authenticates the connection.")),
		beforeAuth(onConn("hello", -1, "connection", cmdHello, "Chooses the protocol's version.")),
		onConn("select", 2, "connection", cmdSelect, "Chooses the database."),
		clientCommands(),
	}
}

// describingCommands tell clients and tools what they talk to.
func describingCommands() []*command {
	return []*command{
		container("command", "server", "Describes commands.", cmdCommand,
			onConn("command|count", 2, "", cmdCommandCount, "Counts commands."),
			onConn("command|info", -2, "", cmdCommandInfo, "Describes commands."),
			onConn("command|docs", -2, "", cmdCommandDocs, "Documents commands."),
			onConn("command|list", -2, "", cmdCommandList, "Lists commands."),
			onConn("command|getkeys", -4, "", cmdCommandGetKeys, "Returns the keys among arguments."),
			onConn("command|getkeysandflags", -4, "", cmdCommandGetKeysAndFlags,
				"Returns the keys among arguments, and what the command does to each."),
			helpOf("command", "(no subcommand)", "    Return details about all commands.", "COUNT",
				"    Return the total number of commands.",
				"LIST", "    Return a list of all commands.", "INFO [<command-name> ...]",
				"    Return details about multiple commands.",
				"DOCS [<command-name> ...]", "    Return documentation details about multiple commands.",
				"GETKEYS <full-command>", "    Return the keys from a full command.",
				"GETKEYSANDFLAGS <full-command>", "    Return the keys and the access flags from a full command.")),
		onConn("info", -1, "server", cmdInfo, "Describes the gateway and its databases."),
		container("config", "server", "Settings as Redis names them.", nil,
			onConn("config|get", -3, "", cmdConfigGet, "Returns settings."),
			onConn("config|set", -4, "", cmdConfigSet, "Changes settings that do no harm."),
			onConn("config|resetstat", 2, "", cmdConfigResetStat, "Sets back what INFO counts; the metrics go on."),
			onConn("config|rewrite", 2, "", refuse("ERR The server is running without a config file"), "Is refused."),
			helpOf("config", "GET <pattern>",
				"    Return parameters matching the glob-like <pattern> and their values.",
				"SET <directive> <value>", "    Set the configuration <directive> to <value>.", "RESETSTAT",
				"    Reset statistics reported by the INFO command.")),
	}
}

// administrationCommands are those that tools of Redis call and expect to succeed, although there is nothing to
// administer here, and those that are refused with a reason.
func administrationCommands() []*command {
	return []*command{
		onConn("debug", -2, "server", cmdDebug, "Sleeps, if that is allowed."),
		aclCommands(),
		container("module", "server", "There are no modules.", nil,
			onConn("module|list", 2, "", replyEmpty, "Is empty."),
			helpOf("module", "LIST", "    Return a list of loaded modules.")),
		onConn("monitor", 1, "server", cmdMonitor, "Shows the commands of this gateway's clients."),
		onConn("time", 1, "server", cmdTime, "Returns the gateway's time."),
		onConn("wait", 3, "generic", cmdWait, "Returns 0 at once: a write is on all replicas before its reply."),
		onConn("role", 1, "server", func(_ *conn, w *resp.Writer, _ [][]byte) error {
			w.Array(3)
			w.BulkString("master")
			w.Int(0)
			w.Array(0)
			return nil
		}, "Returns master: every gateway takes writes."),
		onConn("lolwut", -1, "server", cmdLolwut, "Says who is here."),
		onConn("lastsave", 1, "server", func(c *conn, w *resp.Writer, _ [][]byte) error {
			w.Int(c.g.started.Unix())
			return nil
		}, "Returns the gateway's start: nothing is saved."),
	}
}

// The number of a command is its place here; the metrics count by it.
func init() {
	all := slices.Concat(valueCommands(), inspectionCommands(), hashCommands(), setCommands(), keyspaceCommands(),
		connectionCommands(), describingCommands(),
		administrationCommands(), slowLogCommands(), sortedSetCommands(), geoCommands(), listCommands(),
		scriptCommands(), functionCommands(), bitCommands(), hyperLogLogCommands(),
		sortCommands(), pubsubCommands(), streamCommands(), clusterCommands())
	for _, c := range all {
		commands[c.name] = c
		register(c)
		for _, s := range sortedSubs(c) {
			register(s)
		}
	}
	for _, f := range notServed {
		c := &command{name: f.name, arity: f.arity, instead: f.instead}
		commands[f.name] = c
		register(c)
	}
	nameEvents(commands)
	catalog = newCatalog()
	register(unknown)
}

// sortedSubs is in the order of names, since that of a map changes.
func sortedSubs(c *command) []*command {
	var subs []*command
	for _, s := range c.sub {
		subs = append(subs, s)
	}
	slices.SortFunc(subs, func(a, b *command) int { return strings.Compare(a.name, b.name) })
	return subs
}

// keysOf says which arguments are keys, for COMMAND and its users; the command itself finds them
// without that.
func keysOf(c *command, first, last, step int) *command {
	c.first, c.last, c.step = first, last, step
	return c
}

// inSteps marks what changes keys one after the other, which cannot be undone.
func inSteps(c *command) *command { c.steps, c.write = true, true; return c }

// These set one flag each; see command.
func atOnce(c *command) *command     { c.noQueue = true; return c }
func beforeAuth(c *command) *command { c.noAuth = true; return c }
func swiftly(c *command) *command    { c.swift = true; return c }

// notServed are commands that Redis has and kvd has not: name and arity, as of Redis 7, and what serves their purpose
// here.
var notServed = []struct {
	name    string
	arity   int
	instead string
}{
	{"migrate", -6, "kvctl mirror copies a namespace to another store, and DUMP and RESTORE a key to another server"},
	{"save", 1, toFiles},
	{"bgsave", -1, toFiles},
	{"bgrewriteaof", 1, toFiles},
	{"sync", 1, toFollow},
	{"psync", -3, toFollow},
	{"replconf", -1, toFollow},
	{"replicaof", 3, toCopy},
	{"slaveof", 3, toCopy},
	{"failover", -1, "every gateway takes writes, and memory nodes take over from each other by themselves"},
	{"shutdown", -1, "end its process, with SIGTERM, and nothing of the store ends with it"},
	{"waitaof", 4, "nothing is written to disk, and a write is on all copies when it is answered"},
}

const (
	toFiles = "a gateway keeps nothing that it could save; kvctl export writes a namespace to files, and kvctl " +
		"import reads them"
	toFollow = "a gateway has nothing to replicate; kvctl export writes a namespace to files, and kvctl mirror keeps " +
		"another store up to date"
	toCopy = "a gateway has nothing to replicate; memory nodes keep the copies (kvctl namespace set NAME " +
		"--replicas N), and kvctl mirror copies from and to another store"
)

func (cmd *command) notHere() string {
	if cmd.instead == "" {
		return "ERR kvd does not support '" + cmd.name + "'"
	}
	return "ERR kvd does not support '" + cmd.name + "': " + cmd.instead
}
