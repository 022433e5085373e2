package client_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/janitor"
	"github.com/kvd-project/kvd/rdma"
)

// startJanitor runs a janitor until the test ends.
func (r *rig) startJanitor() {
	dev := r.open()
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := janitor.Run(ctx, janitor.Options{Directory: []string{r.dir.Addr()}, Devices: []*rdma.Device{dev},
			Provider: r.provider,
			Poll:     10 * time.Millisecond}); err != nil {
			r.t.Errorf("janitor: %v", err)
		}
	})
	r.t.Cleanup(func() {
		cancel()
		wg.Wait()
		if err := dev.Close(); err != nil {
			r.t.Error(err)
		}
	})
}

// state is what the directory says, for failures.
func (r *rig) state() string {
	st := r.status()
	s := ""
	for _, n := range st.GetMap().GetNodes() {
		s += fmt.Sprintf("node %d %s %v\n", n.GetId(), n.GetName(), n.GetState())
	}
	for _, pg := range st.GetMap().GetPgs() {
		s += fmt.Sprintln(pg)
	}
	for _, j := range st.GetJobs() {
		s += fmt.Sprintln(j)
	}
	for _, x := range st.GetSessions() {
		s += fmt.Sprintln(x)
	}
	return s
}

// whole waits until every placement group is active with so many copies and no
// job is left.
func (r *rig) whole(copies int) {
	r.t.Helper()
	eventually(r.t, func() string {
		st := r.status()
		for _, pg := range st.GetMap().GetPgs() {
			if pg.GetState() != dirpb.PGState_PG_ACTIVE || pg.GetJoining() || len(pg.GetMembers()) != copies ||
				pg.GetPlanned() != nil || pg.GetLeaving() != nil {
				return fmt.Sprintf("%v, jobs %v", pg, st.GetJobs())
			}
		}
		if len(st.GetJobs()) > 0 {
			return fmt.Sprintf("jobs %v", st.GetJobs())
		}
		return ""
	})
}

// TestReplicas loses one memory node after the other under load: nothing that
// was acknowledged is lost, and every copy is made again.
func TestReplicas(t *testing.T) {
	t.Parallel()
	for _, p := range []string{"shm", "tcp"} {
		for _, copies := range []int{2, 3} {
			t.Run(fmt.Sprintf("%s/r=%d", p, copies), func(t *testing.T) {
				t.Parallel()
				lease := 2 * time.Second
				r := newRig(t, p, copies+1, lease)
				r.create(&dirpb.CreateNamespaceRequest{Name: "default", Replicas: uint32(copies),
					BytesPerNode: 8 << 20})
				r.startJanitor()
				c := r.client(r.options())
				ctx := t.Context()
				for i := range 500 {
					k := fmt.Appendf(nil, "quiet%d", i)
					if _, err := c.Put(ctx, k, k, client.PutOptions{}); err != nil {
						t.Fatal(err)
					}
				}
				l := startLoad(t, c, "l", 2, nil)
				l.progress(50)
				for round := range 2 * len(r.nodes) {
					i := round % len(r.nodes)
					r.stopNode(i)
					begin := time.Now()
					for k := range 500 {
						key := fmt.Appendf(nil, "quiet%d", k)
						if it, err := c.Get(ctx, key); err != nil || string(it.Value) != string(key) {
							t.Fatalf("round %d: %s is %q, %v\n%s", round, key, it.Value, err, r.state())
						}
						if _, err := c.Put(ctx, key, key, client.PutOptions{}); err != nil {
							t.Fatalf("round %d: put %s: %v", round, key, err)
						}
					}
					t.Logf("round %d: every key read and written %v after the loss", round,
						time.Since(begin).Round(time.Millisecond))
					r.startNode(i)
					r.whole(copies)
					l.progress(50)
				}
				fresh := r.client(r.options())
				l.end(fresh)
				for k := range 500 {
					key := fmt.Appendf(nil, "quiet%d", k)
					if it, err := fresh.Get(ctx, key); err != nil || string(it.Value) != string(key) {
						t.Fatalf("at the end %s is %q, %v", key, it.Value, err)
					}
				}
			})
		}
	}
}

// TestGrow inserts until a namespace that began with one small shard has grown, and then
// split; no insert fails, and every key is found, by scan too.
func TestGrow(t *testing.T) {
	t.Parallel()
	for _, p := range []string{"shm", "tcp"} {
		t.Run(p, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, p, 2, 2*time.Second)
			r.create(&dirpb.CreateNamespaceRequest{Name: "default", Replicas: 2, BytesPerNode: 16 << 20, Shards: 1,
				Segments: 1, IndexPercent: 1})
			r.startJanitor()
			c := r.client(r.options())
			ctx := t.Context()
			l := startLoad(t, c, "l", 2, nil)
			const keys = 6000
			for i := range keys {
				k := fmt.Appendf(nil, "k%d", i)
				if _, err := c.PutIfAbsent(ctx, k, k, client.PutOptions{}); err != nil {
					t.Fatalf("key %d of %d, %d shards: %v", i, keys, len(r.status().GetMap().GetShards()), err)
				}
			}
			fresh := r.client(r.options())
			l.end(fresh)
			for i := range keys {
				k := fmt.Appendf(nil, "k%d", i)
				if it, err := fresh.Get(ctx, k); err != nil || string(it.Value) != string(k) {
					t.Fatalf("%s is %q, %v", k, it.Value, err)
				}
				if _, err := fresh.PutIfAbsent(ctx, k, k, client.PutOptions{}); !errors.Is(err, client.ErrExists) {
					t.Fatalf("%s put again: %v", k, err)
				}
			}
			found := map[string]bool{}
			for kv, err := range fresh.Scan(ctx, client.ScanOptions{}) {
				if err != nil {
					t.Fatal(err)
				}
				found[string(kv.Key)] = true
			}
			for i := range keys {
				if k := fmt.Sprintf("k%d", i); !found[k] {
					t.Errorf("a scan misses %s", k)
				}
			}
			// 19 segments are all that an index has room for: one becomes 4, and those split.
			if shards := r.status().GetMap().GetShards(); len(shards) < 2 || shards[0].GetSegments() < 4 {
				t.Errorf("%d shards, the first of %d segments", len(shards), shards[0].GetSegments())
			}
		})
	}
}
