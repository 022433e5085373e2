package session_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/session"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/sim"
)

// conns is an agenda whose lane misses a connection to memory node 1, for a GET.
type conns struct {
	lost uint64 // map version that took node 1 out of something, though it stays up
	*agenda
	l       *engine.Lane
	fab     *sim.Fabric
	dev     *rdma.Device
	version uint64
	renewal int64 // when the next one is due
	err     error // the GET's, once it is done
	done    bool
}

func newConns(t *testing.T) *conns {
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	fab := sim.New(sim.Options{Manual: true})
	mem := rdma.NewDevice("sim", fab.Device("m"))
	pd, err := mem.AllocPD()
	must(err)
	listener, err := mem.Listen("m", rdma.ListenOptions{Accept: func(rdma.ConnRequest) (*rdma.PD, rdma.Access, error) {
		return pd, rdma.AccessRemoteRead | rdma.AccessRemoteAtomic, nil
	}})
	must(err)
	t.Cleanup(func() {
		if err := errors.Join(listener.Close(), pd.Dealloc(), mem.Close()); err != nil {
			t.Error(err)
		}
	})
	c := &conns{fab: fab, dev: rdma.NewDevice("sim", fab.Device("c"))}
	c.agenda = newAgendaOn(t, c.dev)
	c.l = c.core.Lanes()[0]
	c.up(1)
	c.answer(c.agenda.renewal(), &dirpb.RenewReply{Epoch: 2, MinEpoch: 1, LeaseMillis: 1 << 30})
	c.renewal = c.Next()
	x, err := c.l.NewTask()
	must(err)
	x.Op.Kind, x.Op.Key = index.Get, []byte("key")
	x.Done = func(x *engine.Task) {
		c.err, c.done = x.Op.Err, true
		c.l.Recycle(x)
	}
	c.l.Start(x)
	c.l.Pump()
	t.Cleanup(func() {
		c.l.Orphan(x, errLost)
		if qp, _, _ := c.l.Detach(1, false); qp != nil {
			_ = qp.Close()
			c.l.Closed(1, false)
		}
		c.l.Pump()
	})
	if c.missed != 1 || c.done {
		t.Fatalf("misses %d connections, done %v", c.missed, c.done)
	}
	return c
}

// up installs a map that has memory node 1 up in an incarnation, or down if that is 0.
func (c *conns) up(incarnation uint64) {
	c.t.Helper()
	c.upWith(incarnation, 1)
}

// upWith is up, with the placement group at another memory node, perhaps.
func (c *conns) upWith(incarnation uint64, member uint32) {
	c.t.Helper()
	c.version++
	n := &dirpb.Node{Id: 1, Incarnation: max(incarnation, 1), State: dirpb.NodeState_NODE_UP, LostVersion: c.lost}
	if incarnation == 0 {
		n.State = dirpb.NodeState_NODE_DOWN
	}
	v, err := engine.ViewOf(&dirpb.Map{Version: c.version, Nodes: []*dirpb.Node{n}, Pgs: []*dirpb.PlacementGroup{{
		Id: 1, NamespaceId: 1, Epoch: uint32(c.version), State: dirpb.PGState_PG_ACTIVE,
		Members: []*dirpb.Member{
			{NodeId: member, Incarnation: n.Incarnation, Keys: []*dirpb.RegionKeys{
				{Provider: "sim", IndexRkey: 1, HeapRkey: 2}}}},
		RegionBytes: 64 << 20, IndexBytes: layout.RegionPageSize + layout.SegmentSize, Generation: 1,
	}}, Shards: []*dirpb.Shard{{Id: 1, NamespaceId: 1, PgId: 1, Offset: layout.RegionPageSize, Segments: 1}}}, 1)
	if err != nil {
		c.t.Fatal(err)
	}
	c.core.InstallView(v)
	c.NewMap()
	c.l.Pump()
}

func (c *conns) dial() session.Ask {
	c.t.Helper()
	q := c.due(session.AskDial)
	if q.Lane != c.l || q.Node != 1 {
		c.t.Fatalf("asked %v", q)
	}
	return q
}

// attach answers a dial with a queue pair.
func (c *conns) attach(q session.Ask, incarnation uint64) *rdma.QP {
	c.t.Helper()
	qp, err := c.dev.Dial(context.Background(), c.core.PD(0), c.l.CQ(0), "m", nil)
	if err != nil {
		c.t.Fatal(err)
	}
	c.Answer(q, session.Reply{QP: qp, Incarnation: incarnation})
	c.l.Pump()
	return qp
}

func (c *conns) hangUp(q session.Ask) {
	c.t.Helper()
	if err := q.QP.Close(); err != nil {
		c.t.Fatal(err)
	}
	c.Answer(q, session.Reply{})
}

// has checks which queue pair the lane has.
func (c *conns) has(want *rdma.QP) {
	c.t.Helper()
	var got *rdma.QP
	c.l.Conns(func(_ uint32, _ int, qp *rdma.QP) { got = qp })
	if got != want {
		c.t.Fatalf("the lane has queue pair %p, want %p", got, want)
	}
}

// wants counts how often the lane has said that it misses a connection.
func (c *conns) wants(n int) {
	c.t.Helper()
	if c.missed != n {
		c.t.Fatalf("the lane has missed a connection %d times, want %d", c.missed, n)
	}
}

// A connection is dialed once at a time, again after pauses that double up to a bound, and
// not any more once there is one.
func TestAgendaDials(t *testing.T) {
	c := newConns(t)
	for _, wait := range []int64{1, 2, 4, 8, 10, 10} {
		q := c.dial()
		c.rests(c.renewal)
		c.Answer(q, session.Reply{Err: errLost})
		c.rests(c.now + wait*ms)
		c.now += wait*ms - 1
		c.rests(c.now + 1)
		c.now++
	}
	qp := c.attach(c.dial(), 1)
	c.has(qp)
	c.wants(1)
	c.rests(c.renewal)
}

// The pauses of one connection say nothing of the next.
func TestAgendaDialsAnew(t *testing.T) {
	c := newConns(t)
	for range 4 {
		c.Answer(c.dial(), session.Reply{Err: errLost})
		c.now = c.Next()
	}
	c.attach(c.dial(), 1)
	c.up(2)
	c.hangUp(c.due(session.AskHangup))
	c.Answer(c.dial(), session.Reply{Err: errLost})
	c.rests(c.now + ms)
}

// refuse ends the queue pair by a verb that the memory node refuses, as it refuses those under rkeys that it does not
// know.
func (c *conns) refuse() {
	c.t.Helper()
	c.refused()
	c.hangUp(c.due(session.AskHangup))
}

// refused is refuse but for the hang-up, which is due then.
func (c *conns) refused() {
	c.t.Helper()
	missed := c.missed
	for i := 0; c.missed == missed && i < 100; i++ {
		c.l.Pump()
		for _, e := range c.fab.Events() {
			if err := c.fab.Fire(e); err != nil {
				c.t.Fatal(err)
			}
		}
	}
	c.wants(missed + 1)
	if at := c.Next(); at > c.now {
		c.t.Fatalf("next at %d, want %d", at, c.now)
	}
}

// Where the memory node refuses the map's keys, the next connection waits for another map, or for pauses that double.
func TestAgendaAwaitsMap(t *testing.T) {
	c := newConns(t)
	c.attach(c.dial(), 1)
	for _, wait := range []int64{1, 2, 4, 8, 10, 10} {
		c.refuse()
		c.rests(c.now + wait*ms)
		c.now += wait * ms
		c.attach(c.dial(), 1)
	}
	c.refuse()
	c.rests(c.now + 10*ms)
	c.up(1)
	c.attach(c.dial(), 1)
	c.refuse()
	c.rests(c.now + ms)
	c.now += ms
	c.attach(c.dial(), 1)
	c.now += 10 * ms // that is not soon
	c.refuse()
	c.attach(c.dial(), 1)
}

// An operation that hangs at a memory node which is up, and was lost to some placement group since the connection was
// made, is closed without waiting for it, once.
func TestAgendaHangsUpSilent(t *testing.T) {
	c := newConns(t)
	old := c.attach(c.dial(), 1)
	c.lost = c.version + 1
	c.up(1)
	q := c.due(session.AskHangup)
	if q.QP != old || c.Has(1, q.Incarnation, q.Version) {
		t.Fatalf("asked %+v, and the session would wait for its peer", q)
	}
	c.hangUp(q)
	qp := c.attach(c.dial(), 1)
	c.up(1)
	c.rests(c.renewal)
	c.has(qp)
}

// A queue pair that the lane gives up is closed before another one is dialed, of which the
// lane hears in that order.
func TestAgendaHangsUp(t *testing.T) {
	c := newConns(t)
	old := c.attach(c.dial(), 1)
	c.up(2)
	c.wants(2)
	q := c.due(session.AskHangup)
	if q.QP != old || q.Lane != c.l || q.Node != 1 || q.Incarnation != 1 {
		t.Fatalf("asked %+v", q)
	}
	if !c.Has(1, 2, 9) || c.Has(1, 1, 9) || c.Has(2, 2, 9) {
		t.Fatal("node 1 is up in incarnation 2, and node 2 is not there")
	}
	c.rests(c.renewal)
	c.has(old)
	c.hangUp(q)
	qp := c.attach(c.dial(), 2) // before the lane was pumped
	c.has(qp)
	c.wants(2)
	c.rests(c.renewal)
}

// A memory node that is down is not dialed; the lane learns it after a while, and asks again.
func TestAgendaNodeDown(t *testing.T) {
	c := newConns(t)
	c.up(0)
	c.rests(c.now + 20*ms)
	c.now += 20*ms - 1
	c.rests(c.now + 1)
	c.l.Pump()
	c.wants(1)
	c.now++
	c.rests(c.renewal)
	c.l.Pump()
	c.wants(2)
	// It comes back before the lane would learn that it is down still.
	c.rests(c.now + 20*ms)
	c.up(2)
	q := c.dial()
	// It goes down while it is dialed, comes back and goes again: from then on counts.
	c.up(0)
	c.rests(c.renewal)
	c.Answer(q, session.Reply{Err: errLost})
	c.rests(c.now + 20*ms)
	c.up(3)
	c.rests(c.now + ms)
	c.up(0)
	c.now += 5 * ms
	c.rests(c.now + 20*ms)
	c.now += 20 * ms
	c.rests(c.renewal)
	c.l.Pump()
	c.wants(3)
	if c.done {
		t.Fatalf("the operation is over: %v", c.err)
	}
}

// A queue pair to a memory node that is down is closed at once.
func TestAgendaHangsUpDown(t *testing.T) {
	c := newConns(t)
	c.attach(c.dial(), 1)
	c.up(0)
	c.hangUp(c.due(session.AskHangup))
	c.rests(c.now + 20*ms)
	c.l.Pump()
	c.has(nil)
}

// A connection that cannot be had ends the operations that need it.
func TestAgendaConnLost(t *testing.T) {
	c := newConns(t)
	c.Answer(c.dial(), session.Reply{Err: errors.New("no provider"), Lost: true})
	c.rests(c.renewal)
	c.l.Pump()
	if !c.done || !errors.Is(c.err, engine.ErrNoConn) || !strings.Contains(c.err.Error(), "no provider") {
		t.Fatalf("done %v: %v", c.done, c.err)
	}
}

// A lane that misses a connection stirs its session.
func TestAgendaConnStirs(t *testing.T) {
	c := newConns(t)
	c.attach(c.dial(), 1)
	c.core.SetQuiet(true)
	c.up(2)
	if c.wants(2); c.core.Quiet() {
		t.Fatal("it is quiet still")
	}
}

// A map that was awaited and has come is forgotten: the next connection's pauses begin anew.
func TestAgendaAwaitedMap(t *testing.T) {
	for _, fails := range []int{0, 3} {
		c := newConns(t)
		c.attach(c.dial(), 1)
		for _, wait := range []int64{1, 2, 4} {
			c.refuse()
			c.now += wait * ms
			c.attach(c.dial(), 1)
		}
		c.refuse()
		c.up(1)
		for wait := ms; fails > 0; fails-- {
			c.Answer(c.dial(), session.Reply{Err: errLost})
			c.rests(c.now + wait)
			c.now += wait
			wait *= 2
		}
		c.attach(c.dial(), 1)
		c.refuse()
		c.rests(c.now + ms)
	}
}

// A memory node that has nothing of the namespace any more is not dialed, though it is up.
func TestAgendaNodeUnused(t *testing.T) {
	c := newConns(t)
	c.upWith(1, 2)
	c.rests(c.now + 20*ms)
	c.now += 20 * ms
	c.rests(c.renewal)
	c.l.Pump()
}

// A connection that was made since the memory node was lost to some placement group is good: its hang-up waits for the
// peer.
func TestAgendaHangsUpSince(t *testing.T) {
	c := newConns(t)
	c.lost = c.version + 1
	c.up(1)
	old := c.attach(c.dial(), 1)
	c.refused()
	q := c.due(session.AskHangup)
	if q.QP != old || q.Version != c.version || !c.Has(1, q.Incarnation, q.Version) {
		t.Fatalf("asked %+v, and the session would not wait for its peer", q)
	}
	c.hangUp(q)
}

// Of the two connections between a lane and a memory node, neither is dialed before what was lost of both is closed.
// The second one is dialed beside the first one alone.
func TestAgendaSecondConnection(t *testing.T) {
	for _, secondFirst := range []bool{false, true} {
		c := newConns(t)
		dial := func(bulk bool) *rdma.QP {
			t.Helper()
			q := c.dial()
			if q.Bulk != bulk {
				t.Fatalf("dials the second one: %v, want %v", q.Bulk, bulk)
			}
			return c.attach(q, 1)
		}
		c.WantConn(c.l, 1, true)
		first := dial(false)
		second := dial(true)
		c.rests(c.renewal)

		c.now += 10 * ms
		c.WantConn(c.l, 1, true)
		c.WantConn(c.l, 1, false)
		asks := c.DueWants()
		if len(asks) != 2 || asks[0].Kind != session.AskHangup || asks[1].Kind != session.AskHangup ||
			asks[0].QP != first || asks[1].QP != second {
			t.Fatalf("asks %v, want both to be closed", asks)
		}
		if secondFirst {
			asks[0], asks[1] = asks[1], asks[0]
		}
		c.hangUp(asks[0])
		if more := c.DueWants(); len(more) > 0 {
			t.Fatalf("one of the two is closed, and it asks %v", more)
		}
		c.hangUp(asks[1])
		dial(false)
		dial(true)
		c.hangUpBoth()
	}
}

// A memory node that refuses the second connection is asked for it ever more rarely, and the first one is not touched.
func TestAgendaSecondRefused(t *testing.T) {
	c := newConns(t)
	first := c.attach(c.dial(), 1)
	c.WantConn(c.l, 1, true)
	for _, wait := range []int64{1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 640, 640} {
		q := c.dial()
		if !q.Bulk {
			t.Fatal("the first connection is dialed")
		}
		c.Answer(q, session.Reply{Err: errLost})
		if at := c.Next(); at > c.now+wait*ms {
			t.Fatalf("next at %d, want %d at the latest", at, c.now+wait*ms)
		}
		c.now += wait*ms - 1
		if asks := c.DueWants(); len(asks) > 0 {
			t.Fatalf("due too early is %v", asks)
		}
		c.now++
	}
	c.has(first)
	c.attach(c.dial(), 1)
	c.hangUpBoth()
}

// hangUpBoth closes both connections.
func (c *conns) hangUpBoth() {
	for _, bulk := range []bool{true, false} {
		if qp, _, _ := c.l.Detach(1, bulk); qp != nil {
			_ = qp.Close()
			c.l.Closed(1, bulk)
		}
	}
}
