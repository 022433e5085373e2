package gateway

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvd-project/kvd/internal/luascript"
	"github.com/kvd-project/kvd/internal/redis/acl"
	"github.com/kvd-project/kvd/internal/redis/exec"
	"github.com/kvd-project/kvd/internal/redis/resp"
	"github.com/kvd-project/kvd/internal/redis/spec"
	"github.com/kvd-project/kvd/internal/redis/values"
)

// Scripts run over a staged: redis.call finds a command in the table and works on the keys as the script has left them.
// So nothing of a script that fails, is killed or runs out of its limits has happened, and one that succeeds takes
// effect in one step. No other connection waits for a script, and SCRIPT KILL, which in Redis comes too late for one
// that has written, always can.

// scriptCacheBytes is what scripts are kept in, see luascript.NewCache. A client whose script is gone gets NOSCRIPT and
// sends it again.
const scriptCacheBytes = 32 << 20

type scripting struct {
	pool  luascript.Pool   // of interpreters, for all connections
	cache *luascript.Cache // by SHA-1; of this gateway alone
	// groupTime is how long a group of scripts may run before it takes effect: a long script does not delay the one
	// behind it by more.
	groupTime time.Duration
	// watched says that the watchdog is going to look at the scripts that run when mu.next has come, or earlier.
	watched atomic.Bool
	mu      struct {
		sync.Mutex
		watchdog *time.Timer // nil before the first script
		next     time.Time   // when watchdog fires, while watched
	}
}

// runningScript is a script, or a call of a function, that a connection runs: it is in its mu, which those who stop it
// hold. A script may be ended by any goroutine that holds conn.mu: by the watchdog, SCRIPT KILL, or Close. It sees that
// at its next step, and nothing of it has happened then.
type runningScript struct {
	task         *luascript.Task // nil: none
	since, until time.Time       // began, and is to be ended
	name         string          // a script's SHA-1, or a function's name
	args         [][]byte        // of the command
	db           int             // that it began in
}

// scriptCommands are about scripts, and run none.
func scriptCommands() performers {
	return performers{
		spec.CmdScriptExists: cmdScriptExists,
		spec.CmdScriptFlush:  cmdScriptFlush,
		spec.CmdScriptKill:   cmdScriptKill,
		spec.CmdScriptDebug:  cmdScriptDebug,
		spec.CmdFunctionKill: func(c *conn, w *resp.Writer, args [][]byte) error {
			return c.killScript(w, args, true)
		},
	}
}

// stagedFuncs run other commands, or work on what the gateways of a store share.
func stagedFuncs() map[spec.ID]stagedFunc {
	return map[spec.ID]stagedFunc{
		spec.CmdEval:            evaluator(false, false),
		spec.CmdEvalsha:         evaluator(true, false),
		spec.CmdEvalRo:          evaluator(false, true),
		spec.CmdEvalshaRo:       evaluator(true, true),
		spec.CmdScriptLoad:      loadScript,
		spec.CmdFcall:           functionCaller(false),
		spec.CmdFcallRo:         functionCaller(true),
		spec.CmdFunctionLoad:    functionLoad,
		spec.CmdFunctionDelete:  functionDelete,
		spec.CmdFunctionFlush:   functionFlush,
		spec.CmdFunctionRestore: functionRestore,
		spec.CmdFunctionList:    functionList,
		spec.CmdFunctionDump:    functionDump,
		spec.CmdFunctionStats:   functionStats,
	}
}

const (
	errNoScript     refusal = "NOSCRIPT No matching script. Please use EVAL."
	errNotScripted  refusal = "ERR This Redis command is not allowed from script"
	errScriptWrites refusal = "ERR Write commands are not allowed from read-only scripts."
	errScriptFlag   refusal = "ERR Can not execute a script with write flag using *_ro command."
)

// evaluator is EVAL and those like it.
// named: the argument is a SHA-1 and not the script itself. Errors of the script are its reply, and undo what it did.
func evaluator(named, readOnly bool) stagedFunc {
	return func(t *staged, args [][]byte, w *resp.Writer) error {
		if named && len(args[1]) != 40 {
			return errNoScript
		}
		n, err := keysOfScript(args, values.ErrNotInt)
		if err != nil {
			return err
		}
		prog, err := t.c.g.scripts.program(args[1], named)
		switch {
		case err != nil:
			return err
		case readOnly && prog.MayWrite:
			return errScriptFlag
		}
		t.runScript(runningScript{name: prog.SHA, args: args}, false, readOnly || prog.NoWrites,
			func(task *luascript.Task) bool {
				return t.c.g.scripts.pool.Run(task, prog, args[3:3+n], args[3+n:], w)
			})
		if t.Err == exec.ErrAlone {
			prog.Alone.Store(true)
		}
		return nil
	}
}

// keysOfScript is how many of the arguments behind the third are keys.
// notInt is the error reply for what is no number, which differs between EVAL and FCALL.
func keysOfScript(args [][]byte, notInt refusal) (n int64, err error) {
	n, ok := resp.ParseInt(args[2])
	switch {
	case !ok:
		return 0, notInt
	case n > int64(len(args)-3):
		return 0, refusal("ERR Number of keys can't be greater than number of args")
	case n < 0:
		return 0, refusal("ERR Number of keys can't be negative")
	}
	return n, nil
}

// program finds a script, or compiles it.
// It may be called concurrently; two that compile the same text at a time both succeed.
func (s *scripting) program(text []byte, bySHA bool) (prog *luascript.Program, err error) {
	if bySHA {
		if prog = s.cache.Find(text); prog == nil {
			return nil, errNoScript
		}
		return prog, nil
	}
	if prog = s.cache.Find([]byte(luascript.SHA(text))); prog != nil {
		return prog, nil
	}
	if prog, err = luascript.Compile(text); err != nil {
		return nil, refusal(err.Error())
	}
	s.cache.Add(prog)
	return prog, nil
}

// runScript runs a script, or calls a function, over t, as often as t is made anew; all of that together has
// Options.ScriptTimeout. run reports whether the script came to its end. The keys of a failed script are as before it
// from here on. It is done here, and not by the caller, since in a transaction the commands before and behind it take
// effect all the same. The database that it selected is its own, too, as in Redis.
func (t *staged) runScript(r runningScript, function, readOnly bool, run func(*luascript.Task) bool) {
	g := t.c.g
	r.since = time.Now()
	first := t.scriptsEnd.IsZero()
	if first {
		t.scriptsEnd = r.since.Add(g.o.ScriptTimeout)
	}
	t.host.t, t.host.readOnly, t.host.now = t, readOnly, time.Time{}
	t.task = luascript.Task{Host: &t.host, Memory: int64(g.o.ScriptMemory), Function: function}
	r.until, r.task, r.db = t.scriptsEnd, &t.task, t.DB
	t.c.setScript(r)
	if !first || !g.scripts.watched.Load() {
		g.watchScripts(r.until)
	}
	db, before, sent := t.DB, t.Snapshot(), len(t.messages)
	// The snapshot was made for this case alone: a script that fails half way has changed keys already.
	if !run(&t.task) {
		t.Undo(before)
		t.messages = t.messages[:sent]
	}
	t.DB = db
	t.c.setScript(runningScript{})
}

// setScript says which script the connection runs from now on.
// The zero value says that none runs. From here on others may stop it.
func (c *conn) setScript(r runningScript) {
	c.mu.Lock()
	c.mu.script = r
	c.mu.Unlock()
}

// watchScripts has the watchdog look at the scripts at that time at the latest. A timer for each script would cost more
// than a short one. An earlier wake-up that finds nothing to end costs less than a lock for each script.
func (g *Gateway) watchScripts(until time.Time) {
	s := &g.scripts
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.watched.Load() && !until.Before(s.mu.next) {
		return
	}
	s.mu.next = until
	s.watched.Store(true)
	if s.mu.watchdog == nil {
		s.mu.watchdog = time.AfterFunc(time.Until(until), g.endLateScripts)
	} else {
		s.mu.watchdog.Reset(time.Until(until))
	}
}

// endLateScripts ends the scripts whose time is over. A script that begins meanwhile is either looked at here, or finds
// that nobody watches; its time is not over before that of those that began earlier.
func (g *Gateway) endLateScripts() {
	g.scripts.watched.Store(false)
	now := time.Now()
	var next time.Time
	g.eachScript(func(r *runningScript) {
		if !now.Before(r.until) {
			r.task.TimeOut()
		} else if next.IsZero() || r.until.Before(next) {
			next = r.until
		}
	})
	if !next.IsZero() {
		g.watchScripts(next)
	}
}

// eachScript calls f with the scripts that run, none of which can end meanwhile. f must not wait.
func (g *Gateway) eachScript(f func(r *runningScript)) {
	g.each(func(c *conn) {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.mu.script.task != nil {
			f(&c.mu.script)
		}
	})
}

// withOldest calls f with the script that began first, or with the function if that is asked for; false if none is
// running. Those in databases where the connection's user may not perform the command, whose arguments args are, are
// none to him. f must not wait. It looks twice, since f must be called with the one connection's mu held and the oldest
// is known only when all have been seen.
func (c *conn) withOldest(args [][]byte, function bool, f func(*runningScript)) bool {
	g, cmd := c.g, lookupCommand(args)
	is := func(r *runningScript) bool { return r.task.Function == function && c.mayDoIn(cmd, args, r.db) }
	for {
		var since time.Time
		g.eachScript(func(r *runningScript) {
			if is(r) && (since.IsZero() || r.since.Before(since)) {
				since = r.since
			}
		})
		if since.IsZero() {
			return false
		}
		found := false
		g.eachScript(func(r *runningScript) {
			if !found && is(r) && r.since.Equal(since) {
				found = true
				f(r)
			}
		})
		if found { // else it has just ended
			return true
		}
	}
}

func (g *Gateway) killScripts() { g.eachScript(func(r *runningScript) { r.task.Kill() }) }

// scriptHost performs a script's commands on a staged.
// A staged has one, for the script at hand. Only the script's goroutine, which is the connection's, uses it.
type scriptHost struct {
	t        *staged
	readOnly bool        // its commands must not write
	w        resp.Writer // the reply of its last command
	now      time.Time   // what TIME says, for all of the script
}

// Call is of luascript.Host.
// The reply is in RESP of that version, and good until the next Call. err is one that the script can catch by
// redis.pcall; an error of the store is none of these: it ends the script (Stopped).
func (h *scriptHost) Call(args [][]byte, proto int) (reply []byte, err error) {
	t := h.t
	cmd, err := h.find(args)
	if err != nil {
		return nil, err
	}
	if t.showing {
		defer func() { t.shown.add(t, "lua", cmd, args) }()
	}
	h.w.Reset(keepReply)
	h.w.Proto = proto
	switch {
	case cmd.key != nil || cmd.keys != nil:
		t.scripted = true
		t.run(cmd, args, &h.w)
		t.scripted = false
	case cmd.ID == spec.CmdSelect:
		db, err := t.c.dbIndex(args[1])
		if err != nil {
			return nil, err
		}
		t.DB = db
		h.w.OK()
	case cmd.Channels == spec.ChannelsFirst:
		t.publish(cmd.ID == spec.CmdSpublish, args[1], args[2], &h.w)
	case cmd.ID == spec.CmdTime:
		if h.now.IsZero() {
			h.now = time.Now()
		}
		writeTime(&h.w, h.now)
	case t.Lone: // it might see the store without what the scripts before it have done
		t.NeedsMore()
	default:
		c := t.c
		db := c.db
		// Such commands look at the connection for their database, and the script has one of its own.
		c.use(t.DB)
		values.WriteRefusal(&h.w, cmd.conn(c, &h.w, args))
		c.use(db)
	}
	return h.w.Bytes(), nil
}

// find finds a command that the script may perform, in the order of Redis's checks.
// Rights are the user's, in the database that the script has selected, and what is refused is in ACL LOG.
func (h *scriptHost) find(args [][]byte) (cmd *command, err error) {
	if cmd = lookupCommand(args); cmd == nil {
		return nil, refusal("ERR Unknown Redis command called from script")
	}
	switch {
	case cmd.mistaken(len(args)):
		return nil, refusal("ERR Wrong number of args calling Redis command from script")
	case !cmd.served():
		return nil, cmd.notHere()
	case cmd.Has(spec.FlagNoscript), cmd.Is(spec.NotInScripts), cmd.batch != nil:
		return nil, errNotScripted
	case cmd.Is(spec.InSteps):
		return nil, refusal("ERR kvd: '" + cmd.Name + "' cannot be undone if the script fails, so scripts may not " +
			"use it")
	}
	switch h.t.c.denialIn(cmd, args, h.t.DB, "lua") {
	case acl.Allowed:
	case acl.DeniedCommand:
		return nil, refusal("ERR The user executing the script can't run this command or subcommand")
	case acl.DeniedDatabase:
		return nil, refusal("ERR The user executing the script can't access this database")
	case acl.DeniedChannel:
		return nil, refusal("ERR The user executing the script can't publish to the channel mentioned in the command")
	default:
		return nil, refusal("ERR The user executing the script can't access at least one of the keys mentioned in " +
			"the command arguments")
	}
	if h.readOnly && (cmd.Writes() || cmd.Channels == spec.ChannelsFirst) {
		return nil, errScriptWrites
	}
	return cmd, nil
}

func lookupCommand(args [][]byte) *command {
	cmd := find(args[0])
	if cmd != nil && cmd.sub != nil && len(args) > 1 {
		return cmd.subcommand(args[1])
	}
	return cmd
}

// Permits is of luascript.Host.
// It is redis.acl_check_cmd, and records nothing.
func (h *scriptHost) Permits(args [][]byte) (permitted, known bool) {
	cmd := lookupCommand(args)
	if cmd == nil || cmd.mistaken(len(args)) {
		return false, cmd != nil
	}
	return h.t.c.permittedIn(cmd, args, h.t.DB), true
}

// Log is of luascript.Host. A script that runs again logs again.
// level is Redis's, from 0 (debug) to 3 (warning).
func (h *scriptHost) Log(level int, text string) {
	levels := [...]slog.Level{slog.LevelDebug, slog.LevelDebug, slog.LevelInfo, slog.LevelWarn}
	h.t.c.g.o.Logger.Log(context.Background(), levels[level], "script: "+values.Clip([]byte(text), 1024), "peer",
		h.t.c.remote)
}

// Reserve is of luascript.Host: the memory is out of the connection's share until its reply is written.
func (h *scriptHost) Reserve(n int64) error {
	h.t.Take(n)
	return h.t.Err
}

// Stopped is of luascript.Host.
// The script ends at its next step then, and cannot catch it.
func (h *scriptHost) Stopped() bool { return h.t.Failed() }

// loadScript is SCRIPT LOAD. It is staged so that it happens before the EVALSHA behind it in a transaction.
func loadScript(t *staged, args [][]byte, w *resp.Writer) error {
	prog, err := t.c.g.scripts.program(args[2], false)
	if err != nil {
		return err
	}
	w.BulkString(prog.SHA)
	return nil
}

// cmdScriptExists tells of this gateway: another one may not have the script, and a client has to expect NOSCRIPT in
// any case.
func cmdScriptExists(c *conn, w *resp.Writer, args [][]byte) error {
	w.Array(len(args) - 2)
	for _, sha := range args[2:] {
		n := int64(0)
		if c.g.scripts.cache.Find(sha) != nil {
			n = 1
		}
		w.Int(n)
	}
	return nil
}

// cmdScriptFlush forgets the scripts of this gateway. Those that run go on, and SYNC and ASYNC are the same: there is
// nothing to wait for.
func cmdScriptFlush(c *conn, w *resp.Writer, args [][]byte) error {
	if p := values.OptionsOf(args[2:]); p.Left() > 1 || p.More() && !p.Flag("sync") && !p.Flag("async") {
		return refusal("ERR SCRIPT FLUSH only support SYNC|ASYNC option")
	}
	c.g.scripts.cache.Clear()
	w.OK()
	return nil
}

// cmdScriptKill is of this gateway's scripts. Unlike in Redis it also ends one that has written, since nothing of that
// is in the store yet.
func cmdScriptKill(c *conn, w *resp.Writer, args [][]byte) error { return c.killScript(w, args, false) }

// killScript ends the script, or the function, that began first.
// OK means that it was told to end; it may have come to its end just before, and then takes effect.
func (c *conn) killScript(w *resp.Writer, args [][]byte, function bool) error {
	if !c.withOldest(args, function, func(r *runningScript) { r.task.Kill() }) {
		return refusal("NOTBUSY No scripts in execution right now.")
	}
	w.OK()
	return nil
}

// cmdScriptDebug is refused in a transaction whatever it asks for, as in Redis.
func cmdScriptDebug(c *conn, w *resp.Writer, args [][]byte) error {
	switch p := values.OptionsOf(args[2:]); {
	case c.inTx.Load() >= 0:
		return refusal("ERR SCRIPT DEBUG must be called outside a pipeline")
	case p.Flag("no"):
		w.OK()
	case p.Flag("yes"), p.Flag("sync"):
		return refusal("ERR kvd: there is no debugger for scripts")
	default:
		return refusal("ERR Use SCRIPT DEBUG YES/SYNC/NO")
	}
	return nil
}

type posted struct {
	shard            bool // SPUBLISH
	channel, payload []byte
}

// messageCost is about what a message takes besides its bytes.
const messageCost = 64

// publish is PUBLISH and SPUBLISH of a script: the message goes out when the script's effects are there, once, however
// often the script runs. The reply counts those who listen at this gateway now. channel and payload are kept until
// then; they are the Host's (luascript.Host). Memory for them is out of the share.
func (t *staged) publish(shard bool, channel, payload []byte, w *resp.Writer) {
	if t.Take(int64(messageCost + len(channel) + len(payload))) {
		t.messages = append(t.messages, posted{shard, channel, payload})
	}
	w.Int(int64(t.c.g.hub.Receivers(shard, channel)))
}

// conclude does what had to wait for the store's answer; applied is false if it is not known whether all of it has
// taken effect. It is called once, behind the commit. A message of a script whose outcome is unknown is not sent:
// nobody could take it back.
func (t *staged) conclude(applied bool) {
	if k := t.Find[librariesName]; k != nil && k.Changed {
		t.c.g.functions.changes.Add(1)
	}
	if !applied {
		return
	}
	for _, m := range t.messages {
		t.c.g.publish(&t.c.box, m.shard, m.channel, m.payload)
	}
}
