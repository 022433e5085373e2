package gateway

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/resp"
)

// transaction is what MULTI and WATCH have said.
type transaction struct {
	queueing bool
	broken   bool // a command was refused: EXEC must fail
	queue    []queued
	bytes    int
	watched  []watch
}

// queued is a command that EXEC will perform. Its arguments are a copy, since those of the
// reader are overwritten by what comes next; the copy is paid for out of the connection's share.
type queued struct {
	cmd  *command
	args [][]byte // own
}

// watch is what a key was when it was watched. No two writes share a version; 0 is
// that of a key that does not exist.
type watch struct {
	db      int
	name    string
	version uint64
}

// maxWatched bounds the keys that EXEC looks up again, one by one, for those that the
// transaction does not use itself.
const maxWatched = 1024

// A queued command and its arguments take about so many bytes besides their bytes.
const queuedOverhead, argOverhead = 64, 24

// push queues a command; false if the transaction would take more memory than one command may.
// Bytes are reserved before they are copied, so that many unfinished transactions cannot exhaust
// the gateway.
func (t *transaction) push(c *conn, cmd *command, args [][]byte) bool {
	n := queuedOverhead + argOverhead*len(args)
	size := 0
	for _, a := range args {
		size += len(a)
	}
	if t.bytes+n+size > c.g.queryBytes() || !c.reserve(n+size) {
		return false
	}
	t.bytes += n + size
	own := make([][]byte, len(args))
	all := make([]byte, 0, size)
	for i, a := range args {
		at := len(all)
		all = append(all, a...)
		own[i] = all[at:len(all):len(all)]
	}
	t.queue = append(t.queue, queued{cmd, own})
	c.inTx.Store(int32(len(t.queue)))
	return true
}

// end forgets all but what is watched.
func (t *transaction) end(c *conn) {
	c.share.Drop(int64(t.bytes))
	t.queueing, t.broken, t.queue, t.bytes = false, false, nil, 0
	c.inTx.Store(-1)
}

// cmdMulti begins to queue. Nothing is asked of the store until EXEC, so a client that goes away
// in between leaves nothing behind.
func cmdMulti(c *conn, w *resp.Writer, _ [][]byte) {
	if c.tx.queueing {
		w.Error("ERR MULTI calls can not be nested")
		return
	}
	c.tx.queueing = true
	c.inTx.Store(0)
	w.OK()
}

// cmdDiscard forgets what is watched, too, as Redis does.
func cmdDiscard(c *conn, w *resp.Writer, _ [][]byte) {
	if !c.tx.queueing {
		w.Error("ERR DISCARD without MULTI")
		return
	}
	c.tx.end(c)
	c.tx.watched = nil
	w.OK()
}

// cmdWatch remembers versions instead of registering anything: the store knows nothing of
// watchers, and a version is never used twice, so a key that was changed and changed back is
// seen to have changed.
func cmdWatch(c *conn, w *resp.Writer, args [][]byte) {
	if c.tx.queueing {
		w.Error("ERR WATCH inside MULTI is not allowed")
		return
	}
	if len(c.tx.watched)+len(args)-1 > maxWatched {
		w.Error(fmt.Sprintf("ERR kvd: more than %d watched keys", maxWatched))
		return
	}
next:
	for _, name := range args[1:] {
		if bad := badKey(name); bad != "" {
			w.Error(bad)
			return
		}
		for _, x := range c.tx.watched {
			if x.db == c.db && x.name == string(name) {
				continue next
			}
		}
		v, err := versionOf(c, c.api, name)
		if err != nil {
			w.Error(c.g.storeError(err))
			return
		}
		c.tx.watched = append(c.tx.watched, watch{c.db, string(name), v})
	}
	w.OK()
}

// versionOf is a key's version, 0 if it does not exist. The value is read with it, since the
// record has the version, and dropped.
func versionOf(c *conn, api client.API, name []byte) (uint64, error) {
	ops := [1]client.Op{{Kind: client.OpGet, Key: name, Typed: true}}
	give, err := c.do(func(ctx context.Context) error {
		api.Do(ctx, ops[:])
		return ops[0].Err
	})
	give()
	if errors.Is(err, client.ErrNotFound) {
		return 0, nil
	}
	return ops[0].Item.Version, err
}

// cmdUnwatch cannot fail.
func cmdUnwatch(c *conn, w *resp.Writer, _ [][]byte) {
	c.tx.watched = nil
	w.OK()
}

// snapshots bounds how often EXEC reads several keys to find them unchanged.
const snapshots = 64

// cmdExec performs the queue. Writes to one key, and what is read of it, are one
// update of the store. Reads of several keys are read twice, until no version has
// changed in between: then all the values were there at one time.
// A watched key among those of the transaction is compared in the store's own update, without a
// gap. Others are read before; that is atomic only if nothing is written, and is refused
// otherwise unless Options.ExecPerKey allows it. An error before anything was performed says
// "nothing was done".
func cmdExec(c *conn, b *batch, _ [][]byte) error {
	w := &b.w
	t := &c.tx
	if !t.queueing {
		w.Error("ERR EXEC without MULTI")
		return nil
	}
	queue, watched, broken := t.queue, t.watched, t.broken
	t.queue, t.watched = nil, nil
	defer t.end(c) // not before: it stands for the queue's memory
	t.queueing = false
	if broken {
		w.Error("EXECABORT Transaction discarded because of previous errors.")
		return nil
	}

	if slices.ContainsFunc(queue, func(q queued) bool { return q.cmd.keys != nil }) {
		return c.execStaged(b, queue, watched)
	}
	b.hold = true
	defer func() { b.reset(); b.hold = false }()
	several := false
	for _, q := range queue {
		if bad := c.refusalAtExec(q.cmd, q.args); bad != "" {
			b.fail(q.cmd, bad)
			continue
		}
		if q.cmd.key != nil {
			if err := b.admit(q.cmd, q.args); err != nil {
				return err
			}
			continue
		}
		several = several || q.cmd.several
		b.entries = append(b.entries, entry{cmd: q.cmd, args: q.args, unit: -1, next: -1, first: true, last: true})
	}
	writes := several
	for _, u := range b.units {
		writes = writes || u.kind > read
	}
	var others []watch // watched, and not among the units
	for _, x := range watched {
		u := b.has(x.name)
		switch {
		case x.db == c.db && u != nil:
			u.watched, u.version = true, x.version
			if u.kind > read {
				u.kind = update
			}
		case x.db == c.db && !writes:
			_, u := b.unitOf([]byte(x.name))
			u.kind, u.watched, u.version = read, true, x.version
		default:
			others = append(others, x)
		}
	}
	if writes && (several || len(b.units) > 1 || len(others) > 0) && !c.g.o.ExecPerKey {
		w.Error(refuseExec(b, others, several))
		return nil
	}
	for _, x := range others {
		switch v, err := versionOf(c, c.g.o.Databases[x.db].Client, []byte(x.name)); {
		case err != nil:
			w.Error(c.g.storeError(err))
			return nil
		case v != x.version:
			w.NullArray()
			return nil
		}
	}
	if len(b.units) > 0 {
		b.perform()
	}
	if !writes && len(b.units) > 1 {
		if !b.settleSnapshot() {
			w.Error("ERR kvd: EXEC reads keys that change too often to be read at one time; nothing was done")
			return nil
		}
	}
	for _, u := range b.units {
		lost := errors.Is(u.err, errWatched) || u.watched && u.kind <= read && u.err == nil && u.got != u.version
		switch {
		case lost && len(b.units) > 1 && writes:
			w.Error("ERR kvd: EXEC: watched key '" + clip(u.name, 64) + "' has changed; commands on other keys may have been performed")
			return nil
		case lost:
			w.NullArray()
			return nil
		case u.err != nil && (len(b.units) == 1 || !writes):
			w.Error(c.g.storeError(u.err))
			return nil
		}
	}
	w.Array(len(queue))
	return b.replies()
}

// has is the unit of a key, or nil.
// A transaction has few keys, so it looks at all of them.
func (b *batch) has(name string) *unit {
	for _, u := range b.units {
		if string(u.name) == name {
			return u
		}
	}
	return nil
}

// settleSnapshot reads the units again until they are as they were before.
// A version says all about a value, so two equal readings of every key prove that between them
// nothing changed. Where keys change faster than they can be read, it gives up after snapshots
// attempts.
func (b *batch) settleSnapshot() bool {
	before := make([]uint64, len(b.units))
	for range snapshots {
		for i, u := range b.units {
			if before[i] = u.got; u.err != nil {
				return true // and say so
			}
		}
		b.perform()
		same := true
		for i, u := range b.units {
			same = same && (u.err != nil || u.got == before[i])
		}
		if same {
			return true
		}
	}
	return false
}

// refuseExec names the keys, the first few of them, since the user has to find the command that
// they come from.
func refuseExec(b *batch, others []watch, several bool) string {
	var names []string
	for _, u := range b.units {
		names = append(names, clip(u.name, 64))
	}
	for _, x := range others {
		names = append(names, clip([]byte(x.name), 64))
	}
	if len(names) > 8 {
		names = append(names[:8], "...")
	}
	s := "ERR kvd: EXEC over several keys cannot be atomic (keys " + strings.Join(names, ", ") + ")"
	if several {
		s = "ERR kvd: EXEC cannot make a command on several keys atomic"
	}
	return s + "; nothing was done"
}
