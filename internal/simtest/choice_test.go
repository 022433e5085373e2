package simtest

import (
	"fmt"
	"time"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/session"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/driver"
	"github.com/kvd-project/kvd/rdma/sim"
)

type choiceKind uint8

const (
	chFire choiceKind = 1 + iota
	chWake
	chConnect
	chGrant
	chGranted
	chAskSplit
	chClaim
	chWork
	chGone
	chEvict
	chBegin
	chBeginTwo
	chRelease
	chDisk
	chLearn
	chRenewSend
	chRenewServe
	chRenewReply
	chDirectory
	chTakeBack
	chApplyBack
	chChore
	chAdvance
	chAct
	chResume
	chHear
	chNodeBack
	chAdopt
	// Those from here on are faults, or happen for the sake of one.
	faults
	chTick
	chDeadline
	chCrash
	chPause
	chFailBefore
	chFailAfter
	chNodeCrash
	chDeaf
	chRestart
	chOvertaken
	chLeader
	chClock
	chLose
	chLate
	chLateReply
	chRot
	chDiskFails
	chObjectLost
	chGiveUp
)

// choice is something that may happen next; c is a client, or -1.
type choice struct {
	kind choiceKind
	c    int
	lane int
	node uint32 // a memory node: its number for the directory's, its id for a client's
	n    uint32 // a placement group, a shard, an act
	bulk bool   // the second connection to a memory node
	ev   sim.Event
	w    *World
}

func (ch choice) String() string {
	switch ch.kind {
	case chFire:
		return ch.w.describeEvent(ch)
	case chConnect:
		return fmt.Sprintf("c%d connects to m%d%s", ch.c, ch.node-1, map[bool]string{true: " twice"}[ch.bulk])
	case chGrant, chGranted, chAskSplit:
		return fmt.Sprintf("c%d %s %d", ch.c, [...]string{"asks memory of pg", "is granted memory of pg",
			"asks to split shard"}[ch.kind-chGrant], ch.n)
	case chDirectory:
		return "directory: " + ch.w.due[0].Why
	case chTakeBack:
		return "directory proposes what came back"
	case chApplyBack:
		return "directory has back " + fmt.Sprint(ch.w.backs[0].GetTakeBack().GetRuns())
	case chLate:
		return fmt.Sprintf("c%d late renewal %d served", ch.c, ch.w.cls[ch.c].late[ch.n].ask.Renew.GetNumber())
	case chLateReply:
		return fmt.Sprintf("c%d late renewal %d answered", ch.c, ch.w.cls[ch.c].late[ch.n].ask.Renew.GetNumber())
	case chChore:
		return ch.w.describeChore(ch.node)
	case chAct:
		return "begin " + ch.w.cfg.Acts[ch.n].String()
	case chHear, chNodeBack, chNodeCrash, chDeaf, chAdopt, chRestart, chOvertaken:
		return fmt.Sprintf("m%d %s", ch.node, map[choiceKind]string{chHear: "hears the directory again",
			chNodeBack:  "comes back empty",
			chNodeCrash: "crashes", chDeaf: "falls silent", chRestart: "restarts", chAdopt: "adopts its memory",
			chOvertaken: "is registered by its former process"}[ch.kind])
	case chRot:
		return fmt.Sprintf("m%d rots at %#x", ch.node, ch.n)
	case chAdvance:
		return "E advances"
	case chTick:
		return "time passes"
	case chLeader:
		return "another directory node leads"
	case chClock:
		return "the clock moves on"
	case chObjectLost:
		return fmt.Sprintf("object %d is lost", ch.n)
	case chGiveUp:
		return "the volume is given up"
	}
	return fmt.Sprintf("c%d %s", ch.c, names[ch.kind])
}

var names = map[choiceKind]string{chWake: "wakes", chClaim: "claims", chWork: "works", chGone: "drops its job",
	chEvict: "evicts", chBegin: "begins", chBeginTwo: "begins two", chRelease: "releases",
	chDisk:      "has its disk answer",
	chDiskFails: "does not reach its disk",
	chLearn:     "learns the map", chRenewSend: "sends renewal", chRenewServe: "renewal served",
	chRenewReply: "renewal answered",
	chResume:     "resumes", chDeadline: "reaches its deadline", chCrash: "crashes", chPause: "pauses",
	chFailBefore: "fails before", chFailAfter: "fails after",
	chLose: "gives up its renewal"}

func (w *World) describeEvent(ch choice) string {
	ev := ch.ev
	q := w.owners[ev.QP]
	s := fmt.Sprintf("c%d m%d ", ch.c, q.n.i)
	if len(q.c.lanes) > 1 {
		s = fmt.Sprintf("c%d m%d lane %d ", ch.c, q.n.i, q.lane)
	}
	verb := map[driver.Opcode]string{driver.OpRead: "READ", driver.OpWrite: "WRITE", driver.OpCmpAndSwp: "CAS"}[ev.Op]
	r, off := w.where(ev)
	if r == nil {
		return s + verb + " gone"
	}
	s += fmt.Sprintf("%s p%d ", verb, r.pg)
	if w.isAccess(off) {
		s += "access "
		off -= w.accessBytes
	}
	switch {
	case off >= w.indexBytes:
		s += fmt.Sprintf("u%d", off/layout.UnitSize)
	case off < layout.RegionPageSize:
		s += fmt.Sprintf("%#x", off)
	default:
		g := (off - layout.RegionPageSize) / layout.GroupSize
		s += fmt.Sprintf("a%d g%d", g/(layout.SegmentGroups+1), g%(layout.SegmentGroups+1))
		switch in := (off - layout.RegionPageSize) % layout.GroupSize; {
		case ev.Len > 8:
		case in == 0:
			s += " header"
		case in == layout.GroupLockOff:
			s += " lock"
		default:
			s += fmt.Sprintf(" s%d", (in-layout.GroupSlotsOff)/8)
		}
	}
	if ev.Pieces > 1 {
		s += fmt.Sprintf(" piece %d/%d", ev.Piece+1, ev.Pieces)
	}
	if ev.Kind == sim.Late {
		s += " late"
	}
	if !r.used {
		s += " (given up)"
	}
	return s + fmt.Sprintf(" #%d.%d", ev.QP, ev.Index)
}

func (w *World) describeChore(i uint32) string {
	n := w.nodes[i]
	c, _ := w.choreOf(n)
	s := fmt.Sprintf("m%d ", i)
	switch {
	case c.enlist:
		return s + "registers"
	case c.again:
		return s + "registers again"
	case c.reset:
		return s + "resets"
	case c.fence != 0:
		return s + fmt.Sprintf("fences c%d", w.clientOf(c.fence))
	case c.drop != nil:
		return s + fmt.Sprintf("drops its region of pg %d", c.drop.pg)
	case c.make != nil:
		return s + fmt.Sprintf("makes a region of pg %d", c.make.PgId)
	}
	return s + "has nothing to do"
}

func (w *World) clientOf(session uint32) int {
	for _, c := range w.cls {
		if c.id == session {
			return c.i
		}
	}
	return -1
}

// put adds ch to the choices.
func (w *World) put(ch choice) {
	ch.w = w
	w.choices = append(w.choices, ch)
}

// enabled lists the choices that there are next, in a fixed order.
func (w *World) enabled() []choice {
	w.choices = w.choices[:0]
	w.plan()
	w.refreshChores()
	w.epoch, w.least = w.ld.Epochs()
	w.events = w.fab.AppendEvents(w.events[:0])
	for _, ev := range w.events {
		if w.cfg.Synchronous && !w.owners[ev.QP].c.able() {
			continue // it executes them itself
		}
		w.put(choice{kind: chFire, c: w.owners[ev.QP].c.i, lane: w.owners[ev.QP].lane, ev: ev})
	}
	for _, c := range w.cls {
		w.enabledLate(c)
		switch {
		case c.life != live:
		case c.paused:
			if c.renew.stage == 1 {
				w.put(choice{kind: chRenewServe, c: c.i}) // it is on its way
			}
			w.put(choice{kind: chResume, c: c.i})
		default:
			w.enabledOps(c)
			w.enabledAsks(c)
			w.enabledJob(c)
			w.enabledRenewal(c)
			w.enabledFaults(c)
		}
	}
	w.enabledDirectory()
	for i, n := range w.nodes {
		w.enabledNode(uint32(i), n)
	}
	w.enabledWorld()
	if w.reduce {
		for i, ch := range w.choices {
			if w.invisible(ch) {
				w.choices = append(w.choices[:0], w.choices[i])
				break
			}
		}
	}
	return w.choices
}

// enabledLate: the renewals that c gave up may still be served, and answered.
func (w *World) enabledLate(c *cl) {
	for k, r := range c.late {
		if r.served < 2 {
			w.put(choice{kind: chLate, c: c.i, n: uint32(k)})
		}
		if r.stage == 2 && r.reply != nil && c.able() {
			w.put(choice{kind: chLateReply, c: c.i, n: uint32(k)})
		}
	}
}

// enabledOps: c begins operations, or one that waited goes on.
func (w *World) enabledOps(c *cl) {
	if c.canBegin() {
		w.put(choice{kind: chBegin, c: c.i})
	}
	if c.canBeginTwo() {
		w.put(choice{kind: chBeginTwo, c: c.i})
	}
	if len(c.watched) > 0 {
		w.put(choice{kind: chRelease, c: c.i})
	}
	if len(c.disk) > 0 {
		w.put(choice{kind: chDisk, c: c.i})
		if w.tier.fails < w.cfg.DiskFails {
			w.put(choice{kind: chDiskFails, c: c.i})
		}
	}
	if w.cfg.Cache && c.mustEvict() {
		w.put(choice{kind: chEvict, c: c.i})
	}
	if c.woken != w.effects && c.nextWake() != 0 {
		w.put(choice{kind: chWake, c: c.i})
	}
}

// enabledAsks: c's agenda, and the maps that it has not learned yet.
func (w *World) enabledAsks(c *cl) {
	for _, x := range c.asks {
		if c.canConnect(x) && !c.within(x.Lane.ID()) {
			w.put(choice{kind: chConnect, c: c.i, lane: x.Lane.ID(), node: x.Node, bulk: x.Bulk})
		}
	}
	for _, x := range c.asks {
		switch {
		case x.isUnserved():
			w.put(choice{kind: chGrant, c: c.i, n: x.Grant.PgId})
		case x.Kind == session.AskGrant:
			w.put(choice{kind: chGranted, c: c.i, n: x.Grant.PgId})
		case x.Kind == session.AskSplit && c.growth[x.Split.ShardId] != w.st.MapVersion():
			w.put(choice{kind: chAskSplit, c: c.i, n: x.Split.ShardId})
		}
	}
	if c.core.View().Version < w.st.MapVersion() && w.st.Life(c.id) == dirpb.SessionLife_SESSION_LIVE {
		w.put(choice{kind: chLearn, c: c.i}) // nobody else is shown rkeys
	}
}

// enabledJob: a janitor drops, works at or claims a job.
func (w *World) enabledJob(c *cl) {
	switch {
	case !c.janitor:
	case c.gone() && !c.within(-1):
		w.put(choice{kind: chGone, c: c.i})
	case c.job != nil && len(c.run) < max(1, w.cfg.Window) && (len(c.todo) > 0 || len(c.run)+len(c.orphans) == 0) &&
		c.canWork():
		w.put(choice{kind: chWork, c: c.i})
	case c.job == nil && c.canClaim() != nil:
		w.put(choice{kind: chClaim, c: c.i})
	}
}

// enabledRenewal: c's renewal is sent, served, lost or answered.
func (w *World) enabledRenewal(c *cl) {
	switch c.renew.stage {
	case 0:
		if c.newsToTell() {
			w.put(choice{kind: chRenewSend, c: c.i})
		}
	case 1:
		w.put(choice{kind: chRenewServe, c: c.i})
		fallthrough
	case 2:
		if w.losses < w.cfg.Losses && !w.setup {
			w.put(choice{kind: chLose, c: c.i})
		}
	}
	if c.renew.stage == 2 {
		w.put(choice{kind: chRenewReply, c: c.i})
	}
}

// enabledFaults: an operation of c is under way, or a View, and something happens to c.
func (w *World) enabledFaults(c *cl) {
	if len(c.run)+len(c.watched) == 0 {
		return
	}
	cfg := &w.cfg
	if w.dead < cfg.Deadlines && len(c.run) > 0 && !c.run[0].quick && !c.within(c.run[0].lane) {
		w.put(choice{kind: chDeadline, c: c.i})
	}
	if w.crashes < cfg.Crashes {
		w.put(choice{kind: chCrash, c: c.i})
	}
	if w.pauses < cfg.Pauses {
		w.put(choice{kind: chPause, c: c.i})
	}
	if w.fails < cfg.Failures && len(w.events) > 0 {
		w.put(choice{kind: chFailBefore, c: c.i})
		if !cfg.Synchronous {
			w.put(choice{kind: chFailAfter, c: c.i})
		}
	}
}

func (w *World) enabledDirectory() {
	if len(w.due) > 0 {
		w.put(choice{kind: chDirectory, c: -1})
	}
	if w.ld.Pending() {
		w.put(choice{kind: chTakeBack, c: -1})
	}
	if len(w.backs) > 0 {
		w.put(choice{kind: chApplyBack, c: -1})
	}
}

func (w *World) enabledNode(i uint32, n *node) {
	if w.chores[i].any {
		w.put(choice{kind: chChore, c: -1, node: i})
	}
	switch {
	case n.deaf:
		w.put(choice{kind: chHear, c: -1, node: i})
	case n.crashed:
		w.put(choice{kind: chNodeBack, c: -1, node: i})
	case n.down:
		w.put(choice{kind: chAdopt, c: -1, node: i})
	default:
		if w.restarts < w.cfg.Restarts && w.mayRestart(n) && !w.setup {
			w.put(choice{kind: chRestart, c: -1, node: i})
		}
		if n.boot > 1 && !n.unknown && !n.overtaken {
			w.put(choice{kind: chOvertaken, c: -1, node: i})
		}
		if w.nodeCrashes < w.cfg.NodeCrashes && w.mayLose(n) {
			w.put(choice{kind: chNodeCrash, c: -1, node: i})
		}
		if w.rots < w.cfg.Rots && !w.setup {
			for _, off := range w.mayRot(n) {
				w.put(choice{kind: chRot, c: -1, node: i, n: off})
			}
		}
		if w.nodePauses < w.cfg.NodePauses && w.mayLose(n) {
			w.put(choice{kind: chDeaf, c: -1, node: i})
		}
	}
}

// enabledWorld: reclaim epochs, operators' acts, leaders and clocks.
func (w *World) enabledWorld() {
	cfg := &w.cfg
	if w.epochs < cfg.Epochs {
		w.put(choice{kind: chAdvance, c: -1})
	}
	for i := range cfg.Acts {
		if w.may[i] && !w.setup {
			w.put(choice{kind: chAct, c: -1, n: uint32(i)})
		}
	}
	if w.leaders < cfg.Leaders {
		w.put(choice{kind: chLeader, c: -1})
	}
	if w.clocks < cfg.Clock && !w.setup && w.mayExpire() {
		w.put(choice{kind: chClock, c: -1})
	}
	if w.silent() {
		w.put(choice{kind: chTick, c: -1})
	}
	if w.setup {
		return
	}
	for i, x := range w.tier.objects {
		if x.bytes != nil && w.tier.dropped < cfg.Lost {
			w.put(choice{kind: chObjectLost, c: -1, n: uint32(i)})
		}
	}
	if w.tier.dropped < cfg.GivenUp && len(w.tier.objects) > 0 {
		w.put(choice{kind: chGiveUp, c: -1})
	}
}

// invisible reports that nobody can tell when ch happens, so that only one order
// need be tried. If nothing fails and no place is reused a record is written before
// any word names it and never changes after.
func (w *World) invisible(ch choice) bool {
	cfg := &w.cfg
	switch ch.kind {
	case chGrant, chConnect, chFire:
		if cfg.Crashes+cfg.Pauses+cfg.Deadlines+cfg.Failures+cfg.Epochs+cfg.Clock+cfg.Rots > 0 || cfg.changes() {
			return false
		}
		if ch.kind == chFire {
			r, off := w.where(ch.ev)
			return r != nil && off >= w.indexBytes
		}
		return true
	case chChore:
		return w.chores[ch.node].make != nil // nothing waits for it but what it brings about
	}
	return false
}

// do makes one choice happen.
func (w *World) do(ch choice) {
	ch.w = w
	var c *cl
	if ch.c >= 0 {
		c = w.cls[ch.c]
	}
	if w.tracing {
		w.Trace = append(w.Trace, w.describe(ch))
	}
	w.step++
	for _, o := range w.cls {
		for _, r := range o.run {
			if a := r.t.Waiting(); a == index.Alloc || a == index.Fetch || a == index.Store {
				r.start = w.step // begins when there is memory
			}
		}
	}
	switch ch.kind {
	case chBegin, chBeginTwo, chRelease, chDisk, chDiskFails, chEvict, chWake, chConnect, chGrant, chGranted,
		chAskSplit, chClaim, chWork, chGone, chLearn, chResume:
		c.doOwn(ch)
	case chRenewSend, chRenewServe, chRenewReply, chLose, chLate, chLateReply:
		c.doRenewal(ch)
	case chDeadline, chCrash, chPause, chFailBefore, chFailAfter:
		w.doFault(c, ch)
	case chChore, chHear, chNodeBack, chNodeCrash, chDeaf, chRestart, chAdopt, chOvertaken, chRot:
		w.doNode(w.nodes[ch.node], ch)
	default:
		w.doShared(c, ch)
	}
	if c != nil && c.able() {
		c.tell(uint64(ch.kind), uint64(ch.node), uint64(ch.n))
		c.pump()
	}
	for _, o := range w.cls {
		if o != c && o.able() && o.within(-1) {
			o.pump() // a fence, or a crash, may have ended what it waits for
		}
	}
	w.checkWatched()
	w.watchShares()
}

// doOwn makes a choice happen that is c's own.
func (c *cl) doOwn(ch choice) {
	w := c.w
	switch ch.kind {
	case chBegin:
		c.begin()
	case chBeginTwo:
		c.beginTwo()
	case chRelease:
		c.unwatch()
	case chDisk, chDiskFails:
		c.serveDisk(ch.kind == chDiskFails)
	case chEvict:
		c.evictForNeed()
	case chWake:
		c.drift = max(c.drift, c.nextWake()-w.now)
		c.woken = w.effects
	case chConnect:
		c.connect(ch.lane, ch.node, ch.bulk)
		w.effects++
	case chGrant:
		c.serveGrant(c.asked(func(x *asked) bool { return x.isUnserved() && x.Grant.PgId == ch.n }))
	case chGranted:
		c.takeGrant(c.asked(func(x *asked) bool { return x.granted != nil && x.Grant.PgId == ch.n }))
	case chAskSplit:
		c.serveSplit(c.asked(func(x *asked) bool { return x.Kind == session.AskSplit && x.Split.ShardId == ch.n }))
	case chClaim:
		c.claim()
	case chWork:
		c.work()
	case chGone:
		c.dropJob()
	case chLearn:
		c.core.InstallView(w.view())
		w.effects++
	case chResume:
		c.paused = false
		w.touch()
		c.woken = -1
	}
}

// doRenewal makes a choice about one of c's renewals happen.
func (c *cl) doRenewal(ch choice) {
	w := c.w
	switch ch.kind {
	case chRenewSend:
		c.sendRenewal()
	case chRenewServe:
		c.serveRenewal()
	case chRenewReply:
		c.takeRenewal()
	case chLose:
		w.losses++
		c.loseRenewal()
	case chLate:
		c.serve(c.late[ch.n])
	case chLateReply:
		r := c.late[ch.n]
		c.late = append(c.late[:ch.n:ch.n], c.late[ch.n+1:]...)
		c.answered(r)
	}
}

// doFault makes a choice happen that c did not make.
func (w *World) doFault(c *cl, ch choice) {
	switch ch.kind {
	case chDeadline:
		w.dead++
		c.abandon(c.run[0], engine.ErrTimeout)
	case chCrash:
		w.crashes++
		c.crash()
	case chPause:
		w.pauses++
		c.paused = true
		w.touch()
	case chFailBefore, chFailAfter:
		w.fails++
		when := sim.BeforeEffect
		if ch.kind == chFailAfter {
			when = sim.AfterEffect
		}
		for _, q := range c.conns {
			if q.open {
				_ = w.fab.FailNext(q.num, driver.RetryExcErr, when)
				break
			}
		}
	}
}

// doNode makes a choice about memory node n happen.
func (w *World) doNode(n *node, ch choice) {
	switch ch.kind {
	case chChore:
		w.doChore(n)
	case chHear:
		n.deaf = false
		w.touch()
		if w.ld.Heartbeat(w.st, time.Duration(w.now), n.id, n.inc, nil) {
			n.ranOut = false
			w.touch()
		}
	case chNodeBack:
		if err := w.boot(n); err != nil {
			w.fail(err)
		}
	case chRestart:
		w.restarts++
		w.restart(n)
	case chAdopt:
		w.adopt(n)
	case chOvertaken:
		n.overtaken = true
		w.touch()
		w.register(n, n.boot-1)
	case chRot:
		w.rot(n, ch.n)
	case chNodeCrash:
		w.nodeCrashes++
		w.crashNode(n)
	case chDeaf:
		w.nodePauses++
		n.deaf = true
		w.touch()
	}
}

// doShared makes a choice happen that belongs to everybody, or to a work request of c.
func (w *World) doShared(c *cl, ch choice) {
	switch ch.kind {
	case chFire:
		w.fire(c, ch.ev)
	case chClock:
		w.passExpiry()
	case chObjectLost:
		w.loseObjects(int(ch.n))
	case chGiveUp:
		w.loseObjects(-1)
	case chAdvance:
		w.now++
		w.ld.Run(w.st, w.cfg.Leap)
		w.touch()
		w.epochs++
	case chDirectory:
		w.act()
	case chTakeBack:
		w.takeBack()
	case chApplyBack:
		w.applyBack()
	case chAct:
		w.acts[ch.n] = true
		w.touch()
		w.apply(w.command(w.cfg.Acts[ch.n]))
	case chTick:
		w.passTime()
	case chLeader:
		w.leaders++
		w.newLeader()
	}
}

// fire lets a verb take effect.
func (w *World) fire(c *cl, ev sim.Event) {
	w.observe(c, ev)
	w.before(c, ev)
	w.between += b2i(w.owners[ev.QP].n.down)
	var old uint64
	atomic := ev.Op.IsAtomic() && ev.Kind != sim.Deliver
	if atomic {
		old = w.wordOf(ev)
	}
	r, off := w.where(ev)
	var data []byte
	if r != nil && ev.Op == rdma.OpWrite && ev.Kind != sim.Deliver && len(w.rotten) > 0 {
		data = append(data, w.payload(c, ev, off)...)
	}
	if err := w.fab.Fire(ev); err != nil {
		w.fail(err)
		return
	}
	w.healed(r, off, data)
	if atomic && w.wordOf(ev) != old {
		w.effects++
		w.lockChanged(ev, layout.Lock(old))
	}
	w.after(ev)
}

func (w *World) describe(ch choice) string {
	s := ch.String()
	if ch.c >= 0 && w.tracing {
		c := w.cls[ch.c]
		if len(c.run)+len(c.orphans) > 0 {
			s += "   ["
			for _, r := range c.run {
				s += r.String() + "; "
			}
			for _, r := range c.orphans {
				s += "answered " + r.String() + "; "
			}
			s = s[:len(s)-2] + "]"
		}
	}
	return s
}

// traceLine adds a line to the trace.
func (w *World) traceLine(format string, args ...any) {
	if w.tracing {
		w.Trace = append(w.Trace, fmt.Sprintf(format, args...))
	}
}
