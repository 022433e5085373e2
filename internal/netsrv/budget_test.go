package netsrv

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"testing"
	"time"
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
