package client_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/tcp"
)

// TestMultiCAS: all of it happens, or nothing does and the error says why and where.
func TestMultiCAS(t *testing.T) {
	for _, p := range []string{"shm", "tcp"} {
		for replicas := range 2 {
			t.Run(fmt.Sprintf("%s r=%d", p, replicas+1), func(t *testing.T) {
				r := newRig(t, p, replicas+1, 5*time.Second)
				r.create(&dirpb.CreateNamespaceRequest{Name: "n", Replicas: uint32(replicas + 1),
					BytesPerNode: 24 << 20})
				o := r.options()
				o.Namespace = "n"
				c := r.client(o)
				ctx := t.Context()
				get := func(key string) string {
					it, err := c.Get(ctx, []byte(key))
					if errors.Is(err, client.ErrNotFound) {
						return "-"
					}
					if err != nil {
						t.Fatal(err)
					}
					return string(it.Value)
				}
				expires := time.Now().Add(time.Hour).Truncate(time.Millisecond)
				ops := []client.Op{
					{Kind: client.OpPut, Key: []byte("a"), Value: []byte("1"), Cond: client.IfAbsent, Flags: 7, Note: 8,
						Expires: expires},
					{Kind: client.OpPut, Key: []byte("b"), Value: []byte("2")},
					{Kind: client.OpDelete, Key: []byte("c")},
					{Kind: client.OpKeep, Key: []byte("d"), Cond: client.IfAbsent},
				}
				if err := c.MultiCAS(ctx, ops); err != nil {
					t.Fatal(err)
				}
				a, err := c.Get(ctx, []byte("a"))
				if err != nil || string(a.Value) != "1" || a.Version != ops[0].Item.Version || a.Flags != 7 ||
					a.Note != 8 || !a.Expires.Equal(expires) {
					t.Errorf("a is %+v, %v, want version %d", a, err, ops[0].Item.Version)
				}
				if s := get("b") + get("c") + get("d"); s != "2--" || ops[2].Item.Version != 0 ||
					ops[3].Item.Version != 0 {
					t.Errorf("b, c, d are %s", s)
				}
				for _, bad := range []struct {
					op   client.Op
					want error
				}{
					{client.Op{Kind: client.OpPut, Key: []byte("a"), Cond: client.IfVersion, Version: a.Version - 1},
						client.ErrConflict},
					{client.Op{Kind: client.OpPut, Key: []byte("a"), Cond: client.IfAbsent}, client.ErrExists},
					{client.Op{Kind: client.OpDelete, Key: []byte("a"), Cond: client.IfVersion, Version: 1},
						client.ErrConflict},
					{client.Op{Kind: client.OpKeep, Key: []byte("a"), Cond: client.IfAbsent}, client.ErrExists},
					{client.Op{Kind: client.OpKeep, Key: []byte("none"), Cond: client.IfPresent}, client.ErrNotFound},
					{client.Op{Kind: client.OpKeep, Key: []byte("none"), Cond: client.IfVersion, Version: 1},
						client.ErrNotFound},
					{client.Op{Kind: client.OpPut, Key: []byte("none"), Cond: client.IfPresent}, client.ErrNotFound},
				} {
					for _, other := range []string{"b", "fresh"} {
						ops := []client.Op{{Kind: client.OpPut, Key: []byte(other), Value: []byte("3")}, bad.op}
						err := c.MultiCAS(ctx, ops)
						if !errors.Is(err, bad.want) || !errors.Is(ops[1].Err, bad.want) || ops[0].Err != nil ||
							client.Outcome(err) != rdma.No || !strings.Contains(err.Error(), string(bad.op.Key)) {
							t.Errorf("%+v: %v, by op %v and %v, want %v", bad.op, err, ops[0].Err, ops[1].Err, bad.want)
						}
						if err := c.MultiCAS(ctx, []client.Op{bad.op}); !errors.Is(err, bad.want) {
							t.Errorf("%+v alone: %v", bad.op, err)
						}
					}
				}
				if s := get("a") + get("b") + get("fresh"); s != "12-" {
					t.Errorf("after refusals a, b and fresh are %s", s)
				}
				// A key that was kept has the version it had, and every way to change a key works on what a transaction
				// left.
				ops = []client.Op{{Kind: client.OpKeep, Key: []byte("a"), Cond: client.IfVersion, Version: a.Version},
					{Kind: client.OpDelete, Key: []byte("b"), Cond: client.IfPresent},
					{Kind: client.OpPut, Key: []byte("n"), Value: []byte("5")}}
				if err := c.MultiCAS(ctx, ops); err != nil || ops[0].Item.Version != a.Version {
					t.Errorf("keep: %v, version %d, want %d", err, ops[0].Item.Version, a.Version)
				}
				if it, err := c.Get(ctx, []byte("a")); err != nil || it.Version != a.Version {
					t.Errorf("what was kept: %+v, %v", it, err)
				}
				if n, err := c.Incr(ctx, []byte("n"), 2); err != nil || n != 7 {
					t.Errorf("incr: %d, %v", n, err)
				}
				if err := c.Delete(ctx, []byte("a")); err != nil {
					t.Error(err)
				}
				if s := get("a") + get("b") + get("n"); s != "--7" {
					t.Errorf("at last a, b and n are %s", s)
				}
				for _, bad := range [][]client.Op{
					{{Kind: client.OpPut, Key: []byte("x")}, {Kind: client.OpPut, Key: []byte("x")}},
					{{Kind: client.OpGet, Key: []byte("x")}, {Kind: client.OpPut, Key: []byte("y")}},
					{{Kind: client.OpPut, Key: nil}, {Kind: client.OpPut, Key: []byte("y")}},
				} {
					if err := c.MultiCAS(ctx, bad); !errors.Is(err, client.ErrInvalid) {
						t.Errorf("%+v: %v", bad, err)
					}
				}
				if err := c.MultiCAS(ctx, make([]client.Op, client.MaxTxnKeys+1)); !errors.Is(
					err, client.ErrTxnTooLarge) {
					t.Errorf("too many: %v", err)
				}
				kept := make([]client.Op, 16*client.MaxTxnKeys+1)
				for i := range kept {
					kept[i] = client.Op{Kind: client.OpKeep, Key: fmt.Append(nil, "kept", i), Cond: client.IfAbsent}
				}
				if err := c.MultiCAS(ctx, kept); !errors.Is(err, client.ErrTxnTooLarge) {
					t.Errorf("too many to keep: %v", err)
				}
				if err := c.MultiCAS(ctx, kept[:3*client.MaxTxnKeys]); err != nil {
					t.Errorf("many to keep: %v", err)
				}
				half := make([]byte, client.MaxTxnBytes/2)
				if err := c.MultiCAS(ctx, []client.Op{{Kind: client.OpPut, Key: []byte("x"), Value: half},
					{Kind: client.OpPut, Key: []byte("y"), Value: half}}); !errors.Is(err, client.ErrTxnTooLarge) {
					t.Errorf("too long: %v", err)
				}
			})
		}
	}
}

// TestTxnBank: transfers by several clients, each with several goroutines, keep the sum, in every sweep; and writers of
// single keys lose nothing.
func TestTxnBank(t *testing.T) {
	t.Parallel()
	const accounts, each = 16, 100
	transfers, counts := 60, 200 // of each goroutine
	if testing.Short() {
		transfers, counts = 20, 60
	}
	for _, p := range []string{"shm", "tcp"} {
		for replicas := range 2 {
			t.Run(fmt.Sprintf("%s r=%d", p, replicas+1), func(t *testing.T) {
				r := newRig(t, p, replicas+1, 5*time.Second)
				r.create(&dirpb.CreateNamespaceRequest{Name: "n", Replicas: uint32(replicas + 1),
					BytesPerNode: 24 << 20})
				o := r.options()
				o.Namespace = "n"
				ctx := t.Context()
				key := func(i int) []byte { return fmt.Appendf(nil, "account%d", i) }
				first := r.client(o)
				for i := range accounts {
					if _, err := first.Put(ctx, key(i), []byte(strconv.Itoa(each)), client.PutOptions{}); err != nil {
						t.Fatal(err)
					}
				}
				sum := func(c *client.Client) (n int, err error) {
					err = client.Txn(ctx, c, func(tx *client.Tx) error {
						n = 0
						for i := range accounts {
							it, err := tx.Get(key(i))
							if err != nil {
								return err
							}
							v, _ := strconv.Atoi(string(it.Value))
							n += v
						}
						return nil
					})
					return n, err
				}
				var wg sync.WaitGroup
				for range 3 {
					c := r.client(o)
					for range 2 {
						wg.Go(func() {
							for range transfers {
								if err := transfer(ctx, c, key(rand.IntN(accounts)), key(rand.IntN(accounts)),
									rand.IntN(5)); err != nil {
									t.Error(err)
								}
							}
						})
					}
					wg.Go(func() {
						for i := range counts {
							if _, err := c.Incr(ctx, []byte("count"), 1); err != nil {
								t.Error(err)
							}
							if err := client.Txn(ctx, c, func(tx *client.Tx) error {
								it, err := tx.Get([]byte("count"))
								tx.Put([]byte("copy"), it.Value, client.PutOptions{})
								return err
							}); err != nil {
								t.Error(err)
							}
							if i%20 == 0 {
								if n, err := sum(c); err != nil || n != accounts*each {
									t.Errorf("the sum is %d, %v", n, err)
								}
							}
						}
					})
				}
				wg.Wait()
				if n, err := sum(first); err != nil || n != accounts*each {
					t.Errorf("the sum is %d, %v, at last", n, err)
				}
				if n, err := first.Incr(ctx, []byte("count"), 0); err != nil || n != int64(3*counts) {
					t.Errorf("count is %d, %v", n, err)
				}
			})
		}
	}
}

func transfer(ctx context.Context, c client.API, from, to []byte, n int) error {
	return client.Txn(ctx, c, func(tx *client.Tx) error {
		add := func(key []byte, n int) error {
			it, err := tx.Get(key)
			v, _ := strconv.Atoi(string(it.Value))
			tx.Put(key, []byte(strconv.Itoa(v+n)), client.PutOptions{})
			return err
		}
		if err := tx.Load(from, to); err != nil {
			return err
		}
		return errors.Join(add(from, -n), add(to, n))
	})
}

// TestTxnCosts counts what a transaction costs: with hints, 2r round trips to the answer, 3nr + r verbs to it and nr
// behind it.
func TestTxnCosts(t *testing.T) {
	for replicas := 1; replicas <= 3; replicas++ {
		r := newRig(t, "shm", replicas, 5*time.Second)
		r.create(&dirpb.CreateNamespaceRequest{Name: "n", Replicas: uint32(replicas), BytesPerNode: 24 << 20})
		o := r.options()
		o.Namespace, o.NoEviction = "n", true
		c := r.client(o)
		for _, n := range []int{2, 4, 8} {
			ops := make([]client.Op, n)
			for i := range ops {
				ops[i] = client.Op{Kind: client.OpPut, Key: fmt.Appendf(nil, "key%d", i), Value: []byte("value")}
			}
			for range 2 { // keys, hints, status words
				if err := c.MultiCAS(t.Context(), ops); err != nil {
					t.Fatal(err)
				}
			}
			before := c.Stats()
			if err := c.MultiCAS(t.Context(), ops); err != nil {
				t.Fatal(err)
			}
			after := c.Stats()
			rounds := (after.Rounds["prepare"]-before.Rounds["prepare"])/uint64(n) +
				after.Rounds["decide"] - before.Rounds["decide"] + after.Rounds["transact"] - before.Rounds["transact"]
			verbs := after.Verbs.Total() - before.Verbs.Total()
			wantRounds, wantVerbs := uint64(2*replicas), uint64(4*n*replicas+replicas)
			if replicas == 1 {
				wantRounds, wantVerbs = 1, uint64(5*n) // one chain
			}
			if want := wantRounds; rounds != want {
				t.Errorf("r = %d, %d keys: %d round trips, want %d", replicas, n, rounds, want)
			}
			if want := wantVerbs; verbs != want {
				t.Errorf("r = %d, %d keys: %d verbs, want %d", replicas, n, verbs, want)
			}
		}
	}
}

// TestTxnWithoutSession: a session that has ended, and that no other one follows in time, is an error that callers
// know.
func TestTxnWithoutSession(t *testing.T) {
	r := newRig(t, "shm", 1, time.Minute)
	r.create(&dirpb.CreateNamespaceRequest{Name: "n", BytesPerNode: 24 << 20})
	o := r.options()
	o.Namespace, o.OpTimeout = "n", 50*time.Millisecond
	c := r.client(o)
	c.EndStatus()
	ops := []client.Op{{Kind: client.OpPut, Key: []byte("a")}, {Kind: client.OpPut, Key: []byte("b")}}
	if err := c.MultiCAS(t.Context(), ops); !errors.Is(err, client.ErrUnavailable) || client.Outcome(err) != rdma.No {
		t.Errorf("%v, outcome %v", err, client.Outcome(err))
	}
}

// TestTxnOutcomes: whatever happens to connections, contexts and sessions, a transaction tells whether it happened, and
// is there as a whole or not at all.
func TestTxnOutcomes(t *testing.T) {
	t.Parallel()
	for replicas := 1; replicas <= 2; replicas++ {
		t.Run(fmt.Sprintf("r=%d", replicas), func(t *testing.T) {
			t.Parallel()
			r := newRig(t, "tcp", 2, time.Second)
			r.create(&dirpb.CreateNamespaceRequest{Name: "n", Replicas: uint32(replicas), BytesPerNode: 24 << 20})
			o := r.options()
			o.Namespace, o.OpTimeout = "n", 500*time.Millisecond
			c := r.client(o)
			var stop atomic.Bool
			var n atomic.Int64
			var wg sync.WaitGroup
			outcomes := make([]map[int64]rdma.Outcome, 4)
			keys := func(i int64) (a, b []byte) { return fmt.Appendf(nil, "%d/a", i), fmt.Appendf(nil, "b/%d", i) }
			for g := range outcomes {
				outcomes[g] = map[int64]rdma.Outcome{}
				wg.Go(func() {
					for !stop.Load() {
						i := n.Add(1)
						a, b := keys(i)
						v := strconv.AppendInt(nil, i, 10)
						ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
						if i%4 == 0 {
							ctx, cancel = context.WithTimeout(t.Context(), rand.N(2*time.Millisecond))
						}
						err := c.MultiCAS(ctx, []client.Op{
							{Kind: client.OpPut, Key: a, Value: v, Cond: client.IfAbsent},
							{Kind: client.OpPut, Key: b, Value: v, Cond: client.IfAbsent},
							{Kind: client.OpPut, Key: []byte("last"), Value: v}, // all of them meet here
						})
						if outcomes[g][i] = client.Outcome(err); ctx.Err() == nil && err != nil &&
							!errors.Is(err, client.ErrUnknownOutcome) && !errors.Is(err, client.ErrUnavailable) &&
							!errors.Is(err, client.ErrTxnContended) {
							t.Errorf("transaction %d: an error of no known type: %v", i, err)
						}
						cancel()
					}
				})
			}
			progress := func(k int64) {
				for end := n.Load() + k; n.Load() < end; {
					time.Sleep(time.Millisecond)
				}
			}
			for i := range 12 {
				progress(int64(20 + i))
				r.nodes[i%2].proxy.cut()
				switch i {
				case 5:
					r.nodes[0].proxy.stall()
					progress(8)
					r.nodes[0].proxy.resume()
				case 9:
					session := c.Stats().Session
					r.dirProxy.setDown(true)
					eventually(t, func() string {
						for _, s := range r.status().GetSessions() {
							if s.GetId() == session {
								return fmt.Sprintf("session %d is %v", session, s.GetLife())
							}
						}
						return ""
					})
					r.dirProxy.setDown(false)
				}
			}
			progress(50)
			stop.Store(true)
			wg.Wait()
			other := r.client(client.Options{Directory: []string{r.dir.Addr()}, Devices: r.devices, Provider: "tcp",
				Namespace: "n"})
			counts := map[rdma.Outcome]int{}
			for _, m := range outcomes {
				for i, out := range m {
					a, b := keys(i)
					counts[out]++
					res := other.MultiGet(t.Context(), [][]byte{a, b})
					there := res[0].Err == nil
					if there != (res[1].Err == nil) || out == rdma.Yes && !there || out == rdma.No && there {
						t.Errorf("transaction %d, said to be %v: %v and %v", i, out, res[0].Err, res[1].Err)
					}
				}
			}
			t.Logf("outcomes: %v", counts)
			if counts[rdma.Yes] == 0 || counts[rdma.No] == 0 {
				t.Errorf("outcomes: %v: too few to show anything", counts)
			}
		})
	}
}

// TestTxnInDoubt: a status word that an intent may come to name serves no other transaction. A memory node falls silent
// after an intent was sent to it; the transaction is refused, others of the same placement group commit, and then the
// intent lands.
func TestTxnInDoubt(t *testing.T) {
	for name, cond := range map[string]client.Cond{"with another intent": client.Always,
		"as the only intent": client.IfAbsent} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, "tcp", 2, time.Minute)
			r.create(&dirpb.CreateNamespaceRequest{Name: "default", Replicas: 1})
			d, err := tcp.Open(tcp.Options{PeerTimeout: time.Minute}) // the connection outlives the silence
			if err != nil {
				t.Fatal(err)
			}
			r.devices = append(r.devices, rdma.NewDevice("tcp", d))
			o := r.options()
			o.Devices, o.OpTimeout, o.Lanes = r.devices[1:], 400*time.Millisecond, 1
			c := r.client(o)
			ctx := t.Context()
			var keys [2][][]byte // by memory node
			for i := 0; len(keys[0]) < 1 || len(keys[1]) < 2; i++ {
				key := []byte(strconv.Itoa(i))
				n := r.nodeOf(c, key)
				keys[n] = append(keys[n], key)
			}
			home, other, silent := keys[1][0], keys[1][1], keys[0][0]
			put := func(key []byte, value string, cond client.Cond) client.Op {
				return client.Op{Kind: client.OpPut, Key: key, Value: []byte(value), Cond: cond}
			}
			do := func(ops ...client.Op) {
				t.Helper()
				eventually(t, func() string {
					if err := c.MultiCAS(ctx, ops); err != nil {
						return err.Error()
					}
					return ""
				})
			}
			for range 2 { // connections, hints, status words
				do(put(home, "1", client.Always), put(other, "1", client.Always), put(silent, "1", client.Always))
			}
			settled := func() {
				t.Helper()
				eventually(t, func() string {
					if busy, _ := c.StatusWords(); busy > 0 {
						return fmt.Sprintf("%d status words are taken", busy)
					}
					return ""
				})
			}
			settled()
			r.nodes[0].proxy.stall()
			defer r.nodes[0].proxy.resume()
			err = c.MultiCAS(ctx, []client.Op{put(home, "2", cond), put(silent, "2", client.Always)})
			if client.Outcome(err) != rdma.No || !errors.Is(err, client.ErrUnavailable) &&
				!errors.Is(err, client.ErrExists) {
				t.Fatalf("a transaction with a silent memory node: %v", err)
			}
			settled()
			do(put(home, "3", client.Always), put(other, "3", client.Always)) // with the word given back last
			r.nodes[0].proxy.resume()
			for _, c := range []*client.Client{c, r.client(o)} { // the first over the connection that brings the intent
				if it, err := c.Get(ctx, silent); err != nil || string(it.Value) != "1" {
					t.Errorf("after a transaction that did not happen: %q, %v, want 1", it.Value, err)
				}
			}
		})
	}
}

// TestTxnBrokenAndNotAborted: a chain broke, which may have happened, and the session is lost before it can be aborted.
// It is not tried again.
func TestTxnBrokenAndNotAborted(t *testing.T) {
	t.Parallel()
	r := newRig(t, "shm", 1, 5*time.Second)
	r.create(&dirpb.CreateNamespaceRequest{Name: "n", Replicas: 1, BytesPerNode: 24 << 20})
	o := r.options()
	o.Namespace = "n"
	c := r.client(o)
	ops := []client.Op{{Kind: client.OpPut, Key: []byte("a")}, {Kind: client.OpPut, Key: []byte("b")}}
	if err := c.MultiCAS(t.Context(), ops); err != nil {
		t.Fatal(err)
	}
	again, err := c.AbortBroken(t.Context(), ops, true)
	if again || client.Outcome(err) != rdma.Unknown {
		t.Errorf("%v, tried again: %v; want an unknown outcome", err, again)
	}
}

// TestTxnGivenUp: transactions whose callers go before anything is placed leave their status words as they were.
func TestTxnGivenUp(t *testing.T) {
	t.Parallel()
	r := newRig(t, "tcp", 1, time.Minute)
	r.create(&dirpb.CreateNamespaceRequest{Name: "n", Replicas: 1, BytesPerNode: 24 << 20})
	d, err := tcp.Open(tcp.Options{PeerTimeout: time.Minute}) // the connection outlives the silence
	if err != nil {
		t.Fatal(err)
	}
	r.devices = append(r.devices, rdma.NewDevice("tcp", d))
	o := r.options()
	o.Namespace, o.Devices, o.Lanes = "n", r.devices[1:], 1
	c, other := r.client(o), r.client(o)
	ops := func(a, b string) []client.Op {
		return []client.Op{{Kind: client.OpPut, Key: []byte(a)}, {Kind: client.OpPut, Key: []byte(b)}}
	}
	for range 2 { // connections, status words
		if err := c.MultiCAS(t.Context(), ops("a", "b")); err != nil {
			t.Fatal(err)
		}
	}
	if err := other.MultiCAS(t.Context(), ops("x", "y")); err != nil { // c has no hints of these
		t.Fatal(err)
	}
	eventually(t, func() string {
		if busy, _ := c.StatusWords(); busy > 0 {
			return fmt.Sprintf("%d status words are taken", busy)
		}
		return ""
	})
	r.nodes[0].proxy.stall()
	defer r.nodes[0].proxy.resume()
	for range 10 {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
		if err := c.MultiCAS(ctx, ops("x", "y")); client.Outcome(err) != rdma.No {
			t.Errorf("a transaction that is looking for its keys: %v", err)
		}
		cancel()
		if busy, aside := c.StatusWords(); busy > 0 || aside > 0 {
			t.Fatalf("%d status words are taken, and %d put aside", busy, aside)
		}
	}
	r.nodes[0].proxy.resume()
	if err := c.MultiCAS(t.Context(), ops("x", "y")); err != nil {
		t.Error(err)
	}
}

// TestTxnReadsAmongWriters: a transaction that only reads ends after a few tries, whoever writes its keys, and sees
// them as of one instant.
func TestTxnReadsAmongWriters(t *testing.T) {
	t.Parallel()
	for replicas := 1; replicas <= 2; replicas++ {
		t.Run(fmt.Sprintf("r=%d", replicas), func(t *testing.T) {
			t.Parallel()
			r := newRig(t, "tcp", 2, 5*time.Second)
			r.create(&dirpb.CreateNamespaceRequest{Name: "n", Replicas: uint32(replicas), BytesPerNode: 24 << 20})
			o := r.options()
			o.Namespace, o.OpTimeout = "n", time.Minute
			c, other := r.client(o), r.client(o)
			keys := make([][]byte, 8)
			for i := range keys {
				keys[i] = fmt.Append(nil, "k", i)
			}
			long := []byte(strings.Repeat("x", 100))
			var stop atomic.Bool
			var wg sync.WaitGroup
			for g := range 4 {
				wg.Go(func() {
					for n := 0; !stop.Load(); n++ {
						ops := make([]client.Op, len(keys))
						for i, k := range keys {
							ops[i] = client.Op{Kind: client.OpPut, Key: k,
								Value: fmt.Appendf(bytes.Clone(long), "%d.%d", g, n)}
							if i == 3 && n%3 == 0 {
								ops[i].Kind = client.OpDelete
							}
						}
						if err := other.MultiCAS(t.Context(), ops); err != nil &&
							!errors.Is(err, client.ErrTxnContended) {
							t.Error(err)
							return
						}
					}
				})
			}
			most := 0
			for range 60 {
				runs := 0
				var got []string
				err := client.Txn(t.Context(), c, func(tx *client.Tx) error {
					runs++
					got = got[:0]
					for i, k := range keys {
						it, err := tx.Get(k)
						switch {
						case errors.Is(err, client.ErrNotFound) && i == 3:
						case err != nil && !errors.Is(err, client.ErrNotFound):
							return err
						default:
							got = append(got, string(it.Value))
						}
					}
					return nil
				})
				if err != nil {
					t.Fatalf("after %d runs: %v", runs, err)
				}
				if len(slices.Compact(got)) != 1 {
					t.Fatalf("values of several instants: %q", got)
				}
				most = max(most, runs)
			}
			stop.Store(true)
			wg.Wait()
			if most > 4 {
				t.Errorf("%d runs", most)
			}
		})
	}
}
