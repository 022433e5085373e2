package memnode

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/testutil"
	"github.com/kvd-project/kvd/rdma"
)

// TestLeavingRetains: memory that the directory does not want of a node that has said goodbye is kept for its next
// process.
func TestLeavingRetains(t *testing.T) {
	dir, k := newDirectory(t), newMemory(t)
	n := holding(t, dir, k)
	n.leaving.Store(true)
	dir.change(func() { dir.regions = nil })
	testutil.Until(t, `len(n.Stats().Regions) == 0`, func() bool { return len(n.Stats().Regions) == 0 })
	dir.beats(3)
	if s := n.Stats(); s.RegisteredBytes != 2*regionBytes {
		t.Errorf("%+v, want the memory of both regions retained", s)
	}
}

// TestRetainedHasNewKeys: a region that is made of retained memory has other keys than it had with the process before,
// whose clients may know them.
func TestRetainedHasNewKeys(t *testing.T) {
	dir, k := newDirectory(t), newMemory(t)
	n := holding(t, dir, k)
	was := dir.published[1]
	crash(t, n)
	n, _ = keeps(t, dir, k, same)
	incarnation := n.Stats().Incarnation
	dir.change(func() { dir.regions, dir.retain = dir.regions[1:], []uint32{1} })
	testutil.Until(t, `len(n.Stats().Regions) == 1`, func() bool { return len(n.Stats().Regions) == 1 })
	dir.change(func() {
		dir.regions = append(dir.regions, &dirpb.WantRegion{PgId: 1, NamespaceId: 1, RegionBytes: regionBytes,
			IndexBytes: indexBytes, Since: 8,
			Retain: &dirpb.Retained{Incarnation: incarnation, Since: 7, Arrays: []*dirpb.RetainedArray{array}}})
	})
	dir.until("publication", func() bool { return dir.published[1].GetSince() == 8 })
	if b := n.of(1)[indexBytes:]; slices.Contains(b, 0) {
		t.Fatal("it is not of what was retained")
	}
	for i, x := range dir.published[1].Keys {
		if y := was.Keys[i]; x.IndexRkey == y.IndexRkey || x.HeapRkey == y.HeapRkey {
			t.Errorf("keys %v, as before", x)
		}
	}
}

// TestRetainedStays: what is retained does not give way to a region that just fits beside it.
func TestRetainedStays(t *testing.T) {
	dir, k := newDirectory(t), newMemory(t)
	n := holding(t, dir, k)
	dir.change(func() {
		dir.forget, dir.retain = true, []uint32{1, 2}
		dir.regions = []*dirpb.WantRegion{
			{PgId: 3, NamespaceId: 1, RegionBytes: 1<<20 - 2*regionBytes, IndexBytes: indexBytes, Since: 8}}
	})
	dir.keys(3, "tcp")
	if s := n.Stats(); s.RegisteredBytes != 1<<20 {
		t.Errorf("%+v", s)
	}
}

// silent is a peer whose fence is not confirmed while it says so.
type silent struct {
	rdma.Peer
	now atomic.Bool
}

func (s *silent) Remote() string { return "nobody" }

func (s *silent) Fence(context.Context) error {
	if s.now.Load() {
		return errors.New("no answer")
	}
	return nil
}

// TestLeftovers: a namespace's region is made when nobody whose session has ended is connected to the namespace any
// more.
func TestLeftovers(t *testing.T) {
	dir := newDirectory(t)
	n, _ := open(t, dir, 1<<20, "tcp")
	p := &silent{}
	p.now.Store(true)
	dir.change(func() { dir.ended = []uint32{7} })
	dir.beats(2)
	n.mu.Lock()
	n.mu.byPeer[p] = &peer{session: 7, namespace: 1, p: p}
	n.mu.Unlock()
	dir.want(1, 1)
	testutil.Until(t, "the region is made, or refused", func() bool {
		s := n.Stats()
		return len(s.Regions) == 1 && (s.Regions[0].Err != nil || s.Regions[0].Published)
	})
	if err := n.Stats().Regions[0].Err; err == nil || !strings.Contains(err.Error(), "a session that has ended is "+
		"connected still") {
		t.Fatalf("region trouble: %v", err)
	}
	dir.want(2, 2) // another namespace's is made
	dir.keys(2, "tcp")
	dir.change(func() {
		if dir.published[1] != nil {
			t.Error("published")
		}
	})
	p.now.Store(false)
	dir.keys(1, "tcp")
	if c := n.Stats().Connections; c != 0 {
		t.Errorf("%d connections", c)
	}
}

// TestHeartbeatInterval: whatever the directory says, a node's heartbeats are neither a flood nor hours apart.
func TestHeartbeatInterval(t *testing.T) {
	for says, want := range map[uint64]uint64{0: 250, 1: 5, 5: 5, 1500: 1500, 60_001: 60_000, 1 << 63: 60_000} {
		dir := newDirectory(t)
		dir.interval = says
		open(t, dir, 1<<20, "tcp")
		var got uint64
		dir.until("a heartbeat", func() bool {
			got = dir.last.GetWaitMillis()
			return dir.last != nil
		})
		if got != want {
			t.Errorf("every %d ms, where the directory says %d: want %d", got, says, want)
		}
	}
}

// TestRetries: what fails is tried again ever more rarely, up to a bound, and at once when there is room.
func TestRetries(t *testing.T) {
	n := &Node{log: slog.New(slog.DiscardHandler)}
	n.mu.failures = map[uint32]*failure{}
	for want := minRetry; want < 10*maxRetry; want *= 2 {
		n.outcome(1, 1, "make", errors.New("no room"))
		if got := n.mu.failures[1].pause; got != min(want, maxRetry) {
			t.Errorf("tried again after %v, want %v", got, min(want, maxRetry))
		}
	}
	n.retryNow()
	if f := n.mu.failures[1]; !f.next.IsZero() {
		t.Errorf("tried again at %v, though there is room", f.next)
	}
	if n.outcome(1, 1, "make", nil); len(n.mu.failures) != 0 {
		t.Error("a failure is left")
	}
}
