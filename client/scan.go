package client

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"iter"
	"time"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/layout"
)

// Scan gives every pair from o.Cursor on. A scan from the zero Cursor to its end gives every key that is present
// throughout it, at least once. A key that changes or moves meanwhile may be given twice. The order is that of
// hashes. Pairs are read about 200 at a time, while the loop asks for them; each stays the caller's. An error comes
// with a zero KV and ends the scan, except an ErrCorrupt after which the cursor has moved on. That ErrCorrupt says
// what was left out, and the rest follows.
func (c *Client) Scan(ctx context.Context, o ScanOptions) iter.Seq2[KV, error] {
	return func(yield func(KV, error) bool) {
		if c.o.Events == nil {
			c.scan(ctx, o, yield)
			return
		}
		c.scanEvent(ctx, o, yield)
	}
}

func (c *Client) scanEvent(ctx context.Context, o ScanOptions, yield func(KV, error) bool) {
	ctx, end := c.beginEvent(ctx, OpEvent{Kind: index.Scan.String()})
	var failed error
	outside := time.Duration(0) // in the caller's loop
	rounds := c.scan(ctx, o, func(kv KV, err error) bool {
		if err != nil {
			failed = err
		}
		at := time.Now()
		defer func() { outside += time.Since(at) }()
		return yield(kv, err)
	})
	end(rounds, outside, failed)
}

// scan is Scan's loop. rounds are without those of long values, which come by operations of their own.
func (c *Client) scan(ctx context.Context, o ScanOptions, yield func(KV, error) bool) (rounds int) {
	if o.Count < 0 {
		yield(KV{}, fmt.Errorf("%w: Count %d, want >= 0", ErrInvalid, o.Count))
		return 0
	}
	cur := o.Cursor
	if cur == nil {
		cur = new(Cursor)
	}
	given, until := 0, int64(0)
	for !cur.Done && (o.Count == 0 || given < o.Count) {
		page, next, n, err := c.scanPage(ctx, *cur, o)
		rounds += n
		if err != nil && retryable(err) && c.patient(&until) {
			if err = c.pause(ctx); err == nil {
				continue
			}
		}
		// Damage that does not let the cursor move on would come again for ever, so it ends the scan.
		if err != nil && (!errors.Is(err, ErrCorrupt) || next == *cur) {
			yield(KV{}, err)
			return rounds
		}
		for _, kv := range page {
			if !yield(kv, nil) {
				return rounds
			}
		}
		given += len(page)
		*cur, until = next, 0
		if err != nil && !yield(KV{}, err) {
			return rounds
		}
	}
	return rounds
}

// scanPageBytes bounds the records of a page, however long values are.
const scanPageBytes = 1 << 20

// scanPage gives what stands at cur, and what is behind it.
func (c *Client) scanPage(ctx context.Context, cur Cursor, o ScanOptions) (kvs []KV, _ Cursor, rounds int, _ error) {
	s, err := c.live(ctx)
	if err != nil {
		return nil, cur, rounds, err
	}
	var long [][]byte
	next := cur
	p := &index.Page{Segment: cur.Segment, Shard: cur.Shard, From: cur.Slot, Bytes: scanPageBytes, Expired: o.Expired}
	q := &call{}
	q.Kind, q.Lane, q.Hash, q.Scan = index.Scan, 1, cur.Prefix, p
	var left error // what could not be read
	q.Asker, q.page = q, func() {
		if p.Corrupt != nil {
			left = fmt.Errorf("scan: %w: %w", ErrCorrupt, p.Corrupt)
		}
		for i := range p.Found {
			r := &p.Found[i]
			if o.Match != nil && !o.Match(r.Key) {
				continue
			}
			kv := KV{Key: bytes.Clone(r.Key), Version: r.Version, Expires: expires(r.Expiry),
				Type: Type(r.Flags.TypeOf()), Len: lenOf(r)}
			switch {
			case o.KeysOnly:
			case r.Flags&layout.FlagManifest != 0, r.Stub:
				long = append(long, kv.Key)
				continue
			default:
				v, flags, _ := splitTail(r.Value, r.Flags)
				kv.Value, kv.Flags = append(make([]byte, 0, len(v)), v...), flags
			}
			kvs = append(kvs, kv)
		}
		switch {
		case p.Next != 0:
			next.Shard, next.Slot = p.Shard, p.Next
		case p.End:
			next = Cursor{Prefix: s.nextShard(cur.Prefix)}
			next.Done = next.Prefix == 0
		default:
			next.Segment, next.Shard, next.Slot = cur.Segment+1, 0, 0
		}
	}
	if ctx.Err() != nil {
		return nil, cur, 0, context.Cause(ctx)
	}
	q.ops[0] = &q.Op
	s.core.Do(ctx, q.ops[:])
	if rounds = int(q.Rounds); q.Err != nil {
		return nil, cur, rounds, c.public(s, q)
	}
	for _, k := range long { // values in chunks, and in the tier, come by Get
		ops := [1]Op{{Kind: OpGet, Key: k, Typed: true}}
		c.Do(ctx, ops[:])
		it, err := ops[0].Item, ops[0].Err
		switch {
		case errors.Is(err, ErrNotFound):
			continue
		case errors.Is(err, ErrCorrupt):
			left = errors.Join(left, err)
			continue
		case err != nil:
			return nil, cur, rounds, err
		}
		kvs = append(kvs, KV{Key: k, Value: it.Value, Version: it.Version, Expires: it.Expires, Flags: it.Flags,
			Type: it.Type, Len: len(it.Value)})
	}
	return kvs, next, rounds, left
}

// lenOf is the length of a record's value, which may be in chunks: 0 if its manifest is damaged, of which a Get tells.
// It is in bytes, and what a scan of keys alone tells of a value. A tail with flags and a note is not counted.
func lenOf(r *layout.Record) int {
	if r.Stub {
		s, _ := r.Object() // which the page has checked
		return int(s.ValueLen)
	}
	n := len(r.Value)
	if r.Flags&layout.FlagManifest != 0 {
		m, err := layout.ParseManifest(r.Value, 0, 1<<32-1)
		if err != nil {
			return 0
		}
		n = int(m.Len)
	}
	return max(n-r.Flags.TailLen(), 0)
}

// nextShard is the left-aligned prefix behind the shard that covers prefix; 0
// behind the last.
func (s *sess) nextShard(prefix uint64) uint64 {
	v := s.core.View()
	sh := v.ShardOf(prefix)
	if sh == nil || sh.Depth == 0 {
		return 0
	}
	return uint64(sh.Prefix+1) << (64 - sh.Depth)
}

// Count is how many keys there are, from the index alone. Keys that change or move meanwhile may count twice or not
// at all. Keys that expired count until their memory is taken back.
func (c *Client) Count(ctx context.Context) (uint64, error) {
	v, err := tools{c}.ViewAtLeast(ctx, 0)
	if err != nil {
		return 0, err
	}
	n := uint64(0)
	const step = 256 // segments
	for i := range v.Shards {
		sh := &v.Shards[i]
		tail := int(sh.PG.Replicas) - 1
		// A replica that is joining has not got everything yet, so the one before it is read.
		if sh.PG.Joining {
			tail--
		}
		for at := uint32(0); at < sh.Segments; at += step {
			b, err := tools{c}.ReadRaw(ctx, sh.PG.ID, tail, sh.Off+uint64(at)*layout.SegmentSize,
				int(min(step, sh.Segments-at))*layout.SegmentSize)
			if err != nil {
				return 0, err
			}
			for ; len(b) >= layout.GroupSize; b = b[layout.GroupSize:] {
				for k := range layout.GroupSlots {
					if layout.Group(b[:layout.GroupSize]).Slot(k).Readable() {
						n++
					}
				}
			}
		}
	}
	return n, nil
}
