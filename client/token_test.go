package client_test

import (
	"context"
	"encoding/binary"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/rdma"
)

// dial shows the session's token again, on a lane of its own. A connection that the
// memory node grants stays open until the test ends.
func (x *raw) dial(lane uint32) error {
	ctx, cancel := context.WithTimeout(x.r.t.Context(), 5*time.Second)
	defer cancel()
	addr := x.m.GetNodes()[0].GetEndpoints()[0].GetAddr()
	qp, err := x.dev.Dial(ctx, x.pd, x.cq, addr,
		binary.LittleEndian.AppendUint32(append([]byte(nil), x.token...), lane))
	if err == nil {
		x.qps[1<<31+uint32(len(x.qps))] = qp
	}
	return err
}

// use does a READ, a WRITE and a CAS that change nothing, and gives the first error.
func (x *raw) use() error {
	pg := x.m.GetPgs()[0]
	b := x.mem.Bytes
	for _, v := range []struct {
		off uint64
		wr  rdma.WR
	}{
		{pg.GetIndexBytes() + 4096, rdma.WR{Op: rdma.OpRead, Local: b[:64]}},
		{pg.GetIndexBytes() + 4096, rdma.WR{Op: rdma.OpWrite, Local: b[:64]}},
		{4096, rdma.WR{Op: rdma.OpCmpAndSwp, Local: b[:8], Compare: 1 << 40, Swap: 1 << 40}},
	} {
		if err := x.try(pg.GetId(), v.off, v.wr); err != nil {
			return err
		}
	}
	return nil
}

// ended reports whether the memory node refuses the token since its session has ended,
// and fails if it takes it.
func (x *raw) ended(lane uint32) string {
	switch err := x.dial(lane); {
	case err == nil:
		return "the token is taken"
	case !errors.Is(err, rdma.ErrRefused) || !strings.Contains(err.Error(), "has ended"):
		return err.Error()
	}
	return ""
}

// A token is worth nothing once its session has ended, by closing or by a fence: neither
// with connections from before nor with new ones, neither before nor after the memory
// node starts again. A session that lives is served all along.
func TestTokenOfEndedSession(t *testing.T) {
	for _, provider := range []string{"tcp", "shm"} {
		t.Run(provider, func(t *testing.T) {
			r := newRig(t, provider, 1, time.Second)
			c := r.client(r.options())
			put := func() error {
				_, err := c.Put(t.Context(), []byte("k"), []byte("v"), client.PutOptions{})
				return err
			}
			if err := put(); err != nil {
				t.Fatal(err)
			}
			closed, silent := r.raw(), r.raw()
			if err := closed.use(); err != nil {
				t.Fatalf("a live session is refused: %v", err)
			}
			silent.pause.Store(true)
			closed.pause.Store(true)
			if err := r.admin.Call(t.Context(), func(ctx context.Context, c dirpb.DirectoryClient) error {
				_, err := c.CloseSession(ctx, &dirpb.CloseSessionRequest{SessionId: closed.id})
				return err
			}); err != nil {
				t.Fatal(err)
			}
			eventually(t, func() string {
				if closed.use() == nil {
					return "a closed session still READs, WRITEs and CASes"
				}
				return closed.ended(1)
			})
			eventually(t, func() string {
				if life := silent.state(); life != dirpb.SessionLife_SESSION_FENCED {
					return life.String()
				}
				return ""
			})
			if why := silent.ended(1); why != "" {
				t.Fatalf("a fenced session: %s", why)
			}
			if v, err := c.Get(t.Context(), []byte("k")); err != nil || string(v.Value) != "v" {
				t.Fatalf("the session that lives reads %q, %v", v.Value, err)
			}

			r.stopNode(0)
			r.startNode(0)
			for _, x := range []*raw{silent, closed} {
				eventually(t, func() string {
					why := x.ended(2)
					if why == "the token is taken" {
						t.Fatal("a memory node that came up takes the token of a session that has ended")
					}
					return why
				})
			}
			eventually(t, func() string {
				if err := put(); err != nil {
					return err.Error()
				}
				return ""
			})
		})
	}
}
