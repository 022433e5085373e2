package loop

import "time"

const (
	// trial is how long requests are counted before and after more loops begin to serve.
	trial = 30 * time.Millisecond
	// worth is the load of the loops in use, in percent, from which on more are tried; below it half of them would do.
	// A loop that waits for half of the time may wait for clients that wait for it, on the same processors.
	worth = 40
	// mostlyFull is for how much of that time the loops in use must have had that load, in percent: all clients pause
	// now and then.
	mostlyFull = 75
	// leastOutside is for how many requests of loops one batch outside of them counts as work that needs a processor,
	// too.
	leastOutside = 32
	// settling is left out of it: connections change their loop when they say something.
	settling = 10 * time.Millisecond
	// leastBusy is how many connections that have something to say each loop must have, so that others are tried.
	leastBusy = 4
	// leastGain is how many times as many requests twice as many loops must serve at least.
	leastGain = 1.2
	// leastRest is how long no trial follows the first that failed. That time doubles with each, to mostRest, until the
	// loops have been nearly idle once.
	leastRest, mostRest = 2 * time.Second, time.Minute
	// soonest is the rest after a trial that has failed by chance, as it seems: more loops served nearly as much at
	// least, unclear times as many requests, and together they had more to do than fewer could. A client of one thread
	// leaves them no more to do than one loop can. A quarter of the trials in which clients of several threads should
	// have had more failed on two processors. It doubles, too, and from leastRest on nothing is chance.
	soonest = 100 * time.Millisecond
	unclear = 0.85
)

// tally is what loops have done, as plan looks at it.
type tally struct {
	load    int    // percent of the time that the loops in use did not wait, summed up
	served  uint64 // by all loops, since ever: times that a connection had something to say
	outside uint64 // likewise, outside of all loops of the process
	conns   int    // in all loops
	busy    int    // of them, that had something to say of late
}

// plan says how many loops are in use. Loops do not tell by their load alone whether others would help: a client that
// has one thread, as redis-benchmark has, keeps a loop busy nearly all the time and gains nothing by a second one. Two
// then find fewer connections ready at a time, sleep and wake more often and meet at the store's lanes. Clients of
// several threads on the loop's own processors gain by a second one though the first waits for a third of the time. So
// twice as many loops are a trial, and stay in use only if they serve clearly more. A plan has no clock and no loops of
// its own; it serves one goroutine.
type plan struct {
	most   int     // loops
	shared int     // of them, while connections outside of loops have something to say, too
	use    int     // of them, from the first on
	gain   float64 // leastGain, but for tests

	began, tried time.Time     // the period over which requests are counted; the trial of which it is the second
	from         tally         // when it began
	looks        int           // how often revise was called since
	load         int           // the sum of the loads that it was told then
	full, low    int           // and how often it found that more loops, and that half of them, may be better
	before       float64       // requests a second before the trial; 0: there is none
	rest, soon   time.Duration // after the next trial that fails, and after one that fails by chance
	resting      time.Time     // no trial before
}

func newPlan(most, shared int) *plan {
	return &plan{most: most, shared: min(most, shared), use: 1, gain: leastGain, rest: leastRest, soon: soonest}
}

// revise is told what the loops have done, once in a while.
func (p *plan) revise(now time.Time, t tally) {
	p.looks++
	p.load += t.load
	switch {
	case t.load >= worth*p.use:
		p.full++
	case t.load <= worth*p.use/2:
		p.low++
	}
	took := now.Sub(p.began)
	limit := p.most
	if (t.outside-p.from.outside)*leastOutside > t.served-p.from.served {
		limit = p.shared
	}
	switch {
	case p.use > limit:
		p.before, p.use = 0, limit
		p.restart(now, t)
	case p.began.IsZero() || p.before > 0 && now.Sub(p.tried) < settling:
		p.restart(now, t)
	case p.before > 0 && took >= trial:
		p.endTrial(now, t, took)
	case p.before > 0:
	case took < trial:
	case p.use > 1 && p.low == p.looks:
		p.use /= 2
		p.restart(now, t)
	case 100*p.full < mostlyFull*p.looks || t.busy < leastBusy*p.use || p.use >= limit || now.Before(p.resting):
		if p.low == p.looks { // clients that come back may ask for something else
			p.rest, p.soon, p.resting = leastRest, soonest, time.Time{}
		}
		p.restart(now, t)
	default:
		p.before, p.tried = p.rate(t, took), now
		p.use = min(2*p.use, limit)
		p.restart(now, t)
	}
}

// endTrial keeps the loops in use if they have served enough.
func (p *plan) endTrial(now time.Time, t tally, took time.Duration) {
	fewer := (p.use + 1) / 2
	switch gain := p.rate(t, took) / p.before; {
	case gain >= p.gain:
		p.rest, p.soon = leastRest, soonest
		fewer = p.use
	case t.conns != p.from.conns: // clients came or went, so it tells nothing
	case gain >= unclear && p.load > 100*fewer*p.looks && p.soon < leastRest:
		p.resting = now.Add(p.soon)
		p.soon *= 2
	default:
		p.resting = now.Add(p.rest)
		p.rest = min(2*p.rest, mostRest)
	}
	p.use, p.before = fewer, 0
	p.restart(now, t)
}

// rate is how many requests a second there were since the period began.
func (p *plan) rate(t tally, took time.Duration) float64 {
	return float64(t.served-p.from.served) / took.Seconds()
}

func (p *plan) restart(now time.Time, t tally) {
	p.began, p.from, p.looks, p.load, p.full, p.low = now, t, 0, 0, 0, 0
}
