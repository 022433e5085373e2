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
func (s *State) mark(key string, m proto.Message) {
	s.changed[key] = m
	switch key[0] {
	case rowNode, rowNamespace, rowPG, rowShard:
		s.mapChanged = true
	}
}

// editMeta returns a private copy of the meta row, already in place.
func (s *State) editMeta() *fsmpb.Meta {
	s.meta = proto.CloneOf(s.meta)
	s.mark(string(rowMeta), s.meta)
	return s.meta
}

func (s *State) putNode(n *dirpb.Node) {
	s.nodes[n.Id] = n
	s.mark(idKey(rowNode, n.Id), n)
}

func (s *State) putNamespace(w *dirpb.Namespace) {
	s.namespaces[w.Id] = w
	s.mark(idKey(rowNamespace, w.Id), w)
}

func (s *State) putPG(pg *dirpb.PlacementGroup) {
	s.pgs[pg.Id] = pg
	s.mark(idKey(rowPG, pg.Id), pg)
}

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

func (s *State) putShard(sh *dirpb.Shard) {
	s.shards[sh.Id] = sh
	s.mark(idKey(rowShard, sh.Id), sh)
}

// editShard returns a private copy of a shard, already in place.
func (s *State) editShard(id uint32) *dirpb.Shard {
	sh := proto.CloneOf(s.shards[id])
	s.putShard(sh)
	return sh
}

func (s *State) putJob(j *fsmpb.Job) {
	s.jobs[j.Job.Id] = j
	s.mark(idKey(rowJob, j.Job.Id), j)
}

func (s *State) dropJob(id uint32) {
	delete(s.jobs, id)
	s.mark(idKey(rowJob, id), nil)
}

func (s *State) putHeap(h *fsmpb.Heap) {
	s.heaps[h.PgId] = h
	s.mark(idKey(rowHeap, h.PgId), h)
}

func (s *State) putSession(x *fsmpb.Session) {
	s.roster.noteSession(x.Id, s.sessions[x.Id], x)
	s.sessions[x.Id] = x
	s.mark(idKey(rowSession, x.Id), x)
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
	for id, m := range s.nodes {
		rows = append(rows, encodeRow(idKey(rowNode, id), m))
	}
	for id, m := range s.namespaces {
		rows = append(rows, encodeRow(idKey(rowNamespace, id), m))
	}
	for id, m := range s.pgs {
		rows = append(rows, encodeRow(idKey(rowPG, id), m))
	}
	for id, m := range s.heaps {
		rows = append(rows, encodeRow(idKey(rowHeap, id), m))
	}
	for id, m := range s.shards {
		rows = append(rows, encodeRow(idKey(rowShard, id), m))
	}
	for id, m := range s.sessions {
		rows = append(rows, encodeRow(idKey(rowSession, id), m))
	}
	for id, m := range s.jobs {
		rows = append(rows, encodeRow(idKey(rowJob, id), m))
	}
	for slot, m := range s.audit {
		rows = append(rows, encodeRow(idKey(rowAudit, slot), m))
	}
	for slot, m := range s.reigns {
		rows = append(rows, encodeRow(idKey(rowReign, slot), m))
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
		if len(r.Key) != 5 {
			return fmt.Errorf("key of %d bytes, want 5", len(r.Key))
		}
		id := binary.BigEndian.Uint32(r.Key[1:])
		switch kind {
		case rowNode:
			s.nodes[id], err = decode(r.Value, &dirpb.Node{})
		case rowNamespace:
			s.namespaces[id], err = decode(r.Value, &dirpb.Namespace{})
		case rowPG:
			s.pgs[id], err = decode(r.Value, &dirpb.PlacementGroup{})
		case rowHeap:
			var h *fsmpb.Heap
			if h, err = decode(r.Value, &fsmpb.Heap{}); err == nil {
				// An earlier version knew no homes, without which memory of sessions that live would be
				// granted again.
				if n := len(h.ProtoReflect().GetUnknown()); n > 0 {
					return fmt.Errorf("placement group %d: %d bytes of another version's fields: this version cannot "+
						"take over that directory", id, n)
				}
				s.heaps[id] = h
			}
		case rowShard:
			s.shards[id], err = decode(r.Value, &dirpb.Shard{})
		case rowAudit:
			s.audit[id], err = decode(r.Value, &dirpb.AuditEntry{})
		case rowReign:
			s.reigns[id], err = decode(r.Value, &fsmpb.Reign{})
		case rowJob:
			s.jobs[id], err = decode(r.Value, &fsmpb.Job{})
		case rowSession:
			var x *fsmpb.Session
			if x, err = decode(r.Value, &fsmpb.Session{}); err == nil {
				s.roster.noteSession(id, s.sessions[id], x)
				s.sessions[id] = x
			}
		default:
			return errors.New("unknown kind")
		}
	}
	return err
}

func decode[M proto.Message](b []byte, m M) (M, error) { return m, proto.Unmarshal(b, m) }
