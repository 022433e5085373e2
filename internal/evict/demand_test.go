package evict_test

import (
	"testing"

	"github.com/kvd-project/kvd/internal/evict"
)

func TestDemand(t *testing.T) {
	const limbo, mega = 0.3, 1 << 20
	for _, c := range []struct {
		name     string
		d        evict.Demand
		min, max int64
	}{
		{"nothing", evict.Demand{}, evict.MinSupply, evict.MinSupply},
		{"holds all its share", evict.Demand{Held: mega, Share: mega, LimboSeconds: limbo}, mega / 32, mega / 32},
		{"holds more", evict.Demand{Held: 2 * mega, Share: mega, LimboSeconds: limbo}, mega / 16, mega / 16},
		{"share not known", evict.Demand{Held: mega, LimboSeconds: limbo, Rate: 1e6}, 375_000 - 30_000, 375_000},
		{"a third at most", evict.Demand{Held: mega, Share: mega, LimboSeconds: limbo, Rate: 1e9}, mega / 3, mega / 3},
		{"in pieces", evict.Demand{Held: mega, Share: mega, LimboSeconds: limbo, Slack: 0.25}, mega / 4, mega / 4},
		{"a large place", evict.Demand{Held: mega, Share: mega, LimboSeconds: limbo, Need: 1 << 16}, 1 << 17, 1 << 17},
		{"new, quiet", evict.Demand{Share: mega, LimboSeconds: limbo}, 1 << 14, 1 << 14},
		{"new, quiet, of a large share", evict.Demand{Share: 1000 * mega, LimboSeconds: limbo}, 1 << 14, 1 << 14},
		{"new, of a small share", evict.Demand{Share: 1000, LimboSeconds: limbo, Starving: true}, evict.MinSupply,
			evict.MinSupply},
		{"new, starving", evict.Demand{Share: mega, LimboSeconds: limbo, Rate: 1 << 17, Starving: true}, 2 * 39_000,
			2 * 40_000},
		{"new, starving, not more than a third", evict.Demand{Share: mega, LimboSeconds: limbo, Rate: 1e9,
			Starving: true}, mega / 3, mega / 3},
	} {
		if got := c.d.Supply(); got < c.min || got > c.max {
			t.Errorf("%s: %d units at hand, want %d to %d", c.name, got, c.min, c.max)
		}
	}

	// A session that holds nothing gets to the pace at which it would write.
	d := evict.Demand{Share: 16 * mega, LimboSeconds: limbo, Starving: true}
	const wants = 1e6 // units a second
	for took := 0.0; d.Rate < 0.9*wants; took += limbo {
		d.Rate = min(float64(d.Supply())/limbo, wants)
		if took > 2 {
			t.Fatalf("after %.1f s it writes %.0f units a second", took, d.Rate)
		}
	}

	// Others' places are welcome to it until it has its own.
	few := evict.Demand{Held: mega, Share: mega}
	if got := few.Foreign(2048); got != mega/2048 {
		t.Errorf("%d units of others' for a session that holds its share", got)
	}
	if got := d.Foreign(2048); got != uint64(d.Supply()) {
		t.Errorf("%d units of others' for a session that holds nothing, want %d", got, d.Supply())
	}
}
