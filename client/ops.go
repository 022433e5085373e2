package client

import (
	"context"
	"fmt"
	"math"
	"strconv"
	"time"

	"github.com/kvd-project/kvd/index"
)

// Get returns the value of key, or ErrNotFound. With a remembered slot word it
// costs one round trip of two READs.
func (c *Client) Get(ctx context.Context, key []byte) (Item, error) {
	if err := checkKey(key); err != nil {
		return Item{}, err
	}
	q := newCall(index.Get, key)
	defer q.free()
	err := c.do(ctx, q)
	return q.own, err
}

// GetInto reads the value of key into dst and returns its length. If dst is too short it returns the length needed and
// io.ErrShortBuffer. dst is the Client's until GetInto returns. A byte of it behind the value is then zero or what it
// was before; after an error that holds for each byte. A value of 8 KiB or more goes to dst in one pass. On the shm
// provider GetInto allocates nothing, unless the value is in chunks.
func (c *Client) GetInto(ctx context.Context, key, dst []byte) (int, error) {
	if err := checkKey(key); err != nil {
		return 0, err
	}
	q := newCall(index.Get, key)
	defer q.free()
	q.dst, q.into = dst, true
	err := c.do(ctx, q)
	return q.n, err
}

// Put sets key to value and returns the new version.
func (c *Client) Put(ctx context.Context, key, value []byte, o PutOptions) (uint64, error) {
	return c.put(ctx, key, value, o, index.Always, 0)
}

// PutIfAbsent is Put, or ErrExists if key is present.
func (c *Client) PutIfAbsent(ctx context.Context, key, value []byte, o PutOptions) (uint64, error) {
	return c.put(ctx, key, value, o, index.IfAbsent, 0)
}

// CompareAndSwap is Put if key has the version given; else ErrConflict, or
// ErrNotFound if it is absent.
func (c *Client) CompareAndSwap(ctx context.Context, key []byte, version uint64, value []byte, o PutOptions) (
	uint64, error) {
	return c.put(ctx, key, value, o, index.IfVersion, version)
}

// put is all of Put, PutIfAbsent and CompareAndSwap: they differ in what must be there before.
func (c *Client) put(ctx context.Context, key, value []byte, o PutOptions, cond index.Cond, version uint64) (
	uint64, error) {
	if err := checkValue(key, value, c.MaxValueLen()); err != nil {
		return 0, err
	}
	exp, err := expiry(o.TTL)
	if err != nil {
		return 0, err
	}
	pinned, err := c.pinnedUntil(o.PinUntil, exp)
	if err != nil {
		return 0, err
	}
	if c.o.ReadOnly {
		return 0, errReadOnly
	}
	q := newCall(index.Put, key)
	defer q.free()
	q.Value, q.Flags = withTail(value, o.Flags, 0, Plain)
	q.Cond, q.IfVersion, q.Expiry, q.Pinned = cond, version, exp, pinned
	if err := c.do(ctx, q); err != nil {
		return 0, err
	}
	return q.Version, nil
}

var errReadOnly = fmt.Errorf("%w: the session is read-only", ErrInvalid)

// Delete removes key, or returns ErrNotFound. If a connection broke meanwhile and the key has gone, the outcome is
// Unknown. Another Delete of this Client, or an eviction, may have been first.
func (c *Client) Delete(ctx context.Context, key []byte) error {
	return c.delete(ctx, key, index.Always, 0)
}

// DeleteVersion is Delete if key has the version given, else ErrConflict.
func (c *Client) DeleteVersion(ctx context.Context, key []byte, version uint64) error {
	return c.delete(ctx, key, index.IfVersion, version)
}

// delete is Delete and DeleteVersion.
func (c *Client) delete(ctx context.Context, key []byte, cond index.Cond, version uint64) error {
	if err := checkKey(key); err != nil {
		return err
	}
	if c.o.ReadOnly {
		return errReadOnly
	}
	q := newCall(index.Delete, key)
	defer q.free()
	q.Cond, q.IfVersion = cond, version
	return c.do(ctx, q)
}

// Incr adds delta to the decimal integer that key holds (absent counts as 0) and
// returns the sum. The expiry stays.
func (c *Client) Incr(ctx context.Context, key []byte, delta int64) (int64, error) {
	var sum int64
	buf := make([]byte, 0, 20)
	_, err := c.Update(ctx, key, func(cur Item, present bool) (Change, error) {
		var old int64
		if present {
			var err error
			if old, err = strconv.ParseInt(string(cur.Value), 10, 64); err != nil {
				return Change{}, ErrNotInteger
			}
		}
		if delta > 0 && old > math.MaxInt64-delta || delta < 0 && old < math.MinInt64-delta {
			return Change{}, ErrOverflow
		}
		sum = old + delta
		buf = strconv.AppendInt(buf[:0], sum, 10)
		return Change{Value: buf, Expires: cur.Expires, Flags: cur.Flags, Note: cur.Note}, nil
	})
	return sum, err
}

// Touch sets key's time to live, 0 for none, or returns ErrNotFound. Its version
// changes.
func (c *Client) Touch(ctx context.Context, key []byte, ttl time.Duration) error {
	exp, err := expiry(ttl)
	if err != nil {
		return err
	}
	ops := [1]Op{{Kind: OpUpdate, Key: key, Typed: true, keeps: true}}
	ops[0].Update = func(cur Item, present bool) (Change, error) {
		if !present {
			return Change{}, ErrNotFound
		}
		return Change{Value: cur.Value, Expires: expires(exp), Flags: cur.Flags, Note: cur.Note, Type: cur.Type}, nil
	}
	c.Do(ctx, ops[:])
	return ops[0].Err
}
