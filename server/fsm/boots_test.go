package fsm

import (
	"slices"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// kept registers a process of m1 that keeps its memory, at an address of its own.
func kept(incarnation, boot uint64, addr string) *fsmpb.Command {
	return registerWith(&dirpb.RegisterNodeRequest{Name: "m1", Incarnation: incarnation, CapacityBytes: gib, Boot: boot,
		Keeps:     true,
		Endpoints: []*dirpb.Endpoint{{Provider: "tcp", Addr: addr}}})
}

// publishedBy has a process of m1 publish a region under a key.
func publishedBy(incarnation, boot uint64, pg uint32, rkey uint64) *fsmpb.Command {
	c := publish(1, incarnation, pg, rkey)
	c.GetPublishRegion().Boot = boot
	return c
}

func pause(incarnation uint64, millis uint32) *fsmpb.Command {
	return &fsmpb.Command{
		Op: &fsmpb.Command_PauseNode{
			PauseNode: &dirpb.PauseNodeRequest{NodeId: 1, Incarnation: incarnation, Millis: millis}}}
}

// keeper is a cluster of m1, which keeps its memory, with one copy of a namespace.
func keeper(t *testing.T) *harness {
	h := newHarness(t)
	h.do(kept(7, 3, "h:1"))
	h.do(create(&dirpb.CreateNamespaceRequest{Name: "w", Shards: 1, BytesPerNode: 8 << 20}))
	h.do(publishedBy(7, 3, 1, 30))
	return h
}

// A process with a greater boot takes over the memory of the one before it, wherever it listens; nothing is lost and
// the placement group epoch stays.
func TestBootKeepsRegions(t *testing.T) {
	h := keeper(t)
	before := h.pg(1)
	if r := h.do(kept(7, 4, "h:2")); r.Arrival != ArrivalKept || len(r.Lost) != 0 {
		t.Errorf("arrival %v, lost %v", r.Arrival, r.Lost)
	}
	n := h.s.Node(1)
	if n.Boot != 4 || !n.Keeps || n.Incarnation != 7 || n.Endpoints[0].Addr != "h:2" || n.UsedBytes == 0 {
		t.Errorf("node %v", n)
	}
	if pg := h.pg(1); pg != before {
		t.Errorf("placement group %v, was %v", pg, before)
	}
	if want := h.s.WantRegions(1, 7); len(want) != 1 || !want[0].Published {
		t.Errorf("wanted are %v", want)
	}
	if r := h.do(kept(7, 4, "h:2")); r.Arrival != ArrivalKnown || len(r.Changes) != 0 {
		t.Errorf("the same process again: arrival %v, changes %v", r.Arrival, r.Changes)
	}
	h.refuse(kept(7, 3, "h:1"), ErrRefused, "boot 3", "has ended", "boot 4 has registered")
	h.refuse(kept(7, 0, "h:1"), ErrInvalid, "boot 0")
	// Another incarnation has lost it, whatever its boot.
	h.do(kept(8, 1, "h:3"))
	if pg := h.pg(1); pg.State != dirpb.PGState_PG_CREATING || pg.Generation == before.Generation ||
		pg.Members[0].Boot != 0 {
		t.Errorf("placement group %v", pg)
	}
	h.checkCopies()
}

// An incarnation that was declared lost stays lost with every boot.
func TestBootOfLostIncarnation(t *testing.T) {
	h := keeper(t)
	h.do(pause(7, 100))
	wrong := nodeDown(1, 7)
	wrong.GetNodeDown().Boot = 2
	h.refuse(wrong, ErrNotFound, "boot 2")
	h.do(nodeDown(1, 7))
	if n := h.s.Node(1); n.PauseMillis != 0 {
		t.Errorf("a lost memory node is awaited: %v", n)
	}
	h.refuse(kept(7, 4, "h:2"), ErrRefused, "declared lost")
}

// Keys of a region in use are one process's; those of a later one take their place without another placement group
// epoch.
func TestBootReplacesKeys(t *testing.T) {
	h := keeper(t)
	h.refuse(publishedBy(7, 3, 1, 31), ErrRefused, "in use")
	h.refuse(publishedBy(7, 4, 1, 40), ErrNotFound, "boot 4")
	h.do(kept(7, 4, "h:1"))
	h.refuse(publishedBy(7, 3, 1, 30), ErrNotFound, "boot 3")
	before, version := h.pg(1), h.s.MapVersion()
	h.do(publishedBy(7, 4, 1, 40))
	pg := h.pg(1)
	if m := pg.Members[0]; m.Keys[0].IndexRkey != 40 || m.Boot != 4 || m.Since != before.Members[0].Since {
		t.Errorf("member %v", m)
	}
	if pg.Epoch != before.Epoch || pg.ChangedVersion != before.ChangedVersion || pg.State != before.State ||
		h.s.MapVersion() != version+1 {
		t.Errorf("placement group %v of map %d, was %v of map %d", pg, h.s.MapVersion(), before, version)
	}
	h.refuse(publishedBy(7, 4, 1, 41), ErrRefused, "in use")
	if r := h.do(publishedBy(7, 4, 1, 40)); len(r.Changes) != 0 {
		t.Errorf("told twice: %v", r.Changes)
	}
	// The next process has the same keys: it says so, and is held to them.
	h.do(kept(7, 5, "h:1"))
	h.do(publishedBy(7, 5, 1, 40))
	h.refuse(publishedBy(7, 5, 1, 50), ErrRefused, "in use")
	h.checkCopies()
}

// A process that takes over has fenced what the one before it had to; one that was overtaken has not.
func TestBootConfirmsFences(t *testing.T) {
	h := keeper(t)
	var ids []uint32
	for range 3 {
		ids = append(ids, h.do(openIn(1, 0)).Session.Id)
	}
	h.do(expire(ids[0]))
	h.do(kept(7, 3, "h:9")) // the same process
	if owed := h.s.FenceWork(1, 7); !slices.Equal(owed, ids[:1]) {
		t.Fatalf("fences owed: %v, want %v", owed, ids[:1])
	}
	h.do(kept(7, 4, "h:1"))
	if h.s.Life(ids[0]) != dirpb.SessionLife_SESSION_FENCED {
		t.Error("a session is still being fenced by a process that has ended")
	}
	if a := h.s.Admitted(); a.Last != ids[2] || !slices.Equal(a.Live, ids[1:]) {
		t.Errorf("admitted are %v, want %v", a, ids[1:])
	}
	h.do(expire(ids[1]))
	h.refuse(kept(7, 3, "h:1"), ErrRefused, "boot 3")
	if h.s.Life(ids[1]) != dirpb.SessionLife_SESSION_FENCING {
		t.Error("a registration that was overtaken confirms a fence")
	}
}

// The fences of a process that takes over may be the last that the deletion of a namespace waits for: its memory is
// free then.
func TestBootEndsDeletion(t *testing.T) {
	h := keeper(t)
	h.do(openIn(1, 0))
	h.do(deleteNS("w", 0, true))
	if h.s.Namespace(1) == nil || h.s.Node(1).UsedBytes == 0 {
		t.Fatal("gone before its sessions were fenced")
	}
	h.do(kept(7, 4, "h:1"))
	if n := h.s.Node(1); h.s.Namespace(1) != nil || n.UsedBytes != 0 || n.Boot != 4 {
		t.Errorf("namespace %v is left, memory node %v", h.s.Namespace(1), n)
	}
}

// A process of a version without boots owes its fences still when it is told to be of one with them.
func TestBootOfFormerVersion(t *testing.T) {
	h := cluster(t, 1, &dirpb.CreateNamespaceRequest{Name: "w", Shards: 1, BytesPerNode: 8 << 20})
	id := h.do(openIn(1, 0)).Session.Id
	h.do(expire(id))
	if r := h.do(kept(100, 1, "h:1")); r.Arrival != ArrivalKnown || h.s.Life(id) != dirpb.SessionLife_SESSION_FENCING {
		t.Errorf("arrival %v, session %v", r.Arrival, h.s.Life(id))
	}
}

// A pause is the present process's, is bounded, and ends with the next one.
func TestPauseNode(t *testing.T) {
	h := keeper(t)
	h.refuse(pause(6, 100), ErrNotFound, "incarnation 6")
	h.refuse(pause(7, MaxPauseMillis+1), ErrInvalid, "30001", "at most 30000")
	h.do(pause(7, MaxPauseMillis))
	if r := h.do(pause(7, MaxPauseMillis)); len(r.Changes) != 0 {
		t.Errorf("told twice: %v", r.Changes)
	}
	h.do(kept(7, 3, "h:2"))
	if n := h.s.Node(1); n.PauseMillis != MaxPauseMillis {
		t.Errorf("the same process again: %v", n)
	}
	h.checkCopies()
	h.do(kept(7, 4, "h:1"))
	if n := h.s.Node(1); n.PauseMillis != 0 {
		t.Errorf("it is here: %v", n)
	}
	h.do(register("m1", 9))
	h.refuse(pause(9, 1), ErrRefused, `"m1" does not keep its memory`)
	h.do(pause(9, 0))
}

func part(incarnation uint64, millis uint32) *fsmpb.Command {
	return &fsmpb.Command{
		Op: &fsmpb.Command_LeaveNode{
			LeaveNode: &dirpb.LeaveNodeRequest{NodeId: 1, Incarnation: incarnation, PauseMillis: millis}}}
}

// A memory node that leaves to be replaced is expected while it is down, too, until its next life registers or that is
// given up; one that stops is not replaced.
func TestPauseWithLeave(t *testing.T) {
	h := keeper(t)
	h.refuse(part(7, MaxPauseMillis+1), ErrInvalid, "30001")
	h.do(part(7, 100))
	h.refuse(part(7, 100), ErrRefused, "being replaced already")
	h.do(kept(7, 3, "h:2"))
	if n := h.s.Node(1); !n.Leaving || n.PauseMillis != 100 {
		t.Errorf("the same process again: %v", n)
	}
	h.do(pause(7, 0))
	if n := h.s.Node(1); n.Leaving || n.PauseMillis != 0 {
		t.Errorf("it stays: %v", n)
	}
	h.do(part(7, 100))
	h.do(part(7, 0))
	if n := h.s.Node(1); !n.Leaving || n.PauseMillis != 0 {
		t.Errorf("it stops: %v", n)
	}
	h.refuse(part(7, 100), ErrRefused, "is stopping")
	h.do(kept(7, 4, "h:1"))
	h.do(part(7, 100))
	h.do(&fsmpb.Command{Op: &fsmpb.Command_NodeDown{NodeDown: &fsmpb.NodeDown{NodeId: 1, Incarnation: 7}}})
	if n := h.s.Node(1); n.State != dirpb.NodeState_NODE_DOWN || n.Leaving || n.PauseMillis != 100 {
		t.Errorf("it has left: %v", n)
	}
	h.refuse(pause(7, 100), ErrNotFound)
	h.refuse(kept(7, 5, "h:1"), ErrRefused, "declared lost")
	h.do(kept(8, 1, "h:1"))
	if n := h.s.Node(1); n.State != dirpb.NodeState_NODE_UP || n.PauseMillis != 0 {
		t.Errorf("it is back: %v", n)
	}
	h.do(part(8, 100))
	h.do(&fsmpb.Command{Op: &fsmpb.Command_NodeDown{NodeDown: &fsmpb.NodeDown{NodeId: 1, Incarnation: 8}}})
	h.do(pause(8, 0))
	if n := h.s.Node(1); n.PauseMillis != 0 {
		t.Errorf("it is expected no more: %v", n)
	}
	h.do(register("m1", 9))
	h.refuse(part(9, 100), ErrRefused, `"m1" does not keep its memory`)
}

// TestStale: a process with memory that another process than the one that registered last has left is not registered,
// whatever incarnation and boot it says. A process without memory is registered, and one whose process before may not
// have heard that it was.
func TestStale(t *testing.T) {
	h := newHarness(t)
	reg := func(incarnation, boot, nonce uint64, after ...uint64) *fsmpb.Command {
		c := register("m1", incarnation)
		r := c.GetRegisterNode().Node
		r.Boot, r.Keeps, r.Nonce, r.After = boot, true, nonce, after
		return c
	}
	is := func(what string, c *fsmpb.Command, want Arrival) {
		t.Helper()
		before := &dirpb.Node{}
		if n := h.s.Node(1); n != nil {
			before = proto.CloneOf(n)
		}
		r := h.do(c)
		if r.Arrival != want || r.NodeID != 1 {
			t.Errorf("%s: arrival %v of memory node %d, want %v", what, r.Arrival, r.NodeID, want)
		}
		if now := h.s.Node(1); want == ArrivalStale != proto.Equal(before, now) && want != ArrivalKnown {
			t.Errorf("%s: it was %v and is %v", what, before, now)
		}
	}
	is("the first process", reg(7, 1, 10), ArrivalNew)
	is("told again", reg(7, 1, 10, 10), ArrivalKnown)
	is("the second process", reg(7, 2, 20, 10, 20), ArrivalKept)
	is("the third one, as the second did not hear of it", reg(7, 3, 30, 10, 20, 30), ArrivalKept)
	is("the memory of the first, with the boot of the second", reg(7, 2, 40, 10, 40), ArrivalStale)
	is("with that of the third", reg(7, 3, 40, 10, 40), ArrivalStale)
	is("with a greater one", reg(7, 9, 50, 10, 40, 50), ArrivalStale)
	is("that of another incarnation", reg(6, 1, 50, 9, 50), ArrivalStale)
	is("no memory", reg(8, 1, 60), ArrivalRestarted)
	is("the memory before that", reg(7, 4, 70, 30, 70), ArrivalStale)
	h.do(&fsmpb.Command{Op: &fsmpb.Command_NodeDown{NodeDown: &fsmpb.NodeDown{NodeId: 1, Incarnation: 8, Boot: 1}}})
	is("the memory before that, when it is down", reg(7, 4, 70, 30, 70), ArrivalStale)
	is("of the same process another incarnation", reg(9, 1, 60, 60), ArrivalBack)
	is("without a nonce", reg(10, 1, 0), ArrivalRestarted)
	is("after one without", reg(10, 2, 80, 70, 80), ArrivalKept)
	h.refuse(reg(10, 2, 90, make([]uint64, MaxAfter+1)...), ErrInvalid, "after 17 others")
	h.refuse(reg(10, 2, 0, 1), ErrInvalid, "nonce 0 after 1 others")
	h.checkCopies()
}
