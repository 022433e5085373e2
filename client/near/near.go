// Package near keeps values that a program reads often in its own memory, in front
// of a [client.API].
//
// A Get may answer:
//
//   - Options.TTL alone: what the key had at some moment at most TTL before the Get.
//   - With Options.Validate: the same, but a Get compares what is older with the store instead of reading it again.
//     That costs a READ of 8 bytes if the client remembers the key's place. With TTL 0 every Get asks, and is
//     linearizable.
//   - In either case no entry is served at or past its Expires. Every later read through a Cache sees what was
//     written through it.
//
// That a key is absent is never remembered. Reads that miss one key together share a read of the store. It must
// have begun after the last of them came, or at most TTL before. Otherwise a Get could answer with what was
// replaced before it was called.
//
// It leaves everything else to the client, and eviction to otter. Start with [New];
// a Cache's methods may be called concurrently. Values returned are the caller's.
package near

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/maypok86/otter/v2"
	"github.com/zeebo/xxh3"

	"github.com/kvd-project/kvd/client"
)

// Options configure a Cache.
type Options struct {
	// MaxBytes bounds keys, values and what it takes to keep them, about 300 bytes an
	// entry. Required. A value above a quarter of it is not kept.
	MaxBytes int64
	// TTL is how long an entry is served without asking. Required unless Validate.
	TTL time.Duration
	// Validate asks whether an older entry is still right, instead of reading it again.
	Validate bool
	// Now is the clock. Default time.Now.
	Now func() time.Time
}

// validate joins every problem.
func (o *Options) validate() error {
	var errs []error
	if o.MaxBytes <= 0 {
		errs = append(errs, fmt.Errorf("%w: MaxBytes: %d, want > 0", client.ErrInvalid, o.MaxBytes))
	}
	if o.TTL < 0 || o.TTL == 0 && !o.Validate {
		errs = append(errs, fmt.Errorf("%w: TTL: %v, want > 0, or 0 with Validate", client.ErrInvalid, o.TTL))
	}
	return errors.Join(errs...)
}

// Stats counts what a Cache did.
type Stats struct {
	Hits        uint64 // served without asking
	Misses      uint64 // read from the store
	Validations uint64 // compared with the store
	Unchanged   uint64 // validations that found the entry right
	Shared      uint64 // answered by another's read or validation
	Bytes, Keys uint64
}

// overhead is what an entry costs besides key and value, about.
const overhead = 300

// name is a key's hash, so that a lookup makes no string.
type name struct{ hi, lo uint64 }

// Two keys with one name are told apart by the entry's key.
func nameOf(key []byte) name {
	h := xxh3.Hash128(key)
	return name{h.Hi, h.Lo}
}

// entry is immutable.
type entry struct {
	key, value []byte
	version    uint64
	expires    time.Time
	flags      uint32
	note       uint64
	asked      time.Time // the value was the key's at this moment or later
}

// item is a copy, which the caller of Get may change.
func (e *entry) item() client.Item {
	return client.Item{Value: append(make([]byte, 0, len(e.value)), e.value...), Version: e.version, Expires: e.expires,
		Flags: e.flags, Note: e.note}
}

// entryOf keeps the Item's value, which must be nobody else's, and a copy of the key.
func entryOf(key []byte, it *client.Item, asked time.Time) *entry {
	return &entry{key: bytes.Clone(key), value: it.Value, version: it.Version, expires: it.Expires, flags: it.Flags,
		note: it.Note, asked: asked}
}

// Cache is a near cache. It implements client.API.
type Cache struct {
	client.API // what is not cached: Scan, Count, GetRange, Open, View, Pin, Unpin
	o          Options
	entries    *otter.Cache[name, *entry]
	stripes    [256]stripe

	hits, misses, validations, unchanged, shared atomic.Uint64
}

var _ client.API = (*Cache)(nil)

// stripe orders what happens to keys whose hashes end alike.
type stripe struct {
	sync.Mutex
	// writes counts the writes that began or ended. A read that started before a write must not be cached.
	writes  uint64
	writing int // writes under way
	flights map[name]*flight
}

// flight is a read of the store that several callers share. The goroutine that leads
// it writes, others read when done is closed.
type flight struct {
	done chan struct{}
	key  []byte // if e is nil
	e    *entry
	err  error
	gone bool // the leader's context ended, so err says nothing

	// Guarded by the stripe. The first Get that comes begins a flight that has not begun.
	begun   bool
	writes  uint64 // of the stripe, when it began
	asked   time.Time
	waiting int     // for the flight before, to begin this one
	next    *flight // of those who came when this one had begun
}

func newFlight() *flight { return &flight{done: make(chan struct{})} }

// New makes an empty Cache in front of api, which stays the caller's.
func New(api client.API, o Options) (*Cache, error) {
	if o.Now == nil {
		o.Now = time.Now
	}
	if err := o.validate(); err != nil {
		return nil, err
	}
	c := &Cache{API: api, o: o}
	var err error
	c.entries, err = otter.New(&otter.Options[name, *entry]{
		MaximumWeight: uint64(o.MaxBytes),
		Weigher:       func(_ name, e *entry) uint32 { return weight(e) },
		// At once: the bound holds when a write returns, and no goroutine is left over.
		Executor: func(f func()) { f() },
	})
	if err != nil {
		return nil, fmt.Errorf("near cache: %w", err)
	}
	for i := range c.stripes {
		c.stripes[i].flights = make(map[name]*flight)
	}
	return c, nil
}

// weight is in bytes, for Options.MaxBytes.
func weight(e *entry) uint32 { return uint32(len(e.key) + len(e.value) + overhead) }

func (c *Cache) stripe(n name) *stripe { return &c.stripes[n.lo%uint64(len(c.stripes))] }

// Stats returns a snapshot.
func (c *Cache) Stats() Stats {
	c.entries.CleanUp()
	return Stats{Hits: c.hits.Load(), Misses: c.misses.Load(), Validations: c.validations.Load(),
		Unchanged: c.unchanged.Load(),
		Shared:    c.shared.Load(), Bytes: c.entries.WeightedSize(), Keys: uint64(c.entries.EstimatedSize())}
}

func (c *Cache) expired(e *entry, now time.Time) bool {
	return !e.expires.IsZero() && e.expires.UnixMilli() <= now.UnixMilli()
}

// find returns the entry of key, nil if there is none or it has expired, and whether
// it may be served without asking.
func (c *Cache) find(n name, key []byte) (e *entry, fresh bool) {
	e, ok := c.entries.GetIfPresent(n)
	if !ok || !bytes.Equal(e.key, key) {
		return nil, false
	}
	now := c.o.Now()
	if c.expired(e, now) {
		return nil, false
	}
	return e, now.Sub(e.asked) < c.o.TTL
}

// get returns the entry that answers a read of key that begins now.
func (c *Cache) get(ctx context.Context, key []byte) (*entry, error) {
	n := nameOf(key)
	for {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		e, fresh := c.find(n, key)
		if fresh {
			c.hits.Add(1)
			return e, nil
		}
		f, lead := c.board(ctx, n)
		if lead {
			c.lead(ctx, n, key, f, e)
			return f.e, f.err
		}
		if f == nil {
			return nil, context.Cause(ctx)
		}
		select {
		case <-f.done:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
		switch {
		case f.gone, f.e != nil && !bytes.Equal(f.e.key, key), f.e == nil && !bytes.Equal(f.key, key):
			continue
		case f.e != nil && c.expired(f.e, c.o.Now()):
			return nil, client.ErrNotFound
		}
		c.shared.Add(1)
		return f.e, f.err
	}
}

// board finds the flight that answers a read of n that begins now: one for the caller
// to lead, or one that has begun. nil: ctx ended.
func (c *Cache) board(ctx context.Context, n name) (f *flight, lead bool) {
	s := c.stripe(n)
	s.Lock()
	defer s.Unlock()
	f = s.flights[n]
	if f != nil && f.begun {
		if f.writes == s.writes && s.writing == 0 && c.o.Now().Sub(f.asked) < c.o.TTL {
			return f, false
		}
		// It began before we came: ours is the one behind it.
		before := f
		if before.next == nil {
			before.next = newFlight()
		}
		f = before.next
		f.waiting++
		s.Unlock()
		select {
		case <-before.done:
		case <-ctx.Done():
		}
		s.Lock()
		f.waiting--
		if ctx.Err() != nil {
			if s.flights[n] == f && !f.begun && f.waiting == 0 {
				delete(s.flights, n)
			}
			return nil, false
		}
		if f.begun {
			return f, false
		}
	}
	if f == nil {
		f = newFlight()
		s.flights[n] = f
	}
	f.begun, f.writes, f.asked = true, s.writes, c.o.Now()
	return f, true
}

// lead reads key from the store, or compares old with it if that is not nil, and keeps
// what it finds.
func (c *Cache) lead(ctx context.Context, n name, key []byte, f *flight, old *entry) {
	f.gone = true // unless we get to the end
	defer func() {
		s := c.stripe(n)
		s.Lock()
		defer s.Unlock()
		delete(s.flights, n)
		if f.next != nil && f.next.waiting > 0 {
			s.flights[n] = f.next
		}
		if f.writes == s.writes && s.writing == 0 {
			c.keepLocked(n, f.e)
		}
		close(f.done)
	}()
	it, changed := client.Item{}, true
	if old != nil && c.o.Validate {
		c.validations.Add(1)
		it, changed, f.err = c.API.GetIfChanged(ctx, key, old.version)
	} else {
		c.misses.Add(1)
		it, f.err = c.API.Get(ctx, key)
	}
	switch {
	case f.err != nil:
		f.key = bytes.Clone(key)
	case changed:
		f.e = entryOf(key, &it, f.asked)
	default:
		c.unchanged.Add(1)
		e := *old
		e.asked = f.asked
		f.e = &e
	}
	f.gone = f.err != nil && ctx.Err() != nil
}

// keepLocked makes e the entry of n; nil: there is none. The stripe is locked.
func (c *Cache) keepLocked(n name, e *entry) {
	if e == nil || int64(weight(e)) > c.o.MaxBytes/4 { // one value shall not drive out all others
		c.entries.Invalidate(n)
		return
	}
	if cur, ok := c.entries.GetIfPresent(n); ok && cur.asked.After(e.asked) {
		return // somebody else asked later
	}
	c.entries.Set(n, e)
}

// Get is as in client.API.
func (c *Cache) Get(ctx context.Context, key []byte) (client.Item, error) {
	e, err := c.get(ctx, key)
	if err != nil {
		return client.Item{}, err
	}
	return e.item(), nil
}

// GetInto is as in client.API. It allocates nothing if the Cache answers.
func (c *Cache) GetInto(ctx context.Context, key, dst []byte) (int, error) {
	e, err := c.get(ctx, key)
	if err != nil {
		return 0, err
	}
	if copy(dst, e.value) < len(e.value) {
		return len(e.value), io.ErrShortBuffer
	}
	return len(e.value), nil
}

// GetIfChanged is as in client.API, with what Get would answer.
func (c *Cache) GetIfChanged(ctx context.Context, key []byte, version uint64) (client.Item, bool, error) {
	e, err := c.get(ctx, key)
	switch {
	case err != nil:
		return client.Item{}, false, err
	case e.version == version:
		return client.Item{Version: version}, false, nil
	}
	return e.item(), true, nil
}

// Exists is as in client.API, of a key that may be served without asking by what is kept.
func (c *Cache) Exists(ctx context.Context, key []byte) (client.Info, error) {
	if e, fresh := c.find(nameOf(key), key); fresh {
		c.hits.Add(1)
		return client.Info{Size: -1, Version: e.version, Expires: e.expires}, nil
	}
	return c.API.Exists(ctx, key)
}

// ExistsPrefix is as in client.API. Keys that may not be served without asking are asked for together.
func (c *Cache) ExistsPrefix(ctx context.Context, keys [][]byte) (int, error) {
	ask, at := make([][]byte, 0, len(keys)), make([]int, 0, len(keys))
	for i, k := range keys {
		if _, fresh := c.find(nameOf(k), k); !fresh {
			ask, at = append(ask, k), append(at, i)
		}
	}
	c.hits.Add(uint64(len(keys) - len(ask)))
	if len(ask) == 0 {
		return len(keys), nil
	}
	n, err := c.API.ExistsPrefix(ctx, ask)
	if n == len(ask) {
		return len(keys), err
	}
	return at[n], err
}

// MultiGet is as in client.API. Keys that may not be served without asking are read in one MultiGet of the
// store, without comparing.
func (c *Cache) MultiGet(ctx context.Context, keys [][]byte) []client.Result {
	res := make([]client.Result, len(keys))
	var at []int
	var ask [][]byte
	var writes []uint64
	for i, k := range keys {
		n := nameOf(k)
		if e, fresh := c.find(n, k); fresh {
			c.hits.Add(1)
			res[i].Item = e.item()
			continue
		}
		s := c.stripe(n)
		s.Lock()
		at, ask, writes = append(at, i), append(ask, k), append(writes, s.writes)
		s.Unlock()
	}
	if len(ask) == 0 {
		return res
	}
	c.misses.Add(uint64(len(ask)))
	asked := c.o.Now()
	for j, r := range c.API.MultiGet(ctx, ask) {
		res[at[j]] = r
		if r.Err != nil && !errors.Is(r.Err, client.ErrNotFound) {
			continue
		}
		var e *entry
		if r.Err == nil {
			e = entryOf(ask[j], &r.Item, asked)
			e.value = bytes.Clone(e.value) // the caller has the other
		}
		n := nameOf(ask[j])
		s := c.stripe(n)
		s.Lock()
		if s.writes == writes[j] && s.writing == 0 {
			c.keepLocked(n, e)
		}
		s.Unlock()
	}
	return res
}

// begin drops the entry of key, and lets nobody keep another before end.
func (c *Cache) begin(key []byte) (writes uint64) {
	n := nameOf(key)
	s := c.stripe(n)
	s.Lock()
	defer s.Unlock()
	s.writes++
	s.writing++
	c.entries.Invalidate(n)
	return s.writes
}

// end ends what begin began. e, if not nil, is what the key has become; it is kept if
// nobody else was writing.
func (c *Cache) end(key []byte, writes uint64, e *entry) {
	n := nameOf(key)
	s := c.stripe(n)
	s.Lock()
	defer s.Unlock()
	alone := s.writing == 1 && s.writes == writes
	s.writes++
	s.writing--
	if e != nil && alone {
		c.keepLocked(n, e)
	}
}

// Put is as in client.API. The value is kept.
func (c *Cache) Put(ctx context.Context, key, value []byte, o client.PutOptions) (uint64, error) {
	return c.put(ctx, client.Op{Key: key, Value: value}, o)
}

// PutIfAbsent is as in client.API. The value is kept if it was put.
func (c *Cache) PutIfAbsent(ctx context.Context, key, value []byte, o client.PutOptions) (uint64, error) {
	return c.put(ctx, client.Op{Key: key, Value: value, Cond: client.IfAbsent}, o)
}

// CompareAndSwap is as in client.API. The value is kept if it was put.
func (c *Cache) CompareAndSwap(ctx context.Context, key []byte, version uint64, value []byte, o client.PutOptions) (
	uint64, error) {
	return c.put(ctx, client.Op{Key: key, Value: value, Cond: client.IfVersion, Version: version}, o)
}

func (c *Cache) put(ctx context.Context, op client.Op, o client.PutOptions) (uint64, error) {
	if o.TTL < 0 {
		return 0, fmt.Errorf("%w: TTL %v, want >= 0", client.ErrInvalid, o.TTL)
	}
	asked := c.o.Now()
	op.Kind, op.Flags, op.PinUntil = client.OpPut, o.Flags, o.PinUntil
	if o.TTL > 0 {
		// Here and not in the store, so that both have the same.
		op.Expires = time.UnixMilli(asked.Add(o.TTL).UnixMilli())
	}
	writes := c.begin(op.Key)
	var e *entry
	defer func() { c.end(op.Key, writes, e) }()
	ops := [1]client.Op{op}
	c.API.Do(ctx, ops[:])
	if ops[0].Err != nil {
		return 0, ops[0].Err
	}
	v := ops[0].Item.Version
	e = &entry{key: bytes.Clone(op.Key), value: bytes.Clone(op.Value), version: v, expires: op.Expires, flags: op.Flags,
		asked: asked}
	return v, nil
}

// writing performs f, which may change keys.
func (c *Cache) writing(keys iter.Seq[[]byte], f func()) {
	for k := range keys {
		c.begin(k)
	}
	defer func() {
		for k := range keys {
			c.end(k, 0, nil)
		}
	}()
	f()
}

func one(key []byte) iter.Seq[[]byte] {
	return func(yield func([]byte) bool) { yield(key) }
}

// PutFrom is as in client.API. The value is not kept.
func (c *Cache) PutFrom(ctx context.Context, key []byte, r io.Reader, size int64, o client.PutOptions) (
	version uint64, err error) {
	c.writing(one(key), func() { version, err = c.API.PutFrom(ctx, key, r, size, o) })
	return version, err
}

// Delete is as in client.API.
func (c *Cache) Delete(ctx context.Context, key []byte) (err error) {
	c.writing(one(key), func() { err = c.API.Delete(ctx, key) })
	return err
}

// DeleteVersion is as in client.API.
func (c *Cache) DeleteVersion(ctx context.Context, key []byte, version uint64) (err error) {
	c.writing(one(key), func() { err = c.API.DeleteVersion(ctx, key, version) })
	return err
}

// Incr is as in client.API.
func (c *Cache) Incr(ctx context.Context, key []byte, delta int64) (sum int64, err error) {
	c.writing(one(key), func() { sum, err = c.API.Incr(ctx, key, delta) })
	return sum, err
}

// Touch is as in client.API.
func (c *Cache) Touch(ctx context.Context, key []byte, ttl time.Duration) (err error) {
	c.writing(one(key), func() { err = c.API.Touch(ctx, key, ttl) })
	return err
}

// MultiCAS is as in client.API.
func (c *Cache) MultiCAS(ctx context.Context, ops []client.Op) (err error) {
	keys := func(yield func([]byte) bool) {
		for i := range ops {
			if ops[i].Kind != client.OpKeep && !yield(ops[i].Key) {
				return
			}
		}
	}
	c.writing(keys, func() { err = c.API.MultiCAS(ctx, ops) })
	return err
}

// Update is as in client.API.
func (c *Cache) Update(ctx context.Context, key []byte, f client.UpdateFunc) (version uint64, err error) {
	c.writing(one(key), func() { version, err = c.API.Update(ctx, key, f) })
	return version, err
}

// MultiPut is as in client.API.
func (c *Cache) MultiPut(ctx context.Context, pairs []client.KV) (res []client.Result) {
	keys := func(yield func([]byte) bool) {
		for i := range pairs {
			if !yield(pairs[i].Key) {
				return
			}
		}
	}
	c.writing(keys, func() { res = c.API.MultiPut(ctx, pairs) })
	return res
}

// MultiDelete is as in client.API.
func (c *Cache) MultiDelete(ctx context.Context, keys [][]byte) (res []client.Result) {
	c.writing(slices.Values(keys), func() { res = c.API.MultiDelete(ctx, keys) })
	return res
}

// Do is as in client.API. It reads from the store.
func (c *Cache) Do(ctx context.Context, ops []client.Op) {
	keys := func(yield func([]byte) bool) {
		for i := range ops {
			switch ops[i].Kind {
			case client.OpGet, client.OpExists, client.OpPin:
				continue
			}
			if !yield(ops[i].Key) {
				return
			}
		}
	}
	c.writing(keys, func() { c.API.Do(ctx, ops) })
}
