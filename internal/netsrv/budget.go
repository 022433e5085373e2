package netsrv

import (
	"context"
	"errors"
	"runtime"
	"runtime/metrics"
	"sync"
	"sync/atomic"
	"time"
)

// ErrBudget: the memory that connections may share is used up.
var ErrBudget = errors.New("out of buffer memory")

// Budget bounds the memory that connections use for what is large: half of a command,
// values on their way, replies that nobody reads. It does not count the memory that every connection has in
// any case (some buffers of 64 KiB).
//
// A user that needs more takes it from the connection's [Share] before the memory is allocated. A share may grow while
// it is no larger than what is left after it. A connection that would still have a modest part only, and has waited for
// a second in vain, has another one closed. That is the one that holds the most of those that have held something for
// longer.
//
// Memory that was dropped counts until the garbage collector has had it. The collector is made to run when it is
// needed, but no more than a 25th of the time, or five times a second. Else a few connections that take and drop memory
// while the Budget is used up would have it run all the time. That would be at the expense of all others. Until it may
// run again nobody gets that memory. A Budget's methods may be called concurrently.
type Budget struct {
	total   int64
	used    atomic.Int64 // by shares
	garbage atomic.Int64 // dropped, and perhaps not collected yet
	idle    atomic.Int64 // of buffers
	buffers buffers
	collect struct {
		sync.Mutex
		rests time.Time // until then the collector is not made to run
		calls bool      // those who wait are woken then
		// The garbage that there was when the collector, by itself or not, had run so often.
		cycles uint64
		marked int64
	}

	waiters atomic.Int32
	mu      struct {
		sync.Mutex
		freed  chan struct{} // closed when memory is given back; nil: nobody waits
		shares map[*Share]struct{}
		closed time.Time // when a connection was last closed for others
	}
}

const (
	// hogPatience is how long a connection waits before it has another closed; hogPause is
	// between two of them.
	hogPatience, hogPause = time.Second, 100 * time.Millisecond
	// modest parts are an equal part, or one so-many-th if that is more.
	modest = 32
	// small parts are one so-many-th.
	small = 128
	// collectorRest is how many times as long as it ran the collector is left alone, but no longer than maxRest.
	collectorRest, maxRest = 25, 200 * time.Millisecond
)

// DefaultBudget is the bytes of a Budget whose size nobody chose.
const DefaultBudget = 1 << 30

// NewBudget makes a Budget of that number of bytes; 0 means DefaultBudget.
func NewBudget(bytes int64) *Budget {
	if bytes <= 0 {
		bytes = DefaultBudget
	}
	return &Budget{total: bytes}
}

// Total is the Budget's size in bytes.
func (b *Budget) Total() int64 { return b.total }

// Used is how many bytes connections have taken.
func (b *Budget) Used() int64 { return b.used.Load() }

// Share is what one connection has of a Budget. Its methods may be called concurrently.
type Share struct {
	b     *Budget
	held  atomic.Int64
	since atomic.Int64 // Unix ns when it came to hold something
	gone  atomic.Bool  // its connection is being closed
	evict func(bytes int64)
}

// Share makes the share of a connection, which holds nothing yet. If this one is to be closed for
// others, evict is called with the bytes that it holds, in a goroutine of another connection.
// evict must not block.
func (b *Budget) Share(evict func(bytes int64)) *Share {
	s := &Share{b: b, evict: evict}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.mu.shares == nil {
		b.mu.shares = make(map[*Share]struct{})
	}
	b.mu.shares[s] = struct{}{}
	return s
}

// Close forgets the share, which must hold nothing.
func (s *Share) Close() {
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	delete(s.b.mu.shares, s)
}

// makeRoom closes a connection for s, which wants n more bytes since a time, if that is due.
func (s *Share) makeRoom(n int64, since time.Time) {
	b := s.b
	old := since.UnixNano()
	if s.held.Load() > 0 {
		old = min(old, s.since.Load())
	}
	b.mu.Lock()
	// The second: it waits for the collector. Both before looking at thousands.
	if time.Since(b.mu.closed) < hogPause || s.held.Load()+n <= b.total-b.used.Load() {
		b.mu.Unlock()
		return
	}
	var most *Share
	holders, bytes := int64(1), int64(0)
	for x := range b.mu.shares {
		held := x.held.Load()
		if held == 0 || x == s || x.gone.Load() {
			continue
		}
		if holders++; held > bytes && x.since.Load() < old {
			most, bytes = x, held
		}
	}
	now := time.Now()
	ok := most != nil && s.held.Load()+n <= max(b.total/holders, b.total/modest)
	if ok {
		b.mu.closed = now
		most.gone.Store(true)
		b.wakeLocked() // it may wait itself
	}
	b.mu.Unlock()
	if ok {
		most.evict(bytes)
	}
}

// Held is how many bytes the share has now.
func (s *Share) Held() int64 { return s.held.Load() }

// Try takes n bytes, or reports that it may not.
func (s *Share) Try(n int64) bool {
	b := s.b
	if n <= 0 {
		return true
	}
	for {
		used := b.used.Load()
		if s.held.Load()+n > b.total-used {
			return false
		}
		idle := b.idle.Load()
		if g := b.garbage.Load(); g+idle > 0 && used+n+g+idle > b.total {
			if idle > 0 {
				b.letGo()
				continue
			}
			if !b.reclaim(g, s.held.Load()+n <= b.total/small) {
				return false
			}
			continue
		}
		if b.used.CompareAndSwap(used, used+n) {
			break
		}
	}
	if s.held.Add(n) == n {
		s.since.Store(time.Now().UnixNano())
	}
	return true
}

// reclaim lets the garbage, of which there were so many bytes, become less, and reports whether it has. The collector
// is made to run for somebody whose part is small even while it rests: he did not make that garbage.
func (b *Budget) reclaim(seen int64, isSmall bool) bool {
	b.collect.Lock() // once for all who wait for it
	defer b.collect.Unlock()
	c := &b.collect
	if b.garbage.Load() < seen {
		return true
	}
	// Memory that was dropped during a cycle may survive it, and does not survive the next.
	switch cycles := gcCycles(); {
	case c.marked == 0:
		c.cycles, c.marked = cycles, seen
	case cycles >= c.cycles+2:
		b.garbage.Add(-c.marked)
		c.marked = 0
		return true
	}
	began := time.Now()
	if !isSmall && began.Before(c.rests) {
		if !c.calls {
			c.calls = true
			time.AfterFunc(c.rests.Sub(began), b.wakeAfterRest)
		}
		return false
	}
	was := b.garbage.Load()
	runtime.GC()
	b.garbage.Add(-was)
	c.marked = 0
	c.rests = time.Now().Add(min(collectorRest*time.Since(began), maxRest))
	b.mu.Lock()
	b.wakeLocked() // there is memory for others, too
	b.mu.Unlock()
	return true
}

// wakeAfterRest has those who wait try again, the first of whom makes the collector run.
func (b *Budget) wakeAfterRest() {
	b.collect.Lock()
	b.collect.calls = false
	b.collect.Unlock()
	b.mu.Lock()
	b.wakeLocked()
	b.mu.Unlock()
}

// gcCycles is how often the collector has run.
func gcCycles() uint64 {
	s := [1]metrics.Sample{{Name: "/gc/cycles/total:gc-cycles"}}
	metrics.Read(s[:])
	return s[0].Value.Uint64()
}

// Take is Try, but waits for up to patience, or until ctx ends, while it may not. Its error
// is ErrBudget or the context's.
func (s *Share) Take(ctx context.Context, n int64, patience time.Duration) error {
	return s.take(ctx, n, patience, func() bool { return s.Try(n) })
}

// take is Take with another way to try.
func (s *Share) take(ctx context.Context, n int64, patience time.Duration, try func() bool) error {
	if try() {
		return nil
	}
	b := s.b
	b.waiters.Add(1)
	defer b.waiters.Add(-1)
	since := time.Now()
	t := time.NewTimer(patience)
	defer t.Stop()
	hog := time.NewTimer(hogPatience)
	defer hog.Stop()
	for {
		b.mu.Lock()
		if b.mu.freed == nil {
			b.mu.freed = make(chan struct{})
		}
		freed := b.mu.freed
		b.mu.Unlock()
		switch {
		case s.gone.Load():
			return ErrBudget
		case try(): // what was given back before the channel was made
			return nil
		}
		select {
		case <-freed:
		case <-hog.C:
			s.makeRoom(n, since)
			hog.Reset(hogPause)
		case <-t.C:
			return ErrBudget
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// wakeLocked wakes all who wait.
func (b *Budget) wakeLocked() {
	if b.mu.freed != nil {
		close(b.mu.freed)
		b.mu.freed = nil
	}
}

// Give gives back n bytes of memory that goes on to other uses, or that the garbage collector
// has no part in.
func (s *Share) Give(n int64) {
	if n <= 0 {
		return
	}
	b := s.b
	s.held.Add(-n)
	b.used.Add(-n)
	if b.waiters.Load() == 0 {
		return
	}
	b.mu.Lock()
	b.wakeLocked()
	b.mu.Unlock()
}

// Drop gives back n bytes of memory that is garbage from now on.
func (s *Share) Drop(n int64) {
	if n > 0 {
		s.b.garbage.Add(n)
		s.Give(n)
	}
}
