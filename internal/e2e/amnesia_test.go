package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// directories are three directory nodes, each with a folder and addresses of its own.
type directories struct {
	w          *world
	data       [3]string
	grpc, raft [3]string
	nodes      [3]*daemon
}

func (d *directories) args(i int, more ...string) []string {
	return append([]string{"directory", "--id", fmt.Sprint("d", i+1), "--data-dir", d.data[i], "--listen", d.grpc[i],
		"--raft-listen", d.raft[i], "--lease", "2s"}, more...)
}

// join are the arguments of a node that joins the others.
func (d *directories) join(i int) []string {
	var others []string
	for j, a := range d.grpc {
		if j != i {
			others = append(others, a)
		}
	}
	return d.args(i, "--join", strings.Join(others, ","))
}

func newDirectories(w *world) *directories {
	d := &directories{w: w}
	for i := range d.data {
		d.data[i] = filepath.Join(w.t.TempDir(), "data")
		d.grpc[i], d.raft[i] = freeAddr(w.t), freeAddr(w.t)
	}
	w.dir = strings.Join(d.grpc[:], ",")
	d.nodes[0] = w.start(d.args(0, "--bootstrap")...)
	for i := range 2 {
		d.nodes[i+1] = w.start(d.join(i + 1)...)
	}
	w.until("three voters", func() bool {
		out, _, status := w.ctl(nil, "directory", "list")
		return status == 0 && strings.Count(string(out), "voter")+strings.Count(string(out), "leader") == 3
	})
	return d
}

// TestDirectoryDiskLost: what the directory has acknowledged is there after a node that knows it has lost its disk, and
// another one that does not has come back first: they make no majority, and the empty one is let in when there is one.
func TestDirectoryDiskLost(t *testing.T) {
	w := newWorld(t)
	d := newDirectories(w)
	w.start(w.memnode("m1")...)
	d.nodes[2].signal(syscall.SIGTERM)
	w.until("a namespace", func() bool {
		_, stderr, status := w.ctl(nil, "namespace", "create", "acked", "--bytes", "16MiB")
		return status == 0 || strings.Contains(stderr, "exists")
	})
	w.must(nil, "--namespace", "acked", "put", "key", "value")
	d.nodes[0].signal(syscall.SIGKILL)
	d.nodes[1].signal(syscall.SIGKILL)
	if err := os.RemoveAll(d.data[1]); err != nil {
		t.Fatal(err)
	}
	d.nodes[2] = w.spawn(d.args(2)...)
	d.nodes[1] = w.spawn(d.join(1)...)
	leads := func() bool {
		return strings.Contains(d.nodes[2].stderr.String(), "directory: leading") ||
			strings.Contains(d.nodes[1].stderr.String(), "directory: leading")
	}
	w.until("both wait", func() bool {
		if leads() {
			t.Fatal("a node that is behind leads, by the vote of one that knows nothing")
		}
		return strings.Contains(d.nodes[1].stderr.String(), "not admitted") &&
			strings.Contains(d.nodes[2].stderr.String(), "with the data folder")
	})
	d.nodes[0] = w.start(d.args(0)...)
	d.nodes[1].awaitReady()
	w.until("three voters again", func() bool {
		out, _, status := w.ctl(nil, "directory", "list")
		return status == 0 && strings.Count(string(out), "voter")+strings.Count(string(out), "leader") == 3 &&
			strings.Contains(d.nodes[0].stderr.String()+d.nodes[2].stderr.String(), "a node has lost its data folder")
	})
	w.until("the value", func() bool {
		out, _, status := w.ctl(nil, "--namespace", "acked", "get", "key")
		return status == 0 && strings.TrimSpace(string(out)) == "value"
	})
	// The new d2 counts: with d1 gone, it and d3 are the majority.
	d.nodes[0].signal(syscall.SIGKILL)
	w.until("another namespace", func() bool {
		_, stderr, status := w.ctl(nil, "namespace", "create", "later", "--bytes", "16MiB")
		return status == 0 || strings.Contains(stderr, "exists")
	})
	w.must(nil, "namespace", "show", "acked")
}

// TestDirectoryIDs: a second process with a living node's id, and a data folder under another id, end at once and say
// why. A node whose removal would end the majority is not removed.
func TestDirectoryIDs(t *testing.T) {
	w := newWorld(t)
	d := newDirectories(w)
	for i := range d.nodes {
		second := w.spawn("directory", "--id", fmt.Sprint("d", i+1), "--data-dir", t.TempDir(), "--listen", freeAddr(t),
			"--raft-listen", freeAddr(t), "--join", w.dir)
		want := fmt.Sprintf(`directory node \"d%d\" is alive at %s`, i+1, d.raft[i])
		if status := second.wait(); status != 1 || !strings.Contains(second.stderr.String(), want) &&
			!strings.Contains(second.stderr.String(), strings.ReplaceAll(want, `\`, "")) {
			t.Errorf("exit status %d, want 1 and %s\n%s", status, want, second.stderr)
		}
	}
	d.nodes[2].signal(syscall.SIGKILL)
	other := w.spawn("directory", "--id", "d9", "--data-dir", d.data[2], "--listen", freeAddr(t), "--raft-listen",
		freeAddr(t), "--join", w.dir)
	if status := other.wait(); status != 1 || !strings.Contains(other.stderr.String(), `the data folder is of directory node "d3", and was to be used as "d9"`) {
		t.Errorf("d9 on the data folder of d3: exit status %d\n%s", status, other.stderr)
	}
	w.until("d2 is not removed", func() bool {
		_, stderr, status := w.ctl(nil, "directory", "remove", "d2")
		if status == 0 {
			t.Fatal("d2 is removed though d3 is dead")
		}
		return strings.Contains(stderr, "nothing was done: without directory node \"d2\" there are 2, 1 do "+
			"not answer") && strings.Contains(stderr, `"d3"`)
	})
	w.until("d3 is removed", func() bool {
		_, stderr, status := w.ctl(nil, "directory", "remove", "d3")
		return status == 0 || strings.Contains(stderr, "no directory node")
	})
}
