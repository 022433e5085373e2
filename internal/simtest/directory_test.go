package simtest

import (
	"fmt"
	"slices"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
	"github.com/kvd-project/kvd/server/lead"
)

// epochBlock is what a new leader skips of the reclaim epochs at most: enough for every
// hint to be too old and for returned memory to be granted again.
const epochBlock = 4096

// newLeader begins a leadership: all that is not replicated is forgotten.
func (w *World) newLeader() {
	w.term++
	o := lead.Options{Lease: time.Duration(lease), LastCopyLeases: 1, EpochBlock: epochBlock, Term: w.term}
	if w.cfg.Reclaims {
		o.ScrubInterval = 1
	}
	w.ld = lead.New(o, w.st, time.Duration(w.now))
	w.due, w.backs = nil, nil
	w.touch()
	for _, c := range w.cls {
		c.dirAcked, c.dirQuiesced, c.ranOut = 0, 0, false
	}
	for _, n := range w.nodes {
		n.ranOut = false
	}
}

// apply carries out a command of the directory's.
func (w *World) apply(c *fsmpb.Command) fsm.Result {
	before := w.st.MapVersion()
	fences := w.st.SessionCount()
	res := fsm.Apply(w.st, c)
	if res.Err != nil {
		w.traceLine("      => refused: %v", res.Err)
		return res
	}
	w.dirSumOK = false
	if c.GetGrantExtent() == nil { // which nothing depends on
		w.touch()
	}
	if w.st.MapVersion() != before {
		w.directoryChanged()
	}
	if w.st.SessionCount() < fences {
		w.sessionsEnded()
	}
	return res
}

// sessionsEnded tells everybody who is fenced; that they learn it late is no different
// from their not looking.
func (w *World) sessionsEnded() {
	w.effects++
	w.endBlocks()
	ids := w.fencedIDs()
	for _, c := range w.cls {
		if c.life != live {
			continue
		}
		for _, id := range ids {
			c.core.SetFenced(id)
		}
		c.wakeAll()
		if !c.paused {
			c.pump()
		}
	}
}

func (w *World) fencedIDs() (ids []uint32) {
	for _, c := range w.cls {
		if w.fenced(c) {
			ids = append(ids, c.id)
		}
	}
	return ids
}

// fenced reports whether the directory calls c's session fenced.
func (w *World) fenced(c *cl) bool { return w.st.Life(c.id) == dirpb.SessionLife_SESSION_FENCED }

// view is the newest map, as a session would check it.
func (w *World) view() *engine.View {
	if n := len(w.views); n > 0 && w.views[n-1].Version == w.st.MapVersion() {
		return w.views[n-1]
	}
	v, err := engine.ViewOf(w.st.Map(&fsmpb.Session{NamespaceId: 1}), 1)
	if err != nil {
		w.fail(fmt.Errorf("map: %w", err))
		return w.views[len(w.views)-1]
	}
	for _, pg := range v.PGs {
		if w.cfg.Payload != 0 {
			pg.ChunkPayload = w.cfg.Payload
		}
		pg.Speculative = w.cfg.Speculative
	}
	w.views = append(w.views, v)
	return v
}

// touch notes that the directory, or a memory node, may judge differently now.
func (w *World) touch() {
	w.stale = true
	w.stamp++
}

// refreshChores works out what the directory would let happen now, once for each state of it.
func (w *World) refreshChores() {
	if w.looked == w.stamp {
		return
	}
	w.looked = w.stamp
	w.chores = w.chores[:0]
	for _, n := range w.nodes {
		c, ok := w.choreOf(n)
		c.any = ok
		w.chores = append(w.chores, c)
	}
	w.claims = w.claims[:0]
	for _, c := range w.cls {
		var j *dirpb.Job
		if c.janitor && c.able() {
			if j = w.ld.Claimable(w.st, c.id, time.Duration(w.now)); j == nil {
				j = w.sweepable()
			}
		}
		w.claims = append(w.claims, j)
	}
	w.may = w.may[:0]
	for i, a := range w.cfg.Acts {
		w.may = append(w.may, !w.acts[i] && w.command(a) != nil)
	}
}

// plan asks the leader what is due if anything may have changed.
func (w *World) plan() {
	if len(w.due) == 0 && w.stale {
		w.stale = false
		w.due = w.ld.Plan(w.st, time.Duration(w.now))
		w.checkAlone()
	}
}

// checkAlone checks that nothing waits any more for a memory node that is silent, but what it has the only copy of,
// when the directory has nothing to do.
func (w *World) checkAlone() {
	if len(w.due) > 0 {
		return
	}
	for _, n := range w.nodes {
		m := w.st.Node(n.id)
		if m == nil || !w.ld.Silent(m, time.Duration(w.now)) {
			continue
		}
		has := false
		for _, pg := range w.st.PGs(1) {
			for _, x := range pg.Members {
				has = has || x.NodeId == n.id
				if x.NodeId == n.id && len(fsm.Copies(pg)) > 1 {
					w.fail(fmt.Errorf("placement group %d waits for m%d, which is silent, and has another copy", pg.Id,
						n.i))
				}
			}
			has = has || pg.Planned.GetNodeId() == n.id || pg.Leaving.GetNodeId() == n.id
		}
		if ids := w.st.FenceWork(n.id, n.inc); len(ids) > 0 && !has {
			w.fail(fmt.Errorf("sessions %d are not fenced before m%d is heard, which is silent and has nothing of "+
				"their namespace", ids, n.i))
		}
	}
}

// losable are the members that are lost if placement groups go on without a memory node.
func (w *World) losable(node uint32) (list []parted) {
	for _, id := range w.st.Losable(node) {
		for _, m := range w.st.PG(id).Members {
			if m.NodeId == node {
				list = append(list, parted{id, node, m.Incarnation, m.Since})
			}
		}
	}
	return list
}

// act carries out the first step that is due.
func (w *World) act() {
	s := w.due[0]
	w.due = w.due[1:]
	w.touch()
	if a := s.Do.GetActivatePg(); a != nil {
		w.thawed = a.ReclaimEpoch
	}
	var gone []parted
	if x := s.Do.GetLoseMembers(); x != nil {
		gone = w.losable(x.NodeId)
	}
	if f := s.Do.GetFinishRecall(); f != nil {
		w.finishRecall(f)
		return
	}
	if res := w.apply(s.Do); res.Err != nil {
		w.ld.Refused(w.st, s, time.Duration(w.now))
		return
	}
	w.alone += b2i(s.Do.GetLoseMembers() != nil)
	for _, x := range gone {
		w.parted[x] = true
	}
}

func (w *World) finishRecall(f *fsmpb.FinishRecall) {
	w.freed++
	if res := w.apply(&fsmpb.Command{Op: &fsmpb.Command_FinishRecall{FinishRecall: f}}); res.Err == nil {
		w.checkRecalled(f.PgId, f.Extent)
	}
}

// takeBack proposes what came back; it is logged behind what others propose meanwhile.
func (w *World) takeBack() {
	if c := w.ld.TakeBack(w.st, time.Duration(w.now)); c != nil {
		w.backs = append(w.backs, c)
	}
}

// applyBack carries out the first of what takeBack proposed.
func (w *World) applyBack() {
	c := w.backs[0]
	w.backs = w.backs[1:]
	w.apply(c)
}

// command is what an operator's wish asks for, nil if it cannot begin now.
func (w *World) command(a Act) *fsmpb.Command {
	q := &fsmpb.StartJob{Reason: "an operator asked for it"}
	switch a.Kind {
	case Drain:
		return &fsmpb.Command{Op: &fsmpb.Command_DrainNode{DrainNode: &fsmpb.DrainNode{NodeId: a.ID + 1}}}
	case Split, Migrate:
		q.Kind, q.ShardId, q.TargetPgId, q.Split = dirpb.JobKind_JOB_MOVE, a.ID, a.To, a.Kind == Split
		if w.st.Shard(a.ID) == nil {
			return nil
		}
	case Grow:
		q.Kind, q.ShardId, q.Segments = dirpb.JobKind_JOB_MOVE, a.ID, a.To
		if w.st.Shard(a.ID) == nil {
			return nil
		}
	case Recall:
		q.Kind, q.PgId, q.Extents, q.InPlace = dirpb.JobKind_JOB_RECALL, a.ID, []uint32{a.To}, w.cfg.InPlace
		if w.cfg.Emptied > 0 {
			q.WindowUnit, q.WindowUnits = uint32(w.heapLo), w.cfg.Emptied
		}
	case Scrub:
		q.Kind, q.PgId, q.Repair, q.Reason = dirpb.JobKind_JOB_SCRUB, a.ID, true, lead.ReasonRepair
	}
	if w.ld.Busy(w.st, q, time.Duration(w.now)) != "" {
		return nil
	}
	return &fsmpb.Command{Op: &fsmpb.Command_StartJob{StartJob: q}}
}

// silent reports whether somebody's lease would run out if time passed.
func (w *World) silent() bool {
	for _, c := range w.cls {
		if (c.life != live || c.paused) && !c.ranOut && w.st.Life(c.id) == dirpb.SessionLife_SESSION_LIVE {
			return true
		}
	}
	for _, n := range w.nodes {
		if m := w.st.Node(n.id); n.mute() && !n.ranOut && m != nil && m.State == dirpb.NodeState_NODE_UP &&
			m.Incarnation == n.inc {
			return true
		}
	}
	return false
}

// passTime lets a lease pass, in steps that no leader takes for a time in which it stood
// still itself. All that are well renew theirs meanwhile, without any news.
func (w *World) passTime() {
	var kept []lead.Step // that a leader would not give again
	for range 5 {
		w.now += lease / 100 * 23
		for _, c := range w.cls {
			switch {
			case !c.able():
				c.ranOut = true
			case w.st.Life(c.id) == dirpb.SessionLife_SESSION_LIVE:
				w.ld.Heard(w.st, time.Duration(w.now), c.id)
			}
		}
		for _, n := range w.nodes {
			if n.mute() {
				n.ranOut = true
			} else {
				w.ld.Heartbeat(w.st, time.Duration(w.now), n.id, n.inc, nil)
			}
		}
		w.due = w.ld.Plan(w.st, time.Duration(w.now))
		for _, s := range w.due {
			if s.Do.GetStartJob() != nil {
				kept = append(kept, s)
			}
		}
	}
	for _, c := range w.cls {
		if c.able() && w.st.Life(c.id) == dirpb.SessionLife_SESSION_LIVE {
			c.core.EndRenew(0, 0, 0, w.now+lease)
		}
	}
	w.due = slices.DeleteFunc(w.due, func(s lead.Step) bool { return s.Do.GetStartJob() != nil })
	w.due = append(w.due, kept...)
	w.touch()
	w.stale = len(w.due) == 0
}

// directoryChanged looks at the chains anew.
func (w *World) directoryChanged() {
	w.effects++
	old := w.chains
	w.chains = map[uint32][]*region{}
	epoch, _ := w.ld.Epochs()
	for _, r := range w.regions {
		if r.used = false; r.copied {
			r.copied, r.left = false, epoch
		}
	}
	w.recalls = false
	for _, m := range w.st.Nodes() {
		if m.State == dirpb.NodeState_NODE_DOWN {
			w.gone[m.Incarnation] = true
		} else if w.gone[m.Incarnation] {
			w.fail(fmt.Errorf("memory node %s, which was declared lost, is back with what it held", m.Name))
		}
	}
	for _, pg := range w.st.PGs(1) {
		w.recalls = w.recalls || len(pg.Recalled) > 0
		for _, m := range append(pg.Members[:len(pg.Members):len(pg.Members)], pg.Planned) {
			if m != nil && w.parted[parted{pg.Id, m.NodeId, m.Incarnation, m.Since}] {
				w.fail(fmt.Errorf("what m%d has of placement group %d, which went on without it, is a region of it "+
					"again", m.NodeId-1, pg.Id))
			}
		}
		for _, m := range pg.Members {
			r := w.nodes[m.NodeId-1].regions[pg.Id]
			if r == nil || r.inc != m.Incarnation || r.since != m.Since {
				if pg.State == dirpb.PGState_PG_ACTIVE || pg.State == dirpb.PGState_PG_FROZEN {
					// Its memory is gone, and the directory does not know yet.
					r = w.lostRegion(pg.Id, m)
				}
			}
			if r != nil {
				r.used = true
				w.chains[pg.Id] = append(w.chains[pg.Id], r)
			}
		}
		if o := old[pg.Id]; len(o) > 0 && len(w.chains[pg.Id]) > 0 && !slices.Contains(o, w.chains[pg.Id][0]) {
			// Empty again: places have no past.
			for p := range w.unlinked {
				if p.pg == pg.Id {
					delete(w.unlinked, p)
				}
			}
		}
	}
	w.checkChains()
	for _, pg := range w.st.PGs(1) {
		for _, r := range w.chains[pg.Id] {
			if r.known == 0 {
				r.known = w.st.MapVersion()
			}
		}
		for _, r := range w.copies(pg.Id) {
			if !r.copied {
				w.checkRejoined(r)
			}
			r.copied = true
		}
		if c := w.chains[pg.Id]; pg.State == dirpb.PGState_PG_ACTIVE && pg.Joining && len(c) > 1 &&
			c[len(c)-1].unproven {
			w.checkRetained(c[len(c)-2], c[len(c)-1])
		}
	}
}

// lostRegion finds the region of a member whose memory is gone.
func (w *World) lostRegion(pg uint32, m *dirpb.Member) *region {
	for _, r := range w.regions {
		if r.pg == pg && r.node.id == m.NodeId && r.inc == m.Incarnation && r.since == m.Since {
			return r
		}
	}
	return nil
}

// chain is a placement group's regions, head first, a joiner last.
func (w *World) chain(pg uint32) []*region { return w.chains[pg] }

// copies is the chain without a joiner.
func (w *World) copies(pg uint32) []*region {
	c := w.chains[pg]
	if w.st.PG(pg).GetJoining() && len(c) > 0 {
		return c[:len(c)-1]
	}
	return c
}

// mayLose reports whether every placement group keeps a copy if a memory node is lost.
func (w *World) mayLose(n *node) bool {
	for _, pg := range w.st.PGs(1) {
		if pg.State != dirpb.PGState_PG_ACTIVE && pg.State != dirpb.PGState_PG_FROZEN {
			return false
		}
		has, left := false, 0
		members := pg.Members
		if pg.Joining {
			members = members[:len(members)-1]
		}
		for _, m := range members {
			o := w.nodes[m.NodeId-1]
			switch {
			case o == n:
				has = true
			case !o.mute() && !o.ranOut && o.inc == m.Incarnation && !w.aboutToFall(o):
				left++
			}
		}
		if has && left == 0 && !w.cfg.LastCopy {
			return false
		}
	}
	return true
}

// mayRestart reports whether every placement group keeps a copy if the process of a memory node ends: another one that
// stays, or all that there are, since the directory waits for the last, unless that is a cache's.
func (w *World) mayRestart(n *node) bool {
	if ok := w.mayLose(n); ok || w.cfg.Cache {
		return ok
	}
	for _, pg := range w.st.PGs(1) {
		members := pg.Members
		if pg.Joining {
			members = members[:len(members)-1]
		}
		if !slices.ContainsFunc(members, func(m *dirpb.Member) bool { return m.NodeId == n.id }) {
			continue
		}
		for _, m := range members {
			if o := w.nodes[m.NodeId-1]; o.crashed || o.deaf || o.inc != m.Incarnation || w.aboutToFall(o) {
				return false
			}
		}
	}
	return true
}

// aboutToFall reports whether the directory has decided that a memory node is down.
func (w *World) aboutToFall(n *node) bool {
	return slices.ContainsFunc(w.due, func(s lead.Step) bool {
		return s.Do.GetNodeDown().GetNodeId() == n.id || s.Do.GetLoseMembers().GetNodeId() == n.id
	})
}

// loseCopies loses all memory nodes but so many that each placement group keeps one copy.
func (w *World) loseCopies() {
	w.traceLine("      all copies but one are lost")
	at := int(w.histSum>>8) % len(w.nodes)
	for i := range w.nodes {
		if n := w.nodes[(at+i)%len(w.nodes)]; w.mayLose(n) {
			w.do(choice{kind: chNodeCrash, c: -1, node: uint32(n.i)})
		}
	}
	for range 3 {
		w.do(choice{kind: chTick, c: -1})
		w.runAllowed(func(ch choice) bool {
			return ch.kind < faults && ch.kind != chRenewSend && ch.kind != chAct && ch.kind != chAdvance
		})
	}
}

// scannedExtent notes that the scan of a recall is done.
func (w *World) scannedExtent(j *dirpb.Job) {
	for _, x := range j.Extents {
		w.scannedAt[place{j.PgId, x}] = w.step
		w.checkScanned(j.PgId, x)
	}
}

// homeOf is the group of a region that an index offset lies in, from the region's start.
func homeOf(off uint64) uint64 {
	return layout.RegionPageSize + (off-layout.RegionPageSize)/layout.GroupSize*layout.GroupSize
}
