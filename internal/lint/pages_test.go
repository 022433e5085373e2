package lint

import (
	"fmt"
	"maps"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const (
	// longestPage is how many lines a document may have.
	longestPage = 500
	// mostUnlisted is how many sections a page may have without a list of them.
	mostUnlisted = 3
)

// lengthy are the documents that may be longer: looked up rather than read, generated, or records of the past.
var lengthy = []string{"docs/protocol.md", "docs/settings.md", "docs/metrics.md", "CHANGELOG.md", "docs/rfcs"}

// pages are the documents that begin with what they answer, for whom, and with their contents.
func pages(t *testing.T) []string {
	t.Helper()
	list := []string{"ARCHITECTURE.md", "HACKING.md", "CONTRIBUTING.md", "SECURITY.md"}
	found, err := filepath.Glob(filepath.Join(root, "docs", "*.md"))
	if err != nil || len(found) < 15 {
		t.Fatalf("%d pages in docs, %v", len(found), err)
	}
	for _, f := range found {
		list = append(list, "docs/"+filepath.Base(f))
	}
	return list
}

var (
	contentsLink = regexp.MustCompile(`\[[^\]]+\]\(#([^)]*)\)`)
	// besideLinks is what stands between the links of contents: bullets, numbers and dots.
	besideLinks = regexp.MustCompile(`^[\s·*\d.-]*$`)
)

// contentsOf gives where the links of a paragraph of contents lead, which is none if it has anything else.
func contentsOf(paragraph string) (to []string) {
	if !besideLinks.MatchString(contentsLink.ReplaceAllString(paragraph, "")) {
		return nil
	}
	for _, m := range contentsLink.FindAllStringSubmatch(paragraph, -1) {
		to = append(to, m[1])
	}
	return to
}

// judgeHead gives what is wrong with the beginning of a page: a title, a paragraph of two sentences or more, of which
// the first says what the page answers and another one for whom, and contents: links to all of its sections in order.
func judgeHead(name, md string) (out []string) {
	refuse := func(format string, args ...any) {
		out = append(out, name+": "+fmt.Sprintf(format, args...))
	}
	var sections []string
	lines := prose(md)
	for _, l := range lines {
		if title, ok := strings.CutPrefix(l.text, "## "); ok {
			sections = slices.AppendSeq(sections, maps.Keys(anchors("## "+title)))
		}
	}
	head, _, _ := strings.Cut(md, "\n## ")
	title, rest, _ := strings.Cut(head, "\n")
	if !strings.HasPrefix(title, "# ") {
		refuse("it does not begin with a title")
	}
	paragraphs := strings.Split(strings.Trim(rest, "\n"), "\n\n")
	intro := sentencesOf(paragraphs[0], 2, true)
	if len(intro) < 2 || !strings.HasPrefix(intro[0].text, "This page ") ||
		!slices.ContainsFunc(intro[1:], func(s sentence) bool { return strings.HasPrefix(s.text, "It is for ") }) {
		refuse("its first paragraph does not say \"This page …\" of what it answers, and then \"It is for …\"")
	}
	var linked []string
	for _, p := range paragraphs[1:] { // a long list may be several paragraphs
		to := contentsOf(p)
		if len(to) == 0 {
			break
		}
		linked = append(linked, to...)
	}
	if (len(linked) > 0 || len(sections) > mostUnlisted) && !slices.Equal(linked, sections) {
		refuse("behind its first paragraph are links to %q, want its sections: %q", linked, sections)
	}
	return out
}

// TestPages holds the beginning of every page.
func TestPages(t *testing.T) {
	for _, name := range pages(t) {
		md, err := os.ReadFile(filepath.Join(root, filepath.FromSlash(name)))
		if err != nil {
			t.Fatal(err)
		}
		for _, bad := range judgeHead(name, string(md)) {
			t.Error(bad)
		}
	}
}

// TestPageLengths: no document is longer than somebody reads in one go.
func TestPageLengths(t *testing.T) {
	for name := range speech(t) { // which leaves out the changelog and the dated notes
		if path.Ext(name) != ".md" || slices.Contains(lengthy, name) {
			continue
		}
		md, err := os.ReadFile(filepath.Join(root, filepath.FromSlash(name)))
		if err != nil {
			t.Fatal(err)
		}
		if n := strings.Count(string(md), "\n"); n > longestPage {
			t.Errorf("%s has %d lines, want at most %d: move a subject to a page of its own, and diaries to docs/rfcs",
				name, n, longestPage)
		}
	}
}

// Rules that refuse nothing would go unnoticed.
func TestPagesRefuse(t *testing.T) {
	const intro = "# A page\n\nThis page says it. It is for readers.\n"
	sections := func(n int) string {
		return strings.Join([]string{"", "\n## One", "\n## Two, and `b`", "\n## Three", "\n## Four"}[:n+1], "\n")
	}
	const contents = "\n[One](#one) · [Two, and `b`](#two-and-b)\n\n- [Three](#three)\n- [Four](#four)\n"
	for md, want := range map[string]string{
		intro: "", intro + sections(3): "", intro + contents + sections(4): "",
		intro + "\nA paragraph with a [link](#one).\n" + sections(3):         "",
		intro + "\n```\n## no section\n```\n":                                "",
		intro + sections(4):                                                  "p.md: behind its first",
		intro + contents + sections(3):                                       "p.md: behind its first",
		intro + "\n[Two, and `b`](#two-and-b) · [One](#one)\n" + sections(2): "p.md: behind its first",
		intro + "\n[One](#once)\n" + sections(1):                             "p.md: behind its first",
		"A page\n\nThis page says it. It is for readers.\n":                  "p.md: it does not begin",
		"# A page\n\nThis page says it, and it is for readers.\n":            "p.md: its first paragraph",
		"# A page\n\nIt says it. It is for readers.\n":                       "p.md: its first paragraph",
		"# A page\n\nThis page says it. It has more.\n":                      "p.md: its first paragraph",
		"# A page\n\nThis page says it.\n\nIt is for readers.\n":             "p.md: its first paragraph",
		"# A page\n": "p.md: its first paragraph",
	} {
		got := judgeHead("p.md", md)
		if want == "" && len(got) > 0 || want != "" && (len(got) != 1 || !strings.HasPrefix(got[0], want)) {
			t.Errorf("%q: %q, want %q", md, got, want)
		}
	}
}
