package fsm

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// inPieces is a state with a session and a heap of which everything was granted before; free runs are as long as
// lengths says, and one unit lies between two. A run waits if its length is negative.
func inPieces(t tester, lengths []int) *harness {
	h := cluster(t, 1, &dirpb.CreateNamespaceRequest{Name: "a", BytesPerNode: 40 << 20})
	h.do(openIn(1, 0))
	hp := copyHeap(h.s.Heap(1))
	hp.Watermark = hp.End
	at := hp.Start
	for _, n := range lengths {
		r := &fsmpb.Run{Units: uint32(max(n, -n))}
		if n < 0 {
			r.Returned = 5000
		}
		if at/extentUnits != (at+uint64(r.Units)-1)/extentUnits {
			at = extentEnd(at)
		}
		if r.Unit = uint32(at); runEnd(r) > hp.End {
			break
		}
		hp.Free = append(hp.Free, r)
		at = runEnd(r) + 1
	}
	h.s.heaps[1] = hp
	return h
}

// CanGrant is what a grant would give now, as it is.
func (s *State) CanGrant(c *fsmpb.GrantExtent) (*dirpb.GrantExtentReply, error) {
	g, reply, err := s.beginGrant(c)
	if err == nil && g != nil && g.fill() {
		s.tellGrant(g, reply)
	}
	return reply, err
}

func unitsOf(runs []*dirpb.ReturnedRun) (n uint64) {
	for _, r := range runs {
		n += uint64(r.Units)
	}
	return n
}

// Runs of a unit that many sessions left behind do not keep the next one from a whole extent.
func TestFitGrant(t *testing.T) {
	lengths := slices.Repeat([]int{1, 2, 3, 40}, 2500)
	h := inPieces(t, append(lengths, extentUnits))
	if r, err := h.s.CanGrant(grant(1, 1, 1<<16, 1, 0).GetGrantExtent()); err != nil ||
		unitsOf(r.Runs) != MaxGrantRuns {
		t.Fatalf("the shortest runs give %d units, %v; want %d", unitsOf(r.GetRuns()), err, MaxGrantRuns)
	}
	for _, x := range []struct{ want, place, least uint32 }{
		{MaxGrantRuns, 1, 1},
		{MaxGrantRuns + 1, 1, 2},
		{MaxGrantRuns * 3, 1, 3},
		{MaxGrantRuns*3 + 1, 1, 40},
		{MaxGrantRuns * 40, 5, 5},                     // as was asked for
		{MaxGrantRuns*40 + 1, 1, MaxGrantRuns*40 + 1}, // in one run, if that is long enough
		{1 << 16, 1, 1 << 16},
		{1 << 15, 1<<15 + 1, 1<<15 + 1},
	} {
		c := grant(1, 1, x.want, x.place, 0).GetGrantExtent()
		r, err := h.s.FitGrant(c)
		if err != nil || unitsOf(r.Runs) != uint64(max(x.want, x.place)) || c.PlaceUnits != x.least {
			t.Errorf("%d units, a place of %d: fits %d with the least of %d, %v; want all with %d", x.want, x.place,
				unitsOf(r.GetRuns()), c.PlaceUnits, err, x.least)
		}
	}
}

// A grant that fits gives at least as much as the length that was asked for would give, and is what the command then
// gives. TestFitGrant has lengths that are raised in any case.
func TestFitGrantGivesNoLess(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		var lengths []int
		for range rapid.IntRange(1, 8).Draw(rt, "kinds") {
			n := rapid.IntRange(1, 1<<rapid.IntRange(0, 12).Draw(rt, "most")).Draw(rt, "units")
			if rapid.IntRange(0, 3).Draw(rt, "waits") == 0 {
				n = -n
			}
			lengths = append(lengths, slices.Repeat([]int{n}, rapid.IntRange(1, 400).Draw(rt, "runs"))...)
		}
		h := inPieces(rt, rapid.Permutation(lengths).Draw(rt, "lengths"))
		if rapid.Bool().Draw(rt, "room") {
			hp := copyHeap(h.s.Heap(1))
			hp.End += uint64(rapid.IntRange(1, 2000).Draw(rt, "never"))
			h.s.heaps[1] = hp
		}
		epoch := uint64(rapid.SampledFrom([]int{0, 5000 + ReuseEpochs}).Draw(rt, "epoch"))
		c := grant(1, 1, rapid.Uint32Range(1, 1<<17).Draw(rt, "want"), rapid.Uint32Range(0, 100).Draw(rt, "place"),
			epoch)
		asked, before := c.GetGrantExtent().PlaceUnits, h.rows()
		plain, err := h.s.CanGrant(c.GetGrantExtent())
		if err != nil {
			rt.Fatal(err)
		}
		fit, err := h.s.FitGrant(c.GetGrantExtent())
		if err != nil || !slices.Equal(before, h.rows()) {
			rt.Fatalf("%v, or the state changed", err)
		}
		least := c.GetGrantExtent().PlaceUnits
		if least < asked || unitsOf(fit.Runs) < unitsOf(plain.Runs) {
			rt.Fatalf("fits %d units, from %d units on; %d without, from %d on", unitsOf(fit.Runs), least,
				unitsOf(plain.Runs), asked)
		}
		if r := h.do(c); !proto.Equal(r.Grant, fit) {
			rt.Fatalf("granted %v, and %v was to be", r.Grant, fit)
		}
	})
}

// Runs are granted as they always were, as logs of earlier versions have to come out the same: the shortest that is as
// long as asked for, the first of those, as often as a grant allows, and the rest of the last one stays.
func TestShortestFirst(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		h := inPieces(rt, rapid.SliceOfN(rapid.IntRange(-20, 20).Filter(func(n int) bool {
			return n != 0
		}), 1, 1000).Draw(rt, "lengths"))
		place := rapid.Uint32Range(1, 10).Draw(rt, "place")
		c := grant(1, 1, rapid.Uint32Range(1, 4000).Draw(rt, "want"), place, 0)
		hp := h.s.Heap(1)
		free := slices.Clone(hp.Free)
		room := uint64(0)
		for _, r := range free {
			if r.Returned == 0 {
				room += uint64(r.Units)
			}
		}
		room -= min(room, MoveReserve(hp.End-hp.Start))
		left := min(max(uint64(place), min(uint64(c.GetGrantExtent().WantUnits), room/grantShare)), room)
		var want []string
		for left >= uint64(place) || len(want) > 0 && left > 0 {
			best, units := -1, uint32(math.MaxUint32)
			for i, r := range free {
				if r.Returned == 0 && r.Units >= place && r.Units < units {
					best, units = i, r.Units
				}
			}
			if best < 0 || len(want) == MaxGrantRuns {
				break
			}
			take := min(uint64(units), left)
			left -= take
			r := free[best]
			want = append(want, fmt.Sprintf("%d+%d", r.Unit, take))
			if free[best] = (&fsmpb.Run{Unit: r.Unit + uint32(take), Units: units - uint32(take)}); free[best].Units ==
				0 {
				free = slices.Delete(free, best, best+1)
			}
		}
		if got := runTexts(h.do(c).Grant.Runs); !slices.Equal(got, want) {
			rt.Fatalf("granted %v, want %v", got, want)
		}
		if got := freeText(h.s.Heap(1)); got != freeText(withFree(hp, free)) {
			rt.Fatalf("%s are free, want %s", got, freeText(withFree(hp, free)))
		}
	})
}
