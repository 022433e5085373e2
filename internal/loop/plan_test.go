package loop

import (
	"testing"
	"time"
)

// planned drives a plan by a clock of its own.
type planned struct {
	*plan
	now     time.Time
	t       tally
	outside int // batches a second outside of loops
}

// run goes on for d: the loops in use have a load and serve rate requests a second, both by how many they are.
func (p *planned) run(d time.Duration, load, rate func(use int) int) {
	for end := p.now.Add(d); p.now.Before(end); p.now = p.now.Add(window) {
		p.t.load = load(p.use) * p.use
		p.t.served += uint64(float64(rate(p.use)) * window.Seconds())
		p.t.outside += uint64(float64(p.outside) * window.Seconds())
		p.revise(p.now, p.t)
	}
}

func newPlanned(most int) *planned {
	return &planned{plan: newPlan(most, most), now: time.Unix(1, 0), t: tally{conns: 50, busy: 50}}
}

func each(n int) func(int) int   { return func(int) int { return n } }
func double(n int) func(int) int { return func(use int) int { return use * n } }
func (p *planned) want(t *testing.T, what string, use int) {
	t.Helper()
	if p.use != use {
		t.Errorf("%s: %d loops are in use, want %d", what, p.use, use)
	}
}

// trials is when a second loop was tried within d.
func (p *planned) trials(d time.Duration, load, rate func(use int) int) (when []time.Duration) {
	in := false
	for began := p.now; p.now.Sub(began) < d; {
		p.run(window, load, rate)
		if now := p.use == 2; now != in {
			if in = now; in {
				when = append(when, p.now.Sub(began))
			}
		}
	}
	return when
}

// shared is n for all loops together.
func shared(n int) func(int) int { return func(use int) int { return n / use } }

// TestPlanNoGain: a second loop that serves no more requests goes out of use, and is tried less and less often.
func TestPlanNoGain(t *testing.T) {
	p := newPlanned(2)
	p.run(time.Second, each(worth-1), each(1000))
	p.want(t, "a loop that waits for most of the time", 1)
	trials := p.trials(5*time.Minute, shared(95), each(100_000))
	if n := len(trials); n < 6 || n > 12 {
		t.Errorf("%d trials in 5 minutes, want 6 to 12: %v", n, trials)
	}
	for i := 2; i < len(trials); i++ {
		if a, b := trials[i-1]-trials[i-2], trials[i]-trials[i-1]; b < a-window || b > mostRest+time.Second {
			t.Errorf("trials at %v: the pauses do not become longer", trials)
			break
		}
	}
}

// TestPlanChance: a trial of loops that have more to do than one could, and serve nearly as much, is followed by others
// soon, but not for ever; one in which they serve clearly less is not.
func TestPlanChance(t *testing.T) {
	p, n := newPlanned(2), 0
	p.run(time.Second, each(75), func(use int) int {
		if use == 2 {
			n++
		}
		return 100_000 + use/2*n/20*50_000
	})
	p.want(t, "loops that served more in a later trial", 2)
	for _, x := range []struct {
		what              string
		load              func(int) int
		second            int // requests a second of two
		soon, least, most int
	}{
		{"much to do", each(75), 100_000, 3, 10, 18},
		{"no more to do than one", shared(98), 100_000, 1, 6, 12},
		{"much to do, and less is served", each(75), 80_000, 1, 6, 12},
	} {
		p, rate := newPlanned(2), func(use int) int { return 100_000 + (use-1)*(x.second-100_000) }
		if n := len(p.trials(time.Second, x.load, rate)); n < x.soon || x.soon == 1 && n > 1 {
			t.Errorf("%s: %d trials in a second, want %d", x.what, n, x.soon)
		}
		if n := len(p.trials(5*time.Minute, x.load, rate)); n < x.least || n > x.most {
			t.Errorf("%s: %d trials in 5 minutes, want %d to %d", x.what, n, x.least, x.most)
		}
	}
}

// TestPlanAnew: clients that come back after a time without any are tried at once, whatever was found before; a single
// one never is.
func TestPlanAnew(t *testing.T) {
	p := newPlanned(2)
	p.run(10*time.Second, each(95), each(100_000))
	p.want(t, "loops without gain", 1)
	p.run(time.Second, each(5), each(1000))
	p.t.busy = 1
	p.run(time.Second, each(95), double(100_000))
	p.want(t, "a loop of one busy connection", 1)
	p.t.busy = 50
	p.run(4*trial, each(95), double(100_000))
	p.want(t, "loops that serve more than those before", 2)
}

// TestPlanPauses: clients that pause now and then are tried all the same, and those that often do are not.
func TestPlanPauses(t *testing.T) {
	p, n := newPlanned(2), 0
	p.run(time.Second, func(int) int { n++; return worth + 5 - n%3*10 }, each(100_000))
	p.want(t, "a loop that has a pause two times of three", 1)
	p.run(time.Second, func(use int) int { n++; return worth + 5 - n%5/4*10 }, double(100_000))
	p.want(t, "a loop that has a pause now and then", 2)
}

// TestPlanGain: loops that serve more stay in use, and are tried by twos, until few requests are left for them.
func TestPlanGain(t *testing.T) {
	p := newPlanned(6)
	for _, use := range []int{2, 4, 6} {
		before := p.use
		for began := p.now; p.use == before; {
			if p.run(window, each(95), double(100_000)); p.now.Sub(began) > time.Second {
				t.Fatalf("%d loops are saturated, and no more are tried", before)
			}
		}
		p.want(t, "saturated loops", use)
	}
	p.run(time.Minute, each(95), double(100_000))
	p.want(t, "loops that all serve as much", 6)
	p.run(time.Minute, each(40), double(40_000))
	p.want(t, "loops that have pauses", 6)
	p.run(time.Minute, func(use int) int { return (3*worth - 6) / use }, each(180_000))
	p.want(t, "loops of which half have time for all", 3)
	p.run(time.Second, each(1), each(10))
	p.want(t, "idle loops", 1)
}

// TestPlanShares: connections outside of loops have processors of their own as soon as they say something.
func TestPlanShares(t *testing.T) {
	p := newPlanned(4)
	p.shared = 2
	p.run(time.Second, each(95), double(100_000))
	p.want(t, "loops with nobody outside", 4)
	p.outside = 2_000
	p.run(time.Second, each(95), double(100_000))
	p.want(t, "loops beside next to nobody", 4)
	p.outside = 20_000
	p.run(2*window, each(95), double(100_000))
	p.want(t, "loops beside others", 2)
	p.run(time.Minute, each(95), double(100_000))
	p.want(t, "loops beside others, later", 2)
	p.outside = 0
	p.run(4*trial, each(95), double(100_000))
	p.want(t, "loops with nobody outside again", 4)
}

// TestPlanClientsGo: a trial in which clients come or go tells nothing, so the next one is soon.
func TestPlanClientsGo(t *testing.T) {
	p := newPlanned(2)
	for range 3 {
		for began := p.now; p.use == 1; {
			if p.run(window, each(95), each(100_000)); p.now.Sub(began) > time.Second {
				t.Fatal("no trial within a second")
			}
		}
		p.run(settling+2*window, each(95), each(100_000))
		p.t.conns++
		p.run(trial+2*window, each(50), each(100_000))
		p.want(t, "a trial in which a client came", 1)
	}
}
