package lead

import (
	"cmp"
	"slices"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/server/fsm"
)

// The leader keeps books of its sessions, so that neither a renewal nor a plan walks all of them: how many
// report each reclaim epoch, what those of a namespace have acknowledged, in which order leases run
// out, which sessions rest and which may hold memory. Builds with invariants compare them with counting anew.

// tally counts values, of which few differ. The zero value is empty.
type tally struct {
	rows []tallyRow // by value
}

type tallyRow struct {
	value uint64
	n     int // above 0
}

func (t *tally) find(v uint64) (int, bool) {
	if n := len(t.rows); n > 0 && t.rows[n-1].value == v {
		return n - 1, true // as nearly always
	}
	return slices.BinarySearchFunc(t.rows, v, func(r tallyRow, v uint64) int { return cmp.Compare(r.value, v) })
}

func (t *tally) add(v uint64) {
	i, ok := t.find(v)
	if !ok {
		t.rows = slices.Insert(t.rows, i, tallyRow{value: v})
	}
	t.rows[i].n++
}

func (t *tally) remove(v uint64) {
	i, ok := t.find(v)
	if !ok {
		return
	}
	if t.rows[i].n--; t.rows[i].n == 0 {
		t.rows = slices.Delete(t.rows, i, i+1)
	}
}

func (t *tally) move(from, to uint64) {
	if from != to {
		t.add(to)
		t.remove(from)
	}
}

// least is the least value, most if there is none.
func (t *tally) least(most uint64) uint64 {
	if len(t.rows) == 0 {
		return most
	}
	return t.rows[0].value
}

// votes are what the sessions of a namespace that are live, and that the leader knows, have acknowledged and quiesced.
type votes struct {
	n               uint32
	acked, quiesced tally
}

// leases are the sessions that have one, in the order in which it runs out: all are as long, so those that
// renew go behind the others.
type leases struct{ first, last *session }

func (q *leases) push(x *session) {
	if x.before = q.last; x.before == nil {
		q.first = x
	} else {
		x.before.behind = x
	}
	q.last, x.leased = x, true
}

func (q *leases) remove(x *session) {
	if !x.leased {
		return
	}
	if x.before == nil {
		q.first = x.behind
	} else {
		x.before.behind = x.behind
	}
	if x.behind == nil {
		q.last = x.before
	} else {
		x.behind.before = x.before
	}
	x.before, x.behind, x.leased = nil, nil, false
}

// enterSession takes up a session, in the place of what was known of it.
func (l *Leader) enterSession(s *fsm.State, x *session, now time.Duration) {
	l.forgetSession(x.id)
	l.sessions.put(x)
	if !x.readOnly {
		l.writers[x.id] = x
	}
	l.reports.add(x.report)
	l.heard(x, now)
	l.vote(s, x.id)
}

func (l *Leader) forgetSession(id uint32) {
	x := l.sessions.of(id)
	if x == nil {
		return
	}
	l.sessions.remove(id)
	delete(l.writers, id)
	l.reports.remove(x.report)
	l.leases.remove(x)
	l.rest(x, false)
	l.unvote(x)
}

func (l *Leader) heard(x *session, now time.Duration) {
	x.expires, x.heard = now+l.opts.Lease, now
	l.leases.remove(x)
	l.leases.push(x)
}

// reported notes the reclaim epoch that a session counts with.
func (l *Leader) reported(x *session, epoch uint64) {
	l.reports.move(x.report, epoch)
	x.report = epoch
}

func (l *Leader) acknowledged(x *session, acked, quiesced uint64) {
	if x.votes {
		v := l.votes[x.namespace]
		v.acked.move(x.acked, acked)
		v.quiesced.move(x.quiesced, quiesced)
	}
	x.acked, x.quiesced = acked, quiesced
}

func (l *Leader) rest(x *session, quiet bool) {
	if x.quiet == quiet {
		return
	}
	if x.quiet = quiet; quiet {
		l.resting[x.id] = x
	} else {
		delete(l.resting, x.id)
	}
}

// catchUp takes in which sessions began, began to be fenced or ended.
func (l *Leader) catchUp(s *fsm.State) {
	ids, now, ok := s.ChangedSessions(l.changes)
	if ok && now == l.changes {
		return // as nearly always
	}
	l.changes = now
	if !ok {
		for id := range l.sessions.all() {
			ids = append(ids, id)
		}
		for _, y := range s.Sessions() {
			ids = append(ids, y.Id)
		}
	}
	for _, id := range ids {
		l.vote(s, id)
	}
	l.changed = append(l.changed, ids...)
}

// vote counts what a session has acknowledged, if it lives.
func (l *Leader) vote(s *fsm.State, id uint32) {
	x := l.sessions.of(id)
	if x == nil {
		return
	}
	if s.Life(id) != dirpb.SessionLife_SESSION_LIVE {
		l.unvote(x)
		return
	}
	if x.votes {
		return
	}
	v := l.votes[x.namespace]
	if v == nil {
		v = &votes{}
		l.votes[x.namespace] = v
	}
	v.n++
	v.acked.add(x.acked)
	v.quiesced.add(x.quiesced)
	x.votes = true
}

func (l *Leader) unvote(x *session) {
	if !x.votes {
		return
	}
	v := l.votes[x.namespace]
	v.n--
	v.acked.remove(x.acked)
	v.quiesced.remove(x.quiesced)
	if x.votes = false; v.n == 0 {
		delete(l.votes, x.namespace)
	}
}

// lapsed are the sessions whose leases have run out by now, the longest silent first.
func (l *Leader) lapsed(now time.Duration) func(func(*session) bool) {
	return func(yield func(*session) bool) {
		for x := l.leases.first; x != nil && (x.expired || now > x.expires); {
			next := x.behind
			if !yield(x) {
				return
			}
			x = next
		}
	}
}
