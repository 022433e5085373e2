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

// Memory nodes' processors take no part in gets and puts.
func TestMemoryNodeCPU(t *testing.T) {
	needs(t, "1")
	const keys, batch, ops, singles = 500, 50, 10_000, 1000
	flags := []string{"--listen-tcp", "127.0.0.1:0"} // for comparison
	s := newStore(t, 2*patience, node{"m1", 0, flags}, node{"m2", 1, flags})
	c := s.client(provider, 2, client.Options{Lanes: 2})
	var names [][]byte
	for i := range keys {
		names = append(names, fmt.Appendf(nil, "key%d", i))
	}
	value := bytes.Repeat([]byte("v"), 64)
	get := func(t *testing.T, c *client.Client, n int) {
		t.Helper()
		for done := 0; done < n; done += batch {
			for i, r := range c.MultiGet(t.Context(), names[done%keys:done%keys+batch]) {
				if r.Err != nil || !bytes.Equal(r.Value, value) {
					t.Fatalf("get of %q: %q, %v", names[done%keys+i], r.Value, r.Err)
				}
			}
		}
	}
	put := func(t *testing.T, c *client.Client, n int) {
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
	// Each by itself, because who has to wake for an operation may wake once for a batch.
	single := func(c *client.Client) {
		t.Helper()
		for i := range singles {
			if it, err := c.Get(t.Context(), names[i%keys]); err != nil || !bytes.Equal(it.Value, value) {
				t.Fatalf("get of %q: %q, %v", names[i%keys], it.Value, err)
			}
		}
	}
	put(t, c, keys)
	get(t, c, keys)

	var rows [][]string
	measure := func(what string, load func()) (sum usage, took time.Duration) {
		names := []string{"m1", "m2"}
		before := map[string]usage{}
		for _, n := range names {
			before[n] = s.nodes[n].usage()
		}
		verbs, began := c.Stats().Verbs, time.Now()
		load()
		took = time.Since(began)
		after := c.Stats().Verbs
		for _, n := range names {
			u := s.nodes[n].usage().sub(before[n])
			rows = append(rows, []string{what, n, took.Round(time.Millisecond).String(), itoa(u.user), itoa(u.system), u.run.Round(10 * time.Microsecond).String(), itoa(u.wakes),
				itoa(after.Verbs[rdma.OpRead] - verbs.Verbs[rdma.OpRead]), itoa(after.Verbs[rdma.OpWrite] - verbs.Verbs[rdma.OpWrite]),
				itoa(after.Verbs[rdma.OpCmpAndSwp] - verbs.Verbs[rdma.OpCmpAndSwp])})
			sum = usage{sum.user + u.user, sum.system + u.system, sum.run + u.run, sum.wakes + u.wakes}
		}
		return sum, took
	}
	began := c.Stats().Ops
	_, took := measure(fmt.Sprintf("%d gets", ops), func() { get(t, c, ops) })
	measure(fmt.Sprintf("%d puts", ops), func() { put(t, c, ops) })
	idle, idleTime := measure("at rest", func() { time.Sleep(took) })
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
			until(t, "a heartbeat of "+name+" from after the load", func() string {
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
	// busy tells whether memory nodes woke for what they were asked. How long their
	// heartbeats, five a second, take depends on who else wants the processors; how
	// often they wake does not.
	busy := func(u usage, took time.Duration) bool {
		return float64(u.wakes) > 1.5*float64(idle.wakes)*float64(took)/float64(idleTime)+singles/4
	}
	oneByOne := fmt.Sprintf("%d gets, one by one", singles)
	counted := dataPath()
	if provider == "verbs" {
		if counted != 0 {
			t.Errorf("memory nodes count %v on the data path, want 0", time.Duration(counted))
		}
		if u, took := measure(oneByOne, func() { single(c) }); busy(u, took) {
			t.Errorf("memory nodes were awake %d times in %v of gets, one by one, and %d times in %v of rest", u.wakes, took, idle.wakes, idleTime)
		}

		// Processes that are stopped execute nothing, and the store serves on.
		for _, n := range []string{"m1", "m2"} {
			s.nodes[n].stop()
		}
		stopped, _ := measure(fmt.Sprintf("%d gets and %d puts while the memory nodes are stopped (SIGSTOP)", ops/5, ops/5), func() { get(t, c, ops/5); put(t, c, ops/5) })
		for _, n := range []string{"m1", "m2"} {
			s.nodes[n].signal(syscall.SIGCONT)
		}
		if stopped != (usage{}) {
			t.Errorf("stopped memory nodes used %+v", stopped)
		}
	}

	// The same over tcp, whose agents execute every verb, to see that it would be seen.
	other := s.client("tcp", 2, client.Options{})
	if u, took := measure(oneByOne+" over tcp", func() { single(other) }); !busy(u, took) {
		t.Errorf("memory nodes were awake %d times in %v of gets over tcp, and %d times in %v of rest: the measurement is blind", u.wakes, took, idle.wakes, idleTime)
	}
	after := dataPath()
	if after <= counted {
		t.Errorf("memory nodes count %v on the data path before gets over tcp, %v after", time.Duration(counted), time.Duration(after))
	}
	printTable("Processor time of memory nodes, over "+provider+" (ticks of 10 ms; the verbs are those that the client over "+provider+" posted)",
		[]string{"load", "memory node", "took", "user ticks", "system ticks", "run time", "times awake", "READ", "WRITE", "CAS"}, rows)
	fmt.Printf("data_path_cpu_nanos: %d before the gets over tcp, %d after\n\n", counted, after)
}
