package raftstore

import (
	"fmt"
	"strings"
	"sync/atomic"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// walDisk is the file system that Pebble is given. On it Pebble's write-ahead logs never fail,
// because Pebble panics when one does, and unlocks what it has not locked. The first failure
// fails the store instead, which then acknowledges nothing more, and nothing more is written to
// any log: the next start could not read what comes behind a gap.
type walDisk struct {
	vfs.FS
	s    *Store
	torn *atomic.Bool
}

func newWALDisk(s *Store) walDisk { return walDisk{FS: s.opts.FS, s: s, torn: new(atomic.Bool)} }

// fail notes a log's failure. It must precede the return of the call that failed: write asks
// the store afterwards.
func (d walDisk) fail(err error) {
	d.torn.Store(true)
	d.s.fail(fmt.Errorf("%w: %w", ErrBroken, err))
}

// logFile gives the log that open makes. After a failure it is one in memory, for a log that
// another follows must end properly on the disk.
func (d walDisk) logFile(name string, open func() (vfs.File, error)) (vfs.File, error) {
	if !strings.HasSuffix(name, ".log") {
		return open()
	}
	if !d.torn.Load() {
		f, err := open()
		if err == nil {
			return walFile{f, d}, nil
		}
		d.fail(err)
	}
	return vfs.NewMem().Create("log", vfs.WriteCategoryUnspecified)
}

func (d walDisk) Create(name string, category vfs.DiskWriteCategory) (vfs.File, error) {
	return d.logFile(name, func() (vfs.File, error) { return d.FS.Create(name, category) })
}

func (d walDisk) ReuseForWrite(oldname, newname string, category vfs.DiskWriteCategory) (vfs.File, error) {
	return d.logFile(newname, func() (vfs.File, error) { return d.FS.ReuseForWrite(oldname, newname, category) })
}

// walFile is a write-ahead log. A single goroutine of Pebble writes and syncs it.
type walFile struct {
	vfs.File
	d walDisk
}

// do does what Pebble asks of the log, unless one has failed.
func (f walFile) do(what func() error) {
	if f.d.torn.Load() {
		return
	}
	if err := what(); err != nil {
		f.d.fail(err)
	}
}

// Write implements io.Writer and never fails.
func (f walFile) Write(p []byte) (int, error) {
	f.do(func() error { _, err := f.File.Write(p); return err })
	return len(p), nil
}

// Sync implements vfs.File and never fails.
func (f walFile) Sync() error {
	f.do(f.File.Sync)
	return nil
}

// SyncData implements vfs.File and never fails.
func (f walFile) SyncData() error {
	f.do(f.File.SyncData)
	return nil
}

// SyncTo implements vfs.File and never fails.
func (f walFile) SyncTo(length int64) (fullSync bool, err error) {
	f.do(func() (err error) { fullSync, err = f.File.SyncTo(length); return err })
	return fullSync, nil
}

// Close implements io.Closer and never fails. It closes the file also after a failure.
func (f walFile) Close() error {
	if err := f.File.Close(); err != nil {
		f.d.fail(err)
	}
	return nil
}
