package server

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/testutil"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/raftstore"
)

// A process killed at any moment, on a machine that loses what was not synced,
// comes back with everything it acknowledged.
func TestCrash(t *testing.T) {
	fs := vfs.NewCrashableMem()
	n := single(t, fs, forever)
	var now atomic.Pointer[Node]
	now.Store(n)
	newMemnode(t, "m1", 1, func() []*Node { return []*Node{now.Load()} })
	var last *dirpb.OpenSessionReply
	for round := range 4 {
		c := dial(t, n)
		for range 5 {
			last = open(t, c)
			if _, err := c.GrantExtent(testCtx(t), &dirpb.GrantExtentRequest{SessionId: last.SessionId, PgId: 1,
				WantUnits: 10}); err != nil {
				t.Fatal(err)
			}
		}
		if round == 2 {
			if err := n.raft.Snapshot().Error(); err != nil {
				t.Fatal(err)
			}
		}
		r := renew(t, c, last.SessionId, last.Epoch)
		before := statusOf(t, c)
		crashed := fs.CrashClone(vfs.CrashCloneCfg{})
		if err := n.Close(); err != nil {
			t.Fatal(err)
		}
		fs = crashed
		n = single(t, fs, forever)
		now.Store(n)
		c = dial(t, n)
		after := statusOf(t, c)
		if after.ClusterId != before.ClusterId || len(after.Sessions) != len(before.Sessions) ||
			!proto.Equal(lasting(after.Usage[0]), lasting(before.Usage[0])) ||
			after.Map.Version != before.Map.Version || after.Epoch < r.Epoch {
			t.Fatalf("round %d: after the crash %v, before %v", round, after, before)
		}
		if x := open(t, c); x.SessionId != last.SessionId+1 {
			t.Fatalf("round %d: session %d after %d", round, x.SessionId, last.SessionId)
		}
	}
}

// A node that joins late gets a snapshot, and starts again from it.
func TestSnapshotInstall(t *testing.T) {
	c := &cluster{t: t, fs: []vfs.FS{vfs.NewMem(), vfs.NewMem()}}
	c.opts = func(i int) Options {
		return Options{ID: fmt.Sprint("d", i+1), DataDir: "data", fs: c.fs[i], Lease: forever, snapshotLogs: 4}
	}
	o := c.opts(0)
	o.Bootstrap = true
	n := ready(t, start(t, o))
	c.nodes = []*Node{n}
	newMemnode(t, "m1", 1, c.all)
	d := dial(t, n)
	for range 20 {
		open(t, d)
	}
	if err := n.raft.Snapshot().Error(); err != nil {
		t.Fatal(err)
	}
	if first, err := n.store.FirstIndex(); err != nil || first < 10 {
		t.Fatalf("the log begins at %d, %v; the snapshot did not shorten it", first, err)
	}
	o = c.opts(1)
	o.Join = []string{n.Addr()}
	late := ready(t, start(t, o))
	c.mu.Lock()
	c.nodes = append(c.nodes, late)
	c.mu.Unlock()
	c.awaitVoters(2)
	same := func() {
		t.Helper()
		testutil.Until(t, "equal states", func() bool {
			rows := func(n *Node) (b bytes.Buffer) {
				n.machine.view(func(s *fsm.State) {
					for _, r := range s.Rows() {
						fmt.Fprintf(&b, "%q=%q\n", r.Key, r.Value)
					}
				})
				return b
			}
			a, b := rows(c.all()[0]), rows(c.all()[1])
			return bytes.Equal(a.Bytes(), b.Bytes())
		})
	}
	same()
	if list, err := late.store.Snapshots().List(); err != nil || len(list) == 0 {
		t.Fatalf("no snapshot arrived: %v", err)
	}
	if err := late.Close(); err != nil {
		t.Fatal(err)
	}
	// Of two nodes, neither can elect itself or learn a new address of the other.
	at := string(late.transport.LocalAddr())
	late = ready(t, c.restart(1, at))
	same()

	// A crash between a snapshot's arrival and its restore leaves rows behind the
	// snapshot; the next start takes the snapshot.
	if err := late.Close(); err != nil {
		t.Fatal(err)
	}
	s, err := raftstore.Open(t.Context(), raftstore.Options{Dir: "data", FS: c.fs[1]})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.ReplaceRows(1, nil); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	ready(t, c.restart(1, at))
	same()
}

// A leader whose disk hangs must give way although its heartbeats would go on.
func TestStalledLeaderGivesWay(t *testing.T) {
	c := newCluster(t, 3, forever)
	i := c.index(leaderOf(t, c.all()...))
	if err := c.all()[i].Close(); err != nil {
		t.Fatal(err)
	}
	var stuck atomic.Bool
	release := make(chan struct{})
	c.fs[i] = errorfs.Wrap(c.fs[i], errorfs.InjectorFunc(func(op errorfs.Op) error {
		if stuck.Load() && (op.Kind == errorfs.OpFileSync || op.Kind == errorfs.OpFileSyncData ||
			op.Kind == errorfs.OpFileSyncTo) {
			<-release
		}
		return nil
	}))
	inner := c.opts
	c.opts = func(i int) Options {
		o := inner(i)
		o.stallTimeout = 300 * time.Millisecond
		return o
	}
	n := ready(t, c.restart(i, ""))
	testutil.Until(t, "it to lead again", func() bool {
		l := leaderOf(t, c.all()...)
		if l != n {
			_ = l.raft.LeadershipTransferToServer(n.disk.server(), n.transport.LocalAddr()).Error()
		}
		return l == n
	})
	stuck.Store(true)
	ctx := testCtx(t)
	_, err := dial(t, n).CreateNamespace(ctx, &dirpb.CreateNamespaceRequest{Name: "x"})
	wantCode(t, err, codes.Unavailable, "outcome unknown")
	select {
	case <-n.Done():
	case <-ctx.Done():
		t.Fatal("the stalled node goes on")
	}
	if !errors.Is(n.Err(), raftstore.ErrStalled) || !strings.Contains(n.Err().Error(), "data") {
		t.Fatalf("stopped because of %v", n.Err())
	}
	rest := append(c.all()[:i:i], c.all()[i+1:]...)
	retry(t, "register", rest, func(d dirpb.DirectoryClient) error {
		_, err := d.RegisterNode(ctx, &dirpb.RegisterNodeRequest{Name: "m", Incarnation: 1,
			Endpoints: []*dirpb.Endpoint{{Provider: "tcp"}}})
		return err
	})
	stuck.Store(false)
	close(release)
}
