package lead

import (
	"fmt"
	"math"
	"testing"
)

// TestPiecesForRoom: a placement group that is not pressed keeps its shards whole while the memory that a move needs is
// at sessions. Each split would fit the room of a moment, and there would be one for every shard.
func TestPiecesForRoom(t *testing.T) {
	const heap, shards = 57_600, 16
	world := func(share, other float64, room uint64) (*balance, *group, *group) {
		from := &group{id: 1, heap: heap, load: uint64(share * heap), copies: 1, index: 1 << 20}
		to := &group{id: 2, heap: heap, load: uint64(other * heap), room: room, copies: 1, index: 1 << 20}
		for range shards {
			load := from.load / shards
			from.shards = append(from.shards, &piece{depth: 5, size: 1, load: load, live: load})
		}
		return &balance{groups: []*group{from, to}, quota: math.MaxUint64, index: math.MaxUint64}, from, to
	}
	for _, c := range []struct {
		share, other float64
		room         uint64
		want         string
	}{
		{0.65, 0.55, heap / 40, "nothing"},       // half of 4 %, twice: more than there is room for now
		{0.65, 0.55, heap / 10, "a shard moves"}, // the room has come
		{0.65, 0.63, heap / 20, "a split"},       // whole ones make a larger difference
		{0.95, 0.75, heap / 20, "half a shard moves"},
		{0.95, 0.75, heap / 50, "a split"}, // it is urgent
	} {
		b, from, to := world(c.share, c.other, c.room)
		r := byMemory
		r.slack = func(float64) float64 { return 1.0 / 100 }
		m := b.next(r, nil, nil)
		got := "nothing"
		switch {
		case m != nil && m.from == m.to:
			got = "a split"
		case m != nil && m.split:
			got = "half a shard moves"
		case m != nil && m.from == from && m.to == to:
			got = "a shard moves"
		}
		if got != c.want {
			t.Errorf("%s: %s, want %s", fmt.Sprintf("%v", c), got, c.want)
		}
	}
}
