package engine

import (
	"context"
	"math/bits"
	"runtime"
	"slices"
	"sync"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/layout"
)

// Op is one operation as its caller sees it: a request and its answer. It and what it points to belong
// to [Core.Do] until that returns.
type Op struct {
	// The request, as in index.Op.
	Kind      index.Kind
	Cond      index.Cond
	Flags     layout.RecordFlags
	over      bool  // finished
	Keeps     bool  // the request's, as in index.Op
	lane      uint8 // in batch.spread: the number of its lane
	Key       []byte
	Value     []byte
	Hash      uint64
	Check     uint64
	IfVersion uint64
	Expiry    uint64 // Unix ms
	Modify    index.ModifyFunc
	Scan      *index.Page
	Raw       *index.RawRead
	Part      *index.Part
	Machine   index.Machine
	Txn       *index.Txn // of a transaction's kinds. It stays with the lane if the Op ends with index.ErrUnknown

	// Lane, if not 0, is 1 + the number of the lane that performs it; else Check says which one.
	Lane   int32
	Pinned uint32 // the request's, as in index.Op
	// Asker, if not nil, gets the answer of an Op that succeeds.
	Asker Asker

	// The answer. Err tells whether it happened: index.ErrUnknown says that it may have, any other error that it has
	// not.
	Err     error
	Version uint64
	Rounds  int32
	flown   int32 // round trips before that of a Task or of a chain that ends it
	w       *waiter
	found   layout.Word // in Lane.Hinted: of the record that the change is of; 0: none
	learnt  index.Hint  // by the last of them; Word 0: nothing
	task    *Task
	cancel  error // set when its caller went before it began
}

// Over reports whether a lane has performed the Op.
func (op *Op) Over() bool { return op.over }

// Task is what performs the Op, nil before that begins and when it is over. It is the lane's owner's.
func (op *Op) Task() *Task { return op.task }

// Asker gets an answer while the lane's memory holds it.
type Asker interface {
	// Take copies what it wants of the record that was found, or of its value in parts if it is a long one. It is
	// called by the goroutine that owns the lane, not after Do has returned.
	Take(r *layout.Record, parts [][]byte)
}

// LaneOf is the number of the lane that performs what is about the key with these hash bits.
func (c *Core) LaneOf(check uint64) int {
	return int((check >> 32) * uint64(c.opts.Lanes) >> 32)
}

// laneOf is the lane of op's key, or the one that op names, or that for bulk. It may be another one the next time.
func (c *Core) laneOf(op *Op) *Lane {
	switch {
	case op.Lane != 0:
		return c.lanes[op.Lane-1]
	case c.opts.BulkLane && c.isLong(op):
		return c.lanes[c.opts.Lanes]
	}
	return c.lanes[c.LaneOf(op.Check)]
}

// isLong reports whether op writes a long value, or reads what a hint says is one.
func (c *Core) isLong(op *Op) bool {
	if op.Kind != index.Get {
		return len(op.Value) >= c.opts.BulkFrom
	}
	var x cached
	return c.in.Load().hints.find(&x, op.Check, layout.FP(op.Hash)) &&
		(layout.Word(x.word).ReadLen() >= c.opts.BulkFrom || x.flags()&index.HintManifest != 0)
}

// Do performs ops, together: the rounds of all of them on one lane share doorbells, those of several lanes are under
// way at once. Each has its own outcome; if two name the same key, either may come first. It returns when all are over.
// If ctx ends before that, those that are not end with its cause, and verbs that are under way stay so in the lane.
//
// A caller that needs a lane that nobody owns owns it meanwhile: its goroutine does the lane's work. If the
// provider executes within PostSend the operations are over without another goroutine or a round of waiting. Others
// queue, and their operations share the owner's doorbells. (Combining, after Hendler et al., "Flat Combining", SPAA
// 2010.)
func (c *Core) Do(ctx context.Context, ops []*Op) {
	over := c.isOver()
	for _, op := range ops {
		op.Err, op.over, op.cancel, op.flown, op.found, op.learnt = nil, false, nil, 0, 0, index.Hint{}
		if over {
			op.Err = ErrLease
		}
	}
	if over {
		return
	}
	left, tried := len(ops), false
	if c.immediate {
		left, tried = c.hinted(ctx, ops)
	}
	switch {
	case left == 0:
	case len(ops) == 1:
		c.laneOf(ops[0]).do(ctx, ops, tried)
	default:
		b := batches.Get().(*batch)
		b.do(ctx, c, ops, left, tried)
		b.release()
	}
}

// hinted performs what it can of ops without a Task, all of them on one lane that nobody owns, and returns how many are
// left and whether it found such a lane.
func (c *Core) hinted(ctx context.Context, ops []*Op) (left int, tried bool) {
	near, l := c.ownNear()
	if l == nil {
		c.near.Put(near)
		return len(ops), false
	}
	if !l.caughtUp() {
		l.Turn()
	}
	if l.Hinted(ops) > 0 {
		left = l.finishBegun(ctx, ops)
	}
	l.HandOver()
	if l.id < c.nears {
		near = l
	}
	c.near.Put(near)
	return left, true
}

// ownNear makes the caller the owner of a lane, nil if all have one: of near, the one that was used last on this
// processor, if that is free. So what a lane writes for each operation stays in the processor's own cache, while lanes
// of keys go from one cache to the other with them. There are as many such lanes as processors. The others, of which a
// processor remembers none, serve if all of those are taken: what a lane unlinks is memory for what comes to that lane
// later.
func (c *Core) ownNear() (near, l *Lane) {
	near = c.near.Get().(*Lane)
	l = near
	for i := 1; !l.TryOwn(); i++ {
		switch {
		case i == len(c.lanes):
			return near, nil
		case i < c.nears:
			l = c.lanes[(near.id+i)%c.nears]
		default:
			l = c.lanes[i]
		}
	}
	return near, l
}

// finishBegun waits for those of ops that Hinted has given Tasks, and returns how many are not begun.
func (l *Lane) finishBegun(ctx context.Context, ops []*Op) (left int) {
	var begun []*Op
	for _, op := range ops {
		switch {
		case op.task != nil:
			begun = append(begun, op)
		case !op.over:
			left++
		}
	}
	if n := len(begun); n > 0 {
		l.perform(ctx, begun, n)
	}
	return left
}

// perform gives those of ops Tasks that are not over, left of them, and works until all are.
func (l *Lane) perform(ctx context.Context, ops []*Op, left int) {
	l.self = waiter{ops: ops, left: left, owns: true, limit: l.core.limit(ctx)}
	l.begin(&l.self)
	l.work(ctx, &l.self)
	l.self = waiter{}
}

// do performs ops, all of this lane. tried: some lane has tried to without Tasks.
func (l *Lane) do(ctx context.Context, ops []*Op, tried bool) {
	if !l.tryOwnSoon() {
		w := l.newWaiter(ctx, ops)
		w.tried = tried
		l.enqueue(w)
		l.join(ctx, w)
		return
	}
	left := len(ops)
	if !tried {
		left = l.Hinted(ops)
	}
	if left > 0 {
		l.perform(ctx, ops, left)
	}
	l.HandOver()
}

// batch is Ops of several lanes; kept for the next.
type batch struct {
	shares []share // by lane
	ops    []*Op   // by lane
	lanes  []int   // those that are not done, in the order of asking
}

// share is a lane's part of a batch.
type share struct {
	ops  []*Op
	n    int
	w    *waiter // if it has queued
	owns bool    // the lane, whose self waits
}

var batches = sync.Pool{New: func() any { return new(batch) }}

func (b *batch) release() {
	clear(b.shares)
	clear(b.ops)
	b.shares, b.ops, b.lanes = b.shares[:0], b.ops[:0], b.lanes[:0]
	batches.Put(b)
}

// spread sorts those of ops by lane that are not over: left of them.
func (b *batch) spread(c *Core, ops []*Op, left int) {
	n := len(c.lanes)
	b.shares = slices.Grow(b.shares, n)[:n]
	b.ops = slices.Grow(b.ops, left)[:left]
	first := -1
	for _, op := range ops {
		if !op.over {
			i := c.laneOf(op).id
			op.lane = uint8(i)
			b.shares[i].n++
			if first < 0 {
				first = i
			}
		}
	}
	at := 0
	for i := range b.shares {
		s := &b.shares[i]
		s.ops = b.ops[at : at : at+s.n]
		at += s.n
	}
	for _, op := range ops {
		if !op.over {
			s := &b.shares[op.lane]
			s.ops = append(s.ops, op)
		}
	}
	// Not all begin with the same lane.
	for i := range n {
		if k := (first + i) % n; b.shares[k].n > 0 {
			b.lanes = append(b.lanes, k)
		}
	}
}

// askRounds is how often a batch asks for the lanes it needs before it queues for them: one that somebody owns at the
// moment may be free when the others are done, or when somebody else has had the processor.
const askRounds = 4

// do begins the shares on all lanes before it waits for any: it owns the lanes that it can have, queues at the others,
// and at a lane whose provider executes within PostSend it asks again first, since its owner is soon done.
func (b *batch) do(ctx context.Context, c *Core, ops []*Op, left int, tried bool) {
	b.spread(c, ops, left)
	var waits uint64 // lanes whose shares are not over, as bits
	limit := c.limit(ctx)
	for round := 0; len(b.lanes) > 0; round++ {
		if round > 1 {
			runtime.Gosched()
		}
		again := b.lanes[:0]
		for _, i := range b.lanes {
			l, s := c.lanes[i], &b.shares[i]
			if round == 0 && l.TryOwn() || round > 0 && l.tryOwnSoon() {
				left := len(s.ops)
				if !tried {
					left = l.Hinted(s.ops)
				}
				if left > 0 {
					l.self = waiter{ops: s.ops, left: left, owns: true, limit: limit}
					l.begin(&l.self)
					if l.Turn(); l.self.left > 0 {
						s.owns = true
						waits |= 1 << i
						continue
					}
					l.self = waiter{}
				}
				l.HandOver()
			} else if l.Synchronous() && round < askRounds {
				again = append(again, i)
			} else {
				s.w = l.newWaiter(ctx, s.ops)
				s.w.tried = tried
				l.enqueue(s.w)
				l.Kick()
				waits |= 1 << i
			}
		}
		b.lanes = again
	}
	if waits != 0 {
		b.wait(ctx, c, waits)
	}
}

// wait drives, or waits for, the lanes given. A lane that is owned must be driven: operations of one lane may wait for
// an insert lock that one of another lane holds, or for a view that comes only when the other has quiesced. A waiter
// may be made the owner at any moment. So each lane has a goroutine of its own, the last one this.
func (b *batch) wait(ctx context.Context, c *Core, waits uint64) {
	finish := func(i int) {
		l, s := c.lanes[i], &b.shares[i]
		if s.owns {
			l.work(ctx, &l.self)
			l.self = waiter{}
			l.HandOver()
		} else {
			l.join(ctx, s.w)
		}
	}
	var wg sync.WaitGroup
	last := bits.Len64(waits) - 1
	for i := range last {
		if waits&(1<<i) != 0 {
			c.willWait(ctx)
			wg.Go(func() { finish(i) })
		}
	}
	finish(last)
	wg.Wait()
}
