package gateway

import (
	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/redis/exec"
	"github.com/kvd-project/kvd/internal/redis/values"
)

// load sets the key's state.
// load is what commands see first. A time of expiry that has passed is not theirs to check: the
// store does not show such records.
func (u *unit) load(it client.Item, present bool) {
	k := &u.k
	k.Present, k.Value, k.Flags, k.Type, k.Changed, k.Expires = present, it.Value, it.Flags, it.Type, false, 0
	k.From, k.Whole = 0, 0
	if !it.Expires.IsZero() {
		k.Expires = it.Expires.UnixMilli()
	}
}

// change is the unit as a client.UpdateFunc.
// Each call begins anew, since the store calls again when somebody else was faster: replies of
// the last call count. A command that needs memory first says so in the key (want), or by a
// reply that is longer than outRoom; then nothing is written, and performLarge takes the memory.
// Its calls follow each other, within one client.Do. cur.Value is the store's and good until it returns. Arguments and
// k.own, to which the new value may refer, stay as they are until Do is over.
func (u *unit) change(cur client.Item, present bool) (client.Change, error) {
	u.load(cur, present)
	k := &u.k
	k.Want = 0
	u.out.Reset(keepInto)
	u.out.Proto = u.b.w.Proto
	for i := u.first; i >= 0; {
		e := &u.b.entries[i]
		k.Count, k.Also = 0, ""
		// Replies are told apart by their place, since an update may run again and then all of them move.
		e.lo = u.out.Len()
		changed, was := k.Changed, k.Present
		// changed is told for each entry by itself, for its event, and summed up for the unit below.
		k.Changed = false
		values.WriteRefusal(&u.out, e.cmd.key(k, e.args, &u.out))
		e.change = exec.Change{Missed: !was, Changed: k.Changed && (was || k.Present), Created: !was && k.Present,
			Deleted: !k.Present, Expires: k.Expires, Also: k.Also}
		k.Changed = k.Changed || changed
		if k.Want > 0 || u.out.Len() > u.outRoom {
			return client.Change{}, values.ErrRoom
		}
		e.hi, e.count = u.out.Len(), k.Count
		i = e.next
	}
	switch {
	// A key that came and went within the unit was never there for anybody else.
	case !k.Changed, !k.Present && !present:
		return client.Change{}, errUnchanged
	case !k.Present:
		return client.Change{Delete: true}, nil
	}
	return client.Change{Value: k.Value, Expires: exec.TimeOf(k.Expires), Flags: k.Flags, Type: k.Type}, nil
}
