package server

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"google.golang.org/grpc/codes"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/testutil"
	"github.com/kvd-project/kvd/server/fsm"
)

func TestEpochs(t *testing.T) {
	fs := vfs.NewMem()
	n := single(t, fs, forever)
	c := dial(t, n)
	var now atomic.Pointer[Node]
	now.Store(n)
	newMemnode(t, "m1", 1, func() []*Node { return []*Node{now.Load()} })
	a, b := open(t, c), open(t, c)
	if a.MinEpoch > a.Epoch || b.MinEpoch > a.Epoch {
		t.Fatalf("minimum above a session's epoch: %v, %v", a, b)
	}
	// E moves while sessions are open, and the minimum waits for the slower one.
	var e uint64
	testutil.Until(t, "E to move", func() bool { e = renew(t, c, a.SessionId, 0).Epoch; return e > b.Epoch+3 })
	if r := renew(t, c, a.SessionId, e); r.MinEpoch != b.Epoch {
		t.Fatalf("minimum %d, want %d: b has not reported", r.MinEpoch, b.Epoch)
	}
	if r := renew(t, c, b.SessionId, e-1); r.MinEpoch != e-1 {
		t.Fatalf("minimum %d, want %d", r.MinEpoch, e-1)
	}
	// A late, older report takes nothing back.
	if r := renew(t, c, b.SessionId, e-2); r.MinEpoch != e-1 {
		t.Fatalf("minimum %d after an older report, want %d", r.MinEpoch, e-1)
	}
	_, err := c.Renew(testCtx(t), &dirpb.RenewRequest{SessionId: a.SessionId, ReportEpoch: 1 << 40})
	wantCode(t, err, codes.InvalidArgument, "reports reclaim epoch")
	if r := renew(t, c, a.SessionId, e); r.MinEpoch != e-1 {
		t.Fatalf("minimum %d after a refused report, want %d", r.MinEpoch, e-1)
	}

	// The next leader knows no reports: E goes on from the reserved ceiling, the
	// minimum from what each session had at its open.
	last := renew(t, c, a.SessionId, e).Epoch
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}
	n = single(t, fs, forever)
	now.Store(n)
	c = dial(t, n)
	r := renew(t, c, a.SessionId, last)
	if r.Epoch < last || r.MinEpoch > b.Epoch {
		t.Fatalf("after a leader change E is %d, was %d; minimum %d, want at most %d", r.Epoch, last, r.MinEpoch,
			b.Epoch)
	}
	d := open(t, c)
	if d.Epoch < r.Epoch || d.MinEpoch > b.Epoch {
		t.Fatalf("a new session lifts the minimum: %v", d)
	}
	e = renew(t, c, d.SessionId, d.Epoch).Epoch
	if r := renew(t, c, b.SessionId, e-1); r.MinEpoch != min(last, d.Epoch, e-1) {
		t.Fatalf("minimum %d once all have reported, want %d", r.MinEpoch, min(last, d.Epoch, e-1))
	}
	// A session that ends holds nothing back.
	for _, id := range []uint32{a.SessionId, b.SessionId} {
		if _, err := c.CloseSession(testCtx(t), &dirpb.CloseSessionRequest{SessionId: id}); err != nil {
			t.Fatal(err)
		}
	}
	e = renew(t, c, d.SessionId, d.Epoch).Epoch
	if r := renew(t, c, d.SessionId, e); r.MinEpoch != e {
		t.Fatalf("minimum %d, want %d: one session is left", r.MinEpoch, e)
	}
	// E stands still while nobody is there, and never passes what is reserved.
	if _, err := c.CloseSession(testCtx(t), &dirpb.CloseSessionRequest{SessionId: d.SessionId}); err != nil {
		t.Fatal(err)
	}
	s := statusOf(t, c)
	var ceiling uint64
	n.machine.view(func(st *fsm.State) { ceiling = st.Meta().EpochCeiling })
	if s.Epoch > ceiling || s.MinEpoch != s.Epoch {
		t.Fatalf("E %d, minimum %d, ceiling %d", s.Epoch, s.MinEpoch, ceiling)
	}
	l := n.leading.Load()
	n.plan(testCtx(t), l)
	if got, _ := l.epochs(); got != s.Epoch {
		t.Fatalf("E went from %d to %d without sessions", s.Epoch, got)
	}
}

// A session being fenced still counts for the minimum.
func TestFencingHoldsMinimum(t *testing.T) {
	n := single(t, vfs.NewMem(), 150*time.Millisecond)
	c := dial(t, n)
	m := newMemnode(t, "m1", 1, just(n))
	m.hold.Store(true)
	a, b := open(t, c), open(t, c)
	least := func() uint64 {
		e := renew(t, c, b.SessionId, 0).Epoch
		return renew(t, c, b.SessionId, max(e, 1)-1).MinEpoch
	}
	testutil.Until(t, "a's lease to run out", func() bool {
		least()
		return life(t, c, a.SessionId) == dirpb.SessionLife_SESSION_FENCING
	})
	testutil.Until(t, "E to move on", func() bool {
		if got := least(); got > a.Epoch {
			t.Fatalf("minimum %d passed session %d, being fenced, with %d", got, a.SessionId, a.Epoch)
		}
		return renew(t, c, b.SessionId, 0).Epoch > a.Epoch+20
	})
	m.hold.Store(false)
	testutil.Until(t, "the minimum to move on", func() bool { return least() > a.Epoch })
}
