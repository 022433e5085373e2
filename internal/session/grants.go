package session

import (
	"fmt"
	"slices"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/internal/layout"
)

const (
	firstGrant = 1 << 14 // units: 1 MiB
	maxGrant   = layout.ExtentUnits
	// aheadShare is which part of a placement group's memory a session has free at most because it asked ahead.
	aheadShare = 8
	// aheadPause is how soon it asks ahead again if there was nothing.
	aheadPause = int64(time.Second)
)

// grant is a call under way.
type grant struct {
	view  uint64 // map version under which it was asked for
	units uint32 // of a place
	ahead bool   // no operation misses it yet
}

// WantMemory notes that an operation misses a place of that number of units.
func (a *Agenda) WantMemory(pg, units uint32) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.mu.wants[pg] = max(a.mu.wants[pg], units)
}

// Ending has no grant asked for any more, and reports whether none is under way. A session that closes before a
// grant ends loses what comes of it.
func (a *Agenda) Ending() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.mu.ending = true
	return len(a.mu.grants) == 0
}

// grantDue makes a grant that is wanted, if none is under way for the placement group.
func (a *Agenda) grantDue(pg uint32, now int64) (Ask, bool) {
	p, units := a.pg(pg), a.mu.wants[pg]
	if now < p.notUntil || !a.askable(pg) {
		return Ask{}, false
	}
	ahead := units == 0
	if units = max(units, 1); ahead && now < p.notAhead {
		delete(a.mu.wants, pg)
		return Ask{}, false
	}
	delete(a.mu.wants, pg)
	g := &grant{view: a.core.View().Version, units: units, ahead: ahead}
	a.mu.grants[pg] = g
	return Ask{Kind: AskGrant, grant: g, Ahead: ahead, Grant: &dirpb.GrantExtentRequest{SessionId: a.core.Session(),
		PgId:      pg,
		WantUnits: max(p.grow, firstGrant, units), PlaceUnits: units}}, true
}

// askable reports whether a grant may be asked for: none is under way or waits for the
// session's map, the session does not end, which has the placement group. Only an answer or a map changes that.
func (a *Agenda) askable(pg uint32) bool {
	v := a.core.View()
	return !a.mu.ending && a.mu.grants[pg] == nil && v != nil && v.PG(pg) != nil && !a.isEarly(pg)
}

func (a *Agenda) granted(q Ask, r Reply, now int64) {
	pg := q.Grant.GetPgId()
	p := a.pg(pg)
	delete(a.mu.grants, pg)
	if r.Err != nil {
		a.mu.unsure = true
		p.notUntil = now + a.o.RefusedPause
		return // renewals make those who wait ask again
	}
	if r.Grant.GetTerm() < a.mu.term {
		a.mu.unsure = true
		return // of a leadership that has ended
	}
	if len(r.Grant.GetRuns()) == 0 && q.grant.ahead {
		p.notAhead = now + aheadPause
		return
	}
	if len(r.Grant.GetRuns()) == 0 {
		p.grow, p.notUntil = q.grant.units, now+a.o.RefusedPause
		if now-p.lackedAt >= lackedFor {
			p.lacked = 0
		}
		p.lacked, p.lackedAt = max(p.lacked, q.grant.units), max(now, 1)
		if a.core.Idle(pg, r.Grant.GetComingUnits()) {
			return // a cache waits rather than evict
		}
		a.core.SetExhausted(pg, r.Grant.GetQuota())
		a.core.SetFull(pg, r.Grant.GetComingUnits() == 0)
		return
	}
	for _, x := range r.Grant.GetRuns() {
		if x.GetPgId() != pg {
			a.mu.unsure, p.notUntil = true, now+a.o.RefusedPause
			a.refuse(x, fmt.Errorf("it is of placement group %d", x.GetPgId()), pg)
			return
		}
	}
	a.core.SetFull(pg, false)
	p.grow = min(2*q.Grant.GetWantUnits(), maxGrant)
	a.mu.early = append(a.mu.early, r.Grant)
	a.takeEarly()
	for _, m := range a.core.Heaps() {
		if m.PG == pg {
			a.wantAhead(m, p)
		}
	}
}

// wantAhead wants memory before an operation misses some: one that does waits for the directory's decision, and so do
// those that are performed together with it. A session keeps as much free as it took between the last two renewals,
// since what it unlinks meanwhile comes out of limbo with a later one.
func (a *Agenda) wantAhead(m engine.Memory, p *agendaPG) {
	v := a.core.View()
	if v == nil || v.PG(m.PG) == nil || v.PG(m.PG).Generation != m.Generation || p.pace <= firstGrant ||
		a.core.Short(m.PG) || a.core.Exhausted(m.PG) {
		return
	}
	x := v.PG(m.PG)
	if m.Heap.Stats().Free >= min(p.pace, uint64(x.HeapHi-x.HeapLo)/aheadShare) {
		return
	}
	if _, wanted := a.mu.wants[m.PG]; !wanted {
		a.mu.wants[m.PG] = 0
	}
}

// notePace notes how much the session takes in the time between two renewals.
func (a *Agenda) notePace(p *agendaPG, now int64, taken uint64) {
	took := now - p.paced.at
	if p.paced.at != 0 && took < a.o.Renew/2 {
		return // in a hurry
	}
	p.pace = 0
	if took < 2*a.o.Renew {
		p.pace = taken - min(taken, p.paced.taken)
	}
	p.paced = sample{max(now, 1), taken}
}

// isEarly reports whether a grant of a placement group waits for the session's map.
func (a *Agenda) isEarly(pg uint32) bool {
	return slices.ContainsFunc(a.mu.early, func(r *dirpb.GrantExtentReply) bool { return r.Runs[0].GetPgId() == pg })
}

// isAhead reports whether a run was granted under a newer map than v, in which its
// placement group began anew or its extent is not being recalled any more.
func isAhead(v *engine.View, r *dirpb.GrantExtentReply, x *dirpb.ReturnedRun) bool {
	if v == nil || v.Version >= r.GetMapVersion() {
		return v == nil
	}
	pg := v.PG(x.GetPgId())
	return pg == nil || pg.Generation < x.GetGeneration() || pg.IsRecalled(x.GetUnit())
}

// takeEarly takes in what was granted, but for what the session's map is too old for.
func (a *Agenda) takeEarly() {
	v := a.core.View()
	a.mu.early = slices.DeleteFunc(a.mu.early, func(r *dirpb.GrantExtentReply) bool {
		if slices.ContainsFunc(r.GetRuns(), func(x *dirpb.ReturnedRun) bool { return isAhead(v, r, x) }) {
			return false
		}
		for _, x := range r.GetRuns() {
			pg := v.PG(x.GetPgId())
			if pg == nil || pg.Generation != x.GetGeneration() {
				continue
			}
			if x.GetUnit() < pg.HeapLo || uint64(x.GetUnit())+uint64(x.GetUnits()) > uint64(pg.HeapHi) {
				a.refuse(x, fmt.Errorf("it lies outside its heap [%d,%d)", pg.HeapLo, pg.HeapHi), pg.ID)
				continue
			}
			if err := a.core.AddRun(x.GetPgId(), x.GetGeneration(), x.GetUnit(), x.GetUnits()); err != nil {
				a.refuse(x, err, pg.ID)
			}
		}
		return true
	})
}

// refuse notes that a run was granted, for placement group pg, that cannot be.
func (a *Agenda) refuse(x *dirpb.ReturnedRun, why error, pg uint32) {
	a.refused.Add(uint64(x.GetUnits()))
	a.core.Broken(fmt.Errorf("grant of units [%d,+%d) of placement group %d: %w", x.GetUnit(), x.GetUnits(), pg, why))
}
