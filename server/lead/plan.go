package lead

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/invariants"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// Reasons of scrubs, part of the job. They tell what follows the scrub; see
// [Leader.Scrubbed].
const (
	ReasonDirty  = "sessions ended uncleanly"
	ReasonLost   = "memory is lost, by estimate"
	ReasonShort  = "memory is short"
	ReasonTerm   = "another directory node leads"
	ReasonRepair = "an operator asked for a scrub and repair"
	ReasonLook   = "an operator asked for a scrub"
)

// reasonBalance of a move says that it is part of a rebalance.
const reasonBalance = "an operator asked for balance"

// Step is a command that is due, and why, for the log.
type Step struct {
	Do  *fsmpb.Command
	Why string

	asked    bool // out of the queue
	balances bool // a join that is part of a rebalance
}

// plan collects steps against one view. They are all judged by the same state, so no two
// voluntary ones concern one placement group.
type plan struct {
	*view
	steps []Step
	taken map[uint32]bool   // placement groups that a step changes
	given map[uint32]uint64 // bytes that steps take, by memory node
	joins map[uint32]uint32 // memory nodes that steps have join, by placement group
}

func (l *Leader) plan(s *fsm.State, now time.Duration) *plan {
	return &plan{view: l.newView(s, now), taken: make(map[uint32]bool), given: make(map[uint32]uint64),
		joins: make(map[uint32]uint32)}
}

// Plan gives the commands that time and state have brought about, in the order in which
// they should be proposed. A command that fails, or is not proposed, is given again by a later call; tell
// Refused of each that the state machine refused.
//
// In this order:
//
//   - the next block of reclaim epochs;
//   - pauses of memory nodes that are over;
//   - memory nodes and sessions whose leases ran out, and tier nodes that are silent for long;
//   - the end of a freeze, when every session quiesced and no survivor has to be synced;
//   - recalled extents that are scanned, when a reclaim epoch has passed;
//   - a placement group that holds nothing and waits for memory nodes that are down or
//     forgotten gets others;
//   - memory nodes that said goodbye leave their placement groups;
//   - members: a placement group with too few, or with one on a memory node that drains, gets a joiner if
//     there is room. A placement group with more than it needs loses one, best one that drains;
//   - if a memory node drains and its region has nowhere to go, the shards migrate, one
//     at a time, to placement groups that stay;
//   - placement groups that may have intents of sessions that have ended are gone through;
//   - jobs that were asked for and had to wait;
//   - rebalancing, one change of a namespace at a time, or its end;
//   - the rebalancing of a namespace on some memory nodes, which is nearly full, over more;
//   - moves from placement groups that fill up to emptier ones;
//   - if memory is lost, or short: a count of what is linked. Scrubbed queues the jobs that follow it.
//
// A change of a placement group is voluntary from the item members on. It waits until the group is active,
// whole, without a job, and every session acknowledged its last change.
func (l *Leader) Plan(s *fsm.State, now time.Duration) []Step {
	if invariants.On {
		defer l.check(s)
	}
	l.awake(now)
	l.Signs(s) // a memory node that is down holds nobody up
	l.noteLeaving(s, now)
	l.notePauses(s, now)
	p := l.plan(s, now)
	p.reserve()
	p.resume()
	p.expireNodes()
	p.expireSessions()
	p.silenceVolumes()
	for _, pg := range p.pgs {
		p.thaw(pg)
		p.finishRecalls(pg)
	}
	p.forget()
	p.noteWorkedPGs()
	p.noteFreezes()
	for _, pg := range p.pgs {
		p.remake(pg)
		p.part(pg)
		p.members(pg)
	}
	p.settleOrphans()
	p.asked()
	for _, ns := range s.Rebalancing() {
		p.level(ns)
	}
	p.account()
	p.ease()
	for _, pg := range p.pgs {
		p.reclaim(pg)
	}
	return p.steps
}

// awake gives everyone the time that this leader itself stood still: what they said
// meanwhile may wait to be heard.
func (l *Leader) awake(now time.Duration) {
	gap := now - l.planned
	l.planned = now
	if gap <= l.opts.Lease/2 {
		return
	}
	for _, n := range l.nodes {
		n.expires += gap
		n.paused += gap
	}
	for _, v := range l.volumes {
		v.heard += gap
	}
	for x := l.leases.first; x != nil; x = x.behind {
		x.expires = min(x.expires+gap, now+l.opts.Lease)
	}
}

func (p *plan) add(c *fsmpb.Command, format string, args ...any) {
	p.steps = append(p.steps, Step{Do: c, Why: fmt.Sprintf(format, args...)})
}

func (p *plan) reserve() {
	if p.l.epoch+p.l.opts.EpochBlock/2 > p.s.Meta().EpochCeiling && p.l.needsEpochs(p.s) {
		ceiling := p.l.epoch + p.l.opts.EpochBlock
		p.add(&fsmpb.Command{Op: &fsmpb.Command_ReserveEpoch{ReserveEpoch: &fsmpb.ReserveEpoch{Ceiling: ceiling}}},
			"reclaim epochs up to %d", ceiling)
	}
}

func (p *plan) expireSessions() {
	l := p.l
	slices.Sort(l.changed)
	changed := slices.Compact(l.changed)
	l.changed = nil
	for _, id := range changed {
		if x := p.s.Session(id); x != nil && l.sessions.of(id) == nil {
			// Opened, but not answered yet, perhaps never.
			l.enterSession(p.s, newSession(x, l.epoch), p.now)
		}
	}
	for _, id := range changed {
		if p.s.Session(id) == nil {
			l.ended(p.s, p.now, id)
		}
	}
	var ids []uint32
	for x := range l.lapsed(p.now) {
		if p.s.Life(x.id) != dirpb.SessionLife_SESSION_LIVE {
			l.leases.remove(x) // it is being fenced
			continue
		}
		x.expired = true
		ids = append(ids, x.id)
	}
	if slices.Sort(ids); len(ids) > 0 {
		p.add(&fsmpb.Command{Op: &fsmpb.Command_ExpireSessions{ExpireSessions: &fsmpb.ExpireSessions{SessionIds: ids}}},
			"fencing sessions %d: their leases ran out", ids)
	}
}

func (p *plan) thaw(pg *dirpb.PlacementGroup) {
	v := p.s.FrozenVersion(pg.Id)
	if pg.State != dirpb.PGState_PG_FROZEN || v == 0 || p.floorOf(pg).quiesced < v {
		return
	}
	if slices.ContainsFunc(p.jobs[pg.Id], func(j *dirpb.Job) bool {
		return j.Kind == dirpb.JobKind_JOB_RECOVER && j.PgId == pg.Id
	}) {
		return
	}
	p.add(&fsmpb.Command{
		Op: &fsmpb.Command_ActivatePg{
			ActivatePg: &fsmpb.ActivatePG{PgId: pg.Id, Epoch: pg.Epoch, ReclaimEpoch: p.l.epoch}}},
		"placement group %d: every session has quiesced", pg.Id)
}

// finishRecalls frees extents of pg that were scanned before every session's report.
func (p *plan) finishRecalls(pg *dirpb.PlacementGroup) {
	epoch, least := p.l.Epochs()
	for _, x := range p.s.Heap(pg.Id).GetRecalls() {
		if x.Scanned {
			p.l.await(x.Epoch)
		}
		if x.Scanned && least > x.Epoch {
			p.l.accounted = 0
			p.add(&fsmpb.Command{Op: &fsmpb.Command_FinishRecall{FinishRecall: &fsmpb.FinishRecall{
				PgId: pg.Id, Extent: x.Extent, Epoch: epoch, MinEpoch: least,
			}}}, "placement group %d: extent %d is free", pg.Id, x.Extent)
		}
	}
}

func (p *plan) forget() {
	for id := range p.l.jobs {
		if p.s.Job(id) == nil {
			delete(p.l.jobs, id)
		}
	}
	for id, until := range p.l.paused {
		if p.now >= until {
			delete(p.l.paused, id)
		}
	}
	maps.DeleteFunc(p.l.spent, func(id uint32, _ bool) bool {
		return p.s.Namespace(id).GetRebalancing() != dirpb.Rebalancing_REBALANCING_ON
	})
	maps.DeleteFunc(p.l.extended, func(id uint32, at time.Duration) bool { return p.now >= at+extendEvery })
	gone := func(id uint32) bool { return p.s.PG(id) == nil }
	maps.DeleteFunc(p.l.frozen, func(id uint32, _ time.Duration) bool { return gone(id) })
	maps.DeleteFunc(p.l.rests, func(_ uint32, until time.Duration) bool { return p.now >= until })
	maps.DeleteFunc(p.l.worked, func(id uint32, _ time.Duration) bool { return gone(id) })
	maps.DeleteFunc(p.l.settling, func(id uint32, at time.Duration) bool {
		return gone(id) || p.now >= at+p.l.pause(0)
	})
	maps.DeleteFunc(p.l.took, func(id uint32, _ took) bool { return gone(id) })
	p.l.forgetTroubles(p.s, p.now)
	p.l.forgetRivals(p.s, p.now)
}
