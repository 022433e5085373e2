package main

import (
	"bytes"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/devstore"
)

// TestPutFile: a file is a value, named or on stdin, whole or from where stdin is; a long one is not kept in memory. So
// import puts long files.
func TestPutFile(t *testing.T) {
	e := newEnv(t, devstore.Options{CapacityBytes: 256 << 20})
	long := make([]byte, 20<<20)
	_, _ = rand.NewChaCha8([32]byte{1}).Read(long)
	dir := t.TempDir()
	for name, b := range map[string][]byte{"long": long, "short": []byte("v"), "none": nil} {
		path := filepath.Join(dir, name)
		writeFile(t, path, b)
		e.must("", "put", "a/"+name, "--file", path)
		f, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if len(b) > 0 {
			if _, err := f.Seek(1, 0); err != nil {
				t.Fatal(err)
			}
		}
		var out, errs bytes.Buffer
		a := newProgram(f, &out, &errs)
		if code := a.run(t.Context(), append(slices.Clone(e.flags), "put", "b/"+name)); code != 0 {
			t.Fatalf("exit %d: %s", code, &errs)
		}
		for key, want := range map[string][]byte{"a/": b, "b/": b[min(1, len(b)):]} {
			if got := e.must("", "get", key+name); got != string(want) {
				t.Errorf("%s%s has %d bytes, want %d", key, name, len(got), len(want))
			}
		}
	}
	e.must("", "import", dir, "--prefix", "c/")
	for name, want := range readTree(t, dir) {
		if got := e.must("", "get", "c/"+name); got != want {
			t.Errorf("c/%s has %d bytes, want %d", name, len(got), len(want))
		}
	}
	path := filepath.Join(dir, "long")
	if r := e.run("", "put", "a/long", "--if-absent", "--file", path); r.code != ctl.ExitNo {
		t.Errorf("exit %d: %s", r.code, r.stderr)
	}
	e.must("", "put", "d", "--if-absent", "--file", path)
	if got := e.must("", "get", "d"); got != string(long) {
		t.Errorf("d has %d bytes", len(got))
	}
	huge := filepath.Join(t.TempDir(), "huge")
	writeFile(t, huge, nil)
	if err := os.Truncate(huge, 1<<43); err != nil {
		t.Fatal(err)
	}
	for _, more := range [][]string{nil, {"--if-absent"}} {
		f, err := os.Open(huge)
		if err != nil {
			t.Fatal(err)
		}
		var out, errs bytes.Buffer
		a := newProgram(f, &out, &errs)
		code := a.run(t.Context(), slices.Concat(e.flags, []string{"put", "k"}, more))
		if _ = f.Close(); code != ctl.ExitUsage || !strings.Contains(errs.String(), "longer than 512 MiB") {
			t.Errorf("exit %d: %s", code, &errs)
		}
	}
	if r := e.run("", "put", "k", "v", "--file", path); r.code != ctl.ExitUsage {
		t.Errorf("exit %d: %s", r.code, r.stderr)
	}
	if r := e.run("", "put", "k", "--file", dir); !strings.Contains(r.stderr, "not a regular file") {
		t.Errorf("exit %d: %s", r.code, r.stderr)
	}
}
