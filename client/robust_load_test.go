package client_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/rdma"
)

// load increments counters and rewrites keys from several goroutines, and knows
// what the store may hold afterwards.
type load struct {
	t      testing.TB
	c      *client.Client
	prefix string
	stop   chan struct{}
	wg     sync.WaitGroup
	done   atomic.Int64 // operations acknowledged

	mu struct {
		sync.Mutex
		acked, unknown map[string]int64           // counters
		values         map[string]map[uint64]bool // key → rounds that may be there
	}
	// tolerate says which errors are no failure; they must not have happened.
	tolerate func(error) bool
}

func startLoad(t testing.TB, c *client.Client, prefix string, workers int, tolerate func(error) bool) *load {
	l := &load{t: t, c: c, prefix: prefix, stop: make(chan struct{}), tolerate: tolerate}
	l.mu.acked, l.mu.unknown, l.mu.values = map[string]int64{}, map[string]int64{}, map[string]map[uint64]bool{}
	for w := range workers {
		l.wg.Go(func() { l.run(w) })
	}
	return l
}

func (l *load) stopped() bool {
	select {
	case <-l.stop:
		return true
	default:
		return false
	}
}

func (l *load) run(w int) {
	ctx := context.Background()
	// Paced: at full speed over shm a load uses up the memory that was granted
	// to it within a second of the directory's absence, and then rightly waits.
	pace := time.NewTicker(time.Millisecond)
	defer pace.Stop()
	for i := uint64(1); !l.stopped(); i++ {
		<-pace.C
		n := fmt.Sprintf("%sn%d", l.prefix, i%3)
		begin := time.Now()
		_, err := l.c.Incr(ctx, []byte(n), 1)
		if !l.judgeResult(n, "incr", begin, err) {
			return
		}
		l.mu.Lock()
		switch client.Outcome(err) {
		case rdma.Yes:
			l.mu.acked[n]++
		case rdma.Unknown:
			l.mu.unknown[n]++
		}
		l.mu.Unlock()

		k := fmt.Sprintf("%sk%d-%d", l.prefix, w, i%16)
		begin = time.Now()
		_, err = l.c.Put(ctx, []byte(k), binary.LittleEndian.AppendUint64(nil, i), client.PutOptions{})
		if !l.judgeResult(k, "put", begin, err) {
			return
		}
		l.mu.Lock()
		switch client.Outcome(err) {
		case rdma.Yes:
			l.mu.values[k] = map[uint64]bool{i: true}
		case rdma.Unknown:
			if l.mu.values[k] == nil {
				l.mu.values[k] = map[uint64]bool{0: true} // perhaps absent
			}
			l.mu.values[k][i] = true
		}
		l.mu.Unlock()
	}
}

func (l *load) judgeResult(key, what string, begin time.Time, err error) bool {
	if d := time.Since(begin); d > 15*time.Second {
		l.t.Errorf("%s %s took %v: %v", what, key, d, err)
		return false
	}
	if err == nil {
		l.done.Add(1)
		return true
	}
	if client.Outcome(err) == rdma.Unknown || l.tolerate != nil && l.tolerate(err) {
		return true
	}
	l.t.Errorf("%s %s: %v", what, key, err)
	return false
}

// progress waits until n more operations are acknowledged.
func (l *load) progress(n int64) {
	l.t.Helper()
	from := l.done.Load()
	eventually(l.t, func() string {
		if d := l.done.Load() - from; d < n && !l.t.Failed() {
			return fmt.Sprintf("%d of %d operations", d, n)
		}
		return ""
	})
}

// end stops the load and checks with c what is there.
func (l *load) end(c *client.Client) {
	l.t.Helper()
	l.halt()
	if l.t.Failed() {
		l.t.FailNow()
	}
	ctx := l.t.Context()
	unknown := int64(0)
	for n, acked := range l.mu.acked {
		v, err := c.Incr(ctx, []byte(n), 0)
		if err != nil {
			l.t.Fatal(err)
		}
		unknown += l.mu.unknown[n]
		if v < acked || v > acked+l.mu.unknown[n] {
			l.t.Errorf("counter %s is %d, want %d..%d", n, v, acked, acked+l.mu.unknown[n])
		}
	}
	for k, rounds := range l.mu.values {
		it, err := c.Get(ctx, []byte(k))
		var got uint64
		if err == nil && len(it.Value) == 8 {
			got = binary.LittleEndian.Uint64(it.Value)
		}
		if !errors.Is(err, client.ErrNotFound) && err != nil || !rounds[got] {
			l.t.Errorf("key %s holds round %d (%v), want one of %v", k, got, err, rounds)
		}
	}
	l.t.Logf("%d operations, %d increments of unknown outcome", l.done.Load(), unknown)
}

func (l *load) halt() {
	if !l.stopped() {
		close(l.stop)
	}
	l.wg.Wait()
}
