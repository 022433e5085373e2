package deploy

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kvd-project/kvd/internal/testutil"
)

// manager is a systemd that is process 1 of namespaces of its own, with the network of the machine.
type manager struct {
	t   *testing.T
	pid int // of process 1, from outside
	log string
}

// bootScript makes the namespaces' file systems and becomes process 1. $1 is what is to be found in /run/kvd, $2 the
// units.
const bootScript = `set -e
mount --make-rprivate /
umount --recursive /sys/fs/cgroup
mount -t cgroup2 none /sys/fs/cgroup
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/kvd /run/systemd
cp -r "$1/." /run/kvd
cp -r "$2" /run/systemd/system
exec env -i container=test PATH="$PATH" SYSTEMD_LOG_TARGET=null /lib/systemd/systemd --system --unit=kvd.target --show-status=no`

// boot starts a systemd with a target that wants nothing. It ends with the test.
func boot(t *testing.T, files, units string) *manager {
	t.Helper()
	group := cgroup(t)
	m := &manager{t: t}
	cmd := exec.Command("unshare", "--pid", "--mount", "--cgroup", "--uts", "--ipc", "--fork", "--mount-proc",
		"--kill-child", "sh", "-c", bootScript, "sh", files, units)
	var out lockedBuffer
	cmd.Stdout, cmd.Stderr = &out, &out
	dir, err := os.Open(group)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	// Pdeathsig is of the thread: the test that is killed leaves no systemd.
	runtime.LockOSThread()
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(dir.Fd()), Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { defer close(ended); _ = cmd.Wait() }()
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // and process 1 with it, and all of its namespace
		<-ended
		if t.Failed() {
			t.Logf("systemd: %s", &out)
		}
	})
	m.until("systemd", func() bool {
		select {
		case <-ended:
			t.Fatalf("systemd cannot run here: %v\n%s", cmd.ProcessState, &out)
		default:
		}
		m.pid = childOf(cmd.Process.Pid)
		return m.pid > 0 && m.run("systemctl", "is-active", "--quiet", "kvd.target") == nil
	})
	return m
}

// cgroup makes a group for the test, which it removes.
func cgroup(t *testing.T) string {
	t.Helper()
	root := ""
	for line := range strings.Lines(read(t, "/proc/self/mounts")) {
		if f := strings.Fields(line); len(f) > 2 && f[2] == "cgroup2" {
			root = f[1]
		}
	}
	if root == "" {
		t.Fatal("there is no cgroup2 here, which systemd wants")
	}
	group := filepath.Join(root, fmt.Sprintf("kvd-test-%d", os.Getpid()))
	if err := os.Mkdir(group, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for until := time.Now().Add(patience); ; {
			// The innermost come last.
			var groups []string
			_ = filepath.WalkDir(group, func(path string, d os.DirEntry, err error) error {
				if err == nil && d.IsDir() {
					groups = append(groups, path)
				}
				return nil
			})
			var err error
			for k := len(groups) - 1; k >= 0; k-- {
				if e := os.Remove(groups[k]); e != nil && !errors.Is(e, os.ErrNotExist) {
					err = e
				}
			}
			if err == nil {
				return
			}
			if time.Now().After(until) {
				t.Error(err)
				return
			}
			time.Sleep(10 * time.Millisecond) // the kernel tells nobody that the last process is gone
		}
	})
	return group
}

// childOf gives the child of a process with one thread and one child, or 0.
func childOf(parent int) int {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", parent, parent))
	pid, _ := strconv.Atoi(strings.TrimSpace(string(b)))
	return pid
}

func (m *manager) until(what string, ok func() bool) {
	m.t.Helper()
	testutil.Until(m.t, what, ok)
}

// command is one that runs in the namespaces.
func (m *manager) command(args ...string) *exec.Cmd {
	cmd := exec.Command("nsenter", append([]string{"--target", strconv.Itoa(m.pid), "--mount", "--pid", "--"},
		args...)...)
	cmd.WaitDelay = time.Second // nsenter that is killed leaves a child, which has the pipes
	return cmd
}

func (m *manager) run(args ...string) error {
	cmd := m.command(args...)
	end := time.AfterFunc(patience, func() { _ = cmd.Process.Kill() })
	defer end.Stop()
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("%v: %w\n%s", args, err, out)
	}
	return nil
}

func (m *manager) must(args ...string) {
	m.t.Helper()
	if err := m.run(args...); err != nil {
		m.t.Fatal(err)
	}
}

const memnodeUnit = "kvd-memnode.service"

// show gives a property of the memory node's unit.
func (m *manager) show(property string) string {
	m.t.Helper()
	out, err := m.command("systemctl", "show", "--value", "--property", property, memnodeUnit).Output()
	if err != nil {
		m.t.Fatal(err)
	}
	return strings.TrimSpace(string(out))
}

// said counts lines of the memory node's log that have all of these texts.
func (m *manager) said(texts ...string) (n int) {
	m.t.Helper()
	out, err := m.command("cat", "/run/kvd/log").Output()
	if err != nil {
		m.t.Fatal(err)
	}
	m.log = string(out)
lines:
	for line := range strings.Lines(m.log) {
		for _, text := range texts {
			if !strings.Contains(line, text) {
				continue lines
			}
		}
		n++
	}
	return n
}

// systemdHere tells why this machine cannot run a systemd of a test's own.
func systemdHere() error {
	if os.Geteuid() != 0 {
		return errors.New("only root has namespaces of its own")
	}
	for _, tool := range []string{"unshare", "nsenter", "systemctl", "/lib/systemd/systemd"} {
		if _, err := exec.LookPath(tool); err != nil {
			return err
		}
	}
	return nil
}

// TestSystemd runs the unit of a memory node, with the only copy of every key, under a real systemd: it loses nothing
// when it is restarted, when its keeper is killed, and when all of its processes are, with a client of this machine
// connected all the while. It does when it is stopped.
func TestSystemd(t *testing.T) {
	if os.Getenv("KVD_TEST_ENGINE") == "" {
		t.Skip("KVD_TEST_ENGINE is not set: run make test-deploy")
	}
	if err := systemdHere(); err != nil {
		t.Fatal(err)
	}
	at := host(1)
	files, units := t.TempDir(), t.TempDir()
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"kvd", "kvctl"} {
		if err := os.Link(filepath.Join(commands(t), name), filepath.Join(files, name)); err != nil {
			t.Fatal(err)
		}
	}
	for _, dir := range []string{files, units} {
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	sub := strings.NewReplacer("/usr/local/bin/", "/run/kvd/", "/etc/kvd/", "/run/kvd/", "127.0.0.1", at)
	write(files+"/memnode.yaml", sub.Replace(read(t, "memnode.yaml")))
	write(units+"/"+memnodeUnit, sub.Replace(read(t, memnodeUnit)))
	if err := os.Mkdir(units+"/"+memnodeUnit+".d", 0o755); err != nil {
		t.Fatal(err)
	}
	// Nothing but the unit is started, and there is no journal.
	write(units+"/"+memnodeUnit+".d/test.conf",
		"[Unit]\nDefaultDependencies=no\nStartLimitIntervalSec=0\n[Service]\n"+
			"StandardOutput=append:/run/kvd/log\nStandardError=append:/run/kvd/log\n")
	write(units+"/kvd.target", "[Unit]\nDefaultDependencies=no\n")

	start(t, []string{"TMPDIR=" + t.TempDir()}, commands(t)+"/kvd", "directory", "--id=d1", "--bootstrap", "--listen="+
		at+":7400", "--raft-listen="+at+":7401", "--data-dir="+t.TempDir())
	m := boot(t, files, units)
	t.Cleanup(func() {
		if t.Failed() {
			m.said()
			t.Log(m.log)
		}
	})
	m.must("systemctl", "start", memnodeUnit)
	env := []string{"KVD_DIRECTORY=" + at + ":7400"}
	kvctl := func(args ...string) string {
		t.Helper()
		return strings.TrimSpace(
			output(t, env, append([]string{commands(t) + "/kvctl", "--provider=tcp", "--timeout=1m"}, args...)...))
	}
	kvctl("namespace", "create", "cache", "--mode=cache", "--bytes=64MiB")

	// A gateway among the processes of that machine reaches the memory by shm.
	gateway := m.command("/run/kvd/kvd", "gateway", "--databases=cache", "--provider=shm", "--directory="+at+":7400",
		"--listen="+at+":6379", "--listen-memcached=off")
	var log lockedBuffer
	gateway.Stdout, gateway.Stderr = &log, &log
	if err := gateway.Start(); err != nil {
		t.Fatal(err)
	}
	endGateway := sync.OnceFunc(func() {
		if pid := childOf(gateway.Process.Pid); pid > 0 {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
		_ = gateway.Wait()
	})
	t.Cleanup(func() {
		endGateway()
		if t.Failed() {
			t.Logf("gateway: %s", &log)
		}
	})
	m.until("the gateway", func() bool { return strings.Contains(log.String(), "ready role=gateway") })
	r := dialRedis(t, at+":6379")
	expect := func(want string, command string) {
		t.Helper()
		if got := r.do(strings.Fields(command)...); got != want {
			t.Errorf("%s: %q, want %q", command, got, want)
		}
	}
	const keys = 50
	lives := 1
	for k := range keys {
		expect("+OK", fmt.Sprintf("SET key%d value%d", k, k))
	}
	survives := func(how string, act func()) {
		t.Helper()
		before := m.show("MainPID")
		stored := m.show("NFileDescriptorStore")
		act()
		m.until("another process after "+how, func() bool {
			return m.show("MainPID") != before && m.show("ActiveState") == "active"
		})
		lives++
		if n := m.said("memory kept by the keeper is taken over"); n != lives-1 {
			t.Errorf("%s: %d processes took the memory over, want %d", how, n, lives-1)
		}
		expect("+OK", fmt.Sprintf("SET life %d", lives))
		for k := range keys {
			expect(fmt.Sprintf("$%d", len(fmt.Sprintf("value%d", k))), fmt.Sprintf("GET key%d", k))
		}
		if got, want := kvctl("--namespace=cache", "get", "life"), strconv.Itoa(lives); got != want {
			t.Errorf("%s: by tcp %q, want %q", how, got, want)
		}
		t.Logf("%s: %s descriptors were stored", how, stored)
	}
	survives("systemctl restart", func() { m.must("systemctl", "restart", memnodeUnit) })
	survives("kill -9 of the keeper", func() {
		m.must("systemctl", "kill", "--kill-who=main", "--signal=KILL", memnodeUnit)
	})
	survives("kill -9 of all processes", func() { m.must("systemctl", "kill", "--signal=KILL", memnodeUnit) })
	survives("systemctl restart, again", func() { m.must("systemctl", "restart", memnodeUnit) })
	if n := m.said("outlive its keeper"); n != 0 {
		t.Errorf("systemd's store had %d troubles", n)
	}

	endGateway() // a memory node that says goodbye waits for its sessions
	m.must("systemctl", "kill", "--kill-who=main", "--signal=INT", memnodeUnit)
	m.until("the end", func() bool { return m.show("ActiveState") == "inactive" })
	if got := m.show("NFileDescriptorStore"); got != "0" {
		t.Errorf("after SIGINT systemd holds %s descriptors", got)
	}
	m.must("systemctl", "start", memnodeUnit)
	m.must("systemctl", "stop", memnodeUnit)
	m.must("systemctl", "start", memnodeUnit)
	if n := m.said("memory kept by the keeper is taken over"); n != lives-1 {
		t.Errorf("after it was stopped %d processes took memory over, want %d", n, lives-1)
	}
}
