package bench

import (
	"bytes"
	"fmt"
	"os"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
	"github.com/redis/go-redis/v9"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/ycsb"
)

// compareReplicas compares Put with two copies and with one.
func compareReplicas(t *testing.T, r *report, _ *store) {
	st := startStore(t, 2<<30, 2)
	s := newKeySet(scaled(100_000, 1_000))
	for copies := range uint32(3) {
		if copies > 0 {
			st.namespace(t, &dirpb.CreateNamespaceRequest{Name: fmt.Sprint("r", copies), Replicas: copies,
				BytesPerNode: uint64(copies) * 128 << 20,
				Shards:       2, Segments: uint32(s.len()*3/4/shardSlots + 1), IndexPercent: 5})
		}
	}
	for _, x := range []struct {
		provider string
		want     float64
	}{{"shm", 1.6}, {"tcp", 2.1}} {
		v, at := make([]byte, valueLen), 0
		put := func(c *client.Client) func() latency {
			load(t, c, s)
			return func() latency {
				return latencyOf(t, scaled(4000, 20), func() error {
					at++
					_, err := c.Put(t.Context(), s.at(at), v, client.PutOptions{})
					return err
				})
			}
		}
		d := takeTurns(rounds(), put(st.open(t, x.provider, "r2")), put(st.open(t, x.provider, "r1")))
		d.row(r, x.provider+" Put, 2 copies, p50, against 1 copy", micros, latency.median, atMost(x.want))
		d.row(r, x.provider+" Put, 2 copies, p99, against 1 copy", micros, latency.tail, nil)
	}
}

// compareGrowing compares inserts into a namespace that begins with one segment, and splits
// its shards all the time, with inserts into one that has room.
func compareGrowing(t *testing.T, r *report, st *store) {
	s := newKeySet(scaled(30_000, 1_500))
	v, made := make([]byte, valueLen), 0
	insert := func(segments int) func() float64 {
		return func() float64 {
			made++
			ns := fmt.Sprint("growing-", made)
			st.namespace(t, &dirpb.CreateNamespaceRequest{Name: ns, Replicas: 1, BytesPerNode: 64 << 20, Shards: 1,
				Segments: uint32(segments), IndexPercent: 5})
			c := st.open(t, "shm", ns)
			began := time.Now()
			for i := range s.len() {
				if _, err := c.PutIfAbsent(t.Context(), s.key(i), v, client.PutOptions{}); err != nil {
					t.Fatal(err)
				}
			}
			return float64(time.Since(began))
		}
	}
	d := takeTurns(scaled(3, 1), insert(1), insert(s.len()*3/2/shardSlots+1))
	d.row(r, fmt.Sprintf("shm, %d inserts growing from one segment, time against inserts with room", s.len()), millis,
		func(v float64) float64 { return v }, atMost(2))
}

func compareValues(t *testing.T, r *report, st *store) {
	rd := startRedis(t)
	ctx, key := t.Context(), []byte("large")
	most := scaled(client.DefaultMaxValueLen, 1<<20)
	src, dst := make([]byte, most), make([]byte, most)
	for i := range src {
		src[i] = byte(i * 7)
	}
	turn := scaled(100*time.Millisecond, time.Millisecond)
	for _, provider := range []string{"shm", "tcp"} {
		// Each client has a namespace of its own: one that came to memory that another holds would find too little at
		// first, and what goes on then is no part of a PUT.
		st.namespace(t, &dirpb.CreateNamespaceRequest{Name: provider, Replicas: 1, BytesPerNode: 2 << 30, Shards: 1,
			Segments: 1, IndexPercent: 1})
		c := st.open(t, provider, provider)
		o := &redis.Options{Addr: rd.addr, PoolSize: 1}
		if provider == "shm" {
			o.Network, o.Addr = "unix", rd.sock
		}
		rc := redis.NewClient(o)
		t.Cleanup(func() { rc.Close() })
		// The kernel gives and maps a page when a process first touches it: what is measured is a
		// store all of whose pages have been.
		for range scaled(2560, 1) {
			if _, err := c.Put(ctx, key, src[:1<<20], client.PutOptions{}); err != nil {
				t.Fatal(err)
			}
		}
		for size := 1 << 20; size <= most; size *= 4 {
			v := src[:size]
			bytesPerSecond := func(f func() error) func() float64 {
				return func() float64 {
					return perSecond(turn, size, func() {
						if err := f(); err != nil {
							t.Fatal(err)
						}
					})
				}
			}
			memcpy := bytesPerSecond(func() error { copy(dst, v); return nil })
			row := func(what string, want *target, ours, theirs func() error) {
				what = fmt.Sprintf("%s %s of %d MiB, bytes/s, against ", provider, what, size>>20)
				r.contest(what+"Redis", gigs, nil, bytesPerSecond(ours), bytesPerSecond(theirs))
				r.contest(what+"memcpy", gigs, want, bytesPerSecond(ours), memcpy)
			}
			var ofCopy *target
			if provider == "shm" && size <= 16<<20 {
				ofCopy = atLeast(0.4)
			}
			row("PUT", ofCopy,
				func() error { _, err := c.Put(ctx, key, v, client.PutOptions{}); return err },
				func() error { return rc.Set(ctx, string(key), v, 0).Err() })
			row("GET", nil,
				func() error {
					n, err := c.GetInto(ctx, key, dst)
					if err == nil && n != size {
						err = fmt.Errorf("%d bytes, want %d", n, size)
					}
					return err
				},
				func() error {
					b, err := rc.Get(ctx, string(key)).Bytes()
					if err == nil && len(b) != size {
						err = fmt.Errorf("%d bytes, want %d", len(b), size)
					}
					return err
				})
			if provider == "shm" {
				what := fmt.Sprintf("shm View of a checked version of %d MiB, bytes/s, against GetInto", size>>20)
				r.contest(what, gigs, nil,
					bytesPerSecond(func() error { return viewed(ctx, c, key, client.ViewOptions{}) }),
					bytesPerSecond(func() error { _, err := c.GetInto(ctx, key, dst); return err }))
			}
			if it, err := c.Get(ctx, key); err != nil || !bytes.Equal(it.Value, v) {
				t.Fatalf("%s: a value of %d MiB came back otherwise: %v", provider, size>>20, err)
			}
		}
	}

	// processor is nanoseconds a call.
	type processor struct {
		latency
		server, client float64
	}
	st.namespace(t, &dirpb.CreateNamespaceRequest{Name: "quarters", Replicas: 1, BytesPerNode: 1 << 30, Shards: 1,
		Segments: 1, IndexPercent: 1})
	c, rc := st.open(t, "tcp", "quarters"), rd.open(t, 1)
	v, calls := src[:256<<10], scaled(200, 20)
	for range scaled(8192, 1) { // all of its pages
		if _, err := c.Put(ctx, key, v, client.PutOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	measure := func(pid int, f func() error) func() processor {
		return func() (p processor) {
			self, other := cpu(t, os.Getpid()), cpu(t, pid)
			p.latency = latencyOf(t, calls, f)
			p.client, p.server = float64(cpu(t, os.Getpid())-self)/float64(calls),
				float64(cpu(t, pid)-other)/float64(calls)
			return p
		}
	}
	d := takeTurns(rounds(),
		measure(st.pid, func() error { _, err := c.Put(ctx, key, v, client.PutOptions{}); return err }),
		measure(rd.pid, func() error { return rc.Set(ctx, string(key), v, 0).Err() }))
	const what = "tcp PUT of 256 KiB, "
	d.row(r, what+"p50, against go-redis SET", micros, func(p processor) float64 { return p.p50 }, atMost(1.2))
	d.row(r, what+"the store's processor time, against redis-server's", micros, func(p processor) float64 {
		return p.server
	}, atMost(1.2))
	d.row(r, what+"the client's processor time, against go-redis's", micros, func(p processor) float64 {
		return p.client
	}, nil)
}

// TestRecords prints how GETs over shm change as a namespace gets larger: YCSB's workload C,
// values of 100 bytes, by two goroutines. It fails only if something does not work.
func TestRecords(t *testing.T) {
	gated(t, "bench-records")
	r := &report{tb: t}
	began := time.Now()
	var rows []records
	for _, n := range scaled([]int{100_000, 1_000_000, 5_000_000, 15_000_000}, []int{1_000, 5_000}) {
		r.part(t, fmt.Sprint(n), func(t *testing.T) {
			x := measureRecords(t, n)
			rows = append(rows, x)
			base := rows[min(len(rows), 2)-1] // of a million
			what := fmt.Sprintf("%d records, ", n)
			r.add(what+"loaded a second, against the rate of a million", kops, x.load, base.load, x.load/base.load, nil)
			r.add(what+"GETs a second, against the rate of a million", mops, x.get, base.get, x.get/base.get,
				atLeast(0.8))
			r.add(what+"GET p99, against p50", micros, x.p99, x.p50, x.p99/x.p50, atMost(20))
			r.add(what+"round trips a GET, against one", func(v float64) string {
				return fmt.Sprintf("%.2f", v)
			}, x.trips, 1, x.trips, nil)
		})
	}
	r.print(began)
}

// records is what measureRecords found: figures a second, nanoseconds, and round trips.
type records struct{ load, get, p50, p99, trips float64 }

const recordLen, recordReaders = 100, 2

func measureRecords(t *testing.T, n int) (x records) {
	st := startStore(t, 16<<30)
	// It begins with an eighth of its index, as namespaces do, and splits its shards while it is loaded.
	slots := uint64(n) * 3 / shardSlots * layout.SegmentSize
	region := uint64(n)*192*3/2 + slots + 64<<20
	st.namespace(t, &dirpb.CreateNamespaceRequest{Name: "records", Replicas: 1, BytesPerNode: region,
		IndexPercent: uint32(slots*100/region + 1)})
	// Large shards of one placement group split one after the other, and a write into the last of them waits for
	// all: longer than the 10 s of an operation, in the largest namespace.
	c := st.openWith(t, "shm", client.Options{Namespace: "records", OpTimeout: 5 * time.Minute})
	began := time.Now()
	loadRecords(t, c, n)
	x.load = float64(n) / time.Since(began).Seconds()
	runtime.GC()
	turn := scaled(5*time.Second, 10*time.Millisecond)
	readAll(t, c, n) // so that it knows where they are: shards that split moved half of what it remembered
	before := c.Stats()
	all, took := getRecords(t, c, n, turn)
	after := c.Stats()
	var trips uint64
	for k, v := range after.Rounds {
		trips += v - before.Rounds[k]
	}
	x.get, x.trips = float64(all.TotalCount())/took.Seconds(), float64(trips)/float64(all.TotalCount())
	x.p50, x.p99 = float64(all.ValueAtQuantile(50)), float64(all.ValueAtQuantile(99))
	return x
}

// loadRecords puts n records.
func loadRecords(t *testing.T, c *client.Client, n int) {
	t.Helper()
	const batch = 256
	v, block := make([]byte, recordLen), (n+recordReaders-1)/recordReaders
	var wg sync.WaitGroup
	for g := range recordReaders {
		wg.Go(func() {
			pairs := make([]client.KV, 0, batch)
			for lo, end := g*block, min((g+1)*block, n); lo < end; lo += batch {
				pairs = pairs[:0]
				for i := lo; i < min(lo+batch, end); i++ {
					pairs = append(pairs, client.KV{Key: ycsb.Key(nil, uint64(i)), Value: v})
				}
				for _, p := range c.MultiPut(t.Context(), pairs) {
					if p.Err != nil {
						t.Error(p.Err)
						return
					}
				}
			}
		})
	}
	if wg.Wait(); t.Failed() {
		t.FailNow()
	}
}

// readAll reads each of n records.
func readAll(t *testing.T, c *client.Client, n int) {
	t.Helper()
	const batch = 64
	var wg sync.WaitGroup
	for g := range recordReaders {
		wg.Go(func() {
			ops, keys, into := make([]client.Op, batch), make([][]byte, batch), make([]byte, batch*recordLen)
			for lo := g * batch; lo < n; lo += recordReaders * batch {
				m := min(batch, n-lo)
				for i := range m {
					keys[i] = ycsb.Key(keys[i][:0], uint64(lo+i))
					ops[i] = client.Op{Kind: client.OpGet, Key: keys[i], Into: into[i*recordLen:][:recordLen:recordLen]}
				}
				c.Do(t.Context(), ops[:m])
				for i := range m {
					if err := ops[i].Err; err != nil {
						t.Error(err)
						return
					}
				}
			}
		})
	}
	if wg.Wait(); t.Failed() {
		t.FailNow()
	}
}

// getRecords reads for about d, as YCSB's workload C does among n records.
func getRecords(t *testing.T, c *client.Client, n int, d time.Duration) (all *hdrhistogram.Histogram,
	took time.Duration) {
	t.Helper()
	w, err := ycsb.ByName("C")
	if err != nil {
		t.Fatal(err)
	}
	hists := make([]*hdrhistogram.Histogram, recordReaders)
	var wg sync.WaitGroup
	began := time.Now()
	for g := range hists {
		gen, err := ycsb.New(ycsb.Options{Workload: w, Keyspace: ycsb.NewKeyspace(uint64(n)), Seed: 1,
			Stream: uint64(g)})
		if err != nil {
			t.Fatal(err)
		}
		hists[g] = newNanos()
		wg.Go(func() {
			key, dst := []byte(nil), make([]byte, recordLen)
			for first := true; first || time.Since(began) < d; first = false {
				// the other's generator may have taken all of d
				for range 64 {
					key = ycsb.Key(key[:0], gen.Next().Record)
					start := time.Now()
					if _, err := c.GetInto(t.Context(), key, dst); err != nil {
						t.Error(err)
						return
					}
					_ = hists[g].RecordValue(nanos(time.Since(start)))
				}
			}
		})
	}
	wg.Wait()
	took, all = time.Since(began), newNanos()
	if t.Failed() {
		t.FailNow()
	}
	for _, h := range hists {
		all.Merge(h)
	}
	return all, took
}
