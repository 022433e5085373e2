package engine

import (
	"golang.org/x/sys/cpu"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/rdma"
)

// conn is a lane's connection to one memory node.
type conn struct {
	_           cpu.CacheLinePad // what an operation writes shares no cache line with what another processor uses
	node        uint32
	incarnation uint64
	version     uint64 // of the map when it was attached
	dev         int
	qp          *rdma.QP
	up          bool
	asked       bool // Control was told
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

// connKeys remembers a member's keys at the connection's provider.
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
			if c.incarnation == m.Incarnation {
				return c
			}
			l.drop(c)
		}
	}
	l.want(m.Node)
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

// want asks Control for a connection that is down, once.
func (l *Lane) want(node uint32) {
	if c := l.connTo(node); !c.up && !c.asked {
		c.asked = true
		l.core.opts.Control.WantConn(l, node)
	}
}

// drop marks a connection broken; Control replaces it.
func (l *Lane) drop(c *conn) {
	if !c.up {
		return
	}
	c.up = false
	l.want(c.node)
}

// Detach hands the node's queue pair back for closing. It also gives the incarnation whose memory the queue pair
// reaches and the version of the map when it was attached. Only after QP.Close has returned and the peer has
// confirmed may Attach bring another.
func (l *Lane) Detach(node uint32) (qp *rdma.QP, incarnation, version uint64) {
	if int(node) >= len(l.conns) || l.conns[node] == nil || l.conns[node].qp == nil {
		return nil, 0, 0
	}
	c := l.conns[node]
	c.up = false
	return c.qp, c.incarnation, c.version
}

// Closed says that the queue pair from Detach is closed: WCs that are not there
// by now never come.
func (l *Lane) Closed(node uint32) {
	c := l.conns[node]
	if c == nil || c.qp == nil {
		return
	}
	l.poll()
	cnt := c.qp.Counters()
	l.Stats.Closed.Add(&cnt)
	c.qp, c.boarding = nil, nil
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
			if t.pg.Members[r].Node == node {
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
	for _, c := range l.conns {
		if c != nil && c.qp != nil {
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

// Attach installs a connected queue pair on the dev-th device. Nothing that the
// lane posted to the node before can land any more.
func (l *Lane) Attach(node uint32, incarnation uint64, dev int, qp *rdma.QP) {
	c := l.connTo(node)
	c.incarnation, c.dev, c.qp, c.up, c.asked = incarnation, dev, qp, true, false
	c.caps = l.core.opts.Devices[dev].Caps()
	l.connsChanged()
	c.keys, c.version = nil, 0
	if l.view != nil {
		c.version = l.view.Version
	}
	at := node % (taskSlot / 8) * 8
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

// ConnFailed says that WantConn's connection cannot be had now; tasks that need
// it go on waiting until their deadline, or end with err if lost.
func (l *Lane) ConnFailed(node uint32, lost bool, err error) {
	c := l.connTo(node)
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
	for _, c := range l.conns {
		if c != nil && c.qp != nil {
			f(c.node, c.dev, c.qp)
		}
	}
}
