// Package raftstore keeps everything one directory node must remember on one Pebble database. That is
// hashicorp/raft's log, stable store and snapshots, and the rows of the applied state.
//
// It knows nothing of what the entries mean; the state machine is server/fsm.
// Start with [Store]; it is a raft.LogStore, raft.MonotonicLogStore and
// raft.StableStore, and [Store.Snapshots] is a raft.SnapshotStore. All methods
// may be called concurrently. Byte slices passed in are copied before a call
// returns; slices handed out belong to the caller.
//
// Every write has a deadline. A disk that hangs, is full, or that Pebble declares broken, fails the store for
// good ([Store.Failed]). So a leader on it steps down instead of holding its followers with heartbeats
// (hashicorp/raft issue 503). A failed store recovers only by being opened again, because what reached the
// disk is then unknown and raft reads its log afresh.
//
// Among what it keeps is the key that signs session tokens, so its files are for their
// owner alone (files.go).
//
// raft.CommitTrackingLogStore is left out on purpose. In raft v1.8.0 a start with RestoreCommittedLogs skips
// the configuration entries among the committed ones, and blocks when they exceed 128 batches. The applied
// rows serve the same end.
//
// Modelled on hashicorp's raft-boltdb and raft-wal, on Pebble's key prefixes.
package raftstore

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
)

// Key spaces. A key's first byte is its space, and every iterator is bounded to
// one space.
//
//	'a' applied index, big-endian u64 value
//	'd' snapshot data:    'd' id 0x00 chunk (u32)
//	'l' log entries:      'l' index (u64)
//	'm' snapshot meta:    'm' index (u64) term (u64) id
//	'r' applied rows:     'r' row key
//	's' stable store:     's' key
//
// Integers in keys are big-endian, so that keys sort by number.
const (
	spaceApplied = 'a'
	spaceData    = 'd'
	spaceLog     = 'l'
	spaceMeta    = 'm'
	spaceRow     = 'r'
	spaceStable  = 's'
)

var (
	// ErrLocked means that another process, or another node in this one, has the
	// folder open.
	ErrLocked = errors.New("data folder is in use by another process")
	// ErrStalled means that a write outlasted Options.StallTimeout. Whether it
	// reached the disk is unknown.
	ErrStalled = errors.New("disk stalled")
	// ErrBroken means that Pebble gave up on the disk. Whether the last write
	// reached it is unknown.
	ErrBroken = errors.New("disk failed")
	// ErrLater means that a later version's database is in the folder. Nothing was changed there.
	ErrLater = errors.New("a later version of kvd has written it, and that or a later one alone can use it")
	// ErrDamaged means that the database in the folder does not hold together.
	ErrDamaged = errors.New("it is damaged")
	// ErrClosed means that the store is closed; nothing was written.
	ErrClosed = errors.New("store is closed")
)

// CorruptError reports stored bytes that do not parse.
type CorruptError struct {
	What string // "log entry 7"
	Why  string
}

func (e *CorruptError) Error() string { return fmt.Sprintf("corrupt %s: %s", e.What, e.Why) }

// Options configure a Store.
type Options struct {
	// Dir is the data folder; it is created, with mode 0700, if absent. Required.
	Dir string
	// FS is the filesystem. Default: the operating system's, on which files have mode
	// 0600; those that others may read or write are given that mode by Open.
	FS vfs.FS
	// StallTimeout is the longest a write may take, not counting time in which the
	// process itself stood still. Default 5 s.
	StallTimeout time.Duration
	// Logger receives Pebble's errors. Default: discarded.
	Logger *slog.Logger
}

func (o *Options) ensureDefaults() {
	if o.FS == nil {
		o.FS = ownerOnly{vfs.Default}
	}
	if o.StallTimeout == 0 {
		o.StallTimeout = 5 * time.Second
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
}

// Validate joins every problem of o.
func (o *Options) Validate() error {
	var errs []error
	if o.Dir == "" {
		errs = append(errs, errors.New("Dir is required"))
	}
	if o.StallTimeout < 0 {
		errs = append(errs, fmt.Errorf("StallTimeout is %v, want more than 0", o.StallTimeout))
	}
	return errors.Join(errs...)
}

// Store is one directory node's disk.
type Store struct {
	opts Options
	db   *pebble.DB
	lock *pebble.Lock

	failed  chan struct{} // closed by the first failure
	closing chan struct{} // closed when the database is
	mu      struct {
		sync.Mutex
		err    error // why the store failed
		closed bool
		users  sync.WaitGroup // calls into db; Add only under mu with closed false
		writes sync.WaitGroup // commits, which may outlast the call that began them
	}
}

// Open opens or creates the store in opts.Dir and locks it. It does not wait for a disk
// that Pebble cannot write to, nor beyond ctx: then the folder stays locked until the
// disk has answered.
func Open(ctx context.Context, opts Options) (*Store, error) {
	opts.ensureDefaults()
	if err := opts.Validate(); err != nil {
		return nil, err
	}
	s := &Store{opts: opts, failed: make(chan struct{}), closing: make(chan struct{})}
	if err := s.own(); err != nil {
		return nil, fmt.Errorf("data folder %s: %w", opts.Dir, err)
	}
	opened := make(chan error, 1)
	go func() {
		err := ErrBroken
		defer func() { opened <- err; close(opened) }() // also when pebbleLogger.Fatalf ends the goroutine
		err = s.load()
	}()
	var err error
	select {
	case err = <-opened:
	case <-s.failed:
	case <-ctx.Done():
		err = fmt.Errorf("%w while it was being opened", context.Cause(ctx))
	}
	if failure := s.Err(); failure != nil {
		err = failure // the cause of whatever load returned
	}
	if err == nil {
		return s, nil
	}
	go func() {
		<-opened
		if s.db == nil {
			_ = s.lock.Close() // the failure is reported below
			return
		}
		s.mu.writes.Wait()
		_ = s.release()
	}()
	return nil, fmt.Errorf("data folder %s: %w", opts.Dir, err)
}

// own makes the folder, locks it and sees to its files' modes.
func (s *Store) own() error {
	if err := s.opts.FS.MkdirAll(s.opts.Dir, 0o700); err != nil {
		return err
	}
	lock, err := pebble.LockDirectory(s.opts.Dir, s.opts.FS)
	if pe := (*fs.PathError)(nil); errors.As(err, &pe) { // the lock's file cannot be made
		return err
	}
	if err != nil {
		return fmt.Errorf("%w (%v)", ErrLocked, err)
	}
	s.lock = lock
	if o, ok := s.opts.FS.(ownerOnly); ok {
		mended, err := o.mend(s.opts.Dir)
		if err != nil {
			return errors.Join(err, lock.Close())
		}
		if mended > 0 {
			s.opts.Logger.Warn("files of the data folder, which holds the cluster's key, were open to others and are "+
				"no more",
				"dir", s.opts.Dir, "files", mended, "mode", fmt.Sprintf("%#o", fileMode))
		}
	}
	return nil
}

func (s *Store) load() (err error) {
	cache := pebble.NewCache(4 << 20)
	defer cache.Unref()
	compacting := new(compactions)
	opts := &pebble.Options{
		FS:                 newWALDisk(s),
		Lock:               s.lock,
		Cache:              cache,
		MemTableSize:       4 << 20,
		Logger:             pebbleLogger{s},
		EventListener:      &pebble.EventListener{BackgroundError: s.backgroundError},
		FormatMajorVersion: format,
	}
	opts.Experimental.CompactionScheduler = compacting
	if s.db, err = pebble.Open(s.opts.Dir, opts); err != nil {
		return loadError(err)
	}
	compacting.start()
	return s.dropOrphans()
}

// format is the version of Pebble's files. It is none that a version of kvd from which one can upgrade does not read:
// Pebble takes a folder to a greater one as soon as it opens it, and there is no way back.
const format = pebble.FormatValueSeparation

// loadError says of an error of Pebble's, who opened a folder, which kind it is.
func loadError(err error) error {
	switch {
	case pebble.IsCorruptionError(err):
		return fmt.Errorf("%w: %w", ErrDamaged, err)
	case strings.Contains(err.Error(), "unknown format major version"): // Pebble has no error of its own for it
		return fmt.Errorf("%w: %w", ErrLater, err)
	}
	return err
}

// retryPause is how long Pebble waits before it tries again what failed in the
// background.
const retryPause = time.Second

// backgroundError fails the store when Pebble cannot write a table. Pebble goes on
// trying at once and for ever, so it is held up here, until the database is closed.
func (s *Store) backgroundError(err error) {
	s.fail(fmt.Errorf("%w: %w", ErrBroken, err))
	select {
	case <-s.closing:
	case <-time.After(retryPause):
	}
}

// Failed is closed when the store stops accepting writes; Err says why.
func (s *Store) Failed() <-chan struct{} { return s.failed }

// Err is why the store failed, or nil.
func (s *Store) Err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mu.err
}

// Close releases the folder. It is idempotent. After a failure it does not wait
// for the disk: the folder stays locked until the last write has come back.
func (s *Store) Close() error {
	s.mu.Lock()
	if s.mu.closed {
		s.mu.Unlock()
		return nil
	}
	s.mu.closed = true
	failed := s.mu.err != nil
	s.mu.Unlock()
	if !failed {
		s.mu.users.Wait()
		failed = s.Err() != nil
	}
	if failed {
		go func() {
			s.mu.users.Wait()
			s.mu.writes.Wait()
			_ = s.release() // the failure has been reported
		}()
		return nil
	}
	return s.release()
}

func (s *Store) release() error {
	close(s.closing)
	return errors.Join(s.db.Close(), s.lock.Close())
}

func (s *Store) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.err == nil {
		s.mu.err = err
		close(s.failed)
	}
}

// beginCall admits a call into the database; the caller must call endCall. Reads go on
// after a failure, because raft panics when it cannot read its log.
func (s *Store) beginCall() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.closed {
		return ErrClosed
	}
	s.mu.users.Add(1)
	return nil
}

func (s *Store) endCall() { s.mu.users.Done() }

// write commits b within the stall timeout and takes ownership of it. The
// caller has entered. When the write stalls, its goroutine lives until the disk answers.
func (s *Store) write(b *pebble.Batch, sync *pebble.WriteOptions) error {
	done := make(chan error, 1)
	s.mu.writes.Add(1) // the caller has entered, so Close is not past waiting for it
	go func() {
		defer s.mu.writes.Done()
		err := fmt.Errorf("%w while writing", ErrBroken)
		// Runs also when pebbleLogger.Fatalf ends the goroutine.
		defer func() { done <- err }()
		if err = b.Commit(sync); err == nil {
			err = b.Close()
		}
	}()
	// A process that stood still, as in SIGSTOP or a machine that was suspended, finds
	// its timer due before the disk had any time, so a slice of the timeout counts once
	// however long it took.
	slice := time.NewTicker(max(s.opts.StallTimeout/stallSlices, 1))
	defer slice.Stop()
	for range stallSlices {
		select {
		case err := <-done:
			if err != nil {
				s.fail(err)
			}
			return s.Err() // also when walDisk has kept the failure from Pebble
		case <-slice.C:
		}
	}
	s.fail(fmt.Errorf("%w: a write to %s took more than %v", ErrStalled, s.opts.Dir, s.opts.StallTimeout))
	return s.Err()
}

// stallSlices are the parts of Options.StallTimeout that are counted one by one.
const stallSlices = 20

func (s *Store) update(sync *pebble.WriteOptions, build func(*pebble.Batch) error) error {
	if err := s.beginCall(); err != nil {
		return err
	}
	defer s.endCall()
	if err := s.Err(); err != nil {
		return err
	}
	b := s.db.NewBatch()
	if err := build(b); err != nil {
		return errors.Join(err, b.Close())
	}
	return s.write(b, sync)
}

// get copies the value of key; a missing key gives nil and nil.
func (s *Store) get(key []byte) ([]byte, error) {
	if err := s.beginCall(); err != nil {
		return nil, err
	}
	defer s.endCall()
	v, closer, err := s.db.Get(key)
	if errors.Is(err, pebble.ErrNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	out := append(make([]byte, 0, len(v)), v...)
	return out, closer.Close()
}

// scan calls fn for each key of the prefix in order until it returns false.
func (s *Store) scan(prefix []byte, fn func(key, value []byte) (bool, error)) error {
	if err := s.beginCall(); err != nil {
		return err
	}
	defer s.endCall()
	it, err := s.db.NewIter(bounds(prefix))
	if err != nil {
		return err
	}
	for ok := it.First(); ok; ok = it.Next() {
		v, err := it.ValueAndErr()
		if err != nil {
			return errors.Join(err, it.Close())
		}
		more, err := fn(it.Key(), v)
		if err != nil {
			return errors.Join(err, it.Close())
		}
		if !more {
			break
		}
	}
	return errors.Join(it.Error(), it.Close())
}

func bounds(prefix []byte) *pebble.IterOptions {
	return &pebble.IterOptions{LowerBound: prefix, UpperBound: prefixEnd(prefix)}
}

// prefixEnd is the least key above every key with the prefix. The last byte of
// a prefix is never 0xff here: it is a space letter or a zero.
func prefixEnd(prefix []byte) []byte {
	end := append([]byte(nil), prefix...)
	end[len(end)-1]++
	return end
}

// Row is one key and value of the applied state; a nil Value deletes it.
type Row struct {
	Key, Value []byte
}

// Applied is the log index that the applied rows reflect; 0 for none.
func (s *Store) Applied() (uint64, error) {
	v, err := s.get([]byte{spaceApplied})
	if err != nil || v == nil {
		return 0, err
	}
	if len(v) != 8 {
		return 0, &CorruptError{What: "applied index", Why: fmt.Sprintf("%d bytes, want 8", len(v))}
	}
	return binary.BigEndian.Uint64(v), nil
}

// Rows calls fn for every applied row in key order. The slices are valid during
// the call only.
func (s *Store) Rows(fn func(key, value []byte) error) error {
	return s.scan([]byte{spaceRow}, func(k, v []byte) (bool, error) { return true, fn(k[1:], v) })
}

// WriteRows applies rows and the index that they bring the state to, in one
// batch. It does not wait for the disk: the log holds the same entries, and one
// write-ahead log keeps the two in order.
func (s *Store) WriteRows(index uint64, rows []Row) error {
	return s.update(pebble.NoSync, func(b *pebble.Batch) error { return putRows(b, index, rows) })
}

// ReplaceRows makes rows the whole applied state, durably and atomically.
func (s *Store) ReplaceRows(index uint64, rows []Row) error {
	return s.update(pebble.Sync, func(b *pebble.Batch) error {
		if err := b.DeleteRange([]byte{spaceRow}, []byte{spaceRow + 1}, nil); err != nil {
			return err
		}
		return putRows(b, index, rows)
	})
}

func putRows(b *pebble.Batch, index uint64, rows []Row) error {
	for _, r := range rows {
		k := append([]byte{spaceRow}, r.Key...)
		var err error
		if r.Value == nil {
			err = b.Delete(k, nil)
		} else {
			err = b.Set(k, r.Value, nil)
		}
		if err != nil {
			return err
		}
	}
	return b.Set([]byte{spaceApplied}, binary.BigEndian.AppendUint64(nil, index), nil)
}

// pebbleLogger keeps Pebble off stderr and off os.Exit.
type pebbleLogger struct{ s *Store }

func (l pebbleLogger) Infof(format string, args ...any) {
	l.s.opts.Logger.Debug("pebble: " + fmt.Sprintf(format, args...))
}

func (l pebbleLogger) Errorf(format string, args ...any) {
	l.s.opts.Logger.Warn("pebble: " + fmt.Sprintf(format, args...))
}

// Fatalf must not return. It fails the store, which reports the first failure to its
// owner, and ends the calling goroutine; write and Open report that to their callers.
func (l pebbleLogger) Fatalf(format string, args ...any) {
	err := fmt.Errorf("%w: %w", ErrBroken, fatal{fmt.Sprintf(format, args...), args})
	l.s.opts.Logger.Debug("pebble: " + err.Error())
	l.s.fail(err)
	runtime.Goexit()
}

// fatal is what Pebble says when it gives up, with the errors of which it speaks.
type fatal struct {
	text string
	args []any
}

func (f fatal) Error() string { return f.text }

func (f fatal) Unwrap() (errs []error) {
	for _, a := range f.args {
		if err, ok := a.(error); ok {
			errs = append(errs, err)
		}
	}
	return errs
}
