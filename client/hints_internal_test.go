package client

import "testing"

// The hints' memory follows the machine's, within bounds.
func TestHintBytes(t *testing.T) {
	for _, x := range []struct {
		memory uint64
		want   int
	}{
		{0, 64 << 20},
		{512 << 20, 64 << 20},
		{4 << 30, 256 << 20},
		{16 << 30, 1 << 30},
		{1 << 62, 1 << 30},
	} {
		if got := hintBytes(x.memory); got != x.want {
			t.Errorf("of %d bytes of memory hints may have %d, want %d", x.memory, got, x.want)
		}
	}
	if n := memoryBytes(); n < 64<<20 || n > 1<<50 {
		t.Errorf("this machine has %d bytes of memory", n)
	}
}
