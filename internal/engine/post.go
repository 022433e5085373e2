package engine

import (
	"encoding/binary"
	"errors"
	"math"
	"unsafe"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/driver"
)

// chainEnd is a task whose accesses to one replica are a chain.
type chainEnd struct {
	t       *Task
	gen     uint32
	replica uint8
}

// posted posts what the Op wants posted. It is true if the view has changed since
// the Op asked: nothing was posted, and Next is to be called again.
func (l *Lane) posted(t *Task) (stale bool) {
	if t.Op.Route.PG != nil && !l.current(t) {
		t.Op.NotPosted()
		t.Op.Rebase()
		t.want = 0
		return true
	}
	if !l.post(t) {
		l.park(t, index.Post, 0)
	}
	return false
}

// post turns the Op's accesses into WRs, one chain a replica. It is false, and
// nothing was posted, while a connection is down.
func (l *Lane) post(t *Task) bool {
	v := l.view
	pg := v.PG(t.Op.Route.PG.ID)
	if pg == nil || pg.Epoch != t.Op.Route.PG.Epoch {
		return false // the next try sees it
	}
	if t.Op.Decides() && !l.reaches(pg) {
		return false // what is decided now could not be published
	}
	var conns [maxReplicas]*conn
	var last, bytes [maxReplicas]int
	long := uint8(0)                            // bit per replica
	leased := pg.Replicas > 1 || t.Op.InPlace() // memory that is shown fences nobody
	for i := range t.Op.Accesses {
		r := t.Op.Accesses[i].Replica
		if bytes[r] += t.Op.LenOf(&t.Op.Accesses[i]); bytes[r] >= l.core.opts.BulkFrom {
			long |= 1 << r
		}
		leased = leased || t.Op.Accesses[i].Verb != index.Read
		if conns[r] == nil {
			c := l.connOf(pg, r)
			if c == nil {
				return false
			}
			conns[r] = c
			leased = leased || !c.caps.SelfFencing
		}
		if !t.Op.Accesses[i].NoWait {
			last[r] = i
		}
	}
	if leased && !l.valid() {
		l.finish(t, ErrLease)
		return true
	}
	if t.bulk = 0; long != 0 && l.id < l.core.opts.Lanes {
		l.takeBulk(t, &conns, long)
	}
	t.pg, t.leased = pg, leased
	t.postView = v.Version
	t.pending = 0
	cells := 0
	id := t.id()
	for i := range t.Op.Accesses {
		a := &t.Op.Accesses[i]
		c := conns[a.Replica]
		if a.NoWait {
			l.addNoWait(c, pg, a.Replica, offPathOf(pg, a))
			continue
		}
		wr := c.next(l)
		wr.ID = id | uint64(a.Replica)
		if last[a.Replica] == i {
			if t.pending |= 1 << a.Replica; c.caps.Synchronous {
				c.chains = append(c.chains, chainEnd{t, t.gen, a.Replica})
			} else {
				wr.Flags = rdma.Signaled
			}
		}
		cell := t.buf[8*cells : 8*cells+8 : 8*cells+8]
		if a.Verb == index.CAS {
			cells++
		}
		c.request(wr, l.keysOf(c, pg, a.Replica), pg.IndexBytes, a, cell)
		wr.LKey = t.lkey(wr.Local, c.dev)
		if a.Apart != 0 {
			wr.Value = t.nextValue(t.Op.ValueOf(a))
		}
		c.seq++
		t.seqs[a.Replica] = c.seq
	}
	t.state, t.want = taskPosted, 0
	return true
}

// id is what the WRs of t are known by; its low byte is for the replica.
func (t *Task) id() uint64 { return uint64(t.gen)<<32 | uint64(t.idx)<<8 }

// request makes wr the access a on the region that k reaches; what a CAS found comes to cell. ID, LKey and all flags
// but Fence and IfHit are the caller's.
func (c *conn) request(wr *rdma.WR, k *Keys, indexBytes uint64, a *index.Access, cell []byte) {
	if a.Space == index.Index {
		wr.RemoteAddr, wr.RKey = k.IndexBase+a.Off, k.IndexRKey
	} else {
		wr.RemoteAddr, wr.RKey = k.HeapBase+a.Off-indexBytes, k.HeapRKey
	}
	switch a.Verb {
	case index.Read:
		wr.Op, wr.Local = rdma.OpRead, a.Buf
		if !c.caps.AtomicThenRead {
			wr.Flags |= rdma.Fence
		}
	case index.Write:
		wr.Op, wr.Local = rdma.OpWrite, a.Buf
	case index.CAS:
		wr.Op, wr.Local, wr.Compare, wr.Swap = rdma.OpCmpAndSwp, cell, a.Expect, a.New
		if a.IfHit {
			wr.Flags |= rdma.IfHit
		}
	}
}

func (l *Lane) keysOf(c *conn, pg *PG, r uint8) *Keys {
	for int(pg.ID) >= len(c.keys) {
		c.keys = append(c.keys, connKeys{})
	}
	e := &c.keys[pg.ID]
	if e.pg != pg || e.replica != r {
		*e = connKeys{pg, r, pg.Members[r].Keys[c.endpoint]}
	}
	return &e.keys
}

// lkey finds the registration of b, which lies in the task's slot or in one of
// its large buffers.
func (t *Task) lkey(b []byte, dev int) uint64 {
	p := uintptr(unsafe.Pointer(unsafe.SliceData(b)))
	if off := p - uintptr(unsafe.Pointer(unsafe.SliceData(t.buf))); off < taskSlot {
		return t.lkeys[dev]
	}
	for _, g := range t.big {
		if off := p - uintptr(unsafe.Pointer(unsafe.SliceData(g.b))); off < uintptr(len(g.b)) {
			return g.lkeys[dev]
		}
	}
	return 0
}

// next is a WR, all zero, at the end of those that the connection is to post.
func (c *conn) next(l *Lane) *rdma.WR {
	c.wrs = append(c.wrs, rdma.WR{})
	if !c.queued {
		c.queued = true
		l.dirty = append(l.dirty, c)
	}
	return &c.wrs[len(c.wrs)-1]
}

const noWaitID = 0xff

// signalEvery is how many unsignaled WRs may follow each other, a small part of any
// send queue.
const signalEvery = 16

// offPath is a CAS on the index whose result nobody waits for. It belongs to the
// connection's memory node, whatever place that has in the chain by now.
type offPath struct {
	pg          uint32
	off         uint64
	expect, new uint64
	seq         uint64
}

func offPathOf(pg *PG, a *index.Access) offPath {
	return offPath{pg: pg.ID, off: a.Off, expect: a.Expect, new: a.New}
}

// addNoWait posts a CAS whose result nobody waits for. It is remembered until a
// later WC of the queue pair proves it done, and repeated after a reconnection.
func (l *Lane) addNoWait(c *conn, pg *PG, replica uint8, o offPath) {
	k := l.keysOf(c, pg, replica)
	c.seq++
	o.seq = c.seq
	c.noWait = append(c.noWait, o)
	wr := c.next(l)
	*wr = rdma.WR{ID: noWaitID, Op: rdma.OpCmpAndSwp, RemoteAddr: k.IndexBase + o.off, RKey: k.IndexRKey,
		Compare: o.expect, Swap: o.new, Local: c.sink, LKey: l.sinks.lkeys[c.dev]}
	if len(c.noWait)%signalEvery == 0 {
		wr.Flags = rdma.Signaled // only a WC makes room in the send queue
	}
}

// postNoWait posts the NoWait accesses that came with an action other than Post.
func (l *Lane) postNoWait(t *Task) {
	if len(t.Op.Accesses) == 0 || t.Op.Route.PG == nil {
		return
	}
	v := l.view
	if v == nil {
		return
	}
	// All are aimed at the head. In another placement group epoch the head may be another
	// replica, where they find nothing to change.
	pg := v.PG(t.Op.Route.PG.ID)
	if pg == nil || pg.Generation != t.Op.Route.PG.Generation || !pg.Active && !pg.Frozen {
		t.Op.Accesses = t.Op.Accesses[:0]
		return
	}
	for i := range t.Op.Accesses {
		if a := &t.Op.Accesses[i]; a.NoWait {
			m := &pg.Members[a.Replica]
			c := l.connTo(m.Node)
			if c.up && c.incarnation == m.Incarnation {
				l.addNoWait(c, pg, a.Replica, offPathOf(pg, a))
			} else {
				o := offPathOf(pg, a)
				o.seq = math.MaxUint64 // no WC proves what was never posted
				c.noWait = append(c.noWait, o)
				l.want(c)
			}
		}
	}
	t.Op.Accesses = t.Op.Accesses[:0]
}

// flush rings one doorbell a connection.
func (l *Lane) flush() {
	if len(l.dirty) == 0 {
		return
	}
	list := l.dirty
	l.dirty = l.flushed[:0] // a round that ends here may add to it
	for _, c := range list {
		if c.boarding != nil {
			c.depart()
		}
		if !l.ring(c) {
			l.dirty = append(l.dirty, c)
		}
	}
	clear(list)
	l.flushed = list
}

// ring posts what the connection is to post; false: its send queue has no room for the rest.
func (l *Lane) ring(c *conn) bool {
	n, err := c.qp.PostSend(c.wrs)
	for ; n < len(c.wrs) && c.up && errors.Is(err, rdma.ErrQueueFull); n, err = c.qp.PostSend(c.wrs) {
		c.wrs = c.wrs[:copy(c.wrs, c.wrs[n:])]
		if n == 0 || !c.caps.Synchronous {
			return false
		}
	}
	if n < len(c.wrs) {
		l.refused(c, c.wrs[n:])
		l.drop(c)
	}
	c.wrs = c.wrs[:0]
	c.queued = false
	if len(c.chains) > 0 {
		l.ran = append(l.ran, c)
	}
	return true
}

// executed ends the chains that PostSend has executed. Those that failed had a WC, which poll has taken.
func (l *Lane) executed() (any bool) {
	for len(l.ran) > 0 {
		c := l.ran[len(l.ran)-1]
		l.ran = l.ran[:len(l.ran)-1]
		for i := range c.chains {
			x := &c.chains[i]
			l.chainOver(x.t, x.gen, x.replica, true)
		}
		clear(c.chains)
		c.chains = c.chains[:0]
		any = true
	}
	return any
}

// poll takes completions and makes tasks ready whose round is over.
func (l *Lane) poll() (any bool) {
	for _, cq := range l.cqs {
		for {
			n := cq.Poll(l.wcs[:])
			for i := range l.wcs[:n] {
				wc := &l.wcs[i]
				ok := wc.Status == driver.Success
				var c *conn
				if !ok {
					c = l.connByQP(wc.QPNum)
				}
				l.complete(wc.ID, ok)
				if c != nil && !ok {
					l.drop(c)
				}
			}
			any = any || n > 0
			if n < len(l.wcs) {
				break
			}
		}
	}
	return any
}

// connByQP finds a connection by the number that its completions carry; nil if it is closed by now.
func (l *Lane) connByQP(num uint32) *conn {
	for c := range l.all {
		if c.qp != nil && c.qp.Num() == num {
			return c
		}
	}
	return nil
}

// refused fails the chains of WRs that were not posted. A CAS among them certainly
// did not happen.
func (l *Lane) refused(c *conn, wrs []rdma.WR) {
	for i := range wrs {
		w := &wrs[i]
		idx := uint32(w.ID) >> 8
		if w.Op != rdma.OpCmpAndSwp || w.ID == noWaitID || int(idx) >= len(l.tasks) ||
			l.tasks[idx].gen != uint32(w.ID>>32) {
			continue
		}
		for j := range l.tasks[idx].Op.Accesses {
			a := &l.tasks[idx].Op.Accesses[j]
			if a.Verb == index.CAS && !a.NoWait && a.Replica == uint8(w.ID) && a.Expect == w.Compare &&
				a.New == w.Swap {
				a.Refused = true
			}
		}
	}
	for i := range wrs {
		l.complete(wrs[i].ID, false)
	}
}

// complete notes one chain's end.
func (l *Lane) complete(id uint64, ok bool) {
	if idx := uint32(id) >> 8; id != noWaitID && int(idx) < len(l.tasks) {
		l.chainOver(l.tasks[idx], uint32(id>>32), uint8(id), ok)
	}
}

// chainOver notes the end of a task's chain to replica r, if that is still under way.
func (l *Lane) chainOver(t *Task, gen uint32, r uint8, ok bool) {
	if gen != t.gen || t.state != taskPosted || t.pending&(1<<r) == 0 {
		return
	}
	t.pending &^= 1 << r
	if f := t.flight; f != nil {
		if f.failed = !ok; ok {
			f.c.proven(t.seqs[0])
		}
		l.land(t)
		return
	}
	if !ok {
		for i := range t.Op.Accesses {
			if t.Op.Accesses[i].Replica == r {
				t.Op.Accesses[i].Failed = true
			}
		}
	} else if c := l.carrier(t, r); len(c.noWait) > 0 {
		c.proven(t.seqs[r])
	}
	if t.pending == 0 {
		l.roundOver(t)
	}
}

// proven forgets NoWait accesses posted before the WR numbered seq, which has
// completed: WRs of one queue pair take effect in order.
func (c *conn) proven(seq uint64) {
	n := 0
	for n < len(c.noWait) && c.noWait[n].seq < seq {
		n++
	}
	c.noWait = c.noWait[:copy(c.noWait, c.noWait[n:])]
}

// roundOver hands the results of t's round to its Op. A round whose lease ran out meanwhile has no results: what it
// read may be of memory that is another session's by now.
func (l *Lane) roundOver(t *Task) {
	cells, ok := 0, true
	for i := range t.Op.Accesses {
		a := &t.Op.Accesses[i]
		ok = ok && (!a.Failed || a.NoWait)
		if a.Verb == index.CAS && !a.NoWait {
			a.Found = binary.LittleEndian.Uint64(t.buf[8*cells:])
			cells++
			if a.Found != a.Expect {
				l.Stats.CASLosses++
			}
		}
	}
	t.valuesOver(ok)
	t.state = taskReady
	if t.pg != nil && t.leased && !l.valid() {
		l.finish(t, ErrLease)
		return
	}
	l.ready = append(l.ready, t)
}

// valid checks the lease: before posting, so that nothing happens without one, and
// after completion, which alone makes a READ's bytes worth anything.
func (l *Lane) valid() bool { return l.core.LeaseValid() }
