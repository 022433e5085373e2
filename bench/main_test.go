package bench

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/devstore"
	"github.com/kvd-project/kvd/internal/dirclient"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/providers"
	"github.com/kvd-project/kvd/rdma"
)

// Environment variables that tell a child process what to do.
const (
	envRole     = "KVD_BENCH_ROLE"
	envNodes    = "KVD_BENCH_NODES"
	envCapacity = "KVD_BENCH_CAPACITY"
	envLease    = "KVD_BENCH_LEASE" // else lease

	envDirectory = "KVD_BENCH_DIRECTORY" // where a store is, for the role narrow
)

func TestMain(m *testing.M) {
	var err error
	switch role := os.Getenv(envRole); role {
	case "":
		code := m.Run()
		if programs != "" {
			_ = os.RemoveAll(programs)
		}
		os.Exit(code)
	case "store":
		err = runStore()
	case "narrow":
		err = runNarrow()
	default:
		err = fmt.Errorf("%s is %q", envRole, role)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// serve says that a child is ready and where, and returns when it is told to
// stop or its parent has gone.
func serve(addr string) {
	sig := make(chan os.Signal, 1)
	signal.Notify(sig, syscall.SIGTERM, syscall.SIGINT)
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		sig <- syscall.SIGTERM
	}()
	fmt.Println("ready", addr)
	<-sig
}

// lease is long, as on any machine that is busy on purpose.
const lease = 10 * time.Second

// runStore is the store that `kvd dev` runs, without its gateway.
func runStore() error {
	nodes, err := strconv.Atoi(os.Getenv(envNodes))
	if err != nil {
		return err
	}
	capacity, err := strconv.ParseInt(os.Getenv(envCapacity), 10, 64)
	if err != nil {
		return err
	}
	life := lease
	if text := os.Getenv(envLease); text != "" {
		if life, err = time.ParseDuration(text); err != nil {
			return err
		}
	}
	s, err := devstore.Start(context.Background(), devstore.Options{Nodes: nodes, CapacityBytes: capacity, Lease: life})
	if err != nil {
		return err
	}
	serve(s.Directory()[0])
	return s.Close()
}

// process is a child that stops with the test.
type process struct {
	cmd *exec.Cmd
	pid int
}

// start starts a command that must be stopped; stdin keeps our children alive
// as long as this process lives.
func start(tb testing.TB, cmd *exec.Cmd) *process {
	tb.Helper()
	stdin, err := cmd.StdinPipe()
	if err != nil {
		tb.Fatal(err)
	}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = stdin.Close()
		_ = cmd.Wait()
	})
	return &process{cmd, cmd.Process.Pid}
}

// startRole starts this binary in another role and returns what it is ready with.
func startRole(tb testing.TB, role string, env ...string) (p *process, addr string) {
	tb.Helper()
	self, err := os.Executable()
	if err != nil {
		tb.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(append(os.Environ(), envRole+"="+role), env...)
	return startReady(tb, cmd)
}

// startReady starts a command that says on its first line that it is ready, and returns
// what with.
func startReady(tb testing.TB, cmd *exec.Cmd) (p *process, with string) {
	tb.Helper()
	out, err := cmd.StdoutPipe()
	if err != nil {
		tb.Fatal(err)
	}
	p = start(tb, cmd)
	line, err := bufio.NewReader(out).ReadString('\n')
	with, ok := strings.CutPrefix(strings.TrimSpace(line), "ready ")
	if !ok {
		tb.Fatalf("%s said %q: %v", cmd, line, err)
	}
	return p, with
}

// programs is the folder of the programs as they ship, once they are built.
var programs string

var buildPrograms = sync.OnceValues(func() (out []byte, err error) {
	if programs, err = os.MkdirTemp("", "kvd-bench-"); err != nil {
		return nil, err
	}
	return exec.Command("make", "--no-print-directory", "-C", "..", "build", "OUT="+programs).CombinedOutput()
})

// startKvd starts a kvd as it ships, and returns where it can be reached.
func startKvd(tb testing.TB, args ...string) (p *process, at map[string]string) {
	tb.Helper()
	if out, err := buildPrograms(); err != nil {
		tb.Fatalf("make build: %v\n%s", err, out)
	}
	p, with := startReady(tb, exec.Command(filepath.Join(programs, "kvd"), args...))
	at = make(map[string]string)
	for _, kv := range strings.Fields(with) {
		if k, v, ok := strings.Cut(kv, "="); ok {
			at[k] = v
		}
	}
	return p, at
}

// store is a whole store in a process of its own, as `kvd dev` runs it: a directory node,
// memory nodes and a janitor.
type store struct {
	*process
	directory string
}

// startStore starts a store with one memory node, or with nodes if they are given, each
// of which lends capacity bytes.
func startStore(tb testing.TB, capacity int64, nodes ...int) *store {
	tb.Helper()
	n := 1
	for _, n = range nodes {
	}
	s := &store{}
	s.process, s.directory = startRole(tb, "store", envNodes+"="+strconv.Itoa(n), envCapacity+"="+
		strconv.FormatInt(capacity, 10))
	return s
}

// ask asks the directory for something.
func (s *store) ask(tb testing.TB, f func(context.Context, dirpb.DirectoryClient) error) {
	tb.Helper()
	d, err := dirclient.Open(dirclient.Options{Addrs: []string{s.directory}})
	if err != nil {
		tb.Fatal(err)
	}
	defer d.Close()
	if err := d.Call(tb.Context(), f); err != nil {
		tb.Fatal(err)
	}
}

// namespace creates a namespace.
func (s *store) namespace(tb testing.TB, req *dirpb.CreateNamespaceRequest) {
	tb.Helper()
	s.ask(tb, func(ctx context.Context, c dirpb.DirectoryClient) error {
		_, err := c.CreateNamespace(ctx, req)
		return err
	})
}

// sized creates a namespace whose index n keys fill to about two thirds, and whose heap has
// room for as many records of 128 bytes, and some to spare.
func (s *store) sized(tb testing.TB, name string, n int) {
	tb.Helper()
	s.roomy(tb, name, n, 64<<20)
}

// roomy is sized with so many bytes more. An overwritten place rests in limbo for some 0.3 s, so that much of what is
// written must find room at once.
func (s *store) roomy(tb testing.TB, name string, n int, spare uint64) {
	tb.Helper()
	segments := uint64(n)*3/2/shardSlots + 1
	region := uint64(n)*128*3/2 + segments*layout.SegmentSize + spare
	s.namespace(tb, &dirpb.CreateNamespaceRequest{Name: name, Replicas: 1, BytesPerNode: region, Shards: 1,
		Segments:     uint32(segments),
		IndexPercent: uint32(segments*layout.SegmentSize*100/region + 2)})
}

// open opens a client, with lanes if they are given; it is closed with the test.
func (s *store) open(tb testing.TB, provider, namespace string, lanes ...int) *client.Client {
	tb.Helper()
	o := client.Options{Namespace: namespace}
	for _, n := range lanes {
		o.Lanes = n
	}
	return s.openWith(tb, provider, o)
}

// openWith is open with more options.
func (s *store) openWith(tb testing.TB, provider string, o client.Options) *client.Client {
	tb.Helper()
	d, err := providers.Open(provider, providers.Options{})
	if err != nil {
		tb.Fatal(err)
	}
	o.Directory, o.Provider, o.Devices = []string{s.directory}, provider, []*rdma.Device{d}
	c, err := client.Open(tb.Context(), o)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := c.Close(); err != nil {
			tb.Error(err)
		}
		if err := d.Close(); err != nil {
			tb.Error(err)
		}
	})
	return c
}

// cpu is the processor time a process has used; sum of the scheduler's exact
// accounts of its threads, not of clock ticks.
func cpu(tb testing.TB, pid int) time.Duration {
	tb.Helper()
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
	if err != nil || len(tasks) == 0 {
		tb.Fatalf("no threads of process %d: %v", pid, err)
	}
	var sum time.Duration
	for _, f := range tasks {
		b, err := os.ReadFile(f)
		if err != nil {
			continue // the thread has ended
		}
		n, err := strconv.ParseInt(strings.Fields(string(b))[0], 10, 64)
		if err != nil {
			tb.Fatal(err)
		}
		sum += time.Duration(n)
	}
	return sum
}

// resident is a process's resident memory in bytes.
func resident(tb testing.TB, pid int) int64 {
	tb.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	if err != nil {
		tb.Fatal(err)
	}
	pages, err := strconv.ParseInt(strings.Fields(string(b))[1], 10, 64)
	if err != nil {
		tb.Fatal(err)
	}
	return pages * int64(os.Getpagesize())
}
