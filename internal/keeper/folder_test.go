package keeper

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvd-project/kvd/internal/keeper/keepertest"
)

func openFolder(t *testing.T, dir string) (*Folder, *signalled) {
	t.Helper()
	log := &signalled{c: make(chan struct{}, 32)}
	f, err := OpenFolder(t.Context(), dir, 0, slog.New(slog.NewTextHandler(log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() }) // for some the second time
	return f, log
}

// signalled tells of lines that a logger wrote.
type signalled struct {
	b bytes.Buffer // read after a line was told of, or at the end
	c chan struct{}
}

func (s *signalled) Write(b []byte) (int, error) {
	s.b.Write(b)
	s.c <- struct{}{}
	return len(b), nil
}

// TestFolder: an item is there for the next that opens the folder, until it is dropped; files of others are neither
// items nor removed.
func TestFolder(t *testing.T) {
	dir := filepath.Join(keepertest.Folder(t), "m1") // it is made
	f, _ := openFolder(t, dir)
	file, err := f.Create("region/1/ab")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if _, err := file.WriteString("still there"); err != nil {
		t.Fatal(err)
	}
	if err := f.Put("region/1/ab", nil, int(file.Fd())); err != nil {
		t.Error(err)
	}
	other := memfd(t, "x")
	beside, err := f.Create("region/2/ab")
	if err != nil {
		t.Fatal(err)
	}
	defer beside.Close()
	for what, err := range map[string]error{
		"another file": f.Put("region/1/ab", nil, other), "the file of another": f.Put("region/1/ab", nil,
			int(beside.Fd())), "no file": f.Put("state", nil, other),
		"meta":          f.Put("region/1/ab", []byte("m"), int(file.Fd())),
		"no descriptor": f.Put("region/1/ab", nil), "a path": f.Put("../x", nil, other),
		"the owner": f.Put(ownerLink, nil, other),
	} {
		if !errors.Is(err, ErrRefused) {
			t.Errorf("put of %s: %v", what, err)
		}
	}
	if _, err := f.Create("region/1/ab"); !errors.Is(err, os.ErrExist) {
		t.Errorf("a second file of the name: %v", err)
	}
	for _, name := range []string{"", "/", "a/", "a.b", "A", "..", "a/../b", ownerLink, strings.Repeat("a", 300)} {
		if _, err := f.Create(name); !errors.Is(err, ErrRefused) {
			t.Errorf("create %q: %v", name, err)
		}
	}
	if err := errors.Join(f.Drop("region/2/ab"), f.Close()); err != nil {
		t.Fatal(err)
	}

	others := map[string]os.FileMode{"Strange": 0o600, "region.2.cd": 0o644, "region.7.ab": 0o620, "region.8.ab": 0o602,
		"region.9.ab": 0o622, "region.10.ab": 0o700}
	for name, mode := range others {
		if err := errors.Join(os.WriteFile(filepath.Join(dir, name), []byte("x"), mode),
			os.Chmod(filepath.Join(dir, name), mode)); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(os.Symlink(filepath.Join(dir, "region.1.ab"), filepath.Join(dir, "region.3.ef")),
		os.Mkdir(filepath.Join(dir, "region.4.ab"), 0o700),
		unix.Mkfifo(filepath.Join(dir, "region.5.ab"), 0o600), os.WriteFile(filepath.Join(dir, "region.11.ab"), nil,
			0o600), os.Link(filepath.Join(dir, "region.11.ab"), filepath.Join(dir, "region.6.ab"))); err != nil {
		t.Fatal(err)
	}
	f, log := openFolder(t, dir)
	items, err := f.List()
	if err != nil {
		t.Fatal(err)
	}
	if len(items) != 1 || items[0].Name != "region/1/ab" || !items[0].File ||
		content(items[0].FDs[0]) != "still there" {
		t.Errorf("%d items: %+v", len(items), items)
	}
	for _, i := range items {
		i.Close()
	}
	if n := strings.Count(log.b.String(), "left alone"); n != 11 {
		t.Errorf("%d of 11 files of others are told of:\n%s", n, &log.b)
	}
	if err := os.WriteFile(filepath.Join(dir, "state"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	where, err := f.Rename("region/1/ab", "rescue/region/1/ab")
	if b, rerr := os.ReadFile(where); err != nil || rerr != nil || string(b) != "still there" ||
		where != filepath.Join(dir, "rescue.region.1.ab") {
		t.Errorf("renamed to %q, with %q: %v, %v", where, b, err, rerr)
	}
	for _, names := range [][2]string{{"rescue/region/1/ab", "state"}, {"region/1/ab", "x"}, {"state", "../x"},
		{"state", ownerLink}, {ownerLink, "x"}} {
		if _, err := f.Rename(names[0], names[1]); err == nil {
			t.Errorf("renamed: %q", names)
		}
	}
	if _, err := f.Rename("rescue/region/1/ab", "region/1/ab"); err != nil {
		t.Error(err)
	}
	if err := f.Drop("region/1/ab"); err != nil {
		t.Error(err)
	}
	if err := f.Drop("region/1/ab"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a second drop: %v", err)
	}
	if _, err := os.Stat(filepath.Join(dir, "Strange")); err != nil {
		t.Error(err)
	}
}

// TestFolderOfOthers: a folder that others may reach is refused, and left as it is.
func TestFolderOfOthers(t *testing.T) {
	dir := keepertest.Folder(t)
	for _, mode := range []os.FileMode{0o720, 0o702, 0o740, 0o704, 0o710, 0o701, 0o777} {
		if err := os.Chmod(dir, mode); err != nil {
			t.Fatal(err)
		}
		_, err := OpenFolder(t.Context(), dir, 0, slog.Default())
		if entries, rerr := os.ReadDir(dir); !errors.Is(err, ErrFolder) || rerr != nil || len(entries) != 0 {
			t.Errorf("mode %o: %v; it has %v, %v", mode, err, entries, rerr)
		}
	}
	if err := os.Chmod(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := OpenFolder(t.Context(), dir, 2<<20, slog.Default()); !errors.Is(err, ErrFolder) ||
		!strings.Contains(err.Error(), "hugetlbfs") {
		t.Errorf("huge pages on a tmpfs: %v", err)
	}
	f, _ := openFolder(t, dir)
	if err := f.Close(); err != nil {
		t.Error(err)
	}
}

// TestFolderOfAnotherUser: neither a folder nor a file of another user's is memory, though this process could write to
// it.
func TestFolderOfAnotherUser(t *testing.T) {
	dir := keepertest.Folder(t)
	file := filepath.Join(dir, "region.1.ab")
	if err := os.WriteFile(file, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	const nobody = 65534
	if err := os.Chown(file, nobody, nobody); err != nil {
		if os.Getenv("CI") != "" {
			t.Fatal(err)
		}
		t.Skipf("files of others are made by root: %v", err)
	}
	f, log := openFolder(t, dir)
	items, err := f.List()
	if err != nil || len(items) != 0 || !strings.Contains(log.b.String(), "left alone") {
		t.Errorf("%d items of another user's, %v", len(items), err)
	}
	for _, i := range items {
		i.Close()
	}
	if err := errors.Join(f.Close(), os.Chown(dir, nobody, nobody)); err != nil {
		t.Fatal(err)
	}
	if _, err := OpenFolder(t.Context(), dir, 0, slog.Default()); !errors.Is(err, ErrFolder) {
		t.Errorf("a folder of another user's: %v", err)
	}
}

// TestFolderIsOnes: a folder has one process, which is told who has it; the next waits until that one has ended, though
// its lock is gone before.
func TestFolderIsOnes(t *testing.T) {
	dir := keepertest.Folder(t)
	f, _ := openFolder(t, dir)
	me := fmt.Sprintf("%d-", os.Getpid())
	if _, err := OpenFolder(t.Context(), dir, 0, slog.Default()); !errors.Is(err, ErrFolderInUse) ||
		!strings.Contains(err.Error(), me) {
		t.Errorf("a second process: %v", err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	child := exec.Command("sleep", "1000")
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	name, err := processNamed(child.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(dir, ownerLink)
	owned := func(by string) {
		t.Helper()
		if err := errors.Join(os.Remove(link), os.Symlink(by, link)); err != nil {
			t.Fatal(err)
		}
	}
	owned(name)
	log := &signalled{c: make(chan struct{}, 8)}
	opened := make(chan error)
	go func() {
		f, err := OpenFolder(t.Context(), dir, 0, slog.New(slog.NewTextHandler(log, nil)))
		if err == nil {
			err = f.Close()
		}
		opened <- err
	}()
	select {
	case err := <-opened:
		_ = child.Process.Kill()
		t.Fatalf("opened while its process lives: %v", err)
	case <-log.c:
		if !strings.Contains(log.b.String(), "has not ended") {
			t.Error(&log.b)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := (&Folder{log: slog.New(slog.DiscardHandler)}).ended(ctx, name, name[:1]+name); err != context.Canceled {
		t.Errorf("waiting for it is over: %v", err)
	}
	_ = child.Process.Kill() // and it stays a zombie: that is an end, too
	if err := <-opened; err != nil {
		t.Error(err)
	}
	_ = child.Wait() // killed
	// Neither a name of another kind, nor of a process of the same number or of another pid namespace holds it up.
	for _, by := range []string{"x", name, fmt.Sprintf("%d-1-1", os.Getpid()),
		fmt.Sprintf("%d-1-%s", os.Getpid(), name[strings.LastIndexByte(name, '-')+1:])} {
		owned(by)
		f, _ := openFolder(t, dir)
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	}
}

// TestEarlierWorker: a keeper starts no worker before that of the keeper before it has ended.
func TestEarlierWorker(t *testing.T) {
	s := newStandIn(t, 64)
	k, _ := s.keeper(nil)
	child := exec.Command("sleep", "1000")
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	if ok, err := k.noteWorker(child.Process.Pid); err != nil || !ok {
		t.Fatal(ok, err)
	}
	k.closeAll(true)
	fds, names := s.restart()
	log := &signalled{c: make(chan struct{}, 8)}
	d, err := newSystemd(s.socket, 64, fds, names, slog.New(slog.NewTextHandler(log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	k = &store{out: d}
	taken := make(chan error)
	go func() { taken <- k.takeOver(t.Context(), Options{Vital: "v/", Logger: d.log}) }()
	select {
	case err := <-taken:
		t.Errorf("taken over while the worker lives: %v", err)
	case <-log.c:
		if !strings.Contains(log.b.String(), "has not ended") {
			t.Error(&log.b)
		}
		_ = child.Process.Kill()
		if err := <-taken; err != nil {
			t.Error(err)
		}
	}
	_ = child.Wait() // killed
	if got := k.text(); got != "" {
		t.Errorf("held: %s", got)
	}
	k.closeAll(false)
}
