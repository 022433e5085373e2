package bench

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/devstore"
	"github.com/kvd-project/kvd/internal/dirclient"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/evict/evicttest"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/ycsb"
)

var (
	cachedKeys = scaled(100_000, 4_000)
	cacheUses  = scaled(400_000, 8_000) // accesses a trace; hits count after the first quarter
)

const (
	cachedBytes = 1000 // a value
	// cachedUnits is what the record of one takes, in units.
	cachedUnits = (cachedBytes + ycsb.KeyLen + layout.RecordHeaderSize + layout.UnitSize - 1) / layout.UnitSize
	// hitSeed is none that the policy was tuned on.
	hitSeed = 20261121
	// hitSlack is how many points below the best of the others a cache may be.
	hitSlack = 2.0
)

// TestHitRatio runs traces through a real store used as a cache aside: Get, and Put what
// was not found. Beside it run exact LRU and LFU, and redis-server with allkeys-lfu, each
// with as many keys as the store held on average. It fails where the store hits less
// often than the best of them, by more than hitSlack points.
//
// Of 300,000 accesses that count, chance moves a ratio by 0.1 points (one standard
// deviation, were they independent), and all see the same ones; how the store is scheduled
// moved the difference by up to 0.5 between two runs.
func TestHitRatio(t *testing.T) {
	gated(t, "hit-ratio")
	if _, err := exec.LookPath("redis-server"); err != nil {
		t.Fatalf("%v: make hit-ratio installs it", err)
	}
	began := time.Now()
	s, err := devstore.Start(t.Context(),
		devstore.Options{Providers: []string{"shm"}, EpochInterval: 10 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "\ntrace\tcache\tresident\tLRU\tLFU\tRedis\tkvd\tagainst the best\tuses/s\tnotes a use\tRedis "+
		"held\t")
	for _, percent := range scaled([]int{1, 5, 10}, []int{10}) {
		capacity := cachedKeys * percent / 100
		for i, trace := range []func() evicttest.Trace{
			func() evicttest.Trace { return evicttest.Zipf(hitSeed, cachedKeys, 0.99) },
			func() evicttest.Trace { return evicttest.Scans(hitSeed, cachedKeys, 0.99, capacity, 6*capacity) },
			func() evicttest.Trace {
				return evicttest.Shifting(hitSeed, cachedKeys, 0.99, 4*capacity+cachedKeys, cachedKeys/50)
			},
		} {
			t.Run(fmt.Sprintf("%s, %d %%", trace().Name, percent), func(t *testing.T) {
				c := newStoreCache(t, s, fmt.Sprintf("size%d-%d", percent, i), capacity)
				ours := hitRatio(t, trace(), c)
				resident := c.resident()
				rd := newRedisCache(t, resident)
				theirs := hitRatio(t, trace(), rd)
				lru := hitRatio(t, trace(), exact{evicttest.NewLRU(resident)})
				lfu := hitRatio(t, trace(), exact{evicttest.NewLFU(resident)})
				best := max(lru, lfu, theirs)
				fmt.Fprintf(w, "%s\t%d %%\t%d\t%.1f\t%.1f\t%.1f\t%.1f\t%+.1f\t%.0f k\t%.2f\t%d\t\n", trace().Name,
					percent, resident,
					lru, lfu, theirs, ours, ours-best, float64(cacheUses)/1e3/c.took.Seconds(),
					float64(c.c.Stats().Notes)/float64(cacheUses), rd.resident())
				if min(lru, lfu, theirs, ours) <= 0 {
					t.Error("a cache without hits")
				}
				if smoke() {
					return // a cache so small says nothing of a policy
				}
				if held := rd.resident(); max(held-resident, resident-held) > resident/50 {
					t.Errorf("redis-server held %d keys, want %d, give or take 2 %%", held, resident)
				}
				if ours < best-hitSlack {
					t.Errorf("%.1f %% of hits, others reach %.1f", ours, best)
				}
			})
		}
	}
	w.Flush()
	fmt.Printf("\n%s\n", machine(began))
}

// hitter is a cache under test. use uses keys one after the other, takes in what is not
// there, and counts those that were. Between two calls it may be looked at.
type hitter interface {
	use(tb testing.TB, keys []uint64) (hits int)
}

// hitRatio is the percentage of hits after the first quarter of a trace.
func hitRatio(tb testing.TB, tr evicttest.Trace, c hitter) float64 {
	tb.Helper()
	const batch = 100
	keys, hits := make([]uint64, batch), 0
	for i := 0; i < cacheUses; i += batch {
		for j := range keys {
			keys[j] = tr.Next()
		}
		if n := c.use(tb, keys); i >= cacheUses/4 {
			hits += n
		}
	}
	return 100 * float64(hits) / float64(cacheUses-cacheUses/4)
}

// exact is a policy without a store.
type exact struct{ evicttest.Cache }

func (e exact) use(_ testing.TB, keys []uint64) (hits int) {
	for _, k := range keys {
		if e.Access(k) {
			hits++
		}
	}
	return hits
}

// residency is how many keys a cache held, on average.
type residency struct{ sum, looks, uses int }

// due counts uses, and says when to look: now and then, once hits count.
func (r *residency) due(n int) bool {
	before := r.uses
	r.uses += n
	every := cacheUses / 100
	return r.uses >= cacheUses/4 && before/every != r.uses/every
}

func (r *residency) noteResident(n int) {
	r.sum += n
	r.looks++
}

func (r *residency) resident() int { return r.sum / max(r.looks, 1) }

// storeCache is a namespace that evicts.
type storeCache struct {
	residency
	c     *client.Client
	key   []byte
	value []byte
	took  time.Duration // using it, not looking at it
}

// newStoreCache makes a cache for about so many records.
func newStoreCache(tb testing.TB, s *devstore.Store, name string, records int) *storeCache {
	tb.Helper()
	dir, err := dirclient.Open(dirclient.Options{Addrs: s.Directory()})
	if err != nil {
		tb.Fatal(err)
	}
	defer dir.Close()
	bytes := uint64(records) * cachedUnits * layout.UnitSize
	if err := dir.Call(tb.Context(), func(ctx context.Context, c dirpb.DirectoryClient) error {
		_, err := c.CreateNamespace(ctx, &dirpb.CreateNamespaceRequest{
			Name: name, Mode: dirpb.NamespaceMode_NAMESPACE_CACHE, Replicas: 1, BytesPerNode: bytes*4 + 8<<20,
			LimitBytes: bytes * 5 / 4,
			// Evictions look at groups: what they see depends on how many records those hold. Here it is 70 %.
			Shards: 1, Segments: uint32(records*10/7/shardSlots + 1),
		})
		return err
	}); err != nil {
		tb.Fatal(err)
	}
	c, err := client.Open(tb.Context(), client.Options{Directory: s.Directory(), Namespace: name, Devices: s.Devices()})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := c.Close(); err != nil {
			tb.Error(err)
		}
	})
	return &storeCache{c: c, value: make([]byte, cachedBytes)}
}

func (c *storeCache) use(tb testing.TB, keys []uint64) (hits int) {
	began := time.Now()
	for _, k := range keys {
		c.key = ycsb.Key(c.key[:0], k)
		it, err := c.c.Get(tb.Context(), c.key)
		switch {
		case err == nil:
			hits++
			if len(it.Value) != len(c.value) {
				tb.Fatalf("get %q: %d bytes, want %d", c.key, len(it.Value), len(c.value))
			}
		case errors.Is(err, client.ErrNotFound):
			if _, err := c.c.Put(tb.Context(), c.key, c.value, client.PutOptions{}); err != nil {
				tb.Fatal(err)
			}
		default:
			tb.Fatal(err)
		}
	}
	c.took += time.Since(began)
	if c.due(len(keys)) {
		n, err := c.c.Count(tb.Context())
		if err != nil {
			tb.Fatal(err)
		}
		c.noteResident(int(n))
	}
	return hits
}

// redisCache is a redis-server that forgets the least frequently used.
type redisCache struct {
	residency
	*redisServer
	c      *redis.Client
	aside  string // the script's name
	most   int    // keys
	memory int64  // maxmemory
	each   int64  // bytes a key takes
}

// newRedisCache starts one that holds so many keys: that much memory it may use. Hash
// tables and buffers take their part, so it is corrected on the way.
func newRedisCache(tb testing.TB, most int) *redisCache {
	tb.Helper()
	r := &redisCache{redisServer: startRedis(tb), most: most}
	r.c = redis.NewClient(&redis.Options{Network: "unix", Addr: r.sock, PoolSize: 1})
	tb.Cleanup(func() { r.c.Close() })
	ctx := tb.Context()
	var err error
	// A script does what a client does in two commands; Redis evicts before a script, as before any command.
	if r.aside, err = r.c.ScriptLoad(ctx, fmt.Sprintf(
		`if redis.call('GET', KEYS[1]) then return 1 end redis.call('SET', KEYS[1], string.rep('x', %d)) return 0`, cachedBytes)).Result(); err != nil {
		tb.Fatal(err)
	}
	empty := r.used(tb)
	keys := make([]uint64, most)
	for i := range keys {
		keys[i] = uint64(i)
	}
	for lo := 0; lo < most; lo += 100 {
		r.pipeline(tb, keys[lo:min(lo+100, most)])
	}
	r.memory = r.used(tb)
	r.each = (r.memory - empty) / int64(most)
	for _, q := range [][]any{{"FLUSHALL"}, {"CONFIG", "SET", "maxmemory-policy", "allkeys-lfu"},
		{"CONFIG", "SET", "maxmemory", r.memory}} {
		if err := r.c.Do(ctx, q...).Err(); err != nil {
			tb.Fatal(err)
		}
	}
	return r
}

func (r *redisCache) used(tb testing.TB) int64 {
	tb.Helper()
	info, err := r.c.Info(tb.Context(), "memory").Result()
	if err != nil {
		tb.Fatal(err)
	}
	for line := range strings.Lines(info) {
		if v, ok := strings.CutPrefix(strings.TrimSpace(line), "used_memory:"); ok {
			n, err := strconv.ParseInt(v, 10, 64)
			if err != nil {
				tb.Fatal(err)
			}
			return n
		}
	}
	tb.Fatalf("redis-server's memory is %q", info)
	return 0
}

func (r *redisCache) pipeline(tb testing.TB, keys []uint64) (hits int) {
	tb.Helper()
	p := r.c.Pipeline()
	for _, k := range keys {
		p.EvalSha(tb.Context(), r.aside, []string{string(ycsb.Key(nil, k))})
	}
	cmds, err := p.Exec(tb.Context())
	if err != nil {
		tb.Fatal(err)
	}
	for _, c := range cmds {
		n, err := c.(*redis.Cmd).Int()
		if err != nil {
			tb.Fatal(err)
		}
		hits += n
	}
	return hits
}

func (r *redisCache) use(tb testing.TB, keys []uint64) (hits int) {
	hits = r.pipeline(tb, keys)
	before := r.uses
	due := r.due(len(keys))
	if before/1000 == r.uses/1000 && !due {
		return hits
	}
	n, err := r.c.DBSize(tb.Context()).Result()
	if err != nil {
		tb.Fatal(err)
	}
	if due {
		r.noteResident(int(n))
	}
	// The memory follows, gently, once it is full.
	if off := int64(r.most) - n; r.uses > cacheUses/8 && max(off, -off) > int64(r.most)/200 {
		r.memory += cmp.Or(off/4, off) * r.each
		if err := r.c.ConfigSet(tb.Context(), "maxmemory", strconv.FormatInt(r.memory, 10)).Err(); err != nil {
			tb.Fatal(err)
		}
	}
	return hits
}
