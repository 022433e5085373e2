package simtest

import (
	"bytes"
	"fmt"
	"maps"
	"slices"
	"testing"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/engine"
)

// watched is a value that a client looks at where it is, as a View of the library does.
type watched struct {
	hold      engine.Hold
	parts     [][]byte
	want      string
	what      string
	pg, epoch uint32
	began     uint64 // reclaim epoch
	start     int    // World.step
}

// held is how many Views there were in a run, and how many of these were on when they were released.
type held struct{ shown, released, stood int }

// beginWatch makes r a GET in place. Each second View may stand for as long as its client likes; the others are due at
// the next report.
func (c *cl) beginWatch(r *running) {
	r.watched = &watched{what: fmt.Sprintf("c%d %v", c.i, r.e), began: c.core.Epoch()}
	if c.values%2 == 0 {
		r.watched.hold.For = never
	}
	r.piece = index.Part{InPlace: true}
	o := &r.t.Op
	o.Kind, o.Part, o.Apart = index.Get, &r.piece, 1
}

// watch takes a GET in place that has succeeded.
func (c *cl) watch(r *running) error {
	x, o := r.watched, &r.t.Op
	if err := c.lanes[r.lane].Hold(r.t, &x.hold); err != nil {
		return err
	}
	if !r.piece.Shown {
		x.hold.Release()
		return nil
	}
	if x.parts = slices.Clone(o.Parts()); x.parts == nil {
		x.parts = [][]byte{o.Record.Value}
	}
	x.want, x.pg, x.epoch, x.start = r.e.Got, o.Route.PG.ID, o.Route.PG.Epoch, r.start
	c.watched = append(c.watched, x)
	c.w.held.shown++
	return nil
}

// unwatch releases the oldest View.
func (c *cl) unwatch() {
	x := c.watched[0]
	c.watched = c.watched[1:]
	c.w.held.released++
	if x.hold.Release() {
		c.w.held.stood++
	}
}

// watchedSince is the least reclaim epoch of Views that the next report counts.
func (c *cl) watchedSince() (epoch uint64, ok bool) {
	for _, x := range c.watched {
		if x.hold.For != 0 && x.hold.Stands() && (!ok || x.began < epoch) {
			epoch, ok = x.began, true
		}
	}
	return epoch, ok
}

// checkWatched checks the Views that stand: their bytes are the value's, and their clients go by no map that changes
// what they are of.
func (w *World) checkWatched() {
	for _, c := range w.cls {
		if c.life != live {
			continue
		}
		for _, x := range c.watched {
			if !x.hold.Stands() {
				continue
			}
			if got := bytes.Join(x.parts, nil); string(got) != x.want {
				w.fail(fmt.Errorf("I4: %s stands, and its bytes became %q", x.what, got))
			}
			if pg := c.core.View().PGs[x.pg]; pg == nil || pg.Epoch != x.epoch || !pg.Active {
				w.fail(fmt.Errorf("%s stands under a map that changed its placement group", x.what))
			}
		}
	}
}

// watchedBefore finds a View that stands and began before a step.
func (w *World) watchedBefore(step int) *watched {
	for _, c := range w.cls {
		if c.life != live {
			continue
		}
		for _, x := range c.watched {
			if x.start <= step && x.hold.Stands() {
				return x
			}
		}
	}
	return nil
}

// watchWide are random scopes with Views, held across reuse, fences, changes of views and moves.
var watchWide = map[string]Config{
	"watch": {Units: 8, Epochs: 12, Pauses: 1, Crashes: 1, Failures: 1, WritePieces: 2, Scripts: [][]Step{
		{k(Put, 0), k(Put, 0), k(Del, 0), k(Put, 1), k(Put, 0)},
		{k(Watch, 0), k(Put, 0), k(Watch, 0), k(Watch, 1)}, {k(Watch, 0), k(Put, 1), k(Watch, 1), k(Get, 0)}},
		Setup: k0(0), Warm: true},
	"watch-reuse": {Units: 4, Epochs: 16, Scripts: [][]Step{
		{k(Put, 0), k(Put, 0), k(Put, 0), k(Put, 0), k(Put, 0)}, {k(Watch, 0), k(Watch, 0), k(Watch, 0)}},
		Setup: one, Warm: true},
	"watch-zombie": {Units: 4, Epochs: 24, Pauses: 1, Scripts: [][]Step{
		{k(Put, 0), k(Put, 0), k(Put, 0), k(Put, 0), k(Put, 0), k(Put, 0)}, {k(Watch, 0), k(Watch, 0)}},
		Setup: one, Warm: true},
	"watch-long": {Long: 0xb6, Units: 96, Replicas: 2, Epochs: 8, Pauses: 1, Scripts: [][]Step{
		{k(Put, 0), k(Put, 0), k(Del, 0), k(Put, 0)}, {k(Watch, 0), k(Watch, 0), k(Incr, 0), k(Watch, 0)}},
		Setup: one, Warm: true},
	"watch-r2": {Replicas: 2, Nodes: 3, Janitors: 1, NodeCrashes: 1, NodePauses: 1, Pauses: 1, Epochs: 6, Units: 8,
		Scripts: [][]Step{{k(Put, 0), k(Put, 0), k(Del, 0), k(Put, 0)}, {k(Watch, 0), k(Put, 0), k(Watch, 0)}},
		Setup:   one, Warm: true},
	"watch-move": {Replicas: 2, PGs: 2, Janitors: 1, Children: 2, Epochs: 6,
		Acts: []Act{{Split, 1, 0}, {Migrate, 1, 2}}, Scripts: [][]Step{
			{k(Put, 10), k(Watch, 10), k(Put, 10), k(Watch, 12)}, {k(Watch, 10), k(Put, 10), k(Watch, 10)}},
		Setup: []Step{k(Put, 10), k(Put, 0)}, Warm: true},
	"watch-restart": {Restarts: 2, NewKeys: true, Epochs: 8, Units: 4, Scripts: [][]Step{
		{k(Put, 0), k(Put, 0), k(Del, 0), k(Add, 0)}, {k(Watch, 0), k(Watch, 0), k(Put, 0), k(Watch, 0)}},
		Setup: one, Warm: true},
}

func init() {
	maps.Copy(wide, watchWide)
	for name := range watchWide {
		heavy[name] = 4
	}
	maps.Copy(scopes, map[string]Config{
		"watch-reuse-all": {Epochs: 4, Units: 2, Scripts: [][]Step{{k(Put, 0), k(Put, 0)}, {k(Watch, 0)}}, Setup: one,
			Warm: true},
	})
}

// TestWatch: among what the searches see are Views that stand when they are released and Views that do not.
func TestWatch(t *testing.T) {
	for _, name := range sorted(watchWide) {
		for _, sync := range []bool{false, true} {
			var n held
			for seed := range uint64(100) {
				w, err := NewWorld(inMode(watchWide[name], sync), false)
				if err != nil {
					t.Fatal(err)
				}
				w.runRandom(seed)
				err = w.Finish()
				n.shown, n.released, n.stood = n.shown+w.held.shown, n.released+w.held.released, n.stood+w.held.stood
				w.Close()
				if err != nil {
					t.Fatalf("%s\n%v", replayHint(name, sync, seed), err)
				}
			}
			if t.Logf("%s, synchronous %t: %+v", name, sync, n); n.stood == 0 || n.stood == n.released {
				t.Errorf("%s, synchronous %t: %+v", name, sync, n)
			}
		}
	}
}

// watchMutants are mistakes about Views.
var watchMutants = []mutant{
	{"view-without-lease", "watch: a View whose lease is over has not stood",
		[]edit{{"internal/engine/hold.go", "return h.state.CompareAndSwap(holdOn, holdOn) && h.core.LeaseValid()",
			"return h.state.CompareAndSwap(holdOn, holdOn)"}}},
	{"view-expires-after-the-report", "watch: what a report does not count has expired before",
		[]edit{{"internal/engine/hold.go", "		if h.state.Load() == holdOn && h.epoch",
			"if h.For != 0 && h.state.Load() == holdOn && h.epoch"}, {"internal/engine/hold.go",
			"		return age >= h.For ||", "return age >= h.For && h.For != 0 ||"}}},
	{"view-under-another-map", "watch: a map that changes a View's placement group ends it before it is in force",
		[]edit{{"internal/engine/core.go", "c.endHoldsLocked(func(h *Hold) bool { return !h.stands(v) })",
			"c.endHoldsLocked(func(h *Hold) bool { return false })"}}},
	{"view-counts-from-its-end", "watch: a View counts from the start of its GET",
		[]edit{{"internal/engine/hold.go", "h.epoch, h.shown = t.epoch, t.shown",
			"h.epoch, h.shown = l.core.epoch.Load(), t.shown"}}},
	{"view-not-counted", "watch: a View is in flight", []edit{{"internal/engine/hold.go",
		"(!ok || h.epoch < epoch) {", "(!ok || h.epoch < epoch) && false {"}}},
}
