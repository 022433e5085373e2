package gateway

import (
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/inside"
	"github.com/kvd-project/kvd/internal/redis/exec"
	"github.com/kvd-project/kvd/internal/redis/live"
	"github.com/kvd-project/kvd/internal/redis/resp"
	"github.com/kvd-project/kvd/internal/redis/spec"
	"github.com/kvd-project/kvd/internal/redis/values"
)

// Commands that wait for keys. The store has no servers and wakes nobody, so whoever waits is woken by the writers of
// its own gateway, right after their write took place, and otherwise by a poll: one goroutine of the gateway looks up
// the keys that somebody waits for, each of them once for all who wait for it.
//
// Those who wait for a key are a queue for each type, in the order in which they came, and only the first of it tries:
// another try begins when it has gone. So clients are served in turn, and many of them on one key cost no more lookups
// than one.

const (
	// A key is looked up so long after somebody began to wait for it, or after it was seen to change, and then half as
	// often each time. The least pause is how late a client is served that waits for what another gateway writes, if it
	// has just begun to wait; the longest one bounds it for clients that have waited for long.
	minPollPause, maxPollPause = 5 * time.Millisecond, 100 * time.Millisecond
	// pollCost is the time that each lookup takes of a round's pause, so that there are at most 20,000 lookups a
	// second, however many keys are waited for.
	pollCost = 50 * time.Microsecond
	// pollBatch lookups go to the store together, each of which may read pollLimit bytes: whether a key is there, and
	// its version, is all that counts.
	pollBatch, pollLimit = 256, 1 << 10
)

// tryOnce performs a command that waits where nothing may wait, which is in transactions and scripts.
func tryOnce(cmd *command) stagedFunc {
	return func(t *staged, args [][]byte, w *resp.Writer) error {
		b, err := cmd.block(args)
		switch {
		case err != nil:
			return err
		case b.Reads && b.Timeout != values.NoWait && t.scripted:
			return refusal("ERR " + cmd.Name + " command is not allowed with BLOCK option from scripts")
		}
		switch found, err := b.Try(t, b.Names, false, w); {
		case err != nil:
			return err
		case found:
		case b.One:
			w.Null()
		default:
			w.NullArray()
		}
		return nil
	}
}

// waits are the clients of a gateway that wait. Its methods may be called concurrently.
type waits struct {
	g *Gateway
	// clients is how many there are, which writers look at before anything else.
	clients atomic.Int64
	poller  sync.WaitGroup // the goroutine that polls, while somebody waits
	// A receive from it starts the poller's pause anew; see due.
	early chan struct{} // capacity 1: a key is to be looked up sooner than the poller knows

	mu struct {
		sync.Mutex
		// keys has nothing without a line, so it is empty once nobody waits. polling says that the poller runs; it and
		// its end are decided with mu held, so that no client waits without one.
		keys    map[stagedName]*awaited
		polling bool // there is that goroutine, or it is about to begin
	}
}

// awaited is a key that somebody waits for.
type awaited struct {
	stagedName
	lines   []*line       // never empty
	version uint64        // that the last poll found, 0: none
	pause   time.Duration // between the last poll and the next one
	next    time.Time     // of the poll
}

// line is those who wait for a key in turn.
type line struct {
	name  string    // blocking.line
	all   bool      // not in turn: each of them is served
	queue []*waiter // in the order of arrival, never empty
}

// lineOf is the line for a client, nil if there is none.
func (k *awaited) lineOf(name string, all bool) *line {
	for _, l := range k.lines {
		if l.name == name && l.all == all {
			return l
		}
	}
	return nil
}

// wake tells the first of each line, or all of it, that there may be something now.
func (k *awaited) wake() {
	for _, l := range k.lines {
		if !l.all {
			signal(l.queue[0].wake)
			continue
		}
		for _, x := range l.queue {
			signal(x.wake)
		}
	}
}

// waiter is a client that waits.
// Its maker alone receives from wake and reads taken before over is closed; others send to wake and to end.
type waiter struct {
	keys []*awaited    // each once
	line string        // blocking.line
	all  bool          // it waits in no turn
	held bool          // by CLIENT PAUSE, for no keys
	rest atomic.Bool   // its first look has found nothing: from now on it tries again, and is watched for its going
	wake chan struct{} // capacity 1: to try
	end  chan ending   // capacity 1: not to wait any longer

	// taken is what of end was taken, if anything; it is there to be read when over has been closed.
	taken ending
	over  chan struct{} // closed when the client waits no longer
}

// ending is why a client does not wait any longer.
// The zero value is no reason: the client goes on waiting.
type ending uint8

const (
	endTimeout ending = 1 + iota
	endError          // CLIENT UNBLOCK ... ERROR
	endStop           // the gateway stops
	endGone           // nobody is there to be answered
)

const (
	errUnblocked = "UNBLOCKED client unblocked via CLIENT UNBLOCK"
	errForced    = "UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)"
)

// init is called by New, before there are connections.
func (s *waits) init(g *Gateway) {
	s.g, s.early = g, make(chan struct{}, 1)
	s.mu.keys = make(map[stagedName]*awaited)
}

// enterQueues puts a client at the end of the queues of keys.
// It is before the first look at the keys, so that a write between look and wait is not missed. A key that is named
// twice is waited for once.
func (s *waits) enterQueues(db int, b *values.Blocking) *waiter {
	x := &waiter{line: b.Line, all: b.Reads && b.Line == "", wake: make(chan struct{}, 1), end: make(chan ending, 1),
		over: make(chan struct{})}
	s.clients.Add(1) // before its first try: a writer that misses it has written before that
	s.mu.Lock()
	defer s.mu.Unlock()
	soon := time.Now().Add(minPollPause)
	for _, name := range b.Names {
		n := stagedName{DB: db, Name: string(name)}
		k := s.mu.keys[n]
		if k == nil {
			k = &awaited{stagedName: n, next: soon}
			s.mu.keys[n] = k
		}
		if slices.Contains(x.keys, k) {
			continue
		}
		l := k.lineOf(x.line, x.all)
		if l == nil {
			l = &line{name: x.line, all: x.all}
			k.lines = append(k.lines, l)
		}
		l.queue = append(l.queue, x)
		if b.Reads && k.version == 0 { // it may be gone before it is looked up
			k.version = live.UnknownVersion
		}
		k.pause = minPollPause
		if k.next.After(soon) {
			k.next = soon
		}
		x.keys = append(x.keys, k)
	}
	// The poller runs only while somebody waits, so that a gateway without such clients costs the store nothing.
	if !s.mu.polling {
		s.mu.polling = true
		s.poller.Go(s.poll)
	}
	signal(s.early)
	return x
}

// leaveQueues ends that. If it left something to those behind it, or did not use what it was woken for, they try next.
// A wake that was sent and not received counts as one that was not used. Without this a value that came for a client
// which just timed out would lie there although others wait for it.
func (s *waits) leaveQueues(x *waiter, pass bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	pass = pass || len(x.wake) > 0
	for _, k := range x.keys {
		l := k.lineOf(x.line, x.all)
		at := slices.Index(l.queue, x)
		l.queue = slices.Delete(l.queue, at, at+1)
		switch {
		case len(l.queue) == 0:
			if k.lines = slices.DeleteFunc(k.lines, func(m *line) bool { return m == l }); len(k.lines) == 0 {
				delete(s.mu.keys, k.stagedName)
			}
		case at == 0 && pass && !l.all:
			signal(l.queue[0].wake)
		}
	}
	s.clients.Add(-1)
}

// turn is those of names that the client is the first of its line to wait for.
// x is in the queues of all the names. The order of names is kept, since commands take of the first key that has
// something.
func (s *waits) turn(x *waiter, db int, names [][]byte) (mine [][]byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, name := range names {
		if l := s.mu.keys[stagedName{DB: db, Name: string(name)}].lineOf(x.line, x.all); l.all || l.queue[0] == x {
			mine = append(mine, name)
		}
	}
	return mine
}

// any reports whether somebody waits, so that a writer can leave it at that.
// A writer that sees nobody has written before anybody's first look, see enterQueues; the counter is sequentially
// consistent.
func (s *waits) any() bool { return s.clients.Load() > 0 }

// wake tells those whose turn it is to wait for a key that there may be something now. It is called after each write
// that leaves a collection, whatever its type. Clients that are woken look for themselves. There may be nothing any
// more when they do, and then they wait on.
func (s *waits) wake(db int, name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if k := s.mu.keys[stagedName{DB: db, Name: name}]; k != nil {
		k.wake()
	}
}

// signal fills a channel of capacity 1.
// It never waits: a channel that is full says the same already.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// poll looks up keys until nobody waits, or the gateway is closed.
// A round may take long, as an operation of the store may, so lookups never overlap. A single goroutine does it for all
// clients of the gateway, with ctx ended by Close, which waits for it.
func (s *waits) poll() {
	for {
		due, pause := s.due(time.Now())
		early := s.early
		switch {
		case due == nil && pause == 0:
			return
		case due != nil:
			s.lookUp(due)
			pause = max(pause, minPollPause, time.Duration(len(due))*pollCost)
			early = nil // the pause between two rounds stays
		}
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-early:
		case <-s.g.ctx.Done():
			timer.Stop()
			return // nobody waits any longer, nor will
		}
		timer.Stop()
	}
}

// due is the keys to look up now, if any, and how long to pause for the next one; no keys and no time: nobody waits,
// and the poller is to end.
func (s *waits) due(now time.Time) (keys []*awaited, pause time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.mu.keys) == 0 {
		s.mu.polling = false
		return nil, 0
	}
	pause = maxPollPause
	for _, k := range s.mu.keys {
		left := k.next.Sub(now)
		if left <= 0 {
			keys = append(keys, k)
			left = k.pause
		}
		pause = min(pause, left)
	}
	return keys, max(pause, time.Millisecond)
}

// lookUp wakes those who wait for keys that have changed. It wakes them if the store fails, too: their own try tells
// them. Sorting by database puts those of one namespace side by side, for one Do each. No lock is held, since a lookup
// may wait for the network; an awaited whose clients have left meanwhile does no harm.
func (s *waits) lookUp(keys []*awaited) {
	slices.SortFunc(keys, func(a, b *awaited) int { return a.DB - b.DB })
	ctx := inside.LimitMemory(s.g.ctx, pollLimit)
	for len(keys) > 0 {
		n := 1
		for n < len(keys) && n < pollBatch && s.g.dbs[keys[n].DB].shared == s.g.dbs[keys[0].DB].shared {
			n++
		}
		ops := make([]client.Op, n)
		for i, k := range keys[:n] {
			ops[i] = client.Op{Kind: client.OpGet, Key: s.g.dbs[k.DB].stored([]byte(k.Name)), Typed: true}
		}
		s.g.dbs[keys[0].DB].api.Do(ctx, ops)
		s.found(keys[:n], ops)
		keys = keys[n:]
	}
}

// found takes the outcome of a poll.
// The first version that a poll finds counts as a change, since version was 0: somebody wrote between a client's first
// try and this. Types are not compared, so clients that wait for another one are woken for nothing.
func (s *waits) found(keys []*awaited, ops []client.Op) {
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, k := range keys {
		o := &ops[i]
		wake, pause := false, min(2*k.pause, maxPollPause)
		switch {
		case o.Err == nil:
			if wake = o.Item.Version != k.version; wake {
				k.version, pause = o.Item.Version, minPollPause
			}
		case errors.Is(o.Err, client.ErrNotFound):
			wake = k.version != 0
			k.version = 0
		default: // too long to have its version here, or it could not be read
			wake = true
		}
		k.pause, k.next = pause, now.Add(pause)
		if wake {
			k.wake()
		}
	}
}

// unblock makes a client stop waiting, and reports whether it did so for that; a client that tries at the moment may be
// served instead, so it waits for the outcome. Any goroutine may call it but the client's own, which is to close over.
func (x *waiter) unblock(why ending) bool {
	if !x.stop(why) {
		return false // somebody else was faster
	}
	<-x.over
	return x.taken == why
}

// stop is the same without waiting for the outcome; false: there is a reason already.
func (x *waiter) stop(why ending) bool {
	select {
	case x.end <- why:
		return true
	default:
		return false
	}
}

// told is why the client is to stop waiting, 0: nobody said so.
// Only the client's own goroutine calls it. It prefers an ending to what happened at the same time, so that an UNBLOCK
// that was accepted is not lost.
func (x *waiter) told() ending {
	if x.taken == 0 {
		select {
		case x.taken = <-x.end:
		default:
		}
	}
	return x.taken
}

// performBlocking performs a command that may wait. It returns how long it worked: what it waited is not the command's
// time. The connection is on its own goroutine from where it waits (WatchPeer leaves a loop), and holds no lock while
// it waits, nor anything of what it has read. An error ends the connection without a reply: the client is gone.
func (c *conn) performBlocking(cmd *command, w *resp.Writer, args [][]byte) (worked time.Duration, err error) {
	b, err := c.parseBlocking(cmd, args)
	if err != nil {
		if c.shows(cmd) {
			c.showCommand(cmd, args, len(args), c.db)
		}
		w.Error(err.Error())
		return 0, nil
	}
	if b.Timeout == values.NoWait {
		began := time.Now()
		c.performSeveral(cmd, w, args, began)
		return time.Since(began), nil
	}
	if c.shows(cmd) { // once, however often it tries
		c.showCommand(cmd, args, len(args), c.db)
		c.out.uncork() // its reply may be far away
	}
	c.box.Flush()
	s := &c.g.waits
	x := s.enterQueues(c.db, &b)
	c.blocked.Store(x)
	pass := false // those behind it are to try
	defer func() {
		c.blocked.Store(nil)
		close(x.over)
		s.leaveQueues(x, pass)
	}()

	var timeout <-chan time.Time
	if b.Timeout > 0 {
		timer := time.NewTimer(b.Timeout)
		defer timer.Stop()
		timeout = timer.C
	}
	var gone <-chan struct{}
	for again := false; ; again = true {
		mine := b.Names
		if again || !b.Reads {
			mine = s.turn(x, c.db, b.Names)
		}
		var paused <-chan struct{}
		if again { // it began before the pause, and would take what other gateways give
			if paused = c.heldUntil(cmd, args); paused != nil {
				mine = nil
			}
		}
		if len(mine) > 0 && again {
			if err := c.refusal(cmd, args); err != nil { // rights may have been taken away meanwhile
				pass = true
				values.WriteRefusal(w, err)
				return worked, nil
			}
		}
		if len(mine) > 0 {
			began := time.Now()
			pass, err = c.tryBlocked(cmd, args, &b, mine, again, w)
			if worked += time.Since(began); pass {
				return worked, err
			}
		}
		if !again {
			var stop func()
			// Only a client that really waits is watched for its going away, which takes it out of a loop.
			gone, stop = c.link.WatchPeer()
			defer stop()
			x.rest.Store(true)
		}
		why, woken := c.awaitKeys(x, paused, timeout, gone)
		pass = pass || woken
		switch why {
		case 0:
			continue
		case endTimeout:
			w.NullArray()
		case endError:
			w.Error(errUnblocked)
		case endStop:
			w.Error(errForced)
		case endGone:
			return worked, errClosing
		}
		return worked, nil
	}
}

// parseBlocking reads the arguments of a command that may wait; the error is the reply if they, or a name among them,
// are no good. A wrong name is refused before it is waited for: no key of the store can have it, so that nobody would
// write it.
func (c *conn) parseBlocking(cmd *command, args [][]byte) (b values.Blocking, err error) {
	b, err = cmd.block(args)
	for _, name := range b.Names {
		if err == nil {
			err = badKey(c.in, name)
		}
	}
	return b, err
}

// awaitKeys waits for something to happen to a client in the queues: that its keys are to be looked at, which woken
// says, that a pause ends, or that it shall not wait any longer, for which why is the reason. Of several that have
// happened, an UNBLOCK comes first: whoever sent it waits for x.over and is told whether it was the one.
func (c *conn) awaitKeys(x *waiter, paused <-chan struct{}, timeout <-chan time.Time, gone <-chan struct{}) (why ending,
	woken bool) {
	if c.finishing.Load() { // before the client was to be seen in CLIENT LIST
		why = endStop
	} else {
		select {
		case <-x.wake:
			woken = true
		case <-paused:
		case x.taken = <-x.end:
		case <-timeout:
			why = endTimeout
		case <-gone:
			why = endGone
		case <-c.g.ctx.Done():
			why = endGone
		}
	}
	if told := x.told(); told != 0 {
		why = told
	}
	if why == endGone && c.finishing.Load() {
		why = endStop
	}
	return why, woken
}

// errNothing gives up a try that found nothing, whose reads need not be confirmed then.
// Without it each look at empty keys would cost a round trip to confirm that they were all empty at one instant, which
// nobody who goes on waiting needs.
var errNothing = errors.New("nothing to take")

// errGone gives up a try whose client has gone, so that nobody would have what it takes.
var errGone = errors.New("the client has gone")

// tryBlocked reports whether the command was performed, or failed, and replied. An error ends the connection: its
// client has gone, and nothing was taken. An element is taken in one step with the look, so that two clients of two
// gateways never get the same element. Whether a client that has waited is still there is looked at before that step
// and behind it.
func (c *conn) tryBlocked(cmd *command, args [][]byte, b *values.Blocking, names [][]byte, again bool, w *resp.Writer) (
	done bool, end error) {
	if again {
		args = nil // it has missed its keys already
	}
	t, err := c.performStaged(time.Now(), nil, exec.Look, func(t *staged) {
		defer t.noteChanges(cmd, args, &t.out)()
		t.mayWait, t.waited = true, again
		found, err := b.Try(t, names, again, &t.out)
		values.WriteRefusal(&t.out, err)
		switch {
		case t.Err != nil:
		case !found && err == nil:
			t.Err = errNothing
		case again && c.link.PeerGone():
			t.Err = errGone
		}
	})
	defer t.free()
	switch {
	case errors.Is(err, errNothing):
		if !again {
			t.tellOfWrites() // of keys that were missed
		}
		return false, nil
	case errors.Is(err, errGone):
		return true, errClosing
	case err != nil:
		w.Error(c.stagedError(err))
	default:
		w.Raw(t.out.Bytes())
		w.Errors += t.out.Errors
	}
	return true, nil
}

// putBack makes the keys what they were before a step that has taken effect, for a client that has gone meanwhile, and
// reports whether it did so. A key that somebody has changed since then stays as it is, with all others: what was taken
// counts as given. Events are not told, as if nothing had happened; caches that have read in between are.
func (t *staged) putBack() bool {
	var keys []*exec.Key
	for _, k := range t.Keys {
		if !k.Used || !k.Changed || !k.Present && !k.Was.Present {
			continue
		}
		was := &exec.Key{Key: k.Was, KeyName: k.KeyName, Stored: k.Stored, Version: k.Version}
		if was.Changed = true; !k.Present {
			was.Version = 0
		}
		keys = append(keys, was)
	}
	if len(keys) == 0 || t.Write(keys) != nil {
		return false
	}
	t.Changes = nil
	t.tellOfWrites()
	return true
}

// cmdClientUnblock ends the waiting of a client of this gateway.
// The reply is 1 only if that client is told so; one that is served at the same moment is answered with its element,
// and 0 here.
func cmdClientUnblock(c *conn, w *resp.Writer, args [][]byte) error {
	why := endTimeout
	p := values.OptionsOf(args[3:])
	switch {
	case len(args) > 4:
		return refusal("ERR unknown subcommand or wrong number of arguments for '" + values.Clip(args[1], 128) +
			"'. Try CLIENT HELP.")
	case p.Flag("error"):
		why = endError
	case p.More() && !p.Flag("timeout"):
		return refusal("ERR CLIENT UNBLOCK reason should be TIMEOUT or ERROR")
	}
	id, ok := resp.ParseInt(args[2])
	if !ok {
		return values.ErrNotInt
	}
	c.g.mu.Lock()
	other := c.g.mu.conns[id]
	c.g.mu.Unlock()
	if other == nil {
		w.Int(0)
		return nil
	}
	x := other.blocked.Load()
	w.Int(values.Bit(x != nil && !x.held && x.unblock(why)))
	return nil
}

// announce wakes those who wait for what has been written.
func (t *staged) announce() {
	if !t.c.g.waits.any() {
		return
	}
	for _, k := range t.Keys {
		if k.LeavesCollection() {
			t.c.g.waits.wake(k.DB, k.Name)
		}
	}
}

// announce is the same for units that have been performed.
func (b *batch) announce() {
	if !b.c.g.waits.any() {
		return
	}
	for _, u := range b.units {
		if u.kind == spec.Update && u.err == nil && u.k.LeavesCollection() {
			b.c.g.waits.wake(b.c.db, string(u.name))
		}
	}
}
