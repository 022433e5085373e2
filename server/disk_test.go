package server

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/hashicorp/raft"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/loopback"
	"github.com/kvd-project/kvd/internal/testutil"
	"github.com/kvd-project/kvd/server/fsm"
)

// trio are directory nodes with addresses that stay theirs, and disks that are lost or not.
type trio struct {
	t     *testing.T
	fs    []*vfs.MemFS
	grpc  []string
	raft  []string
	logs  []*lockedBuffer
	nodes []*Node // nil: it does not run

	snapshotLogs uint64 // of nodes that start from now on
}

func newTrio(t *testing.T, size int) *trio {
	x := &trio{t: t, nodes: make([]*Node, size)}
	for range size {
		for _, l := range []*[]string{&x.grpc, &x.raft} {
			addr, err := loopback.Free()
			if err != nil {
				t.Fatal(err)
			}
			*l = append(*l, addr)
		}
		x.fs = append(x.fs, vfs.NewCrashableMem())
		x.logs = append(x.logs, new(lockedBuffer))
	}
	for i := range size {
		o := x.options(i)
		o.Bootstrap = i == 0
		if i == 0 {
			o.Join = nil
		}
		x.nodes[i] = ready(t, start(t, o))
		testutil.Until(t, "it is a voter", func() bool { return x.admitted(i) })
	}
	t.Cleanup(func() {
		for i, n := range x.nodes {
			if t.Failed() && n != nil {
				log := x.logs[i].String()
				t.Logf("%v, in %v, leads %v, ended by %v, members %v: %s", n.disk, n.Raft(), n.leading.Load() != nil,
					n.Err(), n.configuration(), log[max(0, len(log)-4000):])
			}
		}
	})
	return x
}

func (x *trio) options(i int) Options {
	// A leader waits for a lease until memory nodes have vouched for it, and those here say nothing.
	o := Options{ID: fmt.Sprint("d", i+1), DataDir: "data", fs: x.fs[i], Lease: 300 * time.Millisecond,
		ElectionTimeout: 200 * time.Millisecond, snapshotLogs: x.snapshotLogs,
		GRPCAddr: x.grpc[i], RaftAddr: x.raft[i], Logger: slog.New(slog.NewTextHandler(x.logs[i], nil))}
	for j, a := range x.grpc {
		if j != i {
			o.Join = append(o.Join, a)
		}
	}
	return o
}

func (x *trio) start(i int) { x.nodes[i] = start(x.t, x.options(i)) }

// kill ends a node's process; its disk keeps what was synced. Nobody hears from it what it does afterwards: a vote that
// is not in the copy of its disk would be forgotten.
func (x *trio) kill(i int) {
	_ = x.nodes[i].streams.Close()
	x.fs[i] = x.fs[i].CrashClone(vfs.CrashCloneCfg{})
	_ = x.nodes[i].Close() // what it still writes is in the former disk
	x.nodes[i] = nil
}

func (x *trio) wipe(i int) { x.fs[i] = vfs.NewCrashableMem() }

// leader is the node that leads, if there is one and a majority agrees; it does not wait for one.
func (x *trio) leader() *Node {
	for _, n := range x.nodes {
		if n != nil && n.ctx.Err() == nil && n.leading.Load() != nil && n.raft.VerifyLeader().Error() == nil {
			return n
		}
	}
	return nil
}

// admitted reports whether a node is a voter with the disk that it has, and has what the leader had.
func (x *trio) admitted(i int) bool {
	l, n := x.leader(), x.nodes[i]
	if l == nil || n == nil {
		return false
	}
	m := l.find(func(m raft.Server) bool { return m.ID == n.disk.server() })
	applied := l.machine.appliedIndex()
	return m.Suffrage == raft.Voter && m.ID != "" && n.machine.appliedIndex() >= applied
}

// register has a memory node entered, which the directory acknowledges.
func (x *trio) register(name string) error {
	l := x.leader()
	if l == nil {
		return errors.New("nobody leads")
	}
	ctx, cancel := context.WithTimeout(x.t.Context(), time.Second)
	defer cancel()
	_, err := l.RegisterNode(ctx, &dirpb.RegisterNodeRequest{Name: name, Incarnation: 1, HostId: "host",
		CapacityBytes: 64 << 20,
		Endpoints:     []*dirpb.Endpoint{{Provider: "tcp", Addr: "127.0.0.1:9"}}})
	return err
}

// has reports whether a leader knows a memory node.
func (x *trio) has(n *Node, name string) (ok bool) {
	n.machine.view(func(s *fsm.State) {
		for _, w := range s.Map(nil).Nodes {
			ok = ok || w.Name == name
		}
	})
	return ok
}

// TestEmptyDiskCountsForNothing: a node that has lost its disk neither votes nor counts before the leader has let it
// in, as a new member, so that what was acknowledged stays.
func TestEmptyDiskCountsForNothing(t *testing.T) {
	x := newTrio(t, 3)
	x.kill(2)
	testutil.Until(t, "a memory node is entered", func() bool { return x.register("acked") == nil })
	was := x.nodes[1].disk
	x.kill(0)
	x.kill(1)
	x.wipe(1)
	x.start(2)
	x.start(1)
	testutil.Until(t, "the empty node waits, and the other one is refused", func() bool {
		if l := x.leader(); l != nil {
			t.Fatalf("%v leads, though it or its voter knows less than was acknowledged", l.disk)
		}
		return strings.Contains(x.logs[1].String(), "not admitted") &&
			strings.Count(x.logs[2].String(), "answers, and not "+was.id+" ")+
				strings.Count(x.logs[2].String(), `with the data folder `+was.incarnation) > 3
	})
	if n := x.nodes[1]; len(n.members()) != 0 || n.raft.LastIndex() != 0 || n.raft.CurrentTerm() != 0 {
		t.Errorf("the empty node has heard something: members %v, index %d, term %d", n.members(), n.raft.LastIndex(),
			n.raft.CurrentTerm())
	}
	x.start(0)
	testutil.Until(t, "it is admitted", func() bool { return x.admitted(1) })
	l := x.leader()
	if l == nil {
		l = leaderOf(t, x.nodes...)
	}
	if !x.has(l, "acked") || len(l.members()) != 3 || x.nodes[1].disk == was {
		t.Errorf("memory node kept: %v; members %v; data folder %v, before %v", x.has(l, "acked"), l.members(),
			x.nodes[1].disk, was)
	}
}

// TestAmnesia: nodes are killed, started, and lose their disks, at most one of three at a time that is not admitted
// again. All that was acknowledged stays, and everybody is in the end where all run.
func TestAmnesia(t *testing.T) {
	for seed := range uint64(3) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			x := newTrio(t, 3)
			rnd := rand.New(rand.NewPCG(seed, 32))
			var acked []string
			check := func() {
				t.Helper()
				// A majority agreed that it leads after it had applied what came before.
				if l := x.leader(); l != nil {
					for _, name := range acked {
						if !x.has(l, name) && x.leader() == l {
							t.Fatalf("%v leads without the memory node %s of %d", l.disk, name, len(acked))
						}
					}
				}
			}
			wiped, wipes := -1, 0
			// A node whose admission was not committed is told that it was removed, and comes back empty.
			revive := func() {
				for i, n := range x.nodes {
					if n != nil && errors.Is(n.Err(), ErrRemoved) {
						if wiped >= 0 && wiped != i {
							t.Fatalf("%v was removed, and nobody asked for it: %v", n.disk, n.Err())
						}
						x.nodes[i], wiped = nil, i
						x.wipe(i)
					}
				}
			}
			for step := range 40 {
				if wiped >= 0 && x.admitted(wiped) {
					wiped = -1
				}
				i := rnd.IntN(3)
				switch what := rnd.IntN(10); {
				case what < 4:
					name := fmt.Sprint("n", step)
					knowing := 0
					for j, n := range x.nodes {
						if n != nil && j != wiped {
							knowing++
						}
					}
					if knowing >= 2 {
						testutil.Until(t, "a majority that knows everything goes on", func() bool {
							revive()
							return x.register(name) == nil
						})
						acked = append(acked, name)
					} else if x.register(name) == nil {
						acked = append(acked, name)
					}
				case what < 6 && x.nodes[i] != nil:
					x.kill(i)
				case what < 8 && x.nodes[i] == nil:
					x.start(i)
				case x.nodes[i] == nil && (wiped < 0 || wiped == i):
					x.wipe(i)
					wiped = i
					wipes++
					x.start(i)
				}
				revive()
				check()
			}
			testutil.Until(t, "all are members", func() bool {
				revive()
				for i, n := range x.nodes {
					if n == nil {
						x.start(i)
					}
				}
				return x.admitted(0) && x.admitted(1) && x.admitted(2)
			})
			check()
			t.Logf("%d memory nodes entered, %d disks lost", len(acked), wipes)
		})
	}
}

// TestSecondProcess: an empty node that is started with the id of a living one, or on a copy of its data folder, ends
// and says why.
func TestSecondProcess(t *testing.T) {
	x := newTrio(t, 3)
	var victim int
	testutil.Until(t, "a leader", func() bool {
		for i, n := range x.nodes {
			if l := x.leader(); l != nil && n != l {
				victim = i
				return true
			}
		}
		return false
	})
	id := fmt.Sprint("d", victim+1)
	elsewhere := func() Options {
		o := x.options(victim)
		o.Join = x.grpc
		o.GRPCAddr, o.RaftAddr, o.Logger = "127.0.0.1:0", "127.0.0.1:0", nil
		return o
	}
	for name, fs := range map[string]*vfs.MemFS{"empty": vfs.NewCrashableMem(),
		"copy": x.fs[victim].CrashClone(vfs.CrashCloneCfg{})} {
		o := elsewhere()
		o.fs = fs
		second := start(t, o)
		joined := make(chan error, 1)
		go func() { joined <- second.Ready(testCtx(t)) }()
		if err := <-joined; err == nil {
			t.Fatalf("%s: it is a member", name)
		}
		<-second.Done()
		err := second.Err()
		if !errors.Is(err, ErrTaken) || !strings.Contains(err.Error(), fmt.Sprintf("directory node %q", id)) ||
			!strings.Contains(err.Error(), "is alive at "+x.raft[victim]) {
			t.Errorf("%s: it ended with %v", name, err)
		}
	}
	l := leaderOf(t, x.nodes...)
	if m := l.members()[id]; m.ID != x.nodes[victim].disk.server() || string(m.Address) != x.raft[victim] {
		t.Errorf("the member is %v", m)
	}
	// The leader itself is alive.
	o := elsewhere()
	o.ID, o.fs = l.opts.ID, vfs.NewCrashableMem()
	second := start(t, o)
	select {
	case <-second.Done():
	case <-testCtx(t).Done():
		t.Fatal("one with the leader's id goes on")
	}
	if !errors.Is(second.Err(), ErrTaken) {
		t.Errorf("one with the leader's id ended with %v", second.Err())
	}
}

// TestFolderOfAnother: a data folder is of one directory node.
func TestFolderOfAnother(t *testing.T) {
	fs := vfs.NewMem()
	n := single(t, fs, forever)
	n.Close()
	_, err := Open(testCtx(t), Options{ID: "d9", DataDir: "d1", fs: fs, Join: []string{"127.0.0.1:1"}})
	if err == nil || !strings.Contains(err.Error(), `d1: the data folder is of directory node "d1", and was to be used as "d9"`) {
		t.Fatalf("another id: %v", err)
	}
	again := ready(t, start(t, Options{ID: "d1", DataDir: "d1", fs: fs, Lease: forever}))
	if again.disk != n.disk || n.disk.incarnation == "" {
		t.Errorf("the data folder is %v, and was %v", again.disk, n.disk)
	}
	for _, id := range []string{"d1#0123456789abcdef"} {
		if _, err := Open(testCtx(t), Options{ID: id, InMemory: true, Bootstrap: true}); err == nil ||
			!strings.Contains(err.Error(), "leave out '#'") {
			t.Errorf("id %q: %v", id, err)
		}
	}
	for _, d := range []disk{{"d1", ""}, {"d1#", ""}, {"d#1", "0123456789abcdef"}, {"", ""}} {
		if got := diskOf(d.server()); got != d {
			t.Errorf("%v is %v behind %q", d, got, d.server())
		}
	}
}

// TestRemoveKeepsMajority: a directory node is not removed if those that are left and answer are no majority.
func TestRemoveKeepsMajority(t *testing.T) {
	x := newTrio(t, 3)
	l := leaderOf(t, x.nodes...)
	var followers []int
	for i, n := range x.nodes {
		if n != l {
			followers = append(followers, i)
		}
	}
	dead, alive := followers[0], followers[1]
	x.kill(dead)
	remove := func(i int, force bool) (err error) {
		testutil.Until(t, "the leader answers", func() bool {
			l := x.leader()
			if l == nil {
				return false
			}
			_, err = l.RemoveDirectory(testCtx(t), &dirpb.RemoveDirectoryRequest{
				Id: fmt.Sprint("d", i+1), Force: force})
			return status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "not the leader")
		})
		return err
	}
	for i, n := range x.nodes {
		if n == nil {
			continue
		}
		wantCode(t, remove(i, false), codes.FailedPrecondition, "nothing was done", fmt.Sprintf(`without directory node "d%d" there are 2, 1 do not answer, and 2 must`, i+1),
			fmt.Sprintf(`"d%d": dial`, dead+1), "force")
	}
	if l := leaderOf(t, x.nodes[alive], l); len(l.members()) != 3 {
		t.Fatalf("members %v", l.members())
	}
	if err := remove(dead, false); err != nil {
		t.Fatalf("the dead one: %v", err)
	}
	// By force, two of two are left of which one is dead, and nothing is decided.
	y := newTrio(t, 3)
	l = leaderOf(t, y.nodes...)
	i := 0
	if y.nodes[i] == l {
		i++
	}
	j := 0
	for k, n := range y.nodes {
		if n != l && k != i {
			j = k
		}
	}
	y.kill(i)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	_, err := l.RemoveDirectory(ctx, &dirpb.RemoveDirectoryRequest{Id: fmt.Sprint("d", j+1), Force: true})
	if err == nil || status.Code(err) == codes.FailedPrecondition &&
		strings.Contains(err.Error(), "nothing was done") && !strings.Contains(err.Error(), "leader") {
		t.Errorf("by force: %v, want that it may have happened", err)
	}
}

// TestHellos: whoever means somebody else, is of another cluster, or says what is no hello, is hung up on before raft
// hears of it.
func TestHellos(t *testing.T) {
	n := single(t, vfs.NewMem(), forever)
	self := n.disk.server()
	good := hello{server: "stranger", wanted: self, address: "127.0.0.1:1", process: "p"}
	edit := func(fn func(h *hello)) []byte { h := good; fn(&h); return h.append(nil) }
	raw := good.append(nil)
	bad := func(i int, b byte) []byte { c := bytes.Clone(raw); c[i] = b; return c }
	for _, tc := range []struct {
		name   string
		say    []byte
		answer string // of the refusal; empty: none, it is hung up
	}{
		{"another disk", edit(func(h *hello) {
			h.wanted = disk{"d1", "0123456789abcdef"}.server()
		}), "calls for directory node \"d1\" with the data folder 0123456789abcdef, and this is"},
		{"another node", edit(func(h *hello) { h.wanted = "d2" }), `calls for directory node "d2"`},
		{"nobody", edit(func(h *hello) { h.wanted = "" }), "calls for"},
		{"another cluster", edit(func(h *hello) { h.cluster = "feed" }), "is in the cluster feed"},
		{"itself elsewhere", edit(func(h *hello) { h.server = self }), "has a copy of its data folder"},
		{"no name", edit(func(h *hello) { h.server = "" }), ""},
		{"unprintable", edit(func(h *hello) { h.server = "d\n2" }), ""},
		{"not text", edit(func(h *hello) { h.process = "\xff" }), ""},
		{"long name", edit(func(h *hello) { h.server = raft.ServerID(strings.Repeat("x", 300)) }), ""},
		{"long text", edit(func(h *hello) { h.refusal = strings.Repeat("x", maxRefusal+1) }), ""},
		{"raft's own", []byte{0, 0x81}, ""},
		{"other magic", bad(1, 'x'), ""},
		{"another version", bad(4, 2), ""},
		{"too long", bad(7, 0xff), ""},
		{"a text beyond its end", bad(helloHeader, 0xff), ""},
		{"too short", bad(6, 3), ""},
	} {
		conn, err := net.Dial("tcp", string(n.transport.LocalAddr()))
		if err != nil {
			t.Fatal(err)
		}
		_ = conn.SetDeadline(time.Now().Add(patience))
		if _, err := conn.Write(tc.say); err != nil {
			t.Fatal(err)
		}
		h, err := readHello(conn, nil)
		if tc.answer == "" {
			if err == nil {
				t.Fatalf("%s: answer %+v", tc.name, h)
			}
		} else if err != nil || !strings.Contains(h.refusal, tc.answer) || h.server != self {
			t.Fatalf("%s: answer %+v, %v", tc.name, h, err)
		}
		if _, err := conn.Read(make([]byte, 1)); err == nil || errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: it is heard: %v", tc.name, err)
		}
		_ = conn.Close()
	}
}

func FuzzHello(f *testing.F) {
	h := hello{probe: true, server: "d1#0123456789abcdef", wanted: "d2", cluster: "feed", address: "127.0.0.1:1",
		process: "p", refusal: "no"}
	f.Add(h.append(nil))
	f.Add([]byte(helloMagic))
	f.Fuzz(func(t *testing.T, b []byte) {
		h, err := readHello(bytes.NewReader(b), nil)
		if err != nil {
			return
		}
		again, err := readHello(bytes.NewReader(h.append(nil)), nil)
		if err != nil || again != h {
			t.Errorf("%+v is %+v when it is read again: %v", h, again, err)
		}
	})
}
