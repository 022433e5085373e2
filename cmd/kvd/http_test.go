package main

import (
	"reflect"
	"testing"

	"github.com/kvd-project/kvd/internal/dirpb"
)

// The page shows what a leader knows of memory; another directory node says that it does not
// know, and never 0.
func TestMemoryTable(t *testing.T) {
	st := &dirpb.StatusReply{
		Map: &dirpb.Map{
			Namespaces: []*dirpb.Namespace{{Id: 1, Name: "default"}, {Id: 2, Name: "cache"}},
			Pgs:        []*dirpb.PlacementGroup{{Id: 1, NamespaceId: 1}, {Id: 2, NamespaceId: 2}, {Id: 3, NamespaceId: 1}},
		},
		Usage: []*dirpb.PGUsage{
			{PgId: 1, HeapUnits: 1600, GrantedUnits: 1200, LiveUnits: 800, FreeUnits: 160, ForeignUnits: 16, LimboUnits: 32, ComingUnits: 48, LostUnits: 144,
				WaitingUnits: 64, RecalledUnits: 320, Short: true, Estimated: true},
			{PgId: 2, HeapUnits: 160, Estimated: true},
			{PgId: 3, HeapUnits: 1600, GrantedUnits: 16, LiveUnits: 16, Estimated: true},
		},
	}
	want := [][]string{
		{"cache", "all", "10KiB", "0B", "0.0", "0B", "0B", "0B", "0B", "0B", "0B", "10KiB", "no"},
		{"cache", "2", "10KiB", "0B", "0.0", "0B", "0B", "0B", "0B", "0B", "0B", "10KiB", "no"},
		{"default", "all", "200KiB", "51KiB", "25.5", "11KiB", "2KiB", "3KiB", "4KiB", "20KiB", "9KiB", "120KiB", "yes"},
		{"default", "1", "100KiB", "50KiB", "50.0", "11KiB", "2KiB", "3KiB", "4KiB", "20KiB", "9KiB", "21KiB", "yes"},
		{"default", "3", "100KiB", "1KiB", "1.0", "0B", "0B", "0B", "0B", "0B", "0B", "99KiB", "no"},
	}
	if got := memoryTable(st); !reflect.DeepEqual(got.Rows, want) || len(got.Header) != len(want[0]) {
		t.Errorf("got  %q\nwant %q", got.Rows, want)
	}
	st.Usage = []*dirpb.PGUsage{{PgId: 1, HeapUnits: 1600, GrantedUnits: 1200, WaitingUnits: 64, RecalledUnits: 320}}
	want = [][]string{
		{"default", "all", "100KiB", "-", "-", "-", "-", "-", "4KiB", "20KiB", "-", "21KiB", "-"},
		{"default", "1", "100KiB", "-", "-", "-", "-", "-", "4KiB", "20KiB", "-", "21KiB", "-"},
	}
	if got := memoryTable(st); !reflect.DeepEqual(got.Rows, want) {
		t.Errorf("got  %q\nwant %q", got.Rows, want)
	}
}

// A namespace that is being deleted says so.
func TestNamespacesTable(t *testing.T) {
	st := &dirpb.StatusReply{Map: &dirpb.Map{Namespaces: []*dirpb.Namespace{{Id: 1, Name: "default"}, {Id: 2, Name: "old", Deleting: true}}}}
	var got []string
	for _, r := range namespacesTable(st).Rows {
		got = append(got, r[0])
	}
	if want := []string{"default", "old (being deleted)"}; !reflect.DeepEqual(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}
