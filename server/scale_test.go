package server

import (
	"bytes"
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/hashicorp/raft"
	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// A question to the quorum counts for those who came before it was sent, and for nobody else; those who
// wait share the next one, and the goroutine that asks ends when nobody waits.
func TestQuorum(t *testing.T) {
	asked, answer := make(chan int, 10), make(chan error)
	ended, idle := make(chan struct{}), make(chan struct{}, 2)
	var questions atomic.Int32
	q := quorum{
		verify: func() error { n := int(questions.Add(1)); asked <- n; return <-answer },
		ended:  ended, began: func() func() { return func() { idle <- struct{}{} } },
	}
	first := q.join()
	<-asked
	q.mu.Lock()
	q.mu.sent = time.Now().Add(time.Hour) // others wait for it, however slow this machine is
	q.mu.Unlock()
	second, third := q.join(), q.join()
	if second == first || third != second || questions.Load() != 1 {
		t.Fatalf("%d questions; the second caller shares the first's: %v, the third the second's: %v", questions.Load(),
			second == first, third == second)
	}
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if err := q.leads(gone); !errors.Is(err, context.Canceled) {
		t.Fatalf("a caller that went: %v", err)
	}
	close(ended) // ends the pause before the next question
	answer <- nil
	if <-first.done; first.err != nil {
		t.Fatal(first.err)
	}
	if n := <-asked; n != 2 {
		t.Fatalf("question %d, want 2", n)
	}
	lost := errors.New("lost")
	answer <- lost
	if <-second.done; second.err != lost {
		t.Fatalf("a caller that came behind the first question was sent is answered %v", second.err)
	}
	<-idle
	if q.mu.asking != 0 || q.mu.next != nil || questions.Load() != 2 {
		t.Fatalf("%d ask, %v waits, %d questions", q.mu.asking, q.mu.next, questions.Load())
	}

	// An answer that takes long holds nobody up who comes later.
	slow := q.join()
	<-asked
	q.mu.Lock()
	q.mu.sent = time.Now().Add(-gatherMost)
	q.mu.Unlock()
	next := q.join()
	if n := <-asked; n != 4 {
		t.Fatalf("question %d, want 4", n)
	}
	answer <- nil
	answer <- nil
	<-slow.done
	<-next.done
	if err := errors.Join(slow.err, next.err); err != nil {
		t.Fatal(err)
	}
	<-idle
	<-idle
}

// Each of those who wait for the state wakes for what concerns it: watchers for another map and for the end of
// their own session, memory nodes for sessions and keys, too.
func TestWakes(t *testing.T) {
	m, _ := newTestMachine(t, vfs.NewMem())
	index := uint64(10)
	do := func(c *fsmpb.Command) fsm.Result {
		t.Helper()
		index++
		c.Term = 1
		r := m.ApplyBatch([]*raft.Log{logOf(t, index, 1, c)})[0].(fsm.Result)
		if r.Err != nil {
			t.Fatal(r.Err)
		}
		return r
	}
	open := func() uint32 {
		return do(&fsmpb.Command{
			Op: &fsmpb.Command_OpenSession{OpenSession: &fsmpb.OpenSession{NamespaceId: 1}}}).Session.Id
	}
	do(&fsmpb.Command{
		Op: &fsmpb.Command_Init{Init: &fsmpb.Init{ClusterId: "c", ClusterKey: bytes.Repeat([]byte{1}, fsm.KeyBytes),
			Level: &fsmpb.Level{Level: fsm.Level}}}})
	node := func(incarnation uint64) *fsmpb.Command {
		return &fsmpb.Command{
			Op: &fsmpb.Command_RegisterNode{RegisterNode: &fsmpb.RegisterNode{Node: &dirpb.RegisterNodeRequest{
				Name: "m", Incarnation: incarnation, CapacityBytes: 1 << 30, Domain: "d", Endpoints: []*dirpb.Endpoint{
					{Provider: "tcp", Addr: "h:1"}},
			}}}}
	}
	do(node(1))
	do(&fsmpb.Command{Op: &fsmpb.Command_CreateNamespace{CreateNamespace: &fsmpb.CreateNamespace{
		Namespace: &dirpb.CreateNamespaceRequest{Name: "n", Replicas: 1, BytesPerNode: 1 << 26},
	}}})
	a, b := open(), open()
	fence := func(ids ...uint32) *fsmpb.Command {
		return &fsmpb.Command{Op: &fsmpb.Command_ExpireSessions{ExpireSessions: &fsmpb.ExpireSessions{SessionIds: ids}}}
	}
	for _, x := range []struct {
		name       string
		c          *fsmpb.Command
		move, news bool
		end        bool // of a
	}{
		{"epochs", &fsmpb.Command{Op: &fsmpb.Command_ReserveEpoch{ReserveEpoch: &fsmpb.ReserveEpoch{Ceiling: 9}}},
			false, false, false},
		{"a session", &fsmpb.Command{Op: &fsmpb.Command_OpenSession{OpenSession: &fsmpb.OpenSession{NamespaceId: 1}}},
			false, true, false},
		{"a key", &fsmpb.Command{
			Op: &fsmpb.Command_RotateKey{
				RotateKey: &fsmpb.RotateKey{Generation: 2, Key: bytes.Repeat([]byte{2}, fsm.KeyBytes)}}}, false, true,
			false},
		{"another's end", fence(b), false, true, false},
		{"its end", fence(a), false, true, true},
		{"a map", node(2), true, true, false},
	} {
		move, news := m.move(), m.news()
		var end <-chan struct{}
		m.view(func(*fsm.State) { end = m.end(a) })
		do(x.c)
		for what, y := range map[string]struct {
			ch   <-chan struct{}
			want bool
		}{"move": {move, x.move}, "news": {news, x.news}, "end": {end, x.end}} {
			select {
			case <-y.ch:
				if !y.want {
					t.Errorf("%s: %s", x.name, what)
				}
			default:
				if y.want {
					t.Errorf("%s: no %s", x.name, what)
				}
			}
		}
		if x.end {
			a = open()
		}
	}
}

// Sessions of a namespace share one encoding of a map, others do not, and each decodes to what the state shows them.
func TestSharedMaps(t *testing.T) {
	n := single(t, vfs.NewMem(), forever)
	c := dial(t, n)
	newMemnode(t, "m1", 1, just(n))
	a, b := open(t, c).SessionId, open(t, c).SessionId
	if _, err := c.CreateNamespace(testCtx(t), &dirpb.CreateNamespaceRequest{
		Name: "other", BytesPerNode: 8 << 20}); err != nil {
		t.Fatal(err)
	}
	other, err := c.OpenSession(testCtx(t), &dirpb.OpenSessionRequest{Namespace: "other"})
	if err != nil {
		t.Fatal(err)
	}
	var m maps
	shown := make(map[uint32]*sharedMap)
	n.machine.view(func(s *fsm.State) {
		for _, id := range []uint32{0, a, b, other.SessionId} {
			shown[id] = m.show(s, s.Session(id))
			bs, err := shown[id].encode()
			if err != nil {
				t.Fatal(err)
			}
			out, err := newCodec().Marshal(bs)
			if err != nil {
				t.Fatal(err)
			}
			got := new(dirpb.Map)
			if err := newCodec().Unmarshal(out, got); err != nil || !proto.Equal(got, s.Map(s.Session(id))) {
				t.Errorf("session %d is sent %v, %v", id, got, err)
			}
		}
	})
	// Those who watch are sent that.
	stream, err := c.WatchMap(testCtx(t), &dirpb.WatchMapRequest{SessionId: a})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); err != nil {
		t.Fatal(err)
	}
	n.machine.view(func(s *fsm.State) {
		if x := n.machine.maps.show(s, s.Session(b)); x.bytes == nil {
			t.Error("a watcher was sent an encoding of its own")
		}
	})
	if shown[a] != shown[b] || shown[a] == shown[other.SessionId] || shown[a] == shown[0] ||
		shown[0] == shown[other.SessionId] {
		t.Error("maps are shared by others than the sessions of a namespace")
	}
	if _, err := c.RegisterNode(testCtx(t), &dirpb.RegisterNodeRequest{Name: "m2", Incarnation: 1,
		Endpoints: []*dirpb.Endpoint{{Provider: "tcp", Addr: "h:1"}}}); err != nil {
		t.Fatal(err)
	}
	n.machine.view(func(s *fsm.State) {
		if next := m.show(s, s.Session(a)); next.version <= shown[a].version || next.version != s.MapVersion() {
			t.Errorf("version %d behind %d", next.version, shown[a].version)
		}
	})
}
