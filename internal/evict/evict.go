// Package evict chooses what a cache forgets. It is arithmetic: it reads no clock,
// does no I/O and starts nothing; its caller hands it time, and samples of what is
// there.
//
// Start with [Policy] and [Candidate]. A Policy ranks the candidates of a sample. It ranks them by how soon they
// are likely to be used again, per byte and per time that keeping them costs. It learns that from what its owner
// sees. Keys are used again (Touched), are evicted (Evicted), or turn out to have been evicted too early (Born). It
// learns after how long, and after how many uses, that is. No weights between recency and frequency need choosing,
// because both are coordinates of what is learned.
//
// Touched, Born and NoteIntervalMillis may be called concurrently with everything; Choose and Evicted by one
// goroutine at a time. Only New allocates.
//
// The ideas:
//
//   - Samples in place of lists, and clients that evict by one-sided access, are from Ditto (SOSP 2023).
//   - Rank by hit density learned per class and age is from LHD (NSDI 2018).
//   - The horizon that maximises it is Gittins' index (1979).
//   - A ghost history that teaches is from LeCaR (HotStorage 2018) and ARC (FAST 2003).
//   - Decayed counts as features are from LRB (NSDI 2020).
//   - Value per size is from GreedyDual-Size-Frequency (1998).
package evict

import (
	"math"
	"math/bits"
	"sync/atomic"

	"github.com/kvd-project/kvd/internal/layout"
)

// Constants of the policy. TestHitRatio judges them; it is not very sensitive to any.
const (
	// countUnit is a use that has not decayed. Counts have so many fractions, since
	// decay makes few of many.
	countUnit = 8
	// halfLifeAges: a count halves in so many mean ages of the records kept.
	halfLifeAges = 16
	// noteFraction: the uses of a key are noted at most so many times in the mean age of the records
	// kept.
	noteFraction = 8

	minNoteMillis   = layout.AccessTickMillis
	maxNoteMillis   = 60_000
	firstNoteMillis = 1000

	// refreshEvents is after how many observations the values are computed again, and fade what part of
	// its weight that which was learned before loses by that. A new Policy learns faster: first
	// after firstRefresh observations, then after twice as many each time.
	refreshEvents = 4096
	fade          = 0.05
	firstRefresh  = 128
	// horizonAges: of a record that was evicted too early is learned when it is put again within so
	// many mean ages of the records kept.
	horizonAges = 1
	// doubt is how many observations the assumption made without any weighs.
	doubt = 2

	tickBits = 26

	ghostWays = 8
)

// Options configure a Policy.
type Options struct {
	// Seed varies where the ghost history keeps a key.
	Seed uint64
	// GhostEntries is how many evicted keys are remembered, at 8 bytes each; about the number
	// that the cache holds is good. Default 131072, that is 1 MiB; rounded up to a power of two.
	GhostEntries int
}

// Candidate is a record that could be evicted.
type Candidate struct {
	// Word is what is known of its use.
	Word layout.AccessWord
	// Known says that Word is about this record and not about one whose slot it has.
	Known bool
	// Units is how much space it takes, in whatever unit; 0 counts as 1.
	Units uint32
}

// Policy ranks records and learns to. Create it with New.
type Policy struct {
	seed  uint64
	ghost []atomic.Uint64 // buckets of ghostWays; see ghostEntry

	// Counts since the last refresh, by class and age: hits, and ends without one.
	hits, ends [classes][ages]atomic.Int32
	events     atomic.Uint32

	meanTicks atomic.Uint32 // mean age of sampled records; 0 until there was a sample

	// The rest belongs to Choose.

	mean        float64 // as meanTicks
	learnedHits [classes][ages]float32
	learnedEnds [classes][ages]float32
	value       [classes][ages]float32
	next        uint32 // refresh at so many events
}

// New makes a Policy that knows nothing.
func New(o Options) *Policy {
	if o.GhostEntries <= 0 {
		o.GhostEntries = 128 << 10
	}
	n := 1 << bits.Len(uint(max(o.GhostEntries, ghostWays)-1))
	return &Policy{seed: o.Seed, ghost: make([]atomic.Uint64, n)}
}

// MaxChoose bounds how many records one call of Choose gives.
const MaxChoose = 32

// Choose appends to dst the indexes in c of the n records that it costs least to forget, the least valuable first.
// There are fewer if c is shorter, or n is above MaxChoose. Expired ones come before all others. It learns from the
// sample how old records are.
func (p *Policy) Choose(nowMillis uint64, c []Candidate, dst []int, n int) []int {
	p.noteAges(nowMillis, c)
	if p.events.Load() >= p.next {
		p.refresh()
	}
	if n = min(n, len(c), MaxChoose); n <= 0 {
		return dst
	}
	base := len(dst)
	var worst [MaxChoose]float64 // what those of dst[base:] are worth
	for i := range c {
		v := p.worth(nowMillis, &c[i])
		k := len(dst) - base
		if k == n {
			if v >= worst[n-1] {
				continue
			}
			k--
		} else {
			dst = append(dst, i)
		}
		for ; k > 0 && worst[k-1] > v; k-- {
			dst[base+k], worst[k] = dst[base+k-1], worst[k-1]
		}
		dst[base+k], worst[k] = i, v
	}
	return dst
}

// noteAges takes the mean age from a sample.
func (p *Policy) noteAges(nowMillis uint64, c []Candidate) {
	sum, n := 0.0, 0
	for i := range c {
		if c[i].Known && !c[i].Word.Expired(nowMillis) {
			sum += float64(c[i].Word.PastTicks(nowMillis))
			n++
		}
	}
	if n == 0 {
		return
	}
	m := sum / float64(n)
	if p.mean == 0 {
		p.mean = m
	} else {
		p.mean += (m - p.mean) * min(0.25, float64(n)/4096)
	}
	p.meanTicks.Store(uint32(max(p.mean, 1)))
}

// worth is what keeping c is worth: -1 if it has expired.
func (p *Policy) worth(nowMillis uint64, c *Candidate) float64 {
	units := float64(max(c.Units, 1))
	if !c.Known {
		// Nobody noted a use since its slot was another's.
		return float64(p.value[0][ageBucket(uint32(p.mean))]) / units
	}
	if c.Word.Expired(nowMillis) {
		return -1
	}
	return float64(p.value[class(c.Word.Count())][ageBucket(c.Word.PastTicks(nowMillis))]) / units
}

// Evicted says that c, whose key has this hash, was evicted.
func (p *Policy) Evicted(nowMillis, hash uint64, c Candidate) {
	if !c.Known || c.Word.Expired(nowMillis) {
		return
	}
	// Until the horizon Born will hear of it if it is wanted again; this takes it that it is not.
	a := c.Word.PastTicks(nowMillis)
	end := ageBucket(a + horizonAges*p.meanTicks.Load())
	p.ends[class(c.Word.Count())][end].Add(1)
	p.events.Add(1)

	set, tag := p.place(hash)
	then := (uint32(nowMillis/layout.AccessTickMillis) - a) & (1<<tickBits - 1)
	oldest, oldestAge := 0, uint32(0)
	for i := range set {
		g := ghostEntry(set[i].Load())
		if g == 0 || g.tag() == tag {
			oldest = i
			break
		}
		if a := ticksSince(nowMillis, g.ticks()); a >= oldestAge {
			oldest, oldestAge = i, a
		}
	}
	set[oldest].Store(uint64(makeGhost(tag, then, c.Word.Count(), end)))
}

// Born says that a key with this hash, which was not there, is being put. It returns the count to begin with: one
// use, and what is remembered of those before it was evicted.
func (p *Policy) Born(nowMillis, hash uint64) (count uint32) {
	set, tag := p.place(hash)
	for i := range set {
		w := set[i].Load()
		g := ghostEntry(w)
		if g == 0 || g.tag() != tag {
			continue
		}
		if !set[i].CompareAndSwap(w, 0) {
			break // somebody else puts it, or another like it was evicted
		}
		a := ticksSince(nowMillis, g.ticks())
		if b, k := ageBucket(a), class(g.count()); b <= g.end() {
			p.ends[k][g.end()].Add(-1)
			p.hits[k][b].Add(1)
			p.events.Add(1)
		}
		return p.use(g.count(), a, 1)
	}
	return countUnit
}

// Touched says that a record whose access word is old was used hits times since, and returns the count to note. old
// is 0 if the word is about another record.
func (p *Policy) Touched(nowMillis uint64, old layout.AccessWord, hits uint32) (count uint32) {
	if old == 0 {
		return min(max(hits, 1)*countUnit, layout.MaxAccessCount)
	}
	a := old.PastTicks(nowMillis)
	p.hits[class(old.Count())][ageBucket(a)].Add(1)
	p.events.Add(1)
	return p.use(old.Count(), a, hits)
}

// NoteIntervalMillis is how often the uses of a key need noting.
func (p *Policy) NoteIntervalMillis() uint64 {
	m := p.meanTicks.Load()
	if m == 0 {
		return firstNoteMillis
	}
	return min(max(uint64(m)*layout.AccessTickMillis/noteFraction, minNoteMillis), maxNoteMillis)
}

// use is count after it has decayed for so many ticks, and so many uses more.
func (p *Policy) use(count, ticks, hits uint32) uint32 {
	f := float64(count)
	if m := p.meanTicks.Load(); m != 0 {
		f = halved(f, float64(ticks)/(halfLifeAges*float64(m)))
	}
	return uint32(min(f+float64(min(hits, layout.MaxAccessCount))*countUnit+0.5, layout.MaxAccessCount))
}

// halved is f / 2^x, for x of at least 0, to 0.4 %: exact at whole x, a parabola between.
func halved(f, x float64) float64 {
	if x >= 63 {
		return 0
	}
	whole := uint(x)
	x -= float64(whole)
	return f * (1 - x*(0.6716-0.1716*x)) / float64(uint64(1)<<whole)
}

// refresh takes in what was seen and computes every value.
func (p *Policy) refresh() {
	// A session that reads much and seldom evicts brings much at once. It is not to be believed for longer
	// than others are.
	weight := min(1, 4*refreshEvents/float32(p.events.Swap(0)+1))
	keep := 1 - fade*float32(p.next)/refreshEvents
	p.next = min(max(2*p.next, firstRefresh), refreshEvents)
	for k := range classes {
		h, e := &p.learnedHits[k], &p.learnedEnds[k]
		for a := range ages {
			// Ends are taken back when a ghost shows them to be none; that can come late.
			h[a] = faded(h[a]*keep + weight*float32(p.hits[k][a].Swap(0)))
			e[a] = faded(e[a]*keep + weight*float32(p.ends[k][a].Swap(0)))
		}
		p.revalue(k)
	}
}

// faded is v, or 0 if it is next to nothing: denormal numbers would make revalue slow.
func faded(v float32) float32 {
	if v < 1e-6 {
		return 0
	}
	return v
}

// revalue computes the values of class k: for each age, the most hits per time that
// keeping such records gives, over all spans that one could keep them for. Time is in mean ages.
func (p *Policy) revalue(k int) {
	h, e := &p.learnedHits[k], &p.learnedEnds[k]
	unit := float32(max(p.mean, 1))
	var alive [ages + 1]float32 // reached the bucket
	for a := ages - 1; a >= 0; a-- {
		alive[a] = alive[a+1] + h[a] + e[a]
	}
	fame := float32(math.Sqrt(float64(classFloor(k)) / countUnit))
	for a := range ages {
		// Without observations: as often as so far, with some doubt about it. The root is between uses,
		// the best if nothing changes, and 1, if all does.
		guess := fame / (float32(ageFloor(a))/unit + 1)
		if alive[a] <= 0 {
			p.value[k][a] = guess
			continue
		}
		hit, time, best := float32(doubt), doubt/guess, float32(0)
		for b := a; b < ages && alive[b] > 0; b++ {
			width := float32(ageFloor(b+1)-ageFloor(b)) / unit
			hit += h[b]
			time += (alive[b] + alive[b+1]) / 2 * width
			best = max(best, hit/time)
		}
		p.value[k][a] = best
	}
}

// Ages and counts are learned in buckets of about equal ratio: two ages an octave, four
// counts.
const (
	ages    = 2*tickBits - 1
	classes = 4 * (12 - 3)
)

func ageBucket(ticks uint32) int {
	v := min(ticks, 1<<tickBits-1) + 2
	l := bits.Len32(v) - 2
	return 2*l + int(v>>l&1)
}

// ageFloor is the least age in bucket b.
func ageFloor(b int) uint32 { return uint32(2+b&1)<<(b/2) - 2 }

func class(count uint32) int {
	v := min(max(count, countUnit), layout.MaxAccessCount)
	l := bits.Len32(v) - 3
	return 4*(l-1) + int(v>>l&3)
}

// classFloor is the least count in class k.
func classFloor(k int) uint32 { return uint32(4+k&3) << (k/4 + 1) }

func ticksSince(nowMillis uint64, then uint32) uint32 {
	a := (uint32(nowMillis/layout.AccessTickMillis) - then) & (1<<tickBits - 1)
	if a >= 1<<tickBits-layout.AccessSkewTicks {
		return 0
	}
	return a
}

// ghostEntry remembers a key that was evicted: time of the last use, count, age bucket up to
// which one learns from it, and a tag that tells it from others of its set. 0 is none.
//
//	63       44 43            18 17         6 5       0
//	+----------+----------------+------------+---------+
//	| tag (20) | time (26)      | count (12) | end (6) |
//	+----------+----------------+------------+---------+
type ghostEntry uint64

const _ = uint(1<<6 - ages)

func makeGhost(tag, ticks, count uint32, end int) ghostEntry {
	return ghostEntry(uint64(tag)<<44 | uint64(ticks)<<18 | uint64(count)<<6 | uint64(end))
}

func (g ghostEntry) tag() uint32   { return uint32(g >> 44) }
func (g ghostEntry) ticks() uint32 { return uint32(g>>18) & (1<<tickBits - 1) }
func (g ghostEntry) count() uint32 { return uint32(g>>6) & layout.MaxAccessCount }
func (g ghostEntry) end() int      { return int(g & 63) }

// place gives where hash is remembered and its tag, which is not 0.
func (p *Policy) place(hash uint64) (set []atomic.Uint64, tag uint32) {
	h := (hash ^ p.seed) * 0x9e3779b97f4a7c15
	h ^= h >> 32
	h *= 0xd6e8feb86659fd93
	i := int(h&uint64(len(p.ghost)-1)) &^ (ghostWays - 1)
	return p.ghost[i : i+ghostWays : i+ghostWays], max(uint32(h>>44), 1)
}
