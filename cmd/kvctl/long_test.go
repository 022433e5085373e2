package main

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/devstore"
)

// changing has f run before the first part behind the first 8 MiB of a value is read.
type changing struct {
	store
	f func()
	t *testing.T
}

func (c *changing) Open(ctx context.Context, k []byte) (*client.Value, error) {
	v, err := c.store.Open(ctx, k)
	if err != nil {
		return nil, err
	}
	return client.NewValue(v.Info, v.Flags, v.Note, func(b []byte, off int64) error {
		if f := c.f; off > 0 && f != nil {
			c.f = nil
			f()
		}
		_, err := v.ReadAt(b, off)
		return err
	}), nil
}

func (c *changing) MultiGet(ctx context.Context, keys [][]byte) []client.Result {
	res := c.store.MultiGet(ctx, keys)
	for i := range res {
		if n := len(res[i].Value); n > longValue {
			c.t.Errorf("%d bytes of a value at once", n)
		}
	}
	return res
}

// TestLongFiles: get and export read long values by parts, of one version, and export gives a file its name once it is
// whole.
func TestLongFiles(t *testing.T) {
	e := newEnv(t, devstore.Options{CapacityBytes: 512 << 20, Providers: []string{"shm"}})
	write := &env{t: t, flags: e.flags, now: e.now}
	first, second := strings.Repeat("first ", 4<<20), strings.Repeat("other", 4<<20)
	file := filepath.Join(t.TempDir(), "v")
	put := func(v string) {
		if err := os.WriteFile(file, []byte(v), 0o600); err != nil {
			t.Fatal(err)
		}
		write.must("", "put", "d/long", "--file", file)
	}
	put(first)
	write.must("s", "put", "d/short")

	if got := e.must("", "get", "d/long"); got != first {
		t.Errorf("get: %d bytes, want %d", len(got), len(first))
	}
	change := func() { put(second) }
	e.wrap(func(s store) store { return &changing{s, change, t} })
	r := e.run("", "get", "d/long")
	if r.code == exitOK || r.stdout != first[:8<<20] || !strings.Contains(r.stderr, "8 MiB of 24 MiB of version") {
		t.Errorf("exit %d, %d bytes, %s", r.code, len(r.stdout), r.stderr)
	}

	put(first)
	dir := filepath.Join(t.TempDir(), "out")
	e.must("", "export", dir, "--prefix", "d/")
	if got := readTree(t, dir); len(got) != 2 || got["long"] != second || got["short"] != "s" {
		t.Errorf("%d files, of %d and %d bytes", len(got), len(got["long"]), len(got["short"]))
	}
	change = nil
	e.must("", "export", dir, "--prefix", "d/", "--overwrite") // over files that are there
	if got := readTree(t, dir); len(got) != 2 || got["long"] != second {
		t.Errorf("%d files", len(got))
	}
}

// TestExportCut: a file that is cut off leaves nothing, and what had its name stays.
func TestExportCut(t *testing.T) {
	e := newEnv(t, devstore.Options{CapacityBytes: 512 << 20, Providers: []string{"shm"}})
	e.must(strings.Repeat("x", 9<<20), "put", "d/long")
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "long"), []byte("earlier"), 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	e.wrap(func(s store) store { return &changing{s, cancel, t} })
	r := e.runContext(ctx, "", "export", dir, "--prefix", "d/", "--overwrite")
	if got := readTree(t, dir); r.code == exitOK || len(got) != 1 || got["long"] != "earlier" {
		t.Errorf("exit %d, %d files, %d bytes: %s", r.code, len(got), len(got["long"]), r.stderr)
	}
}
