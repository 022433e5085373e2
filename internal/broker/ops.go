package broker

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"math"
	"strconv"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/ring"
	"github.com/kvd-project/kvd/rdma"
)

// perform does what Do does not take. The caller ends the use of its memory.
func (q *queue) perform(ctx context.Context, it *item) *ring.Completion {
	s, cl := &it.sub, q.c.client
	x := &ring.Completion{Tag: s.Tag}
	if op, ok := it.op(); ok {
		return q.lone(ctx, it, op)
	}
	var err error
	switch s.Op {
	case ring.OpExists:
		var in client.Info
		_, in, err = cl.GetRange(ctx, it.key, 0, nil)
		x.Length, x.Version, x.Expires = uint64(in.Size), in.Version, unixMS(in.Expires)
	case ring.OpGetRange:
		var in client.Info
		var n int
		if s.Word > 1<<62 {
			return q.failure(s.Tag, ring.No, ring.Argument, "the offset is too large")
		}
		n, in, err = cl.GetRange(ctx, it.key, int64(s.Word), it.buf)
		x.Length, x.Version, x.Expires = uint64(n), in.Version, unixMS(in.Expires)
		q.c.t.stats.Bytes.Add(uint64(n))
	case ring.OpScan:
		return q.scan(ctx, it)
	case ring.OpView:
		return q.view(ctx, it)
	case ring.OpViewRelease:
		return q.releaseView(s)
	case ring.OpPutBegin, ring.OpPutAppend, ring.OpPutCommit, ring.OpPutAbort:
		return q.stream(ctx, it)
	case ring.OpDeletePrefix:
		x.Version, err = deletePrefix(ctx, cl, it.key)
		if err != nil {
			no := q.failed(s, err, 0)
			if x.Version > 0 {
				no.Outcome = ring.Unknown // of some keys it happened
			}
			no.Version = x.Version
			return no
		}
	case ring.OpCancel:
		q.mu.Lock()
		if tag := uint32(s.Word); uint64(tag) == s.Word && q.running[tag] != nil {
			q.running[tag]()
			delete(q.running, tag)
		}
		q.mu.Unlock()
	case ring.OpNop:
	default:
		return q.failure(s.Tag, ring.No, ring.Unsupported, "this broker cannot do that")
	}
	if err != nil {
		return q.failed(s, err, 0)
	}
	return x
}

// lone is Do for one item, which has its own timeout, or is copied first.
func (q *queue) lone(ctx context.Context, it *item, op client.Op) *ring.Completion {
	if it.sub.Op == ring.OpPut && it.m != nil && q.c.foreign {
		select {
		case q.c.t.copies <- struct{}{}:
			defer func() { <-q.c.t.copies }()
		case <-ctx.Done():
			return q.failed(&it.sub, ctx.Err(), 0)
		}
		op.Value = bytes.Clone(op.Value)
	}
	ops := [1]client.Op{op}
	q.c.client.Do(ctx, ops[:])
	m := it.m
	it.m = nil // answer would drop it, and the caller does
	x := q.answer(it, &ops[0])
	it.m = m
	return x
}

// touched gives a key another time to live, or none.
func touched(s *ring.Submission) client.UpdateFunc {
	var expires time.Time
	if s.TTL != 0 {
		expires = time.Now().Add(ttl(s))
	}
	return func(cur client.Item, present bool) (client.Change, error) {
		if !present {
			return client.Change{}, client.ErrNotFound
		}
		return client.Change{Value: cur.Value, Expires: expires, Flags: cur.Flags, Note: cur.Note, Type: cur.Type}, nil
	}
}

// added adds delta to a number in decimal digits; an absent one is 0. Its sum is the last call's.
func added(delta int64, sum *int64) client.UpdateFunc {
	return func(cur client.Item, present bool) (client.Change, error) {
		old := int64(0)
		if present {
			var err error
			if old, err = strconv.ParseInt(string(cur.Value), 10, 64); err != nil {
				return client.Change{}, client.ErrNotInteger
			}
		}
		if delta > 0 && old > math.MaxInt64-delta || delta < 0 && old < math.MinInt64-delta {
			return client.Change{}, client.ErrOverflow
		}
		*sum = old + delta
		return client.Change{Value: strconv.AppendInt(nil, *sum, 10), Expires: cur.Expires, Flags: cur.Flags,
			Note: cur.Note}, nil
	}
}

// deletePrefix deletes all keys that begin with a prefix, and returns how many these were.
func deletePrefix(ctx context.Context, cl *client.Client, prefix []byte) (n uint64, err error) {
	var keys [][]byte
	flush := func() error {
		var errs []error
		for _, r := range cl.MultiDelete(ctx, keys) {
			switch {
			case r.Err == nil:
				n++
			case !errors.Is(r.Err, client.ErrNotFound):
				errs = append(errs, r.Err)
			}
		}
		keys = keys[:0]
		if len(errs) > 0 {
			return errs[0]
		}
		return nil
	}
	match := func(key []byte) bool { return bytes.HasPrefix(key, prefix) }
	for kv, err := range cl.Scan(ctx, client.ScanOptions{Match: match, KeysOnly: true}) {
		if err != nil {
			return n, errors.Join(err, flush())
		}
		if keys = append(keys, kv.Key); len(keys) == 256 {
			if err := flush(); err != nil {
				return n, err
			}
		}
	}
	return n, flush()
}

// maxScans is how many scans a connection may have under way; the oldest is forgotten for another.
const maxScans = 16

// scans are a connection's.
type scans struct {
	last uint64
	all  []*scanning // oldest first
}

// scanning is a scan between two calls.
type scanning struct {
	number uint64
	at     client.Cursor
	left   [][]byte // keys that were found and did not fit
}

// takeScan finds a scan, and takes it away until it is put back: a second call with its cursor is a mistake.
func (c *conn) takeScan(number uint64) *scanning {
	c.mu.Lock()
	defer c.mu.Unlock()
	l := &c.mu.scans
	if number == 0 {
		l.last++
		return &scanning{number: l.last}
	}
	for i, x := range l.all {
		if x.number == number {
			l.all = append(l.all[:i], l.all[i+1:]...)
			return x
		}
	}
	return nil
}

func (c *conn) putScan(x *scanning) {
	c.mu.Lock()
	defer c.mu.Unlock()
	l := &c.mu.scans
	if len(l.all) == maxScans {
		l.all = append(l.all[:0], l.all[1:]...)
	}
	l.all = append(l.all, x)
}

// scan gives keys that begin with a prefix, as far as they fit.
func (q *queue) scan(ctx context.Context, it *item) *ring.Completion {
	s := &it.sub
	if len(it.buf) < 2+ring.MaxKey {
		return q.failure(s.Tag, ring.No, ring.Argument, "a scan needs room for the longest key: 1026 bytes")
	}
	x := q.c.takeScan(s.Word)
	if x == nil {
		return q.failure(s.Tag, ring.No, ring.Stale, "this scan is over, or was forgotten for others")
	}
	out := it.buf[:0]
	add := func(key []byte) bool {
		if len(key) > ring.MaxKey {
			return true // no program could name it
		}
		if len(out)+2+len(key) > cap(out) {
			return false
		}
		out = binary.LittleEndian.AppendUint16(out, uint16(len(key)))
		out = append(out, key...)
		return true
	}
	for len(x.left) > 0 && add(x.left[0]) {
		x.left = x.left[1:]
	}
	match := func(key []byte) bool { return bytes.HasPrefix(key, it.key) }
	var err error
	for len(x.left) == 0 && !x.at.Done && err == nil {
		o := client.ScanOptions{Cursor: &x.at, Count: 1, Match: match, KeysOnly: true}
		for kv, e := range q.c.client.Scan(ctx, o) {
			if err = e; err != nil {
				break
			}
			if len(x.left) > 0 || !add(kv.Key) {
				x.left = append(x.left, kv.Key)
			}
		}
		if len(out) > cap(out)/2 {
			break
		}
	}
	if err != nil {
		clear(out)
		return q.failed(s, err, 0)
	}
	c := &ring.Completion{Tag: s.Tag, Length: uint64(len(out))}
	if len(x.left) > 0 || !x.at.Done {
		q.c.putScan(x)
		c.Version = x.number
	}
	return c
}

// failed is the completion of an operation that failed. size is that of a value that did not fit.
func (q *queue) failed(s *ring.Submission, err error, size int) *ring.Completion {
	code := codeOf(err)
	if errors.Is(err, context.Canceled) && q.c.ctx.Err() == nil {
		code = ring.Cancelled
	}
	if code == ring.NotFound && s.Op == ring.OpPut && s.Flags == ring.FlagIfPresent {
		code = ring.Condition
	}
	outcome := ring.No
	if client.Outcome(err) == rdma.Unknown && !reads(s.Op) {
		outcome = ring.Unknown
	}
	if code == ring.ShortBuffer {
		return &ring.Completion{Tag: s.Tag, Outcome: outcome, Code: code, Length: uint64(size)}
	}
	return q.failure(s.Tag, outcome, code, err.Error())
}

func reads(op ring.Op) bool {
	switch op {
	case ring.OpGet, ring.OpExists, ring.OpScan, ring.OpGetRange, ring.OpView:
		return true
	}
	return false
}

// failure is a completion with a text, which goes to the slot.
func (q *queue) failure(tag uint32, outcome ring.Outcome, code ring.Code, text string) *ring.Completion {
	n := copy(q.server.Slot(tag), text)
	return &ring.Completion{Tag: tag, Outcome: outcome, Code: code, Length: uint64(n)}
}

// codeOf is the reason of an error of package client.
func codeOf(err error) ring.Code {
	for _, x := range []struct {
		err  error
		code ring.Code
	}{
		{client.ErrNotFound, ring.NotFound}, {client.ErrExists, ring.Condition}, {client.ErrConflict, ring.Condition},
		{io.ErrShortBuffer, ring.ShortBuffer}, {client.ErrTooLarge, ring.TooLarge},
		{client.ErrWrongType, ring.WrongType}, {client.ErrNotInteger, ring.WrongType},
		{client.ErrOverflow, ring.WrongType}, {client.ErrFull, ring.Full},
		{client.ErrForbidden, ring.Denied}, {client.ErrCorrupt, ring.Corrupt},
		{client.ErrNoPins, ring.Unsupported}, {client.ErrInvalid, ring.Argument},
		{client.ErrViewExpired, ring.ViewExpired}, {client.ErrTooManyViews, ring.Busy},
		{context.DeadlineExceeded, ring.Timeout},
		{context.Canceled, ring.Closed}, {client.ErrUnavailable, ring.Unavailable},
		{client.ErrClosed, ring.Unavailable},
		{client.ErrUnknownOutcome, ring.Unavailable}, {client.ErrInterrupted, ring.Unavailable},
		{errClosing, ring.Closed},
	} {
		if errors.Is(err, x.err) {
			return x.code
		}
	}
	return ring.Internal
}
