package verbstest

import (
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/dirpb"
)

// contend lets the clients, which may reach the memory nodes in different ways,
// increment the same keys, and swap a third by compare-and-swap; every increment
// must count.
func contend(t *testing.T, s *store, clients map[string]*client.Client, each int) {
	t.Helper()
	keys := []string{"sum0", "sum1"}
	var wg sync.WaitGroup
	began := time.Now()
	for name, c := range clients {
		for _, key := range keys {
			wg.Go(func() {
				for i := range each {
					if _, err := c.Incr(t.Context(), []byte(key), 1); err != nil {
						t.Errorf("%s: increment %d of %s: %v", name, i, key, err)
						return
					}
				}
			})
		}
		wg.Go(func() {
			// The value is a number, too, but taken by get and compare-and-swap.
			for i := 0; i < each; {
				k := []byte("swapped")
				it, err := c.Get(t.Context(), k)
				if errors.Is(err, client.ErrNotFound) {
					_, err = c.PutIfAbsent(t.Context(), k, []byte("1"), client.PutOptions{})
				} else if err == nil {
					var n int
					if n, err = strconv.Atoi(string(it.Value)); err == nil {
						_, err = c.CompareAndSwap(t.Context(), k, it.Version, strconv.AppendInt(nil, int64(n+1), 10),
							client.PutOptions{})
					}
				}
				switch {
				case err == nil:
					i++
				case !errors.Is(err, client.ErrExists) && !errors.Is(err, client.ErrConflict):
					t.Errorf("%s: swap %d: %v", name, i, err)
					return
				}
			}
		})
	}
	wg.Wait()
	took := time.Since(began)
	want := strconv.Itoa(each * len(clients))
	var rows [][]string
	for name, c := range clients {
		for _, key := range append(keys, "swapped") {
			it, err := c.Get(t.Context(), []byte(key))
			if err != nil || string(it.Value) != want {
				t.Errorf("%s reads %q, %v of %s, want %s", name, it.Value, err, key, want)
			}
		}
		st := c.Stats()
		for node, by := range st.Connections {
			if !strings.HasPrefix(by, strings.Fields(name)[0]) {
				t.Errorf("%s reaches %s by %s", name, node, by)
			}
		}
		rows = append(rows, []string{name, itoa(3 * each), itoa(st.CASLosses), itoa(st.Unknown),
			fmt.Sprint(st.Connections)})
	}
	printTable(fmt.Sprintf("%s: three keys are %s each, as they should, after %v", t.Name(), want,
		took.Round(time.Millisecond)),
		[]string{"client", "increments", "CAS lost and repeated", "unknown", "connections"}, rows)
}

// wantAtomics wants the directory and kvctl to say who executes the atomics of a
// memory node's endpoints.
func wantAtomics(t *testing.T, s *store, name string, want map[string]dirpb.AtomicsBy) {
	t.Helper()
	n := member(s.status().GetMap(), name)
	if len(n.GetEndpoints()) != len(want) {
		t.Errorf("%s has the endpoints %v, want %v", name, n.GetEndpoints(), want)
	}
	out := s.must("nodes")
	for p, by := range want {
		if got := endpoint(n, p).GetAtomics(); got != by {
			t.Errorf("%s: atomics over %s are by %v, want %v", name, p, got, by)
		}
		short := "atomics=" + strings.ToLower(strings.TrimPrefix(by.String(), "ATOMICS_BY_"))
		if by != dirpb.AtomicsBy_ATOMICS_BY_CPU && !strings.Contains(out, short) { // CPU is the usual
			t.Errorf("kvctl nodes does not show %q:\n%s", short, out)
		}
	}
}

// With --rdma-atomics agent the domain is the processors': verbs, tcp and shm go
// together.
func TestAgentAtomics(t *testing.T) {
	needs(t, "1")
	needsVerbs(t, "every atomic is an agent's")
	flags := func(name string) []string {
		return []string{"--rdma-atomics", "agent", "--listen-tcp", "127.0.0.1:0", "--shm-socket",
			filepath.Join(t.TempDir(), name)}
	}
	s := newStore(t, 5*time.Second, node{"m1", 0, flags("m1")}, node{"m2", 1, flags("m2")})
	s.namespace("default", 2, 32<<20)
	for _, n := range []string{"m1", "m2"} {
		wantAtomics(t, s, n, map[string]dirpb.AtomicsBy{"verbs": dirpb.AtomicsBy_ATOMICS_BY_AGENT,
			"tcp": dirpb.AtomicsBy_ATOMICS_BY_CPU, "shm": dirpb.AtomicsBy_ATOMICS_BY_CPU})
	}
	clients := map[string]*client.Client{}
	for i := range 2 {
		clients[fmt.Sprintf("verbs %s", nic(2+i))] = s.client("verbs", 2+i, client.Options{})
	}
	clients["tcp"] = s.client("tcp", 0, client.Options{})
	contend(t, s, clients, 30)
	for name, c := range clients {
		for node, by := range c.Stats().Connections {
			if strings.HasPrefix(by, "verbs") && !strings.Contains(by, "agent") {
				t.Errorf("%s does not say that %s's agent does CAS: %q", name, node, by)
			}
		}
	}
}

// Beside an adapter with atomics of its own, tcp's are left to the adapter, and shm is
// left out.
func TestAtomicProxy(t *testing.T) {
	needs(t, "1")
	needsVerbs(t, "there is no adapter to leave atomics to")
	flags := []string{"--listen-tcp", "127.0.0.1:0", "--rdma-traffic-class", "104", "--rdma-gid-type", "RoCE v2"}
	s := newStore(t, 5*time.Second, node{"m1", 0, append(flags, "--rdma-atomics", "nic", "--shm-socket", "auto")},
		node{"m2", 1, flags})
	s.namespace("default", 2, 32<<20)
	for _, n := range []string{"m1", "m2"} {
		wantAtomics(t, s, n, map[string]dirpb.AtomicsBy{"verbs": dirpb.AtomicsBy_ATOMICS_BY_NIC,
			"tcp": dirpb.AtomicsBy_ATOMICS_BY_PROXY})
	}
	if log := s.nodes["m1"].log.String(); !strings.Contains(log, "shm") {
		t.Errorf("m1 does not log that it leaves shm out:\n%s", log)
	}
	contend(t, s, map[string]*client.Client{"verbs": s.client("verbs", 2, client.Options{}),
		"tcp": s.client("tcp", 0, client.Options{})}, 40)

	if out := s.must("-o", "json", "nodes"); strings.Count(out, `"traffic_class":104`) != 2 ||
		!strings.Contains(out, `"gid_type":"RoCE v2"`) {
		t.Errorf("kvctl nodes does not show how the adapters' packets go:\n%s", out)
	}
	s.must("--require", "rdma", "get", "swapped")
	if _, stderr, status := s.ctl("--require", "rdma", "--rdma-device", "rxe9", "get", "swapped"); status == 0 ||
		!strings.Contains(stderr, "require is rdma") || !strings.Contains(stderr, `no adapter "rxe9"`) {
		t.Errorf("without an adapter, --require rdma ends with %d: %s", status, stderr)
	}

	m3 := spawn(t, "m3", environ(),
		s.memnode(node{"m3", 3, []string{"--rdma-atomics", "nic", "--shm-socket",
			filepath.Join(t.TempDir(), "m3")}})...)
	if status := m3.wait(); status == 0 {
		t.Error("shm beside an adapter with atomics of its own: m3 starts")
	}
	if log := m3.log.String(); !strings.Contains(log, "shm") || !strings.Contains(log, "atomic") {
		t.Errorf("m3's refusal names neither shm nor atomics:\n%s", log)
	}
	fmt.Printf("\nshm asked for beside the adapter's atomics: %s\n", lastLine(m3.log.String()))
}

func lastLine(s string) string {
	s = strings.TrimSpace(s)
	return s[strings.LastIndexByte(s, '\n')+1:]
}
