package overview

import (
	"testing"

	"github.com/kvd-project/kvd/internal/dirpb"
)

// A placement group without a shard, such as a drain leaves, serves no key: that it lacks copies is no problem. With
// one it is.
func TestUnusedGroups(t *testing.T) {
	for _, state := range []dirpb.PGState{dirpb.PGState_PG_ACTIVE, dirpb.PGState_PG_LOST, dirpb.PGState_PG_CREATING} {
		st := &dirpb.StatusReply{Leads: true, Map: &dirpb.Map{
			Nodes: []*dirpb.Node{{Id: 1, Name: "m1", State: dirpb.NodeState_NODE_UP},
				{Id: 2, Name: "m2", State: dirpb.NodeState_NODE_UP}},
			Namespaces: []*dirpb.Namespace{{Id: 1, Name: "data", Replicas: 2}},
			Pgs: []*dirpb.PlacementGroup{
				{Id: 1, NamespaceId: 1, State: dirpb.PGState_PG_ACTIVE, Members: []*dirpb.Member{
					{NodeId: 1}, {NodeId: 2}}},
				{Id: 2, NamespaceId: 1, State: state, Members: []*dirpb.Member{{NodeId: 1}}},
			},
			Shards: []*dirpb.Shard{{Id: 1, NamespaceId: 1, PgId: 1}},
		}}
		if v, all := VerdictOf(st), Problems(st); v != Healthy || len(all) > 0 {
			t.Errorf("%v without a shard: %s, %v", state, v, all)
		}
		if lacks := Lacks(st.Map, st.Map.Pgs[1]); lacks != "" {
			t.Errorf("%v without a shard lacks %q", state, lacks)
		}
		if n := Namespaces(st)[0]; n.Missing != 0 || n.Homeless != 0 {
			t.Errorf("%v without a shard: %d copies are missing, %d placement groups are homeless", state, n.Missing,
				n.Homeless)
		}
		st.Map.Shards = append(st.Map.Shards, &dirpb.Shard{Id: 2, NamespaceId: 1, PgId: 1, Move: &dirpb.Move{PgId: 2}})
		if v, lacks := VerdictOf(st), Lacks(st.Map, st.Map.Pgs[1]); v == Healthy || lacks == "" {
			t.Errorf("%v that is to get a shard: %s, lacks %q", state, v, lacks)
		}
	}
}
