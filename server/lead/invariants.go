package lead

import (
	"maps"
	"math"
	"slices"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/invariants"
	"github.com/kvd-project/kvd/server/fsm"
)

// check asserts what holds of a leader between two calls. Sessions that were closed may not be forgotten yet.
func (l *Leader) check(s *fsm.State) {
	a := func(ok bool, what string, id uint32) { invariants.Assert(ok, "directory: %s (session %d)", what, id) }
	v := s.MapVersion()
	for id, x := range l.sessions.all() {
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
	if problem := l.checkBooks(s); problem != "" {
		a(false, problem, 0)
	}
	a(s.Meta().EpochCeiling == 0 || epoch <= s.Meta().EpochCeiling, "E above what is reserved", 0)
}

// checkBooks compares the books of sessions with counting anew, and says what differs.
func (l *Leader) checkBooks(s *fsm.State) string {
	_, changes, _ := s.ChangedSessions(0)
	var reports tally
	all, resting, writers, leased := make(map[uint32]*votes), make(map[uint32]*session), make(map[uint32]*session), 0
	for id, x := range l.sessions.all() {
		switch live := s.Life(id) == dirpb.SessionLife_SESSION_LIVE; {
		case x.id != id:
			return "a session under another's id"
		case changes == l.changes && x.votes != live:
			return "a vote of a session that does not live, or none of one that does"
		}
		reports.add(x.report)
		if x.votes {
			v := all[x.namespace]
			if v == nil {
				v = &votes{}
				all[x.namespace] = v
			}
			v.n++
			v.acked.add(x.acked)
			v.quiesced.add(x.quiesced)
		}
		if x.quiet {
			resting[id] = x
		}
		if !x.readOnly {
			writers[id] = x
		}
		if x.leased {
			leased++
		}
	}
	last := time.Duration(math.MinInt64)
	for x := l.leases.first; x != nil; x = x.behind {
		if leased--; l.sessions.of(x.id) != x || x.expires < last {
			return "a lease of no session, or out of order"
		}
		last = x.expires
	}
	switch {
	case leased != 0:
		return "leases that are not in order"
	case !slices.Equal(reports.rows, l.reports.rows):
		return "reports that do not add up"
	case !maps.EqualFunc(all, l.votes, func(a, b *votes) bool {
		return a.n == b.n && slices.Equal(a.acked.rows, b.acked.rows) && slices.Equal(a.quiesced.rows, b.quiesced.rows)
	}):
		return "votes that do not add up"
	case !maps.Equal(resting, l.resting):
		return "sessions that rest and are not known to"
	case !maps.Equal(writers, l.writers):
		return "sessions that may hold memory and are not known to"
	}
	return ""
}
