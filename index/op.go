package index

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/kvd-project/kvd/internal/layout"
)

// Op is one operation on one key (or one scan page). The caller fills the request
// fields, calls Start once, then obeys Next until Done; Reset makes it fresh.
type Op struct {
	// Request. Key and Value stay the caller's and must not change until Done.
	Kind      Kind
	Cond      Cond
	Key       []byte
	Value     []byte
	Hash      uint64 // of Key, seeded by the namespace
	Check     uint64 // more hash bits of Key, for Env.Hint
	IfVersion uint64 // for Cond IfVersion; a Get with it ends with ErrUnchanged if that is the record's
	Expiry    uint64 // Put: Unix ms, 0 = none
	// Flags of the record written: layout.FlagUser or none. Modify may set it.
	Flags layout.RecordFlags
	// Modify computes the new value and expiry from the present record (nil if
	// there is none). An error ends the Op with it, nothing changed. It may be
	// called several times; the last call counts. The value it returns must stay
	// unchanged until the next call or Done.
	Modify func(cur *layout.Record) (value []byte, expiry uint64, err error)
	// Scan starts at slot ScanFrom (0..509, and 510..1019 for what has moved to a
	// child) of cluster ScanCluster of the shard
	// that covers hash prefix Hash.
	// ScanShard is the array in which ScanFrom was found, 0 if it is 0; afterwards
	// that of this page.
	ScanCluster uint32
	ScanShard   uint32
	ScanFrom    uint16
	ScanBytes   int  // stop after about so many bytes of records
	ScanExpired bool // include what has expired and is still there
	// Work says what a janitor's kinds work on; see work.go.
	Work Work
	// Raw reads RawLen bytes at RawOff of one replica of placement group RawPG,
	// all of them in one space.
	RawPG      uint32
	RawReplica uint8
	RawSpace   Space
	RawOff     uint64
	RawLen     int

	// Answer, final at Done.
	Err     error
	Record  layout.Record // Get: aliases the Op's buffers
	Parts   [][]byte      // Get of a long value: its pieces in order
	Version uint64        // of the record found or written
	Found   []layout.Record
	// Corrupt says what of a Scan's page could not be read, nil if nothing: Found is the
	// rest.
	Corrupt error
	// ScanNext is the slot to go on from, or 0 when the cluster is done.
	ScanNext uint16
	ScanEnd  bool // that was the shard's last cluster and it is done

	// Exchange with the caller.
	Accesses []Access
	// LockOwner and LockWord describe the lock that AskFenced is about.
	LockOwner   uint32
	OwnerFenced bool
	Route       Route
	// MapCurrent, if not 0, is the version of a map that was the newest when the directory was asked,
	// after the Op had been Astray in it several times: what keeps it astray there is damage.
	MapCurrent uint64
	// Waits counts Backoff, AskFenced and Refresh answers without progress in
	// between; the caller waits longer each time.
	Waits int
	// Rounds counts round trips (§10 of docs/protocol.md).
	Rounds int

	env   Env
	step  Step
	after Step // where to go on after Reconnect or Refresh

	accs []Access // Accesses' memory, kept over Reset

	// The record under change: cur is what x names.
	slot       uint8 // as in Hint
	x          layout.Word
	xVersion   uint64
	xFlags     HintFlags
	n          layout.Word
	havePlace  bool
	wantCode   uint8 // of the place it takes, or waits for; see Wanted
	written    bool  // n's record is on every replica
	deciding   bool  // the CAS x→n at A is under way
	won        bool
	adrift     bool // a failed WRITE to the Op's place may still land
	atA        bool // what is under change was read at A, P need not show it
	locked     bool
	lockTried  bool // the lock's CAS was posted, perhaps
	lock       layout.Lock
	lockOff    uint64 // of the group's lock in the region
	lockExpect layout.Lock
	version    uint64
	value      []byte
	expiry     uint64
	flags      layout.RecordFlags
	prepared   bool
	answer     error // what to answer after a sync
	retries    int
	expired    bool
	rebase     bool // the placement group has another epoch now
	noting     bool // this access is to be noted; words[2] has the access word, if it was read
	noteRead   bool
	child      uint32 // shard id of the child that the key was followed to, or 0
	sureChild  bool   // its group's move is complete: the child may take inserts
	astray     bool

	ownLen int
	own    []byte // encoded record
	recs   [][]byte
	words  [3][]byte
	groups [5][]byte // A or tail, P, stash, stash at P, a joiner's

	cand      []uint8 // slots (as in Hint) whose records were asked for
	stashRead bool

	diff []uint8

	pubK     uint8
	syncK    uint8
	syncSlot uint8
	syncRecs [2][]byte
	unlinked bool
	syncBase uint64 // region offset of the group that syncSlot is in; 0: the key's own
	cluster  []byte
	corrupts int    // of the Scan's page
	joiners  []byte // the joiner's copy of cluster
	chunk    int    // next chunk to copy
	syncQ    layout.Word
	syncB    layout.Word
	syncThen Step

	chunks        []layout.Chunk
	chunkID       uint64
	readID        uint64
	chunksWritten bool

	work *workState // of a janitor's kinds
}

// Reset prepares o for another request; its buffers are the Env's again.
func (o *Op) Reset() {
	accs, recs, cand, diff, chunks := o.accs, o.recs, o.cand, o.diff, o.chunks
	clear(recs)
	*o = Op{}
	o.accs, o.recs, o.cand, o.diff, o.chunks = accs, recs[:0], cand[:0], diff[:0], chunks[:0]
}

// Start binds the Op to its session.
func (o *Op) Start(env Env) {
	o.env = env
	o.step = stepStart
}

// Step is where the Op stands.
func (o *Op) Step() Step { return o.step }

// Rebase says that the placement group of o.Route has another epoch now, or is
// frozen. Nothing of the Op is under way. Next goes on under the new view: what
// A decided is looked up again, what it has not decided starts over. No publish
// or sync is carried across a view change.
func (o *Op) Rebase() {
	if o.step != stepDone {
		o.rebase = true
	}
}

// MapVersion is the oldest map that the Op still acts by; ok is false while it acts by
// none: it will ask for its route before its next access, and nothing that it
// posted can still land.
func (o *Op) MapVersion() (v uint64, ok bool) {
	bound := o.step > stepStart && o.step < stepDone || o.adrift || o.lock != 0 ||
		(o.deciding || o.won) && !Mutation(MutResumedIsNew)
	return o.Route.MapVersion, bound && o.Route.PG != nil
}

// Posted reports whether the deciding verb has been posted without a known
// result: the operation may have happened.
func (o *Op) Posted() bool { return o.deciding || (o.won && o.step != stepDone) }

// Untouched reports whether the Op has changed nothing yet, and neither posted nor holds anything that
// would: it may still end as if it had not begun.
func (o *Op) Untouched() bool {
	return !o.Posted() && o.lock == 0 && !o.havePlace && len(o.chunks) == 0
}

// ---- the machine -----------------------------------------------------------

func (o *Op) begin() {
	if o.accs == nil {
		o.accs = make([]Access, 6)
	}
	o.Accesses = o.accs[:0]
}

func (o *Op) add(a Access) *Access {
	o.Accesses = append(o.Accesses, a)
	return &o.Accesses[len(o.Accesses)-1]
}

func (o *Op) post(next Step) Action {
	o.step = next
	o.Rounds++
	return Post
}

// Astray reports whether the last action is Refresh or Backoff because of a group that says that
// something moved, while the Op's map has no move: the map is late, or the group damaged. A move is
// in the map before its first word is in memory, so the directory can tell; see MapCurrent.
func (o *Op) Astray() bool { return o.astray }

// stray waits, as action a, for the map of a move of which group g, at off as replica k showed it,
// tells.
func (o *Op) stray(a Action, g layout.Group, off uint64, k uint8) Action {
	if o.MapCurrent != 0 && o.MapCurrent == o.Route.MapVersion {
		return o.finish(o.groupError(off, k, g.MoveError()))
	}
	o.astray = true
	return o.unlockAnd(a)
}

// Next consumes the results of the last action and says what to do next.
func (o *Op) Next() Action {
	o.astray = false
	a := o.next()
	switch a {
	case Backoff, AskFenced, Refresh:
		o.Waits++
	case Done:
		o.Waits = 0
	}
	if a == Alloc && !o.Kind.isWork() {
		// While it waits for memory the Op keeps nothing that it has seen, nor
		// the lock: it would hold back the reclaim epoch that frees memory.
		o.step = stepStart
		o.begin()
		if o.lock != 0 {
			o.addUnlock()
		}
	}
	return a
}

func (o *Op) next() Action {
	if o.step == stepLockGroup || o.step == stepWork {
		o.lockTried = true
	}
	if o.step > stepStart && o.anyFailed() {
		return o.fault()
	}
	if o.rebase {
		return o.rebased()
	}
	switch o.step {
	case stepStart:
		return o.start()
	case stepCheckSlot:
		return o.checkedSlot()
	case stepGetCached:
		return o.gotCached()
	case stepReadGroup:
		return o.gotGroup()
	case stepReadRecords, stepReadStashRecords:
		return o.gotRecords()
	case stepReadStash:
		return o.gotStash()
	case stepReadChunks:
		return o.gotChunks()
	case stepWriteChunks:
		o.chunksWritten = true
		if o.x != 0 {
			return o.update()
		}
		return o.lockGroup()
	case stepCASSlot:
		return o.casDone()
	case stepReadLost:
		return o.gotLost()
	case stepLockGroup:
		return o.gotLock()
	case stepSyncGroup:
		return o.syncGroup()
	case stepLockedRecords:
		return o.gotLockedRecords()
	case stepSetOVF:
		return o.gotOVF()
	case stepPublish:
		return o.gotPublish()
	case stepSyncRead, stepSyncPrev, stepSyncVerify, stepSyncCAS:
		return o.syncNext()
	case stepReadManifest:
		return o.gotManifest()
	case stepResolve:
		return o.resolved()
	case stepReadCluster:
		return o.gotCluster()
	case stepScanRecords:
		return o.gotScanRecords()
	case stepReadRaw:
		o.Record.Value = o.recs[0]
		return o.finish(nil)
	case stepSyncChunk:
		return o.gotSyncChunk()
	case stepSplitSeen:
		return o.splitSeen()
	case stepWork:
		return o.workNext()
	}
	panic(fmt.Sprintf("index: Next in step %v", o.step))
}

func (o *Op) anyFailed() bool {
	for i := range o.Accesses {
		if o.Accesses[i].Failed && !o.Accesses[i].NoWait {
			return true
		}
	}
	return false
}

// fault handles a failed access. After Reconnect nothing that was posted can
// land any more, so what a READ then shows is final.
func (o *Op) fault() Action {
	if o.step == stepCASSlot && o.theCAS().Refused {
		o.deciding = false
	}
	o.Accesses = o.Accesses[:0]
	switch {
	case o.deciding:
		o.after = stepResolve
	case o.won:
		// Decided at A; sync brings the rest of the chain up.
		o.after = stepPublish
	default:
		// The lock may have been taken: o.lock stays set, so that the next
		// attempt knows its own word and the end clears it.
		o.written, o.chunksWritten, o.locked = false, false, false
		o.adrift = true
		if len(o.chunks) > 0 {
			o.prepared = false
		}
		o.after = 0
	}
	o.step = stepStart
	return Reconnect
}

// rebased is fault without a failed access: the round trip is over, but the
// view it belonged to is not in force any more.
func (o *Op) rebased() Action {
	if o.step > stepStart {
		if o.step == stepCASSlot && o.deciding {
			// It completed: what it found is known.
			o.deciding = false
			if layout.Word(o.theCAS().Found) == o.x {
				o.won = true
			}
		}
		adrift := o.adrift
		o.fault()
		o.adrift = adrift // every access completed
	}
	o.rebase = false
	return o.start()
}

// start begins the Op, or goes on with it after a Reconnect.
func (o *Op) start() Action {
	after := o.after
	if after == stepResolve || after == stepPublish {
		return o.resume(after)
	}
	o.after, o.adrift, o.syncBase, o.noting = 0, false, 0, false
	o.toParent()
	r, ok := o.route()
	if !ok {
		return Refresh
	}
	if after != stepLockGroup || !o.OwnerFenced && !Mutation(MutBreakLockEarly) || !sameMemory(&o.Route, &r) {
		o.lockExpect = 0 // what it knew of the lock's owner is over
	}
	if o.lock != 0 && !sameMemory(&o.Route, &r) {
		// The lock of another group: nobody is to wait for it.
		if o.Route.PG.ID != r.PG.ID || o.Route.PG.Head == r.PG.Head {
			o.begin()
			o.addUnlock()
			return Backoff
		}
		o.lock, o.locked = 0, false // it went with the arbiter
	}
	if o.havePlace || len(o.chunks) > 0 {
		switch {
		case !samePlaces(o.Route.PG, r.PG), o.placeRecalled(r.PG):
			o.dropPlace()
		case o.Route.PG.Epoch != r.PG.Epoch:
			o.written, o.chunksWritten = false, false // not on every replica of this epoch
			if len(o.chunks) > 0 {
				o.prepared = false
			}
		}
	}
	o.Route = r
	return o.dispatch()
}

// sameMemory reports whether b's groups are those of a, in memory that lives on.
func sameMemory(a, b *Route) bool {
	return a.PG == nil || a.PG.ID == b.PG.ID && a.PG.Head == b.PG.Head && a.ShardOff == b.ShardOff
}

// samePlaces reports whether a place of a is one of b.
func samePlaces(a, b *PG) bool { return a.ID == b.ID && a.Generation == b.Generation }

func (o *Op) placeRecalled(pg *PG) bool {
	if o.havePlace && pg.IsRecalled(o.n.Unit()) {
		return true
	}
	for _, c := range o.chunks {
		if pg.IsRecalled(c.Unit) {
			return true
		}
	}
	return false
}

// resume goes on with an Op that A has decided, or may have, in the view now in
// force and where it was decided: a shard that moved meanwhile is none of its
// business.
func (o *Op) resume(after Step) Action {
	o.step = stepStart
	old := o.Route.PG
	r, ok := o.env.RoutePG(old.ID, o.Kind.isWork() && o.Work.Frozen)
	if !ok {
		return Refresh
	}
	o.after, o.adrift = 0, false
	if !samePlaces(old, r.PG) {
		o.leak()
		o.won = false
		return o.finish(fmt.Errorf("%w: placement group %d lost its memory", ErrUnknown, old.ID))
	}
	o.Route.PG = r.PG
	if old.Head != r.PG.Head {
		o.lock, o.locked = 0, false // it went with the arbiter
		// What was won there need not be known here.
		o.deciding, o.won = true, false
		after = stepResolve
	}
	switch {
	case after == stepResolve:
		return o.resolve()
	case Mutation(MutResumePublish):
		return o.publish()
	}
	return o.sync(o.slot, 1, stepPublish)
}

func (o *Op) route() (r Route, ok bool) {
	switch {
	case o.Kind == Scan:
		o.child = 0
		return o.env.RouteShard(o.Hash)
	case o.Kind == Raw:
		return o.env.RoutePG(o.RawPG, false)
	case o.Kind == Move, o.Kind == Abandon:
		return o.env.RouteMove(o.Work.Shard)
	case o.Kind.isWork():
		return o.env.RoutePG(o.Work.PG, o.Work.Frozen)
	}
	if r, ok = o.env.Route(o.Hash); !ok || o.child == 0 {
		return r, ok
	}
	if r.Child != nil && r.Child.Shard == o.child && r.moves(o.Hash) {
		return *r.Child, r.Child.PG != nil
	}
	o.child, o.sureChild = 0, false
	return r, true
}

// goChild follows the key to where its group moves; sure: the group's move is
// complete. The publisher has shown it, in its copy of g, which is at off.
func (o *Op) goChild(sure bool, g layout.Group, off uint64) Action {
	r, ok := o.env.Route(o.Hash)
	if ok && r.Child == nil && r.Shard == o.Route.Shard && r.MapVersion == o.Route.MapVersion {
		return o.stray(Refresh, g, off, o.Route.PG.tail())
	}
	if !ok || r.Child == nil || r.Shard != o.Route.Shard {
		return o.again(Refresh) // the map is newer than the move
	}
	o.child, o.sureChild = r.Child.Shard, sure
	if o.lock != 0 {
		return o.unlockAnd(Backoff)
	}
	return o.again(0)
}

// splitDone reports whether h says that the group's move is complete and the
// Op's map does not know.
func (o *Op) splitDone(h layout.Header) bool {
	return h.Split() && h.Depth() > o.Route.Depth && o.Route.moves(o.Hash)
}

// again restarts the Op after something that took no effect; a is what to ask
// of the caller first, 0 for nothing.
func (o *Op) again(a Action) Action {
	if o.retries++; a == 0 && o.retries > maxRetries {
		o.retries, a = 0, Backoff
	}
	if a != 0 {
		return o.unlockAnd(a) // nobody waits with a lock
	}
	o.step = stepStart
	o.Accesses = o.Accesses[:0]
	return o.start()
}

const maxRetries = 8

// dispatch chooses the first round trip.
func (o *Op) dispatch() Action {
	if o.Kind.isWork() {
		return o.startWork()
	}
	switch o.Kind {
	case Scan:
		return o.readCluster()
	case Raw:
		o.begin()
		o.add(Access{Verb: Read, Space: o.RawSpace, Replica: o.RawReplica, Off: o.RawOff, Buf: o.recBuf(0, o.RawLen)})
		return o.post(stepReadRaw)
	}
	h, hinted := o.env.Hint(o)
	if c := o.Route.Child; hinted && c != nil && h.Shard == c.Shard && o.Route.moves(o.Hash) && c.PG != nil {
		o.Route, o.child = *c, c.Shard // it was found there before
	}
	if hinted && (h.Shard != o.Route.Shard || !layout.InHeap(h.Word, o.Route.PG.HeapLo, o.Route.PG.HeapHi)) {
		hinted = false
	}
	switch o.Kind {
	case Get:
		switch {
		case hinted && o.Cond == IfVersion && h.Version == o.IfVersion && (h.Flags&HintExpires == 0 || Mutation(MutUnchangedForEver)) && !o.Route.PG.Joining:
			return o.checkSlot(h)
		case hinted:
			return o.getCached(h)
		}
		return o.readGroup()
	case Modify:
		if hinted {
			return o.getCached(h)
		}
		return o.readGroup()
	case Put:
		o.value, o.expiry = o.Value, o.Expiry
		switch {
		case o.Cond == Always && !hinted:
			return o.lockGroup()
		case hinted && (o.Cond == Always || o.Cond == IfVersion && h.Version == o.IfVersion && h.Flags&HintExpires == 0):
			o.take(h)
			return o.update()
		case hinted:
			return o.getCached(h)
		case o.Cond == IfAbsent:
			return o.lockGroup()
		}
		return o.readGroup()
	case Delete:
		if hinted && h.Flags&HintExpires == 0 && (o.Cond == Always || h.Version == o.IfVersion) {
			o.take(h)
			return o.casDelete()
		}
		if hinted {
			return o.getCached(h)
		}
		return o.readGroup()
	}
	panic(fmt.Sprintf("index: kind %v", o.Kind))
}

// take makes h's word the one under change.
func (o *Op) take(h Hint) {
	o.slot, o.x, o.xVersion, o.xFlags = h.Slot, h.Word, h.Version, h.Flags
	o.expired = false
}

// takeRecord makes w at slot, read just now as r, the one under change.
func (o *Op) takeRecord(slot uint8, w layout.Word, r *layout.Record) {
	o.take(Hint{Word: w, Version: r.Version, Slot: slot, Flags: flagsOf(r)})
	o.expired = o.isExpired(&r.RecordHeader)
}

// isExpired asks for the time only of records that expire.
func (o *Op) isExpired(h *layout.RecordHeader) bool {
	return h.Expiry != 0 && h.Expired(o.env.NowMillis())
}

func flagsOf(r *layout.Record) (f HintFlags) {
	if r.Flags&layout.FlagManifest != 0 {
		f |= HintManifest
	}
	if r.Expiry != 0 {
		f |= HintExpires
	}
	return f
}

func (o *Op) home() uint64 {
	h, _ := layout.GroupOff(o.Hash, o.Route.Clusters)
	return o.Route.ShardOff + h
}

func (o *Op) stash() uint64 {
	_, s := layout.GroupOff(o.Hash, o.Route.Clusters)
	return o.Route.ShardOff + s
}

// headerSlot, for sync, is the header of a group.
const headerSlot = 0xff

// slotOff is the region offset of a slot numbered as in Hint.
func (o *Op) slotOff(slot uint8) uint64 {
	if o.syncBase != 0 {
		if slot == headerSlot {
			return o.syncBase
		}
		return o.syncBase + layout.SlotOff(int(slot))
	}
	if slot == headerSlot {
		return o.home()
	}
	if slot >= StashSlot {
		return o.stash() + layout.SlotOff(int(slot-StashSlot))
	}
	return o.home() + layout.SlotOff(int(slot))
}

// ---- buffers ---------------------------------------------------------------

func (o *Op) word(i int) []byte {
	if o.words[i] == nil {
		o.words[i] = o.env.Buf(o, 8)
	}
	return o.words[i]
}

func (o *Op) group(i int) []byte {
	if o.groups[i] == nil {
		o.groups[i] = o.env.Buf(o, layout.GroupSize)
	}
	return o.groups[i]
}

// recBuf is the i-th record buffer, n bytes long.
func (o *Op) recBuf(i, n int) []byte {
	for len(o.recs) <= i {
		o.recs = append(o.recs, nil)
	}
	if cap(o.recs[i]) < n {
		o.recs[i] = o.env.Buf(o, n)
	}
	o.recs[i] = o.recs[i][:n]
	return o.recs[i]
}

func wordAt(b []byte) layout.Word { return layout.Word(binary.LittleEndian.Uint64(b)) }

// ---- reading ---------------------------------------------------------------

// getCached reads slot and record in one chain, slot first: the record read
// behind an unchanged slot is of the word's life, wherever the word was learnt.
func (o *Op) getCached(h Hint) Action {
	o.take(h)
	p := o.Route.PG.tail()
	o.begin()
	slot := Access{Verb: Read, Space: Index, Replica: p, Off: o.slotOff(h.Slot), Buf: o.word(0)}
	rec := Access{Verb: Read, Space: Heap, Replica: p, Off: h.Word.Off(), Buf: o.recBuf(0, h.Word.ReadLen())}
	if Mutation(MutRecordFirst) {
		slot, rec = rec, slot
	}
	o.Accesses = append(o.Accesses, slot, rec)
	if o.Route.PG.Joining {
		o.add(Access{Verb: Read, Space: Index, Replica: o.Route.PG.publisher(), Off: o.slotOff(h.Slot), Buf: o.word(2)})
	}
	o.noteAccess(h.Slot, o.noteDue())
	return o.post(stepGetCached)
}

// noteDue reports whether the access is to be noted.
func (o *Op) noteDue() bool {
	return o.Route.PG.AccessOff != 0 && !o.Route.PG.Joining && !o.env.ReadOnly() && o.env.NoteDue(o)
}

// noteAccess adds, if the access at slot is to be noted, a READ of its access word to
// the round.
func (o *Op) noteAccess(slot uint8, due bool) {
	o.noting, o.noteRead = due, due
	if due {
		o.add(Access{Verb: Read, Space: Heap, Replica: o.Route.PG.tail(), Off: o.Route.PG.AccessOff + o.slotOff(slot), Buf: o.word(2)})
	}
}

// note writes the access word of the record that the Op found or wrote.
func (o *Op) note() {
	o.syncBase = 0
	w, expiry := o.n, o.expiry
	switch o.Kind {
	case Get:
		w, expiry = o.x, o.Record.Expiry
	case Put, Modify:
	default:
		return
	}
	var old layout.AccessWord
	if o.noteRead {
		old = layout.AccessWord(wordAt(o.words[2]))
	}
	o.env.Note(o, o.slotOff(o.slot), w, old, expiry, !o.noteRead)
}

// joinerBehind brings a slot up that a joiner shows in another state than the
// replica before it, and looks again. Both were read side by side.
func (o *Op) joinerBehind(slot uint8) Action {
	if o.env.ReadOnly() {
		return o.again(Backoff) // somebody else will
	}
	if o.retries++; o.retries > maxRetries {
		o.retries = 0
		return o.unlockAnd(Backoff)
	}
	return o.sync(slot, 1, stepStart)
}

// joinerDiffers finds a slot in which the joiner's group j may hide or show the
// key otherwise than g does.
func (o *Op) joinerDiffers(g, j layout.Group) (slot uint8, differs bool) {
	if !o.Route.PG.Joining {
		return 0, false
	}
	fp := layout.FP(o.Hash)
	for i := range layout.GroupSlots {
		a, b := g.Slot(i), j.Slot(i)
		if a != b && (a.State() != layout.Empty && a.FP() == fp || b.State() != layout.Empty && b.FP() == fp) {
			return uint8(i), true
		}
	}
	return 0, false
}

// Hit judges the two READs of a cached GET, slot first: rec answers for key if
// the slot still held the cached word w and rec is whole. It aliases rec.
func Hit(found, w layout.Word, rec, key []byte) (r layout.Record, ok bool) {
	if found != w || !w.Readable() {
		return r, false
	}
	r, err := layout.ParseRecord(rec)
	return r, err == nil && bytes.Equal(r.Key, key)
}

// checkSlot reads the slot alone: while it holds the word of the version that the
// caller has, the record is that one.
func (o *Op) checkSlot(h Hint) Action {
	o.take(h)
	o.begin()
	o.add(Access{Verb: Read, Space: Index, Replica: o.Route.PG.tail(), Off: o.slotOff(h.Slot), Buf: o.word(0)})
	return o.post(stepCheckSlot)
}

func (o *Op) checkedSlot() Action {
	h := Hint{Word: wordAt(o.words[0]), Shard: o.Route.Shard, Slot: o.slot}
	switch {
	case h.Word == o.x && h.Word.Readable(), Mutation(MutUnchangedByPlace) && h.Word.Unit() == o.x.Unit() && h.Word.Ver() == o.x.Ver():
		h.Version, h.Flags = o.xVersion, o.xFlags
		o.env.Remember(o, h)
		o.Version = o.xVersion
		return o.finish(ErrUnchanged)
	case h.Word.Readable() && h.Word.FP() == layout.FP(o.Hash) && layout.InHeap(h.Word, o.Route.PG.HeapLo, o.Route.PG.HeapHi):
		return o.getCached(h)
	}
	if Mutation(MutGoneFromCheck) && h.Word.State() == layout.Empty {
		return o.absent()
	}
	o.env.Forget(o)
	return o.readGroup()
}

func (o *Op) gotCached() Action {
	w := wordAt(o.words[0])
	if o.Route.PG.Joining && wordAt(o.words[2]) != w {
		return o.joinerBehind(o.slot)
	}
	if r, ok := Hit(w, o.x, o.recs[0], o.Key); ok {
		return o.present(o.slot, w, r)
	}
	if w == o.x && w.Readable() {
		// Another key with this hash, or bytes that a lookup will judge.
		o.env.Forget(o)
		return o.readGroup()
	}
	if Mutation(MutNegativeFromCache) && w.State() == layout.Empty {
		return o.absent()
	}
	// The word just read is the next hint; it proves nothing about absence.
	if w.Readable() && w.FP() == layout.FP(o.Hash) && o.retries < 2 &&
		layout.InHeap(w, o.Route.PG.HeapLo, o.Route.PG.HeapHi) {
		o.retries++
		return o.getCached(Hint{Word: w, Shard: o.Route.Shard, Slot: o.slot})
	}
	o.env.Forget(o)
	return o.readGroup()
}

func (o *Op) readGroup() Action {
	o.noting = false
	o.begin()
	o.readGroupAt(o.home(), 0)
	return o.post(stepReadGroup)
}

// readGroupAt reads a group where readers look, into buffer i, and a joiner's
// copy beside it.
func (o *Op) readGroupAt(off uint64, i int) {
	pg := o.Route.PG
	o.add(Access{Verb: Read, Space: Index, Replica: pg.tail(), Off: off, Buf: o.group(i)})
	if pg.Joining {
		o.add(Access{Verb: Read, Space: Index, Replica: pg.publisher(), Off: off, Buf: o.group(4)})
	}
}

// damaged reports a group at off, as replica k showed it, that says what no group says.
func (o *Op) damaged(g layout.Group, off uint64, k uint8) error {
	err := g.CheckHeader()
	if err == nil {
		return nil
	}
	return o.groupError(off, k, err)
}

// groupError says where the group is that err is about.
func (o *Op) groupError(off uint64, k uint8, err error) error {
	return fmt.Errorf("pg %d replica %d: group at %#x: %w", o.Route.PG.ID, k, off, err)
}

// collect lists the slots of g, as replica k showed it, that may hold the key.
func (o *Op) collect(g layout.Group, base uint8, k uint8) error {
	off := o.home()
	if base == StashSlot {
		off = o.stash()
	}
	if err := o.damaged(g, off, k); err != nil {
		return err
	}
	fp := layout.FP(o.Hash)
	for i := range layout.GroupSlots {
		w := g.Slot(i)
		if !w.Readable() || w.FP() != fp {
			continue
		}
		if !layout.InHeap(w, o.Route.PG.HeapLo, o.Route.PG.HeapHi) {
			return o.groupError(off, k, g.Check(o.Route.PG.HeapLo, o.Route.PG.HeapHi))
		}
		o.cand = append(o.cand, base+uint8(i))
	}
	return nil
}

// wordOf is the word of a candidate in the group it was collected from.
func (o *Op) wordOf(slot uint8, home int) layout.Word {
	if slot >= StashSlot {
		return layout.Group(o.groups[2]).Slot(int(slot - StashSlot))
	}
	return layout.Group(o.groups[home]).Slot(int(slot))
}

func (o *Op) readCandidates(replica uint8) {
	for i, s := range o.cand {
		w := o.wordOf(s, 0)
		o.add(Access{Verb: Read, Space: Heap, Replica: replica, Off: w.Off(), Buf: o.recBuf(i, w.ReadLen())})
	}
}

// match finds the key among the candidates' records. Records that a word named
// when this Op read it cannot have been reused meanwhile (§6), so a bad one is
// corrupt.
func (o *Op) match() (slot uint8, w layout.Word, r layout.Record, ok bool, err error) {
	for i, s := range o.cand {
		rec, e := layout.ParseRecord(o.recs[i])
		if e != nil {
			err = e
			continue
		}
		if bytes.Equal(rec.Key, o.Key) || Mutation(MutFPIsProof) {
			return s, o.wordOf(s, 0), rec, true, nil
		}
	}
	return 0, 0, layout.Record{}, false, err
}

func (o *Op) gotGroup() Action {
	o.cand = o.cand[:0]
	g := layout.Group(o.groups[0])
	if s, differs := o.joinerDiffers(g, o.groups[4]); differs {
		return o.joinerBehind(s)
	}
	if o.Route.PG.Joining && layout.Group(o.groups[4]).Header().OVF() {
		// A writer of this epoch may have told the joiner first.
		binary.LittleEndian.PutUint64(g, uint64(g.Header()|layout.FlagOVF))
	}
	if err := o.collect(g, 0, o.Route.PG.tail()); err != nil {
		return o.finish(err)
	}
	if len(o.cand) > 0 {
		o.begin()
		o.readCandidates(o.Route.PG.tail())
		if len(o.cand) == 1 && o.Kind == Get {
			o.noteAccess(o.cand[0], o.noteDue())
		}
		return o.post(stepReadRecords)
	}
	return o.notHome(g)
}

// notHome goes on where the home group does not hold the key.
func (o *Op) notHome(g layout.Group) Action {
	o.noting = false
	h := g.Header()
	if done := o.splitDone(h); done || o.anyMoved(g) {
		return o.goChild(done, g, o.home())
	}
	if !h.OVF() {
		return o.absent()
	}
	o.begin()
	o.readGroupAt(o.stash(), 2)
	return o.post(stepReadStash)
}

// anyMoved reports whether the key may have left home group g.
func (o *Op) anyMoved(g layout.Group) bool { return !o.leftOver(g) && o.movedIn(g) }

// leftOver reports whether MOVED words of home group g are left over from a move
// that the Op's map knows to be over.
func (o *Op) leftOver(g layout.Group) bool {
	return o.Route.Child == nil && g.Header().Split() && g.Header().Depth() <= o.Route.Depth
}

// movedIn reports whether a MOVED word of g may have been the key's.
func (o *Op) movedIn(g layout.Group) bool {
	if !o.Route.moves(o.Hash) {
		return false
	}
	fp := layout.FP(o.Hash)
	for i := range layout.GroupSlots {
		if w := g.Slot(i); w.State() == layout.Moved && w.FP() == fp {
			return true
		}
	}
	return false
}

func (o *Op) gotStash() Action {
	o.cand = o.cand[:0]
	g := layout.Group(o.groups[2])
	if s, differs := o.joinerDiffers(g, o.groups[4]); differs {
		return o.joinerBehind(StashSlot + s)
	}
	if err := o.collect(g, StashSlot, o.Route.PG.tail()); err != nil {
		return o.finish(err)
	}
	if len(o.cand) == 0 {
		return o.notStashed()
	}
	o.begin()
	o.readCandidates(o.Route.PG.tail())
	return o.post(stepReadStashRecords)
}

func (o *Op) gotRecords() Action {
	slot, w, r, ok, err := o.match()
	switch {
	case ok:
		return o.present(slot, w, r)
	case err != nil:
		return o.suspect(err)
	case o.step == stepReadRecords:
		return o.notHome(o.groups[0])
	default:
		return o.notStashed()
	}
}

// notStashed goes on where the stash does not hold the key.
func (o *Op) notStashed() Action {
	// The stash's own header says nothing; its leftovers are cleared before the
	// home group's.
	if o.movedIn(o.groups[2]) && !o.leftOver(o.groups[0]) {
		return o.goChild(false, o.groups[2], o.stash())
	}
	return o.absent()
}

// suspect looks again before it calls bytes corrupt.
func (o *Op) suspect(err error) Action {
	o.noting = false
	o.retries++
	if o.retries > 3 {
		return o.finish(fmt.Errorf("pg %d: %w", o.Route.PG.ID, err))
	}
	return o.readGroup()
}

// present acts on the key's record r, found at the publisher under w.
func (o *Op) present(slot uint8, w layout.Word, r layout.Record) Action {
	o.env.Remember(o, Hint{Word: w, Version: r.Version, Shard: o.Route.Shard, Slot: slot, Flags: flagsOf(&r)})
	o.takeRecord(slot, w, &r)
	o.Version, o.atA = r.Version, false
	switch o.Kind {
	case Get:
		switch {
		case o.expired:
			return o.finish(ErrNotFound)
		case o.Cond == IfVersion && r.Version == o.IfVersion:
			return o.finish(ErrUnchanged)
		}
		o.Record = r
		if r.Flags&layout.FlagManifest != 0 {
			return o.readChunks(r.Value)
		}
		return o.finish(nil)
	case Put:
		switch {
		case o.Cond == IfAbsent && !o.expired:
			return o.finish(ErrExists)
		case o.Cond == IfVersion && o.expired, o.Cond == IfPresent && o.expired:
			return o.finish(ErrNotFound)
		case o.Cond == IfVersion && r.Version != o.IfVersion:
			return o.finish(ErrConflict)
		}
		return o.update()
	case Delete:
		if o.Cond == IfVersion && !o.expired && r.Version != o.IfVersion {
			return o.finish(ErrConflict)
		}
		return o.casDelete()
	default: // Modify
		cur := r // so that r itself stays off the heap
		return o.modify(&cur)
	}
}

// modify computes the new record from cur (nil: the key is absent).
func (o *Op) modify(cur *layout.Record) Action {
	if cur != nil && o.isExpired(&cur.RecordHeader) {
		cur = nil
	}
	if cur != nil && cur.Flags&layout.FlagManifest != 0 {
		// The whole value is needed; the caller reads chunks into Parts first.
		if len(o.Parts) == 0 {
			o.Record = *cur
			return o.readChunks(cur.Value)
		}
		c := *cur
		c.Value = bytes.Join(o.Parts, nil)
		c.Flags &^= layout.FlagManifest
		cur = &c
	}
	v, exp, err := o.Modify(cur)
	o.Parts = nil
	switch {
	case err != nil && o.atA:
		return o.answerAfterSync(err)
	case err != nil:
		return o.finish(err)
	}
	o.dropPlace()
	o.value, o.expiry = v, exp
	if o.x != 0 {
		return o.update()
	}
	return o.lockGroup()
}

// absent acts on a key that the publisher does not hold.
func (o *Op) absent() Action {
	o.env.Forget(o)
	o.x, o.xVersion, o.xFlags, o.expired, o.atA = 0, 0, 0, false, false
	switch o.Kind {
	case Get, Delete:
		return o.finish(ErrNotFound)
	case Put:
		if o.Cond == IfVersion || o.Cond == IfPresent {
			return o.finish(ErrNotFound)
		}
		return o.lockGroup()
	default:
		return o.modify(nil)
	}
}

// ---- long values -----------------------------------------------------------

func (o *Op) readChunks(manifest []byte) Action {
	pg := o.Route.PG
	m, err := layout.ParseManifest(manifest, pg.HeapLo, pg.HeapHi)
	if err != nil {
		return o.finish(err)
	}
	if len(m.Chunks) == 0 {
		// Nothing would be posted; no writer makes one.
		return o.finish(&layout.CorruptError{What: "manifest", Off: 8, Check: "chunk count", Want: 1})
	}
	o.readID = m.ID
	o.Parts = o.Parts[:0]
	o.begin()
	for i, c := range m.Chunks {
		b := o.recBuf(1+i, layout.SizeOf(c.Code))
		o.add(Access{Verb: Read, Space: Heap, Replica: pg.tail(), Off: uint64(c.Unit) * layout.UnitSize, Buf: b})
	}
	return o.post(stepReadChunks)
}

func (o *Op) gotChunks() Action {
	n := len(o.Accesses)
	for i := range n {
		r, err := layout.ParseRecord(o.recs[1+i])
		if err == nil && (r.Flags&layout.FlagChunk == 0 || r.Version != o.readID || r.Expiry != uint64(i) ||
			i < n-1 && len(r.Value) != layout.ChunkSize) {
			err = &layout.CorruptError{What: "chunk", Check: "manifest id", Got: r.Version, Want: o.readID}
		}
		if err != nil {
			o.Parts = nil
			return o.suspect(err)
		}
		o.Parts = append(o.Parts, r.Value)
	}
	if o.Kind == Modify {
		r := o.Record
		return o.modify(&r)
	}
	return o.finish(nil)
}

// ---- preparing a record ----------------------------------------------------

// prepare takes a place and encodes the record, with a version above least. It
// returns 0 when the record is ready to be written.
func (o *Op) prepare(least uint64) Action {
	if o.prepared && o.version > least {
		return 0
	}
	o.version = o.env.Version(least)
	if o.prepared {
		layout.SetVersion(o.own[:o.ownLen], o.version)
		o.written = false
		return 0
	}
	value, flags := o.value, o.Flags&layout.FlagUser
	if layout.RecordLen(len(o.Key), len(value)) > layout.MaxRecordSize {
		if a := o.prepareChunks(); a != 0 {
			return a
		}
		flags |= layout.FlagManifest
		m := make([]byte, layout.ManifestLen(len(o.chunks)))
		layout.EncodeManifest(m, layout.Manifest{Len: uint64(len(value)), ID: o.chunkID, Chunks: o.chunks})
		value = m
	}
	n := layout.RecordLen(len(o.Key), len(value))
	code, ok := layout.CodeFor(n)
	if !ok {
		return o.finish(fmt.Errorf("%w: record of %d bytes, at most %d", ErrFull, n, layout.MaxRecordSize))
	}
	if !o.havePlace {
		o.wantCode = code
		unit, ver, code, ok := o.env.Alloc(o.Route.PG, code)
		if !ok {
			return Alloc
		}
		o.n = layout.MakeLive(ver, layout.FP(o.Hash), code, unit)
		o.havePlace = true
	}
	if cap(o.own) < n {
		o.own = o.env.Buf(o, n)
	}
	o.own = o.own[:n]
	o.flags = flags
	o.ownLen = layout.EncodeRecord(o.own, layout.RecordHeader{Version: o.version, Flags: flags,
		Expiry: o.expiry, Writer: o.env.Session()}, o.Key, value)
	o.prepared, o.written = true, false
	return 0
}

// prepareChunks takes places for the chunks and writes them everywhere. The
// Op comes back through start when Alloc or Post have been obeyed.
func (o *Op) prepareChunks() Action {
	if o.chunksWritten {
		return 0
	}
	want := layout.ChunkCount(len(o.value))
	for i := len(o.chunks); i < want; i++ {
		p := o.value[i*layout.ChunkSize : min((i+1)*layout.ChunkSize, len(o.value))]
		code, _ := layout.CodeFor(layout.RecordLen(0, len(p)))
		o.wantCode = code
		unit, ver, code, ok := o.env.Alloc(o.Route.PG, code)
		if !ok {
			return Alloc
		}
		o.chunks = append(o.chunks, layout.Chunk{Unit: unit, Code: code, Ver: ver})
	}
	o.chunkID = o.env.Version(0)
	o.begin()
	for i, c := range o.chunks {
		p := o.value[i*layout.ChunkSize : min((i+1)*layout.ChunkSize, len(o.value))]
		b := o.recBuf(1+i, layout.RecordLen(0, len(p)))
		layout.EncodeRecord(b, layout.RecordHeader{Version: o.chunkID, Flags: layout.FlagChunk,
			Expiry: uint64(i), Writer: o.env.Session()}, nil, p)
		for r := range o.Route.PG.Replicas {
			o.add(Access{Verb: Write, Space: Heap, Replica: r, Off: uint64(c.Unit) * layout.UnitSize, Buf: b})
		}
	}
	return o.post(stepWriteChunks)
}

// dropPlace gives back the place of a record that no word ever named.
func (o *Op) dropPlace() {
	if o.havePlace {
		o.env.Unuse(o.Route.PG, o.n)
		o.havePlace = false
	}
	for _, c := range o.chunks {
		o.env.Unuse(o.Route.PG, layout.MakeLive(c.Ver, 0, c.Code, c.Unit))
	}
	o.chunks = o.chunks[:0]
	o.prepared, o.written, o.chunksWritten = false, false, false
}

// addRecord adds the WRITE of the record on replica r.
func (o *Op) addRecord(r uint8) {
	o.add(Access{Verb: Write, Space: Heap, Replica: r, Off: o.n.Off(), Buf: o.own[:o.ownLen]})
}

// ---- UPDATE and DELETE -----------------------------------------------------

// update writes the record everywhere and swings x to it at A, in one round.
func (o *Op) update() Action {
	if o.x.State() == layout.Frozen {
		return o.isFrozen()
	}
	if a := o.prepare(o.xVersion); a != 0 {
		return a
	}
	o.begin()
	if !o.written {
		for r := range o.Route.PG.Replicas {
			o.addRecord(r)
		}
	}
	return o.casSlot()
}

func (o *Op) casDelete() Action {
	if o.x.State() == layout.Frozen {
		return o.isFrozen()
	}
	if o.env.Deleting(o) && !Mutation(MutDeletesTogether) {
		// The EMPTY word tells sessions apart, not the operations of one: if both lost
		// their completions, both would take it for their own.
		return o.again(Backoff)
	}
	o.n = o.x.Delete(o.env.Session())
	if Mutation(MutEmptyShared) {
		o.n = o.x.Delete(0)
	}
	if Mutation(MutEmptyIsZero) {
		o.n = 0
	}
	o.begin()
	return o.casSlot()
}

// isFrozen waits where the key's word may be read but not written: it is on its
// way elsewhere.
func (o *Op) isFrozen() Action {
	o.env.Forget(o)
	return o.again(Backoff)
}

// casSlot adds the deciding CAS and, while the lock is held, its release where
// that cannot be seen too early.
func (o *Op) casSlot() Action {
	o.add(Access{Verb: CAS, Space: Index, Off: o.slotOff(o.slot), Expect: uint64(o.x), New: uint64(o.n)})
	switch {
	case o.Kind == Delete:
		o.noting = false
	case o.x.State() == layout.Empty:
		o.noting, o.noteRead = o.Route.PG.AccessOff != 0 && !o.Route.PG.Joining, false
	default:
		// Its expiry is part of the access word.
		expires := o.Route.PG.AccessOff != 0 && !o.Route.PG.Joining && (o.expiry != 0 || o.xFlags&HintExpires != 0)
		o.noteAccess(o.slot, o.noteDue() || expires)
	}
	if o.locked && (o.Route.PG.Replicas == 1 || o.x.State() != layout.Empty) {
		o.addUnlock()
	}
	o.deciding = true
	return o.post(stepCASSlot)
}

// addUnlock releases the insert lock by CAS, off the path.
func (o *Op) addUnlock() {
	o.add(Access{Verb: CAS, Space: Index, NoWait: true, Off: o.lockOff,
		Expect: uint64(o.lock), New: 0})
	o.locked, o.lockTried, o.lock = false, false, 0
}

// theCAS is the deciding access of this round.
func (o *Op) theCAS() *Access {
	off := o.slotOff(o.slot)
	for i := range o.Accesses {
		if a := &o.Accesses[i]; a.Verb == CAS && a.Replica == 0 && a.Off == off {
			return a
		}
	}
	panic("index: no deciding access")
}

func (o *Op) casDone() Action {
	found := layout.Word(o.theCAS().Found)
	o.deciding = false
	if o.Kind != Delete {
		o.written = true // the WRITEs of this round completed
	}
	if found == o.x {
		o.won = true
		return o.publish()
	}
	return o.lost(found)
}

// lost acts on a CAS at A that found c instead of x.
func (o *Op) lost(c layout.Word) Action {
	o.env.Forget(o)
	if Mutation(MutLostPutIsDone) && o.Kind == Put && o.Cond == Always {
		return o.finish(nil)
	}
	switch c.State() {
	case layout.Frozen:
		return o.again(Backoff)
	case layout.Moved:
		if Mutation(MutFollowMovedAtA) {
			return o.goChild(true, o.groups[0], o.home())
		}
		// Nobody follows it before the publisher shows it.
		return o.sync(o.slot, 1, stepStart)
	case layout.Empty:
		// Gone from this slot; whether the key is elsewhere, a lookup tells.
		return o.lookAgain()
	}
	if c.FP() != layout.FP(o.Hash) || !layout.InHeap(c, o.Route.PG.HeapLo, o.Route.PG.HeapHi) || o.x.State() == layout.Empty {
		return o.lookAgain()
	}
	// Perhaps the same key: its record is at A for certain, at P perhaps not yet.
	o.x = c
	o.begin()
	o.add(Access{Verb: Read, Space: Heap, Replica: 0, Off: c.Off(), Buf: o.recBuf(0, c.ReadLen())})
	return o.post(stepReadLost)
}

// lookAgain starts over without a hint. A Put keeps its place and record.
func (o *Op) lookAgain() Action {
	o.env.Forget(o)
	if o.Kind == Put && (o.Cond == Always || o.Cond == IfAbsent) {
		return o.lockGroup()
	}
	// A lookup reads the publisher, which may still show what is gone at A. If
	// whoever replaced it died before its publish, it would do so for ever.
	return o.sync(o.slot, 1, stepStart)
}

func (o *Op) gotLost() Action {
	r, err := layout.ParseRecord(o.recs[0])
	if err != nil || !bytes.Equal(r.Key, o.Key) {
		return o.lookAgain()
	}
	o.takeRecord(o.slot, o.x, &r)
	o.Version, o.atA = r.Version, true
	if Mutation(MutRecordFirst) {
		o.env.Remember(o, Hint{Word: o.x, Version: r.Version, Shard: o.Route.Shard, Slot: o.slot, Flags: flagsOf(&r)})
	}
	// Nobody learns of a state that the publisher does not show.
	switch {
	case o.Kind == Put && o.expired && (o.Cond == IfVersion || o.Cond == IfPresent):
		return o.answerAfterSync(ErrNotFound)
	case o.Cond == IfVersion && !o.expired && r.Version != o.IfVersion:
		return o.answerAfterSync(ErrConflict)
	case o.Cond == IfAbsent && !o.expired:
		return o.answerAfterSync(ErrExists)
	}
	switch o.Kind {
	case Delete:
		return o.casDelete()
	case Modify:
		return o.modify(&r)
	}
	return o.update()
}

// ---- INSERT ----------------------------------------------------------------

// lockGroup takes the home group's insert lock and reads the group, while the
// record is written.
func (o *Op) lockGroup() Action {
	o.x, o.xVersion, o.xFlags = 0, 0, 0
	if o.child != 0 && !o.sureChild && !Mutation(MutInsertInChild) {
		// Only the parent's lock tells whether the child takes inserts yet.
		o.child = 0
		r, ok := o.env.Route(o.Hash)
		if !ok {
			return o.again(Refresh)
		}
		if !sameMemory(&o.Route, &r) {
			if o.havePlace && !samePlaces(o.Route.PG, r.PG) {
				o.dropPlace()
			}
			o.Route = r
		}
	}
	if a := o.prepare(0); a != 0 {
		return a
	}
	if o.lock == 0 {
		o.lock = layout.MakeLock(o.env.Session(), o.env.Stamp())
	}
	o.lockOff = o.home() + layout.GroupLockOff
	o.begin()
	if Mutation(MutNoInsertLock) {
		o.locked = true
	}
	if !o.locked {
		o.add(Access{Verb: CAS, Space: Index, Off: o.lockOff,
			Expect: uint64(o.lockExpect), New: uint64(o.lock)})
	}
	o.add(Access{Verb: Read, Space: Index, Off: o.home(), Buf: o.group(0)})
	if p := o.Route.PG.publisher(); p != 0 {
		o.add(Access{Verb: Read, Space: Index, Replica: p, Off: o.home(), Buf: o.group(1)})
	}
	if !o.written {
		for r := range o.Route.PG.Replicas {
			o.addRecord(r)
		}
	}
	return o.post(stepLockGroup)
}

func (o *Op) gotLock() Action {
	o.written = true
	// Before the lock, which is as damaged as the rest.
	if err := o.damaged(o.groups[0], o.home(), 0); err != nil {
		return o.finish(err)
	}
	if p := o.Route.PG.publisher(); p != 0 {
		if err := o.damaged(o.groups[1], o.home(), p); err != nil {
			return o.finish(err)
		}
	}
	if !o.locked {
		found := layout.Lock(o.Accesses[0].Found)
		if found != o.lockExpect && found != o.lock {
			o.step = stepStart
			o.lockExpect = 0
			if found == 0 {
				return o.lockGroup()
			}
			o.LockOwner, o.OwnerFenced = found.Session(), false
			o.lockExpect = found
			return o.askFenced()
		}
		o.locked, o.lockExpect, o.Waits = true, 0, 0
	}
	g := layout.Group(o.groups[0])
	if h := g.Header(); o.splitDone(h) {
		if Mutation(MutFollowSplitAtA) {
			return o.splitSeen()
		}
		// Nobody follows it before the publisher shows it.
		return o.sync(headerSlot, 1, stepSplitSeen)
	}
	if o.moveUnfinished(g) && !Mutation(MutInsertHalfMoved) {
		if o.Route.Child == nil {
			return o.stray(Backoff, g, o.home(), 0)
		}
		return o.unlockAnd(Backoff)
	}
	o.diff = o.diff[:0]
	if o.Route.PG.publisher() != 0 && !Mutation(MutNoSyncBeforeInsert) {
		p := layout.Group(o.groups[1])
		for i := range layout.GroupSlots {
			if g.Slot(i) != p.Slot(i) {
				o.diff = append(o.diff, uint8(i))
			}
		}
	}
	return o.syncGroup()
}

// moveUnfinished reports whether a move of the group has begun that may not be
// over. What a complete one left behind is marked by SPLIT.
func (o *Op) moveUnfinished(g layout.Group) bool {
	for i := range layout.GroupSlots {
		switch g.Slot(i).State() {
		case layout.Frozen:
			return true
		case layout.Moved:
			if !g.Header().Split() {
				return true
			}
		}
	}
	return false
}

// splitSeen: the publisher shows that the group's move is complete.
func (o *Op) splitSeen() Action { return o.goChild(true, o.groups[0], o.home()) }

// askFenced waits for a lock that somebody holds. It may be broken only after
// its owner's fence is confirmed: until then a verb of the owner can still land.
func (o *Op) askFenced() Action {
	o.step = stepStart
	o.after = stepLockGroup
	return AskFenced
}

// unlockAnd releases the lock and starts over after a.
func (o *Op) unlockAnd(a Action) Action {
	o.step = stepStart
	o.begin()
	if o.lock != 0 && !(a == Refresh && Mutation(MutParkedKeepsLock)) {
		o.addUnlock()
	}
	return a
}

// syncGroup brings every slot in which A and P differ up to date before the
// insert's CAS; afterwards would be too late (an old copy of the key stays
// visible).
func (o *Op) syncGroup() Action {
	if n := len(o.diff); n > 0 {
		s := o.diff[n-1]
		o.diff = o.diff[:n-1]
		if Mutation(MutInsertPair) {
			o.begin()
			o.add(Access{Verb: CAS, Space: Index, Replica: o.Route.PG.publisher(), Off: o.slotOff(s),
				Expect: uint64(layout.Group(o.groups[1]).Slot(int(s))), New: uint64(layout.Group(o.groups[0]).Slot(int(s)))})
			return o.post(stepSyncGroup)
		}
		return o.sync(s, 1, stepSyncGroup)
	}
	o.stashRead = false
	o.cand = o.cand[:0]
	if err := o.collect(o.groups[0], 0, 0); err != nil {
		return o.finish(err)
	}
	o.begin()
	o.readCandidates(0)
	if layout.Group(o.groups[0]).Header().OVF() {
		o.add(Access{Verb: Read, Space: Index, Off: o.stash(), Buf: o.group(2)})
		if p := o.Route.PG.publisher(); p != 0 {
			o.add(Access{Verb: Read, Space: Index, Replica: p, Off: o.stash(), Buf: o.group(3)})
		}
		o.stashRead = true
	}
	if len(o.Accesses) == 0 {
		return o.absentLocked()
	}
	return o.post(stepLockedRecords)
}

func (o *Op) gotLockedRecords() Action {
	slot, w, r, ok, err := o.match()
	switch {
	case ok:
		return o.presentLocked(slot, w, r)
	case err != nil:
		return o.finish(fmt.Errorf("pg %d: %w", o.Route.PG.ID, err))
	case !o.stashRead:
		return o.absentLocked()
	}
	o.stashRead = false
	o.diff = o.diff[:0]
	if o.Route.PG.publisher() != 0 && !Mutation(MutNoSyncBeforeInsert) {
		a, p := layout.Group(o.groups[2]), layout.Group(o.groups[3])
		for i := range layout.GroupSlots {
			if a.Slot(i) != p.Slot(i) {
				o.diff = append(o.diff, StashSlot+uint8(i))
			}
		}
	}
	return o.syncStash()
}

// syncStash is syncGroup for the stash: an old copy of the key can be visible
// there too.
func (o *Op) syncStash() Action {
	if n := len(o.diff); n > 0 {
		s := o.diff[n-1]
		o.diff = o.diff[:n-1]
		return o.sync(s, 1, stepReadStash)
	}
	o.cand = o.cand[:0]
	if err := o.collect(o.groups[2], StashSlot, 0); err != nil {
		return o.finish(err)
	}
	if len(o.cand) == 0 {
		return o.absentLocked()
	}
	o.begin()
	o.readCandidates(0)
	return o.post(stepLockedRecords)
}

// presentLocked: the key exists at A, so the write is an UPDATE.
func (o *Op) presentLocked(slot uint8, w layout.Word, r layout.Record) Action {
	o.takeRecord(slot, w, &r)
	o.Version, o.atA = r.Version, true
	switch {
	case o.Kind == Modify:
		return o.modify(&r)
	case o.Cond == IfAbsent && !o.expired:
		return o.answerAfterSync(ErrExists)
	}
	return o.update()
}

// answerAfterSync answers err once the publisher shows what it rests on.
func (o *Op) answerAfterSync(err error) Action {
	o.answer = err
	if Mutation(MutAnswerBeforeSync) {
		return o.finish(err)
	}
	return o.sync(o.slot, 1, stepDone)
}

func (o *Op) absentLocked() Action {
	g := layout.Group(o.groups[0])
	if g.Header().OVF() && o.movedIn(o.groups[2]) && !o.leftOver(g) {
		if o.Route.Child == nil {
			return o.stray(Backoff, o.groups[2], o.stash(), 0)
		}
		return o.unlockAnd(Backoff) // a move of this group is unfinished, or not cleared yet
	}
	for i := range layout.GroupSlots {
		if w := g.Slot(i); w.State() == layout.Empty {
			o.slot, o.x, o.xVersion, o.xFlags, o.expired = uint8(i), w, 0, 0, false
			o.begin()
			return o.casSlot()
		}
	}
	// Full: announce the overflow on every replica before anything is there. That
	// A has the flag says nothing of the others: who set it may have died.
	o.begin()
	for r := range o.Route.PG.Replicas {
		h := g.Header()
		switch r {
		case 0:
		case o.Route.PG.publisher():
			h = layout.Group(o.groups[1]).Header()
		default:
			h &^= layout.FlagOVF // not read
		}
		if !h.OVF() {
			o.add(Access{Verb: CAS, Space: Index, Replica: r, Off: o.home(),
				Expect: uint64(h), New: uint64(h | layout.FlagOVF)})
		}
	}
	o.add(Access{Verb: Read, Space: Index, Off: o.stash(), Buf: o.group(2)})
	return o.post(stepSetOVF)
}

func (o *Op) gotOVF() Action {
	for i := range o.Accesses {
		if a := &o.Accesses[i]; a.Verb == CAS && a.Found != a.Expect && !layout.Header(a.Found).OVF() {
			return o.unlockAnd(Backoff)
		}
	}
	g := layout.Group(o.groups[2])
	if err := o.damaged(g, o.stash(), 0); err != nil {
		return o.finish(err)
	}
	used := 0
	for i := range layout.GroupSlots {
		if g.Slot(i).State() != layout.Empty {
			used++
		}
	}
	if used >= stashCrowded {
		o.env.Crowded(o.Route.Shard)
	}
	for i := range layout.GroupSlots {
		if w := g.Slot(i); w.State() == layout.Empty {
			o.slot, o.x, o.xVersion, o.xFlags, o.expired = StashSlot+uint8(i), w, 0, 0, false
			o.begin()
			return o.casSlot()
		}
	}
	return o.unlockAnd(Grow)
}

// stashCrowded is how many slots of a stash are in use when a shard should split:
// some 15 keys of its cluster's 480 are there at a load of about 0.7.
const stashCrowded = 12

// ---- publish and sync ------------------------------------------------------

// publish carries x→n from A down the chain. A stage may swing x→n blindly only
// while every earlier one took exactly that; from the first other finding on,
// sync takes over.
func (o *Op) publish() Action {
	if Mutation(MutLimboBeforePublish) {
		o.unlink()
	}
	if o.Route.PG.Replicas == 1 {
		return o.published()
	}
	if Mutation(MutAckBeforePublish) {
		return o.published()
	}
	o.pubK = 1
	return o.publishStage()
}

func (o *Op) publishStage() Action {
	o.begin()
	o.add(Access{Verb: CAS, Space: Index, Replica: o.pubK, Off: o.slotOff(o.slot),
		Expect: uint64(o.x), New: uint64(o.n)})
	return o.post(stepPublish)
}

func (o *Op) gotPublish() Action {
	if f := layout.Word(o.Accesses[0].Found); f != o.x && !Mutation(MutPublishGoesOn) {
		return o.sync(o.slot, o.pubK, stepPublish)
	}
	if o.pubK++; o.pubK < o.Route.PG.Replicas {
		return o.publishStage()
	}
	return o.published()
}

// sync brings slot on every replica from the k-th on up to its predecessor,
// never past it. Then it goes on where then says.
func (o *Op) sync(slot uint8, k uint8, then Step) Action {
	o.syncThen = then
	o.syncSlot, o.syncK = slot, k
	return o.syncRead()
}

func (o *Op) syncRead() Action {
	if o.syncK >= o.Route.PG.Replicas {
		switch o.syncThen {
		case stepPublish:
			return o.published()
		case stepSyncGroup:
			return o.syncGroup()
		case stepReadStash:
			return o.syncStash()
		case stepStart:
			return o.again(0)
		case stepSplitSeen:
			return o.splitSeen()
		case stepReadCluster:
			return o.readCluster()
		case stepWork:
			return o.workNext()
		}
		return o.finish(o.answer)
	}
	o.begin()
	o.add(Access{Verb: Read, Space: Index, Replica: o.syncK, Off: o.slotOff(o.syncSlot), Buf: o.word(0)})
	return o.post(stepSyncRead)
}

// syncPrev reads the predecessor's word, after q was read: the other order
// could move R[k] backward.
func (o *Op) syncPrev() Action {
	o.begin()
	o.add(Access{Verb: Read, Space: Index, Replica: o.syncK - 1, Off: o.slotOff(o.syncSlot), Buf: o.word(1)})
	return o.post(stepSyncPrev)
}

func (o *Op) syncNext() Action {
	switch o.step {
	case stepSyncRead:
		o.syncQ = wordAt(o.words[0])
		return o.syncPrev()
	case stepSyncPrev:
		b := wordAt(o.words[1])
		o.syncB = b
		if o.syncSlot == headerSlot {
			// Headers grow; an OVF that only a later replica has yet must stay.
			o.syncB = layout.Word(layout.Header(o.syncQ).Merge(layout.Header(b)))
			if o.syncB != o.syncQ {
				return o.syncCAS(false)
			}
			b = o.syncQ
		}
		switch {
		case b == o.syncQ:
			o.syncK++
			return o.syncRead()
		case !b.Readable(), Mutation(MutHelperBlind):
			return o.syncCAS(false)
		case !layout.InHeap(b, o.Route.PG.HeapLo, o.Route.PG.HeapHi):
			return o.syncBroken(&layout.CorruptError{What: "slot", Off: o.slotOff(o.syncSlot), Check: "outside the heap", Got: uint64(b)})
		}
		// b's record must be complete on R[k]. A good CRC alone proves nothing:
		// the place's previous life had one too.
		o.begin()
		for i := range uint8(2) {
			o.add(Access{Verb: Read, Space: Heap, Replica: o.syncK - i, Off: b.Off(), Buf: o.syncBuf(i, b.ReadLen())})
		}
		return o.post(stepSyncVerify)
	case stepSyncVerify:
		mine, prev := o.syncRecs[0], o.syncRecs[1]
		if _, err := layout.ParseRecord(prev); err != nil {
			// b was replaced and its place is on its way out: look again.
			if o.retries++; o.retries > 100 {
				return o.syncBroken(fmt.Errorf("pg %d replica %d: %w", o.Route.PG.ID, o.syncK-1, err))
			}
			return o.syncRead()
		}
		n := layout.RecordLen(int(binary.LittleEndian.Uint16(prev[8:])), int(binary.LittleEndian.Uint32(prev[12:])))
		same := bytes.Equal(mine[:n], prev[:n])
		if Mutation(MutCRCProves) {
			_, err := layout.ParseRecord(mine)
			same = err == nil
		}
		if !same && layout.RecordFlags(prev[10])&layout.FlagManifest != 0 {
			o.chunk = 0
			return o.syncChunks()
		}
		return o.syncCAS(!same)
	default: // stepSyncCAS
		a := &o.Accesses[len(o.Accesses)-1]
		if layout.Word(a.Found) == o.syncQ {
			o.syncK++
			return o.syncRead()
		}
		o.syncQ = layout.Word(a.Found)
		return o.syncPrev()
	}
}

// syncChunks copies the chunks of the manifest under way before the manifest
// itself: one by one, READ from the predecessor and WRITE.
func (o *Op) syncChunks() Action {
	pg := o.Route.PG
	r, err := layout.ParseRecord(o.syncRecs[1])
	if err != nil {
		return o.syncRead()
	}
	m, err := layout.ParseManifest(r.Value, pg.HeapLo, pg.HeapHi)
	if err != nil {
		return o.syncBroken(fmt.Errorf("pg %d replica %d: %w", pg.ID, o.syncK-1, err))
	}
	if o.chunk >= len(m.Chunks) {
		return o.syncCAS(true)
	}
	c := m.Chunks[o.chunk]
	o.begin()
	o.add(Access{Verb: Read, Space: Heap, Replica: o.syncK - 1, Off: uint64(c.Unit) * layout.UnitSize,
		Buf: o.syncBuf(0, layout.SizeOf(c.Code))})
	return o.post(stepSyncChunk)
}

func (o *Op) gotSyncChunk() Action {
	if a := &o.Accesses[0]; a.Verb == Read {
		b := a.Buf
		r, err := layout.ParseRecord(b)
		if err != nil || r.Flags&layout.FlagChunk == 0 {
			// The manifest was replaced and its chunks are on their way out.
			if o.retries++; o.retries > 100 {
				return o.syncBroken(fmt.Errorf("pg %d replica %d: chunk: %w", o.Route.PG.ID, o.syncK-1, err))
			}
			return o.syncRead()
		}
		off := a.Off
		o.begin()
		o.add(Access{Verb: Write, Space: Heap, Replica: o.syncK, Off: off, Buf: b[:layout.RecordLen(0, len(r.Value))]})
		return o.post(stepSyncChunk)
	}
	o.chunk++
	return o.syncChunks()
}

// syncBroken ends an Op that cannot bring the chain up. One that A decided may
// yet be seen.
func (o *Op) syncBroken(err error) Action {
	if o.Kind == Sync || o.Kind == Scrub {
		o.finding("%v", err)
		return o.workNext()
	}
	if o.won {
		o.leak()
		err = fmt.Errorf("%w: %w", ErrUnknown, err)
	}
	return o.finish(err)
}

func (o *Op) syncBuf(i uint8, n int) []byte {
	if cap(o.syncRecs[i]) < n {
		o.syncRecs[i] = o.env.Buf(o, n)
	}
	o.syncRecs[i] = o.syncRecs[i][:n]
	return o.syncRecs[i]
}

func (o *Op) syncCAS(copyRecord bool) Action {
	o.begin()
	if copyRecord {
		prev := o.syncRecs[1]
		n := layout.RecordLen(int(binary.LittleEndian.Uint16(prev[8:])), int(binary.LittleEndian.Uint32(prev[12:])))
		o.add(Access{Verb: Write, Space: Heap, Replica: o.syncK, Off: o.syncB.Off(), Buf: prev[:n]})
	}
	o.add(Access{Verb: CAS, Space: Index, Replica: o.syncK, Off: o.slotOff(o.syncSlot),
		Expect: uint64(o.syncQ), New: uint64(o.syncB)})
	return o.post(stepSyncCAS)
}

// published: n is visible at P. The replaced record's place is ours.
func (o *Op) published() Action {
	if o.Kind == Delete {
		o.env.Forget(o)
	} else {
		o.Version = o.version
		f := HintFlags(0)
		if o.flags&layout.FlagManifest != 0 {
			f |= HintManifest
		}
		if o.expiry != 0 {
			f |= HintExpires
		}
		o.env.Remember(o, Hint{Word: o.n, Version: o.version, Shard: o.Route.Shard, Slot: o.slot, Flags: f})
	}
	o.havePlace = false
	o.chunks = o.chunks[:0]
	if o.x.Readable() && o.xFlags&HintManifest != 0 {
		// The chunks go with the manifest, which nobody reuses before us.
		o.begin()
		o.add(Access{Verb: Read, Space: Heap, Replica: 0, Off: o.x.Off(), Buf: o.recBuf(0, o.x.ReadLen())})
		return o.post(stepReadManifest)
	}
	o.unlink()
	return o.decided()
}

func (o *Op) decided() Action {
	if o.Kind == Delete && o.expired {
		return o.finish(ErrNotFound)
	}
	return o.finish(nil)
}

func (o *Op) unlink() {
	if o.x.Readable() && !o.unlinked {
		o.unlinked = true
		o.env.Unlinked(o.Route.PG, o.x)
	}
}

func (o *Op) gotManifest() Action {
	pg := o.Route.PG
	if r, err := layout.ParseRecord(o.recs[0]); err == nil && r.Flags&layout.FlagManifest != 0 {
		if m, err := layout.ParseManifest(r.Value, pg.HeapLo, pg.HeapHi); err == nil {
			for _, c := range m.Chunks {
				o.env.Unlinked(pg, layout.MakeLive(c.Ver, 0, c.Code, c.Unit))
			}
		}
	}
	o.unlink()
	return o.decided()
}

// ---- unknown outcomes ------------------------------------------------------

// resolve asks A what became of the deciding CAS. Nothing of it can still land.
func (o *Op) resolve() Action {
	o.begin()
	o.add(Access{Verb: Read, Space: Index, Replica: 0, Off: o.slotOff(o.slot), Buf: o.word(0)})
	return o.post(stepResolve)
}

func (o *Op) resolved() Action {
	switch s := wordAt(o.words[0]); s {
	case o.n:
		o.deciding, o.won = false, true
		return o.sync(o.slot, 1, stepPublish)
	case o.x:
		// It did not happen. n may have been seen, so it is never posted again.
		o.deciding, o.won = false, false
		if !Mutation(MutRetrySameWord) {
			o.retire()
		}
		o.written = false
		return o.again(0)
	}
	o.leak()
	return o.finish(ErrUnknown)
}

// retire spends the place of a word that did not take effect.
func (o *Op) retire() {
	if o.havePlace {
		o.env.Retire(o.Route.PG, o.n)
		o.havePlace = false
	}
	o.dropPlace()
}

// leak leaves both places of an undecided Op to recall.
func (o *Op) leak() {
	o.leakOwn()
	if o.x.Readable() {
		o.env.Leak(o.Route.PG, o.x)
	}
	o.deciding = false
}

// NotPosted says that the accesses of the last Post were not performed, and will
// not be; Fail follows. What stood in them has not happened: neither the deciding
// CAS nor the release of the lock.
func (o *Op) NotPosted() {
	if o.step == stepCASSlot {
		o.deciding = false
	}
	if !o.lockTried {
		o.lock = 0 // nobody has seen it
	}
	for i := range o.Accesses {
		if a := &o.Accesses[i]; a.NoWait && o.lock == 0 && a.Off == o.lockOff {
			o.lock, o.lockTried = layout.Lock(a.Expect), true
		}
	}
}

// leakOwn leaves the Op's own place to recall.
func (o *Op) leakOwn() {
	if o.havePlace {
		o.env.Leak(o.Route.PG, o.n)
	}
	for _, c := range o.chunks {
		o.env.Leak(o.Route.PG, layout.MakeLive(c.Ver, 0, c.Code, c.Unit))
	}
	o.havePlace, o.chunks = false, o.chunks[:0]
	o.leakWork()
}

// Fail ends the Op from outside: its time is over, or memory, the map or the
// queue pair cannot be had. Nothing of it may be under way any more, or only
// verbs that its session keeps counting as in flight. If the Op may have
// happened, Err is ErrUnknown joined with err; otherwise err.
func (o *Op) Fail(err error) Action {
	if o.adrift || o.anyFailed() {
		o.leakOwn() // a WRITE may still land there
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
	o.endWork()
	o.begin()
	if o.lock != 0 {
		o.addUnlock()
	}
	if o.noting && err == nil {
		o.note()
	}
	o.dropPlace()
	o.Err = err
	o.won = false
	o.step = stepDone
	return Done
}

// ---- scan ------------------------------------------------------------------

const clusterSlots = (layout.ClusterGroups + 1) * layout.GroupSlots

func (o *Op) readCluster() Action {
	o.syncBase = 0
	if o.child == 0 {
		if o.ScanShard != 0 && o.ScanShard != o.Route.Shard {
			o.ScanFrom = 0 // in another array words sit elsewhere
		}
		o.ScanShard = o.Route.Shard
	}
	if o.ScanFrom >= clusterSlots && o.Route.Child != nil {
		if o.Route.Child.PG == nil {
			return o.again(Refresh)
		}
		o.Route = *o.Route.Child // what has moved of this cluster
		o.child = o.Route.Shard
	}
	if o.ScanCluster >= o.Route.Clusters || o.ScanFrom >= clusterSlots && o.child == 0 {
		return o.scanned()
	}
	if o.cluster == nil {
		o.cluster = o.env.Buf(o, layout.ClusterSize)
	}
	off := o.Route.ShardOff + uint64(o.ScanCluster)*layout.ClusterSize
	o.begin()
	o.add(Access{Verb: Read, Space: Index, Replica: o.Route.PG.tail(), Off: off, Buf: o.cluster})
	if o.Route.PG.Joining {
		if o.joiners == nil {
			o.joiners = o.env.Buf(o, layout.ClusterSize)
		}
		o.add(Access{Verb: Read, Space: Index, Replica: o.Route.PG.publisher(), Off: off, Buf: o.joiners})
	}
	return o.post(stepReadCluster)
}

func (o *Op) gotCluster() Action {
	o.ScanNext, o.ScanEnd = 0, false
	o.Corrupt, o.corrupts = nil, 0
	o.begin()
	total := 0
	base := 0
	if o.child != 0 {
		base = clusterSlots
	}
	for i := int(o.ScanFrom) - base; i < clusterSlots; i++ {
		at := i / layout.GroupSlots * layout.GroupSize
		off := o.Route.ShardOff + uint64(o.ScanCluster)*layout.ClusterSize + uint64(at)
		g := layout.Group(o.cluster[at:][:layout.GroupSize])
		if i%layout.GroupSlots == 0 || i == int(o.ScanFrom)-base {
			if err := o.damaged(g, off, o.Route.PG.tail()); err != nil {
				o.corrupted(err)
				i = i/layout.GroupSlots*layout.GroupSlots + layout.GroupSlots - 1 // go on with the next group
				continue
			}
		}
		w := g.Slot(i % layout.GroupSlots)
		if o.Route.PG.Joining && !o.env.ReadOnly() {
			if j := layout.Group(o.joiners[at:][:layout.GroupSize]).Slot(i % layout.GroupSlots); j != w && (j.Readable() || w.Readable()) {
				if len(o.Accesses) > 0 {
					o.ScanNext = uint16(base + i)
					break
				}
				o.syncBase = off
				return o.sync(uint8(i%layout.GroupSlots), 1, stepReadCluster)
			}
		}
		if w.State() == layout.Moved && o.child == 0 && o.Route.Child == nil {
			home := g
			if i/layout.GroupSlots == layout.StashGroup {
				home = o.cluster[:layout.GroupSize] // a stash is cleared before any home group
			}
			if !o.leftOver(home) {
				if o.MapCurrent == 0 || o.MapCurrent != o.Route.MapVersion {
					o.astray = true
					return o.again(Refresh) // by a move that this map does not know
				}
				o.corrupted(o.groupError(off, o.Route.PG.tail(), g.MoveError()))
				i = i/layout.GroupSlots*layout.GroupSlots + layout.GroupSlots - 1
				continue
			}
		}
		if !w.Readable() {
			continue
		}
		if !layout.InHeap(w, o.Route.PG.HeapLo, o.Route.PG.HeapHi) {
			o.corrupted(o.groupError(off, o.Route.PG.tail(), g.Check(o.Route.PG.HeapLo, o.Route.PG.HeapHi)))
			continue
		}
		if n := len(o.Accesses); n > 0 && total+w.ReadLen() > o.ScanBytes {
			o.ScanNext = uint16(base + i)
			break
		}
		total += w.ReadLen()
		o.add(Access{Verb: Read, Space: Heap, Replica: o.Route.PG.tail(), Off: w.Off(),
			Buf: o.recBuf(len(o.Accesses), w.ReadLen())})
	}
	if len(o.Accesses) == 0 {
		return o.scanned()
	}
	return o.post(stepScanRecords)
}

func (o *Op) gotScanRecords() Action {
	o.Found = o.Found[:0]
	for i := range o.Accesses {
		r, err := layout.ParseRecord(o.recs[i])
		if err != nil {
			if o.retries++; o.retries <= 3 {
				return o.readCluster()
			}
			o.corrupted(fmt.Errorf("pg %d replica %d: record at %#x: %w", o.Route.PG.ID, o.Route.PG.tail(), o.Accesses[i].Off, err))
			continue
		}
		if o.ScanExpired || !o.isExpired(&r.RecordHeader) {
			o.Found = append(o.Found, r)
		}
	}
	return o.scanned()
}

// corrupted notes what a Scan cannot read, and leaves out.
func (o *Op) corrupted(err error) {
	if o.corrupts++; o.corrupts <= maxCorrupts {
		o.Corrupt = errors.Join(o.Corrupt, err)
	}
}

// maxCorrupts is how many errors of one cluster are told one by one.
const maxCorrupts = 4

func (o *Op) scanned() Action {
	if n := o.corrupts - maxCorrupts; n > 0 {
		o.Corrupt = errors.Join(o.Corrupt, fmt.Errorf("and %d more in this cluster", n))
	}
	if o.ScanNext == 0 && o.child == 0 && o.Route.Child != nil && o.ScanCluster < o.Route.Clusters {
		o.ScanNext = clusterSlots // the child's share of this cluster
	}
	o.ScanEnd = o.ScanNext == 0 && o.ScanCluster+1 >= o.Route.Clusters
	return o.finish(nil)
}
