package tierstore

import (
	"bufio"
	"container/list"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"slices"

	"github.com/cockroachdb/pebble/v2/vfs"
	"golang.org/x/sys/unix"
)

// Open opens a folder. A tail that a crash has torn is cut off; damaged lists blocks that are not as they were written,
// although objects behind them are. Their objects are lost and all others there. The folder is locked until Close.
// An error says that nothing was opened: a file is of another volume or version, or cannot be read.
func Open(opt Options) (s *Store, damaged []*CorruptError, err error) {
	opt.ensureDefaults()
	if err := opt.validate(); err != nil {
		return nil, nil, err
	}
	if err := makeFolder(&opt); err != nil {
		return nil, nil, &DiskError{Op: "make", File: opt.Folder, Effect: notOpened, Err: err}
	}
	unlock, err := opt.FS.Lock(opt.FS.PathJoin(opt.Folder, "LOCK"))
	if err != nil {
		return nil, nil, &DiskError{Op: "lock", File: "LOCK", Effect: notOpened, Err: err}
	}
	s = &Store{
		opt: opt, unlck: unlock, slots: make(chan struct{}, workers), kick: make(chan struct{}, 1),
		done: make(chan struct{}), ended: make(chan struct{}),
		files: files{open: make(map[uint64]*openFile), used: list.New()},
	}
	s.mu.segs, s.mu.next, s.mu.synced = make(map[uint64]*segment), 1, make(chan struct{})
	if damaged, err = s.load(); err != nil {
		return nil, nil, errors.Join(err, unlock.Close())
	}
	go s.syncer()
	return s, damaged, nil
}

// load finds the segments. An empty one goes, unless it has the highest number: no number comes twice.
func (s *Store) load() (damaged []*CorruptError, err error) {
	names, err := s.opt.FS.List(s.opt.Folder)
	if err == nil {
		err = syncFolder(&s.opt, s.opt.Folder) // so that the highest number outlives what is freed below it
	}
	if err != nil {
		return nil, &DiskError{Op: "list", File: s.opt.Folder, Effect: notOpened, Err: err}
	}
	slices.Sort(names)
	var empty []*segment
	for _, name := range names {
		number, ok := parseName(name)
		if !ok {
			continue
		}
		g, bad, err := s.loadSegment(number)
		if err != nil {
			return nil, err
		}
		if damaged = append(damaged, bad...); g.objects == 0 && len(bad) == 0 {
			empty = append(empty, g)
		}
		s.mu.segs[number] = g
		s.mu.used += g.size
		s.mu.next = max(s.mu.next, number+uint64(g.span))
	}
	for _, g := range empty {
		if g.number+uint64(g.span) < s.mu.next {
			if err := s.remove(g); err != nil {
				return nil, err
			}
		}
	}
	return damaged, nil
}

// loadSegment reads a segment's header and footer, and scans what has none.
func (s *Store) loadSegment(number uint64) (g *segment, damaged []*CorruptError, err error) {
	name := fileName(number)
	diskErr := func(err error) error { return &DiskError{Op: "read", File: name, Effect: notOpened, Err: err} }
	f, err := s.opt.FS.OpenReadWrite(s.opt.FS.PathJoin(s.opt.Folder, name), vfs.WriteCategoryUnspecified)
	if err != nil {
		return nil, nil, diskErr(err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, nil, diskErr(err)
	}
	g = &segment{number: number, size: info.Size(), span: uint32(max(1, min(info.Size()/MaxSegment+1, maxSpan)))}
	front, back := make([]byte, min(headerSize, g.size)), make([]byte, min(footerSize, g.size))
	if err := errors.Join(readFull(f, front, 0), readFull(f, back, g.size-int64(len(back)))); err != nil {
		return nil, nil, diskErr(err)
	}
	h, whole, err := parseHeader(front)
	if err != nil {
		return nil, nil, &CorruptError{File: name, Err: err}
	}
	if whole && (h.volume != s.opt.Volume || h.namespace != s.opt.Namespace || h.seed != s.opt.HashSeed ||
		h.number != number || h.span == 0 || h.span > maxSpan) {
		return nil, nil, &CorruptError{File: name, Err: fmt.Errorf("it is segment %d of volume %d, namespace %d, with "+
			"hash seed %#x and %d numbers", h.number, h.volume, h.namespace, h.seed, h.span)}
	}
	if len(back) == footerSize && g.size >= headerSize+footerSize {
		if t, ok := parseFooter(back, number, g.size); ok && (!whole || t.salt == h.salt && t.span == h.span) {
			g.salt, g.span, g.end, g.table = t.salt, max(1, min(t.span, maxSpan)), t.end, t.table
			g.objects, g.live = int(t.count), t.live
			return g, nil, nil
		}
	}
	if !whole {
		g.end = headerSize
		if g.lost = g.size > headerSize; g.lost { // a header is synced before anything follows it
			damaged = append(damaged, &CorruptError{File: name, Err: errHeader})
		}
		return g, damaged, nil
	}
	g.salt, g.span = h.salt, h.span
	entries, damaged, err := g.scan(f)
	if err != nil {
		return nil, nil, diskErr(err)
	}
	return g, damaged, s.sealAgain(f, g, entries)
}

// sealAgain gives a segment that was scanned a table, so that the next Open need not scan it. A full disk may do
// without.
func (s *Store) sealAgain(f vfs.File, g *segment, entries []Entry) error {
	if len(entries) == 0 {
		return nil
	}
	table := (g.size + unit - 1) &^ (unit - 1)
	err := f.Sync() // the objects first: they may be of a process that ended, and a footer vouches for them
	if err != nil {
		return &DiskError{Op: "sync", File: fileName(g.number), Effect: notOpened, Err: err}
	}
	err = writeTable(f, g, table, entries)
	if err == nil {
		err = f.Sync()
	}
	if errors.Is(err, unix.ENOSPC) {
		return nil
	}
	if err != nil {
		return &DiskError{Op: "seal", File: fileName(g.number), Effect: notOpened, Err: err}
	}
	g.table = table
	g.size = table + int64(len(entries))*entrySize + footerSize
	return nil
}

// scan finds the objects of a segment by their heads, and sets end, objects and live. damaged is what is unreadable
// before the last of them; behind it a crash has torn the tail.
func (g *segment) scan(f io.ReaderAt) (entries []Entry, damaged []*CorruptError, err error) {
	in := bufio.NewReaderSize(io.NewSectionReader(f, headerSize, max(g.size-headerSize, 0)),
		int(max(unit, min(g.size, bufBytes))))
	g.end, g.objects, g.live = headerSize, 0, 0
	var head [headSize]byte
	var bad *CorruptError
	for off := int64(headerSize); ; {
		if off >= MaxSegment {
			break // no object begins here
		}
		if _, err := io.ReadFull(in, head[:]); err == io.EOF || err == io.ErrUnexpectedEOF {
			break
		} else if err != nil {
			return nil, nil, err
		}
		e, bodySum, why := parseHead(head[:], addrOf(g.number, off), g.salt)
		size := int64(headSize)
		if why == nil {
			size = objectSize(int64(e.Len))
			got, err := g.sumOf(in, int64(e.Len), size-headSize)
			if err == io.EOF {
				break
			} else if err != nil {
				return nil, nil, err
			}
			if got != bodySum {
				why = errSum
			}
		}
		if why != nil {
			if bad == nil {
				bad = &CorruptError{File: fileName(g.number), Off: off, Err: why}
			}
		} else {
			if bad != nil {
				damaged, bad = append(damaged, bad), nil
			}
			entries = append(entries, e)
			g.end, g.objects, g.live = off+size, g.objects+1, g.live+size
		}
		off += size
	}
	return entries, damaged, nil
}

// sumOf reads a body with its padding and gives its CRC. io.EOF says that the body is cut; the padding may be.
func (g *segment) sumOf(in *bufio.Reader, body, padded int64) (uint32, error) {
	crc := g.salt
	for left := body; left > 0; {
		b, err := in.Peek(int(min(left, int64(in.Size()))))
		if len(b) == 0 {
			return 0, err
		}
		crc = crc32.Update(crc, castagnoli, b)
		left -= int64(len(b))
		if _, err := in.Discard(len(b)); err != nil {
			return 0, err
		}
	}
	if _, err := in.Discard(int(padded - body)); err != nil && err != io.EOF {
		return 0, err
	}
	return crc, nil
}

// makeFolder makes the folder, and lets its name outlive a power cut. If it were lost, numbers of segments would
// come twice.
func makeFolder(opt *Options) error {
	parents := []string{opt.FS.PathDir(opt.Folder)}
	for dir := parents[0]; ; dir = parents[len(parents)-1] {
		if _, err := opt.FS.Stat(dir); err == nil || opt.FS.PathDir(dir) == dir {
			break
		}
		parents = append(parents, opt.FS.PathDir(dir))
	}
	if err := opt.FS.MkdirAll(opt.Folder, 0o700); err != nil {
		return err
	}
	for _, dir := range parents {
		if err := syncFolder(opt, dir); err != nil {
			return err
		}
	}
	return nil
}

// syncFolder makes the names in a folder durable.
func syncFolder(opt *Options, folder string) error {
	d, err := opt.FS.OpenDir(folder)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// dropCache tells the kernel that the file's pages will not be read soon: memory is the cache above the tier.
func dropCache(f vfs.File) {
	if fd := f.Fd(); fd != vfs.InvalidFd {
		_ = unix.Fadvise(int(fd), 0, 0, unix.FADV_DONTNEED) // it is advice
	}
}
