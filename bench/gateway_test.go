package bench

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
)

// TestGatewayRatios prints a table as TestRatios does: a gateway over shm beside
// redis-server and memcached, each asked by the same program over loopback TCP, in turns.
// It fails only if something does not work.
func TestGatewayRatios(t *testing.T) {
	if os.Getenv("KVD_BENCH") == "" {
		t.Skip("KVD_BENCH is not set; run make bench")
	}
	for _, p := range []string{"redis-server", "redis-benchmark", "memcached"} {
		if _, err := exec.LookPath(p); err != nil {
			t.Fatalf("%v: make bench installs it", err)
		}
	}
	r := &report{}
	began := time.Now()
	st := startStore(t, 1<<30)
	st.namespace(t, &dirpb.CreateNamespaceRequest{Name: "cache", Mode: dirpb.NamespaceMode_NAMESPACE_CACHE, Replicas: 1})
	g := startGateway(t, st, "cache")
	t.Run("redis", func(t *testing.T) { compareRedis(t, r, g) })
	t.Run("memcached", func(t *testing.T) { compareMemcached(t, r, g) })
	r.print(time.Since(began))
}

// gatewayProcess is a `kvd gateway`.
type gatewayProcess struct {
	*process
	redis, memcached, http string // host:port
}

// startGateway builds kvd and starts a gateway of a namespace.
func startGateway(tb testing.TB, st *store, namespace string) *gatewayProcess {
	tb.Helper()
	kvd := filepath.Join(tb.TempDir(), "kvd")
	build := exec.Command("go", "build", "-o", kvd, "../cmd/kvd")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		tb.Fatalf("%v\n%s", err, out)
	}
	const any = "127.0.0.1:0"
	g := &gatewayProcess{}
	p, with := startReady(tb, exec.Command(kvd, "gateway", "--directory", st.directory, "--databases", namespace, "--provider", "shm",
		"--listen", any, "--listen-memcached", any, "--http-listen", any, "--log-level", "warn"))
	g.process = p
	for _, kv := range strings.Fields(with) {
		switch k, v, _ := strings.Cut(kv, "="); k {
		case "redis":
			g.redis = v
		case "memcached":
			g.memcached = v
		case "http":
			g.http = v
		}
	}
	if g.redis == "" || g.memcached == "" {
		tb.Fatalf("kvd gateway is ready with %q", with)
	}
	return g
}

func kops(v float64) string { return fmt.Sprintf("%.1f k/s", v/1e3) }

func compareRedis(t *testing.T, r *report, g *gatewayProcess) {
	rd := startRedis(t)
	for _, size := range []int{3, 1024} {
		at := func(addr, test string, n, depth, clients int) benchmarked {
			host, port, err := net.SplitHostPort(addr)
			if err != nil {
				t.Fatal(err)
			}
			return redisBenchmark(t, test, n, "-h", host, "-p", port, "-d", strconv.Itoa(size), "-P", strconv.Itoa(depth), "-c", strconv.Itoa(clients))
		}
		for _, addr := range []string{g.redis, rd.addr} {
			at(addr, "set", 500_000, 64, 50) // nearly all keys are there then
		}
		for _, x := range []struct{ depth, clients, n int }{{1, 1, 10_000}, {1, 50, 40_000}, {16, 50, 200_000}, {64, 50, 400_000}} {
			for _, test := range []string{"set", "get"} {
				var ours, theirs []benchmarked
				for range rounds {
					ours = append(ours, at(g.redis, test, x.n, x.depth, x.clients))
					theirs = append(theirs, at(rd.addr, test, x.n, x.depth, x.clients))
				}
				what := fmt.Sprintf("gateway %s of %d bytes, redis-benchmark -P %d -c %d", strings.ToUpper(test), size, x.depth, x.clients)
				compare := func(name string, show func(float64) string, sign string, of func(benchmarked) float64) {
					var a, b, ratio []float64
					for i := range ours {
						a, b, ratio = append(a, of(ours[i])), append(b, of(theirs[i])), append(ratio, of(ours[i])/of(theirs[i]))
					}
					r.add(what+", "+name, show(median(a)), show(median(b)), median(ratio), sign, 1)
				}
				compare("requests/s", kops, ">=", func(b benchmarked) float64 { return b.rps })
				if x.depth == 1 {
					compare("p50", us, "<=", func(b benchmarked) float64 { return b.p50 })
					compare("p99", us, "<=", func(b benchmarked) float64 { return b.p99 })
				}
			}
		}
	}
}

func compareMemcached(t *testing.T, r *report, g *gatewayProcess) {
	mc := startMemcached(t)
	s := newKeySet(100_000)
	const batch = 64
	for _, size := range []int{3, 1024} {
		value := make([]byte, size)
		for _, addr := range []string{g.memcached, mc.addr} {
			c := dialMemcached(t, addr)
			for i := range s.len() {
				if err := c.set(s.key(i), value); err != nil {
					t.Fatal(err)
				}
			}
		}
		for _, conns := range []int{1, 50} {
			var ours, theirs []*memcachedConn
			for range conns {
				ours, theirs = append(ours, dialMemcached(t, g.memcached)), append(theirs, dialMemcached(t, mc.addr))
			}
			// each runs do on every connection and returns how often a second.
			each := func(cs []*memcachedConn, do func(c *memcachedConn, i int) error) float64 {
				return together(len(cs), 400*time.Millisecond, func(g, i int) {
					if err := do(cs[g], i+g*1021); err != nil {
						t.Error(err)
					}
				})
			}
			row := func(what string, times float64, do func(c *memcachedConn, i int) error) {
				a, b, ratio := duel(
					func() float64 { return times * each(ours, do) },
					func() float64 { return times * each(theirs, do) })
				r.add(fmt.Sprintf("gateway %s of %d bytes over memcached's text protocol, %d connections, keys/s", what, size, conns),
					kops(a), kops(b), ratio, ">=", 1)
			}
			row("set", 1, func(c *memcachedConn, i int) error { return c.set(s.at(i), value) })
			row("get", 1, func(c *memcachedConn, i int) error {
				if n, err := c.get(s.at(i)); err != nil || n != 1 {
					return fmt.Errorf("get %q: %d hits, %v", s.at(i), n, err)
				}
				return nil
			})
			row(fmt.Sprintf("get of %d keys,", batch), batch, func(c *memcachedConn, i int) error {
				var keys [batch][]byte
				for k := range keys {
					keys[k] = s.at(i*batch + k)
				}
				if n, err := c.get(keys[:]...); err != nil || n != batch {
					return fmt.Errorf("get of %d keys: %d hits, %v", batch, n, err)
				}
				return nil
			})
		}
	}
}
