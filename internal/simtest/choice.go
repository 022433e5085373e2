package simtest

import (
	"fmt"
	"time"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/session"
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
	chLeader
	chClock
	chLose
	chLate
	chLateReply
)

// choice is something that may happen next; c is a client, or -1.
type choice struct {
	kind choiceKind
	c    int
	lane int
	node uint32 // a memory node: its number for the directory's, its id for a client's
	n    uint32 // a placement group, a shard, an act
	ev   sim.Event
	w    *World
}

func (ch choice) String() string {
	switch ch.kind {
	case chFire:
		return ch.w.describeEvent(ch)
	case chConnect:
		return fmt.Sprintf("c%d connects to m%d", ch.c, ch.node-1)
	case chGrant, chGranted, chAskSplit:
		return fmt.Sprintf("c%d %s %d", ch.c, [...]string{"asks memory of pg", "is granted memory of pg", "asks to split shard"}[ch.kind-chGrant], ch.n)
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
	case chHear, chNodeBack, chNodeCrash, chDeaf:
		return fmt.Sprintf("m%d %s", ch.node, map[choiceKind]string{chHear: "hears the directory again", chNodeBack: "comes back empty",
			chNodeCrash: "crashes", chDeaf: "falls silent"}[ch.kind])
	case chAdvance:
		return "E advances"
	case chTick:
		return "time passes"
	case chLeader:
		return "another directory node leads"
	case chClock:
		return "the clock moves on"
	}
	return fmt.Sprintf("c%d %s", ch.c, names[ch.kind])
}

var names = map[choiceKind]string{chWake: "wakes", chClaim: "claims", chWork: "works", chGone: "drops its job", chEvict: "evicts", chBegin: "begins", chBeginTwo: "begins two",
	chLearn: "learns the map", chRenewSend: "sends renewal", chRenewServe: "renewal served", chRenewReply: "renewal answered",
	chResume: "resumes", chDeadline: "reaches its deadline", chCrash: "crashes", chPause: "pauses", chFailBefore: "fails before", chFailAfter: "fails after",
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

// enabled lists what may happen next, in a fixed order.
func (w *World) enabled() []choice {
	cfg := &w.cfg
	w.choices = w.choices[:0]
	put := func(ch choice) {
		ch.w = w
		w.choices = append(w.choices, ch)
	}
	w.plan()
	w.refreshChores()
	w.epoch, w.least = w.ld.Epochs()
	w.events = w.fab.AppendEvents(w.events[:0])
	for _, ev := range w.events {
		if cfg.Synchronous && !w.owners[ev.QP].c.able() {
			continue // it executes them itself
		}
		put(choice{kind: chFire, c: w.owners[ev.QP].c.i, lane: w.owners[ev.QP].lane, ev: ev})
	}
	for i, c := range w.cls {
		for k, r := range c.late {
			if r.served < 2 {
				put(choice{kind: chLate, c: i, n: uint32(k)})
			}
			if r.stage == 2 && r.reply != nil && c.able() {
				put(choice{kind: chLateReply, c: i, n: uint32(k)})
			}
		}
		if c.life != live {
			continue
		}
		if c.paused {
			if c.renew.stage == 1 {
				put(choice{kind: chRenewServe, c: i}) // it is on its way
			}
			put(choice{kind: chResume, c: i})
			continue
		}
		if c.canBegin() {
			put(choice{kind: chBegin, c: i})
		}
		if c.canBeginTwo() {
			put(choice{kind: chBeginTwo, c: i})
		}
		if cfg.Cache && c.mustEvict() {
			put(choice{kind: chEvict, c: i})
		}
		if c.woken != w.effects && c.nextWake() != 0 {
			put(choice{kind: chWake, c: i})
		}
		for _, x := range c.asks {
			if c.canConnect(x) && !c.within(x.Lane.ID()) {
				put(choice{kind: chConnect, c: i, lane: x.Lane.ID(), node: x.Node})
			}
		}
		for _, x := range c.asks {
			switch {
			case x.isUnserved():
				put(choice{kind: chGrant, c: i, n: x.Grant.PgId})
			case x.Kind == session.AskGrant:
				put(choice{kind: chGranted, c: i, n: x.Grant.PgId})
			case x.Kind == session.AskSplit && c.growth[x.Split.ShardId] != w.st.MapVersion():
				put(choice{kind: chAskSplit, c: i, n: x.Split.ShardId})
			}
		}
		if c.core.View().Version < w.st.MapVersion() && w.st.Life(c.id) == dirpb.SessionLife_SESSION_LIVE {
			put(choice{kind: chLearn, c: i}) // nobody else is shown rkeys
		}
		switch {
		case !c.janitor:
		case c.gone() && !c.within(-1):
			put(choice{kind: chGone, c: i})
		case c.job != nil && len(c.run) < max(1, cfg.Window) && (len(c.todo) > 0 || len(c.run)+len(c.orphans) == 0) && c.canWork():
			put(choice{kind: chWork, c: i})
		case c.job == nil && c.canClaim() != nil:
			put(choice{kind: chClaim, c: i})
		}
		switch c.renew.stage {
		case 0:
			if c.newsToTell() {
				put(choice{kind: chRenewSend, c: i})
			}
		case 1:
			put(choice{kind: chRenewServe, c: i})
			fallthrough
		case 2:
			if w.losses < cfg.Losses && !w.setup {
				put(choice{kind: chLose, c: i})
			}
		}
		if c.renew.stage == 2 {
			put(choice{kind: chRenewReply, c: i})
		}
		if len(c.run) > 0 {
			if w.dead < cfg.Deadlines && !c.within(c.run[0].lane) {
				put(choice{kind: chDeadline, c: i})
			}
			if w.crashes < cfg.Crashes {
				put(choice{kind: chCrash, c: i})
			}
			if w.pauses < cfg.Pauses {
				put(choice{kind: chPause, c: i})
			}
			if w.fails < cfg.Failures && len(w.events) > 0 {
				put(choice{kind: chFailBefore, c: i})
				if !cfg.Synchronous {
					put(choice{kind: chFailAfter, c: i})
				}
			}
		}
	}
	if len(w.due) > 0 {
		put(choice{kind: chDirectory, c: -1})
	}
	if w.ld.Pending() {
		put(choice{kind: chTakeBack, c: -1})
	}
	if len(w.backs) > 0 {
		put(choice{kind: chApplyBack, c: -1})
	}
	for i, n := range w.nodes {
		if w.chores[i].any {
			put(choice{kind: chChore, c: -1, node: uint32(i)})
		}
		switch {
		case n.deaf:
			put(choice{kind: chHear, c: -1, node: uint32(i)})
		case n.crashed:
			put(choice{kind: chNodeBack, c: -1, node: uint32(i)})
		default:
			if w.nodeCrashes < cfg.NodeCrashes && w.mayLose(n) {
				put(choice{kind: chNodeCrash, c: -1, node: uint32(i)})
			}
			if w.nodePauses < cfg.NodePauses && w.mayLose(n) {
				put(choice{kind: chDeaf, c: -1, node: uint32(i)})
			}
		}
	}
	if w.epochs < cfg.Epochs {
		put(choice{kind: chAdvance, c: -1})
	}
	for i := range cfg.Acts {
		if w.may[i] && !w.setup {
			put(choice{kind: chAct, c: -1, n: uint32(i)})
		}
	}
	if w.leaders < cfg.Leaders {
		put(choice{kind: chLeader, c: -1})
	}
	if w.clocks < cfg.Clock && !w.setup && w.mayExpire() {
		put(choice{kind: chClock, c: -1})
	}
	if w.silent() {
		put(choice{kind: chTick, c: -1})
	}
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

// invisible reports that nobody can tell when ch happens, so that only one order
// need be tried. If nothing fails and no place is reused a record is written before
// any word names it and never changes after.
func (w *World) invisible(ch choice) bool {
	cfg := &w.cfg
	switch ch.kind {
	case chGrant, chConnect, chFire:
		if cfg.Crashes+cfg.Pauses+cfg.Deadlines+cfg.Failures+cfg.Epochs+cfg.Clock > 0 || cfg.changes() {
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
			if r.t.Waiting() == index.Alloc {
				r.start = w.step // begins when there is memory
			}
		}
	}
	switch ch.kind {
	case chFire:
		w.fire(c, ch.ev)
	case chBegin:
		c.begin()
	case chBeginTwo:
		c.beginTwo()
	case chEvict:
		c.evictForNeed()
	case chClock:
		w.passExpiry()
	case chWake:
		c.drift = max(c.drift, c.nextWake()-w.now)
		c.woken = w.effects
	case chConnect:
		c.connect(ch.lane, ch.node)
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
	case chAdvance:
		w.now++
		w.ld.Run(w.st, w.cfg.Leap)
		w.touch()
		w.epochs++
	case chRenewSend:
		c.sendRenewal()
	case chRenewServe:
		c.serveRenewal()
	case chRenewReply:
		c.takeRenewal()
	case chDirectory:
		w.act()
	case chTakeBack:
		w.takeBack()
	case chApplyBack:
		w.applyBack()
	case chLose:
		w.losses++
		c.loseRenewal()
	case chLate:
		c.serve(c.late[ch.n])
	case chLateReply:
		r := c.late[ch.n]
		c.late = append(c.late[:ch.n:ch.n], c.late[ch.n+1:]...)
		c.answered(r)
	case chChore:
		w.doChore(w.nodes[ch.node])
	case chAct:
		w.acts[ch.n] = true
		w.touch()
		w.apply(w.command(w.cfg.Acts[ch.n]))
	case chResume:
		c.paused = false
		w.touch()
		c.woken = -1
	case chHear:
		n := w.nodes[ch.node]
		n.deaf = false
		w.touch()
		if w.ld.Heartbeat(w.st, time.Duration(w.now), n.id, n.inc, nil) {
			n.ranOut = false
			w.touch()
		}
	case chNodeBack:
		if err := w.boot(w.nodes[ch.node]); err != nil {
			w.fail(err)
		}
	case chTick:
		w.passTime()
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
	case chNodeCrash:
		w.nodeCrashes++
		w.crashNode(w.nodes[ch.node])
	case chDeaf:
		w.nodePauses++
		w.nodes[ch.node].deaf = true
		w.touch()
	case chLeader:
		w.leaders++
		w.newLeader()
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
}

// fire lets a verb take effect.
func (w *World) fire(c *cl, ev sim.Event) {
	w.observe(c, ev)
	w.before(c, ev)
	var old uint64
	atomic := ev.Op.IsAtomic() && ev.Kind != sim.Deliver
	if atomic {
		old = w.wordOf(ev)
	}
	if err := w.fab.Fire(ev); err != nil {
		w.fail(err)
		return
	}
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
