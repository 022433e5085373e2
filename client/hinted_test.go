package client_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/devstore"
	"github.com/kvd-project/kvd/internal/inside"
	"github.com/kvd-project/kvd/rdma"
)

// A batch over remembered keys takes the verbs of its operations in few chains.
func TestHintedCosts(t *testing.T) {
	_, c := open(t, "shm", devstore.Options{}, client.Options{Lanes: 1})
	const n = 40
	// The memory of where keys are is set-associative and may have dropped one of so many.
	for attempt := range 20 {
		ops := make([]client.Op, 0, 2*n)
		for i := range n {
			put, get := fmt.Appendf(nil, "put%d-%d", attempt, i), fmt.Appendf(nil, "get%d-%d", attempt, i)
			mustPut(t, c, put, "old")
			mustPut(t, c, get, "value of "+string(get))
			ops = append(ops, client.Op{Kind: client.OpPut, Key: put, Value: []byte("new"), Flags: uint32(i)},
				client.Op{Kind: client.OpGet, Key: get, Into: make([]byte, 0, 64)})
		}
		before := c.Stats()
		c.Do(t.Context(), ops)
		after := c.Stats()
		for i := range ops {
			o := &ops[i]
			if o.Err != nil || o.Item.Version == 0 || o.Kind == client.OpGet && string(o.Item.Value) != "value of "+
				string(o.Key) {
				t.Errorf("op %d: %q, version %d, %v", i, o.Item.Value, o.Item.Version, o.Err)
			}
		}
		for i := range n {
			it, err := c.Get(t.Context(), ops[2*i].Key)
			if err != nil || string(it.Value) != "new" || it.Flags != uint32(i) {
				t.Errorf("%q: %q, flags %d, %v", ops[2*i].Key, it.Value, it.Flags, err)
			}
		}
		if after.CacheHits-before.CacheHits != 2*n {
			continue
		}
		verbs := func(op rdma.Opcode) uint64 { return after.Verbs.Verbs[op] - before.Verbs.Verbs[op] }
		if r, w, x := verbs(rdma.OpRead), verbs(rdma.OpWrite), verbs(rdma.OpCmpAndSwp); r != 2*n || w != n || x != n {
			t.Errorf("%d READ, %d WRITE, %d CAS, want %d, %d, %d", r, w, x, 2*n, n, n)
		}
		if bells := after.Verbs.Doorbells - before.Verbs.Doorbells; bells <= 2*n/16 {
			return
		} // else memory has come back meanwhile, which is for tasks
	}
	t.Error("of 20 batches none had all its keys remembered and few doorbells")
}

func mustPut(t *testing.T, c *client.Client, key []byte, value string) {
	t.Helper()
	if _, err := c.Put(t.Context(), key, []byte(value), client.PutOptions{}); err != nil {
		t.Fatal(err)
	}
}

// Sessions that write and read the same few keys, alone and in batches, often by words
// that are not there any more: what ended before another operation began has at
// most its version, and every version has the one value that was put with it.
func TestHintedOrder(t *testing.T) {
	for provider, rounds := range map[string]int{"shm": 3000, "tcp": 400} {
		t.Run(provider, func(t *testing.T) { hintedOrder(t, provider, rounds) })
	}
}

func hintedOrder(t *testing.T, provider string, rounds int) {
	st, a := open(t, provider, devstore.Options{}, client.Options{Lanes: 2})
	clients := []*client.Client{a}
	for range 2 {
		c, err := client.Open(t.Context(), client.Options{Directory: st.Directory(), Devices: st.Devices(),
			Provider: provider, Lanes: 1})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		clients = append(clients, c)
	}
	const keys, batch = 6, 8
	type event struct {
		begin, end int64
		version    uint64
		value      uint64
		put        bool
	}
	var clock atomic.Int64
	var mu sync.Mutex
	history := [keys][]event{}
	add := func(key int, e event) {
		mu.Lock()
		history[key] = append(history[key], e)
		mu.Unlock()
	}
	names := [keys][]byte{}
	for k := range keys {
		names[k] = fmt.Appendf(nil, "key%d", k)
		v, err := a.Put(t.Context(), names[k], make([]byte, 8), client.PutOptions{})
		if err != nil {
			t.Fatal(err)
		}
		add(k, event{clock.Add(1), clock.Add(1), v, 0, true})
	}
	var next atomic.Uint64
	var wg sync.WaitGroup
	for g := range 2 * len(clients) {
		c := clients[g%len(clients)]
		rnd := rand.New(rand.NewPCG(1, uint64(g)))
		wg.Go(func() {
			for range rounds {
				ops := make([]client.Op, 0, batch)
				at := make([]int, 0, batch)
				n := 1
				if rnd.IntN(2) == 0 {
					n = batch
				}
				for range n {
					k := rnd.IntN(keys) // some twice
					o := client.Op{Kind: client.OpGet, Key: names[k]}
					if rnd.IntN(2) == 0 {
						o.Kind, o.Value = client.OpPut, binary.LittleEndian.AppendUint64(nil, next.Add(1))
					}
					ops, at = append(ops, o), append(at, k)
				}
				begin := clock.Add(1)
				c.Do(t.Context(), ops)
				end := clock.Add(1)
				for i := range ops {
					o := &ops[i]
					if o.Err != nil {
						t.Errorf("%v", o.Err)
						return
					}
					v := o.Item.Value
					if o.Kind == client.OpPut {
						v = o.Value
					}
					add(at[i], event{begin, end, o.Item.Version, binary.LittleEndian.Uint64(v), o.Kind == client.OpPut})
				}
			}
		})
	}
	wg.Wait()
	for k := range keys {
		values := map[uint64]uint64{}
		ends := make([]uint64, clock.Load()+2) // the highest version of what ended by then
		for _, e := range history[k] {
			if v, ok := values[e.version]; ok && v != e.value {
				t.Fatalf("key %d: version %d has values %d and %d", k, e.version, v, e.value)
			}
			values[e.version] = e.value
			ends[e.end] = max(ends[e.end], e.version)
		}
		for i := 1; i < len(ends); i++ {
			ends[i] = max(ends[i], ends[i-1])
		}
		for _, e := range history[k] {
			if least := ends[e.begin]; e.version < least || e.put && e.version == least {
				t.Fatalf("key %d: put %v, version %d, begun at %d, when %d had ended", k, e.put, e.version, e.begin,
					least)
			}
		}
	}
	var lost, unknown uint64
	for _, c := range clients {
		s := c.Stats()
		lost += s.CASLosses
		unknown += s.Unknown
	}
	if lost == 0 || unknown != 0 {
		t.Errorf("%d CAS lost, %d outcomes unknown", lost, unknown)
	}
}

// TestOnWait: who waits says so before, who need not wait does not.
func TestOnWait(t *testing.T) {
	for provider, wants := range map[string]bool{"shm": false, "tcp": true} {
		t.Run(provider, func(t *testing.T) {
			_, c := open(t, provider, devstore.Options{}, client.Options{Lanes: 1})
			type key struct{}
			var waits atomic.Int64
			ctx := inside.OnWait(context.WithValue(t.Context(), key{}, 7), func() { waits.Add(1) })
			if ctx.Value(key{}) != 7 {
				t.Error("what the context had is gone")
			}
			mustPut(t, c, []byte("a"), "1")
			for name, f := range map[string]func() error{
				"Get": func() error { _, err := c.Get(ctx, []byte("a")); return err },
				"Put": func() error { _, err := c.Put(ctx, []byte("a"), []byte("2"), client.PutOptions{}); return err },
				"Do": func() error {
					ops := []client.Op{{Kind: client.OpGet, Key: []byte("a")},
						{Kind: client.OpPut, Key: []byte("b"), Value: []byte("3")}}
					c.Do(ctx, ops)
					return errors.Join(ops[0].Err, ops[1].Err)
				},
			} {
				// In the background a lane is busy now and then, and an answer may be there at once.
				eventually(t, func() string {
					before := waits.Load()
					if err := f(); err != nil {
						t.Fatalf("%s: %v", name, err)
					}
					if waited := waits.Load() > before; waited != wants {
						return fmt.Sprintf("%s: waited %v, want %v", name, waited, wants)
					}
					return ""
				})
			}
		})
	}
}
