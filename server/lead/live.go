package lead

import "github.com/kvd-project/kvd/server/fsm"

// live is how many units of a placement group hold records, by the last account.
func (l *Leader) live(s *fsm.State, pg uint32) (units uint64) {
	if n, ok := l.liveUnits[pg]; ok {
		return n
	}
	if m := l.memories[pg]; m != nil && m.generation == s.PG(pg).GetGeneration() {
		return m.account.Live
	}
	return 0
}
