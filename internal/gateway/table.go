package gateway

import (
	"slices"
	"strings"

	"github.com/kvd-project/kvd/internal/redis/acl"
	"github.com/kvd-project/kvd/internal/redis/exec"
	"github.com/kvd-project/kvd/internal/redis/resp"
	"github.com/kvd-project/kvd/internal/redis/spec"
	"github.com/kvd-project/kvd/internal/redis/values"
)

// A connFunc is a command that is not on keys: it appends its one reply, unless that is the error.
type connFunc func(c *conn, w *resp.Writer, args [][]byte) error

// performers are connFuncs, by their commands. Each is performed by itself, between two batches, and may use the
// connection and its client as it likes.
type performers map[spec.ID]connFunc

// command is a command with what performs it. Commands are made at the program's start and do not change, so any
// goroutine may look at them. They are compared by their pointers.
type command struct {
	spec.Command

	// At most one of these is set, and performs the command; with none, kvd does not serve it.
	key   values.KeyFunc                               // on one key; then Kind, Fold and Put say how to batch it
	conn  connFunc                                     // by itself
	batch func(c *conn, b *batch, args [][]byte) error // EXEC
	keys  values.SeveralFunc                           // on several keys at once
	part  partFunc                                     // beside key: which bytes of a long value it needs; nil: all
	// block is set beside keys if the command may wait; it reads the arguments.
	block values.WaitFunc

	sub map[string]*command // by name without the container's

	// These are of the description, as package acl and events have them.
	categories acl.Category
	inDatabase bool       // works in the database of SELECT
	event      exec.Event // of a key that it changes
}

// partFunc says which bytes of a value of n bytes a command needs, of which there may be none.
type partFunc func(args [][]byte, n int) (from, to int)

// served reports whether kvd performs the command; others have a name so that they can be
// refused in words.
func (cmd *command) served() bool {
	return cmd.key != nil || cmd.keys != nil || cmd.conn != nil || cmd.batch != nil || cmd.sub != nil
}

// mistaken reports whether the command does not take so many arguments, of which its name is one or two.
func (cmd *command) mistaken(n int) bool { return cmd.Arity > 0 && n != cmd.Arity || n < -cmd.Arity }

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
	unknown = &command{Command: spec.Command{Name: "unknown", ID: spec.ID(len(spec.Table)), Doc: &spec.Doc{}}}
	// getCommand is GET, which loops know.
	getCommand *command
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

// The number of a command is its ID; the metrics count by it.
func init() {
	conns := make(performers)
	for _, some := range []performers{keyspaceCommands(), connectionCommands(), describingCommands(),
		administrationCommands(), aclCommands(), clientCommands(), slowLogCommands(), scriptCommands(),
		pubsubCommands(), clusterCommands()} {
		for id, f := range some {
			conns[id] = f
		}
	}
	several := stagedFuncs()
	for i := range spec.Table {
		c := newCommand(&spec.Table[i])
		switch {
		case c.conn != nil:
		case several[c.ID] != nil:
			c.keys = onStaged(several[c.ID])
		default:
			c.conn = conns[c.ID]
		}
		if container, sub, is := strings.Cut(c.Name, "|"); is {
			in := commands[container]
			if in.sub == nil {
				in.sub = make(map[string]*command)
			}
			in.sub[sub] = c
		} else {
			commands[c.Name] = c
		}
		commandsByID = append(commandsByID, c)
	}
	commandsByID[spec.CmdExec].batch = cmdExec
	getCommand = commandsByID[spec.CmdGet]
	catalog = newCatalog()
	commandsByID = append(commandsByID, unknown)
}

// newCommand makes a command of its description, with what package values has for it.
func newCommand(d *spec.Command) *command {
	c := &command{Command: *d, key: values.OneKey[d.Name], keys: values.SeveralKeys[d.Name],
		block: values.WaitingFor[d.Name]}
	c.part = [...]partFunc{spec.PartLength: values.LengthPart, spec.PartRange: values.RangePart,
		spec.PartBit: values.BitPart}[d.Part]
	c.inDatabase = d.First > 0 || d.Counted > 0 || d.Finder > 0 || d.Is(spec.WholeDatabase)
	if d.Event.Class != 0 {
		c.event.Class, _ = values.ParseEvents([]byte{d.Event.Class})
		c.event.Name = d.Event.Name
	}
	switch {
	case c.block != nil:
		c.keys = onStaged(tryOnce(c))
	case d.Doc.Help != nil:
		c.conn = func(_ *conn, w *resp.Writer, _ [][]byte) error {
			container, _, _ := strings.Cut(d.Name, "|")
			writeHelp(w, container, d.Doc.Help...)
			return nil
		}
	}
	return c
}

// writeHelp is the subcommand HELP, in Redis's form.
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

// keyspaceCommands read the index, or tell how values are kept. None of them joins a batch.
func keyspaceCommands() performers {
	return performers{
		spec.CmdScan:           cmdScan,
		spec.CmdKeys:           cmdKeys,
		spec.CmdRandomkey:      cmdRandomKey,
		spec.CmdDbsize:         cmdDBSize,
		spec.CmdFlushdb:        cmdFlushDB,
		spec.CmdFlushall:       cmdFlushAll,
		spec.CmdSwapdb:         cmdSwapDB,
		spec.CmdObjectIdletime: cmdIdleTime,
		spec.CmdMemoryDoctor: func(_ *conn, w *resp.Writer, _ [][]byte) error {
			w.Verbatim("txt", "Values are in the memory nodes: see kvctl.")
			return nil
		},
		spec.CmdMemoryStats: cmdMemoryStats,
		spec.CmdMemoryMallocStats: func(_ *conn, w *resp.Writer, _ [][]byte) error {
			w.BulkString("Stats not supported for the current allocator")
			return nil
		},
		spec.CmdMemoryPurge: replyOK,
	}
}

// connectionCommands are about a transaction or the connection itself.
func connectionCommands() performers {
	return performers{
		spec.CmdMulti:   cmdMulti,
		spec.CmdDiscard: cmdDiscard,
		spec.CmdWatch:   cmdWatch,
		spec.CmdUnwatch: cmdUnwatch,
		spec.CmdPing:    cmdPing,
		spec.CmdEcho:    cmdEcho,
		spec.CmdQuit:    cmdQuit,
		spec.CmdReset:   cmdReset,
		spec.CmdAuth:    cmdAuth,
		spec.CmdHello:   cmdHello,
		spec.CmdSelect:  cmdSelect,
	}
}

// describingCommands tell clients and tools what they talk to.
func describingCommands() performers {
	return performers{
		spec.CmdCommand:                cmdCommand,
		spec.CmdCommandCount:           cmdCommandCount,
		spec.CmdCommandInfo:            cmdCommandInfo,
		spec.CmdCommandDocs:            cmdCommandDocs,
		spec.CmdCommandList:            cmdCommandList,
		spec.CmdCommandGetkeys:         cmdCommandGetKeys,
		spec.CmdCommandGetkeysandflags: cmdCommandGetKeysAndFlags,
		spec.CmdInfo:                   cmdInfo,
		spec.CmdConfigGet:              cmdConfigGet,
		spec.CmdConfigSet:              cmdConfigSet,
		spec.CmdConfigResetstat:        cmdConfigResetStat,
		spec.CmdConfigRewrite:          refuse("ERR The server is running without a config file"),
	}
}

// administrationCommands are those that tools of Redis call and expect to succeed, although there is nothing to
// administer here, and those that are refused with a reason.
func administrationCommands() performers {
	return performers{
		spec.CmdDebug:      cmdDebug,
		spec.CmdModuleList: replyEmpty,
		spec.CmdMonitor:    cmdMonitor,
		spec.CmdTime:       cmdTime,
		spec.CmdWait:       cmdWait,
		spec.CmdRole: func(_ *conn, w *resp.Writer, _ [][]byte) error {
			w.Array(3)
			w.BulkString("master")
			w.Int(0)
			w.Array(0)
			return nil
		},
		spec.CmdLolwut: cmdLolwut,
		spec.CmdLastsave: func(c *conn, w *resp.Writer, _ [][]byte) error {
			w.Int(c.g.started.Unix())
			return nil
		},
		spec.CmdPfselftest: replyOK,
	}
}

// sortedSubs is in the order of names, since that of a map changes.
func sortedSubs(c *command) []*command {
	var subs []*command
	for _, s := range c.sub {
		subs = append(subs, s)
	}
	slices.SortFunc(subs, func(a, b *command) int { return strings.Compare(a.Name, b.Name) })
	return subs
}

// notHere is the reply to a command that kvd does not serve.
func (cmd *command) notHere() refusal {
	if cmd.Instead == "" {
		return refusal("ERR kvd does not support '" + cmd.Name + "'")
	}
	return refusal("ERR kvd does not support '" + cmd.Name + "': " + cmd.Instead)
}
