package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/buildinfo"
	"github.com/kvd-project/kvd/internal/config"
	"github.com/kvd-project/kvd/internal/dirclient"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/identity"
	"github.com/kvd-project/kvd/internal/identity/identitytest"
	"github.com/kvd-project/kvd/internal/janitor"
	"github.com/kvd-project/kvd/internal/keeper"
	"github.com/kvd-project/kvd/internal/metrics"
	"github.com/kvd-project/kvd/internal/providers"
	"github.com/kvd-project/kvd/internal/testutil"
	"github.com/kvd-project/kvd/internal/token"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/driver"
)

// beKvd makes the test binary run as kvd, so that tests can send it signals.
const beKvd = "KVD_TEST_BE_KVD"

func TestMain(m *testing.M) {
	if os.Getenv(beKvd) != "" {
		if n, err := strconv.ParseUint(os.Getenv("KVD_TEST_FILES"), 10, 64); err == nil {
			if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: n, Max: n}); err != nil {
				panic(err)
			}
		}
		main()
	}
	if keeper.IsWorker() {
		panic("a keeper that runs in a test has started all tests as its worker: set KVD_KEEP=off there")
	}
	if os.Getenv(beMob) != "" {
		beCrowd()
	}
	if at := os.Getenv(beWriter); at != "" {
		if err := writeValues(at); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

const patience = testutil.Limit

// process is a kvd that runs.
type process struct {
	t      *testing.T
	cmd    *exec.Cmd
	stdout *bufio.Reader
	stderr *buffer
	kv     map[string]string // of the ready line
	next   string            // what kvd dev prints behind it
	exited chan struct{}
}

// buffer may be read while a process writes to it.
type buffer struct {
	mu   sync.Mutex
	b    bytes.Buffer
	more chan struct{} // closed by the next Write; nil: nobody waits for one
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.more != nil {
		close(b.more)
		b.more = nil
	}
	return b.b.Write(p)
}

// holds waits until the buffer holds text, and reports whether it came in time.
func (b *buffer) holds(text string) bool {
	limit := time.After(patience)
	for {
		b.mu.Lock()
		there := strings.Contains(b.b.String(), text)
		if b.more == nil {
			b.more = make(chan struct{})
		}
		more := b.more
		b.mu.Unlock()
		if there {
			return true
		}
		select {
		case <-more:
		case <-limit:
			return false
		}
	}
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// spawn starts kvd without waiting for it to serve.
func spawn(t *testing.T, env []string, args ...string) *process {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return spawnFrom(t, exe, env, args...)
}

// spawnFrom is spawn with another file of this program.
func spawnFrom(t *testing.T, exe string, env []string, args ...string) *process {
	t.Helper()
	p := &process{t: t, cmd: exec.Command(exe, args...), stderr: new(buffer), exited: make(chan struct{})}
	p.cmd.Env = append(os.Environ(), append(env, beKvd+"=1")...)
	p.cmd.Stderr = p.stderr
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	p.cmd.Stdout = w
	p.stdout = bufio.NewReader(r)
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_ = w.Close()
	go func() {
		defer close(p.exited)
		_ = p.cmd.Wait() // ProcessState says how
	}()
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill() // most have exited
		<-p.exited
		_ = r.Close()
		if t.Failed() {
			t.Logf("%v: %s\n%s", args, p.cmd.ProcessState, p.stderr)
		}
	})
	return p
}

// start starts kvd and waits for its ready line.
func start(t *testing.T, env []string, args ...string) *process {
	t.Helper()
	p := spawn(t, env, args...)
	p.ready()
	return p
}

func (p *process) ready() {
	p.t.Helper()
	timer := time.AfterFunc(patience, func() { _ = p.cmd.Process.Kill() }) // ends the read
	line, err := p.stdout.ReadString('\n')
	timer.Stop()
	if err != nil {
		p.t.Fatalf("no ready line: %v, %q", err, line)
	}
	words := strings.Fields(line)
	if words[0] != "ready" {
		p.t.Fatalf("first line is %q, want ready", line)
	}
	p.kv = make(map[string]string)
	for _, w := range words[1:] {
		k, v, _ := strings.Cut(w, "=")
		p.kv[k] = v
	}
	if p.kv["role"] != "dev" {
		return
	}
	timer.Reset(patience)
	for !strings.Contains(line, "Ctrl-C") { // its last line
		if line, err = p.stdout.ReadString('\n'); err != nil {
			p.t.Fatalf("behind the ready line: %v, %q", err, p.next)
		}
		p.next += line
	}
	timer.Stop()
}

// stop sends sig and returns the exit status.
func (p *process) stop(sig os.Signal) int {
	p.t.Helper()
	if err := p.cmd.Process.Signal(sig); err != nil {
		p.t.Fatal(err)
	}
	return p.wait()
}

func (p *process) wait() int {
	p.t.Helper()
	select {
	case <-p.exited:
	case <-time.After(patience):
		p.t.Fatal("it does not end")
	}
	if rest, err := io.ReadAll(p.stdout); err != nil || len(rest) > 0 {
		p.t.Errorf("more on stdout: %q, %v", rest, err)
	}
	return p.cmd.ProcessState.ExitCode()
}

func runtimeDir(t *testing.T) (env []string, dir string) {
	dir = t.TempDir()
	return []string{"XDG_RUNTIME_DIR=" + dir, "RUNTIME_DIRECTORY="}, dir
}

func wantEmpty(t *testing.T, dir string) {
	t.Helper()
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left behind in %s: %v, %v", dir, left, err)
	}
}

// open opens a client; it is closed at the end of the test.
func open(t *testing.T, directory, provider string, cfg *tls.Config) *client.Client {
	t.Helper()
	d, err := providers.Open(provider, providers.Options{TLSClient: cfg})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.Close() })
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c, err := client.Open(ctx, client.Options{Directory: []string{directory}, Devices: []*rdma.Device{d}, TLS: cfg})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() }) // the store may be gone
	return c
}

func roundTrip(t *testing.T, c *client.Client, key string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if _, err := c.Put(ctx, []byte(key), []byte("v of "+key), client.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	wantValue(t, c, key)
}

func wantValue(t *testing.T, c *client.Client, key string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if it, err := c.Get(ctx, []byte(key)); err != nil || string(it.Value) != "v of "+key {
		t.Fatalf("get %q: %q, %v", key, it.Value, err)
	}
}

func TestDev(t *testing.T) {
	for _, sig := range []os.Signal{syscall.SIGTERM, syscall.SIGINT} {
		t.Run(sig.String(), func(t *testing.T) {
			env, dir := runtimeDir(t)
			p := start(t, env, "dev", "--listen", "127.0.0.1:0", "--memory", "64MiB")
			if p.kv["role"] != "dev" || p.kv["memnodes"] != "2" || p.kv["memory"] != "64MiB" ||
				strings.Count(p.kv["shm"], ",") != 1 || strings.Count(p.kv["tcp"], ",") != 1 {
				t.Errorf("ready line holds %v", p.kv)
			}
			for _, provider := range []string{"shm", "tcp"} {
				c := open(t, p.kv["directory"], provider, nil)
				roundTrip(t, c, provider)
				if err := c.Close(); err != nil {
					t.Error(err)
				}
			}
			if got := redis(t, "tcp", p.kv["redis"], nil, "SET greeting hello", "GET greeting", "SELECT 1",
				"GET greeting"); got != "+OK $5 hello +OK $-1" {
				t.Errorf("Redis's protocol: %q", got)
			}
			if p.kv["memcached"] == "" {
				t.Errorf("ready line holds %v", p.kv)
			}
			wantPage(t, p.kv["http"], "/readyz", http.StatusOK, "ok\n")
			wantPage(t, p.kv["http"], "/", http.StatusOK, "<summary>m2</summary>",
				"<summary>cache</summary>", "<td>store</td><td>2</td>")
			wantPage(t, p.kv["http"], "/metrics", http.StatusOK,
				`kvd_client_operations_total{namespace="cache",op="put"} 1`,
				`kvd_memnode_registered{node="m1"} 1`, `kvd_memnode_registered{node="m2"} 1`, "kvd_directory_leader 1",
				"kvd_raft_proposals_total ", "kvd_raft_term ", `kvd_build_info{goversion="`)
			scrub(t, p.kv["directory"], "default")
			wantMetric(t, p.kv["http"], `kvd_janitor_jobs_total{kind="scrub",result="done"} [1-9]`)
			if code := p.stop(sig); code != 0 {
				t.Errorf("exit status %d, want 0", code)
			}
			wantEmpty(t, dir)
			if !strings.Contains(p.stderr.String(), "level=INFO") {
				t.Errorf("no log on stderr: %q", p.stderr)
			}
		})
	}
}

// A directory that is killed and started again on its folder keeps membership,
// namespace and shards; clients and memory nodes come back by themselves.
func TestSeparateProcesses(t *testing.T) {
	env, dir := runtimeDir(t)
	data := t.TempDir()
	args := func(listen string) []string {
		return []string{"directory", "--id=d1", "--data-dir=" + data, "--listen=" + listen, "--raft-listen=127.0.0.1:0",
			"--bootstrap", "--lease=5s"}
	}
	d := start(t, env, args("127.0.0.1:0")...)
	addr := d.kv["directory"]
	m1 := start(t, env, "memnode", "--name=m1", "--directory="+addr, "--memory=64MiB")
	m2 := start(t, env, "memnode", "--name=m2", "--directory="+addr, "--memory=64MiB", "--health-listen=127.0.0.1:0")
	if m1.kv["shm"] == "" || m1.kv["tcp"] == "" || m1.kv["shm"] == m2.kv["shm"] || m1.kv["health"] != "" {
		t.Errorf("ready lines hold %v and %v", m1.kv, m2.kv)
	}
	healthy(t, addr)
	healthy(t, m2.kv["health"])
	shm, tcp := open(t, addr, "shm", nil), open(t, addr, "tcp", nil)
	roundTrip(t, shm, "a")
	roundTrip(t, tcp, "b")

	second := spawn(t, env, args("127.0.0.1:0")...)
	if code := second.wait(); code != exitFailure ||
		!strings.Contains(second.stderr.String(), "is another kvd running on it?") {
		t.Errorf("a second directory on the same folder: exit status %d, %s", code, second.stderr)
	}

	if code := d.stop(syscall.SIGKILL); code == 0 {
		t.Error("SIGKILL did not end the directory")
	}
	wantValue(t, tcp, "a") // the directory is not on the way
	d = start(t, env, args(addr)...)
	roundTrip(t, shm, "c")
	roundTrip(t, open(t, addr, "tcp", nil), "d")
	wantValue(t, tcp, "a")
	for _, p := range []*process{m1, m2, d} {
		if code := p.stop(syscall.SIGTERM); code != 0 {
			t.Errorf("exit status %d, want 0", code)
		}
	}
	wantEmpty(t, dir)
}

func healthy(t *testing.T, addr string) {
	t.Helper()
	var out, errs bytes.Buffer
	if code := run(t.Context(), []string{"health", addr}, &out, &errs); code != 0 || out.String() != "SERVING\n" {
		t.Errorf("health of %s: exit status %d, %q, %q", addr, code, &out, &errs)
	}
}

func TestHealth(t *testing.T) {
	lis := testutil.Listen(t)
	ok := make(chan bool, 1)
	door, stop, err := serveHealth(lis, nil, identity.Mapping{}, slog.New(slog.DiscardHandler), func() bool {
		return <-ok
	})
	if err != nil {
		t.Fatal(err)
	}
	check := func(want string, code int) {
		t.Helper()
		var out, errs bytes.Buffer
		if got := run(t.Context(), []string{"health", "--timeout=5s", lis.Addr().String()}, &out, &errs); got != code {
			t.Errorf("exit status %d, want %d", got, code)
		}
		if s := out.String() + errs.String(); !strings.Contains(s, want) {
			t.Errorf("said %q, want %q", s, want)
		}
	}
	ok <- true
	check("SERVING\n", 0)
	ok <- false
	check("NOT_SERVING\n", exitFailure)
	// Connections that say nothing, or greet and ask nothing, keep nobody from asking.
	attack(t, lis.Addr().String(), 2*healthConns, nil)
	attack(t, lis.Addr().String(), 2*healthConns,
		[]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"))
	ok <- true
	check("SERVING\n", 0)
	if s := door.Stats(); s.Conns > healthConns || s.Accepted < 3*healthConns {
		t.Errorf("%+v", s)
	}
	stop()
	check("connection refused", exitFailure)
}

// systemd is told when a role serves and when it stops.
func TestNotify(t *testing.T) {
	name := filepath.Join(t.TempDir(), "notify")
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: name, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	next := func() string {
		t.Helper()
		if err := conn.SetReadDeadline(time.Now().Add(patience)); err != nil {
			t.Fatal(err)
		}
		b := make([]byte, 100)
		n, err := conn.Read(b)
		if err != nil {
			t.Fatal(err)
		}
		return string(b[:n])
	}
	env := []string{"NOTIFY_SOCKET=" + name}
	d := start(t, env, "directory", "--id=d", "--data-dir="+t.TempDir(), "--listen=127.0.0.1:0",
		"--raft-listen=127.0.0.1:0", "--bootstrap")
	if got := next(); got != "READY=1" {
		t.Errorf("directory: %q", got)
	}
	run := t.TempDir()
	m := start(t, append(env, "RUNTIME_DIRECTORY="+run), "memnode", "--name=m", "--directory="+d.kv["directory"])
	if got := next(); got != "READY=1" {
		t.Errorf("memnode: %q", got)
	}
	if m.kv["shm"] != filepath.Join(run, "memnode.sock") {
		t.Errorf("shm socket is %q, want it in RUNTIME_DIRECTORY", m.kv["shm"])
	}
	for _, p := range []*process{m, d} {
		if code := p.stop(syscall.SIGTERM); code != 0 {
			t.Errorf("exit status %d", code)
		}
		if got := next(); got != "STOPPING=1" {
			t.Errorf("%q", got)
		}
	}
	wantEmpty(t, run)
}

// A janitor runs by itself as well as in a memory node, and neither holds the
// process when it is to stop.
func TestJanitor(t *testing.T) {
	env, dir := runtimeDir(t)
	d := start(t, env, "directory", "--id=d", "--data-dir="+t.TempDir(), "--listen=127.0.0.1:0",
		"--raft-listen=127.0.0.1:0", "--bootstrap")
	addr := d.kv["directory"]
	m := start(t, env, "memnode", "--name=m", "--directory="+addr, "--memory=64MiB", "--janitor=false")
	j := start(t, env, "janitor", "--directory="+addr, "--http-listen=127.0.0.1:0")
	if j.kv["role"] != "janitor" || j.kv["directory"] != addr {
		t.Errorf("ready line holds %v", j.kv)
	}
	roundTrip(t, open(t, addr, "shm", nil), "k")
	scrub(t, addr, "default")
	wantMetric(t, j.kv["http"], `kvd_janitor_jobs_total{kind="scrub",result="done"} [1-9]`)
	wantMetric(t, j.kv["http"], `kvd_janitor_job_seconds_total{kind="scrub"} .*[1-9]`)
	for _, p := range []*process{j, m, d} {
		if code := p.stop(syscall.SIGTERM); code != 0 {
			t.Errorf("exit status %d, want 0", code)
		}
	}
	wantEmpty(t, dir)
	var out, errs bytes.Buffer
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if code := run(ctx,
		[]string{"janitor", "--directory=" + start(t, env, "dev", "--listen=127.0.0.1:0").kv["directory"],
			"--provider=ib"}, &out, &errs); code != exitUsage ||
		!strings.Contains(errs.String(), `provider: unknown provider "ib"`) {
		t.Errorf("unknown provider: exit status %d, %s", code, &errs)
	}
}

// scrub asks for a scrub of a namespace.
func scrub(t *testing.T, directory, namespace string) {
	t.Helper()
	dir, err := dirclient.Open(dirclient.Options{Addrs: []string{directory}})
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	err = dir.CallOnce(ctx, func(ctx context.Context, c dirpb.DirectoryClient) error {
		_, err := c.StartJob(ctx, &dirpb.StartJobRequest{Kind: dirpb.JobKind_JOB_SCRUB, Namespace: namespace})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// wantMetric waits until a line that matches is served.
func wantMetric(t *testing.T, addr, line string) {
	t.Helper()
	want := regexp.MustCompile("(?m)^" + line)
	c := http.Client{Timeout: patience, Transport: &http.Transport{DisableKeepAlives: true}}
	for deadline := time.Now().Add(patience); ; {
		r, err := c.Get("http://" + addr + "/metrics")
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(r.Body)
		_ = r.Body.Close()
		if err != nil {
			t.Fatal(err)
		}
		if want.Match(b) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("no %s:\n%s", line, b)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func TestJobResult(t *testing.T) {
	gone := fmt.Errorf("report: %w", janitor.ErrGone)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for _, tc := range []struct {
		ctx  context.Context
		err  error
		want metrics.JobResult
	}{
		{t.Context(), nil, metrics.JobDone},
		{ended, nil, metrics.JobDone},
		{t.Context(), gone, metrics.JobGivenUp},
		{ended, context.Canceled, metrics.JobGivenUp},
		{t.Context(), context.DeadlineExceeded, metrics.JobFailed},
	} {
		if got := jobResult(tc.ctx, tc.err); got != tc.want {
			t.Errorf("%v: %s, want %s", tc.err, got, tc.want)
		}
	}
}

// A role that still waits for others stops as cleanly as one that serves.
func TestStopWhileStarting(t *testing.T) {
	env, dir := runtimeDir(t)
	nobody := testutil.Listen(t) // answers nothing
	for _, args := range [][]string{
		{"memnode", "--name=m", "--directory=" + nobody.Addr().String()},
		{"janitor", "--directory=" + nobody.Addr().String()},
		{"gateway", "--listen=127.0.0.1:0", "--listen-memcached=off", "--directory=" + nobody.Addr().String()},
		{"directory", "--id=d", "--data-dir=" + t.TempDir(), "--listen=127.0.0.1:0", "--raft-listen=127.0.0.1:0",
			"--join=" + nobody.Addr().String()},
	} {
		p := spawn(t, env, args...)
		conn, err := nobody.Accept() // so it has started
		if err != nil {
			t.Fatal(err)
		}
		if code := p.stop(syscall.SIGTERM); code != 0 {
			t.Errorf("%v: exit status %d, want 0", args, code)
		}
		_ = conn.Close()
	}
	wantEmpty(t, dir)
}

func TestRefusals(t *testing.T) {
	taken := testutil.Listen(t)
	addr := taken.Addr().String()
	t.Setenv("XDG_RUNTIME_DIR", t.TempDir())
	t.Setenv("KVD_KEEP", "off") // a worker would be this test again
	file := filepath.Join(t.TempDir(), "kvd.yaml")
	if err := os.WriteFile(file, []byte("name: m\nmemmory: 1GiB\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	cases := []struct {
		name string
		args []string
		code int
		want string
	}{
		{"dev port", []string{"dev", "--listen", addr}, exitFailure,
			addr + ": bind: address already in use: another process has that address"},
		{"directory port", []string{"directory", "--id=d", "--data-dir=" + t.TempDir(), "--listen=" + addr,
			"--bootstrap"}, exitFailure, "another process has that address"},
		{"raft port", []string{"directory", "--id=d", "--data-dir=" + t.TempDir(), "--listen=127.0.0.1:0",
			"--raft-listen=" + addr, "--bootstrap"}, exitFailure, "another process has that address"},
		{"memnode port", []string{"memnode", "--name=m", "--listen-tcp=" + addr}, exitFailure,
			"another process has that address"},
		{"health port", []string{"memnode", "--name=m", "--health-listen=" + addr}, exitFailure,
			"another process has that address"},
		{"not this machine", []string{"memnode", "--name=m", "--insecure", "--listen-tcp=192.0.2.1:0"}, exitFailure,
			"this machine has no such address"},
		{"nothing to start from", []string{"directory", "--id=d", "--data-dir=" + t.TempDir(), "--listen=127.0.0.1:0",
			"--raft-listen=127.0.0.1:0"}, exitFailure, "bootstrap a new one or join one"},
		{"huge pages", []string{"memnode", "--name=m", "--huge-pages=1GiB", "--memory=1000TiB"}, exitFailure,
			"nr_hugepages"},
		{"no settings", []string{"directory"}, exitUsage, "kvd: id is missing: name this directory node, such as " +
			"d1\nkvd: data-dir is missing"},
		{"unknown key", []string{"memnode", "--config", file}, exitUsage, "memmory (from " + file +
			"): there is no such setting; did you mean memory?"},
		{"no such file", []string{"memnode", "--config", file + ".yaml"}, exitUsage, "no such file"},
		{"size", []string{"memnode", "--name=m", "--memory=64GB"}, exitUsage, `memory is "64GB" (from --memory): want a size such as 512MiB or 64GiB`},
		{"open to others", []string{"memnode", "--name=m", "--listen-tcp=0.0.0.0:0"}, exitUsage,
			"set tls.ca, tls.cert and tls.key, or insecure to do without"},
		{"certificates", []string{"memnode", "--name=m", "--tls-ca=/none", "--tls-cert=/none", "--tls-key=/none"},
			exitUsage, "tls.ca: open /none"},
		{"unknown flag", []string{"dev", "--nodes=3"}, exitUsage, "unknown flag: --nodes"},
		{"unknown command", []string{"serve"}, exitUsage, `unknown command "serve"`},
		{"misspelt command", []string{"memnod"}, exitUsage,
			`unknown command "memnod" for "kvd"; did you mean memnode?`},
		{"misspelt command below one", []string{"directory", "recovr"}, exitUsage, `unknown command "recovr" for "kvd directory"; did you mean recover?`},
		{"misspelt flag", []string{"memnode", "--memmory=1GiB"}, exitUsage,
			`unknown flag: --memmory; did you mean --memory?`},
		{"misspelt flag of another command", []string{"health", "--timout=1s", "x:1"}, exitUsage,
			`unknown flag: --timout; did you mean --timeout?`},
		{"misspelt flag below", []string{"directory", "recover", "--data-dri=x"}, exitUsage,
			`unknown flag: --data-dri; did you mean --data-dir?`},
		{"unknown short flag", []string{"dev", "-m"}, exitUsage, "unknown shorthand flag: 'm' in -m (see"},
		{"misspelt role", []string{"config", "gatway"}, exitUsage, `no role "gatway"; did you mean gateway?`},
		{"misspelt shell", []string{"completion", "basch"}, exitUsage, `unknown command "basch" for "kvd completion"; did you mean bash?`},
		{"misspelt question", []string{"help", "directry"}, exitUsage, `no command "directry" (see kvd --help); did you mean directory?`},
		{"misspelt question below", []string{"help", "config", "jantor"}, exitUsage, `did you mean janitor?`},
		{"argument", []string{"dev", "x"}, exitUsage, `unknown command "x" for "kvd dev"`},
		{"config without role", []string{"config"}, exitUsage,
			"want a role: dev, directory, memnode, janitor, gateway"},
		{"config of no role", []string{"config", "server"}, exitUsage, `no role "server"`},
		{"redis port", []string{"dev", "--listen=127.0.0.1:0", "--redis=" + addr}, exitFailure, "redis: listen tcp " +
			addr + ": bind: address already in use: another process has that address"},
		{"memcached port", []string{"dev", "--listen=127.0.0.1:0", "--memcached=" + addr}, exitFailure,
			"memcached: listen tcp " + addr},
		{"http port", []string{"dev", "--listen=127.0.0.1:0", "--http=" + addr}, exitFailure, "http: listen tcp " +
			addr},
		{"gateway port", []string{"gateway", "--listen=" + addr}, exitFailure, "listen: listen tcp " + addr},
		{"gateway memcached port", []string{"gateway", "--listen=off", "--listen-memcached=" + addr}, exitFailure,
			"listen-memcached: listen tcp " + addr},
		{"gateway http port", []string{"gateway", "--http-listen=" + addr}, exitFailure, "http-listen: listen tcp " +
			addr},
		{"gateway socket", []string{"gateway", "--listen=off", "--listen-memcached=off", "--listen-unix=" + file},
			exitFailure, "listen-unix: "},
		{"gateway provider", []string{"gateway", "--listen=127.0.0.1:0", "--listen-memcached=off", "--provider=ib"},
			exitUsage, `provider: unknown provider "ib"`},
		{"gateway open to others", []string{"gateway", "--listen=0.0.0.0:6379", "--password=secret"}, exitUsage,
			"others can reach it, and it is in clear"},
		{"help of nothing", []string{"help", "bogus"}, exitUsage, `no command "bogus"`},
		{"completion for nobody", []string{"completion", "tcsh"}, exitUsage, `unknown command "tcsh"`},
		{"health without address", []string{"health"}, exitUsage, "accepts 1 arg"},
		{"health of another scheme", []string{"health", "ftp://127.0.0.1:1"}, exitUsage,
			"or that after http:// or https://"},
		{"health of no address", []string{"health", "7400"}, exitUsage, "want host:port"},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			var out, errs bytes.Buffer
			if code := run(ctx, tc.args, &out, &errs); code != tc.code {
				t.Errorf("exit status %d, want %d", code, tc.code)
			}
			if out.Len() > 0 {
				t.Errorf("stdout: %q", &out)
			}
			if !strings.Contains(errs.String(), tc.want) {
				t.Errorf("stderr %q lacks %q", &errs, tc.want)
			}
		})
	}
	wantEmpty(t, os.Getenv("XDG_RUNTIME_DIR"))
}

func TestMemlockLimit(t *testing.T) {
	if hasIPCLock() {
		if err := checkLimits(1<<50, 0, true); err != nil {
			t.Errorf("refused with CAP_IPC_LOCK: %v", err)
		}
	}
	var was unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &was); err != nil {
		t.Fatal(err)
	}
	low := unix.Rlimit{Cur: min(was.Cur, 1<<20), Max: was.Max}
	if err := unix.Setrlimit(unix.RLIMIT_MEMLOCK, &low); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Setrlimit(unix.RLIMIT_MEMLOCK, &was); err != nil {
			t.Error(err)
		}
	}()
	refused := make(chan error)
	go func() {
		// A thread gives the capability up for good; it ends with its goroutine.
		runtime.LockOSThread()
		hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var data [2]unix.CapUserData
		if err := unix.Capget(&hdr, &data[0]); err != nil {
			refused <- err
			return
		}
		data[0].Effective &^= 1 << unix.CAP_IPC_LOCK
		if err := unix.Capset(&hdr, &data[0]); err != nil {
			refused <- err
			return
		}
		refused <- checkLimits(1<<50, 0, true)
	}()
	if err := <-refused; err == nil || !strings.Contains(err.Error(), "LimitMEMLOCK=") {
		t.Errorf("locking 1 PiB: %v, want the limit and how to raise it", err)
	}
}

// kvd config prints what it was given, in a form that --config takes.
func TestConfigPrints(t *testing.T) {
	t.Setenv("KVD_LOG_FORMAT", "json")
	for _, tc := range []struct {
		args []string
		want []string
		code int
	}{
		{[]string{"dev", "--memnodes=3"}, []string{"memnodes: 3\n", "memory: 1GiB\n", "redis: 127.0.0.1:6379\n",
			"http: 127.0.0.1:7480\n", "format: json\n"}, 0},
		{[]string{"directory", "--id=d", "--data-dir=x", "--join=127.0.0.1:1,127.0.0.1:2"},
			[]string{"- 127.0.0.1:2\n", "lease: 1s\n", "scrub-interval: 30s\n"}, 0},
		{[]string{"memnode", "--name=m", "--huge-pages=2MiB", "--memory=1.5GiB"},
			[]string{"memory: 1536MiB\n", "huge-pages: 2MiB\n"}, 0},
		{[]string{"memnode"}, []string{`name: ""`, "janitor: true\n"}, exitUsage},
		{[]string{"broker", "--rdma-traffic-class=300"}, []string{"traffic-class: 300\n"}, exitUsage},
		{[]string{"gateway", "--databases=a,b", "--listen-unix=/run/kvd/redis.sock", "--password=p: #",
			"--show-secrets"}, []string{"- b\n", "listen: 127.0.0.1:6379\n", "listen-memcached: 127.0.0.1:11211\n",
			"password: 'p: #'\n"}, 0},
		{[]string{"janitor", "--window=4"}, []string{"window: 4\n", "poll: 100ms\n"}, 0},
	} {
		var out, errs bytes.Buffer
		if code := run(t.Context(), append([]string{"config"}, tc.args...), &out, &errs); code != tc.code {
			t.Errorf("%v: exit status %d, want %d: %s", tc.args, code, tc.code, &errs)
		}
		for _, w := range tc.want {
			if !strings.Contains(out.String(), w) {
				t.Errorf("%v printed %s, want %q", tc.args, &out, w)
			}
		}
		file := filepath.Join(t.TempDir(), "kvd.yaml")
		if err := os.WriteFile(file, out.Bytes(), 0o600); err != nil {
			t.Fatal(err)
		}
		var again bytes.Buffer
		if code := run(t.Context(), []string{"config", tc.args[0], "--show-secrets", "--config", file}, &again,
			&errs); code != tc.code {
			t.Errorf("%v: reading it back: exit status %d: %s", tc.args, code, &errs)
		}
		if out.String() != again.String() {
			t.Errorf("%v: printed\n%s, read back\n%s", tc.args, &out, &again)
		}
	}
}

func TestVersion(t *testing.T) {
	for _, arg := range []string{"version", "--version"} {
		var out, errs bytes.Buffer
		if code := run(t.Context(), []string{arg}, &out, &errs); code != 0 ||
			out.String() != buildinfo.Line("kvd", version)+"\n" {
			t.Errorf("%s: exit status %d, %q, %q", arg, code, &out, &errs)
		}
	}
}

// A command behind -- has a store of its own, at an address that nobody else uses, and its exit status
// is that of kvd.
func TestDevCommand(t *testing.T) {
	t.Setenv("XDG_RUNTIME_DIR", t.TempDir())
	dev := func(args ...string) (int, string, string) {
		var out, errs bytes.Buffer
		code := run(t.Context(), append([]string{"dev", "--memory=64MiB", "--memnodes=1"}, args...), &out, &errs)
		return code, out.String(), errs.String()
	}
	code, out, errs := dev("--", "sh", "-c", "echo directory=$KVD_DIRECTORY; echo said >&2; exit 7")
	addr, ok := strings.CutPrefix(strings.TrimSpace(out), "directory=127.0.0.1:")
	if port, err := strconv.Atoi(addr); code != 7 || !ok || err != nil || port == 0 || port == 7400 ||
		errs != "said\n" {
		t.Errorf("exit status %d, %q, %q", code, out, errs)
	}
	if code, out, errs := dev("--", "true"); code != 0 || out != "" || errs != "" {
		t.Errorf("true: exit status %d, %q, %q", code, out, errs)
	}
	if code, _, errs := dev("--", "sh", "-c", "kill -9 $$"); code != 128+9 || errs != "" {
		t.Errorf("killed: exit status %d, %q", code, errs)
	}
	if code, _, errs := dev("--", "/no/such/command"); code != exitFailure ||
		!strings.Contains(errs, "/no/such/command") {
		t.Errorf("no such command: exit status %d, %q", code, errs)
	}
	for _, args := range [][]string{{"true"}, {"--"}, {"true", "--", "true"}} {
		if code, _, _ := dev(args...); code != exitUsage {
			t.Errorf("%q: exit status %d, want %d", args, code, exitUsage)
		}
	}
}

// The last lines that kvd dev prints say what to type next, with the addresses that it has; the commands
// that they name can be typed.
func TestDevSaysWhatNext(t *testing.T) {
	env, _ := runtimeDir(t)
	p := start(t, env, "dev", "--listen=127.0.0.1:0", "--memory=64MiB", "--redis=127.0.0.1:0", "--memcached=off",
		"--http=127.0.0.1:0")
	_, port, _ := strings.Cut(p.kv["redis"], ":")
	for _, want := range []string{"kvctl --directory " + p.kv["directory"] + " put greeting hello", "redis-cli -p " +
		port + " set ", "http://" + p.kv["http"] + "/", "Ctrl-C"} {
		if !strings.Contains(p.next, want) {
			t.Errorf("no %q in\n%s", want, p.next)
		}
	}
	if n := strings.Count(p.next, "\n"); n > 6 || strings.Contains(p.next, "11211") {
		t.Errorf("%d lines:\n%s", n, p.next)
	}
	if code := p.stop(syscall.SIGTERM); code != 0 {
		t.Errorf("exit status %d, want 0", code)
	}
}

// A certificate with which no client would talk is refused before anything is served.
func TestListenTLSRefuses(t *testing.T) {
	other := newCertificates(t).files("gateway")
	for name, tc := range map[string]struct {
		change func(*x509.Certificate)
		want   string
	}{
		"expired": {func(c *x509.Certificate) {
			c.NotBefore, c.NotAfter = c.NotBefore.Add(-48*time.Hour), time.Now().Add(-time.Hour)
		}, "it expired on "},
		"not yet valid": {func(c *x509.Certificate) {
			c.NotBefore = time.Now().Add(30 * time.Minute)
		}, "it is not valid before "},
		"of a client": {func(c *x509.Certificate) {
			c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
		}, "serverAuth"},
		"without a name": {func(c *x509.Certificate) { c.IPAddresses, c.DNSNames = nil, nil }, "it names no host"},
		"cannot sign":    {func(c *x509.Certificate) { c.KeyUsage = x509.KeyUsageKeyEncipherment }, "digitalSignature"},
		"key of another": {nil, "private key does not match"},
	} {
		t.Run(name, func(t *testing.T) {
			if tc.change == nil {
				tc.change = func(*x509.Certificate) {}
			}
			files := newCertificates(t).files("gateway", tc.change)
			if name == "key of another" {
				files.Key = other.Key
			}
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			var out, errs bytes.Buffer
			code := run(ctx, []string{"gateway", "--listen=off", "--listen-memcached=off", "--listen-tls=127.0.0.1:0",
				"--directory=127.0.0.1:1",
				"--tls-ca=" + files.CA, "--tls-cert=" + files.Cert, "--tls-key=" + files.Key}, &out, &errs)
			if code != exitUsage || !strings.Contains(errs.String(), tc.want) ||
				!strings.Contains(errs.String(), files.Cert) {
				t.Errorf("exit status %d, %q", code, &errs)
			}
		})
	}
}

// With certificates everything is encrypted, who shows none is refused, and others may do what their roles may.
func TestTLS(t *testing.T) {
	env, _ := runtimeDir(t)
	files := newCertificates(t)
	d := start(t, env,
		append([]string{"directory", "--id=d", "--data-dir=" + t.TempDir(), "--listen=127.0.0.1:0",
			"--raft-listen=127.0.0.1:0", "--bootstrap"}, files.flags("directory")...)...)
	addr := d.kv["directory"]
	m := start(t, env,
		append([]string{"memnode", "--name=m", "--directory=" + addr, "--memory=64MiB", "--shm-socket=off",
			"--health-listen=127.0.0.1:0"}, files.flags("memnode")...)...)

	cfg := files.load("client")
	createNamespace(t, addr, "default", files.load("operator"), files.identity("client"))
	roundTrip(t, open(t, addr, "tcp", cfg), "k")
	for _, a := range []string{addr, m.kv["health"]} {
		var out, errs bytes.Buffer
		if code := run(t.Context(), append([]string{"health", a}, files.flags("client")...), &out, &errs); code != 0 {
			t.Errorf("health with a certificate: exit status %d, %s", code, &errs)
		}
		if code := run(t.Context(), append([]string{"health", a}, files.flags("")...), &out, &errs); code !=
			exitFailure || !strings.Contains(errs.String(), "no SPIFFE id") {
			t.Errorf("health without an identity: exit status %d, %s", code, &errs)
		}
		if code := run(t.Context(), []string{"health", "--timeout=2s", a}, &out, &errs); code != exitFailure {
			t.Errorf("health in clear: exit status %d", code)
		}
	}
	// The data path is refused too, with the session's own rights in hand.
	bare := &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: cfg.RootCAs}
	conn, err := tls.Dial("tcp", m.kv["tcp"], bare)
	if err == nil { // with TLS 1.3 the refusal comes after the client's handshake
		_ = conn.SetReadDeadline(time.Now().Add(patience))
		_, err = conn.Read(make([]byte, 1))
		_ = conn.Close()
	}
	if err == nil || !strings.Contains(err.Error(), "certificate required") {
		t.Errorf("a client without a certificate met %v, want a refusal", err)
	}
	for _, r := range identity.Every.All() {
		err := dialNode(t, m.kv["tcp"], files.load(r.String()))
		want := "token" // is what it shows no more of
		if r == identity.Directory {
			want = "has the role directory, and a connection to a memory node is for memnode, tier, gateway, " +
				"janitor, archive, operator, client"
		}
		if !errors.Is(err, driver.ErrRefused) || !strings.Contains(err.Error(), want) {
			t.Errorf("a connection of a %v to a memory node: %v, want %q", r, err, want)
		}
	}
	if err := dialNode(t, m.kv["tcp"], files.load("")); !errors.Is(err, driver.ErrRefused) ||
		!strings.Contains(err.Error(), "want the URI spiffe://") {
		t.Errorf("a connection without an identity to a memory node: %v", err)
	}
}

// dialNode connects to a memory node with a token that nobody signed.
func dialNode(t *testing.T, addr string, cfg *tls.Config) error {
	t.Helper()
	return dialWith(t, addr, cfg, make([]byte, token.MinSize+4))
}

// dialWith connects to a memory node with these private data, and closes the connection.
func dialWith(t *testing.T, addr string, cfg *tls.Config, private []byte) error {
	t.Helper()
	d, err := providers.Open("tcp", providers.Options{TLSClient: cfg})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	pd, err := d.AllocPD()
	if err != nil {
		t.Fatal(err)
	}
	defer pd.Dealloc()
	cq, err := d.CreateCQ(16)
	if err != nil {
		t.Fatal(err)
	}
	defer cq.Close()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	q, err := d.Dial(ctx, pd, cq, addr, private)
	if err == nil {
		_ = q.Close()
	}
	return err
}

// A process whose certificate is of another role says so before it serves.
func TestOwnRole(t *testing.T) {
	t.Setenv("KVD_KEEP", "off") // a worker would be this test again
	files := newCertificates(t)
	for _, tc := range []struct{ role, of, want string }{
		{"directory", "client", "has the role client, and this process's certificate is for directory"},
		{"memnode", "directory", "has the role directory, and this process's certificate is for memnode"},
		{"memnode", "", "no SPIFFE id"},
	} {
		args := append(map[string][]string{
			"directory": {"directory", "--id=d", "--bootstrap", "--listen=127.0.0.1:0", "--raft-listen=127.0.0.1:0",
				"--data-dir=" + t.TempDir()},
			"memnode": {"memnode", "--name=m", "--directory=127.0.0.1:1"},
		}[tc.role], files.flags(tc.of)...)
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		var out, errs bytes.Buffer
		if code := run(ctx, args, &out, &errs); code != exitUsage || !strings.Contains(errs.String(), tc.want) {
			t.Errorf("kvd %s with a certificate of %q: exit status %d, %s", tc.role, tc.of, code, &errs)
		}
		cancel()
	}
}

// A gateway without the right to a session says so, and waits for nothing.
func TestGatewayRefused(t *testing.T) {
	env, _ := runtimeDir(t)
	files := newCertificates(t)
	d := start(t, env,
		append([]string{"directory", "--id=d", "--data-dir=" + t.TempDir(), "--listen=127.0.0.1:0",
			"--raft-listen=127.0.0.1:0", "--bootstrap"}, files.flags("directory")...)...)
	for role, want := range map[string]string{"directory": "has the role directory, and OpenSession is for memnode, " +
		"tier, gateway,", "": "the certificate has no identity"} {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		var out, errs bytes.Buffer
		code := run(ctx,
			append([]string{"gateway", "--listen=127.0.0.1:0", "--listen-memcached=off", "--directory=" +
				d.kv["directory"]}, files.flags(role)...), &out, &errs)
		if code != exitFailure || ctx.Err() != nil || !strings.Contains(errs.String(), want) {
			t.Errorf("a gateway with the role %q: exit status %d, %s", role, code, &errs)
		}
		cancel()
	}
}

// certificates is an authority that writes the files of its certificates.
type certificates struct {
	*identitytest.Authority
	t *testing.T
}

func newCertificates(t *testing.T) certificates {
	t.Helper()
	return certificates{identitytest.New(t), t}
}

// files are those of a certificate for 127.0.0.1 and a role, or for none, which change changes before it
// is signed.
func (c certificates) files(role string, change ...func(*x509.Certificate)) config.TLS {
	c.t.Helper()
	cert := c.Leaf(change...)
	if role != "" {
		cert = c.Role(role, "it", change...)
	}
	ca, file, key := c.Files(cert)
	return config.TLS{CA: ca, Cert: file, Key: key}
}

// identity is the owner of files(role).
func (c certificates) identity(role string) string {
	return "spiffe://" + identitytest.TrustDomain + "/kvd/" + role + "/it"
}

func (c certificates) flags(role string) []string {
	c.t.Helper()
	f := c.files(role)
	return []string{"--tls-ca=" + f.CA, "--tls-cert=" + f.Cert, "--tls-key=" + f.Key}
}

func (c certificates) load(role string) *tls.Config {
	c.t.Helper()
	cfg, err := c.files(role).Load()
	if err != nil {
		c.t.Fatal(err)
	}
	return cfg
}
