package overview

import (
	"reflect"
	"testing"

	"github.com/kvd-project/kvd/internal/dirpb"
)

func pictured() *dirpb.StatusReply {
	up := dirpb.NodeState_NODE_UP
	return &dirpb.StatusReply{Map: &dirpb.Map{
		Nodes: []*dirpb.Node{{Id: 1, Name: "m1", State: up, CapacityBytes: 10000, UsedBytes: 5000},
			{Id: 2, Name: "m2", State: up, CapacityBytes: 3000, UsedBytes: 4000},
			{Id: 3, Name: "m3", State: up, CapacityBytes: 100}},
		Namespaces: []*dirpb.Namespace{{Id: 1, Name: "a", Replicas: 2}, {Id: 2, Name: "b", Replicas: 1}},
		Pgs: []*dirpb.PlacementGroup{
			{Id: 1, NamespaceId: 1, State: dirpb.PGState_PG_ACTIVE, RegionBytes: 2000, Members: []*dirpb.Member{
				{NodeId: 1}, {NodeId: 2}, {NodeId: 77}}},
			{Id: 2, NamespaceId: 2, State: dirpb.PGState_PG_ACTIVE, RegionBytes: 1000, Members: []*dirpb.Member{
				{NodeId: 1}}},
		},
	}, Usage: []*dirpb.PGUsage{
		{PgId: 1, HeapUnits: 20, GrantedUnits: 12, LiveUnits: 8, FreeUnits: 4, Estimated: true},
		{PgId: 2, HeapUnits: 10, GrantedUnits: 5, LiveUnits: 5, Estimated: true},
	}}
}

// A memory node's memory is that of each copy that lies there; what is in no chain, and what no region has, is shown
// too.
func TestNodeMemories(t *testing.T) {
	const unit = 64
	st := pictured()
	got := NodeMemories(st)
	type sums struct{ heap, live, free, room, index, other, spare uint64 }
	for i, want := range []sums{
		{30 * unit, 13 * unit, 4 * unit, 13 * unit, 3000 - 30*unit, 2000, 5000},
		{20 * unit, 8 * unit, 4 * unit, 8 * unit, 2000 - 20*unit, 2000, 0},
		{0, 0, 0, 0, 0, 0, 100},
	} {
		m := got[i]
		if s := (sums{m.Heap, m.Live, m.Free, m.Room, m.Index, m.Other, m.Spare}); s != want || !m.Known {
			t.Errorf("%s: %+v, known %v, want %+v", m.Node.GetName(), s, m.Known, want)
		}
	}
	st.Usage[1].Estimated = false
	if got := NodeMemories(st); got[0].Known || !got[1].Known {
		t.Error("what only a leader knows is taken for known")
	}
}

// Shards are in the order of their hashes; those whose place cannot be is in no picture.
func TestSpans(t *testing.T) {
	m := &dirpb.Map{Shards: []*dirpb.Shard{
		{Id: 1, NamespaceId: 1, Prefix: 3, Depth: 2}, {Id: 2, NamespaceId: 1, Prefix: 0, Depth: 1},
		{Id: 3, NamespaceId: 1, Prefix: 2, Depth: 2},
		{Id: 4, NamespaceId: 2}, {Id: 5, NamespaceId: 1, Prefix: 4, Depth: 2}, {Id: 6, NamespaceId: 1, Depth: 64},
		{Id: 7, NamespaceId: 3, Prefix: 1<<32 - 1, Depth: 32},
	}}
	for namespace, want := range map[uint32][][3]float64{
		1: {{2, 0, 0.5}, {3, 0.5, 0.75}, {1, 0.75, 1}},
		2: {{4, 0, 1}},
		3: {{7, 1 - 1.0/(1<<32), 1}},
		4: nil,
	} {
		var got [][3]float64
		for _, s := range Spans(m, namespace) {
			got = append(got, [3]float64{float64(s.Shard.GetId()), s.From, s.To})
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("namespace %d: %v, want %v", namespace, got, want)
		}
	}
}
