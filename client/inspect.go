package client

import (
	"context"
	"fmt"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/session"
	"github.com/kvd-project/kvd/rdma"
)

// Location is where a key lives.
type Location struct {
	PG, ShardID             uint32
	Home, Stash             uint64 // region offsets of its home and stash group
	RegionBytes, IndexBytes uint64
	AccessBytes             uint64 // IndexBytes, or 0: no access words
	Hash                    uint64
	Replicas                int
}

// Locate tells where key lives under the present map.
func (c *Client) Locate(key []byte) (Location, error) {
	if err := checkKey(key); err != nil {
		return Location{}, err
	}
	s, err := c.live(c.ctx)
	if err != nil {
		return Location{}, err
	}
	hash := s.hash(key)
	v := s.core.View()
	sh := v.ShardOf(hash)
	if sh == nil {
		return Location{}, fmt.Errorf("%w: no shard for %q", ErrUnavailable, key)
	}
	home, stash := layout.GroupOff(hash, sh.Segments)
	return Location{PG: sh.PG.ID, ShardID: sh.ID, Home: sh.Off + home, Stash: sh.Off + stash, Hash: hash,
		RegionBytes: sh.PG.RegionBytes, IndexBytes: sh.PG.IndexBytes, AccessBytes: sh.PG.AccessBytes, Replicas: int(sh.PG.Replicas)}, nil
}

// ReadRaw reads n bytes at offset off of one replica's region, for tools. They
// may change while they are read.
func (c *Client) ReadRaw(ctx context.Context, pg uint32, replica int, off uint64, n int) ([]byte, error) {
	s, err := c.live(ctx)
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
			return nil, c.public(s, q)
		}
		out = append(out, q.own.Value...)
	}
	return out, nil
}

// Session is the id of the session in force.
func (c *Client) Session(ctx context.Context) (uint32, error) {
	s, err := c.live(ctx)
	if err != nil {
		return 0, err
	}
	return s.id, nil
}

// ViewAtLeast waits for a map of at least the version given.
func (c *Client) ViewAtLeast(ctx context.Context, version uint64) (*engine.View, error) {
	for {
		s, err := c.live(ctx)
		if err != nil {
			return nil, err
		}
		if v := s.core.View(); v != nil && v.Version >= version {
			return v, nil
		}
		if err := c.pause(ctx); err != nil {
			return nil, err
		}
	}
}

// Work performs a janitor's operations of one kind, several at a time, and leaves
// what they found in each. Errors stand in the order of works.
func (c *Client) Work(ctx context.Context, kind index.Kind, works []*index.Work) []error {
	s, err := c.live(ctx)
	if err != nil {
		errs := make([]error, len(works))
		for i := range errs {
			errs[i] = err
		}
		return errs
	}
	return c.work(ctx, s, kind, works)
}

// Stats returns a snapshot of this Client's counters since it was opened, and of what its
// present session holds.
func (c *Client) Stats() Stats {
	s := c.sess.Load()
	st := Stats{Ops: map[string]uint64{}, Rounds: map[string]uint64{}, Session: s.id,
		Epoch: s.core.Epoch(), MinEpoch: s.core.MinEpoch(), Evicted: c.stats.evicted.Load(),
		Expired: c.stats.expired.Load(), EvictedBytes: c.stats.evictedUnits.Load() * layout.UnitSize,
		SweepBytes: c.stats.sweepBytes.Load(), SweepForgotten: c.stats.sweepForgotten.Load()}
	c.mu.Lock()
	total, counted := c.mu.past, s.counted
	c.mu.Unlock()
	if !counted {
		total.wentBy(s.agenda.Counts(), session.Counts{})
	}
	var cached, inUse uint64
	for _, l := range s.core.Lanes() {
		if counted {
			break
		}
		x := new(struct { // its own: the session may end, and the lane come to it later
			laneTotals
			limbo, cached uint64
		})
		if !s.onLane(l, func(l *engine.Lane) {
			x.laneTotals.add(l)
			x.limbo, x.cached = l.LimboUnits(), l.CachedUnits()
		}) {
			c.mu.Lock()
			total = c.mu.last
			c.mu.Unlock()
			counted = true
			break
		}
		total.sum(&x.laneTotals)
		st.LimboUnits += x.limbo
		cached += x.cached
	}
	total.into(&st)
	if counted {
		return st
	}
	c.mu.Lock()
	c.mu.last = total
	c.mu.Unlock()
	for _, h := range s.core.Heaps() {
		hs := h.Heap.Stats()
		st.GrantedUnits += uint64(hs.Granted)
		st.FreeUnits += uint64(hs.Free)
		st.ForeignUnits += hs.ForeignFree
		inUse += uint64(hs.InUse)
		st.RefusedPlaces += hs.RefusedPlaces
	}
	st.FreeUnits += cached
	st.LiveUnits = inUse - min(inUse, st.LimboUnits+cached)
	st.Connections = map[string]string{}
	s.mu.Lock()
	for id, p := range s.mu.provider {
		if n := s.mu.nodes[id]; n != nil {
			st.Connections[n.GetName()] = p
		}
	}
	s.mu.Unlock()
	return st
}

// laneTotals sums what lanes counted, and the agendas of their sessions.
type laneTotals struct {
	ops, rounds                          [index.NumKinds]uint64
	verbs                                rdma.Counters
	cacheHits, casLosses, unknown, notes uint64
	memoryWaits, leaked                  uint64
	went                                 session.Counts
}

// wentBy adds what an agenda counted since it had counted before.
func (t *laneTotals) wentBy(n, before session.Counts) {
	t.went.HandedBack += n.HandedBack - before.HandedBack
	t.went.Returned += n.Returned - before.Returned
	t.went.Received += n.Received - before.Received
	t.went.Refused += n.Refused - before.Refused
}

func (t *laneTotals) add(l *engine.Lane) {
	for k := range t.ops {
		t.ops[k] += l.Stats.Ops[k]
		t.rounds[k] += l.Stats.Rounds[k]
	}
	n := l.Counters()
	t.verbs.Add(&n)
	t.cacheHits += l.Stats.CacheHits
	t.casLosses += l.Stats.CASLosses
	t.unknown += l.Stats.Unknown
	t.notes += l.Stats.Notes
	t.memoryWaits += l.Stats.MemoryWaits
	t.leaked += l.Stats.Leaked
}

func (t *laneTotals) sum(x *laneTotals) {
	for k := range t.ops {
		t.ops[k] += x.ops[k]
		t.rounds[k] += x.rounds[k]
	}
	t.verbs.Add(&x.verbs)
	t.cacheHits += x.cacheHits
	t.casLosses += x.casLosses
	t.unknown += x.unknown
	t.notes += x.notes
	t.memoryWaits += x.memoryWaits
	t.leaked += x.leaked
	t.wentBy(x.went, session.Counts{})
}

func (t *laneTotals) into(st *Stats) {
	for k := index.Get; k < index.NumKinds; k++ {
		st.Ops[k.String()], st.Rounds[k.String()] = t.ops[k], t.rounds[k]
	}
	st.Verbs, st.CacheHits, st.CASLosses, st.Unknown, st.Notes = t.verbs, t.cacheHits, t.casLosses, t.unknown, t.notes
	st.HandedBackUnits, st.ReturnedUnits, st.ReceivedUnits, st.RefusedUnits = t.went.HandedBack, t.went.Returned, t.went.Received, t.went.Refused
	st.LostUnits, st.MemoryWaits = t.leaked, t.memoryWaits
}
