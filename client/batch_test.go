package client_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"path"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/devstore"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/rdma"
)

func TestDo(t *testing.T) {
	for _, p := range []string{"shm", "tcp"} {
		r := newRig(t, p, 1, 5*time.Second)
		c := r.client(r.options())
		ctx := t.Context()
		expires := time.Now().Add(time.Hour).Truncate(time.Millisecond)
		count := func(cur client.Item, present bool) (client.Change, error) {
			n, _ := strconv.Atoi(string(cur.Value))
			return client.Change{Value: strconv.AppendInt(nil, int64(n+1), 10), Expires: cur.Expires,
				Flags: cur.Flags + 1}, nil
		}
		gone := func(cur client.Item, present bool) (client.Change, error) { return client.Change{Delete: true}, nil }
		ops := []client.Op{
			{Kind: client.OpPut, Key: []byte("a"), Value: []byte("1"), Expires: expires, Flags: 7},
			{Kind: client.OpPut, Key: []byte("b"), Value: []byte("2"), Cond: client.IfAbsent},
			{Kind: client.OpPut, Key: []byte("c"), Value: []byte("3"), Cond: client.IfPresent},
			{Kind: client.OpUpdate, Key: []byte("n"), Update: count},
			{Kind: client.OpUpdate, Key: []byte("none"), Update: gone},
			{Kind: client.OpGet, Key: []byte("absent")},
			{Kind: client.OpDelete, Key: []byte("absent2")},
			{Kind: client.OpGet, Key: nil},
			{Key: []byte("x")},
		}
		c.Do(ctx, ops)
		for i, want := range []error{nil, nil, client.ErrNotFound, nil, client.ErrNotFound, client.ErrNotFound,
			client.ErrNotFound, client.ErrInvalid, client.ErrInvalid} {
			if !errors.Is(ops[i].Err, want) {
				t.Errorf("%s: op %d: %v, want %v", p, i, ops[i].Err, want)
			}
		}
		if ops[0].Item.Version == 0 || ops[3].Item.Version == 0 {
			t.Error("no version")
		}
		into := make([]byte, 0, 64)
		for range 2 { // the second time by hint
			ops = []client.Op{
				{Kind: client.OpGet, Key: []byte("a"), Into: into},
				{Kind: client.OpGet, Key: []byte("n")},
				{Kind: client.OpPut, Key: []byte("b"), Value: []byte("4"), Cond: client.IfAbsent},
			}
			c.Do(ctx, ops)
			a := ops[0].Item
			if string(a.Value) != "1" || !a.Expires.Equal(expires) || a.Flags != 7 || &a.Value[0] != &into[:1][0] {
				t.Errorf("%s: a is %+v, %v", p, a, ops[0].Err)
			}
			if n := ops[1].Item; string(n.Value) != "1" || n.Flags != 1 {
				t.Errorf("%s: n is %+v, %v", p, n, ops[1].Err)
			}
			if !errors.Is(ops[2].Err, client.ErrExists) {
				t.Errorf("%s: b: %v", p, ops[2].Err)
			}
		}
		// An Update that deletes; flags of long values; a version that has not changed.
		if v, err := c.Update(ctx, []byte("n"), gone); err != nil || v != 0 {
			t.Errorf("update that deletes: %d, %v", v, err)
		}
		if _, err := c.Get(ctx, []byte("n")); !errors.Is(err, client.ErrNotFound) {
			t.Errorf("get of what an update deleted: %v", err)
		}
		long := make([]byte, 5<<20)
		long[len(long)-1] = 9
		v, err := c.Put(ctx, []byte("long"), long, client.PutOptions{Flags: 99})
		if err != nil {
			t.Fatal(err)
		}
		it, err := c.Get(ctx, []byte("long"))
		if err != nil || it.Flags != 99 || len(it.Value) != len(long) || it.Value[len(long)-1] != 9 {
			t.Errorf("long value: %d bytes, flags %d, %v", len(it.Value), it.Flags, err)
		}
		if n, err := c.GetInto(ctx, []byte("long"), make([]byte, len(long))); n != len(long) || err != nil {
			t.Errorf("GetInto of a long value: %d, %v", n, err)
		}
		for _, key := range []string{"long", "a"} {
			if key == "a" {
				if it, err = c.Get(ctx, []byte(key)); err != nil {
					t.Fatal(err)
				}
				v = it.Version
			}
			if it, changed, err := c.GetIfChanged(ctx, []byte(key), v); err != nil || changed || it.Version != v {
				t.Errorf("%s: GetIfChanged: %v, %v", key, changed, err)
			}
			if it, changed, err := c.GetIfChanged(ctx, []byte(key), v-1); err != nil || !changed || it.Version != v {
				t.Errorf("%s: GetIfChanged with another version: %v, %v", key, changed, err)
			}
		}
		if n, err := c.Count(ctx); err != nil || n != 3 {
			t.Errorf("count: %d, %v", n, err)
		}
	}
}

// Events sees every operation, a batch as one, with its round trips. A delete that an update wants begins with the
// update's context.
func TestEvents(t *testing.T) {
	r := newRig(t, "shm", 1, 5*time.Second)
	type mark struct{}
	var mu sync.Mutex
	var seen []string
	o := r.options()
	o.Events = &client.Events{
		Begin: func(ctx context.Context, op client.OpEvent) context.Context {
			kind := op.Kind
			if outer, ok := ctx.Value(mark{}).(string); ok {
				kind = outer + "/" + kind
			}
			return context.WithValue(ctx, mark{}, kind)
		},
		End: func(ctx context.Context, op client.OpEvent) {
			mu.Lock()
			defer mu.Unlock()
			kind := ctx.Value(mark{}).(string)
			if path.Base(kind) != op.Kind || op.Took <= 0 {
				t.Errorf("%+v with context of %v", op, kind)
			}
			rounds := strconv.Itoa(op.Rounds)
			if op.Rounds > 0 && (op.Kind == "transaction" || op.Kind == "scan") {
				// they depend on what is remembered, and on how long the index is
				rounds = "some"
			}
			line := fmt.Sprintf("%s %s %s %v", kind, op.Key, rounds, op.Err)
			for _, o := range op.Ops {
				line += fmt.Sprintf(", %s %v", o.Key, o.Err)
			}
			seen = append(seen, line)
		},
	}
	c := r.client(o)
	ctx := t.Context()
	put := func(key, value string) uint64 {
		t.Helper()
		v, err := c.Put(ctx, []byte(key), []byte(value), client.PutOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
	v := put("a", "1")
	_, errGet := c.Get(ctx, []byte("a"))
	_, _, errChanged := c.GetIfChanged(ctx, []byte("a"), v)
	c.MultiGet(ctx, [][]byte{[]byte("a"), []byte("none")})
	c.Do(ctx, []client.Op{{Kind: client.OpGet, Key: []byte("a")}, {Kind: client.OpDelete, Key: []byte("none")}})
	errTxn := c.MultiCAS(ctx, []client.Op{{Kind: client.OpPut, Key: []byte("b"), Value: []byte("2")},
		{Kind: client.OpKeep, Key: []byte("a")}})
	_, errUpdate := c.Update(ctx, []byte("a"), func(client.Item, bool) (client.Change, error) {
		return client.Change{Delete: true}, nil
	})
	c.Do(ctx, []client.Op{{Key: []byte("a")}})
	if err := errors.Join(errGet, errChanged, errTxn, errUpdate); err != nil {
		t.Fatal(err)
	}
	for _, err := range c.Scan(ctx, client.ScanOptions{}) {
		if err != nil {
			t.Fatal(err)
		}
	}
	want := []string{
		"put a 2 <nil>", "get a 1 <nil>", "get a 1 <nil>",
		"get  1 <nil>, a <nil>, none not found",
		"batch  1 <nil>, a <nil>, none not found",
		"transaction  some <nil>, b <nil>, a <nil>",
		"update/delete a 1 <nil>", "update a 1 <nil>",
		"batch a 0 invalid argument: Kind: 0",
		"scan  some <nil>",
	}
	if !slices.Equal(seen, want) {
		t.Errorf("saw %q, want %q", seen, want)
	}
}

// BenchmarkDo is what one operation of a batch costs.
func BenchmarkDo(b *testing.B) {
	r := newRig(b, "shm", 1, 5*time.Second)
	r.create(&dirpb.CreateNamespaceRequest{Name: "default", Mode: cacheMode, Replicas: 1, BytesPerNode: 24 << 20})
	c := r.client(r.options())
	keys := make([][]byte, 10000)
	for i := range keys {
		keys[i] = fmt.Appendf(nil, "key:%012d", i)
		if _, err := c.Put(b.Context(), keys[i], []byte("xxx"), client.PutOptions{}); err != nil {
			b.Fatal(err)
		}
	}
	for _, kind := range []client.OpKind{client.OpGet, client.OpPut} {
		for _, n := range []int{1, 16, 64} {
			b.Run(fmt.Sprintf("%d/%d", kind, n), func(b *testing.B) {
				b.ReportAllocs()
				ops := make([]client.Op, n)
				into := make([][]byte, n)
				for i := range into {
					into[i] = make([]byte, 0, 16)
				}
				k := 0
				for i := 0; i < b.N; i += n {
					for j := range ops {
						k = (k + 7919) % len(keys)
						ops[j] = client.Op{Kind: kind, Key: keys[k], Value: []byte("yyy"), Into: into[j]}
					}
					c.Do(b.Context(), ops)
					for j := range ops {
						if ops[j].Err != nil {
							b.Fatal(ops[j].Err)
						}
					}
				}
			})
		}
	}
	b.Run("MultiGet/64", func(b *testing.B) {
		b.ReportAllocs()
		some := make([][]byte, 64)
		k := 0
		for i := 0; i < b.N; i += len(some) {
			for j := range some {
				k = (k + 7919) % len(keys)
				some[j] = keys[k]
			}
			for _, x := range c.MultiGet(b.Context(), some) {
				if x.Err != nil || string(x.Value) != "xxx" && string(x.Value) != "yyy" {
					b.Fatal(x)
				}
			}
		}
	})
}

// Batches whose contexts end just when they are over do nothing to those of others, which may use the same
// memory by then.
func TestBatchesGivenUp(t *testing.T) {
	_, c := open(t, "tcp", devstore.Options{}, client.Options{Lanes: 1})
	const n = 4
	keys := make([][]byte, 2*n)
	for i := range keys {
		keys[i] = fmt.Appendf(nil, "k%d", i)
		mustPut(t, c, keys[i], string(keys[i]))
	}
	get := func(ctx context.Context, keys [][]byte) error {
		ops := make([]client.Op, len(keys))
		for i, k := range keys {
			ops[i] = client.Op{Kind: client.OpGet, Key: k}
		}
		c.Do(ctx, ops)
		for i := range ops {
			if err := ops[i].Err; err != nil {
				return err
			}
			if v := ops[i].Item.Value; !bytes.Equal(v, keys[i]) {
				return fmt.Errorf("%q holds %q", keys[i], v)
			}
		}
		return nil
	}
	took := time.Now()
	for range 100 {
		if err := get(t.Context(), keys[:n]); err != nil {
			t.Fatal(err)
		}
	}
	round := time.Since(took) / 100
	var wg sync.WaitGroup
	var gone atomic.Int64
	end := time.Now().Add(time.Second)
	for g := range 4 {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(uint64(g), 1))
			for time.Now().Before(end) {
				ctx, cancel := context.WithTimeout(t.Context(), time.Duration(r.Int64N(int64(6*round))))
				err := get(ctx, keys[:n])
				if cancel(); errors.Is(err, context.DeadlineExceeded) {
					gone.Add(1)
				} else if err != nil {
					t.Error(err)
				}
			}
		})
		wg.Go(func() {
			for time.Now().Before(end) {
				if err := get(t.Context(), keys[n:]); err != nil {
					t.Errorf("nobody gave this one up: %v", err)
					return
				}
			}
		})
	}
	wg.Wait()
	if gone.Load() == 0 {
		t.Error("none was given up")
	}
}

// A batch of many operations has a round trip, and over shm, where they share no waits, one for each part that fits the
// processor's caches.
func TestPartsOfBatch(t *testing.T) {
	for provider, want := range map[string]int{"shm": 3, "tcp": 1} {
		r := newRig(t, provider, 1, 5*time.Second)
		var rounds atomic.Int64
		o := r.options()
		o.Events = &client.Events{
			Begin: func(ctx context.Context, _ client.OpEvent) context.Context { return ctx },
			End:   func(_ context.Context, op client.OpEvent) { rounds.Store(int64(op.Rounds)) },
		}
		c := r.client(o)
		ops := make([]client.Op, 65)
		for i := range ops {
			ops[i] = client.Op{Kind: client.OpPut, Key: fmt.Appendf(nil, "key%d", i), Value: []byte("1")}
		}
		c.Do(t.Context(), ops)
		// Some keys may not be remembered, or a lane may be busy, now and then.
		eventually(t, func() string {
			for i := range ops {
				ops[i] = client.Op{Kind: client.OpGet, Key: ops[i].Key}
			}
			c.Do(t.Context(), ops)
			for i := range ops {
				if ops[i].Err != nil || string(ops[i].Item.Value) != "1" {
					t.Fatalf("%s: %q, %v", ops[i].Key, ops[i].Item.Value, ops[i].Err)
				}
			}
			if n := int(rounds.Load()); n != want {
				return fmt.Sprintf("%s: %d round trips, want %d", provider, n, want)
			}
			return ""
		})
	}
}

// Collections go through every way a value goes, short and long, with users' flags and without, and whoever does not
// ask for them is refused.
func TestTypes(t *testing.T) {
	for _, p := range []string{"shm", "tcp"} {
		r := newRig(t, p, 1, 5*time.Second)
		c := r.client(r.options())
		ctx := t.Context()
		for n, size := range map[string]int{"short": 10, "long": 4 << 20} {
			for flags := range uint32(2) {
				if size > 10 && flags == 0 {
					continue // there is memory for one
				}
				k := fmt.Appendf(nil, "%s%d", n, flags)
				v := bytes.Repeat([]byte("v"), size)
				ops := []client.Op{{Kind: client.OpPut, Key: k, Value: v, Type: client.Hash, Flags: flags}}
				if c.Do(ctx, ops); ops[0].Err != nil {
					t.Fatal(ops[0].Err)
				}
				for range 2 { // by hint, too
					if _, err := c.Get(ctx, k); !errors.Is(err, client.ErrWrongType) || client.Outcome(err) != rdma.No {
						t.Errorf("%s: Get of a hash: %v", k, err)
					}
					if _, err := c.GetInto(ctx, k, make([]byte, size)); !errors.Is(err, client.ErrWrongType) {
						t.Errorf("%s: GetInto of a hash: %v", k, err)
					}
				}
				if _, err := c.Incr(ctx, k, 1); !errors.Is(err, client.ErrWrongType) {
					t.Errorf("%s: Incr of a hash: %v", k, err)
				}
				if _, _, err := c.GetIfChanged(ctx, k, 0); !errors.Is(err, client.ErrWrongType) {
					t.Errorf("%s: GetIfChanged of a hash: %v", k, err)
				}
				if err := c.Touch(ctx, k, time.Hour); err != nil {
					t.Errorf("%s: Touch: %v", k, err)
				}
				ops = []client.Op{
					{Kind: client.OpUpdate, Key: k, Typed: true, Update: func(cur client.Item, _ bool) (client.Change,
						error) {
						if cur.Type != client.Hash || cur.Flags != flags {
							t.Errorf("%s: Update sees a %v with flags %d", k, cur.Type, cur.Flags)
						}
						return client.Change{Value: cur.Value, Type: client.List, Flags: cur.Flags}, nil
					}}}
				if c.Do(ctx, ops); ops[0].Err != nil {
					t.Error(ops[0].Err)
				}
				ops = []client.Op{{Kind: client.OpGet, Key: k, Typed: true}}
				if c.Do(ctx, ops); ops[0].Err != nil || ops[0].Item.Type != client.List || ops[0].Item.Flags != flags ||
					!bytes.Equal(ops[0].Item.Value, v) {
					t.Errorf("%s: %v, %v of %d bytes with flags %d", k, ops[0].Err, ops[0].Item.Type,
						len(ops[0].Item.Value), ops[0].Item.Flags)
				}
			}
		}
		n := 0
		for kv, err := range c.Scan(ctx, client.ScanOptions{}) {
			if n++; err != nil || kv.Type != client.List || len(kv.Value) < 10 {
				t.Errorf("scan: %q, %v, %v of %d bytes", kv.Key, err, kv.Type, len(kv.Value))
			}
		}
		if n != 3 {
			t.Errorf("scan gave %d keys", n)
		}
		if _, err := c.Put(ctx, []byte("short0"), []byte("plain"), client.PutOptions{}); err != nil {
			t.Error(err)
		}
		if it, err := c.Get(ctx, []byte("short0")); err != nil || it.Type != client.Plain ||
			string(it.Value) != "plain" {
			t.Errorf("%v, %v %q", err, it.Type, it.Value)
		}
	}
}
