package index

import (
	"math/bits"

	"github.com/kvd-project/kvd/internal/layout"
)

// lockGroup takes the home group's insert lock and reads the group, while the
// record is written.
func (o *Op) lockGroup() Action {
	o.x, o.xVersion, o.xFlags = 0, 0, 0
	if o.child != 0 && !o.sureChild {
		// Only the parent's lock tells whether the child takes inserts yet.
		o.child = 0
		r, ok := o.env.Route(o.Hash)
		if !ok {
			return o.again(Refresh)
		}
		if !sameMemory(&o.Route, &r) {
			if o.hasPlaces() && !samePlaces(o.Route.PG, r.PG) {
				o.dropPlace()
			}
			o.Route = r
		}
	}
	if o.Kind == Prepare { // an intent names the slot's word, which is not known yet
		if a := o.reserve(); a != 0 {
			return a
		}
	} else if o.Kind == Locate {
	} else if a := o.prepare(0); a != 0 {
		return a
	}
	o.need().hides = nil
	o.begin()
	if !o.locked {
		o.addLock(o.home())
	}
	o.add(Access{Verb: Read, Space: Index, Off: o.home(), Buf: o.group(0)})
	if p := o.Route.PG.tail(); p != 0 {
		o.add(Access{Verb: Read, Space: Index, Replica: p, Off: o.home(), Buf: o.group(1)})
	}
	if o.Kind != Prepare && o.Kind != Locate {
		o.addRecord(o.Route.PG.Replicas)
	}
	return o.post(stepLockGroup)
}

func (o *Op) gotLock() Action {
	o.written = o.Route.PG.Replicas
	// Before the lock, which is as damaged as the rest.
	if err := o.damaged(o.groups[0], o.home(), 0); err != nil {
		return o.finish(err)
	}
	if p := o.Route.PG.tail(); p != 0 {
		if err := o.damaged(o.groups[1], o.home(), p); err != nil {
			return o.finish(err)
		}
	}
	if !o.locked {
		if !o.lockTaken(layout.Lock(o.Accesses[0].Found)) {
			if o.step = stepStart; o.lockExpect == 0 {
				return o.lockGroup() // it is free by now
			}
			return o.askFenced()
		}
	}
	g := layout.Group(o.groups[0])
	if h := g.Header(); o.splitDone(h) {
		// Nobody follows it before the tail shows it.
		return o.sync(HeaderSlot, 1, stepSplitSeen)
	}
	if o.moveUnfinished(g) {
		if o.readFrozen(g) {
			return o.post(stepReadFrozen)
		}
		return o.midMove(g)
	}
	o.diff = o.diff[:0]
	if o.Route.PG.tail() != 0 {
		p := layout.Group(o.groups[1])
		for i := range layout.GroupSlots {
			if g.Slot(i) != p.Slot(i) {
				o.diff = append(o.diff, uint8(i))
			}
		}
	}
	return o.syncGroup()
}

// addLock adds the CAS that takes the insert lock of the group at an offset in the region.
func (o *Op) addLock(group uint64) {
	if o.lock == 0 {
		o.lock = layout.MakeLock(o.env.Session(), o.env.Stamp())
	}
	o.lockOff = group + layout.GroupLockOff
	o.add(Access{Verb: CAS, Space: Index, Off: o.lockOff, Expect: uint64(o.lockExpect), New: uint64(o.lock)})
}

// lockTaken reports whether the lock is held, by what its CAS found. If not, lockExpect is the word that is to be
// broken when its owner is fenced, or 0 if nobody holds it by now.
func (o *Op) lockTaken(found layout.Lock) bool {
	if found != o.lockExpect && found != o.lock {
		if o.lockExpect = found; found != 0 {
			o.LockOwner, o.OwnerFenced = found.Session(), false
		}
		return false
	}
	o.locked, o.lockExpect, o.Waits = true, 0, 0
	return true
}

// addUnlock releases the insert lock by CAS, off the path.
func (o *Op) addUnlock() {
	o.add(Access{Verb: CAS, Space: Index, NoWait: true, Off: o.lockOff,
		Expect: uint64(o.lock), New: 0})
	o.locked, o.lockTried, o.lock = false, false, 0
}

func (o *Op) unlockAnd(a Action) Action {
	o.step = stepStart
	o.begin()
	if o.lock != 0 {
		o.addUnlock()
	}
	return a
}

// askFenced waits for a lock that somebody holds. It may be broken only after
// its owner's fence is confirmed: until then a verb of the owner can still land.
func (o *Op) askFenced() Action {
	o.step = stepStart
	o.after = stepLockGroup
	return AskFenced
}

// moveUnfinished reports whether a move of the group has begun that may not be
// over. SPLIT marks the words that a complete move left behind.
func (o *Op) moveUnfinished(g layout.Group) bool {
	for i := range layout.GroupSlots {
		if w := g.Slot(i); w.State() == layout.Frozen && !o.isIntent(w) {
			return true
		}
	}
	return o.movedUnfinished(g)
}

// movedUnfinished reports whether a MOVED word of g says so.
func (o *Op) movedUnfinished(g layout.Group) bool {
	for i := range layout.GroupSlots {
		if g.Slot(i).State() == layout.Moved && !g.Header().Split() {
			return true
		}
	}
	return false
}

// midMove waits for a mover to finish group g; a transaction does not, since the mover may wait for it.
func (o *Op) midMove(g layout.Group) Action {
	switch o.Kind {
	case Prepare:
		return o.finish(ErrMoving)
	case Locate:
		return o.finish(ErrKept)
	}
	if o.Route.Child == nil {
		return o.stray(Backoff, g, o.home(), 0)
	}
	return o.unlockAnd(Backoff)
}

// splitSeen: the tail shows that the group's move is complete.
func (o *Op) splitSeen() Action { return o.goChild(true, o.groups[0], o.home()) }

// syncGroup brings every slot in which A and P differ up to date before the
// insert's CAS; afterwards would be too late (an old copy of the key stays
// visible).
func (o *Op) syncGroup() Action {
	if n := len(o.diff); n > 0 {
		s := o.diff[n-1]
		o.diff = o.diff[:n-1]
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
		if p := o.Route.PG.tail(); p != 0 {
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
	slot, w, r, ok, bad := o.match()
	switch {
	case ok:
		return o.presentLocked(slot, w, r)
	case bad >= 0:
		return o.mendCandidate(bad, o.gotLockedRecords)
	}
	if slot, x := o.ruined(); x != nil {
		if o.atA = true; x.mine {
			return o.overRuin(slot, x)
		}
		o.hides = x.err
	}
	if !o.stashRead {
		return o.absentLocked()
	}
	o.stashRead = false
	o.diff = o.diff[:0]
	if o.Route.PG.tail() != 0 {
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
	if o.Kind == Locate {
		return o.located(w, &r)
	}
	if r.Flags&layout.FlagIntent != 0 {
		// Nobody waits for a transaction with the lock.
		o.take(Hint{Word: w, Slot: slot})
		o.begin()
		o.addUnlock()
		o.add(Access{Verb: Read, Space: Heap, Off: w.Off(), Buf: o.recBuf(0, w.ReadLen())})
		return o.post(stepReadLost)
	}
	o.takeRecord(slot, w, &r)
	o.Version, o.atA = r.Version, true
	switch {
	case o.Kind == Modify:
		return o.modify(&r)
	case o.Kind == Prepare:
		return o.changeAtA(&r)
	case o.Cond == IfAbsent && !o.expired:
		return o.answerAfterSync(ErrExists)
	case o.outdone(&r):
		return o.answerAfterSync(ErrConflict)
	}
	return o.update()
}

// answerAfterSync answers err once the tail shows what it rests on.
func (o *Op) answerAfterSync(err error) Action {
	o.need().answer = err
	return o.sync(o.slot, 1, stepDone)
}

func (o *Op) absentLocked() Action {
	if o.hides != nil {
		return o.finish(o.hides)
	}
	g := layout.Group(o.groups[0])
	if g.Header().OVF() && o.movedIn(o.groups[2]) && !o.leftOver(g) {
		if o.Route.Child == nil {
			return o.stray(Backoff, o.groups[2], o.stash(), 0)
		}
		return o.unlockAnd(Backoff) // a move of this group is unfinished, or not cleared yet
	}
	if o.Kind == Locate {
		return o.finish(nil)
	}
	for i := range layout.GroupSlots {
		if w := g.Slot(i); w.State() == layout.Empty {
			return o.insertAt(uint8(i), w)
		}
	}
	// Full: announce the overflow on every replica before anything is there. That
	// A has the flag says nothing of the others: who set it may have died.
	o.begin()
	for r := range o.Route.PG.Replicas {
		h := g.Header()
		switch r {
		case 0:
		case o.Route.PG.tail():
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
	if used >= crowded(layout.ShardPrefix(o.Hash, o.Route.Depth)) {
		o.env.Crowded(o.Route.Shard)
	}
	for i := range layout.GroupSlots {
		if w := g.Slot(i); w.State() == layout.Empty {
			return o.insertAt(StashSlot+uint8(i), w)
		}
	}
	return o.unlockAnd(Grow)
}

// insertAt puts the record into the EMPTY slot that holds w, under the lock.
func (o *Op) insertAt(slot uint8, w layout.Word) Action {
	o.slot, o.x, o.xVersion, o.xFlags, o.expired = slot, w, 0, 0, false
	if o.Kind == Prepare {
		return o.place(nil)
	}
	o.begin()
	return o.casSlot()
}

// crowded is how many slots of a stash are in use when its shard should have more room: 2 to 11.
// Keys spread evenly, so shards of one size fill up together, and those of one placement group get more room
// one after the other: they ask in turns, the first at half the load at which the last are full. Shards that differ in
// the last bit of their prefix, as two halves of one do, are furthest apart.
func crowded(prefix uint32) int { return 2 + int(uint64(bits.Reverse32(prefix))*10>>32) }
