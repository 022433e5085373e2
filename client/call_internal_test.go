package client

import (
	"testing"
	"unsafe"
)

// Every GET clears a call. Whole cache lines lie side by side in the allocator's pages, so a byte more costs two.
func TestCallLines(t *testing.T) {
	if n := unsafe.Sizeof(call{}); n > 7*64 {
		t.Errorf("a call has %d bytes, want at most %d", n, 7*64)
	}
}
