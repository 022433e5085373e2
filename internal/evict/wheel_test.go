package evict_test

import (
	"math/rand/v2"
	"testing"

	"github.com/kvd-project/kvd/internal/evict"
)

const hour = 3600 * 1000

// A wheel gives back each hash once, never before its time, and within 1/8 of its life or
// 64 ms after it.
func TestWheel(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	for round := range 20 {
		now := uint64(1_700_000_000_000) + rng.Uint64N(1<<30)
		w := evict.NewWheel(now, 64<<20)
		type entry struct{ born, expiry uint64 }
		var all []entry
		seen := map[uint64]bool{}
		longest := uint64(1) << (6 + rng.IntN(18)) // to 2.3 h
		out := make([]uint64, 0, 1+rng.IntN(300))
		next := uint64(0)
		for step := 0; step < 3000 || len(seen) < len(all); step++ {
			if step < 2000 {
				for range rng.IntN(50) {
					e := entry{now, now + rng.Uint64N(longest)}
					if rng.IntN(100) == 0 {
						e.expiry = now - min(now, rng.Uint64N(100_000)) // long ago
					}
					w.Add(e.expiry, uint64(len(all)))
					all = append(all, e)
				}
			}
			now += rng.Uint64N(longest/500 + 2)
			next, _ = w.Next()
			for {
				got := w.Take(now, out)
				for _, h := range got {
					e := all[h]
					if seen[h] {
						t.Fatalf("round %d: %d again", round, h)
					}
					if seen[h] = true; e.expiry >= now && e.expiry > e.born {
						t.Fatalf("round %d: %d expires at %d, taken at %d", round, h, e.expiry, now)
					}
				}
				if len(got) < cap(out) {
					break
				}
			}
			if step%100 == 0 { // what is late
				for h, e := range all {
					end := max(e.expiry, e.born)
					if life := end - e.born; !seen[uint64(h)] && end+max(life/8, 64) < now {
						t.Fatalf("round %d: %d with a life of %d ms is still there %d ms after its end", round, h, life,
							now-end)
					}
				}
			}
			if at, ok := w.Next(); ok && at <= now || ok && next > at+longest {
				t.Fatalf("round %d: the next is due at %d, it is %d", round, at, now)
			}
			if w.Len() != len(all)-len(seen) {
				t.Fatalf("round %d: %d entries, want %d", round, w.Len(), len(all)-len(seen))
			}
			if step > 10_000_000 {
				t.Fatalf("round %d: %d of %d", round, len(seen), len(all))
			}
		}
		if w.Forgotten() != 0 {
			t.Errorf("round %d: %d forgotten", round, w.Forgotten())
		}
	}
}

// A wheel that has no room for all keeps the shortest-lived, and its memory is bounded.
func TestWheelBound(t *testing.T) {
	const now, room = 1_700_000_000_000, 64 << 10
	for _, order := range []string{"short first", "long first", "mixed"} {
		w := evict.NewWheel(now, room)
		const n = 20_000 // twice what there is room for, of each
		short := func(i uint64) { w.Add(now+i%1000, i) }
		long := func(i uint64) { w.Add(now+hour+i%1000, n+i) }
		for i := range uint64(n) {
			switch order {
			case "short first":
				short(i)
			case "long first":
				long(i)
			default:
				short(i)
				long(i)
			}
		}
		for i := range uint64(n) {
			switch order {
			case "short first":
				long(i)
			case "long first":
				short(i)
			}
		}
		if w.Bytes() > room {
			t.Errorf("%s: %d bytes", order, w.Bytes())
		}
		if got := uint64(w.Len()) + w.Forgotten(); got != 2*n {
			t.Errorf("%s: %d and %d forgotten of %d", order, w.Len(), w.Forgotten(), 2*n)
		}
		if w.Len() < 6000 {
			t.Errorf("%s: only %d remembered", order, w.Len())
		}
		for _, h := range w.Take(now+2*hour, make([]uint64, 0, 2*n)) {
			if h >= n {
				t.Fatalf("%s: a long life is remembered, and %d are forgotten", order, w.Forgotten())
			}
		}
		if w.Len() != 0 {
			t.Errorf("%s: %d left", order, w.Len())
		}
		// A hash that has been taken makes room.
		w.Add(now+3*hour, 1)
		if w.Len() != 1 {
			t.Errorf("%s: no room in an empty wheel", order)
		}
	}
}

// Keys that expire in days are left to others.
func TestWheelFar(t *testing.T) {
	w := evict.NewWheel(0, 1<<20)
	w.Add(48*hour, 1)
	if _, ok := w.Next(); ok || w.Forgotten() != 1 {
		t.Errorf("remembered, %d forgotten", w.Forgotten())
	}
}

func BenchmarkWheel(b *testing.B) {
	w := evict.NewWheel(0, 8<<20)
	out := make([]uint64, 0, 256)
	for i := range b.N {
		now := uint64(i) / 50 // 50 a ms
		w.Add(now+1000, uint64(i))
		if i%200 == 0 {
			w.Take(now, out)
		}
	}
}
