package server

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/testutil"
)

// answers runs a call that waits, and tells when it has been answered.
func answers[R any](t *testing.T, call func(context.Context) (R, error)) <-chan R {
	out := make(chan R, 1)
	ctx := testCtx(t)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			if r, err := call(ctx); err == nil {
				out <- r
				return
			}
		}
	}()
	t.Cleanup(func() { <-done })
	return out
}

// A janitor's question waits for work, and is answered as soon as there is some.
func TestFindWorkWaits(t *testing.T) {
	_, c, _ := store(t, forever, 2, &dirpb.CreateNamespaceRequest{Name: "n", Replicas: 2, Shards: 4})
	x := openIn(t, c, "n").SessionId
	began := time.Now()
	if r, err := c.FindWork(testCtx(t), &dirpb.FindWorkRequest{WaitMillis: 200}); err != nil ||
		len(r.Namespaces) != 0 || time.Since(began) < 200*time.Millisecond {
		t.Fatalf("work %v, %v after %v", r, err, time.Since(began))
	}
	found := answers(t, func(ctx context.Context) (*dirpb.FindWorkReply, error) {
		for { // as a janitor
			if r, err := c.FindWork(ctx, &dirpb.FindWorkRequest{WaitMillis: 1 << 40}); err != nil ||
				len(r.Namespaces) > 0 {
				return r, err
			}
		}
	})
	ack(t, c, x)
	sh := statusOf(t, c).Map.Shards[0]
	testutil.Until(t, "the split", func() bool {
		ack(t, c, x)
		r, err := c.RequestSplit(testCtx(t), &dirpb.RequestSplitRequest{SessionId: x, ShardId: sh.Id})
		return err == nil && r.Growing
	})
	testutil.Until(t, "work that janitors hear of", func() bool { // every session acknowledges the split
		ack(t, c, x)
		return len(found) > 0
	})
}

// A heartbeat waits until its answer asks for something else than the last one did.
func TestHeartbeatWaits(t *testing.T) {
	n := single(t, vfs.NewMem(), forever)
	c := dial(t, n)
	m := newMemnode(t, "m1", 1, just(n))
	newMemnode(t, "m2", 1, just(n))
	gone := open(t, c)
	stays := open(t, c)
	news := uint64(0)
	beat := func(wait uint64) func(context.Context) (*dirpb.HeartbeatReply, error) {
		return func(ctx context.Context) (*dirpb.HeartbeatReply, error) {
			return c.Heartbeat(ctx, &dirpb.HeartbeatRequest{NodeId: m.id, Incarnation: 1, News: news, WaitMillis: wait})
		}
	}
	calm := func() {
		t.Helper()
		testutil.Until(t, "no news", func() bool {
			r, err := beat(1)(testCtx(t))
			same := err == nil && r.News == news
			news = r.GetNews()
			return same && !slices.ContainsFunc(r.GetRegions(), func(w *dirpb.WantRegion) bool { return !w.Published })
		})
	}
	// waits has a heartbeat wait, which f ends.
	waits := func(what string, f func()) *dirpb.HeartbeatReply {
		t.Helper()
		calm()
		before := news
		told := answers(t, func(ctx context.Context) (*dirpb.HeartbeatReply, error) {
			for {
				if r, err := beat(1 << 40)(ctx); err != nil || r.News != before {
					return r, err
				}
			}
		})
		f()
		select {
		case r := <-told:
			return r
		case <-time.After(patience):
			t.Fatalf("%s is no news", what)
		}
		return nil
	}
	calm()
	began := time.Now()
	if r, err := beat(150)(testCtx(t)); err != nil || r.News != news || time.Since(began) < 150*time.Millisecond {
		t.Fatalf("answered %v, %v after %v", r, err, time.Since(began))
	}
	r := waits("a session's end", func() {
		if _, err := c.CloseSession(testCtx(t), &dirpb.CloseSessionRequest{SessionId: gone.SessionId}); err != nil {
			t.Fatal(err)
		}
	})
	if live := r.GetSessions().GetLive(); len(live) != 1 || live[0] != stays.SessionId {
		t.Fatalf("sessions %v live, want %d", live, stays.SessionId)
	}
	regions := len(r.Regions)
	r = waits("a region", func() {
		if _, err := c.CreateNamespace(testCtx(t), &dirpb.CreateNamespaceRequest{
			Name: "n", BytesPerNode: 16 << 20}); err != nil {
			t.Fatal(err)
		}
	})
	if len(r.Regions) <= regions {
		t.Fatalf("regions %v are wanted, want more than %d", r.Regions, regions)
	}
	id := r.Regions[len(r.Regions)-1].NamespaceId
	for _, ops := range []uint64{1000, 2000, 0} {
		r = waits(fmt.Sprintf("a quota of %d verbs a second", ops), func() {
			if _, err := c.SetNamespace(testCtx(t), &dirpb.SetNamespaceRequest{Name: "n", KeepLimit: true,
				Quota: &dirpb.Quota{TcpOpsPerSecond: ops}}); err != nil {
				t.Fatal(err)
			}
		})
		want := []*dirpb.NamespaceQuota{{NamespaceId: 1, Name: "default"},
			{NamespaceId: id, TcpOpsPerSecond: ops, Name: "n"}}
		if !slices.EqualFunc(r.Quotas, want, func(a, b *dirpb.NamespaceQuota) bool { return proto.Equal(a, b) }) {
			t.Fatalf("quotas %v, want %v", r.Quotas, want)
		}
	}
	calm()
	before := news
	open(t, c)
	if r, err := beat(100)(testCtx(t)); err != nil || r.News != before {
		t.Fatalf("a session that opens is news: %v, %v", r, err)
	}
}

// A session that watches the map may be quiet, and is called when another one's places wait
// in limbo for what it reports.
func TestQuietSessionIsCalled(t *testing.T) {
	n := single(t, vfs.NewMem(), forever)
	c := dial(t, n)
	newMemnode(t, "m1", 1, just(n))
	idle, writer := open(t, c).SessionId, open(t, c).SessionId
	tell := func(q *dirpb.RenewRequest) *dirpb.RenewReply {
		t.Helper()
		q.Number = numbers.Add(1)
		r, err := c.Renew(testCtx(t), q)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	e := tell(&dirpb.RenewRequest{SessionId: idle}).Epoch
	if r := tell(&dirpb.RenewRequest{SessionId: idle, ReportEpoch: e}); r.QuietMillis != 0 {
		t.Fatalf("one that cannot be called is let be quiet: %v", r)
	}
	ctx, cancel := context.WithCancel(testCtx(t))
	defer cancel()
	stream, err := c.WatchMap(ctx, &dirpb.WatchMapRequest{SessionId: idle})
	if err != nil {
		t.Fatal(err)
	}
	calls := make(chan *dirpb.Map, 100)
	go func() {
		defer close(calls)
		for {
			m, err := stream.Recv()
			if err != nil {
				return
			}
			calls <- m
		}
	}()
	if m := <-calls; m.GetRenew() || m.GetVersion() == 0 {
		t.Fatalf("watched %v", m)
	}
	quiet := func() (epoch uint64) {
		t.Helper()
		testutil.Until(t, "leave to be quiet", func() bool {
			r := tell(&dirpb.RenewRequest{SessionId: idle, ReportEpoch: e})
			e = r.Epoch
			return r.QuietMillis > 0
		})
		return e
	}
	quiet()
	testutil.Until(t, "an epoch", func() bool { return tell(&dirpb.RenewRequest{SessionId: writer}).Epoch > e })
	for len(calls) > 0 {
		if m := <-calls; m.GetRenew() {
			t.Fatal("called, though nobody waits")
		}
	}
	r := tell(&dirpb.RenewRequest{SessionId: writer, ReportEpoch: e, InLimbo: true})
	tag := r.Epoch
	if r.QuietMillis != 0 {
		t.Fatalf("one that waits is let be quiet: %v", r)
	}
	for called := false; !called; {
		select {
		case m := <-calls:
			called = m.GetRenew()
		case <-time.After(patience):
			t.Fatal("not called")
		}
	}
	// It answers the call as sessions do: with what it learns, until it may be quiet again.
	quiet()
	if r := tell(&dirpb.RenewRequest{
		SessionId: writer, ReportEpoch: tell(&dirpb.RenewRequest{SessionId: writer}).Epoch}); r.MinEpoch <= tag {
		t.Fatalf("the minimum is %d after the call, want more than %d", r.MinEpoch, tag)
	}
	cancel()
	testutil.Until(t, "the end of the watch", func() bool {
		l, err := n.leader()
		if err != nil {
			return false
		}
		l.mu.Lock()
		defer l.mu.Unlock()
		return len(l.mu.watches) == 0
	})
	if r := tell(&dirpb.RenewRequest{SessionId: idle, ReportEpoch: e}); r.QuietMillis != 0 {
		t.Fatalf("one that cannot be called any more is let be quiet: %v", r)
	}
}
