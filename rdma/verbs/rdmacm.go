//go:build verbs && cgo && linux

package verbs

// #include "shim_cm.h"
import "C"

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/kvd-project/kvd/rdma/driver"
)

// manager is a device's access to the RDMA connection manager. A goroutine passes the events of its identifiers on.
type manager struct {
	d     *device
	ch    *C.struct_rdma_event_channel
	event *os.File
	done  chan struct{} // closed when the goroutine has ended
	mu    struct {
		sync.Mutex
		ids map[*C.struct_rdma_cm_id]func(*C.struct_kvd_cm_event)
	}
}

// cmBacklog is how many requests the kernel keeps for a listener.
const cmBacklog = 1024

// manager opens the connection manager when it is first needed; Close of the device closes it.
func (d *device) manager() (*manager, error) {
	d.cm.Lock()
	defer d.cm.Unlock()
	if d.cm.manager != nil {
		return d.cm.manager, nil
	}
	var why [256]C.char
	if rc := C.kvd_cm_load(&why[0], C.size_t(len(why))); rc != 0 {
		return nil, fmt.Errorf("RDMA connection manager: %s (install librdmacm1)", C.GoString(&why[0]))
	}
	m := &manager{d: d, done: make(chan struct{})}
	m.mu.ids = make(map[*C.struct_rdma_cm_id]func(*C.struct_kvd_cm_event))
	if rc := C.kvd_cm_open(&m.ch); rc != 0 {
		return nil, fmt.Errorf("RDMA connection manager: %w (modprobe rdma_ucm)", syscall.Errno(rc))
	}
	var err error
	if m.event, err = pollable(int(m.ch.fd), "verbs-cm"); err != nil {
		C.kvd_cm_close(m.ch)
		return nil, err
	}
	go m.run()
	d.cm.manager = m
	return m, nil
}

// close comes when no identifier is left.
func (m *manager) close() {
	_ = m.event.Close()
	<-m.done
	C.kvd_cm_close(m.ch)
}

func (m *manager) run() {
	defer close(m.done)
	waitReadable(m.event, func() bool {
		for {
			var e C.struct_kvd_cm_event
			m.mu.Lock() // an identifier may be given again only after its handler has gone
			rc := syscall.Errno(C.kvd_cm_next(m.ch, &e))
			id := e.id
			if e.listener != nil {
				id = e.listener
			}
			handle := m.mu.ids[id]
			m.mu.Unlock()
			switch {
			case rc == syscall.EAGAIN || rc == syscall.EINTR:
				return true
			case rc != 0:
				m.d.o.Logger.Error("RDMA connection manager", "device", m.d.info.Name, "err", rc)
				return rc != syscall.ENODEV && rc != syscall.EBADF
			case handle != nil:
				handle(&e)
			case e.listener != nil: // a request to a listener that is about to go
				m.refuse(e.id)
			}
		}
	})
}

// create makes an identifier, whose events handle gets. It must not block.
func (m *manager) create(handle func(*C.struct_kvd_cm_event)) (*C.struct_rdma_cm_id, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	var id *C.struct_rdma_cm_id
	if rc := C.kvd_cm_create(m.ch, &id); rc != 0 {
		return nil, fmt.Errorf("RDMA connection manager: create an identifier: %w", syscall.Errno(rc))
	}
	m.mu.ids[id] = handle
	return id, nil
}

// adopt gives a request's identifier a handler.
func (m *manager) adopt(id *C.struct_rdma_cm_id, handle func(*C.struct_kvd_cm_event)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.mu.ids[id] = handle
}

// drop ends an identifier and its connection; its queue pair is in error or gone by then.
func (m *manager) drop(id *C.struct_rdma_cm_id) {
	m.mu.Lock()
	delete(m.mu.ids, id)
	m.mu.Unlock()
	C.kvd_cm_destroy(id)
}

// refuse rejects a request.
func (m *manager) refuse(id *C.struct_rdma_cm_id) {
	_ = C.kvd_cm_reject(id)
	m.drop(id)
}

// managerAddr is the address that the connection manager knows our port by.
func (d *device) managerAddr() (netip.Addr, error) {
	a := d.choice.Addr
	if d.port.LinkLayer == "InfiniBand" {
		a = ipoibAddr(sysfsRoot(), d.info.Name, d.port.Number)
	}
	if !a.IsValid() || a.IsLinkLocalUnicast() {
		return a, fmt.Errorf("the RDMA connection manager needs an IP address of %s's port %d that is not link-local",
			d.info.Name, d.port.Number)
	}
	return a, nil
}

func cmAddr(a netip.AddrPort) (c C.struct_kvd_cm_addr) {
	for i, b := range a.Addr().As16() {
		c.ip[i] = C.uint8_t(b)
	}
	c.port = C.uint16_t(a.Port())
	return c
}

// cmDial is a dialer's use of the manager.
type cmDial struct {
	m      *manager
	id     *C.struct_rdma_cm_id
	events chan C.struct_kvd_cm_event
}

// wait takes the next event, which has to be want.
func (c *cmDial) wait(ctx context.Context, what string, want C.int) error {
	select {
	case e := <-c.events:
		if e._type == want && e.status == 0 {
			return nil
		}
		return fmt.Errorf("RDMA connection manager: %s: %w", what, cmError(&e))
	case <-ctx.Done():
		return fmt.Errorf("RDMA connection manager: %s: %w", what, ctx.Err())
	}
}

func cmError(e *C.struct_kvd_cm_event) error {
	switch e._type {
	case C.RDMA_CM_EVENT_REJECTED:
		return errors.New("the memory node awaits no such connection")
	case C.RDMA_CM_EVENT_UNREACHABLE:
		return errors.New("no answer")
	}
	if e.status < 0 {
		return syscall.Errno(-e.status)
	}
	return fmt.Errorf("event %d, status %d", int(e._type), int(e.status))
}

// resolveStep is how long the kernel waits for a neighbour's answer. It may miss an answer that comes before it waits,
// and looks again at the end, so the step is short, and taken again.
const resolveStep = 100 * time.Millisecond

// resolve finds the way to an address.
func (c *cmDial) resolve(ctx context.Context, own netip.Addr, at netip.AddrPort) error {
	from, to := cmAddr(netip.AddrPortFrom(own, 0)), cmAddr(at)
	what := fmt.Sprintf("resolve %v from %v", at, own)
	for {
		if rc := C.kvd_cm_resolve_addr(c.id, &from, &to, C.int(resolveStep/time.Millisecond)); rc != 0 {
			return fmt.Errorf("RDMA connection manager: %s: %w", what, syscall.Errno(rc))
		}
		err := c.wait(ctx, what, C.RDMA_CM_EVENT_ADDR_RESOLVED)
		if err == nil || ctx.Err() != nil || !errors.Is(err, syscall.ETIMEDOUT) {
			return err
		}
	}
}

// connectCM moves q from INIT to RTS by the manager, with the peer that r tells of.
func (q *qp) connectCM(ctx context.Context, local, remote *endpoint, r *rendezvous) (err error) {
	d := q.d
	ctx, cancel := context.WithTimeout(ctx, d.o.HandshakeTimeout)
	defer cancel()
	p, err := d.path(local, remote)
	if err != nil {
		return err
	}
	own, err := d.managerAddr()
	if err != nil {
		return err
	}
	m, err := d.manager()
	if err != nil {
		return err
	}
	c := cmDial{m: m, events: make(chan C.struct_kvd_cm_event, 8)}
	if c.id, err = m.create(func(e *C.struct_kvd_cm_event) {
		select {
		case c.events <- *e:
		default: // nobody waits for more than a few
		}
	}); err != nil {
		return err
	}
	q.cmID = c.id // end drops it
	if err := c.resolve(ctx, own, r.at); err != nil {
		return err
	}
	if C.kvd_cm_is_at(c.id, d.ctx, C.int(d.port.Number)) == 0 {
		return fmt.Errorf("RDMA connection manager: the way from %v to %v is not by %s port %d", own, r.at, d.info.Name,
			d.port.Number)
	}
	if rc := C.kvd_cm_resolve_route(c.id, C.int(d.o.HandshakeTimeout/time.Millisecond)); rc != 0 {
		return fmt.Errorf("RDMA connection manager: route to %v: %w", r.at, syscall.Errno(rc))
	}
	if err := c.wait(ctx, fmt.Sprintf("route to %v", r.at), C.RDMA_CM_EVENT_ROUTE_RESOLVED); err != nil {
		return err
	}
	private := r.nonce.private()
	var data [cmPrivateSize]C.uint8_t
	for i, b := range private {
		data[i] = C.uint8_t(b)
	}
	if rc := C.kvd_cm_connect(c.id, q.c, &data[0], cmPrivateSize, C.int(p.initiator_depth), 1); rc != 0 {
		return fmt.Errorf("RDMA connection manager: connect %v: %w", r.at, syscall.Errno(rc))
	}
	what := fmt.Sprintf("connect %v", r.at)
	if d.iwarp() { // the adapter has moved the queue pair
		return c.wait(ctx, what, C.RDMA_CM_EVENT_ESTABLISHED)
	}
	if err := c.wait(ctx, what, C.RDMA_CM_EVENT_CONNECT_RESPONSE); err != nil {
		return err
	}
	if err := modifyCM(c.id, q.c, &p, C.IBV_QPS_RTR, C.IBV_QPS_RTS); err != nil {
		return err
	}
	if rc := C.kvd_cm_establish(c.id); rc != 0 {
		return fmt.Errorf("RDMA connection manager: establish: %w", syscall.Errno(rc))
	}
	return nil
}

func modifyCM(id *C.struct_rdma_cm_id, qp *C.struct_ibv_qp, p *C.struct_kvd_path, states ...uint32) error {
	for _, s := range states {
		if rc := C.kvd_cm_modify(id, qp, s, p); rc != 0 {
			return fmt.Errorf("QP to %s by the connection manager: %w", map[uint32]string{C.IBV_QPS_RTR: "RTR",
				C.IBV_QPS_RTS: "RTS"}[s], syscall.Errno(rc))
		}
	}
	return nil
}

// cmListener is a listener's use of the manager. A nonce is in waiting from before its welcome until its request comes,
// its time is over or its control channel ends: there are at most as many as peers.
type cmListener struct {
	sync.Mutex
	m       *manager
	id      *C.struct_rdma_cm_id
	at      netip.AddrPort
	ended   bool
	waiting map[nonce]*peer
}

// open listens by the manager, once.
func (c *cmListener) open(l *listener) error {
	c.Lock()
	defer c.Unlock()
	if c.ended {
		return driver.ErrClosed
	}
	if c.id != nil {
		return nil
	}
	own, err := l.d.managerAddr()
	if err != nil {
		return err
	}
	m, err := l.d.manager()
	if err != nil {
		return err
	}
	id, err := m.create(func(e *C.struct_kvd_cm_event) {
		if e._type == C.RDMA_CM_EVENT_CONNECT_REQUEST {
			l.request(m, e)
		}
	})
	if err != nil {
		return err
	}
	a := cmAddr(netip.AddrPortFrom(own, 0))
	if rc := C.kvd_cm_listen(id, &a, cmBacklog); rc != 0 {
		m.drop(id)
		return fmt.Errorf("RDMA connection manager: listen at %v: %w", own, syscall.Errno(rc))
	}
	c.m, c.id, c.at = m, id, netip.AddrPortFrom(own, uint16(a.port))
	c.waiting = make(map[nonce]*peer)
	return nil
}

// close takes no request any more.
func (c *cmListener) close() {
	c.Lock()
	id := c.id
	c.id, c.ended = nil, true
	c.Unlock()
	if id != nil {
		c.m.drop(id)
	}
}

// await makes a nonce for p, whose connection has to come within the handshake's time.
func (c *cmListener) await(p *peer) (r rendezvous) {
	_, _ = rand.Read(r.nonce[:]) // never fails
	c.Lock()
	defer c.Unlock()
	r.at = c.at
	c.waiting[r.nonce] = p
	p.nonce = r.nonce
	p.overdue = time.AfterFunc(p.l.d.o.HandshakeTimeout, func() {
		if c.take(r.nonce) != nil {
			p.wake()
		}
	})
	return r
}

// take ends the wait for a nonce's connection; nil if nobody waits for it.
func (c *cmListener) take(n nonce) *peer {
	c.Lock()
	defer c.Unlock()
	p := c.waiting[n]
	delete(c.waiting, n)
	return p
}

// request takes a connection request. The nonce in it came over the control channel of the peer that it is for.
func (l *listener) request(m *manager, e *C.struct_kvd_cm_event) {
	b := make([]byte, e.len)
	for i := range b {
		b[i] = byte(e.data[i])
	}
	var p *peer
	if n, ok := parsePrivate(b); ok && C.kvd_cm_is_at(e.id, l.d.ctx, C.int(l.d.port.Number)) != 0 {
		l.cm.Lock()
		if p = l.cm.waiting[n]; p != nil {
			delete(l.cm.waiting, n)
			l.wg.Add(1) // p's own count is still there
		}
		l.cm.Unlock()
	}
	if p == nil {
		l.d.o.Logger.Debug("RDMA connection request refused: nobody awaits it", "device", l.d.info.Name)
		m.refuse(e.id)
		return
	}
	id, depth := e.id, e.initiator_depth
	go func() {
		defer l.wg.Done()
		p.overdue.Stop()
		if err := p.acceptCM(m, id, depth); err != nil {
			l.d.o.Logger.Debug("RDMA connection not made", "remote", p.remote, "err", err)
			m.refuse(id)
			p.wake()
		}
	}()
}

// acceptCM connects the peer's queue pair. If it fails the request is still the caller's.
func (p *peer) acceptCM(m *manager, id *C.struct_rdma_cm_id, depth C.uint8_t) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.dead {
		return errors.New("fenced while connecting")
	}
	if !p.l.d.iwarp() {
		states := []uint32{C.IBV_QPS_RTR}
		if p.agent != nil {
			states = append(states, C.IBV_QPS_RTS)
		}
		if err := modifyCM(id, p.qp, &p.path, states...); err != nil {
			return err
		}
	}
	m.adopt(id, func(e *C.struct_kvd_cm_event) {
		switch e._type {
		case C.RDMA_CM_EVENT_ESTABLISHED, C.RDMA_CM_EVENT_TIMEWAIT_EXIT, C.RDMA_CM_EVENT_ADDR_CHANGE:
		default:
			p.wake()
		}
	})
	if rc := C.kvd_cm_accept(id, p.qp, 1, C.int(min(depth, p.path.responder_depth))); rc != 0 {
		return fmt.Errorf("RDMA connection manager: accept: %w", syscall.Errno(rc))
	}
	p.cmID = id
	return nil
}
