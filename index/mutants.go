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
	// MutEmptyShared: EMPTY carries the nonce but not the deleter (loss of A).
	MutEmptyShared
	// MutInsertPair: the two group READs of an insert serve as expected and new.
	MutInsertPair
	// MutHelperBlind: a helper's CAS is not preceded by a look at the record.
	MutHelperBlind
	// MutPublishGoesOn: publish goes on with x->n after a stage that had n (r = 3).
	MutPublishGoesOn
	// MutRecordFirst: a cached GET reads the record before the slot, and words
	// learnt at A are remembered.
	MutRecordFirst
	// MutVerIsEpoch: ver is the reclaim epoch, modulo 4 here so that it repeats soon.
	MutVerIsEpoch
	// MutNoAgeBound: a cached word serves as an expectation however old it is.
	MutNoAgeBound
	// MutRetrySameWord: a word that may have been seen is posted again (loss of A).
	MutRetrySameWord
	// MutJoinNoAck: the joiner is filled before every session knows of it.
	MutJoinNoAck
	// MutThawEarly: a frozen placement group is active before every session has
	// quiesced.
	MutThawEarly
	// MutJoinSkipsEmpty: EMPTY words are not carried to a joiner.
	MutJoinSkipsEmpty
	// MutReadJoiner: readers read a joiner alone before it is a copy.
	MutReadJoiner
	// MutFollowMovedAtA: MOVED seen at A is followed at once.
	MutFollowMovedAtA
	// MutFollowSplitAtA: SPLIT seen at A is followed at once.
	MutFollowSplitAtA
	// MutInsertHalfMoved: an insert does not look for a move that is not over.
	MutInsertHalfMoved
	// MutInsertInChild: a key is inserted into a child that its group has not moved
	// to.
	MutInsertInChild
	// MutCopyBeforeFrozen: the child gets a word before P shows it FROZEN.
	MutCopyBeforeFrozen
	// MutMovedBeforeCopy: MOVED is set before the copy is there.
	MutMovedBeforeCopy
	// MutChildOnlyAtA: the child's word is set at its arbiter only.
	MutChildOnlyAtA
	// MutCleanEarly: MOVED is cleared before every session has acknowledged.
	MutCleanEarly
	// MutResumePublish: a decided Op goes on publishing in a new view.
	MutResumePublish
	// MutParkedKeepsLock: an Op that waits for a map keeps its insert lock.
	MutParkedKeepsLock
	// MutResumedIsNew: a decided Op that goes on counts under the new map.
	MutResumedIsNew
	// MutHintsSurvive: hints into what moved are used.
	MutHintsSurvive
	// MutRecallAOnly: recall moves what A shows and syncs nothing.
	MutRecallAOnly
	// MutRecallPOnly: recall moves only what P shows.
	MutRecallPOnly
	// MutRecallNoWait: a recalled extent is free as soon as the scan is done.
	MutRecallNoWait
	// MutRecallNoAck: recall waits for no acknowledgement.
	MutRecallNoAck
	// MutSilentAcked: a silent session counts as having acknowledged before it
	// is fenced.
	MutSilentAcked
	// MutVersionClash: versions carry no discriminator.
	MutVersionClash
	// MutEvictUnpublished: an eviction ends when A has it (r >= 2).
	MutEvictUnpublished
	// MutEvictFreesFirst: an evicted place goes to limbo before its publish (r >= 2).
	MutEvictFreesFirst
	// MutEvictAtPublisher: the publisher decides evictions (r >= 2).
	MutEvictAtPublisher
	// MutEvictFrozen: FROZEN words are evicted.
	MutEvictFrozen
	// MutEvictUnproven: what an access word says of an expiry is believed.
	MutEvictUnproven
	// MutEvictAsDelete: an eviction leaves the word that a delete of its session leaves.
	MutEvictAsDelete
	// MutDeletesTogether: two deletes of a key by one session are under way at once.
	MutDeletesTogether
	// MutUnchangedByPlace: "unchanged" goes by the place that the slot names, whatever its state.
	MutUnchangedByPlace
	// MutGoneFromCheck: an EMPTY in the slot that held the caller's version answers "not found".
	MutGoneFromCheck
	// MutUnchangedForEver: "unchanged" is answered of a record that expires, by its slot alone.
	MutUnchangedForEver
	NumMutants
)

var mutantNames = [...]string{"none", "empty-is-zero", "negative-from-cache", "fp-is-proof",
	"lost-put-is-done", "no-insert-lock", "break-lock-early", "ver-stays", "reuse-now", "reuse-at-min", "reply-after",
	"answered-not-in-flight", "no-sync-before-insert", "answer-before-sync", "ack-before-publish",
	"limbo-before-publish", "crc-proves",
	"empty-shared", "insert-pair", "helper-blind", "publish-goes-on", "record-first", "ver-is-epoch", "no-age-bound",
	"retry-same-word", "join-no-ack", "thaw-early", "join-skips-empty", "read-joiner", "follow-moved-at-a",
	"follow-split-at-a", "insert-half-moved", "insert-in-child", "copy-before-frozen", "moved-before-copy",
	"child-only-at-a", "clean-early", "resume-publish", "parked-keeps-lock", "resumed-is-new", "hints-survive",
	"recall-a-only", "recall-p-only", "recall-no-wait", "recall-no-ack", "silent-acked", "version-clash",
	"evict-unpublished", "evict-frees-first", "evict-at-publisher", "evict-frozen", "evict-unproven", "evict-as-delete",
	"deletes-together", "unchanged-by-place", "gone-from-check", "unchanged-for-ever"}

func (m Mutant) String() string { return mutantNames[min(int(m), len(mutantNames)-1)] }
