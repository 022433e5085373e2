package e2e

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvd-project/kvd/internal/keeper/keepertest"
)

// TestMemoryPath ends the process that serves the only copy, under load, by SIGKILL and by SIGTERM: the next one has
// every key from the folder. Nobody else may have the folder meanwhile, SIGINT empties it, and another memory node's
// files are given up.
func TestMemoryPath(t *testing.T) {
	w := newWorld(t)
	w.dir = freeAddr(t)
	w.start(w.directory(t.TempDir(), freeAddr(t))...)
	folder := filepath.Join(keepertest.Folder(t), "m1") // it makes that
	memnode := func(name, addr string) []string {
		return append(w.memnode(name), "--listen-tcp", addr, "--memory-path", folder)
	}
	addr := freeAddr(t)
	regions := func() int {
		t.Helper()
		files, err := filepath.Glob(folder + "/region.*")
		if err != nil {
			t.Fatal(err)
		}
		return len(files)
	}
	m := w.start(memnode("m1", addr)...)
	if pid, ok := workerOf(m.cmd.Process.Pid); ok {
		t.Fatalf("it has a worker, %d", pid)
	}
	w.must(nil, "namespace", "create", "one", "--replicas", "1")
	x := w.writers("tcp", "one", 4, 50)
	x.serves(w)
	for n, sig := range []syscall.Signal{syscall.SIGKILL, syscall.SIGTERM, syscall.SIGKILL, syscall.SIGTERM} {
		began := time.Now()
		m.signal(sig)
		m = w.start(memnode("m1", addr)...)
		x.serves(w)
		t.Logf("%v %d: puts are answered again after %v", sig, n+1, time.Since(began).Round(time.Millisecond))
		if !strings.Contains(m.stderr.String(), "memory kept by the keeper is taken over") {
			t.Errorf("%v: the memory was not taken over\n%s", sig, m.stderr)
		}
	}
	other := w.spawn(memnode("m2", freeAddr(t))...)
	if status := other.wait(); status != 1 || !strings.Contains(other.stderr.String(), "memory-path: "+folder+
		": folder is another process's") {
		t.Errorf("a second memory node with the folder: exit status %d\n%s", status, other.stderr)
	}
	if lost := x.end(); lost != 0 {
		t.Errorf("%d keys were lost", lost)
	}
	w.must(nil, "--namespace", "one", "check")
	if regions() == 0 {
		t.Error("there are no files, so nothing was shown")
	}
	if status := m.signal(syscall.SIGINT); status != 0 ||
		!strings.Contains(m.stderr.String(), "memory node left the directory") || regions() != 0 {
		t.Errorf("exit status %d after SIGINT, %d regions are left\n%s", status, regions(), m.stderr)
	}

	m = w.start(memnode("m1", addr)...)
	w.must([]byte("v"), "put", "k")
	m.signal(syscall.SIGKILL)
	m = w.start(memnode("m2", addr)...)
	w.until("the files of another memory node to go", func() bool {
		return strings.Contains(m.stderr.String(), "reason=stranger")
	})
	if n := regions(); n != 0 {
		t.Errorf("%d regions of another memory node are left\n%s", n, m.stderr)
	}
}

// TestMemoryPathPutBack: a folder that was copied while no process had it, and is put back after another process has
// registered and stored more, is not served: its keys are lost, not of an earlier time. The copy is kept aside.
func TestMemoryPathPutBack(t *testing.T) {
	w := newWorld(t)
	w.dir = freeAddr(t)
	w.start(w.directory(t.TempDir(), freeAddr(t))...)
	folder := filepath.Join(keepertest.Folder(t), "m1")
	m := func() *daemon { return w.start(append(w.memnode("m1"), "--memory-path", folder)...) }
	d := m()
	w.must(nil, "namespace", "create", "one", "--replicas", "1")
	w.must([]byte("old"), "--namespace", "one", "put", "k")
	d.signal(syscall.SIGTERM)
	earlier := folder + "-copy"
	if err := exec.Command("cp", "-a", folder, earlier).Run(); err != nil {
		t.Fatal(err)
	}
	d = m()
	w.must([]byte("new"), "--namespace", "one", "put", "k")
	d.signal(syscall.SIGTERM)
	if err := errors.Join(os.RemoveAll(folder), exec.Command("cp", "-a", earlier, folder).Run()); err != nil {
		t.Fatal(err)
	}
	d = m()
	if out, _, status := w.ctl(nil, "--namespace", "one", "get", "k"); status == 0 {
		t.Errorf("a get gives %q\n%s", out, d.stderr)
	}
	w.until("the reason", func() bool { return strings.Contains(d.stderr.String(), "reason=putback") })
	aside, err := filepath.Glob(folder + "/rescue.region.*")
	if err != nil || len(aside) == 0 {
		t.Errorf("kept aside are %q, %v", aside, err)
	}
	w.must([]byte("next"), "--namespace", "one", "put", "k")
	d.signal(syscall.SIGTERM)
	d = m()
	if out := w.must(nil, "--namespace", "one", "get", "k"); string(out) != "next" {
		t.Errorf("a get gives %q\n%s", out, d.stderr)
	}
	d.signal(syscall.SIGINT)
	if left, err := filepath.Glob(folder + "/r*"); err != nil || len(left) != 0 {
		t.Errorf("after SIGINT there are %q, %v", left, err)
	}
}

// TestMemoryPathRefused: folders that memory cannot be in, with the reason.
func TestMemoryPathRefused(t *testing.T) {
	w := newWorld(t)
	w.dir = freeAddr(t)
	folder := keepertest.Folder(t)
	open := keepertest.Folder(t)
	if err := os.Chmod(open, 0o750); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(folder, link); err != nil {
		t.Fatal(err)
	}
	disk, err := filepath.Abs(".") // of another kind wherever sources lie
	if err != nil {
		t.Fatal(err)
	}
	if disk, err = os.MkdirTemp(disk, "testdata-"); err != nil {
		t.Fatal(err)
	}
	defer os.Remove(disk)
	for what, c := range map[string]struct {
		args []string
		want string
	}{
		"a symbolic link": {[]string{"--memory-path", link}, "no symbolic link"},
		"mode 0750":       {[]string{"--memory-path", open}, "its mode is 0750, want 0700"},
		"nothing above":   {[]string{"--memory-path", folder + "/none/m1"}, "no such file or directory"},
		"no folder":       {[]string{"--memory-path", "/proc/self/stat"}, "not a directory"},
		"no tmpfs":        {[]string{"--memory-path", disk}, "want a tmpfs or a hugetlbfs"},
		"huge pages":      {[]string{"--memory-path", folder, "--huge-pages", "2MiB"}, "want a hugetlbfs"},
		"too much":        {[]string{"--memory-path", folder, "--memory", "512TiB"}, "enlarge it, or lend less"},
	} {
		d := w.spawn(append(w.memnode("m1"), c.args...)...)
		if status := d.wait(); status != 1 || !strings.Contains(d.stderr.String(), c.want) {
			t.Errorf("%s: exit status %d, want %q in\n%s", what, status, c.want, d.stderr)
		}
	}
	d := w.spawn(append(w.memnode("m1"), "--memory-path", folder, "--shm-socket", "@kvd")...)
	if status := d.wait(); status != 2 || !strings.Contains(d.stderr.String(), "no seals") {
		t.Errorf("shm: exit status %d\n%s", status, d.stderr)
	}
}
