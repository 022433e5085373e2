// Package evicttest has what eviction policies are judged by: traces of keys, and the
// exact and sampled policies to compare with. All of it is seeded and repeatable, so the same
// traces can be run through a simulation, a real store and another server.
//
// Start with [Traces], and [LRU], [LFU] and [RedisLFU]. Nothing here may be used concurrently.
package evicttest

import (
	"fmt"
	"math"
	"math/rand/v2"
)

// Trace is an endless sequence of keys.
type Trace struct {
	Name string
	// Next gives the next key. Keys below the number given to Traces come again; larger ones
	// are those of scans, which come once.
	Next func() uint64
}

// Traces makes the traces over that number of keys, for a cache of capacity keys. Scans and loops have the length
// that would hurt that cache most.
func Traces(seed uint64, keys, capacity int) []Trace {
	return []Trace{
		Zipf(seed, keys, 0.7),
		Zipf(seed, keys, 0.99),
		Zipf(seed, keys, 1.2),
		Scans(seed, keys, 0.99, capacity, 6*capacity),
		Scans(seed, keys, 0.99, 2*capacity, 10*capacity),
		Shifting(seed, keys, 0.99, 4*capacity+keys, keys/50),
		Shifting(seed, keys, 1.2, 4*capacity+keys, keys/10),
		Loop(capacity + capacity/10),
		Mix(seed, keys, capacity),
	}
}

// Zipf draws keys below n with probabilities falling as rank^-s.
func Zipf(seed uint64, n int, s float64) Trace {
	z := newZipf(seed, n, s)
	return Trace{fmt.Sprintf("zipf %g", s), func() uint64 { return z.key(z.rank()) }}
}

// Scans is Zipf with, after each every keys, a flood of length keys that never
// come again.
func Scans(seed uint64, n int, s float64, length, every int) Trace {
	z := newZipf(seed, n, s)
	i, once := 0, uint64(n)
	return Trace{fmt.Sprintf("zipf %g, scans %d/%d", s, length, length+every), func() uint64 {
		if i++; i > every+length {
			i = 1
		}
		if i > every {
			once++
			return once
		}
		return z.key(z.rank())
	}}
}

// Shifting is Zipf whose ranks shift after each every keys. Then every rank is taken by the key that was by places
// behind it; the first of all become the last.
func Shifting(seed uint64, n int, s float64, every, by int) Trace {
	z := newZipf(seed, n, s)
	i, shift := 0, 0
	return Trace{fmt.Sprintf("zipf %g, shifts %d/%d", s, by, n), func() uint64 {
		if i++; i > every {
			i, shift = 1, (shift+by)%n
		}
		return z.key((z.rank() + shift) % n)
	}}
}

// Loop goes through n keys, again and again.
func Loop(n int) Trace {
	i := 0
	return Trace{"loop", func() uint64 {
		i = (i + 1) % n
		return uint64(i)
	}}
}

// Mix interleaves a shifting zipf, for half of the keys drawn, with three other kinds. They are keys that come
// once, others that come twice after a short while, and a loop of half the capacity.
func Mix(seed uint64, n, capacity int) Trace {
	hot := Shifting(seed, n, 0.9, 4*n, n/20)
	r := rand.New(rand.NewPCG(seed, 4))
	loop, once := 0, uint64(2*n)
	again := make([]uint64, max(capacity/8, 1)) // comes a second time from here
	return Trace{"mix", func() uint64 {
		switch u := r.Float64(); {
		case u < 0.5:
			return hot.Next()
		case u < 0.7:
			once++
			return once
		case u < 0.85:
			i := r.IntN(len(again))
			k := again[i]
			if again[i] = 0; k == 0 {
				once++
				k = once
				again[i] = k
			}
			return k
		default:
			loop = (loop + 1) % max(capacity/2, 1)
			return uint64(n + loop)
		}
	}}
}

// zipf draws ranks in constant time (Walker's alias method in the form of Vose, 1991), and gives
// each rank a key.
type zipf struct {
	r     *rand.Rand
	keep  []float64
	alias []int32
	perm  []int32
}

func newZipf(seed uint64, n int, s float64) *zipf {
	z := &zipf{r: rand.New(rand.NewPCG(seed, 1)), keep: make([]float64, n), alias: make([]int32, n),
		perm: make([]int32, n)}
	sum := 0.0
	for i := range n {
		z.perm[i] = int32(i)
		z.keep[i] = math.Pow(float64(i+1), -s)
		sum += z.keep[i]
	}
	var small, large []int32
	for i := range n {
		if z.keep[i] *= float64(n) / sum; z.keep[i] < 1 {
			small = append(small, int32(i))
		} else {
			large = append(large, int32(i))
		}
	}
	for len(small) > 0 && len(large) > 0 {
		a, b := small[len(small)-1], large[len(large)-1]
		small = small[:len(small)-1]
		z.alias[a] = b
		if z.keep[b] -= 1 - z.keep[a]; z.keep[b] < 1 {
			large = large[:len(large)-1]
			small = append(small, b)
		}
	}
	for _, i := range append(small, large...) {
		z.keep[i] = 1
	}
	rand.New(rand.NewPCG(seed, 2)).Shuffle(n, func(i, j int) { z.perm[i], z.perm[j] = z.perm[j], z.perm[i] })
	return z
}

func (z *zipf) rank() int {
	i := z.r.IntN(len(z.keep))
	if z.r.Float64() < z.keep[i] {
		return i
	}
	return int(z.alias[i])
}

func (z *zipf) key(rank int) uint64 { return uint64(z.perm[rank]) }
