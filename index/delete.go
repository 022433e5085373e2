package index

import (
	"github.com/kvd-project/kvd/internal/layout"
)

func (o *Op) casDelete() Action {
	if o.x.State() == layout.Frozen && !o.isSettled() {
		return o.isFrozen()
	}
	if o.env.Deleting(o) {
		// The EMPTY word tells sessions apart, not the operations of one: if both lost
		// their completions, both would take it for their own.
		return o.again(Backoff)
	}
	o.n = o.x.Delete(o.env.Session())
	o.begin()
	return o.casSlot()
}
