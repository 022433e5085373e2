package archive

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"slices"
	"strings"
	"time"
)

// Snapshot is one whose manifest is there. Its methods may be called concurrently.
type Snapshot struct {
	Manifest
	dest Destination
	dir  string // with a slash at its end
	raw  []byte // the manifest's file
}

// Open opens a snapshot of a namespace. id "" is the newest.
func Open(ctx context.Context, d Destination, namespace, id string) (*Snapshot, error) {
	if err := CheckNamespace(namespace); err != nil {
		return nil, err
	}
	if id == "" {
		all, err := List(ctx, d, namespace)
		if err != nil {
			return nil, err
		}
		i := slices.IndexFunc(all, func(e Entry) bool { return e.Complete })
		if i < 0 {
			return nil, fmt.Errorf("%s: no snapshot of namespace %q", d, namespace)
		}
		id = all[i].ID
	}
	if err := CheckID(id); err != nil {
		return nil, err
	}
	s := &Snapshot{dest: d, dir: namespace + "/" + id + "/"}
	b, err := readAll(ctx, d, s.dir+ManifestName, maxManifest)
	if err != nil {
		return nil, fmt.Errorf("snapshot %s of namespace %q: %w", id, namespace, err)
	}
	m, err := parseManifest(b, namespace, id)
	if err != nil {
		return nil, &CorruptError{s.dir + ManifestName, -1, err}
	}
	s.Manifest, s.raw = *m, b
	return s, nil
}

// Segment is the records of a segment, in their order. It belongs to one goroutine.
type Segment struct {
	info SegmentInfo
	file io.ReadCloser
	name string

	r    *bufio.Reader
	off  int64 // of the block in memory, in the file
	next int64 // of the one behind it
	crc  uint32
	b    block
	left []byte // of the block's records
	n    int    // records that left has

	rec  Record // the last
	seen int64
	due  int // bytes of its value that stand in records behind it
}

// Segment begins to read segment i of the manifest's, which is to be closed.
func (s *Snapshot) Segment(ctx context.Context, i int) (*Segment, error) {
	info := s.Segments[i]
	f, err := s.dest.Read(ctx, s.dir+info.Name)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", s.dir+info.Name, err)
	}
	return newSegment(f, s.dir+info.Name, info), nil
}

func newSegment(f io.ReadCloser, name string, info SegmentInfo) *Segment {
	return &Segment{info: info, file: f, name: name, r: bufio.NewReaderSize(f, 64<<10)}
}

// Close gives back the file.
func (s *Segment) Close() error { return s.file.Close() }

func (s *Segment) corrupt(err error) error { return &CorruptError{s.name, s.off, err} }

// Next gives the next record, with what stands of its value in the same block. Value gives all of it. The error is
// io.EOF behind the last: then the segment was whole. The record is valid until the next call.
func (s *Segment) Next() (*Record, error) {
	for s.due > 0 { // nobody wanted it
		if _, err := s.part(); err != nil {
			return nil, err
		}
	}
	err := s.fill()
	if err != nil {
		return nil, err
	}
	kind, err := s.take(&s.rec)
	if err != nil {
		return nil, err
	}
	if kind != kindPut {
		return nil, s.corrupt(errors.New("a value goes on that has not begun"))
	}
	s.due = s.rec.Len - len(s.rec.Value)
	s.seen++
	return &s.rec, nil
}

// Value appends all of the last record's value, with its tail, to dst. It may be called once for each. dst grows with
// what is there, whatever the record says of its length.
func (s *Segment) Value(dst []byte) ([]byte, error) {
	dst = append(dst, s.rec.Value...)
	for s.due > 0 {
		p, err := s.part()
		if err != nil {
			return dst, err
		}
		dst = append(dst, p...)
	}
	return dst, nil
}

// part gives the next part of the last record's value.
func (s *Segment) part() ([]byte, error) {
	var r Record
	err := s.fill()
	if errors.Is(err, io.EOF) {
		return nil, s.corrupt(errors.New("the last value lacks its end"))
	}
	if err != nil {
		return nil, err
	}
	kind, err := s.take(&r)
	switch {
	case err != nil:
		return nil, err
	case kind != kindContinued:
		return nil, s.corrupt(errors.New("a record begins within the value of another"))
	case len(r.Value) > s.due:
		return nil, s.corrupt(fmt.Errorf("a value goes on for %d bytes, and %d are left", len(r.Value), s.due))
	}
	s.due -= len(r.Value)
	return r.Value, nil
}

// take takes the next record of the block.
func (s *Segment) take(r *Record) (kind byte, err error) {
	kind, n, err := parseRecord(s.left, r)
	if err != nil {
		return 0, s.corrupt(fmt.Errorf("byte %d of the block's records: %w", len(s.b.plain)-len(s.left), err))
	}
	s.left = s.left[n:]
	if s.n--; (s.n == 0) != (len(s.left) == 0) {
		return 0, s.corrupt(fmt.Errorf("a block of %d records has others behind them, or fewer", s.b.records))
	}
	return kind, nil
}

// fill has the next block in memory if nothing is left of the last. io.EOF: there is none, as it should be.
func (s *Segment) fill() error {
	if s.n > 0 {
		return nil
	}
	s.off = s.next
	err := s.b.read(s.r)
	switch {
	case errors.Is(err, io.EOF) && s.due == 0:
		return s.whole()
	case errors.Is(err, io.EOF):
		return io.EOF // which says the rest
	case err != nil:
		return s.corrupt(err)
	}
	s.next += int64(len(s.b.raw))
	if s.next > s.info.Bytes {
		return s.corrupt(fmt.Errorf("it is longer than the %d bytes that the manifest says", s.info.Bytes))
	}
	s.crc = crc32.Update(s.crc, castagnoli, s.b.raw)
	s.left, s.n = s.b.plain, s.b.records
	return nil
}

// whole is io.EOF if all is there that the manifest says.
func (s *Segment) whole() error {
	switch {
	case s.next != s.info.Bytes:
		return &CorruptError{s.name, s.next, fmt.Errorf("it ends here, and has %d bytes by the manifest", s.info.Bytes)}
	case s.seen != s.info.Records:
		return &CorruptError{s.name, -1, fmt.Errorf("%d records, and %d by the manifest", s.seen, s.info.Records)}
	case s.crc != s.info.CRC:
		return &CorruptError{s.name, -1, fmt.Errorf("CRC %08x, and %08x by the manifest", s.crc, s.info.CRC)}
	}
	return io.EOF
}

// Entry is a snapshot that List has found.
type Entry struct {
	Namespace string    `json:"namespace"`
	ID        string    `json:"id"`
	Begun     time.Time `json:"begun"`
	// Complete: it has a manifest. Another is under way, or was interrupted.
	Complete bool  `json:"complete"`
	Bytes    int64 `json:"bytes"` // of its files
	// Changed is when a file was last written.
	Changed time.Time `json:"changed"`
}

// List gives the snapshots of a namespace, or of all with "", by namespace, the newest first.
func List(ctx context.Context, d Destination, namespace string) ([]Entry, error) {
	prefix := ""
	if namespace != "" {
		if err := CheckNamespace(namespace); err != nil {
			return nil, err
		}
		prefix = namespace + "/"
	}
	files, err := d.List(ctx, prefix)
	if err != nil {
		return nil, err
	}
	var all []Entry
	for _, f := range files {
		parts := strings.Split(f.Name, "/")
		if len(parts) != 3 || CheckNamespace(parts[0]) != nil {
			continue // somebody else's
		}
		begun, err := IDTime(parts[1])
		if err != nil {
			continue
		}
		if n := len(all); n == 0 || all[n-1].Namespace != parts[0] || all[n-1].ID != parts[1] {
			all = append(all, Entry{Namespace: parts[0], ID: parts[1], Begun: begun})
		}
		e := &all[len(all)-1]
		e.Bytes += f.Bytes
		e.Complete = e.Complete || parts[2] == ManifestName
		if f.Time.After(e.Changed) {
			e.Changed = f.Time
		}
	}
	slices.SortStableFunc(all, func(a, b Entry) int {
		if c := strings.Compare(a.Namespace, b.Namespace); c != 0 {
			return c
		}
		return strings.Compare(b.ID, a.ID)
	})
	return all, nil
}

// Copy copies a snapshot to another destination, and looks at all of it meanwhile. The manifest goes last. A copy that
// was interrupted goes on: files that are there are not copied again. done, if not nil, is told of bytes.
func Copy(ctx context.Context, s *Snapshot, to Destination, done func(n int64)) error {
	err := to.PutIfAbsent(ctx, s.dir+startedName, []byte("{}\n"))
	if err != nil && !exists(err) {
		return fmt.Errorf("%s: %w", to, err)
	}
	files, err := to.List(ctx, s.dir)
	if err != nil {
		return err
	}
	there := make(map[string]bool)
	for _, f := range files {
		there[f.Name] = true
	}
	for _, info := range s.Segments {
		if err := s.copySegment(ctx, info, to, there[s.dir+info.Name]); err != nil {
			return err
		}
		if done != nil {
			done(info.Bytes)
		}
	}
	if err := wholeAt(ctx, to, s.dir, s.Segments); err != nil {
		return err
	}
	if err := to.PutIfAbsent(ctx, s.dir+ManifestName, s.raw); err != nil && !exists(err) {
		return fmt.Errorf("%s: %w", to, err)
	}
	// Another snapshot of that id may be there.
	b, err := readAll(ctx, to, s.dir+ManifestName, maxManifest)
	if err == nil && !bytes.Equal(b, s.raw) {
		err = fmt.Errorf("%s: %s is there already, and another", to, s.dir+ManifestName)
	}
	return err
}

// copySegment copies a segment, or looks at the copy that is there.
func (s *Snapshot) copySegment(ctx context.Context, info SegmentInfo, to Destination, there bool) error {
	name := s.dir + info.Name
	if there {
		r, err := to.Read(ctx, name)
		if err != nil {
			return err
		}
		return readSegment(newSegment(r, to.String()+"/"+name, info))
	}
	in, err := s.dest.Read(ctx, name)
	if err != nil {
		return err
	}
	out, err := to.Create(ctx, name)
	if err != nil {
		return errors.Join(err, in.Close())
	}
	defer out.Abort()
	tee := struct {
		io.Reader
		io.Closer
	}{io.TeeReader(io.LimitReader(in, info.Bytes+1), out), in}
	if err := readSegment(newSegment(tee, name, info)); err != nil {
		return err
	}
	return out.Commit()
}

// readSegment reads all of a segment, and closes it.
func readSegment(s *Segment) error {
	for {
		if _, err := s.Next(); errors.Is(err, io.EOF) {
			return s.Close()
		} else if err != nil {
			return errors.Join(err, s.Close())
		}
	}
}
