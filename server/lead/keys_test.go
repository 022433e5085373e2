package lead

import (
	"bytes"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// The newest key that every memory node that is up takes signs tokens; quiet sessions with an older one are called for
// it, and everybody who has not taken it over is named.
func TestKeys(t *testing.T) {
	w := newWorld(t)
	w.apply(&fsmpb.Command{
		Op: &fsmpb.Command_Init{
			Init: &fsmpb.Init{ClusterId: "c", ClusterKey: []byte("k"), Level: &fsmpb.Level{Level: fsm.Level}}}})
	w.nodes(2, 4)
	ns := w.create("n", 1, 1)
	a, b := w.open(ns), w.open(ns)
	w.l.Holds(a, TokenNumber(1, 100))
	w.want() // reserves reclaim epochs
	w.wait(lease)
	rotate := func(generation uint32) {
		t.Helper()
		w.apply(&fsmpb.Command{
			Op: &fsmpb.Command_RotateKey{
				RotateKey: &fsmpb.RotateKey{Generation: generation, Key: bytes.Repeat([]byte{byte(generation)}, 32)}}})
	}
	tell := func(x uint32, token uint64, quiet time.Duration) {
		t.Helper()
		epoch, _ := w.l.Epochs()
		if got, err := w.tell(Renewal{Session: x, Report: epoch, Token: token, Callable: true}); err != nil ||
			(got.Quiet > 0) != (quiet > 0) || got.Quiet > quiet {
			t.Fatalf("session %d is answered by %+v, %v; want quiet up to %v", x, got, err, quiet)
		}
	}
	use := func(want string) {
		t.Helper()
		u := w.l.KeyUse(w.s)
		if got := fmt.Sprintf("%d signs %d, behind %v %v", u.Generation, u.Signs, u.NodesBehind,
			u.SessionsBehind); got != want {
			t.Fatalf("key %s; want %s", got, want)
		}
	}
	calls := func(want ...uint32) {
		t.Helper()
		if got := w.l.Calls(w.now); !slices.Equal(got, want) {
			t.Fatalf("called are %d, want %d", got, want)
		}
	}
	first := TokenNumber(1, 100)
	use("1 signs 1, behind [] []")
	tell(a, first, lease/3)
	tell(b, 0, lease/3) // shows none
	rotate(2)
	use("2 signs 1, behind [m1 m2] [1]")
	calls()
	if w.l.TakesKey(w.s, 1, 1, 2); w.l.TakesKey(w.s, 1, 9, 2) || w.l.TakesKey(w.s, 2, 1, 1) {
		t.Fatal("another key signs already")
	}
	use("2 signs 1, behind [m2] [1]")
	calls()
	if !w.l.TakesKey(w.s, 2, 1, 7) { // more than there is
		t.Fatal("no other key signs")
	}
	use("2 signs 2, behind [] [1]")
	calls(a)
	calls()
	tell(a, first, 0) // it does not have the new one yet
	use("2 signs 2, behind [] [1]")
	tell(a, TokenNumber(2, 200), lease/3)
	use("2 signs 2, behind [] []")

	// A new leader knows of nobody until they tell.
	rotate(3)
	w.l = New(w.l.opts, w.s, w.now)
	use("3 signs 2, behind [m1 m2] [1 2]")
	tell(b, 0, lease/3)
	tell(a, TokenNumber(2, 200), lease/3)
	w.l.TakesKey(w.s, 1, 1, 3)
	use("3 signs 2, behind [m2] [1]")

	// A memory node that is down holds nobody up; when it is back it has to say what it has.
	w.apply(&fsmpb.Command{Op: &fsmpb.Command_NodeDown{NodeDown: &fsmpb.NodeDown{NodeId: 2, Incarnation: 1}}})
	if u := w.l.KeyUse(w.s); u.Signs != 3 || len(u.NodesBehind) != 0 {
		t.Fatalf("with m2 down: %v", u)
	}
	w.boot("m2", "d2", 4, 2)
	if u := w.l.KeyUse(w.s); u.Signs != 2 || !slices.Equal(u.NodesBehind, []string{"m2"}) {
		t.Fatalf("with m2 back: %v", u)
	}
}
