package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/ctl/bulk"
	"github.com/kvd-project/kvd/internal/devstore"
	"github.com/kvd-project/kvd/internal/dirpb"
)

// TestSnapshot goes from one namespace through a folder and a copy of it to a new one of other shards, with a tree of
// files beside keys of every type.
func TestSnapshot(t *testing.T) {
	e := newEnv(t, devstore.Options{CapacityBytes: 512 << 20, Namespaces: []devstore.Namespace{{Name: "default"},
		{Name: "src", Mode: dirpb.NamespaceMode_NAMESPACE_STORE, BytesPerNode: 64 << 20},
		{Name: "cache", Mode: dirpb.NamespaceMode_NAMESPACE_CACHE, BytesPerNode: 32 << 20}}})
	src := open(t, e, "src")
	var ops []client.Op
	for i := range 300 {
		op := client.Op{Key: fmt.Appendf(nil, "key:%d", i), Value: randomBytes(i, uint64(i)), Type: client.Type(i % 6),
			Flags: uint32(i % 4), Note: uint64(i % 3)}
		if i%5 == 0 {
			op.Expires = time.Now().Add(time.Hour)
		}
		ops = append(ops, op)
	}
	put(t, src, ops...)
	tree := t.TempDir()
	for i := range 40 {
		name := filepath.Join(tree, fmt.Sprint("folder", i%3), fmt.Sprint("file", i))
		writeFile(t, name, randomBytes(i*i*10, uint64(i)))
	}
	e.must("", "--namespace", "src", "import", tree, "--prefix", "tree/")
	dir := t.TempDir()
	at, other := "file://"+dir+"/a", "file://"+dir+"/b"

	var made struct {
		ID      string
		Keys    int64
		LeftOut int64 `json:"left_out"`
	}
	if err := json.Unmarshal([]byte(e.must("", "-o", "json", "snapshot", "create", "src", "--to", at, "--rate",
		"1GiB/s")), &made); err != nil || made.Keys != 340 || made.LeftOut != 0 {
		t.Fatalf("%+v, %v", made, err)
	}
	e.must("", "snapshot", "copy", "src", made.ID, "--from", at, "--to", other)
	for _, where := range []string{at, other} {
		if text := e.must("", "snapshot", "verify", "src", "--from", where); !strings.Contains(text, "340 keys") {
			t.Errorf("verify says %q", text)
		}
		for _, args := range [][]string{{"list"}, {"list", "src"}, {"show", "src"}, {"show", "src", made.ID}} {
			if text := e.must("", append(append([]string{"snapshot"}, args...), "--from", where)...); !strings.Contains(
				text, made.ID) {
				t.Errorf("%v says %q", args, text)
			}
		}
	}
	e.must("", "--namespace", "dst", "snapshot", "restore", "src", "--from", other, "--bytes", "32MiB", "--shards", "8",
		"--progress", filepath.Join(dir, "progress"))
	want, got := contents(t, src), contents(t, open(t, e, "dst"))
	for k, it := range want {
		if !bulk.SameItem(it, got[k]) || it.Version != got[k].Version {
			t.Errorf("%.40q: version %d, want %d", k, got[k].Version, it.Version)
		}
	}
	if len(got) != len(want) {
		t.Errorf("%d keys, want %d", len(got), len(want))
	}
	out := filepath.Join(dir, "tree")
	e.must("", "--namespace", "dst", "export", out, "--prefix", "tree/")
	sameTree(t, readTree(t, tree), readTree(t, out))
	e.snapshotAnswers(at, made.ID)
}

// snapshotAnswers looks at exit statuses: what is refused, and what is missing.
func (e *env) snapshotAnswers(at, id string) {
	e.t.Helper()
	answer := func(code int, says string, args ...string) {
		e.t.Helper()
		if got := e.run("", args...); got.code != code || !strings.Contains(got.stdout+got.stderr, says) {
			e.t.Errorf("%q: exit %d, want %d with %q: %s%s", args, got.code, code, says, got.stdout, got.stderr)
		}
	}
	restore := func(to string, more ...string) []string {
		return append([]string{"--namespace", to, "snapshot", "restore", "src", "--from", at}, more...)
	}
	e.must("", "--namespace", "dst", "del", "key:1")
	e.must("", "--namespace", "dst", "put", "key:2", "other")
	answer(ctl.ExitNo, "missing", "snapshot", "verify", "src", "--from", at, "--against", "dst")
	answer(ctl.ExitOK, `"restored":1,`, append([]string{"-o", "json"}, restore("dst", "--if-absent")...)...)
	answer(ctl.ExitOK, `"newer":1,`, "-o", "json", "snapshot", "verify", "src", "--from", at, "--against", "dst")
	answer(ctl.ExitOK, `"restored":1,"fresh_versions":1,`, append([]string{"-o", "json"}, restore("dst",
		"--overwrite")...)...)
	answer(ctl.ExitNo, "a cache evicts", restore("cache")...)
	answer(ctl.ExitUsage, "want --namespace", "snapshot", "restore", "src", "--from", at)
	answer(ctl.ExitUsage, "want --bytes", restore("new", "--shards", "4")...)
	answer(ctl.ExitNo, "create namespace", restore("dst", "--bytes", "32MiB")...)
	answer(ctl.ExitUsage, "unknown namespace", restore("new")...)
	answer(ctl.ExitUsage, "if-absent", restore("dst", "--if-absent", "--overwrite")...)
	answer(ctl.ExitUsage, "--rate", "snapshot", "create", "src", "--to", at, "--rate", "fast")
	answer(ctl.ExitUsage, "to", "snapshot", "create", "src")
	answer(ctl.ExitUsage, "want --keep-last", "snapshot", "prune", "src", "--from", at)
	answer(ctl.ExitOther, "no id", "snapshot", "show", "src", "../"+id, "--from", at)
	answer(ctl.ExitOther, "want file:", "snapshot", "list", "--from", "ftp://me:secret@bucket")

	everything := strings.TrimSuffix(at, "/a") + "/all"
	answer(ctl.ExitOK, "cache", "snapshot", "create", "--all", "--to", everything)
	answer(ctl.ExitUsage, "--all", "snapshot", "create", "src", "--all", "--to", everything)
	answer(ctl.ExitUsage, "not with --all", "--namespace", "src", "snapshot", "restore", "--all", "--from", everything)
	e.must("", "namespace", "delete", "dst", "--yes=dst", "--end-sessions")
	answer(ctl.ExitUsage, "unknown namespace", "snapshot", "restore", "--all", "--from", everything)
	answer(ctl.ExitOK, `"restored":340,`, "-o", "json", "snapshot", "restore", "--all", "--from", everything, "--bytes",
		"32MiB")
	answer(ctl.ExitOK, `"missing":0,`, "-o", "json", "snapshot", "verify", "src", "--from", at, "--against", "dst")

	e.must("", "snapshot", "create", "src", "--to", at)
	answer(ctl.ExitOK, "would be removed", "snapshot", "prune", "src", "--from", at, "--keep-last", "1", "--dry-run")
	answer(ctl.ExitOK, id, "snapshot", "prune", "src", "--from", at, "--keep-last", "1")
	answer(ctl.ExitOther, id, "snapshot", "show", "src", id, "--from", at)
	files, err := filepath.Glob(strings.TrimPrefix(at, "file://") + "/src/*/seg-*.kvs")
	if err != nil || len(files) == 0 {
		e.t.Fatalf("%v, %v", files, err)
	}
	b, err := os.ReadFile(files[0])
	if err != nil {
		e.t.Fatal(err)
	}
	b[len(b)/2] ^= 1
	if err := os.WriteFile(files[0], b, 0o666); err != nil {
		e.t.Fatal(err)
	}
	answer(ctl.ExitOther, "damaged at offset", "snapshot", "verify", "src", "--from", at)
	answer(ctl.ExitOther, "damaged at offset", restore("dst")...)
}
