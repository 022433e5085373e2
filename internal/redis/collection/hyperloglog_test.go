package collection

import (
	"bytes"
	"fmt"
	"math"
	"testing"
)

func TestHyperLogLog(t *testing.T) {
	for _, n := range []int{0, 1, 10, 1000, 100_000} {
		b := NewHyperLogLog()
		var err error
		for i := range n {
			if b, _, err = AddHyperLogLog(b, fmt.Append(nil, i)); err != nil {
				t.Fatal(err)
			}
		}
		var r, again HyperLogLogRegisters
		if err := r.Merge(b); err != nil {
			t.Fatal(err)
		}
		got := float64(r.Count())
		if e := math.Abs(got-float64(n)) / max(1, float64(n)); e > 0.03 {
			t.Errorf("%d elements: estimated as %v, %.1f %% off", n, got, 100*e)
		}
		// The other encoding says the same.
		dense, err := DenseHyperLogLog(bytes.Clone(b))
		if err != nil || again.Merge(dense) != nil || again != r {
			t.Errorf("%d elements: %v, the dense one has other registers", n, err)
		}
		if IsDenseHyperLogLog(b) != (n >= 10_000) {
			t.Errorf("%d elements: dense %v", n, IsDenseHyperLogLog(b))
		}
	}
}

func FuzzHyperLogLog(f *testing.F) {
	b := NewHyperLogLog()
	f.Add(b[hllHeader:], []byte("a"), true)
	f.Add([]byte{0x40}, []byte("a"), true)
	f.Add([]byte{0xff, 0xff, 0x7f, 0xff, 0}, []byte("b"), true)
	f.Add(make([]byte, hllDenseLen-hllHeader), []byte("c"), false)
	f.Fuzz(func(t *testing.T, registers, element []byte, sparse bool) {
		b := append([]byte("HYLL\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"), registers...)
		if sparse {
			b[4] = 1
		}
		if !IsHyperLogLog(b) {
			return
		}
		var r HyperLogLogRegisters
		sound := r.Merge(b) == nil
		was := r
		c, _, err := AddHyperLogLog(bytes.Clone(b), element)
		if sound != (err == nil) && sound {
			t.Fatalf("sound, and yet %v", err)
		}
		if sound {
			register, rank := hllPlace(element)
			was[register] = max(was[register], rank)
			var now HyperLogLogRegisters
			if err := now.Merge(c); err != nil || now != was {
				t.Fatalf("after an element: %v, or other registers", err)
			}
		}
		if c, err = DenseHyperLogLog(b); sound && (err != nil || len(c) != hllDenseLen) {
			t.Fatalf("dense: %v, %d bytes", err, len(c))
		}
	})
}
