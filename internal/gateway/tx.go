package gateway

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/redis/exec"
	"github.com/kvd-project/kvd/internal/redis/live"
	"github.com/kvd-project/kvd/internal/redis/resp"
	"github.com/kvd-project/kvd/internal/redis/spec"
)

// transaction is what MULTI and WATCH have said.
// It belongs to the connection, and only what serves that uses it. MULTI and WATCH are independent of each other: a
// watch may be there without a queue.
type transaction struct {
	queueing bool     // behind MULTI
	broken   bool     // a command was refused: EXEC must fail
	queue    []queued // in the order in which they came
	bytes    int      // of the share, for queue
	db       int      // in which what is queued next is going to work
	watched  []watch  // each key once, whatever its database
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
	stagedName
	version uint64
	// made says that an absent key was there meanwhile; nil: the key was not absent. A key that was made and is gone
	// again is absent as before, so those who have made it or seen it say so: clients of this gateway, and this client.
	made *atomic.Bool
}

// touched reports whether the key is known to have changed, whatever it is now.
func (x *watch) touched() bool { return x.made != nil && x.made.Load() }

// watchers are the clients of a gateway that watch absent keys. Its methods may be called concurrently.
type watchers struct {
	count atomic.Int64 // of watches, which writers look at before anything else
	mu    struct {
		sync.Mutex
		keys map[stagedName]map[*atomic.Bool]struct{} // nothing empty
	}
}

// any reports whether somebody watches, so that a writer can leave it at that.
// A writer that sees nobody has written before anybody's look at the key, see add.
func (s *watchers) any() bool { return s.count.Load() > 0 }

// add begins to watch a key. It is before the look at the key, so that a write in between is not missed.
func (s *watchers) add(n stagedName) *atomic.Bool {
	made := new(atomic.Bool)
	s.count.Add(1)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.keys == nil {
		s.mu.keys = make(map[stagedName]map[*atomic.Bool]struct{})
	}
	if s.mu.keys[n] == nil {
		s.mu.keys[n] = make(map[*atomic.Bool]struct{}, 1)
	}
	s.mu.keys[n][made] = struct{}{}
	return made
}

func (s *watchers) remove(n stagedName, made *atomic.Bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if delete(s.mu.keys[n], made); len(s.mu.keys[n]) == 0 {
		delete(s.mu.keys, n)
	}
	s.count.Add(-1)
}

// touch says that keys were written, or may have been.
func (s *watchers) touch(keys []live.Written) {
	if !s.any() {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, k := range keys {
		for made := range s.mu.keys[stagedName{DB: k.DB, Name: string(k.Name)}] {
			made.Store(true)
		}
	}
}

func (c *conn) unwatch(watched []watch) {
	for _, x := range watched {
		if x.made != nil {
			c.g.watchers.remove(x.stagedName, x.made)
		}
	}
}

// forgetWatched ends what WATCH has said.
func (c *conn) forgetWatched() {
	c.unwatch(c.tx.watched)
	c.tx.watched = nil
}

// sees notes that the client has met a key.
// Keys are made through other gateways, too, which this one does not hear of.
func (c *conn) sees(n stagedName) {
	for _, x := range c.tx.watched {
		if x.made != nil && x.stagedName == n {
			x.made.Store(true)
		}
	}
}

// seen is the same for the units of a batch that were there.
func (b *batch) seen() {
	if len(b.c.tx.watched) == 0 {
		return
	}
	for _, u := range b.units {
		there := u.err == nil
		switch u.kind {
		case spec.Presence, spec.ReadValue, spec.Read:
			there = u.stored || u.large > 0
		case spec.PutIf:
			there = there && u.cond == client.IfAbsent && !u.stored
		case spec.Update:
			there = there && !b.entries[u.first].change.Missed
		}
		if there {
			b.c.sees(stagedName{DB: b.c.db, Name: string(u.name)})
		}
	}
}

// maxWatched bounds the keys that EXEC looks up again.
const maxWatched = 1024

// A queued command and its arguments take about so many bytes besides their bytes.
const queuedOverhead, argOverhead = 64, 24

// push queues a command; false if the transaction would take more memory than one command may.
// Bytes are reserved before they are copied, so that many unfinished transactions cannot exhaust
// the gateway.
// It may wait for memory. false is not the end of the transaction, which the caller marks as broken.
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
		// The capacity ends with the argument, so that an append to one cannot run into the next.
		own[i] = all[at:len(all):len(all)]
	}
	t.queue = append(t.queue, queued{cmd, own})
	c.inTx.Store(int32(len(t.queue)))
	return true
}

// end forgets all but what is watched.
// It may be called when there is none.
func (t *transaction) end(c *conn) {
	c.share.Drop(int64(t.bytes))
	t.queueing, t.broken, t.queue, t.bytes = false, false, nil, 0
	c.inTx.Store(-1)
}

// cmdMulti begins to queue. Nothing is asked of the store until EXEC, so a client that goes away
// in between leaves nothing behind.
func cmdMulti(c *conn, w *resp.Writer, _ [][]byte) error {
	if c.tx.queueing {
		return refusal("ERR MULTI calls can not be nested")
	}
	c.tx.queueing, c.tx.db = true, c.db
	c.inTx.Store(0)
	w.OK()
	return nil
}

// cmdDiscard forgets what is watched, too, as Redis does.
func cmdDiscard(c *conn, w *resp.Writer, _ [][]byte) error {
	if !c.tx.queueing {
		return refusal("ERR DISCARD without MULTI")
	}
	c.tx.end(c)
	c.forgetWatched()
	w.OK()
	return nil
}

// cmdWatch remembers versions instead of registering anything: the store knows nothing of
// watchers, and a version is never used twice, so a key that was changed and changed back is
// seen to have changed.
func cmdWatch(c *conn, w *resp.Writer, args [][]byte) error {
	if c.tx.queueing {
		return refusal("ERR WATCH inside MULTI is not allowed")
	}
	if len(c.tx.watched)+len(args)-1 > maxWatched {
		return refusal(fmt.Sprintf("ERR kvd: more than %d watched keys", maxWatched))
	}
next:
	for _, name := range args[1:] {
		if err := badKey(c.in, name); err != nil {
			return err
		}
		for _, x := range c.tx.watched {
			if x.stagedName == (stagedName{DB: c.db, Name: string(name)}) {
				continue next
			}
		}
		x := watch{stagedName: stagedName{DB: c.db, Name: string(name)}}
		made := c.g.watchers.add(x.stagedName)
		v, err := versionOf(c, name)
		if x.version = v; v == 0 && err == nil {
			x.made = made
		} else {
			c.g.watchers.remove(x.stagedName, made)
		}
		if err != nil {
			return refusal(c.g.storeError(err))
		}
		c.tx.watched = append(c.tx.watched, x)
	}
	w.OK()
	return nil
}

// versionOf is a key's version, 0 if it does not exist. The value is read with it, since the
// record has the version, and dropped.
// An error but "not found" may be of any kind; WATCH and OBJECT IDLETIME report it and have changed nothing.
func versionOf(c *conn, name []byte) (uint64, error) {
	ops := [1]client.Op{{Kind: client.OpGet, Key: c.in.stored(name), Typed: true}}
	give, err := c.do(func(ctx context.Context) error {
		c.in.api.Do(ctx, ops[:])
		return ops[0].Err
	})
	give()
	if errors.Is(err, client.ErrNotFound) {
		return 0, nil
	}
	return ops[0].Item.Version, err
}

// cmdUnwatch cannot fail.
func cmdUnwatch(c *conn, w *resp.Writer, _ [][]byte) error {
	c.forgetWatched()
	w.OK()
	return nil
}

// cmdExec performs the queue in one step: all of it takes effect, or nothing does. An error is that of sending, and
// ends the connection. The replies null (a watched key has changed) and EXECABORT say that nothing was done; an error
// of the store says by itself whether it was.
func cmdExec(c *conn, b *batch, _ [][]byte) error {
	w := &b.w
	t := &c.tx
	if !t.queueing {
		w.Error("ERR EXEC without MULTI")
		return nil
	}
	queue, watched, broken := t.queue, t.watched, t.broken
	t.queue, t.watched = nil, nil
	defer c.unwatch(watched)
	defer t.end(c) // not before: it stands for the queue's memory
	t.queueing = false
	if broken {
		w.Error("EXECABORT Transaction discarded because of previous errors.")
		return nil
	}
	return c.execStaged(b, queue, watched)
}

// wayOf is how a transaction is performed that uses these keys. If they are one, the store can change it while the
// commands run, write it without a look at it, or be asked for no value.
func (c *conn) wayOf(names []stagedName, queue []queued, watched []watch) exec.Way {
	if len(names) == 0 || slices.ContainsFunc(names, func(n stagedName) bool { return n != names[0] }) {
		return exec.Look
	}
	looks := len(watched) > 0 || c.listener.Tracking() != nil || c.g.notify.Load() != 0
	asks, reads, now := true, true, time.Now().UnixMilli()
	for _, q := range queue {
		switch {
		case q.cmd.keys != nil:
			return exec.Look
		case q.cmd.key == nil:
			continue
		}
		p, err := putOf(q.cmd, q.args, now)
		looks = looks || err != nil || p.kind != spec.PutValue
		asks = asks && (p.kind == spec.Presence || p.kind == spec.PutIf || p.kind == spec.Remove)
		reads = reads && p.kind <= spec.Read
	}
	switch {
	case asks:
		return exec.Ask
	case reads:
		return exec.Look
	case looks:
		return exec.Modify
	}
	return exec.Overwrite
}
