package lint

import (
	"bufio"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const (
	// longest is how many words a sentence may have.
	longest = 25
	// longSentences lists the files that have longer ones, and how many. It only shrinks.
	longSentences = "testdata/long-sentences"
)

var shrink = flag.Bool("shrink", false, "write down that files have fewer long sentences than "+longSentences+" lists")

// sentence is one of a file, from a line on.
type sentence struct {
	line, words int
	text        string
}

var (
	linkText = regexp.MustCompile(`!?\[([^\]]*)\]\([^)]*\)`)
	codeSpan = regexp.MustCompile("`[^`\n]*`")
)

// sentencesOf cuts blocks of text into sentences. A span of code is a word, and so is all that stands between blanks
// and has a letter or a digit.
func sentencesOf(text string, line int, md bool) (out []sentence) {
	for _, b := range blocks(text, line, md) {
		if md && len(contentsOf(b.text)) > 0 {
			continue
		}
		t := codeSpan.ReplaceAllStringFunc(b.text, func(c string) string {
			return "code" + strings.Repeat("\n", strings.Count(c, "\n"))
		})
		t = linkText.ReplaceAllString(t, "$1")
		start := 0
		for _, m := range append(sentenceEnd.FindAllStringIndex(t, -1), []int{len(t), len(t)}) {
			s := t[start:m[0]]
			n := 0
			for _, w := range strings.Fields(s) {
				if strings.ContainsFunc(w, func(r rune) bool {
					return r >= '0' && r <= '9' || r >= 'A' && r <= 'Z' || r >= 'a' && r <= 'z' || r > 127
				}) {
					n++
				}
			}
			if n > 0 {
				out = append(out, sentence{b.line + strings.Count(t[:start], "\n"), n,
					strings.Join(strings.Fields(s), " ")})
			}
			start = m[1]
		}
	}
	return out
}

// spoken are the sentences of a Go file's package comment and of the comments of what it exports.
func spoken(name, src string) (out []sentence, err error) {
	set := token.NewFileSet()
	f, err := parser.ParseFile(set, name, src, parser.ParseComments)
	if err != nil || ast.IsGenerated(f) {
		return nil, err
	}
	say := func(g *ast.CommentGroup) {
		if g == nil {
			return
		}
		lines := strings.Split(src, "\n")
		first, last := set.Position(g.Pos()).Line, set.Position(g.End()).Line
		var text []string
		for _, l := range lines[first-1 : last] {
			_, l, _ = strings.Cut(l, "//")
			text = append(text, strings.TrimPrefix(l, " "))
		}
		out = append(out, sentencesOf(strings.Join(text, "\n"), first, false)...)
	}
	say(f.Doc)
	for _, d := range f.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			if d.Name.IsExported() {
				say(d.Doc)
			}
		case *ast.GenDecl:
			exported := false
			for _, s := range d.Specs {
				switch s := s.(type) {
				case *ast.TypeSpec:
					if exported = exported || s.Name.IsExported(); s.Name.IsExported() {
						say(s.Doc)
						if t, ok := s.Type.(*ast.StructType); ok {
							for _, fd := range t.Fields.List {
								if len(fd.Names) > 0 && fd.Names[0].IsExported() {
									say(fd.Doc)
								}
							}
						}
					}
				case *ast.ValueSpec:
					if exported = exported || s.Names[0].IsExported(); s.Names[0].IsExported() {
						say(s.Doc)
					}
				}
			}
			if exported {
				say(d.Doc)
			}
		}
	}
	return out, nil
}

// speech reads the sentences of all documents but the changelog and dated notes, and of what packages say of
// themselves, by file.
func speech(t *testing.T) map[string][]sentence {
	t.Helper()
	all := map[string][]sentence{}
	err := filepath.WalkDir(root, func(file string, d fs.DirEntry, err error) error {
		name := strings.TrimPrefix(filepath.ToSlash(file), root+"/")
		md := strings.HasSuffix(name, ".md")
		switch {
		case err != nil:
			return err
		case d.IsDir() && file != root &&
			(strings.HasPrefix(d.Name(), ".") || slices.Contains([]string{"testdata", "dist", "node_modules"},
				d.Name()) || name == "docs/rfcs"):
			return fs.SkipDir
		case d.IsDir(), name == "CHANGELOG.md", !md &&
			(!strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go")):
			return nil
		}
		b, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		if md {
			all[name] = sentencesOf(string(b), 1, true)
			return nil
		}
		all[name], err = spoken(name, string(b))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// TestSentences: no file has more long sentences than it is allowed, which only shrinks.
func TestSentences(t *testing.T) {
	allowed := map[string]int{}
	f, err := os.Open(longSentences)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		n, name, ok := strings.Cut(s.Text(), " ")
		if allowed[name], err = strconv.Atoi(n); !ok || err != nil {
			t.Fatalf("%s: %q", longSentences, s.Text())
		}
	}
	all := speech(t)
	now := map[string]int{}
	for name, list := range all {
		long := slices.DeleteFunc(slices.Clone(list), func(s sentence) bool { return s.words <= longest })
		if now[name] = len(long); len(long) <= allowed[name] {
			continue
		}
		for _, s := range long {
			t.Errorf("%s:%d: %d words: %s", name, s.line, s.words, s.text)
		}
		t.Errorf("%s has %d sentences of more than %d words, of which %d are allowed", name, len(long), longest,
			allowed[name])
	}
	var list []string
	for name, n := range allowed {
		if now[name] < n && !*shrink {
			t.Errorf("%s has %d long sentences and may have %d: go test ./internal/lint -run Sentences -shrink", name,
				now[name], n)
		}
		if n = min(n, now[name]); n > 0 {
			list = append(list, fmt.Sprintf("%d %s", n, name))
		}
	}
	if *shrink {
		slices.SortFunc(list, func(a, b string) int {
			return strings.Compare(a[strings.Index(a, " "):], b[strings.Index(b, " "):])
		})
		if err := os.WriteFile(longSentences, []byte(strings.Join(list, "\n")+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// TestMedians prints how long the sentences of each document are, the longest ones first.
func TestMedians(t *testing.T) {
	all := speech(t)
	for _, name := range slices.Sorted(maps.Keys(all)) {
		if !strings.HasSuffix(name, ".md") || len(all[name]) == 0 {
			continue
		}
		var n []int
		long := 0
		for _, s := range all[name] {
			if n = append(n, s.words); s.words > longest {
				long++
			}
		}
		slices.Sort(n)
		t.Logf("%-40s %5d sentences, median %2d words, longest %3d, %3d above %d", name, len(n), n[len(n)/2],
			n[len(n)-1], long, longest)
	}
}

// Rules that refuse nothing would go unnoticed.
func TestSentencesAreCut(t *testing.T) {
	got := fmt.Sprint(sentencesOf("# no\n\nIt is `a b c` [so long](x.md). Two\nlines here!\n\n- item one\n  goes on. "+
		"And.\n\n```\nno code\n```\n| a cell. Two words | b |\n", 1, true))
	want := "[{3 5 It is code so long} {3 3 Two lines here!} {6 4 item one goes on} {7 1 And.} {12 2 - a cell} {12 2 " +
		"Two words} {12 1 - b}]"
	if got != want {
		t.Errorf("%s\nwant %s", got, want)
	}
	list, err := spoken("f.go", "// Package f is. It does.\npackage f\n\n// F is long.\nfunc F() {}\n\n// g is not "+
		"said.\nfunc g() {}\n\n// T is.\ntype T struct {\n\t// A is one.\n\tA int\n\t// b.\n\tb int\n}\n")
	if want := "[{1 3 Package f is} {1 2 It does.} {4 3 F is long.} {12 3 A is one.} {10 2 T is.}]"; err != nil ||
		fmt.Sprint(list) != want {
		t.Errorf("%v, %v", list, err)
	}
}
