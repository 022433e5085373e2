package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/providers"
)

// clientsEnv makes this test binary a process with so many clients of the directory at
// clientsDirEnv, which have all written and read once and then do nothing.
const clientsEnv, clientsDirEnv = "KVD_E2E_CLIENTS", "KVD_E2E_DIRECTORY"

func clients(count, directory string) (err error) {
	n, err := strconv.Atoi(count)
	if err != nil {
		return err
	}
	devices, err := providers.OpenFor("", providers.Options{})
	if err != nil {
		return err
	}
	ctx := context.Background()
	for i := range n {
		c, err := client.Open(ctx, client.Options{Directory: []string{directory}, Devices: devices, Lanes: 2,
			CacheBytes: 1 << 20})
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, c.Close()) }()
		key := []byte("idle" + strconv.Itoa(i))
		if _, err := c.Put(ctx, key, []byte("v"), client.PutOptions{}); err != nil {
			return err
		}
		if _, err := c.Get(ctx, key); err != nil {
			return err
		}
	}
	fmt.Println("ready clients")
	_, err = io.Copy(io.Discard, os.Stdin) // until the test ends
	return err
}

// clients starts a process with so many of them.
func (w *world) clients(n int) *daemon {
	w.t.Helper()
	cmd := exec.Command(os.Args[0])
	stdin, err := cmd.StdinPipe()
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { stdin.Close() })
	cmd.Env = append(w.env, clientsEnv+"="+strconv.Itoa(n), clientsDirEnv+"="+w.dir)
	d := w.run(cmd)
	d.awaitReady()
	return d
}

// spent is what a process has used since it began: how often one of its threads went to
// sleep, which is how often one was woken, and the CPU time of all.
type spent struct {
	wakes int
	cpu   time.Duration
}

// usage adds up what the threads of a process have used. Threads that have ended are
// remembered as they were seen last.
type usage struct {
	pid     int
	threads map[string]spent
}

func (u *usage) readThreads(t *testing.T) (sum spent) {
	t.Helper()
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", u.pid))
	if err != nil || len(tasks) == 0 {
		t.Fatalf("process %d has no threads: %v", u.pid, err)
	}
	for _, dir := range tasks {
		x, err := thread(dir)
		switch {
		case err == nil:
			u.threads[dir] = x
		case !errors.Is(err, fs.ErrNotExist) && !strings.Contains(err.Error(), "no such process"):
			t.Fatal(err)
		}
	}
	for _, x := range u.threads {
		sum.wakes += x.wakes
		sum.cpu += x.cpu
	}
	return sum
}

// thread reads what one thread has used.
func thread(dir string) (x spent, err error) {
	status, err := os.ReadFile(filepath.Join(dir, "status"))
	if err != nil {
		return x, err
	}
	for line := range strings.Lines(string(status)) {
		if n, ok := strings.CutPrefix(line, "voluntary_ctxt_switches:"); ok {
			if x.wakes, err = strconv.Atoi(strings.TrimSpace(n)); err != nil {
				return x, err
			}
		}
	}
	stat, err := os.ReadFile(filepath.Join(dir, "schedstat")) // utime + stime, in nanoseconds
	if err != nil {
		return x, err
	}
	ns, err := strconv.ParseInt(strings.Fields(string(stat))[0], 10, 64)
	x.cpu = time.Duration(ns)
	return x, err
}

// rate is what a process uses in a second.
type rate struct {
	wakes float64
	cpu   float64 // percent of a core
}

// rates measures processes over the same time. It looks more often than that, for threads
// that end.
func rates(t *testing.T, ds []*daemon, over time.Duration) []rate {
	t.Helper()
	us := make([]usage, len(ds))
	first := make([]spent, len(ds))
	for i, d := range ds {
		us[i] = usage{d.pid(), map[string]spent{}}
		first[i] = us[i].readThreads(t)
	}
	began := time.Now()
	last := make([]spent, len(ds))
	const looks = 5
	for n := 1; n <= looks; n++ {
		time.Sleep(time.Until(began.Add(over * time.Duration(n) / looks))) // what is measured is that nothing happens
		for i := range us {
			last[i] = us[i].readThreads(t)
		}
	}
	took := time.Since(began).Seconds()
	out := make([]rate, len(ds))
	for i := range ds {
		out[i] = rate{float64(last[i].wakes-first[i].wakes) / took, 100 * (last[i].cpu - first[i].cpu).Seconds() / took}
	}
	return out
}

// idle is a process that does nothing, and how often it may wake up in a second; 0: it is
// only measured, since it depends on the machine's load too much.
type idle struct {
	name string
	d    *daemon
	most float64
}

// quietest measures processes until each has been within its bound for once, in windows of
// that time and in so many at least, and prints the least of each: whatever else runs on the machine
// can only add to it. A store that has just begun is not idle yet.
func quietest(t *testing.T, over time.Duration, windows int, rows ...idle) {
	t.Helper()
	ds := make([]*daemon, len(rows))
	for i, r := range rows {
		ds[i] = r.d
	}
	least := rates(t, ds, over)
	loud := func(i int) bool { return rows[i].most > 0 && least[i].wakes > rows[i].most }
	for end := time.Now().Add(patience); ; windows-- {
		any := false
		for i := range rows {
			any = any || loud(i)
		}
		if windows <= 1 && (!any || time.Now().After(end)) {
			break
		}
		for i, r := range rates(t, ds, over) {
			least[i] = rate{min(least[i].wakes, r.wakes), min(least[i].cpu, r.cpu)}
		}
	}
	for i, r := range rows {
		t.Logf("| %s | %.0f | %.2f %% |", r.name, least[i].wakes, least[i].cpu)
		if loud(i) {
			t.Errorf("%s: woken up %.0f times a second, want at most %.0f", r.name, least[i].wakes, r.most)
		}
	}
}

// TestIdle counts how often processes wake up for which there is nothing to do, and prints
// what that costs. KVD_IDLE is how long a window of the measurement is; without it there is one
// of two seconds. The bounds are several times what a machine at rest shows, and less than what
// timers and questions need that ask again and again: those are what they are to catch.
func TestIdle(t *testing.T) {
	over, windows := 2*time.Second, 1
	if s := os.Getenv("KVD_IDLE"); s != "" {
		var err error
		if over, err = time.ParseDuration(s); err != nil {
			t.Fatalf("KVD_IDLE: %v", err)
		}
		windows = 4
	}
	for _, lease := range []string{"1s", "5s"} {
		t.Run("lease "+lease, func(t *testing.T) {
			w := aloneWorld(t)
			w.dir = freeAddr(t)
			dir := w.start("directory", "--id", "d1", "--data-dir", t.TempDir(), "--listen", w.dir, "--raft-listen",
				freeAddr(t), "--bootstrap", "--lease", lease)
			one := w.start("memnode", "--name", "m1", "--directory", w.dir, "--memory", "1GiB")
			quietest(t, over, windows, idle{"directory, a memory node and nobody else", dir, 600},
				idle{"memory node that nobody uses", one, 220})
			w.must(nil, "namespace", "create", "cache", "--mode", "cache", "--bytes", "64MiB")
			gw := w.start("gateway", "--directory", w.dir, "--listen", freeAddr(t), "--listen-memcached", freeAddr(t))
			c := w.clients(1)
			quietest(t, over, windows, idle{"directory, a memory node, a gateway and a client", dir, 900},
				idle{"memory node", one, 220},
				idle{"gateway without connections", gw, 250}, idle{"client", c, 220})
			w.clients(100)
			quietest(t, over, windows, idle{"directory, 100 clients more", dir, 0},
				idle{"memory node, 100 clients more", one, 220})
		})
	}
	t.Run("dev", func(t *testing.T) {
		w := aloneWorld(t)
		w.dir = freeAddr(t)
		dev := w.start("dev", "--listen", w.dir, "--redis", freeAddr(t), "--memcached", freeAddr(t), "--http",
			freeAddr(t), "--memory", "256MiB")
		quietest(t, over, windows, idle{"kvd dev", dev, 500})
	})
}
