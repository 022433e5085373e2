package client

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/internal/layout"
)

func checkKey(key []byte) error {
	if len(key) == 0 || len(key) > MaxKeyLen {
		return fmt.Errorf("%w: key of %d bytes, want 1..%d", ErrInvalid, len(key), MaxKeyLen)
	}
	return nil
}

func checkValue(key, value []byte) error {
	if err := checkKey(key); err != nil {
		return err
	}
	if len(value) > MaxValueLen {
		return fmt.Errorf("%w: value of %d bytes, at most %d", ErrInvalid, len(value), MaxValueLen)
	}
	return nil
}

func (s *sess) hash(key []byte) uint64 { return xxh3.Hash128Seed(key, s.seed.Load()).Lo }

// place hashes a key and returns its lane.
func (s *sess) place(key []byte) (d *laneDriver, hash, check uint64) {
	h := xxh3.Hash128Seed(key, s.seed.Load())
	return s.laneOf(h.Hi), h.Lo, h.Hi
}

func (s *sess) laneOf(check uint64) *laneDriver { return s.lanes[s.laneNumber(check)] }

func (s *sess) laneNumber(check uint64) int { return int((check >> 32) * uint64(len(s.lanes)) >> 32) }

// hashKey fills in the hashes and returns the key's lane.
func (s *sess) hashKey(c *call) (d *laneDriver) {
	d, c.hash, c.check = s.place(c.key)
	return d
}

// retryable reports that req did not happen and another session or map may do.
func retryable(err error) bool {
	return errors.Is(err, engine.ErrLease) && !errors.Is(err, ErrUnknownOutcome)
}

// do performs one call.
func (c *Client) do(ctx context.Context, req *call) error {
	if c.o.Events != nil {
		ctx, end := c.begin(ctx, req)
		req.err = c.doOnce(ctx, req)
		end()
		return req.err
	}
	return c.doOnce(ctx, req)
}

func (c *Client) doOnce(ctx context.Context, req *call) error {
	if err := ctx.Err(); err != nil {
		return context.Cause(ctx)
	}
	req.limit = MemoryLimit(ctx)
	for until := int64(0); ; {
		s, err := c.live(ctx)
		if err != nil {
			return err
		}
		s.hashKey(req).exec(ctx, req)
		if req.err == nil {
			return nil
		}
		if !retryable(req.err) || !c.patient(&until) {
			return c.public(s, req)
		}
		if err := c.pause(ctx); err != nil {
			return err
		}
		req.err = nil
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
	WillWait(ctx)
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
func (c *Client) public(s *sess, req *call) error {
	err := req.err
	var tooLarge *engine.LimitError
	switch {
	case errors.Is(err, ErrNotFound), errors.Is(err, ErrExists), errors.Is(err, ErrConflict),
		errors.Is(err, index.ErrUnchanged), errors.Is(err, errDelete), errors.Is(err, ErrNotInteger), errors.Is(err, ErrOverflow), errors.Is(err, io.ErrShortBuffer):
		return err // answers stay bare and cheap
	case errors.Is(err, ErrUnknownOutcome):
	case errors.As(err, new(*layout.CorruptError)):
		err = fmt.Errorf("%w: %w", ErrCorrupt, err)
	case errors.As(err, &tooLarge):
		return &TooLargeError{Want: tooLarge.Want}
	case errors.Is(err, engine.ErrNoConn), errors.Is(err, engine.ErrTimeout), errors.Is(err, engine.ErrLease),
		errors.Is(err, engine.ErrBuffer):
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
	return fmt.Errorf("%v %q: %w", req.kind, shortKey(req.key), err)
}

func shortKey(k []byte) []byte {
	if len(k) > 64 {
		return append(bytes.Clone(k[:61]), "..."...)
	}
	return k
}

func takeItem(c *call, o *index.Op) {
	if o.Kind == index.Modify {
		return
	}
	if o.Parts() == nil {
		c.item = itemOf(&o.Record, c.dst)
		return
	}
	n := 0
	for _, p := range o.Parts() {
		n += len(p)
	}
	whole := c.dst[:0]
	if cap(whole) < n {
		whole = make([]byte, 0, n)
	}
	for _, p := range o.Parts() {
		whole = append(whole, p...)
	}
	c.item = Item{Version: o.Record.Version, Expires: expires(o.Record.Expiry)}
	c.item.Value, c.item.Flags = splitFlags(whole, o.Record.Flags)
}

func takeInto(c *call, o *index.Op) {
	if o.Parts() == nil {
		v, _ := splitFlags(o.Record.Value, o.Record.Flags)
		c.n = len(v)
		if copy(c.dst, v) < c.n {
			c.err = io.ErrShortBuffer
		}
		return
	}
	c.n = 0
	for _, p := range o.Parts() {
		copy(c.dst[min(c.n, len(c.dst)):], p)
		c.n += len(p)
	}
	if o.Record.Flags&layout.FlagUser != 0 {
		c.n -= 4
	}
	if c.n > len(c.dst) {
		c.err = io.ErrShortBuffer
	}
}

func takeRaw(c *call, o *index.Op) { c.item.Value = bytes.Clone(o.Record.Value) }

func expires(ms uint64) time.Time {
	if ms == 0 {
		return time.Time{}
	}
	return time.UnixMilli(int64(ms))
}

func expiry(ttl time.Duration) (uint64, error) {
	if ttl < 0 {
		return 0, fmt.Errorf("%w: TTL %v, want >= 0", ErrInvalid, ttl)
	}
	if ttl == 0 {
		return 0, nil
	}
	return uint64(time.Now().Add(ttl).UnixMilli()), nil
}
