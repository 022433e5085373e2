package engine

import (
	"math"

	"golang.org/x/sys/cpu"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/rdma"
)

// conn is a lane's connection to one memory node. Where the WRs of a queue pair wait for each other's bytes, a lane has
// a second one from its first long chain on: bulk, of main. A chain goes whole by one of them. Between the two there is
// no order, so whatever relies on order waits for completions, with one exception: what was posted and has failed may
// still land. So the two end together. If either breaks neither is used until both are closed.
type conn struct {
	_           cpu.CacheLinePad // what an operation writes shares no cache line with what another processor uses
	node        uint32
	bulk        *conn // nil: there was no long chain yet
	main        *conn // of a bulk one
	incarnation uint64
	version     uint64 // of the map when it was attached
	dev         int
	endpoint    string // which the member's keys are of
	qp          *rdma.QP
	up          bool
	asked       bool // Control was told
	void        bool // of a bulk one: main was lost since, and when the memory node gets the next it ends this one
	leaving     bool // of a main one: see Leave
	caps        rdma.Caps
	wrs         []rdma.WR
	queued      bool  // in Lane.dirty
	boarding    *Task // the flight that others may join until the doorbell; its last WRs are in wrs
	// chains are those in wrs, and those executed since, of a connection that executes within
	// PostSend: nothing of them is signaled.
	chains []chainEnd
	// noWait holds the accesses off the path that no later WC has proven done.
	noWait []offPath
	sink   []byte
	seq    uint64     // WRs handed to the queue pair or waiting in wrs
	keys   []connKeys // by placement group id

	_ cpu.CacheLinePad
}

// connKeys remembers a member's keys at the connection's endpoint.
type connKeys struct {
	pg      *PG // nil: nothing remembered
	replica uint8
	keys    Keys
}

// maxReplicas bounds a placement group's chain.
const maxReplicas = 8

// connOf returns the usable connection to replica r of t's placement group, or
// nil and asks for one.
func (l *Lane) connOf(pg *PG, r uint8) *conn {
	m := &pg.Members[r]
	if int(m.Node) < len(l.conns) {
		if c := l.conns[m.Node]; c != nil && c.up {
			if c.incarnation == m.Incarnation && !c.leaving {
				return c
			}
			if c.leaving {
				return nil
			}
			l.drop(c)
		}
	}
	l.want(l.connTo(m.Node))
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

// bulkTo is the entry for the second queue pair beside c, perhaps without one.
func (c *conn) bulkTo() *conn {
	if c.bulk == nil {
		c.bulk = &conn{node: c.node, main: c}
	}
	return c.bulk
}

// connAt is the entry for one of the two connections to a node, or nil.
func (l *Lane) connAt(node uint32, bulk bool) *conn {
	if int(node) >= len(l.conns) || l.conns[node] == nil {
		return nil
	}
	if c := l.conns[node]; !bulk {
		return c
	}
	return l.conns[node].bulk
}

// all are the lane's connections, also those that are down: to each memory node the first one, then the second.
func (l *Lane) all(yield func(*conn) bool) {
	for _, c := range l.conns {
		if c != nil && (!yield(c) || c.bulk != nil && !yield(c.bulk)) {
			return
		}
	}
}

// takeBulk has the long chains of t's round, those to the replicas in long, go by second queue pairs. It asks for one
// that is lacking, and does not wait for it.
func (l *Lane) takeBulk(t *Task, conns *[maxReplicas]*conn, long uint8) {
	for r, c := range conns {
		if long&(1<<r) == 0 || !c.caps.SharedWire {
			continue
		}
		if b := c.bulkTo(); b.up {
			conns[r], t.bulk = b, t.bulk|1<<r
		} else {
			l.want(b)
		}
	}
}

// carrier is the connection by which t's chain to replica r went.
func (l *Lane) carrier(t *Task, r uint8) *conn {
	return l.connAt(t.pg.Members[r].Node, t.bulk&(1<<r) != 0)
}

// want asks Control for a connection that is down, once.
func (l *Lane) want(c *conn) {
	if !c.up && !c.asked {
		c.asked = true
		l.core.opts.Control.WantConn(l, c.node, c.main != nil)
	}
}

// drop marks a connection broken, and the other one to its memory node with it; Control replaces them. The second one
// comes first, so that Control knows of it before it replaces the first.
func (l *Lane) drop(c *conn) {
	if c.main != nil {
		c = c.main
	}
	if !c.up {
		return
	}
	if b := c.bulk; b != nil && b.up {
		b.up = false
		l.want(b)
	} else if b != nil {
		b.void = b.asked
	}
	c.up, c.leaving = false, false
	l.want(c)
}

// Leave has the lane give up a good connection to a memory node for another one, with the second one there. Nothing is
// posted on either from now on, and they are dropped when all has ended that was. So no outcome becomes unknown.
func (l *Lane) Leave(node uint32) {
	if c := l.connAt(node, false); c != nil && c.up {
		c.leaving, l.leaving = true, true
	}
}

// left drops the connections that are being left and on which nothing is under way.
func (l *Lane) left() {
	l.leaving = false
	for _, c := range l.conns {
		if c == nil || !c.leaving {
			continue
		}
		if l.uses(c) {
			l.leaving = true
			continue
		}
		l.drop(c)
	}
}

// uses reports whether something is under way on either connection to c's memory node.
func (l *Lane) uses(c *conn) bool {
	for _, t := range l.active {
		if t.flight != nil && t.flight.c == c {
			return true
		}
		if t.state != taskPosted || t.pg == nil {
			continue
		}
		for r := range t.pg.Members {
			if t.pending&(1<<r) != 0 && t.pg.Members[r].Node == c.node {
				return true
			}
		}
	}
	return false
}

// Detach hands one of the node's queue pairs back for closing, the second one if bulk. It also gives the incarnation
// whose memory the queue pair reaches and the version of the map when it was attached. Only after QP.Close has returned
// and the peer has confirmed may Attach bring another.
func (l *Lane) Detach(node uint32, bulk bool) (qp *rdma.QP, incarnation, version uint64) {
	c := l.connAt(node, bulk)
	if c == nil || c.qp == nil {
		return nil, 0, 0
	}
	c.up = false
	return c.qp, c.incarnation, c.version
}

// Closed says that the queue pair from Detach is closed: WCs that are not there
// by now never come.
func (l *Lane) Closed(node uint32, bulk bool) {
	c := l.connAt(node, bulk)
	if c == nil || c.qp == nil {
		return
	}
	l.poll()
	cnt := c.qp.Counters()
	l.Stats.Closed.Add(&cnt)
	c.qp, c.boarding = nil, nil
	if m := c.main; m != nil {
		for _, o := range c.noWait {
			o.seq = math.MaxUint64 // the other queue pair proves nothing of it
			m.noWait = append(m.noWait, o)
		}
		c.noWait = nil
	}
	l.connsChanged()
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
		if f := t.flight; f != nil && f.c == c {
			l.chainOver(t, t.gen, 0, false)
		}
		if t.state != taskPosted || t.pg == nil {
			continue
		}
		for r := range t.pg.Members {
			if t.pg.Members[r].Node == node && l.carrier(t, uint8(r)) == c {
				l.chainOver(t, t.gen, uint8(r), false)
			}
		}
	}
}

// Synchronous reports whether all of the lane's connections execute within PostSend. Any
// goroutine may call it.
func (l *Lane) Synchronous() bool { return l.synchronous.Load() }

// connsChanged works out what follows from which connections there are.
func (l *Lane) connsChanged() {
	var waitOn *rdma.CQ
	several := false
	some, all, any := false, true, false
	for c := range l.all {
		if c.qp != nil {
			some, all, any = true, all && c.caps.Synchronous, any || c.caps.Synchronous
			if cq := l.cqs[c.dev]; !c.caps.Synchronous {
				several = several || waitOn != nil && waitOn != cq
				waitOn = cq
			}
		}
	}
	if several || waitOn != nil && !waitOn.CanWait() {
		waitOn = nil
	}
	l.waitOn = waitOn
	l.synchronous.Store(some && all)
	l.someSynchronous = any
}

// Attach installs a queue pair that the dev-th device has connected to an endpoint of the node, the second one there if
// bulk. If it is the first one, nothing that the lane posted to the node before can land any more. endpoint names the
// keys that are good for the queue pair.
func (l *Lane) Attach(node uint32, bulk bool, incarnation uint64, dev int, endpoint string, qp *rdma.QP) {
	c := l.connTo(node)
	if bulk {
		c = c.bulkTo()
		c.seq = 0
	}
	c.incarnation, c.dev, c.endpoint, c.qp, c.up, c.asked = incarnation, dev, endpoint, qp, true, false
	c.caps = l.core.opts.Devices[dev].Caps()
	l.connsChanged()
	c.keys, c.version = nil, 0
	if l.view != nil {
		c.version = l.view.Version
	}
	if m := c.main; m != nil && (c.void || !m.up || m.incarnation != incarnation) {
		c.up, c.void = false, false
		l.want(c)
		return
	}
	at := sinkOf(node, bulk) * 8
	c.sink = l.sinks.buf[at : at+8 : at+8]
	// Repeat what was off the path and is not known to be done.
	again := c.noWait
	c.noWait = nil
	v := l.view
	for i := range again {
		if v == nil {
			break
		}
		pg := v.PG(again[i].pg)
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

// sinkOf numbers the words that take what the CASes found whose results nobody wants. Two readers of replies write to
// different ones, unless there are very many memory nodes.
func sinkOf(node uint32, bulk bool) uint32 {
	const half = taskSlot / 8 / 2
	if bulk {
		return half + node%half
	}
	return node % half
}

// ConnFailed says that WantConn's connection cannot be had now; tasks that need
// it go on waiting until their deadline, or end with err if lost. Nothing needs a second one.
func (l *Lane) ConnFailed(node uint32, bulk, lost bool, err error) {
	c := l.connTo(node)
	if bulk {
		b := c.bulkTo()
		b.asked, b.void = false, false
		return
	}
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
	return l.reaches(l.view.PG(t.Op.Route.PG.ID))
}

// reaches reports whether every replica of pg has a live connection, and asks for those that are down.
func (l *Lane) reaches(pg *PG) bool {
	ok := true
	for r := range pg.Members {
		ok = l.connOf(pg, uint8(r)) != nil && ok
	}
	return ok
}

// Conns calls f for every connection that has a queue pair, up or not. The lane's owner calls it.
func (l *Lane) Conns(f func(node uint32, dev int, qp *rdma.QP)) {
	for c := range l.all {
		if c.qp != nil {
			f(c.node, c.dev, c.qp)
		}
	}
}
