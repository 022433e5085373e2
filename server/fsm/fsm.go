// Package fsm is the directory's replicated state machine: memory nodes,
// namespaces, placement groups, shards, sessions, background jobs, the granted memory
// and status words.
//
// [Apply] is a pure function of state and command: it reads no clock, draws no random number and starts
// nothing. So every directory node, every replay and the simulator reach the same state. Raft, disks, leases,
// RPCs and who may call are package server's.
//
// Start with [State], [Apply] and [Result]. A State is not safe for concurrent use; goroutines that share one
// lock it. Messages handed out by a State's methods are never modified afterwards and must not be modified by
// the caller. Apply keeps messages inside the command it is given.
//
// The rows a command changes come back in its Result. The rows of a whole state are its snapshot, so disk and
// snapshot share one encoding. The split of a pure machine from its raft host follows rqlite's store and
// TigerBeetle's state machine. Ids, fencing and extents follow docs/protocol.md ("Allocation and reuse",
// "Leases and fencing").
package fsm

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/ordered"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// Why a command was refused. A refused command changes nothing.
var (
	ErrInvalid     = errors.New("invalid argument")
	ErrNotFound    = errors.New("not found")
	ErrExists      = errors.New("already exists")
	ErrRefused     = errors.New("refused")
	ErrFull        = errors.New("exhausted")
	ErrUnavailable = errors.New("unavailable")
	ErrForeign     = errors.New("permission denied") // it belongs to another identity, which gave no right to it
)

// Limits on what a command may hold.
const (
	MaxSessions  = 1 << 16 // not yet fenced
	MaxWriters   = 1 << 12 // of them those that are not read-only: a discriminator has 12 bits
	MaxNameLen   = 64
	MaxLabelLen  = 256 // addresses, host ids, client names
	MaxEndpoints = 16
	MaxAfter     = 16 // processes, one of which has registered last
	// MaxCapacityBytes is what one memory node lends at most: 1 PiB, so that sums over
	// memory nodes do not wrap.
	MaxCapacityBytes = 1 << 50
	MaxRuns          = 1 << 16 // runs in one CloseSession or TakeBack
	MaxFreeRuns      = 1 << 16 // free runs kept for one placement group
	MaxHomes         = 1 << 16 // runs of one placement group that sessions own, beyond which none is granted
	MaxRecalls       = 8       // extents that one job recalls
	MaxGrantRuns     = 256
	MaxShardDepth    = 12 // what a session's map takes
	MaxShards        = 1 << MaxShardDepth
	MaxPGID          = 1 << 16 // what a session's map takes; ids are not given out again
	MaxReplicas      = 3       // a placement group has one member more while it is replacing one
	MaxPauseMillis   = 30_000  // for which a memory node asks not to be expected
	ReuseEpochs      = 1024    // how long returned memory that is not fresh waits
	maxRegionBytes   = 1 << 38
	minHeapUnits     = 1 << 10
	maxFindings      = 32 // kept of a scrub
	maxFindingLen    = 200
)

// Row kinds, the first byte of a row's key. Ids follow big-endian.
const (
	rowAudit     = 'a'
	rowDirectory = 'd'
	rowHeap      = 'h'
	rowJob       = 'j'
	rowLevel     = 'l'
	rowMeta      = 'm'
	rowNode      = 'n'
	rowPG        = 'p'
	rowReign     = 'r'
	rowSession   = 's'
	rowNamespace = 'w'
	rowShard     = 'x'
)

// Row is one entity of the state; a nil Value says that it is gone.
type Row struct {
	Key, Value []byte
}

// Result is what a command did. Fields beyond Err and Changes are set by the
// commands that produce them.
type Result struct {
	// Err wraps one of this package's errors; nothing changed.
	Err error
	// Changes are the rows that the command wrote or deleted, in key order.
	Changes []Row

	NodeID    uint32                      // RegisterNode
	Namespace *dirpb.Namespace            // CreateNamespace, SetNamespace, AcceptLoss, SetAccess
	Fencing   uint32                      // SetAccess: sessions that are being fenced for it
	Deleted   *dirpb.DeleteNamespaceReply // DeleteNamespace
	Session   *fsmpb.Session              // OpenSession
	Grant     *dirpb.GrantExtentReply     // GrantExtent
	Status    *dirpb.GrantStatusReply     // GrantStatus
	PG        *dirpb.PlacementGroup       // CreatePG
	Job       *dirpb.Job                  // StartJob, ClaimJob
	Leaks     []uint32                    // EndJob of a SCRUB that repairs: extents to recall
	Arrival   Arrival                     // RegisterNode

	Audit *dirpb.AuditEntry // of a command that somebody asked for, if it changed something

	// Lost are the placement groups that lost all their copies with this command while
	// they may have held records. Any command that takes memory away may set it.
	Lost []Lost
}

// Lost says that a placement group lost all its copies, the last one with a memory node.
type Lost struct {
	Namespace string
	PG        uint32
	Node      string
	// HeldBytes is what sessions had been granted there: at least what records took.
	HeldBytes uint64
}

// Arrival says how a memory node that registered compares with what was known of it.
type Arrival int

// Arrivals.
const (
	ArrivalUnspecified Arrival = iota
	ArrivalKnown               // the same process, told again
	ArrivalNew                 // never seen
	ArrivalRestarted           // another process took over before the last one counted as lost
	ArrivalBack                // another process, after the last one had counted as lost
	ArrivalKept                // another process, with all the memory of the last one
	ArrivalStale               // another process, with memory of before the last one: nothing was done
)

// State is the directory's replicated state. Use New or Load.
type State struct {
	meta       *fsmpb.Meta
	level      *fsmpb.Level
	nodes      map[uint32]*dirpb.Node
	namespaces map[uint32]*dirpb.Namespace
	pgs        map[uint32]*dirpb.PlacementGroup
	heaps      map[uint32]*fsmpb.Heap // by placement group
	shards     map[uint32]*dirpb.Shard
	sessions   map[uint32]*fsmpb.Session
	jobs       map[uint32]*fsmpb.Job
	directory  map[string]*fsmpb.Directory
	audit      map[uint32]*dirpb.AuditEntry // by slot
	reigns     map[uint32]*fsmpb.Reign      // by slot

	roster     roster // follows from sessions
	changed    map[string]proto.Message
	mapChanged bool   // something that Map shows is in changed
	lost       []Lost // by the command being applied
}

// New returns the state before the first command.
func New() *State {
	return &State{
		meta:       &fsmpb.Meta{},
		level:      &fsmpb.Level{Level: Level},
		nodes:      make(map[uint32]*dirpb.Node),
		namespaces: make(map[uint32]*dirpb.Namespace),
		pgs:        make(map[uint32]*dirpb.PlacementGroup),
		heaps:      make(map[uint32]*fsmpb.Heap),
		shards:     make(map[uint32]*dirpb.Shard),
		sessions:   make(map[uint32]*fsmpb.Session),
		jobs:       make(map[uint32]*fsmpb.Job),
		directory:  make(map[string]*fsmpb.Directory),
		audit:      make(map[uint32]*dirpb.AuditEntry),
		reigns:     make(map[uint32]*fsmpb.Reign),
		roster:     newRoster(),
		changed:    make(map[string]proto.Message),
	}
}

// Apply carries out c. A command that this version does not know is ErrLevel: a directory node must go no further, since others do
// carry it out.
func Apply(s *State, c *fsmpb.Command) Result {
	var r Result
	if n := len(c.ProtoReflect().GetUnknown()); n > 0 {
		return Result{Err: fmt.Errorf("%w: a command has %d bytes of fields of a later version; this one knows levels up to %d", ErrLevel, n, Level)}
	}
	switch op := c.GetOp().(type) {
	case *fsmpb.Command_Init:
		r.Err = s.init(op.Init)
	case *fsmpb.Command_PutDirectory:
		r.Err = s.putDirectory(op.PutDirectory.GetDirectory())
	case *fsmpb.Command_DropDirectory:
		r.Err = s.dropDirectory(op.DropDirectory.GetId())
	case *fsmpb.Command_RegisterNode:
		r.NodeID, r.Arrival, r.Err = s.registerNode(op.RegisterNode)
	case *fsmpb.Command_NodeDown:
		r.Err = s.nodeDown(op.NodeDown)
	case *fsmpb.Command_LoseMembers:
		r.Err = s.loseMembers(op.LoseMembers)
	case *fsmpb.Command_PublishRegion:
		r.Err = s.publishRegion(op.PublishRegion)
	case *fsmpb.Command_CreateNamespace:
		r.Namespace, r.Err = s.createNamespace(op.CreateNamespace)
	case *fsmpb.Command_SetNamespace:
		r.Namespace, r.Err = s.setNamespace(op.SetNamespace)
	case *fsmpb.Command_Rebalance:
		r.Err = s.rebalance(op.Rebalance)
	case *fsmpb.Command_DeleteNamespace:
		r.Deleted, r.Err = s.deleteNamespace(op.DeleteNamespace)
	case *fsmpb.Command_OpenSession:
		r.Session, r.Err = s.openSession(op.OpenSession)
	case *fsmpb.Command_CloseSession:
		r.Err = s.closeSession(op.CloseSession)
	case *fsmpb.Command_ExpireSessions:
		s.fence(op.ExpireSessions.GetSessionIds())
	case *fsmpb.Command_ConfirmFence:
		r.Err = s.confirmFence(op.ConfirmFence)
	case *fsmpb.Command_ReserveEpoch:
		s.reserveEpoch(op.ReserveEpoch)
	case *fsmpb.Command_GrantExtent:
		r.Grant, r.Err = s.grantExtent(op.GrantExtent)
	case *fsmpb.Command_ActivatePg:
		r.Err = s.activatePG(op.ActivatePg)
	case *fsmpb.Command_PlanJoin:
		r.Err = s.planJoin(op.PlanJoin)
	case *fsmpb.Command_StartLeave:
		r.Err = s.startLeave(op.StartLeave)
	case *fsmpb.Command_StartJob:
		r.Job, r.Err = s.startJob(op.StartJob)
	case *fsmpb.Command_ClaimJob:
		r.Job, r.Err = s.claimJob(op.ClaimJob)
	case *fsmpb.Command_EndJob:
		r.Leaks, r.Err = s.endJob(op.EndJob)
	case *fsmpb.Command_FinishRecall:
		r.Err = s.finishRecall(op.FinishRecall)
	case *fsmpb.Command_DrainNode:
		r.Err = s.drainNode(op.DrainNode)
	case *fsmpb.Command_LeaveNode:
		r.Err = s.leaveNode(op.LeaveNode)
	case *fsmpb.Command_Raise:
		r.Err = s.raise(op.Raise)
	case *fsmpb.Command_Reign:
		r.Err = s.reign(op.Reign)
	case *fsmpb.Command_Recover:
		r.Err = s.recover(op.Recover)
	case *fsmpb.Command_PauseNode:
		r.Err = s.pauseNode(op.PauseNode)
	case *fsmpb.Command_RemoveNode:
		r.Err = s.removeNode(op.RemoveNode)
	case *fsmpb.Command_TakeBack:
		r.Err = s.takeBackRuns(op.TakeBack)
	case *fsmpb.Command_CreatePg:
		r.PG, r.Err = s.createPG(op.CreatePg)
	case *fsmpb.Command_RemakePg:
		r.Err = s.remakePG(op.RemakePg)
	case *fsmpb.Command_AcceptLoss:
		r.Namespace, r.Err = s.acceptLoss(op.AcceptLoss)
	case *fsmpb.Command_RotateKey:
		r.Err = s.rotateKey(op.RotateKey)
	case *fsmpb.Command_SetAccess:
		r.Namespace, r.Fencing, r.Err = s.setAccess(op.SetAccess)
	case *fsmpb.Command_GrantStatus:
		r.Status, r.Err = s.grantStatus(op.GrantStatus)
	case *fsmpb.Command_TakeStatus:
		r.Err = s.takeStatus(op.TakeStatus)
	case nil: // what the state does not hold, and an audit entry of it
		if c.GetAudit() == nil {
			r.Err = fmt.Errorf("%w: a command without an operation", ErrInvalid)
		}
	default:
		r.Err = fmt.Errorf("%w: unknown command %T", ErrInvalid, op)
	}
	if a := c.GetAudit(); a != nil && r.Err == nil && (c.Op == nil || len(s.changed) > 0) {
		r.Audit = s.recordAudit(a)
	}
	r.Changes = s.takeChanges()
	r.Lost, s.lost = s.lost, nil
	return r
}

func (s *State) init(c *fsmpb.Init) error {
	if s.meta.ClusterId != "" {
		return fmt.Errorf("cluster %s: %w", s.meta.ClusterId, ErrExists)
	}
	if c.GetClusterId() == "" || len(c.GetClusterKey()) == 0 {
		return fmt.Errorf("%w: a cluster needs an id and a key", ErrInvalid)
	}
	if err := checkLevel(c.GetLevel()); err != nil {
		return err
	}
	m := s.editMeta()
	m.ClusterId, m.ClusterKey = c.ClusterId, c.ClusterKey
	s.mapChanged = true
	s.putLevel(c.GetLevel())
	return nil
}

func (s *State) putDirectory(d *fsmpb.Directory) error {
	if d.GetId() == "" {
		return fmt.Errorf("%w: directory node without an id", ErrInvalid)
	}
	if len(d.Id) > MaxNameLen || len(d.RaftAddr) > MaxLabelLen || len(d.GrpcAddr) > MaxLabelLen {
		return fmt.Errorf("%w: directory node %.64q: id or address is too long", ErrInvalid, d.Id)
	}
	if err := errors.Join(CheckText("id", d.Id), CheckText("Raft address", d.RaftAddr), CheckText("gRPC address", d.GrpcAddr), CheckText("identity", d.Identity)); err != nil {
		return fmt.Errorf("directory node %.64q: %w", d.Id, err)
	}
	if err := s.CheckDirectoryOwner(d.Id, d.Identity); err != nil {
		return err
	}
	if !proto.Equal(s.directory[d.Id], d) {
		s.directory[d.Id] = d
		s.mark(directoryKey(d.Id), d)
	}
	return nil
}

// CheckDirectoryOwner refuses an identity that is to enter a directory node whose id another one has entered, with
// ErrForeign. The id is free when the directory node has been removed. An empty identity is that of a caller without TLS,
// which may do everything.
func (s *State) CheckDirectoryOwner(id, identity string) error {
	if old := s.directory[id].GetIdentity(); old != "" && identity != "" && old != identity {
		return fmt.Errorf("%w: directory node %q belongs to %s, not to %s; remove the directory node first if its id is to change hands", ErrForeign, id, old, identity)
	}
	return nil
}

func (s *State) dropDirectory(id string) error {
	if s.directory[id] == nil {
		return fmt.Errorf("directory node %.64q: %w", id, ErrNotFound)
	}
	delete(s.directory, id)
	s.mark(directoryKey(id), nil)
	return nil
}

func (s *State) reserveEpoch(c *fsmpb.ReserveEpoch) {
	if c.GetCeiling() > s.meta.EpochCeiling {
		s.editMeta().EpochCeiling = c.Ceiling
	}
}

// ---- rows ------------------------------------------------------------------

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
					return fmt.Errorf("placement group %d: %d bytes of another version's fields: this version cannot take over that directory", id, n)
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

// ---- reading ---------------------------------------------------------------

// Meta is the cluster's identity and counters.
func (s *State) Meta() *fsmpb.Meta { return s.meta }

// MapVersion grows with every change of what Map returns.
func (s *State) MapVersion() uint64 { return s.meta.MapVersion }

// Node returns a memory node or nil.
func (s *State) Node(id uint32) *dirpb.Node { return s.nodes[id] }

// Nodes are the memory nodes by id.
func (s *State) Nodes() []*dirpb.Node { return ordered.Values(s.nodes) }

// Session returns a session that is live or being fenced, or nil.
func (s *State) Session(id uint32) *fsmpb.Session { return s.sessions[id] }

// Sessions are the live ones and those being fenced, by id.
func (s *State) Sessions() []*fsmpb.Session { return ordered.Values(s.sessions) }

// SessionCount is the number of sessions not yet fenced.
func (s *State) SessionCount() int { return len(s.sessions) }

// Life of a session id; ids never given out count as fenced.
func (s *State) Life(id uint32) dirpb.SessionLife {
	if x := s.sessions[id]; x != nil {
		return x.Life
	}
	return dirpb.SessionLife_SESSION_FENCED
}

// Directory are the known directory nodes by id.
func (s *State) Directory() []*fsmpb.Directory { return ordered.Values(s.directory) }

// DirectoryNode returns one directory node or nil.
func (s *State) DirectoryNode(id string) *fsmpb.Directory { return s.directory[id] }

// Namespace returns a namespace or nil.
func (s *State) Namespace(id uint32) *dirpb.Namespace { return s.namespaces[id] }

// NamespaceNamed returns a namespace or nil.
func (s *State) NamespaceNamed(name string) *dirpb.Namespace {
	for _, w := range s.namespaces {
		if w.Name == name {
			return w
		}
	}
	return nil
}

// Rebalancing are the namespaces that an operator has spread by whoever leads, by id.
func (s *State) Rebalancing() (ids []uint32) {
	for id, w := range s.namespaces {
		if w.Rebalancing == dirpb.Rebalancing_REBALANCING_ON && !w.Deleting {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids
}

// PGs are the placement groups of a namespace, or of all for 0, by id.
func (s *State) PGs(namespace uint32) []*dirpb.PlacementGroup {
	all := ordered.Values(s.pgs)
	if namespace == 0 {
		return all
	}
	return slices.DeleteFunc(all, func(pg *dirpb.PlacementGroup) bool { return pg.NamespaceId != namespace })
}

// PG returns a placement group or nil.
func (s *State) PG(id uint32) *dirpb.PlacementGroup { return s.pgs[id] }

// Heap returns a placement group's memory or nil.
func (s *State) Heap(pg uint32) *fsmpb.Heap { return s.heaps[pg] }

// Shard returns a shard or nil.
func (s *State) Shard(id uint32) *dirpb.Shard { return s.shards[id] }

// Shards are the shards of a namespace, or of all for 0, by id.
func (s *State) Shards(namespace uint32) []*dirpb.Shard {
	all := ordered.Values(s.shards)
	if namespace == 0 {
		return all
	}
	return slices.DeleteFunc(all, func(sh *dirpb.Shard) bool { return sh.NamespaceId != namespace })
}

// Job returns a background job or nil.
func (s *State) Job(id uint32) *dirpb.Job { return s.jobs[id].GetJob() }

// Jobs are the background jobs by id.
func (s *State) Jobs() []*dirpb.Job {
	jobs := make([]*dirpb.Job, 0, len(s.jobs))
	for _, j := range ordered.Values(s.jobs) {
		jobs = append(jobs, j.Job)
	}
	return jobs
}

// JobsOf are the jobs that occupy a placement group, also as a move's target, by id.
func (s *State) JobsOf(pg uint32) []*dirpb.Job {
	return slices.DeleteFunc(s.Jobs(), func(j *dirpb.Job) bool { return j.PgId != pg && j.TargetPgId != pg })
}

// FrozenVersion is the map version that froze a placement group, 0 when it is
// not frozen.
func (s *State) FrozenVersion(pg uint32) uint64 { return s.heaps[pg].GetFrozenVersion() }

// Usage accounts every placement group's memory.
func (s *State) Usage() []*dirpb.PGUsage {
	heaps := make([]*dirpb.PGUsage, 0, len(s.heaps))
	for _, id := range ordered.Keys(s.heaps) {
		h := s.heaps[id]
		var free, waiting, recalled uint64
		for _, r := range h.Free {
			free += uint64(r.Units)
			if r.Returned != 0 {
				waiting += uint64(r.Units)
			}
		}
		for _, r := range h.Recalls {
			from, to := extentBounds(h, r.Extent)
			recalled += to - from
		}
		index := h.IndexNext
		for _, a := range h.IndexFree {
			index -= arrayBytes(a.Segments)
		}
		leaked, extents := s.Leaks(id)
		heaps = append(heaps, &dirpb.PGUsage{
			PgId: id, HeapUnits: h.End - h.Start, GrantedUnits: h.Watermark - h.Start - free, ReturnedUnits: free,
			WaitingUnits: waiting, RecalledUnits: recalled,
			IndexBytesUsed: index, LeakedUnits: leaked, LeakedExtents: uint32(len(extents)),
			LastScrub: h.LastScrub, LastScrubUnixMillis: h.LastScrubUnixMillis,
			StatusHeld: uint32(len(h.StatusHeld)), StatusDead: uint32(len(h.StatusDead)),
		})
	}
	return heaps
}

// Map is the view of a session: all memory nodes, without what operators alone use of them, and its namespace with rkeys.
// A nil session is an operator: all namespaces, with their losses, planned and leaving
// members too, no rkeys.
func (s *State) Map(x *fsmpb.Session) *dirpb.Map {
	m := &dirpb.Map{Version: s.meta.MapVersion, ClusterId: s.meta.ClusterId, Nodes: ordered.Values(s.nodes)}
	var only uint32
	if x != nil {
		only = x.NamespaceId
		for i, n := range m.Nodes {
			if n.Control != "" || n.Identity != "" || n.Version != "" {
				n = proto.CloneOf(n)
				n.Control, n.Identity, n.Version = "", "", ""
				m.Nodes[i] = n
			}
		}
	}
	for _, w := range ordered.Values(s.namespaces) {
		if only == 0 || w.Id == only {
			if x != nil && (w.Lost > 0 || w.Owner != "" || w.Quota != nil || w.Rebalancing != 0 || w.Nodes != 0) {
				w = proto.CloneOf(w)
				w.Lost, w.Losses, w.Rebalancing, w.Nodes, w.Grows = 0, nil, dirpb.Rebalancing_REBALANCING_NONE, 0, false
				w.Owner, w.Access, w.Quota = "", nil, nil
			}
			m.Namespaces = append(m.Namespaces, w)
		}
	}
	for _, pg := range s.PGs(only) {
		switch {
		case x == nil:
			pg = proto.CloneOf(pg)
			for _, mem := range regions(pg) {
				mem.Keys = nil
			}
		case pg.Planned != nil || pg.Leaving != nil || pg.Joining:
			pg = proto.CloneOf(pg)
			pg.Planned, pg.Leaving = nil, nil
			for _, mem := range pg.Members {
				mem.Retained, mem.Rejoins = nil, false
			}
		}
		m.Pgs = append(m.Pgs, pg)
	}
	for _, sh := range ordered.Values(s.shards) {
		if only == 0 || sh.NamespaceId == only {
			m.Shards = append(m.Shards, sh)
		}
	}
	return m
}

// WantRegions are the regions that one process of a memory node must have.
func (s *State) WantRegions(node uint32, incarnation uint64) []*dirpb.WantRegion {
	var want []*dirpb.WantRegion
	for _, pg := range ordered.Values(s.pgs) {
		if pg.State == dirpb.PGState_PG_LOST {
			continue
		}
		for _, m := range regions(pg) {
			if m.NodeId == node && m.Incarnation == incarnation {
				want = append(want, &dirpb.WantRegion{
					PgId: pg.Id, NamespaceId: pg.NamespaceId, RegionBytes: pg.RegionBytes, IndexBytes: pg.IndexBytes,
					Epoch: pg.Epoch, Published: len(m.Keys) > 0, Since: m.Since, Retain: m.Retained,
				})
			}
		}
	}
	return want
}
