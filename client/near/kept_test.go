package near_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/client/clienttest"
	"github.com/kvd-project/kvd/client/near"
)

// gate holds calls of the store back before and after the store performs them, until the test lets each go on.
type gate struct {
	client.API
	held   chan *pass
	open   atomic.Bool  // it holds nothing any more
	atOnce atomic.Int64 // reads under way
	most   atomic.Int64 // and most of them
}

// pass is one call, held back.
type pass struct{ before, after chan struct{} }

func newGate(api client.API) *gate { return &gate{API: api, held: make(chan *pass, 100)} }

func (g *gate) call(f func()) {
	if g.open.Load() {
		f()
		return
	}
	p := &pass{make(chan struct{}), make(chan struct{})}
	g.held <- p
	<-p.before
	f()
	<-p.after
}

func (g *gate) Get(ctx context.Context, key []byte) (it client.Item, err error) {
	n := g.atOnce.Add(1)
	defer g.atOnce.Add(-1)
	g.most.Store(max(g.most.Load(), n))
	g.call(func() { it, err = g.API.Get(ctx, key) })
	return it, err
}

func (g *gate) MultiGet(ctx context.Context, keys [][]byte) (rs []client.Result) {
	g.call(func() { rs = g.API.MultiGet(ctx, keys) })
	return rs
}

func (g *gate) Do(ctx context.Context, ops []client.Op) { g.call(func() { g.API.Do(ctx, ops) }) }

func (g *gate) Delete(ctx context.Context, key []byte) (err error) {
	g.call(func() { err = g.API.Delete(ctx, key) })
	return err
}

// perform has the store perform the call; end gives its caller the answer. Both wait until the effect is there.
func (p *pass) perform() { close(p.before); synctest.Wait() }
func (p *pass) end()     { close(p.after); synctest.Wait() }

// Of two calls that overlap, of which neither lies within the other, the one that the store answers last may end
// first: nothing is kept that the store does not have.
func TestStaggered(t *testing.T) {
	k := []byte("k")
	calls := map[string]func(ctx context.Context, c *near.Cache){
		"get":      func(ctx context.Context, c *near.Cache) { c.Get(ctx, k) },
		"multiget": func(ctx context.Context, c *near.Cache) { c.MultiGet(ctx, [][]byte{k}) },
		"put":      func(ctx context.Context, c *near.Cache) { c.Put(ctx, k, []byte("put"), client.PutOptions{}) },
		"put 2":    func(ctx context.Context, c *near.Cache) { c.Put(ctx, k, []byte("other"), client.PutOptions{}) },
		"delete":   func(ctx context.Context, c *near.Cache) { c.Delete(ctx, k) },
	}
	for first, a := range calls {
		for second, b := range calls {
			if first == second {
				continue // two reads at once share one, and two writes of one value are no different
			}
			for _, order := range []string{"ab", "ba"} { // as the store performs them
				t.Run(fmt.Sprintf("%s, %s, %s", first, second, order), func(t *testing.T) {
					synctest.Test(t, func(t *testing.T) {
						store := clienttest.New(clienttest.Options{})
						put(t, store, "k", "old", client.PutOptions{})
						g := newGate(store)
						c := open(t, g, near.Options{MaxBytes: 1 << 20, TTL: time.Hour})
						go a(t.Context(), c)
						pa := <-g.held
						go b(t.Context(), c)
						pb := <-g.held
						if order == "ab" {
							pa.perform()
							pb.perform()
						} else {
							pb.perform()
							pa.perform()
						}
						pa.end()
						pb.end()
						it, err := store.Get(t.Context(), k)
						g.open.Store(true)
						got, err2 := c.Get(t.Context(), k)
						if value(got) != value(it) || !errors.Is(err2, err) {
							t.Errorf("%q, %v; the store has %q, %v", got.Value, err2, it.Value, err)
						}
					})
				})
			}
		}
	}
}

// A value that was read later stays: an answer that took its time does not bring back what it read before.
func TestLaterStays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := clienttest.New(clienttest.Options{})
		put(t, store, "k", "old", client.PutOptions{})
		now := newClock()
		api := &around{API: store}
		c := open(t, api, near.Options{MaxBytes: 1 << 20, TTL: time.Hour, Now: now.now})
		api.after = func() {
			now.pass(time.Millisecond)
			put(t, store, "k", "new", client.PutOptions{}) // past the Cache
			want(t, c, "k", "new")
		}
		if rs := c.MultiGet(t.Context(), [][]byte{[]byte("k")}); value(rs[0].Item) != "old" {
			t.Fatalf("%q", rs[0].Value)
		}
		want(t, c, "k", "new")
	})
}

// An entry's age counts from before the store was asked, whichever way it came.
func TestAge(t *testing.T) {
	const ttl = 100 * time.Millisecond
	k := []byte("k")
	for name, f := range map[string]func(c *near.Cache) error{
		"get":      func(c *near.Cache) error { _, err := c.Get(t.Context(), k); return err },
		"multiget": func(c *near.Cache) error { return c.MultiGet(t.Context(), [][]byte{k})[0].Err },
		"put": func(c *near.Cache) error {
			_, err := c.Put(t.Context(), k, []byte("old"), client.PutOptions{})
			return err
		},
		"validate": func(c *near.Cache) error { _, err := c.Get(t.Context(), k); return err },
	} {
		t.Run(name, func(t *testing.T) {
			now := newClock()
			store := clienttest.New(clienttest.Options{Now: now.now})
			put(t, store, "k", "old", client.PutOptions{})
			api := &around{API: store}
			c := open(t, api, near.Options{MaxBytes: 1 << 20, TTL: ttl, Validate: true, Now: now.now})
			if name == "validate" {
				want(t, c, "k", "old")
				now.pass(ttl)
			}
			api.after = func() { now.pass(ttl / 2) }
			if err := f(c); err != nil {
				t.Fatal(err)
			}
			before := c.Stats()
			now.pass(ttl/2 - time.Millisecond)
			want(t, c, "k", "old")
			if st := c.Stats(); st.Hits != before.Hits+1 {
				t.Errorf("%v after it was asked for it is not served: %+v", ttl-time.Millisecond, st)
			}
			put(t, store, "k", "new", client.PutOptions{})
			now.pass(time.Millisecond)
			want(t, c, "k", "new")
		})
	}
}

// A read that is shared gives nothing that has expired since.
func TestSharedExpires(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		now := newClock()
		store := clienttest.New(clienttest.Options{Now: now.now})
		put(t, store, "k", "brief", client.PutOptions{TTL: 50 * time.Millisecond})
		api := &slow{API: store, reading: make(chan struct{}), release: make(chan struct{})}
		c := open(t, api, near.Options{MaxBytes: 1 << 20, TTL: time.Hour, Now: now.now})
		go c.Get(t.Context(), []byte("k"))
		<-api.reading
		shared := make(chan error)
		go func() { _, err := c.Get(t.Context(), []byte("k")); shared <- err }()
		synctest.Wait()
		now.pass(50 * time.Millisecond)
		close(api.release)
		if err := <-shared; !errors.Is(err, client.ErrNotFound) {
			t.Fatalf("%v, want that it has expired", err)
		}
	})
}

// twins are two keys with one name: a key may be made so, as xxh3 multiplies what is read from it with what is
// read behind that, each with a constant taken away. Either product is 0, and the sums are the same.
func twins(t *testing.T) (a, b []byte) {
	s0, s1, sum := uint64(0xbe4ba423396cfeb8), uint64(0x1cad21f72c81017c), uint64(1<<60)
	a, b = make([]byte, 32), make([]byte, 32)
	binary.LittleEndian.PutUint64(a, s0)
	binary.LittleEndian.PutUint64(a[8:], sum-s0)
	binary.LittleEndian.PutUint64(b, sum-s1)
	binary.LittleEndian.PutUint64(b[8:], s1)
	if xxh3.Hash128(a) != xxh3.Hash128(b) || string(a) == string(b) {
		t.Fatal("they have two names")
	}
	return a, b
}

// Keys with one name are told apart, in what is kept and in what is shared.
func TestTwins(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := twins(t)
		for _, have := range []string{"a", "b", "both"} {
			store := clienttest.New(clienttest.Options{})
			if have != "b" {
				put(t, store, string(a), "of a", client.PutOptions{})
			}
			if have != "a" {
				put(t, store, string(b), "of b", client.PutOptions{})
			}
			check := func(c client.API, key []byte) {
				it, err := store.Get(t.Context(), key)
				got, err2 := c.Get(t.Context(), key)
				if value(got) != value(it) || !errors.Is(err2, err) {
					t.Errorf("%s: %q, %v, want %q, %v", have, got.Value, err2, it.Value, err)
				}
			}
			c := open(t, store, near.Options{MaxBytes: 1 << 20, TTL: time.Hour})
			for range 2 {
				check(c, a)
				check(c, b)
				if rs := c.MultiGet(t.Context(), [][]byte{a, b}); rs[0].Err == nil && value(rs[0].Item) != "of a" ||
					rs[1].Err == nil && value(rs[1].Item) != "of b" {
					t.Errorf("%+v", rs)
				}
			}
			api := &slow{API: store, reading: make(chan struct{}), release: make(chan struct{})}
			c = open(t, api, near.Options{MaxBytes: 1 << 20, TTL: time.Hour})
			var both sync.WaitGroup
			both.Go(func() { check(c, a) })
			<-api.reading
			both.Go(func() { check(c, b) })
			synctest.Wait()
			close(api.release)
			both.Wait()
		}
	})
}

// Every write through the Cache is seen through it, whichever keys and operation it has.
func TestEveryWrite(t *testing.T) {
	ctx := t.Context()
	a, b := []byte("a"), []byte("b")
	for name, f := range map[string]func(c *near.Cache){
		"touch":  func(c *near.Cache) { c.Touch(ctx, b, time.Hour) },
		"delete": func(c *near.Cache) { c.Delete(ctx, b) },
		"incr":   func(c *near.Cache) { c.Incr(ctx, b, 1) },
		"multiput": func(c *near.Cache) {
			c.MultiPut(ctx, []client.KV{{Key: a, Value: []byte("5")}, {Key: b, Value: []byte("6")}})
		},
		"multidelete": func(c *near.Cache) { c.MultiDelete(ctx, [][]byte{a, b}) },
		"multicas": func(c *near.Cache) {
			c.MultiCAS(ctx, []client.Op{{Kind: client.OpPut, Key: a, Value: []byte("5")},
				{Kind: client.OpDelete, Key: b}})
		},
		"do delete": func(c *near.Cache) {
			c.Do(ctx, []client.Op{{Kind: client.OpGet, Key: a}, {Kind: client.OpDelete, Key: b}})
		},
		"do update": func(c *near.Cache) {
			c.Do(ctx, []client.Op{
				{Kind: client.OpUpdate, Key: b, Update: func(client.Item, bool) (client.Change, error) {
					return client.Change{Value: []byte("7")}, nil
				}}})
		},
	} {
		t.Run(name, func(t *testing.T) {
			store := clienttest.New(clienttest.Options{})
			c := open(t, store, near.Options{MaxBytes: 1 << 20, TTL: 2 * time.Hour})
			for i, k := range [][]byte{a, b} {
				put(t, store, string(k), strconv.Itoa(i), client.PutOptions{})
				want(t, c, string(k), strconv.Itoa(i))
			}
			f(c)
			for _, k := range [][]byte{a, b} {
				it, err := store.Get(ctx, k)
				got, err2 := c.Get(ctx, k)
				if value(got) != value(it) || !got.Expires.Equal(it.Expires) || got.Version != it.Version ||
					!errors.Is(err2, err) {
					t.Errorf("%s: %+v, %v; the store has %+v, %v", k, got, err2, it, err)
				}
			}
		})
	}
	store := clienttest.New(clienttest.Options{})
	c := open(t, store, near.Options{MaxBytes: 1 << 20, TTL: time.Hour})
	if _, err := c.Put(ctx, a, nil, client.PutOptions{TTL: -1}); !errors.Is(err, client.ErrInvalid) {
		t.Errorf("a put for less than no time: %v", err)
	}
}

// A Cache gives all that the store would, and keys and values that were given to it may be written over.
func TestWholeItems(t *testing.T) {
	ctx := t.Context()
	store := clienttest.New(clienttest.Options{})
	ops := []client.Op{{Kind: client.OpPut, Key: []byte("theirs"), Value: []byte("v"), Flags: 5, Note: 6,
		Expires: time.Now().Add(time.Hour)}}
	if store.Do(ctx, ops); ops[0].Err != nil {
		t.Fatal(ops[0].Err)
	}
	c := open(t, store, near.Options{MaxBytes: 1 << 20, TTL: time.Hour})
	key, val := []byte("ours"), []byte("v")
	if _, err := c.Put(ctx, key, val, client.PutOptions{Flags: 7, TTL: time.Hour}); err != nil {
		t.Fatal(err)
	}
	clear(val)
	copy(key, "????")
	again := []byte("theirs")
	for range 2 {
		if _, err := c.Get(ctx, again); err != nil {
			t.Fatal(err)
		}
		copy(again, "??????")
		again = []byte("theirs")
	}
	for _, k := range []string{"ours", "theirs"} {
		a, err := c.Get(ctx, []byte(k))
		b, err2 := store.Get(ctx, []byte(k))
		if err = errors.Join(err, err2); err != nil {
			t.Fatal(err)
		}
		if value(a) != value(b) || a.Version != b.Version || a.Flags != b.Flags || a.Note != b.Note ||
			!a.Expires.Equal(b.Expires) {
			t.Errorf("%s: %+v, the store has %+v", k, a, b)
		}
		for _, v := range []uint64{a.Version - 1, a.Version + 1} {
			if it, changed, err := c.GetIfChanged(ctx, []byte(k), v); !changed || err != nil || value(it) != "v" {
				t.Errorf("%s: %+v, %v, %v: its version is another one", k, it, changed, err)
			}
		}
	}
	if st := c.Stats(); st.Misses != 1 {
		t.Errorf("%+v, want one read of what was not put through it", st)
	}
	done, cancel := context.WithCancel(ctx)
	cancel()
	if _, err := c.Get(done, []byte("ours")); !errors.Is(err, context.Canceled) {
		t.Errorf("a context that has ended: %v", err)
	}
}

// A value above a quarter of the bound is not kept.
func TestHugeIsNotKept(t *testing.T) {
	store := clienttest.New(clienttest.Options{})
	const bound = 100 << 10
	c := open(t, store, near.Options{MaxBytes: bound, TTL: time.Hour})
	huge := string(make([]byte, bound/3))
	put(t, c, "huge", huge, client.PutOptions{})
	want(t, c, "huge", huge)
	want(t, c, "huge", huge)
	if st := c.Stats(); st.Keys != 0 || st.Misses != 2 {
		t.Errorf("%+v", st)
	}
}

// Keys count for the bound as values do.
func TestKeysCount(t *testing.T) {
	store := clienttest.New(clienttest.Options{})
	const bound = 100 << 10
	c := open(t, store, near.Options{MaxBytes: bound, TTL: time.Hour})
	for i := range 50 {
		put(t, c, fmt.Sprintf("%04000d", i), "v", client.PutOptions{})
	}
	if st := c.Stats(); st.Keys == 0 || st.Keys*4000 > bound {
		t.Errorf("%d keys of 4,000 bytes in %d", st.Keys, bound)
	}
}

// A batch drops the keys that it may change, and no others.
func TestBatchDrops(t *testing.T) {
	store := clienttest.New(clienttest.Options{})
	c := open(t, store, near.Options{MaxBytes: 1 << 20, TTL: time.Hour})
	a, b := []byte("a"), []byte("b")
	put(t, c, "a", "1", client.PutOptions{})
	put(t, c, "b", "2", client.PutOptions{})
	c.Do(t.Context(), []client.Op{{Kind: client.OpGet, Key: a}, {Kind: client.OpExists, Key: a},
		{Kind: client.OpPut, Key: b, Value: []byte("3")}})
	if err := c.MultiCAS(t.Context(),
		[]client.Op{{Kind: client.OpKeep, Key: a}, {Kind: client.OpPut, Key: b, Value: []byte("4")}}); err != nil {
		t.Fatal(err)
	}
	want(t, c, "a", "1")
	want(t, c, "b", "4")
	if st := c.Stats(); st.Hits != 1 || st.Misses != 1 {
		t.Errorf("%+v, want that a is kept and b is not", st)
	}
}

// The store is asked for a key by one read at a time, whoever gives up, and each answer serves all who wait: also
// that there is nothing. Nothing is left behind.
func TestReadsInTurn(t *testing.T) {
	for _, giveUp := range []string{"nobody", "one of two", "the only one", "all"} {
		t.Run(giveUp, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := newGate(clienttest.New(clienttest.Options{}))
				c := open(t, g, near.Options{MaxBytes: 1 << 20, Validate: true})
				var all sync.WaitGroup
				get := func(ctx context.Context) {
					all.Go(func() {
						if _, err := c.Get(ctx, []byte("k")); !errors.Is(err, client.ErrNotFound) && ctx.Err() == nil {
							t.Error(err)
						}
					})
					synctest.Wait()
				}
				finish := func(p *pass) {
					p.perform()
					p.end()
				}
				get(t.Context())
				first := <-g.held
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				reads := 3
				switch giveUp {
				case "nobody", "one of two":
					get(ctx)
					get(t.Context())
				default:
					get(ctx)
				}
				if giveUp != "nobody" {
					cancel()
					synctest.Wait()
				}
				if giveUp == "all" {
					finish(first)
					reads = 1
				} else {
					get(t.Context())
					finish(first)
					second := <-g.held
					get(t.Context()) // behind the second
					finish(second)
					finish(<-g.held)
				}
				all.Wait()
				if st := c.Stats(); g.most.Load() != 1 || st.Misses != uint64(reads) {
					t.Errorf("%d reads at once, %+v, want %d reads in turn", g.most.Load(), st, reads)
				}
				if n := c.Flights(); n != 0 {
					t.Errorf("%d reads are left", n)
				}
			})
		})
	}
}

// lateCtx ends, as its users see it, when it is asked for the second time: nothing wakes them.
type lateCtx struct {
	context.Context
	asked atomic.Int64
}

func (c *lateCtx) Err() error {
	if c.asked.Add(1) > 1 {
		return context.Canceled
	}
	return nil
}

// A read that everybody gave up just when its turn came is not left behind.
func TestGivenUpInTurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGate(clienttest.New(clienttest.Options{}))
		c := open(t, g, near.Options{MaxBytes: 1 << 20, Validate: true})
		var all sync.WaitGroup
		all.Go(func() { c.Get(t.Context(), []byte("k")) })
		first := <-g.held
		all.Go(func() { c.Get(&lateCtx{Context: t.Context()}, []byte("k")) })
		synctest.Wait()
		first.perform()
		first.end()
		all.Wait()
		if n := c.Flights(); n != 0 {
			t.Errorf("%d reads are left", n)
		}
	})
}

// panicky is a store of which a call panics, once.
type panicky struct {
	client.API
	calls   atomic.Int64
	reading chan struct{}
}

func (p *panicky) call() {
	if p.calls.Add(1) == 1 {
		<-p.reading
		panic("broken")
	}
}

func (p *panicky) Get(ctx context.Context, key []byte) (client.Item, error) {
	p.call()
	return p.API.Get(ctx, key)
}

func (p *panicky) Delete(ctx context.Context, key []byte) error {
	p.call()
	return p.API.Delete(ctx, key)
}

// A call that panics gives those who share it nothing, and the Cache goes on.
func TestPanics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for name, f := range map[string]func(c *near.Cache){
			"get":    func(c *near.Cache) { c.Get(t.Context(), []byte("k")) },
			"delete": func(c *near.Cache) { c.Delete(t.Context(), []byte("k")) },
		} {
			store := clienttest.New(clienttest.Options{})
			put(t, store, "k", "v", client.PutOptions{})
			api := &panicky{API: store, reading: make(chan struct{})}
			c := open(t, api, near.Options{MaxBytes: 1 << 20, TTL: time.Hour})
			var both sync.WaitGroup
			both.Go(func() {
				defer func() {
					if recover() == nil {
						t.Errorf("%s: it did not panic", name)
					}
				}()
				f(c)
			})
			synctest.Wait()
			both.Go(func() { want(t, c, "k", "v") })
			synctest.Wait()
			close(api.reading)
			both.Wait()
			want(t, c, "k", "v")
			if want(t, c, "k", "v"); c.Stats().Hits == 0 {
				t.Errorf("%s: nothing is kept any more", name)
			}
		}
	})
}
