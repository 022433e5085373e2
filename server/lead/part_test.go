package lead

import (
	"errors"
	"testing"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// goodbye says that a memory node is about to stop.
func (w *world) goodbye(node uint32) {
	w.t.Helper()
	w.apply(&fsmpb.Command{
		Op: &fsmpb.Command_LeaveNode{
			LeaveNode: &dirpb.LeaveNodeRequest{NodeId: node, Incarnation: w.s.Node(node).Incarnation}}})
}

// A memory node that says goodbye leaves its chains as one that drains does, is given nothing,
// and is down when sessions have let go of it.
func TestGoodbye(t *testing.T) {
	w := newWorld(t)
	w.nodes(3, 8)
	ns := w.create("n", 2, 4)
	w.open(ns)
	w.on(1, dirpb.PGState_PG_ACTIVE, 1, 2)
	w.on(2, dirpb.PGState_PG_ACTIVE, 2, 3)
	w.on(3, dirpb.PGState_PG_ACTIVE, 3, 1)
	if !w.l.MayLeave(w.s, w.now, 2) {
		t.Error("idle placement groups hold a memory node up")
	}
	w.goodbye(2)
	w.want() // operations may be under way
	w.ack()
	w.want(`group 1: memory node "m2" leaves: it is about to stop`,
		`group 2: memory node "m2" leaves: it is about to stop`)
	w.on(1, dirpb.PGState_PG_FROZEN, 1)
	w.goodbye(2) // told twice
	w.want()     // a session may have verbs under way to it
	w.ack()
	w.want(`group 1: every session has quiesced`, `group 2: every session has quiesced`)
	w.want(`"m2" is down: it said goodbye`)
	w.ack()
	w.want(`group 1: memory node "m3" is to join`, `group 2: memory node "m1" is to join`)
}

// It is told of a placement group's last copy at once, since that is lost anyhow, and never
// waits for long.
func TestGoodbyeOfLastCopies(t *testing.T) {
	w := newWorld(t)
	w.nodes(1, 8)
	w.create("n", 1, 1)
	w.on(1, dirpb.PGState_PG_ACTIVE, 1)
	w.goodbye(1)
	w.want(`"m1" is down: it said goodbye`)
	w.on(1, dirpb.PGState_PG_LOST, 1)
}

// A placement group that has other things to do does not hold it up for longer than a lease.
func TestGoodbyeIsBounded(t *testing.T) {
	w := newWorld(t)
	w.nodes(2, 8)
	ns := w.create("n", 2, 1)
	w.open(ns)
	for pg := range uint32(2) {
		w.start(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_SCRUB, PgId: pg + 1, Reason: ReasonLook})
	}
	if w.l.MayLeave(w.s, w.now, 2) {
		t.Error("placement groups with jobs do not hold a memory node up")
	}
	w.goodbye(2)
	w.want()
	w.now += min(lease, maxLeaving) + 1
	w.beat()
	w.want(`"m2" is down: it said goodbye`)
}

// While a memory node waits for sessions nothing else begins on its placement groups.
func TestGoodbyeGoesFirst(t *testing.T) {
	w := newWorld(t)
	w.nodes(2, 8)
	ns := w.create("n", 2, 1)
	w.open(ns)
	w.goodbye(2)
	p := w.l.plan(w.s, w.now)
	for _, pg := range p.pgs {
		if p.free(pg) {
			t.Errorf("placement group %d may change otherwise", pg.Id)
		}
	}
}

// A process that the directory does not know has nothing to say.
func TestGoodbyeOfAStranger(t *testing.T) {
	w := newWorld(t)
	w.nodes(2, 8)
	for _, q := range []*dirpb.LeaveNodeRequest{{NodeId: 2, Incarnation: w.s.Node(2).Incarnation + 1},
		{NodeId: 9, Incarnation: 1}} {
		if r := w.try(&fsmpb.Command{Op: &fsmpb.Command_LeaveNode{LeaveNode: q}}); !errors.Is(r.Err, fsm.ErrNotFound) {
			t.Errorf("goodbye %v: %v, want ErrNotFound", q, r.Err)
		}
	}
	w.want()
}
