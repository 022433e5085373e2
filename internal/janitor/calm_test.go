package janitor

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
)

// A job for which nobody waits rests in rests that are neither too short for a timer nor so long that its owner seems
// gone.
func TestRests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		var c calmness
		for _, tc := range []struct{ worked, rests time.Duration }{
			{100 * time.Microsecond, 0},
			{200 * time.Microsecond, 0},
			{100 * time.Microsecond, 1200 * time.Microsecond},
			{100 * time.Microsecond, 0},
			{10 * time.Millisecond, 30300 * time.Microsecond},
			{time.Minute, longestRest},
			{0, 0},
		} {
			began := time.Now()
			if c.rest(ctx, tc.worked, 3); time.Since(began) != tc.rests {
				t.Errorf("rests %v after %v of work, want %v", time.Since(began), tc.worked, tc.rests)
			}
		}
		cancel()
		began := time.Now()
		if c.rest(ctx, time.Second, 3); time.Since(began) != 0 {
			t.Errorf("rests %v though the janitor ends", time.Since(began))
		}
	})
}

// Jobs for which nobody waits, and moves, begin slowly and have twice as many operations under way after some time,
// again and again.
func TestPace(t *testing.T) {
	calm, move := &dirpb.Job{Kind: dirpb.JobKind_JOB_JOIN, Calm: true}, &dirpb.Job{Kind: dirpb.JobKind_JOB_MOVE}
	join, recover := &dirpb.Job{Kind: dirpb.JobKind_JOB_JOIN}, &dirpb.Job{Kind: dirpb.JobKind_JOB_RECOVER}
	for _, tc := range []struct {
		age                 time.Duration
		calm, move, another [2]int
	}{
		{0, [2]int{1, 3}, [2]int{2, 1}, [2]int{8, 0}},
		{calmFor - 1, [2]int{1, 3}, [2]int{2, 1}, [2]int{8, 0}},
		{calmFor, [2]int{4, 1}, [2]int{4, 1}, [2]int{8, 0}},
		{calmFor + calmStep - 1, [2]int{4, 1}, [2]int{4, 1}, [2]int{8, 0}},
		{calmFor + calmStep, [2]int{8, 1}, [2]int{8, 1}, [2]int{8, 0}},
		{1000 * time.Hour, [2]int{8, 1}, [2]int{8, 1}, [2]int{8, 0}},
	} {
		for job, want := range map[*dirpb.Job][2]int{calm: tc.calm, move: tc.move, join: tc.another,
			recover: tc.another} {
			if window, rests := paceOf(job, tc.age, 8); [2]int{window, rests} != want {
				t.Errorf("%v: %d at once and %d times the rest after %v, want %v", job, window, rests, tc.age, want)
			}
		}
	}
}
