package session

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"

	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/rdma"
)

// end is where a connection ends: at a lane, and at a memory node. bulk: it is the second one there.
type end struct {
	lane, node uint32
	bulk       bool
}

// twin is the other connection between the two.
func (e end) twin() end { return end{e.lane, e.node, !e.bulk} }

// order sorts ends, of two between the same the first connection's first.
func order(a, b end) int {
	by := cmp.Or(cmp.Compare(a.lane, b.lane), cmp.Compare(a.node, b.node))
	switch {
	case by != 0 || a.bulk == b.bulk:
		return by
	case b.bulk:
		return -1
	}
	return 1
}

// link is a connection that a lane misses: the old queue pair is closed, then another one is
// dialed while the map has the memory node up, until there is one or it cannot be had.
type link struct {
	old         *rdma.QP // to be closed first; nil: there is none any more
	incarnation uint64   // of the memory node that old reaches
	version     uint64   // of the map when old was attached
	asked       bool     // a hang-up or a dial is under way
	dialAt      int64    // it is not dialed before
	pause       int64    // before the next dial, should the present one fail
	downAt      int64    // when the lane learns that the memory node is down; 0: that is not known to be so
	awaits      bool     // dialAt is for want of another map
}

// lately is the connection that a lane had last, or has.
type lately struct {
	since   int64
	version uint64 // of the map then
	pause   int64  // before another one is dialed, should it end soon and the map be the same
}

// WantConn notes that a lane misses a connection to a memory node, from the lane's own goroutine. If the lane still
// holds a queue pair to the node, that is to be closed. All that it still holds must end before another one works,
// unless its memory is given up. bulk: it is the second one of the two; see linksDue.
func (a *Agenda) WantConn(l *engine.Lane, node uint32, bulk bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.stirLocked()
	e, now := end{uint32(l.ID()), node, bulk}, a.core.Nanos()
	x := &link{pause: a.o.DialPause}
	// A connection that ends as soon as it is there may have been refused the keys of the map, whose successor is under
	// way: those of a memory node's last process, perhaps.
	if had, ok := a.mu.lately[e]; ok && now-had.since < a.o.DialPauseMost && had.version == a.version() {
		x.awaits, x.dialAt, x.pause = true, now+had.pause, min(2*had.pause, a.o.DialPauseMost)
	}
	x.old, x.incarnation, x.version = l.Detach(node, bulk)
	a.mu.links[e] = x
}

// version is that of the session's map; 0: it has none yet.
func (a *Agenda) version() uint64 {
	if v := a.core.View(); v != nil {
		return v.Version
	}
	return 0
}

// awaitedLocked has connections dialed now that were put off until there is another map.
func (a *Agenda) awaitedLocked() {
	for _, x := range a.mu.links {
		if x.awaits {
			x.awaits, x.dialAt, x.pause = false, 0, a.o.DialPause
		}
	}
}

// Has reports whether the session's map has the memory that a queue pair reaches, which was attached under a version of
// the map. Otherwise it is closed without waiting for its peer.
func (a *Agenda) Has(node uint32, incarnation, version uint64) bool {
	v := a.core.View()
	return v != nil && v.Nodes[node].Has(incarnation, version)
}

// isUp reports whether the session's map has the memory node up, and something there.
func (a *Agenda) isUp(node uint32) bool {
	v := a.core.View()
	return v != nil && v.Nodes[node].Up && v.Nodes[node].Used
}

// linksDue gives the hang-ups and dials that are to begin now, and tells the lanes of memory
// nodes that are down: their operations ask again. Of the two connections between a lane and a memory node, neither is
// dialed before what was lost of both is closed, and the second one is dialed beside the first one alone.
func (a *Agenda) linksDue(now int64) (asks []Ask) {
	if len(a.mu.links) == 0 {
		return nil
	}
	for _, e := range slices.SortedFunc(maps.Keys(a.mu.links), order) {
		x, l := a.mu.links[e], a.core.Lanes()[e.lane]
		if x.asked {
			continue
		}
		if x.old != nil {
			x.asked = true
			asks = append(asks, Ask{Kind: AskHangup, Lane: l, Node: e.node, Bulk: e.bulk, QP: x.old,
				Incarnation: x.incarnation, Version: x.version})
			continue
		}
		if a.waits(e) {
			continue
		}
		if a.isUp(e.node) {
			if x.downAt = 0; now >= x.dialAt {
				x.asked = true
				asks = append(asks, Ask{Kind: AskDial, Lane: l, Node: e.node, Bulk: e.bulk})
			}
			continue
		}
		if x.downAt == 0 {
			x.downAt = now + a.o.DownPause
		}
		if now >= x.downAt {
			a.connFailed(l, e, false, fmt.Errorf("%w: memory node %d is down", engine.ErrNoConn, e.node))
		}
	}
	return asks
}

// waits reports whether the connection is not dialed because of the other one between the two.
func (a *Agenda) waits(e end) bool {
	x := a.mu.links[e.twin()]
	return x != nil && (e.bulk || x.old != nil)
}

// linksNext is when a dial is to begin, or a lane to learn that a memory node is down.
func (a *Agenda) linksNext() int64 {
	next := int64(math.MaxInt64)
	for e, x := range a.mu.links {
		switch {
		case x.asked:
		case x.old != nil:
			next = 0
		case a.waits(e):
		case a.isUp(e.node):
			next = min(next, x.dialAt)
		default:
			next = min(next, x.downAt)
		}
	}
	return next
}

func (a *Agenda) connFailed(l *engine.Lane, e end, lost bool, err error) {
	delete(a.mu.links, e)
	l.Deliver(func(l *engine.Lane) { l.ConnFailed(e.node, e.bulk, lost, err) })
}

// hungUp takes it that the old queue pair is closed: nothing of it can land any more, or
// where it lands nobody looks.
func (a *Agenda) hungUp(q Ask) {
	x := a.mu.links[end{uint32(q.Lane.ID()), q.Node, q.Bulk}]
	x.old, x.asked = nil, false
	q.Lane.Deliver(func(l *engine.Lane) { l.Closed(q.Node, q.Bulk) })
}

func (a *Agenda) dialed(q Ask, r Reply, now int64) {
	e := end{uint32(q.Lane.ID()), q.Node, q.Bulk}
	switch x := a.mu.links[e]; {
	case r.Err == nil:
		delete(a.mu.links, e)
		had := lately{since: now, version: a.version(), pause: a.o.DialPause}
		if x.awaits {
			had.pause = x.pause
		}
		a.mu.lately[e] = had
		q.Lane.Deliver(func(l *engine.Lane) { l.Attach(q.Node, q.Bulk, r.Incarnation, r.Dev, r.Endpoint, r.QP) })
	case r.Lost:
		a.connFailed(q.Lane, e, true, fmt.Errorf("%w: %w", engine.ErrNoConn, r.Err))
	default:
		x.asked, x.dialAt = false, now+x.pause
		most := a.o.DialPauseMost
		if e.bulk {
			most *= bulkPatience // nobody waits for it, and a memory node that is full has others to refuse
		}
		x.pause = min(2*x.pause, most)
	}
}

// bulkPatience is how many times the longest pause between two dials is that before a second connection is dialed.
const bulkPatience = 64
