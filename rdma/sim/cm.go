package sim

import (
	"context"
	"fmt"
	"slices"

	"github.com/kvd-project/kvd/rdma/driver"
)

var (
	_ driver.Listener = (*listener)(nil)
	_ driver.Peer     = (*peer)(nil)
)

// listener is guarded by Fabric.mu, but for its constant fields.
type listener struct {
	dev    *device
	addr   string
	o      driver.ListenOptions
	peers  []*peer // of QPs not closed by their dialer
	closed bool
}

// peer is the passive side of one QP; guarded by Fabric.mu.
type peer struct {
	l      *listener
	q      *qp // nil until Accept has agreed
	remote string
	gone   bool // fenced; nothing can land
}

func (d *device) Listen(addr string, o driver.ListenOptions) (driver.Listener, error) {
	f := d.f
	f.mu.Lock()
	defer f.mu.Unlock()
	if d.closed || d.crashed {
		return nil, driver.ErrClosed
	}
	if o.Accept == nil {
		return nil, fmt.Errorf("listen %q: no Accept", addr)
	}
	if addr == "" {
		f.mu.ports++
		addr = fmt.Sprintf("%s:%d", d.name, f.mu.ports)
	}
	if f.mu.listeners[addr] != nil {
		return nil, fmt.Errorf("listen %q: address in use", addr)
	}
	l := &listener{dev: d, addr: addr, o: o}
	f.mu.listeners[addr] = l
	d.listeners++
	return l, nil
}

func (d *device) Dial(ctx context.Context, r driver.DialRequest) (driver.QP, error) {
	f := d.f
	local, _ := r.PD.(*pd)
	c, _ := r.CQ.(*cq)
	if local == nil || c == nil || local.dev != d || c.dev != d {
		return nil, fmt.Errorf("PD or CQ is not of device %q", d.name)
	}
	if len(r.Private) > driver.MaxPrivate {
		return nil, fmt.Errorf("private data %d bytes, at most %d", len(r.Private), driver.MaxPrivate)
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	f.mu.Lock()
	l := f.mu.listeners[r.Addr]
	reachable := l != nil && !l.dev.crashed
	f.mu.Unlock()
	if !reachable {
		return nil, fmt.Errorf("nobody listens at %q", r.Addr)
	}
	p := &peer{l: l, remote: "sim " + d.name}
	accepted, limit, err := l.o.Accept(driver.ConnRequest{Private: slices.Clone(r.Private), Remote: p.remote, Peer: p})
	if err != nil {
		return nil, fmt.Errorf("%w: %v", driver.ErrRefused, err)
	}
	target, _ := accepted.(*pd)
	if target == nil || target.dev != l.dev {
		return nil, fmt.Errorf("%w: Accept gave a PD that is not of device %q", driver.ErrRefused, l.dev.name)
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case d.closed || d.crashed || local.gone || c.closed:
		return nil, driver.ErrClosed
	case l.closed || l.dev.crashed || target.gone || p.gone:
		return nil, fmt.Errorf("%w: it is closing", driver.ErrRefused)
	}
	q := &qp{f: f, num: f.mu.nextQP, dev: d, pd: local, cq: c, targetPD: target, limit: limit, peer: p,
		state: driver.StateRTS, busyAt: -1}
	f.mu.nextQP++
	f.mu.qps = append(f.mu.qps, q)
	l.peers = append(l.peers, p)
	p.q = q
	d.qps++
	local.qps++
	target.qps++
	c.qps++
	return q, nil
}

func (l *listener) Addr() string    { return l.addr }
func (l *listener) CPUNanos() int64 { return 0 }

func (l *listener) Close() error {
	f := l.dev.f
	f.mu.Lock()
	var gone []*peer
	if !l.closed {
		l.closed = true
		delete(f.mu.listeners, l.addr)
		l.dev.listeners--
		for _, p := range l.peers {
			if p.fenceLocked() {
				gone = append(gone, p)
			}
		}
	}
	f.mu.Unlock()
	for _, p := range gone {
		p.notify()
	}
	return nil
}

func (p *peer) Remote() string { return p.remote }

// Fence confirms at once. In manual mode it drops what is in the network; a
// caller that wants some of it to land fires that first.
func (p *peer) Fence(context.Context) error {
	f := p.l.dev.f
	f.mu.Lock()
	gone := p.fenceLocked()
	f.mu.Unlock()
	if gone {
		p.notify()
	}
	return nil
}

// fenceLocked ends the connection and tells whether it was the first to.
func (p *peer) fenceLocked() bool {
	if p.gone {
		return false
	}
	p.gone = true
	if p.q == nil { // still in Accept; Dial sees gone
		return false
	}
	p.q.killLocked()
	p.q.settleLocked()
	p.q.targetPD.qps--
	return true
}

func (p *peer) notify() {
	if p.l.o.Closed != nil {
		p.l.o.Closed(p)
	}
}
