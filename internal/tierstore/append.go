package tierstore

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// Append copies body to the end of the folder and gives its address. The object can be read at once; [Store.Sync] makes
// it outlive the machine. An error says that nothing was appended.
func (s *Store) Append(id Ident, expiry uint64, body []byte) (Addr, error) {
	at, full, err := s.add(&Entry{Ident: id, Len: uint32(min(len(body), MaxBody)), Expiry: expiry}, body,
		s.opt.Limit-s.opt.SegmentSize)
	if full {
		s.syncNow() // its error is that of Sync, for the object is there
	}
	return at, err
}

// add appends e's body if no more than limit bytes are used then. full asks the caller for a sync.
func (s *Store) add(e *Entry, body []byte, limit int64) (at Addr, full bool, err error) {
	if len(body) == 0 || len(body) > MaxBody {
		return 0, false, fmt.Errorf("a body of %d bytes, want 1..%d; %s", len(body), MaxBody, nothingAppended)
	}
	size := objectSize(int64(len(body)))
	s.appendMu.Lock()
	defer s.appendMu.Unlock()
	if err := s.mayAppend(size, limit); err != nil {
		return 0, false, err
	}
	if g := s.mu.active; g == nil || g.end+size > s.opt.SegmentSize {
		if err := s.replaceActive(size); err != nil {
			return 0, false, err
		}
	}
	g := s.mu.active
	e.At = addrOf(g.number, g.end)
	if len(s.mu.buf)+int(size) > bufBytes {
		if err := s.flush(); err != nil {
			return 0, false, err
		}
	}
	// Readers look at buf alone, which ends before what is written here.
	if size <= bufBytes {
		b := s.spare[len(s.mu.buf) : len(s.mu.buf)+int(size)]
		clear(b[headSize+copy(b[headSize:], body):])
		putHead(b, e, g.salt, sum(g.salt, body))
	} else if err := s.writeLong(g, e, body); err != nil {
		return 0, false, err
	}
	return e.At, s.placed(e, size), nil
}

// mayAppend refuses an append. appendMu is held.
func (s *Store) mayAppend(size, limit int64) error {
	s.mu.RLock()
	defer s.mu.RUnlock()
	switch {
	case s.mu.closed:
		return ErrClosed
	case s.mu.failed != nil:
		return fmt.Errorf("%s, since the folder takes no more: %w", nothingAppended, s.mu.failed)
	case s.mu.used+size+entrySize+headerSize+footerSize > limit:
		return ErrFull
	}
	return nil
}

// placed makes an object visible that is in spare, or in the file. It reports whether much waits for a sync.
func (s *Store) placed(e *Entry, size int64) (full bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	g := s.mu.active
	if size <= bufBytes {
		s.mu.buf = s.spare[:len(s.mu.buf)+int(size)]
	} else {
		s.mu.bufAt += size
	}
	g.end += size
	g.live += size
	g.size += size + entrySize
	g.objects++
	g.entries = append(g.entries, *e)
	s.mu.used += size + entrySize
	s.mu.stats.Written += uint64(size)
	if s.mu.appended == s.mu.durable {
		select {
		case s.kick <- struct{}{}:
		default:
		}
	}
	s.mu.appended += uint64(size)
	return s.mu.appended-s.mu.durable >= syncBytes
}

// writeLong writes an object that buf cannot hold. buf is empty, and appendMu held.
func (s *Store) writeLong(g *segment, e *Entry, body []byte) error {
	var head [headSize]byte
	putHead(head[:], e, g.salt, sum(g.salt, body))
	_, err := s.out.WriteAt(head[:], g.end)
	if err == nil {
		_, err = s.out.WriteAt(body, g.end+headSize)
	}
	return s.failWrite("write", g.number, nothingAppended, err)
}

// failWrite ends appends if err is one: what the file holds is unknown from now on, and a later sync could lie.
func (s *Store) failWrite(op string, number uint64, effect string, err error) error {
	if err == nil {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.failed == nil {
		s.mu.failed = &DiskError{Op: op, File: fileName(number), Effect: unknownSync, Err: err}
		close(s.mu.synced)
		s.mu.synced = make(chan struct{})
	}
	return &DiskError{Op: op, File: fileName(number), Effect: effect, Err: err}
}

// flush writes buf to the file. appendMu is held. After an error readers still find its objects in buf.
func (s *Store) flush() error {
	if len(s.mu.buf) == 0 {
		return nil
	}
	if s.out == nil { // sealActive has closed it after a failure, and buf serves readers alone
		s.mu.RLock()
		defer s.mu.RUnlock()
		return s.mu.failed
	}
	if _, err := s.out.WriteAt(s.mu.buf, s.mu.bufAt); err != nil {
		return s.failWrite("write", s.mu.active.number, nothingAppended, err)
	}
	s.mu.Lock()
	s.mu.bufAt += int64(len(s.mu.buf))
	s.mu.buf = s.spare[:0]
	s.mu.Unlock()
	return nil
}

// Sync returns when everything that was appended before is on disk. An error says that this is unknown; only that of a
// context may pass, since a folder whose disk failed takes no more.
func (s *Store) Sync(ctx context.Context) error {
	s.mu.RLock()
	target := s.mu.appended
	for s.mu.durable < target && s.mu.failed == nil {
		synced := s.mu.synced
		s.mu.RUnlock()
		select {
		case <-ctx.Done():
			return fmt.Errorf("whether the last appends are on disk is unknown: %w", ctx.Err())
		case <-synced:
		}
		s.mu.RLock()
	}
	defer s.mu.RUnlock()
	if s.mu.durable < target {
		return s.mu.failed
	}
	return nil
}

// syncer syncs what was appended SyncDelay ago.
func (s *Store) syncer() {
	defer close(s.ended)
	timer := time.NewTimer(s.opt.SyncDelay)
	timer.Stop()
	defer timer.Stop()
	for {
		select {
		case <-s.done:
			return
		case <-s.kick:
		}
		timer.Reset(s.opt.SyncDelay)
		select {
		case <-s.done:
			return
		case <-timer.C:
		}
		s.syncNow()
	}
}

// syncNow makes all appends durable. An error is kept in failed.
func (s *Store) syncNow() {
	s.appendMu.Lock()
	err := s.flush()
	g, upTo, out := s.mu.active, s.mu.appended, s.out
	s.syncMu.Lock()
	defer s.syncMu.Unlock()
	s.appendMu.Unlock()
	if err != nil || g == nil || out == nil {
		return
	}
	s.mu.RLock()
	nothing := s.mu.durable >= upTo || s.mu.failed != nil
	s.mu.RUnlock()
	if nothing {
		return
	}
	if s.failWrite("sync", g.number, unknownSync, out.SyncData()) == nil {
		dropCache(out)
		s.madeDurable(upTo)
	}
}

// madeDurable wakes those that wait for the first upTo bytes.
func (s *Store) madeDurable(upTo uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.stats.Syncs++
	s.mu.durable = max(s.mu.durable, upTo)
	close(s.mu.synced)
	s.mu.synced = make(chan struct{})
	if s.mu.durable < s.mu.appended { // appended during the sync
		select {
		case s.kick <- struct{}{}:
		default:
		}
	}
}

// replaceActive seals the active segment, if there is one, and makes another, for an object of size bytes. appendMu is
// held.
func (s *Store) replaceActive(size int64) error {
	if err := s.sealActive(); err != nil {
		return err
	}
	if s.spare == nil {
		s.spare = make([]byte, bufBytes)
	}
	span := uint32((headerSize + size + MaxSegment - 1) / MaxSegment)
	number := s.mu.next
	if number+uint64(span) > maxSegments {
		return fmt.Errorf("segment number %d is the last; %s", number, nothingAppended)
	}
	s.mu.Lock()
	s.mu.next += uint64(span) // burnt, even if the file cannot be made
	s.mu.Unlock()
	h := header{volume: s.opt.Volume, namespace: s.opt.Namespace, seed: s.opt.HashSeed, number: number, span: span,
		salt: rand.Uint32()}
	out, err := s.create(&h)
	if err != nil {
		return &DiskError{Op: "create", File: fileName(number), Effect: nothingAppended, Err: err}
	}
	s.syncMu.Lock()
	s.out = out
	s.syncMu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	g := &segment{number: number, salt: h.salt, span: span, end: headerSize, size: headerSize + footerSize}
	s.mu.segs[number], s.mu.active = g, g
	s.mu.used += g.size
	s.mu.buf, s.mu.bufAt = s.spare[:0], headerSize
	return nil
}

// create makes a segment's file. Header and name are on disk before the caller gives out an address.
func (s *Store) create(h *header) (vfs.File, error) {
	name := s.opt.FS.PathJoin(s.opt.Folder, fileName(h.number))
	out, err := s.opt.FS.OpenReadWrite(name, vfs.WriteCategoryUnspecified)
	if err != nil {
		return nil, err
	}
	if _, err = out.WriteAt(h.encode(), 0); err == nil {
		err = out.Sync()
	}
	if err == nil {
		err = syncFolder(&s.opt, s.opt.Folder)
	}
	if err != nil {
		return nil, errors.Join(err, out.Close(), s.opt.FS.Remove(name))
	}
	return out, nil
}

// sealActive writes what is left of the active segment and its table, and closes it. appendMu is held. Afterwards there
// is no active segment, unless its file could not be written: that one stays for readers of buf.
func (s *Store) sealActive() error {
	g := s.mu.active
	if g == nil {
		return nil
	}
	s.syncMu.Lock()
	defer s.syncMu.Unlock()
	if err := s.mu.failed; err != nil {
		if s.out != nil {
			err = errors.Join(err, s.out.Close())
			s.out = nil
		}
		return err
	}
	if err := s.flush(); err != nil {
		return err
	}
	err := s.out.SyncData() // the objects first: a footer vouches for them
	if err == nil {
		err = writeTable(s.out, g, g.end, g.entries)
	}
	if err == nil {
		err = s.out.Sync()
	}
	if err = s.failWrite("seal", g.number, nothingAppended, err); err != nil {
		return err
	}
	dropCache(s.out)
	s.mu.Lock()
	g.table, g.entries, s.mu.active = g.end, nil, nil
	upTo := s.mu.appended
	s.mu.Unlock()
	s.madeDurable(upTo)
	out := s.out
	s.out = nil
	if err := out.Close(); err != nil {
		return &DiskError{Op: "close", File: fileName(g.number), Effect: nothingAppended, Err: err}
	}
	return nil
}

// writeTable writes the table of entries and a footer to out, from byte table on.
func writeTable(out vfs.File, g *segment, table int64, entries []Entry) error {
	b := make([]byte, 0, len(entries)*entrySize+footerSize)
	f := footer{count: uint32(len(entries)), span: g.span, table: table, end: g.end, number: g.number, salt: g.salt}
	for i := range entries {
		b = appendEntry(b, &entries[i])
		f.live += objectSize(int64(entries[i].Len))
	}
	f.tableSum = sum(g.salt, b)
	_, err := out.WriteAt(f.append(b), table)
	return err
}
