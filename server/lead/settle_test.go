package lead

import (
	"testing"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// words grants a session a block of status words.
func (w *world) words(x, pg uint32) {
	w.t.Helper()
	w.apply(&fsmpb.Command{Op: &fsmpb.Command_GrantStatus{GrantStatus: &fsmpb.GrantStatus{SessionId: x, PgId: pg}}})
}

// kill ends a session that says nothing of its intents.
func (w *world) kill(x uint32) {
	w.t.Helper()
	w.apply(&fsmpb.Command{Op: &fsmpb.Command_CloseSession{CloseSession: &fsmpb.CloseSession{SessionId: x}}})
	w.l.Closed(w.s, w.now, x)
}

// returnWords has every session that lives give back its status words.
func (w *world) returnWords() {
	w.t.Helper()
	for _, x := range w.s.Sessions() {
		c := &fsmpb.TakeStatus{SessionId: x.Id, Number: x.StatusNumber + 1}
		for _, pg := range w.s.PGs(x.NamespaceId) {
			for _, b := range w.s.Heap(pg.Id).StatusHeld {
				c.Blocks = append(c.Blocks, &dirpb.StatusBlock{PgId: pg.Id, Generation: pg.Generation,
					Offset: b.Offset})
			}
		}
		w.apply(&fsmpb.Command{Op: &fsmpb.Command_TakeStatus{TakeStatus: c}})
	}
}

// settling is the SETTLE job of a placement group or nil.
func (w *world) settling(pg uint32) *dirpb.Job {
	for _, j := range w.s.JobsOf(pg) {
		if j.Kind == dirpb.JobKind_JOB_SETTLE {
			return j
		}
	}
	return nil
}

// end claims a placement group's SETTLE job and finishes it.
func (w *world) end(x, pg uint32) {
	w.t.Helper()
	j := w.settling(pg)
	if j == nil {
		w.t.Fatalf("placement group %d has jobs %v", pg, w.s.JobsOf(pg))
	}
	w.apply(&fsmpb.Command{Op: &fsmpb.Command_ClaimJob{ClaimJob: &fsmpb.ClaimJob{SessionId: x, JobId: j.Id}}})
	w.finish(x, j)
}

// A session that ends with status words in use has each placement group of its namespace gone through, once, and its
// words are free then. Nobody else's end does.
func TestSettleOrphans(t *testing.T) {
	w := newWorld(t)
	w.nodes(2, 8)
	ns := w.create("n", 1, 2)
	w.create("other", 1, 2)
	a, b, c := w.open(ns), w.open(ns), w.open(ns)
	w.words(a, 1)
	w.words(b, 1)
	w.words(c, 2)
	w.kill(w.open(ns)) // without status words
	w.ack()
	w.plan() // an epoch block
	w.want()
	w.apply(&fsmpb.Command{
		Op: &fsmpb.Command_CloseSession{CloseSession: &fsmpb.CloseSession{SessionId: c, Settled: true}}})
	w.want()
	w.kill(a)
	w.want("[1]: JOB_SETTLE", "[2]: JOB_SETTLE")
	w.wait(3 * lease)
	w.want()
	w.ack()
	if j := w.claim(b); j == nil || j.PgId != 1 || j.Reason != ReasonSettle {
		t.Fatalf("claimed %v", j)
	}
	w.end(b, 1)
	w.wait(3 * lease)
	w.want() // the other placement group is not through
	if dead := w.s.Heap(1).StatusDead; len(dead) != 1 {
		t.Fatalf("dead are %v", dead)
	}
	w.end(b, 2)
	if dead := w.s.Heap(1).StatusDead; len(dead) != 0 {
		t.Fatalf("dead are %v", dead)
	}
	w.wait(3 * lease)
	w.want()
}

// A job that waits for an intent does not keep that from being settled, and goes on afterwards.
func TestSettleBesideMove(t *testing.T) {
	w := newWorld(t)
	w.nodes(2, 8)
	ns := w.create("n", 1, 2)
	a, b := w.open(ns), w.open(ns)
	w.words(a, 1)
	w.ack()
	move := w.start(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_MOVE, ShardId: 1, TargetPgId: 2})
	w.ack()
	if j := w.claim(b); j.GetId() != move {
		t.Fatalf("claimed %v", j)
	}
	w.plan() // an epoch block
	w.kill(a)
	w.want("[1]: JOB_SETTLE", "[2]: JOB_SETTLE")
	w.ack()
	w.l.Progress(move, 1, 2, "an intent stays", w.now)
	w.apply(&fsmpb.Command{Op: &fsmpb.Command_EndJob{EndJob: &fsmpb.EndJob{SessionId: b, JobId: move, GiveBack: true}}})
	w.wait(2 * lease)
	w.ack()
	for _, pg := range []uint32{1, 2} {
		j := w.claim(b)
		if j == nil || j.Kind != dirpb.JobKind_JOB_SETTLE || j.PgId != pg {
			t.Fatalf("claimed %v, want what settles placement group %d", j, pg)
		}
		w.finish(b, j)
	}
	if j := w.claim(b); j.GetId() != move {
		t.Fatalf("claimed %v, want the move", j)
	}
}

// A SETTLE job that does not get on, since memory is short or otherwise, keeps no other job from beginning.
func TestSettleInTrouble(t *testing.T) {
	w := newWorld(t)
	w.nodes(1, 8)
	ns := w.create("n", 1, 1)
	a, b := w.open(ns), w.open(ns)
	w.words(a, 1)
	w.ack()
	w.plan() // an epoch block
	w.kill(a)
	w.want("[1]: JOB_SETTLE")
	w.ack()
	scrub := &fsmpb.StartJob{Kind: dirpb.JobKind_JOB_SCRUB, PgId: 1, Reason: ReasonLook}
	if ready := w.l.Offer(w.s, []*fsmpb.StartJob{scrub}, w.now); len(ready) != 0 {
		t.Fatalf("begun: %v", ready)
	}
	w.want()
	j := w.claim(b)
	w.l.Progress(j.GetId(), 1, 2, "no memory", w.now)
	w.apply(&fsmpb.Command{
		Op: &fsmpb.Command_EndJob{EndJob: &fsmpb.EndJob{SessionId: b, JobId: j.GetId(), GiveBack: true}}})
	w.want("[1]: JOB_SCRUB")
	if next := w.claim(b); next.GetKind() != dirpb.JobKind_JOB_SCRUB {
		t.Fatalf("claimed %v", next)
	}
}

// Sessions that end one after the other do not keep other jobs of a placement group from their turn.
func TestSettleTakesTurns(t *testing.T) {
	w := newWorld(t)
	w.nodes(1, 8)
	ns := w.create("n", 1, 1)
	b := w.open(ns)
	die := func() {
		t.Helper()
		a := w.open(ns)
		w.words(a, 1)
		w.kill(a)
		w.ack()
	}
	w.plan() // an epoch block
	die()
	w.want("[1]: JOB_SETTLE")
	scrub := &fsmpb.StartJob{Kind: dirpb.JobKind_JOB_SCRUB, PgId: 1, Reason: ReasonLook}
	if ready := w.l.Offer(w.s, []*fsmpb.StartJob{scrub}, w.now); len(ready) != 0 {
		t.Fatalf("begun: %v", ready)
	}
	die()
	w.ack()
	w.wait(lease)
	w.want()
	w.end(b, 1)
	w.want("[1]: JOB_SCRUB")
	w.wait(2 * lease)
	w.want("[1]: JOB_SETTLE") // beside it
	w.ack()
	w.end(b, 1)
}

// A placement group that is changing is gone through when it is whole.
func TestSettleWaitsForMembers(t *testing.T) {
	w := newWorld(t)
	w.nodes(3, 8)
	ns := w.create("n", 2, 4)
	a, b := w.open(ns), w.open(ns)
	w.words(a, 1)
	w.ack()
	w.down(3)
	w.kill(a)
	w.step()
	for _, pg := range w.s.PGs(ns) {
		if whole, j := pg.State == dirpb.PGState_PG_ACTIVE, w.settling(pg.Id); whole != (j != nil) ||
			whole != (pg.Id == 1) {
			t.Fatalf("%v has %v", pg, j)
		}
	}
	for range 40 {
		w.publish()
		w.ack()
		if j := w.claim(b); j != nil {
			w.finish(b, j)
		}
		w.wait(300 * time.Millisecond)
		w.step()
	}
	if dead := w.s.Heap(1).StatusDead; len(dead) != 0 || len(w.s.Jobs()) != 0 {
		t.Fatalf("dead are %v, jobs %v", dead, w.s.Jobs())
	}
}
