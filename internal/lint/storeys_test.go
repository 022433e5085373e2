package lint

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

// storeys are the rooms of Redis's protocol, from the roof down. A room imports rooms of the storeys below its own
// alone: rows of the table may say less, and never more. Some rooms are not built yet: their work is the gateway's.
var storeys = []string{
	"internal/gateway",
	"internal/redis/front",
	"internal/redis/live internal/redis/admin internal/redis/script",
	"internal/redis/exec",
	"internal/redis/values",
	"internal/redis/args internal/redis/spec internal/redis/acl internal/redis/rdb",
	"internal/redis/collection internal/redis/geo internal/redis/glob internal/redis/resp",
}

// storeyOf counts from the roof; -1: the package is on none.
func storeyOf(name string) int {
	return slices.IndexFunc(storeys, func(s string) bool { return slices.Contains(strings.Fields(s), name) })
}

// climbs draws the arrows between rooms, a line each room, and says which ones do not go down.
func climbs(pkgs []pkg) (drawn, wrong []string) {
	for _, p := range pkgs {
		from := storeyOf(p.rel())
		if from < 0 {
			if below("internal/redis", p.rel()) {
				wrong = append(wrong, p.rel()+" is on no storey")
			}
			continue
		}
		var to []string
		for _, imp := range p.Imports {
			name := strings.TrimPrefix(imp, module+"/")
			at := storeyOf(name)
			if at < 0 {
				continue
			}
			if to = append(to, name[strings.LastIndex(name, "/")+1:]); at <= from {
				wrong = append(wrong, fmt.Sprintf("%s imports %s, which is not below it", p.rel(), name))
			}
		}
		drawn = append(drawn, fmt.Sprintf("%d %s -> %s", from, p.rel(), strings.Join(to, " ")))
	}
	slices.Sort(drawn)
	return drawn, wrong
}

// TestStoreys: between the rooms of Redis's protocol imports go down.
func TestStoreys(t *testing.T) {
	drawn, wrong := climbs(list(t))
	for _, w := range wrong {
		t.Error(w)
	}
	if len(drawn) < 8 {
		t.Errorf("%d rooms", len(drawn))
	}
	t.Logf("\n%s", strings.Join(drawn, "\n"))
}

// TestClimbs: an arrow up, one on the same storey, and a room on none are noticed.
func TestClimbs(t *testing.T) {
	imp := func(from string, to ...string) pkg {
		p := pkg{ImportPath: module + "/" + from}
		for _, name := range to {
			p.Imports = append(p.Imports, module+"/"+name)
		}
		return p
	}
	_, wrong := climbs([]pkg{
		imp("internal/redis/values", "internal/redis/spec", "client"),
		imp("internal/redis/spec", "internal/redis/values"),
		imp("internal/redis/live", "internal/redis/admin"),
		imp("internal/redis/glob", "internal/gateway"),
		imp("internal/redis/attic"),
	})
	want := []string{
		"internal/redis/spec imports internal/redis/values, which is not below it",
		"internal/redis/live imports internal/redis/admin, which is not below it",
		"internal/redis/glob imports internal/gateway, which is not below it",
		"internal/redis/attic is on no storey",
	}
	if !slices.Equal(wrong, want) {
		t.Errorf("%q", wrong)
	}
}
