package session

import (
	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/heap"
	"github.com/kvd-project/kvd/internal/layout"
)

// Task is its Op's index.Env.
var _ index.Env = (*Task)(nil)

func (t *Task) Session() uint32 { return t.lane.core.opts.Session }

func (t *Task) Stamp() uint32 {
	t.lane.stamp++
	return uint32(t.lane.id)<<28 | t.lane.stamp&(1<<28-1)
}

// Version is a hybrid logical clock: 48 bits that follow the wall clock in steps
// of 2^14 ns and never go back, above a discriminator of session and lane. The
// wall clock is read at renewals only: a version may lag behind it.
func (t *Task) Version(after uint64) uint64 {
	l := t.lane
	const step = 1 << 16
	v := l.lastVersion + step
	if w := l.core.millis.Load() * 1_000_000 >> 14 << 16; w > v {
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

func (t *Task) Route(hash uint64) (index.Route, bool) {
	v := t.lane.core.view.Load()
	if v == nil {
		return index.Route{}, false
	}
	s := v.ShardOf(hash)
	if s == nil || !s.PG.Active {
		return index.Route{}, false
	}
	return index.Route{PG: &s.PG.PG, ShardOff: s.Off, Clusters: s.Clusters, MapVersion: v.Version}, true
}

func (t *Task) RouteShard(prefix uint64) (index.Route, bool) { return t.Route(prefix) }

func (t *Task) RoutePG(id uint32) (index.Route, bool) {
	v := t.lane.core.view.Load()
	if v == nil || v.PGs[id] == nil || !v.PGs[id].Active {
		return index.Route{}, false
	}
	return index.Route{PG: &v.PGs[id].PG, MapVersion: v.Version}, true
}

func (t *Task) Hint(o *index.Op) (index.Hint, bool) {
	l := t.lane
	h, ok := l.cache.get(o.Hash, o.Check, uint32(l.core.epoch.Load()), layout.WordLifeEpochs)
	if ok {
		l.Stats.CacheHits++
	}
	return h, ok
}

func (t *Task) Remember(o *index.Op, h index.Hint) {
	// Seen at the Op's start at the latest: an older age is the safe side.
	t.lane.cache.put(o.Hash, o.Check, h, uint32(t.epoch))
}

func (t *Task) Forget(o *index.Op) { t.lane.cache.drop(o.Hash, o.Check) }

func (t *Task) Buf(_ *index.Op, n int) []byte {
	if r := (n + 7) &^ 7; t.used+r <= taskSlot {
		b := t.stash[t.used : t.used+n : t.used+r]
		t.used += r
		return b
	}
	g, err := t.lane.core.bufs.get(n)
	if err != nil {
		t.bufErr = err
		return make([]byte, n)
	}
	t.big = append(t.big, g)
	return g.b[:n]
}

func (t *Task) Alloc(pg *index.PG, code uint8) (unit uint32, ver uint16, ok bool) {
	m := t.lane.memOf(pg)
	if m == nil {
		return 0, 0, false
	}
	p, ok := m.cache.Alloc(layout.UnitsOf(code))
	if !ok {
		if r := t.lane.core.releasable.Load(); r != t.lane.released {
			t.lane.release(r)
			p, ok = m.cache.Alloc(layout.UnitsOf(code))
		}
	}
	if !ok {
		return 0, 0, false
	}
	if index.Mutation(index.MutVerStays) {
		p.Ver = 0
	}
	return p.Unit, p.Ver, true
}

func place(w layout.Word) heap.Place {
	return heap.Place{Unit: w.Unit(), Units: w.Units(), Ver: w.Ver()}
}

func (t *Task) Unuse(pg *index.PG, w layout.Word) {
	if m := t.lane.memOf(pg); m != nil {
		m.cache.Unuse(place(w))
	}
}

func (t *Task) Unlinked(pg *index.PG, w layout.Word) {
	m := t.lane.memOf(pg)
	if m == nil {
		return
	}
	if index.Mutation(index.MutReuseNow) {
		m.cache.Free(place(w))
		return
	}
	m.limbo.Add(place(w), t.lane.core.sendSeq.Load())
}

func (t *Task) Retire(pg *index.PG, w layout.Word) { t.Unlinked(pg, w) }

func (t *Task) Leak(pg *index.PG, w layout.Word) { t.lane.Stats.Leaked += uint64(w.Units()) }
