package server

import (
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/testutil"
	"github.com/kvd-project/kvd/server/fsm"
)

func grantStatus(t testing.TB, c dirpb.DirectoryClient, session, pg, held uint32) *dirpb.GrantStatusReply {
	t.Helper()
	r, err := c.GrantStatus(testCtx(t), &dirpb.GrantStatusRequest{SessionId: session, PgId: pg, Held: held})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// A session is granted blocks of status words, told again of what it does not know of, and gives them back with a
// renewal or as it closes.
func TestGrantStatus(t *testing.T) {
	_, c, _ := store(t, forever, 1, &dirpb.CreateNamespaceRequest{Name: "n", Replicas: 1})
	ctx := testCtx(t)
	a, b := openIn(t, c, "n").SessionId, openIn(t, c, "n").SessionId
	first := grantStatus(t, c, a, 1, 0)
	m := statusOf(t, c).Map
	if m.Version != first.MapVersion || len(m.Pgs[0].StatusArrays) != 1 ||
		m.Pgs[0].StatusArrays[0].Offset != first.Block.Offset {
		t.Fatalf("granted %v, and the map %d has the arrays %v", first, m.Version, m.Pgs[0].StatusArrays)
	}
	if r := grantStatus(t, c, a, 1, 0); !proto.Equal(r, first) {
		t.Fatalf("asked again: %v, want %v", r, first)
	}
	second, other := grantStatus(t, c, a, 1, 1), grantStatus(t, c, b, 1, 0)
	if all := []uint64{first.Block.Offset, second.Block.Offset, other.Block.Offset}; len(
		slices.Compact(slices.Sorted(slices.Values(all)))) != 3 {
		t.Fatalf("granted blocks at %d", all)
	}
	if second.MapVersion != first.MapVersion {
		t.Errorf("a block of the same array made map %d, after %d", second.MapVersion, first.MapVersion)
	}
	_, err := c.GrantStatus(ctx, &dirpb.GrantStatusRequest{SessionId: a, PgId: 9})
	wantCode(t, err, codes.NotFound, "placement group 9")
	_, err = c.GrantStatus(ctx, &dirpb.GrantStatusRequest{SessionId: 99, PgId: 1})
	wantCode(t, err, codes.NotFound, "session 99")

	back := func(id uint32, number uint64, blocks ...*dirpb.StatusBlock) {
		t.Helper()
		if _, err := c.Renew(ctx, &dirpb.RenewRequest{SessionId: id, Number: number, StatusBack: blocks}); err != nil {
			t.Fatal(err)
		}
	}
	number := numbers.Add(1)
	back(b, number, first.Block) // not its own
	back(a, number, first.Block)
	if r := grantStatus(t, c, b, 1, 1); !proto.Equal(r.Block, first.Block) {
		t.Fatalf("granted %v, want %v, which was given back", r, first)
	}
	back(b, number, first.Block)
	if r := grantStatus(t, c, a, 1, 1); !proto.Equal(r.Block, first.Block) {
		t.Fatalf("granted %v, want %v, which was given back", r, first)
	}
	back(a, number, first.Block) // a renewal that was overtaken
	if r := grantStatus(t, c, a, 1, 1); !proto.Equal(r.Block, first.Block) {
		t.Fatalf("has %v, want %v", r, first)
	}
	_, err = c.Renew(ctx, &dirpb.RenewRequest{SessionId: a, Number: numbers.Add(1),
		StatusBack: make([]*dirpb.StatusBlock, fsm.MaxStatusBack+1)})
	wantCode(t, err, codes.InvalidArgument, "4097 blocks")

	if _, err := c.CloseSession(ctx, &dirpb.CloseSessionRequest{SessionId: a, Settled: true}); err != nil {
		t.Fatal(err)
	}
	wantBlocks(t, c, 1, 0)
}

// wantBlocks checks how many blocks of status words the directory shows for a store's first placement group.
func wantBlocks(t testing.TB, c dirpb.DirectoryClient, held, dead uint32) {
	t.Helper()
	if u := statusOf(t, c).Usage[0]; u.StatusHeld != held || u.StatusDead != dead {
		t.Errorf("%d blocks are held and %d dead, want %d and %d", u.StatusHeld, u.StatusDead, held, dead)
	}
}

// The status words of a session whose lease ran out are granted again when janitors have gone through every placement
// group, once.
func TestStatusOfTheDead(t *testing.T) {
	n, c, ms := store(t, time.Second, 2, &dirpb.CreateNamespaceRequest{Name: "n", Replicas: 1})
	for _, m := range ms {
		m.hold.Store(true)
	}
	a, b := openIn(t, c, "n").SessionId, openIn(t, c, "n").SessionId
	defer keepAlive(t, n, b)()
	dead := grantStatus(t, c, a, 1, 0).Block
	testutil.Until(t, "its lease to run out", func() bool { return life(t, c, a) == dirpb.SessionLife_SESSION_FENCING })
	if j := claim(t, c, b); j != nil {
		t.Fatalf("claimed %v before the session was fenced", j)
	}
	for _, m := range ms {
		m.hold.Store(false)
	}
	held := uint32(0)
	grantsDead := func() bool {
		t.Helper()
		r := grantStatus(t, c, b, 1, held)
		held++
		return proto.Equal(r.Block, dead)
	}
	seen := make(map[uint32]bool)
	for range 2 {
		if grantsDead() {
			t.Fatalf("granted %v of a dead session", dead)
		}
		j := awaitJob(t, c, b, dirpb.JobKind_JOB_SETTLE)
		wantBlocks(t, c, held, 1)
		seen[j.PgId] = true
		finish(t, c, b, j)
	}
	if len(seen) != 2 {
		t.Fatalf("gone through were %v", seen)
	}
	wantBlocks(t, c, held, 0)
	if !grantsDead() {
		t.Fatalf("%v is not free", dead)
	}
}
