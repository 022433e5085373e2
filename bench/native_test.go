package bench

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/dirpb"
)

// TestNative compares programs in C and Python that use a broker with hiredis and redis-py before a redis-server, both
// over sockets and rings of this machine. It also compares C with the library of Go, and Python with C.
func TestNative(t *testing.T) {
	gated(t, "bench-native")
	for _, p := range []string{"redis-server", "gcc", "make", python} {
		if _, err := exec.LookPath(p); err != nil {
			t.Fatalf("%v: make bench-native installs it", err)
		}
	}
	r := &report{tb: t}
	began := time.Now()
	st := startStore(t, scaled[int64](4<<30, 1<<30))
	st.namespace(t, &dirpb.CreateNamespaceRequest{Name: "native", Replicas: 1,
		BytesPerNode: scaled[uint64](2<<30, 512<<20), Shards: 1, Segments: 1, IndexPercent: 1})
	n := startNative(t, st)
	contest := func(language, rival string, p *turner) func(what string, entries int, of string, want float64) {
		return func(what string, entries int, of string, want float64) {
			p.ask("kvd prepare", 100, entries)
			r.contest(language+" by a broker, "+what+", against "+rival, each, atLeast(want),
				p.perSecond("kvd "+of, 100, entries), p.perSecond("redis "+of, 100, entries))
		}
	}
	small, snake := contest("C", "hiredis", n.c), contest("Python", "redis-py", n.py)
	small("GETs of 100 B", 1, "get", 1.8)
	small("PUTs of 100 B", 1, "put", 1)
	small("GETs of 100 B, 16 in one call", 16, "get", 2)
	small("GETs of 100 B, 64 in one call", 64, "get", 2)

	snake("GETs of 100 B", 1, "get", 2)
	snake("PUTs of 100 B", 1, "put", 1)
	snake("GETs of 100 B, 64 in one call", 64, "get", 1)

	n.onOne()
	small("GETs of 100 B, all on one processor", 1, "get", 1.8)
	small("GETs of 100 B, 16 in one call, all on one processor", 16, "get", 2)
	snake("GETs of 100 B, all on one processor", 1, "get", 2)
	n.onAny()

	v := newLong(t.Error, st.open(t, "shm", "native"), 1)
	v.warm(2<<30, scaled(16<<20, 1<<20))
	n.py.ask("kvd prepare", 100, 1)
	alone := n.py.perSecond("count get", 0, 1)
	r.contest("Python, a thread that counts during GETs of 100 B, against alone", each, atLeast(0.8),
		n.py.perSecond("count get", 100, 1), alone)
	for _, mib := range scaled([]int{1, 4, 16}, []int{1}) {
		size := mib << 20
		n.c.ask("kvd prepare", size, 1)
		n.py.ask("kvd prepare", size, 1)
		put, get := v.put(size), func(c *client.Client, i int) {
			if l, err := c.GetInto(context.Background(), v.keys[i%len(v.keys)], v.dst[:size]); err != nil || l != size {
				t.Error(l, err)
			}
		}
		for _, x := range []struct {
			what string
			own  func(*client.Client, int)
		}{{"put", put}, {"get", get}} {
			ours, python := n.c.bytes("kvd "+x.what, size), n.py.bytes("kvd "+x.what, size)
			name := fmt.Sprintf(" by a broker, %ss of %d MiB in its arena, bytes/s, against ",
				strings.ToUpper(x.what), mib)
			r.contest("C"+name+"the library of Go", gigs, atLeast(0.9), ours, v.speed(size, x.own))
			r.contest("C"+name+"hiredis", gigs, atLeast(1), ours, n.c.bytes("redis "+x.what, size))
			r.contest("Python"+name+"C", gigs, atLeast(0.9), python, ours)
			r.contest("Python"+name+"redis-py", gigs, atLeast(2), python, n.py.bytes("redis "+x.what, size))
		}
	}
	r.contest("Python, a thread that counts during GETs of the last size, against alone", each, atLeast(0.8),
		n.py.perSecond("count get", scaled(16, 1)<<20, 1), alone)
	r.print(began)
}

// native has programs that take turns.
type native struct {
	tb    testing.TB
	c, py *turner
	pids  []int // of them, their broker and Redis
	any   unix.CPUSet
}

// python is Debian's, which has redis-py and numpy.
const python = "/usr/bin/python3"

func startNative(t *testing.T, st *store) *native {
	t.Helper()
	const c = "../client/c"
	if out, err := exec.Command("make", "-C", c, "CC=gcc", "all", "build/bench").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	lib, err := filepath.Abs(filepath.Join(c, "build/libkvd.so"))
	if err != nil {
		t.Fatal(err)
	}
	sock := filepath.Join(t.TempDir(), "broker")
	b, _ := startKvd(t, "broker", "--directory", st.directory, "--listen", sock, "--namespaces", "native")
	redis := startRedis(t)
	n := &native{tb: t, c: startTurner(t, filepath.Join(c, "build/bench"), sock, "native", redis.sock)}
	t.Setenv("KVD_LIBRARY", lib)
	t.Setenv("PYTHONPATH", "../client/python")
	n.py = startTurner(t, python, "../client/python/tests/bench.py", sock, "native", redis.sock)
	n.pids = []int{n.c.pid, n.py.pid, b.pid, redis.pid}
	if err := unix.SchedGetaffinity(0, &n.any); err != nil {
		t.Fatal(err)
	}
	return n
}

// onOne has all of them run on one processor, where neither end spins, and onAny on any.
func (n *native) onOne() {
	var one unix.CPUSet
	for i := range runtime.NumCPU() {
		if n.any.IsSet(i) {
			one.Set(i)
			break
		}
	}
	n.runOn(&one)
}

func (n *native) onAny() { n.runOn(&n.any) }

// runOn moves all threads. Those that begin later run where the threads do that begin them.
func (n *native) runOn(s *unix.CPUSet) {
	for _, pid := range n.pids {
		tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
		if err != nil {
			n.tb.Fatal(err)
		}
		for _, x := range tasks {
			if id, err := strconv.Atoi(x.Name()); err == nil {
				_ = unix.SchedSetaffinity(id, s) // it may have ended
			}
		}
	}
}

// turner is a program that takes a turn for each line of its input.
type turner struct {
	tb   testing.TB
	in   io.Writer
	out  *bufio.Scanner
	turn time.Duration
	pid  int
}

func startTurner(t *testing.T, program string, args ...string) *turner {
	t.Helper()
	cmd := exec.Command(program, args...)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		in.Close()
		if err := cmd.Wait(); err != nil {
			t.Error(err)
		}
	})
	return &turner{tb: t, in: in, out: bufio.NewScanner(out), turn: scaled(200*time.Millisecond, time.Millisecond),
		pid: cmd.Process.Pid}
}

// ask has the program take a turn. It returns nanoseconds of one call, the median.
func (n *turner) ask(what string, size, entries int) float64 {
	n.tb.Helper()
	if _, err := fmt.Fprintf(n.in, "%s %d %d %f\n", what, size, entries, n.turn.Seconds()); err != nil {
		n.tb.Fatal(err)
	}
	if !n.out.Scan() {
		n.tb.Fatalf("%s of %d bytes: the program ended: %v", what, size, n.out.Err())
	}
	v, err := strconv.ParseFloat(n.out.Text(), 64)
	if err != nil {
		n.tb.Fatal(err)
	}
	return v * 1e3
}

// perSecond measures entries a second.
func (n *turner) perSecond(what string, size, entries int) func() float64 {
	return func() float64 { return 1e9 / n.ask(what, size, entries) * float64(entries) }
}

// bytes measures bytes a second.
func (n *turner) bytes(what string, size int) func() float64 {
	return func() float64 { return 1e9 / n.ask(what, size, 1) * float64(size) }
}
