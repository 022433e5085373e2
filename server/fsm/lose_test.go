package fsm

import (
	"errors"
	"testing"

	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// Below the level that knows of it nothing is lost to one placement group alone, and of another incarnation or boot
// nothing either.
func TestLoseMembersRefused(t *testing.T) {
	c := &fsmpb.Command{Op: &fsmpb.Command_LoseMembers{LoseMembers: &fsmpb.LoseMembers{NodeId: 1, Incarnation: 7}}}
	s := New()
	if err := Apply(
		s, &fsmpb.Command{
			Op: &fsmpb.Command_Init{Init: &fsmpb.Init{ClusterId: "c", ClusterKey: []byte("k")}}}).Err; err != nil {
		t.Fatal(err)
	}
	if err := Apply(s, c).Err; !errors.Is(err, ErrRefused) {
		t.Errorf("at level 0: %v", err)
	}
	if s.Spares(1) || s.FencedFrom(1) != 0 || len(s.Losable(1)) != 0 {
		t.Error("a placement group that there is not is lost, or is to start over")
	}
	s = New()
	if err := Apply(
		s, &fsmpb.Command{
			Op: &fsmpb.Command_Init{
				Init: &fsmpb.Init{ClusterId: "c", ClusterKey: []byte("k"),
					Level: &fsmpb.Level{Level: Level}}}}).Err; err != nil {
		t.Fatal(err)
	}
	if err := Apply(s, c).Err; !errors.Is(err, ErrNotFound) {
		t.Errorf("a memory node that there is not: %v", err)
	}
}
