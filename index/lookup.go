package index

import (
	"bytes"
	"encoding/binary"
	"fmt"

	"github.com/kvd-project/kvd/internal/layout"
)

func (o *Op) readGroup() Action {
	o.need().hides = nil
	o.noting = false
	o.begin()
	o.readGroupAt(o.home(), 0)
	return o.post(stepReadGroup)
}

// readGroupAt reads a group where readers look, into buffer i, and a joiner's
// copy beside it.
func (o *Op) readGroupAt(off uint64, i int) {
	pg := o.Route.PG
	o.add(Access{Verb: Read, Space: Index, Replica: pg.Reader(), Off: off, Buf: o.group(i)})
	if pg.Joining {
		o.add(Access{Verb: Read, Space: Index, Replica: pg.tail(), Off: off, Buf: o.group(4)})
	}
}

func (o *Op) gotGroup() Action {
	o.cand = o.cand[:0]
	g := layout.Group(o.groups[0])
	if s, differs := o.joinerDiffers(g, o.groups[4]); differs {
		return o.joinerBehind(s)
	}
	if o.Route.PG.Joining && layout.Group(o.groups[4]).Header().OVF() {
		// A writer of this placement group epoch may have told the joiner first.
		binary.LittleEndian.PutUint64(g, uint64(g.Header()|layout.FlagOVF))
	}
	if err := o.collect(g, 0, o.Route.PG.Reader()); err != nil {
		return o.finish(err)
	}
	o.env.Image(o, o.home()-o.Route.ShardOff, g)
	if len(o.cand) > 0 {
		o.begin()
		o.lookAtCandidates()
		if len(o.cand) == 1 && o.Kind.Reads() {
			o.noteAccess(o.cand[0], o.noteDue())
		}
		return o.post(stepReadRecords)
	}
	return o.notHome(g)
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

// lookAtCandidates adds the READs of the candidates' records at the reader, of a single one with its value apart.
func (o *Op) lookAtCandidates() {
	p := o.Route.PG.Reader()
	if len(o.cand) > 1 {
		o.readCandidates(p)
		return
	}
	w := o.wordOf(o.cand[0], 0)
	rec, apart := o.readRecord(w)
	o.add(Access{Verb: Read, Space: Heap, Replica: p, Off: w.Off(), Buf: rec, Apart: apart})
}

func (o *Op) readCandidates(replica uint8) {
	for i, s := range o.cand {
		w := o.wordOf(s, 0)
		o.add(Access{Verb: Read, Space: Heap, Replica: replica, Off: w.Off(), Buf: o.recBuf(i, o.readLenOf(w))})
	}
}

// match finds the key among the candidates' records. bad is the first of those that are not whole and of which no other
// copy was looked for yet, -1: there is none. Records that a word named when this Op read it cannot have been reused
// meanwhile ("Allocation and reuse" in docs/protocol.md), so a bad one is damaged.
func (o *Op) match() (slot uint8, w layout.Word, r layout.Record, ok bool, bad int) {
	bad = -1
	for i, s := range o.cand {
		rec, err := layout.ParseLinked(o.recAt(i))
		switch {
		case err == nil && bytes.Equal(rec.Key, o.Key):
			return s, o.wordOf(s, 0), rec, true, -1
		case err != nil && bad < 0 && o.ruinUnder(o.wordOf(s, 0)) == nil:
			bad = i
		}
	}
	return 0, 0, layout.Record{}, false, bad
}

func (o *Op) gotRecords() Action {
	at := o.step
	if o.readsHeads() {
		r := layout.Record{}
		for i, s := range o.cand {
			if w := o.wordOf(s, 0); o.gotHead(o.recAt(i), w, &r) {
				return o.present(s, w, r)
			}
		}
		o.inOne = true // that the key is absent rests on whole records alone
		o.begin()
		o.lookAtCandidates()
		return o.post(at)
	}
	if o.isApartRead() {
		if r := (layout.Record{}); o.gotApart(&r) {
			return o.present(o.cand[0], o.wordOf(o.cand[0], 0), r)
		}
		o.inOne = true // seen whole it tells
		o.begin()
		o.lookAtCandidates()
		return o.post(at)
	}
	slot, w, r, ok, bad := o.match()
	switch {
	case ok:
		return o.present(slot, w, r)
	case bad >= 0:
		return o.mendCandidate(bad, func() Action {
			o.step = at
			return o.gotRecords()
		})
	}
	if slot, x := o.ruined(); x != nil {
		if x.mine {
			return o.overRuin(slot, x)
		}
		o.hides = x.err
	}
	if at == stepReadRecords {
		return o.notHome(o.groups[0])
	}
	return o.notStashed()
}

func (o *Op) notHome(g layout.Group) Action {
	o.noting = false
	if s, hides := o.joinerHides(g); hides {
		return o.joinerBehind(s)
	}
	h := g.Header()
	if done := o.splitDone(h); done || o.anyMoved(g) {
		if o.hides != nil {
			return o.finish(o.hides)
		}
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
	if !o.Route.Moves(o.Hash) {
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
	if err := o.collect(g, StashSlot, o.Route.PG.Reader()); err != nil {
		return o.finish(err)
	}
	o.env.Image(o, o.stash()-o.Route.ShardOff, g)
	if len(o.cand) == 0 {
		return o.notStashed()
	}
	o.begin()
	o.lookAtCandidates()
	return o.post(stepReadStashRecords)
}

func (o *Op) notStashed() Action {
	if s, hides := o.joinerHides(o.groups[2]); hides {
		return o.joinerBehind(StashSlot + s)
	}
	// The stash's own header says nothing; its leftovers are cleared before the
	// home group's.
	if o.hides == nil && o.movedIn(o.groups[2]) && !o.leftOver(o.groups[0]) {
		return o.goChild(false, o.groups[2], o.stash())
	}
	return o.absent()
}

// present acts on the key's record r, found at the tail under w.
func (o *Op) present(slot uint8, w layout.Word, r layout.Record) Action {
	if r.Flags&layout.FlagIntent != 0 && o.Kind.isTiered() {
		return o.finish(ErrKept)
	}
	if r.Flags&layout.FlagIntent != 0 {
		return o.meet(slot, w, &r)
	}
	if o.isUnsure(w) {
		return o.confirm(slot, w, &r)
	}
	o.env.Remember(o, Hint{Word: w, Version: r.Version, Shard: o.Route.Shard, Slot: slot,
		Flags: HintFlagsOf(r.Flags, r.Expiry)})
	o.takeRecord(slot, w, &r)
	o.Version, o.atA = r.Version, false
	switch o.Kind {
	case Get, Exists, Pin:
		return o.gotten(&r)
	case Prepare:
		if err := o.refuted(&r); err != nil {
			return o.finish(err)
		}
		cur := r
		return o.place(&cur)
	case Put:
		switch {
		case o.Cond == IfAbsent && !o.expired:
			return o.finish(ErrExists)
		case o.Cond == IfVersion && o.expired, o.Cond == IfPresent && o.expired:
			return o.finish(ErrNotFound)
		case o.Cond == IfVersion && r.Version != o.IfVersion, o.outdone(&r):
			return o.finish(ErrConflict)
		}
		return o.update()
	case Delete:
		if o.Cond == IfVersion && !o.expired && r.Version != o.IfVersion {
			return o.finish(ErrConflict)
		}
		return o.casDelete()
	case Demote, Promote, Readdress, Drop:
		return o.presentTiered(&r)
	default: // Modify
		o.Record = r // r itself stays off the heap
		return o.modify(&o.Record)
	}
}

func (o *Op) gotten(r *layout.Record) Action {
	o.Version = r.Version
	switch {
	case o.expired:
		return o.finish(ErrNotFound)
	case o.Cond == IfVersion && r.Version == o.IfVersion:
		return o.finish(ErrUnchanged)
	case o.Part != nil && o.Part.Version != 0 && o.Part.Version != r.Version:
		return o.finish(ErrConflict)
	}
	if o.Record = *r; o.Kind.asks() {
		if o.Record.Value = nil; o.Kind == Pin && !o.noting {
			o.noting, o.noteRead = o.noteDue(), false
		}
		return o.finish(nil)
	}
	if r.Stub {
		return o.readObject(r)
	}
	if r.Flags&layout.FlagManifest != 0 {
		return o.readChunks(r.Value)
	}
	o.shown()
	return o.finish(nil)
}

// absent acts on a key that the tail does not hold, unless a ruined record may have been its.
func (o *Op) absent() Action {
	o.env.Forget(o)
	if o.hides != nil {
		return o.finish(o.hides)
	}
	o.x, o.xVersion, o.xFlags, o.expired, o.atA = 0, 0, 0, false, false
	switch o.Kind {
	case Get, Exists, Pin, Delete, Demote, Promote, Readdress, Drop:
		return o.finish(ErrNotFound)
	case Put, Prepare:
		if o.Cond == IfVersion || o.Cond == IfPresent {
			return o.finish(ErrNotFound)
		}
		return o.lockGroup()
	default:
		return o.modify(nil)
	}
}

// joinerBehind brings a slot up that a joiner shows in another state than the
// replica before it, and looks again. Both were read side by side. Only the joiner is
// brought up: readers believe the replica before it, whatever the copies have among themselves.
func (o *Op) joinerBehind(slot uint8) Action {
	if o.env.ReadOnly() {
		return o.again(Backoff) // somebody else will
	}
	if o.retries++; o.retries > maxRetries {
		o.retries = 0
		return o.unlockAnd(Backoff)
	}
	k := o.Route.PG.tail()
	if o.isSpeculative() {
		k = 1
	}
	return o.sync(slot, k, stepStart)
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
		if a != b && !o.asksJoiner(a) &&
			(a.State() != layout.Empty && a.FP() == fp || b.State() != layout.Empty && b.FP() == fp) {
			return uint8(i), true
		}
	}
	return 0, false
}

// joinerHides finds a slot that both the joiner and group g before it show EMPTY, with another word each. Words that
// are equal say that nothing is on its way between the two. Of others, the joiner's may be from before the key came to
// it, and the one before it of a delete that the joiner has yet to see: whoever takes the joiner for the tail next
// would find the key.
func (o *Op) joinerHides(g layout.Group) (slot uint8, hides bool) {
	if !o.Route.PG.Joining {
		return 0, false
	}
	j := layout.Group(o.groups[4])
	for i := range layout.GroupSlots {
		if a, b := g.Slot(i), j.Slot(i); a != b && a.State() == layout.Empty && b.State() == layout.Empty {
			return uint8(i), true
		}
	}
	return 0, false
}

// damaged reports a group at off, as replica k showed it, that says what no group says.
func (o *Op) damaged(g layout.Group, off uint64, k uint8) error {
	err := g.CheckHeader()
	if err == nil {
		return nil
	}
	return o.groupError(off, k, err)
}

func (o *Op) groupError(off uint64, k uint8, err error) error {
	return fmt.Errorf("pg %d replica %d: group at %#x: %w", o.Route.PG.ID, k, off, err)
}
