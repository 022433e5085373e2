// Package archive keeps snapshots of namespaces in files. It writes them, reads them back whatever has become of them,
// and leaves to others which namespace there is and what a user is told.
//
// Start with [Writer], which makes a snapshot of records, and [Open], which gives a [Snapshot] to read. [Destination]
// is where files are. A Writer's methods and those of a Snapshot may be called concurrently; a [Segment] or a
// [SegmentWriter] belongs to one goroutine. A record that a Segment gives is valid until its next call.
//
// Every length in a file is hostile: it is checked before memory is taken for it, and an error names file and offset.
// The manifest comes last and lists all else with sizes and sums, as in RDB files of Redis and backups of Pebble.
package archive

import (
	"errors"
	"fmt"
	"hash/crc32"
	"regexp"
	"time"

	"github.com/kvd-project/kvd/internal/layout"
)

// Bounds of the format.
const (
	// MaxBlock is the most that a block holds before it is compressed, in bytes.
	MaxBlock = 256 << 10
	// MaxSegment is what a segment has at most, in bytes, unless it is of one record that is longer.
	MaxSegment = 64 << 20
	// maxValue is the longest value with its tail.
	maxValue = layout.MaxValueLen + layout.MaxTailLen
	// maxSegments is how many segments a snapshot has at most.
	maxSegments = 999_999
	// maxManifest bounds a manifest, in bytes.
	maxManifest = 256 << 20
	// longestSegment is that of one record of the greatest length, in bytes.
	longestSegment = maxValue + maxValue/64 + 1<<20
)

// Format is what a manifest of this format says.
const Format = "kvsnap/1"

// Record is what is kept of a key.
type Record struct {
	Key []byte
	// Value has the tail that its flags tell of: a note of eight bytes, then user flags of four.
	Value []byte
	// Len is the length of the value with its tail, in bytes. A Segment gives it; a Writer looks at Value alone.
	Len     int
	Version uint64
	Expiry  uint64 // Unix ms; 0: never
	Flags   layout.RecordFlags
}

// Expired reports whether the record's time is over at now.
func (r *Record) Expired(now time.Time) bool {
	return r.Expiry != 0 && int64(min(r.Expiry, 1<<62)) <= now.UnixMilli()
}

// check refuses what no key of the store can be.
func (r *Record) check() error {
	switch {
	case len(r.Key) == 0 || len(r.Key) > layout.MaxKeyLen:
		return fmt.Errorf("key of %d bytes, want 1..%d", len(r.Key), layout.MaxKeyLen)
	case r.Len < r.Flags.TailLen() || r.Len > maxValue:
		return fmt.Errorf("value of %d bytes, want %d..%d", r.Len, r.Flags.TailLen(), maxValue)
	case r.Flags&^layout.FlagsOfValue != 0:
		return fmt.Errorf("value flags %#x: only %#x are known", uint8(r.Flags), uint8(layout.FlagsOfValue))
	case r.Version == 0:
		return errors.New("version 0")
	}
	return nil
}

// CorruptError says what is wrong in a file, and where.
type CorruptError struct {
	File string // its name in the destination
	Off  int64  // byte of the file; -1: its length, or the file as a whole
	Err  error
}

func (e *CorruptError) Error() string {
	if e.Off < 0 {
		return fmt.Sprintf("%s: damaged: %v", e.File, e.Err)
	}
	return fmt.Sprintf("%s: damaged at offset %d: %v", e.File, e.Off, e.Err)
}

func (e *CorruptError) Unwrap() error { return e.Err }

// castagnoli is CRC-32C.
var castagnoli = crc32.MakeTable(crc32.Castagnoli)

var (
	idForm        = regexp.MustCompile(`^[0-9]{8}T[0-9]{6}Z-full$`)
	segmentForm   = regexp.MustCompile(`^seg-[0-9]{6}\.kvs$`)
	namespaceForm = regexp.MustCompile(`^[a-z0-9._-]{1,64}$`)
)

// idTime is the form of the time in an id.
const idTime = "20060102T150405Z"

// idAt is the id of a snapshot that begins at t. Ids sort by time.
func idAt(t time.Time) string { return t.UTC().Format(idTime) + "-full" }

// CheckID refuses what is no id of a snapshot, such as a path.
func CheckID(id string) error {
	if _, err := IDTime(id); err != nil {
		return err
	}
	return nil
}

// IDTime is when the snapshot of that id was begun.
func IDTime(id string) (time.Time, error) {
	if !idForm.MatchString(id) {
		return time.Time{}, fmt.Errorf("%.80q is no id of a snapshot: want one such as 20261122T003000Z-full", id)
	}
	t, err := time.Parse(idTime, id[:len(id)-len("-full")])
	if err != nil {
		return time.Time{}, fmt.Errorf("%q is no id of a snapshot: %w", id, err)
	}
	return t, nil
}

// CheckNamespace refuses what is no name of a namespace, such as a path.
func CheckNamespace(name string) error {
	if !namespaceForm.MatchString(name) || name == "." || name == ".." {
		return fmt.Errorf("%.80q is no name of a namespace that a folder can have", name)
	}
	return nil
}
