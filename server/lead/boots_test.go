package lead

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// keeper registers a process of a memory node that keeps its memory.
func (w *world) keeper(name string, boot uint64) uint32 {
	w.t.Helper()
	r := w.apply(&fsmpb.Command{
		Op: &fsmpb.Command_RegisterNode{RegisterNode: &fsmpb.RegisterNode{Node: &dirpb.RegisterNodeRequest{
			Name: name, Incarnation: 1, CapacityBytes: 4 * region, Domain: name, Boot: boot, Keeps: true,
			Endpoints: []*dirpb.Endpoint{{Provider: "tcp", Addr: "h:1"}},
		}}}})
	w.l.Heartbeat(w.s, w.now, r.NodeID, 1, nil)
	return r.NodeID
}

func (w *world) pauseNode(id, millis uint32) {
	w.t.Helper()
	w.apply(&fsmpb.Command{
		Op: &fsmpb.Command_PauseNode{PauseNode: &dirpb.PauseNodeRequest{NodeId: id, Incarnation: 1, Millis: millis}}})
	w.l.BeginPause(w.s, id, w.now)
}

func (w *world) waits(ids ...uint32) {
	w.t.Helper()
	if got := w.l.Waiting(w.s, w.now); !slices.Equal(got, ids) {
		w.t.Fatalf("at %v something waits for memory nodes %v, want %v", w.now, got, ids)
	}
}

// The only copy on a memory node that keeps its memory is waited for as long as it takes, and
// one that has copies elsewhere no longer than any other.
func TestKeptLastCopyIsAwaited(t *testing.T) {
	w := newWorld(t)
	for _, name := range []string{"m1", "m2"} {
		w.keeper(name, 1)
	}
	w.create("n", 2, 1)
	w.on(1, dirpb.PGState_PG_ACTIVE, 1, 2)
	w.mute[1] = true
	w.pass(lease)
	w.beat()
	w.now++
	w.beat()
	w.waits() // m2 has copies of all
	w.want(`"m1" is down`)
	w.want("every session has quiesced", "every session has quiesced")
	w.mute[2] = true
	w.pass(lease)
	w.waits()
	w.now++
	w.waits(2)
	w.want(`"m2" is waited for`)
	for range 300 {
		w.pass(lease / 3)
		w.want()
	}
	w.waits(2)
	w.elect() // who was never heard by this leader is silent only a lease later
	w.waits()
	w.pass(lease + 1)
	w.want()
	w.waits(2)
	w.keeper("m2", 2)
	w.waits()
	w.on(1, dirpb.PGState_PG_ACTIVE, 2)
	w.want()
}

// With a bound to that the copy is lost when the time is over.
func TestLastCopyWait(t *testing.T) {
	w := newWorld(t)
	w.l.opts.LastCopyWait = 20 * lease
	w.keeper("m1", 1)
	w.create("n", 1, 1)
	w.mute[1] = true
	w.pass(20 * lease)
	w.want(`"m1" is waited for`)
	w.want()
	w.waits(1)
	w.now++
	w.want(`"m1" is down`)
	w.waits()
	w.on(1, dirpb.PGState_PG_LOST, 1)
}

// An operator gives a memory node up that is silent, and no other one.
func TestGiveUpNode(t *testing.T) {
	w := newWorld(t)
	w.keeper("m1", 5)
	w.create("n", 1, 1)
	refused := func(why string) {
		t.Helper()
		if _, err := w.l.GiveUp(w.s, 1, w.now); !errors.Is(err, fsm.ErrRefused) || !strings.Contains(err.Error(), why) {
			t.Fatalf("%v, want a refusal: %s", err, why)
		}
	}
	refused("was heard within its lease")
	w.mute[1] = true
	w.pass(lease + 1)
	c, err := w.l.GiveUp(w.s, 1, w.now)
	if err != nil {
		t.Fatal(err)
	}
	// It is back before that is carried out.
	w.keeper("m1", 6)
	if r := w.try(c); !errors.Is(r.Err, fsm.ErrNotFound) {
		t.Fatalf("a memory node that is back: %v", r.Err)
	}
	w.pass(lease + 1)
	if c, err = w.l.GiveUp(w.s, 1, w.now); err != nil {
		t.Fatal(err)
	}
	w.apply(c)
	w.on(1, dirpb.PGState_PG_LOST, 1)
	refused("counts as lost already")
	if _, err := w.l.GiveUp(w.s, 9, w.now); !errors.Is(err, fsm.ErrRefused) {
		t.Errorf("memory node 9: %v", err)
	}
}

// While the process of a memory node is being replaced nobody calls it lost, for so long as it said, and an
// operator may not either.
func TestPause(t *testing.T) {
	w := newWorld(t)
	for _, name := range []string{"m1", "m2"} {
		w.keeper(name, 1)
	}
	w.create("n", 2, 1)
	w.pauseNode(1, 5000)
	w.mute[1] = true
	w.want()
	w.pass(5*time.Second - lease)
	w.beat()
	w.want()
	w.pass(lease)
	w.beat()
	if at, ok := w.l.Lapse(w.now); !ok || at != w.now {
		t.Errorf("the next look is at %v, %v; the pause ends now, at %v", at, ok, w.now)
	}
	if _, err := w.l.GiveUp(w.s, 1, w.now); !errors.Is(err, fsm.ErrRefused) {
		t.Errorf("a memory node that is being replaced is given up: %v", err)
	}
	w.want()
	w.now++
	w.want(`"m1" was not replaced in time`, `"m1" is down`)

	// It is here in time.
	w.pauseNode(2, 5000)
	w.pass(4 * time.Second)
	w.keeper("m2", 2)
	w.pass(lease)
	w.want("every session has quiesced", "every session has quiesced")
	w.waits()
	w.now++
	w.waits(2)
}

// A pause that ends while its memory node is heard changes nothing; another leader begins it anew.
func TestPauseEnds(t *testing.T) {
	w := newWorld(t)
	w.keeper("m1", 1)
	w.create("n", 1, 1)
	w.pauseNode(1, 2000)
	w.pass(lease)
	w.elect()
	w.want()
	w.mute[1] = true
	w.pass(2 * time.Second)
	w.want()
	w.waits()
	w.mute[1] = false
	w.now++
	w.beat()
	w.want(`"m1" was not replaced in time`)
	if n := w.s.Node(1); n.PauseMillis != 0 {
		t.Errorf("node %v", n)
	}
	w.want()
}

// part has a memory node of incarnation 1 leave its placement groups to be replaced.
func (w *world) part(id uint32) {
	w.t.Helper()
	w.apply(&fsmpb.Command{
		Op: &fsmpb.Command_LeaveNode{
			LeaveNode: &dirpb.LeaveNodeRequest{NodeId: id, Incarnation: 1, PauseMillis: 30_000}}})
	w.l.BeginPause(w.s, id, w.now)
}

// A memory node that is to be replaced leaves its chains, and is down when it is out of them; no copy is made elsewhere
// while it is expected, and its next life joins.
func TestPart(t *testing.T) {
	w := newWorld(t)
	for _, name := range []string{"m1", "m2", "m3"} {
		w.keeper(name, 1)
	}
	ns := w.create("n", 2, 4)
	w.open(ns)
	w.on(1, dirpb.PGState_PG_ACTIVE, 1, 2)
	w.on(2, dirpb.PGState_PG_ACTIVE, 2, 3)
	w.on(3, dirpb.PGState_PG_ACTIVE, 3, 1)
	if err := w.l.MayPart(w.s, 1, w.now); err != nil {
		t.Fatal(err)
	}
	w.part(1)
	w.want()
	w.ack()
	w.want(`group 1: memory node "m1" leaves`, `group 3: memory node "m1" leaves`)
	w.ack()
	w.want(`group 1: every session has quiesced`, `group 3: every session has quiesced`)
	if err := w.l.MayPart(w.s, 2, w.now); !errors.Is(err, fsm.ErrRefused) || !strings.Contains(err.Error(), `"m2" has the only copy of placement group 1 of namespace "n"`) {
		t.Errorf("another one may leave: %v", err)
	}
	w.want(`"m1" is down: it has left, and is replaced`)
	w.on(1, dirpb.PGState_PG_ACTIVE, 2)
	w.ack()
	w.wait(5 * time.Second)
	w.want() // to join elsewhere
	w.apply(&fsmpb.Command{
		Op: &fsmpb.Command_RegisterNode{RegisterNode: &fsmpb.RegisterNode{Node: &dirpb.RegisterNodeRequest{
			Name: "m1", Incarnation: 2, CapacityBytes: 4 * region, Domain: "m1", Boot: 1, Keeps: true,
			Endpoints: []*dirpb.Endpoint{{Provider: "tcp", Addr: "h:1"}},
		}}}})
	w.l.Heartbeat(w.s, w.now, 1, 2, nil)
	w.want(`group 1: memory node "m1" is to join`, `group 3: memory node "m1" is to join`)
}

// The placement groups of one that does not come back wait for as long as its pause.
func TestPartWithoutReturn(t *testing.T) {
	w := newWorld(t)
	for _, name := range []string{"m1", "m2", "m3"} {
		w.keeper(name, 1)
	}
	w.create("n", 2, 1)
	w.on(1, dirpb.PGState_PG_ACTIVE, 1, 2)
	w.part(1)
	began := w.now
	for w.s.Node(1).State == dirpb.NodeState_NODE_UP {
		if w.step() == 0 {
			t.Fatalf("it does not leave: %v", w.pg(1))
		}
	}
	w.mute[1] = true
	w.wait(began + 30*time.Second - w.now)
	w.want()
	w.now++
	w.want(`"m1" was not replaced in time`)
	w.want(`group 1: memory node "m3" is to join`, `group 3: memory node "m2" is to join`)
}

// A memory node that cannot leave in time stays as it was: while a session does not say that it knows, or when its
// copies are the last.
func TestPartIsBounded(t *testing.T) {
	w := newWorld(t)
	for _, name := range []string{"m1", "m2"} {
		w.keeper(name, 1)
	}
	ns := w.create("n", 2, 1)
	w.open(ns)
	w.part(2)
	w.want()
	w.wait(maxParting)
	w.want()
	w.now++
	w.want(`"m2" could not leave its placement groups in time, and stays`)
	if n := w.s.Node(2); n.Leaving || n.PauseMillis != 0 || n.State != dirpb.NodeState_NODE_UP {
		t.Errorf("node %v", n)
	}
	w.part(2)
	w.down(1)
	for {
		w.ack()
		if w.step() == 0 {
			break
		}
	}
	w.on(1, dirpb.PGState_PG_ACTIVE, 2)
	w.wait(maxParting)
	w.now++
	w.want(`"m2" could not leave its placement groups in time, and stays`)
	w.on(1, dirpb.PGState_PG_ACTIVE, 2)
}

// TestStays: a process that is to be replaced says why it stays, and that is the end of its pause; the reason is that
// of the last time it was asked.
func TestStays(t *testing.T) {
	w := newWorld(t)
	m1 := w.keeper("m1", 1)
	if c := w.l.Stays(w.s, m1, "nobody has asked"); c != nil || w.l.WhyStays(m1) != "" {
		t.Errorf("one that is not to be replaced: %v, %q", c, w.l.WhyStays(m1))
	}
	w.apply(&fsmpb.Command{
		Op: &fsmpb.Command_PauseNode{PauseNode: &dirpb.PauseNodeRequest{NodeId: m1, Incarnation: 1, Millis: 30_000}}})
	c := w.l.Stays(w.s, m1, "too small")
	if c == nil {
		t.Fatal("the pause goes on")
	}
	w.apply(c)
	w.l.BeginPause(w.s, m1, w.now) // of the first command, whose caller hears of it later
	if n := w.s.Node(m1); n.PauseMillis != 0 || w.l.WhyStays(m1) != "too small" {
		t.Errorf("%v stays for %q", n, w.l.WhyStays(m1))
	}
	if w.l.AskToLeave(m1); w.l.WhyStays(m1) != "" {
		t.Errorf("asked again it stays for %q", w.l.WhyStays(m1))
	}
}
