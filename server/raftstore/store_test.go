package raftstore

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
	"github.com/google/go-cmp/cmp"
	"github.com/hashicorp/raft"
	raftbench "github.com/hashicorp/raft/bench"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	if os.Getenv("KVD_TEST_WRITER") != "" {
		os.Exit(writer())
	}
	if folder := os.Getenv("KVD_TEST_SMALL_DISK"); folder != "" {
		os.Exit(smallDisks(folder))
	}
	goleak.VerifyTestMain(m)
}

func open(t testing.TB, fs vfs.FS) *Store {
	t.Helper()
	s, err := Open(t.Context(), Options{Dir: "data", FS: fs})
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
	if err := s.WriteRows(9, []Row{{Key: []byte("\xff\xff"), Value: []byte("row")},
		{Key: []byte{0}, Value: []byte("low")}}); err != nil {
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
	for name, b := range map[string][]byte{"empty": nil, "short": good[:entryHeader-1], "version": wrongVersion,
		"extensions": good[:entryHeader+1]} {
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
	k, err := s.Snapshots().Create(1, index, 1, raft.Configuration{Servers: []raft.Server{{ID: "a", Address: "x:1"}}},
		1, nil)
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

	// A cancelled snapshot and a snapshot that a crash cut off leave nothing behind.
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
	err = s.scan([]byte{spaceData}, func(k, _ []byte) (bool, error) {
		n += bytes.Count(k, []byte("-400-"))
		return true, nil
	})
	if n != 0 || err != nil {
		t.Fatalf("%d chunks of unfinished snapshots are left, %v", n, err)
	}
	if got := readSnapshot(t, s, 0); got != "new" {
		t.Fatalf("newest after reopening = %q", got)
	}
}

func TestLocked(t *testing.T) {
	dir := t.TempDir()
	s, err := Open(t.Context(), Options{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Open(t.Context(), Options{Dir: dir}); !errors.Is(err, ErrLocked) ||
		!strings.Contains(err.Error(), dir) {
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
	s, err = Open(t.Context(), Options{Dir: dir})
	if err != nil {
		t.Fatalf("Open after Close: %v", err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}

// Acknowledged writes survive a crash that loses any unsynced bytes; rows never run ahead of the log.
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
				images = append(
					images, image{fs.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: rng.IntN(101), RNG: rng}),
						stored, snap})
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
				t.Fatalf("seed %d: rows reflect %d, %v; log ends at %d, snapshot at %d", seed, applied, err, im.stored,
					im.snap)
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
		if stuck.Load() && (op.Kind == errorfs.OpFileSync || op.Kind == errorfs.OpFileSyncData ||
			op.Kind == errorfs.OpFileSyncTo) {
			<-release
		}
		return nil
	}))
	s, err := Open(t.Context(), Options{Dir: "data", FS: fs, StallTimeout: 50 * time.Millisecond})
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
	if _, err := Open(t.Context(), Options{Dir: "data", FS: fs}); !errors.Is(err, ErrLocked) {
		t.Fatalf("Open while the write is out = %v, want ErrLocked", err)
	}
	stuck.Store(false)
	close(release) // the leak check sees that the database closes now
}

// lines counts what is logged above the level debug.
type lines struct{ n atomic.Int64 }

func (l *lines) logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(writerFunc(func(p []byte) (int, error) {
		l.n.Add(1)
		return len(p), nil
	}), nil))
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

// A disk without room ends Open with what is wrong, whether the folder is new, or holds a
// log that Pebble has to write to a table first, which it tries for ever. (Without room for a
// MANIFEST of an old folder a goroutine of Pebble ends and another waits for it; the process
// ends in internal/nemesis.)
func TestFullDisk(t *testing.T) {
	for _, tc := range []struct {
		name  string
		files string // whose writes fail
		used  bool
	}{
		{"new folder", "", false},
		{"tables", ".sst", true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var full atomic.Bool
			tried := make(chan struct{}, 100)
			disk := errorfs.Wrap(vfs.NewMem(), errorfs.InjectorFunc(func(op errorfs.Op) error {
				if !full.Load() || op.Kind != errorfs.OpFileWrite || !strings.Contains(op.Path, tc.files) {
					return nil
				}
				select {
				case tried <- struct{}{}:
				default:
				}
				return &fs.PathError{Op: "write", Path: op.Path, Err: syscall.ENOSPC}
			}))
			if tc.used {
				s, err := Open(t.Context(), Options{Dir: "data", FS: disk})
				if err != nil {
					t.Fatal(err)
				}
				if err := errors.Join(s.StoreLogs(entries(1, 9)), s.Close()); err != nil {
					t.Fatal(err)
				}
			}
			full.Store(true)
			var log lines
			s, err := Open(t.Context(), Options{Dir: "data", FS: disk, Logger: log.logger()})
			if err == nil {
				t.Fatal("Open on a full disk succeeded", s.Close())
			}
			if !errors.Is(err, syscall.ENOSPC) || !errors.Is(err, ErrBroken) ||
				!strings.Contains(err.Error(), "data folder data") {
				t.Errorf("Open on a full disk = %v", err)
			}
			if n := log.n.Load(); n > 1 {
				t.Errorf("Open on a full disk logged %d lines", n)
			}
			if n := len(tried); n > 2 {
				t.Errorf("Open on a full disk tried %d times", n)
			}
			full.Store(false)
			for { // what Pebble still does ends, and the folder is free
				s, err := Open(t.Context(), Options{Dir: "data", FS: disk})
				if errors.Is(err, ErrLocked) {
					time.Sleep(time.Millisecond)
					continue
				}
				if err != nil {
					t.Fatal(err)
				}
				if tc.used {
					wantEnds(t, s, 1, 9)
				}
				if err := s.Close(); err != nil {
					t.Fatal(err)
				}
				return
			}
		})
	}
}

// A disk that does not answer must not keep a process from being stopped while it starts.
func TestOpenIsInterrupted(t *testing.T) {
	release, hung := make(chan struct{}), make(chan struct{}, 1)
	disk := errorfs.Wrap(vfs.NewMem(), errorfs.InjectorFunc(func(op errorfs.Op) error {
		if op.Kind == errorfs.OpFileSync {
			select {
			case hung <- struct{}{}:
			default:
			}
			<-release
		}
		return nil
	}))
	ctx, cancel := context.WithCancel(t.Context())
	go func() { <-hung; cancel() }()
	if _, err := Open(ctx, Options{Dir: "data", FS: disk}); !errors.Is(err, context.Canceled) {
		t.Errorf("Open on a hung disk = %v, want context.Canceled", err)
	}
	close(release) // the leak check sees that the database closes now
}

// A folder that cannot be written to is not one that is in use.
func TestReadOnlyDisk(t *testing.T) {
	disk := errorfs.Wrap(vfs.NewMem(), errorfs.InjectorFunc(func(op errorfs.Op) error {
		if op.Kind.ReadOrWrite() == errorfs.OpIsWrite && op.Kind != errorfs.OpMkdirAll {
			return &fs.PathError{Op: "open", Path: op.Path, Err: syscall.EROFS}
		}
		return nil
	}))
	if _, err := Open(t.Context(), Options{Dir: "data", FS: disk}); !errors.Is(err, syscall.EROFS) ||
		errors.Is(err, ErrLocked) {
		t.Errorf("Open on a read-only disk = %v", err)
	}
}

// The log, the applied rows and snapshots hold the key that signs session tokens.
func TestFilesAreTheOwners(t *testing.T) {
	defer syscall.Umask(syscall.Umask(0)) // the worst that can be
	dir := filepath.Join(t.TempDir(), "data")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	modes := func() (open []string) {
		t.Helper()
		all, err := os.ReadDir(dir)
		if err != nil || len(all) == 0 {
			t.Fatal(all, err)
		}
		for _, e := range all {
			st, err := e.Info()
			if errors.Is(err, fs.ErrNotExist) { // Pebble removed it
				continue
			}
			if err != nil {
				t.Fatal(err)
			}
			if st.Mode().Perm() != fileMode {
				open = append(open, fmt.Sprint(e.Name(), " ", st.Mode()))
			}
		}
		return open
	}
	for range 2 { // the second start flushes and rotates what the first wrote
		s, err := Open(t.Context(), Options{Dir: dir})
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(s.StoreLogs(entries(1, 100)), s.db.Flush(), s.StoreLogs(entries(101, 200)),
			s.db.Compact(t.Context(), []byte{0}, []byte{255}, false)); err != nil {
			t.Fatal(err)
		}
		if open := modes(); len(open) > 0 {
			t.Errorf("files of a running store: %q", open)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if open := modes(); len(open) > 0 {
		t.Errorf("files: %q", open)
	}
	all, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range all {
		if err := os.Chmod(filepath.Join(dir, e.Name()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	var log lines
	s, err := Open(t.Context(), Options{Dir: dir, Logger: log.logger()})
	if err != nil {
		t.Fatal(err)
	}
	if open := modes(); len(open) > 0 {
		t.Errorf("files that were open to all stay so: %q", open)
	}
	if log.n.Load() != 1 {
		t.Errorf("%d log lines about files that were open to all, want 1", log.n.Load())
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}

// writer stores entries one by one on a disk that takes its time, so that a write is
// under way most of the time, and prints the number of each.
func writer() int {
	disk := errorfs.Wrap(vfs.NewMem(), errorfs.InjectorFunc(func(op errorfs.Op) error {
		if op.Kind == errorfs.OpFileSync || op.Kind == errorfs.OpFileSyncData || op.Kind == errorfs.OpFileSyncTo {
			time.Sleep(20 * time.Millisecond)
		}
		return nil
	}))
	s, err := Open(context.Background(), Options{Dir: "data", FS: disk, StallTimeout: frozenStall})
	for i := uint64(1); err == nil; i++ {
		if err = s.StoreLog(entry(i, 1)); err == nil {
			_, err = fmt.Println(i)
		}
	}
	fmt.Println(err)
	return 1
}

const frozenStall = 400 * time.Millisecond

// A process that stood still has not found its disk hanging.
func TestFrozenProcess(t *testing.T) {
	for range 3 {
		cmd := exec.CommandContext(t.Context(), os.Args[0])
		cmd.Env = append(os.Environ(), "KVD_TEST_WRITER=1")
		cmd.Stderr = os.Stderr
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		in := bufio.NewScanner(out)
		next := func(n int) {
			t.Helper()
			for range n {
				if !in.Scan() {
					t.Fatal("the writer ended:", in.Err())
				}
				if strings.Contains(in.Text(), "disk") {
					t.Fatal(in.Text())
				}
			}
		}
		next(5)
		if err := cmd.Process.Signal(syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * frozenStall)
		if err := cmd.Process.Signal(syscall.SIGCONT); err != nil {
			t.Fatal(err)
		}
		next(10)
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait() // killed
	}
}

// A snapshot that lacks data, at its start, in the middle or at its end, is not one.
func TestSnapshotWithMissingData(t *testing.T) {
	for chunk := range uint32(3) {
		s := open(t, vfs.NewMem())
		writeSnapshot(t, s, 7, strings.Repeat("x", 2*snapshotChunk+100))
		list, err := s.Snapshots().List()
		if err != nil {
			t.Fatal(err)
		}
		key := binary.BigEndian.AppendUint32(dataPrefix(list[0].ID), chunk)
		if err := s.update(pebble.Sync, func(b *pebble.Batch) error { return b.Delete(key, nil) }); err != nil {
			t.Fatal(err)
		}
		_, r, err := s.Snapshots().Open(list[0].ID)
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(r)
		if !errors.As(err, new(*CorruptError)) {
			t.Errorf("without chunk %d the snapshot reads as %d bytes, %v; want a CorruptError", chunk, len(b), err)
		}
		if err := r.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// raft cuts off what another leader's log contradicts, and answers that leader at once: it
// must not come back.
func TestTruncationSurvivesCrash(t *testing.T) {
	disk := vfs.NewCrashableMem()
	s := open(t, disk)
	if err := s.StoreLogs(entries(1, 20)); err != nil {
		t.Fatal(err)
	}
	for _, cut := range []struct{ lo, hi, first, last uint64 }{{15, 20, 1, 14}, {1, 4, 5, 14}, {5, 14, 0, 0}} {
		if err := s.DeleteRange(cut.lo, cut.hi); err != nil {
			t.Fatal(err)
		}
		wantEnds(t, open(t, disk.CrashClone(vfs.CrashCloneCfg{})), cut.first, cut.last)
	}
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
	s, err := Open(t.Context(), Options{Dir: "data", FS: fs})
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
