package units

import (
	"math"
	"testing"
)

func TestBytes(t *testing.T) {
	for n, want := range map[uint64]string{
		0: "0 bytes", 1: "1 byte", 2: "2 bytes", 1023: "1023 bytes", 1024: "1 KiB", 1025: "1025 bytes", 1536: "1.5 KiB",
		64 << 20: "64 MiB", 64<<20 + 1: "67108865 bytes", 64<<20 - 1: "67108863 bytes", 64<<20 + 1<<19: "64.5 MiB",
		1 << 30: "1 GiB", 3 << 29: "1.5 GiB", 1<<30 + 1<<20: "1025 MiB", 1<<30 - 1<<20: "1023 MiB", 5 << 40: "5 TiB",
		1 << 50:        "1024 TiB",
		math.MaxUint64: "18446744073709551615 bytes",
	} {
		if got := Bytes(n); got != want {
			t.Errorf("%d: %q, want %q", n, got, want)
		}
	}
	if got := Bytes(int64(-1)); got != "-1 bytes" {
		t.Error(got)
	}
}

func TestRounded(t *testing.T) {
	for n, want := range map[uint64]string{0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 1537: "1.5 KiB",
		64 << 20: "64.0 MiB",
		5 << 40:  "5.0 TiB", 1 << 50: "1024.0 TiB"} {
		if got := Rounded(n); got != want {
			t.Errorf("%d: %q, want %q", n, got, want)
		}
	}
}
