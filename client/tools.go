package client

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"time"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/index/repair"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/internal/inside"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/units"
	"github.com/kvd-project/kvd/rdma"
)

// tools is what internal/inside gives the programs of the store.
type tools struct{ c *Client }

// Importing package client is enough for package inside to know it: neither needs the other's unexported names.
func init() {
	inside.Register(func(c any) (inside.Tools, bool) {
		x, ok := c.(*Client)
		return tools{x}, ok
	})
}

// Locate is of inside.Tools. It asks the map that the session has, which may be older than the directory's, and reads
// no memory.
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
		RegionBytes: sh.PG.RegionBytes, IndexBytes: sh.PG.IndexBytes, AccessBytes: sh.PG.AccessBytes,
		Replicas: int(sh.PG.Replicas)}, nil
}

// Memory is of inside.Tools. The directory tells what records take in replies to renewals, some seconds late. The
// session knows its own records at once.
func (t tools) Memory() (used, most uint64, evicts bool) {
	s := t.c.sess.Load()
	for _, p := range s.core.View().PGs {
		heap := p.RegionBytes - min(p.RegionBytes, p.IndexBytes+p.AccessBytes)
		most += heap
		used += min(heap, s.core.Supply(p.ID).Live*layout.UnitSize)
	}
	if limit := s.limit.Load(); limit != 0 {
		most = min(most, limit)
	}
	return min(most, max(used, t.c.Stats().LiveUnits*layout.UnitSize)), most, s.evicts.Load()
}

// rawTogether is how many bytes ReadRaw asks for at a time, about.
const rawTogether = 1 << 20

// ReadRaw is of inside.Tools. It divides a read where the index ends, since index and heap are two spaces to the
// engine. It also divides it into pieces: of a MiB, or in the index of rdma.LeastWholeBytes, within which words are
// whole. Pieces of about a MiB are read together. They are no snapshot of each other.
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
		return nil, fmt.Errorf("%w: replica %d of placement group %d, which has %d", ErrInvalid, replica, pg,
			p.Replicas)
	case n <= 0 || off > p.RegionBytes || uint64(n) > p.RegionBytes-off:
		return nil, fmt.Errorf("%w: %d bytes at %#x of a region of %#x", ErrInvalid, n, off, p.RegionBytes)
	}
	out := make([]byte, 0, n)
	for len(out) < n {
		var calls []*call
		var ops []*engine.Op
		for next := len(out); next < min(n, len(out)+rawTogether); {
			at := off + uint64(next)
			space, end := index.Heap, min(p.RegionBytes, at+rawTogether)
			if at < p.IndexBytes {
				space, end = index.Index, min(p.IndexBytes, at&^7+rdma.LeastWholeBytes)
			}
			step := int(min(uint64(n-next), end-at))
			q := &call{}
			q.Kind, q.Lane, q.Asker, q.item = index.Raw, 1, q, &q.own
			q.Raw = &index.RawRead{PG: pg, Replica: uint8(replica), Space: space, Off: at, Len: step}
			calls, ops = append(calls, q), append(ops, &q.Op)
			next += step
		}
		s.core.Do(ctx, ops)
		for _, q := range calls {
			if q.Err != nil {
				return nil, t.c.public(s, q)
			}
			out = append(out, q.own.Value...)
		}
	}
	return out, nil
}

// mostAhead is how far a given version may be ahead of the clock: others would take a later one for damage.
const mostAhead = 10 * time.Minute

// PutGiven is of inside.Tools.
func (t tools) PutGiven(ctx context.Context, records []inside.Given) {
	most := layout.VersionAt(uint64(time.Now().Add(mostAhead).UnixNano()))
	for len(records) > 0 {
		some := records[:min(len(records), batchLimit)]
		records = records[len(some):]
		calls := make([]call, len(some)) // they do not move
		ops, of := make([]*engine.Op, 0, len(some)), make([]int, 0, len(some))
		for i := range some {
			if some[i].Err = t.fillGiven(&calls[len(ops)], &some[i], most); some[i].Err == nil {
				q := &calls[len(ops)]
				q.Asker, q.item = q, &q.own
				ops, of = append(ops, &q.Op), append(of, i)
			}
		}
		if len(ops) > 0 {
			t.c.perform(ctx, ops)
		}
		for k, i := range of {
			if some[i].Err = ops[k].Err; ops[k].Err != nil {
				some[i].Found = ops[k].Version
			}
		}
	}
}

// fillGiven makes q the Put of a record whose version is at most most.
func (t tools) fillGiven(q *call, g *inside.Given, most uint64) error {
	tail := g.Flags.TailLen()
	switch {
	case t.c.o.ReadOnly:
		return errReadOnly
	case g.Flags&^layout.FlagsOfValue != 0 || len(g.Value) < tail:
		return fmt.Errorf("%w: flags %#x of a value of %s", ErrInvalid, uint8(g.Flags), units.Bytes(len(g.Value)))
	case g.Version == 0 || g.Version > most:
		return fmt.Errorf("%w: version %d, want 1..%d: of no later than ten minutes ahead", ErrInvalid, g.Version, most)
	}
	q.Kind, q.Key, q.Cond, q.IfVersion = index.Put, g.Key, index.IfOlder, g.Version
	q.Value, q.Flags, q.Expiry = g.Value, g.Flags, g.Expiry
	return cmp.Or(checkType(Type(g.Flags.TypeOf())), checkValue(g.Key, g.Value[tail:], t.c.MaxValueLen()))
}

// lastUseTries bounds how often LastUse looks for a key that is being moved.
const lastUseTries = 8

// LastUse reads the key's slot at the tail, where access words are, and no more of its record than the key. It must
// not count as a use.
func (t tools) LastUse(ctx context.Context, key []byte) (ago time.Duration, noted bool, err error) {
	for range lastUseTries {
		loc, err := t.Locate(key)
		if err != nil {
			return 0, false, err
		}
		off, w, moved, err := t.slotOf(ctx, loc, key)
		switch {
		case err != nil:
			return 0, false, err
		case off != 0 && loc.AccessBytes == 0:
			return 0, false, nil
		case off != 0:
			ago, err = t.lastAccess(ctx, loc, off, w)
			return ago, true, err
		case !moved:
			return 0, false, ErrNotFound
		}
		if err := t.c.pause(ctx); err != nil {
			return 0, false, err
		}
	}
	return 0, false, fmt.Errorf("%w: the key is being moved", ErrUnavailable)
}

// slotOf finds the slot of a key that has not expired: its offset, 0 if there is none, and its word. moved says that
// something of the key's groups is elsewhere by now.
func (t tools) slotOf(ctx context.Context, loc inside.Location, key []byte) (off uint64, w layout.Word, moved bool,
	err error) {
	tail := loc.Replicas - 1
	for _, at := range []uint64{loc.Home, loc.Stash} {
		b, err := t.ReadRaw(ctx, loc.PG, tail, at, layout.GroupSize)
		if err != nil {
			return 0, 0, false, err
		}
		g := layout.Group(b)
		for i := range layout.GroupSlots {
			w := g.Slot(i)
			moved = moved || w.State() == layout.Moved
			if !w.Readable() || w.FP() != layout.FP(loc.Hash) {
				continue
			}
			n := layout.RecordHeaderSize + len(key)
			if n > w.ReadLen() || w.Off() > loc.RegionBytes || uint64(n) > loc.RegionBytes-w.Off() {
				continue
			}
			rec, err := t.ReadRaw(ctx, loc.PG, tail, w.Off(), n)
			if err != nil {
				return 0, 0, false, err
			}
			if h := layout.HeadOf(rec); int(h.KeyLen) == len(key) && bytes.Equal(rec[layout.RecordHeaderSize:], key) &&
				!h.Expired(uint64(time.Now().UnixMilli())) {
				return at + layout.SlotOff(i), w, false, nil
			}
		}
		if !g.Header().OVF() {
			break // nothing of this group is in the stash
		}
	}
	return 0, 0, moved, nil
}

// lastAccess is how long ago the access of a slot's record was noted. 0: nothing is noted of it, or by a clock that is
// ahead.
func (t tools) lastAccess(ctx context.Context, loc inside.Location, off uint64, w layout.Word) (time.Duration, error) {
	b, err := t.ReadRaw(ctx, loc.PG, loc.Replicas-1, loc.IndexBytes+off, 8)
	if err != nil {
		return 0, err
	}
	a := layout.AccessWord(binary.LittleEndian.Uint64(b))
	if !a.Of(w) {
		return 0, nil
	}
	return time.Duration(a.PastTicks(uint64(time.Now().UnixMilli()))) * layout.AccessTickMillis * time.Millisecond, nil
}

func (t tools) Session(ctx context.Context) (uint32, error) {
	s, err := t.c.live(ctx)
	if err != nil {
		return 0, err
	}
	return s.id, nil
}

// ViewAtLeast is of inside.Tools. It waits for the session to hear of the map, and asks nobody for it.
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

// UnderWay is of inside.Tools. The moment is like a place that comes into limbo, and passes like one, so the directory
// calls quiet sessions for it.
func (t tools) UnderWay(ctx context.Context) (over func() bool, err error) {
	s, err := t.c.live(ctx)
	if err != nil {
		return nil, err
	}
	tag := s.core.Unlinks()
	return func() bool { return s.core.Released(tag) }, nil
}

// Work is of inside.Tools. Without a session none of the works was begun, and all have the same error.
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
