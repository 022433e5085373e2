package client

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/kvd-project/kvd/index"
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

	// OpPut, OpDelete.
	Cond    Cond
	Version uint64 // for IfVersion

	// OpUpdate.
	Update UpdateFunc

	// OpGet appends the value to Into[:0], so that a caller who does the same again and
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
// doorbell a lane and memory node for each. Every Op has its own outcome. Where two name the same
// key, either may come first.
func (c *Client) Do(ctx context.Context, ops []Op) {
	for lo := 0; lo < len(ops); lo += batchLimit {
		c.doSome(ctx, ops[lo:min(lo+batchLimit, len(ops))])
	}
}

// batch is what a doSome needs, kept for the next.
type batch struct {
	store []call
	calls []*call
	of    []int // positions in ops
}

var (
	batches = sync.Pool{New: func() any { return new(batch) }}
	// exec copies a call that outlives it.
	loneCalls = sync.Pool{New: func() any { return new(call) }}
)

func (c *Client) doSome(ctx context.Context, ops []Op) {
	var b *batch
	for i := range ops {
		o := &ops[i]
		o.Item, o.Err = Item{}, nil
		if o.Kind == OpGet && len(o.Key) > 0 {
			if d, r, ok := c.peek(ctx, o.Key); ok {
				o.Item = itemOf(&r, o.Into)
				d.handOver()
				continue
			}
		}
		q, err := c.callOf(o)
		if err != nil {
			o.Err = err
			continue
		}
		if len(ops) == 1 || c.synchronous(o.Key) {
			// There are no round trips to share.
			p := loneCalls.Get().(*call)
			*p = q
			o.Err = c.do(ctx, p)
			c.answer(ctx, o, p)
			*p = call{}
			loneCalls.Put(p)
			continue
		}
		if b == nil {
			b = batches.Get().(*batch)
			if cap(b.store) < len(ops) {
				b.store = make([]call, 0, len(ops)) // the calls in it do not move
			}
		}
		b.store = append(b.store, q)
		b.of = append(b.of, i)
	}
	if b == nil {
		return
	}
	for i := range b.store {
		b.calls = append(b.calls, &b.store[i])
	}
	c.multi(ctx, b.calls)
	whole := true
	for i := range b.store {
		o, q := &ops[b.of[i]], &b.store[i]
		o.Err = q.err
		whole = whole && q.finished
		c.answer(ctx, o, q)
	}
	if !whole {
		return // its lane still has some of them
	}
	clear(b.store)
	clear(b.calls)
	b.store, b.calls, b.of = b.store[:0], b.calls[:0], b.of[:0]
	batches.Put(b)
}

// synchronous reports whether key's lane reaches all memory by providers that execute
// within PostSend.
func (c *Client) synchronous(key []byte) bool {
	s := c.sess.Load()
	d, _, _ := s.place(key)
	return d.l.Synchronous()
}

// answer fills in what a call of an Op has brought.
func (c *Client) answer(ctx context.Context, o *Op, q *call) {
	if o.Kind == OpGet {
		o.Item = q.item
		return
	}
	o.Item.Version = q.version
	if errors.Is(o.Err, errDelete) {
		o.Item.Version = 0
		if o.Err = c.DeleteVersion(ctx, o.Key, q.item.Version); errors.Is(o.Err, ErrConflict) || errors.Is(o.Err, ErrNotFound) {
			o.Item.Version, o.Err = c.Update(ctx, o.Key, o.Update)
		}
	}
}

// callOf is what an Op asks of its lane.
func (c *Client) callOf(o *Op) (q call, err error) {
	if o.Kind != OpGet && c.o.ReadOnly {
		return q, errReadOnly
	}
	switch o.Kind {
	case OpGet:
		return call{kind: index.Get, key: o.Key, dst: o.Into, take: takeItem}, checkKey(o.Key)
	case OpPut:
		exp, err := expiryAt(o.Expires)
		if err == nil {
			err = checkValue(o.Key, o.Value)
		}
		q = call{kind: index.Put, cond: o.Cond, key: o.Key, value: o.Value, ifVersion: o.Version, expiry: exp}
		q.value, q.flags = withFlags(o.Value, o.Flags)
		return q, err
	case OpDelete:
		return call{kind: index.Delete, cond: o.Cond, key: o.Key, ifVersion: o.Version}, checkKey(o.Key)
	case OpUpdate:
		if o.Update == nil {
			return q, fmt.Errorf("%w: Update: nil", ErrInvalid)
		}
		return call{kind: index.Modify, key: o.Key, update: o.Update, take: takeItem}, checkKey(o.Key)
	}
	return q, fmt.Errorf("%w: Kind: %d", ErrInvalid, o.Kind)
}

// modifyOf is an UpdateFunc as the machine calls it. It keeps what the record was
// in c.item.Version.
func modifyOf(c *call, op *index.Op) modifyFunc {
	var buf []byte
	return func(cur *layout.Record) ([]byte, uint64, error) {
		var it Item
		if cur != nil {
			it = Item{Version: cur.Version, Expires: expires(cur.Expiry)}
			it.Value, it.Flags = splitFlags(cur.Value, cur.Flags)
			it.Value = slices.Clip(it.Value)
		}
		c.item = Item{Version: it.Version}
		ch, err := c.update(it, cur != nil)
		if err != nil {
			return nil, 0, err
		}
		if ch.Delete {
			if cur == nil {
				return nil, 0, ErrNotFound
			}
			return nil, 0, errDelete
		}
		exp, err := expiryAt(ch.Expires)
		if err == nil {
			err = checkValue(c.key, ch.Value)
		}
		if err != nil {
			return nil, 0, err
		}
		c.expiry = exp // for the sweep
		// cur is the Op's buffer, which goes on to other uses.
		buf = append(buf[:0], ch.Value...)
		var v []byte
		v, op.Flags = withFlags(buf, ch.Flags)
		return v, exp, nil
	}
}

// A user's flags, where not 0, are four bytes behind the value of a record that
// carries layout.FlagUser.

func withFlags(value []byte, flags uint32) ([]byte, layout.RecordFlags) {
	if flags == 0 {
		return value, 0
	}
	v := append(make([]byte, 0, len(value)+4), value...)
	return binary.LittleEndian.AppendUint32(v, flags), layout.FlagUser
}

func splitFlags(value []byte, f layout.RecordFlags) ([]byte, uint32) {
	n := len(value) - 4
	if f&layout.FlagUser == 0 || n < 0 {
		return value, 0
	}
	return value[:n], binary.LittleEndian.Uint32(value[n:])
}

// itemOf copies a record whose value is all there, to into[:0] if that is not nil.
func itemOf(r *layout.Record, into []byte) Item {
	it := Item{Version: r.Version, Expires: expires(r.Expiry)}
	v, flags := splitFlags(r.Value, r.Flags)
	if into == nil {
		into = make([]byte, 0, len(v))
	}
	it.Value, it.Flags = append(into[:0], v...), flags
	return it
}

func expiryAt(t time.Time) (uint64, error) {
	if t.IsZero() {
		return 0, nil
	}
	ms := t.UnixMilli()
	if ms <= 0 {
		ms = 1 // long ago
	}
	return uint64(ms), nil
}

// GetIfChanged is Get if key has another version than the one given, and changed is
// false if it has that one: where the key's word is remembered, that costs a READ of
// 8 bytes, unless the key expires. An absent key is ErrNotFound.
func (c *Client) GetIfChanged(ctx context.Context, key []byte, version uint64) (it Item, changed bool, err error) {
	if err := checkKey(key); err != nil {
		return Item{}, false, err
	}
	req := call{kind: index.Get, cond: index.IfVersion, ifVersion: version, key: key, take: takeItem}
	err = c.do(ctx, &req)
	if errors.Is(err, index.ErrUnchanged) {
		return Item{Version: version}, false, nil
	}
	return req.item, err == nil, err
}
