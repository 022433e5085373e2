package overview

import (
	"strings"
	"testing"

	"github.com/kvd-project/kvd/internal/dirpb"
)

// Each problem has a line of its own that says what mends it; a store that is well has none.
func TestProblems(t *testing.T) {
	well := func() *dirpb.StatusReply {
		on := func(nodes ...uint32) (ms []*dirpb.Member) {
			for _, n := range nodes {
				ms = append(ms, &dirpb.Member{NodeId: n})
			}
			return ms
		}
		up := dirpb.NodeState_NODE_UP
		return &dirpb.StatusReply{
			AnsweredBy: "d1", Leads: true,
			Directory: []*dirpb.DirectoryNode{{Id: "d1", Leader: true, Voter: true}, {Id: "d2", Voter: true},
				{Id: "d3", Voter: true}},
			Map: &dirpb.Map{
				Nodes: []*dirpb.Node{{Id: 1, Name: "m1", State: up, CapacityBytes: 300, UsedBytes: 200},
					{Id: 2, Name: "m2", State: up, CapacityBytes: 300, UsedBytes: 200},
					{Id: 3, Name: "m3", State: up, CapacityBytes: 300, UsedBytes: 100}},
				Namespaces: []*dirpb.Namespace{{Id: 1, Name: "a", Replicas: 2}, {Id: 2, Name: "b", Replicas: 1}},
				Pgs: []*dirpb.PlacementGroup{
					{Id: 1, NamespaceId: 1, State: dirpb.PGState_PG_ACTIVE, Members: on(1, 2), RegionBytes: 100},
					{Id: 2, NamespaceId: 1, State: dirpb.PGState_PG_ACTIVE, Members: on(2, 1), RegionBytes: 100},
					{Id: 3, NamespaceId: 2, State: dirpb.PGState_PG_ACTIVE, Members: on(3), RegionBytes: 100},
				},
			},
		}
	}
	if p := Problems(well()); len(p) > 0 {
		t.Errorf("well, but %v", p)
	}
	if p := Problems(&dirpb.StatusReply{Directory: well().Directory}); len(p) > 0 {
		t.Errorf("an older version, but %v", p)
	}
	for _, tc := range []struct {
		name  string
		spoil func(*dirpb.StatusReply)
		want  []string // what: mend, in part
	}{
		{"follower", func(st *dirpb.StatusReply) { st.Leads, st.AnsweredBy, st.AgeMillis = false, "d2", 2340 },
			[]string{"answer of directory node d2, which does not lead: it is 2.3s old|ask again"}},
		{"never heard a leader", func(st *dirpb.StatusReply) {
			st.Leads, st.AgeMillis = false, -1
		}, []string{"of unknown age|"}},
		{"no majority", func(st *dirpb.StatusReply) { st.Leads, st.Directory[0].Leader = false, false },
			[]string{"does not lead|", "no leader: 2 of its 3 nodes must run|kvd directory --id ID"}},
		{"silent member", func(st *dirpb.StatusReply) { st.Directory[2].SilentMillis = 61000 },
			[]string{"directory node d3 has not answered for 1m1s|kvd directory --id d3 --data-dir DIR; or, if it is " +
				"gone for good: kvctl directory remove d3"}},
		{"loss", func(st *dirpb.StatusReply) {
			st.Map.Namespaces[1].Losses = []*dirpb.Loss{{VolumeId: 4, Times: 1, Node: "t9", UnixMillis: 9000},
				{PgId: 3, Times: 2, Node: "m3", UnixMillis: 3000},
				{PgId: 4, Times: 1, Node: "m9", UnixMillis: 2000}}
		}, []string{"namespace b lost values that had no copy but on tier node t9, which was given up at " +
			"1970-01-01T00:00:09Z|kvctl namespace accept-loss b",
			"namespace b lost keys: all copies of placement group 3 (2 times), 4, the last one with memory " +
				"node m3 at 1970-01-01T00:00:03Z|kvctl namespace accept-loss b"}},
		{"node down", func(st *dirpb.StatusReply) {
			st.Map.Nodes[1].State = dirpb.NodeState_NODE_DOWN
			st.Map.Pgs[0].Members, st.Map.Pgs[1].Members = st.Map.Pgs[0].Members[:1], st.Map.Pgs[1].Members[1:]
		}, []string{"namespace a: placement groups 1, 2: 1 of 2 copies: new ones are being made|kvctl jobs",
			"memory node m2 is down|kvd memnode --name m2"}},
		{"gateway unheard", func(st *dirpb.StatusReply) {
			st.Gateways = []*dirpb.GatewayInfo{
				{Addr: "10.0.0.31:7404"},
				{Addr: "127.0.0.1:40000", Trouble: "its certificate does not cover 127.0.0.1"}}
		}, []string{"gateway 127.0.0.1:40000 does not hear all others, or is not heard by them: its certificate does " +
			"not cover 127.0.0.1|set listen-peers (or advertise-peers)"}},
		{"crash loop", func(st *dirpb.StatusReply) { st.Map.Nodes[1].Trouble = "its workers die" },
			[]string{"memory node m2 does not come up: its workers die|kvctl doctor"}},
		{"no room", func(st *dirpb.StatusReply) {
			st.Map.Nodes[2].UsedBytes = 201
			st.Map.Pgs[0].Members = st.Map.Pgs[0].Members[:1]
			st.Map.Nodes[1].UsedBytes = 300
		}, []string{"namespace a: placement group 1: 1 of 2 copies, and no other memory node has room for one|kvd " +
			"memnode --name NAME --memory SIZE"}},
		{"joiner", func(st *dirpb.StatusReply) {
			st.Map.Pgs[0].Joining = true
		}, []string{"placement group 1: 1 of 2 copies: new ones|"}},
		{"lost", func(st *dirpb.StatusReply) {
			st.Map.Nodes[2].State, st.Map.Pgs[2].State = dirpb.NodeState_NODE_DOWN, dirpb.PGState_PG_LOST
		}, []string{"placement group 3: no copy: their keys cannot be read or written|kvctl nodes remove NODE --force",
			"memory node m3 is down|"}},
		{"lost, no room", func(st *dirpb.StatusReply) {
			st.Map.Pgs[2].State, st.Map.Pgs[2].Members = dirpb.PGState_PG_LOST, nil
			st.Map.Pgs[2].RegionBytes = 1000
		}, []string{"placement group 3: no copy, and no other memory node has room for one|start another"}},
		{"being made", func(st *dirpb.StatusReply) {
			st.Map.Pgs[2].State = dirpb.PGState_PG_CREATING
		}, []string{"no copy yet: memory nodes are making them|kvctl nodes"}},
	} {
		st := well()
		tc.spoil(st)
		got := Problems(st)
		ok := len(got) == len(tc.want)
		for i, p := range got {
			if ok {
				what, mend, _ := strings.Cut(tc.want[i], "|")
				ok = strings.Contains(p.What, what) && strings.Contains(p.Mend, mend)
			}
		}
		if !ok {
			t.Errorf("%s: got %+v, want %q", tc.name, got, tc.want)
		}
	}
}

// A namespace's memory is the sum of its placement groups', and unknown if some of it is.
func TestSums(t *testing.T) {
	sums := Sums([]*Memory{
		{Namespace: "a", PG: 1, Heap: 10, Granted: 5, Live: 3, Lost: 1, Known: true},
		{Namespace: "a", PG: 2, Heap: 20, Granted: 6, Live: 4, Waiting: 2, Known: true, Short: true},
		{Namespace: "b", PG: 3, Heap: 7, Known: true}, {Namespace: "b", PG: 4, Heap: 8},
	})
	if len(sums) != 2 ||
		*sums[0] != (Memory{Namespace: "a", Heap: 30, Granted: 11, Live: 7, Lost: 1, Waiting: 2, Known: true,
			Short: true}) ||
		*sums[1] != (Memory{Namespace: "b", Heap: 15}) {
		t.Errorf("%+v", sums)
	}
}
