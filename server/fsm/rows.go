package fsm

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

func idKey(kind byte, id uint32) string {
	return string(binary.BigEndian.AppendUint32([]byte{kind}, id))
}

func directoryKey(id string) string { return string(rowDirectory) + id }

// mark notes that the row of key is now m; nil when it is gone.
func (s *State) mark(key string, m proto.Message) { s.changed[key] = m }

// editMeta returns a private copy of the meta row, already in place.
func (s *State) editMeta() *fsmpb.Meta {
	s.meta = proto.CloneOf(s.meta)
	s.mark(string(rowMeta), s.meta)
	return s.meta
}

func (s *State) putNode(n *dirpb.Node)           { nodeRows.put(s, n.Id, n) }
func (s *State) putNamespace(w *dirpb.Namespace) { namespaceRows.put(s, w.Id, w) }
func (s *State) putPG(pg *dirpb.PlacementGroup)  { pgRows.put(s, pg.Id, pg) }
func (s *State) putHeap(h *fsmpb.Heap)           { heapRows.put(s, h.PgId, h) }
func (s *State) putShard(sh *dirpb.Shard)        { shardRows.put(s, sh.Id, sh) }
func (s *State) putJob(j *fsmpb.Job)             { jobRows.put(s, j.Job.Id, j) }
func (s *State) putVolume(v *dirpb.Volume)       { volumeRows.put(s, v.Id, v) }
func (s *State) putSession(x *fsmpb.Session)     { sessionRows.put(s, x.Id, x) }

// editPG returns a private copy of a placement group, already in place.
func (s *State) editPG(id uint32) *dirpb.PlacementGroup {
	pg := proto.CloneOf(s.pgs[id])
	s.putPG(pg)
	return pg
}

// editHeap returns a copy of a heap, already in place. Its lists are shared with
// the original: replace them, do not change them.
func (s *State) editHeap(pg uint32) *fsmpb.Heap {
	h := copyHeap(s.heaps[pg])
	s.putHeap(h)
	return h
}

// editShard returns a private copy of a shard, already in place.
func (s *State) editShard(id uint32) *dirpb.Shard {
	sh := proto.CloneOf(s.shards[id])
	s.putShard(sh)
	return sh
}

// takeChanges encodes and forgets the changes, after giving a changed map its
// new version.
func (s *State) takeChanges() []Row {
	if s.mapChanged {
		s.mapChanged = false
		s.editMeta().MapVersion++
	}
	if len(s.changed) == 0 {
		return nil
	}
	rows := make([]Row, 0, len(s.changed))
	for k, m := range s.changed {
		rows = append(rows, encodeRow(k, m))
	}
	clear(s.changed)
	sortRows(rows)
	return rows
}

func sortRows(rows []Row) {
	slices.SortFunc(rows, func(a, b Row) int { return bytes.Compare(a.Key, b.Key) })
}

func encodeRow(key string, m proto.Message) Row {
	if m == nil {
		return Row{Key: []byte(key)}
	}
	// Marshal fails only for invalid UTF-8, which no message decoded from a
	// command can hold.
	v, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if err != nil {
		panic(fmt.Sprintf("fsm: row %q: %v", key, err))
	}
	if v == nil {
		v = []byte{}
	}
	return Row{Key: []byte(key), Value: v}
}

// Rows encodes the whole state, in key order.
func (s *State) Rows() []Row {
	rows := []Row{encodeRow(string(rowMeta), s.meta)}
	if s.Level() > 0 {
		rows = append(rows, encodeRow(levelKey, s.level))
	}
	for _, k := range kinds {
		rows = append(rows, k.encode(s)...)
	}
	for id, m := range s.directory {
		rows = append(rows, encodeRow(directoryKey(id), m))
	}
	sortRows(rows)
	return rows
}

// Load rebuilds a state from rows, in any order. It refuses rows that do not make one: that do not decode, or
// that lack what others of them count on. It refuses rows of a level that this version does not know with
// ErrLevel.
func Load(rows []Row) (*State, error) {
	s := New()
	if err := s.loadLevel(rows); err != nil {
		return nil, err
	}
	for _, r := range rows {
		if err := s.loadRow(r); err != nil {
			return nil, fmt.Errorf("corrupt state row %q: %w", r.Key, err)
		}
	}
	if err := s.check(); err != nil {
		return nil, fmt.Errorf("corrupt state: %w", err)
	}
	return s, nil
}

func (s *State) loadRow(r Row) error {
	if len(r.Key) == 0 {
		return errors.New("empty key")
	}
	var err error
	switch kind := r.Key[0]; kind {
	case rowMeta:
		s.meta, err = decode(r.Value, &fsmpb.Meta{})
	case rowLevel: // loadLevel has seen it
	case rowDirectory:
		s.directory[string(r.Key[1:])], err = decode(r.Value, &fsmpb.Directory{})
	default:
		i := slices.IndexFunc(kinds, func(k rowKind) bool { return k.key() == kind })
		switch {
		case len(r.Key) != 5:
			return fmt.Errorf("key of %d bytes, want 5", len(r.Key))
		case i < 0:
			return errors.New("unknown kind")
		}
		err = kinds[i].load(s, binary.BigEndian.Uint32(r.Key[1:]), r.Value)
	}
	return err
}

func decode[M proto.Message](b []byte, m M) (M, error) { return m, proto.Unmarshal(b, m) }
