package client_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/devstore"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/testutil"
	"github.com/kvd-project/kvd/rdma"
)

// A namespace is deleted under load: every operation says truly whether it happened, none
// happens once the namespace is gone, and the error says why. Memory nodes have the memory
// back. A namespace of the same name serves the same clients, and holds nothing of the old one.
func TestNamespaceDeleted(t *testing.T) {
	each(t, func(t *testing.T, p string) {
		spec := devstore.Namespace{Name: "n", Replicas: 2, BytesPerNode: 32 << 20}
		st, c := open(t, p, devstore.Options{Nodes: 2, CapacityBytes: 64 << 20, Namespaces: []devstore.Namespace{spec}},
			client.Options{Namespace: "n", Lanes: 2, OpTimeout: time.Minute})
		ctx := t.Context()
		dir := st.DirectoryNodes()[0]
		if _, err := c.Put(ctx, []byte("old"), []byte("value"), client.PutOptions{}); err != nil {
			t.Fatal(err)
		}

		const workers = 4
		var gone, stop atomic.Bool
		var done, refused [workers]atomic.Int64
		var wg sync.WaitGroup
		defer wg.Wait()
		defer stop.Store(true)
		for w := range workers {
			wg.Go(func() {
				for i := 0; !stop.Load(); i++ {
					after := gone.Load()
					key := fmt.Appendf(nil, "k%d", i%64)
					var err error
					switch i % 3 {
					case 0:
						_, err = c.Put(ctx, key, []byte("value"), client.PutOptions{})
					case 1:
						_, err = c.Incr(ctx, fmt.Appendf(nil, "n%d", w), 1)
					default:
						if _, err = c.Get(ctx, key); errors.Is(err, client.ErrNotFound) {
							err = nil
						}
					}
					switch {
					case err == nil && after:
						t.Errorf("worker %d: operation %d happened in a namespace that is gone", w, i)
						return
					case err == nil:
						done[w].Add(1)
					case errors.Is(err, client.ErrNoNamespace):
						if client.Outcome(err) != rdma.No || !strings.Contains(err.Error(), `namespace "n" `) {
							t.Errorf("outcome %v of %v", client.Outcome(err), err)
						}
						if after {
							refused[w].Add(1)
						}
					case !errors.Is(err, client.ErrUnknownOutcome) || after:
						t.Errorf("worker %d: %v (gone: %v)", w, err, after)
						return
					}
				}
			})
		}
		all := func(n *[workers]atomic.Int64, least int64) func() bool {
			return func() bool {
				for i := range n {
					if n[i].Load() < least && !t.Failed() {
						return false
					}
				}
				return true
			}
		}
		testutil.Until(t, "load", all(&done, 100))
		_, err := dir.DeleteNamespace(ctx, &dirpb.DeleteNamespaceRequest{Name: "n"})
		if status.Code(err) != codes.FailedPrecondition {
			t.Fatalf("deleted while sessions live: %v", err)
		}
		if _, err := dir.DeleteNamespace(ctx, &dirpb.DeleteNamespaceRequest{Name: "n", EndSessions: true}); err != nil {
			t.Fatal(err)
		}
		left := func() int {
			s, err := st.Status(ctx)
			if err != nil {
				t.Fatal(err)
			}
			return len(s.GetMap().GetNamespaces())
		}
		testutil.Until(t, "the namespace to go", func() bool { return left() == 0 })
		gone.Store(true)
		testutil.Until(t, "errors that say so", all(&refused, 3))
		stop.Store(true)
		wg.Wait()
		testutil.Until(t, "memory nodes to have the memory back", func() bool {
			var bytes int64
			for _, n := range st.Nodes() {
				s := n.Stats()
				bytes += s.RegisteredBytes + int64(len(s.Regions)+s.Sessions)
			}
			return bytes == 0
		})
		short, cancel := context.WithTimeout(ctx, time.Minute)
		defer cancel()
		for _, r := range c.MultiGet(short, [][]byte{[]byte("a"), []byte("b")}) {
			if !errors.Is(r.Err, client.ErrNoNamespace) {
				t.Errorf("one of many: %v", r.Err)
			}
		}
		for kv, err := range c.Scan(short, client.ScanOptions{}) {
			if !errors.Is(err, client.ErrNoNamespace) {
				t.Errorf("scan: %q, %v", kv.Key, err)
			}
		}

		if _, err := dir.CreateNamespace(ctx, &dirpb.CreateNamespaceRequest{
			Name: "n", Replicas: 2, BytesPerNode: 32 << 20}); err != nil {
			t.Fatal(err)
		}
		testutil.Until(t, "the client to find the namespace of the name", func() bool {
			_, err := c.Get(ctx, []byte("old"))
			if err == nil {
				t.Fatal("a key of the namespace that was deleted is there")
			}
			return errors.Is(err, client.ErrNotFound)
		})
		if _, err := c.Put(ctx, []byte("new"), []byte("value"), client.PutOptions{}); err != nil {
			t.Fatal(err)
		}
	})
}

// The default namespace, which the first session makes, is not made by one that had it.
func TestDefaultDeleted(t *testing.T) {
	st, c := open(t, "sim", devstore.Options{CapacityBytes: 64 << 20}, client.Options{})
	ctx := t.Context()
	if _, err := st.DirectoryNodes()[0].DeleteNamespace(ctx, &dirpb.DeleteNamespaceRequest{
		Name: "default", EndSessions: true}); err != nil {
		t.Fatal(err)
	}
	var err error
	testutil.Until(t, "an error", func() bool {
		_, err = c.Put(ctx, []byte("k"), nil, client.PutOptions{})
		return err != nil && !errors.Is(err, client.ErrUnknownOutcome)
	})
	if !errors.Is(err, client.ErrNoNamespace) {
		t.Fatal(err)
	}
	for range 3 {
		if _, err := c.Get(ctx, []byte("k")); !errors.Is(err, client.ErrNoNamespace) {
			t.Fatal(err)
		}
	}
}

// The number of copies changes under load and no operation fails.
func TestReplicasUnderLoad(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, p string) {
		// As much as there is with one copy and half of the memory: each memory node has room for
		// one region more.
		spec := devstore.Namespace{Name: "n", Replicas: 1, BytesPerNode: 24 << 20}
		st, c := open(t, p, devstore.Options{Nodes: 3, CapacityBytes: 48 << 20, Namespaces: []devstore.Namespace{spec}},
			client.Options{Namespace: "n", Lanes: 2, OpTimeout: time.Minute})
		ctx := t.Context()
		dir := st.DirectoryNodes()[0]

		const workers, keys = 4, 64
		var stop atomic.Bool
		var ops atomic.Int64
		var counts [workers][keys]int64
		var wg sync.WaitGroup
		defer wg.Wait()
		defer stop.Store(true)
		key := func(w, k int) []byte { return fmt.Appendf(nil, "w%d-%d", w, k) }
		for w := range workers {
			wg.Go(func() {
				for i := 0; !stop.Load(); i++ {
					k := i % keys
					n, err := c.Incr(ctx, key(w, k), 1)
					if err != nil || n != counts[w][k]+1 {
						t.Errorf("worker %d: key %d is %d, want %d: %v", w, k, n, counts[w][k]+1, err)
						return
					}
					counts[w][k] = n
					ops.Add(1)
				}
			})
		}
		whole := func(copies uint32) func() bool {
			return func() bool {
				s, err := st.Status(ctx)
				if err != nil {
					t.Fatal(err)
				}
				for _, pg := range s.GetMap().GetPgs() {
					if len(pg.GetMembers()) != int(copies) || pg.GetJoining() ||
						pg.GetState() != dirpb.PGState_PG_ACTIVE {
						return t.Failed()
					}
				}
				return true
			}
		}
		for _, copies := range []uint32{2, 1, 2} {
			if _, err := dir.SetNamespace(ctx, &dirpb.SetNamespaceRequest{Name: "n", Replicas: copies,
				KeepLimit: true}); err != nil {
				t.Fatal(err)
			}
			testutil.Until(t, fmt.Sprintf("%d copies", copies), whole(copies))
			at := ops.Load()
			testutil.Until(t, "operations with them", func() bool { return t.Failed() || ops.Load() > at+1000 })
		}
		stop.Store(true)
		wg.Wait()
		// Each copy alone has it all.
		if err := st.KillNode(0); err != nil {
			t.Fatal(err)
		}
		for w := range workers {
			for k := range keys {
				it, err := c.Get(ctx, key(w, k))
				if counts[w][k] != 0 && (err != nil || string(it.Value) != fmt.Sprint(counts[w][k])) {
					t.Fatalf("key %d of worker %d is %q, want %d: %v", k, w, it.Value, counts[w][k], err)
				}
			}
		}
	})
}
