// Package loop serves connections whose clients say little at a time and wait for the reply, many of
// them with one goroutine. A turn of a [Loop] reads the connections that internal/poll finds ready.
// It performs the lookups that they ask for in one client.Do, whose cache misses overlap, and then
// answers. That leaves out what a goroutine for each connection costs when there is one command to a
// system call. The costs are the read that finds nothing, and two switches.
//
// A loop is for what does not wait. A lookup that is about to (inside.OnWait) is stopped, and its
// connection performs it again alone. Three things make the connection an ordinary one again,
// which its own goroutine serves; the loop goes on in another goroutine ([Link.Waits]). These are
// any other operation that is about to wait, a command that takes its time, and a reply that the
// socket does not take. Writes are never stopped, since one that was might have happened; so each
// is performed for its connection alone, and holds up no other's reply.
//
// Loops that are busy share their connections with others, if more requests are served then. So loops take the
// number of processors that their clients need. Clients that one loop has time for wake one thread.
//
// The protocol is left to the server, whose connections are [Conn] values with a [Link] each.
// Start with [Loops], whose methods may be called concurrently; a Link says which of its own may.
// Buffers belong to the connections.
package loop

import (
	"context"
	"errors"
	"log/slog"
	"math"
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/inside"
	"github.com/kvd-project/kvd/internal/poll"
)

// Conn is a connection as its loop sees it. The loop calls one method at a time.
type Conn interface {
	// Link is the connection's, always the same.
	Link() *Link
	// Moved tells where the connection reads and writes from now on: in a loop at fd, by
	// Link.Read and Link.Write; else, with fd -1, at Link.Net.
	Moved(fd int)
	// Read reads once, without waiting, and performs what has come, but for trailing lookups
	// that may be performed with those of other connections; alone says that there are none.
	// It returns ErrNothing if nothing has come; another error ends the connection's time in
	// the loop.
	Read(alone bool) error
	// Lookups tells how many lookups Read left, of which store, and the most bytes that each
	// may read, LimitOne or LimitEach. They may be performed in any order, and more than once.
	Lookups() (store client.API, n, limit int)
	// Ask fills in the Lookups, which are n OpGets.
	Ask(ops []client.Op)
	// Found takes the outcome of what Ask asked for; ops are the loop's. Without it Finish
	// performs the lookups.
	Found(ops []client.Op)
	// Finish performs what is left of what Read read, and answers all of it. It returns how
	// many commands that were; an error ends the connection's time in the loop.
	Finish() (commands int, err error)
	// Tick is called about once a second, perhaps while another goroutine serves the connection,
	// and must not block.
	Tick(now time.Time)
}

// Limits for inside.LimitMemory, in bytes.
const (
	LimitOne  = 64 << 10 // of few lookups each
	LimitEach = 16 << 10 // of many
)

var (
	// ErrNothing: a connection has nothing to read.
	ErrNothing = errors.New("nothing to read")
	// ErrPanicked ends a connection's time in the loop: one of its methods panicked, which is logged.
	ErrPanicked = errors.New("panicked")

	errWaits = errors.New("a lookup would wait")
)

const (
	// turnConns and turnLookups bound a turn: a connection that was read waits for as many
	// others. A connection is read once a turn, so that a long pipeline delays others by one
	// buffer of it. turnLookups is checked before a connection is read.
	turnConns, turnLookups = 64, 128
	// window is how long a loop's pauses are added up for its load.
	window = 5 * time.Millisecond
	// saturated is the load from which on a loop is told from another by its connections, in percent.
	saturated = 90
	// level is how much more load than another a loop has at least that gives connections to it.
	level = 10 // percent
	// tick is how often a loop calls Conn.Tick.
	tick = time.Second
)

// Loops are a server's: at most one for every second processor, and two for two, made when the first connection enters
// one. The first serves all connections until more of them serve more requests, see plan. For every second processor
// there is one at most while connections outside of loops have something to say. Two loops that share what one has time
// for find fewer connections ready at a time. So they sleep and wake more often, share fewer lookups, and meet at the
// lanes of the store. They took half as much processor time again for the same requests. The exported fields are set
// before the first connection enters one.
type Loops struct {
	// Context is for lookups. Required.
	Context context.Context
	// Logger receives background errors. Required.
	Logger *slog.Logger

	once  sync.Once
	all   []*Loop
	plan  *plan        // the first loop's
	inUse atomic.Int32 // plan.use
}

// Loop is one goroutine and what it serves.
type Loop struct {
	of   *Loops
	id   int // in Loops.all
	p    *poll.Poller
	done chan struct{}
	// Of the window before: load is the percentage of the time that it did not wait, and busy how many connections had
	// something to say. A loop that gives a connection away adds what that takes to the other's.
	load, busy atomic.Int32
	served     atomic.Uint64 // times that a connection had something to say, but for those of this window

	mu struct {
		sync.Mutex
		conns map[int]Conn // by file descriptor
	}

	// The goroutine's that runs it.
	ready    []int // descriptors to be read, from next on
	next     int
	surplus  int           // connections that are to be given to other loops when they have something to say
	began    time.Time     // of this window
	paused   time.Duration // in it
	window   uint32        // its number
	reads    int           // in it
	active   int           // connections that were read in it
	swept    time.Time
	ticked   []Conn
	turn     []Conn // read; turn[at:] are to be answered
	at       int
	lookups  int // of turn
	gathered bool
	ops      []client.Op
	asked    []asked
	// ctxs are for lookups of LimitOne and LimitEach; both end with the first that waits.
	ctxs [2]context.Context
	ctx  context.Context
}

// asked is a connection's part of Loop.ops.
type asked struct {
	c        Conn
	from, to int
}

// loopFor returns the loop in use, other than from, that has the least to do; nil: there is none.
func (s *Loops) loopFor(from *Loop) (best *Loop) {
	s.makeLoops()
	for i, l := range s.all {
		if i == int(s.inUse.Load()) {
			break
		}
		if l != from && (best == nil || l.lessThan(best)) {
			best = l
		}
	}
	return best
}

// lessThan reports whether l has less to do than m. Loops without a pause are told apart by their connections.
func (l *Loop) lessThan(m *Loop) bool {
	if a, b := l.load.Load(), m.load.Load(); a < saturated || b < saturated {
		return a < b
	}
	return l.busy.Load() < m.busy.Load()
}

func (s *Loops) makeLoops() {
	s.once.Do(func() {
		processors := runtime.GOMAXPROCS(0)
		shared := processors / 2 // as many are left to those who do not wait
		n := 0
		if processors > 1 {
			n = max(shared, 2)
		}
		for i := range n {
			l, err := newLoop(s, i)
			if err != nil {
				s.Logger.Warn("connections have a goroutine each", "err", err)
				break
			}
			s.all = append(s.all, l)
		}
		s.plan = newPlan(len(s.all), shared)
		s.inUse.Store(1)
		for _, l := range s.all {
			go l.run()
		}
	})
}

// Close ends the loops when they have no connections any more; none may enter from now on.
func (s *Loops) Close() {
	s.once.Do(func() {}) // there will be none any more
	for _, l := range s.all {
		l.close()
	}
	s.all = nil
}

// Conns is how many connections are in loops.
func (s *Loops) Conns() (n int) {
	s.makeLoops()
	for _, l := range s.all {
		n += l.conns()
	}
	return n
}

// add begins to serve c.
func (l *Loop) add(fd int, c Conn) error {
	l.mu.Lock()
	l.mu.conns[fd] = c
	l.mu.Unlock()
	return l.p.Add(fd)
}

// remove ends that.
func (l *Loop) remove(fd int) {
	l.p.Remove(fd)
	l.mu.Lock()
	delete(l.mu.conns, fd)
	l.mu.Unlock()
}

func (l *Loop) conns() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.mu.conns)
}

func newLoop(s *Loops, id int) (*Loop, error) {
	p, err := poll.New()
	if err != nil {
		return nil, err
	}
	now := time.Now()
	l := &Loop{of: s, id: id, p: p, done: make(chan struct{}), began: now, swept: now}
	l.mu.conns = make(map[int]Conn)
	l.renew()
	return l, nil
}

// close ends a loop that has no connections any more.
func (l *Loop) close() {
	l.p.Wake()
	<-l.done
	l.p.Close()
}

// renew makes the contexts of lookups. They end instead of waiting: a lookup may be performed
// again, by its connection alone, and the others need not wait for it.
func (l *Loop) renew() {
	ctx, cancel := context.WithCancelCause(l.of.Context)
	stop := func() { cancel(errWaits) }
	l.ctx = ctx
	for i, limit := range [...]int{LimitOne, LimitEach} {
		l.ctxs[i] = inside.OnWait(inside.LimitMemory(ctx, limit), stop)
	}
}

// run serves what is ready until the loop is closed, or until another goroutine does.
func (l *Loop) run() {
	for {
		for !l.gathered {
			if l.next == len(l.ready) || len(l.turn) >= turnConns || l.lookups >= turnLookups {
				l.gathered = true
				break
			}
			fd := l.ready[l.next]
			l.next++
			l.mu.Lock()
			c := l.mu.conns[fd]
			l.mu.Unlock()
			if c == nil || l.surplus > 0 && l.relieved(c) {
				continue
			}
			if l.read(c) {
				return
			}
		}
		l.perform()
		for l.at < len(l.turn) {
			c := l.turn[l.at]
			l.turn[l.at] = nil
			l.at++
			if l.finish(c) {
				return
			}
		}
		l.turn, l.at, l.lookups, l.gathered = l.turn[:0], 0, 0, false
		if l.next == len(l.ready) && l.wait() {
			close(l.done)
			return
		}
	}
}

// relieved gives a connection, which has something to say, to a loop that has time for it, if there is one.
func (l *Loop) relieved(c Conn) bool {
	l.surplus--
	to := l.of.loopFor(l)
	if to == nil || !c.Link().move(to) {
		return false
	}
	to.load.Add(max(l.load.Load()/max(l.busy.Load(), 1), 1))
	to.busy.Add(1)
	return true
}

// endWindow says how busy the loop was, and what follows of that.
func (l *Loop) endWindow(now time.Time) {
	took := now.Sub(l.began)
	load := int32(100 - 100*l.paused/took)
	l.load.Store(load)
	l.busy.Store(int32(l.active))
	l.served.Add(uint64(l.reads))
	if l.id == 0 {
		l.of.revise(now)
	}
	l.surplus = l.surplusOf(load)
	l.began, l.paused, l.reads, l.active = now, 0, 0, 0
	l.window++
}

// countRead counts that the connection of k had something to say.
func (l *Loop) countRead(k *Link) {
	l.reads++
	if k.window != l.window {
		k.window = l.window
		l.active++
	}
}

// surplusOf is how many connections others are to have, at a load of this window.
func (l *Loop) surplusOf(load int32) int {
	use := int(l.of.inUse.Load())
	if l.id >= use {
		return math.MaxInt
	}
	to := l.of.loopFor(l)
	if to == nil {
		return 0
	}
	switch other := to.load.Load(); {
	case load-other >= level:
		return max(l.active*int(load-other)/int(2*load), 1)
	case load >= saturated && other >= saturated:
		return max(l.active-int(to.busy.Load()), 0) / 2
	}
	return 0
}

// revise has the plan look at the loops.
func (s *Loops) revise(now time.Time) {
	if len(s.all) == 1 {
		return
	}
	t := tally{conns: s.Conns(), outside: outside.Load()}
	for i, l := range s.all {
		t.served += l.served.Load()
		if i < s.plan.use {
			t.load += int(l.load.Load())
			t.busy += int(l.busy.Load())
		}
	}
	was := s.plan.use
	s.plan.revise(now, t)
	for i := was; i < s.plan.use; i++ {
		s.all[i].load.Store(0) // these are of a time when the loop was in use
		s.all[i].busy.Store(0)
	}
	s.inUse.Store(int32(s.plan.use))
}

// wait waits until something is ready, and reports whether the loop was closed: it has no connections then.
func (l *Loop) wait() (closed bool) {
	before := time.Now()
	l.ready, closed = l.p.Wait(tick)
	l.next = 0
	now := time.Now()
	if l.p.Slept() {
		l.paused += now.Sub(before)
	}
	if now.Sub(l.began) >= window {
		l.endWindow(now)
		// The runtime's monitor takes the processor from a goroutine that has not given it up for 10 ms and is in a
		// system call when it looks. Then it looks every 20 µs for a while: it took 4 % of a gateway's processor time.
		runtime.Gosched()
	}
	if now.Sub(l.swept) >= tick {
		l.swept = now
		l.mu.Lock()
		for _, c := range l.mu.conns {
			l.ticked = append(l.ticked, c)
		}
		l.mu.Unlock()
		for _, c := range l.ticked {
			c.Tick(now)
		}
		clear(l.ticked)
		l.ticked = l.ticked[:0]
	}
	return closed
}

// read reads from a connection, which is part of the turn then. It reports whether another
// goroutine runs the loop now, and the turn too; this one has served the connection alone.
func (l *Loop) read(c Conn) (deposed bool) {
	err := ErrPanicked
	defer func() {
		l.recover(c, recover())
		switch k := c.Link(); {
		case k.deposed:
			deposed = true
			if err == nil {
				_, err = l.finishAlone(c)
			}
			k.end(err)
		case err == nil:
			if _, n, _ := c.Lookups(); n > 0 {
				l.turn = append(l.turn, c)
				l.lookups += n
			} else {
				deposed = l.finish(c)
			}
		case err != ErrNothing:
			k.leaveLoop()
			k.end(err)
		}
	}()
	err = c.Read(l.next == len(l.ready) && len(l.turn) == 0)
	if err != ErrNothing {
		k := c.Link()
		if k.stayed++; !k.deposed { // else another goroutine runs the loop
			l.countRead(k)
		}
	}
	return
}

// finishAlone is Conn.Finish of a connection that has left the loop.
func (l *Loop) finishAlone(c Conn) (n int, err error) {
	err = ErrPanicked
	defer func() { l.recover(c, recover()) }()
	return c.Finish()
}

// recover logs a panic: one connection's request must not end the process that serves the others.
func (l *Loop) recover(c Conn, r any) {
	if r != nil {
		l.of.Logger.Error("bug: command panicked", "peer", c.Link().peer, "panic", r, "stack", string(debug.Stack()))
	}
}

// finish answers a connection of the turn. It reports whether another goroutine runs the loop now.
func (l *Loop) finish(c Conn) (deposed bool) {
	n, err := l.finishAlone(c)
	k := c.Link()
	deposed = k.deposed // of this call; the next waits for the connection's goroutine
	if err == nil && !deposed && n < deepCommands {
		return false
	}
	k.leaveLoop()
	k.end(err)
	return deposed
}

// perform performs the lookups of the turn, if several, those of the store that the first asks.
func (l *Loop) perform() {
	if l.lookups < 2 {
		return
	}
	var store client.API
	ctx := l.ctxs[0]
	n := 0
	for _, c := range l.turn[l.at:] {
		api, more, limit := c.Lookups()
		if more == 0 || store != nil && api != store {
			continue
		}
		store = api
		if limit == LimitEach {
			ctx = l.ctxs[1]
		}
		l.asked = append(l.asked, asked{c, n, n + more})
		n += more
	}
	defer func() {
		clear(l.asked)
		l.asked = l.asked[:0]
		clear(l.ops[:min(n, len(l.ops))])
		if l.ctx.Err() != nil && l.of.Context.Err() == nil {
			l.renew()
		}
		if r := recover(); r != nil {
			// Each is performed alone, and this happens again to the one that it is about.
			l.of.Logger.Error("bug: lookups panicked", "panic", r, "stack", string(debug.Stack()))
		}
	}()
	if len(l.asked) < 2 {
		return // nothing to share
	}
	if n > len(l.ops) {
		l.ops = append(l.ops, make([]client.Op, n-len(l.ops))...)
	}
	for _, a := range l.asked {
		a.c.Ask(l.ops[a.from:a.to])
	}
	store.Do(ctx, l.ops[:n])
	stopped := l.ctx.Err() != nil
	for _, a := range l.asked {
		if ops := l.ops[a.from:a.to]; !stopped || allDone(ops) {
			a.c.Found(ops)
		}
	}
}

// allDone reports whether all lookups have an answer.
func allDone(ops []client.Op) bool {
	for i := range ops {
		if err := ops[i].Err; err != nil && !errors.Is(err, client.ErrNotFound) {
			return false
		}
	}
	return true
}
