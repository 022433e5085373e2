package repair

import (
	"bytes"
	"fmt"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/layout"
)

// intent is a transaction's intent that a SettleAll found. Its word is the item's.
type intent struct {
	item
	in      layout.Intent
	verdict layout.Verdict // Undecided: it is gone
	// before is the record before, of which a copy takes the intent's place after an ABORT.
	before *item
}

// startSettle takes away every intent of a group: those that a session which died has left stand for ever otherwise, and its
// status words may not serve anybody else while one does. Nothing is locked, and nobody is waited for but undecided transactions, which
// are aborted by and by.
//
// The dead session's verbs have all landed before this begins, so each of its intents that is anywhere is at A, or has been replaced there.
// Therefore the words that differ between replicas are synced, too: the tail may still show an intent that is gone at A. Its status words are left as
// they are: nobody but their owner commits, and the verdict on the last transaction is what its intents are settled by.
func (o *Op) startSettle() index.Action {
	o.Work.Records = 0
	o.setGroups(o.Work.Off)
	o.NewRound()
	o.addImages()
	return o.await(index.StepReadGroups, func() index.Action {
		w := &o.work
		w.behind, w.intents = o.slotsBehind(), nil
		var list []*item
		for j := range layout.GroupSlots {
			x, ref := o.image(0, 0).Slot(j), wordRef{o.Work.Off, uint8(j)}
			if x.State() != layout.Frozen {
				continue
			}
			if err := o.inHeap(ref, x); err != nil {
				return o.Finish(err)
			}
			list = append(list, &item{wordRef: ref, x: x})
		}
		return o.fetch(list, 0, o.gotIntent, func() index.Action { return o.findVerdicts(0) })
	})
}

// gotIntent notes what a FROZEN word names if that is an intent. A record that cannot be read might be one, and its
// transaction's status word would serve another while it stands.
func (o *Op) gotIntent(it *item, b []byte) error {
	r, err := o.parseOf(it, b)
	if err != nil || r.Flags&layout.FlagIntent == 0 {
		return err // a mover's
	}
	in, err := layout.ParseIntent(r.Value, o.Route.PG.HeapLo, o.Route.PG.HeapHi)
	hash := o.Env().HashOf(r.Key)
	for _, x := range []layout.Word{it.x, in.Parent, in.Final} {
		if err == nil && x.State() != layout.Empty && x.FP() != layout.FP(hash) {
			err = &layout.CorruptError{What: "intent", Check: "fingerprint of " + x.String(), Got: uint64(x.FP()), Want: uint64(layout.FP(hash))}
		}
	}
	if err != nil {
		return fmt.Errorf("%s: record at %#x: %w", o.where(it.wordRef), it.x.Off(), err)
	}
	i := &intent{item: *it, in: in}
	i.key = bytes.Clone(r.Key)
	o.work.intents = append(o.work.intents, i)
	return nil
}

// findVerdicts asks what became of the transactions, one after the other from the i-th intent on.
func (o *Op) findVerdicts(i int) index.Action {
	if i == len(o.work.intents) {
		return o.copyBefore()
	}
	it := o.work.intents[i]
	o.work.then = func() index.Action {
		it.verdict = o.Verdict()
		return o.findVerdicts(i + 1)
	}
	return o.FindVerdict(it.x, it.in)
}

// copyBefore copies the records that come back, those before aborted intents: the same words again would be what a CAS
// that is late expects.
func (o *Op) copyBefore() index.Action {
	var list []*item
	for _, it := range o.work.intents {
		if it.verdict == layout.Abort && it.in.Parent.State() == layout.Live {
			it.before = &item{wordRef: it.wordRef, x: it.in.Parent, key: it.key}
			if !o.takePlaces(o.Route.PG, it.before) {
				return o.noMemory()
			}
			list = append(list, it.before)
		}
	}
	return o.copyItems(list, o.settleIntents)
}

// settleIntents swings each intent to what it has come to, and hands over the places that go with it.
func (o *Op) settleIntents() index.Action {
	w := &o.work
	w.swings = w.swings[:0]
	late := w.behind
	for _, it := range w.intents {
		if it.verdict == layout.Undecided {
			late = append(late, it.wordRef)
			continue
		}
		s := swing{wordRef: it.wordRef, x: it.x, n: o.deleted(it.x), it: &it.item}
		switch {
		case it.verdict == layout.Commit && it.in.Final != 0:
			s.n = it.in.Final
		case it.before != nil:
			s.n, s.fresh = it.before.n, it.before.fresh
		}
		for _, x := range []layout.Word{it.x.WithState(layout.Live), it.in.Parent, it.in.Final} {
			if x.State() == layout.Live && x != s.n {
				s.old = append(s.old, o.addPlace(o.Route.PG, x, placeDone))
			}
		}
		w.swings = append(w.swings, s)
	}
	return o.swingA(func() index.Action {
		return o.publishSwings(func() index.Action {
			o.unlinkFreed()
			for i := range w.swings {
				if s := &w.swings[i]; s.won {
					o.Work.Records++
				} else {
					late = append(late, s.wordRef) // others have settled it, and the tail may not show that
				}
			}
			for _, it := range w.intents {
				if it.before != nil {
					o.givePlaces(it.before)
				}
			}
			o.Work.Synced = uint64(len(late))
			return o.syncWords(late, o.finishWork)
		})
	})
}
