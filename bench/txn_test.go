package bench

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/ycsb"
)

// txnKind is a kind of transaction, as the store performs it and as Redis does.
type txnKind struct {
	name  string
	keys  int
	ours  func(ctx context.Context, c *client.Client, keys [][]byte, ops []client.Op, value []byte) error
	other func(ctx context.Context, c *redis.Client, keys []string, value []byte) error
}

var txnKinds = []txnKind{
	{"MultiCAS of 2 puts", 2, putTogether, setTogether},
	{"MultiCAS of 4 puts", 4, putTogether, setTogether},
	{"Txn that reads and puts 2 keys", 2, readAndPut, watchAndSet},
}

// putTogether puts keys, whatever they hold, in one step.
func putTogether(ctx context.Context, c *client.Client, keys [][]byte, ops []client.Op, value []byte) error {
	for i, k := range keys {
		ops[i] = client.Op{Kind: client.OpPut, Key: k, Value: value}
	}
	return c.MultiCAS(ctx, ops)
}

// setTogether is MULTI, SETs and EXEC, sent together.
func setTogether(ctx context.Context, c *redis.Client, keys []string, value []byte) error {
	_, err := c.TxPipelined(ctx, func(p redis.Pipeliner) error {
		for _, k := range keys {
			p.Set(ctx, k, value, 0)
		}
		return nil
	})
	return err
}

// readAndPut reads keys and puts them if nobody has meanwhile.
func readAndPut(ctx context.Context, c *client.Client, keys [][]byte, _ []client.Op, value []byte) error {
	return client.Txn(ctx, c, func(tx *client.Tx) error {
		if err := tx.Load(keys...); err != nil {
			return err
		}
		for _, k := range keys {
			if it, err := tx.Get(k); err != nil || len(it.Value) != valueLen {
				return fmt.Errorf("get %q: %d bytes, %w", k, len(it.Value), err)
			}
			tx.Put(k, value, client.PutOptions{})
		}
		return nil
	})
}

// watchAndSet is WATCH, MGET, and MULTI, SETs and EXEC, again and again until nobody has changed a key meanwhile.
func watchAndSet(ctx context.Context, c *redis.Client, keys []string, value []byte) error {
	for {
		err := c.Watch(ctx, func(tx *redis.Tx) error {
			if err := tx.MGet(ctx, keys...).Err(); err != nil {
				return err
			}
			_, err := tx.TxPipelined(ctx, func(p redis.Pipeliner) error {
				for _, k := range keys {
					p.Set(ctx, k, value, 0)
				}
				return nil
			})
			return err
		}, keys...)
		if !errors.Is(err, redis.TxFailedErr) {
			return err
		}
	}
}

// chooser chooses the different keys of a transaction. It belongs to one goroutine.
type chooser struct {
	s    *keySet
	rng  *rand.Rand
	zipf *ycsb.Zipf // nil: all keys alike
	keys [][]byte
}

func newChooser(s *keySet, g, n int, skewed bool) *chooser {
	c := &chooser{s: s, rng: rand.New(rand.NewPCG(7, uint64(g))), keys: make([][]byte, n)}
	if skewed {
		c.zipf = ycsb.NewZipf(uint64(s.len()), 0.99)
	}
	return c
}

func (c *chooser) next() [][]byte {
	for i := range c.keys {
		for again := true; again; {
			k := c.rng.IntN(c.s.len())
			if c.zipf != nil {
				k = int(c.zipf.Next(c.rng))
			}
			c.keys[i] = c.s.key(k)
			again = slices.ContainsFunc(c.keys[:i], func(o []byte) bool { return &o[0] == &c.keys[i][0] })
		}
	}
	return c.keys
}

// txnFigures are what a run of transactions gave.
type txnFigures struct {
	latency
	rate    float64 // a second
	retried float64 // attempts beyond the first, a transaction
}

// runTxns performs transactions on g goroutines for a while.
func runTxns(tb testing.TB, g int, f func(g int) error) (x txnFigures) {
	took := make([][]time.Duration, g)
	var stop atomic.Bool
	var wg sync.WaitGroup
	began := time.Now()
	for k := range g {
		wg.Go(func() {
			for at := time.Now(); len(took[k]) == 0 || !stop.Load(); {
				if err := f(k); err != nil {
					tb.Error(err)
					return
				}
				now := time.Now()
				took[k] = append(took[k], now.Sub(at))
				at = now
			}
		})
	}
	time.Sleep(scaled(200*time.Millisecond, time.Millisecond))
	stop.Store(true)
	wg.Wait()
	all := slices.Concat(took...)
	if len(all) == 0 {
		tb.FailNow()
	}
	x.rate = float64(len(all)) / time.Since(began).Seconds()
	slices.Sort(all)
	x.p50, x.p99 = float64(all[len(all)/2]), float64(all[len(all)*99/100])
	return x
}

// compareTransactions compares transactions with Redis's, which has one copy.
func compareTransactions(t *testing.T, r *report, _ *store) {
	st := startStore(t, 2<<30, 2)
	rd := startRedis(t)
	s := newKeySet(scaled(100_000, 1_000))
	rd.load(t, rd.open(t, 1), s)
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	defer w.Flush()
	fmt.Fprintln(w, "transactions\tp50\tp99\tretries\tRedis p50\tp99\t")
	for _, p := range []struct{ provider, network, addr, beside string }{
		{"shm", "unix", rd.sock, "a unix socket"}, {"tcp", "tcp", rd.addr, "TCP"},
	} {
		rc := redis.NewClient(&redis.Options{Network: p.network, Addr: p.addr, PoolSize: 8})
		t.Cleanup(func() { rc.Close() })
		for copies := uint32(1); copies <= 2; copies++ {
			ns := fmt.Sprint("txn-", p.provider, copies)
			st.namespace(t, &dirpb.CreateNamespaceRequest{Name: ns, Replicas: copies,
				BytesPerNode: uint64(copies) * 128 << 20,
				Shards:       2, Segments: uint32(s.len()*3/4/shardSlots + 1), IndexPercent: 5})
			c := st.open(t, p.provider, ns)
			load(t, c, s)
			for _, kind := range txnKinds {
				for _, how := range []struct {
					name   string
					g      int
					skewed bool
				}{{"1 goroutine", 1, false}, {"8 goroutines", 8, false}, {"8 goroutines, zipf(0.99)", 8, true}} {
					what := fmt.Sprintf("%s %s, %s, r = %d", p.provider, kind.name, how.name, copies)
					d := takeTurns(rounds(), ourTxns(t, c, s, kind, how.g, how.skewed),
						theirTxns(t, rc, s, kind, how.g, how.skewed))
					d.row(r, what+", against Redis on "+p.beside, kops, func(x txnFigures) float64 {
						return x.rate
					}, nil)
					of := func(xs []txnFigures, f func(txnFigures) float64) float64 {
						var all []float64
						for _, x := range xs {
							all = append(all, f(x))
						}
						return median(all)
					}
					p50, p99 := func(x txnFigures) float64 { return x.p50 }, func(x txnFigures) float64 { return x.p99 }
					fmt.Fprintf(w, "%s\t%s\t%s\t%.2f %%\t%s\t%s\t\n", what, micros(of(d.ours, p50)),
						micros(of(d.ours, p99)),
						100*of(d.ours, func(x txnFigures) float64 {
							return x.retried
						}), micros(of(d.other, p50)), micros(of(d.other, p99)))
				}
			}
		}
	}
}

func ourTxns(tb testing.TB, c *client.Client, s *keySet, kind txnKind, g int, skewed bool) func() txnFigures {
	choosers, ops, v := make([]*chooser, g), make([][]client.Op, g), make([]byte, valueLen)
	for k := range g {
		choosers[k], ops[k] = newChooser(s, k, kind.keys, skewed), make([]client.Op, kind.keys)
	}
	return func() txnFigures {
		attempts := func() float64 {
			ops := c.Stats().Ops
			return float64(ops["transact"]) + float64(ops["prepare"])/float64(kind.keys)
		}
		before := attempts()
		var n atomic.Int64
		x := runTxns(tb, g, func(k int) error {
			n.Add(1)
			return kind.ours(tb.Context(), c, choosers[k].next(), ops[k], v)
		})
		x.retried = (attempts()-before)/float64(n.Load()) - 1
		return x
	}
}

func theirTxns(tb testing.TB, c *redis.Client, s *keySet, kind txnKind, g int, skewed bool) func() txnFigures {
	choosers, names, v := make([]*chooser, g), make([][]string, g), make([]byte, valueLen)
	for k := range g {
		choosers[k], names[k] = newChooser(s, k, kind.keys, skewed), make([]string, kind.keys)
	}
	return func() txnFigures {
		return runTxns(tb, g, func(k int) error {
			for i, key := range choosers[k].next() {
				names[k][i] = string(key)
			}
			return kind.other(tb.Context(), c, names[k], v)
		})
	}
}

// contendedKeys are read by transactions while so many goroutines put them, all in one step each.
const (
	contendedKeys    = 8
	contendedWriters = 4
)

// TestContendedReads shows how transactions that only read get on among writers of the same keys: KVD_BENCH=1 go test
// -v ./bench -run TestContendedReads. Each that has ended has seen one instant. Writers take no notice of readers until
// these have the store keep the keys.
func TestContendedReads(t *testing.T) {
	st := startStore(t, 1<<30, 2)
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	defer w.Flush()
	fmt.Fprintln(w, "reads of 8 keys among 4 writers\treads/s\tp50\tp99\tlongest\truns a read\twrites/s\t")
	for _, provider := range []string{"shm", "tcp"} {
		for copies := uint32(1); copies <= 2; copies++ {
			ns := fmt.Sprint("contended-", provider, copies)
			st.namespace(t, &dirpb.CreateNamespaceRequest{Name: ns, Replicas: copies,
				BytesPerNode: uint64(copies) * 64 << 20})
			readers, writers := st.open(t, provider, ns), st.open(t, provider, ns)
			keys, value := make([][]byte, contendedKeys), make([]byte, valueLen)
			for i := range keys {
				keys[i] = fmt.Appendf(nil, "contended%d", i)
			}
			write := func() error {
				ops := make([]client.Op, len(keys))
				return putTogether(t.Context(), writers, keys, ops, value)
			}
			if err := write(); err != nil {
				t.Fatal(err)
			}
			var stop atomic.Bool
			var wg sync.WaitGroup
			var written, runs, reads atomic.Int64
			for range contendedWriters {
				wg.Go(func() {
					for !stop.Load() {
						if err := write(); err != nil && !errors.Is(err, client.ErrTxnContended) {
							t.Error(err)
							return
						}
						written.Add(1)
					}
				})
			}
			began := time.Now()
			var took []time.Duration
			for limit := scaled(10*time.Second, 100*time.Millisecond); len(took) == 0 || time.Since(began) < limit; {
				at := time.Now()
				if err := client.Txn(t.Context(), readers, func(tx *client.Tx) error {
					runs.Add(1)
					for _, k := range keys {
						// one after the other, as functions do that do not know what they will need
						if _, err := tx.Get(k); err != nil {
							return err
						}
					}
					return nil
				}); err != nil {
					t.Error(err)
					break
				}
				reads.Add(1)
				took = append(took, time.Since(at))
			}
			seconds := time.Since(began).Seconds()
			stop.Store(true)
			wg.Wait()
			slices.Sort(took)
			if len(took) == 0 {
				continue
			}
			fmt.Fprintf(w, "%s, r = %d\t%.1f\t%s\t%s\t%s\t%.2f\t%.0f\t\n", provider, copies, float64(len(took))/seconds,
				micros(float64(took[len(took)/2])), micros(float64(took[len(took)*99/100])),
				micros(float64(took[len(took)-1])), float64(runs.Load())/float64(max(reads.Load(), 1)),
				float64(written.Load())/seconds)
		}
	}
}

// BenchmarkTxn is transactions of one goroutine, for profiles.
func BenchmarkTxn(b *testing.B) {
	st := startStore(b, 1<<30, 2)
	s := newKeySet(scaled(100_000, 1_000))
	for copies := uint32(1); copies <= 2; copies++ {
		ns := fmt.Sprint("r", copies)
		st.namespace(b, &dirpb.CreateNamespaceRequest{Name: ns, Replicas: copies,
			BytesPerNode: uint64(copies) * 128 << 20,
			Shards:       2, Segments: uint32(s.len()*3/4/shardSlots + 1), IndexPercent: 5})
		for _, provider := range []string{"shm", "tcp"} {
			c := st.open(b, provider, ns)
			load(b, c, s)
			for _, kind := range txnKinds {
				b.Run(fmt.Sprintf("%s/r%d/%s", provider, copies, kind.name), func(b *testing.B) {
					b.ReportAllocs()
					keys, ops, v := newChooser(s, 0, kind.keys, false), make([]client.Op, kind.keys),
						make([]byte, valueLen)
					for b.Loop() {
						if err := kind.ours(b.Context(), c, keys.next(), ops, v); err != nil {
							b.Fatal(err)
						}
					}
				})
			}
		}
	}
}
