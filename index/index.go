// Package index is the data-path protocol: one step machine per operation, which
// names the verbs of each round trip and says what their results mean.
//
// An [Op] never waits, posts or reads a clock. Next returns an [Action]; for Post
// the caller performs Accesses, fills in their results and calls Next again. The
// blocking client, the pipelined client, the simulator and the crash tests all
// drive the same machine. An Op asks an [Env] for what it needs from its session: routes, places, hints, versions.
// The operations of janitors, and eviction, are in package index/repair. An Op drives such a [Machine] as it does
// its own steps, and [Base] is how it does that.
//
// Placement, rkeys, queue pairs and time belong to others. An Op belongs to one
// goroutine; its buffers belong to the driver that performs its accesses between Post and
// the next Next.
//
// docs/protocol.md is this package in prose; steps there carry the names of
// [Step]. Ideas: RACE (ATC'21) and FUSEE (FAST'23) for one-sided hash indexes,
// etcd/raft's Ready for the machine's shape.
package index

import (
	"errors"
	"fmt"
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
	Replica uint8 // position in the placement group's chain: 0 head, last tail
	// NoWait: off the path. The round is over without it, its result is of no
	// interest, and the caller repeats it after a reconnection.
	NoWait bool
	Failed bool // result: completed with an error; effect unknown
	// Refused, beside Failed: it was never posted, so it has no effect.
	Refused bool
	// Apart is not 0 of a READ or a WRITE of a record whose value does not lie in Buf: see Op.ValueOf. Access fills a
	// cache line.
	Apart uint8
	// IfHit, of a CAS: it is skipped unless the CAS in front of it hit; see rdma.IfHit.
	IfHit bool
	Off   uint64 // bytes from the start of the region
	Buf   []byte // READ: destination; WRITE: source
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

// MaxCAS bounds the CASes that one round waits for.
const MaxCAS = 32

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
	// Grow: the segment of Route.Shard has no slot left. Ask for a split, wait a
	// little, then Next; or Fail with ErrFull.
	Grow
	// Reconnect: an access failed. Reconnect the queue pair so that nothing
	// posted before can land any more, then Next; or Fail.
	Reconnect
	// Fetch: read Object from its volume, set Object.Got, then Next. The Op keeps nothing that it has seen in memory:
	// it holds back neither the reclaim epoch nor a map. It counts as begun when it goes on.
	Fetch
	// Store: append Tiered.Object to as many volumes as it needs, durable enough, set Tiered.To, then Next; or Fail.
	// The Op waits as with Fetch.
	Store
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
	// Scan reads part of one segment; see Op.Scan.
	Scan
	// Raw reads bytes of a region, for tools that show or check them.
	Raw
	// Prepare places a transaction's intent at a key; see Txn.
	Prepare
	// Settle takes an intent away when its transaction is decided.
	Settle
	// Decide swings a transaction's status word.
	Decide
	// Exists is a Get of no value, which notes no use. Its Record has the Version, the Expiry and the Key alone.
	Exists
	// Pin is an Exists that has the access word say until when its record is pinned: Op.Expiry, Unix ms. 0 unpins it.
	// Nothing is written where PG.Notes is false.
	Pin
	// The next ones are those of tier nodes; see Tiered. They answer ErrKept if the key is not as they need it, or
	// changes meanwhile. Nothing has happened then.

	// Demote puts a stub in place of the key's record, once Store has kept the record.
	Demote
	// Promote puts the record back in place of the key's stub. It needs no Tiered.
	Promote
	// Readdress has the key's stub name the same object at other addresses.
	Readdress
	// Drop makes a key absent whose stub names an object.
	Drop
	// Locate finds whether the key's stub names an object, and sees to it that the tail shows what the head does.
	Locate
	// Transact is a transaction in one chain, or two; see Transaction.
	Transact
	// The rest is a janitor's; see Machine.

	// Sync brings every word of a segment up on every replica.
	Sync
	// Move moves one home group's share of a shard's moved set to the child.
	Move
	// Clean clears what a move left behind in one group.
	Clean
	// Abandon makes one home group whole again whose child was lost.
	Abandon
	// Relocate moves the records of one group out of an extent.
	Relocate
	// Scrub checks and repairs the records of a segment on every replica.
	Scrub
	// Evict removes records of one group: those that have expired, and in a cache
	// those that its caller picks.
	Evict
	// SettleAll takes away the intents of one group, whosever they are.
	SettleAll
)

// NumKinds bounds arrays indexed by Kind.
const NumKinds = 26

func (k Kind) String() string {
	return [...]string{"invalid", "get", "put", "delete", "modify", "scan", "raw", "prepare", "settle", "decide",
		"exists", "pin", "demote", "promote", "readdress", "drop", "locate", "transact", "sync", "move", "clean",
		"abandon", "relocate", "scrub", "evict", "settle-all"}[min(k, NumKinds-1)]
}

// Reads reports whether k is about one key and changes nothing.
func (k Kind) Reads() bool { return k == Get || k.asks() }

// asks reports whether k wants to know that its key is there, and no value.
func (k Kind) asks() bool { return k == Exists || k == Pin }

// isWork reports whether k is a janitor's.
func (k Kind) isWork() bool { return k >= Sync }

// Cond restricts a Put or Delete.
type Cond uint8

const (
	Always    Cond = iota // the zero value: unconditional
	IfAbsent              // Put, Prepare: only if there is no such key
	IfVersion             // Put, Delete, Prepare: only if the record's version is Op.IfVersion; Get: only if it is not
	IfPresent             // Put, Prepare: only if there is such a key
	// IfOlder, of a Put, gives the record Op.IfVersion as its version. It holds only if the key has no record, expired
	// or not, whose version is as great: so versions grow all the same.
	IfOlder
)

// Answers. Each is decided: ErrUnknown alone leaves open whether the operation
// happened.
var (
	ErrNotFound = errors.New("not found")
	ErrExists   = errors.New("key exists")
	ErrConflict = errors.New("version conflict")
	// ErrUnchanged: the record is the one that the caller of a Get has.
	ErrUnchanged = errors.New("unchanged")
	// ErrFull: no memory, or no slot in the key's segment; nothing changed.
	ErrFull = errors.New("full")
	// ErrTier: the value lies in the tier, where it cannot be read now; nothing changed.
	ErrTier = errors.New("the value lies in the tier, and cannot be read there now")
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
	stepReadSegment
	stepScanRecords
	stepReadRaw
	stepSyncChunk
	stepSplitSeen
	stepReadFrozen
	stepReadStatus
	stepAbortStatus
	stepSyncStatus
	stepReadIntent
	stepSyncIntent
	stepMendWords
	stepMendChildren
	stepMendCopies
	stepMendWrite
	stepMendSync
	stepReadObject
	stepStoreObject
	stepTransact
	stepConfirm
	stepReadDecided
	// The rounds of package index/repair.

	StepReadCopies
	StepReadGroups
	StepLockGroups
	StepFetchRecords
	StepReadWord
	StepCASWords
	StepPublishWords
	StepSetHeaders
	StepWipeWords
	StepReadChild
	StepCopyRead
	StepCopyWrite
	StepCopyChunk
	StepScrubRecords
	StepScrubChunk
	StepScrubSame
	StepWriteCopies
	StepSampleGroups
	StepReadVictims
	StepReadBehind
	StepReadBefore
	StepVerifyBehind
	StepCASBehind
	stepDone
)

var stepNames = [...]string{"invalid", "start", "check-slot", "get-cached", "read-group", "read-records", "read-stash",
	"read-stash-records", "read-chunks", "write-chunks", "cas-slot", "read-lost", "lock-group", "sync-group",
	"locked-records", "set-ovf", "publish", "sync-read", "sync-prev", "sync-verify", "sync-cas", "read-manifest",
	"resolve", "read-segment", "scan-records", "read-raw", "sync-chunk", "split-seen", "read-frozen", "read-status",
	"abort-status", "sync-status", "read-intent", "sync-intent",
	"mend-words", "mend-children", "mend-copies", "mend-write", "mend-sync", "read-object", "store-object", "transact",
	"confirm", "read-decided",
	"read-copies", "read-groups", "lock-groups", "fetch-records", "read-word", "cas-words", "publish-words",
	"set-headers",
	"wipe-words", "read-child", "copy-read", "copy-write", "copy-chunk", "scrub-records", "scrub-chunk", "scrub-same",
	"write-copies", "sample-groups", "read-victims",
	"read-behind", "read-before", "verify-behind", "cas-behind", "done"}

func (s Step) String() string { return stepNames[min(int(s), len(stepNames)-1)] }

// Steps lists every step, for tests that loop over them.
func Steps() (s []Step) {
	for i := stepStart; i <= stepDone; i++ {
		s = append(s, i)
	}
	return s
}
