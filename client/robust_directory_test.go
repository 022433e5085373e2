package client_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/rdma"
)

// TestDirectoryRestart stops the directory and starts it again from its folder:
// operations go on meanwhile, and nothing that it knew is lost.
func TestDirectoryRestart(t *testing.T) {
	for _, p := range []string{"shm", "tcp"} {
		t.Run(p, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, p, 2, 5*time.Second)
			c := r.client(r.options())
			l := startLoad(t, c, "", 2, nil)
			defer l.halt()
			l.progress(200)
			before, session := r.status(), c.Stats().Session
			r.stopDirectory()
			l.progress(500)
			r.startDirectory()
			epoch := c.Stats().Epoch
			eventually(t, func() string {
				if s := c.Stats(); s.Epoch < epoch+5 || s.MinEpoch <= epoch {
					return fmt.Sprintf("epoch %d, minimum %d, were %d when the directory came back", s.Epoch,
						s.MinEpoch, epoch)
				}
				return ""
			})
			l.progress(200)
			l.end(c)
			if s := c.Stats().Session; s != session {
				t.Errorf("session %d became %d", session, s)
			}
			after := r.status()
			b, a := before.GetMap(), after.GetMap()
			if a.GetClusterId() != b.GetClusterId() || len(a.GetNodes()) != len(b.GetNodes()) ||
				len(a.GetNamespaces()) != len(b.GetNamespaces()) ||
				len(a.GetPgs()) != len(b.GetPgs()) || len(a.GetShards()) != len(b.GetShards()) {
				t.Errorf("before: %v\nafter: %v", b, a)
			}
			for i, n := range a.GetNodes() {
				if n.GetIncarnation() != b.GetNodes()[i].GetIncarnation() || n.GetState() != dirpb.NodeState_NODE_UP {
					t.Errorf("memory node %v became %v", b.GetNodes()[i], n)
				}
			}
			for i, pg := range a.GetPgs() {
				if pg.GetEpoch() != b.GetPgs()[i].GetEpoch() || pg.GetState() != dirpb.PGState_PG_ACTIVE {
					t.Errorf("placement group %v became %v", b.GetPgs()[i], pg)
				}
			}
		})
	}
}

// TestDirectoryOutage keeps the directory away for longer than a lease: over a
// provider that does not fence by itself, operations stop with a typed error
// and certainty, and resume by themselves.
func TestDirectoryOutage(t *testing.T) {
	r := newRig(t, "tcp", 2, time.Second)
	o := r.options()
	o.OpTimeout = 500 * time.Millisecond
	c := r.client(o)
	ctx := t.Context()
	if _, err := c.Put(ctx, []byte("k"), []byte("v"), client.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	r.stopDirectory()
	eventually(t, func() string {
		_, err := c.Get(ctx, []byte("k"))
		if err == nil {
			return "get still works"
		}
		if !errors.Is(err, client.ErrUnavailable) || client.Outcome(err) != rdma.No {
			t.Fatalf("get without a lease: %v", err)
		}
		return ""
	})
	for what, op := range map[string]func() error{
		"put":    func() error { _, err := c.Put(ctx, []byte("k"), []byte("w"), client.PutOptions{}); return err },
		"delete": func() error { return c.Delete(ctx, []byte("k")) },
		"incr":   func() error { _, err := c.Incr(ctx, []byte("n"), 1); return err },
		"multi":  func() error { return c.MultiGet(ctx, [][]byte{[]byte("k")})[0].Err },
		"scan":   func() error { return scanned(c.Scan(ctx, client.ScanOptions{})) },
	} {
		begin := time.Now()
		err := op()
		if !errors.Is(err, client.ErrUnavailable) || client.Outcome(err) != rdma.No {
			t.Errorf("%s without a lease: %v", what, err)
		}
		if d := time.Since(begin); d > 10*time.Second {
			t.Errorf("%s without a lease took %v", what, d)
		}
	}
	r.startDirectory()
	eventually(t, func() string {
		it, err := c.Get(ctx, []byte("k"))
		if err != nil {
			return err.Error()
		}
		if string(it.Value) != "v" {
			t.Fatalf("value %q", it.Value)
		}
		return ""
	})
	if _, err := c.Put(ctx, []byte("k"), []byte("w"), client.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Incr(ctx, []byte("n"), 1); err != nil {
		t.Fatal(err)
	}
}

// TestSessionLost keeps a client from renewing until the directory fences it:
// it opens another session by itself, and no increment is lost or doubled.
func TestSessionLost(t *testing.T) {
	for _, p := range []string{"shm", "tcp"} {
		t.Run(p, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, p, 2, time.Second)
			c := r.client(r.options())
			o := r.options()
			o.Directory = []string{r.dir.Addr()}
			other := r.client(o)
			l := startLoad(t, c, "", 3, func(err error) bool { return errors.Is(err, client.ErrUnavailable) })
			defer l.halt()
			for range 2 {
				l.progress(100)
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
				eventually(t, func() string {
					if s := c.Stats().Session; s == session {
						return fmt.Sprintf("still session %d", s)
					}
					return ""
				})
			}
			l.progress(200)
			l.end(other)
		})
	}
}
