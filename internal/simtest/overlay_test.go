package simtest

import (
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/format"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// mutant is a deliberate mistake: text of the tree that is replaced while tests are built, with
// the rule that it breaks. The tree itself has none.
type mutant struct {
	name, rule string
	edits      []edit
}

// edit replaces text inside one function of a file, or of a package (a folder), which has it exactly once.
type edit struct{ file, old, new string }

// mutantEnv names the mutant that a program built by build has switched on; unset: none.
const mutantEnv = "KVD_MUTANT"

// build makes the tests of a package with all the mutants in them, and returns their path.
func build(t *testing.T, root, pkg string, mutants []mutant) string {
	files, err := overlay(root, mutants)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	replace := make(map[string]string)
	for file, text := range files {
		with := filepath.Join(dir, strings.ReplaceAll(file, "/", "-"))
		if err := os.WriteFile(with, text, 0o644); err != nil {
			t.Fatal(err)
		}
		replace[filepath.Join(root, file)] = with
	}
	b, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		t.Fatal(err)
	}
	list, bin := filepath.Join(dir, "overlay.json"), filepath.Join(dir, "mutants.test")
	if err := os.WriteFile(list, b, 0o644); err != nil {
		t.Fatal(err)
	}
	c := exec.Command("go", "test", "-c", "-ldflags=-s -w", "-overlay", list, "-o", bin, "./"+pkg)
	c.Dir = root
	if out, err := c.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return bin
}

// overlay returns the files of the tree that the mutants change, by name. All mutants are in
// one program: an edited function has a copy for each mutant, and chooses among them.
func overlay(root string, mutants []mutant) (map[string][]byte, error) {
	edited := make(map[string]*source)
	names := make(map[string]bool)
	var errs error
	for _, m := range mutants {
		if m.name == "" || m.rule == "" || len(m.edits) == 0 || names[m.name] {
			return nil, fmt.Errorf("mutant %q: want a name of its own, a rule and edits", m.name)
		}
		names[m.name] = true
		for _, e := range m.edits {
			file, err := fileOf(root, e)
			if err != nil {
				errs = errors.Join(errs, fmt.Errorf("mutant %s: %w", m.name, err))
				continue
			}
			s := edited[file]
			if s == nil {
				if s, err = readSource(root, file); err != nil {
					return nil, err
				}
				edited[file] = s
			}
			if err := s.apply(m.name, e); err != nil {
				errs = errors.Join(errs, fmt.Errorf("mutant %s: %s: %w", m.name, file, err))
			}
		}
	}
	if errs != nil {
		return nil, errs
	}
	out := make(map[string][]byte)
	for file, s := range edited {
		b, err := format.Source(s.mutated())
		if err != nil {
			return nil, fmt.Errorf("%s with its mutants: %w", file, err)
		}
		out[file] = b
		out[path.Join(path.Dir(file), "mutant_on.go")] = fmt.Appendf(
			nil, "package %s\n\nimport \"os\"\n\nvar mutantOn = os.Getenv(%q)\n", s.ast.Name, mutantEnv)
	}
	return out, nil
}

var space = regexp.MustCompile(`\s+`)

// spaced matches text however long its lines are: a space may be the end of a line.
func spaced(text string) *regexp.Regexp {
	var b strings.Builder
	for at := 0; at < len(text); {
		next := space.FindStringIndex(text[at:])
		if next == nil {
			b.WriteString(regexp.QuoteMeta(text[at:]))
			break
		}
		b.WriteString(regexp.QuoteMeta(text[at : at+next[0]]))
		blank := text[at+next[0] : at+next[1]]
		if lines := strings.Count(blank, "\n"); at+next[0] == 0 || at+next[1] == len(text) {
			b.WriteString(blank)
		} else if lines > 0 {
			b.WriteString(strings.Repeat(`[ \t]*\n`, lines) + `[ \t]*`)
		} else {
			b.WriteString(`\s+`)
		}
		at += next[1]
	}
	return regexp.MustCompile(b.String())
}

// fileOf finds the file that an edit is about.
func fileOf(root string, e edit) (file string, err error) {
	if strings.HasSuffix(e.file, ".go") {
		return e.file, nil
	}
	list, err := filepath.Glob(filepath.Join(root, e.file, "*.go"))
	if err != nil {
		return "", err
	}
	for _, f := range list {
		b, err := os.ReadFile(f)
		switch {
		case err != nil:
			return "", err
		case strings.HasSuffix(f, "_test.go") || !spaced(e.old).Match(b):
		case file != "":
			return "", fmt.Errorf("in %s and in %s, want it once:\n%s", file, filepath.Base(f), e.old)
		default:
			file = path.Join(e.file, filepath.Base(f))
		}
	}
	if file == "" {
		return "", fmt.Errorf("%s: in no file, want it once:\n%s", e.file, e.old)
	}
	return file, nil
}

// source is a file with the copies of its functions that mutants edit.
type source struct {
	text   string
	base   int // position of the text's first byte
	ast    *ast.File
	copies map[*ast.FuncDecl]map[string]string // by mutant: from the function's name on
}

func readSource(root, file string) (*source, error) {
	b, err := os.ReadFile(filepath.Join(root, file))
	if err != nil {
		return nil, err
	}
	fset := token.NewFileSet()
	f, err := parser.ParseFile(fset, file, b, parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	return &source{string(b), fset.File(f.FileStart).Base(), f, make(map[*ast.FuncDecl]map[string]string)}, nil
}

func (s *source) between(from, to token.Pos) string { return s.text[int(from)-s.base : int(to)-s.base] }

func (s *source) apply(name string, e edit) error {
	old := spaced(e.old)
	found := old.FindAllStringIndex(s.text, -1)
	if len(found) != 1 {
		return fmt.Errorf("%d times, want once:\n%s", len(found), e.old)
	}
	from, to := token.Pos(s.base+found[0][0]), token.Pos(s.base+found[0][1])
	for _, d := range s.ast.Decls {
		f, ok := d.(*ast.FuncDecl)
		if !ok || from < f.Name.End() || to > f.End() {
			continue
		}
		if s.copies[f] == nil {
			s.copies[f] = make(map[string]string)
		}
		text := s.copies[f][name]
		if text == "" {
			text = s.between(f.Name.End(), f.End())
		}
		found := old.FindAllStringIndex(text, -1)
		if len(found) != 1 {
			return fmt.Errorf("%d times after the edits before, want once:\n%s", len(found), e.old)
		}
		s.copies[f][name] = text[:found[0][0]] + e.new + text[found[0][1]:]
		return nil
	}
	return fmt.Errorf("not inside one function:\n%s", e.old)
}

// mutated is the file in which every edited function calls one of its copies.
func (s *source) mutated() []byte {
	var b strings.Builder
	from := s.ast.FileStart
	for _, d := range s.ast.Decls {
		f, ok := d.(*ast.FuncDecl)
		if !ok || s.copies[f] == nil {
			continue
		}
		b.WriteString(s.between(from, f.Pos()))
		from = f.End()
		s.writeCopies(&b, f)
	}
	b.WriteString(s.between(from, s.ast.FileEnd))
	return []byte(b.String())
}

// writeCopies writes a function that calls the copy of the mutant that is on, and the copies.
func (s *source) writeCopies(b *strings.Builder, f *ast.FuncDecl) {
	var args []string
	list := func(fields *ast.FieldList, prefix string) string {
		var params []string
		for _, p := range fields.List {
			for range max(1, len(p.Names)) {
				name := fmt.Sprintf("%s%d", prefix, len(params))
				params = append(params, name+" "+s.between(p.Type.Pos(), p.Type.End()))
				if _, ok := p.Type.(*ast.Ellipsis); ok {
					name += "..."
				}
				args = append(args, name)
			}
		}
		return "(" + strings.Join(params, ", ") + ")"
	}
	head, self := "func ", ""
	if f.Recv != nil {
		head += list(f.Recv, "recv")
		self, args = args[0]+".", nil
	}
	results, types := "", ""
	if r := f.Type.Results; r != nil {
		results = s.between(r.Pos(), r.End())
	}
	if p := f.Type.TypeParams; p != nil {
		types = s.between(p.Pos(), p.End())
	}
	fmt.Fprintf(b, "%s %s%s%s %s {\n", head, f.Name, types, list(f.Type.Params, "arg"), results)
	call := func(name string) {
		do := fmt.Sprintf("%s%s(%s)", self, name, strings.Join(args, ", "))
		if results != "" {
			do = "return " + do
		}
		fmt.Fprintln(b, do)
	}
	copies := map[string]string{"": s.between(f.Name.End(), f.End())} // as it is
	for name, text := range s.copies[f] {
		copies[name] = text
	}
	copyName := func(name string) string { return f.Name.Name + "_as_" + strings.ReplaceAll(name, "-", "_") }
	fmt.Fprintln(b, "switch mutantOn {")
	for _, name := range sorted(copies)[1:] {
		fmt.Fprintf(b, "case %q:\n", name)
		call(copyName(name))
	}
	fmt.Fprintln(b, "default:")
	call(copyName(""))
	fmt.Fprintln(b, "}\n}")
	recv := ""
	if f.Recv != nil {
		recv = s.between(f.Recv.Pos(), f.Recv.End())
	}
	for _, name := range sorted(copies) {
		fmt.Fprintf(b, "\nfunc %s %s%s\n", recv, copyName(name), copies[name])
	}
}

func sorted[V any](m map[string]V) (names []string) {
	for name := range m {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}
