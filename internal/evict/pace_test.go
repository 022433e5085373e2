package evict_test

import (
	"testing"
	"time"

	"github.com/kvd-project/kvd/internal/evict"
)

// pacing is an index whose groups are looked at one after the other, in virtual time.
type pacing struct {
	expired []float64 // records in each group
	rate    float64   // of records that expire, in each group a second
	at      int
	now     time.Duration
	pace    evict.Pace

	looked, swept float64
	busy          time.Duration
}

// run goes on for d; looking at a group takes each.
func (p *pacing) run(d, each time.Duration, short bool) {
	for end := p.now + d; p.now < end; {
		n := p.pace.Batch(16, short)
		records := 0.0
		for range n {
			records += float64(int(p.expired[p.at]))
			p.expired[p.at] -= float64(int(p.expired[p.at]))
			p.at = (p.at + 1) % len(p.expired)
		}
		took := time.Duration(n) * each
		pause := time.Duration(p.pace.Done(n, int(records), took.Microseconds(), short)) * time.Microsecond
		p.looked, p.swept, p.busy = p.looked+float64(n), p.swept+records, p.busy+took
		p.now += took + pause
		for i := range p.expired {
			p.expired[i] += p.rate * (took + pause).Seconds()
		}
	}
}

func (p *pacing) left() (n float64) {
	for _, x := range p.expired {
		n += float64(int(x))
	}
	return n
}

func TestPace(t *testing.T) {
	const groups, each = 10_000, 5 * time.Microsecond
	for _, c := range []struct {
		name   string
		first  float64 // expired in each group at first
		rate   float64
		short  bool
		verify func(t *testing.T, p *pacing)
	}{
		{"nothing expires", 0, 0, false, func(t *testing.T, p *pacing) {
			if p.looked > 16*10*10*1.1 {
				t.Errorf("looked at %v groups", p.looked)
			}
		}},
		{"nothing expires, short", 0, 0, true, func(t *testing.T, p *pacing) {
			if p.looked > 4*16*10*10*1.1 || p.looked < 4*16*10*10*0.8 {
				t.Errorf("looked at %v groups", p.looked)
			}
		}},
		{"much has expired", 5, 0, false, func(t *testing.T, p *pacing) {
			if p.left() > 0 || p.looked > 1.5*groups {
				t.Errorf("%v left after a look at %v groups", p.left(), p.looked)
			}
		}},
		{"little has expired, short", 0.1, 0, true, func(t *testing.T, p *pacing) {
			if p.left() > 0 {
				t.Errorf("%v left after a look at %v groups", p.left(), p.looked)
			}
		}},
		{"little has expired", 0.1, 0, false, func(t *testing.T, p *pacing) {
			if p.looked > 16*10*10*1.1 {
				t.Errorf("looked at %v groups", p.looked)
			}
		}},
		{"30,000 a second expire", 0, 3, false, func(t *testing.T, p *pacing) {
			if p.left() > 40_000 || p.busy > 6*time.Second {
				t.Errorf("%v left, %v of work", p.left(), p.busy)
			}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := &pacing{expired: make([]float64, groups), rate: c.rate}
			for i := range p.expired {
				p.expired[i] = c.first
				if c.first < 1 && c.first > 0 && i%int(1/c.first) == 0 {
					p.expired[i] = 1
				}
			}
			p.run(10*time.Second, each, c.short)
			t.Logf("looked at %v groups, swept %v, left %v, %v of work", p.looked, p.swept, p.left(), p.busy)
			c.verify(t, p)
		})
	}
}
