package lead

import (
	"fmt"
	"slices"
	"testing"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

const (
	asStore = dirpb.NamespaceMode_NAMESPACE_STORE
	asCache = dirpb.NamespaceMode_NAMESPACE_CACHE
)

// keepers registers memory nodes that keep their memory, with room for so many regions.
func (w *world) keepers(n int, regions uint64) {
	w.t.Helper()
	for i := range n {
		w.keeps(fmt.Sprint("m", i+1), regions, 1)
	}
}

func (w *world) keeps(name string, regions, boot uint64, retained ...*dirpb.RetainedRegion) {
	w.t.Helper()
	r := w.apply(&fsmpb.Command{
		Op: &fsmpb.Command_RegisterNode{RegisterNode: &fsmpb.RegisterNode{Node: &dirpb.RegisterNodeRequest{
			Name: name, Incarnation: 1, CapacityBytes: regions * region, Domain: name, Boot: boot, Keeps: true,
			Retained:  retained,
			Endpoints: []*dirpb.Endpoint{{Provider: "tcp", Addr: "h:1"}},
		}}}})
	w.l.Heartbeat(w.s, w.now, r.NodeID, 1, nil)
}

// made makes a namespace whose placement groups have regions of region bytes, and gives their ids. A session is granted
// memory in each, unless it is to be empty.
func (w *world) made(name string, replicas uint32, mode dirpb.NamespaceMode, empty bool) (ns uint32, pgs []uint32) {
	w.t.Helper()
	ns = w.apply(&fsmpb.Command{Op: &fsmpb.Command_CreateNamespace{CreateNamespace: &fsmpb.CreateNamespace{
		Namespace: &dirpb.CreateNamespaceRequest{Name: name, Replicas: replicas,
			BytesPerNode: uint64(replicas) * region, Shards: 4, Mode: mode},
	}}}).Namespace.Id
	w.publish()
	x := w.open(ns)
	for _, pg := range w.s.PGs(ns) {
		pgs = append(pgs, pg.Id)
		if !empty {
			w.grant(x, pg.Id, 1)
		}
	}
	w.apply(&fsmpb.Command{Op: &fsmpb.Command_CloseSession{CloseSession: &fsmpb.CloseSession{SessionId: x}}})
	return ns, pgs
}

// silence lets m1, which is silent, be found to be so.
func (w *world) silence() {
	w.t.Helper()
	w.want()
	w.mute[1] = true
	w.pass(lease)
	w.beat()
	w.ack()
	w.want()
	w.now++
	w.waits(1)
}

// elsewhere fails unless a placement group is active without m1.
func (w *world) elsewhere(pg uint32) {
	w.t.Helper()
	if g := w.s.PG(pg); g.State != dirpb.PGState_PG_ACTIVE ||
		slices.ContainsFunc(g.Members, func(m *dirpb.Member) bool {
			return m.NodeId == 1
		}) {
		w.t.Fatalf("placement group %d is %v, want it active on other memory nodes", pg, g)
	}
}

// A memory node that is silent is lost to each placement group by itself: those with another copy go on within a lease,
// one of a cache, or one that is known to be empty, starts over where there is room, and one that has no other copy is
// waited for. Nothing new is put on the memory node. When it is back it is a member of what has waited alone.
func TestSilentIsLostToEachGroup(t *testing.T) {
	w := newWorld(t)
	w.keepers(3, 12)
	_, data := w.made("data", 2, asStore, false) // on 1 2, 2 3 and 3 1
	_, kept := w.made("kept", 1, asStore, false) // on 1, 2 and 3
	_, page := w.made("page", 1, asCache, false)
	_, void := w.made("void", 1, asStore, true)
	w.silence()
	w.want(fmt.Sprintf(`"m1" is waited for, since it is silent and has the last copy of something; placement groups %d go on without it`, []uint32{data[0], data[2]}))
	w.on(data[0], dirpb.PGState_PG_FROZEN, 2)
	w.on(data[2], dirpb.PGState_PG_FROZEN, 3)
	w.on(kept[0], dirpb.PGState_PG_ACTIVE, 1)
	w.want(fmt.Sprintf("%d: every session has quiesced", data[0]),
		fmt.Sprintf("%d: every session has quiesced", data[2]),
		fmt.Sprintf("%d: it is made anew on memory nodes", page[0]), fmt.Sprintf("%d: it is made anew on memory nodes",
			void[0]))
	w.publish()
	w.on(data[0], dirpb.PGState_PG_ACTIVE, 2)
	w.elsewhere(page[0])
	w.elsewhere(void[0])
	if a, b := w.s.NamespaceNamed("page").Losses, w.s.NamespaceNamed("void").Losses; len(a) != 1 || a[0].Node != "m1" ||
		len(b) != 0 {
		t.Fatalf("the cache has lost %v, and the empty namespace %v", a, b)
	}
	w.want(fmt.Sprintf(`group %d: memory node "m3" is to join`, data[0]),
		fmt.Sprintf(`group %d: memory node "m2" is to join`, data[2]))
	late := w.apply(&fsmpb.Command{Op: &fsmpb.Command_CreateNamespace{CreateNamespace: &fsmpb.CreateNamespace{
		Namespace: &dirpb.CreateNamespaceRequest{Name: "late", Replicas: 1, BytesPerNode: region,
			Shards: 4}}}}).Namespace.Id
	if n := len(w.s.PGs(late)); n != 2 {
		t.Fatalf("a namespace that is made meanwhile has %d placement groups, want 2", n)
	}
	w.publish()
	for range 20 { // it is waited for without end
		w.pass(lease / 2)
		w.beat()
		w.want()
	}
	w.mute[1] = false
	w.beat()
	w.waits()
	w.on(kept[0], dirpb.PGState_PG_ACTIVE, 1)
	if n := len(w.s.WantRegions(1, 1)); n != 1 {
		t.Fatalf("it is to have %d regions, want that which has waited", n)
	}
	w.want()
	// It is a memory node like any when it has dropped the others.
	if !w.s.Node(1).Silent {
		t.Fatal("it may take new regions, and has the former ones")
	}
	w.keeps("m1", 12, 1)
	if w.s.Node(1).Silent {
		t.Fatal("it has registered again, and takes no new region")
	}
}

// An operator gives up the rest.
func TestGiveUpWhatWaits(t *testing.T) {
	w := newWorld(t)
	w.keepers(3, 12)
	_, data := w.made("data", 2, asStore, false)
	_, kept := w.made("kept", 1, asStore, false)
	w.silence()
	w.want(`"m1" is waited for`)
	c, err := w.l.GiveUp(w.s, 1, w.now)
	if err != nil {
		t.Fatal(err)
	}
	w.apply(c)
	w.on(kept[0], dirpb.PGState_PG_LOST, 1)
	w.on(data[0], dirpb.PGState_PG_FROZEN, 2)
	if n := w.s.Node(1); n.State != dirpb.NodeState_NODE_DOWN || n.Silent {
		t.Fatalf("the memory node is %v", n)
	}
}

// Where no other memory node has room for it, a cache's placement group waits: nothing would be gained. So does one
// that holds something and is no cache's.
func TestNowhereElse(t *testing.T) {
	w := newWorld(t)
	w.keepers(3, 2)
	_, page := w.made("page", 1, asCache, false)
	_, kept := w.made("kept", 1, asStore, false)
	w.silence()
	w.want(`"m1" is waited for`)
	for range 10 {
		w.pass(lease / 2)
		w.beat()
		w.want()
	}
	w.on(page[0], dirpb.PGState_PG_ACTIVE, 1)
	w.on(kept[0], dirpb.PGState_PG_ACTIVE, 1)
	w.keeps("m4", 1, 1)
	w.want(fmt.Sprintf(`%d: it is made anew on memory nodes ["m4"]`, page[0]))
}

// Sessions that died with the memory node hold up nothing that goes on without it: neither those of a namespace that
// has nothing there any more, nor, in one that waits, the placement groups with copies elsewhere.
func TestDeadSessionsOfTheSilent(t *testing.T) {
	w := newWorld(t)
	w.keepers(4, 12)
	data, pgs := w.made("data", 2, asStore, false) // on 1 2, 2 3, 3 4 and 4 1
	kept, _ := w.made("kept", 1, asStore, false)
	other := w.create("other", 1, 4)
	dead := []uint32{w.open(data), w.open(kept), w.open(other)}
	w.mute[1] = true
	w.pass(lease)
	w.beat()
	w.now++
	w.want(`"m1" is waited for`, fmt.Sprintf("fencing sessions %d", dead))
	w.fence()
	w.step() // what starts over elsewhere has nothing there
	w.publish()
	for i, want := range []dirpb.SessionLife{dirpb.SessionLife_SESSION_FENCED, dirpb.SessionLife_SESSION_FENCING,
		dirpb.SessionLife_SESSION_FENCED} {
		if life := w.s.Life(dead[i]); life != want {
			t.Errorf("session %d is %v, want %v", dead[i], life, want)
		}
	}
	w.step()
	w.elsewhere(pgs[0])
	w.elsewhere(pgs[3])

	// Now m2 is silent, too: the copies that m1 left there are waited for, and a session of the same namespace dies.
	w.step()
	x := w.open(data)
	w.mute[2] = true
	w.pass(lease)
	w.beat()
	w.now++
	w.step()
	w.fence()
	for range 4 {
		w.step()
	}
	if life := w.s.Life(x); life != dirpb.SessionLife_SESSION_FENCING {
		t.Fatalf("session %d is %v, want it to wait for m2", x, life)
	}
	w.on(pgs[0], dirpb.PGState_PG_ACTIVE, 2)
	w.on(pgs[1], dirpb.PGState_PG_ACTIVE, 3)
}
