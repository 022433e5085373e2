package tcp

import (
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvd-project/kvd/rdma/driver"
)

// limit is how many verbs a second the agents of a PD may execute: a token bucket, kept as the generic cell
// rate algorithm (ITU-T I.371, annex A) does in a single word. A refused verb would end its connection, so
// verbs over the limit are late instead, as with an adapter's (ibv_modify_qp_rate_limit(3)).
//
// An agent that finds the bucket empty takes the next tokens that come, and waits for their time. So agents
// that wait have their turns in the order in which they came, some verbs each: a connection with long
// chains gets no more than another one.
type limit struct {
	perSecond uint64
	piece     int          // verbs of one turn
	next      atomic.Int64 // when the next verb may execute, as now has it; time passed since are tokens
}

const (
	// limitBurst is how long unused tokens last.
	limitBurst = 50 * time.Millisecond
	// pieceTime and maxPiece bound a turn: shorter ones are fairer to short chains, longer ones are fewer wake-ups.
	pieceTime = time.Millisecond
	maxPiece  = 64
	// maxLimit is a verb each nanosecond, the grain of the bucket.
	maxLimit = uint64(time.Second)
)

// newLimit makes a bucket without tokens; perSecond is 1..maxLimit.
func newLimit(perSecond uint64, at time.Duration) *limit {
	l := &limit{perSecond: perSecond, piece: int(min(max(perSecond/uint64(time.Second/pieceTime), 1), maxPiece))}
	l.next.Store(int64(at))
	return l
}

// cost is how long the tokens of n verbs take to come, at most a piece.
func (l *limit) cost(n int) int64 {
	return int64((uint64(n)*uint64(time.Second) + l.perSecond - 1) / l.perSecond)
}

// reserve takes the tokens of some of n verbs, at least 1, which may execute at that time, but not before: all that
// are in front of them have tokens by then, and theirs delay those behind them. With patient false
// it takes none, and returns 0, if that time is to come.
func (l *limit) reserve(at time.Duration, n int, patient bool) (k int, turn time.Duration) {
	k = min(n, l.piece)
	for {
		next := l.next.Load()
		turn = max(time.Duration(next), at-limitBurst)
		if turn > at && !patient {
			return 0, 0
		}
		if l.next.CompareAndSwap(next, int64(turn)+l.cost(k)) {
			return k, turn
		}
	}
}

// take takes tokens of the next n verbs and returns for how many there were some.
func (l *limit) take(n int) (taken int) {
	for at := now(); taken < n; {
		k, _ := l.reserve(at, n-taken, false)
		if k == 0 {
			break
		}
		taken += k
	}
	return taken
}

var _ driver.RateLimiter = (*pd)(nil)

// LimitRate has agents that wait for a turn of another limit go on by this one.
func (p *pd) LimitRate(perSecond uint64) {
	perSecond = min(perSecond, maxLimit)
	d := p.d
	d.mu.Lock()
	defer d.mu.Unlock()
	switch l := p.limit.Load(); {
	case l == nil && perSecond == 0, l != nil && l.perSecond == perSecond:
		return
	case perSecond == 0:
		p.limit.Store(nil)
	default:
		p.limit.Store(newLimit(perSecond, now()))
	}
	for a := range d.mu.agents {
		a.link.Lock()
		if a.link.paced == p && !a.fenced.Load() {
			_ = a.nc.SetReadDeadline(time.Unix(1, 0))
		}
		a.link.Unlock()
	}
}

func (p *pd) Paced() time.Duration { return time.Duration(p.paced.Load()) }

// pace waits until some of the next n verbs may execute and returns how many. It fails when the agent is fenced
// or the peer closes the connection: what has no tokens then is not executed.
func (a *agent) pace(n int) (int, error) {
	for {
		l := a.pd.limit.Load()
		if l == nil {
			return n, nil
		}
		k, turn := l.reserve(now(), n, true)
		came, err := a.awaitTurn(l, turn)
		if err != nil {
			l.next.Add(-l.cost(k)) // for those who come next; those who wait keep their turns
			return 0, err
		}
		if came {
			return k, nil
		}
	}
}

// awaitTurn waits for the turn; false: l is not the limit any more. While it takes long, the peer is told that
// somebody is there. The caller holds exec, which is free meanwhile.
func (a *agent) awaitTurn(l *limit, turn time.Duration) (bool, error) {
	for at := now(); turn > at; {
		a.quiet = 0 // a loop would have to send the agent back
		if len(a.out) > 0 {
			if err := a.flush(); err != nil {
				return false, err
			}
		}
		a.exec.Unlock()
		limited, err := a.sleep(l, min(turn, at+a.l.d.o.PeerTimeout/2))
		a.resume()
		began := at
		at = now()
		a.pd.paced.Add(int64(at - began))
		if err != nil || !limited {
			return false, err
		}
		if turn > at {
			a.out = appendPaced(a.out, a.seq)
		}
	}
	return true, nil
}

// sleep reads nothing until then. It returns false at once when l is replaced, and an error when the agent is
// fenced or the connection ends.
func (a *agent) sleep(l *limit, until time.Duration) (limited bool, err error) {
	m := a.nc.(*meteredConn)
	a.link.Lock()
	a.link.paced = a.pd // before the limit is read: who replaces it wakes those who say so
	if !a.fenced.Load() {
		_ = m.SetReadDeadline(epoch.Add(until))
	}
	a.link.Unlock()
	if limited = a.pd.limit.Load() == l; limited {
		err = m.awaitEnd()
	}
	a.link.Lock()
	defer a.link.Unlock()
	a.link.paced = nil
	if a.fenced.Load() {
		return false, errFenced
	}
	_ = m.SetReadDeadline(time.Time{})
	return a.pd.limit.Load() == l, err
}

// hungUp says whether the other side of a socket has closed, or the connection is gone.
func hungUp(fd uintptr) bool { return isReady(fd, unix.POLLRDHUP) }
