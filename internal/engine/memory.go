package engine

import (
	"math"

	"golang.org/x/sys/cpu"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/heap"
	"github.com/kvd-project/kvd/internal/layout"
)

// laneMem is a lane's places in one placement group.
type laneMem struct {
	_          cpu.CacheLinePad // what an operation writes shares no cache line with what another processor uses
	generation uint32
	cache      *heap.Cache
	limbo      heap.Limbo
	// ready is the tag below which places have left limbo: until the next renewal they are
	// the lane's own, if it is one that needs places (used).
	ready uint64
	used  bool
	taken int // places, since the last release
	flow  *Flow
	due   struct{ supply, taken, given int64 } // not in flow yet, units
	shown int64                                // of limbo, in flow, units

	_ cpu.CacheLinePad
}

// take counts units that an operation uses, and give those that it does not use any more. They reach the account, which
// other lanes share, every flowStep units: a shared cache line for each PUT would cost as much as its WRITE.
func (m *laneMem) take(units uint32) {
	m.used = true
	m.taken++
	m.due.taken += int64(units)
	m.due.supply -= int64(units)
	if m.due.taken >= flowStep {
		m.settleFlow()
	}
}

func (m *laneMem) give(units uint32) {
	m.due.given += int64(units)
	if m.due.supply += int64(units); m.due.supply >= flowStep {
		m.settleFlow()
	}
}

func (m *laneMem) settleFlow() {
	m.flow.Add(m.due.supply, m.due.taken, m.due.given)
	m.due.supply, m.due.taken, m.due.given = 0, 0, 0
}

// show brings what the lane has in limbo into the account.
func (m *laneMem) show() {
	m.settleFlow()
	limbo := int64(m.limbo.Units())
	m.flow.limbo.Add(limbo - m.shown)
	m.shown = limbo
}

// crowdStep is how much comes into a lane's limbo before the account shows it, units: 4 MiB.
const crowdStep = 1 << 16

// retire puts a place into limbo.
func (l *Lane) retire(m *laneMem, p heap.Place) {
	m.limbo.Add(p, l.core.Unlinks())
	m.give(p.Units)
	if int64(m.limbo.Units())-m.shown < crowdStep {
		return
	}
	m.show()
	if l.core.opts.Crowded != nil && l.core.Crowded() {
		l.core.opts.Crowded()
	}
}

// flowStep is how much a lane takes or gives before the account shows it, units.
const flowStep = 32

// memOf is the lane's part of the memory granted in pg; nil if that is of an older generation of the placement group,
// whose memory has gone.
func (l *Lane) memOf(pg *index.PG) *laneMem {
	for int(pg.ID) >= len(l.mem) {
		l.mem = append(l.mem, nil)
	}
	m := l.mem[pg.ID]
	if m == nil || m.generation != pg.Generation {
		if m != nil && m.generation > pg.Generation {
			return nil // an Op that outlived its memory
		}
		m = &laneMem{generation: pg.Generation, cache: heap.NewCache(l.core.heapOf(pg.ID, pg.Generation)),
			flow: l.core.flowOf(pg.ID, pg.Generation)}
		l.mem[pg.ID] = m
	}
	return m
}

// recalled reports whether w's place lies in an extent being recalled: it is
// nobody's any more.
func (l *Lane) recalled(pg *index.PG, w layout.Word) bool {
	if l.view != nil {
		if p := l.view.PG(pg.ID); p != nil {
			return p.IsRecalled(w.Unit())
		}
	}
	return false
}

func (l *Lane) wantMemory(t *Task) {
	l.core.opts.Control.WantMemory(t.Op.Wanted())
}

// release frees what has waited long enough in limbo, and the lane has not used again
// since the last release. A lane that needs many places keeps half as many again as it took since then: how many leave
// limbo at a time differs, and the session's heap is the dearer way from one time to the next.
func (l *Lane) release(before uint64) {
	l.released = before
	for _, m := range l.mem {
		if m == nil {
			continue
		}
		free, most := m.ready, math.MaxInt
		if m.ready = before; m.cache.Starved() || m.limbo.Long() {
			free = before
		} else if m.taken >= keepFrom {
			most = m.limbo.Ripe(before) - m.taken - m.taken/2
		}
		m.taken = 0
		m.limbo.ReleaseSome(free, most, m.cache.Free)
		m.show()
	}
	l.events++
}

// keepFrom is how many places a lane has to take between two releases, so that it keeps some.
const keepFrom = 256

// GiveBack returns the lane's idle places to the session's heaps, for other lanes. It does not if the lane uses
// them itself and no other lacks them. If all is set (the session is closing) it returns all of them, and limbo
// places too.
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

// LimboUnits is what waits in the lane's limbo, in units, of all placement groups. The lane's owner calls it.
func (l *Lane) LimboUnits() (n uint64) {
	for _, m := range l.mem {
		if m != nil {
			n += m.limbo.Units()
		}
	}
	return n
}

// CachedUnits is what the lane's magazines hold, in units, of all placement groups. The lane's owner calls it.
func (l *Lane) CachedUnits() (n uint64) {
	for _, m := range l.mem {
		if m != nil {
			n += m.cache.Units()
		}
	}
	return n
}
