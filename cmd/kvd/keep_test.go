package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/dirclient"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/doctor"
	"github.com/kvd-project/kvd/internal/overview"
	"github.com/kvd-project/kvd/internal/providers"
	"github.com/kvd-project/kvd/internal/testutil"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/verbs"
)

// keptStore is a directory and a memory node whose keeper holds the only copy of everything.
type keptStore struct {
	t    *testing.T
	d, m *process
	dir  *dirclient.Client
	c    *client.Client
	args []string // of the memory node
	env  []string
}

const onlyCopy = "one"

// newKeptStore starts the memory node from the file exe, with more arguments.
func newKeptStore(t *testing.T, exe string, more ...string) *keptStore {
	s := &keptStore{t: t}
	s.env, _ = runtimeDir(t)
	s.d = start(t, s.env, "directory", "--id=d1", "--data-dir="+t.TempDir(), "--listen=127.0.0.1:0",
		"--raft-listen=127.0.0.1:0", "--bootstrap", "--lease=1s")
	addr := s.d.kv["directory"]
	s.args = []string{"memnode", "--name=m1", "--directory=" + addr, "--memory=64MiB", "--http-listen=127.0.0.1:0",
		"--janitor=false"}
	s.args = append(s.args, more...)
	if slices.ContainsFunc(more, func(arg string) bool { return strings.HasPrefix(arg, "--config=") }) {
		// which has these
		s.args = slices.DeleteFunc(s.args, func(arg string) bool {
			return arg == "--name=m1" || arg == "--memory=64MiB"
		})
	}
	s.m = spawnFrom(t, exe, s.env, s.args...)
	s.m.ready()
	var err error
	if s.dir, err = dirclient.Open(dirclient.Options{Addrs: []string{addr}}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.dir.Close() })
	s.call(func(ctx context.Context, d dirpb.DirectoryClient) error {
		_, err := d.CreateNamespace(ctx, &dirpb.CreateNamespaceRequest{Name: onlyCopy, Replicas: 1})
		return err
	})
	device, err := providers.Open("tcp", providers.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = device.Close() })
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if s.c, err = client.Open(ctx, client.Options{Directory: []string{addr}, Namespace: onlyCopy,
		Devices: []*rdma.Device{device}}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.c.Close() }) // the store may be gone
	return s
}

func (s *keptStore) call(f func(context.Context, dirpb.DirectoryClient) error) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), patience)
	defer cancel()
	if err := s.dir.Call(ctx, f); err != nil {
		s.t.Fatal(err)
	}
}

func (s *keptStore) status() (st *dirpb.StatusReply) {
	s.t.Helper()
	s.call(func(ctx context.Context, d dirpb.DirectoryClient) (err error) {
		st, err = d.Status(ctx, &dirpb.StatusRequest{})
		return err
	})
	return st
}

// until polls what other processes come to.
func (s *keptStore) until(what string, there func() bool) {
	s.t.Helper()
	testutil.UntilNone(s.t, what, func() string {
		if there() {
			return ""
		}
		return "the memory node's log:\n" + s.m.stderr.String()
	})
}

// put stores a value, however long that takes.
func (s *keptStore) put(key, value string) {
	s.t.Helper()
	s.until("put", func() bool {
		_, err := s.c.Put(s.t.Context(), []byte(key), []byte(value), client.PutOptions{})
		return err == nil
	})
}

// get gives what is there, "" for nothing, as soon as that can be told.
func (s *keptStore) get(key string) (value string) {
	s.t.Helper()
	s.until("get", func() bool {
		it, err := s.c.Get(s.t.Context(), []byte(key))
		value = string(it.Value)
		return err == nil || errors.Is(err, client.ErrNotFound)
	})
	return value
}

// worker is the process that serves in the keeper's place; 0: none does.
func (s *keptStore) worker() int {
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", s.m.cmd.Process.Pid))
	for _, f := range files {
		b, _ := os.ReadFile(f) // the thread may have ended
		if pid, err := strconv.Atoi(strings.TrimSpace(string(b))); err == nil {
			return pid
		}
	}
	return 0
}

// replace has the worker stand still, lets change look at what its keeper holds as a state, kills the worker, and waits
// for the next.
func (s *keptStore) replace(change func(pages []byte) error) {
	s.t.Helper()
	pid := s.worker()
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		s.t.Fatal(err)
	}
	if err := errors.Join(s.state(change), syscall.Kill(pid, syscall.SIGKILL)); err != nil {
		s.t.Fatal(err)
	}
	s.m.ready()
}

// state lets change look at what the keeper holds as the state of its worker; it may hold another one, which is kept
// aside.
func (s *keptStore) state(change func([]byte) error) error {
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", s.worker()))
	if err != nil {
		return err
	}
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", s.m.cmd.Process.Pid))
	if err != nil {
		return err
	}
	for _, name := range files {
		if to, err := os.Readlink(name); err != nil || !strings.HasPrefix(to, "/memfd:kvd-state ") {
			continue
		}
		f, err := os.OpenFile(name, os.O_RDWR, 0)
		if err != nil {
			return err
		}
		defer f.Close()
		st, err := f.Stat()
		if err != nil {
			return err
		}
		if ino := fmt.Sprintf(" %d ", st.Sys().(*syscall.Stat_t).Ino); !slices.ContainsFunc(
			strings.Split(string(maps), "\n"), func(line string) bool {
				return strings.Contains(line, ino) && strings.Contains(line, "/memfd:kvd-state")
			}) {
			continue
		}
		b, err := syscall.Mmap(int(f.Fd()), 0, int(st.Size()), syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
		if err != nil {
			return err
		}
		return errors.Join(change(b), syscall.Munmap(b))
	}
	return errors.New("the keeper holds no state")
}

// field is one of a state's, as memnode/state.go draws them.
type field struct {
	name string
	off  int // in a page
}

// fieldsOf takes the state apart. Both pages have the same fields.
func fieldsOf(b []byte) (pages [2][]byte, fields []field) {
	le := binary.LittleEndian
	const size = 1 << 20
	pages = [2][]byte{b[:size], b[size : 2*size]}
	page := pages[0]
	at := 0
	next := func(name string, n int) {
		fields = append(fields, field{name, at})
		at += n
	}
	text := func(name string) {
		n := int(le.Uint16(page[at:]))
		next(name+" bytes", 2)
		next(name, n)
	}
	for _, f := range []struct {
		name string
		n    int
	}{{"magic", 8}, {"format", 4}, {"crc", 4}, {"sequence", 8}, {"length", 8}} {
		next(f.name, f.n)
	}
	text("cluster")
	text("node")
	text("host")
	next("node id", 4)
	next("incarnation", 8)
	next("boot", 8)
	lives := int(page[at])
	next("lives", 1)
	next("life", 8*lives)
	next("regions", 4)
	text("item")
	next("pg", 4)
	next("namespace", 4)
	next("epoch", 4)
	for _, name := range []string{"since", "region bytes", "index bytes", "page bytes", "region incarnation"} {
		next(name, 8)
	}
	next("keys", 1)
	text("provider")
	next("index rkey", 8)
	next("heap rkey", 8)
	return pages, fields
}

// TestStateNotBelieved: a memory node one page of whose state was changed behind its back, in a byte of any field, has
// everything. If both were, or were made those of another machine or version, it begins empty, says why in its log and
// its metrics, keeps what it held aside, and that is lost and not something else.
func TestStateNotBelieved(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	s := newKeptStore(t, exe)
	s.put("k", "v")
	var fields []field
	if err := s.state(func(b []byte) error { _, fields = fieldsOf(b); return nil }); err != nil {
		t.Fatal(err)
	}
	lost, deaths := 0, 0
	fresh := func() { // the keeper would let workers that end soon wait ever longer
		if deaths++; deaths%5 > 0 {
			return
		}
		s.put("k", "v")
		if code := s.m.stop(syscall.SIGTERM); code != 0 {
			t.Fatalf("exit status %d\n%s", code, s.m.stderr)
		}
		s.m = start(t, s.env, s.args...)
		lost++
	}
	spoil := func(what, reason string, change func(pages [2][]byte, fields []field)) {
		fresh()
		said := "reason=" + reason
		before, value := strings.Count(s.m.stderr.String(), said), "v"+strconv.Itoa(lost)
		s.put("k", value)
		s.replace(func(b []byte) error {
			change(fieldsOf(b))
			return nil
		})
		lost++
		// Its log comes by another pipe than its readiness: that it starts empty, and that it keeps the memory aside.
		s.until(what+": "+said, func() bool { return strings.Count(s.m.stderr.String(), said) > before+1 })
		if n := strings.Count(s.m.stderr.String(), said) - before; n != 2 {
			t.Fatalf("%s: %s is said %d times\n%s", what, said, n, s.m.stderr)
		}
		wantMetric(t, s.m.kv["http"], fmt.Sprintf(`kvd_memnode_kept\{node="m1",reason="%s"\} 1`, reason))
		wantMetric(t, s.m.kv["http"], `kvd_memnode_rescued_bytes\{node="m1"\} [1-9]`)
		if got := s.get("k"); got != "" {
			t.Fatalf("%s: a get gives %q", what, got)
		}
	}
	for k, f := range fields {
		fresh()
		const said = "a page of the state that the earlier process left is damaged"
		before := strings.Count(s.m.stderr.String(), said)
		s.put("k", f.name)
		s.replace(func(b []byte) error {
			pages, now := fieldsOf(b)
			pages[k%2][now[k].off] ^= 1 << (k % 8)
			return nil
		})
		s.until(said, func() bool { return strings.Count(s.m.stderr.String(), said) > before })
		if got := s.get("k"); got != f.name {
			t.Fatalf("%s: with the other page as it was, a get gives %q", f.name, got)
		}
		if k%5 == 0 {
			spoil(f.name, "damaged", func(pages [2][]byte, now []field) {
				pages[0][now[k].off] ^= 1
				pages[1][now[(k+7)%len(now)].off] ^= 1
			})
		}
	}
	summed := func(pages [2][]byte, change func(page []byte)) {
		le, table := binary.LittleEndian, crc32.MakeTable(crc32.Castagnoli)
		for _, page := range pages {
			change(page)
			le.PutUint32(page[12:], crc32.Update(crc32.Checksum(page[16:32+le.Uint64(page[24:])], table), table,
				page[8:12]))
		}
	}
	spoil("another machine", "stranger", func(pages [2][]byte, now []field) {
		host := now[slices.IndexFunc(now, func(f field) bool { return f.name == "host" })].off
		summed(pages, func(page []byte) { page[host] ^= 1 })
	})
	spoil("another version", "version", func(pages [2][]byte, _ []field) {
		summed(pages, func(page []byte) { page[8] += 40 })
	})
	if n := lostOf(s.status()); n != uint64(lost) {
		t.Errorf("the status has %d losses, want %d", n, lost)
	}
}

// lostOf is how often the namespace lost something.
func lostOf(st *dirpb.StatusReply) uint64 {
	for _, n := range st.GetMap().GetNamespaces() {
		if n.GetName() == onlyCopy {
			return n.GetLost()
		}
	}
	return 0
}

// TestKeeperDies: a keeper that is killed takes its worker and all that it held with it. The next one begins empty, and
// says so.
func TestKeeperDies(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	s := newKeptStore(t, exe)
	s.put("k", "v")
	worker := s.worker()
	_ = s.m.stop(syscall.SIGKILL)
	s.until("end of the worker", func() bool { return errors.Is(syscall.Kill(worker, 0), syscall.ESRCH) })
	s.m = start(t, s.env, s.args...)
	s.until("no earlier process has left memory", func() bool {
		return strings.Contains(s.m.stderr.String(), "no earlier process has left memory")
	})
	wantMetric(t, s.m.kv["http"], `kvd_memnode_kept\{node="m1",reason="first"\} 1`)
	if got := s.get("k"); got != "" {
		t.Errorf("a get gives %q", got)
	}
	wantProblem(t, s.status(), "namespace "+onlyCopy+" lost keys")
	s.put("k", "w")
	if got := s.get("k"); got != "w" {
		t.Errorf("a get gives %q", got)
	}
}

// TestKilledWithoutRegions: a worker that is killed, or fails, while it has no region is followed by another one, as
// one with regions is.
func TestKilledWithoutRegions(t *testing.T) {
	env, _ := runtimeDir(t)
	d := start(t, env, "directory", "--id=d1", "--data-dir="+t.TempDir(), "--listen=127.0.0.1:0",
		"--raft-listen=127.0.0.1:0", "--bootstrap", "--lease=1s")
	s := &keptStore{t: t, m: start(t, env, "memnode", "--name=m1", "--directory="+d.kv["directory"], "--memory=64MiB",
		"--http-listen=127.0.0.1:0", "--janitor=false")}
	for _, sig := range []syscall.Signal{syscall.SIGKILL, syscall.SIGABRT} {
		pid := s.worker()
		if err := syscall.Kill(pid, sig); err != nil {
			t.Fatal(err)
		}
		s.m.ready()
		if next := s.worker(); next == 0 || next == pid {
			t.Errorf("%v: after the worker %d there is %d", sig, pid, next)
		}
		wantMetric(t, s.m.kv["http"], `kvd_memnode_registered\{node="m1"\} 1`)
	}
	if code := s.m.stop(syscall.SIGTERM); code != 0 {
		t.Errorf("exit status %d\n%s", code, s.m.stderr)
	}
}

func wantProblem(t *testing.T, st *dirpb.StatusReply, texts ...string) {
	t.Helper()
	problems := overview.Problems(st)
	for _, text := range texts {
		if !slices.ContainsFunc(problems, func(p overview.Problem) bool { return strings.Contains(p.What, text) }) {
			t.Errorf("no problem says %q: %v", text, problems)
		}
	}
}

// TestCrashLoop: while workers end as soon as they start, the status and the doctor of that machine say so and why,
// operations wait or fail, and when the program is mended everything is there.
func TestCrashLoop(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	exe, good, bad := filepath.Join(dir, "kvd"), filepath.Join(dir, "good"), filepath.Join(dir, "bad")
	// By a process of its own: a program that this one has open for writing, or a child that it is just making, cannot
	// be executed.
	if err := errors.Join(exec.Command("cp", self, exe).Run(), os.Link(exe, good),
		os.WriteFile(bad, []byte("#!/bin/sh\nexit 3\n"), 0o755)); err != nil {
		t.Fatal(err)
	}
	s := newKeptStore(t, exe)
	s.put("k", "v")
	if err := errors.Join(os.Rename(bad, exe), syscall.Kill(s.worker(), syscall.SIGKILL)); err != nil {
		t.Fatal(err)
	}
	const why = "with exit status 3"
	s.until("trouble", func() bool { return strings.Contains(s.status().GetMap().GetNodes()[0].GetTrouble(), why) })
	wantProblem(t, s.status(), "memory node m1 does not come up: its workers die soon after their start", why)
	found := doctor.Examine(doctor.Local(verbs.Options{}), "")
	if !slices.ContainsFunc(found, func(f doctor.Finding) bool {
		return f.Check == fmt.Sprintf("keeper %d", s.m.cmd.Process.Pid) && f.Level == doctor.Warn &&
			strings.Contains(f.Found, why)
	}) {
		t.Errorf("the doctor finds %v", found)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	it, err := s.c.Get(ctx, []byte("k"))
	cancel()
	if err == nil || errors.Is(err, client.ErrNotFound) {
		t.Errorf("without a worker a get gives %q, %v", it.Value, err)
	}
	s.until("wait for the only copy", func() bool { return s.status().GetMap().GetNodes()[0].GetWaiting() })
	if err := os.Rename(good, exe); err != nil {
		t.Fatal(err)
	}
	s.m.ready()
	if got := s.get("k"); got != "v" {
		t.Errorf("a get gives %q", got)
	}
	s.until("end of the trouble", func() bool { return s.status().GetMap().GetNodes()[0].GetTrouble() == "" })
	if n := lostOf(s.status()); n != 0 {
		t.Errorf("the status has %d losses", n)
	}
}
