package raftstore

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
	"github.com/google/go-cmp/cmp"
	"github.com/hashicorp/raft"
	raftbench "github.com/hashicorp/raft/bench"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func open(t testing.TB, fs vfs.FS) *Store {
	t.Helper()
	s, err := Open(Options{Dir: "data", FS: fs})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func entry(index, term uint64) *raft.Log {
	return &raft.Log{Index: index, Term: term, Type: raft.LogCommand, Data: fmt.Appendf(nil, "entry %d", index)}
}

func entries(from, to uint64) (out []*raft.Log) {
	for i := from; i <= to; i++ {
		out = append(out, entry(i, 1))
	}
	return out
}

func wantEnds(t *testing.T, s *Store, first, last uint64) {
	t.Helper()
	f, err1 := s.FirstIndex()
	l, err2 := s.LastIndex()
	if f != first || l != last || err1 != nil || err2 != nil {
		t.Fatalf("log is %d..%d (%v, %v), want %d..%d", f, l, err1, err2, first, last)
	}
}

func TestLog(t *testing.T) {
	s := open(t, vfs.NewMem())
	wantEnds(t, s, 0, 0)
	if err := s.GetLog(1, new(raft.Log)); err != raft.ErrLogNotFound {
		t.Fatalf("GetLog of nothing = %v, want raft.ErrLogNotFound itself", err)
	}
	full := &raft.Log{
		Index: 1, Term: 7, Type: raft.LogConfiguration, Data: []byte("data"), Extensions: []byte("ext"),
		AppendedAt: time.Unix(5, 6),
	}
	if err := s.StoreLogs([]*raft.Log{full, {Index: 2, Term: 7, Type: raft.LogNoop}}); err != nil {
		t.Fatal(err)
	}
	if err := s.StoreLogs(entries(3, 300)); err != nil {
		t.Fatal(err)
	}
	var got raft.Log
	if err := s.GetLog(1, &got); err != nil || !cmp.Equal(got, *full) {
		t.Fatalf("GetLog(1) = %+v, %v", got, err)
	}
	if err := s.GetLog(2, &got); err != nil || !cmp.Equal(got, raft.Log{Index: 2, Term: 7, Type: raft.LogNoop}) {
		t.Fatalf("GetLog(2) = %+v, %v", got, err)
	}
	wantEnds(t, s, 1, 300)
	if err := s.DeleteRange(1, 255); err != nil {
		t.Fatal(err)
	}
	wantEnds(t, s, 256, 300)
	if err := s.DeleteRange(290, 1<<64-1); err != nil {
		t.Fatal(err)
	}
	wantEnds(t, s, 256, 289)
	if err := s.DeleteRange(256, 289); err != nil {
		t.Fatal(err)
	}
	wantEnds(t, s, 0, 0)
}

// The key spaces must not be seen by each other's iterators, least of all by
// FirstIndex and LastIndex.
func TestSpacesAreApart(t *testing.T) {
	s := open(t, vfs.NewMem())
	if err := s.Set([]byte("zzz"), []byte("v")); err != nil {
		t.Fatal(err)
	}
	if err := s.WriteRows(9, []Row{{Key: []byte("\xff\xff"), Value: []byte("row")}, {Key: []byte{0}, Value: []byte("low")}}); err != nil {
		t.Fatal(err)
	}
	writeSnapshot(t, s, 5, "snap")
	wantEnds(t, s, 0, 0)
	if err := s.StoreLogs(entries(5, 6)); err != nil {
		t.Fatal(err)
	}
	wantEnds(t, s, 5, 6)
	if err := s.DeleteRange(0, 1<<64-1); err != nil {
		t.Fatal(err)
	}
	if v, err := s.Get([]byte("zzz")); string(v) != "v" || err != nil {
		t.Fatalf("stable value after DeleteRange = %q, %v", v, err)
	}
	if got := rowsOf(t, s); got != "\x00=low \xff\xff=row @9" {
		t.Fatalf("rows after DeleteRange: %q", got)
	}
	if got := readSnapshot(t, s, 0); got != "snap" {
		t.Fatalf("snapshot after DeleteRange = %q", got)
	}
}

// raft takes any error but "not found" for a broken store.
func TestStableMissingKey(t *testing.T) {
	s := open(t, vfs.NewMem())
	if v, err := s.Get([]byte("absent")); v == nil || len(v) != 0 || err != nil {
		t.Fatalf("Get of a missing key = %v, %v, want an empty value and nil", v, err)
	}
	if v, err := s.GetUint64([]byte("absent")); v != 0 || err != nil {
		t.Fatalf("GetUint64 of a missing key = %v, %v, want 0 and nil", v, err)
	}
	if has, err := raft.HasExistingState(s, s, s.Snapshots()); has || err != nil {
		t.Fatalf("HasExistingState of an empty store = %v, %v", has, err)
	}
	if err := s.SetUint64([]byte("n"), 1<<63); err != nil {
		t.Fatal(err)
	}
	if v, err := s.GetUint64([]byte("n")); v != 1<<63 || err != nil {
		t.Fatalf("GetUint64 = %v, %v", v, err)
	}
	if err := s.Set([]byte("n"), []byte("abc")); err != nil {
		t.Fatal(err)
	}
	if _, err := s.GetUint64([]byte("n")); !errors.As(err, new(*CorruptError)) {
		t.Fatalf("GetUint64 of three bytes = %v, want a CorruptError", err)
	}
}

func TestCorruptEntry(t *testing.T) {
	good := appendEntry(nil, &raft.Log{Term: 1, Extensions: []byte("ext"), Data: []byte("data")})
	var l raft.Log
	if err := parseEntry(1, good, &l); err != nil {
		t.Fatal(err)
	}
	wrongVersion := append([]byte{9}, good[1:]...)
	for name, b := range map[string][]byte{"empty": nil, "short": good[:entryHeader-1], "version": wrongVersion, "extensions": good[:entryHeader+1]} {
		if err := parseEntry(1, b, &l); !errors.As(err, new(*CorruptError)) {
			t.Errorf("%s: %v, want a CorruptError", name, err)
		}
	}
}

func rowsOf(t *testing.T, s *Store) string {
	t.Helper()
	var b strings.Builder
	if err := s.Rows(func(k, v []byte) error { fmt.Fprintf(&b, "%s=%s ", k, v); return nil }); err != nil {
		t.Fatal(err)
	}
	index, err := s.Applied()
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprintf(&b, "@%d", index)
	return b.String()
}

func TestRows(t *testing.T) {
	s := open(t, vfs.NewMem())
	row := func(k, v string) Row { return Row{[]byte(k), []byte(v)} }
	for _, err := range []error{
		s.WriteRows(1, []Row{row("a", "1"), row("b", "1")}),
		s.WriteRows(2, []Row{{Key: []byte("a")}, row("c", "2")}),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	if got := rowsOf(t, s); got != "b=1 c=2 @2" {
		t.Fatalf("rows: %s", got)
	}
	if err := s.ReplaceRows(7, []Row{row("d", "7")}); err != nil {
		t.Fatal(err)
	}
	if got := rowsOf(t, s); got != "d=7 @7" {
		t.Fatalf("rows after ReplaceRows: %s", got)
	}
}

func writeSnapshot(t *testing.T, s *Store, index uint64, data string) {
	t.Helper()
	k, err := s.Snapshots().Create(1, index, 1, raft.Configuration{Servers: []raft.Server{{ID: "a", Address: "x:1"}}}, 1, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(k, data); err != nil {
		t.Fatal(err)
	}
	if err := k.Close(); err != nil {
		t.Fatal(err)
	}
}

// readSnapshot reads the i-th newest.
func readSnapshot(t *testing.T, s *Store, i int) string {
	t.Helper()
	list, err := s.Snapshots().List()
	if err != nil || i >= len(list) {
		t.Fatalf("List = %d snapshots, %v", len(list), err)
	}
	m, r, err := s.Snapshots().Open(list[i].ID)
	if err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(r)
	if err = errors.Join(err, r.Close()); err != nil {
		t.Fatal(err)
	}
	if int64(len(b)) != m.Size || m.Configuration.Servers[0].ID != "a" || m.Version != 1 {
		t.Fatalf("snapshot of %d bytes has meta %+v", len(b), m)
	}
	return string(b)
}

func TestSnapshots(t *testing.T) {
	fs := vfs.NewMem()
	s := open(t, fs)
	if list, err := s.Snapshots().List(); len(list) != 0 || err != nil {
		t.Fatalf("List of none = %v, %v", list, err)
	}
	if _, _, err := s.Snapshots().Open("none"); err == nil {
		t.Fatal("a snapshot that does not exist opens")
	}
	big := strings.Repeat("0123456789abcdef", 3*snapshotChunk/16+1)
	writeSnapshot(t, s, 300, big) // indexes beyond one byte: order is by number
	writeSnapshot(t, s, 20, "old")
	if got := readSnapshot(t, s, 0); got != big {
		t.Fatalf("%d bytes back of %d", len(got), len(big))
	}
	// A reader keeps what it opened though two newer ones displace it.
	list, _ := s.Snapshots().List()
	_, r, err := s.Snapshots().Open(list[1].ID)
	if err != nil {
		t.Fatal(err)
	}
	writeSnapshot(t, s, 301, "new")
	if b, err := io.ReadAll(r); string(b) != "old" || r.Close() != nil || err != nil {
		t.Fatalf("open reader of a dropped snapshot: %q, %v", b, err)
	}
	if list, _ = s.Snapshots().List(); len(list) != 2 || list[0].Index != 301 || list[1].Index != 300 {
		t.Fatalf("List = %+v", list)
	}

	// One cancelled and one that a crash cut off leave nothing behind.
	for range 2 {
		k, err := s.Snapshots().Create(1, 400, 1, raft.Configuration{}, 1, nil)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(k, big); err != nil {
			t.Fatal(err)
		}
		if list[0].Term++; list[0].Term == 2 {
			if err := k.Cancel(); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = open(t, fs)
	n := 0
	err = s.scan([]byte{spaceData}, func(k, _ []byte) (bool, error) { n += bytes.Count(k, []byte("-400-")); return true, nil })
	if n != 0 || err != nil {
		t.Fatalf("%d chunks of unfinished snapshots are left, %v", n, err)
	}
	if got := readSnapshot(t, s, 0); got != "new" {
		t.Fatalf("newest after reopening = %q", got)
	}
}

func TestLocked(t *testing.T) {
	dir := t.TempDir()
	s, err := Open(Options{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Open(Options{Dir: dir}); !errors.Is(err, ErrLocked) || !strings.Contains(err.Error(), dir) {
		t.Fatalf("second Open = %v, want ErrLocked naming %s", err, dir)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatalf("second Close = %v", err)
	}
	if err := s.StoreLog(entry(1, 1)); !errors.Is(err, ErrClosed) {
		t.Fatalf("StoreLog after Close = %v", err)
	}
	s, err = Open(Options{Dir: dir})
	if err != nil {
		t.Fatalf("Open after Close: %v", err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}

// What was acknowledged survives a crash that loses any unsynced bytes; rows never
// run ahead of the log.
func TestCrash(t *testing.T) {
	for seed := range uint64(6) {
		rng := rand.New(rand.NewPCG(seed, 0))
		fs := vfs.NewCrashableMem()
		s := open(t, fs)
		var stored, snap uint64
		type image struct {
			fs           *vfs.MemFS
			stored, snap uint64
		}
		var images []image
		for range 60 {
			switch rng.IntN(8) {
			default:
				n := uint64(1 + rng.IntN(5))
				if err := s.StoreLogs(entries(stored+1, stored+n)); err != nil {
					t.Fatal(err)
				}
				stored += n
				if err := s.SetUint64([]byte("term"), stored); err != nil {
					t.Fatal(err)
				}
				if err := s.WriteRows(stored, []Row{{Key: []byte("k"), Value: fmt.Append(nil, stored)}}); err != nil {
					t.Fatal(err)
				}
			case 0:
				snap = stored
				writeSnapshot(t, s, snap, strings.Repeat("x", rng.IntN(2*snapshotChunk)))
			case 1:
				images = append(images, image{fs.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: rng.IntN(101), RNG: rng}), stored, snap})
			}
		}
		for _, im := range images {
			c := open(t, im.fs)
			if im.stored > 0 {
				wantEnds(t, c, 1, im.stored)
			}
			if v, err := c.GetUint64([]byte("term")); v != im.stored || err != nil {
				t.Fatalf("seed %d: term %d, %v, want %d", seed, v, err, im.stored)
			}
			applied, err := c.Applied()
			if err != nil || applied > im.stored || applied < im.snap {
				t.Fatalf("seed %d: rows reflect %d, %v; log ends at %d, snapshot at %d", seed, applied, err, im.stored, im.snap)
			}
			if got, want := rowsOf(t, c), fmt.Sprintf("k=%d @%d", applied, applied); applied > 0 && got != want {
				t.Fatalf("seed %d: rows %s, want %s", seed, got, want)
			}
			list, err := c.Snapshots().List()
			if err != nil || im.snap > 0 && (len(list) == 0 || list[0].Index != im.snap) {
				t.Fatalf("seed %d: snapshots %+v, %v, want the newest at %d", seed, list, err, im.snap)
			}
			for i := range list {
				readSnapshot(t, c, i)
			}
		}
	}
}

// A disk that hangs must give an error, or a leader would hold its followers by
// heartbeats for ever.
func TestStall(t *testing.T) {
	var stuck atomic.Bool
	release := make(chan struct{})
	fs := errorfs.Wrap(vfs.NewMem(), errorfs.InjectorFunc(func(op errorfs.Op) error {
		if stuck.Load() && (op.Kind == errorfs.OpFileSync || op.Kind == errorfs.OpFileSyncData || op.Kind == errorfs.OpFileSyncTo) {
			<-release
		}
		return nil
	}))
	s, err := Open(Options{Dir: "data", FS: fs, StallTimeout: 50 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.StoreLog(entry(1, 1)); err != nil {
		t.Fatal(err)
	}
	stuck.Store(true)
	if err := s.StoreLog(entry(2, 1)); !errors.Is(err, ErrStalled) {
		t.Fatalf("StoreLog on a hung disk = %v, want ErrStalled", err)
	}
	select {
	case <-s.Failed():
	default:
		t.Fatal("a stalled store has not failed")
	}
	if err := s.SetUint64([]byte("term"), 1); !errors.Is(err, ErrStalled) {
		t.Fatalf("Set after a stall = %v, want ErrStalled at once", err)
	}
	// raft panics if it cannot read.
	if err := s.GetLog(1, new(raft.Log)); err != nil {
		t.Fatalf("GetLog after a stall = %v", err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(Options{Dir: "data", FS: fs}); !errors.Is(err, ErrLocked) {
		t.Fatalf("Open while the write is out = %v, want ErrLocked", err)
	}
	stuck.Store(false)
	close(release) // the leak check sees that the database closes now
}

// Pebble calls Fatalf when a write fails; that must neither end the process nor
// pass for success.
func TestBroken(t *testing.T) {
	var broken atomic.Bool
	fs := errorfs.Wrap(vfs.NewMem(), errorfs.InjectorFunc(func(op errorfs.Op) error {
		if broken.Load() && op.Kind.ReadOrWrite() == errorfs.OpIsWrite {
			return errorfs.ErrInjected
		}
		return nil
	}))
	s, err := Open(Options{Dir: "data", FS: fs})
	if err != nil {
		t.Fatal(err)
	}
	broken.Store(true)
	if err := s.StoreLog(entry(1, 1)); !errors.Is(err, ErrBroken) {
		t.Fatalf("StoreLog on a broken disk = %v, want ErrBroken", err)
	}
	<-s.Failed()
	if err := s.StoreLog(entry(1, 1)); !errors.Is(err, ErrBroken) {
		t.Fatalf("StoreLog afterwards = %v", err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}

var benches = map[string]func(*testing.B, *Store){
	"FirstIndex":  func(b *testing.B, s *Store) { raftbench.FirstIndex(b, s) },
	"LastIndex":   func(b *testing.B, s *Store) { raftbench.LastIndex(b, s) },
	"GetLog":      func(b *testing.B, s *Store) { raftbench.GetLog(b, s) },
	"StoreLog":    func(b *testing.B, s *Store) { raftbench.StoreLog(b, s) },
	"StoreLogs":   func(b *testing.B, s *Store) { raftbench.StoreLogs(b, s) },
	"DeleteRange": func(b *testing.B, s *Store) { raftbench.DeleteRange(b, s) },
	"Set":         func(b *testing.B, s *Store) { raftbench.Set(b, s) },
	"Get":         func(b *testing.B, s *Store) { raftbench.Get(b, s) },
	"SetUint64":   func(b *testing.B, s *Store) { raftbench.SetUint64(b, s) },
	"GetUint64":   func(b *testing.B, s *Store) { raftbench.GetUint64(b, s) },
}

func BenchmarkRaft(b *testing.B) {
	for name, f := range benches {
		b.Run(name, func(b *testing.B) { f(b, open(b, vfs.NewMem())) })
	}
}

// raft's benchmarks fail on a store that errs, so a few rounds of each are a
// test. A B made by hand runs them without timing.
func TestRaftBench(t *testing.T) {
	for name, f := range benches {
		t.Run(name, func(t *testing.T) { f(&testing.B{N: 20}, open(t, vfs.NewMem())) })
	}
}
