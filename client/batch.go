package client

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
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

	placed []placed
	quick  []engine.Quick // by lane
	at     []int          // positions in ops
	done   []bool         // by position in ops
	lanes  []laneShare
}

// placed is an Op that may be quick.
type placed struct {
	hash, check uint64
	at          int // position in ops
	lane        int
}

// laneShare is a lane's part of batch.quick.
type laneShare struct{ from, to int }

var (
	batches = sync.Pool{New: func() any { return new(batch) }}
	// exec copies a call that outlives it.
	loneCalls = sync.Pool{New: func() any { return new(call) }}
)

func (c *Client) doSome(ctx context.Context, ops []Op) {
	for i := range ops {
		ops[i].Item, ops[i].Err = Item{}, nil
	}
	b := batches.Get().(*batch)
	b.done = slices.Grow(b.done[:0], len(ops))[:len(ops)]
	clear(b.done)
	if s := c.sess.Load(); c.mayBeQuick(ctx, s) {
		b.quickly(c, s, ops)
	}
	b.store = slices.Grow(b.store, len(ops)) // the calls in it do not move
	for i := range ops {
		if b.done[i] {
			continue
		}
		o := &ops[i]
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
		b.store = append(b.store, q)
		b.of = append(b.of, i)
	}
	whole := true
	if len(b.store) > 0 {
		for i := range b.store {
			b.calls = append(b.calls, &b.store[i])
		}
		c.multi(ctx, b.calls)
		for i := range b.store {
			o, q := &ops[b.of[i]], &b.store[i]
			o.Err = q.err
			whole = whole && q.finished
			c.answer(ctx, o, q)
		}
	}
	if !whole {
		return // its lane still has some of them
	}
	clear(b.store)
	clear(b.calls)
	b.store, b.calls, b.of = b.store[:0], b.calls[:0], b.of[:0]
	batches.Put(b)
}

// quickly performs what needs no task, a lane at a time.
func (b *batch) quickly(c *Client, s *sess, ops []Op) {
	n := len(s.lanes)
	b.lanes = slices.Grow(b.lanes[:0], n)[:n]
	clear(b.lanes)
	b.placed = b.placed[:0]
	for i := range ops {
		o := &ops[i]
		switch {
		case len(o.Key) == 0 || len(o.Key) > MaxKeyLen:
			continue
		case o.Kind == OpGet:
		case o.Kind == OpPut && o.Cond == Always && len(o.Value) <= layout.MaxRecordSize && !c.o.ReadOnly:
		default:
			continue
		}
		_, hash, check := s.place(o.Key)
		l := s.laneNumber(check)
		b.placed = append(b.placed, placed{hash, check, i, l})
		b.lanes[l].to++
	}
	if len(b.placed) == 0 {
		return
	}
	at := 0
	for l := range b.lanes {
		at, b.lanes[l] = at+b.lanes[l].to, laneShare{at, at}
	}
	b.quick = slices.Grow(b.quick[:0], at)[:at]
	b.at = slices.Grow(b.at[:0], at)[:at]
	for _, p := range b.placed {
		o, l := &ops[p.at], &b.lanes[p.lane]
		q := &b.quick[l.to]
		q.Put, q.Key, q.Hash, q.Check = o.Kind == OpPut, o.Key, p.hash, p.check
		if q.Put {
			q.Value, q.Flags = withFlags(o.Value, o.Flags)
			q.Expiry = expiryAt(o.Expires)
		}
		b.at[l.to] = p.at
		l.to++
	}
	defer clear(b.quick)

	// Not all begin with the same lane; one that somebody leads at the moment may be free
	// when the others are done, or when somebody else has had the processor.
	left := len(b.placed)
	for round := 0; left > 0 && round < quickRounds; round++ {
		if round > 1 {
			runtime.Gosched()
		}
		for i := range b.lanes {
			l := b.placed[0].lane + i
			if l >= n {
				l -= n
			}
			share, d := &b.lanes[l], s.lanes[l]
			switch {
			case share.from == share.to:
				continue
			case !d.l.Synchronous():
				left -= share.to - share.from
				share.from = share.to
				continue
			case round == 0 && !d.tryLead() || round > 0 && !d.tryLeadSoon():
				continue
			}
			left -= share.to - share.from
			for share.from < share.to {
				some := b.quick[share.from:share.to]
				some = some[:d.l.Quick(some)]
				for j := range some {
					if q := &some[j]; q.OK {
						b.settle(d, ops, b.at[share.from+j], q)
					}
				}
				share.from += len(some)
			}
			d.handOver()
		}
	}
}

// quickRounds is how often a batch asks for the lanes it needs before it waits for them.
const quickRounds = 4

// settle gives ops[i] the answer of a Quick.
func (b *batch) settle(d *laneDriver, ops []Op, i int, q *engine.Quick) {
	o := &ops[i]
	if b.done[i] = true; q.Put {
		o.Item.Version, o.Err = d.quickPut(q)
	} else {
		o.Item = itemOf(&q.Record, o.Into)
	}
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
		q = call{kind: index.Put, cond: o.Cond, key: o.Key, ifVersion: o.Version, expiry: expiryAt(o.Expires)}
		q.value, q.flags = withFlags(o.Value, o.Flags)
		return q, checkValue(o.Key, o.Value)
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
		if err := checkValue(c.key, ch.Value); err != nil {
			return nil, 0, err
		}
		c.expiry = expiryAt(ch.Expires) // for the sweep
		// cur is the Op's buffer, which goes on to other uses.
		buf = append(buf[:0], ch.Value...)
		var v []byte
		v, op.Flags = withFlags(buf, ch.Flags)
		return v, c.expiry, nil
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

func expiryAt(t time.Time) uint64 {
	if t.IsZero() {
		return 0
	}
	return uint64(max(t.UnixMilli(), 1)) // 1: long ago
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
