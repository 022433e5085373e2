package ctl

import (
	"strconv"
	"testing"
)

func TestParseBytes(t *testing.T) {
	for s, want := range map[string]uint64{"0": 0, "17": 17, "4KiB": 4096, "4k": 4096, "1.5 MiB": 3 << 19,
		"2GB": 2 << 30, "1TiB": 1 << 40, "8B": 8} {
		if got, err := ParseBytes(s); err != nil || got != want {
			t.Errorf("%q: %d %v, want %d", s, got, err, want)
		}
	}
	for _, s := range []string{"", "x", "-1", "1XB", "1e30TiB", "NaN", "KiB", "4KiBiB"} {
		if got, err := ParseBytes(s); err == nil {
			t.Errorf("%q: %d, want an error", s, got)
		}
	}
}

func FuzzParseBytes(f *testing.F) {
	for _, s := range []string{"1.5GiB", "4096", "1e3K", "NaN", "0x1p40", "4611686018427387904", "-0"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, in string) {
		n, err := ParseBytes(in)
		if err == nil && n >= 1<<62 || err != nil && n != 0 {
			t.Fatalf("%q is %d, %v", in, n, err)
		}
		if again, err2 := ParseBytes(strconv.FormatUint(n, 10)); err == nil && n < 1<<53 &&
			(err2 != nil || again != n) {
			t.Fatalf("%q is %d, read again %d, %v", in, n, again, err2)
		}
	})
}
