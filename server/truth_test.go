package server

import (
	"bytes"
	"context"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"google.golang.org/grpc/codes"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/testutil"
)

// journal is what a node logs.
type journal struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (j *journal) Write(b []byte) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.buf.Write(b)
}

// count is how many lines hold all of words.
func (j *journal) count(words ...string) (n int) {
	j.mu.Lock()
	defer j.mu.Unlock()
lines:
	for line := range strings.Lines(j.buf.String()) {
		for _, w := range words {
			if !strings.Contains(line, w) {
				continue lines
			}
		}
		n++
	}
	return n
}

func (j *journal) logger() *slog.Logger { return slog.New(slog.NewTextHandler(j, nil)) }

// own is what a node itself says.
func own(t testing.TB, n *Node) *dirpb.StatusReply {
	t.Helper()
	st, err := n.Status(testCtx(t), &dirpb.StatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	return st
}

// A placement group that lost all its copies is noted by every directory node, although its
// memory node is back within the lease; restarts and other leaders know of it, until an
// operator who knows how much it was accepts it.
func TestLossIsNotedUntilAccepted(t *testing.T) {
	logs := map[string]*journal{}
	c := newClusterWith(t, 3, forever, func(i int, o *Options) {
		if logs[o.ID] == nil {
			logs[o.ID] = &journal{}
		}
		o.Logger = logs[o.ID].logger()
	})
	m := newMemnode(t, "m1", 1, c.all)
	l := leaderOf(t, c.all()...)
	client := dial(t, l)
	x := open(t, client)
	pg := statusOf(t, client).Map.Pgs[0].Id
	if _, err := client.GrantExtent(testCtx(t), &dirpb.GrantExtentRequest{SessionId: x.SessionId, PgId: pg,
		WantUnits: 100, PlaceUnits: 1}); err != nil {
		t.Fatal(err)
	}
	if w := own(t, l).Map.Namespaces[0]; w.Lost != 0 {
		t.Fatalf("lost before anything was: %v", w)
	}
	followed(t, m, "m1", 2, c.all) // the machine was switched off and on
	lost := func(n *Node) *dirpb.Namespace {
		for _, w := range own(t, n).Map.Namespaces {
			return w
		}
		return nil // a directory node that is behind knows of none
	}
	for _, n := range c.all() {
		testutil.Until(t, n.opts.ID+" knows", func() bool { return lost(n).GetLost() == 1 })
		w := lost(n)
		if len(w.Losses) != 1 || w.Losses[0].PgId != pg || w.Losses[0].Node != "m1" || w.Losses[0].HeldBytes == 0 ||
			time.Since(time.UnixMilli(w.Losses[0].UnixMillis)).Abs() > time.Minute {
			t.Errorf("%s: %v", n.opts.ID, w)
		}
		testutil.Until(t, n.opts.ID+" warns", func() bool {
			return logs[n.opts.ID].count("level=WARN", "data lost", "namespace=default", "node=m1",
				"kvctl namespace accept-loss default") == 1
		})
	}
	testutil.Until(t, "the leader says that the node was restarted", func() bool {
		return logs[l.opts.ID].count("level=WARN", "restarted", "node=m1") == 1
	})

	// The leader stops and is started again.
	i := c.index(l)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	next := leaderOf(t, c.all()...)
	if w := lost(next); w.Lost != 1 || len(w.Losses) != 1 {
		t.Fatalf("the next leader: %v", w)
	}
	testutil.Until(t, "the next leader warns", func() bool { // whoever it is by then
		n := 0
		for _, j := range logs {
			n += j.count("level=WARN", "nobody has accepted", "namespace=default")
		}
		return n > 0
	})
	back := ready(t, c.restart(i, ""))
	if w := lost(back); w.Lost != 1 || len(w.Losses) != 1 {
		t.Fatalf("after a restart: %v", w)
	}

	for _, q := range []struct {
		lost uint64
		name string
		code codes.Code
	}{{0, "default", codes.FailedPrecondition}, {2, "default", codes.FailedPrecondition},
		{1, "nothing", codes.NotFound}} {
		_, err := next.AcceptLoss(testCtx(t), &dirpb.AcceptLossRequest{Name: q.name, Lost: q.lost})
		wantCode(t, err, q.code, q.name)
	}
	retry(t, "accept", c.all(), func(d dirpb.DirectoryClient) error {
		_, err := d.AcceptLoss(testCtx(t), &dirpb.AcceptLossRequest{Name: "default", Lost: 1})
		return err
	})
	for _, n := range c.all() {
		testutil.Until(t, n.opts.ID+" has accepted", func() bool {
			return lost(n).GetLost() == 1 && len(lost(n).Losses) == 0
		})
	}
}

// A directory node that does not lead says so, and how old its answer is; asked for the
// cluster's, it asks the leader.
func TestStatusSaysWhoAnswers(t *testing.T) {
	c := newCluster(t, 3, forever)
	newMemnode(t, "m1", 1, c.all)
	l := leaderOf(t, c.all()...)
	open(t, dial(t, l))
	epoch, _ := l.leading.Load().epochs()
	var followers []*Node
	for _, n := range c.all() {
		st := own(t, n)
		if st.AnsweredBy != n.opts.ID || st.Leads != (n == l) {
			t.Errorf("%s: answered by %q, leads %v; %s leads", n.opts.ID, st.AnsweredBy, st.Leads, l.opts.ID)
		}
		if n == l {
			if st.AgeMillis != 0 {
				t.Errorf("the leader's answer is %d ms old", st.AgeMillis)
			}
			continue
		}
		followers = append(followers, n)
		if st.AgeMillis < 0 || st.AgeMillis > time.Minute.Milliseconds() {
			t.Errorf("%s: %d ms old", n.opts.ID, st.AgeMillis)
		}
		testutil.Until(t, n.opts.ID+" passes the leader's answer on", func() bool {
			st, err := n.ClusterStatus(testCtx(t), &dirpb.StatusRequest{})
			return err == nil && st.Leads && st.AnsweredBy == l.opts.ID && st.Epoch >= epoch && st.Usage[0].Estimated &&
				len(st.NodeStats) == 1
		})
	}
	// Without a majority nobody leads, and answers grow old.
	for _, n := range []*Node{l, followers[1]} {
		if err := n.Close(); err != nil {
			t.Fatal(err)
		}
	}
	n := followers[0]
	var last int64
	testutil.Until(t, "the last one's answer grows old", func() bool {
		st, err := n.ClusterStatus(testCtx(t), &dirpb.StatusRequest{})
		if err != nil {
			t.Fatal(err)
		}
		if st.Leads || st.AnsweredBy != n.opts.ID {
			return false // it was handed the leadership, and has not missed the others yet
		}
		grown := st.AgeMillis > last && last > 0
		last = st.AgeMillis
		return grown && len(st.Directory) == 3 && len(st.Map.Namespaces) == 1
	})
}

// The leader says which directory node does not answer, until it does again or is removed.
func TestSilentDirectoryNode(t *testing.T) {
	c := newCluster(t, 3, forever)
	l := leaderOf(t, c.all()...)
	i := (c.index(l) + 1) % 3
	gone := c.all()[i]
	silent := func() (ids []string) {
		for _, d := range own(t, l).Directory {
			if d.SilentMillis > 0 {
				ids = append(ids, d.Id)
			}
		}
		return ids
	}
	if ids := silent(); len(ids) > 0 {
		t.Fatalf("%v do not answer", ids)
	}
	raftAddr := string(gone.transport.LocalAddr())
	if err := gone.Close(); err != nil {
		t.Fatal(err)
	}
	testutil.Until(t, "the leader notices", func() bool {
		ids := silent()
		return len(ids) == 1 && ids[0] == gone.opts.ID
	})
	ready(t, c.restart(i, raftAddr))
	testutil.Until(t, "the leader hears it again", func() bool { return len(silent()) == 0 })
}

// A leader that loses its leadership, and a memory node that is back after it was down, are
// worth a line each.
func TestComingsAndGoingsAreLogged(t *testing.T) {
	logs := map[string]*journal{}
	c := newClusterWith(t, 3, 200*time.Millisecond, func(i int, o *Options) {
		if logs[o.ID] == nil {
			logs[o.ID] = &journal{}
		}
		o.Logger = logs[o.ID].logger()
	})
	all := func(words ...string) (n int) {
		for _, j := range logs {
			n += j.count(words...)
		}
		return n
	}
	m := newMemnode(t, "m1", 1, c.all)
	testutil.Until(t, "a line for a new node", func() bool { return all("level=INFO", "is new", "node=m1") == 1 })
	m.mute.Store(true)
	testutil.Until(t, "a line for a lost node", func() bool { return all("level=WARN", "m1", "is down") > 0 })
	testutil.Until(t, "m1 is down", func() bool { // the line comes first
		return own(t, leaderOf(t, c.all()...)).Map.Nodes[0].State == dirpb.NodeState_NODE_DOWN
	})
	newMemnode(t, "m1", 2, c.all)
	testutil.Until(t, "a line for its return", func() bool { return all("level=INFO", "is back", "node=m1") == 1 })

	l := leaderOf(t, c.all()...)
	if err := l.raft.LeadershipTransfer().Error(); err != nil {
		t.Fatal(err)
	}
	testutil.Until(t, "a line for the lost leadership", func() bool {
		return logs[l.opts.ID].count("level=WARN", "leadership lost") == 1
	})
}

// A session is opened with what is active while a memory node that makes the rest is silent,
// well before its client gives up; where nothing is active the client hears why.
func TestOpenSessionWithWhatIsActive(t *testing.T) {
	n := single(t, vfs.NewMem(), forever)
	c := dial(t, n)
	newMemnode(t, "m1", 1, just(n))
	m2 := newMemnode(t, "m2", 1, just(n))
	m2.silence()
	if _, err := c.CreateNamespace(testCtx(t), &dirpb.CreateNamespaceRequest{Name: "w", Replicas: 1}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(testCtx(t), activationWait)
	defer cancel()
	if _, err := c.OpenSession(ctx, &dirpb.OpenSessionRequest{Namespace: "w"}); err != nil {
		t.Fatalf("with one of two placement groups active: %v", err)
	}

	n = single(t, vfs.NewMem(), forever)
	m1 := newMemnode(t, "m1", 1, just(n))
	m1.silence()
	ctx, cancel = context.WithTimeout(testCtx(t), 2*time.Second)
	defer cancel()
	_, err := dial(t, n).OpenSession(ctx, &dirpb.OpenSessionRequest{})
	wantCode(t, err, codes.Unavailable, "0 of 1", "no session was opened")
}

// A memory node dies while placement groups are made on it: others make them.
func TestDeadMakerIsReplaced(t *testing.T) {
	n := single(t, vfs.NewMem(), 200*time.Millisecond)
	c := dial(t, n)
	m1 := newMemnode(t, "m1", 1, just(n))
	m2 := newMemnode(t, "m2", 1, just(n))
	m2.silence()
	if _, err := c.CreateNamespace(testCtx(t), &dirpb.CreateNamespaceRequest{
		Name: "w", Replicas: 1, BytesPerNode: 64 << 20}); err != nil {
		t.Fatal(err)
	}
	testutil.Until(t, "m1 has made all", func() bool {
		st := statusOf(t, c)
		for _, pg := range st.Map.Pgs {
			if pg.State != dirpb.PGState_PG_ACTIVE || len(pg.Members) != 1 || pg.Members[0].NodeId != m1.id {
				return false
			}
		}
		return len(st.Map.Pgs) == 2
	})
}

// A loss has its time, too, where a memory node says goodbye whose other placement groups are busy for too long.
func TestLossByGoodbyeHasItsTime(t *testing.T) {
	n := single(t, vfs.NewMem(), forever)
	c, ctx := dial(t, n), testCtx(t)
	m := newMemnode(t, "m0", 1, just(n))
	newMemnode(t, "m1", 1, just(n))
	for r, name := range []string{"one", "two"} {
		if _, err := c.CreateNamespace(ctx, &dirpb.CreateNamespaceRequest{Name: name, Replicas: uint32(r + 1)}); err !=
			nil {
			t.Fatal(err)
		}
	}
	x, err := c.OpenSession(ctx, &dirpb.OpenSessionRequest{Namespace: "one"})
	if err != nil {
		t.Fatal(err)
	}
	var st *dirpb.Map
	testutil.Until(t, "all placement groups to be there", func() bool {
		st = statusOf(t, c).Map
		return !slices.ContainsFunc(st.Pgs, func(pg *dirpb.PlacementGroup) bool {
			return pg.State != dirpb.PGState_PG_ACTIVE
		})
	})
	for _, pg := range st.Pgs {
		switch pg.NamespaceId {
		case st.Namespaces[0].Id:
			_, err = c.GrantExtent(ctx, &dirpb.GrantExtentRequest{SessionId: x.SessionId, PgId: pg.Id, WantUnits: 100,
				PlaceUnits: 1})
		default:
			_, err = c.StartJob(ctx, &dirpb.StartJobRequest{Kind: dirpb.JobKind_JOB_SCRUB, Namespace: "two",
				PgId: pg.Id})
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if _, err := c.LeaveNode(ctx, &dirpb.LeaveNodeRequest{NodeId: m.id, Incarnation: 1}); err != nil {
		t.Fatal(err)
	}
	losses := statusOf(t, c).Map.Namespaces[0].Losses
	if len(losses) != 1 || losses[0].Node != "m0" || time.Since(time.UnixMilli(losses[0].UnixMillis)).Abs() >
		time.Minute {
		t.Errorf("losses %v, now %v", losses, time.Now().UnixMilli())
	}
}
