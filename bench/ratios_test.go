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
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/testutil"
)

// TestRatios prints the table of docs/performance.md. It reports, and fails only
// if something does not work: a busy machine makes no test fail. Its parts can be run
// one by one, as -run TestRatios/gateway.
func TestRatios(t *testing.T) {
	gated(t, "bench")
	for _, p := range []string{"redis-server", "redis-benchmark", "memcached"} {
		if _, err := exec.LookPath(p); err != nil {
			t.Fatalf("%v: make bench installs it", err)
		}
	}
	r := &report{tb: t}
	began := time.Now()
	st := startStore(t, 8<<30)
	for _, p := range []struct {
		name string
		f    func(*testing.T, *report, *store)
	}{
		{"map", compareSyncMap},
		{"throughput", compareThroughput},
		{"latency", compareLatency},
		{"prefix", comparePrefix},
		{"cpu", compareCPU},
		{"memory", compareMemory},
		{"replicas", compareReplicas},
		{"transactions", compareTransactions},
		{"growing", compareGrowing},
		{"beside", compareBeside},
		{"values", compareValues},
		{"long", compareLong},
		{"gateway", compareGateway},
		{"crowd", compareCrowd},
	} {
		r.part(t, p.name, func(t *testing.T) { p.f(t, r, st) })
	}
	r.print(began)
}

// perSecond runs f for about d, each time n operations, and returns operations a second.
func perSecond(d time.Duration, n int, f func()) float64 {
	did, start := 0, time.Now()
	for {
		for range max(256/n, 1) {
			f()
			did += n
		}
		if e := time.Since(start); e >= d {
			return float64(did) / e.Seconds()
		}
	}
}

func compareSyncMap(t *testing.T, r *report, st *store) {
	getInto := map[int]float64{1_000: 0.6, 100_000: 1.3, 1_000_000: 1.6}
	for _, n := range keyCounts() {
		ns := fmt.Sprintf("map-%d", n)
		st.sized(t, ns, n)
		c := st.open(t, "shm", ns)
		s := newKeySet(n)
		load(t, c, s)
		m := newSyncMap(s)
		runtime.GC()
		ctx, buf := t.Context(), make([]byte, valueLen)
		turn := scaled(60*time.Millisecond, time.Millisecond)
		row := func(what string, want float64, ours, theirs func(i int)) {
			// Both go on where they were, so that neither sees warm caches only.
			i, j := 0, 0
			r.contest(fmt.Sprintf("shm %s, 1 goroutine, %s keys, speed against sync.Map", what, name(n)), each,
				atLeast(want),
				func() float64 { return perSecond(turn, 1, func() { ours(i); i++ }) },
				func() float64 { return perSecond(turn, 1, func() { theirs(j); j++ }) })
		}
		row("Get", 1,
			func(i int) {
				it, err := c.Get(ctx, s.at(i))
				if err != nil {
					t.Fatal(err)
				}
				sink = it.Value
			},
			func(i int) { sink = m.get(s.at(i)) })
		row("GetInto", getInto[n],
			func(i int) {
				if _, err := c.GetInto(ctx, s.at(i), buf); err != nil {
					t.Fatal(err)
				}
			},
			func(i int) { m.getInto(s.at(i), buf) })
	}
}

// together runs f on g goroutines for d and returns how often a second. f is
// given its goroutine's number and a number that grows.
func together(g int, d time.Duration, f func(g, i int)) float64 {
	var total atomic.Int64
	var stop atomic.Bool
	var wg sync.WaitGroup
	start := time.Now()
	for k := range g {
		wg.Go(func() {
			n := 0
			for n == 0 || !stop.Load() {
				for range 8 {
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
	cpu      float64 // nanoseconds of processor time a request, of whoever was asked
}

// redisBenchmark runs redis-benchmark: n requests of test, on 100,000 keys. A test of several words is a command of
// Redis.
func redisBenchmark(tb testing.TB, test string, n int, args ...string) (b benchmarked) {
	tb.Helper()
	args = append([]string{"-n", strconv.Itoa(n), "-r", "100000", "--csv"}, args...)
	if words := strings.Fields(test); len(words) > 1 {
		args = append(args, words...)
	} else {
		args = append(args, "-t", test)
	}
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
	b.rps = min(b.rps, 1000*float64(n)) // its clock has milliseconds: in small it may take none
	return b
}

// batcher performs batches of operations of one goroutine on keys of s.
type batcher struct {
	s    *keySet
	ops  []client.Op
	into [][]byte
	at   int
}

func newBatcher(s *keySet, n, from int) *batcher {
	b := &batcher{s: s, ops: make([]client.Op, n), at: from}
	for range n {
		b.into = append(b.into, make([]byte, valueLen))
	}
	return b
}

// do performs the next batch; values are read into memory of ours, and written from it.
func (b *batcher) do(ctx context.Context, c *client.Client, kind client.OpKind) error {
	for i := range b.ops {
		o := &b.ops[i] // the rest of it is as it was
		o.Kind, o.Key, o.Value, o.Into = kind, b.s.at(b.at), b.into[i], b.into[i]
		b.at++
	}
	c.Do(ctx, b.ops)
	for i := range b.ops {
		if o := &b.ops[i]; o.Err != nil || kind == client.OpGet && len(o.Item.Value) != valueLen {
			return fmt.Errorf("operation on %q: %d bytes, %v", o.Key, len(o.Item.Value), o.Err)
		}
	}
	return nil
}

func compareThroughput(t *testing.T, r *report, st *store) {
	const goroutines, batch = 2, 16
	rd := startRedis(t)
	n := scaled(100_000, 1_000)
	s := newKeySet(n)
	st.roomy(t, "throughput", n, scaled[uint64](512<<20, 64<<20))
	c := st.open(t, "shm", "throughput")
	load(t, c, s)
	rival := func(test string, n int) float64 {
		return redisBenchmark(t, test, n, "-s", rd.sock, "-P", strconv.Itoa(batch), "-d", strconv.Itoa(valueLen)).rps
	}
	rival("set", scaled(500_000, 1_000))
	ctx := t.Context()
	row := func(what, test string, times int, want *target, f func(g, i int) error) {
		r.contest(fmt.Sprintf("shm %s, %d goroutines, %s keys, against redis-benchmark -P %d on a unix socket", what,
			goroutines, name(n), batch), mops, want,
			func() float64 {
				return float64(times) * together(goroutines, scaled(500*time.Millisecond, time.Millisecond),
					func(g, i int) {
						if err := f(g, i); err != nil {
							t.Error(err)
						}
					})
			},
			func() float64 { return rival(test, scaled(300_000, 1_000)) })
	}
	var batchers []*batcher
	var bufs [][]byte
	for g := range goroutines {
		batchers = append(batchers, newBatcher(s, batch, g*len(s.order)/goroutines))
		bufs = append(bufs, make([]byte, valueLen))
	}
	at := func(g, i int) []byte { return s.at(i + g*len(s.order)/goroutines) }
	row("GET, Do of 16 with Into", "get", batch, atLeast(8), func(g, _ int) error {
		return batchers[g].do(ctx, c, client.OpGet)
	})
	row("PUT, Do of 16", "set", batch, atLeast(5), func(g, _ int) error { return batchers[g].do(ctx, c, client.OpPut) })
	row("GetInto", "get", 1, nil, func(g, i int) error {
		_, err := c.GetInto(ctx, at(g, i), bufs[g])
		return err
	})
	row("Put", "set", 1, nil, func(g, i int) error {
		_, err := c.Put(ctx, at(g, i), bufs[g], client.PutOptions{})
		return err
	})
}

// latency is what calls took, in nanoseconds.
type latency struct{ p50, p99, sum float64 }

// latencyOf times n calls one after the other.
func latencyOf(tb testing.TB, n int, f func() error) latency {
	tb.Helper()
	d := make([]time.Duration, n)
	var sum time.Duration
	for i := range d {
		start := time.Now()
		if err := f(); err != nil {
			tb.Fatal(err)
		}
		d[i] = time.Since(start)
		sum += d[i]
	}
	slices.Sort(d)
	return latency{float64(d[n/2]), float64(d[n*99/100]), float64(sum)}
}

func (l latency) median() float64 { return l.p50 }
func (l latency) tail() float64   { return l.p99 }

func compareLatency(t *testing.T, r *report, st *store) {
	rd := startRedis(t)
	rc := rd.open(t, 64)
	n := scaled(100_000, 1_000)
	st.sized(t, "latency", n)
	c := st.open(t, "tcp", "latency")
	s := newKeySet(n)
	load(t, c, s)
	rd.load(t, rc, s)
	ctx := t.Context()

	calls, at := scaled(4000, 20), 0
	next := func() []byte { at++; return s.at(at) }
	d := takeTurns(rounds(),
		func() latency { return latencyOf(t, calls, func() error { _, err := c.Get(ctx, next()); return err }) },
		func() latency {
			return latencyOf(t, calls, func() error { return rc.Get(ctx, string(next())).Err() })
		})
	d.row(r, "tcp Get, p50, against go-redis Get", micros, latency.median, atMost(0.9))
	d.row(r, "tcp Get, p99, against go-redis Get", micros, latency.tail, nil)

	const batch = 64
	keys, names := make([][]byte, batch), make([]string, batch)
	turn := scaled(200*time.Millisecond, time.Millisecond)
	mget := func() float64 {
		return perSecond(turn, batch, func() {
			for i := range names {
				names[i] = string(next())
			}
			if v, err := rc.MGet(ctx, names...).Result(); err != nil || len(v) != batch || v[0] == nil {
				t.Fatal(err)
			}
		})
	}
	r.contest("tcp MultiGet of 64, keys a second, 1 goroutine, against go-redis MGet of 64", mops, atLeast(1.3),
		func() float64 {
			return perSecond(turn, batch, func() {
				for i := range keys {
					keys[i] = next()
				}
				for _, x := range c.MultiGet(ctx, keys) {
					if x.Err != nil {
						t.Fatal(x.Err)
					}
				}
			})
		}, mget)
	b := newBatcher(s, batch, 0)
	r.contest("tcp Do of 64 with Into, keys a second, 1 goroutine, against go-redis MGet of 64", mops, atLeast(2),
		func() float64 {
			return perSecond(turn, batch, func() {
				if err := b.do(ctx, c, client.OpGet); err != nil {
					t.Fatal(err)
				}
			})
		}, mget)
}

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
	return max(after-before-time.Duration(rate*float64(t2.Sub(t1))), 1)
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
	s := newKeySet(scaled(100_000, 1_000))
	ctx := t.Context()
	at := func(g, i int) []byte { return s.at(i + g*1021) }

	st.sized(t, "cpu-shm", s.len())
	c := st.open(t, "shm", "cpu-shm")
	load(t, c, s)
	buf := make([]byte, valueLen)
	look := scaled(time.Second, 200*time.Millisecond)
	rate := func(f func()) float64 { // of the store's processor time, per second
		before, began := cpu(t, st.pid), time.Now()
		f()
		return max(float64(cpu(t, st.pid)-before), 1) / time.Since(began).Seconds()
	}
	i := 0
	r.contest("the store's processor time a second while 1 goroutine GETs over shm, against that of an idle second",
		micros, atMost(2),
		func() float64 {
			return rate(func() {
				perSecond(look, 1, func() {
					if _, err := c.GetInto(ctx, s.at(i), buf); err != nil {
						t.Fatal(err)
					}
					i++
				})
			})
		},
		func() float64 { return rate(func() { time.Sleep(look) }) })

	rd := startRedis(t)
	rc := rd.open(t, 64)
	rd.load(t, rc, s)
	st.sized(t, "cpu-tcp", s.len())
	c = st.open(t, "tcp", "cpu-tcp")
	load(t, c, s)
	for _, x := range []struct {
		g    int
		want float64
	}{{1, 1}, {16, 0.5}, {64, 0.25}} {
		n, idle := scaled(64*400, 64*20), scaled(400*time.Millisecond, 40*time.Millisecond)
		of := func(pid int, f func(g, i int) error) float64 {
			return float64(spent(t, pid, idle, func() {
				spread(x.g, n, func(g, i int) {
					if err := f(g, i); err != nil {
						t.Error(err)
					}
				})
			})) / float64(n)
		}
		r.contest(fmt.Sprintf("the store's processor time a tcp GET, %d at a time, against redis-server's", x.g),
			micros, atMost(x.want),
			func() float64 { return of(st.pid, func(g, i int) error { _, err := c.Get(ctx, at(g, i)); return err }) },
			func() float64 {
				return of(rd.pid, func(g, i int) error { return rc.Get(ctx, string(at(g, i))).Err() })
			})
	}
}

func compareMemory(t *testing.T, r *report, st *store) {
	n := scaled(1_000_000, 10_000)
	s := newKeySet(n)
	// All of the region counts, used or not: index, records, and what the client holds in
	// reserve. In full it was chosen so that the records just fit.
	region := uint64(scaled(141<<20, 16<<20))
	const percent = 9
	index := (region/100*percent/layout.RegionPageSize - 1) * layout.RegionPageSize
	st.namespace(t, &dirpb.CreateNamespaceRequest{Name: "memory", BytesPerNode: region, Replicas: 1,
		IndexPercent: percent,
		Shards:       1, Segments: uint32(index / layout.SegmentSize)})
	c := st.open(t, "shm", "memory")
	load(t, c, s)
	shared := c.Stats()

	mc := startMemcached(t)
	before := resident(t, mc.pid)
	mc.load(t, s)
	grown := resident(t, mc.pid) - before
	stats := mc.stats(t, "stats")
	slabs := mc.stats(t, "stats slabs")
	if stats["curr_items"] != int64(n) || stats["evictions"] != 0 {
		t.Fatalf("memcached holds %d items after %d evictions", stats["curr_items"], stats["evictions"])
	}
	ours, show := float64(region)/float64(n), func(v float64) string { return fmt.Sprintf("%.1f B", v) }
	for _, x := range []struct {
		what   string
		theirs int64
	}{
		{"memcached's slabs and hash table", slabs["total_malloced"] + stats["hash_bytes"]},
		{"the growth of memcached's resident memory", grown},
	} {
		theirs := float64(x.theirs) / float64(n)
		r.add(fmt.Sprintf("registered memory a key, %s keys (the whole region), against %s", name(n), x.what), show,
			ours, theirs, ours/theirs, atMost(1))
	}
	t.Logf("of the region: %d B a key granted to the client, of which %d B live",
		shared.GrantedUnits*layout.UnitSize/uint64(n), shared.LiveUnits*layout.UnitSize/uint64(n))
}

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
	testutil.UntilNone(tb, "redis-server answers", func() error { return c.Ping(tb.Context()).Err() })
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
