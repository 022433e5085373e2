package client

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/internal/layout"
)

// Cond restricts a Put or Delete of an [Op].
type Cond = index.Cond

const (
	Always    = index.Always    // the zero value: unconditional
	IfAbsent  = index.IfAbsent  // Put: only if there is no such key, else ErrExists
	IfVersion = index.IfVersion // only if the key's version is Op.Version, else ErrConflict
	IfPresent = index.IfPresent // Put: only if there is such a key, else ErrNotFound
)

// OpKind says what an [Op] does. The zero value is invalid.
type OpKind uint8

const (
	OpGet OpKind = 1 + iota
	OpPut
	OpDelete
	OpUpdate
)

// Op is one operation of a batch; see [Client.Do].
type Op struct {
	Kind OpKind
	Key  []byte

	// OpPut.
	Value   []byte
	Expires time.Time // zero: never; millisecond grain
	Flags   uint32    // as in Item
	Type    Type      // of Value

	// OpPut, OpDelete.
	Cond    Cond
	Version uint64 // for IfVersion

	// OpUpdate.
	Update UpdateFunc

	// OpGet, OpUpdate: Typed says that the caller looks at the Type of what is there. For others all but
	// plain values are ErrWrongType.
	Typed bool

	// OpGet appends the value to Into[:0], so that a caller that does the same again and
	// again need not allocate. nil: it allocates.
	Into []byte

	// Item is the answer. OpGet: all of it. OpPut, OpUpdate: Version alone, of the
	// record written.
	Item Item
	Err  error
}

// UpdateFunc computes what a key becomes from what it is; present is false, and cur
// zero, if there is no such key. cur.Value is valid during the call only, and may
// not be changed. It may be called several times; the last call counts. An error
// ends the Update with it, nothing changed. It must not use the Client.
type UpdateFunc func(cur Item, present bool) (Change, error)

// Change is what an UpdateFunc wants.
type Change struct {
	// Value becomes the key's value; it must stay unchanged until the next call or
	// the Update's end. It may be cur.Value.
	Value   []byte
	Expires time.Time // zero: never
	Flags   uint32
	Type    Type // of Value
	// Delete removes the key instead.
	Delete bool
}

// errDelete leads an Update that wants a delete out of the machine.
var errDelete = errors.New("delete")

// Update replaces key by what f makes of it, if nobody changed it in between;
// otherwise f is asked again. It returns the new version, 0 for a delete.
func (c *Client) Update(ctx context.Context, key []byte, f UpdateFunc) (uint64, error) {
	ops := [1]Op{{Kind: OpUpdate, Key: key, Update: f}}
	c.Do(ctx, ops[:])
	return ops[0].Item.Version, ops[0].Err
}

// Do performs ops together: the phases of all of them share round trips, one
// doorbell a lane and memory node for each. Every Op has its own outcome. If two name the same
// key, either may come first.
func (c *Client) Do(ctx context.Context, ops []Op) {
	for lo := 0; lo < len(ops); lo += batchLimit {
		c.doSome(ctx, ops[lo:min(lo+batchLimit, len(ops))])
	}
}

// batchLimit bounds the operations of one round of Do, and so its buffers.
const batchLimit = 1024

// batch is what a doSome needs, kept for the next.
type batch struct {
	calls []call
	ops   []*engine.Op // those of them that are performed
	of    []int        // their positions among the caller's
	ends  []func()     // Events
	sum   byte         // of what touch has loaded: so that it is not optimized away
}

// touch loads the first byte of each key, so that the processor waits for all that are not in its caches at once.
func (b *batch) touch(ops []Op) {
	for i := range ops {
		if k := ops[i].Key; len(k) > 0 {
			b.sum += k[0]
		}
	}
}

var batches = sync.Pool{New: func() any { return new(batch) }}

// doSome performs at most batchLimit of a Do's operations together: the memory that they need while they run is bounded, however many
// the caller has.
func (c *Client) doSome(ctx context.Context, ops []Op) {
	b := batches.Get().(*batch)
	b.calls = slices.Grow(b.calls, len(ops))[:len(ops)] // they do not move
	b.touch(ops)
	for i := range ops {
		o, q := &ops[i], &b.calls[len(b.ops)]
		o.Item = Item{}
		if o.Err = c.fill(q, o); o.Err != nil {
			*q = call{}
			continue
		}
		q.Asker, q.item = q, &o.Item
		b.ops, b.of = append(b.ops, &q.Op), append(b.of, i)
		if c.o.Events != nil {
			_, end := c.begin(ctx, q) // one context is for all of them
			b.ends = append(b.ends, end)
		}
	}
	if len(b.ops) > 0 {
		c.perform(ctx, b.ops)
	}
	for _, end := range b.ends {
		end()
	}
	for k, i := range b.of {
		o, q := &ops[i], &b.calls[k]
		o.Err = q.Err
		c.answer(ctx, o, q)
	}
	clear(b.calls)
	clear(b.ops)
	clear(b.ends)
	b.calls, b.ops, b.of, b.ends = b.calls[:0], b.ops[:0], b.of[:0], b.ends[:0]
	batches.Put(b)
}

// answer fills in what a call of an Op has brought.
func (c *Client) answer(ctx context.Context, o *Op, q *call) {
	if o.Kind == OpGet {
		return // it is there
	}
	was := o.Item.Version // modifyOf's
	o.Item.Version = q.Version
	if errors.Is(o.Err, errDelete) {
		o.Item.Version = 0
		if o.Err = c.DeleteVersion(ctx, o.Key, was); errors.Is(o.Err, ErrConflict) || errors.Is(o.Err, ErrNotFound) {
			o.Item.Version, o.Err = c.Update(ctx, o.Key, o.Update)
		}
	}
}

// fill makes q what o asks for.
func (c *Client) fill(q *call, o *Op) error {
	if o.Kind != OpGet && c.o.ReadOnly {
		return errReadOnly
	}
	q.Key = o.Key
	switch o.Kind {
	case OpGet:
		q.Kind, q.dst, q.typed = index.Get, o.Into, o.Typed
		return checkKey(o.Key)
	case OpPut:
		q.Kind, q.Cond, q.IfVersion, q.Expiry = index.Put, o.Cond, o.Version, expiryAt(o.Expires)
		q.Value, q.Flags = withFlags(o.Value, o.Flags, o.Type)
		return cmp.Or(checkType(o.Type), checkValue(o.Key, o.Value))
	case OpDelete:
		q.Kind, q.Cond, q.IfVersion = index.Delete, o.Cond, o.Version
		return checkKey(o.Key)
	case OpUpdate:
		if o.Update == nil {
			return fmt.Errorf("%w: Update: nil", ErrInvalid)
		}
		q.Kind, q.typed = index.Modify, o.Typed
		q.Modify = modifyOf(q, o.Update)
		return checkKey(o.Key)
	}
	return fmt.Errorf("%w: Kind: %d", ErrInvalid, o.Kind)
}

// modifyOf is an UpdateFunc as the machine calls it. It keeps what the record was
// in q.item's Version.
func modifyOf(q *call, update UpdateFunc) index.ModifyFunc {
	var buf []byte
	return func(cur *layout.Record) ([]byte, layout.RecordFlags, uint64, error) {
		var it Item
		if cur != nil && cur.Flags.TypeOf() != 0 && !q.typed {
			return nil, 0, 0, ErrWrongType
		}
		if cur != nil {
			it = Item{Type: Type(cur.Flags.TypeOf()), Version: cur.Version, Expires: expires(cur.Expiry)}
			it.Value, it.Flags = splitFlags(cur.Value, cur.Flags)
			it.Value = slices.Clip(it.Value)
		}
		*q.item = Item{Version: it.Version}
		ch, err := update(it, cur != nil)
		switch {
		case err != nil:
			return nil, 0, 0, err
		case ch.Delete && cur == nil:
			return nil, 0, 0, ErrNotFound
		case ch.Delete:
			return nil, 0, 0, errDelete
		}
		if err := cmp.Or(checkType(ch.Type), checkValue(q.Key, ch.Value)); err != nil {
			return nil, 0, 0, err
		}
		// cur is the Op's buffer, which goes on to other uses.
		buf = append(buf[:0], ch.Value...)
		v, flags := withFlags(buf, ch.Flags, ch.Type)
		return v, flags, expiryAt(ch.Expires), nil
	}
}

// A user's flags, if not 0, are four bytes behind the value of a record that
// carries layout.FlagUser.

// withFlags appends the user's flags to a value: they travel as its last four bytes, so that records need no field for them.
// t is the value's type, which takes no room.
func withFlags(value []byte, flags uint32, t Type) ([]byte, layout.RecordFlags) {
	if flags == 0 {
		return value, layout.Type(t).Flags()
	}
	v := append(make([]byte, 0, len(value)+4), value...)
	return binary.LittleEndian.AppendUint32(v, flags), layout.FlagUser | layout.Type(t).Flags()
}

func splitFlags(value []byte, f layout.RecordFlags) ([]byte, uint32) {
	n := len(value) - 4
	if f&layout.FlagUser == 0 || n < 0 {
		return value, 0
	}
	return value[:n], binary.LittleEndian.Uint32(value[n:])
}

// checkType refuses types that records cannot hold, or nobody knows.
func checkType(t Type) error {
	if t > List {
		return fmt.Errorf("%w: Type: %d, want at most %d", ErrInvalid, t, List)
	}
	return nil
}

// take copies a record whose value is all there, to into[:0] if that is not nil.
func (it *Item) take(r *layout.Record, into []byte) {
	v, flags := splitFlags(r.Value, r.Flags)
	if into == nil {
		into = make([]byte, 0, len(v))
	}
	it.Value = append(into[:0], v...)
	it.Version, it.Flags, it.Type, it.Expires = r.Version, flags, Type(r.Flags.TypeOf()), expires(r.Expiry)
}

// expiryAt is t as records hold it, milliseconds since 1970; 0 is never.
func expiryAt(t time.Time) uint64 {
	if t.IsZero() {
		return 0
	}
	return uint64(max(t.UnixMilli(), 1)) // 1: long ago
}

// GetIfChanged is Get if key has another version than the one given, and changed is
// false if it has that one: if the key's word is remembered, that costs a READ of
// 8 bytes, unless the key expires. An absent key is ErrNotFound.
func (c *Client) GetIfChanged(ctx context.Context, key []byte, version uint64) (it Item, changed bool, err error) {
	if err := checkKey(key); err != nil {
		return Item{}, false, err
	}
	q := newCall(index.Get, key)
	defer q.free()
	q.Cond, q.IfVersion = index.IfVersion, version
	err = c.do(ctx, q)
	if errors.Is(err, index.ErrUnchanged) {
		return Item{Version: version}, false, nil
	}
	return q.own, err == nil, err
}
