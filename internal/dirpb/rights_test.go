package dirpb

import (
	"os"
	"regexp"
	"strings"
	"testing"
)

// TestRightsInDocs: the table of the manual is the one that holds.
func TestRightsInDocs(t *testing.T) {
	b, err := os.ReadFile("../../docs/tls.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, ok := strings.Cut(string(b), "| RPC of the directory | roles |\n|---|---|\n")
	if !ok {
		t.Fatal("docs/tls.md has no table of RPCs and roles")
	}
	table, _, _ = strings.Cut(table, "\n\n")
	rights := Rights()
	seen := make(map[string]bool)
	rpc := regexp.MustCompile("`(\\w+)`")
	for line := range strings.SplitSeq(table, "\n") {
		cells := strings.Split(strings.Trim(line, "| "), " | ")
		if len(cells) != 2 {
			t.Fatalf("a row has %d cells: %s", len(cells), line)
		}
		names, _, _ := strings.Cut(cells[0], ", and ") // an exception, without a right of its own
		for _, m := range rpc.FindAllStringSubmatch(names, -1) {
			full := "/" + Directory_ServiceDesc.ServiceName + "/" + m[1]
			if got := rights[full].String(); got != cells[1] {
				t.Errorf("docs/tls.md has %s for %s, and it is for %q", m[1], cells[1], got)
			}
			seen[full] = true
		}
	}
	for full, roles := range rights {
		if !seen[full] {
			t.Errorf("docs/tls.md lacks %s, which is for %v", full, roles)
		}
	}
}
