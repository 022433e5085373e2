package memtest

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/devstore"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
)

const (
	// value is the size of most values here, in bytes.
	value = 60_000
	// homeLimit bounds the way home of what one client deleted and another had written.
	homeLimit = 10 * time.Second
	// reserve bounds what an idle client may keep of what it deleted: an eighth of the
	// memory, and no more than this.
	reserve = 16 * mib
	// shareLimit is how soon a second client of a full cache has its share, and share the
	// least part of the first one's rate that this is.
	shareLimit = 10 * time.Second
	share      = 0.3
	// packed is the least part of a namespace's memory that is live when it is full; packedShort
	// where placement groups are small, and other tests run beside this one.
	packed, packedShort = 0.92, 0.85
)

func TestMemory(t *testing.T) {
	for _, c := range []struct {
		name string
		run  func(*testing.T)
	}{
		{"write-and-delete", func(t *testing.T) { writeAndDelete(t, "shm") }},
		{"write-and-delete-tcp", func(t *testing.T) { writeAndDelete(t, "tcp") }},
		{"overwrite-by-another", overwrite},
		{"cache-set-and-del", cacheSetAndDel},
		{"load-and-flush", loadAndFlush},
		{"expiry", expiry},
		{"second-client-of-a-full-cache", secondClient},
		{"soak", soak},
		{"small-keys", smallKeys},
		{"all-placement-groups", allPlacementGroups},
	} {
		t.Run(c.name, c.run)
	}
	// These wait for leases most of the time, and do it together.
	t.Run("killed", func(t *testing.T) {
		for _, c := range []struct {
			name string
			run  func(*testing.T)
		}{
			{"after-delete", killedAfterDelete},
			{"when-full", killedWhenFull},
			{"transactions", killedInTransactions},
		} {
			t.Run(c.name, func(t *testing.T) {
				t.Parallel()
				c.run(t)
			})
		}
	})
}

// The client that deletes is not the one that writes: at most one key is alive.
func writeAndDelete(t *testing.T, provider string) {
	r := newRig(t, "default")
	a, b := r.open("a", provider), r.open("b", provider)
	for i := int64(0); i*value < r.total(); i++ {
		key := keyOf("k", int(i), value)
		if a.put(key, value, 0) != nil || b.drop(key, false) != nil {
			break
		}
	}
	r.check()
}

// Overwriting gives a place back to another client than the one that had taken it.
func overwrite(t *testing.T) {
	r := newRig(t, "default")
	a, b := r.open("a"), r.open("b")
	for i := int64(0); i*value < r.total(); i++ {
		if a.put("key", value, 0) != nil || b.put("key", 100, 0) != nil {
			break
		}
	}
	r.check()
	if err := a.checkKey("key", 100, false); err != nil {
		t.Error(err)
	}
}

// Two gateways, of which one serves who sets and the other who deletes. Nearly all of the
// cache is free, so hardly anything is evicted: a SET that lacks memory may, when the directory has
// not heard yet how much is on its way.
func cacheSetAndDel(t *testing.T) {
	r := newRig(t, "cache")
	a, b := r.open("a"), r.open("b")
	for i := int64(0); i*value < r.total(); i++ {
		key := keyOf("k", int(i), value)
		if a.put(key, value, 0) != nil || b.drop(key, true) != nil {
			break
		}
	}
	if n := a.c.Stats().Evicted; n > 20 {
		t.Errorf("%d values were evicted from a cache of which nearly all is free", n)
	}
	r.check()
}

// mixed is a size that depends on i alone, of mostly small values.
func mixed(i int) int {
	rng := rand.New(rand.NewPCG(uint64(i), 1))
	if rng.IntN(4) > 0 {
		return 100 + rng.IntN(8<<10)
	}
	return 100 + rng.IntN(64<<10)
}

// Bulk loads by clients that close, flushed by one that stays.
func loadAndFlush(t *testing.T) {
	const live = 0.6
	r := newRig(t, "default")
	flusher := r.open("flusher")
	for cycle := 0; float64(cycle)*live < scale().times; cycle++ {
		began := time.Now()
		loader := r.open(fmt.Sprintf("loader%d", cycle))
		n := loader.fill(fmt.Sprintf("c%d", cycle), live, mixed)
		loader.close()
		loaded := time.Since(began)
		if flushed := flusher.flush(nil); flushed == 0 || flushed > n {
			t.Errorf("cycle %d: %d keys flushed of %d", cycle, flushed, n)
		}
		t.Logf("cycle %d: loaded in %v, flushed in %v", cycle, loaded.Round(time.Millisecond),
			(time.Since(began) - loaded).Round(time.Millisecond))
	}
}

// A client that is killed held most of the memory, and nothing of it is linked.
func killedAfterDelete(t *testing.T) {
	r := newRig(t, "default")
	for round := range scale().rounds {
		c := r.spawn(fmt.Sprintf("victim%d", round))
		count := int(0.85 * float64(r.heap) / float64(unitsOf(20, value)*layout.UnitSize))
		prefix := fmt.Sprintf("v%d", round)
		r.order(c, "fill", prefix, value, count)
		r.order(c, "drop", prefix, value, count)
		c.kill()
		began := time.Now()
		u := r.open(fmt.Sprintf("heir%d", round))
		u.fill(fmt.Sprintf("h%d", round), 0.75, func(int) int { return value })
		t.Logf("round %d: 75 %% live %v after the kill", round, time.Since(began).Round(time.Millisecond))
		u.flush(nil)
		u.close()
	}
}

// order has a client process write or delete keys, all of which must succeed.
func (r *rig) order(c *child, verb, prefix string, size, count int) {
	r.t.Helper()
	if verb == "fill" {
		for i := range count {
			r.live.put(keyOf(prefix, i, size), size, 0)
		}
	}
	c.tell(verb, prefix, size, count)
	n, err := c.reply()
	r.wroteElsewhere(verb, n, size)
	if verb == "fill" {
		for i := n; i < count; i++ {
			r.live.drop(keyOf(prefix, i, size))
		}
	} else {
		for i := range n {
			r.live.drop(keyOf(prefix, i, size))
		}
	}
	if err != nil {
		r.fail("a client process stops at key %d of %d to %s, with %.1f %% live: %v", n, count, verb, 100*r.part(), err)
		r.check()
	}
}

func (r *rig) wroteElsewhere(verb string, n, size int) {
	if verb == "fill" {
		r.mu.Lock()
		r.mu.written += int64(n) * int64(size)
		r.mu.Unlock()
	}
}

// Every writer is killed when the memory is full; what it held is all that there is. The next client
// deletes some and writes values of another size.
func killedWhenFull(t *testing.T) {
	const (
		writers    = 4
		size, next = 16_000, 50_000
	)
	r := newRig(t, "default")
	for round := range (scale().rounds + 2) / 3 {
		count := int(float64(r.heap) / float64(unitsOf(20, size)*layout.UnitSize)) // more than fits
		var all []*child
		for w := range writers {
			all = append(all, r.spawn(fmt.Sprintf("writer%d.%d", round, w)))
		}
		for w, c := range all {
			c.tell("fill", fmt.Sprintf("w%d.%d", round, w), size, count)
		}
		for w, c := range all {
			n, err := c.reply()
			if err == nil || !strings.Contains(err.Error(), client.ErrFull.Error()) {
				r.fail("a writer ends with %d values, and not because memory is full: %v", n, err)
			}
			r.wroteElsewhere("fill", n, size)
			for i := range n {
				r.live.put(keyOf(fmt.Sprintf("w%d.%d", round, w), i, size), size, 0)
			}
		}
		full := r.part()
		if full < mayFail {
			r.fail("the memory counts as full with %.1f %% live", 100*full)
		}
		r.check()
		for _, c := range all {
			c.kill()
		}
		began := time.Now()
		u := r.open(fmt.Sprintf("heir%d", round))
		n := u.flush(func(key []byte) bool { return numberOf(key)%5 < 2 })
		left := r.part()
		u.fill(fmt.Sprintf("n%d", round), 0.75, func(int) int { return next })
		t.Logf("round %d: killed at %.1f %%, %d keys deleted, which leaves %.1f %%; 75 %% live %v after the kill",
			round, 100*full, n, 100*left,
			time.Since(began).Round(time.Millisecond))
		u.flush(nil)
		u.close()
	}
}

// Client processes perform transactions, which commit, are refused or are aborted by each other, and single writes of
// the same keys. A process is killed amid them. The memory that it held, with intents and all that they name, comes
// back.
func killedInTransactions(t *testing.T) {
	const (
		writers = 3
		size    = 50_000
	)
	r := newRig(t, "default")
	for round := range scale().rounds {
		prefix := fmt.Sprintf("t%d", round)
		for i := range mixKeys + 1 {
			r.live.put(keyOf(prefix, i, size), size, 0) // at most
		}
		var all []*child
		for w := range writers {
			all = append(all, r.spawn(fmt.Sprintf("mixer%d.%d", round, w)))
		}
		// A transaction and a write put about three values of half the size.
		count := int(r.total() / (size / 2 * 3) / (writers - 1))
		all[0].tell("mix", prefix, size, math.MaxInt32) // until it is killed
		for _, c := range all[1:] {
			c.tell("mix", prefix, size, count)
		}
		for _, c := range all[1:] {
			n, err := c.reply()
			r.wroteElsewhere("fill", 3*n, size/2)
			if err != nil {
				r.fail("a client process stops after %d of %d transactions, with %.1f %% live at most: %v", n, count,
					100*r.part(), err)
				r.check()
			}
		}
		all[0].kill()
		began := time.Now()
		u := r.open(fmt.Sprintf("heir%d", round))
		u.fill(fmt.Sprintf("h%d", round), 0.75, func(int) int { return value })
		took := time.Since(began)
		u.flush(nil)
		for i := range mixKeys + 1 {
			r.live.drop(keyOf(prefix, i, size)) // if it was not there
		}
		for _, c := range all[1:] {
			c.kill()
		}
		t.Logf("round %d: %d transactions, 75 %% live %v after the kill", round, (writers-1)*count,
			took.Round(time.Millisecond))
		u.close()
		// No key is left, so that nothing is linked once the killed one's intents are settled: an insert that was not
		// decided is in no scan. A janitor may have free memory, and a little that is lost is recalled when somebody
		// needs it.
		r.until("nothing is linked", scale().limit, func() string {
			for _, g := range r.status().GetUsage() {
				if slices.Contains(r.pgs, g.GetPgId()) && (!g.GetEstimated() || g.GetLiveUnits() > 0) {
					return fmt.Sprintf("placement group %d: of %d units granted, %d are live, %d lost, %d leaked",
						g.GetPgId(), g.GetGrantedUnits(),
						g.GetLiveUnits(), g.GetLostUnits(), g.GetLeakedUnits())
				}
			}
			return ""
		})
	}
}

// Values live for a second, about half of the memory at a time.
func expiry(t *testing.T) {
	r := newRig(t, "default")
	u := r.open("a")
	var wg sync.WaitGroup
	var next atomic.Int64
	for range 2 {
		wg.Go(func() {
			for r.ctx.Err() == nil {
				i := next.Add(1) - 1
				if i*value >= r.total() {
					return
				}
				if !r.wait(func() bool { return r.part() <= 0.5 }) { // the pace
					return
				}
				if u.put(keyOf("k", int(i), value), value, time.Second) != nil {
					return
				}
			}
		})
	}
	wg.Wait()
	r.check()
}

// A client that comes to a full cache gets its share.
func secondClient(t *testing.T) {
	const (
		size   = 4000
		window = 10_000 // sets, of both together
	)
	r := newRig(t, "cache")
	var sets [2]atomic.Int64
	var wg sync.WaitGroup
	done := make(chan struct{})
	run := func(i int, u *user) {
		for range 2 {
			wg.Go(func() {
				for r.ctx.Err() == nil {
					select {
					case <-done:
						return
					default:
					}
					n := sets[i].Add(1)
					b := stamp(nil, "", size)
					began := time.Now()
					_, err := u.c.Put(r.ctx, []byte(keyOf(u.name, int(n), size)), b, client.PutOptions{})
					if r.wrote(time.Since(began), size, err); err != nil {
						r.refused(u, err, 0) // a cache evicts
						return
					}
				}
			})
		}
	}
	a := r.open("first")
	run(0, a)
	r.until("the cache is full and evicts", scale().limit, func() string {
		if float64(sets[0].Load()*size) < scale().times/2*float64(r.heap) || a.c.Stats().Evicted == 0 {
			return fmt.Sprintf("%d sets", sets[0].Load())
		}
		return ""
	})
	b := r.open("second")
	began := time.Now()
	run(1, b)
	// The work of both in the same window is compared, so that a busy machine slows both; and not by
	// chance: in most windows of several in a row.
	const row, most = 5, 3
	var seen []string
	var had []bool
	kept := 0
	for i := 0; i < row || time.Since(began) < shareLimit; i++ {
		x, y := sets[0].Load(), sets[1].Load()
		if !r.wait(func() bool { return sets[0].Load()+sets[1].Load() >= x+y+window }) {
			break
		}
		x, y = sets[0].Load()-x, sets[1].Load()-y
		seen = append(seen, fmt.Sprintf("%d of %d", y, x))
		had = append(had, float64(y) >= share*float64(x))
		kept = 0
		for _, ok := range had[max(0, len(had)-row):] {
			if ok {
				kept++
			}
		}
		if kept >= most {
			break
		}
	}
	took := time.Since(began)
	granted := float64(b.c.Stats().GrantedUnits*layout.UnitSize) / mib
	if kept < most {
		r.fail("the second client, with %.1f MiB granted, has no %.2f of the first one's rate in %d windows of %d "+
			"within %v; its sets of the first one's in windows of %d sets: %q",
			granted, share, most, row, shareLimit, window, seen)
	} else {
		t.Logf("the second client, with %.1f MiB granted, has its share after %v; its sets of the first one's in "+
			"windows of %d sets: %q",
			granted, took.Round(time.Millisecond), window, seen)
	}
	close(done)
	wg.Wait()
	r.check()
}

// bag is keys that nobody is using right now.
type bag struct {
	mu   sync.Mutex
	keys []held
}

type held struct {
	key     string
	size    int
	expires bool
}

func (b *bag) add(k held) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.keys = append(b.keys, k)
}

// take takes any out.
func (b *bag) take(rng *rand.Rand) (k held, ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.keys) == 0 {
		return k, false
	}
	i := rng.IntN(len(b.keys))
	k = b.keys[i]
	b.keys[i] = b.keys[len(b.keys)-1]
	b.keys = b.keys[:len(b.keys)-1]
	return k, true
}

// Four clients write, overwrite, read and delete each other's values at random, with and
// without a time to live, and keep 10 to 30 % live.
func soak(t *testing.T) {
	const clients, waves = 4, 6
	r := newRig(t, "default")
	var b bag
	var wg sync.WaitGroup
	var written atomic.Int64
	for c := range clients {
		u := r.open(fmt.Sprintf("c%d", c))
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(7, uint64(c)))
			for i := 0; r.ctx.Err() == nil && written.Load() < r.total(); i++ {
				// Up and down between 10 and 30 %.
				phase := float64(written.Load()) / float64(r.total()) * waves
				if phase -= float64(int(phase)); phase > 0.5 {
					phase = 1 - phase
				}
				target := 0.1 + 0.4*phase
				k, some := b.take(rng)
				switch what := rng.IntN(10); {
				case some && what == 0:
					if u.checkKey(k.key, k.size, k.expires) != nil {
						return
					}
				case some && r.part() > target:
					if u.drop(k.key, k.expires) != nil {
						return
					}
					continue
				default:
					if !some || what < 8 {
						if some {
							b.add(k)
						}
						k = held{key: fmt.Sprintf("c%d/%d", c, i)}
					}
					k.size = 100 + rng.IntN(200_000)
					if rng.IntN(2) == 0 {
						k.size = 100 + rng.IntN(4000)
					}
					var ttl time.Duration
					if rng.IntN(5) == 0 {
						ttl = time.Duration(100+rng.IntN(2000)) * time.Millisecond
					}
					k.expires = ttl > 0
					if u.put(k.key, k.size, ttl) != nil {
						return
					}
					written.Add(int64(k.size))
				}
				b.add(k)
			}
		})
	}
	wg.Wait()
	r.check()
}

// Many small values written by one client, deleted by a second, written again by a third.
// Places of deleted records do not stay with the client that deleted them.
func smallKeys(t *testing.T) {
	const batch = 250
	size := scale().keySize
	r := newRig(t, "default")
	load := func(u *user) time.Duration {
		began := time.Now()
		var wg sync.WaitGroup
		var next atomic.Int64
		for range 2 {
			wg.Go(func() {
				for r.ctx.Err() == nil {
					from := int(next.Add(batch)) - batch
					if from >= scale().keys {
						return
					}
					var kvs []client.KV
					for i := from; i < min(from+batch, scale().keys); i++ {
						key := keyOf("s", i, size)
						r.live.put(key, size, 0)
						kvs = append(kvs, client.KV{Key: []byte(key), Value: stamp(nil, key, size)})
					}
					began := time.Now()
					res := u.c.MultiPut(r.ctx, kvs)
					i := max(0, slices.IndexFunc(res, func(x client.Result) bool { return x.Err != nil }))
					if r.wrote(time.Since(began), int64(size*len(kvs)), res[i].Err); res[i].Err != nil {
						r.refused(u, fmt.Errorf("%s: %w", kvs[i].Key, res[i].Err), r.part())
						return
					}
				}
			})
		}
		wg.Wait()
		r.check()
		return time.Since(began)
	}
	a, b := r.open("a"), r.open("b")
	loaded := load(a)
	began := time.Now()
	if n := b.flush(nil); n != scale().keys {
		t.Errorf("%d keys deleted, want %d", n, scale().keys)
	}
	flushed, deleted := time.Since(began), time.Now()
	bound := min(reserve, r.heap/8)
	// The writer has them in use by its own account until they are home.
	r.until("what was deleted is home", homeLimit, func() string {
		used, held := int64(a.c.Stats().LiveUnits)*layout.UnitSize, b.held()
		if max(used, held) > bound {
			return fmt.Sprintf("%.1f MiB are in use for the client that wrote, %.1f with the one that deleted; want "+
				"at most %.1f of each",
				float64(used)/mib, float64(held)/mib, float64(bound)/mib)
		}
		return ""
	})
	home := time.Since(deleted)
	again := load(r.open("c")) // while both are there
	t.Logf("%d keys: loaded in %v, flushed in %v, home %v later, loaded again in %v", scale().keys,
		loaded.Round(time.Millisecond),
		flushed.Round(time.Millisecond), home.Round(time.Millisecond), again.Round(time.Millisecond))
}

// Seven placement groups share sixteen shards, so some have three and some two. The
// memory of all of them is used before a write fails.
func allPlacementGroups(t *testing.T) {
	r := newStore(t, devstore.Options{Nodes: 7, CapacityBytes: scale().wideNode})
	r.create(&dirpb.CreateNamespaceRequest{Name: "wide", Replicas: 1, Shards: 16,
		BytesPerNode: uint64(scale().wideNode)})
	r.use("wide")
	u := r.open("a")
	rng := rand.New(rand.NewPCG(11, 0))
	var err error
	for i := 0; err == nil; i++ {
		size := 1000 + rng.IntN(63_000)
		b := stamp(nil, "", size)
		key := keyOf("k", i, size)
		began := time.Now()
		_, err = u.c.Put(r.ctx, []byte(key), b, client.PutOptions{})
		if r.wrote(time.Since(began), int64(size), err); err == nil {
			r.live.put(key, size, 0)
		}
	}
	t.Logf("the first write fails with %.1f %% live, after %.1f MiB: %v", 100*r.part(), float64(r.live.bytes())/mib,
		err)
	if !errors.Is(err, client.ErrFull) {
		r.fail("%v", err)
	}
	least := packed
	if scale().times < 10 {
		least = packedShort
	}
	if r.part() < least {
		r.fail("a write fails with %.1f %% live, want at least %.0f %%: %v", 100*r.part(), 100*least, err)
	}
}
