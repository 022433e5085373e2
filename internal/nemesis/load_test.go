package nemesis

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/bits"
	"math/rand/v2"
	"os"
	"os/signal"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/providers"
	"github.com/kvd-project/kvd/rdma"
)

// loadConfig is what a client process is told. Its stdout is lines of fields
// separated by tabs:
//
//	round  N                               no worker will touch keys of rounds below N any more
//	moved  MOVER N OUT                     a transfer ended
//	swept                                  all accounts were read, and their sum was right
//	probe  PG get|put CALL RETURN OUT ERR  a probe ended
//	gone   NAMESPACE PG                    a probe beside found nothing where it had written
//	bad    TEXT                            a value that nobody wrote, an error without a type
type loadConfig struct {
	Directory           []string
	Namespace, Provider string
	Client, Life        int
	Histories           string // folder
	// Round is how long a set of keys is used. In it, Sets sets of Keys keys each
	// are used by one in Sets of all workers.
	Round      time.Duration
	Sets, Keys int
	Workers    int
	// Crowd, if not nil, lets all keys of a round share one group of the index, and
	// so one insert lock.
	Crowd *crowd
	// Ops bounds what one worker does to one key in a round.
	Ops int
	// Pace is how long a worker rests between operations.
	Pace time.Duration
	// Probes are keys that this life alone writes, by placement group.
	Probes    map[uint32]string
	ProbePace time.Duration
	// Beside are likewise those of namespaces that may lose things.
	Beside    map[string]map[uint32]string
	OpTimeout time.Duration
	Churn     bool // more inserts and deletes
	LongBytes int  // one value in a hundred is long: from longLeast to less than that
	// BankPace is how long a mover rests between transfers.
	BankPace time.Duration
}

// loader is one life of a client process.
type loader struct {
	loadConfig
	c       *client.Client
	ctx     context.Context // ends with SIGTERM
	ids     atomic.Uint64
	workers []*worker
	files   recorder
	out     sync.Mutex // stdout
	names   struct {
		sync.Mutex
		of map[[2]int64][]string // keys by round and set
	}
}

// untilTerm runs a client process's part with a device, in a context that SIGTERM ends.
func untilTerm(provider string, run func(context.Context, *rdma.Device) error) error {
	ctx, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer cancel()
	device, err := providers.Open(provider, providers.Options{})
	if err != nil {
		return err
	}
	defer device.Close()
	return run(ctx, device)
}

// loadMain uses the store until SIGTERM, then closes its session.
func loadMain(ctx context.Context, device *rdma.Device, cfg loadConfig) (err error) {
	l := &loader{loadConfig: cfg, ctx: ctx, files: recorder{cfg: cfg, files: map[int64]*os.File{}}}
	l.names.of = map[[2]int64][]string{}
	if l.c, err = l.open(device, cfg.Namespace); l.c == nil {
		return err
	}
	var wg sync.WaitGroup
	for ns, keys := range cfg.Beside {
		c, err := l.open(device, ns)
		if c == nil {
			return errors.Join(err, l.c.Close())
		}
		defer c.Close() // its probes have ended
		for pg, key := range keys {
			wg.Go(func() { l.probe(c, pg, key, ns) })
		}
	}
	for w := range cfg.Workers {
		k := &worker{l: l, n: w, set: (cfg.Client*cfg.Workers + w) % cfg.Sets,
			rng: rand.New(rand.NewPCG(uint64(cfg.Client)<<32|uint64(cfg.Life), uint64(w)))}
		l.workers = append(l.workers, k)
		wg.Go(k.run)
	}
	for pg, key := range cfg.Probes {
		wg.Go(func() { l.probe(l.c, pg, key, "") })
	}
	wg.Go(l.progress)
	wg.Go(l.bank)
	wg.Wait()
	return errors.Join(l.c.Close(), l.files.close())
}

// open gives a client of a namespace, nil with the end of the process.
func (l *loader) open(device *rdma.Device, namespace string) (*client.Client, error) {
	for {
		open, end := context.WithTimeout(l.ctx, 5*time.Second)
		c, err := client.Open(open, client.Options{Directory: l.Directory, Namespace: namespace, Provider: l.Provider,
			Devices: []*rdma.Device{device}, Name: fmt.Sprintf("nemesis c%d.%d", l.Client, l.Life),
			OpTimeout: l.OpTimeout,
			Logger:    slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelInfo}))})
		end()
		switch {
		case err == nil:
			return c, nil
		case l.ctx.Err() != nil:
			return nil, nil
		case errors.Is(err, client.ErrInvalid):
			return nil, err
		}
	}
}

func (l *loader) print(fields ...any) {
	line := ""
	for i, f := range fields {
		if i > 0 {
			line += "\t"
		}
		line += fmt.Sprint(f)
	}
	l.out.Lock()
	defer l.out.Unlock()
	fmt.Println(line)
}

func (l *loader) rest(d time.Duration) bool {
	select {
	case <-l.ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// progress tells which rounds are over for this process.
func (l *loader) progress() {
	for last := int64(0); l.rest(200 * time.Millisecond); {
		least := l.workers[0].round.Load()
		for _, w := range l.workers {
			least = min(least, w.round.Load())
		}
		if least > last {
			last = least
			l.print("round", least)
			l.files.forget(least)
		}
	}
}

// outcome gives an error's row, and refuses errors that are none of the
// library's own.
func (l *loader) outcome(what string, err error) (out, text string) {
	switch {
	case err == nil:
		return outOK, ""
	case errors.Is(err, client.ErrNotFound):
		return outNotFound, ""
	case errors.Is(err, client.ErrExists):
		return outExists, ""
	case errors.Is(err, client.ErrConflict):
		return outConflict, ""
	case client.Outcome(err) == rdma.Unknown:
		return outUnknown, err.Error()
	case !errors.Is(err, client.ErrUnavailable) && !errors.Is(err, client.ErrFull) &&
		!errors.Is(err, client.ErrClosed) && !errors.Is(err, client.ErrTxnContended):
		l.print("bad", strconv.Quote(fmt.Sprintf("client %d: %s: an error of no known type: %v", l.Client, what, err)))
	}
	return outNo, err.Error()
}

// worker does one operation after another.
type worker struct {
	l     *loader
	n     int
	set   int
	rng   *rand.Rand
	round atomic.Int64 // whose keys it uses; never decreases
	since int64        // its first round
	seq   int
	keys  []string // of the round
	seen  map[string]sight
	used  map[string]int
}

// sight is what the worker last knew a key to hold.
type sight struct {
	value   string
	version uint64
}

func (w *worker) run() {
	for w.l.ctx.Err() == nil {
		if r := now() / int64(w.l.Round); r != w.round.Load() {
			w.round.Store(r)
			w.since = cmp.Or(w.since, r)
			w.seen, w.used = map[string]sight{}, map[string]int{}
			w.keys = w.l.keys(r, w.set)
			w.forget(r)
		}
		k := w.rng.IntN(w.l.Keys)
		key := w.keys[k]
		if w.used[key]++; w.used[key] <= w.l.Ops {
			if err := w.do(key, k%4 == 3); err != nil {
				fmt.Fprintln(os.Stderr, err)
				os.Exit(1)
			}
		}
		w.l.rest(time.Duration(w.rng.Int64N(int64(2*w.l.Pace) + 1)))
	}
}

// crowd is what tells the group of a key.
type crowd struct {
	Seed     uint64
	Depth    uint8  // of the shards
	Segments uint32 // of a shard
}

type group struct {
	shard uint32
	off   uint64
}

func (c *crowd) group(key []byte) group {
	h := xxh3.Hash128Seed(key, c.Seed).Lo
	home, _ := layout.GroupOff(h, c.Segments)
	return group{layout.ShardPrefix(h, c.Depth), home}
}

// key is the name of a key of a round; c may be nil.
func (c *crowd) key(round int64, set, k int) string {
	name := fmt.Sprintf("r%d/%d/%d", round, set, k)
	if c == nil {
		return name
	}
	want := c.group(fmt.Appendf(nil, "r%d", round))
	key := append([]byte(name), '/')
	for i := int64(0); ; i++ { // as often as there are groups
		if key = strconv.AppendInt(key[:len(name)+1], i, 10); c.group(key) == want {
			return string(key)
		}
	}
}

// keys are the keys of a set in a round.
func (l *loader) keys(round int64, set int) []string {
	l.names.Lock()
	defer l.names.Unlock()
	at := [2]int64{round, int64(set)}
	if l.names.of[at] == nil {
		for k := range l.Keys {
			l.names.of[at] = append(l.names.of[at], l.Crowd.key(round, set, k))
		}
		for old := range l.names.of {
			if old[0] < round-keptRounds {
				delete(l.names.of, old)
			}
		}
	}
	return l.names.of[at]
}

// keptRounds is how long keys stay after their round.
const keptRounds = 50

// forget deletes one of the keys of a round that ended long ago, so that a run of
// hours fills no memory. Nobody looks at them any more, so it is in no history.
func (w *worker) forget(round int64) {
	if k := (w.l.Client*w.l.Workers + w.n) / w.l.Sets; k < w.l.Keys && w.since <= round-keptRounds {
		_ = w.l.c.Delete(w.l.ctx, []byte(w.l.keys(round-keptRounds, w.set)[k])) // if it stays, it stays
	}
}

type weight struct {
	verb string
	n    int
}

var (
	mixed  = []weight{{verbGet, 40}, {verbPut, 20}, {verbAdd, 8}, {verbCAS, 17}, {verbDel, 8}, {verbDelIf, 7}}
	churn  = []weight{{verbGet, 20}, {verbPut, 20}, {verbAdd, 25}, {verbCAS, 5}, {verbDel, 25}, {verbDelIf, 5}}
	counts = []weight{{verbGet, 40}, {verbIncr, 50}, {verbDel, 10}}
)

func choose(rng *rand.Rand, from []weight) string {
	sum := 0
	for _, f := range from {
		sum += f.n
	}
	n := rng.IntN(sum)
	for _, f := range from {
		if n -= f.n; n < 0 {
			return f.verb
		}
	}
	return from[0].verb
}

// do does one operation and records it: its call before, its end after.
func (w *worker) do(key string, counter bool) error {
	l := w.l
	e := event{ID: l.ids.Add(1), Client: l.Client, Life: l.Life, Worker: w.n, Key: key}
	switch {
	case counter:
		e.Verb = choose(w.rng, counts)
	case l.Churn:
		e.Verb = choose(w.rng, churn)
	default:
		e.Verb = choose(w.rng, mixed)
	}
	if e.Verb == verbCAS || e.Verb == verbDelIf {
		if s, ok := w.seen[key]; ok {
			e.Old, e.OldVersion = s.value, s.version
		} else {
			e.Verb = verbGet
		}
	}
	var value []byte
	switch e.Verb {
	case verbPut, verbAdd, verbCAS:
		w.seq++
		e.Value = fmt.Sprintf("%d.%d.%d.%d", l.Client, l.Life, w.n, w.seq)
		size := 32 + w.rng.IntN(600)
		if w.rng.IntN(100) == 0 {
			size = longSize(w.rng, l.LongBytes)
		}
		value = makeValue(key, e.Value, size)
	case verbIncr:
		e.Value = strconv.Itoa(1 + w.rng.IntN(3))
	}
	f, err := l.files.of(w.round.Load())
	if err != nil {
		return err
	}
	e.Call = now()
	if err := writeLine(f, &e); err != nil {
		return err
	}

	r, bad := w.call(&e, value, counter)
	r.Return = now()
	if bad != nil {
		l.print("bad", strconv.Quote(fmt.Sprintf("client %d: %s: %v", l.Client, e.Verb, bad)))
	}
	return writeLine(f, &ended{ID: e.ID, reply: r})
}

// longLeast is from where on values go straight to and from their callers' memory, and a little more.
const longLeast = 8 << 10

// longSize is from longLeast to less than most, a power of two times that. Each doubling is as likely.
func longSize(rng *rand.Rand, most int) int {
	n := longLeast << rng.IntN(bits.Len(uint(most/longLeast))-1)
	return n + rng.IntN(n)
}

// call runs e. bad tells of a value that nobody can have written.
func (w *worker) call(e *event, value []byte, counter bool) (r reply, bad error) {
	// Each operation is bounded by OpTimeout, not by the process's end.
	ctx, c, key := context.Background(), w.l.c, []byte(e.Key)
	var err error
	saw := e.Value
	switch e.Verb {
	case verbGet:
		var it client.Item
		if it, err = c.Get(ctx, key); err == nil {
			saw, r.Version = string(it.Value), it.Version
			if counter {
				_, bad = strconv.ParseInt(saw, 10, 64)
			} else {
				saw, bad = parseValue(e.Key, it.Value)
			}
			r.Got = saw
		}
	case verbPut:
		r.Version, err = c.Put(ctx, key, value, client.PutOptions{})
	case verbAdd:
		r.Version, err = c.PutIfAbsent(ctx, key, value, client.PutOptions{})
	case verbCAS:
		r.Version, err = c.CompareAndSwap(ctx, key, e.OldVersion, value, client.PutOptions{})
	case verbDel:
		err = c.Delete(ctx, key)
	case verbDelIf:
		err = c.DeleteVersion(ctx, key, e.OldVersion)
	case verbIncr:
		by, _ := strconv.ParseInt(e.Value, 10, 64) // made by do
		var n int64
		if n, err = c.Incr(ctx, key, by); err == nil {
			r.Got = strconv.FormatInt(n, 10)
		}
	}
	r.Out, r.Err = w.l.outcome(e.Verb+" "+e.Key, err)
	switch {
	case r.Out == outOK && r.Version != 0 && bad == nil:
		w.seen[e.Key] = sight{saw, r.Version}
	case r.Out != outNo && w.rng.IntN(2) == 0: // sometimes conditional on what is gone
		delete(w.seen, e.Key)
	}
	return r, bad
}

// recorder writes each line with a write(2) of its own: what was written
// survives the process.
type recorder struct {
	cfg loadConfig
	mu  sync.Mutex
	// files are the open ones by round.
	files map[int64]*os.File
}

func (r *recorder) of(round int64) (*os.File, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if f := r.files[round]; f != nil {
		return f, nil
	}
	f, err := os.OpenFile(historyFile(r.cfg.Histories, r.cfg.Client, r.cfg.Life, round),
		os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return nil, err
	}
	r.files[round] = f
	return f, nil
}

// forget closes the files of rounds below round.
func (r *recorder) forget(round int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for n, f := range r.files {
		if n < round {
			_ = f.Close() // every write was checked
			delete(r.files, n)
		}
	}
}

func (r *recorder) close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	var errs []error
	for _, f := range r.files {
		errs = append(errs, f.Close())
	}
	return errors.Join(errs...)
}

func writeLine(f *os.File, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	_, err = f.Write(append(b, '\n'))
	return err
}

// missedWrite is in the text of a probe that does not read what it wrote.
const missedWrite = "but its only writer last wrote"

// probe writes and reads one key that nobody else writes, so it knows what it
// must read. In a namespace beside, that may also be nothing, and it says so.
func (l *loader) probe(c *client.Client, pg uint32, key, beside string) {
	last := ""                   // what the last Put that happened wrote
	unknown := map[string]bool{} // what Puts wrote that may happen at any time
	for seq := 1; l.rest(l.ProbePace); seq++ {
		id := fmt.Sprintf("%d.%d.p.%d", l.Client, l.Life, seq)
		call := now()
		_, err := c.Put(context.Background(), []byte(key), makeValue(key, id, 64), client.PutOptions{})
		out, text := l.outcome("probe "+key, err)
		l.print("probe", pg, verbPut, call, now(), out, strconv.Quote(text))
		switch out {
		case outOK:
			last = id
		case outUnknown:
			unknown[id] = true
		}
		call = now()
		it, err := c.Get(context.Background(), []byte(key))
		out, text = l.outcome("probe "+key, err)
		l.print("probe", pg, verbGet, call, now(), out, strconv.Quote(text))
		if out == outNo || out == outUnknown {
			continue
		}
		got, bad := "", error(nil)
		if out == outOK {
			got, bad = parseValue(key, it.Value)
		}
		if out == outNotFound && last != "" && beside != "" {
			l.print("gone", beside, pg)
			last = ""
		}
		if bad == nil && got != last && !unknown[got] {
			bad = fmt.Errorf("probe of %q: %s %q, %s %q", key, out, got, missedWrite, last)
		}
		if bad != nil {
			l.print("bad", strconv.Quote(fmt.Sprintf("client %d: %v", l.Client, bad)))
		}
	}
}
