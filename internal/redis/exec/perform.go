package exec

import (
	"errors"
	"math/rand/v2"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/redis/values"
)

// maxTries is how often a Plan performs its Commands, while others change what it has read.
// Each try that fails means that somebody else's write has succeeded, so the store as a whole makes progress.
const maxTries = 256

// ErrAgain: maxTries tries have each met a write of somebody else. Nothing was done.
var ErrAgain = errors.New("keys change too often; nothing was done")

// Way is how a Plan performs Commands that are on one key, which is known before.
type Way uint8

const (
	// Look reads what is asked for, and writes it if it is still the same then. It does for any Commands.
	Look Way = iota
	// Modify has the commands run while the store changes the key, which spares a round trip. They may need no other
	// key, and no memory.
	Modify
	// Overwrite is for commands that write the key without a look at it. None of their replies depends on what it was.
	Overwrite
	// Ask is Look for commands that only ask whether the key is there, and until when: its value is not read. They may
	// delete the key, or make it another one, by that.
	Ask
)

// Commands are what a Plan performs in one step. They may run several times, and must have no other effects.
type Commands interface {
	// Begin forgets what the try before has done. The Plan is empty.
	Begin()
	// Run has the commands work on the Plan. It takes memory for long replies as they are made, and stops when Failed.
	Run()
}

// Perform performs commands until they have taken effect in one step, which begins at that time in that database.
// keys are those that they are known to use. But for Look they are one.
// Err is the error, unless that is of the commit. An error but client.ErrUnknownOutcome says that nothing was done.
func (p *Plan) Perform(at time.Time, db int, keys []KeyName, way Way, does Commands) error {
	p.way, p.does = way, does
	defer func() { p.does = nil }()
	for tries := range maxTries {
		// The pause grows with the tries, up to 64 ms, and is random: those who met once would meet again in step
		// otherwise. The first retry is most often enough.
		if tries > 1 && !p.host.Rest(rand.N(time.Millisecond<<min(tries/8, 6))) {
			return client.ErrClosed
		}
		if tries > 0 {
			at = time.Now()
		}
		p.Begin(at.UnixMilli(), db)
		does.Begin()
		again, err := p.try(keys)
		if !again {
			return err
		}
	}
	return ErrAgain
}

// try is one try of Perform. A try that was given up for want of room is followed by one that begins with memory for
// it, as often as a value that is written takes it.
func (p *Plan) try(keys []KeyName) (again bool, err error) {
	if p.Room > p.limits.OneLimit && !p.Take(p.limits.WriteCost*int64(p.Room)) {
		return false, p.Err
	}
	switch p.way {
	case Modify:
		return p.modify(keys[0])
	case Overwrite:
		return p.overwrite(keys[0])
	}
	if p.LoadNamed(keys); p.Err != nil {
		return false, p.Err
	}
	if p.does.Run(); p.Err != nil {
		return false, p.Err
	}
	if p.wantsRoom() {
		return true, nil
	}
	if p.way == Ask && !p.takesPut(p.Keys[0]) {
		return false, p.Err
	}
	err = p.Commit()
	return errors.Is(err, ErrChanged), err
}

// wantsRoom reports whether a command had no room, and makes it for the next try.
func (p *Plan) wantsRoom() bool {
	want := p.Wanted()
	if want > 0 {
		p.Room = max(want, 2*p.Room)
	}
	return want > 0
}

// overwrite is a try of Overwrite. A key that is to be deleted is looked at after all.
func (p *Plan) overwrite(name KeyName) (again bool, err error) {
	k := p.named(name)
	if k.Unread, k.Used = true, true; p.Err != nil {
		return false, p.Err
	}
	if p.does.Run(); p.Err != nil {
		return false, p.Err
	}
	switch {
	case p.wantsRoom():
		return true, nil
	case k.Changed && !k.Present:
		p.way = Modify
		return true, nil
	case !p.takesPut(k):
		return false, p.Err
	}
	err = p.Commit()
	return errors.Is(err, ErrChanged), err
}

// takesPut takes memory for a long value that is written to a key whose value was not read.
func (p *Plan) takesPut(k *Key) bool {
	return len(k.Value) <= p.limits.EachLimit || p.Take(p.limits.PutCost*int64(len(k.Value)))
}

// errUnchanged ends a change of the store's that changes nothing.
var errUnchanged = errors.New("unchanged")

// modify is a try of Modify. The store has the commands run again by itself if somebody else was faster. Nothing can
// wait for memory meanwhile: a try that needs some for what it writes is followed by one that has it, and a try that
// needs some for replies by one of Look.
func (p *Plan) modify(name KeyName) (again bool, err error) {
	k := p.named(name)
	if p.Err != nil {
		return false, p.Err
	}
	if p.update == nil {
		p.update = p.runWithin
	}
	p.Lone, p.looks, p.fresh, p.began = true, 0, *k, p.DB
	defer func() { p.Lone = false }()
	read := p.host.Begins(p.Keys)
	p.ops = append(p.ops[:0], client.Op{Kind: client.OpUpdate, Key: k.Stored, Typed: true, Update: p.update})
	err = p.write(p.host.API(k.DB), p.ops, p.limits.OneLimit)
	if p.looks > 0 {
		read(nil)
	} else {
		read(err)
	}
	if k.Was.Present {
		p.host.Sees(k.KeyName)
	}
	switch {
	case err == nil:
		k.Version = p.ops[0].Item.Version
		return false, nil
	case errors.Is(err, errUnchanged):
		return false, nil
	case errors.Is(err, ErrAlone):
		p.way = Look
		return true, nil
	case errors.Is(err, values.ErrRoom) && p.wantsRoom():
		return true, nil
	}
	return false, err
}

// runWithin runs the commands on what the store has, and says what is to be written.
func (p *Plan) runWithin(cur client.Item, present bool) (ch client.Change, err error) {
	k := p.Keys[0]
	if p.looks++; p.looks > 1 {
		p.Err, p.Changes, p.DB, *k = nil, p.Changes[:0], p.began, p.fresh
		p.does.Begin()
	}
	k.Used = true
	k.take(cur, present)
	switch p.does.Run(); {
	case p.Err != nil:
		return ch, p.Err
	case k.Changed && len(k.Value) > max(p.Room, len(cur.Value)):
		k.Want = max(k.Want, len(k.Value))
		return ch, values.ErrRoom
	case k.Want > 0:
		return ch, values.ErrRoom
	case !k.Writes():
		return ch, errUnchanged
	}
	return client.Change{Delete: !k.Present, Value: k.Value, Expires: TimeOf(k.Expires), Flags: k.Flags, Type: k.Type},
		nil
}
