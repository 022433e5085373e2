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
		later          time.Duration
		recalls        uint64
		under, missing bool
		want           bool
	}{
		{0, 0, false, false, false},
		{time.Second, 1, true, false, true},
		{time.Minute, 1, true, false, true},
		{evictAfter - time.Second, 1, false, false, true},
		{2 * time.Second, 1, false, false, false},
		{time.Second, 2, true, true, true}, // before it began, perhaps
		{time.Second, 2, true, true, false},
		{time.Second, 2, true, false, false}, // writers go on
		{time.Second, 2, false, false, false},
		{time.Second, 3, true, false, true}, // another recall
		{time.Second, 3, false, true, false},
		{time.Second, 3, false, false, false},
		{time.Second, 5, false, false, true}, // two that have come and gone
		{evictAfter - time.Second, 5, false, false, true},
		{time.Second, 5, false, false, false},
	} {
		now = now.Add(step.later)
		if got := r.spares(now, step.recalls, step.under, step.missing); got != step.want {
			t.Errorf("step %d: %v, want %v", i, got, step.want)
		}
	}
}

// Memory that is asked for ahead is missed by nobody, also where the directory has said that there is none.
func TestNobodyStarvesAhead(t *testing.T) {
	e := &evictor{kick: make(chan struct{}, 1)}
	e.mu.needs = map[uint32]map[uint32]bool{}
	if e.starves(1, 0); len(e.mu.needs) != 0 || len(e.kick) != 0 {
		t.Errorf("needs %v", e.mu.needs)
	}
	if e.starves(1, 5); !e.mu.needs[1][5] || len(e.kick) != 1 {
		t.Errorf("needs %v", e.mu.needs)
	}
}

// Of what is evicted for the stock and handed back unused no more than the target is evicted again and again, until
// operations take memory or miss it.
func TestStockable(t *testing.T) {
	const target = 1000
	p := new(pressure)
	sum := int64(0)
	for range 100 { // the supply is 0 each time
		n := p.stockable(target, false)
		sum += n
		p.stocked += n
	}
	if sum != target {
		t.Errorf("%d units are evicted for a target of %d", sum, target)
	}
	p.took(100)
	if n := p.stockable(target, false); n != 100*stockedPerTaken {
		t.Errorf("%d units after operations took 100", n)
	}
	p.took(10 * target)
	if n := p.stockable(target, false); n != target {
		t.Errorf("%d units after operations took much", n)
	}
	p.stocked += target
	if n := p.stockable(target, true); n != target {
		t.Errorf("%d units when operations miss memory", n)
	}
}
