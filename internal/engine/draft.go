package engine

import (
	"sync"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/layout"
)

// drafts are the session's values on their way. Each is told of a map before any lane goes by that; a view therefore
// waits for its lock.
type drafts struct {
	sync.Mutex
	all  map[*index.Draft]struct{}
	pgOf func(id uint32) *index.PG // of the map in force, nil before the first
}

// tell has the drafts judge themselves by v.
func (x *drafts) tell(v *View) {
	x.Lock()
	defer x.Unlock()
	x.pgOf = func(id uint32) *index.PG {
		if p := v.PG(id); p != nil {
			return &p.PG
		}
		return nil
	}
	for d := range x.all {
		d.Check(x.pgOf)
	}
}

// Gather makes d, a new one, known to the session, until Forget or GiveUp. Puts with it are of this session alone.
func (c *Core) Gather(d *index.Draft) {
	d.Guard = new(sync.Mutex)
	c.drafts.Lock()
	defer c.drafts.Unlock()
	if c.drafts.all == nil {
		c.drafts.all = make(map[*index.Draft]struct{})
	}
	c.drafts.all[d] = struct{}{}
	if c.drafts.pgOf != nil {
		d.Check(c.drafts.pgOf)
	}
}

// Forget takes leave of a draft in which nothing rests any more.
func (c *Core) Forget(d *index.Draft) {
	c.drafts.Lock()
	defer c.drafts.Unlock()
	delete(c.drafts.all, d)
}

// GiveUp has a lane take back what rests in d. A Put with d that is still under way leaves nothing there any more.
func (c *Core) GiveUp(d *index.Draft) {
	l := c.lanes[0]
	l.Deliver(func(l *Lane) { l.TakeBack(d) })
	l.Visit()
}

// GiveUpAll is GiveUp of all drafts, at once. The caller owns the lane.
func (l *Lane) GiveUpAll() {
	l.core.drafts.Lock()
	all := make([]*index.Draft, 0, len(l.core.drafts.all))
	for d := range l.core.drafts.all {
		all = append(all, d)
	}
	l.core.drafts.Unlock()
	for _, d := range all {
		l.TakeBack(d)
	}
}

// TakeBack makes places free that rest in d, for good. d is told of recalls until then, and afterwards the lane forgets
// what a map recalls, when it goes by that. The caller owns the lane.
func (l *Lane) TakeBack(d *index.Draft) {
	d.Drop(func(pg *index.PG, w layout.Word) { l.unuse(pg, w) })
	l.core.Forget(d)
}

// rests is how much memory of a placement group rests in drafts, units.
func (x *drafts) rests(pg, generation uint32) (units uint64) {
	x.Lock()
	defer x.Unlock()
	for d := range x.all {
		units += d.Rests(pg, generation)
	}
	return units
}
