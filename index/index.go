// Package index is the data-path protocol: one step machine per operation, which
// names the verbs of each round trip and says what their results mean.
//
// An [Op] never waits, posts or reads a clock. Next returns an [Action]; for Post
// the caller performs Accesses, fills in their results and calls Next again. The
// blocking client, the pipelined client, the simulator and the crash tests all
// drive the same machine. What an Op needs from its session (routes, places,
// hints, versions) it asks of an [Env].
//
// Placement, rkeys, queue pairs and time belong to others. An Op belongs to one
// goroutine; its buffers belong to whoever performs its accesses between Post and
// the next Next.
//
// docs/protocol.md is this package in prose; steps there carry the names of
// [Step]. Ideas: RACE (ATC'21) and FUSEE (FAST'23) for one-sided hash indexes,
// etcd/raft's Ready for the machine's shape.
package index

import (
	"errors"
	"fmt"

	"github.com/kvd-project/kvd/internal/layout"
)

// Verb is what one access does. The zero value is invalid.
type Verb uint8

const (
	Read Verb = 1 + iota
	Write
	CAS
)

func (v Verb) String() string { return [...]string{"INVALID", "READ", "WRITE", "CAS"}[min(v, 3)] }

// Space says which of a region's two MRs an access uses.
type Space uint8

const (
	Index Space = 1 + iota // READ + ATOMIC
	Heap                   // READ + WRITE
)

// Access is one verb of a round trip. Accesses to one replica form a chain: they
// take effect in the order they stand in. Chains of different replicas run in
// parallel.
type Access struct {
	Verb    Verb
	Space   Space
	Replica uint8 // position in the placement group's chain: 0 arbiter, last publisher
	// NoWait: off the path. The round is over without it, its result is of no
	// interest, and the caller repeats it after a reconnection.
	NoWait bool
	Failed bool // result: completed with an error; effect unknown
	// Refused, beside Failed: it was never posted, so it has no effect.
	Refused bool
	Off     uint64 // bytes from the start of the region
	Buf     []byte // READ: destination; WRITE: source
	// CAS
	Expect, New uint64
	Found       uint64 // result: the word before
}

func (a Access) String() string {
	where := fmt.Sprintf("r%d+%#x", a.Replica, a.Off)
	switch a.Verb {
	case CAS:
		return fmt.Sprintf("CAS %s %#x -> %#x", where, a.Expect, a.New)
	default:
		return fmt.Sprintf("%v %s %dB", a.Verb, where, len(a.Buf))
	}
}

// Action is what Next asks of the caller.
type Action uint8

const (
	// Post: perform Accesses, then call Next.
	Post Action = 1 + iota
	// Alloc: Env.Alloc had no place; call Next when there may be one, or Fail
	// with ErrFull. The Op starts afresh then and counts as begun then.
	Alloc
	// Refresh: fetch a map newer than the Op's Route, then Next.
	Refresh
	// Backoff: wait a little, then Next.
	Backoff
	// AskFenced: set OwnerFenced to whether session LockOwner is confirmed
	// fenced, wait a little if it is not, then Next.
	AskFenced
	// Grow: the cluster of Route.Shard has no slot left. Ask for a split, wait a
	// little, then Next; or Fail with ErrFull.
	Grow
	// Reconnect: an access failed. Reconnect the queue pair so that nothing
	// posted before can land any more, then Next; or Fail.
	Reconnect
	// Done: Err and the answer fields are final. Accesses may hold NoWait
	// accesses still to be posted.
	Done
)

// Kind is the operation. The zero value is invalid.
type Kind uint8

const (
	Get Kind = 1 + iota
	Put
	Delete
	// Modify reads the record, calls Op.Modify and writes what it returns if
	// nobody changed the record in between.
	Modify
	// Scan reads part of one cluster; see Op.Scan.
	Scan
	// Raw reads bytes of a region, for tools that show or check them.
	Raw
	// The rest is a janitor's; see work.go.

	// Sync brings every word of a cluster up on every replica.
	Sync
	// Move moves one home group's share of a shard's moved set to the child.
	Move
	// Clean clears what a move left behind in one group.
	Clean
	// Abandon makes one home group whole again whose child was lost.
	Abandon
	// Relocate moves the records of one group out of an extent.
	Relocate
	// Scrub checks and repairs the records of a cluster on every replica.
	Scrub
	// Evict removes records of one group: those that have expired, and in a cache
	// those that Work.Choose picks.
	Evict
)

// NumKinds bounds arrays indexed by Kind.
const NumKinds = 14

func (k Kind) String() string {
	return [...]string{"invalid", "get", "put", "delete", "modify", "scan", "raw",
		"sync", "move", "clean", "abandon", "relocate", "scrub", "evict"}[min(k, 13)]
}

// isWork reports whether k is a janitor's.
func (k Kind) isWork() bool { return k >= Sync }

// Cond restricts a Put or Delete.
type Cond uint8

const (
	Always    Cond = iota // the zero value: unconditional
	IfAbsent              // Put: only if there is no such key
	IfVersion             // Put, Delete: only if the record's version is Op.IfVersion; Get: only if it is not
	IfPresent             // Put: only if there is such a key
)

// Answers. Each is decided: ErrUnknown alone leaves open whether the operation
// happened.
var (
	ErrNotFound = errors.New("not found")
	ErrExists   = errors.New("key exists")
	ErrConflict = errors.New("version conflict")
	// ErrUnchanged: the record is the one that the caller of a Get has.
	ErrUnchanged = errors.New("unchanged")
	// ErrFull: no memory, or no slot in the key's cluster; nothing changed.
	ErrFull = errors.New("full")
	// ErrUnknown: the operation may have happened.
	ErrUnknown = errors.New("unknown outcome")
)

// Step is where an Op stands; its name appears in traces, metrics and
// docs/protocol.md.
type Step uint8

const (
	stepStart Step = 1 + iota
	stepCheckSlot
	stepGetCached
	stepReadGroup
	stepReadRecords
	stepReadStash
	stepReadStashRecords
	stepReadChunks
	stepWriteChunks
	stepCASSlot
	stepReadLost
	stepLockGroup
	stepSyncGroup
	stepLockedRecords
	stepSetOVF
	stepPublish
	stepSyncRead
	stepSyncPrev
	stepSyncVerify
	stepSyncCAS
	stepReadManifest
	stepResolve
	stepReadCluster
	stepScanRecords
	stepReadRaw
	stepSyncChunk
	stepSplitSeen
	stepWork
	stepDone
)

var stepNames = [...]string{"invalid", "start", "check-slot", "get-cached", "read-group", "read-records", "read-stash",
	"read-stash-records", "read-chunks", "write-chunks", "cas-slot", "read-lost", "lock-group", "sync-group",
	"locked-records", "set-ovf", "publish", "sync-read", "sync-prev", "sync-verify", "sync-cas", "read-manifest",
	"resolve", "read-cluster", "scan-records", "read-raw", "sync-chunk", "split-seen", "work", "done"}

func (s Step) String() string { return stepNames[min(int(s), len(stepNames)-1)] }

// Steps lists every step, for tests that loop over them.
func Steps() (s []Step) {
	for i := stepStart; i <= stepDone; i++ {
		s = append(s, i)
	}
	return s
}

// PG is what an Op knows of a placement group in one epoch.
type PG struct {
	ID       uint32
	Epoch    uint32
	Replicas uint8
	// Joining: the last replica is a joiner. Writers take it for the publisher;
	// it is no copy yet, so readers compare it with the one before.
	Joining bool
	// Generation is the epoch in which the memory was made. Words and places of
	// another generation mean nothing.
	Generation uint32
	// Head identifies the arbiter's memory: the same in two epochs, it is the same.
	Head uint64
	// AccessOff is where the access words begin, IndexBytes from the region's start; the
	// word of what is at index offset x is at AccessOff + x. 0: there are none.
	AccessOff uint64
	// The heap, in units: records lie in [HeapLo, HeapHi).
	HeapLo, HeapHi uint32
	// Recalled are the extents in which no place is taken or reused.
	Recalled []uint32
}

// publisher is where a write becomes visible.
func (p *PG) publisher() uint8 { return p.Replicas - 1 }

// tail is where records are read: the publisher, or the one before a joiner.
func (p *PG) tail() uint8 {
	if p.Joining {
		return p.Replicas - 2
	}
	return p.Replicas - 1
}

// IsRecalled reports whether unit lies in an extent being recalled.
func (p *PG) IsRecalled(unit uint32) bool {
	for _, x := range p.Recalled {
		if unit/layout.ExtentUnits == x {
			return true
		}
	}
	return false
}

// Route is where a hash lives under one map version.
type Route struct {
	PG         *PG
	Shard      uint32 // id of its array of clusters, never used for another
	Depth      uint8  // bits of hash prefix that the shard covers
	ShardOff   uint64 // of the first cluster, bytes in the region
	Clusters   uint32
	MapVersion uint64
	// Child is where keys of the moved set go while the shard splits or migrates,
	// nil while it does neither. It has as many clusters.
	Child *Route
	// Split: the moved set is the hashes whose bit below the prefix is 1.
	// Otherwise it is all of them.
	Split bool
}

// moves reports whether hash belongs to the moved set.
func (r *Route) moves(hash uint64) bool { return !r.Split || layout.HashBit(hash, r.Depth) }

// Hint is what a session remembers of a key: the word that named its record,
// and where. A hint is never an answer, only a guess that a READ or CAS proves.
type Hint struct {
	Word    layout.Word
	Version uint64
	Shard   uint32 // its array
	Slot    uint8  // slot of the home group, or StashSlot + slot of the stash group
	Flags   HintFlags
}

// StashSlot is added to the number of a slot in the stash group.
const StashSlot = 32

// HintFlags qualify a hint.
type HintFlags uint8

const (
	HintManifest HintFlags = 1 << iota // the record is a manifest
	HintExpires                        // the record has an expiry
)

// Env is what an Op needs of its session. Calls happen inside Next, on its
// goroutine, and do not block.
type Env interface {
	// Session is the session's id, never 0.
	Session() uint32
	// Stamp differs for every call of every lane of the session.
	Stamp() uint32
	// Version returns a version greater than after, unique in the cluster.
	Version(after uint64) uint64
	// NowMillis is the Unix time in milliseconds; only TTLs depend on it.
	NowMillis() uint64
	// Route finds a hash's placement group; ok is false while the map has none
	// that is active.
	Route(hash uint64) (r Route, ok bool)
	// RouteShard is Route for a Scan: the shard whose hash prefix covers the one
	// given (left-aligned).
	RouteShard(prefix uint64) (r Route, ok bool)
	// RoutePG finds a placement group; frozen: also one that is frozen.
	RoutePG(id uint32, frozen bool) (r Route, ok bool)
	// RouteMove finds a shard that splits or migrates by its id, for a janitor.
	RouteMove(shard uint32) (r Route, ok bool)
	// ReadOnly: the session may not CAS or WRITE.
	ReadOnly() bool
	// HashOf is the hash of a key in this namespace, for a janitor.
	HashOf(key []byte) uint64
	// Crowded: the shard fills up and should split before it is full.
	Crowded(shard uint32)

	// Hint returns what is remembered of the Op's key, if it was last seen less
	// than layout.WordLifeEpochs ago.
	Hint(o *Op) (Hint, bool)
	Remember(o *Op, h Hint)
	Forget(o *Op)

	// NoteDue asks, at most once for each look at a record, whether this access to the
	// Op's key is worth noting: then the Op reads the slot's access word on the way, and
	// calls Note when it has succeeded. Only where PG.AccessOff is not 0.
	NoteDue(o *Op) bool
	// Note writes the access word of the slot at off in the index, of whose record w is
	// the word: off the path, and with no harm if it is lost. old is what was there, as
	// far as it is known; born: the record is a new key's.
	Note(o *Op, off uint64, w layout.Word, old layout.AccessWord, expiry uint64, born bool)

	// Deleting reports whether another Delete of the Op's key by this session is posted and
	// not decided.
	Deleting(o *Op) bool

	// Buf returns n bytes of registered, 8-byte aligned memory that stays with
	// the Op until it is recycled.
	Buf(o *Op, n int) []byte

	// Alloc takes a place for a record of size code; ver and size are what its slot word
	// must carry. size may be larger than code: a READ of the record brings more than it.
	Alloc(pg *PG, code uint8) (unit uint32, ver uint16, size uint8, ok bool)
	// Unuse returns a place that no word ever named; nothing is under way to it.
	Unuse(pg *PG, w layout.Word)
	// Unlinked hands over the place of w, which this Op has replaced and
	// published: it goes to limbo.
	Unlinked(pg *PG, w layout.Word)
	// Retire hands over the place of w, a word of this Op that did not take
	// effect but may have been seen: limbo, and its ver is spent.
	Retire(pg *PG, w layout.Word)
	// Leak says that the place of w is lost to this session; recall finds it.
	Leak(pg *PG, w layout.Word)
}
