// Package tierstore keeps objects in the segment files of a folder. It appends them, gives them back by address, and
// frees segments once what is alive in them has moved. No index is kept: an address is all that finds an object.
//
// Start with [Open], which gives a [Store], then [Store.Append] and [Store.Get]. It leaves to its caller which objects
// are alive ([Collector]), what an object means, and who may read it. A Store's methods may be called concurrently.
// Bodies belong to the caller; the Store copies them before a call returns.
//
// An address is written once in the life of a folder, so a stale one finds its own object or nothing. Every block of a
// file has a sum, and an object's sum is taken with its segment's salt and its own address. Bytes of another object,
// or bytes that a user chose, therefore never pass for an object. Append-only segments and their collection are those
// of log-structured file systems (Rosenblum and Ousterhout, 1991) and of Bitcask.
package tierstore

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// Bounds of the engine.
const (
	// MaxBody is the longest body, in bytes: the longest value, with the heads of the records that hold it.
	MaxBody = 528 << 20
	// MaxSegment is the length of a segment without its table, in bytes. A longer object has a segment of its own.
	MaxSegment = 64 << 20

	bufBytes    = 1 << 20 // of appends that wait for one write
	syncBytes   = 8 << 20 // of appends that wait for one sync
	workers     = 64      // reads at a time
	maxOpen     = 256     // files that are open for reads
	smallBody   = 64 << 10
	maxSegments = 1 << 44
	maxSpan     = 16 // numbers of one segment
)

// Errors of reads and appends. None of them has changed anything.
var (
	// ErrGone says that no object of this identity is at the address: it is freed, or cut off by a crash, or never was.
	ErrGone = errors.New("no such object in the tier")
	// ErrFull says that the folder has reached its limit. Nothing was appended.
	ErrFull = errors.New("the tier's folder is full; nothing was appended")
	// ErrKept says that a collection left live objects in the segment, which therefore stays.
	ErrKept = errors.New("the segment holds live objects, and stays")
	// ErrClosed is for calls after Close. Nothing was done.
	ErrClosed = errors.New("the tier's folder is closed")
)

// CorruptError says which bytes of a file are not those that were written.
type CorruptError struct {
	File string // in the folder
	Off  int64  // byte of the file at which the damaged block begins
	Err  error
}

func (e *CorruptError) Error() string {
	return fmt.Sprintf("%s: damaged at offset %d: %v", e.File, e.Off, e.Err)
}

func (e *CorruptError) Unwrap() error { return e.Err }

// DiskError says what the file system refused, and what has become of the call.
type DiskError struct {
	Op     string // such as "write"
	File   string // in the folder
	Effect string // what has become of the call that returns the error
	Err    error
}

func (e *DiskError) Error() string {
	return fmt.Sprintf("%s %s: %v; %s", e.Op, e.File, e.Err, e.Effect)
}

func (e *DiskError) Unwrap() error { return e.Err }

// Effects of a DiskError.
const (
	nothingRead     = "nothing was read"
	nothingAppended = "nothing was appended"
	unknownSync     = "whether the last appends are on disk is unknown, and the folder takes no more"
	nothingFreed    = "the segment stays"
	notOpened       = "the folder was not opened"
)

// Options say where a Store is and what it may use.
type Options struct {
	// FS holds the folder. Default: the operating system's.
	FS vfs.FS
	// Folder is made if it is missing. Required.
	Folder string
	// Volume, Namespace and HashSeed are written into every segment. A folder with others is refused.
	Volume    uint32
	Namespace uint64
	HashSeed  uint64
	// Limit bounds the bytes of all files. The last SegmentSize of it is for what collections move.
	// At least four times SegmentSize.
	Limit int64
	// SegmentSize is the length of a segment in bytes, at most MaxSegment. Default: MaxSegment.
	SegmentSize int64
	// SyncDelay is how long an append waits for others before a sync. Default: 10 ms.
	SyncDelay time.Duration
}

func (o *Options) ensureDefaults() {
	if o.FS == nil {
		o.FS = vfs.Default
	}
	if o.SegmentSize == 0 {
		o.SegmentSize = MaxSegment
	}
	if o.SyncDelay == 0 {
		o.SyncDelay = 10 * time.Millisecond
	}
}

func (o *Options) validate() error {
	var errs []error
	if o.Folder == "" {
		errs = append(errs, errors.New("Folder is empty"))
	}
	if o.SegmentSize < 4<<10 || o.SegmentSize > MaxSegment || o.SegmentSize%unit != 0 {
		errs = append(errs, fmt.Errorf("SegmentSize is %d bytes, want a multiple of %d in %d..%d", o.SegmentSize, unit,
			4<<10, MaxSegment))
	}
	if o.Limit < 4*o.SegmentSize {
		errs = append(errs, fmt.Errorf("Limit is %d bytes, want at least %d", o.Limit, 4*o.SegmentSize))
	}
	if o.SyncDelay < 0 {
		errs = append(errs, fmt.Errorf("SyncDelay is %v, want a positive duration", o.SyncDelay))
	}
	return errors.Join(errs...)
}

// Ident is whose object it is. The Store compares it, and knows nothing of its parts.
type Ident struct {
	Hash        uint64 // of the key
	Version     uint64 // of the record
	Incarnation uint64 // of the namespace
}

// Entry describes an object.
type Entry struct {
	Ident
	At     Addr
	Len    uint32 // of the body, in bytes
	Expiry uint64 // Unix ms; 0: never. As it was when the object was appended
}

// Segment describes a segment.
type Segment struct {
	Number  uint64
	Objects int
	Size    int64 // of its file, in bytes
	Live    int64 // bytes of objects that nobody has dropped
}

// Stats are the sums of a Store.
type Stats struct {
	Bytes   int64 // of all files
	Live    int64 // of objects that nobody has dropped
	Written uint64
	Moved   uint64 // bytes of Written that collections moved
	Syncs   uint64
}

// segment is a file. Store.mu guards what changes: all of it in the active segment, and live.
type segment struct {
	number  uint64
	salt    uint32
	span    uint32 // numbers that it takes
	end     int64  // of its objects, in bytes of the file
	size    int64  // of the file
	objects int
	live    int64
	table   int64   // offset of the table; 0: the segment is not sealed, and is scanned
	entries []Entry // of the active segment
	lost    bool    // no copy of its header is whole, so nothing in it can be told
}

// Store is an open folder of segments.
type Store struct {
	opt   Options
	files files
	slots chan struct{} // one for each reading worker
	kick  chan struct{} // something waits for a sync
	done  chan struct{}
	ended chan struct{} // the syncer has returned
	unlck io.Closer

	// The order of acquisition is collectMu, appendMu, syncMu, mu.
	collectMu sync.Mutex // held for a collection
	appendMu  sync.Mutex // held to write to the active segment, and to replace it
	syncMu    sync.Mutex // held while the active segment's file is synced or closed
	out       vfs.File   // the active segment's, under appendMu and syncMu
	spare     []byte     // of bufBytes, under appendMu: what buf is a part of

	mu struct {
		sync.RWMutex
		segs   map[uint64]*segment
		active *segment // nil: the next append makes one
		// buf holds bytes [bufAt, active.end) of the active segment, which are not in the file.
		buf      []byte
		bufAt    int64
		next     uint64 // number of the next segment
		used     int64  // bytes of all files, with what buf and the active segment's table will take
		appended uint64 // bytes of objects since Open
		durable  uint64 // of these, what is synced
		synced   chan struct{}
		failed   error // ends appends
		closed   bool
		stats    Stats
	}
}

// Segments lists the segments, in no order.
func (s *Store) Segments() []Segment {
	s.mu.RLock()
	defer s.mu.RUnlock()
	out := make([]Segment, 0, len(s.mu.segs))
	for _, g := range s.mu.segs {
		out = append(out, Segment{Number: g.number, Objects: g.objects, Size: g.size, Live: g.live})
	}
	return out
}

// Stats gives the sums as of now.
func (s *Store) Stats() Stats {
	s.mu.RLock()
	defer s.mu.RUnlock()
	out := s.mu.stats
	out.Bytes = s.mu.used
	for _, g := range s.mu.segs {
		out.Live += g.live
	}
	return out
}

// Drop counts an object as garbage, once for each object. It is advice on which segments to collect and frees nothing:
// a collection asks anew.
func (s *Store) Drop(at Addr, lenBytes uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if g := s.mu.segs[at.segment()]; g != nil {
		g.live = max(g.live-objectSize(int64(lenBytes)), 0)
	}
}

// Close syncs what was appended and lets go of the folder. It waits for collections and reads. It may be called twice.
func (s *Store) Close() error {
	s.collectMu.Lock()
	defer s.collectMu.Unlock()
	s.mu.Lock()
	closed := s.mu.closed
	s.mu.closed = true
	s.mu.Unlock()
	if closed {
		return nil
	}
	close(s.done)
	<-s.ended
	s.appendMu.Lock()
	defer s.appendMu.Unlock()
	err := s.sealActive()
	for range workers { // readers that have begun
		s.slots <- struct{}{}
	}
	return errors.Join(err, s.files.close(), s.unlck.Close())
}

// worker takes a reading worker, which the caller gives back by a receive from slots.
func (s *Store) worker(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-s.done:
		return ErrClosed
	case s.slots <- struct{}{}:
		return nil
	}
}
