package engine

import (
	"slices"

	"github.com/kvd-project/kvd/internal/invariants"
)

// check asserts what holds of a lane between two turns of its owner.
func (l *Lane) check() {
	a := func(ok bool, what string) {
		invariants.Assert(ok, "session %d lane %d: %s", l.core.opts.Session, l.id, what)
	}
	a(len(l.ran) == 0, "chains executed and not ended")
	a(len(l.ready) == 0, "operations that could go on")
	waiting, posted := 0, 0
	for i, t := range l.active {
		a(t.lane == l && t.activeAt == i, "an operation that stands elsewhere")
		switch t.state {
		case taskWaiting:
			waiting++
			a(t.want != 0, "waits for nothing")
			a(slices.Contains(l.wait, t), "waits and nobody wakes it")
		case taskPosted:
			posted++
			a(t.pending != 0, "posted, and its round is over")
			a((t.pg != nil || t.flight != nil) && t.postView != 0, "posted under no map")
			a(t.postView <= l.view.Version, "posted under a map to come")
			a(len(t.Op.Accesses) > 0 || t.flight != nil && t.flight.n > 0, "posted nothing")
			a(t.flight == nil || t.asked == nil && t.flight.used <= taskSlot, "a flight that is an operation, too")
		default:
			a(false, "neither waits nor is posted")
		}
		a(t.epoch <= l.core.epoch.Load(), "began in a reclaim epoch to come")
		a(t.used <= taskSlot, "more buffer than it has")
	}
	a(waiting == len(l.wait), "waits and is not under way")
	a(len(l.active)+len(l.idle) <= len(l.tasks), "more tasks than there are")
	for _, t := range l.idle {
		a(t.state == taskIdle && t.Done == nil && t.flight == nil && len(t.big) == 0,
			"idle, with what is left of an operation")
	}
	if l.view != nil {
		acked, quiesced := l.acked.Load(), l.quiesced.Load()
		a(acked <= quiesced, "acknowledged more than it has quiesced")
		a(quiesced <= l.view.Version, "acknowledged a map that it has not seen")
	}
	a(l.released <= l.core.releasable.Load(), "released more than it may")
	for c := range l.all {
		main := l.conns[c.node]
		a(main == c || main.bulk == c && c.main == main, "a connection under another node's number")
		a(c == main || !c.up || main.up && c.incarnation == main.incarnation, "a second queue pair without the first")
		a(c != main || !c.up || c.bulk == nil || c.bulk.qp == nil || c.bulk.up || c.bulk.seq == 0,
			"the first queue pair is used, and of the second one something may still land")
		a(!c.up || c.qp != nil, "a connection that is up without a queue pair")
		a(!c.queued || slices.Contains(l.dirty, c), "work requests that nobody posts")
		a(c.queued || len(c.wrs) == 0, "work requests of a connection that has none")
		a(c.boarding == nil, "a flight that has not left")
		a(c.queued || len(c.chains) == 0, "chains without work requests")
		for i := range c.noWait {
			a(i == 0 || c.noWait[i-1].seq <= c.noWait[i].seq, "accesses off the path out of order")
		}
	}
	for id, m := range l.mem {
		if m == nil {
			continue
		}
		a(m.ready <= l.core.releasable.Load(), "memory out of limbo too early")
		a(m.flow != nil && m.cache != nil, "memory without an account")
		if v := l.view; v != nil && v.PG(uint32(id)) != nil {
			a(m.generation <= v.PG(uint32(id)).Generation || l.core.View() != v, "memory of a generation to come")
		}
	}
}

// check asserts that t, with which what is about to be done, is in one of states.
func (t *Task) check(what string, states ...taskState) {
	invariants.Assert(slices.Contains(states, t.state), "engine: a task in state %d is to %s", t.state, what)
	invariants.Assert(t.state != taskIdle || t.pending == 0, "engine: an idle task with verbs under way")
}
