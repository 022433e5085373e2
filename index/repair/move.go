package repair

import (
	"bytes"
	"fmt"
	"slices"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/layout"
)

// startMove begins Move and Abandon.
//
// A Move takes one home group's share of the moved set to the child, under the group's insert lock: readMoving finds
// it, freeze bars updates and deletes, frozen waits until the tail shows that, gotChild and linkChild give every key a
// slot in the child, setMoved sends readers there, setSplit says that it is complete. The order is what "Moving
// shards" in docs/protocol.md says, and each rule there has a mutant. Every step can be found half done by a janitor
// before, so each begins by looking at what is there.
func (o *Op) startMove() index.Action {
	r := &o.Route
	if o.Kind == index.Move && (r.Child == nil || r.Child.PG == nil) {
		return o.Restart(index.Refresh)
	}
	if uint64(o.Work.Group) >= uint64(r.Segments)*layout.SegmentGroups {
		return o.Finish(fmt.Errorf("shard %d has no group %d", r.Shard, o.Work.Group))
	}
	home, stash := o.groupAt(r, 1, 0)
	if err := checkIndex(r.PG, stash, layout.GroupSize); err != nil {
		return o.Finish(err)
	}
	if o.Kind == index.Abandon {
		o.setGroups(home, stash)
		return o.lockWork(o.abandon)
	}
	if c := r.Child; c.Segments%r.Segments != 0 || c.Segments/r.Segments-1 >= layout.MaxGrowth ||
		o.checkChild(r) != nil ||
		c.PG.Replicas == 0 || c.PG.Replicas > index.MaxChain {
		return o.Finish(fmt.Errorf("shard %d: its child %d at %#x of pg %d is not its like", r.Shard, r.Child.Shard,
			r.Child.ShardOff, r.Child.PG.ID))
	}
	o.setGroups(home, stash)
	return o.lockWork(o.moveLocked)
}

// checkChild reports whether the last of the child's groups that home group Work.Group of r goes
// to lies in the child's index.
func (o *Op) checkChild(r *index.Route) error {
	_, stash := o.groupAt(r.Child, r.Fan(), r.Fan()-1)
	return checkIndex(r.Child.PG, stash, layout.GroupSize)
}

// groupAt gives the region offsets of home group Work.Group in r's array and of its
// stash. In a child with fan times as many segments the group is one of each of fan segments: that
// of segment part, from 0.
func (o *Op) groupAt(r *index.Route, fan, part uint32) (home, stash uint64) {
	segment := r.ShardOff + uint64(o.Work.Group/layout.SegmentGroups*fan+part)*layout.SegmentSize
	return segment + uint64(o.Work.Group%layout.SegmentGroups)*layout.GroupSize,
		segment + layout.StashGroup*layout.GroupSize
}

func (o *Op) moveLocked() index.Action {
	if err := o.image(0, 0).CheckHeader(); err != nil {
		return o.Finish(fmt.Errorf("pg %d replica 0: group at %#x: %w", o.Route.PG.ID, o.work.groups[0], err))
	}
	if h := o.work.header; h.Split() && h.Depth() > o.Route.Depth {
		// All but the header was everywhere before A got it. The header still comes
		// after whatever differs: readers go by it.
		return o.syncWords(o.work.behind, func() index.Action {
			return o.syncWords([]wordRef{{o.work.groups[0], index.HeaderSlot}}, o.finishWork)
		})
	}
	return o.readMoving()
}

// readMoving finds the moved set in the groups just read at A. Under the lock
// nothing is inserted; keys of the set may be updated and deleted. So it comes back here until a freeze has found every
// word as it was read; items whose words have not changed keep their records and places, the others give theirs back.
func (o *Op) readMoving() index.Action {
	w := &o.work
	if w.looks++; w.looks > maxLooks {
		return o.Restart(index.Backoff)
	}
	old := w.items
	w.items = nil
	var unread []*item
	for i := range w.groups {
		if i == 1 && !o.image(0, 0).Header().OVF() {
			break // none of its keys is in the stash
		}
		for j := range layout.GroupSlots {
			x := o.image(i, 0).Slot(j)
			if !x.Readable() {
				continue
			}
			ref := wordRef{w.groups[i], uint8(j)}
			if err := o.inHeap(ref, x); err != nil {
				return o.Finish(err)
			}
			at := slices.IndexFunc(old, func(it *item) bool {
				return it.wordRef == ref && !it.stale && it.x.WithState(layout.Live) == x.WithState(layout.Live)
			})
			if at >= 0 {
				old[at].x = x
				w.items = append(w.items, old[at])
				old = slices.Delete(old, at, at+1)
				continue
			}
			it := &item{wordRef: ref, x: x}
			w.items, unread = append(w.items, it), append(unread, it)
		}
	}
	for _, it := range old {
		o.givePlaces(it)
	}
	return o.fetch(unread, 0, o.gotMoving, o.placeMoving)
}

// rereadMoving reads the groups again, at every replica: a key that was deleted meanwhile is at P still, and is no item
// any more. Its owner finds the key gone from the child and leaves the word, if A is lost.
func (o *Op) rereadMoving() index.Action {
	o.NewRound()
	o.addImages()
	return o.await(index.StepReadGroups, func() index.Action {
		o.work.behind = o.slotsBehind()
		return o.readMoving()
	})
}

// gotMoving judges whether a record belongs to the moved set. A record that cannot be read might, and would be lost.
func (o *Op) gotMoving(it *item, b []byte) error {
	r, err := o.parseOf(it, b)
	if err != nil {
		return err
	}
	hash := o.Env().HashOf(r.Key)
	home, _ := layout.GroupOff(hash, o.Route.Segments)
	switch inHome := it.base == o.work.groups[0]; {
	case o.Route.ShardOff+home != o.work.groups[0] && inHome:
		return fmt.Errorf("%s: record at %#x: its key belongs into the group at %#x", o.where(it.wordRef), it.x.Off(),
			o.Route.ShardOff+home)
	case o.Route.ShardOff+home != o.work.groups[0]:
		return nil
	case o.Kind == index.Move && !o.Route.Moves(hash):
		if it.x.State() == layout.Frozen && r.Flags&layout.FlagIntent == 0 {
			o.finding("%s: FROZEN, but its key does not move", o.where(it.wordRef))
		}
		return nil
	}
	if r.Flags&layout.FlagIntent != 0 {
		return o.noteIntent(it, &r) // it does not move
	}
	it.mine, it.hash, it.key = true, hash, bytes.Clone(r.Key)
	if r.Flags&layout.FlagManifest != 0 && o.Kind == index.Move && o.Route.Child.PG.ID != o.Route.PG.ID {
		m, err := o.partsOf(it, &r)
		if err != nil {
			return err
		}
		it.id, it.chunks = m.ID, m.Chunks
	}
	return nil
}

// mine are the items of the moved set. The others stay, and share only the lock.
func (w *workState) mine() (list []*item) {
	for _, it := range w.items {
		if it.mine {
			list = append(list, it)
		}
	}
	return list
}

// placeMoving takes places for all records that go to another placement group, before
// anything is frozen that would have to wait for memory.
func (o *Op) placeMoving() index.Action {
	// No intent moves, since its owner, and whoever meets it, knows it by its slot.
	if list := intents(o.work.items); len(list) > 0 {
		return o.settleIntents(list, o.rereadMoving)
	}
	if child := o.Route.Child.PG; child.ID != o.Route.PG.ID {
		for _, it := range o.work.mine() {
			if !it.havePlace && !o.takePlaces(child, it) {
				return o.noMemory()
			}
		}
	}
	return o.freeze(false)
}

// noMemory starts over when there is memory.
func (o *Op) noMemory() index.Action {
	o.Release(true)
	return o.Restart(index.Alloc)
}

// freeze bars updates and deletes: LIVE→FROZEN at A. again: a word was not what was
// read, so the group is read anew before anything is copied.
func (o *Op) freeze(again bool) index.Action {
	w := &o.work
	w.swings = w.swings[:0]
	for _, it := range w.mine() {
		if it.x.State() == layout.Live {
			w.swings = append(w.swings, swing{wordRef: it.wordRef, x: it.x, n: it.x.WithState(layout.Frozen), it: it})
		}
	}
	if len(w.swings) == 0 {
		if again {
			return o.rereadMoving()
		}
		return o.frozen()
	}
	if w.looks++; w.looks > maxLooks {
		return o.Restart(index.Backoff)
	}
	return o.swingA(func() index.Action {
		for i := range w.swings {
			s := &w.swings[i]
			switch {
			case s.won:
				s.it.x = s.n
				continue
			case s.found.State() == layout.Live && s.base == w.groups[0] &&
				layout.InHeap(s.found, o.Route.PG.HeapLo, o.Route.PG.HeapHi):
				// No insert happens here, so it is the same key: a busy one is
				// frozen as it is found, and read afterwards.
				s.it.x = s.found
			default:
				s.it.x = 0
			}
			s.it.stale, again = true, true
		}
		return o.freeze(again)
	})
}

// frozen brings FROZEN down to P: a reader of P must know that the word may be
// on its way before there is another.
func (o *Op) frozen() index.Action {
	w := &o.work
	if len(w.mine()) == 0 {
		return o.setMoved(o.setSplit)
	}
	w.swings = w.swings[:0]
	for _, it := range w.mine() {
		// A took exactly LIVE→FROZEN, whoever froze it.
		w.swings = append(w.swings, swing{wordRef: it.wordRef, x: it.x.WithState(layout.Live), n: it.x, won: true,
			exact: true})
	}
	return o.publishSwings(o.readChild)
}

// maxParts bounds how many of the child's segments are at work at once.
const maxParts = 8

// readChild reads the child's groups, those of some of its segments, that lack something. The child's lock is not
// taken: until the parent's group says SPLIT nobody inserts a key of it there, and what others do in the child's stash
// only costs a slot, which is chosen again.
func (o *Op) readChild() index.Action {
	w := &o.work
	if !slices.ContainsFunc(w.items, lacking) {
		return o.setMoved(o.setSplit)
	}
	if w.looks++; w.looks > maxLooks {
		return o.Restart(index.Backoff)
	}
	o.ToChild()
	w.parts, w.groups = w.parts[:0], w.groups[:0]
	for _, it := range w.items {
		if lacking(it) && len(w.parts) < maxParts && o.groupsOf(it) < 0 {
			part := o.partOf(it)
			home, stash := o.groupAt(&o.Route, o.Parent().Fan(), part)
			w.parts, w.groups = append(w.parts, part), append(w.groups, home, stash)
		}
	}
	o.NewRound()
	o.addImages()
	return o.await(index.StepReadChild, o.gotChild)
}

// lacking reports whether the child may lack an item that moves.
func lacking(it *item) bool { return it.mine && !it.done }

// partOf is which of the child's segments takes it, among those that take what is in its segment
// of the parent. The Op is at the child.
func (o *Op) partOf(it *item) uint32 {
	home, _ := layout.GroupOff(it.hash, o.Route.Segments)
	return uint32(home/layout.SegmentSize) % o.Parent().Fan()
}

// groupsOf is the number of the child's group, among those at work, that takes it; its stash
// follows. -1: its segment is not at work.
func (o *Op) groupsOf(it *item) int {
	if i := slices.Index(o.work.parts, o.partOf(it)); i >= 0 {
		return 2 * i
	}
	return -1
}

// atParent comes back from the child, to the groups of the parent. Their images are the child's by now and are not
// looked at any more: what is to be changed is in items, behind and header.
func (o *Op) atParent() {
	o.ToParent()
	o.setGroups(o.groupAt(&o.Route, 1, 0))
}

// gotChild looks which of the keys the child has: a janitor before may have copied
// some.
func (o *Op) gotChild() index.Action {
	w := &o.work
	child := o.Route.PG
	same := child.ID == o.Parent().PG.ID
	late := o.slotsBehind()
	var half []wordRef // copied, but not on every replica
	var cands []*item
	of := map[*item]*item{}
	for _, it := range w.mine() {
		at := o.groupsOf(it)
		if at < 0 {
			continue
		}
		it.done = false
		for _, i := range []int{at, at + 1} {
			for j := range layout.GroupSlots {
				x, ref := o.image(i, 0).Slot(j), wordRef{w.groups[i], uint8(j)}
				switch {
				case !x.Readable() || x.FP() != layout.FP(it.hash):
				case same && x.WithState(layout.Live) == it.x.WithState(layout.Live):
					it.done = true
					if slices.Contains(late, ref) {
						half = append(half, ref)
					}
				case layout.InHeap(x, child.HeapLo, child.HeapHi):
					c := &item{wordRef: ref, x: x}
					cands, of[c] = append(cands, c), it
				}
			}
		}
	}
	got := func(c *item, b []byte) error {
		// A record that cannot be read is no key of this group: nobody but a janitor before
		// wrote one, and its record was complete first.
		if r, err := o.parseOf(c, b); err != nil {
			o.finding("%v", err)
		} else if bytes.Equal(r.Key, of[c].key) {
			of[c].done = true
			if slices.Contains(late, c.wordRef) {
				half = append(half, c.wordRef)
			}
		}
		return nil
	}
	return o.fetch(cands, 0, got, func() index.Action {
		return o.syncWords(half, o.linkChild)
	})
}

// linkChild chooses a slot of the child for every key that it lacks, and links it
// there: the parent's slot if that is free, so that a hint stays right. In the same placement group the child's word is
// the parent's, LIVE: one record, two names, of which only one is reachable (I6). In another it names the copy. A child
// without a free slot has to grow first.
func (o *Op) linkChild() index.Action {
	w := &o.work
	todo := slices.DeleteFunc(w.mine(), func(it *item) bool { return it.done || o.groupsOf(it) < 0 })
	if len(todo) == 0 {
		return o.readChild()
	}
	w.swings = w.swings[:0]
	taken := make([][layout.GroupSlots]bool, len(w.groups))
	choose := func(it *item, i, j int) bool {
		x := o.image(i, 0).Slot(j)
		if x.State() != layout.Empty || taken[i][j] {
			return false
		}
		taken[i][j] = true
		w.swings = append(w.swings, swing{wordRef: wordRef{w.groups[i], uint8(j)}, x: x, it: it})
		return true
	}
	first := func(it *item, i int) bool {
		for j := range layout.GroupSlots {
			if choose(it, i, j) {
				return true
			}
		}
		return false
	}
	parentHome, _ := o.groupAt(o.Parent(), 1, 0)
	var rest []*item
	for _, it := range todo {
		if it.base != parentHome || !choose(it, o.groupsOf(it), int(it.slot)) {
			rest = append(rest, it)
		}
	}
	var overflow []int
	for _, it := range rest {
		at := o.groupsOf(it)
		if first(it, at) {
			continue
		}
		if overflow = append(overflow, at); !first(it, at+1) {
			o.finding("%s: no slot is left for what moves there", o.where(wordRef{w.groups[at], index.HeaderSlot}))
			return o.Restart(index.Grow)
		}
	}
	copies := todo
	if o.Route.PG.ID == o.Parent().PG.ID {
		copies = nil
	}
	return o.copyItems(copies, func() index.Action {
		o.ToChild()
		return o.overflow(slices.Compact(slices.Sorted(slices.Values(overflow))), o.swingChild)
	})
}

// overflow sets OVF in the groups of list, by their numbers among those at work, on every replica.
func (o *Op) overflow(list []int, then func() index.Action) index.Action {
	if len(list) == 0 {
		return then()
	}
	return o.setHeaders(o.work.groups[list[0]], 0, o.image(list[0], 0).Header(), func(h layout.Header) layout.Header {
		return h | layout.FlagOVF
	},
		func() index.Action { return o.overflow(list[1:], then) })
}

func (o *Op) swingChild() index.Action {
	w := &o.work
	for i := range w.swings {
		s := &w.swings[i]
		if s.n = s.it.x.WithState(layout.Live); s.it.havePlace {
			s.n, s.fresh = s.it.n, s.it.fresh
		}
	}
	linked := func() index.Action {
		for i := range w.swings {
			if !w.swings[i].won {
				return o.readChild() // taken meanwhile, in the stash
			}
			w.swings[i].it.done = true
		}
		return o.readChild()
	}
	return o.swingA(func() index.Action { return o.publishSwings(linked) })
}

// setMoved sends readers to the child, which has everything by now. The stash first: who
// finds a MOVED word of a key's fingerprint in the home group looks for the key in
// the child, wherever it was.
func (o *Op) setMoved(then func() index.Action) index.Action {
	w := &o.work
	o.atParent()
	moved := func(i int, then func() index.Action) index.Action {
		w.swings = w.swings[:0]
		for _, it := range w.mine() {
			if it.base == w.groups[i] && it.x.State() == layout.Frozen {
				w.swings = append(w.swings, swing{wordRef: it.wordRef, x: it.x, n: it.x.WithState(layout.Moved),
					it: it})
			}
		}
		return o.swingA(func() index.Action {
			for i := range w.swings {
				s := &w.swings[i]
				if !s.won {
					return o.Finish(fmt.Errorf("%s: holds %v instead of %v, which only its mover may change",
						o.where(s.wordRef), s.found, s.x))
				}
				s.it.x = s.n
				o.Work.Moved++
			}
			return o.publishSwings(then)
		})
	}
	// Differences that somebody before has left between A and P come first.
	return o.syncWords(w.behind, func() index.Action {
		return moved(1, func() index.Action { return moved(0, then) })
	})
}

// setSplit says that the group's move is complete, and to which depth: a map that knows a smaller one is late, and its
// clients go to the child. A migration moves all hashes, for which no depth stands; MigratedDepth is above all.
func (o *Op) setSplit() index.Action {
	depth := uint8(layout.MigratedDepth)
	if o.Route.Split {
		depth = o.Route.Depth + 1
	}
	return o.setHeaders(o.work.groups[0], 0, o.work.header, func(h layout.Header) layout.Header {
		if h.Split() && h.Depth() >= depth {
			return h
		}
		return h.WithSplit(depth)
	}, o.finishWork)
}
