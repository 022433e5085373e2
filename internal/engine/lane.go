package engine

import (
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/invariants"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/rdma"
)

// Lane is one queue pair to each memory node, or two, with the tasks under way on them and a
// part of the session's places. Keys hash to lanes, which perform their Tasks; without one, see Hinted, any lane
// performs an Op.
type Lane struct {
	// Set by newLane.
	core *Core
	id   int        // index in Core.lanes, below MaxLanes
	cqs  []*rdma.CQ // by device; nil once closed

	// From here to Stats the owner's alone. See ownership, which is its lock.
	conns  []*conn    // by node id; nil where nothing was wanted yet
	cache  *wordCache // of the session; changes with view
	mirror *mirror    // likewise; nil: there is none
	mem    []*laneMem // by placement group id; made by memOf
	view   *View      // the one that cache and mem belong to; refreshView takes Core's

	// The owner's: where tasks are, and what their work requests wait for.
	tasks   []*Task     // by index; only grows, as slabs do
	idle    []*Task     // recycled, or never used
	active  []*Task     // started and not recycled
	ready   []*Task     // those active that advance goes on with; empty after Pump
	wait    []*Task     // those active that a time or an event wakes
	dirty   []*conn     // with WRs not yet posted
	flushed []*conn     // dirty's memory, in turn
	ran     []*conn     // that have executed WRs whose rounds are not known to be over
	slabs   []*buffer   // registered memory of tasks
	sinks   *Task       // set aside: its registered words take results of no interest
	wcs     [64]rdma.WC // what poll took last

	ownership // who the owner is, and who waits for it

	// The owner's scratch memory for Hinted, and in part for flights, kept from one call to the next.
	hintTask     *Task                                // set aside: its registered slot is theirs
	looked       []*Op                                // of a chain of Hinted, whose changes the next ones write
	hints        [hintedOps]hinted                    // ops of the chain under construction
	hintWRs      [hintedCopies][3 * hintedOps]rdma.WR // by how far from the tail
	hintAccesses [hintedCopies + 2]index.Access       // of the op that is added
	hint         index.Hint                           // what hintOf has read last
	found        layout.Record                        // the record that is judged
	touched      uint64                               // so that touching is not optimized away
	flights      []*flight                            // unused

	// The owner's: access words.
	notes     *noteTable // nil until there are access words; other lanes may share it
	noteWords *Task      // set aside: a ring of access words on their way; nil before the first
	noteN     int        // access words posted so far

	// The owner's: clocks and counters.
	lastVersion uint64 // given by Task.Version; only grows
	stamp       uint32 // given by Task.Stamp, which takes its low 28 bits
	disc        uint64 // low bits of this lane's versions, from session and lane; set by newLane
	released    uint64 // Core.releasable as of the last release
	events      uint64 // counts what may let a waiting task go on

	Stats LaneStats // since newLane; the owner's

	// Left by other goroutines for the owner, and how it is woken.
	mail struct {
		sync.Mutex
		fns []func(*Lane) // in the order of Deliver; runMail takes all
	}
	mailN atomic.Int32  // len(mail.fns), readable without the lock
	kick  chan struct{} // capacity 1: a Kick that nobody has received
	// waitOn is where waitOnCQ waits; nil if work may be under way on several queues, or on one whose
	// connections this side cannot read itself.
	waitOn *rdma.CQ
	asleep atomic.Pointer[rdma.CQ] // waitOn during a waitOnCQ; nil otherwise

	// The owner writes these; others read the atomic ones.
	acked, quiesced atomic.Uint64 // see Core.Acked; written by ack
	synchronous     atomic.Bool   // what Synchronous reports; written by connsChanged
	someSynchronous bool          // a connection at least executes within PostSend
	leaving         bool          // a connection at least is being left
}

// LaneStats counts what a lane did.
type LaneStats struct {
	Ops, Rounds [index.NumKinds]uint64 // by index.Kind
	CacheHits   uint64
	MirrorHits  uint64 // keys found where an image of their group had them
	MirrorStale uint64 // keys not found there
	Absent      uint64 // Gets and Exists that found no key
	CASLosses   uint64
	Unknown     uint64
	Leaked      uint64        // units left to recall
	MemoryWaits uint64        // operations that had to wait for memory
	Notes       uint64        // access words written
	Pins        uint64        // Pins that asked for one that says how long a record stays
	Mended      uint64        // damaged copies of records written anew
	Buffered    uint64        // bytes of large buffers that operations took: for values that did not go in one pass
	Closed      rdma.Counters // of queue pairs that are gone
}

// newLane makes a lane with a CQ of each device. Connections come later, as operations miss them.
func newLane(c *Core, id int) (*Lane, error) {
	l := &Lane{core: c, id: id, kick: make(chan struct{}, 1),
		disc: uint64(c.opts.Discriminator)<<4 | uint64(id)}
	for i := range l.hintWRs {
		for k := range l.hintWRs[i] {
			l.hintWRs[i][k].ID = noWaitID
		}
	}
	in := c.in.Load()
	l.cache, l.mirror = in.hints, in.mirror
	for _, d := range c.opts.Devices {
		cq, err := d.CreateCQ(8192)
		if err != nil {
			return nil, err
		}
		l.cqs = append(l.cqs, cq)
	}
	if runtime.GOMAXPROCS(0) > 1 {
		l.spins = 256
	}
	var err error
	if l.sinks, err = l.NewTask(); err == nil {
		l.hintTask, err = l.NewTask()
	}
	return l, err
}

// ID is the lane's number in its session, from 0 and below MaxLanes.
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

// Kick wakes the goroutines that wait for the lane.
func (l *Lane) Kick() {
	select {
	case l.kick <- struct{}{}:
		if cq := l.asleep.Load(); cq != nil {
			cq.Wake()
		}
	default: // whoever sent it wakes
	}
}

// Kicked receives after a Kick or Deliver.
func (l *Lane) Kicked() <-chan struct{} { return l.kick }

// Tasks are the operations under way, in a list of the caller's own. The lane's owner calls it.
func (l *Lane) Tasks() []*Task { return append([]*Task(nil), l.active...) }

// Active is the number of operations under way. The lane's owner calls it.
func (l *Lane) Active() int { return len(l.active) }

// Performed is how many operations of users the lane has ended.
func (l *Lane) Performed() (n uint64) {
	for kind, ops := range l.Stats.Ops {
		if kind := index.Kind(kind); kind != index.Evict {
			n += ops
		}
	}
	return n
}

// Oldest is the least reclaim epoch at the start of an operation under way.
func (l *Lane) Oldest() (epoch uint64, ok bool) {
	for _, t := range l.active {
		if t.want == index.Alloc && t.state == taskWaiting || t.waitsForDisk() {
			continue // begins when there is memory, or what the disk has
		}
		if !ok || t.epoch < epoch {
			epoch, ok = t.epoch, true
		}
	}
	return epoch, ok
}

// Pump moves every task until it has to wait: runs mail, wakes
// waiting tasks, posts, polls. It reports whether anything moved.
func (l *Lane) Pump() bool {
	moved := l.runMail()
	if l.core.View() != l.view {
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
	if l.leaving {
		l.left()
	}
	l.ack()
	if invariants.On {
		l.check()
	}
	return moved
}

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
		if t.flight != nil {
			acked = min(acked, t.postView)
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

// runMail runs what others have left for the owner to do, and reports whether there was any. They have no other way to
// touch the lane's state, which has no lock.
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

// refreshView makes the newest map the lane's: what it takes away is dropped, and
// connections to memory that is given up are closed, which ends what hangs on them.
func (l *Lane) refreshView() {
	in := l.core.in.Load()
	v := in.View
	if v == l.view {
		return
	}
	l.view, l.cache, l.mirror = v, in.hints, in.mirror
	l.events++
	for _, pg := range v.PGs {
		for _, x := range pg.Recalled {
			if m := l.memOf(&pg.PG); m != nil {
				dropped := m.limbo.Forget(x) + m.cache.Forget(x) + l.core.heapOf(pg.ID, pg.Generation).Forget(x)
				m.flow.Add(-int64(dropped), 0, 0)
				m.show()
			}
		}
	}
	if v.Nodes != nil {
		for c := range l.all {
			if c.qp != nil {
				if n := v.Nodes[c.node]; !n.Has(c.incarnation, c.version) {
					l.drop(c)
				}
			}
		}
	}
}

// Counters sums the verbs of the lane's queue pairs, also of closed ones.
func (l *Lane) Counters() (n rdma.Counters) {
	n = l.Stats.Closed
	for c := range l.all {
		if c.qp != nil {
			q := c.qp.Counters()
			n.Add(&q)
		}
	}
	return n
}

// closeBuffers frees registered memory. Every queue pair is closed by then, so that nothing is written to it any more.
func (l *Lane) closeBuffers() {
	for _, t := range l.tasks { // those that never ended, too
		for _, b := range t.big {
			l.core.bufs.put(b)
		}
		t.big = nil
		t.hideShown()
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
