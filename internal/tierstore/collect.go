package tierstore

import (
	"context"
	"errors"
	"fmt"
)

// Collector says which objects are alive, and lets what names them name their copies. Its methods may wait.
type Collector interface {
	// Closed is told, before it is asked for anything, that nothing is appended to the segment any more. It returns
	// when each Append that began before has been named, or given up: until then Live would not know its object. An
	// error keeps the segment.
	Closed(ctx context.Context, number uint64) error
	// Live reports whether something names the object at e.At. An error keeps the object.
	Live(ctx context.Context, e Entry) (bool, error)
	// Moved is told that the object is at to as well, on disk. It lets whatever names e.At name to instead. used is
	// false if nothing names to; Live is asked again in any case. The caller need not Drop either of them.
	Moved(ctx context.Context, e Entry, to Addr) (used bool, err error)
}

// Collect moves the live objects out of a segment and frees it. Nothing more is appended to it. ErrKept, alone or
// beside other errors, says that objects which are alive, or may be, keep the segment: come back. A segment is freed
// only when its objects' copies are on disk and nothing names the objects. A second collection waits for the first.
func (s *Store) Collect(ctx context.Context, number uint64, c Collector) error {
	s.collectMu.Lock()
	defer s.collectMu.Unlock()
	g, err := s.closeSegment(number)
	if err != nil {
		return err
	}
	if err := c.Closed(ctx, number); err != nil {
		return errors.Join(ErrKept, err)
	}
	entries, err := s.entriesOf(g)
	if err != nil {
		return err
	}
	if err := s.reserve(ctx, entries, c); err != nil {
		return err
	}
	var kept []error
	for len(entries) > 0 && ctx.Err() == nil {
		n, size := 0, int64(0)
		for ; n < len(entries) && (n == 0 || size < syncBytes); n++ {
			size += objectSize(int64(entries[n].Len))
		}
		kept = append(kept, s.moveSome(ctx, entries[:n], c)...)
		if entries = entries[n:]; len(kept) > 100 {
			break
		}
	}
	if err := ctx.Err(); err != nil {
		return errors.Join(ErrKept, err)
	}
	if len(kept) > 0 {
		return errors.Join(append([]error{ErrKept}, kept...)...)
	}
	return s.remove(g)
}

// reserve refuses a collection that the limit would stop half way. That would take room which the limit leaves for
// collections, and free nothing.
func (s *Store) reserve(ctx context.Context, entries []Entry, c Collector) error {
	need := int64(2 * (headerSize + footerSize))
	for i := range entries {
		if live, err := c.Live(ctx, entries[i]); live || err != nil {
			need += objectSize(int64(entries[i].Len)) + entrySize
		}
	}
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.mu.used+need > s.opt.Limit {
		return errors.Join(ErrKept, ErrFull)
	}
	return nil
}

// closeSegment gives a segment to which nothing is appended any more, and behind whose number there is another.
func (s *Store) closeSegment(number uint64) (*segment, error) {
	s.appendMu.Lock()
	defer s.appendMu.Unlock()
	s.mu.RLock()
	g, closed := s.mu.segs[number], s.mu.closed
	last := true
	for other := range s.mu.segs {
		last = last && other <= number
	}
	s.mu.RUnlock()
	switch {
	case closed:
		return nil, ErrClosed
	case g == nil:
		return nil, ErrGone
	case g.lost:
		return nil, errors.Join(ErrKept, &CorruptError{File: fileName(number), Err: errHeader})
	case last || g == s.mu.active:
		if err := s.mayAppend(0, s.opt.Limit); err != nil {
			return nil, err
		}
		if err := s.replaceActive(0); err != nil {
			return nil, err
		}
	}
	return g, nil
}

// entriesOf lists the objects of a segment that is closed.
func (s *Store) entriesOf(g *segment) ([]Entry, error) {
	f, err := s.files.take(&s.opt, g.number)
	if err != nil {
		return nil, &DiskError{Op: "read", File: fileName(g.number), Effect: nothingFreed, Err: err}
	}
	defer s.files.release(f)
	if g.table > 0 {
		b := make([]byte, g.objects*entrySize+footerSize)
		if err := readFull(f.File, b, g.table); err != nil {
			return nil, &DiskError{Op: "read", File: fileName(g.number), Effect: nothingFreed, Err: err}
		}
		t, ok := parseFooter(b[len(b)-footerSize:], g.number, g.size)
		if b = b[:len(b)-footerSize]; ok && t.tableSum == sum(g.salt, b) {
			out := make([]Entry, 0, g.objects)
			for ; len(b) > 0; b = b[entrySize:] {
				out = append(out, parseEntry(b))
			}
			return out, nil
		}
	}
	probe := segment{number: g.number, salt: g.salt, size: g.size}
	entries, damaged, err := probe.scan(f.File)
	if err != nil {
		return nil, &DiskError{Op: "read", File: fileName(g.number), Effect: nothingFreed, Err: err}
	}
	if len(damaged) > 0 { // an object of the lost table may be there
		return nil, errors.Join(ErrKept, damaged[0])
	}
	if len(entries) != g.objects {
		return nil, errors.Join(ErrKept, &CorruptError{File: fileName(g.number), Off: g.table, Err: errSum})
	}
	return entries, nil
}

// copied is an object with its copy.
type copied struct {
	Entry
	to Addr
}

// moveSome moves what is alive of entries, and gives a reason for each object that stays.
func (s *Store) moveSome(ctx context.Context, entries []Entry, c Collector) (kept []error) {
	keep := func(e *Entry, err error) { kept = append(kept, fmt.Errorf("object at %#x: %w", e.At, err)) }
	var copies []copied
	for i := range entries {
		e := &entries[i]
		live, err := c.Live(ctx, *e)
		if err != nil {
			keep(e, err)
			continue
		}
		if !live {
			continue
		}
		to, err := s.copy(ctx, e)
		if err != nil {
			keep(e, err)
			continue
		}
		copies = append(copies, copied{*e, to})
	}
	if len(copies) == 0 {
		return kept
	}
	if err := s.Sync(ctx); err != nil {
		return append(kept, err)
	}
	for i := range copies {
		e := &copies[i]
		used, err := c.Moved(ctx, e.Entry, e.to)
		if err != nil { // the copy may be named
			keep(&e.Entry, err)
			continue
		}
		if !used {
			s.Drop(e.to, e.Len)
		}
		if live, err := c.Live(ctx, e.Entry); err != nil || live {
			keep(&e.Entry, errors.Join(ErrKept, err))
		} else if used {
			s.Drop(e.At, e.Len) // if the segment stays for others, this is garbage of it
		}
	}
	return kept
}

// copy appends an object once more, with what the limit reserves for this.
func (s *Store) copy(ctx context.Context, e *Entry) (Addr, error) {
	body := make([]byte, e.Len)
	if err := s.Get(ctx, e.At, e.Ident, body); err != nil {
		return 0, err
	}
	moved := *e
	to, full, err := s.add(&moved, body, s.opt.Limit)
	if err != nil {
		return 0, err
	}
	s.mu.Lock()
	s.mu.stats.Moved += uint64(objectSize(int64(e.Len)))
	s.mu.Unlock()
	if full {
		s.syncNow()
	}
	return to, nil
}

// remove frees a segment. A reader that has its file open still finds the object that it looks for.
func (s *Store) remove(g *segment) error {
	s.mu.Lock()
	delete(s.mu.segs, g.number) // first: a reader that misses the file looks here
	s.mu.Unlock()
	err := s.opt.FS.Remove(s.opt.FS.PathJoin(s.opt.Folder, fileName(g.number)))
	s.mu.Lock()
	if err == nil {
		s.mu.used -= g.size
	} else {
		s.mu.segs[g.number] = g
	}
	s.mu.Unlock()
	if err != nil {
		return &DiskError{Op: "remove", File: fileName(g.number), Effect: nothingFreed, Err: err}
	}
	s.files.drop(g.number)
	return nil
}
