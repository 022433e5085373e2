package lint

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// saidStructs are the largest structs, by file and type: each of their fields says who writes it, when, or what always
// holds of it.
var saidStructs = [][2]string{
	{"index/op.go", "Op"}, {"index/op.go", "publishing"}, {"index/op.go", "far"},
	{"internal/config/roles.go", "Gateway"},
	{"internal/engine/core.go", "Core"}, {"internal/engine/lane.go", "Lane"},
	{"internal/gateway/conn.go", "conn"}, {"internal/gateway/gateway.go", "Gateway"},
	{"internal/gateway/conn.go", "clientState"}, {"internal/gateway/conn.go", "reading"},
	{"internal/gateway/conn.go", "visible"}, {"internal/gateway/gateway.go", "figures"},
	{"internal/gateway/gateway.go", "access"}, {"internal/gateway/gateway.go", "audience"},
	{"internal/gateway/gateway.go", "settable"},
	{"internal/session/agenda.go", "Agenda"},
	{"memnode/memnode.go", "Node"},
	{"rdma/tcp/qp.go", "qp"},
	{"server/fsm/fsm.go", "State"}, {"server/lead/lead.go", "Leader"},
}

// unsaid lists the fields of the struct name in src about which nothing is said: neither above nor beside them, nor at
// the head of their group, which ends with a blank line. A field that is a struct itself is judged by its own fields,
// and a mutex that is embedded says enough. found is false if there is no such struct.
func unsaid(src, name string) (out []string, found bool, err error) {
	set := token.NewFileSet()
	f, err := parser.ParseFile(set, name+".go", src, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		return nil, false, err
	}
	line := func(p token.Pos) int { return set.Position(p).Line }
	var judge func(path string, s *ast.StructType)
	judge = func(path string, s *ast.StructType) {
		said, end := false, 0
		for _, fd := range s.Fields.List {
			begin := line(fd.Pos())
			if fd.Doc != nil {
				begin = line(fd.Doc.Pos())
			}
			if begin > end+1 || end == 0 {
				said = fd.Doc != nil
			}
			if end = line(fd.End()); fd.Comment != nil {
				end = line(fd.Comment.End())
			}
			names := make([]string, 0, len(fd.Names))
			for _, n := range fd.Names {
				names = append(names, path+n.Name)
			}
			if len(names) == 0 {
				names = append(names, path+strings.TrimPrefix(src[set.Position(fd.Type.Pos()).Offset:set.Position(
					fd.Type.End()).Offset], "*"))
			}
			switch inner, ok := fd.Type.(*ast.StructType); {
			case ok:
				judge(names[0]+".", inner)
			case said, fd.Doc != nil, fd.Comment != nil, len(fd.Names) == 0 && names[0] == path+"sync.Mutex":
			default:
				out = append(out, names...)
			}
		}
	}
	for _, d := range f.Decls {
		if g, ok := d.(*ast.GenDecl); ok {
			for _, spec := range g.Specs {
				if t, ok := spec.(*ast.TypeSpec); ok && t.Name.Name == name {
					if s, ok := t.Type.(*ast.StructType); ok {
						judge("", s)
						found = true
					}
				}
			}
		}
	}
	return out, found, nil
}

// TestStructs holds the largest structs to it.
func TestStructs(t *testing.T) {
	for _, x := range saidStructs {
		src, err := os.ReadFile(filepath.Join(root, x[0]))
		if err != nil {
			t.Fatal(err)
		}
		out, found, err := unsaid(string(src), x[1])
		if err != nil {
			t.Fatal(err)
		}
		if !found {
			t.Errorf("%s has no struct %s: name the file where it is now", x[0], x[1])
		}
		for _, field := range out {
			t.Errorf("%s: nothing says who writes %s.%s, when, or what always holds of it", x[0], x[1], field)
		}
	}
}

// TestUnsaid tries the rule on a struct of every case.
func TestUnsaid(t *testing.T) {
	const src = `package p
type s struct {
	bare int
	alone int // said

	// The head of a group.
	a int
	// Said above.
	b int
	c, d int

	e, f int
	// Said above, which is no head.
	g int
	h int

	sync.Mutex
	*far

	mu struct {
		sync.Mutex
		i int
		j int // said
	}
	// A head that stands apart from what follows.

	k int
}
type other int
`
	want := []string{"bare", "e", "f", "h", "far", "mu.i", "k"}
	got, found, err := unsaid(src, "s")
	if err != nil || !found || !slices.Equal(got, want) {
		t.Errorf("said nothing of %v, found %v, err %v; want %v", got, found, err, want)
	}
	if _, found, err := unsaid(src, "other"); err != nil || found {
		t.Errorf("a type that is no struct: found %v, err %v", found, err)
	}
	if _, _, err := unsaid("package", "s"); err == nil {
		t.Error("a file that is no Go is judged")
	}
}
