package values

import (
	"errors"
	"strconv"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/redis/resp"
)

// Key is one key's state while the commands of a unit run on it, one after the
// other.
// It is filled in for each try. Commands change it by methods, and never the store; nothing of
// it is shared between goroutines.
type Key struct {
	Now      int64 // Unix ms, the same for all of them
	MaxValue int   // bytes, Options.MaxValueBytes
	Limits   *EncodingLimits

	Present bool        // if not, the four below are zero
	Value   []byte      // not to be written to, unless mutable made it
	Expires int64       // Unix ms; 0: never
	Flags   uint32      // memcached's; SET and its like make them 0
	Type    client.Type // of value; Plain if it is not present
	Changed bool        // by a command; there is something to write
	// A command with a part has that part of a long value alone: Value begins at From of Whole bytes. Else Whole is 0.
	From, Whole int

	Own   []byte // what mutable uses; kept from unit to unit
	Count int64  // what a command that sums over its keys adds
	Also  string // the event of a stream that a command's change of it has beside its own, if any
	// Room is how long a value mutable may make; Want is how long the one is that it did not.
	Room, Want int
}

// ErrRoom says that the command needs memory that has to be taken first; nothing was done.
var ErrRoom = errors.New("no room")

// Unread stands for whatever type a value has that was not read, since the command takes plain ones only.
const Unread client.Type = 255

// typed is nil if a command on values of a type can go on: there is no value, or one of the type. Redis looks at the
// type most often behind the arguments, and before anything depends on the value.
func (k *Key) typed(t client.Type) error {
	if k.Present && k.Type != t {
		return errWrongType
	}
	return nil
}

// hasOrZero reports whether there is a value of a type. If there is none it replied 0. Redis has such commands look
// whether there is a key before they look at its type.
func (k *Key) hasOrZero(t client.Type, w *resp.Writer) (has bool, err error) {
	if !k.Present {
		w.Int(0)
		return false, nil
	}
	err = k.typed(t)
	return err == nil, err
}

// SetAs is set for a value of a type.
func (k *Key) SetAs(t client.Type, value []byte, expires int64) {
	k.Type = t
	k.set(value, expires)
}

// set makes value the key's, of the type that the key has. It may be the command's argument or k.own: nobody writes to
// it before the unit has ended. A time that has passed deletes, as in Redis.
func (k *Key) set(value []byte, expires int64) {
	k.Value, k.Expires, k.Present, k.Changed = value, expires, true, true
	if expires != 0 && expires <= k.Now {
		k.Delete()
	}
}

// Delete leaves the state of a key that does not exist, for the unit's further commands.
func (k *Key) Delete() {
	k.Present, k.Value, k.Expires, k.Flags, k.Type, k.Changed = false, nil, 0, 0, client.Plain, true
}

// mutable is the value in a buffer that may be written to, with room for n bytes. The error is errRoom, and the command
// is to be given up, if that needs memory that has to be taken first. n is the length that the value is going to have
// at most, in bytes. The copy is what makes a command safe to run again.
func (k *Key) mutable(n int) (b []byte, err error) {
	if n > k.Room {
		k.Want = n
		return nil, ErrRoom
	}
	if cap(k.Own) < n {
		b := make([]byte, len(k.Value), max(n, 2*cap(k.Own)))
		copy(b, k.Value)
		k.Own = b
		return b, nil
	}
	k.Own = append(k.Own[:0], k.Value...)
	return k.Own, nil
}

// setInt stores n and keeps expiry and flags.
// The digits are in own, which is as good as any argument until the unit ends.
func (k *Key) setInt(n int64) {
	k.Own = strconv.AppendInt(k.Own[:0], n, 10)
	k.set(k.Own, k.Expires)
}

// LeavesCollection reports whether a key has been changed to something that somebody may wait for.
// Plain values are nothing to wait for: no blocking command takes one.
func (k *Key) LeavesCollection() bool { return k.Changed && k.Present && k.Type != client.Plain }
