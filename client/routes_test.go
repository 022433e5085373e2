package client_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/testutil"
)

// TestTwoPorts pulls one of two ports of a memory node under load, and plugs it in again, 50 times: no operation fails,
// and each time both carry connections again.
func TestTwoPorts(t *testing.T) {
	t.Parallel()
	r := newRig(t, "tcp", 1, 5*time.Second)
	n := r.nodes[0]
	r.stopNode(0)
	dev := r.open()
	n.more = []way{{dev, newProxy(t, "127.0.0.1:1")}}
	r.startNode(0)
	if err := n.node.Ready(t.Context()); err != nil {
		t.Fatal(err)
	}
	ports := []*proxy{n.proxy, n.more[0].proxy}
	c := r.client(r.options())
	l := newGapLoad(t, c, 2)
	defer l.halt()
	both := func() bool {
		up := 0
		for _, p := range c.Stats().Routes {
			if p.Connections >= 2 && p.Err == "" {
				up++
			}
		}
		return up == len(ports)
	}
	testutil.Until(t, "both ports carry connections", both)
	pulls := 50
	if testing.Short() {
		pulls = 15
	}
	if s := os.Getenv("KVD_PULLS"); s != "" {
		var err error
		if pulls, err = strconv.Atoi(s); err != nil {
			t.Fatal(err)
		}
	}
	var back time.Duration
	for i := range pulls {
		ports[i%2].setDown(true)
		l.progress(5)
		plugged := time.Now()
		ports[i%2].setDown(false)
		testutil.Until(t, fmt.Sprintf("both ports carry connections again: %+v", c.Stats().Routes), both)
		back = max(back, time.Since(plugged))
		l.progress(40) // a port that fails as soon as it is in use would be left alone for a while
	}
	l.halt()
	t.Logf("%d pulls, %d operations, %d failed; longest gap %v; both ports were in use again after %v at most", pulls,
		l.done.Load(), l.failed.Load(), l.longest(), back)
	if l.failed.Load() != 0 {
		t.Errorf("%d operations failed", l.failed.Load())
	}
}

// gapLoad writes and reads short and long values, and notes how long an operation took at most.
type gapLoad struct {
	t            testing.TB
	c            *client.Client
	stop         chan struct{}
	once         sync.Once
	wg           sync.WaitGroup
	done, failed atomic.Int64
	gap          atomic.Int64 // nanoseconds
}

func newGapLoad(t testing.TB, c *client.Client, workers int) *gapLoad {
	l := &gapLoad{t: t, c: c, stop: make(chan struct{})}
	for w := range workers {
		l.wg.Go(func() { l.run(w) })
	}
	return l
}

func (l *gapLoad) run(w int) {
	sizes := [...]int{100, 100 << 10}
	pace := time.NewTicker(40 * time.Millisecond)
	defer pace.Stop()
	for i := 0; ; i++ {
		select {
		case <-l.stop:
			return
		case <-pace.C:
		}
		key := fmt.Appendf(nil, "%d-%d", w, i%64)
		value := bytes.Repeat([]byte{byte(i), byte(w)}, sizes[i%2]/2)
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

func (l *gapLoad) judgeResult(what string, key []byte, begin time.Time, err error) {
	took := time.Since(begin).Nanoseconds()
	for was := l.gap.Load(); took > was && !l.gap.CompareAndSwap(was, took); was = l.gap.Load() {
	}
	if err != nil {
		l.failed.Add(1)
		l.t.Errorf("%s of %s: %v", what, key, err)
	}
	l.done.Add(1)
}

// progress waits until n more operations have ended.
func (l *gapLoad) progress(n int64) {
	l.t.Helper()
	from := l.done.Load()
	testutil.Until(l.t, fmt.Sprintf("%d more operations", n), func() bool { return l.done.Load() >= from+n })
}

func (l *gapLoad) longest() time.Duration { return time.Duration(l.gap.Load()) }

func (l *gapLoad) halt() {
	l.once.Do(func() { close(l.stop) })
	l.wg.Wait()
}
