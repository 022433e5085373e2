package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/dirclient"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/providers"
	"github.com/kvd-project/kvd/rdma"
)

// beWriter makes the test binary a client, of the directory at that address, that writes values over shm.
const beWriter = "KVD_TEST_BE_WRITER"

// written is how many values of 1 MiB a writer writes.
const written = 300

func writeValues(directory string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 2*patience)
	defer cancel()
	d, err := providers.Open("shm", providers.Options{})
	if err != nil {
		return err
	}
	defer d.Close()
	c, err := client.Open(ctx, client.Options{Directory: []string{directory}, Devices: []*rdma.Device{d}})
	if err != nil {
		return err
	}
	defer c.Close()
	value := make([]byte, 1<<20)
	began := time.Now()
	for i := range written {
		if _, err := c.Put(ctx, fmt.Appendf(nil, "key %d", i), value, client.PutOptions{}); err != nil {
			return err
		}
	}
	took := time.Since(began)
	fmt.Printf("%d MiB in %v, %.2f GB/s\n", written, took, written*float64(1<<20)/1e9/took.Seconds())
	return nil
}

// controlled is a cgroup with a limit of memory, which the test's end removes.
type controlled struct {
	dir, usage string
	t          *testing.T
}

// cannotHere ends a test for which this machine lacks something: it is skipped, but for the gate, which provides it.
func cannotHere(t *testing.T) func(format string, args ...any) {
	if os.Getenv("CI") != "" {
		return t.Fatalf
	}
	return t.Skipf
}

// newControlled makes a cgroup of version 1 or 2, beside this process's own; limit 0 is none.
func newControlled(t *testing.T, name string, limit int64) *controlled {
	t.Helper()
	cannot := cannotHere(t)
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		t.Fatal(err)
	}
	g := &controlled{t: t}
	file := ""
	for line := range strings.Lines(string(mounts)) {
		switch f := strings.Fields(line); {
		case len(f) < 4:
		case f[2] == "cgroup" && strings.Contains(","+f[3]+",", ",memory,"):
			g.dir, file, g.usage = f[1], "memory.limit_in_bytes", "memory.usage_in_bytes"
		case f[2] == "cgroup2" && file == "":
			on, _ := os.ReadFile(filepath.Join(f[1], "cgroup.controllers"))
			if !strings.Contains(" "+strings.TrimSpace(string(on))+" ", " memory ") {
				continue
			}
			if err := os.WriteFile(filepath.Join(f[1], "cgroup.subtree_control"), []byte("+memory"), 0); err != nil {
				cannot("cannot limit memory below %s: %v", f[1], err)
			}
			g.dir, file, g.usage = f[1], "memory.max", "memory.current"
		}
	}
	if file == "" {
		cannot("no cgroup here limits memory")
	}
	g.dir = filepath.Join(g.dir, fmt.Sprintf("kvd-test-%d-%s", os.Getpid(), name))
	if err := os.Mkdir(g.dir, 0o755); err != nil {
		cannot("cannot make a cgroup: %v", err)
	}
	t.Cleanup(func() {
		// Its last process may be on its way out.
		for until := time.Now().Add(patience); ; {
			err := os.Remove(g.dir)
			if err == nil {
				return
			}
			if !errors.Is(err, syscall.EBUSY) || time.Now().After(until) {
				t.Error(err)
				return
			}
		}
	})
	if limit > 0 {
		if err := os.WriteFile(filepath.Join(g.dir, file), []byte(strconv.FormatInt(limit, 10)), 0); err != nil {
			t.Fatal(err)
		}
	}
	return g
}

// command gives what starts a program in g.
func (g *controlled) command(args ...string) []string {
	return append([]string{"/bin/sh", "-c", `echo $$ >"$0/cgroup.procs" && exec "$@"`, g.dir}, args...)
}

// used is how many bytes are charged to g.
func (g *controlled) used() int64 {
	g.t.Helper()
	b, err := os.ReadFile(filepath.Join(g.dir, g.usage))
	if err != nil {
		g.t.Fatal(err)
	}
	n, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
	if err != nil {
		g.t.Fatal(err)
	}
	return n
}

// TestWhoPays: the pages of a region are charged to the cgroup of its memory node, so a client in a small one can fill
// the store over shm.
func TestWhoPays(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	env, _ := runtimeDir(t)
	node, small := newControlled(t, "node", 0), newControlled(t, "client", 100<<20)
	d := start(t, env, "directory", "--id=d", "--data-dir="+t.TempDir(), "--listen=127.0.0.1:0",
		"--raft-listen=127.0.0.1:0", "--bootstrap", "--lease=5s")
	args := node.command(self, "memnode", "--name=m", "--directory="+d.kv["directory"], "--memory=1GiB",
		"--control-socket=off")
	spawnFrom(t, args[0], env, args[1:]...).ready()
	args = small.command(self)
	w := exec.Command(args[0], args[1:]...)
	w.Env = append(os.Environ(), beWriter+"="+d.kv["directory"])
	out, err := w.CombinedOutput()
	t.Logf("%s; charged: node %.0f MB, client %.0f MB", out, float64(node.used())/1e6, float64(small.used())/1e6)
	if err != nil {
		t.Fatalf("the client, which may take 100 MiB: %v", err)
	}
	if n := node.used(); n < written<<20 {
		t.Errorf("%d bytes are charged to the memory node, want all of its region", n)
	}
}

// TestNoRoomInCgroup: a memory node whose cgroup has no room for a region says so, with the numbers, and goes on:
// nothing is killed.
func TestNoRoomInCgroup(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	env, _ := runtimeDir(t)
	node := newControlled(t, "node", 300<<20)
	d := start(t, env, "directory", "--id=d", "--data-dir="+t.TempDir(), "--listen=127.0.0.1:0",
		"--raft-listen=127.0.0.1:0", "--bootstrap", "--lease=5s")
	args := node.command(self, "memnode", "--name=m", "--directory="+d.kv["directory"], "--memory=1GiB", "--overcommit",
		"--control-socket=off")
	p := spawnFrom(t, args[0], env, args[1:]...)
	p.ready()
	dir, err := dirclient.Open(dirclient.Options{Addrs: []string{d.kv["directory"]}})
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	err = dir.CallOnce(ctx, func(ctx context.Context, c dirpb.DirectoryClient) error {
		_, err := c.CreateNamespace(ctx, &dirpb.CreateNamespaceRequest{Name: "large", Replicas: 1,
			BytesPerNode: 512 << 20})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if !p.stderr.holds("memory that cgroup") {
		t.Fatal("the log does not say that there is no room")
	}
	createNamespace(t, d.kv["directory"], "small", nil)
	if !p.stderr.holds("region made") {
		t.Fatal("the smaller region is not made")
	}
	if n := node.used(); n > 200<<20 {
		t.Errorf("%d bytes are charged to the memory node, want no more than a region of 24 MiB and what it needs "+
			"itself", n)
	}
}
