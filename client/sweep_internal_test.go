package client

import (
	"testing"
	"time"

	"github.com/kvd-project/kvd/internal/evict"
)

// A goroutine collects what another one adds, each entry once; entries that find no room are lost.
func TestExpiries(t *testing.T) {
	const now, n = 1_700_000_000_000, 50_000
	q, w := new(expiries), evict.NewWheel(now, 8<<20)
	full := 0
	for i := range uint64(2 * expiriesLen) {
		if q.add(now, i) {
			full++
		}
	}
	q.collect(w)
	if w.Len() != expiriesLen || full != 1 {
		t.Fatalf("%d entries of %d, asked to collect %d times", w.Len(), expiriesLen, full)
	}
	kick, done := make(chan bool, 1), make(chan bool)
	go func() {
		defer close(done)
		for i := range uint64(n) {
			if q.add(now, 1<<32+i) {
				select {
				case kick <- true:
				default:
				}
			}
		}
	}()
	for ended := false; !ended; {
		select {
		case <-kick:
		case <-done:
			ended = true
		}
		q.collect(w)
	}
	seen := map[uint64]bool{}
	for _, h := range w.Take(now+1000, make([]uint64, 0, expiriesLen+n)) {
		if seen[h] || h >= expiriesLen && h < 1<<32 || h >= 1<<32+n {
			t.Fatalf("%#x, for the second time: %v", h, seen[h])
		}
		seen[h] = true
	}
	if len(seen) < 2*expiriesLen || w.Len() != 0 {
		t.Errorf("%d collected, %d left", len(seen), w.Len())
	}
}

// Memory that is evicted for others is not evicted again while it is on its way to them.
func TestOwed(t *testing.T) {
	p, now := new(pressure), time.Now()
	owed := func(give uint64, after, want int64) {
		t.Helper()
		if got := p.owed(give, now.Add(time.Duration(after)*time.Second)); got != want {
			t.Errorf("%d s later, of %d units %d are owed, want %d", after, give, got, want)
		}
	}
	owed(1000, 0, 1000)
	p.given = append(p.given, given{now, 300}, given{now.Add(time.Second), 300})
	owed(1000, 0, 400)
	owed(500, 0, 0)
	owed(1000, 1, 700)
	owed(1000, 2, 1000)
	if len(p.given) != 0 {
		t.Errorf("%v are remembered for ever", p.given)
	}
}
