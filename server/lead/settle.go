package lead

import (
	"slices"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// ReasonSettle of a SETTLE job, for people.
const ReasonSettle = "sessions ended with status words in use"

// settleOrphans begins to go through placement groups of namespaces in which sessions have ended with status words in
// use: each that may have intents of theirs. Somebody may wait for such an intent, a job of the placement group among
// them. Sessions that end meanwhile wait for the next time, which leaves other jobs their turn.
func (p *plan) settleOrphans() {
	var deaths map[uint32]uint64 // by namespace: the last one whose words are not free
	for _, pg := range p.pgs {
		if dead := p.s.Heap(pg.Id).GetStatusDead(); len(dead) > 0 {
			if deaths == nil {
				deaths = make(map[uint32]uint64)
			}
			deaths[pg.NamespaceId] = max(deaths[pg.NamespaceId], dead[len(dead)-1].Died)
		}
	}
	if deaths == nil {
		return
	}
	for _, pg := range p.pgs {
		if !p.s.Unsettled(pg, deaths[pg.NamespaceId]) {
			continue
		}
		if slices.ContainsFunc(p.jobs[pg.Id], func(j *dirpb.Job) bool { return j.Kind == dirpb.JobKind_JOB_SETTLE }) {
			p.l.settling[pg.Id] = p.now
			continue
		}
		last, before := p.l.settling[pg.Id]
		if before && p.now < last+p.l.pause(0) || p.taken[pg.Id] || p.l.paused[pg.Id] != 0 || p.changing(pg) != "" ||
			slices.ContainsFunc(pg.Members, p.stops) {
			continue
		}
		p.l.settling[pg.Id] = p.now
		p.start(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_SETTLE, PgId: pg.Id, Reason: ReasonSettle}, pg.Id)
	}
}
