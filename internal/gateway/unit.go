package gateway

import (
	"strconv"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/inside"
)

// load sets the key's state.
// load is what commands see first. A time of expiry that has passed is not theirs to check: the
// store does not show such records.
func (u *unit) load(it client.Item, present bool) {
	k := &u.k
	k.present, k.value, k.flags, k.typ, k.changed, k.expires = present, it.Value, it.Flags, it.Type, false, 0
	if !it.Expires.IsZero() {
		k.expires = it.Expires.UnixMilli()
	}
}

// change is the unit as a client.UpdateFunc.
// Each call begins anew, since the store calls again when somebody else was faster: replies of
// the last call count. A command that needs memory first says so in the key (want), or by a
// reply that is longer than outRoom; then nothing is written, and performLarge takes the memory.
func (u *unit) change(cur client.Item, present bool) (client.Change, error) {
	if u.watched && cur.Version != u.version {
		return client.Change{}, errWatched
	}
	u.load(cur, present)
	k := &u.k
	k.want = 0
	u.out.Reset(keepInto)
	u.out.Proto = u.b.w.Proto
	for i := u.first; i >= 0; {
		e := &u.b.entries[i]
		k.count, k.also = 0, ""
		e.lo = u.out.Len()
		changed, was := k.changed, k.present
		k.changed = false
		e.cmd.key(k, e.args, &u.out)
		e.change = change{missed: !was, changed: k.changed && (was || k.present), created: !was && k.present, deleted: !k.present, expires: k.expires, also: k.also}
		k.changed = k.changed || changed
		if k.want > 0 || u.out.Len() > u.outRoom {
			return client.Change{}, errRoom
		}
		e.hi, e.count = u.out.Len(), k.count
		i = e.next
	}
	switch {
	case !k.changed, !k.present && !present:
		return client.Change{}, errUnchanged
	case !k.present:
		return client.Change{Delete: true}, nil
	}
	return client.Change{Value: k.value, Expires: timeOf(k.expires), Flags: k.flags, Type: k.typ}, nil
}

// timeOf is an expiry as the client library has it; its zero value is never.
func timeOf(ms int64) time.Time {
	if ms == 0 {
		return time.Time{}
	}
	return time.UnixMilli(ms)
}

// badKey is the error for a name that no record can have; the store would refuse it, too, but
// for the whole batch.
func badKey[S string | []byte](name S) string {
	if len(name) > client.MaxKeyLen {
		return "ERR kvd: key of " + strconv.Itoa(len(name)) + " bytes: keys have up to " + strconv.Itoa(client.MaxKeyLen)
	}
	if isReserved(name) {
		return "ERR kvd: this key is reserved for libraries of functions"
	}
	if string(name) == inside.EmptyKey {
		return "ERR kvd: this key is reserved for the empty key"
	}
	return ""
}

var emptyKey = []byte(inside.EmptyKey)

// storedName is a key's name in the store, where it has a byte at least.
func storedName(name []byte) []byte {
	if len(name) == 0 {
		return emptyKey
	}
	return name
}

// shownName is the name that clients know a stored one by.
func shownName(stored []byte) []byte {
	if string(stored) == inside.EmptyKey {
		return stored[:0]
	}
	return stored
}

// isReserved reports whether a name is of a key that gateways keep for themselves. Users neither see nor touch it.
func isReserved[S string | []byte](name S) bool { return string(name) == inside.FunctionsKey }
