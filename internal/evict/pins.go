package evict

// Pins has records passed over that are pinned: the time of their access words lies ahead. It estimates from samples
// how much of what there is is pinned. Above a quota pinned records go first, until it is met. So a cache full of pins
// serves its writers, and leaves those who pin nothing the rest of it. Nothing tells when a pinned record was used, so
// without that rule a policy would take all of them for just used. Its methods are for one goroutine at a time.
//
// Access words do not tell of a record that its header pins, until an eviction has read that and noted it. So of each
// sample one record more is drawn whose header is read, and these say how much is pinned in all.
type Pins struct {
	share float64 // of the units in the samples so far, less of older ones, by access words
	known bool

	// By the records drawn: what is pinned in all, and of that what no access word tells.
	whole, hidden float64
	drawn         bool
}

// pinWeight is how many candidates of a sample weigh as much as all samples before.
const pinWeight = 512

const (
	// drawWeight is the weight of a record drawn among all before.
	drawWeight = 1.0 / 256
	// hiddenLeast is how much no access word tells if whole is to count: else share knows it better.
	hiddenLeast = 1.0 / 64
)

// Evictable appends to dst the indexes in c, a sample, of records among which n are to be evicted. The time is in Unix
// ms. They are those that are not pinned. If more than a share of quota, 0 to 1, is pinned, they are those that
// are, or all if these are too few. Records that have expired are never pinned. passed is how many were left out
// because they are pinned.
func (p *Pins) Evictable(nowMillis uint64, quota float64, c []Candidate, n int, dst []int) (out []int, passed int) {
	all, pinned, count := 0.0, 0.0, 0
	for i := range c {
		units := float64(max(c[i].Units, 1))
		if all += units; c[i].Pinned(nowMillis) {
			pinned += units
			count++
		}
	}
	if all > 0 {
		weight := float64(len(c)) / (float64(len(c)) + pinWeight)
		if !p.known {
			weight, p.known = 1, true
		}
		p.share += (pinned/all - p.share) * weight
	}
	over := p.Over(quota)
	for i := range c {
		switch is := c[i].Pinned(nowMillis); {
		case is == over, over && count < n:
			dst = append(dst, i)
		case is:
			passed++
		}
	}
	return dst, passed
}

// Over reports whether more than a share of quota is pinned.
func (p *Pins) Over(quota float64) bool {
	return p.share > quota || p.hidden > hiddenLeast && p.whole > quota
}

// Draw picks one of c, a sample that Evictable has seen, from those whose access words do not say that they are pinned.
// It goes by lot, 0 to less than 1: each is picked in proportion to its length. rest is the share of the sample that
// they are. i is -1 if there are none.
func Draw(nowMillis uint64, c []Candidate, lot float64) (i int, rest float64) {
	all, free := 0.0, 0.0
	for j := range c {
		units := float64(max(c[j].Units, 1))
		if all += units; !c[j].Pinned(nowMillis) {
			free += units
		}
	}
	if i = -1; all == 0 {
		return i, 0
	}
	left := lot * free
	for j := range c {
		if !c[j].Pinned(nowMillis) {
			if i, left = j, left-float64(max(c[j].Units, 1)); left < 0 {
				break
			}
		}
	}
	return i, free / all
}

// Drawn says whether a record that Draw has picked from such a rest is pinned all the same.
func (p *Pins) Drawn(rest float64, pinned bool) {
	hidden := 0.0
	if pinned {
		hidden = rest
	}
	if !p.drawn {
		p.whole, p.drawn = 1-rest, true
	}
	p.whole += (1 - rest + hidden - p.whole) * drawWeight
	p.hidden += (hidden - p.hidden) * drawWeight
}

// Pinned reports whether c is pinned at a time, Unix ms.
func (c *Candidate) Pinned(nowMillis uint64) bool {
	return c.Known && c.Word.AheadTicks(nowMillis) > 0 && !c.Word.Expired(nowMillis)
}
