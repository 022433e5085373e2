package simtest

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/internal/session"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
	"github.com/kvd-project/kvd/server/lead"
)

// control takes what is to be asked: when it is served is a choice. The answer that a session
// lives comes at once, since it brings nothing; that one is fenced everybody learns as it is
// (World.sessionsEnded), since clients ask only after many looks at a lock.
func (c *cl) control() {
	for _, ask := range c.agenda.DueWants() {
		if ask.Kind == session.AskFence {
			c.agenda.Answer(ask, session.Reply{Fence: &dirpb.SessionStateReply{Life: c.w.st.Life(ask.Fence.SessionId)}})
			continue
		}
		c.asks = append(c.asks, &asked{Ask: ask})
	}
}

// asked finds the first of asks that is so, nil if there is none.
func (c *cl) asked(is func(*asked) bool) *asked {
	if i := slices.IndexFunc(c.asks, is); i >= 0 {
		return c.asks[i]
	}
	return nil
}

// answerAsk ends an ask.
func (c *cl) answerAsk(ask *asked, r session.Reply) {
	c.asks = slices.DeleteFunc(c.asks, func(x *asked) bool { return x == ask })
	c.agenda.Answer(ask.Ask, r)
}

// isUnserved reports whether it is a grant that the directory has not got yet.
func (x *asked) isUnserved() bool { return x.Kind == session.AskGrant && x.granted == nil }

// serveGrant has the directory serve a grant.
func (c *cl) serveGrant(ask *asked) {
	w, q := c.w, ask.Grant
	late := c.i >= len(w.cfg.Scripts) // whoever came to work, or at the end, is granted what it needs
	reply := &dirpb.GrantExtentReply{Term: w.term}
	if c.granted[q.PgId]+q.PlaceUnits <= w.cfg.Units || w.cfg.HeapUnits > 0 || late {
		want := max(q.PlaceUnits, w.cfg.Units-min(w.cfg.Units, c.granted[q.PgId]))
		if late || w.cfg.Stingy {
			want = q.PlaceUnits
		}
		_, least := w.ld.Epochs()
		res := w.apply(&fsmpb.Command{Op: &fsmpb.Command_GrantExtent{GrantExtent: &fsmpb.GrantExtent{
			SessionId: c.id, PgId: q.PgId, WantUnits: want, PlaceUnits: q.PlaceUnits, MinEpoch: least}}})
		if res.Err != nil {
			c.answerAsk(ask, session.Reply{Err: res.Err}) // asked again by and by
			return
		}
		reply = res.Grant
		reply.Term = w.term
		if len(reply.Runs) == 0 && w.cfg.Waits {
			reply.ComingUnits = w.ld.Coming(w.st, 1, q.PgId, q.PlaceUnits, time.Duration(w.now))
		}
	}
	for _, r := range reply.Runs {
		c.w.traceLine("      => is granted %v", r)
		c.granted[q.PgId] += r.Units
	}
	if len(reply.Runs) == 0 {
		w.ld.Short(w.st, q.PgId, q.PlaceUnits, time.Duration(w.now))
		w.touch()
	}
	ask.granted = reply
	if !w.cfg.changes() {
		c.takeGrant(ask) // nobody can tell when it arrives
	}
}

// takeGrant is the directory's reply.
func (c *cl) takeGrant(ask *asked) {
	c.answerAsk(ask, session.Reply{Grant: ask.granted})
	if len(ask.granted.Runs) > 0 {
		c.wakeAll()
	}
}

// serveSplit has the directory split a shard, or say that it cannot.
func (c *cl) serveSplit(ask *asked) {
	w, shard := c.w, ask.Split.ShardId
	c.growth[shard] = w.st.MapVersion()
	sh := w.st.Shard(shard)
	if sh == nil {
		c.answerAsk(ask, session.Reply{Err: fsm.ErrNotFound})
		return
	}
	q, growing, why := w.ld.Grow(w.st, sh, time.Duration(w.now))
	if q != nil {
		w.apply(&fsmpb.Command{Op: &fsmpb.Command_StartJob{StartJob: q}})
	}
	c.answerAsk(ask, session.Reply{Split: &dirpb.RequestSplitReply{Growing: q != nil || growing, Why: why}})
	c.wakeAll()
}

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

// oldestWithHeld is oldest, and that of Views, of which those that are due expire.
func (c *cl) oldestWithHeld() (epoch uint64, ok bool) {
	epoch, ok = c.oldest()
	if e, some := c.core.OldestHeld(); some && (!ok || e < epoch) {
		epoch, ok = e, true
	}
	return epoch, ok
}

// reportNow is what the client's next renewal says.
func (c *cl) reportNow() uint64 {
	e := c.core.Epoch()
	if o, ok := c.oldest(); ok && o < e {
		e = o
	}
	if o, ok := c.watchedSince(); ok && o < e {
		e = o
	}
	return e
}

// newsToTell reports whether a renewal could tell or bring something new.
func (c *cl) newsToTell() bool {
	e, least := c.w.epoch, c.w.least
	if c.w.cfg.Epochs > 0 && (c.inLimbo() != c.limbo || c.core.Epoch() < e || c.reportNow() > c.reported() ||
		least > c.core.MinEpoch()) {
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
	ask, ok := c.agenda.DueRenewal(c.oldestWithHeld)
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
		c.w.traceLine("      => hands back %v", f)
		c.tell(uint64(f.PgId)<<32|uint64(f.Unit), uint64(len(f.Places)))
	}
	for _, r := range ask.Renew.Returns {
		c.w.traceLine("      => returns %v", r)
		c.tell(uint64(r.PgId)<<32|uint64(r.Unit), uint64(r.Units))
	}
}

// serve has the directory serve a renewal that it has got.
func (c *cl) serve(r *renewal) {
	w, q := c.w, r.ask.Renew
	a, err := w.ld.Renew(w.st, time.Duration(w.now), lead.Renewal{Session: c.id, Report: q.ReportEpoch,
		Acked:    q.AckedMapVersion,
		Quiesced: q.QuiescedMapVersion, Number: q.Number, Term: q.Term, HandBacks: q.HandBacks, Returns: q.Returns,
		Held: q.Held})
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
		c.w.traceLine("      => gets home %v", f)
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
		c.abandon(c.run[0], engine.ErrLease)
	}
	c.quit()
	c.life = ended
}

// quit leaves all queue pairs to themselves.
func (c *cl) quit() {
	c.hangUp()
	c.stopFibers()
	c.asks, c.job, c.todo = nil, nil, nil
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
	c.loseTxns()
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
	for len(c.watched) > 0 {
		c.unwatch()
	}
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
	known := w.st.Life(c.id) == dirpb.SessionLife_SESSION_LIVE
	if known {
		w.closeBlock(c)
	}
	q := c.agenda.Close()
	epoch, _ := w.ld.Epochs()
	w.ld.Closing(c.id, q.HandBacks, q.Held)
	res := w.apply(&fsmpb.Command{Op: &fsmpb.Command_CloseSession{CloseSession: &fsmpb.CloseSession{
		SessionId: c.id, Runs: q.Runs, Epoch: epoch, Leaked: q.Leaked}}})
	switch {
	case res.Err == nil:
		w.ld.Closed(w.st, time.Duration(w.now), c.id)
	case known:
		w.fail(fmt.Errorf("I7: session %d cannot give its memory back: %w", c.id, res.Err))
	default:
		w.ld.Closing(c.id, nil, nil)
	}
	c.life = ended
}
