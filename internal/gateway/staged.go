package gateway

import (
	"bytes"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/luascript"
	"github.com/kvd-project/kvd/internal/redis/exec"
	"github.com/kvd-project/kvd/internal/redis/resp"
	"github.com/kvd-project/kvd/internal/redis/spec"
	"github.com/kvd-project/kvd/internal/redis/values"
)

// staged is what a command on several keys, an EXEC or a script works on: the keys as the store had them, with what
// has been done to them so far. Nothing is written until all of it has run, and then either everything or nothing is;
// if a key has changed meanwhile all of it runs again. So a function that works on a staged may run several times, and
// must have no other effects.
//
// A store that fails does so in the middle of somebody's function. That one need not look: the key counts as absent
// from there on, and what the function replies goes nowhere. Loops ask Failed. The goroutine of its connection uses it
// alone. Between two tries it is as it was before the first one, but for room, which only grows, and for what a
// script's time limit needs.
type staged struct {
	exec.Plan
	c    *conn
	does func(t *staged) // the function
	out  resp.Writer     // what it replies
	// mayWait: the function is a command that waits if it finds nothing. waited: it has done so.
	mayWait, waited bool
	// showing: somebody MONITORs.
	showing bool
	// scripted: it is a script that performs the command at hand.
	scripted bool

	scriptsEnd time.Time  // when scripts have run for long enough; zero: none has begun
	messages   []posted   // what scripts have published so far
	shown      shownLines // for MONITOR
	lookups    [2]uint64  // misses and hits

	// Memory that serves again.
	task luascript.Task // of the script that runs
	host scriptHost     // the same
}

// stagedPool keeps those of few keys, empty.
var stagedPool = sync.Pool{New: func() any { return new(staged) }}

// newStaged makes an empty one, which the caller frees.
func newStaged(c *conn) *staged {
	t := stagedPool.Get().(*staged)
	t.c = c
	t.Open(planHost{c}, &planLimits)
	if t.out.More == nil {
		t.out.More = func(n int) bool { return t.more(&t.out, n) }
		t.host.w.More = func(n int) bool { return t.more(&t.host.w, n) }
	}
	return t
}

// free gives back the memory of what has been read, and t, which nobody may use any more.
// A staged of many keys is left to the garbage collector, so that the pool stays small.
func (t *staged) free() {
	if !t.Close() {
		return
	}
	t.out.Reset(keepInto)
	t.host.w.Reset(keepInto)
	*t = staged{Plan: t.Plan, out: t.out, host: scriptHost{w: t.host.w}}
	stagedPool.Put(t)
}

// stagedName is a key's name as clients of a database have it, without the prefix that the store may have before it.
type stagedName = exec.KeyName

// A stagedFunc is a command that is more than a command on keys: it runs others, waits, or has libraries.
type stagedFunc func(t *staged, args [][]byte, w *resp.Writer) error

// onStaged makes a command on several keys of one.
func onStaged(f stagedFunc) values.SeveralFunc {
	return func(t values.Keys, args [][]byte, w *resp.Writer) error { return f(t.(*staged), args, w) }
}

// errLost gives up a transaction of which a watched key has changed. Nothing was done.
var errLost = errors.New("a watched key has changed")

// namesOf appends the keys that a command names. It leaves out those that the command is going to refuse.
// It is a guess at what the command will use: a key beyond it is read when it is asked for, at the price of a round
// trip.
func (g *Gateway) namesOf(dst []stagedName, cmd *command, db int, args [][]byte) []stagedName {
	for _, s := range both(cmd.keySpans(args)) {
		for i := s.First; s.First > 0 && i <= s.Last && len(dst) < client.MaxTxnKeys; i += s.Step {
			if badKey(&g.dbs[db], args[i]) == nil {
				n := stagedName{DB: db}
				if last := len(dst) - 1; last >= 0 && dst[last].Name == string(args[i]) {
					n.Name = dst[last].Name
				} else {
					n.Name = string(args[i])
				}
				dst = append(dst, n)
			}
		}
	}
	return dst
}

// These are of [values.Keys].

func (t *staged) DBIndex(b []byte) (db int, err error) { return t.c.dbIndex(b) }
func (t *staged) Waits() bool                          { return t.mayWait }

// in is the database that key takes names of.
func (t *staged) in() *database { return &t.c.g.dbs[t.DB] }

// require makes all of it fail if a watched key has changed.
// The comparison is with the version that t has read now, and the commit's condition with the same, so that nothing is
// missed in between.
func (t *staged) require(x watch) {
	t.KeyIn(x.DB, []byte(x.Name))
	if k := t.Find[x.stagedName]; t.Err == nil && (k.Version != x.version || x.touched()) {
		t.Err = errLost
	}
}

// run performs a command on keys, as a part of all of it.
// It is for commands with key or keys, from EXEC and from scripts as well as by themselves, whose arguments have been
// checked for their number and for the user's rights. It writes one reply. MGET and its like, which are atomic for each
// key alone elsewhere, are atomic as a whole here.
func (t *staged) run(cmd *command, args [][]byte, w *resp.Writer) {
	if t.showing && !t.scripted {
		t.shown.add(t, t.c.monitoredAs(), cmd, args)
	}
	if cmd.Writes() {
		defer t.ChargeChanges(len(args))
	}
	defer t.noteChanges(cmd, args, w)()
	values.WriteRefusal(w, t.perform(cmd, args, w))
}

// perform is run without what follows a command.
func (t *staged) perform(cmd *command, args [][]byte, w *resp.Writer) error {
	if cmd.keys != nil {
		return cmd.keys(t, args, w)
	}
	if cmd.Fold == spec.Single {
		if err := badKey(t.in(), args[cmd.First]); err != nil {
			return err
		}
		k := t.Key(args[cmd.First])
		k.Count, k.Also = 0, ""
		t.noteLookup(cmd, k)
		return cmd.key(k, args, w)
	}
	if cmd.Fold == spec.SetAll && len(args)%2 == 0 {
		return wrongArgs(cmd)
	}
	var names [][]byte
	for i := 1; i < len(args); i += cmd.Step {
		if err := badKey(t.in(), args[i]); err != nil {
			return err
		}
		names = append(names, args[i])
	}
	t.Load(names...)
	if cmd.Fold == spec.List {
		w.Array(len(names))
	}
	sum := int64(0)
	for i, name := range names {
		k := t.Key(name)
		k.Count = 0
		t.noteLookup(cmd, k)
		values.WriteRefusal(w, cmd.key(k, args[1+i*cmd.Step:][:cmd.Step], w))
		sum += k.Count
	}
	switch cmd.Fold {
	case spec.SetAll:
		w.OK()
	case spec.List:
	default:
		w.Int(sum)
	}
	return nil
}

// noteLookup counts a hit or a miss, if the command is one that looks for a key.
func (t *staged) noteLookup(cmd *command, k *values.Key) {
	if cmd.Kind.Looks() {
		t.lookups[values.Bit(k.Present)]++
	}
}

// performStaged runs f until it has taken effect in one step; names are the keys that it is going to use, as far as
// that is known. The replies are in the staged's out; err says why nothing was done, or that it is not known. It is to
// be freed when the replies have been sent. began is about now.
func (c *conn) performStaged(began time.Time, names []stagedName, way exec.Way, f func(t *staged)) (t *staged,
	err error) {
	t = newStaged(c)
	t.showing = c.g.heed.Load()&heedMonitor != 0
	defer t.tellMonitors()
	t.does = f
	err = t.Perform(began, c.db, names, way, (*stagedCommands)(t))
	if err == nil && t.waited && c.link.PeerGone() && t.putBack() {
		return t, errGone
	}
	t.tookEffect(err)
	return t, err
}

// tookEffect tells all who want to hear of it that what is staged has taken effect, unless there is an error.
func (t *staged) tookEffect(err error) {
	switch {
	case err == nil:
		t.announce()
		t.tellOfWrites()
		t.conclude(true)
		t.c.g.m.noteLookups(t.lookups)
	case errors.Is(err, client.ErrUnknownOutcome):
		// Nobody may be told of a change that may not have happened. Caches are told all the same: tellOfWrites goes by
		// the keys for them.
		t.Changes = nil
		t.tellOfWrites()
		t.conclude(false)
	}
}

// stagedCommands are a staged as its Plan performs it.
type stagedCommands staged

// Begin is of exec.Commands.
func (x *stagedCommands) Begin() {
	t := (*staged)(x)
	t.messages, t.lookups = t.messages[:0], [2]uint64{}
	t.shown.again()
	t.out.Reset(keepReply)
	t.out.Proto, t.out.Errors = t.c.proto, 0
	t.out.Limit, t.host.w.Limit = oneLimit, oneLimit // of what was taken for them, Begin has given back
}

// Run is of exec.Commands. Memory for numbers and the like is taken when they are there.
func (x *stagedCommands) Run() {
	t := (*staged)(x)
	if t.does(t); t.Err == nil && t.out.Len() > t.out.Limit {
		t.more(&t.out, t.out.Len())
	}
}

// more takes memory for n bytes that are written to w, twice, for they are copied or grow. Replies for which there is
// none are not made: a transaction of few bytes may ask for a long value many times.
func (t *staged) more(w *resp.Writer, n int) bool {
	n = (n + oneLimit - 1) / oneLimit * oneLimit
	if !t.Take(2 * int64(n-w.Limit)) {
		return false
	}
	w.Limit = n
	return true
}

func (c *conn) stagedError(err error) string {
	var r values.ResultError
	switch {
	case errors.As(err, &r):
		return string(r)
	case errors.Is(err, exec.ErrDatabases), errors.Is(err, exec.ErrAgain), errors.Is(err, exec.ErrManyKeys):
		return "ERR kvd: " + err.Error()
	case errors.Is(err, client.ErrTxnTooLarge), errors.Is(err, client.ErrTxnContended):
		return "ERR kvd: " + brief(err) + "; nothing was done"
	}
	return c.g.storeError(err)
}

// performSeveral performs a command on several keys by itself.
// It writes one reply to w, whether it went well or not.
func (c *conn) performSeveral(cmd *command, w *resp.Writer, args [][]byte, began time.Time) {
	t, err := c.performStaged(began, c.g.namesOf(nil, cmd, c.db, args), exec.Look, func(t *staged) {
		t.Moves = cmd.ID == spec.CmdMove
		t.run(cmd, args, &t.out)
	})
	defer t.free()
	if err != nil {
		w.Error(c.stagedError(err))
		return
	}
	w.Raw(t.out.Bytes())
	w.Errors += t.out.Errors
}

// execMemory is what a batch keeps for the next EXEC, empty.
type execMemory struct {
	names   []stagedName
	replies []execReply
}

// execReply is the reply of a queued command: why it is refused, or a part of the staged's out. That may be moved while
// it grows, so the part is found by its place.
type execReply struct {
	lo, hi  int
	refused error
}

// keepQueue is of how many commands, and of how many keys, the memory of an EXEC serves again.
const keepQueue = 16

// forget drops what belongs to a client, and memory that is rarely needed.
func (m *execMemory) forget() {
	clear(m.names)
	clear(m.replies)
	if cap(m.names) > keepQueue {
		m.names = nil
	}
	if cap(m.replies) > keepQueue {
		m.replies = nil
	}
}

// execStaged performs a transaction on several keys. Commands on none are performed at their turn when the replies are
// written, once: nothing else of it runs then.
func (c *conn) execStaged(b *batch, queue []queued, watched []watch) error {
	w := &b.w
	b.exec.replies = slices.Grow(b.exec.replies[:0], len(queue))[:len(queue)]
	b.exec.names = c.namesOfQueue(b.exec.names[:0], queue, watched)
	defer b.exec.forget()
	replies, names := b.exec.replies, b.exec.names
	late := c.tracksInside(queue)
	c.tracksLate = late != nil
	t, err := c.performStaged(b.start, names, c.wayOf(names, queue, watched), func(t *staged) {
		for _, x := range watched {
			t.require(x)
		}
		if t.Failed() {
			return
		}
		for i, q := range queue {
			if t.Failed() {
				return
			}
			replies[i] = execReply{lo: t.out.Len()}
			replies[i].refused = c.refusalAtExec(q.cmd, q.args, t.DB)
			switch {
			case replies[i].refused != nil:
			case q.cmd.key != nil || q.cmd.keys != nil:
				t.run(q.cmd, q.args, &t.out)
			case q.cmd.ID == spec.CmdSelect:
				t.DB = c.selected(t.DB, q.args)
			case q.cmd.ID == spec.CmdHello:
				t.out.Proto = protocolBehind(q.args, t.out.Proto)
			}
			if t.showing && replies[i].refused == nil && q.cmd.key == nil && q.cmd.keys == nil {
				t.shown.add(t, c.monitoredAs(), q.cmd, q.args)
			}
			replies[i].hi = t.out.Len()
		}
	})
	c.tracksLate = false
	defer t.free()
	switch {
	case errors.Is(err, errLost):
		w.NullArray()
		return nil
	case err != nil:
		w.Error(c.stagedError(err))
		return nil
	}
	w.Array(len(queue))
	for i, q := range queue {
		start, errs := w.Len(), w.Errors
		switch r := replies[i]; {
		case r.refused != nil:
			values.WriteRefusal(w, r.refused)
		case q.cmd.key != nil || q.cmd.keys != nil:
			w.Raw(t.out.Bytes()[r.lo:r.hi])
			if bytes.HasPrefix(t.out.Bytes()[r.lo:r.hi], []byte("-")) {
				w.Errors++
			}
		default:
			values.WriteRefusal(w, q.cmd.conn(c, w, q.args))
		}
		x := ended{cmd: q.cmd, args: q.args, start: start, errs: errs, took: time.Since(b.start), shown: true,
			inExec: true}
		if replies[i].refused != nil {
			x.args, x.refused = nil, true
		} else {
			c.performedLate(late, t, q)
		}
		if err := b.finish(&x); err != nil {
			return err
		}
	}
	b.countAlike()
	c.enterLate(late)
	return nil
}

// namesOfQueue appends the keys that a transaction names, and those that are watched.
func (c *conn) namesOfQueue(names []stagedName, queue []queued, watched []watch) []stagedName {
	for _, x := range watched {
		names = append(names, x.stagedName)
	}
	db := c.db
	for _, q := range queue {
		if names = c.g.namesOf(names, q.cmd, db, q.args); q.cmd.ID == spec.CmdSelect {
			db = c.selected(db, q.args)
		}
	}
	return names
}

// selected is the database behind a SELECT in database db.
// A number that is refused leaves the database as it is; the SELECT says so when its reply is due.
func (c *conn) selected(db int, args [][]byte) int {
	if n, err := c.dbIndex(args[1]); err == nil {
		return n
	}
	return db
}
