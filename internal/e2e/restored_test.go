package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
)

// trio is a directory of three nodes, each with a data folder, and memory nodes.
type trio struct {
	*world
	data, addrs, raft [3]string
	dirs              [3]*daemon
	joinAt            string
}

func newTrio(t *testing.T, memnodes ...string) *trio {
	u := &trio{world: newWorld(t)}
	root := t.TempDir()
	for n := range u.dirs {
		u.data[n], u.addrs[n], u.raft[n] = filepath.Join(root, fmt.Sprint("d", n+1)), freeAddr(t), freeAddr(t)
	}
	u.dir, u.joinAt = strings.Join(u.addrs[:], ","), u.addrs[0]
	for n := range u.dirs {
		u.startDir(n, n == 0, n > 0)
	}
	for _, name := range memnodes {
		u.start(u.memnode(name)...)
	}
	return u
}

// startDir starts a directory node, as the first of a cluster, to join the first, or with what its folder has.
func (u *trio) startDir(n int, bootstrap, join bool) {
	u.t.Helper()
	args := []string{"directory", "--id", fmt.Sprint("d", n+1), "--data-dir", u.data[n], "--listen", u.addrs[n],
		"--raft-listen", u.raft[n],
		"--lease", "3s", "--election-timeout", "500ms"}
	if bootstrap {
		args = append(args, "--bootstrap")
	}
	if join {
		args = append(args, "--join", u.joinAt)
	}
	u.dirs[n] = u.spawn(args...)
	if bootstrap || join {
		u.dirs[n].awaitReady()
	}
}

// stopDirs ends directory nodes.
func (u *trio) stopDirs(s syscall.Signal, which ...int) {
	u.t.Helper()
	for _, n := range which {
		u.dirs[n].signal(s)
	}
}

func (u *trio) copyData(to string) {
	u.t.Helper()
	if err := os.Mkdir(to, 0o700); err != nil {
		u.t.Fatal(err)
	}
	for n, from := range u.data {
		u.copyFolder(from, filepath.Join(to, fmt.Sprint("d", n+1)))
	}
}

func (u *trio) copyFolder(from, to string) {
	u.t.Helper()
	if out, err := exec.Command("cp", "-a", from, to).CombinedOutput(); err != nil {
		u.t.Fatalf("%v\n%s", err, out)
	}
}

func (u *trio) putBack(from string) {
	u.t.Helper()
	for n := range u.data {
		u.putBackOne(n, from)
	}
}

func (u *trio) open(namespace string, opTimeout ...time.Duration) *client.Client {
	u.t.Helper()
	limit := patience
	if len(opTimeout) > 0 {
		limit = opTimeout[0]
	}
	ctx, cancel := context.WithTimeout(u.t.Context(), patience)
	defer cancel()
	c, err := client.Open(ctx, client.Options{Directory: u.addrs[:], Provider: "tcp", Namespace: namespace,
		OpTimeout: limit})
	if err != nil {
		u.t.Fatal(err)
	}
	u.t.Cleanup(func() { c.Close() })
	return c
}

func value(key, version int) string {
	return fmt.Sprintf("%d/%d/", key, version) + strings.Repeat("v", 600+key%300)
}

// fillKeys puts keys of a version, and wants all of it acknowledged.
func fillKeys(t *testing.T, c *client.Client, from, to, version int) {
	t.Helper()
	for k := from; k < to; k += 100 {
		for i := k; i < min(k+100, to); i++ {
			if _, err := c.Put(t.Context(), fmt.Appendf(nil, "key %d", i), []byte(value(i, version)),
				client.PutOptions{}); err != nil {
				t.Fatalf("key %d: %v", i, err)
			}
		}
	}
}

// judged counts what became of keys that should have one of some versions.
type judged struct{ right, missing, failed int }

// judgeKeys reads keys; a value that nobody put there fails the test.
func judgeKeys(t *testing.T, c *client.Client, from, to int, versions ...int) (j judged) {
	t.Helper()
	for k := from; k < to; k++ {
		i, err := c.Get(t.Context(), fmt.Appendf(nil, "key %d", k))
		ok := false
		for _, v := range versions {
			ok = ok || string(i.Value) == value(k, v)
		}
		switch {
		case errors.Is(err, client.ErrNotFound):
			j.missing++
		case err != nil:
			if j.failed++; j.failed < 5 {
				t.Logf("key %d: %v", k, err)
			}
		case ok:
			j.right++
		default:
			t.Errorf("key %d is %.40q", k, i.Value)
		}
	}
	return j
}

// TestFoldersPutBack: the data folders of all directory nodes are put back from a copy that is older than what the
// memory nodes hold. The directory grants nothing of it, since memory that it takes for free is in use, and says so;
// clients read on until their leases end. Recovered from one folder, it serves again, and no key has a value that
// nobody put there.
func TestFoldersPutBack(t *testing.T) {
	const keys, more = 2000, 4000
	u := newTrio(t, "m1", "m2")
	u.must(nil, "namespace", "create", "data", "--replicas", "2")
	c := u.open("data")
	impatient := u.open("data", 5*time.Second)
	fillKeys(t, c, 0, keys, 1)
	backup := filepath.Join(t.TempDir(), "backup")
	u.copyData(backup)
	fillKeys(t, c, keys, more, 1)
	fillKeys(t, c, keys/2, keys, 2)
	u.must(nil, "namespace", "create", "later", "--replicas", "1")
	fillKeys(t, u.open("later"), 0, 100, 3)
	// Somebody reads all the time.
	reader := u.readsOn(c)
	u.stopDirs(syscall.SIGTERM, 0, 1, 2)
	u.putBack(backup)

	for n := range u.dirs {
		u.startDir(n, false, false)
	}
	u.until("the status to name it", func() bool {
		out, _, _ := u.ctl(nil, "status")
		return strings.Contains(string(out), "data folders are older")
	})
	out, _, _ := u.ctl(nil, "status")
	if !strings.Contains(string(out), "kvctl directory recover") || !strings.Contains(string(out), "m1") &&
		!strings.Contains(string(out), "m2") {
		t.Errorf("the status does not say what to do, and who was told more:\n%s", out)
	}
	if _, stderr, status := u.ctl(nil, "namespace", "create", "new"); status == 0 ||
		!strings.Contains(stderr, "nothing was done") {
		t.Errorf("a namespace was created: %d, %s", status, stderr)
	}
	if _, stderr, status := u.ctl([]byte("x"), "--namespace", "data", "--timeout", "5s", "put", "key 0"); status != 3 {
		t.Errorf("a put of a new session: exit status %d, %s", status, stderr)
	}
	u.until("the leases to run out", func() bool {
		_, err := impatient.Get(t.Context(), []byte("key 1"))
		return errors.Is(err, client.ErrUnavailable)
	})
	if reads, wrong := reader(); reads == 0 || wrong != nil {
		t.Errorf("%d reads of the client that was there, and %v", reads, wrong)
	}
	if _, err := impatient.Put(t.Context(), []byte("after"), []byte(value(1, 1)), client.PutOptions{}); !errors.Is(
		err, client.ErrUnavailable) || errors.Is(err, client.ErrUnknownOutcome) {
		t.Errorf("a put of a client whose lease has run out: %v", err)
	}

	// The first folder goes on, the others begin anew.
	u.stopDirs(syscall.SIGTERM, 0, 1)
	if out, status := u.recover("d3", u.data[2], "--yes"); status != 1 ||
		!strings.Contains(out, "in use by another process") {
		t.Fatalf("the folder of a directory node that runs is recovered: exit status %d\n%s", status, out)
	}
	if out, status := u.recover("d1", u.data[0], "--yes"); status != 1 || !strings.Contains(out, "nothing was done") ||
		!strings.Contains(out, "d3") {
		t.Fatalf("recovered while d3 runs: exit status %d\n%s", status, out)
	}
	u.stopDirs(syscall.SIGTERM, 2)
	if out, status := u.recover("d1", u.data[0]); status != 2 ||
		!strings.Contains(out, "nothing was done: want --yes") || !strings.Contains(out, "namespaces    data") {
		t.Fatalf("recovered without --yes: exit status %d\n%s", status, out)
	}
	u.recoverFrom(0)
	n := u.open("data")
	j := judgeKeys(t, n, 0, keys/2, 1)
	if j.missing+j.failed > 0 {
		t.Errorf("of the keys that were there before the copy and did not change: %+v", j)
	}
	t.Logf("changed since: %+v, put since: %+v", judgeKeys(t, n, keys/2, keys, 1, 2), judgeKeys(t, n, keys, more, 1))
	u.serves(n)
	fillKeys(t, n, more, more+keys, 5) // memory that was granted by entries that are lost must not be granted again
	if j := judgeKeys(t, n, 0, keys/2, 1); j.missing+j.failed > 0 {
		t.Errorf("after writes: %+v", j)
	}
	t.Logf("changed since: %+v, put since: %+v", judgeKeys(t, n, keys/2, keys, 1, 2), judgeKeys(t, n, keys, more, 1))
	u.must(nil, "--namespace", "data", "check")
	if _, _, status := u.ctl(nil, "--namespace", "later", "--timeout", "5s", "get", "key 1"); status == 0 {
		t.Error("a namespace that the copy does not have is there")
	}
	u.must(nil, "namespace", "create", "later", "--replicas", "1")
	fillKeys(t, u.open("later"), 0, 100, 4)
	if j := judgeKeys(t, u.open("later"), 0, 100, 4); j.right != 100 {
		t.Errorf("the namespace that was made again: %+v", j)
	}
}

// TestRecoverNeedsKvd: kvctl finds kvd beside itself or on the PATH, and says what it needs if there is none. A folder
// of another directory node, and one that is none, are as they were.
func TestRecoverNeedsKvd(t *testing.T) {
	w := newWorld(t)
	alone, path := t.TempDir(), t.TempDir()
	if err := os.Link(filepath.Join(bin, "kvctl"), filepath.Join(alone, "kvctl")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(filepath.Join(bin, "kvd"), filepath.Join(path, "kvd")); err != nil {
		t.Fatal(err)
	}
	recover := func(program, path, id, data string) (string, int) {
		t.Helper()
		cmd := exec.Command(program, "directory", "recover", "--id", id, "--data-dir", data, "--yes")
		cmd.Env = append(w.env, "PATH="+path)
		out, err := cmd.CombinedOutput()
		if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
			t.Fatal(err)
		}
		return string(out), cmd.ProcessState.ExitCode()
	}
	w.dir = freeAddr(t)
	data := t.TempDir()
	w.start(w.directory(data, freeAddr(t))...).signal(syscall.SIGTERM)
	lone := filepath.Join(alone, "kvctl")
	for _, c := range []struct {
		program, path, id, data string
		status                  int
		says                    string
	}{
		{lone, "", "d1", data, 5, "needs the program kvd, which is neither at " + filepath.Join(alone, "kvd") +
			" nor on the PATH"},
		{lone, path, "d2", data, 1, `the data folder is of directory node "d1", and was to be used as "d2"`},
		{lone, path, "d1", t.TempDir(), 1, "the data folder holds no cluster"},
		{lone, path, "d1", data, 0, "recovered 0 times before"},
		{filepath.Join(bin, "kvctl"), "", "d1", data, 0, "recovered 1 times before"},
	} {
		if out, status := recover(c.program, c.path, c.id, c.data); status != c.status ||
			!strings.Contains(out, c.says) {
			t.Errorf("%s with PATH=%s on %s as %s: exit status %d, want %d and %q\n%s", c.program, c.path, c.data, c.id,
				status, c.status, c.says, out)
		}
	}
}

// TestMajorityGone: two of three directory nodes are killed and their disks are gone. The third goes on alone with all
// keys, and two others join it.
func TestMajorityGone(t *testing.T) {
	const keys = 2000
	u := newTrio(t, "m1", "m2")
	u.must(nil, "namespace", "create", "data", "--replicas", "2")
	c := u.open("data")
	fillKeys(t, c, 0, keys, 1)
	u.stopDirs(syscall.SIGKILL, 0, 1)
	u.stopDirs(syscall.SIGTERM, 2)
	for n := range 2 {
		if err := os.RemoveAll(u.data[n]); err != nil {
			t.Fatal(err)
		}
	}
	u.recoverFrom(2)
	if j := judgeKeys(t, u.open("data"), 0, keys, 1); j.right != keys {
		t.Errorf("%+v", j)
	}
	u.serves(c) // the client that was there has another session by now
	if j := judgeKeys(t, c, 0, keys, 1); j.right != keys {
		t.Errorf("after writes: %+v", j)
	}
	u.must(nil, "--namespace", "data", "check")
	// It can lose another one now.
	u.stopDirs(syscall.SIGTERM, 2)
	u.serves(c)
}

// recoverFrom makes one folder a cluster, starts it and has the others join with empty folders.
func (u *trio) recoverFrom(n int) {
	u.t.Helper()
	if out, status := u.recover(fmt.Sprint("d", n+1), u.data[n], "--yes"); status != 0 ||
		!strings.Contains(out, "recovered: start it") {
		u.t.Fatalf("exit status %d\n%s", status, out)
	}
	u.startDir(n, false, false)
	u.dirs[n].awaitReady()
	for k := range u.dirs {
		if k != n {
			if err := os.RemoveAll(u.data[k]); err != nil {
				u.t.Fatal(err)
			}
			u.joinAt = u.addrs[n]
			u.startDir(k, false, true)
		}
	}
}

// serves waits until a put is answered: after a recovery memory has to be counted first.
func (u *trio) serves(c *client.Client) {
	u.t.Helper()
	var err error
	for end := time.Now().Add(2 * patience); time.Now().Before(end); {
		if _, err = c.Put(u.t.Context(), []byte("serves"), []byte(strings.Repeat("s", 700)),
			client.PutOptions{}); err == nil {
			return
		}
	}
	u.t.Fatalf("no put is answered: %v", err)
}

// recover runs kvctl directory recover, and gives all of what it prints.
func (u *trio) recover(id, data string, more ...string) (string, int) {
	u.t.Helper()
	out, stderr, status := u.ctl(nil, append([]string{"directory", "recover", "--id", id, "--data-dir", data},
		more...)...)
	return string(out) + stderr, status
}

// readsOn reads with c until the function that it returns is called, which says how many reads were answered, and the
// first that was wrong.
func (u *trio) readsOn(c *client.Client) func() (reads int, wrong error) {
	var stop atomic.Bool
	var n int
	var wrong error
	done := make(chan struct{})
	go func() {
		defer close(done)
		for k := 0; !stop.Load(); k = (k + 1) % 500 {
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			i, err := c.Get(ctx, fmt.Appendf(nil, "key %d", k))
			cancel()
			switch {
			case err == nil && string(i.Value) == value(k, 1):
				n++
			case err == nil || errors.Is(err, client.ErrNotFound):
				wrong = fmt.Errorf("key %d is %.40q, %v", k, i.Value, err)
				return
			}
		}
	}()
	return func() (int, error) { stop.Store(true); <-done; return n, wrong }
}
