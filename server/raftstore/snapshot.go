package raftstore

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync/atomic"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/hashicorp/raft"
)

const (
	snapshotRetain = 2
	snapshotChunk  = 256 << 10 // bytes of one data value
)

// Snapshots is the store's raft.SnapshotStore. A snapshot's data is written in
// chunks; its meta entry, written last and durably, makes it exist.
func (s *Store) Snapshots() raft.SnapshotStore { return snapshots{s} }

type snapshots struct{ s *Store }

var snapshotSeq atomic.Uint64 // tells apart snapshots begun in one nanosecond

func metaKey(m *raft.SnapshotMeta) []byte {
	k := binary.BigEndian.AppendUint64([]byte{spaceMeta}, m.Index)
	k = binary.BigEndian.AppendUint64(k, m.Term)
	return append(k, m.ID...)
}

func dataPrefix(id string) []byte { return append(append([]byte{spaceData}, id...), 0) }

func (ss snapshots) Create(version raft.SnapshotVersion, index, term uint64, conf raft.Configuration,
	confIndex uint64, _ raft.Transport) (raft.SnapshotSink, error) {
	if version != 1 {
		return nil, fmt.Errorf("snapshot version %d, want 1", version)
	}
	return &sink{s: ss.s, meta: raft.SnapshotMeta{
		Version:            version,
		ID:                 fmt.Sprintf("%d-%d-%d-%d", term, index, time.Now().UnixNano(), snapshotSeq.Add(1)),
		Index:              index,
		Term:               term,
		Configuration:      conf,
		ConfigurationIndex: confIndex,
	}}, nil
}

// List returns the snapshots, newest first.
func (ss snapshots) List() ([]*raft.SnapshotMeta, error) {
	var out []*raft.SnapshotMeta
	err := ss.s.scan([]byte{spaceMeta}, func(k, v []byte) (bool, error) {
		m := new(raft.SnapshotMeta)
		if err := json.Unmarshal(v, m); err != nil {
			return false, &CorruptError{What: fmt.Sprintf("snapshot meta %x", k), Why: err.Error()}
		}
		out = append([]*raft.SnapshotMeta{m}, out...)
		return true, nil
	})
	return out, err
}

// Open reads one snapshot as it is now, also when it is dropped meanwhile.
func (ss snapshots) Open(id string) (*raft.SnapshotMeta, io.ReadCloser, error) {
	list, err := ss.List()
	if err != nil {
		return nil, nil, err
	}
	for _, m := range list {
		if m.ID != id {
			continue
		}
		if err := ss.s.beginCall(); err != nil {
			return nil, nil, err
		}
		it, err := ss.s.db.NewIter(bounds(dataPrefix(id)))
		if err != nil {
			ss.s.endCall()
			return nil, nil, err
		}
		it.First()
		return m, &reader{s: ss.s, it: it, left: m.Size, id: id}, nil
	}
	return nil, nil, fmt.Errorf("snapshot %s does not exist", id)
}

type reader struct {
	s    *Store
	it   *pebble.Iterator
	buf  []byte
	left int64
	id   string
}

func (r *reader) Read(p []byte) (int, error) {
	if r.it == nil {
		return 0, ErrClosed
	}
	for len(r.buf) == 0 {
		if !r.it.Valid() {
			if err := r.it.Error(); err != nil {
				return 0, err
			}
			if r.left != 0 {
				return 0, &CorruptError{What: "snapshot " + r.id, Why: fmt.Sprintf("%d bytes missing", r.left)}
			}
			return 0, io.EOF
		}
		v, err := r.it.ValueAndErr()
		if err != nil {
			return 0, err
		}
		r.buf = append([]byte(nil), v...)
		r.left -= int64(len(v))
		r.it.Next()
	}
	n := copy(p, r.buf)
	r.buf = r.buf[n:]
	return n, nil
}

func (r *reader) Close() error {
	if r.it == nil {
		return nil
	}
	err := r.it.Close()
	r.it = nil
	r.s.endCall()
	return err
}

type sink struct {
	s     *Store
	meta  raft.SnapshotMeta
	buf   []byte
	chunk uint32
	ended bool
}

func (k *sink) ID() string { return k.meta.ID }

func (k *sink) Write(p []byte) (int, error) {
	if k.ended {
		return 0, ErrClosed
	}
	n := len(p)
	for len(p) > 0 {
		take := min(len(p), snapshotChunk-len(k.buf))
		k.buf = append(k.buf, p[:take]...)
		p = p[take:]
		if len(k.buf) == snapshotChunk {
			if err := k.flush(); err != nil {
				return 0, err
			}
		}
	}
	k.meta.Size += int64(n)
	return n, nil
}

func (k *sink) flush() error {
	if len(k.buf) == 0 {
		return nil
	}
	key := binary.BigEndian.AppendUint32(dataPrefix(k.meta.ID), k.chunk)
	k.chunk++
	err := k.s.update(pebble.NoSync, func(b *pebble.Batch) error { return b.Set(key, k.buf, nil) })
	k.buf = k.buf[:0]
	return err
}

// Close makes the snapshot exist and drops all but the newest ones.
func (k *sink) Close() error {
	if k.ended {
		return nil
	}
	k.ended = true
	if err := k.flush(); err != nil {
		return err
	}
	v, err := json.Marshal(&k.meta)
	if err != nil {
		return err
	}
	err = k.s.update(pebble.Sync, func(b *pebble.Batch) error { return b.Set(metaKey(&k.meta), v, nil) })
	if err != nil {
		return err
	}
	list, err := snapshots{k.s}.List()
	if err != nil {
		return err
	}
	for i, m := range list {
		if i < snapshotRetain {
			continue
		}
		if err := k.s.dropSnapshot(m.ID, metaKey(m)); err != nil {
			return err
		}
	}
	return nil
}

func (k *sink) Cancel() error {
	if k.ended {
		return nil
	}
	k.ended = true
	return k.s.dropSnapshot(k.meta.ID, nil)
}

func (s *Store) dropSnapshot(id string, meta []byte) error {
	return s.update(pebble.NoSync, func(b *pebble.Batch) error {
		p := dataPrefix(id)
		err := b.DeleteRange(p, prefixEnd(p), nil)
		if meta != nil {
			err = errors.Join(err, b.Delete(meta, nil))
		}
		return err
	})
}

// dropOrphans deletes the data of snapshots that a crash left without meta.
func (s *Store) dropOrphans() error {
	list, err := snapshots{s}.List()
	if err != nil {
		return err
	}
	known := make(map[string]bool)
	for _, m := range list {
		known[m.ID] = true
	}
	orphans := make(map[string]bool)
	err = s.scan([]byte{spaceData}, func(k, _ []byte) (bool, error) {
		// 'd' id 0x00 chunk
		if len(k) < 6 {
			return false, &CorruptError{What: "snapshot data key", Why: fmt.Sprintf("%d bytes", len(k))}
		}
		if id := string(k[1 : len(k)-5]); !known[id] {
			orphans[id] = true
		}
		return true, nil
	})
	for id := range orphans {
		err = errors.Join(err, s.dropSnapshot(id, nil))
	}
	return err
}
