package bench

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/ycsb"
	"github.com/kvd-project/kvd/rdma"
)

// ledger is what the store owes: the newest acknowledged write of every record.
//
// No two writes of a key share a version, and versions grow, so that writers who
// race for one record need no order among themselves to be held to account.
type ledger struct {
	keys *ycsb.Keyspace // which records are there
	rows []ledgerRow    // by record
}

type ledgerRow struct {
	sync.Mutex
	version, stamp uint64   // of the newest acknowledged write
	unknown        []uint64 // stamps of writes that may have happened
	since          time.Time
}

// newLedger has room for most records, of which the first few are there from the
// beginning: load puts them.
func newLedger(few, most int) *ledger {
	return &ledger{keys: ycsb.NewKeyspace(uint64(few)), rows: make([]ledgerRow, most)}
}

// load puts the records that are there from the beginning.
func (l *ledger) load(tb testing.TB, c *client.Client) {
	tb.Helper()
	const batch = 256
	for lo := uint64(0); lo < l.keys.Loaded(); lo += batch {
		var pairs []client.KV
		for i := lo; i < min(lo+batch, l.keys.Loaded()); i++ {
			pairs = append(pairs, client.KV{Key: ycsb.Key(nil, i), Value: payload(i, 0)})
		}
		for i, x := range c.MultiPut(tb.Context(), pairs) {
			if x.Err != nil {
				tb.Fatal(x.Err)
			}
			if _, err := l.wrote(lo+uint64(i), x.Version, 0); err != nil {
				tb.Fatal(err)
			}
		}
	}
}

// payload is a value that tells which write it is of, and that no byte of it is
// another's.
func payload(record, stamp uint64) []byte {
	v := binary.LittleEndian.AppendUint64(make([]byte, 0, valueLen), record)
	v = binary.LittleEndian.AppendUint64(v, stamp)
	for x := record<<32 ^ stamp; len(v) < valueLen; {
		x = x*6364136223846793005 + 1442695040888963407 // Knuth's MMIX
		v = binary.LittleEndian.AppendUint64(v, x)
	}
	return v
}

// stampOf is the stamp of a payload of a record.
func stampOf(record uint64, v []byte) (uint64, error) {
	if len(v) != valueLen {
		return 0, fmt.Errorf("record %d: a value of %d bytes, want %d", record, len(v), valueLen)
	}
	stamp := binary.LittleEndian.Uint64(v[8:])
	if !slices.Equal(v, payload(record, stamp)) {
		return 0, fmt.Errorf("record %d: the value %x was never written to it", record, v)
	}
	return stamp, nil
}

// acknowledged is the newest version that a reader who begins now must see.
func (l *ledger) acknowledged(record uint64) uint64 {
	r := &l.rows[record]
	r.Lock()
	defer r.Unlock()
	return r.version
}

// saw checks what a reader was given who began when version was the newest
// acknowledged one.
func (l *ledger) saw(record, version uint64, it client.Item) error {
	stamp, err := stampOf(record, it.Value)
	if err != nil {
		return err
	}
	r := &l.rows[record]
	r.Lock()
	defer r.Unlock()
	switch {
	case it.Version < version:
		return fmt.Errorf("record %d: read version %d after %d was acknowledged", record, it.Version, version)
	case it.Version == r.version && stamp != r.stamp:
		return fmt.Errorf("record %d: version %d is of write %#x, read %#x", record, it.Version, r.stamp, stamp)
	}
	return nil
}

// try notes that a write begins.
func (l *ledger) try(record uint64) {
	r := &l.rows[record]
	r.Lock()
	defer r.Unlock()
	if r.since.IsZero() {
		r.since = time.Now()
	}
}

// wrote notes an acknowledged write and returns how long the record had waited
// for one: since the first of the attempts behind the last success.
func (l *ledger) wrote(record, version, stamp uint64) (waited time.Duration, err error) {
	r := &l.rows[record]
	r.Lock()
	defer r.Unlock()
	if !r.since.IsZero() {
		waited = time.Since(r.since)
		r.since = time.Time{}
	}
	if version == r.version {
		return waited, fmt.Errorf("record %d: writes %#x and %#x share version %d", record, r.stamp, stamp, version)
	}
	if version > r.version {
		r.version, r.stamp = version, stamp
	}
	return waited, nil
}

// mayHaveWritten notes a write whose outcome is unknown.
func (l *ledger) mayHaveWritten(record, stamp uint64) {
	r := &l.rows[record]
	r.Lock()
	defer r.Unlock()
	r.unknown = append(r.unknown, stamp)
}

// verify reads every record with a client that has seen nothing yet: all
// acknowledged writes are there, unless one replaced them that may have
// happened, and no record is there twice. There must be no traffic.
func (l *ledger) verify(tb testing.TB, w *world) {
	tb.Helper()
	c := w.open(tb)
	n, wrong := l.keys.End(), 0
	complain := func(format string, args ...any) {
		if wrong++; wrong <= 5 {
			tb.Errorf(format, args...)
		}
	}
	const batch = 256
	for lo := uint64(0); lo < n; lo += batch {
		var keys [][]byte
		for i := lo; i < min(lo+batch, n); i++ {
			keys = append(keys, ycsb.Key(nil, i))
		}
		for i, x := range c.MultiGet(tb.Context(), keys) {
			record := lo + uint64(i)
			r := &l.rows[record]
			if x.Err != nil {
				complain("record %d, version %d acknowledged: %v", record, r.version, x.Err)
				continue
			}
			if err := l.saw(record, r.version, x.Item); err != nil {
				complain("%v", err)
				continue
			}
			stamp, _ := stampOf(record, x.Value) // saw has looked at it
			if stamp != r.stamp && !slices.Contains(r.unknown, stamp) {
				complain("record %d: version %d of write %#x, but %d of %#x is the last that was acknowledged",
					record, x.Version, stamp, r.version, r.stamp)
			}
		}
	}
	var found map[string]int
	// A scan may return what moves meanwhile twice.
	for before := w.idle(tb); ; {
		found = scan(tb, c)
		after := w.idle(tb)
		if after == before {
			break
		}
		before = after
	}
	for i := range n {
		key := string(ycsb.Key(nil, i))
		if found[key] != 1 {
			complain("a scan returned record %d %d times", i, found[key])
		}
		delete(found, key)
	}
	if len(found) > 0 {
		complain("a scan returned %d keys that nobody wrote", len(found))
	}
	if wrong > 5 {
		tb.Errorf("%d faults in all in %d records", wrong, n)
	}
}

// scan counts how often each key is returned.
func scan(tb testing.TB, c *client.Client) map[string]int {
	tb.Helper()
	found := make(map[string]int)
	for kv, err := range c.Scan(tb.Context(), client.ScanOptions{KeysOnly: true}) {
		if err != nil {
			tb.Fatal(err)
		}
		found[string(kv.Key)]++
	}
	return found
}

// traffic is a load: YCSB's workload A on all records there are, and a writer beside
// it that can insert new ones. Its methods belong to one goroutine.
type traffic struct {
	led     *ledger
	clients []*client.Client // workers take them in turn
	// workers is how many goroutines the workload has; loaders insert.
	workers, loaders int
	// rate and inserts are operations a second of all workers and of all loaders.
	rate, inserts float64

	runs uint64 // so far, to make stamps
}

// flow is traffic under way, and then what came of it.
type flow struct {
	*traffic
	ctx    context.Context
	cancel context.CancelFunc
	began  time.Time
	took   time.Duration
	end    atomic.Int64 // nanoseconds after began; operations due later are not begun
	wg     sync.WaitGroup

	// moving is set while data moves.
	moving atomic.Bool
	// growing has the loaders insert; otherwise they update.
	growing bool
	// faulty has operations fail with typed errors, but no others.
	faulty bool

	crew []*worker

	mu       sync.Mutex
	errs     map[string]int // that may be, by kind
	failures []error        // the first few that must not be
	failed   int

	// After stop.
	all           *latencies    // of the workload
	still, during *latencies    // of that, while no data moved and while some did
	loading       *latencies    // of the loaders
	waited        time.Duration // longest that a record was not writable
}

// latencies are from the moment that an operation was due, so that one which
// had to wait for a slow one before it counts in full, and from when it began.
type latencies struct{ due, begun *hdrhistogram.Histogram }

func newLatencies() *latencies {
	h := func() *hdrhistogram.Histogram { return hdrhistogram.New(1, int64(time.Minute), 3) }
	return &latencies{h(), h()}
}

func (l *latencies) add(due, began, ended time.Time) {
	_ = l.due.RecordValue(nanos(ended.Sub(due)))
	_ = l.begun.RecordValue(nanos(ended.Sub(began)))
}

// nanos is d within what a histogram takes.
func nanos(d time.Duration) int64 { return min(max(int64(d), 1), int64(time.Minute)) }

func (l *latencies) merge(o *latencies) {
	l.due.Merge(o.due)
	l.begun.Merge(o.begun)
}

// start begins to send traffic; with a rate of 0, as much as the store takes.
func (tr *traffic) start(tb testing.TB, set func(*flow)) *flow {
	f := &flow{traffic: tr, began: time.Now(), errs: make(map[string]int)}
	f.ctx, f.cancel = context.WithCancel(tb.Context())
	f.end.Store(int64(time.Hour))
	if set != nil {
		set(f)
	}
	a, err := ycsb.ByName("A")
	if err != nil {
		tb.Fatal(err)
	}
	insert := ycsb.Workload{Name: "insert", Insert: 100, Distribution: ycsb.Uniform}
	update := ycsb.Workload{Name: "update", Update: 100, Distribution: ycsb.Uniform}
	// Numbers are drawn from many and reduced to as many as there are, so that the
	// skew stays while they grow.
	many := ycsb.NewKeyspace(1 << 40)
	gen := func(o ycsb.Options) *ycsb.Generator {
		g, err := ycsb.New(o)
		if err != nil {
			tb.Fatal(err)
		}
		return g
	}
	for i := range tr.workers + tr.loaders {
		tr.runs++
		w := &worker{f: f, c: tr.clients[i%len(tr.clients)], id: tr.runs, still: newLatencies(), during: newLatencies()}
		o := ycsb.Options{Workload: a, Keyspace: many, Seed: 1, Stream: tr.runs}
		n, rate, at := tr.workers, tr.rate, i
		if i >= tr.workers {
			n, rate, at = tr.loaders, tr.inserts, i-tr.workers
			w.loads, o.Workload = true, update
			if f.growing {
				o.Workload, o.Keyspace = insert, tr.led.keys
			}
		}
		w.gen = gen(o)
		if rate > 0 {
			w.every = time.Duration(float64(n) / rate * 1e9)
			w.first = w.every * time.Duration(at) / time.Duration(n)
		}
		f.crew = append(f.crew, w)
		f.wg.Go(w.run)
	}
	return f
}

// stop waits until all that was due by now is done.
func (f *flow) stop() *flow {
	f.took = time.Since(f.began)
	f.end.Store(int64(f.took))
	f.wg.Wait()
	f.cancel()
	f.all, f.still, f.during, f.loading = newLatencies(), newLatencies(), newLatencies(), newLatencies()
	for _, w := range f.crew {
		f.waited = max(f.waited, w.waited)
		if w.loads {
			f.loading.merge(w.still)
			f.loading.merge(w.during)
			continue
		}
		f.still.merge(w.still)
		f.during.merge(w.during)
	}
	f.all.merge(f.still)
	f.all.merge(f.during)
	return f
}

// check fails tb if an operation failed.
func (f *flow) check(tb testing.TB) {
	tb.Helper()
	for _, err := range f.failures {
		tb.Error(err)
	}
	if f.failed > len(f.failures) {
		tb.Errorf("%d operations failed in all", f.failed)
	}
}

// throughput is operations a second of the workload.
func (f *flow) throughput() float64 { return float64(f.all.due.TotalCount()) / f.took.Seconds() }

// worker is one goroutine of a flow.
type worker struct {
	f            *flow
	c            *client.Client
	gen          *ycsb.Generator
	id, serial   uint64
	loads        bool // it is a loader
	first, every time.Duration

	still, during *latencies
	waited        time.Duration
}

func (w *worker) run() {
	for due := w.first; ; due += w.every {
		at := w.f.began.Add(due)
		if w.every == 0 {
			at = time.Now()
		} else if d := time.Until(at); d > 0 {
			time.Sleep(d)
		}
		if at.Sub(w.f.began) >= time.Duration(w.f.end.Load()) || !w.one(at) {
			return
		}
	}
}

// one performs an operation that was due at a moment; false: there is none left.
func (w *worker) one(due time.Time) bool {
	f, moving, began := w.f, w.f.moving.Load(), time.Now()
	waited, err := w.do(w.gen.Next())
	ended := time.Now()
	if err == errEnough {
		return false
	}
	w.waited = max(w.waited, waited)
	if moving || f.moving.Load() {
		w.during.add(due, began, ended)
	} else {
		w.still.add(due, began, ended)
	}
	if err != nil {
		f.noteFailure(err, began, ended)
	}
	return true
}

// noteFailure counts an operation that failed.
func (f *flow) noteFailure(err error, began, ended time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch unknown := client.Outcome(err) == rdma.Unknown; {
	case f.faulty && unknown:
		f.errs["unknown outcome"]++
	case f.faulty && errors.Is(err, client.ErrUnavailable):
		f.errs["unavailable"]++
	default:
		if f.failed++; len(f.failures) < 5 {
			f.failures = append(f.failures, fmt.Errorf("after %v, for %v: %w",
				began.Sub(f.began).Round(time.Millisecond), ended.Sub(began).Round(time.Millisecond), err))
		}
	}
}

// errEnough: the ledger is full.
var errEnough = errors.New("enough records")

func (w *worker) do(q ycsb.Request) (waited time.Duration, err error) {
	f, led := w.f, w.f.led
	if q.Op != ycsb.Insert {
		q.Record %= led.keys.End()
	}
	key := ycsb.Key(nil, q.Record)
	if q.Op == ycsb.Read {
		version := led.acknowledged(q.Record)
		it, err := w.c.Get(f.ctx, key)
		if err != nil {
			return 0, err
		}
		return 0, led.saw(q.Record, version, it)
	}
	w.serial++
	stamp := w.id<<40 | w.serial
	put := w.c.Put
	if q.Op == ycsb.Insert {
		if q.Record >= uint64(len(led.rows)) {
			return 0, errEnough
		}
		put = w.c.PutIfAbsent
	}
	led.try(q.Record)
	version, err := put(f.ctx, key, payload(q.Record, stamp), client.PutOptions{})
	if err != nil {
		if client.Outcome(err) == rdma.Unknown {
			led.mayHaveWritten(q.Record, stamp)
		}
		return 0, err
	}
	waited, err = led.wrote(q.Record, version, stamp)
	if q.Op == ycsb.Insert {
		led.keys.Inserted(q.Record)
		waited = 0 // it was not there to be written
	}
	return waited, err
}

func TestLedgerNotices(t *testing.T) {
	l := newLedger(2, 2)
	if _, err := l.wrote(1, 10, 7); err != nil {
		t.Fatal(err)
	}
	if _, err := l.wrote(1, 12, 8); err != nil {
		t.Fatal(err)
	}
	torn := payload(1, 8)
	copy(torn[valueLen/2:], payload(1, 7)[valueLen/2:])
	for _, tc := range []struct {
		what    string
		version uint64
		value   []byte
		ok      bool
	}{
		{"the last write", 12, payload(1, 8), true},
		{"one that is not acknowledged yet", 13, payload(1, 9), true},
		{"one that was replaced", 10, payload(1, 7), false},
		{"another's of its version", 12, payload(1, 7), false},
		{"another record's", 13, payload(0, 9), false},
		{"half of two", 12, torn, false},
		{"a piece", 12, payload(1, 8)[:16], false},
	} {
		err := l.saw(1, 12, client.Item{Version: tc.version, Value: tc.value})
		if (err == nil) != tc.ok {
			t.Errorf("%s: %v", tc.what, err)
		}
	}
	if _, err := l.wrote(1, 12, 9); err == nil {
		t.Error("two writes of one version")
	}
}
