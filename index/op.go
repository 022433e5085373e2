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
	// Request. The caller sets it before Start. Key and Value stay the caller's and must not change until Done.
	Key       []byte     // nil: the Op is not about one key
	Value     []byte     // Put; a Modify leaves here what it computed
	Hash      uint64     // of Key, seeded by the namespace; of a Scan its shard's hash prefix, left-aligned
	Check     uint64     // more hash bits of Key, for Env.Hint
	IfVersion uint64     // for Cond IfVersion, IfOlder; a Get with it ends with ErrUnchanged if it is the record's
	Expiry    uint64     // Put: Unix ms, 0 = none; a Modify leaves here what it computed
	Modify    ModifyFunc // of a Modify, never nil then
	Scan      *Page      // request and answer of a Scan
	Raw       *RawRead   // request of a Raw
	Part      *Part      // of a Get that wants a part of the value, or a Put of one; else nil
	Machine   Machine    // of a janitor's kinds
	Txn       *Txn       // of a transaction's kinds, in part an answer
	Tiered    *Tiered    // of a tier's kinds, in part an answer
	// Whole is the longest record, in bytes, that is written in one piece: a longer value goes to chunks. 0:
	// layout.MaxRecordSize.
	Whole uint32
	// Pinned, of a Put or a Prepare, is until when eviction passes over the record, in Unix seconds; 0: it does not.
	// Such a record expires at layout.MaxPinnedExpiry at the latest.
	Pinned uint32
	// Apart is the length of records, in bytes, from which their values go straight to and from the caller's memory.
	// 0: the default, 8 KiB.
	Apart uint16
	// Patience is how often the Op waits for an undecided transaction in its first attempt before aborting it, twice as
	// often in each further attempt. 0: the default, about two milliseconds; negative: never.
	Patience int8
	Kind     Kind // never 0
	Cond     Cond // of a Get, Put, Delete or Prepare
	// Keeps, of a Modify: the function changes the expiry alone. It may be given a stub, whose value nobody reads then.
	// The flags and the value that it returns do not count, and a stub stays one.
	Keeps bool
	// Flags of the record written, of layout.FlagsOfValue. A Modify leaves here what it computed.
	Flags layout.RecordFlags

	// The record under change, which x names. Only methods of the Op write from here to lock.
	slot      uint8              // where x is, as in Hint
	xFlags    HintFlags          // of x's record; 0 if that is not known
	flags     layout.RecordFlags // of n's record
	wantCode  uint8              // of the place that Env.Alloc was asked for last; see Wanted
	step      Step               // whose results the next Next consumes; 0 before Start
	after     Step               // where to go on after Reconnect or Refresh; 0: from the beginning
	havePlace bool               // n's place is the Op's; false once n is published or the place given back
	prepared  bool               // n's record is encoded in own, as version
	atA       bool               // what is under change was read at A, P need not show it
	locked    bool               // lock is in the group, as its CAS has shown; lock is not 0 then
	lockTried bool               // the lock's CAS was posted, perhaps
	expired   bool               // x's record had expired when it was read
	rebase    bool               // there is another placement group epoch now; set by Rebase, for the next Next
	astray    bool               // what Astray reports; each Next begins with false
	unlinked  bool               // x's place has been handed over, which happens once
	stub      bool               // what a Modify writes is a stub
	sureChild bool               // the move of child's group is complete: the child may take inserts
	retries   int32              // looks without a wait between them; after maxRetries there is a Backoff
	child     uint32             // shard id of the child that the key was followed to, or 0
	x, n      layout.Word        // the word that slot is to hold, and the one to take its place
	xVersion  uint64             // of x's record; 0 if that is not known
	version   uint64             // of n's record: above xVersion, but for copies of a record
	lock      layout.Lock        // the Op's own word; 0: no lock can hold it
	publishing
	noted
	Counts

	// Answer, final at Done.
	Err     error         // nil: done; ErrUnknown alone leaves open whether it happened
	Version uint64        // of the record found or written
	Record  layout.Record // Get: aliases the Op's buffers

	// Exchange with the caller, who performs Accesses after Post and writes their results before the next Next.
	Accesses []Access // its memory is kept over Reset
	Route    Route    // where the Op acts; from Env, taken anew whenever it starts over

	env   Env          // set by Start alone
	own   []byte       // encoded record, in memory of env.Buf, as rec and cells are
	rec   []byte       // the first record read
	cells *[3 * 8]byte // for words that are read

	*far // nil until need makes it; kept over Reset
}

// publishing is how far the change has come: n's record and the word n on the replicas of the placement group.
type publishing struct {
	pubK     uint8 // the replica that publish has come to, 1 or more
	written  uint8 // replicas, from the head on, that have n's record
	deciding bool  // the CAS x→n at A is under way, or its outcome is open; never with won
	won      bool  // that CAS took effect, and not every replica is known to show it
	adrift   bool  // a failed WRITE to the Op's place may still land, until the reconnection
	spread   bool  // replicas behind A may show n though A has not taken it
}

// noted is how an access becomes known to those who evict.
type noted struct {
	noting   bool // this access is to be noted; word 2 has the access word, if it was read
	noteRead bool // word 2 has the access word, or will; false: a new key has none
}

// Counts are of an Op since Start.
type Counts struct {
	// Waits counts Backoff, AskFenced and Refresh answers without progress in
	// between; the caller waits longer each time.
	Waits int32
	// Rounds counts round trips ("Costs" in docs/protocol.md).
	Rounds int32
	// Mended counts damaged copies of records that the Op has written anew from good ones.
	Mended int32
}

// far is what the ways of an Op need that cost more than one round trip or begin without a hint, and what
// is not about one key. It is there from the first of them on.
type far struct {
	parts                 [][]byte // of a long value that was read, in order; aliases recs, or the caller's memory
	apartRead, apartWrite bool     // Accesses may have their values apart, in READs and in WRITEs
	inOne                 bool     // no record is read with its value apart any more
	used                  bool     // need was called since Reset, so that Reset has something to clear
	// LockOwner is the session that holds the lock that AskFenced is about.
	LockOwner   uint32
	OwnerFenced bool // the caller's answer to AskFenced; false again with another LockOwner
	// MapCurrent, if not 0, is the version of a map that was the newest when the directory was asked, after the Op had
	// been Astray in it several times: what keeps it astray there is damage.
	MapCurrent uint64

	bytes      uint64      // that a Machine's rounds have read and written, but for atomics
	lockOff    uint64      // of the group's lock in the region; set by addLock
	lockExpect layout.Lock // what the CAS of the lock expects: 0, or the word of an owner that is asked about
	answer     error       // what to answer after a sync

	// Buffers of a lookup, of env.Buf, kept until Reset.
	recs      [][]byte  // the second record read and those behind it
	groups    [5][]byte // A or reader, P, stash, stash at P, a joiner's
	cand      []uint8   // slots (as in Hint) whose records were asked for
	stashRead bool      // the stash came with the locked group's records, and is to be looked at next
	diff      []uint8   // slots to be synced

	// The sync under way, which sync begins. Replicas before syncK have been brought up.
	syncK        uint8       // the replica that is brought up now
	syncSlot     uint8       // as in Hint, or HeaderSlot
	syncThen     Step        // where to go on when all replicas are brought up
	syncQ, syncB layout.Word // R[k]'s word, and the one that it is to take
	syncRecs     [2][]byte   // buffers of syncB's record, at R[k] and at R[k-1]
	syncBase     uint64      // region offset of the group that syncSlot is in; 0: the key's own
	// which of the records that an intent names is copied: 1 the parent, 2 the final one; 0: the slot's own
	syncNamed uint8
	chunk     int // next chunk to copy

	// A Scan's, begun anew with each segment that it reads.
	segment      []byte    // its index, as readers see it
	joiners      []byte    // the joiner's copy of segment
	corrupts     int       // errors of the page so far, those beyond maxCorrupts too
	onPage       []pageRef // words whose records are read, in the order of Accesses
	pageCorrupt  error     // what its index lacks: records that are read again begin from here
	pageCorrupts int       // corrupts, likewise

	// Long values: those written, then those read.
	chunks        []layout.Chunk     // the Op's places; empty once a manifest that names them is published
	chunkID       uint64             // that the chunks and their manifest carry, a version
	base          int                // number of the first of chunks: 0, but for a part of a Draft
	readID        uint64             // that the chunks which are read must carry
	readOffs      []uint64           // of the chunks that are read, in the region
	readLen       int                // bytes of what the chunks that are read hold
	payload       int                // of that in each of them but the last, bytes
	whole         []byte             // the caller's memory for bytes [lo, hi) of that
	lo, hi        int                // likewise
	windowed      bool               // the chunks are read to whole, a window at a time
	chunksShown   bool               // parts are where the chunks are, and their headers alone are read
	slotRead      bool               // the slot was read before them, in the same chain
	first         int                // chunk that the window begins with
	values        [chunkWindow]Value // of the accesses whose values are apart, by Access.Apart - 1
	chunksWritten bool               // every replica of this placement group epoch has chunks
	parent        *Route             // of a Machine that is at the child, or while the Op is at a status word; else nil

	// Damage.
	mending mending // the search for a good copy that is under way, or was last
	ruins   []ruin  // records without a good copy that were met since Reset
	hides   error   // a ruined record that may have been the Op's key's: the key counts as absent to nobody
	syncRaw bool    // the record under sync is ruined, and is copied as it is

	// Transactions.
	fixed         uint64  // region offset of the word under change if that is a status word; else 0
	met           meeting // the intent that was met last
	intent, final final   // of a Prepare; a Settle's copy of a record is final

	*rare // nil until needRare makes it; kept over Reset
}

// rare is what an Op needs only where a value lies in the tier, or a placement group publishes speculatively. It is
// there from the first time on. Others do not clear it.
type rare struct {
	rarely bool // needRare was called since Reset

	Object  Object // the exchange of Fetch
	reading reading
	spec    speculating // written by methods of speculate.go, and by sync and prepare where PG.Speculative
}

// ModifyFunc computes the new record from the present one (nil if there is none): its value, flags (of
// layout.FlagsOfValue) and expiry (Unix ms, 0 = none). An error ends the Op with it, nothing changed. It may be called
// several times; the last call counts. The value it returns must stay unchanged until the next call or Done, so it does
// not lie in cur's memory.
type ModifyFunc func(cur *layout.Record) (value []byte, flags layout.RecordFlags, expiry uint64, err error)

func (o *Op) need() *far {
	if o.far == nil {
		o.far = &far{}
	}
	o.far.used = true
	return o.far
}

func (o *Op) needRare() *rare {
	f := o.need()
	if f.rare == nil {
		f.rare = &rare{}
	}
	f.rarely = true
	return f.rare
}

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
		if f.rare != nil && f.rarely {
			*f.rare = rare{}
		}
		*f = far{recs: f.recs[:0], cand: f.cand[:0], diff: f.diff[:0], chunks: f.chunks[:0], rare: f.rare}
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

// Step is where the Op stands: the round under way, or where it goes on. It is 0 before Start.
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
	bound := o.step > stepStart && o.step < stepDone && !o.step.holdsNothing() || o.adrift ||
		o.lock != 0 || o.deciding || o.won || o.spread
	return o.Route.MapVersion, bound && o.Route.PG != nil
}

// Posted reports whether the deciding verb has been posted without a known
// result: the operation may have happened.
func (o *Op) Posted() bool { return o.deciding || (o.won || o.spread) && o.step != stepDone }

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
	switch o.step {
	case stepCASSlot:
		o.deciding, o.spread = false, o.spread && o.spec.late
	case stepTransact:
		o.Machine.(*Transaction).notPosted()
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
	if o.step == stepStart || o.step.holdsNothing() {
		o.keepLock() // the caller has not posted what came with the last action
	}
	o.Accesses = o.Accesses[:0]
	if o.Posted() {
		o.leak()
		o.won, o.spread = false, false
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
	o.won, o.spread = false, false
	o.step = stepDone
	return Done
}
