package main

import (
	"fmt"
	"log/slog"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"strings"
	"syscall"
	"testing"

	"github.com/kvd-project/kvd/internal/config"
	"github.com/kvd-project/kvd/internal/mem"
)

// A directory node collects garbage seldom, within the memory that there is, unless its environment says otherwise.
func TestCollectSeldom(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(100))
	defer debug.SetMemoryLimit(debug.SetMemoryLimit(math.MaxInt64))
	for _, name := range []string{"GOGC", "GOMEMLIMIT", "AUTOMEMLIMIT"} {
		t.Setenv(name, "") // so that it is as it was afterwards
		if err := os.Unsetenv(name); err != nil {
			t.Fatal(err)
		}
	}
	collectSeldom(slog.New(slog.DiscardHandler))
	if got := debug.SetGCPercent(100); got != 400 {
		t.Errorf("the garbage collector's percentage is %d", got)
	}
	if got := debug.SetMemoryLimit(math.MaxInt64); got == math.MaxInt64 || got < 64<<20 {
		t.Errorf("the memory limit is %d", got)
	}
	t.Setenv("GOGC", "70")
	t.Setenv("GOMEMLIMIT", "1GiB")
	collectSeldom(slog.New(slog.DiscardHandler))
	if p, limit := debug.SetGCPercent(100), debug.SetMemoryLimit(math.MaxInt64); p != 100 || limit != math.MaxInt64 {
		t.Errorf("the environment's words were overruled: %d %%, %d bytes", p, limit)
	}
}

// TestRoom: nobody lends more than there is, unless overcommit says so; pages that are reserved for that, and memory
// that is there, count otherwise.
func TestRoom(t *testing.T) {
	log := slog.New(slog.DiscardHandler)
	here := mem.Limits{Machine: 24 << 30, Group: 512 << 20}
	for _, c := range []struct {
		what string
		lending
		r    mem.Limits
		want string // in the error; empty: there is none
	}{
		{"what there is", lending{memory: 512 << 20}, here, ""},
		{"a page more", lending{memory: 513 << 20}, here, "memory 513MiB: that is 513 MiB, and its control group " +
			"(cgroup) allows 512 MiB"},
		{"more than both", lending{memory: 1 << 40}, here, "that is 1024.0 GiB, and this machine has 24.0 GiB and " +
			"its control group (cgroup) allows 512 MiB"},
		{"no group", lending{memory: 24 << 30}, mem.Limits{Machine: 24 << 30}, ""},
		{"more than the machine has", lending{memory: 25 << 30}, mem.Limits{Machine: 24 << 30},
			"this machine has 24.0 GiB, beyond which processes are killed: lend less, or set overcommit"},
		{"nothing is known", lending{memory: 1 << 40}, mem.Limits{}, ""},
		{"overcommit", lending{memory: 1 << 40, overcommit: true}, here, ""},
		{"huge pages", lending{memory: 1 << 40, pages: "2MiB"}, here, ""},
		{"kept memory", lending{memory: 1 << 40, kept: true}, here, ""},
	} {
		m := config.DefaultMemNode()
		m.Memory, m.Overcommit = c.memory, c.overcommit
		if c.pages != "" {
			m.HugePages = c.pages
		}
		if err := checkRoom(m, c.kept, c.r, log); (err == nil) != (c.want == "") || err != nil &&
			!strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.what, err, c.want)
		}
	}
}

type lending struct {
	memory           config.Size
	overcommit, kept bool
	pages            string
}

// TestDevMemory: all memory nodes of a store in one process count, and unless their memory is set they lend half of
// what there is at most.
func TestDevMemory(t *testing.T) {
	log := slog.New(slog.DiscardHandler)
	for _, c := range []struct {
		nodes       int
		memory      config.Size // 0: it is not set
		overcommit  bool
		r           mem.Limits
		want        config.Size
		wantRefusal string
	}{
		{2, 0, false, mem.Limits{Machine: 24 << 30}, 1 << 30, ""},
		{2, 0, false, mem.Limits{Machine: 24 << 30, Group: 1 << 30}, 256 << 20, ""},
		{3, 0, false, mem.Limits{Machine: 1000 << 20}, 160 << 20, ""},
		{64, 0, false, mem.Limits{Machine: 128 << 20}, config.MinMemory, ""},
		{2, 0, true, mem.Limits{Machine: 1 << 30}, 1 << 30, ""},
		{2, 0, false, mem.Limits{}, 1 << 30, ""},
		{2, 100 << 30, false, mem.Limits{Machine: 24 << 30}, 0,
			"memory 100GiB of each of 2 memory nodes: that is 200.0 GiB, and this machine has 24.0 GiB"},
		{2, 12 << 30, false, mem.Limits{Machine: 24 << 30}, 12 << 30, ""},
		{3, 12 << 30, false, mem.Limits{Machine: 24 << 30}, 0, "that is 36.0 GiB"},
		{3, 12 << 30, true, mem.Limits{Machine: 24 << 30}, 12 << 30, ""},
		{64, 1 << 50, false, mem.Limits{Machine: 24 << 30}, 0, "this machine has 24.0 GiB"},
	} {
		d := config.DefaultDev()
		d.Memnodes, d.Overcommit = c.nodes, c.overcommit
		if c.memory != 0 {
			d.Memory = c.memory
		}
		got, err := devMemory(d, c.memory != 0, c.r, log)
		if c.wantRefusal != "" && (err == nil || !strings.Contains(err.Error(), c.wantRefusal)) ||
			c.wantRefusal == "" && (err != nil || got != c.want) {
			t.Errorf("%+v: %v, %v", c, got, err)
		}
	}
}

// memoryGroup makes a control group that may use bytes of memory, and one in it without a limit, whose folder it gives.
func memoryGroup(t *testing.T, bytes int64) string {
	base, limit := "/sys/fs/cgroup/memory", "memory.limit_in_bytes" // v1
	if _, err := os.Stat(base); err != nil {
		base, limit = "/sys/fs/cgroup", "memory.max"
	}
	outer, err := os.MkdirTemp(base, "kvd-test-")
	if err != nil {
		cannotHere(t)("control groups cannot be made here: %v", err)
	}
	inner := filepath.Join(outer, "inner")
	t.Cleanup(func() {
		if err := os.Remove(inner); err != nil && !os.IsNotExist(err) {
			t.Error(err)
		}
		if err := os.Remove(outer); err != nil {
			t.Error(err)
		}
	})
	if err := os.WriteFile(filepath.Join(outer, limit), fmt.Append(nil, bytes), 0o644); err != nil {
		cannotHere(t)("control groups have no limits of memory here: %v", err)
	}
	if err := os.Mkdir(inner, 0o755); err != nil {
		t.Fatal(err)
	}
	return inner
}

// TestRoomOfGroup: a memory node that is to lend more than the control group above its own allows says so and does not
// start, and a store in one process lends less by itself.
func TestRoomOfGroup(t *testing.T) {
	group := memoryGroup(t, 512<<20)
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	wrapped := filepath.Join(dir, "kvd-in-group")
	script := fmt.Sprintf("#!/bin/sh\necho $$ > %s/cgroup.procs\nexec %s \"$@\"\n", group, exe)
	if err := os.WriteFile(wrapped, []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	env, _ := runtimeDir(t)
	for _, keep := range []string{"on", "off"} {
		cmd := exec.Command("/bin/sh", wrapped, "memnode", "--name=m1", "--memory=513MiB", "--keep="+keep)
		cmd.Env = append(os.Environ(), append(env, beKvd+"=1")...)
		out, err := cmd.CombinedOutput()
		if cmd.ProcessState.ExitCode() != exitFailure || !strings.Contains(string(out), "memory 513MiB: that is 513 "+
			"MiB, and its control group (cgroup) allows 512 MiB") {
			t.Errorf("keep %s: %v\n%s", keep, err, out)
		}
	}
	dev := []string{wrapped, "dev", "--listen=127.0.0.1:0", "--redis=off", "--memcached=off", "--http=off"}
	for _, c := range []struct {
		args []string
		want string
	}{{nil, "128MiB"}, {[]string{"--memory=1GiB", "--overcommit"}, "1GiB"}} {
		p := spawnFrom(t, "/bin/sh", env, append(dev, c.args...)...)
		p.ready()
		if p.kv["memory"] != c.want {
			t.Errorf("%v: it lends %s, want %s", c.args, p.kv["memory"], c.want)
		}
		if code := p.stop(syscall.SIGTERM); code != 0 {
			t.Errorf("exit status %d\n%s", code, p.stderr)
		}
	}
}
