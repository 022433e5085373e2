package engine

import (
	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/heap"
	"github.com/kvd-project/kvd/internal/layout"
)

var _ index.Env = (*Task)(nil)

func (t *Task) Session() uint32 { return t.lane.core.opts.Session }

func (t *Task) Stamp() uint32 {
	t.lane.stamp++
	return uint32(t.lane.id)<<28 | t.lane.stamp&(1<<28-1)
}

// Version is a hybrid logical clock: 48 bits above a discriminator of session and lane. The 48 bits follow the wall
// clock in steps of 2^14 ns and never go back. The wall clock is read at renewals only: a version may lag behind
// it.
func (t *Task) Version(after uint64) uint64 {
	l := t.lane
	const step = layout.VersionStep
	v := l.lastVersion + step
	if w := layout.VersionAt(l.core.millis.Load() * 1_000_000); w > v {
		v = w
	}
	if after >= v {
		v = after&^(step-1) + step
	}
	v = v&^(step-1) | l.disc
	l.lastVersion = v
	return v
}

func (t *Task) NowMillis() uint64 { return t.lane.core.opts.Millis() }

// Route is index.Router, by the lane's map: a newer one is taken only where no operation of the older one is under way.
func (t *Task) Route(hash uint64) (index.Route, bool) {
	v := t.lane.view
	if v == nil {
		return index.Route{}, false
	}
	s := v.ShardOf(hash)
	if s == nil || !s.PG.Active || s.PG.Leaving {
		return index.Route{}, false
	}
	return s.route, true
}

func (t *Task) RouteShard(prefix uint64) (index.Route, bool) { return t.Route(prefix) }

func (t *Task) RoutePG(id uint32, frozen bool) (index.Route, bool) {
	v := t.lane.view
	if v == nil {
		return index.Route{}, false
	}
	p := v.PG(id)
	if p == nil || !p.Active && !(frozen && p.Frozen) {
		return index.Route{}, false
	}
	return index.Route{PG: &p.PG, MapVersion: v.Version}, true
}

func (t *Task) RouteMove(shard uint32) (index.Route, bool) {
	if v := t.lane.view; v != nil {
		for i := range v.Shards {
			if s := &v.Shards[i]; s.ID == shard {
				return s.route, s.PG.Active
			}
		}
	}
	return index.Route{}, false
}

// Chains is index.Router. A connection that is down does not tell.
func (t *Task) Chains(pg *index.PG) bool {
	v := t.lane.view
	if v == nil || v.PG(pg.ID) == nil {
		return false
	}
	c := t.lane.memberConn(v.PG(pg.ID), 0)
	return c != nil && c.caps.StopAtMiss
}

func (t *Task) ReadOnly() bool { return t.lane.core.opts.ReadOnly }

func (t *Task) HashOf(key []byte) uint64 { return t.lane.core.opts.Hash(key) }

func (t *Task) Crowded(shard uint32) { t.lane.core.opts.Control.WantSplit(shard) }

// Hint is index.Hints. A hint keeps the low half of a shard's id only. A hint of another shard is dropped, since
// the word may stand in an array that has gone.
func (t *Task) Hint(o *index.Op) (index.Hint, bool) {
	l := t.lane
	t.guessed = false
	h, ok, hits := t.learnt, true, uint64(0)
	if t.learnt = (index.Hint{}); h.Word == 0 {
		h, ok = l.cache.get(o.Check, layout.FP(o.Hash), uint32(l.core.epoch.Load()), layout.WordLifeEpochs)
		hits = 1
	}
	switch c := o.Route.Child; {
	case !ok:
		return h, false
	case uint16(h.Shard) == uint16(o.Route.Shard):
		h.Shard = o.Route.Shard
	case c != nil && uint16(h.Shard) == uint16(c.Shard):
		h.Shard = c.Shard
	default:
		return h, false // it moved
	}
	l.Stats.CacheHits += hits
	return h, true
}

// Remember is index.Hints.
func (t *Task) Remember(o *index.Op, h index.Hint) {
	// Seen at the Op's start at the latest: an older age is the safe side.
	t.lane.cache.put(o.Check, h, uint32(t.epoch))
	if t.guessed {
		t.guessed = false
		t.lane.Stats.MirrorHits++
	}
}

// Forget is index.Hints.
func (t *Task) Forget(o *index.Op) {
	t.lane.cache.drop(o.Check, layout.FP(o.Hash))
	if t.guessed {
		t.guessed = false
		t.lane.Stats.MirrorStale++
	}
}

// Guess is index.Hints.
func (t *Task) Guess(o *index.Op) (h index.Hint, ok bool) {
	l := t.lane
	if l.mirror == nil {
		return h, false
	}
	l.core.asking.ask()
	h.Shard = o.Route.Shard
	h.Word, h.Slot, ok = l.mirror.find(o.Route.Shard, o.Route.Segments, o.Hash, uint32(l.core.epoch.Load()))
	t.guessed = ok && h.Leads(&o.Route)
	return h, t.guessed
}

// Image is index.Hints.
func (t *Task) Image(o *index.Op, off uint64, g layout.Group) (room bool) {
	m := t.lane.mirror
	// READ later: an older age is the safe side.
	return m != nil && m.put(o.Route.Shard, o.Route.Segments, off, g, uint32(t.epoch))
}

// nowhere stands for buffers that a Task may not have. Nobody writes to it.
var nowhere [layout.MaxRecordSize]byte

// Buf is index.Env: from the Task's own registered slot while that has room, else a buffer of the pool. It never fails;
// a Task that got nowhere ends with bufErr before anything is posted.
func (t *Task) Buf(o *index.Op, n int) []byte {
	if r := (n + 7) &^ 7; t.used+r <= taskSlot {
		b := t.buf[t.used : t.used+n : t.used+r]
		t.used += r
		return b
	}
	if t.Limit > 0 && o.Untouched() {
		if t.wanted += n; t.wanted > t.Limit {
			t.bufErr = &LimitError{Want: t.wanted, Limit: t.Limit}
			return nowhere[:n:n] // the Op adds up what else it wants; nothing of it is posted
		}
	}
	g, err := t.lane.core.bufs.get(n)
	if err != nil {
		t.bufErr = err
		return make([]byte, n)
	}
	t.big = append(t.big, g)
	t.lane.Stats.Buffered += uint64(n)
	return g.b[:n]
}

// Alloc is index.Space: from the lane's magazine of places, and from what has waited long enough in limbo. It takes no
// lock; the session's heap is asked only when the magazine is empty.
func (t *Task) Alloc(pg *index.PG, code uint8) (unit uint32, ver uint16, size uint8, ok bool) {
	m := t.lane.memOf(pg)
	if m == nil {
		return 0, 0, 0, false
	}
	units := layout.UnitsOf(code)
	p, ok := t.lane.alloc(m, pg, units)
	if !ok {
		if r := t.lane.core.releasable.Load(); r != t.lane.released {
			t.lane.release(r)
			p, ok = t.lane.alloc(m, pg, units)
		}
	}
	if ok && p.Units != units {
		code, ok = layout.CodeFor(int(p.Units) * layout.UnitSize)
	}
	if !ok {
		return 0, 0, 0, false
	}
	m.take(p.Units)
	return p.Unit, p.Ver, code, true
}

// alloc takes a place of so many units, or, from a cache that gets no more memory, a
// larger one.
func (l *Lane) alloc(m *laneMem, pg *index.PG, units uint32) (heap.Place, bool) {
	if !pg.Cache || !l.core.Exhausted(pg.ID) {
		return m.cache.AllocReusing(&m.limbo, m.ready, units)
	}
	p, ok := m.cache.AllocStocked(&m.limbo, m.ready, units)
	if !ok {
		p, ok = Fit(l.core.heapOf(pg.ID, pg.Generation), units)
	}
	if !ok && m.limbo.Release(m.ready, m.cache.Free) > 0 {
		m.cache.Flush()
		p, ok = Fit(l.core.heapOf(pg.ID, pg.Generation), units)
	}
	return p, ok
}

// Fit takes a place of that number of units or more out of the heap of a full cache.
func Fit(h *heap.Heap, units uint32) (heap.Place, bool) {
	return h.AllocFit(units, units+max(units/4, 1), 2*units)
}

// Welcome is the indexes of the words of records whose places a full cache can use. It can use its own places, and
// others' places if it has less than stock units free of their length.
func Welcome(h *heap.Heap, words []layout.Word, stock uint64) []int {
	ps := make([]heap.Place, len(words))
	for i, w := range words {
		ps[i] = place(w)
	}
	return h.Welcome(ps, stock, make([]int, 0, len(ps)))
}

func place(w layout.Word) heap.Place {
	return heap.Place{Unit: w.Unit(), Units: w.Units(), Ver: w.Ver()}
}

// Unuse is index.Space: no word ever named the place, so that it may be used at once.
func (t *Task) Unuse(pg *index.PG, w layout.Word) { t.lane.unuse(pg, w) }

func (l *Lane) unuse(pg *index.PG, w layout.Word) {
	if m := l.memOf(pg); m != nil && !l.recalled(pg, w) {
		m.cache.Unuse(place(w))
		m.give(w.Units())
	}
}

// Unlinked is index.Space: somebody may still look at the place, so it goes to limbo. A place in an extent that is
// being recalled goes nowhere: all of the extent becomes free once it is empty.
func (t *Task) Unlinked(pg *index.PG, w layout.Word) {
	m := t.lane.memOf(pg)
	if m == nil || t.lane.recalled(pg, w) {
		return
	}
	t.lane.retire(m, place(w))
}

func (t *Task) Retire(pg *index.PG, w layout.Word) { t.Unlinked(pg, w) }

// Leak is index.Space: nobody knows who may still write to the place, so this session never uses it again. A sweep by
// the directory's janitors finds it after the session's end.
func (t *Task) Leak(_ *index.PG, w layout.Word) {
	t.lane.core.leaked.Store(true)
	t.lane.Stats.Leaked += uint64(w.Units())
}
