package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
)

// TestFolderOfOnePutBack: the data folder of one directory node of three is put back, and the only other one that knows
// what it has forgotten is dead. The two that are left are a majority that lacks what was acknowledged. Memory nodes
// know: nothing is granted, and the status says so. When the dead one comes back, it keeps what it has, and the
// directory goes on from its folder with all of it.
func TestFolderOfOnePutBack(t *testing.T) {
	u := newTrio(t, "m1", "m2")
	u.must(nil, "namespace", "create", "data", "--replicas", "2")
	fillKeys(t, u.open("data"), 0, 100, 1)
	u.stopDirs(syscall.SIGTERM, 1)
	backup := filepath.Join(t.TempDir(), "backup")
	u.copyData(backup)
	u.startDir(1, false, false)
	u.dirs[1].awaitReady()
	create := func(name string) {
		t.Helper()
		u.until("namespace "+name, func() bool {
			_, stderr, status := u.ctl(nil, "namespace", "create", name, "--replicas", "2")
			return status == 0 || strings.Contains(stderr, "exists")
		})
		fillKeys(t, u.open(name), 0, 100, 2)
	}
	create("early")
	u.stopDirs(syscall.SIGTERM, 2)
	create("newest") // d1 and d2 alone
	fillKeys(t, u.open("data"), 100, 200, 1)

	u.stopDirs(syscall.SIGKILL, 0, 1)
	u.putBackOne(1, backup)
	u.startDir(1, false, false)
	u.startDir(2, false, false)
	ahead := func() {
		t.Helper()
		u.until("the status to name it", func() bool {
			out, _, _ := u.ctl(nil, "status")
			return strings.Contains(string(out), "data folders are older")
		})
		if _, stderr, status := u.ctl(nil, "namespace", "create", "new"); status == 0 ||
			!strings.Contains(stderr, "nothing was done") {
			t.Errorf("a namespace was created: %d, %s", status, stderr)
		}
		if _, stderr, status := u.ctl([]byte("x"), "--namespace", "data", "--timeout", "5s", "put", "key 0"); status !=
			3 {
			t.Errorf("a put of a new session: exit status %d, %s", status, stderr)
		}
	}
	ahead()

	// d1 would be cut back.
	for range 2 {
		u.startDir(0, false, false)
		if status := u.dirs[0].wait(); status != 1 || !strings.Contains(u.dirs[0].stderr.String(),
			"the directory's other data folders are older than this one") {
			t.Fatalf("d1: exit status %d\n%s", status, u.dirs[0].stderr)
		}
	}
	ahead()

	// The status says which entry memory nodes were told of, which one folder has.
	out, _, _ := u.ctl(nil, "status")
	told := regexp.MustCompile(`told of entry (\d+), term (\d+)`).FindStringSubmatch(string(out))
	if told == nil {
		t.Fatalf("the status does not say what memory nodes were told\n%s", out)
	}
	u.stopDirs(syscall.SIGTERM, 1, 2)
	for n := range u.data {
		out, _ := u.recover(fmt.Sprint("d", n+1), u.data[n])
		led := regexp.MustCompile(`term ` + told[2] + ` up to entry (\d+)`).FindStringSubmatch(out)
		if has := led != nil && number(t, led[1]) >= number(t, told[1]); has != (n == 0) {
			t.Errorf("does the folder of d%d have entry %s of term %s: %v\n%s", n+1, told[1], told[2], has, out)
		}
	}
	u.recoverFrom(0)
	for _, name := range []string{"data", "early", "newest"} {
		c := u.open(name)
		u.serves(c)
		version, keys := 2, 100
		if name == "data" {
			version, keys = 1, 200
		}
		if j := judgeKeys(t, c, 0, keys, version); j.right != keys {
			t.Errorf("%s: %+v", name, j)
		}
		u.must(nil, "--namespace", name, "check")
	}
	create("after")
}

func number(t *testing.T, s string) (n int) {
	t.Helper()
	if _, err := fmt.Sscan(s, &n); err != nil {
		t.Fatal(err)
	}
	return n
}

// putBackOne puts a directory node's folder back from a copy of all.
func (u *trio) putBackOne(n int, from string) {
	u.t.Helper()
	if err := os.RemoveAll(u.data[n]); err != nil {
		u.t.Fatal(err)
	}
	u.copyFolder(filepath.Join(from, fmt.Sprint("d", n+1)), u.data[n])
}
