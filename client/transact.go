package client

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/layout"
)

// together is a whole attempt as one operation: see index.Transaction. The rest goes on by the operations of one key
// each.
type together struct {
	call
	txn  index.Transaction
	legs [fewLegs]index.Leg
}

// together makes the attempt in one chain, or two, if its keys are such. over: that was all of it, and err its result.
// Otherwise nothing is decided, and the legs that are placed are noted.
func (t *txn) together(ctx context.Context) (over bool, err error) {
	if !t.isShort() {
		return false, nil
	}
	g := new(together)
	legs := g.legs[:0]
	if len(t.ops) > fewLegs {
		legs = make([]index.Leg, 0, len(t.ops))
	}
	for i := range t.ops {
		q := &t.legs[i].prepare
		legs = append(legs, index.Leg{Key: q.Key, Value: q.Value, Hash: q.Hash, Check: q.Check, IfVersion: q.IfVersion,
			Expiry: q.Expiry, Pinned: q.Pinned, Flags: q.Flags, Effect: q.Txn.Effect, Cond: q.Cond})
	}
	x := &g.txn
	x.Status, x.TS, x.Coord, x.Try = t.at, t.began, uint64(t.s.id), uint8(min(t.try, 255))
	x.Legs, x.Found = legs, t.x.word
	q := &g.call
	q.Kind, q.Check, q.Machine, q.Asker, q.item = index.Transact, t.legs[0].prepare.Check, x, q, &q.own
	q.ops[0] = &q.Op
	t.s.core.Do(ctx, q.ops[:])
	t.rounds += int(q.Rounds)
	switch err := q.Err; {
	case errors.Is(err, index.ErrApart):
		return false, nil
	case err == nil:
		t.x.word = x.Found
		t.took(x)
		return true, t.settleRest(ctx, x)
	case errors.Is(err, index.ErrMissed):
		t.took(x)
		return false, nil
	case errors.Is(err, index.ErrBroken):
		t.takeAll(x)
		return true, t.commit(ctx, layout.Abort)
	}
	return true, t.given(ctx, x, q.Err)
}

// given goes on behind x, which has ended with another error than its own: as at the end of its time.
func (t *txn) given(ctx context.Context, x *index.Transaction, err error) error {
	open := errors.Is(err, ErrUnknownOutcome)
	if !open {
		t.took(x) // no chain is under way
	}
	placed := false
	for i := range t.legs {
		g := &t.legs[i]
		if placed = placed || g.placed; g.placed {
			continue
		}
		if g.prepare.Err = err; open { // a lane may be at it still
			t.doubt = append(t.doubt, i)
		}
	}
	if !placed && !open {
		t.s.status.put(t.x, false) // nobody knows of it: its number is used again
	} else {
		t.afterwards(ctx, layout.Undecided)
	}
	if open && !x.MayHaveHappened() {
		return fmt.Errorf("%w: MultiCAS: %w", ErrUnavailable, noEffect{err})
	}
	return t.undecided(err)
}

// isShort reports whether the attempt may be one chain: it writes all of its keys, and they have one copy each.
func (t *txn) isShort() bool {
	if len(t.ops) > index.MaxLegs {
		return false
	}
	v := t.s.core.View()
	for i := range t.ops {
		o, q := &t.ops[i], &t.legs[i].prepare
		sh := v.ShardOf(q.Hash)
		if o.Kind == OpKeep || o.Cond != Always && o.Cond != IfVersion || sh == nil || sh.PG.Replicas != 1 {
			return false
		}
	}
	return true
}

// took notes which intents x has placed.
func (t *txn) took(x *index.Transaction) {
	for i := range x.Legs {
		if l := &x.Legs[i]; l.IsPlaced {
			g := &t.legs[i]
			g.intent.Placed, g.placed, g.settled = l.Placed, true, l.Settled
		}
	}
}

// takeAll notes every intent that x may have placed. Each settles as if it were there: nothing comes any more.
func (t *txn) takeAll(x *index.Transaction) {
	for i := range x.Legs {
		t.legs[i].intent.Placed, t.legs[i].placed = x.Legs[i].Placed, true
	}
}

// settleRest goes on behind x, which is decided.
func (t *txn) settleRest(ctx context.Context, x *index.Transaction) error {
	if x.Verdict == layout.Commit {
		t.answer()
	}
	rest := false
	for i := range t.legs {
		rest = rest || !t.legs[i].settled
	}
	if rest {
		t.afterwards(ctx, x.Verdict)
	} else {
		t.done()
	}
	if x.Verdict != layout.Commit {
		return errTxnLost
	}
	return nil
}

// answer fills in what the ops of a transaction that has happened tell.
func (t *txn) answer() {
	for i := range t.ops {
		g := &t.legs[i]
		o := &t.ops[i]
		if x := g.prepare.own.Expires; o.Kind != OpKeep || x.IsZero() || x.After(time.Now()) {
			if o.Kind == OpKeep && o.Typed {
				o.Item = g.prepare.own
			}
			o.Item.Version = versionOf(&g.intent.Placed)
		}
	}
}

// undecided is the attempt's error if deciding it failed with err.
func (t *txn) undecided(err error) error {
	switch {
	case errors.Is(err, ErrUnknownOutcome), errors.Is(err, index.ErrStatusLost):
		return fmt.Errorf("MultiCAS: %w: %w", ErrUnknownOutcome, err)
	case retryable(err):
		return err
	}
	return fmt.Errorf("%w: MultiCAS: %w", ErrUnavailable, err)
}
