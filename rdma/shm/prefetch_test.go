package shm

import (
	"testing"
	"unsafe"
)

// A hint to the processor reads nothing, changes nothing and does no harm, wherever it points.
func TestPrefetch(t *testing.T) {
	b := make([]byte, 4*lineBytes)
	for i := range b {
		b[i] = byte(i)
	}
	here := uintptr(unsafe.Pointer(&b[0]))
	lines := [...]uintptr{here, here | 1, here + lineBytes, here + 2*lineBytes | 1, 0, 1, 1 << 47, 1<<47 | 1,
		^uintptr(0), 8 << 20}
	for n := range len(lines) + 1 {
		prefetch(&lines[0], n)
	}
	for i := range b {
		if b[i] != byte(i) {
			t.Fatalf("byte %d has changed", i)
		}
	}
	if n := testing.AllocsPerRun(100, func() { prefetch(&lines[0], len(lines)) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
