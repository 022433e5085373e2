package index

import (
	"fmt"

	"github.com/kvd-project/kvd/internal/invariants"
	"github.com/kvd-project/kvd/internal/layout"
)

// Op is one operation on one key (or one scan page). The caller fills the request
// fields, calls Start once, then obeys Next until Done; Reset makes it fresh.
//
// The Op itself has all that a key operation with a hint needs. The rest hangs on it, made when it is first needed
// and kept over Reset.
type Op struct {
	// Request. Key and Value stay the caller's and must not change until Done.
	Key       []byte
	Value     []byte // Put; a Modify leaves here what it computed
	Hash      uint64 // of Key, seeded by the namespace
	Check     uint64 // more hash bits of Key, for Env.Hint
	IfVersion uint64 // for Cond IfVersion; a Get with it ends with ErrUnchanged if that is the record's
	Expiry    uint64 // Put: Unix ms, 0 = none; a Modify leaves here what it computed
	Modify    ModifyFunc
	Scan      *Page    // request and answer of a Scan
	Raw       *RawRead // request of a Raw
	Machine   Machine  // of a janitor's kinds
	Txn       *Txn     // of a transaction's kinds
	// Whole is the longest record, in bytes, that is written in one piece: a longer value goes to chunks. 0:
	// layout.MaxRecordSize.
	Whole uint32
	// Patience is how often the Op waits for an undecided transaction in its first attempt before aborting it, twice as
	// often in each further attempt. 0: the default, about two milliseconds; negative: never.
	Patience int8
	Kind     Kind
	Cond     Cond
	// Flags of the record written, of layout.FlagsOfValue. A Modify leaves here what it computed.
	Flags layout.RecordFlags

	// The record under change: cur is what x names.
	slot      uint8 // as in Hint
	xFlags    HintFlags
	flags     layout.RecordFlags // of the record written
	wantCode  uint8              // of the place it takes, or waits for; see Wanted
	step      Step
	after     Step // where to go on after Reconnect or Refresh
	pubK      uint8
	havePlace bool
	prepared  bool  // n's record is encoded in own
	written   uint8 // replicas, from the head on, that have n's record
	deciding  bool  // the CAS x→n at A is under way
	won       bool
	adrift    bool // a failed WRITE to the Op's place may still land
	atA       bool // what is under change was read at A, P need not show it
	locked    bool
	lockTried bool // the lock's CAS was posted, perhaps
	expired   bool
	rebase    bool // there is another placement group epoch now
	noting    bool // this access is to be noted; word 2 has the access word, if it was read
	noteRead  bool
	astray    bool
	unlinked  bool
	sureChild bool // the move of child's group is complete: the child may take inserts
	retries   int32
	child     uint32 // shard id of the child that the key was followed to, or 0
	x, n      layout.Word
	xVersion  uint64
	version   uint64
	lock      layout.Lock

	// Waits counts Backoff, AskFenced and Refresh answers without progress in
	// between; the caller waits longer each time.
	Waits int32
	// Rounds counts round trips ("Costs" in docs/protocol.md).
	Rounds int32
	// Mended counts damaged copies of records that the Op has written anew from good ones.
	Mended int32

	// Answer, final at Done.
	Err     error
	Version uint64        // of the record found or written
	Record  layout.Record // Get: aliases the Op's buffers

	// Exchange with the caller.
	Accesses []Access // its memory is kept over Reset
	Route    Route

	env   Env
	own   []byte       // encoded record
	rec   []byte       // the first record read
	cells *[3 * 8]byte // for words that are read

	*far
}

// far is what the ways of an Op need that cost more than one round trip or begin without a hint, and what
// is not about one key. It is there from the first of them on.
type far struct {
	used bool

	parts [][]byte // of a long value that was read
	// LockOwner is the session that holds the lock that AskFenced is about.
	LockOwner   uint32
	OwnerFenced bool // the caller's answer
	// MapCurrent, if not 0, is the version of a map that was the newest when the directory was asked, after the Op had
	// been Astray in it several times: what keeps it astray there is damage.
	MapCurrent uint64

	bytes      uint64 // that a Machine's rounds have read and written, but for atomics
	lockOff    uint64 // of the group's lock in the region
	lockExpect layout.Lock
	answer     error // what to answer after a sync

	recs      [][]byte  // the second record read and those behind it
	groups    [5][]byte // A or reader, P, stash, stash at P, a joiner's
	cand      []uint8   // slots (as in Hint) whose records were asked for
	stashRead bool
	diff      []uint8 // slots to be synced

	syncK        uint8
	syncSlot     uint8
	syncThen     Step
	syncQ, syncB layout.Word
	syncRecs     [2][]byte
	syncBase     uint64 // region offset of the group that syncSlot is in; 0: the key's own
	// which of the records that an intent names is copied: 1 the parent, 2 the final one; 0: the slot's own
	syncNamed     uint8
	chunk         int // next chunk to copy
	segment       []byte
	joiners       []byte // the joiner's copy of segment
	corrupts      int    // of the Scan's page
	onPage        []pageRef
	pageCorrupt   error // what its index lacks
	pageCorrupts  int
	chunks        []layout.Chunk
	chunkID       uint64
	readID        uint64
	readOffs      []uint64 // of the chunks that are read, in the region
	chunksWritten bool
	parent        *Route // of a Machine that is at the child, or while the Op is at a status word; else nil

	mending mending
	ruins   []ruin
	hides   error // a ruined record that may have been the Op's key's: the key counts as absent to nobody
	syncRaw bool  // the record under sync is ruined, and is copied as it is

	fixed         uint64 // region offset of the word under change if that is a status word
	met           meeting
	intent, final final // of a Prepare; a Settle's copy of a record is final
}

// ModifyFunc computes the new record from the present one (nil if there is none): its value, flags (of
// layout.FlagsOfValue) and expiry (Unix ms, 0 = none). An error ends the Op with it, nothing changed. It may be called
// several times; the last call counts. The value it returns must stay unchanged until the next call or Done, so it does
// not lie in cur's memory.
type ModifyFunc func(cur *layout.Record) (value []byte, flags layout.RecordFlags, expiry uint64, err error)

// need makes sure that o.far is there.
func (o *Op) need() *far {
	if o.far == nil {
		o.far = &far{}
	}
	o.far.used = true
	return o.far
}

// long reports whether the Op has places for chunks.
func (o *Op) long() bool { return o.far != nil && len(o.chunks) > 0 }

// hasPlaces reports whether the Op has places that no word names.
func (o *Op) hasPlaces() bool { return o.havePlace || o.long() || o.hasTxnPlace() }

// RawRead asks for bytes of one replica of a placement group, all of them in one space. A Raw
// leaves them in Op.Record.Value.
type RawRead struct {
	PG      uint32
	Replica uint8
	Space   Space
	Off     uint64 // bytes from the start of the region
	Len     int    // bytes
}

// Reset prepares o for another request; its buffers are the Env's again.
func (o *Op) Reset() {
	accs, f := o.Accesses[:0], o.far
	*o = Op{}
	o.Accesses, o.far = accs, f
	if f != nil && f.used {
		clear(f.recs)
		*f = far{recs: f.recs[:0], cand: f.cand[:0], diff: f.diff[:0], chunks: f.chunks[:0]}
	}
}

// Start binds the Op to its session.
func (o *Op) Start(env Env) {
	if invariants.On {
		o.checkRequest()
	}
	o.env = env
	o.step = stepStart
}

// Parts is the value of a Get of a long value, in order; it aliases the Op's buffers. nil: the value is in
// Record.
func (o *Op) Parts() [][]byte {
	if o.far == nil {
		return nil
	}
	return o.parts
}

// OnFrozen reports whether the Op works on a placement group that is frozen, as it should be.
func (o *Op) OnFrozen() bool { return o.Machine != nil && o.Machine.OnFrozen() }

// Wanted is what Alloc asked for: units in one run, in placement group pg.
func (o *Op) Wanted() (pg uint32, units uint32) {
	if o.Machine != nil {
		pg, code := o.Machine.Wanted()
		return pg, layout.UnitsOf(code)
	}
	return o.Route.PG.ID, layout.UnitsOf(o.wantCode)
}

// Step is where the Op stands.
func (o *Op) Step() Step { return o.step }

// Rebase says that the placement group of o.Route is in another of its epochs now, or is
// frozen. Nothing of the Op is under way. Next goes on under the new view: what
// A decided is looked up again, what it has not decided starts over. No publish
// or sync is carried across a view change.
func (o *Op) Rebase() {
	if o.step != stepDone {
		o.rebase = true
	}
}

// MapVersion is the oldest map that the Op still acts by. ok is false while it acts by none: it will ask for its
// route before its next access. Then nothing that it posted can still land.
func (o *Op) MapVersion() (v uint64, ok bool) {
	bound := o.step > stepStart && o.step < stepDone || o.adrift || o.lock != 0 || o.deciding || o.won
	return o.Route.MapVersion, bound && o.Route.PG != nil
}

// Posted reports whether the deciding verb has been posted without a known
// result: the operation may have happened.
func (o *Op) Posted() bool { return o.deciding || (o.won && o.step != stepDone) }

// Decides reports whether the accesses of the last Post decide at the head what the other replicas are to show
// afterwards.
func (o *Op) Decides() bool { return o.step == stepCASSlot && o.Route.PG.Replicas > 1 }

// Untouched reports whether the Op has changed nothing yet, and neither posted nor holds anything that would. Such
// an Op may still end as if it had not begun.
func (o *Op) Untouched() bool {
	return !o.Posted() && o.lock == 0 && !o.hasPlaces()
}

// NotPosted says that the accesses of the last Post were not performed, and will
// not be; Fail follows. Nothing of them has happened: neither the deciding CAS nor the release of the lock.
func (o *Op) NotPosted() {
	if o.step == stepCASSlot {
		o.deciding = false
	}
	if !o.lockTried {
		o.lock = 0 // nobody has seen it
	}
	o.keepLock()
}

// keepLock takes back the release of the lock that is among the accesses, which will not be performed.
func (o *Op) keepLock() {
	for i := range o.Accesses {
		if a := &o.Accesses[i]; a.NoWait && o.lock == 0 && o.far != nil && a.Off == o.lockOff {
			o.lock, o.lockTried = layout.Lock(a.Expect), true
		}
	}
}

// Fail ends the Op from outside: its time is over, or memory, the map or the
// queue pair cannot be had. Nothing of it may be under way any more, or only
// verbs that its session keeps counting as in flight. If the Op may have
// happened, Err is ErrUnknown joined with err; otherwise err.
func (o *Op) Fail(err error) Action {
	if o.Machine == nil {
		o.toParent()
	}
	if o.adrift || o.anyFailed() {
		o.leakOwn() // a WRITE may still land there
	}
	if o.step == stepStart {
		o.keepLock() // the caller has not posted what came with the last action
	}
	o.Accesses = o.Accesses[:0]
	if o.Posted() {
		o.leak()
		o.won = false
		return o.finish(fmt.Errorf("%w: %w", ErrUnknown, err))
	}
	return o.finish(err)
}

func (o *Op) finish(err error) Action {
	o.endMachine()
	o.toParent()
	o.begin()
	if o.lock != 0 {
		o.addUnlock()
	}
	if o.noting && err == nil {
		o.writeAccess()
	}
	o.dropPlace()
	o.Err = err
	o.won = false
	o.step = stepDone
	return Done
}
