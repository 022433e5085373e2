package server

import (
	"archive/tar"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/hashicorp/raft"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/testutil"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
	"github.com/kvd-project/kvd/server/raftstore"
)

// earlier are the versions whose data folders testdata/folders holds, made by testdata/folder.sh, with the level of
// each.
var earlier = map[string]uint32{
	"a961d7c": 0, // the last one before memory nodes kept their memory
}

// unpack extracts the data folder of a directory node of an earlier version.
func unpack(t *testing.T, version, name string) (dir string) {
	t.Helper()
	f, err := os.Open(filepath.Join("testdata", "folders", version, name+".tar.gz"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	to := t.TempDir()
	for r := tar.NewReader(z); ; {
		h, err := r.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(to, filepath.Clean("/"+h.Name))
		if h.FileInfo().IsDir() {
			if dir != "" {
				t.Fatalf("%s: a folder %s in %s", name, h.Name, dir)
			}
			dir, err = path, os.Mkdir(path, 0o700)
		} else {
			var b []byte
			if b, err = io.ReadAll(r); err == nil {
				err = os.WriteFile(path, b, 0o600)
			}
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// earlierStatus is what the leader said before a directory of an earlier version was killed.
func earlierStatus(t *testing.T, version, name string) *dirpb.StatusReply {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", "folders", version, name+".json"))
	if err != nil {
		t.Fatal(err)
	}
	m := new(dirpb.StatusReply)
	// kvctl adds what is none of the message.
	if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(b, m); err != nil {
		t.Fatal(err)
	}
	return m
}

func eachFolder(t *testing.T, fn func(t *testing.T, version, cluster, node string)) {
	for version := range earlier {
		for _, folder := range []string{"one-d1", "three-d1", "three-d2", "three-d3"} {
			cluster, node, _ := strings.Cut(folder, "-")
			t.Run(version+"/"+folder, func(t *testing.T) { fn(t, version, cluster, node) })
		}
	}
}

func openStore(t *testing.T, dir string) *raftstore.Store {
	t.Helper()
	store, err := raftstore.Open(testCtx(t), raftstore.Options{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { store.Close() })
	return store
}

// Every data folder of an earlier version opens, and what that version's leader knew is there: namespaces with owners,
// access lists and quotas, placement groups, memory nodes, sessions, status words, jobs, token keys and members.
func TestEarlierFolders(t *testing.T) {
	eachFolder(t, func(t *testing.T, version, cluster, node string) {
		store := openStore(t, unpack(t, version, cluster+"-"+node))
		want := earlierStatus(t, version, cluster)
		m, err := newMachine(store, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		last, err := store.LastIndex()
		if err != nil || last < want.RaftApplied {
			t.Fatalf("the log ends with entry %d, want at least %d: %v", last, want.RaftApplied, err)
		}
		if m.appliedIndex() > want.RaftApplied {
			t.Fatalf("%d entries are applied, and the status is of %d", m.appliedIndex(), want.RaftApplied)
		}
		for i := m.appliedIndex() + 1; i <= want.RaftApplied; i++ {
			m.Apply(entry(t, store, i))
		}
		m.view(func(s *fsm.State) { checkEarlier(t, s, want, earlier[version]) })
		// The state is stored, and restored, by this version as well.
		again, err := newMachine(store, m.log)
		if err != nil {
			t.Fatal(err)
		}
		again.view(func(s *fsm.State) { checkEarlier(t, s, want, earlier[version]) })
	})
}

func entry(t *testing.T, store *raftstore.Store, i uint64) *raft.Log {
	t.Helper()
	l := new(raft.Log)
	if err := store.GetLog(i, l); err != nil {
		t.Fatalf("entry %d: %v", i, err)
	}
	return l
}

func checkEarlier(t *testing.T, s *fsm.State, want *dirpb.StatusReply, level uint32) {
	t.Helper()
	if s.Level() != level {
		t.Errorf("level %d, want %d", s.Level(), level)
	}
	got := s.Map(nil)
	if len(got.Namespaces) != 2 || len(got.Pgs) < 3 || len(got.Nodes) != 2 || len(got.Shards) < 2 {
		t.Errorf("the map has too little: %v", got)
	}
	if !proto.Equal(got, want.Map) {
		t.Errorf("map\n%v\nwant\n%v", got, want.Map)
	}
	jobs := s.Jobs()
	if !slices.EqualFunc(jobs, want.Jobs, func(a, b *dirpb.Job) bool { return proto.Equal(a, b) }) || len(jobs) == 0 {
		t.Errorf("jobs\n%v\nwant\n%v", jobs, want.Jobs)
	}
	held, dead := uint32(0), uint32(0)
	for i, u := range s.Usage() {
		held, dead = held+u.StatusHeld, dead+u.StatusDead
		w := want.Usage[i]
		if u.PgId != w.PgId || u.GrantedUnits != w.GrantedUnits || u.ReturnedUnits != w.ReturnedUnits ||
			u.IndexBytesUsed != w.IndexBytesUsed ||
			u.StatusHeld != w.StatusHeld || u.StatusDead != w.StatusDead {
			t.Errorf("usage\n%v\nwant\n%v", u, w)
		}
	}
	if held == 0 || dead == 0 {
		t.Errorf("%d blocks of status words are held and %d of ended sessions, want some of both", held, dead)
	}
	var sessions []*dirpb.SessionInfo
	for _, x := range s.Sessions() {
		sessions = append(sessions, &dirpb.SessionInfo{Id: x.Id, Client: x.Client, Life: x.Life,
			Namespace: s.Namespace(x.NamespaceId).GetName(), Identity: x.Identity})
	}
	for _, x := range want.Sessions {
		x.AgeMillis, x.ReportEpoch = 0, 0
	}
	if !slices.EqualFunc(sessions, want.Sessions, func(a, b *dirpb.SessionInfo) bool {
		return proto.Equal(a, b)
	}) || len(sessions) < 2 {
		t.Errorf("sessions\n%v\nwant\n%v", sessions, want.Sessions)
	}
	if s.KeyGeneration() != want.KeyUse.Generation || s.Meta().KeyUnixMillis != want.KeyUse.MadeUnixMillis ||
		len(s.Keys()) != 2 {
		t.Errorf("key %d of %d, with %d keys, want %v", s.KeyGeneration(), s.Meta().KeyUnixMillis, len(s.Keys()),
			want.KeyUse)
	}
	var members []*dirpb.DirectoryNode
	for _, d := range s.Directory() {
		members = append(members, &dirpb.DirectoryNode{Id: d.Id, RaftAddr: d.RaftAddr, GrpcAddr: d.GrpcAddr})
	}
	for _, d := range want.Directory {
		d.Leader, d.Voter, d.SilentMillis = false, false, 0
	}
	if !slices.EqualFunc(members, want.Directory, func(a, b *dirpb.DirectoryNode) bool { return proto.Equal(a, b) }) {
		t.Errorf("members\n%v\nwant\n%v", members, want.Directory)
	}
}

// The log of an earlier version, carried out anew from its first entry or its snapshot, makes the very rows that the
// earlier version had stored: directory nodes of both versions can apply one log.
func TestEarlierLogs(t *testing.T) {
	snapshots := 0
	eachFolder(t, func(t *testing.T, version, cluster, node string) {
		store := openStore(t, unpack(t, version, cluster+"-"+node))
		applied, err := store.Applied()
		if err != nil || applied == 0 {
			t.Fatal(applied, err)
		}
		var want []fsm.Row
		if err := store.Rows(func(k, v []byte) error {
			want = append(want, fsm.Row{Key: slices.Clone(k), Value: slices.Clone(v)})
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		s, next := fsm.New(), uint64(1)
		if list, err := store.Snapshots().List(); err != nil {
			t.Fatal(err)
		} else if len(list) > 0 {
			snapshots++
			s, next = earlierSnapshot(t, store, list[len(list)-1].ID)
			if next > applied {
				t.Fatalf("the snapshot is of entry %d, and entry %d is applied: the log adds nothing", next-1, applied)
			}
		}
		for i := next; i <= applied; i++ {
			if l := entry(t, store, i); l.Type == raft.LogCommand {
				if res := applyEntry(s, l); errors.Is(res.Err, fsm.ErrLevel) {
					t.Fatal(res.Err)
				}
			}
		}
		got := s.Rows()
		if !slices.EqualFunc(got, want, func(a, b fsm.Row) bool {
			return string(a.Key) == string(b.Key) && string(a.Value) == string(b.Value)
		}) {
			t.Fatalf("rows\n%q\nwant\n%q", got, want)
		}
	})
	if snapshots != len(earlier) {
		t.Errorf("%d folders have a snapshot, want one of each version", snapshots)
	}
}

// earlierSnapshot is the state that a snapshot holds, and the entry that follows.
func earlierSnapshot(t *testing.T, store *raftstore.Store, id string) (*fsm.State, uint64) {
	t.Helper()
	_, r, err := store.Snapshots().Open(id)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	b, err := io.ReadAll(r)
	snap := new(fsmpb.Snapshot)
	if err = errors.Join(err, proto.Unmarshal(b, snap)); err != nil {
		t.Fatal(err)
	}
	var rows []fsm.Row
	for _, r := range snap.Rows {
		rows = append(rows, fsm.Row{Key: r.Key, Value: r.Value})
	}
	s, err := fsm.Load(rows)
	if err != nil {
		t.Fatal(err)
	}
	return s, snap.Applied + 1
}

// alone has the addresses of the directory of three in testdata/folders to this test, among all processes of the
// machine.
func alone(t *testing.T) {
	t.Helper()
	f, err := os.OpenFile(filepath.Join(os.TempDir(), "kvd-earlier-folders.lock"), os.O_CREATE|os.O_RDWR, 0o666)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil {
		t.Fatal(err)
	}
}

// A directory of three that was of an earlier version goes on in this one: at the earlier level while a node has not
// said that it knows the present one, and then at that, for good.
func TestEarlierThree(t *testing.T) {
	for version, level := range earlier {
		t.Run(version, func(t *testing.T) {
			alone(t)
			open := func(i int) *Node {
				return start(t, Options{
					ID: fmt.Sprintf("d%d", i), DataDir: unpack(t, version, fmt.Sprintf("three-d%d", i)), Lease: forever,
					Version:  "this",
					GRPCAddr: fmt.Sprintf("127.77.0.%d:7400", i), RaftAddr: fmt.Sprintf("127.77.0.%d:7401", i),
				})
			}
			one, two := open(1), open(2)
			n := leaderOf(t, one, two)
			err := n.tryRaise(testCtx(t), n.leading.Load())
			if err == nil || !strings.Contains(err.Error(), `directory node "d3"`) || n.level() != level {
				t.Fatalf("level %d, and raising it without d3: %v", n.level(), err)
			}
			three := open(3)
			testutil.Until(t, "the level of this version", func() bool {
				return one.level() == fsm.Level && two.level() == fsm.Level && three.level() == fsm.Level
			})
			reply, err := dial(t, leaderOf(t, one, two, three)).Status(testCtx(t), &dirpb.StatusRequest{})
			want := earlierStatus(t, version, "three")
			if err != nil || reply.ClusterId != want.ClusterId || len(reply.Map.Namespaces) != 2 ||
				len(reply.Directory) != 3 ||
				reply.Level != fsm.Level || reply.KnowsLevel != fsm.Level || reply.Version != "this" {
				t.Fatalf("status %v, %v", reply, err)
			}
		})
	}
}

// A memory node whose process the earlier version took for one without a boot is asked to register again, as the same,
// at the level of this version, and nothing of its memory is given up for it.
func TestEarlierMemoryNode(t *testing.T) {
	n := leaderOf(t, start(t, Options{ID: "d1", DataDir: unpack(t, "a961d7c", "one-d1"), Lease: forever}))
	testutil.Until(t, "the level of this version", func() bool { return n.level() == fsm.Level })
	d := dial(t, n)
	var was *dirpb.Node
	n.machine.view(func(s *fsm.State) { was = s.Nodes()[0] })
	beat := func(boot uint64) *dirpb.HeartbeatReply {
		t.Helper()
		r, err := d.Heartbeat(testCtx(t), &dirpb.HeartbeatRequest{NodeId: was.Id, Incarnation: was.Incarnation,
			Boot: boot})
		if err != nil || r.UnknownNode || len(r.Regions) != 3 {
			t.Fatalf("heartbeat of boot %d: %v, %v", boot, r, err)
		}
		return r
	}
	if beat(0).RegisterAgain {
		t.Error("a memory node of the earlier version is asked for a boot")
	}
	if !beat(7).RegisterAgain {
		t.Error("a memory node with a boot is not asked for it")
	}
	_, err := d.RegisterNode(testCtx(t), &dirpb.RegisterNodeRequest{Name: was.Name, Incarnation: was.Incarnation,
		Boot: 7, Keeps: true,
		HostId: was.HostId, Endpoints: was.Endpoints, CapacityBytes: was.CapacityBytes})
	if err != nil {
		t.Fatal(err)
	}
	if beat(7).RegisterAgain {
		t.Error("it is asked again")
	}
	n.machine.view(func(s *fsm.State) {
		if is := s.Node(was.Id); is.Boot != 7 || !is.Keeps || is.UsedBytes != was.UsedBytes {
			t.Errorf("memory node %v", is)
		}
	})
}

// A data folder that a later version has used, of its level or of its database, and one that is damaged are refused,
// with a line that says so and names the folder.
func TestForeignFolders(t *testing.T) {
	later := func(t *testing.T, dir string) {
		t.Helper()
		store := openStore(t, dir)
		l := &fsmpb.Level{Level: fsm.Level + 1, Version: "9.9"}
		s := fsm.New()
		res := fsm.Apply(
			s, &fsmpb.Command{
				Op: &fsmpb.Command_Init{
					Init: &fsmpb.Init{ClusterId: "c", ClusterKey: []byte("k"), Level: &fsmpb.Level{Level: fsm.Level}}}})
		if res.Err != nil {
			t.Fatal(res.Err)
		}
		value, err := proto.Marshal(l)
		if err != nil {
			t.Fatal(err)
		}
		var rows []raftstore.Row
		for _, r := range s.Rows() {
			if strings.HasPrefix(string(r.Key), "level") {
				r.Value = value
			}
			rows = append(rows, raftstore.Row(r))
		}
		if err := errors.Join(store.ReplaceRows(1<<40, rows), store.Close()); err != nil {
			t.Fatal(err)
		}
	}
	damage := func(glob string, fn func([]byte) []byte) func(t *testing.T, dir string) {
		return func(t *testing.T, dir string) {
			t.Helper()
			files, err := filepath.Glob(filepath.Join(dir, glob))
			if err != nil || len(files) == 0 {
				t.Fatal(files, err)
			}
			for _, f := range files {
				b, err := os.ReadFile(f)
				if err == nil {
					err = os.WriteFile(f, fn(b), 0o600)
				}
				if err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	flip := func(b []byte) []byte { b[len(b)/2] ^= 0xff; return b }
	for name, c := range map[string]struct {
		make func(t *testing.T, dir string)
		want []string
	}{
		"of a later level": {later, []string{"level 5, to which kvd 9.9 raised it", "this version knows levels up to 4",
			"run kvd 9.9 or a later one", "kvd this"}},
		"of a later database": {func(t *testing.T, dir string) {
			t.Helper()
			if err := os.WriteFile(filepath.Join(dir, "marker.format-version.000099.999"), nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}, []string{raftstore.ErrLater.Error(), "version 999"}},
		"manifest":        {damage("MANIFEST-*", flip), []string{raftstore.ErrDamaged.Error(), "MANIFEST"}},
		"write-ahead log": {damage("000002.log", flip), []string{raftstore.ErrDamaged.Error(), "WAL"}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := unpack(t, "a961d7c", "one-d1")
			c.make(t, dir)
			n, err := Open(testCtx(t), Options{ID: "d1", DataDir: dir, Version: "this"})
			if err == nil {
				t.Fatal(n.Close(), "it was opened")
			}
			t.Log(err)
			for _, text := range append(c.want, dir) {
				if !strings.Contains(err.Error(), text) {
					t.Errorf("error %q, want %q in it", err, text)
				}
			}
		})
	}
}
