package lead

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

func TestEpochs(t *testing.T) {
	w := newWorld(t)
	w.nodes(1, 4)
	ns := w.create("n", 1, 1)
	w.wait(10 * lease)
	w.want()
	if e, least := w.l.Epochs(); e != 0 || least != 0 {
		t.Fatalf("E is %d, the minimum %d, without sessions", e, least)
	}
	a, b := w.open(ns), w.open(ns)
	// Nothing is told before it is reserved.
	w.wait(lease)
	if e, _ := w.l.Epochs(); e != 0 {
		t.Fatalf("E is %d beyond its ceiling", e)
	}
	w.want()
	if c := w.s.Meta().EpochCeiling; c != 600 {
		t.Fatalf("ceiling %d, want a block of 600", c)
	}
	for range 350 {
		w.pass(100 * time.Millisecond)
		w.beat()
		w.l.Advance(w.s, w.now)
		w.l.Advance(w.s, w.now) // no sooner than the interval
		e, _ := w.l.Epochs()
		if _, err := w.tell(Renewal{Session: a, Report: e}); err != nil {
			t.Fatal(err)
		}
		if _, err := w.tell(Renewal{Session: b, Report: e / 2}); err != nil {
			t.Fatal(err)
		}
	}
	if e, least := w.l.Epochs(); e != 350 || least != 175 {
		t.Fatalf("E is %d, the minimum %d, want 350 and 175", e, least)
	}
	w.want() // with half of the block left the next one is due
	if c := w.s.Meta().EpochCeiling; c != 950 {
		t.Fatalf("ceiling %d, want 950", c)
	}
	_, err := w.tell(Renewal{Session: a, Report: 351})
	if !errors.Is(err, fsm.ErrInvalid) {
		t.Fatalf("a report from the future: %v", err)
	}
	// The next leader starts at the ceiling, and knows no report.
	w.elect()
	if e, least := w.l.Epochs(); e != 950 || least != 0 {
		t.Fatalf("the next leader has E %d, minimum %d", e, least)
	}
	// An extent that waits for a reclaim epoch keeps E going when all sessions are gone.
	w.grant(a, 1, 100)
	j := w.start(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_RECALL, PgId: 1, Extents: []uint32{0}})
	w.ack()
	if got := w.claim(a); got == nil || got.Id != j {
		t.Fatalf("claimed %v", got)
	}
	w.finish(a, w.s.Job(j))
	for _, x := range []uint32{a, b} {
		w.leak(x)
	}
	w.want()
	w.wait(lease)
	w.want("extent 0 is free")
	w.wait(lease)
	w.want()
}

func TestSessionLeases(t *testing.T) {
	w := newWorld(t)
	w.nodes(2, 4)
	ns := w.create("n", 2, 4)
	a, b := w.open(ns), w.open(ns)
	// A session that was opened and never answered gets a lease too.
	c := w.apply(&fsmpb.Command{
		Op: &fsmpb.Command_OpenSession{OpenSession: &fsmpb.OpenSession{NamespaceId: ns}}}).Session.Id
	w.want()
	w.pass(lease)
	w.beat()
	w.want() // the end of a lease is in time
	w.renew(a, 0, 0)
	w.now++
	w.want(fmt.Sprintf("fencing sessions %d", []uint32{b, c}))
	for _, x := range []uint32{b, c, 99} {
		if _, err := w.tell(Renewal{Session: x}); !errors.Is(err, fsm.ErrNotFound) {
			t.Fatalf("renewing session %d: %v", x, err)
		}
	}
	if _, _, err := w.l.Opened(w.s, c, w.now); !errors.Is(err, fsm.ErrUnavailable) {
		t.Fatalf("answering an expired session: %v", err)
	}
	// A session being fenced holds the minimum back until it is fenced.
	w.wait(2 * lease)
	w.ack()
	if e, least := w.l.Epochs(); e == 0 || least != 0 {
		t.Fatalf("E %d, minimum %d", e, least)
	}
	w.fence()
	w.want()
	if e, least := w.l.Epochs(); least != e {
		t.Fatalf("E %d, minimum %d after the fences", e, least)
	}
	if _, ok := w.l.Report(b); ok {
		t.Fatal("a fenced session is still known")
	}
	// A new leader gives everyone a full lease.
	w.pass(100 * lease)
	w.elect()
	w.pass(lease)
	w.want()
	w.now++
	// m2 has the last copy
	w.want(`"m1" is down`, `"m2" is waited for`, fmt.Sprintf("fencing sessions %d", []uint32{a}))
}

// A silent memory node is down after a lease; one that holds the only copy of something,
// after ten.
func TestNodeLeases(t *testing.T) {
	w := newWorld(t)
	w.nodes(3, 4)
	w.made("n", 2, asStore, false) // placement groups on 1 2, 2 3 and 3 1
	if w.l.Heartbeat(w.s, w.now, 1, 7, nil) || w.l.Heartbeat(w.s, w.now, 9, 1, nil) {
		t.Fatal("a stranger was heard")
	}
	w.mute[1] = true
	w.pass(lease)
	w.beat()
	w.want()
	w.now++
	w.want(`"m1" is down`)
	w.on(1, dirpb.PGState_PG_FROZEN, 2)
	w.on(3, dirpb.PGState_PG_FROZEN, 3)
	w.mute[2] = true
	w.pass(10*lease - 1)
	w.l.Heartbeat(w.s, w.now, 3, 1, nil)
	w.want(`"m2" is waited for, since it is silent and has the last copy of something; placement groups [2] go on without it`,
		"1: every session has quiesced", "3: every session has quiesced")
	w.on(2, dirpb.PGState_PG_FROZEN, 3)
	// a silent one is no candidate for 3
	w.want("2: every session has quiesced", `group 1: memory node "m3" is to join`)
	w.now++
	w.want(`"m2" is down`)
	w.on(1, dirpb.PGState_PG_LOST, 2)
}

// A placement group whose memory nodes die while it is made is made by others, or goes on
// with those that are left; if there are none it waits. A placement group that is lost waits for its memory
// node until that is removed.
func TestRemake(t *testing.T) {
	w := newWorld(t)
	w.nodes(3, 4)
	w.mute[2] = true
	w.create("n", 1, 4) // placement groups on 1, 2 and 3
	w.on(2, dirpb.PGState_PG_CREATING, 2)
	w.pass(lease)
	w.beat()
	w.now++
	w.want(`"m2" is down`)
	w.want(`placement group 2: it is made anew on memory nodes ["m1"]`)
	w.publish()
	w.on(2, dirpb.PGState_PG_ACTIVE, 1)
	w.want()

	w.down(3)
	w.on(3, dirpb.PGState_PG_LOST, 3)
	w.want()
	w.apply(&fsmpb.Command{Op: &fsmpb.Command_RemoveNode{RemoveNode: &fsmpb.RemoveNode{NodeId: 3, Force: true}}})
	w.on(3, dirpb.PGState_PG_LOST)
	w.want(`placement group 3: it is made anew on memory nodes ["m1"]`)
	w.publish()
	w.on(3, dirpb.PGState_PG_ACTIVE, 1)

	// Of two, one may die; the group gets a second copy when there is room again.
	w = newWorld(t)
	w.nodes(2, 4)
	w.mute[1] = true
	w.create("n", 2, 4) // placement groups on 1 2 and 2 1
	w.down(1)
	w.publish()
	w.on(1, dirpb.PGState_PG_ACTIVE, 2)
	w.on(2, dirpb.PGState_PG_ACTIVE, 2)
	w.want()
	w.mute[1] = false
	w.boot("m1", "d1", 4, 2)
	w.want(`group 1: memory node "m1" is to join`, `group 2: memory node "m1" is to join`)

	// Both die: whichever is back first makes it.
	w = newWorld(t)
	w.nodes(2, 4)
	w.mute[1], w.mute[2] = true, true
	w.create("n", 2, 4)
	w.down(1)
	w.down(2)
	w.want()
	w.mute[1] = false
	w.boot("m1", "d1", 4, 2)
	w.want(`placement group 1: it is made anew on memory nodes ["m1"]`,
		`placement group 2: it is made anew on memory nodes ["m1"]`)
	w.publish()
	w.on(1, dirpb.PGState_PG_ACTIVE, 1)
	w.on(2, dirpb.PGState_PG_ACTIVE, 1)
}
