package verbstest

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/testutil"
)

// worker is the process that serves for a keeper; 0: there is none at the moment.
func (p *proc) worker() int {
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", p.cmd.Process.Pid))
	for _, f := range files {
		b, _ := os.ReadFile(f) // the thread may have ended
		if pid, err := strconv.Atoi(strings.TrimSpace(string(b))); err == nil {
			return pid
		}
	}
	return 0
}

// queuePairs counts those that each process has, of all adapters; 0: of processes that are gone.
func queuePairs(t *testing.T) map[int]int {
	t.Helper()
	if provider != "verbs" {
		return nil
	}
	out, err := exec.Command("/bin/rdma", "-j", "resource", "show", "qp").Output()
	if err != nil {
		t.Fatal(err)
	}
	var all []struct {
		Type string
		PID  int // of the thread that made it
	}
	if err := json.Unmarshal(out, &all); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	n := map[int]int{}
	for _, q := range all {
		if q.Type != "RC" {
			continue // the kernel's
		}
		b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", q.PID))
		_, after, _ := strings.Cut(string(b), "\nTgid:")
		line, _, _ := strings.Cut(after, "\n")
		pid, _ := strconv.Atoi(strings.TrimSpace(line)) // 0: it is gone
		n[pid]++
	}
	return n
}

// refused counts the verbs of a client that adapters refused for their rkeys or addresses, and with each a connection:
// IBV_WC_REM_ACCESS_ERR.
func (s *store) refused(c *client.Client) int {
	return strings.Count(s.logs[c].String(), " status=10 vendor=")
}

// kept is what must not change when the process of a memory node does, and keys what must over verbs.
type kept struct {
	incarnation uint64
	boot        uint64
	epochs      map[uint32]uint32
	keys        map[uint32][]uint64 // rkeys of the provider under test, by placement group
}

func (s *store) kept(name string) kept {
	s.t.Helper()
	m := s.status().GetMap()
	n := member(m, name)
	k := kept{n.GetIncarnation(), n.GetBoot(), map[uint32]uint32{}, map[uint32][]uint64{}}
	for _, pg := range m.GetPgs() {
		i := slices.IndexFunc(pg.GetMembers(), func(x *dirpb.Member) bool { return x.GetNodeId() == n.GetId() })
		if i < 0 {
			continue
		}
		k.epochs[pg.GetId()] = pg.GetEpoch()
		for _, x := range pg.Members[i].GetKeys() {
			if x.GetProvider() == provider {
				k.keys[pg.GetId()] = []uint64{x.GetIndexRkey(), x.GetHeapRkey(), x.GetIndexBase(), x.GetHeapBase()}
			}
		}
	}
	return k
}

// A memory node whose process is killed, or replaced, goes on with all of its memory, of which there is no other copy:
// clients read every key again, and once they have, no verb of theirs is refused. Of the process that ended no queue
// pair is left. The memory nodes are served by verbs alone; beside tcp, whose atomics the adapter executes; and beside
// tcp and shm, with verbs' atomics executed by an agent.
func TestRestart(t *testing.T) {
	needs(t, "1")
	const keys = 100
	tcp := []string{"--keep", "on", "--listen-tcp", "127.0.0.1:0"}
	s := newStore(t, 10*time.Second, node{"m1", 0, tcp[:2]}, node{"m2", 1, tcp},
		node{"m3", 3, append(tcp, "--rdma-atomics", "agent", "--shm-socket", filepath.Join(t.TempDir(), "m3"))})
	s.namespace("default", 1, 24<<20)
	busy, reader := s.client(provider, 2, client.Options{Lanes: 2}), s.client(provider, 2, client.Options{})
	var names [][]byte
	var pairs []client.KV
	for i := range keys {
		names = append(names, fmt.Appendf(nil, "kept%d", i))
		pairs = append(pairs, client.KV{Key: names[i], Value: names[i]})
	}
	for _, r := range busy.MultiPut(t.Context(), pairs) {
		if r.Err != nil {
			t.Fatal(r.Err)
		}
	}
	read := func() {
		t.Helper()
		for _, c := range []*client.Client{reader, busy} {
			for i, r := range c.MultiGet(t.Context(), names) {
				if r.Err != nil || !bytes.Equal(r.Value, names[i]) {
					t.Fatalf("%s is %q, %v", names[i], r.Value, r.Err)
				}
			}
		}
	}
	read()

	l := newLoad(t)
	var over atomic.Bool
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		l.run(busy, 2, 4, func() bool { return !over.Load() })
	}()
	defer func() { over.Store(true); <-ended }()
	goesOn := func() {
		t.Helper()
		n := l.sum("done")
		testutil.UntilNone(t, "the load goes on", func() string {
			if got := l.sum("done") - n; got < 20 {
				return fmt.Sprintf("%d operations", got)
			}
			return ""
		})
	}
	goesOn()

	var rows [][]string
	restart := func(what string, by func(names []string), names ...string) {
		t.Helper()
		old, was := map[string]int{}, map[string]kept{}
		for _, n := range names {
			old[n], was[n] = s.nodes[n].worker(), s.kept(n)
		}
		if n := queuePairs(t); provider == "verbs" {
			for _, name := range names {
				if n[old[name]] == 0 || n[s.nodes[name].cmd.Process.Pid] != 0 {
					t.Errorf("before: the worker of %s, %d, has %d queue pairs, its keeper %d", name, old[name],
						n[old[name]], n[s.nodes[name].cmd.Process.Pid])
				}
			}
		}
		refused := s.refused(busy) + s.refused(reader)
		began := time.Now()
		by(names)
		read()
		took := time.Since(began)
		during := s.refused(busy) + s.refused(reader) - refused
		goesOn()
		after := s.refused(busy) + s.refused(reader) - refused - during
		if after != 0 {
			t.Errorf("%s: %d verbs were refused after every key had been read", what, after)
		}
		left := queuePairs(t)
		for _, n := range names {
			now, is := s.nodes[n].worker(), s.kept(n)
			if now == old[n] || now == 0 {
				t.Errorf("%s: the worker of %s is %d, and was %d", what, n, now, old[n])
			}
			if is.incarnation != was[n].incarnation || is.boot != was[n].boot+1 ||
				!maps.Equal(is.epochs, was[n].epochs) {
				t.Errorf("%s: %s is\n%+v and was\n%+v", what, n, is, was[n])
			}
			for pg, k := range is.keys {
				if before := was[n].keys[pg]; provider == "verbs" &&
					(k[0] == before[0] && k[2] == before[2] || k[1] == before[1] && k[3] == before[3]) {
					t.Errorf("%s: placement group %d on %s has the keys %x, and had %x", what, pg, n, k, before)
				}
			}
			if provider == "verbs" && (left[old[n]] != 0 || left[0] != 0 || left[now] == 0) {
				t.Errorf("%s: the last worker of %s, %d, has %d queue pairs, the present one, %d, has %d, and "+
					"processes that are gone %d",
					what, n, old[n], left[old[n]], now, left[now], left[0])
			}
		}
		rows = append(rows, []string{what, strings.Join(names, ", "), took.Round(time.Millisecond).String(),
			itoa(during), itoa(after)})
	}
	kill := func(names []string) {
		for _, n := range names {
			pid := s.nodes[n].worker()
			if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
				t.Errorf("kill the worker of %s: %v", n, err)
			}
			// Until it is reaped its adapter may still serve.
			testutil.UntilNone(t, "the worker of "+n+" is gone", func() string {
				if s.nodes[n].worker() == pid {
					return "it is there"
				}
				return ""
			})
		}
	}
	restart("kill -9", kill, "m1")
	restart("kill -9", kill, "m3")
	restart("kvctl nodes restart", func(names []string) {
		for _, n := range names {
			if out := s.must("nodes", "restart", n); !strings.Contains(out, "restarted with its memory") {
				t.Errorf("kvctl nodes restart %s: %s", n, out)
			}
		}
	}, "m2")
	over.Store(true)
	<-ended

	for key, value := range l.acked {
		if it, err := reader.Get(t.Context(), []byte(key)); err != nil || string(it.Value) != value {
			t.Errorf("%s was acknowledged with %q and holds %q, %v", key, value, it.Value, err)
		}
	}
	if err := l.check(); err != nil {
		t.Error(err)
	}
	printTable(fmt.Sprintf("Workers of memory nodes replaced over %s, one copy, 2 workers writing: %d operations, %d "+
		"with an unknown outcome, %d not done; %d keys written once are there",
		provider, l.sum("done", "refused", "unknown", "failed"), l.sum("unknown"), l.sum("failed"), len(l.acked)),
		[]string{"how", "memory nodes", "all keys read again after", "verbs refused until then", "from then on"}, rows)
}
