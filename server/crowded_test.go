package server

import (
	"context"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/testutil"
)

// E does not move for an hour, unless a crowded session and those that it has called report it.
func TestCrowdedSessionMovesE(t *testing.T) {
	n := ready(t, start(t, Options{ID: "d1", DataDir: "d1", fs: vfs.NewMem(), Bootstrap: true, Lease: forever,
		LastCopyLeases: 2, EpochInterval: time.Hour}))
	c := dial(t, n)
	newMemnode(t, "m1", 1, just(n))
	crowded, other := open(t, c).SessionId, open(t, c).SessionId
	ctx, cancel := context.WithCancel(testCtx(t))
	defer cancel()
	stream, err := c.WatchMap(ctx, &dirpb.WatchMapRequest{SessionId: other})
	if err != nil {
		t.Fatal(err)
	}
	if m, err := stream.Recv(); err != nil || m.GetRenew() {
		t.Fatalf("watched %v, %v", m, err)
	}
	calls := make(chan struct{}, 1000)
	go func() {
		defer close(calls)
		for {
			m, err := stream.Recv()
			if err != nil {
				return
			}
			if m.GetRenew() {
				calls <- struct{}{}
			}
		}
	}()
	tell := func(q *dirpb.RenewRequest) uint64 {
		t.Helper()
		q.Number = numbers.Add(1)
		r, err := c.Renew(testCtx(t), q)
		if err != nil {
			t.Fatal(err)
		}
		return r.Epoch
	}
	first := tell(&dirpb.RenewRequest{SessionId: other})
	e, known := first, first
	tell(&dirpb.RenewRequest{SessionId: other, ReportEpoch: first})
	answered := 0
	testutil.Until(t, "E to move", func() bool {
		e = tell(&dirpb.RenewRequest{SessionId: crowded, ReportEpoch: e, InLimbo: true, Crowded: true})
		select {
		case <-calls:
			answered++
			known = tell(&dirpb.RenewRequest{SessionId: other, ReportEpoch: known})
			tell(&dirpb.RenewRequest{SessionId: other, ReportEpoch: known})
		default:
		}
		return e >= first+4
	})
	if answered < 3 {
		t.Errorf("E moved on by %d with %d calls", e-first, answered)
	}
}
