package lint

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const (
	// exemptPhrases lists sentences that stay as they are, with the reason: FILE | PART OF THE SENTENCE | REASON.
	exemptPhrases = "testdata/phrases"
	// mostExempt is how many lines all lists of exceptions in testdata may have together.
	mostExempt = 50
)

// phrase is a form of words that is not written, and what to write instead.
type phrase struct {
	form, but *regexp.Regexp // of a sentence; but, if there is one, begins where form does and is good
	say       string
}

const past = "say what holds: history is in CHANGELOG.md and docs/rfcs"

// phrases are judged in this order, and a sentence is refused for the first that it has. TestWords refuses sentences
// that begin with What, Who or One, in all of these places.
var phrases = []phrase{
	// A function may have the name Of.
	{regexp.MustCompile(`^["'(*_ ]*Of `), regexp.MustCompile(`^Of (is|gives|reports) `),
		"a sentence begins with its subject"},
	{regexp.MustCompile(`(?i)\bso many\b`), nil, "give the number, or say of what it is"},
	{regexp.MustCompile(`(?i)\bof which\b`), nil, "make two sentences"},
	{regexp.MustCompile(`(?i)\bas (many|much|few|little|often|large|big|small|short|fast|slow|high|low|old|good) as\b`),
		nil, "give the number, or name the thing"},
	{regexp.MustCompile(`(?i)\bas (long|soon|far) as\b`), nil, "say while, until, once or how far"},
	{regexp.MustCompile(`(?i)\bno longer\b`), regexp.MustCompile(`(?i)^no longer than\b`), past},
	{regexp.MustCompile(`(?i)\b(since then|until now|as before|than before|formerly|previously|anymore|nowadays)\b`),
		nil, past},
	{regexp.MustCompile(`(?i)(^|\b(it|they|that|which|who|this|there) )used to\b|^Before, `), nil, past},
}

// said is a sentence with the file that has it.
type said struct {
	sentence
	file string
	told bool // to people who run a program: help or an error
}

// judge gives what is wrong with a sentence.
func (s said) judge() string {
	if s.told && s.words > longest {
		return fmt.Sprintf("more than %d words", longest)
	}
	for _, p := range phrases {
		if m := p.form.FindStringIndex(s.text); m != nil && (p.but == nil || !p.but.MatchString(s.text[m[0]:])) {
			return fmt.Sprintf("%q: %s", strings.TrimSpace(s.text[m[0]:m[1]]), p.say)
		}
	}
	return ""
}

// makers are the functions that make an error of a text, by name, with the place of the text among the arguments.
var makers = map[string]int{
	"errors.New": 0, "fmt.Errorf": 0, "status.New": 1, "status.Newf": 1, "status.Error": 1, "status.Errorf": 1,
	"usagef": 0, "Usagef": 0, "ctl.Usagef": 0,
}

// reply is an error text of Redis's or memcached's protocol, whose words are the original's: it begins with a code.
var reply = regexp.MustCompile(`^-?[A-Z]{2,}[A-Z_]*( |$)`)

// constant is the text of an expression of literals; anything else in it is a word.
func constant(e ast.Expr) (text string, ok bool) {
	switch e := e.(type) {
	case *ast.BasicLit:
		if e.Kind == token.STRING {
			text, err := strconv.Unquote(e.Value)
			return text, err == nil
		}
	case *ast.ParenExpr:
		return constant(e.X)
	case *ast.BinaryExpr:
		l, lok := constant(e.X)
		r, rok := constant(e.Y)
		if e.Op == token.ADD && (lok || rok) {
			if !lok {
				l = "it"
			}
			if !rok {
				r = "it"
			}
			return l + r, true
		}
	case *ast.CallExpr:
		if callee(e) == "fmt.Sprintf" && len(e.Args) > 0 {
			return constant(e.Args[0])
		}
	}
	return "", false
}

// callee is the name of what is called: of a method, or a function of a package, with a dot.
func callee(c *ast.CallExpr) string {
	switch f := c.Fun.(type) {
	case *ast.Ident:
		return f.Name
	case *ast.SelectorExpr:
		if x, ok := f.X.(*ast.Ident); ok {
			return x.Name + "." + f.Sel.Name
		}
		return "." + f.Sel.Name
	}
	return ""
}

// flagOf are the methods of flag sets: the last argument is the help.
var flagOf = regexp.MustCompile(`\.((Bool|U?[Ii]nt\d*|Float64|String|Duration|Count)(Slice|Array)?(Var)?|Var)P?$`)

var indented = regexp.MustCompile(`(?m)^ {2,}`)

var usageTag = regexp.MustCompile(`usage:("(?:[^"\\]|\\.)*")`)

// speaks reports whether a folder has commands, whose help texts are read.
func speaks(dir string) bool { return below("cmd", dir) || below("internal/ctl", dir) }

// told are the sentences of a Go file that its program says: help texts of commands, flags and settings, and errors.
func told(name, src string) (out []sentence, err error) {
	set := token.NewFileSet()
	f, err := parser.ParseFile(set, name, src, parser.SkipObjectResolution)
	if err != nil || ast.IsGenerated(f) {
		return nil, err
	}
	dir := path.Dir(name)
	add := func(e ast.Expr, text string) {
		// Lines of a table in a help text are indented, and sentences of their own.
		text = indented.ReplaceAllString(text, "- ")
		out = append(out, sentencesOf(text, set.Position(e.Pos()).Line, false)...)
	}
	ast.Inspect(f, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.KeyValueExpr:
			if k, ok := n.Key.(*ast.Ident); ok && (k.Name == "Short" || k.Name == "Long") && speaks(dir) {
				if text, ok := constant(n.Value); ok {
					add(n.Value, text)
				}
			}
		case *ast.Field:
			if n.Tag != nil {
				tag, _ := strconv.Unquote(n.Tag.Value)
				for _, m := range usageTag.FindAllStringSubmatch(tag, -1) {
					if text, err := strconv.Unquote(m[1]); err == nil {
						add(n.Tag, text)
					}
				}
			}
		case *ast.CallExpr:
			to := callee(n)
			if at, ok := makers[to]; ok && len(n.Args) > at {
				if text, ok := constant(n.Args[at]); ok && !reply.MatchString(text) {
					add(n.Args[at], text)
				}
			} else if flagOf.MatchString(to) && speaks(dir) && len(n.Args) >= 3 {
				if text, ok := constant(n.Args[len(n.Args)-1]); ok {
					add(n.Args[len(n.Args)-1], text)
				}
			}
		}
		return true
	})
	return out, nil
}

// everySaid is all that the project says to its readers and users, by file.
func everySaid(t *testing.T) (all []said) {
	t.Helper()
	spoken := speech(t)
	for _, name := range slices.Sorted(maps.Keys(spoken)) {
		for _, s := range spoken[name] {
			all = append(all, said{s, name, false})
		}
		if !strings.HasSuffix(name, ".go") || strings.HasPrefix(name, "internal/lint/") {
			continue
		}
		b, err := os.ReadFile(filepath.Join(root, filepath.FromSlash(name)))
		if err != nil {
			t.Fatal(err)
		}
		list, err := told(name, string(b))
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range list {
			all = append(all, said{s, name, true})
		}
	}
	return all
}

// exempt is a sentence that stays as it is.
type exempt struct {
	file, part, why string
	used            bool
}

// exempts reads exemptPhrases.
func exempts(t *testing.T) (list []*exempt) {
	t.Helper()
	b, err := os.ReadFile(exemptPhrases)
	if err != nil {
		t.Fatal(err)
	}
	for s := range strings.Lines(string(b)) {
		cells := strings.Split(strings.TrimSpace(s), " | ")
		if len(cells) != 3 || len(cells[2]) < 10 {
			t.Fatalf("%s: want FILE | PART OF THE SENTENCE | REASON: %s", exemptPhrases, s)
		}
		list = append(list, &exempt{cells[0], cells[1], cells[2], false})
	}
	return list
}

// TestPhrases refuses forms of words in documents, comments of what is exported, help texts and errors, and long
// sentences in the last two.
func TestPhrases(t *testing.T) {
	all, spared := everySaid(t), exempts(t)
	told := 0
	for _, s := range all {
		if s.told {
			told++
		}
		bad := s.judge()
		if bad == "" {
			continue
		}
		good := false
		for _, e := range spared {
			if e.file == s.file && strings.Contains(s.text, e.part) {
				good, e.used = true, true
			}
		}
		if good {
			continue
		}
		t.Errorf("%s:%d: %s (%d words): %s", s.file, s.line, bad, s.words, s.text)
	}
	for _, e := range spared {
		if !e.used {
			t.Errorf("%s: nothing needs this any more, so take it out: %s | %s", exemptPhrases, e.file, e.part)
		}
	}
	lists, err := filepath.Glob("testdata/*")
	if err != nil || len(lists) < 3 {
		t.Fatal(lists, err)
	}
	lines := 0
	for _, f := range lists {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		lines += strings.Count(string(b), "\n")
	}
	if lines > mostExempt {
		t.Errorf("testdata has %d exceptions, want at most %d", lines, mostExempt)
	}
	if len(all) < 10000 || told < 1500 {
		t.Errorf("%d sentences were read, %d of them in help texts and errors", len(all), told)
	}
	t.Logf("%d sentences, %d of them in help texts and errors, %d exceptions here, %d in all", len(all), told,
		len(spared), lines)
}

// Rules that refuse nothing would go unnoticed.
func TestPhrasesRefuse(t *testing.T) {
	for text, want := range map[string]string{
		"It is for 20 clients.":               "",
		"It holds no longer than 4 s.":        "",
		"Of gives it.":                        "",
		"It is used to count.":                "",
		"They look before they write.":        "",
		"Of these it takes two.":              "a sentence begins",
		"It is. (Of these two.)":              "a sentence begins",
		"There are so many.":                  "give the number",
		"It has a list, of which none is it.": "make two",
		"It takes as many as there are.":      "give the number",
		"As long as it runs.":                 "say while",
		"It goes\nas far as that.":            "say while",
		"It is no longer there.":              "say what holds",
		"It is as before.":                    "say what holds",
		"It was formerly so.":                 "say what holds",
		"It used to be so.":                   "say what holds",
		"Before, it was so.":                  "say what holds",
		"Until now it is.":                    "say what holds",
	} {
		bad := ""
		for _, s := range sentencesOf(text, 1, false) {
			bad += (said{s, "f.md", false}).judge()
		}
		if want == "" && bad != "" || !strings.Contains(bad, want) {
			t.Errorf("%q: %q, want %q", text, bad, want)
		}
	}
	words := func(n int) string { return strings.TrimSpace(strings.Repeat("word ", n)) }
	for src, want := range map[string]string{
		"errors.New(`" + words(25) + "`)":                                      "",
		"errors.New(`" + words(26) + "`)":                                      "more than 25",
		"errors.New(`" + words(25) + ". " + words(3) + "`)":                    "",
		"errors.New(`ERR " + words(26) + "`)":                                  "",
		"fmt.Errorf(`so ` + a + ` x`, 1)":                                      "",
		"fmt.Errorf(`" + words(20) + " ` + a + ` " + words(5) + "`)":           "more than 25",
		"errors.New(fmt.Sprintf(`so many %d`, 1))":                             "give the number",
		"status.Errorf(codes.Internal, `so many`)":                             "give the number",
		"usagef(`so many`)":                                                    "give the number",
		"say(`so many`)":                                                       "",
		"cobra.Command{Short: `so many`}":                                      "give the number",
		"cobra.Command{Long: `it:\n  " + words(20) + "\n  " + words(20) + "`}": "",
		"cobra.Command{Long: `it.\n\nof which`}":                               "make two",
		"other{Use: `so many`}":                                                "",
		"f.StringVar(&x, `n`, ``, `so many`)":                                  "give the number",
		"cmd.Flags().Bool(`n`, false, `so many`)":                              "give the number",
		"struct{ A int `usage:\"so many\"` }{}":                                "give the number",
	} {
		src = strings.ReplaceAll(src, "`usage:\"so many\"`", "\"usage:\\\"so many\\\"\"")
		list, err := told("cmd/x/f.go", "package p\n\nvar _ = "+src+"\n")
		bad := ""
		for _, s := range list {
			bad += (said{s, "cmd/x/f.go", true}).judge()
		}
		if err != nil || want == "" && bad != "" || !strings.Contains(bad, want) {
			t.Errorf("%s: %q, %v, want %q", src, bad, err, want)
		}
	}
}
