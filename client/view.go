package client

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/internal/layout"
)

var (
	// ErrViewExpired: what was read through a View may be other bytes than the value's. It is to be thrown away, with
	// all that was made of it.
	ErrViewExpired = errors.New("view expired")
	// ErrTooManyViews: the Client has Options.Views that are not released, or they have Options.ViewBytes together.
	ErrTooManyViews = engine.ErrHolds
)

// ViewOptions say how a value is viewed.
type ViewOptions struct {
	// Hold is for how long the View should stand. Until then memory that is overwritten anywhere in the namespace
	// waits for it. Default 1 s, at most 10 s.
	Hold time.Duration
	// Unchecked leaves the CRC out: the bytes are the record's, and nobody has looked whether memory has kept them.
	// The caller has to have a checksum of its own. Else View takes the CRC, or has taken it of this version in the
	// last ten seconds.
	Unchecked bool
}

const (
	defaultHold = time.Second
	maxHold     = 10 * time.Second
)

// View is one version of a key's value, where it is in the memory of the memory node; see [Client.View]. Use
// what it shows, then Release it, and believe what was made of the bytes only if that returns nil. Overwriting or
// deleting the key, and whatever else happens to it, leaves the bytes as they are. The View expires once it is older
// than ViewOptions.Hold and its bytes are needed, or older than 100 ms while memory is short. It expires, too, when
// the copies of the value's memory change, and with the Client's session. Its methods belong to one goroutine at a
// time; the bytes to any number of them.
type View struct {
	Info
	Flags uint32 // as in Item
	Note  uint64 // as in Item

	parts  [][]byte
	holder ViewHolder
	over   bool  // released
	err    error // of Release

	// Of a Client's: what is asked of the engine, and what that keeps.
	part index.Part
	hold engine.Hold
	one  [1][]byte
	page *statePage // nil: nobody has asked for a Handle
}

// ViewHolder keeps what a View shows; see [NewView].
type ViewHolder interface {
	// Stands reports whether what was read of the bytes so far was the value.
	Stands() bool
	// Release gives the bytes back, and reports what Stands would have.
	Release() bool
}

// NewView makes a View for those who substitute a fake for a [Client].
func NewView(info Info, flags uint32, note uint64, parts [][]byte, h ViewHolder) *View {
	return &View{Info: info, Flags: flags, Note: note, parts: parts, holder: h}
}

// View shows the value of key where it is, without a copy, or returns ErrNotFound. Its memory node must be reached by
// the shm provider. Then acquiring takes one pass over the bytes, or none; see ViewOptions. Elsewhere, and for values
// of less than 8 KiB, the View has a copy of its own, with the same outcome. A Client has Options.Views at most that
// are not released, of Options.ViewBytes together.
func (c *Client) View(ctx context.Context, key []byte, o ViewOptions) (*View, error) {
	if err := checkKey(key); err != nil {
		return nil, err
	}
	if o.Hold < 0 || o.Hold > maxHold {
		return nil, fmt.Errorf("%w: Hold %v, want at most %v", ErrInvalid, o.Hold, maxHold)
	}
	if o.Hold == 0 {
		o.Hold = defaultHold
	}
	v := &View{}
	v.part = index.Part{InPlace: true, Unchecked: o.Unchecked}
	v.hold.For = int64(o.Hold)
	q := newCall(index.Get, key)
	defer q.free()
	q.Part, q.view = &v.part, v
	if err := c.do(ctx, q); err != nil {
		v.hold.Release() // of a value that is not for Views
		return nil, err
	}
	v.holder = &v.hold
	return v, nil
}

// Keep is engine.Keeper.
func (q *call) Keep() *engine.Hold { return &q.view.hold }

// take takes what was found: bytes that are shown, or memory of the lane.
func (v *View) take(q *call, r *layout.Record, parts [][]byte) {
	switch {
	case v.part.Shown && parts != nil:
		v.parts = append([][]byte(nil), parts...)
	case v.part.Shown, isThere(q.dst, r.Value, len(r.Value)):
		v.one[0] = r.Value
		v.parts = v.one[:]
	case parts != nil:
		v.one[0] = joined(nil, parts)
		v.parts = v.one[:]
	default:
		v.one[0] = bytes.Clone(r.Value)
		v.parts = v.one[:]
	}
	n := r.Flags.TailLen()
	tail := v.cut(n)
	_, v.Flags, v.Note = splitTail(tail, r.Flags)
	v.Info = Info{Version: r.Version, Expires: expires(r.Expiry)}
	for _, p := range v.parts {
		v.Size += int64(len(p))
	}
	if v.Size == 0 {
		v.parts = nil
	}
}

// cut takes the last n bytes off the parts.
func (v *View) cut(n int) (tail []byte) {
	for n > len(tail) && len(v.parts) > 0 {
		last := len(v.parts) - 1
		p := v.parts[last]
		k := len(p) - min(len(p), n-len(tail))
		tail = append(bytes.Clone(p[k:]), tail...)
		if v.parts[last] = p[:k:k]; k == 0 {
			v.parts = v.parts[:last]
		}
	}
	return tail
}

// Parts are the bytes of the value, in order: all of them in one part, or in parts of 2 MiB and a shorter one. They
// must not be written to, which may end the program, nor be touched after Release. An empty value has none. While the
// View stands they are the value of View.Version; afterwards they may be anything.
func (v *View) Parts() [][]byte { return v.parts }

// Err returns nil if what was read so far was the value, or ErrViewExpired.
func (v *View) Err() error {
	switch {
	case v.over:
		return v.err
	case v.holder.Stands():
		return nil
	}
	return ErrViewExpired
}

// Release ends the View. It returns nil if all that was read was the value, or ErrViewExpired. Later calls return the
// same.
func (v *View) Release() error {
	if !v.over {
		if v.over, v.parts = true, nil; !v.holder.Release() {
			v.err = ErrViewExpired
		}
		if v.page != nil {
			v.page.unmap()
			v.page = nil
		}
	}
	return v.err
}
