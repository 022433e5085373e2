package ycsb

import (
	"math"
	"math/rand/v2"
)

// Zipf draws ranks 0, 1, … with probability proportional to 1/(rank+1)^theta, in constant time and memory.
// It does so for theta in (0, 1), which math/rand's Zipf does not serve. The two lowest ranks are exact,
// the others within the error of Gray's inversion. It serves one goroutine at a time.
type Zipf struct {
	n            uint64
	theta, zetan float64
	alpha, eta   float64
}

// NewZipf makes a generator of ranks below n, at least 1.
func NewZipf(n uint64, theta float64) *Zipf {
	z := &Zipf{n: max(n, 1), theta: theta, alpha: 1 / (1 - theta)}
	z.zetan = zeta(z.n, theta)
	z.setEta()
	return z
}

func (z *Zipf) setEta() {
	z.eta = (1 - math.Pow(2/float64(z.n), 1-z.theta)) / (1 - zeta(2, z.theta)/z.zetan)
}

// Grow raises the number of ranks to n, in time proportional to the difference.
func (z *Zipf) Grow(n uint64) {
	if n <= z.n {
		return
	}
	for ; z.n < n; z.n++ {
		z.zetan += math.Pow(float64(z.n+1), -z.theta)
	}
	z.setEta()
}

// Next draws a rank.
func (z *Zipf) Next(rng *rand.Rand) uint64 {
	u := rng.Float64()
	uz := u * z.zetan
	switch {
	case uz < 1 || z.n == 1:
		return 0
	case uz < 1+math.Pow(0.5, z.theta) || z.n == 2:
		return 1
	}
	return min(uint64(float64(z.n)*math.Pow(z.eta*u-z.eta+1, z.alpha)), z.n-1)
}

// exactTerms is how many terms zeta adds up before it integrates the rest
// (Euler-Maclaurin); the error is below 1e-12.
const exactTerms = 10_000

// zeta is the sum of i^-theta for i = 1 to n.
func zeta(n uint64, theta float64) float64 {
	var sum float64
	m := min(n, exactTerms)
	for i := m; i >= 1; i-- {
		sum += math.Pow(float64(i), -theta)
	}
	if n == m {
		return sum
	}
	a, b := float64(m), float64(n)
	sum += (math.Pow(b, 1-theta) - math.Pow(a, 1-theta)) / (1 - theta)
	sum += (math.Pow(b, -theta) - math.Pow(a, -theta)) / 2
	return sum + theta*(math.Pow(a, -theta-1)-math.Pow(b, -theta-1))/12
}
