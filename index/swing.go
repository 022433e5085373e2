package index

import (
	"github.com/kvd-project/kvd/internal/layout"
)

// swing is one word to be taken from x to n, at A and then down the chain.
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

// swingA takes every word of w.swings from x to n at A.
func (o *Op) swingA(then func() Action) Action { return o.swingStage(0, 0, then) }

// swingStage does so at replica k, for those that may go on blindly there.
func (o *Op) swingStage(k uint8, from int, then func() Action) Action {
	w := o.work
	o.begin()
	next := from
	for ; next < len(w.swings) && len(o.Accesses) < MaxCAS; next++ {
		s := &w.swings[next]
		if k > 0 && !s.exact {
			continue
		}
		o.add(Access{Verb: CAS, Space: Index, Replica: k, Off: s.off(), Expect: uint64(s.x), New: uint64(s.n)})
		if k == 0 {
			w.turn(s.fresh, placePosted)
			w.turn(s.old, placePosted)
		}
	}
	if len(o.Accesses) == 0 {
		return then()
	}
	return o.await(func() Action {
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
// took exactly x→n, by sync from the first other finding on.
func (o *Op) publishSwings(then func() Action) Action { return o.publishFrom(1, then) }

func (o *Op) publishFrom(k uint8, then func() Action) Action {
	if k < o.Route.PG.Replicas {
		return o.swingStage(k, 0, func() Action { return o.publishFrom(k+1, then) })
	}
	var rest []wordRef
	for _, s := range o.work.swings {
		if s.won && !s.exact {
			rest = append(rest, s.wordRef)
		}
	}
	return o.syncWords(rest, then)
}

// syncWords syncs each word of list.
func (o *Op) syncWords(list []wordRef, then func() Action) Action {
	w := o.work
	if o.Route.PG.Replicas == 1 || len(list) == 0 {
		o.syncBase = 0
		return then()
	}
	w.then = func() Action { return o.syncWords(list[1:], then) }
	o.retries = 0
	o.syncBase = list[0].base
	return o.sync(list[0].slot, 1, stepWork)
}

// setHeaders changes the header of the group at base by f, from A on down the chain,
// each from the replica's own value. guess is what the first may hold.
func (o *Op) setHeaders(base uint64, k uint8, guess layout.Header, f func(layout.Header) layout.Header, then func() Action) Action {
	if k >= o.Route.PG.Replicas {
		return then()
	}
	o.begin()
	// If nothing is to change the CAS only tells.
	o.add(Access{Verb: CAS, Space: Index, Replica: k, Off: base, Expect: uint64(guess), New: uint64(f(guess))})
	return o.await(func() Action {
		found := layout.Header(o.Accesses[0].Found)
		if found == guess || f(found) == found {
			return o.setHeaders(base, k+1, guess, f, then)
		}
		if o.work.looks++; o.work.looks > maxLooks {
			return o.releaseLock(Backoff)
		}
		return o.setHeaders(base, k, found, f, then)
	})
}
