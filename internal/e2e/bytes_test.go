package e2e

import (
	"bufio"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// bytesForm is how much TestBytes does.
type bytesForm struct {
	gets    int64 // at least
	clients int
	memory  string // that each memory node lends
	sizes   [4]string
	keys    [4]int
	faults  int // at least
}

// bytesRun is a store and the client processes of TestBytes.
type bytesRun struct {
	*world
	bytesForm
	seed uint64
	rng  *rand.Rand

	nodes   [3]*daemon
	clients []*bytesProc
	done    map[string]int // faults

	mu  sync.Mutex
	all map[string]*bytesTally // by client and life
}

// bytesProc is one life of a client process.
type bytesProc struct {
	cmd    *exec.Cmd
	n      int
	life   int
	exited chan struct{}
	stderr buffer
}

// bytesNamespaces are a store with one copy, one with two, and two caches, each a tenant.
var bytesNamespaces = []string{"one", "two", "cache1", "cache2"}

// TestBytes: whatever happens to a GET, its caller has the value of its key or none of anybody's bytes. Processes of
// clients read, overwrite and delete values that say whose they are, from 100 bytes to 16 MiB, of four tenants in the
// same memory. Meanwhile memory nodes die with their memory and without it, and clients are stopped beyond their leases
// or killed; in longer runs shards split. KVD_BYTES says how many GETs; KVD_BYTES_SEED fixes the order of the faults.
func TestBytes(t *testing.T) {
	form := bytesForm{gets: 20_000, clients: 2, memory: "416MiB", sizes: [4]string{"96MiB", "128MiB", "48MiB", "64MiB"},
		keys: [4]int{2000, 60, 10, 1}, faults: 4}
	seed := rand.Uint64()
	if s := os.Getenv("KVD_BYTES"); s != "" {
		n, err := strconv.ParseInt(s, 10, 64)
		if err != nil {
			t.Fatalf("KVD_BYTES: %v", err)
		}
		form = bytesForm{gets: n, clients: 4, memory: "1GiB", faults: 12,
			sizes: [4]string{"256MiB", "288MiB", "96MiB", "160MiB"}, keys: [4]int{8000, 200, 24, 3}}
	}
	if s := os.Getenv("KVD_BYTES_SEED"); s != "" {
		var err error
		if seed, err = strconv.ParseUint(s, 10, 64); err != nil {
			t.Fatalf("KVD_BYTES_SEED: %v", err)
		}
	}
	r := &bytesRun{world: newWorld(t), bytesForm: form, seed: seed, rng: rand.New(rand.NewPCG(seed, 1)),
		done: map[string]int{}, all: map[string]*bytesTally{}}
	r.bytes()
	if t.Failed() {
		t.Logf("again: KVD_BYTES=%d KVD_BYTES_SEED=%d go test -count 1 -v -timeout 0 -run 'TestBytes$' ./internal/e2e",
			form.gets, seed)
	}
}

func (r *bytesRun) bytes() {
	r.dir = freeAddr(r.t)
	r.start(r.directory(r.t.TempDir(), freeAddr(r.t))...)
	for i := range r.nodes {
		r.startNode(i)
	}
	for i, ns := range bytesNamespaces {
		args := []string{"namespace", "create", ns, "--bytes", r.sizes[i], "--replicas", "1"}
		switch ns {
		case "two":
			args[6] = "2"
		case "cache1", "cache2":
			args = append(args, "--mode", "cache")
		}
		r.must(nil, args...)
	}
	for i := range r.bytesForm.clients {
		r.clients = append(r.clients, r.startClient(i, 1))
	}
	began := time.Now()
	for n := 0; ; n++ {
		before := r.sum().Gets
		r.until("GETs", func() bool { return r.sum().Gets > before+r.gets/int64(r.faults+1)/4 })
		if sum := r.sum(); sum.Gets >= r.gets && n >= r.faults || len(sum.Wrong) > 0 {
			break
		}
		r.fault(n)
	}
	took := time.Since(began)
	for _, c := range r.clients {
		r.end(c, syscall.SIGTERM)
	}
	sum := r.sum()
	for i, bad := range sum.Wrong {
		if i == 20 {
			r.t.Errorf("and %d more", len(sum.Wrong)-i)
			break
		}
		r.t.Error(bad)
	}
	for _, f := range []map[string]int64{sum.Failed, sum.FailedPuts} {
		for kind, n := range f {
			if kind == "corrupt" || strings.HasPrefix(kind, "other") {
				r.t.Errorf("%d times %s", n, kind)
			}
		}
	}
	failed := int64(0)
	for _, n := range sum.Failed {
		failed += n
	}
	if sum.Hits+sum.Misses+failed != sum.Gets || sum.Hits < sum.Gets/10 {
		r.t.Errorf("%d GETs: %d hits, %d misses, %d failures", sum.Gets, sum.Hits, sum.Misses, failed)
	}
	r.t.Logf("%d GETs in %v: %d hits of %d MiB, %d misses, %d failures %s, %d wrong; %d PUTs and deletes, failed %s; "+
		"faults %v", sum.Gets, took.Round(time.Second), sum.Hits, sum.Bytes>>20, sum.Misses, failed,
		counts(sum.Failed), len(sum.Wrong), sum.Puts, counts(sum.FailedPuts), r.done)
	r.books()
}

// books has the store checked when the clients have ended: all memory is linked, held by a session that is left, or
// free.
func (r *bytesRun) books() {
	for _, ns := range bytesNamespaces {
		var rep struct {
			Records     int    `json:"records"`
			Chunks      int    `json:"chunks"`
			Corrupt     int    `json:"corrupt_records"`
			Total       int    `json:"findings_total"`
			Bytes       uint64 `json:"record_bytes"`
			Unreachable uint64 `json:"unreachable_bytes"`
			Held        uint64 `json:"held_bytes"`
			Holders     int    `json:"other_sessions"`
		}
		out, stderr, _ := r.ctl(nil, "--namespace", ns, "-o", "json", "check", "--for", "60s")
		if err := json.Unmarshal(out, &rep); err != nil || rep.Corrupt+rep.Total > 0 || rep.Unreachable > 0 {
			r.t.Errorf("check of %s: %v: %+v\n%s%s", ns, err, rep, out, stderr)
		}
		r.t.Logf("%s: %d records and %d chunks in %d KiB; %d KiB unreachable; %d KiB of %d sessions that are left", ns,
			rep.Records, rep.Chunks, rep.Bytes>>10, rep.Unreachable>>10, rep.Held>>10, rep.Holders)
	}
}

func counts(m map[string]int64) string {
	var list []string
	for k, n := range m {
		list = append(list, fmt.Sprintf("%s: %d", k, n))
	}
	slices.Sort(list)
	return "(" + strings.Join(list, ", ") + ")"
}

func (r *bytesRun) startNode(i int) {
	args := r.memnode(fmt.Sprintf("m%d", i+1))
	args[len(args)-1] = r.memory
	r.nodes[i] = r.start(args...)
}

func (r *bytesRun) sum() *bytesTally {
	r.mu.Lock()
	defer r.mu.Unlock()
	sum := newTally()
	for _, t := range r.all {
		sum.add(t)
	}
	return sum
}

// startClient starts a process that uses all namespaces, every other one over tcp.
func (r *bytesRun) startClient(n, life int) *bytesProc {
	r.t.Helper()
	cfg := bytesConfig{Directory: r.dir, Provider: []string{"shm", "tcp"}[n%2], Namespaces: bytesNamespaces, Client: n,
		Life: life, Workers: 3, Seed: r.seed, Keys: r.keys}
	doc, err := json.Marshal(cfg)
	if err != nil {
		r.t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		r.t.Fatal(err)
	}
	c := &bytesProc{cmd: exec.Command(self), n: n, life: life, exited: make(chan struct{})}
	c.cmd.Env, c.cmd.Stderr = append(slices.Clone(r.env), bytesEnv+"="+string(doc)), &c.stderr
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		r.t.Fatal(err)
	}
	if err := c.cmd.Start(); err != nil {
		r.t.Fatal(err)
	}
	go func() {
		defer close(c.exited)
		lines := bufio.NewScanner(out)
		lines.Buffer(nil, 1<<24)
		for lines.Scan() {
			t := newTally()
			if json.Unmarshal(lines.Bytes(), t) != nil {
				continue // cut short by its end
			}
			r.mu.Lock()
			r.all[fmt.Sprintf("%d.%d", n, life)] = t
			r.mu.Unlock()
		}
		_ = c.cmd.Wait() // ProcessState says how
	}()
	r.t.Cleanup(func() {
		_ = c.cmd.Process.Kill() // most have exited
		<-c.exited
	})
	return c
}

// end ends a client process with a signal. Without SIGKILL it closes its sessions.
func (r *bytesRun) end(c *bytesProc, s syscall.Signal) {
	r.t.Helper()
	if err := c.cmd.Process.Signal(s); err != nil {
		r.t.Fatal(err)
	}
	r.until("a client's end", func() bool {
		select {
		case <-c.exited:
			return true
		default:
			return false
		}
	})
	if s != syscall.SIGKILL && c.cmd.ProcessState.ExitCode() != 0 {
		r.t.Errorf("client %d.%d: %v\n%s", c.n, c.life, c.cmd.ProcessState, &c.stderr)
	}
}

// fault is the n-th; the first ones are of all kinds.
func (r *bytesRun) fault(n int) {
	kinds := []string{"worker killed", "client killed", "memory lost", "client stopped", "shards split"}
	kind := kinds[n%len(kinds)]
	if n >= len(kinds) {
		kind = kinds[r.rng.IntN(len(kinds)-1)]
	}
	r.done[kind]++
	i := r.rng.IntN(len(r.clients))
	c, m := r.clients[i], r.rng.IntN(len(r.nodes))
	switch kind {
	case "worker killed": // its memory is kept
		r.nodes[m].killWorker()
	case "memory lost":
		worker := r.nodes[m].pid()
		r.nodes[m].signal(syscall.SIGKILL)
		_ = syscall.Kill(worker, syscall.SIGKILL) // it may have gone with its keeper
		r.startNode(m)
	case "client killed":
		r.end(c, syscall.SIGKILL)
		r.clients[i] = r.startClient(c.n, c.life+1)
	case "client stopped": // beyond its leases, with READs and WRITEs under way
		if err := c.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
			r.t.Fatal(err)
		}
		silent := time.Now()
		r.until("two leases", func() bool { return time.Since(silent) > 4*time.Second })
		if err := c.cmd.Process.Signal(syscall.SIGCONT); err != nil {
			r.t.Fatal(err)
		}
	case "shards split":
		_, _, _ = r.ctl(nil, "--namespace", bytesNamespaces[r.rng.IntN(4)], "shards", "split", "--all") // or it cannot
	}
}
