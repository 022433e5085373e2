package repair

import (
	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/layout"
)

// swing is one word to be taken from x to n, at A and then down the chain.
//
// It is what a key operation does in cas-slot and publish, for up to MaxCAS words in a round. A word that somebody else
// changes meanwhile is not won, and its swing is over: it names a state that is not there any more.
type swing struct {
	wordRef
	x, n  layout.Word
	found layout.Word // at A
	won   bool        // A holds n
	exact bool        // every stage so far took exactly x→n
	fresh []int       // places that n links
	old   []int       // places that x gives free
	it    *item
}

// swingA takes every word of w.swings from x to n at A. Afterwards each says whether it was taken (won) and what A
// held instead (found). Of its places, those that a CAS under way links or unlinks are in doubt until it is known.
func (o *Op) swingA(then func() index.Action) index.Action { return o.swingStage(0, 0, then) }

// swingStage does so at replica k, for those that may go on blindly there: a CAS x→n is right at R[k] only if every
// replica before took exactly that, else R[k] would get n out of order (I2).
func (o *Op) swingStage(k uint8, from int, then func() index.Action) index.Action {
	w := &o.work
	o.NewRound()
	next := from
	for ; next < len(w.swings) && len(o.Accesses) < index.MaxCAS; next++ {
		s := &w.swings[next]
		if k > 0 && !s.exact {
			continue
		}
		o.Add(index.Access{Verb: index.CAS, Space: index.Index, Replica: k, Off: s.off(), Expect: uint64(s.x),
			New: uint64(s.n)})
		if k == 0 {
			w.turn(s.fresh, placePosted)
			w.turn(s.old, placePosted)
		}
	}
	if len(o.Accesses) == 0 {
		return then()
	}
	step := index.StepCASWords
	if k > 0 {
		step = index.StepPublishWords
	}
	return o.await(step, func() index.Action {
		i := 0
		for j := from; j < next; j++ {
			s := &w.swings[j]
			if k > 0 && !s.exact {
				continue
			}
			f := layout.Word(o.Accesses[i].Found)
			i++
			s.exact = f == s.x
			if k > 0 {
				continue
			}
			s.found, s.won = f, s.exact
			if s.won {
				w.turn(s.fresh, placeDone)
				w.turn(s.old, placeFreed)
			} else {
				w.turn(s.fresh, placeOwn)
				w.turn(s.old, placeDone)
			}
		}
		return o.swingStage(k, next, then)
	})
}

// publishSwings carries what A took down the chain, blindly as far as each stage
// took exactly x→n, by sync from the first other finding on. Then the tail shows every word that was won, or a later
// one: readers have been told.
func (o *Op) publishSwings(then func() index.Action) index.Action { return o.publishFrom(1, then) }

func (o *Op) publishFrom(k uint8, then func() index.Action) index.Action {
	if k < o.Route.PG.Replicas {
		return o.swingStage(k, 0, func() index.Action { return o.publishFrom(k+1, then) })
	}
	var rest []wordRef
	for _, s := range o.work.swings {
		if s.won && !s.exact {
			rest = append(rest, s.wordRef)
		}
	}
	return o.syncWords(rest, then)
}

// syncWords syncs each word of list, one after the other: it is for the few that were left between A and P by somebody
// who died, and for what a blind CAS did not take. Its rounds are those of index's sync, under their own names.
func (o *Op) syncWords(list []wordRef, then func() index.Action) index.Action {
	if o.Route.PG.Replicas == 1 || len(list) == 0 {
		return then()
	}
	o.work.then = func() index.Action { return o.syncWords(list[1:], then) }
	return o.Sync(list[0].base, list[0].slot)
}

// setHeaders changes the header of the group at base by f, from A on down the chain,
// each from the replica's own value. guess is what the first may hold. Headers are not swung like slots: flags come one
// by one, so replicas may differ, and what f does not ask for stays as a replica has it.
func (o *Op) setHeaders(base uint64, k uint8, guess layout.Header, f func(layout.Header) layout.Header,
	then func() index.Action) index.Action {
	if k >= o.Route.PG.Replicas {
		return then()
	}
	o.NewRound()
	// If nothing is to change the CAS only tells.
	o.Add(index.Access{Verb: index.CAS, Space: index.Index, Replica: k, Off: base, Expect: uint64(guess),
		New: uint64(f(guess))})
	return o.await(index.StepSetHeaders, func() index.Action {
		found := layout.Header(o.Accesses[0].Found)
		if found == guess || f(found) == found {
			return o.setHeaders(base, k+1, guess, f, then)
		}
		if o.work.looks++; o.work.looks > maxLooks {
			return o.Restart(index.Backoff)
		}
		return o.setHeaders(base, k, found, f, then)
	})
}
