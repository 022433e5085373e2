package archive

import (
	"bytes"
	"context"
	"errors"
	"io"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/inside"
	"github.com/kvd-project/kvd/internal/patient"
)

// Verify reads all of a snapshot. The error is of the first file that is damaged, or is not there. done, if not nil, is
// told of records; it may be called concurrently.
func Verify(ctx context.Context, snap *Snapshot, done func(keys int)) error {
	return eachSegment(ctx, len(snap.Segments), func(ctx context.Context, i int) error {
		seg, err := snap.Segment(ctx, i)
		if err != nil {
			return err
		}
		for n := 1; err == nil; n++ {
			if _, err = seg.Next(); err == nil && n%1024 == 0 && ctx.Err() != nil {
				err = context.Cause(ctx)
			}
		}
		if errors.Is(err, io.EOF) {
			err = nil
		}
		if err = errors.Join(err, seg.Close()); err == nil && done != nil {
			done(int(snap.Segments[i].Records))
		}
		return err
	})
}

// CompareReport counts the keys of a snapshot by what a namespace has of them.
type CompareReport struct {
	Keys int64 `json:"keys"`
	// Same have the same value, flags, note, type and expiry, whatever their version is.
	Same    int64 `json:"same"`
	Newer   int64 `json:"newer"`   // another value, of a later version
	Older   int64 `json:"older"`   // another value, of an earlier version
	Missing int64 `json:"missing"` // none, and the record has not expired
	// Different have another value of the same version.
	Different int64 `json:"different"`
	Expired   int64 `json:"expired"`
	// Extra are keys of the namespace that the snapshot does not have.
	Extra int64 `json:"extra"`
}

// CompareOptions say how a snapshot is compared.
type CompareOptions struct {
	// Extra looks for keys that the snapshot does not have, by hashes of 64 bits. That takes eight bytes a key.
	Extra bool
	// Found, if not nil, is told of keys that are missing, different, older or extra. It is not called concurrently.
	Found func(what string, key []byte)
	// Done, if not nil, is told of keys. It may be called concurrently.
	Done func(keys int)
	Now  func() time.Time
}

// comparison is a Compare under way.
type comparison struct {
	s    Store
	o    *CompareOptions
	long sync.Mutex
	mu   struct {
		sync.Mutex
		hashes []uint64
	}
	keys, same, newer, older, missing, different, expired, extra atomic.Int64
}

// Compare compares a snapshot with the namespace of a session, which others may change meanwhile.
func Compare(ctx context.Context, s Store, snap *Snapshot, o CompareOptions) (*CompareReport, error) {
	c := &comparison{s: s, o: &o}
	err := eachSegment(ctx, len(snap.Segments), func(ctx context.Context, i int) error {
		return batches(ctx, snap, i, &c.long, func(all []Record) error { return c.batch(ctx, all) })
	})
	if err == nil && o.Extra {
		err = c.extras(ctx)
	}
	return &CompareReport{Keys: c.keys.Load(), Same: c.same.Load(), Newer: c.newer.Load(), Older: c.older.Load(),
		Missing: c.missing.Load(), Different: c.different.Load(), Expired: c.expired.Load(),
		Extra: c.extra.Load()}, err
}

// found counts a key that is not as it should be.
func (c *comparison) found(n *atomic.Int64, what string, key []byte) {
	if n.Add(1); c.o.Found != nil {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.o.Found(what, key)
	}
}

func (c *comparison) batch(ctx context.Context, all []Record) error {
	ops := make([]client.Op, len(all))
	for i := range all {
		ops[i] = client.Op{Kind: client.OpGet, Key: all[i].Key, Typed: true}
	}
	limited := ctx
	if len(all) > 1 || all[0].Len <= longValue {
		limited = inside.LimitMemory(ctx, longValue+longValue/8)
	}
	if err := patient.Read(limited, c.s, ops); err != nil {
		return err
	}
	var hashes []uint64
	for i := range ops {
		rec, it := &all[i], &ops[i].Item
		hashes = append(hashes, xxh3.Hash(rec.Key))
		switch err := ops[i].Err; {
		case errors.As(err, new(*inside.TooLargeError)): // longer than any that is compared here
			in, err := c.s.Exists(ctx, rec.Key)
			if err != nil {
				return aboutKey(rec.Key, err)
			}
			c.differs(rec, in.Version)
		case errors.Is(err, client.ErrNotFound) && rec.Expired(c.o.Now()):
			c.expired.Add(1)
		case errors.Is(err, client.ErrNotFound):
			c.found(&c.missing, "missing", rec.Key)
		case err != nil:
			return aboutKey(rec.Key, err)
		case sameItem(rec, it):
			c.same.Add(1)
		default:
			c.differs(rec, it.Version)
		}
	}
	c.keys.Add(int64(len(all)))
	if c.o.Extra {
		c.mu.Lock()
		c.mu.hashes = append(c.mu.hashes, hashes...)
		c.mu.Unlock()
	}
	if c.o.Done != nil {
		c.o.Done(len(all))
	}
	return nil
}

// differs counts a key that has another value than rec, of a version.
func (c *comparison) differs(rec *Record, version uint64) {
	switch {
	case version > rec.Version:
		c.newer.Add(1)
	case version < rec.Version:
		c.found(&c.older, "older", rec.Key)
	default:
		c.found(&c.different, "different", rec.Key)
	}
}

func sameItem(r *Record, it *client.Item) bool {
	want := itemOf(r)
	return bytes.Equal(want.Value, it.Value) && want.Flags == it.Flags && want.Note == it.Note &&
		want.Type == it.Type && want.Expires.Equal(it.Expires)
}

// extras counts the keys that no record was of.
func (c *comparison) extras(ctx context.Context) error {
	slices.Sort(c.mu.hashes)
	return patient.Keys(ctx, c.s, client.ScanOptions{KeysOnly: true}, func(kv client.KV) (bool, error) {
		if _, ok := slices.BinarySearch(c.mu.hashes, xxh3.Hash(kv.Key)); !ok {
			c.found(&c.extra, "extra", kv.Key)
		}
		return true, nil
	})
}
