package near_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/client/clienttest"
	"github.com/kvd-project/kvd/client/near"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// clock is the time, as the test sets it.
type clock struct{ atomic.Int64 }

func newClock() *clock {
	c := &clock{}
	c.Store(1_000_000)
	return c
}

func (c *clock) now() time.Time       { return time.UnixMilli(c.Load()) }
func (c *clock) pass(d time.Duration) { c.Add(d.Milliseconds()) }
func key(i int) []byte                { return fmt.Appendf(nil, "key%d", i) }
func value(it client.Item) (s string) { return string(it.Value) }
func open(t testing.TB, api client.API, o near.Options) *near.Cache {
	t.Helper()
	c, err := near.New(api, o)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func put(t testing.TB, s client.API, k, v string, o client.PutOptions) {
	t.Helper()
	if _, err := s.Put(t.Context(), []byte(k), []byte(v), o); err != nil {
		t.Fatal(err)
	}
}

func want(t testing.TB, c client.API, k, v string) {
	t.Helper()
	it, err := c.Get(t.Context(), []byte(k))
	if err != nil || string(it.Value) != v {
		t.Fatalf("get %q: %q, %v, want %q", k, it.Value, err, v)
	}
	clear(it.Value) // it is ours
}

func wantNone(t testing.TB, c client.API, k string) {
	t.Helper()
	if it, err := c.Get(t.Context(), []byte(k)); !errors.Is(err, client.ErrNotFound) {
		t.Fatalf("get %q: %q, %v, want nothing", k, it.Value, err)
	}
}

func TestOptions(t *testing.T) {
	for _, o := range []near.Options{{TTL: time.Second}, {MaxBytes: 1}, {MaxBytes: 1, TTL: -1, Validate: true}} {
		if _, err := near.New(clienttest.New(clienttest.Options{}), o); !errors.Is(err, client.ErrInvalid) {
			t.Errorf("%+v: %v", o, err)
		}
	}
}

// An entry is served for TTL, and no longer.
func TestStaleness(t *testing.T) {
	for _, validate := range []bool{false, true} {
		now := newClock()
		store := clienttest.New(clienttest.Options{Now: now.now})
		c := open(t, store, near.Options{MaxBytes: 1 << 20, TTL: 100 * time.Millisecond, Validate: validate,
			Now: now.now})
		wantNone(t, c, "k")
		put(t, store, "k", "1", client.PutOptions{Flags: 4})
		want(t, c, "k", "1") // absence is not remembered
		put(t, store, "k", "2", client.PutOptions{})
		now.pass(99 * time.Millisecond)
		want(t, c, "k", "1")
		if it, err := c.Get(t.Context(), []byte("k")); it.Flags != 4 || it.Version == 0 || err != nil {
			t.Fatalf("%+v, %v", it, err)
		}
		now.pass(time.Millisecond)
		want(t, c, "k", "2")
		now.pass(100 * time.Millisecond)
		want(t, c, "k", "2")
		st := c.Stats()
		wanted := near.Stats{Hits: 2, Misses: 4, Bytes: st.Bytes, Keys: 1}
		if validate {
			wanted.Misses, wanted.Validations, wanted.Unchanged = 2, 2, 1
		}
		if st != wanted {
			t.Errorf("validate %v: %+v, want %+v", validate, st, wanted)
		}
		if err := store.Delete(t.Context(), []byte("k")); err != nil {
			t.Fatal(err)
		}
		now.pass(100 * time.Millisecond)
		wantNone(t, c, "k")
		if st := c.Stats(); st.Keys != 0 {
			t.Errorf("%+v after a delete", st)
		}
	}
}

// With Validate and TTL 0 nothing old is ever served.
func TestAlwaysAsks(t *testing.T) {
	store := clienttest.New(clienttest.Options{})
	c := open(t, store, near.Options{MaxBytes: 1 << 20, Validate: true})
	for i := range 10 {
		put(t, store, "k", strconv.Itoa(i), client.PutOptions{})
		want(t, c, "k", strconv.Itoa(i))
		want(t, c, "k", strconv.Itoa(i))
	}
	if st := c.Stats(); st.Hits != 0 || st.Misses != 1 || st.Validations != 19 || st.Unchanged != 10 {
		t.Fatalf("%+v", st)
	}
}

// An entry is not served at its Expires, however long its TTL here.
func TestExpiry(t *testing.T) {
	now := newClock()
	store := clienttest.New(clienttest.Options{Now: now.now})
	c := open(t, store, near.Options{MaxBytes: 1 << 20, TTL: time.Hour, Now: now.now})
	put(t, store, "theirs", "x", client.PutOptions{TTL: 50 * time.Millisecond})
	put(t, c, "ours", "x", client.PutOptions{TTL: 50 * time.Millisecond})
	now.pass(49 * time.Millisecond)
	for _, k := range []string{"theirs", "ours"} {
		want(t, c, k, "x")
		want(t, c, k, "x")
		a, _ := c.Get(t.Context(), []byte(k))
		b, _ := store.Get(t.Context(), []byte(k))
		if !a.Expires.Equal(b.Expires) || a.Version != b.Version {
			t.Errorf("%s: %+v here, %+v in the store", k, a, b)
		}
	}
	// The store shall not be what says no.
	store.Fail(func(_ context.Context, o *client.Op) clienttest.Fault {
		return clienttest.Fault{Err: client.ErrUnavailable}
	})
	now.pass(time.Millisecond)
	for _, k := range []string{"theirs", "ours"} {
		if it, err := c.Get(t.Context(), []byte(k)); !errors.Is(err, client.ErrUnavailable) {
			t.Errorf("%s was served at its expiry: %q, %v", k, it.Value, err)
		}
	}
}

// Values written through the Cache are read through it.
func TestOwnWrites(t *testing.T) {
	store := clienttest.New(clienttest.Options{})
	c := open(t, store, near.Options{MaxBytes: 1 << 20, TTL: time.Hour})
	ctx := t.Context()
	k := []byte("k")
	check := func(v string) { t.Helper(); want(t, c, "k", v); want(t, c, "k", v) }
	put(t, c, "k", "1", client.PutOptions{})
	check("1")
	if _, err := c.PutIfAbsent(ctx, k, []byte("no"), client.PutOptions{}); !errors.Is(err, client.ErrExists) {
		t.Fatal(err)
	}
	check("1")
	it, err := c.Get(ctx, k)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.CompareAndSwap(ctx, k, it.Version, []byte("2"), client.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	check("2")
	if st := c.Stats(); st.Misses != 1 { // the refused put dropped what there was
		t.Fatalf("%+v: own writes were not kept", st)
	}
	for v, f := range map[string]func() error{
		"3": func() error { _, err := c.Incr(ctx, k, 1); return err },
		"4": func() error { return c.MultiPut(ctx, []client.KV{{Key: k, Value: []byte("4")}})[0].Err },
		"5": func() error {
			ops := []client.Op{{Kind: client.OpPut, Key: k, Value: []byte("5")}}
			c.Do(ctx, ops)
			return ops[0].Err
		},
		"7": func() error {
			return client.Txn(ctx, c, func(tx *client.Tx) error {
				tx.Put(k, []byte("7"), client.PutOptions{})
				tx.Delete([]byte("other"))
				return nil
			})
		},
		"6": func() error {
			_, err := c.Update(ctx, k, func(client.Item, bool) (client.Change, error) {
				return client.Change{Value: []byte("6")}, nil
			})
			return err
		},
	} {
		if v == "3" {
			put(t, c, "k", "2", client.PutOptions{})
		}
		if err := f(); err != nil {
			t.Fatal(err)
		}
		check(v)
	}
	for _, f := range []func() error{
		func() error { return c.Delete(ctx, k) },
		func() error { it, _ := c.Get(ctx, k); return c.DeleteVersion(ctx, k, it.Version) },
		func() error { return c.MultiDelete(ctx, [][]byte{k})[0].Err },
	} {
		put(t, c, "k", "x", client.PutOptions{})
		check("x")
		if err := f(); err != nil {
			t.Fatal(err)
		}
		wantNone(t, c, "k")
	}
	// A put that may have happened: the store says what is there.
	put(t, c, "k", "old", client.PutOptions{})
	store.Fail(func(_ context.Context, o *client.Op) clienttest.Fault {
		return clienttest.Fault{Err: client.ErrUnknownOutcome, Applied: o.Kind == client.OpPut}
	})
	if _, err := c.Put(ctx, k, []byte("new"), client.PutOptions{}); !errors.Is(err, client.ErrUnknownOutcome) {
		t.Fatal(err)
	}
	store.Fail(nil)
	check("new")
}

func TestOtherReads(t *testing.T) {
	store := clienttest.New(clienttest.Options{})
	c := open(t, store, near.Options{MaxBytes: 1 << 20, TTL: time.Hour})
	ctx := t.Context()
	put(t, store, "a", "1", client.PutOptions{})
	put(t, store, "b", "22", client.PutOptions{})
	want(t, c, "a", "1")
	for range 2 {
		rs := c.MultiGet(ctx, [][]byte{[]byte("a"), []byte("b"), []byte("none")})
		if value(rs[0].Item) != "1" || value(rs[1].Item) != "22" || !errors.Is(rs[2].Err, client.ErrNotFound) {
			t.Fatalf("%+v", rs)
		}
		clear(rs[1].Value)
	}
	if st := c.Stats(); st.Hits != 3 || st.Misses != 4 {
		t.Fatalf("%+v", st)
	}
	if n, err := c.GetInto(ctx, []byte("b"), make([]byte, 1)); n != 2 || !errors.Is(err, io.ErrShortBuffer) {
		t.Fatal(n, err)
	}
	it, changed, err := c.GetIfChanged(ctx, []byte("b"), 0)
	if err != nil || !changed || value(it) != "22" {
		t.Fatalf("%+v, %v, %v", it, changed, err)
	}
	if it, changed, err = c.GetIfChanged(ctx, []byte("b"), it.Version); err != nil || changed || it.Value != nil {
		t.Fatalf("%+v, %v, %v", it, changed, err)
	}
}

// The bound holds after every write, whatever the sizes.
func TestBytes(t *testing.T) {
	store := clienttest.New(clienttest.Options{})
	const bound = 100 << 10
	c := open(t, store, near.Options{MaxBytes: bound, TTL: time.Hour})
	rng := rand.New(rand.NewPCG(1, 2))
	var most uint64
	for i := range 3000 {
		if _, err := c.Put(t.Context(), key(rng.IntN(1000)), make([]byte, rng.IntN(2000)), client.PutOptions{}); err !=
			nil {
			t.Fatal(err)
		}
		st := c.Stats()
		if most = max(most, st.Bytes); st.Bytes > bound {
			t.Fatalf("%d bytes after %d puts", st.Bytes, i)
		}
	}
	if most < bound/2 {
		t.Fatalf("never more than %d bytes of %d", most, bound)
	}
	before := c.Stats().Keys
	put(t, c, "huge", string(make([]byte, bound/2)), client.PutOptions{})
	want(t, c, "huge", string(make([]byte, bound/2)))
	if st := c.Stats(); st.Keys < before/2 {
		t.Fatalf("a long value drove out %d of %d keys", before-st.Keys, before)
	}
}

// Reads that miss share a read that began after they came. A read that comes while it is under way must not
// share it, or it could miss a write that was done before it came.
func TestSharing(t *testing.T) { synctest.Test(t, sharing) }

func sharing(t *testing.T) {
	store := clienttest.New(clienttest.Options{})
	put(t, store, "k", "old", client.PutOptions{})
	ctx := t.Context()

	reading, release := make(chan struct{}), make(chan struct{})
	api := &slow{API: store, reading: reading, release: release}
	c := open(t, api, near.Options{MaxBytes: 1 << 20, Validate: true})
	got := make(chan string, 100)
	get := func() {
		it, err := c.Get(ctx, []byte("k"))
		got <- fmt.Sprint(value(it), err)
	}
	go get()
	<-reading                                      // the first has read "old"
	put(t, store, "k", "new", client.PutOptions{}) // done, as others see it
	const late = 20
	for range late {
		go get()
	}
	synctest.Wait() // all have come
	close(release)
	olds := 0
	for range late + 1 {
		switch g := <-got; g {
		case "old<nil>":
			olds++
		case "new<nil>":
		default:
			t.Fatal(g)
		}
	}
	if olds != 1 {
		t.Fatalf("%d reads found what was replaced, want the first one's alone", olds)
	}
	st := c.Stats()
	if st.Misses+st.Validations != 2 || st.Shared != late-1 {
		t.Fatalf("%+v, want two reads of the store, the second shared by %d", st, late)
	}

	// The leader gives up: the others do not.
	gone, cancel := context.WithCancel(ctx)
	reading, release = make(chan struct{}), make(chan struct{})
	api = &slow{API: store, reading: reading, release: release}
	c = open(t, api, near.Options{MaxBytes: 1 << 20, TTL: time.Hour})
	led := make(chan error, 1)
	go func() { _, err := c.Get(gone, []byte("k")); led <- err }()
	<-reading
	go get()
	synctest.Wait()
	cancel()
	close(release)
	if err := <-led; !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	if g := <-got; g != "new<nil>" {
		t.Fatal(g)
	}
}

// slow holds the first read's answer back until release is closed.
type slow struct {
	client.API
	once             sync.Once
	reading, release chan struct{}
}

func (s *slow) Get(ctx context.Context, key []byte) (client.Item, error) {
	it, err := s.API.Get(ctx, key)
	s.once.Do(func() {
		close(s.reading)
		<-s.release
		if ctx.Err() != nil {
			it, err = client.Item{}, ctx.Err()
		}
	})
	return it, err
}

// A read that is overtaken by a write through the Cache leaves nothing behind.
func TestOvertaken(t *testing.T) {
	store := clienttest.New(clienttest.Options{})
	put(t, store, "k", "old", client.PutOptions{})
	api := &slow{API: store, reading: make(chan struct{}), release: make(chan struct{})}
	c := open(t, api, near.Options{MaxBytes: 1 << 20, TTL: time.Hour})
	read := make(chan struct{})
	go func() { defer close(read); c.Get(t.Context(), []byte("k")) }()
	<-api.reading
	put(t, c, "k", "new", client.PutOptions{})
	close(api.release)
	<-read
	want(t, c, "k", "new")
}

// around has a test do something before or after the store performs an operation.
type around struct {
	client.API
	before, after func()
}

// call performs f, and the test's part of it once.
func (a *around) call(f func()) {
	before, after := a.before, a.after
	a.before, a.after = nil, nil
	if before != nil {
		before()
	}
	f()
	if after != nil {
		after()
	}
}

func (a *around) Get(ctx context.Context, key []byte) (it client.Item, err error) {
	a.call(func() { it, err = a.API.Get(ctx, key) })
	return it, err
}

func (a *around) GetIfChanged(ctx context.Context, key []byte, version uint64) (it client.Item, changed bool,
	err error) {
	a.call(func() { it, changed, err = a.API.GetIfChanged(ctx, key, version) })
	return it, changed, err
}

func (a *around) MultiGet(ctx context.Context, keys [][]byte) (rs []client.Result) {
	a.call(func() { rs = a.API.MultiGet(ctx, keys) })
	return rs
}

func (a *around) Do(ctx context.Context, ops []client.Op) { a.call(func() { a.API.Do(ctx, ops) }) }

func (a *around) Delete(ctx context.Context, key []byte) (err error) {
	a.call(func() { err = a.API.Delete(ctx, key) })
	return err
}

// The Cache keeps of a key what the store has, whichever operations overlap and in whatever order they end:
// a read keeps nothing that a write overtook, and of two writes at once
// neither knows which of them was the last.
func TestOverlaps(t *testing.T) {
	k := []byte("k")
	calls := map[string]func(ctx context.Context, c *near.Cache) error{
		"get":      func(ctx context.Context, c *near.Cache) error { _, err := c.Get(ctx, k); return err },
		"multiget": func(ctx context.Context, c *near.Cache) error { return c.MultiGet(ctx, [][]byte{k})[0].Err },
		"put": func(ctx context.Context, c *near.Cache) error {
			_, err := c.Put(ctx, k, []byte("put"), client.PutOptions{})
			return err
		},
		"do": func(ctx context.Context, c *near.Cache) error {
			ops := []client.Op{{Kind: client.OpPut, Key: k, Value: []byte("do")}}
			c.Do(ctx, ops)
			return ops[0].Err
		},
		"delete": func(ctx context.Context, c *near.Cache) error { return c.Delete(ctx, k) },
	}
	now := newClock() // stands still: of two moments none need be later
	for outer, out := range calls {
		for inner, in := range calls {
			if outer == "get" && inner == "get" {
				continue // the second waits for the first; see TestSharing
			}
			for _, when := range []string{"before", "after"} {
				for _, stale := range []bool{false, true} {
					t.Run(fmt.Sprintf("%s with %s %s, stale %v", outer, inner, when, stale), func(t *testing.T) {
						store := clienttest.New(clienttest.Options{Now: now.now})
						api := &around{API: store}
						c := open(t, api, near.Options{MaxBytes: 1 << 20, TTL: time.Hour, Validate: true, Now: now.now})
						put(t, store, "k", "old", client.PutOptions{})
						if stale { // an entry, which a read compares
							want(t, c, "k", "old")
							now.pass(time.Hour)
						}
						f := func() {
							if err := in(t.Context(), c); err != nil && !errors.Is(err, client.ErrNotFound) {
								t.Error(err)
							}
						}
						if when == "before" {
							api.before = f
						} else {
							api.after = f
						}
						if err := out(t.Context(), c); err != nil && !errors.Is(err, client.ErrNotFound) {
							t.Fatal(err)
						}
						if it, err := store.Get(t.Context(), k); err == nil {
							want(t, c, "k", value(it))
						} else {
							wantNone(t, c, "k")
						}
					})
				}
			}
		}
	}
}

// A read that comes after a write through the Cache does not share one that began before.
func TestSharingAfterWrite(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := clienttest.New(clienttest.Options{})
		put(t, store, "k", "old", client.PutOptions{})
		api := &slow{API: store, reading: make(chan struct{}), release: make(chan struct{})}
		c := open(t, api, near.Options{MaxBytes: 1 << 20, TTL: time.Hour})
		read := make(chan struct{})
		go func() { defer close(read); c.Get(t.Context(), []byte("k")) }()
		<-api.reading // it has read "old"
		if err := c.Delete(t.Context(), []byte("k")); err != nil {
			t.Fatal(err)
		}
		late := make(chan error, 1)
		go func() { _, err := c.Get(t.Context(), []byte("k")); late <- err }()
		synctest.Wait()
		close(api.release)
		<-read
		if err := <-late; !errors.Is(err, client.ErrNotFound) {
			t.Fatalf("read what was deleted before it came: %v", err)
		}
	})
}

// Writers through the Cache and beside it: a counter never goes back where every read
// asks, and one's own writes are always seen.
func TestConcurrent(t *testing.T) {
	store := clienttest.New(clienttest.Options{})
	ask := open(t, store, near.Options{MaxBytes: 1 << 20, Validate: true})
	own := open(t, store, near.Options{MaxBytes: 1 << 20, TTL: time.Hour})
	ctx := t.Context()
	var wg sync.WaitGroup
	const rounds = 500
	for w := range 4 {
		wg.Go(func() { // all through own, each on a key of its own
			k := key(w)
			for i := range rounds {
				if _, err := own.Put(ctx, k, strconv.AppendInt(nil, int64(i), 10), client.PutOptions{}); err != nil {
					t.Error(err)
				}
				if it, err := own.Get(ctx, k); err != nil || value(it) != strconv.Itoa(i) {
					t.Errorf("own write %d: %q, %v", i, it.Value, err)
					return
				}
			}
		})
		wg.Go(func() {
			for i := range rounds {
				own.MultiGet(ctx, [][]byte{key(i % 4), key((i + 1) % 4)})
				if _, err := store.Incr(ctx, []byte("n"), 1); err != nil {
					t.Error(err)
				}
			}
		})
		wg.Go(func() {
			last := int64(0)
			for range rounds {
				low, err := strconv.ParseInt(now(store), 10, 64)
				if err != nil {
					low = 0
				}
				it, err := ask.Get(ctx, []byte("n"))
				if errors.Is(err, client.ErrNotFound) && low == 0 {
					continue
				}
				n, err2 := strconv.ParseInt(value(it), 10, 64)
				if err = errors.Join(err, err2); err != nil || n < max(low, last) {
					t.Errorf("counter at %d after %d and %d, %v", n, last, low, err)
					return
				}
				last = n
			}
		})
	}
	wg.Wait()
}

func now(s *clienttest.Store) string {
	it, _ := s.Get(context.Background(), []byte("n"))
	return string(it.Value)
}

func TestGetIntoAllocatesNothing(t *testing.T) {
	store := clienttest.New(clienttest.Options{})
	c := open(t, store, near.Options{MaxBytes: 1 << 20, TTL: time.Hour})
	put(t, c, "k", "value", client.PutOptions{})
	k, dst, ctx := []byte("k"), make([]byte, 100), t.Context()
	if n := testing.AllocsPerRun(1000, func() {
		if n, err := c.GetInto(ctx, k, dst); n != 5 || err != nil {
			t.Fatal(n, err)
		}
	}); n >= 1 {
		t.Fatalf("%v allocations a hit", n)
	}
	if !bytes.Equal(dst[:5], []byte("value")) {
		t.Fatalf("%q", dst[:5])
	}
}

func BenchmarkHit(b *testing.B) {
	c := open(b, clienttest.New(clienttest.Options{}), near.Options{MaxBytes: 64 << 20, TTL: time.Hour})
	const n = 10_000
	keys := make([][]byte, n)
	for i := range keys {
		keys[i] = key(i)
		put(b, c, string(keys[i]), string(make([]byte, 100)), client.PutOptions{})
	}
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		dst := make([]byte, 100)
		rng := rand.New(rand.NewPCG(rand.Uint64(), 1))
		for pb.Next() {
			if _, err := c.GetInto(context.Background(), keys[rng.IntN(n)], dst); err != nil {
				b.Error(err)
				return
			}
		}
	})
}

func Example() {
	ctx := context.Background()
	store := clienttest.New(clienttest.Options{}) // or a client.Client
	c, err := near.New(store, near.Options{MaxBytes: 64 << 20, TTL: time.Second, Validate: true})
	if err != nil {
		fmt.Println(err)
		return
	}
	c.Put(ctx, []byte("greeting"), []byte("hello"), client.PutOptions{})
	for range 3 {
		it, _ := c.Get(ctx, []byte("greeting"))
		fmt.Printf("%s\n", it.Value)
	}
	fmt.Println(c.Stats().Hits, "hits,", c.Stats().Misses, "misses")
	// Output:
	// hello
	// hello
	// hello
	// 3 hits, 0 misses
}
