package exec

import (
	"slices"

	"github.com/kvd-project/kvd/internal/redis/values"
)

// Event is what is told of a key. The zero value is none.
type Event struct {
	Class values.EventClass
	Name  string // as in Redis; the last part of the event's channel
}

// Change is what a command did to a key, for those who want to hear of it.
// It is filled in while the command runs, and told when the store has answered. That of a try that was repeated is
// forgotten.
type Change struct {
	Missed                    bool  // it was not there
	Changed, Created, Deleted bool  // it was written; it is new; it has gone
	Expires                   int64 // Unix ms; 0: never
	// A change of XADD that trims is two events, for one.
	Also string
}

// KeyChange is a command's change of a key of a Plan, and what it is called. An event of class values.OnMiss has none.
type KeyChange struct {
	Key *Key
	Event
	Change
}

// named is what a command calls its change of a key, if that has not the command's own event.
type named struct {
	k *values.Key
	Event
}

// Name says that the command at hand calls its change of a key so. Redis tells of changes in this order.
// A command of several keys needs it, as RENAME does: rename_from and rename_to. For one without names, every key that
// it changes has the command's own event.
func (p *Plan) Name(k *values.Key, class values.EventClass, event string) {
	p.namedKeys = append(p.namedKeys, named{k, Event{class, event}})
}

// Miss is of [values.Keys], for the event keymiss.
func (p *Plan) Miss(name []byte) {
	p.MissedKeys = append(p.MissedKeys, p.Find[KeyName{DB: p.DB, Name: string(name)}])
}

// Notes are what one command does to the keys of a Plan.
type Notes struct {
	p      *Plan
	before []state
}

// state is what a key was before the command.
type state struct{ changed, present bool }

// Forget forgets what the command before has named and missed.
func (p *Plan) Forget() { p.namedKeys, p.MissedKeys = p.namedKeys[:0], p.MissedKeys[:0] }

// Note begins to note what a command does to the keys, until End.
// Changed is cleared for the time of the command, so that each command's changes can be told from those before it.
func (p *Plan) Note() *Notes {
	n := &Notes{p: p, before: make([]state, len(p.Keys))}
	for i, k := range p.Keys {
		n.before[i] = state{k.Changed, k.Present}
		k.Changed = false
	}
	return n
}

// Had reports whether a key was there before the command.
func (n *Notes) Had(k *Key) bool { return n.of(slices.Index(n.p.Keys, k)).present }

// of is the state of a key before the command. A key that nobody had asked for was as it was read.
func (n *Notes) of(i int) *state {
	for at := len(n.before); at <= i; at++ {
		n.before = append(n.before, state{present: n.p.Keys[at].Version != 0})
	}
	return &n.before[i]
}

// End adds what the command did to the Plan's Changes. own is the event of all that the command has not named.
func (n *Notes) End(own Event) {
	p := n.p
	note := func(k *Key, e Event, created bool) {
		p.Changes = append(p.Changes, KeyChange{k, e, Change{Changed: true, Created: created, Deleted: !k.Present,
			Expires: k.Expires, Also: k.Also}})
	}
	for _, x := range p.namedKeys {
		i := slices.IndexFunc(p.Keys, func(k *Key) bool { return &k.Key == x.k })
		k, was := p.Keys[i], n.of(i)
		note(k, x.Event, !was.present && k.Present && x.Class != values.OnNew)
		was.present = k.Present // the next event of it is of no new key
	}
	for i, k := range p.Keys {
		was := *n.of(i)
		if k.Changed && (was.present || k.Present) && !k.Quiet &&
			!slices.ContainsFunc(p.namedKeys, func(x named) bool { return x.k == &k.Key }) {
			note(k, own, !was.present && k.Present)
		}
		k.Changed = k.Changed || was.changed
	}
}

// NoteMiss adds that a key was missed to the Plan's Changes.
func (p *Plan) NoteMiss(k *Key) {
	p.Changes = append(p.Changes, KeyChange{Key: k, Event: Event{values.OnMiss, "keymiss"}})
}

// Snapshot is what the keys of a Plan were at some time, and what it had noted until then.
type Snapshot struct {
	keys    []values.Key
	changes int
}

// Snapshot is what the keys are now. It is good until the next one.
// It copies no values: those are replaced and never written to, but in a key's Own, which is taken away from it here.
func (p *Plan) Snapshot() Snapshot {
	p.before = p.before[:0]
	for _, k := range p.Keys {
		p.before = append(p.before, k.Key)
		k.Own = nil // the snapshot's value may be in it
	}
	return Snapshot{p.before, len(p.Changes)}
}

// Undo makes the keys what they were at a snapshot; those that were read since are as they were read. Room that a
// command has wanted for a value stays wanted.
func (p *Plan) Undo(s Snapshot) {
	for i, k := range p.Keys {
		want := k.Want
		if i < len(s.keys) {
			k.Key = s.keys[i]
		} else {
			k.Key = k.Was
		}
		k.Want = max(want, k.Want)
	}
	p.Changes = p.Changes[:s.changes]
}
