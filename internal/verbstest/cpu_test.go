package verbstest

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/testutil"
	"github.com/kvd-project/kvd/rdma"
)

// usage is what a process has used of the processors.
type usage struct {
	user, system int64         // ticks of 10 ms
	run          time.Duration // of all threads, from schedstat; finer, user and system together
	wakes        int64         // how often a thread began to run after it had waited
}

func (u usage) sub(o usage) usage {
	return usage{u.user - o.user, u.system - o.system, u.run - o.run, u.wakes - o.wakes}
}

func (p *proc) usage() (u usage) {
	p.t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.cmd.Process.Pid))
	if err != nil {
		p.t.Fatal(err)
	}
	// proc_pid_stat(5): utime and stime are the 14th and 15th field, and the
	// command's name, the second, may hold spaces.
	f := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	num := func(s string) int64 {
		n, err := strconv.ParseInt(s, 10, 64)
		if err != nil {
			p.t.Fatal(err)
		}
		return n
	}
	u.user, u.system = num(f[14-3]), num(f[15-3])
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", p.cmd.Process.Pid))
	if err != nil || len(files) == 0 {
		p.t.Fatalf("%s: no schedstat of any thread: %v", p.name, err)
	}
	for _, name := range files {
		b, err := os.ReadFile(name)
		if err != nil {
			p.t.Fatal(err)
		}
		u.run += time.Duration(num(strings.Fields(string(b))[0]))
		if b, err = os.ReadFile(strings.TrimSuffix(name, "schedstat") + "status"); err != nil {
			p.t.Fatal(err)
		}
		_, after, _ := strings.Cut(string(b), "\nvoluntary_ctxt_switches:")
		first, _, _ := strings.Cut(after, "\n")
		u.wakes += num(strings.TrimSpace(first))
	}
	return u
}

// Memory nodes' processors take no part in gets and puts: these go on while the
// processes are stopped, and use nothing of them. The same over tcp, whose agents
// execute every verb, shows what would be seen.
func TestMemoryNodeCPU(t *testing.T) {
	needs(t, "1")
	needsVerbs(t, "nothing works while memory nodes are stopped")
	const keys, batch, ops = 500, 50, 10_000
	flags := []string{"--listen-tcp", "127.0.0.1:0"} // for comparison
	s := newStore(t, 6*patience, node{"m1", 0, flags}, node{"m2", 1, flags})
	c := s.client(provider, 2, client.Options{Lanes: 2})
	var names [][]byte
	for i := range keys {
		names = append(names, fmt.Appendf(nil, "key%d", i))
	}
	value := bytes.Repeat([]byte("v"), 64)
	get := func(c *client.Client, n int) {
		t.Helper()
		for done := 0; done < n; done += batch {
			for i, r := range c.MultiGet(t.Context(), names[done%keys:done%keys+batch]) {
				if r.Err != nil || !bytes.Equal(r.Value, value) {
					t.Fatalf("get of %q: %q, %v", names[done%keys+i], r.Value, r.Err)
				}
			}
		}
	}
	put := func(c *client.Client, n int) {
		t.Helper()
		for done := 0; done < n; done += batch {
			var pairs []client.KV
			for _, k := range names[done%keys : done%keys+batch] {
				pairs = append(pairs, client.KV{Key: k, Value: value})
			}
			for i, r := range c.MultiPut(t.Context(), pairs) {
				if r.Err != nil {
					t.Fatalf("put of %q: %v", pairs[i].Key, r.Err)
				}
			}
		}
	}
	put(c, keys)
	get(c, keys)

	var rows [][]string
	measure := func(what string, load func()) (sum usage) {
		names := []string{"m1", "m2"}
		before := map[string]usage{}
		for _, n := range names {
			before[n] = s.nodes[n].usage()
		}
		verbs, began := c.Stats().Verbs, time.Now()
		load()
		took := time.Since(began)
		after := c.Stats().Verbs
		for _, n := range names {
			u := s.nodes[n].usage().sub(before[n])
			rows = append(rows, []string{what, n, took.Round(time.Millisecond).String(), itoa(u.user), itoa(u.system),
				u.run.Round(10 * time.Microsecond).String(), itoa(u.wakes),
				itoa(after.Verbs[rdma.OpRead] - verbs.Verbs[rdma.OpRead]),
				itoa(after.Verbs[rdma.OpWrite] - verbs.Verbs[rdma.OpWrite]),
				itoa(after.Verbs[rdma.OpCmpAndSwp] - verbs.Verbs[rdma.OpCmpAndSwp])})
			sum = usage{sum.user + u.user, sum.system + u.system, sum.run + u.run, sum.wakes + u.wakes}
		}
		return sum
	}
	began := c.Stats().Ops
	for _, n := range []string{"m1", "m2"} {
		s.nodes[n].stop()
	}
	used := []usage{
		measure(fmt.Sprintf("%d gets, stopped (SIGSTOP)", ops), func() { get(c, ops) }),
		measure(fmt.Sprintf("%d puts, stopped", ops), func() { put(c, ops) }),
	}
	for _, n := range []string{"m1", "m2"} {
		s.nodes[n].signal(syscall.SIGCONT)
	}
	for _, u := range used {
		if u != (usage{}) {
			t.Errorf("stopped memory nodes used %+v", u)
		}
	}
	ended := c.Stats().Ops
	if g, p := ended["get"]-began["get"], ended["put"]-began["put"]; g != ops || p != ops {
		t.Errorf("the client counts %d gets and %d puts, want %d of each", g, p, ops)
	}

	// dataPath is what memory nodes count themselves, in heartbeats that were sent
	// after the call: they show more new connections than a client can have.
	dataPath := func() (nanos uint64) {
		t.Helper()
		const fresh = 4
		connections := func(name string) uint64 {
			st := s.status()
			return st.GetNodeStats()[member(st.GetMap(), name).GetId()].GetConnections()
		}
		g := s.guesser("default", true, true)
		for _, name := range []string{"m1", "m2"} {
			before := connections(name)
			for range fresh {
				g.mustConnect(name)
			}
			testutil.UntilNone(t, "a heartbeat of "+name+" from after the load", func() string {
				if n := connections(name); n < before+fresh {
					return fmt.Sprintf("%d connections, %d before", n, before)
				}
				return ""
			})
		}
		for _, st := range s.status().GetNodeStats() {
			nanos += st.GetDataPathCpuNanos()
		}
		return nanos
	}
	counted := dataPath()
	if counted != 0 {
		t.Errorf("memory nodes count %v on the data path, want 0", time.Duration(counted))
	}
	other := s.client("tcp", 2, client.Options{})
	measure(fmt.Sprintf("%d gets and %d puts over tcp, running", ops/10, ops/10), func() {
		get(other, ops/10)
		put(other, ops/10)
	})
	after := dataPath()
	if after == 0 {
		t.Error("memory nodes count nothing on the data path after gets and puts over tcp, either")
	}
	printTable("Processor time of memory nodes (ticks of 10 ms; the verbs are those that the client over "+provider+
		" posted)",
		[]string{"load", "memory node", "took", "user ticks", "system ticks", "run time", "times awake", "READ",
			"WRITE", "CAS"}, rows)
	fmt.Printf("data_path_cpu_nanos: %d before the gets and puts over tcp, %d after\n\n", counted, after)
}
