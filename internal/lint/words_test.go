package lint

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unicode"
)

const (
	root     = "../.."
	glossary = "docs/protocol.md"
)

// ban is a word of the glossary's last column: it is not used for what the row means.
type ban struct {
	word string   // lower case; its parts are separated by spaces
	in   []string // packages; none: everywhere
	use  string   // the row's word
}

func (b ban) holds(dir string) bool { return len(b.in) == 0 || slices.Contains(b.in, dir) }

// bareVerbs are no names of functions: a call must say its object, as releaseLock does.
var bareVerbs = []string{"settle", "leave", "enter", "judge", "look", "note", "quick"}

// bans reads the table under "## Words": a row is word, meaning, and what is not written for it, as in
// "`arbiter`, `publisher`; `cluster` in `index`, `internal/layout`".
func bans(md string) (out []ban, err error) {
	_, md, ok := strings.Cut(md, "\n## Words\n")
	if !ok {
		return nil, fmt.Errorf("%s has no section Words", glossary)
	}
	md, _, _ = strings.Cut(md, "\n## ")
	code := regexp.MustCompile("`([^`]+)`")
	words := func(s string) (w []string) {
		for _, m := range code.FindAllStringSubmatch(s, -1) {
			w = append(w, m[1])
		}
		return w
	}
	for _, line := range strings.Split(md, "\n") {
		cells := strings.Split(strings.Trim(line, "|"), " |")
		if !strings.HasPrefix(line, "| ") || strings.HasPrefix(line, "| word") {
			continue
		}
		if len(cells) != 3 || !strings.HasSuffix(line, "|") {
			return nil, fmt.Errorf("%s: a row of the table of words has three cells on one line: %s", glossary, line)
		}
		for _, part := range strings.Split(cells[2], ";") {
			what, in, _ := strings.Cut(part, " in ")
			for _, w := range words(what) {
				out = append(out, ban{strings.ToLower(w), words(in), strings.TrimSpace(cells[0])})
			}
		}
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("%s: the table of words forbids none", glossary)
	}
	return out, nil
}

// withoutTable blanks the rows of the glossary, which name the words that are not used.
func withoutTable(md string) string {
	begin := strings.Index(md, "\n## Words\n") + 1
	end := begin + strings.Index(md[begin+1:], "\n## ") + 1
	return md[:begin] + strings.Repeat("\n", strings.Count(md[begin:end], "\n")) + md[end:]
}

// camel gives the words of an identifier, in lower case and with spaces around each.
func camel(name string) string {
	r := []rune(name)
	var b strings.Builder
	for i, c := range r {
		if c == '_' || unicode.IsUpper(c) && i > 0 &&
			(unicode.IsLower(r[i-1]) || i+1 < len(r) && unicode.IsLower(r[i+1])) {
			b.WriteByte(' ')
		}
		b.WriteRune(unicode.ToLower(c))
	}
	return " " + strings.TrimSpace(b.String()) + " "
}

// plain is prose as camel gives identifiers, without punctuation.
func plain(s string) string {
	return " " + strings.Join(strings.FieldsFunc(strings.ToLower(s), func(c rune) bool {
		return !unicode.IsLetter(c) && !unicode.IsDigit(c)
	}), " ") + " "
}

// has tells whether words, as of camel or plain, hold the banned word or its plural.
func (b ban) has(words string) bool {
	return strings.Contains(words, " "+b.word+" ") || strings.Contains(words, " "+b.word+"s ")
}

const nameSubject = "a sentence names its subject, and begins with it rather than with What, Who or One"

// unnamed is the beginning of a sentence that does not name its subject.
var unnamed = regexp.MustCompile(`^(What|Whatever|Who|Whoever|One)([^-\w]|$)`)

var sentenceEnd = regexp.MustCompile(`[.!?]["')*_]*\s+`)

// unclear gives the sentences of a paragraph that begin with What, Who or One and are no questions.
func unclear(paragraph string) (out []string) {
	start := 0
	for _, m := range append(sentenceEnd.FindAllStringIndex(paragraph, -1), []int{len(paragraph), len(paragraph)}) {
		s := strings.TrimLeft(paragraph[start:m[0]], "*_\"'( ")
		if asks := m[0] < len(paragraph) && paragraph[m[0]] == '?' || strings.HasSuffix(strings.TrimRight(s, "*_ "),
			"?"); unnamed.MatchString(s) && !asks {
			out = append(out, s)
		}
		start = m[1]
	}
	return out
}

// block is a paragraph, a list item or a table cell, and the line on which it begins.
type block struct {
	line int
	text string
}

// bareEpoch finds the word, but for parts of code, and fullEpoch what it ends with if it is in full.
var (
	bareEpoch = regexp.MustCompile(`(?i)(?:^|\s|\()\**epochs?\b`)
	fullEpoch = regexp.MustCompile(`(?i)(reclaim|placement group|unix)\s+epochs?$`)
)

var item = regexp.MustCompile(`^\s*([-*]|\d+\.)\s+`)

// blocks cuts text, which begins on that line of its file, into blocks. Headings and indented code are none.
func blocks(text string, line int, md bool) (out []block) {
	more := false // the next line may go on with the last block
	fenced := false
	for i, s := range strings.Split(text, "\n") {
		t := strings.TrimSpace(s)
		switch {
		case strings.HasPrefix(t, "```"):
			fenced, more = !fenced, false
		case fenced || t == "" || strings.HasPrefix(s, "#") || !md &&
			(strings.HasPrefix(s, "\t") || strings.HasPrefix(s, " \t")), md && !more && strings.HasPrefix(s, "    "):
			more = false
		case md && strings.HasPrefix(t, "|"):
			// A cell may begin like a column's name; its later sentences are sentences.
			for _, cell := range strings.Split(strings.Trim(t, "|"), " | ") {
				out = append(out, block{line + i, "- " + strings.TrimSpace(cell)})
			}
			more = false
		case item.MatchString(s):
			out = append(out, block{line + i, item.ReplaceAllString(s, "")})
			more = true
		case more:
			out[len(out)-1].text += "\n" + t
		default:
			out = append(out, block{line + i, t})
			more = true
		}
	}
	return out
}

// judgeProse gives what is wrong with comments or documents of dir.
func judgeProse(where func(line int) string, dir, text string, line int, md bool, words []ban) (out []string) {
	for _, b := range blocks(text, line, md) {
		for _, s := range unclear(b.text) {
			first, _, _ := strings.Cut(s, "\n")
			at := b.line + strings.Count(b.text[:strings.Index(b.text, s)], "\n")
			out = append(out, fmt.Sprintf("%s: %q: %s", where(at), first, nameSubject))
		}
		for _, m := range bareEpoch.FindAllStringIndex(b.text, -1) {
			if md && !fullEpoch.MatchString(b.text[:m[1]]) {
				at := b.line + strings.Count(b.text[:m[1]], "\n")
				out = append(out, fmt.Sprintf("%s: an epoch is a reclaim epoch or a placement group epoch, in full",
					where(at)))
			}
		}
		for i, s := range strings.Split(b.text, "\n") {
			for _, w := range words {
				if w.holds(dir) && w.has(plain(s)) {
					out = append(out, fmt.Sprintf("%s: %q is not a word for %s, see Words in %s", where(b.line+i),
						w.word, w.use, glossary))
				}
			}
		}
	}
	return out
}

// judgeFile gives what is wrong with the words of a Go file, whose content is src.
func judgeFile(file, src string, words []ban) (out []string, err error) {
	set := token.NewFileSet()
	f, err := parser.ParseFile(set, file, src, parser.ParseComments)
	if err != nil || ast.IsGenerated(f) {
		return nil, err
	}
	dir := path.Dir(file)
	for _, g := range f.Comments {
		first := set.Position(g.Pos()).Line
		var lines []string
		for _, c := range g.List {
			text := strings.TrimSuffix(strings.TrimPrefix(c.Text, "/*"), "*/")
			for s := range strings.SplitSeq(text, "\n") {
				lines = append(lines, strings.TrimPrefix(strings.TrimPrefix(s, "//"), " "))
			}
		}
		where := func(line int) string { return fmt.Sprintf("%s:%d", file, line) }
		out = append(out, judgeProse(where, dir, strings.Join(lines, "\n"), first, false, words)...)
	}
	selected := map[*ast.Ident]bool{}
	ast.Inspect(f, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.SelectorExpr:
			selected[n.Sel] = true // judged where it is declared
		case *ast.FuncDecl:
			if slices.Contains(bareVerbs, n.Name.Name) {
				out = append(out, fmt.Sprintf("%s: func %s does not say its object, as releaseLock does",
					set.Position(n.Pos()), n.Name.Name))
			}
		case *ast.BasicLit:
			text, err := strconv.Unquote(n.Value)
			if n.Kind != token.STRING || err != nil || strings.HasSuffix(file, "_test.go") ||
				!strings.Contains(text, " ") {
				break
			}
			for _, s := range unclear(text) {
				out = append(out, fmt.Sprintf("%s: %q: %s", set.Position(n.Pos()), s, nameSubject))
			}
		case *ast.Ident:
			for _, w := range words {
				if !selected[n] && w.holds(dir) && w.has(camel(n.Name)) {
					out = append(out, fmt.Sprintf("%s: %s: %q is not a word for %s, see Words in %s",
						set.Position(n.Pos()), n.Name, w.word, w.use, glossary))
				}
			}
		}
		return true
	})
	return out, nil
}

// TestWords holds the glossary, names of functions and the first words of sentences.
func TestWords(t *testing.T) {
	md, err := os.ReadFile(filepath.Join(root, glossary))
	if err != nil {
		t.Fatal(err)
	}
	words, err := bans(string(md))
	if err != nil {
		t.Fatal(err)
	}
	files := 0
	err = filepath.WalkDir(root, func(file string, d fs.DirEntry, err error) error {
		name := strings.TrimPrefix(filepath.ToSlash(file), root+"/")
		switch {
		case err != nil:
			return err
		case d.IsDir() && file != root && (strings.HasPrefix(d.Name(), ".") || d.Name() == "testdata" ||
			d.Name() == "dist"):
			return fs.SkipDir
		case strings.HasSuffix(name, ".go") && !strings.HasPrefix(name, "internal/lint/"): // its tests break the rules
			b, err := os.ReadFile(file)
			if err != nil {
				return err
			}
			bad, err := judgeFile(name, string(b), words)
			for _, b := range bad {
				t.Error(b)
			}
			files++
			return err
		case strings.HasSuffix(name, ".md") && name != "CHANGELOG.md": // which says what was renamed
			b, err := os.ReadFile(file)
			if err != nil {
				return err
			}
			text := string(b)
			if name == glossary {
				text = withoutTable(text)
			}
			where := func(line int) string { return fmt.Sprintf("%s:%d", name, line) }
			for _, bad := range judgeProse(where, path.Dir(name), text, 1, true, words) {
				t.Error(bad)
			}
			files++
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if files < 400 {
		t.Errorf("%d files were read", files)
	}
}

// Rules that refuse nothing would go unnoticed.
func TestWordsRefuse(t *testing.T) {
	words, err := bans("# x\n\n## Words\n\n| word | meaning | not |\n|---|---|---|\n| head | first | `arbiter`, " +
		"`lane leader` |\n| segment | 17 groups | `cluster` in `index`; `bin` |\n\n## y\n| a | b | `c` |\n")
	if err != nil || len(words) != 4 || words[2].in[0] != "index" || words[3].word != "bin" {
		t.Fatal(words, err)
	}
	for _, tc := range []struct{ dir, src, want string }{
		{"client", "// An arbiter decides.\nfunc f() {}", `f.go:3: "arbiter" is not a word for head`},
		{"client", "func f(theArbiters int) {}", `f.go:3:8: theArbiters: "arbiter" is not a word for head`},
		{"client", "// The lane\n// leader waits. A lane leader does.\nfunc f() {}", `f.go:4: "lane leader" is not`},
		{"index", "type ClusterOff int", `f.go:3:6: ClusterOff: "cluster" is not a word for segment`},
		{"server", "type ClusterOff int", ""},
		{"index", "var _ = x.Cluster()", ""},
		{"index", "type clustered, combine int", ""},
		{"index", "func (o *Op) settle() {}", "f.go:3:1: func settle does not say its object"},
		{"index", "func (o *Op) settleFlow() {}", ""},
		{"index", "const text = `it is. Who knows. `", `f.go:3:14: "Who knows"`},
		{"index", "// f is.\n// What it is.\nfunc f() {}", `f.go:4: "What it is."`},
		{"index", "func f() {\n\t// It is. One\n\t// never knows.\n}", `f.go:4: "One"`},
		{"index", "func f() {\n\tg() // it (\"is\"). Who reads\n}", `f.go:4: "Who reads"`},
		{"index", "// f does:\n//   - this\n//   - One of that\nfunc f() {}", `f.go:5: "One of that"`},
		{"index", "// f.\n//\n//\tWhat is code.\n//\n// What is it? Some\n// One. Oneself. One-sided.\nfunc f() {}",
			""},
	} {
		src := "package p\n\n" + tc.src + "\n"
		if strings.Contains(tc.src, "type clustered,") {
			src = "package p\n\nvar clustered, combine int\n"
		}
		got, err := judgeFile(tc.dir+"/f.go", src, words)
		if err != nil || tc.want == "" && len(got) > 0 || tc.want != "" &&
			(len(got) != 1 || !strings.HasPrefix(got[0], tc.dir+"/"+tc.want)) {
			t.Errorf("%s, %q: %q, %v, want %q", tc.dir, tc.src, got, err, tc.want)
		}
	}
	for _, tc := range []struct{ md, want string }{
		{"# What is it\n\nA. **One** is.\n", `f:3: "One** is."`},
		{"| What | is |\n|---|---|\n| One | it is. Who knows. |\n", `f:3: "Who knows."`},
		{"```\nWhat is code.\n```\n", ""},
		{"1. It is,\n   so. Whatever\n   it is.\n", `f:2: "Whatever"`},
		{"**What happened?** It did.\n", ""},
		{"A reclaim\nepoch, `epoch` and 3 placement group epochs.\nThe\nepoch.\n", "f:4: an epoch is"},
	} {
		got := judgeProse(func(line int) string { return fmt.Sprintf("f:%d", line) }, "docs", tc.md, 1, true, words)
		if tc.want == "" && len(got) > 0 || tc.want != "" && (len(got) != 1 || !strings.HasPrefix(got[0], tc.want)) {
			t.Errorf("%q: %q, want %q", tc.md, got, tc.want)
		}
	}
}
