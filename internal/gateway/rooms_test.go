package gateway

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// values are the files of what commands do to keys. They are a room of their own: nothing in them names a connection,
// the store, or how commands are performed.
var values = strings.Fields("bits dump encoding eventclass expiry geo hash hyperloglog keyspace lcs lists parts " +
	"performers set severallists sort stream streamgroup streamread strings waitinglists xinfo zset zsetops zsetrange")

func TestValuesNameNothingAbove(t *testing.T) {
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	fset := token.NewFileSet()
	above := make(map[string]string) // names, and the files that declare them
	var rooms []*ast.File
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(fset, name, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		inside := slices.Contains(values, strings.TrimSuffix(name, ".go"))
		if inside {
			rooms = append(rooms, f)
		}
		for _, d := range f.Decls {
			for declared, method := range declaredBy(d) {
				switch {
				case inside:
				case method == "key":
					t.Errorf("%s has a method of key, %s, outside of the files of values", name, declared)
				case method == "":
					above[declared] = name
				}
			}
		}
	}
	if len(rooms) != len(values) || len(above) < 100 {
		t.Fatalf("%d of %d files are there, and %d names", len(rooms), len(values), len(above))
	}
	for _, f := range rooms {
		for _, id := range f.Unresolved {
			if by := above[id.Name]; by != "" {
				t.Errorf("%s names %s, of %s", fset.Position(id.Pos()), id.Name, by)
			}
		}
	}
}

// declaredBy are the names that a declaration declares, each with the type that it is a method of.
func declaredBy(d ast.Decl) map[string]string {
	names := make(map[string]string)
	switch d := d.(type) {
	case *ast.FuncDecl:
		names[d.Name.Name] = ""
		if d.Recv != nil {
			of := d.Recv.List[0].Type
			if p, ok := of.(*ast.StarExpr); ok {
				of = p.X
			}
			names[d.Name.Name] = of.(*ast.Ident).Name
		}
	case *ast.GenDecl:
		for _, s := range d.Specs {
			switch s := s.(type) {
			case *ast.TypeSpec:
				names[s.Name.Name] = ""
			case *ast.ValueSpec:
				for _, n := range s.Names {
					names[n.Name] = ""
				}
			}
		}
	}
	return names
}

// Each function in the tables of what performs commands has a row that it performs.
func TestPerformersHaveRows(t *testing.T) {
	rows := make(map[string]*command)
	for _, c := range commandsByID {
		rows[c.name] = c
	}
	for name := range oneKey {
		if c := rows[name]; c == nil || c.key == nil {
			t.Errorf("%s, on one key, has no row", name)
		}
	}
	for name := range severalKeys {
		if c := rows[name]; c == nil || c.keys == nil {
			t.Errorf("%s, on several keys, has no row", name)
		}
	}
	for name := range waitingFor {
		if c := rows[name]; c == nil || c.block == nil {
			t.Errorf("%s, which waits, has no row", name)
		}
	}
}
