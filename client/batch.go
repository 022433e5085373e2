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
	OpKeep // MultiCAS alone: the key stays as it is, if Cond holds
	// OpExists tells that the key is there, of whatever Type, as Client.Exists does. An absent key is ErrNotFound.
	OpExists
	// OpPin has eviction pass over the key until Expires, as Client.Pin does. A zero Expires ends that.
	OpPin
)

// Op is one operation of a batch; see [Client.Do].
type Op struct {
	Kind OpKind
	Key  []byte

	// OpPut.
	Value   []byte
	Expires time.Time // zero: never; millisecond grain; OpPin: until when, zero: unpin
	Flags   uint32    // as in Item
	Note    uint64    // as in Item
	Type    Type      // of Value
	// OpPut: as in PutOptions.
	PinUntil time.Time

	// OpPut, OpDelete, OpKeep.
	Cond    Cond
	Version uint64 // for IfVersion

	// OpUpdate.
	Update UpdateFunc

	// OpGet, OpUpdate: Typed says that the caller looks at the Type of what is there. For others all but
	// plain values are ErrWrongType. OpKeep: Typed asks for all of the Item; of a value in chunks it has no Value.
	Typed bool

	keeps bool // OpUpdate: Update changes Expires alone

	// OpGet appends the value to Into[:0], so that a caller that does the same again and
	// again need not allocate. nil: it allocates. All of its capacity is the Client's until Do returns. A byte of it
	// behind the value is then zero or what it was before; after an error that holds for each byte.
	Into []byte
	// OpGet with Fixed: the capacity of Into is all the memory that there is for the value. A longer one is
	// io.ErrShortBuffer. Memory behind the value is as with Client.GetInto.
	Fixed bool
	// Size is the bytes of the value that an OpGet with Fixed found, also of one that is longer. Else it is 0.
	Size int

	// Item is the answer. OpGet: all of it, as of an OpKeep with Typed. OpExists, OpPin: Version and Expires alone.
	// OpPut, OpUpdate: Version alone, of the record written.
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
	Note    uint64
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
	if c.o.Events == nil || len(ops) == 0 {
		c.doAll(ctx, ops)
		return
	}
	ctx, end := c.beginEvent(ctx, eventOf(ops))
	rounds := c.doAll(ctx, ops)
	var err error
	if len(ops) == 1 {
		err = ops[0].Err
	}
	end(rounds, 0, err)
}

// doAll is Do without Events; rounds are counted for them alone.
func (c *Client) doAll(ctx context.Context, ops []Op) (rounds int) {
	most := batchLimit
	if len(ops) > nearLimit && c.sess.Load().core.Lanes()[0].Synchronous() {
		most = nearLimit
	}
	for lo := 0; lo < len(ops); lo += most {
		rounds += c.doSome(ctx, ops[lo:min(lo+most, len(ops))])
	}
	return rounds
}

const (
	// batchLimit bounds the operations of one round of Do, and so its buffers.
	batchLimit = 1024
	// nearLimit is the same for a store whose verbs are over when they are posted. There operations share no waits, and
	// no more cache misses than a chain of engine.Hinted has; but all of them are looked at several times, half a KiB
	// each, which the processor's nearest cache holds for so many.
	nearLimit = 32
)

// batch is what a doSome needs, kept for the next.
type batch struct {
	calls []call
	ops   []*engine.Op // those of them that are performed
	of    []int        // their positions among the caller's
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

// doSome performs at most batchLimit of a Do's operations together: the memory that they need while they run is
// bounded, however many the caller has.
func (c *Client) doSome(ctx context.Context, ops []Op) (rounds int) {
	b := batches.Get().(*batch)
	b.calls = slices.Grow(b.calls, len(ops))[:len(ops)] // they do not move
	b.touch(ops)
	for i := range ops {
		o, q := &ops[i], &b.calls[len(b.ops)]
		o.Item = Item{}
		if o.Err = c.fill(q, o); o.Err != nil {
			q.reset()
			continue
		}
		q.Asker, q.item = q, &o.Item
		b.ops, b.of = append(b.ops, &q.Op), append(b.of, i)
	}
	if len(b.ops) > 0 {
		c.perform(ctx, b.ops)
	}
	if c.o.Events != nil {
		for _, op := range b.ops {
			rounds = max(rounds, int(op.Rounds))
		}
	}
	for k, i := range b.of {
		o, q := &ops[i], &b.calls[k]
		o.Err = q.Err
		c.answer(ctx, o, q)
	}
	for i := range b.calls {
		b.calls[i].reset()
	}
	clear(b.ops)
	b.calls, b.ops, b.of = b.calls[:0], b.ops[:0], b.of[:0]
	batches.Put(b)
	return rounds
}

func (c *Client) answer(ctx context.Context, o *Op, q *call) {
	if o.Kind == OpGet || o.Kind == OpExists || o.Kind == OpPin {
		o.Size = q.n
		return // the rest is there
	}
	was := o.Item.Version // modify's
	o.Item.Version = q.Version
	if errors.Is(o.Err, errDelete) {
		o.Item.Version = 0
		if o.Err = c.DeleteVersion(ctx, o.Key, was); errors.Is(o.Err, ErrConflict) || errors.Is(o.Err, ErrNotFound) {
			o.Item.Version, o.Err = c.Update(ctx, o.Key, o.Update)
		}
	}
}

func (c *Client) fill(q *call, o *Op) error {
	if o.Kind != OpGet && o.Kind != OpExists && c.o.ReadOnly {
		return errReadOnly
	}
	q.Key = o.Key
	switch o.Kind {
	case OpGet:
		q.Kind, q.dst, q.typed = index.Get, o.Into, o.Typed
		if o.Fixed {
			q.dst, q.into, q.told = o.Into[:cap(o.Into)], true, true
		}
		return checkKey(o.Key)
	case OpExists:
		q.Kind = index.Exists
		return checkKey(o.Key)
	case OpPin:
		q.Kind, q.Expiry = index.Pin, expiryAt(o.Expires)
		return cmp.Or(checkKey(o.Key), c.checkPin(o.Expires))
	case OpPut:
		q.Kind, q.Cond, q.IfVersion, q.Expiry = index.Put, o.Cond, o.Version, expiryAt(o.Expires)
		q.Value, q.Flags = withTail(o.Value, o.Flags, o.Note, o.Type)
		if !o.PinUntil.IsZero() {
			var err error
			if q.Pinned, err = c.pinnedUntil(o.PinUntil, q.Expiry); err != nil {
				return err
			}
		}
		return cmp.Or(checkCond(o.Cond), checkType(o.Type), checkValue(o.Key, o.Value, c.MaxValueLen()))
	case OpDelete:
		q.Kind, q.Cond, q.IfVersion = index.Delete, o.Cond, o.Version
		return cmp.Or(checkCond(o.Cond), checkKey(o.Key))
	case OpUpdate:
		if o.Update == nil {
			return fmt.Errorf("%w: Update: nil", ErrInvalid)
		}
		q.Kind, q.typed, q.Keeps = index.Modify, o.Typed, o.keeps
		q.update, q.Modify, q.most = o.Update, q.modify, uint32(c.MaxValueLen())
		return checkKey(o.Key)
	}
	return fmt.Errorf("%w: Kind: %d", ErrInvalid, o.Kind)
}

// modify is the call's UpdateFunc as the machine calls it. It keeps what the record was in q.item's Version.
func (q *call) modify(cur *layout.Record) ([]byte, layout.RecordFlags, uint64, error) {
	var it Item
	if cur != nil && cur.Flags.TypeOf() != 0 && !q.typed {
		return nil, 0, 0, ErrWrongType
	}
	if cur != nil {
		it = Item{Type: Type(cur.Flags.TypeOf()), Version: cur.Version, Expires: expires(cur.Expiry)}
		it.Value, it.Flags, it.Note = splitTail(cur.Value, cur.Flags)
		it.Value = slices.Clip(it.Value)
	}
	*q.item = Item{Version: it.Version}
	ch, err := q.update(it, cur != nil)
	switch {
	case err != nil:
		return nil, 0, 0, err
	case ch.Delete && cur == nil:
		return nil, 0, 0, ErrNotFound
	case ch.Delete:
		return nil, 0, 0, errDelete
	}
	if err := cmp.Or(checkType(ch.Type), checkValue(q.Key, ch.Value, int64(q.most))); err != nil {
		return nil, 0, 0, err
	}
	// cur is the Op's buffer, which goes on to other uses.
	q.changed = append(q.changed[:0], ch.Value...)
	v, flags := withTail(q.changed, ch.Flags, ch.Note, ch.Type)
	return v, flags, expiryAt(ch.Expires), nil
}

// keepChanged bounds the buffers that a batch keeps for the values of updates, in bytes each.
const keepChanged = 1 << 10

// reset forgets what belongs to a caller.
func (q *call) reset() {
	b := q.changed
	if cap(b) > keepChanged {
		b = nil
	}
	*q = call{changed: b[:0]}
}

// A user's note and flags, those that are not 0, are eight and four bytes behind the value of a record that
// carries layout.FlagNote and layout.FlagUser.

// withTail appends the user's note and flags to a value: they travel as its last bytes, so that records need no fields
// for them. t is the value's type, which takes no room.
func withTail(value []byte, flags uint32, note uint64, t Type) ([]byte, layout.RecordFlags) {
	f := layout.Type(t).Flags()
	if flags == 0 && note == 0 {
		return value, f
	}
	v := append(make([]byte, 0, len(value)+12), value...)
	if note != 0 {
		v, f = binary.LittleEndian.AppendUint64(v, note), f|layout.FlagNote
	}
	if flags != 0 {
		v, f = binary.LittleEndian.AppendUint32(v, flags), f|layout.FlagUser
	}
	return v, f
}

// splitTail is the reverse of withTail. A value too short for its tail is left as it is.
func splitTail(value []byte, f layout.RecordFlags) (v []byte, flags uint32, note uint64) {
	n := len(value) - f.TailLen()
	if n == len(value) || n < 0 {
		return value, 0, 0
	}
	v, tail := value[:n], value[n:]
	if f&layout.FlagNote != 0 {
		note, tail = binary.LittleEndian.Uint64(tail), tail[8:]
	}
	if f&layout.FlagUser != 0 {
		flags = binary.LittleEndian.Uint32(tail)
	}
	return v, flags, note
}

// checkCond refuses conditions that are not of the API.
func checkCond(cond Cond) error {
	if cond > IfPresent {
		return fmt.Errorf("%w: Cond: %d, want at most %d", ErrInvalid, cond, IfPresent)
	}
	return nil
}

// checkType refuses types that records cannot hold, or nobody knows.
func checkType(t Type) error {
	if t > Stream {
		return fmt.Errorf("%w: Type: %d, want at most %d", ErrInvalid, t, Stream)
	}
	return nil
}

// take copies a record whose value is all there, to into[:0] if that is not nil.
func (it *Item) take(r *layout.Record, into []byte) {
	v, flags, note := splitTail(r.Value, r.Flags)
	switch {
	case isThere(into, r.Value, len(v)):
		it.Value = into[:len(v)]
	case into == nil:
		into = make([]byte, 0, len(v))
		fallthrough
	default:
		it.Value = append(into[:0], v...)
	}
	it.Version, it.Flags, it.Note, it.Type, it.Expires = r.Version, flags, note, Type(r.Flags.TypeOf()),
		expires(r.Expiry)
}

// expiryAt is t as records hold it, milliseconds since 1970; 0 is never.
func expiryAt(t time.Time) uint64 {
	if t.IsZero() {
		return 0
	}
	return uint64(max(t.UnixMilli(), 1)) // 1: long ago
}

// GetIfChanged is Get if key has another version than the one given. If key has that one, changed is false. That
// answer costs a READ of 8 bytes if the key's word is remembered and the key does not expire. An absent key is
// ErrNotFound.
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
