package overview

import (
	"strings"
	"testing"

	"github.com/kvd-project/kvd/internal/dirpb"
)

// The verdict is that of the worst problem, and healthy without one alone.
func TestVerdictOf(t *testing.T) {
	leader := []*dirpb.DirectoryNode{{Id: "d1", Leader: true}}
	node := func(state dirpb.NodeState) *dirpb.Node {
		return &dirpb.Node{Id: 1, Name: "m1", State: state, CapacityBytes: 1 << 20}
	}
	group := func(state dirpb.PGState, members ...*dirpb.Member) *dirpb.PlacementGroup {
		return &dirpb.PlacementGroup{Id: 1, NamespaceId: 1, State: state, Members: members}
	}
	up, waiting := node(dirpb.NodeState_NODE_UP), node(dirpb.NodeState_NODE_UP)
	waiting.Waiting = true
	one := &dirpb.Member{NodeId: 1}
	namespace := []*dirpb.Namespace{{Id: 1, Name: "a", Replicas: 1}}
	state := func(d []*dirpb.DirectoryNode, n *dirpb.Node, ns []*dirpb.Namespace,
		p *dirpb.PlacementGroup) *dirpb.StatusReply {
		return &dirpb.StatusReply{AnsweredBy: "d1", Leads: true, Directory: d,
			Map: &dirpb.Map{Nodes: []*dirpb.Node{n}, Namespaces: ns, Pgs: []*dirpb.PlacementGroup{p}}}
	}
	active := group(dirpb.PGState_PG_ACTIVE, one)
	for name, c := range map[string]struct {
		st   *dirpb.StatusReply
		want Verdict
	}{
		"all well":       {state(leader, up, namespace, active), Healthy},
		"a node is down": {state(leader, node(dirpb.NodeState_NODE_DOWN), namespace, active), Degraded},
		"a copy is missing": {state(leader, up, []*dirpb.Namespace{{Id: 1, Name: "a", Replicas: 2}}, active),
			Degraded},
		"no leader":        {state([]*dirpb.DirectoryNode{{Id: "d1"}}, up, namespace, active), Unavailable},
		"no copy":          {state(leader, up, namespace, group(dirpb.PGState_PG_LOST)), Unavailable},
		"waits for a node": {state(leader, waiting, namespace, active), Unavailable},
		"keys are gone": {
			state(leader, up,
				[]*dirpb.Namespace{{Id: 1, Name: "a", Replicas: 1, Losses: []*dirpb.Loss{{PgId: 1, Times: 1}}}},
				active), Lost},
		"no copy and keys gone": {
			state(leader, up,
				[]*dirpb.Namespace{{Id: 1, Name: "a", Replicas: 1, Losses: []*dirpb.Loss{{PgId: 1, Times: 1}}}},
				group(dirpb.PGState_PG_LOST)), Lost},
	} {
		got := VerdictOf(c.st)
		if got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
		if (got == Healthy) != (len(Problems(c.st)) == 0) {
			t.Errorf("%s: %s with problems %v", name, got, Problems(c.st))
		}
	}
}

// A summary is the verdict with what there is, the problem, or how many there are and the worst; with what mends it.
func TestSummary(t *testing.T) {
	st := pictured()
	st.Map.Pgs[0].Members = st.Map.Pgs[0].Members[:2]
	if line, mend := Summary(st); line != "healthy: 3 memory nodes up, 2 placement groups with all copies, 0 jobs "+
		"under way" || mend != "" {
		t.Errorf("%q, %q", line, mend)
	}
	st.Map.Nodes[2].State = dirpb.NodeState_NODE_DOWN
	if line, mend := Summary(st); line != "degraded: memory node m3 is down" ||
		!strings.HasPrefix(mend, "kvd memnode --name m3") {
		t.Errorf("%q, %q", line, mend)
	}
	st.Map.Pgs[1].State = dirpb.PGState_PG_LOST
	if line, mend := Summary(st); !strings.HasPrefix(line, "unavailable: 2 problems, first: namespace b: placement "+
		"group 2: no copy") || mend != Problems(st)[0].Mend {
		t.Errorf("%q, %q", line, mend)
	}
}
