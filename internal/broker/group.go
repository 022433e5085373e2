package broker

import (
	"bytes"
	"context"
	"fmt"
	"strconv"
	"sync"
	"time"
	"unsafe"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/ring"
	"github.com/kvd-project/kvd/rdma"
)

func ptr[T any](p *T) unsafe.Pointer { return unsafe.Pointer(p) }

// group is the submissions that a taker found at once. They go into a call of client.Do if that can do them, so that
// they share round trips.
type group struct {
	q    *queue
	subs []ring.Submission
	keys []byte // copies of theirs, one behind the other

	ops   []client.Op
	items []item // of ops
	done  []ring.Completion

	ctx    context.Context
	cancel context.CancelFunc

	mu      sync.Mutex
	working bool
	handed  bool     // another goroutine takes by now
	tags    []uint32 // of what is under way
}

// item is an operation under way.
type item struct {
	sub ring.Submission
	key []byte
	m   *memory   // in use; nil: the slot
	buf []byte    // where the value is, or goes
	sum *int64    // of an INCR
	end time.Time // of a PIN
}

func newGroup(q *queue) *group {
	g := &group{q: q}
	g.ctx, g.cancel = context.WithCancel(q.c.ctx)
	return g
}

func (g *group) begin() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.working = true
}

// end reports whether another goroutine takes.
func (g *group) end() (handed bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	handed = g.handed
	g.working, g.handed = false, false
	return handed
}

// cancellable lets submissions be cancelled, once they take long. Those that are performed together end when each of
// them was. The group is locked.
func (g *group) cancellable() {
	q, left, cancel := g.q, len(g.tags), g.cancel
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, tag := range g.tags {
		q.running[tag] = func() { // once, and locked
			if left--; left == 0 {
				cancel()
			}
		}
	}
}

// underWay notes what is performed, or that it is over. A CANCEL finds it if others take by now.
func (g *group) underWay(items []item) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.tags = g.tags[:0]
	for i := range items {
		g.tags = append(g.tags, items[i].sub.Tag)
	}
	if g.handed {
		g.cancellable()
	}
	if len(items) == 0 && g.ctx.Err() != nil && g.q.c.ctx.Err() == nil { // by a cancel
		g.ctx, g.cancel = context.WithCancel(g.q.c.ctx)
	}
}

// perform does all and completes it.
func (g *group) perform() {
	g.prepare()
	if len(g.ops) > 0 {
		g.together()
	}
	if len(g.done) > 0 {
		g.q.complete(g.done)
	}
	clear(g.done)
	clear(g.ops)
	clear(g.items)
}

// prepare checks the submissions. Those that cannot be done together have goroutines of their own.
func (g *group) prepare() {
	c, q := g.q.c, g.q
	g.ops, g.items, g.done, g.keys = g.ops[:0], g.items[:0], g.done[:0], g.keys[:0]
	if n := len(g.subs) * ring.MaxKey; cap(g.keys) < n {
		g.keys = make([]byte, 0, n)
	}
	c.ops.Add(uint64(len(g.subs)))
	for i := range g.subs {
		s := &g.subs[i]
		it, no := q.check(s, &g.keys)
		if no != nil {
			g.done = append(g.done, *no)
			continue
		}
		c.t.stats.Ops[s.Op].Add(1)
		op, ok := it.op()
		if !ok || s.Op == ring.OpPut && it.m != nil && c.foreign ||
			len(g.items) > 0 && s.Timeout != g.items[0].sub.Timeout {
			q.alone(it)
			continue
		}
		g.ops, g.items = append(g.ops, op), append(g.items, it)
	}
}

// check says what is wrong with a submission, or copies what it needs of the slot.
func (q *queue) check(s *ring.Submission, keys *[]byte) (it item, no *ring.Completion) {
	bad := func(text string) *ring.Completion { return q.failure(s.Tag, ring.No, ring.Argument, text) }
	it.sub = *s
	if !s.Op.Known() {
		return it, q.failure(s.Tag, ring.No, ring.Unsupported, "unknown operation")
	}
	slot := q.server.Slot(s.Tag)
	n := int(s.KeyBytes)
	prefix := s.Op == ring.OpScan || s.Op == ring.OpDeletePrefix
	keyless := s.Op == ring.OpNop || s.Op == ring.OpCancel || s.Op == ring.OpViewRelease || s.Op >= ring.OpPutAppend
	switch {
	case n > ring.MaxKey:
		return it, bad("the key is too long")
	case n == 0 && !prefix && !keyless:
		return it, bad("there is no key")
	}
	if cond := s.Flags; cond&(cond-1) != 0 || cond > ring.FlagIfVersion ||
		cond != 0 && s.Op != ring.OpPut && (s.Op != ring.OpDelete || cond != ring.FlagIfVersion) {
		return it, bad("the flags make no sense for this operation")
	}
	at := len(*keys)
	*keys = append(*keys, slot[:n]...)
	it.key = (*keys)[at:len(*keys):len(*keys)]
	switch s.Op {
	case ring.OpGet, ring.OpGetRange, ring.OpScan, ring.OpPut, ring.OpPutAppend:
		if s.Memory == 0 {
			it.buf = slot
			if s.Op == ring.OpPut || s.Op == ring.OpPutAppend {
				if s.Length > uint64(len(slot)-n) {
					return it, bad("the value does not fit into its slot")
				}
				it.buf = bytes.Clone(slot[n:][:s.Length]) // which the program may change
			} else if s.Length < uint64(len(slot)) {
				it.buf = slot[:s.Length:s.Length]
			}
			break
		}
		if it.m, it.buf = q.c.within(s.Memory, s.Offset, s.Length); it.m == nil {
			return it, bad("the bytes are not within a memory of this connection")
		}
	case ring.OpPin:
		if s.TTL == 0 || s.TTL > ring.MaxPin {
			return it, bad("a pin lasts from a millisecond to 70 minutes")
		}
		now := time.Now()
		it.end = now.Add(ttl(s))
		if !q.c.t.pins.take(now, it.end, q.c.t.Limits.Pins) {
			return it, q.failure(s.Tag, ring.No, ring.Busy, fmt.Sprintf("%d keys are pinned, which is this socket's "+
				"limit", q.c.t.Limits.Pins))
		}
	}
	return it, nil
}

// op is what of a submission client.Do takes.
func (it *item) op() (op client.Op, ok bool) {
	s := &it.sub
	op.Key = it.key
	switch s.Op {
	case ring.OpGet:
		op.Kind, op.Into, op.Fixed = client.OpGet, it.buf[:0], true
	case ring.OpPut:
		op.Kind, op.Value, op.Flags = client.OpPut, it.buf, s.ValueFlags
		if s.TTL != 0 {
			op.Expires = time.Now().Add(ttl(s))
		}
	case ring.OpDelete:
		op.Kind = client.OpDelete
	case ring.OpExists:
		if s.Word != ring.WithoutLength {
			return op, false // Do tells no lengths
		}
		op.Kind = client.OpExists
	case ring.OpPin, ring.OpUnpin:
		op.Kind, op.Expires = client.OpPin, it.end
	case ring.OpTouch:
		op.Kind, op.Typed, op.Update = client.OpUpdate, true, touched(s)
	case ring.OpIncr:
		it.sum = new(int64)
		op.Kind, op.Update = client.OpUpdate, added(int64(s.Word), it.sum)
	default:
		return op, false
	}
	switch s.Flags {
	case ring.FlagIfAbsent:
		op.Cond = client.IfAbsent
	case ring.FlagIfPresent:
		op.Cond = client.IfPresent
	case ring.FlagIfVersion:
		op.Cond, op.Version = client.IfVersion, s.Word
	}
	return op, true
}

// ttl is a submission's, at most a hundred years.
func ttl(s *ring.Submission) time.Duration {
	const most = 100 * 365 * 24 * time.Hour
	return time.Duration(min(s.TTL, uint64(most/time.Millisecond))) * time.Millisecond
}

// together performs ops.
func (g *group) together() {
	c := g.q.c
	g.underWay(g.items)
	ctx := g.ctx
	if t := g.items[0].sub.Timeout; t != 0 { // all have the same
		var stop context.CancelFunc
		ctx, stop = c.limited(ctx, t)
		defer stop()
	}
	c.client.Do(ctx, g.ops)
	c.t.stats.Batches.Add(1)
	for i := range g.ops {
		g.done = append(g.done, *g.q.answer(&g.items[i], &g.ops[i]))
	}
	g.underWay(nil)
}

// limited bounds a context by a submission's timeout.
func (c *conn) limited(ctx context.Context, ms uint32) (context.Context, context.CancelFunc) {
	t := c.t.Limits.Timeout
	if ms != 0 {
		t = min(time.Duration(ms)*time.Millisecond, c.t.Limits.LongTimeout)
	}
	return context.WithTimeout(ctx, t)
}

// answer is the completion of an operation of Do. Its memory is not used any more.
func (q *queue) answer(it *item, op *client.Op) *ring.Completion {
	s := &it.sub
	if it.m != nil {
		defer it.m.drop()
	}
	x := &ring.Completion{Tag: s.Tag, Version: op.Item.Version}
	if op.Err != nil {
		if s.Op == ring.OpPin && client.Outcome(op.Err) == rdma.No {
			q.c.t.pins.giveBack(it.end)
		}
		return q.failed(s, op.Err, op.Size)
	}
	if s.Op == ring.OpPut {
		q.c.t.stats.Bytes.Add(s.Length)
	}
	if s.Op == ring.OpGet {
		q.c.t.stats.Bytes.Add(uint64(op.Size))
		x.Length, x.ValueFlags = uint64(op.Size), op.Item.Flags
	}
	x.Expires = unixMS(op.Item.Expires) // of what is read; else it has none
	if it.sum != nil {
		x.Length = uint64(len(strconv.AppendInt(q.server.Slot(s.Tag)[:0], *it.sum, 10)))
	}
	return x
}

func unixMS(t time.Time) uint64 {
	if t.IsZero() {
		return 0
	}
	return uint64(t.UnixMilli())
}

// complete queues completions and lets the program see them.
func (q *queue) complete(all []ring.Completion) {
	q.mu.Lock()
	for i := range all {
		q.c.t.stats.Codes[all[i].Code].Add(1)
		delete(q.running, all[i].Tag)
		q.server.Complete(&all[i])
	}
	wake := q.server.Publish()
	q.mu.Unlock()
	if wake {
		q.wakeClient()
	}
}

// alone performs an item in a goroutine of its own. Its key is copied again, since the group's memory is used again.
func (q *queue) alone(it item) {
	it.key = bytes.Clone(it.key)
	ctx, stop := q.c.limited(q.c.ctx, it.sub.Timeout)
	q.mu.Lock()
	q.running[it.sub.Tag] = stop
	q.mu.Unlock()
	q.c.wg.Go(func() {
		defer stop()
		var x *ring.Completion
		err := recoverFrom(func() { x = q.perform(ctx, &it) })
		if it.m != nil {
			it.m.drop()
		}
		if err != nil {
			q.c.t.b.log.Error("the broker's own fault ended a connection", "err", err)
			q.c.end(err)
			return
		}
		q.complete([]ring.Completion{*x})
	})
}
