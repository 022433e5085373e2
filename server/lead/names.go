package lead

import (
	"fmt"
	"slices"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/server/fsm"
)

// rivalTime is how long a process counts as waiting for a memory node's name after it asked. Memory nodes ask again
// within two seconds.
const rivalTime = 5 * time.Second

// rival is a process that asked for a memory node's name while another process had it.
type rival struct {
	incarnation uint64
	at          string // where it listens
	asked       time.Duration
	// The owner of the name was heard after the first question, so both processes live: the rival is no restart of the
	// owner.
	both bool
	told bool // the log has it
}

// arrival is a registration that is being made part of the state.
type arrival struct {
	incarnation uint64
	calls       int
}

// TakenError refuses a memory node's name to a process, which may ask again. Nothing was changed.
type TakenError struct {
	Name string
	// Owner and Rival say where the two processes listen.
	Owner, Rival string
	// Clash says that both processes live, and New that this was not known before.
	Clash, New bool
	why        string
}

func (e *TakenError) Error() string {
	return fmt.Sprintf("the name of memory node %q is taken by another process, at %s: %s; nothing was done", e.Name,
		e.Owner, e.why)
}

// BeginArrival decides whether a process may register a memory node. EndArrival tells the arrival's end,
// unless it is refused. A process of another incarnation than the registered one has to wait until that one
// has ended, or was not heard for a lease. Else two processes with one name would have all memory of the name
// dropped in turns.
func (l *Leader) BeginArrival(s *fsm.State, now time.Duration, q *dirpb.RegisterNodeRequest) error {
	if a := l.arrivals[q.GetName()]; a != nil && a.incarnation != q.GetIncarnation() {
		return &TakenError{Name: q.GetName(), Owner: "an address that is not known yet",
			Rival: dirpb.Addresses(q.GetEndpoints()), why: "it is being registered"}
	}
	if n := s.NodeNamed(q.GetName()); n.GetState() == dirpb.NodeState_NODE_UP {
		if err := l.compete(s, now, n, q); err != nil {
			return err
		}
	}
	a := l.arrivals[q.GetName()]
	if a == nil {
		a = &arrival{incarnation: q.GetIncarnation()}
		l.arrivals[q.GetName()] = a
	}
	a.calls++
	return nil
}

// EndArrival says that a registration has become part of the state, or has failed.
func (l *Leader) EndArrival(q *dirpb.RegisterNodeRequest) {
	a := l.arrivals[q.GetName()]
	if a == nil {
		return
	}
	if a.calls--; a.calls == 0 {
		delete(l.arrivals, q.GetName())
	}
}

// compete refuses q the name of n, which is up, as long as another process may have it.
func (l *Leader) compete(s *fsm.State, now time.Duration, n *dirpb.Node, q *dirpb.RegisterNodeRequest) error {
	if n.Incarnation == q.GetIncarnation() {
		return nil // the same memory: the order of boots tells who follows whom
	}
	r := l.rivals[n.Id]
	if r == nil || r.incarnation != q.GetIncarnation() {
		r = &rival{incarnation: q.GetIncarnation()}
	}
	e := &TakenError{Name: n.Name, Owner: dirpb.Addresses(n.Endpoints), Rival: dirpb.Addresses(q.GetEndpoints()),
		Clash: r.both}
	switch {
	case l.lives(n, now) && r.both:
		e.why = "both processes live, so give one of them another name"
	case l.lives(n, now):
		e.why = "it was heard within its lease, or its end is not known yet"
	case r.both && l.keepsLast(s, n, now):
		e.why = fmt.Sprintf("it is silent, and its kept memory is waited for: start it again, or say kvctl nodes "+
			"give-up %s", n.Name)
	default:
		delete(l.rivals, n.Id)
		return nil
	}
	r.at, r.asked = e.Rival, now
	e.New, r.told = r.both && !r.told, r.told || r.both
	l.rivals[n.Id] = r
	return e
}

// lives reports whether the process of n that is registered may live: it was heard within its lease, and has not broken
// off a heartbeat without beginning another. A process that this leader has not looked at yet lives.
func (l *Leader) lives(n *dirpb.Node, now time.Duration) bool {
	x := l.nodes[n.Id]
	if x == nil || x.incarnation != n.Incarnation {
		return true
	}
	return now <= x.expires && (!x.broken || now <= x.broke+min(l.opts.Lease/4, maxPause))
}

// keepsLast reports whether n keeps its memory, has the only copy of something, and is waited for.
func (l *Leader) keepsLast(s *fsm.State, n *dirpb.Node, now time.Duration) bool {
	x := l.nodes[n.Id]
	if !n.Keeps || x == nil || x.incarnation != n.Incarnation || !l.awaits(n, now) {
		return false
	}
	copies, holds := l.newView(s, now).copies()
	return slices.ContainsFunc(holds[n.Id], func(pg uint32) bool { return copies[pg] == 1 })
}

// Beat is the number of the latest heartbeat of a memory node, for Broke.
func (l *Leader) Beat(id uint32) uint64 {
	if x := l.nodes[id]; x != nil {
		return x.beat
	}
	return 0
}

// Broke notes that the caller of a heartbeat, which Beat numbered, went away before its answer. The process
// has died, or its connection has, and then it calls again at once.
func (l *Leader) Broke(id uint32, incarnation, beat uint64, now time.Duration) {
	if x := l.nodes[id]; x != nil && x.incarnation == incarnation && x.beat == beat {
		x.broken, x.broke = true, now
	}
}

// Rival says where another process listens that wants the name of a memory node which lives; "" if there is none.
func (l *Leader) Rival(id uint32, now time.Duration) string {
	if r := l.rivals[id]; r != nil && r.both && now < r.asked+rivalTime {
		return r.at
	}
	return ""
}

// forgetRivals drops those of memory nodes that are gone, and those that ask no more.
func (l *Leader) forgetRivals(s *fsm.State, now time.Duration) {
	for id, r := range l.rivals {
		if s.Node(id) == nil || now >= r.asked+rivalTime {
			delete(l.rivals, id)
		}
	}
}
