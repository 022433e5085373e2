package lint

import (
	"errors"
	"fmt"
	"go/ast"
	"go/doc/comment"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unicode"
)

// scope is what the files of a folder declare, those of its tests included: X, T.Method and T.field.
type scope struct {
	names map[string]bool
	// embeds are the types that a type embeds: T of the same folder, or an import path, a dot and T.
	embeds map[string][]string
	files  []source
}

// source is a parsed file.
type source struct {
	name    string // from the root of the project
	file    *ast.File
	imports map[string]string // paths by local names
}

var versionElem = regexp.MustCompile(`^v\d+$`)

// localName is what a package of a path is called, as far as that can be told from the path.
func localName(at string) string {
	name := path.Base(at)
	if versionElem.MatchString(name) {
		name = path.Base(path.Dir(at))
	}
	name, _, _ = strings.Cut(name, ".")
	return strings.TrimPrefix(name, "go-")
}

func newScope() *scope { return &scope{names: map[string]bool{}, embeds: map[string][]string{}} }

// typeName is the T of T, *T, T[P] and pkg.T; that of another package begins with its path.
func typeName(x ast.Expr, imports map[string]string) string {
	switch x := x.(type) {
	case *ast.Ident:
		return x.Name
	case *ast.StarExpr:
		return typeName(x.X, imports)
	case *ast.ParenExpr:
		return typeName(x.X, imports)
	case *ast.IndexExpr:
		return typeName(x.X, imports)
	case *ast.IndexListExpr:
		return typeName(x.X, imports)
	case *ast.SelectorExpr:
		if p, ok := x.X.(*ast.Ident); ok {
			return imports[p.Name] + "." + x.Sel.Name
		}
	}
	return ""
}

// add notes what a file declares.
func (s *scope) add(name string, f *ast.File) {
	imports := make(map[string]string)
	for _, i := range f.Imports {
		at, _ := strconv.Unquote(i.Path.Value)
		local := localName(at)
		if i.Name != nil {
			local = i.Name.Name
		}
		imports[local] = at
	}
	s.files = append(s.files, source{name, f, imports})
	for _, d := range f.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			name := d.Name.Name
			if d.Recv != nil && len(d.Recv.List) == 1 {
				name = typeName(d.Recv.List[0].Type, imports) + "." + name
			}
			s.names[name] = true
		case *ast.GenDecl:
			for _, sp := range d.Specs {
				switch sp := sp.(type) {
				case *ast.ValueSpec:
					for _, n := range sp.Names {
						s.names[n.Name] = true
					}
				case *ast.TypeSpec:
					s.names[sp.Name.Name] = true
					s.addType(sp.Name.Name, sp.Type, imports)
				}
			}
		}
	}
}

// addType notes the fields and methods of a type, and those of structs in it by the type's name.
func (s *scope) addType(name string, x ast.Expr, imports map[string]string) {
	var list *ast.FieldList
	switch x := x.(type) {
	case *ast.StructType:
		list = x.Fields
	case *ast.InterfaceType:
		list = x.Methods
	default:
		if t := typeName(x, imports); t != "" {
			s.embeds[name] = append(s.embeds[name], t)
		}
		return
	}
	for _, f := range list.List {
		for _, n := range f.Names {
			s.names[name+"."+n.Name] = true
		}
		if t := typeName(f.Type, imports); len(f.Names) == 0 && t != "" {
			s.names[name+"."+t[strings.LastIndex(t, ".")+1:]] = true
			s.embeds[name] = append(s.embeds[name], t)
		}
		if t, ok := f.Type.(*ast.StructType); ok {
			s.addType(name, t, imports)
		}
	}
}

// symbols are the scopes of packages, by import path. Those outside the project are read when they are asked for.
type symbols struct {
	goroot     string
	ours, rest map[string]*scope
}

// foreign tells whether a path is that of another module, which may not be on this machine.
func foreign(importPath string) bool {
	first, _, _ := strings.Cut(importPath, "/")
	return strings.Contains(first, ".") && !below(module, importPath)
}

// at is the scope of a package; nil: there is none.
func (all *symbols) at(importPath string) *scope {
	if s := all.ours[importPath]; s != nil {
		return s
	}
	s, ok := all.rest[importPath]
	if ok || strings.HasPrefix(importPath, module) || importPath == "" {
		return s
	}
	dir := filepath.Join(all.goroot, "src", filepath.FromSlash(importPath))
	if foreign(importPath) {
		out, _ := exec.Command("go", "list", "-find", "-f", "{{.Dir}}", importPath).Output()
		dir = strings.TrimSpace(string(out))
	}
	if names, _ := filepath.Glob(filepath.Join(dir, "*.go")); dir != "" && len(names) > 0 {
		s = newScope()
		for _, name := range names {
			if f, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.SkipObjectResolution); err == nil {
				s.add(name, f)
			}
		}
	}
	all.rest[importPath] = s
	return s
}

// has tells whether a package declares a name, perhaps by embedding.
func (all *symbols) has(importPath, name string) bool {
	return all.hasWithin(deepest, importPath, name)
}

// deepest is how many types may embed each other for a name: they may do so in a circle.
const deepest = 8

// hasWithin is has, where a name is looked for in a type of depth types that embed each other.
func (all *symbols) hasWithin(depth int, importPath, name string) bool {
	s := all.at(importPath)
	if s == nil || s.names[name] {
		return s != nil || foreign(importPath)
	}
	recv, rest, method := strings.Cut(name, ".")
	return method && depth > 0 && slices.ContainsFunc(s.embeds[recv], func(t string) bool {
		at, in := importPath, t
		if i := strings.LastIndex(t, "."); i >= 0 {
			at, in = t[:i], t[i+1:]
		}
		return all.hasWithin(depth-1, at, in+"."+rest)
	})
}

// named are the packages that a file may mean by a name: those that it imports, else those of the standard library and
// of the project.
func (all *symbols) named(f source, name string) (paths []string) {
	if at := f.imports[name]; at != "" {
		return []string{at}
	}
	if strings.Contains(name, "/") {
		return []string{name}
	}
	if at, ok := comment.DefaultLookupPackage(name); ok {
		paths = append(paths, at)
	} else if all.at(name) != nil {
		paths = append(paths, name)
	}
	for at := range all.ours {
		if path.Base(at) == name {
			paths = append(paths, at)
		}
	}
	return paths
}

// comments are the package comment of a file and the doc comments of all that it declares.
func (f source) comments() (out []*ast.CommentGroup) {
	ast.Inspect(f.file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.File:
			out = append(out, n.Doc)
		case *ast.FuncDecl:
			out = append(out, n.Doc)
		case *ast.GenDecl:
			out = append(out, n.Doc)
		case *ast.TypeSpec:
			out = append(out, n.Doc, n.Comment)
		case *ast.ValueSpec:
			out = append(out, n.Doc, n.Comment)
		case *ast.Field:
			out = append(out, n.Doc, n.Comment)
		}
		return true
	})
	return slices.DeleteFunc(out, func(g *ast.CommentGroup) bool { return g == nil })
}

// links are the links of a comment, without brackets, by the rules of go doc.
func links(text string) (out []string) {
	p := comment.Parser{
		LookupPackage: func(name string) (string, bool) { return name, token.IsIdentifier(name) },
		LookupSym:     func(string, string) bool { return true },
	}
	var texts func([]comment.Text)
	texts = func(list []comment.Text) {
		for _, t := range list {
			switch t := t.(type) {
			case *comment.DocLink:
				name := t.Name
				if t.Recv != "" {
					name = t.Recv + "." + name
				}
				if t.ImportPath != "" && name != "" {
					name = "." + name
				}
				out = append(out, t.ImportPath+name)
			case *comment.Link:
				texts(t.Text)
			}
		}
	}
	var blocks func([]comment.Block)
	blocks = func(list []comment.Block) {
		for _, b := range list {
			switch b := b.(type) {
			case *comment.Paragraph:
				texts(b.Text)
			case *comment.Heading:
				texts(b.Text)
			case *comment.List:
				for _, item := range b.Items {
					blocks(item.Content)
				}
			}
		}
	}
	blocks(p.Parse(text).Content)
	return out
}

// resolves tells whether a link of a file of a package leads somewhere. A lower case name alone is a package.
func (all *symbols) resolves(importPath string, f source, link string) bool {
	if all.has(importPath, link) {
		return true
	}
	// The package is what has slashes, and what comes before the first dot behind them.
	dir, rest := path.Split(link)
	pkg, name, dotted := strings.Cut(rest, ".")
	pkg = dir + pkg
	return slices.ContainsFunc(all.named(f, pkg), func(at string) bool {
		return !dotted && all.at(at) != nil || dotted && all.has(at, name)
	})
}

// firstWord is the word with which a comment begins, whether a colon stands behind it, and the next word.
var firstWord = regexp.MustCompile(`^([\pL_][\pL\pN_]*(?:\.[\pL_][\pL\pN_]*)*)(:?)\s+(\pL*)`)

// hasForm tells whether a word cannot be one of English: it has a capital, a digit or a line inside, or a dot.
func hasForm(word string) bool {
	rest := strings.TrimLeftFunc(word, unicode.IsUpper)
	if rest == word && rest != "" {
		rest = rest[1:]
	}
	return rest != "" && rest != "s" && strings.ContainsFunc(rest, func(r rune) bool {
		return unicode.IsUpper(r) || unicode.IsDigit(r) || r == '_' || r == '.'
	})
}

// kind is what a comment stands at.
type kind int

const (
	whole  kind = iota // a declaration: a function, a type, a group
	part               // a constant or a variable of a group
	member             // a field of a struct, a method of an interface
	test               // a test, which may begin with what it tests
)

// misnamed are doc comments that begin with a name which is not that of what they describe. Comments of members may
// begin with any name of the package.
func (f source) misnamed(declared func(name string) bool) (out []string, at []token.Pos) {
	wrong := func(g *ast.CommentGroup, name string, names []string) {
		out, at = append(out, fmt.Sprintf("%s describes %s", name, names[0])), append(at, g.Pos())
	}
	check := func(k kind, g *ast.CommentGroup, names ...string) {
		if g == nil {
			return
		}
		m := firstWord.FindStringSubmatch(g.Text())
		if m == nil || slices.Contains(names, m[1]) || slices.Contains(names, "_") {
			return
		}
		lower, colon := unicode.IsLower([]rune(m[1])[0]), m[2] != ""
		var name bool
		switch k {
		case whole:
			name = lower || colon || hasForm(m[1]) || declared(m[1]) && strings.HasSuffix(m[3], "s")
		case part:
			name = colon || hasForm(m[1])
		case member:
			name = (colon || hasForm(m[1])) && !declared(m[1])
		case test:
			name = testName.MatchString(m[1])
		}
		if name {
			wrong(g, m[1], names)
		}
	}
	// prefixes are the names in front of colons with which lines of a group's comment begin.
	prefixes := func(g *ast.CommentGroup, names []string) {
		for l := range strings.Lines(g.Text()) {
			name, _, ok := strings.Cut(l, ": ")
			if ok && token.IsIdentifier(name) && hasForm(name) && !slices.Contains(names, name) && !declared(name) {
				wrong(g, name, names)
			}
		}
	}
	var fields func(x ast.Expr) (all []string)
	fields = func(x ast.Expr) (all []string) {
		var list *ast.FieldList
		switch x := x.(type) {
		case *ast.StructType:
			list = x.Fields
		case *ast.InterfaceType:
			list = x.Methods
		default:
			return nil
		}
		for _, fd := range list.List {
			for _, n := range fd.Names {
				all = append(all, n.Name)
			}
			if t := typeName(fd.Type, nil); len(fd.Names) == 0 && t != "" {
				all = append(all, t[strings.LastIndex(t, ".")+1:])
			}
			all = append(all, fields(fd.Type)...)
		}
		for _, fd := range list.List {
			check(member, fd.Doc, all...)
		}
		return all
	}
	for _, d := range f.file.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			names, k := []string{d.Name.Name}, whole
			if d.Recv != nil {
				names = append(names, typeName(d.Recv.List[0].Type, f.imports)+"."+d.Name.Name)
			} else if strings.HasSuffix(f.name, "_test.go") && testName.MatchString(d.Name.Name) {
				k = test
			}
			check(k, d.Doc, names...)
		case *ast.GenDecl:
			var names []string
			for _, sp := range d.Specs {
				switch sp := sp.(type) {
				case *ast.TypeSpec:
					names = append(names, sp.Name.Name)
				case *ast.ValueSpec:
					for _, n := range sp.Names {
						names = append(names, n.Name)
					}
				}
			}
			if len(names) == 0 {
				continue
			}
			check(whole, d.Doc, names...)
			prefixes(d.Doc, names)
			for _, sp := range d.Specs {
				switch sp := sp.(type) {
				case *ast.TypeSpec:
					check(whole, sp.Doc, names...)
					fields(sp.Type)
				case *ast.ValueSpec:
					check(part, sp.Doc, names...)
				}
			}
		}
	}
	return out, at
}

var testName = regexp.MustCompile(`^(Test|Fuzz|Benchmark|Example)(\P{Ll}|$)`)

var (
	document = `([\w./-]*\w\.md)`
	quotes   = `("[^"]+"(?:(?:,| and|, and| or) "[^"]+")*)`
	// afterDocument and beforeDocument are how comments name headings of a document.
	afterDocument  = regexp.MustCompile(document + `(?:,? |,? under |: | \()` + quotes)
	beforeDocument = regexp.MustCompile(quotes + `,? (?:in|of) (?:the )?` + document)
	mentions       = regexp.MustCompile(`(?:^|[\s("])` + document)
	quoted         = regexp.MustCompile(`"([^"]+)"`)
	boldTitle      = regexp.MustCompile(`^\*\*([^*]+)\.\*\*`)
)

// headings are those of a document, and the titles in bold with which paragraphs begin.
func headings(md string) map[string]bool {
	out := make(map[string]bool)
	for _, l := range prose(md) {
		if title := strings.TrimLeft(l.text, "#"); len(title) < len(l.text) && strings.HasPrefix(title, " ") {
			out[strings.ReplaceAll(strings.TrimSpace(title), "`", "")] = true
		} else if m := boldTitle.FindStringSubmatch(l.text); m != nil {
			out[m[1]] = true
		}
	}
	return out
}

// lostHeadings are documents and headings of documents that a comment names and that do not exist. read gives a
// document by the name that the comment has for it.
func lostHeadings(text string, read func(name string) (string, error)) (out []string) {
	text = strings.Join(strings.Fields(text), " ")
	check := func(name, list string) {
		md, err := read(name)
		if err != nil {
			return // said below
		}
		there := headings(md)
		for _, m := range quoted.FindAllStringSubmatch(list, -1) {
			if h := strings.TrimRight(m[1], ".,"); !there[h] {
				out = append(out, fmt.Sprintf("%s has no heading %q", name, h))
			}
		}
	}
	for _, m := range afterDocument.FindAllStringSubmatch(text, -1) {
		check(m[1], m[2])
	}
	for _, m := range beforeDocument.FindAllStringSubmatch(text, -1) {
		check(m[2], m[1])
	}
	for _, m := range mentions.FindAllStringSubmatch(text, -1) {
		if _, err := read(m[1]); err != nil {
			out = append(out, fmt.Sprintf("there is no %s", m[1]))
		}
	}
	return out
}

// parseAll reads all Go of the project.
func parseAll(t *testing.T) (*symbols, *token.FileSet) {
	t.Helper()
	goroot, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		t.Fatal(err)
	}
	all := &symbols{strings.TrimSpace(string(goroot)), map[string]*scope{}, map[string]*scope{}}
	set := token.NewFileSet()
	err = filepath.WalkDir(root, func(file string, d fs.DirEntry, err error) error {
		name := strings.TrimPrefix(filepath.ToSlash(file), root+"/")
		switch {
		case err != nil:
			return err
		case d.IsDir() && file != root && (strings.HasPrefix(d.Name(), ".") ||
			slices.Contains([]string{"testdata", "dist", "node_modules"}, d.Name())):
			return fs.SkipDir
		case d.IsDir() || !strings.HasSuffix(name, ".go"):
			return nil
		}
		f, err := parser.ParseFile(set, file, nil, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		at := path.Join(module, path.Dir(name))
		if all.ours[at] == nil {
			all.ours[at] = newScope()
		}
		all.ours[at].add(name, f)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return all, set
}

// readNear reads a document that a file of a folder names: from the root of the project, or from the folder.
func readNear(dir, name string) (string, error) {
	for _, at := range []string{name, path.Join(dir, name)} {
		if b, err := os.ReadFile(filepath.Join(root, filepath.FromSlash(at))); err == nil {
			return string(b), nil
		} else if !errors.Is(err, fs.ErrNotExist) {
			return "", err
		}
	}
	return "", fs.ErrNotExist
}

// TestRefs: links of comments lead to what is declared, a comment that begins with a name has that of what it
// describes, and headings of documents that are named exist.
func TestRefs(t *testing.T) {
	all, set := parseAll(t)
	checked := 0
	for importPath, s := range all.ours {
		for _, f := range s.files {
			if ast.IsGenerated(f.file) {
				continue
			}
			wrong := func(pos token.Pos, what string) {
				t.Errorf("%s:%d: %s", f.name, set.Position(pos).Line, what)
			}
			for _, g := range f.comments() {
				for _, l := range links(g.Text()) {
					if checked++; !all.resolves(importPath, f, l) {
						wrong(g.Pos(), fmt.Sprintf("[%s] is nowhere", l))
					}
				}
			}
			names, at := f.misnamed(func(name string) bool { return all.resolves(importPath, f, name) })
			for i, n := range names {
				wrong(at[i], n)
			}
			for _, g := range f.file.Comments {
				for _, l := range lostHeadings(g.Text(), func(name string) (string, error) {
					return readNear(path.Dir(f.name), name)
				}) {
					wrong(g.Pos(), l)
				}
			}
		}
	}
	if checked < 200 {
		t.Errorf("%d links were followed", checked)
	}
}

// Rules that refuse nothing would go unnoticed.
func TestRefsRefuse(t *testing.T) {
	goroot, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		t.Fatal(err)
	}
	all := &symbols{strings.TrimSpace(string(goroot)), map[string]*scope{}, map[string]*scope{}}
	add := func(at, src string) source {
		f, err := parser.ParseFile(token.NewFileSet(), "f.go", "package p\n\n"+src, parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		all.ours[at] = newScope()
		all.ours[at].add("f.go", f)
		return all.ours[at].files[0]
	}
	add(module+"/far", "type Far struct{ *Base }\n\ntype Base struct{}\n\nfunc (*Base) Go() {}\n\nfunc Reach() {}\n")
	const at = module + "/near"
	f := add(at, `import (
	"testing"

	other "`+module+`/far"
	"nowhere.example/mod"
)

type Near struct {
	other.Far
	Field int
}

func (Near) Do() {}

type lane[T any] struct{ *ring }

type ring struct{ *lane[int] }

func (*lane[T]) Do() {}
`)
	for link, want := range map[string]bool{
		"Near": true, "Near.Do": true, "Near.Field": true, "Near.Go": true, "lane": true, "lane.Do": true,
		"other.Far": true, "other.Far.Go": true, "far.Reach": true, "other": true, "testing.T.FailNow": true,
		"encoding/json.Decoder": true, "json.Decoder": false, "mod.Unknown": true,
		"Gone": false, "Near.Gone": false, "lane.Gone": false, "other.Near": false, "far.Gone": false, "gone": false,
		"gone.Near": false, "testing.T.Gone": false, "encoding/json.Gone": false,
	} {
		if got := links("It is as [" + link + "] is.\n"); !slices.Equal(got, []string{link}) {
			t.Errorf("[%s] is read as %q", link, got)
		}
		if got := all.resolves(at, f, link); got != want {
			t.Errorf("[%s] resolves: %v", link, got)
		}
	}
	if got := links("An x[i], [a-z], [two words].\n\n\tcode [Gone]\n\nSo:\n  - a [Near]\n"); !slices.Equal(
		got, []string{"Near"}) {
		t.Errorf("links %q", got)
	}

	for src, want := range map[string]string{
		"// F is.\nfunc F() {}":                          "",
		"// A function is.\nfunc F() {}":                 "",
		"// Many think so.\nfunc F() {}":                 "",
		"// T.F is.\nfunc (T) F() {}":                    "",
		"// f is.\nfunc F() {}":                          "f describes F",
		"// G: it is.\nfunc F() {}":                      "G describes F",
		"// Near is.\nfunc F() {}":                       "Near describes F",
		"// NewF makes.\nfunc F() {}":                    "NewF describes F",
		"// TestG tests.\nfunc TestF() {}":               "TestG describes TestF",
		"// f lasts: it is.\nfunc TestF() {}":            "",
		"// b and others.\nconst (\n\ta = 1\n\tb = 2\n)": "",
		"const (\n\t// c: it.\n\ta = 1\n)":               "c describes a",
		"// They are.\n// aB: it.\nvar (\n\ta = 1\n)":    "aB describes a",
		"const (\n\t// from then on.\n\ta = 1\n)":        "",
		"type T struct {\n\t// b: it.\n\ta, b int\n}":    "",
		"type T struct {\n\t// Near: it.\n\ta int\n}":    "",
		"type T struct {\n\t// c: it.\n\ta int\n}":       "c describes a",
		"// X is.\ntype T struct{}":                      "",
		"// xT is.\ntype T struct{}":                     "xT describes T",
	} {
		file, err := parser.ParseFile(token.NewFileSet(), "", "package p\n\n"+src, parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		got, _ := source{"f_test.go", file, nil}.misnamed(func(name string) bool { return name == "Near" })
		if strings.Join(got, "; ") != want {
			t.Errorf("%q: %q, want %q", src, got, want)
		}
	}

	read := func(name string) (string, error) {
		if name == "docs/a.md" {
			return "# A page\n## The `rules`\n**In bold.** It is.\n", nil
		}
		return "", fs.ErrNotExist
	}
	for text, want := range map[string]string{
		`See docs/a.md, "The rules". "More" is said.`:      "",
		`("A page" in docs/a.md)`:                          "",
		"See docs/a.md (\"In\nbold\").":                    "",
		`"Whatever" is said; docs/a.md says more.`:         "",
		`See docs/a.md ("A page", "None").`:                `docs/a.md has no heading "None"`,
		`"None" in docs/a.md says so.`:                     `docs/a.md has no heading "None"`,
		`docs/a.md, "Rules".`:                              `docs/a.md has no heading "Rules"`,
		`docs/b.md says so.`:                               "there is no docs/b.md",
		`It is in b.md, "None" (see docs/a.md, "A page").`: "there is no b.md",
	} {
		if got := strings.Join(lostHeadings(text, read), "; "); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}
