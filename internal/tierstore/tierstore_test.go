package tierstore

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"

	"github.com/kvd-project/kvd/internal/testutil"
)

var seedFlag = flag.Uint64("seed", 0, "run the model with this seed alone")

const segmentSize = 64 << 10

func options(fs vfs.FS) Options {
	return Options{FS: fs, Folder: "tier", Volume: 7, Namespace: 9, HashSeed: 11, SegmentSize: segmentSize,
		Limit: 1 << 30, SyncDelay: time.Millisecond}
}

func mustOpen(t testing.TB, opt Options) *Store {
	t.Helper()
	s, damaged, err := Open(opt)
	if err != nil || len(damaged) > 0 {
		t.Fatal(err, damaged)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// object is what a test knows of one.
type object struct {
	id   Ident
	body []byte
	at   Addr
}

// someObject makes the i-th object, of n bytes.
func someObject(i uint64, n int) object {
	body := make([]byte, n)
	rng := rand.New(rand.NewPCG(i, 5))
	for j := range body {
		body[j] = byte(rng.Uint32())
	}
	return object{id: Ident{Hash: i * 31, Version: i, Incarnation: 3}, body: body}
}

// readObject reads o. It fails the test for bytes that are not o's.
func readObject(t testing.TB, s *Store, o *object) error {
	t.Helper()
	got := make([]byte, len(o.body))
	err := s.Get(t.Context(), o.at, o.id, got)
	if err == nil && !bytes.Equal(got, o.body) {
		t.Fatalf("object %d at %#x has other bytes", o.id.Version, o.at)
	}
	return err
}

func mustAppend(t testing.TB, s *Store, o object) object {
	t.Helper()
	var err error
	if o.at, err = s.Append(o.id, 0, o.body); err != nil {
		t.Fatal(err)
	}
	return o
}

// TestReadBack reads objects from the buffer, from files, and after a start.
func TestReadBack(t *testing.T) {
	opt := options(vfs.NewMem())
	s := mustOpen(t, opt)
	var all []object
	for i, n := range []int{1, 63, 64, 65, 4 << 10, 60 << 10, 64 << 10, 1 << 20, 3 << 20, 100} {
		o := mustAppend(t, s, someObject(uint64(i), n))
		all = append(all, o)
		if err := readObject(t, s, &o); err != nil {
			t.Fatal(n, err)
		}
	}
	if err := s.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
	check := func() {
		t.Helper()
		for i := range all {
			if err := readObject(t, s, &all[i]); err != nil {
				t.Fatal(i, err)
			}
		}
	}
	check()
	used := s.Stats().Bytes
	if err := errors.Join(s.Close(), s.Close()); err != nil {
		t.Fatal(err)
	}
	if err := readObject(t, s, &all[0]); !errors.Is(err, ErrClosed) {
		t.Fatal(err)
	}
	if _, err := s.Append(all[0].id, 0, all[0].body); !errors.Is(err, ErrClosed) {
		t.Fatal(err)
	}
	s = mustOpen(t, opt)
	check()
	var size int64
	for _, g := range s.Segments() {
		info, err := opt.FS.Stat(opt.FS.PathJoin(opt.Folder, fileName(g.Number)))
		if err != nil || info.Size() != g.Size {
			t.Fatal(g, info, err)
		}
		size += g.Size
	}
	if got := s.Stats().Bytes; got != size || got > used {
		t.Fatalf("%d bytes are counted, %d used, %d before", got, size, used)
	}
	for _, wrong := range []object{
		{id: Ident{Hash: 1}, body: all[4].body, at: all[4].at},
		{id: all[4].id, body: all[4].body[1:], at: all[4].at},
		{id: all[4].id, body: all[4].body, at: all[5].at},
		{id: all[4].id, body: all[4].body, at: all[4].at | 1<<40},
		{id: all[4].id, body: all[4].body, at: 0},
		{id: all[9].id, body: all[4].body, at: all[9].at},
	} {
		if err := readObject(t, s, &wrong); !errors.Is(err, ErrGone) {
			t.Errorf("%#x: %v, want %v", wrong.at, err, ErrGone)
		}
	}
	if err := readObject(t, s, &object{id: all[4].id, body: all[4].body[64:], at: all[4].at + 1}); err == nil {
		t.Error("an object's middle is read as one")
	}
}

// truth is a Collector with a map of what is alive.
type truth struct {
	naming sync.RWMutex // held for reading from before an Append until alive has its object
	mu     sync.Mutex
	alive  map[Ident]Addr
	busy   map[Ident]bool // lookups fail
	lost   map[Ident]bool // what names the object changes before it may name the copy
}

// Closed waits for those that hold naming for reading.
func (c *truth) Closed(context.Context, uint64) error {
	c.naming.Lock()
	defer c.naming.Unlock()
	return nil
}

func (c *truth) Live(_ context.Context, e Entry) (bool, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.busy[e.Ident] {
		return false, errors.New("an intent is there")
	}
	return c.alive[e.Ident] == e.At, nil
}

func (c *truth) Moved(_ context.Context, e Entry, to Addr) (bool, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.lost[e.Ident] || c.alive[e.Ident] != e.At {
		return false, nil
	}
	c.alive[e.Ident] = to
	return true, nil
}

// TestCollect frees a segment only when nothing in it is alive, and never gives a number twice.
func TestCollect(t *testing.T) {
	opt := options(vfs.NewMem())
	s := mustOpen(t, opt)
	c := &truth{alive: map[Ident]Addr{}, busy: map[Ident]bool{}, lost: map[Ident]bool{}}
	var all []object
	for i := range uint64(8) {
		o := mustAppend(t, s, someObject(i+1, 5000))
		if all = append(all, o); i%2 == 0 {
			c.alive[o.id] = o.at
		} else {
			s.Drop(o.at, uint32(len(o.body)))
		}
	}
	first := all[0].at.segment()
	if g := s.Segments()[0]; g.Objects != 8 || g.Live != 4*objectSize(5000) {
		t.Fatalf("%+v", g)
	}
	for _, why := range []func(){func() { c.lost[all[2].id] = true }, func() { c.busy[all[0].id] = true }} {
		clear(c.lost)
		why()
		if err := s.Collect(t.Context(), first, c); !errors.Is(err, ErrKept) {
			t.Fatal(err)
		}
	}
	if err := errors.Join(readObject(t, s, &all[0]), readObject(t, s, &all[1])); err != nil {
		t.Fatal(err)
	}
	clear(c.busy)
	clear(c.lost)
	if err := s.Collect(t.Context(), first, c); err != nil {
		t.Fatal(err)
	}
	for i := range all {
		if err := readObject(t, s, &all[i]); !errors.Is(err, ErrGone) {
			t.Fatal(err)
		}
		o := all[i]
		if o.at = c.alive[o.id]; o.at != 0 && readObject(t, s, &o) != nil {
			t.Fatal(readObject(t, s, &o))
		}
	}
	if err := s.Collect(t.Context(), first, c); !errors.Is(err, ErrGone) {
		t.Fatal(err)
	}
	// The last segment goes only when a later one is there, also when that cannot be made at first.
	clear(c.alive)
	seen := map[uint64]bool{}
	for range 3 {
		for _, g := range s.Segments() {
			seen[g.Number] = true
			if err := s.Collect(t.Context(), g.Number, c); err != nil {
				t.Fatal(err)
			}
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		s = mustOpen(t, opt)
		if o := mustAppend(t, s, someObject(1, 100)); seen[o.at.segment()] {
			t.Fatalf("segment %d comes twice", o.at.segment())
		}
	}
}

// TestLimit fills a folder. Collections still find room.
func TestLimit(t *testing.T) {
	opt := options(vfs.NewMem())
	opt.Limit = 6 * segmentSize
	s := mustOpen(t, opt)
	c := &truth{alive: map[Ident]Addr{}}
	var all []object
	for i := uint64(1); ; i++ {
		o := someObject(i, 3000)
		at, err := s.Append(o.id, 0, o.body)
		if errors.Is(err, ErrFull) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		if all = append(all, object{o.id, o.body, at}); i%2 == 0 {
			c.alive[o.id] = at
		}
	}
	if used := s.Stats().Bytes; used > opt.Limit-segmentSize || used < opt.Limit-2*segmentSize {
		t.Fatalf("%d bytes are used", used)
	}
	for n := all[0].at.segment(); n < all[0].at.segment()+2; n++ {
		if err := s.Collect(t.Context(), n, c); err != nil {
			t.Fatal(err)
		}
	}
	if used := s.Stats().Bytes; used > opt.Limit-segmentSize {
		t.Fatalf("%d bytes are used", used)
	}
	mustAppend(t, s, someObject(9999, 3000))
}

// faults makes calls of a file system fail, or reads short.
type faults struct {
	vfs.FS
	short atomic.Bool
}

type shortFile struct {
	vfs.File
	of *faults
}

func (f *faults) Open(name string, opts ...vfs.OpenOption) (vfs.File, error) {
	in, err := f.FS.Open(name, opts...)
	if err != nil {
		return nil, err
	}
	return &shortFile{in, f}, nil
}

func (f *shortFile) ReadAt(b []byte, off int64) (int, error) {
	if f.of.short.Load() {
		n, _ := f.File.ReadAt(b[:len(b)/2], off)
		return n, io.EOF
	}
	return f.File.ReadAt(b, off)
}

// TestDiskErrors says of each call that fails what has become of it.
func TestDiskErrors(t *testing.T) {
	for _, c := range []struct {
		kind errorfs.OpKind
		err  error
	}{{errorfs.OpFileWriteAt, syscall.ENOSPC}, {errorfs.OpFileWriteAt, syscall.EIO},
		{errorfs.OpFileSyncData, syscall.EIO},
		{errorfs.OpFileReadAt, syscall.EIO}, {errorfs.OpRemove, syscall.EIO}, {errorfs.OpFileSync, syscall.EIO}} {
		t.Run(fmt.Sprint(c.kind, c.err), func(t *testing.T) {
			var on atomic.Bool
			opt := options(failing(&on, c.kind, c.err))
			s := mustOpen(t, opt)
			old := mustAppend(t, s, someObject(1, 60<<10))
			first := mustAppend(t, s, someObject(2, 5000)) // a second segment
			if err := s.Sync(t.Context()); err != nil {
				t.Fatal(err)
			}
			on.Store(true)
			o := mustAppend(t, s, someObject(3, 1000))
			syncErr := s.Sync(t.Context())
			if fails := c.kind == errorfs.OpFileWriteAt || c.kind == errorfs.OpFileSyncData; fails != (syncErr != nil) {
				t.Fatal(syncErr)
			}
			var d *DiskError
			if syncErr != nil && (!errors.Is(syncErr, c.err) || !errors.As(syncErr, &d) || d.Effect != unknownSync) {
				t.Fatal(syncErr)
			}
			readErr, removeErr := readObject(t, s, &first), s.Collect(t.Context(), old.at.segment(), &truth{})
			if c.kind == errorfs.OpFileReadAt {
				if !errors.As(readErr, &d) || d.Effect != nothingRead || !errors.As(removeErr, &d) {
					t.Fatal(readErr, removeErr)
				}
			} else if readErr != nil || (removeErr != nil) != (c.kind == errorfs.OpRemove) {
				t.Fatal(readErr, removeErr)
			}
			if syncErr != nil {
				if err := readObject(t, s, &o); err != nil {
					t.Fatal(err)
				}
			}
			on.Store(false)
			// A folder whose disk failed once takes no more, lest a later sync lie; a start helps.
			if _, err := s.Append(o.id, 0, o.body); (err != nil) != (syncErr != nil) {
				t.Fatal(err)
			}
			if err := s.Close(); (err != nil) != (syncErr != nil) {
				t.Fatal(err)
			}
			s = mustOpen(t, opt)
			if err := readObject(t, s, &first); err != nil {
				t.Fatal(err)
			}
			mustAppend(t, s, o)
		})
	}
	t.Run("short", func(t *testing.T) {
		fs := &faults{FS: vfs.NewMem()}
		s := mustOpen(t, options(fs))
		o := mustAppend(t, s, someObject(1, 5000))
		testutil.Until(t, "it is in the file", func() bool { return s.Stats().Syncs > 0 })
		fs.short.Store(true)
		if err := readObject(t, s, &o); !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Fatal(err)
		}
		fs.short.Store(false)
		if err := readObject(t, s, &o); err != nil {
			t.Fatal(err)
		}
	})
}

// failing is memory whose calls of a kind fail while on.
func failing(on *atomic.Bool, kind errorfs.OpKind, err error) vfs.FS {
	return errorfs.Wrap(vfs.NewMem(), errorfs.InjectorFunc(func(op errorfs.Op) error {
		if on.Load() && op.Kind == kind {
			return err
		}
		return nil
	}))
}

// TestCannotMakeSegment lets the file of a segment fail. Nothing is appended then, and the number before it stays.
func TestCannotMakeSegment(t *testing.T) {
	var on atomic.Bool
	opt := options(failing(&on, errorfs.OpOpenDir, syscall.ENOSPC))
	s := mustOpen(t, opt)
	o := mustAppend(t, s, someObject(1, 60<<10))
	for _, fails := range []bool{true, true, false} {
		on.Store(fails)
		if err := s.Collect(t.Context(), o.at.segment(), &truth{}); (err != nil) != fails {
			t.Fatal(err)
		}
		if _, err := s.Append(o.id, 0, o.body); (err != nil) != fails || err != nil && !errors.Is(err, syscall.ENOSPC) {
			t.Fatal(err)
		}
	}
}

// TestOthersFolder refuses the folder of another volume, of a later version, and one that is in use.
func TestOthersFolder(t *testing.T) {
	opt := options(vfs.NewMem())
	s := mustOpen(t, opt)
	o := mustAppend(t, s, someObject(1, 100))
	if _, _, err := Open(opt); err == nil {
		t.Error("a folder in use is opened")
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	other := opt
	other.Volume++
	var c *CorruptError
	if _, _, err := Open(other); !errors.As(err, &c) || c.File != fileName(1) {
		t.Error(err)
	}
	h := header{volume: opt.Volume, namespace: opt.Namespace, seed: opt.HashSeed, number: 2, span: 1}
	b := h.encode()
	binary.LittleEndian.PutUint32(b[8:], format+1)
	binary.LittleEndian.PutUint32(b[60:], sum(0, b[:60]))
	writeFile(t, opt, 2, b)
	if _, _, err := Open(opt); !errors.Is(err, errFormat) {
		t.Error(err)
	}
	opt.FS.Remove(opt.FS.PathJoin(opt.Folder, fileName(2)))
	if err := readObject(t, mustOpen(t, opt), &o); err != nil {
		t.Error(err)
	}
	if _, _, err := Open(Options{Limit: 1, SegmentSize: 7}); err == nil {
		t.Error("wrong options are taken")
	}
}

func readFile(t testing.TB, opt Options, number uint64) []byte {
	t.Helper()
	f, err := opt.FS.Open(opt.FS.PathJoin(opt.Folder, fileName(number)))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b, err := io.ReadAll(f)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func writeFile(t testing.TB, opt Options, number uint64, b []byte) {
	t.Helper()
	f, err := opt.FS.Create(opt.FS.PathJoin(opt.Folder, fileName(number)), vfs.WriteCategoryUnspecified)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Write(slices.Clone(b)); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(f.Sync(), f.Close()); err != nil {
		t.Fatal(err)
	}
}

// oneSegment makes a segment's file with a few objects, sealed or as a process that was killed leaves it.
func oneSegment(t testing.TB, sealed bool) (all []object, file []byte) {
	t.Helper()
	opt := options(vfs.NewMem())
	s := mustOpen(t, opt)
	for i, n := range []int{100, 700, 64, 300} {
		all = append(all, mustAppend(t, s, someObject(uint64(i+1), n)))
	}
	if err := s.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
	if sealed {
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	return all, readFile(t, opt, 1)
}

// TestTornTails cuts a file at every byte. Every object before the cut is there, and appends go on elsewhere.
func TestTornTails(t *testing.T) {
	for _, sealed := range []bool{false, true} {
		all, file := oneSegment(t, sealed)
		for n := range file {
			opt := options(vfs.NewMem())
			if err := opt.FS.MkdirAll(opt.Folder, 0o700); err != nil {
				t.Fatal(err)
			}
			writeFile(t, opt, 1, file[:n])
			for range 2 { // the second finds the table that the first has written
				s, damaged, err := Open(opt)
				if err != nil || len(damaged) > 0 && n >= headerSize {
					t.Fatal(n, err, damaged)
				}
				for i := range all {
					end := all[i].at.off() + headSize + int64(len(all[i].body))
					err := readObject(t, s, &all[i])
					if (err == nil) != (end <= int64(n)) || err != nil && !errors.Is(err, ErrGone) {
						t.Fatalf("cut at %d: object %d: %v", n, i, err)
					}
				}
				if s.mu.active != nil || s.mu.next == 1 {
					t.Fatal("appends go to a segment that a crash has cut")
				}
				if err := s.Close(); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
}

// TestFlippedBits flips a bit in every 8 bytes of a file. Only the object there may be missing, and none is wrong;
// damage is told by its file and offset.
func TestFlippedBits(t *testing.T) {
	for _, sealed := range []bool{false, true} {
		all, file := oneSegment(t, sealed)
		for at := 0; at < len(file); at += 8 {
			bad := slices.Clone(file)
			bad[at+at/8%8] ^= 1 << (at / 64 % 8)
			opt := options(vfs.NewMem())
			if err := opt.FS.MkdirAll(opt.Folder, 0o700); err != nil {
				t.Fatal(err)
			}
			writeFile(t, opt, 1, bad)
			s, damaged, err := Open(opt)
			if err != nil {
				t.Fatal(at, err)
			}
			last := len(all) - 1
			for i := range all {
				off := all[i].at.off()
				hit := int64(at) >= off && int64(at+at/8%8) < off+headSize+int64(len(all[i].body))
				err := readObject(t, s, &all[i])
				var c *CorruptError
				switch {
				case !hit && err != nil:
					t.Fatalf("bit at %d: object %d: %v", at, i, err)
				case hit && sealed && (!errors.As(err, &c) || c.Off != off || c.File != fileName(1)):
					t.Fatalf("bit at %d: object %d: %v", at, i, err)
				case hit && !sealed && i != last && (err == nil || len(damaged) != 1 || damaged[0].Off != off):
					t.Fatalf("bit at %d: object %d: %v, %v", at, i, err, damaged)
				case hit && err == nil:
					t.Fatalf("bit at %d: object %d is taken for whole", at, i)
				}
			}
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// TestCrashes takes a crash at every call to the file system, with none, some and all of what was not synced.
func TestCrashes(t *testing.T) {
	for _, percent := range []int{0, 50, 100} {
		type point struct {
			fs     *vfs.MemFS
			synced []object
			named  []object
		}
		mem := vfs.NewCrashableMem()
		var points []point
		var synced, named []object
		var mu sync.Mutex
		rng := rand.New(rand.NewPCG(1, uint64(percent)))
		snap := func() {
			mu.Lock()
			defer mu.Unlock()
			points = append(points, point{mem.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: percent, RNG: rng}),
				slices.Clone(synced), slices.Clone(named)})
		}
		opt := options(errorfs.Wrap(mem, errorfs.InjectorFunc(func(op errorfs.Op) error {
			if op.Kind != errorfs.OpFileReadAt && op.Kind != errorfs.OpFileRead {
				snap()
			}
			return nil
		})))
		opt.SegmentSize, opt.SyncDelay = 16<<10, time.Hour // syncs come from this test alone
		s := mustOpen(t, opt)
		c := &truth{alive: map[Ident]Addr{}}
		for i := uint64(1); i <= 24; i++ {
			o := mustAppend(t, s, someObject(i, int(i)*211%4000+1))
			mu.Lock()
			named = append(named, o)
			mu.Unlock()
			if c.alive[o.id] = o.at; i%3 == 0 {
				s.syncNow()
				mu.Lock()
				synced = slices.Clone(named)
				mu.Unlock()
			}
			if i%8 == 0 { // what moves is named by its copy from the CAS on, and its segment may go
				mover := &crashTruth{truth: c, moved: func(id Ident, to Addr) {
					mu.Lock()
					defer mu.Unlock()
					for _, list := range []*[]object{&synced, &named} {
						for j := range *list {
							if (*list)[j].id == id {
								(*list)[j].at = to
							}
						}
					}
				}}
				done := make(chan error)
				go func() { done <- s.Collect(t.Context(), o.at.segment()-1, mover) }()
				for err := error(ErrKept); err == ErrKept; {
					select {
					case err = <-done:
						if err != nil && !errors.Is(err, ErrGone) {
							t.Fatal(err)
						}
						err = nil
					default:
						s.syncNow()
					}
				}
			}
		}
		snap()
		for i, p := range points {
			after := opt
			after.FS = p.fs
			r, _, err := Open(after)
			if err != nil {
				t.Fatalf("%d %%, crash %d: %v", percent, i, err)
			}
			for j := range p.synced {
				if err := readObject(t, r, &p.synced[j]); err != nil {
					t.Fatalf("%d %%, crash %d of %d: synced object %d at %#x: %v", percent, i, len(points),
						p.synced[j].id.Version, p.synced[j].at, err)
				}
			}
			for j := range p.named {
				readObject(t, r, &p.named[j])
			}
			o := mustAppend(t, r, someObject(999, 500))
			for j := range p.named {
				if p.named[j].at.segment() == o.at.segment() {
					t.Fatalf("%d %%, crash %d: segment %d comes twice", percent, i, o.at.segment())
				}
			}
			if err := r.Close(); err != nil {
				t.Fatal(err)
			}
		}
		if len(points) < 50 {
			t.Fatalf("%d crashes", len(points))
		}
	}
}

// crashTruth tells of each move.
type crashTruth struct {
	*truth
	moved func(Ident, Addr)
}

func (c *crashTruth) Moved(ctx context.Context, e Entry, to Addr) (bool, error) {
	used, err := c.truth.Moved(ctx, e, to)
	if used {
		c.moved(e.Ident, to)
	}
	return used, err
}

// TestModel runs appends, reads, drops, syncs, collections, power cuts and starts against a map.
func TestModel(t *testing.T) {
	seeds := []uint64{1, 2, 3, 4}
	if *seedFlag != 0 {
		seeds = []uint64{*seedFlag}
	}
	for _, seed := range seeds {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			defer func() {
				if t.Failed() {
					t.Logf("replay: go test ./internal/tierstore -run 'TestModel$' -seed %d", seed)
				}
			}()
			newModel(t, seed).run(1500)
		})
	}
}

type model struct {
	t      *testing.T
	rng    *rand.Rand
	mem    *vfs.MemFS
	s      *Store
	c      *truth
	all    []object // what was ever at an address
	synced map[Ident]bool
	next   uint64
}

func newModel(t *testing.T, seed uint64) *model {
	m := &model{t: t, rng: rand.New(rand.NewPCG(seed, 1)), mem: vfs.NewCrashableMem(), synced: map[Ident]bool{},
		c: &truth{alive: map[Ident]Addr{}}}
	m.open()
	return m
}

func (m *model) open() {
	opt := options(m.mem)
	opt.Limit = 24 * segmentSize
	var err error
	if m.s, _, err = Open(opt); err != nil {
		m.t.Fatal(err)
	}
	m.t.Cleanup(func() { m.s.Close() })
}

func (m *model) sync() {
	if err := m.s.Sync(m.t.Context()); err != nil {
		m.t.Fatal(err)
	}
	for id := range m.c.alive {
		m.synced[id] = true
	}
}

// cut is a power cut. Objects that were not synced may be gone; what names them is told so.
func (m *model) cut() {
	m.mem = m.mem.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: m.rng.IntN(101), RNG: m.rng})
	m.s.Close()
	m.open()
	for i := range m.all {
		o := &m.all[i]
		if m.c.alive[o.id] == o.at && readObject(m.t, m.s, o) != nil {
			if m.synced[o.id] {
				m.t.Fatalf("object %d was synced and is lost", o.id.Version)
			}
			delete(m.c.alive, o.id)
		}
	}
}

func (m *model) collect() {
	segs := m.s.Segments()
	if len(segs) == 0 {
		return
	}
	slices.SortFunc(segs, func(a, b Segment) int { return int(a.Number) - int(b.Number) })
	g := segs[m.rng.IntN(len(segs))]
	before := map[Ident]Addr{}
	for id, at := range m.c.alive {
		before[id] = at
	}
	err := m.s.Collect(m.t.Context(), g.Number, m.c)
	if err != nil && !errors.Is(err, ErrKept) && !errors.Is(err, ErrFull) {
		m.t.Fatal(err)
	}
	for i := range m.all {
		if o := m.all[i]; m.c.alive[o.id] != before[o.id] && before[o.id] == o.at {
			o.at = m.c.alive[o.id]
			m.all = append(m.all, o)
			m.synced[o.id] = true
		}
	}
}

func (m *model) run(steps int) {
	for range steps {
		switch n := m.rng.IntN(100); {
		case n < 45:
			m.next++
			o := someObject(m.next, 1+m.rng.IntN(6000))
			at, err := m.s.Append(o.id, 0, o.body)
			if errors.Is(err, ErrFull) {
				m.dropSome()
				continue
			} else if err != nil {
				m.t.Fatal(err)
			}
			o.at = at
			m.all = append(m.all, o)
			m.c.alive[o.id] = at
		case n < 80 && len(m.all) > 0:
			o := m.all[m.rng.IntN(len(m.all))]
			if err := readObject(m.t, m.s, &o); err != nil && m.c.alive[o.id] == o.at {
				m.t.Fatal(err)
			}
		case n < 85:
			m.dropSome()
		case n < 92:
			m.collect()
		case n < 97:
			m.sync()
		case n < 98:
			m.cut()
		case n < 99:
			m.sync()
			if err := m.s.Close(); err != nil {
				m.t.Fatal(err)
			}
			m.open()
		}
	}
	m.sync()
	m.cut()
}

// dropSome lets a tenth of what is alive be garbage.
func (m *model) dropSome() {
	for i := range m.all {
		if o := &m.all[i]; m.c.alive[o.id] == o.at && m.rng.IntN(10) == 0 {
			delete(m.c.alive, o.id)
			m.s.Drop(o.at, uint32(len(o.body)))
		}
	}
}

// TestSealFailed has a sync come behind a segment whose seal failed: its file is closed, and its last objects are in
// memory.
func TestSealFailed(t *testing.T) {
	s := mustOpen(t, options(vfs.NewMem()))
	o := someObject(1, 100)
	var err error
	if o.at, err = s.Append(o.id, 0, o.body); err != nil {
		t.Fatal(err)
	}
	bad := errors.New("the disk failed")
	s.appendMu.Lock()
	_ = s.failWrite("sync", s.mu.active.number, unknownSync, bad)
	if err := s.sealActive(); !errors.Is(err, bad) {
		t.Errorf("seal: %v", err)
	}
	s.appendMu.Unlock()
	s.syncNow()
	if err := s.Sync(t.Context()); !errors.Is(err, bad) {
		t.Errorf("sync: %v", err)
	}
	if err := readObject(t, s, &o); err != nil {
		t.Error(err)
	}
}

// TestCollectInReserve fills the limit, and collects: what the limit leaves for that is not spent on a segment that
// could not be emptied.
func TestCollectInReserve(t *testing.T) {
	opt := options(vfs.NewMem())
	opt.SegmentSize, opt.Limit = 64<<10, 4*64<<10
	s := mustOpen(t, opt)
	c := &truth{alive: map[Ident]Addr{}, busy: map[Ident]bool{}}
	var all []object
	for i := uint64(1); ; i++ {
		o := someObject(i, 3000)
		at, err := s.Append(o.id, 0, o.body)
		if errors.Is(err, ErrFull) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		o.at = at
		c.alive[o.id], all = at, append(all, o)
	}
	first := all[0].at.segment()
	c.busy[all[0].id] = true // an intent keeps it
	moved := func() uint64 { return s.Stats().Moved }
	if err := s.Collect(t.Context(), first, c); !errors.Is(err, ErrKept) || moved() == 0 {
		t.Fatalf("%v, %d bytes moved", err, moved())
	}
	was := moved()
	if err := s.Collect(t.Context(), first+1, c); !errors.Is(err, ErrFull) || !errors.Is(err, ErrKept) ||
		moved() != was {
		t.Fatalf("%v, %d bytes moved more", err, moved()-was)
	}
	c.busy = nil
	if err := s.Collect(t.Context(), first, c); err != nil {
		t.Fatal(err)
	}
	for i := range all {
		all[i].at = c.alive[all[i].id]
		if err := readObject(t, s, &all[i]); err != nil {
			t.Fatal(err)
		}
	}
}

// TestTogether appends, reads, syncs and collects at once.
func TestTogether(t *testing.T) {
	s := mustOpen(t, options(vfs.NewMem()))
	c := &truth{alive: map[Ident]Addr{}}
	var wg sync.WaitGroup
	for w := range uint64(4) {
		wg.Go(func() {
			for i := range uint64(200) {
				o := someObject(w<<32|i+1, int(i)*97%5000+1)
				c.naming.RLock()
				at, err := s.Append(o.id, 0, o.body)
				if err == nil {
					c.mu.Lock()
					c.alive[o.id] = at
					c.mu.Unlock()
				}
				c.naming.RUnlock()
				if err != nil {
					t.Error(err)
					return
				}
				for o.at = at; readObject(t, s, &o) != nil; { // it has moved
					c.mu.Lock()
					now := c.alive[o.id]
					c.mu.Unlock()
					if now == o.at {
						t.Error(readObject(t, s, &o))
						return
					}
					o.at = now
				}
				if i%50 == 0 {
					if err := s.Sync(t.Context()); err != nil {
						t.Error(err)
					}
				}
			}
		})
	}
	wg.Go(func() {
		for n := uint64(1); n < 20; n++ {
			if err := s.Collect(t.Context(), n, c); err != nil && !errors.Is(err, ErrGone) {
				if !errors.Is(err, ErrKept) {
					t.Error(err)
				}
			}
		}
	})
	wg.Wait()
}

// TestOpenFiles bounds the files that are open for reads.
func TestOpenFiles(t *testing.T) {
	opt := options(vfs.NewMem())
	opt.SegmentSize = 4 << 10
	s := mustOpen(t, opt)
	var all []object
	for i := range uint64(maxOpen + 50) {
		all = append(all, mustAppend(t, s, someObject(i+1, 3000)))
	}
	for range 2 {
		for i := range all {
			if err := readObject(t, s, &all[i]); err != nil {
				t.Fatal(err)
			}
			if n := len(s.files.open); n > maxOpen {
				t.Fatalf("%d files are open", n)
			}
		}
	}
}

// FuzzSegment opens a folder whose file is hostile.
func FuzzSegment(f *testing.F) {
	for _, sealed := range []bool{false, true} {
		_, file := oneSegment(f, sealed)
		f.Add(file)
	}
	f.Fuzz(func(t *testing.T, file []byte) {
		opt := options(vfs.NewMem())
		if err := opt.FS.MkdirAll(opt.Folder, 0o700); err != nil {
			t.Fatal(err)
		}
		writeFile(t, opt, 1, file)
		s, _, err := Open(opt)
		if err != nil {
			return
		}
		defer s.Close()
		err = s.Collect(t.Context(), 1, &truth{})
		if err != nil && !errors.Is(err, ErrGone) && !errors.Is(err, ErrKept) {
			t.Fatal(err)
		}
		o := mustAppend(t, s, someObject(1, 300))
		if err := readObject(t, s, &o); err != nil || o.at.segment() == 1 {
			t.Fatal(o.at, err)
		}
	})
}

// FuzzObject reads at any address an object that a hostile file may hold.
func FuzzObject(f *testing.F) {
	all, file := oneSegment(f, true)
	for i := range all {
		f.Add(file[headerSize:], uint64(all[i].at), all[i].id.Hash, all[i].id.Version, len(all[i].body))
	}
	f.Fuzz(func(t *testing.T, tail []byte, at, hash, version uint64, n int) {
		opt := options(vfs.NewMem())
		if err := opt.FS.MkdirAll(opt.Folder, 0o700); err != nil {
			t.Fatal(err)
		}
		writeFile(t, opt, 1, append(slices.Clone(file[:headerSize]), tail...))
		s, _, err := Open(opt)
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		body := make([]byte, max(0, min(n, 1<<20)))
		if s.Get(t.Context(), Addr(at), Ident{hash, version, 3}, body) != nil {
			return
		}
		for i := range all {
			if all[i].id.Hash == hash && bytes.Equal(all[i].body, body) {
				return
			}
		}
		t.Fatalf("%d bytes are taken for an object", len(body))
	})
}

// cpu is the time of processors that this process has taken.
func cpu(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkStore gives the time of processors for a put and for a get from the kernel's cache, and the bytes that are
// written for each byte of a body, on the disk of the folder for temporary files.
func BenchmarkStore(b *testing.B) {
	for _, size := range []int{4 << 10, 16 << 10, 256 << 10, 4 << 20} {
		b.Run(fmt.Sprintf("%dKiB", size>>10), func(b *testing.B) {
			s, _, err := Open(Options{Folder: b.TempDir(), Limit: 16 << 30})
			if err != nil {
				b.Fatal(err)
			}
			defer s.Close()
			o := someObject(1, size)
			n := max(16, min(b.N, 256<<20/size))
			at := make([]Addr, n)
			start := cpu(b)
			for i := range at {
				if at[i], err = s.Append(o.id, 0, o.body); err != nil {
					b.Fatal(err)
				}
			}
			if err := s.Sync(b.Context()); err != nil {
				b.Fatal(err)
			}
			put := cpu(b) - start
			body := make([]byte, size)
			for i := range at { // into the kernel's cache
				if err := s.Get(b.Context(), at[i], o.id, body); err != nil {
					b.Fatal(err)
				}
			}
			start = cpu(b)
			for i := range at {
				if err := s.Get(b.Context(), at[i], o.id, body); err != nil {
					b.Fatal(err)
				}
			}
			get := cpu(b) - start
			b.ReportMetric(float64(put.Nanoseconds())/1e3/float64(n), "cpu-us/put")
			b.ReportMetric(float64(get.Nanoseconds())/1e3/float64(n), "cpu-us/get")
			b.ReportMetric(float64(s.Stats().Bytes)/float64(n*size), "written/byte")
		})
	}
}

// BenchmarkCollect fills a folder, lets half of it die at random, and collects it all: the bytes that are written for
// each byte of what lives, and the time of processors for each object that moves.
func BenchmarkCollect(b *testing.B) {
	s, _, err := Open(Options{Folder: b.TempDir(), Limit: 16 << 30})
	if err != nil {
		b.Fatal(err)
	}
	defer s.Close()
	rng := rand.New(rand.NewPCG(1, 1))
	c := &truth{alive: map[Ident]Addr{}}
	o := someObject(1, 16<<10)
	n := max(256, min(b.N, 64<<10))
	for i := range n {
		o.id.Version = uint64(i + 1)
		at, err := s.Append(o.id, 0, o.body)
		if err != nil {
			b.Fatal(err)
		}
		if rng.IntN(2) == 0 {
			c.alive[o.id] = at
		} else {
			s.Drop(at, uint32(len(o.body)))
		}
	}
	start := cpu(b)
	for _, g := range s.Segments() {
		if err := s.Collect(b.Context(), g.Number, c); err != nil {
			b.Fatal(err)
		}
	}
	st := s.Stats()
	b.ReportMetric(float64((cpu(b)-start).Nanoseconds())/1e3/float64(len(c.alive)), "cpu-us/moved")
	b.ReportMetric(float64(st.Written)/float64(len(c.alive)*len(o.body)), "written/live")
	b.ReportMetric(float64(st.Bytes)/float64(len(c.alive)*len(o.body)), "disk/live")
}

func TestMain(m *testing.M) {
	flag.Parse()
	os.Exit(m.Run())
}

// TestRegion: the bytes of all files, one after the other, give each object at its address, and zeroes where nothing
// is: before and behind it, in segments that are freed, and beyond all of them.
func TestRegion(t *testing.T) {
	s := mustOpen(t, options(vfs.NewMem()))
	var all []object
	for i, n := range []int{1, 64, 4 << 10, 60 << 10, 1 << 20, 70 << 20, 100} {
		all = append(all, mustAppend(t, s, someObject(uint64(i), n)))
	}
	check := func(what string) {
		t.Helper()
		for _, o := range all {
			got := make([]byte, len(o.body))
			if err := s.Read(t.Context(), o.at.Region(), got); err != nil || !bytes.Equal(got, o.body) {
				t.Fatalf("%s: an object of %d bytes: %v, the same %v", what, len(o.body), err, bytes.Equal(got, o.body))
			}
		}
	}
	check("buffered")
	if err := s.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
	check("on disk")
	ones := func() []byte { return bytes.Repeat([]byte{1}, 3*MaxSegment) }
	got := ones()
	if err := s.Read(t.Context(), s.mu.next*MaxSegment, got); err != nil || !bytes.Equal(got, make([]byte, len(got))) {
		t.Fatalf("beyond the last segment: %v", err)
	}
	// A read may begin before an object and end behind its segment.
	last := all[len(all)-1]
	got = ones()[:MaxSegment]
	if err := s.Read(t.Context(), last.at.Region()-64, got); err != nil || !bytes.Equal(got[64:164], last.body) ||
		!bytes.Equal(got[128+64:], make([]byte, len(got)-128-64)) {
		t.Fatalf("around the last object: %v", err)
	}
	first := all[0].at
	if err := s.remove(s.mu.segs[first.segment()]); err != nil {
		t.Fatal(err)
	}
	delete(s.mu.segs, first.segment())
	got = ones()[:64]
	if err := s.Read(t.Context(), first.Region(), got); err != nil || !bytes.Equal(got, make([]byte, 64)) {
		t.Fatalf("freed: %v", err)
	}
	// A file that somebody took away is no freed segment, and its bytes are not zeroes.
	lost := all[5].at.segment()
	s.files.drop(lost)
	if err := s.opt.FS.Remove(s.opt.FS.PathJoin(s.opt.Folder, fileName(lost))); err != nil {
		t.Fatal(err)
	}
	var disk *DiskError
	if err := s.Read(t.Context(), all[5].at.Region(), got); !errors.As(err, &disk) || disk.Effect != nothingRead {
		t.Fatalf("taken away: %v", err)
	}
	s.Close()
	if err := s.Read(t.Context(), 0, got); !errors.Is(err, ErrClosed) {
		t.Fatal(err)
	}
}
