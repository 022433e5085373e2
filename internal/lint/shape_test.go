package lint

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// Bounds of Go that is neither a test nor generated. A function's lines are those between its braces, as funlen counts
// them; a function on a single line has none. Literals count as a part of the function that holds them.
const (
	mostFileLines   = 900
	mostFuncLines   = 100
	mostMedianLines = 9
	mostFields      = 30 // of a struct of the gateway, where a part that is embedded counts as one
)

// sizedFunc is a function with a body.
type sizedFunc struct {
	where string // as in index/op.go:12
	name  string // as in (*Op).Next
	lines int
}

// sizedFile is what is counted of a file.
type sizedFile struct {
	name  string // from the root of the project
	lines int
	funcs []sizedFunc
	wide  []sizedStruct
}

// sizedStruct is a struct with a name that has more than mostFields.
type sizedStruct struct {
	where, name string
	fields      int
}

// sizeFile counts a file, whose content is src. ok is false if the file is generated.
func sizeFile(name, src string) (out sizedFile, ok bool, err error) {
	set := token.NewFileSet()
	f, err := parser.ParseFile(set, name, src, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil || ast.IsGenerated(f) {
		return sizedFile{}, false, err
	}
	out = sizedFile{name: name, lines: strings.Count(src, "\n")}
	for _, d := range f.Decls {
		if d, ok := d.(*ast.GenDecl); ok {
			for _, spec := range d.Specs {
				if t, ok := spec.(*ast.TypeSpec); ok && countFields(t.Type) > mostFields {
					out.wide = append(out.wide, sizedStruct{fmt.Sprintf("%s:%d", name, set.Position(t.Pos()).Line),
						t.Name.Name, countFields(t.Type)})
				}
			}
		}
		if d, ok := d.(*ast.FuncDecl); ok && d.Body != nil {
			at := set.Position(d.Pos())
			lines := set.Position(d.Body.Rbrace).Line - set.Position(d.Body.Lbrace).Line - 1
			out.funcs = append(out.funcs, sizedFunc{fmt.Sprintf("%s:%d", name, at.Line), funcName(d), max(lines, 0)})
		}
	}
	return out, true, nil
}

// countFields is how many fields a struct has; 0: t is none.
func countFields(t ast.Expr) (n int) {
	if st, ok := t.(*ast.StructType); ok {
		for _, f := range st.Fields.List {
			n += max(1, len(f.Names))
		}
	}
	return n
}

// funcName is a function's name as readers search it: with the type of its receiver.
func funcName(d *ast.FuncDecl) string {
	if d.Recv == nil {
		return d.Name.Name
	}
	star, of := "", d.Recv.List[0].Type
	if p, ok := of.(*ast.StarExpr); ok {
		star, of = "*", p.X
	}
	switch g := of.(type) { // of type parameters, only the name before them
	case *ast.IndexExpr:
		of = g.X
	case *ast.IndexListExpr:
		of = g.X
	}
	return fmt.Sprintf("(%s%s).%s", star, of, d.Name.Name)
}

// medianLines gives the lines of the function in the middle, of an even number the lower one's.
func medianLines(files []sizedFile) int {
	var all []int
	for _, f := range files {
		for _, fn := range f.funcs {
			all = append(all, fn.lines)
		}
	}
	if len(all) == 0 {
		return 0
	}
	slices.Sort(all)
	return all[(len(all)-1)/2]
}

// judgeShape gives what is beyond the bounds.
func judgeShape(files []sizedFile) (out []string) {
	for _, f := range files {
		if f.lines > mostFileLines {
			out = append(out, fmt.Sprintf("%s has %d lines, want at most %d: move one of its subjects to a file of "+
				"its own", f.name, f.lines, mostFileLines))
		}
		for _, st := range f.wide {
			if strings.HasPrefix(f.name, "internal/redis/") || strings.HasPrefix(f.name, "internal/gateway/") {
				out = append(out, fmt.Sprintf("%s: %s has %d fields, want at most %d: give a part of it a name",
					st.where, st.name, st.fields, mostFields))
			}
		}
		for _, fn := range f.funcs {
			if fn.lines > mostFuncLines {
				out = append(out, fmt.Sprintf("%s: %s has %d lines, want at most %d: give a part of it a name",
					fn.where, fn.name, fn.lines, mostFuncLines))
			}
		}
	}
	if m := medianLines(files); m > mostMedianLines {
		out = append(out, fmt.Sprintf("half of the functions have %d lines or more, want a median of at most %d", m,
			mostMedianLines))
	}
	return out
}

// TestShape holds the bounds for the whole tree.
func TestShape(t *testing.T) {
	var files []sizedFile
	err := filepath.WalkDir(root, func(file string, d fs.DirEntry, err error) error {
		name := strings.TrimPrefix(filepath.ToSlash(file), root+"/")
		switch {
		case err != nil:
			return err
		case d.IsDir() && file != root && (strings.HasPrefix(d.Name(), ".") || d.Name() == "testdata" ||
			d.Name() == "dist"):
			return fs.SkipDir
		case d.IsDir() || !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go"):
			return nil
		}
		src, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		if f, ok, err := sizeFile(name, string(src)); err != nil {
			return err
		} else if ok {
			files = append(files, f)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, bad := range judgeShape(files) {
		t.Error(bad)
	}
	long, funcs := sizedFile{}, 0
	longest := sizedFunc{}
	for _, f := range files {
		funcs += len(f.funcs)
		if f.lines > long.lines {
			long = f
		}
		for _, fn := range f.funcs {
			if fn.lines > longest.lines {
				longest = fn
			}
		}
	}
	if len(files) < 300 || funcs < 5000 {
		t.Errorf("%d files with %d functions were read", len(files), funcs)
	}
	t.Logf("%d files, the longest %s with %d lines; %d functions, the longest %s (%s) with %d lines, the median %d",
		len(files), long.name, long.lines, funcs, longest.name, longest.where, longest.lines, medianLines(files))
}

// Bounds that refuse nothing would go unnoticed.
func TestShapeRefuses(t *testing.T) {
	body := func(lines int) string { return "{\n" + strings.Repeat("\tg()\n", lines) + "}\n" }
	for _, tc := range []struct {
		file, src string
		want      []string
	}{
		{"a/f.go", "package p\n" + strings.Repeat("\n", 899), nil},
		{"a/f.go", "package p\n" + strings.Repeat("\n", 900), []string{"a/f.go has 901 lines, want at most 900"}},
		{"a/f.go", "package p\n\nfunc g() {}\n\nfunc f() " + body(100), nil},
		{"a/f.go", "package p\n\nfunc g() {}\n\nfunc f(\n\ta int,\n) " + body(101),
			[]string{"a/f.go:5: f has 101 lines, want at most 100"}},
		{"a/f.go", "package p\n\nfunc (x *m[a, b]) g() {}\n\n// f is.\nfunc (x m[a]) f() " + body(101),
			[]string{"a/f.go:6: (m).f has 101 lines"}},
		{"a/f.go", "package p\n\nfunc (x *m) f() " + body(101),
			[]string{"a/f.go:3: (*m).f has 101", "half of the functions have 101 lines or more"}},
		{"a/f.go", "package p\n\nfunc f() " + body(10) + "\nfunc g() " + body(11),
			[]string{"half of the functions have 10 lines or more, want a median of at most 9"}},
		{"a/f.go", "package p\n\nfunc f() " + body(9) + "\nfunc g() " + body(90), nil},
		{"internal/gateway/f.go", "package p\n\ntype t struct {\n\te\n" + strings.Repeat("\ta int\n", 29) + "}\n", nil},
		{"internal/gateway/f.go", "package p\n\ntype t struct {\n\te\n" + strings.Repeat("\ta, b int\n", 15) + "}\n",
			[]string{"internal/gateway/f.go:3: t has 31 fields, want at most 30"}},
		{"index/f.go", "package p\n\ntype t struct {\n" + strings.Repeat("\ta int\n", 31) + "}\n", nil},
		{"index/f.go", "// Code generated by x. DO NOT EDIT.\n\npackage p\n" + strings.Repeat("var _ = 0\n", 1000),
			nil},
	} {
		var files []sizedFile
		f, ok, err := sizeFile(tc.file, tc.src)
		if err != nil {
			t.Fatal(err)
		} else if ok {
			files = append(files, f)
		}
		got := judgeShape(files)
		good := len(got) == len(tc.want)
		for i := range min(len(got), len(tc.want)) {
			good = good && strings.HasPrefix(got[i], tc.want[i])
		}
		if !good {
			t.Errorf("%s, %.60q: %q, want %q", tc.file, tc.src, got, tc.want)
		}
	}
}
