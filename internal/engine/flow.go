package engine

import (
	"sync/atomic"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/heap"
)

// Flow is the account of a session's memory in one placement group: what its lanes can
// still draw on. It may be read while they work.
type Flow struct {
	// supply is what is free or in limbo, units. It can drift (recalled extents, damaged
	// words), so Core.Settle counts afresh.
	supply atomic.Int64
	taken  atomic.Uint64 // units ever taken
	given  atomic.Uint64 // of these and of others' records, units given back or unlinked
	limbo  atomic.Int64  // what lanes have in limbo, as of the last renewal and all but crowdStep since, units
}

// Supply is about how many units are free or wait in limbo.
func (f *Flow) Supply() int64 { return f.supply.Load() }

// Taken is how many units the session has ever allocated for records; it only grows.
func (f *Flow) Taken() uint64 { return f.taken.Load() }

// Net is how many units the session has linked, less those that it has unlinked.
func (f *Flow) Net() int64 { return int64(f.taken.Load() - f.given.Load()) }

// Limbo is what lanes have in limbo, in units: as of the last renewal, and 4 MiB less a lane at most since.
func (f *Flow) Limbo() uint64 { return uint64(max(f.limbo.Load(), 0)) }

const (
	// crowdedShare is which part of a session's memory of a placement group has to be in limbo for it to be crowded.
	crowdedShare = 8
	// crowdedUnits has to be there besides, 32 MiB, or that part of the placement group's heap if it is less.
	crowdedUnits = 1 << 19
)

// Crowded reports whether an eighth of the session's memory in some placement group is in limbo. Small values bring
// less there between two renewals.
func (c *Core) Crowded() bool {
	v := c.View()
	if v == nil {
		return false
	}
	for _, m := range c.Heaps() {
		pg, f := v.PG(m.PG), c.Flow(m.PG, m.Generation)
		if pg == nil || pg.Generation != m.Generation || f == nil {
			continue
		}
		least := min(crowdedUnits, uint64(pg.HeapHi-pg.HeapLo)/crowdedShare)
		if f.Limbo() >= max(m.Heap.Stats().Granted/crowdedShare, least, 1) {
			return true
		}
	}
	return false
}

// Add counts units: of the supply, more or less; taken; given back.
func (f *Flow) Add(supply, taken, given int64) {
	f.supply.Add(supply)
	f.taken.Add(uint64(taken))
	f.given.Add(uint64(given))
}

// Flow is the account of a placement group, nil before its memory is known.
func (c *Core) Flow(pg, generation uint32) *Flow {
	c.mu.Lock()
	defer c.mu.Unlock()
	if h := c.mu.heaps[pg]; h != nil && h.generation == generation {
		return &h.flow
	}
	return nil
}

// Settle counts the account of a placement group afresh: held is what the lanes have in
// their stocks and limbos.
func (c *Core) Settle(pg, generation uint32, held uint64) {
	c.mu.Lock()
	h := c.mu.heaps[pg]
	c.mu.Unlock()
	if h == nil || h.generation != generation {
		return
	}
	s := h.heap.Stats()
	h.flow.supply.Store(int64(s.Free + s.ForeignFree + held))
}

// Held is what the lane has of a placement group in its stock and in limbo, units.
func (l *Lane) Held(pg uint32) uint64 {
	if int(pg) >= len(l.mem) || l.mem[pg] == nil {
		return 0
	}
	return l.mem[pg].cache.Units() + l.mem[pg].limbo.Units()
}

// Exhausted reports whether the directory had no memory of pg to grant lately.
func (c *Core) Exhausted(pg uint32) bool {
	if c.sendSeq.Load() >= c.exhaustedUntil.Load() {
		return false // each PUT to a cache asks, and the lock is the session's
	}
	at := c.exhausted(pg)
	return at != 0 && c.sendSeq.Load() < at+exhaustedRenewals
}

// exhaustedRenewals is for how many renewals it is taken for granted that the directory
// still has no memory.
const exhaustedRenewals = 50

// flowOf is the account of what flows in and out of a placement group's memory; one of a generation that has gone
// counts for nobody.
func (c *Core) flowOf(pg, generation uint32) *Flow {
	c.heapOf(pg, generation)
	if f := c.Flow(pg, generation); f != nil {
		return f
	}
	return new(Flow)
}

// Owns reports whether the session was granted the memory at unit.
func (c *Core) Owns(pg *index.PG, unit uint32) bool { return c.heapOf(pg.ID, pg.Generation).Owns(unit) }

// HeapOf is the session's heap in a placement group, made if there is none yet. It guards itself.
func (c *Core) HeapOf(pg *index.PG) *heap.Heap { return c.heapOf(pg.ID, pg.Generation) }
