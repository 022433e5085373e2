package fsm

import (
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

func deleteNS(name string, id uint32, end bool) *fsmpb.Command {
	return &fsmpb.Command{
		Op: &fsmpb.Command_DeleteNamespace{
			DeleteNamespace: &dirpb.DeleteNamespaceRequest{Name: name, Id: id, EndSessions: end}}}
}

func setNS(name string, replicas uint32) *fsmpb.Command {
	return &fsmpb.Command{
		Op: &fsmpb.Command_SetNamespace{
			SetNamespace: &dirpb.SetNamespaceRequest{Name: name, Replicas: replicas, KeepLimit: true}}}
}

func openAs(q *fsmpb.OpenSession) *fsmpb.Command {
	return &fsmpb.Command{Op: &fsmpb.Command_OpenSession{OpenSession: q}}
}

// left is what is there of a namespace, but for its row.
func left(s *State, namespace uint32) string {
	pgs := s.PGs(namespace)
	n := len(s.Shards(namespace)) + len(pgs)
	for _, x := range s.Sessions() {
		if x.NamespaceId == namespace {
			n++
		}
	}
	for _, j := range s.Jobs() {
		if j.NamespaceId == namespace {
			n++
		}
	}
	for _, h := range s.heaps {
		if s.pgs[h.PgId] == nil {
			return fmt.Sprintf("a heap of placement group %d, which is gone", h.PgId)
		}
	}
	return fmt.Sprint(n)
}

// A namespace that is deleted ends its sessions, keeps its regions until nothing of them can
// land, and leaves nothing.
func TestDeleteNamespace(t *testing.T) {
	h := cluster(t, 3, &dirpb.CreateNamespaceRequest{Name: "a", Replicas: 2, BytesPerNode: 64 << 20})
	h.do(create(&dirpb.CreateNamespaceRequest{Name: "b", Replicas: 1, BytesPerNode: 64 << 20}))
	h.activate()
	x := h.do(openAs(&fsmpb.OpenSession{NamespaceId: 1, Client: "gateway"})).Session.Id
	janitor := h.do(openAs(&fsmpb.OpenSession{NamespaceId: 1, Client: "janitor", Background: true})).Session.Id
	other := h.do(openAs(&fsmpb.OpenSession{NamespaceId: 2, Client: "other"})).Session.Id
	h.do(grant(x, 1, 100, 1, 0))
	h.do(grant(other, 4, 100, 1, 0))
	scrub := h.do(startJob(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_SCRUB, PgId: 1})).Job.Id
	h.do(claim(janitor, scrub))
	h.do(startJob(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_MOVE, ShardId: h.s.Shards(1)[1].Id, Split: true}))
	used := h.s.Node(1).UsedBytes

	h.refuse(deleteNS("c", 0, true), ErrNotFound, `"c"`)
	h.refuse(deleteNS("c", 99, true), ErrNotFound, `"c"`)
	h.refuse(deleteNS("a", 2, true), ErrInvalid, "has id 1, not 2")
	h.refuse(deleteNS("a", 1, false), ErrRefused, "1 sessions that live", `1 "gateway"`)
	if w := h.s.Namespace(1); w.Deleting {
		t.Fatal("refused, and deleted all the same")
	}
	if r := h.do(deleteNS("a", 1, true)).Deleted; r.Id != 1 || r.Fencing != 2 {
		t.Fatalf("deleted: %v", r)
	}
	if r := h.do(deleteNS("a", 0, false)).Deleted; r.Id != 1 || r.Fencing != 2 {
		t.Fatalf("deleted once more: %v", r)
	}
	h.checkCopies()
	h.refuse(openIn(1, 0), ErrNotFound, `"a" is being deleted`)
	h.refuse(create(&dirpb.CreateNamespaceRequest{Name: "a", BytesPerNode: 8 << 20}), ErrRefused, "being deleted")
	h.refuse(setNS("a", 1), ErrRefused, "being deleted")
	h.refuse(createPG(1, 1, 2), ErrRefused, "being deleted")
	h.refuse(startJob(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_SCRUB, PgId: 3}), ErrRefused, "being deleted")
	h.refuse(&fsmpb.Command{
		Op: &fsmpb.Command_PlanJoin{PlanJoin: &fsmpb.PlanJoin{PgId: 3, Epoch: h.pg(3).Epoch, NodeId: 2}}}, ErrRefused,
		"being deleted")
	h.refuse(claim(janitor, scrub), ErrNotFound)
	h.refuse(grant(x, 1, 1, 1, 0), ErrNotFound)
	if want := h.s.WantRegions(1, 100); len(want) != 3 || h.s.Node(1).UsedBytes != used {
		t.Fatalf("memory node 1 is to have %v while sessions may still write to it", want)
	}

	h.do(confirm(1, 100, x, janitor))
	h.do(confirm(2, 100, x, janitor))
	if h.s.Namespace(1) == nil {
		t.Fatal("gone before its sessions were fenced")
	}
	// The last memory node that owes a fence goes down: what it lent is gone with it.
	h.do(nodeDown(3, 100))
	if h.s.Namespace(1) != nil || left(h.s, 1) != "0" {
		t.Fatalf("namespace %v is left, and %s of it", h.s.Namespace(1), left(h.s, 1))
	}
	for _, n := range h.s.Nodes() {
		for _, want := range h.s.WantRegions(n.Id, n.Incarnation) {
			if want.NamespaceId == 1 {
				t.Errorf("memory node %q is to have %v", n.Name, want)
			}
		}
	}
	if h.s.Node(1).UsedBytes != 64<<20 {
		t.Errorf("regions take %d bytes of memory node 1, want those of one namespace", h.s.Node(1).UsedBytes)
	}
	// It comes back and is asked for nothing of the namespace that went meanwhile.
	h.do(register("m3", 101))
	for _, want := range h.s.WantRegions(3, 101) {
		if want.NamespaceId != 2 {
			t.Errorf("memory node 3 came back and is to have %v", want)
		}
	}
	h.activate()
	h.checkCopies()

	// Asked again, the one that is gone is gone; its name may be somebody else's by then.
	if r := h.do(deleteNS("a", 1, true)).Deleted; r.Id != 1 || r.Fencing != 0 {
		t.Fatalf("deleted again: %v", r)
	}
	h.refuse(deleteNS("a", 0, true), ErrNotFound)
	before := proto.CloneOf(h.s.Meta())
	w := h.do(create(&dirpb.CreateNamespaceRequest{Name: "a", Replicas: 1, BytesPerNode: 8 << 20})).Namespace
	if w.Id != 3 || h.s.PGs(3)[0].Id <= before.PgId || h.s.Shards(3)[0].Id <= before.ShardId {
		t.Fatalf("ids are used again: %v, %v, %v", w, h.s.PGs(3)[0], h.s.Shards(3)[0])
	}
	if r := h.do(deleteNS("a", 1, true)).Deleted; r.Id != 1 || h.s.Namespace(3).Deleting {
		t.Fatalf("the namespace of another id was deleted: %v", r)
	}
	// Without sessions it goes at once; a closed session is none.
	y := h.do(openIn(3, 0)).Session.Id
	h.refuse(deleteNS("a", 3, false), ErrRefused)
	h.do(closeS(y, 0))
	if r := h.do(deleteNS("a", 3, false)).Deleted; r.Fencing != 0 || h.s.Namespace(3) != nil || left(h.s, 3) != "0" {
		t.Fatalf("deleted %v, left %s", r, left(h.s, 3))
	}
	h.checkCopies()
	// A session that is being fenced already keeps it no longer than its fence, and a session that closes
	// meanwhile not even that.
	h.do(expire(other))
	late := h.do(openIn(2, 0)).Session.Id
	if r := h.do(deleteNS("b", 2, true)).Deleted; r.Fencing != 2 {
		t.Fatalf("deleted: %v", r)
	}
	h.do(closeS(late, 0, &dirpb.ReturnedRun{PgId: 1, Unit: 1 << 15, Units: 1})) // and memory of what is gone
	for _, n := range h.s.Nodes() {
		h.do(confirm(n.Id, n.Incarnation, other))
	}
	if h.s.Namespace(2) != nil || left(h.s, 2) != "0" {
		t.Fatalf("left %s", left(h.s, 2))
	}
	h.checkCopies()
}

// Ids that sessions would not take are not given out.
func TestPGIDsEnd(t *testing.T) {
	h := cluster(t, 2, &dirpb.CreateNamespaceRequest{Name: "a", Replicas: 1, BytesPerNode: 8 << 20})
	h.s.editMeta().PgId = MaxPGID - 1
	h.s.takeChanges()
	h.refuse(create(&dirpb.CreateNamespaceRequest{Name: "b", Replicas: 1, BytesPerNode: 8 << 20}), ErrFull,
		"65535 placement groups")
	h.do(createPG(1, 2))
	h.refuse(createPG(1, 2), ErrFull, "65536 placement groups")
}

// earlierRows are a state that a version without deletion wrote: key and value.
const earlierRows = `
6800000001 080110806618e466208080084080ae067a0708806610641801
6800000002 0802108066188066208080084080ae06
6a00000001 0a080801100718012001
6d 1805200228013002380240025001
6e00000001 080112026d3118642a120a03746370120b3132372e302e302e313a3130013880808080044080808004
6e00000002 080212026d3218642a120a03746370120b3132372e302e302e313a3130013880808080044080808004
7000000001 08011001180120022a16080110641a0e0a03746370110101000000000000200330808080043880803340015803
7000000002 08021001180120022a16080210641a0e0a03746370110202000000000000200330808080043880803340015803
7300000001 0801100118013801
7300000002 0802100218013802520408011064520408021064
7700000001 0801120161180120012907000000000000003001388080800440808040
7800000001 08011001200128013080203817
7800000002 080210011801200128023080203817
`

// A state of an earlier version goes on: no namespace of it is being deleted, every session is
// a user's, and its namespace can be changed and deleted.
func TestEarlierRows(t *testing.T) {
	var rows []Row
	for line := range strings.Lines(strings.TrimSpace(earlierRows)) {
		k, v, _ := strings.Cut(strings.TrimSpace(line), " ")
		key, err := hex.DecodeString(k)
		value, verr := hex.DecodeString(v)
		if err != nil || verr != nil {
			t.Fatal(err, verr)
		}
		rows = append(rows, Row{key, value})
	}
	s, err := Load(rows)
	if err != nil {
		t.Fatal(err)
	}
	h := &harness{t: t, s: s, disk: make(map[string][]byte)}
	for _, r := range rows {
		h.disk[string(r.Key)] = r.Value
	}
	h.checkCopies()
	if w := s.Namespace(1); w.Deleting || w.Replicas != 1 || w.LimitBytes != 1<<20 || len(s.Sessions()) != 2 ||
		s.Session(1).Background {
		t.Fatalf("loaded namespace %v and sessions %v", w, s.Sessions())
	}
	h.do(setNS("a", 2))
	h.refuse(deleteNS("a", 1, false), ErrRefused, "1 sessions that live")
	if r := h.do(deleteNS("a", 1, true)).Deleted; r.Fencing != 2 {
		t.Fatalf("deleted %v", r)
	}
	h.do(confirm(1, 100, 1, 2))
	h.do(confirm(2, 100, 1, 2))
	if s.Namespace(1) != nil || left(s, 1) != "0" || s.Node(1).UsedBytes+s.Node(2).UsedBytes != 0 {
		t.Fatalf("left %s, memory nodes %v", left(s, 1), s.Nodes())
	}
	h.checkCopies()
}

// Without a memory node that is up nobody has to confirm anything.
func TestDeleteNamespaceAlone(t *testing.T) {
	h := cluster(t, 2, &dirpb.CreateNamespaceRequest{Name: "a", Replicas: 2, BytesPerNode: 64 << 20})
	h.do(openIn(1, 0))
	h.do(nodeDown(1, 100))
	h.do(nodeDown(2, 100))
	if r := h.do(deleteNS("a", 0, true)).Deleted; r.Fencing != 0 || h.s.Namespace(1) != nil || left(h.s, 1) != "0" {
		t.Fatalf("deleted %v, left %s", r, left(h.s, 1))
	}
	h.checkCopies()
	h.do(register("m1", 101))
	if want := h.s.WantRegions(1, 101); len(want) != 0 || h.s.Node(1).UsedBytes != 0 {
		t.Fatalf("memory node 1 is to have %v", want)
	}
}

// A rebalance is noted until it is taken back, and operators alone see it.
func TestRebalance(t *testing.T) {
	h := cluster(t, 2, &dirpb.CreateNamespaceRequest{Name: "a", Replicas: 1, BytesPerNode: 64 << 20})
	h.activate()
	x := h.do(openIn(1, 0)).Session
	const none, on, cancelled, refused = dirpb.Rebalancing_REBALANCING_NONE, dirpb.Rebalancing_REBALANCING_ON,
		dirpb.Rebalancing_REBALANCING_CANCELLED, dirpb.Rebalancing_REBALANCING_REFUSED
	h.refuse(rebalance(7, on), ErrNotFound, "namespace 7")
	h.refuse(rebalance(1, 9), ErrInvalid, "a rebalance that is 9")
	for i, tc := range [][2]dirpb.Rebalancing{
		{cancelled, none}, {on, on}, {on, on}, {cancelled, cancelled}, {refused, cancelled}, {none, cancelled},
		{on, on}, {none, none},
		{on, on}, {refused, refused}, {on, on},
	} {
		h.do(rebalance(1, tc[0]))
		want := []uint32{1}
		if tc[1] != on {
			want = nil
		}
		if got := h.s.Rebalancing(); !slices.Equal(got, want) {
			t.Fatalf("step %d: namespaces %d are rebalanced, want %d", i, got, want)
		}
		if got := h.s.Map(nil).Namespaces[0].Rebalancing; got != tc[1] {
			t.Fatalf("step %d: %v, want %v", i, got, tc[1])
		}
	}
	if w := h.s.Map(x).Namespaces[0]; w.Rebalancing != none {
		t.Fatalf("a session sees %v", w)
	}
	h.checkCopies()
	h.do(deleteNS("a", 1, true))
	if got := h.s.Rebalancing(); len(got) != 0 {
		t.Fatalf("namespaces %d are rebalanced while they go", got)
	}
	h.refuse(rebalance(1, none), ErrRefused, "is being deleted")
}

// A namespace's limit in a log of an earlier version means what it meant.
func TestSetNamespace(t *testing.T) {
	h := cluster(t, 2, &dirpb.CreateNamespaceRequest{Name: "a", Replicas: 1, BytesPerNode: 64 << 20,
		LimitBytes: 1 << 20})
	if w := h.do(setNS("a", 2)).Namespace; w.LimitBytes != 1<<20 || w.Replicas != 2 || w.BytesPerNode != 128<<20 {
		t.Fatalf("%v", w)
	}
	if r := h.do(setNS("a", 2)); len(r.Changes) != 0 {
		t.Fatalf("set again: %d rows changed", len(r.Changes))
	}
	if w := h.do(set(&dirpb.SetNamespaceRequest{Name: "a"})).Namespace; w.LimitBytes != 0 || w.Replicas != 2 {
		t.Fatalf("%v", w)
	}
	h.do(set(&dirpb.SetNamespaceRequest{Name: "a", LimitBytes: 5}))
	if w := h.do(setNS("a", 1)).Namespace; w.LimitBytes != 5 || w.Replicas != 1 || w.BytesPerNode != 64<<20 {
		t.Fatalf("%v", w)
	}
	h.refuse(setNS("b", 1), ErrNotFound)
	h.checkCopies()
}

// A number of copies that there is no place for is refused with the reason.
func TestReplicasRefused(t *testing.T) {
	register := func(h *harness, name, domain string, mib uint64) {
		h.do(registerWith(&dirpb.RegisterNodeRequest{Name: name, Incarnation: 1, CapacityBytes: mib << 20,
			Domain: domain}))
	}
	h := newHarness(t)
	register(h, "m1", "", 100)
	register(h, "m2", "", 100)
	h.do(create(&dirpb.CreateNamespaceRequest{Name: "a", Replicas: 1, BytesPerNode: 60 << 20}))
	h.activate()
	h.refuse(setNS("a", 4), ErrInvalid, "4 copies", "1..3")
	h.refuse(setNS("a", 3), ErrRefused, "3 copies", "2 are up")
	h.refuse(setNS("a", 2), ErrFull, "60 MiB", "40 MiB at \"m1\"")
	register(h, "m3", "", 100)
	h.refuse(setNS("a", 2), ErrFull) // one has room, for one of two
	register(h, "m4", "", 200)
	h.do(drain(4, false))
	h.refuse(setNS("a", 2), ErrFull)
	h.do(drain(4, true))
	h.do(setNS("a", 2))

	h = newHarness(t)
	register(h, "m1", "r1", 100)
	register(h, "m2", "r1", 100)
	h.do(create(&dirpb.CreateNamespaceRequest{Name: "a", Replicas: 1, BytesPerNode: 20 << 20}))
	h.activate()
	h.refuse(setNS("a", 2), ErrRefused, "as many failure domains", "in 1")
	register(h, "m3", "r2", 20)
	h.refuse(setNS("a", 2), ErrFull, "in one failure domain")
	register(h, "m4", "r2", 20)
	h.do(setNS("a", 2))
	h.checkCopies()
}

// Fewer copies need no region that was only planned.
func TestReplicasLowered(t *testing.T) {
	h := cluster(t, 2, &dirpb.CreateNamespaceRequest{Name: "a", Replicas: 1, BytesPerNode: 64 << 20})
	h.do(setNS("a", 2))
	h.do(&fsmpb.Command{
		Op: &fsmpb.Command_PlanJoin{PlanJoin: &fsmpb.PlanJoin{PgId: 1, Epoch: h.pg(1).Epoch, NodeId: 2}}})
	if h.s.Node(2).UsedBytes != 128<<20 {
		t.Fatalf("memory node 2 gives %d bytes", h.s.Node(2).UsedBytes)
	}
	h.do(setNS("a", 1))
	if h.pg(1).Planned != nil || h.s.Node(2).UsedBytes != 64<<20 {
		t.Fatalf("placement group %v, memory node %v", h.pg(1), h.s.Node(2))
	}
	// A planned member that replaces another that drains is still wanted.
	h.do(drain(1, false))
	h.do(&fsmpb.Command{
		Op: &fsmpb.Command_PlanJoin{PlanJoin: &fsmpb.PlanJoin{PgId: 1, Epoch: h.pg(1).Epoch, NodeId: 2}}})
	h.do(setNS("a", 1))
	if h.pg(1).Planned == nil {
		t.Fatal("the replacement of a member that drains is forgotten")
	}
	h.checkCopies()
}

// Copies find places where there are some: each memory node that holds one region has room for
// just one more, so no group may take another's only place.
func TestSpreadTight(t *testing.T) {
	for n := 2; n <= 6; n++ {
		h := newHarness(t)
		for i := range n {
			h.do(registerWith(&dirpb.RegisterNodeRequest{Name: fmt.Sprintf("m%d", i+1), Incarnation: 100,
				CapacityBytes: 40 << 20}))
		}
		h.do(create(&dirpb.CreateNamespaceRequest{Name: "a", Replicas: 1})) // half of each
		h.activate()
		sp := h.s.Spread(1, 2, SpreadOptions{})
		if sp.Places() != n || len(sp.Short) != 0 {
			t.Errorf("%d memory nodes: %v", n, sp)
		}
		h.do(setNS("a", 2))
	}
}

// A spread finds as many places as there are, whatever the sizes of groups of equal regions,
// members and domains, and puts copies apart where it can.
func TestSpread(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		pick := func(label string, n int) int { return rapid.IntRange(0, n).Draw(rt, label) }
		s := New()
		nodes, copies := 1+pick("nodes", 4), 1+pick("copies", 2)
		const region = 1 << 20
		slots := make([]int, nodes)
		s.namespaces[1] = &dirpb.Namespace{Id: 1, Name: "a", Replicas: 1}
		for i := range nodes {
			slots[i] = pick("slots", 3)
			s.nodes[uint32(i+1)] = &dirpb.Node{Id: uint32(i + 1), State: up, CapacityBytes: uint64(slots[i]) * region,
				Domain: fmt.Sprint(pick("domain", 2))}
		}
		var groups [][]uint32
		for g := range 1 + pick("groups", 3) {
			pg := &dirpb.PlacementGroup{Id: uint32(g + 1), NamespaceId: 1, State: active, RegionBytes: region}
			for i := range nodes {
				if len(pg.Members) < copies && pick("member", 1) == 1 {
					pg.Members = append(pg.Members, &dirpb.Member{NodeId: uint32(i + 1)})
				}
			}
			s.pgs[pg.Id] = pg
			var has []uint32
			for _, m := range pg.Members {
				has = append(has, m.NodeId)
			}
			groups = append(groups, has)
		}
		sp := s.Spread(1, copies, SpreadOptions{})
		taken := make([]int, nodes)
		lacks := 0
		for g, has := range groups {
			on := slices.Clone(has)
			for _, id := range sp.Where[uint32(g+1)] {
				if slices.Contains(on, id) {
					rt.Fatalf("group %d on %v is to join %v", g+1, has, sp.Where[uint32(g+1)])
				}
				on = append(on, id)
				taken[id-1]++
			}
			lacks += max(0, copies-len(has))
			if len(on) < copies != slices.Contains(sp.Short, uint32(g+1)) {
				rt.Fatalf("group %d gets %v of %d copies; short are %v", g+1, on, copies, sp.Short)
			}
		}
		for i, n := range taken {
			if n > slots[i] {
				rt.Fatalf("memory node %d has room for %d and gets %d", i+1, slots[i], n)
			}
		}
		if most := mostPlaces(groups, slots, copies); sp.Places() != most {
			rt.Fatalf("%d of %d copies have a place, and there are places for %d: %+v, groups on %v, slots %v",
				sp.Places(), lacks, most, sp, groups, slots)
		}
	})
}

// mostPlaces tries everything.
func mostPlaces(groups [][]uint32, slots []int, copies int) int {
	if len(groups) == 0 {
		return 0
	}
	best := 0
	var try func(node, n int, on []uint32)
	try = func(node, n int, on []uint32) {
		if node == len(slots) || len(on) >= copies {
			best = max(best, n+mostPlaces(groups[1:], slots, copies))
			return
		}
		try(node+1, n, on)
		if slots[node] > 0 && !slices.Contains(groups[0], uint32(node+1)) {
			slots[node]--
			try(node+1, n+1, append(slices.Clone(on), uint32(node+1)))
			slots[node]++
		}
	}
	try(0, 0, groups[0])
	return best
}
