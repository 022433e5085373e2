package client

import (
	"context"
	"fmt"
	"io"
	"math"
	"strconv"
	"time"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/internal/layout"
)

type modifyFunc = func(cur *layout.Record) (value []byte, expiry uint64, err error)

// Get returns the value of key, or ErrNotFound. With a remembered slot word it
// costs one round trip of two READs.
func (c *Client) Get(ctx context.Context, key []byte) (Item, error) {
	if err := checkKey(key); err != nil {
		return Item{}, err
	}
	if d, q := c.quick(ctx, false, key, nil, 0, 0); q != nil {
		it := itemOf(&q.Record, nil)
		d.handOver()
		return it, nil
	}
	req := call{kind: index.Get, key: key, take: takeItem}
	err := c.do(ctx, &req)
	return req.item, err
}

// GetInto copies the value of key to dst and returns its length. If dst is too
// short it returns the length needed and io.ErrShortBuffer; dst's content is then
// undefined. On the shm provider it allocates nothing.
func (c *Client) GetInto(ctx context.Context, key, dst []byte) (int, error) {
	if err := checkKey(key); err != nil {
		return 0, err
	}
	if d, q := c.quick(ctx, false, key, nil, 0, 0); q != nil {
		v, _ := splitFlags(q.Record.Value, q.Record.Flags)
		n := len(v)
		copied := copy(dst, v)
		d.handOver()
		if copied < n {
			return n, io.ErrShortBuffer
		}
		return n, nil
	}
	req := call{kind: index.Get, key: key, dst: dst, take: takeInto}
	err := c.do(ctx, &req)
	return req.n, err
}

// quick performs a cached GET or PUT at once if the key's lane is free and its provider
// allows. Unless q is nil the caller then leads the lane, and hands it over when it is
// done with q.
func (c *Client) quick(ctx context.Context, put bool, key, value []byte, flags layout.RecordFlags, expiry uint64) (d *laneDriver, q *engine.Quick) {
	s := c.sess.Load()
	if !c.mayBeQuick(ctx, s) {
		return nil, nil
	}
	d, hash, check := s.place(key)
	if !d.tryLeadSoon() {
		return nil, nil
	}
	q = &d.quick[0]
	q.Put, q.Key, q.Value, q.Flags, q.Expiry, q.Hash, q.Check = put, key, value, flags, expiry, hash, check
	d.l.Quick(d.quick[:])
	if !q.OK {
		d.handOver()
		return nil, nil
	}
	return d, q
}

// mayBeQuick reports whether s takes operations that nobody is told of.
func (c *Client) mayBeQuick(ctx context.Context, s *sess) bool {
	return !s.dead.Load() && !s.shut.Load() && ctx.Err() == nil && c.o.Events == nil
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
func (c *Client) CompareAndSwap(ctx context.Context, key []byte, version uint64, value []byte, o PutOptions) (uint64, error) {
	return c.put(ctx, key, value, o, index.IfVersion, version)
}

func (c *Client) put(ctx context.Context, key, value []byte, o PutOptions, cond index.Cond, version uint64) (uint64, error) {
	if err := checkValue(key, value); err != nil {
		return 0, err
	}
	exp, err := expiry(o.TTL)
	if err != nil {
		return 0, err
	}
	if c.o.ReadOnly {
		return 0, errReadOnly
	}
	value, flags := withFlags(value, o.Flags)
	if cond == index.Always {
		if d, q := c.quick(ctx, true, key, value, flags, exp); q != nil {
			version, err := d.quickPut(q)
			d.handOver()
			return version, err
		}
	}
	req := call{kind: index.Put, cond: cond, key: key, value: value, flags: flags, ifVersion: version, expiry: exp}
	if err := c.do(ctx, &req); err != nil {
		return 0, err
	}
	return req.version, nil
}

// quickPut is the answer of a Quick; the leader's.
func (d *laneDriver) quickPut(q *engine.Quick) (version uint64, err error) {
	if q.Expiry != 0 {
		d.expires(q.Expiry, q.Hash)
	}
	if q.Err != nil {
		return 0, fmt.Errorf("%v %q: %w", index.Put, shortKey(q.Key), q.Err)
	}
	return q.Version, nil
}

var errReadOnly = fmt.Errorf("%w: the session is read-only", ErrInvalid)

// Delete removes key, or returns ErrNotFound.
func (c *Client) Delete(ctx context.Context, key []byte) error {
	return c.delete(ctx, call{kind: index.Delete, key: key})
}

// DeleteVersion is Delete if key has the version given, else ErrConflict.
func (c *Client) DeleteVersion(ctx context.Context, key []byte, version uint64) error {
	return c.delete(ctx, call{kind: index.Delete, key: key, cond: index.IfVersion, ifVersion: version})
}

func (c *Client) delete(ctx context.Context, req call) error {
	if err := checkKey(req.key); err != nil {
		return err
	}
	if c.o.ReadOnly {
		return errReadOnly
	}
	return c.do(ctx, &req)
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
		return Change{Value: buf, Expires: cur.Expires, Flags: cur.Flags}, nil
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
	_, err = c.Update(ctx, key, func(cur Item, present bool) (Change, error) {
		if !present {
			return Change{}, ErrNotFound
		}
		return Change{Value: cur.Value, Expires: expires(exp), Flags: cur.Flags}, nil
	})
	return err
}
