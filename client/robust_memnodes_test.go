package client_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/server"
)

// TestNodeRestart takes a memory node away and brings it back empty: its keys
// are gone, keys of the other node never notice, and writes work again without
// anybody's help.
func TestNodeRestart(t *testing.T) {
	for _, p := range []string{"shm", "tcp"} {
		for _, long := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/long=%v", p, long), func(t *testing.T) {
				t.Parallel()
				lease := time.Second
				r := newRig(t, p, 2, lease, func(o *server.Options) { o.LastCopyLeases = 4 })
				r.create(&dirpb.CreateNamespaceRequest{Name: "default", Replicas: 1})
				o := r.options()
				o.OpTimeout = 2 * time.Second
				c := r.client(o)
				ctx := t.Context()
				var lost, kept [][]byte
				for i := range 200 {
					k := fmt.Appendf(nil, "k%d", i)
					if _, err := c.Put(ctx, k, k, client.PutOptions{}); err != nil {
						t.Fatal(err)
					}
					if len(lost) < 20 && r.nodeOf(c, k) == 0 {
						lost = append(lost, k)
					} else if len(kept) < 20 && r.nodeOf(c, k) == 1 {
						kept = append(kept, k)
					}
				}
				if len(lost) < 20 || len(kept) < 20 {
					t.Fatalf("%d keys on node 0, %d on node 1", len(lost), len(kept))
				}
				// The other node's keys, all the while.
				ctx2, cancel := context.WithCancel(ctx)
				var wg sync.WaitGroup
				reads := 0
				wg.Go(func() {
					for ctx2.Err() == nil {
						k := kept[reads%len(kept)]
						if it, err := c.Get(ctx, k); err != nil || !bytes.Equal(it.Value, k) {
							t.Errorf("key %s of the node that stayed: %q, %v", k, it.Value, err)
							return
						}
						reads++
					}
				})
				defer wg.Wait()
				defer cancel()
				session := c.Stats().Session
				r.stopNode(0)
				if long {
					// Long enough for the directory to count it as lost.
					eventually(t, func() string {
						for _, n := range r.status().GetMap().GetNodes() {
							if n.GetName() == "m0" && n.GetState() == dirpb.NodeState_NODE_DOWN {
								return ""
							}
						}
						return "the directory has not noticed that m0 is gone"
					})
					_, err := c.Put(ctx, lost[0], []byte("x"), client.PutOptions{})
					if !errors.Is(err, client.ErrUnavailable) || client.Outcome(err) != rdma.No {
						t.Fatalf("put on a node that is down: %v", err)
					}
				}
				r.startNode(0)
				begin := time.Now()
				for _, k := range lost {
					eventually(t, func() string {
						it, err := c.Get(ctx, k)
						if err == nil {
							t.Fatalf("key %s of the lost node: %q", k, it.Value)
						}
						if !errors.Is(err, client.ErrNotFound) {
							return err.Error()
						}
						return ""
					})
					if _, err := c.Put(ctx, k, []byte("new"), client.PutOptions{}); err != nil {
						t.Fatalf("put on the node that came back: %v", err)
					}
					if it, err := c.Get(ctx, k); err != nil || string(it.Value) != "new" {
						t.Fatalf("get on the node that came back: %q, %v", it.Value, err)
					}
				}
				t.Logf("back after %v", time.Since(begin))
				if s := c.Stats().Session; s != session {
					t.Errorf("session %d became %d", session, s)
				}
				cancel()
				wg.Wait()
			})
		}
	}
}
