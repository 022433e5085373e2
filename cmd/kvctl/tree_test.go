package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/ctl/bulk"
	"github.com/kvd-project/kvd/internal/devstore"
)

// readTree is every regular file below dir by slash-separated path.
func readTree(t *testing.T, dir string) map[string]string {
	t.Helper()
	files := make(map[string]string)
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		b, err := os.ReadFile(p)
		rel, _ := filepath.Rel(dir, p)
		files[filepath.ToSlash(rel)] = string(b)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}

func writeFile(t *testing.T, p string, b []byte) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(p), 0o777); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(p, b, 0o666); err != nil {
		t.Fatal(err)
	}
}

func randomBytes(n int, seed uint64) []byte {
	b := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8)}).Read(b)
	return b
}

// sameTree compares by path, without printing megabytes.
func sameTree(t *testing.T, want, got map[string]string) {
	t.Helper()
	for p, v := range want {
		if g, ok := got[p]; !ok || g != v {
			t.Errorf("%q: %d bytes, want %d (present: %v)", p, len(g), len(v), ok)
		}
	}
	for p := range got {
		if _, ok := want[p]; !ok {
			t.Errorf("%q: not in the original", p)
		}
	}
}

func TestImportExport(t *testing.T) {
	for _, provider := range []string{"shm", "tcp", "sim"} {
		t.Run(provider, func(t *testing.T) {
			o := devstore.Options{Nodes: 2, CapacityBytes: 256 << 20}
			if provider == "sim" {
				o.Providers = []string{"sim"}
			}
			e := newEnv(t, o)
			if provider == "sim" {
				e.backend = func(a *ctl.App) (ctl.Backend, error) {
					r, err := ctl.NewRemote(a, e.store.Directory(), nil, e.store.Devices())
					return lent{r}, err
				}
			} else {
				e.flags = append(e.flags, "--provider", provider)
			}
			src := t.TempDir()
			rng := rand.New(rand.NewPCG(1, 1))
			for i := range 400 {
				writeFile(t, filepath.Join(src, "dir", string(rune('a'+i%7)), "f"+strings.Repeat("x", i%50)+
					string(rune('0'+i%10))), randomBytes(rng.IntN(6000), uint64(i)))
			}
			writeFile(t, filepath.Join(src, "empty"), nil)
			writeFile(t, filepath.Join(src, "not\xffutf8\nname"), []byte("v"))
			writeFile(t, filepath.Join(src, "long"), randomBytes(5<<20+17, 3)) // in chunks
			if err := os.Symlink("empty", filepath.Join(src, "link")); err != nil {
				t.Fatal(err)
			}
			if err := syscall.Mkfifo(filepath.Join(src, "pipe"), 0o600); err != nil {
				t.Fatal(err)
			}
			want := readTree(t, src)
			size := 0
			for _, v := range want {
				size += len(v)
			}

			var r bulk.TreeReport
			out := e.must("", "-o", "json", "import", src, "--prefix", "p/")
			if err := json.Unmarshal([]byte(out), &r); err != nil {
				t.Fatal(err)
			}
			if r.Files != int64(len(want)) || r.Bytes != int64(size) || r.Skipped != 2 || r.Refused != 0 ||
				r.Seconds <= 0 {
				t.Errorf("import: %+v, want %d files of %d bytes, 2 skipped", r, len(want), size)
			}
			e.must("x", "put", "elsewhere")

			dst := filepath.Join(t.TempDir(), "new", "folder")
			out = e.must("", "-o", "json", "export", dst, "--prefix", "p/")
			if err := json.Unmarshal([]byte(out), &r); err != nil {
				t.Fatal(err)
			}
			if r.Files != int64(len(want)) || r.Bytes != int64(size) || r.Skipped != 0 || r.Refused != 0 {
				t.Errorf("export: %+v, want %d files of %d bytes", r, len(want), size)
			}
			sameTree(t, want, readTree(t, dst))

			// Once more, over what is there.
			if r := e.run("", "export", dst, "--prefix", "p/"); r.code != ctl.ExitUsage ||
				!strings.Contains(r.stderr, "--overwrite") {
				t.Errorf("export into a full folder: %+v", r)
			}
			writeFile(t, filepath.Join(dst, "empty"), []byte("stale"))
			e.must("", "export", dst, "--prefix", "p/", "--overwrite")
			sameTree(t, want, readTree(t, dst))

			if out := e.must("", "check"); !strings.Contains(out, "ok") {
				t.Error(out)
			}
		})
	}
}

// lent is a remote whose devices are another's.
type lent struct{ *ctl.Remote }

func (l lent) Close() error {
	l.Devices = nil
	return l.Remote.Close()
}

func TestExportRefusesUnsafeKeys(t *testing.T) {
	e := newEnv(t, devstore.Options{CapacityBytes: 128 << 20})
	unsafe := []string{"/etc/x", "../x", "a/../../x", "a/..", "..", ".", "a//b", "a/", "./a", "a\x00b", "a/./b"}
	for _, k := range append(unsafe, "fine", "deep/er") {
		e.must("v", "--hex", "put", hexOf("p/"+k))
	}
	e.must("v", "put", "p/") // nothing is left behind the prefix
	e.must("v", "put", "file")
	outside := t.TempDir()
	dst := filepath.Join(outside, "dst")
	r := e.run("", "-o", "json", "export", dst, "--prefix", "p/")
	var rep bulk.TreeReport
	if err := json.Unmarshal([]byte(r.stdout), &rep); err != nil {
		t.Fatalf("%v: %+v", err, r)
	}
	if r.code != ctl.ExitNo || rep.Files != 2 || rep.Refused != int64(len(unsafe)+1) {
		t.Errorf("exit %d, %+v; want %d refused", r.code, rep, len(unsafe)+1)
	}
	if n := strings.Count(r.stderr, "refused: "); n != 10 {
		t.Errorf("%d keys named on stderr, want 10:\n%s", n, r.stderr)
	}
	if got := readTree(t, outside); len(got) != 2 || got["dst/fine"] != "v" || got["dst/deep/er"] != "v" {
		t.Errorf("files %q", got)
	}
}

// A collection is no file, and the keys around it are all written.
func TestExportRefusesCollections(t *testing.T) {
	e := newEnds(t)
	ops := []client.Op{{Key: []byte("hash"), Value: []byte("as the gateway has it"), Type: client.Hash},
		{Key: []byte("list"), Value: []byte("too"), Type: client.List}}
	for i := range 100 {
		ops = append(ops, client.Op{Key: fmt.Append(nil, "plain", i), Value: []byte("v")})
	}
	put(t, e.src, ops...)
	dst := t.TempDir()
	r := e.run("", "--context", "src", "-o", "json", "export", dst)
	var rep bulk.TreeReport
	if err := json.Unmarshal([]byte(r.stdout), &rep); err != nil {
		t.Fatalf("%v: %+v", err, r)
	}
	if r.code != ctl.ExitNo || rep.Files != 100 || rep.Refused != 2 ||
		strings.Count(r.stderr, "a collection, which no file can be") != 2 {
		t.Errorf("%+v %+v", r, rep)
	}
}

// A symbolic link in the way leads nowhere outside.
func TestExportDoesNotFollowLinks(t *testing.T) {
	e := newEnv(t, devstore.Options{CapacityBytes: 128 << 20})
	e.must("v", "put", "p/sub/file")
	outside, dst := t.TempDir(), t.TempDir()
	if err := os.Symlink(outside, filepath.Join(dst, "sub")); err != nil {
		t.Fatal(err)
	}
	if r := e.run("", "export", dst, "--prefix", "p/", "--overwrite"); r.code == ctl.ExitOK {
		t.Errorf("%+v", r)
	}
	if got := readTree(t, outside); len(got) != 0 {
		t.Errorf("written outside: %q", got)
	}
}

// A key below another key cannot be a file, and the rest goes on.
func TestExportFileAndFolder(t *testing.T) {
	e := newEnv(t, devstore.Options{CapacityBytes: 128 << 20})
	for _, k := range []string{"p/a", "p/a/b", "p/c"} {
		e.must("v", "put", k)
	}
	dst := t.TempDir()
	r := e.run("", "-o", "json", "export", dst, "--prefix", "p/")
	var rep bulk.TreeReport
	if err := json.Unmarshal([]byte(r.stdout), &rep); err != nil {
		t.Fatalf("%v: %+v", err, r)
	}
	if r.code != ctl.ExitNo || rep.Files != 2 || rep.Refused != 1 || !strings.Contains(r.stderr,
		"cannot be a file here") {
		t.Errorf("%+v %+v", r, rep)
	}
}

func TestImportRefuses(t *testing.T) {
	e := newEnv(t, devstore.Options{CapacityBytes: 128 << 20})
	dir := t.TempDir()
	f, err := os.Create(filepath.Join(dir, "huge"))
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(f.Truncate(client.MaxValueLen+1), f.Close()); err != nil {
		t.Fatal(err)
	}
	if r := e.run("", "import", dir); r.code != ctl.ExitOther ||
		!strings.Contains(r.stderr, `"huge": file of 536870913 bytes, at most 512 MiB fit`) {
		t.Errorf("%+v", r)
	}
	if r := e.run("", "import", filepath.Join(dir, "nothing")); r.code != ctl.ExitOther ||
		!strings.Contains(r.stderr, "no such file") {
		t.Errorf("%+v", r)
	}
	if r := e.run("", "import", filepath.Join(dir, "huge")); r.code != ctl.ExitOther {
		t.Errorf("%+v", r)
	}
	long := t.TempDir()
	writeFile(t, filepath.Join(long, "file"), []byte("v"))
	if r := e.run("", "import", long, "--prefix", strings.Repeat("p", client.MaxKeyLen-3)); r.code != ctl.ExitOther ||
		!strings.Contains(r.stderr, "key of 65536 bytes") {
		t.Errorf("exit %d", r.code)
	}
}

// A full store says so, and nothing is overwritten.
func TestImportIntoFullStore(t *testing.T) {
	e := newEnv(t, devstore.Options{CapacityBytes: 64 << 20})
	e.must("", "namespace", "create", "small", "--bytes", "32MiB")
	e.flags = append(e.flags, "--namespace", "small", "--timeout", "2s")
	e.must("first", "put", "p/000")
	dir := t.TempDir()
	for i := range 40 {
		writeFile(t, filepath.Join(dir, string(rune('a'+i%26))+string(rune('a'+i/26))),
			bytes.Repeat([]byte{byte(i)}, 1<<20))
	}
	r := e.run("", "import", dir, "--prefix", "p/")
	if r.code != ctl.ExitUnavailable || !strings.Contains(r.stderr, "full") {
		t.Errorf("%+v", r)
	}
	if got := e.must("", "get", "p/000"); got != "first" {
		t.Errorf("p/000 is %q", got)
	}
	if r := e.run("", "check"); r.code != ctl.ExitOK {
		t.Errorf("%+v", r)
	}
}

func hexOf(s string) string {
	const digits = "0123456789abcdef"
	var b strings.Builder
	for i := range len(s) {
		b.WriteByte(digits[s[i]>>4])
		b.WriteByte(digits[s[i]&15])
	}
	return b.String()
}
