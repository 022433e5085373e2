package testutil

import (
	"runtime"
	"testing"
)

// Memory is the bytes of objects and stacks that this process uses, after a collection. It leaves out
// what a [sync.Pool] held.
func Memory() int64 {
	runtime.GC()
	runtime.GC() // what a pool holds goes with the second
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc + m.StackInuse)
}

// UntilGrown is [Until] for the memory of this process: it is to exceed an earlier [Memory], before, by at most most
// bytes. It returns by how much it exceeds that. A single look may meet memory that others have just dropped.
// Goroutines that have not run yet hold it, or the collector has not had it.
func UntilGrown(t testing.TB, what string, before, most int64) (grown int64) {
	t.Helper()
	if !poll(func() bool { grown = Memory() - before; return grown <= most }) {
		t.Fatalf("not within %v: %s take %d bytes more, at most %d are due", Limit, what, grown, most)
	}
	return grown
}
