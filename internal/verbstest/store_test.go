package verbstest

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/dirclient"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/identity/identitytest"
	"github.com/kvd-project/kvd/internal/testutil"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/driver"
	"github.com/kvd-project/kvd/rdma/tcp"
	"github.com/kvd-project/kvd/rdma/verbs"
)

// patience bounds what takes a moment on a machine that is not emulated.
const patience = 60 * time.Second

var (
	mode     = os.Getenv("KVD_VERBS")
	bin      = os.Getenv("KVD_BIN")
	provider = cmp.Or(os.Getenv("KVD_VERBS_PROVIDER"), "verbs")
	nics     = cmp.Or(os.Getenv("KVD_VERBS_NIC"), "rxe")
	connect  = cmp.Or(os.Getenv("KVD_VERBS_CONNECT"), "auto")
)

func TestMain(m *testing.M) {
	if doc := os.Getenv(writerEnv); doc != "" {
		if err := writerMain(doc); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// needs skips the test unless the machine is of that kind.
func needs(t *testing.T, want string) {
	t.Helper()
	switch {
	case mode != want && want == "none":
		t.Skip("needs a machine without adapters: make test-verbs")
	case mode != want:
		t.Skip("needs Soft-RoCE: make test-verbs")
	case bin == "":
		t.Fatal("KVD_BIN does not say where kvd and kvctl are")
	}
}

// needsVerbs skips what means nothing over another provider.
func needsVerbs(t *testing.T, why string) {
	t.Helper()
	if provider != "verbs" {
		t.Skipf("over %s: %s", provider, why)
	}
}

// nic is the name of the i-th adapter, and host its address.
func nic(i int) string { return fmt.Sprintf("%s%d", nics, i) }

func host(i int) string {
	if provider != "verbs" {
		return "127.0.0.1"
	}
	return fmt.Sprintf("10.77.1.%d", i+1)
}

// openDevice opens the i-th adapter, or the device of another provider. It dials with TLS and logs unless conf and log
// are nil.
func openDevice(t *testing.T, name string, i int, conf *tls.Config, log *slog.Logger) *rdma.Device {
	t.Helper()
	d, err := newDevice(name, nic(i), conf, log)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

func newDevice(name, adapter string, conf *tls.Config, log *slog.Logger) (*rdma.Device, error) {
	var d driver.Device
	var err error
	switch name {
	case "verbs":
		d, err = verbs.Open(verbs.Options{Device: adapter, TLSClient: conf, Logger: log})
	case "tcp":
		d, err = tcp.Open(tcp.Options{TLSClient: conf})
	default:
		err = fmt.Errorf("provider %q: want verbs or tcp", name)
	}
	if err != nil {
		return nil, err
	}
	return rdma.NewDevice(name, d), nil
}

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

// tail is about the last n bytes.
func (b *buffer) tail(n int) string {
	s := b.String()
	return s[max(0, len(s)-n):]
}

// proc is a process that the test started and ends.
type proc struct {
	t      *testing.T
	name   string
	cmd    *exec.Cmd
	log    *buffer           // stderr
	lines  chan string       // of stdout; closed at its end
	at     map[string]string // of kvd's ready line: addresses and other fields
	exited chan struct{}
}

// spawn starts argv.
func spawn(t *testing.T, name string, env []string, argv ...string) *proc {
	t.Helper()
	p := &proc{t: t, name: name, cmd: exec.Command(argv[0], argv[1:]...), log: new(buffer),
		lines: make(chan string, 1<<16), exited: make(chan struct{})}
	p.cmd.Env, p.cmd.Stderr = env, p.log
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(p.exited)
		for r := bufio.NewReader(out); ; {
			l, err := r.ReadString('\n')
			if err != nil {
				break
			}
			p.lines <- strings.TrimSuffix(l, "\n")
		}
		close(p.lines)
		_ = p.cmd.Wait() // ProcessState says how
	}()
	t.Cleanup(func() {
		p.kill()
		if t.Failed() {
			t.Logf("%s %v\n%s", p.name, p.cmd.ProcessState, p.log.tail(4000))
		}
	})
	return p
}

// line gives the next line of stdout.
func (p *proc) line() string {
	p.t.Helper()
	select {
	case l, ok := <-p.lines:
		if !ok {
			<-p.exited
			p.t.Fatalf("%s ended with %v\n%s", p.name, p.cmd.ProcessState, p.log.tail(4000))
		}
		return l
	case <-time.After(patience):
		p.t.Fatalf("%s says nothing within %v", p.name, patience)
	}
	return ""
}

// ready waits for the line with which kvd says that it serves, and where.
func (p *proc) ready() *proc {
	p.t.Helper()
	l := p.line()
	fields, ok := strings.CutPrefix(l, "ready ")
	if !ok {
		p.t.Fatalf("%s: first line is %q, want ready", p.name, l)
	}
	p.at = map[string]string{}
	for f := range strings.FieldsSeq(fields) {
		k, v, _ := strings.Cut(f, "=")
		p.at[k] = v
	}
	return p
}

// kill is SIGKILL, and returns when the process is gone.
func (p *proc) kill() {
	_ = p.cmd.Process.Kill() // it may have ended
	<-p.exited
}

func (p *proc) signal(s syscall.Signal) {
	p.t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		p.t.Fatalf("%v to %s: %v", s, p.name, err)
	}
}

// stop is SIGSTOP, and returns when every thread rests.
func (p *proc) stop() {
	p.t.Helper()
	p.signal(syscall.SIGSTOP)
	testutil.UntilNone(p.t, p.name+" is stopped", func() string {
		files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", p.cmd.Process.Pid))
		if err != nil {
			p.t.Fatal(err)
		}
		for _, f := range files {
			b, err := os.ReadFile(f)
			if err != nil {
				continue // the thread ended
			}
			// The state follows the command's name, which may hold anything.
			if i := bytes.LastIndex(b, []byte(") ")); i < 0 || b[i+2] != 'T' {
				return f + " runs"
			}
		}
		return ""
	})
}

// wait returns the exit status.
func (p *proc) wait() int {
	p.t.Helper()
	select {
	case <-p.exited:
	case <-time.After(patience):
		p.t.Fatalf("%s does not end within %v", p.name, patience)
	}
	return p.cmd.ProcessState.ExitCode()
}

// environ is the environment without settings for kvd and kvctl.
func environ() (env []string) {
	for _, e := range os.Environ() {
		if !strings.HasPrefix(e, "KVD_") && !strings.HasPrefix(e, "RUNTIME_DIRECTORY=") {
			env = append(env, e)
		}
	}
	return append(env, "KVD_KEEP=off") // a memory node's usage, and end, are those of one process
}

// node is a memory node: its name, the adapter it has, and flags of kvd memnode
// that it is given besides, or instead of the usual ones.
type node struct {
	name  string
	nic   int
	flags []string
}

// store is a directory node and memory nodes, all processes.
type store struct {
	t     *testing.T
	addr  string // of the directory
	rpc   *dirclient.Client
	conf  *tls.Config             // of the operator who is the test; nil: the store has no TLS
	ca    *identitytest.Authority // likewise
	crl   string                  // file of revoked certificates, if any
	nodes map[string]*proc
	logs  map[*client.Client]*buffer
}

// newStore starts a store whose leases are so long, and whose memory nodes have
// 128 MiB and no janitor unless flags say otherwise.
func newStore(t *testing.T, lease time.Duration, nodes ...node) *store {
	t.Helper()
	return newStoreTLS(t, nil, nil, lease, nodes...)
}

// newStoreTLS is newStore in which everybody has a certificate of ca, unless that is nil. These certificates are
// revoked.
func newStoreTLS(t *testing.T, ca *identitytest.Authority, revoked []tls.Certificate, lease time.Duration,
	nodes ...node) *store {
	t.Helper()
	s := &store{t: t, nodes: map[string]*proc{}, logs: map[*client.Client]*buffer{}, ca: ca}
	if ca != nil {
		s.conf, s.crl = ca.Config(ca.Role("operator", "ops")), ca.Revoke(revoked...)
	}
	d := spawn(t, "directory", environ(),
		append([]string{filepath.Join(bin, "kvd"), "directory", "--id", "d1", "--data-dir", t.TempDir(),
			"--listen", "127.0.0.1:0", "--raft-listen", "127.0.0.1:0", "--bootstrap", "--lease", lease.String(),
			"--scrub-interval", "0"}, s.certificate("directory", "127.0.0.1")...)...).ready()
	s.addr = d.at["directory"]
	s.rpc = s.caller(s.conf)
	s.start(nodes...)
	return s
}

// certificate are the flags of a process with a role, which others call by an address.
func (s *store) certificate(role, address string) []string {
	s.t.Helper()
	if s.ca == nil {
		return nil
	}
	ca, cert, key := s.ca.Files(s.ca.Role(role, "it", func(c *x509.Certificate) {
		c.IPAddresses = []net.IP{net.ParseIP(address)}
	}))
	return []string{"--tls-ca", ca, "--tls-cert", cert, "--tls-key", key, "--tls-crl", s.crl}
}

// caller calls the directory by TLS, unless conf is nil.
func (s *store) caller(conf *tls.Config) *dirclient.Client {
	s.t.Helper()
	c, err := dirclient.Open(dirclient.Options{Addrs: []string{s.addr}, TLS: conf, AttemptTimeout: patience})
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() {
		if err := c.Close(); err != nil {
			s.t.Error(err)
		}
	})
	return c
}

// start starts memory nodes, for the first time or again.
func (s *store) start(nodes ...node) {
	s.t.Helper()
	for _, n := range nodes {
		s.nodes[n.name] = spawn(s.t, n.name, environ(), s.memnode(n)...)
	}
	for _, n := range nodes {
		s.nodes[n.name].ready()
	}
}

func (s *store) memnode(n node) []string {
	argv := []string{filepath.Join(bin, "kvd"), "memnode", "--name", n.name, "--directory", s.addr, "--memory",
		"128MiB",
		"--janitor=false", "--shm-socket", "off", "--listen-tcp", "off"}
	if s.ca == nil {
		argv = append(argv, "--insecure")
	} else {
		argv = append(argv, s.certificate("memnode", host(n.nic))...)
	}
	if provider == "verbs" {
		argv = append(argv, "--listen-verbs", host(n.nic)+":0", "--rdma-device", nic(n.nic), "--rdma-connect", connect)
	} else {
		argv = append(argv, "--listen-tcp", "127.0.0.1:0")
	}
	return append(argv, n.flags...)
}

// ctlArgs is kvctl with the third adapter.
func (s *store) ctlArgs(args ...string) []string {
	argv := []string{filepath.Join(bin, "kvctl"), "--directory", s.addr, "--provider", provider, "--timeout", "30s"}
	if provider == "verbs" {
		argv = append(argv, "--rdma-device", nic(2))
	}
	return append(argv, args...)
}

// ctl runs kvctl.
func (s *store) ctl(args ...string) (out, stderr string, status int) {
	s.t.Helper()
	return run(s.t, s.ctlArgs(args...)...)
}

// must is ctl, and wants status 0.
func (s *store) must(args ...string) string {
	s.t.Helper()
	out, stderr, status := s.ctl(args...)
	if status != 0 {
		s.t.Fatalf("kvctl %s: exit status %d\n%s%s", strings.Join(args, " "), status, out, stderr)
	}
	return out
}

// run runs a command to its end.
func run(t *testing.T, argv ...string) (out, stderr string, status int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Env = environ()
	var o, e bytes.Buffer
	cmd.Stdout, cmd.Stderr = &o, &e
	var exit *exec.ExitError
	if err := cmd.Run(); err != nil && !errors.As(err, &exit) {
		t.Fatalf("%s: %v", strings.Join(argv, " "), err)
	}
	return o.String(), e.String(), cmd.ProcessState.ExitCode()
}

// call makes one idempotent request of the directory.
func (s *store) call(fn func(context.Context, dirpb.DirectoryClient) error) {
	s.t.Helper()
	s.callAs(s.rpc, fn)
}

func (s *store) callAs(who *dirclient.Client, fn func(context.Context, dirpb.DirectoryClient) error) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := who.Call(ctx, fn); err != nil {
		s.t.Fatal(err)
	}
}

func (s *store) status() (st *dirpb.StatusReply) {
	s.t.Helper()
	s.call(func(ctx context.Context, d dirpb.DirectoryClient) (err error) {
		st, err = d.Status(ctx, &dirpb.StatusRequest{})
		return err
	})
	return st
}

// life is what the directory says of a session.
func (s *store) life(session uint32) (life dirpb.SessionLife) {
	s.t.Helper()
	s.call(func(ctx context.Context, d dirpb.DirectoryClient) error {
		rep, err := d.SessionState(ctx, &dirpb.SessionStateRequest{SessionId: session})
		life = rep.GetLife()
		return err
	})
	return life
}

// member is the memory node of that name in a map.
func member(m *dirpb.Map, name string) *dirpb.Node {
	i := slices.IndexFunc(m.GetNodes(), func(n *dirpb.Node) bool { return n.GetName() == name })
	if i < 0 {
		return nil
	}
	return m.GetNodes()[i]
}

// endpoint is where a memory node offers a provider, or nil.
func endpoint(n *dirpb.Node, name string) *dirpb.Endpoint {
	i := slices.IndexFunc(n.GetEndpoints(), func(e *dirpb.Endpoint) bool { return e.GetProvider() == name })
	if i < 0 {
		return nil
	}
	return n.GetEndpoints()[i]
}

// namespace makes a namespace of so many copies and bytes on each memory node.
func (s *store) namespace(name string, replicas int, bytes uint64) {
	s.t.Helper()
	s.namespaceOf("", name, replicas, bytes)
}

// namespaceOf is namespace for an owner; empty: the test.
func (s *store) namespaceOf(owner, name string, replicas int, bytes uint64) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), patience)
	defer cancel()
	err := s.rpc.CallOnce(ctx, func(ctx context.Context, d dirpb.DirectoryClient) error {
		_, err := d.CreateNamespace(ctx, &dirpb.CreateNamespaceRequest{Name: name, Replicas: uint32(replicas),
			BytesPerNode: bytes, Shards: 4, Owner: owner})
		return err
	})
	if err != nil {
		s.t.Fatalf("namespace %q: %v", name, err)
	}
}

// client opens a session over the provider named, with the i-th adapter unless o has devices. It is
// closed at the test's end.
func (s *store) client(by string, i int, o client.Options) *client.Client {
	s.t.Helper()
	log := new(buffer)
	o.Logger = slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	if o.Directory = []string{s.addr}; o.Devices == nil {
		o.Devices = []*rdma.Device{openDevice(s.t, by, i, nil, o.Logger)}
	}
	o.Provider = by
	o.Lanes, o.OpTimeout = cmp.Or(o.Lanes, 1), cmp.Or(o.OpTimeout, patience)
	ctx, cancel := context.WithTimeout(s.t.Context(), patience)
	defer cancel()
	c, err := client.Open(ctx, o)
	if err != nil {
		s.t.Fatalf("%v\n%s", err, log)
	}
	s.logs[c] = log
	s.t.Cleanup(func() {
		if err := c.Close(); err != nil {
			s.t.Error(err)
		}
		if s.t.Failed() {
			s.t.Logf("client over %s\n%s", by, log.tail(4000))
		}
	})
	return c
}

// printTable prints rows as documents have them.
func printTable(title string, header []string, rows [][]string) {
	var b strings.Builder
	line := func(cells []string) { fmt.Fprintf(&b, "| %s |\n", strings.Join(cells, " | ")) }
	fmt.Fprintf(&b, "\n%s\n\n", title)
	line(header)
	line(slices.Repeat([]string{"---"}, len(header)))
	for _, r := range rows {
		line(r)
	}
	_, _ = io.WriteString(os.Stdout, b.String()+"\n") // for people
}

func itoa[T ~int | ~int64 | ~uint64](n T) string { return strconv.FormatInt(int64(n), 10) }
