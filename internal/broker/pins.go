package broker

import (
	"sync"
	"time"
)

// pinMinutes is a power of two above the minutes that a pin lasts at most.
const pinMinutes = 128

// pins counts a socket's pins by the minute in which they end. A key that is pinned again counts again, and one that
// is unpinned counts until its time is over: nobody keeps the keys. So programs are bounded that pin and pin, and
// what they leave behind when they die is forgotten with its time.
type pins struct {
	mu     sync.Mutex
	minute int64           // of the first of ends, since 1970
	ends   [pinMinutes]int // by minute, modulo
	n      int
}

// forget leaves out what has ended. A clock that was set back waits until it is where it was. The pins are locked.
func (p *pins) forget(now time.Time) {
	to := now.Unix() / 60
	for ; p.minute < to && p.n > 0; p.minute++ {
		i := p.minute % pinMinutes
		p.n -= p.ends[i]
		p.ends[i] = 0
	}
	p.minute = max(p.minute, to)
}

// at is where a pin with that end is counted.
func (p *pins) at(end time.Time) *int {
	return &p.ends[min(max(end.Unix()/60, p.minute), p.minute+pinMinutes-1)%pinMinutes]
}

// take counts another pin, unless there are limit of them.
func (p *pins) take(now, end time.Time, limit int) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.forget(now)
	if p.n >= limit {
		return false
	}
	*p.at(end)++
	p.n++
	return true
}

// giveBack takes off a pin that came to nothing.
func (p *pins) giveBack(end time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if k := p.at(end); *k > 0 && end.Unix()/60 >= p.minute { // else it is forgotten
		*k--
		p.n--
	}
}
