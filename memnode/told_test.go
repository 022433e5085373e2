package memnode

import (
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/token"
)

// TestTold: a node shows the position that it was told last, also its next process; refused for it, it keeps and serves
// what it has, whatever else the directory wants.
func TestTold(t *testing.T) {
	dir, k := newDirectory(t), newMemory(t)
	at := &dirpb.Position{ClusterId: "c1", Reign: 7, Term: 2, Index: 30}
	dir.position = at
	dir.want(1, 1)
	n, _ := keeps(t, dir, k, same)
	key := dir.keys(1, "tcp")
	shown := func(want *dirpb.Position) {
		t.Helper()
		dir.until("the position to be shown", func() bool { return proto.Equal(dir.last.GetPosition(), want) })
	}
	shown(at)
	later := &dirpb.Position{ClusterId: "c1", Reign: 7, Term: 2, Index: 31}
	dir.change(func() { dir.position = later })
	shown(later)
	crash(t, n)
	n, log := keeps(t, dir, k, same)
	dir.until("another process", func() bool { return len(dir.registered) == 2 })
	if p := dir.registered[1].Position; !proto.Equal(p, later) {
		t.Errorf("the next process shows %v", p)
	}
	dir.beats(2)
	l := mustDial(t, dir, "tcp", token.Grant{Session: 6, Namespace: 1}, 0)
	dir.change(func() { dir.lacks, dir.regions = status.Error(codes.DataLoss, "older"), nil })
	dir.beats(3)
	if err := l.write(key.HeapRkey, key.HeapBase, "served"); err != nil {
		t.Errorf("a client that was there: %v", err)
	}
	if s := n.Stats(); len(s.Regions) != 1 || !s.Registered || status.Code(s.DirectoryErr) != codes.DataLoss {
		t.Errorf("%+v", s)
	}
	if log.count("was put back from a backup") != 1 {
		t.Error("the log says nothing, or too much")
	}
	shown(later)
}

// TestRecovered: a node that hears of a recovery fences everybody, and registers as the one that it is, with the
// regions that it holds; tokens of before are good for nothing, and sessions may have numbers that others had before.
func TestRecovered(t *testing.T) {
	dir := newDirectory(t)
	dir.position = &dirpb.Position{ClusterId: "c1", Reign: 7, Term: 2, Index: 30}
	dir.wantSince(1, 1, 11)
	n, _ := open(t, dir, 1<<20, "tcp")
	key := dir.keys(1, "tcp")
	l := mustDial(t, dir, "tcp", token.Grant{Session: 6, Namespace: 1}, 0)
	if err := l.write(key.HeapRkey, key.HeapBase, "before"); err != nil {
		t.Fatal(err)
	}
	dir.change(func() { dir.regions[0].Epoch = 5 })
	dir.beats(3)
	before := n.Stats()
	dir.change(func() {
		dir.latest = 5 // sessions are numbered from what is left
		dir.recovered, dir.key, dir.position = 1, 9, &dirpb.Position{ClusterId: "c1", Recoveries: 1, Reign: 8, Term: 3,
			Index: 40}
	})
	dir.until("another registration", func() bool { return len(dir.registered) == 2 })
	q := dir.registered[1]
	if q.Incarnation != before.Incarnation || len(q.Held) != 1 || q.Position.GetReign() != 0 ||
		q.Position.GetRecoveries() != 1 {
		t.Fatalf("registered: %v", q)
	}
	if h := q.Held[0]; h.PgId != 1 || h.NamespaceId != 1 || h.Since != 11 || h.Epoch != 5 || h.IndexEnd == 0 ||
		h.IndexEnd > indexBytes {
		t.Errorf("held: %v", h)
	}
	dir.beats(2)
	if err := l.write(key.HeapRkey, key.HeapBase, "after"); err == nil {
		t.Error("a session of before the recovery writes")
	}
	if _, err := dial(t, dir, "tcp", private(token.Grant{Session: 7, Namespace: 1}, 0)); err == nil {
		t.Error("a token of before the recovery is taken")
	}
	l = mustDial(t, dir, "tcp", token.Grant{Session: 7, Namespace: 1, Generation: 9}, 0)
	if b, err := l.read(key.HeapRkey, key.HeapBase, 6); err != nil || string(b) != "before" {
		t.Errorf("the region holds %q, %v", b, err)
	}
	dir.until("no more than the position is shown", func() bool { return dir.last.GetPosition().GetIndex() == 40 })
	if len(dir.registered) != 2 {
		t.Errorf("%d registrations", len(dir.registered))
	}
	dir.change(func() { dir.again = true })
	dir.until("a registration as the directory asks", func() bool { return len(dir.registered) == 3 })
	if q := dir.registered[2]; len(q.Held) != 0 {
		t.Errorf("held, as it is told once more: %v", q.Held)
	}
}

// TestHeldIndex: a directory that was recovered is told where each index ends, to the byte, in the order of placement
// groups.
func TestHeldIndex(t *testing.T) {
	const page = layout.RegionPageSize
	want := map[uint32]int{3: page, 1: page + 1, 4: page + 100, 2: indexBytes}
	var list []heldRegion
	for pg, end := range want {
		b := make([]byte, indexBytes)
		b[7] = 1 // of its header
		if end > page {
			b[end-1] = 1
		}
		list = append(list, heldRegion{&dirpb.HeldRegion{PgId: pg}, b})
	}
	for i, h := range reportHeld(list) {
		if h.PgId != uint32(i+1) || h.IndexEnd != uint64(want[h.PgId]) {
			t.Errorf("%v, want placement group %d to end at %d", h, i+1, want[uint32(i+1)])
		}
	}
}
