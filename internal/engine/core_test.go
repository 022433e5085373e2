package engine_test

import (
	"errors"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/sim"
)

// Operations without a Task have as many lanes as there are processors, and others only while those are taken.
func TestLanesOfProcessors(t *testing.T) {
	was := runtime.GOMAXPROCS(2)
	t.Cleanup(func() { runtime.GOMAXPROCS(was) })
	d := rdma.NewDevice("sim", sim.New(sim.Options{}).Device("c"))
	core, err := engine.NewCore(engine.Options{Session: rigSelf, Discriminator: 1, Lanes: 5, CacheBytes: 1 << 16,
		Devices: []*rdma.Device{d},
		Nanos:   func() int64 { return 1 }, Millis: func() uint64 { return 1 }})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(core.Close(), d.Close()); err != nil {
			t.Error(err)
		}
	})
	var got []int
	for range 6 {
		got = append(got, core.OwnNear())
	}
	slices.Sort(got[:2])
	if want := []int{0, 1, 2, 3, 4, -1}; !slices.Equal(got, want) {
		t.Errorf("lanes %v one after the other, want %v", got, want)
	}
	for _, l := range core.Lanes() {
		l.HandOver()
	}
	for range 100 {
		id := core.OwnNear()
		if id != 0 && id != 1 {
			t.Fatalf("lane %d while lanes 0 and 1 are free", id)
		}
		core.Lanes()[id].HandOver()
	}
}

// An operation that misses memory fails once the directory has said for some time that none
// is on its way; waits for what is, so long; and not at all for a while after others did in
// vain.
func TestNoMemory(t *testing.T) {
	const fullFor, wait, vain = 300_000_000, 8 * second, 2 * second
	a := struct {
		core *engine.Core
		now  int64
	}{now: second}
	d := rdma.NewDevice("sim", sim.New(sim.Options{}).Device("c"))
	var err error
	a.core, err = engine.NewCore(engine.Options{Session: rigSelf, Discriminator: 1, Lanes: 1, CacheBytes: 1 << 16,
		Devices: []*rdma.Device{d},
		Nanos:   func() int64 { return a.now }, Millis: func() uint64 { return 1 }})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(a.core.Close(), d.Close()); err != nil {
			t.Error(err)
		}
	})
	a.core.SetFullFor(fullFor)
	starved := uint64(1)
	missed := a.now
	check := func(what, want string) {
		t.Helper()
		switch err := a.core.NoMemory(1, starved, missed, false); {
		case want == "" && err != nil:
			t.Fatalf("%s: %v", what, err)
		case want != "" && (!errors.Is(err, index.ErrFull) || !strings.Contains(err.Error(), want)):
			t.Fatalf("%s: %v, want %q", what, err, want)
		}
	}
	a.now += 2 * wait
	check("nobody has said anything", "")
	missed = a.now
	a.core.SetExhausted(1, `quota bytes: namespace "a" has 5 bytes, of 5`)
	a.core.SetFull(1, true)
	check("just said", "")
	a.now += fullFor - 1
	a.core.SetFull(1, true) // again; it counts from the first
	check("a moment early", "")
	a.now++
	check("full", `has no memory left (quota bytes: namespace "a" has 5 bytes, of 5)`)
	if err := a.core.NoMemory(2, starved, missed, false); err != nil {
		t.Fatalf("of another placement group: %v", err)
	}
	starved = 2
	check("said before it was missed", "")
	starved = 1
	a.core.SetFull(1, false)
	check("some is on its way", "")
	a.core.SetFull(1, true)
	check("full anew", "")
	a.core.SetFull(1, false)
	// On its way, and it does not come.
	missed = a.now
	a.now += wait - 1
	check("a moment early", "")
	a.now++
	check("waited", "did not come in 8s")
	missed = a.now
	check("the next one", "in vain")
	a.now += vain - 1
	check("still", "in vain")
	a.now++
	check("waits again", "")
	// Nothing is said of memory that was missed since.
	starved = 9
	a.now += 2 * wait
	check("said before", "")
	a.core.SetVain(1)
	check("said before, waited for in vain", "")
	starved = 1
	missed = a.now
	check("others waited", "in vain")
	// An operation with little time says nothing of others.
	a.now += vain
	a.core.GaveUp(1, a.now-vain+1)
	check("another had little time", "")
	a.core.GaveUp(1, a.now-vain)
	check("another had time", "in vain")
}
