package client

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"
	"unsafe"

	"github.com/zeebo/xxh3"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/internal/inside"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/units"
)

// checkKey refuses the empty key and what is longer than a record's header can say.
func checkKey(key []byte) error {
	if len(key) == 0 || len(key) > MaxKeyLen {
		return badKey(key)
	}
	return nil
}

func badKey(key []byte) error {
	return fmt.Errorf("%w: key of %d bytes, want 1..%d", ErrInvalid, len(key), MaxKeyLen)
}

// checkValue refuses what no record can hold, or is longer than most bytes, before anything is done.
func checkValue(key, value []byte, most int64) error {
	if err := checkKey(key); err != nil {
		return err
	}
	return CheckLen(int64(len(value)), most)
}

// CheckLen is nil if a namespace whose longest value has most bytes takes a value of n bytes, else ErrTooLarge with
// ErrInvalid.
func CheckLen(n, most int64) error {
	if n <= most {
		return nil
	}
	return fmt.Errorf("%w: %w: %s, and its namespace allows %s (kvctl namespace set --max-value, %s at most)",
		ErrInvalid, ErrTooLarge, units.Bytes(n), units.Bytes(most), units.Bytes(MaxValueLen))
}

// MaxValueLen is the longest value that the Client's namespace allows, in bytes. It may change while the Client is
// open.
func (c *Client) MaxValueLen() int64 { return c.sess.Load().maxValue.Load() }

// hash is the half of a key's hash that places it; the seed is the namespace's.
func (s *sess) hash(key []byte) uint64 { return xxh3.Hash128Seed(key, s.seed.Load()).Lo }

func (s *sess) hashKey(q *call) {
	h := xxh3.Hash128Seed(q.Key, s.seed.Load())
	q.Hash, q.Check = h.Lo, h.Hi
}

// call is an operation of the API on its way through the engine.
type call struct {
	engine.Op
	dst   []byte // for the value
	into  bool   // GetInto: dst is all there is
	told  bool   // Op.Fixed: into, and item is told of the value
	typed bool   // Op.Typed
	most  uint32 // of an OpUpdate: the longest value that it may make, bytes
	page  func() // of a scan, and of a janitor's kinds: takes what was found
	view  *View  // of a GET in place

	update  UpdateFunc // of an OpUpdate
	changed []byte     // what it made, kept for the next call while it is short

	item *Item // for what was found, also by modify: a batch's, or own
	own  Item
	n    int // GetInto: the value's length; of a part, the bytes in dst

	ops [1]*engine.Op // itself, for a Do of one
}

var loneCalls = sync.Pool{New: func() any { return new(call) }}

// newCall takes a call; free gives it back.
func newCall(kind index.Kind, key []byte) *call {
	q := loneCalls.Get().(*call)
	q.Kind, q.Key, q.item = kind, key, &q.own
	return q
}

// free forgets all that a call refers to. Nobody may use it any more, the engine included.
func (q *call) free() {
	*q = call{}
	loneCalls.Put(q)
}

// retryable reports that req did not happen and another session or map may do.
func retryable(err error) bool {
	return errors.Is(err, engine.ErrLease) && !errors.Is(err, ErrUnknownOutcome) ||
		errors.Is(err, engine.ErrMapChanged)
}

// do performs one call, and leaves its error in it, as the caller of the API gets it.
func (c *Client) do(ctx context.Context, q *call) error {
	q.ops[0] = &q.Op
	q.Asker = q
	if c.o.Events == nil {
		c.perform(ctx, q.ops[:])
		return q.Err
	}
	ctx, end := c.begin(ctx, q)
	c.perform(ctx, q.ops[:])
	end()
	return q.Err
}

// perform performs calls together, which are the Askers of ops, until each has an error or none, as
// the caller of the API gets it: what did not happen since its session was lost is tried again in the next one, for
// OpTimeout from the first time.
func (c *Client) perform(ctx context.Context, ops []*engine.Op) {
	if c.hot != nil {
		for _, op := range ops {
			c.countHot(op.Key)
		}
	}
	for until := int64(0); ; {
		s, err := c.live(ctx)
		if err == nil && ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		if err != nil {
			fail(ops, err)
			return
		}
		for _, op := range ops {
			if op.Lane == 0 {
				s.hashKey(op.Asker.(*call))
			}
		}
		s.core.Do(ctx, ops)
		var again []*engine.Op
		for _, op := range ops {
			switch {
			case op.Err == nil:
			case retryable(op.Err) && c.patient(&until):
				again = append(again, op)
			default:
				op.Err = c.public(s, op.Asker.(*call))
			}
		}
		if len(again) == 0 {
			return
		}
		if err := c.pause(ctx); err != nil {
			fail(again, err)
			return
		}
		ops = again
	}
}

// fail ends ops, of which nothing has been begun.
func fail(ops []*engine.Op, err error) {
	for _, op := range ops {
		op.Err = err
	}
}

// patient reports whether an operation that did not happen may be tried again:
// for OpTimeout from the first time. until is its memory, zero at first.
func (c *Client) patient(until *int64) bool {
	now := engine.Nanos()
	if *until == 0 {
		*until = now + int64(c.o.OpTimeout)
	}
	return now < *until
}

// pause waits a moment before an operation is tried again.
func (c *Client) pause(ctx context.Context) error {
	inside.WillWait(ctx)
	select {
	case <-time.After(2 * time.Millisecond):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-c.ctx.Done():
		return ErrClosed
	}
}

// public adds what the caller needs to know to an error: which operation, which
// key, why.
func (c *Client) public(s *sess, q *call) error {
	err := q.Err
	var tooLarge *engine.LimitError
	switch {
	case errors.Is(err, ErrNotFound), errors.Is(err, ErrExists), errors.Is(err, ErrConflict),
		errors.Is(err, index.ErrUnchanged), errors.Is(err, errDelete), errors.Is(err, ErrNotInteger),
		errors.Is(err, ErrWrongType), errors.Is(err, ErrOverflow), errors.Is(err, io.ErrShortBuffer):
		return err // answers stay bare and cheap
	case errors.Is(err, ErrUnknownOutcome):
	case errors.As(err, new(*layout.CorruptError)):
		err = fmt.Errorf("%w: %w", ErrCorrupt, err)
	case errors.Is(err, index.ErrTier):
		err = fmt.Errorf("%w: %w", ErrUnavailable, err)
	case errors.As(err, &tooLarge):
		return &inside.TooLargeError{Want: tooLarge.Want}
	case errors.Is(err, engine.ErrNoConn), errors.Is(err, engine.ErrTimeout), errors.Is(err, engine.ErrLease),
		errors.Is(err, engine.ErrBuffer), errors.Is(err, engine.ErrMapChanged):
		s.mu.Lock()
		for n, e := range s.mu.connErr {
			if e != nil {
				err = fmt.Errorf("%w; memory node %d: %w", err, n, e)
				break
			}
		}
		s.mu.Unlock()
		err = fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	return fmt.Errorf("%v %q: %w", q.Kind, shortKey(q.Key), err)
}

// shortKey is a key for error messages: hostile keys are long.
func shortKey(k []byte) []byte {
	if len(k) > 64 {
		return append(bytes.Clone(k[:61]), "..."...)
	}
	return k
}

// Take is engine.Asker.
func (q *call) Take(r *layout.Record, parts [][]byte) {
	switch {
	case q.page != nil:
		q.page()
	case q.Kind == index.Raw:
		q.item.Value = bytes.Clone(r.Value)
	case q.Kind == index.Prepare && q.typed && r.Version != 0:
		if q.item.take(r, nil); r.Flags&layout.FlagManifest != 0 || r.Stub {
			q.item.Value = nil
		}
	case q.Kind == index.Prepare:
		q.item.Expires = expires(r.Expiry) // of a key that is kept
	case q.Kind == index.Exists, q.Kind == index.Pin:
		*q.item = Item{Version: r.Version, Expires: expires(r.Expiry)}
	case q.Kind != index.Get:
	case r.Flags.TypeOf() != 0 && !q.typed:
		isThere(q.dst, r.Value, 0)
		q.Err = ErrWrongType
	case q.view != nil:
		q.view.take(q, r, parts)
	case q.Part != nil:
		q.takePart(r)
	case q.into:
		q.takeInto(r, parts)
	case parts == nil:
		q.item.take(r, q.dst)
	default:
		*q.item = Item{Version: r.Version, Expires: expires(r.Expiry), Type: Type(r.Flags.TypeOf())}
		q.item.Value, q.item.Flags, q.item.Note = splitTail(joined(q.dst, parts), r.Flags)
	}
}

// joined is parts in one piece, in dst's memory if that is long enough.
func joined(dst []byte, parts [][]byte) []byte {
	n := 0
	for _, p := range parts {
		n += len(p)
	}
	whole := dst[:0]
	if cap(whole) < n {
		whole = make([]byte, 0, n)
	}
	for _, p := range parts {
		whole = append(whole, p...)
	}
	return whole
}

// Into is engine.Filler. It gives GetInto's memory. For other GETs it gives that to which the value is to be appended,
// if there is room for nearly as much, else new memory. A value is at most a sixteenth shorter than n.
func (q *call) Into(n int) []byte {
	if q.into || q.Part != nil && q.view == nil {
		return q.dst[:min(n, len(q.dst))]
	}
	if cap(q.dst) < n-n/16-layout.UnitSize {
		q.dst = make([]byte, n)
	}
	return q.dst[:min(n, cap(q.dst))]
}

// isThere reports whether v is in dst already, and clears what is behind its first keep bytes then.
func isThere(dst, v []byte, keep int) bool {
	return len(v) > 0 && unsafe.SliceData(v) == unsafe.SliceData(dst) && clearFrom(v, keep)
}

// clearFrom stays out of the way of short values.
//
//go:noinline
func clearFrom(v []byte, keep int) bool {
	clear(v[keep:])
	return true
}

// takeInto copies the value into the caller's memory, unless it is there. The record is the lane's, and is reused when
// Take returns.
func (q *call) takeInto(r *layout.Record, parts [][]byte) {
	if q.n = 0; parts == nil {
		v, _, _ := splitTail(r.Value, r.Flags)
		if q.n = len(v); q.n <= len(q.dst) && !isThere(q.dst, r.Value, q.n) {
			copy(q.dst, v)
		}
	} else {
		for _, p := range parts {
			q.n += len(p)
		}
		q.n = max(0, q.n-r.Flags.TailLen())
		for at := 0; at < q.n && q.n <= len(q.dst); parts = parts[1:] {
			at += copy(q.dst[at:q.n], parts[0])
		}
	}
	if q.told {
		*q.item = Item{Version: r.Version, Expires: expires(r.Expiry)}
		_, q.item.Flags, q.item.Note = splitTail(tailOf(r, parts), r.Flags)
	}
	if q.n > len(q.dst) {
		q.Err = io.ErrShortBuffer
		return
	}
	if q.told {
		q.item.Value = q.dst[:q.n]
	}
}

// tailOf is the last bytes of a value, which has parts if it is in chunks: those of its tail.
func tailOf(r *layout.Record, parts [][]byte) []byte {
	if parts == nil {
		return r.Value
	}
	n := r.Flags.TailLen()
	tail := make([]byte, n)
	for i := len(parts) - 1; i >= 0 && n > 0; i-- {
		p := parts[i][max(0, len(parts[i])-n):]
		copy(tail[n-len(p):], p)
		n -= len(p)
	}
	return tail
}

// expires is an expiry as the API has it; the zero time is never.
func expires(ms uint64) time.Time {
	if ms == 0 {
		return time.Time{}
	}
	return time.UnixMilli(int64(ms))
}

// expiry is when a TTL ends, in Unix ms by this machine's clock; 0 is never.
func expiry(ttl time.Duration) (uint64, error) {
	if ttl < 0 {
		return 0, fmt.Errorf("%w: TTL %v, want >= 0", ErrInvalid, ttl)
	}
	if ttl == 0 {
		return 0, nil
	}
	return uint64(time.Now().Add(ttl).UnixMilli()), nil
}
