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
	"errors"
	"fmt"

	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
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

// The kind of a row is the first byte of its key. Ids follow big-endian.
const (
	rowAudit     = 'a'
	rowDirectory = 'd'
	rowHeap      = 'h'
	rowJob       = 'j'
	rowLevel     = 'l'
	rowMeta      = 'm'
	rowVolume    = 'v'
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
	VolumeID  uint32                      // KeepVolume

	Audit *dirpb.AuditEntry // of a command that somebody asked for, if it changed something

	// Lost are the placement groups that lost all their copies with this command while
	// they may have held records. Any command that takes memory away may set it.
	Lost []Lost
}

// Lost says that a placement group lost all its copies, the last one with a memory node.
type Lost struct {
	Namespace string
	PG        uint32
	Volume    uint32 // instead of a placement group
	Node      string
	// HeldBytes is what sessions had been granted there: at least what records took.
	HeldBytes uint64
}

// Arrival says how a memory node that registered compares with what was known of it.
type Arrival int

// Arrivals, by what was known of the memory node's name before.
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
	// The rows, which Apply and Load alone write. A command replaces a message by a changed copy,
	// and mark notes that. Keys are ids unless said otherwise.
	meta       *fsmpb.Meta  // never nil; the last id of each kind, and the map's version
	level      *fsmpb.Level // never nil
	nodes      map[uint32]*dirpb.Node
	namespaces map[uint32]*dirpb.Namespace
	pgs        map[uint32]*dirpb.PlacementGroup
	heaps      map[uint32]*fsmpb.Heap // by placement group
	shards     map[uint32]*dirpb.Shard
	sessions   map[uint32]*fsmpb.Session
	jobs       map[uint32]*fsmpb.Job
	volumes    map[uint32]*dirpb.Volume
	directory  map[string]*fsmpb.Directory  // by the directory node's id
	audit      map[uint32]*dirpb.AuditEntry // by slot: the last MaxAudit
	reigns     map[uint32]*fsmpb.Reign      // by slot: the last MaxReigns

	// Derived from the rows, or from the command being applied.
	roster     roster                   // follows from sessions
	changed    map[string]proto.Message // rows, by key; nil: deleted. Its Result takes them
	mapChanged bool                     // something that Map shows is in changed
	lost       []Lost                   // by the command being applied
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
		volumes:    make(map[uint32]*dirpb.Volume),
		directory:  make(map[string]*fsmpb.Directory),
		audit:      make(map[uint32]*dirpb.AuditEntry),
		reigns:     make(map[uint32]*fsmpb.Reign),
		roster:     newRoster(),
		changed:    make(map[string]proto.Message),
	}
}

// Apply carries out c. A command that this version does not know is ErrLevel: a directory node must go no further,
// since others do carry it out.
func Apply(s *State, c *fsmpb.Command) Result {
	var r Result
	if n := len(c.ProtoReflect().GetUnknown()); n > 0 {
		return Result{Err: fmt.Errorf("%w: a command has %d bytes of fields of a later version; this one knows "+
			"levels up to %d", ErrLevel, n, Level)}
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
	case *fsmpb.Command_KeepVolume, *fsmpb.Command_SilenceVolume, *fsmpb.Command_GiveUpVolume:
		r.VolumeID, r.Err = s.applyVolume(c)
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
	if err := errors.Join(CheckText("id", d.Id), CheckText("Raft address", d.RaftAddr),
		CheckText("gRPC address", d.GrpcAddr), CheckText("identity", d.Identity)); err != nil {
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
// ErrForeign. The id is free when the directory node has been removed. An empty identity is that of a caller without
// TLS, which may do everything.
func (s *State) CheckDirectoryOwner(id, identity string) error {
	if old := s.directory[id].GetIdentity(); old != "" && identity != "" && old != identity {
		return fmt.Errorf("%w: directory node %q belongs to %s, not to %s; remove the directory node first if its id "+
			"is to change hands", ErrForeign, id, old, identity)
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
