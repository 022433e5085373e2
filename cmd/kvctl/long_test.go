package main

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/devstore"
)

// changing has f run before the first part behind the first 8 MiB of a value is read.
type changing struct {
	ctl.Store
	f func()
	t *testing.T
}

func (c *changing) Open(ctx context.Context, k []byte) (*client.Value, error) {
	v, err := c.Store.Open(ctx, k)
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
	res := c.Store.MultiGet(ctx, keys)
	for i := range res {
		if n := len(res[i].Value); n > ctl.LongValue {
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
	e.wrap(func(s ctl.Store) ctl.Store { return &changing{s, change, t} })
	r := e.run("", "get", "d/long")
	if r.code == ctl.ExitOK || r.stdout != first[:8<<20] || !strings.Contains(r.stderr, "8 MiB of 24 MiB of version") {
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
	e.wrap(func(s ctl.Store) ctl.Store { return &changing{s, cancel, t} })
	r := e.runContext(ctx, "", "export", dir, "--prefix", "d/", "--overwrite")
	if got := readTree(t, dir); r.code == ctl.ExitOK || len(got) != 1 || got["long"] != "earlier" {
		t.Errorf("exit %d, %d files, %d bytes: %s", r.code, len(got), len(got["long"]), r.stderr)
	}
}

// growing has a byte come to a file before it is put.
type growing struct {
	ctl.Store
	file string
	t    *testing.T
}

func (g *growing) PutFrom(ctx context.Context, k []byte, r io.Reader, size int64, o client.PutOptions) (uint64, error) {
	f, err := os.OpenFile(g.file, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		g.t.Fatal(err)
	}
	if _, err = f.WriteString("more"); err != nil {
		g.t.Fatal(err)
	}
	_ = f.Close()
	return g.Store.PutFrom(ctx, k, r, size, o)
}

// TestGrowingFile: what comes to a long file while it is put is no part of the value, and no reason to end an import.
func TestGrowingFile(t *testing.T) {
	e := newEnv(t, devstore.Options{CapacityBytes: 256 << 20, Providers: []string{"shm"}})
	dir := t.TempDir()
	file, want := filepath.Join(dir, "long"), strings.Repeat("x", 9<<20)
	writeFile(t, file, []byte(want))
	read := &env{t: t, flags: e.flags, now: e.now}
	e.wrap(func(s ctl.Store) ctl.Store { return &growing{s, file, t} })
	for key, args := range map[string][]string{"a/long": {"import", dir, "--prefix", "a/"},
		"b": {"put", "b", "--file", file}} {
		st, err := os.Stat(file)
		if err != nil {
			t.Fatal(err)
		}
		e.must("", args...)
		if got := read.must("", "get", key); len(got) != int(st.Size()) {
			t.Errorf("%s has %d bytes, want %d", key, len(got), st.Size())
		}
	}
}
