package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
)

// workerOf gives the process that serves in a keeper's place; ok is false if there is none now.
func workerOf(keeper int) (pid int, ok bool) {
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", keeper))
	for _, f := range files {
		b, _ := os.ReadFile(f) // the thread may have ended
		if pid, err := strconv.Atoi(strings.TrimSpace(string(b))); err == nil {
			return pid, true
		}
	}
	return 0, false
}

// pid is the process that serves: a keeper's worker, or else the daemon itself.
func (d *daemon) pid() int {
	if pid, ok := workerOf(d.cmd.Process.Pid); ok {
		return pid
	}
	return d.cmd.Process.Pid
}

// killWorker kills the worker of a keeper, and returns when it is another one.
func (d *daemon) killWorker() {
	d.w.t.Helper()
	pid, ok := workerOf(d.cmd.Process.Pid)
	if !ok {
		d.w.t.Fatalf("%v has no worker\n%s", d.cmd.Args, d.stderr)
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		d.w.t.Fatal(err)
	}
	d.w.until("another worker", func() bool {
		next, ok := workerOf(d.cmd.Process.Pid)
		return ok && next != pid
	})
}

// writers put ever greater numbers under keys of their own, and remember what they were told.
type writers struct {
	t    *testing.T
	c    *client.Client
	keys int
	stop atomic.Bool
	wg   sync.WaitGroup
	acks atomic.Uint64 // puts that were answered
	mu   sync.Mutex
	low  []uint64 // the number that the key has at least, by key
	high []uint64 // and at most
}

func (w *world) writers(provider, namespace string, n, keys int) *writers {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), patience)
	defer cancel()
	c, err := client.Open(ctx, client.Options{Directory: []string{w.dir}, Provider: provider, Namespace: namespace,
		Lanes: 2, CacheBytes: 1 << 20, OpTimeout: patience})
	if err != nil {
		w.t.Fatal(err)
	}
	x := &writers{t: w.t, c: c, keys: keys, low: make([]uint64, n*keys), high: make([]uint64, n*keys)}
	for g := range n {
		x.wg.Go(func() {
			for v := uint64(1); !x.stop.Load(); v++ {
				for k := g * keys; k < (g+1)*keys && !x.stop.Load(); k++ {
					x.put(k, v)
				}
			}
		})
	}
	return x
}

func (x *writers) name(k int) []byte { return fmt.Appendf(nil, "key %d", k) }

func (x *writers) put(k int, v uint64) {
	x.mu.Lock()
	x.high[k] = v
	x.mu.Unlock()
	_, err := x.c.Put(context.Background(), x.name(k), fmt.Append(nil, v), client.PutOptions{})
	switch {
	case err == nil:
		x.mu.Lock()
		x.low[k] = v
		x.mu.Unlock()
		x.acks.Add(1)
	case !errors.Is(err, client.ErrUnknownOutcome) && !errors.Is(err, client.ErrUnavailable):
		x.t.Errorf("key %d: %v", k, err)
		x.stop.Store(true)
	}
}

// serves waits until a put that began now was answered.
func (x *writers) serves(w *world) {
	w.t.Helper()
	goal := x.acks.Load() + uint64(len(x.low)/x.keys) + 1 // those that were under way, and one
	w.until("a put to be answered", func() bool { return x.acks.Load() >= goal })
}

// end stops the writers and gives how many keys they lost.
func (x *writers) end() (lost int) {
	x.t.Helper()
	x.stop.Store(true)
	x.wg.Wait()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for k := range x.low {
		if x.high[k] == 0 {
			continue
		}
		i, err := x.c.Get(ctx, x.name(k))
		if errors.Is(err, client.ErrNotFound) && x.low[k] > 0 {
			lost++
			continue
		}
		v, perr := strconv.ParseUint(string(i.Value), 10, 64)
		if err != nil && !errors.Is(err, client.ErrNotFound) || err == nil &&
			(perr != nil || v < x.low[k] || v > x.high[k]) {
			x.t.Errorf("key %d is %q, %v; want %d to %d", k, i.Value, err, x.low[k], x.high[k])
		}
	}
	if err := x.c.Close(); err != nil {
		x.t.Error(err)
	}
	return lost
}

// TestWorkerKilled kills the process that serves the only copy, again and again, under load: no key is lost, and none
// has another value than the last one that was put, or was being put.
func TestWorkerKilled(t *testing.T) {
	for _, provider := range []string{"tcp", "shm"} {
		t.Run(provider, func(t *testing.T) {
			w := newWorld(t)
			w.dir = freeAddr(t)
			w.start(w.directory(t.TempDir(), freeAddr(t))...)
			m := w.start(w.memnode("m1")...)
			w.must(nil, "namespace", "create", "one", "--replicas", "1")
			x := w.writers(provider, "one", 4, 50)
			x.serves(w)
			for n := range 6 {
				began := time.Now()
				m.killWorker()
				x.serves(w)
				t.Logf("kill %d: puts are answered again after %v", n+1, time.Since(began).Round(time.Millisecond))
			}
			if lost := x.end(); lost != 0 {
				t.Errorf("%d keys were lost", lost)
			}
			w.must(nil, "--namespace", "one", "check")
			if n := strings.Count(m.stderr.String(), "memory kept by the keeper is taken over"); n != 6 {
				t.Errorf("%d of 6 workers took over the memory", n)
			}
			if status := m.signal(syscall.SIGTERM); status != 0 {
				t.Errorf("exit status %d after SIGTERM\n%s", status, m.stderr)
			}
		})
	}
}

// TestWithoutKeeper: with keep off a memory node is one process, and its keys are gone with it.
func TestWithoutKeeper(t *testing.T) {
	w := newWorld(t)
	w.dir = freeAddr(t)
	w.start(w.directory(t.TempDir(), freeAddr(t))...)
	m := w.start(append(w.memnode("m1"), "--keep", "off")...)
	w.must(nil, "namespace", "create", "one", "--replicas", "1")
	x := w.writers("tcp", "one", 2, 20)
	x.serves(w)
	if pid, ok := workerOf(m.cmd.Process.Pid); ok {
		t.Fatalf("it has a worker, %d", pid)
	}
	x.stop.Store(true)
	x.wg.Wait()
	m.signal(syscall.SIGKILL)
	w.start(append(w.memnode("m1"), "--keep", "off")...)
	if lost := x.end(); lost == 0 {
		t.Error("no key was lost, so the other tests show nothing")
	}
}

// TestKeeperKilled: the worker ends with its keeper, and what was kept is gone: the next keeper's worker serves an
// empty memory node at the same address, under another incarnation.
func TestKeeperKilled(t *testing.T) {
	w := newWorld(t)
	w.dir = freeAddr(t)
	w.start(w.directory(t.TempDir(), freeAddr(t))...)
	args := append(w.memnode("m1"), "--listen-tcp", freeAddr(t))
	m := w.start(args...)
	w.must(nil, "namespace", "create", "one", "--replicas", "1")
	w.must([]byte("v"), "--namespace", "one", "put", "k")
	worker := m.pid()
	m.signal(syscall.SIGKILL)
	w.until("the worker to end", func() bool { return syscall.Kill(worker, 0) == syscall.ESRCH })
	w.start(args...)
	w.must([]byte("w"), "--namespace", "one", "put", "new")
	if out, _, status := w.ctl(nil, "--namespace", "one", "get", "k"); status != 1 {
		t.Errorf("exit status %d, %q", status, out)
	}
}

// TestNodesRestart: an operator has the process of the only copy replaced under load, and nothing is lost; a memory
// node that keeps nothing is refused.
func TestNodesRestart(t *testing.T) {
	w := newWorld(t)
	w.dir = freeAddr(t)
	w.start(w.directory(t.TempDir(), freeAddr(t))...)
	m := w.start(w.memnode("m1")...)
	w.must(nil, "namespace", "create", "one", "--replicas", "1")
	x := w.writers("tcp", "one", 2, 50)
	x.serves(w)
	for n := range 3 {
		worker, began := m.pid(), time.Now()
		out := string(w.must(nil, "nodes", "restart", "m1"))
		if !strings.HasPrefix(out, fmt.Sprintf("m1: restarted with its memory, boot %d, version ", n+2)) ||
			m.pid() == worker {
			t.Errorf("%q, the worker was %d and is %d", out, worker, m.pid())
		}
		x.serves(w)
		t.Logf("restart %d: puts are answered again after %v", n+1, time.Since(began).Round(time.Millisecond))
	}
	if lost := x.end(); lost != 0 {
		t.Errorf("%d keys were lost", lost)
	}
	if strings.Contains(m.stderr.String(), "died") {
		t.Error("a worker died")
	}
	w.start(append(w.memnode("m2"), "--keep", "off")...)
	for node, want := range map[string]string{"m2": "keep: off", "m3": "m3"} {
		if _, stderr, status := w.ctl(nil, "nodes", "restart", node); status != 1 || !strings.Contains(stderr, want) {
			t.Errorf("%s: exit status %d\n%s", node, status, stderr)
		}
	}
}

// TestSignalToBoth: a supervisor that signals every process of a memory node gets the goodbye that it asked for, once.
func TestSignalToBoth(t *testing.T) {
	w := newWorld(t)
	w.dir = freeAddr(t)
	w.start(w.directory(t.TempDir(), freeAddr(t))...)
	m := w.start(w.memnode("m1")...)
	w.must([]byte("v"), "put", "k")
	if err := syscall.Kill(m.pid(), syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if status := m.signal(syscall.SIGTERM); status != 0 ||
		!strings.Contains(m.stderr.String(), "memory node left the directory") {
		t.Errorf("exit status %d\n%s", status, m.stderr)
	}
}

// TestWorkerAway: no worker can be started for many leases, since the program is being replaced. The directory waits
// for the only copy, and it is there when the program is.
func TestWorkerAway(t *testing.T) {
	w := newWorld(t)
	w.dir = freeAddr(t)
	const lease = 200 * time.Millisecond
	w.start("directory", "--id", "d1", "--data-dir", t.TempDir(), "--listen", w.dir, "--raft-listen", freeAddr(t),
		"--bootstrap", "--lease", lease.String())
	program := filepath.Join(t.TempDir(), "kvd")
	b, err := os.ReadFile(filepath.Join(bin, "kvd"))
	if err != nil {
		t.Fatal(err)
	}
	if err := writeProgram(program, b, 0o700); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(program, w.memnode("m1")...)
	cmd.Env = w.env
	m := w.run(cmd)
	m.awaitReady()
	w.must(nil, "namespace", "create", "one", "--replicas", "1")
	w.must([]byte("v"), "--namespace", "one", "put", "k")
	if err := os.Rename(program, program+".away"); err != nil {
		t.Fatal(err)
	}
	worker, _ := workerOf(m.cmd.Process.Pid)
	if err := syscall.Kill(worker, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	w.until("the directory to wait for it", func() bool {
		return strings.Contains(string(w.must(nil, "status")), "waiting for: m1")
	})
	silent := time.Now()
	w.until("20 leases", func() bool { return time.Since(silent) > 20*lease })
	if out := string(w.must(nil, "status")); !strings.Contains(out, "waiting for: m1") ||
		strings.Contains(out, "lost keys") {
		t.Errorf("after 20 leases the status is\n%s", out)
	}
	if err := os.Rename(program+".away", program); err != nil {
		t.Fatal(err)
	}
	w.until("the key", func() bool {
		out, _, status := w.ctl(nil, "--namespace", "one", "get", "k")
		return status == 0 && string(out) == "v"
	})
	if !strings.Contains(m.stderr.String(), "cannot start the worker; trying again") {
		t.Error("the keeper did not say that it cannot start a worker")
	}
}

// hammerEnv has this binary write large values over shm, for ever, to the directory that it names; a file of the other
// name grows by a byte with each.
const hammerEnv, hammerFileEnv = "KVD_E2E_HAMMER", "KVD_E2E_HAMMERED"

func hammer(directory, file string) error {
	const lanes = 3
	ctx := context.Background()
	f, err := os.OpenFile(file, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	c, err := client.Open(ctx, client.Options{Directory: []string{directory}, Namespace: "one", Provider: "shm",
		Lanes: lanes, CacheBytes: 1 << 20, OpTimeout: patience})
	if err != nil {
		return err
	}
	fmt.Println("ready hammer")
	failed := make(chan error)
	for n := range 2 * lanes {
		go func() {
			for value := make([]byte, 1<<20); ; {
				_, err := c.Put(ctx, fmt.Appendf(nil, "large %d", n), value, client.PutOptions{})
				if err == nil {
					_, err = f.Write([]byte{'.'})
				}
				if err != nil && !errors.Is(err, client.ErrUnknownOutcome) && !errors.Is(err, client.ErrUnavailable) {
					failed <- err
				}
			}
		}()
	}
	return <-failed
}

// TestStoppedInsideVerb: while a client of this machine is stopped inside a verb that it began before the restart, the
// memory is not served, and the log says why. When it goes on, all is served again.
func TestStoppedInsideVerb(t *testing.T) {
	w := newWorld(t)
	w.dir = freeAddr(t)
	w.start(w.directory(t.TempDir(), freeAddr(t))...)
	m := w.start(w.memnode("m1")...)
	w.must(nil, "namespace", "create", "one", "--replicas", "1")
	w.must([]byte("v"), "--namespace", "one", "put", "k")
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	file := filepath.Join(t.TempDir(), "hammered")
	cmd.Env = append(w.env, hammerEnv+"="+w.dir, hammerFileEnv+"="+file)
	h := w.run(cmd)
	h.awaitReady()
	said := func(text string) int { return strings.Count(m.stderr.String(), text) }
	const registered, inside = "memory node registered", "inside a verb that they began before the restart"
	held := 0
	for cycle, end := 1, time.Now().Add(2*patience); held == 0; cycle++ {
		if time.Now().After(end) {
			t.Fatalf("the client was never stopped inside a verb, in %d cycles", cycle)
		}
		size := func() int64 {
			fi, err := os.Stat(file)
			if err != nil {
				t.Fatal(err)
			}
			return fi.Size()
		}
		was := size()
		w.until("the client to be at work with this worker", func() bool { return size() > was+10 })
		before := said(registered)
		if err := cmd.Process.Signal(syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		restarted := make(chan int, 1) // not by a kill: workers that die soon are followed by others ever later
		go func() {
			_, _, status := w.ctl(nil, "nodes", "restart", "m1")
			restarted <- status
		}()
		w.until("the worker to register, or to say why not", func() bool {
			return said(registered) > before || said(inside) > held
		})
		if said(inside) > held {
			held++
			if said(registered) > before {
				t.Error("registered with a client inside a verb")
			}
			if _, _, status := w.ctl(nil, "--namespace", "one", "--timeout", "500ms", "get", "k"); status == 0 {
				t.Error("served with a client inside a verb")
			}
		}
		if err := cmd.Process.Signal(syscall.SIGCONT); err != nil {
			t.Fatal(err)
		}
		if status := <-restarted; status != 0 {
			t.Errorf("kvctl nodes restart: exit status %d", status)
		}
	}
	w.until("the key", func() bool {
		out, _, status := w.ctl(nil, "--namespace", "one", "get", "k")
		return status == 0 && string(out) == "v"
	})
	_ = cmd.Process.Kill() // it runs for ever
	<-h.exited
	w.until("kvctl check", func() bool {
		_, _, status := w.ctl(nil, "--namespace", "one", "check")
		return status == 0
	})
}
