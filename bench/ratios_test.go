package bench

import (
	"bytes"
	"context"
	"encoding/csv"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/dirpb"
)

// TestRatios prints the table of docs/performance.md. It reports, and fails only
// if something does not work: a busy machine makes no test fail.
func TestRatios(t *testing.T) {
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
	st := startStore(t, 4<<30)
	part := func(name string, f func(*testing.T, *report, *store)) {
		t.Run(name, func(t *testing.T) { f(t, r, st) })
	}
	part("sync.Map", compareSyncMap)
	part("throughput", compareThroughput)
	part("latency", compareLatency)
	part("cpu", compareCPU)
	part("memory", compareMemory)
	r.print(time.Since(began))
}

// report is the table.
type report struct{ rows []row }

type row struct {
	what        string
	ours, other string
	ratio       float64
	want        string
	ok          bool
}

// add adds a row whose ratio has to be at least or at most want.
func (r *report) add(what, ours, other string, ratio float64, sign string, want float64) {
	ok := ratio >= want
	if sign == "<=" || sign == "<" {
		ok = ratio <= want
	}
	r.rows = append(r.rows, row{what, ours, other, ratio, fmt.Sprintf("%s %.4g", sign, want), ok})
}

func (r *report) print(took time.Duration) {
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	avg, _ := os.ReadFile("/proc/loadavg") // a busy machine is no place to measure: the reader should know
	fmt.Fprintf(w, "\n%s, %d processors, GOMAXPROCS %d, %s, %.0f s in all, load average at the end %.14s\n\n",
		cpuModel(), runtime.NumCPU(), runtime.GOMAXPROCS(0), runtime.Version(), took.Seconds(), avg)
	fmt.Fprintln(w, "what\tkvd\tother\tratio\ttarget\t")
	for _, x := range r.rows {
		verdict := "met"
		if !x.ok {
			verdict = "MISSED"
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%.2f\t%s\t%s\n", x.what, x.ours, x.other, x.ratio, x.want, verdict)
	}
	w.Flush()
}

func cpuModel() string {
	b, _ := os.ReadFile("/proc/cpuinfo")
	for line := range strings.Lines(string(b)) {
		if k, v, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(k) == "model name" {
			return strings.TrimSpace(v)
		}
	}
	return "unknown processor"
}

func median[T int64 | float64 | time.Duration](s []T) T {
	s = slices.Clone(s)
	slices.Sort(s)
	return s[len(s)/2]
}

// rounds is how often rivals take turns. Ratios are medians over the turns, so
// that what else the machine does hits both alike.
const rounds = 7

// perOp runs f for about d and returns nanoseconds an operation.
func perOp(d time.Duration, f func(i int)) float64 {
	n, start := 0, time.Now()
	for {
		for range 256 {
			f(n)
			n++
		}
		if e := time.Since(start); e >= d {
			return float64(e.Nanoseconds()) / float64(n)
		}
	}
}

// duel lets two take turns and returns the medians of both and of ours/theirs.
func duel(ours, theirs func() float64) (a, b, ratio float64) {
	var as, bs, rs []float64
	for range rounds {
		a, b := ours(), theirs()
		as, bs, rs = append(as, a), append(bs, b), append(rs, a/b)
	}
	return median(as), median(bs), median(rs)
}

// sized creates a namespace that n keys fill to about two thirds.
func (s *store) sized(tb testing.TB, name string, n int) {
	tb.Helper()
	s.namespace(tb, &dirpb.CreateNamespaceRequest{Name: name, BytesPerNode: uint64(n)*256 + 24<<20, IndexPercent: 8})
}

// ---- 1. sync.Map ---------------------------------------------------------------

func compareSyncMap(t *testing.T, r *report, st *store) {
	for _, n := range keyCounts {
		ns := "map-" + strings.ToLower(name(n))
		st.sized(t, ns, n)
		c := st.open(t, "shm", ns)
		s := newKeySet(n)
		load(t, c, s)
		m := newSyncMap(s)
		runtime.GC()
		ctx, buf := t.Context(), make([]byte, valueLen)
		const turn = 60 * time.Millisecond
		row := func(what string, ours, theirs func(i int)) {
			// Both go on where they were, so that neither sees warm caches only.
			i, j := 0, 0
			a, b, ratio := duel(
				func() float64 { return perOp(turn, func(int) { ours(i); i++ }) },
				func() float64 { return perOp(turn, func(int) { theirs(j); j++ }) })
			r.add(fmt.Sprintf("shm %s, 1 goroutine, %s keys, against sync.Map", what, name(n)),
				fmt.Sprintf("%.0f ns", a), fmt.Sprintf("%.0f ns", b), 1/ratio, ">=", 1)
		}
		row("Get",
			func(i int) {
				it, err := c.Get(ctx, s.at(i))
				if err != nil {
					t.Fatal(err)
				}
				sink = it.Value
			},
			func(i int) { sink = m.get(s.at(i)) })
		row("GetInto",
			func(i int) {
				if _, err := c.GetInto(ctx, s.at(i), buf); err != nil {
					t.Fatal(err)
				}
			},
			func(i int) { m.getInto(s.at(i), buf) })
	}
}

// ---- 2. throughput ---------------------------------------------------------------

// together runs f on g goroutines for d and returns operations a second. f is
// given its goroutine's number and a number that grows.
func together(g int, d time.Duration, f func(g, i int)) float64 {
	var total atomic.Int64
	var stop atomic.Bool
	var wg sync.WaitGroup
	start := time.Now()
	for k := range g {
		wg.Go(func() {
			n := 0
			for !stop.Load() {
				for range 64 {
					f(k, n)
					n++
				}
			}
			total.Add(int64(n))
		})
	}
	time.Sleep(d)
	stop.Store(true)
	wg.Wait()
	return float64(total.Load()) / time.Since(start).Seconds()
}

// benchmarked is what one redis-benchmark run says.
type benchmarked struct {
	rps      float64
	p50, p99 float64 // nanoseconds
}

// redisBenchmark runs redis-benchmark: n requests of test, on 100,000 keys.
func redisBenchmark(tb testing.TB, test string, n int, args ...string) (b benchmarked) {
	tb.Helper()
	args = append([]string{"-t", test, "-n", strconv.Itoa(n), "-r", "100000", "--csv"}, args...)
	out, err := exec.Command("redis-benchmark", args...).Output()
	if err != nil {
		tb.Fatalf("redis-benchmark: %v\n%s", err, out)
	}
	table, err := csv.NewReader(bytes.NewReader(out)).ReadAll()
	if err != nil || len(table) != 2 || !strings.EqualFold(table[1][0], test) {
		tb.Fatalf("redis-benchmark said %q: %v", out, err)
	}
	for _, x := range []struct {
		name string
		to   *float64
		unit float64
	}{{"rps", &b.rps, 1}, {"p50_latency_ms", &b.p50, 1e6}, {"p99_latency_ms", &b.p99, 1e6}} {
		i := slices.Index(table[0], x.name)
		if i < 0 {
			tb.Fatalf("redis-benchmark said %q, nothing of %s", out, x.name)
		}
		v, err := strconv.ParseFloat(table[1][i], 64)
		if err != nil {
			tb.Fatal(err)
		}
		*x.to = v * x.unit
	}
	return b
}

func us(v float64) string { return fmt.Sprintf("%.1f µs", v/1e3) }

func mops(v float64) string { return fmt.Sprintf("%.2f M/s", v/1e6) }

func compareThroughput(t *testing.T, r *report, st *store) {
	rd := startRedis(t)
	st.sized(t, "throughput", 100_000)
	c := st.open(t, "shm", "throughput", 16)
	s := newKeySet(100_000)
	load(t, c, s)
	rival := func(test string, n int) float64 {
		return redisBenchmark(t, test, n, "-s", rd.sock, "-P", "16", "-d", strconv.Itoa(valueLen)).rps
	}
	rival("set", 500_000)
	g := runtime.GOMAXPROCS(0)
	bufs := make([][]byte, g)
	for i := range bufs {
		bufs[i] = make([]byte, valueLen)
	}
	ctx := t.Context()
	row := func(what string, f func(g, i int)) {
		a, b, ratio := duel(
			func() float64 { return together(g, 500*time.Millisecond, f) },
			func() float64 { return rival(what, 300_000) })
		r.add(fmt.Sprintf("shm %s, %d goroutines, 100k keys, against redis-benchmark -P 16 on a unix socket", strings.ToUpper(what), g),
			mops(a), mops(b), ratio, ">=", 10)
	}
	at := func(g, i int) []byte { return s.at(i + g*len(s.order)/len(bufs)) }
	row("get", func(g, i int) {
		if _, err := c.GetInto(ctx, at(g, i), bufs[g]); err != nil {
			t.Error(err)
		}
	})
	row("set", func(g, i int) {
		if _, err := c.Put(ctx, at(g, i), bufs[g], client.PutOptions{}); err != nil {
			t.Error(err)
		}
	})
}

// ---- 3. latency ---------------------------------------------------------------

func compareLatency(t *testing.T, r *report, st *store) {
	rd := startRedis(t)
	rc := rd.open(t, 64)
	st.sized(t, "latency", 100_000)
	c := st.open(t, "tcp", "latency")
	s := newKeySet(100_000)
	load(t, c, s)
	rd.load(t, rc, s)
	ctx := t.Context()

	const n = 4000
	var at int
	sample := func(get func(key string, raw []byte) error) (p50, p99 float64) {
		d := make([]time.Duration, n)
		for i := range d {
			raw := s.at(at)
			at++
			key := string(raw)
			start := time.Now()
			if err := get(key, raw); err != nil {
				t.Fatal(err)
			}
			d[i] = time.Since(start)
		}
		slices.Sort(d)
		return float64(d[n/2]), float64(d[n*99/100])
	}
	var a50, a99, b50, b99, r50, r99 []float64
	for range rounds {
		x50, x99 := sample(func(_ string, raw []byte) error { _, err := c.Get(ctx, raw); return err })
		y50, y99 := sample(func(key string, _ []byte) error { return rc.Get(ctx, key).Err() })
		a50, a99, b50, b99 = append(a50, x50), append(a99, x99), append(b50, y50), append(b99, y99)
		r50, r99 = append(r50, x50/y50), append(r99, x99/y99)
	}
	r.add("tcp Get, cached word, p50, against go-redis Get", us(median(a50)), us(median(b50)), median(r50), "<=", 1.2)
	r.add("tcp Get, cached word, p99, against go-redis Get", us(median(a99)), us(median(b99)), median(r99), "<=", 1.2)

	const batch = 64
	keys, names := make([][]byte, batch), make([]string, batch)
	pick := func() {
		for i := range keys {
			keys[i] = s.at(at)
			names[i] = string(keys[i])
			at++
		}
	}
	a, b, ratio := duel(
		func() float64 {
			return perOp(200*time.Millisecond, func(int) {
				pick()
				for _, x := range c.MultiGet(ctx, keys) {
					if x.Err != nil {
						t.Fatal(x.Err)
					}
				}
			})
		},
		func() float64 {
			return perOp(200*time.Millisecond, func(int) {
				pick()
				if v, err := rc.MGet(ctx, names...).Result(); err != nil || len(v) != batch || v[0] == nil {
					t.Fatal(err)
				}
			})
		})
	r.add("tcp MultiGet of 64, keys a second, 1 goroutine, against go-redis MGet of 64",
		mops(batch*1e9/a), mops(batch*1e9/b), 1/ratio, ">=", 2)
}

// ---- 4. processor time of the other side ---------------------------------------

// spent is the processor time a process uses while f runs, beyond what it uses
// when nobody asks anything of it: idle is how long that is looked at, half before
// and half behind.
func spent(tb testing.TB, pid int, idle time.Duration, f func()) time.Duration {
	tb.Helper()
	began, t0 := cpu(tb, pid), time.Now()
	time.Sleep(idle / 2)
	before, t1 := cpu(tb, pid), time.Now()
	f()
	after, t2 := cpu(tb, pid), time.Now()
	time.Sleep(idle / 2)
	ended, t3 := cpu(tb, pid), time.Now()
	rate := float64(before-began+ended-after) / float64(t1.Sub(t0)+t3.Sub(t2))
	return after - before - time.Duration(rate*float64(t2.Sub(t1)))
}

// spread runs f n times on g goroutines.
func spread(g, n int, f func(g, i int)) {
	var wg sync.WaitGroup
	for k := range g {
		wg.Go(func() {
			for i := range n / g {
				f(k, i)
			}
		})
	}
	wg.Wait()
}

func compareCPU(t *testing.T, r *report, st *store) {
	s := newKeySet(100_000)
	ctx := t.Context()
	at := func(g, i int) []byte { return s.at(i + g*1021) }

	st.sized(t, "cpu-shm", s.len())
	c := st.open(t, "shm", "cpu-shm")
	load(t, c, s)
	buf := make([]byte, valueLen)
	const million = 1_000_000
	d := spent(t, st.mem.pid, 4*time.Second, func() {
		for i := range million {
			if _, err := c.GetInto(ctx, s.at(i), buf); err != nil {
				t.Fatal(err)
			}
		}
	})
	r.add("memory node's processor time per shm GET, over 1M, less its idle rate", fmt.Sprintf("%.2f ns", float64(d)/million), "0 ns",
		float64(d)/million, "<=", 5) // 0, give or take the heartbeats of a busy machine

	rd := startRedis(t)
	rc := rd.open(t, 64)
	rd.load(t, rc, s)
	st.sized(t, "cpu-tcp", s.len())
	c = st.open(t, "tcp", "cpu-tcp")
	load(t, c, s)
	for _, g := range []int{1, 64} {
		const n, idle = 64 * 600, 400 * time.Millisecond
		a, b, ratio := duel(
			func() float64 {
				return float64(spent(t, st.mem.pid, idle, func() {
					spread(g, n, func(g, i int) {
						if _, err := c.Get(ctx, at(g, i)); err != nil {
							t.Error(err)
						}
					})
				})) / n
			},
			func() float64 {
				return float64(spent(t, rd.pid, idle, func() {
					spread(g, n, func(g, i int) {
						if err := rc.Get(ctx, string(at(g, i))).Err(); err != nil {
							t.Error(err)
						}
					})
				})) / n
			})
		r.add(fmt.Sprintf("memory node's processor time per tcp GET, %d goroutines, against redis-server's", g),
			fmt.Sprintf("%.1f µs", a/1e3), fmt.Sprintf("%.1f µs", b/1e3), ratio, "<=", 0.5)
	}
}

// ---- 5. memory -----------------------------------------------------------------

func compareMemory(t *testing.T, r *report, st *store) {
	const n = 1_000_000
	s := newKeySet(n)
	// What the whole region takes, used or not: index, records, and what the
	// client holds in reserve.
	const region = 141 << 20
	st.namespace(t, &dirpb.CreateNamespaceRequest{Name: "memory", BytesPerNode: region, IndexPercent: 9})
	c := st.open(t, "shm", "memory")
	before := resident(t, st.mem.pid)
	load(t, c, s)
	shared := c.Stats()
	grown := resident(t, st.mem.pid) - before

	mc := startMemcached(t)
	mcBefore := resident(t, mc.pid)
	mc.load(t, s)
	mcGrown := resident(t, mc.pid) - mcBefore
	stats := mc.stats(t, "stats")
	slabs := mc.stats(t, "stats slabs")
	if stats["curr_items"] != n || stats["evictions"] != 0 {
		t.Fatalf("memcached holds %d items after %d evictions", stats["curr_items"], stats["evictions"])
	}
	theirs := slabs["total_malloced"] + stats["hash_bytes"]
	per := func(v int64) string { return fmt.Sprintf("%.1f B", float64(v)/n) }
	r.add("registered memory a key, 1M keys (the whole region), against memcached's slabs and hash table",
		per(region), per(theirs), float64(region)/float64(theirs), "<", 1)
	r.add("the same against the growth of memcached's resident memory", per(region), per(mcGrown),
		float64(region)/float64(mcGrown), "<", 1)
	t.Logf("of the region: %d B a key granted to the client, of which %d B live; memory node's resident memory grew by %d B a key (pages the client alone touched do not count)",
		int64(shared.GrantedUnits)*64/n, int64(shared.LiveUnits)*64/n, grown/n)
}

// ---- rivals ----------------------------------------------------------------------

type redisServer struct {
	*process
	sock, addr string
}

func startRedis(tb testing.TB) *redisServer {
	tb.Helper()
	dir, err := os.MkdirTemp("", "kvd-redis-")
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { os.RemoveAll(dir) })
	r := &redisServer{sock: dir + "/s", addr: freeAddr(tb)}
	_, port, _ := strings.Cut(r.addr, ":")
	r.process = start(tb, exec.Command("redis-server", "--port", port, "--bind", "127.0.0.1", "--unixsocket", r.sock,
		"--save", "", "--appendonly", "no", "--daemonize", "no", "--dir", dir, "--loglevel", "warning"))
	c := r.open(tb, 1)
	until(tb, func() error { return c.Ping(tb.Context()).Err() })
	return r
}

// open connects go-redis over TCP, as tcp clients of the store are.
func (r *redisServer) open(tb testing.TB, pool int) *redis.Client {
	c := redis.NewClient(&redis.Options{Addr: r.addr, PoolSize: pool})
	tb.Cleanup(func() { c.Close() })
	return c
}

func (r *redisServer) load(tb testing.TB, c *redis.Client, s *keySet) {
	tb.Helper()
	for lo := 0; lo < s.len(); lo += 1000 {
		p := c.Pipeline()
		for i := lo; i < min(lo+1000, s.len()); i++ {
			p.Set(context.Background(), string(s.key(i)), value(i), 0)
		}
		if _, err := p.Exec(tb.Context()); err != nil {
			tb.Fatal(err)
		}
	}
}
