package evict

// Pace is how fast to look for what has expired: faster while that finds much, else at a
// pace that costs nothing worth mentioning. The zero value is at rest.
type Pace struct {
	groups int // of the next batch, beyond which a yield has lifted it; 0: at rest
	misses int // batches in a row that brought little
}

const (
	// PaceMost is the most groups of one batch.
	PaceMost = 512
	// A batch has brought much if it took away one record in paceMuch groups. If memory is
	// short one in paceSome is worth a slower pace.
	paceMuch = 2
	paceSome = 32
	// paceProbe is how much more is looked at if memory is short and nothing was found.
	paceProbe = 4
	// paceRestMicros is the time between two batches at rest.
	paceRestMicros = 100_000
)

// Batch is how many groups to look at next. At rest, rest of them would be enough.
func (p *Pace) Batch(rest int, short bool) int {
	if short {
		rest *= paceProbe
	}
	return min(max(p.groups, rest), PaceMost)
}

// Done says what a batch brought and how long it took, and returns when the next one is
// to begin, after its end. If it pays not more than half of the time goes into them, four
// fifths while memory is short.
func (p *Pace) Done(groups, records int, tookMicros int64, short bool) (pauseMicros int64) {
	switch {
	case records > 0 && records*paceMuch >= groups:
		p.misses = 0
		p.groups = min(2*max(p.groups, groups), PaceMost)
		if short {
			return tookMicros / 4
		}
		return tookMicros
	case records > 0 && short && records*paceSome >= groups:
		p.misses = 0
		p.groups = groups
		return min(8*tookMicros, paceRestMicros)
	}
	// Somebody may have swept here a moment ago; other parts may look otherwise.
	if p.misses++; p.misses > 1 || p.groups == 0 {
		p.groups = 0
		return paceRestMicros
	}
	p.groups = max(p.groups/2, 1)
	return tookMicros
}
