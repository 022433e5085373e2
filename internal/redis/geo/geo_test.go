package geo

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
)

// The positions and numbers of Redis's own documentation.
var (
	palermo = Position{13.361389, 38.115556}
	catania = Position{15.087269, 37.502669}
)

func TestVectors(t *testing.T) {
	for _, c := range []struct {
		p     Position
		score uint64
		hash  string
	}{
		{palermo, 3479099956230698, "sqc8b49rny0"},
		{catania, 3479447370796909, "sqdtr74hyu0"},
		{Position{-180, -MaxLat}, 0, "00bh0hbj200"},
	} {
		if got := c.p.Score(); got != c.score {
			t.Errorf("%v: score %d, want %d", c.p, got, c.score)
		}
		if got := Decode(float64(c.score)).Hash(); got != c.hash {
			t.Errorf("%v: hash %s, want %s", c.p, got, c.hash)
		}
	}
	if d := fmt.Sprintf("%.4f", Distance(Decode(3479099956230698), Decode(3479447370796909))); d != "166274.1516" {
		t.Errorf("%s m from Palermo to Catania", d)
	}
	if d := Distance(palermo, palermo); d != 0 {
		t.Errorf("%v m from Palermo to Palermo", d)
	}
}

// A score's position is in its cell: no further than half of one from the position that it was made of.
func TestScores(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	for range 10_000 {
		p := Position{rng.Float64()*360 - 180, (rng.Float64()*2 - 1) * MaxLat}
		q := Decode(float64(p.Score()))
		if math.Abs(p.Lon-q.Lon) > 360.0/(1<<27)*1.01 || math.Abs(p.Lat-q.Lat) > 2*MaxLat/(1<<27)*1.01 {
			t.Fatalf("%v comes back as %v", p, q)
		}
		if p.Score()>>52 != 0 {
			t.Fatalf("%v: score %d", p, p.Score())
		}
	}
	for _, bad := range []Position{{181, 0}, {0, 86}, {-181, 0}, {0, -86}, {math.NaN(), 0}, {0, math.NaN()}} {
		if bad.Valid() {
			t.Errorf("%v is valid", bad)
		}
	}
}

// Any score is a position: sorted sets have others than Position.Score makes.
func TestDecodeAnything(t *testing.T) {
	rng := rand.New(rand.NewPCG(2, 1))
	scores := []float64{0, -1, 1 << 52, 1 << 53, 1e18, 1e19, 1e20, -1e19, math.MaxFloat64, math.Inf(1), math.Inf(-1),
		math.NaN(), 0.5}
	for range 10_000 {
		scores = append(scores, math.Float64frombits(rng.Uint64()))
	}
	for _, s := range scores {
		if p := Decode(s); !p.Valid() || len(p.Hash()) != 11 {
			t.Errorf("%v is %v", s, p)
		}
	}
}

// Every position within a shape is in exactly one of its ranges, away from the poles and the date line, where Redis
// looks no further than the cells around the center either.
func TestRanges(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 1))
	found := 0
	for range 3000 {
		s := Shape{Center: Position{rng.Float64()*200 - 100, rng.Float64()*120 - 60}, Unit: 1, Box: rng.IntN(2) == 0}
		s.Radius = math.Pow(10, 1+rng.Float64()*5)
		s.Width, s.Height = s.Radius, s.Radius*rng.Float64()
		ranges := s.Ranges()
		for range 30 {
			dLat := degrees(s.Radius / earthRadius)
			p := Position{s.Center.Lon + (rng.Float64()*4-2)*dLat, s.Center.Lat + (rng.Float64()*2-1)*dLat}
			if p = Decode(float64(p.Score())); !p.Valid() {
				continue
			}
			metres, ok := s.Contains(p)
			if !ok {
				continue
			}
			if !s.Box && metres > s.Radius {
				t.Fatalf("%v m within %v", metres, s.Radius)
			}
			found++
			n := 0
			for _, r := range ranges {
				if score := float64(p.Score()); score >= r.Min && score < r.Max {
					n++
				}
			}
			if n != 1 {
				t.Fatalf("%+v contains %v, which is in %d of %v", s, p, n, ranges)
			}
		}
	}
	if found < 1000 {
		t.Errorf("%d positions found", found)
	}
}

// Shapes of any size have ranges, and few of them.
func TestAnyShape(t *testing.T) {
	rng := rand.New(rand.NewPCG(4, 1))
	for range 10_000 {
		s := Shape{Center: Position{rng.Float64()*360 - 180, (rng.Float64()*2 - 1) * MaxLat}, Unit: 1609.34,
			Box: rng.IntN(2) == 0}
		s.Radius, s.Width, s.Height = math.Pow(10, rng.Float64()*400-60), math.Pow(10, rng.Float64()*20-10),
			math.Pow(10, rng.Float64()*20-10)
		if rng.IntN(10) == 0 {
			s.Radius, s.Width, s.Height = 0, 0, 0
		}
		if n := len(s.Ranges()); n < 1 || n > 9 {
			t.Fatalf("%+v has %d ranges", s, n)
		}
	}
}
