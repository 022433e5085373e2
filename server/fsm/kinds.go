package fsm

import (
	"errors"
	"fmt"

	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/ordered"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// rowsOf is a kind of rows that have numbers: where they are kept, and what sets the kind apart. Everything else is the
// same for all of them.
type rowsOf[M proto.Message] struct {
	kind byte // of the keys
	in   func(*State) map[uint32]M
	// shown: the map has them, so it has another version when one of them changes.
	shown bool
	// name is what errors call one. id is the number that a row says itself, and last the latest one given out. They
	// are missing where rows are slots, which are used again.
	name string
	id   func(M) uint32
	last func(*fsmpb.Meta) uint32
	// check returns why a row that was loaded does not fit the others; nil: any does.
	check func(*State, M) error
	// note brings what follows from the rows in line; is is nil when the row goes.
	note func(s *State, id uint32, was, is M)
}

// rowKind is a rowsOf whichever messages it has.
type rowKind interface {
	key() byte
	encode(*State) []Row
	load(s *State, id uint32, value []byte) error
	verify(*State) error
}

var (
	nodeRows = rowsOf[*dirpb.Node]{kind: rowNode, name: "memory node", shown: true,
		in: func(s *State) map[uint32]*dirpb.Node { return s.nodes },
		id: (*dirpb.Node).GetId, last: (*fsmpb.Meta).GetNodeId}
	namespaceRows = rowsOf[*dirpb.Namespace]{kind: rowNamespace, name: "namespace", shown: true,
		in: func(s *State) map[uint32]*dirpb.Namespace { return s.namespaces },
		id: (*dirpb.Namespace).GetId, last: (*fsmpb.Meta).GetNamespaceId, check: (*State).checkNamespace}
	pgRows = rowsOf[*dirpb.PlacementGroup]{kind: rowPG, name: "placement group", shown: true,
		in: func(s *State) map[uint32]*dirpb.PlacementGroup { return s.pgs },
		id: (*dirpb.PlacementGroup).GetId, last: (*fsmpb.Meta).GetPgId, check: (*State).checkPG}
	heapRows = rowsOf[*fsmpb.Heap]{kind: rowHeap, name: "heap",
		in: func(s *State) map[uint32]*fsmpb.Heap { return s.heaps },
		id: (*fsmpb.Heap).GetPgId, last: (*fsmpb.Meta).GetPgId, check: (*State).checkHeap}
	shardRows = rowsOf[*dirpb.Shard]{kind: rowShard, name: "shard", shown: true,
		in: func(s *State) map[uint32]*dirpb.Shard { return s.shards },
		id: (*dirpb.Shard).GetId, last: (*fsmpb.Meta).GetShardId, check: (*State).checkShard}
	sessionRows = rowsOf[*fsmpb.Session]{kind: rowSession, name: "session",
		in: func(s *State) map[uint32]*fsmpb.Session { return s.sessions },
		id: (*fsmpb.Session).GetId, last: (*fsmpb.Meta).GetSessionId, check: (*State).checkSession,
		note: func(s *State, id uint32, was, is *fsmpb.Session) { s.roster.noteSession(id, was, is) }}
	jobRows = rowsOf[*fsmpb.Job]{kind: rowJob, name: "job",
		in: func(s *State) map[uint32]*fsmpb.Job { return s.jobs },
		id: func(j *fsmpb.Job) uint32 { return j.GetJob().GetId() }, last: (*fsmpb.Meta).GetJobId,
		check: (*State).checkJob}
	volumeRows = rowsOf[*dirpb.Volume]{kind: rowVolume, name: "volume", shown: true,
		in: func(s *State) map[uint32]*dirpb.Volume { return s.volumes },
		id: (*dirpb.Volume).GetId, last: (*fsmpb.Meta).GetVolumeId, check: (*State).checkVolume}
	auditRows = rowsOf[*dirpb.AuditEntry]{kind: rowAudit,
		in: func(s *State) map[uint32]*dirpb.AuditEntry { return s.audit }}
	reignRows = rowsOf[*fsmpb.Reign]{kind: rowReign,
		in: func(s *State) map[uint32]*fsmpb.Reign { return s.reigns }}

	kinds = []rowKind{nodeRows, namespaceRows, pgRows, heapRows, shardRows, sessionRows, jobRows, volumeRows, auditRows,
		reignRows}
)

func (k rowsOf[M]) set(s *State, id uint32, m M) {
	rows := k.in(s)
	if k.note != nil {
		k.note(s, id, rows[id], m)
	}
	rows[id] = m
}

func (k rowsOf[M]) put(s *State, id uint32, m M) {
	k.set(s, id, m)
	s.mark(idKey(k.kind, id), m)
	s.mapChanged = s.mapChanged || k.shown
}

func (k rowsOf[M]) drop(s *State, id uint32) {
	var none M
	if rows := k.in(s); k.note != nil {
		k.note(s, id, rows[id], none)
	}
	delete(k.in(s), id)
	s.mark(idKey(k.kind, id), nil)
	s.mapChanged = s.mapChanged || k.shown
}

func (k rowsOf[M]) key() byte { return k.kind }

func (k rowsOf[M]) encode(s *State) (rows []Row) {
	for id, m := range k.in(s) {
		rows = append(rows, encodeRow(idKey(k.kind, id), m))
	}
	return rows
}

func (k rowsOf[M]) load(s *State, id uint32, value []byte) error {
	var none M
	m, err := decode(value, none.ProtoReflect().New().Interface().(M))
	if err == nil {
		k.set(s, id, m)
	}
	return err
}

// verify checks that rows have the ids that they are kept under, which were given out, and fit what others say.
func (k rowsOf[M]) verify(s *State) error {
	var errs []error
	for _, id := range ordered.Keys(k.in(s)) {
		m := k.in(s)[id]
		if k.id != nil {
			if got, last := k.id(m), k.last(s.meta); got != id || id == 0 || id > last {
				errs = append(errs, fmt.Errorf("%s %d is in the row of %d, and %d is the last that there is", k.name,
					got, id, last))
			}
		}
		if k.check != nil {
			if err := k.check(s, m); err != nil {
				errs = append(errs, fmt.Errorf("%s: %w", k.name, err))
			}
		}
	}
	return errors.Join(errs...)
}
