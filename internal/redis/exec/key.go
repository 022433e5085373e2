package exec

import (
	"errors"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/redis/values"
)

// KeyName is a key's name as clients of a database have it, without the prefix that the store may have before it.
type KeyName struct {
	DB   int
	Name string
}

// Key is a key as the commands see it, and what it was.
type Key struct {
	values.Key
	KeyName
	Stored  []byte     // its name in the store
	Version uint64     // 0: it was not there
	Was     values.Key // as it was read
	Used    bool       // a function has seen it, or it is watched: it is a condition
	Quiet   bool       // nobody hears of it
	Unread  bool       // it was not read, and is written whatever it is
}

// TakeRead makes the key what was read, or returns the error.
// That there is no such key is no error: Version stays 0, which the commit's condition is made of.
func (k *Key) TakeRead(o *client.Op) error {
	if o.Err != nil && !errors.Is(o.Err, client.ErrNotFound) {
		return o.Err
	}
	k.take(o.Item, o.Err == nil)
	return nil
}

// take makes the key what it is in the store.
func (k *Key) take(it client.Item, present bool) {
	if present {
		k.Present, k.Value, k.Flags, k.Type, k.Version = true, it.Value, it.Flags, it.Type, it.Version
		if !it.Expires.IsZero() {
			k.Expires = it.Expires.UnixMilli()
		}
	}
	k.Was = k.Key
}

// Writes reports whether the key is to be changed in the store.
// A key that was absent and is absent again has nothing to be written.
func (k *Key) Writes() bool { return k.Changed && (k.Present || k.Version != 0) }

// Op is the operation that makes the key what it is now, on condition that it was until then what was read.
// Versions are never used twice, so the condition on one is a condition on all that the key was, its expiry and type
// among it.
func (k *Key) Op() client.Op {
	o := client.Op{Kind: client.OpKeep, Key: k.Stored, Cond: client.IfVersion, Version: k.Version}
	switch {
	case k.Unread:
		o.Cond, o.Version = client.Always, 0
	case k.Version == 0:
		o.Cond = client.IfAbsent
	}
	switch {
	case k.Writes() && k.Present:
		o.Kind, o.Value, o.Expires, o.Flags, o.Type = client.OpPut, k.Value, TimeOf(k.Expires), k.Flags, k.Type
	case k.Writes():
		o.Kind = client.OpDelete
	}
	return o
}

// TimeOf is an expiry in Unix ms as the client library has it; 0 is never.
func TimeOf(ms int64) time.Time {
	if ms == 0 {
		return time.Time{}
	}
	return time.UnixMilli(ms)
}
