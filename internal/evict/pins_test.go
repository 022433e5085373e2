package evict_test

import (
	"math/rand/v2"
	"testing"

	"github.com/kvd-project/kvd/internal/evict"
	"github.com/kvd-project/kvd/internal/layout"
)

// pinnedCache is a cache whose records may be pinned; it evicts as sessions do, a few records of each sample.
type pinnedCache struct {
	now    uint64
	rng    *rand.Rand
	policy *evict.Policy
	pins   evict.Pins
	quota  float64 // < 0: access words say nothing of pins, and nobody looks at them
	words  []layout.AccessWord
	until  []uint64 // of each record, 0: it is not pinned
	early  int      // records evicted before their time
}

const (
	pinnedRecords = 10_000
	pinSample     = 60
	pinVictims    = 4
)

func newPinnedCache(quota float64) *pinnedCache {
	c := &pinnedCache{now: 1_700_000_000_000, rng: rand.New(rand.NewPCG(3, 4)), policy: evict.New(evict.Options{}),
		quota: quota, words: make([]layout.AccessWord, pinnedRecords), until: make([]uint64, pinnedRecords)}
	for i := range c.words {
		c.put(i, 0)
	}
	return c
}

// put makes the i-th record a new one, pinned for so many milliseconds.
func (c *pinnedCache) put(i int, pinned uint64) {
	w := layout.MakeLive(1, 7, 1, 1)
	if c.words[i], c.until[i] = layout.MakeAccess(w, c.now, 8, 0), 0; pinned > 0 {
		if c.until[i] = c.now + pinned; c.quota >= 0 {
			c.words[i] = c.words[i].At(c.until[i])
		}
	}
}

// step evicts from a sample, and puts as many records, pinned of them with a chance. It returns how many went.
func (c *pinnedCache) step(chance float64, pinned uint64) int {
	c.now += 20
	at := make([]int, pinSample)
	sample := make([]evict.Candidate, pinSample)
	for i := range at {
		at[i] = c.rng.IntN(len(c.words))
		sample[i] = evict.Candidate{Word: c.words[at[i]], Known: true, Units: 1}
	}
	may := make([]int, pinSample)
	for i := range may {
		may[i] = i
	}
	if c.quota >= 0 {
		may, _ = c.pins.Evictable(c.now, c.quota, sample, pinVictims, may[:0])
	}
	some := make([]evict.Candidate, len(may))
	for i, j := range may {
		some[i] = sample[j]
	}
	picked := c.policy.Choose(c.now, some, nil, pinVictims)
	for _, i := range picked {
		k := at[may[i]]
		if c.until[k] > c.now {
			c.early++
		}
		c.policy.Evicted(c.now, uint64(k), some[i])
		if c.rng.Float64() < chance {
			c.put(k, pinned)
		} else {
			c.put(k, 0)
		}
	}
	return len(picked)
}

// use has n records used that are not pinned.
func (c *pinnedCache) use(n int) {
	w := layout.MakeLive(1, 7, 1, 1)
	for range n {
		if i := c.rng.IntN(len(c.words)); c.until[i] == 0 {
			c.words[i] = layout.MakeAccess(w, c.now, c.policy.Touched(c.now, c.words[i], 1), 0)
		}
	}
}

// share is how much is pinned.
func (c *pinnedCache) share() float64 {
	n := 0
	for _, u := range c.until {
		if u > c.now {
			n++
		}
	}
	return float64(n) / float64(len(c.until))
}

// Of 2,000 pins, a fifth of what there is, none is evicted early while memory is short. Of as many that nobody notes,
// most are.
func TestPinsHold(t *testing.T) {
	for _, quota := range []float64{0.3, -1} {
		c := newPinnedCache(quota)
		for i := range 2000 {
			c.put(i*5, 60*60*1000)
		}
		for range 20_000 { // 400 s, in which all else is replaced several times
			c.use(100)
			if n := c.step(0, 0); n != pinVictims {
				t.Fatalf("quota %v: %d records of a sample", quota, n)
			}
		}
		t.Logf("quota %v: %d of 2,000 pins evicted early", quota, c.early)
		if quota > 0 && c.early != 0 || quota < 0 && c.early < 1000 {
			t.Errorf("quota %v: %d of 2,000 pins evicted early", quota, c.early)
		}
	}
}

// Where nine of ten records are pinned when they are put, about as much as the quota stays pinned, and every sample has
// records to evict.
func TestPinsQuota(t *testing.T) {
	for _, quota := range []float64{0.1, 0.3, 0.6} {
		c := newPinnedCache(quota)
		for i := range 20_000 {
			n := c.step(0.9, 30*60*1000)
			if n < pinVictims {
				t.Fatalf("quota %v, sample %d: %d records to evict", quota, i, n)
			}
			if s := c.share(); i%500 == 0 && i > 10_000 && (s < quota-0.08 || s > quota+0.08) {
				t.Errorf("quota %v, sample %d: %.3f is pinned", quota, i, s)
			}
		}
		t.Logf("quota %v: %.3f is pinned, %d were evicted early", quota, c.share(), c.early)
	}
}

// A pin ends by itself, holds no record that has expired, and none of another key.
func TestPinEnds(t *testing.T) {
	const now = 1_700_000_000_000
	w := layout.MakeLive(1, 7, 1, 1)
	pinned := layout.MakeAccess(w, now, 8, 0).At(now + 1000)
	var p evict.Pins
	at := func(now uint64, c evict.Candidate) bool {
		out, passed := p.Evictable(now, 1, []evict.Candidate{c}, 1, nil)
		return len(out) == 1 && passed == 0
	}
	for _, x := range []struct {
		now  uint64
		c    evict.Candidate
		want bool
	}{
		{now, evict.Candidate{Word: pinned, Known: true}, false},
		{now + 990, evict.Candidate{Word: pinned, Known: true}, false},
		{now + 1000, evict.Candidate{Word: pinned, Known: true}, true},
		{now, evict.Candidate{Word: pinned}, true},
		{now + 2000, evict.Candidate{Word: layout.MakeAccess(w, now, 8, now+1000).At(now + 60_000), Known: true}, true},
		{now, evict.Candidate{Word: layout.MakeAccess(w, now, 8, 0).At(now + layout.MaxPinMillis), Known: true}, false},
		// The clock of who evicts is eight minutes behind.
		{now - 8*60_000, evict.Candidate{Word: layout.MakeAccess(w, now, 8, 0).At(now + layout.MaxPinMillis),
			Known: true}, false},
	} {
		if got := at(x.now, x.c); got != x.want {
			t.Errorf("%+v at %+d: evictable %v", x.c, int64(x.now)-now, got)
		}
	}
}

// The records drawn tell of pins that no access word tells, by their lengths. More than the quota is found to be that,
// and less is not.
func TestPinsDrawn(t *testing.T) {
	const now = 1_700_000_000_000
	rng := rand.New(rand.NewPCG(5, 6))
	w := layout.MakeLive(1, 7, 1, 1)
	for _, x := range []struct {
		noted, hidden int // of ten records, each as long as nine of the others
		over          bool
	}{{0, 0, false}, {0, 1, false}, {1, 1, false}, {0, 9, true}, {2, 6, true}} {
		var p evict.Pins
		c := make([]evict.Candidate, 20)
		for i := range c {
			c[i] = evict.Candidate{Word: layout.MakeAccess(w, now, 8, 0), Known: true, Units: 1}
			if i < 10 {
				c[i].Units = 9
			}
			if i < x.noted {
				c[i].Word = c[i].Word.At(now + 1000)
			}
		}
		for range 4000 {
			p.Evictable(now, 0.3, c, 4, nil)
			i, rest := evict.Draw(now, c, rng.Float64())
			if i < x.noted {
				t.Fatalf("%+v: %d is drawn", x, i)
			}
			p.Drawn(rest, i < x.noted+x.hidden)
		}
		if p.Over(0.3) != x.over {
			t.Errorf("%+v: over: %v", x, !x.over)
		}
	}
}
