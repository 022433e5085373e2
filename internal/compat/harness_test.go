package compat

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kvd-project/kvd/internal/loopback"
	"github.com/kvd-project/kvd/internal/testutil"
)

var rewrite = flag.Bool("rewrite", false, "write what the suites gave into testdata/expected, and that into "+
	"docs/compatibility.md")

// patience bounds everything that a test waits for and that has no bound of its own.
const patience = testutil.Limit

func TestMain(m *testing.M) {
	code := m.Run()
	if err := theLab.close(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = max(code, 1)
	}
	os.Exit(code)
}

// target is a server of Redis's protocol and one of memcached's.
type target struct {
	name             string // kvd, or reference for the originals
	redis, memcached string // host:port
	// restart ends both, with clients connected, and starts them at the same
	// addresses.
	restart func() error
}

// lab has everything that the tests talk to, started once.
type lab struct {
	once sync.Once
	err  error
	dir  string // temporary; logs too

	kvd, kvctl string // programs
	dev        *proc  // a store with a gateway inside
	gateway    *proc  // a gateway of the same store, in a process of its own

	redisServer, memcachedServer *proc

	mu struct {
		sync.Mutex
		procs []*proc // all that were started
	}
}

var theLab lab

// open gives the lab to a test that needs it.
func open(t *testing.T) *lab {
	t.Helper()
	if os.Getenv("KVD_COMPAT") == "" {
		t.Skip("KVD_COMPAT is not set; run make test-compat")
	}
	theLab.once.Do(func() { theLab.err = theLab.start() })
	if theLab.err != nil {
		t.Fatal(theLab.err)
	}
	return &theLab
}

// databases is how many a gateway of the lab has, as a Redis has by default.
const databases = 16

func (l *lab) start() (err error) {
	if l.dir, err = os.MkdirTemp("", "kvd-compat-"); err != nil {
		return err
	}
	build := exec.Command("go", "build", "-o", l.dir+"/", "./cmd/kvd", "./cmd/kvctl")
	build.Dir = "../.."
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("%v: %w\n%s", build, err, out)
	}
	l.kvd, l.kvctl = filepath.Join(l.dir, "kvd"), filepath.Join(l.dir, "kvctl")

	l.dev, err = l.run("dev", l.kvd, "dev", "--listen", "127.0.0.1:0", "--memnodes", "1", "--memory", "4GiB",
		"--redis", "127.0.0.1:0", "--memcached", "127.0.0.1:0", "--http", "off")
	if err != nil {
		return err
	}
	for _, name := range []string{"small", "db13", "db14", "db15"} { // of which others have some to themselves
		if err := l.namespace(l.dev.ready["directory"], name); err != nil {
			return err
		}
	}
	l.gateway, err = l.run("gateway", l.kvd, "gateway", "--directory", l.dev.ready["directory"], "--databases",
		fmt.Sprintf("cache*%d,small*2", databases-2),
		"--listen", "127.0.0.1:0", "--listen-memcached", "127.0.0.1:0", "--listen-unix",
		filepath.Join(l.dir, "redis.sock"), "--http-listen", "off")
	if err != nil {
		return err
	}
	// Started again, it is found where it was.
	l.gateway.set("--listen", l.gateway.ready["redis"])
	l.gateway.set("--listen-memcached", l.gateway.ready["memcached"])

	if l.redisServer, err = l.runAt("redis-server", "redis-server", "--bind", "127.0.0.1", "--save", "", "--appendonly",
		"no", "--enable-debug-command", "yes",
		"--dir", l.dir, "--databases", strconv.Itoa(databases), "--port"); err != nil {
		return err
	}
	l.memcachedServer, err = l.runAt("memcached", "memcached", "-u", "nobody", "-l", "127.0.0.1", "-U", "0", "-m",
		"256", "-p")
	return err
}

// namespace makes a small cache.
func (l *lab) namespace(directory, name string, flags ...string) error {
	create := exec.Command(l.kvctl,
		append([]string{"--directory", directory, "namespace", "create", name, "--mode", "cache", "--bytes", "64MiB"},
			flags...)...)
	if out, err := create.CombinedOutput(); err != nil {
		return fmt.Errorf("%v: %w\n%s", create, err, out)
	}
	return nil
}

// ours is the store's gateway in a process of its own, with 16 databases, of which the last two share a small
// namespace.
func (l *lab) ours() target {
	return target{"kvd", l.gateway.ready["redis"], l.gateway.ready["memcached"], l.gateway.restart}
}

// reference is the originals.
func (l *lab) reference() target {
	return target{"reference", l.redisServer.addr, l.memcachedServer.addr, func() error {
		return errors.Join(l.redisServer.restart(), l.memcachedServer.restart())
	}}
}

// each runs f on the originals, which shows that f asks for what they do, and on ours.
func each(t *testing.T, f func(*testing.T, target)) {
	l := open(t)
	for _, at := range []target{l.reference(), l.ours()} {
		t.Run(at.name, func(t *testing.T) { f(t, at) })
	}
}

func (l *lab) close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	var errs []error
	for i := len(l.mu.procs) - 1; i >= 0; i-- {
		errs = append(errs, l.mu.procs[i].stop())
	}
	if l.dir == "" {
		return nil
	}
	return errors.Join(append(errs, os.RemoveAll(l.dir))...)
}

// proc is a server process, in one life after another.
type proc struct {
	name  string
	argv  []string
	log   string            // file of stderr and, but for kvd, stdout
	addr  string            // host:port, of those that do not say when they are ready
	cmd   *exec.Cmd         // nil: does not run
	end   chan error        // of cmd
	ready map[string]string // of kvd's ready line
}

// run starts kvd and waits for its ready line.
func (l *lab) run(name string, argv ...string) (*proc, error) {
	return l.add(&proc{name: name, argv: argv})
}

// runAt starts another server; a free port is its last argument.
func (l *lab) runAt(name string, argv ...string) (*proc, error) {
	addr, err := loopback.FreeAt("127.0.0.1")
	if err != nil {
		return nil, err
	}
	return l.add(&proc{name: name, argv: append(argv, portOf(addr)), addr: addr})
}

func (l *lab) add(p *proc) (*proc, error) {
	p.log = filepath.Join(l.dir, p.name+".log")
	l.mu.Lock()
	l.mu.procs = append(l.mu.procs, p)
	l.mu.Unlock()
	return p, p.start()
}

func (p *proc) start() error {
	log, err := os.OpenFile(p.log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(p.argv[0], p.argv[1:]...)
	cmd.Stderr = log
	// Its own group: ^C is for the tests, which then end everything.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	ready := make(chan string, 1)
	if p.addr != "" {
		cmd.Stdout = log
	} else {
		out, w, err := os.Pipe()
		if err != nil {
			return err
		}
		defer w.Close()
		cmd.Stdout = w
		go func() {
			defer out.Close()
			line, _ := bufio.NewReader(out).ReadString('\n') // "" if it ends first
			ready <- strings.TrimSpace(line)
		}()
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	p.cmd, p.end = cmd, make(chan error, 1)
	go func(end chan error) { end <- cmd.Wait() }(p.end)
	if p.addr != "" {
		return p.fail(dialable(p.addr))
	}
	select {
	case line := <-ready:
		if !strings.HasPrefix(line, "ready ") {
			return p.fail(fmt.Errorf("first line is %q, want ready", line))
		}
		p.ready = make(map[string]string)
		for _, w := range strings.Fields(line)[1:] {
			k, v, _ := strings.Cut(w, "=")
			p.ready[k] = v
		}
		return nil
	case <-time.After(patience):
		return p.fail(errors.New("no ready line"))
	}
}

func dialable(addr string) error {
	for end := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
		c, err := net.Dial("tcp", addr)
		if err == nil {
			return c.Close()
		}
		if time.Now().After(end) {
			return err
		}
	}
}

// fail adds to err, if any, whose it is and the end of its log.
func (p *proc) fail(err error) error {
	if err == nil {
		return nil
	}
	b, _ := os.ReadFile(p.log)
	return fmt.Errorf("%s: %w\n%s", strings.Join(p.argv, " "), err, b[max(0, len(b)-4000):])
}

// stop ends the process, which may take as long as other programs give it.
func (p *proc) stop() error {
	if p.cmd == nil {
		return nil
	}
	cmd := p.cmd
	p.cmd = nil
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return p.fail(err)
	}
	select {
	case err := <-p.end:
		if exit := new(exec.ExitError); errors.As(err, &exit) && !exit.Exited() {
			err = nil // memcached dies of the signal
		}
		return p.fail(err)
	case <-time.After(testutil.Limit):
		return p.fail(errors.Join(errors.New("does not end within 10 s of SIGTERM"), cmd.Process.Kill(), <-p.end))
	}
}

func (p *proc) restart() error { return errors.Join(p.stop(), p.start()) }

// set changes the value of a flag, for the next start.
func (p *proc) set(flag, value string) {
	for i, a := range p.argv {
		if a == flag {
			p.argv[i+1] = value
		}
	}
}

func portOf(addr string) string {
	_, port, err := net.SplitHostPort(addr)
	if err != nil {
		panic(err) // we made it
	}
	return port
}

// output runs a program to its end, within patience.
func output(t *testing.T, stdin string, argv ...string) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Stdin = strings.NewReader(stdin)
	cmd.WaitDelay = time.Second
	out, err := cmd.CombinedOutput()
	if ctx.Err() != nil {
		err = fmt.Errorf("%w after %v", ctx.Err(), patience)
	}
	return string(out), err
}
