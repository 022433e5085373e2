package lint

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// few are what has few bytes, so that their number says more than a unit: names, keys, fields of a format. A message
// with %d bytes has one of these words before or behind it.
var few = []string{"key", "name", "line", "prefix", "meta", "of body", "fields", "private data", "pages",
	"of a region of", "socket", "what a", "… (%d bytes)", "%s is longer", "reason", "--sizes", "an index of",
	"values of",
	"a message of", "ScriptMemory", "%v of %d bytes", "%d bytes, want at most %d", "index of %d bytes in",
	"access words", "regions take", "divide a region of", "and each generation"}

// TestUnits holds errors and logs to amounts of memory with a unit that people read.
func TestUnits(t *testing.T) {
	seen := 0
	for _, dir := range []string{"cmd", "internal/ctl", "client", "server/fsm", "memnode", "internal/certs",
		"internal/engine", "internal/gateway", "internal/inside", "internal/luascript", "internal/memcached",
		"internal/webget"} {
		seen += unitsBelow(t, filepath.Join(root, dir))
	}
	if seen < 10 {
		t.Errorf("%d messages with bytes found", seen)
	}
}

// unitsBelow looks at the messages of a folder, and returns how many have bytes.
func unitsBelow(t *testing.T, dir string) (seen int) {
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return nil
		}
		files := token.NewFileSet()
		f, err := parser.ParseFile(files, path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		ast.Inspect(f, func(n ast.Node) bool {
			lit, ok := n.(*ast.BasicLit)
			if !ok || lit.Kind != token.STRING || !strings.Contains(lit.Value, "%d bytes") {
				return true
			}
			seen++
			for _, w := range few {
				if strings.Contains(lit.Value, w) {
					return true
				}
			}
			t.Errorf("%s: %s: want %%s and units.Bytes, unless these are always few", files.Position(lit.Pos()),
				lit.Value)
			return true
		})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return seen
}
