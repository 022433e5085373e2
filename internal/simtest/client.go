package simtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/janitor"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/session"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
	"github.com/kvd-project/kvd/server/lead"
)

// cl is one client or janitor: a session of the real code, and what package client, or
// package janitor, does around it.
type cl struct {
	w       *World
	i       int
	id      uint32
	janitor bool
	core    *session.Core
	lanes   []*session.Lane
	fibers  []*fiber // of the lanes, if the provider is synchronous
	dev     *rdma.Device
	script  []Step
	pos     int
	run     []*running // under way and not answered
	orphans []*running // answered and under way
	scan    *scanning
	rooms   []uint64 // groups of which one is to give up a slot, by their offset
	evicts  int      // begun for want of memory or slots
	vain    int      // of them since World.effects was vainAt
	vainAt  int
	seen    map[int]ref
	values  int

	conns    []*conn
	wantConn []want
	agenda   *session.Agenda
	wantMem  map[uint32]uint32 // units, by placement group
	grants   []grant           // on their way
	granted  map[uint32]uint32 // units, by placement group
	split    map[uint32]uint64 // shards to be split: the map version asked at, 0 if not asked

	job    *dirpb.Job
	plan   *janitor.Plan
	todo   []int // operations of plan not begun
	report *dirpb.JobReport
	tries  int

	drift  int64 // of its clock, from waiting
	woken  int   // World.effects at the last wake: waking earlier would find the same
	paused bool
	ranOut bool // its lease, with the present leader
	life   life

	sum                   uint64     // of everything it was told
	renew                 renewal    // the latest
	late                  []*renewal // whose sender has given up: on their way, or answered
	limbo                 uint64     // what was in it when a renewal was sent last
	dirAcked, dirQuiesced uint64     // what the present leader has of it
}

// running is one operation of a client.
type running struct {
	t     *session.Task
	lane  int
	start int    // World.step at which it counts as begun
	e     *Event // of scripts; nil for scans, evictions and janitors
	evict *evicting
	work  int // of janitors: which of the plan
	step  Step
	over  bool   // the Op is done
	err   error  // its error
	quick bool   // not started yet: it is tried without its task
	epoch uint64 // of a quick one: the reclaim epoch at its beginning
}

func (r *running) String() string {
	s := r.step.Verb.String()
	if r.e != nil {
		s = r.e.String()
	} else if r.work >= 0 {
		s = fmt.Sprintf("%v %d", r.t.Op.Kind, r.work)
	}
	return fmt.Sprintf("%s in %v", s, r.t.Op.Step())
}

type want struct{ lane, node uint32 }

type grant struct {
	ask   session.Ask
	reply *dirpb.GrantExtentReply
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
}

type scanning struct {
	call  int64
	next  cursor
	found map[int]bool
}

type cursor struct {
	prefix  uint64
	cluster uint32
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
	c := &cl{w: w, i: i, janitor: janitor, seen: map[int]ref{}, wantMem: map[uint32]uint32{},
		granted: map[uint32]uint32{}, split: map[uint32]uint64{}}
	epoch, _ := w.ld.Epochs()
	res := w.apply(&fsmpb.Command{Op: &fsmpb.Command_OpenSession{OpenSession: &fsmpb.OpenSession{NamespaceId: 1, Client: "c", Epoch: epoch}}})
	if res.Err != nil {
		return res.Err
	}
	c.id = res.Session.Id
	epoch, least, err := w.ld.Opened(w.st, c.id, time.Duration(w.now))
	if err != nil {
		return err
	}
	c.dev = rdma.NewDevice("sim", w.fab.Device(fmt.Sprintf("c%d", i)))
	c.core, err = session.NewCore(session.Options{Session: c.id, Discriminator: res.Session.Discriminator, Lanes: w.cfg.Lanes, CacheBytes: 1024,
		Devices: []*rdma.Device{c.dev}, Control: c, SlabTasks: 3, Hash: hashOfKey,
		Nanos: c.nanos, Millis: func() uint64 { return w.millis }})
	if err != nil {
		return err
	}
	c.lanes = c.core.Lanes()
	if w.cfg.Synchronous {
		for _, l := range c.lanes {
			c.fibers = append(c.fibers, w.newFiber(l))
		}
	}
	c.agenda = session.NewAgenda(c.core, session.AgendaOptions{Renew: lease / 4, Term: w.term})
	c.core.SetEpoch(epoch)
	c.core.EndRenew(c.core.BeginRenew(), epoch, least, w.now+lease)
	c.dirAcked, c.dirQuiesced = w.st.MapVersion(), w.st.MapVersion()
	c.core.InstallView(w.view())
	c.pump()
	for _, s := range w.fencedIDs() {
		c.core.SetFenced(s)
	}
	w.cls = append(w.cls, c)
	w.touch()
	return nil
}

func (c *cl) nanos() int64 { return c.w.now + c.drift }

// ---- session.Control -----------------------------------------------------------

func (c *cl) WantMemory(pg, units uint32) {
	c.wantMem[pg] = max(c.wantMem[pg], units)
	c.agenda.WantMemory(pg, units)
}
func (c *cl) WantMap(uint64)    {}
func (c *cl) WantFenced(uint32) {}

func (c *cl) WantRoom(_ uint32, home, stash uint64) { c.rooms = append(c.rooms[:0], home, stash) }

func (c *cl) WantSplit(shard uint32) {
	if _, ok := c.split[shard]; !ok {
		c.split[shard] = 0
	}
}

func (c *cl) WantConn(l *session.Lane, node uint32) {
	x := want{uint32(l.ID()), node}
	for _, y := range c.wantConn {
		if x == y {
			return
		}
	}
	c.wantConn = append(c.wantConn, x)
}

// pump moves every lane.
func (c *cl) pump() {
	for _, f := range c.fibers {
		f.run()
	}
	if c.fibers != nil {
		return
	}
	for _, l := range c.lanes {
		l.Pump()
	}
}

// wakeAll makes waiting operations look again.
func (c *cl) wakeAll() {
	for _, l := range c.lanes {
		l.Deliver(func(*session.Lane) {})
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

// ---- connections ---------------------------------------------------------------

// connOf is the open queue pair of a lane to a memory node, or nil.
func (c *cl) connOf(lane int, n *node) *conn {
	for _, q := range c.conns {
		if q.open && q.lane == lane && q.n == n {
			return q
		}
	}
	return nil
}

// canConnect reports whether there is something to do about a wanted connection.
func (c *cl) canConnect(x want) bool {
	n := c.w.nodes[x.node-1]
	if c.connOf(int(x.lane), n) != nil {
		return true
	}
	v := c.core.View().Nodes[n.id]
	return v.Up && n.dialable(c, v.Incarnation)
}

// connect replaces the queue pair of a lane to a memory node. What the old one still
// holds ends before another one works, because the memory node fences it; if the node is
// given up, it may still land there, in memory of no interest.
func (c *cl) connect(x want) {
	l, n := c.lanes[x.lane], c.w.nodes[x.node-1]
	v := c.core.View().Nodes[n.id]
	if old, inc := l.Detach(x.node); old != nil {
		q := c.connOf(int(x.lane), n)
		if v.Up && v.Incarnation == inc && !n.crashed {
			_ = c.w.fab.Fence(q.num)
			_ = old.Close()
		} else {
			_ = c.w.fab.Kill(q.num)
		}
		q.open = false
		l.Closed(x.node)
	}
	if !v.Up || !n.dialable(c, v.Incarnation) {
		return
	}
	qp, err := c.dev.Dial(context.Background(), c.core.PD(0), l.CQ(0), n.addr(), nil)
	if err != nil {
		c.w.fail(fmt.Errorf("dial: %w", err))
		return
	}
	for i, y := range c.wantConn {
		if x == y {
			c.wantConn = append(c.wantConn[:i], c.wantConn[i+1:]...)
			break
		}
	}
	q := &conn{c: c, lane: int(x.lane), n: n, qp: qp, num: qp.Num(), open: true}
	c.conns = append(c.conns, q)
	for len(c.w.owners) <= int(q.num) {
		c.w.owners = append(c.w.owners, nil)
	}
	c.w.owners[q.num] = q
	l.Attach(x.node, v.Incarnation, 0, qp)
}

// ---- memory ----------------------------------------------------------------------

// askMemory asks the directory for a run of each placement group that one is missed of.
func (c *cl) askMemory(pg uint32) {
	w := c.w
	delete(c.wantMem, pg)
	for _, ask := range c.agenda.DueGrants() {
		q := ask.Grant
		delete(c.wantMem, q.PgId)
		late := c.i >= len(w.cfg.Scripts) // whoever came to work, or at the end, is granted what it needs
		reply := &dirpb.GrantExtentReply{Term: w.term}
		if c.granted[q.PgId]+q.PlaceUnits <= w.cfg.Units || w.cfg.HeapUnits > 0 || late {
			q.WantUnits = max(q.PlaceUnits, w.cfg.Units-min(w.cfg.Units, c.granted[q.PgId]))
			if late || w.cfg.Stingy {
				q.WantUnits = q.PlaceUnits
			}
			_, least := w.ld.Epochs()
			res := w.apply(&fsmpb.Command{Op: &fsmpb.Command_GrantExtent{GrantExtent: &fsmpb.GrantExtent{
				SessionId: c.id, PgId: q.PgId, WantUnits: q.WantUnits, PlaceUnits: q.PlaceUnits, MinEpoch: least}}})
			if res.Err != nil {
				c.agenda.Answer(ask, session.Reply{Err: res.Err}) // asked again by and by
				continue
			}
			reply = res.Grant
			reply.Term = w.term
			if len(reply.Runs) == 0 && w.cfg.Waits {
				reply.ComingUnits = w.ld.Coming(w.st, 1, q.PgId, q.PlaceUnits, time.Duration(w.now))
			}
		}
		for _, r := range reply.Runs {
			c.w.note("      => is granted %v", r)
			c.granted[q.PgId] += r.Units
		}
		if len(reply.Runs) == 0 {
			w.ld.Short(w.st, q.PgId, q.PlaceUnits, time.Duration(w.now))
			w.touch()
		}
		c.grants = append(c.grants, grant{ask, reply})
		if !w.cfg.changes() {
			c.takeGrant() // nobody can tell when it arrives
		}
	}
}

// takeGrant is the directory's reply.
func (c *cl) takeGrant() {
	g := c.grants[0]
	c.grants = c.grants[1:]
	c.agenda.Answer(g.ask, session.Reply{Grant: g.reply})
	if len(g.reply.Runs) > 0 {
		c.wakeAll()
	}
}

// askSplit asks the directory to split a shard.
func (c *cl) askSplit(shard uint32) {
	w := c.w
	c.split[shard] = w.st.MapVersion()
	sh := w.st.Shard(shard)
	if sh == nil {
		return
	}
	q, growing, _ := w.ld.Grow(w.st, sh, time.Duration(w.now))
	if q != nil {
		w.apply(&fsmpb.Command{Op: &fsmpb.Command_StartJob{StartJob: q}})
	} else if !growing {
		c.core.SetNoGrowth(shard)
	}
	c.wakeAll()
}

// ---- lease, epoch, acknowledgements ------------------------------------------------

// reported is what the directory has of the client.
func (c *cl) reported() uint64 {
	e, ok := c.w.ld.Report(c.id)
	if !ok {
		return 0
	}
	return e
}

// oldest is the least reclaim epoch at the start of an operation under way.
func (c *cl) oldest() (epoch uint64, ok bool) {
	for _, l := range c.lanes {
		if o, some := l.Oldest(); some && (!ok || o < epoch) {
			epoch, ok = o, true
		}
	}
	for _, r := range c.run {
		if r.quick && (!ok || r.epoch < epoch) {
			epoch, ok = r.epoch, true
		}
	}
	return epoch, ok
}

// reportNow is what the client's next renewal says.
func (c *cl) reportNow() uint64 {
	e := c.core.Epoch()
	if o, ok := c.oldest(); ok && o < e {
		e = o
	}
	return e
}

// newsToTell reports whether a renewal could tell or bring something new.
func (c *cl) newsToTell() bool {
	e, least := c.w.epoch, c.w.least
	if c.w.cfg.Epochs > 0 && (c.inLimbo() != c.limbo || c.core.Epoch() < e || c.reportNow() > c.reported() || least > c.core.MinEpoch()) {
		return true
	}
	acked, quiesced := c.core.Acked()
	return acked > c.dirAcked || quiesced > c.dirQuiesced || !c.core.LeaseValid()
}

// inLimbo is what waits for a renewal that is yet to be sent.
func (c *cl) inLimbo() (n uint64) {
	for _, l := range c.lanes {
		n += l.LimboUnits()
	}
	return n
}

func (c *cl) sendRenewal() {
	c.agenda.Hurry()
	ask, ok := c.agenda.DueRenewal(c.oldest)
	if !ok {
		c.w.fail(errors.New("no renewal is due, but one was hurried"))
		return
	}
	c.renew = renewal{stage: 1, ask: ask, sent: c.w.now}
	c.limbo = c.inLimbo()
	c.tellAsk(ask)
}

// tellAsk folds what a renewal hands back into the client's sum.
func (c *cl) tellAsk(ask session.Ask) {
	for _, f := range ask.Renew.HandBacks {
		c.w.note("      => hands back %v", f)
		c.tell(uint64(f.PgId)<<32|uint64(f.Unit), uint64(len(f.Places)))
	}
	for _, r := range ask.Renew.Returns {
		c.w.note("      => returns %v", r)
		c.tell(uint64(r.PgId)<<32|uint64(r.Unit), uint64(r.Units))
	}
}

// serve has the directory serve a renewal that it has got.
func (c *cl) serve(r *renewal) {
	w, q := c.w, r.ask.Renew
	a, err := w.ld.Renew(w.st, time.Duration(w.now), lead.Renewal{Session: c.id, Report: q.ReportEpoch, Acked: q.AckedMapVersion,
		Quiesced: q.QuiescedMapVersion, Number: q.Number, Term: q.Term, HandBacks: q.HandBacks, Returns: q.Returns, Held: q.Held})
	if r.lost = err != nil; err == nil {
		r.reply = &dirpb.RenewReply{Epoch: a.Epoch, MinEpoch: a.Least, MapVersion: w.st.MapVersion(), Term: w.term,
			Deliveries: a.Deliveries, Supply: a.Supply, LeaseMillis: uint64(lease / int64(time.Millisecond))}
		c.ranOut = false
		c.dirAcked, c.dirQuiesced, _ = w.ld.Acknowledged(c.id)
		if a.Moved || a.Returned || w.recalls {
			w.touch()
		}
	}
	r.stage = 2
	r.served++
}

func (c *cl) serveRenewal() { c.serve(&c.renew) }

func (c *cl) takeRenewal() {
	r := c.renew
	c.renew = renewal{}
	if r.lost {
		c.sessionLost()
		return
	}
	c.answered(&r)
}

func (c *cl) answered(r *renewal) {
	c.agenda.Answer(r.ask, session.Reply{Renew: r.reply, Sent: r.sent})
	c.tell(r.reply.Epoch, r.reply.MinEpoch)
	for _, f := range r.reply.Deliveries {
		c.w.note("      => gets home %v", f)
		c.tell(uint64(f.PgId)<<32|uint64(f.Unit), uint64(len(f.Places)))
	}
	for i, l := range c.lanes {
		if l.Active() == 0 && !c.within(i) {
			l.GiveBack(false)
		}
	}
	c.wakeAll()
}

// loseRenewal has the client give up waiting for a reply: what it sent is still on its way,
// or the reply is. It may reach the directory, twice even, and the client, which has sent
// another one by then, or never.
func (c *cl) loseRenewal() {
	r := c.renew
	c.renew = renewal{}
	c.late = append(c.late, &r)
	c.agenda.Answer(r.ask, session.Reply{Err: errors.New("timed out")})
}

// sessionLost ends what is under way, as the blocking client does. Its queue pairs are
// closed without waiting for anybody.
func (c *cl) sessionLost() {
	if c.within(-1) {
		c.hangUp()
		c.pump() // what they have posted is over
	}
	for len(c.run) > 0 {
		c.abandon(c.run[0], session.ErrLease)
	}
	c.quit()
	c.life = ended
}

// quit leaves all queue pairs to themselves.
func (c *cl) quit() {
	c.hangUp()
	c.stopFibers()
	c.grants, c.job, c.todo = nil, nil, nil
	c.renew = renewal{}
}

func (c *cl) hangUp() {
	for _, q := range c.conns {
		if q.open {
			_ = c.w.fab.Kill(q.num)
			q.open = false
		}
	}
}

// crash ends the client without a word; what it has posted may still land.
func (c *cl) crash() {
	c.life = crashed
	c.w.touch()
	c.quit()
	for _, r := range c.run {
		if r.e != nil {
			e := *r.e
			e.Out, e.Return = Unknown, c.w.tick()
			c.w.record(&e)
		}
		if r.evict != nil {
			c.evictedMaybe(r, nil)
		}
	}
}

// close ends the session in good order.
func (c *cl) close() {
	w := c.w
	for _, q := range c.conns {
		if q.open {
			_ = w.fab.Fence(q.num)
			_ = q.qp.Close()
			q.open = false
		}
	}
	for _, l := range c.lanes {
		l.GiveBack(true)
	}
	q := c.agenda.Close()
	epoch, _ := w.ld.Epochs()
	if res := w.apply(&fsmpb.Command{Op: &fsmpb.Command_CloseSession{CloseSession: &fsmpb.CloseSession{
		SessionId: c.id, Runs: q.Runs, Epoch: epoch, Leaked: q.Leaked}}}); res.Err != nil {
		w.fail(fmt.Errorf("I7: session %d cannot give its memory back: %w", c.id, res.Err))
	}
	w.ld.Closed(w.st, time.Duration(w.now), c.id, q.HandBacks, q.Held)
	c.life = ended
}

// ---- operations ------------------------------------------------------------------

func (c *cl) laneFor(key int) int { return key % len(c.lanes) }

// canBegin reports whether the next script step may begin.
func (c *cl) canBegin() bool {
	if c.scan != nil {
		return len(c.run) == 0
	}
	if c.pos >= len(c.script) {
		return false
	}
	s := c.script[c.pos]
	if s.Verb == Close || s.Verb == Scan {
		return len(c.run)+len(c.orphans) == 0
	}
	lane := c.laneFor(s.Key)
	if s.Verb == Evict || s.Verb == Expire {
		lane = c.evictLane(s.Key)
	}
	if c.within(lane) {
		return false
	}
	n := 0
	for _, r := range c.run {
		if r.lane == c.laneFor(s.Key) {
			n++
		}
	}
	return n < c.w.cfg.Window
}

// begin starts the client's next script step.
func (c *cl) begin() {
	switch r := c.next(); {
	case r == nil:
	case c.w.cfg.Synchronous && mayBeQuick(&r.t.Op):
		c.beginQuickly(r)
	default:
		c.start(r)
	}
}

// beginTwo starts two steps at once; see canBeginTwo.
func (c *cl) beginTwo() {
	a := c.next()
	b := c.next()
	c.beginQuickly(a, b)
}

// next takes the client's next script step: nil if it is under way or needs nothing more.
func (c *cl) next() *running {
	w := c.w
	if c.scan != nil {
		c.scanPage()
		return nil
	}
	s := c.script[c.pos]
	c.pos++
	switch s.Verb {
	case Close:
		c.close()
		return nil
	case Scan:
		c.scan = &scanning{call: w.tick(), found: map[int]bool{}}
		c.scanPage()
		return nil
	case Evict, Expire:
		c.beginEvict(s)
		return nil
	}
	e := &Event{Client: c.i, Verb: s.Verb, Key: s.Key, Call: w.tick()}
	r := c.newRun(c.laneFor(s.Key))
	if r == nil {
		return nil
	}
	r.e, r.step = e, s
	o := &r.t.Op
	o.Key = keyOf(s.Key)
	o.Hash, o.Check = hashOf(s.Key)
	c.values++
	e.Value = fmt.Sprintf("%d.%d", c.i, c.values)
	switch s.Verb {
	case Get:
		o.Kind = index.Get
	case GetIf:
		o.Kind = index.Get
		if ref, ok := c.seen[s.Key]; ok {
			e.Old = ref.value
			o.IfVersion, o.Cond = ref.version, index.IfVersion
		}
	case Put:
		o.Kind, o.Value = index.Put, []byte(e.Value)
	case PutEx:
		o.Kind, o.Value, o.Expiry = index.Put, []byte(e.Value), w.millis+ttlMillis
		w.expiring = append(w.expiring, &expiring{e, o.Expiry})
	case Add:
		o.Kind, o.Cond, o.Value = index.Put, index.IfAbsent, []byte(e.Value)
	case Del:
		o.Kind = index.Delete
	case CAS, DelIf:
		ref, ok := c.seen[s.Key]
		if !ok {
			r.t.Op.Reset()
			c.lanes[r.lane].Recycle(r.t)
			return nil
		}
		e.Old = ref.value
		o.IfVersion, o.Cond = ref.version, index.IfVersion
		o.Kind, o.Value = index.Put, []byte(e.Value)
		if s.Verb == DelIf {
			o.Kind, o.Value = index.Delete, nil
		}
	case Incr:
		o.Kind = index.Modify
		o.Modify = func(cur *layout.Record) ([]byte, uint64, error) {
			old := ""
			if cur != nil {
				old = string(cur.Value)
			}
			e.Value = old + "+"
			return []byte(e.Value), 0, nil
		}
	}
	return r
}

func (c *cl) newRun(lane int) *running {
	t, err := c.lanes[lane].NewTask()
	if err != nil {
		c.w.fail(err)
		return nil
	}
	return &running{t: t, lane: lane, work: -1}
}

func (c *cl) start(r *running) {
	c.enter(r)
	c.lanes[r.lane].Start(r.t)
}

// enter counts an operation among those under way.
func (c *cl) enter(r *running) {
	r.start = c.w.step
	c.run = append(c.run, r)
	r.t.Done = func(*session.Task) { c.done(r) }
}

func remove(list *[]*running, r *running) bool {
	for i, x := range *list {
		if x == r {
			*list = append((*list)[:i:i], (*list)[i+1:]...)
			return true
		}
	}
	return false
}

// done takes an operation's answer.
func (c *cl) done(r *running) {
	answered := !remove(&c.run, r)
	remove(&c.orphans, r)
	r.over, r.err = true, r.t.Op.Err
	if !answered {
		switch {
		case r.work >= 0:
			c.worked(r)
		case r.evict != nil:
			c.evicted(r)
		case r.e == nil:
			c.scanned(r)
		default:
			c.answer(r)
		}
	}
	c.lanes[r.lane].Recycle(r.t)
}

// answer records the outcome of a script's operation.
func (c *cl) answer(r *running) {
	w, e, op := c.w, r.e, &r.t.Op
	err := op.Err
	switch {
	case err == nil:
		e.Out = OK
		if e.Verb.reads() {
			e.Got = string(op.Record.Value)
			if !bytes.Equal(op.Record.Key, keyOf(e.Key)) {
				w.fail(fmt.Errorf("I14: get of %s answered a record of %q", keyOf(e.Key), op.Record.Key))
			}
		}
		switch e.Verb {
		case Get, GetIf:
			c.seen[e.Key] = ref{op.Version, e.Got}
		case Put, PutEx, Add, CAS, Incr:
			c.seen[e.Key] = ref{op.Version, e.Value}
			w.version(e.Key, op.Version, e.Value)
		}
	case errors.Is(err, index.ErrUnchanged) && e.Verb == GetIf:
		e.Out, e.Got = OK, e.Old
	case errors.Is(err, index.ErrUnknown):
		e.Out = Unknown
	case errors.Is(err, index.ErrNotFound):
		e.Out = NotFound
	case errors.Is(err, index.ErrExists):
		e.Out = Exists
	case errors.Is(err, index.ErrConflict):
		e.Out = Conflict
	case errors.Is(err, index.ErrFull), errors.Is(err, session.ErrTimeout), errors.Is(err, session.ErrNoConn), errors.Is(err, session.ErrLease):
		e.Out = NotDone
	default:
		w.fail(fmt.Errorf("%v: %w", e, err))
	}
	e.Return = w.tick()
	w.record(e)
	c.tell(uint64(e.Out), xxh3.HashString(e.Got))
}

// abandon answers an operation whose caller goes, as the blocking client does; its
// verbs stay in flight.
func (c *cl) abandon(r *running, err error) {
	posted := r.t.Op.Posted()
	remove(&c.run, r)
	c.orphans = append(c.orphans, r)
	c.lanes[r.lane].Orphan(r.t, err)
	switch {
	case r.work >= 0:
		c.todo = append(c.todo, r.work)
		return
	case r.evict != nil:
		c.evictedMaybe(r, nil)
		return
	case r.e == nil:
		return // the page is read again
	}
	r.e.Out = NotDone
	if r.over && errors.Is(r.err, index.ErrUnknown) || !r.over && posted {
		r.e.Out = Unknown
	}
	r.e.Return = c.w.tick()
	c.w.record(r.e)
}

// ---- scans -----------------------------------------------------------------------

func (c *cl) scanPage() {
	r := c.newRun(0)
	if r == nil {
		return
	}
	r.step = Step{Scan, 0}
	o, at := &r.t.Op, c.scan.next
	o.Kind, o.Hash = index.Scan, at.prefix
	o.Scan = &index.Page{Cluster: at.cluster, Shard: at.shard, From: at.slot, Bytes: 128}
	c.start(r)
}

func (c *cl) scanned(r *running) {
	s, op := c.scan, &r.t.Op
	switch {
	case s == nil:
		return
	case errors.Is(op.Err, session.ErrTimeout), errors.Is(op.Err, session.ErrNoConn), errors.Is(op.Err, index.ErrFull):
		return // the page is read again
	case errors.Is(op.Err, session.ErrLease):
		c.scan = nil
		return
	case op.Err != nil:
		c.w.fail(fmt.Errorf("scan: %w", op.Err))
		return
	}
	for i := range op.Scan.Found {
		if k := op.Scan.Found[i].Key; k[0] == 'k' {
			n := 0
			for _, d := range k[3:] {
				n = n*10 + int(d-'0')
			}
			s.found[n] = true
			c.tell(uint64(n))
		}
	}
	switch {
	case op.Scan.Next != 0:
		s.next.shard, s.next.slot = op.Scan.Shard, op.Scan.Next
	case op.Scan.End:
		s.next = cursor{prefix: nextShard(c.core.View(), s.next.prefix)}
		s.next.done = s.next.prefix == 0
	default:
		s.next.cluster, s.next.shard, s.next.slot = s.next.cluster+1, 0, 0
	}
	if s.next.done {
		c.w.scans = append(c.w.scans, scanned{c.i, s.call, c.w.tick(), s.found})
		c.scan = nil
	}
}

// nextShard is the left-aligned prefix behind the shard that covers prefix; 0
// behind the last.
func nextShard(v *session.View, prefix uint64) uint64 {
	sh := v.ShardOf(prefix)
	if sh == nil || sh.Depth == 0 {
		return 0
	}
	return uint64(sh.Prefix+1) << (64 - sh.Depth)
}

// ---- janitors --------------------------------------------------------------------

// canClaim is the job that a janitor would get.
func (c *cl) canClaim() *dirpb.Job {
	if !c.janitor || c.job != nil || len(c.run)+len(c.orphans) > 0 {
		return nil
	}
	if c.i >= len(c.w.claims) {
		return nil
	}
	j := c.w.claims[c.i]
	if j == nil || c.core.View().Version < j.Barrier {
		return nil
	}
	return j
}

func (c *cl) claim() {
	j := c.canClaim()
	if res := c.w.apply(&fsmpb.Command{Op: &fsmpb.Command_ClaimJob{ClaimJob: &fsmpb.ClaimJob{SessionId: c.id, JobId: j.Id}}}); res.Err != nil {
		c.w.fail(fmt.Errorf("claim: %w", res.Err))
		return
	}
	p, err := janitor.NewPlan(c.core.View(), j)
	if err != nil {
		c.giveBack(j, err.Error())
		return
	}
	c.job, c.plan, c.report, c.todo, c.tries = j, p, janitor.Begin(j), c.todo[:0], 0
	for i := p.Len - 1; i >= 0; i-- {
		if p.At(i).Count || c.w.isRelevant(p.Kind, p.At(i)) {
			c.todo = append(c.todo, i)
		}
	}
}

// isRelevant reports whether anybody could tell that a piece of a job was done: a key of
// the scope may be in its group.
func (w *World) isRelevant(k index.Kind, x index.Work) bool {
	switch k {
	case index.Move, index.Abandon:
		return w.relevant[[2]int{int(x.Group) / layout.ClusterGroups, int(x.Group) % layout.ClusterGroups}]
	case index.Clean, index.Relocate:
		off := int(x.Off) - layout.RegionPageSize
		g := off / layout.GroupSize
		return w.relevant[[2]int{g / (layout.ClusterGroups + 1) % w.cfg.Clusters, g % (layout.ClusterGroups + 1)}]
	}
	return true
}

// gone reports whether the janitor's job is not its any more.
func (c *cl) gone() bool {
	if c.job == nil {
		return false
	}
	j := c.w.st.Job(c.job.Id)
	return j == nil || j.Owner != c.id || c.stuck()
}

// stuck reports whether the job waits for a frozen placement group that nobody brings
// back. A janitor (internal/janitor) works on several jobs at once; this one gives up one
// for the other.
func (c *cl) stuck() bool {
	for _, r := range c.run {
		if r.t.Waiting() != index.Refresh {
			return false
		}
	}
	if len(c.run) == 0 {
		return false
	}
	j := c.w.ld.Claimable(c.w.st, c.id, time.Duration(c.w.now), c.job.Id)
	return j != nil && (j.Kind == dirpb.JobKind_JOB_RECOVER || j.Kind == dirpb.JobKind_JOB_JOIN)
}

// canWork reports whether the lane of the job's next operation is free.
func (c *cl) canWork() bool {
	if n := len(c.todo); n > 0 {
		return !c.within(c.todo[n-1] % len(c.lanes))
	}
	return true
}

// work begins the next operation of the job, or ends it.
func (c *cl) work() {
	if n := len(c.todo); n > 0 {
		i := c.todo[n-1]
		c.todo = c.todo[:n-1]
		r := c.newRun(i % len(c.lanes))
		if r == nil {
			return
		}
		r.work = i
		x := c.plan.At(i)
		r.t.Op.Kind, r.t.Op.Work = c.plan.Kind, &x
		c.start(r)
		return
	}
	w := c.w
	epoch, least := w.ld.Epochs()
	j := c.job
	c.job = nil
	janitor.Finish(c.report)
	w.ld.Progress(j.Id, 1, 1, "", time.Duration(w.now))
	if j.Kind == dirpb.JobKind_JOB_RECALL {
		w.scannedExtent(j)
	}
	res := w.apply(&fsmpb.Command{Op: &fsmpb.Command_EndJob{EndJob: &fsmpb.EndJob{SessionId: c.id, JobId: j.Id, Report: c.report, Epoch: epoch, MinEpoch: least}}})
	if res.Err == nil {
		w.ld.Scrubbed(w.st, j, time.Duration(w.now))
	}
}

func (c *cl) worked(r *running) {
	if c.job == nil {
		return
	}
	op := &r.t.Op
	c.w.note("      => %v %+v: %v", op.Kind, *op.Work, op.Err)
	switch {
	case op.Err == nil:
		janitor.Add(c.report, op.Work)
	case errors.Is(op.Err, session.ErrLease):
		// The claim went with the session; a renewal tells.
		c.todo = append(c.todo, r.work)
	default:
		c.todo = append(c.todo, r.work)
		if c.tries++; c.tries > 20 {
			c.giveBack(c.job, op.Err.Error())
			c.job, c.todo = nil, nil
		}
	}
}

func (c *cl) giveBack(j *dirpb.Job, why string) {
	w := c.w
	w.note("      => %v is given back: %s", j, why)
	w.ld.Progress(j.Id, 0, 1, why, time.Duration(w.now))
	w.apply(&fsmpb.Command{Op: &fsmpb.Command_EndJob{EndJob: &fsmpb.EndJob{SessionId: c.id, JobId: j.Id, GiveBack: true}}})
}

// dropJob gives up what is not the janitor's any more.
func (c *cl) dropJob() {
	if j := c.w.st.Job(c.job.Id); j != nil && j.Owner == c.id {
		c.w.apply(&fsmpb.Command{Op: &fsmpb.Command_EndJob{EndJob: &fsmpb.EndJob{SessionId: c.id, JobId: j.Id, GiveBack: true}}})
	}
	c.job = nil
	for len(c.run) > 0 {
		c.abandon(c.run[0], session.ErrTimeout)
	}
	c.todo = nil
}

// ---- sums ------------------------------------------------------------------------

// tell folds something the client learnt into its sum.
func (c *cl) tell(v ...uint64) {
	for _, x := range v {
		c.sum = (c.sum ^ x) * 0x9e3779b97f4a7c15
		c.sum ^= c.sum >> 29
	}
}
