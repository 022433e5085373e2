package index_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/index/repair"
	"github.com/kvd-project/kvd/internal/layout"
)

func settleWork() repair.Work { return repair.Work{PG: 1, Off: home()} }

// checkOutcome: the group holds no intent, and all see that the transaction happened, or all that it did not.
func (w *world) checkOutcome(t *testing.T, what string, answered bool, before, after [2]string) {
	t.Helper()
	w.checkSettled(t, what)
	got := [2]string{w.value(t, w.client(30), "k"), w.value(t, w.client(30), "m")}
	if got != after && (answered || got != before) {
		t.Fatalf("%s: k, m are %q; before %q, after %q, answered %v", what, got, before, after, answered)
	}
	for r := range w.pg.Replicas {
		if a, b := w.groupAt(0, home()), w.groupAt(r, home()); !slices.Equal(a[layout.GroupSlotsOff:],
			b[layout.GroupSlotsOff:]) {
			t.Fatalf("%s: R%d shows something else than the head", what, r)
		}
	}
	w.checkTidy(t, what)
}

// TestSettleAllCrash stops a coordinator after every single access, and then the first janitor that settles what it has
// left. The second janitor ends that, and nothing is left: of the transaction all is seen, or nothing.
func TestSettleAllCrash(t *testing.T) {
	crashes := 0
	for _, s := range txnScripts {
		for r := uint8(1); r <= 3; r++ {
			elsewhere := r == 2
			for accesses, done := 1, false; !done; accesses++ {
				for stopped, over := 0, false; !over; stopped++ {
					what := fmt.Sprintf("%s r=%d elsewhere %v, crash after %d accesses, janitor after %d", s.name, r,
						elsewhere, accesses, stopped)
					w := txnWorld(t, r, s.setup, elsewhere)
					w.quiet = true
					x := &coordinator{c: w.client(1), prepares: s.prepares, at: txnAt(elsewhere)}
					done = x.advance(t, accesses)
					w.fenced[1] = true
					j := w.client(8)
					work := settleWork()
					j.begin(workOp(index.SettleAll, &work))
					j.op.Patience = 1
					for left := stopped; left > 0 && !over; {
						was := j.verbs
						_, over = j.advance(left, noFault)
						left -= max(1, j.verbs-was)
					}
					crashes++
					w.fenced[8] = true
					w.client(9).job(t, index.SettleAll, settleWork())
					w.checkOutcome(t, what, x.answered, s.before, s.after)
				}
			}
		}
	}
	t.Logf("%d crashes", crashes)
}

// TestSettleAllBehindOthers: another client that has met the intent dies, too, after every single access. None of what
// it left between the head and the tail is an intent any more.
func TestSettleAllBehindOthers(t *testing.T) {
	for _, s := range txnScripts {
		for r := uint8(1); r <= 3; r++ {
			for _, next := range []string{"put k mine", "del k", "prepare k put mine x=9 seq=3 ts=9"} {
				for accesses, done := 1, false; !done; accesses++ {
					for others, over := 1, false; !over; others++ {
						what := fmt.Sprintf("%s r=%d, crash after %d accesses, %s after %d", s.name, r, accesses, next,
							others)
						w := txnWorld(t, r, s.setup, false)
						w.quiet = true
						x := &coordinator{c: w.client(1), prepares: s.prepares, at: txnAt(false)}
						done = x.advance(t, accesses)
						w.fenced[1] = true
						c := w.client(4)
						must(t, c.start(fields(next)))
						c.op.Patience = -1
						for left := others; left > 0 && !over; {
							was := c.verbs
							_, over = c.advance(left, noFault)
							left -= max(1, c.verbs-was)
						}
						w.fenced[4] = true
						j := w.client(9)
						j.job(t, index.SettleAll, settleWork())
						w.checkSettled(t, what)
						must(t, w.client(5).do(t, "put", "k", "last"))
						if v := w.value(t, w.client(30), "k"); v != "last" {
							t.Fatalf("%s: k is %q after the last put", what, v)
						}
						w.checkTidy(t, what)
					}
				}
			}
		}
	}
}

// TestSettleAllNoMemory: an aborted intent stays until there is memory for the copy of the record before, and the
// operation that was given up keeps nothing.
func TestSettleAllNoMemory(t *testing.T) {
	w := txnWorld(t, 2, "put k old;put m old", false)
	must(t, w.client(1).do(t, "prepare", "k", "put", "new", "x=3", "seq=1"))
	j := w.client(8)
	j.memory = 0
	work := settleWork()
	j.begin(workOp(index.SettleAll, &work))
	for j.action != index.Alloc {
		if _, done := j.advance(1<<30, noFault); done {
			t.Fatalf("done without memory: %v", j.op.Err)
		}
	}
	if pg, units := j.op.Wanted(); pg != 1 || units != 1 {
		t.Errorf("wants %d units of placement group %d", units, pg)
	}
	full := errors.New("full")
	if a := j.op.Fail(full); a != index.Done || !errors.Is(j.op.Err, full) || workOf(j.op).Settled != 0 {
		t.Fatalf("action %d, %v, settled %d", a, j.op.Err, workOf(j.op).Settled)
	}
	o := w.client(9).job(t, index.SettleAll, settleWork())
	if workOf(o).Settled != 1 {
		t.Errorf("settled %d, want 1", workOf(o).Settled)
	}
	w.checkOutcome(t, "with memory", false, [2]string{"old", "old"}, [2]string{})
}

// TestSettleAllLeavesMoves: FROZEN words of a move stay as they are, and one of which no copy is good ends the
// operation, which names it.
func TestSettleAllLeavesMoves(t *testing.T) {
	w := txnWorld(t, 2, "put k old;put m old", false)
	_, i, x, _ := w.find(0, "k")
	for r := range w.pg.Replicas {
		w.setSlot(r, home(), i, x.WithState(layout.Frozen))
	}
	must(t, w.client(1).do(t, "prepare", "m", "put", "new", "x=3", "seq=1"))
	if o := w.client(8).job(t, index.SettleAll, settleWork()); workOf(o).Settled != 1 {
		t.Errorf("settled %d, want 1", workOf(o).Settled)
	}
	if now := w.groupAt(0, home()).Slot(i); now != x.WithState(layout.Frozen) {
		t.Errorf("the mover's word is %v", now)
	}
	w.region[0][x.Off()+layout.RecordHeaderSize] ^= 1
	w.client(8).job(t, index.SettleAll, settleWork()) // mended
	for r := range w.pg.Replicas {
		w.region[r][x.Off()+layout.RecordHeaderSize] ^= 1
	}
	j := w.client(9)
	work := settleWork()
	j.begin(workOp(index.SettleAll, &work))
	if _, err := j.run(100); err != nil {
		t.Fatal(err)
	}
	if err := j.op.Err; err == nil || !strings.Contains(err.Error(), "pg 1 group") ||
		!strings.Contains(err.Error(), "slot 0") {
		t.Errorf("damaged: %v", err)
	}
}

// leaveIntents has a client place intents and die: at undecided a put that stays so, at committed a put.
func (w *world) leaveIntents(t *testing.T, undecided, committed string) {
	t.Helper()
	c := w.client(7)
	must(t, c.do(t, "prepare", undecided, "put", "never", "x=3", "seq=1"))
	must(t, c.do(t, "prepare", committed, "put", "new", "x=4", "seq=1"))
	must(t, c.do(t, "decide", "commit", "x=4", "seq=1"))
	w.fenced[7] = true
}

// TestMoveSettles: a move settles the intents of its moved set, and the keys go as these have come out.
func TestMoveSettles(t *testing.T) {
	for _, m := range moveCases() {
		t.Run(m.String(), func(t *testing.T) {
			w := m.world()
			want := fillMove(t, w)
			w.leaveIntents(t, "A", "E")
			want["E"] = "new"
			m.begin(w)
			j := w.client(8)
			w.moveAll(t, j)
			w.moved = true
			w.check(t, "moved", want)
			w.linkedPlaces(t, "moved", w.arrays()...)
			if s := layout.Status(binary.LittleEndian.Uint64(w.region[0][statusOff(3):])); s != layout.MakeStatus(
				1, layout.Abort, 0) {
				t.Errorf("the undecided transaction: %v", s)
			}
		})
	}
}

// TestRelocateSettles: a recall settles intents that lie in its extent, or name something there, and leaves nothing
// there.
func TestRelocateSettles(t *testing.T) {
	for r := uint8(1); r <= 3; r++ {
		w, want := recallWorld(t, r)
		w.leaveIntents(t, "a", "e")
		want["e"] = "new"
		w.client(8).job(t, index.Relocate, repair.Work{PG: 1, Off: home(), Extents: w.pg.Recalled})
		w.checkSettled(t, fmt.Sprintf("r=%d", r))
		if list := w.inExtent(0); len(list) > 0 {
			t.Errorf("r=%d: left in the extent: %q", r, list)
		}
		w.check(t, fmt.Sprintf("r=%d", r), want)
		w.linkedPlaces(t, fmt.Sprintf("r=%d", r), shardOff)
	}
}
