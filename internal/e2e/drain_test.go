package e2e

import (
	"fmt"
	"strings"
	"testing"
)

// TestDrainLeavesNothingToMend drains a memory node whose regions nobody has room for: its shards move, and placement
// groups that have none any more keep fewer members than their namespace has copies. Nobody finds fault with that.
func TestDrainLeavesNothingToMend(t *testing.T) {
	w := newWorld(t)
	w.dir = freeAddr(t)
	w.start(w.directory(t.TempDir(), freeAddr(t))...)
	for i := range 4 {
		w.start(w.memnode(fmt.Sprint("m", i+1))...)
	}
	// regions of 30 MiB, two on each memory node
	w.must(nil, "namespace", "create", "data", "--replicas", "2", "--bytes", "60MiB")
	for i := range 32 {
		w.must([]byte(fmt.Sprint("value", i)), "--namespace", "data", "put", fmt.Sprint("key", i))
	}
	w.must(nil, "drain", "m1", "--wait")
	o, _, code := w.ctl(nil, "status", "--check")
	st := string(o)
	if code != 0 {
		t.Fatal(st)
	}
	for _, want := range []string{"healthy: no problem is known", "draining: m1",
		"2 of 2 placement groups fully replicated, 2 without a shard"} {
		if !strings.Contains(st, want) {
			t.Errorf("status without %q", want)
		}
	}
	if n := strings.Count(st, "1 of 2"); n != 2 {
		t.Errorf("%d placement groups lack a copy, want the two that m1 has left: the test shows nothing", n)
	}
	if t.Failed() {
		t.Log(st)
	}
	w.must(nil, "--namespace", "data", "check")
	w.must(nil, "namespace", "set", "data", "--replicas", "2", "--wait")
	w.must(nil, "nodes", "restart", "m2")
	w.must(nil, "nodes", "remove", "m1", "--force")
	w.must(nil, "status", "--check")
	for i := range 32 {
		if got, want := string(w.must(nil, "--namespace", "data", "get", fmt.Sprint("key", i))),
			fmt.Sprint("value", i); got != want {
			t.Errorf("key%d is %q, want %q", i, got, want)
		}
	}
}
