package index

import (
	"github.com/kvd-project/kvd/internal/invariants"
	"github.com/kvd-project/kvd/internal/layout"
)

// checkRequest asserts what an Op relies on when it starts.
func (o *Op) checkRequest() {
	a := func(ok bool, what string) { invariants.Assert(ok, "%v starts %s", o.Kind, what) }
	a(o.step == 0, "twice")
	a(o.Kind != 0 && o.Kind < NumKinds, "and there is no such kind")
	a(o.lock == 0 && !o.locked, "with a lock")
	goesOn := o.after == stepPublish // see GoOn
	a(o.havePlace == goesOn && !o.long(), "with places")
	a(!o.deciding && o.won == goesOn && o.Err == nil, "decided")
	a(len(o.Accesses) == 0, "with accesses under way")
	a(o.Kind != Scan || o.Scan != nil, "without a page")
	a(o.Kind != Raw || o.Raw != nil && o.Raw.Len > 0, "and reads nothing")
	a(o.Part == nil || o.Kind == Get && o.Part.Draft == nil || o.draft() != nil, "with a part of what it does not read")
	a(o.draft() == nil || o.Part.Link == (len(o.Value) == 0), "with a part of nothing, or with more than its parts")
	a((o.Kind.isWork() || o.Kind == Transact) == (o.Machine != nil), "without a machine, or with one that is not its")
	a(o.Kind != Modify || o.Modify != nil, "without a function")
	a(o.Kind.isTxn() == (o.Txn != nil), "without a transaction, or with one that is not its")
	a(!o.Kind.isTiered() || o.Tiered != nil || o.Kind == Promote, "with nothing to do")
	a(o.far == nil || o.parent == nil && len(o.chunks) == 0 && o.parts == nil, "with what is left of another one")
}

// checkAction asserts what the caller of Next relies on.
func (o *Op) checkAction(act Action) {
	a := func(ok bool, what string) {
		invariants.Assert(ok, "%v in %v, action %d: %s", o.Kind, o.step, act, what)
	}
	pg := o.Route.PG
	for i := range o.Accesses {
		x := &o.Accesses[i]
		if act != Post && !x.NoWait {
			continue // of the round before
		}
		a(pg != nil && (x.Replica < pg.Replicas || o.Kind == Raw), "an access to no replica")
		a(!x.Failed && !x.Refused, "an access that failed before it was posted")
		a(x.Off%8 == 0 || o.Kind == Raw, "an access across words")
		a(x.Space == Index || x.Space == Heap, "an access to no space")
		switch x.Verb {
		case CAS:
			a(x.Space == Index, "a CAS outside the index")
			a(x.Expect != x.New || o.Kind.isWork() || o.Kind == Transact, "a CAS that changes nothing")
			a(!o.env.ReadOnly() || o.Kind.isWork(), "a CAS of a reader")
		case Write:
			a(x.Space == Heap, "a WRITE into the index")
			a(len(x.Buf) > 0 && !x.NoWait, "a WRITE of nothing, or off the path")
			a(x.Off >= uint64(pg.HeapLo)*layout.UnitSize && x.Off+uint64(o.LenOf(x)) <= uint64(
				pg.HeapHi)*layout.UnitSize, "a WRITE outside the heap")
			a(!o.env.ReadOnly(), "a WRITE of a reader")
		default:
			a(x.Verb == Read && len(x.Buf) > 0 && !x.NoWait, "no READ, or one of nothing")
		}
	}
	if o.step == stepCASSlot && act == Post {
		a(o.deciding && !o.won, "posts its decision and does not know")
		a(o.x != o.n, "decides on what is there")
		a(o.Kind.isTxn() || o.deletes() == (o.n.State() == layout.Empty), "decides on a word of the wrong state")
		a(o.Kind != Prepare || o.intent.have && o.n.State() == layout.Frozen, "places no intent")
		a(o.Kind != Decide || o.n.State() == layout.Empty && o.x.State() == layout.Empty, "decides on no status word")
		a(o.Kind.isTxn() || o.deletes() || o.havePlace && o.prepared && o.n.FP() == layout.FP(o.Hash),
			"decides on a record that is not its own")
		a(o.n.State() == layout.Empty || layout.InHeap(o.n, pg.HeapLo, pg.HeapHi),
			"decides on a place outside the heap")
	}
	if o.step == stepPublish && act == Post && o.havePlace {
		x := &o.Accesses[0]
		a(o.written > o.pubK || o.written == o.pubK && x.Verb == Write && x.Replica == o.pubK && x.Off == o.n.Off(),
			"publishes before its record is there")
	}
	a(!o.locked || o.lock != 0, "holds a lock that has no word")
	a(!(o.deciding && o.won), "decided twice")
	switch act {
	case Post:
		a(len(o.Accesses) > 0, "nothing to post")
		a(o.step > stepStart && o.step < stepDone, "posts in no step")
		a(pg.Replicas > 0 && int(pg.Replicas) <= MaxChain, "posts to no chain")
		a(!pg.Joining || pg.Replicas > 1, "a joiner alone")
	case Done:
		a(o.step == stepDone, "done and not at the end")
		a(!o.havePlace && !o.long(), "done and keeps places")
		a(!o.hasTxnPlace(), "done and keeps an intent's places")
		a(o.lock == 0, "done and keeps the lock")
		a(!o.won, "done and not published")
		a(o.far == nil || o.parent == nil, "done and at a child")
	case Alloc, Grow, Backoff, Fetch, Store:
		a(o.Kind.isWork() || o.lock == 0, "waits with the lock")
		a(!o.deciding, "waits undecided")
	case Refresh: // also if the group is frozen, and the holder of its lock waits with it
		a(o.step == stepStart, "waits for a map in the middle")
	case AskFenced:
		a(o.LockOwner != 0 && !o.locked, "asks who holds its own lock")
	case Reconnect:
		a(o.step == stepStart, "reconnects in the middle")
	}
}
