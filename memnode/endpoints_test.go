package memnode

import (
	"testing"

	"github.com/kvd-project/kvd/internal/token"
)

// TestEndpoints: two endpoints of a provider are two ways to the same memory, each with keys of its own. A lane that
// connects by one of them is fenced at the other, and a probe fences nobody.
func TestEndpoints(t *testing.T) {
	dir := newDirectory(t)
	n, _ := open(t, dir, 1<<20, "tcp", "tcp", "tcp")
	dir.want(1, 1)
	names := []string{"tcp", "tcp/2", "tcp/3"}
	if dir.endpoint(names[0]) == dir.endpoint(names[1]) || dir.endpoint(names[1]) == dir.endpoint(names[2]) {
		t.Fatalf("endpoints share an address: %v", dir.registered[0].Endpoints)
	}
	const word = 4096
	for i, name := range names {
		k := dir.keys(1, name)
		l := mustDial(t, dir, name, rw, uint32(i))
		if err := l.cas(k.IndexRkey, k.IndexBase+word, uint64(i), uint64(i+1)); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if b, err := l.read(k.IndexRkey, k.IndexBase+word, 8); err != nil || b[0] != byte(i+1) {
			t.Errorf("%s reads %x, %v", name, b, err)
		}
		other := dir.keys(1, names[(i+1)%3])
		if _, err := l.read(other.IndexRkey, other.IndexBase, 8); err == nil {
			t.Errorf("keys of another endpoint are good for %s", name)
		}
	}
	k, k2 := dir.keys(1, names[0]), dir.keys(1, names[1])
	first := mustDial(t, dir, names[0], rw, 7)
	if _, err := mustDial(t, dir, names[1], rw, token.ProbeLane).read(k2.IndexRkey, k2.IndexBase, 8); err != nil {
		t.Errorf("a probe: %v", err)
	}
	if err := first.write(k.HeapRkey, k.HeapBase, "x"); err != nil {
		t.Errorf("beside a probe: %v", err)
	}
	second := mustDial(t, dir, names[1], rw, 7)
	if err := first.write(k.HeapRkey, k.HeapBase, "y"); err == nil {
		t.Error("a lane that has connected by another endpoint goes on by the first one")
	}
	if err := second.write(k2.HeapRkey, k2.HeapBase, "z"); err != nil {
		t.Error(err)
	}
	if got := len(n.mu.regions[1].mrs); got != 2*len(names) {
		t.Errorf("%d MRs", got)
	}
}
