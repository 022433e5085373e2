package collection

import (
	"fmt"
	"testing"
)

// BenchmarkHash is what package collection costs a command on a hash of 10 fields, and of so many that it is 64 KiB
// long.
func BenchmarkHash(b *testing.B) {
	for _, n := range []int{10, 3500} {
		var h Hash
		for i := range n {
			h, _, _ = h.Set(fmt.Appendf(nil, "field%d", i), []byte("0123456789"))
		}
		field := fmt.Appendf(nil, "field%d", n*7/10)
		own := make([]byte, 0, len(h)+64)
		b.Run(fmt.Sprintf("get/%d", n), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if v, err := h.Get(field); v == nil || err != nil {
					b.Fatal(err)
				}
			}
		})
		b.Run(fmt.Sprintf("set/%d", n), func(b *testing.B) {
			b.ReportAllocs()
			value := []byte("new value of another length")
			for b.Loop() {
				own = append(own[:0], h...)
				if _, added, err := Hash(own).Set(field, value); added || err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
