package main

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/ycsb"
)

type benchOptions struct {
	workload     string
	distribution string
	records      uint64
	ops          uint64
	duration     time.Duration
	valueSize    int
	threads      int
	lanes        int
	batch        int
	seed         uint64
	prefix       string
	noLoad       bool
	cleanup      bool
}

func (a *app) benchCommand() *cobra.Command {
	var o benchOptions
	c := changes(&cobra.Command{
		Use:   "bench",
		Short: "Run a YCSB workload, A to F",
		Long: "Load records and run one of YCSB's core workloads on them.\n\n" +
			"  A  50% read, 50% update                zipfian\n" +
			"  B  95% read, 5% update                 zipfian\n" +
			"  C  read only                           zipfian\n" +
			"  D  95% read, 5% insert                 latest\n" +
			"  E  95% scan of 1 to 100, 5% insert     (in the order of hashes)\n" +
			"  F  50% read, 50% read-modify-write     zipfian\n\n" +
			"Keys have 16 bytes behind the prefix. A latency is that of one call: of one key,\nor with --batch of up to so many at once.",
		Args:    cobra.NoArgs,
		GroupID: "tools",
		RunE:    func(cmd *cobra.Command, _ []string) error { return a.bench(cmd.Context(), &o) },
	})
	f := c.Flags()
	f.StringVarP(&o.workload, "workload", "w", "A", "YCSB workload, A to F")
	f.StringVar(&o.distribution, "distribution", "default", "which records: default (the workload's own), zipfian (theta 0.99, scattered), uniform or latest")
	f.Uint64Var(&o.records, "records", 100_000, "records to load")
	f.Uint64Var(&o.ops, "ops", 0, "operations to run (default: for --duration)")
	f.DurationVar(&o.duration, "duration", 10*time.Second, "time to run, without --ops")
	f.IntVar(&o.valueSize, "value-size", 100, "length of the values in bytes")
	f.IntVar(&o.threads, "threads", runtime.GOMAXPROCS(0), "goroutines")
	f.IntVar(&o.lanes, "lanes", 0, "queue pairs to each memory node; 0: chosen")
	f.IntVar(&o.batch, "batch", 1, "keys of one call")
	f.Uint64Var(&o.seed, "seed", 1, "of the random numbers")
	f.StringVar(&o.prefix, "prefix", "", "begin every key with this")
	f.BoolVar(&o.noLoad, "no-load", false, "the records are there already")
	f.BoolVar(&o.cleanup, "cleanup", false, "delete the records at the end")
	_ = c.RegisterFlagCompletionFunc("workload", cobra.FixedCompletions([]string{"A", "B", "C", "D", "E", "F"}, cobra.ShellCompDirectiveNoFileComp))
	_ = c.RegisterFlagCompletionFunc("distribution", cobra.FixedCompletions([]string{"zipfian", "uniform", "latest"}, cobra.ShellCompDirectiveNoFileComp))
	return c
}

func (o *benchOptions) validate() (w ycsb.Workload, d ycsb.Distribution, err error) {
	if w, err = ycsb.ByName(o.workload); err != nil {
		return w, d, usagef("--workload: %w", err)
	}
	if d, err = ycsb.ParseDistribution(o.distribution); err != nil {
		return w, d, usagef("--distribution: %w", err)
	}
	switch {
	case o.records < 1 || o.records > 1e12:
		err = usagef("--records %d: want 1 to 10^12", o.records)
	case o.ops == 0 && o.duration <= 0:
		err = usagef("--duration %v: want > 0", o.duration)
	case o.valueSize < 0 || o.valueSize > client.MaxValueLen:
		err = usagef("--value-size %d: want 0 to %d", o.valueSize, client.MaxValueLen)
	case o.threads < 1 || o.threads > 4096:
		err = usagef("--threads %d: want 1 to 4096", o.threads)
	case o.lanes < 0 || o.lanes > 16:
		err = usagef("--lanes %d: want 0 to 16", o.lanes)
	case o.batch < 1 || o.batch > 1024:
		err = usagef("--batch %d: want 1 to 1024", o.batch)
	case len(o.prefix)+ycsb.KeyLen > client.MaxKeyLen:
		err = usagef("--prefix: %d bytes", len(o.prefix))
	}
	return w, d, err
}

// opReport is one operation's line; times are nanoseconds.
type opReport struct {
	Operation string  `json:"operation"`
	Count     int64   `json:"count"`     // keys, or scans
	Calls     int64   `json:"calls"`     // what latency is of
	NotFound  int64   `json:"not_found"` // of count
	Errors    int64   `json:"errors"`
	PerSecond float64 `json:"per_second"`
	Min       int64   `json:"min_ns"`
	Avg       float64 `json:"avg_ns"`
	P50       int64   `json:"p50_ns"`
	P95       int64   `json:"p95_ns"`
	P99       int64   `json:"p99_ns"`
	P999      int64   `json:"p999_ns"`
	Max       int64   `json:"max_ns"`
}

type benchReport struct {
	Workload     string            `json:"workload"`
	Distribution string            `json:"distribution"`
	Records      uint64            `json:"records"`
	ValueBytes   int               `json:"value_bytes"`
	Threads      int               `json:"threads"`
	Batch        int               `json:"batch"`
	Seed         uint64            `json:"seed"`
	Providers    map[string]string `json:"providers"`
	LoadSeconds  float64           `json:"load_seconds"`
	LoadPerSec   float64           `json:"load_per_second"`
	Seconds      float64           `json:"seconds"`
	PerSecond    float64           `json:"per_second"`
	RTTPerOp     float64           `json:"rtt_per_operation"`
	VerbsPerOp   float64           `json:"verbs_per_operation"`
	Operations   []opReport        `json:"operations"`
}

func (a *app) bench(ctx context.Context, o *benchOptions) error {
	w, dist, err := o.validate()
	if err != nil {
		return err
	}
	return a.with(ctx, sessionOptions{Lanes: o.lanes}, func(s store) error {
		b := &bench{a: a, o: o, s: s, w: w, dist: dist, keys: ycsb.NewKeyspace(o.records)}
		rep := benchReport{Workload: w.Name, Records: o.records, ValueBytes: o.valueSize, Threads: o.threads, Batch: o.batch, Seed: o.seed,
			Distribution: w.Distribution.String()}
		if dist != 0 {
			rep.Distribution = dist.String()
		}
		if !o.noLoad {
			begin := time.Now()
			if loaded, err := b.load(ctx); err != nil {
				err = fmt.Errorf("load: %w", partly(loaded > 0, err, "after %d of %d records", loaded, o.records))
				if o.cleanup {
					err = errors.Join(err, b.cleanup(context.WithoutCancel(ctx)))
				}
				return err
			}
			rep.LoadSeconds = time.Since(begin).Seconds()
			rep.LoadPerSec = float64(o.records) / rep.LoadSeconds
		}
		before := s.Stats()
		threads, seconds, err := b.run(ctx)
		after := s.Stats()
		if o.cleanup {
			err = errors.Join(err, b.cleanup(context.WithoutCancel(ctx)))
		}
		rep.Seconds, rep.Providers = seconds, after.Connections
		rep.Operations = report(threads, seconds)
		total := 0.0
		for _, r := range rep.Operations {
			total += float64(r.Count)
		}
		if err != nil {
			err = partly(total > 0, err, "after %.0f operations", total)
			if ctx.Err() == nil {
				return err
			}
		}
		rep.PerSecond = total / seconds
		var rounds uint64
		for k, n := range after.Rounds {
			rounds += n - before.Rounds[k]
		}
		if total > 0 && after.Session == before.Session {
			rep.RTTPerOp = float64(rounds) / total
			rep.VerbsPerOp = float64(after.Verbs.Total()-before.Verbs.Total()) / total
		}
		if e := a.printBench(&rep); e != nil {
			return e
		}
		if err != nil { // it was interrupted
			return err
		}
		return b.failure()
	})
}

func (a *app) printBench(r *benchReport) error {
	if a.json() {
		return a.printJSON(r)
	}
	fmt.Fprintf(a.stdout, "workload %s, %s, %d records, values of %d bytes, %d threads, batch %d\n", r.Workload, r.Distribution,
		r.Records, r.ValueBytes, r.Threads, r.Batch)
	if r.LoadSeconds > 0 {
		fmt.Fprintf(a.stdout, "load     %.2f s, %.0f records/s\n", r.LoadSeconds, r.LoadPerSec)
	}
	fmt.Fprintf(a.stdout, "run      %.2f s, %.0f operations/s, %.2f RTT and %.2f verbs an operation\n", r.Seconds, r.PerSecond,
		r.RTTPerOp, r.VerbsPerOp)
	us := func(ns float64) string { return fmt.Sprintf("%.1f", ns/1000) }
	a.printTable(row{"Operation", "Count", "Per s", "Not found", "Errors", "Min µs", "Avg µs", "P50 µs", "P95 µs", "P99 µs", "P99.9 µs", "Max µs"},
		mapTo(r.Operations, func(r opReport) row {
			return row{r.Operation, r.Count, fmt.Sprintf("%.0f", r.PerSecond), r.NotFound, r.Errors, us(float64(r.Min)), us(r.Avg),
				us(float64(r.P50)), us(float64(r.P95)), us(float64(r.P99)), us(float64(r.P999)), us(float64(r.Max))}
		}))
	return nil
}

type bench struct {
	a    *app
	o    *benchOptions
	s    store
	w    ycsb.Workload
	dist ycsb.Distribution
	keys *ycsb.Keyspace
	next atomic.Uint64 // operations taken
	fail struct {
		sync.Mutex
		n     int64
		first error
	}
}

// failed notes an error that does not end the run; it returns any other.
func (b *bench) failed(err error) error {
	if !errors.Is(err, client.ErrUnavailable) && !errors.Is(err, client.ErrUnknownOutcome) {
		return err
	}
	b.fail.Lock()
	defer b.fail.Unlock()
	if b.fail.n++; b.fail.first == nil {
		b.fail.first = err
	}
	return nil
}

func (b *bench) failure() error {
	b.fail.Lock()
	defer b.fail.Unlock()
	if b.fail.n == 0 {
		return nil
	}
	return &exitError{exitCode(b.fail.first), fmt.Errorf("%d operations failed, the first: %w", b.fail.n, b.fail.first)}
}

func (b *bench) key(dst []byte, n uint64) []byte { return ycsb.Key(append(dst, b.o.prefix...), n) }

// ranges gives every thread consecutive blocks of the records, and returns how many were
// done.
func (b *bench) ranges(ctx context.Context, what string, block int, fn func(ctx context.Context, lo, hi uint64) error) (uint64, error) {
	bar := b.a.bar(what, "records", func() int64 { return int64(b.o.records) })
	defer bar.end()
	var next, done atomic.Uint64
	c := newCrew(ctx)
	c.run(b.o.threads, func(ctx context.Context) error {
		for {
			hi := next.Add(uint64(block))
			lo := hi - uint64(block)
			if lo >= b.o.records {
				return nil
			}
			if hi = min(hi, b.o.records); ctx.Err() != nil {
				return context.Cause(ctx)
			}
			if err := fn(ctx, lo, hi); err != nil {
				return err
			}
			done.Add(hi - lo)
			bar.step(int(hi - lo))
		}
	})
	err := c.wait()
	return done.Load(), err
}

// block is how many records go into one call outside the measured run.
func (b *bench) block() int { return min(max(4<<20/max(b.o.valueSize, 1), 1), 256) }

func (b *bench) load(ctx context.Context) (records uint64, err error) {
	return b.ranges(ctx, "load", b.block(), func(ctx context.Context, lo, hi uint64) error {
		pairs := make([]client.KV, 0, hi-lo)
		for n := lo; n < hi; n++ {
			pairs = append(pairs, client.KV{Key: b.key(nil, n), Value: randomValue(b.o.valueSize, b.o.seed^n)})
		}
		return persist(ctx, func() error {
			for i, r := range b.s.MultiPut(ctx, pairs) {
				if r.Err != nil {
					return b.a.about(pairs[i].Key, r.Err)
				}
			}
			return nil
		})
	})
}

func (b *bench) cleanup(ctx context.Context) error {
	b.o.records = max(b.o.records, b.keys.End())
	_, err := b.ranges(ctx, "cleanup", 256, func(ctx context.Context, lo, hi uint64) error {
		var ks [][]byte
		for n := lo; n < hi; n++ {
			ks = append(ks, b.key(nil, n))
		}
		for i, r := range b.s.MultiDelete(ctx, ks) {
			if r.Err != nil && !errors.Is(r.Err, client.ErrNotFound) {
				return b.a.about(ks[i], r.Err)
			}
		}
		return nil
	})
	return err
}

// randomValue is n bytes that do not compress.
func randomValue(n int, seed uint64) []byte {
	v := make([]byte, (n+7)&^7)
	r := rand.NewPCG(seed, 0x6b7664)
	for i := 0; i < len(v); i += 8 {
		binary.LittleEndian.PutUint64(v[i:], r.Uint64())
	}
	return v[:n]
}

// run drives the threads and returns them with the seconds they took.
func (b *bench) run(ctx context.Context) ([]*benchThread, float64, error) {
	stop := ctx
	if b.o.ops == 0 {
		var cancel context.CancelFunc
		stop, cancel = context.WithTimeout(ctx, b.o.duration)
		defer cancel()
	}
	bar := b.a.bar("run", "operations", func() int64 { return cmp.Or(int64(b.o.ops), -1) })
	threads := make([]*benchThread, b.o.threads)
	for i := range threads {
		g, err := ycsb.New(ycsb.Options{Workload: b.w, Distribution: b.dist, Keyspace: b.keys, Seed: b.o.seed, Stream: uint64(i)})
		if err != nil {
			return nil, 0, usageError(err)
		}
		threads[i] = newBenchThread(b, g, uint64(i), bar)
	}
	begin := time.Now()
	c := newCrew(ctx)
	var i atomic.Int64
	c.run(b.o.threads, func(ctx context.Context) error { return threads[i.Add(1)-1].run(ctx, stop.Done()) })
	err := c.wait()
	seconds := time.Since(begin).Seconds()
	bar.end()
	return threads, seconds, err
}

// take claims up to batch operations; 0 ends the run.
func (b *bench) take() int {
	if b.o.ops == 0 {
		return b.o.batch
	}
	end := b.next.Add(uint64(b.o.batch))
	begin := end - uint64(b.o.batch)
	if begin >= b.o.ops {
		return 0
	}
	return int(min(end, b.o.ops) - begin)
}

// opStats are one thread's of one operation.
type opStats struct {
	hist                    *hdrhistogram.Histogram // made on first use
	count, notFound, errors int64
}

type benchThread struct {
	b      *bench
	gen    *ycsb.Generator
	bar    *bar
	stats  [ycsb.NumOps]opStats
	key    []byte
	dst    []byte
	value  []byte
	serial uint64
	cursor client.Cursor
	reqs   [ycsb.NumOps][]ycsb.Request
}

func newBenchThread(b *bench, g *ycsb.Generator, id uint64, bar *bar) *benchThread {
	return &benchThread{b: b, gen: g, bar: bar, dst: make([]byte, b.o.valueSize), value: randomValue(b.o.valueSize, b.o.seed+id),
		serial: id << 40, cursor: client.Cursor{Prefix: rand.New(rand.NewPCG(b.o.seed, id)).Uint64()}}
}

// newValue differs every time.
func (t *benchThread) newValue() []byte {
	t.serial++
	var x [8]byte
	binary.LittleEndian.PutUint64(x[:], t.serial)
	copy(t.value, x[:])
	return t.value
}

func (t *benchThread) run(ctx context.Context, stop <-chan struct{}) error {
	for {
		select {
		case <-stop:
			return context.Cause(ctx) // nil unless the whole run was cancelled
		case <-ctx.Done():
			return context.Cause(ctx)
		default:
		}
		n := t.b.take()
		if n == 0 {
			return nil
		}
		var err error
		if t.b.o.batch == 1 {
			err = t.one(ctx, t.gen.Next())
		} else {
			err = t.many(ctx, n)
		}
		if err != nil {
			return err
		}
		t.bar.step(n)
	}
}

// record notes one call for n keys.
func (t *benchThread) record(op ycsb.Op, begin time.Time, n int) *opStats {
	s := &t.stats[op]
	if s.hist == nil {
		s.hist = hdrhistogram.New(1, int64(time.Minute), 3)
	}
	_ = s.hist.RecordValue(min(max(int64(time.Since(begin)), 1), int64(time.Minute)))
	s.count += int64(n)
	return s
}

// countError counts a key's error; what it returns ends the run.
func (t *benchThread) countError(s *opStats, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, client.ErrNotFound):
		s.notFound++
		return nil
	}
	s.errors++
	return t.b.failed(err)
}

func (t *benchThread) one(ctx context.Context, r ycsb.Request) error {
	t.key = t.b.key(t.key[:0], r.Record)
	s, begin := t.b.s, time.Now()
	var err error
	switch r.Op {
	case ycsb.Read:
		err = t.read(ctx)
	case ycsb.Update:
		_, err = s.Put(ctx, t.key, t.newValue(), client.PutOptions{})
	case ycsb.Insert:
		if _, err = s.Put(ctx, t.key, t.newValue(), client.PutOptions{}); err == nil {
			t.b.keys.Inserted(r.Record)
		}
	case ycsb.ReadModifyWrite:
		if err = t.read(ctx); err == nil {
			_, err = s.Put(ctx, t.key, t.newValue(), client.PutOptions{})
		}
	case ycsb.Scan:
		for _, err = range s.Scan(ctx, client.ScanOptions{Cursor: &t.cursor, Count: r.ScanLen}) {
			if err != nil {
				break
			}
		}
		if t.cursor.Done {
			t.cursor = client.Cursor{}
		}
	}
	return t.countError(t.record(r.Op, begin, 1), err)
}

func (t *benchThread) read(ctx context.Context) error {
	n, err := t.b.s.GetInto(ctx, t.key, t.dst)
	if errors.Is(err, io.ErrShortBuffer) { // a longer value from before
		t.dst = make([]byte, n)
		_, err = t.b.s.GetInto(ctx, t.key, t.dst)
	}
	return err
}

// many runs n requests, those of a kind together.
func (t *benchThread) many(ctx context.Context, n int) error {
	for i := range t.reqs {
		t.reqs[i] = t.reqs[i][:0]
	}
	for range n {
		r := t.gen.Next()
		t.reqs[r.Op] = append(t.reqs[r.Op], r)
	}
	for op, reqs := range t.reqs {
		if len(reqs) == 0 {
			continue
		}
		var err error
		switch op := ycsb.Op(op); op {
		case ycsb.Read:
			begin := time.Now()
			rs := t.b.s.MultiGet(ctx, t.keysOf(reqs))
			err = t.judgeAll(t.record(op, begin, len(reqs)), rs)
		case ycsb.Update, ycsb.Insert:
			pairs := t.pairsOf(reqs)
			begin := time.Now()
			rs := t.b.s.MultiPut(ctx, pairs)
			err = t.judgeAll(t.record(op, begin, len(reqs)), rs)
			for i, r := range rs {
				if op == ycsb.Insert && r.Err == nil {
					t.b.keys.Inserted(reqs[i].Record)
				}
			}
		case ycsb.ReadModifyWrite:
			keys, pairs := t.keysOf(reqs), t.pairsOf(reqs)
			begin := time.Now()
			rs := t.b.s.MultiGet(ctx, keys)
			if err = t.judgeAll(&t.stats[op], rs); err == nil {
				rs = t.b.s.MultiPut(ctx, pairs)
				err = t.judgeAll(t.record(op, begin, len(reqs)), rs)
			}
		case ycsb.Scan:
			for _, r := range reqs {
				if err = t.one(ctx, r); err != nil {
					break
				}
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (t *benchThread) keysOf(reqs []ycsb.Request) [][]byte {
	return mapTo(reqs, func(r ycsb.Request) []byte { return t.b.key(nil, r.Record) })
}

func (t *benchThread) pairsOf(reqs []ycsb.Request) []client.KV {
	v := t.newValue()
	return mapTo(reqs, func(r ycsb.Request) client.KV { return client.KV{Key: t.b.key(nil, r.Record), Value: v} })
}

func (t *benchThread) judgeAll(s *opStats, rs []client.Result) error {
	for _, r := range rs {
		if err := t.countError(s, r.Err); err != nil {
			return err
		}
	}
	return nil
}

// report merges the threads.
func report(threads []*benchThread, seconds float64) (out []opReport) {
	for op := ycsb.Read; op < ycsb.NumOps; op++ {
		h := hdrhistogram.New(1, int64(time.Minute), 3)
		r := opReport{Operation: op.String()}
		for _, t := range threads {
			s := &t.stats[op]
			if s.hist != nil {
				h.Merge(s.hist)
			}
			r.Count += s.count
			r.NotFound += s.notFound
			r.Errors += s.errors
		}
		if r.Count == 0 {
			continue
		}
		r.Calls, r.PerSecond = h.TotalCount(), float64(r.Count)/seconds
		r.Min, r.Avg, r.Max = h.Min(), h.Mean(), h.Max()
		r.P50, r.P95, r.P99, r.P999 = h.ValueAtQuantile(50), h.ValueAtQuantile(95), h.ValueAtQuantile(99), h.ValueAtQuantile(99.9)
		out = append(out, r)
	}
	return out
}
