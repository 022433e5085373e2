package client

import (
	"context"
	"fmt"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/index/repair"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/internal/inside"
	"github.com/kvd-project/kvd/internal/layout"
)

// tools is what internal/inside gives the programs of the store.
type tools struct{ c *Client }

func init() {
	inside.Register(func(c any) (inside.Tools, bool) {
		x, ok := c.(*Client)
		return tools{x}, ok
	})
}

func (t tools) Locate(key []byte) (inside.Location, error) {
	if err := checkKey(key); err != nil {
		return inside.Location{}, err
	}
	s, err := t.c.live(t.c.ctx)
	if err != nil {
		return inside.Location{}, err
	}
	hash := s.hash(key)
	v := s.core.View()
	sh := v.ShardOf(hash)
	if sh == nil {
		return inside.Location{}, fmt.Errorf("%w: no shard for %q", ErrUnavailable, key)
	}
	home, stash := layout.GroupOff(hash, sh.Segments)
	return inside.Location{PG: sh.PG.ID, ShardID: sh.ID, Home: sh.Off + home, Stash: sh.Off + stash, Hash: hash,
		RegionBytes: sh.PG.RegionBytes, IndexBytes: sh.PG.IndexBytes, AccessBytes: sh.PG.AccessBytes, Replicas: int(sh.PG.Replicas)}, nil
}

func (t tools) ReadRaw(ctx context.Context, pg uint32, replica int, off uint64, n int) ([]byte, error) {
	s, err := t.c.live(ctx)
	if err != nil {
		return nil, err
	}
	v := s.core.View()
	p := v.PGs[pg]
	switch {
	case p == nil:
		return nil, fmt.Errorf("%w: no placement group %d in this namespace", ErrInvalid, pg)
	case replica < 0 || replica >= int(p.Replicas):
		return nil, fmt.Errorf("%w: replica %d of placement group %d, which has %d", ErrInvalid, replica, pg, p.Replicas)
	case n <= 0 || off > p.RegionBytes || uint64(n) > p.RegionBytes-off:
		return nil, fmt.Errorf("%w: %d bytes at %#x of a region of %#x", ErrInvalid, n, off, p.RegionBytes)
	}
	out := make([]byte, 0, n)
	for len(out) < n {
		at := off + uint64(len(out))
		space, end := index.Heap, p.RegionBytes
		if at < p.IndexBytes {
			space, end = index.Index, p.IndexBytes
		}
		step := int(min(uint64(n-len(out)), end-at, 1<<20))
		q := &call{}
		q.Kind, q.Lane, q.Asker, q.item = index.Raw, 1, q, &q.own
		q.Raw = &index.RawRead{PG: pg, Replica: uint8(replica), Space: space, Off: at, Len: step}
		q.ops[0] = &q.Op
		s.core.Do(ctx, q.ops[:])
		if q.Err != nil {
			return nil, t.c.public(s, q)
		}
		out = append(out, q.own.Value...)
	}
	return out, nil
}

func (t tools) Session(ctx context.Context) (uint32, error) {
	s, err := t.c.live(ctx)
	if err != nil {
		return 0, err
	}
	return s.id, nil
}

func (t tools) ViewAtLeast(ctx context.Context, version uint64) (*engine.View, error) {
	for {
		s, err := t.c.live(ctx)
		if err != nil {
			return nil, err
		}
		if v := s.core.View(); v != nil && v.Version >= version {
			return v, nil
		}
		if err := t.c.pause(ctx); err != nil {
			return nil, err
		}
	}
}

func (t tools) Work(ctx context.Context, kind index.Kind, works []*repair.Work) []error {
	s, err := t.c.live(ctx)
	if err != nil {
		errs := make([]error, len(works))
		for i := range errs {
			errs[i] = err
		}
		return errs
	}
	return t.c.work(ctx, s, kind, works)
}
