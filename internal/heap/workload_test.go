package heap

import (
	"fmt"
	"math/rand/v2"
	"testing"
)

// A million operations at high occupancy: while live places and limbo stay below
// the given part of the memory, few or no allocations fail. Occupancy excludes
// what the magazines hold, up to 3 % of 64 MiB.
func TestFragmentation(t *testing.T) {
	steps := 1_000_000
	if testing.Short() || raceEnabled {
		steps = 100_000
	}
	for _, c := range []struct {
		extents int
		largest int
		fill    float64
		fails   int // most, per million
	}{
		{extents: 16, largest: 16384, fill: 0.80, fails: 0},
		{extents: 8, largest: 8192, fill: 0.75, fails: 0},
		{extents: 4, largest: 4096, fill: 0.75, fails: 0},
		// A place of 1/64 of the memory needs luck.
		{extents: 4, largest: 16384, fill: 0.75, fails: 300},
	} {
		t.Run(fmt.Sprintf("%dMiB/%d/%v", c.extents*16, c.largest, c.fill), func(t *testing.T) {
			for seed := range uint64(2) {
				if fails, left := churn(t, c.extents, steps, c.largest, c.fill, seed); fails > c.fails {
					t.Errorf("seed %d: %d allocations failed, the first with %d units unused", seed, fails, left)
				}
			}
		})
	}
}

func churn(t testing.TB, extents, steps, largest int, fill float64, seed uint64) (fails int, left uint64) {
	h := New()
	for i := range extents {
		mustAdd(t, h, uint32(i*ExtentUnits), ExtentUnits)
	}
	capacity := uint64(extents * ExtentUnits)
	limit := uint64(fill * float64(capacity))
	c := NewCache(h)
	var limbo Limbo
	rng := rand.New(rand.NewPCG(seed, 1))
	var live []Place
	used, frees := uint64(0), uint64(0)
	for step := range steps {
		if step%(steps/4) == 0 {
			mustCheck(t, h)
		}
		units := drawSize(rng, largest)
		for used+limbo.Units()+uint64(units) > limit {
			k := rng.IntN(len(live))
			p := live[k]
			live[k] = live[len(live)-1]
			live = live[:len(live)-1]
			used -= uint64(p.Units)
			limbo.Add(p, frees)
			frees++
			for limbo.Units() > capacity/50 {
				limbo.Release(frees-uint64(limbo.Len())+1, c.Free)
			}
		}
		p, ok := c.Alloc(units)
		if !ok {
			if fails == 0 {
				left = capacity - used - limbo.Units()
			}
			fails++
			continue
		}
		used += uint64(units)
		live = append(live, p)
	}
	for _, p := range live {
		limbo.Add(p, frees)
	}
	limbo.Release(frees+1, c.Free)
	c.Flush()
	mustCheck(t, h)
	if s := h.Stats(); s.Free != capacity || s.RefusedPlaces != 0 {
		t.Fatalf("%+v", s)
	}
	return fails, left
}

func BenchmarkCache(b *testing.B) {
	for _, units := range []uint32{1, 16, 64} {
		b.Run(fmt.Sprintf("pair/%d", units), func(b *testing.B) {
			h := New()
			mustAdd(b, h, 0, ExtentUnits)
			c := NewCache(h)
			b.ReportAllocs()
			for b.Loop() {
				p, _ := c.Alloc(units)
				c.Free(p)
			}
		})
	}
	b.Run("mixed", func(b *testing.B) {
		h := New()
		mustAdd(b, h, 0, ExtentUnits)
		c := NewCache(h)
		benchMixed(b, c.Alloc, c.Free, 64)
	})
}

func BenchmarkHeap(b *testing.B) {
	for _, units := range []uint32{1, 64, 1024, MaxUnits} {
		b.Run(fmt.Sprintf("pair/%d", units), func(b *testing.B) {
			h := New()
			mustAdd(b, h, 0, ExtentUnits)
			b.ReportAllocs()
			for b.Loop() {
				p, _ := h.Alloc(units)
				h.Free(p)
			}
		})
	}
	b.Run("mixed", func(b *testing.B) {
		h := New()
		mustAdd(b, h, 0, ExtentUnits)
		benchMixed(b, h.Alloc, h.Free, 64)
	})
}

// BenchmarkScattered frees places of one unit in any order, and takes as many, with a quarter of an extent free in
// pieces of that length: what lanes return to the session's heap, and take from it, while records are overwritten.
func BenchmarkScattered(b *testing.B) {
	h := New()
	mustAdd(b, h, 0, ExtentUnits)
	live := make([]Place, ExtentUnits)
	if n := h.AllocBatch(1, live); n != len(live) {
		b.Fatalf("%d places", n)
	}
	rng := rand.New(rand.NewPCG(1, 1))
	rng.Shuffle(len(live)/2, func(i, j int) { live[2*i], live[2*j] = live[2*j], live[2*i] })
	free := ExtentUnits / 4
	for i := range free {
		h.Free(live[2*i])
		live[2*i] = live[len(live)-1-2*i] // every second one stays
	}
	live = live[:len(live)-2*free]
	b.ReportAllocs()
	for at := 0; b.Loop(); at = (at + batchPlaces) % (len(live) - batchPlaces) &^ 1 {
		ps := live[at : at+batchPlaces]
		for i := 0; i < len(ps); i += 2 {
			h.Free(ps[i])
		}
		for i := 0; i < len(ps); i += 2 {
			ps[i], _ = h.Alloc(1)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*batchPlaces/2), "ns/place")
}

// benchMixed replaces random ones of many live places.
func benchMixed(b *testing.B, alloc func(uint32) (Place, bool), free func(Place), most int) {
	rng := rand.New(rand.NewPCG(1, 1))
	live := make([]Place, 4096)
	for i := range live {
		live[i], _ = alloc(1 + uint32(rng.IntN(most)))
	}
	var picks [1 << 14]struct{ at, units uint32 }
	for i := range picks {
		picks[i].at, picks[i].units = uint32(rng.IntN(len(live))), 1+uint32(rng.IntN(most))
	}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		k := picks[i%len(picks)]
		free(live[k.at])
		p, ok := alloc(k.units)
		if !ok {
			b.Fatal("full")
		}
		live[k.at] = p
	}
}
