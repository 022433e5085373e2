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
	r := w.apply(&fsmpb.Command{Op: &fsmpb.Command_RegisterNode{RegisterNode: &fsmpb.RegisterNode{Node: &dirpb.RegisterNodeRequest{
		Name: name, Incarnation: 1, CapacityBytes: 4 * region, Domain: name, Boot: boot, Keeps: true,
		Endpoints: []*dirpb.Endpoint{{Provider: "tcp", Addr: "h:1"}},
	}}}})
	w.l.Heartbeat(w.s, w.now, r.NodeID, 1, nil)
	return r.NodeID
}

func (w *world) pauseNode(id, millis uint32) {
	w.t.Helper()
	w.apply(&fsmpb.Command{Op: &fsmpb.Command_PauseNode{PauseNode: &dirpb.PauseNodeRequest{NodeId: id, Incarnation: 1, Millis: millis}}})
	w.l.NotePauses(w.s, w.now)
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
