package index

import (
	"fmt"

	"github.com/kvd-project/kvd/internal/invariants"
	"github.com/kvd-project/kvd/internal/layout"
)

func (o *Op) begin() {
	if o.Accesses == nil {
		o.Accesses = make([]Access, 0, 6)
	}
	o.Accesses = o.Accesses[:0]
	if o.far != nil {
		o.apartRead = false
	}
}

func (o *Op) add(a Access) *Access {
	o.Accesses = append(o.Accesses, a)
	return &o.Accesses[len(o.Accesses)-1]
}

func (o *Op) post(next Step) Action {
	o.step = next
	o.Rounds++
	if o.Machine != nil {
		o.countBytes()
	}
	return Post
}

// Astray reports whether the last action is Refresh or Backoff because a group says that something moved, while the
// Op's map has no move. Then the map is late, or the group damaged. A move is in the map before its first word is
// in memory, so the directory can tell; see MapCurrent.
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
	switch {
	case a == Fetch, a == Store, a == Alloc && !o.Kind.isWork():
		// While it waits for memory, or for a disk, the Op keeps nothing that it has seen, nor
		// the lock: it would hold back the reclaim epoch that frees memory.
		switch o.step = stepStart; a {
		case Fetch:
			o.step = stepReadObject
			o.Rounds++
		case Store:
			o.step = stepStoreObject
		}
		o.begin()
		if o.lock != 0 {
			o.addUnlock()
		}
	}
	if invariants.On {
		o.checkAction(a)
	}
	return a
}

func (o *Op) next() Action {
	if o.step == stepLockGroup || o.step == StepLockGroups {
		o.lockTried = true
	}
	if o.step > stepStart && o.anyFailed() {
		return o.fault()
	}
	if o.step == stepReadObject && o.rebase {
		o.judgeObject()
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
		return o.wroteWindow()
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
	case stepReadSegment:
		return o.gotSegment()
	case stepScanRecords:
		return o.gotScanRecords()
	case stepReadRaw:
		o.Record.Value = o.rec
		return o.finish(nil)
	case stepSyncChunk:
		return o.gotSyncChunk()
	case stepSplitSeen:
		return o.splitSeen()
	case stepReadFrozen:
		return o.gotFrozen()
	case stepReadStatus:
		return o.gotStatus()
	case stepAbortStatus:
		return o.gotAbort()
	case stepReadIntent:
		return o.gotStands()
	case stepSyncIntent:
		return o.gotSyncIntent()
	case stepMendWords:
		return o.gotMendWords()
	case stepMendChildren:
		return o.gotMendChildren()
	case stepMendCopies:
		return o.gotMendCopies()
	case stepMendWrite:
		return o.mending.then(false)
	case stepMendSync:
		return o.gotMendSync()
	case stepReadObject:
		return o.gotObject()
	case stepStoreObject:
		o.step = stepStart
		return o.start()
	case stepConfirm:
		return o.gotConfirm()
	case stepReadDecided:
		return o.decidedRead()
	}
	if o.Machine != nil {
		return o.Machine.Next()
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
	if o.step == stepCASSlot {
		switch a := o.theCAS(0); {
		case o.spread && o.deciding && !a.Failed:
			o.deciding = false
			if o.won = layout.Word(a.Found) == o.x; !o.won {
				o.spec.lostTo = layout.Word(a.Found)
			}
		case a.Refused && !o.spread:
			o.deciding = false
		}
	}
	o.Accesses = o.Accesses[:0]
	switch {
	case o.deciding && o.Machine == nil: // a Machine begins anew, and knows
		o.after = stepResolve
	case o.won:
		// Decided at A; sync brings the rest of the chain up.
		o.after = stepPublish
	case o.spread:
		// Lost at A. Strays go before anything else.
		o.after = stepCASSlot
	default:
		// The lock may have been taken: o.lock stays set, so that the next
		// attempt knows its own word and the end clears it.
		o.written, o.locked = 0, false
		o.adrift = true
		if o.long() {
			o.prepared, o.chunksWritten = false, o.chunksWritten && o.draft() != nil && o.Part.Link
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
			found := layout.Word(o.theCAS(0).Found)
			if o.won = found == o.x; o.spread {
				o.spec.lostTo = found
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
	if after == stepResolve || after == stepPublish || after == stepCASSlot {
		return o.resume(after)
	}
	o.after, o.adrift, o.noting = 0, false, false
	if o.far != nil {
		o.syncBase = 0
		o.toParent()
		if o.rare != nil {
			o.reading.drops = false // the attempt that was to drop the key is over
		}
	}
	r, ok := o.route()
	if !ok {
		return Refresh
	}
	if o.far != nil && (after != stepLockGroup || !o.OwnerFenced || !sameMemory(&o.Route, &r)) {
		o.lockExpect = 0 // what it knew of the lock's owner is over
	}
	if o.lock != 0 && !sameMemory(&o.Route, &r) {
		// The lock of another group: nobody is to wait for it.
		if o.Route.PG.ID != r.PG.ID || o.Route.PG.Head == r.PG.Head {
			o.begin()
			o.addUnlock()
			return Backoff
		}
		o.lock, o.locked = 0, false // it went with the head
	}
	if o.hasPlaces() {
		switch {
		case !samePlaces(o.Route.PG, r.PG), o.placeRecalled(r.PG):
			o.dropPlace()
		case o.Route.PG.Epoch != r.PG.Epoch:
			o.written = 0 // the replicas are others in this placement group epoch
			if o.long() {
				o.prepared, o.chunksWritten = false, false
			}
		}
	}
	was := o.Route
	o.Route = r
	if o.resumes(&was) {
		return o.readStatus()
	}
	return o.dispatch()
}

// resume goes on with an Op that A has decided, or may have, in the view now in
// force and where it was decided: a shard that moved meanwhile is none of its
// business.
func (o *Op) resume(after Step) Action {
	o.step = stepStart
	old := o.Route.PG
	r, ok := o.env.RoutePG(old.ID, o.OnFrozen())
	if !ok {
		return Refresh
	}
	o.after, o.adrift = 0, false
	if !samePlaces(old, r.PG) {
		o.leak()
		o.won, o.spread = false, false
		return o.finish(fmt.Errorf("%w: placement group %d lost its memory", ErrUnknown, old.ID))
	}
	o.Route.PG = r.PG
	if old.Head != r.PG.Head {
		o.lock, o.locked = 0, false // it went with the head
		// A win there need not be known here.
		o.deciding, o.won = true, false
		after = stepResolve
	}
	if after == stepResolve {
		return o.resolve()
	}
	return o.sync(o.slot, 1, after)
}

func (o *Op) route() (r Route, ok bool) {
	switch {
	case o.Kind == Scan:
		o.child = 0
		return o.env.RouteShard(o.Hash)
	case o.Kind == Raw:
		return o.env.RoutePG(o.Raw.PG, false)
	case o.Kind == Decide:
		return o.env.RoutePG(o.Txn.Status.PG, false)
	case o.Machine != nil:
		return o.Machine.Where(o.env)
	}
	if d := o.draft(); d != nil && o.child == 0 {
		o.child, o.sureChild = d.child, d.child != 0
	}
	if r, ok = o.env.Route(o.Hash); !ok || o.child == 0 {
		return r, ok
	}
	if r.Child != nil && r.Child.Shard == o.child && r.Moves(o.Hash) {
		return *r.Child, r.Child.PG != nil
	}
	o.child, o.sureChild = 0, false
	return r, true
}

// goChild follows the key to where its group moves; sure: the group's move is
// complete. The tail has shown it, in its copy of g, which is at off.
func (o *Op) goChild(sure bool, g layout.Group, off uint64) Action {
	r, ok := o.env.Route(o.Hash)
	if ok && r.Child == nil && r.Shard == o.Route.Shard && r.MapVersion == o.Route.MapVersion {
		return o.stray(Refresh, g, off, o.Route.PG.Reader())
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
	return h.Split() && h.Depth() > o.Route.Depth && o.Route.Moves(o.Hash)
}

// again restarts the Op after something that took no effect; a is what to ask
// of the caller first, 0 for nothing.
func (o *Op) again(a Action) Action {
	o.toParent()
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
	if o.Machine != nil {
		return o.beginMachine()
	}
	switch o.Kind {
	case Scan:
		return o.readSegment()
	case Raw:
		o.begin()
		o.add(Access{Verb: Read, Space: o.Raw.Space, Replica: o.Raw.Replica, Off: o.Raw.Off,
			Buf: o.recBuf(0, o.Raw.Len)})
		return o.post(stepReadRaw)
	case Settle, Decide:
		return o.beginTxn(Hint{}, false)
	}
	h, hinted := o.env.Hint(o)
	if c := o.Route.Child; hinted && o.lock == 0 && c != nil && h.Shard == c.Shard && o.Route.Moves(o.Hash) &&
		c.PG != nil {
		// It was found there before, perhaps by another operation since this one took its place.
		if o.hasPlaces() && !samePlaces(o.Route.PG, c.PG) {
			o.dropPlace()
		}
		o.Route, o.child = *c, c.Shard
	}
	hinted = hinted && h.Shard == o.Route.Shard && h.Leads(&o.Route)
	o.trust(h, hinted)
	if o.Kind.isTiered() {
		return o.beginTiered(h, hinted)
	}
	switch o.Kind {
	case Prepare:
		return o.beginTxn(h, hinted)
	case Get, Exists, Pin:
		switch {
		case hinted && h.SlotTells() && !o.Route.PG.Joining && (o.Kind.asks() ||
			o.Cond == IfVersion && h.Version == o.IfVersion):
			return o.checkSlot(h)
		case hinted && o.knows(&h):
			return o.getPart(h)
		case hinted:
			return o.getCached(h)
		}
		return o.guess()
	case Modify:
		if hinted {
			return o.getCached(h)
		}
		return o.guess()
	case Put:
		switch {
		case o.Part != nil && !o.Part.Link:
			return o.writePart()
		case o.Part != nil && !o.adopt():
			return o.finish(ErrDraft)
		case o.Cond == Always && !hinted:
			return o.guessOrLock()
		case hinted && (o.Cond == Always || o.Cond == IfVersion && h.Version == o.IfVersion &&
			h.Flags&HintExpires == 0):
			o.take(h)
			return o.update()
		case hinted:
			return o.getCached(h)
		case o.Cond == IfAbsent:
			return o.guessOrLock()
		}
		return o.guess()
	case Delete:
		if hinted && h.Flags&HintExpires == 0 && (o.Cond == Always || h.Version == o.IfVersion) {
			o.take(h)
			return o.casDelete()
		}
		if hinted {
			return o.getCached(h)
		}
		return o.guess()
	}
	panic(fmt.Sprintf("index: kind %v", o.Kind))
}

// guess looks for a key of which there is no hint: where an image of its group has it, or else in the group. The whole
// key is compared, or the group READ, before anything is answered or changed.
func (o *Op) guess() Action {
	if h, ok := o.env.Guess(o); ok {
		return o.getCached(h)
	}
	return o.readGroup()
}

// guessOrLock is guess for a Put that takes the group's lock if it knows of no record: where an image leads to one, a
// GET proves which, and the lock is not needed. It is tried once: whoever has waited, or looked in vain, locks.
func (o *Op) guessOrLock() Action {
	if o.lock == 0 && o.Waits == 0 && o.retries == 0 {
		if h, ok := o.env.Guess(o); ok {
			return o.getCached(h)
		}
	}
	return o.lockGroup()
}

// lookUp forgets the hint, which has not led to the key, and goes on without one.
func (o *Op) lookUp() Action {
	o.env.Forget(o)
	if o.noting = false; o.Kind == Put && o.Cond == Always {
		return o.lockGroup()
	}
	return o.readGroup()
}

// take makes h's word the one under change.
func (o *Op) take(h Hint) {
	o.slot, o.x, o.xVersion, o.xFlags = h.Slot, h.Word, h.Version, h.Flags
	o.expired = false
}

// takeRecord makes w at slot, read just now as r, the one under change.
func (o *Op) takeRecord(slot uint8, w layout.Word, r *layout.Record) {
	o.take(Hint{Word: w, Version: r.Version, Slot: slot, Flags: HintFlagsOf(r.Flags, r.Expiry)})
	o.expired = o.isExpired(&r.RecordHeader)
}

// isExpired asks for the time only of records that expire.
func (o *Op) isExpired(h *layout.RecordHeader) bool {
	return h.Expiry != 0 && h.Expired(o.env.NowMillis())
}

// hinted is the way by what x names at slot.
func (o *Op) hinted() Hinted {
	return Hinted{PG: o.Route.PG, Off: o.slotOff(o.slot), X: o.x, N: o.n}
}

func (o *Op) placeRecalled(pg *PG) bool {
	if o.havePlace && pg.IsRecalled(o.n.Unit()) {
		return true
	}
	if o.hasTxnPlace() && (o.intent.have && pg.IsRecalled(o.intent.word.Unit()) || o.final.have &&
		pg.IsRecalled(o.final.word.Unit())) {
		return true
	}
	if o.long() {
		for _, c := range o.chunks {
			if pg.IsRecalled(c.Unit) {
				return true
			}
		}
	}
	return false
}

// sameMemory reports whether b's groups are those of a, in memory that lives on.
func sameMemory(a, b *Route) bool {
	return a.PG == nil || a.PG.ID == b.PG.ID && a.PG.Head == b.PG.Head && a.ShardOff == b.ShardOff
}

// samePlaces reports whether a place of a is one of b.
func samePlaces(a, b *PG) bool { return a.ID == b.ID && a.Generation == b.Generation }

func (o *Op) home() uint64 {
	h, _ := layout.GroupOff(o.Hash, o.Route.Segments)
	return o.Route.ShardOff + h
}

func (o *Op) stash() uint64 {
	_, s := layout.GroupOff(o.Hash, o.Route.Segments)
	return o.Route.ShardOff + s
}

// HeaderSlot, for a sync, is the header of a group.
const HeaderSlot = 0xff

// slotOff is the region offset of a slot numbered as in Hint.
func (o *Op) slotOff(slot uint8) uint64 {
	if o.far != nil && o.fixed != 0 {
		return o.fixed
	}
	if o.far != nil && o.syncBase != 0 {
		if slot == HeaderSlot {
			return o.syncBase
		}
		return o.syncBase + layout.SlotOff(int(slot))
	}
	if slot == HeaderSlot {
		return o.home()
	}
	return o.Route.SlotOff(o.Hash, slot)
}

// word is the i-th of three cells for words that are read.
func (o *Op) word(i int) []byte {
	if o.cells == nil {
		o.cells = (*[3 * 8]byte)(o.env.Buf(o, 3*8))
	}
	return o.cells[8*i : 8*i+8 : 8*i+8]
}

func (o *Op) group(i int) []byte {
	if o.groups[i] == nil {
		o.groups[i] = o.env.Buf(o, layout.GroupSize)
	}
	return o.groups[i]
}

func (o *Op) recBuf(i, n int) []byte {
	b := &o.rec
	if i > 0 {
		f := o.need()
		for len(f.recs) < i {
			f.recs = append(f.recs, nil)
		}
		b = &f.recs[i-1]
	}
	if cap(*b) < n {
		*b = o.env.Buf(o, n)
	}
	*b = (*b)[:n]
	return *b
}

// recAt is what recBuf gave last.
func (o *Op) recAt(i int) []byte {
	if i == 0 {
		return o.rec
	}
	return o.recs[i-1]
}
