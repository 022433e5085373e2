package tcp

import (
	"errors"
	"math"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/kvd-project/kvd/internal/poll"
)

// A loop serves the agents of peers that say little at a time, many of them with
// one goroutine: as in Redis, what can be read is read, executed in place and
// answered, one agent after the other. That leaves out what a goroutine for each
// costs when there is one doorbell to a system call: the read that finds nothing,
// and the switches.
//
// It never waits for a peer. It executes requests that are buffered whole, and whose
// replies fit into the output buffer. An agent goes back to its own goroutine with
// whatever else comes: a longer WRITE, more replies, a peer that does not take
// them, an atomic that somebody else executes, a limit of verbs, a refusal, a fence, or the end.
//
// Locks are taken in the order agent.exec, device.mu, agent.link, loop.mu.
type loop struct {
	p    *poll.Poller
	cpu  *atomic.Int64 // ns in which it ran
	done chan struct{}

	mu struct {
		sync.Mutex
		agents   map[int]*agent // by descriptor
		recalled []*agent
		closed   bool
	}
}

const (
	// calmFrames is how many frames in a row have to be fit for a loop before an agent
	// goes back to one; maxCalm if it never stays there for long.
	calmFrames, maxCalm = 16, 1024
	// neverCalm keeps an agent with its goroutine.
	neverCalm = math.MaxInt
)

// buffers are an agent's. They are lent from a pool while there is something in
// them, and for as long as its goroutine serves it.
type buffers struct {
	in   []byte
	r, w int // in[r:w] is to be executed
	out  []byte
}

var pool = sync.Pool{New: func() any {
	return &buffers{in: make([]byte, agentIn), out: make([]byte, 0, 4<<10)}
}}

func takeBuffers() *buffers { return pool.Get().(*buffers) }

func (a *agent) releaseBuffers() {
	a.r, a.w, a.out = 0, 0, a.out[:0]
	pool.Put(a.buffers)
	a.buffers = nil
}

// loop is the loop for the next agent; nil if there is none.
func (l *listener) loop() *loop {
	l.loops.once.Do(func() {
		for range l.d.loops {
			lp, err := newLoop(&l.cpu)
			if err != nil {
				return // out of descriptors: there are fewer loops
			}
			l.loops.all = append(l.loops.all, lp)
			go lp.run()
		}
	})
	if len(l.loops.all) == 0 {
		return nil
	}
	return l.loops.all[l.loops.next.Add(1)%uint32(len(l.loops.all))]
}

// newLoop makes a loop that somebody has to run.
func newLoop(cpu *atomic.Int64) (*loop, error) {
	p, err := poll.New()
	if err != nil {
		return nil, err
	}
	l := &loop{p: p, cpu: cpu, done: make(chan struct{})}
	l.mu.agents = make(map[int]*agent)
	return l, nil
}

// run serves what is ready until the loop is closed.
func (l *loop) run() {
	defer close(l.done)
	for {
		ready, woken := l.p.Wait(-1)
		began := now()
		for _, fd := range ready {
			l.mu.Lock()
			a := l.mu.agents[fd]
			l.mu.Unlock()
			if a != nil { // it may have left since
				a.turn()
			}
		}
		if woken && l.woken() {
			return
		}
		l.cpu.Add(int64(now() - began))
	}
}

// woken sends agents that were recalled back, and reports whether the loop was
// closed.
func (l *loop) woken() (closed bool) {
	l.mu.Lock()
	recalled := l.mu.recalled
	l.mu.recalled, closed = nil, l.mu.closed
	l.mu.Unlock()
	for _, a := range recalled {
		a.exec.Lock()
		a.link.Lock()
		here := a.link.loop == l
		a.link.Unlock()
		if here {
			a.leaveLoop(nil)
		}
		a.exec.Unlock()
	}
	return closed
}

// recall makes the loop send a back to its goroutine. It does not wait for that.
func (l *loop) recall(a *agent) {
	l.mu.Lock()
	l.mu.recalled = append(l.mu.recalled, a)
	l.mu.Unlock()
	l.p.Wake()
}

// close ends a loop that has no agents any more, and waits for that.
func (l *loop) close() {
	l.mu.Lock()
	l.mu.closed = true
	l.mu.Unlock()
	l.p.Wake()
	<-l.done
	l.p.Close()
}

func (l *loop) add(fd int, a *agent) error {
	l.mu.Lock()
	l.mu.agents[fd] = a
	l.mu.Unlock()
	return l.p.Add(fd)
}

func (l *loop) remove(fd int) {
	l.p.Remove(fd)
	l.mu.Lock()
	delete(l.mu.agents, fd)
	l.mu.Unlock()
}

// enterLoop leaves the agent to a loop until there is something for its goroutine,
// which this is, to do: more than a loop executes, or the error that has ended the
// connection. An agent that cannot be in a loop stays out.
func (a *agent) enterLoop() error {
	if len(a.out) > 0 {
		if err := a.flush(); err != nil {
			return err
		}
	}
	a.quiet = 0
	l := a.l.loop()
	if l == nil || !a.join(l) {
		a.calm = maxCalm
		return nil
	}
	a.exec.Unlock()
	err := <-a.back
	a.resume()
	a.nc.(*meteredConn).since = now()
	if a.stayed < 8*a.calm {
		a.calm = min(2*a.calm, maxCalm)
	} else {
		a.calm = calmFrames
	}
	return err
}

// join hands the agent, which has nothing buffered, over to l. It reports false,
// and nothing has changed, if the agent is fenced or descriptors are out.
func (a *agent) join(l *loop) bool {
	m := a.nc.(*meteredConn)
	a.link.Lock()
	defer a.link.Unlock()
	if a.fenced.Load() {
		return false
	}
	fd, err := m.detach()
	if err != nil {
		return false
	}
	if err := l.add(fd, a); err != nil {
		l.remove(fd)
		m.attach()
		return false
	}
	a.link.loop, a.stayed = l, 0
	a.releaseBuffers()
	return true
}

// leaveLoop sends the agent from its loop back to its goroutine, whose enterLoop returns
// err. The caller holds exec.
func (a *agent) leaveLoop(err error) {
	m := a.nc.(*meteredConn)
	a.link.Lock()
	a.link.loop.remove(m.fd)
	a.link.loop = nil
	m.attach()
	if a.fenced.Load() {
		a.applyFence()
	}
	a.link.Unlock()
	if a.buffers == nil {
		a.buffers = takeBuffers()
	}
	a.back <- err
}

// turn is called by the loop when there is something to read: it reads, executes
// the requests that are whole, and writes their replies.
func (a *agent) turn() {
	a.resume()
	defer a.exec.Unlock()
	if a.buffers == nil {
		a.buffers = takeBuffers()
	}
	m := a.nc.(*meteredConn)
	n, err := m.readNow(a.in[a.w:])
	a.w += n
	if err == nil {
		a.stayed++
		err = a.executeBuffered()
	}
	switch {
	case errors.Is(err, syscall.EAGAIN):
	case errors.Is(err, errTooMuch):
		a.leaveLoop(nil)
		return
	case err != nil:
		a.leaveLoop(err)
		return
	}
	if a.r > 0 {
		a.w = copy(a.in, a.in[a.r:a.w])
		a.r = 0
	}
	if len(a.out) > 0 {
		n, err := m.writeNow(a.out)
		a.out = a.out[:copy(a.out, a.out[n:])]
		if err != nil && !errors.Is(err, syscall.EAGAIN) {
			a.werr = err
			a.leaveLoop(err)
			return
		}
		if len(a.out) > 0 {
			a.leaveLoop(nil)
			return
		}
	}
	if a.w == 0 {
		a.releaseBuffers()
	}
}

// errTooMuch: a request is not for a loop.
var errTooMuch = errors.New("more than a loop executes")

func (a *agent) executeBuffered() error {
	for {
		if a.frame.count == 0 {
			if a.w-a.r < frameSize {
				return nil
			}
			f, err := parseFrame(a.in[a.r:])
			if err != nil {
				return err
			}
			a.frame = f
			a.r += frameSize
		}
		n, fits := a.survey(agentOut - len(a.out))
		if l := a.pd.limit.Load(); l != nil {
			if k := l.take(n); k < n {
				n, fits = k, false
			}
		}
		if err := a.perform(n); err != nil {
			return err
		}
		if !fits {
			return errTooMuch
		}
		if a.frame.count > 0 {
			return nil
		}
	}
}
