package index

import (
	"github.com/kvd-project/kvd/internal/layout"
)

// Machine is an operation of a janitor's kinds: package index/repair has them. An Op drives it as it drives its own
// steps, finds its memory, and starts it over after a fault or in another view. Its calls happen inside Next, on the
// Op's goroutine, and do not block.
type Machine interface {
	// Where finds the placement group that it works on; ok is false while the map m has none.
	Where(m Router) (r Route, ok bool)
	// OnFrozen reports whether it works on a placement group that is frozen, as it should be.
	OnFrozen() bool
	// Begin posts the first round under b.Route. If it has begun before, it begins afresh: nothing is under way, and
	// what was done it finds done.
	Begin(b *Base) Action
	// Next consumes the round under way, or goes on after Base.Sync.
	Next() Action
	// Unsynced tells it that a word cannot be brought up: it goes on without that, or ends with err.
	Unsynced(err error) (goesOn bool)
	// Wanted is what Alloc asked for: a place of size code in placement group pg.
	Wanted() (pg uint32, code uint8)
	// Release gives back its places. Unless it is idle verbs may still land in them, and they are left to recall.
	Release(idle bool)
}

// Base is an Op as its Machine sees it: the round that it posts, and the ways out of it. Fields of the Op that others
// may read are those of the Base.
type Base Op

func (b *Base) op() *Op { return (*Op)(b) }

// Env is the Op's, the same from Start on.
func (b *Base) Env() Env { return b.env }

// Buf returns n bytes of registered memory that stay with the Op until it is recycled.
func (b *Base) Buf(n int) []byte { return b.env.Buf(b.op(), n) }

// Note is Env.Note for the slot at off.
func (b *Base) Note(off uint64, w layout.Word, old layout.AccessWord, expiry, until uint64) {
	b.env.Note(b.op(), off, w, old, expiry, until, false)
}

// NewRound begins a round; Add adds to it, and Post posts it as step. The accesses of the round before, and their
// results, are void then.
func (b *Base) NewRound() { b.op().begin() }

// Add adds an access to the round.
func (b *Base) Add(a Access) { b.op().add(a) }

// Post posts the round as step; Machine.Next consumes it.
func (b *Base) Post(step Step) Action { return b.op().post(step) }

// AddLock adds the CAS that takes the insert lock of the group at an offset in the region. The CAS is the first
// access of a round at the head. Afterwards Locked says whether the lock is held: if not, ask is what to ask of the
// caller, 0 if it is free by now. The Op gives it up when it ends or starts over.
func (b *Base) AddLock(group uint64) { b.op().addLock(group) }

// Locked is about the round that AddLock began.
func (b *Base) Locked() (held bool, ask Action) {
	o := b.op()
	switch {
	case o.lockTaken(layout.Lock(o.Accesses[0].Found)):
		return true, 0
	case o.lockExpect == 0:
		return false, 0
	}
	return false, o.askFenced()
}

// Bytes is how much the Op's READs and WRITEs take, of all rounds since it began.
func (b *Base) Bytes() uint64 { return b.op().need().bytes }

func (o *Op) countBytes() {
	f := o.need()
	for i := range o.Accesses {
		if a := &o.Accesses[i]; a.Verb != CAS {
			f.bytes += uint64(len(a.Buf))
		}
	}
}

// Sync brings a slot of the group at an offset in the region, or its header (HeaderSlot), up to its predecessor on
// every replica. Then Machine.Next goes on.
func (b *Base) Sync(group uint64, slot uint8) Action {
	o := b.op()
	o.retries, o.need().syncBase = 0, group
	return o.sync(slot, 1, StepPublishWords)
}

// FindVerdict finds what became of the transaction of an intent, which the head names by w. It acts like a writer
// that meets the intent. While nothing is decided it starts over after a while, by Op.Patience, and then aborts.
// When every replica of the status word shows the verdict Machine.Next goes on, and Verdict tells it.
func (b *Base) FindVerdict(w layout.Word, in layout.Intent) Action {
	m := &b.op().need().met
	m.word, m.in, m.atA = w, in, true
	return b.op().readStatus()
}

// Verdict is what FindVerdict found. Undecided: the status word has gone on, so the intent is gone.
func (b *Base) Verdict() layout.Verdict { return b.met.verdict }

// ToChild goes on at the child of Route, ToParent comes back. The lock stays where it is.
func (b *Base) ToChild() {
	if o := b.op(); o.need().parent == nil {
		p := o.Route
		o.parent = &p
		o.Route = *p.Child
		o.Route.MapVersion = p.MapVersion
	}
}

// ToParent is the way back from ToChild, if it was taken.
func (b *Base) ToParent() { b.op().toParent() }

// Parent is the Op's own route while it is at the child, else nil.
func (b *Base) Parent() *Route { return b.parent }

// Restart gives up the lock and starts over after a.
func (b *Base) Restart(a Action) Action {
	b.ToParent()
	return b.op().unlockAnd(a)
}

// Finish ends the Op with err, nil if it has done what was asked.
func (b *Base) Finish(err error) Action { return b.op().finish(err) }

func (o *Op) toParent() {
	if o.far != nil && o.parent != nil {
		o.Route, o.parent, o.fixed = *o.parent, nil, 0
	}
}

// beginMachine begins a Machine afresh under o.Route. Nothing is under way.
func (o *Op) beginMachine() Action {
	o.need()
	return o.Machine.Begin((*Base)(o))
}

// endMachine ends a Machine: its lock is where it was taken, its places go.
func (o *Op) endMachine() {
	if o.Machine != nil {
		o.toParent()
		o.Machine.Release(true)
	}
}
