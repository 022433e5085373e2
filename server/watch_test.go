package server

import (
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"google.golang.org/grpc/codes"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/testutil"
	"github.com/kvd-project/kvd/server/fsm"
)

func TestWatchMap(t *testing.T) {
	n := single(t, vfs.NewMem(), forever)
	c := dial(t, n)
	newMemnode(t, "m1", 1, just(n))
	x := open(t, c)
	ctx := testCtx(t)
	watch := func(q *dirpb.WatchMapRequest) func() *dirpb.Map {
		w, err := c.WatchMap(ctx, q)
		if err != nil {
			t.Fatal(err)
		}
		return func() *dirpb.Map {
			t.Helper()
			m, err := w.Recv()
			if err != nil {
				t.Fatal(err)
			}
			return m
		}
	}
	mine, all := watch(&dirpb.WatchMapRequest{SessionId: x.SessionId}), watch(&dirpb.WatchMapRequest{})
	m := mine()
	if m.Version < x.MapVersion || len(m.Pgs) != 1 || len(m.Pgs[0].Members[0].Keys) != 1 || len(m.Shards) != 4 ||
		m.ClusterId == "" {
		t.Fatalf("a session's map %v", m)
	}
	o := all()
	if o.Version != m.Version || len(o.Pgs) != 1 || len(o.Pgs[0].Members[0].Keys) != 0 {
		t.Fatalf("an operator's map %v", o)
	}
	later := watch(&dirpb.WatchMapRequest{SessionId: x.SessionId, AfterVersion: m.Version})
	if _, err := c.CreateNamespace(ctx, &dirpb.CreateNamespaceRequest{Name: "other", BytesPerNode: 8 << 20}); err !=
		nil {
		t.Fatal(err)
	}
	for name, next := range map[string]func() *dirpb.Map{"session": mine, "later": later, "operator": all} {
		got, last := next(), m.Version
		for ; name == "operator" && got.Pgs[len(got.Pgs)-1].State != dirpb.PGState_PG_ACTIVE; got = next() {
			if got.Version <= last {
				t.Fatalf("version %d after %d", got.Version, last)
			}
			last = got.Version
		}
		if want := map[string]int{"session": 1, "later": 1, "operator": 2}[name]; got.Version <= m.Version ||
			len(got.Namespaces) != want || len(got.Pgs) != want {
			t.Fatalf("%s sees %v after %d", name, got, m.Version)
		}
	}
	w, err := c.WatchMap(ctx, &dirpb.WatchMapRequest{SessionId: 99})
	if err == nil {
		_, err = w.Recv()
	}
	wantCode(t, err, codes.NotFound, "99")

	// A watcher that reads nothing neither stops the state machine nor falls
	// behind for ever: it gets the newest version at last.
	slow := watch(&dirpb.WatchMapRequest{})
	for i := range uint64(200) {
		if _, err := c.RegisterNode(ctx, &dirpb.RegisterNodeRequest{
			Name: "flapping", Incarnation: 1, Boot: i + 1, Keeps: true, Endpoints: []*dirpb.Endpoint{
				{Provider: "tcp", Addr: strings.Repeat("x", 256)}},
		}); err != nil {
			t.Fatal(err)
		}
	}
	var newest uint64
	n.machine.view(func(s *fsm.State) { newest = s.MapVersion() })
	testutil.Until(t, "the newest map", func() bool { return slow().Version >= newest })

	streams := make(chan error, 1)
	stay, err := c.WatchMap(ctx, &dirpb.WatchMapRequest{AfterVersion: 1 << 60})
	if err != nil {
		t.Fatal(err)
	}
	go func() { _, err := stay.Recv(); streams <- err }()
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}
	wantCode(t, <-streams, codes.Unavailable)
}
