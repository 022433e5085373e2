package janitor

import (
	"context"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
)

// calmness is how jobs go on that need not be over as soon as they can: those for which nobody waits, and moves, which
// writers of a shard that fills up begin before it is full. They compete with operations for queue pairs, networks and
// processors; what a move works on is closed to writers; and an operation that meets a word which a join has not
// brought up does that itself, which happens most in the beginning, with the keys that are used most. So at first such
// a job has one operation under way at a time, or two, and rests between them. After calmFor there are twice as many
// every calmStep, so that much to do does not take for ever.
type calmness struct {
	owed time.Duration // of rest
}

const (
	calmFor, calmStep = 20 * time.Second, 10 * time.Second
	leastRest         = time.Millisecond // shorter rests are put together
	longestRest       = 200 * time.Millisecond
)

// paceOf is how many operations of a job that began so long ago may be under way at once, most at most, and how many
// times as long as they took it is to rest.
func paceOf(job *dirpb.Job, age time.Duration, most int) (window, rests int) {
	switch {
	case !job.GetCalm() && job.GetKind() != dirpb.JobKind_JOB_MOVE:
		return most, 0
	case age >= calmFor:
		return min(most, 4<<min(10, (age-calmFor)/calmStep)), 1
	case job.GetCalm():
		return 1, 3
	}
	return min(most, 2), 1
}

// rest rests for what was worked, and tells for how long.
func (c *calmness) rest(ctx context.Context, worked time.Duration, rests int) (rested time.Duration) {
	if c.owed += time.Duration(rests) * worked; c.owed < leastRest {
		return 0
	}
	began := time.Now()
	t := time.NewTimer(min(c.owed, longestRest))
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
	c.owed = 0
	return time.Since(began)
}
