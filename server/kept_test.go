package server

import (
	"errors"
	"fmt"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// TestOthersOlder: the folder of one of three nodes is put back, and leads with another one that was down. The third, which alone has what was
// acknowledged, is not cut back by the leader's log: it stops each time that it is started, with its state.
func TestOthersOlder(t *testing.T) {
	x := newTrio(t, 3)
	x.kill(1)
	old := x.fs[1].CrashClone(vfs.CrashCloneCfg{})
	x.start(1)
	until(t, "d2 is there again", func() bool { return x.admitted(1) })
	x.kill(2)
	for i := range 3 {
		until(t, "a memory node is entered", func() bool { return x.register(fmt.Sprint("acked", i)) == nil })
	}
	_ = x.nodes[0].streams.Close()
	if err := x.nodes[0].Close(); err != nil { // what it has applied is in its folder, as it is unless a machine fails
		t.Fatal(err)
	}
	x.kill(1)
	x.fs[1] = old
	x.start(1)
	x.start(2)
	until(t, "those two lead", func() bool { return x.leader() != nil })
	for range 2 {
		x.start(0)
		n := x.nodes[0]
		select {
		case <-n.Done():
		case <-testCtx(t).Done():
			t.Fatalf("d1 goes on; it knows what was acknowledged: %v, members %v", x.has(n, "acked2"), n.members())
		}
		if !errors.Is(n.Err(), ErrOthersOlder) {
			t.Fatalf("d1 ended with %v", n.Err())
		}
		if !x.has(n, "acked2") {
			t.Error("d1 has lost what was acknowledged")
		}
	}
}
