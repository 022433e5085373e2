package repair

import (
	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/layout"
)

// startSettle takes away every intent of a group: those that a session which died has left stand for ever otherwise,
// and its status words may not serve anybody else while one does. Nothing is locked, and nobody is waited for but
// undecided transactions, which are aborted by and by.
//
// The dead session's verbs have all landed before this begins, so each of its intents that is anywhere is at A, or has
// been replaced there. Therefore the words that differ between replicas are synced, too: the tail may still show an
// intent that is gone at A. Its status words are left as they are: nobody but their owner commits, and the verdict on
// the last transaction is what its intents are settled by.
func (o *Op) startSettle() index.Action {
	o.Work.Synced = 0
	o.setGroups(o.Work.Off)
	o.NewRound()
	o.addImages()
	return o.await(index.StepReadGroups, func() index.Action {
		w := &o.work
		w.behind = o.slotsBehind()
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
		return o.fetch(list, 0, o.gotIntent, func() index.Action {
			return o.settleIntents(intents(list), func() index.Action {
				o.Work.Synced = uint64(len(w.behind))
				return o.syncWords(w.behind, o.finishWork)
			})
		})
	})
}

// gotIntent notes what a FROZEN word names if that is an intent. A record that cannot be read might be one, and its
// transaction's status word would serve another while it stands.
func (o *Op) gotIntent(it *item, b []byte) error {
	r, err := o.parseOf(it, b)
	if err != nil || r.Flags&layout.FlagIntent == 0 {
		return err // a mover's
	}
	return o.noteIntent(it, &r)
}

func intents(list []*item) (out []*item) {
	for _, it := range list {
		if it.in != nil {
			out = append(out, it)
		}
	}
	return out
}

// settleIntents takes the intents of list away, as their transactions were decided; what is undecided is waited for,
// then aborted. It does so under the group's lock, too, which it gives up before it waits.
func (o *Op) settleIntents(list []*item, then func() index.Action) index.Action {
	return o.findVerdicts(list, func() index.Action {
		var before []*item
		for _, it := range list {
			if it.verdict == layout.Abort && it.comesTo() == 0 && it.in.Parent.State() == layout.Live {
				// The same word again would be what a CAS that is late expects. A copy of a manifest names the same
				// chunks.
				it.before = &item{wordRef: it.wordRef, x: it.in.Parent, under: it.x, key: it.key}
				if !o.takePlaces(o.Route.PG, it.before) {
					return o.noMemory()
				}
				before = append(before, it.before)
			}
		}
		return o.copyItems(before, func() index.Action {
			return o.readGone(list, func() index.Action { return o.swingIntents(list, then) })
		})
	})
}

// comesTo is the record's word that an intent already names and that takes its place, 0 if none does. A guard leads to
// a copy of the record before, which is as good after an ABORT.
func (it *item) comesTo() layout.Word {
	if it.verdict == layout.Commit || it.verdict == layout.Abort && it.in.Kind == layout.IntentGuard {
		return it.in.Final
	}
	return 0
}

// readGone reads the manifests that go with the intents, for their chunks: those of the record that does not stay. A
// guard's two records share theirs.
func (o *Op) readGone(list []*item, then func() index.Action) index.Action {
	var manifests []*item
	of := map[*item]*item{}
	for _, it := range list {
		x, long := it.in.Final, layout.LongFinal
		if it.verdict == layout.Commit {
			x, long = it.in.Parent, layout.LongParent
		}
		if it.gone = nil; it.verdict != layout.Undecided && it.in.Kind != layout.IntentGuard && it.in.Long&long != 0 {
			m := &item{wordRef: it.wordRef, x: x, under: it.x}
			manifests, of[m] = append(manifests, m), it
		}
	}
	return o.fetch(manifests, 0, func(m *item, b []byte) error {
		r, err := o.parseOf(m, b)
		if err == nil {
			var parts layout.Manifest
			parts, err = o.partsOf(m, &r)
			of[m].gone = parts.Chunks
		}
		return o.skip(m, err, true)
	}, then)
}

// findVerdicts asks what became of the intents' transactions, one after the other.
func (o *Op) findVerdicts(list []*item, then func() index.Action) index.Action {
	if len(list) == 0 {
		return then()
	}
	it := list[0]
	o.work.then = func() index.Action {
		it.verdict = o.Verdict()
		return o.findVerdicts(list[1:], then)
	}
	return o.FindVerdict(it.x, *it.in)
}

// swingIntents swings each intent to what it has come to, and hands over the places that go with it. When then goes on
// no replica shows any of them.
func (o *Op) swingIntents(list []*item, then func() index.Action) index.Action {
	w := &o.work
	w.swings = w.swings[:0]
	var late []wordRef
	for _, it := range list {
		if it.verdict == layout.Undecided {
			late = append(late, it.wordRef)
			continue
		}
		s := swing{wordRef: it.wordRef, x: it.x, n: o.deleted(it.x), it: it}
		if x := it.comesTo(); x != 0 {
			s.n = x
		} else if it.before != nil {
			s.n, s.fresh = it.before.n, it.before.fresh
		}
		for _, x := range []layout.Word{it.x.WithState(layout.Live), it.in.Parent, it.in.Final} {
			if x.State() == layout.Live && x != s.n {
				s.old = append(s.old, o.addPlace(o.Route.PG, x, placeDone))
			}
		}
		for _, c := range it.gone {
			s.old = append(s.old, o.addPlace(o.Route.PG, chunkWord(c), placeDone))
		}
		w.swings = append(w.swings, s)
	}
	return o.swingA(func() index.Action {
		return o.publishSwings(func() index.Action {
			o.unlinkFreed()
			for i := range w.swings {
				s := &w.swings[i]
				if s.won {
					o.Work.Settled++
					continue
				}
				late = append(late, s.wordRef) // others have settled it, and the tail may not show that
				if s.it.before != nil {
					o.givePlaces(s.it.before)
				}
			}
			return o.syncWords(late, then)
		})
	})
}
