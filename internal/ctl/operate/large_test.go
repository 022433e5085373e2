package operate

import (
	"fmt"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/dirpb"
)

// TestLargeStatus: the short status of a store of 64 memory nodes and 800 placement groups fits on some screens, and
// has what lacks something; silent memory nodes are not counted as up, and not all of many are named.
func TestLargeStatus(t *testing.T) {
	m := &dirpb.Map{ClusterId: "c"}
	for i := range uint32(64) {
		m.Nodes = append(m.Nodes, &dirpb.Node{Id: i + 1, Name: fmt.Sprint("m", i+1), State: dirpb.NodeState_NODE_UP,
			CapacityBytes: 64 << 20, Waiting: i >= 50})
	}
	st := &dirpb.StatusReply{Map: m}
	for i := range uint32(100) {
		m.Namespaces = append(m.Namespaces, &dirpb.Namespace{Id: i + 1, Name: fmt.Sprint("n", i+1), Replicas: 1,
			Nodes: 8, Grows: true})
		for k := range uint32(8) {
			pg := &dirpb.PlacementGroup{Id: 8*i + k + 1, NamespaceId: i + 1, State: dirpb.PGState_PG_ACTIVE,
				Members: []*dirpb.Member{{NodeId: k + 1}}}
			if pg.Id == 77 {
				pg.State = dirpb.PGState_PG_CREATING
			}
			m.Pgs = append(m.Pgs, pg)
			st.Usage = append(st.Usage, &dirpb.PGUsage{PgId: pg.Id, HeapUnits: 1000, LiveUnits: uint64(pg.Id)})
		}
	}
	var out strings.Builder
	a := &commands{&ctl.App{Stdout: &out, Stderr: &out}}
	if err := a.printStatus(st, false); err != nil {
		t.Fatal(err)
	}
	short := out.String()
	for _, want := range []string{"50 up, 14 silent, 0 down", "m58 and 6 more", "77  n10",
		"800 placement groups, of which 1 lack something", "the 32 fullest of 100 namespaces", "--all"} {
		if !strings.Contains(short, want) {
			t.Errorf("the short form lacks %q:\n%s", want, short)
		}
	}
	if n := strings.Count(short, "\n"); n > 110 {
		t.Errorf("the short form has %d lines", n)
	}
	out.Reset()
	if err := a.printStatus(st, true); err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(out.String(), "\n"); n < 900 {
		t.Errorf("the long form has %d lines", n)
	}
}
