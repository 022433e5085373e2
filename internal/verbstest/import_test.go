package verbstest

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvd-project/kvd/internal/testutil"
)

// makeTree writes some 200 files below dir and returns them by relative path.
func makeTree(t *testing.T, dir string) map[string][]byte {
	t.Helper()
	rng := rand.New(rand.NewPCG(1, 2))
	data := func(n int) []byte {
		b := make([]byte, n)
		for i := range b {
			b[i] = byte(rng.Uint32())
		}
		return b
	}
	files := map[string][]byte{
		"empty": {}, "deep/er/and/deeper/empty": {}, "one": data(1), "large": data(100_000), "huge": data(3 << 20),
		"-dash": data(10), "with space": data(20), "new\nline": data(30), "tab\tand\x01control": data(40),
		"quote\"'`$(x)\\": data(50),
		"ünïcödé/日本語":     data(60), ".hidden/.too": data(70), "not\xffutf8": data(80), "100%/%s/%00": data(90),
		"*?[a]":                    data(100),
		strings.Repeat("long", 60): data(110),
	}
	for i := range 90 {
		files[fmt.Sprintf("dir%d/file%d", i%7, i)] = data(rng.IntN(4000))
	}
	for name, b := range files {
		p := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, b, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return files
}

// wantTree compares the files below dir with want, byte by byte.
func wantTree(t *testing.T, dir string, want map[string][]byte) {
	t.Helper()
	found := 0
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		found++
		name, err := filepath.Rel(dir, p)
		if err != nil {
			return err
		}
		b, err := os.ReadFile(p)
		if err != nil {
			return err
		}
		if w, ok := want[name]; !ok || !bytes.Equal(b, w) {
			t.Errorf("%q has %d bytes that differ from the %d imported (imported at all: %v)", name, len(b), len(w), ok)
		}
		return nil
	})
	if err != nil || found != len(want) {
		t.Fatalf("%s holds %d files, want %d: %v", dir, found, len(want), err)
	}
}

// A file tree goes in and comes out as it was, also when a memory node dies while
// it comes out.
func TestImportExport(t *testing.T) {
	needs(t, "1")
	s := newStore(t, 5*time.Second, node{"m1", 0, []string{"--janitor"}}, node{"m2", 1, []string{"--janitor"}})
	s.namespace("default", 2, 80<<20)
	in, out, again := t.TempDir(), filepath.Join(t.TempDir(), "out"), filepath.Join(t.TempDir(), "again")
	files := makeTree(t, in)
	began := time.Now()
	s.must("import", in)
	imported := time.Since(began)
	s.must("export", out)
	exported := time.Since(began) - imported
	wantTree(t, out, files)

	var check struct {
		OK       bool  `json:"ok"`
		Records  int64 `json:"records"`
		Replicas int   `json:"replicas"` // of all placement groups
	}
	// While a shard moves to the emptier group, what is on its way is counted in neither.
	for end := time.Now().Add(time.Minute); ; time.Sleep(100 * time.Millisecond) {
		err := json.Unmarshal([]byte(s.must("check", "-o", "json")), &check)
		if err == nil && check.OK && check.Replicas == 4 && check.Records >= int64(len(files)) {
			break
		}
		if err != nil || !check.OK || check.Replicas != 4 || time.Now().After(end) {
			t.Fatalf("kvctl check: %+v, %v; want ok, 4 regions (2 placement groups of 2 copies) and a record of each "+
				"of %d files", check, err, len(files))
		}
	}
	nodes := s.must("nodes")
	for i, name := range []string{"m1", "m2"} {
		if want := provider + " " + host(i) + ":"; !strings.Contains(nodes, want) {
			t.Errorf("kvctl nodes does not show %q of %s:\n%s", want, name, nodes)
		}
	}
	if st := s.must("status"); !strings.Contains(st, "2 of 2 placement groups fully replicated") {
		t.Errorf("kvctl status:\n%s", st)
	}

	// Stopped at its first file, the export has most of its way before it.
	exp := spawn(t, "export", environ(), s.ctlArgs("export", again)...)
	count := func() (n int) {
		_ = filepath.WalkDir(again, func(_ string, d fs.DirEntry, err error) error {
			if err == nil && d.Type().IsRegular() {
				n++
			}
			return nil
		})
		return n
	}
	testutil.UntilNone(t, "the export begins", func() string {
		if count() == 0 {
			return "no file yet"
		}
		return ""
	})
	exp.stop()
	before := count()
	if before >= len(files) {
		t.Fatalf("the export had all %d files before it was stopped: nothing was tested", before)
	}
	s.nodes["m1"].kill()
	exp.signal(syscall.SIGCONT)
	if status := exp.wait(); status != 0 {
		t.Fatalf("kvctl export, with m1 killed after %d files: exit status %d\n%s", before, status, exp.log)
	}
	wantTree(t, again, files)

	s.nodes["m2"].signal(syscall.SIGTERM)
	if status := s.nodes["m2"].wait(); status != 0 {
		t.Errorf("m2: exit status %d after SIGTERM, want 0", status)
	}
	fmt.Printf("\n%d files, 2 copies: imported in %v, exported in %v; m1 killed after %d files of another export, "+
		"which was whole\n\n",
		len(files), imported.Round(time.Millisecond), exported.Round(time.Millisecond), before)
}
