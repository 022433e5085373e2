package rdmacounters

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
)

func tree(files map[string]string) fstest.MapFS {
	m := fstest.MapFS{}
	for name, text := range files {
		m[name] = &fstest.MapFile{Data: []byte(text)}
	}
	return m
}

func TestRead(t *testing.T) {
	got, err := Read(tree(map[string]string{
		"mlx5_0/ports/1/hw_counters/out_of_sequence":   "7\n",
		"mlx5_0/ports/1/hw_counters/rx_read_requests":  "99\n", // no error
		"mlx5_0/ports/1/hw_counters/lifespan":          "10\n",
		"mlx5_0/ports/1/counters/symbol_error":         "1\n",
		"mlx5_0/ports/2/hw_counters/rp_cnp_handled":    "18446744073709551615\n",
		"mlx5_0/hw_counters/out_of_sequence":           "7\n", // the adapter's, all ports together
		"rxe0/ports/1/hw_counters/link_downed":         "2\n",
		"rxe0/ports/1/counters/link_downed":            "3\n", // the driver's comes first
		"rxe0/ports/1/hw_counters/completer_retry_err": "0\n",
	}))
	want := []Counter{{"mlx5_0", 1, "out_of_sequence", 7}, {"mlx5_0", 1, "symbol_error", 1},
		{"mlx5_0", 2, "rp_cnp_handled", 1<<64 - 1},
		{"rxe0", 1, "completer_retry_err", 0}, {"rxe0", 1, "link_downed", 2}}
	if d := cmp.Diff(want, got); d != "" || err != nil {
		t.Errorf("%v\n%s", err, d)
	}
	if got, err := Read(fstest.MapFS{}); err != nil || got != nil {
		t.Errorf("without adapters: %v, %v", got, err)
	}
}

// A value that is no count leaves out that counter alone, and adapters without end are not read to the end.
func TestReadHostile(t *testing.T) {
	for _, bad := range []string{"", "-1", "0x7", "18446744073709551616", strings.Repeat("1", 1<<16), "1 2", "\x00"} {
		got, err := Read(tree(map[string]string{"a/ports/1/hw_counters/out_of_sequence": bad,
			"a/ports/1/counters/symbol_error": "4"}))
		if err == nil || len(err.Error()) > 300 || !slices.Equal(got, []Counter{{"a", 1, "symbol_error", 4}}) {
			t.Errorf("%.20q: %v, %v", bad, got, err)
		}
	}
	many := map[string]string{strings.Repeat("n", 100) + "/ports/1/counters/symbol_error": "1"}
	for i := range 3 * maxDevices {
		for port := range 9 {
			many[fmt.Sprintf("a%d/ports/%d/counters/symbol_error", i, port)] = "1"
		}
	}
	got, err := Read(tree(many))
	if err == nil || len(got) != maxDevices*maxPorts {
		t.Errorf("%d counters, %v", len(got), err)
	}
}

func TestGrowth(t *testing.T) {
	before := []Counter{{"a", 1, "symbol_error", 4}, {"a", 1, "link_downed", 9}, {"a", 2, "symbol_error", 1}}
	after := []Counter{{"a", 1, "symbol_error", 6}, {"a", 1, "link_downed", 3}, {"a", 2, "symbol_error", 1},
		{"b", 1, "symbol_error", 5}, {"b", 1, "link_downed", 0}}
	want := []Counter{{"a", 1, "symbol_error", 2}, {"a", 1, "link_downed", 3}, {"b", 1, "symbol_error", 5}}
	if d := cmp.Diff(want, Growth(before, after)); d != "" {
		t.Error(d)
	}
}

// Every counter has a kind that Kinds lists, and every kind a name.
func TestKinds(t *testing.T) {
	for _, n := range Names() {
		k, ok := Lookup(n)
		if !ok || !slices.Contains(Kinds, k) {
			t.Errorf("%s: %v, %v", n, k, ok)
		}
	}
	seen := map[string]bool{"invalid": true}
	for _, k := range Kinds {
		if seen[k.String()] {
			t.Errorf("kind %d is called %v", k, k)
		}
		seen[k.String()] = true
	}
	if k, ok := Lookup("rx_read_requests"); ok || k.String() != "invalid" {
		t.Errorf("rx_read_requests: %v", k)
	}
}
