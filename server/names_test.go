package server

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/testutil"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/lead"
)

// TestNameAfterDeath: the heartbeat of a process that dies ends with it, so nobody waits for its lease to get its name.
func TestNameAfterDeath(t *testing.T) {
	n := single(t, vfs.NewMem(), time.Hour)
	c, ctx := dial(t, n), testCtx(t)
	register := func(incarnation uint64, addr string) (*dirpb.RegisterNodeReply, error) {
		return c.RegisterNode(ctx, &dirpb.RegisterNodeRequest{Name: "m1", Incarnation: incarnation, HostId: "host",
			CapacityBytes: 256 << 20,
			Endpoints:     []*dirpb.Endpoint{{Provider: "tcp", Addr: addr}}})
	}
	r, err := register(7, "127.0.0.1:9")
	if err != nil {
		t.Fatal(err)
	}
	beats := func() (k uint64) {
		l, err := n.leader()
		if err != nil {
			t.Fatal(err)
		}
		n.withState(l, func(x *lead.Leader, _ *fsm.State, _ time.Duration) { k = x.Beat(r.NodeId) })
		return k
	}
	beat := func(ctx context.Context, news uint64) (*dirpb.HeartbeatReply, error) {
		return c.Heartbeat(ctx, &dirpb.HeartbeatRequest{NodeId: r.NodeId, Incarnation: 7, News: news,
			WaitMillis: 60_000})
	}
	h, err := beat(ctx, 1)
	if err != nil {
		t.Fatal(err)
	}
	before := beats()
	life, die := context.WithCancel(ctx)
	ended := make(chan error)
	go func() {
		_, err := beat(life, h.News)
		ended <- err
	}()
	testutil.Until(t, "a heartbeat that waits", func() bool { return beats() > before })
	_, err = register(8, "127.0.0.1:10")
	wantCode(t, err, codes.AlreadyExists, "taken by another process, at tcp 127.0.0.1:9")
	if m := statusOf(t, c).Map.Nodes[0]; m.Incarnation != 7 || m.Rival != "" {
		t.Errorf("a process that may be dead: %v", m)
	}
	die()
	if err := <-ended; status.Code(err) != codes.Canceled && !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	testutil.Until(t, "the name", func() bool {
		_, err := register(8, "127.0.0.1:10")
		return err == nil
	})
	if h, err := beat(ctx, 1); err != nil || !h.UnknownNode {
		t.Errorf("a heartbeat of the process before: %v, %v", h, err)
	}

	// It registers again, and the second lives: the status says so.
	beatOfSecond := func() {
		t.Helper()
		if h, err := c.Heartbeat(ctx, &dirpb.HeartbeatRequest{NodeId: r.NodeId, Incarnation: 8}); err != nil ||
			h.UnknownNode {
			t.Fatalf("%v, %v", h, err)
		}
	}
	_, err = register(9, "127.0.0.1:9")
	wantCode(t, err, codes.AlreadyExists, "within its lease")
	beatOfSecond()
	_, err = register(9, "127.0.0.1:9")
	wantCode(t, err, codes.AlreadyExists, "both processes live")
	if m := statusOf(t, c).Map.Nodes[0]; m.Incarnation != 8 || m.Rival != "tcp 127.0.0.1:9" {
		t.Errorf("while two processes want one name: %v", m)
	}
	// A goodbye ends it at once.
	if _, err := c.LeaveNode(ctx, &dirpb.LeaveNodeRequest{NodeId: r.NodeId, Incarnation: 8}); err != nil {
		t.Fatal(err)
	}
	if _, err := register(9, "127.0.0.1:9"); err != nil {
		t.Error(err)
	}
}
