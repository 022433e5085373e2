package repair

import (
	"fmt"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/layout"
)

// startClean begins a Clean: every session has acknowledged a map that names the child alone, so nobody follows
// a MOVED word of the group any more. After a split each becomes EMPTY, with the nonce that keeps a delayed publish
// from bringing it back (I5), then SPLIT goes from the header: in this order, since MOVED without SPLIT says
// that a move is under way. If all keys went, the array belongs to nobody, and is wiped.
//
// If the child is in another placement group, the words' places are nobody's but ours, and go through limbo.
func (o *Op) startClean() index.Action {
	o.setGroups(o.Work.Off)
	if o.Work.Wipe {
		o.NewRound()
		o.addImages()
		return o.await(index.StepReadGroups, o.wipe)
	}
	// A stash group's lock is taken as well: nobody else ever wants it.
	return o.lockWork(func() index.Action {
		free := o.Work.Target != 0 && o.Work.Target != o.Route.PG.ID
		return o.emptyWords(o.movedWords(), free, o.deleted, func() index.Action {
			return o.publishSwings(func() index.Action {
				o.unlinkFreed()
				return o.syncWords(o.work.behind, o.clearSplit)
			})
		})
	})
}

// deleted is the EMPTY word that any delete by this session leaves.
func (o *Op) deleted(x layout.Word) layout.Word { return x.Delete(o.Env().Session()) }

// movedWords lists the MOVED words of the groups at work. They name records that are the child's by now; of those
// whose places are to be freed only headers are read, and manifests for their chunks.
func (o *Op) movedWords() (list []*item) {
	for i := range o.work.groups {
		for j := range layout.GroupSlots {
			if x := o.image(i, 0).Slot(j); x.State() == layout.Moved {
				list = append(list, &item{wordRef: wordRef{o.work.groups[i], uint8(j)}, x: x})
			}
		}
	}
	return list
}

// clearSplit takes SPLIT from the header, from A on: nobody sets it again from a
// replica before. Then the Op is done.
func (o *Op) clearSplit() index.Action {
	for k := range o.Route.PG.Replicas {
		if o.image(0, k).Header().Split() {
			return o.setHeaders(o.work.groups[0], 0, o.work.header, func(h layout.Header) layout.Header {
				return h &^ layout.FlagSplit
			}, o.finishWork)
		}
	}
	return o.finishWork()
}

// emptyWords takes the words of list to what n says, at A. free: their places, which
// nothing else names, are ours then; unlinkFreed hands them over. A move in place names each record from the child
// as well, by the same word, so there nothing is free.
func (o *Op) emptyWords(list []*item, free bool, n func(layout.Word) layout.Word,
	then func() index.Action) index.Action {
	swingAll := func() index.Action { return o.emptyNow(list, n, then) }
	if !free {
		return swingAll()
	}
	var named, manifests []*item
	for _, it := range list {
		if err := o.inHeap(it.wordRef, it.x); err != nil {
			o.finding("%v", err)
			continue
		}
		it.mine = true
		named = append(named, it)
	}
	return o.readManifests(named, &manifests, false, swingAll)
}

// emptyNow is emptyWords if it is known which items are ours, and their chunks.
func (o *Op) emptyNow(list []*item, n func(layout.Word) layout.Word, then func() index.Action) index.Action {
	w := &o.work
	w.swings = w.swings[:0]
	for _, it := range list {
		s := swing{wordRef: it.wordRef, x: it.x, n: n(it.x), it: it}
		if it.mine {
			s.old = append(s.old, o.addPlace(o.Route.PG, it.x.WithState(layout.Live), placeDone))
			for _, c := range it.oldParts {
				s.old = append(s.old, o.addPlace(o.Route.PG, chunkWord(c), placeDone))
			}
		}
		w.swings = append(w.swings, s)
	}
	return o.swingA(then)
}

// wipe leaves zeroes in a group that nobody reaches any more. Words go first to 0 at A, one CAS each, so that this Op
// and no other hands over a place; then the rest of the group, header and lock included, on every replica. Only zeroes
// make the array fit for another shard: a nonce of this one's would be a word that the other may write again (I5).
func (o *Op) wipe() index.Action {
	w := &o.work
	g := o.image(0, 0)
	var gone []*item
	var stay [layout.GroupSlots]bool
	for i := range layout.GroupSlots {
		x, ref := g.Slot(i), wordRef{o.Work.Off, uint8(i)}
		if x.Readable() && !o.Work.Drop {
			o.finding("%s: %v in an array that nobody reaches", o.where(ref), x)
			stay[i] = true
		} else if x.State() != layout.Empty {
			gone = append(gone, &item{wordRef: ref, x: x})
		}
	}
	free := o.Work.Drop || o.Work.Target != 0 && o.Work.Target != o.Route.PG.ID
	return o.emptyWords(gone, free, func(layout.Word) layout.Word { return 0 }, func() index.Action {
		for i := range w.swings {
			if s := &w.swings[i]; s.won {
				clear(g[layout.SlotOff(int(s.slot)):][:8])
			}
		}
		return o.wipeFrom(0, stay)
	})
}

// wipeFrom clears what replica k and those behind it still show, and looks whether
// it is gone.
func (o *Op) wipeFrom(k uint8, stay [layout.GroupSlots]bool) index.Action {
	o.NewRound()
	for ; k < o.Route.PG.Replicas && len(o.Accesses) == 0; k++ {
		for off := uint64(0); off < layout.GroupSize; off += 8 {
			x := wordAt(o.image(0, k)[off:])
			if x == 0 || off >= layout.GroupSlotsOff && stay[(off-layout.GroupSlotsOff)/8] {
				continue
			}
			o.Add(index.Access{Verb: index.CAS, Space: index.Index, Replica: k, Off: o.Work.Off + off,
				Expect: uint64(x), New: 0})
		}
	}
	if len(o.Accesses) == 0 {
		o.unlinkFreed()
		return o.finishWork()
	}
	return o.await(index.StepWipeWords, func() index.Action {
		for i := range o.Accesses {
			if a := &o.Accesses[i]; a.Found != a.Expect {
				// Somebody changed it after all.
				if o.work.looks++; o.work.looks > maxLooks {
					return o.Finish(fmt.Errorf("pg %d group %#x keeps changing while it is wiped", o.Route.PG.ID,
						o.Work.Off))
				}
				o.NewRound()
				o.addImages()
				return o.await(index.StepReadGroups, o.wipe)
			}
		}
		return o.wipeFrom(k, stay)
	})
}
