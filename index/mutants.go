package index

// Mutant is a deliberate protocol mistake. The simulator switches one on at a
// time to prove that it would be noticed; ordinary builds contain none of them
// (build tag kvdmutants).
type Mutant uint8

const (
	NoMutant Mutant = iota
	// MutEmptyIsZero: EMPTY carries no nonce.
	MutEmptyIsZero
	// MutNegativeFromCache: an EMPTY under a cached word answers "not found".
	MutNegativeFromCache
	// MutFPIsProof: a matching fingerprint counts as a matching key.
	MutFPIsProof
	// MutLostPutIsDone: a blind PUT whose CAS lost answers "overwritten".
	MutLostPutIsDone
	// MutNoInsertLock: inserts do without the group's lock.
	MutNoInsertLock
	// MutBreakLockEarly: a lock is broken when its owner's lease has run out,
	// before its fence is confirmed.
	MutBreakLockEarly
	// MutVerStays: a place's next life carries the same ver.
	MutVerStays
	// MutReuseNow: a place is reused without waiting for the reclaim minimum.
	MutReuseNow
	// MutReuseAtMin: a place is reused at minimum >= instead of >.
	MutReuseAtMin
	// MutReplyAfter: the E of a reply received after the unlink counts, whenever
	// its renewal was sent.
	MutReplyAfter
	// MutAnsweredNotInFlight: an operation that answered (deadline) no longer
	// holds back the reclaim minimum.
	MutAnsweredNotInFlight
	// MutNoSyncBeforeInsert: the group's other slots are not synced before the
	// insert's CAS (r >= 2).
	MutNoSyncBeforeInsert
	// MutAnswerBeforeSync: "conflict" and "exists" are answered as soon as A
	// shows them (r >= 2).
	MutAnswerBeforeSync
	// MutAckBeforePublish: a write is acknowledged once A has it (r >= 2).
	MutAckBeforePublish
	// MutLimboBeforePublish: limbo starts when A has swung (r >= 2).
	MutLimboBeforePublish
	// MutCRCProves: sync takes a good CRC for proof of the copy (r >= 2).
	MutCRCProves
	NumMutants
)

var mutantNames = [...]string{"none", "empty-is-zero", "negative-from-cache", "fp-is-proof",
	"lost-put-is-done", "no-insert-lock", "break-lock-early", "ver-stays", "reuse-now", "reuse-at-min", "reply-after",
	"answered-not-in-flight", "no-sync-before-insert", "answer-before-sync", "ack-before-publish",
	"limbo-before-publish", "crc-proves"}

func (m Mutant) String() string { return mutantNames[min(int(m), len(mutantNames)-1)] }
