package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/ctl/bulk"
	"github.com/kvd-project/kvd/internal/devstore"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/testutil"
	"github.com/kvd-project/kvd/rdma/verbs"
)

// A wrong command line is status 2, also if cobra alone knows what is wrong.
func TestUsage(t *testing.T) {
	e := &env{t: t, now: time.Now}
	for _, line := range []string{
		"bogus", "help bogus", "help namespace bogus", "completion tcsh", "completion bash fish",
		"put", "put k v w", "get k --bogus", "namespace bogus", "namespace set x", "namespace set x --limit many",
		"nodes bogus",
		"dump", "dump --pg 1", "shards split", "shards split x", "--rdma-device x/ get k", "--rdma-device x,y/ get k",
		"--directory= get k",
		"--directory nowhere get k",
		"txn", "txn put k", "txn frob k", "txn put k v put k w", "txn require k soon", "txn put a - put b -",
		"scan --limit -1", "version x", "flush x", "del --prefix a b", "del --prefix a --version 1",
		"--hex del --prefix zz",
	} {
		if r := e.run("", strings.Fields(line)...); r.code != ctl.ExitUsage || r.stdout != "" ||
			strings.Count(r.stderr, "\n") != 1 {
			t.Errorf("kvctl %s: %+v", line, r)
		}
	}
	for line, says := range map[string]string{
		"--directory= get k":                   "--directory is empty: want host:port",
		"--insecure --directory nowhere get k": `--directory "nowhere": want host:port`,
		"--insecure --directory a:1,b get k":   `--directory "b": want host:port`,
	} {
		if r := e.run("", strings.Fields(line)...); r.code != ctl.ExitUsage || !strings.Contains(r.stderr, says) {
			t.Errorf("kvctl %s: %+v", line, r)
		}
	}
	// A list is taken, as far as the provider is built in.
	r := e.run("", strings.Fields("--rdma-device mlx5_0/1,mlx5_1/1/3 --insecure --directory nowhere get k")...)
	if verbs.Built != (r.code == ctl.ExitUsage) || strings.Contains(r.stderr, "rdma-device") {
		t.Errorf("two adapters: %+v", r)
	}
	for _, line := range []string{"help", "help namespace create", "namespace", "completion", "completion bash",
		"version", "--version", "-o json version"} {
		if r := e.run("", strings.Fields(line)...); r.code != ctl.ExitOK || r.stdout == "" {
			t.Errorf("kvctl %s: exit %d, %q", line, r.code, r.stderr)
		}
	}
}

// mute is a directory that hears every request and answers none, until the test ends.
type mute struct {
	dirpb.UnimplementedDirectoryServer
	asked atomic.Int64
}

func (m *mute) OpenSession(ctx context.Context, _ *dirpb.OpenSessionRequest) (*dirpb.OpenSessionReply, error) {
	m.asked.Add(1)
	<-ctx.Done()
	return nil, ctx.Err()
}

func (m *mute) Status(ctx context.Context, _ *dirpb.StatusRequest) (*dirpb.StatusReply, error) {
	m.asked.Add(1)
	<-ctx.Done()
	return nil, ctx.Err()
}

// A request that the directory refuses because it lacks memory nodes did not happen.
func TestNothingWasDone(t *testing.T) {
	e := newEnv(t, devstore.Options{Nodes: 2, CapacityBytes: 64 << 20})
	r := e.run("", "namespace", "create", "three", "--replicas", "3")
	if r.code != ctl.ExitUnavailable || !strings.Contains(r.stderr, "2 are up and not draining; nothing was done") ||
		strings.Contains(r.stderr, "may have") {
		t.Errorf("3 copies on 2 memory nodes: %+v", r)
	}
}

// An operation whose session was never opened did not happen, although the directory
// was asked; nor did a change of the cluster that was still to be asked for.
func TestSessionNeverOpened(t *testing.T) {
	m := &mute{}
	lis := testutil.Listen(t)
	s := grpc.NewServer()
	dirpb.RegisterDirectoryServer(s, m)
	var wg sync.WaitGroup
	wg.Go(func() { _ = s.Serve(lis) })
	t.Cleanup(wg.Wait)
	t.Cleanup(s.Stop)
	dir := t.TempDir()
	writeFile(t, filepath.Join(dir, "f"), []byte("x"))
	e := &env{t: t, now: time.Now}
	// run gives a command the more time, the longer it takes to reach the directory.
	run := func(stdin, line string) (r result) {
		was := m.asked.Load()
		for timeout := 300 * time.Millisecond; m.asked.Load() == was && timeout < time.Minute; timeout *= 2 {
			e.flags = []string{"--directory", lis.Addr().String(), "--timeout", timeout.String()}
			r = e.run(stdin, strings.Fields(line)...)
		}
		return r
	}
	for _, line := range []string{"put k v", "del k", "incr k", "cas k 1 v", "txn put k v del l", "ttl k 1s", "pipe",
		"import " + dir, "drain m1", "rebalance", "shards split --all"} {
		was := m.asked.Load()
		r := run("a\tb\n", line)
		if r.code != ctl.ExitUnavailable || !strings.HasSuffix(r.stderr, "(it did not happen)\n") ||
			strings.Contains(r.stderr, "may have") || m.asked.Load() == was {
			t.Errorf("kvctl %s, asked %d times: %+v", line, m.asked.Load()-was, r)
		}
	}
	for _, line := range []string{"get k", "exists k", "status", "scan"} {
		if r := run("", line); r.code != ctl.ExitUnavailable || strings.Contains(r.stderr, "happen") ||
			strings.Contains(r.stderr, "may have") {
			t.Errorf("kvctl %s: %+v", line, r)
		}
	}
}

// A command that is interrupted while it waits for input ends at once, and says that
// nothing happened; on a terminal it had said what it waits for.
func TestInterruptedInput(t *testing.T) {
	e := newEnv(t, devstore.Options{CapacityBytes: 128 << 20, Providers: []string{"shm"}})
	for _, c := range []struct{ line, reads string }{
		{"put k", "the value"}, {"put k -", "the value"}, {"cas k 1", "the value"}, {"del", "keys, one a line,"},
		{"mget", "keys, one a line,"}, {"exists", "keys, one a line,"}, {"pipe", "commands"},
	} {
		for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM} {
			t.Run(fmt.Sprintf("%s, %v", c.line, sig), func(t *testing.T) {
				e := *e
				e.t = t
				x := e.terminal(t.TempDir(), strings.Fields(c.line)...)
				name, _, _ := strings.Cut(c.line, " ")
				x.expect("kvctl " + name + ": reading " + c.reads + " from the terminal")
				x.types("begun") // which the terminal holds until the line ends
				if sig == syscall.SIGINT {
					x.types("\x03") // as a user sends it
				} else if err := x.cmd.Process.Signal(sig); err != nil {
					t.Fatal(err)
				}
				x.expect("kvctl " + name + ": ")
				if name != "mget" && name != "exists" {
					x.expect("(it did not happen)")
				}
				x.exits(ctl.ExitInterrupted)
				if got := x.text(); strings.Contains(got, "may have") {
					t.Errorf("%q", got)
				}
			})
		}
	}
	t.Run("at the end of input", func(t *testing.T) {
		e := *e
		e.t = t
		x := e.terminal(t.TempDir(), "put", "typed")
		x.expect("^D")
		x.types("one\r\x04")
		x.expect("version ")
		x.exits(ctl.ExitOK)
		if got := e.must("", "get", "typed"); got != "one\n" {
			t.Errorf("%q", got)
		}
	})
	t.Run("pipe", func(t *testing.T) {
		cmd := exec.Command(os.Args[0], append(slices.Clone(e.flags), "put", "k")...)
		cmd.Env = append(os.Environ(), asMain+"=1")
		var said strings.Builder
		cmd.Stderr = &said
		in, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		defer func() { _ = cmd.Process.Kill() }()
		// A pipe that takes more than it holds is being read.
		if _, err := in.Write(make([]byte, 1<<20)); err != nil {
			t.Fatal(err)
		}
		if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		if err := cmd.Wait(); cmd.ProcessState.ExitCode() != ctl.ExitInterrupted ||
			!strings.HasSuffix(said.String(), "(it did not happen)\n") || strings.Contains(said.String(), "reading") {
			t.Errorf("%v, %q", err, said.String())
		}
	})
	if r := e.run("", "get", "k"); r.code != ctl.ExitNo {
		t.Errorf("after all: %+v", r)
	}
}

// exits waits until the command has ended with a status.
func (x *terminal) exits(code int) {
	x.t.Helper()
	kill := time.AfterFunc(testutil.Limit, func() { _ = x.cmd.Process.Kill() })
	defer kill.Stop()
	_ = x.cmd.Wait() // its state says how
	if got := x.cmd.ProcessState.ExitCode(); got != code {
		x.t.Errorf("exit %d, want %d: %q", got, code, x.text())
	}
}

// interrupting is a store whose user has had enough after some batches of writes.
type interrupting struct {
	ctl.Store
	cancel context.CancelFunc
	after  atomic.Int64
}

func (i *interrupting) MultiPut(ctx context.Context, kvs []client.KV) []client.Result {
	defer i.count()
	return i.Store.MultiPut(ctx, kvs)
}

func (i *interrupting) MultiDelete(ctx context.Context, ks [][]byte) []client.Result {
	defer i.count()
	return i.Store.MultiDelete(ctx, ks)
}

func (i *interrupting) Do(ctx context.Context, ops []client.Op) {
	defer i.count()
	i.Store.Do(ctx, ops)
}

func (i *interrupting) count() {
	if i.after.Add(-1) == 0 {
		i.cancel()
	}
}

// A command that is interrupted after a part of it is neither undone nor unavailable: it says how far it came.
func TestInterruptedHalfway(t *testing.T) {
	e := newEnv(t, devstore.Options{CapacityBytes: 256 << 20, Providers: []string{"shm"}})
	dir := t.TempDir()
	for i := range 4 * bulk.TreeWorkers * ctl.BatchKeys {
		writeFile(t, filepath.Join(dir, fmt.Sprint(i)), []byte("x"))
	}
	var lines strings.Builder
	for i := range 4 * bulk.PipeKeys {
		fmt.Fprintf(&lines, "k%d\tv\n", i)
	}
	e.must(lines.String(), "pipe")
	for _, c := range []struct {
		line  string
		after int64
		says  string
	}{
		{"import " + dir, 2, "kvctl import: after "},
		{"bench --records 4096 --threads 2 --duration 10m", 2, "kvctl bench: load: after "},
		{"bench --records 64 --threads 1 --batch 8 --duration 10m -w A", 3, "kvctl bench: after "},
		{"pipe", 2, "kvctl pipe: "},
		{"flush --yes", 2, "kvctl flush: after "},
		{"del --prefix k", 1, "kvctl del: after "},
	} {
		ctx, cancel := context.WithCancel(t.Context())
		e.wrap(func(s ctl.Store) ctl.Store {
			i := &interrupting{Store: s, cancel: cancel}
			i.after.Store(c.after)
			return i
		})
		r := e.runContext(ctx, lines.String(), strings.Fields(c.line)...)
		cancel()
		if r.code != ctl.ExitInterrupted || !strings.Contains(r.stderr, c.says) || strings.Contains(r.stderr,
			"happen") ||
			strings.Contains(r.stderr, "after 0 ") || strings.Count(r.stderr, "\n") != 1 {
			t.Errorf("kvctl %s: %+v", c.line, r)
		}
		if strings.HasPrefix(c.says, "kvctl bench: after") && !strings.Contains(r.stdout, "operations/s") {
			t.Errorf("kvctl %s: nothing of what was measured: %q", c.line, r.stdout)
		}
	}
}

// Before anything was done, an interrupt leaves nothing.
func TestInterruptedEarly(t *testing.T) {
	e := newEnv(t, devstore.Options{CapacityBytes: 128 << 20, Providers: []string{"shm"}})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for _, line := range []string{"put k v", "import " + t.TempDir(), "bench", "pipe", "flush --yes"} {
		if r := e.runContext(ctx, "", strings.Fields(line)...); r.code != ctl.ExitInterrupted ||
			!strings.HasSuffix(r.stderr, "(it did not happen)\n") {
			t.Errorf("kvctl %s: %+v", line, r)
		}
	}
}
