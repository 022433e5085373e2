package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/inside"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/units"
)

const (
	// putWindow is how many chunks a PutFrom has in memory.
	putWindow = 4
	// putTries is how often a PutFrom begins anew if its reader can.
	putTries = 8
	// maxStreamed bounds what values of all PutFroms of a Client take in the store before any word names them, bytes.
	maxStreamed = MaxValueLen
	// maxIdleReads is how many Reads in a row may bring nothing.
	maxIdleReads = 100
)

// PutFrom is Put of the size bytes that r gives, up to its end. It needs memory of some 8 MiB, however long the value
// is. Nobody sees any of it before all of it was read; a TTL begins then, and an older value keeps its memory until
// then. After an error whose Outcome is No nothing has happened. r may be slow: OpTimeout bounds each 8 MiB, and the
// end.
//
// All that can be refused without the value is refused before r is read. It is an error if r fails, has fewer bytes
// (io.ErrUnexpectedEOF) or has more (ErrInvalid). The store may take back memory meanwhile, or the session may be lost.
// Then r is read again from where it was, if it is an io.Seeker; else the error is ErrInterrupted. The PutFroms of a
// Client have values of 512 MiB together under way at most, and others wait. A short value is read whole.
func (c *Client) PutFrom(ctx context.Context, key []byte, r io.Reader, size int64, o PutOptions) (uint64, error) {
	if err := checkKey(key); err != nil {
		return 0, err
	}
	if size < 0 {
		return 0, fmt.Errorf("%w: size %d", ErrInvalid, size)
	}
	exp, err := expiry(o.TTL)
	pinned, pinErr := c.pinnedUntil(o.PinUntil, exp)
	if err = errors.Join(CheckLen(size, c.MaxValueLen()), err, pinErr); err != nil {
		return 0, err
	}
	if c.o.ReadOnly {
		return 0, errReadOnly
	}
	if layout.RecordLen(len(key), int(size)+layout.MaxTailLen) <= layout.MaxRecordSize {
		v := make([]byte, size)
		if err := ReadAll(ctx, r, v, true); err != nil {
			return 0, fmt.Errorf("put %q: %w", shortKey(key), err)
		}
		return c.Put(ctx, key, v, o)
	}
	if c.hot != nil {
		c.countHot(key)
	}
	if err := c.streams.take(ctx, c.ctx, size); err != nil {
		return 0, err
	}
	defer c.streams.give(size)
	st := &stream{c: c, key: key, r: r, size: size, ttl: o.TTL, pinned: pinned}
	st.tail, st.flags = withTail(nil, o.Flags, 0, Plain)
	if c.o.Events == nil {
		return st.put(ctx)
	}
	ctx, end := c.beginEvent(ctx, OpEvent{Kind: index.Put.String(), Key: key})
	version, err := st.put(ctx)
	end(st.rounds, st.reading, err)
	return version, err
}

// stream is one PutFrom.
type stream struct {
	c     *Client
	key   []byte
	r     io.Reader
	size  int64
	ttl   time.Duration
	flags layout.RecordFlags
	// as in index.Op
	pinned uint32
	tail   []byte // behind the user's value
	buf    []byte
	// for Events
	rounds  int
	reading time.Duration // of r
}

// put tries until the value is there, or r cannot begin anew.
func (s *stream) put(ctx context.Context) (version uint64, err error) {
	seeker, can := s.r.(io.Seeker)
	var from int64
	if can {
		from, err = seeker.Seek(0, io.SeekCurrent)
		can = err == nil // a pipe is an *os.File, too
	}
	d := &index.Draft{Len: uint64(s.size) + uint64(len(s.tail))}
	for try := 1; ; try++ {
		if version, err = s.putOnce(ctx, d); !errors.Is(err, ErrInterrupted) || !can || try == putTries {
			return version, err
		}
		if err := s.c.pause(ctx); err != nil {
			return 0, err
		}
		if _, err := seeker.Seek(from, io.SeekStart); err != nil {
			return 0, fmt.Errorf("put %q: %w", shortKey(s.key), err)
		}
		d = d.Again()
	}
}

// putOnce writes all of the value to d, a window at a time, and links it.
func (s *stream) putOnce(ctx context.Context, d *index.Draft) (uint64, error) {
	x, err := s.c.live(ctx)
	if err != nil {
		return 0, err
	}
	x.core.Gather(d)
	linked := false
	defer func() {
		if linked {
			x.core.Forget(d)
		} else {
			x.core.GiveUp(d)
		}
	}()
	window := min(putWindow*int(x.payload.Load()), int(d.Len))
	if len(s.buf) != window {
		s.buf = make([]byte, window)
	}
	part := &index.Part{Draft: d}
	for at := uint64(0); at < d.Len; at += uint64(window) {
		b := s.buf[:min(uint64(window), d.Len-at)]
		own := b[:min(uint64(len(b)), uint64(max(s.size-int64(at), 0)))] // the rest is the tail, or some of it
		began := time.Now()
		err := ReadAll(ctx, s.r, own, int64(at)+int64(len(own)) == s.size)
		if s.reading += time.Since(began); err != nil {
			return 0, fmt.Errorf("put %q: %w", shortKey(s.key), err)
		}
		if len(own) < len(b) {
			copy(b[len(own):], s.tail[len(s.tail)-int(d.Len-at)+len(own):])
		}
		if _, err := s.do(ctx, x, part, b); err != nil {
			return 0, err
		}
	}
	part.Link = true
	version, err := s.do(ctx, x, part, nil)
	linked = err == nil
	return version, err
}

// do performs a Put of a part.
func (s *stream) do(ctx context.Context, x *sess, part *index.Part, b []byte) (uint64, error) {
	if ctx.Err() != nil {
		return 0, context.Cause(ctx)
	}
	q := newCall(index.Put, s.key)
	defer q.free()
	q.Part, q.Value, q.Flags = part, b, s.flags
	if part.Link { // from now on
		q.Expiry, _ = expiry(s.ttl)
		q.Pinned = s.pinned
	}
	q.ops[0], q.Asker = &q.Op, q
	x.hashKey(q)
	x.core.Do(ctx, q.ops[:])
	s.rounds += int(q.Rounds)
	switch {
	case q.Err == nil:
		return q.Version, nil
	case errors.Is(q.Err, index.ErrDraft), retryable(q.Err):
		return 0, fmt.Errorf("put %q: %w; nothing was stored: %w", shortKey(s.key), ErrInterrupted, q.Err)
	}
	return 0, s.c.public(x, q)
}

// ReadAll fills b from r, and wants r to end there if b is the last of the value. It is what PutFrom says of a reader,
// for other implementations of API.
func ReadAll(ctx context.Context, r io.Reader, b []byte, last bool) error {
	for n, idle := 0, 0; n < len(b); {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		k, err := r.Read(b[n:])
		if idle++; k > 0 {
			idle = 0
		}
		switch n += k; {
		case n == len(b):
		case errors.Is(err, io.EOF):
			return fmt.Errorf("the value's reader ends early: %w", io.ErrUnexpectedEOF)
		case err != nil:
			return fmt.Errorf("the value's reader: %w", err)
		case idle == maxIdleReads:
			return fmt.Errorf("the value's reader: %w", io.ErrNoProgress)
		}
	}
	if !last {
		return nil
	}
	var more [1]byte
	switch n, err := io.ReadFull(r, more[:]); {
	case n > 0:
		return fmt.Errorf("%w: the value's reader has more than the size given", ErrInvalid)
	case !errors.Is(err, io.EOF):
		return fmt.Errorf("the value's reader: %w", err)
	}
	return nil
}

// streams counts the bytes of the values that a Client's PutFroms write.
type streams struct {
	mu struct {
		sync.Mutex
		bytes int64
		freed chan struct{} // for those who wait, closed when there are fewer; else nil
	}
}

// take waits until n bytes more are no more than maxStreamed, or all.
func (s *streams) take(ctx, closing context.Context, n int64) error {
	for {
		s.mu.Lock()
		if s.mu.bytes == 0 || s.mu.bytes+n <= maxStreamed {
			s.mu.bytes += n
			s.mu.Unlock()
			return nil
		}
		if s.mu.freed == nil {
			s.mu.freed = make(chan struct{})
		}
		freed := s.mu.freed
		s.mu.Unlock()
		inside.WillWait(ctx)
		select {
		case <-freed:
		case <-ctx.Done():
			return fmt.Errorf("%s of other values are on their way: %w", units.Bytes(int64(maxStreamed)),
				context.Cause(ctx))
		case <-closing.Done():
			return ErrClosed
		}
	}
}

func (s *streams) give(n int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.bytes -= n; s.mu.freed != nil {
		close(s.mu.freed)
		s.mu.freed = nil
	}
}
