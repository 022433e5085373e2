package client_test

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/devstore"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/testutil"
	"github.com/kvd-project/kvd/rdma"
)

// allow has values of n bytes, and no longer ones, put by c from now on.
func allow(t *testing.T, st *devstore.Store, c *client.Client, n int64) {
	t.Helper()
	if _, err := st.DirectoryNodes()[0].SetNamespace(t.Context(), &dirpb.SetNamespaceRequest{Name: "default",
		KeepLimit: true, MaxValueBytes: uint64(n)}); err != nil {
		t.Fatal(err)
	}
	testutil.Until(t, "the namespace's longest value", func() bool { return c.MaxValueLen() == n })
}

// booksAdd waits until c has nothing live and nothing in limbo, so that all that the session was granted is free.
func booksAdd(t *testing.T, c *client.Client) {
	t.Helper()
	testutil.UntilNone(t, "memory in use", func() string {
		s := c.Stats()
		if s.LiveUnits == 0 && s.LimboUnits == 0 && s.FreeUnits == s.GrantedUnits && s.LostUnits == 0 {
			return ""
		}
		return fmt.Sprintf("%d units live, %d in limbo, %d free of %d, %d lost", s.LiveUnits, s.LimboUnits, s.FreeUnits,
			s.GrantedUnits, s.LostUnits)
	})
}

// A namespace says how long its values may be. Longer ones are refused by an error that says so, whichever operation
// makes them; what is there already stays readable. The memory of one that goes is free afterwards.
func TestMaxValue(t *testing.T) {
	t.Parallel()
	for _, p := range []struct {
		provider string
		bytes    int
	}{{"shm", 300 << 20}, {"tcp", 100 << 20}} {
		t.Run(p.provider, func(t *testing.T) {
			if testing.Short() {
				t.Skip("moves hundreds of megabytes: make test does, without -short")
			}
			st, c := open(t, p.provider, devstore.Options{CapacityBytes: 2 << 30},
				client.Options{OpTimeout: time.Minute})
			ctx, k := t.Context(), []byte("k")
			if n := c.MaxValueLen(); n != client.DefaultMaxValueLen {
				t.Fatalf("values of %d bytes", n)
			}
			want := make([]byte, p.bytes)
			for i := range len(want) / 4096 {
				want[i*4096+i%4096] = byte(rand.Uint32())
			}
			refused := func(what string, err error) {
				t.Helper()
				if !errors.Is(err, client.ErrTooLarge) || !errors.Is(err, client.ErrInvalid) ||
					client.Outcome(err) != rdma.No || !strings.Contains(err.Error(), "its namespace allows") {
					t.Errorf("%s: %v", what, err)
				}
			}
			put := func() error { _, err := c.Put(ctx, k, want, client.PutOptions{Flags: 7}); return err }
			refused("put", put())
			refused("put of several", c.MultiPut(ctx, []client.KV{{Key: k, Value: want}})[0].Err)
			refused("transaction", c.MultiCAS(ctx, []client.Op{{Kind: client.OpPut, Key: k, Value: want}}))
			_, err := c.Update(ctx, k, func(client.Item, bool) (client.Change, error) {
				return client.Change{Value: want}, nil
			})
			refused("update", err)

			allow(t, st, c, int64(p.bytes))
			for range 2 { // insert, then replace
				if err := put(); err != nil {
					t.Fatal(err)
				}
			}
			if err := c.Touch(ctx, k, time.Hour); err != nil { // which reads and writes all of it
				t.Fatal(err)
			}
			dst := make([]byte, p.bytes)
			if n, err := c.GetInto(ctx, k, dst); err != nil || n != len(want) || !bytes.Equal(dst, want) {
				t.Fatalf("%d bytes, %v", n, err)
			}
			allow(t, st, c, 1<<20)
			refused("put below a lower bound", put())
			if n, _, err := c.GetRange(ctx, k, int64(p.bytes)-10, dst[:20]); err != nil || n != 10 ||
				!bytes.Equal(dst[:n], want[p.bytes-10:]) {
				t.Errorf("the last %d bytes: %v", n, err)
			}
			if err := c.Delete(ctx, k); err != nil {
				t.Fatal(err)
			}
			booksAdd(t, c)
		})
	}
}
