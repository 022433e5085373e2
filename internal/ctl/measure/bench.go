package measure

import (
	"cmp"
	"context"
	crand "crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/maphash"
	"io"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/patient"
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
	keep         bool
	cleanup      bool
}

// benchPrefix begins the keys of runs that are not told a prefix. Another run has other keys.
const benchPrefix = "kvctl-bench/"

func (a *commands) benchCommand() *cobra.Command {
	var o benchOptions
	c := ctl.Changes(&cobra.Command{
		Use:   "bench",
		Short: "Run a YCSB workload, A to F",
		Long: "Load records and run one of YCSB's core workloads on them.\n\n" +
			"  A  50% read, 50% update                zipfian\n" +
			"  B  95% read, 5% update                 zipfian\n" +
			"  C  read only                           zipfian\n" +
			"  D  95% read, 5% insert                 latest\n" +
			"  E  95% scan of 1 to 100, 5% insert     (in the order of hashes)\n" +
			"  F  50% read, 50% read-modify-write     zipfian\n\n" +
			"Keys have 16 bytes behind the prefix. A latency is that of one call: of one key,\n" +
			"or of the keys of a --batch.\n\n" +
			"The run has a prefix of its own, " + benchPrefix + "…, and at the end, also of an interrupted run,\nit " +
			"deletes what it put. With --prefix it stops before it changes a key that was\nthere already. Keys of a " +
			"run that was killed: kvctl del --prefix " + benchPrefix,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.bench(cmd.Context(), &o) },
	})
	f := c.Flags()
	f.StringVarP(&o.workload, "workload", "w", "A", "YCSB workload, A to F")
	f.StringVar(&o.distribution, "distribution", "default", "which records: default (the workload's own), zipfian "+
		"(theta 0.99, scattered), uniform or latest")
	f.Uint64Var(&o.records, "records", 100_000, "records to load")
	f.Uint64Var(&o.ops, "ops", 0, "operations to run (default: for --duration)")
	f.DurationVar(&o.duration, "duration", 10*time.Second, "time to run, without --ops")
	f.IntVar(&o.valueSize, "value-size", 100, "length of the values in bytes")
	f.IntVar(&o.threads, "threads", runtime.GOMAXPROCS(0), "goroutines")
	f.IntVar(&o.lanes, "lanes", 0, "queue pairs to each memory node; 0: chosen")
	f.IntVar(&o.batch, "batch", 1, "keys of one call")
	f.Uint64Var(&o.seed, "seed", 1, "of the random numbers")
	f.StringVar(&o.prefix, "prefix", "", "begin every key with this (default: one that no other run has)")
	f.BoolVar(&o.keep, "keep", false, "leave the records at the end")
	f.BoolVar(&o.noLoad, "no-load", false, "the records below --prefix are there already, of a run with --keep; the "+
		"run changes them and leaves them")
	f.BoolVar(&o.cleanup, "cleanup", false, "with --no-load: delete the records at the end")
	_ = c.RegisterFlagCompletionFunc("workload", cobra.FixedCompletions([]string{"A", "B", "C", "D", "E", "F"},
		cobra.ShellCompDirectiveNoFileComp))
	_ = c.RegisterFlagCompletionFunc("distribution", cobra.FixedCompletions([]string{"zipfian", "uniform", "latest"},
		cobra.ShellCompDirectiveNoFileComp))
	return c
}

func (o *benchOptions) validate() (w ycsb.Workload, d ycsb.Distribution, err error) {
	if w, err = ycsb.ByName(o.workload); err != nil {
		return w, d, ctl.Usagef("--workload: %w", err)
	}
	if d, err = ycsb.ParseDistribution(o.distribution); err != nil {
		return w, d, ctl.Usagef("--distribution: %w", err)
	}
	switch {
	case o.records < 1 || o.records > 1e12:
		err = ctl.Usagef("--records %d: want 1 to 10^12", o.records)
	case o.ops == 0 && o.duration <= 0:
		err = ctl.Usagef("--duration %v: want > 0", o.duration)
	case o.valueSize < 0 || o.valueSize > client.MaxValueLen:
		err = ctl.Usagef("--value-size %d: want 0 to %d", o.valueSize, client.MaxValueLen)
	case o.threads < 1 || o.threads > 4096:
		err = ctl.Usagef("--threads %d: want 1 to 4096", o.threads)
	case o.lanes < 0 || o.lanes > 16:
		err = ctl.Usagef("--lanes %d: want 0 to 16", o.lanes)
	case o.batch < 1 || o.batch > 1024:
		err = ctl.Usagef("--batch %d: want 1 to 1024", o.batch)
	case len(o.prefix)+ycsb.KeyLen > client.MaxKeyLen:
		err = ctl.Usagef("--prefix: %d bytes, want at most %d", len(o.prefix), client.MaxKeyLen-ycsb.KeyLen)
	case o.noLoad && o.prefix == "":
		err = ctl.Usagef("--no-load: want the --prefix of the records that are there")
	case o.keep && o.cleanup:
		err = ctl.Usagef("--keep and --cleanup: want one of them")
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

// BenchReport is what bench prints: its operations, by kind.
type BenchReport struct {
	Workload     string            `json:"workload"`
	Distribution string            `json:"distribution"`
	Records      uint64            `json:"records"`
	ValueBytes   int               `json:"value_bytes"`
	Threads      int               `json:"threads"`
	Batch        int               `json:"batch"`
	Seed         uint64            `json:"seed"`
	Prefix       string            `json:"prefix"`
	Kept         bool              `json:"kept"`
	Providers    map[string]string `json:"providers"`
	LoadSeconds  float64           `json:"load_seconds"`
	LoadPerSec   float64           `json:"load_per_second"`
	Seconds      float64           `json:"seconds"`
	PerSecond    float64           `json:"per_second"`
	RTTPerOp     float64           `json:"rtt_per_operation"`
	VerbsPerOp   float64           `json:"verbs_per_operation"`
	Operations   []opReport        `json:"operations"`
}

func (a *commands) bench(ctx context.Context, o *benchOptions) error {
	w, dist, err := o.validate()
	if err != nil {
		return err
	}
	if o.prefix == "" {
		o.prefix = benchPrefix + strings.ToLower(crand.Text()[:8]) + "/"
	}
	return a.With(ctx, ctl.SessionOptions{Lanes: o.lanes}, func(s ctl.Store) error {
		b := &bench{a: a, o: o, s: s, w: w, dist: dist, keys: ycsb.NewKeyspace(o.records)}
		rep := BenchReport{Workload: w.Name, Records: o.records, ValueBytes: o.valueSize, Threads: o.threads,
			Batch: o.batch, Seed: o.seed,
			Distribution: w.Distribution.String(), Prefix: o.prefix, Kept: o.keep || o.noLoad && !o.cleanup}
		if dist != 0 {
			rep.Distribution = dist.String()
		}
		if !o.noLoad {
			begin := time.Now()
			if loaded, err := b.load(ctx); err != nil {
				err = fmt.Errorf("load: %w", ctl.Partly(loaded > 0, err, "after %d of %d records", loaded, o.records))
				return errors.Join(err, b.cleanup(context.WithoutCancel(ctx)))
			}
			rep.LoadSeconds = time.Since(begin).Seconds()
			rep.LoadPerSec = float64(o.records) / rep.LoadSeconds
		}
		before := s.Stats()
		threads, seconds, err := b.run(ctx)
		after := s.Stats()
		for _, t := range threads {
			b.extra, b.unsure = append(b.extra, t.inserted...), append(b.unsure, t.unsure...)
		}
		left := b.cleanup(context.WithoutCancel(ctx)) // also after an interrupt
		rep.Seconds, rep.Providers = seconds, after.Connections
		rep.Operations = report(threads, seconds)
		total := 0.0
		for _, r := range rep.Operations {
			total += float64(r.Count)
		}
		if err != nil {
			err = ctl.Partly(total > 0, err, "after %.0f operations", total)
			if ctx.Err() == nil {
				return errors.Join(err, left)
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
			return errors.Join(err, left)
		}
		return errors.Join(b.failure(), left)
	})
}

func (a *commands) printBench(r *BenchReport) error {
	if a.JSON() {
		return a.PrintJSON(r)
	}
	fmt.Fprintf(a.Stdout, "workload %s, %s, %d records, values of %d bytes, %d threads, batch %d\n", r.Workload,
		r.Distribution,
		r.Records, r.ValueBytes, r.Threads, r.Batch)
	if r.LoadSeconds > 0 {
		fmt.Fprintf(a.Stdout, "load     %.2f s, %.0f records/s\n", r.LoadSeconds, r.LoadPerSec)
	}
	fmt.Fprintf(a.Stdout, "run      %.2f s, %.0f operations/s, %.2f RTT and %.2f verbs an operation\n", r.Seconds,
		r.PerSecond,
		r.RTTPerOp, r.VerbsPerOp)
	us := func(ns float64) string { return fmt.Sprintf("%.1f", ns/1000) }
	a.PrintTable(ctl.Row{"Operation", "Count", "Per s", "Not found", "Errors", "Min µs", "Avg µs", "P50 µs", "P95 µs",
		"P99 µs", "P99.9 µs", "Max µs"},
		ctl.MapTo(r.Operations, func(r opReport) ctl.Row {
			return ctl.Row{r.Operation, r.Count, fmt.Sprintf("%.0f", r.PerSecond), r.NotFound, r.Errors,
				us(float64(r.Min)),
				us(r.Avg),
				us(float64(r.P50)), us(float64(r.P95)), us(float64(r.P99)), us(float64(r.P999)), us(float64(r.Max))}
		}))
	if r.Kept {
		fmt.Fprintf(a.Stdout, "kept     the records: kvctl del --prefix %s\n", ctl.Visible(r.Prefix))
	}
	return nil
}

// unsureRecord is one that the run has perhaps put: it did if the record has a value of that sum.
type unsureRecord struct{ n, sum uint64 }

var benchSums = maphash.MakeSeed()

type bench struct {
	a    *commands
	o    *benchOptions
	s    ctl.Store
	w    ycsb.Workload
	dist ycsb.Distribution
	keys *ycsb.Keyspace
	next atomic.Uint64 // operations taken
	// loaded: load has put the records below it, but for the blocks that begin at those of broken, of which it put
	// those of extra, and perhaps those of unsure.
	loaded  uint64
	broken  map[uint64]bool
	extra   []uint64
	unsure  []unsureRecord
	loading sync.Mutex // while load runs, it guards these
	fail    struct {
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
	return ctl.ExitWith(ctl.ExitCode(b.fail.first), fmt.Errorf("%d operations failed, the first: %w", b.fail.n,
		b.fail.first))
}

func (b *bench) key(dst []byte, n uint64) []byte { return ycsb.Key(append(dst, b.o.prefix...), n) }

// ranges gives every thread consecutive blocks of the records. It returns how many records fn has done, and below which
// number it was given all.
func (b *bench) ranges(ctx context.Context, what string, records uint64, block int,
	fn func(ctx context.Context, lo, hi uint64) error) (done, given uint64, err error) {
	bar := b.a.Bar(what, "records", func() int64 { return int64(records) })
	defer bar.End()
	var next, did atomic.Uint64
	c := ctl.NewCrew(ctx)
	c.Run(b.o.threads, func(ctx context.Context) error {
		for {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			hi := next.Add(uint64(block))
			lo := hi - uint64(block)
			if lo >= records {
				return nil
			}
			hi = min(hi, records)
			if err := fn(ctx, lo, hi); err != nil {
				return err
			}
			did.Add(hi - lo)
			bar.Step(int(hi - lo))
		}
	})
	err = c.Wait()
	return did.Load(), min(next.Load(), records), err
}

// block is how many records go into one call outside the measured run.
func (b *bench) block() int { return min(max(4<<20/max(b.o.valueSize, 1), 1), 256) }

// loadedValue is what load puts for record n.
func (b *bench) loadedValue(n uint64) []byte { return randomValue(b.o.valueSize, b.o.seed^n) }

// foreign is the error for a key that the run did not put.
func (b *bench) foreign(key []byte) error {
	return fmt.Errorf("%w: it is not of this run and stays as it is; choose another --prefix",
		b.a.About(key, client.ErrExists))
}

func (b *bench) load(ctx context.Context) (records uint64, err error) {
	b.broken = make(map[uint64]bool)
	records, b.loaded, err = b.ranges(ctx, "load", b.o.records, b.block(),
		func(ctx context.Context, lo, hi uint64) error {
			put, unsure, err := b.loadBlock(ctx, lo, hi)
			if err != nil {
				b.loading.Lock()
				defer b.loading.Unlock()
				b.broken[lo] = true
				b.extra, b.unsure = append(b.extra, put...), append(b.unsure, unsure...)
			}
			return err
		})
	return records, err
}

// loadBlock puts records that must not be there. It returns those that it has put, and those of which it does not know.
func (b *bench) loadBlock(ctx context.Context, lo, hi uint64) (put []uint64, unsure []unsureRecord, err error) {
	var numbers []uint64
	var ops []client.Op
	for n := lo; n < hi; n++ {
		numbers = append(numbers, n)
		ops = append(ops, client.Op{Kind: client.OpPut, Cond: client.IfAbsent, Key: b.key(nil, n),
			Value: b.loadedValue(n)})
	}
	sent := make(map[uint64]bool) // by an attempt that may have had its effect
	err = patient.Do(ctx, func() error {
		b.s.Do(ctx, ops)
		var first, foreign error
		var again []client.Op
		var which []uint64
		for i, op := range ops {
			n, err := numbers[i], op.Err
			if errors.Is(err, client.ErrExists) && sent[n] {
				var ours bool
				if ours, err = b.ours(ctx, op.Key, maphash.Bytes(benchSums, op.Value)); err == nil && !ours {
					err = client.ErrExists
				}
			}
			switch {
			case err == nil:
				put = append(put, n)
				delete(sent, n)
				continue
			case errors.Is(err, client.ErrExists):
				foreign = b.foreign(op.Key)
				delete(sent, n)
				continue
			case errors.Is(err, client.ErrUnknownOutcome):
				sent[n] = true
			}
			first = cmp.Or(first, b.a.About(op.Key, err))
			op.Err = nil
			again, which = append(again, op), append(which, n)
		}
		ops, numbers = again, which
		return cmp.Or(foreign, first)
	})
	for n := range sent {
		unsure = append(unsure, unsureRecord{n, maphash.Bytes(benchSums, b.loadedValue(n))})
	}
	return put, unsure, err
}

// ours tells whether key has a value of that sum. Without bytes, nobody can tell whose a value is.
func (b *bench) ours(ctx context.Context, key []byte, sum uint64) (bool, error) {
	it, err := b.s.Get(ctx, key)
	if errors.Is(err, client.ErrNotFound) || errors.Is(err, client.ErrWrongType) {
		return false, nil
	}
	return err == nil && len(it.Value) > 0 && maphash.Bytes(benchSums, it.Value) == sum, err
}

// cleanup deletes what the run put, or with --no-load and --cleanup all records.
func (b *bench) cleanup(ctx context.Context) error {
	switch {
	case b.o.noLoad && b.o.cleanup:
		b.loaded = max(b.o.records, b.keys.End())
	case b.o.noLoad || b.o.keep:
		return nil
	}
	err := b.deleteAll(ctx)
	if err != nil {
		err = fmt.Errorf("cleanup: %w; what is left begins with %q (kvctl del --prefix)", err, b.o.prefix)
	}
	return err
}

func (b *bench) deleteAll(ctx context.Context) error {
	_, _, err := b.ranges(ctx, "cleanup", b.loaded, b.block(), func(ctx context.Context, lo, hi uint64) error {
		if b.broken[lo] {
			return nil
		}
		var ks [][]byte
		for n := lo; n < hi; n++ {
			ks = append(ks, b.key(nil, n))
		}
		return b.deleteKeys(ctx, ks)
	})
	if err != nil {
		return err
	}
	for ns := range slices.Chunk(b.extra, b.block()) {
		if err := b.deleteKeys(ctx, ctl.MapTo(ns, func(n uint64) []byte { return b.key(nil, n) })); err != nil {
			return err
		}
	}
	for _, u := range b.unsure {
		key := b.key(nil, u.n)
		err := patient.Do(ctx, func() error {
			ours, err := b.ours(ctx, key, u.sum)
			if err != nil || !ours {
				return err
			}
			return b.deleteKeys(ctx, [][]byte{key})
		})
		if err != nil {
			return b.a.About(key, err)
		}
	}
	return nil
}

// deleteKeys deletes keys of the run, which may be gone.
func (b *bench) deleteKeys(ctx context.Context, keys [][]byte) error {
	return patient.Do(ctx, func() error {
		var first error
		var again [][]byte
		for i, r := range b.s.MultiDelete(ctx, keys) {
			if r.Err != nil && !errors.Is(r.Err, client.ErrNotFound) {
				first = cmp.Or(first, b.a.About(keys[i], r.Err))
				again = append(again, keys[i])
			}
		}
		keys = again
		return first
	})
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
	bar := b.a.Bar("run", "operations", func() int64 { return cmp.Or(int64(b.o.ops), -1) })
	threads := make([]*benchThread, b.o.threads)
	for i := range threads {
		g, err := ycsb.New(ycsb.Options{Workload: b.w, Distribution: b.dist, Keyspace: b.keys, Seed: b.o.seed,
			Stream: uint64(i)})
		if err != nil {
			return nil, 0, ctl.UsageError(err)
		}
		threads[i] = newBenchThread(b, g, uint64(i), bar)
	}
	begin := time.Now()
	c := ctl.NewCrew(ctx)
	var i atomic.Int64
	c.Run(b.o.threads, func(ctx context.Context) error { return threads[i.Add(1)-1].run(ctx, stop.Done()) })
	err := c.Wait()
	seconds := time.Since(begin).Seconds()
	bar.End()
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
	bar    *ctl.Bar
	stats  [ycsb.NumOps]opStats
	key    []byte
	dst    []byte
	value  []byte
	serial uint64
	cursor client.Cursor
	reqs   [ycsb.NumOps][]ycsb.Request
	// Records that it has put, and has perhaps put, of the workload's inserts.
	inserted []uint64
	unsure   []unsureRecord
}

func newBenchThread(b *bench, g *ycsb.Generator, id uint64, bar *ctl.Bar) *benchThread {
	return &benchThread{b: b, gen: g, bar: bar, dst: make([]byte, b.o.valueSize),
		value:  randomValue(b.o.valueSize, b.o.seed+id),
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
		t.bar.Step(n)
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
		ops := []client.Op{t.insertOf(r)}
		s.Do(ctx, ops)
		err = t.noteInsert(r, &ops[0])
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
		case ycsb.Update:
			pairs := t.pairsOf(reqs)
			begin := time.Now()
			rs := t.b.s.MultiPut(ctx, pairs)
			err = t.judgeAll(t.record(op, begin, len(reqs)), rs)
		case ycsb.Insert:
			ops := ctl.MapTo(reqs, t.insertOf)
			begin := time.Now()
			t.b.s.Do(ctx, ops)
			s := t.record(op, begin, len(reqs))
			for i, r := range reqs {
				if e := t.countError(s, t.noteInsert(r, &ops[i])); err == nil {
					err = e
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

// insertOf puts a new record. Its key must be absent, except with --no-load.
func (t *benchThread) insertOf(r ycsb.Request) client.Op {
	op := client.Op{Kind: client.OpPut, Cond: client.IfAbsent, Key: t.b.key(nil, r.Record), Value: t.newValue()}
	if t.b.o.noLoad {
		op.Cond = client.Always
	}
	return op
}

// noteInsert keeps what has become of an insert, and returns its error.
func (t *benchThread) noteInsert(r ycsb.Request, op *client.Op) error {
	switch {
	case op.Err == nil:
		t.b.keys.Inserted(r.Record)
		t.inserted = append(t.inserted, r.Record)
	case errors.Is(op.Err, client.ErrExists):
		return t.b.foreign(op.Key)
	case errors.Is(op.Err, client.ErrUnknownOutcome):
		t.unsure = append(t.unsure, unsureRecord{r.Record, maphash.Bytes(benchSums, op.Value)})
	}
	return op.Err
}

func (t *benchThread) keysOf(reqs []ycsb.Request) [][]byte {
	return ctl.MapTo(reqs, func(r ycsb.Request) []byte { return t.b.key(nil, r.Record) })
}

func (t *benchThread) pairsOf(reqs []ycsb.Request) []client.KV {
	v := t.newValue()
	return ctl.MapTo(reqs, func(r ycsb.Request) client.KV { return client.KV{Key: t.b.key(nil, r.Record), Value: v} })
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
		r.P50, r.P95, r.P99, r.P999 = h.ValueAtQuantile(50), h.ValueAtQuantile(95), h.ValueAtQuantile(99),
			h.ValueAtQuantile(99.9)
		out = append(out, r)
	}
	return out
}
