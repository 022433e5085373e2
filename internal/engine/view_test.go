package engine_test

import (
	"testing"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/internal/layout"
)

// New operations wait where the head is about to stop and another member has a copy.
func TestViewOfLeaving(t *testing.T) {
	member := func(node uint32) *dirpb.Member { return &dirpb.Member{NodeId: node, Incarnation: uint64(node)} }
	for _, tc := range []struct {
		name    string
		chain   []*dirpb.Member
		state   dirpb.PGState
		joining bool
		want    bool
	}{
		{"head", []*dirpb.Member{member(1), member(2)}, dirpb.PGState_PG_ACTIVE, false, true},
		{"tail", []*dirpb.Member{member(2), member(1)}, dirpb.PGState_PG_ACTIVE, false, false},
		{"only copy", []*dirpb.Member{member(1)}, dirpb.PGState_PG_ACTIVE, false, false},
		{"only copy with a joiner", []*dirpb.Member{member(1), member(2)}, dirpb.PGState_PG_ACTIVE, true, false},
		{"frozen", []*dirpb.Member{member(1), member(2)}, dirpb.PGState_PG_FROZEN, false, false},
	} {
		v, err := engine.ViewOf(&dirpb.Map{Version: 1,
			Nodes: []*dirpb.Node{{Id: 1, Incarnation: 1, State: dirpb.NodeState_NODE_UP, Leaving: true},
				{Id: 2, Incarnation: 2, State: dirpb.NodeState_NODE_UP}},
			Pgs: []*dirpb.PlacementGroup{
				{Id: 1, NamespaceId: 1, Epoch: 1, Generation: 1, State: tc.state, Members: tc.chain,
					Joining:     tc.joining,
					RegionBytes: 64 << 20, IndexBytes: layout.RegionPageSize}},
		}, 1)
		if err != nil {
			t.Fatalf("%s: %v", tc.name, err)
		}
		if got := v.PGs[1].Leaving; got != tc.want {
			t.Errorf("%s: operations wait: %v, want %v", tc.name, got, tc.want)
		}
	}
}

// A child has as many segments as its parent, or a multiple that the protocol can tell apart.
func TestViewOfGrowth(t *testing.T) {
	for segments, ok := range map[uint32]bool{0: true, 2: true, 8: true, 2 * layout.MaxGrowth: true, 1: false, 5: false,
		2*layout.MaxGrowth + 2: false, 1 << 20: false} {
		m := &dirpb.Map{Version: 7, Nodes: []*dirpb.Node{{Id: 1, State: dirpb.NodeState_NODE_UP}},
			Pgs: []*dirpb.PlacementGroup{{Id: 1, NamespaceId: 1, State: dirpb.PGState_PG_ACTIVE, RegionBytes: 16 << 20,
				IndexBytes: 4 << 20,
				Members:    []*dirpb.Member{{NodeId: 1}}}},
			Shards: []*dirpb.Shard{{Id: 1, NamespaceId: 1, PgId: 1, Offset: layout.RegionPageSize, Segments: 2,
				Move: &dirpb.Move{ChildId: 2, PgId: 1, Offset: layout.RegionPageSize + 2*layout.SegmentSize,
					Segments: segments}}}}
		v, err := engine.ViewOf(m, 1)
		if (err == nil) != ok {
			t.Errorf("%d segments: %v", segments, err)
		}
		if want := max(segments, 2); err == nil && v.Shards[0].ChildSegments != want {
			t.Errorf("%d segments: the child has %d, want %d", segments, v.Shards[0].ChildSegments, want)
		}
	}
}

// Arrays of status words lie in the index, where groups begin.
func TestViewOfStatusArrays(t *testing.T) {
	const index = layout.RegionPageSize + 3*layout.SegmentSize
	for _, tc := range []struct {
		off      uint64
		segments uint32
		ok       bool
	}{
		{layout.RegionPageSize, 3, true},
		{layout.RegionPageSize + 2*layout.SegmentSize, 1, true},
		{layout.RegionPageSize, 4, false},
		{layout.RegionPageSize, 0, false},
		{layout.RegionPageSize + 8, 1, false},
		{0, 1, false},
		{index, 1, false},
		{1<<64 - layout.GroupSize, 1, false},
		{layout.RegionPageSize, 1<<32 - 1, false},
	} {
		v, err := engine.ViewOf(&dirpb.Map{Version: 7, Nodes: []*dirpb.Node{{Id: 1, State: dirpb.NodeState_NODE_UP}},
			Pgs: []*dirpb.PlacementGroup{{Id: 1, NamespaceId: 1, State: dirpb.PGState_PG_ACTIVE, RegionBytes: 16 << 20,
				IndexBytes: index,
				Members:    []*dirpb.Member{{NodeId: 1}}, StatusArrays: []*dirpb.StatusArray{
					{Offset: tc.off, Segments: tc.segments}}}}}, 1)
		if (err == nil) != tc.ok {
			t.Errorf("%d segments at %#x: %v", tc.segments, tc.off, err)
		}
		if err == nil && (len(v.PGs[1].StatusArrays) != 1 || v.PGs[1].StatusArrays[0] != engine.StatusArray{
			Off: tc.off, Segments: tc.segments}) {
			t.Errorf("%d segments at %#x: %v", tc.segments, tc.off, v.PGs[1].StatusArrays)
		}
	}
}
