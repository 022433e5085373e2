package bench

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/dirpb"
)

// GetInto allocates nothing on shm.
func TestGetIntoAllocatesNothing(t *testing.T) {
	c := startStore(t, 64<<20).open(t, "shm", "")
	s := newKeySet(1000)
	load(t, c, s)
	buf := make([]byte, valueLen)
	i := 0
	ctx := t.Context()
	if n := testing.AllocsPerRun(10_000, func() {
		if _, err := c.GetInto(ctx, s.at(i), buf); err != nil {
			t.Fatal(err)
		}
		i++
	}); n != 0 {
		t.Errorf("GetInto allocates %v times an operation, want 0", n)
	}
}

// A Put over a key that the client knows allocates nothing on shm, with one copy and with two.
func TestPutAllocatesNothing(t *testing.T) {
	st := startStore(t, 128<<20, 2)
	for _, copies := range []uint32{1, 2} {
		ns := fmt.Sprint("r", copies)
		st.namespace(t, &dirpb.CreateNamespaceRequest{Name: ns, Replicas: copies, BytesPerNode: 32 << 20, Shards: 2})
		c := st.open(t, "shm", ns)
		s := newKeySet(1000)
		load(t, c, s)
		v := make([]byte, valueLen)
		i := 0
		ctx := t.Context()
		if n := testing.AllocsPerRun(10_000, func() {
			if _, err := c.Put(ctx, s.at(i), v, client.PutOptions{}); err != nil {
				t.Fatal(err)
			}
			i++
		}); n != 0 {
			t.Errorf("a Put with %d copies allocates %v times, want 0", copies, n)
		}
	}
}

// A transaction of two keys over shm allocates its own state, that of a Txn, and what that reads.
func TestTxnAllocatesLittle(t *testing.T) {
	c := startStore(t, 64<<20).open(t, "shm", "")
	a, b, v := []byte("a"), []byte("b"), make([]byte, valueLen)
	ops := []client.Op{{Kind: client.OpPut, Key: a, Value: v}, {Kind: client.OpPut, Key: b, Value: v}}
	ctx := context.Background()
	for _, x := range []struct {
		name string
		most float64
		do   func() error
	}{
		{"MultiCAS", 2, func() error { return c.MultiCAS(ctx, ops) }},
		{"Txn", 5, func() error {
			return client.Txn(ctx, c, func(tx *client.Tx) error {
				err := tx.Load(a, b)
				tx.Put(a, v, client.PutOptions{})
				tx.Put(b, v, client.PutOptions{})
				return err
			})
		}},
	} {
		if n := testing.AllocsPerRun(1000, func() {
			if err := x.do(); err != nil {
				t.Fatal(err)
			}
		}); n > x.most {
			t.Errorf("a %s of two keys allocates %v times, want at most %v", x.name, n, x.most)
		}
	}
}

func keyCounts() []int { return scaled([]int{1_000, 100_000, 1_000_000}, []int{1_000}) }

func name(n int) string {
	if n >= 1_000_000 {
		return fmt.Sprintf("%dM", n/1_000_000)
	}
	return fmt.Sprintf("%dk", n/1_000)
}

type op struct {
	name string
	do   func(ctx context.Context, c *client.Client, s *keySet, i int, buf []byte) error
}

var ops = []op{
	{"Get", func(ctx context.Context, c *client.Client, s *keySet, i int, _ []byte) error {
		_, err := c.Get(ctx, s.at(i))
		return err
	}},
	{"GetInto", func(ctx context.Context, c *client.Client, s *keySet, i int, buf []byte) error {
		_, err := c.GetInto(ctx, s.at(i), buf)
		return err
	}},
	{"Put", func(ctx context.Context, c *client.Client, s *keySet, i int, buf []byte) error {
		_, err := c.Put(ctx, s.at(i), buf, client.PutOptions{})
		return err
	}},
}

func benchmark(b *testing.B, provider string, counts []int) {
	st := startStore(b, 2<<30)
	for _, n := range counts {
		b.Run(name(n), func(b *testing.B) {
			st.sized(b, fmt.Sprint(n), n)
			c := st.open(b, provider, fmt.Sprint(n))
			s := newKeySet(n)
			load(b, c, s)
			paths(b, c, s)
		})
	}
}

// paths measures what c does with keys of s, all of which it remembers. An operation is that on one key, in batches,
// too.
func paths(b *testing.B, c *client.Client, s *keySet) {
	buf := make([]byte, valueLen)
	for _, o := range ops {
		b.Run(o.name, func(b *testing.B) {
			b.ReportAllocs()
			i := 0
			ctx := b.Context()
			for b.Loop() {
				if err := o.do(ctx, c, s, i, buf); err != nil {
					b.Fatal(err)
				}
				i++
			}
		})
	}
	// Each processor has a goroutine: -cpu 2 has two.
	for _, o := range ops {
		b.Run(o.name+" in parallel", func(b *testing.B) {
			b.ReportAllocs()
			ctx, goroutines := b.Context(), atomic.Int64{}
			b.RunParallel(func(pb *testing.PB) {
				v, i := make([]byte, valueLen), int(goroutines.Add(1))*s.len()/runtime.GOMAXPROCS(0)
				for pb.Next() {
					if err := o.do(ctx, c, s, i, v); err != nil {
						b.Error(err)
						return
					}
					i++
				}
			})
		})
	}
	const batch = 16
	for _, o := range []struct {
		name string
		kind client.OpKind
	}{{"Get", client.OpGet}, {"Put", client.OpPut}} {
		b.Run(fmt.Sprintf("%s of %d", o.name, batch), func(b *testing.B) {
			b.ReportAllocs()
			x := newBatcher(s, batch, 0)
			ctx := b.Context()
			for i := 0; i < b.N; i += batch {
				if err := x.do(ctx, c, o.kind); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkShm(b *testing.B) { benchmark(b, "shm", keyCounts()) }
func BenchmarkTCP(b *testing.B) { benchmark(b, "tcp", []int{scaled(100_000, 1_000)}) }

// BenchmarkSyncMap is what shm GET is compared with: a sync.Map whose keys are
// boxed already, which is as fast as it gets, and one whose callers have bytes,
// as network services do.
func BenchmarkSyncMap(b *testing.B) {
	for _, n := range keyCounts() {
		s := newKeySet(n)
		m := newSyncMap(s)
		buf := make([]byte, valueLen)
		b.Run(name(n)+"/Get", func(b *testing.B) {
			b.ReportAllocs()
			i := 0
			for b.Loop() {
				sink = m.get(s.at(i))
				i++
			}
		})
		b.Run(name(n)+"/GetInto", func(b *testing.B) {
			b.ReportAllocs()
			i := 0
			for b.Loop() {
				m.getInto(s.at(i), buf)
				i++
			}
		})
		b.Run(name(n)+"/GetInto-boxed", func(b *testing.B) {
			i := 0
			for b.Loop() {
				m.getBoxed(int(s.order[i%len(s.order)]), buf)
				i++
			}
		})
	}
}

// sink keeps results alive: a value that leaves the benchmark is allocated.
var sink []byte

type syncMap struct {
	m     sync.Map
	boxed []any
}

func newSyncMap(s *keySet) *syncMap {
	m := &syncMap{}
	for i := range s.len() {
		k := any(string(s.key(i)))
		m.m.Store(k, value(i))
		m.boxed = append(m.boxed, k)
	}
	return m
}

func (m *syncMap) get(key []byte) []byte {
	v, ok := m.m.Load(string(key))
	if !ok {
		return nil
	}
	return append(make([]byte, 0, len(v.([]byte))), v.([]byte)...)
}

func (m *syncMap) getInto(key, dst []byte) int {
	v, _ := m.m.Load(string(key))
	return copy(dst, v.([]byte))
}

func (m *syncMap) getBoxed(i int, dst []byte) int {
	v, _ := m.m.Load(m.boxed[i])
	return copy(dst, v.([]byte))
}

// spentOn adds the processor time of both sides to b's figures; it is called before the loop, what it returns behind
// it.
func (s *store) spentOn(b *testing.B) func() {
	self, other := cpu(b, os.Getpid()), cpu(b, s.pid)
	return func() {
		b.ReportMetric(float64(cpu(b, os.Getpid())-self)/float64(b.N), "client-cpu-ns/op")
		b.ReportMetric(float64(cpu(b, s.pid)-other)/float64(b.N), "store-cpu-ns/op")
	}
}

// BenchmarkTCPMultiGet is MultiGet of 64 keys, and Do of 64 with Into, with the processor time of both
// sides.
func BenchmarkTCPMultiGet(b *testing.B) {
	st := startStore(b, 1<<30)
	s := newKeySet(scaled(100_000, 1_000))
	st.sized(b, "multi", s.len())
	for _, lanes := range []int{1, 2} {
		c := st.open(b, "tcp", "multi", lanes)
		load(b, c, s)
		b.Run(fmt.Sprintf("lanes=%d", lanes), func(b *testing.B) {
			keys := make([][]byte, 64)
			b.ReportAllocs()
			i := 0
			report := st.spentOn(b)
			for b.Loop() {
				for k := range keys {
					keys[k] = s.at(i)
					i++
				}
				for _, r := range c.MultiGet(b.Context(), keys) {
					if r.Err != nil {
						b.Fatal(r.Err)
					}
				}
			}
			report()
		})
		b.Run(fmt.Sprintf("Do/lanes=%d", lanes), func(b *testing.B) {
			x := newBatcher(s, 64, 0)
			b.ReportAllocs()
			report := st.spentOn(b)
			for b.Loop() {
				if err := x.do(b.Context(), c, client.OpGet); err != nil {
					b.Fatal(err)
				}
			}
			report()
		})
	}
}

// BenchmarkTCPCopies is Put with one copy and with two, and the processor time of both sides.
func BenchmarkTCPCopies(b *testing.B) {
	st := startStore(b, 1<<30, 2)
	s := newKeySet(scaled(100_000, 1_000))
	for _, copies := range []uint32{1, 2} {
		ns := fmt.Sprint("r", copies)
		st.namespace(b, &dirpb.CreateNamespaceRequest{Name: ns, Replicas: copies,
			BytesPerNode: uint64(copies) * 128 << 20,
			Shards:       2, Segments: uint32(s.len()*3/4/shardSlots + 1), IndexPercent: 5})
		c := st.open(b, "tcp", ns)
		load(b, c, s)
		b.Run(ns, func(b *testing.B) {
			v, i := make([]byte, valueLen), 0
			b.ReportAllocs()
			report := st.spentOn(b)
			for b.Loop() {
				if _, err := c.Put(b.Context(), s.at(i), v, client.PutOptions{}); err != nil {
					b.Fatal(err)
				}
				i++
			}
			report()
		})
	}
}

// BenchmarkTCPValues is Put and GetInto of large values, in memory all of whose pages have been used, with the
// processor time of both sides. BenchmarkShmValues is the same over shm.
func BenchmarkTCPValues(b *testing.B) { benchmarkValues(b, "tcp", 16<<20) }
func BenchmarkShmValues(b *testing.B) { benchmarkValues(b, "shm", scaled(client.MaxValueLen, 16<<20)) }

func benchmarkValues(b *testing.B, provider string, most int) {
	st := startStore(b, 2<<30)
	st.namespace(b, &dirpb.CreateNamespaceRequest{Name: "values", Replicas: 1, BytesPerNode: 1 << 30, Shards: 1,
		Segments: 1, IndexPercent: 1})
	c := st.open(b, provider, "values")
	key, v := []byte("large"), make([]byte, most)
	for range scaled(2048, 1) {
		if _, err := c.Put(b.Context(), key, v[:1<<20], client.PutOptions{}); err != nil {
			b.Fatal(err)
		}
	}
	for size := 64 << 10; size <= most; size *= 4 {
		for _, x := range []struct {
			name string
			do   func(ctx context.Context) error
		}{
			{"Put", func(ctx context.Context) error {
				_, err := c.Put(ctx, key, v[:size], client.PutOptions{})
				return err
			}},
			{"GetInto", func(ctx context.Context) error { _, err := c.GetInto(ctx, key, v); return err }},
		} {
			b.Run(fmt.Sprintf("%s of %d KiB", x.name, size>>10), func(b *testing.B) {
				b.SetBytes(int64(size))
				b.ReportAllocs()
				report := st.spentOn(b)
				for b.Loop() {
					if err := x.do(b.Context()); err != nil {
						b.Fatal(err)
					}
				}
				report()
			})
		}
	}
}

// BenchmarkShmViews is GetInto of values over shm, and a View of a version that was checked a moment ago.
func BenchmarkShmViews(b *testing.B) {
	st := startStore(b, 1<<30)
	c := st.open(b, "shm", "default")
	key, v := []byte("large"), make([]byte, 16<<20)
	for _, size := range []int{64 << 10, 1 << 20, 16 << 20} {
		if _, err := c.Put(b.Context(), key, v[:size], client.PutOptions{}); err != nil {
			b.Fatal(err)
		}
		for _, x := range []struct {
			name string
			do   func(ctx context.Context) error
		}{
			{"GetInto", func(ctx context.Context) error { _, err := c.GetInto(ctx, key, v); return err }},
			{"View", func(ctx context.Context) error { return viewed(ctx, c, key, client.ViewOptions{}) }},
			{"View unchecked", func(ctx context.Context) error {
				return viewed(ctx, c, key, client.ViewOptions{Unchecked: true})
			}},
		} {
			b.Run(fmt.Sprintf("%s of %d KiB", x.name, size>>10), func(b *testing.B) {
				b.SetBytes(int64(size))
				b.ReportAllocs()
				for b.Loop() {
					if err := x.do(b.Context()); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}

// viewed acquires a View of key and releases it.
func viewed(ctx context.Context, c *client.Client, key []byte, o client.ViewOptions) error {
	v, err := c.View(ctx, key, o)
	if err != nil {
		return err
	}
	return v.Release()
}
