// Package gapload is for tests of ports that fail: a load on a store, and how long its operations take at most.
package gapload

import (
	"bytes"
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/testutil"
)

// Load writes and reads short and long values. An operation that fails, or a wrong value, fails the test.
type Load struct {
	t            testing.TB
	c            *client.Client
	long         int
	stop         chan struct{}
	once         sync.Once
	wg           sync.WaitGroup
	done, failed atomic.Int64
	gap          atomic.Int64 // nanoseconds
}

// Start begins a load of some workers. Every second value of each has long bytes, others 100. Halt ends it.
func Start(t testing.TB, c *client.Client, workers, long int) *Load {
	l := &Load{t: t, c: c, long: long, stop: make(chan struct{})}
	for w := range workers {
		l.wg.Go(func() { l.run(w) })
	}
	return l
}

func (l *Load) run(w int) {
	pace := time.NewTicker(40 * time.Millisecond)
	defer pace.Stop()
	for i := 0; ; i++ {
		select {
		case <-l.stop:
			return
		case <-pace.C:
		}
		key := fmt.Appendf(nil, "%d-%d", w, i%64)
		value := bytes.Repeat([]byte{byte(i), byte(w)}, [...]int{100, l.long}[i%2]/2)
		begin := time.Now()
		_, err := l.c.Put(context.Background(), key, value, client.PutOptions{})
		l.judgeResult("put", key, begin, err)
		begin = time.Now()
		it, err := l.c.Get(context.Background(), key)
		if err == nil && !bytes.Equal(it.Value, value) {
			err = fmt.Errorf("a value of %d bytes that is another", len(it.Value))
		}
		l.judgeResult("get", key, begin, err)
	}
}

func (l *Load) judgeResult(what string, key []byte, begin time.Time, err error) {
	took := time.Since(begin).Nanoseconds()
	for was := l.gap.Load(); took > was && !l.gap.CompareAndSwap(was, took); was = l.gap.Load() {
	}
	if err != nil {
		l.failed.Add(1)
		l.t.Errorf("%s of %s: %v", what, key, err)
	}
	l.done.Add(1)
}

// Progress waits until n more operations have ended, and ends the test if one has failed.
func (l *Load) Progress(n int64) {
	l.t.Helper()
	from := l.done.Load()
	testutil.Until(l.t, fmt.Sprintf("%d more operations", n), func() bool {
		return l.done.Load() >= from+n || l.failed.Load() > 0
	})
	if l.failed.Load() > 0 {
		l.t.FailNow()
	}
}

// Forget has String tell of operations from now on alone, as to how long they take.
func (l *Load) Forget() { l.gap.Store(0) }

// Halt ends the load, and waits for that. It may be called again.
func (l *Load) Halt() {
	l.once.Do(func() { close(l.stop) })
	l.wg.Wait()
}

// String tells what came of the load.
func (l *Load) String() string {
	return fmt.Sprintf("%d operations, %d failed; longest gap %v", l.done.Load(), l.failed.Load(),
		time.Duration(l.gap.Load()))
}
