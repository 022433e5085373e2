// Package clienttest is a store in the memory of one process, for the tests of programs that use package client. A
// [Store] gives the answers that a [client.Client] gives, takes its time from the test, and fails when it is told
// to.
//
// It leaves out what has no answers: sessions, leases, memory nodes, statistics. If the library promises nothing,
// it picks what a careless caller does not expect. It carries a batch out back to front. It overwrites the value
// that an UpdateFunc was shown when that has returned.
//
// Start with [New] and [Store.Fail]. A Store's methods may be called concurrently.
// Keys and values passed in stay the caller's; what is returned is the caller's.
package clienttest

import (
	"bytes"
	"cmp"
	"container/list"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/inside"
)

// Options configure a Store. The zero value is usable.
type Options struct {
	// Now is the Store's clock. Default time.Now.
	Now func() time.Time
	// MaxKeys and MaxBytes (of keys and values) bound what is kept. 0: no bound.
	MaxKeys, MaxBytes int
	// MaxValueLen is the longest value that is taken, bytes. 0: client.DefaultMaxValueLen.
	MaxValueLen int64
	// Evict makes room by dropping what was not used for longest, as a namespace in
	// cache mode does. Without it, an operation that finds no room is answered with
	// client.ErrFull.
	Evict bool
}

// Fault is what happens to an operation instead of its answer. The zero Fault lets
// it be.
type Fault struct {
	// Err is the answer. Unless it wraps client.ErrUnknownOutcome or Applied is set,
	// client.Outcome must say No of it.
	Err error
	// Applied carries the operation out before it fails; the error is made to wrap
	// client.ErrUnknownOutcome.
	Applied bool
}

// Store is a store. It implements client.API.
type Store struct {
	o Options

	mu struct {
		sync.Mutex
		fail    func(context.Context, *client.Op) Fault
		buckets [numBuckets]map[string]*entry
		lru     list.List // of *entry; the one used last in front
		bytes   int
		version uint64
	}
}

var _ client.API = (*Store)(nil)

// A bucket holds the keys whose hashes begin alike: a Scan returns whole buckets, so
// that no key is missed when others come and go.
const (
	bucketBits = 10
	numBuckets = 1 << bucketBits
)

// entry is a key that is there, or that has expired and nobody has looked at since.
type entry struct {
	key     string
	value   []byte // never changed
	version uint64
	expiry  int64 // Unix ms; 0: never
	flags   uint32
	note    uint64
	typ     client.Type
	pinned  int64 // until when eviction passes over it, Unix ms; 0: it does not
	hard    int64 // likewise, of what is put alone
	used    *list.Element
}

// size is what counts for Options.MaxBytes; a record of the store has more around it.
func (e *entry) size() int { return len(e.key) + len(e.value) }

func (e *entry) expires() time.Time { return timeOf(e.expiry) }

// New makes an empty Store.
func New(o Options) *Store {
	if o.Now == nil {
		o.Now = time.Now
	}
	o.MaxValueLen = cmp.Or(o.MaxValueLen, client.DefaultMaxValueLen)
	s := &Store{o: o}
	for i := range s.mu.buckets {
		s.mu.buckets[i] = make(map[string]*entry)
	}
	return s
}

// Fail asks hook about every operation from now on; nil ends that. Incr and Touch are shown as OpUpdate, and Scan
// and Count as an Op without kind and key. The operations of a MultiGet, MultiPut or MultiDelete are shown one by
// one. hook runs before the operation, in its goroutine: it may wait, and use the Store if it copes with being
// asked again. It may be called concurrently, and must not change or keep the Op.
func (s *Store) Fail(hook func(context.Context, *client.Op) Fault) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.fail = hook
}

// ask lets the hook decide: err, if not nil, is the answer, and the operation is to be
// carried out all the same if applied is set.
func (s *Store) ask(ctx context.Context, op *client.Op) (applied bool, err error) {
	if ctx.Err() != nil {
		return false, context.Cause(ctx)
	}
	s.mu.Lock()
	hook := s.mu.fail
	s.mu.Unlock()
	if hook == nil {
		return false, nil
	}
	f := hook(ctx, op)
	if f.Applied && !errors.Is(f.Err, client.ErrUnknownOutcome) {
		f.Err = errors.Join(client.ErrUnknownOutcome, f.Err)
	}
	return f.Applied, f.Err
}

// checkKey and checkValue refuse what the store refuses, in its own words.
func checkKey(key []byte) error {
	if len(key) == 0 || len(key) > client.MaxKeyLen {
		return fmt.Errorf("%w: key of %d bytes, want 1..%d", client.ErrInvalid, len(key), client.MaxKeyLen)
	}
	return nil
}

// MaxValueLen is as in client.API.
func (s *Store) MaxValueLen() int64 { return s.o.MaxValueLen }

func (s *Store) checkValue(value []byte) error {
	return client.CheckLen(int64(len(value)), s.o.MaxValueLen)
}

// expiresIn is the time that a TTL ends at.
func (s *Store) expiresIn(ttl time.Duration) (time.Time, error) {
	switch {
	case ttl < 0:
		return time.Time{}, fmt.Errorf("%w: TTL %v, want >= 0", client.ErrInvalid, ttl)
	case ttl == 0:
		return time.Time{}, nil
	}
	return s.o.Now().Add(ttl), nil
}

// millis is a time as entries have it. The beginning of 1970 becomes 1, since 0 is never.
func millis(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return max(t.UnixMilli(), 1)
}

func timeOf(ms int64) time.Time {
	if ms == 0 {
		return time.Time{}
	}
	return time.UnixMilli(ms)
}

// bucketOf makes an order of keys for scans, which like the store's is that of hashes.
func bucketOf(key []byte) int { return int(xxh3.Hash(key) >> (64 - bucketBits)) }

// findLocked returns the entry of key, or nil. An entry that has expired is removed.
func (s *Store) findLocked(key []byte) *entry {
	e := s.mu.buckets[bucketOf(key)][string(key)]
	if e != nil && s.expiredLocked(e) {
		s.dropLocked(e)
		return nil
	}
	return e
}

// expiredLocked asks the Store's clock, so that tests choose the time.
func (s *Store) expiredLocked(e *entry) bool {
	return e.expiry != 0 && e.expiry <= s.o.Now().UnixMilli()
}

// dropLocked removes an entry; a caller that has its value keeps it.
func (s *Store) dropLocked(e *entry) {
	delete(s.mu.buckets[bucketOf([]byte(e.key))], e.key)
	s.mu.lru.Remove(e.used)
	s.mu.bytes -= e.size()
}

func (s *Store) putLocked(key, value []byte, expires time.Time, flags uint32, note uint64, t client.Type) (
	uint64, error) {
	e := s.findLocked(key)
	if err := s.makeRoomLocked(e, len(key)+len(value)); err != nil {
		return 0, err
	}
	if e == nil {
		e = &entry{key: string(key)}
		e.used = s.mu.lru.PushFront(e)
		s.mu.buckets[bucketOf(key)][e.key] = e
		s.mu.bytes += len(key)
	}
	s.mu.bytes += len(value) - len(e.value)
	s.mu.lru.MoveToFront(e.used)
	s.mu.version++
	e.hard = 0
	e.value, e.version, e.expiry, e.flags, e.note, e.typ = bytes.Clone(value), s.mu.version, millis(expires), flags,
		note, t
	return e.version, nil
}

// putOpLocked performs o, an OpPut, whose Cond holds.
func (s *Store) putOpLocked(o *client.Op) (err error) {
	o.Item.Version, err = s.putLocked(o.Key, o.Value, o.Expires, o.Flags, o.Note, o.Type)
	if e := s.findLocked(o.Key); err == nil && e != nil { // else it has expired
		e.hard = millis(o.PinUntil)
	}
	return err
}

// makeRoomLocked makes room for size bytes that replace old, which may be nil.
func (s *Store) makeRoomLocked(old *entry, size int) error {
	fits := func() bool {
		n, bytes := s.mu.lru.Len()+1, s.mu.bytes+size
		if old != nil {
			n, bytes = n-1, bytes-old.size()
		}
		return (s.o.MaxKeys <= 0 || n <= s.o.MaxKeys) && (s.o.MaxBytes <= 0 || bytes <= s.o.MaxBytes)
	}
	if fits() {
		return nil
	}
	if s.o.MaxBytes > 0 && size > s.o.MaxBytes {
		return client.ErrFull
	}
	if !s.o.Evict {
		s.sweepLocked()
		if fits() {
			return nil
		}
		return client.ErrFull
	}
	if old != nil {
		s.mu.lru.MoveToFront(old.used)
	}
	for !fits() {
		s.dropLocked(s.victimLocked(old))
	}
	return nil
}

// victimLocked is what was not used for longest, and is neither old nor pinned. If all others are pinned no pin counts.
func (s *Store) victimLocked(old *entry) *entry {
	now := s.o.Now().UnixMilli()
	for el := s.mu.lru.Back(); el != nil; el = el.Prev() {
		if e := el.Value.(*entry); e != old && (max(e.pinned, e.hard) <= now || s.expiredLocked(e)) {
			return e
		}
	}
	return s.mu.lru.Back().Value.(*entry)
}

// sweepLocked takes back the memory of what has expired, which else happens when somebody looks.
func (s *Store) sweepLocked() {
	for el := s.mu.lru.Front(); el != nil; {
		e := el.Value.(*entry)
		el = el.Next()
		if s.expiredLocked(e) {
			s.dropLocked(e)
		}
	}
}

func (s *Store) do(ctx context.Context, o *client.Op) {
	o.Item = client.Item{}
	if o.Err = s.check(o); o.Err != nil {
		return
	}
	applied, fault := s.ask(ctx, o)
	if fault == nil || applied {
		s.apply(ctx, o)
	}
	if fault != nil {
		o.Item, o.Err = client.Item{}, fault
	}
}

func (s *Store) check(o *client.Op) error {
	switch o.Kind {
	case client.OpPin:
		if d := o.Expires.Sub(s.o.Now()); d > client.MaxPin {
			return fmt.Errorf("%w: pinned for %v, want %v at most", client.ErrInvalid, d, client.MaxPin)
		}
	case client.OpGet, client.OpExists, client.OpDelete:
	case client.OpPut:
		if err := cmp.Or(s.checkValue(o.Value), client.CheckPinUntil(o.PinUntil)); err != nil {
			return err
		}
	case client.OpUpdate:
		if o.Update == nil {
			return fmt.Errorf("%w: Update: nil", client.ErrInvalid)
		}
	default:
		return fmt.Errorf("%w: Kind: %d", client.ErrInvalid, o.Kind)
	}
	return checkKey(o.Key)
}

func (s *Store) apply(ctx context.Context, o *client.Op) {
	if o.Kind == client.OpUpdate {
		o.Item.Version, o.Err = s.update(ctx, o.Key, o.Typed, o.Update)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.findLocked(o.Key)
	switch {
	case e == nil && (o.Kind != client.OpPut || o.Cond == client.IfVersion || o.Cond == client.IfPresent):
		o.Err = client.ErrNotFound
	case o.Kind == client.OpGet && tooLarge(ctx, e):
		o.Err = &inside.TooLargeError{Want: len(e.value)}
	case o.Kind == client.OpExists, o.Kind == client.OpPin: // no use
		if until := millis(o.Expires); o.Kind == client.OpPin && (until == 0 || until > e.pinned) {
			e.pinned = until
		}
		o.Item = client.Item{Version: e.version, Expires: e.expires()}
	case o.Kind == client.OpGet:
		s.mu.lru.MoveToFront(e.used)
		if o.Item = itemOf(e, o.Into); e.typ != client.Plain && !o.Typed {
			o.Item, o.Err = client.Item{}, client.ErrWrongType
		} else if o.Fixed {
			if o.Size = len(e.value); o.Size > cap(o.Into) {
				o.Item.Value, o.Err = nil, io.ErrShortBuffer
			}
		}
	case e != nil && o.Cond == client.IfVersion && e.version != o.Version:
		o.Err = client.ErrConflict
	case o.Kind == client.OpDelete:
		s.dropLocked(e)
	case e != nil && o.Cond == client.IfAbsent:
		o.Err = client.ErrExists
	default:
		o.Err = s.putOpLocked(o)
	}
}

// tooLarge reports whether inside.LimitMemory forbids to read e.
func tooLarge(ctx context.Context, e *entry) bool {
	limit := inside.MemoryLimit(ctx)
	return limit > 0 && len(e.value) > limit
}

func itemOf(e *entry, into []byte) client.Item {
	if into == nil {
		into = make([]byte, 0, len(e.value))
	}
	return client.Item{Value: append(into[:0], e.value...), Version: e.version, Expires: e.expires(), Flags: e.flags,
		Note: e.note, Type: e.typ}
}

// update asks f without the lock, like the real one: others may change the key
// meanwhile, and f is asked again.
func (s *Store) update(ctx context.Context, key []byte, typed bool, f client.UpdateFunc) (uint64, error) {
	for {
		if ctx.Err() != nil {
			return 0, context.Cause(ctx)
		}
		var cur client.Item
		s.mu.Lock()
		present := false
		if e := s.findLocked(key); e != nil && tooLarge(ctx, e) {
			s.mu.Unlock()
			return 0, &inside.TooLargeError{Want: len(e.value)}
		} else if e != nil {
			cur, present = itemOf(e, nil), true
		}
		s.mu.Unlock()
		if cur.Type != client.Plain && !typed {
			return 0, client.ErrWrongType
		}
		shown := slices.Clip(cur.Value)
		ch, err := f(cur, present)
		if err != nil {
			return 0, err
		}
		if ch.Delete && !present {
			return 0, client.ErrNotFound
		}
		if err := s.checkValue(ch.Value); err != nil {
			return 0, err
		}
		value := bytes.Clone(ch.Value)
		for i := range shown {
			shown[i] = 0xdb
		}
		v, done, err := s.commit(key, cur.Version, ch, value)
		if done {
			return v, err
		}
	}
}

// commit makes a change if key still has the version given; 0: if it is absent.
func (s *Store) commit(key []byte, version uint64, ch client.Change, value []byte) (v uint64, done bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.findLocked(key)
	switch {
	case (e == nil) != (version == 0), e != nil && e.version != version:
		return 0, false, nil
	case ch.Delete:
		s.dropLocked(e)
		return 0, true, nil
	}
	v, err = s.putLocked(key, value, ch.Expires, ch.Flags, ch.Note, ch.Type)
	return v, true, err
}

// Get is as in client.API.
func (s *Store) Get(ctx context.Context, key []byte) (client.Item, error) {
	o := client.Op{Kind: client.OpGet, Key: key}
	s.do(ctx, &o)
	return o.Item, o.Err
}

// GetInto is as in client.API.
func (s *Store) GetInto(ctx context.Context, key, dst []byte) (int, error) {
	it, err := s.Get(ctx, key)
	if err != nil {
		return 0, err
	}
	if copy(dst, it.Value) < len(it.Value) {
		err = io.ErrShortBuffer
	}
	return len(it.Value), err
}

// GetIfChanged is as in client.API.
func (s *Store) GetIfChanged(ctx context.Context, key []byte, version uint64) (client.Item, bool, error) {
	it, err := s.Get(ctx, key)
	if err == nil && it.Version == version {
		return client.Item{Version: version}, false, nil
	}
	return it, err == nil, err
}

// Put is as in client.API.
func (s *Store) Put(ctx context.Context, key, value []byte, o client.PutOptions) (uint64, error) {
	return s.put(ctx, client.Op{Key: key, Value: value}, o)
}

// PutIfAbsent is as in client.API.
func (s *Store) PutIfAbsent(ctx context.Context, key, value []byte, o client.PutOptions) (uint64, error) {
	return s.put(ctx, client.Op{Key: key, Value: value, Cond: client.IfAbsent}, o)
}

// CompareAndSwap is as in client.API.
func (s *Store) CompareAndSwap(ctx context.Context, key []byte, version uint64, value []byte, o client.PutOptions) (
	uint64, error) {
	return s.put(ctx, client.Op{Key: key, Value: value, Cond: client.IfVersion, Version: version}, o)
}

func (s *Store) put(ctx context.Context, o client.Op, p client.PutOptions) (_ uint64, err error) {
	o.Kind, o.Flags, o.PinUntil = client.OpPut, p.Flags, p.PinUntil
	if o.Expires, err = s.expiresIn(p.TTL); err != nil {
		return 0, err
	}
	s.do(ctx, &o)
	return o.Item.Version, o.Err
}

// Delete is as in client.API.
func (s *Store) Delete(ctx context.Context, key []byte) error {
	return s.delete(ctx, client.Op{Key: key})
}

// DeleteVersion is as in client.API.
func (s *Store) DeleteVersion(ctx context.Context, key []byte, version uint64) error {
	return s.delete(ctx, client.Op{Key: key, Cond: client.IfVersion, Version: version})
}

func (s *Store) delete(ctx context.Context, o client.Op) error {
	o.Kind = client.OpDelete
	s.do(ctx, &o)
	return o.Err
}

// Update is as in client.API.
func (s *Store) Update(ctx context.Context, key []byte, f client.UpdateFunc) (uint64, error) {
	o := client.Op{Kind: client.OpUpdate, Key: key, Update: f}
	s.do(ctx, &o)
	return o.Item.Version, o.Err
}

// Incr is as in client.API.
func (s *Store) Incr(ctx context.Context, key []byte, delta int64) (sum int64, err error) {
	_, err = s.Update(ctx, key, func(cur client.Item, present bool) (client.Change, error) {
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
		sum = old + delta
		return client.Change{Value: strconv.AppendInt(nil, sum, 10), Expires: cur.Expires, Flags: cur.Flags,
			Note: cur.Note}, nil
	})
	if err != nil {
		return 0, err
	}
	return sum, nil
}

// Touch is as in client.API.
func (s *Store) Touch(ctx context.Context, key []byte, ttl time.Duration) error {
	exp, err := s.expiresIn(ttl)
	if err != nil {
		return err
	}
	o := client.Op{Kind: client.OpUpdate, Key: key, Typed: true, Update: func(cur client.Item, present bool) (
		client.Change, error) {
		if !present {
			return client.Change{}, client.ErrNotFound
		}
		return client.Change{Value: cur.Value, Expires: exp, Flags: cur.Flags, Note: cur.Note, Type: cur.Type}, nil
	}}
	s.do(ctx, &o)
	return o.Err
}
