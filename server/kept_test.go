package server

import (
	"errors"
	"fmt"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/kvd-project/kvd/internal/testutil"
)

// TestOthersOlder: the folder of one of three nodes is put back, and leads with another one that was down. The third,
// which alone has what was acknowledged, is cut back neither by the leader's log nor by its snapshot: it stops each
// time that it is started, with its state.
func TestOthersOlder(t *testing.T) {
	for name, c := range map[string]struct{ more, logs uint64 }{
		"by the log":                     {},
		"by a snapshot of fewer entries": {more: 1, logs: 1},
		"by a snapshot of more entries":  {more: 12, logs: 1},
	} {
		t.Run(name, func(t *testing.T) { testOthersOlder(t, c.more, c.logs) })
	}
}

// testOthersOlder: the others acknowledge more entries, and keep so many before a snapshot of them; 0: they make none.
func testOthersOlder(t *testing.T, more, logs uint64) {
	x := newTrio(t, 3)
	x.snapshotLogs = logs
	x.kill(1)
	old := x.fs[1].CrashClone(vfs.CrashCloneCfg{})
	shared := x.nodes[0].raft.LastIndex() // at most
	x.start(1)
	testutil.Until(t, "d2 is there again", func() bool { return x.admitted(1) })
	x.kill(2)
	for i := range 6 {
		testutil.Until(t, "a memory node is entered", func() bool { return x.register(fmt.Sprint("acked", i)) == nil })
	}
	testutil.Until(t, "d1 has applied that", func() bool { return x.has(x.nodes[0], "acked5") }) // another one may lead
	_ = x.nodes[0].streams.Close()
	if err := x.nodes[0].Close(); err != nil { // what it has applied is in its folder, as it is unless a machine fails
		t.Fatal(err)
	}
	x.kill(1)
	x.fs[1] = old
	x.start(1)
	x.start(2)
	testutil.Until(t, "those two lead", func() bool { return x.leader() != nil })
	for i := range more {
		testutil.Until(t, "a memory node is entered", func() bool { return x.register(fmt.Sprint("other", i)) == nil })
	}
	if logs > 0 {
		for _, n := range x.nodes[1:] { // either may lead
			if err := n.raft.Snapshot().Error(); err != nil {
				t.Fatal(err)
			}
			first, err := n.store.FirstIndex()
			if err != nil || first <= shared {
				t.Fatalf("the log begins at %d, %v; the folders have %d entries in common", first, err, shared)
			}
		}
	}
	for range 2 {
		x.start(0)
		n := x.nodes[0]
		select {
		case <-n.Done():
		case <-testCtx(t).Done():
			t.Fatalf("d1 goes on; it knows what was acknowledged: %v, members %v", x.has(n, "acked5"), n.members())
		}
		if !errors.Is(n.Err(), ErrOthersOlder) {
			t.Fatalf("d1 ended with %v", n.Err())
		}
		if !x.has(n, "acked5") {
			t.Error("d1 has lost what was acknowledged")
		}
	}
}
