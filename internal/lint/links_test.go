package lint

import (
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode"
)

var (
	linkForm = regexp.MustCompile(`\]\(([^()\s]*(?:\([^()\s]*\)[^()\s]*)*)\)`)
	codeForm = regexp.MustCompile("`[^`\n]*`")
	nameForm = regexp.MustCompile(`<a (?:id|name)="([^"]+)"`)
)

// anchors are those of a document's headings, as GitHub makes them, and of its <a id="…">.
func anchors(md string) map[string]bool {
	seen := map[string]bool{}
	for _, l := range prose(md) {
		for _, m := range nameForm.FindAllStringSubmatch(l.text, -1) {
			seen[m[1]] = true
		}
		title := strings.TrimLeft(l.text, "#")
		if n := len(l.text) - len(title); n == 0 || n > 6 || !strings.HasPrefix(title, " ") {
			continue
		}
		title = linkForm.ReplaceAllString(strings.ReplaceAll(title, "[", ""), "") // the text of a link
		slug := strings.Map(func(r rune) rune {
			switch r = unicode.ToLower(r); {
			case r == ' ':
				return '-'
			case r == '-', r == '_', unicode.IsLetter(r), unicode.IsNumber(r):
				return r
			}
			return -1
		}, strings.TrimSpace(title))
		for n, s := 0, slug; ; n++ {
			if !seen[s] {
				seen[s] = true
				break
			}
			s = fmt.Sprintf("%s-%d", slug, n+1)
		}
	}
	return seen
}

// line of a document, from 1.
type line struct {
	n    int
	text string
}

// prose is a document without its blocks of code.
func prose(md string) (out []line) {
	fence := ""
	for i, text := range strings.Split(md, "\n") {
		mark := strings.TrimLeft(text, " ")
		switch {
		case fence == "" && (strings.HasPrefix(mark, "```") || strings.HasPrefix(mark, "~~~")):
			fence = mark[:3]
		case fence != "":
			if strings.HasPrefix(mark, fence) {
				fence = ""
			}
		default:
			out = append(out, line{i + 1, text})
		}
	}
	return out
}

// deadLinks are the links of a document, by its name from the root of the project, that lead nowhere in it.
func deadLinks(name, md string, exists func(name string) bool, read func(name string) (string, error)) (out []string) {
	for _, l := range prose(md) {
		for _, m := range linkForm.FindAllStringSubmatch(codeForm.ReplaceAllString(l.text, ""), -1) {
			u, err := url.Parse(m[1])
			if err == nil && (u.Scheme != "" || u.Host != "") {
				continue
			}
			to := name
			if err == nil && u.Path != "" {
				to = path.Join(path.Dir(name), u.Path)
			}
			switch {
			case err != nil:
			case !exists(to):
				err = fmt.Errorf("there is no %s", to)
			case u.Fragment != "" && strings.HasSuffix(to, ".md"):
				var text string
				if text, err = read(to); err == nil && !anchors(text)[u.Fragment] {
					err = fmt.Errorf("%s has no heading #%s", to, u.Fragment)
				}
			}
			if err != nil {
				out = append(out, fmt.Sprintf("%s:%d: (%s): %v", name, l.n, m[1], err))
			}
		}
	}
	return out
}

// TestLinks: every link of a document that leads to a file of the project, or a heading, finds it.
func TestLinks(t *testing.T) {
	read := func(name string) (string, error) {
		b, err := os.ReadFile(filepath.Join(root, filepath.FromSlash(name)))
		return string(b), err
	}
	exists := func(name string) bool {
		_, err := os.Stat(filepath.Join(root, filepath.FromSlash(name)))
		return err == nil
	}
	links := 0
	err := filepath.WalkDir(root, func(file string, d fs.DirEntry, err error) error {
		name := strings.TrimPrefix(filepath.ToSlash(file), root+"/")
		switch {
		case err != nil:
			return err
		case d.IsDir() && file != root &&
			(strings.HasPrefix(d.Name(), ".") || slices.Contains([]string{"testdata", "dist", "node_modules"},
				d.Name())):
			return fs.SkipDir
		case d.IsDir() || !strings.HasSuffix(name, ".md"):
			return nil
		}
		md, err := read(name)
		links += strings.Count(md, "](")
		for _, bad := range deadLinks(name, md, exists, read) {
			t.Error(bad)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if links < 200 {
		t.Errorf("%d links were followed", links)
	}
}

// Rules that refuse nothing would go unnoticed.
func TestLinksRefuse(t *testing.T) {
	docs := map[string]string{
		"docs/a.md": "# A page\n## What, and `how`?\n## Twice\n## Twice\n```\n# no heading\n```\n## A [link](b.md) " +
			"here\n<a id=\"own\"></a>\n",
		"b.go": "",
	}
	exists := func(name string) bool { _, ok := docs[name]; return ok }
	read := func(name string) (string, error) { return docs[name], nil }
	for link, want := range map[string]string{
		"a.md": "", "a.md#a-page": "", "a.md#what-and-how": "", "a.md#twice-1": "", "a.md#a-link-here": "",
		"a.md#own": "", "../b.go": "", "../b.go#L3": "",
		"#here": "", "https://example.com/x#y": "", "mailto:a@b.c": "",
		"b.md": "there is no docs/b.md", "a.md#no-heading": "docs/a.md has no heading #no-heading",
		"a.md#twice-2": "docs/a.md has no heading #twice-2",
		"#there":       "docs/c.md has no heading #there", "../../b.go": "there is no ../b.go",
	} {
		docs["docs/c.md"] = "## Here\n\n`[x](no.md)` [x](" + link + ")\n"
		got := deadLinks("docs/c.md", docs["docs/c.md"], exists, read)
		if want == "" && len(got) > 0 || want != "" && (len(got) != 1 || got[0] != "docs/c.md:3: ("+link+"): "+want) {
			t.Errorf("%s: %q, want %q", link, got, want)
		}
	}
}

// TestQuestions: what operators and programmers ask is answered from docs/README.md in one click.
func TestQuestions(t *testing.T) {
	md, err := os.ReadFile(filepath.Join(root, "docs", "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(md), "\n## Questions\n")
	section, _, _ = strings.Cut(section, "\n## ")
	asked := 0
	for l := range strings.Lines(section) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(l), "|"), " | ")
		if len(cells) != 3 || !strings.HasSuffix(strings.TrimSpace(cells[0]), "?") &&
			!strings.HasSuffix(cells[0], "What now?") {
			continue
		}
		if asked++; !linkForm.MatchString(cells[2]) || !strings.HasSuffix(strings.TrimSpace(cells[1]), ".") {
			t.Errorf("%s: want an answer and a link", cells[0])
		}
	}
	if asked < 20 { // TestLinks follows each
		t.Errorf("%d questions, want 20", asked)
	}
}
