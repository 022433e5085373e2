package e2e

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kvd-project/kvd/internal/loopback"
	"github.com/kvd-project/kvd/internal/testutil"
)

// patience bounds what takes milliseconds on a machine that is not busy.
const patience = testutil.Limit

var bin string // folder of the commands

func TestMain(m *testing.M) {
	if n := os.Getenv(clientsEnv); n != "" {
		if err := clients(n, os.Getenv(clientsDirEnv)); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	if doc := os.Getenv(loadEnv); doc != "" {
		if err := load(doc); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	if doc := os.Getenv(bytesEnv); doc != "" {
		if err := bytesMain(doc); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	if dir := os.Getenv(hammerEnv); dir != "" {
		fmt.Fprintln(os.Stderr, hammer(dir, os.Getenv(hammerFileEnv)))
		os.Exit(1)
	}
	os.Exit(func() int {
		dir, err := os.MkdirTemp("", "kvd-e2e")
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer os.RemoveAll(dir)
		bin = dir
		for _, c := range []string{"kvd", "kvctl"} {
			cmd := exec.Command("go", "build", "-o", filepath.Join(dir, c), "github.com/kvd-project/kvd/cmd/"+c)
			if out, err := cmd.CombinedOutput(); err != nil {
				fmt.Fprintf(os.Stderr, "build %s: %v\n%s", c, err, out)
				return 1
			}
		}
		return m.Run()
	}())
}

// sources looks at what the commands are made of: they are not among the packages that
// this test is known to depend on, but a remembered result is void when files change that
// a test has looked at.
var sources = sync.OnceValue(func() error {
	return filepath.WalkDir("../..", func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() && (d.Name() == ".git" || d.Name() == "dist") { // releases in dist come and go
			return fs.SkipDir
		}
		return err
	})
})

// buffer may be read while a process writes to it.
type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// world is where one test's processes live.
type world struct {
	t   *testing.T
	env []string
	dir string // the directory node's address
}

func newWorld(t *testing.T) *world {
	t.Parallel()
	return aloneWorld(t)
}

// aloneWorld is one whose test runs beside no other of this package.
func aloneWorld(t *testing.T) *world {
	if err := sources(); err != nil {
		t.Fatal(err)
	}
	run, err := os.MkdirTemp("", "kvd") // short enough for a socket in it
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(run) })
	w := &world{t: t}
	for _, e := range os.Environ() {
		if !strings.HasPrefix(e, "KVD_") && !strings.HasPrefix(e, "XDG_RUNTIME_DIR=") &&
			!strings.HasPrefix(e, "RUNTIME_DIRECTORY=") {
			w.env = append(w.env, e)
		}
	}
	w.env = append(w.env, "XDG_RUNTIME_DIR="+run)
	return w
}

// daemon is a kvd that runs.
type daemon struct {
	w      *world
	cmd    *exec.Cmd
	stderr *buffer
	exited chan struct{}
	ready  chan string // its first line
}

// spawn starts kvd without waiting for it to serve.
func (w *world) spawn(args ...string) *daemon {
	w.t.Helper()
	cmd := exec.Command(filepath.Join(bin, "kvd"), args...)
	cmd.Env = w.env
	return w.run(cmd)
}

// run starts a command without waiting for it to serve.
func (w *world) run(cmd *exec.Cmd) *daemon {
	w.t.Helper()
	d := &daemon{w: w, cmd: cmd, stderr: new(buffer), exited: make(chan struct{}), ready: make(chan string, 1)}
	d.cmd.Stderr = d.stderr
	out, err := d.cmd.StdoutPipe()
	if err != nil {
		w.t.Fatal(err)
	}
	if err := d.cmd.Start(); err != nil {
		w.t.Fatal(err)
	}
	go func() {
		defer close(d.exited)
		r := bufio.NewReader(out)
		if line, err := r.ReadString('\n'); err == nil {
			d.ready <- line
		}
		_, _ = io.Copy(io.Discard, r)
		_ = d.cmd.Wait() // ProcessState says how
	}()
	w.t.Cleanup(func() {
		_ = d.cmd.Process.Kill() // most have exited
		<-d.exited
		if w.t.Failed() {
			w.t.Logf("%s: %v\n%s", strings.Join(cmd.Args, " "), d.cmd.ProcessState, d.stderr)
		}
	})
	return d
}

// start starts kvd and waits for its ready line.
func (w *world) start(args ...string) *daemon {
	w.t.Helper()
	d := w.spawn(args...)
	d.awaitReady()
	return d
}

func (d *daemon) awaitReady() {
	d.w.t.Helper()
	select {
	case line := <-d.ready:
		if !strings.HasPrefix(line, "ready ") {
			d.w.t.Fatalf("%v: first line is %q", d.cmd.Args, line)
		}
	case <-d.exited:
		d.w.t.Fatalf("%v: %v\n%s", d.cmd.Args, d.cmd.ProcessState, d.stderr)
	case <-time.After(patience):
		d.w.t.Fatalf("%v is not ready", d.cmd.Args)
	}
}

// wait returns the exit status.
func (d *daemon) wait() int {
	d.w.t.Helper()
	select {
	case <-d.exited:
	case <-time.After(patience):
		d.w.t.Fatalf("%v does not end", d.cmd.Args)
	}
	return d.cmd.ProcessState.ExitCode()
}

func (d *daemon) signal(s os.Signal) int {
	d.w.t.Helper()
	if err := d.cmd.Process.Signal(s); err != nil {
		d.w.t.Fatal(err)
	}
	return d.wait()
}

// freeAddr is a loopback address of this process that was free a moment ago.
func freeAddr(t *testing.T) string {
	t.Helper()
	addr, err := loopback.Free()
	if err != nil {
		t.Fatal(err)
	}
	return addr
}

// directory are the arguments of a directory node on folder data.
func (w *world) directory(data, raft string) []string {
	return []string{"directory", "--id", "d1", "--data-dir", data, "--listen", w.dir, "--raft-listen", raft,
		"--bootstrap", "--lease", "2s"}
}

func (w *world) memnode(name string) []string {
	return []string{"memnode", "--name", name, "--directory", w.dir, "--memory", "64MiB"}
}

// ctl runs kvctl.
func (w *world) ctl(stdin []byte, args ...string) (out []byte, stderr string, status int) {
	w.t.Helper()
	cmd := exec.Command(filepath.Join(bin, "kvctl"), args...)
	cmd.Env = append(w.env, "KVD_DIRECTORY="+w.dir)
	cmd.Stdin = bytes.NewReader(stdin)
	var e bytes.Buffer
	cmd.Stderr = &e
	out, err := cmd.Output()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		w.t.Fatal(err)
	}
	return out, e.String(), cmd.ProcessState.ExitCode()
}

// must runs kvctl and wants status 0.
func (w *world) must(stdin []byte, args ...string) []byte {
	w.t.Helper()
	out, stderr, status := w.ctl(stdin, args...)
	if status != 0 {
		w.t.Fatalf("kvctl %v: exit status %d\n%s", args, status, stderr)
	}
	return out
}

// TestStore runs a directory node and two memory nodes as processes, moves
// values over both providers, kills the directory with no warning, and finds
// everything again.
func TestStore(t *testing.T) {
	w := newWorld(t)
	w.dir = freeAddr(t)
	raft, data := freeAddr(t), t.TempDir()
	dir := w.start(w.directory(data, raft)...)
	m1, m2 := w.start(w.memnode("m1")...), w.start(w.memnode("m2")...)

	values := map[string][]byte{"empty": {}, "small": []byte("v\x00\n\xff"),
		"large": bytes.Repeat([]byte("0123456789abcdef"), 1<<18)}
	for _, p := range []string{"shm", "tcp"} {
		for k, v := range values {
			w.must(v, "--provider", p, "put", p+k)
		}
	}
	check := func() {
		t.Helper()
		for _, by := range []string{"shm", "tcp"} {
			for _, p := range []string{"shm", "tcp"} {
				for k, v := range values {
					if got := w.must(nil, "--provider", p, "get", by+k); !bytes.Equal(got, v) {
						t.Fatalf("%s over %s, put over %s: %d bytes, want %d", k, p, by, len(got), len(v))
					}
				}
			}
		}
	}
	check()
	for i := range 20 {
		w.must(nil, "incr", fmt.Sprintf("n%d", i%5))
	}
	shards := w.must(nil, "shards", "-o", "json")

	if dir.signal(syscall.SIGKILL) == 0 {
		t.Fatal("a killed directory exits with 0")
	}
	dir = w.start(w.directory(data, raft)...)
	check()
	if again := w.must(nil, "shards", "-o", "json"); !bytes.Equal(again, shards) {
		t.Errorf("shards before:\n%s\nafter the restart:\n%s", shards, again)
	}
	for i := range 5 {
		if got := strings.TrimSpace(string(w.must(nil, "incr", fmt.Sprintf("n%d", i)))); got != "5" {
			t.Errorf("counter %d is %q after the restart, want 5", i, got)
		}
	}

	// A second one on the same folder is refused; the first does not notice.
	second := w.spawn("directory", "--id", "d1", "--data-dir", data, "--listen", freeAddr(t), "--raft-listen",
		freeAddr(t), "--bootstrap")
	if status := second.wait(); status == 0 || !strings.Contains(second.stderr.String(), data) {
		t.Errorf("second directory on one folder: exit status %d\n%s", status, second.stderr)
	}
	// So is one whose port is taken, by name.
	taken := w.spawn("directory", "--id", "d2", "--data-dir", t.TempDir(), "--listen", w.dir, "--raft-listen",
		freeAddr(t), "--bootstrap")
	if status := taken.wait(); status == 0 || !strings.Contains(taken.stderr.String(), w.dir) {
		t.Errorf("directory on a port in use: exit status %d\n%s", status, taken.stderr)
	}
	node := w.spawn(append(w.memnode("m3"), "--listen-tcp", w.dir)...)
	if status := node.wait(); status == 0 || !strings.Contains(node.stderr.String(), w.dir) {
		t.Errorf("memory node on a port in use: exit status %d\n%s", status, node.stderr)
	}
	check()

	for what, d := range map[string]*daemon{"memory node 1": m1, "memory node 2": m2, "directory": dir} {
		if status := d.signal(syscall.SIGTERM); status != 0 {
			t.Errorf("%s: exit status %d after SIGTERM\n%s", what, status, d.stderr)
		}
	}
}

// TestMemnodeKilled kills a memory node and starts it again: of keys with one copy its
// own are gone and the other's stay, those with two all stay, and writing works again by
// itself.
func TestMemnodeKilled(t *testing.T) {
	w := newWorld(t)
	w.dir = freeAddr(t)
	w.start(w.directory(t.TempDir(), freeAddr(t))...)
	m1 := w.start(w.memnode("m1")...)
	w.start(w.memnode("m2")...)
	w.must(nil, "namespace", "create", "one", "--replicas", "1")
	const keys = 16
	namespaces := []string{"default", "one"}
	for _, ns := range namespaces {
		for i := range keys {
			w.must([]byte("v"), "--namespace", ns, "put", fmt.Sprintf("k%d", i))
		}
	}
	m1.signal(syscall.SIGKILL)
	w.start(w.memnode("m1")...)
	for _, ns := range namespaces {
		kept := 0
		for i := range keys {
			k := fmt.Sprintf("k%d", i)
			deadline := time.Now().Add(patience)
			for {
				out, stderr, status := w.ctl(nil, "--namespace", ns, "get", k)
				if status == 0 {
					if string(out) != "v" {
						t.Fatalf("%s: %s is %q", ns, k, out)
					}
					kept++
				}
				if status <= 1 {
					break
				}
				if time.Now().After(deadline) {
					t.Fatalf("%s: get %s: exit status %d\n%s", ns, k, status, stderr)
				}
			}
			w.must([]byte("w"), "--namespace", ns, "put", k)
			if got := w.must(nil, "--namespace", ns, "get", k); string(got) != "w" {
				t.Fatalf("%s: %s is %q", ns, k, got)
			}
		}
		if ns == "default" && kept != keys || ns == "one" && (kept == 0 || kept == keys) {
			t.Errorf("%s: %d of %d keys survived the loss of one of two memory nodes", ns, kept, keys)
		}
	}
}

// TestExitStatus: 0 found, 1 not found, 2 usage, 3 unavailable.
func TestExitStatus(t *testing.T) {
	w := newWorld(t)
	w.dir = freeAddr(t)
	w.start(w.directory(t.TempDir(), freeAddr(t))...)
	w.start(w.memnode("m1")...)
	w.must([]byte("v"), "put", "k")
	nowhere := freeAddr(t)
	for _, c := range []struct {
		want int
		says string
		args []string
	}{
		{0, "", []string{"get", "k"}},
		{1, "", []string{"get", "absent"}},
		{1, "", []string{"mget", "k", "absent"}},
		{1, "", []string{"del", "absent"}},
		{2, "", []string{"get"}},
		{2, "frobnicate", []string{"frobnicate"}},
		{2, "frob", []string{"get", "--frob", "k"}},
		{2, "", []string{"incr", "k", "one"}},
		{2, "warp", []string{"--provider", "warp", "get", "k"}},
		{3, nowhere, []string{"--directory", nowhere, "--timeout", "500ms", "get", "k"}},
	} {
		_, stderr, status := w.ctl(nil, c.args...)
		if status != c.want || !strings.Contains(stderr, c.says) || status > 1 && stderr == "" {
			t.Errorf("kvctl %v: exit status %d, want %d, saying %q\n%s", c.args, status, c.want, c.says, stderr)
		}
	}
	d := w.spawn("directory", "--frob")
	if d.wait() == 0 {
		t.Error("kvd with an unknown flag exits with 0")
	}
}
