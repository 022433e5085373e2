package heap

import (
	"slices"
	"testing"

	"pgregory.net/rapid"
)

func TestLimboModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var l Limbo
		var want []waiting
		tag, unit := uint64(0), uint32(0)
		t.Repeat(map[string]func(*rapid.T){
			"add": func(t *rapid.T) {
				for range rapid.IntRange(1, 700).Draw(t, "n") {
					unit++
					tag += uint64(unit % 3 / 2)
					p := Place{Unit: unit, Units: 1 + unit%7}
					l.Add(p, tag)
					want = append(want, waiting{p, tag})
				}
			},
			"release": func(t *rapid.T) {
				before := rapid.Uint64Range(0, tag+1).Draw(t, "before")
				var got []Place
				ripe, most := l.Ripe(before), rapid.IntRange(-1, 1000).Draw(t, "most")
				n := l.ReleaseSome(before, most, func(p Place) { got = append(got, p) })
				if n != len(got) || n != max(0, min(ripe, most)) {
					t.Fatalf("released %d of %d, %d at most, said %d", len(got), ripe, most, n)
				}
				got = slices.Grow(got, ripe)
				if n += l.Release(before, func(p Place) { got = append(got, p) }); n != len(got) || n != ripe {
					t.Fatalf("released %d of %d, said %d", len(got), ripe, n)
				}
				for _, p := range got {
					if want[0].place != p || want[0].tag >= before {
						t.Fatalf("released %v before %d, want %v", p, before, want[0])
					}
					want = want[1:]
				}
				if len(want) > 0 && want[0].tag < before {
					t.Fatalf("kept %v before %d", want[0], before)
				}
			},
			"": func(t *rapid.T) {
				units := uint64(0)
				for _, w := range want {
					units += uint64(w.place.Units)
				}
				if l.Len() != len(want) || l.Units() != units {
					t.Fatalf("%d places, %d units, want %d, %d", l.Len(), l.Units(), len(want), units)
				}
				chunks := 0
				for _, c := range l.ring {
					if c != nil {
						chunks++
					}
				}
				if chunks > len(want)/chunkPlaces+2 || len(l.spare) > maxSpare {
					t.Fatalf("%d chunks and %d to spare for %d places", chunks, len(l.spare), len(want))
				}
				if len(want) == 0 && len(l.ring) > maxSpare {
					t.Fatalf("empty, yet keeps room for %d chunks", len(l.ring))
				}
			},
		})
	})
}

// A function that Release calls may put the place back.
func TestLimboAddWhileReleasing(t *testing.T) {
	var l Limbo
	for i := range uint32(chunkPlaces) {
		l.Add(Place{Unit: i, Units: 1}, 1)
	}
	var got []uint32
	n := l.Release(2, func(p Place) {
		got = append(got, p.Unit)
		l.Add(p, 2)
		l.Add(p, 2)
	})
	if n != chunkPlaces || l.Len() != 2*chunkPlaces || !slices.IsSorted(got) || len(got) != chunkPlaces {
		t.Errorf("released %d, %d wait, %v", n, l.Len(), got)
	}
}

func TestLimboDoesNotAllocate(t *testing.T) {
	var l Limbo
	drop := func(Place) {}
	tag := uint64(0)
	work := func() {
		for range 500 {
			l.Add(Place{Units: 1}, tag)
		}
		tag++
		l.Release(tag-1, drop)
	}
	work()
	work()
	if n := testing.AllocsPerRun(100, work); n != 0 {
		t.Errorf("%v Go allocations", n)
	}
}
