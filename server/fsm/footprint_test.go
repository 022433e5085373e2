package fsm

import (
	"fmt"
	"testing"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// large is a store of 64 memory nodes that lend 64 MiB each, in 8 failure domains.
func large(t tester) *harness {
	h := newHarness(t)
	for i := range 64 {
		h.do(registerWith(&dirpb.RegisterNodeRequest{Name: fmt.Sprint("m", i+1), Incarnation: 100,
			CapacityBytes: 64 << 20, Domain: fmt.Sprint("rack", i%8)}))
	}
	return h
}

// homesOf are the memory nodes that have a region of a namespace.
func homesOf(h *harness, ns uint32) map[uint32]bool {
	homes := make(map[uint32]bool)
	for _, pg := range h.s.PGs(ns) {
		for _, m := range pg.Members {
			homes[m.NodeId] = true
		}
	}
	return homes
}

// TestManyNamespaces: 64 memory nodes of 64 MiB hold dozens of namespaces without a size of their own, and more of a
// small one: none takes a region of every memory node. They spread over all of the store, and each over failure
// domains.
func TestManyNamespaces(t *testing.T) {
	for limit, want := range map[uint64]int{0: 50, 8 << 20: 100} {
		t.Run(fmt.Sprint("limit ", limit>>20, " MiB"), func(t *testing.T) {
			h := large(t)
			used := make(map[uint32]bool)
			made := 0
			for ; made < 1000; made++ {
				// not h.try, which looks at all of the state
				r := Apply(h.s, create(&dirpb.CreateNamespaceRequest{Name: fmt.Sprint("n", made), Replicas: 2,
					LimitBytes: limit}))
				if r.Err != nil || r.Namespace.Nodes == 0 {
					// there is not enough left for it on some of them
					break
				}
				w, homes, heap := r.Namespace, homesOf(h, r.Namespace.Id), uint64(0)
				domains := make(map[string]bool)
				for id := range homes {
					used[id], domains[h.s.Node(id).Domain] = true, true
				}
				for _, pg := range h.s.PGs(w.Id) {
					if a, b := h.s.Node(pg.Members[0].NodeId), h.s.Node(pg.Members[1].NodeId); a.Domain == b.Domain {
						t.Fatalf("namespace %d: two copies in %s", made, a.Domain)
					}
					heap += pg.RegionBytes - pg.IndexBytes
				}
				if len(homes) != int(w.Nodes) || !w.Grows || limit == 0 && len(homes) != FirstNodes ||
					len(domains) != min(8, len(homes)) {
					t.Fatalf("namespace %d of %d nodes is on %d, in %d failure domains", made, w.Nodes, len(homes),
						len(domains))
				}
				if heap < limit {
					t.Fatalf("namespace %d has heaps of %d bytes, less than its limit", made, heap)
				}
			}
			t.Logf("%d namespaces", made)
			if made < want || len(used) != 64 {
				t.Errorf("%d namespaces on %d memory nodes, want %d on 64", made, len(used), want)
			}
		})
	}
}

// TestFootprint: a namespace is on all memory nodes of a small store, or as many as it is told.
func TestFootprint(t *testing.T) {
	small := cluster(t, FirstNodes, &dirpb.CreateNamespaceRequest{Name: "all"})
	if w := small.s.NamespaceNamed("all"); w.Nodes != 0 || w.Grows || len(small.s.PGs(w.Id)) != FirstNodes {
		t.Errorf("%v has %d placement groups", w, len(small.s.PGs(w.Id)))
	}
	h := large(t)
	for _, c := range []struct {
		q     *dirpb.CreateNamespaceRequest
		pgs   int
		bound uint32
		grows bool
	}{
		{&dirpb.CreateNamespaceRequest{Name: "three", Replicas: 2, BytesPerNode: 1 << 20, Nodes: 3}, 3, 3, false},
		{&dirpb.CreateNamespaceRequest{Name: "every", Replicas: 2, BytesPerNode: 1 << 20, Nodes: 64}, 64, 64, false},
		{&dirpb.CreateNamespaceRequest{Name: "tiny", Replicas: 3, BytesPerNode: 3 << 20, LimitBytes: 1 << 20}, 3, 3,
			true},
		{&dirpb.CreateNamespaceRequest{Name: "much", Replicas: 1, BytesPerNode: 1 << 20, LimitBytes: 1 << 30}, 64, 0,
			false},
		{&dirpb.CreateNamespaceRequest{Name: "some", Replicas: 1, BytesPerNode: 1 << 20, LimitBytes: 15 << 20}, 21, 21,
			true},
	} {
		w := h.do(create(c.q)).Namespace
		if n := len(h.s.PGs(w.Id)); n != c.pgs || w.Nodes != c.bound || w.Grows != c.grows {
			t.Errorf("%s: %d placement groups, %d nodes, grows %v; want %d, %d, %v", w.Name, n, w.Nodes, w.Grows, c.pgs,
				c.bound, c.grows)
		}
	}
	h.refuse(create(&dirpb.CreateNamespaceRequest{Name: "x", Replicas: 2, Nodes: 1}), ErrInvalid, "1 memory nodes",
		"2 copies")
	h.refuse(create(&dirpb.CreateNamespaceRequest{Name: "x", Nodes: 65}), ErrUnavailable, "65 memory nodes",
		"64 are up")
	setNS := func(name string, n uint32) *fsmpb.Command {
		return set(&dirpb.SetNamespaceRequest{Name: name, KeepLimit: true, Nodes: n})
	}
	h.refuse(setNS("three", 2), ErrRefused, "3 placement groups")
	h.refuse(setNS("tiny", 1), ErrInvalid, "3 copies")
	if w := h.do(setNS("tiny", 9)).Namespace; w.Nodes != 9 || w.Grows ||
		w.Rebalancing != dirpb.Rebalancing_REBALANCING_ON {
		t.Errorf("set to 9 nodes: %v", w)
	}
	// Sessions are not shown it.
	m := h.s.Map(&fsmpb.Session{NamespaceId: h.s.NamespaceNamed("tiny").Id})
	for _, w := range m.Namespaces {
		if w.Nodes != 0 || w.Grows {
			t.Errorf("a session is shown %v", w)
		}
	}
}

// TestFootprintLevelZero: at level 0 a namespace is on all memory nodes, as earlier versions have it.
func TestFootprintLevelZero(t *testing.T) {
	h := newHarness(t)
	h.do(initAt(0))
	for i := range 10 {
		h.do(register(fmt.Sprint("m", i+1), 100))
	}
	if w := h.do(create(&dirpb.CreateNamespaceRequest{Name: "n", Nodes: 3})).Namespace; w.Nodes != 0 ||
		len(h.s.PGs(w.Id)) != 10 {
		t.Errorf("%v has %d placement groups", w, len(h.s.PGs(w.Id)))
	}
	h.refuse(set(&dirpb.SetNamespaceRequest{Name: "n", KeepLimit: true, Nodes: 12}), ErrRefused, "level 1")
}
