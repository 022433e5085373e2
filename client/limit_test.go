package client_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/client/clienttest"
	"github.com/kvd-project/kvd/internal/devstore"
	"github.com/kvd-project/kvd/internal/inside"
	"github.com/kvd-project/kvd/rdma"
)

// TestLimitMemory: an operation that would read more than it may does not, says how much it
// wants, and does with that much.
func TestLimitMemory(t *testing.T) {
	try := func(t *testing.T, c client.API) {
		const limit = 64 << 10
		few := inside.LimitMemory(t.Context(), limit)
		for _, n := range []int{10, 40 << 10, 100 << 10, 3 << 20, 9 << 20} {
			k := fmt.Append(nil, "k", n)
			v := bytes.Repeat([]byte("v"), n)
			if _, err := c.Put(few, k, v, client.PutOptions{Flags: 7}); err != nil {
				t.Fatal(err)
			}
			grow := func(cur client.Item, _ bool) (client.Change, error) {
				return client.Change{Value: append(bytes.Clone(cur.Value), 'w'), Flags: cur.Flags}, nil
			}
			for name, op := range map[string]func(ctx context.Context) (client.Item, error){
				"Get": func(ctx context.Context) (client.Item, error) { return c.Get(ctx, k) },
				"GetInto": func(ctx context.Context) (client.Item, error) {
					dst := make([]byte, n+1)
					m, err := c.GetInto(ctx, k, dst)
					return client.Item{Value: dst[:m], Flags: 7}, err
				},
				"Do": func(ctx context.Context) (client.Item, error) {
					ops := []client.Op{{Kind: client.OpGet, Key: []byte("none")}, {Kind: client.OpGet, Key: k}}
					c.Do(ctx, ops)
					if !errors.Is(ops[0].Err, client.ErrNotFound) {
						t.Errorf("beside it: %v", ops[0].Err)
					}
					return ops[1].Item, ops[1].Err
				},
				"Update": func(ctx context.Context) (client.Item, error) {
					if _, err := c.Update(ctx, k, grow); err != nil {
						return client.Item{}, err
					}
					it, err := c.Get(t.Context(), k)
					if len(it.Value) == n+1 {
						it.Value = it.Value[:n]
						_, err = c.Put(t.Context(), k, v, client.PutOptions{Flags: 7})
					}
					return it, err
				},
			} {
				it, err := op(few)
				var large *inside.TooLargeError
				if n < limit == errors.As(err, &large) {
					t.Fatalf("%s of %d bytes: %v", name, n, err)
				}
				if large != nil {
					if large.Want < n || client.Outcome(err) != rdma.No {
						t.Errorf("%s of %d bytes: %v, outcome %v", name, n, err, client.Outcome(err))
					}
					it, err = op(inside.LimitMemory(t.Context(), large.Want))
				}
				if err != nil || !bytes.Equal(it.Value, v) || it.Flags != 7 {
					t.Errorf("%s of %d bytes: %d bytes, flags %d, %v", name, n, len(it.Value), it.Flags, err)
				}
			}
		}
	}
	for _, provider := range []string{"shm", "tcp"} {
		t.Run(provider, func(t *testing.T) {
			_, c := open(t, provider, devstore.Options{}, client.Options{})
			try(t, c)
		})
	}
	t.Run("fake", func(t *testing.T) { try(t, clienttest.New(clienttest.Options{})) })
}
