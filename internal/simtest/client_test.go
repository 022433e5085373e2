package simtest

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/internal/janitor"
	"github.com/kvd-project/kvd/internal/session"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// cl is one client or janitor: a session of the real code, and what package client, or
// package janitor, does around it.
type cl struct {
	w       *World
	i       int
	id      uint32
	janitor bool
	core    *engine.Core
	lanes   []*engine.Lane
	fibers  []*fiber // of the lanes, if the provider is synchronous
	dev     *rdma.Device
	script  []Step
	pos     int
	run     []*running // under way and not answered
	orphans []*running // answered and under way
	scan    *scanning
	stream  *streaming
	collect *collecting
	disk    []diskAsk // in the order in which it is answered
	rooms   []uint64  // groups of which one is to give up a slot, by their offset
	evicts  int       // begun for want of memory or slots
	vain    int       // of them since World.effects was vainAt
	vainAt  int
	seen    map[int]ref
	known   map[int]*index.Long // manifests that Gets of parts have met
	values  int
	status  []*statusWord
	txns    []*transaction

	conns   []*conn
	agenda  *session.Agenda
	asks    []*asked          // that it has given and that are not answered
	granted map[uint32]uint32 // units, by placement group
	// by shard, the map version under which a split was served last: until the next the answer is the same
	growth map[uint32]uint64

	job    *dirpb.Job
	plan   *janitor.Plan
	todo   []int // operations of plan not begun
	report *dirpb.JobReport
	tries  int
	passed int // World.step at which the operations were done that the others are to outlast; 0: not yet

	drift  int64 // of its clock, from waiting
	woken  int   // World.effects at the last wake: waking earlier would find the same
	paused bool
	ranOut bool // its lease, with the present leader
	life   life

	sum                   uint64     // of everything it was told
	renew                 renewal    // the latest
	watched               []*watched // Views that are not released
	late                  []*renewal // whose sender has given up: on their way, or answered
	limbo                 uint64     // what was in it when a renewal was sent last
	dirAcked, dirQuiesced uint64     // what the present leader has of it
}

// running is one operation of a client.
type running struct {
	t     *engine.Task
	lane  int
	start int    // World.step at which it counts as begun
	e     *Event // of scripts; nil for scans, evictions and janitors
	evict *evicting
	txn   *transaction
	part  int         // of txn's, -1: the decision
	piece index.Part  // that a Get asks for
	grant *statusWord // that is read since it was granted
	look  *looking
	lent  *lent // of a GET whose value goes there
	// of a Watch
	watched *watched
	tiered  bool
	work    int // of janitors: which of the plan
	step    Step
	over    bool   // the Op is done
	err     error  // its error
	quick   bool   // not started yet: it is tried without its task
	epoch   uint64 // of a quick one: the reclaim epoch at its beginning
}

func (r *running) String() string {
	s := r.step.Verb.String()
	if r.e != nil {
		s = r.e.String()
	} else if r.txn != nil {
		s = fmt.Sprintf("%v %s", r.t.Op.Kind, r.t.Op.Key)
	} else if r.work >= 0 {
		s = fmt.Sprintf("%v %d", r.t.Op.Kind, r.work)
	}
	return fmt.Sprintf("%s in %v", s, r.t.Op.Step())
}

// asked is something that the agenda has given to be asked, but no renewal, and what the
// directory has granted, if it was asked for memory and the reply is on its way.
type asked struct {
	session.Ask
	granted *dirpb.GrantExtentReply
}

// renewal is a message to the directory and what became of it: sent (1), answered (2), or
// nothing (0).
type renewal struct {
	stage  int
	served int // times
	ask    session.Ask
	sent   int64
	reply  *dirpb.RenewReply
	lost   bool // the directory says that the session is
}

// conn is one queue pair that a client ever had.
type conn struct {
	c    *cl
	lane int
	n    *node
	qp   *rdma.QP
	num  uint32
	open bool
	bulk bool // the second one of its lane and memory node
}

type scanning struct {
	call  int64
	next  cursor
	found map[int]bool
}

type cursor struct {
	prefix  uint64
	segment uint32
	shard   uint32
	slot    uint16
	done    bool
}

type ref struct {
	version uint64
	value   string
}

type life uint8

const (
	live life = iota
	crashed
	ended // closed, or learnt that its session is lost
)

// able reports whether the client does anything.
func (c *cl) able() bool { return c.life == live && !c.paused }

func (c *cl) underWay() string {
	s := ""
	for _, r := range c.run {
		s += fmt.Sprintf("%v waits for %v; ", r, r.t.Waiting())
	}
	for _, r := range c.orphans {
		s += fmt.Sprintf("answered %v; ", r)
	}
	if c.job != nil {
		s += fmt.Sprintf("job %v", c.job)
	}
	return s
}

func (w *World) addClient(janitor bool) error {
	i := len(w.cls)
	c := &cl{w: w, i: i, janitor: janitor, seen: map[int]ref{}, known: map[int]*index.Long{},
		granted: map[uint32]uint32{}, growth: map[uint32]uint64{}}
	epoch, _ := w.ld.Epochs()
	res := w.apply(&fsmpb.Command{
		Op: &fsmpb.Command_OpenSession{OpenSession: &fsmpb.OpenSession{NamespaceId: 1, Client: "c", Epoch: epoch}}})
	if res.Err != nil {
		return res.Err
	}
	c.id = res.Session.Id
	epoch, least, err := w.ld.Opened(w.st, c.id, time.Duration(w.now))
	if err != nil {
		return err
	}
	c.dev = rdma.NewDevice("sim", w.fab.Device(fmt.Sprintf("c%d", i)))
	c.core, err = engine.NewCore(engine.Options{Session: c.id, Discriminator: res.Session.Discriminator,
		Lanes: w.cfg.Lanes, CacheBytes: 1024, MirrorBytes: w.cfg.Mirror,
		Devices: []*rdma.Device{c.dev}, Control: c, SlabTasks: 3, Hash: hashOfKey, BulkFrom: w.cfg.BulkFrom,
		Objects: c.objects(), Nanos: c.nanos, Millis: func() uint64 { return w.millis }})
	if err != nil {
		return err
	}
	c.lanes = c.core.Lanes()
	if w.cfg.Synchronous {
		for _, l := range c.lanes {
			c.fibers = append(c.fibers, w.newFiber(l))
		}
	}
	c.agenda = session.NewAgenda(c.core, session.AgendaOptions{Renew: lease / 4, Term: w.term, DownPause: never})
	c.core.SetEpoch(epoch)
	c.core.EndRenew(c.core.BeginRenew(), epoch, least, w.now+lease)
	c.dirAcked, c.dirQuiesced = w.st.MapVersion(), w.st.MapVersion()
	c.core.InstallView(w.view())
	c.pump()
	for _, s := range w.fencedIDs() {
		c.core.SetFenced(s)
	}
	if c.i < len(w.cfg.Scripts)-w.cfg.Heirs {
		w.handStatus(c)
	}
	w.cls = append(w.cls, c)
	w.touch()
	return nil
}

func (c *cl) nanos() int64 { return c.w.now + c.drift }

func (c *cl) WantMemory(pg, units uint32) { c.agenda.WantMemory(pg, units) }

func (c *cl) WantMap(uint64) {}

func (c *cl) WantFenced(id uint32) { c.agenda.WantFenced(id) }

func (c *cl) WantRoom(_ uint32, home, stash uint64) { c.rooms = append(c.rooms[:0], home, stash) }

func (c *cl) WantSplit(shard uint32) { c.agenda.WantSplit(shard) }

func (c *cl) WantConn(l *engine.Lane, node uint32, bulk bool) { c.agenda.WantConn(l, node, bulk) }

// pump moves every lane, and takes what is to be asked then.
func (c *cl) pump() {
	for again := true; again; {
		again = false
		for _, f := range c.fibers {
			f.run()
		}
		for _, f := range c.fibers {
			again = again || len(f.mail) > 0 && !f.within
		}
	}
	if c.fibers == nil {
		for _, l := range c.lanes {
			l.Pump()
		}
	}
	c.control()
}

// wakeAll makes waiting operations look again.
func (c *cl) wakeAll() {
	for _, l := range c.lanes {
		l.Deliver(func(*engine.Lane) {})
	}
}

func (c *cl) nextWake() (at int64) {
	for _, l := range c.lanes {
		if t := l.NextWake(); t != 0 && (at == 0 || t < at) {
			at = t
		}
	}
	return at
}

// connOf is what the simulation knows of a queue pair that is open.
func (c *cl) connOf(qp *rdma.QP) *conn {
	return c.conns[slices.IndexFunc(c.conns, func(q *conn) bool { return q.open && q.qp == qp })]
}

// canConnect reports whether a hang-up or a dial may happen now. A dial to a memory node that is
// down goes on until it is up again.
func (c *cl) canConnect(ask *asked) bool {
	switch ask.Kind {
	case session.AskHangup:
		return true
	case session.AskDial:
		v := c.core.View().Nodes[ask.Node]
		return v.Up && c.w.nodes[ask.Node-1].dialable(c, v.Incarnation)
	}
	return false
}

// connect replaces the queue pair of a lane to a memory node. Work that the old one still holds ends before
// another one works, because the memory node fences it; if the node is given up, it may still land there,
// in memory of no interest.
func (c *cl) connect(lane int, node uint32, bulk bool) {
	for {
		ask := c.asked(func(x *asked) bool {
			return x.Lane != nil && x.Lane.ID() == lane && x.Node == node && x.Bulk == bulk
		})
		switch {
		case ask == nil || !c.canConnect(ask):
			return
		case ask.Kind == session.AskHangup:
			c.hangUpFor(ask)
		default:
			c.dial(ask)
		}
		c.control()
	}
}

func (c *cl) hangUpFor(ask *asked) {
	n := c.w.nodes[ask.Node-1]
	q := c.connOf(ask.QP)
	if c.agenda.Has(ask.Node, ask.Incarnation, ask.Version) && !n.crashed && !n.down {
		_ = c.w.fab.Fence(q.num)
		_ = ask.QP.Close()
	} else {
		_ = c.w.fab.Kill(q.num)
	}
	q.open = false
	c.answerAsk(ask, session.Reply{})
}

func (c *cl) dial(ask *asked) {
	l, n := ask.Lane, c.w.nodes[ask.Node-1]
	qp, err := c.dev.Dial(context.Background(), c.core.PD(0), l.CQ(0), n.addr(), nil)
	if err != nil {
		c.w.fail(fmt.Errorf("dial: %w", err))
		return
	}
	q := &conn{c: c, lane: l.ID(), n: n, qp: qp, num: qp.Num(), open: true, bulk: ask.Bulk}
	c.conns = append(c.conns, q)
	for len(c.w.owners) <= int(q.num) {
		c.w.owners = append(c.w.owners, nil)
	}
	c.w.owners[q.num] = q
	c.answerAsk(ask, session.Reply{QP: qp, Endpoint: "sim", Incarnation: c.core.View().Nodes[n.id].Incarnation})
}

// tell folds something the client learnt into its sum.
func (c *cl) tell(v ...uint64) {
	for _, x := range v {
		c.sum = (c.sum ^ x) * 0x9e3779b97f4a7c15
		c.sum ^= c.sum >> 29
	}
}
