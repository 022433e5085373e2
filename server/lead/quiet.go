package lead

import (
	"slices"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/server/fsm"
)

// Sessions that nobody waits for are quiet: they renew their lease only as often as that
// takes, and are called as soon as somebody waits for what they report. Somebody does if
// places are in limbo, or an extent that was scanned is to be free, until the least reported
// reclaim epoch is greater than the one noted for it; if a place is on its way home; if
// memory is short; and if the session shows a token of an older key than the one that signs. docs/protocol.md, "Quiet
// sessions".

// quietMost is the longest that a session is quiet, however long the lease: it is to notice
// that it has ended.
const quietMost = 2 * time.Second

// quiet is how long a session may be silent whose renewal is being answered; 0: not longer
// than usual. A new map, or a call, has many sessions renew at once, before their turn: those get turns of different
// lengths, or they would renew all at once for ever.
func (l *Leader) quiet(now time.Duration, x *session, moved, callable bool) time.Duration {
	inTurn := x.quiet && !moved
	if l.rest(x, callable && l.opts.EpochInterval > 0 && !l.waitsFor(now, x)); !x.quiet {
		return 0
	}
	most := min(l.opts.Lease/3, quietMost)
	if inTurn {
		return most
	}
	// Multiples of the golden section are spread evenly.
	return most/4 + most*3/4*time.Duration((x.id+uint32(x.number))*0x9e3779b9>>16)>>16
}

// waitsFor reports whether anybody waits for a renewal of x.
func (l *Leader) waitsFor(now time.Duration, x *session) bool {
	return x.report <= l.awaited || len(x.queue) > 0 || l.hasty || now < l.shortUntil || l.outdated(x)
}

// await notes that somebody waits until every session reports a reclaim epoch greater than this.
func (l *Leader) await(epoch uint64) {
	if epoch <= l.awaited {
		return
	}
	if _, least := l.Epochs(); least > l.awaited {
		l.first = epoch
	}
	l.awaited = epoch
}

// Calls gives the sessions that were let be quiet and whose renewals somebody waits for by
// now; each is given once. A renewal that comes before E is greater than the first reclaim epoch that is
// awaited would bring nobody on.
func (l *Leader) Calls(now time.Duration) (ids []uint32) {
	ids = l.rushCalls()
	if _, least := l.Epochs(); least > l.awaited && !l.hasty && now >= l.shortUntil && !l.routed &&
		l.called == l.signs {
		slices.Sort(ids)
		return ids // nobody else is waited for
	}
	l.routed, l.called = false, l.signs
	for id, x := range l.resting {
		if l.waitsFor(now, x) && (x.report > l.awaited || l.epoch > l.first || l.outdated(x)) {
			l.rest(x, false)
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids
}

// Calm reports whether nothing but the end of a lease, or what sessions, memory nodes,
// janitors and operators say, can bring anything about soon.
func (l *Leader) Calm(s *fsm.State, now time.Duration) bool {
	if l.hasty || now < l.shortUntil || len(l.queue) > 0 || len(s.Rebalancing()) > 0 || len(l.paused) > 0 ||
		l.Pending() || len(s.Jobs()) > 0 {
		return false
	}
	if _, least := l.Epochs(); l.sessions.n > 0 && least <= l.awaited {
		return false
	}
	for _, n := range s.Nodes() {
		if n.Leaving || n.Draining {
			return false
		}
	}
	return !slices.ContainsFunc(s.PGs(0), func(pg *dirpb.PlacementGroup) bool {
		return pg.State != dirpb.PGState_PG_ACTIVE || pg.Joining || pg.Planned != nil || pg.Leaving != nil ||
			len(pg.Recalled) > 0
	})
}

// Lapse is when the next lease ends of those that have not ended.
func (l *Leader) Lapse(now time.Duration) (at time.Duration, ok bool) {
	note := func(expires time.Duration) {
		if expires >= now && (!ok || expires < at) {
			at, ok = expires, true
		}
	}
	for _, n := range l.nodes {
		note(n.due())
	}
	for x := l.leases.first; x != nil; x = x.behind {
		if note(x.expires); x.expires >= now {
			break // the others' end later
		}
	}
	return at, ok
}
