package main

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/httpd"
)

// changing is a simulated store that changes with each update: the memory of a placement group, and how far a job is.
type changing struct {
	mu   sync.Mutex
	st   *dirpb.StatusReply
	n    int
	jobs paces
}

func newChanging() *changing {
	st := simulated(64, 1024)
	for i := range 10 {
		st.Jobs = append(st.Jobs, &dirpb.Job{Id: uint32(i + 1), Kind: dirpb.JobKind_JOB_JOIN, PgId: uint32(i + 1),
			Total: 100_000, Owner: 3, Reason: "a copy is missing"})
	}
	return &changing{st: st}
}

func (c *changing) update() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.n++
	u := c.st.Usage[c.n*7%len(c.st.Usage)]
	u.LiveUnits, u.GrantedUnits = u.LiveUnits+1<<14, u.GrantedUnits+1<<14
	c.st.Jobs[c.n%len(c.st.Jobs)].Done += 50
	c.st.Map.Version++
}

// page copies the state, as a directory node does that answers.
func (c *changing) page(context.Context) (httpd.Page, error) {
	c.mu.Lock()
	st := proto.CloneOf(c.st)
	c.mu.Unlock()
	return clusterPage(st, c.jobs.left(st, time.Now()), nil), nil
}

func serveChanging(tb testing.TB) (*changing, *httpd.Server) {
	tb.Helper()
	s, err := httpd.Start(tb.Context(), httpd.Options{Addr: "127.0.0.1:0", Role: "directory", Version: "v1"})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		http.DefaultClient.CloseIdleConnections()
		_ = s.Close()
	})
	c := newChanging()
	s.Serving(func() error { return nil }, c.page)
	return c, s
}

// BenchmarkPage makes what a page of a large store is made of, which happens at most once a second, for all who look at
// it.
func BenchmarkPage(b *testing.B) {
	c := newChanging()
	for b.Loop() {
		for range updatesPerSecond {
			c.update()
		}
		if _, err := c.page(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
}

const updatesPerSecond = 20

// TestConsoleCost: neither the browser nor the process takes more than 5 % of a processor for the page of a store of 64
// memory nodes and 1,024 placement groups that changes 20 times a second.
func TestConsoleCost(t *testing.T) {
	path := os.Getenv("KVD_CONSOLE_COST")
	if path == "" {
		t.Skip("no KVD_CONSOLE_COST: make console-cost")
	}
	settle, measured := 8*time.Second, 30*time.Second
	smoke := os.Getenv("KVD_CONSOLE_SMOKE") != "" // whether it works; no verdict on speed
	if smoke {
		settle, measured = time.Second, time.Second
	}
	c, s := serveChanging(t)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		tick := time.NewTicker(time.Second / updatesPerSecond)
		defer tick.Stop()
		for {
			select {
			case <-stop:
				return
			case <-tick.C:
				c.update()
			}
		}
	})
	defer wg.Wait()
	defer close(stop)
	of := func(at string) (browser, process float64) {
		home := t.TempDir()
		cmd := exec.CommandContext(t.Context(), path, "--headless=new", "--no-sandbox", "--disable-gpu",
			"--remote-debugging-port=0", "--user-data-dir="+home, "--window-size=1400,1000", at)
		cmd.Env = append(os.Environ(), "HOME="+home)
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		defer func() {
			_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
			_ = cmd.Wait() // it was killed
		}()
		time.Sleep(settle)
		browser, process = -treeCPU(t, cmd.Process.Pid), -ownCPU(t)
		time.Sleep(measured)
		share := 100 / measured.Seconds()
		return (browser + treeCPU(t, cmd.Process.Pid)) * share, (process + ownCPU(t)) * share
	}
	blank, idle := of("about:blank")
	browser, process := of("http://" + s.Addr())
	asked := s.Door().Stats().Accepted
	fmt.Printf("of one processor: the browser %.1f %% (%.1f %% with an empty page), the process %.1f %% (%.1f %% "+
		"without a page)\n", browser, blank, process, idle)
	if asked == 0 || !smoke && (browser > 5 || process > 5) {
		t.Errorf("the browser takes %.1f %%, the process %.1f %%, want 5 %% at most; %d connections", browser, process,
			asked)
	}
}

// ownCPU is what this process has taken, in seconds.
func ownCPU(t *testing.T) float64 {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano()).Seconds()
}

// treeCPU is what a process and all that it started have taken, in seconds.
func treeCPU(t *testing.T, root int) float64 {
	t.Helper()
	entries, err := os.ReadDir("/proc")
	if err != nil {
		t.Fatal(err)
	}
	const ticks = 100 // a second, to user space; proc_pid_stat(5)
	children, took := make(map[int][]int), make(map[int]float64)
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		b, err := os.ReadFile("/proc/" + e.Name() + "/stat")
		if err != nil {
			continue // it has gone
		}
		f := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:]))
		parent, _ := strconv.Atoi(f[1])
		user, _ := strconv.ParseFloat(f[11], 64)
		system, _ := strconv.ParseFloat(f[12], 64)
		children[parent], took[pid] = append(children[parent], pid), (user+system)/ticks
	}
	var sum func(pid int) float64
	sum = func(pid int) float64 {
		n := took[pid]
		for _, c := range children[pid] {
			n += sum(c)
		}
		return n
	}
	return sum(root)
}
