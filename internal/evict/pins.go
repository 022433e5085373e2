package evict

// Pins has records passed over that are pinned: the time of their access words lies ahead. It estimates from samples
// how much of what there is is pinned. Above a quota pinned records go first, until it is met. So a cache full of pins
// serves its writers, and leaves those who pin nothing the rest of it. Nothing tells when a pinned record was used, so
// without that rule a policy would take all of them for just used. Its methods are for one goroutine at a time.
type Pins struct {
	share float64 // of the units in the samples so far, less of older ones
	known bool
}

// pinWeight is how many candidates of a sample weigh as much as all samples before.
const pinWeight = 512

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
func (p *Pins) Over(quota float64) bool { return p.share > quota }

// Pinned reports whether c is pinned at a time, Unix ms.
func (c *Candidate) Pinned(nowMillis uint64) bool {
	return c.Known && c.Word.AheadTicks(nowMillis) > 0 && !c.Word.Expired(nowMillis)
}
