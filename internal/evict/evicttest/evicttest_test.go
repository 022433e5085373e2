package evicttest

import (
	"math"
	"testing"
)

// pattern is which accesses hit, as a string of h and m.
func pattern(c Cache, keys string) string {
	b := []byte(keys)
	for i, k := range b {
		if b[i] = 'm'; c.Access(uint64(k)) {
			b[i] = 'h'
		}
	}
	return string(b)
}

func TestExact(t *testing.T) {
	for _, c := range []struct {
		cache      Cache
		keys, want string
	}{
		// c takes the place of b, b that of c, c that of a, a that of b.
		{NewLRU(2), "abacabca", "mmhmhmmm"},
		// a has been used three times when the others take each other's places.
		{NewLFU(2), "aaabcbcabb", "mhhmmmmhmh"},
		// Of two used once, the one used longer ago goes.
		{NewLFU(2), "abcbac", "mmmhmm"},
	} {
		if got := pattern(c.cache, c.keys); got != c.want {
			t.Errorf("%T, %s: %s, want %s", c.cache, c.keys, got, c.want)
		}
	}
}

// TestRedisLFU checks the counter against its table in redis.conf (factor 10: 10 after 100 hits, 18 after
// 1000, 142 after 100,000), its decay, and that what is used often stays.
func TestRedisLFU(t *testing.T) {
	c := NewRedisLFU(1, 100, 1_000_000_000)
	for _, x := range []struct{ hits, want int }{{100, 10}, {1000, 18}, {100_000, 142}} {
		sum := 0
		for range 20 {
			n := uint8(0)
			for range x.hits {
				n = c.logIncr(n)
			}
			sum += int(n)
		}
		if got := float64(sum) / 20; math.Abs(got-float64(x.want)) > 0.1*float64(x.want)+1 {
			t.Errorf("counter after %d hits: %.1f on average, want about %d", x.hits, got, x.want)
		}
	}

	c = NewRedisLFU(1, 100, 1)
	c.clock = 180
	if got := c.decayed(&redisKey{counter: 10}); got != 7 {
		t.Errorf("counter of 10 after three minutes: %d, want 7", got)
	}
	if got := c.decayed(&redisKey{counter: 2}); got != 0 {
		t.Errorf("counter of 2 after three minutes: %d, want 0", got)
	}

	c = NewRedisLFU(1, 100, 1_000_000)
	for range 50 {
		for k := range uint64(50) {
			c.Access(k)
		}
	}
	for k := uint64(1000); k < 3000; k++ {
		c.Access(k)
		if len(c.keys) > 100 || len(c.keys) != len(c.at) {
			t.Fatalf("%d keys and %d in the index, want at most 100 and the same", len(c.keys), len(c.at))
		}
	}
	kept := 0
	for k := range uint64(50) {
		if c.Access(k) {
			kept++
		}
	}
	if kept < 48 {
		t.Errorf("of 50 keys used often, %d survive a flood", kept)
	}
}

func TestTraces(t *testing.T) {
	const keys, capacity, n = 1000, 100, 20_000
	a, b, other := Traces(1, keys, capacity), Traces(1, keys, capacity), Traces(2, keys, capacity)
	for i := range a {
		same := 0
		for range n {
			x := a[i].Next()
			if y := b[i].Next(); x != y {
				t.Fatalf("%s: %d and %d with one seed", a[i].Name, x, y)
			}
			if x == other[i].Next() {
				same++
			}
		}
		if same > n/2 && a[i].Name != "loop" {
			t.Errorf("%s: with another seed %d of %d keys are the same", a[i].Name, same, n)
		}
	}

	// The first ranks of zipf come as often as they should.
	tr, z := Zipf(1, keys, 0.99), newZipf(1, keys, 0.99)
	count := map[uint64]float64{}
	for range 1_000_000 {
		count[tr.Next()]++
	}
	sum := 0.0
	for i := range keys {
		sum += math.Pow(float64(i+1), -0.99)
	}
	for rank := range 20 {
		want := 1_000_000 * math.Pow(float64(rank+1), -0.99) / sum
		if got := count[z.key(rank)]; math.Abs(got-want) > 6*math.Sqrt(want) {
			t.Errorf("rank %d came %.0f times, want about %.0f", rank, got, want)
		}
	}
}
