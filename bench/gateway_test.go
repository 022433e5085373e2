package bench

import (
	"fmt"
	"net"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
)

// compareGateway compares a gateway over shm with redis-server and memcached, each asked by the
// same program over loopback TCP, in turns.
func compareGateway(t *testing.T, r *report, st *store) {
	st.namespace(t, &dirpb.CreateNamespaceRequest{Name: "cache", Mode: dirpb.NamespaceMode_NAMESPACE_CACHE, Replicas: 1,
		BytesPerNode: 1 << 30})
	g := startGateway(t, st.directory, "cache")
	r.part(t, "redis", func(t *testing.T) { compareRedis(t, r, g) })
	r.part(t, "memcached", func(t *testing.T) { compareMemcached(t, r, g) })
}

// gatewayProcess is a `kvd gateway`.
type gatewayProcess struct {
	*process
	redis, memcached, http string // host:port
}

// anyPort lets a process choose.
const anyPort = "127.0.0.1:0"

// startGateway starts a gateway of a namespace.
func startGateway(tb testing.TB, directory, namespace string) *gatewayProcess {
	tb.Helper()
	p, at := startKvd(tb, "gateway", "--directory", directory, "--databases", namespace, "--provider", "shm",
		"--listen", anyPort, "--listen-memcached", anyPort, "--http-listen", anyPort, "--log-level", "warn")
	g := &gatewayProcess{p, at["redis"], at["memcached"], at["http"]}
	if g.redis == "" || g.memcached == "" {
		tb.Fatalf("kvd gateway is ready with %q", at)
	}
	return g
}

func compareRedis(t *testing.T, r *report, g *gatewayProcess) {
	rd := startRedis(t)
	at := func(addr string, pid int, test string, size, n, depth, clients int) benchmarked {
		host, port, err := net.SplitHostPort(addr)
		if err != nil {
			t.Fatal(err)
		}
		before := cpu(t, pid)
		b := redisBenchmark(t, test, n, "-h", host, "-p", port, "-d", strconv.Itoa(size), "-P", strconv.Itoa(depth),
			"-c", strconv.Itoa(clients))
		b.cpu = float64(cpu(t, pid)-before) / float64(n)
		return b
	}
	compareHashes(r, func(test string, n, depth, clients int) benchmarked {
		return at(g.redis, g.pid, test, 3, n, depth, clients)
	},
		func(test string, n, depth, clients int) benchmarked {
			return at(rd.addr, rd.pid, test, 3, n, depth, clients)
		})
	for _, size := range []int{3, 1024} {
		ours := func(test string, n, depth, clients int) benchmarked {
			return at(g.redis, g.pid, test, size, n, depth, clients)
		}
		theirs := func(test string, n, depth, clients int) benchmarked {
			return at(rd.addr, rd.pid, test, size, n, depth, clients)
		}
		fill := scaled(500_000, 2_000) // nearly all keys are there then
		ours("set", fill, 64, 50)
		theirs("set", fill, 64, 50)
		for _, x := range []struct{ depth, clients, n int }{
			{1, 1, scaled(10_000, 200)}, {1, 50, scaled(30_000, 500)}, {16, 50, scaled(150_000, 1_000)},
			{64, 50, scaled(300_000, 4_000)},
		} {
			for _, test := range []string{"set", "get"} {
				d := takeTurns(rounds(),
					func() benchmarked { return ours(test, x.n, x.depth, x.clients) },
					func() benchmarked { return theirs(test, x.n, x.depth, x.clients) })
				what := fmt.Sprintf("gateway %s of %d bytes, redis-benchmark -P %d -c %d, ", strings.ToUpper(test),
					size, x.depth, x.clients)
				d.row(r, what+"requests/s", kops, func(b benchmarked) float64 { return b.rps }, atLeast(1))
				d.row(r, what+"p50", micros, func(b benchmarked) float64 { return b.p50 }, nil)
				d.row(r, what+"p99", micros, func(b benchmarked) float64 { return b.p99 }, atMost(1.1))
				d.row(r, what+"processor time a request", micros, func(b benchmarked) float64 {
					return b.cpu
				}, atMost(1))
			}
		}
	}
}

// compareHashes compares commands on hashes of 10 fields.
func compareHashes(r *report, ours, theirs func(test string, n, depth, clients int) benchmarked) {
	fill := "hset hash:__rand_int__"
	for i := range 10 {
		fill += fmt.Sprintf(" field%d 100%d", i, i)
	}
	ours(fill, scaled(500_000, 2_000), 16, 50) // nearly all keys are there then
	theirs(fill, scaled(500_000, 2_000), 16, 50)
	for _, x := range []struct{ depth, n int }{{1, scaled(30_000, 500)}, {16, scaled(150_000, 1_000)}} {
		for _, test := range []string{"hset hash:__rand_int__ field7 12345", "hget hash:__rand_int__ field7",
			"hincrby hash:__rand_int__ field8 1"} {
			d := takeTurns(rounds(),
				func() benchmarked { return ours(test, x.n, x.depth, 50) },
				func() benchmarked { return theirs(test, x.n, x.depth, 50) })
			name, _, _ := strings.Cut(test, " ")
			what := fmt.Sprintf("gateway %s of 10 fields, redis-benchmark -P %d -c 50, ", strings.ToUpper(name),
				x.depth)
			d.row(r, what+"requests/s", kops, func(b benchmarked) float64 { return b.rps }, atLeast(0.7))
			d.row(r, what+"processor time a request", micros, func(b benchmarked) float64 { return b.cpu }, nil)
		}
	}
}

// asked is what some connections achieved.
type asked struct{ rps, cpu float64 } // keys a second; nanoseconds of processor time a key

func compareMemcached(t *testing.T, r *report, g *gatewayProcess) {
	mc := startMemcached(t)
	s := newKeySet(scaled(100_000, 1_000))
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
			// on runs do, which is about some keys, on every connection.
			on := func(cs []*memcachedConn, pid, keys int, do func(c *memcachedConn, i int) error) asked {
				before, began := cpu(t, pid), time.Now()
				rps := float64(keys) * together(len(cs), scaled(400*time.Millisecond, time.Millisecond),
					func(g, i int) {
						if err := do(cs[g], i+g*1021); err != nil {
							t.Error(err)
						}
					})
				return asked{rps, float64(cpu(t, pid)-before) / (rps * time.Since(began).Seconds())}
			}
			row := func(what string, keys int, do func(c *memcachedConn, i int) error) {
				d := takeTurns(rounds(),
					func() asked { return on(ours, g.pid, keys, do) },
					func() asked { return on(theirs, mc.pid, keys, do) })
				what = fmt.Sprintf("gateway %s of %d bytes over memcached's text protocol -c %d, ", what, size, conns)
				d.row(r, what+"keys/s", kops, func(a asked) float64 { return a.rps }, atLeast(1))
				d.row(r, what+"processor time a key", micros, func(a asked) float64 { return a.cpu }, nil)
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
