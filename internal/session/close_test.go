package session_test

import (
	"testing"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/heap"
	"github.com/kvd-project/kvd/internal/layout"
)

// A session whose lanes lost track of memory says so as it closes.
func TestAgendaCloseLeaked(t *testing.T) {
	a := newAgenda(t)
	a.view(3, 1)
	x, err := a.core.Lanes()[0].NewTask()
	if err != nil {
		t.Fatal(err)
	}
	defer a.core.Lanes()[0].Recycle(x)
	if a.Close().Leaked {
		t.Fatal("leaked, with nothing lost")
	}
	x.Leak(&a.core.View().PGs[1].PG, layout.Word(0))
	if !a.Close().Leaked {
		t.Fatal("what a lane has leaked is not told")
	}
}

// A session that closes hands back a bounded number of runs and places, of all its placement groups together. It counts
// them, and says that it leaks if there are more.
func TestAgendaCloseBounds(t *testing.T) {
	const most = 1 << 16
	for _, more := range [][2]uint32{{0, 0}, {1, 0}, {0, 1}} { // runs, places
		a := newAgenda(t)
		a.install(3, group(1, 1), group(2, 1))
		var runs, foreign uint32
		for pg := uint32(1); pg <= 2; pg++ {
			h := a.core.HeapOf(&a.core.View().PGs[pg].PG)
			for i := range most/2 + (pg-1)*more[0] {
				if err := a.core.AddRun(pg, 1, heapLo+2*i, 1); err != nil {
					t.Fatal(err)
				}
			}
			for i := range most/2 + (pg-1)*more[1] {
				h.Free(heap.Place{Unit: layout.ExtentUnits + 2*i, Units: 1})
			}
		}
		q := a.Close()
		runs = uint32(len(q.Runs))
		for _, f := range q.HandBacks {
			foreign += uint32(len(f.Places))
		}
		if runs != most || foreign != most || q.Leaked != (more != [2]uint32{}) {
			t.Errorf("%v too many: handed back %d runs and %d places, leaked %v", more, runs, foreign, q.Leaked)
		}
		if c := a.Counts(); c.Returned != most || c.HandedBack != most {
			t.Errorf("%v too many: counts %+v", more, c)
		}
	}
}

// A grant that waited for a map which has come is taken in before the session closes.
func TestAgendaCloseEarly(t *testing.T) {
	for name, tc := range map[string]struct {
		generation uint32 // in the map that came
		runs       int
	}{
		"the grant's": {2, 1},
		"a later one": {3, 0},
	} {
		a := newAgenda(t)
		a.view(3, 1)
		a.answer(a.renewal(), &dirpb.RenewReply{})
		a.grant(a.wants(10), 4, 5, fresh(2, heapLo, 100))
		a.view(5, tc.generation)
		if q := a.Close(); len(q.Runs) != tc.runs {
			t.Errorf("%s: closed with %v", name, q)
		}
	}
}
