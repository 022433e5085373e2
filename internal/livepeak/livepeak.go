// Package livepeak measures for tests how much memory something has in use at most.
//
// It leaves to its callers what is run meanwhile, and what is too much. [Watch] is all of it. It may be called
// concurrently, but measures the whole process. It owns a goroutine until its result is asked for.
package livepeak

import (
	"runtime"
	"runtime/metrics"
	"time"
)

// Watch begins to look at the bytes of the heap's objects every millisecond. most ends that, and gives how many more
// than at the beginning there were at most; it is called once. With collect the collector runs before each look, so
// that garbage does not count.
func Watch(collect bool) (most func() int64) {
	sample := func() int64 {
		if collect {
			runtime.GC()
		}
		s := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}}
		metrics.Read(s)
		return int64(s[0].Value.Uint64())
	}
	start, end, done := sample(), make(chan struct{}), make(chan int64)
	go func() {
		top := start
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for {
			top = max(top, sample())
			select {
			case <-tick.C:
			case <-end:
				done <- top - start
				return
			}
		}
	}()
	return func() int64 { close(end); return <-done }
}
