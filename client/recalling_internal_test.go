package client

import (
	"testing"
	"time"
)

// The stock is left alone while a recall is under way and for a while afterwards, unless an operation misses memory.
func TestRecallSpares(t *testing.T) {
	var r recalling
	now := time.Now()
	for i, step := range []struct {
		later           time.Duration
		under, starving bool
		want            bool
	}{
		{0, false, false, false},
		{time.Second, true, false, true},
		{time.Minute, true, false, true},
		{evictAfter - time.Second, false, false, true},
		{2 * time.Second, false, false, false},
		{time.Second, true, true, false},
		{time.Second, true, false, false}, // writers go on
		{time.Second, false, false, false},
		{time.Second, true, false, true}, // another recall
		{time.Second, false, true, false},
		{time.Second, false, false, false},
	} {
		now = now.Add(step.later)
		if got := r.spares(now, step.under, step.starving); got != step.want {
			t.Errorf("step %d: %v, want %v", i, got, step.want)
		}
	}
}
