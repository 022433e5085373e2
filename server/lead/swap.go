package lead

import (
	"slices"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
)

// swapPart: a swapPart-th of a namespace's placement groups, and at least one, get another member in place of one that
// drains at a time. Operations are slower meanwhile, where they meet words that the joiner lacks and while the group is
// frozen to let the other one go; so that is never so for many keys at once.
const swapPart = 8

// After a freeze none begins for restTimes as long, and restMost at most, so that of 100 operations less than one meets
// any, also where only two begin.
const (
	restTimes = 256
	restMost  = 10 * time.Second
)

func (p *plan) noteFreezes() {
	for _, pg := range p.pgs {
		since, was := p.l.frozen[pg.Id]
		switch is := pg.State == dirpb.PGState_PG_FROZEN; {
		case is && !was:
			p.l.frozen[pg.Id] = p.now
		case was && !is:
			delete(p.l.frozen, pg.Id)
			p.l.rests[pg.NamespaceId] = max(p.l.rests[pg.NamespaceId], p.now+min(restTimes*(p.now-since), restMost))
		}
	}
}

// maySwap reports whether one more placement group of a namespace may begin to get another member in place of one that
// drains.
func (p *plan) maySwap(ns uint32) bool {
	if p.now < p.l.rests[ns] {
		return false
	}
	want := int(p.s.Namespace(ns).GetReplicas())
	all, swaps := 0, 0
	for _, pg := range p.pgs {
		if pg.NamespaceId != ns {
			continue
		}
		all++
		if pg.State == dirpb.PGState_PG_LOST || slices.ContainsFunc(p.jobs[pg.Id], p.troubled) {
			continue
		}
		begun := pg.Planned != nil || p.joins[pg.Id] != 0
		if begun && len(pg.Members) >= want || len(pg.Members) > want || pg.Leaving != nil {
			swaps++
		}
	}
	return swaps < max(1, all/swapPart)
}

// troubled reports whether a job's janitor has reported that it cannot go on.
func (v *view) troubled(j *dirpb.Job) bool {
	return v.l.jobs[j.Id] != nil && v.l.jobs[j.Id].trouble != ""
}
