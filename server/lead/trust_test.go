package lead

import (
	"testing"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// A leader decides nothing before half of the memory nodes that are up have been heard, or a lease has run, and nothing
// any more once one of them was told what it does not know.
func TestTrust(t *testing.T) {
	w := newWorld(t)
	w.nodes(3, 8)
	w.apply(&fsmpb.Command{Op: &fsmpb.Command_Reign{Reign: &fsmpb.Reign{Id: 7, Term: 1, Base: 10}}})
	told := w.s.Position(12)
	fresh := func() {
		w.l = New(w.l.opts, w.s, w.now)
		if w.l.Trusted(w.s, w.now) {
			t.Error("trusted before anybody was heard")
		}
	}
	fresh()
	if !w.l.Vouch(w.s, 12, "m1", 1, told) || w.l.Trusted(w.s, w.now) {
		t.Error("one of three is not enough, and knows no more")
	}
	if !w.l.Vouch(w.s, 12, "m2", 2, nil) || !w.l.Trusted(w.s, w.now) {
		t.Error("two of three are enough")
	}
	if w.l.Vouch(w.s, 11, "m3", 3, told) || w.l.Trusted(w.s, w.now) {
		t.Error("m3 was told of entry 12, and the state is of entry 11")
	}
	if w.l.Vouch(w.s, 11, "m1", 1, nil) {
		t.Error("it goes on when others know no more")
	}
	if a := w.l.Ahead(); len(a) != 1 || a[0].Name != "m3" || a[0].Position.Index != 12 {
		t.Errorf("ahead: %v", a)
	}
	fresh()
	w.now += w.l.opts.Lease + 1
	if !w.l.Trusted(w.s, w.now) {
		t.Error("not trusted after a lease")
	}
	fresh()
	if w.l.Vouch(w.s, 12, "stranger", 0, &dirpb.Position{ClusterId: w.s.Meta().ClusterId, Reign: 8}) {
		t.Error("a memory node that the state does not know was told more")
	}
}
