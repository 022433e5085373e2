package raftstore

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/hashicorp/raft"
)

var (
	_ raft.LogStore          = (*Store)(nil)
	_ raft.MonotonicLogStore = (*Store)(nil)
	_ raft.StableStore       = (*Store)(nil)
)

// entryVersion heads every stored log entry.
const entryVersion = 1

// entryHeader is the length in bytes of what precedes a stored entry's
// extensions and data; the index is in the key. Integers are little-endian.
//
//	0     1     2           10            18          22
//	+-----+-----+-----------+-------------+-----------+------------+------+
//	| ver | type| term      | appended at | ext len   | extensions | data |
//	+-----+-----+-----------+-------------+-----------+------------+------+
//
//	appended at  nanoseconds since 1970; 0 when unknown
//
// Pebble checksums its blocks, so the entry has no checksum of its own.
const entryHeader = 22

func logKey(index uint64) []byte {
	return binary.BigEndian.AppendUint64([]byte{spaceLog}, index)
}

func appendEntry(b []byte, l *raft.Log) []byte {
	b = append(b, entryVersion, byte(l.Type))
	b = binary.LittleEndian.AppendUint64(b, l.Term)
	var at int64
	if !l.AppendedAt.IsZero() {
		at = l.AppendedAt.UnixNano()
	}
	b = binary.LittleEndian.AppendUint64(b, uint64(at))
	b = binary.LittleEndian.AppendUint32(b, uint32(len(l.Extensions)))
	b = append(b, l.Extensions...)
	return append(b, l.Data...)
}

func parseEntry(index uint64, b []byte, l *raft.Log) error {
	bad := func(why string) error {
		return &CorruptError{What: fmt.Sprintf("log entry %d", index), Why: why}
	}
	if len(b) < entryHeader {
		return bad(fmt.Sprintf("%d bytes, want at least %d", len(b), entryHeader))
	}
	if b[0] != entryVersion {
		return bad(fmt.Sprintf("version %d, want %d", b[0], entryVersion))
	}
	ext := uint64(binary.LittleEndian.Uint32(b[18:]))
	if ext > uint64(len(b)-entryHeader) {
		return bad(fmt.Sprintf("extensions of %d bytes in %d", ext, len(b)))
	}
	*l = raft.Log{Index: index, Type: raft.LogType(b[1]), Term: binary.LittleEndian.Uint64(b[2:])}
	if at := int64(binary.LittleEndian.Uint64(b[10:])); at != 0 {
		l.AppendedAt = time.Unix(0, at)
	}
	rest := b[entryHeader:]
	if ext > 0 {
		l.Extensions = append([]byte(nil), rest[:ext]...)
	}
	if data := rest[ext:]; len(data) > 0 {
		l.Data = append([]byte(nil), data...)
	}
	return nil
}

// IsMonotonic asks raft to leave no gap in the log after it installs a snapshot.
func (s *Store) IsMonotonic() bool { return true }

// FirstIndex is the least index in the log, 0 when it is empty.
func (s *Store) FirstIndex() (uint64, error) { return s.end((*pebble.Iterator).First) }

// LastIndex is the greatest index in the log, 0 when it is empty.
func (s *Store) LastIndex() (uint64, error) { return s.end((*pebble.Iterator).Last) }

func (s *Store) end(seek func(*pebble.Iterator) bool) (uint64, error) {
	if err := s.beginCall(); err != nil {
		return 0, err
	}
	defer s.endCall()
	it, err := s.db.NewIter(bounds([]byte{spaceLog}))
	if err != nil {
		return 0, err
	}
	var index uint64
	if seek(it) {
		if k := it.Key(); len(k) == 9 {
			index = binary.BigEndian.Uint64(k[1:])
		} else {
			err = &CorruptError{What: "log key", Why: fmt.Sprintf("%d bytes, want 9", len(k))}
		}
	}
	return index, errors.Join(err, it.Error(), it.Close())
}

// GetLog reads one entry; raft.ErrLogNotFound when there is none.
func (s *Store) GetLog(index uint64, l *raft.Log) error {
	v, err := s.get(logKey(index))
	if err != nil {
		return err
	}
	if v == nil {
		return raft.ErrLogNotFound
	}
	return parseEntry(index, v, l)
}

// StoreLog is StoreLogs of one entry.
func (s *Store) StoreLog(l *raft.Log) error { return s.StoreLogs([]*raft.Log{l}) }

// StoreLogs writes logs in one batch and returns when the disk has them: all or,
// after a crash, none.
func (s *Store) StoreLogs(logs []*raft.Log) error {
	return s.update(pebble.Sync, func(b *pebble.Batch) error {
		var buf []byte
		for _, l := range logs {
			if uint64(len(l.Extensions)) > math.MaxUint32 {
				return fmt.Errorf("log entry %d: extensions of %d bytes", l.Index, len(l.Extensions))
			}
			buf = appendEntry(buf[:0], l)
			if err := b.Set(logKey(l.Index), buf, nil); err != nil {
				return err
			}
		}
		return nil
	})
}

// DeleteRange deletes the entries from lo to hi, both included.
func (s *Store) DeleteRange(lo, hi uint64) error {
	end := []byte{spaceLog + 1}
	if hi < math.MaxUint64 {
		end = logKey(hi + 1)
	}
	return s.update(pebble.Sync, func(b *pebble.Batch) error { return b.DeleteRange(logKey(lo), end, nil) })
}

// Set stores a value durably.
func (s *Store) Set(key, val []byte) error {
	return s.update(pebble.Sync, func(b *pebble.Batch) error {
		return b.Set(append([]byte{spaceStable}, key...), val, nil)
	})
}

// Get returns the value of key. A missing key gives an empty value and nil:
// raft compares a store's error text with "not found", and Pebble's differs.
func (s *Store) Get(key []byte) ([]byte, error) {
	v, err := s.get(append([]byte{spaceStable}, key...))
	if v == nil && err == nil {
		v = []byte{}
	}
	return v, err
}

// SetUint64 stores a number durably.
func (s *Store) SetUint64(key []byte, val uint64) error {
	return s.Set(key, binary.BigEndian.AppendUint64(nil, val))
}

// GetUint64 returns the number stored under key, 0 and nil when there is none.
func (s *Store) GetUint64(key []byte) (uint64, error) {
	v, err := s.Get(key)
	if err != nil || len(v) == 0 {
		return 0, err
	}
	if len(v) != 8 {
		return 0, &CorruptError{What: fmt.Sprintf("stable key %q", key), Why: fmt.Sprintf("%d bytes, want 8", len(v))}
	}
	return binary.BigEndian.Uint64(v), nil
}
