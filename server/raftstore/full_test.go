package raftstore

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/hashicorp/raft"
)

// smallDisk is a disk with room for so many bytes in the files of the folder "data". A write
// beyond them is cut short.
type smallDisk struct {
	vfs.FS
	mu   sync.Mutex
	room int64
	once bool // after the first write that is cut short there is room
}

// leftLocked is how many of want bytes have room.
func (d *smallDisk) leftLocked(want int64) (int64, error) {
	all, err := d.List("data")
	if err != nil {
		return 0, err
	}
	left := d.room
	for _, name := range all {
		st, err := d.Stat(d.PathJoin("data", name))
		if errors.Is(err, fs.ErrNotExist) { // Pebble removed it
			continue
		}
		if err != nil {
			return 0, err
		}
		left -= st.Size()
	}
	return min(want, max(left, 0)), nil
}

func (d *smallDisk) wrap(f vfs.File, err error) (vfs.File, error) {
	if err != nil {
		return nil, err
	}
	return smallFile{f, d}, nil
}

func (d *smallDisk) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	return d.wrap(d.FS.Create(name, c))
}

func (d *smallDisk) OpenReadWrite(name string, c vfs.DiskWriteCategory, opts ...vfs.OpenOption) (vfs.File, error) {
	return d.wrap(d.FS.OpenReadWrite(name, c, opts...))
}

func (d *smallDisk) ReuseForWrite(old, name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	return d.wrap(d.FS.ReuseForWrite(old, name, c))
}

type smallFile struct {
	vfs.File
	d *smallDisk
}

func (f smallFile) Write(p []byte) (int, error) {
	runtime.Gosched() // a write is where a thread of a real disk rests
	f.d.mu.Lock()
	defer f.d.mu.Unlock()
	n, err := f.d.leftLocked(int64(len(p)))
	if err != nil {
		return 0, err
	}
	if n == int64(len(p)) {
		return f.File.Write(p)
	}
	if n > 0 {
		if _, err := f.File.Write(p[:n]); err != nil {
			return 0, err
		}
	}
	if f.d.once {
		f.d.room = ample
	}
	return int(n), &fs.PathError{Op: "write", Path: "data", Err: syscall.ENOSPC}
}

// folders are disks as a process that was killed leaves them.
var folders = map[string]func() (*vfs.MemFS, error){
	"new":       func() (*vfs.MemFS, error) { return vfs.NewCrashableMem(), nil },
	"empty log": func() (*vfs.MemFS, error) { return killed(1, func(*Store, uint64) error { return nil }) },
	"log":       func() (*vfs.MemFS, error) { return killed(1, life) },
	// A start writes a second table, and then Pebble merges the two.
	"table and log": func() (*vfs.MemFS, error) { return killed(2, life) },
}

// life stores entries and, as raft does, a term, so that tables overlap.
func life(s *Store, i uint64) error {
	return errors.Join(s.SetUint64([]byte("CurrentTerm"), i+1), s.StoreLogs(entries(3*i+1, 3*i+3)))
}

// killed is a disk that a store was opened and killed on so many times, after do.
func killed(times uint64, do func(s *Store, i uint64) error) (*vfs.MemFS, error) {
	disk := vfs.NewCrashableMem()
	for i := range times {
		s, err := Open(context.Background(), Options{Dir: "data", FS: disk})
		if err != nil {
			return nil, err
		}
		if err := do(s, i); err != nil {
			return nil, err
		}
		left := disk.CrashClone(vfs.CrashCloneCfg{})
		if err := s.Close(); err != nil {
			return nil, err
		}
		disk = left
	}
	return disk, nil
}

const (
	roomStep  = 127     // bytes, the least
	roomTop   = 2 << 20 // bytes; what smallStart writes takes less
	ample     = 1 << 40 // bytes
	roomLimit = 30 * time.Second
)

// TestSmallDisk starts a store on disks with ever more room. Each start ends in an error that
// says why, or in a store that works until it says why not, and no entry that was stored is lost.
// It runs in a process of its own: where Pebble gives up, goroutines of Pebble stay.
func TestSmallDisk(t *testing.T) {
	for name := range folders {
		t.Run(name, func(t *testing.T) {
			cmd := exec.CommandContext(t.Context(), os.Args[0])
			cmd.Env = append(os.Environ(), "KVD_TEST_SMALL_DISK="+name)
			out, err := cmd.CombinedOutput()
			if err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			t.Log(strings.TrimSpace(string(out)))
		})
	}
}

// smallDisks is TestSmallDisk's process.
func smallDisks(folder string) int {
	made, err := folders[folder]()
	if err != nil {
		fmt.Println(err)
		return 1
	}
	had, used, err := contents(made)
	if err != nil {
		fmt.Println(err)
		return 1
	}
	var wg sync.WaitGroup
	var mu sync.Mutex
	var started, refused, bad int
	turns := make(chan struct{}, 8)
	for i, room := 0, int64(0); room < roomTop; i, room = i+1, room+max(roomStep, room/16) {
		once := i%2 == 1
		turns <- struct{}{}
		wg.Go(func() {
			defer func() { <-turns }()
			disk := made.CrashClone(vfs.CrashCloneCfg{})
			works, err := smallStart(disk, &smallDisk{FS: disk, room: used + room, once: once}, had)
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err != nil:
				bad++
				fmt.Printf("room for %d bytes, one write cut short %t: %v\n", room, once, err)
			case works:
				started++
			default:
				refused++
			}
		})
	}
	wg.Wait()
	fmt.Printf("%d started, %d were refused\n", started, refused)
	if bad > 0 || started == 0 || refused == 0 {
		return 1
	}
	return 0
}

// contents is the last entry on a disk, and the bytes in its files.
func contents(disk *vfs.MemFS) (last uint64, used int64, err error) {
	full := &smallDisk{FS: disk, room: ample}
	all, err := full.leftLocked(full.room)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, 0, nil
	}
	if err != nil {
		return 0, 0, err
	}
	last, err = lastEntry(disk.CrashClone(vfs.CrashCloneCfg{}))
	return last, full.room - all, err
}

// lastEntry is the last entry of a store that is opened on disk, whose first is 1.
func lastEntry(disk vfs.FS) (last uint64, err error) {
	s, err := Open(context.Background(), Options{Dir: "data", FS: disk})
	if err != nil {
		return 0, fmt.Errorf("open with room: %w", err)
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	first, err := s.FirstIndex()
	if err != nil {
		return 0, err
	}
	if last, err = s.LastIndex(); err != nil {
		return 0, err
	}
	for i := first; i <= last && i > 0; i++ {
		if err := s.GetLog(i, new(raft.Log)); err != nil {
			return 0, fmt.Errorf("entry %d of %d..%d: %w", i, first, last, err)
		}
	}
	if last > 0 && first != 1 {
		return 0, fmt.Errorf("the log is %d..%d", first, last)
	}
	return last, nil
}

// smallStart opens a store that has so many entries on a small disk, which is on disk, and tells
// whether that succeeded.
func smallStart(disk *vfs.MemFS, small *smallDisk, had uint64) (started bool, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), roomLimit)
	defer cancel()
	s, err := Open(ctx, Options{Dir: "data", FS: small, StallTimeout: roomLimit})
	stored, left := had, []*vfs.MemFS(nil)
	if started = err == nil; started {
		var snapshot chan error
		for err == nil && stored < had+100 {
			if stored == had+10 { // raft writes snapshots beside its log
				snapshot = make(chan error, 1)
				go func() { snapshot <- bigSnapshot(s, had) }()
			}
			if err = s.StoreLog(entry(stored+1, 1)); err == nil {
				stored++
				err = s.WriteRows(stored, []Row{{Key: []byte("k"), Value: make([]byte, 300)}})
			}
		}
		if snapshot != nil {
			err = errors.Join(err, <-snapshot)
		}
		if err != nil && !errors.Is(s.Err(), ErrBroken) {
			return started, fmt.Errorf("after %d entries, %w, but the store has not failed: %w", stored, err, s.Err())
		}
		left = append(left, unsynced(disk)) // as if it were killed
		if err := s.Close(); err != nil {
			return started, err
		}
	}
	left = append(left, unsynced(disk))
	if err != nil && !errors.Is(err, syscall.ENOSPC) {
		return started, fmt.Errorf("started %t, %d entries: %w", started, stored, err)
	}
	small.mu.Lock()
	small.room = ample // Pebble tries a table for ever
	small.mu.Unlock()
	for _, disk := range left {
		if last, err := lastEntry(disk); err != nil {
			return started, fmt.Errorf("started %t, %d entries were stored: %w", started, stored, err)
		} else if last < stored {
			return started, fmt.Errorf("started %t, %d entries were stored, %d are left", started, stored, last)
		}
	}
	return started, nil
}

// unsynced is a copy of a disk with all that was written to it: the death of a process loses nothing.
func unsynced(disk *vfs.MemFS) *vfs.MemFS {
	return disk.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: 100, RNG: rand.New(rand.NewPCG(0, 0))})
}

// bigSnapshot writes a snapshot that is many blocks of Pebble's write-ahead log long.
func bigSnapshot(s *Store, index uint64) error {
	k, err := s.Snapshots().Create(1, index, 1, raft.Configuration{}, 1, nil)
	if err != nil {
		return err
	}
	if _, err := k.Write(make([]byte, 3*snapshotChunk)); err != nil {
		return errors.Join(err, k.Cancel())
	}
	return k.Close()
}
