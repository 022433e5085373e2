package compat

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// expected is what a suite is known to give on the gateway.
type expected struct {
	counts    string
	reference string            // the same on the original
	reasons   map[string]string // of failures, by place
	versions  map[string]string // by name, of applications
}

func expectedFile(name string) string { return filepath.Join("testdata", "expected", name+".txt") }

// loadExpected reads two lines of counts, the versions of applications, and then one line for
// each failure:
//
//	kvd: 280 passed, 8 failed, 65 skipped
//	reference: 287 passed, 4 failed, 65 skipped
//	version: NAME = VERSION
//
//	PLACE -- REASON
func loadExpected(name string) (expected, error) {
	e := expected{reasons: make(map[string]string), versions: make(map[string]string)}
	b, err := os.ReadFile(expectedFile(name))
	if errors.Is(err, fs.ErrNotExist) && *rewrite {
		return e, nil
	} else if err != nil {
		return e, err
	}
	for line := range strings.Lines(string(b)) {
		line = strings.TrimSuffix(line, "\n")
		if counts, ok := strings.CutPrefix(line, "kvd: "); ok {
			e.counts = counts
		} else if counts, ok := strings.CutPrefix(line, "reference: "); ok {
			e.reference = counts
		} else if version, ok := strings.CutPrefix(line, "version: "); ok {
			name, number, _ := strings.Cut(version, " = ")
			e.versions[name] = number
		} else if place, reason, ok := strings.Cut(line, " -- "); ok {
			e.reasons[place] = reason
		} else if line != "" {
			return e, fmt.Errorf("%s: line is neither counts nor PLACE -- REASON: %q", expectedFile(name), line)
		}
	}
	return e, nil
}

func (e expected) save(name string) error {
	b := new(bytes.Buffer)
	fmt.Fprintf(b, "kvd: %s\nreference: %s\n", e.counts, e.reference)
	for _, name := range slices.Sorted(maps.Keys(e.versions)) {
		fmt.Fprintf(b, "version: %s = %s\n", name, e.versions[name])
	}
	b.WriteByte('\n')
	for _, place := range slices.Sorted(maps.Keys(e.reasons)) {
		fmt.Fprintf(b, "%s -- %s\n", place, e.reasons[place])
	}
	return os.WriteFile(expectedFile(name), b.Bytes(), 0o644)
}

// table is a list as docs/compatibility.md shows it. Failures of one reason share a row.
func (e expected) table() string {
	if len(e.versions) > 0 {
		return applicationTable(e)
	}
	b := new(strings.Builder)
	fmt.Fprintf(b, "kvd: %s. The original: %s.\n", e.counts, e.reference)
	if len(e.reasons) == 0 {
		return b.String()
	}
	byReason := make(map[string][]string)
	for place, reason := range e.reasons {
		byReason[reason] = append(byReason[reason], place)
	}
	b.WriteString("\n| fails | because |\n|---|---|\n")
	rows := make([]string, 0, len(byReason))
	for reason, places := range byReason {
		slices.Sort(places)
		rows = append(rows, fmt.Sprintf("| %s | %s |\n", strings.ReplaceAll(strings.Join(places, "<br>"), "|", `\|`),
			strings.ReplaceAll(reason, "|", `\|`)))
	}
	slices.Sort(rows)
	for _, r := range rows {
		b.WriteString(r)
	}
	return b.String()
}

const docFile = "../../docs/compatibility.md"

// TestDocument wants every list of testdata/expected in the document, between
// <!-- NAME --> and <!-- /NAME -->, and every failure to have a reason.
func TestDocument(t *testing.T) {
	doc, err := os.ReadFile(docFile)
	must(t, err)
	files, err := filepath.Glob(expectedFile("*"))
	must(t, err)
	if len(files) == 0 {
		t.Fatalf("no %s", expectedFile("*"))
	}
	for _, f := range files {
		name := strings.TrimSuffix(filepath.Base(f), ".txt")
		e, err := loadExpected(name)
		must(t, err)
		for place, reason := range e.reasons {
			if reason == "" {
				t.Errorf("%s: no reason: %s", f, place)
			}
		}
		begin, end := "<!-- "+name+" -->\n", "<!-- /"+name+" -->"
		before, rest, ok1 := strings.Cut(string(doc), begin)
		shown, after, ok2 := strings.Cut(rest, end)
		switch {
		case !ok1 || !ok2:
			t.Errorf("%s has no %q … %q", docFile, begin, end)
		case *rewrite:
			doc = []byte(before + begin + e.table() + end + after)
		case shown != e.table():
			t.Errorf("%s shows something else than %s: go test ./internal/compat -run TestDocument -rewrite", docFile,
				f)
		}
	}
	if *rewrite {
		must(t, os.WriteFile(docFile, doc, 0o644))
	}
	// The versions, where they are names of modules.
	for _, m := range []string{goRedisModule, miniredisModule, gomemcacheModule} {
		if !bytes.Contains(doc, []byte(m)) {
			t.Errorf("%s does not name %s", docFile, m)
		}
	}
}
