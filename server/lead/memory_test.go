package lead

import (
	"slices"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// freePlaces are free places of placement group 1 that adjoin, as units and ver in turn.
func freePlaces(unit uint32, unitsVer ...uint32) []*dirpb.FreePlaces {
	f := &dirpb.FreePlaces{PgId: 1, Generation: 1, Unit: unit}
	for i := 0; i < len(unitsVer); i += 2 {
		f.Places = append(f.Places, unitsVer[i]<<10|unitsVer[i+1])
	}
	return []*dirpb.FreePlaces{f}
}

func run(unit, units uint32) *dirpb.ReturnedRun {
	return &dirpb.ReturnedRun{PgId: 1, Unit: unit, Units: units, Generation: 1}
}

func sameText[M proto.Message](t *testing.T, what string, got, want []M) {
	t.Helper()
	if !slices.EqualFunc(got, want, func(a, b M) bool { return proto.Equal(a, b) }) {
		t.Fatalf("%s: got %v, want %v", what, got, want)
	}
}

// say sends a session's next renewal, which must be heeded.
func (w *world) say(r Renewal) Answer {
	w.t.Helper()
	a, err := w.tell(r)
	if err != nil {
		w.t.Fatal(err)
	}
	return a
}

// way is how many units are on their way home, or back to all.
func (w *world) way() (units uint64) {
	w.l.OnTheWay(func(_, _, n uint32) { units += uint64(n) })
	return units
}

// take makes free what came back, and tells the command's runs.
func (w *world) take() []*fsmpb.Back {
	w.t.Helper()
	c := w.l.TakeBack(w.s, w.now)
	if c == nil {
		return nil
	}
	w.apply(c)
	return c.GetTakeBack().Runs
}

// memoryWorld is a world with one placement group and two sessions, of which the first was
// granted 1000 units, from unit on.
func memoryWorld(t *testing.T) (w *world, a, b, unit uint32) {
	w = newWorld(t)
	w.nodes(1, 2)
	ns := w.create("n", 1, 1)
	a, b = w.open(ns), w.open(ns)
	w.want()
	return w, a, b, w.grant(a, 1, 1000)[0].Unit
}
