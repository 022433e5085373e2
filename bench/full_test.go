package bench

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/dirclient"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/ycsb"
)

var (
	fullKeys  = scaled[uint64](200_000, 25_000) // at a time
	fullBytes = scaled[uint64](64<<20, 8<<20)
)

const (
	// fullCacheBytes is each client's word cache, which keys that never were fill by and by.
	fullCacheBytes = 4 << 20
	// renewEvery: after so many operations a key takes the place of another, for good.
	renewEvery = 50
	// intervals of a run, each a line of the table. In the first ones caches of clients and Go's heap fill.
	fullIntervals, warmIntervals = 10, 3
	// Memory may grow by this share and so many bytes after that; Go's heap breathes.
	fullGrowth, fullBreath = 0.05, 16 << 20
)

// TestFullCache keeps a cache full for KVD_FULL (default 20s): YCSB's workload B by two
// clients, each of four goroutines, over three times as many keys as fit, some of which are
// always new. A key that is not found is put. It fails if any operation does, if a value is another's,
// if memory grows, if one client starves, or if throughput falls below a quarter. It prints
// what the cache did in each tenth of the time.
func TestFullCache(t *testing.T) {
	took := scaled(20*time.Second, time.Second)
	if v := os.Getenv("KVD_FULL"); v != "" {
		var err error
		if took, err = time.ParseDuration(v); err != nil || took < time.Second {
			t.Fatalf("KVD_FULL is %q, want a duration of at least 1s: %v", v, err)
		}
	} else {
		gated(t, "bench-full")
	}
	for _, provider := range []string{"shm", "tcp"} {
		t.Run(provider, func(t *testing.T) { fullCache(t, provider, took) })
	}
}

func fullCache(t *testing.T, provider string, took time.Duration) {
	began := time.Now()
	st := startStore(t, int64(2*fullBytes))
	st.namespace(t, &dirpb.CreateNamespaceRequest{Name: "full", Mode: dirpb.NamespaceMode_NAMESPACE_CACHE, Replicas: 1,
		BytesPerNode: fullBytes * 3 / 2, LimitBytes: fullBytes, Shards: 1, Segments: uint32(fullKeys / 2 / shardSlots)})
	dir, err := dirclient.Open(dirclient.Options{Addrs: []string{st.directory}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { dir.Close() })

	f := &full{end: make(chan struct{})}
	for i := range 2 {
		f.clients = append(f.clients,
			st.openWith(t, provider, client.Options{Namespace: "full", CacheBytes: fullCacheBytes}))
		for range 4 {
			f.crew = append(f.crew, f.worker(t, f.clients[i], uint64(len(f.crew))))
		}
	}
	f.fill(t)
	var wg sync.WaitGroup
	for _, w := range f.crew {
		wg.Go(func() { w.run(t.Context()) })
	}
	lines := make([]fullLine, 0, fullIntervals)
	tick := time.NewTicker(took / fullIntervals)
	defer tick.Stop()
	for range fullIntervals {
		at := time.Now()
		<-tick.C
		l := f.line(time.Since(at))
		l.mine, l.node = resident(t, os.Getpid()), resident(t, st.pid)
		if l.granted, err = granted(t.Context(), dir); err != nil {
			t.Fatal(err)
		}
		lines = append(lines, l)
	}
	close(f.end)
	wg.Wait()

	for _, err := range f.failures {
		t.Error(err)
	}
	if f.failed > 0 {
		t.Errorf("%d operations failed", f.failed)
	}
	fmt.Printf("\n%s, %d MiB, %d keys of 200 to 1800 bytes, workload B, %d new keys per 1000 operations; %s\n\n",
		provider, fullBytes>>20,
		fullKeys, 1000/renewEvery, machine(began))
	printFull(lines)
	var evicted uint64
	done := make([]uint64, len(f.clients)) // operations, by client
	for i, w := range f.crew {
		done[i*len(done)/len(f.crew)] += w.done
	}
	fmt.Printf("\n%d renewed keys, %d failed operations\n", f.renewed.Load()/renewEvery, f.failed)
	for i, c := range f.clients {
		s := c.Stats()
		evicted += s.Evicted
		if s.RefusedPlaces != 0 {
			t.Errorf("client %d was refused %d places that it gave back", i+1, s.RefusedPlaces)
		}
		fmt.Printf("client %d: %d operations, %d evicted, %d unknown outcomes, %.1f MiB granted, %.1f live\n", i+1,
			done[i], s.Evicted, s.Unknown,
			float64(s.GrantedUnits*layout.UnitSize)/(1<<20), float64(s.LiveUnits*layout.UnitSize)/(1<<20))
	}
	if evicted == 0 {
		t.Error("nothing was evicted: the cache was never full")
	}
	if smoke() {
		return // the rest is about what a while of it shows
	}
	if least, most := slices.Min(done), slices.Max(done); least < most/10 {
		t.Errorf("one client performed %d operations, another %d: it starves", least, most)
	}
	if first, last := throughput(lines[:3]), throughput(lines[len(lines)-3:]); last < first/4 {
		t.Errorf("%.0f operations/s in the first intervals, %.0f in the last", first, last)
	}
	warm := lines[warmIntervals:]
	for _, m := range []struct {
		what string
		of   func(fullLine) int64
		most float64 // growth, bytes
	}{
		{"granted memory", func(l fullLine) int64 { return l.granted }, 0},
		{"the clients' resident memory", func(l fullLine) int64 { return l.mine }, fullBreath},
		{"the memory node's resident memory", func(l fullLine) int64 { return l.node }, fullBreath},
	} {
		mean, grown := trend(warm, m.of)
		fmt.Printf("%s, after %d intervals: %.1f MiB on average, %+.2f MiB from then to the end by the line of best "+
			"fit\n", m.what, warmIntervals,
			mean/(1<<20), grown/(1<<20))
		if grown > fullGrowth*mean+m.most {
			t.Errorf("%s grew by %.0f bytes of %.0f", m.what, grown, mean)
		}
	}
	for _, l := range lines {
		if l.granted > int64(fullBytes) {
			t.Errorf("%d bytes granted, the namespace's limit is %d", l.granted, fullBytes)
		}
	}
}

// granted is how much memory sessions hold, in all namespaces.
func granted(ctx context.Context, dir *dirclient.Client) (bytes int64, err error) {
	err = dir.Call(ctx, func(ctx context.Context, c dirpb.DirectoryClient) error {
		st, err := c.Status(ctx, &dirpb.StatusRequest{})
		bytes = 0
		for _, u := range st.GetUsage() {
			bytes += int64(u.GetGrantedUnits()) * layout.UnitSize
		}
		return err
	})
	return bytes, err
}

// trend fits a line: its mean, and how much it grows from the first to the last.
func trend(lines []fullLine, of func(fullLine) int64) (mean, grown float64) {
	n := float64(len(lines))
	for _, l := range lines {
		mean += float64(of(l)) / n
	}
	mid := (n - 1) / 2
	var xy, xx float64
	for i, l := range lines {
		x := float64(i) - mid
		xy += x * (float64(of(l)) - mean)
		xx += x * x
	}
	return mean, xy / xx * (n - 1)
}

// full is a run.
type full struct {
	clients []*client.Client
	crew    []*fullWorker
	renewed atomic.Uint64 // operations so far, of which each renewEvery-th renews a key
	end     chan struct{}

	mu       sync.Mutex
	failures []error // the first few
	failed   int
}

func (f *full) fail(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.failed++; f.failed <= 5 {
		f.failures = append(f.failures, err)
	}
}

// fill puts records until the cache evicts.
func (f *full) fill(tb testing.TB) {
	tb.Helper()
	const batch = 64
	for i, lo := 0, uint64(0); lo < fullKeys; i, lo = i+1, lo+batch {
		c := f.clients[i%len(f.clients)]
		var pairs []client.KV
		for r := lo; r < min(lo+batch, fullKeys); r++ {
			v := make([]byte, fullValueLen(r, false))
			binary.LittleEndian.PutUint64(v, r)
			pairs = append(pairs, client.KV{Key: ycsb.Key(nil, r), Value: v})
		}
		for _, x := range c.MultiPut(tb.Context(), pairs) {
			if x.Err != nil {
				tb.Fatal(x.Err)
			}
		}
		if i%64 == 0 && c.Stats().Evicted > 0 {
			return
		}
	}
	tb.Fatal("the cache took all keys and evicted none")
}

// fullWorker is one goroutine.
type fullWorker struct {
	f          *full
	c          *client.Client
	gen        *ycsb.Generator
	key, value []byte
	done       uint64 // operations

	mu       sync.Mutex
	get, put *hdrhistogram.Histogram // nanoseconds
	reads    uint64
	hits     uint64
}

func newNanos() *hdrhistogram.Histogram { return hdrhistogram.New(1, int64(time.Minute), 3) }

func (f *full) worker(tb testing.TB, c *client.Client, stream uint64) *fullWorker {
	b, err := ycsb.ByName("B")
	if err != nil {
		tb.Fatal(err)
	}
	gen, err := ycsb.New(ycsb.Options{Workload: b, Keyspace: ycsb.NewKeyspace(fullKeys), Seed: 1, Stream: stream})
	if err != nil {
		tb.Fatal(err)
	}
	return &fullWorker{f: f, c: c, gen: gen, value: make([]byte, fullValueLen(0, true)), get: newNanos(),
		put: newNanos()}
}

// fullValueLen is how long the value of a record is, or the longest of all.
func fullValueLen(record uint64, longest bool) int {
	const least, most = 200, 1800
	if longest {
		return most
	}
	return least + int(record*0x9e3779b97f4a7c15>>32%(most-least+1))
}

func (w *fullWorker) run(ctx context.Context) {
	for {
		select {
		case <-w.f.end:
			return
		default:
		}
		q := w.gen.Next()
		// The keys, one after the other, give way to keys that never were.
		moved := w.f.renewed.Add(1) / renewEvery
		record := q.Record + (moved+fullKeys-1-q.Record)/fullKeys*fullKeys
		w.key = ycsb.Key(w.key[:0], record)
		w.done++
		if q.Op == ycsb.Read && w.read(ctx, record) {
			continue
		}
		value := w.value[:fullValueLen(record, false)]
		binary.LittleEndian.PutUint64(value, record)
		began := time.Now()
		_, err := w.c.Put(ctx, w.key, value, client.PutOptions{})
		took := time.Since(began)
		if err != nil {
			w.f.fail(fmt.Errorf("put %s, after %v: %w", w.key, took, err))
		}
		w.mu.Lock()
		_ = w.put.RecordValue(nanos(took))
		w.mu.Unlock()
	}
}

// read reports whether there is nothing more to do about a record.
func (w *fullWorker) read(ctx context.Context, record uint64) bool {
	began := time.Now()
	it, err := w.c.Get(ctx, w.key)
	took := time.Since(began)
	w.mu.Lock()
	_ = w.get.RecordValue(nanos(took))
	w.reads++
	if err == nil {
		w.hits++
	}
	w.mu.Unlock()
	switch {
	case errors.Is(err, client.ErrNotFound):
		return false
	case err != nil:
		w.f.fail(fmt.Errorf("get %s, after %v: %w", w.key, took, err))
	case len(it.Value) != fullValueLen(record, false) || binary.LittleEndian.Uint64(it.Value) != record:
		w.f.fail(fmt.Errorf("get %s: %d bytes that begin with %x are not its value", w.key, len(it.Value),
			it.Value[:min(8, len(it.Value))]))
	}
	return true
}

// fullLine is one interval.
type fullLine struct {
	took                time.Duration
	get, put            *hdrhistogram.Histogram
	reads, hits         uint64
	granted, mine, node int64 // bytes
}

// throughput is operations a second of the interval in the middle.
func throughput(lines []fullLine) float64 {
	var all []float64
	for _, l := range lines {
		all = append(all, float64(l.ops())/l.took.Seconds())
	}
	return median(all)
}

func (l fullLine) ops() uint64 { return uint64(l.get.TotalCount() + l.put.TotalCount()) }

// line takes what was counted since the last one.
func (f *full) line(took time.Duration) fullLine {
	l := fullLine{took: took, get: newNanos(), put: newNanos()}
	for _, w := range f.crew {
		w.mu.Lock()
		l.get.Merge(w.get)
		l.put.Merge(w.put)
		l.reads += w.reads
		l.hits += w.hits
		w.get.Reset()
		w.put.Reset()
		w.reads, w.hits = 0, 0
		w.mu.Unlock()
	}
	return l
}

func printFull(lines []fullLine) {
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', tabwriter.AlignRight)
	defer w.Flush()
	fmt.Fprintln(w, "\t\t\tGET, µs\t\t\t\tPUT, µs\t\t\t\tMiB\t\t\t")
	fmt.Fprintln(w, "s\tops/s\thits\tp50\tp99\tp99.9\tmax\tp50\tp99\tp99.9\tmax\tgranted\tclients\tmemory node\t")
	var at time.Duration
	for _, l := range lines {
		at += l.took
		fmt.Fprintf(w, "%.0f\t%.1f k\t%.1f %%\t", at.Seconds(), float64(l.ops())/l.took.Seconds()/1e3,
			100*float64(l.hits)/float64(max(l.reads, 1)))
		for _, h := range []*hdrhistogram.Histogram{l.get, l.put} {
			for _, v := range []int64{h.ValueAtQuantile(50), h.ValueAtQuantile(99), h.ValueAtQuantile(99.9), h.Max()} {
				fmt.Fprintf(w, "%.0f\t", float64(v)/1e3)
			}
		}
		for _, v := range []int64{l.granted, l.mine, l.node} {
			fmt.Fprintf(w, "%.1f\t", float64(v)/(1<<20))
		}
		fmt.Fprintln(w)
	}
}
