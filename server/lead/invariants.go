package lead

import (
	"github.com/kvd-project/kvd/internal/invariants"
	"github.com/kvd-project/kvd/server/fsm"
)

// check asserts what holds of a leader between two calls. Sessions that were closed may not be forgotten yet.
func (l *Leader) check(s *fsm.State) {
	a := func(ok bool, what string, id uint32) { invariants.Assert(ok, "directory: %s (session %d)", what, id) }
	v := s.MapVersion()
	for id, x := range l.sessions {
		a(x.report <= l.epoch, "a report of a reclaim epoch to come", id)
		a(x.acked <= v, "an acknowledgement of a map to come", id)
		a(x.quiesced >= x.acked, "acknowledged more than quiesced", id)
		a(x.quiesced <= v, "quiesced under a map to come", id)
		a(!x.readOnly || len(x.queue) == 0, "memory on its way to a reader", id)
		a(x.namespace != 0, "a session of no namespace", id)
		for _, p := range x.queue {
			a(p.units > 0, "an empty place on its way", id)
		}
	}
	epoch, least := l.Epochs()
	a(least <= epoch, "a minimum above E", 0)
	a(s.Meta().EpochCeiling == 0 || epoch <= s.Meta().EpochCeiling, "E above what is reserved", 0)
}
