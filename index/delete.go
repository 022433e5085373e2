package index

import (
	"github.com/kvd-project/kvd/internal/layout"
)

func (o *Op) casDelete() Action {
	if o.x.State() == layout.Frozen && !o.isSettled() {
		return o.isFrozen()
	}
	o.n = o.x.Delete(o.env.Session())
	o.begin()
	return o.casSlot()
}
