package engine

import (
	"errors"
	"fmt"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/invariants"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/units"
	"github.com/kvd-project/kvd/rdma"
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
	return fmt.Sprintf("buffers of %s are wanted, at most %s are allowed", units.Bytes(e.Want), units.Bytes(e.Limit))
}

// ErrTimeout: the operation's time ran out while it waited.
var ErrTimeout = errors.New("timed out")

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
	// Deadline, if not 0, ends the Op's waiting (Options.Nanos).
	Deadline int64
	// Limit, if not 0, bounds the bytes of large buffers for what the Op reads before it changes
	// anything; see LimitError. Writes are not counted.
	Limit int
	// Filler, if not nil, has memory of a GET's caller.
	Filler Filler

	lane     *Lane
	flight   *flight    // not nil: it performs these GETs, and Op is unused
	learnt   index.Hint // for Hint, once; Word 0: nothing
	guessed  bool       // the Op goes by what Guess gave
	asked    *Op        // nil: nobody waits for it, or not by Do
	idx      uint32
	gen      uint32
	state    taskState
	orphan   error // the caller has gone; end when nothing is under way
	epoch    uint64
	pending  uint8 // bit per replica
	bulk     uint8 // bit per replica: its chain went by the second queue pair
	seqs     [maxReplicas]uint64
	pg       *PG
	leased   bool   // its round is nothing without a lease
	postView uint64 // map version under which it posted
	wakeAt   int64
	events   uint64
	want     index.Action
	disk     bool   // it waits for an answer of Objects, and for nothing else
	buf      []byte // this task's registered slot
	used     int
	lkeys    []uint64
	big      []*buffer
	bufErr   error
	wanted   int    // bytes of big, and of what was refused, while Limit is in force
	starved  uint64 // first renewal after memory, or a split, was first missed
	missed   int64  // when memory was (Options.Nanos)
	astray   astray
	activeAt int
	values   []*value // those of the round under way first
	valueN   int      // of these
	shown    []*rdma.Mapping
	given    []byte // the caller's memory that READs may have changed, from its start on
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
		t := &Task{lane: l, idx: uint32(len(l.tasks)), buf: b.b[i*taskSlot : (i+1)*taskSlot : (i+1)*taskSlot],
			lkeys: b.lkeys}
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
	l.activate(t)
	l.refreshView()
	t.Op.Start(t)
	t.state = taskReady
	l.ready = append(l.ready, t)
}

func (l *Lane) activate(t *Task) {
	t.activeAt = len(l.active)
	l.active = append(l.active, t)
}

func (l *Lane) deactivate(t *Task) {
	last := len(l.active) - 1
	l.active[t.activeAt] = l.active[last]
	l.active[t.activeAt].activeAt = t.activeAt
	l.active[last] = nil
	l.active = l.active[:last]
}

// expireAt says until when a caller of t waits, 0: not known yet; the earliest counts.
func (t *Task) expireAt(deadline int64) {
	if deadline != 0 && (t.Deadline == 0 || deadline < t.Deadline) {
		t.Deadline = deadline
	}
}

// Recycle takes back a done task; its Op's answer and buffers are void.
func (l *Lane) Recycle(t *Task) {
	if invariants.On {
		t.check("be recycled", taskDone, taskIdle)
	}
	if t.state != taskDone && t.state != taskIdle {
		panic("engine: recycle of a task under way")
	}
	for _, b := range t.big {
		l.core.bufs.put(b)
	}
	clear(t.big)
	t.big = t.big[:0]
	t.hideShown()
	t.Op.Reset()
	t.gen++
	t.state, t.orphan, t.Done, t.asked, t.Deadline, t.Limit, t.pg, t.bufErr, t.wanted, t.want, t.starved,
		t.missed, t.disk = taskIdle, nil, nil, nil, 0, 0, nil, nil, 0, 0, 0, 0, false
	t.astray, t.flight, t.learnt, t.Filler = astray{}, nil, index.Hint{}, nil
	l.idle = append(l.idle, t)
}

// Orphan says that the caller has stopped waiting for t. When nothing of t is under way any more it ends with err, and
// Done is called then. Nothing touches memory of the caller after its return. The memory for a GET is cleared then,
// and WRITEs under way go on with copies.
func (l *Lane) Orphan(t *Task, err error) {
	if t.state == taskDone {
		return
	}
	t.orphan = err
	if t.state == taskPosted {
		t.detach()
		t.settleGiven()
	}
	if t.state == taskWaiting || t.state == taskReady {
		l.fail(t, err)
	}
}

// wakeWaiting makes ready the Tasks that waited for time that has passed, or for anything to happen on the lane; and
// ends those whose deadline has passed. It reports whether there were any.
func (l *Lane) wakeWaiting() (moved bool) {
	now := l.core.opts.Nanos()
	keep := l.wait[:0]
	waiting := l.wait
	for _, t := range waiting {
		switch {
		case t.Deadline != 0 && now >= t.Deadline:
			l.failWaiting(t)
			moved = true
		case t.disk:
			keep = append(keep, t)
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
		l.finish(t, fmt.Errorf("%w, and what was on its way did not come in time", l.core.lacked(pg)))
	case index.Refresh:
		l.finish(t, fmt.Errorf("%w: no active view of its placement group", ErrTimeout))
	case index.Grow:
		l.finish(t, fmt.Errorf("%w: shard %d is full and was not split", ErrTimeout, t.Op.Route.Shard))
	case index.Reconnect:
		l.finish(t, ErrNoConn)
	case index.Fetch:
		l.finish(t, fmt.Errorf("%w: %w", ErrTimeout, index.ErrTier))
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
	if t.want == index.Alloc || t.want == index.Fetch || t.want == index.Store {
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
		case index.Done:
			l.end(t, a)
			return
		case index.Post:
			if !l.posted(t) {
				return
			}
		case index.Reconnect:
			if !l.reconnected(t) {
				l.park(t, a, 0)
				return
			}
		default:
			if l.suspend(t, a) {
				return
			}
		}
	}
}

// suspend asks for what t's Op waits for, action a, and has t wait, or ends it if that will not come. It is false if
// there is nothing to wait for.
func (l *Lane) suspend(t *Task, a index.Action) bool {
	switch a {
	case index.Alloc:
		sent, released := l.core.Renewals()
		pg, _ := t.Op.Wanted()
		if t.starved == 0 {
			t.starved, t.missed = sent+1, l.core.opts.Nanos()
			l.Stats.MemoryWaits++
		} else if released > t.starved+1 && !t.Op.Route.PG.Cache {
			// All that was in limbo has come back.
			if err := l.core.NoMemory(pg, t.starved, t.missed, t.Deadline != 0); err != nil {
				l.finish(t, err)
				return true
			}
		}
		l.postNoWait(t)
		l.wantMemory(t)
		l.park(t, a, 0)
	case index.Grow:
		shard := t.Op.Route.Shard
		cache := t.Op.Route.PG.Cache
		if cache {
			home, stash := layout.GroupOff(t.Op.Hash, t.Op.Route.Segments)
			l.core.opts.Control.WantRoom(t.Op.Route.PG.ID, t.Op.Route.ShardOff+home, t.Op.Route.ShardOff+stash)
		}
		sent, _ := l.core.Renewals()
		if t.starved == 0 {
			t.starved = sent + 1
		} else if l.core.NoGrowth(shard) >= t.starved && !cache {
			l.finish(t, l.core.cannotGrow(shard))
			return true
		}
		l.postNoWait(t)
		l.core.opts.Control.WantSplit(shard)
		l.park(t, a, max(backoff(t.Op.Waits), 1e6))
	case index.Fetch, index.Store:
		l.askDisk(t, a)
	case index.Refresh:
		v := uint64(0)
		if view := l.view; view != nil {
			v = view.Version
		}
		l.core.opts.Control.WantMap(v)
		l.wander(t)
		l.postNoWait(t)
		l.park(t, a, backoff(t.Op.Waits))
	case index.Backoff:
		l.wander(t)
		l.postNoWait(t)
		l.park(t, a, backoff(t.Op.Waits))
	case index.AskFenced:
		l.postNoWait(t)
		if l.core.IsFenced(t.Op.LockOwner) {
			t.Op.OwnerFenced = true
			return false
		}
		if t.Op.Waits > 16 && t.Op.LockOwner != l.core.opts.Session {
			l.core.opts.Control.WantFenced(t.Op.LockOwner)
		}
		l.park(t, a, backoff(t.Op.Waits))
	}
	return true
}

// backoff grows from 1 µs to 1 ms.
func backoff(n int32) int64 { return 1000 << min(n/2, 10) }

// park lets t wait until something happens on the lane, or for after nanoseconds, if that is not 0. t holds no WR then.
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
	t.settleGiven()
	t.state = taskDone
	k := t.Op.Kind
	l.Stats.Ops[k]++
	l.Stats.Rounds[k] += uint64(t.Op.Rounds)
	l.Stats.Mended += uint64(t.Op.Mended)
	switch err := t.Op.Err; {
	case err == nil:
	case errors.Is(err, index.ErrUnknown):
		l.Stats.Unknown++
	case (k == index.Get || k == index.Exists) && errors.Is(err, index.ErrNotFound):
		l.Stats.Absent++
	}
	l.deactivate(t)
	if t.Done != nil {
		t.Done(t)
	}
}

// current reports whether the view that t's Op acts by is in force: its placement group epoch is
// the same, and verbs may be posted.
func (l *Lane) current(t *Task) bool {
	v := l.view
	pg := v.PG(t.Op.Route.PG.ID)
	return pg != nil && pg.Epoch == t.Op.Route.PG.Epoch && (pg.Active || pg.Frozen && t.Op.OnFrozen())
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
	if a.since != 0 && l.core.IsNewest(a.version, a.since) {
		t.Op.MapCurrent = a.version
	}
}
