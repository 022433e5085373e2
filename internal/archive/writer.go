package archive

import (
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"path"
	"slices"
	"strings"
	"sync"
	"time"
)

// Writer makes a snapshot of records that come in any order. Its methods may be called concurrently, but for Commit
// and Abort, which come when all SegmentWriters are closed.
type Writer struct {
	dest Destination
	id   string
	dir  string // with a slash at its end
	name string // of the namespace
	t0   time.Time
	most int64 // bytes of a segment: MaxSegment, but for tests
	sent bool  // a manifest, which may be there, or come to be

	mu struct {
		sync.Mutex
		next     int // segment
		keys     int64
		bytes    int64
		segments []SegmentInfo
	}
}

// startedName is a file that claims an id, and says when.
const startedName = "STARTED.json"

// claims is how many seconds in a row are tried, if others have begun snapshots at the same time.
const claims = 16

// NewWriter begins a snapshot of a namespace at time now: from then on nobody else makes one of that id.
func NewWriter(ctx context.Context, d Destination, namespace string, now time.Time) (*Writer, error) {
	if err := CheckNamespace(namespace); err != nil {
		return nil, err
	}
	for try := range claims {
		id := idAt(now.Add(time.Duration(try) * time.Second))
		dir := namespace + "/" + id + "/"
		claim := fmt.Appendf(nil, "{\"t0\":%q}\n", now.UTC().Format(time.RFC3339Nano))
		err := d.PutIfAbsent(ctx, dir+startedName, claim)
		if err == nil {
			return &Writer{dest: d, id: id, dir: dir, name: namespace, t0: now, most: MaxSegment}, nil
		}
		if !exists(err) {
			return nil, fmt.Errorf("%s: %w", dir+startedName, err)
		}
	}
	return nil, fmt.Errorf("%s: %d snapshots were begun in this moment already", d, claims)
}

// ID is that of the snapshot.
func (w *Writer) ID() string { return w.id }

// Counts are the keys so far, and the bytes of keys and values.
func (w *Writer) Counts() (keys, bytes int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.mu.keys, w.mu.bytes
}

// Commit makes the snapshot be there: m with what the Writer knows.
func (w *Writer) Commit(ctx context.Context, m Manifest) (*Manifest, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	m.Format, m.ID, m.Consistency, m.T0 = Format, w.id, PerKey, w.t0
	m.Namespace.Name, m.Keys, m.Bytes = w.name, w.mu.keys, w.mu.bytes
	m.Segments = append([]SegmentInfo{}, w.mu.segments...)
	slices.SortFunc(m.Segments, func(a, b SegmentInfo) int { return strings.Compare(a.Name, b.Name) })
	if err := m.check(w.name, w.id); err != nil {
		return nil, err
	}
	b, err := m.encode()
	if err != nil {
		return nil, err
	}
	if err := wholeAt(ctx, w.dest, w.dir, m.Segments); err != nil {
		return nil, err
	}
	w.sent = true
	if err := w.dest.PutIfAbsent(ctx, w.dir+ManifestName, b); err != nil {
		return nil, fmt.Errorf("%s: %w", w.dir+ManifestName, err)
	}
	return &m, nil
}

// wholeAt says which of a snapshot's segments is not there, before its manifest is written: a prune takes an incomplete
// snapshot for left over if nothing of it has changed for long.
func wholeAt(ctx context.Context, d Destination, dir string, all []SegmentInfo) error {
	files, err := d.List(ctx, dir)
	if err != nil {
		return err
	}
	there := make(map[string]bool, len(files))
	for _, f := range files {
		there[f.Name] = true
	}
	for _, x := range all {
		if !there[dir+x.Name] {
			return fmt.Errorf("%s: %s was taken away meanwhile: run it again", d, dir+x.Name)
		}
	}
	return nil
}

// Abort takes away what was written. Leftovers are no snapshot. It takes nothing away if a manifest was sent: a server
// may write it later, and there is never one without its segments. Prune takes them away then.
func (w *Writer) Abort(ctx context.Context) error {
	if w.sent {
		return nil
	}
	return removeSnapshot(ctx, w.dest, w.dir)
}

// removeSnapshot takes away all files of a snapshot. Its manifest goes first: there is never one without its segments.
// The claim of its id goes last.
func removeSnapshot(ctx context.Context, d Destination, dir string) error {
	if err := d.Delete(ctx, dir+ManifestName); err != nil {
		return err
	}
	all, err := d.List(ctx, dir)
	if err != nil {
		return err
	}
	for _, f := range all {
		if path.Base(f.Name) != startedName {
			err = errors.Join(err, d.Delete(ctx, f.Name))
		}
	}
	if err != nil {
		return err
	}
	return d.Delete(ctx, dir+startedName)
}

// SegmentWriter writes segments, one after the other. It belongs to one goroutine.
type SegmentWriter struct {
	w       *Writer
	file    File
	info    SegmentInfo
	bytes   int64 // of keys and values
	plain   []byte
	records int // in plain
	out     []byte
}

// Segment begins a SegmentWriter, which is to be closed or aborted.
func (w *Writer) Segment() *SegmentWriter { return &SegmentWriter{w: w} }

// Add writes a record.
func (s *SegmentWriter) Add(ctx context.Context, r *Record) error {
	rest := r.Value
	return s.AddFrom(ctx, r, len(rest), func(part []byte) error {
		rest = rest[copy(part, rest):]
		return nil
	})
}

// AddFrom writes a record whose value of size bytes, with its tail, next gives: it fills what it is handed. After an
// error the SegmentWriter can only be aborted.
func (s *SegmentWriter) AddFrom(ctx context.Context, r *Record, size int, next func(part []byte) error) error {
	head := *r
	head.Len = size
	if err := head.check(); err != nil {
		return fmt.Errorf("key %.64q: %w", r.Key, err)
	}
	whole := int64(mostHead + len(r.Key) + size)
	if s.file != nil && s.info.Bytes+int64(len(s.plain))+whole+whole/128+2*headerSize > s.w.most {
		if err := s.Close(); err != nil {
			return err
		}
	}
	if s.file == nil {
		if err := s.begin(ctx); err != nil {
			return err
		}
	}
	if len(s.plain)+mostHead+len(r.Key)+size > MaxBlock {
		if err := s.flush(); err != nil {
			return err
		}
	}
	part := min(size, MaxBlock-mostHead-len(r.Key)-len(s.plain))
	s.plain = appendPut(s.plain, r, size, part)
	s.records++
	if err := next(s.plain[len(s.plain)-part:]); err != nil {
		return err
	}
	for at := part; at < size; at += part {
		if err := s.flush(); err != nil {
			return err
		}
		part = min(size-at, MaxBlock-mostHead)
		s.plain = appendContinued(s.plain, part)
		s.records++
		if err := next(s.plain[len(s.plain)-part:]); err != nil {
			return err
		}
	}
	s.info.Records++
	s.bytes += int64(len(r.Key) + size)
	return nil
}

func (s *SegmentWriter) begin(ctx context.Context) error {
	s.w.mu.Lock()
	s.w.mu.next++
	n := s.w.mu.next
	s.w.mu.Unlock()
	if n > maxSegments {
		return fmt.Errorf("a snapshot has at most %d segments", maxSegments)
	}
	name := fmt.Sprintf("seg-%06d.kvs", n)
	f, err := s.w.dest.Create(ctx, s.w.dir+name)
	if err != nil {
		return fmt.Errorf("%s: %w", s.w.dir+name, err)
	}
	s.file, s.info, s.bytes = f, SegmentInfo{Name: name}, 0
	return nil
}

// flush writes the records so far as a block.
func (s *SegmentWriter) flush() error {
	if s.records == 0 {
		return nil
	}
	var err error
	if s.out, err = appendBlock(s.out[:0], s.plain, s.records); err != nil {
		return err
	}
	if _, err := s.file.Write(s.out); err != nil {
		return fmt.Errorf("%s: %w", s.w.dir+s.info.Name, err)
	}
	s.info.CRC = crc32.Update(s.info.CRC, castagnoli, s.out)
	s.info.Bytes += int64(len(s.out))
	s.plain, s.records = s.plain[:0], 0
	return nil
}

// Close ends the segment that was begun, if any: its records are in the snapshot. Another Add begins a new one.
func (s *SegmentWriter) Close() error {
	if s.file == nil {
		return nil
	}
	err := s.flush()
	if err == nil {
		if err = s.file.Commit(); err != nil {
			err = fmt.Errorf("%s: %w", s.w.dir+s.info.Name, err)
		}
	}
	if err != nil {
		return err
	}
	s.file = nil
	s.w.mu.Lock()
	defer s.w.mu.Unlock()
	s.w.mu.segments = append(s.w.mu.segments, s.info)
	s.w.mu.keys += s.info.Records
	s.w.mu.bytes += s.bytes
	return nil
}

// Abort forgets the segment that was begun, with all its records. After a Close it does nothing.
func (s *SegmentWriter) Abort() {
	if s.file != nil {
		s.file.Abort()
		s.file, s.plain, s.records = nil, s.plain[:0], 0
	}
}
