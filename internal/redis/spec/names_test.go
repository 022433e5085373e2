package spec_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/internal/redis/spec"
)

// elsewhere are words that are some command's name, and mean something else in a file.
var elsewhere = []struct{ file, words, why string }{
	{"gateway/cluster.go", "cluster role", "a mode of INFO, and a field of nodes"},
	{"gateway/describe.go", "type", "a field of COMMAND DOCS"},
	{"gateway/info.go", "Memory Cluster role", "sections and fields of INFO"},
	{"admin/latency.go", "command", "an event of LATENCY"},
	{"gateway/metrics.go", "command memory", "labels"},
	{"live/events.go", "del expire getex persist set", "events, which Redis names like that"},
	{"live/hub.go", "subscribe unsubscribe psubscribe punsubscribe ssubscribe sunsubscribe", "kinds of messages"},
	{"gateway/rules.go", "multi", "a context of ACL LOG"},
	{"gateway/settings.go", "pubsub save", "a class of clients and a setting"},
	{"acl/acl.go", "set pubsub command auth", "categories, and reasons of ACL LOG"},
	{"acl/rules.go", "reset", "a rule"},
}

// readers are functions whose arguments are words of options, which Redis names like commands at times, and writers
// those of words in replies.
var readers, writers = []string{"Flag", "Option", "Choice", "Fold"}, []string{"BulkString", "Simple"}

// namesIn are the literals of a file that are names, but for those of imports, options and replies.
func namesIn(f *ast.File, names map[string]bool) (found []*ast.BasicLit) {
	var look func(n ast.Node) bool
	look = func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.ImportSpec:
			return false
		case *ast.CallExpr:
			method, _ := n.Fun.(*ast.SelectorExpr)
			if method == nil || !slices.Contains(slices.Concat(readers, writers), method.Sel.Name) {
				return true
			}
			for _, a := range n.Args {
				if _, is := a.(*ast.BasicLit); !is {
					ast.Inspect(a, look)
				}
			}
			return false
		case *ast.BasicLit:
			if s, err := strconv.Unquote(n.Value); n.Kind == token.STRING && err == nil && names[strings.ToLower(s)] {
				found = append(found, n)
			}
		}
		return true
	}
	ast.Inspect(f, look)
	return found
}

// TestNoNamesElsewhere: only descriptions and package values name commands. All else has their constants, so that a
// name that is wrong does not compile, and no list by name says what a command is.
func TestNoNamesElsewhere(t *testing.T) {
	names := make(map[string]bool)
	for _, c := range spec.Table {
		names[c.Name] = true
	}
	allowed := make(map[[2]string]bool) // whether it is there
	for _, e := range elsewhere {
		for _, w := range strings.Fields(e.words) {
			allowed[[2]string{e.file, w}] = false
		}
	}
	checked := 0
	for _, pattern := range []string{"../../gateway/*.go", "../*/*.go"} {
		files, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range files {
			dir := filepath.Base(filepath.Dir(name))
			if strings.HasSuffix(name, "_test.go") || dir == "spec" || dir == "values" {
				continue
			}
			checked++
			fset := token.NewFileSet()
			f, err := parser.ParseFile(fset, name, nil, parser.SkipObjectResolution)
			if err != nil {
				t.Fatal(err)
			}
			for _, lit := range namesIn(f, names) {
				s, _ := strconv.Unquote(lit.Value)
				at := [2]string{dir + "/" + filepath.Base(name), s}
				if _, is := allowed[at]; is {
					allowed[at] = true
				} else {
					t.Errorf("%s: %q is a command's name: it has a constant here", fset.Position(lit.Pos()), s)
				}
			}
		}
	}
	if checked < 50 {
		t.Errorf("%d files", checked)
	}
	for at, is := range allowed {
		if !is {
			t.Errorf("%s does not have %q", at[0], at[1])
		}
	}
}

// TestNamesAreFound: a list by name, a comparison and a switch are noticed, and words of options and replies are not.
func TestNamesAreFound(t *testing.T) {
	const src = `package p

import "time"

var scriptable = map[string]bool{"get": true}

func f(name string) {
	if name == "GET" || p.Flag("get") || find("set") {
		w.BulkString("get")
	}
	switch name {
	case "config|get":
	}
}`
	f, err := parser.ParseFile(token.NewFileSet(), "p.go", src, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, lit := range namesIn(f, map[string]bool{"get": true, "set": true, "config|get": true, "time": true}) {
		got = append(got, lit.Value)
	}
	if want := []string{`"get"`, `"GET"`, `"set"`, `"config|get"`}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}
