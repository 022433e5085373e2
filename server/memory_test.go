package server

import (
	"slices"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/testutil"
)

// Memory goes home over the wire: a place handed back by one session is delivered to
// another, a run given up becomes free by itself, and a grant that finds nothing takes no
// room in the log.
func TestMemoryGoesHome(t *testing.T) {
	n := single(t, vfs.NewMem(), forever)
	c := dial(t, n)
	newMemnode(t, "m1", 1, just(n))
	a, b := open(t, c), open(t, c)
	if a.Term == 0 {
		t.Fatalf("opened %v, of no term", a)
	}
	ask := func(q *dirpb.RenewRequest) *dirpb.RenewReply {
		t.Helper()
		q.Number, q.Term = numbers.Add(1), a.Term
		r, err := c.Renew(testCtx(t), q)
		if err != nil || r.Term != a.Term {
			t.Fatalf("renewed %v, %v; want term %d", r, err, a.Term)
		}
		return r
	}
	grant := func() *dirpb.GrantExtentReply {
		t.Helper()
		r, err := c.GrantExtent(testCtx(t), &dirpb.GrantExtentRequest{SessionId: a.SessionId, PgId: 1,
			WantUnits: 1 << 31, PlaceUnits: 10})
		if err != nil || r.Term != a.Term || r.MapVersion == 0 {
			t.Fatalf("granted %v, %v; want term %d", r, err, a.Term)
		}
		return r
	}
	var runs []*dirpb.ReturnedRun
	var all uint64
	for {
		r := grant()
		if len(r.Runs) == 0 {
			break
		}
		for _, x := range r.Runs {
			runs, all = append(runs, x), all+uint64(x.Units)
		}
	}
	testutil.Until(t, "the directory to know that all memory is in use", func() bool {
		// Those who have been silent for half a second may have some.
		ask(&dirpb.RenewRequest{
			SessionId: a.SessionId, Held: []*dirpb.Held{{PgId: 1, Generation: 1, OwnUnits: all, NetUnits: int64(all)}}})
		ask(&dirpb.RenewRequest{SessionId: b.SessionId})
		return grant().ComingUnits == 0
	})
	before := statusOf(t, c).RaftApplied
	const tries = 100
	for range tries {
		grant()
	}
	if after := statusOf(t, c).RaftApplied; after-before > tries/2 {
		t.Fatalf("%d entries in the log for %d grants of nothing", after-before, tries)
	}

	const much = 100_000
	i := slices.IndexFunc(runs, func(r *dirpb.ReturnedRun) bool { return r.Units >= much })
	unit := runs[i].Unit
	ask(&dirpb.RenewRequest{SessionId: b.SessionId, HandBacks: []*dirpb.FreePlaces{
		{PgId: 1, Generation: 1, Unit: unit, Places: []uint32{10<<10 | 7}}}})
	if d := ask(&dirpb.RenewRequest{SessionId: a.SessionId}).Deliveries; len(d) != 1 || d[0].Unit != unit ||
		len(d[0].Places) != 1 || d[0].Places[0] != 10<<10|7 {
		t.Fatalf("delivered %v", d)
	}
	ask(&dirpb.RenewRequest{SessionId: a.SessionId, Returns: []*dirpb.ReturnedRun{
		{PgId: 1, Generation: 1, Unit: unit, Units: much}}})
	testutil.Until(t, "what was given up to be free", func() bool {
		return statusOf(t, c).Usage[0].WaitingUnits == much
	})
	if r := grant(); len(r.Runs) > 0 || r.WaitingUnits != much || r.ComingUnits < much {
		t.Fatalf("granted %v", r)
	}
	u := statusOf(t, c).Usage[0]
	if !u.Estimated || !u.Short || u.GrantedUnits != all-much {
		t.Fatalf("usage %v", u)
	}
}

// A store does not grow slower with the sessions that came and went: each has its memory with as few calls as the first
// one, also when nothing is left that was never granted, and what they left behind is many single units and a few long
// runs.
func TestSessionsCameAndWent(t *testing.T) {
	n := single(t, vfs.NewMem(), forever)
	c := dial(t, n)
	newMemnode(t, "m1", 1, just(n))
	const (
		sessions = 48
		each     = 1 << 17 // units that a session takes
		scraps   = 1000    // of which it leaves so many behind that are free, each between two that stay linked
		calls    = 3       // two if a run is a little short
	)
	took := uint64(0)
	for i := range sessions {
		s := open(t, c)
		var runs []*dirpb.ReturnedRun
		sum, asked := uint64(0), 0
		for ; sum < each && asked < calls; asked++ {
			r, err := c.GrantExtent(testCtx(t), &dirpb.GrantExtentRequest{SessionId: s.SessionId, PgId: 1,
				WantUnits: uint32(each - sum), PlaceUnits: 1})
			if err != nil {
				t.Fatal(err)
			}
			for _, x := range r.Runs {
				runs, sum = append(runs, x), sum+uint64(x.Units)
			}
		}
		if sum < each {
			t.Fatalf("session %d has %d units after %d calls, want %d", i+1, sum, asked, each)
		}
		took += sum
		var back []*dirpb.ReturnedRun
		left := scraps
		for _, x := range runs {
			for ; left > 0 && x.Units > 2; left-- {
				back = append(back, &dirpb.ReturnedRun{PgId: 1, Generation: 1, Unit: x.Unit, Units: 1, Fresh: true})
				x.Unit, x.Units = x.Unit+2, x.Units-2
			}
			back = append(back, &dirpb.ReturnedRun{PgId: 1, Generation: 1, Unit: x.Unit, Units: x.Units, Fresh: true})
		}
		if _, err := c.CloseSession(testCtx(t), &dirpb.CloseSessionRequest{SessionId: s.SessionId, Runs: back}); err !=
			nil {
			t.Fatal(err)
		}
	}
	if u := statusOf(t, c).Usage[0]; took < u.HeapUnits*5/4 || u.ReturnedUnits < u.HeapUnits*9/10 {
		t.Fatalf("the test proves nothing: %d units were taken, and %d of %d are free", took, u.ReturnedUnits,
			u.HeapUnits)
	}
}
