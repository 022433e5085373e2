package repair

import (
	"fmt"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/layout"
)

// abandon undoes a move whose child was lost. MOVED records went with it; FROZEN ones were never changed there.
//
// FROZEN words come first, since readers may still hit them: each gets a fresh place, so that it becomes LIVE under
// another word than before. MOVED words become EMPTY, and count as lost. SPLIT goes last, as in a Clean.
func (o *Op) abandon() index.Action {
	w := &o.work
	var frozen []*item
	for i := range w.groups {
		for j := range layout.GroupSlots {
			x, ref := o.image(i, 0).Slot(j), wordRef{w.groups[i], uint8(j)}
			if x.State() != layout.Frozen || i == 1 && !w.header.OVF() {
				continue
			}
			if err := o.inHeap(ref, x); err != nil {
				return o.Finish(err)
			}
			frozen = append(frozen, &item{wordRef: ref, x: x})
		}
	}
	w.items = frozen
	return o.fetch(frozen, 0, o.gotMoving, func() index.Action {
		// The same word LIVE again would be one that somebody may remember.
		return o.replace(w.mine(), func() index.Action {
			for _, it := range w.mine() {
				if !it.done {
					return o.Finish(fmt.Errorf("%s: changed while it was FROZEN", o.where(it.wordRef)))
				}
			}
			return o.abandonMoved()
		})
	})
}

func (o *Op) abandonMoved() index.Action {
	w := &o.work
	return o.emptyWords(o.movedWords(), true, o.deleted, func() index.Action {
		for i := range w.swings {
			if w.swings[i].won {
				o.Work.Lost++
			}
		}
		return o.publishSwings(func() index.Action {
			o.unlinkFreed()
			return o.syncWords(w.behind, o.clearSplit)
		})
	})
}
