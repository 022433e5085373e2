package overview

import (
	"slices"
	"testing"

	"github.com/kvd-project/kvd/internal/dirpb"
)

// An object has its members in the order of the columns. Unknown figures are null, and - in a row.
func TestMemoryColumns(t *testing.T) {
	m := &Memory{Namespace: "<a>", PG: 7, Heap: 2048, Granted: 1024, Live: 512, Free: 1, Foreign: 2, Known: true}
	for _, c := range []struct {
		change func()
		want   string
		cells  []string
	}{
		{func() {}, `{"namespace":"<a>","pg":7,"heap_bytes":2048,"granted_bytes":1024,"live_bytes":512,` +
			`"live_percent":25,"free_bytes":1,"foreign_bytes":2,"limbo_bytes":0,"coming_bytes":0,"waiting_bytes":0,` +
			`"recalled_bytes":0,"lost_bytes":0,"room_bytes":0,"short":false}`,
			[]string{"<a>", "7", "2.0 KiB", "512 B", "25.0", "3 B", "0 B", "0 B", "0 B", "0 B", "0 B", "0 B", "no"}},
		{func() { m.Known, m.PG = false, 0 }, `{"namespace":"<a>","heap_bytes":2048,"granted_bytes":1024,` +
			`"live_bytes":null,"live_percent":null,"free_bytes":null,"foreign_bytes":null,"limbo_bytes":null,` +
			`"coming_bytes":null,"waiting_bytes":0,"recalled_bytes":0,"lost_bytes":null,"room_bytes":0,"short":null}`,
			[]string{"<a>", "all", "2.0 KiB", "-", "-", "-", "-", "-", "0 B", "0 B", "-", "0 B", "-"}},
	} {
		c.change()
		if got, err := MemoryColumns.Object(m); err != nil || string(got) != c.want {
			t.Errorf("%s, %v; want %s", got, err, c.want)
		}
		if got := MemoryColumns.Texts(m); !slices.Equal(got, c.cells) || len(got) != len(MemoryColumns.Heads()) {
			t.Errorf("%q, want %q", got, c.cells)
		}
	}
}

// A part of the columns is in their order, whatever order names them.
func TestColumnsOnly(t *testing.T) {
	if got := SessionColumns.Only("Client", "Session").Heads(); !slices.Equal(got, []string{"Session", "Client"}) {
		t.Errorf("%q", got)
	}
	if got := SessionColumns.Without("Client", "Session").Heads(); !slices.Equal(got,
		[]string{"Namespace", "State", "Age", "Reclaim epoch", "Identity"}) {
		t.Errorf("%q", got)
	}
}

// Members tell who is about to enter a placement group, and who has just left it.
func TestMembers(t *testing.T) {
	m := &dirpb.Map{Nodes: []*dirpb.Node{{Id: 1, Name: "a"}, {Id: 2, Name: "b"}, {Id: 3, Name: "c"}, {Id: 4,
		Name: "d"}}}
	p := &dirpb.PlacementGroup{Members: []*dirpb.Member{{NodeId: 1}, {NodeId: 2}}, Joining: true,
		Planned: &dirpb.Member{NodeId: 3}, Leaving: &dirpb.Member{NodeId: 4}}
	if got := Members(m)(p); got != "a, b (joining), c (planned), d (leaving)" {
		t.Error(got)
	}
	m.Pgs = []*dirpb.PlacementGroup{p}
	for node, want := range map[uint32]bool{0: false, 1: true, 3: true, 4: true, 5: false} {
		if IsOn(p, node) != want {
			t.Errorf("on node %d: %v", node, !want)
		}
		if n := RegionsOn(m, node); want != (n == 1) {
			t.Errorf("%d regions on node %d", n, node)
		}
	}
}
