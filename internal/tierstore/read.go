package tierstore

import (
	"container/list"
	"context"
	"errors"
	"io"
	"io/fs"
	"sync"

	"github.com/cockroachdb/pebble/v2/vfs"
)

var scratch = sync.Pool{New: func() any { b := make([]byte, headSize+smallBody); return &b }}

// Get reads the object of id at at into body, whose length must be that of the object's. It waits for the disk, as one
// of 64 workers; ctx bounds the wait for these. Errors are ErrGone, a *CorruptError or a *DiskError, and those of ctx;
// body is undefined then.
func (s *Store) Get(ctx context.Context, at Addr, id Ident, body []byte) error {
	if err := s.worker(ctx); err != nil {
		return err
	}
	defer func() { <-s.slots }()
	return s.get(at, id, body)
}

func (s *Store) get(at Addr, id Ident, body []byte) error {
	p := scratch.Get().(*[]byte)
	defer scratch.Put(p)
	head, rest := (*p)[:headSize], body
	if len(body) <= smallBody {
		head, rest = (*p)[:headSize+len(body)], nil
	}
	g, buffered, err := s.locate(at, head, body)
	if err != nil {
		return err
	}
	if !buffered {
		if err := s.pread(g, at, head, rest); err != nil {
			return err
		}
	}
	e, bodySum, err := parseHead(head[:headSize], at, g.salt)
	if err != nil {
		return &CorruptError{File: fileName(g.number), Off: at.off(), Err: err}
	}
	if e.Ident != id || int(e.Len) != len(body) {
		return ErrGone
	}
	copy(body, head[headSize:])
	if sum(g.salt, body) != bodySum {
		return &CorruptError{File: fileName(g.number), Off: at.off(), Err: errSum}
	}
	return nil
}

// locate gives the segment that holds at. If the object is in buf, it is copied to head and to what body has more.
func (s *Store) locate(at Addr, head, body []byte) (g *segment, buffered bool, err error) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.mu.closed {
		return nil, false, ErrClosed
	}
	g, off := s.mu.segs[at.segment()], at.off()
	if g == nil || off < headerSize || off+objectSize(int64(len(body))) > g.end {
		return nil, false, ErrGone
	}
	if g != s.mu.active || off < s.mu.bufAt {
		return g, false, nil
	}
	b := s.mu.buf[off-s.mu.bufAt:]
	if n := copy(head, b); n == headSize {
		copy(body, b[n:])
	}
	return g, true, nil
}

// pread fills head from at on, then rest from behind it.
func (s *Store) pread(g *segment, at Addr, head, rest []byte) error {
	f, err := s.files.take(&s.opt, g.number)
	if errors.Is(err, fs.ErrNotExist) && s.freed(g) {
		return ErrGone
	}
	if err == nil {
		defer s.files.release(f)
		if err = readFull(f.File, head, at.off()); err == nil && len(rest) > 0 {
			err = readFull(f.File, rest, at.off()+int64(len(head)))
		}
	}
	if err != nil {
		return &DiskError{Op: "read", File: fileName(g.number), Effect: nothingRead, Err: err}
	}
	return nil
}

// freed reports whether a segment is no more, so that its file may be missing.
func (s *Store) freed(g *segment) bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.mu.segs[g.number] != g
}

// readFull fills b from off on. A file that ends before gives io.ErrUnexpectedEOF.
func readFull(f io.ReaderAt, b []byte, off int64) error {
	n, err := f.ReadAt(b, off)
	switch {
	case n == len(b):
		return nil
	case err == nil || err == io.EOF:
		return io.ErrUnexpectedEOF
	}
	return err
}

// files are those open for reads, maxOpen and one for each worker at most. The longest unused are closed.
type files struct {
	mu   sync.Mutex
	open map[uint64]*openFile
	used *list.List // of *openFile, the longest unused in front
}

// openFile is open while it is in files or has users.
type openFile struct {
	vfs.File
	number uint64
	users  int
	place  *list.Element // nil: it is not in files
}

// take opens the file of a segment. The caller releases it.
func (c *files) take(opt *Options, number uint64) (*openFile, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f := c.open[number]
	if f == nil {
		in, err := opt.FS.Open(opt.FS.PathJoin(opt.Folder, fileName(number)), vfs.RandomReadsOption)
		if err != nil {
			return nil, err
		}
		f = &openFile{File: in, number: number}
		f.place = c.used.PushBack(f)
		c.open[number] = f
		if len(c.open) > maxOpen {
			c.forgetLocked(c.used.Front().Value.(*openFile))
		}
	}
	f.users++
	c.used.MoveToBack(f.place)
	return f, nil
}

func (c *files) release(f *openFile) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if f.users--; f.users == 0 && f.place == nil {
		_ = f.Close() // it was only read
	}
}

// forgetLocked closes f as soon as nobody uses it.
func (c *files) forgetLocked(f *openFile) {
	c.used.Remove(f.place)
	delete(c.open, f.number)
	if f.place = nil; f.users == 0 {
		_ = f.Close() // it was only read
	}
}

// drop closes the file of a segment that is freed.
func (c *files) drop(number uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if f := c.open[number]; f != nil {
		c.forgetLocked(f)
	}
}

func (c *files) close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	var errs []error
	for _, f := range c.open {
		errs = append(errs, f.Close())
	}
	clear(c.open)
	return errors.Join(errs...)
}

// Region is the offset of an object's body among all bytes of a Store, as Read knows them.
func (a Addr) Region() uint64 { return uint64(a)*unit + headSize }

// Read fills b with the bytes of the files from off on, wherever one of them begins: those of segment n begin at n <<
// 26. Bytes that are not there, or not any more, are zeroes. Nothing is checked: readers judge by sums of their own.
// Read waits for the disk as Get does; b is undefined after an error, which is ErrClosed, a *DiskError or of ctx.
func (s *Store) Read(ctx context.Context, off uint64, b []byte) error {
	if err := s.worker(ctx); err != nil {
		return err
	}
	defer func() { <-s.slots }()
	for len(b) > 0 {
		n, err := s.readPart(off, b)
		if err != nil && !errors.Is(err, ErrGone) {
			return err
		}
		off, b = off+uint64(n), b[n:]
	}
	return nil
}

// readPart fills a first part of b: what one segment has of it, or zeroes up to where the next one may begin.
func (s *Store) readPart(off uint64, b []byte) (n int, err error) {
	number := off / MaxSegment
	zeroes := func() int {
		n := int(min(uint64(len(b)), (number+1)*MaxSegment-off))
		clear(b[:n])
		return n
	}
	s.mu.RLock()
	var g *segment
	for back := uint64(0); back < maxSpan && back <= number && g == nil; back++ {
		if x := s.mu.segs[number-back]; x != nil && uint64(x.span) > back {
			g = x
		}
	}
	if g == nil {
		s.mu.RUnlock()
		return zeroes(), nil
	}
	at := int64(off - g.number*MaxSegment)
	switch end := g.end; {
	case at >= end:
		s.mu.RUnlock()
		return zeroes(), nil
	case g == s.mu.active && at >= s.mu.bufAt:
		n = copy(b, s.mu.buf[at-s.mu.bufAt:])
		s.mu.RUnlock()
		return n, nil
	case g == s.mu.active:
		end = s.mu.bufAt
		fallthrough
	default:
		n = int(min(int64(len(b)), end-at))
	}
	s.mu.RUnlock()
	f, err := s.files.take(&s.opt, g.number)
	if err == nil {
		defer s.files.release(f)
		err = readFull(f.File, b[:n], at)
	}
	switch {
	case errors.Is(err, fs.ErrNotExist) && s.freed(g):
		return zeroes(), nil
	case err != nil:
		return 0, &DiskError{Op: "read", File: fileName(g.number), Effect: nothingRead, Err: err}
	}
	return n, nil
}
