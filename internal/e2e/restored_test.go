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
}

func newTrio(t *testing.T, memnodes ...string) *trio {
	u := &trio{world: newWorld(t)}
	root := t.TempDir()
	for n := range u.dirs {
		u.data[n], u.addrs[n], u.raft[n] = filepath.Join(root, fmt.Sprint("d", n+1)), freeAddr(t), freeAddr(t)
	}
	u.dir = strings.Join(u.addrs[:], ",")
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
	args := []string{"directory", "--id", fmt.Sprint("d", n+1), "--data-dir", u.data[n], "--listen", u.addrs[n], "--raft-listen", u.raft[n],
		"--lease", "3s", "--election-timeout", "500ms"}
	if bootstrap {
		args = append(args, "--bootstrap")
	}
	if join {
		args = append(args, "--join", u.addrs[0])
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
		if out, err := exec.Command("cp", "-a", from, filepath.Join(to, fmt.Sprint("d", n+1))).CombinedOutput(); err != nil {
			u.t.Fatalf("%v\n%s", err, out)
		}
	}
}

func (u *trio) putBack(from string) {
	u.t.Helper()
	for n, to := range u.data {
		if err := os.RemoveAll(to); err != nil {
			u.t.Fatal(err)
		}
		if out, err := exec.Command("cp", "-a", filepath.Join(from, fmt.Sprint("d", n+1)), to).CombinedOutput(); err != nil {
			u.t.Fatalf("%v\n%s", err, out)
		}
	}
}

func (u *trio) open(namespace string) *client.Client {
	u.t.Helper()
	ctx, cancel := context.WithTimeout(u.t.Context(), patience)
	defer cancel()
	c, err := client.Open(ctx, client.Options{Directory: u.addrs[:], Provider: "tcp", Namespace: namespace, OpTimeout: patience})
	if err != nil {
		u.t.Fatal(err)
	}
	u.t.Cleanup(func() { c.Close() })
	return c
}

func value(key, version int) string {
	return fmt.Sprintf("%d/%d/", key, version) + strings.Repeat("v", 600+key%300)
}

// fill puts keys of a version, and wants all of it acknowledged.
func fill(t *testing.T, c *client.Client, from, to, version int) {
	t.Helper()
	for k := from; k < to; k += 100 {
		for i := k; i < min(k+100, to); i++ {
			if _, err := c.Put(t.Context(), fmt.Appendf(nil, "key %d", i), []byte(value(i, version)), client.PutOptions{}); err != nil {
				t.Fatalf("key %d: %v", i, err)
			}
		}
	}
}

// judged counts what became of keys that should have one of some versions.
type judged struct{ right, missing, failed int }

// judge reads keys; a value that nobody put there fails the test.
func judge(t *testing.T, c *client.Client, from, to int, versions ...int) (j judged) {
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

// TestFoldersPutBack: the data folders of all directory nodes are put back from a copy that is older than what the memory nodes hold. The
// directory grants nothing of it, since memory that it takes for free is in use, and says so; clients read on until their leases
// end. Recovered from one folder, it serves again, and no key has a value that nobody put there.
func TestFoldersPutBack(t *testing.T) {
	const keys, more = 2000, 4000
	u := newTrio(t, "m1", "m2")
	u.must(nil, "namespace", "create", "data", "--replicas", "2")
	c := u.open("data")
	fill(t, c, 0, keys, 1)
	backup := filepath.Join(t.TempDir(), "backup")
	u.copyData(backup)
	fill(t, c, keys, more, 1)
	fill(t, c, keys/2, keys, 2)
	u.must(nil, "namespace", "create", "later", "--replicas", "1")
	fill(t, u.open("later"), 0, 100, 3)
	u.stopDirs(syscall.SIGTERM, 0, 1, 2)
	u.putBack(backup)

	// Somebody reads all the time.
	reader := u.open2(c)
	for n := range u.dirs {
		u.startDir(n, false, false)
	}
	u.until("the status to name it", func() bool {
		out, _, _ := u.ctl(nil, "status")
		return strings.Contains(string(out), "data folders are older")
	})
	out, _, _ := u.ctl(nil, "status")
	if !strings.Contains(string(out), "kvd directory recover") || !strings.Contains(string(out), "m1") && !strings.Contains(string(out), "m2") {
		t.Errorf("the status does not say what to do, and who was told more:\n%s", out)
	}
	if _, stderr, status := u.ctl(nil, "namespace", "create", "new"); status == 0 || !strings.Contains(stderr, "nothing was done") {
		t.Errorf("a namespace was created: %d, %s", status, stderr)
	}
	if _, stderr, status := u.ctl([]byte("x"), "--namespace", "data", "--timeout", "5s", "put", "key 0"); status != 3 {
		t.Errorf("a put of a new session: exit status %d, %s", status, stderr)
	}
	if reads, wrong := reader(); reads == 0 || wrong != nil {
		t.Errorf("%d reads of the client that was there, and %v", reads, wrong)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	_, err := c.Put(ctx, []byte("after"), []byte(value(1, 1)), client.PutOptions{})
	if err != nil && !errors.Is(err, client.ErrUnavailable) && !errors.Is(err, client.ErrUnknownOutcome) {
		t.Errorf("a put of the client that was there: %v", err)
	}
}

// open2 reads with c until the function that it returns is called, which says how many reads were answered, and the first that was wrong.
func (u *trio) open2(c *client.Client) func() (reads int, wrong error) {
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
