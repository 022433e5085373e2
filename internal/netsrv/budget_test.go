package netsrv

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/kvd-project/kvd/internal/testutil"
)

// TestBudgetIsShared: whoever wants a modest part gets it, however many take all they can and give
// nothing back.
func TestBudgetIsShared(t *testing.T) {
	const total, part = 1 << 20, 4 << 10
	b := NewBudget(total)
	closed := 0
	for range 100 {
		var s *Share
		s = b.Share(func(bytes int64) {
			if closed++; bytes != s.Held() || bytes <= part {
				t.Errorf("one was closed that holds %d of %d bytes", s.Held(), bytes)
			}
			s.Drop(bytes)
			s.Close()
		})
		for n := int64(total); n > 0; n /= 2 {
			for s.Try(n) {
			}
		}
	}
	if used := b.Used(); used > total {
		t.Errorf("%d bytes are used", used)
	}
	s := b.Share(func(int64) { t.Error("the modest one was closed") })
	if err := s.Take(t.Context(), part, time.Minute); err != nil || closed == 0 {
		t.Errorf("%v, %d were closed", err, closed)
	}
	if err := s.Take(t.Context(), total-part, 2*time.Second); !errors.Is(err, ErrBudget) {
		t.Errorf("all of it for one: %v", err)
	}
	if s := NewBudget(total).Share(nil); !s.Try(total) || s.Try(1) {
		t.Error("a lone connection may have all and no more")
	}
}

// TestBudgetWaits: who may not have memory gets it when others give theirs back.
func TestBudgetWaits(t *testing.T) {
	b := NewBudget(100)
	a := b.Share(nil)
	if !a.Try(100) {
		t.Fatal("refused")
	}
	ctx, cancel := context.WithCancel(t.Context())
	stopped := make(chan error)
	go func() { stopped <- b.Share(nil).Take(ctx, 1, time.Hour) }()
	cancel()
	if err := <-stopped; !errors.Is(err, context.Canceled) {
		t.Errorf("stopped: %v", err)
	}
	if err := b.Share(nil).Take(t.Context(), 1, time.Millisecond); !errors.Is(err, ErrBudget) {
		t.Errorf("no patience: %v", err)
	}
	var wg sync.WaitGroup
	for range 10 {
		wg.Go(func() {
			s := b.Share(nil)
			if err := s.Take(t.Context(), 20, time.Minute); err != nil {
				t.Error(err)
			}
			s.Drop(20)
		})
	}
	a.Give(60)
	a.Drop(40)
	wg.Wait()
	if b.Used() != 0 {
		t.Errorf("%d bytes are used by nobody", b.Used())
	}
}

// TestBudgetCollects: memory that was dropped is not had twice.
func TestBudgetCollects(t *testing.T) {
	const each, total = 8 << 20, 64 << 20
	b := NewBudget(total)
	s := b.Share(nil)
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	before, most := m.HeapAlloc, uint64(0)
	for range 100 {
		if err := s.Take(t.Context(), each, time.Minute); err != nil { // the collector rests now and then
			t.Fatal(err)
		}
		p := make([]byte, each)
		p[0] = 1
		runtime.ReadMemStats(&m)
		most = max(most, m.HeapAlloc)
		runtime.KeepAlive(p)
		s.Drop(each)
	}
	if grown := int64(most - before); grown > total*6/5 {
		t.Errorf("%d bytes, at most %d are due", grown, total)
	}
}

// forced is how often the collector was made to run.
func forced() uint32 {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.NumForcedGC
}

// TestCollectorRests: the collector is not made to run again and again, garbage that it has had by itself is no garbage
// any more.
func TestCollectorRests(t *testing.T) {
	const total = 1 << 20
	b := NewBudget(total)
	s := b.Share(nil)
	drop := func() {
		t.Helper()
		if !s.Try(total) {
			t.Fatal("refused")
		}
		s.Drop(total)
	}
	drop()
	before := forced()
	drop() // there was nothing but garbage
	if n := forced() - before; n != 1 {
		t.Errorf("the collector was made to run %d times, want once", n)
	}
	rests := b.collect.rests
	if rests.IsZero() {
		t.Error("the collector does not rest")
	}
	b.collect.rests = time.Now().Add(time.Hour)
	before = forced()
	if err := s.Take(t.Context(), total/2, 3*hogPatience/2); !errors.Is(err, ErrBudget) {
		t.Errorf("memory that nobody has collected: %v", err)
	}
	if n := forced() - before; n != 0 {
		t.Errorf("the collector was made to run %d times while it rests", n)
	}
	for range 2 {
		runtime.GC() // as it does by itself
	}
	drop()
	b.collect.rests = rests
	if err := s.Take(t.Context(), total, time.Minute); err != nil {
		t.Errorf("after the rest: %v", err)
	}
}

// Somebody who waits for memory that the collector has not had is woken when it may run again, although nobody gives
// anything back.
func TestWokenAfterRest(t *testing.T) {
	const total = 1 << 20
	b := NewBudget(total)
	s := b.Share(nil)
	if !s.Try(total) {
		t.Fatal("refused")
	}
	s.Drop(total)
	b.collect.rests = time.Now().Add(50 * time.Millisecond)
	before := forced()
	if err := s.Take(t.Context(), total, hogPatience/2); err != nil { // he looks by himself after hogPatience alone
		t.Errorf("after a rest of 50 ms: %v", err)
	}
	if n := forced() - before; n != 1 {
		t.Errorf("the collector was made to run %d times, want once", n)
	}
}

// A connection that wants little has the collector run while it rests: it rests from those who take and drop much.
func TestSmallPartsDoNotWait(t *testing.T) {
	const total = 1 << 20
	b := NewBudget(total)
	hog := b.Share(nil)
	if !hog.Try(total) {
		t.Fatal("refused")
	}
	hog.Drop(total)
	b.collect.rests = time.Now().Add(time.Hour)
	if hog.Try(total/small + 1) {
		t.Error("more than a small part is given of memory that nobody has collected")
	}
	if !b.Share(nil).Try(total / small) {
		t.Error("a small part waits")
	}
}

// TestBuffers: buffers that were given back are taken again, count until they are garbage, and stay nobody's for long.
func TestBuffers(t *testing.T) {
	const total, size = 8 << 20, 256 << 10
	b := NewBudget(total)
	s := b.Share(nil)
	take := func(n int) []byte {
		t.Helper()
		buf, err := s.TakeBuffer(t.Context(), n, time.Minute)
		if err != nil || len(buf) != n || s.Held() != int64(cap(buf)) {
			t.Fatalf("%d of %d bytes, %d are held, error %v", len(buf), n, s.Held(), err)
		}
		return buf
	}
	first := take(size)
	first[size-1] = 7
	s.Return(first)
	if b.Used() != 0 || b.idle.Load() != size {
		t.Errorf("%d bytes are used, %d kept, want 0 and %d", b.Used(), b.idle.Load(), size)
	}
	fits := take(size * 9 / 10)
	if cap(fits) != size || fits[:size][size-1] != 7 || b.idle.Load() != 0 {
		t.Errorf("another buffer, of %d bytes; %d are kept", cap(fits), b.idle.Load())
	}
	s.Return(fits)
	for _, n := range []int{size/2 + 1, 2 * size} { // too large, too small a buffer
		other := take(n)
		if &other[0] == &first[0] || b.idle.Load() == 0 {
			t.Errorf("%d bytes have the buffer of %d", n, size)
		}
		s.Drop(int64(cap(other)))
	}
	// All can be had still: what is kept gives way.
	if !s.Try(total) || b.idle.Load() != 0 {
		t.Errorf("%d bytes are kept while somebody wants all", b.idle.Load())
	}
	s.Drop(total)

	// Not more than a part is kept, and that not for long.
	many := make([][]byte, total/size/2)
	for i := range many {
		var err error
		if many[i], err = s.TakeBuffer(t.Context(), size, time.Minute); err != nil {
			t.Fatal(err)
		}
	}
	for _, buf := range many {
		s.Return(buf)
	}
	if got := b.idle.Load(); got != total/keptPart {
		t.Errorf("%d bytes are kept, want %d", got, total/keptPart)
	}
	testutil.Until(t, "all buffers are garbage", func() bool { return b.idle.Load() == 0 })
	if s.Held() != 0 || b.Used() != 0 {
		t.Errorf("%d bytes are held and %d used at the end", s.Held(), b.Used())
	}
}

// TestBuffersBusy: many take and give back buffers beside those who want memory, and nobody has another's.
func TestBuffersBusy(t *testing.T) {
	const total = 4 << 20
	b := NewBudget(total)
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			s := b.Share(nil)
			defer s.Close()
			for n := range 50 {
				if n%5 == 4 {
					if s.Try(total / 4) {
						s.Drop(total / 4)
					}
					continue
				}
				buf, err := s.TakeBuffer(t.Context(), 64<<10+n%3*(8<<10), time.Minute)
				if err != nil {
					t.Error(err)
					return
				}
				buf[0], buf[len(buf)-1] = byte(i), byte(i)
				runtime.Gosched()
				if buf[0] != byte(i) || buf[len(buf)-1] != byte(i) {
					t.Error("somebody else writes to the buffer")
				}
				s.Return(buf)
			}
			if s.Held() != 0 {
				t.Errorf("%d bytes are held at the end", s.Held())
			}
		})
	}
	wg.Wait()
	b.buffers.Lock()
	defer b.buffers.Unlock()
	if b.Used() != 0 || b.idle.Load() != b.buffers.bytes {
		t.Errorf("%d bytes are used, %d counted and %d kept at the end", b.Used(), b.idle.Load(), b.buffers.bytes)
	}
}
