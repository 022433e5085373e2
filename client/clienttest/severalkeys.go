package clienttest

import (
	"bytes"
	"context"
	"fmt"
	"iter"
	"slices"

	"github.com/kvd-project/kvd/client"
)

// Do is as in client.API. It begins with the last of ops.
func (s *Store) Do(ctx context.Context, ops []client.Op) {
	for i := range slices.Backward(ops) {
		s.do(ctx, &ops[i])
	}
}

// MultiCAS is as in client.API. The hook is asked about its ops before anything is done, and the first fault counts.
func (s *Store) MultiCAS(ctx context.Context, ops []client.Op) error {
	if err := client.CheckTxn(ops, s.o.MaxValueLen); err != nil {
		return err
	}
	for i := range ops {
		applied, fault := s.ask(ctx, &ops[i])
		if fault == nil {
			continue
		}
		if applied {
			_ = s.multiCAS(ops)
			for j := range ops {
				ops[j].Item, ops[j].Err = client.Item{}, nil
			}
		}
		return fault
	}
	return s.multiCAS(ops)
}

func (s *Store) multiCAS(ops []client.Op) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range ops {
		o := &ops[i]
		switch e := s.findLocked(o.Key); {
		case e == nil && (o.Cond == client.IfVersion || o.Cond == client.IfPresent):
			o.Err = client.ErrNotFound
		case e != nil && o.Cond == client.IfAbsent:
			o.Err = client.ErrExists
		case e != nil && o.Cond == client.IfVersion && e.version != o.Version:
			o.Err = client.ErrConflict
		}
		if o.Err != nil {
			return fmt.Errorf("MultiCAS %q: %w", o.Key, o.Err)
		}
	}
	size := 0
	for i := range ops {
		if o := &ops[i]; o.Kind == client.OpPut {
			size += len(o.Key) + len(o.Value)
		}
	}
	if s.o.MaxBytes > 0 && size > s.o.MaxBytes {
		return client.ErrFull
	}
	for i := range ops {
		o := &ops[i]
		e := s.findLocked(o.Key)
		switch {
		case o.Kind == client.OpPut:
			if err := s.putOpLocked(o); err != nil {
				return err
			}
		case o.Kind == client.OpDelete && e != nil:
			s.dropLocked(e)
		case e != nil && o.Typed:
			o.Item = itemOf(e, nil)
		case e != nil:
			o.Item.Version = e.version
		}
	}
	return nil
}

// MultiGet is as in client.API.
func (s *Store) MultiGet(ctx context.Context, keys [][]byte) []client.Result {
	return s.multi(ctx, len(keys), func(i int) (client.Op, error) {
		return client.Op{Kind: client.OpGet, Key: keys[i]}, nil
	})
}

// ExistsPrefix is as in client.API. The hook is shown an OpExists for each key.
func (s *Store) ExistsPrefix(ctx context.Context, keys [][]byte) (int, error) {
	ops := make([]client.Op, len(keys))
	for i, k := range keys {
		ops[i] = client.Op{Kind: client.OpExists, Key: k}
	}
	s.Do(ctx, ops)
	return client.LeadingThere(ops)
}

// MultiPut is as in client.API.
func (s *Store) MultiPut(ctx context.Context, pairs []client.KV) []client.Result {
	return s.multi(ctx, len(pairs), func(i int) (client.Op, error) {
		p := &pairs[i]
		exp, err := s.expiresIn(p.TTL)
		return client.Op{Kind: client.OpPut, Key: p.Key, Value: p.Value, Flags: p.Flags, Expires: exp}, err
	})
}

// MultiDelete is as in client.API.
func (s *Store) MultiDelete(ctx context.Context, keys [][]byte) []client.Result {
	return s.multi(ctx, len(keys), func(i int) (client.Op, error) {
		return client.Op{Kind: client.OpDelete, Key: keys[i]}, nil
	})
}

func (s *Store) multi(ctx context.Context, n int, get func(int) (client.Op, error)) []client.Result {
	res := make([]client.Result, n)
	for i := range slices.Backward(res) {
		o, err := get(i)
		if err == nil {
			s.do(ctx, &o)
			err = o.Err
		}
		res[i] = client.Result{Item: o.Item, Err: err}
	}
	return res
}

// Scan is as in client.API. The hook is called once for a scan, when its loop begins.
func (s *Store) Scan(ctx context.Context, o client.ScanOptions) iter.Seq2[client.KV, error] {
	return func(yield func(client.KV, error) bool) {
		if o.Count < 0 {
			yield(client.KV{}, fmt.Errorf("%w: Count %d, want >= 0", client.ErrInvalid, o.Count))
			return
		}
		if _, fault := s.ask(ctx, &client.Op{}); fault != nil {
			yield(client.KV{}, fault)
			return
		}
		cur := o.Cursor
		if cur == nil {
			cur = new(client.Cursor)
		}
		for given := 0; !cur.Done && (o.Count == 0 || given < o.Count); {
			if ctx.Err() != nil {
				yield(client.KV{}, context.Cause(ctx))
				return
			}
			b := int(cur.Prefix >> (64 - bucketBits))
			for _, kv := range s.scanBucket(b, o) {
				if !yield(kv, nil) {
					return
				}
				given++
			}
			*cur = client.Cursor{Prefix: uint64(b+1) << (64 - bucketBits), Done: b+1 == numBuckets}
		}
	}
}

func (s *Store) scanBucket(b int, o client.ScanOptions) []client.KV {
	s.mu.Lock()
	var out []client.KV
	for k, e := range s.mu.buckets[b] {
		if s.expiredLocked(e) {
			continue
		}
		kv := client.KV{Key: []byte(k), Version: e.version, Expires: e.expires(), Type: e.typ, Len: len(e.value)}
		if !o.KeysOnly {
			it := itemOf(e, nil)
			kv.Value, kv.Flags = it.Value, it.Flags
		}
		out = append(out, kv)
	}
	s.mu.Unlock()
	if o.Match != nil {
		out = slices.DeleteFunc(out, func(kv client.KV) bool { return !o.Match(kv.Key) })
	}
	slices.SortFunc(out, func(a, b client.KV) int { return bytes.Compare(a.Key, b.Key) })
	return out
}

// Count is as in client.API. Keys that expired do not count.
func (s *Store) Count(ctx context.Context) (uint64, error) {
	if _, err := s.ask(ctx, &client.Op{}); err != nil {
		return 0, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sweepLocked()
	return uint64(s.mu.lru.Len()), nil
}
