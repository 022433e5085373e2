package session

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/heap"
	"github.com/kvd-project/kvd/internal/invariants"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/driver"
)

// Errors with which a lane ends an operation from outside.
var (
	// ErrLease: the session's lease ran out or it was fenced.
	ErrLease = errors.New("session lease expired")
	// ErrNoConn: the memory node cannot be reached.
	ErrNoConn = errors.New("memory node unreachable")
	// ErrBuffer: no registered memory for the operation's buffers.
	ErrBuffer = errors.New("no registered buffer")
)

// LimitError ends an operation that would have to read more than Task.Limit allows. It did not happen.
type LimitError struct {
	Want  int // bytes of the buffers that it has and the ones that it wanted
	Limit int // bytes
}

func (e *LimitError) Error() string {
	return fmt.Sprintf("buffers of %d bytes are wanted, at most %d are allowed", e.Want, e.Limit)
}

// Lane is one queue pair to each memory node with the tasks under way on them,
// part of the word cache and of the session's places. Keys hash to lanes.
type Lane struct {
	core *Core
	id   int

	cqs   []*rdma.CQ // by device
	conns []*conn    // by node id
	cache *wordCache
	mem   []*laneMem // by placement group id
	view  *View      // the one the cache and mem belong to

	tasks   []*Task // by index
	idle    []*Task
	active  []*Task // started and not recycled
	ready   []*Task
	wait    []*Task
	dirty   []*conn // with WRs not yet posted
	flushed []*conn // dirty's memory, in turn
	ran     []*conn // that have executed WRs whose rounds are not known to be over
	slabs   []*buffer
	sinks   *Task // set aside: its registered words take results of no interest
	quick   *Task // set aside: its registered slot is Quick's
	wcs     [64]rdma.WC

	quickWRs [3 * quickOps]rdma.WR
	touched  uint64 // so that touching is not optimized away

	notes     *noteTable // nil until there are access words
	noteWords *Task      // set aside: a ring of access words on their way
	noteN     int

	lastVersion uint64
	stamp       uint32
	disc        uint64
	released    uint64
	events      uint64

	Stats LaneStats

	mail struct {
		sync.Mutex
		fns []func(*Lane)
	}
	mailN atomic.Int32 // len(mail.fns), readable without the lock
	kick  chan struct{}

	acked, quiesced atomic.Uint64 // see Core.Acked
	synchronous     atomic.Bool
}

// LaneStats counts what a lane did.
type LaneStats struct {
	Ops, Rounds [index.NumKinds]uint64 // by index.Kind
	CacheHits   uint64
	CASLosses   uint64
	Unknown     uint64
	Leaked      uint64        // units left to recall
	MemoryWaits uint64        // operations that had to wait for memory
	Notes       uint64        // access words written
	Closed      rdma.Counters // of queue pairs that are gone
}

// conn is a lane's connection to one memory node.
type conn struct {
	node        uint32
	incarnation uint64
	dev         int
	qp          *rdma.QP
	up          bool
	asked       bool // Control was told
	caps        rdma.Caps
	wrs         []rdma.WR
	queued      bool // in Lane.dirty
	// chains are those in wrs, and those executed since, of a connection that executes within
	// PostSend: nothing of them is signaled.
	chains []chainEnd
	// noWait holds the accesses off the path that no later WC has proven done.
	noWait []offPath
	sink   []byte
	seq    uint64     // WRs handed to the queue pair or waiting in wrs
	keys   []connKeys // by placement group id
}

// chainEnd is a task whose accesses to one replica are a chain.
type chainEnd struct {
	t       *Task
	gen     uint32
	replica uint8
}

// connKeys remembers a member's keys at the connection's provider.
type connKeys struct {
	pg      *PG // nil: nothing remembered
	replica uint8
	keys    Keys
}

// offPath is a CAS on the index whose result nobody waits for. It belongs to the
// connection's memory node, whatever place that has in the chain by now.
type offPath struct {
	pg          uint32
	off         uint64
	expect, new uint64
	seq         uint64
}

// maxReplicas bounds a placement group's chain.
const maxReplicas = 8

// laneMem is a lane's places in one placement group.
type laneMem struct {
	generation uint32
	cache      *heap.Cache
	limbo      heap.Limbo
	// ready is the tag below which places have left limbo: until the next renewal they are
	// the lane's own, if it is one that needs places (used).
	ready uint64
	used  bool
	flow  *Flow
	due   struct{ supply, taken, given int64 } // not in flow yet, units
	shown int64                                // of limbo, in flow, units
}

// take and give keep flow's account, not at every step.

func (m *laneMem) take(units uint32) {
	m.used = true
	m.due.taken += int64(units)
	m.due.supply -= int64(units)
	if m.due.taken >= flowStep {
		m.settle()
	}
}

func (m *laneMem) give(units uint32) {
	m.due.given += int64(units)
	if m.due.supply += int64(units); m.due.supply >= flowStep {
		m.settle()
	}
}

func (m *laneMem) settle() {
	m.flow.add(m.due.supply, m.due.taken, m.due.given)
	m.due.supply, m.due.taken, m.due.given = 0, 0, 0
}

// show brings what the lane has in limbo into the account.
func (m *laneMem) show() {
	m.settle()
	limbo := int64(m.limbo.Units())
	m.flow.limbo.Add(limbo - m.shown)
	m.shown = limbo
}

// flowStep is how much a lane takes or gives before the account shows it, units.
const flowStep = 32

const (
	taskSlot   = 8 << 10 // bytes of registered buffer each task starts with
	cellsBytes = 8 * index.MaxCAS
)

type taskState uint8

const (
	taskIdle taskState = iota
	taskReady
	taskPosted
	taskWaiting // for an event or a time
	taskDone
)

// Task is one operation under way.
type Task struct {
	Op index.Op
	// Done is called when the Op is done, on the lane's goroutine; it may recycle
	// the task. May be nil.
	Done func(*Task)
	// Tag is the caller's.
	Tag any
	// Deadline, if not 0, ends the Op's waiting (Options.Nanos).
	Deadline int64
	// Limit, if not 0, bounds the bytes of large buffers for what the Op reads before it changes
	// anything; see LimitError. What it writes is not counted.
	Limit int

	lane     *Lane
	idx      uint32
	gen      uint32
	state    taskState
	orphan   error // the caller has gone; end when nothing is under way
	epoch    uint64
	pending  uint8 // bit per replica
	seqs     [maxReplicas]uint64
	pg       *PG
	leased   bool   // its round is nothing without a lease
	postView uint64 // map version under which it posted
	wakeAt   int64
	events   uint64
	want     index.Action
	stash    []byte // this task's registered slot
	used     int
	lkeys    []uint64
	big      []*buffer
	bufErr   error
	wanted   int    // bytes of big, and of what was refused, while Limit is in force
	starved  uint64 // first renewal after memory, or a split, was first missed
	missed   int64  // when memory was (Options.Nanos)
	astray   astray
	activeAt int
}

// astray is how often in a row an Op was astray in a map, see index.Op.Astray.
type astray struct {
	version uint64
	looks   int
	since   uint64 // first renewal after the last of astrayLooks; 0: not yet
}

// astrayLooks is how often a group must tell of a move that the map does not have before the
// directory's word counts: a READ is no snapshot, and one that is cleared after a move may be seen
// half.
const astrayLooks = 3

// wander notes that t's Op waits, and tells it whether a newer map can be what it waits for.
func (l *Lane) wander(t *Task) {
	if !t.Op.Astray() {
		t.astray = astray{}
		return
	}
	a := &t.astray
	if v := t.Op.Route.MapVersion; a.version != v {
		*a = astray{version: v}
	}
	if a.looks++; a.looks == astrayLooks {
		a.since = l.core.sendSeq.Load() + 1
	}
	if a.since != 0 && l.core.isNewest(a.version, a.since) {
		t.Op.MapCurrent = a.version
	}
}

func newLane(c *Core, id int) (*Lane, error) {
	l := &Lane{core: c, id: id, kick: make(chan struct{}, 1),
		disc: uint64(c.opts.Discriminator)<<4 | uint64(id)}
	for i := range l.quickWRs {
		l.quickWRs[i].ID = noWaitID
	}
	l.cache = newWordCache(c.opts.CacheBytes / c.opts.Lanes)
	for _, d := range c.opts.Devices {
		cq, err := d.CreateCQ(8192)
		if err != nil {
			return nil, err
		}
		l.cqs = append(l.cqs, cq)
	}
	var err error
	if l.sinks, err = l.NewTask(); err == nil {
		l.quick, err = l.NewTask()
	}
	return l, err
}

// ID is the lane's number in its session.
func (l *Lane) ID() int { return l.id }

// CQ is the lane's completion queue on the i-th device.
func (l *Lane) CQ(i int) *rdma.CQ { return l.cqs[i] }

// Deliver runs f on the lane's goroutine at its next Pump. Any goroutine may
// call it.
func (l *Lane) Deliver(f func(*Lane)) {
	l.mail.Lock()
	l.mail.fns = append(l.mail.fns, f)
	l.mailN.Store(int32(len(l.mail.fns)))
	l.mail.Unlock()
	l.Kick()
}

// Kick wakes whoever waits for the lane.
func (l *Lane) Kick() {
	select {
	case l.kick <- struct{}{}:
	default:
	}
}

// Kicked receives after a Kick or Deliver.
func (l *Lane) Kicked() <-chan struct{} { return l.kick }

// ---- tasks -----------------------------------------------------------------

// NewTask takes a fresh task; fill in Op's request and Start it.
func (l *Lane) NewTask() (*Task, error) {
	if n := len(l.idle); n > 0 {
		t := l.idle[n-1]
		l.idle = l.idle[:n-1]
		return t, nil
	}
	n := l.core.opts.SlabTasks
	b, err := l.core.bufs.register(n * taskSlot)
	if err != nil {
		return nil, err
	}
	l.slabs = append(l.slabs, b)
	for i := range n {
		t := &Task{lane: l, idx: uint32(len(l.tasks)), stash: b.b[i*taskSlot : (i+1)*taskSlot : (i+1)*taskSlot], lkeys: b.lkeys}
		l.tasks = append(l.tasks, t)
		l.idle = append(l.idle, t)
	}
	return l.NewTask()
}

// Start begins the task's Op; Pump moves it on.
func (l *Lane) Start(t *Task) {
	if invariants.On {
		t.check("start", taskIdle)
	}
	t.used = cellsBytes
	t.epoch = l.core.epoch.Load()
	t.activeAt = len(l.active)
	l.active = append(l.active, t)
	l.refreshView()
	t.Op.Start(t)
	t.state = taskReady
	l.ready = append(l.ready, t)
}

// Recycle takes back a done task; its Op's answer and buffers are void.
func (l *Lane) Recycle(t *Task) {
	if invariants.On {
		t.check("be recycled", taskDone, taskIdle)
	}
	if t.state != taskDone && t.state != taskIdle {
		panic("session: recycle of a task under way")
	}
	for _, b := range t.big {
		l.core.bufs.put(b)
	}
	clear(t.big)
	t.big = t.big[:0]
	t.Op.Reset()
	t.gen++
	t.state, t.orphan, t.Done, t.Tag, t.Deadline, t.Limit, t.pg, t.bufErr, t.wanted, t.want, t.starved, t.missed = taskIdle, nil, nil, nil, 0, 0, nil, nil, 0, 0, 0, 0
	t.astray = astray{}
	l.idle = append(l.idle, t)
}

// Orphan says that the caller no longer waits for t: when nothing of it is under
// way any more it ends with err, and Done is called then.
func (l *Lane) Orphan(t *Task, err error) {
	if t.state == taskDone {
		return
	}
	t.orphan = err
	if t.state == taskWaiting || t.state == taskReady {
		l.fail(t, err)
	}
}

// Waiting is what the task waits for: 0 while it is ready, posted or done.
func (t *Task) Waiting() index.Action {
	if t.state != taskWaiting {
		return 0
	}
	return t.want
}

// IsDone reports whether t's answer is final.
func (t *Task) IsDone() bool { return t.state == taskDone }

// Tasks are the operations under way; a copy.
func (l *Lane) Tasks() []*Task { return append([]*Task(nil), l.active...) }

// Active is the number of operations under way.
func (l *Lane) Active() int { return len(l.active) }

// Oldest is the least reclaim epoch at the start of an operation under way.
func (l *Lane) Oldest() (epoch uint64, ok bool) {
	for _, t := range l.active {
		if t.want == index.Alloc && t.state == taskWaiting {
			continue // begins when there is memory
		}
		if !ok || t.epoch < epoch {
			epoch, ok = t.epoch, true
		}
	}
	return epoch, ok
}

// Pump moves every task as far as it goes without waiting: runs mail, wakes
// waiting tasks, posts, polls. It reports whether anything moved.
func (l *Lane) Pump() bool {
	moved := l.runMail()
	if l.core.view.Load() != l.view {
		l.refreshView()
		moved = true
	}
	if r := l.core.releasable.Load(); r != l.released {
		l.release(r)
	}
	if len(l.wait) > 0 {
		moved = l.wakeWaiting() || moved
	}
	for {
		for len(l.ready) > 0 {
			t := l.ready[len(l.ready)-1]
			l.ready = l.ready[:len(l.ready)-1]
			moved = true
			l.advance(t)
		}
		l.flush()
		if any := l.poll(); !l.executed() && !any {
			if len(l.ready) == 0 {
				break
			}
		} else {
			moved = true
		}
	}
	l.ack()
	if invariants.On {
		l.check()
	}
	return moved
}

// ack notes which map versions the lane has acknowledged.
func (l *Lane) ack() {
	v := l.view
	if v == nil || l.acked.Load() == v.Version && l.quiesced.Load() == v.Version {
		return // operations that began since act by this map
	}
	acked, quiesced := v.Version, v.Version
	for _, t := range l.active {
		if at, ok := t.Op.MapVersion(); ok {
			acked = min(acked, at)
		}
		if t.state == taskPosted {
			quiesced = min(quiesced, t.postView)
		}
	}
	l.acked.Store(acked)
	l.quiesced.Store(quiesced)
}

// Overdue is an operation with verbs under way whose deadline has passed, or nil.
// Its caller need not wait any longer; see Orphan.
func (l *Lane) Overdue() *Task {
	now := int64(0)
	for _, t := range l.active {
		if t.state == taskPosted && t.orphan == nil && t.Deadline != 0 {
			if now == 0 {
				now = l.core.opts.Nanos()
			}
			if now >= t.Deadline {
				return t
			}
		}
	}
	return nil
}

// NextWake is when the earliest task wants to be pumped again or is overdue
// (Options.Nanos), 0 if none does.
func (l *Lane) NextWake() (at int64) {
	for _, t := range l.active {
		if t.state == taskPosted && t.orphan == nil && t.Deadline != 0 && (at == 0 || t.Deadline < at) {
			at = t.Deadline
		}
	}
	for _, t := range l.wait {
		w := t.wakeAt
		if t.Deadline != 0 && (w == 0 || t.Deadline < w) {
			w = t.Deadline
		}
		if w != 0 && (at == 0 || w < at) {
			at = w
		}
	}
	return at
}

func (l *Lane) runMail() bool {
	if l.mailN.Load() == 0 {
		return false
	}
	l.mail.Lock()
	fns := l.mail.fns
	l.mail.fns = nil
	l.mailN.Store(0)
	l.mail.Unlock()
	for _, f := range fns {
		f(l)
	}
	if len(fns) > 0 {
		l.events++
	}
	return len(fns) > 0
}

func (l *Lane) wakeWaiting() (moved bool) {
	now := l.core.opts.Nanos()
	keep := l.wait[:0]
	waiting := l.wait
	for _, t := range waiting {
		switch {
		case t.Deadline != 0 && now >= t.Deadline:
			l.failWaiting(t)
			moved = true
		case t.events != l.events || t.wakeAt != 0 && now >= t.wakeAt:
			t.state = taskReady
			l.ready = append(l.ready, t)
			moved = true
		default:
			keep = append(keep, t)
		}
	}
	clear(waiting[len(keep):])
	l.wait = keep
	return moved
}

// failWaiting ends a task whose time is over; what it waited for says how.
func (l *Lane) failWaiting(t *Task) {
	switch t.want {
	case index.Alloc:
		pg, _ := t.Op.Wanted()
		if !l.core.Exhausted(pg) && (t.starved == 0 || l.core.exhausted(pg) < t.starved) {
			// Nobody said that there is none.
			l.finish(t, fmt.Errorf("%w: no memory of placement group %d was granted", ErrTimeout, pg))
			return
		}
		l.core.gaveUp(pg, t.missed)
		l.finish(t, fmt.Errorf("%w: placement group %d has no memory left, and what was on its way did not come in time", index.ErrFull, pg))
	case index.Refresh:
		l.finish(t, fmt.Errorf("%w: no active view of its placement group", ErrTimeout))
	case index.Grow:
		l.finish(t, fmt.Errorf("%w: shard %d is full and was not split", ErrTimeout, t.Op.Route.Shard))
	case index.Reconnect:
		l.finish(t, ErrNoConn)
	case index.AskFenced:
		l.finish(t, fmt.Errorf("%w: insert lock held by session %d", ErrTimeout, t.Op.LockOwner))
	default:
		l.finish(t, ErrTimeout)
	}
}

// finish ends t with err, nothing of which is under way.
func (l *Lane) finish(t *Task, err error) {
	if t.want == index.Post {
		t.Op.NotPosted() // it still waits for a connection
	}
	l.end(t, t.Op.Fail(err))
}

// ErrTimeout: the operation's time ran out while it waited.
var ErrTimeout = errors.New("timed out")

// fail ends a task that is ready or waiting.
func (l *Lane) fail(t *Task, err error) {
	remove(&l.ready, t)
	remove(&l.wait, t)
	l.finish(t, err)
}

func remove(list *[]*Task, t *Task) {
	for i, x := range *list {
		if x == t {
			*list = append((*list)[:i], (*list)[i+1:]...)
			return
		}
	}
}

// advance obeys the Op until it has to wait.
func (l *Lane) advance(t *Task) {
	if t.want == index.Alloc {
		t.epoch = l.core.epoch.Load()
	}
	if t.want == index.Reconnect && !l.reconnected(t) {
		l.park(t, index.Reconnect, 0)
		return
	}
	if t.want == index.Post && !l.posted(t) { // wanted to post, a connection was down
		return
	}
	for {
		if t.orphan != nil {
			l.finish(t, t.orphan)
			return
		}
		if t.Op.Route.PG != nil && !l.current(t) {
			t.Op.Rebase()
		}
		a := t.Op.Next()
		t.want = a
		if t.bufErr != nil {
			l.finish(t, fmt.Errorf("%w: %w", ErrBuffer, t.bufErr))
			return
		}
		switch a {
		case index.Post:
			if !l.posted(t) {
				return
			}
		case index.Done:
			l.end(t, a)
			return
		case index.Alloc:
			sent, released := l.core.Renewals()
			pg, _ := t.Op.Wanted()
			if t.starved == 0 {
				t.starved, t.missed = sent+1, l.core.opts.Nanos()
				l.Stats.MemoryWaits++
			} else if released > t.starved+1 && t.Op.Route.PG.AccessOff == 0 {
				// All that was in limbo has come back.
				if err := l.core.noMemory(pg, t.starved, t.missed); err != nil {
					l.finish(t, err)
					return
				}
			}
			l.postNoWait(t)
			l.wantMemory(t)
			l.park(t, a, 0)
			return
		case index.Grow:
			shard := t.Op.Route.Shard
			cache := t.Op.Route.PG.AccessOff != 0
			if cache {
				home, stash := layout.GroupOff(t.Op.Hash, t.Op.Route.Clusters)
				l.core.opts.Control.WantRoom(t.Op.Route.PG.ID, t.Op.Route.ShardOff+home, t.Op.Route.ShardOff+stash)
			}
			sent, _ := l.core.Renewals()
			if t.starved == 0 {
				t.starved = sent + 1
			} else if l.core.noGrowth(shard) >= t.starved && !cache {
				l.finish(t, fmt.Errorf("%w: shard %d cannot be split", index.ErrFull, shard))
				return
			}
			l.postNoWait(t)
			l.core.opts.Control.WantSplit(shard)
			l.park(t, a, max(backoff(t.Op.Waits), 1e6))
			return
		case index.Refresh:
			v := uint64(0)
			if view := l.view; view != nil {
				v = view.Version
			}
			l.core.opts.Control.WantMap(v)
			l.wander(t)
			l.postNoWait(t)
			l.park(t, a, backoff(t.Op.Waits))
			return
		case index.Backoff:
			l.wander(t)
			l.postNoWait(t)
			l.park(t, a, backoff(t.Op.Waits))
			return
		case index.AskFenced:
			l.postNoWait(t)
			if l.core.isFenced(t.Op.LockOwner) {
				t.Op.OwnerFenced = true
				continue
			}
			if t.Op.Waits > 16 && t.Op.LockOwner != l.core.opts.Session {
				l.core.opts.Control.WantFenced(t.Op.LockOwner)
			}
			l.park(t, a, backoff(t.Op.Waits))
			return
		case index.Reconnect:
			if !l.reconnected(t) {
				l.park(t, a, 0)
				return
			}
		}
	}
}

// posted posts what the Op wants posted. It is true if the view has changed since
// the Op asked: nothing was posted, and Next is to be called again.
func (l *Lane) posted(t *Task) (stale bool) {
	if t.Op.Route.PG != nil && !l.current(t) {
		t.Op.NotPosted()
		t.Op.Rebase()
		t.want = 0
		return true
	}
	if !l.post(t) {
		l.park(t, index.Post, 0)
	}
	return false
}

// backoff grows from 1 µs to 1 ms.
func backoff(n int32) int64 { return 1000 << min(n/2, 10) }

func (l *Lane) park(t *Task, a index.Action, after int64) {
	t.want, t.state, t.events = a, taskWaiting, l.events
	t.wakeAt = 0
	if after > 0 {
		t.wakeAt = l.core.opts.Nanos() + after
	}
	l.wait = append(l.wait, t)
}

// end finishes t with the Op's answer. NoWait accesses are posted; the Op stays
// in the reclaim accounts until Recycle's caller has its answer.
func (l *Lane) end(t *Task, _ index.Action) {
	l.postNoWait(t)
	t.state = taskDone
	k := t.Op.Kind
	l.Stats.Ops[k]++
	l.Stats.Rounds[k] += uint64(t.Op.Rounds)
	if t.Op.Err != nil && errors.Is(t.Op.Err, index.ErrUnknown) {
		l.Stats.Unknown++
	}
	last := len(l.active) - 1
	l.active[t.activeAt] = l.active[last]
	l.active[t.activeAt].activeAt = t.activeAt
	l.active[last] = nil
	l.active = l.active[:last]
	if t.Done != nil {
		t.Done(t)
	}
}

// current reports whether the view that t's Op acts by is in force: the epoch is
// the same, and verbs may be posted.
func (l *Lane) current(t *Task) bool {
	v := l.view
	pg := v.pg(t.Op.Route.PG.ID)
	return pg != nil && pg.Epoch == t.Op.Route.PG.Epoch && (pg.Active || pg.Frozen && t.Op.OnFrozen())
}

// ---- posting ---------------------------------------------------------------

// connOf returns the usable connection to replica r of t's placement group, or
// nil and asks for one.
func (l *Lane) connOf(pg *PG, r uint8) *conn {
	m := &pg.Members[r]
	if int(m.Node) < len(l.conns) {
		if c := l.conns[m.Node]; c != nil && c.up {
			if c.incarnation == m.Incarnation {
				return c
			}
			l.drop(c)
		}
	}
	l.want(m.Node)
	return nil
}

// connTo is the entry for a node, perhaps without a queue pair.
func (l *Lane) connTo(node uint32) *conn {
	for int(node) >= len(l.conns) {
		l.conns = append(l.conns, nil)
	}
	c := l.conns[node]
	if c == nil {
		c = &conn{node: node}
		l.conns[node] = c
	}
	return c
}

// want asks Control for a connection that is down, once.
func (l *Lane) want(node uint32) {
	if c := l.connTo(node); !c.up && !c.asked {
		c.asked = true
		l.core.opts.Control.WantConn(l, node)
	}
}

// post turns the Op's accesses into WRs, one chain a replica. It is false, and
// nothing was posted, while a connection is down.
func (l *Lane) post(t *Task) bool {
	v := l.view
	pg := v.pg(t.Op.Route.PG.ID)
	if pg == nil || pg.Epoch != t.Op.Route.PG.Epoch {
		return false // the next try sees it
	}
	var conns [maxReplicas]*conn
	var last [maxReplicas]int
	leased := pg.Replicas > 1
	for i := range t.Op.Accesses {
		r := t.Op.Accesses[i].Replica
		leased = leased || t.Op.Accesses[i].Verb != index.Read
		if conns[r] == nil {
			c := l.connOf(pg, r)
			if c == nil {
				return false
			}
			conns[r] = c
			leased = leased || !c.caps.SelfFencing
		}
		if !t.Op.Accesses[i].NoWait {
			last[r] = i
		}
	}
	if leased && !l.valid() {
		l.finish(t, ErrLease)
		return true
	}
	t.pg, t.leased = pg, leased
	t.postView = v.Version
	t.pending = 0
	cells := 0
	id := uint64(t.gen)<<32 | uint64(t.idx)<<8
	for i := range t.Op.Accesses {
		a := &t.Op.Accesses[i]
		c := conns[a.Replica]
		if a.NoWait {
			l.addNoWait(c, pg, a.Replica, offPathOf(pg, a))
			continue
		}
		wr := c.next(l)
		wr.ID = id | uint64(a.Replica)
		if last[a.Replica] == i {
			if t.pending |= 1 << a.Replica; c.caps.Synchronous {
				c.chains = append(c.chains, chainEnd{t, t.gen, a.Replica})
			} else {
				wr.Flags = rdma.Signaled
			}
		}
		k := l.keysOf(c, pg, a.Replica)
		if a.Space == index.Index {
			wr.RemoteAddr, wr.RKey = k.IndexBase+a.Off, k.IndexRKey
		} else {
			wr.RemoteAddr, wr.RKey = k.HeapBase+a.Off-pg.IndexBytes, k.HeapRKey
		}
		switch a.Verb {
		case index.Read:
			wr.Op, wr.Local = rdma.OpRead, a.Buf
			if !c.caps.AtomicThenRead {
				wr.Flags |= rdma.Fence
			}
		case index.Write:
			wr.Op, wr.Local = rdma.OpWrite, a.Buf
		case index.CAS:
			wr.Op, wr.Compare, wr.Swap = rdma.OpCmpAndSwp, a.Expect, a.New
			wr.Local = t.stash[8*cells : 8*cells+8 : 8*cells+8]
			cells++
		}
		wr.LKey = t.lkey(wr.Local, c.dev)
		c.seq++
		t.seqs[a.Replica] = c.seq
	}
	t.state, t.want = taskPosted, 0
	return true
}

// keysOf gives the keys of pg's replica r at the connection's provider.
func (l *Lane) keysOf(c *conn, pg *PG, r uint8) *Keys {
	for int(pg.ID) >= len(c.keys) {
		c.keys = append(c.keys, connKeys{})
	}
	e := &c.keys[pg.ID]
	if e.pg != pg || e.replica != r {
		*e = connKeys{pg, r, pg.Members[r].Keys[l.core.opts.Devices[c.dev].Name()]}
	}
	return &e.keys
}

// lkey finds the registration of b, which lies in the task's slot or in one of
// its large buffers.
func (t *Task) lkey(b []byte, dev int) uint64 {
	p := uintptr(unsafe.Pointer(unsafe.SliceData(b)))
	if off := p - uintptr(unsafe.Pointer(unsafe.SliceData(t.stash))); off < taskSlot {
		return t.lkeys[dev]
	}
	for _, g := range t.big {
		if off := p - uintptr(unsafe.Pointer(unsafe.SliceData(g.b))); off < uintptr(len(g.b)) {
			return g.lkeys[dev]
		}
	}
	return 0
}

// next is a WR, all zero, at the end of those that the connection is to post.
func (c *conn) next(l *Lane) *rdma.WR {
	c.wrs = append(c.wrs, rdma.WR{})
	if !c.queued {
		c.queued = true
		l.dirty = append(l.dirty, c)
	}
	return &c.wrs[len(c.wrs)-1]
}

// addNoWait posts a CAS whose result nobody waits for. It is remembered until a
// later WC of the queue pair proves it done, and repeated after a reconnection.
func (l *Lane) addNoWait(c *conn, pg *PG, replica uint8, o offPath) {
	k := l.keysOf(c, pg, replica)
	c.seq++
	o.seq = c.seq
	c.noWait = append(c.noWait, o)
	wr := c.next(l)
	*wr = rdma.WR{ID: noWaitID, Op: rdma.OpCmpAndSwp, RemoteAddr: k.IndexBase + o.off, RKey: k.IndexRKey,
		Compare: o.expect, Swap: o.new, Local: c.sink, LKey: l.sinks.lkeys[c.dev]}
	if len(c.noWait)%signalEvery == 0 {
		wr.Flags = rdma.Signaled // only a WC makes room in the send queue
	}
}

func offPathOf(pg *PG, a *index.Access) offPath {
	return offPath{pg: pg.ID, off: a.Off, expect: a.Expect, new: a.New}
}

const noWaitID = 0xff

// signalEvery is how many unsignaled WRs may follow each other, a small part of any
// send queue.
const signalEvery = 16

// postNoWait posts the NoWait accesses that came with an action other than Post.
func (l *Lane) postNoWait(t *Task) {
	if len(t.Op.Accesses) == 0 || t.Op.Route.PG == nil {
		return
	}
	v := l.view
	if v == nil {
		return
	}
	// All are aimed at the arbiter. In another epoch the arbiter may be another
	// replica, where they find nothing to change.
	pg := v.pg(t.Op.Route.PG.ID)
	if pg == nil || pg.Generation != t.Op.Route.PG.Generation || !pg.Active && !pg.Frozen {
		t.Op.Accesses = t.Op.Accesses[:0]
		return
	}
	for i := range t.Op.Accesses {
		if a := &t.Op.Accesses[i]; a.NoWait {
			m := &pg.Members[a.Replica]
			c := l.connTo(m.Node)
			if c.up && c.incarnation == m.Incarnation {
				l.addNoWait(c, pg, a.Replica, offPathOf(pg, a))
			} else {
				o := offPathOf(pg, a)
				o.seq = math.MaxUint64 // no WC proves what was never posted
				c.noWait = append(c.noWait, o)
				l.want(m.Node)
			}
		}
	}
	t.Op.Accesses = t.Op.Accesses[:0]
}

// flush rings one doorbell a connection.
func (l *Lane) flush() {
	if len(l.dirty) == 0 {
		return
	}
	list := l.dirty
	l.dirty = l.flushed[:0] // a round that ends here may add to it
	for _, c := range list {
		if !l.ring(c) {
			l.dirty = append(l.dirty, c)
		}
	}
	clear(list)
	l.flushed = list
}

// ring posts what the connection is to post; false: its send queue has no room for the rest.
func (l *Lane) ring(c *conn) bool {
	n, err := c.qp.PostSend(c.wrs)
	for ; n < len(c.wrs) && c.up && errors.Is(err, rdma.ErrQueueFull); n, err = c.qp.PostSend(c.wrs) {
		c.wrs = c.wrs[:copy(c.wrs, c.wrs[n:])]
		if n == 0 || !c.caps.Synchronous {
			return false
		}
	}
	if n < len(c.wrs) {
		l.refused(c, c.wrs[n:])
		l.drop(c)
	}
	c.wrs = c.wrs[:0]
	c.queued = false
	if len(c.chains) > 0 {
		l.ran = append(l.ran, c)
	}
	return true
}

// executed ends the chains that PostSend has executed. Those that failed had a WC, which poll has taken.
func (l *Lane) executed() (any bool) {
	for len(l.ran) > 0 {
		c := l.ran[len(l.ran)-1]
		l.ran = l.ran[:len(l.ran)-1]
		for i := range c.chains {
			x := &c.chains[i]
			l.chainOver(x.t, x.gen, x.replica, true)
		}
		clear(c.chains)
		c.chains = c.chains[:0]
		any = true
	}
	return any
}

// poll takes completions and makes tasks ready whose round is over.
func (l *Lane) poll() (any bool) {
	for _, cq := range l.cqs {
		for {
			n := cq.Poll(l.wcs[:])
			for i := range l.wcs[:n] {
				wc := &l.wcs[i]
				ok := wc.Status == driver.Success
				var c *conn
				if !ok {
					c = l.connByQP(wc.QPNum)
				}
				l.complete(wc.ID, ok)
				if c != nil && !ok {
					l.drop(c)
				}
			}
			any = any || n > 0
			if n < len(l.wcs) {
				break
			}
		}
	}
	return any
}

func (l *Lane) connByQP(num uint32) *conn {
	for _, c := range l.conns {
		if c != nil && c.qp != nil && c.qp.Num() == num {
			return c
		}
	}
	return nil
}

// refused fails the chains of WRs that were not posted. A CAS among them certainly
// did not happen.
func (l *Lane) refused(c *conn, wrs []rdma.WR) {
	for i := range wrs {
		w := &wrs[i]
		idx := uint32(w.ID) >> 8
		if w.Op != rdma.OpCmpAndSwp || w.ID == noWaitID || int(idx) >= len(l.tasks) || l.tasks[idx].gen != uint32(w.ID>>32) {
			continue
		}
		for j := range l.tasks[idx].Op.Accesses {
			a := &l.tasks[idx].Op.Accesses[j]
			if a.Verb == index.CAS && !a.NoWait && a.Replica == uint8(w.ID) && a.Expect == w.Compare && a.New == w.Swap {
				a.Refused = true
			}
		}
	}
	for i := range wrs {
		l.complete(wrs[i].ID, false)
	}
}

// complete notes one chain's end.
func (l *Lane) complete(id uint64, ok bool) {
	if idx := uint32(id) >> 8; id != noWaitID && int(idx) < len(l.tasks) {
		l.chainOver(l.tasks[idx], uint32(id>>32), uint8(id), ok)
	}
}

// chainOver notes the end of a task's chain to replica r, if that is still under way.
func (l *Lane) chainOver(t *Task, gen uint32, r uint8, ok bool) {
	if gen != t.gen || t.state != taskPosted || t.pending&(1<<r) == 0 {
		return
	}
	t.pending &^= 1 << r
	if !ok {
		for i := range t.Op.Accesses {
			if t.Op.Accesses[i].Replica == r {
				t.Op.Accesses[i].Failed = true
			}
		}
	} else if c := l.conns[t.pg.Members[r].Node]; len(c.noWait) > 0 {
		c.proven(t.seqs[r])
	}
	if t.pending == 0 {
		l.roundOver(t)
	}
}

// proven forgets NoWait accesses posted before the WR numbered seq, which has
// completed: WRs of one queue pair take effect in order.
func (c *conn) proven(seq uint64) {
	n := 0
	for n < len(c.noWait) && c.noWait[n].seq < seq {
		n++
	}
	c.noWait = c.noWait[:copy(c.noWait, c.noWait[n:])]
}

func (l *Lane) roundOver(t *Task) {
	cells := 0
	for i := range t.Op.Accesses {
		a := &t.Op.Accesses[i]
		if a.Verb == index.CAS && !a.NoWait {
			a.Found = binary.LittleEndian.Uint64(t.stash[8*cells:])
			cells++
			if a.Found != a.Expect {
				l.Stats.CASLosses++
			}
		}
	}
	t.state = taskReady
	if t.pg != nil && t.leased && !l.valid() {
		l.finish(t, ErrLease)
		return
	}
	l.ready = append(l.ready, t)
}

// valid checks the lease: before posting, so that nothing happens without one, and
// after completion, which alone makes a READ's bytes worth anything.
func (l *Lane) valid() bool { return l.core.LeaseValid() }

// ---- connections -----------------------------------------------------------

// drop marks a connection broken; Control replaces it.
func (l *Lane) drop(c *conn) {
	if !c.up {
		return
	}
	c.up = false
	l.want(c.node)
}

// Detach hands the node's queue pair, and whose memory it reaches, back for
// closing. Only after QP.Close has returned and the peer has confirmed may Attach
// bring another.
func (l *Lane) Detach(node uint32) (*rdma.QP, uint64) {
	if int(node) >= len(l.conns) || l.conns[node] == nil || l.conns[node].qp == nil {
		return nil, 0
	}
	c := l.conns[node]
	c.up = false
	return c.qp, c.incarnation
}

// Closed says that the queue pair from Detach is closed: WCs that are not there
// by now never come.
func (l *Lane) Closed(node uint32) {
	c := l.conns[node]
	if c == nil || c.qp == nil {
		return
	}
	l.poll()
	cnt := c.qp.Counters()
	l.Stats.Closed.Add(&cnt)
	c.qp = nil
	l.setSynchronous()
	l.refused(c, c.wrs)
	c.wrs = c.wrs[:0]
	clear(c.chains)
	c.chains = c.chains[:0]
	if c.queued {
		c.queued = false
		for i, d := range l.dirty {
			if d == c {
				l.dirty = append(l.dirty[:i], l.dirty[i+1:]...)
				break
			}
		}
	}
	for _, t := range l.Tasks() {
		if t.state != taskPosted || t.pg == nil {
			continue
		}
		for r := range t.pg.Members {
			if t.pg.Members[r].Node == node {
				l.chainOver(t, t.gen, uint8(r), false)
			}
		}
	}
}

// Synchronous reports whether all of the lane's connections execute within PostSend. Any
// goroutine may call it.
func (l *Lane) Synchronous() bool { return l.synchronous.Load() }

func (l *Lane) setSynchronous() {
	some, all := false, true
	for _, c := range l.conns {
		if c != nil && c.qp != nil {
			some, all = true, all && c.caps.Synchronous
		}
	}
	l.synchronous.Store(some && all)
}

// Attach installs a connected queue pair on the dev-th device. Nothing that the
// lane posted to the node before can land any more.
func (l *Lane) Attach(node uint32, incarnation uint64, dev int, qp *rdma.QP) {
	c := l.connTo(node)
	c.incarnation, c.dev, c.qp, c.up, c.asked = incarnation, dev, qp, true, false
	c.caps = l.core.opts.Devices[dev].Caps()
	l.setSynchronous()
	c.keys = nil
	at := node % (taskSlot / 8) * 8
	c.sink = l.sinks.stash[at : at+8 : at+8]
	// Repeat what was off the path and is not known to be done.
	again := c.noWait
	c.noWait = nil
	v := l.view
	for i := range again {
		if v == nil {
			break
		}
		pg := v.pg(again[i].pg)
		if pg == nil || !pg.Active && !pg.Frozen {
			continue
		}
		for r := range pg.Members {
			if m := &pg.Members[r]; m.Node == node && m.Incarnation == incarnation {
				l.addNoWait(c, pg, uint8(r), again[i])
			}
		}
	}
	l.events++
}

// ConnFailed says that WantConn's connection cannot be had now; tasks that need
// it go on waiting until their deadline, or end with err if lost.
func (l *Lane) ConnFailed(node uint32, lost bool, err error) {
	c := l.connTo(node)
	c.asked = false
	if !lost {
		l.events++ // waiting tasks ask again
		return
	}
	for i := len(l.wait) - 1; i >= 0; i-- {
		if t := l.wait[i]; t.want == index.Post || t.want == index.Reconnect {
			for r := range l.members(t) {
				if l.members(t)[r].Node == node {
					l.fail(t, err)
					break
				}
			}
		}
	}
}

func (l *Lane) members(t *Task) []Member {
	if v := l.view; v != nil && t.Op.Route.PG != nil {
		if pg := v.PGs[t.Op.Route.PG.ID]; pg != nil {
			return pg.Members
		}
	}
	return nil
}

// reconnected reports whether every replica of t's placement group has a live
// connection again.
func (l *Lane) reconnected(t *Task) bool {
	if !l.current(t) {
		return true // it goes on in another view
	}
	pg := l.view.pg(t.Op.Route.PG.ID)
	ok := true
	for r := range pg.Members {
		ok = l.connOf(pg, uint8(r)) != nil && ok
	}
	return ok
}

// Conns calls f for every live connection.
func (l *Lane) Conns(f func(node uint32, dev int, qp *rdma.QP)) {
	for _, c := range l.conns {
		if c != nil && c.qp != nil {
			f(c.node, c.dev, c.qp)
		}
	}
}

// Counters sums the verbs of the lane's queue pairs, also of closed ones.
func (l *Lane) Counters() (n rdma.Counters) {
	n = l.Stats.Closed
	for _, c := range l.conns {
		if c != nil && c.qp != nil {
			q := c.qp.Counters()
			n.Add(&q)
		}
	}
	return n
}

func (l *Lane) closeBuffers() {
	for _, t := range l.tasks { // those that never ended, too
		for _, b := range t.big {
			l.core.bufs.put(b)
		}
		t.big = nil
	}
	for _, b := range l.slabs {
		_ = b.free()
	}
	l.slabs, l.tasks, l.idle = nil, nil, nil
	for _, cq := range l.cqs {
		_ = cq.Close()
	}
	l.cqs = nil
}

// ---- memory ----------------------------------------------------------------

func (l *Lane) memOf(pg *index.PG) *laneMem {
	for int(pg.ID) >= len(l.mem) {
		l.mem = append(l.mem, nil)
	}
	m := l.mem[pg.ID]
	if m == nil || m.generation != pg.Generation {
		if m != nil && m.generation > pg.Generation {
			return nil // an Op that outlived its memory
		}
		m = &laneMem{generation: pg.Generation, cache: heap.NewCache(l.core.heapOf(pg.ID, pg.Generation)), flow: l.core.flowOf(pg.ID, pg.Generation)}
		l.mem[pg.ID] = m
	}
	return m
}

// recalled reports whether w's place lies in an extent being recalled: it is
// nobody's any more.
func (l *Lane) recalled(pg *index.PG, w layout.Word) bool {
	if l.view != nil {
		if p := l.view.pg(pg.ID); p != nil {
			return p.IsRecalled(w.Unit())
		}
	}
	return false
}

func (l *Lane) wantMemory(t *Task) {
	l.core.opts.Control.WantMemory(t.Op.Wanted())
}

// release frees what has waited long enough in limbo, and the lane has not used again
// since the last release.
func (l *Lane) release(before uint64) {
	l.released = before
	for _, m := range l.mem {
		if m == nil {
			continue
		}
		free := m.ready
		if m.ready = before; m.cache.Starved() {
			free = before
		}
		m.limbo.Release(free, m.cache.Free)
		m.show()
	}
	l.events++
}

// GiveBack returns the lane's idle places to the session's heaps, for other
// lanes, unless it uses them itself and no other lacks them; if all is set (the session
// is closing) all of them, and limbo places too.
func (l *Lane) GiveBack(all bool) {
	if r := l.core.releasable.Load(); r != l.released {
		l.release(r)
	}
	for _, m := range l.mem {
		if m == nil {
			continue
		}
		switch {
		case all:
			m.limbo.Release(^uint64(0), m.cache.Free)
		case !m.used || m.cache.Starved():
			m.limbo.Release(m.ready, m.cache.Free)
		default:
			m.used = false
			m.show()
			continue
		}
		m.cache.Flush()
		m.show()
	}
}

// Performed is how many operations of users the lane has ended.
func (l *Lane) Performed() (n uint64) {
	for kind, ops := range l.Stats.Ops {
		if kind := index.Kind(kind); kind != index.Evict {
			n += ops
		}
	}
	return n
}

// LimboUnits is what waits in the lane's limbo.
func (l *Lane) LimboUnits() (n uint64) {
	for _, m := range l.mem {
		if m != nil {
			n += m.limbo.Units()
		}
	}
	return n
}

// CachedUnits is what the lane's magazines hold.
func (l *Lane) CachedUnits() (n uint64) {
	for _, m := range l.mem {
		if m != nil {
			n += m.cache.Units()
		}
	}
	return n
}

// refreshView makes the newest map the lane's: what it takes away is dropped, and
// connections to memory that is given up are closed, which ends what hangs on them.
func (l *Lane) refreshView() {
	v := l.core.View()
	if v == l.view {
		return
	}
	old := l.view
	l.view = v
	l.events++
	for _, pg := range v.PGs {
		for _, x := range pg.Recalled {
			if m := l.memOf(&pg.PG); m != nil {
				dropped := m.limbo.Forget(x) + m.cache.Forget(x) + l.core.heapOf(pg.ID, pg.Generation).Forget(x)
				m.flow.add(-int64(dropped), 0, 0)
				m.show()
			}
		}
	}
	if v.Nodes != nil {
		for _, c := range l.conns {
			if c != nil && c.qp != nil {
				if n := v.Nodes[c.node]; !n.Up || n.Incarnation != c.incarnation {
					l.drop(c)
				}
			}
		}
	}
	if old == nil {
		return
	}
	for id, pg := range old.PGs {
		if n := v.PGs[id]; n == nil || n.Generation != pg.Generation {
			l.cache.clear() // its words mean nothing any more
			return
		}
	}
}
