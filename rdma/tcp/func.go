package tcp

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/kvd-project/kvd/rdma/driver"
)

// A function region has no memory: workers perform its READs, which may wait for a disk. The agent begins the calls of
// requests that are buffered, up to a window, and answers them in their order. Its loop sends it away before, its
// goroutine releases exec while it waits, and a fence, the peer's end or the region's wakes it. Calls that nobody waits
// for any more end by themselves; their bytes are theirs alone.

const (
	funcPiece  = 64 << 10  // bytes of one call at most
	funcWindow = 256 << 10 // bytes of a connection's calls at most
	funcCalls  = 64        // a connection's calls at most
)

// function is a region's.
type function struct {
	read  driver.ReadFunc
	size  int64
	slots chan struct{}
	ctx   context.Context // ends with the region
	end   context.CancelFunc
	calls sync.WaitGroup // added to while exec is held
}

var _ driver.FuncRegistrar = (*pd)(nil)

// RegFunc registers a function region; see driver.FuncRegistrar.
func (p *pd) RegFunc(n int64, workers int, f driver.ReadFunc) (driver.MR, error) {
	if n <= 0 || workers <= 0 || f == nil {
		return nil, fmt.Errorf("%d bytes of a function with %d workers", n, workers)
	}
	ctx, end := context.WithCancel(context.Background())
	r := &mr{pd: p, access: driver.AccessRemoteRead, rkey: randomKey(),
		fn: &function{read: f, size: n, slots: make(chan struct{}, workers), ctx: ctx, end: end}}
	d := p.d
	d.mu.Lock()
	defer d.mu.Unlock()
	d.mu.lastLKey++
	r.lkey = d.mu.lastLKey // no bytes are inside it
	t := p.keys.Load().clone()
	t.byRKey[r.rkey], t.byLKey[r.lkey] = r, r
	p.keys.Store(t)
	return r, nil
}

// call is a piece of a READ. b is the worker's until done is closed.
type call struct {
	off    uint64
	b      []byte
	status driver.Status
	done   chan struct{}
}

func (c *call) isDone() bool {
	select {
	case <-c.done:
		return true
	default:
		return false
	}
}

// ahead are the calls that an agent has begun, in the order of their requests. requests is how many of those behind
// the one that executes have theirs among them.
type ahead struct {
	calls    []*call
	bytes    int
	requests int
}

// beginCall has a worker read n bytes at off.
func (a *agent) beginCall(fn *function, off uint64, n int) {
	c := &call{off: off, b: make([]byte, n), status: driver.RemAccessErr, done: make(chan struct{})}
	a.ahead.calls = append(a.ahead.calls, c)
	a.ahead.bytes += n
	fn.calls.Add(1)
	go func() {
		defer fn.calls.Done()
		defer a.wakeFor(c)
		defer close(c.done)
		select {
		case <-a.done: // before a worker was free
			return
		case <-fn.ctx.Done():
			return
		case fn.slots <- struct{}{}:
		}
		defer func() { <-fn.slots }()
		select {
		case <-a.done: // meanwhile
			return
		default:
		}
		if fn.ctx.Err() != nil {
			return
		}
		if c.status = fn.read(fn.ctx, c.off, c.b); c.status != driver.Success && c.status != driver.RemAccessErr {
			c.status = driver.RemOpErr
		}
	}()
}

// wakeFor ends the agent's wait for c.
func (a *agent) wakeFor(c *call) {
	a.link.Lock()
	defer a.link.Unlock()
	if a.link.call == c && !a.fenced.Load() {
		_ = a.nc.SetReadDeadline(time.Unix(1, 0))
	}
}

// beginAhead begins the calls of requests that are buffered behind the one that executes, behind of them at most.
func (a *agent) beginAhead(behind int) {
	for w := &a.ahead; w.requests < behind && len(w.calls) < funcCalls; w.requests++ {
		b := a.in[a.r:a.w]
		if len(b) < (w.requests+1)*requestSize {
			return
		}
		r, err := parseRequest(b[w.requests*requestSize:])
		if err != nil || r.op != driver.OpRead || r.length > min(funcPiece, funcWindow-w.bytes) {
			return
		}
		m, status := a.check(r)
		if status != driver.Success || m.fn == nil {
			return
		}
		if r.length > 0 {
			a.beginCall(m.fn, r.addr, r.length)
		}
	}
}

// readFunc answers a READ of a function region. behind is how many requests behind it may execute. A failure is the
// request's while no byte of the answer is out; then it ends the connection.
func (a *agent) readFunc(m *mr, r request, behind int) (driver.Status, error) {
	from, end := r.addr, r.addr+uint64(r.length)
	if a.ahead.requests > 0 {
		a.ahead.requests--
		from = end
	}
	ok := reply{op: r.op, status: driver.Success, seq: a.seq, length: r.length}
	if r.length == 0 {
		a.out = appendReply(a.out, ok)
		return driver.Success, nil
	}
	for got := 0; got < r.length; {
		if m.dead.Load() { // waiting let go of exec, and Deregister waits for the calls that have begun
			if got == 0 {
				return driver.RemAccessErr, nil
			}
			return 0, errRevoked
		}
		for from < end && a.ahead.bytes < funcWindow {
			n := min(int(end-from), funcPiece, funcWindow-a.ahead.bytes)
			a.beginCall(m.fn, from, n)
			from += uint64(n)
		}
		if from == end {
			a.beginAhead(behind)
		}
		if got == 0 && from == end { // all of it is begun: the peer is told of a failure, and that somebody is there
			status, err := a.awaitAll(r.length)
			if status != driver.Success || err != nil {
				return status, err
			}
			if m.dead.Load() {
				return driver.RemAccessErr, nil
			}
		}
		c := a.ahead.calls[0]
		if err := a.awaitCall(c, got == 0); err != nil {
			if got > 0 {
				a.werr = err // within an answer: part, too, sends nothing more
			}
			return 0, err
		}
		a.ahead.calls[0] = nil
		a.ahead.calls = a.ahead.calls[1:]
		a.ahead.bytes -= len(c.b)
		switch {
		case c.status != driver.Success && got == 0:
			return c.status, nil
		case c.status != driver.Success:
			return 0, errRevoked
		case got == 0:
			a.out = appendReply(a.out, ok)
		}
		if len(a.out)+len(c.b) > agentOut {
			if err := a.flush(); err != nil {
				return 0, err
			}
		}
		a.out = append(a.out, c.b...)
		got += len(c.b)
	}
	return driver.Success, nil
}

// awaitAll waits for the calls of the first n bytes, of which none is out.
func (a *agent) awaitAll(n int) (driver.Status, error) {
	for i := 0; n > 0; i++ {
		c := a.ahead.calls[i]
		if err := a.awaitCall(c, true); err != nil {
			return 0, err
		}
		if c.status != driver.Success {
			return c.status, nil
		}
		n -= len(c.b)
	}
	return driver.Success, nil
}

// awaitCall waits for a call with exec free. If no byte of an answer is out, the peer is told meanwhile that somebody
// is there. It fails when the agent is fenced or the connection ends.
func (a *agent) awaitCall(c *call, between bool) error {
	for !c.isDone() {
		if len(a.out) > 0 {
			if err := a.flush(); err != nil {
				return err
			}
		}
		a.exec.Unlock()
		err := a.sleepFor(c, now()+a.l.d.o.PeerTimeout/2)
		a.resume()
		if err != nil {
			return err
		}
		if between && !c.isDone() {
			a.out = appendPaced(a.out, a.seq)
		}
	}
	return nil
}

// sleepFor reads nothing until c is done, or until then.
func (a *agent) sleepFor(c *call, until time.Duration) (err error) {
	m := a.nc.(*meteredConn)
	a.link.Lock()
	a.link.call = c // before done is looked at: the worker wakes those who say so
	if !a.fenced.Load() {
		_ = m.SetReadDeadline(epoch.Add(until))
	}
	a.link.Unlock()
	if !c.isDone() {
		err = m.awaitEnd()
	}
	a.link.Lock()
	defer a.link.Unlock()
	a.link.call = nil
	if a.fenced.Load() {
		return errFencedInCall
	}
	_ = m.SetReadDeadline(time.Time{})
	return err
}
